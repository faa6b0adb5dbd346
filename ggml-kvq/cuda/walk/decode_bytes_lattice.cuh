// Decode attention in 8-bit products over lattice pages of 2 bits a value: grids of 16 points of two channels
// (types/lattice.h). A point's coordinates are whole numbers of its grid's step, 63 at most; 64 more they are bytes
// of 7 bits. Four indices find four bytes in a table of 16 in registers: one byte permutation takes the lower 8
// entries or, where an index has its upper bit, the sign of one, which is 0; another one takes the upper 8 likewise.
//
//   word of 8 indices: index 2b + p is that of byte b and plane p
//   its lower half gives the first coordinates of four vectors in a register, then the second ones; so does its upper
#pragma once

#include "cuda/lattice.cuh"
#include "decode_bytes.cuh"
#include "decode_lattice.cuh"
#include "types/lattice_grids.h"

namespace {

constexpr int POINT_MIDDLE = KVQ_POINT_MIDDLE;
constexpr float POINT_STEP = (float) kvq_grid_step_d2_n16 / 4096.0f;

// The stage: indices of K and V, then scales of 64 cells in f32, of keys and of values; both as they came.
template <int D> struct byte_lattice_map {
    static constexpr int K = 0, V = 4 * (D / 2 * 4 / 32) * 64, SCALES = 2 * V, RAW = SCALES + 8 * DECODE_CELLS,
                         BYTES = RAW + 4 * DECODE_CELLS;
};

// bytes of low and high by the four lowest nibbles of `at`; 0 or 255, the sign of a byte, where one has its upper bit
__device__ __forceinline__ uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t at) {
    uint32_t y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(at));
    return y;
}

struct point_bytes { // of 16 points: first coordinates, second ones
    uint4 x, y;
};
static __device__ __forceinline__ uint32_t points_of(const uint4 & table, uint32_t at, uint32_t flipped) {
    return pick_bytes(table.x, table.y, at) | pick_bytes(table.z, table.w, flipped);
}
// coordinates of a word's 8 vectors: [half][coordinate]
static __device__ __forceinline__ void points_of_word(const point_bytes & t, uint32_t word, uint32_t (&out)[2][2]) {
    const uint32_t flipped = word ^ 0x88888888u;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        out[h][0] = points_of(t.x, word >> 16 * h, flipped >> 16 * h);
        out[h][1] = points_of(t.y, word >> 16 * h, flipped >> 16 * h);
    }
}

// from: 32 bytes of shared memory, read anew for each unit
__device__ __forceinline__ point_bytes load_points(const uint8_t * from) {
    return { ((const uint4 *) from)[0], ((const uint4 *) from)[1] };
}
// Asks for those, which lie behind the grid's points (kvq_cuda_device::geometry).
__device__ __forceinline__ void copy_points_of_16(uint8_t * to, const float * points) {
    const int i = threadIdx.x;
    if (i < 2) { copy16((uint32_t) __cvta_generic_to_shared(to + 16 * i), points + KVQ_POINT_BYTES + 4 * i); }
}

// sums of a column's bytes, of which b0 and b1 are a right operand, added to sums
__device__ __forceinline__ void add_ones(int (&sums)[4], uint32_t b0, uint32_t b1, bool is_signed) {
    const uint32_t ones[4] = { 0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u };
    if (is_signed) {
        const uint32_t b[2] = { b0, b1 };
        mma_signed(sums, ones, b);
    } else {
        mma_unsigned(sums, ones, b0, b1);
    }
}

// The largest magnitude of column g's row in a rotated query.
template <int D> __device__ __forceinline__ float most_of_query(const shared_query & q) {
    __half2 most = __float2half2_rn(0.0f);
#pragma unroll
    for (int t = 0; t < D / 16; t++) {
        const uint2 x = query_of(q, t);
        most = __hmax2(most, __hmax2(__habs2(as_half2(x.x)), __habs2(as_half2(x.y))));
    }
    return most_of_row(most);
}

// Right operands of the scores of all cells. q: rotated, row g/2 in column g (E = 2: row g).
template <int D, int E>
__device__ __forceinline__ void quantise_rotated(const shared_query & q, byte_query<D, E> & out) {
    constexpr int S = D / 16;
    const int lane = threadIdx.x % 32, c = lane % 4;
    const float top = most_of_query<D>(q);
    byte_sums<E> sums;
#pragma unroll
    for (int part = 0; part < E; part++) {
        const byte_digits digits = digits_up_to<E>(top, part);
#pragma unroll
        for (int w = 0; w < S / 4; w++) { // a word: 4 steps of 4 channels, vectors 0 .. 7
#pragma unroll
            for (int h = 0; h < 2; h++) { // vectors 0, 4, 1, 5, then 2, 6, 3, 7
                const uint2 a = query_of(q, 4 * w + h), b = query_of(q, 4 * w + 2 + h);
                const float2 v[4] = { __half22float2(as_half2(a.x)), __half22float2(as_half2(b.x)),
                    __half22float2(as_half2(a.y)), __half22float2(as_half2(b.y)) };
                uint32_t (&x)[2] = out.x[part][2 * w + h];
                x[0] = digits.four(v[0].x, v[1].x, v[2].x, v[3].x, digits.by);
                x[1] = digits.four(v[0].y, v[1].y, v[2].y, v[3].y, digits.by);
                add_ones(sums.at[part], x[0], x[1], true);
            }
        }
    }
#pragma unroll
    for (int e = 0; e < E; e++) {
        out.middle[e] = POINT_MIDDLE * sums.whole(0, e);
        out.step[e] = __shfl_sync(~0u, top, E == 1 ? 8 * c : 4 * (2 * c + e)) * (POINT_STEP / QUERY_MOST);
    }
}

// The same of more than 4 rows, which would not all find registers: in shared memory, in place of the rotated queries.
// at: of this lane, [2w + h]: upper bytes, lower ones. rows: middle and step of this thread's
struct shared_bytes {
    static constexpr int ROWS = DECODE_COLUMNS * (int) sizeof(int2); // bytes
    const uint4 * at;
    const int4 * rows;
};
// right operand n of all cells; middle and step of a thread's rows
template <int D> __device__ __forceinline__ uint4 operand_of(const byte_query<D, 1> & q, int n) {
    return make_uint4(q.x[0][n][0], q.x[0][n][1], 0, 0);
}
__device__ __forceinline__ uint4 operand_of(const shared_bytes & q, int n) { return q.at[32 * n]; }
template <int D> __device__ __forceinline__ int4 rows_of(const byte_query<D, 1> & q) {
    return { q.middle[0], __float_as_int(q.step[0]), 0, 0 };
}
__device__ __forceinline__ int4 rows_of(const shared_bytes & q) { return *q.rows; }

// s = sums, less what the MIDDLE of points adds, times the scales of a block's cells; MORE: s += them. scales: of this
// thread's first cell
template <bool MORE, bool MIDDLE, int E, typename Q>
__device__ __forceinline__ void put_sums(
    const byte_sums<E> (&sums)[4], const uint8_t * scales, const Q & q, float (&s)[2 * E][4]) {
    const int4 rows = rows_of(q);
    const int middle[2] = { MIDDLE ? rows.x : 0, MIDDLE ? rows.z : 0 };
    const float step[2] = { __int_as_float(rows.y), __int_as_float(rows.w) };
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 scale = *(const float2 *) (scales + 16 * j);
#pragma unroll
        for (int n = 0; n < 2 * E; n++) {
            const int b = n / E, e = n % E, at = score_at<E>(j, b, e);
            const float f = step[e] * (b ? scale.y : scale.x), x = (float) (sums[j].whole(b, e) - middle[e]);
            s[at / 4][at % 4] = MORE ? fmaf(x, f, s[at / 4][at % 4]) : x * f;
        }
    }
}

// as score_bytes, at score_at. q: byte_query of E = 1, shared_bytes of E = 2
template <int D, int E, typename Q>
__device__ __forceinline__ void score_points(
    const point_bytes & table, const Q & q, const uint8_t * stage, float (&s)[2 * E][4]) {
    constexpr int N = D / 2 * 4 / 32 * 4;
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, tile = g / 2;
    const uint8_t * words = stage + byte_lattice_map<D>::K + tile * N * 16 + g % 2 * 8 + c * 64;
    byte_sums<E> sums[4];
#pragma unroll
    for (int w = 0; w < D / 64; w++) {
        const uint4 y[2] = { operand_of(q, 2 * w), operand_of(q, 2 * w + 1) };
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint2 x = *(const uint2 *) (words + w * 256 + (j ^ tile) * 16);
            uint32_t a[2][2], b[2][2];
            points_of_word(table, x.x, a);
            points_of_word(table, x.y, b);
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int part = 0; part < E; part++) {
                    const uint32_t right[2] = { part ? y[h].z : y[h].x, part ? y[h].w : y[h].y };
                    mma_signed(sums[j].at[part], { a[h][0], b[h][0], a[h][1], b[h][1] }, right);
                }
            }
        }
    }
    const uint8_t * scales = stage + byte_lattice_map<D>::SCALES + 8 * (8 * tile + g % 2);
    put_sums<false, true>(sums, scales, q, s);
}

// as accumulate_bytes, of rows E*c + e: channels 32i + 4g + 2r, + 1 at o[2i + r][e], o[2i + r][E + e]. o: rotated, and
// before `middle`, what the middle of points has added to each channel, comes off
template <int D, int E, typename MAP = byte_lattice_map<D>>
__device__ __forceinline__ void accumulate_points(const point_bytes & table, const uint8_t * stage,
    const float (&s)[2 * E][4], const float (&rest)[E], float (&o)[D / 16][2 * E], float (&middle)[E]) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const uint8_t * const scales = stage + MAP::SCALES + 4 * DECODE_CELLS + 8 * (8 * (g / 2) + g % 2);
    float2 scale[4];
#pragma unroll
    for (int j = 0; j < 4; j++) { scale[j] = *(const float2 *) (scales + 16 * j); }
    uint32_t p[E][4];
    const float unit = byte_probabilities<E>(scale, [](int) { return 1.0f; }, s, p) * POINT_STEP;
    uint32_t b[E][2][2]; // in the order of a word's indices
    byte_sums<E> ones;
#pragma unroll
    for (int part = 0; part < E; part++) {
#pragma unroll
        for (int w = 0; w < 2; w++) {
            b[part][w][0] = __byte_perm(p[part][2 * w], p[part][2 * w + 1], 0x5140);
            b[part][w][1] = __byte_perm(p[part][2 * w], p[part][2 * w + 1], 0x7362);
            add_ones(ones.at[part], b[part][w][0], b[part][w][1], false);
        }
    }
    float step[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
        step[e] = unit * rest[e];
        middle[e] = fmaf((float) ones.whole(0, e), POINT_MIDDLE * step[e], middle[e]);
    }
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        uint2 x[2];
#pragma unroll
        for (int w = 0; w < 2; w++) {
            x[w] = *(
                const uint2 *) (stage + MAP::V + i * 512 + c * 128 + ((w * 4 + g / 2) ^ 2 * (c % 4)) * 16 + g % 2 * 8);
        }
#pragma unroll
        for (int v = 0; v < 2; v++) { // channels 32i + 4g + 2v, + 1
            byte_sums<E> sums;
#pragma unroll
            for (int w = 0; w < 2; w++) {
                uint32_t a[2][2];
                points_of_word(table, v ? x[w].y : x[w].x, a);
#pragma unroll
                for (int part = 0; part < E; part++) {
                    mma_unsigned(sums.at[part], { a[0][0], a[0][1], a[1][0], a[1][1] }, b[part][w][0], b[part][w][1]);
                }
            }
#pragma unroll
            for (int n = 0; n < 2 * E; n++) {
                o[2 * i + v][n] = fmaf((float) sums.whole(n / E, n % E), step[n % E], o[2 * i + v][n]);
            }
        }
    }
}

} // namespace

// Decode attention in 8-bit products over lattice pages of 2 bits a value: grids of 16 points of two channels
// (types/lattice.h). A point's coordinates are whole numbers of its grid's step, 63 at most; 64 more they are bytes
// of 7 bits. Four indices find four bytes in a table of 16 in registers: one byte permutation takes the lower 8
// entries or, where an index has its upper bit, the sign of one, which is 0; another one takes the upper 8 likewise.
//
//   word of 8 indices: index 2b + p is that of byte b and plane p
//   its lower half gives the first coordinates of four vectors in a register, then the second ones; so does its upper
#pragma once

#include "decode_bytes.cuh"
#include "decode_lattice.cuh"
#include "types/lattice_grids.h"

namespace {

constexpr int POINT_MIDDLE = 64;
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
// to: those, behind a barrier
__device__ __forceinline__ void share_points(uint8_t * to, const float * points) {
    if (threadIdx.x < 32) {
        to[threadIdx.x % 2 * 16 + threadIdx.x / 2] =
            (uint8_t) (POINT_MIDDLE + (int) rintf(__ldg(points + threadIdx.x) * (1.0f / POINT_STEP)));
    }
}

// Right operands of the scores of all cells. q: rotated, row g/2 in column g.
template <int D> __device__ __forceinline__ void quantise_rotated(const shared_query & q, byte_query<D> & out) {
    constexpr int S = D / 16;
    const int lane = threadIdx.x % 32, c = lane % 4;
    __half2 most = __float2half2_rn(0.0f);
#pragma unroll
    for (int t = 0; t < S; t++) {
        const uint2 x = query_of(q, t);
        most = __hmax2(most, __hmax2(__habs2(as_half2(x.x)), __habs2(as_half2(x.y))));
    }
    const float top = most_of_row(most);
    const byte_digits digits = digits_up_to(top);
    int sums[4] = {};
#pragma unroll
    for (int w = 0; w < S / 4; w++) { // a word: 4 steps of 4 channels, vectors 0 .. 7
#pragma unroll
        for (int h = 0; h < 2; h++) { // vectors 0, 4, 1, 5, then 2, 6, 3, 7
            const uint2 a = query_of(q, 4 * w + h), b = query_of(q, 4 * w + 2 + h);
            const float2 v[4] = { __half22float2(as_half2(a.x)), __half22float2(as_half2(b.x)),
                __half22float2(as_half2(a.y)), __half22float2(as_half2(b.y)) };
            out.x[2 * w + h][0] = digits.four(v[0].x, v[1].x, v[2].x, v[3].x, digits.by);
            out.x[2 * w + h][1] = digits.four(v[0].y, v[1].y, v[2].y, v[3].y, digits.by);
            mma_signed(sums, { 0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u }, out.x[2 * w + h]);
        }
    }
    out.middle = POINT_MIDDLE * (256 * sums[0] + sums[1]);
    out.step = __shfl_sync(~0u, top, 8 * c) * (POINT_STEP / QUERY_MOST);
}

// as score_bytes
template <int D>
__device__ __forceinline__ void score_points(
    const point_bytes & table, const byte_query<D> & q, const uint8_t * stage, float (&s)[2][4]) {
    constexpr int N = D / 2 * 4 / 32 * 4;
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, tile = g / 2;
    const uint8_t * words = stage + byte_lattice_map<D>::K + tile * N * 16 + g % 2 * 8 + c * 64;
    int sums[4][4] = {};
#pragma unroll
    for (int w = 0; w < D / 64; w++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint2 x = *(const uint2 *) (words + w * 256 + (j ^ tile) * 16);
            uint32_t a[2][2], b[2][2];
            points_of_word(table, x.x, a);
            points_of_word(table, x.y, b);
#pragma unroll
            for (int h = 0; h < 2; h++) { mma_signed(sums[j], { a[h][0], b[h][0], a[h][1], b[h][1] }, q.x[2 * w + h]); }
        }
    }
    const uint8_t * scales = stage + byte_lattice_map<D>::SCALES + 8 * (8 * tile + g % 2);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 scale = *(const float2 *) (scales + 16 * j);
        s[j / 2][j % 2 * 2] = (float) (256 * sums[j][0] + sums[j][1] - q.middle) * (q.step * scale.x);
        s[j / 2][j % 2 * 2 + 1] = (float) (256 * sums[j][2] + sums[j][3] - q.middle) * (q.step * scale.y);
    }
}

// as accumulate_bytes; o: rotated, and before `middle`, what the middle of points has added to each channel, comes off
template <int D>
__device__ __forceinline__ void accumulate_points(const point_bytes & table, const uint8_t * stage,
    const float (&s)[2][4], float rest, float (&o)[D / 16][2], float & middle) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const uint8_t * const scales = stage + byte_lattice_map<D>::SCALES + 4 * DECODE_CELLS + 8 * (8 * (g / 2) + g % 2);
    float2 scale[4];
#pragma unroll
    for (int j = 0; j < 4; j++) { scale[j] = *(const float2 *) (scales + 16 * j); }
    uint32_t p[4];
    const float step = byte_probabilities(scale, [](int) { return 1.0f; }, s, p) * (rest * POINT_STEP);
    uint32_t b[2][2]; // in the order of a word's indices
#pragma unroll
    for (int w = 0; w < 2; w++) {
        b[w][0] = __byte_perm(p[2 * w], p[2 * w + 1], 0x5140);
        b[w][1] = __byte_perm(p[2 * w], p[2 * w + 1], 0x7362);
    }
    int ones[4] = {};
#pragma unroll
    for (int w = 0; w < 2; w++) {
        mma_unsigned(ones, { 0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u }, b[w][0], b[w][1]);
    }
    middle = fmaf(both_bytes(ones[0], ones[1]), POINT_MIDDLE * step, middle);
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        uint2 x[2];
#pragma unroll
        for (int w = 0; w < 2; w++) {
            x[w] = *(const uint2 *) (stage + byte_lattice_map<D>::V + i * 512 + c * 128 +
                ((w * 4 + g / 2) ^ 2 * (c % 4)) * 16 + g % 2 * 8);
        }
#pragma unroll
        for (int v = 0; v < 2; v++) { // channels 32i + 4g + 2v, + 1
            int sums[4] = {};
#pragma unroll
            for (int w = 0; w < 2; w++) {
                uint32_t a[2][2];
                points_of_word(table, v ? x[w].y : x[w].x, a);
                mma_unsigned(sums, { a[0][0], a[0][1], a[1][0], a[1][1] }, b[w][0], b[w][1]);
            }
            o[2 * i + v][0] = fmaf(both_bytes(sums[0], sums[1]), step, o[2 * i + v][0]);
            o[2 * i + v][1] = fmaf(both_bytes(sums[2], sums[3]), step, o[2 * i + v][1]);
        }
    }
}

} // namespace

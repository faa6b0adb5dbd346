// Decode attention in 8-bit products over all other lattice pages with grids of two channels: split keys, and keys and
// values of 1 to 4 bits. The coordinates of a grid are whole numbers of its step, 127 at most (types/lattice.h), so a
// byte with sign holds them as they are. A table in shared memory gives both coordinates of an index in one look-up of
// 2 bytes: points of neighbouring channels then fill a register of keys, points of neighbouring cells one of values.
// With 1 bit the four points fill two registers, and byte permutations take them from there. Values of 2 bits are those
// of decode_bytes_lattice.cuh. E, and the operands of more than 4 query rows, are those of that file.
#pragma once

#include "decode_bytes_lattice.cuh"

#include <type_traits>

namespace {

template <int KB, int VB> constexpr bool is_tabled = KB > LATTICE && (KB != LATTICE + 4 || VB != LATTICE + 4);
// one step of a grid's coordinates, by bits of an index
template <int B>
constexpr float GRID_STEP = (float) (B == 2  ? kvq_grid_step_d2_n4
                                    : B == 4 ? kvq_grid_step_d2_n16
                                    : B == 6 ? kvq_grid_step_d2_n64
                                             : kvq_grid_step_d2_n256) /
    4096.0f;

// The stage: indices as in lattice_map, then scales of 64 cells in f32 times the grid's step, of keys (the slow half),
// of values, of the fast half; all of them as they came.
template <int D, int KB, int VB> struct byte_table_map : lattice_map<D, KB, VB> {
    using codes = lattice_map<D, KB, VB>;
    static constexpr int N = fast_of<KB> ? 3 : 2, SCALES = codes::SCALES, RAW = SCALES + N * 4 * DECODE_CELLS,
                         BYTES = RAW + N * 128;
};
template <int D, int KB, int VB>
using points_map = std::conditional_t<is_tabled<KB, VB>, byte_table_map<D, KB, VB>, byte_lattice_map<D>>;

// entries of a table, which is a multiple of 16 bytes
template <int B> constexpr int nb_entries = B < 3 ? 8 : 1 << B;
template <int KB>
constexpr int key_entries = nb_entries<cut<slow_of<KB>>::B> + (fast_of<KB> ? nb_entries<cut<fast_of<KB>>::B> : 0);
// The points of a block: of values of 2 bits as copy_points_of_16 leaves them, then tables of keys, of other values.
template <int KB, int VB> __host__ __device__ constexpr int nb_points() {
    return 32 + (is_tabled<KB, VB> ? 2 * (key_entries<KB> + (VB == LATTICE + 4 ? 0 : nb_entries<cut<VB>::B>) ) : 0);
}
// Asks for a table, which lies behind its grid's points (kvq_cuda_device::geometry).
template <int B> __device__ __forceinline__ void copy_table(uint16_t * to, const float * points) {
    const int i = threadIdx.x;
    if (i < nb_entries<B> / 8) {
        copy16((uint32_t) __cvta_generic_to_shared(to + 8 * i), points + KVQ_GRID_BYTES + 4 * i);
    }
}
template <int KB> __device__ __forceinline__ uint16_t * slow_table(uint8_t * points) {
    return (uint16_t *) points + 16;
}
template <int KB> __device__ __forceinline__ uint16_t * fast_table(uint8_t * points) {
    return slow_table<KB>(points) + nb_entries<cut<slow_of<KB>>::B>;
}
template <int KB> __device__ __forceinline__ uint16_t * value_table(uint8_t * points) {
    return slow_table<KB>(points) + key_entries<KB>;
}
template <int KB, int VB> __device__ __forceinline__ void copy_tables(const kvq_attend_args & a, uint8_t * points) {
    if constexpr (VB == LATTICE + 4) { copy_points_of_16(points, a.v.points); }
    if constexpr (!is_tabled<KB, VB>) { return; }
    copy_table<cut<slow_of<KB>>::B>(slow_table<KB>(points), a.k.points);
    if constexpr (fast_of<KB> != 0) { copy_table<cut<fast_of<KB>>::B>(fast_table<KB>(points), a.k_fast.points); }
    if constexpr (VB != LATTICE + 4) { copy_table<cut<VB>::B>(value_table<KB>(points), a.v.points); }
}

// Four indices of W bits, in the bytes of x from bit `at` on, as bytes that hold twice that.
template <int W> __device__ __forceinline__ uint32_t doubled(uint32_t x, int at) {
    return rotate(x, at - 1) & (((1 << W) - 1) << 1) * 0x01010101u;
}

// Coordinates (x, y) at four indices of B bits, as look_up takes those, in the lower halves of out.
template <int B>
__device__ __forceinline__ void look_up_bytes(
    const uint16_t * table, uint32_t x, int at, uint32_t high, int at_high, uint32_t (&out)[4]) {
    if constexpr (cut<B>::W == 8) {
#pragma unroll
        for (int i = 0; i < 4; i++) { out[i] = table[__byte_perm(x, 0, 0x4440 + i)]; }
        return;
    }
    uint32_t offsets = doubled<cut<B>::W>(x, at);
    if constexpr (cut<B>::high) { offsets |= rotate(high, at_high - 5) & 0x60606060u; }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[i] = *(const uint16_t *) ((const char *) table + __byte_perm(offsets, 0, 0x4440 + i));
    }
}

// The same as keys' left operands: vectors 0 and 1 in out[0], 2 and 3 in out[1]
template <int B>
__device__ __forceinline__ void vectors_of_four(
    const uint16_t * table, uint32_t x, int at, uint32_t high, int at_high, uint32_t (&out)[2]) {
    if constexpr (B == 2) {
        const uint2 four = *(const uint2 *) table;
        const uint32_t first = doubled<2>(x, at), pick = first | first << 4 | 0x10101010u; // bytes 2i and 2i + 1
        out[0] = pick_bytes(four.x, four.y, pick);
        out[1] = pick_bytes(four.x, four.y, pick >> 16);
    } else {
        uint32_t e[4];
        look_up_bytes<B>(table, x, at, high, at_high, e);
        out[0] = __byte_perm(e[0], e[1], 0x5410);
        out[1] = __byte_perm(e[2], e[3], 0x5410);
    }
}
// and as values': first coordinates of four cells, second ones
template <int B>
__device__ __forceinline__ void cells_of_four(
    const uint16_t * table, uint32_t x, int at, uint32_t high, int at_high, uint32_t (&out)[2]) {
    if constexpr (B == 2) {
        const uint2 four = *(const uint2 *) table;
        const uint32_t i = rotate(x, at) & 0x03030303u, pick = __byte_perm(i | i >> 4, 0, 0x4420);
        out[0] = pick_bytes(__byte_perm(four.x, four.y, 0x6420), 0, pick);
        out[1] = pick_bytes(__byte_perm(four.x, four.y, 0x7531), 0, pick);
    } else {
        uint32_t e[4];
        look_up_bytes<B>(table, x, at, high, at_high, e);
        const uint32_t y = __byte_perm(e[0], e[1], 0x5140), z = __byte_perm(e[2], e[3], 0x5140);
        out[0] = __byte_perm(y, z, 0x5410);
        out[1] = __byte_perm(y, z, 0x7632);
    }
}

// Right operands of the scores of all cells: of a pair of steps the 8 channels that a plane's four vectors have.
template <int D, int E> __device__ __forceinline__ void quantise_steps(const shared_query & q, byte_query<D, E> & out) {
    const int c = threadIdx.x % 4;
    const float top = most_of_query<D>(q);
#pragma unroll
    for (int part = 0; part < E; part++) {
        const byte_digits digits = digits_up_to<E>(top, part);
#pragma unroll
        for (int t = 0; t < D / 16; t++) {
            const uint2 x = query_of(q, t);
            const float2 v = __half22float2(as_half2(x.x)), w = __half22float2(as_half2(x.y));
            out.x[part][t / 2][t % 2] = digits.four(v.x, v.y, w.x, w.y, digits.by);
        }
    }
#pragma unroll
    for (int e = 0; e < E; e++) {
        out.middle[e] = 0;
        out.step[e] = __shfl_sync(~0u, top, E == 1 ? 8 * c : 4 * (2 * c + e)) * (1.0f / QUERY_MOST);
    }
}

// Sums of a block of D channels, whose right operands begin with number FIRST. keys, high: as score_block takes them
template <int D, int KB, int FIRST, int E, typename Q>
__device__ __forceinline__ void sum_block(
    const uint16_t * table, const Q & q, const uint8_t * keys, const uint8_t * high, byte_sums<E> (&sums)[4]) {
    constexpr int W = cut<KB>::W;
    key_words<D, KB> k(keys, high);
#pragma unroll
    for (int u = 0; u < D / 32; u++) { // two steps
        k.next(u);
        const uint4 y = operand_of(q, FIRST + u);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t e[2], f[2];
            vectors_of_four<cut<KB>::B>(table, k.x[j].x, W * k.plane, k.h[j].x, 2 * k.plane, e);
            vectors_of_four<cut<KB>::B>(table, k.x[j].y, W * k.plane, k.h[j].y, 2 * k.plane, f);
#pragma unroll
            for (int part = 0; part < E; part++) {
                const uint32_t right[2] = { part ? y.z : y.x, part ? y.w : y.y };
                mma_signed(sums[j].at[part], { e[0], f[0], e[1], f[1] }, right);
            }
        }
    }
}

// as score_points
template <int D, int KB, int VB, int E, typename Q>
__device__ __forceinline__ void score_tables(
    uint8_t * points, const Q & q, const uint8_t * stage, float (&s)[2 * E][4]) {
    using map = byte_table_map<D, KB, VB>;
    constexpr int BLOCK = is_split<KB> ? D / 2 : D;
    const int g = threadIdx.x % 32 / 4;
    const uint8_t * const scales = stage + map::SCALES + 8 * (8 * (g / 2) + g % 2);
    {
        byte_sums<E> sums[4];
        sum_block<BLOCK, slow_of<KB>, 0>(slow_table<KB>(points), q, stage + map::K, stage + map::K_HIGH, sums);
        put_sums<false, false>(sums, scales, q, s);
    }
    if constexpr (fast_of<KB> != 0) {
        byte_sums<E> sums[4];
        sum_block<BLOCK, fast_of<KB>, D / 64>(fast_table<KB>(points), q, stage + map::FAST, nullptr, sums);
        put_sums<true, false>(sums, scales + 8 * DECODE_CELLS, q, s);
    }
}

template <int D, int KB, int VB, int E>
__device__ __forceinline__ void quantise_unit(const shared_query & q, byte_query<D, E> & out) {
    if constexpr (is_tabled<KB, VB>) {
        quantise_steps<D>(q, out);
    } else {
        quantise_rotated<D, E>(q, out);
    }
}
// Right operands of more than 4 rows take the place of the rotated queries.
// by a warp of each slice; q: rotated, [step][lane]
template <int D, int KB, int VB> __device__ __forceinline__ void share_bytes(uint2 * q, int2 * rows) {
    const int lane = threadIdx.x % 32;
    byte_query<D, 2> x;
    quantise_unit<D, KB, VB>({ q + lane }, x);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < D / 32; n++) {
        ((uint4 *) q)[32 * n + lane] = make_uint4(x.x[0][n][0], x.x[0][n][1], x.x[1][n][0], x.x[1][n][1]);
    }
    if (lane < 4) {
        ((int4 *) rows)[lane] = { x.middle[0], __float_as_int(x.step[0]), x.middle[1], __float_as_int(x.step[1]) };
    }
}

template <int D, int KB, int VB, int E, typename Q>
__device__ __forceinline__ void score_unit(uint8_t * points, const Q & q, const uint8_t * stage, float (&s)[2 * E][4]) {
    if constexpr (is_tabled<KB, VB>) {
        score_tables<D, KB, VB, E>(points, q, stage, s);
    } else {
        score_points<D, E>(load_points(points), q, stage, s);
    }
}

// as accumulate_points, without a middle
template <int D, int KB, int VB, int E>
__device__ __forceinline__ void accumulate_tables(uint8_t * points, const uint8_t * stage, const float (&s)[2 * E][4],
    const float (&rest)[E], float (&o)[D / 16][2 * E]) {
    using map = byte_table_map<D, KB, VB>;
    constexpr int W = cut<VB>::W, N = W < 4 ? 1 : W / 2, PLANES = 8 / W; // N: words of a vector that a thread needs
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const uint16_t * const table = value_table<KB>(points);
    const uint8_t * const scales = stage + map::SCALES + 4 * DECODE_CELLS + 8 * (8 * (g / 2) + g % 2);
    float2 scale[4];
#pragma unroll
    for (int j = 0; j < 4; j++) { scale[j] = *(const float2 *) (scales + 16 * j); }
    uint32_t p[E][4];
    const float unit = byte_probabilities<E>(scale, [](int) { return 1.0f; }, s, p);
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        uint2 x[N], h = {};
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int chunk = N * c + n;
            x[n] = *(const uint2 *) (stage + map::V + i * (2 * W * 64) + chunk / 2 * 128 +
                ((chunk % 2 * 4 + g / 2) ^ 2 * (chunk / 2 % 4)) * 16 + g % 2 * 8);
        }
        if (cut<VB>::high) {
            h = *(const uint2 *) (stage + map::V_HIGH + i * (2 * map::HIGH * 64) + c / 2 * 128 +
                ((c % 2 * 4 + g / 2) ^ 2 * (c / 2 % 4)) * 16 + g % 2 * 8);
        }
#pragma unroll
        for (int v = 0; v < 2; v++) { // channels 32i + 4g + 2v, + 1
            byte_sums<E> sums;
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                uint32_t e[2], f[2];
                const uint2 &y = x[j / PLANES], &z = x[(j + 1) / PLANES];
                cells_of_four<cut<VB>::B>(table, v ? y.y : y.x, W * (j % PLANES), v ? h.y : h.x, 2 * j, e);
                cells_of_four<cut<VB>::B>(table, v ? z.y : z.x, W * ((j + 1) % PLANES), v ? h.y : h.x, 2 * (j + 1), f);
#pragma unroll
                for (int part = 0; part < E; part++) {
                    mma_unsigned(sums.at[part], { e[0], e[1], f[0], f[1] }, p[part][j], p[part][j + 1]);
                }
            }
#pragma unroll
            for (int n = 0; n < 2 * E; n++) {
                float & x = o[2 * i + v][n];
                x = fmaf((float) sums.whole(n / E, n % E), unit * rest[n % E], x);
            }
        }
    }
}

} // namespace

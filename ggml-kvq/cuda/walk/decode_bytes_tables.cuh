// Decode attention in 8-bit products over all other lattice pages with grids of two channels: split keys, and keys and
// values of 1 to 4 bits. The coordinates of a grid are whole numbers of its step, 127 at most (types/lattice.h), so a
// byte with sign holds them as they are. A table in shared memory gives both coordinates of an index in one look-up of
// 2 bytes: points of neighbouring channels then fill a register of keys, points of neighbouring cells one of values.
// With 1 bit the four points fill two registers, and byte permutations take them from there. Values of 2 bits are those
// of decode_bytes_lattice.cuh. Up to 4 query rows.
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

// The points of a block: of values of 2 bits as share_points leaves them, then tables of keys, of other values.
template <int KB, int VB> __host__ __device__ constexpr int nb_points() {
    return 32 + (is_tabled<KB, VB> ? (2 * (key_points<KB> + (1 << cut<VB>::B)) + 15) / 16 * 16 : 0);
}
template <int B> __device__ __forceinline__ void share_table(uint16_t * to, const float * points) {
    for (int i = threadIdx.x; i < 1 << B; i += blockDim.x) {
        const float2 x = __ldg((const float2 *) points + i);
        to[i] = (uint16_t) (((int) rintf(x.x * (1.0f / GRID_STEP<B>) ) & 255) |
            ((int) rintf(x.y * (1.0f / GRID_STEP<B>) ) & 255) << 8);
    }
}
template <int KB> __device__ __forceinline__ uint16_t * slow_table(uint8_t * points) {
    return (uint16_t *) points + 16;
}
template <int KB> __device__ __forceinline__ uint16_t * fast_table(uint8_t * points) {
    return slow_table<KB>(points) + (1 << cut<slow_of<KB>>::B);
}
template <int KB> __device__ __forceinline__ uint16_t * value_table(uint8_t * points) {
    return slow_table<KB>(points) + key_points<KB>;
}
template <int KB, int VB> __device__ __forceinline__ void share_tables(const kvq_attend_args & a, uint8_t * points) {
    if constexpr (VB == LATTICE + 4) { share_points(points, a.v.points); }
    if constexpr (!is_tabled<KB, VB>) { return; }
    share_table<cut<slow_of<KB>>::B>(slow_table<KB>(points), a.k.points);
    if constexpr (fast_of<KB> != 0) { share_table<cut<fast_of<KB>>::B>(fast_table<KB>(points), a.k_fast.points); }
    if constexpr (VB != LATTICE + 4) { share_table<cut<VB>::B>(value_table<KB>(points), a.v.points); }
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
template <int D> __device__ __forceinline__ void quantise_steps(const shared_query & q, byte_query<D, 1> & out) {
    const float top = most_of_query<D>(q);
    const byte_digits digits = digits_up_to<1>(top, 0);
#pragma unroll
    for (int t = 0; t < D / 16; t++) {
        const uint2 x = query_of(q, t);
        const float2 v = __half22float2(as_half2(x.x)), w = __half22float2(as_half2(x.y));
        out.x[0][t / 2][t % 2] = digits.four(v.x, v.y, w.x, w.y, digits.by);
    }
    out.step[0] = __shfl_sync(~0u, top, 8 * (threadIdx.x % 4)) * (1.0f / QUERY_MOST);
}

// Sums of a block of D channels, whose right operands begin with number FIRST. keys, high: as score_block takes them
template <int D, int KB, int FIRST, int N>
__device__ __forceinline__ void sum_block(const uint16_t * table, const byte_query<N, 1> & q, const uint8_t * keys,
    const uint8_t * high, byte_sums<1> (&sums)[4]) {
    constexpr int W = cut<KB>::W;
    key_words<D, KB> k(keys, high);
#pragma unroll
    for (int u = 0; u < D / 32; u++) { // two steps
        k.next(u);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t e[2], f[2];
            vectors_of_four<cut<KB>::B>(table, k.x[j].x, W * k.plane, k.h[j].x, 2 * k.plane, e);
            vectors_of_four<cut<KB>::B>(table, k.x[j].y, W * k.plane, k.h[j].y, 2 * k.plane, f);
            mma_signed(sums[j].at[0], { e[0], f[0], e[1], f[1] }, q.x[0][FIRST + u]);
        }
    }
}

// as score_bytes
template <int D, int KB, int VB>
__device__ __forceinline__ void score_tables(
    uint8_t * points, const byte_query<D, 1> & q, const uint8_t * stage, float (&s)[2][4]) {
    using map = byte_table_map<D, KB, VB>;
    constexpr int BLOCK = is_split<KB> ? D / 2 : D;
    const int g = threadIdx.x % 32 / 4;
    const uint8_t * const scales = stage + map::SCALES + 8 * (8 * (g / 2) + g % 2);
    {
        byte_sums<1> sums[4];
        sum_block<BLOCK, slow_of<KB>, 0>(slow_table<KB>(points), q, stage + map::K, stage + map::K_HIGH, sums);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 scale = *(const float2 *) (scales + 16 * j);
            s[j / 2][j % 2 * 2] = (float) sums[j].whole(0, 0) * (scale.x * q.step[0]);
            s[j / 2][j % 2 * 2 + 1] = (float) sums[j].whole(1, 0) * (scale.y * q.step[0]);
        }
    }
    if constexpr (fast_of<KB> != 0) {
        byte_sums<1> sums[4];
        sum_block<BLOCK, fast_of<KB>, D / 64>(fast_table<KB>(points), q, stage + map::FAST, nullptr, sums);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 scale = *(const float2 *) (scales + 8 * DECODE_CELLS + 16 * j);
            float *const x = &s[j / 2][j % 2 * 2], *const y = x + 1;
            *x = fmaf((float) sums[j].whole(0, 0), scale.x * q.step[0], *x);
            *y = fmaf((float) sums[j].whole(1, 0), scale.y * q.step[0], *y);
        }
    }
}

template <int D, int KB, int VB>
__device__ __forceinline__ void quantise_unit(const shared_query & q, byte_query<D, 1> & out) {
    if constexpr (is_tabled<KB, VB>) {
        quantise_steps<D>(q, out);
    } else {
        quantise_rotated<D, 1>(q, out);
    }
}
template <int D, int KB, int VB>
__device__ __forceinline__ void score_unit(
    uint8_t * points, const byte_query<D, 1> & q, const uint8_t * stage, float (&s)[2][4]) {
    if constexpr (is_tabled<KB, VB>) {
        score_tables<D, KB, VB>(points, q, stage, s);
    } else {
        score_points<D, 1>(load_points(points), q, stage, s);
    }
}

// as accumulate_points, without a middle
template <int D, int KB, int VB>
__device__ __forceinline__ void accumulate_tables(
    uint8_t * points, const uint8_t * stage, const float (&s)[2][4], float rest, float (&o)[D / 16][2]) {
    using map = byte_table_map<D, KB, VB>;
    constexpr int W = cut<VB>::W, N = W < 4 ? 1 : W / 2, PLANES = 8 / W; // N: words of a vector that a thread needs
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const uint16_t * const table = value_table<KB>(points);
    const uint8_t * const scales = stage + map::SCALES + 4 * DECODE_CELLS + 8 * (8 * (g / 2) + g % 2);
    float2 scale[4];
#pragma unroll
    for (int j = 0; j < 4; j++) { scale[j] = *(const float2 *) (scales + 16 * j); }
    uint32_t p[1][4];
    const float step = rest * byte_probabilities<1>(scale, [](int) { return 1.0f; }, s, p);
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
            byte_sums<1> sums;
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                uint32_t e[2], f[2];
                const uint2 &y = x[j / PLANES], &z = x[(j + 1) / PLANES];
                cells_of_four<cut<VB>::B>(table, v ? y.y : y.x, W * (j % PLANES), v ? h.y : h.x, 2 * j, e);
                cells_of_four<cut<VB>::B>(table, v ? z.y : z.x, W * ((j + 1) % PLANES), v ? h.y : h.x, 2 * (j + 1), f);
                mma_unsigned(sums.at[0], { e[0], e[1], f[0], f[1] }, p[0][j], p[0][j + 1]);
            }
#pragma unroll
            for (int b = 0; b < 2; b++) { o[2 * i + v][b] = fmaf((float) sums.whole(b, 0), step, o[2 * i + v][b]); }
        }
    }
}

} // namespace

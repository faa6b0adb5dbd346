// Decode attention over codes whose scales are shared by G = 16 cells in keys, 16 channels in values
// (attend_decode.cuh). A product then has cells, or channels, of one group alone, so that its scale is that of the
// whole right operand and all 8 columns are rows of queries. A thread (g, c) holds
//   in S   the rows:    cells 16j + 2g + {0, 1} of group j, j = 0..3
//   in O   the rows:    channels 16k + 2g + {0, 1} of group k, k = 0..D/16-1
//          contracted:  cells 16c + 4j + {0..3}, as everywhere: they go from the threads that have them in S through
//          shared memory
//
// G = 32: two neighbours j, or k, have the same scale.
//
// Zeros: one product per step for all four groups of keys, row g = zeros of group g%4; values: row g = zeros of
// group g, as everywhere.
#pragma once

#include "decode_lanes.cuh"
#include "decode_products.cuh"

namespace {

constexpr int FINE_TURN = 1024; // bytes of shared memory: probabilities of 64 cells, 8 columns

// Parameters in f16, in pieces of 8 neighbours (8 channels or 8 cells): scales of a group and then its zeros. Piece
// i of group n lies at i ^ n%2: threads that read pieces of neighbouring groups, 2c or 2c + 1, find all banks.
template <int D> __device__ __forceinline__ constexpr int key_piece(int part, int i) {
    return (part * (D / 4) + (i ^ (part & 1))) * 16;
}
template <int D, int G> __device__ __forceinline__ constexpr int value_piece(int group, int i) {
    return 256 * D / G + (group * 16 + (i ^ (group & 1))) * 16;
}

// Asks for what a unit holds, as copy_stage does. 8-bit parameters (BYTES) arrive as 8 bytes a lane and step,
// followed by the ranges of both halves.
template <int D, int KB, int VB, bool BYTES, int G, typename X>
__device__ __forceinline__ void copy_fine(const kvq_attend_args & a, const X & of, uint32_t to, const kvq_page & page,
    int kvh, int t, bool keys, bool values) {
    using map = stage_map<D, KB, VB>;
    constexpr int SIZE = BYTES ? 1 : 2; // of a parameter
    static_assert(G == 16 || (D == 128 && !BYTES), "groups of 32: of slices, in f16");
    const int lane = threadIdx.x % 32, r = lane % 16, half = lane / 16;
    if (keys) {
        const uint8_t *codes = (const uint8_t *) page.k_codes + (size_t) kvh * a.k.nb_codes,
                      *params = (const uint8_t *) page.k_params + (size_t) kvh * a.k.nb_params;
        copy_keys<D, map::WK>(of, to + map::K, codes, t, a.k.n_chunks[0]);
        if constexpr (cut<KB>::high) {
            copy_keys<D, 1>(of, to + map::K_HIGH, codes + a.k.offset[1], t, a.k.n_chunks[1]);
        }
        const uint32_t at = to + map::K_PARAMS;
        if (BYTES && r == 0) { copy8(at + 8 * D + half * 8, params); }
        params += (BYTES ? 8 : 0) + (t / G * of.head(a) + of.first() + r * 8) * SIZE;
        // D = 128: of the next step, 64: of the upper lanes
        const uint8_t * zeros = params + (D == 128 ? a.k.np : a.k.np - D) * SIZE;
        if (D == 64 && r >= 8) { params = zeros; }
#pragma unroll
        for (int k = 0; k < D / (2 * G); k++) {
            const int odd = 16 * k / (D / 4), zero = D == 128 ? k % 2 : 0;
            const uint8_t * from = (zero ? zeros : params) + odd * of.head(a) * SIZE;
            if (X::WIDE && !of.has(r * 8)) { continue; }
            if constexpr (BYTES) {
                copy8(at + (lane + 32 * k) * 8, from);
            } else if constexpr (G == 32) {
                copy16(at + (half * (D / 4) + zero * 16 + (r ^ half)) * 16, from);
            } else {
                copy16(at + key_piece<D>(2 * half, 0) + (odd * (D / 4) + zero * 16 + (r ^ odd)) * 16, from);
            }
        }
    }
    if (values) {
        const uint8_t *codes = (const uint8_t *) page.v_codes + (size_t) kvh * a.v.nb_codes,
                      *params = (const uint8_t *) page.v_params + (size_t) kvh * a.v.nb_params;
        copy_values<D, map::WV>(of, to + map::V, codes, t, a.v.n_chunks[0], a.v.n_tiles);
        if constexpr (cut<VB>::high) {
            copy_values<D, 1>(of, to + map::V_HIGH, codes + a.v.offset[1], t, a.v.n_chunks[1], a.v.n_tiles);
        }
        const uint32_t at = to + map::K_PARAMS + a.stage_raw_v;
        if (BYTES && r == 0) { copy8(at + 8 * D + half * 8, params); }
        const int first = of.i * (D / G) + r / 8; // group
        params += (BYTES ? 8 : 0) + (r / 4 % 2 * a.v.np + first * a.v.n_cells + t + r % 4 * 8) * SIZE;
#pragma unroll
        for (int k = 0; k < D / (2 * G); k++, params += 2 * a.v.n_cells * SIZE) {
            if (X::WIDE && first + 2 * k >= a.v_groups) { continue; }
            if constexpr (BYTES) {
                copy8(at + (lane + 32 * k) * 8, params);
            } else {
                copy16(at + value_piece<D, G>(r / 8, r / 4 % 2 * 8 + half * 4 + r % 4) - 256 * D / G + k * 512, params);
            }
        }
    }
}

// The same by a table of lanes, of groups of 32: t has a group of keys, and a lane two pieces of values' parameters.
template <int D, int KB, int VB, typename X>
__device__ __forceinline__ fine_lane fine_lane_of(const kvq_attend_args & a, const X & of, int kvh) {
    const int lane = threadIdx.x % 32, r = lane % 16, half = lane / 16, group = of.i * (D / 32) + r / 8;
    fine_lane x = {};
    (byte_lane &) x = lane_of<D, D, cut<KB>::W, cut<VB>::W, true>(a, of, kvh);
    x.k_params = kvh * a.k.nb_params + 2 * (of.first() + r * 8);
    x.k_params_to = (half * (D / 4) + (r ^ half)) * 16;
    x.v_params = kvh * a.v.nb_params + 2 * (r / 4 % 2 * a.v.np + group * a.v.n_cells + r % 4 * 8);
    x.v_params_to = value_piece<D, 32>(r / 8, r / 4 % 2 * 8 + half * 4 + r % 4) - value_piece<D, 32>(0, 0);
    x.has = (!X::WIDE || of.has(r * 8) ? 1 : 0) | (!X::WIDE || group < a.v_groups ? 2 : 0) |
        (!X::WIDE || group + 2 < a.v_groups ? 4 : 0);
    return x;
}
template <int D, int KB, int VB, typename X>
__device__ __forceinline__ void copy_fine_unit(
    const kvq_attend_args & a, const X & of, uint32_t to, const kvq_page & page, const fine_lane & x, int kvh, int t) {
    using map = stage_map<D, KB, VB>;
    copy_key_codes<D, map::WK>(a, of, to + map::K, page.k_codes, x, t);
    if constexpr (cut<KB>::high) {
        copy_keys<D, 1>(of, to + map::K_HIGH,
            (const uint8_t *) page.k_codes + (size_t) kvh * a.k.nb_codes + a.k.offset[1], t, a.k.n_chunks[1]);
    }
    const uint32_t at = to + map::K_PARAMS;
    if (x.has & 1) {
        const uint8_t * from = (const uint8_t *) page.k_params + (uint32_t) (x.k_params + t / 32 * 2 * of.head(a));
        copy16(at + x.k_params_to, from);
        copy16(at + x.k_params_to + 256, from + 2 * a.k.np);
    }
    copy_value_codes<D, map::WV>(a, of, to + map::V, page.v_codes, x, t);
    if constexpr (cut<VB>::high) {
        copy_values<D, 1>(of, to + map::V_HIGH,
            (const uint8_t *) page.v_codes + (size_t) kvh * a.v.nb_codes + a.v.offset[1], t, a.v.n_chunks[1],
            a.v.n_tiles);
    }
    const uint8_t * from = (const uint8_t *) page.v_params + (uint32_t) (x.v_params + 2 * t);
    if (x.has & 2) { copy16(at + a.stage_raw_v + x.v_params_to, from); }
    if (x.has & 4) { copy16(at + a.stage_raw_v + x.v_params_to + 512, from + 4 * a.v.n_cells); }
}

template <int D, int KB, int VB, bool BYTES, int G, typename X>
__device__ __noinline__ void copy_fine_late(
    const kvq_attend_args & a, const X of, uint32_t to, const kvq_page & page, int kvh, int t, bool keys, bool values) {
    copy_fine<D, KB, VB, BYTES, G>(a, of, to, page, kvh, t, keys, values);
}

// a piece from the order in memory to pairs (0, 2) (4, 6) (1, 3) (5, 7): words t and 2 + t are of its step t
__device__ __forceinline__ uint4 pairs_of(uint4 x) {
    return make_uint4(even(x.x, x.y), even(x.z, x.w), odd(x.x, x.y), odd(x.z, x.w));
}
// and from 8 bits: low + step * code; range: (low, step)
__device__ __forceinline__ uint4 pairs_of(uint64_t x, uint32_t range) {
    const __half2 both = as_half2(range), low = __half2half2(both.x), step = __half2half2(both.y),
                  magic = __float2half2_rn(1024.0f);
    const auto pair = [&](uint64_t y, uint32_t which) {
        return as_u32(__hfma2(__hsub2(as_half2(__byte_perm((uint32_t) y, 0x64646464u, which)), magic), step, low));
    };
    return make_uint4(pair(x, 0x4240), pair(x >> 32, 0x4240), pair(x, 0x4341), pair(x >> 32, 0x4341));
}

// Parameters that have arrived, from the order in memory to pairs: f16 in place, 8 bits into `wide`, where a lane's
// pieces go where it would have asked for them in f16.
template <int D, int KB, int VB, bool BYTES, int G>
__device__ __forceinline__ void arrange_fine(const kvq_attend_args & a, uint8_t * stage, uint8_t * wide) {
    uint8_t *k_raw = stage + stage_map<D, KB, VB>::K_PARAMS, *v_raw = k_raw + a.stage_raw_v;
    const int lane = threadIdx.x % 32, r = lane % 16, half = lane / 16;
    if constexpr (!BYTES) {
        uint4 x[D / G]; // all of them are on their way before the first is needed
#pragma unroll
        for (int k = 0; k < D / G; k++) { x[k] = *((const uint4 *) k_raw + lane + 32 * k); }
#pragma unroll
        for (int k = 0; k < D / G; k++) { *((uint4 *) k_raw + lane + 32 * k) = pairs_of(x[k]); }
    } else {
        const uint2 ranges = *(const uint2 *) (k_raw + 8 * D + half * 8);
        const uint32_t range = *(const uint32_t *) (v_raw + 8 * D + half * 8 + r / 4 % 2 * 4);
        uint64_t x[D / 32], y[D / 32];
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
            x[k] = *((const uint64_t *) k_raw + lane + 32 * k);
            y[k] = *((const uint64_t *) v_raw + lane + 32 * k);
        }
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
            const int odd = 16 * k / (D / 4), zero = D == 128 ? k % 2 : 0;
            uint8_t * to = wide + key_piece<D>(2 * half, 0) + (odd * (D / 4) + zero * 16 + (r ^ odd)) * 16;
            *(uint4 *) to = pairs_of(x[k], (D == 128 ? zero : r / 8) ? ranges.y : ranges.x);
        }
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
            uint8_t * to = wide + value_piece<D, G>(r / 8, r / 4 % 2 * 8 + half * 4 + r % 4) + k * 512;
            *(uint4 *) to = pairs_of(y[k], range);
        }
    }
    __syncwarp();
}

// Scores of sealed keys, zeros' share included. A piece of zeros is a left operand as it lies there: its first step
// in rows g, its second in rows g + 8; each is multiplied with either step's q, and of those products one row
// counts.
template <int D, int KB, int VB, int G, typename Q>
__device__ __forceinline__ void score_fine(
    const Q & q, const uint8_t * stage, const uint8_t * params, float (&s)[4][4]) {
    using map = stage_map<D, KB, VB>;
    constexpr int W = cut<KB>::W, P = cut<KB>::P, S = D / 16, N = D * W / 32 * 4, EACH = G / 16, // EACH: j of a group
        AT_ONCE = steps_at_once<Q>;
    constexpr float FROM_K = (float) (1 << (24 - K_BOOST));
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    float zeros[2][4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++) { s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f; }
    const uint8_t *words = stage + map::K + g % 2 * 8, *words1 = stage + map::K_HIGH + g % 2 * 8;
    uint2 x[4], h[4];
#pragma unroll AT_ONCE
    for (int u = 0; u < S / 2; u++) { // 8 channels
        const int i = channel_of<D, KB>(c, 2 * u) / 8;
        if (S < P ? u == 0 : 2 * u % P == 0) {
            const int chunk = S < P ? c / 2 : c + 4 * (2 * u / P);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                x[j] = *(const uint2 *) (words + j * N * 16 + chunk * 64 + ((g / 2) ^ j) * 16);
                if (cut<KB>::high) {
                    h[j] = *(const uint2 *) (words1 + j * (D / 8) * 16 + chunk / 2 * 64 + ((g / 2) ^ j) * 16);
                }
                if (S < P || cut<KB>::high) { // two threads share a word of 8 planes
                    uint2 & y = cut<KB>::high ? h[j] : x[j];
                    y.x = rotate(y.x, 4 * (c % 2));
                    y.y = rotate(y.y, 4 * (c % 2));
                }
            }
        }
        const uint4 zero = *(const uint4 *) (params + key_piece<D>(g % (4 / EACH), D / 8 + i));
        uint32_t weighted[2][2];
#pragma unroll
        for (int v = 0; v < 2; v++) {
            const int t = 2 * u + v;
            const uint2 qt = query_of(q, t);
            const uint32_t weight = plane_weight(K_BOOST - W * (S < P ? t : t % P));
            mma(zeros[v], { zero.x, zero.y, zero.z, zero.w }, qt.x, qt.y);
            weighted[v][0] = mul2(qt.x, weight);
            weighted[v][1] = mul2(qt.y, weight);
        }
        uint32_t scaled[2][2];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j % EACH == 0) {
                const uint4 scale = *(const uint4 *) (params + key_piece<D>(j / EACH, i));
#pragma unroll
                for (int v = 0; v < 2; v++) {
                    scaled[v][0] = mul2(weighted[v][0], word(scale, v));
                    scaled[v][1] = mul2(weighted[v][1], word(scale, 2 + v));
                }
            }
#pragma unroll
            for (int v = 0; v < 2; v++) {
                const int pl = S < P ? 2 * u + v : (2 * u + v) % P;
                const uint32_t f[4] = { fields<KB>(x[j].x, h[j].x, pl, false), fields<KB>(x[j].y, h[j].y, pl, false),
                    fields<KB>(x[j].x, h[j].x, pl, true), fields<KB>(x[j].y, h[j].y, pl, true) };
                mma(s[j], f, scaled[v][0], scaled[v][1]);
            }
        }
    }
    const float base[2] = { zeros[0][0] + zeros[1][2], zeros[0][1] + zeros[1][3] }; // of group g % (4 / EACH)
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float b0 = __shfl_sync(~0u, base[0], j / EACH * 4 + c), b1 = __shfl_sync(~0u, base[1], j / EACH * 4 + c);
        s[j][0] = fmaf(s[j][0], FROM_K, b0);
        s[j][1] = fmaf(s[j][1], FROM_K, b1);
        s[j][2] = fmaf(s[j][2], FROM_K, b0);
        s[j][3] = fmaf(s[j][3], FROM_K, b1);
    }
}

// Probabilities s of cells 16j + 2g + b, columns 2c + {0, 1}, to p of column g, cells 16c + 4j + {0, 2} + b. In
// between cell 16j + 2g + b is row (j, b, g ^ 2j) of 16 bytes: so two threads never meet in a bank, writing or reading.
__device__ __forceinline__ void turn_probabilities(
    uint8_t * rows, uint32_t rows_at, const float (&s)[4][4], uint32_t (&p)[4][2]) {
    // to: c of the threads that lane's row of a matrix goes to
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, to = lane % 8 / 2;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint8_t * row = rows + j * 256 + (g ^ 2 * j) * 16 + c * 4;
        *(uint32_t *) row = pack_half2(s[j][0], s[j][1]);
        *(uint32_t *) (row + 128) = pack_half2(s[j][2], s[j][3]);
    }
    __syncwarp();
    const uint32_t from = rows_at + to * 256 + ((lane / 8 * 2 + lane % 2) ^ 2 * to) * 16;
#pragma unroll
    for (int b = 0; b < 2; b++) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
            : "=r"(p[0][b]), "=r"(p[1][b]), "=r"(p[2][b]), "=r"(p[3][b])
            : "r"(from + b * 128)
            : "memory");
    }
}

// p: weighted probabilities of step j, cells (0, 2) and (1, 3)
template <int D, int KB, int VB, int G>
__device__ __forceinline__ void accumulate_fine(
    const uint8_t * stage, const uint8_t * params, const uint32_t (&p)[4][2], float (&o)[D / 16][4], float (&oz)[4]) {
    using map = stage_map<D, KB, VB>;
    constexpr int W = cut<VB>::W, P = cut<VB>::P, N = P == 2 ? 2 : 1; // N: words of a channel that a thread needs
    constexpr int GROUPS = D / G, EACH = G / 16;                      // EACH: k of a group
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, turn = c % 2 * 4;
    {
        const int group = GROUPS < 8 ? min(g, GROUPS - 1) : g;
        const uint4 z[2] = { *(const uint4 *) (params + value_piece<D, G>(group, 8 + 2 * c)),
            *(const uint4 *) (params + value_piece<D, G>(group, 9 + 2 * c)) };
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float back = g < GROUPS ? exp2_of(-v_weight<VB>(j)) : 0.0f;
            const uint32_t f[4] = { mul2(word(z[j / 2], j % 2), back), 0, mul2(word(z[j / 2], 2 + j % 2), back), 0 };
            mma(oz, f, p[j][0], p[j][1]);
        }
    }
    const int chunk = P == 8 ? c / 2 : N * c; // the first
    const uint8_t *words = stage + map::V + chunk / 2 * 128 + g % 2 * 8,
                  *words1 = stage + map::V_HIGH + (c / 2 * 4 + g / 2) * 16 + g % 2 * 8;
    uint32_t ps[4][2];
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        if (k % EACH == 0) {
            const uint4 scale[2] = { *(const uint4 *) (params + value_piece<D, G>(k / EACH, 2 * c)),
                *(const uint4 *) (params + value_piece<D, G>(k / EACH, 2 * c + 1)) };
#pragma unroll
            for (int j = 0; j < 4; j++) {
                ps[j][0] = mul2(p[j][0], word(scale[j / 2], j % 2));
                ps[j][1] = mul2(p[j][1], word(scale[j / 2], 2 + j % 2));
            }
        }
        uint2 x[N], h = {};
#pragma unroll
        for (int n = 0; n < N; n++) {
            x[n] = *(
                const uint2 *) (words + k * (2 * W * 64) + (((chunk + n) % 2 * 4 + g / 2) ^ 2 * (chunk / 2 % 4)) * 16);
        }
        if (cut<VB>::high) { h = *(const uint2 *) (words1 + k * 128); }
        h.x = rotate(h.x, turn);
        h.y = rotate(h.y, turn);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint2 y = x[j / P % N];
            if (P == 8) { // two threads share a word of 8 planes
                y.x = rotate(y.x, turn);
                y.y = rotate(y.y, turn);
            }
            const uint32_t f[4] = { fields<VB>(y.x, h.x, j % P, false), fields<VB>(y.y, h.y, j % P, false),
                fields<VB>(y.x, h.x, j % P, true), fields<VB>(y.y, h.y, j % P, true) };
            mma(o[k], f, ps[j][0], ps[j][1]);
        }
    }
}

// rows: of cell 4J * c, channel 0 of the slice
template <int D, int VB, int J = 4, typename X>
__device__ __forceinline__ void accumulate_fine_open(
    const X & of, const uint16_t * rows, int stride, const uint32_t (&p)[J][2], float (&o)[D / 16][4]) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < J; j++) {
        const float back = exp2_of(-v_weight<VB>(j));
        const uint32_t p0 = mul2(p[j][0], back), p1 = mul2(p[j][1], back);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            uint32_t x[4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                x[t] = __ldg((const uint32_t *) (rows + (size_t) (4 * j + t) * stride + of.near(16 * k + 2 * g, 2)));
            }
            const uint32_t f[4] = { even(x[0], x[2]), odd(x[0], x[2]), even(x[1], x[3]), odd(x[1], x[3]) };
            mma(o[k], f, p0, p1);
        }
    }
}

// functions of their own, as score_open_rows is
template <int D, int KB, typename X>
__device__ __noinline__ void score_fine_open_rows(
    const X of, const shared_query q, const uint16_t * rows, int stride, float (&s)[4]) {
    float x[4];
    score_open_pair<D, KB, false>(of, q, rows, stride, x);
#pragma unroll
    for (int i = 0; i < 4; i++) { s[i] = x[i]; }
}

template <int D, int VB, typename X>
__device__ __noinline__ void accumulate_fine_open_rows(
    const X of, const uint16_t * rows, int stride, const uint32_t (&p)[4][2], float (&o)[D / 16][4]) {
    uint32_t q[4][2];
    float x[D / 16][4];
#pragma unroll
    for (int i = 0; i < 8; i++) { q[i / 2][i % 2] = p[i / 2][i % 2]; }
#pragma unroll
    for (int i = 0; i < D / 4; i++) { x[i / 4][i % 4] = o[i / 4][i % 4]; }
    accumulate_fine_open<D, VB>(of, rows, stride, q, x);
#pragma unroll
    for (int i = 0; i < D / 4; i++) { o[i / 4][i % 4] = x[i / 4][i % 4]; }
}

} // namespace

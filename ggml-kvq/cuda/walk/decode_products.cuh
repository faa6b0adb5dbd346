// Decode attention, the second part: products of 64 cells with queries and probabilities (attend_decode.cuh).
#pragma once

#include "decode_stage.cuh"

#include <algorithm>

namespace {

// Scores of sealed keys, cells of accumulator j as above, in units of codes; base: their zeros' share. params: of the
// keys, in f16. J: steps of 16 cells, 4 for 64 cells. Of 32 cells (J = 2) a thread has  8*(g/2) + 2*(g%2) + 4j + {0,
// 1}  in S and  8c + 4j + {0..3}  in O.
template <int D, int KB, int VB, int J = 4, typename Q>
__device__ __forceinline__ void score(const kvq_attend_args & a, const Q & q, const uint8_t * stage,
    const uint8_t * params, float (&s)[J][4], float (&base)[4]) {
    using map = stage_map<D, KB, VB>;
    constexpr int W = cut<KB>::W, P = cut<KB>::P, S = D / 16, N = D * W / 32 * 4, AT_ONCE = 2 * steps_at_once<Q>;
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, tile = J == 4 ? g / 2 : g / 4,
              piece = J == 4 ? 0 : g / 2 % 2 * 2, part = g >> (3 - a.k_parts_log2);
#pragma unroll
    for (int e = 0; e < 4; e++) {
        base[e] = 0.0f;
#pragma unroll
        for (int j = 0; j < J; j++) { s[j][e] = 0.0f; }
    }
    params += part * 4 * D;
    const uint8_t *words = stage + map::K + tile * N * 16 + g % 2 * 8,
                  *words1 = stage + map::K_HIGH + tile * (D / 8) * 16 + g % 2 * 8;
    uint2 x[J], h[J];
#pragma unroll AT_ONCE
    for (int u = 0; u < S / 2; u++) { // 8 channels
        const int channel = channel_of<D, KB>(c, 2 * u);
        if (S < P ? u == 0 : 2 * u % P == 0) {
            const int chunk = S < P ? c / 2 : c + 4 * (2 * u / P);
#pragma unroll
            for (int j = 0; j < J; j++) { x[j] = *(const uint2 *) (words + chunk * 64 + ((piece + j) ^ tile) * 16); }
            if (cut<KB>::high) {
#pragma unroll
                for (int j = 0; j < J; j++) {
                    h[j] = *(const uint2 *) (words1 + chunk / 2 * 64 + ((piece + j) ^ tile) * 16);
                }
            }
            if (S < P || cut<KB>::high) { // two threads share a word of 8 planes
#pragma unroll
                for (int j = 0; j < J; j++) {
                    uint2 & y = cut<KB>::high ? h[j] : x[j];
                    y.x = rotate(y.x, 4 * (c % 2));
                    y.y = rotate(y.y, 4 * (c % 2));
                }
            }
        }
        uint32_t scale[4], zero[4];
        read_params(params + 2 * channel, scale);
        read_params(params + 2 * channel + 2 * D, zero);
#pragma unroll
        for (int v = 0; v < 2; v++) {
            const int t = 2 * u + v, pl = S < P ? t : t % P;
            const uint32_t z[4] = { zero[2 * v], zero[2 * v], zero[2 * v + 1], zero[2 * v + 1] };
            const uint2 qt = query_of(q, t);
            mma(base, z, qt.x, qt.y);
            const uint32_t weight = plane_weight(K_BOOST - W * pl), q0 = mul2(mul2(qt.x, scale[2 * v]), weight),
                           q1 = mul2(mul2(qt.y, scale[2 * v + 1]), weight);
#pragma unroll
            for (int j = 0; j < J; j++) {
                const uint32_t f[4] = { fields<KB>(x[j].x, h[j].x, pl, false), fields<KB>(x[j].y, h[j].y, pl, false),
                    fields<KB>(x[j].x, h[j].x, pl, true), fields<KB>(x[j].y, h[j].y, pl, true) };
                mma(s[j], f, q0, q1);
            }
        }
    }
}

// SHARED: rows lie in shared memory; elsewhere this kernel may have written them
template <bool SHARED> __device__ __forceinline__ uint4 row16(const void * p) {
    return SHARED ? *(const uint4 *) p : __ldca((const uint4 *) p);
}
template <bool SHARED> __device__ __forceinline__ uint2 row8(const void * p) {
    return SHARED ? *(const uint2 *) p : __ldca((const uint2 *) p);
}

// 8 channels of two open keys, x and y, times queries: steps q0 and q1
template <int KB>
__device__ __forceinline__ void score_rows(
    const uint4 & x, const uint4 & y, const uint2 & q0, const uint2 & q1, float (&s)[4]) {
    if constexpr (KB > LATTICE) { // channels in pairs (0, 1) (2, 3)
        mma(s, { x.x, y.x, x.y, y.y }, q0.x, q0.y);
        mma(s, { x.z, y.z, x.w, y.w }, q1.x, q1.y);
    } else {
        mma(s, { even(x.x, x.y), even(y.x, y.y), odd(x.x, x.y), odd(y.x, y.y) }, q0.x, q0.y);
        mma(s, { even(x.z, x.w), even(y.z, y.w), odd(x.z, x.w), odd(y.z, y.w) }, q1.x, q1.y);
    }
}

// scores of two open keys for all columns; rows: of the first, channel 0 of the slice
template <int D, int KB, bool SHARED, typename X, typename Q>
__device__ __forceinline__ void score_open_pair(
    const X & of, const Q & q, const uint16_t * rows, int stride, float (&s)[4]) {
    const int c = threadIdx.x % 4;
    s[0] = s[1] = s[2] = s[3] = 0.0f;
#pragma unroll
    for (int u = 0; u < D / 32; u++) {
        const uint16_t * at = rows + of.near(channel_of<D, KB>(c, 2 * u), 8); // beyond the head queries are 0
        score_rows<KB>(row16<SHARED>(at), row16<SHARED>(at + stride), query_of(q, 2 * u), query_of(q, 2 * u + 1), s);
    }
}

// scores of open keys; rows: of this thread's cell j = 0, b = 0, channel 0 of the slice
template <int D, int KB, bool SHARED, int J = 4, typename X, typename Q>
__device__ __forceinline__ void score_open(
    const X & of, const Q & q, const uint16_t * rows, int stride, float (&s)[J][4]) {
#pragma unroll
    for (int j = 0; j < J; j++) {
        score_open_pair<D, KB, SHARED>(of, q, rows + (size_t) (4 * j) * stride, stride, s[j]);
    }
}

// Open keys of a decode kernel: a function of its own, so that what it needs while it waits for rows takes no
// registers from sealed ones.
template <int D, int KB, typename X>
__device__ __noinline__ void score_open_rows(
    const X of, const shared_query q, const uint16_t * rows, int stride, float (&s)[4][4]) {
    float x[4][4];
    score_open<D, KB, false>(of, q, rows, stride, x);
#pragma unroll
    for (int i = 0; i < 16; i++) { s[i / 4][i % 4] = x[i / 4][i % 4]; }
}

// as the model asks
template <int J> __device__ __forceinline__ void cap_scores(const kvq_attend_args & a, float (&s)[J][4]) {
    if (a.softcap != 0.0f) {
        // nvcc would also make a true division for models without a cap
        const float cap = a.softcap * LOG2E, inv = __fdividef(2.0f, a.softcap);
#pragma unroll
        for (int j = 0; j < J; j++) {
#pragma unroll
            // cap * tanh(s / cap)
            for (int i = 0; i < 4; i++) {
                s[j][i] = cap - __fdividef(2.0f * cap, 1.0f + exp2_fast(fminf(s[j][i] * inv, 64.0f)));
            }
        }
    }
}

// scores in units of q.k from those in units of codes and their zeros' share
template <int J> __device__ __forceinline__ void scale_scores(float unit, const float (&base)[4], float (&s)[J][4]) {
#pragma unroll
    for (int j = 0; j < J; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) { s[j][i] = fmaf(s[j][i], unit, base[i]); }
    }
}

// How far the weight of probabilities of step j lies above 1, in powers of two, for the planes of V.
template <int VB> __device__ __forceinline__ constexpr int v_boost() { return VB >= 16 ? 0 : VB == 1 ? 3 : 4; }
template <int VB> __device__ __forceinline__ constexpr int v_weight(int j) {
    return VB >= 16 ? 0 : v_boost<VB>() - cut<VB>::W * (j % cut<VB>::P);
}

__device__ __forceinline__ uint32_t word(const uint4 & x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// params: of keys and values, in f16. p: weighted probabilities of step j, cells (0, 2) and (1, 3). HALVES: groups of
// 16 channels. Rows of a product are then of two groups (g below 4, and above), so there are two products, each of
// which sees the rows of one group alone.
template <int D, int KB, int VB, bool HALVES>
__device__ __forceinline__ void accumulate(const kvq_attend_args & a, const uint8_t * stage, const uint8_t * params,
    const uint32_t (&p)[4][2], float (&o)[D / 16][4], float (&oz)[4]) {
    using map = stage_map<D, KB, VB>;
    constexpr int W = cut<VB>::W, P = cut<VB>::P, N = P == 2 ? 2 : 1; // N: words of a channel that a thread needs
    // turn: two threads share a word of 8 planes
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, turn = c % 2 * 4;
    const int n_groups = D >> a.v_group_log2;
    params += a.stage_v_params + c * 32;
    {
        uint32_t z[2][4]; // row g of this product: channel group g
        read_params(params + min(g, n_groups - 1) * 256 + 128, z[0]);
        read_params(params + min(g, n_groups - 1) * 256 + 144, z[1]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float back = g < n_groups ? exp2_of(-v_weight<VB>(j)) : 0.0f;
            const uint32_t f[4] = { mul2(z[j / 2][j % 2 * 2], back), 0, mul2(z[j / 2][j % 2 * 2 + 1], back), 0 };
            mma(oz, f, p[j][0], p[j][1]);
        }
    }
    const int chunk = P == 8 ? c / 2 : N * c; // the first
    const uint8_t *words = stage + map::V + g / 4 * (2 * W * 64) + chunk / 2 * 128,
                  *words1 = stage + map::V_HIGH + g / 4 * 128;
    uint32_t ps[4][2];
#pragma unroll
    for (int k = 0; k < D / 32 * (HALVES ? 2 : 1); k++) {
        const int i = HALVES ? k / 2 : k;
        if (k == 0 || HALVES || !(32 * i & ((1 << a.v_group_log2) - 1))) {
            const int group = HALVES ? k : 32 * i >> a.v_group_log2;
            uint32_t s[2][4];
            read_params(params + group * 256, s[0]);
            read_params(params + group * 256 + 16, s[1]);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                ps[j][0] = mul2(p[j][0], s[j / 2][j % 2 * 2]);
                ps[j][1] = mul2(p[j][1], s[j / 2][j % 2 * 2 + 1]);
            }
        }
        const bool mine = !HALVES || g / 4 == k % 2;
        uint4 x[N], h = {};
#pragma unroll
        for (int n = 0; n < N; n++) {
            x[n] = *(
                const uint4 *) (words + i * (4 * W * 64) + (((chunk + n) % 2 * 4 + g % 4) ^ 2 * (chunk / 2 % 4)) * 16);
        }
        if (cut<VB>::high) { h = *(const uint4 *) (words1 + i * 256 + (c / 2 * 4 + g % 4) * 16); }
        if (!mine) {
#pragma unroll
            for (int n = 0; n < N; n++) { x[n] = make_uint4(0, 0, 0, 0); }
            h = make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int r = 0; r < 4; r += 2) { // channels 32i + 4g + r, + r + 1
            uint32_t hx = rotate(word(h, r), turn), hy = rotate(word(h, r + 1), turn);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t y0 = word(x[j / P % N], r), y1 = word(x[j / P % N], r + 1);
                if (P == 8) {
                    y0 = rotate(y0, turn);
                    y1 = rotate(y1, turn);
                }
                const uint32_t f[4] = { fields<VB>(y0, hx, j % P, false), fields<VB>(y1, hy, j % P, false),
                    fields<VB>(y0, hx, j % P, true), fields<VB>(y1, hy, j % P, true) };
                mma(o[2 * i + r / 2], f, ps[j][0], ps[j][1]);
            }
        }
    }
}

// rows: of this thread's first cell, channel 0 of the slice
template <int D, int VB, bool SHARED, int J = 4, typename X>
__device__ __forceinline__ void accumulate_open(
    const X & of, const uint16_t * rows, int stride, const uint32_t (&p)[J][2], float (&o)[D / 16][4]) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < J; j++) {
        const float back = exp2_of(-v_weight<VB>(j));
        const uint32_t p0 = mul2(p[j][0], back), p1 = mul2(p[j][1], back);
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            uint2 x[4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                x[t] = row8<SHARED>(rows + (size_t) (4 * j + t) * stride + of.near(32 * i + 4 * g, 4));
            }
            const uint32_t a[4] = { even(x[0].x, x[2].x), odd(x[0].x, x[2].x), even(x[1].x, x[3].x),
                odd(x[1].x, x[3].x) };
            const uint32_t b[4] = { even(x[0].y, x[2].y), odd(x[0].y, x[2].y), even(x[1].y, x[3].y),
                odd(x[1].y, x[3].y) };
            mma(o[2 * i], a, p0, p1);
            mma(o[2 * i + 1], b, p0, p1);
        }
    }
}

template <int D, int VB, typename X>
__device__ __noinline__ void accumulate_open_rows(
    const X of, const uint16_t * rows, int stride, const uint32_t (&p)[4][2], float (&o)[D / 16][4]) {
    uint32_t q[4][2];
    float x[D / 16][4];
#pragma unroll
    for (int i = 0; i < 8; i++) { q[i / 2][i % 2] = p[i / 2][i % 2]; }
#pragma unroll
    for (int i = 0; i < D / 4; i++) { x[i / 4][i % 4] = o[i / 4][i % 4]; }
    accumulate_open<D, VB, false>(of, rows, stride, q, x);
#pragma unroll
    for (int i = 0; i < D / 4; i++) { o[i / 4][i % 4] = x[i / 4][i % 4]; }
}

// over the threads that have a column's cells
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
    for (int d = 4; d <= 16; d *= 2) { x += __shfl_xor_sync(~0u, x, d); }
    return x;
}

// s += slope * mask, row b = i / 2, column e = i % 2; top: the largest of each column. False: nothing is seen
template <int J>
__device__ __forceinline__ bool mask_scores(
    const uint32_t (&mk)[2][J], const float (&slope)[2], float (&s)[J][4], float (&top)[2]) {
#pragma unroll
    for (int j = 0; j < J; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 mm = __half22float2(as_half2(mk[i % 2][j]));
            s[j][i] = fmaf(slope[i % 2], i / 2 ? mm.y : mm.x, s[j][i]);
            top[i % 2] = fmaxf(top[i % 2], s[j][i]);
        }
    }
    return __any_sync(~0u, top[0] > -INFINITY || top[1] > -INFINITY);
}

// of scores that are masked: the largest of each column. False: nothing is seen
template <int J> __device__ __forceinline__ bool find_tops(const float (&s)[J][4], float (&top)[2]) {
#pragma unroll
    for (int j = 0; j < J; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) { top[i % 2] = fmaxf(top[i % 2], s[j][i]); }
    }
    return __any_sync(~0u, top[0] > -INFINITY || top[1] > -INFINITY);
}

// Maxima m of the columns rise to top where a score is above them, and o, which is relative to them, follows; f: the
// factor for what else is. False: they stay.
template <int S>
__device__ __forceinline__ bool raise_maxima(float (&top)[2], float (&m)[2], float (&o)[S][4], float (&f)[2]) {
    if (!__any_sync(~0u, top[0] > m[0] || top[1] > m[1])) { return false; }
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int d = 4; d <= 16; d *= 2) { top[e] = fmaxf(top[e], __shfl_xor_sync(~0u, top[e], d)); }
        top[e] = fmaxf(top[e], m[e]);
        f[e] = m[e] == -INFINITY ? 0.0f : exp2_fast(m[e] - top[e]);
        m[e] = top[e];
    }
#pragma unroll
    for (int n = 0; n < S; n++) {
        o[n][0] *= f[0];
        o[n][1] *= f[1];
        o[n][2] *= f[0];
        o[n][3] *= f[1];
    }
    return true;
}

// sums of one block for a row, to be added up with those of others; size: channels of a head, channel: of this lane;
// sealed: part of l whose values lack their mean
__device__ __forceinline__ void put_partial(const kvq_attend_args & a, int is, int kvh, int row, int split, int size,
    int channel, float4 x, float m, float l, float sealed) {
    float * out = a.partial + partial_at(a, is, kvh, row, split);
    *(float4 *) (out + channel) = x;
    if (channel == 0) { *(float4 *) (out + size) = make_float4(m, l, sealed, 0.0f); }
}

// One thread of a block that has put its sums: is it the last of n_blocks? Releases what the block wrote, acquires
// what the others did. at: of the stream's tickets.
__device__ __forceinline__ bool arrives_last(const kvq_attend_args & a, int at, int n_blocks) {
    uint32_t *ticket = a.tickets + blockIdx.z * gridDim.y + at, before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
    const bool last = before == (uint32_t) n_blocks - 1;
    if (last) {
        *ticket = 0; // for the next launch
    }
    return last;
}

// Launches a decode kernel or, with `occupancy`, tells how many blocks a multiprocessor holds, how many warps those
// have and what shared memory: as many as there is room for, but whole teams. bytes(n): of n warps. Kernels for 64
// and 128 channels always have all.
template <typename K, typename L, typename F>
void kvq_launch_decode_kernel(K * kernel, L & limit, const kvq_attend_args & a, int n_warps, bool wide, F && bytes,
    int n_streams, cudaStream_t stream, int * occupancy) {
    if (occupancy) {
        int n = wide && a.one_team ? 1 << a.slices_log2 : n_warps;
        const size_t most = (size_t) a.max_shared;
        // a lane for each team's columns of a row
        const int team = 1 << a.slices_log2, columns = 1 << row_columns_log2(a);
        while (wide && n > team && (bytes(n) > most || n / team * columns > 32)) { n -= team; }
        occupancy[0] = 0;
        occupancy[1] = n;
        occupancy[2] = (int) bytes(n);
        if (bytes(n) <= most) {
            limit.raise(kernel, bytes(n));
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(occupancy, kernel, 32 * n, bytes(n));
            // 1 KB of each is CUDA's
            occupancy[0] = std::min(occupancy[0], (int) ((size_t) a.max_shared_sm / (bytes(n) + 1024)));
        }
        return;
    }
    const int n = wide ? a.n_warps : n_warps;
    limit.raise(kernel, bytes(n));
    const dim3 grid =
        a.work ? dim3(a.n_work, a.n_head_kv, 1) : dim3(a.n_splits, a.n_head_kv * kvq_decode_row_blocks(a), n_streams);
    kvq_launch(!a.in_order, kernel, grid, 32 * n, bytes(n), stream, a);
}

} // namespace

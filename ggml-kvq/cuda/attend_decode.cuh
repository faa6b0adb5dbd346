// Attention of few rows (query heads of a group times query tokens) over long caches. A warp walks 64 cells at a time. Codes and
// parameters of the next 64 cells are on their way into the warp's own shared memory (cp.async) while it works on these; from there
// codes go through registers into the left operand of m16n8k16, which has 16 rows of them for 8 columns of queries:
//
//   S = K Q^T     rows = cells, columns = query rows, contracted = channels
//   O = V^T P^T   rows = channels, columns = query rows, contracted = cells
//
// Unpacking is one AND per two codes: the fields of a word's plane, two bytes apart, are two f16 denormals code * 2^(W*plane - 24),
// which tensor cores multiply exactly. The plane's weight 2^-(W*plane) goes into the other operand, with the scale, the power of two
// that is left over comes off in f32. Zeros are one more product:  q.(zero + scale*code) = q.zero + (q*scale).code  and likewise p.
//
// A thread is (g = lane/4, c = lane%4). Of the 64 cells it holds
//   in S   the rows:    cells 16*(g/2) + 2*(g%2) + 4j + {0, 1},  j = 0..3
//   in O   contracted:  cells 16c + 4j + {0..3}: of a word of V plane j, bytes (0,2) and (1,3); one movmatrix per 8 cells brings P there
// and of the channels of S  base(c, s) + {0..3}, s = 0..D/16-1, of those of O  32i + 4g + {0..3}, i = 0..D/32-1.
//
// The order of channels within S is free, and that of cells within O, which is all this rests on.
//
// Keys with groups of 32 cells (16) have 2 (4) scales within the 64 cells. The 8 columns then hold the 4 (2) query rows once per group,
// multiplied with that group's scales, and a column sees its own cells only; columns of a row are added up at the end like splits are.
#pragma once

#include "attend.cuh"

#include <algorithm>

namespace {

constexpr int DECODE_WARPS = 4, DECODE_CELLS = 64, DECODE_COLUMNS = 8;
constexpr int K_BOOST = 3;               // weights of K planes: 2^(3 - W*plane)
constexpr float LOG2E = 1.44269504f;

__device__ __forceinline__ __half2 as_half2(uint32_t x) { return *(const __half2 *) &x; }
__device__ __forceinline__ uint32_t as_u32(const __half2 & x) { return *(const uint32_t *) &x; }
__device__ __forceinline__ uint32_t mul2(uint32_t a, uint32_t b) { return as_u32(__hmul2(as_half2(a), as_half2(b))); }
__device__ __forceinline__ uint32_t mul2(uint32_t a, float b) { return as_u32(__hmul2(as_half2(a), __float2half2_rn(b))); }
__device__ __forceinline__ uint32_t even(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); } // (a.x, b.x)
__device__ __forceinline__ uint32_t odd (uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }
__device__ __forceinline__ uint4 load16(const void * p) { return __ldg((const uint4 *) p); }
__device__ __forceinline__ uint2 load8 (const void * p) { return __ldg((const uint2 *) p); }
__device__ __forceinline__ uint32_t rotate(uint32_t x, int right) { return __funnelshift_r(x, x, right); }
__device__ __forceinline__ float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ constexpr float exp2_of(int n) { return n < 0 ? 1.0f / (float) (1 << -n) : (float) (1 << n); }
__device__ __forceinline__ uint32_t transpose(uint32_t x) { uint32_t y; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x)); return y; }

// How a lane of codes of BITS is cut: the first part's width, planes of a word, and the 1-bit part of 3 bits.
template <int BITS> struct cut {
    static constexpr int W = BITS == 3 ? 2 : BITS == 16 ? 4 : BITS, P = 8 / W;
    static constexpr bool high = BITS == 3;
};

// fields of plane `pl` of bytes (0, 2) of x, or (1, 3), as two denormals; high: the word of third bits, its plane 0 belongs to plane 0
template <int BITS> __device__ __forceinline__ uint32_t fields(uint32_t x, uint32_t high, int pl, bool second) {
    constexpr int W = cut<BITS>::W;
    const uint32_t mask = (uint32_t) (((1 << W) - 1) << (W * pl)) * 0x00010001u;
    uint32_t y = (second ? x >> 8 : x) & mask;
    if (BITS == 3) {
        y |= (second ? high >> (6 - pl) : high << (pl + 2)) & (0x00010001u << (2*pl + 2));
    }
    return y;
}

// 8 neighbouring scales or zeros of the stage, in pairs (0, 2) (1, 3) (4, 6) (5, 7)
__device__ __forceinline__ void read_params(const uint8_t * at, uint32_t (&out)[4]) {
    const uint4 x = *(const uint4 *) at;
    out[0] = even(x.x, x.y); out[1] = odd(x.x, x.y);
    out[2] = even(x.z, x.w); out[3] = odd(x.z, x.w);
}

// first of the 4 channels of S that thread c contracts in step s
template <int D, int KB> __device__ __forceinline__ int channel_of(int c, int s) {
    constexpr int P = cut<KB>::P, S = D / 16;
    return S < P ? 16*c + 4*s : (c + 4 * (s / P)) * 4*P + s % P * 4; // a word a thread, or half a word
}

// ---------------------------------------------------------------- the stage: 64 cells of one KV head
//   codes of K    [tile of 16 cells: 4][chunk][16 bytes: 4]      a piece of 16 bytes is xored with its tile
//   codes of V    [tile of 16 channels][chunk][16 bytes: 4]      and here with its pair of chunks, so that reads find all banks
//   (each followed by the part of third bits, if any)
//   K parameters  f16 [part][scale, zero][D]
//   V parameters  f16 [group][scale, zero][64]
// 8-bit parameters arrive behind that in the same order, one byte each, followed by 8 bytes of ranges a part (K) or half (V), and are
// turned into f16 once they are here.
template <int D, int KB, int VB> struct stage_map {
    static constexpr int WK = cut<KB>::W, WV = cut<VB>::W;
    static constexpr int K = 0, K_HIGH = K + 4 * (D * WK / 32) * 64, V = K_HIGH + (cut<KB>::high ? 4 * (D / 32) * 64 : 0);
    static constexpr int V_HIGH = V + D / 16 * 2*WV * 64, K_PARAMS = V_HIGH + (cut<VB>::high ? D / 16 * 2 * 64 : 0);
};

struct half_page { const uint8_t * k_codes, * k_params, * v_codes, * v_params; int t; }; // of one KV head; t: first cell in the page

__device__ __forceinline__ void copy16(uint32_t to, const void * from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory"); }
__device__ __forceinline__ void copy8 (uint32_t to, const void * from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 8;"  :: "r"(to), "l"(from) : "memory"); }
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); __syncwarp(); }

template <int D, int W> __device__ __forceinline__ void copy_keys(uint32_t to, const uint8_t * a, int ta, const uint8_t * b, int tb) {
    constexpr int N = D * W / 32 * 4; // pieces of a tile
    const int lane = threadIdx.x % 32;
    a += (ta / 16) * N * 16;
    b += (tb / 16) * N * 16;
#pragma unroll
    for (int k = 0; k < N / 8; k++) {
        const int at = lane + 32*k, tile = at / N, rest = at % N;
        copy16(to + (tile * N + (rest ^ tile)) * 16, (tile < 2 ? a : b) + ((tile & 1) * N + rest) * 16);
    }
}

template <int D, int W> __device__ __forceinline__ void copy_values(uint32_t to, const uint8_t * a, int ta, const uint8_t * b, int tb, int n_chunks) {
    constexpr int N = 2*W * 4; // pieces of a tile
    const int lane = threadIdx.x % 32;
    a += ta / 32 * W * 64;
    b += tb / 32 * W * 64;
#pragma unroll
    for (int k = 0; k < D / 16 * N / 32; k++) {
        const int at = lane + 32*k, tile = at / N, chunk = at % N / 4, slot = at % 8 ^ 2 * (chunk / 2 % 4);
        copy16(to + tile * N * 16 + chunk / 2 * 128 + slot * 16, (chunk < W ? a : b) + (tile * n_chunks + chunk % W) * 64 + at % 4 * 16);
    }
}

// asks for what two halves hold; a or b twice when only one counts
template <int D, int KB, int VB> __device__ __forceinline__ void copy_stage(const kvq_attend_args & a, uint32_t to, const half_page (&h)[2], bool keys, bool values) {
    using map = stage_map<D, KB, VB>;
    const int lane = threadIdx.x % 32;
    if (keys) {
        copy_keys<D, map::WK>(to + map::K, h[0].k_codes, h[0].t, h[1].k_codes, h[1].t);
        if (cut<KB>::high) { copy_keys<D, 1>(to + map::K_HIGH, h[0].k_codes + a.k.offset[1], h[0].t, h[1].k_codes + a.k.offset[1], h[1].t); }
        const uint32_t at = to + map::K_PARAMS + (a.k.scale ? a.stage_raw_k : 0);
#pragma unroll 1
        for (int i = lane; i < (D / 4 << a.k_parts_log2); i += 32) { // 8 channels of scales or zeros of a part
            const int part = i / (D / 4), rest = i % (D / 4);
            const bool second = a.k_parts_log2 && part >> (a.k_parts_log2 - 1);
            const int cell = (second ? h[1].t : h[0].t) + (a.k_parts_log2 == 2 ? part % 2 * 16 : 0);
            const int index = (rest < D / 8 ? 0 : a.k.np - D) + (cell >> a.k_group_log2) * D + rest * 8;
            const uint8_t * p = second ? h[1].k_params : h[0].k_params;
            if (!a.k.scale) {
                copy16(at + i * 16, p + 2*index);
            } else {
                copy8(at + i * 8, p + 8 + index);
                if (rest == 0) { copy8(at + (2*D << a.k_parts_log2) + part * 8, p); }
            }
        }
    }
    if (values) {
        copy_values<D, map::WV>(to + map::V, h[0].v_codes, h[0].t, h[1].v_codes, h[1].t, a.v.n_chunks[0]);
        if (cut<VB>::high) { copy_values<D, 1>(to + map::V_HIGH, h[0].v_codes + a.v.offset[1], h[0].t, h[1].v_codes + a.v.offset[1], h[1].t, a.v.n_chunks[1]); }
        const uint32_t at = to + map::K_PARAMS + (a.v.scale ? a.stage_raw_v : a.stage_v_params);
        const int n = 16 * D >> a.v_group_log2;
#pragma unroll 1
        for (int i = lane; i < n; i += 32) { // 8 cells of scales or zeros of a group
            const bool second = i % 8 >= 4;
            const uint8_t * p = second ? h[1].v_params : h[0].v_params;
            const int index = (i / 8 % 2 ? a.v.np : 0) + i / 16 * a.v.n_cells + (second ? h[1].t : h[0].t) + i % 4 * 8;
            if (!a.v.scale) {
                copy16(at + i * 16, p + 2*index);
            } else {
                copy8(at + i * 8, p + 8 + index);
                if (i % 4 == 0 && i < 8) { copy8(at + n * 8 + i / 4 * 8, p); }
            }
        }
    }
}

template <int D, int KB, int VB> __device__ __noinline__ void copy_stage_late(const kvq_attend_args & a, uint32_t to, half_page h0, half_page h1, bool keys, bool values) {
    const half_page h[2] = { h0, h1 };
    copy_stage<D, KB, VB>(a, to, h, keys, values);
}

// 8-bit parameters that have arrived
__device__ __forceinline__ void widen(const uint8_t * raw, int i, const uint8_t * ranges, uint8_t * out) {
    const __half2 range = as_half2(*(const uint32_t *) ranges), low = __half2half2(range.x), step = __half2half2(range.y), magic = __float2half2_rn(1024.0f);
    const uint2 x = *(const uint2 *) (raw + 8*i);
    uint32_t y[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        y[j] = __byte_perm(j < 2 ? x.x : x.y, 0x64646464u, j % 2 ? 0x4342 : 0x4140);
        y[j] = as_u32(__hfma2(__hsub2(as_half2(y[j]), magic), step, low));
    }
    *(uint4 *) (out + 16*i) = make_uint4(y[0], y[1], y[2], y[3]);
}

template <int D, int KB, int VB> __device__ __forceinline__ void widen_stage(const kvq_attend_args & a, uint8_t * stage) {
    uint8_t * const params = stage + stage_map<D, KB, VB>::K_PARAMS;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = lane; i < (D / 4 << a.k_parts_log2); i += 32) {
        const int part = i / (D / 4), zero = i % (D / 4) / (D / 8);
        widen(params + a.stage_raw_k, i, params + a.stage_raw_k + (2*D << a.k_parts_log2) + part * 8 + zero * 4, params);
    }
    const int n = 16 * D >> a.v_group_log2;
#pragma unroll 1
    for (int i = lane; i < n; i += 32) {
        widen(params + a.stage_raw_v, i, params + a.stage_raw_v + n * 8 + i / 4 % 2 * 8 + i / 8 % 2 * 4, params + a.stage_v_params);
    }
    __syncwarp();
}

// scores of sealed keys, cells of accumulator j as above, in units of codes; base: their zeros' share
template <int D, int KB, int VB> __device__ __forceinline__
void score(const kvq_attend_args & a, const uint32_t (&q)[D / 16][2], const uint8_t * stage, float (&s)[4][4], float (&base)[4]) {
    using map = stage_map<D, KB, VB>;
    constexpr int W = cut<KB>::W, P = cut<KB>::P, S = D / 16, N = D * W / 32 * 4;
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, tile = g / 2, part = g >> (3 - a.k_parts_log2);
#pragma unroll
    for (int e = 0; e < 4; e++) {
        base[e] = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) { s[j][e] = 0.0f; }
    }
    const uint8_t * params = stage + map::K_PARAMS + part * 4*D;
    const uint8_t * words = stage + map::K + tile * N * 16 + g % 2 * 8, * words1 = stage + map::K_HIGH + tile * (D / 8) * 16 + g % 2 * 8;
    uint2 x[4], h[4];
#pragma unroll
    for (int u = 0; u < S / 2; u++) { // 8 channels
        const int channel = channel_of<D, KB>(c, 2*u);
        if (S < P ? u == 0 : 2*u % P == 0) {
            const int chunk = S < P ? c / 2 : c + 4 * (2*u / P);
#pragma unroll
            for (int j = 0; j < 4; j++) { x[j] = *(const uint2 *) (words + chunk * 64 + (j ^ tile) * 16); }
            if (cut<KB>::high) {
#pragma unroll
                for (int j = 0; j < 4; j++) { h[j] = *(const uint2 *) (words1 + chunk / 2 * 64 + (j ^ tile) * 16); }
            }
            if (S < P || cut<KB>::high) { // two threads share a word of 8 planes
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    uint2 & y = cut<KB>::high ? h[j] : x[j];
                    y.x = rotate(y.x, 4 * (c % 2));
                    y.y = rotate(y.y, 4 * (c % 2));
                }
            }
        }
        uint32_t scale[4], zero[4];
        read_params(params + 2*channel,       scale);
        read_params(params + 2*channel + 2*D, zero);
#pragma unroll
        for (int v = 0; v < 2; v++) {
            const int t = 2*u + v, pl = S < P ? t : t % P;
            const uint32_t z[4] = { zero[2*v], zero[2*v], zero[2*v + 1], zero[2*v + 1] };
            mma(base, z, q[t][0], q[t][1]);
            const float weight = exp2_of(K_BOOST - W*pl);
            const uint32_t q0 = mul2(mul2(q[t][0], scale[2*v]), weight), q1 = mul2(mul2(q[t][1], scale[2*v + 1]), weight);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t f[4] = { fields<KB>(x[j].x, h[j].x, pl, false), fields<KB>(x[j].y, h[j].y, pl, false),
                                        fields<KB>(x[j].x, h[j].x, pl, true),  fields<KB>(x[j].y, h[j].y, pl, true) };
                mma(s[j], f, q0, q1);
            }
        }
    }
}

// scores of open keys; rows: of this thread's cell j = 0, b = 0, channel 0
template <int D, int KB> __device__ __forceinline__
void score_open(const uint32_t (&q)[D / 16][2], const uint16_t * rows, int stride, float (&s)[4][4]) {
    constexpr int S = D / 16;
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) { s[j][e] = 0.0f; }
#pragma unroll
        for (int u = 0; u < S / 2; u++) {
            const uint16_t * at = rows + (size_t) (4*j) * stride + channel_of<D, KB>(c, 2*u);
            const uint4 x = load16(at), y = load16(at + stride);
            const uint32_t a[4] = { even(x.x, x.y), even(y.x, y.y), odd(x.x, x.y), odd(y.x, y.y) };
            const uint32_t b[4] = { even(x.z, x.w), even(y.z, y.w), odd(x.z, x.w), odd(y.z, y.w) };
            mma(s[j], a, q[2*u][0],     q[2*u][1]);
            mma(s[j], b, q[2*u + 1][0], q[2*u + 1][1]);
        }
    }
}

// How far the weight of probabilities of step j lies above 1, in powers of two, for the planes of V.
template <int VB> __device__ __forceinline__ constexpr int v_boost() { return VB == 16 ? 0 : VB == 1 ? 3 : 4; }
template <int VB> __device__ __forceinline__ constexpr int v_weight(int j) { return VB == 16 ? 0 : v_boost<VB>() - cut<VB>::W * (j % cut<VB>::P); }

__device__ __forceinline__ uint32_t word(const uint4 & x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// p: weighted probabilities of step j, cells (0, 2) and (1, 3)
template <int D, int KB, int VB> __device__ __forceinline__
void accumulate(const kvq_attend_args & a, const uint8_t * stage, const uint32_t (&p)[4][2], float (&o)[D / 16][4], float (&oz)[4]) {
    using map = stage_map<D, KB, VB>;
    constexpr int W = cut<VB>::W, P = cut<VB>::P, N = P == 2 ? 2 : 1; // N: words of a channel that a thread needs
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, turn = c % 2 * 4; // turn: two threads share a word of 8 planes
    const int n_groups = D >> a.v_group_log2;
    const uint8_t * params = stage + map::K_PARAMS + a.stage_v_params + c * 32;
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
    const uint8_t * words = stage + map::V + g / 4 * (2*W * 64) + chunk / 2 * 128, * words1 = stage + map::V_HIGH + g / 4 * 128;
    uint32_t ps[4][2];
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        if (i == 0 || !(32*i & ((1 << a.v_group_log2) - 1))) {
            uint32_t s[2][4];
            read_params(params + (32*i >> a.v_group_log2) * 256,      s[0]);
            read_params(params + (32*i >> a.v_group_log2) * 256 + 16, s[1]);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                ps[j][0] = mul2(p[j][0], s[j / 2][j % 2 * 2]);
                ps[j][1] = mul2(p[j][1], s[j / 2][j % 2 * 2 + 1]);
            }
        }
        uint4 x[N], h = {};
#pragma unroll
        for (int n = 0; n < N; n++) { x[n] = *(const uint4 *) (words + i * (4*W * 64) + (((chunk + n) % 2 * 4 + g % 4) ^ 2 * (chunk / 2 % 4)) * 16); }
        if (cut<VB>::high) { h = *(const uint4 *) (words1 + i * 256 + (c / 2 * 4 + g % 4) * 16); }
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
                const uint32_t f[4] = { fields<VB>(y0, hx, j % P, false), fields<VB>(y1, hy, j % P, false), fields<VB>(y0, hx, j % P, true), fields<VB>(y1, hy, j % P, true) };
                mma(o[2*i + r / 2], f, ps[j][0], ps[j][1]);
            }
        }
    }
}

// rows: of this thread's first cell, channel 0
template <int D, int VB> __device__ __forceinline__
void accumulate_open(const uint16_t * rows, int stride, const uint32_t (&p)[4][2], float (&o)[D / 16][4]) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float back = exp2_of(-v_weight<VB>(j));
        const uint32_t p0 = mul2(p[j][0], back), p1 = mul2(p[j][1], back);
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            uint2 x[4];
#pragma unroll
            for (int t = 0; t < 4; t++) { x[t] = load8(rows + (size_t) (4*j + t) * stride + 32*i + 4*g); }
            const uint32_t a[4] = { even(x[0].x, x[2].x), odd(x[0].x, x[2].x), even(x[1].x, x[3].x), odd(x[1].x, x[3].x) };
            const uint32_t b[4] = { even(x[0].y, x[2].y), odd(x[0].y, x[2].y), even(x[1].y, x[3].y), odd(x[1].y, x[3].y) };
            mma(o[2*i],     a, p0, p1);
            mma(o[2*i + 1], b, p0, p1);
        }
    }
}

// sums of a column: o relative to exp2(m), l likewise
template <int D> struct decode_sums {
    float o[DECODE_WARPS][DECODE_COLUMNS][D], m[DECODE_WARPS][DECODE_COLUMNS], l[DECODE_WARPS][DECODE_COLUMNS];
    int last;
};

// Rows of this block from its columns, then from all blocks of the row by the last of them to arrive.
template <int D> __device__ void merge_rows(const kvq_attend_args & a, decode_sums<D> & s, int is, int kvh, int row0, int n_rows, int n_blocks) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, per_row = DECODE_COLUMNS >> a.k_parts_log2;
    const auto finish = [&](int row, int channel, float4 x, float m, float l) {
        const int head = row_head(a, kvh, row);
        float f = 1.0f;
        if (a.sinks) { // one more logit without a value
            const float sink = a.sinks[head] * LOG2E, top = fmaxf(m, sink);
            f = m == -INFINITY ? 0.0f : exp2_fast(m - top);
            l = l * f + exp2_fast(sink - top);
        }
        f = l > 0.0f ? f / l : 0.0f;
        float * out = a.stream[is].dst + row_token(a, row) * a.dst_stride_token + head * a.dst_stride_head + channel;
        out[0] = x.x * f; out[1] = x.y * f; out[2] = x.z * f; out[3] = x.w * f;
    };
    for (int r = warp; r < n_rows; r += DECODE_WARPS) { // a lane: one column of a warp, then 4 channels
        const int n_sources = DECODE_WARPS << a.k_parts_log2, parts = (1 << a.k_parts_log2) - 1, w = lane >> a.k_parts_log2, col = (lane & parts) * per_row + r;
        float m = lane < n_sources ? s.m[w][col] : -INFINITY, l = lane < n_sources ? s.l[w][col] : 0.0f, f = m;
        for (int d = 16; d; d /= 2) { m = fmaxf(m, __shfl_xor_sync(~0u, m, d)); }
        f = f == -INFINITY ? 0.0f : exp2_fast(f - m);
        l *= f;
        for (int d = 16; d; d /= 2) { l += __shfl_xor_sync(~0u, l, d); }
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int i = 0; i < n_sources; i++) {
            const float fi = __shfl_sync(~0u, f, i);
            const float4 y = *(const float4 *) &s.o[i >> a.k_parts_log2][(i & parts) * per_row + r][lane % (D / 4) * 4];
            x.x += fi * y.x; x.y += fi * y.y; x.z += fi * y.z; x.w += fi * y.w;
        }
        if (lane >= D / 4) {
            continue;
        }
        if (n_blocks == 1) {
            finish(row0 + r, 4*lane, x, m, l);
        } else {
            float * out = a.partial + partial_at(a, is, kvh, row0 + r, blockIdx.x);
            *(float4 *) (out + 4*lane) = x;
            if (lane == 0) { *(float2 *) (out + D) = make_float2(m, l); }
        }
    }
    if (n_blocks == 1) {
        return;
    }
    __syncthreads();
    if (threadIdx.x == 0) { // releases what the block wrote, acquires what the others did
        uint32_t * ticket = a.tickets + blockIdx.z * gridDim.y + blockIdx.y, before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
        s.last = before == (uint32_t) n_blocks - 1;
        if (s.last) {
            *ticket = 0; // for the next launch
        }
    }
    __syncthreads();
    if (!s.last) {
        return;
    }
    for (int r = warp; r < n_rows; r += DECODE_WARPS) {
        const float * p = a.partial + partial_at(a, is, kvh, row0 + r, 0);
        float m = -INFINITY, l = 0.0f;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        constexpr int HALVES = 128 / D; // a warp reads as many rows of partial results at once
        for (int b0 = 0; b0 < n_blocks; b0 += 32) {
            float2 ml = make_float2(-INFINITY, 0.0f); // of block b0 + lane
            if (b0 + lane < n_blocks) { ml = __ldcg((const float2 *) (p + (size_t) (b0 + lane) * (D + 4) + D)); }
            float top = ml.x;
            for (int d = 16; d; d /= 2) { top = fmaxf(top, __shfl_xor_sync(~0u, top, d)); }
            top = fmaxf(top, m);
            const float f = ml.x == -INFINITY ? 0.0f : exp2_fast(ml.x - top), old = m == -INFINITY ? 0.0f : exp2_fast(m - top);
            m = top;
            l = l * old + f * ml.y;
            x.x *= old; x.y *= old; x.z *= old; x.w *= old;
            const int n = min(32, n_blocks - b0);
#pragma unroll 16
            for (int b = 0; b < n; b += HALVES) {
                const int   at = min(b + lane / (D / 4), 31);
                const float fb = __shfl_sync(~0u, f, at); // 0 beyond the last block
                const float4 y = __ldcg((const float4 *) (p + (size_t) min(b0 + at, n_blocks - 1) * (D + 4) + lane % (D / 4) * 4));
                x.x += fb * y.x; x.y += fb * y.y; x.z += fb * y.z; x.w += fb * y.w;
            }
        }
        for (int d = 16; d; d /= 2) { l += __shfl_xor_sync(~0u, l, d); }
        for (int d = 16; d >= D / 4; d /= 2) {
            x.x += __shfl_xor_sync(~0u, x.x, d); x.y += __shfl_xor_sync(~0u, x.y, d);
            x.z += __shfl_xor_sync(~0u, x.z, d); x.w += __shfl_xor_sync(~0u, x.w, d);
        }
        if (lane < D / 4) {
            finish(row0 + r, 4*lane, x, m, l);
        }
    }
}

// mask of this thread's cells in S, 4j + {0, 1} from `slot` on in the page, for its two columns
__device__ __forceinline__ void load_mask(const kvq_attend_args & a, const __half * const (&mask)[2], bool one_mask, const kvq_page & page, int slot, uint32_t (&mk)[2][4]) {
    if (!page.map && page.cell + (slot & ~31) + 32 <= a.n_kv) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                mk[e][j] = !mask[e] ? 0 : e && one_mask ? mk[0][j] : __ldg((const uint32_t *) (mask[e] + page.cell + slot + 4*j));
            }
        }
        return;
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            mk[e][j] = 0;
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const int cell = page.map ? page.map[slot + 4*j + b] : page.cell + slot + 4*j + b;
                const uint32_t h = cell < 0 || cell >= a.n_kv ? 0xfc00 : mask[e] ? __half_as_ushort(mask[e][cell]) : 0;
                mk[e][j] |= h << 16*b;
            }
        }
    }
}

template <int D, int KB, int VB> __global__ void __launch_bounds__(32 * DECODE_WARPS, 3) decode_kernel(const __grid_constant__ kvq_attend_args a) {
    constexpr int S = D / 16;
    constexpr bool CODES = KB != 16; // sealed pages exist
    constexpr float FROM_K = (float) (1 << (24 - K_BOOST)), FROM_V = (float) (1 << (24 - v_boost<VB>()));
    extern __shared__ __align__(16) uint8_t memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4, is = blockIdx.z;
    const int per_row = DECODE_COLUMNS >> a.k_parts_log2, kvh = blockIdx.y % a.n_head_kv, row0 = blockIdx.y / a.n_head_kv * per_row;
    const auto & st = a.stream[is];

    // the warp's memory: two stages, then the pages of four units
    uint8_t * const stages = memory + warp * (2 * a.stage_bytes + 8 * sizeof(kvq_page));
    kvq_page * const ring = (kvq_page *) (stages + 2 * a.stage_bytes);
    const uint32_t stages_at = (uint32_t) __cvta_generic_to_shared(stages), ring_at = stages_at + 2 * a.stage_bytes;
    const int per_page = 1 << a.halves_log2, n_halves = a.n_pages << a.halves_log2, n_units = (n_halves + 1) / 2;
    const int split = blockIdx.x * DECODE_WARPS + warp, n_splits = a.n_splits * DECODE_WARPS;
    const int unit0 = (int) ((int64_t) n_units * split / n_splits), unit1 = (int) ((int64_t) n_units * (split + 1) / n_splits);

    const auto copy_pages = [&](int unit) { // of both halves of 32 cells
        const int half = min(2*unit + lane / 3, n_halves - 1);
        if (lane < 6) { copy16(ring_at + (unit % 4 * 2 + lane / 3) * (int) sizeof(kvq_page) + lane % 3 * 16, (const char *) &st.pages[half >> a.halves_log2] + lane % 3 * 16); }
    };
    const auto first_cell = [&](int half) { return (half & (per_page - 1)) * 32; };
    // what a half holds: -1 nothing, +1 codes of K, +2 codes of V
    const auto state_of = [&](int unit, int h) {
        const kvq_page & p = ring[unit % 4 * 2 + h];
        return 2*unit + h >= n_halves || !p.n_slots ? -1 : (CODES && p.k_params ? 1 : 0) + (CODES && p.v_params ? 2 : 0);
    };
    const auto halves_of = [&](int unit, int h0, int h1, half_page (&h)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const kvq_page & p = ring[unit % 4 * 2 + (i ? h1 : h0)];
            h[i].k_codes  = (const uint8_t *) p.k_codes  + (size_t) kvh * a.k.nb_codes;
            h[i].k_params = (const uint8_t *) p.k_params + (size_t) kvh * a.k.nb_params;
            h[i].v_codes  = (const uint8_t *) p.v_codes  + (size_t) kvh * a.v.nb_codes;
            h[i].v_params = (const uint8_t *) p.v_params + (size_t) kvh * a.v.nb_params;
            h[i].t = first_cell(2*unit + (i ? h1 : h0));
        }
    };
    if (unit0 < unit1) { copy_pages(unit0); }

    const __half * mask[2];
    float slope[2];
#pragma unroll
    for (int e = 0; e < 2; e++) { // columns 2c + e
        const int row = min(row0 + (2*c + e) % per_row, a.n_rows - 1), token = row_token(a, row), head = row_head(a, kvh, row);
        slope[e] = alibi_slope(a, head) * LOG2E;
        mask [e] = st.mask ? st.mask + token * a.mask_stride_token + head * a.mask_stride_head : nullptr;
    }
    const bool one_mask = a.n_q == 1 && a.mask_stride_head == 0;
    const bool mine = c >> (2 - a.k_parts_log2) == g >> (3 - a.k_parts_log2); // this thread's columns belong to its cells' scales
    const int  in_half = g / 2 % 2 * 16 + g % 2 * 2;

    float o[S][4] = {}, oz[4] = {}, m[2] = { -INFINITY, -INFINITY }, l[2] = { 0.0f, 0.0f };
    bool of_codes = CODES; // o in units of codes: times FROM_V
    uint32_t q[S][2]; // of column g
    int state0 = -1, state1 = -1, next0 = -1, next1 = -1;
    for (int unit = unit0 - 1; unit < unit1; unit++) {
        copies_done();
        state0 = next0;
        state1 = next1;
        if (unit + 1 < unit1) { // ahead of its turn, when it is sealed as a whole; and the pages of the one after it
            next0 = state_of(unit + 1, 0);
            next1 = state_of(unit + 1, 1);
            if constexpr (CODES) {
                if (next0 == 3 && next1 == 3) {
                    half_page h[2];
                    halves_of(unit + 1, 0, 1, h);
                    copy_stage<D, KB, VB>(a, stages_at + (unit + 1) % 2 * a.stage_bytes, h, true, true);
                }
            }
            copy_pages(unit + 2);
        }
        if (unit < unit0) { // sealed pages are older than the kernel before this one and were asked for without waiting for it
            early_wait();
            const int row = min(row0 + g % per_row, a.n_rows - 1);
            const float * p = st.q + row_token(a, row) * a.q_stride_token + row_head(a, kvh, row) * a.q_stride_head;
            const float f = a.scale * LOG2E;
#pragma unroll
            for (int s = 0; s < S; s++) {
                const float4 x = *(const float4 *) (p + channel_of<D, KB>(c, s));
                q[s][0] = pack_half2(x.x * f, x.z * f);
                q[s][1] = pack_half2(x.y * f, x.w * f);
            }
            continue;
        }
        uint8_t * stage = stages + unit % 2 * a.stage_bytes;
        if constexpr (CODES) {
            if (a.k.scale && state0 == 3 && state1 == 3) { widen_stage<D, KB, VB>(a, stage); }
        }
        int todo = (state0 >= 0 ? 1 : 0) + (state1 >= 0 ? 2 : 0);
        while (todo) { // both halves at once when they are alike
            const int first = todo & 1 ? 0 : 1, now = first ? state1 : state0;
            const bool both = todo == 3 && state0 == state1;
            const int sel   = both ? 3 : 1 << first;
            todo &= ~sel;
            const int kh = both ? g / 4 : first, vh = both ? c / 2 : first; // halves that this thread reads
            const kvq_page & kp = ring[unit % 4 * 2 + kh];
            const kvq_page & vp = ring[unit % 4 * 2 + vh];
            const bool here = sel >> g / 4 & 1;
            uint32_t mk[2][4];
            load_mask(a, mask, one_mask, kp, first_cell(2*unit + kh) + in_half, mk);
            if constexpr (CODES) {
                if (now > 0 && !(both && now == 3)) { // nobody asked for these
                    half_page h[2];
                    halves_of(unit, both ? 0 : first, both ? 1 : first, h);
                    __syncwarp();
                    copy_stage_late<D, KB, VB>(a, stages_at + unit % 2 * a.stage_bytes, h[0], h[1], now & 1, now & 2);
                    copies_done();
                    if (a.k.scale) { widen_stage<D, KB, VB>(a, stage); }
                }
            }
            float s[4][4], base[4] = {};
            if constexpr (CODES) {
                if (now & 1) {
                    score<D, KB, VB>(a, q, stage, s, base);
                }
            }
            if (!(now & 1)) {
                const uint16_t * rows = (const uint16_t *) kp.k_codes + ((size_t) kvh * a.k.n_cells + first_cell(2*unit + kh) + in_half) * a.k.stride;
                score_open<D, KB>(q, rows, a.k.stride, s);
            }
            const float unit_k = CODES && (now & 1) ? FROM_K : 1.0f;
            if (!here || !mine) {
#pragma unroll
                for (int j = 0; j < 4; j++) { mk[0][j] = mk[1][j] = 0xfc00fc00u; }
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) { s[j][i] = fmaf(s[j][i], unit_k, base[i]); }
            }
            if (a.softcap != 0.0f) {
                const float cap = a.softcap * LOG2E, inv = 2.0f / a.softcap;
#pragma unroll
                for (int j = 0; j < 4; j++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) { s[j][i] = cap - __fdividef(2.0f * cap, 1.0f + exp2_fast(fminf(s[j][i] * inv, 64.0f))); } // cap * tanh(s / cap)
                }
            }
            float top[2] = { -INFINITY, -INFINITY };
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) { // row b = i / 2, column e = i % 2
                    const float2 mm = __half22float2(as_half2(mk[i % 2][j]));
                    s[j][i] = fmaf(slope[i % 2], i / 2 ? mm.y : mm.x, s[j][i]);
                    top[i % 2] = fmaxf(top[i % 2], s[j][i]);
                }
            }
            if (!__any_sync(~0u, top[0] > -INFINITY || top[1] > -INFINITY)) {
                continue;
            }
            if (__any_sync(~0u, top[0] > m[0] || top[1] > m[1])) {
                float f[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
#pragma unroll
                    for (int d = 4; d <= 16; d *= 2) { top[e] = fmaxf(top[e], __shfl_xor_sync(~0u, top[e], d)); }
                    top[e] = fmaxf(top[e], m[e]);
                    f[e]   = m[e] == -INFINITY ? 0.0f : exp2_fast(m[e] - top[e]);
                    m[e]   = top[e];
                    l[e]  *= f[e];
                }
#pragma unroll
                for (int n = 0; n < S; n++) { o[n][0] *= f[0]; o[n][1] *= f[1]; o[n][2] *= f[0]; o[n][3] *= f[1]; }
                oz[0] *= f[0]; oz[1] *= f[1];
            }
            uint32_t p[4][2];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float back = exp2_of(-v_weight<VB>(j));
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float lower = m[i % 2] == -INFINITY ? 0.0f : m[i % 2];
                    s[j][i] = exp2_fast(s[j][i] - (lower - (float) v_weight<VB>(j)));
                    l[i % 2] = fmaf(s[j][i], back, l[i % 2]);
                }
                p[j][0] = transpose(pack_half2(s[j][0], s[j][1]));
                p[j][1] = transpose(pack_half2(s[j][2], s[j][3]));
            }
            if constexpr (CODES) {
                if (of_codes != ((now & 2) != 0)) {
                    of_codes = (now & 2) != 0;
                    const float f = of_codes ? 1.0f / FROM_V : FROM_V;
#pragma unroll
                    for (int n = 0; n < S; n++) { o[n][0] *= f; o[n][1] *= f; o[n][2] *= f; o[n][3] *= f; }
                }
                if (now & 2) {
                    accumulate<D, KB, VB>(a, stage, p, o, oz);
                }
            }
            if (!(now & 2)) {
                const int t = first_cell(2*unit + vh) + c % 2 * 16;
                accumulate_open<D, VB>((const uint16_t *) vp.v_codes + ((size_t) kvh * a.v.n_cells + t) * a.v.stride, a.v.stride, p, o);
            }
        }
    }
    // this thread's columns, over all cells of the warp
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    decode_sums<D> & sums = *(decode_sums<D> *) memory;
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int d = 4; d <= 16; d *= 2) { l[e] += __shfl_xor_sync(~0u, l[e], d); }
        if (g == 0) {
            sums.m[warp][2*c + e] = m[e];
            sums.l[warp][2*c + e] = l[e];
        }
        const float f = of_codes ? FROM_V : 1.0f;
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            const float z = CODES ? __shfl_sync(~0u, oz[e], 32*i / a.v.group * 4 + c) : 0.0f;
            *(float4 *) &sums.o[warp][2*c + e][32*i + 4*g] =
                make_float4(fmaf(o[2*i][e], f, z), fmaf(o[2*i][2 + e], f, z), fmaf(o[2*i + 1][e], f, z), fmaf(o[2*i + 1][2 + e], f, z));
        }
    }
    __syncthreads();
    merge_rows<D>(a, sums, is, kvh, row0, min(per_row, a.n_rows - row0), a.n_splits);
}

// Launches, or with `occupancy` tells how many blocks a multiprocessor holds.
template <int D, int KB, int VB> void launch_kernel(kvq_attend_args a, int n_streams, cudaStream_t stream, int * occupancy) {
    a.stage_bytes = 0;
    if (KB != 16) {
        const int keys = 4*D << a.k_parts_log2, values = D * 256 >> a.v_group_log2;
        a.stage_v_params = keys;
        a.stage_raw_k    = keys + values;
        a.stage_raw_v    = a.stage_raw_k + ((keys / 2 + (8 << a.k_parts_log2) + 15) & ~15);
        a.stage_bytes    = stage_map<D, KB, VB>::K_PARAMS + (a.k.scale || a.v.scale ? a.stage_raw_v + values / 2 + 16 : a.stage_raw_k);
    }
    const size_t nb = std::max(DECODE_WARPS * (2 * (size_t) a.stage_bytes + 8 * sizeof(kvq_page)), sizeof(decode_sums<D>));
    static size_t allowed = 48 << 10;
    if (nb > allowed) {
        cudaFuncSetAttribute(decode_kernel<D, KB, VB>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int) nb);
        allowed = nb;
    }
    if (occupancy) {
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(occupancy, decode_kernel<D, KB, VB>, 32 * DECODE_WARPS, nb);
        return;
    }
    const dim3 grid(a.n_splits, a.n_head_kv * kvq_decode_row_blocks(a), n_streams);
    kvq_launch_early(decode_kernel<D, KB, VB>, grid, 32 * DECODE_WARPS, nb, stream, a);
}

template <int D, int KB> void launch_values(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    switch (a.v.bits) {
        case 1:  launch_kernel<D, KB, 1>(a, n_streams, stream, occupancy); break;
        case 2:  launch_kernel<D, KB, 2>(a, n_streams, stream, occupancy); break;
        case 3:  launch_kernel<D, KB, 3>(a, n_streams, stream, occupancy); break;
        default: launch_kernel<D, KB, 4>(a, n_streams, stream, occupancy); break;
    }
}

template <int D> void launch_decode(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    if (a.k.np == 0) {
        launch_kernel<D, 16, 16>(a, n_streams, stream, occupancy);
        return;
    }
    switch (a.k.bits) {
        case 1:  launch_values<D, 1>(a, n_streams, stream, occupancy); break;
        case 2:  launch_values<D, 2>(a, n_streams, stream, occupancy); break;
        case 3:  launch_values<D, 3>(a, n_streams, stream, occupancy); break;
        default: launch_values<D, 4>(a, n_streams, stream, occupancy); break;
    }
}

} // namespace

// Attention of few rows (query heads of a group times query tokens) over long caches. A warp walks 64 cells at a time; codes go from
// global memory through registers into the left operand of m16n8k16, which has 16 rows of them for 8 columns of queries:
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

// 8 neighbouring scales or zeros as they are stored; asked for long before they are used
struct raw_params { uint4 x; };

__device__ __forceinline__ raw_params load_params(const kvq_affine_geometry & g, const uint8_t * params, int at, bool zero) {
    raw_params r = {};
    at += zero ? g.np : 0;
    if (g.scale) {
        const uint2 x = load8(params + 8 + at);
        r.x.x = x.x; r.x.y = x.y;
        r.x.z = __ldg((const uint32_t *) params + zero); // low, step
    } else {
        r.x = load16(params + 2*at);
    }
    return r;
}

// in pairs (0, 2) (1, 3) (4, 6) (5, 7)
__device__ __forceinline__ void pair_params(const kvq_affine_geometry & g, const raw_params & r, uint32_t (&out)[4]) {
    if (g.scale) {
        const __half2 low = __half2half2(as_half2(r.x.z).x), step = __half2half2(as_half2(r.x.z).y), magic = __float2half2_rn(1024.0f);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t y = j ? r.x.y : r.x.x;
            out[2*j]     = as_u32(__hfma2(__hsub2(as_half2((y        & 0x00ff00ffu) | 0x64006400u), magic), step, low));
            out[2*j + 1] = as_u32(__hfma2(__hsub2(as_half2((y >> 8   & 0x00ff00ffu) | 0x64006400u), magic), step, low));
        }
    } else {
        out[0] = even(r.x.x, r.x.y); out[1] = odd(r.x.x, r.x.y);
        out[2] = even(r.x.z, r.x.w); out[3] = odd(r.x.z, r.x.w);
    }
}

// first of the 4 channels of S that thread c contracts in step s
template <int D, int KB> __device__ __forceinline__ int channel_of(int c, int s) {
    constexpr int P = cut<KB>::P, S = D / 16;
    return S < P ? 16*c + 4*s : (c + 4 * (s / P)) * 4*P + s % P * 4; // a word a thread, or half a word
}

template <int D, int KB> struct key_words {
    static constexpr int S = D / 16, P = cut<KB>::P, N = S < P ? 1 : S / P;
    uint2 x[N][4], h[cut<KB>::high ? N : 1][4];
    raw_params scale[S / 2], zero[S / 2];
};

// `codes` and `params` of this thread's page, tile: of 16 cells
template <int D, int KB> __device__ __forceinline__
void load_keys(const kvq_affine_geometry & k, const uint8_t * codes, const uint8_t * params, int tile, int group, key_words<D, KB> & w) {
    constexpr int S = D / 16, P = cut<KB>::P;
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < key_words<D, KB>::N; i++) {
        const uint8_t * at = codes + (tile * k.n_chunks[0] + (S < P ? c / 2 : c + 4*i)) * 64 + g % 2 * 8;
#pragma unroll
        for (int j = 0; j < 4; j++) { w.x[i][j] = load8(at + 16*j); }
        if (cut<KB>::high) {
            at = codes + k.offset[1] + (tile * k.n_chunks[1] + (c + 4*i) / 2) * 64 + g % 2 * 8;
#pragma unroll
            for (int j = 0; j < 4; j++) { w.h[i][j] = load8(at + 16*j); }
        }
    }
#pragma unroll
    for (int u = 0; u < S / 2; u++) {
        w.scale[u] = load_params(k, params, group * D + channel_of<D, KB>(c, 2*u), false);
        w.zero [u] = load_params(k, params, group * D + channel_of<D, KB>(c, 2*u), true);
    }
}

// scores of sealed keys, cells of accumulator j as above, in units of codes; base: their zeros' share
template <int D, int KB> __device__ __forceinline__
void score(const kvq_affine_geometry & k, const uint32_t (&q)[D / 16][2], key_words<D, KB> & w, float (&s)[4][4], float (&base)[4]) {
    constexpr int W = cut<KB>::W, P = cut<KB>::P, S = D / 16;
    const int c = threadIdx.x % 4;
    if (S < P || cut<KB>::high) { // two threads share a word of 8 planes
#pragma unroll
        for (int i = 0; i < key_words<D, KB>::N; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint2 & y = cut<KB>::high ? w.h[cut<KB>::high ? i : 0][j] : w.x[i][j];
                y.x = rotate(y.x, 4 * (c % 2));
                y.y = rotate(y.y, 4 * (c % 2));
            }
        }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        base[e] = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) { s[j][e] = 0.0f; }
    }
#pragma unroll
    for (int u = 0; u < S / 2; u++) { // 8 channels
        uint32_t scale[4], zero[4];
        pair_params(k, w.scale[u], scale);
        pair_params(k, w.zero[u],  zero);
#pragma unroll
        for (int v = 0; v < 2; v++) {
            const int t = 2*u + v, i = S < P ? 0 : t / P, pl = S < P ? t : t % P, hi = cut<KB>::high ? i : 0;
            const uint32_t z[4] = { zero[2*v], zero[2*v], zero[2*v + 1], zero[2*v + 1] };
            mma(base, z, q[t][0], q[t][1]);
            const float weight = exp2_of(K_BOOST - W*pl);
            const uint32_t q0 = mul2(mul2(q[t][0], scale[2*v]), weight), q1 = mul2(mul2(q[t][1], scale[2*v + 1]), weight);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t a[4] = { fields<KB>(w.x[i][j].x, w.h[hi][j].x, pl, false), fields<KB>(w.x[i][j].y, w.h[hi][j].y, pl, false),
                                        fields<KB>(w.x[i][j].x, w.h[hi][j].x, pl, true),  fields<KB>(w.x[i][j].y, w.h[hi][j].y, pl, true) };
                mma(s[j], a, q0, q1);
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

template <int D, int VB> struct value_words {
    static constexpr int N = cut<VB>::P == 2 ? 2 : 1;
    uint4 x[D / 32][N], h[cut<VB>::high ? D / 32 : 1];
    raw_params zero[2], scale[2]; // scale: of the first channel group
};

// dot0: this thread's first cell in the page
template <int D, int VB> __device__ __forceinline__
void load_values(const kvq_affine_geometry & v, const uint8_t * codes, const uint8_t * params, int dot0, value_words<D, VB> & w) {
    constexpr int P = cut<VB>::P;
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        const uint8_t * at = codes + ((2*i + g / 4) * v.n_chunks[0] + dot0 / (4*P)) * 64 + g % 4 * 16;
#pragma unroll
        for (int n = 0; n < value_words<D, VB>::N; n++) { w.x[i][n] = load16(at + 64*n); }
        if (cut<VB>::high) {
            w.h[i] = load16(codes + v.offset[1] + ((2*i + g / 4) * v.n_chunks[1] + dot0 / 32) * 64 + g % 4 * 16);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        w.zero[h] = raw_params{};
        if (g * v.group < D) { // row g of the product of zeros: channel group g
            w.zero[h] = load_params(v, params, g * v.n_cells + dot0 + 8*h, true);
        }
        w.scale[h] = load_params(v, params, dot0 + 8*h, false);
    }
}

__device__ __forceinline__ uint32_t word(const uint4 & x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// p: weighted probabilities of step j, cells (0, 2) and (1, 3)
template <int D, int VB> __device__ __forceinline__
void accumulate(const kvq_affine_geometry & v, const value_words<D, VB> & w, const uint8_t * params, int dot0, const uint32_t (&p)[4][2], float (&o)[D / 16][4], float (&oz)[4]) {
    constexpr int P = cut<VB>::P, N = value_words<D, VB>::N;
    const int g = threadIdx.x % 32 / 4, turn = dot0 % 32 / 4; // turn: of two threads that share a word of 8 planes
    uint32_t z[2][4];
    pair_params(v, w.zero[0], z[0]);
    pair_params(v, w.zero[1], z[1]);
    if (g * v.group >= D) {
#pragma unroll
        for (int j = 0; j < 4; j++) { z[0][j] = z[1][j] = 0; }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float back = exp2_of(-v_weight<VB>(j));
        const uint32_t a[4] = { mul2(z[j / 2][j % 2 * 2], back), 0, mul2(z[j / 2][j % 2 * 2 + 1], back), 0 };
        mma(oz, a, p[j][0], p[j][1]);
    }
    uint32_t ps[4][2];
    raw_params raw[2] = { w.scale[0], w.scale[1] };
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        if (i == 0 || 32*i % v.group == 0) {
            uint32_t s[2][4];
            pair_params(v, raw[0], s[0]);
            pair_params(v, raw[1], s[1]);
            if (32*i + v.group < D) { // the next group's, while this one is multiplied
                const int next = (32*i / v.group + 1) * v.n_cells + dot0;
                raw[0] = load_params(v, params, next,     false);
                raw[1] = load_params(v, params, next + 8, false);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                ps[j][0] = mul2(p[j][0], s[j / 2][j % 2 * 2]);
                ps[j][1] = mul2(p[j][1], s[j / 2][j % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int r = 0; r < 4; r += 2) { // channels 32i + 4g + r, + r + 1
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t x = word(w.x[i][j / P % N], r), y = word(w.x[i][j / P % N], r + 1), hx = 0, hy = 0;
                if (P == 8) {
                    x = rotate(x, turn);
                    y = rotate(y, turn);
                }
                if (cut<VB>::high) {
                    hx = rotate(word(w.h[i], r), turn);
                    hy = rotate(word(w.h[i], r + 1), turn);
                }
                const uint32_t a[4] = { fields<VB>(x, hx, j % P, false), fields<VB>(y, hy, j % P, false), fields<VB>(x, hx, j % P, true), fields<VB>(y, hy, j % P, true) };
                mma(o[2*i + r / 2], a, ps[j][0], ps[j][1]);
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
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, per_row = DECODE_COLUMNS / a.k_parts;
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
        const int n_sources = DECODE_WARPS * a.k_parts, w = lane / a.k_parts, col = lane % a.k_parts * per_row + r;
        float m = lane < n_sources ? s.m[w][col] : -INFINITY, l = lane < n_sources ? s.l[w][col] : 0.0f, f = m;
        for (int d = 16; d; d /= 2) { m = fmaxf(m, __shfl_xor_sync(~0u, m, d)); }
        f = f == -INFINITY ? 0.0f : exp2_fast(f - m);
        l *= f;
        for (int d = 16; d; d /= 2) { l += __shfl_xor_sync(~0u, l, d); }
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int i = 0; i < n_sources; i++) {
            const float fi = __shfl_sync(~0u, f, i);
            const float4 y = *(const float4 *) &s.o[i / a.k_parts][i % a.k_parts * per_row + r][lane % (D / 4) * 4];
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
            if (lane == 0) {
                out[D]     = m;
                out[D + 1] = l;
            }
        }
    }
    if (n_blocks == 1) {
        return;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t * ticket = a.tickets + blockIdx.z * gridDim.y + blockIdx.y;
        s.last = atomicAdd(ticket, 1u) == (uint32_t) n_blocks - 1;
        if (s.last) {
            *ticket = 0; // for the next launch
        }
    }
    __syncthreads();
    if (!s.last) {
        return;
    }
    __threadfence();
    for (int r = warp; r < n_rows; r += DECODE_WARPS) {
        const float * p = a.partial + partial_at(a, is, kvh, row0 + r, 0);
        float m = -INFINITY, l = 0.0f;
        for (int b = lane; b < n_blocks; b += 32) { m = fmaxf(m, __ldcg(p + (size_t) b * (D + 4) + D)); }
        for (int d = 16; d; d /= 2) { m = fmaxf(m, __shfl_xor_sync(~0u, m, d)); }
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        constexpr int HALVES = 128 / D; // a warp reads as many rows of partial results at once
        for (int b0 = 0; b0 < n_blocks; b0 += 32) {
            const int mine = b0 + lane;
            float f = 0.0f;
            if (mine < n_blocks) {
                const float top = __ldcg(p + (size_t) mine * (D + 4) + D);
                f = top == -INFINITY ? 0.0f : exp2_fast(top - m);
                l += f * __ldcg(p + (size_t) mine * (D + 4) + D + 1);
            }
            const int n = min(32, n_blocks - b0);
#pragma unroll 8
            for (int b = 0; b < n; b += HALVES) {
                const int   at = b + lane / (D / 4);
                const float fb = __shfl_sync(~0u, f, at % 32);
                if (at < n) {
                    const float4 y = __ldcg((const float4 *) (p + (size_t) (b0 + at) * (D + 4) + lane % (D / 4) * 4));
                    x.x += fb * y.x; x.y += fb * y.y; x.z += fb * y.z; x.w += fb * y.w;
                }
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

template <int D, int KB, int VB> __global__ void __launch_bounds__(32 * DECODE_WARPS, KVQ_DECODE_BLOCKS) decode_kernel(const kvq_attend_args a) {
    constexpr int S = D / 16;
    constexpr bool CODES = KB != 16; // sealed pages exist
    constexpr float FROM_K = (float) (1 << (24 - K_BOOST)), FROM_V = (float) (1 << (24 - v_boost<VB>()));
    __shared__ decode_sums<D> sums;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4, is = blockIdx.z;
    const int per_row = DECODE_COLUMNS / a.k_parts, n_blocks_rows = (a.n_rows + per_row - 1) / per_row;
    const int kvh = blockIdx.y / n_blocks_rows, row0 = blockIdx.y % n_blocks_rows * per_row;
    const auto & st = a.stream[is];

    uint32_t q[S][2]; // of column g
    {
        const int row = min(row0 + g % per_row, a.n_rows - 1);
        const float * p = st.q + row_token(a, row) * a.q_stride_token + row_head(a, kvh, row) * a.q_stride_head;
        const float f = a.scale * LOG2E;
#pragma unroll
        for (int s = 0; s < S; s++) {
            const float4 x = *(const float4 *) (p + channel_of<D, KB>(c, s));
            q[s][0] = pack_half2(x.x * f, x.z * f);
            q[s][1] = pack_half2(x.y * f, x.w * f);
        }
    }
    const __half * mask[2];
    float slope[2];
#pragma unroll
    for (int e = 0; e < 2; e++) { // columns 2c + e
        const int row = min(row0 + (2*c + e) % per_row, a.n_rows - 1), token = row_token(a, row), head = row_head(a, kvh, row);
        slope[e] = alibi_slope(a, head) * LOG2E;
        mask [e] = st.mask ? st.mask + token * a.mask_stride_token + head * a.mask_stride_head : nullptr;
    }
    const bool one_mask = a.n_q == 1 && a.mask_stride_head == 0;
    const bool mine = c * a.k_parts / 4 == g * a.k_parts / 8; // this thread's columns belong to its cells' scales

    float o[S][4] = {}, oz[4] = {}, m[2] = { -INFINITY, -INFINITY }, l[2] = { 0.0f, 0.0f };
    bool of_codes = CODES; // o in units of codes: times FROM_V
    const int per_page = a.page_cells / 32, n_halves = a.n_pages * per_page, n_units = (n_halves + 1) / 2;
    const int split = blockIdx.x * DECODE_WARPS + warp, n_splits = a.n_splits * DECODE_WARPS;
    const int unit0 = (int) ((int64_t) n_units * split / n_splits), unit1 = (int) ((int64_t) n_units * (split + 1) / n_splits);
    for (int unit = unit0; unit < unit1; unit++) {
        // the two halves of 32 cells: page, first cell in it, what it holds (-1: nothing, +1: codes of K, +2: of V)
        const int page0 = 2*unit / per_page, in0 = (2*unit - page0 * per_page) * 32;
        const int page1 = in0 + 32 < a.page_cells ? page0 : page0 + 1, in1 = in0 + 32 < a.page_cells ? in0 + 32 : 0;
        int todo = 0, state[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const kvq_page & page = st.pages[h && page1 < a.n_pages ? page1 : page0];
            state[h] = (CODES && page.k_params ? 1 : 0) + (CODES && page.v_params ? 2 : 0);
            todo |= page.n_slots && 2*unit + h < n_halves ? 1 << h : 0;
        }
        while (todo) { // both halves at once when they are alike
            const int first = todo & 1 ? 0 : 1, now = first ? state[1] : state[0];
            const int both  = todo == 3 && state[0] == state[1];
            const int sel   = both ? 3 : 1 << first;
            todo &= ~sel;
            const int kh = both ? g / 4 : first, vh = both ? c / 2 : first; // halves that this thread reads
            const kvq_page & kp = st.pages[kh ? page1 : page0];
            const kvq_page & vp = st.pages[vh ? page1 : page0];
            const int t_k = (kh ? in1 : in0) + g / 2 % 2 * 16, t_v = (vh ? in1 : in0) + c % 2 * 16;

            // everything is asked for before anything is used
            key_words<D, CODES ? KB : 4>   kw;
            value_words<D, CODES ? VB : 4> vw;
            const uint8_t * v_codes = (const uint8_t *) vp.v_codes, * v_params = (const uint8_t *) vp.v_params;
            if constexpr (CODES) {
                if (now & 1) {
                    const uint8_t * codes  = (const uint8_t *) kp.k_codes  + (size_t) kvh * a.k.nb_codes;
                    const uint8_t * params = (const uint8_t *) kp.k_params + (size_t) kvh * a.k.nb_params;
                    load_keys<D, KB>(a.k, codes, params, t_k / 16, a.k.group == a.k.n_cells ? 0 : t_k / a.k.group, kw);
                }
                if (now & 2) {
                    v_codes  += (size_t) kvh * a.v.nb_codes;
                    v_params += (size_t) kvh * a.v.nb_params;
                    load_values<D, VB>(a.v, v_codes, v_params, t_v, vw);
                }
            }
            // mask of cells 4j + {0, 1} of this thread
            uint32_t mk[2][4];
            const int cell0 = kp.cell + t_k + 2 * (g % 2);
            bool seen = false;
            const bool here = sel >> g / 4 & 1;
            if (!kp.map && (kh ? 1 : 0) + 2*unit < n_halves && kp.cell + (kh ? in1 : in0) + 32 <= a.n_kv) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        mk[e][j] = !mask[e] ? 0 : e && one_mask ? mk[0][j] : __ldg((const uint32_t *) (mask[e] + cell0 + 4*j));
                        seen |= mk[e][j] != 0xfc00fc00u;
                    }
                }
            } else {
#pragma unroll
                for (int e = 0; e < 2; e++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        uint32_t y = 0;
#pragma unroll
                        for (int b = 0; b < 2; b++) {
                            const int cell = kp.map ? kp.map[t_k + 2 * (g % 2) + 4*j + b] : cell0 + 4*j + b;
                            const uint32_t h = cell < 0 || cell >= a.n_kv ? 0xfc00 : mask[e] ? __half_as_ushort(mask[e][cell]) : 0;
                            y |= h << 16*b;
                        }
                        mk[e][j] = y;
                        seen |= y != 0xfc00fc00u;
                    }
                }
            }
            if (!__any_sync(~0u, seen && here)) {
                continue;
            }
            float s[4][4], base[4] = {};
            if constexpr (CODES) {
                if (now & 1) {
                    score<D, KB>(a.k, q, kw, s, base);
                }
            }
            if (!(now & 1)) {
                const uint16_t * rows = (const uint16_t *) kp.k_codes + ((size_t) kvh * a.k.n_cells + t_k + 2 * (g % 2)) * a.k.stride;
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
                    accumulate<D, VB>(a.v, vw, v_params, t_v, p, o, oz);
                }
            }
            if (!(now & 2)) {
                accumulate_open<D, VB>((const uint16_t *) v_codes + ((size_t) kvh * a.v.n_cells + t_v) * a.v.stride, a.v.stride, p, o);
            }
        }
    }
    // this thread's columns, over all cells of the warp
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

template <int D, int KB> void launch_values(const kvq_attend_args & a, dim3 grid, cudaStream_t stream) {
    switch (a.v.bits) {
        case 1:  decode_kernel<D, KB, 1><<<grid, 32 * DECODE_WARPS, 0, stream>>>(a); break;
        case 2:  decode_kernel<D, KB, 2><<<grid, 32 * DECODE_WARPS, 0, stream>>>(a); break;
        case 3:  decode_kernel<D, KB, 3><<<grid, 32 * DECODE_WARPS, 0, stream>>>(a); break;
        default: decode_kernel<D, KB, 4><<<grid, 32 * DECODE_WARPS, 0, stream>>>(a); break;
    }
}

template <int D> void launch_decode(const kvq_attend_args & a, int n_streams, cudaStream_t stream) {
    const int per_row = DECODE_COLUMNS / a.k_parts;
    const dim3 grid(a.n_splits, a.n_head_kv * ((a.n_rows + per_row - 1) / per_row), n_streams);
    if (a.k.np == 0) {
        decode_kernel<D, 16, 16><<<grid, 32 * DECODE_WARPS, 0, stream>>>(a);
        return;
    }
    switch (a.k.bits) {
        case 1:  launch_values<D, 1>(a, grid, stream); break;
        case 2:  launch_values<D, 2>(a, grid, stream); break;
        case 3:  launch_values<D, 3>(a, grid, stream); break;
        default: launch_values<D, 4>(a, grid, stream); break;
    }
}

} // namespace

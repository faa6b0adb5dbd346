// Decode attention over lattice pages (types/lattice.h): queries are rotated when they are read, outputs rotated back
// once per warp.
//   logit = scale[cell] * sum_vec q[vec] . point[index]          o = sum_cell (p * scale[cell]) point[index]
// One look-up in shared memory gives a point's two channels as two f16 numbers: in K a register of the left operand
// as it is, in V two look-ups of neighbouring cells exchange halves. Threads hold the cells and channels that
// attend_decode.cuh describes. Grids of two channels only, whose indices have 2, 4, 6 or 8 bits.
#pragma once

#include "decode_stage.cuh"

namespace {

// The stage:  indices of K and V as codes are (decode_stage.cuh), a vector in the place of a channel; then scales of
// 64 cells, of keys in f32, of values in f16 and in the order (0, 2, 1, 3) of probabilities.
template <int D, int KB, int VB> struct lattice_map {
    static constexpr int WK = cut<KB>::W, WV = cut<VB>::W, VECS = D / 2, HIGH = 2; // HIGH: bits of the second part
    static constexpr int K = 0, K_HIGH = K + 4 * (VECS * WK / 32) * 64,
                         V = K_HIGH + (cut<KB>::high ? 4 * (VECS * HIGH / 32) * 64 : 0);
    static constexpr int V_HIGH = V + VECS / 16 * 2 * WV * 64,
                         SCALES = V_HIGH + (cut<VB>::high ? VECS / 16 * 2 * HIGH * 64 : 0);
    static constexpr int BYTES = SCALES + DECODE_CELLS * (4 + 2);
};

// points as pairs of f16
__device__ __forceinline__ void load_table(uint32_t * to, const float * points, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const float2 x = __ldg((const float2 *) points + i);
        to[i] = pack_half2(x.x, x.y);
    }
}

// this lane's two cells, 2*lane and 2*lane + 1 of the 64, as the block holds them; an 8-bit pair with its top in the
// upper half
__device__ __forceinline__ uint32_t load_scales(
    const kvq_affine_geometry & g, const uint8_t * a, int ta, const uint8_t * b, int tb) {
    const int lane = threadIdx.x % 32;
    const uint8_t * p = lane < 16 ? a : b;
    const int t = (lane < 16 ? ta : tb) + lane % 16 * 2;
    return g.scale ? *(const uint16_t *) (p + 2 + t) | (uint32_t) *(const uint16_t *) p << 16
                   : *(const uint32_t *) (p + 2 * t);
}

__device__ __forceinline__ float2 two_scales(const kvq_affine_geometry & g, uint32_t raw) {
    const float2 x = __half22float2(as_half2(raw));
    const float u = (float) (raw & 255), v = (float) (raw >> 8 & 255), top = x.y * (1.0f / 65025.0f);
    return g.scale ? make_float2(top * (u * u), top * (v * v)) : x;
}

template <int D, int KB, int VB>
__device__ __forceinline__ void put_scales(const kvq_attend_args & a, uint8_t * stage, const uint32_t (&raw)[2]) {
    uint8_t * const scales = stage + lattice_map<D, KB, VB>::SCALES;
    const int lane = threadIdx.x % 32;
    ((float2 *) scales)[lane] = two_scales(a.k, raw[0]);
    const float2 v = two_scales(a.v, raw[1]);
    __half * const to = (__half *) (scales + 4 * DECODE_CELLS) + lane / 2 * 4 + lane % 2;
    to[0] = __float2half_rn(v.x);
    to[2] = __float2half_rn(v.y);
    __syncwarp();
}

// asks for what two halves hold; the scales are on their way into registers
template <int D, int KB, int VB, typename X>
__device__ __forceinline__ void copy_lattice(const kvq_attend_args & a, const X & x, uint32_t to,
    const half_page (&h)[2], bool keys, bool values, uint32_t (&raw)[2]) {
    using map = lattice_map<D, KB, VB>;
    if (keys) {
        copy_keys<map::VECS, map::WK>(x, to + map::K, h[0].k_codes, h[0].t, h[1].k_codes, h[1].t, a.k.n_chunks[0]);
        if (cut<KB>::high) {
            copy_keys<map::VECS, map::HIGH>(x, to + map::K_HIGH, h[0].k_codes + a.k.offset[1], h[0].t,
                h[1].k_codes + a.k.offset[1], h[1].t, a.k.n_chunks[1]);
        }
        raw[0] = load_scales(a.k, h[0].k_params, h[0].t, h[1].k_params, h[1].t);
    }
    if (values) {
        copy_values<map::VECS, map::WV>(
            x, to + map::V, h[0].v_codes, h[0].t, h[1].v_codes, h[1].t, a.v.n_chunks[0], a.v.n_tiles);
        if (cut<VB>::high) {
            copy_values<map::VECS, map::HIGH>(x, to + map::V_HIGH, h[0].v_codes + a.v.offset[1], h[0].t,
                h[1].v_codes + a.v.offset[1], h[1].t, a.v.n_chunks[1], a.v.n_tiles);
        }
        raw[1] = load_scales(a.v, h[0].v_params, h[0].t, h[1].v_params, h[1].t);
    }
}

template <int D, int KB, int VB, typename X>
__device__ __noinline__ void copy_lattice_late(
    const kvq_attend_args & a, const X x, uint8_t * stage, half_page h0, half_page h1, bool keys, bool values) {
    const half_page h[2] = { h0, h1 };
    uint32_t raw[2] = {};
    copy_lattice<D, KB, VB>(a, x, (uint32_t) __cvta_generic_to_shared(stage), h, keys, values, raw);
    copies_done();
    put_scales<D, KB, VB>(a, stage, raw);
}

// bits [at, at + n) of x, n bits, at bit `to`
__device__ __forceinline__ uint32_t field(uint32_t x, int at, int n, int to) {
    return (at >= to ? x >> (at - to) : x << (to - at)) & (uint32_t) (((1 << n) - 1) << to);
}

// the point at an index: W bits of x from bit `at` on, with 6 bits the upper two in `high` from `at_high` on
template <int B>
__device__ __forceinline__ uint32_t look_up(const uint32_t * table, uint32_t x, int at, uint32_t high, int at_high) {
    uint32_t offset = field(x, at, cut<B>::W, 2);
    if (cut<B>::high) { offset |= field(high, at_high, 2, 6); }
    return *(const uint32_t *) ((const char *) table + offset);
}

template <int D, int KB, int VB>
__device__ __forceinline__ void score_lattice(
    const uint32_t * table, const uint32_t (&q)[D / 16][2], const uint8_t * stage, float (&s)[4][4]) {
    using map = lattice_map<D, KB, VB>;
    // P: steps of a chunk
    constexpr int W = cut<KB>::W, P = cut<KB>::P, S = D / 16, N = map::VECS * W / 32 * 4,
                  N_HIGH = map::VECS * map::HIGH / 32 * 4;
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, tile = g / 2;
    const uint8_t *words = stage + map::K + tile * N * 16 + g % 2 * 8,
                  *words1 = stage + map::K_HIGH + tile * N_HIGH * 16 + g % 2 * 8;
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) { s[j][e] = 0.0f; }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint2 x, h = {};
#pragma unroll
        for (int t = 0; t < S; t++) {
            if (S < P ? t == 0 : t % P == 0) {
                const int chunk = S < P ? c / 2 : c + 4 * (t / P);
                x = *(const uint2 *) (words + chunk * 64 + (j ^ tile) * 16);
                if (S < P) { // two threads share a word
                    x.x = rotate(x.x, 4 * (c % 2));
                    x.y = rotate(x.y, 4 * (c % 2));
                }
                if (cut<KB>::high) { // a word of the second part has the indices of two chunks
                    h = *(const uint2 *) (words1 + chunk / 2 * 64 + (j ^ tile) * 16);
                    h.x = rotate(h.x, 4 * (chunk % 2));
                    h.y = rotate(h.y, 4 * (chunk % 2));
                }
            }
            const int plane = t % P / 2, byte = t % 2 * 2, at = 8 * byte + W * plane, at_high = 8 * byte + 2 * plane;
            const uint32_t f[4] = { look_up<KB>(table, x.x, at, h.x, at_high),
                look_up<KB>(table, x.y, at, h.y, at_high), look_up<KB>(table, x.x, at + 8, h.x, at_high + 8),
                look_up<KB>(table, x.y, at + 8, h.y, at_high + 8) };
            mma(s[j], f, q[t][0], q[t][1]);
        }
        const float2 scale = *(const float2 *) (stage + map::SCALES + 8 * (8 * tile + g % 2 + 2 * j));
        s[j][0] *= scale.x;
        s[j][1] *= scale.x;
        s[j][2] *= scale.y;
        s[j][3] *= scale.y;
    }
}

// p: probabilities of step j, cells (0, 2) and (1, 3)
template <int D, int KB, int VB>
__device__ __forceinline__ void accumulate_lattice(
    const uint32_t * table, const uint8_t * stage, const uint32_t (&p)[4][2], float (&o)[D / 16][4]) {
    using map = lattice_map<D, KB, VB>;
    constexpr int W = cut<VB>::W, N = W / 2, PLANES = 8 / W; // N: words of a vector that a thread needs
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    uint32_t ps[4][2];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint2 scale = *(const uint2 *) (stage + map::SCALES + 4 * DECODE_CELLS + c * 32 + j * 8);
        ps[j][0] = mul2(p[j][0], scale.x);
        ps[j][1] = mul2(p[j][1], scale.y);
    }
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
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int v = 0; v < 2; v++) { // channels 32i + 4g + 2v, + 1
                const uint32_t y = v ? x[j / PLANES].y : x[j / PLANES].x, hy = v ? h.y : h.x;
                uint32_t e[4];
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    e[t] = look_up<VB>(table, y, 8 * t + W * (j % PLANES), hy, 8 * t + 2 * j);
                }
                const uint32_t f[4] = { even(e[0], e[2]), odd(e[0], e[2]), even(e[1], e[3]), odd(e[1], e[3]) };
                mma(o[2 * i + v], f, ps[j][0], ps[j][1]);
            }
        }
    }
}

// x <- H x without its norm, along the index of an array; a Hadamard matrix is a product over the bits of the
// channel, in any order. take(h): bit h of the index is one of the matrix
template <int N, typename F> __device__ __forceinline__ void butterflies(float (&x)[N], F && take) {
#pragma unroll
    for (int h = 1; h < N; h *= 2) {
        if (take(h)) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (!(i & h)) {
                    const float u = x[i], v = x[i + h];
                    x[i] = u + v;
                    x[i + h] = u - v;
                }
            }
        }
    }
}

// and along bit h of the lane
__device__ __forceinline__ float across(float x, int h) {
    const float other = __shfl_xor_sync(~0u, x, h);
    return threadIdx.x & h ? other - x : x + other;
}

template <int D, typename X> __device__ __forceinline__ float rotation_norm(const kvq_attend_args & a) {
    return X::WIDE ? a.k.norm : D == 64 ? 0.125f : 0.088388348f;
}
// is the matrix one of channels that are `distance` apart? Blocks are the largest powers of two that divide a head.
template <typename X> __device__ __forceinline__ bool rotates(const kvq_attend_args & a, int distance) {
    return !X::WIDE || distance < a.k.block;
}
// the sign of slice i ^ k in the rotated slice i
__device__ __forceinline__ float slice_sign(int i, int k) { return __popc(i & (i ^ k)) & 1 ? -1.0f : 1.0f; }

// o <- H o, in place and its own inverse; all: memory of the team
template <int D, typename X>
__device__ __forceinline__ void rotate_output(
    const kvq_attend_args & a, const X & of, uint8_t * all, int & turn, float (&o)[D / 16][4]) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float x[D / 8]; // of channels 32i + 4g + {0..3}: bits 0, 1 and from 5 on of the channel
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            x[2 * n] = o[n][e];
            x[2 * n + 1] = o[n][2 + e];
        }
        butterflies(x, [&](int h) { return rotates<X>(a, h < 4 ? h : 8 * h); });
#pragma unroll
        for (int n = 0; n < D / 8; n++) { x[n] *= rotation_norm<D, X>(a); }
#pragma unroll
        for (int h = 4; h <= 16; h *= 2) {
            if (rotates<X>(a, h)) {
#pragma unroll
                for (int n = 0; n < D / 8; n++) { x[n] = across(x[n], h); }
            }
        }
        if constexpr (X::WIDE) {
            if (a.k.block > D) { // and along the slices
                const float own = slice_sign(of.i, 0);
                float y[D / 8];
#pragma unroll
                for (int n = 0; n < D / 8; n++) { y[n] = own * x[n]; }
                team_exchange(of, all, turn, x, [&](int k, const float (&z)[16]) {
                    if (k * D < a.k.block) {
                        const float sign = slice_sign(of.i, k);
#pragma unroll
                        for (int n = 0; n < D / 8; n++) { y[n] = fmaf(sign, z[n], y[n]); }
                    }
                });
#pragma unroll
                for (int n = 0; n < D / 8; n++) { x[n] = y[n]; }
            }
        }
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            o[n][e] = x[2 * n];
            o[n][2 + e] = x[2 * n + 1];
        }
    }
}

// a query's channels of this thread, 4 a step, to f16; rotated when the pages are. p: of the whole head
template <int D, int KB, typename X>
__device__ __forceinline__ void load_query(
    const kvq_attend_args & a, const X & of, const float * p, float f, bool rotated, uint32_t (&q)[D / 16][2]) {
    constexpr int P = cut<KB>::P, S = D / 16, RUN = 4 * (S < P ? S : P); // RUN: neighbouring channels of a thread
    float x[D / 4];
#pragma unroll
    for (int s = 0; s < S; s++) {
        const float4 y = load_four(of, p, channel_of<D, KB>(threadIdx.x % 4, s));
        x[4 * s] = y.x * f;
        x[4 * s + 1] = y.y * f;
        x[4 * s + 2] = y.z * f;
        x[4 * s + 3] = y.w * f;
    }
    if (rotated) {
        if constexpr (X::WIDE) {
            if (a.k.block > D) { // whole slices
                const float own = slice_sign(of.i, 0);
#pragma unroll
                for (int i = 0; i < D / 4; i++) { x[i] *= own; }
#pragma unroll 1
                for (int k = 1; k * D < a.k.block; k++) {
                    const float sign = slice_sign(of.i, k) * f;
#pragma unroll
                    for (int s = 0; s < S; s++) {
                        const float4 y = *(const float4 *) (p + (of.i ^ k) * D + channel_of<D, KB>(threadIdx.x % 4, s));
                        x[4 * s] = fmaf(sign, y.x, x[4 * s]);
                        x[4 * s + 1] = fmaf(sign, y.y, x[4 * s + 1]);
                        x[4 * s + 2] = fmaf(sign, y.z, x[4 * s + 2]);
                        x[4 * s + 3] = fmaf(sign, y.w, x[4 * s + 3]);
                    }
                }
            }
        }
        butterflies(x, [&](int h) { return rotates<X>(a, h < RUN ? h : 4 * h); });
#pragma unroll
        for (int i = 0; i < D / 4; i++) { x[i] *= rotation_norm<D, X>(a); }
#pragma unroll
        for (int h = 1; h <= 2; h *= 2) {
            if (rotates<X>(a, h * RUN)) {
#pragma unroll
                for (int i = 0; i < D / 4; i++) { x[i] = across(x[i], h); }
            }
        }
    }
#pragma unroll
    for (int s = 0; s < S; s++) {
        q[s][0] = pack_half2(x[4 * s], x[4 * s + 1]);
        q[s][1] = pack_half2(x[4 * s + 2], x[4 * s + 3]);
    }
}

} // namespace

// 32 cells of a page as f16 in shared memory, whatever the page holds:  K [cell][D + 8]   V [channel][32 + 8]
//     (transposed)
// Both are read as the right operand of m16n8k16, two neighbouring values a register; the padding keeps reads off
// equal banks.
#pragma once

#include "lattice.cuh"

constexpr int TILE_CELLS = 32;
constexpr int TILE_V_STEP = TILE_CELLS + 8;

// 4 codes, one a byte, as two half2
static __device__ __forceinline__ void codes_to_half(uint32_t four, __half2 & a, __half2 & b) {
    // 1024 + code
    const uint32_t lo = __byte_perm(four, 0x64646464, 0x4140), hi = __byte_perm(four, 0x64646464, 0x4342);
    const __half2 base = __half2half2(__ushort_as_half(0x6400));
    a = __hsub2(*(const __half2 *) &lo, base);
    b = __hsub2(*(const __half2 *) &hi, base);
}

// codes of 4 dot indices 4*unit.. of one lane
template <int BITS>
static __device__ __forceinline__ uint32_t four_codes(
    const kvq_affine_geometry & g, const uint8_t * codes, int lane, int unit) {
    constexpr int W0 = BITS == 3 ? 2 : BITS, P0 = 8 / W0;
    const uint8_t * p = codes + lane / 16 * g.n_chunks[0] * 64 + lane % 16 * 4;
    uint32_t x = *(const uint32_t *) (p + unit / P0 * 64) >> (unit % P0 * W0) & (0x01010101u * ((1 << W0) - 1));
    if (BITS == 3) {
        const uint8_t * p1 = codes + g.offset[1] + lane / 16 * g.n_chunks[1] * 64 + lane % 16 * 4;
        x |= (*(const uint32_t *) (p1 + unit / 8 * 64) >> (unit % 8) & 0x01010101u) << 2;
    }
    return x;
}

// parameters at..at+3; np, at and the block are multiples of 4 (u8) or 8 bytes (f16)
static __device__ __forceinline__ void four_params(
    const kvq_affine_geometry & g, const uint8_t * params, int at, __half2 (&s)[2], __half2 (&z)[2]) {
    if (!g.scale) {
        const uint2 a = *(const uint2 *) (params + 2 * at), b = *(const uint2 *) (params + 2 * (g.np + at));
        s[0] = *(const __half2 *) &a.x;
        s[1] = *(const __half2 *) &a.y;
        z[0] = *(const __half2 *) &b.x;
        z[1] = *(const __half2 *) &b.y;
        return;
    }
    const uint2 head = *(const uint2 *) params; // low, step of scales; low, step of zeros
    const float2 hs = __half22float2(*(const __half2 *) &head.x), hz = __half22float2(*(const __half2 *) &head.y);
    const uchar4 a = *(const uchar4 *) (params + 8 + at), b = *(const uchar4 *) (params + 8 + g.np + at);
    s[0] = __floats2half2_rn(hs.x + hs.y * a.x, hs.x + hs.y * a.y);
    s[1] = __floats2half2_rn(hs.x + hs.y * a.z, hs.x + hs.y * a.w);
    z[0] = __floats2half2_rn(hz.x + hz.y * b.x, hz.x + hz.y * b.y);
    z[1] = __floats2half2_rn(hz.x + hz.y * b.z, hz.x + hz.y * b.w);
}

static __device__ __forceinline__ uint2 two(const __half2 & a, const __half2 & b) {
    return make_uint2(*(const uint32_t *) &a, *(const uint32_t *) &b);
}

// K: lane = cell, dot = channel
template <int D, int BITS, int THREADS>
static __device__ void fill_k(
    const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params, int t0, __half * s_k) {
#pragma unroll 4
    for (int i = threadIdx.x; i < TILE_CELLS * (D / 4); i += THREADS) {
        const int t = i / (D / 4), u = i % (D / 4);
        __half2 a = __half2half2(__ushort_as_half(0)), b = a;
        if (4 * u < g.head_size) {
            __half2 s[2], z[2];
            four_params(g, params, (t0 + t) / g.group * g.head_size + 4 * u, s, z);
            if (BITS) {
                codes_to_half(four_codes<BITS ? BITS : 1>(g, codes, t0 + t, u), a, b);
                a = __hfma2(a, s[0], z[0]);
                b = __hfma2(b, s[1], z[1]);
            } else {
                a = z[0];
                b = z[1];
            }
        }
        *(uint2 *) (s_k + t * (D + 8) + 4 * u) = two(a, b);
    }
}

// V: lane = channel, dot = cell
template <int D, int BITS, int THREADS>
static __device__ void fill_v(
    const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params, int t0, __half * s_v) {
#pragma unroll 4
    for (int i = threadIdx.x; i < D * (TILE_CELLS / 4); i += THREADS) {
        const int c = i % D, u = i / D;
        __half2 a = __half2half2(__ushort_as_half(0)), b = a;
        if (c < g.head_size) {
            __half2 s[2], z[2];
            four_params(g, params, c / g.group * g.n_cells + t0 + 4 * u, s, z);
            if (BITS) {
                codes_to_half(four_codes<BITS ? BITS : 1>(g, codes, c, t0 / 4 + u), a, b);
                a = __hfma2(a, s[0], z[0]);
                b = __hfma2(b, s[1], z[1]);
            } else {
                a = z[0];
                b = z[1];
            }
        }
        *(uint2 *) (s_v + c * TILE_V_STEP + 4 * u) = two(a, b);
    }
}

// open pages: rows [cell][stride]
template <int D, int THREADS>
static __device__ void fill_k_open(const uint16_t * tile, int stride, int head_size, int t0, __half * s_k) {
#pragma unroll 4
    for (int i = threadIdx.x; i < TILE_CELLS * (D / 8); i += THREADS) {
        const int t = i / (D / 8), u = i % (D / 8);
        uint4 x = make_uint4(0, 0, 0, 0);
        if (8 * u < head_size) { x = *(const uint4 *) (tile + (size_t) (t0 + t) * stride + 8 * u); }
        *(uint4 *) (s_k + t * (D + 8) + 8 * u) = x;
    }
}

template <int D, int THREADS>
static __device__ void fill_v_open(const uint16_t * tile, int stride, int head_size, int t0, __half * s_v) {
#pragma unroll 4
    for (int i = threadIdx.x; i < D * (TILE_CELLS / 4); i += THREADS) {
        const int c = i % D, u = i / D;
        ushort4 x = make_ushort4(0, 0, 0, 0);
        if (c < head_size) {
            const uint16_t * p = tile + (size_t) (t0 + 4 * u) * stride + c;
            x = make_ushort4(p[0], p[stride], p[2 * stride], p[3 * stride]);
        }
        *(ushort4 *) (s_v + c * TILE_V_STEP + 4 * u) = x;
    }
}

// lattice blocks: a warp a cell
template <int D, int THREADS>
static __device__ __noinline__ void fill_lattice(const kvq_affine_geometry & g, const uint8_t * codes,
    const uint8_t * params, int t0, __half * to, int cell_step, int channel_step) {
    constexpr int N = (D + 31) / 32;
    for (int t = threadIdx.x / 32; t < TILE_CELLS; t += THREADS / 32) {
        float x[N];
        lattice_row<N>(g, codes, params, t0 + t, x);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int c = 32 * i + threadIdx.x % 32;
            if (c < D) {
                to[t * cell_step + c * channel_step] = __float2half_rn(fminf(fmaxf(x[i], -65504.0f), 65504.0f));
            }
        }
    }
}

template <int D, int THREADS>
static __device__ void fill_tile(const kvq_affine_geometry & k, const kvq_affine_geometry & v, const kvq_page & page,
    int kvh, int t0, __half * s_k, __half * s_v) {
    const uint8_t *c = (const uint8_t *) page.k_codes, *p = (const uint8_t *) page.k_params;
    if (!p) {
        fill_k_open<D, THREADS>(
            (const uint16_t *) c + (size_t) kvh * k.n_cells * k.stride, k.stride, k.head_size, t0, s_k);
    } else {
        c += (size_t) kvh * k.nb_codes;
        p += (size_t) kvh * k.nb_params;
        switch (k.type == KVQ_TYPE_LATTICE ? -1 : k.bits) {
        case -1: fill_lattice<D, THREADS>(k, c, p, t0, s_k, D + 8, 1); break;
        case 0: fill_k<D, 0, THREADS>(k, c, p, t0, s_k); break;
        case 1: fill_k<D, 1, THREADS>(k, c, p, t0, s_k); break;
        case 2: fill_k<D, 2, THREADS>(k, c, p, t0, s_k); break;
        case 3: fill_k<D, 3, THREADS>(k, c, p, t0, s_k); break;
        case 4: fill_k<D, 4, THREADS>(k, c, p, t0, s_k); break;
        }
    }
    c = (const uint8_t *) page.v_codes;
    p = (const uint8_t *) page.v_params;
    if (!p) {
        fill_v_open<D, THREADS>(
            (const uint16_t *) c + (size_t) kvh * v.n_cells * v.stride, v.stride, v.head_size, t0, s_v);
    } else {
        c += (size_t) kvh * v.nb_codes;
        p += (size_t) kvh * v.nb_params;
        switch (v.type == KVQ_TYPE_LATTICE ? -1 : v.bits) {
        case -1: fill_lattice<D, THREADS>(v, c, p, t0, s_v, 1, TILE_V_STEP); break;
        case 0: fill_v<D, 0, THREADS>(v, c, p, t0, s_v); break;
        case 1: fill_v<D, 1, THREADS>(v, c, p, t0, s_v); break;
        case 2: fill_v<D, 2, THREADS>(v, c, p, t0, s_v); break;
        case 3: fill_v<D, 3, THREADS>(v, c, p, t0, s_v); break;
        case 4: fill_v<D, 4, THREADS>(v, c, p, t0, s_v); break;
        }
    }
}

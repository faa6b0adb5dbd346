// Mixed pages (types/mixed.h) in kernels: the parts' geometries, and where a cell lies.
#pragma once

#include "common.cuh"

struct kvq_mixed_geometry {
    kvq_affine_geometry part[2];                // n_cells 0: the page has no such part
    int codes[2], params[2], channels;          // offsets
    int n_cells, n_hi, head_size, stride, role; // of the page
    int nb_codes, nb_params;
};

kvq_mixed_geometry kvq_mixed_get_geometry(const kvq_codec & c); // device_policies.cu

// Place of cell t: part << 8 | index within it. A set of a wrong size, which only foreign bytes hold, gives indices
// beyond the part.
static __device__ __forceinline__ int mixed_place(const uint8_t * set, int t) {
    const uint32_t * words = (const uint32_t *) set;
    int before = 0;
    for (int i = 0; i < t / 32; i++) { before += __popc(words[i]); }
    const uint32_t word = words[t / 32];
    before += __popc(word & ((1u << t % 32) - 1));
    return word >> t % 32 & 1 ? before : 256 | (t - before);
}

static __device__ __forceinline__ float mixed_channel(uint8_t byte) { return f16_bits_to_f32((uint16_t) (byte << 7)); }

static __device__ __forceinline__ float mixed_half(const uint8_t * p) { return f16_bits_to_f32(*(const uint16_t *) p); }

// scale and zero of pair p of a part: blocks of parts are multiples of 4 bytes apart, no more
static __device__ __forceinline__ float2 mixed_params(const kvq_affine_geometry & g, const uint8_t * params, int p) {
    if (!g.scale) { return make_float2(mixed_half(params + 2 * p), mixed_half(params + 2 * (g.np + p))); }
    const int s = g.scale == 1 ? params[8 + p] : params[8 + p] & 15,
              z = g.scale == 1 ? params[8 + g.np + p] : params[8 + p] >> 4;
    return make_float2(mixed_half(params) + mixed_half(params + 2) * (float) s,
        mixed_half(params + 4) + mixed_half(params + 6) * (float) z);
}

// codes of keys: 4 channels, from channel 4*u on, of cell j of a part, a byte each
static __device__ __forceinline__ uint32_t mixed_word(
    const kvq_affine_geometry & g, const uint8_t * codes, int j, int u) {
    const int w = g.width[0], planes = 8 / w;
    uint32_t word =
        *(const uint32_t *) (codes + (j / 16 * g.n_chunks[0] + u / planes) * 64 + j % 16 * 4) >> u % planes * w &
        (0x01010101u * ((1u << w) - 1));
    if (g.n_parts == 2) {
        word |=
            (*(const uint32_t *) (codes + g.offset[1] + (j / 16 * g.n_chunks[1] + u / 8) * 64 + j % 16 * 4) >> u % 8 &
                0x01010101u)
            << 2;
    }
    return word;
}

// code of (lane, dot)
static __device__ __forceinline__ int mixed_code(
    const kvq_affine_geometry & g, const uint8_t * codes, int lane, int dot) {
    const int w = g.width[0], span = 32 / w, rest = dot % span;
    int code = codes[(lane / 16 * g.n_chunks[0] + dot / span) * 64 + lane % 16 * 4 + rest % 4] >> rest / 4 * w &
        ((1 << w) - 1);
    if (g.n_parts == 2) { // third bits
        const int more = dot % 32;
        code |=
            (codes[g.offset[1] + (lane / 16 * g.n_chunks[1] + dot / 32) * 64 + lane % 16 * 4 + more % 4] >> more / 4 &
                1)
            << 2;
    }
    return code;
}

// Channels c..c+3 of a cell at `place`; codes and params: of the head's block. c is a multiple of 4.
static __device__ __forceinline__ float4 mixed_values(
    const kvq_mixed_geometry & m, const uint8_t * codes, const uint8_t * params, int place, int c) {
    const int i = place >> 8, j = place & 255;
    const kvq_affine_geometry & g = m.part[i];
    if (j >= g.n_cells) { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
    const uint8_t *q = params + m.params[i], *k = codes + m.codes[i];
    float x[4];
    if (m.role == KVQ_ROLE_K) { // pairs one a channel
        const uint32_t word = mixed_word(g, k, j, c / 4);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float2 y = mixed_params(g, q, c + e);
            x[e] = y.y + y.x * (float) (word >> 8 * e & 255);
        }
    } else {
        const float2 y = mixed_params(g, q, j);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[e] = (y.y + y.x * (float) mixed_code(g, k, c + e, j)) * mixed_channel(params[m.channels + c + e]);
        }
    }
    return make_float4(x[0], x[1], x[2], x[3]);
}

static __device__ __forceinline__ uint2 mixed_halves(float4 x) { // finite
    const __half2 a = __floats2half2_rn(fminf(fmaxf(x.x, -65504.0f), 65504.0f), fminf(fmaxf(x.y, -65504.0f), 65504.0f));
    const __half2 b = __floats2half2_rn(fminf(fmaxf(x.z, -65504.0f), 65504.0f), fminf(fmaxf(x.w, -65504.0f), 65504.0f));
    return make_uint2(*(const uint32_t *) &a, *(const uint32_t *) &b);
}

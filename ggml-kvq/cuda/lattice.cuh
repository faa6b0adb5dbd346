// A row of a lattice block (types/lattice.h) by one warp: lane i has channels i, i + 32, ..., N of them.
#pragma once

#include "common.cuh"

constexpr int LATTICE_MAX_CELLS = 256, LATTICE_MAX_VALUES = 2048; // values: of a grid
// Behind the points of a grid of two channels, in floats from the first one on: both coordinates of each point as two
// bytes with sign; of 16 points the first coordinates and then the second ones, KVQ_POINT_MIDDLE more.
constexpr int KVQ_GRID_BYTES = 1024, KVQ_POINT_BYTES = 1536, KVQ_POINT_MIDDLE = 64;

// Butterflies in order of growing distance, then the norm: the operations of kvq_hadamard.
template <int N> static __device__ __forceinline__ void warp_hadamard(const kvq_affine_geometry & g, float (&x)[N]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 1; h < 32; h *= 2) {
        if (h < g.block) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float other = __shfl_xor_sync(~0u, x[i], h);
                x[i] = lane & h ? other - x[i] : x[i] + other;
            }
        }
    }
#pragma unroll
    for (int k = 1; k < N; k *= 2) {
        if (32 * k < g.block) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (!(i & k) && i + k < N) {
                    const float a = x[i], b = x[i + k];
                    x[i] = a + b;
                    x[i + k] = a - b;
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) { x[i] *= g.norm; }
}

static __device__ __forceinline__ float lattice_scale(const kvq_affine_geometry & g, const uint8_t * params, int cell) {
    const uint16_t * half = (const uint16_t *) params;
    float s;
    if (g.scale) {
        const bool bytes = g.scale == 1;
        const float u = (float) (bytes ? params[2 + cell] : params[2 + cell / 2] >> cell % 2 * 4 & 15);
        s = f16_bits_to_f32(half[0]) * (bytes ? 1.0f / 65025.0f : 1.0f / 225.0f) * (u * u);
    } else {
        s = f16_bits_to_f32(half[cell]);
    }
    return s - s == 0.0f ? s : 0.0f; // only foreign bytes are not finite
}

static __device__ __forceinline__ int lattice_index(
    const kvq_affine_geometry & g, const uint8_t * codes, int cell, int vec) {
    const int lane = g.role == KVQ_ROLE_K ? cell : vec, dot = g.role == KVQ_ROLE_K ? vec : cell;
    int index = 0;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        if (part >= g.n_parts) { break; }
        const int w = g.width[part], span = 32 / w, rest = dot % span;
        const int at = g.offset[part] + (lane / 16 * g.n_chunks[part] + dot / span) * 64 + lane % 16 * 4 + rest % 4;
        index |= (codes[at] >> rest / 4 * w & ((1 << w) - 1)) << g.shift[part];
    }
    return index;
}

// Decoded row of a cell, f32, the Hadamard matrix undone: a lane has channels 32 i + lane. Those behind the head are 0.
template <int N>
static __device__ __forceinline__ void lattice_row(
    const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params, int cell, float (&x)[N]) {
    const int lane = threadIdx.x % 32;
    const float s = lattice_scale(g, params, cell);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int c = 32 * i + lane;
        x[i] = c < g.head_size
            ? __ldg(g.points + lattice_index(g, codes, cell, c / g.group) * g.group + c % g.group) * s
            : 0.0f;
    }
    warp_hadamard<N>(g, x);
}

// Calls f with the N of a head size as a type.
template <int N> struct lattice_width {
    static constexpr int value = N;
};
template <typename F> static void lattice_switch(int head_size, F && f) {
    switch ((head_size + 31) / 32) {
    case 1:
    case 2: f(lattice_width<2>()); break;
    case 3: f(lattice_width<3>()); break;
    case 4: f(lattice_width<4>()); break;
    case 5:
    case 6: f(lattice_width<6>()); break;
    case 7:
    case 8: f(lattice_width<8>()); break;
    default: f(lattice_width<16>()); break;
    }
}

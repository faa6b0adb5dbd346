// What the coordinates of a cell say of its rows (types/basis.h): whole numbers, so its bits whatever the order.
#pragma once

#include "turn.cuh"
#include "types/basis.h"

// kvq_coord_scale
static __device__ __forceinline__ float coord_scale(int e) { return __int_as_float((e << 20) + (111 << 23)); }

// coords: of a page, behind the parameters of the first head's block
static __device__ __forceinline__ size_t coord_pair_at(const kvq_device_basis & b, int pair, int cell) {
    return (size_t) (pair / b.each) * b.nb_params + b.at + (size_t) (pair % b.each) * b.n_cells + cell;
}

// 2 c - 15 of four coordinates
static __device__ __forceinline__ uint32_t coord_word(
    const kvq_device_basis & b, const uint8_t * coords, int cell, int word) {
    const uint32_t first = coords[coord_pair_at(b, 2 * word, cell)],
                   second = coords[coord_pair_at(b, min(2 * word + 1, b.n / 2), cell)]; // behind n its weights are 0
    return __vsub4(2 * ((first & 15) | (first >> 4) << 8 | (second & 15) << 16 | (second >> 4) << 24), 0x0f0f0f0fu);
}

// By a warp: 2 c - 15 of the cell's coordinates, four a word, and their scale.
static __device__ __forceinline__ float load_coords(
    const kvq_device_basis & b, const uint8_t * coords, int cell, uint32_t * words) {
    const int n_words = (b.n + 3) / 4;
    __syncwarp();
    for (int i = threadIdx.x % 32; i < n_words; i += 32) { words[i] = coord_word(b, coords, cell, i); }
    __syncwarp();
    return coord_scale(coords[coord_pair_at(b, b.n / 2, cell)]);
}

static __device__ __forceinline__ float said_of(const kvq_device_basis & b, int channel, int sum, float scale) {
    return __ldg(b.step + channel) * (float) sum * scale;
}

// of a channel of all heads
static __device__ __forceinline__ float said(
    const kvq_device_basis & b, const uint32_t * words, float scale, int channel) {
    int sum = 0;
    for (int i = 0; i < (b.n + 3) / 4; i++) {
        sum = __dp4a(__ldg((const int *) b.out + (size_t) i * b.width + channel), (int) words[i], sum);
    }
    return said_of(b, channel, sum, scale);
}

// of four channels from a multiple of 4 on
static __device__ __forceinline__ float4 said4(
    const kvq_device_basis & b, const uint32_t * words, float scale, int channel) {
    int4 sum = make_int4(0, 0, 0, 0);
    for (int i = 0; i < (b.n + 3) / 4; i++) {
        const int4 w = __ldg((const int4 *) ((const int *) b.out + (size_t) i * b.width + channel));
        const int c = (int) words[i];
        sum.x = __dp4a(w.x, c, sum.x);
        sum.y = __dp4a(w.y, c, sum.y);
        sum.z = __dp4a(w.z, c, sum.z);
        sum.w = __dp4a(w.w, c, sum.w);
    }
    return make_float4(said_of(b, channel, sum.x, scale), said_of(b, channel + 1, sum.y, scale),
        said_of(b, channel + 2, sum.z, scale), said_of(b, channel + 3, sum.w, scale));
}

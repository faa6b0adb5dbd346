// Shared by the kernels: f16 bit patterns, affine geometry as a kernel argument.
#pragma once

#include "ggml-kvq.h"

#include <cstdint>
#include <cuda_fp16.h>

// types/affine.h, worked out on the host once per launch
struct kvq_affine_geometry {
    int role, bits, group, scale, levels, n_cells, head_size, stride; // stride: channels of a tile row
    float eta;
    int lanes, dots, n_tiles, np;
    int n_parts, width[2], shift[2], n_chunks[2], offset[2];
    int nb_codes, nb_params;
};

kvq_affine_geometry kvq_affine_get_geometry(const kvq_codec & c); // device.cu

static __device__ __forceinline__ float f16_bits_to_f32(uint16_t h) { return __half2float(__ushort_as_half(h)); }
static __device__ __forceinline__ uint16_t f32_to_f16_bits(float x)  { return __half_as_ushort(__float2half_rn(x)); }
static __device__ __forceinline__ uint16_t f32_to_f16_finite(float x) { return f32_to_f16_bits(fminf(fmaxf(x, -65504.0f), 65504.0f)); }

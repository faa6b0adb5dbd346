// Rows of the second tier, 8 channels at a time.
#pragma once

#include "common.cuh"

// 8 channels of a far row (types/far_rows.h)
struct far_unit {
    uint4 raw;
    uint16_t scale;
};

static __device__ __forceinline__ int n_blocks_of(int head_size) { return (head_size + 31) / 32; }

static __device__ __forceinline__ far_unit load_unit(int format, int head_size, const uint8_t * row, int u) {
    far_unit x = {};
    if (format == KVQ_FAR_F16) {
        x.raw = *(const uint4 *) (row + 16 * u);
    } else if (format == KVQ_FAR_Q8) {
        const uint2 y = *(const uint2 *) (row + 8 * u);
        x.raw.x = y.x;
        x.raw.y = y.y;
        x.scale = *(const uint16_t *) (row + n_blocks_of(head_size) * 32 + u / 4 * 2);
    } else { // channels 0..15 of a block in the low halves of its bytes
        const uint2 y = *(const uint2 *) (row + u / 4 * 16 + u % 2 * 8);
        x.raw.x = y.x >> (u % 4 / 2 * 4) & 0x0f0f0f0fu;
        x.raw.y = y.y >> (u % 4 / 2 * 4) & 0x0f0f0f0fu;
        x.scale = *(const uint16_t *) (row + n_blocks_of(head_size) * 16 + u / 4 * 2);
    }
    return x;
}

// as kvq_far_get: rounded to f16
static __device__ __forceinline__ void unit_values(int format, const far_unit & x, uint16_t (&out)[8]) {
    const uint32_t raw[4] = { x.raw.x, x.raw.y, x.raw.z, x.raw.w };
    if (format == KVQ_FAR_F16) {
#pragma unroll
        for (int i = 0; i < 8; i++) { out[i] = (uint16_t) (raw[i / 2] >> i % 2 * 16); }
        return;
    }
    const float scale = f16_bits_to_f32(x.scale);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t byte = raw[i / 4] >> i % 4 * 8 & 255;
        out[i] = f32_to_f16_bits(scale * (float) (format == KVQ_FAR_Q8 ? (int) (int8_t) byte : (int) byte - 8));
    }
}

static __device__ __forceinline__ uint4 as_uint4(const uint16_t (&x)[8]) {
    return make_uint4(x[0] | (uint32_t) x[1] << 16, x[2] | (uint32_t) x[3] << 16, x[4] | (uint32_t) x[5] << 16,
        x[6] | (uint32_t) x[7] << 16);
}

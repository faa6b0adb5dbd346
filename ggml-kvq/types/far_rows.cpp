#include "far_rows.h"

#include "base/constants.h"
#include "base/f16.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

static int n_blocks(int head_size) { return (head_size + KVQ_FAR_BLOCK - 1) / KVQ_FAR_BLOCK; }
// The largest f16 that times 127 is one: 65504/127 would be rounded to 516, and the largest values decoded to infinity.
static constexpr float MOST_Q8 = 515.5f;
static size_t nb_block(int format) { return format == KVQ_FAR_Q8 ? KVQ_FAR_BLOCK : KVQ_FAR_BLOCK / 2; }

extern "C" size_t kvq_far_row_bytes(int format, int head_size) {
    if (head_size < 1 || head_size > KVQ_MAX_HEAD) { return 0; }
    switch (format) {
    case KVQ_FAR_F16: return 2 * kvq_pad((size_t) head_size, 16);
    case KVQ_FAR_Q8:
    case KVQ_FAR_Q4: return kvq_pad((size_t) n_blocks(head_size) * (nb_block(format) + 2), 8);
    default: return 0;
    }
}

void kvq_far_put(int format, int head_size, const uint16_t * row, void * far) {
    if (format == KVQ_FAR_F16) {
        memcpy(far, row, 2 * kvq_pad((size_t) head_size, 16));
        return;
    }
    uint8_t * codes = (uint8_t *) far;
    uint8_t * scales = codes + (size_t) n_blocks(head_size) * nb_block(format);
    uint8_t * end = scales + 2 * (size_t) n_blocks(head_size);
    memset(end, 0, (size_t) ((uint8_t *) far + kvq_far_row_bytes(format, head_size) - end)); // padding
    for (int b = 0; b < n_blocks(head_size); b++, codes += nb_block(format)) {
        float x[KVQ_FAR_BLOCK] = {}, most = 0.0f; // most: the value of largest magnitude
        for (int i = 0; i < std::min(head_size - b * KVQ_FAR_BLOCK, KVQ_FAR_BLOCK); i++) {
            x[i] = kvq_f16_to_f32(row[b * KVQ_FAR_BLOCK + i]);
            most = std::fabs(x[i]) > std::fabs(most) ? x[i] : most;
        }
        const uint16_t scale =
            kvq_f32_to_f16(format == KVQ_FAR_Q8 ? std::min(std::fabs(most) / 127.0f, MOST_Q8) : most / -8.0f);
        const float s = kvq_f16_to_f32(scale), by = s != 0.0f ? 1.0f / s : 0.0f;
        memcpy(scales + 2 * b, &scale, 2);
        for (int i = 0; i < KVQ_FAR_BLOCK; i++) {
            const float c = std::nearbyint(x[i] * by);
            if (format == KVQ_FAR_Q8) {
                ((int8_t *) codes)[i] = (int8_t) std::min(std::max(c, -127.0f), 127.0f);
            } else {
                const uint8_t q = (uint8_t) (std::min(std::max(c, -8.0f), 7.0f) + 8.0f);
                codes[i % 16] = (uint8_t) (i < 16 ? q : codes[i % 16] | q << 4);
            }
        }
    }
}

void kvq_far_get(int format, int head_size, const void * far, uint16_t * row) {
    const size_t padded = kvq_pad((size_t) head_size, 16);
    if (format == KVQ_FAR_F16) {
        memcpy(row, far, 2 * padded);
        return;
    }
    const uint8_t * codes = (const uint8_t *) far;
    const uint8_t * scales = codes + (size_t) n_blocks(head_size) * nb_block(format);
    for (int d = 0; d < (int) padded; d++) {
        const int b = d / KVQ_FAR_BLOCK, i = d % KVQ_FAR_BLOCK;
        const uint8_t * block = codes + b * nb_block(format);
        uint16_t scale;
        memcpy(&scale, scales + 2 * b, 2);
        const int code =
            format == KVQ_FAR_Q8 ? ((const int8_t *) block)[i] : (block[i % 16] >> (i < 16 ? 0 : 4) & 15) - 8;
        row[d] = d < head_size ? kvq_f32_to_f16(kvq_f16_to_f32(scale) * (float) code) : 0;
    }
}

extern "C" int kvq_far_encode(int format, int head_size, int64_t n, const uint16_t * rows, void * out) {
    const size_t nb = kvq_far_row_bytes(format, head_size), padded = kvq_pad((size_t) std::max(head_size, 1), 16);
    if (!nb || n < 0 || !rows || !out) { return KVQ_ERR_ARGUMENT; }
    std::vector<uint16_t> row(padded, 0);
    for (int64_t i = 0; i < n; i++) {
        std::copy_n(rows + i * head_size, head_size, row.data());
        kvq_far_put(format, head_size, row.data(), (uint8_t *) out + (size_t) i * nb);
    }
    return KVQ_OK;
}

extern "C" int kvq_far_decode(int format, int head_size, int64_t n, const void * far, uint16_t * rows) {
    const size_t nb = kvq_far_row_bytes(format, head_size), padded = kvq_pad((size_t) std::max(head_size, 1), 16);
    if (!nb || n < 0 || !far || !rows) { return KVQ_ERR_ARGUMENT; }
    std::vector<uint16_t> row(padded);
    for (int64_t i = 0; i < n; i++) {
        kvq_far_get(format, head_size, (const uint8_t *) far + (size_t) i * nb, row.data());
        std::copy_n(row.data(), head_size, rows + i * head_size);
    }
    return KVQ_OK;
}

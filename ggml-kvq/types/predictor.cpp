#include "predictor.h"

#include "base/f16.h"

#include <algorithm>
#include <cmath>
#include <cstring>

size_t kvq_predictor_bytes(int n_in, int n_out, int bits) {
    if (n_in < 1 || n_out < 1 || n_in > 1 << 20 || n_out > 1 << 20 || (bits != 8 && bits != 4)) { return 0; }
    kvq_predictor p;
    p.n_in = n_in;
    p.n_out = n_out;
    p.bits = bits;
    return (size_t) p.n_tiles() * p.n_groups() * (p.nb_group() + 32);
}

static uint8_t * code_at(const kvq_predictor & p, uint8_t * data, int i, int g, int j, int & shift) {
    const int per = p.bits == 8 ? 4 : 8; // inputs of a chunk
    shift = p.bits == 8 ? 0 : j % 8 / 4 * 4;
    return data + ((size_t) (i / 16) * p.n_groups() + g) * p.nb_group() + j / per * 64 + i % 16 * 4 + j % 4;
}

void kvq_predictor_put(
    int n_in, int n_out, int bits, int i, int g, uint16_t step, const uint8_t * code, uint8_t * data) {
    kvq_predictor p;
    p.n_in = n_in;
    p.n_out = n_out;
    p.bits = bits;
    p.data = data;
    for (int j = 0; j < KVQ_PREDICT_GROUP; j++) {
        int shift;
        uint8_t * b = code_at(p, data, i, g, j, shift);
        *b = (uint8_t) (bits == 8 ? code[j] : (*b & ~(15 << shift)) | code[j] << shift);
    }
    memcpy((uint8_t *) p.steps() + 2 * (((size_t) (i / 16) * p.n_groups() + g) * 16 + i % 16), &step, 2);
}

void kvq_predictor_pack(int n_in, int n_out, int bits, const float * w, uint8_t * data) {
    kvq_predictor p;
    p.n_in = n_in;
    p.n_out = n_out;
    p.bits = bits;
    memset(data, 0, kvq_predictor_bytes(n_in, n_out, bits));
    for (int i = 0; i < p.n_tiles() * 16; i++) {
        for (int g = 0; g < p.n_groups(); g++) {
            float x[KVQ_PREDICT_GROUP], top = 0.0f; // top: of the largest magnitude, the first one
            for (int j = 0; j < KVQ_PREDICT_GROUP; j++) {
                const int at = g * KVQ_PREDICT_GROUP + j;
                x[j] = i < n_out && at < n_in ? w[(size_t) i * n_in + at] : 0.0f;
                top = fabsf(x[j]) > fabsf(top) ? x[j] : top;
            }
            // + 0: no negative zero
            const uint16_t step = kvq_f32_to_f16(bits == 8 ? fabsf(top) / 63.0f : top / -8.0f + 0.0f);
            const float d = kvq_f16_to_f32(step), inv = d != 0.0f ? 1.0f / d : 0.0f;
            uint8_t code[KVQ_PREDICT_GROUP];
            for (int j = 0; j < KVQ_PREDICT_GROUP; j++) {
                const float q = rintf(x[j] * inv);
                code[j] = (uint8_t) (bits == 8 ? 64 + (int) std::min(std::max(q, -63.0f), 63.0f)
                                               : 8 + (int) std::min(std::max(q, -8.0f), 7.0f));
            }
            kvq_predictor_put(n_in, n_out, bits, i, g, step, code, data);
        }
    }
}

void kvq_quantise_row(int n, const float * x, int8_t * x8, float * s) {
    float amax = 0.0f;
    for (int i = 0; i < n; i++) { amax = std::max(amax, fabsf(x[i])); }
    const float inv = amax >= 1e-30f ? 127.0f / amax : 0.0f;
    for (int i = 0; i < n; i++) { x8[i] = (int8_t) rintf(x[i] * inv); }
    *s = amax >= 1e-30f ? amax / 127.0f : 0.0f;
}

void kvq_predict_row(const kvq_predictor & p, const int8_t * x8, float s, bool add, float * y) {
    // where code j of a group lies, from its first one on, and how far up in its byte
    int at[KVQ_PREDICT_GROUP], up[KVQ_PREDICT_GROUP];
    uint8_t * const data = const_cast<uint8_t *>(p.data);
    for (int j = 0; j < KVQ_PREDICT_GROUP; j++) {
        at[j] = (int) (code_at(p, data, 0, 0, j, up[j]) - code_at(p, data, 0, 0, 0, up[0]));
    }
    const int mask = p.bits == 8 ? 127 : 15, offset = p.offset();
    for (int i = 0; i < p.n_out; i++) {
        float sum = 0.0f;
        for (int g = 0; g < p.n_groups(); g++) {
            int dot = 0, first;
            const uint8_t * b = code_at(p, data, i, g, 0, first);
            const int8_t * x = x8 + g * KVQ_PREDICT_GROUP;
            for (int j = 0; j < KVQ_PREDICT_GROUP; j++) { dot += ((b[at[j]] >> up[j] & mask) - offset) * x[j]; }
            sum = sum + kvq_f16_to_f32(p.steps()[((size_t) (i / 16) * p.n_groups() + g) * 16 + i % 16]) * (float) dot;
        }
        y[i] = add ? y[i] + sum * s : sum * s;
    }
}

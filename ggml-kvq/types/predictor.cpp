#include "predictor.h"

#include "base/f16.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

static kvq_predictor shape_of(int n_in, int n_out, int bits, const uint8_t * data) {
    kvq_predictor p;
    p.n_in = n_in;
    p.n_out = n_out;
    p.bits = bits;
    p.data = data;
    return p;
}

size_t kvq_predictor_bytes(int n_in, int n_out, int bits) {
    if (n_in < 1 || n_out < 1 || n_in > KVQ_PREDICT_MOST || n_out > KVQ_PREDICT_MOST || (bits != 8 && bits != 4)) {
        return 0;
    }
    const kvq_predictor p = shape_of(n_in, n_out, bits, nullptr);
    return p.nb_codes() + (size_t) p.n_tiles() * (bits == 8 ? 64 : p.n_groups() * 32);
}

static uint8_t * code_at(const kvq_predictor & p, uint8_t * data, int i, int g, int j, int & shift) {
    const int per = p.bits == 8 ? 4 : 8; // inputs of a chunk
    shift = p.bits == 8 ? 0 : j % 8 / 4 * 4;
    return data + ((size_t) (i / 16) * p.n_groups() + g) * p.nb_group() + j / per * 64 + i % 16 * 4 + j % 4;
}

static void put_codes(const kvq_predictor & p, int i, int g, const uint8_t * code, uint8_t * data) {
    for (int j = 0; j < KVQ_PREDICT_GROUP; j++) {
        int shift;
        uint8_t * b = code_at(p, data, i, g, j, shift);
        *b = (uint8_t) (p.bits == 8 ? code[j] : (*b & ~(15 << shift)) | code[j] << shift);
    }
}

void kvq_predictor_put4(int n_in, int n_out, int i, int g, uint16_t step, const uint8_t * code, uint8_t * data) {
    const kvq_predictor p = shape_of(n_in, n_out, 4, data);
    put_codes(p, i, g, code, data);
    memcpy((uint8_t *) p.steps4() + 2 * (((size_t) (i / 16) * p.n_groups() + g) * 16 + i % 16), &step, 2);
}

// w[0..31] as codes of one step
static void round_group(const float * w, float step, int offset, float low, float high, uint8_t * code) {
    const float inv = step != 0.0f ? 1.0f / step : 0.0f;
    for (int j = 0; j < KVQ_PREDICT_GROUP; j++) {
        code[j] = (uint8_t) (offset + (int) std::min(std::max(rintf(w[j] * inv), low), high));
    }
}

// of the largest magnitude, the first one
static float largest(const float * w, int n) {
    float top = 0.0f;
    for (int j = 0; j < n; j++) { top = fabsf(w[j]) > fabsf(top) ? w[j] : top; }
    return top;
}

void kvq_predictor_pack(int n_in, int n_out, int bits, const float * w, uint8_t * data) {
    const kvq_predictor p = shape_of(n_in, n_out, bits, data);
    memset(data, 0, kvq_predictor_bytes(n_in, n_out, bits));
    std::vector<float> row((size_t) p.n_groups() * KVQ_PREDICT_GROUP);
    for (int i = 0; i < p.n_tiles() * 16; i++) {
        if (i < n_out) {
            std::copy_n(w + (size_t) i * n_in, n_in, row.begin());
        } else {
            std::fill(row.begin(), row.end(), 0.0f);
        }
        const float step8 = fabsf(largest(row.data(), n_in)) / 63.0f;
        if (bits == 8) { memcpy((uint8_t *) (p.steps8() + i), &step8, sizeof(step8)); }
        for (int g = 0; g < p.n_groups(); g++) {
            const float * x = &row[(size_t) g * KVQ_PREDICT_GROUP];
            uint8_t code[KVQ_PREDICT_GROUP];
            if (bits == 8) {
                round_group(x, step8, 64, -63.0f, 63.0f, code);
                put_codes(p, i, g, code, data);
            } else {
                const uint16_t step = kvq_f32_to_f16(largest(x, KVQ_PREDICT_GROUP) / -8.0f + 0.0f); // no negative zero
                round_group(x, kvq_f16_to_f32(step), 8, -8.0f, 7.0f, code);
                kvq_predictor_put4(n_in, n_out, i, g, step, code, data);
            }
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
        int whole = 0;
        for (int g = 0; g < p.n_groups(); g++) {
            int dot = 0, first;
            const uint8_t * b = code_at(p, data, i, g, 0, first);
            const int8_t * x = x8 + g * KVQ_PREDICT_GROUP;
            for (int j = 0; j < KVQ_PREDICT_GROUP; j++) { dot += ((b[at[j]] >> up[j] & mask) - offset) * x[j]; }
            if (p.bits == 8) {
                whole += dot;
            } else {
                const uint16_t step = p.steps4()[((size_t) (i / 16) * p.n_groups() + g) * 16 + i % 16];
                sum = sum + kvq_f16_to_f32(step) * (float) dot;
            }
        }
        if (p.bits == 8) { sum = p.steps8()[i] * (float) whole; }
        y[i] = add ? y[i] + sum * s : sum * s;
    }
}

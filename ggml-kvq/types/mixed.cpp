#include "mixed.h"

#include "affine.h"
#include "base/f16.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

kvq_codec kvq_mixed_part(const kvq_codec & c, int i) {
    kvq_codec p = c;
    p.type = KVQ_TYPE_AFFINE;
    p.bits = i ? c.bits : c.hi;
    p.n_cells = i ? c.n_cells - c.n_hi : c.n_hi;
    p.group = c.role == KVQ_ROLE_K ? p.n_cells : c.head_size;
    p.eta = i ? c.eta : 0.0f;
    p.hi = p.n_hi = 0;
    return p;
}

kvq_mixed_map kvq_mixed_offsets(const kvq_codec & c) {
    kvq_mixed_map m = {};
    m.channels = (size_t) c.n_cells / 8;
    m.nb_params = m.channels + (c.role == KVQ_ROLE_V ? (size_t) c.head_size : 0);
    for (int i = 0; i < 2; i++) {
        const kvq_codec p = kvq_mixed_part(c, i);
        m.codes[i] = m.nb_codes;
        m.params[i] = m.nb_params;
        if (p.n_cells) {
            m.nb_codes += kvq_affine_nb_codes(p);
            m.nb_params += kvq_affine_nb_params(p);
        }
    }
    return m;
}

size_t kvq_mixed_nb_codes(const kvq_codec & c) { return kvq_mixed_offsets(c).nb_codes; }
size_t kvq_mixed_nb_params(const kvq_codec & c) { return kvq_mixed_offsets(c).nb_params; }

const char * kvq_mixed_refuse(const kvq_codec & c) {
    if (c.n_cells < 32 || c.n_cells % 32 || c.n_cells > 256) {
        return "a page must have 32..256 cells, a multiple of 32";
    }
    if (c.n_hi < 0 || c.n_hi > c.n_cells || c.n_hi % 32) {
        return "the salient cells of a page must be a multiple of 32";
    }
    if (c.head_size % 16) { return "the head size must be a multiple of 16"; }
    for (int i = 0; i < 2; i++) {
        const kvq_codec p = kvq_mixed_part(c, i);
        const char * why = p.n_cells ? kvq_affine_refuse(p) : nullptr;
        if (why) { return why; }
    }
    return nullptr;
}

static bool in_set(const void * params, int t) { return ((const uint8_t *) params)[t / 8] >> t % 8 & 1; }

int kvq_mixed_cells(const kvq_codec & c, const void * params, int i, int32_t * cells) {
    int n = 0;
    for (int t = 0; t < c.n_cells; t++) {
        cells[n] = t; // no branch on data
        n += in_set(params, t) != (i == 1);
    }
    return n;
}

void kvq_mixed_encode(
    const kvq_codec & c, const uint16_t * rows, const uint8_t * valid, const void *, void * codes, void * params) {
    kvq_mixed_encode_by(kvq_affine_encode_ref, c, rows, valid, codes, params);
}

void kvq_mixed_encode_by(kvq_encode_function encode, const kvq_codec & c, const uint16_t * rows, const uint8_t * valid,
    void * codes, void * params) {
    const int D = c.head_size;
    const kvq_mixed_map m = kvq_mixed_offsets(c);
    uint8_t * set = (uint8_t *) params;
    int n = 0;
    for (int t = 0; t < c.n_cells; t++) { n += in_set(set, t); }
    for (int t = 0; n != c.n_hi && t < c.n_cells; t++) {
        set[t / 8] = (uint8_t) ((set[t / 8] & ~(1 << t % 8)) | (t < c.n_hi) << t % 8);
    }
    std::vector<float> channel((size_t) D, 1.0f);
    if (c.role == KVQ_ROLE_V) {
        std::vector<float> top((size_t) D, 0.0f);
        for (int t = 0; t < c.n_cells; t++) {
            for (int d = 0; (!valid || (valid[t / 8] >> t % 8 & 1)) && d < D; d++) {
                const float x = fabsf(kvq_f16_to_f32(rows[(size_t) t * D + d]));
                // inf and nan carry no value
                top[(size_t) d] = x <= 65504.0f ? std::max(top[(size_t) d], x) : top[(size_t) d];
            }
        }
        for (int d = 0; d < D; d++) {
            const uint16_t h = kvq_f32_to_f16(top[(size_t) d] > 0.0f ? sqrtf(top[(size_t) d]) : 1.0f);
            set[m.channels + (size_t) d] = (uint8_t) ((h + 64) >> 7);
            channel[(size_t) d] = kvq_f16_to_f32(kvq_mixed_channel(set[m.channels + (size_t) d]));
        }
    }
    std::vector<int32_t> cells((size_t) c.n_cells);
    std::vector<uint16_t> part;
    for (int i = 0; i < 2; i++) {
        const kvq_codec p = kvq_mixed_part(c, i);
        if (!p.n_cells) { continue; }
        kvq_mixed_cells(c, set, i, cells.data());
        part.resize((size_t) p.n_cells * D);
        uint8_t seen[32] = {};
        for (int j = 0; j < p.n_cells; j++) {
            const int t = cells[(size_t) j];
            seen[j / 8] |= (uint8_t) ((!valid || (valid[t / 8] >> t % 8 & 1)) << j % 8);
            for (int d = 0; d < D; d++) {
                const uint16_t v = rows[(size_t) t * D + d];
                part[(size_t) j * D + d] =
                    c.role == KVQ_ROLE_V ? kvq_f32_to_f16(kvq_f16_to_f32(v) / channel[(size_t) d]) : v;
            }
        }
        encode(p, part.data(), valid ? seen : nullptr, nullptr, (uint8_t *) codes + m.codes[i], set + m.params[i]);
    }
}

void kvq_mixed_decode(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows) {
    const int D = c.head_size;
    const kvq_mixed_map m = kvq_mixed_offsets(c);
    std::vector<int32_t> cells((size_t) c.n_cells);
    std::vector<uint16_t> part;
    memset(rows, 0, 2 * (size_t) c.n_cells * D);
    for (int i = 0; i < 2; i++) {
        const kvq_codec p = kvq_mixed_part(c, i);
        // random bytes may hold any set
        const int n = std::min(kvq_mixed_cells(c, params, i, cells.data()), (int) p.n_cells);
        if (!p.n_cells) { continue; }
        part.resize((size_t) p.n_cells * D);
        kvq_affine_decode_ref(
            p, (const uint8_t *) codes + m.codes[i], (const uint8_t *) params + m.params[i], part.data());
        for (int j = 0; j < n; j++) {
            uint16_t * out = rows + (size_t) cells[(size_t) j] * D;
            memcpy(out, &part[(size_t) j * D], 2 * (size_t) D);
            for (int d = 0; c.role == KVQ_ROLE_V && d < D; d++) {
                const uint16_t h = kvq_mixed_channel(((const uint8_t *) params)[m.channels + (size_t) d]);
                out[d] =
                    kvq_f32_to_f16(std::min(std::max(kvq_f16_to_f32(out[d]) * kvq_f16_to_f32(h), -65504.0f), 65504.0f));
            }
        }
    }
}

bool kvq_mixed_match(
    const kvq_codec & c, const uint16_t * rows, kvq_low_bits low, const void *, void * codes, const void * params) {
    const int D = c.head_size;
    const kvq_mixed_map m = kvq_mixed_offsets(c);
    std::vector<int32_t> cells((size_t) c.n_cells);
    memset(codes, 0, m.nb_codes);
    for (int i = 0; i < 2; i++) {
        const kvq_codec p = kvq_mixed_part(c, i);
        if (kvq_mixed_cells(c, params, i, cells.data()) != p.n_cells) { return false; }
        if (!p.n_cells) { continue; }
        const kvq_affine_parts parts = kvq_affine_get_parts(p);
        const int np = kvq_affine_get_dims(p).np;
        std::vector<float> scale((size_t) np), zero((size_t) np);
        kvq_affine_get_params(p, (const uint8_t *) params + m.params[i], scale.data(), zero.data());
        for (int j = 0; j < p.n_cells; j++) {
            for (int d = 0; d < D; d++) {
                const bool k = c.role == KVQ_ROLE_K;
                const size_t at = (size_t) (k ? d : j);
                const uint16_t want = rows[(size_t) cells[(size_t) j] * D + d];
                const float by =
                    k ? 1.0f : kvq_f16_to_f32(kvq_mixed_channel(((const uint8_t *) params)[m.channels + (size_t) d]));
                int q = 0;
                for (; q < 1 << p.bits; q++) {
                    uint16_t y =
                        kvq_f32_to_f16(std::min(std::max(zero[at] + scale[at] * (float) q, -65504.0f), 65504.0f));
                    if (!k) { y = kvq_f32_to_f16(std::min(std::max(kvq_f16_to_f32(y) * by, -65504.0f), 65504.0f)); }
                    if (((y ^ want) & ~low.mask(c, (size_t) cells[(size_t) j] * D + d) & 0xffff) == 0) { break; }
                }
                if (q == 1 << p.bits) { return false; }
                kvq_affine_put_code(parts, (uint8_t *) codes + m.codes[i], k ? j : d, k ? d : j, q);
            }
        }
    }
    return true;
}

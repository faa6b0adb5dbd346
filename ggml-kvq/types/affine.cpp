#include "affine.h"

#include "base/f16.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

static int ceil_div(int a, int b) { return (a + b - 1) / b; }

kvq_affine_dims kvq_affine_get_dims(const kvq_codec & c) {
    kvq_affine_dims d;
    const bool k = c.role == KVQ_ROLE_K;
    d.lanes = k ? c.n_cells : c.head_size;
    d.dots = k ? c.head_size : c.n_cells;
    d.n_tiles = ceil_div(d.lanes, KVQ_TILE_LANES);
    d.np = k ? c.n_cells / c.group * c.head_size : ceil_div(c.head_size, c.group) * c.n_cells;
    return d;
}

kvq_affine_parts kvq_affine_get_parts(const kvq_codec & c) {
    const kvq_affine_dims d = kvq_affine_get_dims(c);
    kvq_affine_parts p = {};
    if (c.bits == 3) {
        p.n = 2;
        p.width[0] = 2;
        p.shift[0] = 0;
        p.width[1] = 1;
        p.shift[1] = 2;
    } else if (c.bits > 0) {
        p.n = 1;
        p.width[0] = c.bits;
        p.shift[0] = 0;
    }
    size_t offset = 0;
    for (int i = 0; i < p.n; i++) {
        p.n_chunks[i] = ceil_div(d.dots * p.width[i], 32);
        p.offset[i] = offset;
        offset += (size_t) d.n_tiles * p.n_chunks[i] * KVQ_CHUNK_BYTES;
    }
    return p;
}

const char * kvq_affine_refuse(const kvq_codec & c) {
    if (c.bits < 0 || c.bits > 4) { return "bits must be 0..4"; }
    if (c.n_cells < 32 || c.n_cells % 32 || c.n_cells > 256) {
        return "a page must have 32..256 cells, a multiple of 32";
    }
    if (c.head_size < 8 || c.head_size > 1024 || c.head_size % 8) {
        return "the head size must be a multiple of 8 up to 1024";
    }
    if (c.role != KVQ_ROLE_K && c.role != KVQ_ROLE_V) { return "the role must be K or V"; }
    if (c.group < 1) { return "the group must be positive"; }
    if (c.role == KVQ_ROLE_K && c.n_cells % c.group) { return "the key group must divide the page"; }
    if (c.role == KVQ_ROLE_V && c.group > c.head_size) { return "the value group must not exceed the head size"; }
    // kernels switch parameters between tiles only
    if (c.group % KVQ_TILE_LANES && !(c.role == KVQ_ROLE_V && c.group == c.head_size)) {
        return "the group must be a multiple of 16, or for values the whole head";
    }
    if (c.scale < 0 || c.scale > 2) { return "the scale format must be 0 (f16), 1 (8-bit) or 2 (4-bit)"; }
    if (c.levels != 0 && c.levels != 1) { return "levels must be 0 (end points) or 1 (bins)"; }
    if (!(c.eta >= 0.0f && c.eta < 0.5f)) { return "eta must be at least 0 and below 0.5"; }
    return nullptr;
}

size_t kvq_affine_nb_codes(const kvq_codec & c) {
    const kvq_affine_dims d = kvq_affine_get_dims(c);
    const kvq_affine_parts p = kvq_affine_get_parts(c);
    size_t nb = 0;
    for (int i = 0; i < p.n; i++) { nb += (size_t) d.n_tiles * p.n_chunks[i] * KVQ_CHUNK_BYTES; }
    return nb;
}

size_t kvq_affine_nb_params(const kvq_codec & c) {
    const int np = kvq_affine_get_dims(c).np;
    return c.scale == 0 ? 4 * (size_t) np : 8 + (c.scale == 1 ? 2 : 1) * (size_t) np;
}

// byte and shift of the field of part i
static inline size_t field(const kvq_affine_parts & p, int i, int lane, int dot, int & shift) {
    const int w = p.width[i];
    const int span = 32 / w; // dot indices of a chunk
    const int chunk = dot / span;
    const int rest = dot % span;
    shift = rest / 4 * w;
    return p.offset[i] + ((size_t) (lane / KVQ_TILE_LANES) * p.n_chunks[i] + chunk) * KVQ_CHUNK_BYTES +
        lane % KVQ_TILE_LANES * 4 + rest % 4;
}

int kvq_affine_get_code(const kvq_affine_parts & p, const uint8_t * codes, int lane, int dot) {
    int code = 0;
    for (int i = 0; i < p.n; i++) {
        int shift;
        const size_t b = field(p, i, lane, dot, shift);
        code |= (codes[b] >> shift & ((1 << p.width[i]) - 1)) << p.shift[i];
    }
    return code;
}

void kvq_affine_put_code(const kvq_affine_parts & p, uint8_t * codes, int lane, int dot, int code) {
    for (int i = 0; i < p.n; i++) {
        int shift;
        const size_t b = field(p, i, lane, dot, shift);
        const int mask = (1 << p.width[i]) - 1;
        codes[b] = (uint8_t) ((codes[b] & ~(mask << shift)) | (code >> p.shift[i] & mask) << shift);
    }
}

// ---------------------------------------------------------------- parameters

static const float f16_max = 65504.0f;

static inline uint16_t to_f16_finite(float x) { return kvq_f32_to_f16(std::min(std::max(x, -f16_max), f16_max)); }

// codes 0..top, or'd into out at `shift`
static void put_codes(const float * x, int n, float top, int shift, uint16_t * low_step, uint8_t * out) {
    float lo = x[0], hi = x[0];
    for (int i = 1; i < n; i++) {
        lo = std::min(lo, x[i]);
        hi = std::max(hi, x[i]);
    }
    low_step[0] = to_f16_finite(lo);
    low_step[1] = to_f16_finite((hi - kvq_f16_to_f32(low_step[0])) / top);
    const float low = kvq_f16_to_f32(low_step[0]), step = kvq_f16_to_f32(low_step[1]);
    for (int i = 0; i < n; i++) {
        const float q = step > 0.0f ? floorf((x[i] - low) / step + 0.5f) : 0.0f;
        out[i] = (uint8_t) (out[i] | (int) std::min(std::max(q, 0.0f), top) << shift);
    }
}

void kvq_affine_get_params(const kvq_codec & c, const void * params, float * scale, float * zero) {
    const int np = kvq_affine_get_dims(c).np;
    if (!c.scale) {
        const uint16_t * p = (const uint16_t *) params;
        for (int i = 0; i < np; i++) {
            scale[i] = kvq_f16_to_f32(p[i]);
            zero[i] = kvq_f16_to_f32(p[np + i]);
        }
        return;
    }
    const uint16_t * h = (const uint16_t *) params;
    const uint8_t * p = (const uint8_t *) params + 8;
    const float s_low = kvq_f16_to_f32(h[0]), s_step = kvq_f16_to_f32(h[1]), z_low = kvq_f16_to_f32(h[2]),
                z_step = kvq_f16_to_f32(h[3]);
    for (int i = 0; i < np; i++) {
        const int s = c.scale == 1 ? p[i] : p[i] & 15, z = c.scale == 1 ? p[np + i] : p[i] >> 4;
        scale[i] = s_low + s_step * (float) s;
        zero[i] = z_low + z_step * (float) z;
    }
}

void kvq_affine_put_params(const kvq_codec & c, void * params, const float * scale, const float * zero) {
    const int np = kvq_affine_get_dims(c).np;
    if (!c.scale) {
        uint16_t * p = (uint16_t *) params;
        for (int i = 0; i < np; i++) {
            p[i] = to_f16_finite(scale[i]);
            p[np + i] = to_f16_finite(zero[i]);
        }
        return;
    }
    uint16_t * h = (uint16_t *) params;
    uint8_t * p = (uint8_t *) params + 8;
    const float top = c.scale == 1 ? 255.0f : 15.0f;
    memset(p, 0, (size_t) np * (c.scale == 1 ? 2 : 1));
    put_codes(scale, np, top, 0, h + 0, p);
    put_codes(zero, np, top, c.scale == 1 ? 0 : 4, h + 2, c.scale == 1 ? p + np : p);
}

// ---------------------------------------------------------------- encode, decode

static inline int param_index(const kvq_codec & c, int cell, int channel) {
    return c.role == KVQ_ROLE_K ? cell / c.group * c.head_size + channel : channel / c.group * c.n_cells + cell;
}

void kvq_affine_encode_ref(const kvq_codec & c, const uint16_t * rows, const uint8_t * valid, const void * shared,
    void * codes, void * params) {
    const kvq_affine_dims d = kvq_affine_get_dims(c);
    std::vector<float> lo(d.np, FLT_MAX), hi(d.np, -FLT_MAX), x((size_t) c.n_cells * c.head_size);

    for (int t = 0; t < c.n_cells; t++) {
        const bool ok = !valid || (valid[t / 8] >> t % 8 & 1);
        for (int i = 0; i < c.head_size; i++) {
            float v = kvq_f16_to_f32(rows[(size_t) t * c.head_size + i]);
            v = v >= -f16_max && v <= f16_max ? v : 0.0f; // inf and nan carry no value
            x[(size_t) t * c.head_size + i] = v;
            if (ok) {
                const int p = param_index(c, t, i);
                lo[p] = std::min(lo[p], v);
                hi[p] = std::max(hi[p], v);
            }
        }
    }
    std::vector<float> scale(d.np), zero(d.np), mul(d.np);
    const float n = (float) ((1 << c.bits) - 1);
    for (int p = 0; p < d.np; p++) {
        if (lo[p] > hi[p]) { // no valid cell
            lo[p] = hi[p] = 0.0f;
        }
        const float range = hi[p] - lo[p];
        mul[p] = range > 0.0f ? (c.levels ? n + 1.0f : n) / range : 0.0f;
        mul[p] = mul[p] <= FLT_MAX ? mul[p] : 0.0f; // denormal range
        zero[p] = c.bits ? lo[p] + c.eta * range : lo[p] + 0.5f * range;
        scale[p] = c.bits ? (1.0f - 2.0f * c.eta) * range / n : 0.0f;
    }
    kvq_affine_put_params(c, params, scale.data(), zero.data());

    if (shared || !c.bits) { return; }
    // Parameters in 8 or 4 bits share a range with all others of the block: codes are chosen under what is stored.
    // range = n scale / (1 - 2 eta), lo = zero - eta range
    if (c.scale) {
        kvq_affine_get_params(c, params, scale.data(), zero.data());
        for (int p = 0; p < d.np; p++) {
            const float range = scale[p] * n / (1.0f - 2.0f * c.eta);
            lo[p] = zero[p] - c.eta * range;
            mul[p] = range > 0.0f ? (c.levels ? n + 1.0f : n) / range : 0.0f;
            mul[p] = mul[p] <= FLT_MAX ? mul[p] : 0.0f;
        }
    }
    memset(codes, 0, kvq_affine_nb_codes(c));
    const kvq_affine_parts parts = kvq_affine_get_parts(c);
    const float half = c.levels ? 0.0f : 0.5f;
    for (int t = 0; t < c.n_cells; t++) {
        for (int i = 0; i < c.head_size; i++) {
            const int p = param_index(c, t, i);
            const float q = floorf((x[(size_t) t * c.head_size + i] - lo[p]) * mul[p] + half);
            const int code = (int) std::min(std::max(q, 0.0f), n);
            kvq_affine_put_code(
                parts, (uint8_t *) codes, c.role == KVQ_ROLE_K ? t : i, c.role == KVQ_ROLE_K ? i : t, code);
        }
    }
}

void kvq_affine_decode_ref(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows) {
    const int np = kvq_affine_get_dims(c).np;
    const kvq_affine_parts parts = kvq_affine_get_parts(c);
    std::vector<float> scale(np), zero(np);
    kvq_affine_get_params(c, params, scale.data(), zero.data());
    for (int t = 0; t < c.n_cells; t++) {
        for (int i = 0; i < c.head_size; i++) {
            const int p = param_index(c, t, i);
            const int q = kvq_affine_get_code(
                parts, (const uint8_t *) codes, c.role == KVQ_ROLE_K ? t : i, c.role == KVQ_ROLE_K ? i : t);
            rows[(size_t) t * c.head_size + i] = to_f16_finite(zero[p] + scale[p] * (float) q);
        }
    }
}

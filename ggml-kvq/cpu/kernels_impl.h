// The kernels, written once over the vector layer of the including file (isa_*.h). No std:: here: inline library code compiled
// with wider instructions could be picked by the linker for every ISA.
#include "kernels.h"

#include <math.h>

namespace KVQ_NS {

static inline int imin(int a, int b) { return a < b ? a : b; }

// ---------------------------------------------------------------- f16

static void f32_to_f16_row(const float * x, uint16_t * y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        f32_store_f16(y + i, f32_load(x + i));
    }
    if (i < n) {
        float    a[16] = {};
        uint16_t b[16];
        for (int64_t j = i; j < n; j++) { a[j - i] = x[j]; }
        f32_store_f16(b, f32_load(a));
        for (int64_t j = i; j < n; j++) { y[j] = b[j - i]; }
    }
}

static void f16_to_f32_row(const uint16_t * x, float * y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        f32_store(y + i, f32_load_f16(x + i));
    }
    if (i < n) {
        uint16_t a[16] = {};
        float    b[16];
        for (int64_t j = i; j < n; j++) { a[j - i] = x[j]; }
        f32_store(b, f32_load_f16(a));
        for (int64_t j = i; j < n; j++) { y[j] = b[j - i]; }
    }
}

template <int R> static void score_f16_rows(int dp, int n_slots, const uint16_t * tile, const float * q, float * logits) {
    for (int t = 0; t < n_slots; t++) {
        f32x16 acc[R];
        for (int r = 0; r < R; r++) { acc[r] = f32_set1(0.0f); }
        for (int d = 0; d < dp; d += 16) {
            const f32x16 k = f32_load_f16(tile + (size_t) t * dp + d);
            for (int r = 0; r < R; r++) { acc[r] = f32_fma(k, f32_load(q + (size_t) r * dp + d), acc[r]); }
        }
        for (int r = 0; r < R; r++) { logits[(size_t) r * n_slots + t] = f32_sum(acc[r]); }
    }
}

template <int R> static void accum_f16_rows(int dp, int n_slots, const uint16_t * tile, const float * p, float * out) {
    for (int d = 0; d < dp; d += 16) {
        f32x16 acc[R];
        for (int r = 0; r < R; r++) { acc[r] = f32_load(out + (size_t) r * dp + d); }
        for (int t = 0; t < n_slots; t++) {
            const f32x16 v = f32_load_f16(tile + (size_t) t * dp + d);
            for (int r = 0; r < R; r++) { acc[r] = f32_fma(v, f32_set1(p[(size_t) r * n_slots + t]), acc[r]); }
        }
        for (int r = 0; r < R; r++) { f32_store(out + (size_t) r * dp + d, acc[r]); }
    }
}

// ---------------------------------------------------------------- affine

// Parameters of np pairs as f32 (types/affine.h). The arrays are padded to 16.
static void load_params(const kvq_view & a, const void * params, float * scale, float * zero) {
    if (!a.codec.scale) {
        f16_to_f32_row((const uint16_t *) params, scale, a.np);
        f16_to_f32_row((const uint16_t *) params + a.np, zero, a.np);
        return;
    }
    float head[4];
    f16_to_f32_row((const uint16_t *) params, head, 4);
    const uint8_t * u = (const uint8_t *) params + 8;
    const f32x16 s_low = f32_set1(head[0]), s_step = f32_set1(head[1]), z_low = f32_set1(head[2]), z_step = f32_set1(head[3]);
    int i = 0;
    for (; i + 16 <= a.np; i += 16) {
        f32_store(scale + i, f32_fma(f32_load_u8(u + i), s_step, s_low));
        f32_store(zero  + i, f32_fma(f32_load_u8(u + a.np + i), z_step, z_low));
    }
    for (; i < a.np; i++) {
        scale[i] = head[0] + head[1] * (float) u[i];
        zero [i] = head[2] + head[3] * (float) u[a.np + i];
    }
}

// w = x*scale as int8 over n values (padded with zeros to n_pad); returns the step, and sum x*zero
static inline float fold(int n, int n_pad, const float * x, const float * scale, const float * zero, int8_t * w8, float * base) {
    float  w[KVQ_MAX_HEAD];
    f32x16 top = f32_set1(0.0f), sum = f32_set1(0.0f);
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        const f32x16 v = f32_load(x + i);
        const f32x16 y = f32_mul(v, f32_load(scale + i));
        sum = f32_fma(v, f32_load(zero + i), sum);
        top = f32_max(top, f32_abs(y));
        f32_store(w + i, y);
    }
    float amax = f32_hmax(top), tail = 0.0f;
    for (; i < n; i++) {
        w[i]  = x[i] * scale[i];
        tail += x[i] * zero[i];
        amax  = fmaxf(amax, fabsf(w[i]));
    }
    for (; i < n_pad; i++) { w[i] = 0.0f; }
    *base = f32_sum(sum) + tail;
    const f32x16 inv = f32_set1(amax > 0.0f ? 127.0f / amax : 0.0f);
    for (int j = 0; j < n_pad; j += 16) {
        i8_store(w8 + j, f32_mul(f32_load(w + j), inv));
    }
    return amax / 127.0f;
}

// acc[r] = sum over dot indices [dot0, dot1) of code*w8, for one tile of 16 lanes
template <int R> static inline void tile_dot(const kvq_view & a, const uint8_t * codes, int tile, int n_dots, const int8_t * w8, int w_stride, i32x16 * acc) {
    for (int part = 0; part < a.n_parts; part++) {
        const int w = a.width[part], planes = 8 / w, mask = (1 << w) - 1;
        const int n_chunks = imin(a.n_chunks[part], (n_dots * w + 31) / 32);
        const uint8_t * p = codes + a.offset[part] + (size_t) tile * a.n_chunks[part] * 64;
        for (int c = 0; c < n_chunks; c++) {
            const u8x64 x = u8_load(p + (size_t) c * 64);
            const int n_planes = imin(planes, (n_dots - c * planes * 4 + 3) / 4);
            for (int j = 0; j < n_planes; j++) {
                const u8x64 f = u8_field(x, j * w, mask, a.shift[part]);
                for (int r = 0; r < R; r++) {
                    acc[r] = dot4(acc[r], f, w8 + (size_t) r * w_stride + (c * planes + j) * 4);
                }
            }
        }
    }
}

template <int R> static void score_affine_rows(const kvq_view & a, const uint8_t * codes, const float * scale, const float * zero, const float * q, float * logits) {
    const int D = a.codec.head_size, n = a.codec.n_cells, group = a.codec.group;
    int8_t w8[R * KVQ_MAX_HEAD];
    float  step[R] = {}, base[R] = {};
    for (int t0 = 0; t0 < n; t0 += 16) {
        if (t0 % group == 0) { // groups are multiples of a tile
            const size_t g = (size_t) (t0 / group) * D;
            for (int r = 0; r < R; r++) {
                step[r] = fold(D, a.dp, q + (size_t) r * a.dp, scale + g, zero + g, w8 + r * a.dp, &base[r]);
            }
        }
        i32x16 acc[R];
        for (int r = 0; r < R; r++) { acc[r] = i32_zero(); }
        tile_dot<R>(a, codes, t0 / 16, D, w8, a.dp, acc);
        for (int r = 0; r < R; r++) {
            f32_store(logits + (size_t) r * n + t0, f32_fma(f32_from_i32(acc[r]), f32_set1(step[r]), f32_set1(base[r])));
        }
    }
}

template <int R> static void accum_affine_rows(const kvq_view & a, const uint8_t * codes, const float * scale, const float * zero, const float * p, float * out) {
    const int D = a.codec.head_size, n = a.codec.n_cells, group = a.codec.group;
    int8_t w8[R * KVQ_MAX_CELLS];
    float  step[R] = {}, base[R] = {};
    for (int d0 = 0; d0 < D; d0 += 16) {
        if (d0 % group == 0) {
            const size_t g = (size_t) (d0 / group) * n;
            for (int r = 0; r < R; r++) {
                step[r] = fold(n, n, p + (size_t) r * n, scale + g, zero + g, w8 + r * n, &base[r]);
            }
        }
        i32x16 acc[R];
        for (int r = 0; r < R; r++) { acc[r] = i32_zero(); }
        tile_dot<R>(a, codes, d0 / 16, n, w8, n, acc);
        for (int r = 0; r < R; r++) {
            float * o = out + (size_t) r * a.dp + d0;
            f32_store(o, f32_add(f32_load(o), f32_fma(f32_from_i32(acc[r]), f32_set1(step[r]), f32_set1(base[r]))));
        }
    }
}

// ---------------------------------------------------------------- any number of rows

#define KVQ_ROWS(call8, call4, call2, call1)                    \
    int r = 0;                                                  \
    for (; r + 8 <= n_rows; r += 8) { call8; }                  \
    for (; r + 4 <= n_rows; r += 4) { call4; }                  \
    for (; r + 2 <= n_rows; r += 2) { call2; }                  \
    for (; r < n_rows; r++)         { call1; }

static void score_f16(const kvq_view & v, int n_rows, const void * codes, const void *, const float * q, float * logits) {
    const uint16_t * tile = (const uint16_t *) codes;
    const int dp = v.dp, n_slots = v.codec.n_cells;
#define CALL(R) score_f16_rows<R>(dp, n_slots, tile, q + (size_t) r * dp, logits + (size_t) r * n_slots)
    KVQ_ROWS(CALL(8), CALL(4), CALL(2), CALL(1))
#undef CALL
}

static void accum_f16(const kvq_view & v, int n_rows, const void * codes, const void *, const float * p, float * out) {
    const uint16_t * tile = (const uint16_t *) codes;
    const int dp = v.dp, n_slots = v.codec.n_cells;
#define CALL(R) accum_f16_rows<R>(dp, n_slots, tile, p + (size_t) r * n_slots, out + (size_t) r * dp)
    KVQ_ROWS(CALL(8), CALL(4), CALL(2), CALL(1))
#undef CALL
}

constexpr int MAX_PARAMS = KVQ_MAX_HEAD * KVQ_MAX_CELLS / 16 + 16;

static void score_affine(const kvq_view & a, int n_rows, const void * codes, const void * params, const float * q, float * logits) {
    static thread_local float scale[MAX_PARAMS], zero[MAX_PARAMS];
    load_params(a, params, scale, zero);
    const int n = a.codec.n_cells;
#define CALL(R) score_affine_rows<R>(a, (const uint8_t *) codes, scale, zero, q + (size_t) r * a.dp, logits + (size_t) r * n)
    KVQ_ROWS(CALL(8), CALL(4), CALL(2), CALL(1))
#undef CALL
}

static void accum_affine(const kvq_view & a, int n_rows, const void * codes, const void * params, const float * p, float * out) {
    static thread_local float scale[MAX_PARAMS], zero[MAX_PARAMS];
    load_params(a, params, scale, zero);
    const int n = a.codec.n_cells;
#define CALL(R) accum_affine_rows<R>(a, (const uint8_t *) codes, scale, zero, p + (size_t) r * n, out + (size_t) r * a.dp)
    KVQ_ROWS(CALL(8), CALL(4), CALL(2), CALL(1))
#undef CALL
}

#include "lattice_impl.h"

#undef KVQ_ROWS

// ---------------------------------------------------------------- softmax

static float adjust(int n, float * logits, float scale, float cap, float slope, const uint16_t * mask) {
    if (cap != 0.0f) {
        for (int i = 0; i < n; i++) { logits[i] = cap * tanhf(logits[i] * scale / cap); }
        scale = 1.0f;
    }
    f32x16 top = f32_set1(-INFINITY);
    const f32x16 s = f32_set1(scale), k = f32_set1(slope);
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        f32x16 x = f32_mul(f32_load(logits + i), s);
        if (mask) {
            x = f32_fma(f32_load_f16(mask + i), k, x);
        }
        f32_store(logits + i, x);
        top = f32_max(top, x);
    }
    float m = f32_hmax(top);
    for (; i < n; i++) {
        float b = 0.0f;
        if (mask) {
            f16_to_f32_row(mask + i, &b, 1);
        }
        logits[i] = logits[i] * scale + slope * b;
        m = logits[i] > m ? logits[i] : m;
    }
    return m;
}

static float softmax(int n, float * logits, float * m, float * correction) {
    float top = *m;
    f32x16 t = f32_set1(-INFINITY);
    int i = 0;
    for (; i + 16 <= n; i += 16) { t = f32_max(t, f32_load(logits + i)); }
    top = fmaxf(top, f32_hmax(t));
    for (; i < n; i++) { top = fmaxf(top, logits[i]); }
    *correction = *m == -INFINITY ? 0.0f : expf(*m - top);
    *m = top;
    f32x16 sum = f32_set1(0.0f);
    const f32x16 neg = f32_set1(-top);
    for (i = 0; i + 16 <= n; i += 16) {
        const f32x16 e = f32_exp(f32_add(f32_load(logits + i), neg));
        f32_store(logits + i, e);
        sum = f32_add(sum, e);
    }
    float s = f32_sum(sum);
    for (; i < n; i++) {
        logits[i] = expf(logits[i] - top);
        s += logits[i];
    }
    return s;
}

static void scale_row(int n, float * out, float c) {
    for (int i = 0; i < n; i += 16) {
        f32_store(out + i, f32_mul(f32_load(out + i), f32_set1(c)));
    }
}

} // namespace

#define KVQ_KERNELS(name, available) \
    { name, available, KVQ_NS::f32_to_f16_row, KVQ_NS::f16_to_f32_row, \
      { { KVQ_NS::score_f16, KVQ_NS::accum_f16 }, { KVQ_NS::score_affine, KVQ_NS::accum_affine } }, \
      KVQ_NS::score_lattice, KVQ_NS::accum_lattice, KVQ_NS::score_rope, \
      KVQ_NS::softmax, KVQ_NS::adjust, KVQ_NS::scale_row }

// Online softmax over the pages of a run (kernels.h).
namespace KVQ_NS {

constexpr float LOG2_E = 1.44269504088896341f, LEAST = -3e38f;

// x and its maxima over a page; x is left as scale*logits when STORE is false
template <int R, bool STORE>
static inline void softmax_top(
    int n, float * logits, float scale, float cap, const float * slope, const uint16_t * const * mask, float * top) {
    f32x16 most[R];
    const f32x16 one = f32_set1(1.0f), by = f32_set1(scale * LOG2_E);
    for (int r = 0; r < R; r++) {
        most[r] = f32_set1(-INFINITY);
        float * x = logits + (size_t) r * n;
        const f32x16 k = f32_set1(slope[r] * LOG2_E);
        for (int i = 0; i < n; i += 16) {
            f32x16 y = f32_load(x + i);
            if (STORE) {
                if (cap != 0.0f) { // tanh(y) = 1 - 2/(exp(2y) + 1)
                    y = f32_exp2(f32_min(f32_mul(y, f32_set1(2.0f * LOG2_E * scale / cap)), f32_set1(120.0f)));
                    y = f32_sub(f32_set1(LOG2_E * cap), f32_div(f32_set1(2.0f * LOG2_E * cap), f32_add(y, one)));
                } else {
                    y = f32_mul(y, by);
                }
                if (mask[r]) { y = f32_fma(f32_load_f16(mask[r] + i), k, y); }
                f32_store(x + i, y);
            }
            most[r] = f32_max(most[r], y);
        }
        if (!STORE) { most[r] = f32_mul(most[r], by); }
    }
    max_rows<R>(top, most);
}

// x = 2^(by*x - base), sums
template <int R> static inline void softmax_exp(int n, float * logits, float by, const float * top, float * sums) {
    f32x16 sum[R];
    const f32x16 k = f32_set1(by);
    for (int r = 0; r < R; r++) {
        float * x = logits + (size_t) r * n;
        const f32x16 b = f32_set1(top[r] > LEAST ? -top[r] : -LEAST); // no cell is seen: 2^(-inf) = 0
        sum[r] = f32_set1(0.0f);
        for (int i = 0; i < n; i += 16) {
            const f32x16 e = f32_exp2(f32_fma(f32_load(x + i), k, b));
            f32_store(x + i, e);
            sum[r] = f32_add(sum[r], e);
        }
    }
    sum_rows<R>(sums, sum);
}

template <int R>
static inline void softmax_rows(int n, float * logits, float scale, float cap, const float * slope,
    const uint16_t * const * mask, float * top, float * sums) {
    bool plain = cap == 0.0f && scale > 0.0f;
    for (int r = 0; r < R; r++) { plain &= !mask[r]; }
    if (plain) {
        softmax_top<R, false>(n, logits, scale, cap, slope, mask, top);
    } else {
        softmax_top<R, true>(n, logits, scale, cap, slope, mask, top);
    }
    softmax_exp<R>(n, logits, plain ? scale * LOG2_E : 1.0f, top, sums);
}

static bool softmax(int n_rows, int n, int n_pages, float * logits, float scale, float cap, const float * slope,
    const uint16_t * const * mask, float * m, float * l, float * c, float * f, float * sums) {
    float top[KVQ_MAX_RUN * KVQ_MAX_ROWS + 16];
    for (int i = 0; i < n_pages; i++) {
        float * x = logits + (size_t) i * n_rows * n;
        const int at = i * KVQ_MAX_ROWS;
#define CALL(R, r)                                                                                                     \
    softmax_rows<R>(n, x + (size_t) (r) * n, scale, cap, slope + r, mask + at + r, top + at + r, sums + at + r)
        int r = 0;
        for (; KVQ_R >= 4 && r + 4 <= n_rows; r += 4) { CALL((KVQ_R >= 4 ? 4 : 1), r); }
        for (; r < n_rows; r++) { CALL(1, r); }
#undef CALL
    }
    bool moved = false;
    for (int r = 0; r < n_rows; r += 16) { // lanes behind the last row compute with what is there
        const f32x16 old = f32_load(m + r);
        f32x16 most = old;
        for (int i = 0; i < n_pages; i++) { most = f32_max(most, f32_load(top + i * KVQ_MAX_ROWS + r)); }
        const f32x16 base = f32_max(most, f32_set1(LEAST)), by = f32_exp2(f32_sub(old, base));
        f32x16 s = f32_mul(f32_load(l + r), by);
        for (int i = 0; i < n_pages; i++) {
            const f32x16 y = f32_exp2(f32_sub(f32_load(top + i * KVQ_MAX_ROWS + r), base));
            f32_store(f + i * KVQ_MAX_ROWS + r, y);
            s = f32_fma(y, f32_load(sums + i * KVQ_MAX_ROWS + r), s);
        }
        float now[16], sum[16], turn[16];
        f32_store(now, most);
        f32_store(sum, s);
        f32_store(turn, by);
        for (int i = 0; i < imin(16, n_rows - r); i++) {
            const bool up = now[i] > m[r + i];
            c[r + i] = up ? turn[i] : 1.0f;
            m[r + i] = now[i];
            l[r + i] = sum[i];
            moved |= up;
        }
    }
    return moved;
}

static void scale_row(int n, float * out, float c) {
    for (int i = 0; i < n; i += 16) { f32_store(out + i, f32_mul(f32_load(out + i), f32_set1(c))); }
}

} // namespace

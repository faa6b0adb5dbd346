// Online softmax over a page.
namespace KVQ_NS {

// logits = cap*tanh(scale*logits/cap) (cap 0: scale*logits) + slope*mask; p = exp(logits - m); l = l*c + sum p, c = exp(m_old - m)
template <int R> static void softmax_rows(int n, float * logits, float scale, float cap, const float * slope, const uint16_t * const * mask, float * m, float * l, float * correction, float * sums) {
    f32x16 top[R];
    const f32x16 one = f32_set1(1.0f);
    for (int r = 0; r < R; r++) {
        top[r] = f32_set1(-INFINITY);
        float * x = logits + (size_t) r * n;
        const f32x16 k = f32_set1(slope[r]);
        for (int i = 0; i < n; i += 16) {
            f32x16 y = f32_load(x + i);
            if (cap != 0.0f) { // tanh(y) = 1 - 2/(exp(2y) + 1)
                y = f32_exp(f32_min(f32_mul(y, f32_set1(2.0f * scale / cap)), f32_set1(80.0f)));
                y = f32_sub(f32_set1(cap), f32_div(f32_set1(2.0f * cap), f32_add(y, one)));
            } else {
                y = f32_mul(y, f32_set1(scale));
            }
            if (mask[r]) {
                y = f32_fma(f32_load_f16(mask[r] + i), k, y);
            }
            f32_store(x + i, y);
            top[r] = f32_max(top[r], y);
        }
    }
    float now[R], base[R];
    max_rows<R>(now, top);
    bool moved = false;
    for (int r = 0; r < R; r++) {
        moved |= now[r] > m[r];
        now[r] = now[r] > m[r] ? now[r] : m[r];
        base[r] = now[r] == -INFINITY ? 0.0f : now[r]; // nothing seen yet: exp(-inf - 0) = 0
    }
    for (int r = 0; r < R; r++) {
        f32x16 sum = f32_set1(0.0f);
        float * x = logits + (size_t) r * n;
        const f32x16 b = f32_set1(base[r]);
        for (int i = 0; i < n; i += 16) {
            const f32x16 e = f32_exp(f32_sub(f32_load(x + i), b));
            f32_store(x + i, e);
            sum = f32_add(sum, e);
        }
        top[r] = sum;
    }
    sum_rows<R>(sums, top);
    if (moved) {
        float c[16];
        for (int r = 0; r < R; r++)  { c[r] = m[r] - base[r]; }
        for (int r = R; r < 16; r++) { c[r] = 0.0f; }
        f32_store(c, f32_exp(f32_load(c)));
        for (int r = 0; r < R; r++) {
            correction[r] = now[r] > m[r] ? c[r] : 1.0f;
            l[r] = l[r] * correction[r] + sums[r];
            m[r] = now[r];
        }
    } else {
        for (int r = 0; r < R; r++) {
            correction[r] = 1.0f;
            l[r] += sums[r];
        }
    }
}

static void softmax(int n_rows, int n, float * logits, float scale, float cap, const float * slope, const uint16_t * const * mask, float * m, float * l, float * correction, float * sums) {
#define CALL(R, r) softmax_rows<R>(n, logits + (size_t) (r) * n, scale, cap, slope + r, mask + r, m + r, l + r, correction + r, sums + r)
    int r = 0;
    for (; KVQ_R >= 4 && r + 4 <= n_rows; r += 4) { CALL((KVQ_R >= 4 ? 4 : 1), r); }
    for (; r < n_rows; r++) { CALL(1, r); }
#undef CALL
}

static void scale_row(int n, float * out, float c) {
    for (int i = 0; i < n; i += 16) {
        f32_store(out + i, f32_mul(f32_load(out + i), f32_set1(c)));
    }
}

} // namespace

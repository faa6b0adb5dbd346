// Logits of the mean of keys over neighbouring positions (turns.h).
namespace KVQ_NS {

// coef [2][n_pad] of pairs (qx, qy) and (mx, my). Fast pairs: in units of step[0] of the result, 15 bits of weight;
// slow pairs: 12 bits, in units of their own, of which a sum over the basis, itself in units of 1/4096, counts
// step[1] times step[0].
static void mean_coefficients(const kvq_mean_tables & t, float magnitude, const float * qx, const float * qy,
    const float * mx, const float * my, float * coef, float * step) {
    const f32x16 zero = f32_set1(0.0f), by = f32_set1(magnitude);
    f32x16 most[2] = { zero, zero }, sum[2] = { zero, zero }; // of fast and of slow pairs
    for (int v = 0; v < t.n_pad; v += 16) {
        const f32x16 x = f32_load(qx + v), y = f32_load(qy + v), c = f32_load(t.half + v),
                     s = f32_load(t.half + t.n_pad + v);
        const f32x16 a = f32_fma(x, f32_load(mx + v), f32_mul(y, f32_load(my + v))),
                     b = f32_sub(f32_mul(y, f32_load(mx + v)), f32_mul(x, f32_load(my + v)));
        f32_store(coef + v, f32_sub(f32_mul(a, c), f32_mul(b, s)));
        f32_store(coef + t.n_pad + v, f32_fma(a, s, f32_mul(b, c)));
        // no less than A or B at any position
        const f32x16 size = f32_mul(by, f32_add(f32_absmax(a, zero), f32_absmax(b, zero)));
        const f32x16 part[2] = { f32_mul(size, f32_load(t.fast + v)), f32_mul(size, f32_load(t.fast + t.n_pad + v)) };
        for (int i = 0; i < 2; i++) {
            most[i] = f32_max(most[i], part[i]);
            sum[i] = f32_add(sum[i], part[i]);
        }
    }
    const float fast = f32_sum(sum[0]), slow = f32_sum(sum[1]), top_fast = f32_hmax(most[0]),
                top_slow = f32_hmax(most[1]);
    // sums below 2^31: of terms with tables in units of 1/4096, those of basis functions up to 2, and over the basis
    const float top = top_fast > slow ? top_fast : slow, all = fast + 2.0f * KVQ_TURN_BASIS * slow;
    const float inv0 = top > 1e-30f ? 32000.0f / top < 5e5f / all ? 32000.0f / top : 5e5f / all : 0.0f;
    const float inv1 = slow > 1e-30f ? 4095.0f / top_slow < 5e5f / slow ? 4095.0f / top_slow : 5e5f / slow : 0.0f;
    for (int v = 0; v < 2 * t.n_pad; v += 16) {
        const float * fast_pairs = t.fast + v % t.n_pad;
        f32_store(coef + v,
            f32_mul(f32_load(coef + v),
                f32_fma(
                    f32_load(fast_pairs), f32_set1(inv0), f32_mul(f32_load(fast_pairs + t.n_pad), f32_set1(inv1)))));
    }
    step[0] = inv0 > 0.0f ? 1.0f / inv0 : 0.0f;
    step[1] = inv1 > 0.0f ? inv0 / inv1 : 0.0f;
}

// Offsets 16g + 1/2 .. of G groups and those on the other side, hi[g] and lo[g] of the first row; w [row][term
// pair][cos, sin][2]
template <int R, int G>
static inline void mean_offsets(const kvq_mean_tables & t, int g, const int16_t * const * w, int n, const float * step,
    float * const * hi, float * const * lo) {
    i32x16 even[G][R], odd[G][R];
    for (int j = 0; j < G; j++) {
        for (int r = 0; r < R; r++) { even[j][r] = odd[j][r] = i32_zero(); }
    }
    const size_t group = (size_t) t.n_terms * 32;
    const int16_t * x = t.waves + g * group;
    for (int i = 0; i < t.n_terms; i += 2, x += 64) {
        u8x64 cosine[G], sine[G];
        for (int j = 0; j < G; j++) {
            cosine[j] = u8_load((const uint8_t *) (x + j * group));
            sine[j] = u8_load((const uint8_t *) (x + j * group + 32));
        }
        for (int r = 0; r < R; r++) {
            const i16x4 a = i16_set2(w[r] + 2 * i), b = i16_set2(w[r] + 2 * i + 2);
            for (int j = 0; j < G; j++) {
                even[j][r] = dot2(even[j][r], cosine[j], a);
                odd[j][r] = dot2(odd[j][r], sine[j], b);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        const f32x16 by = f32_set1(step[2 * r] * (1.0f / 4096.0f));
        for (int j = 0; j < G; j++) {
            f32_store(hi[g + j] + (size_t) r * n, f32_mul(f32_from_i32(i32_add(even[j][r], odd[j][r])), by));
            f32_store(
                lo[g + j] + (size_t) r * n, f32_reverse(f32_mul(f32_from_i32(i32_sub(even[j][r], odd[j][r])), by)));
        }
    }
}

// R rows of n_pages pages of n cells at positions first..; logits [page][n_rows][n], coef [row][2][n_pad]
template <int R>
static void mean_rows(const kvq_mean_tables & t, int first, int n_pages, int n, int n_rows, const float * coef,
    const float * step, float * logits) {
    const int at = first + n_pages * n / 2, n_groups = n_pages * n / 32;
    const float *high = t.high + (size_t) (at / 64) * 2 * t.n_pad, *low = t.low + (size_t) (at % 64) * 2 * t.n_pad;
    alignas(64) int16_t weights[R][KVQ_MAX_HEAD];
    const int16_t * w[R];
    for (int r = 0; r < R; r++) { w[r] = weights[r]; }
    for (int v = 0; v < t.n_pad; v += 16) {
        const f32x16 hc = f32_load(high + v), hs = f32_load(high + t.n_pad + v), lc = f32_load(low + v),
                     ls = f32_load(low + t.n_pad + v);
        const f32x16 c = f32_sub(f32_mul(hc, lc), f32_mul(hs, ls)), s = f32_fma(hs, lc, f32_mul(hc, ls));
        for (int r = 0; r < R; r++) {
            const f32x16 a = f32_load(coef + (size_t) r * 2 * t.n_pad + v),
                         b = f32_load(coef + (size_t) (2 * r + 1) * t.n_pad + v);
            i16_store_pairs(weights[r] + 2 * v, f32_fma(a, c, f32_mul(b, s)), f32_sub(f32_mul(b, c), f32_mul(a, s)));
        }
    }
    i32x16 sums[R]; // of the basis functions, over the slow pairs, in whose place they come
    for (int r = 0; r < R; r++) { sums[r] = i32_zero(); }
    const int16_t * v = t.basis;
    for (int i = t.n_fast; i < t.n_pad; i += 2, v += 32) {
        const u8x64 x = u8_load((const uint8_t *) v);
        for (int r = 0; r < R; r++) { sums[r] = dot2(sums[r], x, i16_set4(w[r] + 2 * i)); }
    }
    for (int r = 0; r < R; r++) {
        i16_store_sums(
            weights[r] + 2 * t.n_fast, f32_mul(f32_from_i32(sums[r]), f32_set1(step[2 * r + 1] * (1.0f / 4096.0f))));
    }

    float *hi[KVQ_MAX_RUN], *lo[KVQ_MAX_RUN]; // by group, of the first row
    for (int x = 0, i = 0; i < n_pages; i++) {
        for (int c = 0; c < n; c += 16, x++) {
            (x < n_groups ? lo[n_groups - 1 - x] : hi[x - n_groups]) = logits + (size_t) i * n_rows * n + c;
        }
    }
    constexpr int G = 2 * R * KVQ_TILES <= KVQ_SUMS ? KVQ_TILES : 1;
    int g = 0;
    for (; g + G <= n_groups; g += G) { mean_offsets<R, G>(t, g, w, n, step, hi, lo); }
    for (; g < n_groups; g++) { mean_offsets<R, 1>(t, g, w, n, step, hi, lo); }
}

// Positions of a page: what is not 0 of now - sealed - by and of sealed - sealed[0] - t, over all cells; the sign of
// all
static void page_positions(
    int n, const int32_t * now, const int32_t * sealed, int32_t * apart, int32_t * gap, int32_t * sign) {
    const int32_t first = sealed[0], by = now[0] - first;
    int32_t a = 0, g = 0, s = first;
    for (int t = 0; t < n; t++) { // no branches: every layer of every step looks at every position
        a |= now[t] - sealed[t] - by;
        g |= sealed[t] - first - t;
        s |= now[t];
    }
    *apart = a;
    *gap = g;
    *sign = s;
}

static void score_mean(const kvq_mean_tables & t, int first, int n_pages, int n, int n_rows, const float * coef,
    const float * step, float * logits) {
#define CALL(R, r)                                                                                                     \
    mean_rows<R>(                                                                                                      \
        t, first, n_pages, n, n_rows, coef + (size_t) (r) * 2 * t.n_pad, step + 2 * (r), logits + (size_t) (r) * n)
    KVQ_ROWS(n_rows, CALL);
#undef CALL
}

} // namespace

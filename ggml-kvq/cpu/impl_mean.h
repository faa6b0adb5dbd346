// Logits of the mean of keys over neighbouring positions (turns.h).
namespace KVQ_NS {

// in one store: what follows reads both as one number
static inline void put_pair(int16_t * p, float a, float b) {
    const int x = (int) (a < 0.0f ? a - 0.5f : a + 0.5f), y = (int) (b < 0.0f ? b - 0.5f : b + 0.5f);
    const uint32_t both = ((uint32_t) x & 0xffff) | (uint32_t) y << 16;
    memcpy(p, &both, 4);
}

// R rows of n_pages pages of n cells at positions first..; logits [page][n_rows][n], coef [row][2][n_pad]
template <int R> static void mean_rows(const kvq_mean_tables & t, int first, int n_pages, int n, int n_rows, const float * coef, const float * step, float * logits) {
    const int at = first + n_pages * n / 2, slow = t.n_pad - t.n_fast, terms = t.n_fast + 4;
    const float * high = t.high + (size_t) (at / 64) * 2 * t.n_pad, * low = t.low + (size_t) (at % 64) * 2 * t.n_pad;
    int16_t w[R][2][KVQ_MAX_HEAD / 2 + 4];
    f32x16 m[5][R]; // sums over the slow pairs
    for (int k = 0; k < 5; k++) {
        for (int r = 0; r < R; r++) { m[k][r] = f32_set1(0.0f); }
    }
    for (int v = 0; v < t.n_pad; v += 16) {
        const f32x16 hc = f32_load(high + v), hs = f32_load(high + t.n_pad + v), lc = f32_load(low + v), ls = f32_load(low + t.n_pad + v);
        const f32x16 c = f32_sub(f32_mul(hc, lc), f32_mul(hs, ls)), s = f32_fma(hs, lc, f32_mul(hc, ls));
        for (int r = 0; r < R; r++) {
            const f32x16 a = f32_load(coef + (size_t) r * 2 * t.n_pad + v), b = f32_load(coef + (size_t) (2 * r + 1) * t.n_pad + v);
            const f32x16 A = f32_fma(a, c, f32_mul(b, s)), B = f32_sub(f32_mul(b, c), f32_mul(a, s));
            if (v < t.n_fast) {
                i16_store16(w[r][0] + v, A);
                i16_store16(w[r][1] + v, B);
                continue;
            }
            const float * p = t.power + v - t.n_fast;
            m[0][r] = f32_add(m[0][r], A);
            m[1][r] = f32_fma(B, f32_load(p), m[1][r]);
            m[2][r] = f32_fma(A, f32_load(p + slow), m[2][r]);
            m[3][r] = f32_fma(B, f32_load(p + 2 * slow), m[3][r]);
            m[4][r] = f32_fma(A, f32_load(p + 3 * slow), m[4][r]);
        }
    }
    float sum[5][R];
    for (int k = 0; k < 5; k++) { sum_rows<R>(sum[k], m[k]); }
    for (int r = 0; r < R; r++) { // even powers go with the cosines, odd ones with the sines
        put_pair(w[r][0] + t.n_fast,     sum[0][r], -sum[2][r]);
        put_pair(w[r][0] + t.n_fast + 2, sum[4][r], 0.0f);
        put_pair(w[r][1] + t.n_fast,     sum[1][r], -sum[3][r]);
        put_pair(w[r][1] + t.n_fast + 2, 0.0f, 0.0f);
    }
    float * above = logits + (size_t) (n_pages / 2) * n_rows * n + n_pages % 2 * (n / 2); // the centre
    float * below = above;
    const size_t page = (size_t) n_rows * n;
    for (int g = 0, up = n_pages % 2 * (n / 2), down = up; g < n_pages * n / 32; g++) { // offsets 16g + 1/2 .. on both sides of it
        below -= down ? 16 : page - n + 16;
        down   = down ? down - 16 : n - 16;
        i32x16 even[R], odd[R];
        for (int r = 0; r < R; r++) { even[r] = odd[r] = i32_zero(); }
        const int16_t * x = t.cos + (size_t) g * terms * 16, * y = t.sin + (size_t) g * terms * 16;
        for (int i = 0; i < terms; i += 2, x += 32, y += 32) {
            const u8x64 cosine = u8_load((const uint8_t *) x), sine = u8_load((const uint8_t *) y);
            for (int r = 0; r < R; r++) {
                even[r] = dot2(even[r], cosine, w[r][0] + i);
                odd [r] = dot2(odd [r], sine,   w[r][1] + i);
            }
        }
        for (int r = 0; r < R; r++) {
            const f32x16 e = f32_from_i32(even[r]), o = f32_from_i32(odd[r]), by = f32_set1(step[r] * (1.0f / 4096.0f));
            float * hi = above + (size_t) r * n, * lo = below + (size_t) r * n;
            f32_store(hi, f32_mul(f32_add(e, o), by));
            f32_store(lo, f32_mul(f32_reverse(f32_sub(e, o)), by));
        }
        up    += 16;
        above += up < n ? 16 : page - n + 16;
        up     = up < n ? up : 0;
    }
}

static void score_mean(const kvq_mean_tables & t, int first, int n_pages, int n, int n_rows, const float * coef, const float * step, float * logits) {
#define CALL(R, r) mean_rows<R>(t, first, n_pages, n, n_rows, coef + (size_t) (r) * 2 * t.n_pad, step + r, logits + (size_t) (r) * n)
    KVQ_ROWS(n_rows, CALL);
#undef CALL
}

} // namespace

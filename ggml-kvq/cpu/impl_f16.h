// Open pages (f16 tiles [n_cells][dp]) and f32 tiles. Few rows read a page as it lies; many rows share an f32 tile of
// it:
//   K tile [dp][n_cells], so that a register holds 16 cells and no horizontal sum is needed      V tile [n_cells][dp]
namespace KVQ_NS {

constexpr int CELLS = 4; // per step: their sums leave in one store

template <int R> static void score_f16_rows(int dp, int n, const uint16_t * tile, const float * q, float * logits) {
    for (int t = 0; t < n; t += CELLS) {
        f32x16 acc[R][CELLS];
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < CELLS; c++) { acc[r][c] = f32_set1(0.0f); }
        }
        for (int d = 0; d < dp; d += 16) {
            f32x16 k[CELLS];
            for (int c = 0; c < CELLS; c++) { k[c] = f32_load_f16(tile + (size_t) (t + c) * dp + d); }
            for (int r = 0; r < R; r++) {
                const f32x16 x = f32_load(q + (size_t) r * dp + d);
                for (int c = 0; c < CELLS; c++) { acc[r][c] = f32_fma(k[c], x, acc[r][c]); }
            }
        }
        for (int r = 0; r < R; r++) {
            f32_sum4(logits + (size_t) r * n + t, acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
        }
    }
}

// x[r] = f[r] * p[r]
template <int R> static inline void times_rows(int n, const float * p, const float * f, float * x) {
    for (int r = 0; r < R; r++) {
        for (int i = r * n; i < (r + 1) * n; i += 16) { f32_store(x + i, f32_mul(f32_load(p + i), f32_set1(f[r]))); }
    }
}

template <int R, int W>
static inline void accum_f16_lanes(int dp, int n, const uint16_t * tile, const float * p, float * out) {
    f32x16 acc[R][W];
    for (int r = 0; r < R; r++) {
        for (int i = 0; i < W; i++) { acc[r][i] = f32_load(out + (size_t) r * dp + 16 * i); }
    }
    for (int t = 0; t < n; t++) {
        f32x16 v[W];
        for (int i = 0; i < W; i++) { v[i] = f32_load_f16(tile + (size_t) t * dp + 16 * i); }
        for (int r = 0; r < R; r++) {
            const f32x16 x = f32_set1(p[(size_t) r * n + t]);
            for (int i = 0; i < W; i++) { acc[r][i] = f32_fma(v[i], x, acc[r][i]); }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int i = 0; i < W; i++) { f32_store(out + (size_t) r * dp + 16 * i, acc[r][i]); }
    }
}

template <int R>
static void accum_f16_rows(int dp, int n, const uint16_t * tile, const float * p, const float * f, float * out) {
    float x[R * KVQ_MAX_CELLS];
    times_rows<R>(n, p, f, x);
    constexpr int W = 16 * R <= 4 * KVQ_SUMS ? 4 : 2; // the wider, the more of a row is read in one go
    int d = 0;
    for (; d + 16 * W <= dp; d += 16 * W) { accum_f16_lanes<R, W>(dp, n, tile + d, x, out + d); }
    for (; d < dp; d += 16) { accum_f16_lanes<R, 1>(dp, n, tile + d, x, out + d); }
}

// ---------------------------------------------------------------- f32 tiles

template <int R> static void score_tile_rows(int dp, int n, const float * tile, const float * q, float * logits) {
    for (int t = 0; t < n; t += 32) {
        f32x16 acc[R][2];
        for (int r = 0; r < R; r++) { acc[r][0] = acc[r][1] = f32_set1(0.0f); }
        for (int d = 0; d < dp; d++) {
            const f32x16 a = f32_load(tile + (size_t) d * n + t), b = f32_load(tile + (size_t) d * n + t + 16);
            for (int r = 0; r < R; r++) {
                const f32x16 x = f32_set1(q[(size_t) r * dp + d]);
                acc[r][0] = f32_fma(a, x, acc[r][0]);
                acc[r][1] = f32_fma(b, x, acc[r][1]);
            }
        }
        for (int r = 0; r < R; r++) {
            f32_store(logits + (size_t) r * n + t, acc[r][0]);
            f32_store(logits + (size_t) r * n + t + 16, acc[r][1]);
        }
    }
}

template <int R, int W>
static inline void accum_tile_lanes(int dp, int n, const float * tile, const float * p, float * out) {
    f32x16 acc[R][W];
    for (int r = 0; r < R; r++) {
        for (int i = 0; i < W; i++) { acc[r][i] = f32_load(out + (size_t) r * dp + 16 * i); }
    }
    for (int t = 0; t < n; t++) {
        f32x16 v[W];
        for (int i = 0; i < W; i++) { v[i] = f32_load(tile + (size_t) t * dp + 16 * i); }
        for (int r = 0; r < R; r++) {
            const f32x16 x = f32_set1(p[(size_t) r * n + t]);
            for (int i = 0; i < W; i++) { acc[r][i] = f32_fma(v[i], x, acc[r][i]); }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int i = 0; i < W; i++) { f32_store(out + (size_t) r * dp + 16 * i, acc[r][i]); }
    }
}

template <int R>
static void accum_tile_rows(int dp, int n, const float * tile, const float * p, const float * f, float * out) {
    float x[R * KVQ_MAX_CELLS];
    times_rows<R>(n, p, f, x);
    int d = 0;
    for (; d + 32 <= dp; d += 32) { accum_tile_lanes<R, 2>(dp, n, tile + d, x, out + d); }
    for (; d < dp; d += 16) { accum_tile_lanes<R, 1>(dp, n, tile + d, x, out + d); }
}

static void score_tile(int n_rows, int dp, int n, const float * tile, const float * q, float * logits) {
#define CALL(R, r) score_tile_rows<R>(dp, n, tile, q + (size_t) r * dp, logits + (size_t) r * n)
    KVQ_ROWS(n_rows, CALL);
#undef CALL
}

static void accum_tile(int n_rows, int dp, int n, const float * tile, const float * p, const float * f, float * out) {
#define CALL(R, r) accum_tile_rows<R>(dp, n, tile, p + (size_t) r * n, f + r, out + (size_t) r * dp)
    KVQ_ROWS(n_rows, CALL);
#undef CALL
}

static void f16_to_tile(const kvq_view & v, const void * codes, const void *, float * out, void *) {
    const uint16_t * tile = (const uint16_t *) codes;
    const int dp = v.dp, n = v.codec.n_cells;
    if (v.codec.role == KVQ_ROLE_V) {
        f16_to_f32_row(tile, out, (int64_t) n * dp);
        return;
    }
    for (int t = 0; t < n; t += 16) {
        for (int d = 0; d < dp; d += 16) {
            f32x16 x[16];
            for (int i = 0; i < 16; i++) { x[i] = f32_load_f16(tile + (size_t) (t + i) * dp + d); }
            f32_transpose(x);
            for (int i = 0; i < 16; i++) { f32_store(out + (size_t) (d + i) * n + t, x[i]); }
        }
    }
}

// ---------------------------------------------------------------- any number of rows

static void score_f16(const kvq_view & v, int n_rows, const kvq_run & run, const float * q, float * logits, void *) {
    const int dp = v.dp, n = v.codec.n_cells;
    for (int i = 0; i < run.n_pages; i++, logits += (size_t) n_rows * n) {
        const uint16_t * tile = (const uint16_t *) run.codes[i];
        int r = 0;
        for (; r + KVQ_F16_ROWS <= n_rows; r += KVQ_F16_ROWS) {
            score_f16_rows<KVQ_F16_ROWS>(dp, n, tile, q + (size_t) r * dp, logits + (size_t) r * n);
        }
        for (; r < n_rows; r++) { score_f16_rows<1>(dp, n, tile, q + (size_t) r * dp, logits + (size_t) r * n); }
    }
}

static void accum_f16(
    const kvq_view & v, int n_rows, const kvq_run & run, const float * p, const float * f, float * out, void *) {
    const int dp = v.dp, n = v.codec.n_cells;
    for (int i = 0; i < run.n_pages; i++, p += (size_t) n_rows * n, f += KVQ_MAX_ROWS) {
        const uint16_t * tile = (const uint16_t *) run.codes[i];
#define CALL(R, r) accum_f16_rows<R>(dp, n, tile, p + (size_t) r * n, f + r, out + (size_t) r * dp)
        KVQ_ROWS(n_rows, CALL);
#undef CALL
    }
}

} // namespace

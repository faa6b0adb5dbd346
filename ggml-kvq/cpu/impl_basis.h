// Coordinates of the cells of a page (types/basis.h), and the rows that they say.
namespace KVQ_NS {

// Keys: u8 [n/4 rounded up][n_cells][4], 2 c, then f32 scales [n_cells]
static void key_coords(const kvq_coord_pairs<const uint8_t> & from, int n, uint8_t * out) {
    const int quads = (n + 3) / 4;
    for (int q = 0; q < quads; q++) {
        const uint8_t *const a = from.of(2 * q), *const b = 4 * q + 2 < n ? from.of(2 * q + 1) : a; // its weights are 0
        uint8_t * const to = out + 4 * (size_t) q * (size_t) from.n_cells;
        for (int t = 0; t < from.n_cells; t += 16) { u8_store(to + 4 * t, u8_nibbles(a + t, b + t)); }
    }
    const uint8_t * const __restrict e = from.of(n / 2);
    float * const __restrict scale = (float *) (out + (size_t) (4 * quads) * (size_t) from.n_cells);
    for (int t = 0; t < from.n_cells; t++) { scale[t] = kvq_coord_scale(e[t]); }
}

// Values: f32 [n_cells][stride], (2 c - 15) scale; zeros behind n
static void value_coords(const kvq_coord_pairs<const uint8_t> & from, int n, int stride, float * out) {
    const uint8_t * e = from.of(n / 2);
    for (int t0 = 0; t0 < from.n_cells; t0 += 16) {
        float scales[16];
        for (int t = 0; t < 16; t++) { scales[t] = kvq_coord_scale(e[t0 + t]); }
        const f32x16 scale = f32_load(scales), less = f32_set1(15.0f);
        for (int j = 0; j < stride; j += 16) {
            f32x16 x[16];
            for (int i = 0; i < 16; i += 2) {
                x[i] = x[i + 1] = f32_set1(0.0f);
                if (j + i >= n) { continue; }
                const f32x16 pair = f32_load_u8(from.of((j + i) / 2) + t0),
                             hi = f32_floor(f32_mul(pair, f32_set1(1.0f / 16.0f))),
                             lo = f32_sub(pair, f32_mul(hi, f32_set1(16.0f)));
                x[i] = f32_mul(f32_sub(f32_add(lo, lo), less), scale);
                x[i + 1] = f32_mul(f32_sub(f32_add(hi, hi), less), scale);
            }
            f32_transpose(x);
            for (int t = 0; t < 16; t++) { f32_store(out + (size_t) (t0 + t) * (size_t) stride + j, x[t]); }
        }
    }
}

// Sums over the coordinates of G times 16 cells, which begin at x; of the channels at(0) .. at(C - 1)
template <int C, int G, typename F>
static inline void basis_sums(const kvq_basis & b, const uint8_t * x, size_t n_cells, F && at, i32x16 (&sums)[C][G]) {
    KVQ_UNROLL
    for (int c = 0; c < C; c++) {
        KVQ_UNROLL
        for (int g = 0; g < G; g++) { sums[c][g] = i32_sub(i32_zero(), i32_set1(b.off[at(c)])); }
    }
    for (int q = 0; q < (b.n + 3) / 4; q++) {
        const int8_t * const w = b.out + (size_t) q * (size_t) b.width * 4;
        u8x64 cells[G];
        KVQ_UNROLL
        for (int g = 0; g < G; g++) { cells[g] = u8_load(x + 4 * (size_t) q * n_cells + 64 * g); }
        KVQ_UNROLL
        for (int c = 0; c < C; c++) {
            const auto wc = i8_set4(w + 4 * at(c));
            KVQ_UNROLL
            for (int g = 0; g < G; g++) { sums[c][g] = dot4(sums[c][g], cells[g], wc); }
        }
    }
}

// C channels from `d` on of G times 16 cells, whose coordinates begin at x; columns of n_cells
template <int C, int G>
static inline void basis_channels(const kvq_basis & b, size_t d, const uint8_t * x, size_t n_cells, const float * scale,
    const float * mean, float * out) {
    i32x16 sums[C][G]; // in registers: every loop over them is unrolled
    basis_sums<C, G>(b, x, n_cells, [&](int c) { return d + (size_t) c; }, sums);
    KVQ_UNROLL
    for (int g = 0; g < G; g++) {
        const f32x16 by = f32_load(scale + 16 * g);
        KVQ_UNROLL
        for (int c = 0; c < C; c++) {
            f32_store(out + (size_t) c * n_cells + 16 * g,
                f32_fma(f32_mul(f32_from_i32(sums[c][g]), by), f32_set1(b.step[d + (size_t) c]), f32_set1(mean[c])));
        }
    }
}

// Keys of head `head` that mean and coordinates say, as a tile [dp][n_cells]. turns: [n_cells / 16] tables of angles as
// turn_table makes them; NULL: keys are not turned
static void basis_keys(const kvq_basis & b, int head, int D, int dp, int n_cells, const uint8_t * coords,
    const float * mean, const float * turns, int n_dims, bool neox, float * tile) {
    constexpr int C = KVQ_R < 8 ? KVQ_R : 8, G = KVQ_TILES; // head sizes are multiples of 8, pages of 32
    const float * const scales = (const float *) (coords + (size_t) ((b.n + 3) / 4 * 4) * (size_t) n_cells);
    const size_t n = (size_t) n_cells;
    for (size_t t = 0; t < n; t += 16 * G) {
        for (int d = 0; d < D; d += C) {
            basis_channels<C, G>(
                b, (size_t) (head * D + d), coords + 4 * t, n, scales + t, mean + d, tile + (size_t) d * n + t);
        }
        for (size_t at = t; turns && at < t + 16 * G; at += 16) {
            turn_columns(n_dims, neox, turns + at / 16 * (size_t) n_dims * 16, tile + at, n);
        }
    }
    std::fill(tile + (size_t) D * n, tile + (size_t) dp * n, 0.0f);
}

// Logits of R rows over what mean and coordinates say of G times 16 keys, which turn as a whole: P pairs at a time,
// without a tile.
template <int R, int P, int G, bool NEOX>
static inline void coord_cells(const kvq_basis & b, int head, int D, size_t n, const uint8_t * x, const float * scale,
    const float * mean, const float * turns, int dp, const float * q, float * logits, size_t row) {
    constexpr int BY = NEOX ? 1 : 2;
    const int n_pairs = D / 2, second = NEOX ? n_pairs : 1;
    f32x16 out[R][G];
    KVQ_UNROLL
    for (int r = 0; r < R; r++) {
        KVQ_UNROLL
        for (int g = 0; g < G; g++) { out[r][g] = f32_set1(0.0f); }
    }
    for (int i = 0; i < n_pairs; i += P) {
        const int d = i * BY;
        const size_t first = (size_t) (head * D + d), other = first + (size_t) second;
        i32x16 sums[2 * P][G];
        basis_sums<2 * P, G>(b, x, n, [&](int c) { return (c % 2 ? other : first) + (size_t) (c / 2 * BY); }, sums);
        KVQ_UNROLL
        for (int p = 0; p < P; p++) {
            const size_t a = first + (size_t) (p * BY), z = other + (size_t) (p * BY);
            const float * const m = mean + d + p * BY;
            const float * const turn = turns + (size_t) (i + p) * 16;
            KVQ_UNROLL
            for (int g = 0; g < G; g++) {
                const f32x16 by = f32_load(scale + 16 * g), c = f32_load(turn + (size_t) (g * D) * 16),
                             s = f32_load(turn + (size_t) (g * D + n_pairs) * 16);
                const f32x16 u = f32_fma(
                                 f32_mul(f32_from_i32(sums[2 * p][g]), by), f32_set1(b.step[a]), f32_set1(m[0])),
                             v = f32_fma(f32_mul(f32_from_i32(sums[2 * p + 1][g]), by), f32_set1(b.step[z]),
                                 f32_set1(m[second]));
                const f32x16 k0 = f32_sub(f32_mul(u, c), f32_mul(v, s)), k1 = f32_fma(u, s, f32_mul(v, c));
                KVQ_UNROLL
                for (int r = 0; r < R; r++) {
                    const float * const qr = q + (size_t) r * dp + d + p * BY;
                    out[r][g] = f32_fma(k0, f32_set1(qr[0]), f32_fma(k1, f32_set1(qr[second]), out[r][g]));
                }
            }
        }
    }
    KVQ_UNROLL
    for (int r = 0; r < R; r++) {
        KVQ_UNROLL
        for (int g = 0; g < G; g++) { f32_store(logits + (size_t) r * row + 16 * g, out[r][g]); }
    }
}

// With fewer registers a tile is faster.
constexpr int KVQ_COORD_ROWS = KVQ_R < 8 ? 0 : 4;

// Of n_rows <= KVQ_COORD_ROWS rows, [row][n_cells]; the rest as basis_keys
static void coord_logits(const kvq_basis & b, int head, int D, int dp, int n_cells, const uint8_t * coords,
    const float * mean, const float * turns, bool neox, int n_rows, const float * q, float * logits) {
    constexpr int P = 4, G = KVQ_TILES; // heads have a multiple of 8 channels, pages of 32 cells
    const size_t n = (size_t) n_cells;
    const float * const scales = (const float *) (coords + (size_t) ((b.n + 3) / 4 * 4) * n);
#define CALL(R)                                                                                                        \
    case R:                                                                                                            \
        for (size_t t = 0; t < n; t += 16 * G) {                                                                       \
            (neox ? coord_cells<R, P, G, true> : coord_cells<R, P, G, false>) (b, head, D, n, coords + 4 * t,          \
                scales + t, mean, turns + t * (size_t) D, dp, q, logits + t, n);                                       \
        }                                                                                                              \
        break;
    if constexpr (KVQ_COORD_ROWS == 4) {
        switch (n_rows) { CALL(1) CALL(2) CALL(3) CALL(4) }
    }
#undef CALL
}

// Rows of q that meet keys at one position less far: turn [2][D/2], its cosines and sines
static void turn_back(
    int n_rows, int D, int dp, bool neox, const float * turn, const float * __restrict q, float * __restrict out) {
    const int n = D / 2;
    for (int r = 0; r < n_rows; r++, q += dp, out += dp) {
        for (int i = 0; neox && i < n; i++) {
            out[i] = q[i] * turn[i] + q[i + n] * turn[n + i];
            out[i + n] = q[i + n] * turn[i] - q[i] * turn[n + i];
        }
        for (int i = 0; !neox && i < n; i++) {
            out[2 * i] = q[2 * i] * turn[i] + q[2 * i + 1] * turn[n + i];
            out[2 * i + 1] = q[2 * i + 1] * turn[i] - q[2 * i] * turn[n + i];
        }
        for (int i = D; i < dp; i++) { out[i] = 0.0f; }
    }
}

static void add_basis(const kvq_basis & b, int first, int D, const float * z, float * out) {
    int d = 0;
    for (; d + 16 <= D; d += 16) {
        const float * w = b.in + first + d;
        f32x16 sums[2] = { f32_load(out + d), f32_set1(0.0f) };
        int j = 0;
        for (; j + 2 <= b.n; j += 2) {
            sums[0] = f32_fma(f32_set1(z[j]), f32_load(w + (size_t) j * (size_t) b.width), sums[0]);
            sums[1] = f32_fma(f32_set1(z[j + 1]), f32_load(w + (size_t) (j + 1) * (size_t) b.width), sums[1]);
        }
        f32_store(out + d, f32_add(sums[0], sums[1]));
    }
    for (; d < D; d++) {
        for (int j = 0; j < b.n; j++) { out[d] += z[j] * b.in[(size_t) j * (size_t) b.width + (size_t) (first + d)]; }
    }
}

} // namespace

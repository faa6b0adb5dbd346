// Coordinates of the cells of a page (types/basis.h), and the rows that they say.
namespace KVQ_NS {

// Keys: u8 [n/4 rounded up][n_cells][4], 2 c, then f32 scales [n_cells]
static void key_coords(const kvq_coord_pairs<const uint8_t> & from, int n, uint8_t * out) {
    const int quads = (n + 3) / 4;
    for (int q = 0; q < quads; q++) {
        const uint8_t * const __restrict a = from.of(2 * q);
        const uint8_t * const __restrict b = 4 * q + 2 < n ? from.of(2 * q + 1) : a; // its weights are 0
        uint32_t * const __restrict to = (uint32_t *) out + (size_t) q * (size_t) from.n_cells;
        for (int t = 0; t < from.n_cells; t++) {
            const uint32_t x = (uint32_t) a[t] | (uint32_t) b[t] << 16;
            to[t] = (x & 0x000f000fu) << 1 | (x & 0x00f000f0u) << 5;
        }
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

// C channels from `d` on of G times 16 cells, whose coordinates begin at x; columns of n_cells
template <int C, int G>
static inline void basis_channels(const kvq_basis & b, size_t d, const uint8_t * x, size_t n_cells, const float * scale,
    const float * mean, float * out) {
    i32x16 sums[C][G]; // in registers: every loop over them is unrolled
    KVQ_UNROLL
    for (int c = 0; c < C; c++) {
        KVQ_UNROLL
        for (int g = 0; g < G; g++) { sums[c][g] = i32_sub(i32_zero(), i32_set1(b.off[d + (size_t) c])); }
    }
    for (int q = 0; q < (b.n + 3) / 4; q++) {
        const int8_t * w = b.out + ((size_t) q * (size_t) b.width + d) * 4;
        u8x64 at[G];
        KVQ_UNROLL
        for (int g = 0; g < G; g++) { at[g] = u8_load(x + 4 * (size_t) q * n_cells + 64 * g); }
        KVQ_UNROLL
        for (int c = 0; c < C; c++) {
            const auto wc = i8_set4(w + 4 * c);
            KVQ_UNROLL
            for (int g = 0; g < G; g++) { sums[c][g] = dot4(sums[c][g], at[g], wc); }
        }
    }
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

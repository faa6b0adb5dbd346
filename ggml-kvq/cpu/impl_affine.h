// Affine blocks (types/affine.h), read in place. A run of pages at a time:
//   fold   w = x*scale in 8 bits for every page, group of parameters and row, and sum x*zero.
//          x: queries (K) or probabilities (V). A key's weights take two bytes, w = step*(high + low/254), because one
//          byte of a query changes a model's answers measurably.
//   dots   sum code*w8 over the group's tiles by byte-dot instructions; codes are unpacked once for all rows
namespace KVQ_NS {

// Scales and zeros as f32.
struct param_reader {
    const uint8_t *scale, *zero; // arrays of f16 or u8, or one of 4-bit pairs
    int format;
    f32x16 s_low, s_step, z_low, z_step;

    param_reader(const kvq_view & a, const void * params) : format(a.codec.scale) {
        const uint8_t * p = (const uint8_t *) params;
        scale = p + (format ? 8 : 0);
        zero = format == 2 ? scale : scale + (size_t) a.np * (format ? 1 : 2);
        if (format) {
            float head[4];
            f16_to_f32_row((const uint16_t *) params, head, 4);
            s_low = f32_set1(head[0]);
            s_step = f32_set1(head[1]);
            z_low = f32_set1(head[2]);
            z_step = f32_set1(head[3]);
        } else {
            s_low = s_step = z_low = z_step = f32_set1(0.0f);
        }
    }
    static inline void pairs16(const uint8_t * p, uint8_t * s, uint8_t * z) {
        for (int i = 0; i < 16; i++) {
            z[i] = p[i] >> 4; // first: s may be p
            s[i] = p[i] & 15;
        }
    }
    template <int F> inline void load16(size_t i, f32x16 & s, f32x16 & z) const {
        if (F == 2) {
            uint8_t u[2][16];
            pairs16(scale + i, u[0], u[1]);
            s = f32_add(f32_mul(f32_load_u8(u[0]), s_step), s_low);
            z = f32_add(f32_mul(f32_load_u8(u[1]), z_step), z_low);
        } else if (F) {
            s = f32_add(f32_mul(f32_load_u8(scale + i), s_step), s_low);
            z = f32_add(f32_mul(f32_load_u8(zero + i), z_step), z_low);
        } else {
            s = f32_load_f16((const uint16_t *) scale + i);
            z = f32_load_f16((const uint16_t *) zero + i);
        }
    }
    // parameters [at, at + n), zeros behind up to n_pad
    template <int F> inline void get_as(size_t at, int n, int n_pad, float * s, float * z) const {
        int i = 0;
        for (; i + 16 <= n; i += 16) {
            f32x16 a, b;
            load16<F>(at + (size_t) i, a, b);
            f32_store(s + i, a);
            f32_store(z + i, b);
        }
        if (i < n) {
            uint8_t u[2][16] = {};
            uint16_t h[2][16] = {};
            for (int j = 0; j < n - i; j++) {
                if (F) {
                    u[0][j] = scale[at + (size_t) (i + j)];
                    u[1][j] = zero[at + (size_t) (i + j)];
                } else {
                    h[0][j] = ((const uint16_t *) scale)[at + (size_t) (i + j)];
                    h[1][j] = ((const uint16_t *) zero)[at + (size_t) (i + j)];
                }
            }
            if (F == 2) { pairs16(u[0], u[0], u[1]); }
            f32_store(s + i, F ? f32_add(f32_mul(f32_load_u8(u[0]), s_step), s_low) : f32_load_f16(h[0]));
            f32_store(z + i, F ? f32_add(f32_mul(f32_load_u8(u[1]), z_step), z_low) : f32_load_f16(h[1]));
            i = n;
        }
        for (; i < n_pad; i++) { s[i] = z[i] = 0.0f; }
    }
    inline void get(size_t at, int n, int n_pad, float * s, float * z) const {
        switch (format) {
        case 0: get_as<0>(at, n, n_pad, s, z); break;
        case 1: get_as<1>(at, n, n_pad, s, z); break;
        default: get_as<2>(at, n, n_pad, s, z); break;
        }
    }
};

// One page's queries: w8 [high, low][R][ws] (ws a multiple of 64), step and base [R].  y: scratch [R][ws]
template <int R>
static inline void fold_keys(const float * s, const float * z, int dp, int ws, const float * q, float * y, int8_t * w8,
    float * step, float * base) {
    constexpr int P = R % (2 * KVQ_TILES) ? R : 2 * KVQ_TILES; // rows at once: their chains of maxima run side by side
    f32x16 sum[R];
    for (int r0 = 0; r0 < R; r0 += P) {
        const float * x = q + (size_t) r0 * dp;
        float * t = y + (size_t) r0 * ws;
        f32x16 top[P], inv[P];
        for (int r = 0; r < P; r++) { top[r] = sum[r0 + r] = f32_set1(0.0f); }
        for (int i = 0; i < dp; i += 16) {
            const f32x16 a = f32_load(s + i), b = f32_load(z + i);
            for (int r = 0; r < P; r++) {
                const f32x16 v = f32_load(x + r * dp + i), w = f32_mul(v, a);
                sum[r0 + r] = f32_fma(v, b, sum[r0 + r]);
                top[r] = f32_absmax(top[r], w);
                f32_store(t + r * ws + i, w);
            }
        }
        for (int i = dp; i < ws; i += 16) {
            for (int r = 0; r < P; r++) { f32_store(t + r * ws + i, f32_set1(0.0f)); }
        }
        for (int r = 0; r < P; r++) {
            top[r] = f32_max_all(top[r]);
            inv[r] = f32_div(f32_set1(127.0f), f32_max(top[r], f32_set1(1e-36f)));
            step[r0 + r] = f32_first(top[r]) * (1.0f / 127.0f);
        }
        const f32x16 fine = f32_set1(KVQ_FINE);
        for (int r = 0; r < P; r++) {
            for (int i = r * ws; i < (r + 1) * ws; i += 64) {
                f32x16 high[4], low[4];
                for (int j = 0; j < 4; j++) {
                    low[j] = f32_mul(f32_load(t + i + 16 * j), inv[r]);
                    high[j] = f32_round(low[j]);
                    low[j] = f32_mul(f32_sub(low[j], high[j]), fine);
                }
                i8_store4(w8 + (size_t) r0 * ws + i, high[0], high[1], high[2], high[3]);
                i8_store4(w8 + (size_t) (R + r0) * ws + i, low[0], low[1], low[2], low[3]);
            }
        }
    }
    sum_rows<R>(base, sum);
}

// One page's probabilities under one group of parameters: w8 [R][n] of p*s*inv, and zeros[r] += f[r] * (p*z -
// middle*w8) by lanes
template <int R>
static inline void fold_values(const float * s, const float * z, float inv, float middle, int n, const float * p,
    const float * f, uint8_t * w8, f32x16 * zeros) {
    const f32x16 k = f32_set1(inv), mid = f32_set1(-middle);
    if (n % 64 == 0) {
        for (int i = 0; i < n; i += 64) {
            f32x16 a[4], b[4];
            for (int j = 0; j < 4; j++) {
                a[j] = f32_mul(f32_load(s + i + 16 * j), k);
                b[j] = f32_load(z + i + 16 * j);
            }
            for (int r = 0; r < R; r++) {
                const float * x = p + (size_t) r * n + i;
                f32x16 y[4], sum = f32_set1(0.0f), weights = sum;
                for (int j = 0; j < 4; j++) {
                    const f32x16 v = f32_load(x + 16 * j);
                    y[j] = f32_round(f32_mul(v, a[j]));
                    weights = f32_add(weights, y[j]);
                    sum = f32_fma(v, b[j], sum);
                }
                zeros[r] = f32_fma(f32_fma(weights, mid, sum), f32_set1(f[r]), zeros[r]);
                u8_store64(w8 + (size_t) r * n + i, y[0], y[1], y[2], y[3]);
            }
        }
        return;
    }
    for (int i = 0; i < n; i += 32) { // two rows fill a store
        const f32x16 a0 = f32_mul(f32_load(s + i), k), a1 = f32_mul(f32_load(s + i + 16), k), b0 = f32_load(z + i),
                     b1 = f32_load(z + i + 16);
        for (int r = 0; r < R; r++) {
            const float * x = p + (size_t) r * n + i;
            const f32x16 v0 = f32_load(x), v1 = f32_load(x + 16), y0 = f32_round(f32_mul(v0, a0)),
                         y1 = f32_round(f32_mul(v1, a1));
            zeros[r] =
                f32_fma(f32_fma(f32_add(y0, y1), mid, f32_fma(v1, b1, f32_mul(v0, b0))), f32_set1(f[r]), zeros[r]);
            if (n == 32 && r + 1 < R) {
                const f32x16 v2 = f32_load(x + 32), v3 = f32_load(x + 48), y2 = f32_round(f32_mul(v2, a0)),
                             y3 = f32_round(f32_mul(v3, a1));
                zeros[r + 1] = f32_fma(
                    f32_fma(f32_add(y2, y3), mid, f32_fma(v3, b1, f32_mul(v2, b0))), f32_set1(f[r + 1]), zeros[r + 1]);
                u8_store64(w8 + (size_t) r * n, y0, y1, y2, y3);
                r++;
            } else {
                u8_store16(w8 + (size_t) r * n + i, y0);
                u8_store16(w8 + (size_t) r * n + i + 16, y1);
            }
        }
    }
}

// ---------------------------------------------------------------- dots

// acc[t][r] += code*w8 of T tiles; W bits of the code at bit UP; V: weights without sign
template <int W, int UP, int R, int T, bool V>
static inline void dot_part(
    const uint8_t * p, size_t tile_stride, int n_chunks, const int8_t * w8, int ws, i32x16 (&acc)[T][R]) {
    for (int c = 0; c < n_chunks; c++) {
        u8x64 x[T];
        for (int t = 0; t < T; t++) { x[t] = u8_load(p + t * tile_stride + (size_t) c * KVQ_CHUNK_BYTES); }
        const int8_t * w = w8 + c * (32 / W);
        KVQ_UNROLL
        for (int j = 0; j < 8 / W; j++) {
            u8x64 f[T];
            for (int t = 0; t < T; t++) { f[t] = W == 8 ? x[t] : u8_field(x[t], j * W, (1 << W) - 1, UP); }
            KVQ_UNROLL
            for (int r = 0; r < R; r++) {
                const i8x4 b = i8_set4(w + r * ws + 4 * j);
                for (int t = 0; t < T; t++) { acc[t][r] = V ? dot4u(acc[t][r], f[t], b) : dot4(acc[t][r], f[t], b); }
            }
        }
    }
}

// sum code*w8 of the tiles [tile, tile + T)
template <int BITS, int R, int T, bool V>
static inline void dot_tiles(
    const kvq_view & a, const uint8_t * codes, int tile, const int8_t * w8, int ws, i32x16 (&acc)[T][R]) {
    for (int t = 0; t < T; t++) {
        for (int r = 0; r < R; r++) { acc[t][r] = i32_zero(); }
    }
    const size_t s0 = (size_t) a.n_chunks[0] * KVQ_CHUNK_BYTES;
    if (BITS == 3) {
        const size_t s1 = (size_t) a.n_chunks[1] * KVQ_CHUNK_BYTES;
        dot_part<2, 0, R, T, V>(codes + tile * s0, s0, a.n_chunks[0], w8, ws, acc);
        dot_part<1, 2, R, T, V>(codes + a.offset[1] + tile * s1, s1, a.n_chunks[1], w8, ws, acc);
    } else if (BITS > 0) {
        dot_part<BITS == 3 || BITS == 0 ? 1 : BITS, 0, R, T, V>(codes + tile * s0, s0, a.n_chunks[0], w8, ws, acc);
    }
}

// Scratch of a run (kvq_work_bytes). K folds a group of cells at a time, V every group of channels.
struct affine_work {
    float *s, *z, *y;   // parameters of one group; scaled queries of one page
    int8_t * w8;        // K [page][high, low][row][ws]    V [page][group][row][n_cells]
    float *step, *base; // [page][group][row]; V: base [group][row]
    uint8_t * u8;       // unpacked codes of the run's pages, nb_u8 bytes each
    size_t nb_u8;
    affine_work(const kvq_view & a, void * work) {
        const size_t n = (size_t) pad_to(a.codec.n_cells, 64), d = (size_t) pad_to(a.codec.head_size, 64),
                     longer = n > d ? n : d;
        const size_t groups = (size_t) a.n_groups;
        s = (float *) work;
        z = s + longer;
        y = z + longer;
        step = y + KVQ_WORK_ROWS * longer;
        base = step + KVQ_MAX_RUN * KVQ_WORK_ROWS * groups;
        w8 = (int8_t *) (base + pad_to((int) (KVQ_MAX_RUN * KVQ_WORK_ROWS * groups), 16));
        u8 = (uint8_t *) w8 + KVQ_MAX_RUN * KVQ_WORK_ROWS * (a.codec.role == KVQ_ROLE_V ? groups * n : 2 * d);
        nb_u8 = n * d;
    }
};

// sums of the high bytes, then of the low bytes
template <int BITS, int R, int T, bool BOTH>
static inline void key_sums(
    const kvq_view & a, const uint8_t * codes, int tile, const int8_t * w8, int ws, i32x16 (&acc)[T][2 * R]) {
    if (BOTH) {
        dot_tiles<BITS, 2 * R, T, false>(a, codes, tile, w8, ws, acc);
        return;
    }
    for (int low = 0; low < 2; low++) {
        i32x16 part[T][R];
        dot_tiles<BITS, R, T, false>(a, codes, tile, w8 + (size_t) low * R * ws, ws, part);
        for (int t = 0; t < T; t++) {
            for (int r = 0; r < R; r++) { acc[t][low * R + r] = part[t][r]; }
        }
    }
}

// logits of R rows against a run
template <int BITS, int R>
static void score_rows(const kvq_view & a, int n_pages, const uint8_t * const * codes, const param_reader * in,
    int n_rows, const float * q, float * logits, const affine_work & w) {
    constexpr int T = 2 * R * KVQ_TILES <= KVQ_SUMS ? KVQ_TILES : 1;
    constexpr bool BOTH = 2 * R * T <= KVQ_SUMS; // high and low bytes as so many rows; else one after the other
    const int D = a.codec.head_size, n = a.codec.n_cells, ws = pad_to(D, 64);
    for (int cell = 0; cell < n; cell += a.codec.group) {
        for (int i = 0; i < n_pages; i++) {
            in[i].get((size_t) (cell / a.codec.group) * D, D, a.dp, w.s, w.z);
            fold_keys<R>(w.s, w.z, a.dp, ws, q, w.y, w.w8 + (size_t) i * 2 * R * ws, w.step + i * R, w.base + i * R);
        }
        for (int i = 0; i < n_pages; i++) {
            const int8_t * w8 = w.w8 + (size_t) i * 2 * R * ws;
            float * to = logits + (size_t) i * n_rows * n;
            for (int tile = cell / 16; tile < (cell + a.codec.group) / 16;) {
#define TILES(T)                                                                                                       \
    i32x16 acc[T][2 * R];                                                                                              \
    key_sums<BITS, R, T, BOTH>(a, codes[i], tile, w8, ws, acc);                                                        \
    for (int r = 0; r < R; r++) {                                                                                      \
        const f32x16 m = f32_set1(w.step[i * R + r]), m2 = f32_set1(w.step[i * R + r] * (1.0f / KVQ_FINE)),            \
                     b = f32_set1(w.base[i * R + r]);                                                                  \
        for (int t = 0; t < T; t++) {                                                                                  \
            f32_store(to + (size_t) r * n + 16 * (tile + t),                                                           \
                f32_fma(f32_from_i32(acc[t][r]), m, f32_fma(f32_from_i32(acc[t][R + r]), m2, b)));                     \
        }                                                                                                              \
    }                                                                                                                  \
    tile += T
                if (tile + T <= (cell + a.codec.group) / 16) {
                    TILES(T);
                } else {
                    TILES(1);
                }
#undef TILES
            }
        }
    }
}

// out of R rows += a run
template <int BITS, int R>
static void accum_rows(const kvq_view & a, int n_pages, const uint8_t * const * codes, const param_reader * in,
    int n_rows, const float * p, const float * f, float * out, const affine_work & w) {
    constexpr int T = R > 4 ? 1 : KVQ_TILES; // sums of bytes and outputs share the registers
    const int n = a.codec.n_cells, groups = a.n_groups;
    const float middle = 0.5f * (float) ((1 << a.codec.bits) - 1);
    for (int g = 0; g < groups; g++) {
        f32x16 zeros[R];
        for (int r = 0; r < R; r++) { zeros[r] = f32_set1(0.0f); }
        for (int i = 0; i < n_pages; i++) {
            in[i].get((size_t) g * n, n, n, w.s, w.z);
            f32x16 top = f32_set1(0.0f);
            for (int t = 0; t < n; t += 16) { // the middle code's value takes the place of the zero
                const f32x16 s = f32_load(w.s + t);
                top = f32_max(top, s);
                f32_store(w.z + t, f32_fma(s, f32_set1(middle), f32_load(w.z + t)));
            }
            const float most = f32_hmax(top), step = most * (1.0f / 255.0f);
            const size_t at = (size_t) (i * groups + g) * R;
            fold_values<R>(w.s, w.z, most > 0.0f ? 255.0f / (most > 1e-36f ? most : 1e-36f) : 0.0f, middle * step, n,
                p + (size_t) i * n_rows * n, f + i * KVQ_MAX_ROWS, (uint8_t *) w.w8 + at * n, zeros);
            for (int r = 0; r < R; r++) { w.step[at + r] = step * f[i * KVQ_MAX_ROWS + r]; }
        }
        sum_rows<R>(w.base + g * R, zeros);
    }
    for (int g = 0; g < groups; g++) {
        const int end = imin(((g + 1) * a.codec.group + 15) / 16, a.n_tiles);
        for (int tile = g * a.codec.group / 16; tile < end;) {
#define TILES(T)                                                                                                       \
    f32x16 o[T][R];                                                                                                    \
    for (int r = 0; r < R; r++) {                                                                                      \
        const f32x16 b = f32_set1(w.base[g * R + r]);                                                                  \
        for (int t = 0; t < T; t++) { o[t][r] = f32_add(f32_load(out + (size_t) r * a.dp + 16 * (tile + t)), b); }     \
    }                                                                                                                  \
    for (int i = 0; i < n_pages; i++) {                                                                                \
        const size_t at = (size_t) (i * groups + g) * R;                                                               \
        i32x16 acc[T][R];                                                                                              \
        dot_tiles<BITS, R, T, true>(a, codes[i], tile, w.w8 + at * n, n, acc);                                         \
        for (int r = 0; r < R; r++) {                                                                                  \
            const f32x16 m = f32_set1(w.step[at + r]);                                                                 \
            for (int t = 0; t < T; t++) { o[t][r] = f32_fma(f32_from_i32(acc[t][r]), m, o[t][r]); }                    \
        }                                                                                                              \
    }                                                                                                                  \
    for (int r = 0; r < R; r++) {                                                                                      \
        for (int t = 0; t < T; t++) { f32_store(out + (size_t) r * a.dp + 16 * (tile + t), o[t][r]); }                 \
    }                                                                                                                  \
    tile += T
            if (tile + T <= end) {
                TILES(T);
            } else {
                TILES(1);
            }
#undef TILES
        }
    }
}

// ---------------------------------------------------------------- unpacked codes

// Codes as bytes, [tile][dots/4][lane][4]: what many rows share. Returns their view, as if of 8 bits.
static kvq_view unpack(const kvq_view & a, const uint8_t * codes, uint8_t * out) {
    const int n_dots = a.codec.role == KVQ_ROLE_V ? a.codec.n_cells : a.codec.head_size, quads = pad_to(n_dots, 32) / 4;
    kvq_view u = a;
    u.n_parts = 1;
    u.n_chunks[0] = quads;
    if (!a.n_parts) { u.n_chunks[0] = 0; }
    for (int part = 0; part < a.n_parts; part++) {
        const int w = a.width[part], planes = 8 / w, mask = (1 << w) - 1;
        for (int tile = 0; tile < a.n_tiles; tile++) {
            for (int c = 0; c < a.n_chunks[part]; c++) {
                const u8x64 x =
                    u8_load(codes + a.offset[part] + ((size_t) tile * a.n_chunks[part] + c) * KVQ_CHUNK_BYTES);
                for (int j = 0; j < planes; j++) {
                    uint8_t * to = out + ((size_t) tile * quads + c * planes + j) * KVQ_CHUNK_BYTES;
                    const u8x64 f = u8_field(x, j * w, mask, a.shift[part]);
                    u8_store(to, part ? u8_or(u8_load(to), f) : f);
                }
            }
        }
    }
    return u;
}

// call(BITS, R, r) by the bits of a view
#define KVQ_BITS(bits, n_rows)                                                                                         \
    switch (bits) {                                                                                                    \
    case 0: KVQ_ROWS(n_rows, CALL0); break;                                                                            \
    case 1: KVQ_ROWS(n_rows, CALL1); break;                                                                            \
    case 2: KVQ_ROWS(n_rows, CALL2); break;                                                                            \
    case 3: KVQ_ROWS(n_rows, CALL3); break;                                                                            \
    case 4: KVQ_ROWS(n_rows, CALL4); break;                                                                            \
    case 8: KVQ_ROWS(n_rows, CALL8); break;                                                                            \
    }
#define CALL0(R, r) CALL(0, R, r)
#define CALL1(R, r) CALL(1, R, r)
#define CALL2(R, r) CALL(2, R, r)
#define CALL3(R, r) CALL(3, R, r)
#define CALL4(R, r) CALL(4, R, r)
#define CALL8(R, r) CALL(8, R, r)

// The run's codes and parameters; codes as bytes when many rows share them.
struct affine_run {
    kvq_view view;
    int bits;
    const uint8_t * codes[KVQ_MAX_RUN];
    param_reader in[KVQ_MAX_RUN];
    affine_run(const kvq_view & a, int n_rows, const kvq_run & run, const affine_work & w) :
        view(a),
        bits(a.codec.bits),
        in{ { a, run.params[0] }, { a, run.params[run.n_pages > 1 ? 1 : 0] },
            { a, run.params[run.n_pages > 2 ? 2 : 0] }, { a, run.params[run.n_pages > 3 ? 3 : 0] } } {
        const bool many = n_rows > 8 && bits;
        for (int i = 0; i < run.n_pages; i++) {
            codes[i] = (const uint8_t *) run.codes[i];
            if (many) {
                view = unpack(a, codes[i], w.u8 + i * w.nb_u8);
                codes[i] = w.u8 + i * w.nb_u8;
            }
        }
        bits = many ? 8 : bits;
    }
};
static_assert(KVQ_MAX_RUN == 4, "readers of a run are listed one by one");

static void score_affine(
    const kvq_view & a, int n_rows, const kvq_run & run, const float * q, float * logits, void * work) {
    const affine_work w(a, work);
    const affine_run x(a, n_rows, run, w);
#define CALL(BITS, R, r)                                                                                               \
    score_rows<BITS, R>(x.view, run.n_pages, x.codes, x.in, n_rows, q + (size_t) (r) * a.dp,                           \
        logits + (size_t) (r) * a.codec.n_cells, w)
    KVQ_BITS(x.bits, n_rows)
#undef CALL
}

static void accum_affine(
    const kvq_view & a, int n_rows, const kvq_run & run, const float * p, const float * f, float * out, void * work) {
    const affine_work w(a, work);
    const affine_run x(a, n_rows, run, w);
#define CALL(BITS, R, r)                                                                                               \
    accum_rows<BITS, R>(x.view, run.n_pages, x.codes, x.in, n_rows, p + (size_t) (r) * a.codec.n_cells, f + r,         \
        out + (size_t) (r) * a.dp, w)
    KVQ_BITS(x.bits, n_rows)
#undef CALL
}

#undef KVQ_BITS
#undef CALL0
#undef CALL1
#undef CALL2
#undef CALL3
#undef CALL4
#undef CALL8

// ---------------------------------------------------------------- f32 arithmetic

// decoded values as the type's decode gives them, rounded to f16
static void affine_to_tile(const kvq_view & a, const void * codes, const void * params, float * out, void * work) {
    const bool V = a.codec.role == KVQ_ROLE_V;
    const int n_dots = V ? a.codec.n_cells : a.codec.head_size, stride = V ? a.dp : a.codec.n_cells,
              quads = pad_to(n_dots, 32) / 4;
    uint8_t * u8 = affine_work(a, work).u8;
    if (a.codec.bits) {
        unpack(a, (const uint8_t *) codes, u8);
    } else {
        for (size_t i = 0; i < (size_t) a.n_tiles * quads * KVQ_CHUNK_BYTES; i += 64) {
            u8_store(u8 + i, u8_field(u8_load(u8 + i), 0, 0, 0));
        }
    }
    const param_reader in(a, params);
    const f32x16 most = f32_set1(65504.0f), least = f32_set1(-65504.0f);
    for (int tile = 0; tile < a.n_tiles; tile++) {
        const size_t at = (size_t) (tile * 16 / a.codec.group) * n_dots;
        for (int d = 0; d < n_dots; d += 16) {
            float s[16], z[16];
            in.get(at + (size_t) d, imin(16, n_dots - d), 16, s, z);
            for (int i = 0; i < imin(16, n_dots - d); i++) {
                const u8x64 x = u8_load(u8 + ((size_t) tile * quads + (d + i) / 4) * KVQ_CHUNK_BYTES);
                const f32x16 y = f32_add(f32_set1(z[i]), f32_mul(f32_set1(s[i]), f32_from_byte(x, i % 4)));
                uint16_t h[16];
                f32_store_f16(h, f32_max(least, f32_min(most, y)));
                f32_store(out + (size_t) (d + i) * stride + 16 * tile, f32_load_f16(h));
            }
        }
    }
    for (int d = n_dots; !V && d < a.dp; d++) { // channels that pad the head
        for (int t = 0; t < stride; t += 16) { f32_store(out + (size_t) d * stride + t, f32_set1(0.0f)); }
    }
}

} // namespace

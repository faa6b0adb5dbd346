// Kernels over lattice blocks (types/lattice.h), included by kernels_impl.h. The queries come rotated and the output
// stays rotated, so a cell costs table look-ups and byte dots only:
//   logit = s_cell * step * sum_j sum_vec point_j[index] * (high_j[vec] + low_j[vec]/126)         point_j =
//       coordinate j of the points
// Points are bytes: whole numbers of their grid's step. The indices of 16 lanes x 4 dots fill a register; each
// coordinate is one look-up, shared by all query rows and both bytes.

namespace KVQ_NS {

static inline i32x16 dot4(i32x16 acc, u8x64 codes, const int8_t * w) { return dot4(acc, codes, i8_set4(w)); }

template <int W> static constexpr int lattice_stride() { return W < 4 ? 16 : 1 << W; }

// coordinate j of the points as bytes in which `zero` (128 or 0) stands for 0
template <int W> static inline const uint8_t * lattice_table(const kvq_lattice_view & a, int zero, int j) {
    return a.table + (size_t) (zero ? j : a.d + j) * lattice_stride<W>();
}

// indices of 16 lanes and the dots 4k .. 4k+3 of a tile
template <int W> static inline u8x64 lattice_index(const kvq_lattice_view & a, const uint8_t * codes, int tile, int k) {
    constexpr int L = W == 6 ? 4 : W, planes = 8 / L;
    const uint8_t * p = codes + ((size_t) tile * a.n_chunks[0] + k / planes) * 64;
    const u8x64 low = u8_field(u8_load(p), k % planes * L, (1 << L) - 1, 0);
    if (W != 6) { return low; }
    const uint8_t * h = codes + a.offset[1] + ((size_t) tile * a.n_chunks[1] + k / 4) * 64;
    return u8_or(low, u8_field(u8_load(h), k % 4 * 2, 3, 4));
}

static inline void lattice_scales(const kvq_lattice_view & a, const void * params, float * scale) {
    const int n = a.codec.n_cells;
    if (!a.codec.scale) {
        f16_to_f32_row((const uint16_t *) params, scale, n);
        return;
    }
    float top;
    f16_to_f32_row((const uint16_t *) params, &top, 1);
    uint8_t levels[KVQ_MAX_CELLS];
    const uint8_t * from = (const uint8_t *) params + 2;
    if (a.codec.scale == 2) {
        for (int i = 0; i < n; i++) { levels[i] = from[i / 2] >> i % 2 * 4 & 15; }
        from = levels;
    }
    const f32x16 s = f32_set1(top * (a.codec.scale == 1 ? 1.0f / 65025.0f : 1.0f / 225.0f));
    for (int i = 0; i < n; i += 16) {
        const f32x16 u = f32_load_u8(from + i);
        f32_store(scale + i, f32_mul(f32_mul(u, u), s));
    }
}

// logits of R rows against T tiles of 16 cells: sums of the high bytes, then of the low bytes
template <int W, int R, int T>
static inline void score_lattice_tiles(const kvq_lattice_view & a, const uint8_t * codes, int tile, const float * scale,
    const kvq_lattice_query * q, const float * add, float * logits) {
    const int n = a.codec.n_cells, n_k = (a.n_dots + 3) / 4, low = a.d * a.dot_stride;
    i32x16 acc[T][2 * R];
    for (int t = 0; t < T; t++) {
        for (int r = 0; r < 2 * R; r++) { acc[t][r] = i32_zero(); }
    }
    for (int k = 0; k < n_k; k++) {
        u8x64 index[T];
        for (int t = 0; t < T; t++) { index[t] = lattice_index<W>(a, codes, tile + t, k); }
        for (int j = 0; j < a.d; j++) {
            u8x64 x[T];
            for (int t = 0; t < T; t++) { x[t] = u8_lookup<(1 << W)>(index[t], lattice_table<W>(a, KVQ_DOT4_ZERO, j)); }
            for (int r = 0; r < R; r++) {
                const int8_t * w = q[r].q8 + j * a.dot_stride + 4 * k;
                const i8x4 high = i8_set4(w), rest = i8_set4(w + low);
                for (int t = 0; t < T; t++) {
                    acc[t][r] = dot4(acc[t][r], x[t], high);
                    acc[t][R + r] = dot4(acc[t][R + r], x[t], rest);
                }
            }
        }
    }
    for (int t = 0; t < T; t++) {
        const f32x16 s = f32_load(scale + 16 * (tile + t));
        for (int r = 0; r < R; r++) {
            const f32x16 high = f32_add(f32_from_i32(acc[t][r]), f32_set1(-KVQ_DOT4_ZERO * q[r].sum[0]));
            const f32x16 rest = f32_add(f32_from_i32(acc[t][R + r]), f32_set1(-KVQ_DOT4_ZERO * q[r].sum[1]));
            const size_t at = (size_t) r * n + 16 * (tile + t);
            const f32x16 y = f32_mul(f32_fma(rest, f32_set1(1.0f / KVQ_LATTICE_FINE), high), f32_set1(q[r].step));
            f32_store(logits + at, add ? f32_fma(y, s, f32_load(add + at)) : f32_mul(y, s));
        }
    }
}

template <int W, int R>
static void score_lattice_rows(const kvq_lattice_view & a, const uint8_t * codes, const float * scale,
    const kvq_lattice_query * q, const float * add, float * logits) {
    constexpr int T = 2 * R * KVQ_TILES <= KVQ_SUMS ? KVQ_TILES : 1;
    for (int tile = 0; tile < a.codec.n_cells / 16; tile += T) { // 32 cells or a multiple
        score_lattice_tiles<W, R, T>(a, codes, tile, scale, q, add, logits);
    }
}

// p*scale under the page's largest scale, p <= 1, the same step for every row: w8 in 0..255, or (BYTES 2) high and
// low bytes as of queries
template <int W, int R, int BYTES>
static void accum_lattice_bytes(const kvq_lattice_view & a, const uint8_t * codes, const float * scale, const float * p,
    const float * f, float * out) {
    constexpr int N = R * BYTES, J = N * KVQ_TILES <= 2 * KVQ_SUMS ? KVQ_TILES : 1; // J coordinates share an index
    constexpr int zero = BYTES == 2 ? KVQ_DOT4_ZERO : KVQ_DOT4U_ZERO;
    constexpr float levels = BYTES == 2 ? KVQ_LATTICE_TOP : 255.0f;
    const int n = a.codec.n_cells, stride = a.n_tiles * 16;
    f32x16 top = f32_load(scale);
    for (int t = 16; t < n; t += 16) { top = f32_max(top, f32_load(scale + t)); }
    const float most = f32_hmax(top);
    const f32x16 inv = f32_set1(most > 0.0f ? levels / (most > 1e-36f ? most : 1e-36f) : 0.0f);
    int8_t w8[N * KVQ_MAX_CELLS];
    float step[N], base[N];
    for (int r = 0; r < R; r++) {
        f32x16 sum[2] = { f32_set1(0.0f), f32_set1(0.0f) };
        for (int t = 0; t < n; t += 16) {
            const f32x16 y = f32_mul(f32_mul(f32_load(p + (size_t) r * n + t), f32_load(scale + t)), inv),
                         high = f32_round(y);
            sum[0] = f32_add(sum[0], high);
            if (BYTES == 1) {
                u8_store16((uint8_t *) w8 + r * n + t, high);
            } else {
                const f32x16 low = f32_round(f32_mul(f32_sub(y, high), f32_set1(KVQ_LATTICE_FINE)));
                sum[1] = f32_add(sum[1], low);
                i8_store(w8 + r * n + t, high);
                i8_store(w8 + (R + r) * n + t, low);
            }
        }
        step[r] = most * (1.0f / levels) * a.step * f[r];
        base[r] = zero ? -zero * f32_sum(sum[0]) : 0.0f;
        if (BYTES == 2) {
            step[N - R + r] = step[r] * (1.0f / KVQ_LATTICE_FINE);
            base[N - R + r] = zero ? -zero * f32_sum(sum[1]) : 0.0f;
        }
    }
    for (int tile = 0; tile < a.n_tiles; tile++) {
        for (int j0 = 0; j0 < a.d; j0 += J) {
            i32x16 acc[J][N];
            for (int j = 0; j < J; j++) {
                for (int r = 0; r < N; r++) { acc[j][r] = i32_zero(); }
            }
            for (int k = 0; k < n / 4; k++) {
                const u8x64 index = lattice_index<W>(a, codes, tile, k);
                u8x64 x[J];
                for (int j = 0; j < J; j++) { x[j] = u8_lookup<(1 << W)>(index, lattice_table<W>(a, zero, j0 + j)); }
                for (int r = 0; r < N; r++) {
                    const i8x4 w = i8_set4(w8 + r * n + 4 * k);
                    for (int j = 0; j < J; j++) {
                        acc[j][r] = BYTES == 2 ? dot4(acc[j][r], x[j], w) : dot4u(acc[j][r], x[j], w);
                    }
                }
            }
            for (int j = 0; j < J; j++) {
                for (int r = 0; r < R; r++) {
                    float * o = out + (size_t) r * a.d * stride + (j0 + j) * stride + tile * 16;
                    f32x16 y =
                        f32_fma(f32_add(f32_from_i32(acc[j][r]), f32_set1(base[r])), f32_set1(step[r]), f32_load(o));
                    if (BYTES == 2) {
                        y = f32_fma(f32_add(f32_from_i32(acc[j][N - R + r]), f32_set1(base[N - R + r])),
                            f32_set1(step[N - R + r]), y);
                    }
                    f32_store(o, y);
                }
            }
        }
    }
}

template <int W, int R>
static void accum_lattice_rows(const kvq_lattice_view & a, const uint8_t * codes, const float * scale, const float * p,
    const float * f, float * out) {
    if (W == 8 && a.wide) {
        accum_lattice_bytes<W, R, W == 8 ? 2 : 1>(a, codes, scale, p, f, out);
    } else {
        accum_lattice_bytes<W, R, 1>(a, codes, scale, p, f, out);
    }
}

// Stages of distance h .. h*K/2 of a Hadamard transform along columns x[channel][16], K columns in registers
template <int K> static inline void butterflies(int D, int h, float * x) {
    for (int i = 0; i < D; i += K * h) {
        for (int c = i; c < i + h; c++) {
            f32x16 v[K];
            KVQ_UNROLL
            for (int k = 0; k < K; k++) { v[k] = f32_load(x + (size_t) (c + k * h) * 16); }
            KVQ_UNROLL
            for (int d = 1; d < K; d *= 2) {
                KVQ_UNROLL
                for (int k = 0; k < K; k++) {
                    if (!(k & d)) {
                        const f32x16 u = v[k], w = v[k + d];
                        v[k] = f32_add(u, w);
                        v[k + d] = f32_sub(u, w);
                    }
                }
            }
            KVQ_UNROLL
            for (int k = 0; k < K; k++) { f32_store(x + (size_t) (c + k * h) * 16, v[k]); }
        }
    }
}

// As kvq_hadamard without its norm, to the bit
static void hadamard_columns(int block, int D, float * x) {
    int h = 1;
    for (; 8 * h <= block; h *= 8) { butterflies<8>(D, h, x); }
    if (4 * h <= block) {
        butterflies<4>(D, h, x);
    } else if (2 * h <= block) {
        butterflies<2>(D, h, x);
    }
}

// Keys without their mean, 16 cells at a time, channels in columns x[channel][16 cells]:
//   k = R_pos (H (s * point) + mean),  or  R_pos (R_sealed^-1 H (s * point) + mean) when they were rotated before
//       encoding;   logit = q . k
// cos and sin of a position are those of 64*(pos/64) turned by those of pos%64 (kvq_rotary).
template <int W>
static void rope_columns(const kvq_lattice_view & a, const uint8_t * codes, int tile, f32x16 scale, float * x) {
    const int D = a.codec.head_size, n_k = (a.n_dots + 3) / 4;
    const f32x16 s = f32_mul(scale, f32_set1(a.step * a.norm)), off = f32_set1(-128.0f);
    for (int k = 0; k < n_k; k++) {
        const u8x64 index = lattice_index<W>(a, codes, tile, k);
        for (int j = 0; j < a.d; j++) {
            uint8_t bytes[64 + 4];
            u8_store(bytes, u8_lookup<(1 << W)>(index, lattice_table<W>(a, 128, j)));
            for (int b = 0; b < 4 && 4 * k + b < a.n_dots; b++) {
                float * column = x + (size_t) ((4 * k + b) * a.d + j) * 16;
                f32_store(column, f32_mul(f32_add(f32_every_4th(bytes + b), off), s));
            }
        }
    }
    hadamard_columns(a.block, D, x);
}

static void rope_rotate(const kvq_rotary & rot, const int32_t * pos, float * x, bool inverse = false) {
    const int n = rot.n_dims / 2;
    const f32x16 back = f32_set1(1.0f / (rot.high[0] * rot.high[0] + rot.high[n] * rot.high[n])); // magnitudes
    int run = 0; // consecutive positions share the coarse part
    while (run < 16 && pos[run] == pos[0] + run && pos[0] >= 0) { run++; }
    for (int i = 0; i < n; i++) {
        f32x16 c, s;
        if (run == 16) {
            const float *hi = rot.high + (size_t) (pos[0] / 64) * 2 * n,
                        *lo = rot.low + (size_t) i * 2 * KVQ_ROTARY_LOW + pos[0] % 64;
            const f32x16 hc = f32_set1(hi[i]), hs = f32_set1(hi[n + i]), lc = f32_load(lo),
                         ls = f32_load(lo + KVQ_ROTARY_LOW);
            c = f32_sub(f32_mul(hc, lc), f32_mul(hs, ls));
            s = f32_fma(hs, lc, f32_mul(hc, ls));
        } else {
            float cs[16], sn[16];
            for (int t = 0; t < 16; t++) {
                const int at = pos[t] < 0 ? 0 : pos[t];
                const float *hi = rot.high + (size_t) (at / 64) * 2 * n,
                            *lo = rot.low + (size_t) i * 2 * KVQ_ROTARY_LOW + at % 64;
                cs[t] = hi[i] * lo[0] - hi[n + i] * lo[KVQ_ROTARY_LOW];
                sn[t] = hi[n + i] * lo[0] + hi[i] * lo[KVQ_ROTARY_LOW];
            }
            c = f32_load(cs);
            s = f32_load(sn);
        }
        if (inverse) {
            c = f32_mul(c, back);
            s = f32_sub(f32_set1(0.0f), f32_mul(s, back));
        }
        float *a = x + (size_t) (rot.neox ? i : 2 * i) * 16, *b = x + (size_t) (rot.neox ? i + n : 2 * i + 1) * 16;
        const f32x16 u = f32_load(a), v = f32_load(b);
        f32_store(a, f32_sub(f32_mul(u, c), f32_mul(v, s)));
        f32_store(b, f32_fma(u, s, f32_mul(v, c)));
    }
}

template <int R> static void rope_dot(int D, int dp, const float * x, const float * q, float * logits, int stride) {
    f32x16 acc[R];
    for (int r = 0; r < R; r++) { acc[r] = f32_set1(0.0f); }
    for (int c = 0; c < D; c++) {
        const f32x16 k = f32_load(x + (size_t) c * 16);
        for (int r = 0; r < R; r++) { acc[r] = f32_fma(k, f32_set1(q[(size_t) r * dp + c]), acc[r]); }
    }
    for (int r = 0; r < R; r++) { f32_store(logits + (size_t) r * stride, acc[r]); }
}

// Decoded keys of 16 cells in columns x[channel of the head][16 cells].
static void decoded_columns(
    const kvq_lattice_keys & keys, const uint8_t * codes, const float (&scale)[2][KVQ_MAX_CELLS], int t0, float * x) {
    float own[KVQ_MAX_HEAD / 2 * 16]; // of a half
    const kvq_codec & whole = keys.half[0].whole;
    if (whole.split) { memset(x, 0, sizeof(float) * 16 * (size_t) whole.head_size); }
    for (int half = 0; half < keys.n; half++) {
        const kvq_lattice_view & a = keys.half[half];
        const f32x16 s = f32_load(scale[half] + t0);
        float * to = whole.split ? own : x;
        switch (a.codec.bits * a.codec.group) {
        case 2: rope_columns<2>(a, codes + a.codes_at, t0 / 16, s, to); break;
        case 4: rope_columns<4>(a, codes + a.codes_at, t0 / 16, s, to); break;
        case 6: rope_columns<6>(a, codes + a.codes_at, t0 / 16, s, to); break;
        default: rope_columns<8>(a, codes + a.codes_at, t0 / 16, s, to); break;
        }
        for (int i = 0; whole.split && i < a.codec.head_size; i++) {
            memcpy(x + (size_t) kvq_lattice_channel(whole, a.fast, i) * 16, own + (size_t) i * 16, 16 * sizeof(float));
        }
    }
}

// Columns in the order of a block become those of the head's channels.
static void unsort_columns(int D, const kvq_order & order, int head, float * x) {
    float own[KVQ_MAX_HEAD * 16];
    const uint16_t * channel = order.channel + (size_t) head * (size_t) D;
    const float * back = order.back + (size_t) head * (size_t) D;
    for (int i = 0; i < D; i++) {
        f32_store(own + (size_t) channel[i] * 16, f32_mul(f32_load(x + (size_t) i * 16), f32_set1(back[i])));
    }
    memcpy(x, own, sizeof(float) * 16 * (size_t) D);
}

static void score_rope(const kvq_lattice_keys & a, int n_rows, const uint8_t * codes, const void * params,
    const kvq_order * order, int head, const float * mean, const kvq_rotary * rot, const int32_t * sealed,
    const int32_t * pos, int dp, const float * q, float * logits) {
    float scale[2][KVQ_MAX_CELLS], x[KVQ_MAX_HEAD * 16];
    for (int half = 0; half < a.n; half++) {
        lattice_scales(a.half[half], (const uint8_t *) params + a.half[half].params_at, scale[half]);
    }
    const int n = a.half[0].codec.n_cells, D = a.half[0].whole.head_size;
    for (int t0 = 0; t0 < n; t0 += 16) {
        decoded_columns(a, codes, scale, t0, x);
        if (order) { unsort_columns(D, *order, head, x); }
        if (rot && sealed) { rope_rotate(*rot, sealed + t0, x, true); }
        for (int c = 0; mean && c < D; c++) {
            f32_store(x + (size_t) c * 16, f32_add(f32_load(x + (size_t) c * 16), f32_set1(mean[c])));
        }
        if (rot) { rope_rotate(*rot, pos + t0, x); }
#define CALL(R, r) rope_dot<R>(D, dp, x, q + (size_t) (r) * dp, logits + (size_t) (r) * n + t0, n)
        KVQ_ROWS(n_rows, CALL);
#undef CALL
    }
}

#define CALL_2(R, r) CALL(2, R, r)
#define CALL_4(R, r) CALL(4, R, r)
#define CALL_6(R, r) CALL(6, R, r)
#define CALL_8(R, r) CALL(8, R, r)
#define KVQ_WIDTHS                                                                                                     \
    switch (a.codec.bits * a.codec.group) {                                                                            \
    case 2: KVQ_ROWS(n_rows, CALL_2); break;                                                                           \
    case 4: KVQ_ROWS(n_rows, CALL_4); break;                                                                           \
    case 6: KVQ_ROWS(n_rows, CALL_6); break;                                                                           \
    default: KVQ_ROWS(n_rows, CALL_8); break;                                                                          \
    }

static void score_lattice(const kvq_lattice_view & a, int n_rows, const kvq_run & run, const kvq_lattice_query * q,
    const float * add, float * logits) {
    const int n = a.codec.n_cells;
    for (int i = 0; i < run.n_pages;
        i++, logits += (size_t) n_rows * n, add = add ? add + (size_t) n_rows * n : nullptr) {
        const uint8_t * codes = (const uint8_t *) run.codes[i] + a.codes_at;
        float scale[KVQ_MAX_CELLS];
        lattice_scales(a, (const uint8_t *) run.params[i] + a.params_at, scale);
#define CALL(W, R, r)                                                                                                  \
    score_lattice_rows<W, R>(a, codes, scale, q + r, add ? add + (size_t) (r) * n : nullptr, logits + (size_t) (r) * n)
        KVQ_WIDTHS
#undef CALL
    }
}

static void accum_lattice(
    const kvq_lattice_view & a, int n_rows, const kvq_run & run, const float * p, const float * f, float * out) {
    const int n = a.codec.n_cells;
    for (int i = 0; i < run.n_pages; i++, p += (size_t) n_rows * n, f += KVQ_MAX_ROWS) {
        const uint8_t * codes = (const uint8_t *) run.codes[i];
        float scale[KVQ_MAX_CELLS];
        lattice_scales(a, run.params[i], scale);
#define CALL(W, R, r)                                                                                                  \
    accum_lattice_rows<W, R>(a, codes, scale, p + (size_t) (r) * n, f + r, out + (size_t) (r) * a.d * a.n_tiles * 16)
        KVQ_WIDTHS
#undef CALL
    }
}

#undef KVQ_WIDTHS
#undef CALL_2
#undef CALL_4
#undef CALL_6
#undef CALL_8

} // namespace

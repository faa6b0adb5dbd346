// Predictions and reconstructed rows (types/predictor.h, policy/chain.h), included by kernels_impl.h. No fused
// multiply-add: every instruction set gives the bits of the plain loops.

namespace KVQ_NS {

static void quantise_row(int n, const float * x, int8_t * x8, float * s) {
    f32x16 top = f32_set1(0.0f);
    int i = 0;
    for (; i + 16 <= n; i += 16) { top = f32_absmax(top, f32_load(x + i)); }
    float amax = f32_hmax(top);
    for (; i < n; i++) { amax = fmaxf(amax, fabsf(x[i])); }
    const float inv = amax >= 1e-30f ? 127.0f / amax : 0.0f;
    for (i = 0; i + 16 <= n; i += 16) { i8_store(x8 + i, f32_mul(f32_load(x + i), f32_set1(inv))); }
    for (; i < n; i++) { x8[i] = (int8_t) rintf(x[i] * inv); }
    *s = amax >= 1e-30f ? amax / 127.0f : 0.0f;
}

static inline void store_product(f32x16 sum, float s, bool add, float * to) {
    const f32x16 y = f32_mul(sum, f32_set1(s));
    f32_store(to, add ? f32_add(f32_load(to), y) : y);
}

// A tile of 16 outputs for R rows. base [row]: 64 * sum of x8
template <int R>
static inline void predict_tile8(const kvq_predictor & p, int tile, const int8_t * x, size_t x_stride,
    const int32_t * base, const float * s, bool add, float * out, size_t out_stride) {
    const int n_chunks = p.n_groups() * 8;
    const uint8_t * codes = p.codes() + (size_t) tile * n_chunks * 64;
    i32x16 acc[R];
    for (int r = 0; r < R; r++) { acc[r] = i32_zero(); }
    for (int c = 0; c < n_chunks; c++) {
        const u8x64 w = u8_load(codes + 64 * c);
        for (int r = 0; r < R; r++) { acc[r] = dot4(acc[r], w, x + r * x_stride + 4 * c); }
    }
    const f32x16 step = f32_load(p.steps8() + 16 * tile);
    for (int r = 0; r < R; r++) {
        const f32x16 sum = f32_mul(step, f32_from_i32(i32_sub(acc[r], i32_set1(base[r]))));
        store_product(sum, s[r], add, out + r * out_stride + tile * 16);
    }
}

// base [row][group] = 8 * sum of the group's x8
template <int R>
static inline void predict_tile4(const kvq_predictor & p, int tile, const int8_t * x, size_t x_stride,
    const int32_t * base, const float * s, bool add, float * out, size_t out_stride) {
    const int G = p.n_groups();
    const uint8_t * codes = p.codes() + (size_t) tile * G * p.nb_group();
    const uint16_t * steps = p.steps4() + (size_t) tile * G * 16;
    f32x16 sum[R];
    for (int r = 0; r < R; r++) { sum[r] = f32_set1(0.0f); }
    for (int g = 0; g < G; g++, codes += p.nb_group()) {
        i32x16 acc[R];
        for (int r = 0; r < R; r++) { acc[r] = i32_zero(); }
        for (int c = 0; c < 8; c++) {
            const u8x64 w = u8_field(u8_load(codes + c / 2 * 64), c % 2 * 4, 15, 0);
            for (int r = 0; r < R; r++) { acc[r] = dot4(acc[r], w, x + r * x_stride + g * 32 + 4 * c); }
        }
        const f32x16 step = f32_load_f16(steps + 16 * g);
        for (int r = 0; r < R; r++) {
            const f32x16 dot = f32_from_i32(i32_sub(acc[r], i32_set1(base[r * G + g])));
            sum[r] = f32_add(sum[r], f32_mul(step, dot));
        }
    }
    for (int r = 0; r < R; r++) { store_product(sum[r], s[r], add, out + r * out_stride + tile * 16); }
}

static void predict(const kvq_predictor & p, int n_rows, const int8_t * x, size_t x_stride, const float * s, bool add,
    float * out, size_t out_stride, int32_t * base) {
    const int G = p.n_groups(), of_row = p.bits == 8 ? 1 : G, n = G * 32 / of_row; // sums of a row, inputs of one
    for (int r = 0; r < n_rows; r++) {
        for (int i = 0; i < of_row; i++) {
            int sum = 0;
            for (int j = 0; j < n; j++) { sum += x[r * x_stride + i * n + j]; }
            base[r * of_row + i] = p.offset() * sum;
        }
    }
    for (int tile = 0; tile < p.n_tiles(); tile++) {
#define CALL(R, r)                                                                                                     \
    predict_tile8<R>(                                                                                                  \
        p, tile, x + (r) * x_stride, x_stride, base + (r), s + (r), add, out + (r) * out_stride, out_stride)
        if (p.bits == 8) {
            KVQ_ROWS(n_rows, CALL);
            continue;
        }
#undef CALL
#define CALL(R, r)                                                                                                     \
    predict_tile4<R>(                                                                                                  \
        p, tile, x + (r) * x_stride, x_stride, base + (r) * G, s + (r), add, out + (r) * out_stride, out_stride)
        KVQ_ROWS(n_rows, CALL);
#undef CALL
    }
}

template <int R>
static inline void sum_rows8_of(
    int n, int width, const int8_t * x, size_t x_stride, const float * w, float * sums, size_t sums_stride) {
    for (int c = 0; c < width; c += 32) {
        f32x16 acc[R][2];
        for (int r = 0; r < R; r++) {
            for (int i = 0; i < 2; i++) { acc[r][i] = f32_load(sums + r * sums_stride + c + 16 * i); }
        }
        for (int t = 0; t < n; t++) {
            const f32x16 a = f32_load_i8(x + t * x_stride + c), b = f32_load_i8(x + t * x_stride + c + 16);
            for (int r = 0; r < R; r++) {
                const f32x16 f = f32_set1(w[16 * t + r]);
                acc[r][0] = f32_fma(f, a, acc[r][0]);
                acc[r][1] = f32_fma(f, b, acc[r][1]);
            }
        }
        for (int r = 0; r < R; r++) {
            for (int i = 0; i < 2; i++) { f32_store(sums + r * sums_stride + c + 16 * i, acc[r][i]); }
        }
    }
}

static void sum_rows8(int n_rows, int n, int width, const int8_t * x, size_t x_stride, const float * w, float * sums,
    size_t sums_stride) {
#define CALL(R, r) sum_rows8_of<R>(n, width, x, x_stride, w + (r), sums + (r) * sums_stride, sums_stride)
    KVQ_ROWS(n_rows, CALL);
#undef CALL
}

template <int R>
static inline void apply_tile8_of(
    const kvq_predictor & p, int tile, const float * z, size_t z_stride, float * y, size_t y_stride) {
    const int n_chunks = p.n_groups() * 8;
    const uint8_t * codes = p.codes() + (size_t) tile * n_chunks * 64;
    f32x16 acc[R], all[R]; // all: lanes of sums of z
    for (int r = 0; r < R; r++) {
        acc[r] = all[r] = f32_set1(0.0f);
        for (int j = 0; j < 4 * n_chunks; j += 16) { all[r] = f32_add(all[r], f32_load(z + r * z_stride + j)); }
    }
    for (int c = 0; c < n_chunks; c++) {
        const u8x64 w = u8_load(codes + 64 * c);
        for (int k = 0; k < 4; k++) {
            const f32x16 code = f32_from_byte(w, k);
            for (int r = 0; r < R; r++) { acc[r] = f32_fma(code, f32_set1(z[r * z_stride + 4 * c + k]), acc[r]); }
        }
    }
    const f32x16 step = f32_load(p.steps8() + 16 * tile);
    for (int r = 0; r < R; r++) {
        const f32x16 sum = f32_sub(acc[r], f32_set1((float) p.offset() * f32_sum(all[r])));
        f32_store(y + r * y_stride, f32_fma(step, sum, f32_load(y + r * y_stride)));
    }
}

static void apply_tile8(
    const kvq_predictor & p, int tile, int n_rows, const float * z, size_t z_stride, float * y, size_t y_stride) {
#define CALL(R, r) apply_tile8_of<R>(p, tile, z + (r) * z_stride, z_stride, y + (r) * y_stride, y_stride)
    KVQ_ROWS(n_rows, CALL);
#undef CALL
}

// point coordinate: the same f32 number as in the type's own decode, because steps and products with bytes are exact
static inline f32x16 exact_point(u8x64 byte, int k, float step) {
    return f32_mul(f32_add(f32_from_byte(byte, k), f32_set1(-128.0f)), f32_set1(step));
}

// Columns x[channel][16 cells] of a K block's cells 16*tile.., before the rotation
template <int W>
static void key_columns(const kvq_lattice_view & a, const uint8_t * codes, int tile, const float * scale, float * x) {
    constexpr int stride = lattice_stride<W>();
    const f32x16 s = f32_load(scale + 16 * tile);
    for (int k = 0; k < (a.n_dots + 3) / 4; k++) {
        const u8x64 index = lattice_index<W>(a, codes, tile, k);
        for (int j = 0; j < a.d; j++) {
            const u8x64 byte = u8_lookup<(1 << W)>(index, a.table + (size_t) j * stride);
            for (int b = 0; b < 4 && 4 * k + b < a.n_dots; b++) {
                f32_store(x + (size_t) ((4 * k + b) * a.d + j) * 16, f32_mul(exact_point(byte, b, a.step), s));
            }
        }
    }
}

template <int W>
static void value_columns(const kvq_lattice_view & a, const uint8_t * codes, int tile, const float * scale, float * x) {
    constexpr int stride = lattice_stride<W>();
    const int n_vec = a.codec.head_size / a.d;
    for (int v0 = 0; v0 < n_vec; v0 += 16) { // lanes are vectors here
        for (int j = 0; j < a.d; j++) {
            f32x16 block[16];
            for (int k = 0; k < 4; k++) {
                const u8x64 index = lattice_index<W>(a, codes, v0 / 16, tile * 4 + k);
                const u8x64 byte = u8_lookup<(1 << W)>(index, a.table + (size_t) j * stride);
                for (int b = 0; b < 4; b++) {
                    block[4 * k + b] = f32_mul(exact_point(byte, b, a.step), f32_set1(scale[16 * tile + 4 * k + b]));
                }
            }
            f32_transpose(block);
            for (int v = 0; v < imin(16, n_vec - v0); v++) {
                f32_store(x + (size_t) ((v0 + v) * a.d + j) * 16, block[v]);
            }
        }
    }
}

// Scales of cells; what is not finite, which only foreign bytes hold, counts as 0.
static inline void finite_scales(const kvq_lattice_view & a, const void * params, float * scale) {
    lattice_scales(a, params, scale);
    for (int t = 0; t < a.codec.n_cells; t++) { scale[t] = scale[t] - scale[t] == 0.0f ? scale[t] : 0.0f; }
}

// Columns x[channel of the block][16 cells] of cells t0.., before the rotation; scale: of all cells
static inline void point_columns(
    const kvq_lattice_view & a, const uint8_t * codes, int t0, const float * scale, float * x) {
    const bool k = a.codec.role == 0;
    switch (a.codec.bits * a.codec.group) {
    case 2: k ? key_columns<2>(a, codes, t0 / 16, scale, x) : value_columns<2>(a, codes, t0 / 16, scale, x); break;
    case 4: k ? key_columns<4>(a, codes, t0 / 16, scale, x) : value_columns<4>(a, codes, t0 / 16, scale, x); break;
    case 6: k ? key_columns<6>(a, codes, t0 / 16, scale, x) : value_columns<6>(a, codes, t0 / 16, scale, x); break;
    default: k ? key_columns<8>(a, codes, t0 / 16, scale, x) : value_columns<8>(a, codes, t0 / 16, scale, x); break;
    }
}

// The values of the block's decode, f16 rounding included, in such columns.
static void decoded_f16_columns(
    const kvq_lattice_view & a, const uint8_t * codes, int t0, const float * scale, float * x) {
    const int D = a.codec.head_size;
    point_columns(a, codes, t0, scale, x);
    hadamard_columns(a.block, D, x);
    for (int c = 0; c < D; c++) {
        const f32x16 v = f32_mul(f32_load(x + (size_t) c * 16), f32_set1(a.norm));
        uint16_t half[16];
        f32_store_f16(half, f32_max(f32_min(v, f32_set1(65504.0f)), f32_set1(-65504.0f)));
        f32_store(x + (size_t) c * 16, f32_load_f16(half));
    }
}

// x [D][16 cells] -> rows of 16 cells, written or added. add: a constant where this is called.
static inline void put_columns(int D, const float * x, bool add, float * rows, size_t stride) {
    for (int c0 = 0; c0 < D; c0 += 16) {
        const int n = imin(16, D - c0);
        f32x16 block[16];
        for (int c = 0; c < 16; c++) { block[c] = c < n ? f32_load(x + (size_t) (c0 + c) * 16) : f32_set1(0.0f); }
        f32_transpose(block);
        for (int t = 0; t < 16; t++) {
            float * to = rows + (size_t) t * stride + c0;
            if (n == 16) {
                f32_store(to, add ? f32_add(f32_load(to), block[t]) : block[t]);
                continue;
            }
            float part[16];
            f32_store(part, block[t]);
            for (int c = 0; c < n; c++) { to[c] = add ? to[c] + part[c] : part[c]; }
        }
    }
}

// Decoded rows of a lattice block as f32, [n_cells][stride].
static void lattice_rows(
    const kvq_lattice_view & a, const uint8_t * codes, const void * params, float * out, size_t stride) {
    float scale[KVQ_MAX_CELLS], x[KVQ_MAX_HEAD * 16];
    finite_scales(a, params, scale);
    for (int t0 = 0; t0 < a.codec.n_cells; t0 += 16) {
        decoded_f16_columns(a, codes, t0, scale, x);
        put_columns(a.codec.head_size, x, false, out + (size_t) t0 * stride, stride);
    }
}

// rows += decoded rows of head `head`, its channels in their own order; keys may be values of one block
static void add_lattice_rows(const kvq_lattice_keys & keys, const uint8_t * codes, const uint8_t * params,
    const kvq_order * order, int head, float * rows, size_t stride) {
    const kvq_codec & whole = keys.half[0].whole;
    const int D = whole.head_size;
    const bool moves = whole.split || order;
    float scale[2][KVQ_MAX_CELLS], own[KVQ_MAX_HEAD * 16], x[KVQ_MAX_HEAD * 16];
    for (int i = 0; i < keys.n; i++) { finite_scales(keys.half[i], params + keys.half[i].params_at, scale[i]); }
    if (keys.n == 1 && whole.split) { memset(x, 0, sizeof(float) * 16 * (size_t) D); } // a half without bits
    const size_t first = (size_t) head * (size_t) D;
    for (int t0 = 0; t0 < whole.n_cells; t0 += 16) {
        for (int i = 0; i < keys.n; i++) {
            const kvq_lattice_view & a = keys.half[i];
            decoded_f16_columns(a, codes + a.codes_at, t0, scale[i], moves ? own : x);
            for (int c = 0; moves && c < a.codec.head_size; c++) {
                const size_t at = whole.split ? (size_t) kvq_lattice_channel(whole, a.fast, c) : (size_t) c;
                const f32x16 v = f32_load(own + (size_t) c * 16);
                f32_store(x + (order ? (size_t) order->channel[first + at] : at) * 16,
                    order ? f32_mul(v, f32_set1(order->back[first + at])) : v);
            }
        }
        put_columns(D, x, true, rows + (size_t) t0 * stride, stride);
    }
}

// f16 tile rows R_pos (row + mean) of one head; n a multiple of 16, rows may be read up to 16 channels
static void rows_to_f16(int n, int D, const float * rows, size_t stride, const float * mean, const kvq_rotary * rot,
    const int32_t * pos, uint16_t * tile, int tile_stride) {
    const f32x16 top = f32_set1(65504.0f), least = f32_set1(-65504.0f);
    if (!rot && D % 16 == 0) { // values
        for (int t = 0; t < n; t++) {
            for (int c = 0; c < D; c += 16) {
                const f32x16 row = f32_load(rows + (size_t) t * stride + c);
                const f32x16 y = mean ? f32_add(row, f32_load(mean + c)) : row;
                f32_store_f16(tile + (size_t) t * tile_stride + c, f32_max(f32_min(y, top), least));
            }
        }
        return;
    }
    float x[KVQ_MAX_HEAD * 16];
    const int Dp = pad_to(D, 16);
    for (int t0 = 0; t0 < n; t0 += 16) {
        for (int c0 = 0; c0 < Dp; c0 += 16) {
            f32x16 block[16];
            for (int t = 0; t < 16; t++) {
                const float * from = rows + (size_t) (t0 + t) * stride + c0;
                float padded[16] = {};
                for (int c = 0; c0 + 16 > D && c0 + c < D; c++) { padded[c] = from[c]; }
                block[t] = f32_load(c0 + 16 > D ? padded : from);
            }
            f32_transpose(block);
            for (int c = 0; c < 16; c++) {
                f32_store(x + (size_t) (c0 + c) * 16,
                    mean && c0 + c < D ? f32_add(block[c], f32_set1(mean[c0 + c])) : block[c]);
            }
        }
        if (rot) { rope_rotate(*rot, pos + t0, x); }
        for (int c0 = 0; c0 < Dp; c0 += 16) {
            f32x16 block[16];
            for (int c = 0; c < 16; c++) {
                block[c] = f32_max(f32_min(f32_load(x + (size_t) (c0 + c) * 16), top), least);
            }
            f32_transpose(block);
            for (int t = 0; t < 16; t++) { f32_store_f16(tile + (size_t) (t0 + t) * tile_stride + c0, block[t]); }
        }
    }
}

} // namespace

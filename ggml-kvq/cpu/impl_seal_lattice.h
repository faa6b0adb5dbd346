// Encoding of lattice blocks: the same bytes as kvq_lattice_encode, so the same f32 operations in the same order, 16
// cells at a time.
namespace KVQ_NS {

#ifdef __AVX512F__
constexpr int SUMS = 8; // doubles of a register
#else
constexpr int SUMS = 4;
#endif
typedef float f32_some __attribute__((vector_size(4 * SUMS)));
typedef double f64_some __attribute__((vector_size(8 * SUMS)));

// Nearest points of a vector in 32 cells: first index of the least sum over j of (y_j - point_j)^2.
// y: columns of 16 cells each under the inverse of their scales
template <int D> static inline void nearest32(int n, const float * points, const f32x16 (*y)[D], uint8_t * index) {
    const f32x16 one = f32_set1(1.0f);
    f32x16 least[2], at[2], number = f32_set1(0.0f);
    for (int t = 0; t < 2; t++) {
        least[t] = f32_set1(INFINITY);
        at[t] = f32_set1(0.0f);
    }
    for (int i = 0; i < n; i++) {
        f32x16 sum[2];
        for (int j = 0; j < D; j++) {
            const f32x16 point = f32_set1(points[j * n + i]);
            for (int t = 0; t < 2; t++) {
                const f32x16 e = f32_sub(y[t][j], point);
                sum[t] = j ? f32_add(sum[t], f32_mul(e, e)) : f32_mul(e, e);
            }
        }
        for (int t = 0; t < 2; t++) { f32_keep_less(least[t], at[t], sum[t], number); }
        number = f32_add(number, one);
    }
    u8_store16(index, at[0]);
    u8_store16(index + 16, at[1]);
}

// Nearest points of vectors in 16 cells: the first of the least sums among those that view.near has. False: some
// vector may be nearest to another.
template <bool SMALL> static inline bool near_points(const kvq_lattice_view & a, const f32x16 * y, f32x16 & at) {
    const f32x16 per_square = f32_set1(1.0f / (a.step * KVQ_LATTICE_NEAR)), top = f32_set1(KVQ_LATTICE_SIDE - 1.0f);
    f32x16 square[2];
    for (int j = 0; j < 2; j++) {
        const f32x16 x = f32_add(f32_mul(y[j], per_square), f32_set1(KVQ_LATTICE_SIDE / 2));
        square[j] = f32_floor(f32_min(f32_max(x, f32_set1(0.0f)), top));
    }
    const i32x16 near = i32_gather(a.near, f32_add(f32_mul(square[0], f32_set1(KVQ_LATTICE_SIDE)), square[1]));
    if (i32_any_negative(near)) { return false; }
    f32x16 least = f32_set1(INFINITY);
    at = f32_set1(0.0f);
    const auto look = [&](i32x16 index) {
        f32x16 sum;
        for (int j = 0; j < 2; j++) {
            const float * points = a.points + j * a.n;
            const f32x16 e = f32_sub(y[j], SMALL ? f32_lookup16(points, index) : f32_gather(points, index));
            sum = j ? f32_add(sum, f32_mul(e, e)) : f32_mul(e, e);
        }
        f32_keep_less(least, at, sum, f32_from_i32(index));
    };
    look(i32_byte<0>(near));
    look(i32_byte<1>(near));
    look(i32_byte<2>(near));
    return true;
}

// Of cells t .. t+31. x: columns [cells/16][channel][16]
template <int D>
static inline void nearest_of(
    const kvq_lattice_view & a, const float * x, int t, const float * inverse, uint8_t * index) {
    const int width = a.codec.head_size;
    const f32x16 by[2] = { f32_load(inverse + t), f32_load(inverse + t + 16) };
    const float * from = x + (size_t) t * width;
    for (int v = 0; v < width / D; v++) {
        f32x16 y[2][D];
        for (int k = 0; k < 2; k++) {
            for (int j = 0; j < D; j++) {
                y[k][j] = f32_mul(f32_load(from + (size_t) (k * width + v * D + j) * 16), by[k]);
            }
        }
        uint8_t * const to = index + (size_t) v * a.codec.n_cells + t;
        f32x16 at[2];
        const auto both = [&](auto small) {
            return near_points<small.value>(a, y[0], at[0]) && near_points<small.value>(a, y[1], at[1]);
        };
        if (D == 2 && a.near && (a.n == 16 ? both(std::true_type()) : both(std::false_type()))) {
            u8_store16(to, at[0]);
            u8_store16(to + 16, at[1]);
        } else {
            nearest32<D>(a.n, a.points, y, to);
        }
    }
}

static inline f32x16 square_of(f32x16 y) {
    const f32x16 at = f32_add(f32_mul(y, f32_set1(KVQ_LATTICE_PER_UNIT)), f32_set1(KVQ_LATTICE_SQUARES / 2));
    return f32_floor(f32_min(f32_max(at, f32_set1(0.0f)), f32_set1(KVQ_LATTICE_SQUARES - 1.0f)));
}

// The scales that are tried best for 16 cells of root mean squares `rms`; x: columns [channel][16].
static inline f32x16 best_scales(const kvq_lattice_view & a, const float * x, f32x16 rms) {
    const f32x16 unit = f32_set1(1.0f / 4096.0f), cap = f32_set1(kvq_lattice_error_cap(a.codec.head_size / 2));
    f32x16 inv[KVQ_LATTICE_N_FACTORS], sum[KVQ_LATTICE_N_FACTORS];
    for (int k = 0; k < KVQ_LATTICE_N_FACTORS; k++) {
        const f32x16 scale = f32_mul(rms, f32_set1(KVQ_LATTICE_FACTORS[k]));
        inv[k] = f32_min(f32_div(f32_set1(1.0f), scale), f32_set1(3e38f));
        sum[k] = f32_set1(0.0f);
    }
    for (int i = 0; i < a.codec.head_size; i += 2) {
        const f32x16 x0 = f32_load(x + (size_t) i * 16), x1 = f32_load(x + (size_t) (i + 1) * 16);
        for (int k = 0; k < KVQ_LATTICE_N_FACTORS; k++) {
            const f32x16 y0 = f32_mul(x0, inv[k]), y1 = f32_mul(x1, inv[k]);
            const f32x16 at = f32_add(f32_mul(square_of(y0), f32_set1(KVQ_LATTICE_SQUARES)), square_of(y1));
            const i32x16 p = i32_gather(a.squares, at);
            const f32x16 e0 = f32_sub(y0, f32_mul(f32_low_half(p), unit));
            const f32x16 e1 = f32_sub(y1, f32_mul(f32_high_half(p), unit));
            const f32x16 e = f32_add(f32_mul(e0, e0), f32_mul(e1, e1));
            sum[k] = f32_add(sum[k], f32_round(f32_min(f32_mul(e, f32_set1(KVQ_LATTICE_ERROR_UNIT)), cap)));
        }
    }
    f32x16 least = f32_set1(INFINITY), factor = f32_set1(1.0f);
    for (int k = 0; k < KVQ_LATTICE_N_FACTORS; k++) {
        const float f = KVQ_LATTICE_FACTORS[k];
        f32_keep_less(least, factor, f32_mul(sum[k], f32_set1(f * f)), f32_set1(f));
    }
    return f32_mul(rms, factor);
}

// Indices [vector][n] into the bit fields of their parts; behind them there is room for them by tiles.
static void put_indices(const kvq_lattice_view & a, uint8_t * index, uint8_t * codes) {
    const kvq_codec & c = a.codec;
    const int n = c.n_cells, n_vec = c.head_size / a.d;
    const bool V = c.role == KVQ_ROLE_V;
    uint8_t * quads = index + (size_t) n * n_vec;
    // [tile][dots/4][lane][4], then planes
    const int n_quads = (a.n_dots + 3) / 4, w = c.bits * c.group, width[2] = { w == 6 ? 4 : w, 2 }, shift[2] = { 0, 4 };
    for (int tile = 0; tile < a.n_tiles; tile++) {
        for (int q = 0; q < n_quads; q++) {
            uint8_t * to = quads + ((size_t) tile * n_quads + q) * KVQ_CHUNK_BYTES;
            if (V && 16 * tile + 16 <= n_vec) {
                for (int i = 0; i < 16; i++) {
                    __builtin_memcpy(to + 4 * i, index + (size_t) (16 * tile + i) * n + 4 * q, 4);
                }
                continue;
            }
            if (!V && 4 * q + 4 <= n_vec) {
                const uint8_t * from = index + (size_t) (4 * q) * n + 16 * tile;
                for (int i = 0; i < 16; i++) {
                    for (int k = 0; k < 4; k++) { to[4 * i + k] = from[k * n + i]; }
                }
                continue;
            }
            for (int i = 0; i < 16; i++) {
                for (int k = 0; k < 4; k++) {
                    const int vec = V ? 16 * tile + i : 4 * q + k, cell = V ? 4 * q + k : 16 * tile + i;
                    to[4 * i + k] = vec < n_vec ? index[(size_t) vec * n + cell] : 0;
                }
            }
        }
        put_planes(w == 6 ? 2 : 1, width, shift, a.n_chunks, a.offset, tile, n_quads, quads, codes);
    }
}

// head_size is a multiple of 16. work: kvq_encode_bytes
static void encode_lattice(const kvq_lattice_view & a, const uint16_t * rows, const uint8_t * valid, bool shared,
    void * codes, void * params, void * work) {
    const kvq_codec & c = a.codec;
    const int D = c.head_size, n = c.n_cells;
    float * const x = (float *) work; // columns [cells/16][channel][16]
    uint8_t * index = (uint8_t *) (x + (size_t) n * D);
    float scale[KVQ_MAX_CELLS] = {};
    for (int t = 0; t < n; t += 16) {
        float * const columns = x + (size_t) t * D;
        for (int d = 0; d < D; d += 16) {
            f32x16 y[16];
            for (int i = 0; i < 16; i++) { y[i] = f32_within(f32_load_f16(rows + (size_t) (t + i) * D + d), F16_MAX); }
            f32_transpose(y);
            for (int i = 0; i < 16; i++) { f32_store(columns + (size_t) (d + i) * 16, y[i]); }
        }
        hadamard_columns(a.block, D, columns);
        f64_some sum[16 / SUMS] = {};
        for (int d = 0; d < D; d++) {
            f32_some p[16 / SUMS];
            __builtin_memcpy(p, columns + (size_t) d * 16, 64);
            for (int k = 0; k < 16 / SUMS; k++) {
                p[k] *= a.norm;
                const f64_some wide = __builtin_convertvector(p[k], f64_some);
                sum[k] += wide * wide;
            }
            __builtin_memcpy(columns + (size_t) d * 16, p, 64);
        }
        for (int i = 0; i < 16; i++) {
            const bool is = !valid || (valid[(t + i) / 8] >> (t + i) % 8 & 1);
            scale[t + i] = is ? (float) sqrt(sum[i / SUMS][i % SUMS] / D) : 0.0f;
        }
        if (a.squares && !shared) { f32_store(scale + t, best_scales(a, columns, f32_load(scale + t))); }
    }
    kvq_lattice_put_scales(c, scale, params);
    if (shared) { return; }
    kvq_lattice_scales(c, params, scale);
    for (int t = 0; t < n; t++) {
        const float inv = 1.0f / scale[t];
        scale[t] = scale[t] > 0.0f ? (inv < 3e38f ? inv : 3e38f) : 0.0f;
    }
    for (int t = 0; t < n; t += 32) {
        switch (a.d) {
        case 2: nearest_of<2>(a, x, t, scale, index); break;
        case 4: nearest_of<4>(a, x, t, scale, index); break;
        default: nearest_of<8>(a, x, t, scale, index); break;
        }
    }
    put_indices(a, index, (uint8_t *) codes);
}

} // namespace

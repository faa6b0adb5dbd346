// Encoding of lattice blocks: the same bytes as kvq_lattice_encode, so the same f32 operations in the same order, 16
// cells at a time.
namespace KVQ_NS {

// Nearest points of a vector in 32 cells: first index of the least sum over j of (y_j - point_j)^2. x: columns
// [D][stride]
template <int D>
static inline void nearest32(int n, const float * points, const float * x, int stride, uint8_t * index) {
    f32x16 y[D][2], least[2], at[2];
    for (int t = 0; t < 2; t++) {
        for (int j = 0; j < D; j++) { y[j][t] = f32_load(x + (size_t) j * stride + 16 * t); }
        least[t] = f32_set1(INFINITY);
        at[t] = f32_set1(0.0f);
    }
    for (int i = 0; i < n; i++) {
        f32x16 sum[2];
        for (int j = 0; j < D; j++) {
            const f32x16 point = f32_set1(points[j * n + i]);
            for (int t = 0; t < 2; t++) {
                const f32x16 e = f32_sub(y[j][t], point);
                sum[t] = j ? f32_add(sum[t], f32_mul(e, e)) : f32_mul(e, e);
            }
        }
        for (int t = 0; t < 2; t++) { f32_keep_less(least[t], at[t], sum[t], f32_set1((float) i)); }
    }
    u8_store16(index, at[0]);
    u8_store16(index + 16, at[1]);
}

static inline f32x16 square_of(f32x16 y) {
    const f32x16 at = f32_add(f32_mul(y, f32_set1(KVQ_LATTICE_PER_UNIT)), f32_set1(KVQ_LATTICE_SQUARES / 2));
    return f32_floor(f32_min(f32_max(at, f32_set1(0.0f)), f32_set1(KVQ_LATTICE_SQUARES - 1.0f)));
}

// The scales that are tried best for 16 cells of root mean squares `rms`; x: columns of stride n.
static inline f32x16 best_scales(const kvq_lattice_view & a, const float * x, int n, f32x16 rms) {
    const f32x16 unit = f32_set1(1.0f / 4096.0f), cap = f32_set1(kvq_lattice_error_cap(a.codec.head_size / 2));
    f32x16 inv[KVQ_LATTICE_N_FACTORS], sum[KVQ_LATTICE_N_FACTORS];
    for (int k = 0; k < KVQ_LATTICE_N_FACTORS; k++) {
        const f32x16 scale = f32_mul(rms, f32_set1(KVQ_LATTICE_FACTORS[k]));
        inv[k] = f32_min(f32_div(f32_set1(1.0f), scale), f32_set1(3e38f));
        sum[k] = f32_set1(0.0f);
    }
    for (int i = 0; i < a.codec.head_size; i += 2) {
        const f32x16 x0 = f32_load(x + (size_t) i * n), x1 = f32_load(x + (size_t) (i + 1) * n);
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
    const int D = c.head_size, n = c.n_cells, n_vec = D / a.d;
    float * x = (float *) work; // columns [channel][cell]
    uint8_t * index = (uint8_t *) (x + (size_t) n * D);

    for (int t = 0; t < n; t += 16) {
        for (int d = 0; d < D; d += 16) {
            f32x16 y[16];
            for (int i = 0; i < 16; i++) { y[i] = f32_within(f32_load_f16(rows + (size_t) (t + i) * D + d), F16_MAX); }
            f32_transpose(y);
            for (int i = 0; i < 16; i++) { f32_store(x + (size_t) (d + i) * n + t, y[i]); }
        }
    }
    for (int h = 1; h < a.block; h *= 2) {
        for (int i = 0; i < D; i += 2 * h) {
            for (int j = i; j < i + h; j++) {
                float *p = x + (size_t) j * n, *q = p + (size_t) h * n;
                for (int t = 0; t < n; t += 16) {
                    const f32x16 u = f32_load(p + t), v = f32_load(q + t);
                    f32_store(p + t, f32_add(u, v));
                    f32_store(q + t, f32_sub(u, v));
                }
            }
        }
    }
    double sum[KVQ_MAX_CELLS] = {};
    for (int d = 0; d < D; d++) {
        float * p = x + (size_t) d * n;
        for (int t = 0; t < n; t++) {
            p[t] *= a.norm;
            sum[t] += (double) p[t] * (double) p[t];
        }
    }
    float scale[KVQ_MAX_CELLS] = {};
    for (int t = 0; t < n; t++) { scale[t] = !valid || (valid[t / 8] >> t % 8 & 1) ? (float) sqrt(sum[t] / D) : 0.0f; }
    if (a.squares && !shared) {
        for (int t = 0; t < n; t += 16) { f32_store(scale + t, best_scales(a, x + t, n, f32_load(scale + t))); }
    }
    kvq_lattice_put_scales(c, scale, params);
    if (shared) { return; }
    kvq_lattice_scales(c, params, scale);
    for (int t = 0; t < n; t++) {
        const float inv = 1.0f / scale[t];
        scale[t] = scale[t] > 0.0f ? (inv < 3e38f ? inv : 3e38f) : 0.0f;
    }
    for (int d = 0; d < D; d++) {
        float * p = x + (size_t) d * n;
        for (int t = 0; t < n; t += 16) { f32_store(p + t, f32_mul(f32_load(p + t), f32_load(scale + t))); }
    }
    for (int v = 0; v < n_vec; v++) {
        for (int t = 0; t < n; t += 32) {
            const float * y = x + (size_t) v * a.d * n + t;
            uint8_t * to = index + (size_t) v * n + t;
            switch (a.d) {
            case 2: nearest32<2>(a.n, a.points, y, n, to); break;
            case 4: nearest32<4>(a.n, a.points, y, n, to); break;
            default: nearest32<8>(a.n, a.points, y, n, to); break;
            }
        }
    }
    put_indices(a, index, (uint8_t *) codes);
}

} // namespace

// Affine blocks (types/affine.h), read in place. One page and one group of parameters at a time:
//   fold   w = x*scale as int8 for every row, and sum x*zero      x: queries (K) or probabilities (V)
//   dots   sum code*w8 over the group's tiles by byte-dot instructions
namespace KVQ_NS {

// Scales and zeros as f32.
struct param_reader {
    const uint8_t * scale, * zero; // f16 or u8 arrays
    bool   u8;
    f32x16 s_low, s_step, z_low, z_step;

    param_reader(const kvq_view & a, const void * params) : u8(a.codec.scale) {
        const uint8_t * p = (const uint8_t *) params;
        scale = p + (u8 ? 8 : 0);
        zero  = scale + (size_t) a.np * (u8 ? 1 : 2);
        if (u8) {
            float head[4];
            f16_to_f32_row((const uint16_t *) params, head, 4);
            s_low = f32_set1(head[0]); s_step = f32_set1(head[1]);
            z_low = f32_set1(head[2]); z_step = f32_set1(head[3]);
        } else {
            s_low = s_step = z_low = z_step = f32_set1(0.0f);
        }
    }
    template <bool U8> inline void load16(size_t i, f32x16 & s, f32x16 & z) const {
        if (U8) {
            s = f32_add(f32_mul(f32_load_u8(scale + i), s_step), s_low);
            z = f32_add(f32_mul(f32_load_u8(zero  + i), z_step), z_low);
        } else {
            s = f32_load_f16((const uint16_t *) scale + i);
            z = f32_load_f16((const uint16_t *) zero  + i);
        }
    }
    // n < 16 of them, zeros behind
    inline void load_tail(size_t i, int n, f32x16 & s, f32x16 & z) const {
        float a[16] = {}, b[16] = {};
        uint8_t  u[2][16] = {};
        uint16_t h[2][16] = {};
        f32x16 x, y;
        for (int j = 0; j < n; j++) {
            if (u8) {
                u[0][j] = scale[i + j];
                u[1][j] = zero [i + j];
            } else {
                h[0][j] = ((const uint16_t *) scale)[i + j];
                h[1][j] = ((const uint16_t *) zero )[i + j];
            }
        }
        x = u8 ? f32_add(f32_mul(f32_load_u8(u[0]), s_step), s_low) : f32_load_f16(h[0]);
        y = u8 ? f32_add(f32_mul(f32_load_u8(u[1]), z_step), z_low) : f32_load_f16(h[1]);
        f32_store(a, x);
        f32_store(b, y);
        for (int j = n; j < 16; j++) { a[j] = b[j] = 0.0f; }
        s = f32_load(a);
        z = f32_load(b);
    }
};

// Rows of a fold: x at stride xs (zeros behind n up to 16), w and w8 at stride ws (a multiple of 32, zeros behind n).
struct fold_rows {
    const float * x;
    int      xs, ws;
    float  * w;
    int8_t * w8;
};

template <int R, bool U8> static inline void fold_as(const param_reader & in, size_t at, int n, const fold_rows & f, float * step, float * base) {
    f32x16 top[R], sum[R];
    for (int r = 0; r < R; r++) { top[r] = sum[r] = f32_set1(0.0f); }
    int i = 0;
    for (; i < n; i += 16) {
        f32x16 s, z;
        if (i + 16 <= n) {
            in.load16<U8>(at + (size_t) i, s, z);
        } else {
            in.load_tail(at + (size_t) i, n - i, s, z);
        }
        for (int r = 0; r < R; r++) {
            const f32x16 v = f32_load(f.x + (size_t) r * f.xs + i), y = f32_mul(v, s);
            sum[r] = f32_fma(v, z, sum[r]);
            top[r] = f32_max(top[r], f32_abs(y));
            f32_store(f.w + r * f.ws + i, y);
        }
    }
    for (; i < f.ws; i += 16) {
        for (int r = 0; r < R; r++) { f32_store(f.w + r * f.ws + i, f32_set1(0.0f)); }
    }
    float amax[R], inv[R * KVQ_MAX_CELLS / 32 + 1]; // by 32 values when a store may cover the seam of two rows, else by row
    max_rows<R>(amax, top);
    sum_rows<R>(base, sum);
    const int per_row = f.ws % 64 ? f.ws / 32 : 1;
    for (int r = 0; r < R; r++) {
        const float x = amax[r] > 0.0f ? 127.0f / amax[r] : 0.0f;
        for (int k = 0; k < per_row; k++) { inv[r * per_row + k] = x; }
        step[r] = amax[r] / 127.0f;
    }
    inv[R * per_row] = 0.0f;
    if (f.ws % 64 == 0) {
        for (int r = 0; r < R; r++) {
            const f32x16 a = f32_set1(inv[r]);
            for (int j = r * f.ws; j < (r + 1) * f.ws; j += 64) {
                i8_store4(f.w8 + j, f32_mul(f32_load(f.w + j), a), f32_mul(f32_load(f.w + j + 16), a), f32_mul(f32_load(f.w + j + 32), a), f32_mul(f32_load(f.w + j + 48), a));
            }
        }
    } else {
        for (int k = 0; k < R * per_row; k += 2) {
            const float * w = f.w + 32*k;
            const f32x16 a = f32_set1(inv[k]), b = f32_set1(inv[k + 1]);
            i8_store4(f.w8 + 32*k, f32_mul(f32_load(w), a), f32_mul(f32_load(w + 16), a), f32_mul(f32_load(w + 32), b), f32_mul(f32_load(w + 48), b));
        }
    }
}

template <int R> static inline void fold(const param_reader & in, size_t at, int n, const fold_rows & f, float * step, float * base) {
    if (in.u8) {
        fold_as<R, true>(in, at, n, f, step, base);
    } else {
        fold_as<R, false>(in, at, n, f, step, base);
    }
}

// ---------------------------------------------------------------- dots

// acc[t][r] += code*w8 of T tiles; W bits of the code at bit UP
template <int W, int UP, int R, int T>
static inline void dot_part(const uint8_t * p, size_t tile_stride, int n_chunks, const int8_t * w8, int ws, i32x16 (&acc)[T][R]) {
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
                const i8x4 b = i8_set4(w + r * ws + 4*j);
                for (int t = 0; t < T; t++) { acc[t][r] = dot4(acc[t][r], f[t], b); }
            }
        }
    }
}

// dst[r][16*tile...] = (ADD: +=) base + step * sum code*w8
template <int BITS, int R, int T, bool ADD>
static inline void dot_tiles(const kvq_view & a, const uint8_t * codes, int tile, const int8_t * w8, int ws, const float * step, const float * base, float * dst, int stride) {
    i32x16 acc[T][R];
    for (int t = 0; t < T; t++) {
        for (int r = 0; r < R; r++) { acc[t][r] = i32_zero(); }
    }
    const size_t s0 = (size_t) a.n_chunks[0] * KVQ_CHUNK_BYTES;
    if (BITS == 3) {
        const size_t s1 = (size_t) a.n_chunks[1] * KVQ_CHUNK_BYTES;
        dot_part<2, 0, R, T>(codes + tile * s0, s0, a.n_chunks[0], w8, ws, acc);
        dot_part<1, 2, R, T>(codes + a.offset[1] + tile * s1, s1, a.n_chunks[1], w8, ws, acc);
    } else if (BITS > 0) {
        dot_part<BITS == 3 || BITS == 0 ? 1 : BITS, 0, R, T>(codes + tile * s0, s0, a.n_chunks[0], w8, ws, acc);
    }
    for (int r = 0; r < R; r++) {
        const f32x16 m = f32_set1(step[r]), b = f32_set1(base[r]);
        for (int t = 0; t < T; t++) {
            float * o = dst + (size_t) r * stride + 16*(tile + t);
            const f32x16 y = f32_fma(f32_from_i32(acc[t][r]), m, b);
            f32_store(o, ADD ? f32_add(f32_load(o), y) : y);
        }
    }
}

// the rows of a block against one page; K: x = q, dst = logits      V: x = p, dst = out
template <int BITS, int R, bool V>
static void affine_rows(const kvq_view & a, const uint8_t * codes, const param_reader & in, const float * x, float * dst, float * w, int8_t * w8) {
    const int n_dots  = V ? a.codec.n_cells : a.codec.head_size;
    const int n_lanes = V ? a.codec.head_size : a.codec.n_cells, stride = V ? a.dp : a.codec.n_cells;
    const int ws = V ? n_dots : pad_to(n_dots, 64);
    float step[R], base[R];
    const fold_rows f = { x, V ? n_dots : a.dp, ws, w, w8 };
    for (int lane = 0; lane < n_lanes; lane += a.codec.group) { // groups are whole tiles, or the head
        fold<R>(in, (size_t) (lane / a.codec.group) * n_dots, n_dots, f, step, base);
        int tile = lane / 16;
        const int end = imin((lane + a.codec.group + 15) / 16, a.n_tiles);
        for (; tile + KVQ_TILES <= end; tile += KVQ_TILES) { dot_tiles<BITS, R, KVQ_TILES, V>(a, codes, tile, w8, ws, step, base, dst, stride); }
        for (; tile < end; tile++)                         { dot_tiles<BITS, R, 1,         V>(a, codes, tile, w8, ws, step, base, dst, stride); }
    }
}

// ---------------------------------------------------------------- unpacked codes

// Codes as bytes, [tile][dots/4][lane][4]: what many rows share. Returns their view, as if of 8 bits.
static kvq_view unpack(const kvq_view & a, const uint8_t * codes, uint8_t * out) {
    const int n_dots = a.codec.role == KVQ_ROLE_V ? a.codec.n_cells : a.codec.head_size, quads = pad_to(n_dots, 32) / 4;
    kvq_view u = a;
    u.n_parts     = 1;
    u.n_chunks[0] = quads;
    if (!a.n_parts) {
        u.n_chunks[0] = 0;
    }
    for (int part = 0; part < a.n_parts; part++) {
        const int w = a.width[part], planes = 8 / w, mask = (1 << w) - 1;
        for (int tile = 0; tile < a.n_tiles; tile++) {
            for (int c = 0; c < a.n_chunks[part]; c++) {
                const u8x64 x = u8_load(codes + a.offset[part] + ((size_t) tile * a.n_chunks[part] + c) * KVQ_CHUNK_BYTES);
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

// work: w f32 [KVQ_R][ws], w8 [KVQ_R][ws] and a seam, unpacked codes (kvq_work_bytes)
template <bool V> static void affine_block(const kvq_view & a, int n_rows, const void * codes, const void * params, const float * x, float * dst, void * work) {
    const int ws = pad_to(a.codec.head_size > a.codec.n_cells ? a.codec.head_size : a.codec.n_cells, 64);
    float   * w  = (float *) work;
    int8_t  * w8 = (int8_t *) (w + (size_t) KVQ_WORK_ROWS * ws + 64);
    uint8_t * u8 = (uint8_t *) w8 + (size_t) KVQ_WORK_ROWS * ws + 64;
    const param_reader in(a, params);
    const uint8_t * c = (const uint8_t *) codes;
    const kvq_view * v = &a;
    int  bits = a.codec.bits;
    kvq_view unpacked;
    if (n_rows > 8 && bits) {
        unpacked = unpack(a, c, u8);
        c = u8;
        v = &unpacked;
        bits = 8;
    }
    const int xs = V ? a.codec.n_cells : a.dp, ds = V ? a.dp : a.codec.n_cells;
#define CALL(BITS, R, r) affine_rows<BITS, R, V>(*v, c, in, x + (size_t) (r) * xs, dst + (size_t) (r) * ds, w, w8)
#define CALL0(R, r) CALL(0, R, r)
#define CALL1(R, r) CALL(1, R, r)
#define CALL2(R, r) CALL(2, R, r)
#define CALL3(R, r) CALL(3, R, r)
#define CALL4(R, r) CALL(4, R, r)
#define CALL8(R, r) CALL(8, R, r)
    switch (bits) {
        case 0: KVQ_ROWS(n_rows, CALL0); break;
        case 1: KVQ_ROWS(n_rows, CALL1); break;
        case 2: KVQ_ROWS(n_rows, CALL2); break;
        case 3: KVQ_ROWS(n_rows, CALL3); break;
        case 4: KVQ_ROWS(n_rows, CALL4); break;
        case 8: KVQ_ROWS(n_rows, CALL8); break;
    }
#undef CALL8
#undef CALL4
#undef CALL3
#undef CALL2
#undef CALL1
#undef CALL0
#undef CALL
}

static void score_affine(const kvq_view & a, int n_rows, const void * codes, const void * params, const float * q, float * logits, void * work) {
    affine_block<false>(a, n_rows, codes, params, q, logits, work);
}

static void accum_affine(const kvq_view & a, int n_rows, const void * codes, const void * params, const float * p, float * out, void * work) {
    affine_block<true>(a, n_rows, codes, params, p, out, work);
}

// ---------------------------------------------------------------- f32 arithmetic

// decoded values as the type's decode gives them, rounded to f16
static void affine_to_tile(const kvq_view & a, const void * codes, const void * params, float * out, void * work) {
    const bool V = a.codec.role == KVQ_ROLE_V;
    const int  n_dots = V ? a.codec.n_cells : a.codec.head_size, stride = V ? a.dp : a.codec.n_cells, quads = pad_to(n_dots, 32) / 4;
    const int  ws = pad_to(a.codec.head_size > a.codec.n_cells ? a.codec.head_size : a.codec.n_cells, 64);
    uint8_t * u8 = (uint8_t *) work + 5 * (size_t) KVQ_WORK_ROWS * ws + 64*5;
    if (a.codec.bits) {
        unpack(a, (const uint8_t *) codes, u8);
    } else {
        for (size_t i = 0; i < (size_t) a.n_tiles * quads * KVQ_CHUNK_BYTES; i += 64) { u8_store(u8 + i, u8_field(u8_load(u8 + i), 0, 0, 0)); }
    }
    const param_reader in(a, params);
    const f32x16 most = f32_set1(65504.0f), least = f32_set1(-65504.0f);
    for (int tile = 0; tile < a.n_tiles; tile++) {
        const size_t at = (size_t) (tile * 16 / a.codec.group) * n_dots;
        for (int d = 0; d < n_dots; d += 16) {
            float s[16], z[16];
            f32x16 sv, zv;
            if (d + 16 > n_dots) {
                in.load_tail(at + (size_t) d, n_dots - d, sv, zv);
            } else if (in.u8) {
                in.load16<true>(at + (size_t) d, sv, zv);
            } else {
                in.load16<false>(at + (size_t) d, sv, zv);
            }
            f32_store(s, sv);
            f32_store(z, zv);
            for (int i = 0; i < imin(16, n_dots - d); i++) {
                const u8x64  x = u8_load(u8 + ((size_t) tile * quads + (d + i) / 4) * KVQ_CHUNK_BYTES);
                const f32x16 y = f32_add(f32_set1(z[i]), f32_mul(f32_set1(s[i]), f32_from_byte(x, i % 4)));
                uint16_t h[16];
                f32_store_f16(h, f32_max(least, f32_min(most, y)));
                f32_store(out + (size_t) (d + i) * stride + 16*tile, f32_load_f16(h));
            }
        }
    }
    for (int d = n_dots; !V && d < a.dp; d++) { // channels that pad the head
        for (int t = 0; t < stride; t += 16) { f32_store(out + (size_t) d * stride + t, f32_set1(0.0f)); }
    }
}

} // namespace

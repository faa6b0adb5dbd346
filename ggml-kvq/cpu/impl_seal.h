// Encoding of affine blocks: the same bytes as kvq_affine_encode_ref, so the same f32 operations in the same order,
// 16 at a time.
namespace KVQ_NS {

constexpr float F16_MAX = 65504.0f;

// lo, hi of every parameter pair; FLT_MAX, -FLT_MAX where no cell is valid
static void ranges(const kvq_codec & c, const float * x, const uint8_t * valid, float * lo, float * hi) {
    const int D = c.head_size, n = c.n_cells;
    const f32x16 most = f32_set1(__FLT_MAX__), least = f32_set1(-__FLT_MAX__);
    if (c.role == KVQ_ROLE_K) {
        for (int t0 = 0; t0 < n; t0 += c.group) {
            for (int d = 0; d < D; d += 16) {
                f32x16 a = most, b = least;
                for (int t = t0; t < t0 + c.group; t++) {
                    if (!valid || (valid[t / 8] >> t % 8 & 1)) {
                        const f32x16 v = f32_load(x + (size_t) t * D + d);
                        a = f32_min(v, a);
                        b = f32_max(v, b);
                    }
                }
                f32_store(lo + (size_t) (t0 / c.group) * D + d, a);
                f32_store(hi + (size_t) (t0 / c.group) * D + d, b);
            }
        }
        return;
    }
    for (int g = 0; g * c.group < D; g++) {
        const int d0 = g * c.group, d1 = imin(d0 + c.group, D);
        for (int t = 0; t < n; t += 4) {
            f32x16 a[4], b[4];
            for (int i = 0; i < 4; i++) {
                a[i] = b[i] = least;
                if (!valid || (valid[(t + i) / 8] >> (t + i) % 8 & 1)) {
                    for (int d = d0; d < d1; d += 16) {
                        const f32x16 v = f32_load(x + (size_t) (t + i) * D + d);
                        a[i] = f32_max(f32_sub(f32_set1(0.0f), v), a[i]);
                        b[i] = f32_max(v, b[i]);
                    }
                }
            }
            f32_hmax4(lo + (size_t) g * n + t, a[0], a[1], a[2], a[3]);
            f32_hmax4(hi + (size_t) g * n + t, b[0], b[1], b[2], b[3]);
        }
    }
    for (int i = 0; i < (D + c.group - 1) / c.group * n; i += 16) {
        f32_store(lo + i, f32_sub(f32_set1(0.0f), f32_load(lo + i)));
    }
}

// One tile's codes as bytes, quads [tile][n_quads][lane][4], into the bit fields of its parts.
static void put_planes(int n_parts, const int * width, const int * shift, const int * n_chunks, const size_t * offset,
    int tile, int n_quads, const uint8_t * quads, uint8_t * codes) {
    for (int part = 0; part < n_parts; part++) {
        const int w = width[part], planes = 8 / w, mask = (1 << w) - 1;
        for (int chunk = 0; chunk < n_chunks[part]; chunk++) {
            u8x64 out = u8_field(u8_load(quads), 0, 0, 0);
            for (int j = 0; j < planes && chunk * planes + j < n_quads; j++) {
                out = u8_or(out,
                    u8_field(u8_load(quads + ((size_t) tile * n_quads + chunk * planes + j) * KVQ_CHUNK_BYTES),
                        shift[part], mask, j * w));
            }
            u8_store(codes + offset[part] + ((size_t) tile * n_chunks[part] + chunk) * KVQ_CHUNK_BYTES, out);
        }
    }
}

// Codes as bytes [cell][stride] into the bit fields of their parts. quads: room for [tile][dots/4][lane][4]
static void put_codes(const kvq_view & a, const int8_t * bytes, int stride, uint8_t * quads, uint8_t * codes) {
    const bool V = a.codec.role == KVQ_ROLE_V;
    const int n_quads = (V ? a.codec.n_cells : a.codec.head_size) / 4;
    for (int tile = 0; tile < a.n_tiles; tile++) {
        for (int q = 0; q < n_quads; q++) {
            uint8_t * to = quads + ((size_t) tile * n_quads + q) * KVQ_CHUNK_BYTES;
            if (V) {
                const int8_t * from = bytes + (size_t) (4 * q) * stride + 16 * tile;
                for (int i = 0; i < 16; i++) {
                    for (int k = 0; k < 4; k++) { to[4 * i + k] = (uint8_t) from[k * stride + i]; }
                }
            } else {
                for (int i = 0; i < 16; i++) {
                    __builtin_memcpy(to + 4 * i, bytes + (size_t) (16 * tile + i) * stride + 4 * q, 4);
                }
            }
        }
        put_planes(a.n_parts, a.width, a.shift, a.n_chunks, a.offset, tile, n_quads, quads, codes);
    }
}

// work: see kvq_encode_bytes. head_size is a multiple of 16.
static void encode_affine(const kvq_view & a, const uint16_t * rows, const uint8_t * valid, bool shared, void * codes,
    void * params, void * work) {
    const kvq_codec & c = a.codec;
    const int D = c.head_size, n = c.n_cells, np = a.np, stride = pad_to(D, 64);
    const bool V = c.role == KVQ_ROLE_V;
    float *x = (float *) work, *lo = x + (size_t) n * D, *hi = lo + np, *mul = hi + np, *scale = mul + np,
          *zero = scale + np;
    int8_t * bytes = (int8_t *) (zero + np);
    uint8_t * quads = (uint8_t *) bytes + (size_t) n * stride;

    for (int64_t i = 0; i < (int64_t) n * D; i += 16) { // inf and nan carry no value
        f32_store(x + i, f32_within(f32_load_f16(rows + i), F16_MAX));
    }
    ranges(c, x, valid, lo, hi);

    const float top = (float) ((1 << c.bits) - 1);
    const f32x16 width = f32_set1(c.levels ? top + 1.0f : top), eta = f32_set1(c.bits ? c.eta : 0.5f);
    const f32x16 keep = f32_set1(1.0f - 2.0f * c.eta), levels = f32_set1(top), most = f32_set1(F16_MAX),
                 least = f32_set1(-F16_MAX);
    for (int p = 0; p < np; p += 16) {
        const f32x16 l = f32_within(f32_load(lo + p), F16_MAX);
        const f32x16 range = f32_max(f32_sub(f32_within(f32_load(hi + p), F16_MAX), l), f32_set1(0.0f)); // never -0
        f32_store(lo + p, l);
        f32_store(mul + p, f32_within(f32_div(width, range), __FLT_MAX__)); // no range, denormal range: 0
        const f32x16 z = f32_add(l, f32_mul(eta, range)),
                     s = c.bits ? f32_div(f32_mul(keep, range), levels) : f32_set1(0.0f);
        if (c.scale) {
            f32_store(scale + p, s);
            f32_store(zero + p, z);
        } else {
            f32_store_f16((uint16_t *) params + p, f32_max(least, f32_min(most, s)));
            f32_store_f16((uint16_t *) params + np + p, f32_max(least, f32_min(most, z)));
        }
    }
    if (c.scale) { kvq_affine_put_params(c, params, scale, zero); }
    if (shared || !c.bits) { return; }
    if (c.scale) { // as kvq_affine_encode_ref
        kvq_affine_get_params(c, params, scale, zero);
        for (int p = 0; p < np; p += 16) {
            const f32x16 range = f32_div(f32_mul(f32_load(scale + p), levels), keep);
            f32_store(lo + p, f32_sub(f32_load(zero + p), f32_mul(eta, range)));
            f32_store(mul + p, f32_within(f32_div(width, range), __FLT_MAX__));
        }
    }

    const f32x16 half = f32_set1(c.levels ? 0.0f : 0.5f), none = f32_set1(0.0f);
    for (int t = 0; t < n; t++) {
        for (int d = 0; d < stride; d += 64) {
            f32x16 q[4];
            for (int i = 0; i < 4; i++) {
                const int e = d + 16 * i;
                q[i] = none;
                if (e < D) {
                    const size_t p = V ? (size_t) (e / c.group) * n + t : (size_t) (t / c.group) * D + e;
                    const f32x16 l = V ? f32_set1(lo[p]) : f32_load(lo + p),
                                 m = V ? f32_set1(mul[p]) : f32_load(mul + p);
                    const f32x16 y = f32_floor(f32_add(f32_mul(f32_sub(f32_load(x + (size_t) t * D + e), l), m), half));
                    q[i] = f32_min(f32_max(y, none), levels);
                }
            }
            i8_store4(bytes + (size_t) t * stride + d, q[0], q[1], q[2], q[3]);
        }
    }
    put_codes(a, bytes, stride, quads, (uint8_t *) codes);
}

} // namespace

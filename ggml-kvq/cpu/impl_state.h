// Saved states: f16 rows of blocks and blocks of f16 rows, the values of types/: the same f32 operations in the same
// order. Head sizes are a multiple of 16.
#include "base/row_hash.h"

namespace KVQ_NS {

typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));
typedef int32_t i32v16 __attribute__((vector_size(64)));
typedef float f32v16 __attribute__((vector_size(64)));

static inline f32x16 f16_range(f32x16 x) { return f32_max(f32_set1(-F16_MAX), f32_min(f32_set1(F16_MAX), x)); }

// ---------------------------------------------------------------- codes as bytes [cell][stride]

static void codes_to_bytes(
    const kvq_view & a, bool V, int n_quads, const uint8_t * codes, uint8_t * bytes, size_t stride) {
    for (int tile = 0; tile < a.n_tiles; tile++) {
        for (int q = 0; q < n_quads; q++) {
            u8x64 x = u8_load(codes + a.offset[0] +
                ((size_t) tile * a.n_chunks[0] + (size_t) (q * a.width[0] / 8)) * KVQ_CHUNK_BYTES);
            x = u8_field(x, q * a.width[0] % 8, (1 << a.width[0]) - 1, 0);
            if (a.n_parts > 1) {
                const u8x64 y = u8_load(codes + a.offset[1] +
                    ((size_t) tile * a.n_chunks[1] + (size_t) (q * a.width[1] / 8)) * KVQ_CHUNK_BYTES);
                x = u8_or(x, u8_field(y, q * a.width[1] % 8, (1 << a.width[1]) - 1, a.shift[1]));
            }
            uint8_t quad[KVQ_CHUNK_BYTES];
            u8_store(quad, x);
            if (V) {
                uint8_t * to = bytes + (size_t) (4 * q) * stride + 16 * tile;
                for (int k = 0; k < 4; k++) {
                    for (int i = 0; i < 16; i++) { to[(size_t) k * stride + i] = quad[4 * i + k]; }
                }
            } else {
                uint8_t * to = bytes + (size_t) (16 * tile) * stride + 4 * q;
                for (int i = 0; i < 16; i++) { __builtin_memcpy(to + (size_t) i * stride, quad + 4 * i, 4); }
            }
        }
    }
}

// ---------------------------------------------------------------- affine

struct image_work { // of kvq_encode_bytes
    float *scale, *zero;
    uint16_t * level; // [code][pair]
    uint8_t *bytes, *quads;
    size_t stride;
    image_work(const kvq_view & a, void * work) {
        scale = (float *) work;
        zero = scale + a.np;
        level = (uint16_t *) (zero + a.np);
        bytes = (uint8_t *) (level + 16 * (size_t) a.np);
        stride = (size_t) pad_to(a.codec.head_size, 64);
        quads = bytes + (size_t) a.codec.n_cells * stride;
    }
};

static void affine_pairs(const kvq_view & a, const void * params, float * scale, float * zero) {
    if (a.codec.scale) {
        kvq_affine_get_params(a.codec, params, scale, zero);
    } else {
        f16_to_f32_row((const uint16_t *) params, scale, a.np);
        f16_to_f32_row((const uint16_t *) params + a.np, zero, a.np);
    }
}

// Values of all codes under each pair.
static void affine_levels(const kvq_view & a, const image_work & w) {
    for (int q = 0; q < 1 << a.codec.bits; q++) {
        for (int p = 0; p < a.np; p += 16) {
            const f32x16 y = f32_add(f32_load(w.zero + p), f32_mul(f32_load(w.scale + p), f32_set1((float) q)));
            f32_store_f16(w.level + (size_t) q * a.np + p, f16_range(y));
        }
    }
}

// by: NULL, or what the values of each channel are multiplied by afterwards (types/mixed.h)
static void decode_affine(
    const kvq_view & a, const void * codes, const void * params, const float * by, uint16_t * rows, void * work) {
    const kvq_codec & c = a.codec;
    const int D = c.head_size, n = c.n_cells;
    const bool V = c.role == KVQ_ROLE_V;
    const image_work w(a, work);
    affine_pairs(a, params, w.scale, w.zero);
    if (c.bits) {
        codes_to_bytes(a, V, (V ? n : D) / 4, (const uint8_t *) codes, w.bytes, w.stride);
    } else {
        memset(w.bytes, 0, (size_t) n * w.stride);
    }
    for (int t = 0; t < n; t++) {
        const uint8_t * code = w.bytes + (size_t) t * w.stride;
        uint16_t * row = rows + (size_t) t * D;
        if (!V) {
            const size_t p = (size_t) (t / c.group) * D;
            for (int d = 0; d < D; d += 16) {
                const f32x16 y = f32_mul(f32_load(w.scale + p + d), f32_load_u8(code + d));
                f32_store_f16(row + d, f16_range(f32_add(f32_load(w.zero + p + d), y)));
            }
            continue;
        }
        for (int d0 = 0, p = t; d0 < D; d0 += c.group, p += n) {
            const f32x16 s = f32_set1(w.scale[p]), z = f32_set1(w.zero[p]);
            for (int d = d0; d < imin(d0 + c.group, D); d += 16) {
                f32_store_f16(row + d, f16_range(f32_add(z, f32_mul(s, f32_load_u8(code + d)))));
                if (by) { f32_store_f16(row + d, f16_range(f32_mul(f32_load_f16(row + d), f32_load(by + d)))); }
            }
        }
    }
}

// The first code whose value is the row's in the bits of `keep`; false: no code gives some value.
template <typename LEVEL>
static inline bool match_row(
    int D, int top, const uint16_t * row, const uint16_t * keep, uint8_t * code, const LEVEL & level) {
    u16x16 missed = {};
    for (int d = 0; d < D; d += 16) {
        u16x16 v, k, at = {}, found = {};
        __builtin_memcpy(&v, row + d, 32);
        __builtin_memcpy(&k, keep + d, 32);
        v &= k;
        for (int q = top; q >= 0; q--) {
            u16x16 y;
            level(q, d, y);
            const u16x16 same = (u16x16) ((y & k) == v);
            at = (at & ~same) | (same & (uint16_t) q);
            found |= same;
        }
        missed |= ~found;
        const u8x16 bytes = __builtin_convertvector(at, u8x16);
        __builtin_memcpy(code + d, &bytes, 16);
    }
    uint64_t any[4];
    __builtin_memcpy(any, &missed, 32);
    return !(any[0] | any[1] | any[2] | any[3]);
}

// keep: of each cell, the bits of its channels that count
static bool match_affine(const kvq_view & a, const uint16_t * rows, const uint16_t * const * keep, const float * by,
    void * codes, const void * params, void * work) {
    const kvq_codec & c = a.codec;
    const int D = c.head_size, n = c.n_cells, np = a.np, top = (1 << c.bits) - 1;
    const bool V = c.role == KVQ_ROLE_V;
    const image_work w(a, work);
    affine_pairs(a, params, w.scale, w.zero);
    affine_levels(a, w);
    for (int t = 0; t < n; t++) {
        const uint16_t * row = rows + (size_t) t * D;
        uint8_t * code = w.bytes + (size_t) t * w.stride;
        bool all = true;
        if (!V) {
            const uint16_t * level = w.level + (size_t) (t / c.group) * D;
            all = match_row(D, top, row, keep[t], code,
                [&](int q, int d, u16x16 & y) { __builtin_memcpy(&y, level + (size_t) q * np + d, 32); });
        }
        for (int d0 = 0, p = t; V && all && d0 < D; d0 += c.group, p += n) {
            const uint16_t * level = w.level + p;
            float value[16];
            for (int q = 0; by && q <= top; q++) { f16_to_f32_row(level + (size_t) q * np, value + q, 1); }
            const int width = imin(c.group, D - d0);
            all = !by ? match_row(width, top, row + d0, keep[t] + d0, code + d0,
                            [&](int q, int, u16x16 & y) { y = (u16x16) {} + level[(size_t) q * np]; })
                      : match_row(width, top, row + d0, keep[t] + d0, code + d0, [&](int q, int d, u16x16 & y) {
                            uint16_t out[16];
                            f32_store_f16(out, f16_range(f32_mul(f32_set1(value[q]), f32_load(by + d0 + d))));
                            __builtin_memcpy(&y, out, 32);
                        });
        }
        if (!all) { return false; }
        for (size_t d = (size_t) D; d < w.stride; d++) { code[d] = 0; }
    }
    if (c.bits) { put_codes(a, (const int8_t *) w.bytes, (int) w.stride, w.quads, (uint8_t *) codes); }
    return true;
}

// ---------------------------------------------------------------- lattice

template <typename STORE> // store(cell, channel, 16 values)
static inline void columns_to_rows(const kvq_lattice_view & a, float * x, const STORE & store) {
    const int D = a.codec.head_size;
    hadamard_columns(a.block, D, x);
    for (int d = 0; d < D; d += 16) {
        f32x16 block[16];
        for (int i = 0; i < 16; i++) {
            block[i] = f16_range(f32_mul(f32_load(x + (size_t) (d + i) * 16), f32_set1(a.norm)));
        }
        f32_transpose(block);
        for (int t = 0; t < 16; t++) { store(t, d, block[t]); }
    }
}

static void decode_lattice(
    const kvq_lattice_view & a, const void * codes_of, const void * params, uint16_t * rows, void *) {
    float scale[KVQ_MAX_CELLS], x[KVQ_MAX_HEAD * 16];
    const uint8_t * codes = (const uint8_t *) codes_of;
    finite_scales(a, params, scale);
    const int n = a.codec.n_cells, D = a.codec.head_size;
    for (int t0 = 0; t0 < n; t0 += 16) {
        point_columns(a, codes, t0, scale, x);
        columns_to_rows(a, x, [&](int t, int d, f32x16 y) { f32_store_f16(rows + (size_t) (t0 + t) * D + d, y); });
    }
}

// Whether close_points found the points of all vectors that it was called for.
struct points_found {
    f32x16 worst = f32_set1(0.0f);
    i32v16 any = {}; // negative: no point
    template <int D> bool all() const {
        if (!(f32_hmax(worst) <= (D == 2 ? 0.505f : 0.25f))) { return false; }
        int32_t each[16], sign = 0;
        __builtin_memcpy(each, &any, 64);
        for (int t = 0; t < 16; t++) { sign |= each[t]; }
        return sign >= 0;
    }
};

// Nearest points of a vector in 16 cells: their coordinates in whole steps and their indices, where they are found at
// once. d = 2: by the square of one step a side in which y lies. Else y lies close to a point, within a quarter of a
// step in each coordinate: no other is as near.
template <int D>
static inline void close_points(
    const kvq_lattice_view & a, const f32x16 * y, f32x16 * point, uint8_t * index, points_found & found) {
    const f32x16 per_step = f32_set1(1.0f / a.step), most = f32_set1(127.0f), least = f32_set1(-127.0f);
    for (int j = 0; j < D; j++) {
        const f32x16 u = f32_mul(y[j], per_step);
        point[j] = f32_add(f32_max(f32_min(f32_round(u), most), least), f32_set1(0.0f)); // never -0
        found.worst = f32_absmax(found.worst, f32_sub(u, point[j]));
    }
    if (D == 2) {
        const i32x16 got = i32_gather(a.pairs,
            f32_add(f32_add(f32_mul(point[0], f32_set1(KVQ_LATTICE_SIDE)), point[1]),
                f32_set1(KVQ_LATTICE_SIDE / 2 * (KVQ_LATTICE_SIDE + 1))));
        i32v16 p;
        __builtin_memcpy(&p, &got, 64);
        found.any |= p;
        const u8x16 at = __builtin_convertvector(p & 255, u8x16);
        __builtin_memcpy(index, &at, 16);
        const f32v16 x[2] = { __builtin_convertvector(p << 16 >> 24, f32v16),
            __builtin_convertvector(p << 8 >> 24, f32v16) };
        __builtin_memcpy(point, x, sizeof(x));
        return;
    }
    int8_t byte[D][16];
    int known = 0;
    for (int j = 0; j < D; j++) { i8_store(byte[j], point[j]); }
    for (int t = 0; t < 16; t++) {
        uint64_t key = 0;
        for (int j = 0; j < D; j++) { key |= (uint64_t) (uint8_t) byte[j][t] << 8 * j; }
        const kvq_lattice_slot & s = a.slots[key * a.slot_mul >> KVQ_LATTICE_SLOT_SHIFT];
        index[t] = s.index;
        known += s.key == key;
    }
    found.any |= (i32v16) {} + (known - 16);
}

// The nearest points, whatever the rows are: as nearest32.
template <int D>
static inline void any_points(const kvq_lattice_view & a, const f32x16 * y, f32x16 * point, uint8_t * index) {
    f32x16 least = f32_set1(INFINITY), at = f32_set1(0.0f);
    for (int i = 0; i < a.n; i++) {
        f32x16 sum = f32_set1(0.0f);
        for (int j = 0; j < D; j++) {
            const f32x16 e = f32_sub(y[j], f32_set1(a.points[j * a.n + i]));
            sum = j ? f32_add(sum, f32_mul(e, e)) : f32_mul(e, e);
        }
        f32_keep_less(least, at, sum, f32_set1((float) i));
    }
    u8_store16(index, at);
    const int stride = a.n < 16 ? 16 : a.n;
    for (int j = 0; j < D; j++) {
        int8_t of[16];
        for (int t = 0; t < 16; t++) { of[t] = (int8_t) a.table[(size_t) (a.d + j) * stride + index[t]]; }
        point[j] = f32_load_i8(of);
    }
}

// Columns of the nearest points of x, 16 cells, under the scales; indices [vector][n].
template <int D>
static void nearest_columns(
    const kvq_lattice_view & a, f32x16 inv, f32x16 scale, const float * x, float * out, uint8_t * index) {
    constexpr int TOGETHER = 16 / D; // vectors
    const int n = a.codec.n_cells, n_vec = a.codec.head_size / D;
    const f32x16 step = f32_set1(a.step);
    const auto each = [&](int v, const auto & find) {
        f32x16 y[D], point[D];
        for (int j = 0; j < D; j++) { y[j] = f32_mul(f32_load(x + (size_t) (v * D + j) * 16), inv); }
        find(y, point, index + (size_t) v * n);
        for (int j = 0; j < D; j++) {
            f32_store(out + (size_t) (v * D + j) * 16, f32_mul(f32_mul(point[j], step), scale));
        }
    };
    for (int v = 0; v < n_vec; v += TOGETHER) {
        const int end = imin(v + TOGETHER, n_vec);
        points_found found;
        for (int i = v; i < end; i++) {
            each(i, [&](const f32x16 * y, f32x16 * point, uint8_t * at) { close_points<D>(a, y, point, at, found); });
        }
        if (found.all<D>()) { continue; }
        for (int i = v; i < end; i++) {
            each(i, [&](const f32x16 * y, f32x16 * point, uint8_t * at) { any_points<D>(a, y, point, at); });
        }
    }
}

// Rows of 16 cells as columns, the bits outside of `keep` cleared, rotated.
static inline void rows_to_columns(
    const kvq_lattice_view & a, const uint16_t * rows, const uint16_t * const * keep, float * x) {
    const int D = a.codec.head_size;
    for (int d = 0; d < D; d += 16) {
        f32x16 block[16];
        for (int t = 0; t < 16; t++) {
            u16x16 v, k;
            uint16_t kept[16];
            __builtin_memcpy(&v, rows + (size_t) t * D + d, 32);
            if (keep) {
                __builtin_memcpy(&k, keep[t] + d, 32);
                v &= k;
            }
            __builtin_memcpy(kept, &v, 32);
            block[t] = f32_within(f32_load_f16(kept), F16_MAX);
        }
        f32_transpose(block);
        for (int i = 0; i < 16; i++) { f32_store(x + (size_t) (d + i) * 16, block[i]); }
    }
    hadamard_columns(a.block, D, x);
    for (int d = 0; d < D; d++) {
        f32_store(x + (size_t) d * 16, f32_mul(f32_load(x + (size_t) d * 16), f32_set1(a.norm)));
    }
}

// keep NULL: codes alone, all bits of the rows count, and rows are not compared
static bool match_lattice(const kvq_lattice_view & a, const uint16_t * rows, const uint16_t * const * keep,
    void * codes, const void * params, void * work) {
    const int D = a.codec.head_size, n = a.codec.n_cells;
    float scale[KVQ_MAX_CELLS], inv[KVQ_MAX_CELLS];
    float * x = (float *) work;
    float near[KVQ_MAX_HEAD * 16];
    uint8_t * index = (uint8_t *) (x + (size_t) n * D);
    kvq_lattice_scales(a.codec, params, scale);
    for (int t = 0; t < n; t++) {
        const float i = 1.0f / scale[t];
        inv[t] = scale[t] > 0.0f ? (i < 3e38f ? i : 3e38f) : 0.0f;
    }
    for (int t0 = 0; t0 < n; t0 += 16) {
        rows_to_columns(a, rows + (size_t) t0 * D, keep ? keep + t0 : nullptr, x);
        const f32x16 i = f32_load(inv + t0), s = f32_load(scale + t0);
        switch (a.d) {
        case 2: nearest_columns<2>(a, i, s, x, near, index + t0); break;
        case 4: nearest_columns<4>(a, i, s, x, near, index + t0); break;
        default: nearest_columns<8>(a, i, s, x, near, index + t0); break;
        }
        if (!keep) { continue; }
        u16x16 wrong = {};
        columns_to_rows(a, near, [&](int t, int d, f32x16 y) {
            uint16_t back[16];
            u16x16 v, b, k;
            f32_store_f16(back, y);
            __builtin_memcpy(&b, back, 32);
            __builtin_memcpy(&v, rows + (size_t) (t0 + t) * D + d, 32);
            __builtin_memcpy(&k, keep[t0 + t] + d, 32);
            wrong |= (v ^ b) & k;
        });
        uint64_t any[4];
        __builtin_memcpy(any, &wrong, 32);
        if (any[0] | any[1] | any[2] | any[3]) { return false; }
    }
    put_indices(a, index, (uint8_t *) codes);
    return true;
}

// ---------------------------------------------------------------- hashes

static inline void hash_step(u64x8 & h, u64x8 & top, const uint8_t * p, size_t nb_row) {
    u64x8 x;
    uint64_t row[8];
    for (int r = 0; r < 8; r++) { __builtin_memcpy(row + r, p + (size_t) r * nb_row, 8); }
    __builtin_memcpy(&x, row, 64);
    top |= ((x & 0x7c007c007c007c00u) + 0x0400040004000400u);
    h ^= x;
    h ^= h >> 32;
    h *= (u64x8) {} + KVQ_HASH_MUL;
    h ^= h >> 32;
    h += KVQ_HASH_ADD;
}

// Hashes of n rows of `width` values (base/row_hash.h); false: some value is not finite. 16 rows at a time.
static bool hash_rows(const void * rows, int n, int width, uint64_t * hashes) {
    const uint8_t * p = (const uint8_t *) rows;
    const size_t nb_row = 2 * (size_t) width;
    u64x8 top[2] = {};
    bool finite = true;
    int i = 0;
    for (; width % 4 == 0 && i + 16 <= n; i += 16) {
        u64x8 h[2] = { (u64x8) {} + KVQ_HASH_ROW, (u64x8) {} + KVQ_HASH_ROW };
        for (size_t at = 0; at < nb_row; at += 8) {
            hash_step(h[0], top[0], p + (size_t) i * nb_row + at, nb_row);
            hash_step(h[1], top[1], p + (size_t) (i + 8) * nb_row + at, nb_row);
        }
        __builtin_memcpy(hashes + i, h, 128);
    }
    uint64_t any[16], all = 0;
    __builtin_memcpy(any, top, 128);
    for (const uint64_t x : any) { all |= x; }
    finite = !(all & 0x8000800080008000u);
    for (; i < n; i++) {
        const uint8_t * row = p + (size_t) i * nb_row;
        hashes[i] = kvq_hash_bytes(row, nb_row, KVQ_HASH_ROW);
        for (int d = 0; d < width; d++) {
            uint16_t x;
            __builtin_memcpy(&x, row + 2 * (size_t) d, 2);
            finite = finite && (x & 0x7c00) != 0x7c00;
        }
    }
    return finite;
}

} // namespace

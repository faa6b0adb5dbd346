#include "lattice.h"

#include "base/f16.h"
#include "lattice_grids.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <vector>

static const kvq_grid grids[] = {
#define GRID(d, n, bits) { d, n, bits, kvq_grid_step_d##d##_n##n, kvq_grid_d##d##_n##n }
    GRID(2, 4, 1),
    GRID(2, 16, 2),
    GRID(2, 64, 3),
    GRID(2, 256, 4),
    GRID(4, 16, 1),
    GRID(4, 256, 2),
    GRID(8, 256, 1),
#undef GRID
};
static constexpr float UNIT = 1.0f / 4096;

const kvq_grid * kvq_grid_find(int d, int bits) {
    for (const kvq_grid & g : grids) {
        if (g.d == d && g.bits == bits) { return &g; }
    }
    return nullptr;
}

static int ceil_div(int a, int b) { return (a + b - 1) / b; }

static int lanes(const kvq_codec & c) { return c.role == KVQ_ROLE_K ? c.n_cells : c.head_size / c.group; }
static int dots(const kvq_codec & c) { return c.role == KVQ_ROLE_K ? c.head_size / c.group : c.n_cells; }

int kvq_lattice_n_tiles(const kvq_codec & c) { return ceil_div(lanes(c), KVQ_TILE_LANES); }

kvq_affine_parts kvq_lattice_get_parts(const kvq_codec & c) {
    kvq_affine_parts p = {};
    const int width = c.bits * c.group;
    p.n = width == 6 ? 2 : 1;
    p.width[0] = width == 6 ? 4 : width;
    p.width[1] = 2;
    p.shift[1] = 4;
    size_t offset = 0;
    for (int i = 0; i < p.n; i++) {
        p.n_chunks[i] = ceil_div(dots(c) * p.width[i], 32);
        p.offset[i] = offset;
        offset += (size_t) kvq_lattice_n_tiles(c) * p.n_chunks[i] * KVQ_CHUNK_BYTES;
    }
    return p;
}

static size_t nb_block_codes(const kvq_codec & c);
static size_t nb_block_params(const kvq_codec & c) {
    const size_t n = (size_t) c.n_cells;
    return c.scale == 0 ? 2 * n : 2 + (c.scale == 1 ? n : n / 2);
}
// The largest u of a stored scale.
static float top_level(const kvq_codec & c) { return c.scale == 1 ? 255.0f : 15.0f; }

int kvq_lattice_halves(const kvq_codec & c, kvq_lattice_half out[2]) {
    out[0] = { c, 0, 0, false };
    out[0].codec.coords = 0;
    if (!c.split) { return 1; }
    out[0].codec.split = out[0].codec.fast_bits = 0;
    out[0].codec.head_size = c.head_size / 2;
    if (!c.fast_bits) { return 1; }
    out[1] = { out[0].codec, nb_block_codes(out[0].codec), nb_block_params(out[0].codec), true };
    out[1].codec.bits = c.fast_bits;
    return 2;
}

const char * kvq_lattice_refuse(const kvq_codec & c) {
    if (c.split || c.fast_bits) {
        if (c.role != KVQ_ROLE_K || c.split < 0 || c.split > KVQ_SPLIT_NEOX || !c.split) {
            return "only keys are split, as norm (1) or neox (2)";
        }
        if (c.head_size % 16) { return "heads that are split must be a multiple of 16"; }
        if (c.group != 2) { return "keys are split with d 2 only"; }
        if (c.fast_bits < 0 || c.fast_bits > 4) { return "the fast half has 0..4 bits"; }
    }
    if (!kvq_grid_find(c.group, c.bits)) {
        return "no such grid: bits 1 with d 2, 4 or 8; bits 2 with d 2 or 4; bits 3 and 4 with d 2";
    }
    if (c.n_cells < 32 || c.n_cells % 32 || c.n_cells > 256) {
        return "a page must have 32..256 cells, a multiple of 32";
    }
    if (c.head_size < 8 || c.head_size > 1024 || c.head_size % 8) {
        return "the head size must be a multiple of 8 up to 1024";
    }
    if (c.role != KVQ_ROLE_K && c.role != KVQ_ROLE_V) { return "the role must be K or V"; }
    if (c.coords < 0 || c.coords > 64 || c.coords % 2) { return "coordinates must be even, 0..64 a head"; }
    if (c.scale < 0 || c.scale > 2) { return "the scale format must be 0 (f16), 1 (8-bit) or 2 (4-bit)"; }
    return nullptr;
}

static size_t nb_block_codes(const kvq_codec & c) {
    const kvq_affine_parts p = kvq_lattice_get_parts(c);
    size_t nb = 0;
    for (int i = 0; i < p.n; i++) { nb += (size_t) kvq_lattice_n_tiles(c) * p.n_chunks[i] * KVQ_CHUNK_BYTES; }
    return nb;
}

// Sum of `of` over the blocks of a codec.
static size_t over_halves(const kvq_codec & c, size_t (*of)(const kvq_codec & c)) {
    kvq_lattice_half halves[2];
    const int n = kvq_lattice_halves(c, halves);
    return of(halves[0].codec) + (n > 1 ? of(halves[1].codec) : 0);
}

size_t kvq_lattice_nb_codes(const kvq_codec & c) { return over_halves(c, nb_block_codes); }
size_t kvq_lattice_coords_at(const kvq_codec & c) { return over_halves(c, nb_block_params); }
size_t kvq_lattice_nb_params(const kvq_codec & c) {
    return kvq_lattice_coords_at(c) + (size_t) c.coords / 2 * (size_t) c.n_cells;
}

// ---------------------------------------------------------------- index fields

static uint8_t * field(const kvq_affine_parts & p, int i, const uint8_t * codes, int lane, int dot, int & shift) {
    const int w = p.width[i], span = 32 / w, rest = dot % span;
    shift = rest / 4 * w;
    return (uint8_t *) codes + p.offset[i] +
        ((size_t) (lane / KVQ_TILE_LANES) * p.n_chunks[i] + dot / span) * KVQ_CHUNK_BYTES + lane % KVQ_TILE_LANES * 4 +
        rest % 4;
}

static int get_index(const kvq_codec & c, const kvq_affine_parts & p, const uint8_t * codes, int cell, int vec) {
    const bool k = c.role == KVQ_ROLE_K;
    int index = 0;
    for (int i = 0; i < p.n; i++) {
        int shift;
        const uint8_t * b = field(p, i, codes, k ? cell : vec, k ? vec : cell, shift);
        index |= (*b >> shift & ((1 << p.width[i]) - 1)) << p.shift[i];
    }
    return index;
}

// over zeros
static void put_index(const kvq_codec & c, const kvq_affine_parts & p, uint8_t * codes, int cell, int vec, int index) {
    const bool k = c.role == KVQ_ROLE_K;
    for (int i = 0; i < p.n; i++) {
        int shift;
        uint8_t * b = field(p, i, codes, k ? cell : vec, k ? vec : cell, shift);
        *b = (uint8_t) (*b | (index >> p.shift[i] & ((1 << p.width[i]) - 1)) << shift);
    }
}

// ---------------------------------------------------------------- rotation, scale, nearest point

int kvq_hadamard_block(int n) { return n & -n; }

void kvq_hadamard(int n, float * x) {
    const int block = kvq_hadamard_block(n);
    const float norm = (float) (1.0 / sqrt((double) block));
    for (int h = 1; h < block; h *= 2) {
        for (int i = 0; i < n; i += 2 * h) {
            for (int j = i; j < i + h; j++) {
                const float a = x[j], b = x[j + h];
                x[j] = a + b;
                x[j + h] = a - b;
            }
        }
    }
    for (int i = 0; i < n; i++) { x[i] *= norm; }
}

static uint16_t to_f16(float x) { return kvq_f32_to_f16(std::min(std::max(x, -65504.0f), 65504.0f)); }

void kvq_lattice_scales(const kvq_codec & c, const void * params, float * scale) {
    const uint8_t * p = (const uint8_t *) params;
    uint16_t h;
    memcpy(&h, p, 2);
    const float top = kvq_f16_to_f32(h) * (1.0f / (top_level(c) * top_level(c)));
    for (int t = 0; t < c.n_cells; t++) {
        if (c.scale) {
            const float u = (float) (c.scale == 1 ? p[2 + t] : p[2 + t / 2] >> t % 2 * 4 & 15);
            scale[t] = top * (u * u);
        } else {
            memcpy(&h, p + 2 * t, 2);
            scale[t] = kvq_f16_to_f32(h);
        }
        if (!std::isfinite(scale[t])) { // only foreign bytes
            scale[t] = 0.0f;
        }
    }
}

void kvq_lattice_put_scales(const kvq_codec & c, const float * scale, void * params) {
    uint8_t * p = (uint8_t *) params;
    if (!c.scale) {
        for (int t = 0; t < c.n_cells; t++) {
            const uint16_t h = to_f16(scale[t]);
            memcpy(p + 2 * t, &h, 2);
        }
        return;
    }
    const uint16_t h = to_f16(*std::max_element(scale, scale + c.n_cells));
    memcpy(p, &h, 2);
    const float top = kvq_f16_to_f32(h), most = top_level(c);
    for (int t = 0; t < c.n_cells; t++) {
        const float u = top > 0.0f ? floorf(most * sqrtf(scale[t] / top) + 0.5f) : 0.0f;
        const uint8_t level = (uint8_t) std::min(std::max(u, 0.0f), most);
        uint8_t & to = p[2 + (c.scale == 1 ? t : t / 2)];
        to = c.scale == 2 && t % 2 ? (uint8_t) (to | level << 4) : level;
    }
}

// points in columns, so that the search runs along them
struct columns {
    int n, d;
    float x[8][KVQ_LATTICE_MAX_POINTS];
    explicit columns(const kvq_codec & c) {
        const kvq_grid & g = *kvq_grid_find(c.group, c.bits);
        n = g.n;
        d = g.d;
        for (int i = 0; i < n; i++) {
            for (int j = 0; j < d; j++) { x[j][i] = (float) (g.point[i * d + j] * g.step) * UNIT; }
        }
    }
};

// first index of the least sum over j of (y_j - point_j)^2, summed in order of j
static int nearest(const columns & g, const float * y) {
    float dist[KVQ_LATTICE_MAX_POINTS];
    dist[0] = INFINITY; // a compiler cannot know that a grid has points
    for (int i = 0; i < g.n; i++) {
        const float e = y[0] - g.x[0][i];
        dist[i] = e * e;
    }
    for (int j = 1; j < g.d; j++) {
        for (int i = 0; i < g.n; i++) {
            const float e = y[j] - g.x[j][i];
            dist[i] += e * e;
        }
    }
    float least = dist[0];
    for (int i = 1; i < g.n; i++) { least = std::min(least, dist[i]); }
    int at = 0;
    while (dist[at] != least) { at++; }
    return at;
}

static void rotate(const kvq_codec & c, const uint16_t * row, float * x) {
    for (int i = 0; i < c.head_size; i++) {
        x[i] = kvq_f16_to_f32(row[i]);
        if (!std::isfinite(x[i])) { x[i] = 0.0f; }
    }
    kvq_hadamard(c.head_size, x);
}

// indices of rotated rows under the stored scales
static void put_indices(const kvq_codec & c, float * x, const void * params, void * codes) {
    const columns g(c);
    const kvq_affine_parts p = kvq_lattice_get_parts(c);
    std::vector<float> scale(c.n_cells);
    kvq_lattice_scales(c, params, scale.data());
    memset(codes, 0, nb_block_codes(c));
    for (int t = 0; t < c.n_cells; t++) {
        float * row = x + (size_t) t * c.head_size;
        const float inv = scale[t] > 0.0f ? std::min(1.0f / scale[t], 3e38f) : 0.0f;
        for (int i = 0; i < c.head_size; i++) { row[i] *= inv; }
        for (int v = 0; v < c.head_size / c.group; v++) {
            put_index(c, p, (uint8_t *) codes, t, v, nearest(g, row + v * c.group));
        }
    }
}

// ---------------------------------------------------------------- scale

const int32_t * kvq_lattice_squares(const kvq_grid & g) {
    if (g.d != 2 || g.bits < 3) { return nullptr; }
    static std::vector<int32_t> tables[2];
    static std::once_flag made[2];
    std::vector<int32_t> & table = tables[g.bits - 3];
    std::call_once(made[g.bits - 3], [&] {
        constexpr int SIDE = KVQ_LATTICE_SQUARES, PITCH = 256; // units of 2^-12
        table.resize(SIDE * SIDE);
        for (int i = 0; i < SIDE * SIDE; i++) {
            const int x = (i / SIDE - SIDE / 2) * PITCH + PITCH / 2, y = (i % SIDE - SIDE / 2) * PITCH + PITCH / 2;
            int least = INT32_MAX;
            for (int k = 0; k < g.n; k++) {
                const int px = g.point[2 * k] * g.step, py = g.point[2 * k + 1] * g.step;
                const int far = ((x - px) * (x - px) + (y - py) * (y - py));
                if (far < least) {
                    least = far;
                    table[i] = (int32_t) ((uint32_t) (uint16_t) px | (uint32_t) (uint16_t) py << 16);
                }
            }
        }
    });
    return table.data();
}

static int square(float y) {
    return (int) std::min(
        std::max(y * KVQ_LATTICE_PER_UNIT + KVQ_LATTICE_SQUARES / 2, 0.0f), KVQ_LATTICE_SQUARES - 1.0f);
}

// The scale that is tried best for a rotated row.
static float best_scale(const kvq_codec & c, const float * x, float rms) {
    const int32_t * squares = kvq_lattice_squares(*kvq_grid_find(c.group, c.bits));
    if (!squares || !(rms > 0.0f)) { return rms; }
    const float cap = kvq_lattice_error_cap(c.head_size / 2);
    float least = INFINITY, scale = rms;
    for (const float factor : KVQ_LATTICE_FACTORS) {
        const float inv = std::min(1.0f / (rms * factor), 3e38f);
        float sum = 0.0f;
        for (int i = 0; i < c.head_size; i += 2) {
            const float y0 = x[i] * inv, y1 = x[i + 1] * inv;
            const int32_t p = squares[square(y0) * KVQ_LATTICE_SQUARES + square(y1)];
            const float e0 = y0 - (float) (int16_t) p * UNIT, e1 = y1 - (float) (p >> 16) * UNIT;
            sum += rintf(std::min((e0 * e0 + e1 * e1) * KVQ_LATTICE_ERROR_UNIT, cap));
        }
        if (sum * (factor * factor) < least) {
            least = sum * (factor * factor);
            scale = rms * factor;
        }
    }
    return scale;
}

// ---------------------------------------------------------------- one block

static void encode_block(const kvq_codec & c, const uint16_t * rows, const uint8_t * valid, const void * shared,
    void * codes, void * params) {
    const int D = c.head_size;
    std::vector<float> x((size_t) c.n_cells * D), scale(c.n_cells);
    for (int t = 0; t < c.n_cells; t++) {
        float * row = &x[(size_t) t * D];
        rotate(c, rows + (size_t) t * D, row);
        double sum = 0.0;
        for (int i = 0; i < D; i++) { sum += (double) row[i] * (double) row[i]; }
        scale[t] = !valid || (valid[t / 8] >> t % 8 & 1) ? (float) sqrt(sum / D) : 0.0f;
        if (!shared) { scale[t] = best_scale(c, row, scale[t]); }
    }
    kvq_lattice_put_scales(c, scale.data(), params);
    if (!shared) { put_indices(c, x.data(), params, codes); }
}

static void decode_block(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows) {
    const kvq_grid & g = *kvq_grid_find(c.group, c.bits);
    const kvq_affine_parts p = kvq_lattice_get_parts(c);
    std::vector<float> scale(c.n_cells), x(c.head_size);
    kvq_lattice_scales(c, params, scale.data());
    for (int t = 0; t < c.n_cells; t++) {
        for (int v = 0; v < c.head_size / g.d; v++) {
            const int8_t * point = g.point + get_index(c, p, (const uint8_t *) codes, t, v) * g.d;
            for (int j = 0; j < g.d; j++) { x[v * g.d + j] = (float) (point[j] * g.step) * UNIT * scale[t]; }
        }
        kvq_hadamard(c.head_size, x.data());
        for (int i = 0; i < c.head_size; i++) { rows[(size_t) t * c.head_size + i] = to_f16(x[i]); }
    }
}

static void assign_block(const kvq_codec & c, const uint16_t * rows, void * codes, const void * params) {
    std::vector<float> x((size_t) c.n_cells * c.head_size);
    for (int t = 0; t < c.n_cells; t++) { rotate(c, rows + (size_t) t * c.head_size, &x[(size_t) t * c.head_size]); }
    put_indices(c, x.data(), params, codes);
}

// ---------------------------------------------------------------- all blocks of a codec

// Rows of a half out of rows of whole heads; of a codec that is not split, the rows themselves.
static const uint16_t * take_half(
    const kvq_codec & c, const kvq_lattice_half & half, const uint16_t * rows, std::vector<uint16_t> & own) {
    if (!c.split) { return rows; }
    const int D = half.codec.head_size;
    own.resize((size_t) c.n_cells * D);
    for (int t = 0; t < c.n_cells; t++) {
        for (int i = 0; i < D; i++) {
            own[(size_t) t * D + i] = rows[(size_t) t * c.head_size + kvq_lattice_channel(c, half.fast, i)];
        }
    }
    return own.data();
}

void kvq_lattice_encode_by(kvq_encode_function encode, const kvq_codec & c, const uint16_t * rows,
    const uint8_t * valid, const void * shared, void * codes, void * params) {
    static thread_local std::vector<uint16_t> own;
    kvq_lattice_half halves[2];
    for (int i = 0, n = kvq_lattice_halves(c, halves); i < n; i++) {
        const kvq_lattice_half & h = halves[i];
        encode(h.codec, take_half(c, h, rows, own), valid, shared, shared ? nullptr : (uint8_t *) codes + h.codes,
            (uint8_t *) params + h.params);
    }
}

void kvq_lattice_encode(const kvq_codec & c, const uint16_t * rows, const uint8_t * valid, const void * shared,
    void * codes, void * params) {
    kvq_lattice_encode_by(encode_block, c, rows, valid, shared, codes, params);
}

void kvq_lattice_decode(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows) {
    if (!c.split) {
        decode_block(c, codes, params, rows);
        return;
    }
    kvq_lattice_half halves[2];
    const int n = kvq_lattice_halves(c, halves), D = halves[0].codec.head_size;
    std::vector<uint16_t> own((size_t) c.n_cells * D);
    memset(rows, 0, 2 * (size_t) c.n_cells * c.head_size);
    for (int k = 0; k < n; k++) {
        const kvq_lattice_half & h = halves[k];
        decode_block(h.codec, (const uint8_t *) codes + h.codes, (const uint8_t *) params + h.params, own.data());
        for (int t = 0; t < c.n_cells; t++) {
            for (int i = 0; i < D; i++) {
                rows[(size_t) t * c.head_size + kvq_lattice_channel(c, h.fast, i)] = own[(size_t) t * D + i];
            }
        }
    }
}

bool kvq_lattice_match(const kvq_codec & c, const uint16_t * rows, kvq_low_bits low, const void * shared, void * codes,
    const void * params) {
    const size_t n = (size_t) c.n_cells * c.head_size;
    std::vector<uint8_t> own(codes || shared ? 0 : kvq_lattice_nb_codes(c));
    std::vector<uint16_t> back(n);
    const void * use = shared;
    if (!shared) {
        for (size_t i = 0; i < n; i++) { back[i] = (uint16_t) (rows[i] & ~low.mask(c, i)); }
        use = codes ? codes : own.data();
        kvq_lattice_assign(c, back.data(), (void *) use, params);
    }
    kvq_lattice_decode(c, use, params, back.data());
    for (size_t i = 0; i < n; i++) {
        if ((back[i] ^ rows[i]) & ~low.mask(c, i) & 0xffff) { return false; }
    }
    return true;
}

void kvq_lattice_assign(const kvq_codec & c, const uint16_t * rows, void * codes, const void * params) {
    kvq_lattice_half halves[2];
    std::vector<uint16_t> own;
    for (int i = 0, n = kvq_lattice_halves(c, halves); i < n; i++) {
        const kvq_lattice_half & h = halves[i];
        assign_block(
            h.codec, take_half(c, h, rows, own), (uint8_t *) codes + h.codes, (const uint8_t *) params + h.params);
    }
}

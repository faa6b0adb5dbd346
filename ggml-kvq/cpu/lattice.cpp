#include "lattice.h"

#include "types/lattice.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <numeric>

namespace {

struct table {
    bool wide = false;
    std::vector<uint8_t> bytes; // kvq_lattice_view::table
    std::vector<float> points;  // [d][n]
    std::vector<kvq_lattice_slot> slots;
    uint64_t slot_mul = 0;
};

// The first of odd numbers in a row that puts every point into a slot of its own.
void make_slots(const kvq_grid & g, table & t) {
    constexpr size_t N = (size_t) 1 << (64 - KVQ_LATTICE_SLOT_SHIFT);
    const auto key_of = [&](int i) {
        uint64_t key = 0;
        for (int j = 0; j < g.d; j++) { key |= (uint64_t) (uint8_t) g.point[i * g.d + j] << 8 * j; }
        return key;
    };
    for (bool clear = false; !clear;) {
        t.slot_mul = (t.slot_mul * 0x5851f42d4c957f2d + 0x14057b7ef767814f) | 1;
        const auto slot_of = [&](uint64_t key) { return key * t.slot_mul >> KVQ_LATTICE_SLOT_SHIFT; };
        t.slots.assign(N, { 0, 0 });
        for (uint64_t & key = t.slots[0].key; slot_of(key) == 0;) { key++; } // 0 itself lies there
        clear = true;
        for (int i = g.n - 1; i >= 0; i--) {
            kvq_lattice_slot & s = t.slots[slot_of(key_of(i))];
            clear = clear && (slot_of(s.key) != (uint64_t) (&s - t.slots.data()) || s.key == key_of(i));
            s = { key_of(i), (uint8_t) i };
        }
    }
}

const table & table_of(const kvq_grid & g) {
    static table tables[9][5]; // by d and bits
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    table & t = tables[g.d][g.bits];
    if (t.bytes.empty()) {
        const int stride = std::max(g.n, 16);
        t.bytes.assign((size_t) 2 * g.d * stride, 0);
        t.points.resize((size_t) g.n * g.d);
        for (int i = 0; i < g.n; i++) {
            for (int j = 0; j < g.d; j++) {
                const int point = g.point[i * g.d + j];
                t.wide |= std::abs(point) > KVQ_LATTICE_SMALL;
                t.bytes[(size_t) j * stride + i] = (uint8_t) (128 + point);
                t.bytes[(size_t) (g.d + j) * stride + i] = (uint8_t) point;
                t.points[(size_t) j * g.n + i] = (float) (point * g.step) * (1.0f / 4096.0f);
            }
        }
        if (g.d != 2) { make_slots(g, t); }
    }
    return t;
}

// Of `of`, points that may be the nearest to some y within `half` steps of the centre (x, y) in each coordinate. p is
// the nearest to the centre c. |y - q|^2 - |y - p|^2 is linear in y, so over the square it is at least
//     |c - q|^2 - |c - p|^2 - 2 half (|px - qx| + |py - qy|)
// and q is out where this is above 0; a bit more is left for what f32 rounds.
std::vector<int> nearest_in_square(const kvq_grid & g, const std::vector<int> & of, float x, float y, float half) {
    std::vector<float> far;
    for (const int k : of) {
        const float dx = x - g.point[2 * k], dy = y - g.point[2 * k + 1];
        far.push_back(dx * dx + dy * dy);
    }
    const size_t first = (size_t) (std::min_element(far.begin(), far.end()) - far.begin());
    const int px = g.point[2 * of[first]], py = g.point[2 * of[first] + 1];
    std::vector<int> out;
    for (size_t i = 0; i < of.size(); i++) {
        const int k = of[i], apart = std::abs(px - g.point[2 * k]) + std::abs(py - g.point[2 * k + 1]);
        if (far[i] - far[first] <= 2.06f * half * (float) apart) { out.push_back(k); }
    }
    return out;
}

// A table of KVQ_LATTICE_SIDE x KVQ_LATTICE_SIDE squares, `side` steps wide: entry(their points, whether at the edge).
// The squares' corners are multiples of `side`, or with shift -.5 their centres are.
template <typename F>
std::vector<int32_t> table_of_squares(const kvq_grid & g, float side, float shift, const F & entry) {
    constexpr int SIDE = KVQ_LATTICE_SIDE, BLOCK = 16; // a block of squares is asked first, a square about its points
    std::vector<int32_t> table((size_t) SIDE * SIDE);
    std::vector<int> all((size_t) g.n);
    std::iota(all.begin(), all.end(), 0);
    const auto in_square = [&](const std::vector<int> & of, int x, int y, int width) {
        const float half = 0.5f * (float) width;
        const auto centre = [&](int at) { return ((float) (at - SIDE / 2) + half + shift) * side; };
        return nearest_in_square(g, of, centre(x), centre(y), half * side);
    };
    for (int x0 = 0; x0 < SIDE; x0 += BLOCK) {
        for (int y0 = 0; y0 < SIDE; y0 += BLOCK) {
            const std::vector<int> here = in_square(all, x0, y0, BLOCK);
            for (int i = 0; i < BLOCK * BLOCK; i++) {
                const int x = x0 + i / BLOCK, y = y0 + i % BLOCK;
                const bool edge = x == 0 || y == 0 || x == SIDE - 1 || y == SIDE - 1;
                table[(size_t) (x * SIDE + y)] = entry(in_square(here, x, y, 1), edge);
            }
        }
    }
    return table;
}

const int32_t * near_of(const kvq_grid & g) {
    static std::vector<int32_t> tables[5]; // by bits
    static std::mutex mutex;
    if (g.d != 2 || g.n <= 4) { return nullptr; }
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<int32_t> & table = tables[g.bits];
    if (table.empty()) {
        table = table_of_squares(g, KVQ_LATTICE_NEAR, 0.0f, [](const std::vector<int> & of, bool edge) {
            if (edge || of.size() > 3) { return -1; } // what lies outside counts to the edge
            return of[0] | of[std::min<size_t>(1, of.size() - 1)] << 8 | of.back() << 16;
        });
    }
    return table.data();
}

} // namespace

const int32_t * kvq_lattice_pairs(const kvq_codec & c) {
    static std::vector<int32_t> tables[5]; // by bits
    static std::mutex mutex;
    const kvq_grid & g = *kvq_grid_find(c.group, c.bits);
    if (g.d != 2) { return nullptr; }
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<int32_t> & table = tables[g.bits];
    if (table.empty()) {
        table = table_of_squares(g, 1.0f, -0.5f, [&](const std::vector<int> & of, bool) {
            if (of.size() > 1) { return -1; }
            return of[0] | (g.point[2 * of[0]] & 255) << 8 | (g.point[2 * of[0] + 1] & 255) << 16;
        });
    }
    return table.data();
}

kvq_lattice_view kvq_lattice_make_view(const kvq_codec & c) {
    const kvq_grid & g = *kvq_grid_find(c.group, c.bits);
    const kvq_affine_parts p = kvq_lattice_get_parts(c);
    const table & t = table_of(g);
    kvq_lattice_view a = {};
    a.codec = c;
    a.d = g.d;
    a.n = g.n;
    a.n_dots = c.role == KVQ_ROLE_K ? c.head_size / g.d : c.n_cells;
    a.dot_stride = (a.n_dots + 3) / 4 * 4;
    a.n_tiles = kvq_lattice_n_tiles(c);
    for (int i = 0; i < p.n; i++) {
        a.n_chunks[i] = p.n_chunks[i];
        a.offset[i] = p.offset[i];
    }
    a.nb_codes = kvq_lattice_nb_codes(c);
    a.nb_params = kvq_lattice_nb_params(c);
    a.block = kvq_hadamard_block(c.head_size);
    a.norm = (float) (1.0 / sqrt((double) a.block)); // as kvq_hadamard
    a.step = (float) g.step * (1.0f / 4096.0f);
    a.wide = t.wide;
    a.table = t.bytes.data();
    a.points = t.points.data();
    a.squares = kvq_lattice_squares(g);
    a.near = near_of(g);
    a.slots = t.slots.data();
    a.slot_mul = t.slot_mul;
    a.whole = c;
    return a;
}

kvq_lattice_keys kvq_lattice_make_keys(const kvq_codec & c) {
    kvq_lattice_keys keys = {};
    kvq_lattice_half halves[2];
    keys.n = kvq_lattice_halves(c, halves);
    for (int i = 0; i < keys.n; i++) {
        kvq_lattice_view & a = keys.half[i];
        a = kvq_lattice_make_view(halves[i].codec);
        a.whole = c;
        a.fast = halves[i].fast;
        a.codes_at = halves[i].codes;
        a.params_at = halves[i].params;
    }
    return keys;
}

size_t kvq_lattice_encode_bytes(const kvq_lattice_view & a) {
    const size_t n = (size_t) a.codec.n_cells, n_vec = (size_t) a.codec.head_size / a.d,
                 n_quads = (size_t) (a.n_dots + 3) / 4;
    return 4 * n * a.codec.head_size + n * n_vec + a.n_tiles * n_quads * 64 + 64;
}

void kvq_lattice_queries::fold(const kvq_lattice_view & a, int n_rows, int dp, const float * q) {
    const int D = a.codec.head_size, stride = 2 * a.d * a.dot_stride;
    store.assign((size_t) n_rows * stride, 0);
    rows.resize((size_t) n_rows);
    const int padded = (D + 15) / 16 * 16;
    float x[KVQ_MAX_HEAD];
    for (int r = 0; r < n_rows; r++) {
        const float * row = q + (size_t) r * dp;
        for (int i = 0; i < D; i++) { x[i] = row[a.whole.split ? kvq_lattice_channel(a.whole, a.fast, i) : i]; }
        std::fill(x + D, x + padded, 0.0f);
        kvq_get_kernels().fold_query(a, x, &store[(size_t) r * stride], &rows[(size_t) r]);
    }
}

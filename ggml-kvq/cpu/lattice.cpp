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

} // namespace

// With c in the middle of a square, |y - q|^2 - |y - p|^2 is linear in y, so over the square it is at least
//     |c - q|^2 - |c - p|^2 - (|px - qx| + |py - qy|)
// in steps; here in halves of them, and a bit more for what f32 rounds.
const int32_t * kvq_lattice_pairs(const kvq_codec & c) {
    static std::vector<int32_t> tables[5]; // by bits
    static std::mutex mutex;
    const kvq_grid & g = *kvq_grid_find(c.group, c.bits);
    if (g.d != 2) { return nullptr; }
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<int32_t> & table = tables[g.bits];
    if (!table.empty()) { return table.data(); }
    table.assign(KVQ_LATTICE_SIDE * KVQ_LATTICE_SIDE, -1);
    for (int i = 0; i < KVQ_LATTICE_SIDE * KVQ_LATTICE_SIDE; i++) {
        const int x = i / KVQ_LATTICE_SIDE - KVQ_LATTICE_SIDE / 2, y = i % KVQ_LATTICE_SIDE - KVQ_LATTICE_SIDE / 2;
        int far[KVQ_LATTICE_MAX_POINTS], nearest = 0;
        for (int k = 0; k < g.n; k++) {
            const int dx = x - g.point[2 * k], dy = y - g.point[2 * k + 1];
            far[k] = dx * dx + dy * dy;
        }
        for (int k = 1; k < g.n; k++) { nearest = far[k] < far[nearest] ? k : nearest; }
        const int px = g.point[2 * nearest], py = g.point[2 * nearest + 1];
        bool all = true;
        for (int k = 0; k < g.n; k++) {
            const int apart = std::abs(px - g.point[2 * k]) + std::abs(py - g.point[2 * k + 1]);
            all = all && (!apart || 50 * (far[k] - far[nearest]) > 51 * apart);
        }
        if (all) { table[(size_t) i] = nearest | (px & 255) << 8 | (py & 255) << 16; }
    }
    return table.data();
}

// By the same bound, over squares of KVQ_LATTICE_NEAR steps a side; the points that are asked about are those of the
// block of squares around it.
static const int32_t * near_of(const kvq_grid & g) {
    static std::vector<int32_t> tables[5]; // by bits
    static std::mutex mutex;
    if (g.d != 2 || g.n <= 4) { return nullptr; }
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<int32_t> & table = tables[g.bits];
    if (!table.empty()) { return table.data(); }
    constexpr int SIDE = KVQ_LATTICE_SIDE, BLOCK = 16;
    // Of `of` those that may be nearest to what lies within `half` steps of (x, y) in each coordinate
    const auto keep = [&](const std::vector<int> & of, float x, float y, float half) {
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
    };
    const auto centre = [](int square, int width) {
        return ((float) square + 0.5f * (float) width - SIDE / 2) * KVQ_LATTICE_NEAR;
    };
    table.assign(SIDE * SIDE, -1);
    std::vector<int> all((size_t) g.n);
    std::iota(all.begin(), all.end(), 0);
    for (int x0 = 0; x0 < SIDE; x0 += BLOCK) {
        for (int y0 = 0; y0 < SIDE; y0 += BLOCK) {
            const std::vector<int> here =
                keep(all, centre(x0, BLOCK), centre(y0, BLOCK), 0.5f * BLOCK * KVQ_LATTICE_NEAR);
            for (int i = 0; i < BLOCK * BLOCK; i++) {
                const int x = x0 + i / BLOCK, y = y0 + i % BLOCK;
                const bool edge = x == 0 || y == 0 || x == SIDE - 1 || y == SIDE - 1; // what lies outside counts to it
                const std::vector<int> of = keep(here, centre(x, 1), centre(y, 1), 0.5f * KVQ_LATTICE_NEAR);
                if (edge || of.size() > 3) { continue; }
                const int second = of[std::min<size_t>(1, of.size() - 1)];
                table[(size_t) (x * SIDE + y)] = of[0] | second << 8 | of.back() << 16;
            }
        }
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

#include "lattice.h"

#include "../types/lattice.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>

namespace {

struct table {
    float step;
    std::vector<uint8_t> bytes; // [d][max(n, 16)], coordinate = step * (byte - 64)
    std::vector<uint8_t> exact; // [2][d][max(n, 16)], low and high bytes of 2^15 + point
    std::vector<float>   points; // [d][n]
};

const table & table_of(const kvq_grid & g) {
    static table tables[9][5]; // by d and bits
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    table & t = tables[g.d][g.bits];
    if (t.bytes.empty()) {
        int top = 1;
        for (int i = 0; i < g.n * g.d; i++) {
            top = std::max(top, std::abs((int) g.unit[i]));
        }
        const int stride = std::max(g.n, 16);
        t.step = (float) top / (63.0f * 4096.0f);
        t.bytes.assign((size_t) g.d * stride, 64);
        t.exact.assign((size_t) 2 * g.d * stride, 0);
        t.points.resize((size_t) g.n * g.d);
        for (int i = 0; i < g.n; i++) {
            for (int j = 0; j < g.d; j++) {
                const unsigned unit = (unsigned) (g.unit[i * g.d + j] + 32768);
                t.exact[(size_t) j * stride + i] = (uint8_t) unit;
                t.exact[(size_t) (g.d + j) * stride + i] = (uint8_t) (unit >> 8);
                t.points[(size_t) j * g.n + i] = (float) g.unit[i * g.d + j] * (1.0f / 4096.0f);
                t.bytes[(size_t) j * stride + i] = (uint8_t) (64 + lrintf((float) g.unit[i * g.d + j] * 63.0f / (float) top));
            }
        }
    }
    return t;
}

} // namespace

kvq_lattice_view kvq_lattice_make_view(const kvq_codec & c) {
    const kvq_grid & g = *kvq_grid_find(c.group, c.bits);
    const kvq_affine_parts p = kvq_lattice_get_parts(c);
    const table & t = table_of(g);
    kvq_lattice_view a = {};
    a.codec  = c;
    a.d      = g.d;
    a.n      = g.n;
    a.n_dots = c.role == KVQ_ROLE_K ? c.head_size / g.d : c.n_cells;
    a.dot_stride = (a.n_dots + 3) / 4 * 4;
    a.n_tiles    = kvq_lattice_n_tiles(c);
    for (int i = 0; i < p.n; i++) {
        a.n_chunks[i] = p.n_chunks[i];
        a.offset[i]   = p.offset[i];
    }
    a.nb_codes  = kvq_lattice_nb_codes(c);
    a.nb_params = kvq_lattice_nb_params(c);
    a.block     = kvq_hadamard_block(c.head_size);
    a.norm      = (float) (1.0 / sqrt((double) a.block)); // as kvq_hadamard
    a.step      = t.step;
    a.table     = t.bytes.data();
    a.exact     = t.exact.data();
    a.points    = t.points.data();
    return a;
}

size_t kvq_lattice_encode_bytes(const kvq_lattice_view & a) {
    const size_t n = (size_t) a.codec.n_cells, n_vec = (size_t) a.codec.head_size / a.d, n_quads = (size_t) (a.n_dots + 3) / 4;
    return 4 * n * a.codec.head_size + n * n_vec + a.n_tiles * n_quads * 64 + 64;
}

void kvq_lattice_queries::fold(const kvq_lattice_view & a, int n_rows, int dp, const float * q) {
    const int D = a.codec.head_size, stride = a.d * a.dot_stride;
    store.assign((size_t) n_rows * stride, 0);
    rows.resize((size_t) n_rows);
    float x[KVQ_MAX_HEAD];
    for (int r = 0; r < n_rows; r++) {
        std::copy_n(q + (size_t) r * dp, D, x);
        kvq_hadamard(D, x);
        float amax = 0.0f;
        for (int i = 0; i < D; i++) {
            amax = std::max(amax, fabsf(x[i]));
        }
        const float inv = amax > 0.0f ? 127.0f / amax : 0.0f;
        int8_t * q8 = &store[(size_t) r * stride];
        int sum = 0;
        for (int i = 0; i < D; i++) {
            const int v = (int) lrintf(x[i] * inv);
            q8[i % a.d * a.dot_stride + i / a.d] = (int8_t) v;
            sum += v;
        }
        rows[(size_t) r] = { q8, amax / 127.0f * a.step, 64.0f * (float) sum };
    }
}

void kvq_lattice_unrotate(const kvq_lattice_view & a, const float * rot, float * out) {
    const int D = a.codec.head_size, stride = a.n_tiles * 16;
    float x[KVQ_MAX_HEAD];
    for (int i = 0; i < D; i++) {
        x[i] = rot[i % a.d * stride + i / a.d];
    }
    kvq_hadamard(D, x);
    for (int i = 0; i < D; i++) {
        out[i] += x[i];
    }
}

#include "kernels.h"
#include "types/affine.h"
#include "types/types.h"

#include <algorithm>

kvq_view kvq_make_view(const kvq_codec & c) {
    if (c.type == KVQ_TYPE_F16) { return kvq_make_open_view(c); }
    kvq_view v = {};
    v.codec = c;
    v.dp = (c.head_size + 15) / 16 * 16;
    v.nb_codes = kvq_traits(c.type)->nb_codes(c);
    v.nb_params = kvq_traits(c.type)->nb_params(c);
    if (c.type == KVQ_TYPE_AFFINE) {
        const kvq_affine_dims d = kvq_affine_get_dims(c);
        const kvq_affine_parts p = kvq_affine_get_parts(c);
        v.np = d.np;
        v.n_groups = c.role == KVQ_ROLE_K ? c.n_cells / c.group : (c.head_size + c.group - 1) / c.group;
        v.n_tiles = d.n_tiles;
        v.n_parts = p.n;
        for (int i = 0; i < p.n; i++) {
            v.width[i] = p.width[i];
            v.shift[i] = p.shift[i];
            v.n_chunks[i] = p.n_chunks[i];
            v.offset[i] = p.offset[i];
        }
    }
    return v;
}

kvq_view kvq_make_open_view(const kvq_codec & c) {
    kvq_view v = {};
    v.codec = c;
    v.codec.type = KVQ_TYPE_F16;
    v.dp = (c.head_size + 15) / 16 * 16;
    v.nb_codes = 2 * (size_t) c.n_cells * v.dp;
    return v;
}

static size_t pad(size_t n, size_t to) { return (n + to - 1) / to * to; }

// impl_affine.h, affine_work
size_t kvq_work_bytes(const kvq_view & v) {
    const size_t n = pad((size_t) v.codec.n_cells, 64), d = pad((size_t) v.codec.head_size, 64),
                 groups = (size_t) v.n_groups;
    const size_t w8 = v.codec.role == KVQ_ROLE_V ? groups * n : 2 * d;
    return 4 * ((2 + KVQ_WORK_ROWS) * std::max(n, d) + 2 * KVQ_MAX_RUN * KVQ_WORK_ROWS * groups + 16) +
        KVQ_MAX_RUN * (KVQ_WORK_ROWS * w8 + n * d) + 64;
}

// values, four arrays of parameters, codes by row and by tile (impl_seal.h)
size_t kvq_encode_bytes(const kvq_view & v) {
    const size_t n = (size_t) v.codec.n_cells, d = (size_t) v.codec.head_size;
    return 4 * n * d + 4 * 5 * ((size_t) v.np + 16) + n * pad(d, 64) + n * pad(d, 16) + 64;
}

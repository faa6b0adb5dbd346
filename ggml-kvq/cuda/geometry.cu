// What kernels know of a codec.
#include "common.cuh"
#include "types/affine.h"
#include "types/lattice.h"
#include "types/mixed.h"

#include <cmath>

kvq_affine_geometry kvq_affine_get_geometry(const kvq_codec & c) {
    kvq_affine_geometry g = {};
    g.type = c.type;
    g.role = c.role;
    g.bits = c.bits;
    g.group = c.group;
    g.scale = c.scale;
    g.levels = c.levels;
    g.eta = c.eta;
    g.n_cells = c.n_cells;
    g.head_size = c.head_size;
    g.stride = (c.head_size + 15) / 16 * 16;
    if (c.type == KVQ_TYPE_MIXED) { // as a whole
        g.nb_codes = (int) kvq_mixed_nb_codes(c);
        g.nb_params = (int) kvq_mixed_nb_params(c);
    }
    if (c.type != KVQ_TYPE_AFFINE && c.type != KVQ_TYPE_LATTICE) { return g; }
    if (c.split) {
        g = kvq_split_get_geometry(c, false);
        g.head_size = c.head_size;
        return g;
    }
    kvq_affine_parts p;
    if (c.type == KVQ_TYPE_LATTICE) {
        p = kvq_lattice_get_parts(c);
        g.lanes = c.role == KVQ_ROLE_K ? c.n_cells : c.head_size / c.group;
        g.dots = c.role == KVQ_ROLE_K ? c.head_size / c.group : c.n_cells;
        g.n_tiles = kvq_lattice_n_tiles(c);
        g.block = kvq_hadamard_block(c.head_size);
        g.norm = (float) (1.0 / sqrt((double) g.block)); // as kvq_hadamard
        g.nb_codes = (int) kvq_lattice_nb_codes(c);
        g.nb_params = (int) kvq_lattice_nb_params(c);
    } else {
        p = kvq_affine_get_parts(c);
        const kvq_affine_dims d = kvq_affine_get_dims(c);
        g.lanes = d.lanes;
        g.dots = d.dots;
        g.n_tiles = d.n_tiles;
        g.np = d.np;
        g.nb_codes = (int) kvq_affine_nb_codes(c);
        g.nb_params = (int) kvq_affine_nb_params(c);
    }
    g.n_parts = p.n;
    for (int i = 0; i < p.n; i++) {
        g.width[i] = p.width[i];
        g.shift[i] = p.shift[i];
        g.n_chunks[i] = p.n_chunks[i];
        g.offset[i] = (int) p.offset[i];
    }
    return g;
}

kvq_affine_geometry kvq_split_get_geometry(const kvq_codec & c, bool fast) {
    kvq_lattice_half halves[2];
    if (fast >= kvq_lattice_halves(c, halves)) { return {}; }
    const kvq_lattice_half & half = halves[fast];
    kvq_affine_geometry g = kvq_affine_get_geometry(half.codec);
    g.split = c.split | (fast ? KVQ_SPLIT_FAST : 0);
    g.stride = (c.head_size + 15) / 16 * 16;
    g.nb_codes = (int) kvq_lattice_nb_codes(c);
    g.nb_params = (int) kvq_lattice_nb_params(c);
    g.np = (int) half.params;
    for (int i = 0; i < g.n_parts; i++) { g.offset[i] += (int) half.codes; }
    return g;
}

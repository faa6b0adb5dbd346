// Lattice blocks for the attention loop: views with tables of the points as bytes, and queries folded to two bytes.
#pragma once

#include "kernels.h"

#include <vector>

kvq_lattice_view kvq_lattice_make_view(const kvq_codec & c); // not split
kvq_lattice_keys kvq_lattice_make_keys(const kvq_codec & c);
const int32_t * kvq_lattice_pairs(const kvq_codec & c); // of a view, where saved states are read; NULL: d is not 2
size_t kvq_lattice_encode_bytes(const kvq_lattice_view & a);

// Rotates and folds n_rows queries of stride dp, of split keys the channels of their half. The result points into
// `store`.
struct kvq_lattice_queries {
    std::vector<int8_t> store;
    std::vector<kvq_lattice_query> rows;
    void fold(const kvq_lattice_view & a, int n_rows, int dp, const float * q);
};

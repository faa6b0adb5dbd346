// The kernels, written once over the vector layer of the including file (isa_*.h). No std:: here: inline library code
// compiled with wider instructions could be picked by the linker for every ISA.
#include "kernels.h"
#include "types/affine.h"
#include "types/basis.h"
#include "types/lattice.h"

#include <math.h>
#include <string.h>

namespace KVQ_NS {

static inline int imin(int a, int b) { return a < b ? a : b; }
static inline int pad_to(int n, int to) { return (n + to - 1) / to * to; }

// call(R, r) over blocks of rows [r, r + R), as many as share the registers
#define KVQ_ROWS(n_rows, call)                                                                                         \
    do {                                                                                                               \
        int r = 0;                                                                                                     \
        for (; KVQ_R >= 8 && r + 8 <= n_rows; r += 8) { call((KVQ_R >= 8 ? 8 : 1), r); }                               \
        for (; KVQ_R >= 4 && r + 4 <= n_rows; r += 4) { call((KVQ_R >= 4 ? 4 : 1), r); }                               \
        for (; KVQ_R >= 4 && r + 3 <= n_rows; r += 3) { call((KVQ_R >= 4 ? 3 : 1), r); }                               \
        for (; KVQ_R >= 2 && r + 2 <= n_rows; r += 2) { call((KVQ_R >= 2 ? 2 : 1), r); }                               \
        for (; r < n_rows; r++) { call(1, r); }                                                                        \
    } while (0)

// p[i] = sum (maximum) of x[i], i < R
template <int R> static inline void sum_rows(float * p, const f32x16 * x) {
    if (R >= 4) {
        for (int r = 0; r + 4 <= R; r += 4) { f32_sum4(p + r, x[r], x[r + 1], x[r + 2], x[r + 3]); }
    } else {
        for (int r = 0; r < R; r++) { p[r] = f32_sum(x[r]); }
    }
}
template <int R> static inline void max_rows(float * p, const f32x16 * x) {
    if (R >= 4) {
        for (int r = 0; r + 4 <= R; r += 4) { f32_hmax4(p + r, x[r], x[r + 1], x[r + 2], x[r + 3]); }
    } else {
        for (int r = 0; r < R; r++) { p[r] = f32_hmax(x[r]); }
    }
}

static void f32_to_f16_row(const float * x, uint16_t * y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) { f32_store_f16(y + i, f32_load(x + i)); }
    if (i < n) {
        float a[16] = {};
        uint16_t b[16];
        for (int64_t j = i; j < n; j++) { a[j - i] = x[j]; }
        f32_store_f16(b, f32_load(a));
        for (int64_t j = i; j < n; j++) { y[j] = b[j - i]; }
    }
}

static void f16_to_f32_row(const uint16_t * x, float * y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) { f32_store(y + i, f32_load_f16(x + i)); }
    if (i < n) {
        uint16_t a[16] = {};
        float b[16];
        for (int64_t j = i; j < n; j++) { a[j - i] = x[j]; }
        f32_store(b, f32_load_f16(a));
        for (int64_t j = i; j < n; j++) { y[j] = b[j - i]; }
    }
}

} // namespace

#include "impl_f16.h"
#include "impl_affine.h"
#include "lattice_impl.h"
#include "impl_hadamard.h"
#include "impl_mean.h"
#include "impl_softmax.h"
#include "impl_far.h"
#include "impl_seal.h"
#include "impl_predict.h"
#include "impl_rows.h"
#include "impl_basis.h"
#include "impl_seal_lattice.h"
#include "impl_state.h"

#define KVQ_KERNELS(name, available)                                                                                   \
    { name, available, KVQ_NS::f32_to_f16_row, KVQ_NS::f16_to_f32_row,                                                 \
        { { KVQ_NS::score_f16, KVQ_NS::accum_f16, KVQ_NS::f16_to_tile, 9 },                                            \
            { KVQ_NS::score_affine, KVQ_NS::accum_affine, KVQ_NS::affine_to_tile, 1 << 30 } },                         \
        KVQ_NS::score_lattice, KVQ_NS::accum_lattice, KVQ_NS::fold_query, KVQ_NS::unrotate, KVQ_NS::score_rope,        \
        KVQ_NS::page_positions, KVQ_NS::mean_coefficients, KVQ_NS::score_mean, KVQ_NS::score_tile, KVQ_NS::accum_tile, \
        KVQ_NS::softmax, KVQ_NS::scale_row, KVQ_NS::page_weights, KVQ_NS::rank_cells, KVQ_NS::quantise_row,            \
        KVQ_NS::predict, KVQ_NS::sum_rows8, KVQ_NS::apply_tile8, KVQ_NS::lattice_rows, KVQ_NS::add_lattice_rows,       \
        KVQ_NS::rows_to_f16, KVQ_NS::turn_table, KVQ_NS::turn_rows, KVQ_NS::key_coords, KVQ_NS::value_coords,          \
        KVQ_NS::basis_keys, KVQ_NS::KVQ_COORD_ROWS, KVQ_NS::coord_logits, KVQ_NS::turn_back, KVQ_NS::add_basis,        \
        KVQ_NS::encode_affine, KVQ_NS::encode_lattice, KVQ_NS::decode_affine, KVQ_NS::match_affine,                    \
        KVQ_NS::decode_lattice, KVQ_NS::match_lattice, KVQ_NS::hash_rows }

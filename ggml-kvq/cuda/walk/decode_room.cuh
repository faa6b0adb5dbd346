// What a block of decode_kernel takes: warps, shared memory (attend_decode.cuh).
#pragma once

#include "decode_fine.cuh"
#include "decode_lattice.cuh"
#include "decode_products.cuh"

namespace {

// Template parameters of decode_kernel. MEANS: sealed pages lack theirs. FINE: groups of 16 with parameters in f16 (1)
// or 8 bits (2), or of 32 in f16 (3). WIDE: heads that are not D channels. PART: the whole, or one of the parts of an
// attention that picks cells in between (device_far.cu): logits of all cells and sums of their exponentials, or values
// by such logits. AHEAD: the whole where cells were picked by the step before: their far rows are here, and near ones
// do not count. It leaves logits of all cells for the next picks.
enum { WHOLE, LOGITS, VALUES, AHEAD };

// shared memory of a warp; masks or, where every KV head has its own, cells of slots
__host__ __device__ __forceinline__ int warp_bytes(const kvq_attend_args & a) {
    const int maps = a.map_stride || a.fine ? 2 * DECODE_CELLS * 4 : 0;
    return 2 * a.stage_bytes + a.stage_wide + 8 * (int) sizeof(kvq_page) + maps + (a.fine ? FINE_TURN : 0);
}

// of the points
template <int KB, int VB> __host__ __device__ constexpr int nb_tables() {
    return KB > LATTICE ? (4 * key_points<KB> + (4 << cut<VB>::B) + 15) / 16 * 16 : 0;
}

template <int D, int KB, bool MEANS, int FINE> constexpr bool takes_many = MEANS || (FINE && D * KB > 256); // registers
template <int D, int KB, bool MEANS, int FINE, bool WIDE>
constexpr int decode_warps = most_warps<WIDE, takes_many<D, KB, MEANS, FINE>>();

template <int KB, bool MEANS, bool WIDE> constexpr bool copies_rows = KB > LATTICE && !MEANS && !WIDE;

} // namespace

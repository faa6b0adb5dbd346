// Decode attention: masks of a thread's cells (attend_decode.cuh).
#pragma once

#include "decode_stage.cuh"

namespace {

// mask of slots `slot` and the next of a page, whose cells stand at map if it has one
__device__ __forceinline__ uint32_t mask_pair(
    const kvq_attend_args & a, const __half * mask, const kvq_page & page, const int32_t * map, int slot) {
    const uint32_t next = (uint32_t) (page.cell + slot);
    const uint2 cells = page.map ? *(const uint2 *) map : make_uint2(next, next + 1);
    const auto of = [&](uint32_t cell) {
        return cell >= (uint32_t) a.n_kv ? 0xfc00u : mask ? __half_as_ushort(mask[cell]) : 0u;
    };
    return of(cells.x) | of(cells.y) << 16;
}

// mask of this thread's cells in S, STEP*i + {0, 1} from `slot` on in the page, i < N, for its two columns, from
// mk[][j0] on; map: of those slots, if the page has one. With one mask for both, mk[0] alone: a copy would wait here
// for what is not needed before the products.
template <int N, int STEP>
__device__ __forceinline__ void load_mask(const kvq_attend_args & a, const __half * const (&mask)[2], bool one_mask,
    const kvq_page & page, const int32_t * map, int slot, int j0, uint32_t (&mk)[2][4]) {
    if (!page.map && page.cell + (slot & ~31) + 32 <= a.n_kv) {
        const int cell = page.cell + slot;
#pragma unroll
        for (int i = 0; i < N; i++) {
            mk[0][j0 + i] = mask[0] ? __ldg((const uint32_t *) (mask[0] + cell) + STEP / 2 * i) : 0;
        }
        if (!one_mask) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                mk[1][j0 + i] = mask[0] ? __ldg((const uint32_t *) (mask[1] + cell) + STEP / 2 * i) : 0;
            }
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        mk[0][j0 + i] = mask_pair(a, mask[0], page, map + STEP * i, slot + STEP * i);
        if (!one_mask) { mk[1][j0 + i] = mask_pair(a, mask[1], page, map + STEP * i, slot + STEP * i); }
    }
}

} // namespace

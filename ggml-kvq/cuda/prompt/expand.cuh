// What the kernels that write pages as plain f16 rows share (kvq_launch_expand): block x = page, block y = KV head.
#pragma once
#include "cuda/common.cuh"

struct packed_page {
    const uint8_t *codes, *params;
    uint16_t * rows; // of this head: cell t at rows + t * step
    size_t step;
    int n; // cells

    // False: the page is done. It is f16, and its rows are copied here, or it is empty and reads as zero.
    __device__ __forceinline__ bool find(
        const kvq_affine_geometry & g, const kvq_page * pages, int n_head, const kvq_row_place & to) {
        const kvq_page & page = pages[blockIdx.x];
        const int h = blockIdx.y;
        if (lies_far(to, page, blockIdx.x)) { return false; }
        n = to.by_slot ? g.n_cells : min(g.n_cells, to.n_kv - page.cell);
        codes = (const uint8_t *) (to.value ? page.v_codes : page.k_codes);
        params = (const uint8_t *) (to.value ? page.v_params : page.k_params);
        step = to.step ? (size_t) to.step : (size_t) n_head * g.head_size;
        rows = to.rows + (to.by_slot ? blockIdx.x * g.n_cells : page.cell) * step + (size_t) h * g.head_size;
        if (!params || !page.n_slots) {
            const uint16_t * tile = (const uint16_t *) codes + (size_t) h * g.n_cells * g.stride;
            const int units = g.head_size / 8;
            for (int i = threadIdx.x; i < n * units; i += blockDim.x) {
                const int t = i / units, u = i % units;
                *(uint4 *) (rows + t * step + 8 * u) =
                    page.n_slots ? *(const uint4 *) (tile + t * g.stride + 8 * u) : make_uint4(0, 0, 0, 0);
            }
            return false;
        }
        codes += (size_t) h * g.nb_codes;
        params += (size_t) h * g.nb_params;
        return true;
    }
};

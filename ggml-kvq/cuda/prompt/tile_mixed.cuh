// 32 cells of a mixed page in shared memory, in the order of cells (tile.cuh has the layout).
#pragma once

#include "cuda/walk/attend.cuh"
#include "cuda/tile.cuh"

template <int D, int THREADS>
static __device__ __noinline__ void fill_tile_mixed(
    const kvq_attend_args & a, const kvq_page & page, int kvh, int t0, __half * s_k, __half * s_v) {
    __shared__ int s_place[2][TILE_CELLS];
    const bool sealed[2] = { page.k_params != nullptr, page.v_params != nullptr };
    const uint8_t *kq = (const uint8_t *) page.k_params + (size_t) kvh * a.km.nb_params,
                  *vq = (const uint8_t *) page.v_params + (size_t) kvh * a.vm.nb_params;
    const uint8_t *kc = (const uint8_t *) page.k_codes + (size_t) kvh * a.km.nb_codes,
                  *vc = (const uint8_t *) page.v_codes + (size_t) kvh * a.vm.nb_codes;
    for (int i = threadIdx.x; i < 2 * TILE_CELLS; i += THREADS) {
        const int value = i / TILE_CELLS, t = i % TILE_CELLS;
        s_place[value][t] = sealed[value] ? mixed_place(value ? vq : kq, t0 + t) : 0;
    }
    __syncthreads();
    if (sealed[0]) {
#pragma unroll 2
        for (int i = threadIdx.x; i < TILE_CELLS * (D / 4); i += THREADS) {
            const int t = i / (D / 4), c = i % (D / 4) * 4;
            *(uint2 *) (s_k + t * (D + 8) + c) =
                c < a.km.head_size ? mixed_halves(mixed_values(a.km, kc, kq, s_place[0][t], c)) : make_uint2(0, 0);
        }
    } else {
        fill_k_open<D, THREADS>((const uint16_t *) page.k_codes + (size_t) kvh * a.k.n_cells * a.k.stride, a.k.stride,
            a.k.head_size, t0, s_k);
    }
    if (sealed[1]) {
#pragma unroll 2
        for (int i = threadIdx.x; i < TILE_CELLS * (D / 4); i += THREADS) {
            const int t = i % TILE_CELLS, c = i / TILE_CELLS * 4;
            const uint2 x =
                c < a.vm.head_size ? mixed_halves(mixed_values(a.vm, vc, vq, s_place[1][t], c)) : make_uint2(0, 0);
            s_v[(c + 0) * TILE_V_STEP + t] = __ushort_as_half((uint16_t) x.x);
            s_v[(c + 1) * TILE_V_STEP + t] = __ushort_as_half((uint16_t) (x.x >> 16));
            s_v[(c + 2) * TILE_V_STEP + t] = __ushort_as_half((uint16_t) x.y);
            s_v[(c + 3) * TILE_V_STEP + t] = __ushort_as_half((uint16_t) (x.y >> 16));
        }
    } else {
        fill_v_open<D, THREADS>((const uint16_t *) page.v_codes + (size_t) kvh * a.v.n_cells * a.v.stride, a.v.stride,
            a.v.head_size, t0, s_v);
    }
}

// Lattice pages as plain f16 rows (kvq_launch_expand): a warp rotates a row of a cell and a head back.
#include "lattice.cuh"
#include "seal.cuh"

constexpr int WARPS = 8;

template <int N> static __global__ void __launch_bounds__(32 * WARPS) expand_kernel(const __grid_constant__ kvq_affine_geometry g, const kvq_page * pages, int n_kv, int n_head, uint16_t * rows) {
    const kvq_page & page = pages[blockIdx.x];
    const int h = blockIdx.y, n = min(g.n_cells, n_kv - page.cell), lane = threadIdx.x % 32;
    const bool key = g.role == KVQ_ROLE_K;
    const uint8_t * codes  = (const uint8_t *) (key ? page.k_codes  : page.v_codes);
    const uint8_t * params = (const uint8_t *) (key ? page.k_params : page.v_params);
    const size_t step = (size_t) n_head * g.head_size;
    rows += page.cell * step + (size_t) h * g.head_size;
    if (!params || !page.n_slots) {
        const uint16_t * tile = (const uint16_t *) codes + (size_t) h * g.n_cells * g.stride;
        const int units = g.head_size / 8;
        for (int i = threadIdx.x; i < n * units; i += blockDim.x) {
            const int t = i / units, u = i % units;
            *(uint4 *) (rows + t * step + 8*u) = page.n_slots ? *(const uint4 *) (tile + t * g.stride + 8*u) : make_uint4(0, 0, 0, 0);
        }
        return;
    }
    codes  += (size_t) h * g.nb_codes;
    params += (size_t) h * g.nb_params;
    for (int t = threadIdx.x / 32; t < n; t += WARPS) {
        float x[N];
        lattice_row<N>(g, codes, params, t, x);
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (32*i + lane < g.head_size) { rows[t * step + 32*i + lane] = f32_to_f16_finite(x[i]); }
        }
    }
}

void kvq_launch_expand_lattice(const kvq_affine_geometry & g, const kvq_page * pages, int n_pages, int n_kv, int n_head, uint16_t * rows, cudaStream_t stream) {
    lattice_switch(g.head_size, [&](auto width) { expand_kernel<decltype(width)::value><<<dim3(n_pages, n_head), 32 * WARPS, 0, stream>>>(g, pages, n_kv, n_head, rows); });
}

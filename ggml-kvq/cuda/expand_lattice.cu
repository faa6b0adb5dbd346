// Lattice pages as plain f16 rows (kvq_launch_expand): a warp rotates a row of a cell and a head back.
#include "expand.cuh"
#include "lattice.cuh"
#include "seal.cuh"

constexpr int WARPS = 8;

// TURNS: sealed rows leave something out
template <int N, bool TURNS> static __global__ void __launch_bounds__(32 * WARPS) expand_kernel(const __grid_constant__ kvq_affine_geometry g, const kvq_page * pages, int n_head, const kvq_row_place to, const __grid_constant__ kvq_turn turn) {
    __shared__ float s_row[TURNS ? WARPS : 1][TURNS ? TURN_MAX : 1];
    packed_page p;
    if (!p.find(g, pages, n_head, to)) { return; }
    const int lane = threadIdx.x % 32;
    for (int t = threadIdx.x / 32; t < p.n; t += WARPS) {
        float x[N];
        lattice_row<N>(g, p.codes, p.params, t, x);
        if (TURNS) { restore_row<N>(turn, g.head_size, blockIdx.y, pages[blockIdx.x].cell + t, s_row[TURNS ? threadIdx.x / 32 : 0], x); }
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (32*i + lane < g.head_size) { p.rows[t * p.step + 32*i + lane] = f32_to_f16_finite(x[i]); }
        }
    }
}

void kvq_launch_expand_lattice(const kvq_affine_geometry & g, const kvq_page * pages, int n_pages, int n_head, const kvq_row_place & to, const kvq_turn & turn, cudaStream_t stream) {
    lattice_switch(g.head_size, [&](auto width) {
        constexpr int N = decltype(width)::value;
        const auto kernel = turn.mean || turn.rotary.n ? expand_kernel<N, true> : expand_kernel<N, false>;
        kernel<<<dim3(n_pages, n_head), 32 * WARPS, 0, stream>>>(g, pages, n_head, to, turn);
    });
}

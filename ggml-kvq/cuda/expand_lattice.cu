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

template <int N> static __global__ void __launch_bounds__(32 * WARPS) unfold_kernel(const __grid_constant__ kvq_unfold_args a) {
    __shared__ float s_row[WARPS][TURN_MAX];
    const kvq_page & page = a.pages[blockIdx.x];
    const int h = blockIdx.y, role = a.first_role + blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_head = gridDim.y;
    const kvq_affine_geometry & g = a.g[role];
    const uint8_t * codes  = (const uint8_t *) (role ? page.v_codes  : page.k_codes);
    const uint8_t * params = (const uint8_t *) (role ? page.v_params : page.k_params);
    const size_t head = (size_t) g.n_cells * g.stride;
    uint16_t * tile = a.tiles[role] + (size_t) blockIdx.x * n_head * head;
    if (h == 0 && threadIdx.x == 0) {
        kvq_page & to = a.table[blockIdx.x];
        const void * from = params ? (const void *) tile : codes;
        if (role) {
            to.v_codes  = from;
            to.v_params = nullptr;
        } else {
            to.k_codes  = from;
            to.k_params = nullptr;
            to.cell     = page.cell;
            to.n_slots  = page.n_slots;
            to.map      = page.map;
        }
    }
    if (!params || !page.n_slots) {
        return;
    }
    codes  += (size_t) h * g.nb_codes;
    params += (size_t) h * g.nb_params;
    for (int t = warp; t < g.n_cells; t += WARPS) {
        float x[N];
        lattice_row<N>(g, codes, params, t, x);
        restore_row<N>(a.turn[role], g.head_size, h, page.cell + t, s_row[warp], x);
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (32*i + lane < g.stride) { tile[h * head + (size_t) t * g.stride + 32*i + lane] = f32_to_f16_finite(x[i]); }
        }
    }
}

void kvq_launch_unfold(const kvq_unfold_args & args, int first_role, int n_roles, int n_pages, int n_head, cudaStream_t stream) {
    kvq_unfold_args a = args;
    a.first_role = first_role;
    const int widest = a.g[0].head_size > a.g[1].head_size ? a.g[0].head_size : a.g[1].head_size;
    lattice_switch(widest, [&](auto width) { unfold_kernel<decltype(width)::value><<<dim3(n_pages, n_head, n_roles), 32 * WARPS, 0, stream>>>(a); });
}

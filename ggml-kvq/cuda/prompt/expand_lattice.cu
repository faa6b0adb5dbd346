// Lattice pages as plain f16 rows (kvq_launch_expand): a warp has a cell with all its heads, as in kvq_launch_unfold.
// Prompts read every cell anew, so the usual shapes have a kernel that works on pairs of f16 (strips); others take the
// operations of the C reference in f32.
#include "strips.cuh"

constexpr int WARPS = 8;

// TURNS: sealed rows leave something out
template <int LANES, int Q, bool TURNS>
static __global__ void __launch_bounds__(32 * WARPS, (Q == 4 ? 1 : 2) + (Q == 1 || !TURNS))
    expand_kernel(const __grid_constant__ kvq_affine_geometry g, const kvq_page * pages, int n_head,
        const kvq_row_place to, const __grid_constant__ kvq_turn left_out) {
    using quad = quads<LANES, Q>;
    extern __shared__ __align__(16) uint8_t memory[];
    __shared__ int32_t s_pos[WARPS];
    float * const base = (float *) memory;
    const kvq_page & page = pages[blockIdx.y];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = blockIdx.x * WARPS + warp, D = g.head_size;
    const int n = to.by_slot ? g.n_cells : min(g.n_cells, to.n_kv - page.cell);
    const uint8_t * codes = (const uint8_t *) (to.value ? page.v_codes : page.k_codes);
    const uint8_t * params = (const uint8_t *) (to.value ? page.v_params : page.k_params);
    const size_t step = to.step ? (size_t) to.step : (size_t) n_head * D;
    uint16_t * const row = to.rows + (size_t) ((to.by_slot ? (int) blockIdx.y * g.n_cells : page.cell) + t) * step;
    if ((int) blockIdx.x * WARPS >= n || lies_far(to, page, blockIdx.y)) { return; }
    if (!params || !page.n_slots) { // open, or empty, which reads as zero
        const uint16_t * from = (const uint16_t *) codes + (size_t) t * g.stride;
        const int units = D / 8;
        for (int i = lane; t < n && i < n_head * units; i += 32) {
            const int h = i / units, c = i % units * 8;
            const uint16_t * at = from + (size_t) h * g.n_cells * g.stride + c;
            *(uint4 *) (row + h * D + c) = page.n_slots ? *(const uint4 *) at : make_uint4(0, 0, 0, 0);
        }
        return;
    }
    const kvq_device_rotary & r = left_out.rotary;
    const kvq_device_basis & basis = left_out.basis;
    const row_memory shared(g, r, quad::BUFFER, (basis.n + 3) / 4);
    const bool turns = TURNS && r.n != 0;
    const int cell = page.cell + min(t, n - 1);
    const int32_t pos = turns ? left_out.positions[cell] : 0;
    const int32_t was = turns && left_out.sealed ? left_out.sealed[cell] : 0;
    const bool stays = turns && left_out.sealed && was == pos, moved = turns && left_out.sealed && !stays;
    if (lane == 0) { s_pos[warp] = pos; }
    shared.fill(base, g, r, s_pos, turns, false);
    if (t >= n) { return; }
    typename quad::turner turn;
    if (turns) {
        const float2 * factors = shared.turn_of(base, WARPS, warp);
        turn.find(r, [&](int j) { return factors[j]; });
    }
    float * const buffer = shared.buffer_of(base, warp);
    typename quad::places places;
    uint32_t words[2 * Q][2];
    places.find(g, t);
    places.load(g, codes + (size_t) min(quad::sub(), n_head - 1) * g.nb_codes, words);
    float scales = 0.0f, coord_scale = 0.0f;
    uint32_t * const words_of_coords = (uint32_t *) shared.row_of(base, WARPS, warp);
    const bool has_coords = TURNS && basis.n && page.k_params;
    if (has_coords) { coord_scale = load_coords(basis, (const uint8_t *) page.k_params, t, words_of_coords); }
    for (int h0 = 0; h0 < n_head; h0 += quad::ROWS) {
        const int h = h0 + quad::sub();
        const bool valid = h < n_head;
        typename quad::row x;
        uint32_t now[2 * Q][2];
#pragma unroll
        for (int i = 0; i < 2 * Q; i++) {
            now[i][0] = words[i][0];
            now[i][1] = words[i][1];
        }
        places.load(g, codes + (size_t) min(h + quad::ROWS, n_head - 1) * g.nb_codes, words); // of the next
        if (h0 % 32 == 0) { scales = lattice_scale(g, params + (size_t) min(h0 + lane, n_head - 1) * g.nb_params, t); }
        places.decode(g, now, base, __shfl_sync(~0u, scales, h % 32), x);
        if constexpr (TURNS) {
            typename quad::row mu;
            quad::undo_gains(left_out.back.gain, h, valid, D, x);
            quad::load(left_out.mean + (size_t) h * D, left_out.mean && valid, D, mu);
            if (has_coords) { quad::add_said(basis, words_of_coords, coord_scale, h, valid, D, mu); }
            if (moved) {
                typename quad::turner back;
                back.find(r, [&](int j) { return turn_factors(r, was, true, j); });
                back.apply(r, buffer, x);
            }
            if (left_out.mean && stays) { turn.apply(r, buffer, mu); }
#pragma unroll
            for (int q = 0; q < Q; q++) {
#pragma unroll
                for (int j = 0; j < 4; j++) { x[q][j] += mu[q][j]; }
            }
            if (turns && !stays) { turn.apply(r, buffer, x); }
        }
        if (valid) { quad::store_half(row + h * D, D, D, x); }
    }
}

// ---------------------------------------------------------------- grids of two channels, heads of 64, 128, 256, 512

template <int D>
static void launch_strips_of(const kvq_affine_geometry & g, const kvq_page * pages, int n_pages, int n_head,
    const kvq_row_place & to, const kvq_turn & turn, cudaStream_t stream) {
    const auto launch = turn.leaves_out()
        ? (to.value ? launch_strips<D, false, true, false> : launch_strips<D, true, true, false>)
        : (to.value ? launch_strips<D, false, false, false> : launch_strips<D, true, false, false>);
    launch(g, {}, pages, n_pages, n_head, to, turn, stream);
}

void kvq_launch_expand_lattice(const kvq_affine_geometry & g, const kvq_page * pages, int n_pages, int n_head,
    const kvq_row_place & to, const kvq_turn & turn, cudaStream_t stream) {
    if (kvq_takes_strips(g, n_head, to, turn, false)) {
        const auto launch = g.head_size == 64 ? launch_strips_of<64>
            : g.head_size == 128              ? launch_strips_of<128>
            : g.head_size == 256              ? launch_strips_of<256>
                                              : launch_strips_of<512>;
        launch(g, pages, n_pages, n_head, to, turn, stream);
        return;
    }
    quads_switch(g.head_size, [&](auto shape) {
        constexpr int LANES = decltype(shape)::LANES, Q = decltype(shape)::Q;
        const auto kernel = turn.leaves_out() ? expand_kernel<LANES, Q, true> : expand_kernel<LANES, Q, false>;
        const size_t nb = row_memory(g, turn.rotary, quads<LANES, Q>::BUFFER, (turn.basis.n + 3) / 4).bytes(WARPS);
        kernel<<<dim3((g.n_cells + WARPS - 1) / WARPS, n_pages), 32 * WARPS, nb, stream>>>(g, pages, n_head, to, turn);
    });
}

// Split keys (types/lattice.h) as plain f16 rows, and as open pages: what expand_lattice.cu and seal_chain.cu make of
// blocks of a whole head. A row is decoded in the order fast half, slow half, in which each half is rotated by itself,
// and put into the order of its channels. Prompts read every cell anew: the usual shapes have strips.
#include "strips.cuh"

constexpr int WARPS = 8;

struct split_args {
    kvq_affine_geometry slow, fast; // slow: of the whole; fast.n_parts 0: its channels are zero
    kvq_turn turn;
    const kvq_page * pages;
    int n_head;
    kvq_row_place to;
    // open pages instead of rows: NULL, NULL
    kvq_page * table;
    uint16_t * tiles;
};

template <int LANES, int Q> struct split_row : quads<LANES, Q> {
    using quad = quads<LANES, Q>;
    // As quad::places, of the half that each pair of channels belongs to.
    int word[2 * Q][2], bit[2 * Q][2];
    __device__ __forceinline__ static const kvq_affine_geometry & half_of(const split_args & a, int c) {
        return c < a.slow.head_size / 2 ? a.fast : a.slow;
    }
    __device__ __forceinline__ static bool has(const split_args & a, int c) {
        return c < a.slow.head_size && half_of(a, c).n_parts;
    }
    __device__ __forceinline__ void find(const split_args & a, int cell) {
#pragma unroll
        for (int i = 0; i < 2 * Q; i++) {
            const int c = quad::channel(i / 2) + i % 2 * 2, n = a.slow.head_size / 2;
            const kvq_affine_geometry & g = half_of(a, c);
            const int vec = has(a, c) ? (c < n ? c : c - n) / 2 : 0;
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const bool there = has(a, c) && part < g.n_parts;
                const int w = there ? g.width[part] : 8, span = 32 / w, rest = vec % span;
                word[i][part] =
                    there ? g.offset[part] / 4 + (cell / 16 * g.n_chunks[part] + vec / span) * 16 + cell % 16 : 0;
                bit[i][part] = rest % 4 * 8 + rest / 4 * w;
            }
        }
    }
    // points: of the slow half; fast_points
    __device__ __forceinline__ void decode(const split_args & a, int h, const uint8_t * codes, const float * points,
        const float * fast_points, float slow_scale, float fast_scale, float * buffer, typename quad::row & x) const {
#pragma unroll
        for (int i = 0; i < 2 * Q; i++) {
            const int c = quad::channel(i / 2) + i % 2 * 2;
            const kvq_affine_geometry & g = half_of(a, c);
            const bool slow = c >= a.slow.head_size / 2;
            float2 p = make_float2(0.0f, 0.0f);
            if (has(a, c)) {
                const uint32_t * from = (const uint32_t *) codes;
                int index = __ldg(from + word[i][0]) >> bit[i][0] & ((1 << g.width[0]) - 1);
                if (g.n_parts == 2) {
                    index |= (__ldg(from + word[i][1]) >> bit[i][1] & ((1 << g.width[1]) - 1)) << g.shift[1];
                }
                p = ((const float2 *) (slow ? points : fast_points))[index];
            }
            const float s = slow ? slow_scale : fast_scale;
            x[i / 2][i % 2 * 2] = p.x * s;
            x[i / 2][i % 2 * 2 + 1] = p.y * s;
        }
        quad::hadamard(a.slow, x);
        const kvq_device_order & order = a.turn.back;
        if (a.slow.split == KVQ_SPLIT_NORM && !order.channel) { return; } // channels have this order
        float * const own = buffer + quad::sub() * 4 * LANES;
        const int half = a.slow.head_size / 2, quarter = half / 2;
        __syncwarp();
#pragma unroll
        for (int q = 0; q < Q; q++) {
            const int c = quad::channel(q), i = c < half ? c : c - half;
            if (c < 2 * half && order.channel) {
                const int at = h * a.slow.head_size + c;
#pragma unroll
                for (int j = 0; j < 4; j++) { own[order.channel[at + j]] = x[q][j] * order.gain[at + j]; }
            } else if (c < 2 * half) {
                *(float4 *) (own + i / quarter * half + (c < half ? 0 : quarter) + i % quarter) =
                    make_float4(x[q][0], x[q][1], x[q][2], x[q][3]);
            }
        }
        __syncwarp();
#pragma unroll
        for (int q = 0; q < Q; q++) {
            if (quad::channel(q) < 2 * half) {
                const float4 v = *(const float4 *) (own + quad::channel(q));
                x[q][0] = v.x;
                x[q][1] = v.y;
                x[q][2] = v.z;
                x[q][3] = v.w;
            }
        }
    }
};

template <int LANES, int Q>
static __global__ void __launch_bounds__(32 * WARPS, (Q == 4 ? 1 : 2) + (Q == 1))
    split_kernel(const __grid_constant__ split_args a) {
    using quad = quads<LANES, Q>;
    extern __shared__ __align__(16) uint8_t memory[];
    __shared__ int32_t s_pos[WARPS];
    float * const base = (float *) memory;
    const kvq_affine_geometry & g = a.slow;
    const kvq_page & page = a.pages[blockIdx.y];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = blockIdx.x * WARPS + warp, D = g.head_size;
    const int n = a.tiles || a.to.by_slot ? g.n_cells : min(g.n_cells, a.to.n_kv - page.cell);
    const uint8_t *codes = (const uint8_t *) page.k_codes, *params = (const uint8_t *) page.k_params;
    const size_t head = a.tiles ? (size_t) g.n_cells * g.stride : D; // from one head's row to the next one's
    uint16_t * row;
    if (a.tiles) {
        uint16_t * const tile = a.tiles + (size_t) blockIdx.y * a.n_head * head;
        row = tile + (size_t) t * g.stride;
        if (t == 0 && lane == 0) { // the page with its tile instead of its blocks
            kvq_page & to = a.table[blockIdx.y];
            to.k_codes = params ? (const void *) tile : codes;
            to.k_params = nullptr;
            to.cell = page.cell;
            to.n_slots = page.n_slots;
            to.map = page.map;
        }
        if (!params || !page.n_slots) { return; }
    } else {
        const size_t step = a.to.step ? (size_t) a.to.step : (size_t) a.n_head * D;
        row = a.to.rows + (size_t) ((a.to.by_slot ? (int) blockIdx.y * g.n_cells : page.cell) + t) * step;
        if ((int) blockIdx.x * WARPS >= n || lies_far(a.to, page, blockIdx.y)) { return; }
        if (!params || !page.n_slots) { // open, or empty, which reads as zero
            const uint16_t * from = (const uint16_t *) codes + (size_t) t * g.stride;
            const int units = D / 8;
            for (int i = lane; t < n && i < a.n_head * units; i += 32) {
                const int h = i / units, c = i % units * 8;
                const uint16_t * at = from + (size_t) h * g.n_cells * g.stride + c;
                *(uint4 *) (row + h * D + c) = page.n_slots ? *(const uint4 *) at : make_uint4(0, 0, 0, 0);
            }
            return;
        }
    }
    const kvq_device_rotary & r = a.turn.rotary;
    const kvq_device_basis & basis = a.turn.basis;
    const row_memory shared(g, r, quad::BUFFER, (basis.n + 3) / 4);
    float * const fast_points = base + shared.bytes(WARPS) / sizeof(float);
    for (int i = threadIdx.x; a.fast.n_parts && i < 2 << 2 * a.fast.bits; i += blockDim.x) {
        fast_points[i] = __ldg(a.fast.points + i);
    }
    const bool turns = r.n != 0;
    const int cell = page.cell + min(t, n - 1);
    const int32_t pos = turns ? a.turn.positions[cell] : 0;
    const int32_t was = turns && a.turn.sealed ? a.turn.sealed[cell] : 0;
    const bool stays = turns && a.turn.sealed && was == pos, moved = turns && a.turn.sealed && !stays;
    if (lane == 0) { s_pos[warp] = pos; }
    shared.fill(base, g, r, s_pos, turns, false);
    if (t >= n) { return; }
    typename quad::turner turn;
    if (turns) {
        const float2 * factors = shared.turn_of(base, WARPS, warp);
        turn.find(r, [&](int j) { return factors[j]; });
    }
    float * const buffer = shared.buffer_of(base, warp);
    split_row<LANES, Q> places;
    places.find(a, t);
    float slow_scales = 0.0f, fast_scales = 0.0f, coord_scale = 0.0f;
    uint32_t * const words = (uint32_t *) shared.row_of(base, WARPS, warp);
    if (basis.n) { coord_scale = load_coords(basis, params, t, words); }
    for (int h0 = 0; h0 < a.n_head; h0 += quad::ROWS) {
        const int h = h0 + quad::sub();
        const bool valid = h < a.n_head;
        if (h0 % 32 == 0) {
            const uint8_t * of = params + (size_t) min(h0 + lane, a.n_head - 1) * g.nb_params;
            slow_scales = lattice_scale(g, of, t);
            if (a.fast.n_parts) { fast_scales = lattice_scale(g, of + a.fast.np, t); }
        }
        typename quad::row x, mu;
        quad::load(a.turn.mean + (size_t) h * D, a.turn.mean && valid, D, mu);
        if (basis.n) { quad::add_said(basis, words, coord_scale, h, valid, D, mu); }
        const int at_most = min(h, a.n_head - 1);
        places.decode(a, at_most, codes + (size_t) at_most * g.nb_codes, base, fast_points,
            __shfl_sync(~0u, slow_scales, h % 32), __shfl_sync(~0u, fast_scales, h % 32), buffer, x);
        if (moved) {
            typename quad::turner back;
            back.find(r, [&](int j) { return turn_factors(r, was, true, j); });
            back.apply(r, buffer, x);
        }
        if (a.turn.mean && stays) { turn.apply(r, buffer, mu); }
#pragma unroll
        for (int q = 0; q < Q; q++) {
#pragma unroll
            for (int j = 0; j < 4; j++) { x[q][j] += mu[q][j]; }
        }
        if (turns && !stays) { turn.apply(r, buffer, x); }
        if (valid) { quad::store_half(row + h * head, D, D, x); } // the stride of a tile is the head's
    }
}

static void launch(const split_args & a, int n_pages, cudaStream_t stream) {
    quads_switch(a.slow.head_size, [&](auto shape) {
        constexpr int LANES = decltype(shape)::LANES, Q = decltype(shape)::Q;
        const size_t nb =
            row_memory(a.slow, a.turn.rotary, quads<LANES, Q>::BUFFER, (a.turn.basis.n + 3) / 4).bytes(WARPS) +
            (a.fast.n_parts ? sizeof(float2) << 2 * a.fast.bits : 0);
        split_kernel<LANES, Q><<<dim3((a.slow.n_cells + WARPS - 1) / WARPS, n_pages), 32 * WARPS, nb, stream>>>(a);
    });
}

void kvq_launch_expand_split(const kvq_affine_geometry & g, const kvq_affine_geometry & fast, const kvq_page * pages,
    int n_pages, int n_head, const kvq_row_place & to, const kvq_turn & turn, cudaStream_t stream) {
    if (kvq_takes_strips(g, n_head, to, turn, true)) {
        const auto strips = g.head_size == 64 ? launch_strips<64, true, true, true>
            : g.head_size == 128              ? launch_strips<128, true, true, true>
            : g.head_size == 256              ? launch_strips<256, true, true, true>
                                              : launch_strips<512, true, true, true>;
        strips(g, fast, pages, n_pages, n_head, to, turn, stream);
        return;
    }
    launch({ g, fast, turn, pages, n_head, to, nullptr, nullptr }, n_pages, stream);
}

void kvq_launch_unfold_split(
    const kvq_unfold_args & u, const kvq_affine_geometry & fast, int n_pages, int n_head, cudaStream_t stream) {
    launch({ u.g[0], fast, u.turn[0], u.pages, n_head, {}, u.table, u.tiles[0] }, n_pages, stream);
}

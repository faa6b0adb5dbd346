// Sealed rows as open ones, a warp a cell with all its heads (compiled without fused multiply-add).
// Of a predicted layer, the bits of kvq_chain::step:
//   sealed   x = prediction + decoded                  open   x = the row without rotary embedding and mean, as f16
//   row      round(x * 127/amax), amax/127             tile   f16(R_pos (x + mean)), of sealed pages
// Of any other, those of kvq_transform::restore before they are rounded to f16.
#include "cuda/rows.cuh"
#include "seal.cuh"

constexpr int WARPS = 8; // at most; a power of two

// kvq_tag_get
static __device__ __forceinline__ int32_t tag_of(const uint16_t * row, size_t head_stride, int head_size) {
    uint32_t half[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int c = 32 * i + threadIdx.x % 32;
        half[i] = (uint32_t) (row[c / head_size * head_stride + c % head_size] & 1) << (threadIdx.x % 32);
#pragma unroll
        for (int d = 16; d; d /= 2) { half[i] |= __shfl_xor_sync(~0u, half[i], d); }
    }
    return half[1] == (half[0] ^ 0x5bd1e995u) * 0x9e3779b1u && half[0] < 1u << 26 ? (int32_t) half[0] : -1;
}

// the page with its tile instead of its blocks
static __device__ __forceinline__ void name_tile(kvq_page & to, const kvq_page & page, bool value, const void * from) {
    if (value) {
        to.v_codes = from;
        to.v_params = nullptr;
    } else {
        to.k_codes = from;
        to.k_params = nullptr;
        to.cell = page.cell;
        to.n_slots = page.n_slots;
        to.map = page.map;
    }
}

static __device__ __forceinline__ uint32_t byte_of(float x, float inv) {
    return (uint32_t) (uint8_t) (int8_t) rintf(x * inv);
}

// EXACT: the lanes hold a whole head, of pairs with one index each, rotated and turned as a whole: as most heads are
template <int LANES, int Q> static bool is_exact(const kvq_affine_geometry & g, const kvq_device_rotary & r) {
    constexpr int D = 4 * LANES * Q;
    return g.head_size == D && g.block == D && g.stride == D && g.n_parts == 1 && g.group == 2 &&
        (!r.n || r.n == D / 2);
}

template <int LANES, int Q, bool EXACT>
static __global__ void __launch_bounds__(32 * WARPS, Q == 1 ? 3 : 2)
    chain_kernel(const __grid_constant__ kvq_chain_args a) {
    early_start();
    early_wait();
    using quad = quads<LANES, Q>;
    extern __shared__ __align__(16) uint8_t memory[];
    __shared__ int32_t s_pos[WARPS];
    float * const base = (float *) memory;
    const kvq_page & page = a.pages[blockIdx.y];
    kvq_affine_geometry g = a.g;
    kvq_device_rotary r = a.turn.rotary;
    const bool key = g.role == KVQ_ROLE_K, turns = r.n != 0;
    if (EXACT) { // known when it is compiled
        g.head_size = g.block = g.stride = 4 * LANES * Q;
        g.n_parts = 1;
        g.group = 2;
        r.n = 2 * LANES * Q;
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32,
              t = blockIdx.x * n_warps + warp, D = g.head_size;
    const row_memory shared(g, a.turn.rotary, quad::BUFFER, a.width);
    const uint8_t * codes = (const uint8_t *) (key ? page.k_codes : page.v_codes);
    const uint8_t * params = (const uint8_t *) (key ? page.k_params : page.v_params);
    const size_t at = (size_t) blockIdx.y * g.n_cells + t, head = (size_t) g.n_cells * g.stride;
    uint16_t * const tile = a.tiles ? a.tiles + blockIdx.y * a.n_head * head : nullptr;
    if (a.table && t == 0 && lane == 0) {
        if (a.whole) { a.table[blockIdx.y] = page; }
        name_tile(a.table[blockIdx.y], page, !key, params ? (const void *) tile : codes);
    }
    const uint16_t * open = (const uint16_t *) codes + (size_t) t * g.stride;
    const bool turning = turns && codes && (!params || tile);
    if (turning) {
        const int32_t pos = params ? a.turn.positions[page.cell + t] : tag_of(open, head, D);
        if (lane == 0) { s_pos[warp] = pos; }
    }
    shared.fill(base, g, r, s_pos, turning, !params);
    typename quad::turner turn;
    if (turning) {
        const float2 * factors = shared.turn_of(base, n_warps, warp);
        turn.find(r, [&](int j) { return factors[j]; });
    }
    float *const buffer = shared.buffer_of(base, warp), *const row = shared.row_of(base, n_warps, warp);
    typename quad::places places;
    uint32_t words[2 * Q][2];
    if (params) {
        places.find(g, t);
        places.load(g, codes + (size_t) min(quad::sub(), a.n_head - 1) * g.nb_codes, words);
    }
    float top = 0.0f, scales = 0.0f;
    for (int h0 = 0; h0 < a.n_head; h0 += quad::ROWS) {
        const int h = h0 + quad::sub();
        const bool valid = h < a.n_head;
        typename quad::row x = {}, mu;
        quad::load(a.turn.mean + (size_t) h * D, a.turn.mean && valid, D, mu);
        if (params) {
            typename quad::row y;
            uint32_t now[2 * Q][2];
#pragma unroll
            for (int i = 0; i < 2 * Q; i++) {
                now[i][0] = words[i][0];
                now[i][1] = words[i][1];
            }
            places.load(g, codes + (size_t) min(h + quad::ROWS, a.n_head - 1) * g.nb_codes, words); // of the next
            quad::load(a.pred + at * a.pred_stride + (size_t) h * D, a.pred && valid, D, y);
            if (h0 % 32 == 0) {
                scales = lattice_scale(g, params + (size_t) min(h0 + lane, a.n_head - 1) * g.nb_params, t);
            }
            places.decode(g, now, base, __shfl_sync(~0u, scales, h % 32), x);
#pragma unroll
            for (int q = 0; q < Q; q++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    x[q][j] = y[q][j] + f16_bits_to_f32(f32_to_f16_finite(x[q][j]));
                    y[q][j] = x[q][j] + mu[q][j];
                }
            }
            if (tile) {
                if (turns) { turn.apply(r, buffer, y); }
                if (valid) { quad::store_half(tile + h * head + (size_t) t * g.stride, D, g.stride, y); }
            }
        } else if (codes) {
#pragma unroll
            for (int q = 0; q < Q; q++) {
                if (valid && quad::channel(q) < D) {
                    const uint2 v = *(const uint2 *) (open + h * head + quad::channel(q));
                    x[q][0] = f16_bits_to_f32((uint16_t) v.x);
                    x[q][1] = f16_bits_to_f32((uint16_t) (v.x >> 16));
                    x[q][2] = f16_bits_to_f32((uint16_t) v.y);
                    x[q][3] = f16_bits_to_f32((uint16_t) (v.y >> 16));
                }
            }
            if (turns) { turn.apply(r, buffer, x); }
#pragma unroll
            for (int q = 0; q < Q; q++) {
#pragma unroll
                for (int j = 0; j < 4; j++) { x[q][j] = f16_bits_to_f32(turned_to_half(x[q][j] - mu[q][j] - 0.0f)); }
            }
        }
#pragma unroll
        for (int q = 0; q < Q; q++) {
            if (valid && quad::channel(q) < D) {
                *(float4 *) (row + h * D + quad::channel(q)) = make_float4(x[q][0], x[q][1], x[q][2], x[q][3]);
#pragma unroll
                for (int j = 0; j < 4; j++) { top = fmaxf(top, fabsf(x[q][j])); }
            }
        }
    }
    if (!a.row) { return; }
#pragma unroll
    for (int d = 16; d; d /= 2) { top = fmaxf(top, __shfl_xor_sync(~0u, top, d)); }
    __syncwarp();
    const float inv = top >= 1e-30f ? __fdiv_rn(127.0f, top) : 0.0f;
    for (int c = 4 * lane; c < a.width; c += 128) {
        const float4 v = *(const float4 *) (row + c);
        *(uint32_t *) (a.row + at * a.row_stride + c) =
            byte_of(v.x, inv) | byte_of(v.y, inv) << 8 | byte_of(v.z, inv) << 16 | byte_of(v.w, inv) << 24;
    }
    if (lane == 0) { a.scale[at] = top >= 1e-30f ? __fdiv_rn(top, 127.0f) : 0.0f; }
}

void kvq_launch_chain(const kvq_chain_args & a, int n_pages, cudaStream_t stream) {
    quads_switch(a.g.head_size, [&](auto shape) {
        constexpr int LANES = decltype(shape)::LANES, Q = decltype(shape)::Q;
        const row_memory shared(a.g, a.turn.rotary, quads<LANES, Q>::BUFFER, a.width);
        int n_warps = WARPS;
        while (n_warps > 1 && shared.bytes(n_warps) > 48 << 10) { n_warps /= 2; } // of wide rows, fewer at a time
        static kvq_shared_limit limit[2];
        const bool exact = is_exact<LANES, Q>(a.g, a.turn.rotary);
        const auto kernel = exact ? chain_kernel<LANES, Q, true> : chain_kernel<LANES, Q, false>;
        limit[exact].raise(kernel, shared.bytes(n_warps));
        const dim3 grid(a.g.n_cells / n_warps, n_pages);
        kvq_launch_early(kernel, grid, 32 * n_warps, shared.bytes(n_warps), stream, a);
    });
}

template <int LANES, int Q>
static __global__ void __launch_bounds__(32 * WARPS, Q == 1 ? 3 : 2)
    unfold_kernel(const __grid_constant__ kvq_unfold_args a, int n_head) {
    early_start();
    early_wait();
    using quad = quads<LANES, Q>;
    extern __shared__ __align__(16) uint8_t memory[];
    __shared__ int32_t s_pos[WARPS];
    float * const base = (float *) memory;
    const kvq_page & page = a.pages[blockIdx.y];
    const int role = a.first_role + blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32,
              t = blockIdx.x * WARPS + warp;
    const kvq_affine_geometry & g = a.g[role];
    const kvq_turn & left_out = a.turn[role];
    const kvq_device_rotary & r = left_out.rotary;
    const kvq_device_basis & basis = left_out.basis;
    const row_memory shared(g, r, quad::BUFFER, (basis.n + 3) / 4);
    const uint8_t * codes = (const uint8_t *) (role ? page.v_codes : page.k_codes);
    const uint8_t * params = (const uint8_t *) (role ? page.v_params : page.k_params);
    const int D = g.head_size;
    const size_t head = (size_t) g.n_cells * g.stride;
    uint16_t * tile = a.tiles[role] + (size_t) blockIdx.y * n_head * head;
    if (t == 0 && lane == 0) { name_tile(a.table[blockIdx.y], page, role, params ? (const void *) tile : codes); }
    if (!params || !page.n_slots || (int) blockIdx.x * WARPS >= g.n_cells) { return; }
    const bool turns = r.n != 0;
    const int32_t pos = turns ? left_out.positions[page.cell + t] : 0,
                  was = turns && left_out.sealed ? left_out.sealed[page.cell + t] : 0;
    const bool stays = turns && left_out.sealed && was == pos, moved = turns && left_out.sealed && !stays;
    if (lane == 0) { s_pos[warp] = pos; }
    shared.fill(base, g, r, s_pos, turns, false);
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
    const bool has_coords = basis.n && page.k_params;
    if (has_coords) { coord_scale = load_coords(basis, (const uint8_t *) page.k_params, t, words_of_coords); }
    for (int h0 = 0; h0 < n_head; h0 += quad::ROWS) {
        const int h = h0 + quad::sub();
        const bool valid = h < n_head;
        typename quad::row x, mu;
        uint32_t now[2 * Q][2];
#pragma unroll
        for (int i = 0; i < 2 * Q; i++) {
            now[i][0] = words[i][0];
            now[i][1] = words[i][1];
        }
        places.load(g, codes + (size_t) min(h + quad::ROWS, n_head - 1) * g.nb_codes, words); // of the next
        quad::load(left_out.mean + (size_t) h * D, left_out.mean && valid, D, mu);
        if (has_coords) { quad::add_said(basis, words_of_coords, coord_scale, h, valid, D, mu); }
        if (h0 % 32 == 0) { scales = lattice_scale(g, params + (size_t) min(h0 + lane, n_head - 1) * g.nb_params, t); }
        places.decode(g, now, base, __shfl_sync(~0u, scales, h % 32), x);
        quad::undo_gains(left_out.back.gain, h, valid, D, x);
        if (moved) {
            typename quad::turner back;
            back.find(r, [&](int j) { return turn_factors(r, was, true, j); });
            back.apply(r, buffer, x);
        }
        if (left_out.mean && stays) { turn.apply(r, buffer, mu); }
#pragma unroll
        for (int q = 0; q < Q; q++) {
#pragma unroll
            for (int j = 0; j < 4; j++) { x[q][j] = (x[q][j] + 0.0f) + mu[q][j]; }
        }
        if (turns && !stays) { turn.apply(r, buffer, x); }
        if (valid) { quad::store_half(tile + h * head + (size_t) t * g.stride, D, g.stride, x); }
    }
}

void kvq_launch_unfold(
    const kvq_unfold_args & args, int first_role, int n_roles, int n_pages, int n_head, cudaStream_t stream) {
    kvq_unfold_args a = args;
    a.first_role = first_role;
    const kvq_affine_geometry &k = a.g[0], &v = a.g[1];
    quads_switch(k.head_size > v.head_size ? k.head_size : v.head_size, [&](auto shape) {
        constexpr int LANES = decltype(shape)::LANES, Q = decltype(shape)::Q;
        const size_t
            nk = row_memory(k, a.turn[0].rotary, quads<LANES, Q>::BUFFER, (a.turn[0].basis.n + 3) / 4).bytes(WARPS),
            nv = row_memory(v, a.turn[1].rotary, quads<LANES, Q>::BUFFER, (a.turn[1].basis.n + 3) / 4).bytes(WARPS);
        const int n_cells = k.n_cells > v.n_cells ? k.n_cells : v.n_cells;
        const size_t nb = nk > nv ? nk : nv;
        kvq_launch_early(
            unfold_kernel<LANES, Q>, dim3(n_cells / WARPS, n_pages, n_roles), 32 * WARPS, nb, stream, a, n_head);
    });
}

// Rows of a predicted layer, by one block a cell: the bits of kvq_chain::step (compiled without fused multiply-add).
//   sealed   x = prediction + decoded                  open   x = the row without rotary embedding and mean, as f16
//   row      round(x * 127/amax), amax/127             tile   f16(R_pos (x + mean)), of sealed pages
#include "lattice.cuh"
#include "seal.cuh"

constexpr int WARPS = 8;

// kvq_tag_get
static __device__ __forceinline__ int32_t tag_of(const uint16_t * row, size_t head_stride, int head_size) {
    uint32_t half[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int c = 32*i + threadIdx.x % 32;
        half[i] = (uint32_t) (row[c / head_size * head_stride + c % head_size] & 1) << (threadIdx.x % 32);
#pragma unroll
        for (int d = 16; d; d /= 2) { half[i] |= __shfl_xor_sync(~0u, half[i], d); }
    }
    return half[1] == (half[0] ^ 0x5bd1e995u) * 0x9e3779b1u && half[0] < 1u << 26 ? (int32_t) half[0] : -1;
}

template <int N> static __global__ void __launch_bounds__(32 * WARPS) chain_kernel(const __grid_constant__ kvq_chain_args a) {
    extern __shared__ float s_x[];
    __shared__ float s_row[WARPS][TURN_MAX], s_top[WARPS];
    const kvq_page & page = a.pages[blockIdx.y];
    const kvq_affine_geometry & g = a.g;
    const bool key = g.role == KVQ_ROLE_K, turns = a.turn.rotary.n != 0;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = blockIdx.x, D = g.head_size, cell = page.cell + t;
    const uint8_t * codes  = (const uint8_t *) (key ? page.k_codes  : page.v_codes);
    const uint8_t * params = (const uint8_t *) (key ? page.k_params : page.v_params);
    const size_t at = (size_t) blockIdx.y * g.n_cells + t, head = (size_t) g.n_cells * g.stride;
    uint16_t * const tile = a.tiles ? a.tiles + blockIdx.y * a.n_head * head : nullptr;
    if (a.table && t == 0 && threadIdx.x == 0) {
        kvq_page & to = a.table[blockIdx.y];
        const void * from = params ? (const void *) tile : codes;
        if (key) {
            to.k_codes  = from;
            to.k_params = nullptr;
            to.cell     = page.cell;
            to.n_slots  = page.n_slots;
            to.map      = page.map;
        } else {
            to.v_codes  = from;
            to.v_params = nullptr;
        }
    }
    const uint16_t * open = (const uint16_t *) codes + (size_t) t * g.stride;
    const int32_t pos = !turns || !codes ? 0 : params ? a.turn.positions[cell] : tag_of(open, head, D);
    float top = 0.0f;
    for (int h = warp; h < a.n_head; h += WARPS) {
        float x[N], y[N], mu[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int c = 32*i + lane;
            mu[i] = a.turn.mean && c < D ? a.turn.mean[(size_t) h * D + c] : 0.0f;
            x[i]  = 0.0f;
        }
        if (params) {
            const float * pred = a.pred ? a.pred + at * a.pred_stride + (size_t) h * D : nullptr;
            lattice_row<N>(g, codes + (size_t) h * g.nb_codes, params + (size_t) h * g.nb_params, t, x);
#pragma unroll
            for (int i = 0; i < N; i++) {
                const int c = 32*i + lane;
                x[i] = (pred && c < D ? pred[c] : 0.0f) + f16_bits_to_f32(f32_to_f16_finite(x[i]));
                y[i] = x[i] + mu[i];
            }
            if (tile) {
                if (turns) { turn_row<N>(a.turn.rotary, pos, false, s_row[warp], y); }
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const int c = 32*i + lane;
                    if (c < g.stride) { tile[h * head + (size_t) t * g.stride + c] = c < D ? f32_to_f16_finite(y[i]) : 0; }
                }
            }
        } else if (codes) {
#pragma unroll
            for (int i = 0; i < N; i++) { x[i] = 32*i + lane < D ? f16_bits_to_f32(open[h * head + 32*i + lane]) : 0.0f; }
            if (turns) { turn_row<N>(a.turn.rotary, pos, true, s_row[warp], x); }
#pragma unroll
            for (int i = 0; i < N; i++) { x[i] = f16_bits_to_f32(turned_to_half(x[i] - mu[i] - 0.0f)); }
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (32*i + lane < D) {
                s_x[h * D + 32*i + lane] = x[i];
                top = fmaxf(top, fabsf(x[i]));
            }
        }
    }
#pragma unroll
    for (int d = 16; d; d /= 2) { top = fmaxf(top, __shfl_xor_sync(~0u, top, d)); }
    if (lane == 0) { s_top[warp] = top; }
    __syncthreads();
    for (int w = 0; w < WARPS; w++) { top = fmaxf(top, s_top[w]); }
    const float inv = top >= 1e-30f ? __fdiv_rn(127.0f, top) : 0.0f;
    for (int c = threadIdx.x; c < a.width; c += blockDim.x) { a.row[at * a.row_stride + c] = (int8_t) rintf(s_x[c] * inv); }
    if (threadIdx.x == 0) { a.scale[at] = top >= 1e-30f ? __fdiv_rn(top, 127.0f) : 0.0f; }
}

void kvq_launch_chain(const kvq_chain_args & a, int n_pages, cudaStream_t stream) {
    const size_t nb = 4 * (size_t) a.width;
    lattice_switch(a.g.head_size, [&](auto width) {
        constexpr int N = decltype(width)::value;
        static kvq_shared_limit limit;
        limit.raise(chain_kernel<N>, nb);
        chain_kernel<N><<<dim3(a.g.n_cells, n_pages), 32 * WARPS, nb, stream>>>(a);
    });
}

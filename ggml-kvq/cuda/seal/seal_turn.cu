// Open tiles less what sealed rows leave out, and back: the bits of kvq_transform (compiled without fused
// multiply-add).
#include "cuda/coords.cuh"
#include "cuda/lattice.cuh"
#include "seal.cuh"
#include "cuda/turn.cuh"

constexpr int WARPS = 8;

static_assert(sizeof(kvq_turn_args) < 4096, "kernel arguments are limited to 4 KiB");

template <int N, bool BACK>
static __global__ void __launch_bounds__(32 * WARPS) turn_kernel(const __grid_constant__ kvq_turn_args a) {
    early_wait();
    __shared__ float s_row[WARPS][TURN_MAX];
    extern __shared__ uint32_t coord_words[]; // of each warp's cell
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, h = blockIdx.y, D = a.head_size;
    const kvq_turn_job & job = a.job[blockIdx.x];
    kvq_turn turn = { job.mean, a.rotary, job.positions, job.sealed };
    uint32_t * const words = coord_words + warp * ((a.basis.n + 3) / 4);
    for (int t = warp; t < a.n_cells; t += WARPS) {
        const size_t at = ((size_t) h * a.n_cells + t) * a.stride;
        float x[N];
#pragma unroll
        for (int i = 0; i < N; i++) { x[i] = 32 * i + lane < D ? f16_bits_to_f32(job.from[at + 32 * i + lane]) : 0.0f; }
        float pred[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            pred[i] =
                job.pred && 32 * i + lane < D ? job.pred[t * a.pred_stride + (size_t) h * D + 32 * i + lane] : 0.0f;
        }
        if (job.coords) {
            const float scale = load_coords(a.basis, job.coords, t, words);
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (32 * i + lane < D) { pred[i] = said(a.basis, words, scale, h * D + 32 * i + lane); }
            }
        }
        if (BACK) {
            if (job.order.channel) { sort_row<N>(job.order, D, h, true, s_row[warp], x); }
            restore_row<N>(turn, D, h, t, s_row[warp], x, pred);
        } else {
            const bool turns = a.rotary.n != 0;
            const int32_t pos = turns ? job.positions[t] : 0, was = turns && job.sealed ? job.sealed[t] : 0;
            const bool stays = turns && job.sealed && was == pos;
            if (turns && !stays) { turn_row<N>(a.rotary, pos, true, s_row[warp], x); }
            float mu[N];
            mean_row<N>(turn, D, h, stays, pos, s_row[warp], mu, pred);
#pragma unroll
            for (int i = 0; i < N; i++) { x[i] = x[i] - mu[i] - pred[i]; }
            if (turns && job.sealed && !stays) { turn_row<N>(a.rotary, was, false, s_row[warp], x); }
            if (job.order.channel) { sort_row<N>(job.order, D, h, false, s_row[warp], x); }
        }
        const uint64_t tag = BACK && a.rotary.n ? kvq_tag_bits(job.positions[t]) : 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int c = 32 * i + lane, carrier = h * D + c;
            const uint16_t half = turned_to_half(x[i]), y = BACK && a.rotary.n ? kvq_tagged(half, tag, carrier) : half;
            if (c < a.stride) { job.to[at + c] = c < D ? y : 0; }
        }
    }
}

void kvq_launch_turn(const kvq_turn_args & a, int n, int n_head, bool back, cudaStream_t stream) {
    const size_t nb = (size_t) WARPS * ((a.basis.n + 3) / 4) * sizeof(uint32_t);
    lattice_switch(a.head_size, [&](auto width) {
        constexpr int N = decltype(width)::value;
        if (back) {
            kvq_launch_early(turn_kernel<N, true>, dim3(n, n_head), 32 * WARPS, nb, stream, a);
        } else {
            kvq_launch_early(turn_kernel<N, false>, dim3(n, n_head), 32 * WARPS, nb, stream, a);
        }
    });
}

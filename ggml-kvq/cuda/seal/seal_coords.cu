// The coordinates of cells (types/basis.h), a warp a cell: the bits of kvq_basis_encode (compiled without fused
// multiply-add). Each lane sums up some coordinates over the channels of all heads, in their order.
#include "cuda/coords.cuh"
#include "cuda/lattice.cuh"
#include "seal.cuh"

constexpr int WARPS = 4; // at most, of wide rows fewer

static_assert(sizeof(kvq_coord_args) < 4096, "kernel arguments are limited to 4 KiB");

// scale_of() of types/basis.cpp
static __device__ int scale_of(const float * z, int n) {
    float sum = 0.0f;
    for (int j = 0; j < n; j++) { sum += z[j] * z[j]; }
    const float want = KVQ_COORD_STEP * __fsqrt_rn(__fdiv_rn(sum, (float) n));
    if (!(want > 0.0f)) { return 0; }
    int x;
    const float m = frexpf(want, &x); // 1/2 <= m < 1
    return min(max((x - 4 + 19) * 8 + (int) floorf(m * 16.0f - 8.0f + 0.5f), 0), 255);
}

static __device__ __forceinline__ int code_of(float z, float scale) {
    const float y = floorf(__fdiv_rn(z, scale)) + 8.0f, most = y < KVQ_COORD_TOP ? y : (float) KVQ_COORD_TOP;
    return (int) (0.0f < most ? most : 0.0f);
}

template <int N>
static __global__ void __launch_bounds__(32 * WARPS) coords_kernel(const __grid_constant__ kvq_coord_args a) {
    early_wait();
    extern __shared__ float shared_rows[]; // of each warp: the head that is turned, its row, its coordinates
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = blockIdx.y * (blockDim.x / 32) + warp,
              D = a.head_size;
    const kvq_device_basis & b = a.basis;
    const kvq_coord_job & job = a.job[blockIdx.x];
    float *const turning = shared_rows + (size_t) warp * (TURN_MAX + b.width + b.n), *const row = turning + TURN_MAX,
                 *const z = row + b.width;
    for (int h = 0; h < a.n_head; h++) {
        const uint16_t * from = job.tile + ((size_t) h * a.n_cells + t) * a.stride;
        float x[N];
#pragma unroll
        for (int i = 0; i < N; i++) { x[i] = 32 * i + lane < D ? f16_bits_to_f32(from[32 * i + lane]) : 0.0f; }
        if (a.rotary.n) { turn_row<N>(a.rotary, job.positions[t], true, turning, x); }
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int c = h * D + 32 * i + lane;
            if (32 * i + lane < D) {
                row[c] = f16_bits_to_f32(turned_to_half(x[i] - (a.mean ? a.mean[c] : 0.0f) - 0.0f));
            }
        }
    }
    __syncwarp();
    constexpr int AT_ONCE = 4; // sums of a lane: their loads are under way together
    for (int j0 = lane; j0 < b.n; j0 += 32 * AT_ONCE) {
        float sum[AT_ONCE] = {};
#pragma unroll 8
        for (int i = 0; i < b.width; i++) {
            const float x = row[i];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                sum[k] += x * __ldg(a.in + (size_t) i * b.n + min(j0 + 32 * k, b.n - 1));
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            if (j0 + 32 * k < b.n) { z[j0 + 32 * k] = sum[k]; }
        }
    }
    __syncwarp();
    const int e = scale_of(z, b.n);
    const float scale = coord_scale(e);
    for (int pair = lane; pair < b.n / 2; pair += 32) {
        job.coords[coord_pair_at(b, pair, t)] =
            (uint8_t) (code_of(z[2 * pair], scale) | code_of(z[2 * pair + 1], scale) << 4);
    }
    if (lane == 0) { job.coords[coord_pair_at(b, b.n / 2, t)] = (uint8_t) e; }
}

void kvq_launch_take_coords(const kvq_coord_args & a, int n, cudaStream_t stream) {
    const size_t nb_warp = (size_t) (TURN_MAX + a.basis.width + a.basis.n) * sizeof(float);
    int n_warps = WARPS;
    while (n_warps > 1 && n_warps * nb_warp > 48 << 10) { n_warps /= 2; }
    lattice_switch(a.head_size, [&](auto width) {
        static kvq_shared_limit limit;
        limit.raise(coords_kernel<decltype(width)::value>, n_warps * nb_warp);
        kvq_launch_early(coords_kernel<decltype(width)::value>, dim3(n, a.n_cells / n_warps), 32 * n_warps,
            n_warps * nb_warp, stream, a);
    });
}

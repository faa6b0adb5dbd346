// The bytes of types/lattice.cpp: same operations in the same order, each rounded (compiled without fused
// multiply-add).
#include "cuda/lattice.cuh"
#include "seal.cuh"
#include "types/lattice.h"

#include <algorithm>

constexpr int WARPS = 8, SLICE = 32; // cells at a time

static __device__ __forceinline__ float finite_or_zero(float x) { return x - x == 0.0f ? x : 0.0f; }

// rotated rows t0 .. t0 + 31
template <int N>
static __device__ void rotate_slice(const kvq_affine_geometry & g, const uint16_t * tile, int t0, float * s_x) {
    const int lane = threadIdx.x % 32, D = g.head_size;
    for (int t = threadIdx.x / 32; t < SLICE; t += WARPS) {
        float x[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int c = 32 * i + lane;
            x[i] = c < D ? finite_or_zero(f16_bits_to_f32(tile[(size_t) (t0 + t) * g.stride + channel_in_head(g, c)]))
                         : 0.0f;
        }
        warp_hadamard<N>(g, x);
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (32 * i + lane < D) { s_x[t * (D + 1) + 32 * i + lane] = x[i]; }
        }
    }
}

// first index of the least sum over j of (y_j - point_j)^2, summed in order of j
template <int D>
static __device__ __forceinline__ int nearest(int n, const float * points, const float * x, float inv) {
    float y[D], least = INFINITY;
    int at = 0;
#pragma unroll
    for (int j = 0; j < D; j++) { y[j] = x[j] * inv; }
    for (int i = 0; i < n; i++) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < D; j++) {
            const float e = y[j] - points[i * D + j];
            sum = j ? sum + e * e : e * e;
        }
        if (sum < least) {
            least = sum;
            at = i;
        }
    }
    return at;
}

static __device__ __forceinline__ int square_of(float y) {
    return (int) fminf(fmaxf(y * KVQ_LATTICE_PER_UNIT + KVQ_LATTICE_SQUARES / 2, 0.0f), KVQ_LATTICE_SQUARES - 1.0f);
}

struct trial { // squares NULL: the root mean square stays
    const int32_t * squares;
    float cap, factor[KVQ_LATTICE_N_FACTORS];
};

// best_scale() of types/lattice.cpp for a slice of rotated rows: s_scale holds root mean squares, then scales. Each
// thread tries all factors with some vectors of its lane's cell; whole numbers add up alike in any order.
static __device__ void best_scales(
    const trial & a, int D, const float * s_x, float * s_scale, uint32_t (&s_error)[KVQ_LATTICE_N_FACTORS][SLICE]) {
    const int t = threadIdx.x % SLICE;
    for (int i = threadIdx.x; i < KVQ_LATTICE_N_FACTORS * SLICE; i += blockDim.x) { s_error[i / SLICE][i % SLICE] = 0; }
    __syncthreads();
    const float rms = s_scale[t];
    float inv[KVQ_LATTICE_N_FACTORS];
    uint32_t sum[KVQ_LATTICE_N_FACTORS];
#pragma unroll
    for (int k = 0; k < KVQ_LATTICE_N_FACTORS; k++) {
        inv[k] = fminf(__fdiv_rn(1.0f, rms * a.factor[k]), 3e38f);
        sum[k] = 0;
    }
    for (int v = threadIdx.x / SLICE; v < D / 2; v += blockDim.x / SLICE) {
        const float x0 = s_x[t * (D + 1) + 2 * v], x1 = s_x[t * (D + 1) + 2 * v + 1];
#pragma unroll
        for (int k = 0; k < KVQ_LATTICE_N_FACTORS; k++) {
            const float y0 = x0 * inv[k], y1 = x1 * inv[k];
            const int32_t p = __ldg(a.squares + square_of(y0) * KVQ_LATTICE_SQUARES + square_of(y1));
            const float e0 = y0 - (float) (int16_t) p * (1.0f / 4096.0f),
                        e1 = y1 - (float) (p >> 16) * (1.0f / 4096.0f);
            sum[k] += (uint32_t) rintf(fminf((e0 * e0 + e1 * e1) * KVQ_LATTICE_ERROR_UNIT, a.cap));
        }
    }
#pragma unroll
    for (int k = 0; k < KVQ_LATTICE_N_FACTORS; k++) { atomicAdd(&s_error[k][t], sum[k]); }
    __syncthreads();
    if (threadIdx.x < SLICE && rms > 0.0f) {
        float least = INFINITY, factor = 1.0f;
#pragma unroll
        for (int k = 0; k < KVQ_LATTICE_N_FACTORS; k++) {
            const float error = (float) s_error[k][t] * (a.factor[k] * a.factor[k]);
            if (error < least) {
                least = error;
                factor = a.factor[k];
            }
        }
        s_scale[t] = rms * factor;
    }
}

template <int N>
static __global__ void __launch_bounds__(32 * WARPS) encode_kernel(const __grid_constant__ kvq_affine_geometry g,
    const __grid_constant__ trial scales, const __grid_constant__ kvq_seal_jobs jobs) {
    early_wait();
    extern __shared__ float shared_memory[];
    __shared__ float s_scale[LATTICE_MAX_CELLS];
    __shared__ uint32_t s_error[KVQ_LATTICE_N_FACTORS][SLICE];
    const int D = g.head_size, n_vec = D / g.group, n_points = 1 << g.bits * g.group, h = blockIdx.y;
    float *const s_points = shared_memory, *const s_x = s_points + n_points * g.group;
    uint8_t * const s_index = (uint8_t *) (s_x + SLICE * (D + 1));
    const kvq_seal_job & job = jobs.job[blockIdx.x];
    const uint16_t * tile = job.tile + (size_t) h * g.n_cells * g.stride;
    uint8_t * params = job.params + (size_t) h * g.nb_params + g.np;
    for (int i = threadIdx.x; i < n_points * g.group; i += blockDim.x) { s_points[i] = g.points[i]; }

    for (int t0 = 0; t0 < g.n_cells; t0 += SLICE) { // root mean squares, in f64
        rotate_slice<N>(g, tile, t0, s_x);
        __syncthreads();
        if (threadIdx.x < SLICE) {
            const int t = t0 + threadIdx.x;
            double sum = 0.0;
            for (int i = 0; i < D; i++) {
                const double x = (double) s_x[threadIdx.x * (D + 1) + i];
                sum += x * x;
            }
            s_scale[t] = job.valid[t / 8] >> t % 8 & 1 ? (float) sqrt(sum / (double) D) : 0.0f;
        }
        __syncthreads();
        if (scales.squares && !job.shared) {
            best_scales(scales, D, s_x, s_scale + t0, s_error);
            __syncthreads();
        }
    }
    float top = 0.0f;
    if (g.scale) {
        for (int t = 0; t < g.n_cells; t++) { top = fmaxf(top, s_scale[t]); }
        const uint16_t top16 = f32_to_f16_finite(top);
        top = f16_bits_to_f32(top16);
        if (threadIdx.x == 0) {
            params[0] = (uint8_t) top16;
            params[1] = (uint8_t) (top16 >> 8);
        }
        __syncthreads();
    }
    for (int t = threadIdx.x; t < g.n_cells; t += blockDim.x) {
        float s;
        if (g.scale) {
            const float most = g.scale == 1 ? 255.0f : 15.0f;
            const float u = top > 0.0f
                ? fminf(fmaxf(floorf(most * __fsqrt_rn(__fdiv_rn(s_scale[t], top)) + 0.5f), 0.0f), most)
                : 0.0f;
            if (g.scale == 1) {
                params[2 + t] = (uint8_t) u;
            } else { // warps are full: a page has a multiple of 32 cells
                const int other = __shfl_xor_sync(~0u, (int) u, 1);
                if (t % 2 == 0) { params[2 + t / 2] = (uint8_t) ((int) u | other << 4); }
            }
            s = top * (g.scale == 1 ? 1.0f / 65025.0f : 1.0f / 225.0f) * (u * u);
        } else {
            const uint16_t s16 = f32_to_f16_finite(s_scale[t]);
            ((uint16_t *) params)[t] = s16;
            s = f16_bits_to_f32(s16);
        }
        s_scale[t] = s > 0.0f ? fminf(__fdiv_rn(1.0f, s), 3e38f) : 0.0f; // what rows are multiplied with
    }
    if (job.shared) { return; }
    uint8_t * codes = job.codes + (size_t) h * g.nb_codes;
    __syncthreads();
    for (int t0 = 0; t0 < g.n_cells; t0 += SLICE) {
        if (g.n_cells > SLICE) {
            rotate_slice<N>(g, tile, t0, s_x);
            __syncthreads();
        }
        for (int i = threadIdx.x; i < n_vec * SLICE; i += blockDim.x) {
            const int t = i % SLICE, v = i / SLICE;
            const float *x = s_x + t * (D + 1) + v * g.group, inv = s_scale[t0 + t];
            s_index[i] = (uint8_t) (g.group == 2 ? nearest<2>(n_points, s_points, x, inv)
                    : g.group == 4               ? nearest<4>(n_points, s_points, x, inv)
                                                 : nearest<8>(n_points, s_points, x, inv));
        }
        __syncthreads();
        for (int part = 0; part < g.n_parts; part++) { // one thread a byte
            const int w = g.width[part], nb = g.n_tiles * g.n_chunks[part] * 64;
            for (int i = threadIdx.x; i < nb; i += blockDim.x) {
                const int lane = i / 64 / g.n_chunks[part] * 16 + i % 64 / 4,
                          dot0 = i / 64 % g.n_chunks[part] * (32 / w) + i % 4;
                if ((g.role == KVQ_ROLE_K ? lane : dot0) / SLICE * SLICE != t0) { continue; }
                int byte = 0;
                for (int j = 0; j < 8 / w; j++) {
                    const int dot = dot0 + 4 * j;
                    if (lane < g.lanes && dot < g.dots) {
                        const int t = g.role == KVQ_ROLE_K ? lane : dot, v = g.role == KVQ_ROLE_K ? dot : lane;
                        byte |= (s_index[v * SLICE + t - t0] >> g.shift[part] & ((1 << w) - 1)) << j * w;
                    }
                }
                codes[g.offset[part] + i] = (uint8_t) byte;
            }
        }
        __syncthreads();
    }
}

void kvq_launch_encode_lattice(const kvq_affine_geometry & g, const int32_t * squares, const kvq_seal_jobs & jobs,
    int n, int n_head, cudaStream_t stream) {
    trial scales = { squares, kvq_lattice_error_cap(g.head_size / g.group), {} };
    std::copy_n(KVQ_LATTICE_FACTORS, KVQ_LATTICE_N_FACTORS, scales.factor);
    const size_t nb = 4 * ((size_t) (g.group << g.bits * g.group) + SLICE * (g.head_size + 1)) +
        (size_t) g.head_size / g.group * SLICE;
    lattice_switch(g.head_size, [&](auto width) {
        static kvq_shared_limit limit;
        limit.raise(encode_kernel<decltype(width)::value>, nb);
        kvq_launch_early(
            encode_kernel<decltype(width)::value>, dim3(n, n_head), 32 * WARPS, nb, stream, g, scales, jobs);
    });
}

// ---------------------------------------------------------------- decode

template <int N>
static __global__ void decode_kernel(
    const __grid_constant__ kvq_affine_geometry g, const uint8_t * codes, const uint8_t * params, uint16_t * tile) {
    const int h = blockIdx.x, t = blockIdx.y, lane = threadIdx.x;
    float x[N];
    lattice_row<N>(g, codes + (size_t) h * g.nb_codes, params + (size_t) h * g.nb_params + g.np, t, x);
    uint16_t * row = tile + ((size_t) h * g.n_cells + t) * g.stride;
    const int n = g.split ? g.head_size : g.stride;
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (32 * i + lane < n) { row[channel_in_head(g, 32 * i + lane)] = f32_to_f16_finite(x[i]); }
    }
}

void kvq_launch_decode_lattice(const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params,
    uint16_t * tile, int n_head, cudaStream_t stream) {
    lattice_switch(g.head_size, [&](auto width) {
        decode_kernel<decltype(width)::value><<<dim3(n_head, g.n_cells), 32, 0, stream>>>(g, codes, params, tile);
    });
}

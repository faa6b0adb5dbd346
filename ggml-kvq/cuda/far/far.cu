// Far rows: from tiles and back, and of whole pages as plain rows.
#include "far.cuh"
#include "cuda/far_unit.cuh"

static constexpr int THREADS = 256;
static constexpr float MOST_Q8 = 515.5f; // as in types/far_rows.cpp

// ---------------------------------------------------------------- tiles

// A warp: a row, which it reads as a whole before it writes.
static __global__ void __launch_bounds__(THREADS) put_kernel(const __grid_constant__ kvq_far_jobs a) {
    early_wait();
    const int lane = threadIdx.x % 32, n_blocks = n_blocks_of(a.head_size);
    const auto & j = a.job[blockIdx.y];
    for (int row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; row < a.n_rows; row += gridDim.x * (THREADS / 32)) {
        const uint16_t * from = j.tile + (size_t) row * a.stride;
        uint8_t * to = (uint8_t *) j.rows + (size_t) row * a.nb_row;
        if (a.format == KVQ_FAR_F16) {
            for (int u = lane; u < a.stride / 8; u += 32) {
                *(uint4 *) (to + 16 * u) = *(const uint4 *) (from + 8 * u);
            }
            continue;
        }
        const size_t end = (size_t) n_blocks * ((a.format == KVQ_FAR_Q8 ? 32 : 16) + 2);
        if (end + lane < a.nb_row) { to[end + lane] = 0; }
        for (int b = 0; b < n_blocks; b++) { // a lane: a channel
            const int channel = 32 * b + lane;
            const float x = channel < a.head_size ? f16_bits_to_f32(from[channel]) : 0.0f;
            float most = x; // of largest magnitude, the first of equal ones
            int of = lane;
            for (int d = 16; d; d /= 2) {
                const float y = __shfl_xor_sync(~0u, most, d);
                const int other = __shfl_xor_sync(~0u, of, d);
                if (fabsf(y) > fabsf(most) || (fabsf(y) == fabsf(most) && other < of)) {
                    most = y;
                    of = other;
                }
            }
            const bool q8 = a.format == KVQ_FAR_Q8;
            const uint16_t scale = f32_to_f16_bits(q8 ? fminf(__fdiv_rn(fabsf(most), 127.0f), MOST_Q8) : most / -8.0f);
            const float s = f16_bits_to_f32(scale), by = s != 0.0f ? __fdiv_rn(1.0f, s) : 0.0f;
            const float c = rintf(__fmul_rn(x, by));
            if (lane == 0) { *(uint16_t *) (to + (size_t) n_blocks * (q8 ? 32 : 16) + 2 * b) = scale; }
            if (q8) {
                ((int8_t *) to)[channel] = (int8_t) fminf(fmaxf(c, -127.0f), 127.0f);
            } else {
                const uint32_t code = (uint32_t) (fminf(fmaxf(c, -8.0f), 7.0f) + 8.0f),
                               high = __shfl_xor_sync(~0u, code, 16);
                if (lane < 16) { to[16 * b + lane] = (uint8_t) (code | high << 4); }
            }
        }
    }
}

static __global__ void __launch_bounds__(THREADS) get_kernel(const __grid_constant__ kvq_far_jobs a) {
    const auto & j = a.job[blockIdx.y];
    const int units = a.stride / 8, there = (a.head_size + 7) / 8;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < a.n_rows * units; i += gridDim.x * THREADS) {
        const int row = i / units, u = i % units;
        uint16_t y[8] = {};
        if (a.format == KVQ_FAR_F16 || u < there) {
            unit_values(a.format, load_unit(a.format, a.head_size, (const uint8_t *) j.rows + row * a.nb_row, u), y);
        }
        for (int e = 0; e < 8; e++) {
            if (a.format != KVQ_FAR_F16 && 8 * u + e >= a.head_size) { y[e] = 0; }
        }
        *(uint4 *) (j.tile + (size_t) row * a.stride + 8 * u) = as_uint4(y);
    }
}

// Block: a page and KV head.
static __global__ void __launch_bounds__(THREADS) overlay_kernel(const __grid_constant__ kvq_far_overlay a) {
    const int units = (a.head_size + 7) / 8, p = blockIdx.x / a.n_head, h = blockIdx.x % a.n_head;
    const kvq_page & page = a.pages[p];
    if (lies_far(a.to, page, p)) {
        const uint8_t * rows = (p < a.n_staged ? a.staged + (size_t) p * a.nb_page
                                               : (const uint8_t *) (a.to.value ? a.to.far_v : a.to.far_k)[p]) +
            (size_t) h * a.n_cells * a.nb_row;
        const int n = a.to.by_slot ? a.n_cells : min(a.n_cells, a.to.n_kv - page.cell);
        const size_t step = a.to.step ? (size_t) a.to.step : (size_t) a.n_head * a.head_size;
        uint16_t * to =
            a.to.rows + (size_t) (a.to.by_slot ? p * a.n_cells : page.cell) * step + (size_t) h * a.head_size;
        constexpr int AT_ONCE = 4;
        for (int i0 = threadIdx.x; i0 < n * units; i0 += AT_ONCE * THREADS) {
            far_unit x[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int i = min(i0 + j * THREADS, n * units - 1);
                x[j] = load_unit(a.format, a.head_size, rows + i / units * a.nb_row, i % units);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int i = i0 + j * THREADS;
                if (i >= n * units) { continue; }
                uint16_t y[8];
                unit_values(a.format, x[j], y);
                *(uint4 *) (to + i / units * step + 8 * (i % units)) = as_uint4(y); // heads: multiples of 8 channels
            }
        }
    }
}

// ---------------------------------------------------------------- launches

void kvq_launch_far_overlay(const kvq_far_overlay & a, cudaStream_t stream) {
    overlay_kernel<<<a.n_pages * a.n_head, THREADS, 0, stream>>>(a);
}

void kvq_launch_far_put(const kvq_far_jobs & a, int n, cudaStream_t stream) {
    kvq_launch_early(put_kernel, dim3(8, n), THREADS, 0, stream, a);
}

void kvq_launch_far_get(const kvq_far_jobs & a, int n, cudaStream_t stream) {
    get_kernel<<<dim3(8, n), THREADS, 0, stream>>>(a);
}

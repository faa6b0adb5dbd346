// The bytes of types/affine.cpp: same operations in the same order, each rounded (compiled without fused multiply-add).
#include "seal.cuh"

#include <cfloat>

static_assert(sizeof(kvq_seal_jobs) + sizeof(kvq_affine_geometry) < 4000, "kernel arguments are limited to 4 KiB");
static_assert(sizeof(kvq_seal_rows) < 4000, "kernel arguments are limited to 4 KiB");

// ---------------------------------------------------------------- rows

static __global__ void rows_kernel(const kvq_seal_rows to, int head_size, size_t head_stride, const float * rows, size_t row_stride, int width) {
    early_start();
    early_wait();
    uint16_t * tile = to.to[blockIdx.x];
    const float * row = rows + blockIdx.x * row_stride;
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
        const int h = i / head_size;
        tile[h * head_stride + (i - h * head_size)] = f32_to_f16_bits(row[i]);
    }
}

// rows that carry their positions
static __global__ void rows_at_kernel(const __grid_constant__ kvq_seal_rows to, const __grid_constant__ kvq_seal_positions at, int head_size, size_t head_stride, const float * rows,
                                      size_t row_stride, int width) {
    uint16_t * tile = to.to[blockIdx.x];
    const float * row = rows + blockIdx.x * row_stride;
    const uint64_t tag = kvq_tag_bits(at.pos[blockIdx.x]);
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
        const int h = i / head_size;
        tile[h * head_stride + (i - h * head_size)] = kvq_tagged(f32_to_f16_bits(row[i]), tag, i);
    }
}

template <bool TAGGED> static __global__ void row_jobs_kernel(const kvq_row_jobs jobs) {
    early_start();
    early_wait();
    const kvq_row_job & j = jobs.job[blockIdx.z];
    const int i = 4 * (blockIdx.y * blockDim.x + threadIdx.x); // head sizes are multiples of 8
    if (blockIdx.x < j.n && i < j.width) {
        const int h = i / j.head_size;
        const float * x = j.rows + blockIdx.x * j.row_stride + i;
        uint16_t * to = j.to[blockIdx.x] + h * j.head_stride + (i - h * j.head_size);
        ushort4 y = make_ushort4(f32_to_f16_bits(x[0]), f32_to_f16_bits(x[1]), f32_to_f16_bits(x[2]), f32_to_f16_bits(x[3]));
        if (TAGGED && j.pos && i < KVQ_TAG_BITS) {
            const uint64_t tag = kvq_tag_bits(j.pos[blockIdx.x]);
            y = make_ushort4(kvq_tagged(y.x, tag, i), kvq_tagged(y.y, tag, i + 1), kvq_tagged(y.z, tag, i + 2), kvq_tagged(y.w, tag, i + 3));
        }
        *(ushort4 *) to = y;
    }
}

void kvq_launch_row_jobs(const kvq_row_jobs & jobs, int n_jobs, cudaStream_t stream) {
    int n = 0, width = 0;
    bool tagged = false;
    for (int i = 0; i < n_jobs; i++) {
        n     = jobs.job[i].n     > n     ? jobs.job[i].n     : n;
        width = jobs.job[i].width > width ? jobs.job[i].width : width;
        tagged = tagged || jobs.job[i].pos;
    }
    kvq_launch_early(tagged ? row_jobs_kernel<true> : row_jobs_kernel<false>, dim3(n, (width + 511) / 512, n_jobs), 128, 0, stream, jobs);
}

void kvq_launch_rows(const kvq_seal_rows & to, int n, int n_head, int head_size, size_t head_stride, const float * rows, size_t row_stride, cudaStream_t stream) {
    const int width = n_head * head_size;
    rows_kernel<<<dim3(n, (width + 1023) / 1024), 256, 0, stream>>>(to, head_size, head_stride, rows, row_stride, width);
}

void kvq_launch_rows_at(const kvq_seal_rows & to, const kvq_seal_positions & at, int n, int n_head, int head_size, size_t head_stride, const float * rows, size_t row_stride, cudaStream_t stream) {
    const int width = n_head * head_size;
    rows_at_kernel<<<dim3(n, (width + 1023) / 1024), 256, 0, stream>>>(to, at, head_size, head_stride, rows, row_stride, width);
}

// ---------------------------------------------------------------- encode

static __device__ __forceinline__ int param_index(const kvq_affine_geometry & g, int cell, int channel) {
    return g.role == KVQ_ROLE_K ? cell / g.group * g.head_size + channel : channel / g.group * g.n_cells + cell;
}

static __device__ __forceinline__ float value_at(const kvq_affine_geometry & g, const uint16_t * tile, int cell, int channel) {
    const float v = f16_bits_to_f32(tile[(size_t) cell * g.stride + channel]);
    return v >= -65504.0f && v <= 65504.0f ? v : 0.0f;
}

// x[0..n) as u8 under an f16 range, by one warp. Of equal extremes the first counts: +0 and -0 have different bytes.
static __device__ void put_u8(const float * x, int n, uint8_t * low_step, uint8_t * out) {
    const int lane = threadIdx.x % 32;
    float lo = FLT_MAX, hi = -FLT_MAX;
    int at_lo = 0x7fffffff, at_hi = 0x7fffffff;
    for (int i = lane; i < n; i += 32) {
        if (x[i] < lo || at_lo == 0x7fffffff) { lo = x[i]; at_lo = i; }
        if (x[i] > hi || at_hi == 0x7fffffff) { hi = x[i]; at_hi = i; }
    }
    for (int d = 16; d; d /= 2) {
        const float l2 = __shfl_xor_sync(~0u, lo, d), h2 = __shfl_xor_sync(~0u, hi, d);
        const int   a2 = __shfl_xor_sync(~0u, at_lo, d), b2 = __shfl_xor_sync(~0u, at_hi, d);
        if (a2 != 0x7fffffff && (at_lo == 0x7fffffff || l2 < lo || (l2 == lo && a2 < at_lo))) { lo = l2; at_lo = a2; }
        if (b2 != 0x7fffffff && (at_hi == 0x7fffffff || h2 > hi || (h2 == hi && b2 < at_hi))) { hi = h2; at_hi = b2; }
    }
    const uint16_t low16 = f32_to_f16_finite(lo);
    const float    low   = f16_bits_to_f32(low16);
    const uint16_t step16 = f32_to_f16_finite(__fdiv_rn(hi - low, 255.0f));
    const float    step   = f16_bits_to_f32(step16);
    if (lane == 0) {
        low_step[0] = (uint8_t) low16;  low_step[1] = (uint8_t) (low16 >> 8);
        low_step[2] = (uint8_t) step16; low_step[3] = (uint8_t) (step16 >> 8);
    }
    for (int i = lane; i < n; i += 32) {
        const float q = step > 0.0f ? floorf(__fdiv_rn(x[i] - low, step) + 0.5f) : 0.0f;
        out[i] = (uint8_t) fminf(fmaxf(q, 0.0f), 255.0f);
    }
}

static __global__ void encode_kernel(const kvq_affine_geometry g, const kvq_seal_jobs jobs) {
    extern __shared__ float shared_memory[];
    float * const s_lo = shared_memory, * const s_mul = s_lo + g.np, * const s_scale = s_mul + g.np, * const s_zero = s_scale + g.np;
    const kvq_seal_job & job = jobs.job[blockIdx.x];
    const int h = blockIdx.y;
    const uint16_t * tile = job.tile + (size_t) h * g.n_cells * g.stride;
    uint8_t * params = job.params + (size_t) h * g.nb_params;
    const float n = (float) ((1 << g.bits) - 1);

    for (int p = threadIdx.x; p < g.np; p += blockDim.x) {
        float lo = FLT_MAX, hi = -FLT_MAX;
        const int row = g.role == KVQ_ROLE_K ? g.head_size : g.n_cells, a = p / row, b = p % row;
        const int first = a * g.group;
        const int end   = g.role == KVQ_ROLE_K ? first + g.group : min(first + g.group, g.head_size);
        for (int i = first; i < end; i++) {
            const int t = g.role == KVQ_ROLE_K ? i : b, c = g.role == KVQ_ROLE_K ? b : i;
            if (job.valid[t / 8] >> t % 8 & 1) {
                const float v = value_at(g, tile, t, c);
                lo = v < lo ? v : lo;
                hi = hi < v ? v : hi;
            }
        }
        if (lo > hi) {
            lo = hi = 0.0f;
        }
        const float range = hi - lo;
        float mul = range > 0.0f ? __fdiv_rn(g.levels ? n + 1.0f : n, range) : 0.0f;
        mul = mul <= FLT_MAX ? mul : 0.0f;
        s_lo   [p] = lo;
        s_mul  [p] = mul;
        s_zero [p] = g.bits ? lo + g.eta * range : lo + 0.5f * range;
        s_scale[p] = g.bits ? __fdiv_rn((1.0f - 2.0f * g.eta) * range, n) : 0.0f;
    }
    __syncthreads();

    if (!g.scale) {
        for (int p = threadIdx.x; p < g.np; p += blockDim.x) {
            ((uint16_t *) params)[p]        = f32_to_f16_finite(s_scale[p]);
            ((uint16_t *) params)[g.np + p] = f32_to_f16_finite(s_zero[p]);
        }
    } else if (threadIdx.x < 32) {
        put_u8(s_scale, g.np, params, params + 8);
    } else if (threadIdx.x < 64) {
        put_u8(s_zero, g.np, params + 4, params + 8 + g.np);
    }
    if (job.shared || !g.bits) {
        return;
    }
    uint8_t * codes = job.codes + (size_t) h * g.nb_codes;
    const float half = g.levels ? 0.0f : 0.5f;
    for (int part = 0; part < g.n_parts; part++) { // one thread a byte
        const int w = g.width[part], nb = g.n_tiles * g.n_chunks[part] * 64;
        for (int i = threadIdx.x; i < nb; i += blockDim.x) {
            const int lane = i / 64 / g.n_chunks[part] * 16 + i % 64 / 4, dot0 = i / 64 % g.n_chunks[part] * (32 / w) + i % 4;
            int byte = 0;
            for (int j = 0; j < 8 / w; j++) {
                const int dot = dot0 + 4*j;
                if (lane < g.lanes && dot < g.dots) {
                    const int t = g.role == KVQ_ROLE_K ? lane : dot, c = g.role == KVQ_ROLE_K ? dot : lane;
                    const int p = param_index(g, t, c);
                    const float q = floorf((value_at(g, tile, t, c) - s_lo[p]) * s_mul[p] + half);
                    const int code = (int) fminf(fmaxf(q, 0.0f), n);
                    byte |= (code >> g.shift[part] & ((1 << w) - 1)) << j*w;
                }
            }
            codes[g.offset[part] + i] = (uint8_t) byte;
        }
    }
}

void kvq_launch_encode(const kvq_affine_geometry & g, const kvq_seal_jobs & jobs, int n, int n_head, cudaStream_t stream) {
    const size_t nb = 16 * (size_t) g.np;
    if (nb > 48 * 1024) {
        cudaFuncSetAttribute(encode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int) nb);
    }
    encode_kernel<<<dim3(n, n_head), 256, nb, stream>>>(g, jobs);
}

// ---------------------------------------------------------------- decode

static __device__ __forceinline__ uint16_t decode_at(const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params, int t, int c) {
    const uint16_t * half = (const uint16_t *) params;
    const int p = param_index(g, t, c), lane = g.role == KVQ_ROLE_K ? t : c, dot = g.role == KVQ_ROLE_K ? c : t;
    int code = 0;
    for (int part = 0; part < g.n_parts; part++) {
        const int w = g.width[part], span = 32 / w, rest = dot % span;
        const int at = g.offset[part] + (lane / 16 * g.n_chunks[part] + dot / span) * 64 + lane % 16 * 4 + rest % 4;
        code |= (codes[at] >> rest / 4 * w & ((1 << w) - 1)) << g.shift[part];
    }
    float scale, zero;
    if (g.scale) {
        scale = f16_bits_to_f32(half[0]) + f16_bits_to_f32(half[1]) * (float) params[8 + p];
        zero  = f16_bits_to_f32(half[2]) + f16_bits_to_f32(half[3]) * (float) params[8 + g.np + p];
    } else {
        scale = f16_bits_to_f32(half[p]);
        zero  = f16_bits_to_f32(half[g.np + p]);
    }
    return f32_to_f16_finite(zero + scale * (float) code);
}

static __global__ void decode_kernel(const kvq_affine_geometry g, const uint8_t * codes, const uint8_t * params, uint16_t * tile) {
    const int h = blockIdx.x, t = blockIdx.y;
    for (int c = threadIdx.x; c < g.stride; c += blockDim.x) {
        tile[((size_t) h * g.n_cells + t) * g.stride + c] =
            c < g.head_size ? decode_at(g, codes + (size_t) h * g.nb_codes, params + (size_t) h * g.nb_params, t, c) : 0;
    }
}

void kvq_launch_decode(const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params, uint16_t * tile, int n_head, cudaStream_t stream) {
    decode_kernel<<<dim3(n_head, g.n_cells), 128, 0, stream>>>(g, codes, params, tile);
}

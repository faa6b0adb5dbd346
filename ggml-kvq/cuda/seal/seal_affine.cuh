// One affine block (types/affine.h) by one thread block: the operations of types/affine.cpp in the same order, each
// rounded. For files that are compiled without fused multiply-add (this folder).
#pragma once

#include "cuda/common.cuh"

#include <cfloat>

static __device__ __forceinline__ int param_index(const kvq_affine_geometry & g, int cell, int channel) {
    return g.role == KVQ_ROLE_K ? cell / g.group * g.head_size + channel : channel / g.group * g.n_cells + cell;
}

static __device__ __forceinline__ float finite_or_zero(float v) { return v >= -65504.0f && v <= 65504.0f ? v : 0.0f; }

// x[0..n) as codes 0..top under an f16 range, by one warp: put(i, code). Of equal extremes the first counts: +0 and
// -0 have different bytes.
template <typename Put>
static __device__ __forceinline__ void put_range(const float * x, int n, float top, uint8_t * low_step, Put put) {
    const int lane = threadIdx.x % 32;
    float lo = FLT_MAX, hi = -FLT_MAX;
    int at_lo = 0x7fffffff, at_hi = 0x7fffffff;
    for (int i = lane; i < n; i += 32) {
        if (x[i] < lo || at_lo == 0x7fffffff) {
            lo = x[i];
            at_lo = i;
        }
        if (x[i] > hi || at_hi == 0x7fffffff) {
            hi = x[i];
            at_hi = i;
        }
    }
    for (int d = 16; d; d /= 2) {
        const float l2 = __shfl_xor_sync(~0u, lo, d), h2 = __shfl_xor_sync(~0u, hi, d);
        const int a2 = __shfl_xor_sync(~0u, at_lo, d), b2 = __shfl_xor_sync(~0u, at_hi, d);
        if (a2 != 0x7fffffff && (at_lo == 0x7fffffff || l2 < lo || (l2 == lo && a2 < at_lo))) {
            lo = l2;
            at_lo = a2;
        }
        if (b2 != 0x7fffffff && (at_hi == 0x7fffffff || h2 > hi || (h2 == hi && b2 < at_hi))) {
            hi = h2;
            at_hi = b2;
        }
    }
    const uint16_t low16 = f32_to_f16_finite(lo);
    const float low = f16_bits_to_f32(low16);
    const uint16_t step16 = f32_to_f16_finite(__fdiv_rn(hi - low, top));
    const float step = f16_bits_to_f32(step16);
    if (lane == 0) {
        low_step[0] = (uint8_t) low16;
        low_step[1] = (uint8_t) (low16 >> 8);
        low_step[2] = (uint8_t) step16;
        low_step[3] = (uint8_t) (step16 >> 8);
    }
    for (int i = lane; i < n; i += 32) {
        const float q = step > 0.0f ? floorf(__fdiv_rn(x[i] - low, step) + 0.5f) : 0.0f;
        put(i, (uint8_t) fminf(fmaxf(q, 0.0f), top));
    }
}

static __device__ __forceinline__ float half_at(const uint8_t * p) {
    return f16_bits_to_f32((uint16_t) (p[0] | p[1] << 8));
}

// Stored parameters of pair p.
static __device__ __forceinline__ void stored_params(
    const kvq_affine_geometry & g, const uint8_t * params, int p, float & scale, float & zero) {
    if (!g.scale) {
        scale = half_at(params + 2 * p);
        zero = half_at(params + 2 * (g.np + p));
        return;
    }
    const int s = g.scale == 1 ? params[8 + p] : params[8 + p] & 15,
              z = g.scale == 1 ? params[8 + g.np + p] : params[8 + p] >> 4;
    scale = half_at(params) + half_at(params + 2) * (float) s;
    zero = half_at(params + 4) + half_at(params + 6) * (float) z;
}

// A page's rows of one head in shared memory: each value is read several times, by threads that walk channels and by
// threads that walk cells. step: halves from one row to the next, 2 more than there are channels, so that neighbouring
// cells lie in other banks.
static __host__ __device__ __forceinline__ int staged_step(int stride) { return stride + 2; }

// All threads; rows of n_cells of a tile. Infinity and NaN become 0. Not by way of L1: a kernel that follows another
// one (seal.cu) may start where older rows were read.
static __device__ __forceinline__ void stage_rows(const uint16_t * tile, int n_cells, int stride, uint16_t * to) {
    const int units = stride / 8, n = n_cells * units, step = staged_step(stride);
    constexpr int AT_ONCE = 4;
    // of this thread's next unit, and how far it is to the one behind it: divisions take longer than the rest
    int row = (int) threadIdx.x / units, unit = (int) threadIdx.x % units;
    const int more_rows = (int) blockDim.x / units, more_units = (int) blockDim.x % units;
    for (int i0 = threadIdx.x; i0 < n; i0 += AT_ONCE * blockDim.x) {
        uint4 x[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            x[j] = __ldcg((const uint4 *) tile + min(i0 + j * (int) blockDim.x, n - 1)); // stride: a multiple of 8
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            if (i0 + j * (int) blockDim.x >= n) { continue; }
            uint32_t * at = (uint32_t *) (to + row * step + unit * 8);
            const uint32_t y[4] = { x[j].x, x[j].y, x[j].z, x[j].w };
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const uint32_t low = (y[k] & 0x7c00u) == 0x7c00u ? 0 : y[k] & 0xffffu,
                               high = (y[k] & 0x7c000000u) == 0x7c000000u ? 0 : y[k] & 0xffff0000u;
                at[k] = low | high;
            }
            row += more_rows;
            unit += more_units;
            if (unit >= units) {
                unit -= units;
                row++;
            }
        }
    }
}

// Threads of a warp that share the search for one parameter's range, a power of two.
static __device__ __forceinline__ int searchers(int np) {
    int n = 1;
    while (n < 16 && 2 * n * np <= (int) blockDim.x) { n *= 2; }
    return n;
}

// rows.value(cell, channel): finite; rows.valid(cell). memory: 4*np floats.
template <typename Rows>
static __device__ __forceinline__ void encode_block(
    const kvq_affine_geometry & g, const Rows & rows, bool shared, uint8_t * codes, uint8_t * params, float * memory) {
    float *const s_lo = memory, *const s_mul = s_lo + g.np, *const s_scale = s_mul + g.np,
                 *const s_zero = s_scale + g.np;
    const float n = (float) ((1 << g.bits) - 1);

    const bool keys = g.role == KVQ_ROLE_K;
    const int n_search = searchers(g.np), at_once = (int) blockDim.x / n_search,
              row = keys ? g.head_size : g.n_cells; // parameters of a group
    for (int p0 = 0; p0 < g.np; p0 += at_once) {
        const int p = min(p0 + (int) threadIdx.x / n_search, g.np - 1), a = p / row, b = p % row, first = a * g.group,
                  end = keys ? first + g.group : min(first + g.group, g.head_size);
        float lo = FLT_MAX, hi = -FLT_MAX; // of equal extremes +0 and -0 any will do: lo + eta * range has no sign then
#pragma unroll 8
        for (int i = first + (int) threadIdx.x % n_search; i < end; i += n_search) {
            const int t = keys ? i : b, c = keys ? b : i;
            if (rows.valid(t)) {
                const float v = rows.value(t, c);
                lo = v < lo ? v : lo;
                hi = hi < v ? v : hi;
            }
        }
        for (int d = n_search / 2; d; d /= 2) {
            const float l2 = __shfl_xor_sync(~0u, lo, d), h2 = __shfl_xor_sync(~0u, hi, d);
            lo = l2 < lo ? l2 : lo;
            hi = hi < h2 ? h2 : hi;
        }
        if (threadIdx.x % n_search || p0 + (int) threadIdx.x / n_search >= g.np) { continue; }
        if (lo > hi) { lo = hi = 0.0f; }
        const float range = hi - lo;
        float mul = range > 0.0f ? __fdiv_rn(g.levels ? n + 1.0f : n, range) : 0.0f;
        mul = mul <= FLT_MAX ? mul : 0.0f;
        s_lo[p] = lo;
        s_mul[p] = mul;
        s_zero[p] = g.bits ? lo + g.eta * range : lo + 0.5f * range;
        s_scale[p] = g.bits ? __fdiv_rn((1.0f - 2.0f * g.eta) * range, n) : 0.0f;
    }
    __syncthreads();

    if (!g.scale) {
        for (int p = threadIdx.x; p < g.np; p += blockDim.x) {
            ((uint16_t *) params)[p] = f32_to_f16_finite(s_scale[p]);
            ((uint16_t *) params)[g.np + p] = f32_to_f16_finite(s_zero[p]);
        }
    } else if (g.scale == 1) {
        if (threadIdx.x < 32) {
            put_range(s_scale, g.np, 255.0f, params, [&](int i, uint8_t q) { params[8 + i] = q; });
        } else if (threadIdx.x < 64) {
            put_range(s_zero, g.np, 255.0f, params + 4, [&](int i, uint8_t q) { params[8 + g.np + i] = q; });
        }
    } else if (threadIdx.x < 32) { // two in a byte, both of them from the same thread
        put_range(s_scale, g.np, 15.0f, params, [&](int i, uint8_t q) { params[8 + i] = q; });
        put_range(s_zero, g.np, 15.0f, params + 4, [&](int i, uint8_t q) { params[8 + i] |= (uint8_t) (q << 4); });
    }
    if (shared || !g.bits) { return; }
    if (g.scale) { // codes are chosen under the stored values
        __syncthreads();
        for (int p = threadIdx.x; p < g.np; p += blockDim.x) {
            float scale, zero;
            stored_params(g, params, p, scale, zero);
            const float range = __fdiv_rn(scale * n, 1.0f - 2.0f * g.eta);
            float mul = range > 0.0f ? __fdiv_rn(g.levels ? n + 1.0f : n, range) : 0.0f;
            s_lo[p] = zero - g.eta * range;
            s_mul[p] = mul <= FLT_MAX ? mul : 0.0f;
        }
        __syncthreads();
    }
    const float half = g.levels ? 0.0f : 0.5f;
    for (int part = 0; part < g.n_parts; part++) { // one thread four bytes
        const int w = g.width[part], n_chunks = g.n_chunks[part], n_words = g.n_tiles * n_chunks * 16,
                  shift = g.shift[part], mask = (1 << w) - 1;
        uint32_t * const words = (uint32_t *) (codes + g.offset[part]);
        for (int i = threadIdx.x; i < n_words; i += blockDim.x) {
            const int lane = i / 16 / n_chunks * 16 + i % 16, dot0 = i / 16 % n_chunks * (32 / w);
            const int at = lane / g.group * (keys ? g.head_size : g.n_cells); // parameters, less the dot
            uint32_t word = 0;
            for (int j = 0; j < 8 / w && lane < g.lanes; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int dot = dot0 + 4 * j + e;
                    if (dot >= g.dots) { continue; }
                    const float x = keys ? rows.value(lane, dot) : rows.value(dot, lane);
                    const float q = floorf((x - s_lo[at + dot]) * s_mul[at + dot] + half);
                    const int code = (int) fminf(fmaxf(q, 0.0f), n);
                    word |= (uint32_t) (code >> shift & mask) << (8 * e + j * w);
                }
            }
            words[i] = word;
        }
    }
}

static __device__ __forceinline__ int code_at(const kvq_affine_geometry & g, const uint8_t * codes, int t, int c) {
    const int lane = g.role == KVQ_ROLE_K ? t : c, dot = g.role == KVQ_ROLE_K ? c : t;
    int code = 0;
    for (int part = 0; part < g.n_parts; part++) {
        const int w = g.width[part], span = 32 / w, rest = dot % span;
        const int at = g.offset[part] + (lane / 16 * g.n_chunks[part] + dot / span) * 64 + lane % 16 * 4 + rest % 4;
        code |= (codes[at] >> rest / 4 * w & ((1 << w) - 1)) << g.shift[part];
    }
    return code;
}

static __device__ __forceinline__ uint16_t decode_at(
    const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params, int t, int c) {
    float scale, zero;
    stored_params(g, params, param_index(g, t, c), scale, zero);
    return f32_to_f16_finite(zero + scale * (float) code_at(g, codes, t, c));
}

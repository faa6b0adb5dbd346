// Sealed rows of a cell, head after head, by one warp. The operations of lattice_row and turn_row on every value, in
// their order, so their bits; what differs is who has which channel: LANES lanes share a row (two rows a warp where
// heads are short) and a lane has the four channels behind 4*LANES*q + 4*lane, q < Q. So two stages of butterflies
// need no shuffle, loads and stores are wide, and the cosines of a cell's position are worked out once for all its
// heads. For grids of 2, 4 or 8 channels, head sizes that are multiples of 8.
#pragma once

#include "coords.cuh"
#include "lattice.cuh"

template <int LANES, int Q> struct quads {
    static constexpr int ROWS = 32 / LANES, BUFFER = 128 * Q; // rows at a time; floats of a warp's row buffer
    typedef float row[Q][4];

    static __device__ __forceinline__ int lane() { return threadIdx.x % LANES; }
    static __device__ __forceinline__ int sub() { return threadIdx.x % 32 / LANES; } // which of the rows
    static __device__ __forceinline__ int channel(int q) { return 4 * LANES * q + 4 * lane(); }

    // Where the indices of a cell lie: of each pair of channels and part a word behind the head's codes, and the bit
    // in it.
    struct places {
        int word[2 * Q][2], bit[2 * Q][2];
        __device__ __forceinline__ void find(const kvq_affine_geometry & g, int cell) {
            const int by = (g.group > 2) + (g.group > 4) + 1; // group = 1 << by
#pragma unroll
            for (int i = 0; i < 2 * Q; i++) {
                const int c = channel(i / 2) + i % 2 * 2, vec = c < g.head_size ? c >> by : 0;
                const int lane = g.role == KVQ_ROLE_K ? cell : vec, dot = g.role == KVQ_ROLE_K ? vec : cell;
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    // 32/w = 1 << span
                    const int w = g.width[part], span = w == 2 ? 4 : w == 4 ? 3 : 2, rest = dot & ((1 << span) - 1);
                    word[i][part] = part < g.n_parts
                        ? g.offset[part] / 4 + (lane / 16 * g.n_chunks[part] + (dot >> span)) * 16 + lane % 16
                        : 0;
                    bit[i][part] = rest % 4 * 8 + rest / 4 * w;
                }
            }
        }
        __device__ __forceinline__ void load(
            const kvq_affine_geometry & g, const uint8_t * codes, uint32_t (&x)[2 * Q][2]) const {
#pragma unroll
            for (int i = 0; i < 2 * Q; i++) {
                x[i][0] = __ldg((const uint32_t *) codes + word[i][0]);
                x[i][1] = g.n_parts == 2 ? __ldg((const uint32_t *) codes + word[i][1]) : 0;
            }
        }
        // x = H (s * points); 0 behind the head
        __device__ __forceinline__ void decode(const kvq_affine_geometry & g, const uint32_t (&words)[2 * Q][2],
            const float * points, float s, row & x) const {
#pragma unroll
            for (int i = 0; i < 2 * Q; i++) {
                const int c = channel(i / 2) + i % 2 * 2;
                int index = words[i][0] >> bit[i][0] & ((1 << g.width[0]) - 1);
                if (g.n_parts == 2) { index |= (words[i][1] >> bit[i][1] & ((1 << g.width[1]) - 1)) << g.shift[1]; }
                const float2 p = *(const float2 *) (points + index * g.group + (c & (g.group - 1)));
                x[i / 2][i % 2 * 2] = c < g.head_size ? p.x * s : 0.0f;
                x[i / 2][i % 2 * 2 + 1] = c < g.head_size ? p.y * s : 0.0f;
            }
            hadamard(g, x);
        }
    };

    static __device__ __forceinline__ void hadamard(const kvq_affine_geometry & g, row & x) {
        const auto both = [](float & a, float & b) {
            const float y = a - b;
            a = a + b;
            b = y;
        };
#pragma unroll
        for (int q = 0; q < Q; q++) {
            both(x[q][0], x[q][1]);
            both(x[q][2], x[q][3]);
            both(x[q][0], x[q][2]);
            both(x[q][1], x[q][3]);
        }
#pragma unroll
        for (int d = 1; d < LANES; d *= 2) {
            if (4 * d < g.block) {
                // the product is exact: other - x or other + x, rounded once
                const float sign = lane() & d ? -1.0f : 1.0f;
#pragma unroll
                for (int q = 0; q < Q; q++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        x[q][j] = __fmaf_rn(x[q][j], sign, __shfl_xor_sync(~0u, x[q][j], d));
                    }
                }
            }
        }
#pragma unroll
        for (int k = 1; k < Q; k *= 2) {
            if (4 * LANES * k < g.block) {
#pragma unroll
                for (int i = 0; i < 4 * Q; i++) {
                    if (!(i / 4 & k)) { both(x[i / 4][i % 4], x[(i / 4 + k) % Q][i % 4]); }
                }
            }
        }
#pragma unroll
        for (int q = 0; q < Q; q++) {
#pragma unroll
            for (int j = 0; j < 4; j++) { x[q][j] *= g.norm; }
        }
    }

    // x = cs x + sn (the other of its pair), as turn_row
    struct turner {
        row cs, sn;
        // at(j): cosine and sine of pair j
        template <typename F> __device__ __forceinline__ void find(const kvq_device_rotary & r, F && at) {
#pragma unroll
            for (int q = 0; q < Q; q++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int c = channel(q) + j;
                    const bool first = r.neox ? c < r.n : !(c & 1);
                    const float2 f = at(c >= 2 * r.n ? 0 : r.neox ? (first ? c : c - r.n) : c / 2);
                    cs[q][j] = f.x;
                    sn[q][j] = first ? -f.y : f.y;
                }
            }
        }
        __device__ __forceinline__ void apply(const kvq_device_rotary & r, float * buffer, row & x) const {
            row y;
            if (r.neox) {
                float * const own = buffer + sub() * 4 * LANES;
                __syncwarp();
#pragma unroll
                for (int q = 0; q < Q; q++) {
                    *(float4 *) (own + channel(q)) = make_float4(x[q][0], x[q][1], x[q][2], x[q][3]);
                }
                __syncwarp();
#pragma unroll
                for (int q = 0; q < Q; q++) {
                    const int c = channel(q);
                    if (r.n % 4 == 0) {
                        const float4 v = *(const float4 *) (own + (c < r.n ? c + r.n : c < 2 * r.n ? c - r.n : c));
                        y[q][0] = v.x;
                        y[q][1] = v.y;
                        y[q][2] = v.z;
                        y[q][3] = v.w;
                    } else {
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            y[q][j] = own[c + j < r.n ? c + j + r.n : c + j < 2 * r.n ? c + j - r.n : c + j];
                        }
                    }
                }
            } else {
#pragma unroll
                for (int q = 0; q < Q; q++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) { y[q][j] = x[q][j ^ 1]; }
                }
            }
#pragma unroll
            for (int q = 0; q < Q; q++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float turned = x[q][j] * cs[q][j] + y[q][j] * sn[q][j];
                    x[q][j] = channel(q) + j < 2 * r.n ? turned : x[q][j];
                }
            }
        }
    };

    // four channels a quad of n; 0 behind them
    static __device__ __forceinline__ void load(const float * from, bool valid, int n, row & x) {
#pragma unroll
        for (int q = 0; q < Q; q++) {
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (valid && channel(q) < n) { v = __ldg((const float4 *) (from + channel(q))); }
            x[q][0] = v.x;
            x[q][1] = v.y;
            x[q][2] = v.z;
            x[q][3] = v.w;
        }
    }
    // and what the coordinates of the cell say of head h
    static __device__ __forceinline__ void add_said(
        const kvq_device_basis & b, const uint32_t * words, float scale, int h, bool valid, int n, row & x) {
#pragma unroll
        for (int q = 0; q < Q; q++) {
            if (valid && channel(q) < n) {
                const float4 v = said4(b, words, scale, h * n + channel(q));
                x[q][0] += v.x;
                x[q][1] += v.y;
                x[q][2] += v.z;
                x[q][3] += v.w;
            }
        }
    }
    // Keys in one block, as they were before their gains; back: [head][n] or NULL (kvq_order)
    static __device__ __forceinline__ void undo_gains(const float * back, int h, bool valid, int n, row & x) {
        if (!back) { return; }
        row f;
        load(back + (size_t) h * n, valid, n, f);
#pragma unroll
        for (int q = 0; q < Q; q++) {
#pragma unroll
            for (int j = 0; j < 4; j++) { x[q][j] *= f[q][j]; }
        }
    }
    static __device__ __forceinline__ void store_half(uint16_t * to, int head_size, int stride, const row & x) {
#pragma unroll
        for (int q = 0; q < Q; q++) {
            const int c = channel(q);
            if (c < stride) {
                uint2 v = make_uint2(0, 0);
                if (c < head_size) {
                    v.x = f32_to_f16_finite(x[q][0]) | (uint32_t) f32_to_f16_finite(x[q][1]) << 16;
                    v.y = f32_to_f16_finite(x[q][2]) | (uint32_t) f32_to_f16_finite(x[q][3]) << 16;
                }
                *(uint2 *) (to + c) = v;
            }
        }
    }
};

// Shared memory of a block whose warps have a cell each: the grid's points, a row buffer a warp, cosines and sines of
// the cells' positions, then `width` floats a warp.
struct row_memory {
    int n_points, buffer, turn, width;
    __host__ __device__ row_memory(const kvq_affine_geometry & g, const kvq_device_rotary & r, int buffer, int width)
        // turn: off equal banks
        :
        n_points((1 << g.bits * g.group) * g.group), buffer(buffer), turn(r.n ? (r.n + 3) / 2 * 2 : 0), width(width) {}
    __host__ __device__ size_t bytes(int n_warps) const {
        return 4 * (n_points + (size_t) n_warps * (buffer + 2 * turn + width));
    }
    __device__ __forceinline__ float * buffer_of(float * base, int warp) const {
        return base + n_points + warp * buffer;
    }
    __device__ __forceinline__ float2 * turn_of(float * base, int n_warps, int warp) const {
        return (float2 *) (base + n_points + n_warps * buffer) + warp * turn;
    }
    __device__ __forceinline__ float * row_of(float * base, int n_warps, int warp) const {
        return base + n_points + n_warps * (buffer + 2 * turn) + warp * width;
    }
    // by all threads; s_pos: of the cells. Neighbouring threads have neighbouring cells, whose low tables share
    // sectors.
    __device__ __forceinline__ void fill(float * base, const kvq_affine_geometry & g, const kvq_device_rotary & r,
        const int32_t * s_pos, bool turns, bool inverse) const {
        const int n_warps = blockDim.x / 32, by = __popc(n_warps - 1); // a power of two
        for (int i = threadIdx.x; i < n_points; i += blockDim.x) { base[i] = __ldg(g.points + i); }
        __syncthreads(); // s_pos
        for (int i = threadIdx.x; turns && i < n_warps * r.n; i += blockDim.x) {
            const int cell = i & (n_warps - 1), j = i >> by;
            turn_of(base, n_warps, cell)[j] = turn_factors(r, s_pos[cell], inverse, j);
        }
        __syncthreads();
    }
};

template <int L, int N> struct quads_shape {
    static constexpr int LANES = L, Q = N;
};
template <typename F> static void quads_switch(int head_size, F && f) {
    if (head_size <= 64) {
        f(quads_shape<16, 1>());
    } else if (head_size <= 128) {
        f(quads_shape<32, 1>());
    } else if (head_size <= 256) {
        f(quads_shape<32, 2>());
    } else {
        f(quads_shape<32, 4>());
    }
}

// A lane's pages as plain f16 rows. One thread: 8 channels of a cell (K), or of the cells of a word (V), 16 bytes a
// store. Heads and groups that are no multiples of 8: 4 channels of a cell, or of 4 cells.
#include "expand.cuh"
#include "cuda/seal/seal.cuh"
#include "cuda/tile.cuh"

template <int N> struct bits_of {
    static constexpr int value = N;
};

template <int BITS>
static __device__ void expand_k(
    const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params, int n, uint16_t * rows, size_t step) {
    const int units = g.head_size / 4;
    for (int i = threadIdx.x; i < n * units; i += blockDim.x) {
        const int t = i / units, u = i % units;
        __half2 s[2], z[2], a, b;
        four_params(g, params, t / g.group * g.head_size + 4 * u, s, z);
        codes_to_half(BITS ? four_codes<BITS ? BITS : 1>(g, codes, t, u) : 0, a, b);
        *(uint2 *) (rows + t * step + 4 * u) = two(__hfma2(a, s[0], z[0]), __hfma2(b, s[1], z[1]));
    }
}

template <int BITS>
static __device__ void expand_v(
    const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params, int n, uint16_t * rows, size_t step) {
    const int units = g.head_size / 4; // groups are multiples of 4 channels
    for (int i = threadIdx.x; i < (n + 3) / 4 * units; i += blockDim.x) {
        const int u = i / units, c = i % units * 4;
        __half2 s[2], z[2];
        four_params(g, params, c / g.group * g.n_cells + 4 * u, s, z);
        uint2 x[4]; // of a channel: 4 cells
#pragma unroll
        for (int j = 0; j < 4; j++) {
            __half2 a, b;
            codes_to_half(BITS ? four_codes<BITS ? BITS : 1>(g, codes, c + j, u) : 0, a, b);
            x[j] = two(__hfma2(a, s[0], z[0]), __hfma2(b, s[1], z[1]));
        }
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const uint32_t pick = t % 2 ? 0x7632 : 0x5410;
            if (4 * u + t < n) {
                *(uint2 *) (rows + (4 * u + t) * step + c) =
                    make_uint2(__byte_perm(t < 2 ? x[0].x : x[0].y, t < 2 ? x[1].x : x[1].y, pick),
                        __byte_perm(t < 2 ? x[2].x : x[2].y, t < 2 ? x[3].x : x[3].y, pick));
            }
        }
    }
}

// This thread's channels stay, and with them its parameters as long as cells are of one group.
template <int BITS>
static __device__ void expand_k8(
    const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params, int n, uint16_t * rows, size_t step) {
    const int units = g.head_size / 8, u = threadIdx.x % units, n_rows = blockDim.x / units;
    if ((int) threadIdx.x >= units * n_rows) { return; }
    __half2 s[2][2], z[2][2];
    int group = -1;
#pragma unroll 4
    for (int t = threadIdx.x / units; t < n; t += n_rows) {
        if (t / g.group != group) {
            group = t / g.group;
#pragma unroll
            for (int i = 0; i < 2; i++) { four_params(g, params, group * g.head_size + 8 * u + 4 * i, s[i], z[i]); }
        }
        uint2 x[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            __half2 a, b;
            codes_to_half(four_codes<BITS>(g, codes, t, 2 * u + i), a, b);
            x[i] = two(__hfma2(a, s[i][0], z[i][0]), __hfma2(b, s[i][1], z[i][1]));
        }
        *(uint4 *) (rows + t * step + 8 * u) = make_uint4(x[0].x, x[0].y, x[1].x, x[1].y);
    }
}

// byte k of four words as one word, k = 0..3
static __device__ __forceinline__ void turn_bytes(const uint32_t (&x)[8], int i, uint32_t (&y)[4]) {
    const uint32_t a = __byte_perm(x[i], x[i + 1], 0x5140), b = __byte_perm(x[i + 2], x[i + 3], 0x5140);
    const uint32_t c = __byte_perm(x[i], x[i + 1], 0x7362), d = __byte_perm(x[i + 2], x[i + 3], 0x7362);
    y[0] = __byte_perm(a, b, 0x5410);
    y[1] = __byte_perm(a, b, 0x7632);
    y[2] = __byte_perm(c, d, 0x5410);
    y[3] = __byte_perm(c, d, 0x7632);
}

template <int BITS>
static __device__ void expand_v8(
    const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params, int n, uint16_t * rows, size_t step) {
    constexpr int W = BITS == 3 ? 2 : BITS, P = 8 / W, SPAN = 4 * P; // cells of a word
    const int units = g.head_size / 8;
    for (int i = threadIdx.x; i < (n + SPAN - 1) / SPAN * units; i += blockDim.x) {
        const int w = i / units, c = i % units * 8;
        const uint4 * from = (const uint4 *) (codes + (c / 16 * g.n_chunks[0] + w) * 64 + c % 16 * 4);
        const uint4 lo = from[0], hi = from[1];
        const uint32_t x[8] = { lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w };
        uint32_t high[8] = {};
        if (BITS == 3) {
            const uint8_t * more = codes + g.offset[1] + (c / 16 * g.n_chunks[1] + w * SPAN / 32) * 64 + c % 16 * 4;
            const uint4 * third = (const uint4 *) more;
            const uint4 p = third[0], q = third[1];
            high[0] = p.x;
            high[1] = p.y;
            high[2] = p.z;
            high[3] = p.w;
            high[4] = q.x;
            high[5] = q.y;
            high[6] = q.z;
            high[7] = q.w;
        }
#pragma unroll
        for (int j = 0; j < P; j++) {
            const int t = w * SPAN + 4 * j;
            if (t >= n) { break; }
            __half2 s[2], z[2];
            four_params(g, params, c / g.group * g.n_cells + t, s, z);
            uint32_t y[8], cells[2][4];
#pragma unroll
            for (int e = 0; e < 8; e++) {
                y[e] = x[e] >> (W * j) & (0x01010101u * ((1 << W) - 1));
                if (BITS == 3) { y[e] |= (high[e] >> (w % 2 * 4 + j) & 0x01010101u) << 2; }
            }
            turn_bytes(y, 0, cells[0]);
            turn_bytes(y, 4, cells[1]);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const __half2 sk = __half2half2(k % 2 ? s[k / 2].y : s[k / 2].x);
                const __half2 zk = __half2half2(k % 2 ? z[k / 2].y : z[k / 2].x);
                uint2 out[2];
#pragma unroll
                for (int v = 0; v < 2; v++) {
                    __half2 a, b;
                    codes_to_half(cells[v][k], a, b);
                    out[v] = two(__hfma2(a, sk, zk), __hfma2(b, sk, zk));
                }
                if (t + k < n) {
                    uint16_t * to = rows + (size_t) (t + k) * step + c;
                    *(uint4 *) to = make_uint4(out[0].x, out[0].y, out[1].x, out[1].y);
                }
            }
        }
    }
}

template <bool EIGHT>
static __global__ void expand_kernel(
    const kvq_affine_geometry g, const kvq_page * pages, int n_head, const kvq_row_place to) {
    packed_page p;
    if (!p.find(g, pages, n_head, to)) { return; }
    const bool key = g.role == KVQ_ROLE_K;
    const auto of = [&](auto bits) {
        constexpr int BITS = decltype(bits)::value;
        if constexpr (EIGHT) {
            if (key) {
                expand_k8<BITS>(g, p.codes, p.params, p.n, p.rows, p.step);
            } else {
                expand_v8<BITS>(g, p.codes, p.params, p.n, p.rows, p.step);
            }
        } else {
            if (key) {
                expand_k<BITS>(g, p.codes, p.params, p.n, p.rows, p.step);
            } else {
                expand_v<BITS>(g, p.codes, p.params, p.n, p.rows, p.step);
            }
        }
    };
    switch (g.bits) {
    case 0:
        if constexpr (!EIGHT) { of(bits_of<0>()); }
        break;
    case 1: of(bits_of<1>()); break;
    case 2: of(bits_of<2>()); break;
    case 3: of(bits_of<3>()); break;
    case 4: of(bits_of<4>()); break;
    }
}

void kvq_launch_expand(const kvq_affine_geometry & g, const kvq_page * pages, int n_pages, int n_head,
    const kvq_row_place & to, cudaStream_t stream) {
    const bool eight = g.bits && g.head_size % 8 == 0 && to.step % 8 == 0 &&
        (g.role == KVQ_ROLE_K || g.group % 8 == 0 || g.group >= g.head_size);
    const auto kernel = eight ? expand_kernel<true> : expand_kernel<false>;
    kernel<<<dim3(n_pages, n_head), 256, 0, stream>>>(g, pages, n_head, to);
}

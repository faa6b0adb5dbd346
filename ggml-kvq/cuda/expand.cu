// A lane's pages as plain f16 rows. One thread: 4 channels of a cell (K), or 4 channels of 4 cells (V), 8 bytes a store.
#include "expand.cuh"
#include "seal.cuh"
#include "tile.cuh"

template <int BITS> static __device__ void expand_k(const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params, int n, uint16_t * rows, size_t step) {
    const int units = g.head_size / 4;
    for (int i = threadIdx.x; i < n * units; i += blockDim.x) {
        const int t = i / units, u = i % units;
        __half2 s[2], z[2], a, b;
        four_params(g, params, t / g.group * g.head_size + 4*u, s, z);
        codes_to_half(BITS ? four_codes<BITS ? BITS : 1>(g, codes, t, u) : 0, a, b);
        *(uint2 *) (rows + t * step + 4*u) = two(__hfma2(a, s[0], z[0]), __hfma2(b, s[1], z[1]));
    }
}

template <int BITS> static __device__ void expand_v(const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params, int n, uint16_t * rows, size_t step) {
    const int units = g.head_size / 4; // groups are multiples of 4 channels
    for (int i = threadIdx.x; i < (n + 3) / 4 * units; i += blockDim.x) {
        const int u = i / units, c = i % units * 4;
        __half2 s[2], z[2];
        four_params(g, params, c / g.group * g.n_cells + 4*u, s, z);
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
            if (4*u + t < n) {
                *(uint2 *) (rows + (4*u + t) * step + c) = make_uint2(__byte_perm(t < 2 ? x[0].x : x[0].y, t < 2 ? x[1].x : x[1].y, pick),
                                                                     __byte_perm(t < 2 ? x[2].x : x[2].y, t < 2 ? x[3].x : x[3].y, pick));
            }
        }
    }
}

static __global__ void expand_kernel(const kvq_affine_geometry g, const kvq_page * pages, int n_head, const kvq_row_place to) {
    packed_page p;
    if (!p.find(g, pages, n_head, to)) { return; }
    const bool key = g.role == KVQ_ROLE_K;
    switch (g.bits) {
        case 0: key ? expand_k<0>(g, p.codes, p.params, p.n, p.rows, p.step) : expand_v<0>(g, p.codes, p.params, p.n, p.rows, p.step); break;
        case 1: key ? expand_k<1>(g, p.codes, p.params, p.n, p.rows, p.step) : expand_v<1>(g, p.codes, p.params, p.n, p.rows, p.step); break;
        case 2: key ? expand_k<2>(g, p.codes, p.params, p.n, p.rows, p.step) : expand_v<2>(g, p.codes, p.params, p.n, p.rows, p.step); break;
        case 3: key ? expand_k<3>(g, p.codes, p.params, p.n, p.rows, p.step) : expand_v<3>(g, p.codes, p.params, p.n, p.rows, p.step); break;
        case 4: key ? expand_k<4>(g, p.codes, p.params, p.n, p.rows, p.step) : expand_v<4>(g, p.codes, p.params, p.n, p.rows, p.step); break;
    }
}

void kvq_launch_expand(const kvq_affine_geometry & g, const kvq_page * pages, int n_pages, int n_head, const kvq_row_place & to, cudaStream_t stream) {
    expand_kernel<<<dim3(n_pages, n_head), 256, 0, stream>>>(g, pages, n_head, to);
}

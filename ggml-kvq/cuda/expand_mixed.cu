// A lane's mixed pages as plain f16 rows (kvq_launch_expand). A thread: the same 4 channels of one cell after the
// other, so that what belongs to channels stays in registers.
#include "expand.cuh"
#include "select.cuh"

template <bool KEY>
static __global__ void expand_mixed_kernel(const kvq_affine_geometry g, const __grid_constant__ kvq_mixed_geometry m,
    const kvq_page * pages, int n_head, const kvq_row_place to) {
    packed_page p;
    if (!p.find(g, pages, n_head, to)) { return; }
    __shared__ int s_place[256];
    __shared__ float2 s_pair[KEY ? 1 : 256]; // of values, one a cell
    for (int t = threadIdx.x; t < p.n; t += blockDim.x) {
        const int place = mixed_place(p.params, t), i = place >> 8, j = place & 255;
        s_place[t] = place;
        if (!KEY) {
            s_pair[t] =
                j < m.part[i].n_cells ? mixed_params(m.part[i], p.params + m.params[i], j) : make_float2(0.0f, 0.0f);
        }
    }
    __syncthreads();
    const int units = m.head_size / 4, c = threadIdx.x % units * 4;
    if ((int) threadIdx.x >= blockDim.x / units * units) { return; }
    float2 pair[2][4]; // of keys, of either part
    float channel[4];  // of values
#pragma unroll
    for (int e = 0; e < 4; e++) {
        for (int i = 0; KEY && i < 2; i++) {
            pair[i][e] =
                m.part[i].n_cells ? mixed_params(m.part[i], p.params + m.params[i], c + e) : make_float2(0.0f, 0.0f);
        }
        if (!KEY) { channel[e] = mixed_channel(p.params[m.channels + c + e]); }
    }
#pragma unroll 2
    for (int t = threadIdx.x / units; t < p.n; t += blockDim.x / units) {
        const int place = s_place[t], i = place >> 8, j = place & 255;
        const kvq_affine_geometry & part = m.part[i];
        const uint8_t * codes = p.codes + m.codes[i];
        float x[4] = {};
        if (j >= part.n_cells) { // foreign bytes
        } else if (KEY) {
            const uint32_t word = mixed_word(part, codes, j, c / 4);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float2 y = i ? pair[1][e] : pair[0][e];
                x[e] = y.y + y.x * (float) (word >> 8 * e & 255);
            }
        } else { // of 4 channels, 16 bytes with the cell's field in the same place
            const int w = part.width[0], span = 32 / w, rest = j % span, more = j % 32;
            const uint4 y = *(const uint4 *) (codes + (c / 16 * part.n_chunks[0] + j / span) * 64 + c % 16 * 4);
            uint4 z = make_uint4(0, 0, 0, 0);
            if (part.n_parts == 2) {
                z = *(const uint4 *) (codes + part.offset[1] + (c / 16 * part.n_chunks[1] + j / 32) * 64 + c % 16 * 4);
            }
            const uint32_t low[4] = { y.x, y.y, y.z, y.w }, high[4] = { z.x, z.y, z.z, z.w };
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const uint32_t code = (low[e] >> (rest % 4 * 8 + rest / 4 * w) & ((1u << w) - 1)) |
                    (high[e] >> (more % 4 * 8 + more / 4) & 1) << 2;
                x[e] = (s_pair[t].y + s_pair[t].x * (float) code) * channel[e];
            }
        }
        *(uint2 *) (p.rows + t * p.step + c) = mixed_halves(make_float4(x[0], x[1], x[2], x[3]));
    }
}

void kvq_launch_expand_mixed(const kvq_mixed_geometry & m, const kvq_page * pages, int n_pages, int n_head,
    const kvq_row_place & to, cudaStream_t stream) {
    kvq_affine_geometry g = {};
    g.role = m.role;
    g.n_cells = m.n_cells;
    g.head_size = m.head_size;
    g.stride = m.stride;
    g.nb_codes = m.nb_codes;
    g.nb_params = m.nb_params;
    if (m.role == KVQ_ROLE_K) {
        expand_mixed_kernel<true><<<dim3(n_pages, n_head), 256, 0, stream>>>(g, m, pages, n_head, to);
    } else {
        expand_mixed_kernel<false><<<dim3(n_pages, n_head), 256, 0, stream>>>(g, m, pages, n_head, to);
    }
}

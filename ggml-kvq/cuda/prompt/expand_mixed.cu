// A lane's mixed pages as plain f16 rows (kvq_launch_expand). A block has a page of one KV head, a warp 32 channels of
// it: 4 threads beside each other read and write whole sectors. Within a part, cells are taken in the part's order, so
// that widths are the same for all, and a list says which cell of the page each one is.
#include "expand.cuh"
#include "cuda/policy/select.cuh"

constexpr int WARPS = 8, EACH = 8, UNITS = 4; // channels of a thread, threads beside each other

// A code below 128 in the upper bits of a float's mantissa: (as a float) 1/2 + code/256, so that
//   zero + scale code = (zero - 128 scale) + (256 scale) (1/2 + code/256)
// within 2^-17 of the scale.
static __device__ __forceinline__ float2 of_floats(float2 pair) {
    return make_float2(256.0f * pair.x, pair.y - 128.0f * pair.x);
}
static __device__ __forceinline__ float code_float(uint32_t word, int byte) {
    return __uint_as_float(__byte_perm(word, 0x3f000000u, 0x7044u | (unsigned) byte << 8));
}

static __device__ __forceinline__ uint32_t finite_halves(float x, float y) {
    const __half2 least = __float2half2_rn(-65504.0f), most = __float2half2_rn(65504.0f),
                  h = __hmin2(__hmax2(__floats2half2_rn(x, y), least), most);
    return *(const uint32_t *) &h;
}

// Where a part's codes lie, and how wide they are.
struct mixed_part {
    const uint8_t *codes, *third; // third: third bits, of 3-bit codes, else null
    int width, n_chunks, n_chunks_third;
    uint32_t mask;
    __device__ __forceinline__ mixed_part(const kvq_affine_geometry & g, const uint8_t * at) :
        codes(at),
        third(g.n_parts == 2 ? at + g.offset[1] : nullptr),
        width(g.width[0]),
        n_chunks(g.n_chunks[0]),
        n_chunks_third(g.n_chunks[1]),
        mask(0x01010101u * ((1u << g.width[0]) - 1)) {}
};

// keys: 8 channels from c on of cell j of the part, a byte each
static __device__ __forceinline__ uint2 key_codes(const mixed_part & p, int j, int c) {
    const int planes = 8 / p.width, u = c / 4;
    const uint32_t word =
        *(const uint32_t *) (p.codes + (j / 16 * p.n_chunks + u / planes) * 64 + j % 16 * 4) >> u % planes * p.width;
    uint2 x = make_uint2(word & p.mask, word >> p.width & p.mask);
    if (p.third) {
        const uint32_t more =
            *(const uint32_t *) (p.third + (j / 16 * p.n_chunks_third + u / 8) * 64 + j % 16 * 4) >> u % 8;
        x.x |= (more & 0x01010101u) << 2;
        x.y |= (more >> 1 & 0x01010101u) << 2;
    }
    return x;
}

// values: of each of 8 channels from c on 4 cells from j on, a byte each
static __device__ __forceinline__ void value_codes(const mixed_part & p, int j, int c, uint32_t (&x)[EACH]) {
    const int span = 32 / p.width, shift = j % span / 4 * p.width;
    const auto load = [&](const uint8_t * codes, int chunk, int n_chunks, uint32_t (&to)[EACH]) {
        const uint4 * const at = (const uint4 *) (codes + (c / 16 * n_chunks + chunk) * 64 + c % 16 * 4);
        *(uint4 *) to = at[0];
        *(uint4 *) (to + 4) = at[1];
    };
    load(p.codes, j / span, p.n_chunks, x);
#pragma unroll
    for (int e = 0; e < EACH; e++) { x[e] = x[e] >> shift & p.mask; }
    if (p.third) {
        uint32_t more[EACH];
        load(p.third, j / 32, p.n_chunks_third, more);
#pragma unroll
        for (int e = 0; e < EACH; e++) { x[e] |= (more[e] >> j % 32 / 4 & 0x01010101u) << 2; }
    }
}

template <bool KEY>
static __global__ void __launch_bounds__(32 * WARPS, 4) expand_mixed_kernel(const kvq_affine_geometry g,
    const __grid_constant__ kvq_mixed_geometry m, const kvq_page * pages, int n_head, const kvq_row_place to) {
    packed_page p;
    if (!p.find(g, pages, n_head, to)) { return; }
    __shared__ int16_t s_cell[2][256];          // of each part's cells, -1: not there
    __shared__ float2 s_pair[2][KEY ? 1 : 256]; // of values, one a cell
    for (int i = threadIdx.x; i < 512; i += 32 * WARPS) { s_cell[i / 256][i % 256] = -1; }
    __syncthreads();
    for (int t = threadIdx.x; t < p.n; t += 32 * WARPS) {
        const int place = mixed_place(p.params, t), i = place >> 8, j = place & 255;
        if (j < m.part[i].n_cells) {
            s_cell[i][j] = (int16_t) t;
        } else { // foreign bytes
            for (int c = 0; c < m.head_size; c += 8) { *(uint4 *) (p.rows + t * p.step + c) = make_uint4(0, 0, 0, 0); }
        }
    }
    for (int i = 0; !KEY && i < 2; i++) {
        for (int j = threadIdx.x; j < m.part[i].n_cells; j += 32 * WARPS) {
            s_pair[i][j] = of_floats(mixed_params(m.part[i], p.params + m.params[i], j));
        }
    }
    __syncthreads();
    // warps that share channels take turns
    const int n = (m.head_size / EACH + UNITS - 1) / UNITS, at_once = min(n, WARPS), turns = WARPS / at_once,
              turn = (int) threadIdx.x / 32 / at_once, lane = threadIdx.x % 32;
    if (turn >= turns) { return; }
    for (int at = threadIdx.x / 32 % at_once; at < n; at += at_once) {
        const int c = EACH * (UNITS * at + lane % UNITS);
        if (c >= m.head_size) { continue; }
        for (int i = 0; i < 2; i++) {
            const kvq_affine_geometry & geometry = m.part[i];
            if (!geometry.n_cells) { continue; }
            const mixed_part part(geometry, p.codes + m.codes[i]);
            float2 pair[EACH];   // of keys
            float channel[EACH]; // of values
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                if constexpr (KEY) {
                    pair[e] = of_floats(mixed_params(geometry, p.params + m.params[i], c + e));
                } else {
                    channel[e] = mixed_channel(p.params[m.channels + c + e]);
                }
            }
            constexpr int CELLS = KEY ? 1 : 4; // of a thread
#pragma unroll(KEY ? 4 : 1)
            for (int j = CELLS * (turn * 8 + lane / UNITS); j < geometry.n_cells; j += CELLS * 8 * turns) {
                uint32_t x[EACH];
                if constexpr (KEY) {
                    const uint2 y = key_codes(part, j, c);
                    x[0] = y.x;
                    x[1] = y.y;
                } else {
                    value_codes(part, j, c, x);
                }
#pragma unroll
                for (int k = 0; k < CELLS; k++) {
                    const int t = s_cell[i][j + k];
                    float y[EACH];
#pragma unroll
                    for (int e = 0; e < EACH; e++) {
                        if constexpr (KEY) {
                            y[e] = fmaf(pair[e].x, code_float(x[e / 4], e % 4), pair[e].y);
                        } else {
                            const float2 of_cell = s_pair[i][j + k];
                            y[e] = fmaf(of_cell.x, code_float(x[e], k), of_cell.y) * channel[e];
                        }
                    }
                    if (t >= 0) {
                        *(uint4 *) (p.rows + t * p.step + c) = make_uint4(finite_halves(y[0], y[1]),
                            finite_halves(y[2], y[3]), finite_halves(y[4], y[5]), finite_halves(y[6], y[7]));
                    }
                }
            }
        }
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
    const auto kernel = m.role == KVQ_ROLE_K ? expand_mixed_kernel<true> : expand_mixed_kernel<false>;
    kernel<<<dim3(n_pages, n_head), 32 * WARPS, 0, stream>>>(g, m, pages, n_head, to);
}

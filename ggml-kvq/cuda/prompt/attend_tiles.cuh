// Attention by tiles of 32 cells in shared memory, on tensor cores, with online softmax (FlashAttention-2, arXiv
// 2307.08691, section 3). A block = one KV head, n_warps x 16 rows, one split of the pages; every tile is decoded
// once for all rows of the block. MIXED: pages of two widths (types/mixed.h).
#pragma once

#include "cuda/walk/attend.cuh"
#include "cuda/tile.cuh"
#include "tile_mixed.cuh"

template <int D, int N_WARPS, bool MIXED>
static __global__ void __launch_bounds__(32 * N_WARPS) tiles_kernel(const __grid_constant__ kvq_attend_args a) {
    extern __shared__ __align__(16) __half s_memory[];
    __half *const s_k = s_memory, *const s_v = s_k + TILE_CELLS * (D + 8);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, tig = lane % 4, n_warps = N_WARPS;
    const int row_block = blockIdx.x / a.n_splits, split = blockIdx.x % a.n_splits, kvh = blockIdx.y, is = blockIdx.z;
    const auto & st = a.stream[is];
    const int rows0 = row_block * n_warps * 16, block_rows = min(n_warps * 16, a.n_rows - rows0);

    // this thread's rows g and g + 8 of its warp; rows behind the last repeat it and are not stored
    int row[2], token[2], head[2];
    float slope[2], m[2] = { -INFINITY, -INFINITY }, l[2] = { 0.0f, 0.0f };
    for (int i = 0; i < 2; i++) {
        row[i] = rows0 + warp * 16 + g + 8 * i;
        const int r = min(row[i], a.n_rows - 1);
        token[i] = row_token(a, r);
        head[i] = row_head(a, kvh, r);
        slope[i] = alibi_slope(a, head[i]);
    }
    uint32_t q[D / 16][4];
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float * p = st.q + token[j % 2] * a.q_stride_token + head[j % 2] * a.q_stride_head;
            const int c = 16 * k + 2 * tig + j / 2 * 8;
            q[k][j] = c < a.k.head_size ? pack_half2(p[c] * a.scale, p[c + 1] * a.scale) : 0;
        }
    }
    float o[D / 8][4] = {};
    const int page0 = (int) ((int64_t) a.n_pages * split / a.n_splits),
              page1 = (int) ((int64_t) a.n_pages * (split + 1) / a.n_splits);
    const int token0 = row_token(a, rows0), n_tokens = row_token(a, rows0 + block_rows - 1) - token0 + 1;
    const uint32_t k_row =
        (uint32_t) __cvta_generic_to_shared(s_k + (lane % 8 + lane / 16 * 8) * (D + 8) + lane / 8 % 2 * 8);
    const uint32_t v_row =
        (uint32_t) __cvta_generic_to_shared(s_v + (lane % 8 + lane / 16 * 8) * TILE_V_STEP + lane / 8 % 2 * 8);

    for (int ip = page0; ip < page1; ip++) {
        const kvq_page & page = st.pages[ip];
        if (!page.n_slots) { continue; }
        const int32_t * map = page.map ? page.map + kvh * a.map_stride : nullptr;
        for (int t0 = 0; t0 < a.page_cells; t0 += TILE_CELLS) {
            // does any row of the block see a cell of the tile? (heads share a mask)
            bool seen = false;
            for (int i = threadIdx.x; i < n_tokens * TILE_CELLS; i += blockDim.x) {
                const int slot = t0 + i % TILE_CELLS, cell = map ? map[slot] : page.cell + slot;
                if (cell >= 0 && cell < a.n_kv) {
                    seen |= !st.mask ||
                        __half_as_ushort(st.mask[(token0 + i / TILE_CELLS) * a.mask_stride_token +
                            head[0] * a.mask_stride_head + cell]) != 0xfc00;
                }
            }
            if (!__syncthreads_or(seen)) { // also: no warp reads the previous tile any more
                continue;
            }
            if constexpr (MIXED) {
                fill_tile_mixed<D, 32 * N_WARPS>(a, page, kvh, t0, s_k, s_v);
            } else {
                fill_tile<D, 32 * N_WARPS>(a.k, a.v, page, kvh, t0, s_k, s_v);
            }
            __syncthreads();

            float s[TILE_CELLS / 8][4] = {};
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
#pragma unroll
                for (int n = 0; n < TILE_CELLS / 8; n += 2) {
                    uint32_t b[4];
                    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                        : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                        : "r"(k_row + 2 * (n * 8 * (D + 8) + 16 * k)));
                    mma(s[n], q[k], b[0], b[1]);
                    mma(s[n + 1], q[k], b[2], b[3]);
                }
            }
            // scale, softcap, mask
            float top[2] = { -INFINITY, -INFINITY };
#pragma unroll
            for (int n = 0; n < TILE_CELLS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int i = e / 2, slot = t0 + 8 * n + 2 * tig + e % 2, cell = map ? map[slot] : page.cell + slot;
                    float x = s[n][e];
                    if (a.softcap != 0.0f) { x = a.softcap * tanhf(x / a.softcap); }
                    if (cell < 0 || cell >= a.n_kv) {
                        x = -INFINITY;
                    } else if (st.mask) {
                        x += slope[i] *
                            __half2float(st.mask[token[i] * a.mask_stride_token + head[i] * a.mask_stride_head + cell]);
                    }
                    s[n][e] = x;
                    top[i] = fmaxf(top[i], x);
                }
            }
            float c[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
                top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 2));
                top[i] = fmaxf(top[i], m[i]);
                c[i] = m[i] == -INFINITY ? 0.0f : __expf(m[i] - top[i]);
                m[i] = top[i];
                l[i] *= c[i];
            }
#pragma unroll
            for (int n = 0; n < TILE_CELLS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int i = e / 2;
                    s[n][e] = top[i] == -INFINITY ? 0.0f : __expf(s[n][e] - top[i]);
                    l[i] += s[n][e];
                }
            }
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                o[n][0] *= c[0];
                o[n][1] *= c[0];
                o[n][2] *= c[1];
                o[n][3] *= c[1];
            }
#pragma unroll
            for (int k = 0; k < TILE_CELLS / 16; k++) {
                const uint32_t p[4] = { pack_half2(s[2 * k][0], s[2 * k][1]), pack_half2(s[2 * k][2], s[2 * k][3]),
                    pack_half2(s[2 * k + 1][0], s[2 * k + 1][1]), pack_half2(s[2 * k + 1][2], s[2 * k + 1][3]) };
#pragma unroll
                for (int n = 0; n < D / 8; n += 2) {
                    uint32_t b[4];
                    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                        : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                        : "r"(v_row + 2 * (n * 8 * TILE_V_STEP + 16 * k)));
                    mma(o[n], p, b[0], b[1]);
                    mma(o[n + 1], p, b[2], b[3]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        l[i] += __shfl_xor_sync(~0u, l[i], 1);
        l[i] += __shfl_xor_sync(~0u, l[i], 2);
        if (row[i] >= a.n_rows) { continue; }
        float *out, inv = 1.0f;
        if (a.n_splits > 1) {
            out = a.partial + partial_at(a, is, kvh, row[i], split);
            if (tig == 0) {
                out[a.v.head_size] = m[i];
                out[a.v.head_size + 1] = l[i];
            }
        } else {
            out = st.dst + token[i] * a.dst_stride_token + head[i] * a.dst_stride_head;
            float sum = l[i], cs = 1.0f;
            if (a.sinks) { // one more logit without a value
                const float sink = a.sinks[head[i]], high = fmaxf(m[i], sink);
                cs = m[i] == -INFINITY ? 0.0f : __expf(m[i] - high);
                sum = sum * cs + __expf(sink - high);
            }
            inv = sum > 0.0f ? cs / sum : 0.0f;
            if (st.lse && tig == 0) {
                st.lse[(size_t) token[i] * a.n_head + head[i]] =
                    (a.sinks ? fmaxf(m[i], a.sinks[head[i]]) : m[i]) + logf(sum);
            }
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            const int d = 8 * n + 2 * tig;
            if (d < a.v.head_size) {
                out[d] = o[n][2 * i] * inv;
                out[d + 1] = o[n][2 * i + 1] * inv;
            }
        }
    }
}

template <int D, bool MIXED>
static void launch_tiles(const kvq_attend_args & a, int n_streams, int n_warps, cudaStream_t stream) {
    const size_t nb = 2 * (size_t) (TILE_CELLS * (D + 8) + D * TILE_V_STEP);
    const int blocks = (a.n_rows + n_warps * 16 - 1) / (n_warps * 16);
    const dim3 grid(blocks * a.n_splits, a.n_head_kv, n_streams);
    if (n_warps == 1) {
        tiles_kernel<D, 1, MIXED><<<grid, 32, nb, stream>>>(a);
    } else {
        tiles_kernel<D, 4, MIXED><<<grid, 128, nb, stream>>>(a);
    }
}

template <bool MIXED>
static bool launch_tiles_of(const kvq_attend_args & a, int n_streams, int n_warps, cudaStream_t stream) {
    switch (kvq_tiles_head_size(a.k.head_size, a.v.head_size)) {
    case 64: launch_tiles<64, MIXED>(a, n_streams, n_warps, stream); return true;
    case 80: launch_tiles<80, MIXED>(a, n_streams, n_warps, stream); return true;
    case 96: launch_tiles<96, MIXED>(a, n_streams, n_warps, stream); return true;
    case 128: launch_tiles<128, MIXED>(a, n_streams, n_warps, stream); return true;
    case 192: launch_tiles<192, MIXED>(a, n_streams, n_warps, stream); return true;
    case 256:
        launch_tiles<256, MIXED>(a, n_streams, n_warps, stream);
        return true;
        // 512: a row of output alone would take all registers; decode kernels do without tiles (attend_decode.cu)
    }
    return false;
}

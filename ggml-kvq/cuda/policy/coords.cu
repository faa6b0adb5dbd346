#include "coords.cuh"

#include "cuda/instructions.cuh"

#include <cstring>

namespace {

__global__ void __launch_bounds__(256) unpack_kernel(const __grid_constant__ kvq_coord_read_args a) {
    early_start();
    early_wait();
    const auto & st = a.stream[blockIdx.y];
    const kvq_page & page = st.pages[blockIdx.x];
    const uint8_t * const coords = page.n_slots ? (const uint8_t *) page.k_params : nullptr;
    const kvq_device_basis & b = a.basis;
    const size_t first = (size_t) blockIdx.x * a.page_cells;
    for (int i = threadIdx.x; i < a.page_cells * a.stride / 4; i += blockDim.x) {
        const int t = i % a.page_cells, word = i / a.page_cells;
        *(uint32_t *) (st.x + (first + t) * a.stride + 4 * word) =
            coords && word < (b.n + 3) / 4 ? coord_word(b, coords, t, word) : 0;
    }
    for (int t = threadIdx.x; t < a.page_cells; t += blockDim.x) {
        st.s[first + t] = coords ? coord_scale(coords[coord_pair_at(b, b.n / 2, t)]) : 0.0f;
    }
}

__device__ __forceinline__ void mma8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A block: a KV head, a chunk of pages. A warp has 16 of the head's pairs of channels, and both channels of a pair are
// one thread's. Left operand = coordinates of 16 cells, right = the basis, which stays in registers.
template <int D, int GROUPS>
__global__ void __launch_bounds__(D) logits_kernel(const __grid_constant__ kvq_coord_read_args a) {
    constexpr int WARPS = D / 32;
    __shared__ float s_q[KVQ_COORD_ROWS][D], s_sum[2][WARPS][KVQ_COORD_ROWS][KVQ_COORD_CELLS];
    early_start();
    const auto & st = a.stream[blockIdx.z];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4, kvh = blockIdx.y;
    const int n_groups = a.stride / 32;
    const int first[2] = { a.rotary.neox ? 16 * warp : 32 * warp, a.rotary.neox ? D / 2 + 16 * warp : 32 * warp + 16 };
    uint4 w[GROUPS][2];
    float step[2][2][2]; // [16 channels][8 of them][channel]
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int tile = (kvh * D + first[i]) / 16;
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            w[k][i] = k < n_groups
                ? __ldg((const uint4 *) (a.weights + ((size_t) tile * n_groups + k) * 512 + lane * 16))
                : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            step[i][j / 2][j % 2] = __ldg(a.basis.step + kvh * D + first[i] + j / 2 * 8 + 2 * c + j % 2);
        }
    }
    early_wait();
    for (int i = threadIdx.x; i < a.n_rows * D; i += D) {
        const int r = i / D, token = a.n_q == 1 ? 0 : r / a.gqa, head = kvh * a.gqa + (a.n_q == 1 ? r : r % a.gqa);
        s_q[r][i % D] = a.scale * st.q[token * a.q_stride_token + head * a.q_stride_head + i % D];
    }
    __syncthreads();
    const int begin = (int) blockIdx.x * a.chunk, end = min(begin + a.chunk, a.n_pages);
    int turn = 0;
    for (int at = begin * a.page_cells; at < end * a.page_cells; at += KVQ_COORD_CELLS) {
        const kvq_page & page = st.pages[at / a.page_cells];
        if (!page.k_params || !page.n_slots) { continue; }
        int y[2][2][4] = {};
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            if (k >= n_groups) { break; }
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[i] = __ldcg(
                    (const uint32_t *) (st.x + (size_t) (at + g + i % 2 * 8) * a.stride + 32 * k + i / 2 * 16 + 4 * c));
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                mma8(y[i][0], x, w[k][i].x, w[k][i].y);
                mma8(y[i][1], x, w[k][i].z, w[k][i].w);
            }
        }
        float key[2][2][4];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            key[i / 8][i / 4 % 2][i % 4] = step[i / 8][i / 4 % 2][i % 2] * (float) y[i / 8][i / 4 % 2][i % 4];
        }
#pragma unroll
        for (int i = 0; i < 2; i++) { // cells g, g + 8
            const int32_t pos = __ldg(st.positions + at + g + 8 * i);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int pair =
                    a.rotary.neox ? first[0] + j / 2 * 8 + 2 * c + j % 2 : (first[j / 2] + j % 2 * 8) / 2 + c;
                float & u = a.rotary.neox ? key[0][j / 2][2 * i + j % 2] : key[j / 2][j % 2][2 * i];
                float & v = a.rotary.neox ? key[1][j / 2][2 * i + j % 2] : key[j / 2][j % 2][2 * i + 1];
                const float2 f = turn_factors(a.rotary, pos, false, pair);
                const float x = u;
                u = x * f.x - v * f.y;
                v = v * f.x + x * f.y;
            }
        }
        for (int r = 0; r < a.n_rows; r++) {
            float sum[2] = {};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 q = *(const float2 *) &s_q[r][first[j / 2] + j % 2 * 8 + 2 * c];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    sum[i] = fmaf(q.x, key[j / 2][j % 2][2 * i], fmaf(q.y, key[j / 2][j % 2][2 * i + 1], sum[i]));
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
                sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
                if (c == 0) { s_sum[turn][warp][r][g + 8 * i] = sum[i]; }
            }
        }
        __syncthreads(); // the other half of s_sum is written next
        for (int i = threadIdx.x; i < a.n_rows * KVQ_COORD_CELLS; i += D) {
            const int r = i / KVQ_COORD_CELLS, t = i % KVQ_COORD_CELLS;
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < WARPS; k++) { sum += s_sum[turn][k][r][t]; }
            st.logits[((size_t) kvh * a.n_rows + r) * a.n_logits + at + t] += sum * __ldcg(st.s + at + t);
        }
        turn ^= 1;
    }
}

template <int D> void launch_logits(const kvq_coord_read_args & a, int n_streams, cudaStream_t stream) {
    const dim3 grid((a.n_pages + a.chunk - 1) / a.chunk, a.n_head_kv, n_streams);
    const int n = a.stride / 32;
    if (n <= 2) {
        kvq_launch_early(logits_kernel<D, 2>, grid, D, 0, stream, a);
    } else if (n <= 4) {
        kvq_launch_early(logits_kernel<D, 4>, grid, D, 0, stream, a);
    } else {
        kvq_launch_early(logits_kernel<D, KVQ_COORD_GROUPS>, grid, D, 0, stream, a);
    }
}

} // namespace

std::vector<uint8_t> kvq_order_basis(const kvq_basis & b) {
    const size_t n_groups = (size_t) (b.n + 31) / 32, n_tiles = (size_t) (b.width + 15) / 16;
    std::vector<uint8_t> out(n_groups * n_tiles * 512 + n_tiles * 16 * sizeof(float));
    uint8_t * to = out.data();
    for (size_t i = 0; i < n_tiles * n_groups; i++) {
        for (size_t word = 0; word < 128; word++) {
            const size_t lane = word / 4, w = word % 4, channel = i / n_groups * 16 + w / 2 * 8 + lane / 4,
                         quad = i % n_groups * 8 + w % 2 * 4 + lane % 4;
            if (channel < (size_t) b.width && quad < (size_t) (b.n + 3) / 4) {
                memcpy(to, b.out + (quad * (size_t) b.width + channel) * 4, 4);
            }
            to += 4;
        }
    }
    memcpy(to, b.step, (size_t) b.width * sizeof(float));
    return out;
}

void kvq_launch_unpack_coords(const kvq_coord_read_args & a, int n_streams, cudaStream_t stream) {
    kvq_launch_early(unpack_kernel, dim3(a.n_pages, n_streams), 256, 0, stream, a);
}

void kvq_launch_coord_logits(const kvq_coord_read_args & a, int n_streams, cudaStream_t stream) {
    (a.head_size == 128 ? launch_logits<128> : launch_logits<64>) (a, n_streams, stream);
}

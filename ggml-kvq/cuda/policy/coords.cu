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

constexpr int WARPS = 8, NEAR = 128; // positions of a table

// What a block has in shared memory: the basis of its head, cosines and sines of NEAR positions by pairs, steps,
// queries as they came and, of each warp, turned back to the page that it reads. Channels: the first ones of all pairs,
// then the second ones.
template <int D, int GROUPS> struct logits_memory {
    static constexpr int ROWS = KVQ_COORD_ROWS, PAIRS = D / 2, APART = D / 32; // tiles of 16 pairs
    static constexpr int Q_STEP = D + 8, NEAR_STEP = PAIRS + 4;                // both meet all banks
    uint4 basis[D / 16][GROUPS][32];
    float step[D];
    float2 came[ROWS][PAIRS];
    __half2 near[NEAR][NEAR_STEP];
    uint16_t queries[WARPS][ROWS][Q_STEP];

    static __device__ __forceinline__ int channel_of(const kvq_coord_read_args & a, int i) {
        return a.rotary.neox ? i : i < PAIRS ? 2 * i : 2 * (i - PAIRS) + 1;
    }
    // what no kernel before makes
    __device__ __forceinline__ void fill(const kvq_coord_read_args & a, int kvh) {
        const int n_groups = a.stride / 32;
        const uint4 * const from = (const uint4 *) a.weights + (size_t) (kvh * D / 16) * n_groups * 32;
        for (int i = threadIdx.x; i < D / 16 * GROUPS * 32; i += 32 * WARPS) {
            const int k = i / 32 % GROUPS, tile = i / 32 / GROUPS;
            basis[tile][k][i % 32] =
                k < n_groups ? __ldg(from + (tile * n_groups + k) * 32 + i % 32) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll 8
        for (int i = threadIdx.x; i < NEAR * PAIRS; i += 32 * WARPS) {
            near[i / PAIRS][i % PAIRS] = __ldg((const __half2 *) a.waves + i);
        }
        for (int i = threadIdx.x; i < D; i += 32 * WARPS) {
            step[i] = __ldg(a.basis.step + kvh * D + channel_of(a, i));
        }
        for (int i = threadIdx.x; i < WARPS * ROWS * Q_STEP; i += 32 * WARPS) { queries[0][0][i] = 0; }
    }
    __device__ __forceinline__ void take_queries(const kvq_coord_read_args & a, const float * all, int kvh) {
#pragma unroll 2
        for (int i = threadIdx.x; i < a.n_rows * PAIRS; i += 32 * WARPS) {
            const int r = i / PAIRS, j = i % PAIRS, token = a.n_q == 1 ? 0 : r / a.gqa,
                      head = kvh * a.gqa + (a.n_q == 1 ? r : r % a.gqa);
            const float * const q = all + token * a.q_stride_token + head * a.q_stride_head;
            came[r][j] =
                make_float2(a.scale * __ldg(q + channel_of(a, j)), a.scale * __ldg(q + channel_of(a, j + PAIRS)));
        }
    }
    // by a warp; back: by this position, below 0: as they came. The table has no magnitude, so this has it.
    __device__ __forceinline__ void turn_queries(const kvq_coord_read_args & a, int warp, int32_t back) {
        __syncwarp();
#pragma unroll
        for (int j0 = 0; j0 < PAIRS; j0 += 32) {
            const int j = j0 + threadIdx.x % 32;
            const float2 f = back < 0 ? make_float2(1.0f, 0.0f) : turn_factors(a.rotary, back, false, j);
            for (int r = 0; r < a.n_rows; r++) {
                const float2 q = came[r][j];
                const uint32_t half = pack_half2(q.x * f.x + q.y * f.y, q.y * f.x - q.x * f.y);
                queries[warp][r][j] = (uint16_t) half;
                queries[warp][r][PAIRS + j] = (uint16_t) (half >> 16);
            }
        }
        __syncwarp();
    }
    // Keys of 16 cells, over the scales of their coordinates: 16 pairs of channels, turned to these positions of the
    // thread's two cells. near_by: from `from` on. key: [first, second of pairs][8 channels][cell, channel]
    __device__ __forceinline__ void keys(const kvq_coord_read_args & a, const uint32_t (&x)[GROUPS][4],
        const int32_t (&pos)[2], int32_t from, bool near_by, int tile, float (&key)[2][2][4]) const {
        const int lane = threadIdx.x % 32, c = lane % 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int y[2][4] = {};
#pragma unroll
            for (int k = 0; k < GROUPS; k++) {
                const uint4 w = basis[tile + i * APART][k][lane];
                mma8(y[0], x[k], w.x, w.y);
                mma8(y[1], x[k], w.z, w.w);
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float2 by = *(const float2 *) &step[(tile + i * APART) * 16 + j * 8 + 2 * c];
#pragma unroll
                for (int e = 0; e < 4; e++) { key[i][j][e] = (e % 2 ? by.y : by.x) * (float) y[j][e]; }
            }
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int pair = tile * 16 + j * 8 + 2 * c + e % 2;
                const float2 f = near_by ? __half22float2(near[pos[e / 2] - from][pair])
                                         : turn_factors(a.rotary, pos[e / 2], false, pair);
                const float u = key[0][j][e], v = key[1][j][e];
                key[0][j][e] = u * f.x - v * f.y;
                key[1][j][e] = v * f.x + u * f.y;
            }
        }
    }
};

// A block: a KV head, a chunk of pages; a warp a page of it at a time, by 32 cells.
//   keys = coordinates (16 cells x 32) times the basis (32 x 8 channels)     bytes, sums are whole numbers
//   logits = keys, turned to their positions (16 cells x 16 channels), times queries (16 x 8 rows)     f16
// What the first product gives a thread is what the second one wants of it. q . R_p k = (R_-p0 q) . R_(p - p0) k: where
// all positions of a page lie within NEAR of a multiple of 64, cosines come from a table (waves) in shared memory.
template <int D, int GROUPS>
__global__ void __launch_bounds__(32 * WARPS, GROUPS > 3 ? 1 : 2)
    logits_kernel(const __grid_constant__ kvq_coord_read_args a) {
    using memory_of = logits_memory<D, GROUPS>;
    constexpr int APART = memory_of::APART;
    extern __shared__ __align__(16) uint8_t dynamic[];
    memory_of & memory = *(memory_of *) dynamic;
    early_start();
    const auto & st = a.stream[blockIdx.z];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4, kvh = blockIdx.y;
    const int n_groups = a.stride / 32;
    memory.fill(a, kvh);
    early_wait();
    memory.take_queries(a, st.q, kvh);
    __syncthreads();
    const int begin = (int) blockIdx.x * a.chunk, end = min(begin + a.chunk, a.n_pages);
    for (int at = begin * a.page_cells + 32 * warp; at < end * a.page_cells; at += 32 * WARPS) {
        const kvq_page & page = st.pages[at / a.page_cells];
        if (!page.k_params || !page.n_slots) { continue; }
        const int32_t here = __ldg(st.positions + at + lane); // -1: never written, and masked
        uint32_t x[2][GROUPS][4];
        float old[2][4], scale[2][2];
#pragma unroll
        for (int m = 0; m < 2; m++) { // all that comes from memory is under way before it is used
            const int8_t * const rows = st.x + (size_t) (at + 16 * m + g) * a.stride + 4 * c;
#pragma unroll
            for (int k = 0; k < GROUPS; k++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    x[m][k][i] = k < n_groups
                        ? __ldcg((const uint32_t *) (rows + (size_t) (i % 2 * 8) * a.stride + 32 * k + i / 2 * 16))
                        : 0;
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) { // cells g and g + 8, rows 2c and 2c + 1
                const int cell = at + 16 * m + g + i / 2 * 8;
                if (i % 2 == 0) { scale[m][i / 2] = __ldcg(st.s + cell); }
                const int row = min(2 * c + i % 2, a.n_rows - 1);
                old[m][i] = __ldcg(st.logits + ((size_t) kvh * a.n_rows + row) * a.n_logits + cell);
            }
        }
        int32_t first = here < 0 ? INT32_MAX : here, last = here;
#pragma unroll
        for (int d = 16; d; d /= 2) {
            first = min(first, __shfl_xor_sync(~0u, first, d));
            last = max(last, __shfl_xor_sync(~0u, last, d));
        }
        const int32_t from = first & ~63; // numbers of images are multiples of 64 apart (engine/rope.h)
        const bool near_by = first <= last && last - from < NEAR;
        memory.turn_queries(a, warp, near_by ? from : -1);
        int32_t pos[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            pos[i / 2][i % 2] = max(__shfl_sync(~0u, here, i / 2 * 16 + i % 2 * 8 + g), near_by ? from : 0);
        }
        float o[2][4] = {};
#pragma unroll 1
        for (int tile = 0; tile < APART; tile++) {
#pragma unroll
            for (int m = 0; m < 2; m++) {
                float key[2][2][4];
                memory.keys(a, x[m], pos[m], from, near_by, tile, key);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint32_t k[4] = { pack_half2(key[i][0][0], key[i][0][1]),
                        pack_half2(key[i][0][2], key[i][0][3]), pack_half2(key[i][1][0], key[i][1][1]),
                        pack_half2(key[i][1][2], key[i][1][3]) };
                    const uint16_t * const q = &memory.queries[warp][g][(tile + i * APART) * 16 + 2 * c];
                    mma(o[m], k, *(const uint32_t *) q, *(const uint32_t *) (q + 8));
                }
            }
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = 2 * c + i % 2, cell = at + 16 * m + g + i / 2 * 8;
                if (row < a.n_rows) {
                    st.logits[((size_t) kvh * a.n_rows + row) * a.n_logits + cell] =
                        old[m][i] + o[m][i] * scale[m][i / 2];
                }
            }
        }
    }
}

template <int D, int GROUPS> void launch_logits(const kvq_coord_read_args & a, int n_streams, cudaStream_t stream) {
    static kvq_shared_limit limit;
    constexpr size_t nb = sizeof(logits_memory<D, GROUPS>);
    limit.raise(logits_kernel<D, GROUPS>, nb);
    const dim3 grid((a.n_pages + a.chunk - 1) / a.chunk, a.n_head_kv, n_streams);
    kvq_launch_early(logits_kernel<D, GROUPS>, grid, 32 * WARPS, nb, stream, a);
}
template <int D> void launch_logits(const kvq_coord_read_args & a, int n_streams, cudaStream_t stream) {
    (a.stride <= 96 ? launch_logits<D, 3> : launch_logits<D, KVQ_COORD_GROUPS>) (a, n_streams, stream);
}

} // namespace

std::vector<uint8_t> kvq_order_basis(const kvq_basis & b, int head_size, bool apart) {
    const size_t n_groups = (size_t) (b.n + 31) / 32, n_tiles = (size_t) (b.width + 15) / 16;
    std::vector<uint8_t> out(n_groups * n_tiles * 512 + n_tiles * 16 * sizeof(float));
    uint8_t * to = out.data();
    for (size_t i = 0; i < n_tiles * n_groups; i++) {
        for (size_t word = 0; word < 128; word++) {
            const size_t lane = word / 4, w = word % 4, c = i / n_groups * 16 + w / 2 * 8 + lane / 4,
                         half = (size_t) head_size / 2, in_head = c % (size_t) head_size,
                         channel = !apart ? c : c - in_head + (in_head < half ? 2 * in_head : 2 * (in_head - half) + 1),
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
    (a.head_size == 128 ? launch_logits<128>(a, n_streams, stream) : launch_logits<64>(a, n_streams, stream));
}

// y = W x for many rows, W in 8 bits with one step an output: a product of integer matrices on tensor cores. Sums are
// exact, so the result has the bits of the C reference (types/predictor.h).
//
// A block has 32M rows x 32N outputs, a warp 16M x 16N: 128 x 128, or fewer where that leaves multiprocessors without
// work. m16n8k32: left operand = rows (ldmatrix), right operand = codes,
// which lie as a thread wants them (kvq_order_weights8): of 16 outputs x 32 inputs 16 bytes for each.
#include "predict.cuh"
#include "cuda/instructions.cuh"

#include <cstring>

namespace {

constexpr int WARPS = 4, GROUPS = 2, STAGES = 4; // GROUPS: of a stage
constexpr int X_STEP = GROUPS * 32 + 16;         // bytes of a row in a stage; the padding keeps reads off equal banks
static_assert(KVQ_PREDICT_TILE == 128, "the largest block");

template <int M, int N> struct shape {
    static constexpr int ROWS = 32 * M, OUT = 32 * N, CODES = OUT * GROUPS * 32, STAGE = CODES + ROWS * X_STEP;
};

__device__ __forceinline__ void mma8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_rows(uint32_t (&a)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
        : "r"(from)
        : "memory");
}

// EVEN: whole stages
template <int M, int N, bool EVEN>
__global__ void __launch_bounds__(32 * WARPS, M > 2 ? 2 : 4)
    predict8_kernel(const __grid_constant__ kvq_predict_args a) {
    using tile = shape<M, N>;
    constexpr int ROWS = tile::ROWS, OUT = tile::OUT, CODES = tile::CODES, STAGE = tile::STAGE;
    early_start();
    extern __shared__ __align__(16) uint8_t memory[];
    const uint32_t memory_at = (uint32_t) __cvta_generic_to_shared(memory);
    const int G = (a.n_in + 31) / 32, n_tiles = (a.n_out + 15) / 16, n_stages = (G + GROUPS - 1) / GROUPS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4, wo = warp % 2 * 16 * N,
              wr = warp / 2 * 16 * M;
    const int tile0 = blockIdx.x * (OUT / 16), row0 = blockIdx.y * ROWS;

    // A thread's pieces of a stage: of codes [tile][group] of 32, of rows 4 each. What lies beyond the ends repeats the
    // last tile and row; groups that are missing stay as they are.
    const uint8_t *codes[N], *rows[M];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int at = min(tile0 + 2 * i + warp / 2, n_tiles - 1);
        codes[i] = a.weights + ((size_t) at * G + warp % 2) * 512 + lane * 16;
    }
#pragma unroll
    for (int i = 0; i < M; i++) {
        const int row = min(row0 + 32 * i + (int) threadIdx.x / 4, a.n_rows - 1);
        rows[i] = (const uint8_t *) a.x + row * a.x_stride + threadIdx.x % 4 * 16;
    }
    const uint32_t codes_to = memory_at + threadIdx.x * 16,
                   rows_to = memory_at + CODES + threadIdx.x / 4 * X_STEP + threadIdx.x % 4 * 16;
    const auto copy_codes = [&](int k) {
        if (k < n_stages && (EVEN || k * GROUPS + warp % 2 < G)) {
#pragma unroll
            for (int i = 0; i < N; i++) { copy16(codes_to + k % STAGES * STAGE + i * 2048, codes[i] + k * 1024); }
        }
    };
    const auto copy_rows = [&](int k) {
        if (k < n_stages && (EVEN || k * GROUPS + (int) threadIdx.x % 4 / 2 < G)) {
#pragma unroll
            for (int i = 0; i < M; i++) { copy16(rows_to + k % STAGES * STAGE + i * 32 * X_STEP, rows[i] + k * 64); }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    int sum[M][2 * N][4] = {}; // [16 rows][8 outputs]
    for (int k = 0; k < STAGES - 1; k++) { copy_codes(k); }
    early_wait(); // for rows; codes stay as they are
    for (int k = 0; k < STAGES - 1; k++) { copy_rows(k); }
    for (int k = 0; k < n_stages; k++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads(); // the stage is here, and everybody is done with the one before, which is refilled
        const int at = k % STAGES * STAGE;
        uint32_t x[M][4];
        uint4 w[N];
        const auto load = [&](int j) {
#pragma unroll
            for (int m = 0; m < M; m++) {
                load_rows(x[m], memory_at + at + CODES + (wr + 16 * m + lane % 16) * X_STEP + j * 32 + lane / 16 * 16);
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                w[n] = *(const uint4 *) (memory + at + ((wo / 16 + n) * GROUPS + j) * 512 + lane * 16);
            }
        };
        load(0);
        copy_codes(k + STAGES - 1); // while they come
        copy_rows(k + STAGES - 1);
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            if (j) {
                if (!EVEN && k * GROUPS + j >= G) { break; }
                load(j);
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int m = 0; m < M; m++) {
                    mma8(sum[m][2 * n], x[m], w[n].x, w[n].y);
                    mma8(sum[m][2 * n + 1], x[m], w[n].z, w[n].w);
                }
            }
        }
    }
    const float * steps = (const float *) (a.weights + (size_t) n_tiles * G * 512);
    float2 step[2 * N];
    float scale[M][2];
#pragma unroll
    for (int n = 0; n < 2 * N; n++) {
        step[n] = __ldg((const float2 *) (steps + min(tile0 * 16 + wo + 8 * n + 2 * c, n_tiles * 16 - 2)));
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int e = 0; e < 2; e++) { scale[m][e] = __ldg(a.s + min(row0 + wr + 16 * m + 8 * e + g, a.n_rows - 1)); }
    }
    const bool pairs = a.out_stride % 2 == 0;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = row0 + wr + 16 * m + 8 * e + g;
            float * const to_row = a.out + row * a.out_stride;
#pragma unroll
            for (int n = 0; n < 2 * N; n++) {
                const int out = tile0 * 16 + wo + 8 * n + 2 * c;
                if (row >= a.n_rows || out >= a.n_out) { continue; }
                float * const to = to_row + out;
                float2 y = make_float2(__fmul_rn(__fmul_rn(step[n].x, (float) sum[m][n][2 * e]), scale[m][e]),
                    __fmul_rn(__fmul_rn(step[n].y, (float) sum[m][n][2 * e + 1]), scale[m][e]));
                if (pairs && out + 1 < a.n_out) {
                    if (a.add) {
                        const float2 z = *(const float2 *) to;
                        y = make_float2(__fadd_rn(z.x, y.x), __fadd_rn(z.y, y.y));
                    }
                    *(float2 *) to = y;
                } else {
                    to[0] = a.add ? __fadd_rn(to[0], y.x) : y.x;
                    if (out + 1 < a.n_out) { to[1] = a.add ? __fadd_rn(to[1], y.y) : y.y; }
                }
            }
        }
    }
}

template <int M, int N> void launch(const kvq_predict_args & a, cudaStream_t stream) {
    using tile = shape<M, N>;
    static kvq_shared_limit limit[2];
    const bool even = a.n_in % (32 * GROUPS) == 0;
    const auto kernel = even ? predict8_kernel<M, N, true> : predict8_kernel<M, N, false>;
    limit[even].raise(kernel, STAGES * tile::STAGE);
    const dim3 grid((a.n_out + tile::OUT - 1) / tile::OUT, (a.n_rows + tile::ROWS - 1) / tile::ROWS);
    kvq_launch_early(kernel, grid, 32 * WARPS, STAGES * tile::STAGE, stream, a);
}

} // namespace

// Thread 4g + c has, of 8 outputs and then of the next 8, inputs 4c + {0..3} and 16 + 4c + {0..3} of output g.
std::vector<uint8_t> kvq_order_weights8(const kvq_predictor & p) {
    std::vector<uint8_t> out(kvq_predictor_bytes(p.n_in, p.n_out, 8));
    const size_t n_groups = (size_t) p.n_tiles() * p.n_groups();
    for (size_t i = 0; i < n_groups; i++) {
        const uint8_t * from = p.data + i * 512;
        uint8_t * to = out.data() + i * 512;
        for (int lane = 0; lane < 32; lane++) {
            for (int w = 0; w < 4; w++) {
                const int output = w / 2 * 8 + lane / 4, chunk = w % 2 * 4 + lane % 4;
                for (int k = 0; k < 4; k++) { *to++ = (uint8_t) (from[chunk * 64 + output * 4 + k] - p.offset()); }
            }
        }
    }
    memcpy(out.data() + p.nb_codes(), p.steps8(), out.size() - p.nb_codes());
    return out;
}

void kvq_launch_predict8(const kvq_predict_args & a, int n_sm, cudaStream_t stream) {
    const auto blocks = [&](int tile) { return ((a.n_out + tile - 1) / tile) * ((a.n_rows + tile - 1) / tile); };
    if (blocks(128) >= n_sm) {
        launch<4, 4>(a, stream);
    } else if (blocks(64) >= n_sm) {
        launch<2, 2>(a, stream);
    } else {
        launch<1, 1>(a, stream);
    }
}

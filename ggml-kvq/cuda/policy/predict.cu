// y = W x for many rows, W in 4 bits, on tensor cores. Products of a group of 32 inputs are exact integers; their sum
// over groups runs in f32 in order and every operation rounds, so the result has the bits of the C reference.
//
// A block has 128 outputs x 128 rows, a warp 32 x 64. m16n8k32: left operand = codes (16 outputs x 32 inputs, which
// is how they are packed), right operand = rows. The integer accumulator starts at the bits of 1.5 * 2^23, so that
// its bits are those of a float that is the dot product above it: |dot| <= 32*127*8 < 2^22.
#include "predict.cuh"
#include "cuda/instructions.cuh"

constexpr int OUT = 128, ROWS = 128, WARPS = 8, GROUPS = 2, STAGES = 3; // GROUPS: of a stage
// bytes of a row in a stage; the padding keeps reads off equal banks
constexpr int X_STEP = GROUPS * 32 + 16;

struct stage {
    static constexpr int GROUP = 256; // bytes of 16 outputs
    static constexpr int CODES = OUT / 16 * GROUPS * GROUP, STEPS = OUT * GROUPS * 2,
                         BYTES = CODES + STEPS + ROWS * X_STEP;
};

static __device__ __forceinline__ void mma8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    constexpr int base = 0x4b400000;
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(base));
}

// codes less their offset: 0..15 - 8
static __device__ __forceinline__ uint32_t centred(uint32_t codes) {
    return ((codes | 0x80808080u) - 0x08080808u) ^ 0x80808080u;
}

static __global__ void __launch_bounds__(32 * WARPS, 2) predict4_kernel(const __grid_constant__ kvq_predict_args a) {
    early_start();
    early_wait();
    extern __shared__ __align__(16) uint8_t memory[];
    const uint32_t memory_at = (uint32_t) __cvta_generic_to_shared(memory);
    const int G = (a.n_in + 31) / 32, n_tiles = (a.n_out + 15) / 16, n_stages = (G + GROUPS - 1) / GROUPS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4, wo = warp % 4 * 32,
              wr = warp / 4 * 64;
    const int tile0 = blockIdx.x * (OUT / 16), row0 = blockIdx.y * ROWS;
    const uint8_t * steps = a.weights + (size_t) n_tiles * G * stage::GROUP;

    const auto copy = [&](int k) { // stage k; what lies beyond the ends repeats the last
        if (k < n_stages) {
            const uint32_t to = memory_at + k % STAGES * stage::BYTES;
            constexpr int PIECES = stage::GROUP / 16;
            for (int i = threadIdx.x; i < OUT / 16 * GROUPS * PIECES; i += 32 * WARPS) {
                const int piece = i % PIECES, group = min(k * GROUPS + i / PIECES % GROUPS, G - 1),
                          tile = min(tile0 + i / PIECES / GROUPS, n_tiles - 1);
                copy16(to + i * 16, a.weights + ((size_t) tile * G + group) * stage::GROUP + piece * 16);
            }
            if (threadIdx.x < OUT / 16 * GROUPS * 2) { // 8 steps
                const int i = threadIdx.x, group = min(k * GROUPS + i / 2 % GROUPS, G - 1),
                          tile = min(tile0 + i / 2 / GROUPS, n_tiles - 1);
                copy16(to + stage::CODES + i * 16, steps + ((size_t) tile * G + group) * 32 + i % 2 * 16);
            }
            for (int i = threadIdx.x; i < ROWS * GROUPS * 2; i += 32 * WARPS) {
                const int piece = i % (GROUPS * 2), row = i / (GROUPS * 2), group = min(k * GROUPS + piece / 2, G - 1);
                copy16(to + stage::CODES + stage::STEPS + row * X_STEP + piece * 16,
                    a.x + min(row0 + row, a.n_rows - 1) * a.x_stride + group * 32 + piece % 2 * 16);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float sum[2][8][4] = {};
    for (int k = 0; k < STAGES - 1; k++) { copy(k); }
    for (int k = 0; k < n_stages; k++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads(); // the stage is here, and everybody is done with the one before, which is refilled
        copy(k + STAGES - 1);
        const uint8_t * at = memory + k % STAGES * stage::BYTES;
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            if (k * GROUPS + j >= G) { break; }
            uint32_t w[2][4];
            float step[2][2];
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const int tile = wo / 16 + m;
                const uint8_t * codes = at + (tile * GROUPS + j) * stage::GROUP;
                const __half * s = (const __half *) (at + stage::CODES) + (tile * GROUPS + j) * 16;
                step[m][0] = __half2float(s[g]);
                step[m][1] = __half2float(s[g + 8]);
#pragma unroll
                for (int i = 0; i < 4; i++) { // a word has the inputs of two threads
                    const uint32_t x = *(const uint32_t *) (codes + (c / 2 + i / 2 * 2) * 64 + (g + 8 * (i % 2)) * 4);
                    w[m][i] = centred(x >> 4 * (c % 2) & 0x0f0f0f0fu);
                }
            }
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const uint8_t * x = at + stage::CODES + stage::STEPS + (wr + 8 * n + g) * X_STEP + j * 32 + c * 4;
                const uint32_t b0 = *(const uint32_t *) x, b1 = *(const uint32_t *) (x + 16);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    int dot[4];
                    mma8(dot, w[m], b0, b1);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float d = __fadd_rn(__int_as_float(dot[e]), -12582912.0f);
                        sum[m][n][e] = __fadd_rn(sum[m][n][e], __fmul_rn(step[m][e / 2], d));
                    }
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) { // row 8n + 2c + e
            const int row = row0 + wr + 8 * n + 2 * c + e;
            if (row >= a.n_rows) { continue; }
            const float s = a.s[row];
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    const int out = (tile0 + wo / 16 + m) * 16 + g + 8 * b;
                    if (out < a.n_out) {
                        float * to = a.out + row * a.out_stride + out;
                        const float y = __fmul_rn(sum[m][n][2 * b + e], s);
                        *to = a.add ? __fadd_rn(*to, y) : y;
                    }
                }
            }
        }
    }
}

void kvq_launch_predict4(const kvq_predict_args & a, cudaStream_t stream) {
    constexpr int nb = STAGES * stage::BYTES;
    static kvq_shared_limit limit;
    limit.raise(predict4_kernel, nb);
    const dim3 grid((a.n_out + OUT - 1) / OUT, (a.n_rows + ROWS - 1) / ROWS);
    kvq_launch_early(predict4_kernel, grid, 32 * WARPS, nb, stream, a);
}

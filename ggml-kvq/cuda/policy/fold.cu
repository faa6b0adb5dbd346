// Sums of rows in 8 bits under attention's probabilities, and W_v times them (fold.cuh).
//
// z = P X on tensor cores: m16n8k16, left operand = probabilities times the rows' scales (query rows x cells), right
// operand = rows (cells x channels), whose bytes become f16 on the way: a thread (g = lane/4, c = lane%4) reads 16
// channels, from 16g on, of cells 2c, 2c+1, 2c+8, 2c+9. Column g of product j is channel 16g + j.
#include "fold.cuh"
#include "cuda/instructions.cuh"

namespace {

constexpr int WARPS = 8, CELL_GROUPS = 4; // a block: 4 warps along cells, 2 of 128 channels each
constexpr int APPLY_WARPS = 16;
constexpr int STEP = FOLD_CHANNELS + 8; // of a row of sums in shared memory: stores meet all banks
constexpr float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ void load_matrix(uint32_t (&a)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
        : "r"(from)
        : "memory");
}

// Bytes j of u and v, signed, as a pair of f16: 0x6400 + (byte + 128) is 1152 + byte
__device__ __forceinline__ void widen(uint32_t u, uint32_t v, uint32_t (&pair)[4]) {
    u ^= 0x80808080u;
    v ^= 0x80808080u;
    const uint32_t low = __byte_perm(u, v, 0x5140), high = __byte_perm(u, v, 0x7362);
    const __half2 offset = __half2half2(__ushort_as_half(0x6480));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t x = __byte_perm(i < 2 ? low : high, 0x64646464u, i % 2 ? 0x4342 : 0x4140);
        const __half2 y = __hsub2(*(const __half2 *) &x, offset);
        pair[i] = *(const uint32_t *) &y;
    }
}

constexpr int P_STEP = FOLD_CELLS + 8; // f16 of a query row; ldmatrix meets all banks
union portion {
    float sums[FOLD_ROWS][STEP];
    uint16_t p[FOLD_ROWS][P_STEP];
};

// A block: FOLD_ROWS query rows, a chunk of cells, FOLD_CHANNELS channels of one input. Probabilities of FOLD_CELLS
// cells at a time lie in shared memory, rows come while they are made.
__global__ void __launch_bounds__(32 * WARPS, 1) sum_kernel(const __grid_constant__ kvq_fold_args a) {
    constexpr int STEPS = FOLD_CELLS / CELL_GROUPS / 16, AT_ONCE = 2; // steps of a warp, of 16 cells; rows on their way
    extern __shared__ __align__(16) uint8_t dynamic[];
    portion & memory = *(portion *) dynamic;
    __shared__ float tops[WARPS];
    __shared__ bool is_here[FOLD_CELLS / 16]; // are values of these cells sealed?
    early_start();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4, part = warp / 2;
    const int n_slices = (a.stride + FOLD_CHANNELS - 1) / FOLD_CHANNELS, input = blockIdx.y / n_slices,
              first = blockIdx.y % n_slices * FOLD_CHANNELS, channel = first + warp % 2 * 128 + 16 * g;
    const int n_id_blocks = (a.n_ids + FOLD_ROWS - 1) / FOLD_ROWS, id0 = blockIdx.z % n_id_blocks * FOLD_ROWS;
    const auto & st = a.stream[blockIdx.z / n_id_blocks];
    const int8_t * const x = st.x[input];
    const float * const scales = st.s[input];
    const int begin = blockIdx.x * a.chunk, end = min(begin + a.chunk, a.n_cells);
    uint4 rows[AT_ONCE][4];
    const auto ask = [&](uint4(&to)[4], int t) { // 16 cells from t on
#pragma unroll
        for (int i = 0; i < 4; i++) {
            to[i] = make_uint4(0, 0, 0, 0);
            if (channel < a.stride && t < end) {
                to[i] = __ldg((const uint4 *) (x + (size_t) (t + 2 * c + i % 2 + i / 2 * 8) * a.stride + channel));
            }
        }
    };
    const auto start = [&](int cells0) { // the first rows of a portion, and which of its values are sealed
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) { ask(rows[i], cells0 + 16 * (part + CELL_GROUPS * i)); }
        for (int i = threadIdx.x; i < a.at_once / 16; i += 32 * WARPS) {
            const kvq_page & page = st.pages[min(cells0 + 16 * i, end - 1) / a.page_cells];
            is_here[i] = cells0 + 16 * i < end && page.n_slots && page.v_params;
        }
    };
    if (a.fresh) { early_wait(); }
    start(begin);
    if (!a.fresh) { early_wait(); }          // then rows are older than the kernel before this one, logits are not
    const float * logits[FOLD_ROWS / WARPS]; // of rows warp, warp + WARPS, ..
    float less[FOLD_ROWS / WARPS], all[FOLD_ROWS / WARPS] = {};
#pragma unroll
    for (int i = 0; i < FOLD_ROWS / WARPS; i++) {
        const int id = min(id0 + warp + i * WARPS, a.n_ids - 1), kvh = id / a.n_rows, r = id % a.n_rows;
        const int token = a.n_q == 1 ? 0 : r / a.gqa, head = kvh * a.gqa + (a.n_q == 1 ? r : r % a.gqa);
        less[i] = __ldg(st.lse + (size_t) token * a.n_head + head);
        logits[i] = st.logits + (size_t) id * a.n_logits;
    }
    // probabilities go up by a power of two, so that no probability that counts is too small for f16: scales are below
    // 2^up
    float top = 0.0f;
    for (int t = begin + 4 * (int) threadIdx.x; t < end; t += 128 * WARPS) {
        const float4 s = __ldg((const float4 *) (scales + t));
        top = fmaxf(top, fmaxf(fmaxf(s.x, s.y), fmaxf(s.z, s.w)));
    }
#pragma unroll
    for (int d = 16; d; d /= 2) { top = fmaxf(top, __shfl_xor_sync(~0u, top, d)); }
    if (lane == 0) { tops[warp] = top; }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; i++) { top = fmaxf(top, tops[i]); }
    const int up = top > 0.0f ? ilogbf(top) + 1 : 0;
#pragma unroll
    for (int i = 0; i < FOLD_ROWS / WARPS; i++) {
        less[i] = less[i] == -INFINITY ? INFINITY : less[i] * LOG2E - (float) (14 - up);
    }
    float o[2][16][4] = {};
    for (int cells0 = begin; cells0 < end; cells0 += a.at_once) {
        const int t0 = cells0 + 16 * part; // of this warp: from here on, 16 of 16 * CELL_GROUPS
#pragma unroll 2
        for (int at = 4 * lane; at < a.at_once; at += 128) {
            const int t = cells0 + at;
            const bool here = is_here[at / 16];
            const float4 s = here ? __ldg((const float4 *) (scales + t)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            float4 l[FOLD_ROWS / WARPS];
#pragma unroll
            for (int i = 0; i < FOLD_ROWS / WARPS; i++) {
                l[i] = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
                if (here) { l[i] = __ldcg((const float4 *) (logits[i] + t)); }
            }
#pragma unroll
            for (int i = 0; i < FOLD_ROWS / WARPS; i++) {
                const float4 p = make_float4(exp2_fast(l[i].x - less[i]), exp2_fast(l[i].y - less[i]),
                    exp2_fast(l[i].z - less[i]), exp2_fast(l[i].w - less[i]));
                all[i] += (p.x + p.y) + (p.z + p.w);
                *(uint2 *) &memory.p[warp + i * WARPS][at] =
                    make_uint2(pack_half2(p.x * s.x, p.y * s.y), pack_half2(p.z * s.z, p.w * s.w));
            }
        }
        __syncthreads();
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int at = 16 * (CELL_GROUPS * step + part);
            if (at >= a.at_once || cells0 + at >= end) { break; }
            uint32_t p[2][4];
#pragma unroll
            for (int m = 0; m < 2; m++) {
                load_matrix(
                    p[m], (uint32_t) __cvta_generic_to_shared(&memory.p[16 * m + lane % 16][at + lane / 16 * 8]));
            }
            uint4(&now)[4] = rows[step % AT_ONCE];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t b0[4], b1[4];
                const auto word = [&](int i) {
                    return j == 0 ? now[i].x : j == 1 ? now[i].y : j == 2 ? now[i].z : now[i].w;
                };
                widen(word(0), word(1), b0);
                widen(word(2), word(3), b1);
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    mma(o[0][4 * j + k], p[0], b0[k], b1[k]);
                    mma(o[1][4 * j + k], p[1], b0[k], b1[k]);
                }
            }
            if (step + AT_ONCE < STEPS) { ask(now, t0 + 16 * CELL_GROUPS * (step + AT_ONCE)); }
        }
        __syncthreads();
        if (cells0 + a.at_once < end) {
            start(cells0 + a.at_once);
            __syncthreads();
        }
    }
    // warps along the cells, one after the other
    for (int turn = 0; turn < CELL_GROUPS; turn++) {
        if (part == turn) {
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int j = 0; j < 16; j++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float2 * const at = (float2 *) &memory.sums[16 * m + 8 * e + g][warp % 2 * 128 + 8 * j + 2 * c];
                        const float2 y = turn ? *at : make_float2(0.0f, 0.0f);
                        *at = make_float2(y.x + o[m][j][2 * e], y.y + o[m][j][2 * e + 1]);
                    }
                }
            }
        }
        __syncthreads();
    }
    const float back = exp2f((float) (up - 14));
#pragma unroll
    for (int i = 0; i < FOLD_ROWS / WARPS; i++) {
#pragma unroll
        for (int d = 16; d; d /= 2) { all[i] += __shfl_xor_sync(~0u, all[i], d); }
        const int id = id0 + warp + i * WARPS;
        if (blockIdx.y == 0 && lane == 0 && id < a.n_ids) {
            st.sealed[(size_t) blockIdx.x * a.n_ids + id] = all[i] * back;
        }
    }
#pragma unroll 1
    for (int row = warp; row < FOLD_ROWS && id0 + row < a.n_ids; row += WARPS) {
        float * const to =
            st.partial + ((size_t) blockIdx.x * a.n_ids + id0 + row) * a.n_in * a.stride + input * a.stride;
#pragma unroll
        for (int at = 4 * lane; at < FOLD_CHANNELS; at += 128) {
            float y[4];
#pragma unroll
            for (int i = 0; i < 4; i++) { // channel 16g + j is column g of product j
                y[i] = memory.sums[row][at / 128 * 128 + (at + i) % 16 * 8 + at % 128 / 16] * back;
            }
            if (first + at < a.stride) { *(float4 *) (to + first + at) = make_float4(y[0], y[1], y[2], y[3]); }
        }
    }
}

// A block: ADD_AT_ONCE quads of sums, whose chunks its warps share.
constexpr int ADD_WARPS = 8, ADD_AT_ONCE = 32;
__global__ void __launch_bounds__(32 * ADD_WARPS) add_kernel(const __grid_constant__ kvq_fold_args a) {
    __shared__ float4 sums[ADD_WARPS][ADD_AT_ONCE];
    early_start();
    early_wait();
    const auto & st = a.stream[blockIdx.y];
    const int n = a.n_ids * a.n_in * a.stride / 4, lane = threadIdx.x % 32, warp = threadIdx.x / 32,
              i = blockIdx.x * ADD_AT_ONCE + lane;
    float4 z = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto add = [&](const float4 & x) { z = make_float4(z.x + x.x, z.y + x.y, z.z + x.z, z.w + x.w); };
#pragma unroll 4
    for (int k = warp; i < n && k < a.n_chunks; k += ADD_WARPS) {
        add(__ldcg((const float4 *) st.partial + (size_t) k * n + i));
    }
    sums[warp][lane] = z;
    __syncthreads();
    if (warp || i >= n) { return; }
#pragma unroll
    for (int k = 1; k < ADD_WARPS; k++) { add(sums[k][lane]); }
    ((float4 *) st.z)[i] = z;
}

// A block: 16 outputs for the query rows of their KV head; warps share the inputs.
__global__ void __launch_bounds__(32 * APPLY_WARPS) apply_kernel(const __grid_constant__ kvq_fold_args a) {
    constexpr int AT_ONCE = 4; // rows
    early_start();
    for (int i = threadIdx.x / 32; i < a.n_in * a.n_groups; i += APPLY_WARPS) { // weights do not wait for anybody
        const uint8_t * const w = a.weights[i / a.n_groups] + ((size_t) blockIdx.x * a.n_groups + i % a.n_groups) * 512;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(w + threadIdx.x % 32 * 16));
    }
    early_wait();
    __shared__ float sums[APPLY_WARPS][AT_ONCE][16], sealed[AT_ONCE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4, tile = blockIdx.x,
              kvh = tile * 16 / a.size_v;
    const auto & st = a.stream[blockIdx.y];
    for (int row0 = 0; row0 < a.n_rows; row0 += AT_ONCE) {
        float y[AT_ONCE][2] = {};
#pragma unroll
        for (int input = 0; input < 2; input++) {
            if (input == a.n_in) { break; }
            const float * const steps = (const float *) (a.weights[input] + (size_t) a.n_tiles * a.n_groups * 512);
            const float step[2] = { __ldg(steps + tile * 16 + g), __ldg(steps + tile * 16 + 8 + g) };
            float sum[AT_ONCE][2] = {};
#pragma unroll 2
            for (int group = warp; group < a.n_groups; group += APPLY_WARPS) {
                const uint4 w =
                    __ldg((const uint4 *) (a.weights[input] + ((size_t) tile * a.n_groups + group) * 512 + lane * 16));
                const uint32_t words[2][2] = { { w.x, w.y }, { w.z, w.w } };
#pragma unroll
                for (int r = 0; r < AT_ONCE; r++) {
                    const int id = kvh * a.n_rows + min(row0 + r, a.n_rows - 1);
                    const float * const z =
                        st.z + (size_t) id * a.n_in * a.stride + input * a.stride + group * 32 + 4 * c;
#pragma unroll
                    for (int h = 0; h < 2; h++) { // inputs 4c and 16 + 4c
                        const float4 v = __ldcg((const float4 *) (z + 16 * h));
#pragma unroll
                        for (int b = 0; b < 2; b++) {
                            const char4 k = *(const char4 *) &words[b][h];
                            sum[r][b] = fmaf((float) k.x, v.x, sum[r][b]);
                            sum[r][b] = fmaf((float) k.y, v.y, sum[r][b]);
                            sum[r][b] = fmaf((float) k.z, v.z, sum[r][b]);
                            sum[r][b] = fmaf((float) k.w, v.w, sum[r][b]);
                        }
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < AT_ONCE; r++) {
                y[r][0] = fmaf(step[0], sum[r][0], y[r][0]);
                y[r][1] = fmaf(step[1], sum[r][1], y[r][1]);
            }
        }
        __syncthreads();
        if (warp < AT_ONCE) {
            float p = 0.0f;
            for (int i = lane; i < a.n_chunks; i += 32) {
                p += __ldcg(st.sealed + (size_t) i * a.n_ids + kvh * a.n_rows + min(row0 + warp, a.n_rows - 1));
            }
#pragma unroll
            for (int d = 16; d; d /= 2) { p += __shfl_xor_sync(~0u, p, d); }
            if (lane == 0) { sealed[warp] = p; }
        }
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) {
#pragma unroll
            for (int b = 0; b < 2; b++) {
                y[r][b] += __shfl_xor_sync(~0u, y[r][b], 1);
                y[r][b] += __shfl_xor_sync(~0u, y[r][b], 2);
                if (c == 0) { sums[warp][r][8 * b + g] = y[r][b]; }
            }
        }
        __syncthreads();
        const int r = threadIdx.x / 16, out = threadIdx.x % 16, row = row0 + r;
        if (r < AT_ONCE && row < a.n_rows) {
            float x = sealed[r] * __ldg(a.mean + tile * 16 + out);
#pragma unroll
            for (int i = 0; i < APPLY_WARPS; i++) { x += sums[i][r][out]; }
            const int token = a.n_q == 1 ? 0 : row / a.gqa, head = kvh * a.gqa + (a.n_q == 1 ? row : row % a.gqa);
            st.dst[token * a.dst_stride_token + head * a.dst_stride_head + tile * 16 % a.size_v + out] += x;
        }
    }
}

} // namespace

void kvq_launch_fold(const kvq_fold_args & a, int n_streams, cudaStream_t stream) {
    const int n_slices = (a.stride + FOLD_CHANNELS - 1) / FOLD_CHANNELS,
              n_id_blocks = (a.n_ids + FOLD_ROWS - 1) / FOLD_ROWS;
    kvq_launch_early(sum_kernel, dim3(a.n_chunks, a.n_in * n_slices, n_streams * n_id_blocks), 32 * WARPS,
        sizeof(portion), stream, a);
    kvq_launch_early(add_kernel, dim3((a.n_ids * a.n_in * a.stride / 4 + ADD_AT_ONCE - 1) / ADD_AT_ONCE, n_streams),
        32 * ADD_WARPS, 0, stream, a);
    kvq_launch_early(apply_kernel, dim3(a.n_tiles, n_streams), 32 * APPLY_WARPS, 0, stream, a);
}

// Pages of one width, and the merge of splits (attend_tiles.cuh).
#include "attend_tiles.cuh"

// log-sum-exp merge of the splits of a row: warps share the splits, a lane has 4 channels of every 128
constexpr int MAX_SPLITS = 1024;

template <int MERGE_WARPS>
static __global__ void __launch_bounds__(32 * MERGE_WARPS) merge_kernel(const kvq_attend_args a) {
    const int row = blockIdx.x, kvh = blockIdx.y, is = blockIdx.z, D = a.v.head_size, size = D + 4;
    const float * p = a.partial + partial_at(a, is, kvh, row, 0);
    const int h = row_head(a, kvh, row);
    __shared__ float s_weight[MAX_SPLITS], s_top[MERGE_WARPS], s_sum[MERGE_WARPS];
    __shared__ float4 s_o[MERGE_WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float top = a.sinks ? a.sinks[h] : -INFINITY;
    for (int i = threadIdx.x; i < a.n_splits; i += blockDim.x) {
        s_weight[i] = p[(size_t) i * size + D];
        top = fmaxf(top, s_weight[i]);
    }
    for (int d = 16; d; d /= 2) { top = fmaxf(top, __shfl_xor_sync(~0u, top, d)); }
    if (lane == 0) { s_top[warp] = top; }
    __syncthreads();
    for (int i = 0; i < MERGE_WARPS; i++) { top = fmaxf(top, s_top[i]); }
    float sum = 0.0f;
    for (int i = threadIdx.x; i < a.n_splits; i += blockDim.x) {
        s_weight[i] = s_weight[i] == -INFINITY ? 0.0f : __expf(s_weight[i] - top);
        sum += s_weight[i] * p[(size_t) i * size + D + 1];
    }
    for (int d = 16; d; d /= 2) { sum += __shfl_xor_sync(~0u, sum, d); }
    if (lane == 0) { s_sum[warp] = sum; }
    __syncthreads();
    sum = a.sinks ? __expf(a.sinks[h] - top) : 0.0f;
    for (int i = 0; i < MERGE_WARPS; i++) { sum += s_sum[i]; }
    const float inv = sum > 0.0f ? 1.0f / sum : 0.0f;
    if (a.stream[is].lse && threadIdx.x == 0) {
        a.stream[is].lse[(size_t) row_token(a, row) * a.n_head + h] = top + logf(sum);
    }
    float * out = a.stream[is].dst + row_token(a, row) * a.dst_stride_token + h * a.dst_stride_head;
    for (int d0 = 0; d0 < D; d0 += 128) {
        const int d = d0 + 4 * lane;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (d < D) {
#pragma unroll 4
            for (int i = warp; i < a.n_splits; i += MERGE_WARPS) {
                const float f = s_weight[i];
                const float4 y = *(const float4 *) (p + (size_t) i * size + d);
                x.x += f * y.x;
                x.y += f * y.y;
                x.z += f * y.z;
                x.w += f * y.w;
            }
        }
        s_o[warp][lane] = x;
        __syncthreads();
        if (warp == 0 && d < D) {
            for (int i = 1; i < MERGE_WARPS; i++) {
                const float4 y = s_o[i][lane];
                x.x += y.x;
                x.y += y.y;
                x.z += y.z;
                x.w += y.w;
            }
            out[d] = x.x * inv;
            out[d + 1] = x.y * inv;
            out[d + 2] = x.z * inv;
            out[d + 3] = x.w * inv;
        }
        __syncthreads();
    }
}

void kvq_launch_merge(const kvq_attend_args & a, int n_streams, cudaStream_t stream) {
    const dim3 grid(a.n_rows, a.n_head_kv, n_streams);
    if (a.n_splits <= 4) {
        merge_kernel<1><<<grid, 32, 0, stream>>>(a);
    } else {
        merge_kernel<8><<<grid, 256, 0, stream>>>(a);
    }
}

int kvq_tiles_head_size(int k, int v) {
    const int d = k > v ? k : v;
    for (int x : { 64, 80, 96, 128, 192, 256, 512 }) {
        if (d <= x) { return x; }
    }
    return 0;
}

bool kvq_launch_tiles(const kvq_attend_args & a, int n_streams, int n_warps, cudaStream_t stream) {
    return launch_tiles_of<false>(a, n_streams, n_warps, stream);
}

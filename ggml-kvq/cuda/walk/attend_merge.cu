// Adds up the sums of a decode kernel's blocks (decode_merge.cuh). A block takes one row, and all partial results of
// the row are on their way at once. The alternative is that the last block to arrive adds up all rows of a KV head. It
// would read 270 KB through one multiprocessor at 64 bytes a clock (8 rows of 256 channels in 33 parts), and every
// block would first rotate its sums of lattice pages back.
#include "decode_merge.cuh"

namespace {

// The fields of kvq_attend_args that this kernel needs. Arguments come through the constant cache, which is cold, 64
// bytes at a time, so fewer of them arrive earlier.
struct kvq_merge_args {
    const float * partial;
    int n_splits, n_open, size, n_head_kv, n_rows, gqa, n_q, n_head, rotated; // rotated: sums are
    int64_t dst_stride_token, dst_stride_head;
    const float *sinks, *v_mean; // v_mean: what the sealed part of them lacks, else NULL
    int block;                   // of the Hadamard matrix
    float norm;
    struct {
        float *dst, *lse;
    } stream[KVQ_ATTEND_STREAMS];
};

// AT_ONCE: loads of a thread; KNOWN: factors of a warp, then factors of open parts. The code is short, because in a
// model it is cold in every layer.
constexpr int THREADS = 256, MOST_THREADS = 384, AT_ONCE = 9, KNOWN = 64;
static_assert(OPEN_PARTS <= AT_ONCE);

// A thread: 4 channels, of every parts-th block; the last threads: of all open parts, which are not rotated.
__global__ void __launch_bounds__(MOST_THREADS) decode_merge_kernel(const __grid_constant__ kvq_merge_args a) {
    early_start();
    __shared__ float factors[MOST_THREADS / 32][KNOWN + 32];
    __shared__ float4 sums[MOST_THREADS];
    const int row = blockIdx.x, kvh = blockIdx.y, is = blockIdx.z, size = a.size, step = size + 4, columns = size / 4,
              thread = threadIdx.x, lane = thread % 32, parts = THREADS / columns, part = thread / columns,
              channel = thread % columns * 4, each = min(KNOWN, AT_ONCE * parts), // blocks at once
        n = a.n_splits;
    const bool open = part == parts;
    const int token = a.n_q == 1 ? 0 : row / a.gqa, head = kvh * a.gqa + row - token * a.gqa;
    float * const factor = factors[thread / 32];
    const float * p = a.partial + (((size_t) is * a.n_head_kv + kvh) * a.n_rows + row) * (n + a.n_open) * step;
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float m = -INFINITY, l = 0.0f, sealed = 0.0f; // l, sealed: of this lane's blocks
    float4 mean = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (a.v_mean && part == 0) { mean = __ldg((const float4 *) (a.v_mean + kvh * size + channel)); }
    early_wait();
#pragma unroll 1
    for (int at = 0; at < n; at += each, p += each * step) {
        // blocks and, the first time, open parts; beyond them loads are of the last one, and factors 0
        const int here = min(n - at, each), n_open = at ? 0 : a.n_open, begin = open ? n - at : part,
                  by = open ? 1 : parts, end = open ? n - at + n_open : here;
        float4 mine[KNOWN / 32 + 1], y[AT_ONCE]; // m, l, sealed of blocks lane + 32k, of an open part; sums
#pragma unroll
        for (int k = 0; k <= KNOWN / 32; k++) {
            const int i = k < KNOWN / 32 ? min(lane + 32 * k, here - 1) : n - at + min(lane, n_open - 1);
            mine[k] = __ldcg((const float4 *) (p + i * step + size));
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            y[k] = __ldcg((const float4 *) (p + min(begin + k * by, end - 1) * step + channel));
        }
        if (lane >= n_open) { mine[KNOWN / 32].x = -INFINITY; }
        float top = m;
#pragma unroll
        for (int k = 0; k <= KNOWN / 32; k++) { top = fmaxf(top, mine[k].x); }
#pragma unroll
        for (int d = 16; d; d /= 2) { top = fmaxf(top, __shfl_xor_sync(~0u, top, d)); }
        const float least = top == -INFINITY ? 0.0f : top, old = exp2_fast(m - least);
        m = top;
        l *= old;
        sealed *= old;
        x = make_float4(x.x * old, x.y * old, x.z * old, x.w * old);
        __syncwarp(); // factors of the blocks before are read
#pragma unroll
        for (int k = 0; k <= KNOWN / 32; k++) {
            const float f = lane + 32 * k < here || k == KNOWN / 32 ? exp2_fast(mine[k].x - least) : 0.0f;
            l = fmaf(f, mine[k].y, l);
            sealed = fmaf(f, mine[k].z, sealed);
            factor[lane + 32 * k] = f;
        }
        __syncwarp();
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int i = begin + k * by;
            add(x, i < end ? factor[open ? KNOWN + k : i] : 0.0f, y[k]);
        }
    }
#pragma unroll
    for (int d = 16; d; d /= 2) {
        l += __shfl_xor_sync(~0u, l, d);
        sealed += __shfl_xor_sync(~0u, sealed, d);
    }
    sums[thread] = x;
    __syncthreads();
    for (int i = 1; i < parts && part == 0; i++) { add(x, 1.0f, sums[i * columns + thread]); }
    const float4 as_is = sums[parts * columns + min(thread, columns - 1)]; // read before a rotation takes its place
    if (a.rotated) { // the first threads have the row; a Hadamard matrix is a product over the bits of the channel
        float v[4] = { x.x, x.y, x.z, x.w };
        butterflies(v, [](int) { return true; });
#pragma unroll
        for (int h = 1; h <= 16; h *= 2) {
            if (4 * h < a.block) {
#pragma unroll
                for (int i = 0; i < 4; i++) { v[i] = across(v[i], h); }
            }
        }
#pragma unroll 1
        for (int h = 32; 4 * h < a.block; h *= 2) {
            __syncthreads();
            sums[thread] = make_float4(v[0], v[1], v[2], v[3]);
            __syncthreads();
            const float4 other = sums[thread ^ h];
            const float sign = thread & h ? -1.0f : 1.0f;
            v[0] = fmaf(sign, v[0], other.x);
            v[1] = fmaf(sign, v[1], other.y);
            v[2] = fmaf(sign, v[2], other.z);
            v[3] = fmaf(sign, v[3], other.w);
        }
        x = make_float4(v[0] * a.norm, v[1] * a.norm, v[2] * a.norm, v[3] * a.norm);
    }
    if (part) { return; }
    add(x, 1.0f, as_is);
    add(x, sealed, mean);
    put_row(a, is, token, head, channel, x, m, l);
}

} // namespace

void kvq_launch_decode_merge(const kvq_attend_args & a, bool rotated, int n_streams, cudaStream_t stream) {
    kvq_merge_args b = { a.partial, a.n_splits, a.n_open, a.v.head_size, a.n_head_kv, a.n_rows, a.gqa, a.n_q, a.n_head,
        rotated, a.dst_stride_token, a.dst_stride_head, a.sinks, rotated && a.waves ? a.v_mean : nullptr, a.v.block,
        a.v.norm, {} };
    for (int i = 0; i < n_streams; i++) { b.stream[i] = { a.stream[i].dst, a.stream[i].lse }; }
    const int columns = a.v.head_size / 4, n_threads = columns * (THREADS / columns + 1);
    kvq_launch_early(
        decode_merge_kernel, dim3(a.n_rows, a.n_head_kv, n_streams), (n_threads + 31) / 32 * 32, 0, stream, b);
}

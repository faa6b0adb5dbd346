#include "saliency.cuh"

#include "cuda/walk/attend.cuh"
#include "cuda/instructions.cuh"
#include "cuda/tile.cuh"

#include <algorithm>

constexpr int ROWS = 16, SUM_WARPS = 8; // rows of a product; warps of a block of sums
constexpr float LOG2_E = 1.44269504f;

static __device__ __forceinline__ int probe_token(const kvq_score_args & a, int row) {
    const int i = row / a.gqa;
    return a.table->all ? i : probe_tokens(a.table)[i];
}
static __device__ __forceinline__ float slope_of(const kvq_score_args & a, int h) {
    return a.max_bias <= 0.0f
        ? 1.0f
        : exp2f(h < a.n_head_log2 ? a.m0 * (float) (h + 1) : a.m1 * (float) (2 * (h - a.n_head_log2) + 1));
}

// Rows g and g + 8 of 16 as the left operand of m16n8k16.
template <int D> struct probe_rows {
    int token[2], head[2];
    bool there[2];
    float slope[2];
    uint32_t q[D / 16][4];

    // times: of scores, beside a.scale
    __device__ __forceinline__ void load(const kvq_score_args & a, int kvh, int row0, int n_rows, float times = 1.0f) {
        const int lane = threadIdx.x % 32, g = lane / 4, tig = lane % 4;
        const float scale = a.scale * times;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = min(row0 + g + 8 * i, n_rows - 1);
            there[i] = row0 + g + 8 * i < n_rows;
            token[i] = probe_token(a, row);
            head[i] = kvh * a.gqa + row % a.gqa;
            slope[i] = slope_of(a, head[i]);
        }
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float * p = a.q + token[j % 2] * a.q_stride_token + head[j % 2] * a.q_stride_head;
                const int c = 16 * k + 2 * tig + j / 2 * 8;
                // head sizes are even: so is where a row begins
                const float2 x = c < a.head_size ? *(const float2 *) (p + c) : make_float2(0.0f, 0.0f);
                q[k][j] = pack_half2(x.x * scale, x.y * scale);
            }
        }
    }
};

// Scores of 32 cells, K rows of D + 8 in shared memory, for M tiles of rows; s[tile][n][e]: row g + 8*(e/2), cell 8n +
// 2*(lane % 4) + e % 2
template <int D, int M>
static __device__ __forceinline__ void scores_of(const probe_rows<D> (&r)[M], uint32_t k_row, float (&s)[M][4][4]) {
#pragma unroll
    for (int i = 0; i < 16 * M; i++) { s[i / 16][i / 4 % 4][i % 4] = 0.0f; }
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
            uint32_t b[4];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                : "r"(k_row + 2 * (n * 8 * (D + 8) + 16 * k)));
#pragma unroll
            for (int t = 0; t < M; t++) {
                mma(s[t][n], r[t].q[k], b[0], b[1]);
                mma(s[t][n + 1], r[t].q[k], b[2], b[3]);
            }
        }
    }
}

static __device__ __forceinline__ float soften(const kvq_score_args & a, float x) {
    return a.softcap != 0.0f ? a.softcap * tanhf(x / a.softcap) : x;
}

// where this thread's row of ldmatrix begins
template <int D> static __device__ __forceinline__ uint32_t ldmatrix_row(const __half * tile) {
    const int lane = threadIdx.x % 32;
    return (uint32_t) __cvta_generic_to_shared(tile + (lane % 8 + lane / 16 * 8) * (D + 8) + lane / 8 % 2 * 8);
}

// ---------------------------------------------------------------- log-sum-exp
// Block: rows of one KV head, M * 16 a warp, and one split of the cells, so that all rows of a head read a key once.
// 32 cells of keys are on their way while those before are multiplied. Most rows see all of most cells: where the mask
// of a warp's rows is 0 over 32 cells, which one load a lane tells, a score needs no more than its exponential.

constexpr int LSE_WARPS = 8; // at most
template <int D> constexpr int tiles_a_warp = D <= 128 ? 2 : 1;

template <int D>
static __device__ __forceinline__ void ask_keys(const kvq_score_args & a, int kvh, int cell0, __half * to) {
    const size_t step = (size_t) a.n_head_kv * a.head_size;
    for (int i = threadIdx.x; i < TILE_CELLS * (D / 8); i += blockDim.x) {
        const int t = i / (D / 8), c = i % (D / 8) * 8;
        // behind the head: any, queries are 0 there
        const uint16_t * from =
            a.keys + (size_t) min(cell0 + t, a.n_kv - 1) * step + (size_t) kvh * a.head_size + min(c, a.head_size - 8);
        copy16((uint32_t) __cvta_generic_to_shared(to + t * (D + 8) + c), from);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// mask of cells `cell`, which is even, and the next; -inf behind the last cell
static __device__ __forceinline__ uint32_t pair_of(const kvq_score_args & a, const __half * row, int cell) {
    if (cell + 1 < a.n_kv && (!row || a.mask_align >= 2)) { return row ? __ldg((const uint32_t *) (row + cell)) : 0; }
    const auto of = [&](int c) { return c >= a.n_kv ? 0xfc00u : row ? (uint32_t) __half_as_ushort(row[c]) : 0u; };
    return of(cell) | of(cell + 1) << 16;
}

template <int D>
static __global__ void __launch_bounds__(32 * LSE_WARPS, D <= 256 ? 2 : 1)
    lse_kernel(const __grid_constant__ kvq_score_args a) {
    early_start();
    early_wait();
    constexpr int M = tiles_a_warp<D>, SIZE = TILE_CELLS * (D + 8); // SIZE: of a buffer
    extern __shared__ __align__(16) __half s_keys[];                // two buffers, then what warps see of each
    const int lane = threadIdx.x % 32, g = lane / 4, tig = lane % 4, kvh = blockIdx.y, split = blockIdx.z;
    const int n_rows = a.table->n_rows * a.gqa, block0 = (int) blockIdx.x * ROWS * M * (int) (blockDim.x / 32),
              row0 = block0 + (int) (threadIdx.x / 32) * ROWS * M;
    const int n_tiles = (a.n_kv + TILE_CELLS - 1) / TILE_CELLS;
    const int tile0 = (int) ((int64_t) n_tiles * split / a.n_splits),
              tile1 = (int) ((int64_t) n_tiles * (split + 1) / a.n_splits);
    if (block0 >= n_rows) { return; }
    probe_rows<D> r[M];
    float m[2 * M], l[2 * M];
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        if (i % 2 == 0) {
            r[i / 2].load(a, kvh, min(row0 + i / 2 * ROWS, n_rows - 1), n_rows, a.softcap == 0.0f ? LOG2_E : 1.0f);
        }
        m[i] = -INFINITY;
        l[i] = 0.0f;
    }
    // Masks of this warp's tokens, if there are up to 8, come with the keys: 16 bytes a lane and buffer.
    const int token0 = min(row0, n_rows - 1) / a.gqa, token1 = min(row0 + ROWS * M - 1, n_rows - 1) / a.gqa;
    const bool looks = a.mask && a.mask_align >= 8 && a.mask_stride_head == 0 && token1 - token0 < 8 && a.n_kv >= 8,
               may_skip = a.softcap == 0.0f && (!a.mask || looks);
    const __half * const look =
        looks ? a.mask + probe_token(a, min(token0 + lane / 4, token1) * a.gqa) * a.mask_stride_token : nullptr;
    __half * const seen = s_keys + 2 * SIZE + 8 * threadIdx.x; // of the second buffer: behind all of the first
    const auto ask = [&](int tile, int to) {
        if (looks) {
            copy16((uint32_t) __cvta_generic_to_shared(seen + to * 8 * blockDim.x),
                look + min(tile * TILE_CELLS + lane % 4 * 8, (a.n_kv - 8) & ~7));
        }
        ask_keys<D>(a, kvh, tile * TILE_CELLS, s_keys + to * SIZE);
    };
    const uint32_t k_row = ldmatrix_row<D>(s_keys);
    if (tile0 < tile1) { ask(tile0, 0); }
    for (int tile = tile0; tile < tile1; tile++) {
        const int now = (tile - tile0) & 1, cell0 = tile * TILE_CELLS;
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        bool plain = may_skip && cell0 + TILE_CELLS <= a.n_kv;
        if (looks) {
            const uint4 x = *(const uint4 *) (seen + now * 8 * blockDim.x);
            plain = plain && (x.x | x.y | x.z | x.w) == 0;
        }
        if (tile + 1 < tile1) { ask(tile + 1, now ^ 1); }
        float s[M][4][4];
        scores_of<D, M>(r, k_row + (uint32_t) now * 2 * SIZE, s);
        if (__any_sync(~0u, !plain)) {
#pragma unroll
            for (int i = 0; i < 2 * M; i++) { // looked up again: registers are for what most tiles need
                const int row = min(row0 + i / 2 * ROWS + g + 8 * (i % 2), n_rows - 1),
                          head = kvh * a.gqa + row % a.gqa;
                const float slope = slope_of(a, head) * LOG2_E;
                const __half * of =
                    a.mask ? a.mask + probe_token(a, row) * a.mask_stride_token + head * a.mask_stride_head : nullptr;
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const uint32_t pair = pair_of(a, of, cell0 + 8 * n + 2 * tig);
                    const float2 y = __half22float2(*(const __half2 *) &pair);
#pragma unroll
                    for (int b = 0; b < 2; b++) {
                        float & x = s[i / 2][n][2 * (i % 2) + b];
                        const float capped = a.softcap == 0.0f ? x : soften(a, x) * LOG2_E;
                        x = fmaf(slope, b ? y.y : y.x, capped);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * M; i++) { // of a thread's own columns: lanes meet at the end
            float x[8], top;
#pragma unroll
            for (int e = 0; e < 8; e++) { x[e] = s[i / 2][e / 2][2 * (i % 2) + e % 2]; }
            top = fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7])));
            top = fmaxf(top, m[i]);
            if (top > m[i]) {
                l[i] *= exp2_fast(m[i] - top);
                m[i] = top;
            }
            const float base = top == -INFINITY ? 0.0f : top;
#pragma unroll
            for (int e = 0; e < 8; e++) { x[e] = exp2_fast(x[e] - base); }
            l[i] += ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
#pragma unroll
        for (int d = 1; d <= 2; d *= 2) {
            const float m2 = __shfl_xor_sync(~0u, m[i], d), l2 = __shfl_xor_sync(~0u, l[i], d), top = fmaxf(m[i], m2),
                        base = top == -INFINITY ? 0.0f : top;
            l[i] = l[i] * exp2f(m[i] - base) + l2 * exp2f(m2 - base);
            m[i] = top;
        }
        const int row = row0 + i / 2 * ROWS + g + 8 * (i % 2);
        if (tig == 0 && row < n_rows) {
            a.partial[((size_t) split * a.n_head_kv + kvh) * a.n_rows + row] = make_float2(m[i], l[i]);
        }
    }
}

static __global__ void lse_merge_kernel(const __grid_constant__ kvq_score_args a) {
    early_start();
    early_wait();
    const int row = blockIdx.x * blockDim.x + threadIdx.x, kvh = blockIdx.y;
    if (row >= a.table->n_rows * a.gqa) { return; }
    const int head = kvh * a.gqa + row % a.gqa;
    float m = a.sinks ? a.sinks[head] * LOG2_E : -INFINITY, l = a.sinks ? 1.0f : 0.0f;
    for (int i = 0; i < a.n_splits; i++) {
        const float2 x = a.partial[((size_t) i * a.n_head_kv + kvh) * a.n_rows + row];
        const float top = fmaxf(m, x.x), base = top == -INFINITY ? 0.0f : top;
        l = l * exp2f(m - base) + x.y * exp2f(x.x - base);
        m = top;
    }
    a.lse[(size_t) probe_token(a, row) * a.n_head + head] = m == -INFINITY ? -INFINITY : m / LOG2_E + logf(l);
}

// ---------------------------------------------------------------- sums
// Block: 32 cells of an open page, one KV head, a share of the rows. Warps share these in turn; one thread adds what
// they found to a cell, so that every sum has one owner and one order of additions. Of more shares than one, a kernel
// behind this one adds what blocks found.

// slot: of the page; count: rows that see it
static __device__ __forceinline__ void add_to_cell(
    const kvq_score_args & a, const kvq_score_page & page, int kvh, int slot, float total, int count) {
    const bool stale = page.stale[slot / 8] >> slot % 8 & 1;
    float * const to = page.sums + kvh * a.page_cells + slot;
    *to = (stale ? 0.0f : *to) + total;
    if (kvh == 0) { // who sees a cell does not depend on the head
        int32_t * const n = (int32_t *) page.sums + a.n_head_kv * a.page_cells + slot;
        *n = (stale ? 0 : *n) + count;
    }
}

// what a share found for a cell of block x
static __device__ __forceinline__ float2 & of_share(const kvq_score_args & a, int share, int kvh, int x, int t) {
    return a.partial[(((size_t) share * a.n_head_kv + kvh) * gridDim.x + x) * TILE_CELLS + t];
}

template <int D>
static __global__ void __launch_bounds__(32 * SUM_WARPS) scores_kernel(const __grid_constant__ kvq_score_args a) {
    early_start();
    extern __shared__ __align__(16) __half s_keys[];
    __shared__ float s_sum[SUM_WARPS][TILE_CELLS];
    __shared__ int s_seen[SUM_WARPS][TILE_CELLS];
    const int per_page = a.page_cells / TILE_CELLS, ip = blockIdx.x / per_page, t0 = blockIdx.x % per_page * TILE_CELLS,
              kvh = blockIdx.y;
    if (ip >= a.table->n_pages || a.table->n_rows == 0) { // the table is older than the kernel before this one
        early_wait();                                     // else the next kernel might not wait for that one
        return;
    }
    const kvq_score_page & page = probe_pages(a.table)[ip];
    const int32_t * map = page.map ? page.map + kvh * a.map_stride : nullptr;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, tig = lane % 4,
              n_rows = a.table->n_rows * a.gqa;
    early_wait(); // attention leaves log-sum-exp, and may have brought keys of this step
    fill_k_open<D, 32 * SUM_WARPS>(
        page.keys + (size_t) kvh * a.page_cells * a.stride, a.stride, a.head_size, t0, s_keys);
    __syncthreads();
    const uint32_t k_row = ldmatrix_row<D>(s_keys);
    int cell[4][2];
#pragma unroll
    for (int n = 0; n < 4; n++) {
#pragma unroll
        for (int b = 0; b < 2; b++) {
            const int slot = t0 + 8 * n + 2 * tig + b;
            cell[n][b] = map ? map[slot] : page.cell + slot;
            if (cell[n][b] >= a.n_kv) { cell[n][b] = -1; }
        }
    }
    float sum[4][2] = {};
    int seen[4][2] = {};
    const int step = ROWS * SUM_WARPS * (int) gridDim.z;
    for (int row0 = ((int) blockIdx.z * SUM_WARPS + warp) * ROWS; row0 < n_rows; row0 += step) {
        probe_rows<D> tile[1];
        const probe_rows<D> & r = tile[0];
        tile[0].load(a, kvh, row0, n_rows);
        uint16_t mask[2][4][2]; // asked for before the products
        float s_of[1][4][4], lse[2];
        const auto & s = s_of[0];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint16_t * row = a.mask && r.there[i]
                ? (const uint16_t *) a.mask + r.token[i] * a.mask_stride_token + r.head[i] * a.mask_stride_head
                : nullptr;
            lse[i] = r.there[i] ? a.lse[(size_t) r.token[i] * a.n_head + r.head[i]] : -INFINITY;
#pragma unroll
            for (int n = 0; n < 4; n++) {
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    const int c = cell[n][b];
                    mask[i][n][b] = c < 0 || !r.there[i] ? 0xfc00 : row ? __ldg(row + c) : 0;
                }
            }
        }
        scores_of<D, 1>(tile, k_row, s_of);
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int i = e / 2, b = e % 2;
                const bool sees = mask[i][n][b] != 0xfc00;
                const float p =
                    exp2f((soften(a, s[n][e]) + r.slope[i] * __half2float(__ushort_as_half(mask[i][n][b])) - lse[i]) *
                        LOG2_E);
                sum[n][b] += sees && lse[i] != -INFINITY ? p : 0.0f;
                seen[n][b] += sees && r.head[i] == kvh * a.gqa;
            }
        }
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
#pragma unroll
        for (int b = 0; b < 2; b++) {
#pragma unroll
            for (int d = 4; d <= 16; d *= 2) {
                sum[n][b] += __shfl_xor_sync(~0u, sum[n][b], d);
                seen[n][b] += __shfl_xor_sync(~0u, seen[n][b], d);
            }
            if (g == 0) {
                s_sum[warp][8 * n + 2 * tig + b] = sum[n][b];
                s_seen[warp][8 * n + 2 * tig + b] = seen[n][b];
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < TILE_CELLS) {
        const int t = threadIdx.x;
        float total = 0.0f;
        int count = 0;
        for (int w = 0; w < SUM_WARPS; w++) {
            total += s_sum[w][t];
            count += s_seen[w][t];
        }
        if (gridDim.z == 1) {
            add_to_cell(a, page, kvh, t0 + t, total, count);
        } else {
            of_share(a, blockIdx.z, kvh, blockIdx.x, t) = make_float2(total, __int_as_float(count));
        }
    }
}

// Block: 32 cells of an open page, one KV head, a thread each.
static __global__ void shares_kernel(const __grid_constant__ kvq_score_args a, int n_shares) {
    early_start();
    early_wait();
    const int per_page = a.page_cells / TILE_CELLS, ip = blockIdx.x / per_page;
    if (ip >= a.table->n_pages || a.table->n_rows == 0) { return; }
    float total = 0.0f;
    int count = 0;
    for (int i = 0; i < n_shares; i++) {
        const float2 x = of_share(a, i, blockIdx.y, blockIdx.x, threadIdx.x);
        total += x.x;
        count += __float_as_int(x.y);
    }
    add_to_cell(a, probe_pages(a.table)[ip], blockIdx.y, (int) (blockIdx.x % per_page * TILE_CELLS + threadIdx.x),
        total, count);
}

// ---------------------------------------------------------------- launches

template <int D> struct head_width {
    static constexpr int value = D;
};
template <typename F> static bool by_head_size(int head_size, F && f) {
    switch (kvq_tiles_head_size(head_size, head_size)) {
    case 64: f(head_width<64>()); return true;
    case 80: f(head_width<80>()); return true;
    case 96: f(head_width<96>()); return true;
    case 128: f(head_width<128>()); return true;
    case 192: f(head_width<192>()); return true;
    case 256: f(head_width<256>()); return true;
    case 512: f(head_width<512>()); return true;
    }
    return false;
}

kvq_lse_shape kvq_lse_shape_of(int head_size, int n_rows) {
    kvq_lse_shape shape = { 0, 0, 0 };
    by_head_size(head_size, [&](auto d) {
        const int rows = ROWS * tiles_a_warp<decltype(d)::value>, n_warps = (n_rows + rows - 1) / rows;
        shape.n_blocks = (n_warps + LSE_WARPS - 1) / LSE_WARPS;
        shape.n_warps = (n_warps + shape.n_blocks - 1) / shape.n_blocks;
        shape.at_once = (rows > ROWS || head_size <= 256 ? 2 : 1) * LSE_WARPS / shape.n_warps;
    });
    return shape;
}

bool kvq_launch_lse(const kvq_score_args & a, cudaStream_t stream) {
    return by_head_size(a.head_size, [&](auto d) {
        constexpr int D = decltype(d)::value;
        const kvq_lse_shape shape = kvq_lse_shape_of(a.head_size, a.n_rows);
        const dim3 grid(shape.n_blocks, a.n_head_kv, a.n_splits), merge((a.n_rows + 127) / 128, a.n_head_kv);
        const size_t nb = 4 * (size_t) TILE_CELLS * (D + 8) + (size_t) shape.n_warps * 32 * 2 * 16;
        static kvq_shared_limit limit;
        limit.raise(lse_kernel<D>, nb);
        kvq_launch_early(lse_kernel<D>, grid, 32 * shape.n_warps, nb, stream, a);
        kvq_launch_early(lse_merge_kernel, merge, 128, 0, stream, a);
    });
}

int kvq_score_shares(const kvq_score_args & a, int max_pages, int n_blocks) {
    const int blocks = std::max(1, max_pages * (a.page_cells / TILE_CELLS) * a.n_head_kv);
    return std::max(1, std::min(n_blocks / blocks, a.n_rows / (2 * ROWS * SUM_WARPS))); // two tiles a warp at least
}
size_t kvq_score_words(const kvq_score_args & a, int max_pages, int n_shares) {
    return n_shares > 1 ? 2 * (size_t) n_shares * a.n_head_kv * max_pages * a.page_cells : 0;
}

bool kvq_launch_scores(const kvq_score_args & a, int max_pages, int n_shares, cudaStream_t stream) {
    const dim3 grid(max_pages * (a.page_cells / TILE_CELLS), a.n_head_kv, n_shares), cells(grid.x, grid.y);
    return by_head_size(a.head_size, [&](auto d) {
        constexpr int D = decltype(d)::value;
        kvq_launch_early(scores_kernel<D>, grid, 32 * SUM_WARPS, 2 * (size_t) TILE_CELLS * (D + 8), stream, a);
        if (n_shares > 1) { kvq_launch_early(shares_kernel, cells, TILE_CELLS, 0, stream, a, n_shares); }
    });
}

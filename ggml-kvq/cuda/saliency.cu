#include "saliency.cuh"

#include "attend.cuh"
#include "tile.cuh"

constexpr int ROWS = 16, WARPS = 4, SUM_WARPS = 8; // of log-sum-exp, of sums
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

    __device__ __forceinline__ void load(const kvq_score_args & a, int kvh, int row0, int n_rows) {
        const int lane = threadIdx.x % 32, g = lane / 4, tig = lane % 4;
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
                q[k][j] = c < a.head_size ? pack_half2(p[c] * a.scale, p[c + 1] * a.scale) : 0;
            }
        }
    }
    // scores of 32 cells, K rows of D + 8 in shared memory; x[n][e]: row g + 8*(e/2), cell 8n + 2*(lane % 4) + e % 2
    __device__ __forceinline__ void scores(uint32_t k_row, float (&s)[4][4]) const {
#pragma unroll
        for (int n = 0; n < 4; n++) { s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f; }
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
#pragma unroll
            for (int n = 0; n < 4; n += 2) {
                uint32_t b[4];
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                    : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                    : "r"(k_row + 2 * (n * 8 * (D + 8) + 16 * k)));
                mma(s[n], q[k], b[0], b[1]);
                mma(s[n + 1], q[k], b[2], b[3]);
            }
        }
    }
};

static __device__ __forceinline__ float soften(const kvq_score_args & a, float x) {
    return a.softcap != 0.0f ? a.softcap * tanhf(x / a.softcap) : x;
}

// where this thread's row of ldmatrix begins
template <int D> static __device__ __forceinline__ uint32_t ldmatrix_row(const __half * tile) {
    const int lane = threadIdx.x % 32;
    return (uint32_t) __cvta_generic_to_shared(tile + (lane % 8 + lane / 16 * 8) * (D + 8) + lane / 8 % 2 * 8);
}

// ---------------------------------------------------------------- log-sum-exp
// Block: 64 rows of one KV head, one split of the cells. 32 cells of keys are on their way while those before are
// multiplied.

template <int D>
static __device__ __forceinline__ void ask_keys(const kvq_score_args & a, int kvh, int cell0, __half * to) {
    const size_t step = (size_t) a.n_head_kv * a.head_size;
    for (int i = threadIdx.x; i < TILE_CELLS * (D / 8); i += 32 * WARPS) {
        const int t = i / (D / 8), c = i % (D / 8) * 8;
        const uint32_t at = (uint32_t) __cvta_generic_to_shared(to + t * (D + 8) + c);
        // behind the head: any, queries are 0 there
        const uint16_t * from =
            a.keys + (size_t) min(cell0 + t, a.n_kv - 1) * step + (size_t) kvh * a.head_size + min(c, a.head_size - 8);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// mask of cells `cell`, which is even, and the next; -inf behind the last cell
static __device__ __forceinline__ uint32_t pair_of(const kvq_score_args & a, const __half * row, int cell) {
    if (cell + 1 < a.n_kv && (!row || a.mask_pairs)) { return row ? __ldg((const uint32_t *) (row + cell)) : 0; }
    const auto of = [&](int c) { return c >= a.n_kv ? 0xfc00u : row ? (uint32_t) __half_as_ushort(row[c]) : 0u; };
    return of(cell) | of(cell + 1) << 16;
}

template <int D>
static __global__ void __launch_bounds__(32 * WARPS) lse_kernel(const __grid_constant__ kvq_score_args a) {
    extern __shared__ __align__(16) __half s_keys[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, tig = lane % 4, kvh = blockIdx.y,
              split = blockIdx.z;
    const int n_rows = a.table->n_rows * a.gqa, row0 = blockIdx.x * ROWS * WARPS + warp * ROWS;
    const int n_tiles = (a.n_kv + TILE_CELLS - 1) / TILE_CELLS;
    const int tile0 = (int) ((int64_t) n_tiles * split / a.n_splits),
              tile1 = (int) ((int64_t) n_tiles * (split + 1) / a.n_splits);
    if ((int) (blockIdx.x * ROWS * WARPS) >= n_rows) { return; }
    probe_rows<D> r;
    r.load(a, kvh, min(row0, n_rows - 1), n_rows);
    const __half * rows[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        rows[i] = a.mask ? a.mask + r.token[i] * a.mask_stride_token + r.head[i] * a.mask_stride_head : nullptr;
    }
    float m[2] = { -INFINITY, -INFINITY }, l[2] = { 0.0f, 0.0f };
    constexpr int SIZE = TILE_CELLS * (D + 8); // of a buffer
    const uint32_t k_row = ldmatrix_row<D>(s_keys);
    if (tile0 < tile1) { ask_keys<D>(a, kvh, tile0 * TILE_CELLS, s_keys); }
    for (int tile = tile0; tile < tile1; tile++) {
        const int now = (tile - tile0) & 1;
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        if (tile + 1 < tile1) { ask_keys<D>(a, kvh, (tile + 1) * TILE_CELLS, s_keys + (now ^ 1) * SIZE); }
        uint32_t mask[2][4]; // pairs of cells, asked for before the products
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int n = 0; n < 4; n++) { mask[i][n] = pair_of(a, rows[i], tile * TILE_CELLS + 8 * n + 2 * tig); }
        }
        float s[4][4], top[2] = { m[0], m[1] };
        r.scores(k_row + (uint32_t) now * 2 * SIZE, s);
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float2 y = __half22float2(*(const __half2 *) &mask[i][n]);
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    float & x = s[n][2 * i + b];
                    x = (soften(a, x) + r.slope[i] * (b ? y.y : y.x)) * LOG2_E;
                    top[i] = fmaxf(top[i], x);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) { // of a thread's own columns: lanes meet at the end
            const float base = top[i] == -INFINITY ? 0.0f : top[i];
            l[i] = m[i] == -INFINITY ? 0.0f : l[i] * exp2f(m[i] - base);
            m[i] = top[i];
#pragma unroll
            for (int n = 0; n < 4; n++) { l[i] += exp2f(s[n][2 * i] - base) + exp2f(s[n][2 * i + 1] - base); }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int d = 1; d <= 2; d *= 2) {
            const float m2 = __shfl_xor_sync(~0u, m[i], d), l2 = __shfl_xor_sync(~0u, l[i], d), top = fmaxf(m[i], m2),
                        base = top == -INFINITY ? 0.0f : top;
            l[i] = l[i] * exp2f(m[i] - base) + l2 * exp2f(m2 - base);
            m[i] = top;
        }
        const int row = row0 + g + 8 * i;
        if (tig == 0 && row < n_rows) {
            a.partial[((size_t) split * a.n_head_kv + kvh) * a.n_rows + row] = make_float2(m[i], l[i]);
        }
    }
}

static __global__ void lse_merge_kernel(const __grid_constant__ kvq_score_args a) {
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
// Block: 32 cells of an open page, one KV head. Warps share the rows; one thread adds what they found to a cell, so
// that every sum has one owner and one order of additions.

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
    for (int row0 = warp * ROWS; row0 < n_rows; row0 += ROWS * SUM_WARPS) {
        probe_rows<D> r;
        r.load(a, kvh, row0, n_rows);
        uint16_t mask[2][4][2]; // asked for before the products
        float s[4][4], lse[2];
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
        r.scores(k_row, s);
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
        const int t = threadIdx.x, slot = t0 + t;
        const bool stale = page.stale[slot / 8] >> slot % 8 & 1;
        float * const to = page.sums + kvh * a.page_cells + slot;
        float total = 0.0f;
        int count = 0;
        for (int w = 0; w < SUM_WARPS; w++) {
            total += s_sum[w][t];
            count += s_seen[w][t];
        }
        *to = (stale ? 0.0f : *to) + total;
        if (kvh == 0) { // who sees a cell does not depend on the head
            int32_t * const n = (int32_t *) page.sums + a.n_head_kv * a.page_cells + slot;
            *n = (stale ? 0 : *n) + count;
        }
    }
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

bool kvq_launch_lse(const kvq_score_args & a, cudaStream_t stream) {
    return by_head_size(a.head_size, [&](auto d) {
        constexpr int D = decltype(d)::value;
        const dim3 grid((a.n_rows + ROWS * WARPS - 1) / (ROWS * WARPS), a.n_head_kv, a.n_splits),
            merge((a.n_rows + 127) / 128, a.n_head_kv);
        constexpr size_t nb = 4 * (size_t) TILE_CELLS * (D + 8);
        static kvq_shared_limit limit;
        limit.raise(lse_kernel<D>, nb);
        lse_kernel<D><<<grid, 32 * WARPS, nb, stream>>>(a);
        lse_merge_kernel<<<merge, 128, 0, stream>>>(a);
    });
}

bool kvq_launch_scores(const kvq_score_args & a, int max_pages, cudaStream_t stream) {
    return by_head_size(a.head_size, [&](auto d) {
        constexpr int D = decltype(d)::value;
        const dim3 grid(max_pages * (a.page_cells / TILE_CELLS), a.n_head_kv);
        kvq_launch_early(scores_kernel<D>, grid, 32 * SUM_WARPS, 2 * (size_t) TILE_CELLS * (D + 8), stream, a);
    });
}

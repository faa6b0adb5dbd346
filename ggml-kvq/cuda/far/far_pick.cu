// Which cells are read from the second tier (far.cuh), between the two parts of an attention or behind the whole of it
// (attend_decode.cuh).
#include "far.cuh"
#include "cuda/instructions.cuh"

#include <algorithm>

static constexpr int THREADS = 256;
static constexpr float TO_BASE_2 = 1.44269504f;

static __device__ __forceinline__ int bin_of(float score) {
    const int bin = (int) (__float_as_uint(score) >> 18) - ((127 - 40) << 5);
    return min(max(bin, 0), FAR_BINS - 1);
}

// within a bin that is neither the first nor the last
static __device__ __forceinline__ int part_of(float score) { return (int) (__float_as_uint(score) >> 8 & 1023); }

// of two scores the higher one, of two equal ones the earlier cell, is the larger key
static __device__ __forceinline__ unsigned long long key_of(float score, int cell) {
    return (unsigned long long) __float_as_uint(score) << 32 | (uint32_t) ~cell;
}

// The bin that the last of `top` cells lies in, -1: all cells fit; above: cells of higher bins; in: its own. bins:
// shared memory
static __device__ __noinline__ void find_bin(const uint32_t * bins, int top, int & bin, int & above, int & in) {
    constexpr int EACH = FAR_BINS / THREADS; // from the highest bin down
    __shared__ uint32_t of_warps[THREADS / 32];
    __shared__ int found[3];
    const int first = FAR_BINS - 1 - (int) threadIdx.x * EACH, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t mine = 0;
#pragma unroll 1
    for (int i = 0; i < EACH; i++) { mine += bins[first - i]; }
    uint32_t sum = mine;
    for (int d = 1; d < 32; d *= 2) {
        const uint32_t before = __shfl_sync(~0u, sum, (lane - d) & 31);
        sum += lane >= d ? before : 0;
    }
    if (lane == 31) { of_warps[warp] = sum; }
    if (threadIdx.x == 0) { found[0] = found[1] = -1; }
    __syncthreads();
    for (int w = 0; w < warp; w++) { sum += of_warps[w]; }
    uint32_t before = sum - mine;
    if (before <= (uint32_t) top && sum > (uint32_t) top) { // more than there is room for
#pragma unroll 1
        for (int i = 0; i < EACH; i++) {
            const uint32_t here = bins[first - i];
            if (before + here > (uint32_t) top) {
                found[0] = first - i;
                found[1] = (int) before;
                found[2] = (int) here;
                break;
            }
            before += here;
        }
    }
    __syncthreads();
    bin = found[0];
    above = found[1];
    in = found[2];
    __syncthreads();
}

static __device__ __forceinline__ float score_of(unsigned long long key) { return __int_as_float((int) (key >> 32)); }
static __device__ __forceinline__ int cell_of(unsigned long long key) { return (int) ~(uint32_t) key; }

// Of one bin the `need` largest keys, from the highest byte on: where the bin has too many.
static __device__ __noinline__ void pick_many(
    const unsigned long long * keys, int n, int bin, int part, int need, int32_t * out) {
    const auto is_close = [&](float x) { return bin_of(x) == bin && (part < 0 || part_of(x) == part); };
    __shared__ uint32_t counts[256];
    __shared__ unsigned long long least; // of the keys that are taken
    __shared__ int left;
    if (threadIdx.x == 0) {
        least = 0;
        left = need;
    }
#pragma unroll 1
    for (int shift = 56; shift >= 0; shift -= 8) {
        counts[threadIdx.x] = 0;
        __syncthreads();
        const unsigned long long so_far = least;
        for (int i = threadIdx.x; i < n; i += THREADS) {
            const unsigned long long key = __ldcg(keys + i);
            if (is_close(score_of(key)) && (shift == 56 || key >> (shift + 8) == so_far >> (shift + 8))) {
                atomicAdd(&counts[key >> shift & 255], 1u);
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = 255;
            while (digit > 0 && counts[digit] < (uint32_t) left) { left -= (int) counts[digit--]; }
            least |= (unsigned long long) digit << shift;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) { left = 0; }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
        const unsigned long long key = __ldcg(keys + i);
        if (is_close(score_of(key)) && key >= least) { out[atomicAdd(&left, 1)] = cell_of(key); }
    }
}

// log2 of the sum of a row's exponentials: of all blocks that made logits, and the sink's
static __device__ float row_sum(const kvq_far_args & a, const float2 * tops, int n_splits, int head) {
    const int lane = threadIdx.x % 32;
    float m = -INFINITY, l = 0.0f;
    const auto put = [&](float top, float sum) {
        const float most = fmaxf(m, top);
        if (most == -INFINITY) { return; }
        l = l * exp2_fast(m - most) + sum * exp2_fast(top - most);
        m = most;
    };
    if (a.sinks && lane == 0) { put(a.sinks[head] * TO_BASE_2, 1.0f); }
#pragma unroll 1
    for (int i = lane; i < n_splits; i += 32) {
        const float2 x = __ldcg(tops + i);
        put(x.x, x.y);
    }
#pragma unroll 1
    for (int d = 16; d; d /= 2) {
        const float top = __shfl_xor_sync(~0u, m, d), sum = __shfl_xor_sync(~0u, l, d);
        put(top, sum);
    }
    return m + __log2f(l);
}

// Block: FAR_CHUNK slots of a query token and KV head. It leaves the best of its own, `top` and those that score like
// the last of them; the last block picks from what all have left. A block that is alone picks from its own.
// Code is cold each time and comes at 6 bytes a nanosecond: what is scored lies in shared memory, so that loops need
// not be unrolled, and a block that starts early goes through its code once without data, while logits are made.
static __global__ void __launch_bounds__(THREADS) pick_kernel(const __grid_constant__ kvq_far_args a) {
    early_start();
    constexpr int QUADS = FAR_CHUNK / THREADS / 4, AT_ONCE = 4; // AT_ONCE: rows whose logits are on their way
    extern __shared__ __align__(16) uint8_t memory[];
    unsigned long long * const held = (unsigned long long *) memory; // [FAR_HELD], of the last block
    float * const scores = (float *) memory;                         // [FAR_CHUNK], of its own slots before
    unsigned long long * const close = held + FAR_HELD;              // [FAR_CLOSE]
    int32_t * const cells = (int32_t *) (close + FAR_CLOSE);         // [top]
    float * const lse = (float *) (cells + (a.top + 3) / 4 * 4);     // [gqa]
    __shared__ uint32_t bins[FAR_BINS];
    __shared__ int last, n_left, first_left, n_cells, n_close;
    const int kvh = blockIdx.y % a.n_head_kv, token = blockIdx.y / a.n_head_kv, warp = threadIdx.x / 32;
    const auto & st = a.stream[blockIdx.z];
    const size_t at = (size_t) token * a.n_head_kv + kvh, row0 = (size_t) kvh * a.n_rows + (size_t) token * a.gqa;
    const int n = a.n_near * a.page_cells;
    kvq_far_sums & sums = st.sums[at];
    unsigned long long * const keys = st.keys + at * n;
    float * const logits = st.logits + row0 * a.n_logits;
    const auto first_of = [&](int j) { return (int) blockIdx.x * FAR_CHUNK + 4 * (j * THREADS + (int) threadIdx.x); };
    const auto clear = [&] {
#pragma unroll 1
        for (int i = threadIdx.x; i < FAR_BINS; i += THREADS) { bins[i] = 0; }
    };
#pragma unroll 1
    for (int dry = a.warm_up; dry >= 0; dry--) { // dry: no score is above 0, and the block writes no result
        clear();
        if (threadIdx.x == 0) { n_left = n_cells = n_close = 0; }
        if (!dry) { early_wait(); }
        float4 x[QUADS][AT_ONCE], y[QUADS];
        bool far[QUADS];
        const auto ask = [&](int g0) {
#pragma unroll
            for (int g = 0; g < AT_ONCE; g++) {
                const float * row = logits + (size_t) min(g0 + g, a.gqa - 1) * a.n_logits;
#pragma unroll
                for (int j = 0; j < QUADS; j++) { x[j][g] = __ldcg((const float4 *) (row + min(first_of(j), n - 4))); }
            }
        };
        ask(0);
#pragma unroll
        for (int j = 0; j < QUADS; j++) { // a page has 32 cells or more; no step here waits for the one before it
            y[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            far[j] = false;
            if (dry) { continue; }
            const int p = min(first_of(j), n - 1) / a.page_cells;
            const kvq_page & page = st.pages[p];
            const void *k = st.k_rows[p], *v = st.v_rows[p];
            far[j] = (first_of(j) < n) & (page.n_slots != 0) & (page.k_params != nullptr) & (page.v_params != nullptr) &
                (k != nullptr) & (v != nullptr);
        }
#pragma unroll 1
        for (int g = warp; g < a.gqa; g += THREADS / 32) {
            const float of =
                row_sum(a, (const float2 *) st.tops + (row0 + g) * a.n_splits, dry ? 0 : a.n_splits, kvh * a.gqa + g);
            if (threadIdx.x % 32 == 0) { lse[g] = dry ? 0.0f : of; }
        }
        __syncthreads();
#pragma unroll 1
        for (int g0 = 0; g0 < a.gqa; g0 += AT_ONCE) {
            if (g0) { ask(g0); }
#pragma unroll
            for (int g = 0; g < AT_ONCE; g++) {
                const float of = g0 + g < a.gqa ? lse[g0 + g] : -INFINITY;
                if (of == -INFINITY) { continue; }
#pragma unroll
                for (int j = 0; j < QUADS; j++) {
                    y[j].x += exp2_fast(x[j][g].x - of);
                    y[j].y += exp2_fast(x[j][g].y - of);
                    y[j].z += exp2_fast(x[j][g].z - of);
                    y[j].w += exp2_fast(x[j][g].w - of);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < QUADS; j++) { // what an empty page has is no logit
            ((float4 *) scores)[j * THREADS + threadIdx.x] = far[j] ? y[j] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < FAR_CHUNK; i += THREADS) {
            if (scores[i] > 0.0f) { atomicAdd(&bins[bin_of(scores[i])], 1u); }
        }
        __syncthreads();
        int bin, above, in, part = -1, need = 0;
        find_bin(bins, a.top, bin, above, in);
        if (bin >= 0) { need = a.top - above; }
        // where cells score alike a bin has many: of it the best by the next 10 bits
        if (dry || (bin > 0 && bin < FAR_BINS - 1 && in > FAR_FEW)) {
            clear();
            __syncthreads();
#pragma unroll 1
            for (int i = threadIdx.x; i < FAR_CHUNK; i += THREADS) {
                if (scores[i] > 0.0f && bin_of(scores[i]) == bin) { atomicAdd(&bins[part_of(scores[i])], 1u); }
            }
            __syncthreads();
            find_bin(bins, need, part, above, in);
            need -= max(above, 0);
        }
        const bool alone = gridDim.x == 1 && (bin < 0 || in <= FAR_CLOSE);
        int n_keys = FAR_CHUNK;
        if (!alone) {
            const auto stays = [&](float x) {
                const int of = bin_of(x);
                return x > 0.0f && (of > bin || (of == bin && (part < 0 || part_of(x) >= part)));
            };
            int mine = 0;
#pragma unroll 1
            for (int i = threadIdx.x; i < FAR_CHUNK; i += THREADS) { mine += stays(scores[i]); }
            int to = mine ? atomicAdd(&n_left, mine) : 0;
            __syncthreads();
            if (threadIdx.x == 0) { first_left = n_left ? (int) atomicAdd(&sums.n_left, (uint32_t) n_left) : 0; }
            __syncthreads();
            to += first_left;
#pragma unroll 1
            for (int i = threadIdx.x; i < FAR_CHUNK; i += THREADS) {
                if (stays(scores[i])) { keys[to++] = key_of(scores[i], (int) blockIdx.x * FAR_CHUNK + i); }
            }
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) { last = dry || atomicAdd(&sums.n_done, 1u) == gridDim.x - 1; }
            __syncthreads();
            if (!last) { return; }
            __threadfence();
            n_keys = dry ? 0 : (int) __ldcg(&sums.n_left);
#pragma unroll 4
            for (int i = threadIdx.x; i < min(n_keys, FAR_HELD); i += THREADS) { held[i] = __ldcg(keys + i); }
        }
        const auto key_at = [&](int i) {
            return alone ? key_of(scores[i], i) : i < FAR_HELD ? held[i] : __ldcg(keys + i);
        };
        if (!alone) {
            clear();
            __syncthreads();
#pragma unroll 1
            for (int i = threadIdx.x; i < n_keys; i += THREADS) { atomicAdd(&bins[bin_of(score_of(key_at(i)))], 1u); }
            __syncthreads();
            find_bin(bins, a.top, bin, above, in);
            need = bin < 0 ? 0 : a.top - above;
            part = -1;
            if (dry || (need && bin && bin < FAR_BINS - 1)) { // the next 10 bits of the mantissa
                clear();
                __syncthreads();
#pragma unroll 1
                for (int i = threadIdx.x; i < n_keys; i += THREADS) {
                    const float x = score_of(key_at(i));
                    if (bin_of(x) == bin) { atomicAdd(&bins[part_of(x)], 1u); }
                }
                __syncthreads();
                find_bin(bins, need, part, above, in);
                need -= max(above, 0);
            }
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < n_keys; i += THREADS) {
            const unsigned long long key = key_at(i);
            const float x = score_of(key);
            const int of = bin_of(x), of_part = part < 0 ? -1 : part_of(x);
            if (!(x > 0.0f)) { continue; }
            if (of > bin || (of == bin && of_part > part)) {
                cells[atomicAdd(&n_cells, 1)] = cell_of(key);
            } else if (of == bin && of_part == part && need) {
                const int to = atomicAdd(&n_close, 1);
                if (to < FAR_CLOSE) { close[to] = key; }
            }
        }
        __syncthreads();
        if (n_close > FAR_CLOSE) {
            pick_many(keys, n_keys, bin, part, need, cells + n_cells);
            __syncthreads();
            if (threadIdx.x == 0) { n_cells += need; }
        } else {
#pragma unroll 1
            for (int i = threadIdx.x; i < n_close; i += THREADS) {
                const unsigned long long mine = close[i];
                int rank = 0;
#pragma unroll 1
                for (int j = 0; j < n_close; j++) { rank += close[j] > mine; }
                if (rank < need) { cells[atomicAdd(&n_cells, 1)] = cell_of(mine); }
            }
        }
        __syncthreads();
        const int n_picks = n_cells;
        int32_t * const picks = st.picks + at * a.top;
        constexpr int TOGETHER = 4; // threads that find a cell's rank
#pragma unroll 1
        for (int i0 = 0; i0 < a.top; i0 += THREADS / TOGETHER) { // in the order of cells, whichever thread was first
            const int i = i0 + (int) threadIdx.x / TOGETHER, mine = cells[max(0, min(i, n_picks - 1))];
            int rank = 0;
#pragma unroll 4
            for (int j = threadIdx.x % TOGETHER; j < n_picks; j += TOGETHER) { rank += cells[j] < mine; }
            for (int d = 1; d < TOGETHER; d *= 2) { rank += __shfl_xor_sync(~0u, rank, d); }
            if (i >= a.top || threadIdx.x % TOGETHER || dry) { continue; }
            if (i >= n_picks) {
                picks[i] = -1;
                continue;
            }
            picks[rank] = mine;
#pragma unroll 1
            for (int g = 0; g < a.gqa && !a.ahead; g++) { logits[(size_t) g * a.n_logits + mine] = -INFINITY; }
        }
        if (threadIdx.x == 0 && !dry) {
            sums.n_left = sums.n_done = 0;
            if (st.counts) {
                if (!a.ahead) { atomicAdd(st.counts, (unsigned long long) n_picks); }
                if (token == 0 && !a.before) { atomicAdd(st.counts + 1, (unsigned long long) n_picks); }
                if (at == 0 && !a.before) { atomicAdd(st.counts + 3, 1ull); }
            }
        }
        __syncthreads();
    }
}

void kvq_launch_far_pick(const kvq_far_args & a, int n_streams, cudaStream_t stream) {
    const dim3 grid((a.n_near * a.page_cells + FAR_CHUNK - 1) / FAR_CHUNK, a.n_head_kv * a.n_q, n_streams);
    const size_t nb =
        (FAR_HELD + FAR_CLOSE) * sizeof(unsigned long long) + (((size_t) a.top + 3) / 4 + (a.gqa + 3) / 4) * 16;
    kvq_launch_early(pick_kernel, grid, THREADS, nb, stream, a);
}

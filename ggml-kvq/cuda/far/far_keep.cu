// Far rows that stay beside attention (KVQ_FETCH_AHEAD): what a step picks, the steps that follow read.
#include "far.cuh"

#include <climits>

static constexpr int THREADS = 256;

// Bytes u.. of a cell's far row, a key and behind it a value
static __device__ __forceinline__ uint2 far_unit(const void * const * k_rows, const void * const * v_rows, int nb_key,
    int nb_value, int page_cells, int kvh, int cell, int u) {
    const bool value = u >= nb_key;
    const uint8_t * const rows = (const uint8_t *) (value ? v_rows : k_rows)[cell / page_cells];
    const size_t row = (size_t) kvh * page_cells + cell % page_cells;
    return *(const uint2 *) (rows + row * (value ? nb_value : nb_key) + (value ? u - nb_key : u));
}

// Block: a KV head, a warp some cells. One that is kept no more becomes one that no cache has: its slot is free when
// others are kept.
static __global__ void __launch_bounds__(THREADS) renew_kernel(const __grid_constant__ kvq_far_renew a) {
    early_wait();
    const int kvh = blockIdx.x, lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < a.n_kept; i += THREADS / 32) {
        int32_t & kept = a.kept[(size_t) kvh * a.n_kept + i];
        const int cell = kept;
        if (cell < 0) { break; }
        for (int j = 0; j < a.n; j++) {
            if (cell < a.cells[j].from || cell >= a.cells[j].to) { continue; }
            const int p = cell / a.page_cells;
            if (!a.cells[j].again || !a.k_rows[p] || !a.v_rows[p]) {
                __syncwarp();
                if (lane == 0) {
                    atomicAnd(a.bits + (size_t) kvh * a.n_words + cell / 32, ~(1u << cell % 32));
                    kept = INT_MAX;
                }
                break;
            }
            const size_t slot = (size_t) kvh * a.n_kept + a.slots[(size_t) kvh * a.n_kept + i];
            for (int u = lane * 8; u < 2 * a.nb_row; u += 32 * 8) {
                *(uint2 *) (a.rows + slot * 2 * a.nb_row + u) =
                    far_unit(a.k_rows, a.v_rows, a.nb_row, a.nb_row, a.page_cells, kvh, cell, u);
            }
        }
    }
}

// Attention in parts: cells that are kept leave the near part. Block: a KV head.
static __global__ void __launch_bounds__(THREADS) hide_kernel(const __grid_constant__ kvq_far_kept a) {
    early_wait();
    const auto & st = a.stream[blockIdx.y];
    const int kvh = blockIdx.x;
    for (int i = threadIdx.x; i < a.n_kept; i += THREADS) {
        const int cell = st.kept[(size_t) kvh * a.n_kept + i];
        if (cell < 0 || cell >= a.n_cells) { continue; }
        for (int row = 0; row < a.n_rows; row++) {
            st.logits[((size_t) kvh * a.n_rows + row) * a.n_logits + cell] = -INFINITY;
        }
    }
}

// Sum over the threads before this one; total: over all. sums: shared memory, [THREADS / 32]
static __device__ __forceinline__ int count_before(int mine, int * sums, int & total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = mine;
    for (int d = 1; d < 32; d *= 2) {
        const int before = __shfl_sync(~0u, sum, (lane - d) & 31);
        sum += lane >= d ? before : 0;
    }
    __syncthreads();
    if (lane == 31) { sums[warp] = sum; }
    __syncthreads();
    total = 0;
    for (int w = 0; w < THREADS / 32; w++) {
        sum += w < warp ? sums[w] : 0;
        total += sums[w];
    }
    return sum - mine;
}

// Where `cell` is among n picks, ascending, -1 behind the last; n: it is not
static __device__ __forceinline__ int find_pick(const int32_t * picks, int n, int cell) {
    int from = 0, to = n;
    while (from < to) {
        const int at = (from + to) / 2;
        if (picks[at] >= 0 && picks[at] < cell) {
            from = at + 1;
        } else {
            to = at;
        }
    }
    return from < n && picks[from] == cell ? from : n;
}

// Block: a KV head. One token after the other: new cells are its picks and behind them those that were kept and not
// picked again, while there is room. A row that is in the buffer stays in its slot; others come from the second tier
// into slots that are free then. Only the next step waits for this kernel.
static __global__ void __launch_bounds__(THREADS) keep_kernel(const __grid_constant__ kvq_far_kept a) {
    early_wait();
    extern __shared__ __align__(16) uint8_t memory[];
    const int n = a.n_kept, kvh = blockIdx.x;
    int32_t * const old = (int32_t *) memory; // [n], cells
    int32_t * const at = old + n;             // [n], their slots
    int32_t * const free_slots = at + n;      // [n]
    int32_t * const picks = free_slots + n;   // [top], of the first token, then of those that stay
    int32_t * const places = picks + a.top;   // [top], -1: to come
    int32_t * const come = places + a.top;    // [top], picks that come
    __shared__ int sums[THREADS / 32], n_hits;
    const auto & st = a.stream[blockIdx.y];
    int32_t *const kept = st.kept + (size_t) kvh * n, *const slots = (int32_t *) st.buffer + (size_t) kvh * n;
    uint32_t * const bits = (uint32_t *) (st.buffer + a.bits) + (size_t) kvh * a.n_words;
    const auto pick_of = [&](int token, int i) { return st.picks[((size_t) token * a.n_head_kv + kvh) * a.top + i]; };
    const auto is_there = [&](int cell) { return cell >= 0 && cell < a.n_cells; };
    // how many of its picks does the first token find?
    for (int i = threadIdx.x; i < a.top; i += THREADS) { picks[i] = pick_of(0, i); }
    if (threadIdx.x == 0) { n_hits = 0; }
    __syncthreads();
    int mine = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) {
        mine += !a.anew && is_there(kept[i]) && find_pick(picks, a.top, kept[i]) < a.top;
    }
    if (mine) { atomicAdd(&n_hits, mine); }
    __syncthreads();
    if (threadIdx.x == 0 && st.counts) { atomicAdd(st.counts + 2, (unsigned long long) n_hits); }
    for (int token = a.from; token < a.n_q; token++) {
        const bool none = kept[0] < 0;
        for (int i = threadIdx.x; i < n; i += THREADS) {
            old[i] = kept[i];
            at[i] = none ? i : slots[i];
        }
        int n_picks = 0;
        for (int i = threadIdx.x; i < a.top; i += THREADS) {
            picks[i] = pick_of(token, i);
            places[i] = -1;
            n_picks += picks[i] >= 0;
        }
        count_before(n_picks, sums, n_picks);
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += THREADS) {
            if (old[i] < 0) { continue; }
            if (old[i] < 32 * a.n_words) { atomicAnd(bits + old[i] / 32, ~(1u << old[i] % 32)); }
            const int pick = find_pick(picks, a.top, old[i]);
            if (!is_there(old[i]) || (a.anew && token == a.from)) {
                old[i] = -1;
            } else if (pick < a.top) { // this row stays, and its cell comes to the front
                places[pick] = at[i];
                old[i] = -2;
            }
        }
        __syncthreads();
        // each thread some neighbours: cells that stay keep their order, other slots are free
        const int each = (n + THREADS - 1) / THREADS, i0 = min((int) threadIdx.x * each, n), i1 = min(i0 + each, n);
        int n_stay, n_free, n_come;
        mine = 0;
        for (int i = i0; i < i1; i++) { mine += old[i] >= 0; }
        int to = n_picks + count_before(mine, sums, n_stay);
        n_stay = min(n_stay, n - n_picks);
        mine = 0;
        for (int i = i0, k = to; i < i1; i++) { mine += old[i] == -1 || (old[i] >= 0 && k++ >= n); }
        int at_free = count_before(mine, sums, n_free);
        for (int i = i0; i < i1; i++) {
            if (old[i] == -2) { continue; }
            if (old[i] >= 0 && to++ < n) {
                kept[to - 1] = old[i];
                slots[to - 1] = at[i];
                atomicOr(bits + old[i] / 32, 1u << old[i] % 32);
            } else {
                free_slots[at_free++] = at[i];
            }
        }
        const int each_pick = (a.top + THREADS - 1) / THREADS, p0 = min((int) threadIdx.x * each_pick, a.top),
                  p1 = min(p0 + each_pick, a.top);
        mine = 0;
        for (int i = p0; i < p1; i++) { mine += picks[i] >= 0 && places[i] < 0; }
        int at_come = count_before(mine, sums, n_come); // and free_slots are there for all
        for (int i = p0; i < p1; i++) {
            if (picks[i] < 0) { continue; }
            if (places[i] < 0) {
                come[at_come] = i;
                places[i] = free_slots[at_come++];
            }
            kept[i] = picks[i];
            slots[i] = places[i];
            atomicOr(bits + picks[i] / 32, 1u << picks[i] % 32);
        }
        for (int i = n_come + (int) threadIdx.x; i < n_free; i += THREADS) { // what has no row
            kept[n_picks + n_stay + i - n_come] = -1;
            slots[n_picks + n_stay + i - n_come] = free_slots[i];
        }
        __syncthreads();
        if (threadIdx.x == 0 && st.counts && !a.anew) { atomicAdd(st.counts, (unsigned long long) n_come); }
        // rows, 8 bytes a thread, several on their way
        constexpr int AT_ONCE = 8;
        const int nb_row = a.nb_key + a.nb_value, units = nb_row / 8, n_units = n_come * units;
        for (int u0 = threadIdx.x; u0 < n_units; u0 += AT_ONCE * THREADS) {
            uint2 x[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int i = min(u0 + j * THREADS, n_units - 1);
                x[j] = far_unit(st.k_rows, st.v_rows, a.nb_key, a.nb_value, a.page_cells, kvh, picks[come[i / units]],
                    i % units * 8);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int i = u0 + j * THREADS;
                if (i >= n_units) { continue; }
                const int slot = places[come[i / units]];
                *(uint2 *) (st.buffer + a.rows + ((size_t) kvh * n + slot) * nb_row + i % units * 8) = x[j];
            }
        }
        __syncthreads(); // picks and places are those of the next token
    }
}

void kvq_launch_far_renew(const kvq_far_renew & a, cudaStream_t stream) {
    kvq_launch_early(renew_kernel, dim3(a.n_head_kv), THREADS, 0, stream, a);
}

void kvq_launch_far_hide(const kvq_far_kept & a, int n_streams, cudaStream_t stream) {
    kvq_launch_early(hide_kernel, dim3(a.n_head_kv, n_streams), THREADS, 0, stream, a);
}

void kvq_launch_far_keep(const kvq_far_kept & a, int n_streams, cudaStream_t stream) {
    const size_t nb = ((size_t) a.n_kept * 3 + (size_t) a.top * 3) * 4;
    kvq_launch_early(keep_kernel, dim3(a.n_head_kv, n_streams), THREADS, nb, stream, a);
}

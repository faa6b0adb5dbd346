// Picks of one step that the next one reads (KVQ_FETCH_AHEAD), and their far rows.
#include "far.cuh"

static constexpr int THREADS = 256;

// What the call before picked, for every query token; what this one picked is kept. Block: a KV head.
static __global__ void __launch_bounds__(THREADS) recall_kernel(const __grid_constant__ kvq_far_args a) {
    extern __shared__ __align__(16) uint8_t memory[];
    int32_t * const old = (int32_t *) memory; // [top]
    __shared__ int n_new, n_hits;             // n_new: rows that have to come for the next call
    const int kvh = blockIdx.x;
    const auto & st = a.stream[blockIdx.y];
    int32_t * kept = st.kept + (size_t) kvh * a.top;
    const auto picks_of = [&](int token) { return st.picks + ((size_t) token * a.n_head_kv + kvh) * a.top; };
    for (int i = threadIdx.x; i < a.top; i += THREADS) {
        const int cell = kept[i], p = cell / a.page_cells;
        const bool there = cell >= 0 && p < a.n_near && cell < a.n_kv && st.pages[p].n_slots && st.pages[p].k_params &&
            st.pages[p].v_params && st.k_rows[p] && st.v_rows[p];
        old[i] = there ? cell : -1;
    }
    if (threadIdx.x == 0) { n_new = n_hits = 0; }
    __syncthreads();
    for (int i = threadIdx.x; i < a.top; i += THREADS) {
        const auto was_there = [&](int cell) {
            bool found = false;
            for (int j = 0; j < a.top; j++) { found |= old[j] == cell; }
            return found;
        };
        const int now = picks_of(0)[i], next = picks_of(a.n_q - 1)[i];
        if (now >= 0 && was_there(now)) { atomicAdd(&n_hits, 1); }
        if (a.last && next >= 0 && !was_there(next)) { atomicAdd(&n_new, 1); }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.top; i += THREADS) {
        if (a.last) { kept[i] = picks_of(a.n_q - 1)[i]; }
        for (int t = 0; t < a.n_q; t++) { picks_of(t)[i] = old[i]; }
        if (old[i] < 0) { continue; }
        for (int row = 0; row < a.n_rows; row++) {
            st.logits[((size_t) kvh * a.n_rows + row) * a.n_logits + old[i]] = -INFINITY;
        }
    }
    if (threadIdx.x == 0 && st.counts) {
        atomicAdd(st.counts, (unsigned long long) n_new);
        if (a.first) { atomicAdd(st.counts + 2, (unsigned long long) n_hits); }
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

// Block: a KV head. What the last token picked is kept for the next step. Rows that are in the buffer stay where they
// are; others take slots without a pick, in turn, and come from the second tier. Nothing waits for this kernel but the
// next step.
static __global__ void __launch_bounds__(THREADS) bring_kernel(const __grid_constant__ kvq_far_bring a) {
    early_wait();
    extern __shared__ __align__(16) uint8_t memory[];
    const int n_slots = 2 * a.top, kvh = blockIdx.x;
    int32_t * const tags = (int32_t *) memory;                 // [n_slots], then picks whose rows come
    int32_t * const cells = tags + n_slots;                    // [top], of the last token
    int32_t * const places = cells + a.top;                    // [top], -1: to come
    int32_t * const free_slots = places + a.top;               // [n_slots]
    uint8_t * const used = (uint8_t *) (free_slots + n_slots); // [n_slots]
    __shared__ int sums[THREADS / 32], n_hits;
    const auto & st = a.stream[blockIdx.y];
    int32_t *const kept = st.kept + (size_t) kvh * a.top, *const slots = (int32_t *) st.buffer + (size_t) kvh * a.top,
                   *const all_tags = (int32_t *) (st.buffer + a.tags) + (size_t) kvh * n_slots,
                   *const hand = (int32_t *) (st.buffer + a.hands) + kvh;
    uint32_t * const bits = (uint32_t *) (st.buffer + a.bits) + (size_t) kvh * a.n_words;
    const auto pick_of = [&](int token, int i) { return st.picks[((size_t) token * a.n_head_kv + kvh) * a.top + i]; };
    for (int i = threadIdx.x; i < n_slots; i += THREADS) {
        tags[i] = all_tags[i];
        used[i] = 0;
    }
    for (int i = threadIdx.x; i < a.top; i += THREADS) { cells[i] = kept[i]; }
    if (threadIdx.x == 0) { n_hits = 0; }
    __syncthreads();
    if (a.first) { // how many of its picks does the first token find?
        int mine = 0;
        for (int i = threadIdx.x; i < a.top; i += THREADS) {
            const int now = pick_of(0, i);
            bool found = false;
            for (int j = 0; j < a.top; j++) { found |= cells[j] == now; }
            mine += now >= 0 && found;
        }
        if (mine) { atomicAdd(&n_hits, mine); }
    }
    __syncthreads();
    if (threadIdx.x == 0 && st.counts) { atomicAdd(st.counts + 2, (unsigned long long) n_hits); }
    if (!a.last) { return; }
    for (int i = threadIdx.x; i < a.top; i += THREADS) {
        if (cells[i] >= 0) { atomicAnd(bits + cells[i] / 32, ~(1u << cells[i] % 32)); }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.top; i += THREADS) { cells[i] = pick_of(a.n_q - 1, i); }
    __syncthreads();
    for (int i = threadIdx.x; i < a.top; i += THREADS) {
        int place = -1;
        for (int j = 0; j < n_slots && cells[i] >= 0; j++) {
            if (tags[j] == cells[i] + 1) { place = j; }
        }
        places[i] = place;
        if (place >= 0) { used[place] = 1; }
    }
    __syncthreads();
    // free slots in the order of their turns
    const int each = (n_slots + THREADS - 1) / THREADS, s0 = threadIdx.x * each, s1 = min(s0 + each, n_slots),
              from = *hand;
    const auto slot_of = [&](int turn) { return turn + from < n_slots ? turn + from : turn + from - n_slots; };
    int mine = 0, n_free, n_come;
    for (int s = s0; s < s1; s++) { mine += !used[slot_of(s)]; }
    int at = count_before(mine, sums, n_free);
    for (int s = s0; s < s1; s++) {
        if (!used[slot_of(s)]) { free_slots[at++] = slot_of(s); }
    }
    const int each_pick = (a.top + THREADS - 1) / THREADS, p0 = threadIdx.x * each_pick,
              p1 = min(p0 + each_pick, a.top);
    mine = 0;
    for (int i = p0; i < p1; i++) { mine += cells[i] >= 0 && places[i] < 0; }
    at = count_before(mine, sums, n_come); // and free_slots are there for all
    int32_t * const come = tags;           // [n_come], picks: tags have been read
    for (int i = p0; i < p1; i++) {
        if (cells[i] >= 0 && places[i] < 0) {
            places[i] = free_slots[at];
            all_tags[places[i]] = cells[i] + 1;
            come[at++] = i;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.top; i += THREADS) {
        kept[i] = cells[i];
        slots[i] = places[i];
        if (cells[i] >= 0) { atomicOr(bits + cells[i] / 32, 1u << cells[i] % 32); }
    }
    if (threadIdx.x == 0) {
        if (n_come) { *hand = (free_slots[n_come - 1] + 1) % n_slots; }
        if (st.counts) { atomicAdd(st.counts, (unsigned long long) n_come); }
    }
    // rows, 8 bytes a thread, several on their way
    constexpr int AT_ONCE = 8;
    const int nb_row = a.nb_key + a.nb_value, units = nb_row / 8, n = n_come * units;
    for (int i0 = threadIdx.x; i0 < n; i0 += AT_ONCE * THREADS) {
        uint2 x[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = min(i0 + j * THREADS, n - 1), cell = cells[come[i / units]], u = i % units * 8;
            const bool value = u >= a.nb_key;
            const uint8_t * rows = (const uint8_t *) (value ? st.v_rows : st.k_rows)[cell / a.page_cells];
            const size_t row = (size_t) kvh * a.page_cells + cell % a.page_cells;
            x[j] = *(const uint2 *) (rows + row * (value ? a.nb_value : a.nb_key) + (value ? u - a.nb_key : u));
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = i0 + j * THREADS;
            if (i >= n) { continue; }
            const int slot = places[come[i / units]];
            *(uint2 *) (st.buffer + a.rows + ((size_t) kvh * n_slots + slot) * nb_row + i % units * 8) = x[j];
        }
    }
}

void kvq_launch_far_recall(const kvq_far_args & a, int n_streams, cudaStream_t stream) {
    recall_kernel<<<dim3(a.n_head_kv, n_streams), THREADS, ((size_t) a.top + 3) / 4 * 16, stream>>>(a);
}

void kvq_launch_far_bring(const kvq_far_bring & a, int n_streams, cudaStream_t stream) {
    const size_t nb = (size_t) a.top * (2 * 4 + 4 + 4 + 2 * 4 + 2);
    kvq_launch_early(bring_kernel, dim3(a.n_head_kv, n_streams), THREADS, nb, stream, a);
}

// Pages that blocks of rows see, and how the blocks of a decode kernel share them (seen.cuh).
#include "seen.cuh"

static constexpr int THREADS = 512, WARPS = 8, PAGES = 8; // PAGES: of a warp

// Block = (block of rows, some pages), a warp reads a page's part of the masks of the tokens. Leaves 0 or 1 for each
// page where the list will be.
static __global__ void mark_kernel(const __grid_constant__ kvq_seen_args a) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row0 = (int) blockIdx.x * a.per_row,
              token0 = row0 / a.gqa, token1 = (min(row0 + a.per_row, a.n_rows) - 1) / a.gqa,
              first = ((int) blockIdx.y * WARPS + warp) * PAGES;
    int32_t * const list = (int32_t *) a.work + a.n_work + (size_t) blockIdx.x * (a.n_pages + 1) + 1;
#pragma unroll
    for (int i = 0; i < PAGES; i++) {
        if (first + i >= a.n_pages) { break; }
        const kvq_page & page = a.pages[first + i];
        bool seen = page.map != nullptr; // other cells for each head: the kernel looks
        for (int token = token0; token <= token1; token++) {
            const __half * const mask = a.mask + token * a.mask_stride_token;
            for (int slot = 2 * lane; slot < a.page_cells; slot += 64) {
                const int cell = page.cell + slot;
                if (cell < 0 || cell >= a.n_kv) { continue; }
                const uint32_t x =
                    cell + 1 < a.n_kv ? *(const uint32_t *) (mask + cell) : __half_as_ushort(mask[cell]) | 0xfc000000u;
                seen = seen || x != 0xfc00fc00u;
            }
        }
        seen = __any_sync(~0u, seen);
        if (lane == 0) { list[first + i] = seen; }
    }
}

// Block = block of rows. What is marked becomes a list, in place: it never is longer than what has been read.
static __global__ void list_kernel(const __grid_constant__ kvq_seen_args a) {
    __shared__ int s_n[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int32_t * const list = (int32_t *) a.work + a.n_work + (size_t) blockIdx.x * (a.n_pages + 1);
    int n = 0;
    for (int first = 0; first < a.n_pages; first += THREADS) {
        const int page = first + (int) threadIdx.x;
        const bool mine = page < a.n_pages && list[1 + page];
        const uint32_t all = __ballot_sync(~0u, mine);
        if (lane == 0) { s_n[warp] = __popc(all); }
        __syncthreads();
        int at = n;
        for (int w = 0; w < THREADS / 32; w++) {
            at += w < warp ? s_n[w] : 0;
            n += s_n[w];
        }
        if (mine) { list[1 + at + __popc(all & ((1u << lane) - 1))] = page; }
        __syncthreads();
    }
    if (threadIdx.x == 0) { list[0] = n; }
}

// Thread = block of rows. Each is cut into parts of the least number of steps with which the blocks of all run at
// once: one more would wait for the others to end. Where that would leave long parts, they run in turns instead.
static __global__ void deal_kernel(const __grid_constant__ kvq_seen_args a) {
    constexpr int EXTRA = 4; // what a block costs beside its steps, in steps
    __shared__ int s_steps[KVQ_SEEN_BLOCKS], s_splits[KVQ_SEEN_BLOCKS], s_fits[KVQ_SEEN_BLOCKS];
    const int i = threadIdx.x;
    if (i < a.n_blocks) {
        const int64_t n = ((const int32_t *) a.work)[a.n_work + (size_t) i * (a.n_pages + 1)];
        s_steps[i] = (int) (((n * a.units2 + 1) / 2 + a.n_teams - 1) / a.n_teams);
    }
    __syncthreads();
    int all = 0, longest = 1;
    for (int j = 0; j < a.n_blocks; j++) {
        all += s_steps[j];
        longest = max(longest, s_steps[j]);
    }
    const auto parts = [&](int steps, int length) { return max(1, min((steps + length - 1) / length, a.most)); };
    // n_slots parts of less than `least` are too few for all steps, of `most` always enough: a thread tries one length
    const int least = max(1, (all + a.n_slots - 1) / a.n_slots),
              most = a.n_slots > a.n_blocks ? min(longest, all / (a.n_slots - a.n_blocks) + 1) : longest,
              step = max(1, (most - least + KVQ_SEEN_BLOCKS - 2) / (KVQ_SEEN_BLOCKS - 1)), length = least + i * step;
    int n_parts = 0;
    for (int j = 0; j < a.n_blocks; j++) { n_parts += parts(s_steps[j], length); }
    s_fits[i] = n_parts <= a.n_slots;
    __syncthreads();
    int chosen = least, at_once = 0;
    while (at_once < KVQ_SEEN_BLOCKS && !s_fits[at_once]) { at_once++; }
    if (at_once < KVQ_SEEN_BLOCKS && least + at_once * step + EXTRA <= 2 * (least + EXTRA)) {
        chosen = least + at_once * step;
    }
    if (i < a.n_blocks) { s_splits[i] = parts(s_steps[i], chosen); }
    __syncthreads();
    int at = 0, n = 0; // of all blocks of rows: work of the first i, and of all
    for (int j = 0; j < a.n_blocks; j++) {
        at += j < i ? s_splits[j] : 0;
        n += s_splits[j];
    }
    if (i < a.n_blocks) {
        for (int split = 0; split < s_splits[i]; split++) {
            a.work[at + split] = (uint32_t) i << 24 | (uint32_t) split << 12 | (uint32_t) s_splits[i];
        }
    }
    for (int j = n + i; j < a.n_work; j += KVQ_SEEN_BLOCKS) { a.work[j] = 0; }
}

void kvq_launch_seen(const kvq_seen_args & a, cudaStream_t stream) {
    const int n_parts = (a.n_pages + WARPS * PAGES - 1) / (WARPS * PAGES);
    mark_kernel<<<dim3(a.n_blocks, n_parts), 32 * WARPS, 0, stream>>>(a);
    list_kernel<<<a.n_blocks, THREADS, 0, stream>>>(a);
    deal_kernel<<<1, KVQ_SEEN_BLOCKS, 0, stream>>>(a);
}

// Cells of open pages into pages of slots (policy/evict.h): which go together, and their rows.
#include "select.cuh"

static constexpr uint32_t NOT_HERE = ~0u;
static constexpr int MAX_CELLS = 256, KEYS = 1024;

// ---------------------------------------------------------------- packing
// Block (page, head), thread = cell. Cells of a run lie one behind the other.

// Scores as numbers that fall as they rise: kvq_slots' order.
static __global__ void keys_kernel(const __grid_constant__ kvq_pack_args a) {
    early_wait();
    const int page = blockIdx.x, h = blockIdx.y, t = threadIdx.x;
    const kvq_pack_job & job = a.jobs[page];
    const uint8_t * present = a.present + ((size_t) page * a.n_head + h) * (a.page_cells / 8);
    const bool here = present[t / 8] >> t % 8 & 1;
    float score = 0.0f;
    if (here && job.sums && !(job.stale[t / 8] >> t % 8 & 1)) {
        const int seen = a.normalise ? max(((const int32_t *) job.sums)[a.n_head * a.page_cells + t], 1) : 1;
        score = __fdiv_rn(job.sums[h * a.page_cells + t], (float) seen);
    }
    const uint32_t bits = __float_as_uint(score), key = bits >> 31 ? bits : ~(bits | 0x80000000u);
    const size_t at = ((size_t) h * a.n + page) * a.page_cells + t;
    a.scores[at] = score;
    a.keys[at] = here ? min(key, NOT_HERE - 1) : NOT_HERE;
}

// The rank of a cell is the number of those before it; page_cells of them fill a page.
static __global__ void rank_kernel(const __grid_constant__ kvq_pack_args a) {
    early_wait();
    __shared__ uint4 s_keys[KEYS / 4];
    const kvq_pack_job & job = a.jobs[blockIdx.x];
    const size_t run = ((size_t) blockIdx.y * a.n + job.first) * a.page_cells;
    const int n = job.n * a.page_cells, mine = (blockIdx.x - job.first) * a.page_cells + threadIdx.x;
    const uint32_t key = a.keys[run + mine];
    int rank = 0;
    const auto count = [&](uint32_t x, int place) {
        rank += job.sorted ? x < key || (x == key && place < mine) : x != NOT_HERE && place < mine;
    };
    for (int first = 0; first < n; first += KEYS) {
        const int part = min(KEYS, n - first);
        __syncthreads();
        for (int i = threadIdx.x; i < part / 4; i += blockDim.x) {
            s_keys[i] = *(const uint4 *) (a.keys + run + first + 4 * i);
        }
        __syncthreads();
        for (int i = 0; i < part / 4; i++) {
            const uint4 x = s_keys[i];
            const int place = first + 4 * i;
            count(x.x, place);
            count(x.y, place + 1);
            count(x.z, place + 2);
            count(x.w, place + 3);
        }
    }
    a.page_of[run + mine] = key == NOT_HERE ? -1 : rank / a.page_cells;
}

// Of a page of slots: its cells in their order.
static __global__ void slots_kernel(const __grid_constant__ kvq_pack_args a) {
    early_wait();
    __shared__ float s_score[MAX_CELLS];
    __shared__ int s_before[MAX_CELLS / 32];
    const kvq_pack_job & job = a.jobs[blockIdx.x];
    const size_t run = ((size_t) blockIdx.y * a.n + job.first) * a.page_cells,
                 out = ((size_t) blockIdx.x * a.n_head + blockIdx.y) * a.page_cells;
    const int n = job.n * a.page_cells, wanted = blockIdx.x - job.first, lane = threadIdx.x % 32,
              warp = threadIdx.x / 32;
    int filled = 0;
    for (int first = 0; first < n; first += blockDim.x) {
        const int i = first + threadIdx.x;
        const bool mine = i < n && a.page_of[run + i] == wanted;
        const uint32_t votes = __ballot_sync(~0u, mine);
        __syncthreads();
        if (lane == 0) { s_before[warp] = __popc(votes); }
        __syncthreads();
        int at = filled + __popc(votes & ((1u << lane) - 1));
        for (int w = 0; w < (int) blockDim.x / 32; w++) {
            at += w < warp ? s_before[w] : 0;
            filled += s_before[w];
        }
        if (mine) {
            a.maps[out + at] = a.jobs[job.first + i / a.page_cells].cell + i % a.page_cells;
            s_score[at] = a.scores[run + i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.page_cells; i += blockDim.x) {
        if (i >= filled) { a.maps[out + i] = -1; }
        a.slot_scores[out + i] = i < filled ? s_score[i] : -1.0f;
    }
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (int i = 0; i < filled; i++) { sum += s_score[i]; }
        a.sums[(size_t) blockIdx.x * a.n_head + blockIdx.y] = sum;
    }
}

void kvq_launch_pack(const kvq_pack_args & a, cudaStream_t stream) {
    const dim3 grid(a.n, a.n_head);
    kvq_launch_early(keys_kernel, grid, a.page_cells, 0, stream, a);
    kvq_launch_early(rank_kernel, grid, a.page_cells, 0, stream, a);
    kvq_launch_early(slots_kernel, grid, MAX_CELLS, 0, stream, a);
}

// ---------------------------------------------------------------- rows

// a warp a row; strides are multiples of 16
static __global__ void gather_kernel(const __grid_constant__ kvq_gather_args a) {
    early_wait();
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= a.n_rows) { return; }
    const int cell = a.maps[blockIdx.y][row], page = cell / a.page_cells - a.first;
    const uint16_t * x = cell < 0 || page < 0 || page >= a.n_frames ? nullptr : a.frames[page];
    if (x) { x += (size_t) (row / a.page_cells * a.page_cells + cell % a.page_cells) * a.stride; }
    uint16_t * to = a.tiles[blockIdx.y] + (size_t) row * a.stride;
    for (int i = threadIdx.x % 32 * 8; i < a.stride; i += 32 * 8) {
        *(uint4 *) (to + i) = x ? *(const uint4 *) (x + i) : make_uint4(0, 0, 0, 0);
    }
}

void kvq_launch_gather(const kvq_gather_args & a, int n, cudaStream_t stream) {
    kvq_launch_early(gather_kernel, dim3((a.n_rows + 7) / 8, n), 256, 0, stream, a);
}

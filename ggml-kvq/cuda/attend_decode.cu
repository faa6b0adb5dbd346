// Which attention the decode kernels take, and how it is shared among blocks (attend_decode.cuh).
#include "attend.cuh"

#include <array>
#include <map>
#include <mutex>

static constexpr int CELLS = 64, WARPS = 4, COLUMNS = 8, MAX_ROW_BLOCKS = 4, SHORT_CELLS = 32;

// n = 2^k: k, else -1
static int log2_of(int n) {
    int k = 0;
    while (n > 1 && n % 2 == 0) {
        n /= 2;
        k++;
    }
    return n == 1 ? k : -1;
}

bool kvq_decode_fits(kvq_attend_args & a, int n_streams) {
    bool fits = a.mask_stride_token % 2 == 0 && a.mask_stride_head % 2 == 0 && a.q_stride_token % 4 == 0 && a.q_stride_head % 4 == 0;
    for (int i = 0; i < n_streams; i++) {
        fits = fits && (uintptr_t) a.stream[i].mask % 4 == 0 && (uintptr_t) a.stream[i].q % 16 == 0;
    }
    const bool codes = a.k.np != 0, lattice = a.k.type == KVQ_TYPE_LATTICE;
    a.halves_log2  = log2_of(a.page_cells / 32);
    a.k_group_log2 = codes ? log2_of(a.k.group) : 0;
    a.v_group_log2 = codes ? log2_of(a.v.group) : 0;
    a.k_parts_log2 = !codes || a.k.group % CELLS == 0 ? 0 : a.k.group % 32 == 0 ? 1 : 2;
    a.fine         = codes && a.k.type == KVQ_TYPE_AFFINE && a.k_parts_log2 == 2 && a.v_group_log2 == 4 && a.k.bits == a.v.bits;
    if (a.k.type == KVQ_TYPE_MIXED) {
        a.halves_log2 = 0;
        a.hi_steps    = (a.km.n_hi + CELLS - 1) / CELLS;
        a.page_steps  = a.hi_steps + (a.km.n_cells - a.km.n_hi + CELLS - 1) / CELLS;
        for (const kvq_affine_geometry & g : a.km.part) { fits = fits && g.scale <= 1; }
    }
    fits = fits && a.k.type == a.v.type && a.k.head_size == a.v.head_size && (a.k.head_size == 64 || a.k.head_size == 128) && a.halves_log2 >= 0;
    if (codes) {
        fits = fits && a.k.bits >= 1 && a.v.bits >= 1 && a.k_group_log2 >= 4 && a.v_group_log2 >= 4 && a.k.scale == a.v.scale;
    }
    if (lattice) {
        fits = fits && a.k.group == 2 && a.v.group == 2;
    }
    return fits && kvq_decode_row_blocks(a) <= MAX_ROW_BLOCKS;
}

int kvq_decode_row_blocks(const kvq_attend_args & a) { return ((a.n_rows << row_columns_log2(a)) + COLUMNS - 1) / COLUMNS; }

bool kvq_decode_means(const kvq_attend_args & a) { return a.k.type == KVQ_TYPE_LATTICE && (a.k.bits == a.v.bits || (a.k.bits == 2 && a.v.bits == 1)); }

int kvq_decode_max_splits(const kvq_attend_args & a) {
    const int n_units = a.k.type == KVQ_TYPE_MIXED ? a.n_pages * a.page_steps : (a.n_pages * a.page_cells + CELLS - 1) / CELLS;
    return (n_units + WARPS - 1) / WARPS;
}

bool kvq_decode_short(kvq_attend_args & a, int n_streams, int n_sm) {
    const int n_splits = (a.n_pages * a.page_cells + SHORT_CELLS * WARPS - 1) / (SHORT_CELLS * WARPS);
    const bool kernel = a.k.type == KVQ_TYPE_LATTICE ? a.k.bits >= 2 && a.v.bits >= 2 && !a.waves : a.k.type != KVQ_TYPE_MIXED;
    a.is_short = a.n_q == 1 && kernel && !a.stream[0].lse && a.v_group_log2 != 4 && n_splits * kvq_decode_row_blocks(a) * a.n_head_kv * n_streams <= n_sm; // a block for each multiprocessor
    a.n_splits = a.is_short ? n_splits : a.n_splits;
    return a.is_short;
}

static void launch(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    if (a.is_short && !occupancy && a.k.type == KVQ_TYPE_LATTICE) {
        (a.k.head_size == 128 ? kvq_launch_short_lattice_128 : kvq_launch_short_lattice_64)(a, n_streams, stream);
    } else if (a.is_short && !occupancy) {
        (a.k.head_size == 128 ? kvq_launch_short_128 : kvq_launch_short_64)(a, n_streams, stream);
    } else if (a.k.type == KVQ_TYPE_MIXED) {
        (a.k.head_size == 128 ? kvq_launch_decode_mixed_128 : kvq_launch_decode_mixed_64)(a, n_streams, stream, occupancy);
    } else if (a.waves) {
        (a.k.head_size == 128 ? kvq_launch_decode_means_128 : kvq_launch_decode_means_64)(a, n_streams, stream, occupancy);
    } else if (a.k.type == KVQ_TYPE_LATTICE) {
        (a.k.head_size == 128 ? kvq_launch_decode_lattice_128 : kvq_launch_decode_lattice_64)(a, n_streams, stream, occupancy);
    } else if (a.fine) {
        (a.k.head_size == 128 ? kvq_launch_decode_fine_128 : kvq_launch_decode_fine_64)(a, n_streams, stream, occupancy);
    } else {
        (a.k.head_size == 128 ? kvq_launch_decode_128 : kvq_launch_decode_64)(a, n_streams, stream, occupancy);
    }
}

int kvq_decode_occupancy(const kvq_attend_args & a) {
    static std::mutex mutex;
    static std::map<std::array<int, 14>, int> known;
    int device = 0, blocks = 1;
    cudaGetDevice(&device);
    std::lock_guard<std::mutex> lock(mutex);
    const auto at = known.insert({ { device, a.k.type, a.k.head_size, a.k.bits, a.v.bits, a.k.scale, a.v.scale, a.k_parts_log2, a.v.group,
        a.km.part[0].bits, a.km.part[1].bits, a.page_cells, a.map_stride != 0, a.waves != nullptr }, 0 }).first;
    if (!at->second) {
        launch(a, 1, nullptr, &blocks);
        at->second = blocks > 0 ? blocks : 1;
    }
    return at->second;
}

void kvq_launch_decode_attention(const kvq_attend_args & a, int n_streams, cudaStream_t stream) { launch(a, n_streams, stream, nullptr); }

// Which attention the decode kernels take, and how it is shared among blocks (attend_decode.cuh).
#include "base/settings.h"
#include "cuda/walk/seen.cuh"

#include <array>
#include <map>
#include <mutex>

static constexpr int CELLS = 64, COLUMNS = 8, MAX_ROW_BLOCKS = 4, SHORT_CELLS = 32, SLICE = 128, MAX_SLICES = 4,
                     BYTES = 4, BYTES_ROWS = 5; // of `fine`: of up to 4 rows, of more
// Sums of fewer blocks are added by the last of them: one launch less, and few to read.
static constexpr int MIN_APART = 8;

// n = 2^k: k, else -1
static int log2_of(int n) {
    int k = 0;
    while (n > 1 && n % 2 == 0) {
        n /= 2;
        k++;
    }
    return n == 1 ? k : -1;
}

// ---------------------------------------------------------------- the table of kernels

struct kernels {
    kvq_decode_launch *of_64, *of_128, *wide;
};

static const kernels DECODE = { kvq_launch_decode_64, kvq_launch_decode_128, kvq_launch_decode_wide };
static const kernels FINE = { kvq_launch_decode_fine_64, kvq_launch_decode_fine_128, kvq_launch_decode_fine_wide };
static const kernels IN_BYTES = { kvq_launch_decode_bytes_64, kvq_launch_decode_bytes_128,
    kvq_launch_decode_bytes_wide };
static const kernels IN_BYTES_TABLES = { kvq_launch_bytes_tables_64, kvq_launch_bytes_tables_128, nullptr };
static const kernels IN_BYTES_TABLES_ROWS = { kvq_launch_bytes_tables_rows_64, kvq_launch_bytes_tables_rows_128,
    nullptr };
static const kernels IN_BYTES_ROWS = { kvq_launch_bytes_rows_64, kvq_launch_bytes_rows_128,
    kvq_launch_bytes_rows_wide };
static const kernels LATTICES = { kvq_launch_decode_lattice_64, kvq_launch_decode_lattice_128,
    kvq_launch_decode_lattice_wide };
static const kernels MEANS = { kvq_launch_decode_means_64, kvq_launch_decode_means_128, kvq_launch_decode_means_wide };
static const kernels SPLIT = { kvq_launch_decode_split_64, kvq_launch_decode_split_128, kvq_launch_decode_split_wide };
static const kernels MIXED = { kvq_launch_decode_mixed_64, kvq_launch_decode_mixed_128, kvq_launch_decode_mixed_wide };
static const kernels SHORT = { kvq_launch_short_64, kvq_launch_short_128, kvq_launch_short_wide };
static const kernels SHORT_LATTICE = { kvq_launch_short_lattice_64, kvq_launch_short_lattice_128,
    kvq_launch_short_lattice_wide };

static const kernels SHORT_MIXED = { kvq_launch_short_mixed_64, kvq_launch_short_mixed_128,
    kvq_launch_short_mixed_wide };

static const kernels SHORT_MEANS = { kvq_launch_short_means_64, kvq_launch_short_means_128,
    kvq_launch_short_means_wide };

static const kernels SHORT_SPLIT = { kvq_launch_short_split_64, kvq_launch_short_split_128,
    kvq_launch_short_split_wide };

static const kernels LOGITS_SPLIT = { kvq_launch_far_split_64, kvq_launch_far_split_128, kvq_launch_far_split_wide };
static const kernels LOGITS = { kvq_launch_far_logits_64, kvq_launch_far_logits_128, kvq_launch_far_logits_wide };
static const kernels VALUES = { kvq_launch_far_values_64, kvq_launch_far_values_128, kvq_launch_far_values_wide };
static const kernels AHEAD_BYTES = { kvq_launch_bytes_ahead_64, kvq_launch_bytes_ahead_128,
    kvq_launch_bytes_ahead_wide };
static const kernels AHEAD = { kvq_launch_far_ahead_64, kvq_launch_far_ahead_128, kvq_launch_far_ahead_wide };

// lattices whose 8-bit products take points from tables (decode_bytes_tables.cuh)
static bool is_tabled(const kvq_attend_args & a) {
    return a.k.type == KVQ_TYPE_LATTICE && (a.k.split || a.k.bits != 2 || a.v.bits != 2);
}

// is there a kernel of slices for these bits?
static bool is_wide_pair(const kvq_attend_args & a, bool is_short) {
#define KVQ_PAIR(K, V) || (a.k.bits == K && a.v.bits == V)
#define KVQ_TRIPLE(F, K, V) || (a.k_fast.bits == F && a.k.bits == K && a.v.bits == V)
    if (a.k.type == KVQ_TYPE_LATTICE && is_short) { return false KVQ_WIDE_SHORT_LATTICE(KVQ_PAIR); }
    return a.k.type == KVQ_TYPE_F16 || a.k.type == KVQ_TYPE_MIXED || (false KVQ_WIDE_BITS(KVQ_PAIR));
}

static bool is_means_pair(const kvq_attend_args & a) { return false KVQ_MEANS_BITS(KVQ_PAIR); }
static bool is_short_means_pair(const kvq_attend_args & a) { return false KVQ_SHORT_MEANS_BITS(KVQ_PAIR); }
static bool is_bytes_pair(const kvq_attend_args & a) {
    if (is_tabled(a)) {
        const bool split = false KVQ_BYTES_SPLIT_BITS(KVQ_TRIPLE), whole = false KVQ_BYTES_TABLE_BITS(KVQ_PAIR);
        return !a.wide && !a.part && (a.k.split ? split : whole);
    }
    if (a.n_rows > COLUMNS / 2) { return false KVQ_BYTES_ROWS_BITS(KVQ_PAIR); }
    if (a.wide) { return false KVQ_WIDE_BYTES_BITS(KVQ_PAIR); }
    return false KVQ_BYTES_BITS(KVQ_PAIR);
}
static bool is_ahead_pair(const kvq_attend_args & a) { return false KVQ_AHEAD_BITS(KVQ_PAIR); }
static bool is_fine_pair(const kvq_attend_args & a) { return false KVQ_FINE_BITS(KVQ_PAIR); }
// of split keys, always of pages that lack their means
static bool is_split_triple(const kvq_attend_args & a) { return false KVQ_SPLIT_BITS(KVQ_TRIPLE); }
#undef KVQ_PAIR
#undef KVQ_TRIPLE
bool kvq_decode_split_keys(const kvq_attend_args & a) {
#define KVQ_KEYS(F, K) || (a.k_fast.bits == F && a.k.bits == K)
    return false KVQ_SPLIT_KEY_BITS(KVQ_KEYS);
#undef KVQ_KEYS
}

static kvq_decode_launch * kernel_of(const kvq_attend_args & a, bool is_short) {
    const bool lattice = a.k.type == KVQ_TYPE_LATTICE;
    if (!is_short && a.fine == 3) { return kvq_launch_decode_fine_32; }
    const kernels & t = a.part == 3  ? (a.fine == BYTES ? AHEAD_BYTES : AHEAD)
        : a.part == 2                ? VALUES
        : a.part == 1                ? (a.k.split ? LOGITS_SPLIT : LOGITS)
        : a.k.split && is_short      ? SHORT_SPLIT
        : a.fine == BYTES_ROWS       ? (is_tabled(a) ? IN_BYTES_TABLES_ROWS : IN_BYTES_ROWS)
        : a.k.split                  ? (a.fine == BYTES ? IN_BYTES_TABLES : SPLIT)
        : a.k.type == KVQ_TYPE_MIXED ? (is_short ? SHORT_MIXED : MIXED)
        : is_short                   ? (a.waves          ? SHORT_MEANS
                                               : lattice ? SHORT_LATTICE
                                                         : SHORT)
        : a.fine == BYTES            ? (is_tabled(a) ? IN_BYTES_TABLES : IN_BYTES)
        : a.waves                    ? MEANS
        : lattice                    ? LATTICES
        : a.fine                     ? FINE
                                     : DECODE;
    return a.wide ? t.wide : a.k.head_size == 128 ? t.of_128 : t.of_64;
}

// Blocks that a multiprocessor holds, 0: there is no room for one; warps of a block; its bytes of shared memory.
static std::array<int, 3> occupancy_of(const kvq_attend_args & a, bool is_short) {
    static std::mutex mutex;
    static std::map<std::array<int, 28>, std::array<int, 3>> known;
    int device = 0;
    cudaGetDevice(&device);
    std::lock_guard<std::mutex> lock(mutex);
    const auto at =
        known
            .insert({ { device, a.k.type, a.k.head_size, a.k.bits, a.v.bits, a.k.scale, a.v.scale, a.k_parts_log2,
                          a.v_group_log2, a.km.part[0].bits, a.km.part[1].bits, a.km.part[0].n_cells,
                          a.km.part[0].scale, a.vm.part[0].scale, a.page_cells, a.map_stride != 0, a.waves != nullptr,
                          a.fine, a.wide, is_short, a.one_team, a.max_shared, a.max_shared_sm, a.part, a.k.split,
                          a.k.split ? a.k_fast.bits : 0, a.far_row_k, a.far_row_v },
                { -1, 0, 0 } })
            .first;
    if (at->second[0] < 0) {
        int found[3] = { 0, 4, 0 };
        kernel_of(a, is_short)(a, 1, nullptr, found);
        cudaGetLastError();
        at->second = { found[0], found[1], found[2] };
    }
    return at->second;
}

// ---------------------------------------------------------------- which attention they take

// steps of mixed pages, of n cells each
static void put_mixed_steps(kvq_attend_args & a, int n) {
    a.hi_steps = (a.km.n_hi + n - 1) / n;
    a.page_steps = a.hi_steps + (a.km.n_cells - a.km.n_hi + n - 1) / n;
}

bool kvq_decode_fits(kvq_attend_args & a, int n_streams) {
    bool fits = a.mask_stride_token % 2 == 0 && a.mask_stride_head % 2 == 0 && a.q_stride_token % 4 == 0 &&
        a.q_stride_head % 4 == 0;
    for (int i = 0; i < n_streams; i++) {
        fits = fits && (uintptr_t) a.stream[i].mask % 4 == 0 && (uintptr_t) a.stream[i].q % 16 == 0;
    }
    const int D = a.k.head_size;
    // whole_v: one group of values
    // of the parts, values are not read with keys
    const bool codes = a.k.np != 0, lattice = a.k.type == KVQ_TYPE_LATTICE, whole_v = a.v.group >= a.v.head_size;
    a.wide = D != 64 && D != 128;
    a.slices_log2 = D <= SLICE ? 0 : D <= 2 * SLICE ? 1 : 2;
    a.halves_log2 = log2_of(a.page_cells / 32);
    a.k_group_log2 = codes ? log2_of(a.k.group) : 0;
    a.v_group_log2 = codes ? (whole_v && a.wide ? 7 : log2_of(a.v.group)) : 0;
    a.v_slices_log2 = codes && whole_v ? MAX_SLICES : 0;
    if (a.wide && a.v_group_log2 > 7) {
        a.v_slices_log2 = a.v_group_log2 - 7;
        a.v_group_log2 = 7;
    }
    a.v_groups = codes ? (D + a.v.group - 1) / a.v.group : 0;
    a.k_parts_log2 = !codes || a.part == 2 || a.k.group % CELLS == 0 ? 0 : a.k.group % 32 == 0 ? 1 : 2;
    a.fine = codes && !a.part && a.k.type == KVQ_TYPE_AFFINE && a.k_parts_log2 == 2 && a.v_group_log2 == 4 &&
        a.k.bits == a.v.bits;
    // scales of 32 cells in columns of their own leave room for 4 rows in a block
    const bool of_32 = codes && a.wide && a.k.type == KVQ_TYPE_AFFINE && a.k_parts_log2 == 1 && a.v_group_log2 == 5;
    if (of_32 && !a.part && !a.k.scale && !a.v.scale && is_fine_pair(a) && a.n_rows > COLUMNS / 2) { a.fine = 3; }
    // scales of lattice pages come by words of 4 bytes
    const bool in_words = a.n_head_kv * a.k.nb_params % 4 == 0 && a.n_head_kv * a.v.nb_params % 4 == 0;
    const bool in_bytes =
        lattice ? in_words : codes && a.k.type == KVQ_TYPE_AFFINE && a.k_parts_log2 == 0 && a.v_group_log2 >= 6;
    const bool many = a.n_rows > COLUMNS / 2;
    if (in_bytes && (!a.part || (a.part == 3 && !many)) && !a.map_stride && is_bytes_pair(a) &&
        kvq_setting_on(kvq_setting::CUDA_BYTES, true)) {
        a.fine = many ? BYTES_ROWS : BYTES;
    }
    if (a.k.type == KVQ_TYPE_MIXED) {
        a.halves_log2 = 0;
        put_mixed_steps(a, CELLS);
        for (const kvq_affine_geometry & g : a.km.part) { fits = fits && g.scale <= 1; }
    }
    // no slice is empty: there are 1, 2 or 4 of them
    fits = fits && a.k.type == a.v.type && D == a.v.head_size && D <= SLICE * MAX_SLICES &&
        (D <= 2 * SLICE || D > 3 * SLICE) && (!a.wide || D % 16 == 0) && a.halves_log2 >= 0;
    if (codes) {
        fits = fits && a.k.bits >= 1 && a.v.bits >= 1 && a.k_group_log2 >= 4 && a.v_group_log2 >= 4 &&
            a.k.scale == a.v.scale;
    }
    if (lattice) { fits = fits && a.k.group == 2 && a.v.group == 2; }
    if (a.part == 3) {
        fits = fits && (codes || lattice) && !a.k.split && is_ahead_pair(a);
    } else if (a.k.split) {
        fits = fits && (a.part == 2 || (a.part == 1 ? kvq_decode_split_keys(a) : is_split_triple(a)));
    } else {
        fits = fits && (!a.wide || a.part || is_wide_pair(a, false) || (a.waves && is_means_pair(a)));
    }
    const int blocks = kvq_decode_row_blocks(a);
    a.listed = a.listed && blocks <= KVQ_SEEN_BLOCKS && (a.list_few || blocks > MAX_ROW_BLOCKS);
    // many rows of long heads too: tiles decode a page for every 64 rows, and there are no tiles beyond 256 channels
    if (!fits || (blocks > MAX_ROW_BLOCKS && !a.listed && D <= SLICE && !a.part)) { return false; }
    std::array<int, 3> room = occupancy_of(a, false);
    if (!room[0] && a.fine >= 3) { // these need a little more shared memory
        a.fine = 0;
        room = occupancy_of(a, false);
    }
    if (!room[0] && !a.wide && (a.part || a.k.split || is_wide_pair(a, false))) { // slices go into smaller blocks
        a.wide = 1;
        room = occupancy_of(a, false);
    }
    a.occupancy = room[0];
    a.n_warps = room[1];
    a.nb_shared = room[2];
    return room[0] > 0;
}

int kvq_decode_row_blocks(const kvq_attend_args & a) {
    return ((a.n_rows << row_columns_log2(a)) + COLUMNS - 1) / COLUMNS;
}

// called with what kvq_decode_fits set
bool kvq_decode_means(const kvq_attend_args & a) {
    if (a.k.type != KVQ_TYPE_LATTICE) { return false; }
    if (a.part == 1) { return !a.k.split || kvq_decode_split_keys(a); }
    return a.k.split ? is_split_triple(a) : is_means_pair(a);
}

// teams of warps (decode_stage.cuh) that share the cells of a block
static int teams_of(const kvq_attend_args & a) { return a.n_warps >> a.slices_log2; }

int kvq_decode_max_splits(const kvq_attend_args & a) {
    const int n_units =
        a.k.type == KVQ_TYPE_MIXED ? a.n_pages * a.page_steps : (a.n_pages * a.page_cells + CELLS - 1) / CELLS;
    return (n_units + teams_of(a) - 1) / teams_of(a);
}

static bool is_apart(const kvq_attend_args & a) { return !a.is_short && !a.part && !a.work && a.n_splits >= MIN_APART; }

int kvq_decode_open_parts(const kvq_attend_args & a) {
    const bool lattice = a.wide && !a.fine && a.k.type == KVQ_TYPE_LATTICE && !a.k.split,
               kernel = a.fine == BYTES || a.fine == BYTES_ROWS || a.fine == 3 || lattice;
    const int n_units = (a.n_pages * a.page_cells + CELLS - 1) / CELLS;
    return kernel && !a.map_stride && is_apart(a) && n_units >= 2 * OPEN_PARTS && a.n_splits * teams_of(a) >= OPEN_PARTS
        ? OPEN_PARTS
        : 0;
}

int kvq_decode_picking(const kvq_attend_args & a, int room) {
    constexpr int AT_ONCE = 16; // picks (decode_picked.cuh)
    const int tokens = a.here_rows ? 1 : std::min((COLUMNS - 2) / a.gqa + 2, a.n_q);
    return std::min((tokens * a.top + AT_ONCE - 1) / AT_ONCE, std::max(1, std::min(8, room / 4)));
}

// Mixed pages: a warp for every 32 cells, as long as all of them run at once.
static bool is_short_mixed(kvq_attend_args & a, int n_streams, int n_sm) {
    const std::array<int, 3> room = occupancy_of(a, true);
    put_mixed_steps(a, SHORT_CELLS);
    const int teams = room[1] >> a.slices_log2, n_splits = (a.n_pages * a.page_steps + teams - 1) / std::max(teams, 1);
    a.is_short =
        room[0] && !a.listed && n_splits * kvq_decode_row_blocks(a) * a.n_head_kv * n_streams <= n_sm * room[0];
    if (a.is_short) {
        a.n_splits = n_splits;
        a.n_warps = room[1];
    } else {
        put_mixed_steps(a, CELLS);
    }
    return a.is_short;
}

bool kvq_decode_short(kvq_attend_args & a, int n_streams, int n_sm) {
    a.is_short = false;
    if (a.k.type == KVQ_TYPE_MIXED) { return is_short_mixed(a, n_streams, n_sm); }
    bool kernel = a.k.split            ? is_split_triple(a)
        : a.waves                      ? is_short_means_pair(a)
        : a.k.type == KVQ_TYPE_LATTICE ? a.k.bits >= 2 && a.v.bits >= 2
                                       : true;
    kernel = kernel && a.n_q == 1 && !a.stream[0].lse && (!a.wide || a.k.split || is_wide_pair(a, true));
    if (!kernel) { return false; }
    const int fine = a.fine;
    a.fine = 0; // their columns are the usual ones
    const std::array<int, 3> room = occupancy_of(a, true);
    const int cells = SHORT_CELLS * (room[1] >> a.slices_log2),
              n_splits = (a.n_pages * a.page_cells + cells - 1) / cells;
    // a block for each multiprocessor
    a.is_short = room[0] && n_splits * kvq_decode_row_blocks(a) * a.n_head_kv * n_streams <= n_sm;
    if (a.is_short) {
        a.n_splits = n_splits;
        a.n_warps = room[1];
    } else {
        a.fine = fine;
    }
    return a.is_short;
}

void kvq_launch_decode_attention(const kvq_attend_args & a, int n_streams, cudaStream_t stream) {
    kvq_attend_args b = a;
    b.apart = is_apart(a);
    kernel_of(b, b.is_short)(b, n_streams, stream, nullptr);
    if (b.apart) {
        const bool in_bytes = b.fine == BYTES || b.fine == BYTES_ROWS;
        kvq_launch_decode_merge(b, in_bytes && b.k.type == KVQ_TYPE_LATTICE, n_streams, stream);
    }
}

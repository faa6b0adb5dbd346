// Attention over pages in device memory: the arguments of kvq_attn, all pointers (pages too) on the device.
#pragma once

#include "cuda/mixed.cuh"

constexpr int KVQ_ATTEND_STREAMS = 32; // of one launch
// Parts of open cells (decode_open.cuh): of teams by their last units, then of those that have the first ones instead.
constexpr int OPEN_LAST = 7, OPEN_FIRST = 2, OPEN_PARTS = OPEN_LAST + OPEN_FIRST;
constexpr int OPEN_TURNS = 1; // in which such teams have no other units

struct kvq_attend_args {
    kvq_affine_geometry k, v; // type f16: only head_size, stride, n_cells
    int n_q, n_head, n_head_kv, gqa, n_rows, n_pages, page_cells, n_kv, n_splits, n_head_log2;
    float scale, max_bias, softcap, m0, m1; // m0, m1: log2 of the slopes' bases
    int64_t q_stride_token, q_stride_head, mask_stride_token, mask_stride_head, dst_stride_token, dst_stride_head;
    // decode: groups of key scales within 64 cells, pages of 32 cells, groups; bytes in a stage of shared memory,
    // of 8-bit parameters in f16
    int k_parts_log2, halves_log2, k_group_log2, v_group_log2;
    int stage_v_params, stage_raw_k, stage_raw_v, stage_bytes, stage_wide;
    int page_steps, hi_steps; // mixed pages: steps of 64 cells of a page, and of its salient cells
    int in_order;             // the kernel before this one writes pages: no early start
    // WIDE decode kernels (decode_stage.cuh): slices of a head; of values: all groups, and slices that share one
    // n_warps: of a block, fewer where shared memory is short; occupancy: blocks of a multiprocessor
    int slices_log2, v_groups, v_slices_log2, wide, n_warps, occupancy, nb_shared;
    int max_shared, max_shared_sm; // bytes that a block and a multiprocessor may have
    float * partial;      // [stream][head kv][row][split, open part][head size v + 4]: o, m, l, l that lacks means
    uint32_t * tickets;   // decode: blocks that are done, of each (stream, head kv, block of rows); 0 between launches
    bool apart, one_team; // decode: sums of blocks are added by a kernel of their own (attend_merge.cu); blocks of one
                          // team, for tests
    short n_open;         // decode: parts of open cells at the ends of the cache, behind splits (decode_open.cuh)
    // short caches: one warp has 32 cells, and rows of this step are taken from where the graph left them
    bool is_short;
    int n_new; // rows that the kernel writes into their pages
    struct {
        uint16_t * const * to;
        const float * rows;
        size_t row_stride, head_stride;
        const int32_t * pos; // NULL: rows carry no positions
    } fresh[2];
    // the output lies where those rows do: blocks that have taken theirs, 0 before the launch; else NULL
    unsigned long long * n_taken;
    int n_takers;
    const float * sinks;
    union {
        kvq_mixed_geometry km;      // of mixed pages
        kvq_affine_geometry k_fast; // of split keys: the fast half, n_parts 0: its channels are zero
    };
    union {
        kvq_mixed_geometry vm;
        // Of keys with an order, by channel of a block: the head's channel and what undoes its gain. Keys in one block
        // have gains alone, and channel NULL. Both NULL: keys have no order.
        struct {
            const uint16_t * channel;
            const float * back;
        } sorted;
    };
    int map_stride; // of the maps of pages, from one KV head to the next
    // decode, several tokens of one cache: blocks of rows walk the pages that they see (seen.cuh). NULL: all pages
    const int32_t * work;
    int n_work;
    bool listed, list_few; // the caller can list them: more blocks of rows fit; it does so where few rows fit anyway
    // Decode: which family of kernels reads this. 0: attend_decode.cuh. 1, 3: groups of 16, of 32, in keys and values
    // (decode_fine.cuh). 4: up to 4 rows in 8-bit products, 5: more rows (attend_bytes.cuh)
    int fine;
    // decode over sealed lattice pages that lack their means (decode_means.cuh); waves NULL: their means are in them
    const float *k_mean, *v_mean;          // [head kv][head size]
    const float *rotary_high, *rotary_low; // kvq_rotary
    const uint16_t * waves; // f16 [128][head size]: cos and sin of the pairs, then by pairs of rows (device_rows.cu)
    int n_pairs, neox;
    // A part of an attention that picks cells (attend_decode.cuh): which one, 0: all at once; slots of a row of
    // logits, base 2, masked and capped, [head kv][row][slot]. Of values, the first n_picking splits read the far rows
    // of picked cells (decode_picked.cuh), `top` of a token and KV head, or `top` kept ones of a KV head.
    int part, n_logits, n_picking, top, far_format;
    int far_row_k, far_row_v; // bytes
    int here_rows,
        n_picked_words; // kept cells (far_buffer.h): where rows begin, 0: no cell is kept; words of a KV head
    // lse: as in kvq_attn, not of short caches
    struct {
        const float * q;
        const __half * mask;
        float * dst;
        const kvq_page * pages;
        float * lse;
        const int32_t * positions;
        float *logits, *tops;  // tops: [head kv][row][split][largest logit, sum of exponentials over it]
        const int32_t * picks; // [token][head kv][top], -1: no cell; part 3: of the step before, for every token
        union {                // far rows of keys, by page; part 3: a kvq_far_buffer
            const void * const * k_rows;
            const uint8_t * here;
        };
        union { // and of values; part 3: bit by bit the slots of picked cells, [head kv][n_picked_words]
            const void * const * v_rows;
            const uint32_t * picked;
        };
    } stream[KVQ_ATTEND_STREAMS];
};

static_assert(sizeof(kvq_attend_args) < 4096, "kernel arguments are limited to 4 KiB");

// log2 of the columns of a decode kernel that one row takes
static __host__ __device__ __forceinline__ int row_columns_log2(const kvq_attend_args & a) {
    return a.fine ? 0 : a.k_parts_log2;
}

// Row r of a KV head: query token r / gqa, query head kvh*gqa + r % gqa.
static __device__ __forceinline__ int row_token(const kvq_attend_args & a, int r) { return a.n_q == 1 ? 0 : r / a.gqa; }
static __device__ __forceinline__ int row_head(const kvq_attend_args & a, int kvh, int r) {
    return kvh * a.gqa + (a.n_q == 1 ? r : r % a.gqa);
}

static __device__ __forceinline__ float alibi_slope(const kvq_attend_args & a, int h) {
    return a.max_bias <= 0.0f
        ? 1.0f
        : exp2f(h < a.n_head_log2 ? a.m0 * (float) (h + 1) : a.m1 * (float) (2 * (h - a.n_head_log2) + 1));
}

static __device__ __forceinline__ size_t partial_at(
    const kvq_attend_args & a, int stream, int kvh, int row, int split) {
    return ((((size_t) stream * a.n_head_kv + kvh) * a.n_rows + row) * (a.n_splits + a.n_open) + split) *
        (a.v.head_size + 4);
}

// d += a b: 16 rows x 16 x 8 columns, f16 in, f32 out
static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ uint32_t pack_half2(float x, float y) {
    const __half2 h = __floats2half2_rn(x, y);
    return *(const uint32_t *) &h;
}

// Decode kernels for heads of 64 and 128 channels are made for every pair of bits of keys and values; those for
// other heads (slices of 128, decode_stage.cuh) for these pairs, X(keys, values). Short caches of lattice pages
// have them from 2 bits on.
#define KVQ_WIDE_BITS(X) X(1, 1) X(2, 1) X(2, 2) X(3, 2) X(3, 3) X(4, 2) X(4, 4)
#define KVQ_WIDE_SHORT_LATTICE(X) X(2, 2) X(3, 2) X(3, 3) X(4, 2) X(4, 4)
#define KVQ_SHORT_MEANS_BITS(X) X(2, 2) X(3, 2) X(3, 3) X(4, 4)  // short caches of pages that lack their means
#define KVQ_FINE_BITS(X) X(1, 1) X(2, 1) X(2, 2) X(3, 3) X(4, 4) // groups of 32 in both, with more than 4 query rows
#define KVQ_MEANS_BITS(X) X(1, 1) X(2, 1) X(2, 2) X(3, 2) X(3, 3) X(4, 4) // of pages that lack their means, every head
#define KVQ_AHEAD_BITS(X) X(1, 1) X(2, 1) X(2, 2) // where cells were picked by the step before, every head
#define KVQ_BYTES_BITS(X)                                                                                              \
    X(1, 1) X(2, 1) X(2, 2) X(3, 2) X(3, 3) X(4, 2) X(4, 4)            // in 8-bit products, heads of 64 and 128
#define KVQ_BYTES_TABLE_BITS(X) X(2, 1) X(3, 2) X(3, 3) X(4, 4)        // and of lattices, but for 2/2
#define KVQ_WIDE_BYTES_BITS(X) X(1, 1) X(2, 1) X(2, 2) X(4, 2) X(4, 4) // and other heads
#define KVQ_BYTES_ROWS_BITS(X) X(1, 1) X(2, 1) X(2, 2) X(4, 4)         // more than 4 rows, every head
// Split keys, always of pages that lack their means: X(bits of the fast half, of the slow half, of values). Where
// attention picks cells, X(fast half, slow half).
#define KVQ_SPLIT_VALUES(X, F, K) X(F, K, 1) X(F, K, 2) X(F, K, 3) X(F, K, 4)
#define KVQ_SPLIT_SORTED(X, V) V(X, 1, 2) V(X, 1, 3) V(X, 1, 4) V(X, 2, 4)
#define KVQ_SPLIT_BITS(X) X(0, 2, 1) X(0, 2, 2) X(0, 4, 2) X(0, 4, 3) X(4, 4, 4) KVQ_SPLIT_SORTED(X, KVQ_SPLIT_VALUES)
#define KVQ_BYTES_SPLIT_BITS(X) KVQ_SPLIT_SORTED(X, KVQ_SPLIT_VALUES) // in 8-bit products, heads of 64 and 128
#define KVQ_SPLIT_KEY_BITS(X) X(0, 1) X(0, 2) X(0, 4) X(1, 2) X(1, 3) X(1, 4) X(2, 4) X(4, 4)

// Rows of blocks of n_warps x 16; n_splits and partial are set by the caller. False: no kernel for this head size.
bool kvq_launch_tiles(const kvq_attend_args & a, int n_streams, int n_warps, cudaStream_t stream); // attend_tiles.cu
bool kvq_launch_tiles_mixed(const kvq_attend_args & a, int n_streams, int n_warps, cudaStream_t stream);
// Few rows over many cells. fits: also sets what is derived for it. occupancy: blocks that a multiprocessor holds,
// 0: not one.
bool kvq_decode_fits(kvq_attend_args & a, int n_streams); // attend_decode.cu
int kvq_decode_row_blocks(const kvq_attend_args & a);     // blocks of one KV head and split
bool kvq_decode_means(const kvq_attend_args & a);         // may these pages lack their means?
bool kvq_decode_split_keys(const kvq_attend_args & a);    // is there a kernel that makes logits of these split keys?
int kvq_decode_max_splits(const kvq_attend_args & a);
int kvq_decode_open_parts(const kvq_attend_args & a);        // n_open, once n_splits is known
int kvq_decode_picking(const kvq_attend_args & a, int room); // splits that read far rows; room: blocks of a KV head
bool kvq_decode_short(kvq_attend_args & a, int n_streams, int n_sm); // short enough? then n_splits is set
// needs partial and tickets
void kvq_launch_decode_attention(const kvq_attend_args & a, int n_streams, cudaStream_t stream);
// sums of a decode kernel's blocks; rotated: they are, and lack the means of values
void kvq_launch_decode_merge(const kvq_attend_args & a, bool rotated, int n_streams, cudaStream_t stream);
typedef void kvq_decode_launch(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy);
#define KVQ_LAUNCH(name, ...) kvq_decode_launch kvq_launch_##name;
#include "instances.inc"
#undef KVQ_LAUNCH
void kvq_launch_merge(
    const kvq_attend_args & a, int n_streams, cudaStream_t stream); // splits of tiles, and of rows (attend_rows.cu)
int kvq_tiles_head_size(int k, int v); // the smallest of the kernels' head sizes that holds both; 0: no kernel

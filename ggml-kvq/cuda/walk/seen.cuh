// Several tokens over one cache: what each sees. Sequences of a unified cache lie between each other's cells, and
// most tokens see few pages. The tokens of a block of rows (attend.cuh) walk the pages that one of them sees, and a
// decode kernel's blocks are dealt out by their number: one long sequence beside many short ones fills the device.
//
// The table (kvq_attend_args::work), in device memory:
//   u32 work[n_work]         of a block of each KV head: rows << 24 | split << 12 | splits; splits 0: no work
//   then of each block of rows: i32 n, i32 page[n_pages]: of the page table, rising; n of them hold
#pragma once

#include "attend.cuh"

constexpr int KVQ_SEEN_TOKENS = 64, KVQ_SEEN_BLOCKS = 64; // of rows
constexpr int KVQ_SEEN_CELLS = 2048;                      // shorter caches are walked as a whole
constexpr int KVQ_SEEN_SPLITS = 4095;

struct kvq_seen_args {
    const kvq_page * pages;
    const __half * mask;
    int64_t mask_stride_token;
    int n_pages, page_cells, n_kv, n_rows, gqa, per_row; // per_row: rows of a block
    int n_blocks, n_work, n_slots, most;                 // n_slots: blocks of a KV head that run at once; most: splits
    int units2, n_teams;                                 // steps of two pages, and those that a block makes at once
    uint32_t * work;
};

inline size_t kvq_seen_words(int n_work, int n_blocks, int n_pages) {
    return (size_t) n_work + (size_t) n_blocks * ((size_t) n_pages + 1);
}

void kvq_launch_seen(const kvq_seen_args & a, cudaStream_t stream); // seen.cu

// What a block works on: one of n_splits parts of the pages that some rows of a KV head see.
struct block_share {
    int rows, kvh, split, n_splits, n_pages;
    const int32_t * list; // NULL: all pages of the table
    __device__ __forceinline__ int page(int i) const { return list ? __ldg(list + i) : i; }
};

template <bool MAY_LIST> static __device__ __forceinline__ block_share share_of(const kvq_attend_args & a) {
    if (!MAY_LIST || !a.work) {
        return { (int) blockIdx.y / a.n_head_kv, (int) blockIdx.y % a.n_head_kv, (int) blockIdx.x, a.n_splits,
            a.n_pages, nullptr };
    }
    const uint32_t x = __ldg((const uint32_t *) a.work + blockIdx.x);
    const int32_t * seen = a.work + a.n_work + (size_t) (x >> 24) * (a.n_pages + 1);
    return { (int) (x >> 24), (int) blockIdx.y, (int) (x >> 12 & 4095), (int) (x & 4095), __ldg(seen), seen + 1 };
}

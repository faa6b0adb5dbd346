// How much attention open cells get from probe rows (policy/probe.h). A row is a query head of a probe token; rows
// of a KV head are its query heads of consecutive probe tokens. Their log-sum-exp comes from our attention or, where
// another kernel attended, from one more pass over keys as plain rows; the sums of a cell from the open pages alone.
#pragma once

#include "cuda/mixed.cuh"

#include "engine/device.h"

static __device__ __forceinline__ const int32_t * probe_tokens(const kvq_probe_table * t) {
    return (const int32_t *) (t + 1);
}
static __device__ __forceinline__ const kvq_score_page * probe_pages(const kvq_probe_table * t) {
    return (const kvq_score_page *) (probe_tokens(t) + t->max_rows);
}

struct kvq_score_args {
    const kvq_probe_table * table; // which tokens and pages
    const float * q;
    const __half * mask;
    float * lse; // [n_q][n_head]
    const float * sinks;
    const uint16_t * keys; // plain rows [n_kv][n_head_kv][head_size]
    float2 * partial;      // m, l of [split][n_head_kv][rows]; then sum, rows of [share][n_head_kv][page][page_cells]
    int64_t q_stride_token, q_stride_head, mask_stride_token, mask_stride_head;
    // n_rows: of a KV head
    int n_head, n_head_kv, gqa, head_size, stride, page_cells, n_kv, n_splits, n_rows, n_head_log2;
    int map_stride;
    int mask_align; // so many neighbours of a row are one load, from a multiple of them on: 8, 2 or 1
    float scale, softcap, max_bias, m0, m1;
};

// blocks for the rows of a KV head and a split, warps of each, and blocks of a multiprocessor; 0: no kernel for this
// head size
struct kvq_lse_shape {
    int n_blocks, n_warps, at_once;
};
kvq_lse_shape kvq_lse_shape_of(int head_size, int n_rows);
// needs keys, partial, n_splits; false: no kernel for this head size
bool kvq_launch_lse(const kvq_score_args & a, cudaStream_t stream);
// Shares of the rows, for about n_blocks blocks; of more than one, partial has room for so many words.
int kvq_score_shares(const kvq_score_args & a, int max_pages, int n_blocks);
size_t kvq_score_words(const kvq_score_args & a, int max_pages, int n_shares);
bool kvq_launch_scores(const kvq_score_args & a, int max_pages, int n_shares, cudaStream_t stream);

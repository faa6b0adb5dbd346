// Values that follow from keys alone (policy/chain.h, fold): a query applies W_v once, to sums of the rows in 8 bits,
//
// (of cells with coordinates: W the basis of values, z = sum_t p_t c_t, coords.cuh)
//   sum_t p_t v_t = W_k z_k + W_p z_p + sum_t p_t (decoded_t + mean)      z = sum_t p_t x_t, of keys of both layers
//
// over cells whose values are sealed. p comes from logits in memory (attend_decode.cuh, LOGITS) and the rows'
// log-sum-exp; decoded values are another kernel's (VALUES).
#pragma once

#include "cuda/walk/attend.cuh"

constexpr int FOLD_ROWS = 32;      // query rows of a block
constexpr int FOLD_CHANNELS = 256; // channels of a block
constexpr int FOLD_CELLS = 640;    // cells whose probabilities a block has at a time, at most

struct kvq_fold_args {
    int n_ids; // query rows: [head kv][row of it], rows as in kvq_attend_args
    int n_rows, n_q, gqa, n_head, size_v, n_tiles, n_groups, page_cells, n_logits;
    int n_cells, n_chunks, chunk, at_once; // chunk: cells of a block, at_once: of them at a time; multiples of 64
    int stride;                            // of rows in 8 bits: channels, and bytes
    int n_in;                              // inputs: 2, or 1
    bool fresh;                            // rows are made by a kernel of this call
    int64_t dst_stride_token, dst_stride_head;
    const float * mean;         // of values, [head kv][size_v]
    const uint8_t * weights[2]; // kvq_order_weights8: of this layer's keys, of the layer's before
    struct {
        const float *logits, *lse; // [id][n_logits], base 2; [token][head], natural
        const kvq_page * pages;
        const int8_t * x[2];
        const float * s[2];
        float *partial, *z; // [chunk][id][n_in * stride], [id][n_in * stride]
        float * sealed;     // [chunk][id]: sums of probabilities
        float * dst;
    } stream[KVQ_ATTEND_STREAMS];
};
static_assert(sizeof(kvq_fold_args) < 4096, "kernel arguments are limited to 4 KiB");

static inline int kvq_fold_blocks(const kvq_fold_args & a) { // of a chunk and stream
    return a.n_in * ((a.stride + FOLD_CHANNELS - 1) / FOLD_CHANNELS) * ((a.n_ids + FOLD_ROWS - 1) / FOLD_ROWS);
}
void kvq_launch_fold(const kvq_fold_args & a, int n_streams, cudaStream_t stream); // adds to dst

// Attention of prompts over plain f16 rows (attend_rows.cu). A layer's pages are written once as rows, slot after
// slot; then every block of query rows reads them, which costs no decoding. Each KV head may hold its own cells: the
// cell of a slot comes from a list.
#pragma once

#include "cuda/walk/attend.cuh"

#include <algorithm>

constexpr int KVQ_ROWS_TILE = 64; // slots that are multiplied at a time
// query rows of a block of heads of D channels
static constexpr __host__ __device__ int kvq_rows_block(int D) { return D <= 256 ? 128 : 64; }

struct kvq_rows_args {
    const uint16_t *k, *v; // [n_tiles*64][n_head_kv][head size]
    int32_t * cells;       // [n_head_kv][n_tiles*64], -1: empty slot
    // [row block][n_kv]: 0 no query row of the block sees the cell, 1 all do and the mask adds 0, 2
    // else
    uint8_t * seen_cells;
    uint8_t * seen_tiles;    // [row block][n_head_kv][n_tiles]: the same of 64 slots
    int n_tiles, block_rows; // kvq_rows_block
};

// Blocks that a multiprocessor gets. One at a time fits above 128 channels, and a second wave costs a third more.
// Blocks of 64 rows are uneven, since of new tokens each sees others: two waves are faster.
static inline int kvq_rows_at_once(const kvq_attend_args & a) {
    const int d = std::max(a.k.head_size, a.v.head_size);
    return d <= 128 || kvq_rows_block(d) < 128 ? 2 : 1;
}

static inline int kvq_rows_blocks(const kvq_attend_args & a) {
    const int n = kvq_rows_block(std::max(a.k.head_size, a.v.head_size));
    return (a.n_rows + n - 1) / n;
}

// False: no kernel for this head size, or masks differ by head. One stream, a.stream[0]; n_splits and partial as of
// tiles.
bool kvq_rows_fit(const kvq_attend_args & a);
void kvq_launch_rows_attention(const kvq_attend_args & a, const kvq_rows_args & r, cudaStream_t stream);

// The second tier on the device (kvq_far): scores of sealed cells from logits of near keys, the best of them per query
// token and KV head, and their far rows, read one by one from the host's memory.
#pragma once

#include "cuda/walk/attend.cuh"

constexpr int FAR_BINS = 1536;  // of scores: 32 in a power of two, from 2^-40 on
constexpr int FAR_CLOSE = 1024; // cells of the last bin that are put in order at once
constexpr int FAR_HELD = 2048;  // keys that the last block has in shared memory
constexpr int FAR_MOST = 4096;  // cells that are picked, at most
constexpr int FAR_CHUNK = 2048; // slots of a block
constexpr int FAR_FEW = 32;     // cells of a bin that are not worth a closer look
static_assert(
    FAR_BINS * sizeof(uint32_t) + (FAR_HELD + FAR_CLOSE) * 8 + FAR_MOST * 4 < 47 << 10, "48 KB are always there");

// what blocks of a query token and KV head share, zeros between calls
struct kvq_far_sums {
    uint32_t n_left, n_done; // cells that blocks have left, and blocks that have
};

struct kvq_far_args {
    // before: tokens of the call before these; n_near: pages; ahead: what is picked is for the next call; warm_up:
    // blocks start while logits are made
    int before, ahead, warm_up, n_q, n_rows, gqa, n_head_kv, n_near, page_cells, n_kv, n_logits, top, n_splits;
    const float * sinks;
    struct {
        const kvq_page * pages;
        const void *const *k_rows, *const *v_rows;
        const float * tops; // of near logits, [head kv][row][n_splits][largest, sum]
        float * logits;
        unsigned long long * keys; // [token][head kv][n_near * page_cells]
        kvq_far_sums * sums;       // [token][head kv]
        int32_t * picks;           // [token][head kv][top]
        unsigned long long * counts;
    } stream[KVQ_ATTEND_STREAMS];
};
static_assert(sizeof(kvq_far_args) < 4000, "kernel arguments are limited to 4 KiB");

void kvq_launch_far_pick(const kvq_far_args & a, int n_streams, cudaStream_t stream);

// Far rows that are kept (engine/far_buffer.h). In the buffer, 8 channels of a row lie as in the second tier.
struct kvq_far_kept {
    // n_q: tokens of the call, whose picks stay from the token `from` on; anew: no cell was kept before; n_cells: those
    // at and behind it are gone; nb: bytes of a row; n_rows, n_logits: of near logits
    int from, n_q, anew, n_rows, n_head_kv, top, n_kept, n_cells, page_cells, nb_key, nb_value, n_words, n_logits;
    size_t bits, rows; // of the buffer
    struct {
        const void *const *k_rows, *const *v_rows;
        const int32_t * picks; // [token][head kv][top]
        int32_t * kept;        // [head kv][n_kept]
        uint8_t * buffer;
        float * logits; // [head kv][row][n_logits]
        unsigned long long * counts;
    } stream[KVQ_ATTEND_STREAMS];
};
// cells of a stream that were written again
struct kvq_far_renew {
    static constexpr int MOST = 32;
    int32_t * kept;        // [head kv][n_kept]
    const int32_t * slots; // the same
    uint32_t * bits;       // [head kv][n_words]
    uint8_t * rows;
    const void *const *k_rows, *const *v_rows;
    int n_head_kv, n_kept, n_words, page_cells, nb_row, n; // nb_row: bytes of a key, and of a value
    struct {
        int from, to;
        bool again; // rows come again; else they are kept no more
    } cells[MOST];
};
void kvq_launch_far_renew(const kvq_far_renew & a, cudaStream_t stream);
// near logits of kept cells: minus infinity, for attention in parts
void kvq_launch_far_hide(const kvq_far_kept & a, int n_streams, cudaStream_t stream);
// behind picks and attention of a call: counts what the first token finds, and keeps what the last ones pick
void kvq_launch_far_keep(const kvq_far_kept & a, int n_streams, cudaStream_t stream);

// Plain f16 rows (kvq_row_place) of a lane's sealed cells that have far rows: those of the second tier
struct kvq_far_overlay {
    int format, head_size, n_cells, n_head, n_pages;
    size_t nb_row;
    const kvq_page * pages;
    kvq_row_place to;
    // the rows of the first n_staged pages, each of them nb_page bytes behind the one before, are here already
    const uint8_t * staged;
    size_t nb_page;
    int n_staged;
};
void kvq_launch_far_overlay(const kvq_far_overlay & a, cudaStream_t stream);

// Rows of tiles as far rows and back
struct kvq_far_jobs {
    static constexpr int MOST = 120;
    int format, head_size, stride, n_rows; // n_rows: of a page
    size_t nb_row;
    struct {
        uint16_t * tile;
        void * rows;
    } job[MOST];
};
void kvq_launch_far_put(const kvq_far_jobs & a, int n, cudaStream_t stream);
void kvq_launch_far_get(const kvq_far_jobs & a, int n, cudaStream_t stream);

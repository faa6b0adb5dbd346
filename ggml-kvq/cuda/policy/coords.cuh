// Attention of few rows over keys and values with coordinates (types/basis.h). What coordinates say of keys is added to
// the logits that another kernel makes of blocks and means (attend_decode.cuh, LOGITS):
//   logit += scale q . R_pos (basis_k c_t)
// and what they say of values is applied once a query, to sums of coordinates (fold.cuh):
//   sum_t p_t v_t = basis_v (sum_t p_t c_t) + sum_t p_t (decoded_t + mean)
#pragma once

#include "cuda/coords.cuh"
#include "cuda/walk/attend.cuh"

constexpr int KVQ_COORD_ROWS = 8;   // query rows of a KV head, at most
constexpr int KVQ_COORD_GROUPS = 8; // of 32 coordinates

// Is there a kernel for coordinates of such heads, all of whose channels turn?
static inline bool kvq_reads_coords(const kvq_codec & keys, int n_head_kv) {
    return (keys.head_size == 64 || keys.head_size == 128) && keys.coords * n_head_kv - 2 <= 32 * KVQ_COORD_GROUPS;
}
static inline int kvq_coord_stride(const kvq_basis & b) { return (b.n + 31) / 32 * 32; }

struct kvq_coord_read_args {
    int n_pages, page_cells, n_head_kv, head_size, n_rows, n_q, gqa, n_logits;
    int stride; // of a cell's coordinates: bytes, a multiple of 32
    int chunk;  // pages of a block
    int64_t q_stride_token, q_stride_head;
    float scale;            // of logits, base 2
    kvq_device_basis basis; // of keys
    kvq_device_rotary rotary;
    const uint8_t * weights; // of keys, kvq_order_basis
    const uint16_t * waves;  // as in kvq_attend_args
    struct {
        const kvq_page * pages;
        const int32_t * positions;
        const float * q;
        float * logits; // [head kv][row][n_logits]
        int8_t * x;     // [page][cell][stride]: 2 c - 15; zeros where keys are not sealed
        float * s;      // their scales
    } stream[KVQ_ATTEND_STREAMS];
};
static_assert(sizeof(kvq_coord_read_args) < 4096, "kernel arguments are limited to 4 KiB");

// As kvq_order_weights8. apart: of each head the channels 0, 2, 4, .., then 1, 3, 5, ..
std::vector<uint8_t> kvq_order_basis(const kvq_basis & b, int head_size, bool apart);
void kvq_launch_unpack_coords(const kvq_coord_read_args & a, int n_streams, cudaStream_t stream);
void kvq_launch_coord_logits(const kvq_coord_read_args & a, int n_streams, cudaStream_t stream); // adds

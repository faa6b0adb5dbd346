// Rows into open pages, open pages into blocks and back. Addresses are kernel arguments, so no table is uploaded.
#pragma once

#include "base/constants.h"
#include "cuda/turn.cuh"

constexpr int KVQ_SEAL_JOBS = 40; // 4 KiB of kernel arguments
constexpr int KVQ_SEAL_ROWS = 320;
constexpr int KVQ_TURN_JOBS = 52;
constexpr int KVQ_COORD_JOBS = 96;
// A page's rows of a head lie in shared memory where a block may have as much, beside these bytes at most.
constexpr size_t KVQ_SEAL_STATIC = 5 << 10;

struct kvq_seal_job {
    uint16_t * tile; // [head][cell][stride]
    const uint8_t * shared;
    uint8_t * codes;
    uint8_t * params;
    uint8_t valid[32]; // bit per cell
};
struct kvq_seal_jobs {
    kvq_seal_job job[KVQ_SEAL_JOBS];
};
struct kvq_seal_rows {
    uint16_t * to[KVQ_SEAL_ROWS];
};
struct kvq_seal_positions {
    int32_t pos[KVQ_SEAL_ROWS];
}; // that the rows carry
struct kvq_row_job { // rows of a step that is replayed: addresses in device memory
    uint16_t * const * to;
    const int32_t * pos; // NULL: rows carry no positions
    const float * rows;
    size_t row_stride, head_stride;
    int n, width, head_size;
};
constexpr int KVQ_ROW_JOBS = 2;
struct kvq_row_jobs {
    kvq_row_job job[KVQ_ROW_JOBS];
};

// What a recorded step's row jobs find: addresses, and positions beside the first n_at. As kernel arguments, which
// take less of a token's time than a copy from the host.
struct kvq_row_table {
    static constexpr int MOST = 320;
    uint16_t ** to;
    int32_t * at;
    int n, n_at;
    uint16_t * row[MOST];
    int32_t position[MOST];
};

// mean: [head][head_size]; pred: [cell][pred_stride] of all heads; coords: of the page of keys, NULL: it has none
struct kvq_turn_job {
    const uint16_t * from;
    uint16_t * to;
    const int32_t *positions, *sealed;
    const float *mean, *pred;
    kvq_device_order order;
    const uint8_t * coords;
};
struct kvq_turn_args {
    int head_size, stride, n_cells;
    kvq_device_rotary rotary;
    size_t pred_stride;
    kvq_device_basis basis;
    kvq_turn_job job[KVQ_TURN_JOBS];
};

// The coordinates of open tiles of keys; in: kvq_basis::in
struct kvq_coord_job {
    const uint16_t * tile;
    const int32_t * positions;
    uint8_t * coords;
};
struct kvq_coord_args {
    int n_head, head_size, stride, n_cells;
    kvq_device_rotary rotary;
    kvq_device_basis basis;
    const float *in, *mean;
    kvq_coord_job job[KVQ_COORD_JOBS];
};

void kvq_launch_take_coords(const kvq_coord_args & a, int n, cudaStream_t stream);
void kvq_launch_turn(const kvq_turn_args & a, int n, int n_head, bool back, cudaStream_t stream);
void kvq_launch_rows(const kvq_seal_rows & to, int n, int n_head, int head_size, size_t head_stride, const float * rows,
    size_t row_stride, cudaStream_t stream);
void kvq_launch_rows_with_positions(const kvq_seal_rows & to, const kvq_seal_positions & at, int n, int n_head,
    int head_size, size_t head_stride, const float * rows, size_t row_stride, cudaStream_t stream);
void kvq_launch_row_table(const kvq_row_table & table, cudaStream_t stream);
void kvq_launch_row_jobs(const kvq_row_jobs & jobs, int n_jobs, cudaStream_t stream);
// follows: the kernel before it is one of these, and this one reads no byte that it writes
void kvq_launch_encode(const kvq_affine_geometry & g, const kvq_seal_jobs & jobs, int n, int n_head, int max_shared,
    bool follows, cudaStream_t stream);
void kvq_launch_decode(const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params, uint16_t * tile,
    int n_head, cudaStream_t stream);
// The same for lattice blocks: seal_lattice.cu, expand_lattice.cu. squares: kvq_lattice_squares on the device
void kvq_launch_encode_lattice(const kvq_affine_geometry & g, const int32_t * squares, const kvq_seal_jobs & jobs,
    int n, int n_head, cudaStream_t stream);
void kvq_launch_decode_lattice(const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params,
    uint16_t * tile, int n_head, cudaStream_t stream);
void kvq_launch_expand_lattice(const kvq_affine_geometry & g, const kvq_page * pages, int n_pages, int n_head,
    const kvq_row_place & to, const kvq_turn & turn, cudaStream_t stream);
// The same for split keys; fast: of the fast half, n_parts 0: it has no block. expand_split.cu
void kvq_launch_expand_split(const kvq_affine_geometry & g, const kvq_affine_geometry & fast, const kvq_page * pages,
    int n_pages, int n_head, const kvq_row_place & to, const kvq_turn & turn, cudaStream_t stream);
// Sealed pages as open ones: tiles [page][head][cell][stride] of keys, of values, and a table of pages that names them.
struct kvq_unfold_args {
    kvq_affine_geometry g[2];
    kvq_turn turn[2];
    const kvq_page * pages;
    kvq_page * table;
    uint16_t * tiles[2];
    int first_role;
};
void kvq_launch_unfold_split( // keys alone
    const kvq_unfold_args & a, const kvq_affine_geometry & fast, int n_pages, int n_head, cudaStream_t stream);
void kvq_launch_unfold(
    const kvq_unfold_args & a, int first_role, int n_roles, int n_pages, int n_head, cudaStream_t stream);

// A lane of a predicted layer (policy/chain.h): rows in 8 bits for the layer above and, where tiles are wanted, sealed
// pages as open ones.
struct kvq_chain_args {
    kvq_affine_geometry g;
    kvq_turn turn;
    const kvq_page * pages;
    int n_head, width;
    const float * pred; // [page][cell][pred_stride], NULL: rows are not predicted
    size_t pred_stride;
    int8_t * row; // [page][cell][row_stride]; NULL: such rows are not made
    float * scale;
    size_t row_stride;
    kvq_page * table;
    uint16_t * tiles;
    bool whole; // the table's pages have the other lane as it is stored
};
void kvq_launch_chain(const kvq_chain_args & a, int n_pages, cudaStream_t stream);

// A lane as f16 rows [cell][head][head_size]: what a kernel for plain caches reads. Empty pages become zeros.
// expand.cu; rounds once where the reference rounds twice, which attention does not see.
void kvq_launch_expand(const kvq_affine_geometry & g, const kvq_page * pages, int n_pages, int n_head,
    const kvq_row_place & to, cudaStream_t stream);

// Which cells get most attention: the salient set of a page, cells sorted into pages of slots, and rows into these.
// Scores of a page: f32 sums [n_head][page_cells], then i32 seen [page_cells] (policy/probe.h).
#pragma once

#include "cuda/mixed.cuh"

struct kvq_seal_jobs;

constexpr int KVQ_CHOOSE_JOBS = 40;
struct kvq_choose_job {
    const float * sums; // NULL: never observed
    uint8_t * params;
    int nb_params;                // of a head
    bool chosen;                  // the set is there; of a wrong size, it becomes the first cells
    uint8_t valid[32], stale[32]; // stale: sums of these cells do not count
};
struct kvq_choose_jobs {
    kvq_choose_job job[KVQ_CHOOSE_JOBS];
};

// seal_mixed.cu
void kvq_launch_choose(
    const kvq_choose_jobs & jobs, int n, int n_head, int page_cells, int n_hi, bool normalise, cudaStream_t stream);
// Pages of two lanes: n_first of the first, then of the second. Sets of salient cells have their size.
void kvq_launch_encode_mixed(const kvq_mixed_geometry & first, const kvq_mixed_geometry & second, int n_first,
    const kvq_seal_jobs & jobs, int n, int n_head, int max_shared, cudaStream_t stream);
void kvq_launch_decode_mixed(const kvq_mixed_geometry & m, const uint8_t * codes, const uint8_t * params,
    uint16_t * tile, int n_head, cudaStream_t stream);
// expand_mixed.cu
void kvq_launch_expand_mixed(const kvq_mixed_geometry & m, const kvq_page * pages, int n_pages, int n_head,
    const kvq_row_place & to, cudaStream_t stream);

// select.cu
// kvq_pack_page (engine/engine.h)
struct kvq_pack_job {
    const float * sums;
    int32_t cell, first, n, sorted;
    uint8_t stale[32];
};
struct kvq_pack_args {
    const kvq_pack_job * jobs;
    const uint8_t * present; // [page][n_head][page_cells/8]
    float * sums;            // [page][n_head]
    int32_t * maps;          // [page][n_head][page_cells]
    float * slot_scores;     // likewise
    float * scores;          // [n_head][page][page_cells]: of cells
    uint32_t * keys;         // likewise: numbers that sort as cells do
    int32_t * page_of;       // likewise: the page of its run that a cell goes to
    int n, n_head, page_cells;
    bool normalise;
};
struct kvq_gather_args {
    uint16_t * const * tiles;
    const int32_t * const * maps;
    const uint16_t * const * frames;
    int first, n_frames, page_cells, n_rows, stride; // n_rows: of a tile
};
void kvq_launch_pack(const kvq_pack_args & a, cudaStream_t stream);
void kvq_launch_gather(const kvq_gather_args & a, int n, cudaStream_t stream);

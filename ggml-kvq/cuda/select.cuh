// Which cells get most attention: column sums of probe rows over open pages, the salient set of a page, and rows into the pages that
// keep them. Scores of a page: f32 sums [n_head][page_cells], then i32 seen [page_cells] (cache/saliency.h).
#pragma once

#include "mixed.cuh"

struct kvq_seal_jobs;

constexpr int KVQ_CHOOSE_JOBS = 40;
struct kvq_choose_job {
    const float * sums; // NULL: never observed
    uint8_t     * params;
    uint8_t valid[32], stale[32]; // stale: sums of these cells do not count
};
struct kvq_choose_jobs { kvq_choose_job job[KVQ_CHOOSE_JOBS]; };

void kvq_launch_choose(const kvq_choose_jobs & jobs, int n, int n_head, int page_cells, int n_hi, int nb_params, bool normalise, cudaStream_t stream); // seal_mixed.cu
void kvq_launch_encode_mixed(const kvq_mixed_geometry & m, const kvq_seal_jobs & jobs, int n, int n_head, cudaStream_t stream);
void kvq_launch_decode_mixed(const kvq_mixed_geometry & m, const uint8_t * codes, const uint8_t * params, uint16_t * tile, int n_head, cudaStream_t stream);
void kvq_launch_expand_mixed(const kvq_mixed_geometry & m, const kvq_page * pages, int n_pages, int n_head, const kvq_row_place & to, cudaStream_t stream); // expand_mixed.cu
void kvq_launch_gather(uint16_t * const * tiles, const uint16_t * const * from, int n, int n_rows, int stride, cudaStream_t stream); // n_rows: of a tile; select.cu

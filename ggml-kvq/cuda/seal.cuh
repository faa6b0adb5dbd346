// Rows into open pages, open pages into blocks and back. Addresses travel as kernel arguments: nothing is uploaded.
#pragma once

#include "common.cuh"

constexpr int KVQ_SEAL_JOBS = 40;  // 4 KiB of kernel arguments
constexpr int KVQ_SEAL_ROWS = 480;

struct kvq_seal_job {
    uint16_t      * tile; // [head][cell][stride]
    const uint8_t * shared;
    uint8_t       * codes;
    uint8_t       * params;
    uint8_t         valid[32]; // bit per cell
};
struct kvq_seal_jobs { kvq_seal_job job[KVQ_SEAL_JOBS]; };
struct kvq_seal_rows { uint16_t * to[KVQ_SEAL_ROWS]; };
struct kvq_row_job { // rows of a step that is replayed: addresses in device memory
    uint16_t * const * to;
    const float * rows;
    size_t row_stride, head_stride;
    int n, width, head_size;
};
constexpr int KVQ_ROW_JOBS = 2;
struct kvq_row_jobs { kvq_row_job job[KVQ_ROW_JOBS]; };

void kvq_launch_rows  (const kvq_seal_rows & to, int n, int n_head, int head_size, size_t head_stride, const float * rows, size_t row_stride, cudaStream_t stream);
void kvq_launch_row_jobs(const kvq_row_jobs & jobs, int n_jobs, cudaStream_t stream);
void kvq_launch_encode(const kvq_affine_geometry & g, const kvq_seal_jobs & jobs, int n, int n_head, cudaStream_t stream);
void kvq_launch_decode(const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params, uint16_t * tile, int n_head, cudaStream_t stream);
// The same for lattice blocks: seal_lattice.cu, expand_lattice.cu.
void kvq_launch_encode_lattice(const kvq_affine_geometry & g, const kvq_seal_jobs & jobs, int n, int n_head, cudaStream_t stream);
void kvq_launch_decode_lattice(const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params, uint16_t * tile, int n_head, cudaStream_t stream);
void kvq_launch_expand_lattice(const kvq_affine_geometry & g, const kvq_page * pages, int n_pages, int n_kv, int n_head, uint16_t * rows, cudaStream_t stream);

// Cells [0, n_kv) of a lane as f16 rows [cell][head][head_size]: what a kernel for plain caches reads. Empty pages become zeros.
// expand.cu; rounds once where the reference rounds twice, which attention does not see.
void kvq_launch_expand(const kvq_affine_geometry & g, const kvq_page * pages, int n_pages, int n_kv, int n_head, uint16_t * rows, cudaStream_t stream);

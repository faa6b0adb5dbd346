// The bytes of types/affine.cpp: same operations in the same order, each rounded (compiled without fused multiply-add).
#include "seal.cuh"
#include "seal_affine.cuh"

static_assert(sizeof(kvq_seal_jobs) + sizeof(kvq_affine_geometry) < 4000, "kernel arguments are limited to 4 KiB");
static_assert(sizeof(kvq_seal_rows) < 4000, "kernel arguments are limited to 4 KiB");
static_assert(sizeof(kvq_row_table) < 4000, "kernel arguments are limited to 4 KiB");

// ---------------------------------------------------------------- rows

// The kernel behind these reads page tables before it waits: it may start once what changed them is done.
static __global__ void rows_kernel(
    const kvq_seal_rows to, int head_size, size_t head_stride, const float * rows, size_t row_stride, int width) {
    early_wait();
    early_start();
    uint16_t * tile = to.to[blockIdx.x];
    const float * row = rows + blockIdx.x * row_stride;
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
        const int h = i / head_size;
        tile[h * head_stride + (i - h * head_size)] = f32_to_f16_bits(row[i]);
    }
}

// rows that carry their positions
static __global__ void rows_with_positions_kernel(const __grid_constant__ kvq_seal_rows to,
    const __grid_constant__ kvq_seal_positions at, int head_size, size_t head_stride, const float * rows,
    size_t row_stride, int width) {
    early_wait();
    early_start();
    uint16_t * tile = to.to[blockIdx.x];
    const float * row = rows + blockIdx.x * row_stride;
    const uint64_t tag = kvq_tag_bits(at.pos[blockIdx.x]);
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
        const int h = i / head_size;
        tile[h * head_stride + (i - h * head_size)] = kvq_tagged(f32_to_f16_bits(row[i]), tag, i);
    }
}

template <bool TAGGED> static __global__ void row_jobs_kernel(const kvq_row_jobs jobs) {
    early_start();
    early_wait();
    const kvq_row_job & j = jobs.job[blockIdx.z];
    const int i = 4 * (blockIdx.y * blockDim.x + threadIdx.x); // head sizes are multiples of 8
    if (blockIdx.x < j.n && i < j.width) {
        const int h = i / j.head_size;
        const float * x = j.rows + blockIdx.x * j.row_stride + i;
        uint16_t * to = j.to[blockIdx.x] + h * j.head_stride + (i - h * j.head_size);
        ushort4 y =
            make_ushort4(f32_to_f16_bits(x[0]), f32_to_f16_bits(x[1]), f32_to_f16_bits(x[2]), f32_to_f16_bits(x[3]));
        if (TAGGED && j.pos && i < KVQ_TAG_BITS) {
            const uint64_t tag = kvq_tag_bits(j.pos[blockIdx.x]);
            y = make_ushort4(kvq_tagged(y.x, tag, i), kvq_tagged(y.y, tag, i + 1), kvq_tagged(y.z, tag, i + 2),
                kvq_tagged(y.w, tag, i + 3));
        }
        *(ushort4 *) to = y;
    }
}

static __global__ void row_table_kernel(const __grid_constant__ kvq_row_table a) {
    const int i = threadIdx.x;
    early_wait();
    if (i < a.n) { a.to[i] = a.row[i]; }
    if (i < a.n_at) { a.at[i] = a.position[i]; }
}

void kvq_launch_row_table(const kvq_row_table & table, cudaStream_t stream) {
    kvq_launch_early(row_table_kernel, 1, kvq_row_table::MOST, 0, stream, table);
}

void kvq_launch_row_jobs(const kvq_row_jobs & jobs, int n_jobs, cudaStream_t stream) {
    int n = 0, width = 0;
    bool tagged = false;
    for (int i = 0; i < n_jobs; i++) {
        n = jobs.job[i].n > n ? jobs.job[i].n : n;
        width = jobs.job[i].width > width ? jobs.job[i].width : width;
        tagged = tagged || jobs.job[i].pos;
    }
    kvq_launch_early(tagged ? row_jobs_kernel<true> : row_jobs_kernel<false>, dim3(n, (width + 511) / 512, n_jobs), 128,
        0, stream, jobs);
}

void kvq_launch_rows(const kvq_seal_rows & to, int n, int n_head, int head_size, size_t head_stride, const float * rows,
    size_t row_stride, cudaStream_t stream) {
    const int width = n_head * head_size;
    kvq_launch_early(rows_kernel, dim3(n, (width + 1023) / 1024), 256, 0, stream, to, head_size, head_stride, rows,
        row_stride, width);
}

void kvq_launch_rows_with_positions(const kvq_seal_rows & to, const kvq_seal_positions & at, int n, int n_head,
    int head_size, size_t head_stride, const float * rows, size_t row_stride, cudaStream_t stream) {
    const int width = n_head * head_size;
    kvq_launch_early(rows_with_positions_kernel, dim3(n, (width + 1023) / 1024), 256, 0, stream, to, at, head_size,
        head_stride, rows, row_stride, width);
}

// ---------------------------------------------------------------- encode

struct tile_rows { // of one head
    const kvq_affine_geometry & g;
    const uint16_t * tile;
    const uint8_t * bits;
    __device__ __forceinline__ bool valid(int t) const { return bits[t / 8] >> t % 8 & 1; }
    __device__ __forceinline__ float value(int t, int c) const {
        return finite_or_zero(f16_bits_to_f32(tile[(size_t) t * g.stride + c]));
    }
};

struct staged_rows { // bits NULL: all cells hold something
    const uint16_t * rows;
    const uint8_t * bits;
    int step;
    __device__ __forceinline__ bool valid(int t) const { return !bits || (bits[t / 8] >> t % 8 & 1); }
    __device__ __forceinline__ float value(int t, int c) const { return f16_bits_to_f32(rows[t * step + c]); }
};

constexpr int THREADS = 512;

// follows: starts once all blocks of the kernel before it have begun, and ends after it.
template <bool STAGED>
static __global__ void __launch_bounds__(THREADS) encode_kernel(
    const __grid_constant__ kvq_affine_geometry g, const __grid_constant__ kvq_seal_jobs jobs, bool follows) {
    if (!follows) { early_wait(); }
    early_start();
    extern __shared__ float shared_memory[];
    const kvq_seal_job & job = jobs.job[blockIdx.x];
    const size_t h = blockIdx.y;
    const uint16_t * tile = job.tile + h * g.n_cells * g.stride;
    uint8_t *const codes = job.codes + h * g.nb_codes, *const params = job.params + h * g.nb_params;
    if constexpr (STAGED) {
        uint16_t * const rows = (uint16_t *) (shared_memory + 4 * g.np);
        stage_rows(tile, g.n_cells, g.stride, rows);
        bool all = true;
        for (int i = 0; i < g.n_cells / 8; i++) { all = all && job.valid[i] == 255; }
        __syncthreads();
        encode_block(g, staged_rows{ rows, all ? nullptr : job.valid, staged_step(g.stride) }, job.shared != nullptr,
            codes, params, shared_memory);
    } else {
        encode_block(g, tile_rows{ g, tile, job.valid }, job.shared != nullptr, codes, params, shared_memory);
    }
    if (follows) { early_wait(); }
}

void kvq_launch_encode(const kvq_affine_geometry & g, const kvq_seal_jobs & jobs, int n, int n_head, int max_shared,
    bool follows, cudaStream_t stream) {
    const size_t nb = 16 * (size_t) g.np, rows = 2 * (size_t) g.n_cells * staged_step(g.stride);
    const bool staged = nb + rows + KVQ_SEAL_STATIC <= (size_t) max_shared;
    static kvq_shared_limit limit[2];
    const auto kernel = staged ? encode_kernel<true> : encode_kernel<false>;
    limit[staged].raise(kernel, staged ? nb + rows : nb);
    kvq_launch_early(kernel, dim3(n, n_head), THREADS, staged ? nb + rows : nb, stream, g, jobs, follows);
}

// ---------------------------------------------------------------- decode

static __global__ void decode_kernel(
    const kvq_affine_geometry g, const uint8_t * codes, const uint8_t * params, uint16_t * tile) {
    const int h = blockIdx.x, t = blockIdx.y;
    for (int c = threadIdx.x; c < g.stride; c += blockDim.x) {
        tile[((size_t) h * g.n_cells + t) * g.stride + c] = c < g.head_size
            ? decode_at(g, codes + (size_t) h * g.nb_codes, params + (size_t) h * g.nb_params, t, c)
            : 0;
    }
}

void kvq_launch_decode(const kvq_affine_geometry & g, const uint8_t * codes, const uint8_t * params, uint16_t * tile,
    int n_head, cudaStream_t stream) {
    decode_kernel<<<dim3(n_head, g.n_cells), 128, 0, stream>>>(g, codes, params, tile);
}

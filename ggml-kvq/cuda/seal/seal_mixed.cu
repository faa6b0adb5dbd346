// Mixed pages (types/mixed.cpp): which cells are salient, then both parts as affine blocks.
#include "cuda/mixed.cuh"
#include "seal.cuh"
#include "seal_affine.cuh"
#include "cuda/policy/select.cuh"

#include <algorithm>

static_assert(sizeof(kvq_seal_jobs) + 2 * sizeof(kvq_mixed_geometry) < 4000, "kernel arguments are limited to 4 KiB");
static_assert(sizeof(kvq_choose_jobs) < 4000, "kernel arguments are limited to 4 KiB");

constexpr int MAX_CELLS = 256, MAX_CHANNELS = 512;

// ---------------------------------------------------------------- the salient set
// Block (page, head), thread = cell; its rank is the number of cells that come before it.

static __global__ void choose_kernel(
    const __grid_constant__ kvq_choose_jobs jobs, int page_cells, int n_hi, bool normalise) {
    early_wait();
    __shared__ float s_score[MAX_CELLS];
    __shared__ int s_in[MAX_CELLS];
    const kvq_choose_job & job = jobs.job[blockIdx.x];
    const int h = blockIdx.y, t = threadIdx.x;
    uint8_t * const set = job.params + (size_t) h * job.nb_params;
    const auto bit = [&](const uint8_t * bits) { return bits[t / 8] >> t % 8 & 1; };
    if (job.chosen && __syncthreads_count(bit(set)) == n_hi) { return; }
    float score = job.chosen ? 0.0f : -1.0f; // equal scores: the first cells
    if (!job.chosen && bit(job.valid)) {
        score = 0.0f;
        if (job.sums && !bit(job.stale)) {
            const int seen = ((const int32_t *) job.sums)[gridDim.y * page_cells + t];
            score = __fdiv_rn(job.sums[h * page_cells + t], normalise ? (float) max(seen, 1) : 1.0f);
        }
    }
    s_score[t] = score;
    __syncthreads();
    int rank = 0;
    for (int u = 0; u < page_cells; u++) { rank += s_score[u] > score || (s_score[u] == score && u < t); }
    s_in[t] = rank < n_hi;
    __syncthreads();
    if (t < page_cells / 8) {
        int byte = 0;
        for (int i = 0; i < 8; i++) { byte |= s_in[8 * t + i] << i; }
        set[t] = (uint8_t) byte;
    }
}

void kvq_launch_choose(
    const kvq_choose_jobs & jobs, int n, int n_head, int page_cells, int n_hi, bool normalise, cudaStream_t stream) {
    kvq_launch_early(choose_kernel, dim3(n, n_head), page_cells, 0, stream, jobs, page_cells, n_hi, normalise);
}

// ---------------------------------------------------------------- encode

// Rows of a part, of the page's tile or (STAGED) of shared memory, where values are normalised already.
template <bool STAGED> struct part_rows {
    const uint16_t * tile;
    const int * cells;     // of the part: 2 * the cell in the page, + 1 where it holds something
    const float * channel; // NULL: keys
    int step;
    __device__ __forceinline__ bool valid(int j) const { return cells[j] & 1; }
    __device__ __forceinline__ float value(int j, int c) const {
        const uint16_t x = tile[(cells[j] >> 1) * step + c];
        return STAGED ? f16_bits_to_f32(x) : finite_or_zero(f16_bits_to_f32(channel ? normalised(x, channel[c]) : x));
    }
    static __device__ __forceinline__ uint16_t normalised(uint16_t x, float by) {
        return f32_to_f16_bits(__fdiv_rn(f16_bits_to_f32(x), by));
    }
};

constexpr int THREADS = 1024;

// Of a layer's lanes, keys and values: the first n_first jobs have geometry m[0], those behind them m[1].
struct mixed_lanes {
    kvq_mixed_geometry m[2];
    int n_first, np; // np: parameters of a part at most
};

// Block (page, head, part): parts have cells of their own, and no part reads what another writes.
template <bool STAGED>
static __global__ void __launch_bounds__(THREADS)
    encode_mixed_kernel(const __grid_constant__ mixed_lanes lanes, const __grid_constant__ kvq_seal_jobs jobs) {
    early_wait();
    extern __shared__ float shared_memory[];
    __shared__ float s_channel[MAX_CHANNELS];
    __shared__ int s_cells[MAX_CELLS];
    const kvq_mixed_geometry & m = lanes.m[blockIdx.x >= lanes.n_first];
    const kvq_seal_job & job = jobs.job[blockIdx.x];
    const size_t h = blockIdx.y;
    const int part = blockIdx.z, n_cells = m.part[part].n_cells;
    if (n_cells == 0) { return; }
    const uint16_t * const tile = job.tile + h * m.n_cells * m.stride;
    uint16_t * const rows = (uint16_t *) (shared_memory + 4 * lanes.np);
    const int step = STAGED ? staged_step(m.stride) : m.stride;
    uint8_t *codes = job.codes + h * m.nb_codes, *set = job.params + h * m.nb_params;
    if constexpr (STAGED) { stage_rows(tile, m.n_cells, m.stride, rows); }
    for (int t = threadIdx.x; t < m.n_cells; t += blockDim.x) {
        const int place = mixed_place(set, t);
        if (place >> 8 == part) { s_cells[place & 255] = 2 * t + (job.valid[t / 8] >> t % 8 & 1); }
    }
    __syncthreads();
    const bool values = m.role == KVQ_ROLE_V;
    const int n_search = searchers(m.head_size), at_once = (int) blockDim.x / n_search;
    for (int c0 = 0; values && c0 < m.head_size; c0 += at_once) {
        const int c = min(c0 + (int) threadIdx.x / n_search, m.head_size - 1);
        float top = 0.0f;
#pragma unroll 8
        for (int t = (int) threadIdx.x % n_search; t < m.n_cells; t += n_search) {
            if (job.valid[t / 8] >> t % 8 & 1) {
                const float x = fabsf(f16_bits_to_f32((STAGED ? rows : tile)[t * step + c]));
                top = x <= 65504.0f && x > top ? x : top; // inf and nan carry no value
            }
        }
        for (int d = n_search / 2; d; d /= 2) { top = fmaxf(top, __shfl_xor_sync(~0u, top, d)); }
        if (threadIdx.x % n_search || c0 + (int) threadIdx.x / n_search >= m.head_size) { continue; }
        const uint8_t byte = (uint8_t) ((f32_to_f16_bits(top > 0.0f ? __fsqrt_rn(top) : 1.0f) + 64) >> 7);
        if (part == 0 || m.part[0].n_cells == 0) { set[m.channels + c] = byte; }
        s_channel[c] = mixed_channel(byte);
    }
    __syncthreads();
    if (STAGED && values) {
        for (int j = (int) threadIdx.x / 32; j < n_cells; j += THREADS / 32) {
            uint16_t * const row = rows + (s_cells[j] >> 1) * step;
            for (int c = (int) threadIdx.x % 32; c < m.head_size; c += 32) {
                row[c] = f32_to_f16_bits(
                    finite_or_zero(f16_bits_to_f32(part_rows<false>::normalised(row[c], s_channel[c]))));
            }
        }
        __syncthreads();
    }
    encode_block(m.part[part], part_rows<STAGED>{ STAGED ? rows : tile, s_cells, values ? s_channel : nullptr, step },
        false, codes + m.codes[part], set + m.params[part], shared_memory);
}

void kvq_launch_encode_mixed(const kvq_mixed_geometry & first, const kvq_mixed_geometry & second, int n_first,
    const kvq_seal_jobs & jobs, int n, int n_head, int max_shared, cudaStream_t stream) {
    mixed_lanes lanes = { { first, second }, n_first, 0 };
    size_t rows = 0;
    for (const kvq_mixed_geometry & m : lanes.m) {
        lanes.np = std::max({ lanes.np, m.part[0].np, m.part[1].np });
        rows = std::max(rows, 2 * (size_t) m.n_cells * staged_step(m.stride));
    }
    const size_t nb = 16 * (size_t) lanes.np;
    const bool staged = nb + rows + KVQ_SEAL_STATIC <= (size_t) max_shared;
    static kvq_shared_limit limit[2];
    const auto kernel = staged ? encode_mixed_kernel<true> : encode_mixed_kernel<false>;
    limit[staged].raise(kernel, staged ? nb + rows : nb);
    kvq_launch_early(kernel, dim3(n, n_head, 2), THREADS, staged ? nb + rows : nb, stream, lanes, jobs);
}

// ---------------------------------------------------------------- decode

static __global__ void decode_mixed_kernel(
    const kvq_mixed_geometry m, const uint8_t * codes, const uint8_t * params, uint16_t * tile) {
    const int h = blockIdx.x, t = blockIdx.y;
    codes += (size_t) h * m.nb_codes;
    params += (size_t) h * m.nb_params;
    const int place = mixed_place(params, t), i = place >> 8, j = place & 255;
    for (int c = threadIdx.x; c < m.stride; c += blockDim.x) {
        uint16_t x = 0;
        if (c < m.head_size && j < m.part[i].n_cells) {
            x = decode_at(m.part[i], codes + m.codes[i], params + m.params[i], j, c);
            if (m.role == KVQ_ROLE_V) {
                x = f32_to_f16_finite(f16_bits_to_f32(x) * mixed_channel(params[m.channels + c]));
            }
        }
        tile[((size_t) h * m.n_cells + t) * m.stride + c] = x;
    }
}

void kvq_launch_decode_mixed(const kvq_mixed_geometry & m, const uint8_t * codes, const uint8_t * params,
    uint16_t * tile, int n_head, cudaStream_t stream) {
    decode_mixed_kernel<<<dim3(n_head, m.n_cells), 128, 0, stream>>>(m, codes, params, tile);
}

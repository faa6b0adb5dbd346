// Online softmax (FlashAttention-2, arXiv 2307.08691, section 3) over f16 rows. A block = one KV head, 128 rows,
// one split of the slots; a warp has 32 rows, so that what it reads of shared memory feeds two products; 16 where
// heads are above 256 channels, for want of registers. Above 128 channels two warps share their rows: each has scores
// of half the slots, and output of half the channels; probabilities and maxima go through shared memory. Values are on
// their way while keys are multiplied, and the other way round. Tiles that no row sees are skipped. The mask is read
// only for tiles that some row sees in part.
#include "attend_rows.cuh"
#include "cuda/instructions.cuh"

constexpr int TILE = KVQ_ROWS_TILE;
template <int D> constexpr int products_of = D <= 256 ? 2 : 1; // that share what is read, of 16 rows each
static constexpr __host__ __device__ int sharers_of(int D) { return D <= 128 ? 1 : 2; } // warps that share rows
template <int D> constexpr int warps_of = kvq_rows_block(D) / (16 * products_of<D>) *sharers_of(D);
constexpr int P_STEP = TILE + 8; // of shared probabilities
constexpr float LOG2_E = 1.44269504f;

// ---------------------------------------------------------------- which slots are seen

static __global__ void cells_kernel(
    const __grid_constant__ kvq_attend_args a, const __grid_constant__ kvq_rows_args r) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, kvh = blockIdx.y, ip = i / a.page_cells,
              slot = i % a.page_cells;
    if (i >= r.n_tiles * TILE) { return; }
    int cell = -1;
    if (ip < a.n_pages && a.stream[0].pages[ip].n_slots) {
        const kvq_page & page = a.stream[0].pages[ip];
        cell = page.map ? page.map[kvh * a.map_stride + slot] : page.cell + slot;
    }
    r.cells[(size_t) kvh * r.n_tiles * TILE + i] = cell < a.n_kv ? cell : -1;
}

static __global__ void seen_cells_kernel(
    const __grid_constant__ kvq_attend_args a, const __grid_constant__ kvq_rows_args r) {
    const int cell = blockIdx.x * blockDim.x + threadIdx.x, rows0 = blockIdx.y * r.block_rows;
    if (cell >= a.n_kv) { return; }
    bool any = false, all = true;
    if (a.stream[0].mask) {
        const int t1 = row_token(a, min(rows0 + r.block_rows, a.n_rows) - 1);
#pragma unroll 8
        for (int t = row_token(a, rows0); t <= t1; t++) {
            const unsigned x = __half_as_ushort(a.stream[0].mask[t * a.mask_stride_token + cell]);
            any |= x != 0xfc00;
            all &= (x & 0x7fff) == 0;
        }
    }
    r.seen_cells[(size_t) blockIdx.y * a.n_kv + cell] = all ? 1 : any ? 2 : 0;
}

// A warp a tile; blockIdx.z: block of query rows. 0: its cells are seen by no row, 1: by all, 2: the mask is read.
static __global__ void seen_tiles_kernel(
    const __grid_constant__ kvq_attend_args a, const __grid_constant__ kvq_rows_args r) {
    const int tile = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32, kvh = blockIdx.y;
    if (tile >= r.n_tiles) { return; }
    int any = 0, not_all = 0;
    for (int i = lane; i < TILE; i += 32) {
        const int cell = r.cells[((size_t) kvh * r.n_tiles + tile) * TILE + i];
        const int seen = cell < 0 ? 0 : r.seen_cells[(size_t) blockIdx.z * a.n_kv + cell];
        any |= seen != 0;
        not_all |= seen != 1;
    }
    any = __any_sync(~0u, any);
    not_all = __any_sync(~0u, not_all);
    if (lane == 0) {
        r.seen_tiles[((size_t) blockIdx.z * a.n_head_kv + kvh) * r.n_tiles + tile] = (uint8_t) (!any ? 0
                : not_all                                                                            ? 2
                                                                                                     : 1);
    }
}

// ---------------------------------------------------------------- attention

static __device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
        : "r"(at));
}

// 64 rows of a KV head, row_step apart
template <int D>
static __device__ __forceinline__ void ask_rows(
    const uint16_t * rows, uint32_t row_step, int head_size, int tile, uint32_t to) {
    constexpr int PIECES = D / 8, THREADS = 32 * warps_of<D>; // pieces of a row
    static_assert(TILE * PIECES % THREADS == 0, "every thread asks for as many pieces");
    rows += (size_t) tile * TILE * row_step;
    const int t0 = threadIdx.x / PIECES, c0 = threadIdx.x % PIECES;
#pragma unroll
    for (int i = 0; i < TILE * PIECES / THREADS; i++) {
        const int j = i * THREADS + threadIdx.x;
        const int t = THREADS % PIECES ? j / PIECES : t0 + i * (THREADS / PIECES),
                  c = 8 * (THREADS % PIECES ? j % PIECES : c0);
        // beyond the head any value will do: queries are 0 there, and that part of the output is not stored
        copy16(to + 2 * (t * (D + 8) + c), rows + t * row_step + min(c, head_size - 8));
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Bytes of shared memory: queries, keys, values; of sharers probabilities, maxima, and sums of theirs in turn
static constexpr size_t nb_rows(int D) {
    return 2 * (size_t) (kvq_rows_block(D) + 2 * TILE) * (D + 8) +
        (sharers_of(D) > 1 ? (size_t) kvq_rows_block(D) * (2 * P_STEP + 4 * sharers_of(D)) : 0);
}

template <int D>
static __global__ void __launch_bounds__(32 * warps_of<D>, D <= 128 ? 2 : 1)
    rows_kernel(const __grid_constant__ kvq_attend_args a, const __grid_constant__ kvq_rows_args r) {
    extern __shared__ __align__(16) __half s_memory[];
    constexpr int STEP = D + 8, B = products_of<D>, WARPS = warps_of<D>; // STEP: keeps reads off equal banks
    constexpr int SHARE = sharers_of(D), SLOTS = TILE / SHARE, CHANNELS = D / SHARE, ROWS = kvq_rows_block(D);
    __half *const s_q = s_memory, *const s_k = s_q + ROWS * STEP, *const s_v = s_k + TILE * STEP,
                  *const s_p = s_v + TILE * STEP;
    float * const s_top = (float *) (s_p + ROWS * P_STEP);                      // [sharer][row]
    const int warp = threadIdx.x / 32 / SHARE, part = threadIdx.x / 32 % SHARE; // of rows, of slots and channels
    const int lane = threadIdx.x % 32, g = lane / 4, tig = lane % 4;
    const int row_block = blockIdx.x / a.n_splits, split = blockIdx.x % a.n_splits, kvh = blockIdx.y,
              rows0 = row_block * ROWS;
    const int tile0 = (int) ((int64_t) r.n_tiles * split / a.n_splits),
              tile1 = (int) ((int64_t) r.n_tiles * (split + 1) / a.n_splits);
    const uint8_t * const seen = r.seen_tiles + ((size_t) row_block * a.n_head_kv + kvh) * r.n_tiles;
    const int32_t * const cells = r.cells + (size_t) kvh * r.n_tiles * TILE;
    const auto next = [&](int t) {
        while (t < tile1 && !seen[t]) { t++; }
        return t;
    };
    // this thread's row i of 2B; rows behind the last repeat it and are not stored
    const auto in_block = [&](int i) { return warp * (16 * B) + i / 2 * 16 + g + i % 2 * 8; };
    const auto row_of = [&](int i) { return rows0 + in_block(i); };

    const auto ask = [&](bool value, int t) {
        const int head_size = value ? a.v.head_size : a.k.head_size;
        ask_rows<D>((value ? r.v : r.k) + kvh * head_size, a.n_head_kv * head_size, head_size, t,
            (uint32_t) __cvta_generic_to_shared(value ? s_v : s_k));
    };

    int tile = next(tile0);
    if (tile < tile1) { ask(false, tile); }
    for (int i = threadIdx.x; i < ROWS * (D / 4); i += 32 * WARPS) {
        const int row = min(rows0 + i / (D / 4), a.n_rows - 1), c = i % (D / 4) * 4;
        const float * p =
            a.stream[0].q + row_token(a, row) * a.q_stride_token + row_head(a, kvh, row) * a.q_stride_head + c;
        *(uint2 *) (s_q + i / (D / 4) * STEP + c) = c < a.k.head_size
            ? make_uint2(pack_half2(p[0] * a.scale, p[1] * a.scale), pack_half2(p[2] * a.scale, p[3] * a.scale))
            : make_uint2(0, 0);
    }
    const uint32_t q_row =
        (uint32_t) __cvta_generic_to_shared(s_q + (warp * 16 * B + lane % 16) * STEP + lane / 16 * 8);
    const uint32_t k_row =
        (uint32_t) __cvta_generic_to_shared(s_k + (part * SLOTS + lane % 8 + lane / 16 * 8) * STEP + lane / 8 % 2 * 8);
    const uint32_t v_row = (uint32_t) __cvta_generic_to_shared(
        s_v + (lane % 8 + lane / 8 % 2 * 8) * STEP + part * CHANNELS + lane / 16 * 8);
    const uint32_t p_row =
        (uint32_t) __cvta_generic_to_shared(s_p + (warp * 16 * B + lane % 16) * P_STEP + lane / 16 * 8);
    const auto met = [&] { asm volatile("bar.sync %0, %1;" ::"r"(1 + warp), "r"(32 * SHARE) : "memory"); }; // sharers
    float o[B][CHANNELS / 8][4] = {}, m[2 * B], l[2 * B];
#pragma unroll
    for (int i = 0; i < 2 * B; i++) {
        m[i] = -INFINITY;
        l[i] = 0.0f;
    }

    while (tile < tile1) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads(); // keys have arrived, and no warp reads the last values any more
        ask(true, tile);
        float s[B][SLOTS / 8][4] = {};
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            uint32_t q[B][4];
#pragma unroll
            for (int b = 0; b < B; b++) { load_matrices(q[b], q_row + 2 * (b * 16 * STEP + 16 * k)); }
#pragma unroll
            for (int n = 0; n < SLOTS / 8; n += 2) {
                uint32_t x[4];
                load_matrices(x, k_row + 2 * (n * 8 * STEP + 16 * k));
#pragma unroll
                for (int b = 0; b < B; b++) {
                    mma(s[b][n], q[b], x[0], x[1]);
                    mma(s[b][n + 1], q[b], x[2], x[3]);
                }
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads(); // values have arrived, and no warp reads these keys any more
        const int after = next(tile + 1);
        if (after < tile1) { ask(false, after); }

        if (a.softcap != 0.0f) {
#pragma unroll
            for (int b = 0; b < B; b++) {
#pragma unroll
                for (int n = 0; n < SLOTS / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) { s[b][n][e] = a.softcap * tanhf(s[b][n][e] / a.softcap); }
                }
            }
        }
        if (seen[tile] != 1) {
#pragma unroll
            for (int i = 0; i < 2 * B; i++) {
                const int row = min(row_of(i), a.n_rows - 1);
                const float slope = alibi_slope(a, row_head(a, kvh, row));
                const __half * const mask =
                    a.stream[0].mask ? a.stream[0].mask + row_token(a, row) * a.mask_stride_token : nullptr;
#pragma unroll
                for (int n = 0; n < SLOTS / 8; n++) {
                    const uint2 cell = *(const uint2 *) (cells + tile * TILE + part * SLOTS + 8 * n + 2 * tig);
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int c = (int) (e ? cell.y : cell.x);
                        float & x = s[i / 2][n][i % 2 * 2 + e];
                        x = c < 0 ? -INFINITY : mask ? x + slope * __half2float(mask[c]) : x;
                    }
                }
            }
        }
        float top[2 * B];
        int higher = 0;
#pragma unroll
        for (int i = 0; i < 2 * B; i++) {
            top[i] = m[i];
#pragma unroll
            for (int n = 0; n < SLOTS / 8; n++) {
                top[i] = fmaxf(top[i], fmaxf(s[i / 2][n][i % 2 * 2], s[i / 2][n][i % 2 * 2 + 1]));
            }
            top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
            top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 2));
            if (SHARE > 1 && tig == 0) { s_top[part * ROWS + in_block(i)] = top[i]; }
        }
        if constexpr (SHARE > 1) {
            met();
#pragma unroll
            for (int i = 0; i < 2 * B; i++) { top[i] = fmaxf(top[i], s_top[(part ^ 1) * ROWS + in_block(i)]); }
        }
#pragma unroll
        for (int i = 0; i < 2 * B; i++) { higher |= top[i] > m[i]; }
        if (__any_sync(~0u, higher)) {
#pragma unroll
            for (int i = 0; i < 2 * B; i++) {
                const float c = m[i] == -INFINITY ? 0.0f : exp2_fast((m[i] - top[i]) * LOG2_E);
                m[i] = top[i];
                l[i] *= c;
#pragma unroll
                for (int n = 0; n < CHANNELS / 8; n++) {
                    o[i / 2][n][i % 2 * 2] *= c;
                    o[i / 2][n][i % 2 * 2 + 1] *= c;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * B; i++) {
            const float base = m[i] == -INFINITY ? 0.0f : m[i] * LOG2_E;
#pragma unroll
            for (int n = 0; n < SLOTS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float & x = s[i / 2][n][i % 2 * 2 + e];
                    x = exp2_fast(x * LOG2_E - base);
                    l[i] += x;
                }
                if constexpr (SHARE > 1) {
                    *(uint32_t *) (s_p + in_block(i) * P_STEP + part * SLOTS + 8 * n + 2 * tig) =
                        pack_half2(s[i / 2][n][i % 2 * 2], s[i / 2][n][i % 2 * 2 + 1]);
                }
            }
        }
        if constexpr (SHARE > 1) { met(); }
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            uint32_t p[B][4];
#pragma unroll
            for (int b = 0; b < B; b++) {
                if constexpr (SHARE > 1) {
                    load_matrices(p[b], p_row + 2 * (b * 16 * P_STEP + 16 * k));
                } else {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        p[b][j] = pack_half2(s[b][2 * k + j / 2][j % 2 * 2], s[b][2 * k + j / 2][j % 2 * 2 + 1]);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < CHANNELS / 8; n += 2) {
                uint32_t x[4];
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                    : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                    : "r"(v_row + 2 * (k * 16 * STEP + 8 * n)));
#pragma unroll
                for (int b = 0; b < B; b++) {
                    mma(o[b][n], p[b], x[0], x[1]);
                    mma(o[b][n + 1], p[b], x[2], x[3]);
                }
            }
        }
        tile = after;
    }
#pragma unroll
    for (int i = 0; i < 2 * B; i++) {
        l[i] += __shfl_xor_sync(~0u, l[i], 1);
        l[i] += __shfl_xor_sync(~0u, l[i], 2);
        if constexpr (SHARE > 1) { // no maxima are there any more
            if (i == 0) { met(); }
            if (tig == 0) { s_top[part * ROWS + in_block(i)] = l[i]; }
            met();
            l[i] += s_top[(part ^ 1) * ROWS + in_block(i)];
        }
        const int row = row_of(i);
        if (row >= a.n_rows) { continue; }
        const int token = row_token(a, row), head = row_head(a, kvh, row);
        float *out, inv = 1.0f;
        if (a.n_splits > 1) {
            out = a.partial + partial_at(a, 0, kvh, row, split);
            if (tig == 0 && part == 0) {
                out[a.v.head_size] = m[i];
                out[a.v.head_size + 1] = l[i];
            }
        } else {
            out = a.stream[0].dst + token * a.dst_stride_token + head * a.dst_stride_head;
            float sum = l[i], cs = 1.0f, high = m[i];
            if (a.sinks) { // one more logit without a value
                high = fmaxf(m[i], a.sinks[head]);
                cs = m[i] == -INFINITY ? 0.0f : exp2_fast((m[i] - high) * LOG2_E);
                sum = sum * cs + exp2_fast((a.sinks[head] - high) * LOG2_E);
            }
            inv = sum > 0.0f ? cs / sum : 0.0f;
            if (a.stream[0].lse && tig == 0 && part == 0) {
                a.stream[0].lse[(size_t) token * a.n_head + head] = high + logf(sum);
            }
        }
#pragma unroll
        for (int n = 0; n < CHANNELS / 8; n++) {
            const int d = part * CHANNELS + 8 * n + 2 * tig;
            if (d < a.v.head_size) {
                out[d] = o[i / 2][n][i % 2 * 2] * inv;
                out[d + 1] = o[i / 2][n][i % 2 * 2 + 1] * inv;
            }
        }
    }
}

// ---------------------------------------------------------------- launches

bool kvq_rows_fit(const kvq_attend_args & a) {
    const int d = kvq_tiles_head_size(a.k.head_size, a.v.head_size);
    return d && nb_rows(d) <= (size_t) a.max_shared && !a.mask_stride_head;
}

template <int D> static void launch_rows(const kvq_attend_args & a, const kvq_rows_args & r, cudaStream_t stream) {
    static kvq_shared_limit limit;
    limit.raise(rows_kernel<D>, nb_rows(D));
    rows_kernel<D><<<dim3(kvq_rows_blocks(a) * a.n_splits, a.n_head_kv), 32 * warps_of<D>, nb_rows(D), stream>>>(a, r);
}

void kvq_launch_rows_attention(const kvq_attend_args & a, const kvq_rows_args & args, cudaStream_t stream) {
    kvq_rows_args r = args;
    r.block_rows = kvq_rows_block(std::max(a.k.head_size, a.v.head_size));
    cells_kernel<<<dim3((r.n_tiles * TILE + 255) / 256, a.n_head_kv), 256, 0, stream>>>(a, r);
    seen_cells_kernel<<<dim3((a.n_kv + 255) / 256, kvq_rows_blocks(a)), 256, 0, stream>>>(a, r);
    seen_tiles_kernel<<<dim3((r.n_tiles + 7) / 8, a.n_head_kv, kvq_rows_blocks(a)), 256, 0, stream>>>(a, r);
    switch (kvq_tiles_head_size(a.k.head_size, a.v.head_size)) {
    case 64: launch_rows<64>(a, r, stream); break;
    case 80: launch_rows<80>(a, r, stream); break;
    case 96: launch_rows<96>(a, r, stream); break;
    case 128: launch_rows<128>(a, r, stream); break;
    case 192: launch_rows<192>(a, r, stream); break;
    case 256: launch_rows<256>(a, r, stream); break;
    case 512: launch_rows<512>(a, r, stream); break;
    }
    if (a.n_splits > 1) { kvq_launch_merge(a, 1, stream); }
}

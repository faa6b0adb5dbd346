// Lattice pages as plain f16 rows (kvq_launch_expand): a warp has a cell with all its heads, as in kvq_launch_unfold.
// Prompts read every cell anew, so the usual shapes have a kernel that works on pairs of f16 (strips); others take the
// operations of the C reference in f32.
#include "expand.cuh"
#include "cuda/rows.cuh"
#include "cuda/seal/seal.cuh"

constexpr int WARPS = 8;

// TURNS: sealed rows leave something out
template <int LANES, int Q, bool TURNS>
static __global__ void __launch_bounds__(32 * WARPS, (Q == 4 ? 1 : 2) + (Q == 1 || !TURNS))
    expand_kernel(const __grid_constant__ kvq_affine_geometry g, const kvq_page * pages, int n_head,
        const kvq_row_place to, const __grid_constant__ kvq_turn left_out) {
    using quad = quads<LANES, Q>;
    extern __shared__ __align__(16) uint8_t memory[];
    __shared__ int32_t s_pos[WARPS];
    float * const base = (float *) memory;
    const kvq_page & page = pages[blockIdx.y];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = blockIdx.x * WARPS + warp, D = g.head_size;
    const int n = to.by_slot ? g.n_cells : min(g.n_cells, to.n_kv - page.cell);
    const uint8_t * codes = (const uint8_t *) (to.value ? page.v_codes : page.k_codes);
    const uint8_t * params = (const uint8_t *) (to.value ? page.v_params : page.k_params);
    const size_t step = to.step ? (size_t) to.step : (size_t) n_head * D;
    uint16_t * const row = to.rows + (size_t) ((to.by_slot ? (int) blockIdx.y * g.n_cells : page.cell) + t) * step;
    if ((int) blockIdx.x * WARPS >= n || lies_far(to, page, blockIdx.y)) { return; }
    if (!params || !page.n_slots) { // open, or empty, which reads as zero
        const uint16_t * from = (const uint16_t *) codes + (size_t) t * g.stride;
        const int units = D / 8;
        for (int i = lane; t < n && i < n_head * units; i += 32) {
            const int h = i / units, c = i % units * 8;
            const uint16_t * at = from + (size_t) h * g.n_cells * g.stride + c;
            *(uint4 *) (row + h * D + c) = page.n_slots ? *(const uint4 *) at : make_uint4(0, 0, 0, 0);
        }
        return;
    }
    const kvq_device_rotary & r = left_out.rotary;
    const row_memory shared(g, r, quad::BUFFER, 0);
    const bool turns = TURNS && r.n != 0;
    const int cell = page.cell + min(t, n - 1);
    const int32_t pos = turns ? left_out.positions[cell] : 0;
    const int32_t was = turns && left_out.sealed ? left_out.sealed[cell] : 0;
    const bool stays = turns && left_out.sealed && was == pos, moved = turns && left_out.sealed && !stays;
    if (lane == 0) { s_pos[warp] = pos; }
    shared.fill(base, g, r, s_pos, turns, false);
    if (t >= n) { return; }
    typename quad::turner turn;
    if (turns) {
        const float2 * factors = shared.turn_of(base, WARPS, warp);
        turn.find(r, [&](int j) { return factors[j]; });
    }
    float * const buffer = shared.buffer_of(base, warp);
    typename quad::places places;
    uint32_t words[2 * Q][2];
    places.find(g, t);
    places.load(g, codes + (size_t) min(quad::sub(), n_head - 1) * g.nb_codes, words);
    float scales = 0.0f;
    for (int h0 = 0; h0 < n_head; h0 += quad::ROWS) {
        const int h = h0 + quad::sub();
        const bool valid = h < n_head;
        typename quad::row x;
        uint32_t now[2 * Q][2];
#pragma unroll
        for (int i = 0; i < 2 * Q; i++) {
            now[i][0] = words[i][0];
            now[i][1] = words[i][1];
        }
        places.load(g, codes + (size_t) min(h + quad::ROWS, n_head - 1) * g.nb_codes, words); // of the next
        if (h0 % 32 == 0) { scales = lattice_scale(g, params + (size_t) min(h0 + lane, n_head - 1) * g.nb_params, t); }
        places.decode(g, now, base, __shfl_sync(~0u, scales, h % 32), x);
        if constexpr (TURNS) {
            typename quad::row mu;
            quad::undo_gains(left_out.back.gain, h, valid, D, x);
            quad::load(left_out.mean + (size_t) h * D, left_out.mean && valid, D, mu);
            if (moved) {
                typename quad::turner back;
                back.find(r, [&](int j) { return turn_factors(r, was, true, j); });
                back.apply(r, buffer, x);
            }
            if (left_out.mean && stays) { turn.apply(r, buffer, mu); }
#pragma unroll
            for (int q = 0; q < Q; q++) {
#pragma unroll
                for (int j = 0; j < 4; j++) { x[q][j] += mu[q][j]; }
            }
            if (turns && !stays) { turn.apply(r, buffer, x); }
        }
        if (valid) { quad::store_half(row + h * D, D, D, x); }
    }
}

// ---------------------------------------------------------------- grids of two channels, heads of 64, 128, 256, 512

// A lane has a strip of E neighbouring channels of a row: 8, of 512 channels 16. The stages of the Hadamard sums
// between lanes, which need shuffles, work on pairs of f16 and come first, where sums are small: of 32 points at most.
// They round by 2^-11 of them, rows by as much when they are written. The stages within a lane are in f32.
template <int D, bool KEYS> struct strips {
    static constexpr int E = D > 256 ? 16 : 8, LANES = D / E, ROWS = 32 / LANES;
    static constexpr int WORDS = KEYS ? E / 8 : E / 2; // one for 4 pairs of channels; of values for each of them
    static constexpr int EACH = KEYS ? 4 : 1;          // pairs
    typedef uint32_t words[2][WORDS];                  // of the parts of an index

    static __device__ __forceinline__ int lane() { return threadIdx.x % LANES; }
    static __device__ __forceinline__ int sub() { return threadIdx.x % 32 / LANES; }

    // Of a cell: where this lane's indices lie behind a head's codes, and the bit in a word, of the first of them.
    struct places {
        int offset[2], bit[2];
        __device__ __forceinline__ void find(const kvq_affine_geometry & g, int cell) {
            const int vec = E / 2 * lane(), row = KEYS ? cell : vec, dot = KEYS ? vec : cell;
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const int width = part < g.n_parts ? g.width[part] : 8,
                          span = width == 2 ? 4
                    : width == 4            ? 3
                                            : 2, // 32 / width = 1 << span
                    rest = dot & ((1 << span) - 1);
                offset[part] = g.offset[part] + (((row / 16) * g.n_chunks[part] + (dot >> span)) * 16 + row % 16) * 4;
                bit[part] = rest % 4 * 8 + rest / 4 * width;
            }
        }
        __device__ __forceinline__ void load(const kvq_affine_geometry & g, const uint8_t * codes, words & x) const {
#pragma unroll
            for (int part = 0; part < 2; part++) {
                if (part >= g.n_parts) { break; }
                const uint8_t * at = codes + offset[part];
                if constexpr (KEYS) { // 4 pairs of 8 bits fill a word; of fewer the next 4 are in the same one
                    x[part][0] = __ldg((const uint32_t *) at);
                    if constexpr (WORDS == 2) {
                        x[part][1] = __ldg((const uint32_t *) (at + (g.width[part] == 8 ? 64 : 0)));
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < WORDS; i += 4) {
                        const uint4 y = __ldg((const uint4 *) (at + 4 * i));
                        x[part][i] = y.x;
                        x[part][i + 1] = y.y;
                        x[part][i + 2] = y.z;
                        x[part][i + 3] = y.w;
                    }
                }
            }
        }
        // H points, not scaled
        __device__ __forceinline__ void decode(
            const kvq_affine_geometry & g, const words & w, const __half2 * points, float (&x)[E]) const {
            __half2 sums[E / 2];
#pragma unroll
            for (int j = 0; j < E / 2; j++) {
                const auto of = [&](int part) {
                    const int width = g.width[part], more = KEYS && j >= EACH && width < 8 ? width : 0;
                    return (int) (w[part][j / EACH] >> (bit[part] + more + j % EACH * 8)) & ((1 << width) - 1);
                };
                int index = of(0);
                if (g.n_parts == 2) { index |= of(1) << g.shift[1]; }
                sums[j] = points[index];
            }
#pragma unroll
            for (int d = 1; d < LANES; d *= 2) {
                const __half2 sign = __float2half2_rn(lane() & d ? -1.0f : 1.0f);
#pragma unroll
                for (int j = 0; j < E / 2; j++) {
                    const uint32_t other = __shfl_xor_sync(~0u, *(const uint32_t *) &sums[j], d);
                    sums[j] = __hfma2(sums[j], sign, *(const __half2 *) &other);
                }
            }
#pragma unroll
            for (int j = 0; j < E / 2; j++) {
                const float2 y = __half22float2(sums[j]);
                x[2 * j] = y.x + y.y;
                x[2 * j + 1] = y.x - y.y;
            }
#pragma unroll
            for (int d = 2; d < E; d *= 2) {
#pragma unroll
                for (int e = 0; e < E; e++) {
                    if (e & d) { continue; }
                    const float a = x[e], b = x[e + d];
                    x[e] = a + b;
                    x[e + d] = a - b;
                }
            }
        }
    };

    static __device__ __forceinline__ void undo_gains(const float * back, float (&x)[E]) {
#pragma unroll
        for (int i = 0; i < E / 4; i++) {
            const float4 f = __ldg((const float4 *) (back + E * lane()) + i);
            x[4 * i] *= f.x;
            x[4 * i + 1] *= f.y;
            x[4 * i + 2] *= f.z;
            x[4 * i + 3] *= f.w;
        }
    }

    // Cosines and sines of this lane's channels, signed as apply needs them; at(j): of pairs j and j + 1 of D/2.
    struct turner {
        float cs[E], sn[E];
        template <typename F> __device__ __forceinline__ void find(const kvq_device_rotary & r, F && at) {
            const auto put = [&](int e, float c, float s) {
                cs[e] = c;
                sn[e] = s;
            };
            if (r.neox) { // all in the same half of the head
                const float sign = lane() < LANES / 2 ? -1.0f : 1.0f;
#pragma unroll
                for (int e = 0; e < E; e += 2) {
                    const float4 f = at(E * lane() % (D / 2) + e);
                    put(e, f.x, sign * f.y);
                    put(e + 1, f.z, sign * f.w);
                }
                return;
            }
#pragma unroll
            for (int e = 0; e < E; e += 4) {
                const float4 f = at((E * lane() + e) / 2);
                put(e, f.x, -f.y);
                put(e + 1, f.x, f.y);
                put(e + 2, f.z, -f.w);
                put(e + 3, f.z, f.w);
            }
        }
        __device__ __forceinline__ void apply(const kvq_device_rotary & r, float (&x)[E]) const {
            float other[E];
#pragma unroll
            for (int e = 0; e < E; e++) { other[e] = r.neox ? __shfl_xor_sync(~0u, x[e], LANES / 2) : x[e ^ 1]; }
#pragma unroll
            for (int e = 0; e < E; e++) { x[e] = x[e] * cs[e] + other[e] * sn[e]; }
        }
    };
};

constexpr int MOST_HEADS = 32;
// of a block: angles of long heads leave room for fewer
template <int D, bool ROTARY> constexpr int cells_of = ROTARY && D > 128 ? 4096 / D : 32;
template <int D, bool ROTARY> constexpr int strip_blocks = D > 256 ? 2 : ROTARY ? 3 : 5;

// Where angles i of a cell lie: neighbouring lanes read every second or more, of one cell, and write the same of
// neighbouring cells, and find all banks.
static __device__ __forceinline__ int turn_place(int i, int cell) { return i ^ (i / 8 % 8) ^ (cell % 8); }

// Block: neighbouring cells of a page with all their heads, of which a warp has every eighth.
template <int D, bool KEYS, bool TURNS>
static __global__ void __launch_bounds__(32 * WARPS, strip_blocks<D, TURNS && KEYS>)
    expand_strips_kernel(const __grid_constant__ kvq_affine_geometry g, const kvq_page * pages, int n_head,
        const kvq_row_place to, const __grid_constant__ kvq_turn left_out) {
    using strip = strips<D, KEYS>;
    constexpr bool ROTARY = TURNS && KEYS;
    constexpr int E = strip::E, CELLS = cells_of<D, ROTARY>;
    __shared__ __half2 s_points[256];
    __shared__ float s_scale[CELLS][MOST_HEADS + 1];
    __shared__ float4 s_turn[ROTARY ? CELLS : 1][ROTARY ? D / 4 : 1]; // of two pairs
    const kvq_page & page = pages[blockIdx.y];
    const int warp = threadIdx.x / 32, t0 = blockIdx.x * CELLS;
    const int n = min(to.by_slot ? g.n_cells : min(g.n_cells, to.n_kv - page.cell), t0 + CELLS);
    const uint8_t * codes = (const uint8_t *) (KEYS ? page.k_codes : page.v_codes);
    const uint8_t * params = (const uint8_t *) (KEYS ? page.k_params : page.v_params);
    const size_t step = to.step ? (size_t) to.step : (size_t) n_head * D;
    uint16_t * const rows = to.rows + (size_t) (to.by_slot ? (int) blockIdx.y * g.n_cells : page.cell) * step;
    if (t0 >= n || lies_far(to, page, blockIdx.y)) { return; }
    if (!params || !page.n_slots) { // open, or empty, which reads as zero
        const int units = n_head * (D / 8);
        for (int i = threadIdx.x; i < (n - t0) * units; i += blockDim.x) {
            const int t = t0 + i / units, h = i % units / (D / 8), c = i % (D / 8) * 8;
            const uint16_t * from = (const uint16_t *) codes + ((size_t) h * g.n_cells + t) * g.stride + c;
            *(uint4 *) (rows + t * step + h * D + c) = page.n_slots ? *(const uint4 *) from : make_uint4(0, 0, 0, 0);
        }
        return;
    }
    const kvq_device_rotary & r = left_out.rotary;
    const bool turns = ROTARY && r.n != 0;
    const auto codes_of = [&](int h) { return codes + (size_t) min(h, n_head - 1) * g.nb_codes; };
    typename strip::words words, now;
    typename strip::places places;
    places.find(g, min(t0 + warp, n - 1));
    places.load(g, codes_of(strip::sub()), words);
    for (int i = threadIdx.x; i < 1 << 2 * g.bits; i += blockDim.x) {
        s_points[i] = __floats2half2_rn(__ldg(g.points + 2 * i), __ldg(g.points + 2 * i + 1));
    }
    for (int i = threadIdx.x; i < CELLS * n_head; i += blockDim.x) {
        s_scale[i % CELLS][i / CELLS] =
            lattice_scale(g, params + (size_t) (i / CELLS) * g.nb_params, min(t0 + i % CELLS, n - 1)) * g.norm;
    }
    for (int i = threadIdx.x; turns && i < CELLS * (D / 2); i += blockDim.x) { // neighbours share sectors
        const int32_t pos = left_out.positions[page.cell + min(t0 + i % CELLS, n - 1)];
        ((float2 *) &s_turn[i % CELLS][turn_place(i / CELLS / 2, i % CELLS)])[i / CELLS % 2] =
            turn_factors(r, pos, false, i / CELLS);
    }
    __syncthreads();
    for (int t = t0 + warp; t < n; t += WARPS) {
        const int32_t pos = turns ? left_out.positions[page.cell + t] : 0,
                      was = turns && left_out.sealed ? left_out.sealed[page.cell + t] : 0;
        const bool stays = turns && left_out.sealed && was == pos, moved = turns && left_out.sealed && !stays;
        typename strip::turner turn, back;
        if constexpr (ROTARY) {
            if (turns) {
                turn.find(r, [&](int j) { return s_turn[t - t0][turn_place(j / 2, t - t0)]; });
            }
            if (moved) {
                back.find(r, [&](int j) {
                    const float2 x = turn_factors(r, was, true, j), y = turn_factors(r, was, true, j + 1);
                    return make_float4(x.x, x.y, y.x, y.y);
                });
            }
        }
        for (int h0 = 0; h0 < n_head; h0 += strip::ROWS) {
            const int h = min(h0 + strip::sub(), n_head - 1);
#pragma unroll
            for (int i = 0; i < 2 * strip::WORDS; i++) {
                now[i / strip::WORDS][i % strip::WORDS] = words[i / strip::WORDS][i % strip::WORDS];
            }
            const typename strip::places here = places; // words of the next row are asked for
            const bool last = h0 + strip::ROWS >= n_head;
            if (last) { places.find(g, min(t + WARPS, n - 1)); }
            places.load(g, codes_of((last ? 0 : h0 + strip::ROWS) + strip::sub()), words);
            float x[E];
            here.decode(g, now, s_points, x);
            const float scale = s_scale[t - t0][h];
#pragma unroll
            for (int e = 0; e < E; e++) { x[e] *= scale; }
            if constexpr (TURNS) {
                if (KEYS && left_out.back.gain) { strip::undo_gains(left_out.back.gain + (size_t) h * D, x); }
                float mu[E] = {};
                if (left_out.mean) {
                    const float4 * from = (const float4 *) (left_out.mean + (size_t) h * D + E * strip::lane());
#pragma unroll
                    for (int i = 0; i < E / 4; i++) { *(float4 *) (mu + 4 * i) = __ldg(from + i); }
                }
                if constexpr (ROTARY) {
                    if (moved) { back.apply(r, x); }
                    if (left_out.mean && stays) { turn.apply(r, mu); }
                }
#pragma unroll
                for (int e = 0; e < E; e++) { x[e] += mu[e]; }
                if constexpr (ROTARY) {
                    if (turns && !stays) { turn.apply(r, x); }
                }
            }
            uint32_t out[E / 2];
#pragma unroll
            for (int j = 0; j < E / 2; j++) {
                out[j] = f32_to_f16_finite(x[2 * j]) | (uint32_t) f32_to_f16_finite(x[2 * j + 1]) << 16;
            }
            if (h0 + strip::sub() < n_head) {
                uint4 * const at = (uint4 *) (rows + t * step + h * D + E * strip::lane());
#pragma unroll
                for (int i = 0; i < E / 8; i++) {
                    at[i] = make_uint4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
                }
            }
        }
    }
}

static bool takes_strips(const kvq_affine_geometry & g, int n_head, const kvq_row_place & to, const kvq_turn & turn) {
    const bool shape = g.head_size == 64 || g.head_size == 128 || g.head_size == 256 || g.head_size == 512;
    return shape && n_head <= MOST_HEADS && g.group == 2 && g.block == g.head_size && !g.split &&
        to.value == (g.role == KVQ_ROLE_V) && (!turn.rotary.n || 2 * turn.rotary.n == g.head_size) &&
        (uintptr_t) to.rows % 16 == 0 && to.step % 8 == 0;
}

template <int D, bool KEYS>
static void launch_strips(const kvq_affine_geometry & g, const kvq_page * pages, int n_pages, int n_head,
    const kvq_row_place & to, const kvq_turn & turn, cudaStream_t stream) {
    const auto kernel = turn.leaves_out() ? expand_strips_kernel<D, KEYS, true> : expand_strips_kernel<D, KEYS, false>;
    const bool rotary = KEYS && turn.leaves_out();
    const int cells = rotary ? cells_of<D, true> : cells_of<D, false>;
    kernel<<<dim3((g.n_cells + cells - 1) / cells, n_pages), 32 * WARPS, 0, stream>>>(g, pages, n_head, to, turn);
}

template <int D>
static void launch_strips_of(const kvq_affine_geometry & g, const kvq_page * pages, int n_pages, int n_head,
    const kvq_row_place & to, const kvq_turn & turn, cudaStream_t stream) {
    (to.value ? launch_strips<D, false> : launch_strips<D, true>) (g, pages, n_pages, n_head, to, turn, stream);
}

void kvq_launch_expand_lattice(const kvq_affine_geometry & g, const kvq_page * pages, int n_pages, int n_head,
    const kvq_row_place & to, const kvq_turn & turn, cudaStream_t stream) {
    if (takes_strips(g, n_head, to, turn)) {
        const auto launch = g.head_size == 64 ? launch_strips_of<64>
            : g.head_size == 128              ? launch_strips_of<128>
            : g.head_size == 256              ? launch_strips_of<256>
                                              : launch_strips_of<512>;
        launch(g, pages, n_pages, n_head, to, turn, stream);
        return;
    }
    quads_switch(g.head_size, [&](auto shape) {
        constexpr int LANES = decltype(shape)::LANES, Q = decltype(shape)::Q;
        const auto kernel = turn.leaves_out() ? expand_kernel<LANES, Q, true> : expand_kernel<LANES, Q, false>;
        const size_t nb = row_memory(g, turn.rotary, quads<LANES, Q>::BUFFER, 0).bytes(WARPS);
        kernel<<<dim3((g.n_cells + WARPS - 1) / WARPS, n_pages), 32 * WARPS, nb, stream>>>(g, pages, n_head, to, turn);
    });
}

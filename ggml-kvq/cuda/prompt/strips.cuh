// Lattice pages with grids of two channels as plain f16 rows, heads of 64, 128, 256 and 512: expand_lattice.cu has the
// kernels of whole keys and of values, expand_split.cu those of split keys.
#pragma once
#include "expand.cuh"
#include "cuda/rows.cuh"
#include "cuda/seal/seal.cuh"

// A lane has a strip of E neighbouring channels of a row: 8, of 512 channels 16. The stages of the Hadamard sums
// between lanes, which need shuffles, work on pairs of f16 and come first, where sums are small: of 32 points at most.
// They round by 2^-11 of them, rows by as much when they are written. The stages within a lane are in f32.
// SPLIT: keys in halves. A lane's strip lies in one of them, and each half is rotated by itself.
template <int D, bool KEYS, bool SPLIT> struct strips {
    static constexpr int E = D > 256 ? 16 : 8, LANES = D / E, ROWS = 32 / LANES;
    static constexpr int BLOCK = SPLIT ? LANES / 2 : LANES; // lanes of a Hadamard matrix
    static constexpr int WORDS = KEYS ? E / 8 : E / 2;      // one for 4 pairs of channels; of values for each of them
    static constexpr int EACH = KEYS ? 4 : 1;               // pairs
    typedef uint32_t words[2][WORDS];                       // of the parts of an index

    static __device__ __forceinline__ int lane() { return threadIdx.x % LANES; }
    static __device__ __forceinline__ int sub() { return threadIdx.x % 32 / LANES; }
    static __device__ __forceinline__ bool is_fast() { return SPLIT && lane() < BLOCK; }

    // Of a cell: where this lane's indices lie behind a head's codes, and the bit in a word, of the first of them.
    struct places {
        int offset[2], bit[2];
        template <typename G> __device__ __forceinline__ void find(const G & g, int cell) {
            const int vec = E / 2 * (lane() % BLOCK), row = KEYS ? cell : vec, dot = KEYS ? vec : cell;
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
        template <typename G>
        __device__ __forceinline__ void load(const G & g, const uint8_t * codes, words & x) const {
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
        template <typename G>
        __device__ __forceinline__ void decode(
            const G & g, const words & w, const __half2 * points, float (&x)[E]) const {
            __half2 sums[E / 2];
#pragma unroll
            for (int j = 0; j < E / 2; j++) {
                const auto of = [&](int part) {
                    const int width = g.width[part], more = KEYS && j >= EACH && width < 8 ? width : 0;
                    return (int) (w[part][j / EACH] >> (bit[part] + more + j % EACH * 8)) & ((1 << width) - 1);
                };
                if (SPLIT && !g.n_parts) { // a half without bits
                    sums[j] = __half2();
                    continue;
                }
                int index = of(0);
                if (g.n_parts == 2) { index |= of(1) << g.shift[1]; }
                sums[j] = points[index];
            }
#pragma unroll
            for (int d = 1; d < BLOCK; d *= 2) {
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

    // From the order of halves to that of the head. rows: ROWS * D floats of the warp
    static __device__ __forceinline__ void to_channels(
        int split, const kvq_device_order & order, int h, float * rows, float (&x)[E]) {
        if (split == KVQ_SPLIT_NORM && !order.channel) { return; }
        if (order.channel) { undo_gains(order.gain + (size_t) h * D, x); }
        float * const row = rows + sub() * D;
        __syncwarp();
#pragma unroll
        for (int e = 0; e < E; e += 8) {
            const int c = E * lane() + e;
            uint4 at = {};
            if (order.channel) { at = __ldg((const uint4 *) (order.channel + h * D + c)); }
            const uint32_t two[4] = { at.x, at.y, at.z, at.w };
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int to = order.channel ? two[i / 2] >> i % 2 * 16 & 0xffff
                                             : channel_of_half(split, is_fast(), D / 2, c % (D / 2) + i);
                row[to] = x[e + i];
            }
        }
        __syncwarp();
#pragma unroll
        for (int e = 0; e < E; e += 4) { *(float4 *) (x + e) = *(const float4 *) (row + E * lane() + e); }
    }

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

// What places of a half of split keys ask of its geometry: of the half that this lane's strip lies in.
struct half_shape {
    int n_parts, width[2], shift[2], n_chunks[2], offset[2];
    __device__ __forceinline__ half_shape(const kvq_affine_geometry & slow, const kvq_affine_geometry & fast, bool f) :
        n_parts(f ? fast.n_parts : slow.n_parts) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            width[i] = f ? fast.width[i] : slow.width[i];
            shift[i] = f ? fast.shift[i] : slow.shift[i];
            n_chunks[i] = f ? fast.n_chunks[i] : slow.n_chunks[i];
            offset[i] = f ? fast.offset[i] : slow.offset[i];
        }
    }
};

template <bool SPLIT>
static __device__ __forceinline__ const auto & shape_of_strips(const kvq_affine_geometry & g, const half_shape & half) {
    if constexpr (SPLIT) {
        return half;
    } else {
        return g;
    }
}

constexpr int STRIP_WARPS = 8;
constexpr int MOST_HEADS = 32;
// of a block: angles of long heads leave room for fewer
template <int D, bool ROTARY> constexpr int cells_of = ROTARY && D > 128 ? 4096 / D : 32;
template <int D, bool ROTARY> constexpr int strip_blocks = D > 256 ? 2 : ROTARY ? 3 : 5;

// Where angles i of a cell lie: neighbouring lanes read every second or more, of one cell, and write the same of
// neighbouring cells, and find all banks.
static __device__ __forceinline__ int turn_place(int i, int cell) { return i ^ (i / 8 % 8) ^ (cell % 8); }

// Cells [t0, n) of an open page; tile NULL: an empty one.
template <int D>
static __device__ __forceinline__ void copy_open_cells(
    const kvq_affine_geometry & g, const uint16_t * tile, int t0, int n, int n_head, uint16_t * rows, size_t step) {
    const int units = n_head * (D / 8);
    for (int i = threadIdx.x; i < (n - t0) * units; i += blockDim.x) {
        const int t = t0 + i / units, h = i % units / (D / 8), c = i % (D / 8) * 8;
        const uint16_t * from = tile + ((size_t) h * g.n_cells + t) * g.stride + c;
        *(uint4 *) (rows + t * step + h * D + c) = tile ? *(const uint4 *) from : make_uint4(0, 0, 0, 0);
    }
}

// Block: neighbouring cells of a page with all their heads, of which a warp has every eighth. SPLIT: g is the slow
// half's geometry with the bytes of the whole; fast.n_parts 0: the other half is zero.
template <int D, bool KEYS, bool TURNS, bool SPLIT>
static __global__ void __launch_bounds__(32 * STRIP_WARPS, strip_blocks<D, TURNS && KEYS>) expand_strips_kernel(
    const __grid_constant__ kvq_affine_geometry g, const kvq_page * pages, int n_head, const kvq_row_place to,
    const __grid_constant__ kvq_turn left_out, const __grid_constant__ kvq_affine_geometry fast) {
    using strip = strips<D, KEYS, SPLIT>;
    constexpr bool ROTARY = TURNS && KEYS;
    constexpr int E = strip::E, CELLS = cells_of<D, ROTARY>, HALVES = SPLIT ? 2 : 1;
    __shared__ __half2 s_points[HALVES][256]; // slow, fast
    __shared__ float s_scale[HALVES][CELLS][MOST_HEADS + 1];
    __shared__ float s_row[SPLIT ? STRIP_WARPS : 1][SPLIT ? strip::ROWS * D : 1]; // on the way to their channels
    __shared__ float4 s_turn[ROTARY ? CELLS : 1][ROTARY ? D / 4 : 1];             // of two pairs
    const kvq_page & page = pages[blockIdx.y];
    const int warp = threadIdx.x / 32, t0 = blockIdx.x * CELLS;
    const int n = min(to.by_slot ? g.n_cells : min(g.n_cells, to.n_kv - page.cell), t0 + CELLS);
    const uint8_t * codes = (const uint8_t *) (KEYS ? page.k_codes : page.v_codes);
    const uint8_t * params = (const uint8_t *) (KEYS ? page.k_params : page.v_params);
    const size_t step = to.step ? (size_t) to.step : (size_t) n_head * D;
    uint16_t * const rows = to.rows + (size_t) (to.by_slot ? (int) blockIdx.y * g.n_cells : page.cell) * step;
    if (t0 >= n || lies_far(to, page, blockIdx.y)) { return; }
    if (!params || !page.n_slots) { // open, or empty, which reads as zero
        copy_open_cells<D>(g, page.n_slots ? (const uint16_t *) codes : nullptr, t0, n, n_head, rows, step);
        return;
    }
    const kvq_device_rotary & r = left_out.rotary;
    const bool turns = ROTARY && r.n != 0;
    const auto codes_of = [&](int h) { return codes + (size_t) min(h, n_head - 1) * g.nb_codes; };
    const bool is_fast = strip::is_fast();
    const half_shape its_half(g, fast, is_fast);
    const auto & own = shape_of_strips<SPLIT>(g, its_half);
    typename strip::words words, now;
    typename strip::places places;
    places.find(own, min(t0 + warp, n - 1));
    places.load(own, codes_of(strip::sub()), words);
#pragma unroll
    for (int f = 0; f < HALVES; f++) {
        const kvq_affine_geometry & of = f ? fast : g;
        const bool has_bits = !f || fast.n_parts;
        for (int i = threadIdx.x; has_bits && i < 1 << 2 * of.bits; i += blockDim.x) {
            s_points[f][i] = __floats2half2_rn(__ldg(of.points + 2 * i), __ldg(of.points + 2 * i + 1));
        }
        for (int i = threadIdx.x; i < CELLS * n_head; i += blockDim.x) {
            const uint8_t * at = params + (size_t) (i / CELLS) * g.nb_params + (f ? fast.np : 0);
            s_scale[f][i % CELLS][i / CELLS] =
                has_bits ? lattice_scale(g, at, min(t0 + i % CELLS, n - 1)) * g.norm : 0.0f;
        }
    }
    for (int i = threadIdx.x; turns && i < CELLS * (D / 2); i += blockDim.x) { // neighbours share sectors
        const int32_t pos = left_out.positions[page.cell + min(t0 + i % CELLS, n - 1)];
        ((float2 *) &s_turn[i % CELLS][turn_place(i / CELLS / 2, i % CELLS)])[i / CELLS % 2] =
            turn_factors(r, pos, false, i / CELLS);
    }
    __syncthreads();
    for (int t = t0 + warp; t < n; t += STRIP_WARPS) {
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
            if (last) { places.find(own, min(t + STRIP_WARPS, n - 1)); }
            places.load(own, codes_of((last ? 0 : h0 + strip::ROWS) + strip::sub()), words);
            float x[E];
            here.decode(own, now, s_points[is_fast], x);
            const float scale = s_scale[is_fast][t - t0][h];
#pragma unroll
            for (int e = 0; e < E; e++) { x[e] *= scale; }
            if constexpr (SPLIT) { strip::to_channels(g.split, left_out.back, h, s_row[warp], x); }
            if constexpr (TURNS) {
                if (KEYS && !SPLIT && left_out.back.gain) { strip::undo_gains(left_out.back.gain + (size_t) h * D, x); }
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

// split: keys in halves, which have a kernel of their own
static inline bool kvq_takes_strips(
    const kvq_affine_geometry & g, int n_head, const kvq_row_place & to, const kvq_turn & turn, bool split) {
    const int D = g.head_size;
    const bool shape = D == 64 || D == 128 || D == 256 || D == 512;
    return shape && !turn.basis.n && n_head <= MOST_HEADS && g.group == 2 && g.block == (split ? D / 2 : D) &&
        split == (g.split != 0) && to.value == (g.role == KVQ_ROLE_V) && (!turn.rotary.n || 2 * turn.rotary.n == D) &&
        (uintptr_t) to.rows % 16 == 0 && to.step % 8 == 0;
}

template <int D, bool KEYS, bool TURNS, bool SPLIT>
static void launch_strips(const kvq_affine_geometry & g, const kvq_affine_geometry & fast, const kvq_page * pages,
    int n_pages, int n_head, const kvq_row_place & to, const kvq_turn & turn, cudaStream_t stream) {
    constexpr int cells = cells_of < D, KEYS && TURNS > ;
    expand_strips_kernel<D, KEYS, TURNS, SPLIT>
        <<<dim3((g.n_cells + cells - 1) / cells, n_pages), 32 * STRIP_WARPS, 0, stream>>>(
            g, pages, n_head, to, turn, fast);
}

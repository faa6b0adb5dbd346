// Attention of one token over a short cache: about a thousand cells, where only latency counts. The products are the
// ones of attend_decode.cuh. The code around them is as short as possible, because a cold kernel waits for every
// instruction that it fetches:
//
//   - a warp has 32 cells and sees them once: no loop, no second state of pages
//   - cells of sealed and open pages come through shared memory, asked for before the kernel before this one is done:
//   they are older
//   - rows of this step, which that kernel makes, are taken from where it leaves them (fresh): into shared memory, and
//     into their pages when all is computed, instead of by a kernel in between
//   - the last block of a KV head to arrive adds up the blocks
//
// ggml may place the output where those rows lie, because no later node reads the rows. Then the output is written when
// every block has taken its rows (n_taken).
#pragma once

#include "decode_means.cuh"
#include "decode_merge.cuh"
#include "decode_open.cuh"

#include <algorithm>

namespace {

// 32 open cells of one KV head in shared memory: keys, then values, rows of D + 16 so that reads of neighbouring rows
// find other banks; of the values, the second 16 rows lie 16 further on for the same reason
template <int D> struct open_place {
    static constexpr int STEP = D + 16, V = 32 * STEP, BYTES = 2 * (2 * V + 16);
    static __device__ __forceinline__ int key(int cell) { return cell * STEP; }
    static __device__ __forceinline__ int value(int cell) { return V + cell * STEP + cell / 16 * 16; }
};

constexpr int SHORT_TEAM = TEAM_TURN; // teams add up once

// sums of a column: o relative to exp2(m), l likewise; four channels more, as in decode_sums
template <int D, bool WIDE> struct short_sums {
    static constexpr int WARPS = most_warps<WIDE, true>();
    float o[WARPS][DECODE_COLUMNS][D + 4], m[WARPS][DECODE_COLUMNS], l[WARPS][DECODE_COLUMNS];
    bool as_is[WARPS]; // lattice: o of a warp is not rotated
    int last;
};

template <int D, bool VALUES, typename X>
__device__ __forceinline__ void copy_open(const X & of, uint32_t to, const uint16_t * rows, int stride) {
    constexpr int N = D / 8, ROWS = 32 / N; // pieces of a row, rows of one step
    const int lane = threadIdx.x % 32;
    if (!of.has(lane % N * 8)) { return; }
    const uint16_t * from = rows + (size_t) (lane / N) * stride + lane % N * 8;
    to += 2 * ((VALUES ? open_place<D>::V : 0) + lane / N * open_place<D>::STEP + lane % N * 8);
#pragma unroll
    for (int k = 0; k < N; k++, from += ROWS * stride) {
        copy16(to + 2 * (k * ROWS * open_place<D>::STEP + (VALUES ? k * ROWS / 16 * 16 : 0)), from);
    }
}

// mask of cells slot + 4j + {0, 1} when the page's cells are not simply those from `cell` on, or end
__device__ __noinline__ uint32_t mask_pair(
    const kvq_attend_args & a, const __half * mask, const int32_t * map, int cell, int slot) {
    uint32_t out = 0;
    for (int b = 0; b < 2; b++) {
        const int at = map ? map[slot + b] : cell + slot + b;
        out |= (at < 0 || at >= a.n_kv ? 0xfc00u : mask ? __half_as_ushort(mask[at]) : 0u) << 16 * b;
    }
    return out;
}

// Every block runs before the next kernel may take its place, so the others come to take theirs; the bound keeps a
// fault elsewhere from becoming a hang.
__device__ __forceinline__ void wait_for_takers(const kvq_attend_args & a) {
    unsigned long long n = 0;
    for (int i = 0; a.n_taken && i < 1 << 18 && n < (unsigned long long) a.n_takers; i++) {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(n) : "l"(a.n_taken) : "memory");
    }
}

__device__ __forceinline__ void finish_row(
    const kvq_attend_args & a, int is, int head, int channel, float4 x, float m, float l) {
    float f = 1.0f;
    if (a.sinks) { // one more logit without a value
        const float sink = a.sinks[head] * LOG2E, top = fmaxf(m, sink);
        f = m == -INFINITY ? 0.0f : exp2_fast(m - top);
        l = l * f + exp2_fast(sink - top);
    }
    f = l > 0.0f ? f / l : 0.0f;
    float * out = a.stream[is].dst + head * a.dst_stride_head + channel;
    out[0] = x.x * f;
    out[1] = x.y * f;
    out[2] = x.z * f;
    out[3] = x.w * f;
}

// MEANS: sealed lattice pages lack theirs (decode_means.cuh)
template <int D, int KB, int VB, bool WIDE, bool MEANS = false>
__global__ void __launch_bounds__(32 * most_warps<WIDE, true>(), 1)
    short_kernel(const __grid_constant__ kvq_attend_args a) {
    typedef slice_of<D, WIDE> slice;
    constexpr int S = D / 16;
    // sealed pages exist, and are rotated, or have zeros
    constexpr bool CODES = KB != 16, ROTATED = KB > LATTICE, AFFINE = CODES && !ROTATED;
    constexpr float FROM_K = (float) (1 << (24 - K_BOOST)), FROM_V = (float) (1 << (24 - v_boost<VB>()));
    early_start();
    extern __shared__ __align__(16) uint8_t memory[];
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), g = lane / 4, c = lane % 4,
              is = blockIdx.z;
    const slice of(a, warp);
    const int per_row = DECODE_COLUMNS >> a.k_parts_log2, kvh = blockIdx.y % a.n_head_kv,
              row0 = blockIdx.y / a.n_head_kv * per_row, head0 = kvh * a.gqa + row0;
    const auto & st = a.stream[is];
    const int nb_stage = a.stage_bytes + a.stage_wide;
    uint8_t *const stage = memory + warp * (nb_stage + open_place<D>::BYTES),
                   *const params = stage + (a.stage_wide ? a.stage_bytes : (int) stage_map<D, KB, VB>::K_PARAMS);
    uint16_t * const open = (uint16_t *) (stage + nb_stage);
    const uint32_t stage_at = (uint32_t) __cvta_generic_to_shared(stage), open_at = stage_at + nb_stage;

    uint8_t * const shared_sums = memory + of.warps * (nb_stage + open_place<D>::BYTES); // of teams
    int sums_turn = 0;
    clear_beyond<D>(of, stage, nb_stage + open_place<D>::BYTES);
    if (!a.n_new) { early_wait(); } // the kernel before this one writes into open pages
    const int half = blockIdx.x * of.teams + of.team, n_halves = a.n_pages << a.halves_log2,
              t0 = (half & ((1 << a.halves_log2) - 1)) * 32;
    const kvq_page page = st.pages[min(half, n_halves - 1) >> a.halves_log2];
    // -1 no cells, +1 codes of K, +2 codes of V
    const int state =
        half >= n_halves || !page.n_slots ? -1 : (CODES && page.k_params ? 1 : 0) + (CODES && page.v_params ? 2 : 0);
    uint16_t * const k_rows = (uint16_t *) page.k_codes + ((size_t) kvh * a.k.n_cells + t0) * a.k.stride + of.first();
    uint16_t * const v_rows = (uint16_t *) page.v_codes + ((size_t) kvh * a.v.n_cells + t0) * a.v.stride + of.first();
    int new_k = -1, new_v = -1;   // of row `lane` of this step: its cell among the warp's
    uint32_t raw[n_raw<KB>] = {}; // scales of lattice pages on their way
    if (CODES && state > 0) {
        // takes both places
        if constexpr (ROTATED) {
            copy_lattice<D, KB, VB>(a, of, stage_at, page, kvh, t0, state & 1, state & 2, raw);
        } else if constexpr (CODES) {
            copy_stage<D, KB, VB>(a, of, stage_at, page, kvh, t0, state & 1, state & 2);
        }
    }
    if (state == 0 || state == 2) { copy_open<D, false>(of, open_at, k_rows, a.k.stride); }
    copies_part();
    // scores do not wait for them
    if (state == 0 || state == 1) { copy_open<D, true>(of, open_at, v_rows, a.v.stride); }
    copies_part();
    uint32_t *const k_table = (uint32_t *) (shared_sums + (WIDE && of.n > 1 ? of.warps * SHORT_TEAM : 0)),
                    *const v_table = k_table + (ROTATED ? key_points<KB> : 0);
    // of open keys, then of rotated ones: lattice
    uint2 * const queries = (uint2 *) (v_table + (ROTATED ? 1 << cut<VB>::B : 0));
    float * const coefficients = (float *) (queries + 2 * of.n * S * 32); // MEANS
    int32_t * const places = (int32_t *) (stage + a.stage_bytes) - DECODE_CELLS;
    if constexpr (ROTATED) {
        load_key_tables<KB>(a, k_table);
        load_table(v_table, a.v.points, 1 << cut<VB>::B);
        if (state > 0) { put_scales<D, KB, VB>(a, stage, raw); }
        if (MEANS && state > 0 && (state & 1)) { // the second 32 rows of the product are the first ones again
            places[lane] = places[lane + 32] = __ldg(st.positions + page.cell + t0 + lane);
            __syncwarp();
        }
    }
    if (state == 0 && lane < a.n_new) {
        const int64_t dk = a.fresh[0].to[lane] + kvh * a.fresh[0].head_stride + of.first() - k_rows,
                      dv = a.fresh[1].to[lane] + kvh * a.fresh[1].head_stride + of.first() - v_rows;
        new_k = dk >= 0 && dk < 32 * a.k.stride ? (int) dk / a.k.stride : -1;
        new_v = dv >= 0 && dv < 32 * a.v.stride ? (int) dv / a.v.stride : -1;
    }
    const bool any_new = __any_sync(~0u, new_k >= 0 || new_v >= 0);
    const int in_half = g / 2 % 2 * 16 + g % 2 * 2, last = a.n_rows - row0 - 1; // last row of this block, or beyond it
    // this thread's columns belong to its cells' scales
    const bool mine = c >> (2 - a.k_parts_log2) == g >> (3 - a.k_parts_log2);
    const __half * mask[2];
    float slope[2];
#pragma unroll
    for (int e = 0; e < 2; e++) { // columns 2c + e
        const int head = head0 + min((2 * c + e) & (per_row - 1), last);
        slope[e] = alibi_slope(a, head) * LOG2E;
        mask[e] = st.mask ? st.mask + head * a.mask_stride_head : nullptr;
    }

    early_wait();
    uint32_t q[S][2]; // of column g
    if constexpr (ROTATED) {
        const auto row_of = [&](int column) { return st.q + (head0 + min(column, last)) * a.q_stride_head; };
        share_all_queries<D, KB, MEANS, false>(a, of, warp, data_of(a, of, kvh), min(per_row, a.n_rows - row0), queries,
            nullptr, coefficients, nullptr, row_of);
        __syncthreads();
    } else {
        const float * p = st.q + (head0 + min(g & (per_row - 1), last)) * a.q_stride_head;
        const float f = a.scale * LOG2E;
        float4 x[S];
#pragma unroll
        for (int s = 0; s < S; s++) { x[s] = load_four(of, p, channel_of<D, KB>(c, s)); }
#pragma unroll
        for (int s = 0; s < S; s++) {
            q[s][0] = pack_half2(x[s].x * f, x[s].z * f);
            q[s][1] = pack_half2(x[s].y * f, x[s].w * f);
        }
    }
    const shared_query q_open = { queries + of.i * S * 32 + lane }, q_rotated = { q_open.at + of.n * S * 32 };
    uint32_t mk[2][4];
    if (!page.map && page.cell + t0 + 32 <= a.n_kv) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                mk[e][j] = !mask[e]            ? 0
                    : e && !a.mask_stride_head ? mk[0][j]
                                               : __ldg((const uint32_t *) (mask[e] + page.cell + t0 + in_half + 4 * j));
            }
        }
    } else {
#pragma unroll
        for (int e = 0; e < 2; e++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                mk[e][j] = mask_pair(
                    a, mask[e], page.map ? page.map + kvh * a.map_stride : nullptr, page.cell, t0 + in_half + 4 * j);
            }
        }
    }
    if (any_new || (AFFINE && a.k.scale)) {
        copies_done();
    } else {
        first_copies_done();
    }
    if (any_new) {
#pragma unroll 1
        for (int i = 0; i < a.n_new; i++) {
            const int sk = __shfl_sync(~0u, new_k, i), sv = __shfl_sync(~0u, new_v, i);
            if (lane < D / 4 && of.has(4 * lane) && sk >= 0 && sv >= 0) {
                const float4 x = *(const float4 *) (a.fresh[0].rows + i * a.fresh[0].row_stride + kvh * of.head(a) +
                    of.first() + 4 * lane);
                const float4 y = *(const float4 *) (a.fresh[1].rows + i * a.fresh[1].row_stride + kvh * of.head(a) +
                    of.first() + 4 * lane);
                uint2 key = make_uint2(pack_half2(x.x, x.y), pack_half2(x.z, x.w));
                if (a.fresh[0].pos) {
                    key = tagged(key, kvq_tag_bits(a.fresh[0].pos[i]), kvh * of.head(a) + of.first() + 4 * lane);
                }
                *(uint2 *) (open + open_place<D>::key(sk) + 4 * lane) = key;
                *(uint2 *) (open + open_place<D>::value(sv) + 4 * lane) =
                    make_uint2(pack_half2(y.x, y.y), pack_half2(y.z, y.w));
            }
        }
        __syncwarp();
        if (a.n_taken && new_k >= 0) {
            asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(a.n_taken) : "memory");
        }
    }
    if constexpr (AFFINE) {
        if (a.k.scale && state > 0) { widen_stage<D, KB, VB>(a, stage, params); }
    }

    float o[S][4] = {}, oz[4] = {}, m[2] = { -INFINITY, -INFINITY }, l[2] = { 0.0f, 0.0f };
    if (state >= 0) {
        float s[4][4], base[4] = {};
        float unit_k = 1.0f;
        if (CODES && (state & 1)) {
            if constexpr (ROTATED) {
                score_lattice<D, KB, VB>(k_table, q_rotated, stage, s);
                if constexpr (MEANS) { add_means<D, KB>(a, of, coefficients, places, s); }
            } else if constexpr (CODES) {
                score<D, KB, VB>(a, q, stage, params, s, base);
                unit_k = FROM_K;
            }
        } else if constexpr (ROTATED) {
            score_open<D, KB, true>(of, q_open, open + open_place<D>::key(in_half), open_place<D>::STEP, s);
        } else {
            score_open<D, KB, true>(of, q, open + open_place<D>::key(in_half), open_place<D>::STEP, s);
        }
        const bool here = g < 4 && mine; // the second 32 rows are the first ones again
        scale_scores(unit_k, base, s);
        if constexpr (WIDE) { team_sum(of, shared_sums, sums_turn, s); }
        cap_scores(a, s);
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) { // row b = i / 2, column e = i % 2
                const float2 mm = __half22float2(as_half2(mk[i % 2][j]));
                s[j][i] = here ? fmaf(slope[i % 2], i / 2 ? mm.y : mm.x, s[j][i]) : -INFINITY;
                m[i % 2] = fmaxf(m[i % 2], s[j][i]);
            }
        }
        uint32_t p[4][2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
#pragma unroll
            for (int d = 4; d <= 16; d *= 2) { m[e] = fmaxf(m[e], __shfl_xor_sync(~0u, m[e], d)); }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float back = exp2_of(-v_weight<VB>(j));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float lower = m[i % 2] == -INFINITY ? 0.0f : m[i % 2];
                s[j][i] = exp2_fast(s[j][i] - (lower - (float) v_weight<VB>(j)));
                l[i % 2] = fmaf(s[j][i], back, l[i % 2]);
            }
            p[j][0] = transpose(pack_half2(s[j][0], s[j][1]));
            p[j][1] = transpose(pack_half2(s[j][2], s[j][3]));
        }
        copies_done();
        if (CODES && (state & 2)) {
            if constexpr (ROTATED) {
                accumulate_lattice<D, KB, VB, 1>(v_table, stage, p, o);
            } else if constexpr (CODES) {
                if (a.v_group_log2 == 4) {
                    accumulate<D, KB, VB, true>(a, stage, params, p, o, oz);
                } else {
                    accumulate<D, KB, VB, false>(a, stage, params, p, o, oz);
                }
            }
        } else {
            accumulate_open<D, VB, true>(of, open + open_place<D>::value(c % 2 * 16), open_place<D>::STEP, p, o);
        }
#pragma unroll
        for (int e = 0; e < 2; e++) { l[e] = column_sum(l[e]); }
    }
    if (any_new && row0 == 0) { // they stay in their pages
#pragma unroll 1
        for (int i = 0; i < a.n_new; i++) {
            const int sk = __shfl_sync(~0u, new_k, i), sv = __shfl_sync(~0u, new_v, i);
            if (lane < D / 4 && of.has(4 * lane) && sk >= 0 && sv >= 0) {
                *(uint2 *) (k_rows + (size_t) sk * a.k.stride + 4 * lane) =
                    *(const uint2 *) (open + open_place<D>::key(sk) + 4 * lane);
                *(uint2 *) (v_rows + (size_t) sv * a.v.stride + 4 * lane) =
                    *(const uint2 *) (open + open_place<D>::value(sv) + 4 * lane);
            }
        }
    }
    // this thread's columns, over all cells of the warp
    __syncthreads();
    short_sums<D, WIDE> & sums = *(short_sums<D, WIDE> *) memory;
    const float unit_v = AFFINE && (state & 2) && state > 0 ? FROM_V : 1.0f;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        if (g == 0) {
            sums.m[warp][2 * c + e] = m[e];
            sums.l[warp][2 * c + e] = l[e];
            if (ROTATED) { sums.as_is[warp] = !(state > 0 && (state & 2)); }
        }
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            const int z_channel = 32 * i + 4 * g;
            const float z = AFFINE
                ? __shfl_sync(~0u, oz[e], (WIDE ? z_channel >> a.v_group_log2 : z_channel / a.v.group) * 4 + c)
                : 0.0f;
            *(float4 *) &sums.o[warp][2 * c + e][32 * i + 4 * g] =
                make_float4(fmaf(o[2 * i][e], unit_v, z), fmaf(o[2 * i][2 + e], unit_v, z),
                    fmaf(o[2 * i + 1][e], unit_v, z), fmaf(o[2 * i + 1][2 + e], unit_v, z));
        }
    }
    __syncthreads();
    // rows of this block from its columns
    const int n_rows = min(per_row, a.n_rows - row0), n_blocks = gridDim.x;
    const int n_sources = of.teams << a.k_parts_log2, size = of.head(a), parts = (1 << a.k_parts_log2) - 1;
    if (n_blocks == 1) {
        wait_for_takers(a);
        __syncthreads();
    }
#pragma unroll 1
    for (int u = warp; u < n_rows * of.n; u += of.warps) { // a lane: 4 channels of a slice, of all sources
        const int r = u / of.n, slice = u % of.n, channel = slice * D + 4 * lane;
        const auto warp_of = [&](int i) { return (i >> a.k_parts_log2) * of.n + slice; };
        const auto column_of = [&](int i) { return (i & parts) * per_row + r; };
        float top = -INFINITY, sum = 0.0f, sealed = 0.0f;
#pragma unroll 4
        for (int i = 0; i < n_sources; i++) { top = fmaxf(top, sums.m[warp_of(i)][column_of(i)]); }
        const float least = top == -INFINITY ? 0.0f : top;
        float4 x = sum_sources<D, ROTATED>(
            a, of, slice, n_sources,
            [&](int i) {
                const float f = exp2_fast(sums.m[warp_of(i)][column_of(i)] - least),
                            l = f * sums.l[warp_of(i)][column_of(i)];
                sum += l;
                if (MEANS && !sums.as_is[warp_of(i)]) { sealed += l; }
                return f;
            },
            [&](int i, int of_slice) { return sums.o[(i >> a.k_parts_log2) * of.n + of_slice][column_of(i)]; },
            [&](int i) { return sums.as_is[(i >> a.k_parts_log2) * of.n]; });
        if constexpr (MEANS) { // of values, as much as there is of sealed ones
            const int at = min(slice * D + lane % (D / 4) * 4, size - 4);
            add(x, sealed, __ldg((const float4 *) (a.v_mean + kvh * size + at)));
        }
        if (lane < D / 4 && (!WIDE || channel < size)) {
            if (n_blocks == 1) {
                finish_row(a, is, head0 + r, channel, x, top, sum);
            } else {
                put_partial(a, is, kvh, row0 + r, (int) blockIdx.x, size, channel, x, top, sum, 0.0f);
            }
        }
    }
    if (n_blocks == 1) { return; }
    __syncthreads();
    if (threadIdx.x == 0) {
        sums.last = arrives_last(a, (int) blockIdx.y, n_blocks);
        if (sums.last) { wait_for_takers(a); }
    }
    __syncthreads();
    if (!sums.last) { return; }
#pragma unroll 1
    for (int u = warp; u < n_rows * of.n; u += of.warps) { // a lane: 4 channels of a slice
        const int r = u / of.n, channel = u % of.n * D + lane % (D / 4) * 4;
        const float *p = a.partial + partial_at(a, is, kvh, row0 + r, 0),
                    *at = p + (WIDE ? min(channel, size - 4) : channel);
        float m = -INFINITY, l = 0.0f;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
        for (int b0 = 0; b0 < n_blocks; b0 += 32) {
            const float2 ml = b0 + lane < n_blocks
                ? __ldcg((const float2 *) (p + (size_t) (b0 + lane) * (size + 4) + size))
                : make_float2(-INFINITY, 0.0f);
            const float top = fmaxf(warp_max(ml.x), m), old = m == -INFINITY ? 0.0f : exp2_fast(m - top),
                        f = ml.x == -INFINITY ? 0.0f : exp2_fast(ml.x - top);
            m = top;
            l = l * old + warp_sum(f * ml.y);
            x.x *= old;
            x.y *= old;
            x.z *= old;
            x.w *= old;
            const int n = min(32, n_blocks - b0);
#pragma unroll 8
            for (int b = 0; b < n; b++) {
                const float fb = __shfl_sync(~0u, f, b);
                const float4 y = __ldcg((const float4 *) (at + (size_t) (b0 + b) * (size + 4)));
                x.x += fb * y.x;
                x.y += fb * y.y;
                x.z += fb * y.z;
                x.w += fb * y.w;
            }
        }
        if (lane < D / 4 && (!WIDE || channel < size)) { finish_row(a, is, head0 + r, channel, x, m, l); }
    }
}

template <int D, int KB, int VB, bool WIDE, bool MEANS = false>
void launch_kernel(kvq_attend_args a, int n_streams, cudaStream_t stream, int * occupancy) {
    a.stage_bytes = a.stage_wide = 0;
    size_t tables = 0;
    if constexpr (KB > LATTICE) {
        a.stage_bytes = lattice_map<D, KB, VB>::BYTES + (MEANS ? 4 * DECODE_CELLS : 0);
        tables = 4 * (key_points<KB> + (1 << cut<VB>::B)) + (32 * (size_t) D << a.slices_log2) +
            (MEANS ? 4 * DECODE_COLUMNS * (size_t) means_step<D>(a) : 0);
    } else if constexpr (KB != 16) {
        lay_out_stage<D, KB, VB>(a);
    }
    const auto bytes = [&](int n_warps) {
        return std::max(n_warps *
                    ((size_t) a.stage_bytes + a.stage_wide + open_place<D>::BYTES +
                        (WIDE && a.slices_log2 ? SHORT_TEAM : 0)) +
                tables,
            sizeof(short_sums<D, WIDE>));
    };
    static kvq_shared_limit limit;
    kvq_launch_decode_kernel(short_kernel<D, KB, VB, WIDE, MEANS>, limit, a, most_warps<WIDE, true>(), WIDE, bytes,
        n_streams, stream, occupancy);
}

template <int D, int KB>
void launch_values(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    switch (a.v.bits) {
    case 1: launch_kernel<D, KB, 1, false>(a, n_streams, stream, occupancy); break;
    case 2: launch_kernel<D, KB, 2, false>(a, n_streams, stream, occupancy); break;
    case 3: launch_kernel<D, KB, 3, false>(a, n_streams, stream, occupancy); break;
    default: launch_kernel<D, KB, 4, false>(a, n_streams, stream, occupancy); break;
    }
}

template <int D> void launch_short(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    if (a.k.np == 0) {
        launch_kernel<D, 16, 16, false>(a, n_streams, stream, occupancy);
        return;
    }
    switch (a.k.bits) {
    case 1: launch_values<D, 1>(a, n_streams, stream, occupancy); break;
    case 2: launch_values<D, 2>(a, n_streams, stream, occupancy); break;
    case 3: launch_values<D, 3>(a, n_streams, stream, occupancy); break;
    default: launch_values<D, 4>(a, n_streams, stream, occupancy); break;
    }
}

// lattices of 2 bits and more
template <int D, int KB>
void launch_lattice_values(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    switch (a.v.bits) {
    case 2: launch_kernel<D, KB, LATTICE + 4, false>(a, n_streams, stream, occupancy); break;
    case 3: launch_kernel<D, KB, LATTICE + 6, false>(a, n_streams, stream, occupancy); break;
    default: launch_kernel<D, KB, LATTICE + 8, false>(a, n_streams, stream, occupancy); break;
    }
}

template <int D>
void launch_short_lattice(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    switch (a.k.bits) {
    case 2: launch_lattice_values<D, LATTICE + 4>(a, n_streams, stream, occupancy); break;
    case 3: launch_lattice_values<D, LATTICE + 6>(a, n_streams, stream, occupancy); break;
    default: launch_lattice_values<D, LATTICE + 8>(a, n_streams, stream, occupancy); break;
    }
}

// heads of any other size, the pairs of bits that KVQ_WIDE_BITS lists
template <int D>
void launch_short_wide(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    if (a.k.np == 0) {
        launch_kernel<D, 16, 16, true>(a, n_streams, stream, occupancy);
        return;
    }
#define KVQ_CASE(K, V)                                                                                                 \
    case 8 * K + V: launch_kernel<D, K, V, true>(a, n_streams, stream, occupancy); break;
    switch (8 * a.k.bits + a.v.bits) { KVQ_WIDE_BITS(KVQ_CASE) }
#undef KVQ_CASE
}

template <int D>
void launch_short_lattice_wide(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
#define KVQ_CASE(K, V)                                                                                                 \
    case 8 * K + V: launch_kernel<D, LATTICE + 2 * K, LATTICE + 2 * V, true>(a, n_streams, stream, occupancy); break;
    switch (8 * a.k.bits + a.v.bits) { KVQ_WIDE_SHORT_LATTICE(KVQ_CASE) }
#undef KVQ_CASE
}

template <int D, bool WIDE>
void launch_short_means(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
#define KVQ_CASE(K, V)                                                                                                 \
    case 8 * K + V:                                                                                                    \
        launch_kernel<D, LATTICE + 2 * K, LATTICE + 2 * V, WIDE, true>(a, n_streams, stream, occupancy);               \
        break;
    switch (8 * a.k.bits + a.v.bits) { KVQ_SHORT_MEANS_BITS(KVQ_CASE) }
#undef KVQ_CASE
}

template <int D, bool WIDE>
void launch_short_split(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
#define KVQ_CASE(F, K, V)                                                                                              \
    case 64 * F + 8 * K + V:                                                                                           \
        launch_kernel<D, SPLIT + 32 * F + 2 * K, LATTICE + 2 * V, WIDE, true>(a, n_streams, stream, occupancy);        \
        break;
    switch (64 * a.k_fast.bits + 8 * a.k.bits + a.v.bits) { KVQ_SPLIT_BITS(KVQ_CASE) }
#undef KVQ_CASE
}

} // namespace

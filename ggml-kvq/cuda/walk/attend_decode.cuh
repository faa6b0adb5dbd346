// Attention of few rows (query heads of a group times query tokens) over long caches. A warp walks 64 cells at a
// time. Codes and parameters of the next 64 cells are on their way into the warp's own shared memory (cp.async)
// while it works on these; from there codes go through registers into the left operand of m16n8k16, which has 16
// rows of them for 8 columns of queries:
//
//   S = K Q^T     rows = cells, columns = query rows, contracted = channels
//   O = V^T P^T   rows = channels, columns = query rows, contracted = cells
//
// Unpacking is one AND per two codes: the fields of a word's plane, two bytes apart, are two f16 denormals code *
// 2^(W*plane - 24), which tensor cores multiply exactly. The plane's weight 2^-(W*plane) goes into the other
// operand, with the scale, the power of two that is left over comes off in f32. Zeros are one more product:
// q.(zero + scale*code) = q.zero + (q*scale).code  and likewise p.
//
// A thread is (g = lane/4, c = lane%4). Of the 64 cells it holds
//   in S   the rows:    cells 16*(g/2) + 2*(g%2) + 4j + {0, 1},  j = 0..3
//   in O   contracted:  cells 16c + 4j + {0..3}: of a word of V plane j, bytes (0,2) and (1,3);
//                       one movmatrix per 8 cells brings P there
// and of the channels of S  base(c, s) + {0..3}, s = 0..D/16-1, of those of O  32i + 4g + {0..3}, i = 0..D/32-1.
//
// This is right because a sum does not depend on the order of channels in S, nor of cells in O.
//
// Keys with groups of 32 cells (16) have 2 (4) scales within the 64 cells. The 8 columns then hold the 4 (2) query
// rows once per group, multiplied with that group's scales, and a column sees its own cells only; columns of a row
// are added up at the end like splits are. FINE: of 16 in keys and values, or of 32 where query rows are many;
// other cells and channels to a thread, and a row has one column (decode_fine.cuh).
#pragma once

#include "decode_mask.cuh"
#include "decode_means.cuh"
#include "decode_merge.cuh"
#include "decode_open.cuh"
#include "decode_picked.cuh"
#include "decode_room.cuh"

namespace {

template <int D, int KB, int VB, bool MEANS, int FINE, bool WIDE, int PART>
__global__ void __launch_bounds__(32 * decode_warps<D, KB, MEANS, FINE, WIDE>,
    WIDE                                 ? 1
        : takes_many<D, KB, MEANS, FINE> ? 2
                                         : 3) decode_kernel(const __grid_constant__ kvq_attend_args a) {
    typedef slice_of<D, WIDE> slice;
    constexpr int S = D / 16;
    constexpr bool CODES = KB != 16, ROTATED = KB > LATTICE; // sealed pages exist, and are rotated
    constexpr bool BOTH = PART == WHOLE || PART == AHEAD, PICKED = PART == VALUES || PART == AHEAD;
    static_assert(BOTH || (!FINE && (KB == VB || (PART == LOGITS && is_split<KB>) )), "parts have one operand");
    static_assert(!is_split<KB> || MEANS, "kernels for split keys are for pages that lack their means");
    constexpr int G = FINE == 3 ? 32 : 16;
    // may have parts of open cells
    constexpr bool OPENS = PART == WHOLE && WIDE && (FINE == 3 || (ROTATED && !is_split<KB>) );
    constexpr float FROM_K = (float) (1 << (24 - K_BOOST)), FROM_V = (float) (1 << (24 - v_boost<VB>()));
    early_start();
    extern __shared__ __align__(16) uint8_t memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4, is = blockIdx.z;
    const slice of(a, warp);
    const block_share share = share_of<PART == WHOLE>(a);
    if (PART == WHOLE && !share.n_splits) { return; }
    const int columns_log2 = FINE ? 0 : a.k_parts_log2, per_row = DECODE_COLUMNS >> columns_log2, kvh = share.kvh,
              row0 = share.rows * per_row;
    const auto & st = a.stream[is];

    typedef decode_sums<D, decode_warps<D, KB, MEANS, FINE, WIDE>> sums_type;
    // points, then what warps have: two stages, 8-bit parameters in f16, the pages of four units, cells of two units'
    // slots, probabilities on their way; then sums of teams, queries
    const int nb_warp = warp_bytes(a);
    uint32_t *const k_table = (uint32_t *) memory, *const v_table = k_table + (ROTATED ? key_points<KB> : 0);
    uint8_t *const stages = memory + nb_tables<KB, VB>() + warp * nb_warp, *const wide = stages + 2 * a.stage_bytes;
    kvq_page * const ring = (kvq_page *) (wide + a.stage_wide);
    int32_t * const maps = (int32_t *) (ring + 8);
    const uint32_t stages_at = (uint32_t) __cvta_generic_to_shared(stages),
                   ring_at = stages_at + 2 * a.stage_bytes + a.stage_wide,
                   maps_at = ring_at + 8 * (int) sizeof(kvq_page);
    const int turn = FINE ? nb_warp - FINE_TURN : 0;
    const int per_page = 1 << a.halves_log2, n_halves = share.n_pages << a.halves_log2, n_units = (n_halves + 1) / 2;
    // This team's units: one of the last ones, which are open and take longest, then others, from the last one on.
    const int picking = PICKED ? a.n_picking : 0, n_splits = share.n_splits - picking;
    const bool picks = PICKED && (int) blockIdx.x < picking; // decode_picked.cuh: no near cells
    const team_units<OPENS> units(a, n_units, n_splits * of.teams, of.team * n_splits + share.split - picking);
    const int n_mine = picks ? 0 : units.count();
    const auto half_of = [&](int unit, int h) { return 2 * units.at(a, unit) + h; };

    const auto copy_pages = [&](int unit) { // of both halves of 32 cells
        const int half = min(half_of(unit, lane / 3), n_halves - 1);
        if (lane < 6) {
            const int page = share.page(half >> a.halves_log2);
            copy16(ring_at + (unit % 4 * 2 + lane / 3) * (int) sizeof(kvq_page) + lane % 3 * 16,
                (const char *) &st.pages[page] + lane % 3 * 16);
        }
    };
    const auto copy_maps = [&](int unit, int s0, int s1) { // of halves that are there: 32 cells, 8 pieces
        const int h = lane / 8, half = half_of(unit, h);
        if (lane < 16 && (h ? s1 : s0) >= 0 && ring[unit % 4 * 2 + h].map) {
            copy16(maps_at + (unit % 2 * 64 + lane * 4) * 4,
                ring[unit % 4 * 2 + h].map + kvh * a.map_stride + (half & (per_page - 1)) * 32 + lane % 8 * 4);
        }
    };
    const auto first_cell = [&](int half) { return (half & (per_page - 1)) * 32; };
    // what a half holds: -1 no cells, +1 codes of K, +2 codes of V
    const auto state_of = [&](int unit, int h) {
        const kvq_page & p = ring[unit % 4 * 2 + h];
        if (!BOTH && half_of(unit, h) < n_halves && p.n_slots) { // of the one that is read
            return CODES && (PART == LOGITS ? p.k_params : p.v_params) ? 3 : 0;
        }
        return half_of(unit, h) >= n_halves || !p.n_slots
            ? -1
            : (CODES && p.k_params ? 1 : 0) + (CODES && p.v_params ? 2 : 0);
    };
    clear_beyond<D>(of, stages, 2 * a.stage_bytes + a.stage_wide);
    if (n_mine) { copy_pages(0); }
    uint8_t * const shared_sums = memory + nb_tables<KB, VB>() + of.warps * nb_warp; // of teams
    int sums_turn = 0;
    // of open keys, then of rotated ones
    uint2 * const queries = (uint2 *) (shared_sums + (WIDE && of.n > 1 ? of.warps * TEAM_BYTES : 0));
    // rows as they come, or coefficients of means
    float * const of_rows = (float *) (queries + (ROTATED ? 2 : 1) * of.n * S * 32);
    fine_lane * const lanes = (fine_lane *) of_rows; // FINE == 3
    if constexpr (FINE == 3) {
        if (warp < of.n) { lanes[threadIdx.x] = fine_lane_of<D, KB, VB>(a, of, kvh); }
        __syncthreads();
    }
    if constexpr (ROTATED) {
        if (PART != VALUES) { load_key_tables<KB>(a, k_table); }
        if (PART != LOGITS) { load_table(v_table, a.v.points, 1 << cut<VB>::B); }
    }

    const __half * mask[2];
    float *logits[2] = {}, slope[2]; // of the row, slot after slot
    bool has_row[2] = {};
    float l_all[2] = { 0.0f, 0.0f }; // AHEAD: l of picked cells as well
#pragma unroll
    for (int e = 0; e < 2; e++) { // columns 2c + e
        const int row = min(row0 + (2 * c + e) % per_row, a.n_rows - 1), token = row_token(a, row),
                  head = row_head(a, kvh, row);
        slope[e] = alibi_slope(a, head) * LOG2E;
        if constexpr (PART != WHOLE) {
            logits[e] = st.logits + ((size_t) kvh * a.n_rows + row) * a.n_logits;
            has_row[e] = row0 + (2 * c + e) % per_row < a.n_rows;
        }
        mask[e] = st.mask ? st.mask + token * a.mask_stride_token + head * a.mask_stride_head : nullptr;
    }
    const bool one_mask = a.n_q == 1 && a.mask_stride_head == 0, by_lane = FINE && one_mask;
    const auto ask_mask = [&](int unit, int s0, int s1) { // of cells 2 * lane, 2 * lane + 1 of a unit without maps
        if ((lane < 16 ? s0 : s1) < 0) { return; }
        const kvq_page & page = ring[unit % 4 * 2 + lane / 16];
        const int slot = first_cell(half_of(unit, lane / 16)) + lane % 16 * 2, at = unit % 2 * 64 + 2 * lane;
        if (mask[0] && !page.map && page.cell + slot + 2 <= a.n_kv) {
            copy4(maps_at + 4 * at, mask[0] + page.cell + slot);
        } else {
            maps[at] = (int32_t) mask_pair(a, mask[0], page, page.map + slot, slot);
        }
    };
    // this thread's columns belong to its cells' scales
    const bool mine = c >> (2 - columns_log2) == g >> (3 - columns_log2);
    // of all of this thread's probabilities: v_weight of the step that contracts its cells
    const int weight = FINE ? v_boost<VB>() - cut<VB>::W * (g / 2 % cut<VB>::P) : 0;
    const int in_half = g / 2 % 2 * 16 + g % 2 * 2;

    // l_sealed: of values that lack their mean
    float o[S][4] = {}, oz[4] = {}, m[2] = { -INFINITY, -INFINITY }, l[2] = { 0.0f, 0.0f },
          l_sealed[2] = { 0.0f, 0.0f };
    bool of_codes = CODES;        // o in units of codes: times FROM_V; or rotated
    uint32_t raw[n_raw<KB>] = {}; // scales of a lattice unit on their way
    const shared_query q = { queries + of.i * S * 32 + lane }, q_rotated = { q.at + of.n * S * 32 };
    int32_t places[2] = {}; // positions of a unit on their way
    const auto load_places = [&](int unit, int h0, int h1) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            places[i] = __ldg(
                st.positions + ring[unit % 4 * 2 + (i ? h1 : h0)].cell + first_cell(half_of(unit, i ? h1 : h0)) + lane);
        }
    };
    const auto put_places = [&](int unit) {
        int32_t * to = (int32_t *) (stages + unit % 2 * a.stage_bytes + lattice_map<D, KB, VB>::BYTES);
        to[lane] = places[0];
        to[lane + 32] = places[1];
        __syncwarp();
    };
    int state0 = -1, state1 = -1, next0 = -1, next1 = -1;
    for (int unit = -1; unit < n_mine; unit++) {
        copies_done();
        state0 = next0;
        state1 = next1;
        if constexpr (ROTATED) {
            if (state0 == 3 || state1 == 3) {
                if constexpr (MEANS && PART != VALUES) { put_places(unit); }
                put_scales<D, KB, VB>(a, stages + unit % 2 * a.stage_bytes, raw);
            }
        }
        if (unit + 1 < n_mine) { // what is sealed of it, ahead of its turn; and the pages of the one after it
            next0 = state_of(unit + 1, 0);
            next1 = state_of(unit + 1, 1);
            if (of.i == 0 && lane < 2 && !(OPENS && unit < 0 && units.skipped)) {
                const int state = lane ? next1 : next0;
                if (state >= 0 && state < 3) {
                    ask_open_rows(a, ring[(unit + 1) % 4 * 2 + lane], kvh, first_cell(half_of(unit + 1, lane)),
                        state |
                            (PART == VALUES          ? 1
                                    : PART == LOGITS ? 2
                                                     : 0));
                }
            }
            if constexpr (CODES) {
                if (next0 == 3 || next1 == 3) { // one sealed half takes both places
                    const int h = lane / 16 ? (next1 == 3 ? 1 : 0)
                        : next0 == 3        ? 0
                                            : 1,
                              t = first_cell(half_of(unit + 1, h));
                    const uint32_t to = stages_at + (unit + 1) % 2 * a.stage_bytes;
                    const kvq_page & page = ring[(unit + 1) % 4 * 2 + h];
                    if constexpr (FINE == 3) {
                        const kvq_page of_half = page; // copies are no reason to read these again
                        const fine_lane pieces = lanes[32 * of.i + lane];
                        copy_fine_unit<D, KB, VB>(a, of, to, of_half, pieces, kvh, t);
                    } else if constexpr (FINE) {
                        copy_fine<D, KB, VB, FINE == 2, G>(a, of, to, page, kvh, t, true, true);
                    } else if constexpr (ROTATED) {
                        copy_lattice<D, KB, VB>(a, of, to, page, kvh, t, PART != VALUES, PART != LOGITS, raw);
                        if constexpr (MEANS && PART != VALUES) {
                            load_places(unit + 1, next0 == 3 ? 0 : 1, next1 == 3 ? 1 : 0);
                        }
                    } else {
                        copy_stage<D, KB, VB>(a, of, to, page, kvh, t, PART != VALUES, PART != LOGITS);
                    }
                }
            }
            if (a.map_stride) { copy_maps(unit + 1, next0, next1); }
            copy_pages(unit + 2);
            if (by_lane && !a.map_stride && unit >= 0) { ask_mask(unit + 1, next0, next1); }
        }
        // sealed pages are older than the kernel before this one and were asked for without waiting for it
        if (unit < 0) {
            early_wait();
            if constexpr (OPENS) { put_fresh(a, of, kvh); }
            if (by_lane && !a.map_stride && n_mine) { ask_mask(0, next0, next1); }
            const auto row_of = [&](int column) {
                const int row = min(row0 + column % per_row, a.n_rows - 1);
                return st.q + row_token(a, row) * a.q_stride_token + row_head(a, kvh, row) * a.q_stride_head;
            };
            // every warp comes here once
            if (picks) { // they read rows as they come
            } else if constexpr (ROTATED && PART != VALUES) {
                share_all_queries<D, KB, MEANS, copies_rows<KB, MEANS, WIDE>>(a, of, warp, data_of(a, of, kvh),
                    min(per_row, a.n_rows - row0), queries, of_rows, of_rows, nullptr, row_of);
            } else if constexpr (PART != VALUES) {
                share_queries<D, KB>(a, of, queries, row_of);
            }
            if (OPENS && units.skipped) { // what is open has its turn at the end
                next0 = next0 ? next0 : -1;
                next1 = next1 ? next1 : -1;
            }
            __syncthreads();
            continue;
        }
        uint8_t * stage = stages + unit % 2 * a.stage_bytes;
        const uint8_t * params = stage;
        if constexpr (CODES && !ROTATED) {
            params = FINE == 2 || (!FINE && a.k.scale) ? wide : stage + stage_map<D, KB, VB>::K_PARAMS;
        }
        const auto arrange = [&] { // parameters that have arrived
            if constexpr (FINE) {
                arrange_fine<D, KB, VB, FINE == 2, G>(a, stage, wide);
            } else if constexpr (CODES && !ROTATED) {
                if (a.k.scale) { widen_stage<D, KB, VB>(a, stage, wide, PART != VALUES, PART != LOGITS); }
            }
        };
        if (by_lane && a.map_stride && (lane < 16 ? state0 : state1) >= 0) { // cells give way to their mask
            int32_t * const at = maps + unit % 2 * 64 + 2 * lane;
            *at = (int32_t) mask_pair(
                a, mask[0], ring[unit % 4 * 2 + lane / 16], at, first_cell(half_of(unit, lane / 16)) + lane % 16 * 2);
        }
        if (state0 == 3 || state1 == 3) { arrange(); }
        bool staged = true;
        int todo = (state0 >= 0 ? 1 : 0) + (state1 >= 0 ? 2 : 0);
        while (todo) { // both halves at once when they are alike
            const int first = todo & 1 ? 0 : 1, now = first ? state1 : state0;
            const bool both = todo == 3 && state0 == state1;
            const int sel = both ? 3 : 1 << first;
            todo &= ~sel;
            const int kh = both ? g / 4 : first, vh = both ? c / 2 : first; // halves that this thread reads
            const kvq_page & kp = ring[unit % 4 * 2 + kh];
            const kvq_page & vp = ring[unit % 4 * 2 + vh];
            const bool here = sel >> g / 4 & 1;
            uint32_t mk[2][4] = {};
            if constexpr (PART == VALUES) { // in the logits
            } else if (by_lane) {           // behind the products
            } else if constexpr (FINE) {    // this thread has cells of both halves
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int from = both ? h : first, slot = first_cell(half_of(unit, from)) + 2 * g;
                    const kvq_page & page = ring[unit % 4 * 2 + from];
                    load_mask<2, 16>(a, mask, one_mask, page,
                        a.map_stride ? maps + unit % 2 * 64 + from * 32 + 2 * g : page.map + slot, slot, 2 * h, mk);
                }
            } else {
                const int slot = first_cell(half_of(unit, kh)) + in_half;
                load_mask<4, 4>(a, mask, one_mask, kp,
                    a.map_stride ? maps + unit % 2 * 64 + kh * 32 + in_half : kp.map + slot, slot, 0, mk);
            }
            if constexpr (CODES && BOTH) {
                if (now > 0 && !(now == 3 && staged)) { // no warp asked for these ahead of time
                    staged = false;
                    const int h = both ? lane / 16 : first, t = first_cell(half_of(unit, h));
                    const uint32_t to = stages_at + unit % 2 * a.stage_bytes;
                    const kvq_page & page = ring[unit % 4 * 2 + h];
                    __syncwarp();
                    if constexpr (FINE) {
                        copy_fine_late<D, KB, VB, FINE == 2, G>(a, of, to, page, kvh, t, now & 1, now & 2);
                    } else if constexpr (ROTATED) {
                        copy_lattice_late<D, KB, VB>(a, of, stage, page, kvh, t, now & 1, now & 2);
                    } else {
                        copy_stage_late<D, KB, VB>(a, of, to, page, kvh, t, now & 1, now & 2);
                    }
                    if constexpr (MEANS) {
                        const int32_t next[2] = { places[0], places[1] }; // those of the next unit are on their way
                        load_places(unit, both ? 0 : first, both ? 1 : first);
                        put_places(unit);
                        places[0] = next[0];
                        places[1] = next[1];
                    }
                    if constexpr (!ROTATED) {
                        copies_done();
                        arrange();
                    }
                }
            }
            float s[4][4], zeros[4] = {};
            const bool selected = here && mine;
            // logits of this thread's cells, as s has them: cells 4j, 4j + 1 of a column from here on
            const size_t at_logits = (size_t) half_of(unit, kh) * 32 + in_half;
            if constexpr (PART == VALUES) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float2 x = make_float2(-INFINITY, -INFINITY);
                        if (selected) { x = __ldcg((const float2 *) (logits[e] + at_logits + 4 * j)); }
                        s[j][e] = x.x;
                        s[j][2 + e] = x.y;
                    }
                }
            } else if constexpr (ROTATED) {
                if (now & 1) { score_lattice<D, KB, VB>(k_table, q_rotated, stage, s); }
                if constexpr (MEANS) {
                    if (now & 1) {
                        add_means<D, KB>(a, of, of_rows, (const int32_t *) (stage + lattice_map<D, KB, VB>::BYTES), s);
                    }
                }
            } else if constexpr (FINE) {
                if (now & 1) { score_fine<D, KB, VB, G>(q, stage, params, s); }
            } else if constexpr (CODES) {
                if (now & 1) { score<D, KB, VB>(a, q, stage, params, s, zeros); }
            }
            if (PART != VALUES && !(now & 1)) {
                if constexpr (FINE) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const int from = both ? j / 2 : first, t = first_cell(half_of(unit, from)) + j % 2 * 16 + 2 * g;
                        float x[4]; // in memory for the call, s is not
                        score_fine_open_rows<D, KB>(of, q,
                            (const uint16_t *) ring[unit % 4 * 2 + from].k_codes +
                                ((size_t) kvh * a.k.n_cells + t) * a.k.stride + of.first(),
                            a.k.stride, x);
#pragma unroll
                        for (int i = 0; i < 4; i++) { s[j][i] = x[i]; }
                    }
                } else {
                    const uint16_t * rows = (const uint16_t *) kp.k_codes +
                        ((size_t) kvh * a.k.n_cells + first_cell(half_of(unit, kh)) + in_half) * a.k.stride +
                        of.first();
                    if constexpr (CODES) {
                        float x[4][4]; // in memory for the call, s is not
                        score_open_rows<D, KB>(of, q, rows, a.k.stride, x);
#pragma unroll
                        for (int i = 0; i < 16; i++) { s[i / 4][i % 4] = x[i / 4][i % 4]; }
                    } else {
                        score_open<D, KB, false>(of, q, rows, a.k.stride, s);
                    }
                }
            }
            if (by_lane && PART != VALUES) {
                __syncwarp();
#pragma unroll
                for (int j = 0; j < 4; j++) { mk[0][j] = (uint32_t) maps[unit % 2 * 64 + 16 * j + 2 * g]; }
            }
            if (one_mask) {
#pragma unroll
                for (int j = 0; j < 4; j++) { mk[1][j] = mk[0][j]; }
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (FINE ? !(sel >> j / 2 & 1) : !selected) { mk[0][j] = mk[1][j] = 0xfc00fc00u; }
            }
            if constexpr (!FINE && PART != VALUES) {
                const float unit_k = CODES && !ROTATED && (now & 1) ? FROM_K : 1.0f;
                scale_scores(unit_k, zeros, s);
            }
            if constexpr (WIDE && PART != VALUES) { team_sum(of, shared_sums, sums_turn, s); }
            float top[2] = { -INFINITY, -INFINITY }, f[2];
            bool seen;
            if constexpr (PART == VALUES) {
                seen = find_tops(s, top);
            } else {
                cap_scores(a, s);
                seen = mask_scores(mk, slope, s, top);
            }
            if constexpr (PART == LOGITS || PART == AHEAD) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        if (selected && has_row[e] && of.i == 0) {
                            *(float2 *) (logits[e] + at_logits + 4 * j) = make_float2(s[j][e], s[j][2 + e]);
                        }
                    }
                }
            }
            if (!seen) { continue; }
            if (raise_maxima(top, m, o, f)) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    l[e] *= f[e];
                    l_all[e] *= f[e];
                    l_sealed[e] *= f[e];
                    oz[e] *= f[e];
                }
            }
            uint32_t p[4][2];
            const float before[2] = { l[0], l[1] };
            uint32_t out = 0; // AHEAD: bits 4j, 4j + 1 of cells that were picked
            if constexpr (PART == AHEAD) {
                out = __ldcg(st.picked + (size_t) kvh * a.n_picked_words + half_of(unit, kh)) >> in_half;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float back = FINE ? 1.0f : exp2_of(-v_weight<VB>(j)),
                            boost = FINE ? (float) weight : (float) v_weight<VB>(j);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float lower = m[i % 2] == -INFINITY ? 0.0f : m[i % 2];
                    s[j][i] = exp2_fast(s[j][i] - (lower - boost));
                    if constexpr (PART == AHEAD) {
                        l_all[i % 2] = fmaf(s[j][i], back, l_all[i % 2]);
                        if (out >> (4 * j + i / 2) & 1) { s[j][i] = 0.0f; }
                    }
                    l[i % 2] = fmaf(s[j][i], back, l[i % 2]);
                }
                if constexpr (!FINE && PART != LOGITS) {
                    p[j][0] = transpose(pack_half2(s[j][0], s[j][1]));
                    p[j][1] = transpose(pack_half2(s[j][2], s[j][3]));
                }
            }
            if constexpr (PART == LOGITS) { continue; }
            if constexpr (FINE) { turn_probabilities(stages + turn, stages_at + turn, s, p); }
            if (MEANS && (now & 2)) {
                l_sealed[0] += l[0] - before[0];
                l_sealed[1] += l[1] - before[1];
            }
            if constexpr (CODES) {
                if (of_codes != ((now & 2) != 0)) {
                    of_codes = (now & 2) != 0;
                    if constexpr (ROTATED) {
                        rotate_output<D>(a, of, shared_sums, sums_turn, o);
                    } else {
                        const float f = of_codes ? 1.0f / FROM_V : FROM_V;
#pragma unroll
                        for (int n = 0; n < 4 * S; n++) { o[n / 4][n % 4] *= f; }
                    }
                }
                if (now & 2) {
                    if constexpr (ROTATED) {
                        accumulate_lattice<D, KB, VB, 1>(v_table, stage, p, o);
                    } else if constexpr (FINE) {
                        accumulate_fine<D, KB, VB, G>(stage, params, p, o, oz);
                    } else if (a.v_group_log2 == 4) {
                        accumulate<D, KB, VB, true>(a, stage, params, p, o, oz);
                    } else {
                        accumulate<D, KB, VB, false>(a, stage, params, p, o, oz);
                    }
                }
            }
            if (!(now & 2)) {
                const int t = first_cell(half_of(unit, vh)) + c % 2 * 16;
                const uint16_t * rows =
                    (const uint16_t *) vp.v_codes + ((size_t) kvh * a.v.n_cells + t) * a.v.stride + of.first();
                if constexpr (CODES) {
                    uint32_t y[4][2]; // in memory for the call, p and o are not
                    float x[S][4];
#pragma unroll
                    for (int i = 0; i < 8; i++) { y[i / 2][i % 2] = p[i / 2][i % 2]; }
#pragma unroll
                    for (int i = 0; i < 4 * S; i++) { x[i / 4][i % 4] = o[i / 4][i % 4]; }
                    if constexpr (FINE) {
                        accumulate_fine_open_rows<D, VB>(of, rows, a.v.stride, y, x);
                    } else {
                        accumulate_open_rows<D, VB>(of, rows, a.v.stride, y, x);
                    }
#pragma unroll
                    for (int i = 0; i < 4 * S; i++) { o[i / 4][i % 4] = x[i / 4][i % 4]; }
                } else {
                    accumulate_open<D, VB, false>(of, rows, a.v.stride, p, o);
                }
            }
        }
    }
    if constexpr (OPENS) {
        put_part<D, KB, slice>(
            a, share, is, queries, stages, shared_sums + sums_turn * of.warps * TEAM_TURN,
            [&](open_part & part, int e) {
                part.row[e] = row0 + 2 * c + e < a.n_rows ? row0 + 2 * c + e : -1;
                part.mask[e] = mask[e];
                part.slope[e] = slope[e];
            },
            [&](auto && f) {
#pragma unroll
                for (int n = 0; n < 4 * S; n++) { f(n, o[n / 4][n % 4]); }
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    f(4 * S + e, m[e]);
                    f(4 * S + 2 + e, l[e]);
                    if constexpr (MEANS) { f(4 * S + 4 + e, l_sealed[e]); }
                    if constexpr (!ROTATED) {
                        f(4 * S + 4 + e, oz[e]);
                        f(4 * S + 6 + e, oz[2 + e]);
                    }
                }
            });
    }
    // this thread's columns, over all cells of the warp
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    sums_type & sums = *(sums_type *) memory;
    const auto put_all_tops = [&](auto && sum_of) {
        put_tops(a, of, sums, is, kvh, row0, min(per_row, a.n_rows - row0), columns_log2, a.n_splits - picking,
            (int) blockIdx.x - picking, sum_of);
    };
    if constexpr (PART == LOGITS) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            l[e] = column_sum(l[e]);
            if (g == 0) {
                sums.m[warp][2 * c + e] = m[e];
                sums.l[warp][2 * c + e] = l[e];
            }
        }
        __syncthreads();
        put_all_tops([&](int w, int column) { return sums.l[w][column]; });
    } else {
        float * const all = (float *) (memory + picked_at<sums_type>()); // AHEAD: [warp][column], of near cells
        if constexpr (PICKED) {
            if (picks) {
                sum_picked<D>(
                    a, of, sums, memory + picked_at<sums_type>(), is, kvh, row0, min(per_row, a.n_rows - row0));
            }
        }
#pragma unroll
        for (int e = 0; e < 2 && !picks; e++) {
            if constexpr (FINE) { l[e] *= exp2_fast((float) -weight); }
            l[e] = column_sum(l[e]);
            if constexpr (MEANS) { l_sealed[e] = column_sum(l_sealed[e]); }
            if constexpr (PART == AHEAD) { l_all[e] = column_sum(l_all[e]); }
            if (g == 0) {
                sums.m[warp][2 * c + e] = m[e];
                sums.l[warp][2 * c + e] = l[e];
                if constexpr (MEANS) { sums.l_sealed[warp][2 * c + e] = l_sealed[e]; }
                if constexpr (PART == AHEAD) { all[warp * DECODE_COLUMNS + 2 * c + e] = l_all[e]; }
                if (ROTATED) { sums.as_is[warp] = !of_codes; }
            }
            const float f = of_codes && !ROTATED ? FROM_V : 1.0f;
            if constexpr (FINE) {
#pragma unroll
                for (int k = 0; k < S; k++) {
                    const float z = __shfl_sync(~0u, oz[e], k / (G / 16) * 4 + c);
                    *(float2 *) &sums.o[warp][2 * c + e][16 * k + 2 * g] =
                        make_float2(fmaf(o[k][e], f, z), fmaf(o[k][2 + e], f, z));
                }
            } else {
#pragma unroll
                for (int i = 0; i < D / 32; i++) {
                    const float z = CODES && !ROTATED
                        ? __shfl_sync(~0u, oz[e],
                              (WIDE ? (32 * i + 4 * g) >> a.v_group_log2 : (32 * i + 4 * g) / a.v.group) * 4 + c)
                        : 0.0f;
                    *(float4 *) &sums.o[warp][2 * c + e][32 * i + 4 * g] = make_float4(fmaf(o[2 * i][e], f, z),
                        fmaf(o[2 * i][2 + e], f, z), fmaf(o[2 * i + 1][e], f, z), fmaf(o[2 * i + 1][2 + e], f, z));
                }
            }
        }
        __syncthreads();
        if (PART == AHEAD && !picks) {
            put_all_tops([&](int w, int column) { return all[w * DECODE_COLUMNS + column]; });
        }
        merge_rows<D, ROTATED, MEANS, false>(a, of, sums, is, share, row0, min(per_row, a.n_rows - row0));
    }
}

} // namespace

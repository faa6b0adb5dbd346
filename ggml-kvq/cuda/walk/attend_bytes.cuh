// Attention of few query rows of a KV head over long caches: affine pages with groups of 64 or more, lattice pages of 2
// bits a value. A warp walks 64 cells at a time as in attend_decode.cuh, and threads hold the same cells and channels,
// but what it asks for lies in a table (decode_bytes_stage.cuh). WIDE: heads in slices, as there.
//
// Up to 4 rows (E = 1): products are in 8 bits (decode_bytes.cuh). Two of the 8 columns belong to one row, so that a
// thread has half as many scores, masks and sums.
// More rows (E = 2 rows of a thread): a column is a row. Lattice pages (decode_bytes_lattice.cuh) then take two
// products in 8 bits. Affine pages take one in f16 (decode_products.cuh), which unpacks two codes at once instead of
// four, but needs no new 8-bit queries for every page.
//
// In long caches a warp reads the units of whole pages, because units of one page share the scaled queries.
#pragma once

#include "decode_bytes_means.cuh"
#include "decode_bytes_stage.cuh"
#include "decode_mask.cuh"
#include "decode_merge.cuh"
#include "decode_open.cuh"
#include "decode_picked.cuh"

namespace {

// Tables of means take memory and registers from teams of slices.
template <bool MEANS, bool WIDE> constexpr bool is_lean = MEANS && WIDE;
template <int D, bool MEANS, bool WIDE> using bytes_slice = slice_of<D, WIDE, is_lean<MEANS, WIDE> ? 1 : 2>;

// Shared memory of a warp: two stages, 8-bit parameters in f16, the pages of both halves of four units, turns.
template <bool MEANS, bool WIDE> __host__ __device__ __forceinline__ int bytes_warp(const kvq_attend_args & a) {
    return 2 * a.stage_bytes + a.stage_wide + 8 * (int) sizeof(kvq_page) +
        (is_lean<MEANS, WIDE> ? (int) sizeof(shared_turns) : 0);
}

// What open values add to a thread's rows: o += rest x or, where o is rotated, rest H x. rows: of this thread's first
// cell, channel 0 of the slice; VB: of v_weight; x: sums of products, of E = 1 the first column of each row; all, turn:
// memory of the team. A function of its own: few units are open, and it would be a large part of a kernel.
template <int D, int VB, bool ROTATED, int E, typename X>
__device__ __noinline__ void add_open_values(const kvq_attend_args & a, const X of, const uint16_t * rows,
    uint8_t * all, int turn, const uint32_t (&p)[4][2], const float (&rest)[E], float (&o)[D / 16][2 * E]) {
    float x[D / 16][4] = {};
    accumulate_open<D, VB, false>(of, rows, a.v.stride, p, x);
    if constexpr (ROTATED) { rotate_columns<D, X, E>(a, of, all, turn, x); }
#pragma unroll
    for (int n = 0; n < D / 8 * E; n++) {
        const int i = n / (2 * E), channel = n / E % 2, e = n % E;
        o[i][E * channel + e] = fmaf(x[i][2 * channel + e], rest[e], o[i][E * channel + e]);
    }
}

// Blocks of a multiprocessor: with more, what does not fit into registers goes through the L2 cache, because shared
// memory leaves the first level little. Slices have one, of more warps.
template <bool MEANS, bool WIDE> constexpr int bytes_blocks = WIDE ? 1 : MEANS ? 2 : 3;
template <bool WIDE> constexpr int bytes_warps = most_warps<WIDE, false>();

// MEANS: sealed pages lack theirs (decode_means.cuh). AHEAD: as in attend_decode.cuh
template <int D, int KB, int VB, bool MEANS, bool WIDE, bool AHEAD, int E>
__global__ void __launch_bounds__(32 * bytes_warps<WIDE>, bytes_blocks<MEANS, WIDE>)
    bytes_kernel(const __grid_constant__ kvq_attend_args a) {
    typedef bytes_slice<D, MEANS, WIDE> slice;
    typedef decode_sums<D, bytes_warps<WIDE>> sums_type;
    constexpr bool TABLES = is_tabled<KB, VB>; // of a lattice
    static_assert((E == 1 || !AHEAD) && !(TABLES && (AHEAD || WIDE)));
    constexpr int S = D / 16;
    // POINTS: pages may have 32 cells, so that a unit is of two; what is sealed is rotated
    constexpr bool POINTS = KB > LATTICE, LEAN = is_lean<MEANS, WIDE>;
    constexpr bool HALF = E == 2 && !POINTS; // products in f16; o is in units of codes
    constexpr float FROM_K = (float) (1 << (24 - K_BOOST)), FROM_V = (float) (1 << (24 - v_boost<VB>()));
    using map = stage_map<D, KB, VB>;
    using in_points = points_map<D, KB, VB>;
    early_start();
    extern __shared__ __align__(16) uint8_t memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const slice of(a, warp);
    const block_share share = share_of<true>(a);
    if (!share.n_splits) { return; }
    const int kvh = share.kvh, row0 = share.rows * DECODE_COLUMNS, n_rows = min(a.n_rows - row0, DECODE_COLUMNS),
              picking = AHEAD ? a.n_picking : 0,
              n_near = share.n_splits - picking; // blocks of near cells
    const bool picks = AHEAD && share.split < picking;
    const auto & st = a.stream[blockIdx.z];

    uint8_t *const stages = memory + warp * bytes_warp<MEANS, WIDE>(a), *const wide = stages + 2 * a.stage_bytes;
    kvq_page * const ring = (kvq_page *) (wide + a.stage_wide);
    const uint32_t stages_at = (uint32_t) __cvta_generic_to_shared(stages),
                   ring_at = stages_at + 2 * a.stage_bytes + a.stage_wide;
    uint8_t * const shared_sums = memory + of.warps * bytes_warp<MEANS, WIDE>(a); // of teams
    int sums_turn = 0;
    // as they are, then rotated
    uint2 * const queries = (uint2 *) (shared_sums + (WIDE && of.n > 1 ? of.warps * slice::TURNS * TEAM_TURN : 0));
    byte_lane * const lanes = (byte_lane *) (queries + (POINTS ? 2 : 1) * of.n * S * 32);
    uint8_t * const shared_points = (uint8_t *) (lanes + 32 * of.n);
    int2 * const byte_rows = (int2 *) (shared_points + nb_points<KB, VB>());
    // rows as they come, or coefficients of means
    float * const of_rows = (float *) (byte_rows + (E == 2 ? DECODE_COLUMNS * of.n : 0));
    clear_beyond<D>(of, stages, 2 * a.stage_bytes + a.stage_wide);

    // This team's units: first one of the last units, which are open, cold and take longest; then its turns of the
    // others, in runs within one page where there are many. Teams read neighbouring pages at the same time.
    const int n_halves = share.n_pages << a.halves_log2, n_units = (n_halves + 1) / 2, per_page = 1 << a.halves_log2,
              n_teams = n_near * of.teams, team = of.team * n_near + share.split - picking,
              from_last = n_teams - 1 - team, others = max(0, n_units - n_teams),
              run_log2 = POINTS || others < 4 * n_teams ? 0 : a.halves_log2 - 1,
              n_runs = others + (1 << run_log2) - 1 >> run_log2;
    const bool has_part = from_last < a.n_open; // of open cells: takes part in others' turns later
    // Without parts the first run, whose page stays open for sinks, changes places with one of a shorter team.
    const int first_turns = OPEN_TURNS * (n_teams - a.n_open),
              other_run = a.n_open || n_runs < n_teams ? 0 : n_runs % n_teams;
    const int first_unit = from_last >= n_units || picks ? -1 : own_unit(a, from_last, n_units);
    const auto team_turns = [&]() -> unit_turns {
        return { has_part ? first_turns + team : team, 0, others, run_log2, first_turns, n_teams - a.n_open, n_teams,
            other_run, n_units, {} };
    };
    unit_turns turns = {};
    shared_turns & kept = *(shared_turns *) (ring + 8);
    if constexpr (LEAN) {
        if (lane == 0) { kept = { team_turns(), { first_unit } }; }
        __syncwarp();
    } else {
        turns = team_turns();
    }
    // at: of the cache's units; unit: of this team's
    const auto cell_of = [&](int at, int h) { return (2 * at + h & (per_page - 1)) * 32; };
    const auto page_of = [&](int unit, int h) -> const kvq_page & { return ring[(unit & 3) * 2 + (POINTS ? h : 0)]; };
    const int of_page_lane = lane % 3 * 16, half_of_lane = POINTS ? lane / 3 : 0;
    const auto copy_pages = [&](int unit, int at) {
        if (lane < (POINTS ? 6 : 3)) {
            const int page = share.page(min(2 * at + half_of_lane, n_halves - 1) >> a.halves_log2);
            copy16(ring_at + ((unit & 3) * 2 + half_of_lane) * (int) sizeof(kvq_page) + of_page_lane,
                (const char *) &st.pages[page] + of_page_lane);
        }
    };
    // what a half holds: -1 no cells, +1 codes of K, +2 codes of V
    const auto state_of = [&](int unit, int at, int h) {
        const kvq_page & p = page_of(unit, h);
        return 2 * at + h >= n_halves || !p.n_slots ? -1 : (p.k_params ? 1 : 0) + (p.v_params ? 2 : 0);
    };
    uint16_t * const waves = (uint16_t *) (of_rows + DECODE_COLUMNS * means_step<D, WIDE>(a));
    if (first_unit >= 0) { copy_pages(0, first_unit); }
    if constexpr (POINTS) { copy_tables<KB, VB>(a, shared_points); }
    float * const rows_room = MEANS ? (float *) ((uint8_t *) waves + nb_waves<D, E>(a)) : of_rows;
    const head_data data = ask_data<D, MEANS>(a, of, kvh, rows_room + bytes_of_rows<D>(a) / 4);
    if constexpr (MEANS) {
        copies_part();
        copy_waves<D, E>(a, of, waves); // the first unit does not wait for them
        copies_part();
    }
    if (warp < of.n) { // codes of whole channels, or of vectors of two
        lanes[threadIdx.x] = unit_lane<D, KB, VB>(a, of, kvh);
    }
    __syncthreads();
    const byte_lane & my_lane = lanes[32 * of.i + lane];

    const int row = min(E * c, n_rows - 1); // AHEAD: of this thread, in the block
    const __half * mask[E];                 // of rows E*c + e
    float slope[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
        const int at = row0 + min(E * c + e, n_rows - 1), head = row_head(a, kvh, at);
        slope[e] = alibi_slope(a, head) * LOG2E;
        mask[e] = st.mask ? st.mask + row_token(a, at) * a.mask_stride_token + head * a.mask_stride_head : nullptr;
    }
    const bool one_mask = E == 1 || (a.n_q == 1 && a.mask_stride_head == 0);
    const int mine = g / 2 % 2 * 16 + g % 2 * 2; // cells mine + 4j + {0, 1} of half g / 4
    const shared_query q = { queries + of.i * S * 32 + lane };
    byte_query<D, 1> bytes;         // E = 1
    const void * of_page = nullptr; // whose scales are in `bytes`

    // oz: what zeros add, to two groups; HALF: zeros_v, to group g. l_sealed: of values that lack their mean; middle:
    // of accumulate_points. POINTS: o is rotated. l_all: AHEAD, of picked cells as well
    float o[S][2 * E] = {}, oz[E][2] = {}, zeros_v[4] = {}, m[E], l[E] = {}, l_all = 0.0f, l_sealed[E] = {},
                   middle[E] = {};
#pragma unroll
    for (int e = 0; e < E; e++) { m[e] = -INFINITY; }
    const auto copy_places = [&](int unit, int at, int h0, int h1) { // positions of a unit
        const uint32_t to = stages_at + (unit & 1) * a.stage_bytes + in_points::BYTES + 4 * lane;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int h = i ? h1 : h0;
            copy4(to + 128 * i, st.positions + page_of(unit, h).cell + cell_of(at, h) + lane);
        }
    };
    const auto ask_angles = [&](const uint8_t * stage) {
        const int32_t first = *(const int32_t *) (stage + in_points::BYTES);
        copy_angles<D>(a, of, stages_at + 2 * a.stage_bytes, first);
    };
    int coming = -1, behind = first_unit,
        states[2] = { -1, -1 }; // not LEAN: units of the next turns, and what they hold
#pragma unroll 1
    for (int unit = -1; unit < 0 || (LEAN ? kept.at[unit & 3] : coming) >= 0; unit++) {
        if (MEANS && unit < 0) {
            first_copies_done();
        } else {
            copies_done();
        }
        const int at = LEAN ? kept.at[unit & 3] : coming, at_next = LEAN ? kept.at[unit + 1 & 3] : behind;
        if (!LEAN) { coming = at_next; }
        int state0 = states[0], state1 = states[POINTS];
        if (LEAN && unit >= 0) { // of a team with a part what is open of its first unit has its turn at the end
            const auto state = [&](int h) {
                const int x = state_of(unit, at, h);
                return x || unit || !has_part ? x : -1;
            };
            state0 = state(0);
            state1 = state(1);
        }
        uint8_t * const stage = stages + (unit & 1) * a.stage_bytes;
        if constexpr (POINTS) {
            if (state0 == 3 || state1 == 3) {
                if constexpr (MEANS) { ask_angles(stage); }
                put_point_scales<D, KB, VB>(a, stage, kvh);
            }
        }
        if (at_next >= 0) { // ahead of its turn, and the pages of the one after it
            const int next0 = state_of(unit + 1, at_next, 0), next1 = POINTS ? state_of(unit + 1, at_next, 1) : next0;
            const uint32_t to = stages_at + (unit + 1 & 1) * a.stage_bytes;
            if constexpr (POINTS) {
                if (next0 == 3 || next1 == 3) { // one sealed half takes both places
                    const int h = lane / 16 ? (next1 == 3 ? 1 : 0) : next0 == 3 ? 0 : 1;
                    const byte_lane pieces = my_lane; // copies are no reason to read these again
                    const kvq_page page = page_of(unit + 1, h);
                    copy_points<D, KB, VB>(a, of, to, page, pieces, kvh, cell_of(at_next, h), 3);
                    if constexpr (MEANS) { copy_places(unit + 1, at_next, next0 == 3 ? 0 : 1, next1 == 3 ? 1 : 0); }
                }
            } else if (next0 == 3 && !a.k.scale) {
                const byte_lane pieces = my_lane;
                const kvq_page page = page_of(unit + 1, 0);
                copy_unit<D, KB, VB>(a, of, to, page, pieces, kvh, cell_of(at_next, 0));
            } else if (next0 > 0) {
                copy_stage_late<D, KB, VB>(
                    a, of, to, page_of(unit + 1, 0), kvh, cell_of(at_next, lane / 16), next0 & 1, next0 & 2);
            }
            // -1 & 3 is 3
            if ((POINTS ? min(next0 & 3, next1 & 3) : next0 & 3) < 3 && !(unit < 0 && has_part)) {
                const int mine_next = POINTS && lane ? next1 : next0;
                if (of.i == 0 && lane < 2 && mine_next >= 0 && mine_next < 3) {
                    ask_open_rows(a, page_of(unit + 1, lane), kvh, cell_of(at_next, lane), mine_next);
                }
            }
            const int at_second = LEAN ? kept.find(a, unit + 2) : turns.unit(a);
            if (at_second >= 0) { copy_pages(unit + 2, at_second); }
            if constexpr (!LEAN) {
                const int2 after = turns.after();
                turns.run = after.x;
                turns.in_run = after.y;
                behind = at_second;
                states[0] = next0;
                states[1] = next1;
            }
        }
        // sealed pages are older than the kernel before this one and were asked for without waiting for it
        if (unit < 0) {
            early_wait();
            put_fresh(a, of, kvh);
            const auto row_of = [&](int column) { // E = 1: two columns a row
                const int r = row0 + min(column * E / 2, n_rows - 1);
                return st.q + row_token(a, r) * a.q_stride_token + row_head(a, kvh, r) * a.q_stride_head;
            };
            if (picks) { // they read rows as they come
                __syncthreads();
            } else if constexpr (POINTS) {
                if constexpr (MEANS) {
                    copies_part();
                    first_copies_done();                                   // data, waves
                    if (WIDE || !bytes_of_rows<D>(a)) { __syncthreads(); } // else where rows are copied
                }
                share_all_queries<D, KB, MEANS, !WIDE, E == 1 ? 2 : 1>(a, of, warp, data, E == 1 ? 2 * n_rows : n_rows,
                    queries, rows_room, of_rows, (const float2 *) turn_of_32<D>(a, of, waves), row_of);
                __syncthreads();
                if constexpr (E == 1) {
                    quantise_unit<D, KB, VB, 1>({ q.at + of.n * S * 32 }, bytes);
                } else {
                    if (warp < of.n) {
                        share_bytes<D, KB, VB>(queries + (of.n + of.i) * S * 32, byte_rows + DECODE_COLUMNS * of.i);
                    }
                    __syncthreads();
                }
            } else {
                share_queries<D, KB>(a, of, queries, row_of);
                __syncthreads();
            }
            if (!LEAN && has_part) {
                for (int & x : states) { x = x ? x : -1; }
            }
            continue;
        }
        const uint8_t * const params = a.k.scale ? wide : stage + map::K_PARAMS;
        if (!POINTS && state0 > 0 && a.k.scale) { widen_stage<D, KB, VB>(a, stage, wide, state0 & 1, state0 & 2); }
        bool staged = true;
        if (!POINTS && state0 < 0) { continue; }
        int todo = POINTS ? (state0 >= 0 ? 1 : 0) + (state1 >= 0 ? 2 : 0) : 3;
        while (todo) { // both halves at once when they are alike
            const int first = !POINTS || todo & 1 ? 0 : 1, now = first ? state1 : state0;
            const bool both = !POINTS || (todo == 3 && state0 == state1);
            const int sel = both ? 3 : 1 << first;
            todo = POINTS ? todo & ~sel : 0;
            const int kh = both ? g / 4 : first, vh = both ? c / 2 : first; // halves that this thread reads
            const kvq_page & page = page_of(unit, kh);
            const int slot = cell_of(at, kh) + mine;
            const bool here = sel >> g / 4 & 1;
            uint32_t mk[E][4] = {}; // with one mask for both rows, mk[0] alone
#pragma unroll
            for (int e = 0; e < E; e++) {
                if (e && one_mask) { break; }
                if (!page.map && page.cell + cell_of(at, kh) + 32 <= a.n_kv) {
                    if (mask[e]) {
                        const uint32_t * const from = (const uint32_t *) (mask[e] + (uint32_t) (page.cell + slot));
#pragma unroll
                        for (int j = 0; j < 4; j++) { mk[e][j] = __ldg(from + 2 * j); }
                    }
                } else {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        mk[e][j] = mask_pair(a, mask[e], page, page.map + slot + 4 * j, slot + 4 * j);
                    }
                }
            }
            if constexpr (POINTS) {
                if (now > 0 && !(now == 3 && staged)) { // no warp asked for these ahead of time
                    staged = false;
                    const int h = both ? lane / 16 : first;
                    __syncwarp();
                    if constexpr (MEANS) { copy_places(unit, at, both ? 0 : first, both ? 1 : first); }
                    copy_points_late<D, KB, VB>(a, of, stage, page_of(unit, h), my_lane, kvh, cell_of(at, h), now);
                    if constexpr (MEANS) { ask_angles(stage); }
                }
            }
            float s[2 * E][4];
            if (now & 1) {
                if constexpr (POINTS) {
                    if constexpr (E == 1) {
                        score_unit<D, KB, VB, 1>(shared_points, bytes, stage, s);
                    } else {
                        const shared_bytes right = { (const uint4 *) (queries + (of.n + of.i) * S * 32) + lane,
                            (const int4 *) (byte_rows + DECODE_COLUMNS * of.i) + c };
                        score_unit<D, KB, VB, 2>(shared_points, right, stage, s);
                    }
                    if constexpr (MEANS) {
                        const int32_t * const places_at = (const int32_t *) (stage + in_points::BYTES);
                        angles_done();
                        if constexpr (E == 1) {
                            add_row_means<D, KB>(a, of, waves, of_rows, places_at, (float *) wide, s);
                        } else {
                            add_cell_means<D, KB>(a, of, waves, of_rows, places_at, (float *) wide, s);
                        }
                    }
                } else if constexpr (HALF) {
                    float zeros[4];
                    score<D, KB, VB>(a, q, stage, params, s, zeros);
                    scale_scores(FROM_K, zeros, s);
                } else {
                    const void * const scales = // of this KV head
                        (const uint8_t *) page.k_params + (cell_of(at, 0) >> a.k_group_log2);
                    if (scales != of_page) {
                        of_page = scales;
                        quantise_query<D, KB>(q, params, bytes);
                    }
                    score_bytes<D, KB, VB>(bytes, stage, s);
                }
            } else {
                float x[4][4];
                score_open_rows<D, KB>(of, q,
                    (const uint16_t *) page.k_codes + ((size_t) kvh * a.k.n_cells + slot) * a.k.stride + of.first(),
                    a.k.stride, x);
#pragma unroll
                for (int n = 0; n < 8 * E; n++) {
                    const int j = n / (2 * E), b = n / E % 2, e = n % E;
                    s[n / 4][n % 4] = x[j][2 * b + e];
                }
            }
            if constexpr (WIDE) { team_sum(of, shared_sums, sums_turn, s); }
            cap_scores(a, s);
            float top[E];
#pragma unroll
            for (int e = 0; e < E; e++) { top[e] = -INFINITY; }
#pragma unroll
            for (int n = 0; n < 8 * E; n++) {
                const int j = n / (2 * E), b = n / E % 2, e = n % E;
                float2 mm = __half22float2(as_half2(mk[0][j]));
                if (e && !one_mask) { mm = __half22float2(as_half2(mk[e][j])); }
                s[n / 4][n % 4] = fmaf(slope[e], b ? mm.y : mm.x, s[n / 4][n % 4]);
                if (POINTS && !here) { s[n / 4][n % 4] = -INFINITY; }
                top[e] = fmaxf(top[e], s[n / 4][n % 4]);
            }
            const int half = 2 * at + kh; // of the cache
            if constexpr (AHEAD) {
                float * const to = st.logits + ((size_t) kvh * n_rows + row) * a.n_logits + (size_t) half * 32 + mine;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if ((!POINTS || here) && c < n_rows && of.i == 0) {
                        *(float2 *) (to + 4 * j) = make_float2(s[j / 2][j % 2 * 2], s[j / 2][j % 2 * 2 + 1]);
                    }
                }
            }
#pragma unroll
            for (int e = 0; e < E; e++) {
                if (E * c + e >= n_rows) { top[e] = -INFINITY; } // columns without a query row
            }
            if (!__any_sync(~0u, top[0] > -INFINITY || top[E - 1] > -INFINITY)) { continue; }
            float lower[E], rest[E], sum[E] = {}, sum_all = 0.0f;
            if constexpr (HALF) {
                float f[2];
                if (raise_maxima(top, m, o, f)) {
#pragma unroll
                    for (int e = 0; e < E; e++) {
                        l[e] *= f[e];
                        zeros_v[e] *= f[e];
                    }
                }
#pragma unroll
                for (int e = 0; e < E; e++) {
                    lower[e] = m[e] == -INFINITY ? 0.0f : m[e];
                    rest[e] = 1.0f;
                }
            } else {
#pragma unroll
                for (int e = 0; e < E; e++) {
#pragma unroll
                    for (int d = 4; d <= 16; d *= 2) { top[e] = fmaxf(top[e], __shfl_xor_sync(~0u, top[e], d)); }
                }
                if (__any_sync(~0u, top[0] > m[0] || top[E - 1] > m[E - 1])) {
                    float f[E];
#pragma unroll
                    for (int e = 0; e < E; e++) {
                        const float most = fmaxf(top[e], m[e]);
                        f[e] = m[e] == -INFINITY ? 0.0f : exp2_fast(m[e] - most);
                        m[e] = most;
                        l[e] *= f[e];
                        l_sealed[e] *= f[e];
                        middle[e] *= f[e];
                        oz[e][0] *= f[e];
                        oz[e][1] *= f[e];
                    }
                    l_all *= f[0];
#pragma unroll
                    for (int n = 0; n < 2 * E * S; n++) { o[n / (2 * E)][n % (2 * E)] *= f[n % E]; }
                }
                // Probabilities are relative to this unit's largest, so that their 16 bits are used whatever other
                // units have: many cells far below one of another unit count, together.
#pragma unroll
                for (int e = 0; e < E; e++) {
                    const bool seen = top[e] > -INFINITY;
                    lower[e] = seen ? top[e] : INFINITY;
                    rest[e] = seen ? exp2_fast(top[e] - m[e]) : 0.0f;
                }
            }
            uint32_t out = 0; // AHEAD: bits 4j, 4j + 1 of cells that were picked
            if constexpr (AHEAD) { out = __ldcg(st.picked + (size_t) kvh * a.n_picked_words + half) >> mine; }
#pragma unroll
            for (int n = 0; n < 8 * E; n++) {
                const float boost = HALF ? (float) v_weight<VB>(n / 4) : 0.0f; // of the values' planes
                float & x = s[n / 4][n % 4];
                x = exp2_fast(x - (lower[n % E] - boost));
                if constexpr (AHEAD) {
                    sum_all += x;
                    if (out >> (n / 2 * 4 + n % 2) & 1) { x = 0.0f; }
                }
                sum[n % E] = HALF ? fmaf(x, exp2_of(-v_weight<VB>(n / 4)), sum[n % E]) : sum[n % E] + x;
            }
            l_all = fmaf(rest[0], sum_all, l_all);
#pragma unroll
            for (int e = 0; e < E; e++) {
                l[e] = fmaf(rest[e], sum[e], l[e]);
                if (MEANS && (now & 2)) { l_sealed[e] = fmaf(rest[e], sum[e], l_sealed[e]); }
            }
            uint32_t p[4][2]; // as f16
            if (HALF || !(now & 2)) {
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    const int first = score_at<E>(n / 2, n % 2, 0), second = score_at<E>(n / 2, n % 2, E - 1);
                    p[n / 2][n % 2] = transpose(pack_half2(s[first / 4][first % 4], s[second / 4][second % 4]));
                }
            }
            if (now & 2) {
                if constexpr (TABLES && VB != LATTICE + 4) {
                    accumulate_tables<D, KB, VB, E>(shared_points, stage, s, rest, o);
                } else if constexpr (POINTS) {
                    accumulate_points<D, E, in_points>(load_points(shared_points), stage, s, rest, o, middle);
                } else if constexpr (HALF) {
                    accumulate<D, KB, VB, false>(a, stage, params, p, o, zeros_v);
                } else {
                    accumulate_bytes<D, VB>(stage + map::V, stage + map::V_HIGH, params + a.stage_v_params,
                        a.v_group_log2, s, rest[0], o, oz[0]);
                }
            } else {
                uint32_t y[4][2]; // in memory for the call, p and o are not
                float x[S][2 * E], by[E];
#pragma unroll
                for (int e = 0; e < E; e++) { by[e] = HALF ? 1.0f / FROM_V : rest[e]; }
#pragma unroll
                for (int n = 0; n < 8; n++) { y[n / 2][n % 2] = p[n / 2][n % 2]; }
#pragma unroll
                for (int n = 0; n < 2 * E * S; n++) { x[n / (2 * E)][n % (2 * E)] = o[n / (2 * E)][n % (2 * E)]; }
                add_open_values<D, HALF ? VB : 16, POINTS, E>(a, of,
                    (const uint16_t *) page_of(unit, vh).v_codes +
                        ((size_t) kvh * a.v.n_cells + cell_of(at, vh) + c % 2 * 16) * a.v.stride + of.first(),
                    shared_sums, sums_turn, y, by, x);
                if (slice::TURNS > 1 && WIDE && POINTS && a.v.block > D) { sums_turn ^= 1; } // one exchange
#pragma unroll
                for (int n = 0; n < 2 * E * S; n++) { o[n / (2 * E)][n % (2 * E)] = x[n / (2 * E)][n % (2 * E)]; }
            }
        }
    }
    if constexpr (!AHEAD) {
        put_part<D, KB, slice>(
            a, share, blockIdx.z, queries, stages, shared_sums + sums_turn * of.warps * TEAM_TURN,
            [&](open_part & part, int e) { // E = 1: two columns a row
                const int r = E == 1 ? c : 2 * c + e;
                part.row[e] = r < n_rows && e < E ? row0 + r : -1;
                part.mask[e] = mask[e % E];
                part.slope[e] = slope[e % E];
            },
            [&](auto && f) {
                constexpr int N = 2 * E * S;
#pragma unroll
                for (int n = 0; n < N; n++) { f(n, o[n / (2 * E)][n % (2 * E)]); }
#pragma unroll
                for (int e = 0; e < E; e++) {
                    f(N + e, m[e]);
                    f(N + E + e, l[e]);
                    if constexpr (POINTS) { f(N + 2 * E + e, middle[e]); }
                    if constexpr (MEANS) { f(N + 3 * E + e, l_sealed[e]); }
                    if constexpr (!POINTS) {
                        f(N + 2 * E + 2 * e, HALF ? zeros_v[2 * e] : oz[e][0]);
                        f(N + 2 * E + 2 * e + 1, HALF ? zeros_v[2 * e + 1] : oz[e][1]);
                    }
                }
            });
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    sums_type & sums = *(sums_type *) memory;
    if constexpr (AHEAD) {
        if (picks) {
            sum_picked<D>(a, of, sums, memory + picked_at<sums_type>(), blockIdx.z, kvh, 0, n_rows);
            merge_rows<D, POINTS, MEANS, false>(a, of, sums, blockIdx.z, share, 0, n_rows);
            return;
        }
        l_all = column_sum(l_all);
    }
#pragma unroll
    for (int e = 0; e < E; e++) {
        l[e] = column_sum(l[e]);
        if constexpr (MEANS) { l_sealed[e] = column_sum(l_sealed[e]); }
        if constexpr (!POINTS && !HALF) {
            oz[e][0] = column_sum(oz[e][0]);
            oz[e][1] = column_sum(oz[e][1]);
        }
    }
    float * const all = (float *) (memory + picked_at<sums_type>()); // AHEAD: [warp][column], of near cells
    if (g == 0) {
#pragma unroll
        for (int e = 0; e < E; e++) {
            sums.m[warp][E * c + e] = m[e];
            sums.l[warp][E * c + e] = l[e];
            if constexpr (MEANS) { sums.l_sealed[warp][E * c + e] = l_sealed[e]; }
        }
        if constexpr (AHEAD) { all[warp * DECODE_COLUMNS + c] = l_all; }
        if constexpr (POINTS) { sums.as_is[warp] = false; }
    }
#pragma unroll
    for (int n = 0; n < D / 32 * E; n++) {
        const int i = n / E, e = n % E;
        float z = POINTS ? -middle[e] : i >= 2 && a.v_group_log2 == 6 ? oz[e][1] : oz[e][0];
        if constexpr (HALF) { z = __shfl_sync(~0u, zeros_v[e], (32 * i >> a.v_group_log2) * 4 + c); }
        constexpr float f = HALF ? FROM_V : 1.0f;
        *(float4 *) &sums.o[warp][E * c + e][32 * i + 4 * g] = make_float4(fmaf(o[2 * i][e], f, z),
            fmaf(o[2 * i][E + e], f, z), fmaf(o[2 * i + 1][e], f, z), fmaf(o[2 * i + 1][E + e], f, z));
    }
    __syncthreads();
    if constexpr (AHEAD) {
        put_tops(a, of, sums, blockIdx.z, kvh, 0, n_rows, 0, n_near, share.split - picking,
            [&](int w, int column) { return all[w * DECODE_COLUMNS + column]; });
    }
    merge_rows<D, POINTS, MEANS, POINTS && !AHEAD>(a, of, sums, blockIdx.z, share, row0, n_rows);
}

} // namespace

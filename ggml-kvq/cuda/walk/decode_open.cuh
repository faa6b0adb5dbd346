// Decode attention: open cells at the ends of a cache, f16 rows of its last tokens and of sinks (attend_decode.cuh).
//
// Few teams have such cells, and the code for them is cold. A team with as many other units as the rest would be late,
// and the whole kernel with it. So the teams that have the last or the first units take fewer others. They read the
// open cells of all these units at the end. The sums go to memory as parts of a row, beside the sums of blocks
// (attend_merge.cu). So they need not be rotated or scaled as sums of sealed cells are.
#pragma once

#include "decode_mask.cuh"
#include "decode_products.cuh"
#include "seen.cuh"

namespace {

// Open rows of a half, to the L2 cache. state: of keys but for 1, of values but for 2
__device__ __noinline__ void ask_open_rows(
    const kvq_attend_args & a, const kvq_page & page, int kvh, int cell, int state) {
    if (!(state & 1)) { prefetch_rows(page.k_codes, (size_t) kvh * a.k.n_cells + cell, a.k.stride); }
    if (!(state & 2)) { prefetch_rows(page.v_codes, (size_t) kvh * a.v.n_cells + cell, a.v.stride); }
}

// four channels of a new row of keys, from `channel` of all heads' on, with its position
__device__ __forceinline__ uint2 tagged(uint2 x, uint64_t tag, int channel) {
    const auto two = [&](uint32_t y, int at) {
        return (y & 0xfffefffeu) | (uint32_t) (tag >> at & 1) | (uint32_t) (tag >> (at + 1) & 1) << 16;
    };
    return channel < KVQ_TAG_BITS ? make_uint2(two(x.x, channel), two(x.y, channel + 2)) : x;
}

// New rows of a KV head into their pages, by every block: its own threads see them behind its next barrier, and what
// other blocks write there is the same.
template <typename X> __device__ __forceinline__ void put_fresh(const kvq_attend_args & a, const X & of, int kvh) {
    const int size = of.head(a), lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = of.warps - 1 - threadIdx.x / 32; i < 2 * a.n_new; i += of.warps) { // the last warps have no query
        const int row = i / 2;
        const auto & fresh = a.fresh[i % 2];
        uint16_t * const to = fresh.to[row] + kvh * fresh.head_stride;
        const float * const from = fresh.rows + row * fresh.row_stride + kvh * size;
#pragma unroll 1
        for (int channel = 4 * lane; channel < size; channel += 128) {
            const float4 x = *(const float4 *) (from + channel);
            uint2 y = make_uint2(pack_half2(x.x, x.y), pack_half2(x.z, x.w));
            if (fresh.pos) { y = tagged(y, kvq_tag_bits(fresh.pos[row]), kvh * size + channel); }
            *(uint2 *) (to + channel) = y;
        }
    }
}

// Teams are counted from the last one on, which has the last unit. Those of the last units, which may have open cells,
// have parts; behind them are some that have the first units instead, and who would have had those has theirs.
__device__ __forceinline__ int other_unit(const kvq_attend_args & a, int unit, int n_units) {
    return a.n_open && unit < OPEN_FIRST ? n_units - 1 - OPEN_LAST - unit : unit;
}
__device__ __forceinline__ int own_unit(const kvq_attend_args & a, int i, int n_units) {
    return i >= OPEN_LAST && i < a.n_open ? i - OPEN_LAST : other_unit(a, n_units - 1 - i, n_units);
}

// Which units are a team's turns, those behind its first one.
struct unit_turns {
    int run, in_run;       // the next one
    int others, run_log2;  // units of turns; of a run
    int early, early_step; // runs below `early` are those of teams without parts, so many
    int step, other_run;   // teams; the run that changes places with the first one
    int n_units, pad[3];

    __device__ __forceinline__ int unit(const kvq_attend_args & a) const { // of the cache, -1: no more
        const int from = run == 0 ? other_run : run == other_run ? 0 : run, unit = (from << run_log2) + in_run;
        return unit < others ? other_unit(a, unit, n_units) : -1;
    }
    __device__ __forceinline__ int2 after() const { // run, in_run
        const bool ends = in_run + 1 >> run_log2;
        return make_int2(ends ? run + (run < early ? early_step : step) : run, ends ? 0 : in_run + 1);
    }
};
// Where registers are short, turns are in shared memory, with the last units that were found: unit i at i & 3.
struct shared_turns {
    unit_turns turns;
    int at[4];

    // finds unit i; all lanes of a warp
    __device__ __forceinline__ int find(const kvq_attend_args & a, int i) {
        const int found = turns.unit(a);
        const int2 after = turns.after();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            *(int2 *) &turns.run = after;
            at[i & 3] = found;
        }
        return found;
    }
};

// A team's units where they are dealt out one by one, from the last one on (attend_decode.cuh). OPENS: there may be
// parts, whose teams take part in others' turns later.
template <bool OPENS> struct team_units {
    int n_units, n_teams, team, from_last, n_first, skipped;
    __device__ __forceinline__ team_units(const kvq_attend_args & a, int n_units, int n_teams, int team) :
        n_units(n_units),
        n_teams(n_teams),
        team(team),
        from_last(n_teams - 1 - team),
        n_first(n_teams - (OPENS ? a.n_open : 0)),
        skipped(OPENS && from_last < a.n_open ? OPEN_TURNS : 0) {}
    __device__ __forceinline__ int others_before(int turn) const {
        const int all = OPENS ? max(turn - OPEN_TURNS, 0) : 0;
        return (turn - all) * n_first + all * n_teams + team;
    }
    __device__ __forceinline__ int count() const {
        if (from_last >= n_units) { return 0; }
        if (!OPENS) { return 1 + max(0, (n_units - 1 - team) / n_teams); }
        int n = 1;
        while (others_before(n - 1 + skipped) < n_units - n_teams) { n++; }
        return n;
    }
    __device__ __forceinline__ int at(const kvq_attend_args & a, int unit) const {
        const int other = max(0, n_units - 1 - n_teams - others_before(unit - 1 + skipped));
        if (!OPENS) { return unit ? other : max(0, n_units - 1 - from_last); }
        return unit ? other_unit(a, other, n_units) : max(0, own_unit(a, from_last, n_units));
    }
};

// A team's part. Of this thread's columns 2c + e: the row, -1: no row; mask; slope.
struct open_part {
    int is, kvh, part, n_units, n_halves;
    int row[2];
    const __half * mask[2];
    float slope[2];
};

// Steps of 16 cells of all these units are dealt out one by one: open ones lie next to each other, and a step costs
// more than its cells, because only one team comes here and waits for each instruction. In a step this thread has cells
// 2g + b of scores, 4c + {0..3} of values. q: queries as they are; all: memory of teams, of a turn that is free.
template <int D, int KB, typename X>
__device__ __noinline__ void put_open(
    const kvq_attend_args & a, const X of, const shared_query q, uint8_t * all, const open_part u) {
    constexpr int S = D / 16, STEPS = 4; // of a unit, and so of a part
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    // lanes know a step each
    const int n = u.part + lane % STEPS * OPEN_PARTS,
              unit = n / STEPS < OPEN_LAST ? u.n_units - 1 - n / STEPS : n / STEPS - OPEN_LAST,
              half = 2 * unit + n % STEPS / 2, first = ((2 * half + n % 2) & ((2 << a.halves_log2) - 1)) * 16;
    const kvq_page of_lane = a.stream[u.is].pages[min(half, u.n_halves - 1) >> a.halves_log2];
    uint32_t open = __ballot_sync(
        ~0u, lane < STEPS && half < u.n_halves && of_lane.n_slots && !of_lane.k_params && !of_lane.v_params);
    float o[S][4] = {}, m[2] = { -INFINITY, -INFINITY }, l[2] = { 0.0f, 0.0f };
    float4 * const mine = (float4 *) (all + warp * TEAM_TURN) + lane;
    if (X::WIDE && X::TURNS == 1 && of.n > 1) { team_barrier(of.team, of.n); }
#pragma unroll 1
    for (; open; open &= open - 1) {
        const int at = __ffs((int) open) - 1, cell = __shfl_sync(~0u, first, at),
                  cell_of_page = __shfl_sync(~0u, of_lane.cell, at);
        const auto pointer = [&](const void * p) {
            return (const void *) __shfl_sync(~0u, (unsigned long long) p, at);
        };
        const int32_t * const map = (const int32_t *) pointer(of_lane.map);
        const uint16_t * const k = (const uint16_t *) pointer(of_lane.k_codes) +
            ((size_t) u.kvh * a.k.n_cells + cell + 2 * g) * a.k.stride + of.first();
        const uint16_t * const v = (const uint16_t *) pointer(of_lane.v_codes) +
            ((size_t) u.kvh * a.v.n_cells + cell + 4 * c) * a.v.stride + of.first();
        uint4 x[D / 32][2];
        uint2 y[D / 32][4];
#pragma unroll
        for (int i = 0; i < D / 32; i++) { // beyond the head queries are 0, and no query is read there
            const int from = of.near(channel_of<D, KB>(c, 2 * i), 8), to = of.near(32 * i + 4 * g, 4);
            x[i][0] = row16<false>(k + from);
            x[i][1] = row16<false>(k + a.k.stride + from);
#pragma unroll
            for (int t = 0; t < 4; t++) { y[i][t] = row8<false>(v + t * a.v.stride + to); }
        }
        uint16_t mk[4]; // [2b + e], on its way with them
#pragma unroll
        for (int b = 0; b < 2; b++) {
            const int slot = cell + 2 * g + b, here = map ? map[slot] : cell_of_page + slot;
            const bool there = (uint32_t) here < (uint32_t) a.n_kv;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                mk[2 * b + e] = there ? 0 : 0xfc00;
                if (there && u.mask[e]) { mk[2 * b + e] = __half_as_ushort(u.mask[e][here]); }
            }
        }
        float s[1][4] = {};
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            score_rows<KB>(x[i][0], x[i][1], query_of(q, 2 * i), query_of(q, 2 * i + 1), s[0]);
        }
        if (X::WIDE && of.n > 1) { // the same bits in every warp
            *mine = make_float4(s[0][0], s[0][1], s[0][2], s[0][3]);
            team_barrier(of.team, of.n);
            const float4 * from = (const float4 *) (all + of.team * of.n * TEAM_TURN) + lane;
            s[0][0] = s[0][1] = s[0][2] = s[0][3] = 0.0f;
#pragma unroll 1
            for (int i = 0; i < of.n; i++, from += TEAM_TURN / 16) {
                s[0][0] += from->x;
                s[0][1] += from->y;
                s[0][2] += from->z;
                s[0][3] += from->w;
            }
            team_barrier(of.team, of.n);
        }
        if (a.softcap != 0.0f) { cap_scores(a, s); }
        uint32_t p[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            s[0][e] = fmaf(u.slope[e], __half2float(__ushort_as_half(mk[e])), s[0][e]);
            s[0][2 + e] = fmaf(u.slope[e], __half2float(__ushort_as_half(mk[2 + e])), s[0][2 + e]);
            float top = fmaxf(fmaxf(s[0][e], s[0][2 + e]), m[e]);
#pragma unroll
            for (int d = 4; d <= 16; d *= 2) { top = fmaxf(top, __shfl_xor_sync(~0u, top, d)); }
            const float least = top == -INFINITY ? 0.0f : top, f = exp2_fast(m[e] - least);
            m[e] = top;
            s[0][e] = exp2_fast(s[0][e] - least);
            s[0][2 + e] = exp2_fast(s[0][2 + e] - least);
            l[e] = fmaf(l[e], f, s[0][e] + s[0][2 + e]);
#pragma unroll
            for (int i = 0; i < S; i++) {
                o[i][e] *= f;
                o[i][2 + e] *= f;
            }
        }
        p[0] = transpose(pack_half2(s[0][0], s[0][1]));
        p[1] = transpose(pack_half2(s[0][2], s[0][3]));
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            mma(o[2 * i],
                { even(y[i][0].x, y[i][2].x), odd(y[i][0].x, y[i][2].x), even(y[i][1].x, y[i][3].x),
                    odd(y[i][1].x, y[i][3].x) },
                p[0], p[1]);
            mma(o[2 * i + 1],
                { even(y[i][0].y, y[i][2].y), odd(y[i][0].y, y[i][2].y), even(y[i][1].y, y[i][3].y),
                    odd(y[i][1].y, y[i][3].y) },
                p[0], p[1]);
        }
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
        l[e] = column_sum(l[e]);
        if (u.row[e] < 0) { continue; }
        float * const out = a.partial + partial_at(a, u.is, u.kvh, u.row[e], a.n_splits + u.part);
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            const int channel = 32 * i + 4 * g;
            if (of.has(channel)) {
                *(float4 *) (out + of.first() + channel) =
                    make_float4(o[2 * i][e], o[2 * i][2 + e], o[2 * i + 1][e], o[2 * i + 1][2 + e]);
            }
        }
        if (of.i == 0 && g == 0) { *(float4 *) (out + of.head(a)) = make_float4(m[e], l[e], 0.0f, 0.0f); }
    }
}

// The part of this warp's team, if it has one, behind its other units. All is found anew, and sums are in the stages
// meanwhile: both would take registers in the loop. rows(part, e): of column 2c + e; each_sum(f): f(n, x) of all sums.
template <int D, int KB, typename X, typename R, typename F>
__device__ __forceinline__ void put_part(const kvq_attend_args & a, const block_share & share, int is,
    const uint2 * queries, uint8_t * stages, uint8_t * all, R && rows, F && each_sum) {
    int thread; // threadIdx.x, for all that a compiler knows another number
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const X of(a, thread / 32);
    const int i = share.n_splits * (of.teams - of.team) - 1 - share.split, n_halves = share.n_pages << a.halves_log2;
    if (i >= a.n_open) { return; }
    open_part part = { is, share.kvh, i, (n_halves + 1) / 2, n_halves };
#pragma unroll
    for (int e = 0; e < 2; e++) { rows(part, e); }
    float * const kept = (float *) stages + thread % 32;
    __syncwarp(); // all have read what was there
    each_sum([&](int n, float & x) { kept[32 * n] = x; });
    put_open<D, KB>(a, of, { queries + of.i * (D / 16) * 32 + thread % 32 }, all, part);
    each_sum([&](int n, float & x) { x = kept[32 * n]; });
}

} // namespace

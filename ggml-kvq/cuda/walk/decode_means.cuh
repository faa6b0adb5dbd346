// Decode attention over lattice keys that were sealed with their rotary embedding and without their mean
// (policy/transform.h): what the mean adds to the scores of cells at positions p. With q and mean as complex pairs of
// channels, w the speed of a pair,
//   q . R_p mean = sum over pairs of  A cos(p w) + B sin(p w)        A = qx mx + qy my,  B = qy mx - qx my
// A and B of a query row are made once a block. For cells at positions 64i .. 64i + 127 they are turned by 64i, which
// makes them the right operand of a product whose left one, cos and sin of 0 .. 127, is a table of f16 rows that all
// heads and layers share: a product like that with open keys. Sealed cells that lie next to each other take one such
// step, in any order; other cells take one step for each such window.
#pragma once

#include "decode_lattice.cuh"
#include "decode_products.cuh"

namespace {

constexpr int MEANS_WINDOW = 128; // rows of the table
// floats of a row of coefficients: of all slices; known when compiled for heads without slices
template <int D, bool WIDE = true> __host__ __device__ __forceinline__ int means_step(const kvq_attend_args & a) {
    return (WIDE ? D << a.slices_log2 : D) + 4;
}

// A and B of this block's rows, in the scores' unit, a pair in the place of channels 2i and 2i + 1; of channels
// without embedding A alone. m: the head's mean. TWINS = 2: a row has two columns, the second one turned by the cosines
// and sines at `turn`. AT_ONCE: pairs whose rows are asked for together.
template <int D, int TWINS, int AT_ONCE, typename X, typename F>
__device__ __forceinline__ void mean_coefficients(
    const kvq_attend_args & a, const X & of, const float * m, const float2 * turn, float * to, F && row_of) {
    constexpr int LOG2 = D == 64 ? 5 : 6;
    static_assert(D == 2 << LOG2);
    const int n_log2 = LOG2 + (X::WIDE ? a.slices_log2 : 0), n = 1 << n_log2, step = means_step<D, X::WIDE>(a); // pairs
    const float f = a.scale * LOG2E;
#pragma unroll AT_ONCE
    for (int i = threadIdx.x; i < DECODE_COLUMNS / TWINS * n; i += 32 * of.warps) {
        const int pair = i & (n - 1), column = (i >> n_log2) * TWINS;
        float2 * const at = (float2 *) (to + column * step + 2 * pair);
        if (X::WIDE && 2 * pair >= a.k.head_size) {
#pragma unroll
            for (int twin = 0; twin < TWINS; twin++) { at[twin * step / 2] = make_float2(0.0f, 0.0f); }
            continue;
        }
        const float * p = row_of(column);
        const bool turns = pair < a.n_pairs;
        const int x = turns && a.neox ? pair : 2 * pair, y = turns && a.neox ? pair + a.n_pairs : 2 * pair + 1;
        const float qx = p[x] * f, qy = p[y] * f;
        const float2 ab = make_float2(qx * m[x] + qy * m[y], turns ? qy * m[x] - qx * m[y] : 0.0f);
        *at = ab;
        if constexpr (TWINS == 2) {
            const float2 by = turns ? turn[pair] : make_float2(1.0f, 0.0f);
            at[step / 2] = make_float2(ab.x * by.x + ab.y * by.y, ab.y * by.x - ab.x * by.y);
        }
    }
}

// A and B of two pairs, turned by angles of these cosines and sines
__device__ __forceinline__ void turn_four(const float4 & x, float2 cosine, float2 sine, uint32_t (&q)[2]) {
    q[0] = pack_half2(x.x * cosine.x + x.y * sine.x, x.y * cosine.x - x.x * sine.x);
    q[1] = pack_half2(x.z * cosine.y + x.w * sine.y, x.w * cosine.y - x.z * sine.y);
}

// adds products with 8 channels of the table's rows of two cells
__device__ __forceinline__ void score_waves(
    float (&s)[4], const uint4 & x, const uint4 & y, const uint32_t (&q0)[2], const uint32_t (&q1)[2]) {
    mma(s, { x.x, y.x, x.y, y.y }, q0[0], q0[1]);
    mma(s, { x.z, y.z, x.w, y.w }, q1[0], q1[1]);
}

// All that is made of a block's queries for lattice pages: as they are, rotated, and coefficients of means.
// rows: room for rows that are COPIED. TWINS: columns of a row; turn: as above.
template <int D, int KB, bool MEANS, bool COPIED, int TWINS = 1, typename X, typename F>
__device__ __forceinline__ void share_all_queries(const kvq_attend_args & a, const X & of, int warp,
    const head_data & data, int n_rows, uint2 * queries, float * rows, float * coefficients, const float2 * turn,
    F && row_of) {
    const bool copied = COPIED && bytes_of_rows<D>(a);
    if constexpr (COPIED) {
        if (copied) { copy_rows<D, TWINS>(of, rows, row_of); }
    }
    const auto row = [&](int column) { return copied ? (const float *) rows + column / TWINS * D : row_of(column); };
    uint2 * const rotated = queries + of.n * (D / 16) * 32;
    if constexpr (is_split<KB>) {
        share_queries<D, KB>(a, of, queries, row);
        share_split<D, KB, TWINS>(a, of, warp, data, n_rows, rotated, row);
    } else {
        share_rotated<D, KB, MEANS, TWINS>(a, of, warp, data, n_rows, queries, rotated, row);
    }
    if constexpr (MEANS) {
        mean_coefficients<D, TWINS, COPIED ? 1 : X::WIDE ? 2 : 4>(a, of, data.mean, turn, coefficients, row);
    }
}

// places: positions of 64 cells, below 0: no cell. Cells may come in any order: there is a step for each window of 64
// positions. A function of its own, so that it takes no registers from the case of cells that lie next to each other.
template <int D, int KB, typename X>
__device__ __noinline__ void add_scattered_means(
    const kvq_attend_args & a, const X of, const float * coefficients, const int32_t * places, float (&s)[4][4]) {
    constexpr int S = D / 16;
    const int step = means_step<D, X::WIDE>(a);
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, mine = places[lane], other = places[lane + 32];
    uint32_t first = __ballot_sync(~0u, mine >= 0), second = __ballot_sync(~0u, other >= 0); // cells that wait
    while (first | second) {
        const int window = places[first ? __ffs((int) first) - 1 : __ffs((int) second) + 31] / 64, at = 64 * window;
        const float * high = a.rotary_high + (size_t) window * 2 * a.n_pairs;
        uint32_t q[S][2];
#pragma unroll
        for (int t = 0; t < S; t++) {
            const int channel = of.first() + channel_of<D, KB>(c, t), pair = channel / 2;
            const bool one = pair < a.n_pairs, two = pair + 1 < a.n_pairs;
            turn_four(*(const float4 *) (coefficients + g * step + channel),
                make_float2(one ? high[pair] : 1.0f, two ? high[pair + 1] : 1.0f),
                make_float2(one ? high[a.n_pairs + pair] : 0.0f, two ? high[a.n_pairs + pair + 1] : 0.0f), q[t]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int cell = g / 2 * 16 + g % 2 * 2 + 4 * j;
            const uint2 p = *(const uint2 *) (places + cell);
            const uint32_t d0 = p.x - (uint32_t) at, d1 = p.y - (uint32_t) at,
                           waits = (g < 4 ? first : second) >> cell % 32;
            const bool in0 = (waits & 1) && d0 < MEANS_WINDOW, in1 = (waits & 2) && d1 < MEANS_WINDOW;
#pragma unroll
            for (int u = 0; u < S / 2; u++) {
                const int channel = channel_of<D, KB>(c, 2 * u);
                const uint16_t * row = a.waves + of.first() + channel;
                uint4 x = make_uint4(0, 0, 0, 0), y = x;
                if (in0 && of.has(channel)) { x = load16(row + d0 * of.head(a)); }
                if (in1 && of.has(channel)) { y = load16(row + d1 * of.head(a)); }
                score_waves(s[j], x, y, q[2 * u], q[2 * u + 1]);
            }
        }
        first &= ~__ballot_sync(~0u, (uint32_t) (mine - at) < MEANS_WINDOW);
        second &= ~__ballot_sync(~0u, (uint32_t) (other - at) < MEANS_WINDOW);
    }
}

// The usual case of it: both halves of 32 cells lie next to each other, in one window, and all channels turn.
template <int D, int KB, typename X>
__device__ __forceinline__ void add_means(
    const kvq_attend_args & a, const X & of, const float * coefficients, const int32_t * places, float (&s)[4][4]) {
    constexpr int S = D / 16;
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, begin[2] = { places[0], places[32] },
              window = min(begin[0], begin[1]) / 64, at = 64 * window;
    const bool usual = begin[0] >= 0 && begin[1] >= 0 && max(begin[0], begin[1]) - at <= MEANS_WINDOW - 32 &&
        a.n_pairs == of.head(a) / 2 && places[lane] == begin[0] + lane && places[lane + 32] == begin[1] + lane;
    if (__any_sync(~0u, !usual)) {
        float x[4][4]; // in memory for the call, s is not
#pragma unroll
        for (int i = 0; i < 16; i++) { x[i / 4][i % 4] = s[i / 4][i % 4]; }
        add_scattered_means<D, KB>(a, of, coefficients, places, x);
#pragma unroll
        for (int i = 0; i < 16; i++) { s[i / 4][i % 4] = x[i / 4][i % 4]; }
        return;
    }
    const int step = means_step<D, X::WIDE>(a), n_pairs = X::WIDE ? a.n_pairs : D / 2, next_row = of.head(a);
    const float * high = a.rotary_high + (size_t) window * 2 * n_pairs;
    uint32_t q[S][2];
#pragma unroll
    for (int t = 0; t < S; t++) { // beyond the head coefficients are 0
        const int channel = of.first() + channel_of<D, KB>(c, t),
                  pair = X::WIDE ? min(channel / 2, n_pairs - 2) : channel / 2;
        turn_four(*(const float4 *) (coefficients + g * step + channel), __ldg((const float2 *) (high + pair)),
            __ldg((const float2 *) (high + n_pairs + pair)), q[t]);
    }
    const uint16_t * row = a.waves + of.first() +
        (size_t) ((g < 4 ? begin[0] : begin[1]) - at + g / 2 % 2 * 16 + g % 2 * 2) *
            next_row; // of cell 0, and of the one behind it
#pragma unroll
    for (int u = 0; u < S / 2; u++) {
        const uint16_t * x = row + of.near(channel_of<D, KB>(c, 2 * u), 8);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            score_waves(s[j], load16(x + 4 * j * next_row), load16(x + (4 * j + 1) * next_row), q[2 * u], q[2 * u + 1]);
        }
    }
}

} // namespace

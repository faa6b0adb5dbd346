// Decode attention in 8-bit products over lattice pages that lack their means (decode_means.cuh). The coefficients of a
// row's second column are turned by 32 positions more: a row of the table, cos and sin of one of 0 .. 95, then serves a
// cell of the first half and its neighbour in the second one. The table lies in shared memory. With more than 4 rows
// there is no second column (E = 2): a row of the table is one cell's, as in decode_means.cuh.
#pragma once

#include "decode_bytes.cuh"
#include "decode_means.cuh"

namespace {

// 64-cell windows begin at multiples of 64, and a unit within one: below 64 + 32; of E = 2 a row is of one cell
template <int E> constexpr int wave_rows = E == 1 ? 96 : MEANS_WINDOW;
// f16 numbers from one row to the next, which begins in other banks; all slices are in a row
template <int D, bool WIDE = true> __host__ __device__ __forceinline__ int wave_step(const kvq_attend_args & a) {
    return (WIDE ? D << a.slices_log2 : D) + 8;
}

// asks for the table; it is constant
template <int D, int E, typename X>
__device__ __forceinline__ void copy_waves(const kvq_attend_args & a, const X & of, uint16_t * to) {
    const uint32_t at = (uint32_t) __cvta_generic_to_shared(to);
    const int pieces = of.head(a) / 8, step = wave_step<D, X::WIDE>(a);
#pragma unroll 1
    for (int i = threadIdx.x; i < wave_rows<E> * pieces; i += 32 * of.warps) {
        const int row = i / pieces, piece = i % pieces;
        copy16(at + 2 * (row * step + 8 * piece), a.waves + row * of.head(a) + 8 * piece);
    }
}

// Coefficients of odd columns, turned by 32 positions; a thread takes pairs of its own
template <int D, typename X>
__device__ __forceinline__ void turn_odd_columns(const kvq_attend_args & a, const X & of, float * coefficients) {
    constexpr int EACH = 2 * KVQ_ROTARY_LOW;                      // of a pair: cos, sin of positions 0 ..
    const int step = means_step<D, X::WIDE>(a), n = D / 2 * of.n; // pairs of a row
#pragma unroll 1
    for (int i = threadIdx.x; i < BYTE_ROWS * n; i += 32 * of.warps) {
        const int pair = i % n;
        float2 * const x = (float2 *) (coefficients + (2 * (i / n) + 1) * step + 2 * pair);
        if (pair < a.n_pairs) {
            const float c = __ldg(a.rotary_low + pair * EACH + 32),
                        s = __ldg(a.rotary_low + pair * EACH + KVQ_ROTARY_LOW + 32);
            *x = make_float2(x->x * c + x->y * s, x->y * c - x->x * s);
        }
    }
}

// Adds what means add to the scores s of 64 cells. places: their positions.
template <int D, int KB, typename X>
__device__ __forceinline__ void add_row_means(const kvq_attend_args & a, const X & of, const uint16_t * waves,
    const float * coefficients, const int32_t * places, float (&s)[2][4]) {
    constexpr int S = D / 16;
    const int step = means_step<D, X::WIDE>(a), next_row = wave_step<D, X::WIDE>(a),
              n_pairs = X::WIDE ? a.n_pairs : D / 2;
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, begin = places[0], window = max(begin, 0) / 64;
    const bool usual = begin >= 0 && a.n_pairs == of.head(a) / 2 && places[lane] == begin + lane &&
        places[lane + 32] == begin + 32 + lane;
    if (__any_sync(~0u, !usual)) {
        float x[4][4] = {}; // in memory for the call; odd columns have no meaning
        add_scattered_means<D, KB>(a, of, coefficients, places, x);
#pragma unroll
        for (int n = 0; n < 8; n++) { s[n / 4][n % 4] += x[n / 2][n % 2 * 2]; }
        return;
    }
    const float * high = a.rotary_high + (size_t) window * 2 * n_pairs;
    // cells 4 (2t + g/4) + b of this thread and of lane ^ 16, which has those of the other g/4
    const uint16_t * const row =
        waves + of.first() + (begin - 64 * window + g / 2 % 2 * 16 + g % 2 * 2 + g / 4 * 8) * next_row;
    float x[2][4] = {};
#pragma unroll
    for (int u = 0; u < S / 2; u++) {
        const int channel = channel_of<D, KB>(c, 2 * u);
        uint32_t q[2][2];
#pragma unroll
        for (int v = 0; v < 2; v++) { // beyond the head coefficients are 0
            const int at = of.first() + channel + 4 * v, pair = X::WIDE ? min(at / 2, n_pairs - 2) : at / 2;
            turn_four(*(const float4 *) (coefficients + g * step + at), __ldg((const float2 *) (high + pair)),
                __ldg((const float2 *) (high + n_pairs + pair)), q[v]);
        }
        const uint16_t * const x_row = row + of.near(channel, 8);
#pragma unroll
        for (int t = 0; t < 2; t++) {
            score_waves(x[t], *(const uint4 *) (x_row + 4 * t * next_row),
                *(const uint4 *) (x_row + (4 * t + 1) * next_row), q[0], q[1]);
        }
    }
    const bool second = g / 4;
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
        for (int b = 0; b < 2; b++) { // of the first half in even columns
            const float mine = second ? x[t][2 * b + 1] : x[t][2 * b],
                        other = __shfl_xor_sync(~0u, second ? x[t][2 * b] : x[t][2 * b + 1], 16);
            s[0][2 * t + b] += second ? other : mine;
            s[1][2 * t + b] += second ? mine : other;
        }
    }
}

} // namespace

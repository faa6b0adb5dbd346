// Decode attention in 8-bit products over lattice pages that lack their means (decode_means.cuh). The table's rows lie
// in shared memory, and the angles that coefficients are turned by are asked for when a unit's turn comes.
//
// Up to 4 query rows (E = 1): the coefficients of a row's second column are turned by 32 positions more. A row of the
// table, cos and sin of one of 0 .. 94, then serves a cell of the first half and its neighbour in the second one.
// More rows (E = 2): a row of the table is one cell's.
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
// bytes of the table, and behind it (E = 1) of cos and sin of 32 positions of each pair
template <int D, int E> size_t nb_waves(const kvq_attend_args & a) {
    return 2 * wave_rows<E> * (size_t) wave_step<D>(a) + (E == 1 ? 4 * (size_t) D << a.slices_log2 : 0);
}
template <int D, typename X>
__device__ __forceinline__ float * turn_of_32(const kvq_attend_args & a, uint16_t * waves) {
    return (float *) (waves + wave_rows<1> * wave_step<D, X::WIDE>(a));
}
// Pieces of 16 bytes lie swapped in two rows of four: threads read every second piece of rows that are two apart, and
// find all banks.
__device__ __forceinline__ int swapped(int channel, int row) { return channel ^ (row / 2 % 2 * 8); }

// asks for the table; it is constant
template <int D, int E, typename X>
__device__ __forceinline__ void copy_waves(const kvq_attend_args & a, const X & of, uint16_t * to) {
    constexpr int EACH = 2 * KVQ_ROTARY_LOW; // of a pair: cos, sin of positions 0 ..
    const int pieces = of.head(a) / 8, step = wave_step<D, X::WIDE>(a), n_threads = 32 * of.warps,
              rows = n_threads / pieces, rest = n_threads % pieces;
    int row = (int) threadIdx.x / pieces, piece = (int) threadIdx.x % pieces;
    const uint32_t at = (uint32_t) __cvta_generic_to_shared(to);
    const uint16_t * from = a.waves + 8 * threadIdx.x;
#pragma unroll 1
    while (row < wave_rows<E>) {
        copy16(at + 2 * (row * step + swapped(8 * piece, row)), from);
        from += 8 * n_threads;
        row += rows;
        piece += rest;
        if (piece >= pieces) { // in the next row
            piece -= pieces;
            row++;
        }
    }
    if constexpr (E == 1) {
        float * const by = turn_of_32<D, X>(a, to);
        const uint32_t by_at = (uint32_t) __cvta_generic_to_shared(by);
#pragma unroll 1
        for (int i = threadIdx.x; i < D * of.n; i += n_threads) { // pairs beyond the head do not turn
            const int pair = i / 2;
            if (pair < a.n_pairs) {
                copy4(by_at + 4 * i, a.rotary_low + pair * EACH + i % 2 * KVQ_ROTARY_LOW + 32);
            } else {
                by[i] = 0.0f;
            }
        }
    }
}

// Asks for cos and sin of a window of this slice's pairs: [2][D/2]. Beyond the head any do, coefficients are 0.
template <int D, typename X>
__device__ __forceinline__ void copy_angles(const kvq_attend_args & a, const X & of, uint32_t to, int position) {
    constexpr int PIECES = D / 8; // of cosines
    const int lane = threadIdx.x % 32, n_pairs = X::WIDE ? a.n_pairs : D / 2;
    if (lane < 2 * PIECES && a.n_pairs == of.head(a) / 2) { // else nobody reads them
        const int pair = min(of.first() / 2 + lane % PIECES * 4, n_pairs - 4);
        copy16(to + lane * 16,
            a.rotary_high + (size_t) (max(position, 0) / 64) * 2 * n_pairs + lane / PIECES * n_pairs + pair);
    }
    copies_part();
}
// those are there; what is on its way behind them is not waited for
__device__ __forceinline__ void angles_done() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
}

// Coefficients of odd columns, turned by 32 positions; a thread takes pairs of its own
template <int D, typename X>
__device__ __forceinline__ void turn_odd_columns(
    const kvq_attend_args & a, const X & of, uint16_t * waves, float * coefficients) {
    const int step = means_step<D, X::WIDE>(a), n = D / 2 * of.n; // pairs of a row
    const float2 * const by = (const float2 *) turn_of_32<D, X>(a, waves);
#pragma unroll 1
    for (int i = threadIdx.x; i < BYTE_ROWS * n; i += 32 * of.warps) {
        const int pair = i & (n - 1);
        float2 * const x = (float2 *) (coefficients + (2 * (i / n) + 1) * step + 2 * pair);
        if (pair < a.n_pairs) {
            const float2 y = by[pair];
            *x = make_float2(x->x * y.x + x->y * y.y, x->y * y.x - x->x * y.y);
        }
    }
}

// Adds what means add to the scores s of 64 cells. places: their positions; angles: of the first one's window.
template <int D, int KB, typename X>
__device__ __forceinline__ void add_row_means(const kvq_attend_args & a, const X & of, const uint16_t * waves,
    const float * coefficients, const int32_t * places, const float * angles, float (&s)[2][4]) {
    constexpr int S = D / 16;
    const int step = means_step<D, X::WIDE>(a), next_row = wave_step<D, X::WIDE>(a);
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
    // cells 4 (2t + g/4) + b of this thread and of lane ^ 16, which has those of the other g/4
    const int first = begin - 64 * window + g / 2 % 2 * 16 + g % 2 * 2 + g / 4 * 8; // row
    const uint16_t * const row = waves + first * next_row;
    float x[2][4] = {};
#pragma unroll
    for (int u = 0; u < S / 2; u++) {
        const int channel = channel_of<D, KB>(c, 2 * u);
        uint32_t q[2][2];
#pragma unroll
        for (int v = 0; v < 2; v++) {
            const float * const angle = angles + channel / 2 + 2 * v;
            turn_four(*(const float4 *) (coefficients + g * step + of.first() + channel + 4 * v),
                *(const float2 *) angle, *(const float2 *) (angle + D / 2), q[v]);
        }
        const int at = of.first() + of.near(channel, 8), at0 = swapped(at, first), at1 = swapped(at, first + 1);
#pragma unroll
        for (int t = 0; t < 2; t++) {
            score_waves(x[t], *(const uint4 *) (row + 4 * t * next_row + at0),
                *(const uint4 *) (row + (4 * t + 1) * next_row + at1), q[0], q[1]);
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

// The same with more than 4 rows: s as score_points leaves them. One sealed half takes both places.
template <int D, int KB, typename X>
__device__ __forceinline__ void add_cell_means(const kvq_attend_args & a, const X & of, const uint16_t * waves,
    const float * coefficients, const int32_t * places, const float * angles, float (&s)[4][4]) {
    constexpr int S = D / 16;
    const int step = means_step<D, X::WIDE>(a), next_row = wave_step<D, X::WIDE>(a);
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, begin[2] = { places[0], places[32] },
              window = max(begin[0], 0) / 64;
    const bool usual = min(begin[0], begin[1]) >= 64 * window &&
        max(begin[0], begin[1]) - 64 * window <= MEANS_WINDOW - 32 && a.n_pairs == of.head(a) / 2 &&
        places[lane] == begin[0] + lane && places[lane + 32] == begin[1] + lane;
    if (__any_sync(~0u, !usual)) {
        float x[4][4]; // in memory for the call, s is not
#pragma unroll
        for (int i = 0; i < 16; i++) { x[i / 4][i % 4] = s[i / 4][i % 4]; }
        add_scattered_means<D, KB>(a, of, coefficients, places, x);
#pragma unroll
        for (int i = 0; i < 16; i++) { s[i / 4][i % 4] = x[i / 4][i % 4]; }
        return;
    }
    const int first = (g < 4 ? begin[0] : begin[1]) - 64 * window + g / 2 % 2 * 16 + g % 2 * 2;
    const uint16_t * const row = waves + first * next_row;
#pragma unroll
    for (int u = 0; u < S / 2; u++) {
        const int channel = channel_of<D, KB>(c, 2 * u);
        uint32_t q[2][2];
#pragma unroll
        for (int v = 0; v < 2; v++) { // beyond the head coefficients are 0
            const float * const angle = angles + channel / 2 + 2 * v;
            turn_four(*(const float4 *) (coefficients + g * step + of.first() + channel + 4 * v),
                *(const float2 *) angle, *(const float2 *) (angle + D / 2), q[v]);
        }
        const int at = of.first() + of.near(channel, 8), at0 = swapped(at, first), at1 = swapped(at, first + 1);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            score_waves(s[j], *(const uint4 *) (row + 4 * j * next_row + at0),
                *(const uint4 *) (row + (4 * j + 1) * next_row + at1), q[0], q[1]);
        }
    }
}

} // namespace

// Decode attention in 8-bit products over lattice pages that lack their means (decode_means.cuh). Here coefficients are
// turned to the position of a unit's first cell, so that the table's rows, which lie in shared memory, are those of
// 0 .. 63 whatever that position is. The angles of its 64-cell window are asked for when the unit's turn comes; where
// it does not begin at a multiple of 64, the rest is added to them. Two rows lie in a pair as the left operand of a
// product has them: 2 channels of one row, 2 of the other, the next 2 of both.
//
// Up to 4 query rows (E = 1): the coefficients of a row's second column are turned by 32 positions more. A row of the
// table, cos and sin of one of 0 .. 31, then serves a cell of the first half and its neighbour in the second one.
// More rows (E = 2): a row of the table is one cell's.
#pragma once

#include "decode_bytes.cuh"
#include "decode_means.cuh"

namespace {

template <int E> constexpr int wave_pairs = 16 * E; // of rows
// f16 numbers from one pair of rows to the next, which begins in other banks; all slices are in a row
__host__ __device__ __forceinline__ int wave_step(int head_size) { return 2 * head_size + 8; }
// bytes of the table, and behind it (E = 1) of cos and sin of 32 positions of each pair
template <int D, int E> __host__ __device__ __forceinline__ size_t nb_waves(const kvq_attend_args & a) {
    return 2 * wave_pairs<E> * (size_t) wave_step(a.k.head_size) + (E == 1 ? 4 * (size_t) D << a.slices_log2 : 0);
}
template <int D, typename X>
__device__ __forceinline__ float * turn_of_32(const kvq_attend_args & a, const X & of, uint16_t * waves) {
    return (float *) (waves + wave_pairs<1> * wave_step(of.head(a)));
}

// asks for the table; it is constant, and lies in memory as it does here (kvq_put_wave_pairs), behind the plain one
template <int D, int E, typename X>
__device__ __forceinline__ void copy_waves(const kvq_attend_args & a, const X & of, uint16_t * to) {
    constexpr int EACH = 2 * KVQ_ROTARY_LOW; // of a pair: cos, sin of positions 0 ..
    const int n_threads = 32 * of.warps, n = wave_pairs<E> * wave_step(of.head(a)) / 8;
    const uint32_t at = (uint32_t) __cvta_generic_to_shared(to);
    const uint16_t * const from = a.waves + MEANS_WINDOW * of.head(a);
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += n_threads) { copy16(at + 16 * i, from + 8 * i); }
    if constexpr (E == 1) {
        float * const by = turn_of_32<D>(a, of, to);
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

// Asks for a head's data, to be read from shared memory: 10 D bytes.
template <int D> __device__ __forceinline__ head_data copy_data(const head_data & from, float * to) {
    const int i = threadIdx.x;
    const uint32_t at = (uint32_t) __cvta_generic_to_shared(to) + 16 * i;
    uint16_t * const channel = (uint16_t *) (to + 2 * D);
    if (i < D / 4) {
        copy16(at, from.mean + 4 * i);
    } else if (i < D / 2) {
        if (from.back) { copy16(at, from.back + 4 * i - D); }
    } else if (i < D / 2 + D / 8) {
        if (from.channel) { copy16(at, from.channel + 8 * i - 4 * D); }
    }
    return { from.channel ? channel : nullptr, from.back ? to + D : nullptr, to };
}

// Those of a kernel; slices read theirs where they lie
template <int D, bool MEANS, typename X>
__device__ __forceinline__ head_data ask_data(const kvq_attend_args & a, const X & of, int kvh, float * room) {
    if constexpr (!MEANS) { return {}; }
    const head_data data = data_of(a, of, kvh);
    if constexpr (X::WIDE) { return data; }
    return copy_data<D>(data, room);
}

// Asks for cos and sin of a window of this slice's pairs: [2][D/2]. Beyond the head any do, coefficients are 0.
template <int D, typename X>
__device__ __forceinline__ void copy_angles(const kvq_attend_args & a, const X & of, uint32_t to, int position) {
    constexpr int PIECES = D / 8; // of cosines
    const int lane = threadIdx.x % 32, n_pairs = X::WIDE ? a.n_pairs : D / 2;
    if (lane < 2 * PIECES && a.n_pairs == of.head(a) / 2) { // else they are not read
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
// The angles of position begin, of those of its window. All pairs of the head turn.
template <int D, typename X>
__device__ __noinline__ void turn_angles(const kvq_attend_args & a, const X of, float * angles, int begin) {
    for (int i = threadIdx.x % 32; i < D / 2; i += 32) {
        const int pair = min(of.first() / 2 + i, a.n_pairs - 1);
        const float * low = a.rotary_low + (size_t) pair * 2 * KVQ_ROTARY_LOW + begin % 64;
        const float c = angles[i], s = angles[D / 2 + i];
        angles[i] = c * low[0] - s * low[KVQ_ROTARY_LOW];
        angles[D / 2 + i] = s * low[0] + c * low[KVQ_ROTARY_LOW];
    }
    __syncwarp();
}

// q: the coefficients of column g, turned: of 8 channels from `channel` of this slice on
template <int D, typename X>
__device__ __forceinline__ void turned_coefficients(const kvq_attend_args & a, const X & of, const float * coefficients,
    const float * angles, int channel, uint32_t (&q)[2][2]) {
    const int g = threadIdx.x % 32 / 4;
    const float * const from = coefficients + g * means_step<D, X::WIDE>(a) + of.first() + channel;
#pragma unroll
    for (int v = 0; v < 2; v++) { // beyond the head coefficients are 0
        const float * const angle = angles + channel / 2 + 2 * v;
        turn_four(*(const float4 *) (from + 4 * v), *(const float2 *) angle, *(const float2 *) (angle + D / 2), q[v]);
    }
}
// adds products with 8 channels of a pair of the table's rows
__device__ __forceinline__ void score_pair(float (&s)[4], const uint16_t * pair, const uint32_t (&q)[2][2]) {
#pragma unroll
    for (int v = 0; v < 2; v++) {
        const uint4 x = *(const uint4 *) (pair + 8 * v);
        mma(s, { x.x, x.y, x.z, x.w }, q[v][0], q[v][1]);
    }
}

// Adds what means add to the scores s of 64 cells. places: their positions; angles: of the first one's window. Here
// thread c has channels of its own order: its reads and its neighbours' find all banks.
template <int D, int KB, typename X>
__device__ __forceinline__ void add_row_means(const kvq_attend_args & a, const X & of, const uint16_t * waves,
    const float * coefficients, const int32_t * places, float * angles, float (&s)[2][4]) {
    const int step = wave_step(of.head(a));
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, begin = places[0];
    const bool twice = places[32] == begin; // one sealed half takes both places, as beside an open one
    const bool usual = begin >= 0 && a.n_pairs == of.head(a) / 2 && places[lane] == begin + lane &&
        places[lane + 32] == begin + (twice ? 0 : 32) + lane;
    if (__any_sync(~0u, !usual)) {
        float x[4][4] = {}; // in memory for the call; odd columns have no meaning
        add_scattered_means<D, KB>(a, of, coefficients, places, x);
#pragma unroll
        for (int n = 0; n < 8; n++) { s[n / 4][n % 4] += x[n / 2][n % 2 * 2]; }
        return;
    }
    const bool late = twice && begin % 64 == 32; // all of its cells are those of odd columns
    if (begin % 64 && !late) { turn_angles<D>(a, of, angles, begin); }
    // cells 4 (2t + g/4) + b of this thread and of lane ^ 16, which has those of the other g/4
    const int first = g / 2 % 2 * 16 + g % 2 * 2 + g / 4 * 8; // row
    const uint16_t * const pair = waves + first / 2 * step;
    float x[2][4] = {};
#pragma unroll
    for (int u = 0; u < D / 32; u++) {
        const int channel = 32 * u + 8 * c;
        uint32_t q[2][2];
        turned_coefficients<D>(a, of, coefficients, angles, channel, q);
        const uint16_t * const at = pair + 2 * (of.first() + of.near(channel, 8));
#pragma unroll
        for (int t = 0; t < 2; t++) { score_pair(x[t], at + 2 * t * step, q); }
    }
    const bool second = g / 4;
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
        for (int b = 0; b < 2; b++) { // of the first half in even columns
            const float of_first = late ? x[t][2 * b + 1] : x[t][2 * b], of_second = twice ? of_first : x[t][2 * b + 1],
                        mine = second ? of_second : of_first,
                        other = __shfl_xor_sync(~0u, second ? of_first : of_second, 16);
            s[0][2 * t + b] += second ? other : mine;
            s[1][2 * t + b] += second ? mine : other;
        }
    }
}

// The same with more than 4 rows: s as score_points leaves them. One sealed half takes both places.
template <int D, int KB, typename X>
__device__ __forceinline__ void add_cell_means(const kvq_attend_args & a, const X & of, const uint16_t * waves,
    const float * coefficients, const int32_t * places, float * angles, float (&s)[4][4]) {
    const int step = wave_step(of.head(a));
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, begin = places[0], more = places[32] - begin;
    const bool usual = begin >= 0 && more >= 0 && more <= 32 && more % 2 == 0 && a.n_pairs == of.head(a) / 2 &&
        places[lane] == begin + lane && places[lane + 32] == begin + more + lane;
    if (__any_sync(~0u, !usual)) {
        float x[4][4]; // in memory for the call, s is not
#pragma unroll
        for (int i = 0; i < 16; i++) { x[i / 4][i % 4] = s[i / 4][i % 4]; }
        add_scattered_means<D, KB>(a, of, coefficients, places, x);
#pragma unroll
        for (int i = 0; i < 16; i++) { s[i / 4][i % 4] = x[i / 4][i % 4]; }
        return;
    }
    if (begin % 64) { turn_angles<D>(a, of, angles, begin); }
    const int first = (g < 4 ? 0 : more) + g / 2 % 2 * 16 + g % 2 * 2;
    const uint16_t * const pair = waves + first / 2 * step;
#pragma unroll
    for (int u = 0; u < D / 32; u++) {
        const int channel = 32 * u + 8 * c;
        uint32_t q[2][2];
        turned_coefficients<D>(a, of, coefficients, angles, channel, q);
        const uint16_t * const at = pair + 2 * (of.first() + of.near(channel, 8));
#pragma unroll
        for (int j = 0; j < 4; j++) { score_pair(s[j], at + 2 * j * step, q); }
    }
}

} // namespace

// Decode attention over lattice keys that were sealed with their rotary embedding and without their mean
// (policy/transform.h): what the mean adds to the scores of cells at positions p. With q and mean as complex pairs of
// channels, w the speed of a pair,
//   q . R_p mean = sum over pairs of  A cos(p w) + B sin(p w)        A = qx mx + qy my,  B = qy mx - qx my
// A and B of a query row are made once a block. For cells at positions 64i .. 64i + 127 they are turned by 64i, which
// makes them the right operand of a product whose left one, cos and sin of 0 .. 127, is a table of f16 rows that all
// heads and layers share: a product like that with open keys. Sealed cells that lie next to each other take one such
// step, whatever their order; others as many as there are such windows.
#pragma once

#include "decode_stage.cuh"

namespace {

constexpr int MEANS_WINDOW = 128; // rows of the table
// floats of a row of coefficients: of all slices
template <int D> __host__ __device__ __forceinline__ int means_step(const kvq_attend_args & a) {
    return (D << a.slices_log2) + 4;
}

// A and B of this block's rows, in the scores' unit, a pair in the place of channels 2i and 2i + 1; of channels
// without embedding A alone
template <int D, typename X>
__device__ __forceinline__ void mean_coefficients(
    const kvq_attend_args & a, const X & of, const float * q, int kvh, int row0, float * to) {
    const int n = D / 2 * of.n, step = X::WIDE ? means_step<D>(a) : D + 4; // pairs of a row
    const float *m = a.k_mean + kvh * of.head(a), f = a.scale * LOG2E;
#pragma unroll 1
    for (int i = threadIdx.x; i < DECODE_COLUMNS * n; i += 32 * of.warps) {
        const int pair = i % n, column = i / n, row = min(row0 + column, a.n_rows - 1);
        if (X::WIDE && 2 * pair >= a.k.head_size) {
            *(float2 *) (to + column * step + 2 * pair) = make_float2(0.0f, 0.0f);
            continue;
        }
        const float * p = q + row_token(a, row) * a.q_stride_token + row_head(a, kvh, row) * a.q_stride_head;
        const bool turns = pair < a.n_pairs;
        const int x = turns && a.neox ? pair : 2 * pair, y = turns && a.neox ? pair + a.n_pairs : 2 * pair + 1;
        const float qx = p[x] * f, qy = p[y] * f;
        *(float2 *) (to + column * step + 2 * pair) =
            make_float2(qx * m[x] + qy * m[y], turns ? qy * m[x] - qx * m[y] : 0.0f);
    }
}

// places: positions of 64 cells, below 0: nobody is there
template <int D, int KB, typename X>
__device__ __forceinline__ void add_means(
    const kvq_attend_args & a, const X & of, const float * coefficients, const int32_t * places, float (&s)[4][4]) {
    constexpr int S = D / 16;
    const int step = X::WIDE ? means_step<D>(a) : D + 4;
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, mine = places[lane], other = places[lane + 32];
    uint32_t first = __ballot_sync(~0u, mine >= 0), second = __ballot_sync(~0u, other >= 0); // cells that wait
    while (first | second) {
        const int window = places[first ? __ffs((int) first) - 1 : __ffs((int) second) + 31] / 64, at = 64 * window;
        const float * high = a.rotary_high + (size_t) window * 2 * a.n_pairs;
        uint32_t q[S][2];
#pragma unroll
        for (int t = 0; t < S; t++) {
            const int channel = of.first() + channel_of<D, KB>(c, t), pair = channel / 2;
            const float4 x = *(const float4 *) (coefficients + g * step + channel);
            const bool one = pair < a.n_pairs, two = pair + 1 < a.n_pairs;
            const float c0 = one ? high[pair] : 1.0f, s0 = one ? high[a.n_pairs + pair] : 0.0f,
                        c1 = two ? high[pair + 1] : 1.0f, s1 = two ? high[a.n_pairs + pair + 1] : 0.0f;
            q[t][0] = pack_half2(x.x * c0 + x.y * s0, x.y * c0 - x.x * s0);
            q[t][1] = pack_half2(x.z * c1 + x.w * s1, x.w * c1 - x.z * s1);
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
                const uint32_t f[4] = { x.x, y.x, x.y, y.y }, h[4] = { x.z, y.z, x.w, y.w };
                mma(s[j], f, q[2 * u][0], q[2 * u][1]);
                mma(s[j], h, q[2 * u + 1][0], q[2 * u + 1][1]);
            }
        }
        first &= ~__ballot_sync(~0u, (uint32_t) (mine - at) < MEANS_WINDOW);
        second &= ~__ballot_sync(~0u, (uint32_t) (other - at) < MEANS_WINDOW);
    }
}

} // namespace

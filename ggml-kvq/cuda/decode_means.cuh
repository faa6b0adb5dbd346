// Decode attention over lattice keys that were sealed with their rotary embedding and without their mean (cache/transform.h): what the mean
// adds to the scores of cells at positions p. With q and mean as complex pairs of channels, w the speed of a pair,
//   q . R_p mean = sum over pairs of  A cos(p w) + B sin(p w)        A = qx mx + qy my,  B = qy mx - qx my
// A and B of a query row are made once a block. For cells at positions 64i .. 64i + 127 they are turned by 64i, which makes them the right
// operand of a product whose left one, cos and sin of 0 .. 127, is a table of f16 rows that all heads and layers share: a product like that
// with open keys. Sealed cells that lie next to each other take one such step, whatever their order; others as many as there are such windows.
// A block keeps rows 0 .. 63 in shared memory (NEAR), which are all that 64 cells at positions 64i .. 64i + 63 need.
#pragma once

#include "decode_stage.cuh"

namespace {

constexpr int MEANS_WINDOW = 128, MEANS_NEAR = 64;             // rows of the table, and those in shared memory
// floats of a row of coefficients: of all slices
template <int D> __host__ __device__ __forceinline__ int means_step(const kvq_attend_args & a) { return (D << a.slices_log2) + 4; }

// bytes of the rows in shared memory
template <int D> __host__ __device__ __forceinline__ int near_bytes(const kvq_attend_args & a) { return 2 * MEANS_NEAR * (D << a.slices_log2); }

// Where the 16 bytes of row d lie that thread c contracts in steps 2u and 2u + 1: those of four threads and of rows d and d ^ 2, which a
// quarter of a warp reads at once, fill 128 bytes.
template <int D> __device__ __forceinline__ int near_place(int slice, int u, int d, int c) {
    return (((slice * (D / 32) + u) * MEANS_NEAR + (d & ~3) + (d & 1) * 2 + (d >> 1 & 1)) * 4 + c) * 16;
}

// the block asks for them
template <int D, int KB, typename X> __device__ __forceinline__ void copy_near(const kvq_attend_args & a, const X & of, uint8_t * to) {
    for (int i = threadIdx.x; i < near_bytes<D>(a) / 16; i += 32 * of.warps) {
        const int c = i % 4, d = i / 4 % MEANS_NEAR, u = i / (4 * MEANS_NEAR) % (D / 32), slice = i / (4 * MEANS_NEAR * (D / 32));
        const int channel = slice * D + channel_of<D, KB>(c, 2*u);
        uint8_t * const at = to + near_place<D>(slice, u, d, c);
        if (channel < of.head(a)) {
            copy16((uint32_t) __cvta_generic_to_shared(at), a.waves + d * of.head(a) + channel);
        } else {
            *(uint4 *) at = make_uint4(0, 0, 0, 0);
        }
    }
}

// the turns of the window of a position are soon needed
__device__ __forceinline__ void expect_window(const kvq_attend_args & a, int place) {
    const int lane = threadIdx.x % 32;
    const float * high = a.rotary_high + (size_t) (max(place, 0) / 64) * 2 * a.n_pairs;
    if (32 * lane < 2 * a.n_pairs) { asm volatile("prefetch.global.L2 [%0];" :: "l"(high + 32 * lane)); }
}

// A and B of this block's rows, in the scores' unit, a pair in the place of channels 2i and 2i + 1; of channels without embedding A alone
template <int D, typename X> __device__ __forceinline__ void mean_coefficients(const kvq_attend_args & a, const X & of, const float * q, int kvh, int row0, float * to) {
    const int n = D / 2 * of.n, step = X::WIDE ? means_step<D>(a) : D + 4; // pairs of a row
    const float * m = a.k_mean + kvh * of.head(a), f = a.scale * LOG2E;
#pragma unroll 4
    for (int i = threadIdx.x; i < DECODE_COLUMNS * n; i += 32 * of.warps) {
        const int pair = X::WIDE ? min(i % n, a.k.head_size / 2 - 1) : i % n, column = i / n, row = min(row0 + column, a.n_rows - 1);
        const float * p = q + row_token(a, row) * a.q_stride_token + row_head(a, kvh, row) * a.q_stride_head;
        const bool turns = pair < a.n_pairs;
        const int x = turns && a.neox ? pair : 2*pair, y = turns && a.neox ? pair + a.n_pairs : 2*pair + 1;
        const float unit = pair == i % n ? f : 0.0f, qx = p[x] * unit, qy = p[y] * unit;
        *(float2 *) (to + column * step + 2 * (i % n)) = make_float2(qx * m[x] + qy * m[y], turns ? qy * m[x] - qx * m[y] : 0.0f);
    }
}

// places: positions of 64 cells, below 0: nobody is there. near: see copy_near, if a.waves_near
template <int D, int KB, typename X> __device__ __forceinline__
void add_means(const kvq_attend_args & a, const X & of, const float * coefficients, const uint8_t * near, const int32_t * places, float (&s)[4][4]) {
    constexpr int S = D / 16;
    const int step = X::WIDE ? means_step<D>(a) : D + 4;
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, mine = places[lane], other = places[lane + 32];
    uint32_t first = __ballot_sync(~0u, mine >= 0), second = __ballot_sync(~0u, other >= 0); // cells that wait
    while (first | second) {
        const int window = places[first ? __ffs((int) first) - 1 : __ffs((int) second) + 31] / 64, at = 64 * window;
        const float * high = a.rotary_high + (size_t) window * 2 * a.n_pairs;
        uint32_t q[S][2];
        float2 cs[S], sn[S]; // of two pairs
        const bool even = a.n_pairs % 2 == 0;
#pragma unroll
        for (int t = 0; t < S; t++) {
            const int pair = (of.first() + channel_of<D, KB>(c, t)) / 2;
            cs[t] = make_float2(1.0f, 1.0f);
            sn[t] = make_float2(0.0f, 0.0f);
            if (even && pair < a.n_pairs) {
                cs[t] = __ldg((const float2 *) (high + pair));
                sn[t] = __ldg((const float2 *) (high + a.n_pairs + pair));
            } else if (pair < a.n_pairs) {
                cs[t].x = high[pair];
                sn[t].x = high[a.n_pairs + pair];
                if (pair + 1 < a.n_pairs) {
                    cs[t].y = high[pair + 1];
                    sn[t].y = high[a.n_pairs + pair + 1];
                }
            }
        }
#pragma unroll
        for (int t = 0; t < S; t++) {
            const float4 x = *(const float4 *) (coefficients + g * step + of.first() + channel_of<D, KB>(c, t));
            q[t][0] = pack_half2(x.x * cs[t].x + x.y * sn[t].x, x.y * cs[t].x - x.x * sn[t].x);
            q[t][1] = pack_half2(x.z * cs[t].y + x.w * sn[t].y, x.w * cs[t].y - x.z * sn[t].y);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int cell = g / 2 * 16 + g % 2 * 2 + 4*j;
            const uint2 p = *(const uint2 *) (places + cell);
            const uint32_t d0 = p.x - (uint32_t) at, d1 = p.y - (uint32_t) at, waits = (g < 4 ? first : second) >> cell % 32;
            const bool in0 = (waits & 1) && d0 < MEANS_WINDOW, in1 = (waits & 2) && d1 < MEANS_WINDOW;
#pragma unroll
            for (int u = 0; u < S / 2; u++) {
                const int channel = channel_of<D, KB>(c, 2*u);
                const auto row = [&](bool in, uint32_t d) {
                    if (!in || !of.has(channel)) { return make_uint4(0, 0, 0, 0); }
                    return a.waves_near && d < MEANS_NEAR ? *(const uint4 *) (near + near_place<D>(of.i, u, (int) d, c))
                                                          : load16(a.waves + of.first() + channel + d * of.head(a));
                };
                const uint4 x = row(in0, d0), y = row(in1, d1);
                const uint32_t f[4] = { x.x, y.x, x.y, y.y }, h[4] = { x.z, y.z, x.w, y.w };
                mma(s[j], f, q[2*u][0],     q[2*u][1]);
                mma(s[j], h, q[2*u + 1][0], q[2*u + 1][1]);
            }
        }
        first  &= ~__ballot_sync(~0u, (uint32_t) (mine  - at) < MEANS_WINDOW);
        second &= ~__ballot_sync(~0u, (uint32_t) (other - at) < MEANS_WINDOW);
    }
}

} // namespace

// Decode attention, the last part: sums of a block's warps, then of all blocks of a row (attend_decode.cuh).
#pragma once

#include "decode_products.cuh"

namespace {

// sums of a column: o relative to exp2(m), l likewise
template <int D, int WARPS> struct decode_sums {
    float o[WARPS][DECODE_COLUMNS][D], m[WARPS][DECODE_COLUMNS], l[WARPS][DECODE_COLUMNS];
    int last;
};

// Rows of this block from its columns, then from all blocks of the row by the last of them to arrive. A warp takes a
// slice of a row.
template <int D, int WARPS, typename X>
__device__ void merge_rows(const kvq_attend_args & a, const X & of, decode_sums<D, WARPS> & s, int is, int kvh,
    int row0, int n_rows, int n_blocks) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, columns_log2 = row_columns_log2(a),
              per_row = DECODE_COLUMNS >> columns_log2;
    const int size = of.head(a); // of a head
    const auto finish = [&](int row, int channel, float4 x, float m, float l) {
        if (X::WIDE && channel >= size) { return; }
        const int head = row_head(a, kvh, row);
        float f = 1.0f;
        if (a.sinks) { // one more logit without a value
            const float sink = a.sinks[head] * LOG2E, top = fmaxf(m, sink);
            f = m == -INFINITY ? 0.0f : exp2_fast(m - top);
            l = l * f + exp2_fast(sink - top);
        }
        if (a.stream[is].lse && channel == 0) {
            a.stream[is].lse[(size_t) row_token(a, row) * a.n_head + head] =
                (log2f(l) + (a.sinks ? fmaxf(m, a.sinks[head] * LOG2E) : m)) * (1.0f / LOG2E);
        }
        f = l > 0.0f ? f / l : 0.0f;
        float * out = a.stream[is].dst + row_token(a, row) * a.dst_stride_token + head * a.dst_stride_head + channel;
        out[0] = x.x * f;
        out[1] = x.y * f;
        out[2] = x.z * f;
        out[3] = x.w * f;
    };
    for (int u = warp; u < n_rows * of.n; u += of.warps) { // a lane: one column of a warp, then 4 channels
        const int r = u / of.n, slice = u % of.n, n_sources = of.teams << columns_log2, parts = (1 << columns_log2) - 1,
                  col = (lane & parts) * per_row + r;
        const int w = (lane >> columns_log2) * of.n + slice;
        float m = lane < n_sources ? s.m[w][col] : -INFINITY, l = lane < n_sources ? s.l[w][col] : 0.0f, f = m;
        for (int d = 16; d; d /= 2) { m = fmaxf(m, __shfl_xor_sync(~0u, m, d)); }
        f = f == -INFINITY ? 0.0f : exp2_fast(f - m);
        l *= f;
        for (int d = 16; d; d /= 2) { l += __shfl_xor_sync(~0u, l, d); }
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int i = 0; i < n_sources; i++) {
            const float fi = __shfl_sync(~0u, f, i);
            const float4 y = *(
                const float4 *) &s.o[(i >> columns_log2) * of.n + slice][(i & parts) * per_row + r][lane % (D / 4) * 4];
            x.x += fi * y.x;
            x.y += fi * y.y;
            x.z += fi * y.z;
            x.w += fi * y.w;
        }
        if (lane >= D / 4) { continue; }
        const int channel = slice * D + 4 * lane;
        if (n_blocks == 1) {
            finish(row0 + r, channel, x, m, l);
        } else if (!X::WIDE || channel < size) {
            put_partial(a, is, kvh, row0 + r, size, channel, x, m, l);
        }
    }
    if (n_blocks == 1) { return; }
    __syncthreads();
    if (threadIdx.x == 0) { s.last = arrives_last(a, n_blocks); }
    __syncthreads();
    if (!s.last) { return; }
    for (int u = warp; u < n_rows * of.n; u += of.warps) {
        const int r = u / of.n, channel = u % of.n * D + lane % (D / 4) * 4,
                  at_channel = X::WIDE ? min(channel, size - 4) : channel;
        const float * p = a.partial + partial_at(a, is, kvh, row0 + r, 0);
        float m = -INFINITY, l = 0.0f;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        constexpr int HALVES = 128 / D; // a warp reads as many rows of partial results at once
        for (int b0 = 0; b0 < n_blocks; b0 += 32) {
            float2 ml = make_float2(-INFINITY, 0.0f); // of block b0 + lane
            if (b0 + lane < n_blocks) { ml = __ldcg((const float2 *) (p + (size_t) (b0 + lane) * (size + 4) + size)); }
            float top = ml.x;
            for (int d = 16; d; d /= 2) { top = fmaxf(top, __shfl_xor_sync(~0u, top, d)); }
            top = fmaxf(top, m);
            const float f = ml.x == -INFINITY ? 0.0f : exp2_fast(ml.x - top),
                        old = m == -INFINITY ? 0.0f : exp2_fast(m - top);
            m = top;
            l = l * old + f * ml.y;
            x.x *= old;
            x.y *= old;
            x.z *= old;
            x.w *= old;
            const int n = min(32, n_blocks - b0);
            if constexpr (X::WIDE) { // 16 are on their way at once, also the last ones
#pragma unroll 2
                for (int b = 0; b < n; b += 16) {
#pragma unroll
                    for (int k = 0; k < 16; k++) {
                        const float fb = __shfl_sync(~0u, f, b + k); // 0 beyond the last block
                        const float4 y = __ldcg(
                            (const float4 *) (p + (size_t) min(b0 + b + k, n_blocks - 1) * (size + 4) + at_channel));
                        x.x += fb * y.x;
                        x.y += fb * y.y;
                        x.z += fb * y.z;
                        x.w += fb * y.w;
                    }
                }
            } else {
#pragma unroll 16
                for (int b = 0; b < n; b += HALVES) {
                    const int at = min(b + lane / (D / 4), 31);
                    const float fb = __shfl_sync(~0u, f, at); // 0 beyond the last block
                    const float4 y =
                        __ldcg((const float4 *) (p + (size_t) min(b0 + at, n_blocks - 1) * (size + 4) + at_channel));
                    x.x += fb * y.x;
                    x.y += fb * y.y;
                    x.z += fb * y.z;
                    x.w += fb * y.w;
                }
            }
        }
        for (int d = 16; d; d /= 2) { l += __shfl_xor_sync(~0u, l, d); }
        for (int d = 16; d >= D / 4; d /= 2) {
            x.x += __shfl_xor_sync(~0u, x.x, d);
            x.y += __shfl_xor_sync(~0u, x.y, d);
            x.z += __shfl_xor_sync(~0u, x.z, d);
            x.w += __shfl_xor_sync(~0u, x.w, d);
        }
        if (lane < D / 4) { finish(row0 + r, channel, x, m, l); }
    }
}

} // namespace

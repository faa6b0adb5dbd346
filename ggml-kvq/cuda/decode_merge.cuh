// Decode attention, the last part: sums of a block's warps, then of all blocks of a row (attend_decode.cuh).
#pragma once

#include "decode_lattice.cuh"
#include "decode_products.cuh"
#include "seen.cuh"

namespace {

// sums of a column: o relative to exp2(m), l likewise; l_sealed: of values that lack their mean. Lattice: o of a warp
// is as_is or rotated.
template <int D, int WARPS> struct decode_sums {
    float o[WARPS][DECODE_COLUMNS][D], m[WARPS][DECODE_COLUMNS], l[WARPS][DECODE_COLUMNS],
        l_sealed[WARPS][DECODE_COLUMNS];
    bool as_is[WARPS];
    int last;
};

__device__ __forceinline__ void add(float4 & x, float f, const float4 & y) {
    x.x = fmaf(f, y.x, x.x);
    x.y = fmaf(f, y.y, x.y);
    x.z = fmaf(f, y.z, x.z);
    x.w = fmaf(f, y.w, x.w);
}

// Sum over a block's sources, f of each in the lane of its number: 4 channels a lane of a slice. A column's rotation
// is taken back here, where it is one row of a block and no longer one of each warp. at(i, slice): source i of a slice,
// channel 0; as_is(i): it is not rotated.
template <int D, bool ROTATED, typename X, typename F, typename G>
__device__ __forceinline__ float4 sum_sources(
    const kvq_attend_args & a, const X & of, int slice, int n_sources, float f, F && at, G && as_is) {
    const int lane = threadIdx.x % 32, channel = lane % (D / 4) * 4;
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f), plain = x;
    if constexpr (!ROTATED) {
#pragma unroll 4
        for (int i = 0; i < n_sources; i++) {
            add(x, __shfl_sync(~0u, f, i), *(const float4 *) (at(i, slice) + channel));
        }
        return x;
    }
    const int n_slices = X::WIDE && a.v.block > D ? a.v.block / D : 1; // that are rotated together
#pragma unroll 1
    for (int i = 0; i < n_sources; i++) {
        const float fi = __shfl_sync(~0u, f, i);
        if (as_is(i)) {
            add(plain, fi, *(const float4 *) (at(i, slice) + channel));
            continue;
        }
        for (int k = 0; k < n_slices; k++) {
            add(x, n_slices > 1 ? fi * slice_sign(slice, k) : fi, *(const float4 *) (at(i, slice ^ k) + channel));
        }
    }
    float y[4] = { x.x, x.y, x.z, x.w };
    butterflies(y, [&](int h) { return rotates<X>(a, h); });
#pragma unroll 1
    for (int h = 1; h < D / 4; h *= 2) {
        if (rotates<X>(a, 4 * h)) {
#pragma unroll
            for (int i = 0; i < 4; i++) { y[i] = across(y[i], h); }
        }
    }
    add(plain, rotation_norm<D, X>(a), make_float4(y[0], y[1], y[2], y[3]));
    return plain;
}

// Rows of this block from its columns, then from all blocks of the row by the last of them to arrive. A warp takes a
// slice of a row.
template <int D, bool ROTATED, bool MEANS, int WARPS, typename X>
__device__ void merge_rows(const kvq_attend_args & a, const X & of, decode_sums<D, WARPS> & s, int is,
    const block_share & share, int row0, int n_rows) {
    const int kvh = share.kvh, n_blocks = share.n_splits;
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
        float4 x = sum_sources<D, ROTATED>(
            a, of, slice, n_sources, f,
            [&](int i, int of_slice) { return s.o[(i >> columns_log2) * of.n + of_slice][(i & parts) * per_row + r]; },
            [&](int i) { return s.as_is[(i >> columns_log2) * of.n]; });
        if constexpr (MEANS) {
            float sealed = lane < n_sources ? f * s.l_sealed[w][col] : 0.0f;
            for (int d = 16; d; d /= 2) { sealed += __shfl_xor_sync(~0u, sealed, d); }
            const int channel = min(slice * D + lane % (D / 4) * 4, size - 4);
            add(x, sealed, __ldg((const float4 *) (a.v_mean + kvh * size + channel)));
        }
        if (lane >= D / 4) { continue; }
        const int channel = slice * D + 4 * lane;
        if (n_blocks == 1) {
            finish(row0 + r, channel, x, m, l);
        } else if (!X::WIDE || channel < size) {
            put_partial(a, is, kvh, row0 + r, share.split, size, channel, x, m, l);
        }
    }
    if (n_blocks == 1) { return; }
    __syncthreads();
    if (threadIdx.x == 0) { s.last = arrives_last(a, share.rows * a.n_head_kv + share.kvh, n_blocks); }
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
            const int n = min(32, n_blocks - b0);
            const auto read = [&](int b) { // of a block; 0 beyond the last one
                return b < n ? __ldcg((const float4 *) (p + (size_t) (b0 + b) * (size + 4) + at_channel))
                             : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            };
            float f = 0.0f;
            const auto factors = [&] { // of block b0 + lane, and of what is there
                float2 ml = make_float2(-INFINITY, 0.0f);
                if (lane < n) { ml = __ldcg((const float2 *) (p + (size_t) (b0 + lane) * (size + 4) + size)); }
                float top = ml.x;
                for (int d = 16; d; d /= 2) { top = fmaxf(top, __shfl_xor_sync(~0u, top, d)); }
                top = fmaxf(top, m);
                const float old = m == -INFINITY ? 0.0f : exp2_fast(m - top);
                f = ml.x == -INFINITY ? 0.0f : exp2_fast(ml.x - top);
                m = top;
                l = l * old + f * ml.y;
                x.x *= old;
                x.y *= old;
                x.z *= old;
                x.w *= old;
            };
            if constexpr (X::WIDE) { // 16 are on their way at once, the first ones before their factors are known
#pragma unroll 1
                for (int b = 0; b < n; b += 16) {
                    float4 y[16];
#pragma unroll
                    for (int k = 0; k < 16; k++) { y[k] = read(b + k); }
                    if (b == 0) { factors(); }
#pragma unroll
                    for (int k = 0; k < 16; k++) { add(x, __shfl_sync(~0u, f, b + k), y[k]); }
                }
            } else {
                factors();
#pragma unroll 16
                for (int b = 0; b < n; b += HALVES) {
                    const int at = min(b + lane / (D / 4), 31);
                    const float fb = __shfl_sync(~0u, f, at); // 0 beyond the last block
                    const float4 y =
                        __ldcg((const float4 *) (p + (size_t) min(b0 + at, n_blocks - 1) * (size + 4) + at_channel));
                    add(x, fb, y);
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

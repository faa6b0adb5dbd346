// Decode attention, the last part: sums of a block's warps, then of all blocks of a row (attend_decode.cuh), by the
// last of them to arrive or, where there are many, by a kernel of their own (attend_merge.cu).
#pragma once

#include "decode_lattice.cuh"
#include "decode_products.cuh"
#include "seen.cuh"

namespace {

// sums of a column: o relative to exp2(m), l likewise; l_sealed: of values that lack their mean. Lattice: o of a warp
// is as_is or rotated. Four more channels a column: threads write theirs of four columns at once, into other banks.
template <int D, int WARPS> struct decode_sums {
    float o[WARPS][DECODE_COLUMNS][D + 4], m[WARPS][DECODE_COLUMNS], l[WARPS][DECODE_COLUMNS],
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

// Sum over a block's sources, of each f(i) times it: 4 channels a lane of a slice. A column's rotation is taken back
// here, where it is one row of a block and no longer one of each warp. at(i, slice): source i of a slice, channel 0;
// as_is(i): it is not rotated.
template <int D, bool ROTATED, typename X, typename H, typename F, typename G>
__device__ __forceinline__ float4 sum_sources(
    const kvq_attend_args & a, const X & of, int slice, int n_sources, H && f, F && at, G && as_is) {
    const int lane = threadIdx.x % 32, channel = lane % (D / 4) * 4;
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f), plain = x;
    if constexpr (!ROTATED) {
#pragma unroll 4
        for (int i = 0; i < n_sources; i++) { add(x, f(i), *(const float4 *) (at(i, slice) + channel)); }
        return x;
    }
    const int n_slices = X::WIDE && a.v.block > D ? a.v.block / D : 1; // that are rotated together
#pragma unroll 1
    for (int i = 0; i < n_sources; i++) {
        const float fi = f(i);
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

// Over a warp. Loops: code is cold each time a model comes to its next layer.
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll 1
    for (int d = 16; d; d /= 2) { x = fmaxf(x, __shfl_xor_sync(~0u, x, d)); }
    return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll 1
    for (int d = 16; d; d /= 2) { x += __shfl_xor_sync(~0u, x, d); }
    return x;
}

// What scores need of n_rows rows from row0 on: the largest logit of a block's near cells and the sum of all their
// exponentials over it (attend_decode.cuh). block of n_blocks; sum_of(warp, column). A thread: a row, of all teams and
// parts of its columns.
template <int D, int WARPS, typename X, typename F>
__device__ __forceinline__ void put_tops(const kvq_attend_args & a, const X & of, const decode_sums<D, WARPS> & s,
    int is, int kvh, int row0, int n_rows, int columns_log2, int n_blocks, int block, F && sum_of) {
    const int r = threadIdx.x, n = of.teams << columns_log2, per_row = DECODE_COLUMNS >> columns_log2;
    if (r >= n_rows) { return; }
    const auto warp_of = [&](int i) { return (i >> columns_log2) * of.n; };
    const auto column_of = [&](int i) { return (i & ((1 << columns_log2) - 1)) * per_row + r; };
    float most = -INFINITY, sum = 0.0f;
    for (int i = 0; i < n; i++) { most = fmaxf(most, s.m[warp_of(i)][column_of(i)]); }
    for (int i = 0; i < n && most > -INFINITY; i++) {
        sum += sum_of(warp_of(i), column_of(i)) * exp2_fast(s.m[warp_of(i)][column_of(i)] - most);
    }
    ((float2 *) a.stream[is].tops)[((size_t) kvh * a.n_rows + row0 + r) * n_blocks + block] = make_float2(most, sum);
}

// Four channels of a row's output: x over l, both relative to exp2(m). a: kvq_attend_args or kvq_merge_args
template <typename A>
__device__ __forceinline__ void put_row(
    const A & a, int is, int token, int head, int channel, const float4 & x, float m, float l) {
    float sink = -INFINITY, f = 1.0f;
    if (a.sinks) { // one more logit without a value
        sink = a.sinks[head] * LOG2E;
        const float top = fmaxf(m, sink);
        f = m == -INFINITY ? 0.0f : exp2_fast(m - top);
        l = l * f + exp2_fast(sink - top);
    }
    float * const lse = a.stream[is].lse;
    if (lse && channel == 0) { lse[(size_t) token * a.n_head + head] = (__log2f(l) + fmaxf(m, sink)) * (1.0f / LOG2E); }
    f = l > 0.0f ? __fdividef(f, l) : 0.0f;
    float * out = a.stream[is].dst + token * a.dst_stride_token + head * a.dst_stride_head + channel;
    out[0] = x.x * f;
    out[1] = x.y * f;
    out[2] = x.z * f;
    out[3] = x.w * f;
}

// Rows of this block from its columns where a kernel of its own adds up blocks: short, since it is cold. A lane knows a
// source's factor.
template <int D, bool MEANS, int WARPS, typename X>
__device__ __forceinline__ void put_block_rows(const kvq_attend_args & a, const X & of, decode_sums<D, WARPS> & s,
    int is, const block_share & share, int row0, int n_rows) {
    const int lane = threadIdx.x % 32, columns_log2 = row_columns_log2(a), per_row = DECODE_COLUMNS >> columns_log2,
              slices_log2 = X::WIDE ? a.slices_log2 : 0, size = of.head(a), n = of.teams << columns_log2,
              at = lane % (D / 4) * 4;
    constexpr int TWO = X::WIDE ? 2 : 1; // slices at once
#pragma unroll 1
    for (int r = threadIdx.x / 32; r < n_rows; r += of.warps) { // all slices of a row have the same maxima and sums
        const auto warp_of = [&](int i) { return i >> columns_log2 << slices_log2; };
        const auto column_of = [&](int i) { return (i & ((1 << columns_log2) - 1)) * per_row + r; };
        const int mine = min(lane, n - 1), w = warp_of(mine), column = column_of(mine);
        const float top = s.m[w][column], m = warp_max(top), f = lane < n && m > -INFINITY ? exp2_fast(top - m) : 0.0f,
                    l = warp_sum(f * s.l[w][column]), sealed = MEANS ? warp_sum(f * s.l_sealed[w][column]) : 0.0f;
#pragma unroll 1
        for (int slice = 0; slice < of.n; slice += TWO) {
            float4 x[TWO] = {};
#pragma unroll 2
            for (int i = 0; i < n; i++) {
                const float by = __shfl_sync(~0u, f, i);
#pragma unroll
                for (int k = 0; k < TWO; k++) {
                    add(x[k], by, *(const float4 *) &s.o[warp_of(i) + min(slice + k, of.n - 1)][column_of(i)][at]);
                }
            }
#pragma unroll
            for (int k = 0; k < TWO; k++) {
                const int channel = (slice + k) * D + at;
                if (lane < D / 4 && slice + k < of.n && (!X::WIDE || channel < size)) {
                    put_partial(a, is, share.kvh, row0 + r, share.split, size, channel, x[k], m, l, sealed);
                }
            }
        }
    }
}

// Rows of this block from its columns, then from all blocks of the row by the last of them to arrive, unless a kernel
// of its own comes (a.apart). A warp takes a slice of a row. STAYS: all warps' sums are rotated, and what that kernel
// gets is, too, and lacks the means of values.
template <int D, bool ROTATED, bool MEANS, bool STAYS, int WARPS, typename X>
__device__ void merge_rows(const kvq_attend_args & a, const X & of, decode_sums<D, WARPS> & s, int is,
    const block_share & share, int row0, int n_rows) {
    if constexpr (!ROTATED || STAYS) {
        if (a.apart) {
            put_block_rows<D, MEANS>(a, of, s, is, share, row0, n_rows);
            return;
        }
    }
    const int kvh = share.kvh, n_blocks = share.n_splits;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, columns_log2 = row_columns_log2(a),
              per_row = DECODE_COLUMNS >> columns_log2;
    const int size = of.head(a), step = size + 4; // of a head; from one partial result to the next
    constexpr int AT_ONCE = 16, EACH = 128 / D;   // loads on their way; rows of partial results that one of them reads
    const auto of_block = [&](int r, int slice, float & m, float & l) { // every lane goes over all sources
        const int n_sources = of.teams << columns_log2, parts = (1 << columns_log2) - 1;
        const auto warp_of = [&](int i) { return (i >> columns_log2) * of.n + slice; };
        const auto column_of = [&](int i) { return (i & parts) * per_row + r; };
        m = -INFINITY;
#pragma unroll 4
        for (int i = 0; i < n_sources; i++) { m = fmaxf(m, s.m[warp_of(i)][column_of(i)]); }
        const float least = m == -INFINITY ? 0.0f : m;
        l = 0.0f;
        float sealed = 0.0f;
        const auto factor = [&](int i) {
            const float f = exp2_fast(s.m[warp_of(i)][column_of(i)] - least);
            l = fmaf(f, s.l[warp_of(i)][column_of(i)], l);
            if constexpr (MEANS) { sealed = fmaf(f, s.l_sealed[warp_of(i)][column_of(i)], sealed); }
            return f;
        };
        float4 x = sum_sources<D, ROTATED>(
            a, of, slice, n_sources, factor,
            [&](int i, int of_slice) { return s.o[(i >> columns_log2) * of.n + of_slice][column_of(i)]; },
            [&](int i) { return s.as_is[(i >> columns_log2) * of.n]; });
        if constexpr (MEANS) {
            const int channel = min(slice * D + lane % (D / 4) * 4, size - 4);
            add(x, sealed, __ldg((const float4 *) (a.v_mean + kvh * size + channel)));
        }
        return x;
    };
    const auto of_all = [&](int r, int channel, float & m, float & l) {
        const int first = lane / (D / 4);
        const float * const p = a.partial + partial_at(a, is, kvh, row0 + r, 0);
        const float * from = p + first * step + (X::WIDE ? min(channel, size - 4) : channel);
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float f = 0.0f, sum = 0.0f;
        m = -INFINITY;
#pragma unroll 1
        for (int b0 = 0; b0 < n_blocks; b0 += AT_ONCE * EACH) { // on their way before their factors are known
            float4 y[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                y[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (b0 + first + k * EACH < n_blocks) { y[k] = __ldcg((const float4 *) (from + k * EACH * step)); }
            }
            from += AT_ONCE * EACH * step;
            if (b0 % 32 == 0) { // factors of block b0 + lane, and of what is there
                float2 ml = make_float2(-INFINITY, 0.0f);
                if (b0 + lane < n_blocks) { ml = __ldcg((const float2 *) (p + (b0 + lane) * step + size)); }
                const float top = fmaxf(warp_max(ml.x), m), old = m == -INFINITY ? 0.0f : exp2_fast(m - top);
                f = ml.x == -INFINITY ? 0.0f : exp2_fast(ml.x - top);
                m = top;
                sum = sum * old + f * ml.y;
                x = make_float4(x.x * old, x.y * old, x.z * old, x.w * old);
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                add(x, __shfl_sync(~0u, f, (b0 + first + k * EACH) % 32), y[k]); // 0 beyond the last block
            }
        }
        l = warp_sum(sum);
        for (int d = 16; d >= D / 4; d /= 2) {
            x.x += __shfl_xor_sync(~0u, x.x, d);
            x.y += __shfl_xor_sync(~0u, x.y, d);
            x.z += __shfl_xor_sync(~0u, x.z, d);
            x.w += __shfl_xor_sync(~0u, x.w, d);
        }
        return x;
    };
#pragma unroll 1
    for (int all = 0; all < 2; all++) {
#pragma unroll 1
        for (int u = warp; u < n_rows * of.n; u += of.warps) {
            const int r = u / of.n, slice = u % of.n, row = row0 + r, channel = slice * D + lane % (D / 4) * 4;
            float m, l;
            const float4 x = all ? of_all(r, channel, m, l) : of_block(r, slice, m, l);
            if (lane >= D / 4 || (X::WIDE && channel >= size)) { continue; }
            if (!all && n_blocks > 1) {
                put_partial(a, is, kvh, row, share.split, size, channel, x, m, l, 0.0f);
                continue;
            }
            const int token = row_token(a, row);
            put_row(a, is, token, kvh * a.gqa + row - token * a.gqa, channel, x, m, l);
        }
        if (all || n_blocks == 1 || a.apart) { return; }
        __syncthreads();
        if (threadIdx.x == 0) { s.last = arrives_last(a, share.rows * a.n_head_kv + share.kvh, n_blocks); }
        __syncthreads();
        if (!s.last) { return; }
    }
}

} // namespace

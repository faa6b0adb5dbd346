// Decode attention over lattice pages (types/lattice.h): queries are rotated when they are read, outputs rotated back
// once per warp.
//   logit = scale[cell] * sum_vec q[vec] . point[index]          o = sum_cell (p * scale[cell]) point[index]
// One look-up in shared memory gives a point's two channels as two f16 numbers: in K a register of the left operand
// as it is, in V two look-ups of neighbouring cells exchange halves. Threads hold the cells and channels that
// attend_decode.cuh describes. Grids of two channels only, whose indices have 2, 4, 6 or 8 bits.
// Split keys are two blocks of half the channels: two such sums, each with its points, scales and rotation.
#pragma once

#include "decode_stage.cuh"

namespace {

// The stage:  indices of K and V as codes are (decode_stage.cuh), a vector in the place of a channel; then scales of
// 64 cells, of keys in f32, of values in f16 and in the order (0, 2, 1, 3) of probabilities.
// Split keys: the slow half's indices, the fast half's, and behind everything scales of the fast half.
template <int D, int KB, int VB> struct lattice_map {
    static constexpr int WK = cut<slow_of<KB>>::W, WV = cut<VB>::W, VECS = D / 2,
                         HIGH = 2; // HIGH: bits of the second part
    static constexpr int K_VECS = is_split<KB> ? VECS / 2 : VECS;
    static constexpr int K = 0, K_HIGH = K + 4 * (K_VECS * WK / 32) * 64;
    static constexpr int FAST = K_HIGH + (cut<slow_of<KB>>::high ? 4 * (K_VECS * HIGH / 32) * 64 : 0);
    static constexpr int V = FAST + (fast_of<KB> ? 4 * (K_VECS * cut<fast_of<KB>>::W / 32) * 64 : 0);
    static constexpr int V_HIGH = V + VECS / 16 * 2 * WV * 64,
                         SCALES = V_HIGH + (cut<VB>::high ? VECS / 16 * 2 * HIGH * 64 : 0);
    static constexpr int FAST_SCALES = SCALES + DECODE_CELLS * (4 + 2),
                         BYTES = FAST_SCALES + (fast_of<KB> ? 4 * DECODE_CELLS : 0);
    static_assert(!(fast_of<KB> && cut<fast_of<KB>>::high));
};

// points of keys; arrays of scales on their way
template <int KB> constexpr int key_points = (1 << cut<slow_of<KB>>::B) + (fast_of<KB> ? 1 << cut<fast_of<KB>>::B : 0);
template <int KB> constexpr int n_raw = fast_of<KB> ? 3 : 2;

// points as pairs of f16
__device__ __forceinline__ void load_table(uint32_t * to, const float * points, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const float2 x = __ldg((const float2 *) points + i);
        to[i] = pack_half2(x.x, x.y);
    }
}

template <int KB> __device__ __forceinline__ void load_key_tables(const kvq_attend_args & a, uint32_t * to) {
    load_table(to, a.k.points, 1 << cut<slow_of<KB>>::B);
    if constexpr (fast_of<KB> != 0) {
        load_table(to + (1 << cut<slow_of<KB>>::B), a.k_fast.points, 1 << cut<fast_of<KB>>::B);
    }
}

// this lane's two cells, 2*lane and 2*lane + 1 of the 64, as the block holds them; a pair of 8 or 4 bits each with its
// top in the upper half. t: as copy_stage takes it
__device__ __forceinline__ uint32_t load_scales(const kvq_affine_geometry & g, const uint8_t * params, int t) {
    t += threadIdx.x % 16 * 2;
    if (g.scale == 2) { return params[2 + t / 2] | (uint32_t) *(const uint16_t *) params << 16; }
    return g.scale ? *(const uint16_t *) (params + 2 + t) | (uint32_t) *(const uint16_t *) params << 16
                   : *(const uint32_t *) (params + 2 * t);
}

__device__ __forceinline__ float2 two_scales(const kvq_affine_geometry & g, uint32_t raw) {
    const float2 x = __half22float2(as_half2(raw));
    const bool small = g.scale == 2; // 4 bits
    const float u = (float) (raw & (small ? 15 : 255)), v = (float) (small ? raw >> 4 & 15 : raw >> 8 & 255),
                top = x.y * (small ? 1.0f / 225.0f : 1.0f / 65025.0f);
    return g.scale ? make_float2(top * (u * u), top * (v * v)) : x;
}

template <int D, int KB, int VB>
__device__ __forceinline__ void put_scales(
    const kvq_attend_args & a, uint8_t * stage, const uint32_t (&raw)[n_raw<KB>]) {
    uint8_t * const scales = stage + lattice_map<D, KB, VB>::SCALES;
    const int lane = threadIdx.x % 32;
    ((float2 *) scales)[lane] = two_scales(a.k, raw[0]);
    if constexpr (fast_of<KB> != 0) {
        ((float2 *) (stage + lattice_map<D, KB, VB>::FAST_SCALES))[lane] = two_scales(a.k, raw[2]);
    }
    const float2 v = two_scales(a.v, raw[1]);
    __half * const to = (__half *) (scales + 4 * DECODE_CELLS) + lane / 2 * 4 + lane % 2;
    to[0] = __float2half_rn(v.x);
    to[2] = __float2half_rn(v.y);
    __syncwarp();
}

// asks for what a unit holds, as copy_stage does; the scales are on their way into registers
template <int D, int KB, int VB, typename X>
__device__ __forceinline__ void copy_lattice(const kvq_attend_args & a, const X & of, uint32_t to,
    const kvq_page & page, int kvh, int t, bool keys, bool values, uint32_t (&raw)[n_raw<KB>]) {
    using map = lattice_map<D, KB, VB>;
    if (keys) {
        const uint8_t * codes = (const uint8_t *) page.k_codes + (size_t) kvh * a.k.nb_codes;
        const uint8_t * params = (const uint8_t *) page.k_params + (size_t) kvh * a.k.nb_params;
        copy_keys<map::K_VECS, map::WK>(of, to + map::K, codes, t, a.k.n_chunks[0]);
        if constexpr (cut<slow_of<KB>>::high) {
            copy_keys<map::K_VECS, map::HIGH>(of, to + map::K_HIGH, codes + a.k.offset[1], t, a.k.n_chunks[1]);
        }
        raw[0] = load_scales(a.k, params, t);
        if constexpr (fast_of<KB> != 0) {
            copy_keys<map::K_VECS, cut<fast_of<KB>>::W>(
                of, to + map::FAST, codes + a.k_fast.offset[0], t, a.k_fast.n_chunks[0]);
            raw[2] = load_scales(a.k, params + a.k_fast.np, t);
        }
    }
    if (values) {
        const uint8_t * codes = (const uint8_t *) page.v_codes + (size_t) kvh * a.v.nb_codes;
        copy_values<map::VECS, map::WV>(of, to + map::V, codes, t, a.v.n_chunks[0], a.v.n_tiles);
        if constexpr (cut<VB>::high) {
            copy_values<map::VECS, map::HIGH>(
                of, to + map::V_HIGH, codes + a.v.offset[1], t, a.v.n_chunks[1], a.v.n_tiles);
        }
        raw[1] = load_scales(a.v, (const uint8_t *) page.v_params + (size_t) kvh * a.v.nb_params, t);
    }
}

template <int D, int KB, int VB, typename X>
__device__ __noinline__ void copy_lattice_late(const kvq_attend_args & a, const X of, uint8_t * stage,
    const kvq_page & page, int kvh, int t, bool keys, bool values) {
    uint32_t raw[n_raw<KB>] = {};
    copy_lattice<D, KB, VB>(a, of, (uint32_t) __cvta_generic_to_shared(stage), page, kvh, t, keys, values, raw);
    copies_done();
    put_scales<D, KB, VB>(a, stage, raw);
}

// The points at four indices of B bits in the bytes of x, each in its byte's bits from `at` on; with 6 bits the upper
// two in those of `high` from `at_high` on.
template <int B>
__device__ __forceinline__ void look_up(
    const uint32_t * table, uint32_t x, int at, uint32_t high, int at_high, uint32_t (&out)[4]) {
    constexpr int W = cut<B>::W;
    if constexpr (W == 8) { // as they are
#pragma unroll
        for (int i = 0; i < 4; i++) { out[i] = table[__byte_perm(x, 0, 0x4440 + i)]; }
        return;
    }
    // four times the index: offsets in bytes
    uint32_t offsets = rotate(x, at - 2) & (((1 << W) - 1) << 2) * 0x01010101u;
    if constexpr (cut<B>::high) { offsets |= rotate(high, at_high - 6) & 0xc0c0c0c0u; }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[i] = *(const uint32_t *) ((const char *) table + __byte_perm(offsets, 0, 0x4440 + i));
    }
}

// Indices of a block of D channels, 64 cells: keys, second parts of 6 bits. next(): those of the pair of steps u, in
// `plane` of the words x and h
template <int D, int KB> struct key_words {
    // P: steps of a chunk; a pair of them takes the four bytes of a word's plane
    static constexpr int W = cut<KB>::W, P = cut<KB>::P, S = D / 16, N = D / 2 * W / 32 * 4,
                         N_HIGH = D / 2 * 2 / 32 * 4;
    static constexpr int SHARE = S < P ? 4 / (D / 2 * W / 32) : 1; // threads that have parts of one word
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, tile = g / 2;
    const uint8_t *words, *words1;
    uint2 x[4], h[4] = {};
    int plane = 0;
    __device__ __forceinline__ key_words(const uint8_t * keys, const uint8_t * high) :
        words(keys + tile * N * 16 + g % 2 * 8), words1(high + tile * N_HIGH * 16 + g % 2 * 8) {}
    __device__ __forceinline__ void next(int u) {
        plane = 2 * u % P / 2;
        if (S < P ? u != 0 : 2 * u % P != 0) { return; }
        const int chunk = S < P ? c / SHARE : c + 4 * (2 * u / P);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x[j] = *(const uint2 *) (words + chunk * 64 + (j ^ tile) * 16);
            if (S < P) {
                x[j].x = rotate(x[j].x, 8 / SHARE * (c % SHARE));
                x[j].y = rotate(x[j].y, 8 / SHARE * (c % SHARE));
            }
            if (cut<KB>::high) { // a word of the second part has the indices of two chunks
                h[j] = *(const uint2 *) (words1 + chunk / 2 * 64 + (j ^ tile) * 16);
                const int by = S < P ? 2 * c : 4 * (chunk % 2); // a plane a thread, or two
                h[j].x = rotate(h[j].x, by);
                h[j].y = rotate(h[j].y, by);
            }
        }
    }
};

// A block of D channels: its indices, second parts of 6 bits, scales. AT_ONCE: loops are unrolled, or one step at a
// time where code has to be short.
template <int D, int KB, typename Q>
__device__ __forceinline__ void score_block(const uint32_t * table, const Q & q, const uint8_t * keys,
    const uint8_t * high, const uint8_t * scales, float (&s)[4][4]) {
    constexpr int W = cut<KB>::W, S = D / 16, AT_ONCE = steps_at_once<Q>;
    const int g = threadIdx.x % 32 / 4, tile = g / 2;
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) { s[j][e] = 0.0f; }
    }
    key_words<D, KB> k(keys, high);
#pragma unroll AT_ONCE
    for (int u = 0; u < S / 2; u++) { // two steps
        k.next(u);
        const uint2 q0 = query_of(q, 2 * u), q1 = query_of(q, 2 * u + 1);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t e[4], f[4];
            look_up<KB>(table, k.x[j].x, W * k.plane, k.h[j].x, 2 * k.plane, e);
            look_up<KB>(table, k.x[j].y, W * k.plane, k.h[j].y, 2 * k.plane, f);
            mma(s[j], { e[0], f[0], e[1], f[1] }, q0.x, q0.y);
            mma(s[j], { e[2], f[2], e[3], f[3] }, q1.x, q1.y);
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 scale = *(const float2 *) (scales + 8 * (8 * tile + g % 2 + 2 * j));
        s[j][0] *= scale.x;
        s[j][1] *= scale.x;
        s[j][2] *= scale.y;
        s[j][3] *= scale.y;
    }
}

template <int D, int KB, int VB, typename Q>
__device__ __forceinline__ void score_lattice(
    const uint32_t * table, const Q & q, const uint8_t * stage, float (&s)[4][4]) {
    using map = lattice_map<D, KB, VB>;
    if constexpr (!is_split<KB>) {
        score_block<D, KB>(table, q, stage + map::K, stage + map::K_HIGH, stage + map::SCALES, s);
    } else {
        score_block<D / 2, slow_of<KB>>(table, q, stage + map::K, stage + map::K_HIGH, stage + map::SCALES, s);
        if constexpr (fast_of<KB> != 0) {
            const shared_query rest = { q.at + 32 * (D / 32) };
            float f[4][4];
            score_block<D / 2, fast_of<KB>>(
                table + (1 << cut<slow_of<KB>>::B), rest, stage + map::FAST, nullptr, stage + map::FAST_SCALES, f);
#pragma unroll
            for (int j = 0; j < 16; j++) { s[j / 4][j % 4] += f[j / 4][j % 4]; }
        }
    }
}

// p: probabilities of step j, cells (0, 2) and (1, 3); used up. AT_ONCE: steps in one piece of code
template <int D, int KB, int VB, int AT_ONCE>
__device__ __forceinline__ void accumulate_lattice(
    const uint32_t * table, const uint8_t * stage, uint32_t (&p)[4][2], float (&o)[D / 16][4]) {
    using map = lattice_map<D, KB, VB>;
    constexpr int W = cut<VB>::W, N = W / 2, PLANES = 8 / W; // N: words of a vector that a thread needs
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll AT_ONCE
    for (int j = 0; j < 4; j++) {
        const uint2 scale = *(const uint2 *) (stage + map::SCALES + 4 * DECODE_CELLS + c * 32 + j * 8);
        const uint32_t p0 = mul2(p[0][0], scale.x), p1 = mul2(p[0][1], scale.y);
#pragma unroll
        for (int k = 0; k < 6; k++) { p[k / 2][k % 2] = p[k / 2 + 1][k % 2]; } // the next comes first
        const int chunk = N * c + j / PLANES;
        const uint8_t * words =
            stage + map::V + chunk / 2 * 128 + ((chunk % 2 * 4 + g / 2) ^ 2 * (chunk / 2 % 4)) * 16 + g % 2 * 8;
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            const uint2 x = *(const uint2 *) (words + i * (2 * W * 64));
            uint2 h = {};
            if (cut<VB>::high) {
                h = *(const uint2 *) (stage + map::V_HIGH + i * (2 * map::HIGH * 64) + c / 2 * 128 +
                    ((c % 2 * 4 + g / 2) ^ 2 * (c / 2 % 4)) * 16 + g % 2 * 8);
            }
#pragma unroll
            for (int v = 0; v < 2; v++) { // channels 32i + 4g + 2v, + 1
                uint32_t e[4];
                look_up<VB>(table, v ? x.y : x.x, W * (j % PLANES), v ? h.y : h.x, 2 * j, e);
                mma(o[2 * i + v], { even(e[0], e[2]), odd(e[0], e[2]), even(e[1], e[3]), odd(e[1], e[3]) }, p0, p1);
            }
        }
    }
}

// x <- H x without its norm, along the index of an array; a Hadamard matrix is a product over the bits of the
// channel, in any order. take(h): bit h of the index is one of the matrix
template <int N, typename F> __device__ __forceinline__ void butterflies(float (&x)[N], F && take) {
#pragma unroll
    for (int h = 1; h < N; h *= 2) {
        if (take(h)) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (!(i & h)) {
                    const float u = x[i], v = x[i + h];
                    x[i] = u + v;
                    x[i + h] = u - v;
                }
            }
        }
    }
}

// and along bit h of the lane
__device__ __forceinline__ float across(float x, int h) {
    const float other = __shfl_xor_sync(~0u, x, h);
    return threadIdx.x & h ? other - x : x + other;
}

template <int D, typename X> __device__ __forceinline__ float rotation_norm(const kvq_attend_args & a) {
    return X::WIDE ? a.v.norm : D == 64 ? 0.125f : 0.088388348f;
}
// is the matrix of whole heads one of channels that are `distance` apart? Blocks are the largest powers of two that
// divide a head.
template <typename X> __device__ __forceinline__ bool rotates(const kvq_attend_args & a, int distance) {
    return !X::WIDE || distance < a.v.block;
}
// the sign of slice i ^ k in the rotated slice i
__device__ __forceinline__ float slice_sign(int i, int k) { return __popc(i & (i ^ k)) & 1 ? -1.0f : 1.0f; }

// Both columns of a thread's o, one after the other, or the first alone. A function of its own: it runs once or twice a
// launch, and inlined its code would be the larger part of a kernel.
template <int D, typename X, int COLUMNS = 2>
__device__ __noinline__ void rotate_columns(
    const kvq_attend_args & a, const X of, uint8_t * all, int turn, float (&o)[D / 16][4]) {
#pragma unroll 1
    for (int e = 0; e < COLUMNS; e++) {
        float x[D / 8]; // of channels 32i + 4g + {0..3}: bits 0, 1 and from 5 on of the channel
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            x[2 * n] = o[n][e];
            x[2 * n + 1] = o[n][2 + e];
        }
        butterflies(x, [&](int h) { return rotates<X>(a, h < 4 ? h : 8 * h); });
#pragma unroll 1
        for (int h = 4; h <= 16; h *= 2) {
            if (rotates<X>(a, h)) {
#pragma unroll
                for (int n = 0; n < D / 8; n++) { x[n] = across(x[n], h); }
            }
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++) { x[n] *= rotation_norm<D, X>(a); }
        if constexpr (X::WIDE) {
            if (a.v.block > D) { // and along the slices
                const float own = slice_sign(of.i, 0);
                float y[D / 8];
#pragma unroll
                for (int n = 0; n < D / 8; n++) { y[n] = own * x[n]; }
                team_exchange(of, all, turn, x, [&](int k, const float (&z)[16]) {
                    if (k * D < a.v.block) {
                        const float sign = slice_sign(of.i, k);
#pragma unroll
                        for (int n = 0; n < D / 8; n++) { y[n] = fmaf(sign, z[n], y[n]); }
                    }
                });
#pragma unroll
                for (int n = 0; n < D / 8; n++) { x[n] = y[n]; }
            }
        }
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            o[n][e] = x[2 * n];
            o[n][2 + e] = x[2 * n + 1];
        }
    }
}

// o <- H o, in place and its own inverse; all, turn: memory of the team, whose turns are two and then as before
template <int D, typename X>
__device__ __forceinline__ void rotate_output(
    const kvq_attend_args & a, const X & of, uint8_t * all, int turn, float (&o)[D / 16][4]) {
    float x[D / 16][4];
#pragma unroll
    for (int n = 0; n < D / 4; n++) { x[n / 4][n % 4] = o[n / 4][n % 4]; }
    rotate_columns<D>(a, of, all, turn, x);
#pragma unroll
    for (int n = 0; n < D / 4; n++) { o[n / 4][n % 4] = x[n / 4][n % 4]; }
}

// the step and the thread that channels 4*i .. 4*i + 3 of a block of D belong to
template <int D, int KB> __device__ __forceinline__ int step_of_four(int i) {
    constexpr int P = cut<KB>::P, S = D / 16;
    return S < P ? i % S : i / (4 * P) * P + i % P;
}
template <int D, int KB> __device__ __forceinline__ int thread_of_four(int i) {
    constexpr int P = cut<KB>::P, S = D / 16;
    return S < P ? i / S : i / P % 4;
}

// Data of a KV head's keys: order and inverse gains (NULL: keys are not sorted), and their mean.
struct head_data {
    const uint16_t * channel;
    const float *back, *mean;
};
template <typename X> __device__ __forceinline__ head_data data_of(const kvq_attend_args & a, const X & of, int kvh) {
    const int first = kvh * of.head(a);
    return { a.sorted.channel ? a.sorted.channel + first : nullptr, a.sorted.back ? a.sorted.back + first : nullptr,
        a.k_mean ? a.k_mean + first : nullptr };
}

// The rows of a block's columns as they come, [column / TWINS][D]: what stands below reads each of them more than once,
// and one way to the L2 cache takes as long as all the rest. Cards with little shared memory read them where they lie.
// So do heads in slices, short caches and the f16 kernel for pages without their means, which gain nothing.
template <int D> __host__ __device__ __forceinline__ int bytes_of_rows(const kvq_attend_args & a) {
    return a.max_shared_sm >= 160 << 10 ? 4 * DECODE_COLUMNS * D : 0;
}
template <int D, int TWINS, typename X, typename F>
__device__ __forceinline__ void copy_rows(const X & of, float * to, F && row_of) {
    constexpr int PIECES = D / 4, ALL = DECODE_COLUMNS / TWINS * PIECES,
                  N = (ALL + 32 * DECODE_WARPS - 1) / (32 * DECODE_WARPS);
    float4 x[N]; // all on their way at once
#pragma unroll
    for (int k = 0; k < N; k++) {
        const int i = threadIdx.x + k * 32 * of.warps;
        if (i < ALL) { x[k] = *(const float4 *) (row_of(i / PIECES * TWINS) + i % PIECES * 4); }
    }
#pragma unroll
    for (int k = 0; k < N; k++) {
        const int i = threadIdx.x + k * 32 * of.warps;
        if (i < ALL) { ((float4 *) to)[i] = x[k]; }
    }
    __syncthreads();
}

// Split: a slice has D/2 channels of each half, first those of the slow one, [slice][half, step][lane]. TWINS: columns
// of one row that lie side by side; it is rotated once.
template <int D, int KB, int TWINS, typename X, typename F>
__device__ __forceinline__ void share_split(
    const kvq_attend_args & a, const X & of, int warp, const head_data & data, int n_rows, uint2 * out, F && row_of) {
    constexpr int S = D / 16, HALF = D / 2, LANES = D / 8, MOST = X::WIDE ? 4 : 1; // LANES: of a half
    const int lane = threadIdx.x % 32, i = lane % LANES, head = of.head(a), quarter = head / 4;
    const bool fast = lane >= LANES, takes = lane < (fast_of<KB> ? 2 : 1) * LANES;
    int t = step_of_four<HALF, slow_of<KB>>(i), c = thread_of_four<HALF, slow_of<KB>>(i);
    if constexpr (fast_of<KB> != 0) {
        if (fast) {
            t = S / 2 + step_of_four<HALF, fast_of<KB>>(i);
            c = thread_of_four<HALF, fast_of<KB>>(i);
        }
    }
#pragma unroll 1
    for (int column = warp * TWINS; column < DECODE_COLUMNS; column += of.warps * TWINS) {
        const float *p = row_of(column), f = a.scale * LOG2E * a.k.norm;
        float x[4 * MOST] = {};
#pragma unroll
        for (int k = 0; k < MOST; k++) {
            const int at = k * HALF + 4 * i; // in the half
            if (column < n_rows && takes && k < of.n && at < head / 2) {
                const int channel = a.k.split == KVQ_SPLIT_NORM
                    ? (fast ? 0 : head / 2) + at
                    : (at < quarter ? at : at + quarter) + (fast ? 0 : quarter);
                float4 y;
                if (data.channel) { // of sorted keys, whose halves lie one behind the other
                    const ushort4 from = *(const ushort4 *) (data.channel + channel);
                    const float4 back = *(const float4 *) (data.back + channel);
                    y = make_float4(p[from.x] * back.x, p[from.y] * back.y, p[from.z] * back.z, p[from.w] * back.w);
                } else {
                    y = *(const float4 *) (p + channel);
                }
                x[4 * k] = y.x * f;
                x[4 * k + 1] = y.y * f;
                x[4 * k + 2] = y.z * f;
                x[4 * k + 3] = y.w * f;
            }
        }
        butterflies(x, [&](int h) { return (h < 4 ? h : HALF / 4 * h) < a.k.block; });
#pragma unroll 1
        for (int h = 1; h < LANES && column < n_rows; h *= 2) {
            if (4 * h < a.k.block) {
#pragma unroll
                for (int j = 0; j < 4 * MOST; j++) { x[j] = across(x[j], h); }
            }
        }
#pragma unroll
        for (int k = 0; k < MOST; k++) {
            if (takes && k < of.n) {
                const uint2 four =
                    make_uint2(pack_half2(x[4 * k], x[4 * k + 1]), pack_half2(x[4 * k + 2], x[4 * k + 3]));
#pragma unroll
                for (int twin = 0; twin < TWINS; twin++) { out[(k * S + t) * 32 + (column + twin) * 4 + c] = four; }
            }
        }
    }
}

// Queries of a block's n_rows rows for all teams, as they are and behind those, at out, rotated: [slice][step][lane]. A
// warp takes a row; columns without one are 0. GAINS: keys may have some, which rotated queries undo. TWINS: as above.
template <int D, int KB, bool GAINS, int TWINS, typename X, typename F>
__device__ __forceinline__ void share_rotated(const kvq_attend_args & a, const X & of, int warp, const head_data & data,
    int n_rows, uint2 * plain, uint2 * out, F && row_of) {
    constexpr int P = cut<KB>::P, S = D / 16, MOST = X::WIDE ? 4 : 1; // MOST: slices
    const int lane = threadIdx.x % 32;
    // the step and thread that this lane's 4 channels belong to
    const int c = S < P ? lane / 4 : lane / P % 4, t = S < P ? lane % 4 : lane / (4 * P) * P + lane % P;
    const auto put = [&](uint2 * to, int k, int column, const float * x) {
        const uint2 four = make_uint2(pack_half2(x[0], x[1]), pack_half2(x[2], x[3]));
#pragma unroll
        for (int twin = 0; twin < TWINS; twin++) { to[(k * S + t) * 32 + (column + twin) * 4 + c] = four; }
    };
#pragma unroll 1
    for (int column = warp * TWINS; column < DECODE_COLUMNS; column += of.warps * TWINS) {
        const float *p = row_of(column), f = a.scale * LOG2E, norm = rotation_norm<D, X>(a);
        float x[4 * MOST] = {};
#pragma unroll
        for (int k = 0; k < MOST; k++) {
            const int channel = k * D + 4 * lane;
            if (column < n_rows && 4 * lane < D && k < of.n && channel < of.head(a)) {
                const float4 y = *(const float4 *) (p + channel);
                x[4 * k] = y.x;
                x[4 * k + 1] = y.y;
                x[4 * k + 2] = y.z;
                x[4 * k + 3] = y.w;
            }
        }
#pragma unroll
        for (int k = 0; k < MOST; k++) {
#pragma unroll
            for (int i = 4 * k; i < 4 * k + 4; i++) { x[i] *= f; }
            if (4 * lane < D && k < of.n) { put(plain, k, column, x + 4 * k); }
            float4 back = make_float4(norm, norm, norm, norm);
            if constexpr (GAINS) {
                const int channel = k * D + 4 * lane;
                if (data.back && 4 * lane < D && channel < of.head(a)) {
                    const float4 y = *(const float4 *) (data.back + channel);
                    back = make_float4(y.x * norm, y.y * norm, y.z * norm, y.w * norm);
                }
            }
            x[4 * k] *= back.x;
            x[4 * k + 1] *= back.y;
            x[4 * k + 2] *= back.z;
            x[4 * k + 3] *= back.w;
        }
        butterflies(x, [&](int h) { return rotates<X>(a, h < 4 ? h : D / 4 * h); });
#pragma unroll 1
        for (int h = 1; h < D / 4 && column < n_rows; h *= 2) {
            if (rotates<X>(a, 4 * h)) {
#pragma unroll
                for (int i = 0; i < 4 * MOST; i++) {
                    if (i == 8 && of.n <= 2) { break; }
                    x[i] = across(x[i], h);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < MOST; k++) {
            if (4 * lane < D && k < of.n) { put(out, k, column, x + 4 * k); }
        }
    }
}

// and as they are
template <int D, int KB, typename X, typename F>
__device__ __forceinline__ void share_queries(const kvq_attend_args & a, const X & of, uint2 * out, F && row_of) {
    constexpr int S = D / 16;
    const int lane = threadIdx.x % 32, size = of.head(a);
    const float * p = row_of(lane / 4);
    const float f = a.scale * LOG2E;
    const int n = of.n * S * 32, n_threads = 32 * of.warps;
#pragma unroll 1
    for (int i0 = threadIdx.x; i0 < n; i0 += 2 * n_threads) { // two are on their way at once
        float4 x[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int step = min(i0 + k * n_threads, n - 1) / 32,
                      channel = step / S * D + channel_of<D, KB>(lane % 4, step % S);
            x[k] = *(const float4 *) (p + (X::WIDE ? min(channel, size - 4) : channel));
            if (X::WIDE && channel >= size) { x[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
        }
#pragma unroll
        for (int k = 0; k < 2; k++) { // lattice: in the order of points
            if (i0 + k * n_threads < n) {
                const float4 y = make_float4(x[k].x * f, x[k].y * f, x[k].z * f, x[k].w * f);
                out[i0 + k * n_threads] = KB > LATTICE ? make_uint2(pack_half2(y.x, y.y), pack_half2(y.z, y.w))
                                                       : make_uint2(pack_half2(y.x, y.z), pack_half2(y.y, y.w));
            }
        }
    }
}

} // namespace

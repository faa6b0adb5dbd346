// Decode attention of up to 4 query rows, products of 64 cells in 8 bits (attend_bytes.cuh).
//
// Codes are bytes as they are: one AND takes four of them out of a word, where the kernels that multiply in f16 take
// two. Queries times scales, and probabilities times scales, are whole numbers of 16 bits, a byte in each of two
// columns, so that 8 columns hold 4 rows and the sums are exact:
//
//   w ~ step * (256 * high + low)         sum code * w = step * (256 * sum code * high + sum code * low)
//
// More rows of lattice pages have a column each and two products, of upper and of lower bytes (E = 2).
//
// A field of W bits stands at W*plane in its byte. Above the middle of a byte the word is shifted down by 4; what is
// left is a power of two, 8 at most, that the other operand is divided by.
#pragma once

#include "decode_products.cuh"

namespace {

constexpr int BYTE_ROWS = DECODE_COLUMNS / 2;

template <int BITS> __device__ __forceinline__ constexpr int byte_weight(int plane) { return cut<BITS>::W * plane % 4; }

// codes of a plane in the four bytes of x, times 2^byte_weight; high: third bits, as fields() takes them
template <int BITS> __device__ __forceinline__ uint32_t byte_codes(uint32_t x, uint32_t high, int plane) {
    constexpr int W = cut<BITS>::W;
    const int at = byte_weight<BITS>(plane), to = at + 2;
    uint32_t y = (W * plane >= 4 ? x >> 4 : x) & (uint32_t) (((1 << W) - 1) << at) * 0x01010101u;
    if (BITS == 3) { y |= (to >= plane ? high << (to - plane) : high >> (plane - to)) & (0x01010101u << to); }
    return y;
}

// d += a b: 16 rows of bytes without sign below 128, 32 deep, times 8 columns of bytes, with sign or without
__device__ __forceinline__ void mma_signed(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_unsigned(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Sums of products with both bytes of a number. Of up to 4 rows (E = 1) each row has two of the columns; of more (E = 2
// rows of a thread) a column is a row, and there are two products.
template <int E> struct byte_sums {
    int at[E][4] = {};
    // of row e, of this thread's first or second row of the left operand
    __device__ __forceinline__ int whole(int second, int e) const {
        return E == 1 ? 256 * at[0][2 * second] + at[0][2 * second + 1]
                      : 256 * at[0][2 * second + e] + at[E - 1][2 * second + e];
    }
};

// Right operands of the scores of one page, in the order of shared_query: this lane has one byte of each number of
// column g's row, the upper one in even columns; E = 2: upper ones of row g, then lower ones. Of rows E*c + e: base,
// what zeros add; step; middle, what the middle of a lattice's points adds.
template <int D, int E> struct byte_query {
    uint32_t x[E][D / 32][2];
    float base, step[E];
    int middle[E];
};

// The largest magnitude of column g's row, of all four threads that have a part of it.
__device__ __forceinline__ float most_of_row(__half2 most) {
    float top = fmaxf(__low2float(most), __high2float(most));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    return fmaxf(fmaxf(top, __shfl_xor_sync(~0u, top, 2)), 1e-30f);
}

// Whole numbers of 16 bits as two bytes: a thread has the lower or the upper one of each.
constexpr float QUERY_MOST = 127.0f * 256.0f;
struct byte_digits {
    float by, magic; // a whole number stands in the lower bits of a sum with magic; upper bytes are rounded
    uint32_t byte;
    __device__ __forceinline__ uint32_t four(float x, float y, float z, float w, float f) const {
        const uint32_t a = __float_as_uint(fmaf(x, f, magic)), b = __float_as_uint(fmaf(y, f, magic)),
                       c = __float_as_uint(fmaf(z, f, magic)), d = __float_as_uint(fmaf(w, f, magic));
        return __byte_perm(__byte_perm(a, b, byte), __byte_perm(c, d, byte), 0x5410);
    }
};

// part: of E = 2, which
template <int E> __device__ __forceinline__ byte_digits digits_up_to(float top, int part) {
    const bool is_low = E == 1 ? threadIdx.x / 4 % 2 : part;
    return { __fdividef(QUERY_MOST, top), is_low ? 12582912.0f : 12582912.0f + 128.0f, is_low ? 0x0040u : 0x0051u };
}

// q: in f16, row g/2 in column g. params: scales and zeros of keys, in f16.
template <int D, int KB>
__device__ __forceinline__ void quantise_query(const shared_query & q, const uint8_t * params, byte_query<D, 1> & out) {
    constexpr int S = D / 16, P = cut<KB>::P;
    const int lane = threadIdx.x % 32, c = lane % 4;
    uint32_t w[S][2];
    float zeros[4] = {};
    __half2 most = __float2half2_rn(0.0f);
#pragma unroll
    for (int u = 0; u < S / 2; u++) {
        const int channel = channel_of<D, KB>(c, 2 * u);
        uint32_t scale[4], zero[4];
        read_params(params + 2 * channel, scale);
        read_params(params + 2 * channel + 2 * D, zero);
#pragma unroll
        for (int v = 0; v < 2; v++) {
            const uint2 qt = query_of(q, 2 * u + v);
            const uint32_t z[4] = { zero[2 * v], zero[2 * v], zero[2 * v + 1], zero[2 * v + 1] };
            mma(zeros, z, qt.x, qt.y);
            w[2 * u + v][0] = mul2(qt.x, scale[2 * v]);
            w[2 * u + v][1] = mul2(qt.y, scale[2 * v + 1]);
            most = __hmax2(most, __habs2(as_half2(w[2 * u + v][0])));
            most = __hmax2(most, __habs2(as_half2(w[2 * u + v][1])));
        }
    }
    const float top = most_of_row(most);
    const byte_digits digits = digits_up_to<1>(top, 0);
#pragma unroll
    for (int t = 0; t < S; t++) {
        const float2 x = __half22float2(as_half2(w[t][0])), y = __half22float2(as_half2(w[t][1])); // (0, 2) (1, 3)
        out.x[0][t / 2][t % 2] =
            digits.four(x.x, y.x, x.y, y.y, digits.by * exp2_of(-byte_weight<KB>(S < P ? t : t % P)));
    }
    out.base = zeros[0];
    out.step[0] = __shfl_sync(~0u, top, 8 * c) * (1.0f / QUERY_MOST);
}

// Scores of sealed keys: cells 4j + b of this thread and row c, at s[2j + b]
template <int D, int KB, int VB>
__device__ __forceinline__ void score_bytes(const byte_query<D, 1> & q, const uint8_t * stage, float (&s)[2][4]) {
    using map = stage_map<D, KB, VB>;
    constexpr int W = cut<KB>::W, P = cut<KB>::P, S = D / 16, N = D * W / 32 * 4;
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, tile = g / 2;
    const uint8_t *words = stage + map::K + tile * N * 16 + g % 2 * 8,
                  *words1 = stage + map::K_HIGH + tile * (D / 8) * 16 + g % 2 * 8;
    byte_sums<1> sums[4];
    uint2 x[4], h[4] = {};
#pragma unroll
    for (int u = 0; u < S / 2; u++) { // 8 channels
        if (S < P ? u == 0 : 2 * u % P == 0) {
            const int chunk = S < P ? c / 2 : c + 4 * (2 * u / P);
#pragma unroll
            for (int j = 0; j < 4; j++) { x[j] = *(const uint2 *) (words + chunk * 64 + (j ^ tile) * 16); }
            if (cut<KB>::high) {
#pragma unroll
                for (int j = 0; j < 4; j++) { h[j] = *(const uint2 *) (words1 + chunk / 2 * 64 + (j ^ tile) * 16); }
            }
            if (S < P || cut<KB>::high) { // two threads share a word of 8 planes
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    uint2 & y = cut<KB>::high ? h[j] : x[j];
                    y.x = rotate(y.x, 4 * (c % 2));
                    y.y = rotate(y.y, 4 * (c % 2));
                }
            }
        }
        const int pl = S < P ? 2 * u : 2 * u % P;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            mma_signed(sums[j].at[0],
                { byte_codes<KB>(x[j].x, h[j].x, pl), byte_codes<KB>(x[j].y, h[j].y, pl),
                    byte_codes<KB>(x[j].x, h[j].x, pl + 1), byte_codes<KB>(x[j].y, h[j].y, pl + 1) },
                q.x[0][u]);
        }
    }
#pragma unroll
    for (int n = 0; n < 8; n++) { s[n / 4][n % 4] = fmaf((float) sums[n / 2].whole(n % 2, 0), q.step[0], q.base); }
}

// Place in s[2 * E][4] of the score of this thread's cell 4j + b and row e
template <int E> __host__ __device__ __forceinline__ constexpr int score_at(int j, int b, int e) {
    return E * (2 * j + b) + e;
}

// Probabilities s of 64 cells times their scales: right operands of 16 cells each, four bytes of cells 16c + 4j ..; E =
// 2: upper bytes, then lower ones. Returned: the step of their whole numbers, 65535 at most. s: 1 at most. above(j):
// what they are divided by.
template <int E, typename F>
__device__ __forceinline__ float byte_probabilities(
    const float2 (&scale)[4], F && above, const float (&s)[2 * E][4], uint32_t (&p)[E][4]) {
    float most = 1e-30f;
#pragma unroll
    for (int j = 0; j < 4; j++) { most = fmaxf(most, fmaxf(scale[j].x, scale[j].y)); }
    most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most))); // no value is negative
    const float by = __fdividef(65535.0f, most);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float f = by * above(j);
        uint32_t x[E]; // of a row: upper bytes of both cells, lower ones
#pragma unroll
        for (int e = 0; e < E; e++) {
            const int first = score_at<E>(j, 0, e), second = score_at<E>(j, 1, e);
            x[e] = __byte_perm(__float_as_uint(fmaf(s[first / 4][first % 4], scale[j].x * f, 8388608.0f)),
                __float_as_uint(fmaf(s[second / 4][second % 4], scale[j].y * f, 8388608.0f)), 0x4051);
        }
#pragma unroll
        for (int e = 0; e < E; e++) {
            p[e][j] = transpose(E == 1 ? x[0] : __byte_perm(x[0], x[E - 1], e ? 0x7632 : 0x5410));
        }
    }
    return most * (1.0f / 65535.0f);
}

// o += rest times probabilities times values, of row c: channels 32i + 4g + {2r, 2r + 1} at o[2i + r]. s:
// probabilities, as score_bytes leaves scores, 1 at most. params: of values, in f16. oz: what zeros add to a group's
// channels, in parts over the lanes of a column.
template <int D, int VB>
__device__ __forceinline__ void accumulate_bytes(const uint8_t * words, const uint8_t * words1, const uint8_t * params,
    int group_log2, const float (&s)[2][4], float rest, float (&o)[D / 16][2], float (&oz)[2]) {
    constexpr int W = cut<VB>::W, P = cut<VB>::P, N = P == 2 ? 2 : 1; // N: words of a channel that a thread needs
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, turn = c % 2 * 4; // two threads share a word of 8
    params += (16 * (g / 2) + 2 * (g % 2)) * 2;
    const int chunk = P == 8 ? c / 2 : N * c; // the first
    words += g / 4 * (2 * W * 64) + chunk / 2 * 128;
    words1 += g / 4 * 128;
    uint32_t p[1][4] = {};
    float step = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        if (i == 0 || (i == 2 && group_log2 == 6)) {
            float2 scale[4];
            float z = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                scale[j] = __half22float2(as_half2(*(const uint32_t *) (params + 8 * j)));
                const float2 zero = __half22float2(as_half2(*(const uint32_t *) (params + 128 + 8 * j)));
                z = fmaf(s[j / 2][j % 2 * 2], zero.x, z);
                z = fmaf(s[j / 2][j % 2 * 2 + 1], zero.y, z);
            }
            oz[i / 2] = fmaf(rest, z, oz[i / 2]);
            params += 256;
            step = rest * byte_probabilities<1>(scale, [](int j) { return exp2_of(-byte_weight<VB>(j % P)); }, s, p);
        }
        uint4 x[N], h = {};
#pragma unroll
        for (int n = 0; n < N; n++) {
            x[n] = *(
                const uint4 *) (words + i * (4 * W * 64) + (((chunk + n) % 2 * 4 + g % 4) ^ 2 * (chunk / 2 % 4)) * 16);
        }
        if (cut<VB>::high) { h = *(const uint4 *) (words1 + i * 256 + (c / 2 * 4 + g % 4) * 16); }
#pragma unroll
        for (int r = 0; r < 4; r += 2) { // channels 32i + 4g + r, + r + 1
            const uint32_t hx = rotate(word(h, r), turn), hy = rotate(word(h, r + 1), turn);
            byte_sums<1> sums;
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                uint32_t y0[2], y1[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    y0[e] = word(x[(j + e) / P % N], r);
                    y1[e] = word(x[(j + e) / P % N], r + 1);
                    if (P == 8) {
                        y0[e] = rotate(y0[e], turn);
                        y1[e] = rotate(y1[e], turn);
                    }
                }
                mma_unsigned(sums.at[0],
                    { byte_codes<VB>(y0[0], hx, j % P), byte_codes<VB>(y1[0], hy, j % P),
                        byte_codes<VB>(y0[1], hx, (j + 1) % P), byte_codes<VB>(y1[1], hy, (j + 1) % P) },
                    p[0][j], p[0][j + 1]);
            }
#pragma unroll
            for (int b = 0; b < 2; b++) {
                o[2 * i + r / 2][b] = fmaf((float) sums.whole(b, 0), step, o[2 * i + r / 2][b]);
            }
        }
    }
}

} // namespace

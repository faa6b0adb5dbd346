// Vector layer on AVX-512 (F, BW, VL, DQ) with VNNI: one register each.
#pragma once

#include "kernels.h"

#include <cstdint>
#include <cstring>
#include <immintrin.h>

// GCC 12 warns about the undefined pass-through operand of its own unmasked intrinsics (GCC bug 105593)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace KVQ_NS {

typedef __m512 f32x16;
typedef __m512i i32x16;
typedef __m512i u8x64;
typedef __m512i i8x4;  // four int8 in every lane
typedef __m512i i16x4; // four int16, again and again

#define KVQ_UNROLL _Pragma("GCC unroll 8")
constexpr int KVQ_R = 8;        // rows that share the registers
constexpr int KVQ_F16_ROWS = 4; // likewise, with four cells each
constexpr int KVQ_TILES = 2;    // tiles of 16 lanes likewise
constexpr int KVQ_SUMS = 16;    // sums of rows and tiles together
// what dot4 and dot4u take for a coordinate of 0: 128, or 0 where codes are signed
constexpr int KVQ_DOT4_ZERO = 128, KVQ_DOT4U_ZERO = 0;

static inline f32x16 f32_set1(float x) { return _mm512_set1_ps(x); }
static inline f32x16 f32_load(const float * p) { return _mm512_loadu_ps(p); }
static inline void f32_store(float * p, f32x16 a) { _mm512_storeu_ps(p, a); }
static inline f32x16 f32_load_f16(const uint16_t * p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p));
}
static inline void f32_store_f16(uint16_t * p, f32x16 a) {
    _mm256_storeu_si256((__m256i *) p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline f32x16 f32_load_u8(const uint8_t * p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) p)));
}
static inline f32x16 f32_add(f32x16 a, f32x16 b) { return _mm512_add_ps(a, b); }
static inline f32x16 f32_sub(f32x16 a, f32x16 b) { return _mm512_sub_ps(a, b); }
static inline f32x16 f32_mul(f32x16 a, f32x16 b) { return _mm512_mul_ps(a, b); }
static inline f32x16 f32_fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }
static inline f32x16 f32_max(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }
static inline f32x16 f32_min(f32x16 a, f32x16 b) { return _mm512_min_ps(a, b); }
static inline f32x16 f32_div(f32x16 a, f32x16 b) { return _mm512_div_ps(a, b); }
static inline f32x16 f32_floor(f32x16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
// to the nearest integer
static inline f32x16 f32_round(f32x16 a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// a where |a| <= top, else 0
static inline f32x16 f32_within(f32x16 a, float top) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(a), _mm512_set1_ps(top), _CMP_LE_OQ), a);
}
// max(|a|, |b|)
static inline f32x16 f32_absmax(f32x16 a, f32x16 b) { return _mm512_range_ps(a, b, 0x0b); }
// where x < least: least = x, at = i
static inline void f32_keep_less(f32x16 & least, f32x16 & at, f32x16 x, f32x16 i) {
    const __mmask16 less = _mm512_cmp_ps_mask(x, least, _CMP_LT_OQ);
    least = _mm512_mask_mov_ps(least, less, x);
    at = _mm512_mask_mov_ps(at, less, i);
}
// the largest value in every lane
static inline f32x16 f32_max_all(f32x16 a) {
    a = _mm512_max_ps(a, _mm512_shuffle_f32x4(a, a, 0x4e));
    a = _mm512_max_ps(a, _mm512_shuffle_f32x4(a, a, 0xb1));
    a = _mm512_max_ps(a, _mm512_permute_ps(a, 0x4e));
    return _mm512_max_ps(a, _mm512_permute_ps(a, 0xb1));
}
static inline float f32_first(f32x16 a) { return _mm512_cvtss_f32(a); }
static inline float f32_sum(f32x16 a) { return _mm512_reduce_add_ps(a); }
static inline float f32_hmax(f32x16 a) { return _mm512_reduce_max_ps(a); }

// sums (maxima) of four registers
#define KVQ_REDUCE4(name, op)                                                                                          \
    static inline void name(float * p, __m512 a, __m512 b, __m512 c, __m512 d) {                                       \
        const __m512 x = _mm512_##op##_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));                         \
        const __m512 y = _mm512_##op##_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));                         \
        const __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y));                               \
        const __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y));                               \
        const __m512 z = _mm512_##op##_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));                                 \
        const __m256 w = _mm256_##op##_ps(_mm512_castps512_ps256(z), _mm512_extractf32x8_ps(z, 1));                    \
        _mm_storeu_ps(p, _mm_##op##_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1)));                       \
    }
KVQ_REDUCE4(f32_sum4, add)
KVQ_REDUCE4(f32_hmax4, max)
#undef KVQ_REDUCE4

__attribute__((always_inline)) static inline void f32_transpose(f32x16 * x) {
    __m512 y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] =
                _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(y[i + j]), _mm512_castps_pd(y[i + j + 2])));
            x[i + 2 * j + 1] =
                _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(y[i + j]), _mm512_castps_pd(y[i + j + 2])));
        }
    }
    for (int i = 0; i < 4; i++) {
        y[i] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        x[i] = _mm512_shuffle_f32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_f32x4(y[i], y[i + 8], 0xdd);
        x[i + 4] = _mm512_shuffle_f32x4(y[i + 4], y[i + 12], 0x88);
        x[i + 12] = _mm512_shuffle_f32x4(y[i + 4], y[i + 12], 0xdd);
    }
}

// 2^x = 2^n * 2^r, r in [-1/2, 1/2] by a polynomial (relative error below 3e-7); 0 below the f32 range, -inf included
static inline f32x16 f32_exp2(f32x16 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-150.0f));
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
    __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(KVQ_EXP2_5), r, _mm512_set1_ps(KVQ_EXP2_4));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(KVQ_EXP2_3));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(KVQ_EXP2_2));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(KVQ_EXP2_1));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

static inline i32x16 i32_zero() { return _mm512_setzero_si512(); }
static inline i32x16 i32_set1(int32_t x) { return _mm512_set1_epi32(x); }
static inline i32x16 i32_add(i32x16 a, i32x16 b) { return _mm512_add_epi32(a, b); }
static inline i32x16 i32_sub(i32x16 a, i32x16 b) { return _mm512_sub_epi32(a, b); }
static inline f32x16 f32_from_i32(i32x16 a) { return _mm512_cvtepi32_ps(a); }
// p at whole indices
static inline i32x16 i32_gather(const int32_t * p, f32x16 index) {
    return _mm512_i32gather_epi32(_mm512_cvttps_epi32(index), p, 4);
}
// p at whole indices, below 16
static inline f32x16 f32_lookup16(const float * p, i32x16 index) {
    return _mm512_permutexvar_ps(index, _mm512_loadu_ps(p));
}
static inline f32x16 f32_gather(const float * p, i32x16 index) { return _mm512_i32gather_ps(index, p, 4); }
// byte K of every lane
template <int K> static inline i32x16 i32_byte(i32x16 a) {
    return _mm512_and_si512(_mm512_srli_epi32(a, 8 * K), _mm512_set1_epi32(255));
}
static inline bool i32_any_negative(i32x16 a) { return _mm512_movepi32_mask(a); }
// the lower and the upper int16 of every lane
static inline f32x16 f32_low_half(i32x16 a) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(a, 16), 16));
}
static inline f32x16 f32_high_half(i32x16 a) { return _mm512_cvtepi32_ps(_mm512_srai_epi32(a, 16)); }
// round to nearest, |a| <= 127
static inline void i8_store(int8_t * p, f32x16 a) {
    _mm_storeu_si128((__m128i *) p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a)));
}
static inline void i8_store4(int8_t * p, f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    const __m512i ab = _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b)),
                  cd = _mm512_packs_epi32(_mm512_cvtps_epi32(c), _mm512_cvtps_epi32(d));
    // packs works inside 128-bit lanes
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(ab, cd)));
}

// round to nearest, 0 <= a <= 255
static inline void u8_store16(uint8_t * p, f32x16 a) {
    _mm_storeu_si128((__m128i *) p, _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(a)));
}
static inline void u8_store64(uint8_t * p, f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    const __m512i ab = _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b)),
                  cd = _mm512_packs_epi32(_mm512_cvtps_epi32(c), _mm512_cvtps_epi32(d));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(ab, cd)));
}

static inline u8x64 u8_load(const uint8_t * p) { return _mm512_loadu_si512(p); }
static inline void u8_store(uint8_t * p, u8x64 a) { _mm512_storeu_si512(p, a); }
static inline u8x64 u8_or(u8x64 a, u8x64 b) { return _mm512_or_si512(a, b); }
static inline u8x64 u8_field(u8x64 a, int shift, int mask, int up) {
    // shifts cross bytes inside 16-bit lanes; the mask drops what came over
    const __m512i x = up == shift ? a
        : up > shift              ? _mm512_slli_epi16(a, (unsigned) (up - shift))
                                  : _mm512_srli_epi16(a, (unsigned) (shift - up));
    return _mm512_and_si512(x, _mm512_set1_epi8((char) (mask << up)));
}
// twice the nibbles of 16 bytes of a and of b: of each a low, high, of each b low, high
static inline u8x64 u8_nibbles(const uint8_t * a, const uint8_t * b) {
    const __m512i x = _mm512_or_si512(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) a)),
        _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) b)), 16));
    return _mm512_or_si512(_mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x000f000f)), 1),
        _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x00f000f0)), 5));
}
// p is 0..3 bytes into 64 that were just stored: reads up to 3 beyond
static inline f32x16 f32_every_4th(const uint8_t * p) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0xff)));
}
template <int N> static inline u8x64 u8_lookup(u8x64 index, const uint8_t * table) {
    const __m512i high = _mm512_and_si512(index, _mm512_set1_epi8((char) 0xf0)), low = _mm512_xor_si512(index, high);
    u8x64 r = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) table)), low);
    for (int k = 1; k < (N + 15) / 16; k++) {
        const __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) (table + 16 * k)));
        r = _mm512_mask_shuffle_epi8(r, _mm512_cmpeq_epi8_mask(high, _mm512_set1_epi8((char) (16 * k))), t, low);
    }
    return r;
}
// byte k of every four
static inline f32x16 f32_load_i8(const int8_t * p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) p)));
}
static inline f32x16 f32_from_byte(u8x64 a, int k) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(a, (unsigned) (8 * k)), _mm512_set1_epi32(255)));
}
static inline i8x4 i8_set4(const int8_t * w) {
    int32_t four;
    memcpy(&four, w, 4);
    return _mm512_set1_epi32(four);
}
static inline i16x4 i16_set4(const int16_t * w) {
    int64_t four;
    memcpy(&four, w, 8);
    return _mm512_set1_epi64(four);
}
static inline i16x4 i16_set2(const int16_t * w) {
    int32_t two;
    memcpy(&two, w, 4);
    return _mm512_set1_epi32(two);
}
static inline i32x16 dot2(i32x16 acc, u8x64 x, i16x4 w) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(x), "v"(w));
    return acc;
}
static inline void i16_store_pairs(int16_t * p, f32x16 a, f32x16 b) { // packs works inside 128-bit lanes
    _mm512_storeu_si512(p,
        _mm512_shuffle_epi32(_mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b)), (_MM_PERM_ENUM) 0xd8));
}
static inline void i16_store_sums(int16_t * p, f32x16 a) {
    _mm256_storeu_si256(
        (__m256i *) p, _mm512_cvtsepi32_epi16(_mm512_shuffle_epi32(_mm512_cvtps_epi32(a), (_MM_PERM_ENUM) 0xd8)));
}
// lanes i and i ^ H change places
template <int H> static inline f32x16 f32_swap(f32x16 a) {
    return H == 1 ? _mm512_permute_ps(a, 0xb1)
        : H == 2  ? _mm512_permute_ps(a, 0x4e)
        : H == 4  ? _mm512_shuffle_f32x4(a, a, 0xb1)
                  : _mm512_shuffle_f32x4(a, a, 0x4e);
}
static inline f32x16 f32_reverse(f32x16 a) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), a);
}
static inline i32x16 dot4(i32x16 acc, u8x64 codes, i8x4 w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(w));
    return acc;
}
static inline i32x16 dot4u(i32x16 acc, u8x64 codes, i8x4 w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(codes));
    return acc;
}

} // namespace

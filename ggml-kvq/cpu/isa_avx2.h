// Vector layer on AVX2, FMA and F16C: two registers each.
#pragma once

#include "kernels.h"

#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace KVQ_NS {

struct f32x16 {
    __m256 a, b;
};
struct i32x16 {
    __m256i a, b;
};
struct u8x64 {
    __m256i a, b;
};
typedef __m256i i8x4;  // four int8 in every lane
typedef __m256i i16x4; // four int16, again and again

#define KVQ_UNROLL _Pragma("GCC unroll 8")
constexpr int KVQ_R = 4;        // rows that share the registers
constexpr int KVQ_F16_ROWS = 1; // likewise, with four cells each
constexpr int KVQ_TILES = 1;    // tiles of 16 lanes likewise
constexpr int KVQ_SUMS = 4;     // sums of rows and tiles together
// what dot4 and dot4u take for a coordinate of 0: 128, or 0 where codes are signed
constexpr int KVQ_DOT4_ZERO = 128, KVQ_DOT4U_ZERO = 0;

static inline f32x16 f32_set1(float x) {
    const __m256 v = _mm256_set1_ps(x);
    return { v, v };
}
static inline f32x16 f32_load(const float * p) { return { _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8) }; }
static inline void f32_store(float * p, f32x16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
static inline f32x16 f32_load_f16(const uint16_t * p) {
    return { _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)),
        _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (p + 8))) };
}
static inline void f32_store_f16(uint16_t * p, f32x16 x) {
    _mm_storeu_si128((__m128i *) p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i *) (p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline f32x16 f32_load_u8(const uint8_t * p) {
    return { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) p))),
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) (p + 8)))) };
}
static inline f32x16 f32_add(f32x16 x, f32x16 y) { return { _mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b) }; }
static inline f32x16 f32_sub(f32x16 x, f32x16 y) { return { _mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b) }; }
static inline f32x16 f32_mul(f32x16 x, f32x16 y) { return { _mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b) }; }
static inline f32x16 f32_load_i8(const int8_t * p) {
    return { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) p))),
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) (p + 8)))) };
}
static inline f32x16 f32_fma(f32x16 x, f32x16 y, f32x16 z) {
    return { _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b) };
}
static inline f32x16 f32_max(f32x16 x, f32x16 y) { return { _mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b) }; }
static inline f32x16 f32_min(f32x16 x, f32x16 y) { return { _mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b) }; }
static inline f32x16 f32_div(f32x16 x, f32x16 y) { return { _mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b) }; }
static inline f32x16 f32_floor(f32x16 x) { return { _mm256_floor_ps(x.a), _mm256_floor_ps(x.b) }; }
// to the nearest integer
static inline f32x16 f32_round(f32x16 x) {
    return { _mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
        _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) };
}
static inline __m256 within8(__m256 x, float top) {
    return _mm256_and_ps(x, _mm256_cmp_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x), _mm256_set1_ps(top), _CMP_LE_OQ));
}
// x where |x| <= top, else 0
static inline f32x16 f32_within(f32x16 x, float top) { return { within8(x.a, top), within8(x.b, top) }; }
// max(|x|, |y|)
static inline f32x16 f32_absmax(f32x16 x, f32x16 y) {
    const __m256 m = _mm256_set1_ps(-0.0f);
    return { _mm256_max_ps(_mm256_andnot_ps(m, x.a), _mm256_andnot_ps(m, y.a)),
        _mm256_max_ps(_mm256_andnot_ps(m, x.b), _mm256_andnot_ps(m, y.b)) };
}
// where x < least: least = x, at = i
static inline void f32_keep_less(f32x16 & least, f32x16 & at, f32x16 x, f32x16 i) {
    const __m256 a = _mm256_cmp_ps(x.a, least.a, _CMP_LT_OQ), b = _mm256_cmp_ps(x.b, least.b, _CMP_LT_OQ);
    least = { _mm256_blendv_ps(least.a, x.a, a), _mm256_blendv_ps(least.b, x.b, b) };
    at = { _mm256_blendv_ps(at.a, i.a, a), _mm256_blendv_ps(at.b, i.b, b) };
}
// the largest value in every lane
static inline f32x16 f32_max_all(f32x16 x) {
    __m256 a = _mm256_max_ps(x.a, x.b);
    a = _mm256_max_ps(a, _mm256_permute2f128_ps(a, a, 1));
    a = _mm256_max_ps(a, _mm256_permute_ps(a, 0x4e));
    a = _mm256_max_ps(a, _mm256_permute_ps(a, 0xb1));
    return { a, a };
}
static inline float f32_first(f32x16 x) { return _mm256_cvtss_f32(x.a); }
static inline float f32_sum(f32x16 x) {
    const __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 r = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    r = _mm_add_ps(r, _mm_movehl_ps(r, r));
    return _mm_cvtss_f32(_mm_add_ss(r, _mm_movehdup_ps(r)));
}
static inline float f32_hmax(f32x16 x) {
    const __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 r = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    r = _mm_max_ps(r, _mm_movehl_ps(r, r));
    return _mm_cvtss_f32(_mm_max_ss(r, _mm_movehdup_ps(r)));
}

// sums (maxima) of four registers
#define KVQ_REDUCE4(name, op)                                                                                          \
    static inline void name(float * p, f32x16 a, f32x16 b, f32x16 c, f32x16 d) {                                       \
        const __m256 e = _mm256_##op##_ps(a.a, a.b), f = _mm256_##op##_ps(b.a, b.b), g = _mm256_##op##_ps(c.a, c.b);   \
        const __m256 h = _mm256_##op##_ps(d.a, d.b);                                                                   \
        const __m256 x = _mm256_##op##_ps(_mm256_unpacklo_ps(e, f), _mm256_unpackhi_ps(e, f));                         \
        const __m256 y = _mm256_##op##_ps(_mm256_unpacklo_ps(g, h), _mm256_unpackhi_ps(g, h));                         \
        const __m256 lo = _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(x), _mm256_castps_pd(y)));              \
        const __m256 hi = _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(x), _mm256_castps_pd(y)));              \
        const __m256 z = _mm256_##op##_ps(lo, hi);                                                                     \
        _mm_storeu_ps(p, _mm_##op##_ps(_mm256_castps256_ps128(z), _mm256_extractf128_ps(z, 1)));                       \
    }
KVQ_REDUCE4(f32_sum4, add)
KVQ_REDUCE4(f32_hmax4, max)
#undef KVQ_REDUCE4

static inline void transpose8(__m256 * x) {
    __m256 y[8];
    for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0x44);
            x[i + 2 * j + 1] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0xee);
        }
    }
    for (int i = 0; i < 4; i++) {
        y[i] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
        y[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) { x[i] = y[i]; }
}

static inline void f32_transpose(f32x16 * x) {
    __m256 q[4][8];
    for (int i = 0; i < 8; i++) {
        q[0][i] = x[i].a;
        q[1][i] = x[i].b;
        q[2][i] = x[i + 8].a;
        q[3][i] = x[i + 8].b;
    }
    for (int j = 0; j < 4; j++) { transpose8(q[j]); }
    for (int i = 0; i < 8; i++) {
        x[i] = { q[0][i], q[2][i] };
        x[i + 8] = { q[1][i], q[3][i] };
    }
}

// as isa_avx512.h, with the power of two built in the exponent field; results below 2^-125 become 0
static inline __m256 exp2_8(__m256 x0) {
    const __m256 x = _mm256_max_ps(x0, _mm256_set1_ps(-126.0f));
    const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm256_sub_ps(x, n);
    __m256 y = _mm256_fmadd_ps(_mm256_set1_ps(KVQ_EXP2_5), r, _mm256_set1_ps(KVQ_EXP2_4));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(KVQ_EXP2_3));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(KVQ_EXP2_2));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(KVQ_EXP2_1));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f));
    const __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    const __m256 keep = _mm256_cmp_ps(x0, _mm256_set1_ps(-126.0f), _CMP_GE_OQ);
    return _mm256_and_ps(_mm256_mul_ps(y, _mm256_castsi256_ps(e)), keep);
}
static inline f32x16 f32_exp2(f32x16 x) { return { exp2_8(x.a), exp2_8(x.b) }; }

static inline i32x16 i32_zero() { return { _mm256_setzero_si256(), _mm256_setzero_si256() }; }
static inline i32x16 i32_set1(int32_t x) { return { _mm256_set1_epi32(x), _mm256_set1_epi32(x) }; }
static inline i32x16 i32_add(i32x16 x, i32x16 y) { return { _mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b) }; }
static inline i32x16 i32_sub(i32x16 x, i32x16 y) { return { _mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b) }; }
static inline f32x16 f32_from_i32(i32x16 x) { return { _mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b) }; }
// p at whole indices
static inline i32x16 i32_gather(const int32_t * p, f32x16 index) {
    return { _mm256_i32gather_epi32(p, _mm256_cvttps_epi32(index.a), 4),
        _mm256_i32gather_epi32(p, _mm256_cvttps_epi32(index.b), 4) };
}
// p at whole indices, below 16
static inline f32x16 f32_lookup16(const float * p, i32x16 index) {
    const __m256 low = _mm256_loadu_ps(p), high = _mm256_loadu_ps(p + 8);
    const auto of = [&](__m256i i) {
        const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(i, 28));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i), is_high);
    };
    return { of(index.a), of(index.b) };
}
static inline f32x16 f32_gather(const float * p, i32x16 index) {
    return { _mm256_i32gather_ps(p, index.a, 4), _mm256_i32gather_ps(p, index.b, 4) };
}
// byte K of every lane
template <int K> static inline i32x16 i32_byte(i32x16 x) {
    const __m256i byte = _mm256_set1_epi32(255);
    return { _mm256_and_si256(_mm256_srli_epi32(x.a, 8 * K), byte),
        _mm256_and_si256(_mm256_srli_epi32(x.b, 8 * K), byte) };
}
static inline bool i32_any_negative(i32x16 x) {
    return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_or_si256(x.a, x.b)));
}
// the lower and the upper int16 of every lane
static inline f32x16 f32_low_half(i32x16 x) {
    return { _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x.a, 16), 16)),
        _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x.b, 16), 16)) };
}
static inline f32x16 f32_high_half(i32x16 x) {
    return { _mm256_cvtepi32_ps(_mm256_srai_epi32(x.a, 16)), _mm256_cvtepi32_ps(_mm256_srai_epi32(x.b, 16)) };
}
static inline void i8_store(int8_t * p, f32x16 x) {
    const __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)); // a0-3 b0-3 a4-7 b4-7
    const __m256i o = _mm256_permute4x64_epi64(w, 0xd8);
    _mm_storeu_si128((__m128i *) p, _mm_packs_epi16(_mm256_castsi256_si128(o), _mm256_extracti128_si256(o, 1)));
}

static inline void i8_store4(int8_t * p, f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    i8_store(p, a);
    i8_store(p + 16, b);
    i8_store(p + 32, c);
    i8_store(p + 48, d);
}

// round to nearest, 0 <= x <= 255
static inline void u8_store16(uint8_t * p, f32x16 x) {
    const __m256i o =
        _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xd8);
    _mm_storeu_si128((__m128i *) p, _mm_packus_epi16(_mm256_castsi256_si128(o), _mm256_extracti128_si256(o, 1)));
}
static inline void u8_store64(uint8_t * p, f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    u8_store16(p, a);
    u8_store16(p + 16, b);
    u8_store16(p + 32, c);
    u8_store16(p + 48, d);
}

static inline u8x64 u8_load(const uint8_t * p) {
    return { _mm256_loadu_si256((const __m256i *) p), _mm256_loadu_si256((const __m256i *) (p + 32)) };
}
static inline void u8_store(uint8_t * p, u8x64 x) {
    _mm256_storeu_si256((__m256i *) p, x.a);
    _mm256_storeu_si256((__m256i *) (p + 32), x.b);
}
static inline u8x64 u8_or(u8x64 x, u8x64 y) { return { _mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b) }; }
static inline __m256i field32(__m256i a, int shift, int mask, int up) {
    const __m256i x = up == shift ? a
        : up > shift              ? _mm256_slli_epi16(a, up - shift)
                                  : _mm256_srli_epi16(a, shift - up);
    return _mm256_and_si256(x, _mm256_set1_epi8((char) (mask << up)));
}
static inline u8x64 u8_field(u8x64 x, int shift, int mask, int up) {
    return { field32(x.a, shift, mask, up), field32(x.b, shift, mask, up) };
}
static inline __m256 byte8(__m256i x, int k) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x, 8 * k), _mm256_set1_epi32(255)));
}
static inline f32x16 f32_every_4th(const uint8_t * p) { // reads up to 3 beyond the 64 bytes
    const __m256i m = _mm256_set1_epi32(0xff);
    return { _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i *) p), m)),
        _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i *) (p + 32)), m)) };
}
// twice the nibbles of 16 bytes of a and of b: of each a low, high, of each b low, high
static inline u8x64 u8_nibbles(const uint8_t * a, const uint8_t * b) {
    const auto half = [&](int i) {
        const __m256i x = _mm256_or_si256(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) (a + i))),
            _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) (b + i))), 16));
        return _mm256_or_si256(_mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x000f000f)), 1),
            _mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x00f000f0)), 5));
    };
    return { half(0), half(8) };
}
template <int N> static inline u8x64 u8_lookup(u8x64 index, const uint8_t * table) {
    u8x64 r = { _mm256_setzero_si256(), _mm256_setzero_si256() };
    // bytes outside 16k .. 16k+15 get their top bit set, which the shuffle turns into 0
    for (int k = 0; k < (N + 15) / 16; k++) {
        const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) (table + 16 * k)));
        const __m256i x = _mm256_set1_epi8((char) (16 * k)), up = _mm256_set1_epi8(0x70);
        r.a = _mm256_or_si256(r.a, _mm256_shuffle_epi8(t, _mm256_adds_epu8(_mm256_xor_si256(index.a, x), up)));
        r.b = _mm256_or_si256(r.b, _mm256_shuffle_epi8(t, _mm256_adds_epu8(_mm256_xor_si256(index.b, x), up)));
    }
    return r;
}
// byte k of every four
static inline f32x16 f32_from_byte(u8x64 x, int k) { return { byte8(x.a, k), byte8(x.b, k) }; }
static inline i8x4 i8_set4(const int8_t * w) {
    int32_t four;
    memcpy(&four, w, 4);
    return _mm256_set1_epi32(four);
}
// codes are below 128, or weights at most 63 in size, so the 16-bit pair sums of maddubs cannot saturate
static inline i32x16 dot4(i32x16 acc, u8x64 codes, i8x4 w) {
    const __m256i one = _mm256_set1_epi16(1);
    return { _mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(codes.a, w), one)),
        _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(codes.b, w), one)) };
}

static inline i16x4 i16_set4(const int16_t * w) {
    int64_t four;
    memcpy(&four, w, 8);
    return _mm256_set1_epi64x(four);
}
static inline i16x4 i16_set2(const int16_t * w) {
    int32_t two;
    memcpy(&two, w, 4);
    return _mm256_set1_epi32(two);
}
static inline i32x16 dot2(i32x16 acc, u8x64 x, i16x4 w) {
    return { _mm256_add_epi32(acc.a, _mm256_madd_epi16(x.a, w)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(x.b, w)) };
}
static inline void i16_store_pairs(int16_t * p, f32x16 x, f32x16 y) { // packs works inside 128-bit lanes
    _mm256_storeu_si256((__m256i *) p,
        _mm256_shuffle_epi32(_mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(y.a)), 0xd8));
    _mm256_storeu_si256((__m256i *) (p + 16),
        _mm256_shuffle_epi32(_mm256_packs_epi32(_mm256_cvtps_epi32(x.b), _mm256_cvtps_epi32(y.b)), 0xd8));
}
static inline void i16_store_sums(int16_t * p, f32x16 x) {
    const __m256i a = _mm256_shuffle_epi32(_mm256_cvtps_epi32(x.a), 0xd8),
                  b = _mm256_shuffle_epi32(_mm256_cvtps_epi32(x.b), 0xd8);
    _mm256_storeu_si256((__m256i *) p, _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8));
}
// lanes i and i ^ H change places
template <int H> static inline f32x16 f32_swap(f32x16 x) {
    if (H == 8) { return { x.b, x.a }; }
    if (H == 4) { return { _mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1) }; }
    constexpr int order = H == 1 ? 0xb1 : 0x4e;
    return { _mm256_permute_ps(x.a, order), _mm256_permute_ps(x.b, order) };
}
static inline f32x16 f32_reverse(f32x16 x) {
    const __m256i order = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    return { _mm256_permutevar8x32_ps(x.b, order), _mm256_permutevar8x32_ps(x.a, order) };
}

// unsigned weights; codes are signed, at most 63 in size, so pair sums cannot saturate
static inline i32x16 dot4u(i32x16 acc, u8x64 codes, i8x4 w) {
    const __m256i one = _mm256_set1_epi16(1);
    return { _mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(w, codes.a), one)),
        _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(w, codes.b), one)) };
}

} // namespace

// Vector layer on AArch64 NEON with dot product (ARMv8.2): four registers each. Run under emulation only
// (scripts/check_aarch64.sh).
#pragma once

#include "kernels.h"

#include <arm_neon.h>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace KVQ_NS {

struct f32x16 {
    float32x4_t v[4];
};
struct i32x16 {
    int32x4_t v[4];
};
struct u8x64 {
    uint8x16_t v[4];
};
typedef int8x16_t i8x4;  // four int8 in every lane
typedef int16x8_t i16x4; // four int16, again and again

#define KVQ_UNROLL _Pragma("GCC unroll 8")
constexpr int KVQ_R = 4;        // rows that share the registers
constexpr int KVQ_F16_ROWS = 4; // likewise, with four cells each
constexpr int KVQ_TILES = 1;    // tiles of 16 lanes likewise
constexpr int KVQ_SUMS = 4;     // sums of rows and tiles together
// what dot4 and dot4u take for a coordinate of 0: 128, or 0 where codes are signed
constexpr int KVQ_DOT4_ZERO = 0, KVQ_DOT4U_ZERO = 128;

#define KVQ_EACH for (int i = 0; i < 4; i++)

static inline f32x16 f32_set1(float x) {
    f32x16 r;
    KVQ_EACH r.v[i] = vdupq_n_f32(x);
    return r;
}
static inline f32x16 f32_load(const float * p) {
    f32x16 r;
    KVQ_EACH r.v[i] = vld1q_f32(p + 4 * i);
    return r;
}
static inline void f32_store(float * p, f32x16 a) { KVQ_EACH vst1q_f32(p + 4 * i, a.v[i]); }
static inline f32x16 f32_load_f16(const uint16_t * p) {
    f32x16 r;
    KVQ_EACH r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
    return r;
}
static inline void f32_store_f16(uint16_t * p, f32x16 a) {
    KVQ_EACH vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
static inline f32x16 f32_load_u8(const uint8_t * p) {
    const uint8x16_t b = vld1q_u8(p);
    const uint16x8_t lo = vmovl_u8(vget_low_u8(b)), hi = vmovl_u8(vget_high_u8(b));
    return { { vcvtq_f32_u32(vmovl_u16(vget_low_u16(lo))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(lo))),
        vcvtq_f32_u32(vmovl_u16(vget_low_u16(hi))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(hi))) } };
}
static inline f32x16 f32_add(f32x16 a, f32x16 b) {
    KVQ_EACH a.v[i] = vaddq_f32(a.v[i], b.v[i]);
    return a;
}
static inline f32x16 f32_sub(f32x16 a, f32x16 b) {
    KVQ_EACH a.v[i] = vsubq_f32(a.v[i], b.v[i]);
    return a;
}
static inline f32x16 f32_mul(f32x16 a, f32x16 b) {
    KVQ_EACH a.v[i] = vmulq_f32(a.v[i], b.v[i]);
    return a;
}
static inline f32x16 f32_load_i8(const int8_t * p) {
    const int8x16_t b = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(b)), high = vmovl_s8(vget_high_s8(b));
    f32x16 r;
    r.v[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
    r.v[1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(low)));
    r.v[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
    r.v[3] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)));
    return r;
}
static inline f32x16 f32_fma(f32x16 a, f32x16 b, f32x16 c) {
    KVQ_EACH c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]);
    return c;
}
static inline f32x16 f32_max(f32x16 a, f32x16 b) {
    KVQ_EACH a.v[i] = vmaxq_f32(a.v[i], b.v[i]);
    return a;
}
static inline f32x16 f32_min(f32x16 a, f32x16 b) {
    KVQ_EACH a.v[i] = vminq_f32(a.v[i], b.v[i]);
    return a;
}
static inline f32x16 f32_div(f32x16 a, f32x16 b) {
    KVQ_EACH a.v[i] = vdivq_f32(a.v[i], b.v[i]);
    return a;
}
static inline f32x16 f32_floor(f32x16 a) {
    KVQ_EACH a.v[i] = vrndmq_f32(a.v[i]);
    return a;
}
// to the nearest integer
static inline f32x16 f32_round(f32x16 a) {
    KVQ_EACH a.v[i] = vrndnq_f32(a.v[i]);
    return a;
}
// a where |a| <= top, else 0
static inline f32x16 f32_within(f32x16 a, float top) {
    KVQ_EACH a.v[i] =
        vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a.v[i]), vcaleq_f32(a.v[i], vdupq_n_f32(top))));
    return a;
}
// max(|a|, |b|)
static inline f32x16 f32_absmax(f32x16 a, f32x16 b) {
    KVQ_EACH a.v[i] = vmaxq_f32(vabsq_f32(a.v[i]), vabsq_f32(b.v[i]));
    return a;
}
static inline float f32_sum(f32x16 a) {
    return vaddvq_f32(vaddq_f32(vaddq_f32(a.v[0], a.v[1]), vaddq_f32(a.v[2], a.v[3])));
}
static inline float f32_hmax(f32x16 a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}
// where x < least: least = x, at = i
static inline void f32_keep_less(f32x16 & least, f32x16 & at, f32x16 x, f32x16 j) {
    KVQ_EACH {
        const uint32x4_t less = vcltq_f32(x.v[i], least.v[i]);
        least.v[i] = vbslq_f32(less, x.v[i], least.v[i]);
        at.v[i] = vbslq_f32(less, j.v[i], at.v[i]);
    }
}
// the largest value in every lane
static inline f32x16 f32_max_all(f32x16 a) { return f32_set1(f32_hmax(a)); }
static inline float f32_first(f32x16 a) { return vgetq_lane_f32(a.v[0], 0); }

// sums (maxima) of four registers
static inline float32x4_t add4(f32x16 a) { return vaddq_f32(vaddq_f32(a.v[0], a.v[1]), vaddq_f32(a.v[2], a.v[3])); }
static inline float32x4_t max4(f32x16 a) { return vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])); }
static inline void f32_sum4(float * p, f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    vst1q_f32(p, vpaddq_f32(vpaddq_f32(add4(a), add4(b)), vpaddq_f32(add4(c), add4(d))));
}
static inline void f32_hmax4(float * p, f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    vst1q_f32(p, vpmaxq_f32(vpmaxq_f32(max4(a), max4(b)), vpmaxq_f32(max4(c), max4(d))));
}
// 16 rows of 16
static inline void f32_transpose(f32x16 * x) {
    float t[16][16], u[16];
    for (int j = 0; j < 16; j++) { f32_store(t[j], x[j]); }
    for (int j = 0; j < 16; j++) {
        for (int i = 0; i < 16; i++) { u[i] = t[i][j]; }
        x[j] = f32_load(u);
    }
}

// as isa_avx2.h
static inline float32x4_t exp2_4(float32x4_t x0) {
    const float32x4_t x = vmaxq_f32(x0, vdupq_n_f32(-126.0f));
    const float32x4_t n = vrndnq_f32(x), r = vsubq_f32(x, n);
    float32x4_t y = vfmaq_f32(vdupq_n_f32(KVQ_EXP2_4), vdupq_n_f32(KVQ_EXP2_5), r);
    y = vfmaq_f32(vdupq_n_f32(KVQ_EXP2_3), y, r);
    y = vfmaq_f32(vdupq_n_f32(KVQ_EXP2_2), y, r);
    y = vfmaq_f32(vdupq_n_f32(KVQ_EXP2_1), y, r);
    y = vfmaq_f32(vdupq_n_f32(1.0f), y, r);
    const int32x4_t e = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    const uint32x4_t keep = vcgeq_f32(x0, vdupq_n_f32(-126.0f));
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(vmulq_f32(y, vreinterpretq_f32_s32(e))), keep));
}
static inline f32x16 f32_exp2(f32x16 a) {
    KVQ_EACH a.v[i] = exp2_4(a.v[i]);
    return a;
}

static inline i32x16 i32_zero() {
    i32x16 r;
    KVQ_EACH r.v[i] = vdupq_n_s32(0);
    return r;
}
static inline i32x16 i32_set1(int32_t x) {
    i32x16 r;
    KVQ_EACH r.v[i] = vdupq_n_s32(x);
    return r;
}
static inline i32x16 i32_add(i32x16 a, i32x16 b) {
    KVQ_EACH a.v[i] = vaddq_s32(a.v[i], b.v[i]);
    return a;
}
static inline i32x16 i32_sub(i32x16 a, i32x16 b) {
    KVQ_EACH a.v[i] = vsubq_s32(a.v[i], b.v[i]);
    return a;
}
static inline f32x16 f32_from_i32(i32x16 a) {
    f32x16 r;
    KVQ_EACH r.v[i] = vcvtq_f32_s32(a.v[i]);
    return r;
}
// p at whole indices
static inline i32x16 i32_gather(const int32_t * p, f32x16 index) {
    int32_t at[16];
    KVQ_EACH vst1q_s32(at + 4 * i, vcvtq_s32_f32(index.v[i]));
    for (int i = 0; i < 16; i++) { at[i] = p[at[i]]; }
    i32x16 r;
    KVQ_EACH r.v[i] = vld1q_s32(at + 4 * i);
    return r;
}
static inline f32x16 f32_gather(const float * p, i32x16 index) {
    int32_t at[16];
    float x[16];
    KVQ_EACH vst1q_s32(at + 4 * i, index.v[i]);
    for (int i = 0; i < 16; i++) { x[i] = p[at[i]]; }
    return f32_load(x);
}
// p at whole indices, below 16
static inline f32x16 f32_lookup16(const float * p, i32x16 index) { return f32_gather(p, index); }
// byte K of every lane
template <int K> static inline i32x16 i32_byte(i32x16 a) {
    i32x16 r;
    KVQ_EACH r.v[i] = vandq_s32(vshrq_n_s32(vshlq_n_s32(a.v[i], 24 - 8 * K), 24), vdupq_n_s32(255));
    return r;
}
static inline bool i32_any_negative(i32x16 a) {
    return vminvq_s32(vorrq_s32(vorrq_s32(a.v[0], a.v[1]), vorrq_s32(a.v[2], a.v[3]))) < 0;
}
// the lower and the upper int16 of every lane
static inline f32x16 f32_low_half(i32x16 a) {
    f32x16 r;
    KVQ_EACH r.v[i] = vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(a.v[i], 16), 16));
    return r;
}
static inline f32x16 f32_high_half(i32x16 a) {
    f32x16 r;
    KVQ_EACH r.v[i] = vcvtq_f32_s32(vshrq_n_s32(a.v[i], 16));
    return r;
}
static inline void i8_store(int8_t * p, f32x16 a) {
    int16x4_t h[4];
    KVQ_EACH h[i] = vqmovn_s32(vcvtnq_s32_f32(a.v[i]));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(vcombine_s16(h[0], h[1])), vqmovn_s16(vcombine_s16(h[2], h[3]))));
}

static inline void i8_store4(int8_t * p, f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    i8_store(p, a);
    i8_store(p + 16, b);
    i8_store(p + 32, c);
    i8_store(p + 48, d);
}

// round to nearest, 0 <= a <= 255
static inline void u8_store16(uint8_t * p, f32x16 a) {
    uint16x4_t h[4];
    KVQ_EACH h[i] = vqmovn_u32(vcvtnq_u32_f32(a.v[i]));
    vst1q_u8(p, vcombine_u8(vqmovn_u16(vcombine_u16(h[0], h[1])), vqmovn_u16(vcombine_u16(h[2], h[3]))));
}
static inline void u8_store64(uint8_t * p, f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    u8_store16(p, a);
    u8_store16(p + 16, b);
    u8_store16(p + 32, c);
    u8_store16(p + 48, d);
}

static inline u8x64 u8_load(const uint8_t * p) {
    u8x64 r;
    KVQ_EACH r.v[i] = vld1q_u8(p + 16 * i);
    return r;
}
static inline void u8_store(uint8_t * p, u8x64 a) { KVQ_EACH vst1q_u8(p + 16 * i, a.v[i]); }
static inline u8x64 u8_or(u8x64 a, u8x64 b) {
    KVQ_EACH a.v[i] = vorrq_u8(a.v[i], b.v[i]);
    return a;
}
static inline u8x64 u8_field(u8x64 a, int shift, int mask, int up) {
    const int8x16_t by = vdupq_n_s8((int8_t) (up - shift));
    const uint8x16_t m = vdupq_n_u8((uint8_t) (mask << up));
    KVQ_EACH a.v[i] = vandq_u8(vshlq_u8(a.v[i], by), m);
    return a;
}
static inline f32x16 f32_every_4th(const uint8_t * p) { // reads up to 3 beyond the 64 bytes
    f32x16 r;
    KVQ_EACH r.v[i] = vcvtq_f32_u32(vandq_u32(vreinterpretq_u32_u8(vld1q_u8(p + 16 * i)), vdupq_n_u32(0xff)));
    return r;
}
// twice the nibbles of 16 bytes of a and of b: of each a low, high, of each b low, high
static inline u8x64 u8_nibbles(const uint8_t * a, const uint8_t * b) {
    const uint8x16_t x = vld1q_u8(a), y = vld1q_u8(b), low = vdupq_n_u8(0x1e);
    const uint8x16x4_t each = { { vandq_u8(vshlq_n_u8(x, 1), low), vandq_u8(vshrq_n_u8(x, 3), low),
        vandq_u8(vshlq_n_u8(y, 1), low), vandq_u8(vshrq_n_u8(y, 3), low) } };
    uint8_t bytes[64];
    vst4q_u8(bytes, each);
    return u8_load(bytes);
}
template <int N> static inline u8x64 u8_lookup(u8x64 index, const uint8_t * table) {
    u8x64 r;
    KVQ_EACH r.v[i] = vqtbl1q_u8(vld1q_u8(table), index.v[i]);
    for (int k = 1; k < (N + 15) / 16; k++) { // out of range gives 0
        const uint8x16_t t = vld1q_u8(table + 16 * k), by = vdupq_n_u8((uint8_t) (16 * k));
        KVQ_EACH r.v[i] = vorrq_u8(r.v[i], vqtbl1q_u8(t, vsubq_u8(index.v[i], by)));
    }
    return r;
}
// byte k of every four
static inline f32x16 f32_from_byte(u8x64 a, int k) {
    f32x16 r;
    KVQ_EACH r.v[i] =
        vcvtq_f32_u32(vandq_u32(vshlq_u32(vreinterpretq_u32_u8(a.v[i]), vdupq_n_s32(-8 * k)), vdupq_n_u32(255)));
    return r;
}
static inline i8x4 i8_set4(const int8_t * w) {
    int32_t four;
    memcpy(&four, w, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
static inline i32x16 dot4(i32x16 acc, u8x64 codes, i8x4 w) {
    KVQ_EACH acc.v[i] = vdotq_s32(acc.v[i], vreinterpretq_s8_u8(codes.v[i]), w); // codes are below 128, or signed
    return acc;
}
static inline i16x4 i16_set4(const int16_t * w) {
    int64_t four;
    memcpy(&four, w, 8);
    return vreinterpretq_s16_s64(vdupq_n_s64(four));
}
static inline i16x4 i16_set2(const int16_t * w) {
    int32_t two;
    memcpy(&two, w, 4);
    return vreinterpretq_s16_s32(vdupq_n_s32(two));
}
static inline i32x16 dot2(i32x16 acc, u8x64 x, i16x4 w) {
    KVQ_EACH {
        const int16x8_t y = vreinterpretq_s16_u8(x.v[i]);
        acc.v[i] = vaddq_s32(acc.v[i], vpaddq_s32(vmull_s16(vget_low_s16(y), vget_low_s16(w)), vmull_high_s16(y, w)));
    }
    return acc;
}
static inline void i16_store_pairs(int16_t * p, f32x16 a, f32x16 b) {
    KVQ_EACH {
        const int32x2x2_t z = vzip_s32(vreinterpret_s32_s16(vqmovn_s32(vcvtnq_s32_f32(a.v[i]))),
            vreinterpret_s32_s16(vqmovn_s32(vcvtnq_s32_f32(b.v[i]))));
        vst1_s16(p + 8 * i, vreinterpret_s16_s32(z.val[0]));
        vst1_s16(p + 8 * i + 4, vreinterpret_s16_s32(z.val[1]));
    }
}
static inline void i16_store_sums(int16_t * p, f32x16 a) {
    KVQ_EACH {
        const int32x4_t x = vcvtnq_s32_f32(a.v[i]);
        const int32x2x2_t z = vzip_s32(vget_low_s32(x), vget_high_s32(x));
        vst1_s16(p + 4 * i, vqmovn_s32(vcombine_s32(z.val[0], z.val[1])));
    }
}
// lanes i and i ^ H change places
template <int H> static inline f32x16 f32_swap(f32x16 a) {
    f32x16 r;
    KVQ_EACH r.v[i] = H == 1 ? vrev64q_f32(a.v[i]) : H == 2 ? vextq_f32(a.v[i], a.v[i], 2) : a.v[i ^ H / 4];
    return r;
}
static inline f32x16 f32_reverse(f32x16 a) {
    f32x16 r;
    KVQ_EACH {
        const float32x4_t x = vrev64q_f32(a.v[3 - i]);
        r.v[i] = vextq_f32(x, x, 2);
    }
    return r;
}
static inline i32x16 dot4u(i32x16 acc, u8x64 codes, i8x4 w) {
    KVQ_EACH acc.v[i] =
        vreinterpretq_s32_u32(vdotq_u32(vreinterpretq_u32_s32(acc.v[i]), codes.v[i], vreinterpretq_u8_s8(w)));
    return acc;
}

#undef KVQ_EACH

} // namespace

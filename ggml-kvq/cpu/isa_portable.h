// Vector layer in plain C++: the definition of the others. 16 floats, 16 int32, 64 bytes.
#pragma once

#include "base/f16.h"

#include <cmath>
#include <cstdint>
#include <cstring>

namespace KVQ_NS {

struct f32x16 {
    float v[16];
};
struct i32x16 {
    int32_t v[16];
};
struct u8x64 {
    uint8_t v[64];
};
struct i8x4 {
    int8_t v[4];
};
struct i16x4 {
    int16_t v[4];
};

#define KVQ_UNROLL
constexpr int KVQ_R = 1;        // rows that share the registers
constexpr int KVQ_F16_ROWS = 1; // likewise, with four cells each
constexpr int KVQ_TILES = 1;    // tiles of 16 lanes likewise
constexpr int KVQ_SUMS = 1;     // sums of rows and tiles together
// what dot4 and dot4u take for a coordinate of 0: 128, or 0 where codes are signed
constexpr int KVQ_DOT4_ZERO = 128, KVQ_DOT4U_ZERO = 128;

#define KVQ_EACH(n) for (int i = 0; i < n; i++)

static inline f32x16 f32_set1(float x) {
    f32x16 r;
    KVQ_EACH(16) r.v[i] = x;
    return r;
}
static inline f32x16 f32_load(const float * p) {
    f32x16 r;
    KVQ_EACH(16) r.v[i] = p[i];
    return r;
}
static inline void f32_store(float * p, f32x16 a) { KVQ_EACH(16) p[i] = a.v[i]; }
static inline f32x16 f32_load_f16(const uint16_t * p) {
    f32x16 r;
    KVQ_EACH(16) r.v[i] = kvq_f16_to_f32(p[i]);
    return r;
}
static inline void f32_store_f16(uint16_t * p, f32x16 a) { KVQ_EACH(16) p[i] = kvq_f32_to_f16(a.v[i]); }
static inline f32x16 f32_load_u8(const uint8_t * p) {
    f32x16 r;
    KVQ_EACH(16) r.v[i] = (float) p[i];
    return r;
}
static inline f32x16 f32_add(f32x16 a, f32x16 b) {
    KVQ_EACH(16) a.v[i] += b.v[i];
    return a;
}
static inline f32x16 f32_sub(f32x16 a, f32x16 b) {
    KVQ_EACH(16) a.v[i] -= b.v[i];
    return a;
}
static inline f32x16 f32_mul(f32x16 a, f32x16 b) {
    KVQ_EACH(16) a.v[i] *= b.v[i];
    return a;
}
static inline f32x16 f32_load_i8(const int8_t * p) {
    f32x16 r;
    KVQ_EACH(16) r.v[i] = (float) p[i];
    return r;
}
static inline f32x16 f32_fma(f32x16 a, f32x16 b, f32x16 c) {
    KVQ_EACH(16) c.v[i] += a.v[i] * b.v[i];
    return c;
}
static inline f32x16 f32_max(f32x16 a, f32x16 b) {
    KVQ_EACH(16) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return a;
}
static inline f32x16 f32_min(f32x16 a, f32x16 b) {
    KVQ_EACH(16) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    return a;
}
static inline f32x16 f32_div(f32x16 a, f32x16 b) {
    KVQ_EACH(16) a.v[i] /= b.v[i];
    return a;
}
static inline f32x16 f32_floor(f32x16 a) {
    KVQ_EACH(16) a.v[i] = floorf(a.v[i]);
    return a;
}
// to the nearest integer
static inline f32x16 f32_round(f32x16 a) {
    KVQ_EACH(16) a.v[i] = rintf(a.v[i]);
    return a;
}
// a where |a| <= top, else 0
static inline f32x16 f32_within(f32x16 a, float top) {
    KVQ_EACH(16) a.v[i] = fabsf(a.v[i]) <= top ? a.v[i] : 0.0f;
    return a;
}
// max(|a|, |b|)
static inline f32x16 f32_absmax(f32x16 a, f32x16 b) {
    KVQ_EACH(16) a.v[i] = fabsf(a.v[i]) > fabsf(b.v[i]) ? fabsf(a.v[i]) : fabsf(b.v[i]);
    return a;
}
static inline f32x16 f32_exp2(f32x16 a) {
    KVQ_EACH(16) a.v[i] = exp2f(a.v[i]);
    return a;
}
static inline float f32_sum(f32x16 a) {
    float s = 0;
    KVQ_EACH(16) s += a.v[i];
    return s;
}
static inline float f32_hmax(f32x16 a) {
    float m = a.v[0];
    KVQ_EACH(16) m = a.v[i] > m ? a.v[i] : m;
    return m;
}
// where x < least: least = x, at = i
static inline void f32_keep_less(f32x16 & least, f32x16 & at, f32x16 x, f32x16 j) {
    KVQ_EACH(16) {
        const bool less = x.v[i] < least.v[i];
        least.v[i] = less ? x.v[i] : least.v[i];
        at.v[i] = less ? j.v[i] : at.v[i];
    }
}
// the largest value in every lane
static inline f32x16 f32_max_all(f32x16 a) { return f32_set1(f32_hmax(a)); }
static inline float f32_first(f32x16 a) { return a.v[0]; }

// sums (maxima) of four registers
static inline void f32_sum4(float * p, f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    p[0] = f32_sum(a);
    p[1] = f32_sum(b);
    p[2] = f32_sum(c);
    p[3] = f32_sum(d);
}
static inline void f32_hmax4(float * p, f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    p[0] = f32_hmax(a);
    p[1] = f32_hmax(b);
    p[2] = f32_hmax(c);
    p[3] = f32_hmax(d);
}
// 16 rows of 16
static inline void f32_transpose(f32x16 * x) {
    KVQ_EACH(16) {
        for (int j = 0; j < i; j++) {
            const float t = x[i].v[j];
            x[i].v[j] = x[j].v[i];
            x[j].v[i] = t;
        }
    }
}

static inline i32x16 i32_zero() { return i32x16{}; }
static inline i32x16 i32_set1(int32_t x) {
    i32x16 r;
    KVQ_EACH(16) r.v[i] = x;
    return r;
}
static inline i32x16 i32_add(i32x16 a, i32x16 b) {
    KVQ_EACH(16) a.v[i] += b.v[i];
    return a;
}
static inline i32x16 i32_sub(i32x16 a, i32x16 b) {
    KVQ_EACH(16) a.v[i] -= b.v[i];
    return a;
}
static inline f32x16 f32_from_i32(i32x16 a) {
    f32x16 r;
    KVQ_EACH(16) r.v[i] = (float) a.v[i];
    return r;
}
// p at whole indices
static inline i32x16 i32_gather(const int32_t * p, f32x16 index) {
    i32x16 r;
    KVQ_EACH(16) r.v[i] = p[(int) index.v[i]];
    return r;
}
static inline f32x16 f32_gather(const float * p, i32x16 index) {
    f32x16 r;
    KVQ_EACH(16) r.v[i] = p[index.v[i]];
    return r;
}
// p at whole indices, below 16
static inline f32x16 f32_lookup16(const float * p, i32x16 index) { return f32_gather(p, index); }
// byte K of every lane
template <int K> static inline i32x16 i32_byte(i32x16 a) {
    i32x16 r;
    KVQ_EACH(16) r.v[i] = a.v[i] >> 8 * K & 255;
    return r;
}
static inline bool i32_any_negative(i32x16 a) {
    int32_t all = 0;
    KVQ_EACH(16) all |= a.v[i];
    return all < 0;
}
// the lower and the upper int16 of every lane
static inline f32x16 f32_low_half(i32x16 a) {
    f32x16 r;
    KVQ_EACH(16) r.v[i] = (float) (int16_t) a.v[i];
    return r;
}
static inline f32x16 f32_high_half(i32x16 a) {
    f32x16 r;
    KVQ_EACH(16) r.v[i] = (float) (a.v[i] >> 16);
    return r;
}
// round to nearest, |a| <= 127
static inline void i8_store(int8_t * p, f32x16 a) { KVQ_EACH(16) p[i] = (int8_t) lrintf(a.v[i]); }
static inline void i8_store4(int8_t * p, f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    i8_store(p, a);
    i8_store(p + 16, b);
    i8_store(p + 32, c);
    i8_store(p + 48, d);
}

// round to nearest, 0 <= a <= 255
static inline void u8_store16(uint8_t * p, f32x16 a) { KVQ_EACH(16) p[i] = (uint8_t) lrintf(a.v[i]); }
static inline void u8_store64(uint8_t * p, f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    u8_store16(p, a);
    u8_store16(p + 16, b);
    u8_store16(p + 32, c);
    u8_store16(p + 48, d);
}
static inline u8x64 u8_load(const uint8_t * p) {
    u8x64 r;
    KVQ_EACH(64) r.v[i] = p[i];
    return r;
}
static inline void u8_store(uint8_t * p, u8x64 a) { KVQ_EACH(64) p[i] = a.v[i]; }
static inline u8x64 u8_or(u8x64 a, u8x64 b) {
    KVQ_EACH(64) a.v[i] |= b.v[i];
    return a;
}
// (a >> shift & mask) << up
static inline u8x64 u8_field(u8x64 a, int shift, int mask, int up) {
    KVQ_EACH(64) a.v[i] = (uint8_t) ((a.v[i] >> shift & mask) << up);
    return a;
}
static inline f32x16 f32_every_4th(const uint8_t * p) {
    f32x16 r;
    KVQ_EACH(16) r.v[i] = (float) p[4 * i];
    return r;
}
// table[index], index < N
// twice the nibbles of 16 bytes of a and of b: of each a low, high, of each b low, high
static inline u8x64 u8_nibbles(const uint8_t * a, const uint8_t * b) {
    u8x64 r;
    KVQ_EACH(64) r.v[i] = (uint8_t) (((i & 2 ? b : a)[i / 4] >> (i & 1 ? 4 : 0) & 15) << 1);
    return r;
}
template <int N> static inline u8x64 u8_lookup(u8x64 index, const uint8_t * table) {
    KVQ_EACH(64) index.v[i] = table[index.v[i]];
    return index;
}
// byte k of every four
static inline f32x16 f32_from_byte(u8x64 a, int k) {
    f32x16 r;
    KVQ_EACH(16) r.v[i] = (float) a.v[4 * i + k];
    return r;
}
static inline i8x4 i8_set4(const int8_t * w) {
    i8x4 r;
    KVQ_EACH(4) r.v[i] = w[i];
    return r;
}
// acc[i] += sum_k codes[4*i + k] * w[k]
static inline i32x16 dot4(i32x16 acc, u8x64 codes, i8x4 w) {
    KVQ_EACH(16)
    acc.v[i] += codes.v[4 * i] * w.v[0] + codes.v[4 * i + 1] * w.v[1] + codes.v[4 * i + 2] * w.v[2] +
        codes.v[4 * i + 3] * w.v[3];
    return acc;
}

// likewise with unsigned weights; codes are below 64 where they are unsigned elsewhere
static inline i32x16 dot4u(i32x16 acc, u8x64 codes, i8x4 w) {
    KVQ_EACH(16) {
        for (int k = 0; k < 4; k++) { acc.v[i] += codes.v[4 * i + k] * (uint8_t) w.v[k]; }
    }
    return acc;
}

static inline i16x4 i16_set4(const int16_t * w) {
    i16x4 r;
    KVQ_EACH(4) r.v[i] = w[i];
    return r;
}
static inline i16x4 i16_set2(const int16_t * w) {
    i16x4 r;
    KVQ_EACH(4) r.v[i] = w[i % 2];
    return r;
}
// acc[i] += x[2i]*w[0] + x[2i + 1]*w[1] in 16 bits; odd i: w[2] and w[3]
static inline i32x16 dot2(i32x16 acc, u8x64 x, i16x4 w) {
    int16_t y[32];
    memcpy(y, x.v, 64);
    KVQ_EACH(16) acc.v[i] += y[2 * i] * w.v[i % 2 * 2] + y[2 * i + 1] * w.v[i % 2 * 2 + 1];
    return acc;
}
// a[0], a[1], b[0], b[1], a[2], ...
static inline void i16_store_pairs(int16_t * p, f32x16 a, f32x16 b) {
    KVQ_EACH(16) {
        p[i / 2 * 4 + i % 2] = (int16_t) lrintf(a.v[i]);
        p[i / 2 * 4 + 2 + i % 2] = (int16_t) lrintf(b.v[i]);
    }
}
// the second and the third of every four change places
static inline void i16_store_sums(int16_t * p, f32x16 a) {
    KVQ_EACH(16) p[i / 4 * 4 + i % 2 * 2 + i / 2 % 2] = (int16_t) lrintf(a.v[i]);
}
// lanes i and i ^ H change places
template <int H> static inline f32x16 f32_swap(f32x16 a) {
    f32x16 r;
    KVQ_EACH(16) r.v[i] = a.v[i ^ H];
    return r;
}
static inline f32x16 f32_reverse(f32x16 a) {
    f32x16 r;
    KVQ_EACH(16) r.v[i] = a.v[15 - i];
    return r;
}

#undef KVQ_EACH

} // namespace

// f16 numbers of CUDA on the host, every operation rounded once (cuda_runtime.h).
#pragma once

#include "cuda_runtime.h"

struct __half {
    uint16_t bits;
};
struct __half2 {
    __half x, y;
};

float host_half_to_float(uint16_t h);
uint16_t host_float_to_half(float x);

static inline float __half2float(__half h) { return host_half_to_float(h.bits); }
static inline __half __float2half_rn(float x) { return { host_float_to_half(x) }; }
static inline __half __ushort_as_half(uint16_t x) { return { x }; }
static inline uint16_t __half_as_ushort(__half h) { return h.bits; }
static inline __half2 __half2half2(__half h) { return { h, h }; }
static inline __half2 __floats2half2_rn(float x, float y) { return { __float2half_rn(x), __float2half_rn(y) }; }
static inline __half2 __float2half2_rn(float x) { return __floats2half2_rn(x, x); }
static inline float2 __half22float2(__half2 h) { return { __half2float(h.x), __half2float(h.y) }; }
static inline __half2 __hmul2(__half2 a, __half2 b) {
    return __floats2half2_rn(__half2float(a.x) * __half2float(b.x), __half2float(a.y) * __half2float(b.y));
}
static inline __half2 __hsub2(__half2 a, __half2 b) {
    return __floats2half2_rn(__half2float(a.x) - __half2float(b.x), __half2float(a.y) - __half2float(b.y));
}
static inline __half host_fma(__half a, __half b, __half c) {
    return __float2half_rn((float) ((double) __half2float(a) * __half2float(b) + __half2float(c)));
}
static inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return { host_fma(a.x, b.x, c.x), host_fma(a.y, b.y, c.y) };
}
static inline float __low2float(__half2 x) { return __half2float(x.x); }
static inline float __high2float(__half2 x) { return __half2float(x.y); }
static inline __half host_max(__half a, __half b) { return __half2float(a) >= __half2float(b) ? a : b; }
static inline __half2 __hmax2(__half2 a, __half2 b) { return { host_max(a.x, b.x), host_max(a.y, b.y) }; }
static inline __half host_min(__half a, __half b) { return __half2float(a) <= __half2float(b) ? a : b; }
static inline __half2 __hmin2(__half2 a, __half2 b) { return { host_min(a.x, b.x), host_min(a.y, b.y) }; }
static inline __half2 __habs2(__half2 x) {
    return { { (uint16_t) (x.x.bits & 0x7fff) }, { (uint16_t) (x.y.bits & 0x7fff) } };
}

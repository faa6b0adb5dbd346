// IEEE half <-> float, portable and exact (round to nearest even). Kernels use the ISA's own conversion.
#pragma once

#include <cstdint>
#include <cstring>

static inline float kvq_f16_to_f32(uint16_t h) {
    const uint32_t sign = (uint32_t) (h & 0x8000) << 16;
    const uint32_t mag = h & 0x7fff;
    uint32_t bits;
    float f;
    if (mag >= 0x7c00) { // inf, nan
        bits = sign | 0x7f800000u | (mag & 0x3ff) << 13;
    } else if (mag >= 0x0400) {
        bits = sign | ((mag << 13) + 0x38000000u);
    } else { // subnormal: mag * 2^-24
        f = (float) mag * 0x1p-24f;
        return sign ? -f : f;
    }
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint16_t kvq_f32_to_f16(float f) {
    uint32_t x;
    memcpy(&x, &f, 4);
    const uint32_t sign = (x >> 16) & 0x8000;
    x &= 0x7fffffff;
    if (x > 0x7f800000) {
        return (uint16_t) (sign | 0x7e00); // nan
    }
    if (x >= 0x47800000) {
        return (uint16_t) (sign | 0x7c00); // >= 65536 and inf
    }
    if (x < 0x38800000) {                       // below 2^-14: let the float adder round at 2^-24
        const uint32_t magic_bits = 0x3f000000; // 0.5f has 2^-24 as its last place
        float mag, magic;
        memcpy(&mag, &x, 4);
        memcpy(&magic, &magic_bits, 4);
        mag += magic;
        uint32_t r;
        memcpy(&r, &mag, 4);
        return (uint16_t) (sign | (r - magic_bits));
    }
    const uint32_t odd = (x >> 13) & 1;
    x += 0xc8000fffu + odd; // rebias the exponent by -112 and round to nearest even
    return (uint16_t) (sign | (x >> 13));
}

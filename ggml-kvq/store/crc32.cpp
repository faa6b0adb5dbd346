// CRC-32 as zlib has it, over 8 bytes at a time by tables, or over 64 by products without carries where the processor
// has them (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009).
#include "state_blocks.h"

#include "base/parallel.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr uint32_t POLYNOMIAL = 0xedb88320; // reflected

using tables_t = std::array<std::array<uint32_t, 256>, 8>; // [n]: a byte with n zero bytes behind it

const tables_t & tables() {
    static const tables_t t = [] {
        tables_t x;
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int j = 0; j < 8; j++) { c = c >> 1 ^ (c & 1 ? POLYNOMIAL : 0); }
            x[0][i] = c;
        }
        for (uint32_t i = 0; i < 256; i++) {
            for (size_t n = 1; n < 8; n++) { x[n][i] = x[n - 1][i] >> 8 ^ x[0][x[n - 1][i] & 255]; }
        }
        return x;
    }();
    return t;
}

uint32_t by_tables(uint32_t crc, const uint8_t * p, size_t nb) {
    const tables_t & t = tables();
    for (; nb >= 8; p += 8, nb -= 8) {
        uint64_t x;
        memcpy(&x, p, 8);
        x ^= crc;
        crc = 0;
        for (size_t i = 0; i < 8; i++) { crc ^= t[7 - i][x >> 8 * i & 255]; }
    }
    for (; nb; p++, nb--) { crc = crc >> 8 ^ t[0][(crc ^ *p) & 255]; }
    return crc;
}

#if defined(__x86_64__)
#define KVQ_PCLMUL __attribute__((target("pclmul,sse2")))

// x^(distance + 64), x^distance modulo the polynomial, for a distance of 512 - 32 and of 128 - 32 bits, reflected
KVQ_PCLMUL inline __m128i fold(__m128i x, __m128i by, __m128i y) {
    const __m128i lo = _mm_clmulepi64_si128(x, by, 0x00), hi = _mm_clmulepi64_si128(x, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(lo, hi), y);
}

KVQ_PCLMUL inline __m128i load(const uint8_t * p) { return _mm_loadu_si128((const __m128i *) p); }

KVQ_PCLMUL uint32_t by_products(uint32_t crc, const uint8_t * p, size_t nb) {
    const __m128i by4 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by1 = _mm_set_epi64x(0xccaa009e, 0x1751997d0);
    __m128i x[4] = { load(p), load(p + 16), load(p + 32), load(p + 48) };
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int) crc));
    for (p += 64, nb -= 64; nb >= 64; p += 64, nb -= 64) {
        for (size_t i = 0; i < 4; i++) { x[i] = fold(x[i], by4, load(p + 16 * i)); }
    }
    __m128i all = fold(fold(fold(x[0], by1, x[1]), by1, x[2]), by1, x[3]);
    for (; nb >= 16; p += 16, nb -= 16) { all = fold(all, by1, load(p)); }
    uint8_t left[16];
    _mm_storeu_si128((__m128i *) left, all);
    return by_tables(by_tables(0, left, 16), p, nb);
}

bool has_products() {
    static const bool has = __builtin_cpu_supports("pclmul");
    return has;
}
#else
uint32_t by_products(uint32_t crc, const uint8_t * p, size_t nb) { return by_tables(crc, p, nb); }
bool has_products() { return false; }
#endif

// a b modulo the polynomial, reflected: the highest bit is x^0
uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t y = 0;
    for (; a; a <<= 1) {
        y ^= a >> 31 ? b : 0;
        b = b >> 1 ^ (b & 1 ? POLYNOMIAL : 0);
    }
    return y;
}

// x^(8 nb): what `nb` zero bytes behind a text multiply its sum by
uint32_t behind(size_t nb) {
    uint32_t y = 1u << 31, by = 1u << 23; // 1, x^8
    for (; nb; nb >>= 1, by = multiply(by, by)) { y = nb & 1 ? multiply(y, by) : y; }
    return y;
}

} // namespace

uint32_t kvq_crc32_parts(const void * data, size_t nb, int n_threads) {
    constexpr size_t PART = 1 << 20;
    const size_t n = (nb + PART - 1) / PART;
    std::vector<uint32_t> sums(n);
    const auto nb_of = [&](size_t i) { return std::min(PART, nb - i * PART); };
    kvq_parallel_for((int64_t) n, n_threads, [&](int64_t i) {
        sums[(size_t) i] = kvq_crc32(0, (const uint8_t *) data + i * (int64_t) PART, nb_of((size_t) i));
    });
    uint32_t sum = 0;
    for (size_t i = 0; i < n; i++) { sum = multiply(behind(nb_of(i)), sum) ^ sums[i]; }
    return sum;
}

uint32_t kvq_crc32(uint32_t crc, const void * data, size_t nb) {
    const uint8_t * p = (const uint8_t *) data;
    return ~(nb >= 64 && has_products() ? by_products(~crc, p, nb) : by_tables(~crc, p, nb));
}

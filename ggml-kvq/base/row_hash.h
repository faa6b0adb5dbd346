// The hash of a row in saved states (store/mark.h): 8 bytes at a time, h = mix(h ^ bytes) + a constant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

constexpr uint64_t KVQ_HASH_MUL = 0xd6e8feb86659fd93u, KVQ_HASH_ADD = 0x9e3779b97f4a7c15u;
constexpr uint64_t KVQ_HASH_ROW = 0x51ab; // where the hash of a row begins

static inline uint64_t kvq_hash_mix(uint64_t h) {
    h ^= h >> 32;
    h *= KVQ_HASH_MUL;
    h ^= h >> 32;
    return h;
}

static inline uint64_t kvq_hash_bytes(const void * data, size_t nb, uint64_t h) {
    const uint8_t * p = (const uint8_t *) data;
    for (size_t i = 0; i < nb; i += 8) {
        uint64_t x = 0;
        memcpy(&x, p + i, nb - i < 8 ? nb - i : 8);
        h = kvq_hash_mix(h ^ x) + KVQ_HASH_ADD;
    }
    return h;
}

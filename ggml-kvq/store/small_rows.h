// Rows of a saved state in fewer bits than f16 has, where a declared cache type leaves no room for more.
//
//   row       for each group of 64 channels, the last may have fewer: f16 scale, then codes of `bits` bits, the first
//             channel in the lowest bits
//   value     scale * (code + 0.5 - 2^(bits-1)), then turned by a Hadamard matrix of the group's channels
//   lone row  u16 sum, i32 position where rows carry one (engine/tags.h), row: as many bits as the declared size takes.
//             It stands by itself; the sum tells it from rows that others have written.
#pragma once

#include <cstddef>
#include <cstdint>

constexpr int KVQ_SMALL_LEAST = 2, KVQ_SMALL_MOST = 12; // bits

size_t kvq_small_nb(int width, int bits);
void kvq_small_put(const uint16_t * row, int width, int bits, uint8_t * out);
void kvq_small_get(const uint8_t * in, int width, int bits, uint16_t * row);

// Of lone rows of `nb` bytes: bits of a code, 0: there is no room for two. seed: which tensor the row is of.
int kvq_lone_bits(int width, size_t nb, bool has_position);
void kvq_lone_put(const uint16_t * row, int width, size_t nb, const int32_t * pos, uint32_t seed, uint8_t * out);
// false: it is no lone row of that tensor, or it is damaged. pos: NULL, rows carry no position
bool kvq_lone_get(const uint8_t * in, int width, size_t nb, int32_t * pos, uint32_t seed, uint16_t * row);

// Positions that open rows of un-rotated keys carry (policy/transform.h), so that a page knows them when it seals, also
// after a saved state was loaded into other cells: in the last mantissa bits of a row's first 64 channels, 32 bits of
// position and 32 bits of check.
#pragma once

#include "layout.h"

// Row of n_head heads, head h at row + h*head_stride; -1: the row carries no position.
int32_t kvq_tag_get(const kvq_lane_layout & l, const uint16_t * row, size_t head_stride);
void kvq_tag_put(const kvq_lane_layout & l, uint16_t * row, size_t head_stride, int32_t pos);

// The 64 bits themselves.
uint64_t kvq_tag_bits(const kvq_lane_layout & l, const uint16_t * row, size_t head_stride);
void kvq_tag_put_bits(const kvq_lane_layout & l, uint16_t * row, size_t head_stride, uint64_t bits);

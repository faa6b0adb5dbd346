// Positions that rows carry.
//
// Open rows stay as they came, but a lane of un-rotated keys must know each row's position when it seals, also after
// a saved state was loaded into other cells. So every open row carries its position in the last mantissa bits of its
// first 64 channels: 32 bits of position, 32 bits of check. Saved images carry them in the same place. A number that
// stands for four positions (engine/rope.h) means something to its rotor alone: rows that leave the cache carry the
// positions themselves, 41 bits, with 22 bits of check.
#pragma once

#include "engine/layout.h"
#include "engine/rope.h"

// Position in a row of n_head heads, head h at row + h*head_stride; -1: the row carries none.
int32_t kvq_tag_get(const kvq_lane_layout & l, const uint16_t * row, size_t head_stride);
void kvq_tag_put(const kvq_lane_layout & l, uint16_t * row, size_t head_stride, int32_t pos);

// Rows [n][n_head*head_size] on their way out of the cache, and in. Positions that do not fit leave as 0: such a row
// is encoded anew where it enters, as it comes.
void kvq_tags_leave(const kvq_lane_layout & l, const kvq_rotor & rotor, uint16_t * rows, int n);
void kvq_tags_enter(const kvq_lane_layout & l, kvq_rotor & rotor, uint16_t * rows, int n);

// Positions when sealed in a saved page: as they are now, without which a number of this rotor's cannot be saved.
constexpr int32_t KVQ_SEALED_HERE = -2;

// Positions that rows of a saved state carry, where open rows carry them (engine/tags.h). A number that stands for
// four positions (engine/rope.h) means something to its rotor alone: rows that leave the cache carry the positions
// themselves, 41 bits, with 22 bits of check.
#pragma once

#include "engine/rope.h"
#include "engine/tags.h"

// Rows [n][n_head*head_size] on their way out of the cache, and in. Positions that do not fit leave as 0: such a row
// is encoded anew where it enters, as it comes.
void kvq_tags_leave(const kvq_lane_layout & l, const kvq_rotor & rotor, uint16_t * rows, int n);
void kvq_tags_enter(const kvq_lane_layout & l, kvq_rotor & rotor, uint16_t * rows, int n);

// Positions when sealed in a saved page: as they are now, without which a number of this rotor's cannot be saved.
constexpr int32_t KVQ_SEALED_HERE = -2;

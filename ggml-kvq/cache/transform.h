// What sealed pages of a lane leave out (aqua): a mean per channel and, for keys, the rotary embedding, or what it
// became since.
//   row = R_pos (decoded + prediction + mean)                 keys that are predicted
//   row = R_(pos - sealed) decoded + R_pos mean               other keys: they are sealed as they are, less R_sealed
//       mean
//
// The second way needs no turning while it is read: the query meets decoded keys as it is, or turned back by the
// distance by which they moved since; its products with the mean are cheap (cpu/turns.h). Either way a context shift
// changes positions only.
//
// Open rows stay as they came, but a lane of un-rotated keys must know each row's position when it seals, also after
// a saved state was loaded into other cells. So every open row carries its position in the last mantissa bits of its
// first 64 channels: 32 bits of position, 32 bits of check. Saved images carry them in the same place. A number that
// stands for four positions (cpu/rope.h) means something to its rotor alone: rows that leave the cache carry the
// positions themselves, 41 bits, with 22 bits of check.
#pragma once

#include "layout.h"
#include "../cpu/rope.h"

#include <vector>

constexpr int KVQ_TAG_CHANNELS = 64;

class kvq_chain;

struct kvq_transform {
    const float * mean = nullptr; // [n_head][head_size]
    kvq_rotor * rotor = nullptr;  // keys lose their rotary embedding
    // of sealed cells, [n_stream][n_pages*page_cells], shared by the layers of a cache
    int32_t * positions = nullptr;
    int32_t * sealed = nullptr;                                  // when they were sealed, likewise
    int32_t *positions_there = nullptr, *sealed_there = nullptr; // the same where a device reads them
    // pages of a device whose positions differ from `sealed`, [n_stream][n_pages]; of open ones it says nothing
    uint8_t * apart = nullptr;
    // layers that hold the page sealed, [n_stream][n_pages]: while there are any, `sealed` stays
    uint16_t * users = nullptr;
    kvq_chain * chain = nullptr; // and what is predicted from the layer before (chain.h); ordinal: of this layer
    int ordinal = 0;
    bool active() const { return mean || rotor || chain; }
    bool keeps_turn() const { return rotor && !chain; } // sealed keys have the rotary embedding of `sealed`

    // f16 rows [page_cells] of head h in place, `stride` apart; pos [page_cells]; was [page_cells]: positions when
    // sealed, NULL: keys come without rotary embedding; pred: prediction of the head's rows, f32, or NULL
    void remove(const kvq_lane_layout & l, int h, const int32_t * pos, const int32_t * was, uint16_t * rows, int stride,
        const float * pred = nullptr, size_t pred_stride = 0) const;
    void restore(const kvq_lane_layout & l, int h, const int32_t * pos, const int32_t * was, uint16_t * rows,
        int stride, const float * pred = nullptr, size_t pred_stride = 0) const;
};

// Is one of n cells elsewhere than when it was sealed?
bool kvq_moved(int n, const int32_t * positions, const int32_t * sealed);

// Position in a row of n_head heads, head h at row + h*head_stride; -1: the row carries none.
int32_t kvq_tag_get(const kvq_lane_layout & l, const uint16_t * row, size_t head_stride);
void kvq_tag_put(const kvq_lane_layout & l, uint16_t * row, size_t head_stride, int32_t pos);

// Rows [n][n_head*head_size] on their way out of the cache, and in. Positions that do not fit leave as 0: such a row
// is encoded anew where it enters, as it comes.
void kvq_tags_leave(const kvq_lane_layout & l, const kvq_rotor & rotor, uint16_t * rows, int n);
void kvq_tags_enter(const kvq_lane_layout & l, kvq_rotor & rotor, uint16_t * rows, int n);

// Positions when sealed in a saved page: as they are now, without which a number of this rotor's cannot be saved.
constexpr int32_t KVQ_SEALED_HERE = -2;

// What sealed pages of a lane leave out (aqua): a mean per channel and, for keys, the rotary embedding.
//   row = R_pos (decoded + prediction + mean)
//
// Open rows stay as they came, but a lane of un-rotated keys must know each row's position when it seals, also after a saved state
// was loaded into other cells. So every open row carries its position in the last mantissa bits of its first 64 channels: 32 bits
// of position, 32 bits of check. Saved images carry them in the same place.
#pragma once

#include "layout.h"
#include "../cpu/rope.h"

#include <vector>

constexpr int KVQ_TAG_CHANNELS = 64;

class kvq_chain;

struct kvq_transform {
    const float * mean  = nullptr; // [n_head][head_size]
    kvq_rotor   * rotor = nullptr; // keys lose their rotary embedding
    int32_t     * positions = nullptr; // of sealed cells, [n_stream][n_pages*page_cells], shared by the layers of a cache
    kvq_chain   * chain = nullptr;     // and what is predicted from the layer before (chain.h); ordinal: of this layer
    int           ordinal = 0;
    bool active() const { return mean || rotor || chain; }

    // f16 rows [page_cells] of head h in place, `stride` apart; pos [page_cells]; pred: prediction of the head's rows, f32, or NULL
    void remove (const kvq_lane_layout & l, int h, const int32_t * pos, uint16_t * rows, int stride, const float * pred = nullptr, size_t pred_stride = 0) const;
    void restore(const kvq_lane_layout & l, int h, const int32_t * pos, uint16_t * rows, int stride, const float * pred = nullptr, size_t pred_stride = 0) const;
};

// Position in a row of n_head heads, head h at row + h*head_stride; -1: the row carries none.
int32_t kvq_tag_get(const kvq_lane_layout & l, const uint16_t * row, size_t head_stride);
void    kvq_tag_put(const kvq_lane_layout & l, uint16_t * row, size_t head_stride, int32_t pos);

// Rows of the second tier (kvq_far): each stands alone, so that one can be fetched without its neighbours.
//   KVQ_FAR_F16   f16 [channels padded to 16]: the row of an open tile, padding included
//   KVQ_FAR_Q8    i8 codes [channels padded to 32], then f16 scales, one for 32 channels    x = scale * code
//   KVQ_FAR_Q4    codes in 4 bits: of 32 channels, channel i in the low half of byte i and channel 16 + i in the high
//                 half, 0..15 standing for -8..7; then f16 scales as above
// The scale is the largest value over 127 (8 bits), or the value of largest magnitude over -8 (4 bits), as ggml's q8_0
// and q4_0 have it. A row is padded to 8 bytes with zeros.
#pragma once

#include "ggml-kvq.h"

constexpr int KVQ_FAR_BLOCK = 32; // channels that share a scale

// KVQ_FETCH_AHEAD: the first token of a call whose picks stay. Those of the tokens behind it stay as well, so that all
// of them have room; a call may hold tokens of several sequences, or drafted ones.
inline int kvq_far_first_kept(int n_q, int n_kept, int top) {
    const int n = top > 0 ? n_kept / top : 1;
    return n_q > n ? n_q - (n > 1 ? n : 1) : 0;
}

// One row. row: f16 [channels padded to 16]; of KVQ_FAR_Q8 and KVQ_FAR_Q4 the padding is written as zeros.
void kvq_far_put(int format, int head_size, const uint16_t * row, void * far);
void kvq_far_get(int format, int head_size, const void * far, uint16_t * row);

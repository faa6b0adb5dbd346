// Far rows that lie beside attention, where it has memory of its own (fetch=ahead, SpeCache section 3.3): room for
// twice as many rows as are picked, so that most of what the next step reads has come before. Of a stream and a layer:
//
//   slots   int32 [head kv][top]         where the row of a kept pick is (kvq_far::picks)
//   tags    int32 [head kv][2 * top]     cell + 1 of the row in each slot, 0: none
//   hands   int32 [head kv]              the slot that is given away next, if no pick is in it
//   bits    uint32 [head kv][n_words]    bit by bit the slots of the cache that are kept picks
//   rows    [head kv][2 * top][far row of a key, of a value]
//
// All but rows is zero where nothing is kept.
#pragma once

#include "base/constants.h"

#include <cstddef>

struct kvq_far_buffer {
    size_t slots = 0, tags, hands, bits, rows, size; // where each begins, bytes

    // n_words: 32 slots of the cache each; nb_row: of a key and a value, a multiple of 8
    kvq_far_buffer(int n_head, int top, int n_words, size_t nb_row) {
        const size_t n = (size_t) n_head, t = (size_t) top;
        tags = slots + 4 * n * t;
        hands = tags + 8 * n * t;
        bits = hands + 4 * n;
        rows = kvq_pad(bits + 4 * n * (size_t) n_words, KVQ_ALIGN);
        size = kvq_pad(rows + n * 2 * t * nb_row, KVQ_ALIGN);
    }
};

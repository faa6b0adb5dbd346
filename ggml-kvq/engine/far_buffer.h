// Far rows that lie beside attention, where it has memory of its own (fetch=ahead, SpeCache section 3.3), so that most
// of what the next step reads has come before. Of a stream and a layer:
//
//   slots   int32 [head kv][n_kept]      where the row of a kept cell (kvq_far::kept) is; behind the last cell, slots
//                                        without a row. Where no cell is kept, slot i is i, whatever is here.
//   bits    uint32 [head kv][n_words]    bit by bit the slots of the cache: kept cells
//   rows    [head kv][n_kept][far row of a key, of a value]
//
// Slots and bits are zero where no row is kept.
#pragma once

#include "base/constants.h"

#include <cstddef>

struct kvq_far_buffer {
    size_t slots = 0, bits, rows, size; // where each begins, bytes

    // n_words: 32 slots of the cache each; nb_row: of a key and a value, a multiple of 8
    kvq_far_buffer(int n_head, int n_kept, int n_words, size_t nb_row) {
        const size_t n = (size_t) n_head, k = (size_t) n_kept;
        bits = slots + 4 * n * k;
        rows = kvq_pad(bits + 4 * n * (size_t) n_words, KVQ_ALIGN);
        size = kvq_pad(rows + n * k * nb_row, KVQ_ALIGN);
    }
};

// Sizes that several folders agree on.
#pragma once

#include <cstddef>

constexpr size_t KVQ_ALIGN = 64;         // bytes: parts of a lane
constexpr size_t KVQ_ALIGN_BLOCK = 16;   // bytes: blocks of a pool, what a kernel loads at once
constexpr size_t KVQ_ALIGN_SLAB = 256;   // bytes: allocations of a device that lie in one piece
constexpr int KVQ_MAX_CELLS = 256;       // cells of a page
constexpr int KVQ_MAX_HEAD = 1024;       // channels of a head
constexpr int KVQ_TAG_CHANNELS = 64;     // of a row, that carry its position (engine/tags.h)
constexpr int KVQ_CHAIN_STRIPE = 32;     // pages of a predicted layer that are made readable together
constexpr size_t KVQ_RESTING_TILES = 64; // of one size, that are not taken again while a device may still write there
// A call of as many rows is a prompt; shorter ones are generated cells or drafts of them.
constexpr int KVQ_PROMPT_ROWS = 32;

static inline size_t kvq_pad(size_t n, size_t to) { return (n + to - 1) / to * to; }

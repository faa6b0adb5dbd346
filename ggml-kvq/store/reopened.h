// Rows of sealed pages that are written into again. A prompt that begins like the one before (a fixed system prompt
// in a server) is written behind that beginning, and the page where it ends is decoded, filled anew and sealed. The
// rows that stayed would be rounded again with every prompt, each time to the scales of other neighbours; after 40
// prompts they would be noise. So the rows that the first decoding gave are kept. They come back at the next decoding,
// unless they were written since. So a row is rounded twice, however many prompts there are.
#pragma once

#include "engine/layout.h"
#include "engine/space.h"

#include <cstdint>
#include <vector>

constexpr size_t KVQ_REOPENED_PAGES = 4; // of a lane: as many conversations as llama-server has slots

class kvq_reopened {
public:
    // Page p of stream s has been decoded to a frame: rows that are kept take their place there, and all valid ones
    // are kept from now on. valid: bit by bit the page's slots
    void opened(const kvq_lane_layout & l, kvq_space & space, int s, int p, const uint8_t * valid, uint16_t * frame);
    void wrote(int s, int p, const uint8_t * slots); // other rows now, bit by bit
    void forget(int s, int p);
    void forget_stream(int s);
    void clear() { pages.clear(); }

private:
    struct page {
        int s, p;
        std::vector<uint16_t> rows; // the frame, in the host's memory
        std::vector<uint8_t> slots; // those that are kept
    };
    std::vector<page> pages; // the one used last is the last one
};

// Room of one stream of a lane whose window fills what is left (window=auto). Blocks grow from the front, frames from
// the end:
//
//   | block 0 | block 1 | ...  blocks  ->|   free   |<-  frames ... | frame 1 | frame 0 |
//             n_extent blocks, some free         max_frames, as many as `beside` leaves
//
// The pool only counts places: kvq_lane moves the bytes (lane_pool.cpp). A place is a number; -1: no place.
#pragma once

#include "engine/layout.h"

#include <vector>

class kvq_pool {
public:
    explicit kvq_pool(const kvq_lane_layout & l);
    void clear();

    int n_blocks() const { return n_used; } // that hold a page
    int n_extent() const { return extent; } // up to the last of them
    int n_frames(int blocks) const;         // that fit beside so many blocks
    bool fits(int blocks, int frames) const { return frames <= n_frames(blocks); }
    int page_of_block(int i) const { return blocks[(size_t) i]; } // -1: free
    int page_of_frame(int j) const { return frames[(size_t) j]; }

    int free_block() const; // the first
    int free_frame() const; // the outermost beside the blocks, -1: all are in use
    // Frames at or behind n_frames(n_extent()) must be empty when this is done (kvq_lane::take_block sees to it).
    void put_block(int i, int page);
    void put_frame(int j, int page) { frames[(size_t) j] = page; }
    void drop_block(int i);
    void drop_frame(int j) { frames[(size_t) j] = -1; }

private:
    size_t nb_pool, nb_block, nb_frame;
    std::vector<int32_t> blocks, frames; // page
    int n_used = 0, extent = 0;
};

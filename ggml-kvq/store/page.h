// A page: `page_cells` neighbouring cells of one stream in one lane.
#pragma once

#include <cstdint>
#include <vector>

enum kvq_page_state : uint8_t { KVQ_PAGE_EMPTY = 0, KVQ_PAGE_OPEN = 1, KVQ_PAGE_SEALED = 2 };

struct kvq_page_info {
    uint64_t stamp;   // lane clock of the last write
    uint16_t * frame; // open tile, NULL when sealed or empty
    int32_t own;      // index of the lane's own frame, -1: frame is scratch
    uint16_t n_valid; // cells ever written
    uint8_t state;    // kvq_page_state
};

// A sealed page by itself. codes: empty where they are another lane's; pos, was: positions now and when sealed, where
// a policy keeps them (policy/transform.h). beside: bytes of another lane's page that it is read with
// (kvq_lane_layout::nb_beside).
struct kvq_page_image {
    std::vector<uint8_t> codes, params, beside;
    std::vector<int32_t> pos, was;
};

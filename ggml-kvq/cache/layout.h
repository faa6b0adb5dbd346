// Bytes of a lane: the keys, or the values, of one layer. Everything that is allocated is counted here, so that the
// size reported before allocation, the load line and kv_stats are one number.
//
//   codes   [stream][page][head][nb_codes]     absent when the previous layer's codes are adopted
//   params  [stream][page][head][nb_params]
//   window  [stream][frame] open pages, f16 tiles [head][cell][head size padded to 16]
//   tables  page states, valid bits and spans
//   chain   reconstructed rows of one layer and tiles of a stripe (chain.h), counted in the first layer
#pragma once

#include "../methods/method.h"

#include <cstddef>
#include <cstdint>

constexpr size_t KVQ_ALIGN = 64;

static inline size_t kvq_pad(size_t n, size_t to) { return (n + to - 1) / to * to; }

struct kvq_page_info {
    uint64_t stamp;   // lane clock of the last write
    uint16_t * frame; // open tile, NULL when sealed or empty
    int32_t own;      // index of the lane's own frame, -1: frame is scratch
    uint16_t n_valid; // cells ever written
    uint8_t state;    // kvq_page_state
};

struct kvq_lane_layout {
    kvq_codec codec = {};
    bool shares_codes = false;
    int n_head = 0, n_cells = 0, n_stream = 0;
    int page_cells = 0, n_pages = 0; // pages per stream
    // pages per stream that can be sealed at once: n_pages, fewer when cells are evicted or blocks move
    int n_store = 0;
    bool evicts = false;  // sealed cells are kept in slots
    bool moves = false;   // a page takes a stored block when it seals: pages in frames need none
    int window = 0;       // rows that stay open, a multiple of page_cells
    int n_sink_pages = 0; // leading pages that never seal
    int n_frames = 0;     // own open frames per stream
    size_t nb_codes = 0, nb_params = 0, nb_tile_head = 0, nb_frame = 0;
    size_t bytes_codes = 0, bytes_params = 0, bytes_window = 0, bytes_tables = 0, bytes_calibration = 0,
           bytes_chain = 0;
    uint64_t predict_macs = 0; // multiply-adds a cell costs each time it is read

    int head_stride() const { return (int) kvq_pad((size_t) codec.head_size, 16); } // channels of a tile row
    bool is_f16() const { return codec.type == KVQ_TYPE_F16; }
    size_t bytes() const {
        return bytes_codes + bytes_params + bytes_window + bytes_tables + bytes_calibration + bytes_chain;
    }
};

kvq_lane_layout kvq_make_lane_layout(const kvq_layer_plan & plan, bool value, int n_head, int n_cells, int n_stream);

// Sums lanes up to a kvq_stats: the one place where true bits are computed.
struct kvq_accounting {
    kvq_stats s = {};
    void add(const kvq_lane_layout & l, bool value);
    void finish();

private:
    double values[2] = {}, bytes[2] = {}, code_bits = 0;
};

// Bytes of a lane: the keys, or the values, of one layer. Everything that is allocated is counted here, so that the
// size reported before allocation, the load line and kv_stats are one number.
//
//   codes   [stream][page][head][nb_codes]     absent when the previous layer's codes are adopted
//   params  [stream][page][head][nb_params]
//   window  [stream][frame] open pages, f16 tiles [head][cell][head size padded to 16]
// Where a window fills what is left (window=auto), these three are one pool for each stream (store/pool.h): blocks
// [head][nb_codes], then [head][nb_params], from its front, frames from its end. Its bytes are the sum of the three.
//   tables  page states, valid bits and spans
//   chain   reconstructed rows of one layer and tiles of a stripe (policy/chain.h), counted in the first layer
#pragma once

#include "base/constants.h"
#include "ggml-kvq.h"

#include <cstddef>
#include <cstdint>

enum class kvq_far_place { NONE, HOST, DEVICE, FILE }; // of a second tier

struct kvq_lane_layout {
    kvq_codec codec = {};
    bool shares_codes = false;
    bool turned = false;  // sealed keys lack their rotary embedding, or what it became since (policy/transform.h)
    bool centred = false; // sealed pages lack a calibrated mean
    bool sorted = false;  // keys of sealed pages are in another order (kvq_order)
    bool chained = false; // sealed pages are read through the layers before (policy/chain.h)
    int n_head = 0, n_cells = 0, n_stream = 0;
    int page_cells = 0, n_pages = 0; // pages per stream
    // pages per stream that can be sealed at once: n_pages, fewer when cells are evicted or blocks move
    int n_store = 0;
    bool evicts = false;  // sealed cells are kept in slots
    bool moves = false;   // a page takes a stored block when it seals; a page in a frame needs no block
    bool pooled = false;  // blocks and frames share a pool
    bool on_host = false; // blocks lie in the host's memory
    bool copies = false;  // sealed pages are tiles of f16 rows that attention reads as open ones (policy/lab.h)
    int window = 0;       // rows that stay open, a multiple of page_cells
    int n_sink_pages = 0; // leading pages that never seal
    int n_frames = 0;     // own open frames per stream; at least, when pooled
    size_t nb_codes = 0, nb_params = 0, nb_tile_head = 0, nb_frame = 0;
    size_t nb_beside = 0; // of a saved block: bytes of another lane's page that it is read with (policy/coords.h)
    size_t nb_pool = 0, nb_block = 0, nb_block_codes = 0; // pooled: of a stream; of a block; where its params begin
    size_t bytes_codes = 0, bytes_params = 0, bytes_window = 0, bytes_tables = 0, bytes_calibration = 0,
           bytes_chain = 0;
    size_t bytes_far = 0; // of a second tier, not in bytes()
    kvq_far_place far_place = kvq_far_place::NONE;
    size_t bytes_ahead = 0;    // of buffers for far rows (far_buffer.h), where attention does not compute on the host
    uint64_t predict_macs = 0; // multiply-adds a cell costs each time it is read

    int head_stride() const { return (int) kvq_pad((size_t) codec.head_size, 16); } // channels of a tile row
    // cells of a stream that stay open together while nothing is sealed, as far as the window fills
    int n_exact() const {
        const int n = nb_pool ? (int) (nb_pool / nb_frame) : n_frames;
        return n >= n_pages ? n_cells : (n - pooled) * page_cells; // one frame is kept free (kvq_lane::due_pages)
    }
    bool is_f16() const { return codec.type == KVQ_TYPE_F16 && !copies; }             // no page ever seals
    size_t bytes_on_host() const { return on_host ? bytes_codes + bytes_params : 0; } // part of bytes()
    size_t bytes() const {
        return bytes_codes + bytes_params + bytes_window + bytes_tables + bytes_calibration + bytes_chain;
    }
};

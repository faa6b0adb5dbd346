// An engine computes on the bytes of a cache: f16 tiles to blocks and back, attention, and what policies ask for. The
// store keeps states and clocks, and gives the engine pointers.
//
// Every engine encodes, decodes, writes rows and attends. The rest is optional: an engine without kernels for it
// returns NULL. The policy that needs them then does not attach to the layer (policy/kind.h), and the cache is refused.
#pragma once

#include "layout.h"
#include "types/basis.h"
#include "types/predictor.h"

#include <vector>

struct kvq_page_block {    // one page of all heads: f16 tile <-> block
    uint16_t * tile;       // [head][cell][stride]
    const uint8_t * valid; // host memory; NULL: every cell holds data
    const void * shared;   // codes to adopt, NULL: own codes
    void * codes;
    void * params;
};

// How much attention each cell gets (policy/probe.h), in the device's memory. Scores of an open page: f32 sums
// [n_head][page_cells], i32 seen [page_cells].
struct kvq_score_page {
    const uint16_t * keys; // open tile
    const int32_t * map;
    float * sums;
    int32_t cell;
    uint8_t stale[32]; // bit per cell (pages have at most 256): the score there does not count
};
// Of one call of attention: tokens that are probes, and the pages whose cells they score. In device memory.
struct kvq_probe_table {
    // all: every token 0..n_rows-1 is a probe. Behind this head: i32 rows[max_rows] (max_rows is a multiple of 4), then
    // kvq_score_page[n_pages].
    int32_t n_rows, n_pages, all, max_rows;
};
struct kvq_choice {               // of the salient cells of a page
    const float * sums;           // NULL: never observed
    const uint8_t *valid, *stale; // host memory; valid as above
    void * params;
};

// Of eviction (policy/evict.h): an open page, some of whose cells are packed into pages of slots. Pages of a run
// follow each other.
struct kvq_pack_page {
    const float * sums;             // NULL: never observed
    const uint8_t *stale, *present; // host memory; present: [n_head][page_cells/8], the cells that are packed
    int32_t cell, first, n;         // its first cell; of its run: the first page, and how many
    // true: cells of the run go by score, the highest first, the earlier cell first when equal; false: in their order
    bool sorted;
};
// Output page i belongs to the run of input page i; pages that a run did not fill are empty and come last in it.
struct kvq_packed {
    std::vector<float> sums;              // [page][n_head]: scores of its slots, added in their order
    std::vector<int32_t> maps;            // [page][n_head][page_cells]: cells in their order, then -1
    const int32_t * maps_there = nullptr; // the device's, until the next call
    const float * scores_there = nullptr; // of the slots, likewise; -1 in an empty slot
};

struct kvq_row_transform {               // what sealed rows of a page lack (policy/transform.h)
    const float * mean = nullptr;        // host memory that stays; NULL: no mean is left out
    const kvq_rotary * rotary = nullptr; // likewise
    // of the page's cells, and predictions of its rows, f32, pred_stride apart. In calls of an engine: its memory; of
    // kvq_cpu_*_rows (host.h): the host's
    const int32_t * positions = nullptr;
    const int32_t * sealed = nullptr; // positions when it was sealed; NULL: keys lack their rotary embedding altogether
    const float * pred = nullptr;     // NULL: rows are not predicted
    size_t pred_stride = 0;
    const kvq_order * order = nullptr;            // host memory that stays; NULL: channels stay where they are
    const struct kvq_row_turns * turns = nullptr; // what the host has ready for all heads (host.h); else NULL
    // Instead of predictions, what the coordinates of the page's cells say. basis: host memory that stays; NULL: they
    // have none. keys: the codec of those blocks whose parameters, from the first head's on, hold them.
    const kvq_basis * basis = nullptr;
    const kvq_codec * keys = nullptr;
    uint8_t * coords = nullptr;
};

// Rows in 8 bits (types/predictor.h): x = row * scale. row NULL: such rows are not made.
struct kvq_rows8 {
    int8_t * row = nullptr;
    float * scale = nullptr; // one a row
    size_t stride = 0;
    kvq_rows8 from(size_t i) const { return row ? kvq_rows8{ row + i * stride, scale + i, stride } : *this; }
};

// A lane of a predicted layer (policy/chain.h): n neighbouring pages of one stream. Pages, rows, scales and positions
// are the device's. The layout, the predictors' data, mean and rotary are host memory that stays.
struct kvq_chain_pages {
    const kvq_lane_layout * l = nullptr;
    bool value = false;
    int n = 0;
    kvq_predictor from[2]; // bits 0: not predicted; prediction = from[0] in[0] + from[1] in[1]
    const kvq_page * pages = nullptr;
    kvq_rows8 in[2], out;   // from the first page on; out: where this lane's own rows go, which may be in[0] or in[1]
    size_t stride = 0;      // of predictions, f32
    kvq_row_transform turn; // positions: of the stream's first cell
    int n_threads = 1;      // that an engine of the host may use
};

// Attention over n streams of a layer. Where a page's rows come from:
//   stored      `pages` of the stream: blocks, or open tiles
//   fetched     kvq_attn::far: far rows in place of some or all of its blocks
//   predicted   `predicted`: blocks hold what the layer below leaves
// Engines make tiles of fetched and predicted rows on the way; no layer is expanded as a whole.
struct kvq_attention_call {
    const kvq_attn * streams = nullptr;
    int n = 0;
    const kvq_lane_layout *k = nullptr, *v = nullptr; // of the lanes that are read
    // [n][2]: keys, values. l == NULL: this lane is stored. predicted == NULL: both lanes are stored. Before the call
    // the 8-bit rows of inputs are those of the layer below. After it, `out` of at least the sealed pages has those of
    // this layer; values may want those of keys first.
    const kvq_chain_pages * predicted = nullptr;
    int n_threads = 1;
};

// Between tiles as they came and tiles as they are sealed.
class kvq_transform_engine {
public:
    // n tiles as they are sealed; pointers of x: the device's memory, mean and rotary the host's
    virtual void take_out(const kvq_lane_layout & l, int n, const uint16_t * const * tiles, uint16_t * const * out,
        const kvq_row_transform * x, int n_threads) = 0;
    // Of keys, before that: the coordinates of n tiles go to x[i].coords.
    virtual void take_coords(const kvq_lane_layout & l, int n, const uint16_t * const * tiles,
        const kvq_row_transform * x, int n_threads) = 0;
    // in place; each row also gets its position, as open rows carry it (tags.h)
    virtual void put_back(const kvq_lane_layout & l, uint16_t * tile, const kvq_row_transform & x) = 0;

protected:
    ~kvq_transform_engine() {}
};

// Predicted layers.
class kvq_chain_engine {
public:
    virtual void chain_predict(const kvq_chain_pages & c, float * out) = 0; // of the pages, f32 [cell][stride]
    // the 8-bit rows of this layer in place of those of the layer below
    virtual void chain_step(const kvq_chain_pages & c) = 0;

protected:
    ~kvq_chain_engine() {}
};

// Scores that lie where the engine computes.
class kvq_score_engine {
public:
    // Of each head, the codec's n_hi cells of the highest score, earlier ones first when equal, empty cells
    // last: bit per cell, in front of the head's params.
    virtual void choose(const kvq_lane_layout & l, bool normalise, const kvq_choice * pages, int n) = 0;
    // Every head puts the cells of a run in order and fills pages of slots.
    virtual void pack(
        const kvq_lane_layout & l, bool normalise, const kvq_pack_page * pages, int n, kvq_packed & out) = 0;
    // Rows of n tiles from open ones: slot i of a head is its row of cell maps[tile][head][i]; frames: open tiles of
    // n_frames pages from `first` on. Zeros where either is missing.
    virtual void gather(const kvq_lane_layout & l, int n, uint16_t * const * tiles, const int32_t * const * maps,
        const uint16_t * const * frames, int first, int n_frames) = 0;
    // As kvq_column_sums of ggml-kvq.h, behind attend. a: as attend was given it, but a.pages is a list of the host's.
    // rows, sums and seen: the host's memory. False: this engine wrote the scores while it attended.
    virtual bool column_sums(
        const kvq_attn & a, const int32_t * rows, int n_rows, float * sums, int32_t * seen, int n_threads) = 0;

protected:
    ~kvq_score_engine() {}
};

// A second tier: rows that lie far (policy/fetch.h).
class kvq_fetch_engine {
public:
    // Memory of the host that this engine's attention reads. NULL: out of memory.
    virtual void * alloc_far(size_t nb) = 0;
    virtual void free_far(void * p, size_t nb) = 0;
    // (there, here, n): the host's copy of a table of n pages (kvq_far::k_rows, v_rows), which changes before that
    // table does; here NULL: both go
    virtual void name_far_table(const void * const *, const void * const *, size_t) {}
    // Tiles of n pages as far rows [head][cell][kvq_far_row_bytes]; the tiles may be used again by later calls. And
    // back.
    virtual void put_far(const kvq_lane_layout & l, int format, int n, const uint16_t * const * tiles,
        void * const * rows, int n_threads) = 0;
    virtual void get_far(const kvq_lane_layout & l, int format, const void * rows, uint16_t * tile) = 0;
    // Cells [first, last) of a stream (all of its call but fetch and top; keys: of its keys) are written again. No row
    // that is kept of them may be read as it is: with `again` those that were put far before this call come again,
    // else these cells are kept no more. Without cells: the buffer is freed next, so no work on it may wait after this
    // call.
    virtual void renew_kept(
        const kvq_far &, const kvq_lane_layout &, int /* first */, int /* last */, bool /* again */) {}
    // NULL: attention over such blocks fetches far rows of this format; else why not, and the cure
    virtual const char * refuse_far(const kvq_codec & k, const kvq_codec & v, int format, int top) const = 0;

protected:
    ~kvq_fetch_engine() {}
};

class kvq_engine {
public:
    virtual ~kvq_engine() {}
    virtual const char * name() const = 0; // of its kernels, for the load line

    // Head 0 of row i (f32, n_head*head_size values) goes to to[i], other heads to the same row of their tiles. pos:
    // positions that the rows carry (tags.h), in host memory; NULL: rows carry no positions.
    virtual void write_rows(const kvq_lane_layout & l, int64_t n, uint16_t * const * to, const float * rows,
        size_t row_stride, const int32_t * pos, int n_threads) = 0;
    // The same of f16 rows that the host holds. False: this engine takes no such rows.
    virtual bool enter_rows(const kvq_lane_layout &, int64_t /* n */, uint16_t * const * /* to */,
        const uint16_t * /* rows */, int /* n_threads */) {
        return false;
    }
    virtual void encode(const kvq_lane_layout & l, const kvq_page_block * pages, int n, int n_threads) = 0;
    virtual void decode(const kvq_lane_layout & l, const kvq_page_block & page) = 0;
    virtual void attend(const kvq_attention_call & a) = 0;

    virtual kvq_transform_engine * transforms() = 0;
    virtual kvq_chain_engine * chains() = 0;
    virtual kvq_score_engine * scores() = 0;
    virtual kvq_fetch_engine * fetches() = 0;

    // NULL: a token reads this layer by the kernels made for that; else what it is read by instead, for the load line
    virtual const char * slow_reading(int flags, const kvq_lane_layout & k, const kvq_lane_layout & v) const = 0;
    // Bytes that computing on a layer takes beside its lanes, at most; 0: it takes no memory of the device
    virtual size_t bytes_workspace(const kvq_lane_layout & k, const kvq_lane_layout & v) const = 0;
};

// Where a lane's bytes live and who computes on them. The store keeps states and clocks, hands these pointers on, and
// follows them only when is_host(). Calls of one device run in the order in which they are made; get and put return
// when they are done.
#pragma once

#include "layout.h"
#include "../types/predictor.h"

#include <vector>

struct kvq_page_block {    // one page of all heads: f16 tile <-> block
    uint16_t * tile;       // [head][cell][stride]
    const uint8_t * valid; // host memory; NULL: every cell holds data
    const void * shared;   // codes to adopt, NULL: own codes
    void * codes;
    void * params;
};

// Who gets attention, as a device keeps it (saliency.h). Scores of an open page: f32 sums [n_head][page_cells], i32
// seen [page_cells].
struct kvq_score_page {
    const uint16_t * keys; // open tile
    const int32_t * map;
    float * sums;
    int32_t cell, place; // place: of the sums, for the host
    uint8_t stale[32];   // bit per cell: what is there does not count
};
// Of one call of attention: tokens that are probes, and the pages whose cells they score. In device memory.
struct kvq_probe_table {
    // all: tokens 0..n_rows-1; i32 rows[max_rows], a multiple of 4, and pages follow
    int32_t n_rows, n_pages, all, max_rows;
};
struct kvq_choice {               // of the salient cells of a page
    const float * sums;           // NULL: never observed
    const uint8_t *valid, *stale; // host memory; valid as above
    void * params;
};

// Of eviction (slots.h): an open page, some of whose cells are packed into pages of slots. Pages of a run follow each
// other.
struct kvq_pack_page {
    const float * sums;             // NULL: never observed
    const uint8_t *stale, *present; // host memory; present: [n_head][page_cells/8], the cells that are packed
    int32_t cell, first, n;         // its first cell; of its run: the first page, and how many
    // the run: by score, the highest first and earlier cells first when equal; else in the cells' order
    bool sorted;
};
struct kvq_packed { // as many pages of slots as went in; a run's are at its pages' places, the empty ones at the end
    std::vector<float> sums;              // [page][n_head]: scores of its slots, added in their order
    std::vector<int32_t> maps;            // [page][n_head][page_cells]: cells in their order, then -1
    const int32_t * maps_there = nullptr; // the device's, until the next call
    const float * scores_there = nullptr; // of the slots, likewise; -1 where nothing is
};

constexpr size_t KVQ_ALIGN_SLAB = 256;

struct kvq_row_turn {                    // what sealed rows of a page lack (transform.h)
    const float * mean = nullptr;        // host memory that stays; NULL: none
    const kvq_rotary * rotary = nullptr; // likewise
    const int32_t * positions = nullptr; // the device's memory, of the page's cells
    const int32_t * sealed = nullptr;
    const float * pred = nullptr; // likewise, predictions of the page's rows, pred_stride apart
    size_t pred_stride = 0;
};

// A lane of a predicted layer (chain.h): n neighbouring pages of one stream. Pointers are the device's, but the
// layout, the predictors' data, mean and rotary, which are host memory that stays.
struct kvq_chain_pages {
    const kvq_lane_layout * l = nullptr;
    bool value = false;
    int n = 0;
    kvq_predictor from_k, from_v; // bits 0: not predicted
    const kvq_page * pages = nullptr;
    int8_t * row[2] = {}; // 8-bit rows of keys and of values and their scales, from the first page on
    float * scale[2] = {};
    size_t stride8[2] = {}, stride = 0; // stride: of predictions, f32
    kvq_row_turn turn;                  // positions: of the stream's first cell
};

class kvq_device {
public:
    virtual ~kvq_device() {}
    virtual const char * name() const = 0; // of its kernels, for the load line
    virtual bool is_host() const = 0;
    // allocations that follow, together, KVQ_ALIGN_SLAB each: one piece instead of many
    virtual void reserve(size_t nb) { (void) nb; }
    virtual void * alloc(size_t nb) = 0; // zeros; NULL: out of memory
    virtual void free(void * p, size_t nb) = 0;
    virtual void zero(void * p, size_t nb) = 0;
    virtual void copy(void * to, const void * from, size_t nb) = 0;
    virtual void get(void * host, const void * from, size_t nb) = 0;
    virtual void put(void * to, const void * host, size_t nb) = 0;
    virtual void put_pages(kvq_page * to, const kvq_page * from, size_t n) { put(to, from, n * sizeof(kvq_page)); }
    // a tile, behind pages whose encoding may still wait
    virtual void copy_later(void * to, const void * from, size_t nb) { copy(to, from, nb); }
    virtual void flush() {} // what still waits to be done together starts now

    // f32 row i, n_head*head_size values, goes to tile row to[i] of head 0 and to the same row of the other heads
    // pos: the rows' positions, which they carry (transform.h); NULL: none, and always where the store does it
    // itself, on the host
    virtual void write_rows(const kvq_lane_layout & l, int64_t n, uint16_t * const * to, const float * rows,
        size_t row_stride, const int32_t * pos, int n_threads) = 0;
    virtual void encode(const kvq_lane_layout & l, const kvq_page_block * pages, int n, int n_threads) = 0;
    virtual void decode(const kvq_lane_layout & l, const kvq_page_block & page) = 0;
    // Where memory is not the host's: n tiles as they are sealed, and back in place, with the positions that open
    // rows carry.
    virtual void take_out(
        const kvq_lane_layout &, int, const uint16_t * const *, uint16_t * const *, const kvq_row_turn *) {}
    virtual void put_back(const kvq_lane_layout &, uint16_t *, const kvq_row_turn &) {}
    // Likewise: predictions of the pages, f32 [cell][stride]; and the 8-bit rows of this layer in place of those of
    // the layer below.
    virtual void chain_predict(const kvq_chain_pages &, float *) {}
    virtual void chain_step(const kvq_chain_pages &) {}

    // Of devices that keep scores: the salient sets of pages about to seal.
    // Every head puts the cells of a run in order and fills pages of slots.
    virtual void pack(const kvq_lane_layout &, bool normalise, const kvq_pack_page *, int n, kvq_packed &) {
        (void) normalise;
        (void) n;
    }
    // Rows of n tiles from open ones: slot i of a head is its row of cell maps[tile][head][i]; frames: open tiles of
    // n_frames pages from `first` on. Zeros where either is missing.
    virtual void gather(const kvq_lane_layout &, int n, uint16_t * const * tiles, const int32_t * const * maps,
        const uint16_t * const * frames, int first, int n_frames) {
        (void) n;
        (void) tiles;
        (void) maps;
        (void) frames;
        (void) first;
        (void) n_frames;
    }
    virtual void choose(const kvq_lane_layout & l, bool normalise, const kvq_choice * pages, int n) {
        (void) l;
        (void) normalise;
        (void) pages;
        (void) n;
    }

    // NULL: a token reads this layer by the kernels made for that; else what it is read by instead, for the load line
    virtual const char * slow_reading(
        const kvq_layer_plan & plan, const kvq_lane_layout & k, const kvq_lane_layout & v) const {
        (void) plan;
        (void) k;
        (void) v;
        return nullptr;
    }
    // What computing on a layer takes beside its lanes, at most; 0 where it takes none of the device's memory
    virtual size_t bytes_workspace(
        const kvq_layer_plan & plan, const kvq_lane_layout & k, const kvq_lane_layout & v) const {
        (void) plan;
        (void) k;
        (void) v;
        return 0;
    }
};

kvq_device & kvq_cpu_device(); // cpu/host_device.cpp

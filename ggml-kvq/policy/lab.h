// A simulated method (methods/lab.cpp): a program is called back for every run of pages that seals in a layer, for keys
// and values together, and what it gives back is stored in place of the rows.
//
//   seal     Keys seal before values, and both seal the same pages. When keys do, the open rows of both go to the
//            program; its values wait until the values seal.
//   chain    A page waits while the layer before has it open, so that the program can ask for what that layer holds.
//   evict    When attention has read a layer, and again when pages of it have sealed, the program may let sealed cells
//            go, each KV head its own: their slots map to no cell.
//   shift    Sealed rows turn in place, and the program is not asked again.
// Blocks are tiles of f16 rows (kvq_lane_layout::copies). Where the program fails, rows stay as they came from then on:
// the program knows, and ends the run.
//
//   part lab     no values
#pragma once

#include "positions.h"
#include "transform.h"

#include <map>
#include <memory>
#include <utility>
#include <vector>

class kvq_lab_layer;

// What the layers of a cache have in common.
struct kvq_lab_cache {
    kvq_lab lab = {};
    bool failed = false;
    std::vector<kvq_lab_layer *> layers; // by ordinal
    bool has_program() const { return lab.seal && !failed; }
};

class kvq_lab_layer : public kvq_policy {
public:
    // turn holds the rotary embedding that graphs tell of; it is no policy of a lane
    kvq_lab_layer(const std::shared_ptr<kvq_lab_cache> & of_all, kvq_lane & k, kvq_lane & v, kvq_span_table & spans,
        kvq_positions & positions, kvq_transform & turn, int il, int ordinal);

    void wrote(kvq_lane & x, int s, int p, const uint8_t * slots, int64_t n_rows) override;
    void written(kvq_lane & x, int64_t n, const int64_t * idx, const int32_t * pos, uint16_t * const * to) override;
    bool may_seal(const kvq_lane & x, int s, int p) const override;
    void keep(kvq_lane & x, int s, const std::vector<int> & pages, const std::vector<kvq_page_block> & blocks,
        int n_threads) override;
    bool recall(const kvq_lane & x, int s, int p, uint16_t * tile) const override;
    void leave_out(kvq_lane & x, int s, const std::vector<int> & pages, std::vector<kvq_page_block> & blocks,
        int n_threads) override;
    void encoded(kvq_lane & x) override;
    void sealed(kvq_lane & x, int s, const std::vector<int> & due) override;
    void emptied(kvq_lane & x, int s, int p) override;
    void copied_page(kvq_lane & x, int from, int to, int p) override;
    void copied(kvq_lane & x, int from, int to) override;
    void cleared(kvq_lane & x) override;
    bool blocks_travel(const kvq_lane &) const override { return false; }
    bool wants_scores(int n_rows) const override;
    void spans(kvq_attn & a, int s) override;
    void observed(const kvq_attn & a, int s, uint64_t at, int n_threads) override;

    // of the call of the program that runs
    int rows(int what, float * out) const;
    int turn_keys(bool before, bool back, float * keys) const;

private:
    using place = std::pair<int, int>; // stream, page
    kvq_lab_layer * before() const;
    // rows of pages, f32 [page][cell][head][head size]; false: a page is not open, or holds nothing
    bool open_rows(const kvq_lane & x, int s, const std::vector<int> & pages, std::vector<float> & out) const;
    void ask(int s, const std::vector<int> & pages, std::vector<kvq_page_block> & blocks);
    void put_tile(kvq_lane & x, const float * rows, uint16_t * tile) const;
    int32_t position(int s, int p, int t) const; // of a cell; -1: it holds nothing
    void show(int s, int p);                     // the map of a page becomes that of its span
    std::vector<float> sums(const kvq_attn & a, int n_threads) const;
    void judge(int s, const float * probabilities, int n_queries);

    const std::shared_ptr<kvq_lab_cache> of_all;
    kvq_lab_cache & cache;
    kvq_lane &k, &v;
    kvq_span_table & table;
    kvq_positions & positions;
    kvq_transform & turn;
    const int il, ordinal;
    std::map<place, std::vector<uint16_t>> waiting; // tiles of values whose keys have sealed
    std::map<place, std::vector<int32_t>> maps;     // [n_head][page_cells] of pages that lack cells
    std::vector<uint16_t *> tiles;                  // that are encoded in place of the open ones
    std::vector<double> squares;                    // of queries, [n_head][head size]
    uint64_t n_squares = 0;
    std::map<int, int> n_read;           // by stream: pages that attention read last
    const kvq_lab_page * page = nullptr; // of the call that runs
};

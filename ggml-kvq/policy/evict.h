// Sealed cells when some are evicted (MiniKV, arXiv 2411.18077): pages of slots, in which every KV head keeps its own
// cells.
//
//   seal     Pages that are due form runs, those of generated cells runs of their own. Prompt cells: each head sorts
//            the run by score (probe.h) and packs it into pages of page_cells slots, in cell order within a page;
//            generated cells stay in cell order.
//   budget   `keep` of the stream's prompt cells, less those still open, in whole pages, and all pages of generated
//            cells; never more than n_store pages.
//   evict    While there are more, the page of the lowest score, summed over its cells and heads, goes: old ones and
//            those about to be sealed alike. Pages whose run reaches into the newest `recent` of the prompt go after
//            all others (such runs are of four pages), then generated ones, oldest first. Old and new are meant by the
//            order of writing, not by cell. Where a text outgrows the cache, the page with the first cells of the
//            stream goes last of all: much of the attention goes to them, and a model's text breaks without them.
//
// What is sealed is never quantised again: pages go or stay whole, and because a run is sorted that is close to
// choosing cells. An evicted cell keeps no trace but a bit; positions of the others do not change. How saved states
// carry all this: evict_state.cpp. Where the pages lie the engine sorts the cells of runs and moves their rows
// (evict_encode.cpp). Which pages stay is decided here, and what they hold is remembered here.
//
//   part evict   keep: share of a prompt's cells that stay when they seal, which bounds the store; recent: of them, the
//                newest ones, whatever their score. Behind part probe, whose scores it takes
#pragma once

#include "probe.h"

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

constexpr uint16_t KVQ_EVICTED = 0x8000; // an evicted row reads as -0 throughout

class kvq_evict : public kvq_policy {
public:
    kvq_evict() {}
    ~kvq_evict() override { release(); }
    kvq_evict(const kvq_evict &) = delete;
    kvq_evict & operator=(const kvq_evict &) = delete;
    void init(kvq_lane & k, kvq_lane & v, kvq_span_table & spans, kvq_probe & scores, float keep, float recent);
    static size_t nb_page(int n_head, int page_cells); // tables of a page of slots

    // Events. Keys seal before values; both seal the same pages in the same order.
    void wrote(kvq_lane & x, int s, int p, const uint8_t * slots, int64_t n_rows) override;
    bool take(kvq_lane & x, int s, const std::vector<int> & due, int n_threads) override;
    bool is_plain(int s, int p) const override; // an open page all of whose cells are its own
    void copied(kvq_lane & x, int from, int to) override;
    void cleared(kvq_lane &) override { clear(); }
    void edit(kvq_lane & x, int s, const kvq_any_cell & any, const kvq_edit_row & fn) override;
    bool blocks_travel(const kvq_lane &) const override { return false; }
    void save(const kvq_lane & x, int s, int cell, int n, uint16_t * rows, int n_threads) const override {
        read(x.is_value(), s, cell, n, rows, true, n_threads);
    }
    bool load(kvq_lane & x, int s, int cell, int n, const uint16_t * rows, int n_threads) override;
    void entered(kvq_lane & x, int s, int cell, const uint16_t * rows, int n) override;
    void reading(int s, int n_kv) override { limit(s, n_kv); }
    void spans(kvq_attn & a, int s) override;

    // Sealed cells among them, as a saved state carries them, or decoded only.
    void read(bool value, int stream, int cell, int n, uint16_t * rows, bool image = true, int n_threads = 1) const;
    void limit(int stream, int n_cells); // cells from n_cells on are free: attention will not read them again
    int n_used(int stream) const;        // pages

private:
    struct slot_page {
        bool used = false, generated = false;
        int64_t newest = 0; // clock of the lane when the last cell of its run was written
        int lo = 0, hi = 0; // its cells lie between them
        float score = 0.0f;
    };
    struct pending {
        int stream;
        std::vector<int> due, pages;
    };
    struct run {
        std::vector<int> pages;
        bool of_prompt, recent;
    };
    struct candidate {
        slot_page info;
        std::vector<int32_t> map; // [n_head][page_cells]
        // its run, its place there, and its place among all that were packed together
        int run = 0, index = 0, place = 0;
        bool holds_nothing() const;
    };
    struct arrival;
    struct arriving {
        int page;
        std::shared_ptr<arrival> rows;
    };
    enum : uint8_t { OF_PROMPT = 1, AWAY = 2, PARTLY = 4 }; // PARTLY: some heads keep it in a page, others in its frame

    void forget(int stream, int cell); // a cell is written anew: pages of slots leave it
    void forget_all(int stream);       // when all that belong together were named: they do now
    void seal_keys(
        int s, const std::vector<int> & due, std::vector<int> & made, std::vector<int> & places, kvq_packed & packed);
    std::vector<run> runs_of(int s, const std::vector<int> & due, int64_t first_recent) const;
    int n_prompt_cells(int s, int p) const;       // of an open page
    bool has_first_cell(const int32_t * m) const; // a page's map, for any head
    void drop_excess(int s, int budget, bool judged, int64_t first_recent, std::vector<candidate> & fresh);
    // Pages found whole among rows of a state become pages here. left[(c - cell)*n_head + h]: rows for the frames,
    // evicted ones not among them.
    void restore(
        bool value, int stream, int cell, int n, const uint16_t * rows, std::vector<uint8_t> & left, int n_threads);
    struct taken_page;
    void take_blocks(const kvq_lane & x, int cell, const uint16_t * rows, taken_page & out) const;
    void read_block(bool value, int s, int i, int h, int cell, int n, uint16_t * rows, bool image, int64_t last,
        const uint8_t * codes, const uint8_t * params) const;
    std::map<int, arrival> pages_in(
        bool value, int cell, int n, const uint16_t * rows, std::vector<uint8_t> & left, int n_threads) const;
    struct said;
    said said_by(bool value, const uint16_t * row, size_t D, size_t nb_row) const;
    void encode_holed(int s, int i, const arrival & a);
    void encode_arrived(int s, int cell, int n, const uint16_t * rows, std::vector<uint8_t> & left);
    void clear();
    void restoring(bool on); // what comes from a state is not judged again
    // a restored key: heads that do not hold it
    void note_absent(int stream, int cell, const uint8_t * left);

    slot_page & page(int s, int i) { return pages[(size_t) s * n_store + i]; }
    int32_t * map(int s, int i, int h) { return maps.data() + (((size_t) s * n_store + i) * n_head + h) * page_cells; }
    const int32_t * map(int s, int i, int h) const {
        return maps.data() + (((size_t) s * n_store + i) * n_head + h) * page_cells;
    }
    void free_page(int s, int i);
    void show(int s, int i); // its span
    void release();
    void set_map(int s, int i, const int32_t * from); // on the host
    void put_map(int s, int i);
    void encode(bool value, int s, const std::vector<int> & due, const std::vector<int> & made,
        const kvq_packed & packed, const std::vector<int> & places, int n_threads);
    void encode_rows(bool value, int s, int i, int h, const std::vector<uint16_t> & block, const uint8_t * valid);
    void mask_open(int s, int p);
    bool is_evicted(int s, int p, int h, int t) const;
    size_t nb_share(bool value) const; // bytes a row carries
    bool take_block(const kvq_lane & x, const arrival & a, int h, int cell, const uint16_t * rows,
        std::vector<uint8_t> & codes, std::vector<uint8_t> & stream) const;
    std::vector<candidate> pack(int s, const std::vector<run> & runs, bool judged, kvq_packed & packed) const;

    kvq_lane * lane[2] = {};
    kvq_span_table * spans_table = nullptr;
    kvq_probe * scores = nullptr;
    kvq_device * device = nullptr;
    int32_t * maps_there = nullptr; // where attention reads them: of the host `maps` itself
    float keep = 0.0f, recent = 0.0f;
    int n_head = 0, page_cells = 0, n_store = 0, n_pages = 0, n_stream = 0;
    bool is_restoring = false;
    // cells whose rows are on their way into frames, and which heads hold them, as restore() left them
    std::vector<int64_t> entering;
    const uint8_t * entering_left = nullptr;
    int entering_first = 0;
    std::vector<slot_page> pages; // [n_stream][n_store]
    std::vector<int32_t> maps;    // [n_stream][n_store][n_head][page_cells]
    std::vector<uint8_t> prompt;  // [n_stream][n_pages*page_cells]: OF_PROMPT, AWAY: sealed or evicted, PARTLY
    // of a stream: clock when its newest prompt cell was written; when a state began to come in
    std::vector<int64_t> top, restored_at;
    std::vector<int> written_end;                // likewise: cells from here on were never written
    std::vector<uint8_t> in_prompt, keys_arrive; // likewise: the last call was of a prompt; keys are being restored
    std::vector<int> rewritten;                  // cells named by forget() that pages of slots may still hold
    // of open pages some of whose cells are not in them, [n_stream][n_pages] x [n_head][page_cells]
    std::vector<std::vector<int32_t>> open_maps;
    std::vector<int32_t *> open_there; // the same on the device
    // of open pages, [n_head][page_cells]: keys restored as evicted ones
    std::map<std::pair<int, int>, std::vector<uint8_t>> absent;
    std::deque<pending> queue; // sealed keys whose values are not
    // (stream, page in the state) -> page, keys restored whose values are not
    std::map<std::pair<int, int>, arriving> arrived;
};

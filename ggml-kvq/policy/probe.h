// How much attention the open cells of a layer get (ZipCache, arXiv 2405.14256, section 4.3):
//   score = sum over probe rows of the probability / number of probe rows that could see the cell          per KV head
// Probe rows of a call of n query tokens, share s: the last ceil(s/2 n) and ceil(s/2 n) of the others, those with the
// smallest hash of their cell. A call of fewer than 32 takes tokens whose cell, modulo the page, is within the last
// s/2, and tokens whose hash is below s/2, the same in all layers, so that most steps have no probe row at all: over a
// page of generated tokens these are the same two kinds. Only open pages have sums: what is sealed stays as it is.
// The sums lie where the engine computes, and what is chosen by them is chosen there. An engine that scores while it
// attends is told in a table which tokens and pages count.
//
//   part probe   share: of query rows that are probes, 0..1; normalise: 1, as the formula, 0: sums alone;
//                min_rows: calls of fewer query rows are not observed (1)
#pragma once

#include "store/lane.h"

#include <map>
#include <vector>

// Rows, ascending, of a call whose first query token is in cell `at` of its stream.
std::vector<int32_t> kvq_probe_rows(int n, uint64_t at, float share, int page_cells, uint32_t seed);

class kvq_probe : public kvq_policy {
public:
    kvq_probe() {}
    ~kvq_probe() override { release(); }
    kvq_probe(const kvq_probe &) = delete;
    kvq_probe & operator=(const kvq_probe &) = delete;
    void init(
        const kvq_lane_layout & keys, float share, bool normalise, uint32_t seed, int min_rows, kvq_device & device);
    bool active() const { return share > 0.0f; }
    bool asks(int n_rows) const { return active() && n_rows >= min_rows; } // of a call of as many
    int n_salient() const { return n_hi; }

    // Behind attention: adds what the probe rows of this call gave to the open pages among attn.pages, which
    // start at page 0 of the stream.
    void observe(const kvq_attn & attn, int stream, uint64_t at, int n_threads);
    // The same of an engine that scores while it attends, in two steps. prepare: the table of a stream for a call of
    // n_q rows whose first is in cell `at`, spans being those of the stream on the host; returns how many rows are
    // probes. The engine then runs its kernel over the table. moved: set when the table lies elsewhere now
    int prepare(const kvq_page * spans, int n_spans, int stream, int n_q, uint64_t at, bool * moved = nullptr);
    bool sees(int n_q, uint64_t at) const;             // some rows of such a call are probes
    bool reserve(int stream, int n_rows, int n_pages); // makes room in the table; true: it lies elsewhere now
    const kvq_probe_table * table_of(int stream) const {
        return (const kvq_probe_table *) tables[(size_t) stream].there;
    }
    int max_pages(int stream) const { return tables[(size_t) stream].max_pages; }
    kvq_choice choice(int stream, int page, const uint8_t * valid, void * params) const;
    bool normalises() const { return normalise; }

    // Adds to the sums of a page, [n_head][page_cells] and [page_cells].
    void add(int stream, int page, const float * sums, const int32_t * seen);
    // Scores of a page's cells of one head; 0: never observed.
    void scores(int stream, int page, int head, float * out) const;
    // A sealed page is opened again: its salient cells keep their lead until other scores beat a probability of 1.
    void reopen(int stream, int page, int head, const uint8_t * set);
    void forget(int stream, int page, int slot); // a cell was written anew
    void drop(int stream, int page);
    void copy(int from, int to);
    void clear();

    // Events.
    void wrote(kvq_lane & x, int s, int p, const uint8_t * slots, int64_t n_rows) override;
    void sealed(kvq_lane & x, int s, const std::vector<int> & due) override;
    void placing(kvq_lane & x, int s, int p, const kvq_page_image & image) override;
    void emptied(kvq_lane & x, int s, int p) override;
    void copied(kvq_lane &, int from, int to) override { copy(from, to); }
    void cleared(kvq_lane &) override { clear(); }
    bool wants_scores(int n_rows) const override { return asks(n_rows); }
    void observed(const kvq_attn & a, int s, uint64_t at, int n_threads) override;

private:
    struct entry {
        int place = -1;    // in the pool
        uint8_t stale[32]; // bit per cell: what lies there does not count
    };
    struct table {
        uint8_t * there = nullptr;
        int max_rows = 0, max_pages = 0;
        bool empty = true;
    };
    entry & at(int stream, int page);
    float * there(const entry & e) const;
    size_t nb_entry() const { return 4 * (size_t) (n_head + 1) * page_cells; }
    void release();
    void get(const entry & e, std::vector<float> & s, std::vector<int32_t> & n) const;

    int n_head = 0, page_cells = 0, n_hi = 0, n_frames = 0, min_rows = 1; // calls of fewer rows are not observed
    float share = 0.0f;
    bool normalise = true;
    uint32_t seed = 0;
    std::map<std::pair<int, int>, entry> pages;
    std::vector<kvq_page> open; // of a call
    std::vector<float> sums;
    std::vector<int32_t> seen;

    kvq_device * device = nullptr;
    struct chunk {
        uint8_t * at;
        int first, n; // places
    };
    std::vector<chunk> pool; // what is there stays there: tables of all streams point to it
    int n_pool = 0;
    std::vector<int> free_places;
    std::vector<table> tables; // by stream
};

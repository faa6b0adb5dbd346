// How much attention the open cells of a layer get, and which of them are salient when their page seals (ZipCache, arXiv 2405.14256,
// section 4.3):
//   score = sum over probe rows of the probability / number of probe rows that could see the cell          per KV head
// Probe rows of a call of n query tokens, share s: the last ceil(s/2 n) and ceil(s/2 n) of the others, those with the smallest hash of
// their cell. A call of fewer than 32 takes tokens whose cell, modulo the page, is within the last s/2,
// and tokens whose hash is below s/2: over a page of generated tokens these are the same two kinds.
// Only open pages have sums: what is sealed stays as it is.
#pragma once

#include "layout.h"

#include <map>
#include <vector>

// Rows, ascending, of a call whose first query token is in cell `at` of its stream.
std::vector<int32_t> kvq_probe_rows(int n, uint64_t at, float share, int page_cells, uint32_t seed);

class kvq_saliency {
public:
    void init(const kvq_lane_layout & keys, float share, bool normalise, uint32_t seed, int min_rows = 1);
    bool active() const { return share > 0.0f; }

    // After attention: adds what the probe rows of this call gave to the open pages among attn.pages, which start at page 0 of the stream.
    void observe(const kvq_attn & attn, int stream, uint64_t at, int n_threads);
    // The salient set of a page about to seal: the n_hi cells of the highest score, earlier ones first when equal; empty cells last.
    void choose(int stream, int page, int head, const uint8_t * valid, uint8_t * set) const;
    // Sums of a cell and head; 0: never observed.
    float score(int stream, int page, int head, int slot) const;
    // A sealed page is opened again: its salient cells keep their lead until other scores beat a probability of 1.
    void reopen(int stream, int page, int head, const uint8_t * set);
    void forget(int stream, int page, int slot); // a cell was written anew
    void drop(int stream, int page) { pages.erase({ stream, page }); }
    void copy(int from, int to);
    void clear() { pages.clear(); }

private:
    struct entry {
        std::vector<float>   sums; // [n_head][page_cells]
        std::vector<int32_t> seen; // [page_cells]
    };
    entry & at(int stream, int page);

    int n_head = 0, page_cells = 0, n_hi = 0, min_rows = 1; // calls of fewer rows are not observed
    float share = 0.0f;
    bool  normalise = true;
    uint32_t seed = 0;
    std::map<std::pair<int, int>, entry> pages;
    std::vector<kvq_page> open; // of a call
    std::vector<float>    lse, sums;
    std::vector<int32_t>  seen;

public:
    // Where attention leaves log-sum-exp of n_q rows of n_head query heads.
    float * lse_of(int n_stream, int n_q, int n_head);
};

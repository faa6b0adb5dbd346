#include "saliency.h"

#include "../cpu/cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

// 32-bit mix (two rounds of multiply and shift)
static uint32_t hash(uint64_t row, uint32_t seed) {
    uint32_t x = (uint32_t) row * 0x9e3779b1u + (uint32_t) (row >> 32) + seed * 0x85ebca77u;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

std::vector<int32_t> kvq_probe_rows(int n, uint64_t at, float share, int page_cells, uint32_t seed) {
    const double half = (double) share / 2;
    std::vector<int32_t> rows;
    if (n < 32) {
        const int tail = page_cells - (int) std::ceil(half * page_cells);
        for (int i = 0; i < n; i++) {
            const uint64_t row = at + (uint64_t) i;
            if ((int) (row % (uint64_t) page_cells) >= tail || hash(row, seed) < half * 4294967296.0) {
                rows.push_back(i);
            }
        }
        return rows;
    }
    const int n_half = (int) std::ceil(half * n), n_rest = std::max(n - n_half, 0);
    std::vector<int32_t> rest((size_t) n_rest);
    std::iota(rest.begin(), rest.end(), 0);
    const auto before = [&](int32_t a, int32_t b) {
        const uint32_t x = hash(at + (uint64_t) a, seed), y = hash(at + (uint64_t) b, seed);
        return x != y ? x < y : a < b;
    };
    std::sort(rest.begin(), rest.end(), before);
    rows.assign(rest.begin(), rest.begin() + std::min(n_half, n_rest));
    std::sort(rows.begin(), rows.end());
    for (int i = n_rest; i < n; i++) {
        rows.push_back(i);
    }
    return rows;
}

void kvq_saliency::init(const kvq_lane_layout & keys, float share_, bool normalise_, uint32_t seed_, int min_rows_) {
    n_head     = keys.n_head;
    page_cells = keys.page_cells;
    n_hi       = keys.codec.n_hi;
    share      = share_;
    normalise  = normalise_;
    seed       = seed_;
    min_rows   = min_rows_;
    pages.clear();
}

kvq_saliency::entry & kvq_saliency::at(int stream, int page) {
    entry & e = pages[{ stream, page }];
    if (e.sums.empty()) {
        e.sums.assign((size_t) n_head * page_cells, 0.0f);
        e.seen.assign((size_t) page_cells, 0);
    }
    return e;
}

float * kvq_saliency::lse_of(int n_stream, int n_q, int n_query_heads) {
    lse.resize((size_t) n_stream * n_q * n_query_heads);
    return lse.data();
}

void kvq_saliency::observe(const kvq_attn & attn, int stream, uint64_t first, int n_threads) {
    if (attn.n_q < min_rows) {
        return;
    }
    const std::vector<int32_t> rows = kvq_probe_rows(attn.n_q, first, share, page_cells, seed);
    if (rows.empty()) {
        return;
    }
    open.clear();
    for (int p = 0; p < attn.n_pages; p++) {
        if (attn.pages[p].n_slots && !attn.pages[p].k_params) {
            open.push_back(attn.pages[p]);
        }
    }
    kvq_attn a = attn;
    a.pages    = open.data();
    a.n_pages  = (int32_t) open.size();
    const size_t n = open.size() * (size_t) page_cells;
    sums.assign(n * n_head, 0.0f);
    seen.assign(n * n_head, 0);
    kvq_cpu_column_sums(a, rows.data(), (int) rows.size(), sums.data(), seen.data(), n_threads);
    for (size_t i = 0; i < open.size(); i++) {
        entry & e = at(stream, open[i].cell / page_cells);
        for (int h = 0; h < n_head; h++) {
            for (int t = 0; t < page_cells; t++) {
                e.sums[(size_t) h * page_cells + t] += sums[h * n + i * page_cells + t];
            }
        }
        for (int t = 0; t < page_cells; t++) { // who sees a cell does not depend on the head
            e.seen[(size_t) t] += seen[i * page_cells + t];
        }
    }
}

void kvq_saliency::choose(int stream, int page, int head, const uint8_t * valid, uint8_t * set) const {
    std::vector<float>   score((size_t) page_cells, 0.0f);
    std::vector<int32_t> order((size_t) page_cells);
    std::iota(order.begin(), order.end(), 0);
    const auto found = pages.find({ stream, page });
    for (int t = 0; t < page_cells; t++) {
        if (!(valid[t / 8] >> t % 8 & 1)) {
            score[(size_t) t] = -1.0f;
        } else if (found != pages.end()) {
            score[(size_t) t] = found->second.sums[(size_t) head * page_cells + t] / (normalise ? (float) std::max(found->second.seen[(size_t) t], 1) : 1.0f);
        }
    }
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return score[(size_t) a] > score[(size_t) b]; });
    memset(set, 0, (size_t) page_cells / 8);
    for (int i = 0; i < n_hi; i++) {
        set[order[(size_t) i] / 8] |= (uint8_t) (1 << order[(size_t) i] % 8);
    }
}

float kvq_saliency::score(int stream, int page, int head, int slot) const {
    const auto found = pages.find({ stream, page });
    return found == pages.end() ? 0.0f : found->second.sums[(size_t) head * page_cells + slot] / (normalise ? (float) std::max(found->second.seen[(size_t) slot], 1) : 1.0f);
}

void kvq_saliency::reopen(int stream, int page, int head, const uint8_t * set) {
    entry & e = at(stream, page);
    for (int t = 0; t < page_cells; t++) {
        e.sums[(size_t) head * page_cells + t] = (float) (set[t / 8] >> t % 8 & 1);
        e.seen[(size_t) t] = 1;
    }
}

void kvq_saliency::forget(int stream, int page, int slot) {
    const auto found = pages.find({ stream, page });
    for (int h = 0; found != pages.end() && h < n_head; h++) {
        found->second.sums[(size_t) h * page_cells + slot] = 0.0f;
        found->second.seen[(size_t) slot] = 0;
    }
}

void kvq_saliency::copy(int from, int to) {
    for (auto i = pages.begin(); i != pages.end();) {
        i = i->first.first == to ? pages.erase(i) : std::next(i);
    }
    std::map<std::pair<int, int>, entry> more;
    for (const auto & i : pages) {
        if (i.first.first == from) {
            more[{ to, i.first.second }] = i.second;
        }
    }
    pages.insert(more.begin(), more.end());
}

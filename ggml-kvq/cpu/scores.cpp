// Scores of open pages in host memory (kvq_score_engine): which cells are salient, and pages of slots from runs of
// cells. Scores of a page: f32 sums [n_head][page_cells], i32 seen [page_cells] (policy/probe.h).
#include "rows.h"

#include "types/mixed.h"

#include <algorithm>
#include <cstring>
#include <numeric>

static bool has_bit(const uint8_t * bits, int i) { return bits[i / 8] >> i % 8 & 1; }

// of cell t and head h; 0: never observed
static float score_of(
    const kvq_lane_layout & l, bool normalise, const float * sums, const uint8_t * stale, int h, int t) {
    if (!sums || has_bit(stale, t)) { return 0.0f; }
    const int32_t * seen = (const int32_t *) (sums + (size_t) l.n_head * l.page_cells);
    return sums[(size_t) h * l.page_cells + t] / (normalise ? (float) std::max(seen[t], 1) : 1.0f);
}

void kvq_cpu_choose(const kvq_lane_layout & l, bool normalise, const kvq_choice * pages, int n) {
    const size_t nb_set = (size_t) l.page_cells / 8;
    std::vector<float> score((size_t) l.page_cells);
    std::vector<int32_t> order((size_t) l.page_cells);
    for (int i = 0; i < n * l.n_head; i++) {
        const kvq_choice & page = pages[i / l.n_head];
        const int h = i % l.n_head;
        for (int t = 0; t < l.page_cells; t++) {
            const bool held = !page.valid || has_bit(page.valid, t);
            score[(size_t) t] = held ? score_of(l, normalise, page.sums, page.stale, h, t) : -1.0f;
        }
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(
            order.begin(), order.end(), [&](int32_t a, int32_t b) { return score[(size_t) a] > score[(size_t) b]; });
        uint8_t * set = (uint8_t *) page.params + h * l.nb_params;
        memset(set, 0, nb_set);
        for (int j = 0; j < l.codec.n_hi; j++) { set[order[(size_t) j] / 8] |= (uint8_t) (1 << order[(size_t) j] % 8); }
    }
}

// Ranks by falling score, cells in their order when equal: numbers that sort as (-score, place in the run).
static uint64_t rank_of(float score, size_t place) {
    uint32_t bits;
    memcpy(&bits, &score, 4);
    bits = bits >> 31 ? bits : ~(bits | 0x80000000u);
    return (uint64_t) std::min(bits, ~1u) << 32 | (uint32_t) place;
}

namespace {

struct slots { // of all pages of a call, [page][head][slot]
    std::vector<int32_t> maps;
    std::vector<float> scores;
};

// One head of the run of n pages that begins with page `first`.
struct run_of_head {
    std::vector<float> score;
    std::vector<int32_t> cell;
    std::vector<uint64_t> ranks;
    std::vector<uint32_t> page_of, n_in;

    void find(const kvq_lane_layout & l, bool normalise, const kvq_pack_page * pages, int n, int h) {
        const size_t nb_bits = (size_t) l.page_cells / 8;
        score.clear();
        cell.clear();
        for (int i = 0; i < n; i++) {
            const kvq_pack_page & page = pages[i];
            for (int t = 0; t < l.page_cells; t++) {
                if (!has_bit(page.present + h * nb_bits, t)) { continue; }
                score.push_back(score_of(l, normalise, page.sums, page.stale, h, t));
                cell.push_back(page.cell + t);
            }
        }
    }
    // only which page a cell goes to matters, not the order within it
    void sort(int n_pages, int page_cells, bool sorted) {
        const size_t n = cell.size();
        page_of.resize(n);
        n_in.assign((size_t) n_pages, 0);
        ranks.clear();
        for (size_t i = 0; i < n; i++) {
            page_of[i] = (uint32_t) (i / page_cells);
            if (sorted) { ranks.push_back(rank_of(score[i], i)); }
        }
        for (size_t at = 0; sorted && at < n; at += page_cells) {
            const size_t end = std::min(at + page_cells, n);
            if (end < n) { std::nth_element(ranks.begin() + (long) at, ranks.begin() + (long) end, ranks.end()); }
            for (size_t j = at; j < end; j++) { page_of[(uint32_t) ranks[j]] = (uint32_t) (at / page_cells); }
        }
    }
};

} // namespace

void kvq_cpu_pack(const kvq_lane_layout & l, bool normalise, const kvq_pack_page * pages, int n, kvq_packed & out) {
    static thread_local slots made;
    static thread_local run_of_head run;
    const size_t n_slots = (size_t) n * l.n_head * l.page_cells;
    made.maps.assign(n_slots, -1);
    made.scores.assign(n_slots, -1.0f);
    out.sums.assign((size_t) n * l.n_head, 0.0f);
    for (int first = 0; first < n; first += pages[first].n) {
        const int n_pages = pages[first].n;
        for (int h = 0; h < l.n_head; h++) {
            run.find(l, normalise, pages + first, n_pages, h);
            run.sort(n_pages, l.page_cells, pages[first].sorted);
            for (size_t i = 0; i < run.cell.size(); i++) {
                const size_t head = (size_t) (first + (int) run.page_of[i]) * l.n_head + h;
                const size_t slot = head * l.page_cells + run.n_in[run.page_of[i]]++;
                made.maps[slot] = run.cell[i];
                made.scores[slot] = run.score[i];
                out.sums[head] += run.score[i];
            }
        }
    }
    out.maps = made.maps;
    out.maps_there = made.maps.data();
    out.scores_there = made.scores.data();
}

void kvq_cpu_gather(const kvq_lane_layout & l, int n, uint16_t * const * tiles, const int32_t * const * maps,
    const uint16_t * const * frames, int first, int n_frames) {
    const size_t stride = (size_t) l.head_stride();
    for (int j = 0; j < n; j++) {
        for (int i = 0; i < l.n_head * l.page_cells; i++) {
            const int32_t cell = maps[j][i];
            const int p = cell / l.page_cells - first, h = i / l.page_cells;
            const uint16_t * frame = cell >= 0 && p >= 0 && p < n_frames ? frames[p] : nullptr;
            uint16_t * to = tiles[j] + (size_t) i * stride;
            if (frame) {
                std::copy_n(frame + ((size_t) h * l.page_cells + cell % l.page_cells) * stride, stride, to);
            } else {
                std::fill_n(to, stride, (uint16_t) 0);
            }
        }
    }
}

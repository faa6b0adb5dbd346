#include "choose.h"
#include "kind.h"

#include <algorithm>
#include <cstring>
#include <numeric>

void kvq_choose_set(const kvq_probe & scores, int n_salient, int s, int p, int head, int page_cells,
    const uint8_t * valid, uint8_t * set) {
    std::vector<float> score((size_t) page_cells);
    std::vector<int32_t> order((size_t) page_cells);
    std::iota(order.begin(), order.end(), 0);
    scores.scores(s, p, head, score.data());
    for (int t = 0; t < page_cells; t++) {
        if (!(valid[t / 8] >> t % 8 & 1)) { score[(size_t) t] = -1.0f; }
    }
    std::stable_sort(
        order.begin(), order.end(), [&](int32_t a, int32_t b) { return score[(size_t) a] > score[(size_t) b]; });
    memset(set, 0, (size_t) page_cells / 8);
    for (int i = 0; i < n_salient; i++) { set[order[(size_t) i] / 8] |= (uint8_t) (1 << order[(size_t) i] % 8); }
}

void kvq_choose::choose(kvq_lane & x, int s, const std::vector<int> & due) {
    const kvq_lane_layout & l = x.layout();
    std::vector<kvq_choice> choices;
    for (int p : due) {
        for (int h = 0; x.device.is_host() && h < l.n_head; h++) {
            kvq_choose_set(scores, l.codec.n_hi, s, p, h, l.page_cells, x.valid(s, p), x.params_at(s, p, h));
        }
        if (!x.device.is_host()) { choices.push_back(scores.choice(s, p, x.valid(s, p), x.params_at(s, p, 0))); }
    }
    if (!choices.empty()) { x.device.scores()->choose(l, scores.normalises(), choices.data(), (int) choices.size()); }
}

void kvq_choose::reopening(kvq_lane & x, int s, int p) {
    if (x.is_value()) { return; }
    const kvq_lane_layout & l = x.layout();
    std::vector<uint8_t> copy;
    const uint8_t * set = x.view<uint8_t>(x.params_at(s, p, 0), l.nb_params * l.n_head, copy);
    for (int h = 0; h < l.n_head; h++) { scores.reopen(s, p, h, set + h * l.nb_params); }
}

// Pages are long here. Without eviction as many as there are frames need no block at any time.
static void room(const kvq_part &, const kvq_layer_plan & plan, bool, kvq_lane_layout & l) {
    l.moves = !plan.part("evict") && !l.is_f16() && l.n_frames < l.n_pages;
    if (l.moves) { l.n_store = l.n_pages - l.n_frames; }
}

static bool attach(const kvq_part &, kvq_layer_parts & at) {
    kvq_policy * x = at.own(new kvq_choose(*at.probe));
    at.k->add(x);
    at.v->add(x);
    return true;
}

extern const kvq_policy_kind kvq_policy_choose;
const kvq_policy_kind kvq_policy_choose = { "choose", room, nullptr, attach, nullptr };

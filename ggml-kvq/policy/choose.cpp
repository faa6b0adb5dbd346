#include "choose.h"
#include "kind.h"

void kvq_choose::choose(kvq_lane & x, int s, const std::vector<int> & due) {
    std::vector<kvq_choice> choices;
    for (int p : due) { choices.push_back(scores.choice(s, p, x.valid(s, p), x.params_at(s, p, 0))); }
    x.device.scores()->choose(x.layout(), scores.normalises(), choices.data(), (int) choices.size());
}

void kvq_choose::reopening(kvq_lane & x, int s, int p) {
    if (x.is_value()) { return; }
    const kvq_lane_layout & l = x.layout();
    std::vector<uint8_t> copy;
    const uint8_t * set = x.view<uint8_t>(x.params_at(s, p, 0), l.nb_params * l.n_head, copy);
    for (int h = 0; h < l.n_head; h++) { scores.reopen(s, p, h, set + h * l.nb_params); }
}

// Pages are long here. Without eviction as many as there are frames need no block at any time.
static void shape(const kvq_part &, const kvq_layer_plan & plan, bool, kvq_lane_layout & l) {
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
const kvq_policy_kind kvq_policy_choose = { "choose", shape, nullptr, attach, nullptr };

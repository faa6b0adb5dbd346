#include "coords.h"

#include "calibrated.h"
#include "kind.h"
#include "transform.h"

void kvq_coords::before_seal(kvq_lane & x, int s, const std::vector<int> & due, int n_threads) {
    std::vector<int> first;
    for (int p : due) {
        if (ends(x, s, p)) { values.reopen(s, p); }
        if (&x == &values && keys.state(s, p) == KVQ_PAGE_OPEN) { first.push_back(p); }
    }
    keys.seal(s, first, n_threads);
}

bool kvq_coords::may_place(const kvq_lane & x, int s, int p) const {
    return &x != &values || keys.state(s, p) == KVQ_PAGE_SEALED;
}

// Who writes the keys of a whole page, or brings them out of a state, brings its values too.
void kvq_coords::replacing(kvq_lane & x, int s, int p) {
    if (ends(x, s, p)) { values.empty_page(s, p); }
}

void kvq_coords::placing(kvq_lane & x, int s, int p, const kvq_page_image &) { replacing(x, s, p); }

void kvq_coords::reopening(kvq_lane & x, int s, int p) {
    if (ends(x, s, p)) { values.reopen_and_wait(s, p); }
}

void kvq_coords::reencoding(kvq_lane & x, int s, int p) {
    if (ends(x, s, p)) { values.reopen(s, p); }
}

void kvq_coords::emptied(kvq_lane & x, int s, int p) { replacing(x, s, p); }

// ---------------------------------------------------------------- as a part of a plan

static void shape(const kvq_part &, const kvq_layer_plan & plan, bool value, kvq_lane_layout & l) {
    l.nb_beside = value ? kvq_coords_nb(plan.k, l.n_head) : 0;
}

static void bytes(const kvq_part & part, const kvq_layer_plan &, bool, kvq_lane_layout & l) {
    const int n = (int) part.get("n") * l.n_head - 2, width = l.n_head * l.codec.head_size;
    l.bytes_calibration += kvq_pad(kvq_basis_data::nb(n, width), KVQ_ALIGN);
}

static bool attach(const kvq_part &, kvq_layer_parts & at) {
    kvq_policy * x = at.own(new kvq_coords(*at.k, *at.v));
    for (const bool value : { false, true }) {
        at.transforms[value]->basis = &at.data->basis[value].view;
        at.transforms[value]->keys = at.k;
        at.lane(value).add(x);
    }
    return true;
}

static std::string words(const std::vector<kvq_part_of_layer> & layers, const kvq_stats &) {
    return "; so is what " + std::to_string((int) layers[0].part->get("n")) + " coordinates a head say";
}

extern const kvq_policy_kind kvq_policy_coords;
const kvq_policy_kind kvq_policy_coords = { "coords", shape, bytes, attach, words };

#include "share_codes.h"
#include "kind.h"

void kvq_share_codes::before_seal(kvq_lane & x, int s, const std::vector<int> & due, int n_threads) {
    if (&x != &adopter) { return; }
    std::vector<int> first; // codes must exist before they are adopted
    for (int p : due) {
        if (owner.state(s, p) == KVQ_PAGE_OPEN) { first.push_back(p); }
    }
    // lanes of a pool have room for other numbers of pages: rows may be on their way to the frames that are read now
    if (owner.layout().pooled && !first.empty()) { x.device.flush(); }
    owner.seal(s, first, n_threads);
}

bool kvq_share_codes::may_place(const kvq_lane & x, int s, int p) const {
    return &x != &adopter || owner.state(s, p) == KVQ_PAGE_SEALED;
}

void kvq_share_codes::reopening(kvq_lane & x, int s, int p) {
    if (&x == &owner && adopter.state(s, p) == KVQ_PAGE_SEALED) { adopter.reopen_and_wait(s, p); }
}

void kvq_share_codes::placing(kvq_lane & x, int s, int p, const kvq_page_image &) { reopening(x, s, p); }

void kvq_share_codes::moved(kvq_lane & x, int s, int p) {
    if (&x == &owner && adopter.state(s, p) == KVQ_PAGE_SEALED) { adopter.refresh_span(s, p); }
}

void kvq_share_codes::emptied(kvq_lane & x, int s, int p) {
    if (&x == &owner && adopter.state(s, p) == KVQ_PAGE_SEALED) { adopter.empty_page(s, p); }
}

void kvq_share_codes::reencoding(kvq_lane & x, int s, int p) {
    if (&x != &owner || adopter.state(s, p) != KVQ_PAGE_SEALED) { return; }
    tile = adopter.scratch->take(adopter.layout().nb_frame);
    adopter.decode_page(s, p, tile);
}

void kvq_share_codes::reencoded(kvq_lane & x, int s, int p) {
    if (&x != &owner || !tile) { return; }
    adopter.encode_page(s, p, tile); // refitted to the new codes
    adopter.scratch->give(tile, adopter.layout().nb_frame);
    tile = nullptr;
}

// ---------------------------------------------------------------- as a part of a plan

static void shape(const kvq_part & part, const kvq_layer_plan &, bool value, kvq_lane_layout & l) {
    l.shares_codes = part.get(value ? "v" : "k") > 0;
}

static bool attach(const kvq_part &, kvq_layer_parts & at) {
    for (const bool value : { false, true }) {
        if (!at.lane(value).layout().shares_codes) { continue; }
        kvq_lane &owner = *at.before[value], &adopter = at.lane(value);
        kvq_policy * x = at.own(new kvq_share_codes(owner, adopter));
        owner.add(x);
        adopter.add(x);
    }
    return true;
}

// Layers whose codes would be those of a layer in another cache: few of them are named, many counted.
static std::string words(const std::vector<kvq_part_of_layer> & layers, const kvq_stats &) {
    std::string names;
    int n = 0;
    for (const kvq_part_of_layer & l : layers) {
        const bool apart = l.part->get("k_apart") > 0 || l.part->get("v_apart") > 0;
        if (apart) { names += (n++ ? " " : "") + std::to_string(l.il); }
    }
    if (!n) { return ""; }
    const std::string which = n <= 4 ? (n == 1 ? "layer " : "layers ") + names : std::to_string(n) + " layers";
    const char * what =
        n == 1 ? " keeps codes of its own, its partner is" : " keep codes of their own, their partners are";
    return "; " + which + what + " on another device or in another cache";
}

extern const kvq_policy_kind kvq_policy_share_codes;
const kvq_policy_kind kvq_policy_share_codes = { "share_codes", shape, nullptr, attach, words };

// One number instead of a method: `bits` true bits, window, scales and tables included, and the best composition for
// it.
// Keys and values are lattice blocks (HIGGS), less their means where there is data for that (AQUA-KV, predictor=bias).
// Each layer stands on a rung of code bits of keys and values; the ladder's levels raise one layer by one rung at a
// time, so bits between the grids are a mixture of layers:
//   rung                 0      1      2      3      4      5      6
//   pairs=norm|neox    0|2/1  0|2/2  0|4/2  0|4/3  2|4/3  2|4/4   4/4
//   pairs=none          1/1    2/1    2/2    3/2    3/3    4/4
// f|s are bits of the fast and of the slow half of the rotary pairs of keys (types/lattice.h): fast pairs matter little
// behind the window, as long as their mean is kept, so there are halves only where means are taken off. Calibrated data
// say which channels are pairs, where a head turns as a whole. The rungs are those for which there are kernels.
// `order` says which layer rises next; tuned data hold it (ggml-kvq tune). Without it the upper half of the layers
// stands one or two rungs above the lower half: on both models that were tuned, layers from the middle on lose several
// times more by few bits.
// With `far` the same blocks are the near copy of a second tier (SpeCache), which lies in host memory.
#include "method.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

static const kvq_option_info options[] = {
    { "bits", "float", "0",
        "true bits of keys and values, all bytes included, 0.5..16; 0: 2.5, or the least of a short context",
        "ggml-kvq" },
    { "at", "int", "0", "tokens of the context at which those bits count; 0: the cache's own", "ggml-kvq" },
    { "level", "int", "-1", "steps up the ladder of layers and bits; -1: as many as `bits` allow", "ggml-kvq" },
    { "order", "text", "none", "layers in the order in which they rise, as 0.5.3; none: spread out", "ggml-kvq tune" },
    { "pairs", "none|norm|neox", "none",
        "with means, keys in halves of fast and slow rotary pairs: (2i, 2i+1) or (i, i + half a head); data say which",
        "ggml-kvq" },
    { "means", "auto|on|off", "auto", "take off calibrated means; auto: where there is data", "AQUA-KV section 3.1" },
    KVQ_OPTION_WINDOW("64", "AQUA-KV section 4"),
    { "sinks", "int", "4", "first cells of a stream kept in f16, 0..64", "AQUA-KV section 4" },
    { "scales", "f16|u8", "u8", "format of the scale of a cell", "ggml-kvq" },
    { "precision", "int8|f32", "int8", "arithmetic of attention over sealed pages", "ggml-kvq" },
    KVQ_OPTIONS_STATE,
    { "far", "none|f16|q8|q4", "none",
        "keep the rows as they came in host memory too and fetch the few that matter, as specache; not in `bits`",
        "SpeCache section 3.1" },
    { "top", "int", "64", "with far: cells fetched per KV head and token, 0..1024", "SpeCache section 4.1" },
    { "prompt", "exact|near", "exact", "with far: prompts read every row from there, or fetch as generation does",
        "SpeCache section 3.1" },
};

struct rung {
    int fast, slow, v;                              // bits; fast == slow: keys are one block
    int whole() const { return (fast + slow) / 2; } // where a head has no halves
};
static constexpr rung whole_rungs[] = { { 1, 1, 1 }, { 2, 2, 1 }, { 2, 2, 2 }, { 3, 3, 2 }, { 3, 3, 3 }, { 4, 4, 4 } };
static constexpr rung split_rungs[] = { { 0, 2, 1 }, { 0, 2, 2 }, { 0, 4, 2 }, { 0, 4, 3 }, { 2, 4, 3 }, { 2, 4, 4 },
    { 4, 4, 4 } };
static constexpr double USUAL_BITS = 2.5;

// means=auto: a plan without data, which counts as if there were some
static bool splits(const kvq_options & o) { return !o.is("pairs", "none") && !o.is("means", "off"); }
// how often a layer rises
static int n_rises(bool split) {
    return (int) (split ? sizeof(split_rungs) : sizeof(whole_rungs)) / (int) sizeof(rung) - 1;
}
static int top_of(const kvq_options & o) { return n_rises(splits(o)); }
static int n_levels(const kvq_options & o, int n_layer) { return top_of(o) * n_layer + 1; }

static kvq_method::limit most(const kvq_options & o) {
    const double bits = o.real("bits");
    return { o.num("level") >= 0 ? 0.0 : bits > 0 ? bits : USUAL_BITS, o.num("at"), bits > 0 };
}

// Layers spread out: 0, then the middle, then the quarters, ... (the bits of a counter reversed).
static std::vector<int> spread(int n) {
    std::vector<int> out;
    int size = 1;
    while (size < n) { size *= 2; }
    for (int i = 0; i < size; i++) {
        int at = 0;
        for (int bit = 1; bit < size; bit *= 2) { at = 2 * at + (i & bit ? 1 : 0); }
        if (at < n) { out.push_back(at); }
    }
    return out;
}

// Layers in the order in which they rise, each TOP times; empty with err set when the text is none. n_layer 0: not
// known.
static std::vector<int> order_of(const std::string & text, const int TOP, int n_layer, std::string & err) {
    std::vector<int> out;
    if (text == "none") {
        const std::vector<int> once = spread(std::max(n_layer, 1));
        for (int i = 0; i < 2 * TOP; i++) { // halves by turns: upper, upper, lower, upper, lower, ..., lower
            const bool upper = i == 0 || (i % 2 && i < 2 * TOP - 1);
            for (const int layer : once) {
                if ((2 * layer >= n_layer) == upper) { out.push_back(layer); }
            }
        }
        return out;
    }
    const char * p = text.c_str();
    bool ok = true;
    while (ok && *p) {
        char * end = nullptr;
        const long layer = strtol(p, &end, 10);
        ok = end != p && layer >= 0 && layer < 65536 && (!*end || (*end == '.' && end[1]));
        out.push_back((int) layer);
        p = *end ? end + 1 : end;
    }
    const size_t n = out.size() / TOP;
    std::vector<int> times(n, 0);
    for (const int layer : out) { ok = ok && (size_t) layer < n && ++times[(size_t) layer] <= TOP; }
    if (!ok || out.size() != n * TOP || (n_layer && n != (size_t) n_layer)) {
        err = "option order does not name each of " + (n_layer ? std::to_string(n_layer) + " layers " : "its layers ") +
            std::to_string(TOP) + " times: make it again with ggml-kvq tune, or set order=none";
        out.clear();
    }
    return out;
}

static kvq_status plan(
    const kvq_options & given, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err) {
    const double bits = given.real("bits");
    if (bits != 0 && (bits < 0.5 || bits > 16.0)) {
        err = "option bits=" + given.str("bits") + " is not 0 or within 0.5..16";
        return KVQ_ERR_OPTION;
    }
    if (given.num("at") < 0) {
        err = "option at=" + given.str("at") + " is not within 0..1000000";
        return KVQ_ERR_OPTION;
    }
    const bool checks = c.level < 0;
    const int n_layer = std::max(c.n_layer, c.number + 1), asked = given.num("level");
    if (asked >= n_levels(given, n_layer) && !checks) {
        err =
            "option level=" + given.str("level") + " is not within -1.." + std::to_string(n_levels(given, n_layer) - 1);
        return KVQ_ERR_OPTION;
    }
    const int level = std::max(asked >= 0 ? asked : c.level, 0);
    // an order that came with pairs is one of that ladder
    const bool ordered = splits(given) || given.is("pairs", "none");
    std::vector<int> order = order_of(ordered ? given.str("order") : "none", top_of(given), checks ? 0 : n_layer, err);
    if (order.empty() && checks) { // pairs come with data
        err.clear();
        order = order_of(given.str("order"), n_rises(true), 0, err);
    }
    if (order.empty()) { return KVQ_ERR_OPTION; }
    const auto end = order.begin() + std::min((size_t) level, order.size());
    const bool halves = splits(given) && c.shape.head_size_k % 16 == 0;
    const rung * const ladder = splits(given) ? split_rungs : whole_rungs;
    const int risen = (int) std::count(order.begin(), end, c.number);
    const rung & at = ladder[std::min(risen, top_of(given))];

    const bool far = !given.is("far", "none"), means = given.is("means", "on");
    if (far && (given.is("window", "auto") || !given.is("state", "rows") || (means && !given.is("far", "f16")))) {
        const char * key = given.is("window", "auto") ? "window" : !given.is("state", "rows") ? "state" : "means";
        err = "option " + std::string(key) + "=" + given.str(key) + " cannot go with far=" + given.str("far") +
            ": leave one of them out";
        return KVQ_ERR_OPTION;
    }
    if (far) {
        const kvq_status status = kvq_plan_fetch(given, KVQ_FETCH_NOW, "host", out, err);
        if (status != KVQ_OK) { return status; }
    }
    kvq_options o = given;
    o.values["grid"] = "d2";
    o.values["bits"] = "0";
    o.values["k_bits"] = std::to_string(halves ? at.slow : at.whole());
    o.values["v_bits"] = std::to_string(at.v);
    const kvq_status status = kvq_plan_lattice(o, c, out, err);
    if (status == KVQ_OK && halves && at.fast != at.slow) {
        out.k.split = given.is("pairs", "neox") ? KVQ_SPLIT_NEOX : KVQ_SPLIT_NORM;
        out.k.fast_bits = at.fast;
    }
    if (status != KVQ_OK || !means) { return status; }
    out.add("transform", { { "unrotate", 1 }, { "mean", 1 }, { "counts_shared", !c.prev } });
    return KVQ_OK;
}

static kvq_data data(const kvq_options & o) {
    return o.is("means", "on") ? kvq_data::NEEDS : o.is("means", "off") ? kvq_data::NONE : kvq_data::TAKES;
}

// Far rows of fewer bits than f16 cannot carry the positions that keys less their means need.
static void settle(kvq_options & o, const char * predictor, int) {
    const bool can = o.is("far", "none") || o.is("far", "f16");
    if (o.is("means", "auto")) { o.values["means"] = predictor && can ? "on" : "off"; }
}

extern const kvq_method kvq_method_auto;
const kvq_method kvq_method_auto = {
    { "auto", "the best composition for an amount of memory: bits by layer, means where there is data",
        "ggml-kvq; HIGGS, arXiv 2411.17525; AQUA-KV, arXiv 2501.19392", sizeof(options) / sizeof(options[0]), options },
    plan,
    false,
    data,
    settle,
    n_levels,
    most,
};

// One number instead of a method: `bits` true bits, window, scales and tables included, and the best composition for
// it.
// Keys and values are lattice blocks (HIGGS), less their means where there is data for that (AQUA-KV, predictor=bias).
// Each layer stands on a rung of code bits of keys and values; the ladder's levels raise one layer by one rung at a
// time, so bits between the grids are a mixture of layers:
//   rung                 0      1      2      3      4      5      6
//   pairs=norm|neox    0|2/1  0|2/2  0|4/2  0|4/3  2|4/3  2|4/4   4/4
//   pairs=none          1/1    2/1    2/2    3/2    3/3    4/4
//   pairs=sorted       keys: 1|2  1|3  1|4  2|4   4      values: 1  2  3  4
//     with coordinates       0|1   1  1|2  1|3  1|4  2|4   4
// w|s are bits of the weak and of the strong half of the rotary pairs of keys (types/lattice.h). Calibrated data say
// which pairs are strong, where a head turns as a whole:
//   sorted       in each head those whose key energy times query energy is large, by what an error adds to a logit
//   norm, neox   the slow ones: in some models fast pairs are noise behind the window, and best left out
// Which pays is tried when a model is measured (calibrate/halves.py). Either way there are halves only where means are
// taken off. The rungs are those for which there are kernels.
// `order` says what rises next: a layer, or with pairs=sorted the keys or the values of a layer, as 0v.3k.5v. Data hold
// it: of sorted keys, first use estimates it from what it measures anyway (calibrate/ladder.py). Without it
//   sorted       all layers rise together, in the order of DEFAULT_STEPS
//   others       the upper half of the layers stands one or two rungs above the lower half
// The last level has the highest rungs everywhere and scales of 8 bits instead of 4.
// With `far` the same blocks are the near copy of a second tier (SpeCache), which lies in host memory.
#include "method.h"
#include "types/lattice.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

static const kvq_option_info options[] = {
    { "bits", "float", "0",
        "true bits of keys and values in a context of `at` tokens, all bytes included, 0.5..16; 0: 2.5, or the least",
        "ggml-kvq" },
    { "at", "int", "0",
        "tokens of the context at which those bits count; 0: 131072. A shorter context has the same codes, and more "
        "bits with its f16 window",
        "ggml-kvq" },
    { "level", "int", "-1", "steps up the ladder of layers and bits; -1: as many as `bits` allow", "ggml-kvq" },
    { "order", "text", "none", "layers in the order in which they rise, as 0.5.3 or 0v.3k; none: spread out",
        "ggml-kvq tune" },
    { "pairs", "none|norm|neox|sorted", "none",
        "with means, keys in halves of rotary pairs: fast and slow ones, (2i, 2i+1) or (i, i + half a head), or sorted "
        "by "
        "what an error there costs; data say which",
        "ggml-kvq" },
    { "means", "auto|on|off", "auto", "take off calibrated means; auto: where there is data", "AQUA-KV section 3.1" },
    { "predictor", "none|auto|k|full|fold", "none",
        "what else is subtracted: predictions of keys, or of keys and values, from the layer before; auto: as "
        "calibrated. Far less is lost, reading costs far more",
        "AQUA-KV section 3.1" },
    { "predictors", "off|on", "off",
        "on: predictor=auto, and where no data hold predictors the model's first use fits them", "ggml-kvq" },
    { "coords", "int", "0",
        "with means: what the keys and values of all heads of a layer have in common in 4-bit coordinates, a head's "
        "share of them; even, 0..64; 0: none. Data say how many",
        "ggml-kvq" },
    { "coordinates", "auto|off|on", "auto",
        "on: coords as the data hold them, and where no data hold any the model's first use fits them; auto: so on a "
        "CPU, with what they go with",
        "ggml-kvq" },
    { "alone", "text", "none", "layers that are not predicted and have no coordinates, as 5.11.17; the data name them",
        "ggml-kvq" },
    { "weights", "auto|8|4", "auto", "bits of the predictors in memory; auto: as calibrated", "AQUA-KV section 4" },
    KVQ_OPTION_WINDOW("64", "AQUA-KV section 4"),
    { "sinks", "int", "4", "first cells of a stream kept in f16, 0..64", "AQUA-KV section 4" },
    { "scales", "auto|f16|u8|u4", "auto", "format of the scale of a cell; auto: u4, and u8 on the last level",
        "ggml-kvq" },
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
static constexpr int LONG_CONTEXT = 131072; // tokens at which bits count, in all caches of a model alike

// Of sorted keys, fast: the weak half; values have 1 + their rung bits. Keys have 4|4 bits only where values have 4,
// too: there are no kernels for others. These are one block with the gains, which errs less than halves of equal bits
// (docs/decisions/gains.md). Of what predictors leave they are halves.
static constexpr rung sorted_keys[] = { { 1, 2, 0 }, { 1, 3, 0 }, { 1, 4, 0 }, { 2, 4, 0 }, { 4, 4, 0 } };
static constexpr int KEY_RISES = sizeof(sorted_keys) / sizeof(rung) - 1, VALUE_RISES = 3;
// Coordinates hold most of a key, so there are rungs below.
static constexpr rung coord_keys[] = { { 0, 1, 0 }, { 1, 1, 0 } };
static constexpr int MORE_RISES = sizeof(coord_keys) / sizeof(rung);
static int more_rungs(const kvq_options & o) { return o.num("coords") > 0 ? MORE_RISES : 0; }
static rung sorted_rung(const kvq_options & o, int k, int v) {
    k -= more_rungs(o);
    if (k < 0) { return { coord_keys[k + MORE_RISES].fast, coord_keys[k + MORE_RISES].slow, 1 + v }; }
    const rung & keys = sorted_keys[v == VALUE_RISES ? k : std::min(k, KEY_RISES - 1)];
    return { keys.fast, keys.slow, 1 + v };
}
// Sides of all layers that rise one behind the other, without data of this model.
static constexpr const char *DEFAULT_STEPS = "vkkvkvk", *STEPS_OF_COORDS = "vkkkkvkvk";

// means=auto: a plan without data, which counts as if there were some
static bool predicts(const kvq_options & o) { return !o.is("predictor", "none") || o.is("predictors", "on"); }
// What coordinates do not go with, NULL: they do.
static const char * no_coords(const kvq_options & o) {
    return o.is("coordinates", "off") ? "coordinates"
        : o.is("predictors", "on")    ? "predictors"
        : predicts(o)                 ? "predictor"
        : !o.is("far", "none")        ? "far"
        : o.is("means", "off")        ? "means"
        : o.is("window", "auto")      ? "window"
                                      : nullptr;
}
// Coordinates of the data, and those of coordinates=auto, give way to them; what the user named is refused.
// So they do to keys that are not sorted, which would lose twice as much with them, and to an order of layers, which is
// one of keys without.
static bool keeps(const kvq_options & asked, const std::string & key) {
    const auto names = [&](const char * option, const char * same) {
        return asked.given.count(option) && !asked.is(option, same);
    };
    const bool fit = asked.is("coordinates", "on") || !(names("pairs", "sorted") || names("order", "none"));
    const bool none = asked.given.count("coords") && asked.num("coords") == 0;
    return key != "coords" || (fit && !none && !no_coords(asked));
}
static bool splits(const kvq_options & o) { return !o.is("pairs", "none") && !o.is("means", "off"); }
// what predictors leave is sorted wherever there are halves: fast pairs are no noise there
static bool sorts(const kvq_options & o) { return splits(o) && (predicts(o) || o.is("pairs", "sorted")); }
// What rises are layers, or sides of layers: 2 * layer + (1: values). How often one does, and a layer with its sides.
static int n_rises(const kvq_options & o, int riser) {
    return sorts(o) ? (riser % 2 ? VALUE_RISES : KEY_RISES + more_rungs(o))
                    : (int) (splits(o) ? sizeof(split_rungs) : sizeof(whole_rungs)) / (int) sizeof(rung) - 1;
}
static int n_rises_of_layer(const kvq_options & o) { return sorts(o) ? n_rises(o, 0) + VALUE_RISES : n_rises(o, 0); }
// scales=auto: above the highest rungs there is one more level, whose scales have 8 bits
static int n_levels(const kvq_options & o, int n_layer) {
    return n_rises_of_layer(o) * n_layer + 1 + o.is("scales", "auto");
}

static kvq_method::limit most(const kvq_options & o) {
    const double bits = o.real("bits");
    const int at = o.num("at") > 0 ? o.num("at") : LONG_CONTEXT;
    return { o.num("level") >= 0 ? 0.0 : bits > 0 ? bits : USUAL_BITS, at, bits > 0 };
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

// What rises, in that order, when no data say it.
static std::vector<int> usual_order(const kvq_options & o, int n_layer) {
    std::vector<int> out;
    const std::vector<int> once = spread(std::max(n_layer, 1));
    for (const char * side = more_rungs(o) ? STEPS_OF_COORDS : DEFAULT_STEPS; sorts(o) && *side; side++) {
        for (const int layer : once) { out.push_back(2 * layer + (*side == 'v')); }
    }
    const int n = sorts(o) ? 0 : 2 * n_rises(o, 0);
    for (int i = 0; i < n; i++) { // halves by turns: upper, upper, lower, upper, lower, ..., lower
        const bool upper = i == 0 || (i % 2 && i < n - 1);
        for (const int layer : once) {
            if ((2 * layer >= n_layer) == upper) { out.push_back(layer); }
        }
    }
    return out;
}

// An order of keys with coordinates, for keys without: each layer's first rises fall away.
static void drop_lowest(std::vector<int> & order) {
    const std::vector<int> with = order;
    std::vector<int> seen((size_t) *std::max_element(with.begin(), with.end()) + 1, 0);
    order.clear();
    for (const int x : with) {
        if (x % 2 || seen[(size_t) x]++ >= MORE_RISES) { order.push_back(x); }
    }
}

// What rises, in that order, each as often as it can; empty with err set when `order` is none. n_layer 0: not known.
static std::vector<int> order_of(const kvq_options & o, const std::string & text, int n_layer, std::string & err) {
    if (text == "none") { return usual_order(o, n_layer); }
    std::vector<int> out;
    const bool sorted = sorts(o); // asked once: a search over levels comes here for every layer
    const int most[2] = { n_rises(o, 0), n_rises(o, 1) };
    const char * p = text.c_str();
    bool ok = true;
    while (ok && *p) {
        char * end = nullptr;
        const long layer = strtol(p, &end, 10);
        ok = end != p && layer >= 0 && layer < 32768;
        p = end;
        if (sorted) {
            ok = ok && (*p == 'k' || *p == 'v');
            out.push_back((int) (2 * layer) + (*p == 'v'));
            p += ok;
        } else {
            out.push_back((int) layer);
        }
        ok = ok && (!*p || (*p == '.' && p[1]));
        p += ok && *p;
    }
    const size_t each = (size_t) n_rises_of_layer(o);
    const bool more = std::count(out.begin(), out.end(), 0) == KEY_RISES + MORE_RISES; // of the first layer's keys
    if (ok && sorted && more && !more_rungs(o)) { drop_lowest(out); }
    const size_t n = out.size() / each; // layers
    std::vector<int> times(2 * n, 0);
    for (const int x : out) { ok = ok && (size_t) x < n * (1 + sorted) && ++times[(size_t) x] <= most[x % 2]; }
    if (!ok || out.size() != n * each || (n_layer && n != (size_t) n_layer)) {
        const std::string times_each =
            sorted ? std::to_string(most[0]) + "k and " + std::to_string(VALUE_RISES) + "v" : std::to_string(each);
        err = "option order does not name each of " + (n_layer ? std::to_string(n_layer) + " layers " : "its layers ") +
            times_each + " times: make it again with ggml-kvq tune, or set order=none";
        out.clear();
    }
    return out;
}

// `predictor` by its own name. made_for: by the data, "": not known. Data without predictors are refused by the name of
// what they lack.
static void settle_predictor(kvq_options & o, const std::string & made_for) {
    if (predicts(o) && (o.is("predictor", "none") || o.is("predictor", "auto"))) {
        o.values["predictor"] = made_for == "k" || made_for == "fold" ? made_for : "full";
    }
}

// Layers of a cache share the rows that predictions are made from: 16 bits a key and value of one layer. Where they are
// few this is more than predictions save. Layers of a sliding window have bits enough without coordinates.
static bool stands_alone(const kvq_options & o, int number) {
    return ("." + o.str("alone") + ".").find("." + std::to_string(number) + ".") != std::string::npos;
}

// Coordinates in a basis (types/basis.h), which pages of keys hold.
static kvq_status plan_coords(
    const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err) {
    const int n = o.num("coords");
    const bool on = o.is("coordinates", "on"), none = on && o.given.count("coords") && !n;
    const char * other = none ? "coords" : no_coords(o);
    if (other && (n || on)) {
        const bool lacks_data = o.is("means", "off") && !o.given.count("means") && !strcmp(other, "means");
        err = "option " + (on ? "coordinates=on" : "coords=" + o.str("coords")) +
            (lacks_data ? " needs calibrated data: ggml-kvq calibrate --coords makes them"
                        : std::string(" cannot go with ") + other + "=" + o.str(other) + ": leave one of them out");
        return KVQ_ERR_OPTION;
    }
    if (!n || !o.is("means", "on") || stands_alone(o, c.number)) { return KVQ_OK; }
    out.k.coords = n;
    if (const char * why = kvq_lattice_refuse(out.k)) {
        err = "option coords=" + o.str("coords") + ": " + why;
        return KVQ_ERR_OPTION;
    }
    if (n * c.shape.n_head_kv < 4) {
        err = "option coords=" + o.str("coords") + " leaves layer " + std::to_string(c.shape.il) +
            " no coordinates beside their scale: 4 or more are needed for one head";
        return KVQ_ERR_OPTION;
    }
    return KVQ_OK;
}

static kvq_status plan(
    const kvq_options & asked_for, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err) {
    kvq_options given = asked_for;
    settle_predictor(given, "");
    if (given.is("predictors", "on") && given.given.count("predictor") && asked_for.is("predictor", "none")) {
        err = "option predictors=on cannot go with predictor=none: leave one of them out";
        return KVQ_ERR_OPTION;
    }
    const bool predicted = predicts(given) && !stands_alone(given, c.number);
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
    std::vector<int> order = order_of(given, ordered ? given.str("order") : "none", checks ? 0 : n_layer, err);
    for (const char * pairs : { "sorted", "norm" }) { // pairs come with data
        if (!order.empty() || !checks) { break; }
        kvq_options with_data = given;
        std::string of_those;
        with_data.values["pairs"] = pairs;
        order = order_of(with_data, given.str("order"), 0, of_those);
    }
    if (order.empty()) { return KVQ_ERR_OPTION; }
    err.clear();
    const auto end = order.begin() + (long) std::min((size_t) level, order.size());
    const auto risen = [&](int what) {
        return std::min((int) std::count(order.begin(), end, what), n_rises(given, what));
    };
    const bool halves = splits(given) && c.shape.head_size_k % 16 == 0;
    const rung at = predicted && !c.prev // nothing predicts it: AQUA-KV section 4
        ? rung{ 4, 4, 4 }
        : sorts(given) ? sorted_rung(given, risen(2 * c.number), risen(2 * c.number + 1))
                       : (splits(given) ? split_rungs : whole_rungs)[risen(c.number)];

    const bool far = !given.is("far", "none"), means = given.is("means", "on");
    if (predicts(given) && (far || given.is("means", "off") || given.is("window", "auto"))) {
        const char * key = far ? "far" : given.is("window", "auto") ? "window" : "means";
        const std::string words =
            asked_for.is("predictor", "none") ? "predictors=on" : "predictor=" + asked_for.str("predictor");
        err = "option " + words + " cannot go with " + key + "=" + given.str(key) + ": leave one of them out";
        return KVQ_ERR_OPTION;
    }
    if (far && (given.is("window", "auto") || !given.is("state", "rows") || (means && !given.is("far", "f16")))) {
        const char * key = given.is("window", "auto") ? "window" : !given.is("state", "rows") ? "state" : "means";
        const bool usual = !strcmp(key, "means"); // on unless it is said to be off
        err = "option " + std::string(key) + "=" + given.str(key) + " cannot go with far=" + given.str("far") +
            (usual ? ": set means=off, or far=f16" : ": leave one of them out");
        return KVQ_ERR_OPTION;
    }
    if (far) {
        const kvq_status status = kvq_plan_fetch(given, KVQ_FETCH_NOW, "host", out, err);
        if (status != KVQ_OK) { return status; }
    }
    kvq_options o = given;
    o.values["grid"] = "d2";
    o.values["bits"] = "0";
    o.values["k_bits"] = std::to_string(halves ? at.slow : std::max(at.whole(), 1));
    o.values["v_bits"] = std::to_string(at.v);
    if (o.is("scales", "auto")) { o.values["scales"] = level > (int) order.size() ? "u8" : "u4"; }
    const kvq_status status = kvq_plan_lattice(o, c, out, err);
    // sorted keys lie in their order already, strong pairs where slow ones are; in one block they have its gains alone
    const bool sorted = sorts(given) && halves && !(predicted && !c.prev);
    const bool split = halves && (at.fast != at.slow || (sorted && predicted));
    if (status == KVQ_OK && split) {
        out.k.split = given.is("pairs", "neox") && !sorts(given) ? KVQ_SPLIT_NEOX : KVQ_SPLIT_NORM;
        out.k.fast_bits = at.fast;
    }
    const kvq_status coords = status == KVQ_OK ? plan_coords(given, c, out, err) : status;
    if (coords != KVQ_OK || !means) { return coords; }
    out.add("transform",
        { { "unrotate", 1 }, { "mean", 1 },
            { "sort",
                !sorted     ? 0
                    : split ? KVQ_SORT_BLOCKS
                            : KVQ_SORT_GAINS },
            { "counts_shared", !c.prev } });
    if (out.k.coords) { out.add("coords", { { "n", out.k.coords } }); }
    if (!predicted) { return KVQ_OK; }
    const kvq_status chained = kvq_plan_predictor(given, c, out, err);
    const size_t cure = chained == KVQ_OK ? std::string::npos : err.find("predictor=bias"); // of aqua
    if (cure != std::string::npos) {
        err.replace(
            cure, strlen("predictor=bias"), asked_for.is("predictor", "none") ? "predictors=off" : "predictor=none");
    }
    return chained;
}

static kvq_data data(const kvq_options & o) {
    return o.is("means", "on") || predicts(o) || o.is("coordinates", "on") ? kvq_data::NEEDS
        : o.is("means", "off")                                             ? kvq_data::NONE
                                                                           : kvq_data::TAKES;
}

// Far rows of fewer bits than f16 cannot carry the positions that keys less their means need.
static void settle(kvq_options & o, const char * predictor, int weight_bits) {
    settle_predictor(o, predictor ? predictor : "");
    if (o.is("weights", "auto")) { o.values["weights"] = weight_bits == 4 ? "4" : "8"; }
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
    keeps,
};

// SpeCache (Jie et al., ICML 2025, arXiv 2503.16163): a copy of every cell in one or two bits where attention
// computes, and the rows as they came in another memory, of which the `top` cells per KV head are fetched that the
// copy gives most attention (section 3; policy/fetch.h).
//   near=aqua     copies less calibrated means (aqua's predictor=bias)
//   fetch=now     the step that reads them fetches them: no guess, and no program needs to know
//   fetch=ahead   the last token of a step picks for the next one (section 3.3: that token is a guess of the next);
//                 rows stay until others have been picked more lately
// The paper's copies are KIVI's: 2 bits in groups of 64, and 1 bit with levels at the quartiles of the range (section
// 3.2: z = (3 min + max)/4, s = (max - min)/2), which is eta = 1/4.
#include "method.h"
#include "types/far_rows.h"

#include <algorithm>

static constexpr int MOST_KEPT = 2048; // rows of a KV head that stay

static const kvq_option_info options[] = {
    { "near", "auto|higgs|kivi|aqua", "auto",
        "copy that attention computes on; aqua: higgs less calibrated means; auto: aqua with data for it, else higgs",
        "SpeCache section 3.2" },
    { "preset", "none|paper1|paper2", "none", "the paper's copies: kivi in 1 bit (eta=0.25) or 2, group and window 64",
        "SpeCache section 4.1" },
    { "bits", "int", "2", "code bits of keys and values of the copy, 1..4", "SpeCache section 4.1" },
    { "k_bits", "int", "0", "code bits of keys; 0: as bits", "SpeCache section 4.1" },
    { "v_bits", "int", "0", "code bits of values; 0: as bits", "SpeCache section 4.1" },
    { "top", "int", "64", "cells fetched per KV head and token, 0..1024", "SpeCache section 4.1" },
    { "far", "f16|q8|q4", "f16", "format of the rows that are fetched", "SpeCache section 3.1" },
    { "place", "host|device|PATH", "host",
        "where those rows lie: PATH, which has a /, is a file that does not exist yet (CPU)", "SpeCache section 3.1" },
    { "fetch", "now|ahead|off", "now", "when rows are fetched: by the step that picks them, or for the next one",
        "SpeCache section 3.3" },
    { "kept", "int", "0",
        "fetch=ahead: rows per KV head that stay, those picked last, top..2048; 0: 4 times top, at most 2048",
        "ggml-kvq" },
    { "prompt", "exact|near", "exact", "prompts read every row from far, or fetch as generation does",
        "SpeCache section 3.1" },
    { "levels", "ends|mid", "ends", "near=kivi, ends: codes round to the end points; mid: equal bins, mid-points",
        "ggml-kvq" },
    { "eta", "float", "0", "near=kivi: end points pulled inward by this share of the range, 0..0.49",
        "SpeCache section 3.2" },
    { "group", "int", "32", "near=kivi: cells per key group and channels per value group: 16 32 64 128",
        "SpeCache section 4.1" },
    { "group_v", "int", "0", "near=kivi: channels per value group; 0: as group, at most the head size",
        "SpeCache section 4.1" },
    { "grid", "auto|d2|d4|d8", "auto", "near=higgs, channels per index; auto: 2", "HIGGS section 3" },
    { "window", "int", "64", "newest cells kept in f16, 0..4096", "SpeCache section 4.1 (residual length)" },
    { "sinks", "int", "4", "first cells of a stream kept in f16, 0..64", "AQUA-KV section 4" },
    { "scales", "f16|u8", "u8", "format of scales and zeros; u8 halves them", "ggml-kvq" },
    { "precision", "int8|f32", "int8", "arithmetic of attention over the copy", "ggml-kvq" },
};

// What a preset sets unless the user did.
static kvq_options with_preset(const kvq_options & given) {
    kvq_options o = given;
    o.values["predictor"] = "bias"; // of near=aqua
    o.values["weights"] = "8";
    o.values["first_bits"] = "0";
    if (given.is("preset", "none")) { return o; }
    const bool one = given.is("preset", "paper1");
    const std::pair<const char *, const char *> sets[] = { { "near", "kivi" }, { "bits", one ? "1" : "2" },
        { "eta", one ? "0.25" : "0" }, { "group", "64" }, { "sinks", "0" }, { "scales", "f16" } };
    for (const auto & set : sets) {
        if (!given.given.count(set.first)) { o.values[set.first] = set.second; }
    }
    return o;
}

kvq_status kvq_plan_fetch(
    const kvq_options & o, int fetch, const std::string & place, kvq_layer_plan & out, std::string & err) {
    const int top = o.num("top");
    if (top < 0 || top > 1024) {
        err = "option top=" + o.str("top") + " is not within 0..1024";
        return KVQ_ERR_OPTION;
    }
    int kept = 0;
    if (fetch == KVQ_FETCH_AHEAD) {
        kept = o.num("kept") ? o.num("kept") : std::min(4 * top, MOST_KEPT);
        if (kept < top || kept > MOST_KEPT) {
            err = "option kept=" + o.str("kept") + " is not within top.." + std::to_string(MOST_KEPT) +
                " (top=" + std::to_string(top) + ")";
            return KVQ_ERR_OPTION;
        }
    }
    const int format = o.is("far", "f16") ? KVQ_FAR_F16 : o.is("far", "q8") ? KVQ_FAR_Q8 : KVQ_FAR_Q4;
    const int exact = o.is("prompt", "exact");
    out.add("fetch", { { "top", top }, { "format", format }, { "fetch", fetch }, { "kept", kept }, { "exact", exact } },
        place);
    return KVQ_OK;
}

static kvq_status plan(
    const kvq_options & given, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err) {
    const kvq_options o = with_preset(given);
    if (o.is("near", "aqua") && !o.is("far", "f16")) { // rows carry their positions in bits that others lack
        err = "option far=" + o.str("far") + " cannot go with near=aqua: set far=f16 or near=higgs";
        return KVQ_ERR_OPTION;
    }
    const int fetch = o.is("fetch", "now") ? KVQ_FETCH_NOW : o.is("fetch", "ahead") ? KVQ_FETCH_AHEAD : KVQ_FETCH_OFF;
    const kvq_status status = kvq_plan_fetch(o, fetch, o.str("place"), out, err);
    if (status != KVQ_OK) { return status; }
    const kvq_status near = o.is("near", "kivi") ? kvq_plan_kivi(o, c, out, err)
        : o.is("near", "aqua")                   ? kvq_plan_aqua(o, c, out, err)
                                                 : kvq_plan_lattice(o, c, out, err);
    out.place = kvq_place::DEVICE; // the option is that of far rows
    return near;
}

static kvq_data data(const kvq_options & given) {
    const kvq_options o = with_preset(given);
    return o.is("near", "aqua") ? kvq_data::NEEDS : o.is("near", "auto") ? kvq_data::TAKES : kvq_data::NONE;
}

static void settle(kvq_options & o, const char * predictor, int) {
    const bool is_free = o.is("near", "auto") && o.is("preset", "none");
    if (is_free) { o.values["near"] = predictor && o.is("far", "f16") ? "aqua" : "higgs"; }
}

extern const kvq_method kvq_method_specache;
const kvq_method kvq_method_specache = {
    { "specache", "1-2 bits of every cell near, the exact cell far, the few that matter fetched",
        "SpeCache, arXiv 2503.16163", sizeof(options) / sizeof(options[0]), options },
    plan,
    false,
    data,
    settle,
};

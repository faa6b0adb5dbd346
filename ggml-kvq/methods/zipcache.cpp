// ZipCache (He et al. 2024, arXiv 2405.14256): the cells that get most attention in `hi` bits, the others in `lo`.
// Which ones is decided per KV head when a page seals, from the attention of a few probe rows; keys and values use
// the same set.
//   bits a value = (salient * hi + (1 - salient) * lo) + parameters
// The interval of the paper (100 generated tokens) is the page here, so that parameters are frozen with it; it must
// hold whole kernels' blocks of either kind, hence multiples of 32.
#include "method.h"
#include "types/mixed.h"

#include <cmath>

static const kvq_option_info options[] = {
    { "hi", "int", "4", "code bits of salient cells, 1..4", "ZipCache section 5.1" },
    { "lo", "int", "2", "code bits of the other cells, 1..4", "ZipCache section 5.1" },
    { "salient", "float", "0.6", "share of salient cells, 0..1; of an interval the nearest multiple of 32 cells",
        "ZipCache section 5.2" },
    { "interval", "int", "160", "cells compressed together, 32..256, a multiple of 32", "ZipCache section 4.4 (100)" },
    { "probe", "float", "0.1", "share of query rows that score cells: half the latest, half random; above 0, up to 1",
        "ZipCache section 4.3" },
    { "normalise", "bool", "true",
        "divide a score by the probe rows that could see the cell; false: accumulated scores", "ZipCache section 4.2" },
    { "eta", "float", "0", "end points of the lo cells pulled inward by this share of the range, 0..0.49",
        "XQuant section 3.2" },
    { "keep", "float", "1", "share of a prompt's cells that stay, those of the highest scores, above 0; 1: all",
        "MiniKV section 4.1" },
    { "recent", "float", "0.25",
        "with keep below 1: the newest cells that stay whatever their score, share of the prompt, up to keep",
        "MiniKV section 4.1" },
    { "window", "int", "0", "newest cells kept in f16 besides the page being filled, 0..4096", "ggml-kvq" },
    { "sinks", "int", "0", "first cells of a stream kept in f16, 0..64", "ggml-kvq" },
    { "scales", "f16|u8|u4", "u4", "format of scales and zeros; u8 halves them, u4 takes 4 bits for those of values",
        "ggml-kvq" },
    { "precision", "int8|f32", "int8", "arithmetic of attention over sealed pages", "ggml-kvq" },
    KVQ_OPTIONS_STATE,
};

static std::string bad(const kvq_options & o, const char * key, const char * range) {
    return "option " + std::string(key) + "=" + o.str(key) + " is not within " + range;
}

static kvq_status plan(const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err) {
    const int page = o.num("interval");
    const float r = o.real("salient");
    if (o.num("hi") < 1 || o.num("hi") > 4) {
        err = bad(o, "hi", "1..4");
    } else if (o.num("lo") < 1 || o.num("lo") > 4) {
        err = bad(o, "lo", "1..4");
    } else if (!(r >= 0.0f && r <= 1.0f)) {
        err = bad(o, "salient", "0..1");
    } else if (page < 32 || page > 256 || page % 32) {
        err = "option interval=" + o.str("interval") + " is not a multiple of 32 within 32..256";
    } else if (!(o.real("probe") > 0.0f && o.real("probe") <= 1.0f)) {
        err = "option probe=" + o.str("probe") + " is not above 0 and at most 1";
    } else if (!(o.real("eta") >= 0.0f && o.real("eta") < 0.5f)) {
        err = bad(o, "eta", "0..0.49");
    } else if (!(o.real("keep") > 0.0f && o.real("keep") <= 1.0f)) {
        err = "option keep=" + o.str("keep") + " is not above 0 and at most 1";
    } else if (!(o.real("recent") >= 0.0f && o.real("recent") <= o.real("keep"))) {
        err = bad(o, "recent", ("0..keep, which is " + o.str("keep")).c_str());
    }
    if (!err.empty() || kvq_plan_open(o, out, err) != KVQ_OK) { return KVQ_ERR_OPTION; }
    const int n_hi = 32 * (int) std::lround(r * (float) page / 32.0f);
    for (int v = 0; v < 2; v++) {
        kvq_codec x = {};
        x.type = KVQ_TYPE_MIXED;
        x.role = v ? KVQ_ROLE_V : KVQ_ROLE_K;
        x.bits = o.num("lo");
        x.hi = o.num("hi");
        x.n_hi = n_hi;
        x.n_cells = page;
        x.head_size = v ? c.shape.head_size_v : c.shape.head_size_k;
        x.group = v ? x.head_size : page;
        // a channel of keys may lie far from the others
        x.scale = o.is("scales", "f16") ? 0 : v && o.is("scales", "u4") ? 2 : 1;
        x.eta = o.real("eta");
        if (const char * why = kvq_mixed_refuse(x)) {
            err = "layer " + std::to_string(c.shape.il) + " with head size " + std::to_string(x.head_size) + ": " + why;
            return KVQ_ERR_SHAPE;
        }
        (v ? out.v : out.k) = x;
    }
    out.flags = o.is("precision", "f32") ? KVQ_ATTN_F32 : 0;
    const bool evicts = o.real("keep") < 1.0f; // three classes: salient, others, evicted
    out.add("probe",
        { { "share", o.real("probe") }, { "normalise", o.flag("normalise") },
            { "min_rows", evicts && !n_hi ? KVQ_PROMPT_ROWS : 1 } });
    out.add("choose");
    if (evicts) { out.add("evict", { { "keep", o.real("keep") }, { "recent", o.real("recent") } }); }
    return KVQ_OK;
}

extern const kvq_method kvq_method_zipcache;
const kvq_method kvq_method_zipcache = {
    { "zipcache", "4 bits for cells that get most attention, 2 for the others", "ZipCache, arXiv 2405.14256",
        sizeof(options) / sizeof(options[0]), options },
    plan,
};

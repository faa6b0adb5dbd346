// MiniKV (Sharma et al. 2024, arXiv 2411.18077): of a prompt, the cells that got most attention ("heavy hitters") and
// the newest ones stay, in 2-bit groups of 16; generated cells all stay while there is room (policy/evict.h).
//   share of layer l of L:  uniform  hh + rw        pyramid  hh * ((2 - 1/d) + (2/d - 2) * l/(L - 1)) + rw      mean
//       hh + rw
// Lower layers keep more (section 3.1.3).
#include "method.h"

#include <algorithm>

static const kvq_option_info options[] = {
    { "hh", "float", "0.25", "heavy hitters kept, share of the prompt, 0..1", "MiniKV section 4.1" },
    { "rw", "float", "0.25", "newest cells kept, share of the prompt, 0..1", "MiniKV section 4.1" },
    { "budget", "uniform|pyramid", "uniform", "pyramid: lower layers keep more heavy hitters, the mean stays",
        "MiniKV section 3.1.3" },
    { "depth", "int", "7", "of the pyramid: the last layer keeps hh/depth, the first 2*hh less that; 1..64",
        "MiniKV section 3.1.3" },
    { "bits", "int", "2", "code bits of keys and values, 1..4", "MiniKV section 3.2" },
    { "eta", "float", "0", "end points pulled inward by this share of the range, 0..0.49", "XQuant section 3.2" },
    { "group", "int", "16", "cells per key group and channels per value group: 16 32 64 128", "MiniKV section 3.2" },
    { "group_v", "int", "0", "channels per value group; 0: as group, at most the head size", "MiniKV section 3.2" },
    { "window", "int", "128", "newest cells kept in f16, 0..4096", "MiniKV section 3.2 (residual length)" },
    { "sinks", "int", "0", "first cells of a stream kept in f16, 0..64", "ggml-kvq" },
    { "scales", "f16|u8", "u8", "format of scales and zeros; u8 halves them", "ggml-kvq" },
    { "precision", "int8|f32", "int8", "arithmetic of attention over sealed pages", "ggml-kvq" },
    KVQ_OPTION_PLACE,
};

static kvq_status plan(const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err) {
    const kvq_status status = kvq_plan_affine(o, c, out, err);
    if (status != KVQ_OK) { return status; }
    const float hh = o.real("hh"), rw = o.real("rw"), d = (float) o.num("depth");
    const auto bad = [&](const char * key, const char * range) {
        err = "option " + std::string(key) + "=" + o.str(key) + " is not within " + range;
    };
    if (!(hh >= 0.0f && hh <= 1.0f)) {
        bad("hh", "0..1");
    } else if (!(rw >= 0.0f && rw <= 1.0f)) {
        bad("rw", "0..1");
    } else if (!(hh + rw > 0.0f && hh + rw <= 1.0f)) {
        err = "options hh=" + o.str("hh") + " and rw=" + o.str("rw") + " must add up to more than 0 and at most 1";
    } else if (o.num("depth") < 1 || o.num("depth") > 64) {
        bad("depth", "1..64");
    } else if (o.num("bits") < 1 || o.num("bits") > 4) {
        bad("bits", "1..4");
    } else if (!(o.real("eta") >= 0.0f && o.real("eta") < 0.5f)) {
        bad("eta", "0..0.49");
    }
    if (!err.empty()) { return KVQ_ERR_OPTION; }
    out.k.bits = out.v.bits = o.num("bits");
    out.k.eta = out.v.eta = o.real("eta");
    const float depth = c.n_layer > 1 ? (float) c.number / (float) (c.n_layer - 1) : 0.5f;
    const float share = o.is("budget", "pyramid") ? hh * ((2.0f - 1.0f / d) + (2.0f / d - 2.0f) * depth) : hh;
    out.add("probe", { { "share", 1.0 }, { "normalise", 0.0 }, { "min_rows", KVQ_PROMPT_ROWS } }); // every row
    out.add("evict", { { "keep", std::min(share + rw, 1.0f) }, { "recent", rw } });
    return KVQ_OK;
}

extern const kvq_method kvq_method_minikv;
const kvq_method kvq_method_minikv = {
    { "minikv", "heavy hitters and newest cells of a prompt in 2 bits, the rest evicted", "MiniKV, arXiv 2411.18077",
        sizeof(options) / sizeof(options[0]), options },
    plan,
};

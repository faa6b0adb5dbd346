// AQUA-KV (Shutova et al. 2025, arXiv 2501.19392): lattice blocks of what a prediction leaves. Keys are kept before
// rotary embedding; the first cells stay f16, the first layer takes more bits.
//   predictor=bias  subtracts the calibrated mean of every channel (the paper's "bias only"). Values get theirs back
//   once per query,
//                   because attention weights sum to one; keys while they are rotated forward.
//   predictor=k     and keys what the layer before says of them; full: values too (section 3.1, policy/chain.h);
//   fold:           values from keys of both layers, whose products a query makes once instead of every cell
//   predictor=auto  what the calibrated data was made for; bias without data
#include "method.h"

#include <algorithm>

static const kvq_option_info options[] = {
    { "predictor", "auto|none|bias|k|full|fold", "auto",
        "what is subtracted before encoding: nothing, channel means, and predictions of keys, or of both; fold: of "
        "both from keys alone; auto: as calibrated",
        "AQUA-KV section 3.1 and appendix" },
    { "weights", "auto|8|4", "auto",
        "bits of the predictors in memory; auto: 4 when the calibrated data holds them so, else 8",
        "AQUA-KV section 4 (GPTQ)" },
    { "bits", "int", "2", "code bits of keys and values, 1..4", "AQUA-KV section 3.2" },
    { "k_bits", "int", "0", "code bits of keys; 0: as bits", "AQUA-KV section 3.2" },
    { "v_bits", "int", "0", "code bits of values; 0: as bits", "AQUA-KV section 3.2" },
    { "first_bits", "int", "4", "least code bits in the first layer, 0..4", "AQUA-KV section 4" },
    KVQ_OPTION_WINDOW("128", "AQUA-KV section 4"),
    KVQ_OPTIONS_LATTICE("4"),
};

kvq_status kvq_plan_predictor(
    const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err) {
    const bool fold = o.is("predictor", "fold"), values = fold || o.is("predictor", "full");
    if (out.fills) {
        err = "option window=auto does not go with predictor=" + o.str("predictor") +
            ", which reads a layer through the pages below it: give a number, or use predictor=bias";
        return KVQ_ERR_OPTION;
    }
    const int width_k = c.shape.n_head_kv * c.shape.head_size_k, width_v = c.shape.n_head_kv * c.shape.head_size_v;
    if (c.prev &&
        (c.prev->n_head_kv * c.prev->head_size_k != width_k || c.prev->n_head_kv * c.prev->head_size_v != width_v)) {
        err = "layer " + std::to_string(c.shape.il) +
            " has another KV width than the layer before, which cannot predict it: use predictor=bias";
        return KVQ_ERR_SHAPE;
    }
    out.add("chain",
        { { "values", values }, { "fold", fold }, { "k_from_k", c.prev ? width_k : 0 },
            { "v_from_k", c.prev && values ? width_k : 0 },
            { "v_from_below",
                !c.prev || !values ? 0
                    : fold         ? width_k
                                   : width_v },
            { "weight_bits", o.is("weights", "4") ? 4 : 8 }, { "counts_shared", !c.prev } });
    return KVQ_OK;
}

kvq_status kvq_plan_aqua(const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err) {
    const kvq_status status = kvq_plan_lattice(o, c, out, err);
    if (status != KVQ_OK) { return status; }
    const int first = o.num("first_bits");
    if (first < 0 || first > 4) {
        err = "option first_bits=" + o.str("first_bits") + " is not within 0..4";
        return KVQ_ERR_OPTION;
    }
    if (c.shape.n_head_kv * c.shape.head_size_k < 64) {
        err = "layer " + std::to_string(c.shape.il) + " has " +
            std::to_string(c.shape.n_head_kv * c.shape.head_size_k) + " key channels: 64 are needed, use higgs";
        return KVQ_ERR_SHAPE;
    }
    const bool chained = o.is("predictor", "k") || o.is("predictor", "full") || o.is("predictor", "fold");
    const bool is_first = c.number == 0 || (chained && !c.prev); // what nothing predicts needs the bits as well
    for (kvq_codec * x : { &out.k, &out.v }) {
        if (is_first && first > x->bits) {
            x->bits = first;
            x->group = 2; // the only grids above two bits
        }
    }
    // the first layer of a cache pays for what all of them share
    out.add("transform", { { "unrotate", 1 }, { "mean", !o.is("predictor", "none") }, { "counts_shared", !c.prev } });
    return chained ? kvq_plan_predictor(o, c, out, err) : KVQ_OK;
}

static kvq_data data(const kvq_options & o) { return o.is("predictor", "none") ? kvq_data::NONE : kvq_data::NEEDS; }

static void settle(kvq_options & o, const char * made_for, int weight_bits) {
    const std::string predictor = made_for ? made_for : "";
    if (o.is("predictor", "auto")) {
        o.values["predictor"] = predictor == "full" || predictor == "fold" || predictor == "k" ? predictor : "bias";
    }
    if (o.is("weights", "auto")) { o.values["weights"] = weight_bits == 4 ? "4" : "8"; }
}

extern const kvq_method kvq_method_aqua;
const kvq_method kvq_method_aqua = {
    { "aqua", "grid indices of un-rotated keys and values less their calibrated means", "AQUA-KV, arXiv 2501.19392",
        sizeof(options) / sizeof(options[0]), options },
    kvq_plan_aqua,
    false,
    data,
    settle,
};

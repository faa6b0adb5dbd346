// KIVI (Liu et al. 2024, arXiv 2402.02750): keys per channel over groups of cells, values per token over groups of
// channels,
// the newest cells in f16.   z = min, s = (max - min)/(2^bits - 1), code = round((x - z)/s)
#include "method.h"

static const kvq_option_info options[] = {
    { "bits", "int", "2", "code bits of keys and values, 1..4", "KIVI section 3" },
    { "k_bits", "int", "0", "code bits of keys; 0: as bits", "KIVI section 3" },
    { "v_bits", "int", "0", "code bits of values; 0: as bits", "KIVI section 3" },
    { "levels", "ends|mid", "ends", "ends: codes round to the end points; mid: equal bins, mid-points", "ggml-kvq" },
    { "eta", "float", "0", "end points pulled inward by this share of the range, 0..0.49", "XQuant section 3.2" },
    KVQ_OPTIONS_AFFINE,
};

kvq_status kvq_plan_kivi(const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err) {
    const kvq_status status = kvq_plan_affine(o, c, out, err);
    if (status != KVQ_OK) { return status; }
    if (!(o.real("eta") >= 0.0f && o.real("eta") < 0.5f)) {
        err = "option eta=" + o.str("eta") + " is not within 0..0.49";
        return KVQ_ERR_OPTION;
    }
    const char * keys[2] = { "k_bits", "v_bits" };
    kvq_codec * codecs[2] = { &out.k, &out.v };
    for (int i = 0; i < 2; i++) {
        const char * key = o.num(keys[i]) ? keys[i] : "bits";
        const int bits = o.num(key);
        if (bits < 1 || bits > 4) {
            err = "option " + std::string(key) + "=" + std::to_string(bits) + " is not within 1..4";
            return KVQ_ERR_OPTION;
        }
        codecs[i]->bits = bits;
        codecs[i]->levels = o.is("levels", "mid");
        // equal bins are the same blocks with end points pulled in by half a bin
        codecs[i]->eta = codecs[i]->levels ? 0.5f / (float) (1 << bits) : o.real("eta");
    }
    return KVQ_OK;
}

extern const kvq_method kvq_method_kivi;
const kvq_method kvq_method_kivi = {
    { "kivi", "1-4 bit keys per channel and values per token, f16 window", "KIVI, arXiv 2402.02750",
        sizeof(options) / sizeof(options[0]), options },
    kvq_plan_kivi,
    true,
};

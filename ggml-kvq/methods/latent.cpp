// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). A cell keeps a latent vector and the
// rotary part of its key. The latent is read as key and as value from the same codes, so one format holds both: the
// method's format of keys.
#include "method.h"

bool kvq_plan_latent(
    kvq_layer_plan & plan, const kvq_method & method, const kvq_layer_shape & shape, int values, std::string & err) {
    const std::string layer = "layer " + std::to_string(shape.il);
    if (!method.latent) {
        err = layer + " uses multi-head latent attention, which method " + method.info.name +
            " cannot hold: use kivi, higgs or f16";
        return false;
    }
    if (plan.k.bits != plan.v.bits) {
        err = layer +
            " uses multi-head latent attention, whose values are its keys: give bits, or the same k_bits and v_bits";
        return false;
    }
    plan.v = plan.k;
    plan.v.head_size = shape.head_size_v;
    plan.flags |= values == shape.head_size_k ? KVQ_ATTN_LATENT : KVQ_ATTN_LATENT_ALL;
    return true;
}

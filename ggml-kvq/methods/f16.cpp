// The control arm: every cell in f16, in our pages and through our attention. Must equal upstream.
#include "method.h"

static kvq_status plan(const kvq_options &, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err) {
    if (c.shape.head_size_k % 8 || c.shape.head_size_v % 8) {
        err = "layer " + std::to_string(c.shape.il) + " has head size " + std::to_string(c.shape.head_size_k) +
            ": a multiple of 8 is needed";
        return KVQ_ERR_SHAPE;
    }
    kvq_codec k = {};
    k.type = KVQ_TYPE_F16;
    k.bits = 16;
    k.n_cells = 32;
    k.group = 32;
    k.role = KVQ_ROLE_K;
    k.head_size = c.shape.head_size_k;
    kvq_codec v = k;
    v.role = KVQ_ROLE_V;
    v.head_size = c.shape.head_size_v;
    out.k = k;
    out.v = v;
    out.window = 0;
    return KVQ_OK;
}

extern const kvq_method kvq_method_f16;
const kvq_method kvq_method_f16 = {
    { "f16", "16-bit cells, the control arm: equals upstream's cache", "-", 0, nullptr },
    plan,
    true,
};

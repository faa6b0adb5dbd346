// The plan shared by methods that keep rotated keys and values in lattice blocks.
#include "method.h"
#include "types/lattice.h"

#include <algorithm>

// "auto" takes d = 2, the fastest; "d4" and "d8" hold a little more per bit at one and two bits
static int vector_size(const kvq_options & o) { return o.is("grid", "d4") ? 4 : o.is("grid", "d8") ? 8 : 2; }

kvq_status kvq_plan_lattice(
    const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err) {
    if (kvq_plan_open(o, out, err) != KVQ_OK) { return KVQ_ERR_OPTION; }
    const char * keys[2] = { "k_bits", "v_bits" };
    for (int i = 0; i < 2; i++) {
        const char * key = o.num(keys[i]) ? keys[i] : "bits";
        const int bits = o.num(key);
        if (bits < 1 || bits > 4) {
            err = "option " + std::string(key) + "=" + std::to_string(bits) + " is not within 1..4";
            return KVQ_ERR_OPTION;
        }
        kvq_codec x = {};
        x.type = KVQ_TYPE_LATTICE;
        x.role = i ? KVQ_ROLE_V : KVQ_ROLE_K;
        x.bits = bits;
        x.group = vector_size(o);
        x.scale = o.is("scales", "f16") ? 0 : o.is("scales", "u4") ? 2 : 1;
        x.n_cells = 32;
        x.head_size = i ? c.shape.head_size_v : c.shape.head_size_k;
        if (!kvq_grid_find(x.group, bits)) {
            err = "option grid=" + o.str("grid") + " has no points for " + key + "=" + std::to_string(bits) +
                ": d4 holds 1 and 2 bits, d8 holds 1";
            return KVQ_ERR_OPTION;
        }
        if (const char * why = kvq_lattice_refuse(x)) {
            err = "layer " + std::to_string(c.shape.il) + " with head size " + std::to_string(x.head_size) + ": " + why;
            return KVQ_ERR_SHAPE;
        }
        (i ? out.v : out.k) = x;
    }
    out.flags = o.is("precision", "f32") ? KVQ_ATTN_F32 : 0;
    return KVQ_OK;
}

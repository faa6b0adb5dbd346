// The plan shared by methods that keep keys per channel and values per token in affine blocks.
#include "method.h"
#include "types/affine.h"

#include <algorithm>

static bool in(int v, std::initializer_list<int> set) { return std::find(set.begin(), set.end(), v) != set.end(); }

kvq_status kvq_plan_affine(
    const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err) {
    const int group = o.num("group");
    const int group_v = o.num("group_v");
    if (!in(group, { 16, 32, 64, 128 })) {
        err = "option group=" + std::to_string(group) + " is not one of 16, 32, 64, 128";
        return KVQ_ERR_OPTION;
    }
    if (!in(group_v, { 0, 16, 32, 64, 128 })) {
        err = "option group_v=" + std::to_string(group_v) + " is not one of 0, 16, 32, 64, 128";
        return KVQ_ERR_OPTION;
    }
    if (kvq_plan_open(o, out, err) != KVQ_OK) { return KVQ_ERR_OPTION; }
    if (group_v > c.shape.head_size_v) {
        err = "option group_v=" + std::to_string(group_v) + " exceeds the head size " +
            std::to_string(c.shape.head_size_v) + ": use group_v=0 or a smaller one";
        return KVQ_ERR_OPTION;
    }
    kvq_codec k = {};
    k.type = KVQ_TYPE_AFFINE;
    k.scale = o.is("scales", "u8");
    k.n_cells = std::max(32, group);
    kvq_codec v = k;
    k.role = KVQ_ROLE_K;
    k.group = group;
    k.head_size = c.shape.head_size_k;
    v.role = KVQ_ROLE_V;
    v.group = group_v ? group_v : std::min(group, (int) c.shape.head_size_v);
    v.head_size = c.shape.head_size_v;
    k.bits = v.bits = 2;
    out.k = k;
    out.v = v;
    out.flags = o.is("precision", "f32") ? KVQ_ATTN_F32 : 0;
    for (const kvq_codec * x : { &k, &v }) {
        if (const char * why = kvq_affine_refuse(*x)) {
            err =
                "layer " + std::to_string(c.shape.il) + " with head size " + std::to_string(x->head_size) + ": " + why;
            return KVQ_ERR_SHAPE;
        }
    }
    return KVQ_OK;
}

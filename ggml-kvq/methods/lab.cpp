// The laboratory: a program that is called back makes of sealed pages what it likes (policy/lab.h), and the cache keeps
// that in f16. A simulation: the memory is f16's. Without a program the rows stay as they came.
#include "method.h"

static const kvq_option_info options[] = {
    { "window", "int", "128", "newest cells kept as they came, 0..4096", "ggml-kvq" },
    { "sinks", "int", "0", "first cells of a stream kept as they came, 0..64", "ggml-kvq" },
    { "page", "int", "32", "cells that seal together: 32 64 128 256", "ggml-kvq" },
};

static kvq_status plan(const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err) {
    const int page = o.num("page");
    if (page != 32 && page != 64 && page != 128 && page != 256) {
        err = "option page=" + o.str("page") + " is none of 32, 64, 128 and 256";
        return KVQ_ERR_OPTION;
    }
    for (const int size : { c.shape.head_size_k, c.shape.head_size_v }) {
        if (size % 16) { // blocks are tiles, whose rows have no gaps then
            err = "layer " + std::to_string(c.shape.il) + " has head size " + std::to_string(size) +
                ": the laboratory needs a multiple of 16";
            return KVQ_ERR_SHAPE;
        }
    }
    out.k.type = KVQ_TYPE_F16;
    out.k.bits = 16;
    out.k.n_cells = out.k.group = page;
    out.k.role = KVQ_ROLE_K;
    out.k.head_size = c.shape.head_size_k;
    out.v = out.k;
    out.v.role = KVQ_ROLE_V;
    out.v.head_size = c.shape.head_size_v;
    out.add("lab");
    return kvq_plan_open(o, out, err);
}

extern const kvq_method kvq_method_lab;
const kvq_method kvq_method_lab = {
    { "lab", "simulated: f16 rows, of which a Python class makes what it likes (ggml_kvq.lab)", "-",
        sizeof(options) / sizeof(options[0]), options },
    plan,
};

#include "tensor_file.h"

#include "ggml.h"
#include "gguf.h"

#include <algorithm>
#include <cmath>
#include <cstring>

kvq_tensor_file::kvq_tensor_file(const std::string & path) {
    g = gguf_init_from_file(path.c_str(), { /*no_alloc =*/true, &shapes });
    f = g ? fopen(path.c_str(), "rb") : nullptr;
}

kvq_tensor_file::~kvq_tensor_file() {
    if (f) { fclose(f); }
    if (g) { gguf_free(g); }
    if (shapes) { ggml_free(shapes); }
}

const ggml_tensor * kvq_tensor_file::tensor(const std::string & name) const {
    return shapes ? ggml_get_tensor(shapes, name.c_str()) : nullptr;
}

bool kvq_tensor_file::row(const ggml_tensor * t, int64_t r, std::vector<float> & out) const {
    const int64_t id = gguf_find_tensor(g, t->name);
    const size_t nb = ggml_row_size(t->type, t->ne[0]);
    const ggml_type_traits * traits = ggml_get_type_traits(t->type);
    std::vector<uint8_t> raw(nb);
    out.resize((size_t) t->ne[0]);
    if (id < 0 ||
        fseeko(f, (off_t) (gguf_get_data_offset(g) + gguf_get_tensor_offset(g, id) + (size_t) r * nb), SEEK_SET) ||
        fread(raw.data(), 1, nb, f) != nb) {
        return false;
    }
    if (t->type == GGML_TYPE_F32) {
        memcpy(out.data(), raw.data(), nb);
    } else if (traits->to_float) {
        traits->to_float(raw.data(), out.data(), t->ne[0]);
    } else {
        return false;
    }
    return std::all_of(out.begin(), out.end(), [](float x) { return std::isfinite(x); });
}

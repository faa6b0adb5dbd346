// The one look into ggml-cuda's own context: its stream, and its recordings. The type comes from the source that
// libggml-cuda was built from; the part behind the recordings is only touched when that build has them.
#define GGML_CUDA_USE_GRAPHS
#include "ggml-cuda/common.cuh"

#include "ggml-backend-impl.h"
#include <cstring>

void * kvq_cuda_stream(ggml_backend_t inner) {
    ggml_backend_cuda_context * c = (ggml_backend_cuda_context *) inner->context;
    return c->stream(c->device, 0);
}

ggml_backend_reg_t kvq_cuda_upstream(void); // cuda_device.cpp

static bool has_graphs() {
    const ggml_backend_reg_t reg = kvq_cuda_upstream();
    const auto features =
        (ggml_backend_get_features_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
    for (const ggml_backend_feature * f = features ? features(reg) : nullptr; f && f->name; f++) {
        if (!strcmp(f->name, "USE_GRAPHS")) { return true; }
    }
    return false;
}

void kvq_cuda_no_inner_graph(ggml_backend_t inner, const ggml_cgraph * part) {
    static const bool has = has_graphs();
    if (has && part->n_nodes) {
        ((ggml_backend_cuda_context *) inner->context)->cuda_graph(part->nodes[0])->disable_due_to_gpu_arch = true;
    }
}

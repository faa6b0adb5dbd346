// The one look into ggml-cuda's own context: its stream, and its recordings. The types come from the source that this
// was compiled with. What is the same in every known version is checked here, where the recordings are tells the table.
#define GGML_CUDA_USE_GRAPHS
#include "ggml-cuda/common.cuh"

#include "host/layout.h"
#include <cstddef>
#include <cstring>

#define KVQ_MEMBER(type, member, n) static_assert(offsetof(type, member) == n, #type "::" #member);
#define KVQ_SIZE(type, n) static_assert(sizeof(type) == n, #type);
#define KVQ_CONSTANT(name, n) static_assert(name == n, #name);
#define KVQ_DIFFERS(...)
#define KVQ_LAYOUT_OF(...)
#include "cuda_layouts.inc"

void * kvq_cuda_stream(ggml_backend_t inner) {
    ggml_backend_cuda_context * c = (ggml_backend_cuda_context *) inner->context;
    return c->stream(c->device, 0); // reads `device` and `streams` alone
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

void kvq_cuda_inner_graph(ggml_backend_t inner, const ggml_cgraph * part, bool may) {
    static const bool has = has_graphs();
    if (!has || !part->n_nodes) { return; }
    using recordings = decltype(ggml_backend_cuda_context::cuda_graphs); // by the first node of what is recorded
    recordings & all = *(recordings *) ((char *) inner->context + kvq_layout_here.cuda_graphs);
    auto at = all.find(part->nodes[0]);
    if (at == all.end() && may) { return; }
    if (at == all.end()) { at = all.emplace(part->nodes[0], new ggml_cuda_graph).first; }
    at->second->last_used_time = ggml_time_us(); // ggml-cuda drops those that were not used for 10 s
    at->second->disable_due_to_gpu_arch = !may;  // cards too old for graphs it finds again itself
}

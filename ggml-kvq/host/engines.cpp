#include "engines.h"

#include "engine/host.h"

std::unique_ptr<kvq_device> (*kvq_other_engine)() = nullptr;

kvq_device & kvq_device_of(const kvq_device_context & dev, kvq_buffer & b) {
    if (!b.device && dev.inner) { b.device = kvq_cuda_make_device(dev.ordinal); }
    if (!b.device && kvq_other_engine) { b.device = kvq_other_engine(); }
    return b.device ? *b.device : kvq_cpu_device();
}

#ifndef KVQ_CUDA // cuda_device.cpp and cuda_step.cpp have them

int kvq_cuda_init(ggml_backend_reg *) { return 0; }
ggml_backend_dev_t kvq_cuda_get(size_t) { return nullptr; }
ggml_backend_buffer_type_t * kvq_cuda_extra_bufts(ggml_backend_dev_t) { return nullptr; }
std::unique_ptr<kvq_device> kvq_cuda_make_device(int) { return nullptr; }
const char * kvq_cuda_refuse(const kvq_draft_layer &) { return "this build has no CUDA kernels"; }
bool kvq_cuda_attend(kvq_backend_context &, kvq_kv_cache &, kvq_kv_layer &, const ggml_tensor *, int,
    std::vector<kvq_attn> &, const kvq_chain_pages *, kvq_run) {
    return false;
}
void kvq_cuda_use_stream(kvq_kv_cache &, void *) {}
const std::string & kvq_cuda_error(kvq_kv_cache &) {
    static const std::string none;
    return none;
}
void kvq_cuda_inner_graph(ggml_backend_t, const ggml_cgraph *, bool) {}
ggml_status kvq_cuda_compute(kvq_backend_context & b, ggml_cgraph * graph) { return kvq_compute_graph(b, graph); }
void kvq_cuda_step_flush(kvq_backend_context &) {}
void kvq_cuda_steps_free(kvq_cuda_steps *) {}
void * kvq_cuda_comm(const char *) { return nullptr; }
bool kvq_cuda_hold_input(kvq_buffer &, int, void *, const void *, size_t) { return false; }
void kvq_cuda_settle_inputs(kvq_buffer &, const void *, size_t) {}
void kvq_cuda_drop_inputs(kvq_buffer &) {}

#endif

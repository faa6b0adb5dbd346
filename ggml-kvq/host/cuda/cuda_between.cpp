// What devices do with each other: events, with which llama.cpp lets one device read the next part of a prompt while
// another is at work (-sm layer), copies, and sums over all devices (-sm tensor). The inner backends do all of it.
#ifdef KVQ_CUDA
#include "host/engines.h"

#include <cstring>
#include <vector>

namespace {

kvq_backend_context & state(ggml_backend_t backend) { return *(kvq_backend_context *) backend->context; }
ggml_backend_dev_t inner(ggml_backend_dev_t dev) { return ((kvq_device_context *) dev->context)->inner; }

bool is_ours(ggml_backend_t backend) { return !memcmp(backend->guid, kvq_cuda_guid(), sizeof(ggml_guid)); }

// The event belongs to the inner device, which frees it and waits for it.
ggml_backend_event_t event_new(ggml_backend_dev_t dev) {
    const auto make = inner(dev)->iface.event_new;
    return make ? make(inner(dev)) : nullptr;
}

void event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    ggml_backend_t const in = state(backend).inner;
    in->iface.event_record(in, event);
}

void event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    ggml_backend_t const in = state(backend).inner;
    state(backend).idle = false;
    in->iface.event_wait(in, event);
}

// A tensor as the inner backend knows it.
struct bare_tensor {
    ggml_tensor tensor, root;
    kvq_buffer * ours = nullptr;

    bool is(const ggml_tensor * t) { // false: it lies in a cache
        root = t->view_src ? *t->view_src : *t;
        tensor = *t;
        if (!root.buffer || kvq_find_target(t).ours) { return false; }
        if (kvq_buft_is_ours(root.buffer->buft)) {
            ours = (kvq_buffer *) root.buffer->context;
            root.buffer = ours->inner;
        }
        tensor.buffer = root.buffer;
        tensor.view_src = t->view_src ? &root : nullptr;
        return root.buffer != nullptr;
    }
    void settle() const {
        if (ours) { kvq_cuda_settle_inputs(*ours, tensor.data, ggml_nbytes(&tensor)); }
    }
};

// false: llama.cpp waits for both and copies
bool copy_async(ggml_backend_t from, ggml_backend_t to, const ggml_tensor * src, ggml_tensor * dst) {
    bare_tensor a, b;
    ggml_backend_t const in = is_ours(from) ? state(from).inner : from, out = state(to).inner;
    if (!out->iface.cpy_tensor_async || !a.is(src) || !b.is(dst)) { return false; }
    a.settle();
    b.settle();
    if (b.ours) {
        kvq_note_written(*b.ours, dst, 0, ggml_nbytes(dst));
        b.ours->indices.erase(dst->data);
    }
    if (!out->iface.cpy_tensor_async(in, out, &a.tensor, &b.tensor)) { return false; }
    if (is_ours(from)) { state(from).idle = false; }
    state(to).idle = false;
    return true;
}

void * comm_init(ggml_backend_t * backends, size_t n) {
    std::vector<ggml_backend_t> in;
    for (size_t i = 0; i < n; i++) {
        if (!is_ours(backends[i])) { return nullptr; }
        in.push_back(state(backends[i]).inner);
    }
    const auto init = (void * (*)(ggml_backend_t *, size_t) ) ggml_backend_reg_get_proc_address(
        kvq_cuda_upstream(), "ggml_backend_comm_init");
    return init ? init(in.data(), n) : nullptr;
}

} // namespace

void kvq_cuda_link_devices(ggml_backend_device_i & i) { i.event_new = event_new; }

void kvq_cuda_link_backends(ggml_backend_i & i) {
    i.cpy_tensor_async = copy_async;
    i.event_record = event_record;
    i.event_wait = event_wait;
}

void * kvq_cuda_comm(const char * name) {
    if (!strcmp(name, "ggml_backend_comm_init")) { return (void *) comm_init; }
    const bool forwards =
        !strcmp(name, "ggml_backend_comm_free") || !strcmp(name, "ggml_backend_comm_allreduce_tensor");
    return forwards ? ggml_backend_reg_get_proc_address(kvq_cuda_upstream(), name) : nullptr;
}
#endif

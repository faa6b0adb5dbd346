// Inputs of a step on a device over CUDA (cuda/device/inputs.h): held when they are set, brought when a graph that uses
// their buffer begins. Before their place is read or overwritten otherwise, they are settled: brought at once.
#ifdef KVQ_CUDA
#include "host/engines.h"

#include "cuda/device/inputs.h"
#include "ggml-impl.h" // ggml_cgraph

#include <algorithm>
#include <mutex>

namespace {

struct waiting_buffers { // that hold inputs
    std::mutex mutex;
    std::vector<kvq_buffer *> buffers;
};
// never destroyed: a program may free its contexts after main
waiting_buffers & waiting = *new waiting_buffers;

const void * memory_of(const ggml_tensor * t) {
    const ggml_tensor * root = t->view_src ? t->view_src : t;
    return root->buffer ? root->buffer->context : nullptr;
}

// Buffers that a graph's nodes are in or read. Steps that repeat are looked at once.
void learn_memory(kvq_backend_context & b, const ggml_cgraph * g) {
    if (g->uid && g->uid == b.memory_uid) { return; }
    b.memory_uid = g->uid;
    b.memory.clear();
    const auto add = [&](const void * p) {
        if (p && std::find(b.memory.begin(), b.memory.end(), p) == b.memory.end()) { b.memory.push_back(p); }
    };
    for (int i = 0; i < g->n_nodes; i++) {
        add(memory_of(g->nodes[i]));
        for (const ggml_tensor * s : g->nodes[i]->src) { add(s ? memory_of(s) : nullptr); }
    }
}

void settle(kvq_buffer & b) { // in the way that ggml sets a tensor
    for (const kvq_cuda_inputs::piece & p : b.inputs->pieces()) {
        ggml_tensor t = {};
        t.data = p.to;
        t.buffer = b.inner;
        b.inner->iface.set_tensor(b.inner, &t, b.inputs->data_of(p), 0, p.nb);
    }
    b.inputs->drop();
}

void forget(kvq_buffer & b) {
    waiting.buffers.erase(std::remove(waiting.buffers.begin(), waiting.buffers.end(), &b), waiting.buffers.end());
}

} // namespace

bool kvq_cuda_hold_input(kvq_buffer & b, int ordinal, void * to, const void * data, size_t nb) {
    const std::lock_guard<std::mutex> lock(waiting.mutex);
    if (!b.inputs) { b.inputs = std::make_shared<kvq_cuda_inputs>(ordinal); }
    if (!b.inputs->hold(to, data, nb)) { return false; }
    if (b.inputs->pieces().size() == 1) { waiting.buffers.push_back(&b); }
    return true;
}

void kvq_cuda_settle_inputs(kvq_buffer & b, const void * from, size_t nb) {
    const std::lock_guard<std::mutex> lock(waiting.mutex);
    if (!b.inputs || !b.inputs->overlaps(from, nb)) { return; }
    settle(b);
    forget(b);
}

void kvq_cuda_drop_inputs(kvq_buffer & b) {
    const std::lock_guard<std::mutex> lock(waiting.mutex);
    forget(b);
    b.inputs.reset();
}

void kvq_cuda_send_inputs(kvq_backend_context & b, const ggml_cgraph * graph) {
    const std::lock_guard<std::mutex> lock(waiting.mutex);
    if (waiting.buffers.empty()) { return; }
    learn_memory(b, graph);
    std::vector<kvq_buffer *> others;
    for (kvq_buffer * w : waiting.buffers) {
        if (std::find(b.memory.begin(), b.memory.end(), w) == b.memory.end()) {
            others.push_back(w);
        } else if (!w->inputs->send(b.stream)) {
            ggml_backend_synchronize(b.inner); // what runs may read them as they were
            settle(*w);
        }
    }
    waiting.buffers.swap(others);
}
#endif

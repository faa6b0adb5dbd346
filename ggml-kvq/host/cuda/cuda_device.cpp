// Devices KVQ<i> over CUDA<i>, built when GGML_CUDA=ON. The inner device owns the weights and computes every node
// that touches no cache; buffers of our type wrap its buffers, and our kernels run on its stream, between its own.
#ifdef KVQ_CUDA
#include "host/engines.h"
#include "base/settings.h"
#include "gguf/measured.h"

#include "cuda/device/device.h"
#include "cuda/device/inputs.h"
#include "host/process.h"
#include "ggml-impl.h" // ggml_cgraph

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {

struct wrapped {
    ggml_backend_device device;
    kvq_device_context context;
    ggml_backend_buffer_type_t extra[2] = { nullptr, nullptr };
};
std::vector<std::unique_ptr<wrapped>> devices;

kvq_device_context & context(ggml_backend_dev_t dev) { return *(kvq_device_context *) dev->context; }
ggml_backend_dev_t inner(ggml_backend_dev_t dev) { return context(dev).inner; }

// ---------------------------------------------------------------- backend

kvq_backend_context & state(ggml_backend_t backend) { return *(kvq_backend_context *) backend->context; }

const char * backend_name(ggml_backend_t) { return "KVQ"; }

void backend_free(ggml_backend_t backend) {
    ggml_backend_synchronize(state(backend).inner);
    if (state(backend).stream) { kvq_cuda_device::forget_stream(state(backend).stream); }
    kvq_cuda_steps_free(state(backend).steps);
    ggml_backend_free(state(backend).inner);
    delete &state(backend);
    delete backend;
}

// llama.cpp waits before each of a step's inputs, and waiting for nothing takes 2 us, seven times a token
void backend_synchronize(ggml_backend_t backend) {
    if (state(backend).idle) { return; }
    if (!state(backend).late.empty()) {
        const kvq_busy busy;
        kvq_seal_late(state(backend));
    }
    ggml_backend_synchronize(state(backend).inner);
    state(backend).idle = true;
}

// Of a tensor in one of our plain buffers: where it is on the device; else NULL.
char * plain_data(ggml_backend_t backend, const ggml_tensor * t, size_t offset, size_t size) {
    const ggml_tensor * root = t->view_src ? t->view_src : t;
    kvq_backend_context & b = state(backend);
    if (!b.stream || !root->buffer || !kvq_buft_is_ours(root->buffer->buft)) { return nullptr; }
    kvq_buffer & buffer = *(kvq_buffer *) root->buffer->context;
    if (!buffer.inner ||
        ((kvq_device_context *) kvq_buft_context(root->buffer->buft))->inner != inner(backend->device)) {
        return nullptr;
    }
    kvq_cuda_settle_inputs(buffer, (char *) t->data + offset, size);
    b.idle = false;
    return (char *) t->data + offset;
}

void backend_get_async(ggml_backend_t backend, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    const char * from = plain_data(backend, t, offset, size);
    if (from && kvq_cuda_get_async(context(backend->device).ordinal, data, from, size, state(backend).stream)) {
        return;
    }
    backend_synchronize(backend);
    ggml_backend_tensor_get(t, data, offset, size);
}

// of weights that stay on the host (--n-cpu-moe), while a prompt is read
void backend_set_async(ggml_backend_t backend, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    if (char * to = plain_data(backend, t, offset, size)) {
        kvq_buffer & buffer = *(kvq_buffer *) (t->view_src ? t->view_src : t)->buffer->context;
        kvq_note_written(buffer, t, offset, size);
        buffer.indices.erase(t->data);
        if (kvq_cuda_set_async(context(backend->device).ordinal, to, data, size, state(backend).stream)) { return; }
    }
    backend_synchronize(backend);
    ggml_backend_tensor_set(t, data, offset, size);
}

ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    const kvq_busy busy;
    kvq_backend_context & b = state(backend);
    if (!b.stream) { b.stream = kvq_cuda_stream(b.inner); }
    b.idle = false;
    kvq_cuda_send_inputs(b, graph);
    static const bool graphs = kvq_setting_on(kvq_setting::CUDA_GRAPHS, true);
    return graphs ? kvq_cuda_compute(b, graph) : kvq_compute_graph(b, graph);
}

// ---------------------------------------------------------------- device

const char * dev_name(ggml_backend_dev_t dev) { return context(dev).name.c_str(); }
const char * dev_description(ggml_backend_dev_t dev) { return context(dev).description.c_str(); }
void dev_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    ggml_backend_dev_memory(inner(dev), free, total);
}
enum ggml_backend_dev_type dev_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void dev_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    ggml_backend_dev_get_props(inner(dev), props);
    props->name = dev_name(dev);
    props->description = dev_description(dev);
    props->type = dev_type(dev);
    props->device_id = nullptr; // llama.cpp drops devices whose ids are equal
    props->caps.buffer_from_host_ptr = false;
}

ggml_backend_t dev_init(ggml_backend_dev_t dev, const char * params) {
    ggml_backend_t in = ggml_backend_dev_init(inner(dev), params);
    if (!in) { return nullptr; }
    ggml_backend_i iface = {};
    iface.get_name = backend_name;
    iface.free = backend_free;
    iface.synchronize = backend_synchronize;
    iface.set_tensor_async = backend_set_async;
    iface.get_tensor_async = backend_get_async;
    iface.graph_compute = backend_graph_compute;
    kvq_cuda_link_backends(iface);
    kvq_backend_context * c = new kvq_backend_context;
    c->device = dev;
    c->inner = in;
    c->n_threads = (int) std::max(1u, std::thread::hardware_concurrency() / 2);
    return new ggml_backend{ kvq_cuda_guid(), iface, dev, c };
}

ggml_backend_buffer_type_t dev_buft(ggml_backend_dev_t dev) { return context(dev).buft.get(); }
ggml_backend_buffer_type_t dev_host_buft(ggml_backend_dev_t dev) {
    return ggml_backend_dev_host_buffer_type(inner(dev));
}

bool dev_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    kvq_note_absent(op);
    return kvq_supports_op(context(dev), op);
}

bool dev_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    // a draft device reads the target's cache where a draft model shares it
    const bool ours = kvq_buft_is_ours(buft) && ((kvq_device_context *) kvq_buft_context(buft))->inner == inner(dev);
    return ours || ggml_backend_dev_supports_buft(inner(dev), buft);
}

bool dev_offload_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    return ggml_backend_dev_offload_op(inner(dev), op);
}

const ggml_backend_device_i device_interface = [] { // by name: members come and go between versions
    ggml_backend_device_i i = {};
    i.get_name = dev_name;
    i.get_description = dev_description;
    i.get_memory = dev_memory;
    i.get_type = dev_type;
    i.get_props = dev_props;
    i.init_backend = dev_init;
    i.get_buffer_type = dev_buft;
    i.get_host_buffer_type = dev_host_buft;
    i.supports_op = dev_supports_op;
    i.supports_buft = dev_supports_buft;
    i.offload_op = dev_offload_op;
    kvq_cuda_link_devices(i);
    return i;
}();

kvq_cuda_device & cuda(kvq_kv_cache & cache) { return static_cast<kvq_cuda_device &>(cache.device); }

} // namespace

ggml_guid_t kvq_cuda_guid(void) {
    static ggml_guid guid = { 0x6b, 0x76, 0x71, 0x2d, 0x63, 0x75, 0x64, 0x61, 0x90, 0x21, 0x4a, 0x5e, 0x11, 0x7c, 0x33,
        0xd5 };
    return &guid;
}

ggml_backend_reg_t kvq_cuda_upstream(void) {
    const auto by_name = KVQ_OPTIONAL(ggml_backend_reg_by_name);
    return by_name ? by_name("CUDA") : nullptr;
}

// a launcher asks before there is a registry
[[maybe_unused]] static const bool told = (kvq_has_accelerator = kvq_cuda_device::has_card, true);

int kvq_cuda_init(ggml_backend_reg * reg) {
    ggml_backend_reg_t cuda_reg = kvq_cuda_upstream();
    const size_t n = cuda_reg ? ggml_backend_reg_dev_count(cuda_reg) : 0;
    if (n && !kvq_layout_here.cuda_graphs) { // cuda_stream.cu
        kvq_report_note("the private context of ggml-cuda " + kvq_layout_here.version + " is not known (those of " +
            kvq_known_cuda_versions() + " are): the cache stays on the CPU");
        return 0;
    }
    for (size_t j = 0; j < (kvq_draft_asked() ? 2 * n : n); j++) { // KVQ<i>, then KVQD<i>
        const size_t i = j % n;
        const std::string old = kvq_cuda_device::too_old((int) i);
        if (!old.empty()) {
            if (j < n) {
                fprintf(stderr,
                    "ggml-kvq: CUDA%zu has compute capability %s and our kernels need 8.0: it keeps llama.cpp's own KV "
                    "cache\n",
                    i, old.c_str());
            }
            continue;
        }
        std::unique_ptr<wrapped> w(new wrapped);
        w->context.inner = ggml_backend_reg_dev_get(cuda_reg, i);
        w->context.ordinal = (int) i;
        w->context.for_draft = j >= n;
        w->context.name = (j < n ? "KVQ" : "KVQD") + std::to_string(i);
        w->context.description = std::string("ggml-kvq KV cache ") + (j < n ? "over " : "of draft models over ") +
            ggml_backend_dev_description(w->context.inner);
        w->extra[0] = ggml_backend_dev_buffer_type(w->context.inner);
        w->device = { device_interface, reg, &w->context };
        kvq_init_buffer_type(w->context, &w->device);
        devices.push_back(std::move(w));
    }
    return (int) devices.size();
}

ggml_backend_dev_t kvq_cuda_get(size_t index) { return index < devices.size() ? &devices[index]->device : nullptr; }

ggml_backend_buffer_type_t * kvq_cuda_extra_bufts(ggml_backend_dev_t dev) {
    for (auto & w : devices) {
        if (&w->device == dev) { return w->extra; }
    }
    return nullptr;
}

std::unique_ptr<kvq_device> kvq_cuda_make_device(int ordinal) {
    return std::unique_ptr<kvq_device>(new kvq_cuda_device(ordinal));
}

const char * kvq_cuda_refuse(const kvq_draft_layer & d) {
    if (d.plan.k.split && d.plan.part("chain")) {
        return "keys sorted behind predictors have no CUDA kernels: leave predictor out, add pairs=none, or run on the "
               "CPU with -ngl 0";
    }
    return kvq_cuda_device::refuse(d.plan.flags, d.plan.k, d.plan.v, d.k.evicts);
}

void kvq_cuda_use_stream(kvq_kv_cache & cache, void * stream) { cuda(cache).set_stream(stream); }
const std::string & kvq_cuda_error(kvq_kv_cache & cache) { return cuda(cache).error(); }

// a cache view as rows [stream][n_kv][head][head size] at data
static ggml_tensor plain_rows(const ggml_tensor * view, void * data) {
    ggml_tensor t = *view;
    t.type = GGML_TYPE_F16;
    t.data = data;
    t.op = GGML_OP_NONE;
    t.view_src = nullptr;
    memset(t.src, 0, sizeof(t.src));
    t.nb[0] = 2;
    t.nb[2] = t.nb[0] * t.ne[0];
    t.nb[1] = t.nb[2] * t.ne[2];
    t.nb[3] = t.nb[1] * t.ne[1];
    return t;
}

// Latent attention: the layer as f16 rows, through the inner backend's own kernel (kvq_supports_op has asked whether
// there is one).
static bool attend_latent(kvq_backend_context & b, kvq_cuda_device & device, const ggml_tensor * node,
    const std::vector<kvq_attn> & streams) {
    void * rows = nullptr;
    if (!device.expand_latent(streams.data(), (int) streams.size(), &rows)) { return false; }
    ggml_tensor k = plain_rows(node->src[1], rows), v = plain_rows(node->src[2], rows), attention = *node;
    std::copy(k.nb, k.nb + 4, v.nb);
    k.buffer = v.buffer = node->src[0]->buffer;
    v.view_src = &k; // its kernel then reads each row once
    attention.src[1] = &k;
    attention.src[2] = &v;
    ggml_tensor * nodes[1] = { &attention };
    ggml_cgraph graph = {};
    graph.nodes = nodes;
    graph.n_nodes = 1;
    return b.inner->iface.graph_compute(b.inner, &graph) == GGML_STATUS_SUCCESS;
}

bool kvq_cuda_attend(kvq_backend_context & b, kvq_kv_cache & cache, kvq_kv_layer & l, const ggml_tensor * node,
    int stream0, std::vector<kvq_attn> & streams, const kvq_chain_pages * predicted, kvq_run how) {
    const kvq_attn & a = streams[0];
    kvq_cuda_device & device = cuda(cache);
    const int n = (int) streams.size();
    if (l.d.latent) { return attend_latent(b, device, node, streams); }
    // probes: of each stream; in a recording the table says how many there are when it runs
    std::vector<int> n_probes((size_t) n, 0);
    const bool asks = device.may_observe && l.probe && l.probe->asks(a.n_q) && how != kvq_run::RECORD_UNSEEN;
    for (int s = 0; asks && s < n; s++) {
        n_probes[(size_t) s] = kvq_records(how)
            ? a.n_q
            : l.probe->prepare(l.spans.spans.data() + (size_t) (stream0 + s) * l.spans.n_pages,
                  l.spans.packed ? l.spans.n_pages : a.n_pages, stream0 + s, a.n_q,
                  (uint64_t) l.k->first_written(stream0 + s));
    }
    const bool observed = std::any_of(n_probes.begin(), n_probes.end(), [](int x) { return x > 0; });
    if (observed) {
        const size_t per = (size_t) a.n_q * a.n_head;
        float * lse = device.lse_of(per * n);
        for (int s = 0; s < n; s++) { streams[(size_t) s].lse = lse + per * s; }
        if (!lse) { return false; }
    }
    const auto observe = [&](const char * keys) {
        const size_t nb = 2 * (size_t) a.n_kv * a.n_head_kv * a.k.head_size;
        for (int s = 0; s < n; s++) {
            if (n_probes[(size_t) s]) {
                device.observe(streams[(size_t) s], l.probe->table_of(stream0 + s), n_probes[(size_t) s],
                    l.probe->max_pages(stream0 + s), keys ? keys + s * nb : nullptr);
            }
        }
    };
    void *k = nullptr, *v = nullptr;
    const bool all_far = a.far && a.far->fetch == KVQ_FETCH_ALL;
    if (((a.n_q * (a.n_head / a.n_head_kv) > 64 && !device.lists(a, n)) || all_far) && !l.spans.packed &&
        (!a.far || all_far)) { // each head has its own cells there
        ggml_tensor plain[3] = { plain_rows(node->src[1], nullptr), plain_rows(node->src[2], nullptr), *node };
        plain[0].buffer = plain[1].buffer = node->src[0]->buffer;
        plain[2].src[1] = &plain[0];
        plain[2].src[2] = &plain[1];
        if (ggml_backend_dev_supports_op(inner(b.device), &plain[2]) &&
            device.expand(streams.data(), n, &k, &v, predicted)) {
            plain[0].data = k;
            plain[1].data = v;
            ggml_tensor * nodes[1] = { &plain[2] };
            ggml_cgraph graph = {};
            graph.nodes = nodes;
            graph.n_nodes = 1;
            const bool ok = b.inner->iface.graph_compute(b.inner, &graph) == GGML_STATUS_SUCCESS;
            observe((const char *) k);
            return ok;
        }
    }
    device.attend({ streams.data(), n, &l.k->layout(), &l.v->layout(), predicted, 1 });
    observe(nullptr);
    return true;
}
#endif

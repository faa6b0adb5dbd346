// Registry, device and backend: what ggml_backend_load finds. On CPU the device reports host memory and takes every
// node that ggml's CPU device takes, so that a graph is not cut at each cache; weights stay in that device's memory.
#include "backend.h"
#include "engines.h"
#include "process.h"
#include "self_check.h"

#include "base/host_memory.h"
#include "base/settings.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <unistd.h>

// ---------------------------------------------------------------- backend (stream)

static const char * backend_name(ggml_backend_t) { return "KVQ"; }

static void backend_free(ggml_backend_t backend) {
    ggml_backend_free(((kvq_backend_context *) backend->context)->cpu);
    ggml_backend_free(((kvq_backend_context *) backend->context)->pooled);
    delete (kvq_backend_context *) backend->context;
    delete backend;
}

static ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    const kvq_busy busy;
    return kvq_compute_graph(*(kvq_backend_context *) backend->context, graph);
}

static ggml_guid_t backend_guid(void) {
    static ggml_guid guid = { 0x6b, 0x76, 0x71, 0x2d, 0x67, 0x67, 0x6d, 0x6c, 0x90, 0x21, 0x4a, 0x5e, 0x11, 0x7c, 0x33,
        0xd4 };
    return &guid;
}

static void backend_set_n_threads(ggml_backend_t backend, int n_threads) {
    ((kvq_backend_context *) backend->context)->n_threads = n_threads > 0 ? n_threads : 1;
}

static void backend_set_abort_callback(ggml_backend_t backend, ggml_abort_callback abort, void * data) {
    kvq_backend_context & b = *(kvq_backend_context *) backend->context;
    b.abort = abort;
    b.abort_data = data;
}

// ---------------------------------------------------------------- device

static kvq_device_context & context(ggml_backend_dev_t dev) { return *(kvq_device_context *) dev->context; }

static const char * dev_name(ggml_backend_dev_t dev) { return context(dev).name.c_str(); }
static const char * dev_description(ggml_backend_dev_t dev) { return context(dev).description.c_str(); }

static void dev_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    const size_t page = (size_t) sysconf(_SC_PAGESIZE);
    *total = (size_t) sysconf(_SC_PHYS_PAGES) * page;
    *free = std::min(*total, kvq_host_available()); // counts reclaimable cache as free
}

// GPU, because llama.cpp gives layers, and so their cache, only to devices of that type
static enum ggml_backend_dev_type dev_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

// Weights lie in the CPU backend's memory, which maps the model's file. llama.cpp would read the file into memory of
// the process for a device that does not say so. Older versions ask no device.
template <class Caps> static auto say_weights_are_mapped(Caps & caps, int) -> decltype(caps.mmap_support, void()) {
    caps.mmap_support = true;
}
template <class Caps> static void say_weights_are_mapped(Caps &, long) {}

static void dev_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    props->name = dev_name(dev);
    props->description = dev_description(dev);
    props->type = dev_type(dev);
    props->device_id = nullptr;
    dev_memory(dev, &props->memory_free, &props->memory_total);
    props->caps = {};
    say_weights_are_mapped(props->caps, 0);
}

static ggml_backend_t dev_init(ggml_backend_dev_t dev, const char *) {
    ggml_backend_i iface = {};
    iface.get_name = backend_name;
    iface.free = backend_free;
    iface.graph_compute = backend_graph_compute;
    kvq_backend_context * c = new kvq_backend_context;
    c->device = dev;
    c->n_threads = (int) std::max(1u, std::thread::hardware_concurrency() / 2);
    return new ggml_backend{ backend_guid(), iface, dev, c };
}

static ggml_backend_buffer_type_t dev_buft(ggml_backend_dev_t dev) { return context(dev).buft.get(); }

static bool dev_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    kvq_note_absent(op);
    return kvq_supports_op(context(dev), op);
}

static bool dev_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t const cpu = kvq_ggml_cpu(); // its repacked weights are not the host's to read
    return kvq_buft_is_ours(buft) ||
        (cpu ? ggml_backend_dev_supports_buft(cpu, buft) : ggml_backend_buft_is_host(buft));
}

static const ggml_backend_device_i device_interface = [] { // by name: members come and go between versions
    ggml_backend_device_i i = {};
    i.get_name = dev_name;
    i.get_description = dev_description;
    i.get_memory = dev_memory;
    i.get_type = dev_type;
    i.get_props = dev_props;
    i.init_backend = dev_init;
    i.get_buffer_type = dev_buft;
    i.supports_op = dev_supports_op;
    i.supports_buft = dev_supports_buft;
    return i;
}();

// ---------------------------------------------------------------- reader

// llama.cpp's scheduler gives an operation without weights to the device of its neighbours. Attention that stands
// between operations of the CPU (sparse attention builds its mask there) would go to the CPU backend, which cannot
// read a cache: the scheduler would copy all of it as f16 in every step. A second device of type ACCEL with the CPU's
// buffer type takes such nodes back: the scheduler moves a node of the CPU to any device of higher rank and the same
// buffer type that supports it. It has no memory and keeps nothing.

static const char * reader_name(ggml_backend_dev_t) { return "KVQ-reader"; }
static const char * reader_description(ggml_backend_dev_t) {
    return "ggml-kvq, attention between operations of the CPU";
}
static enum ggml_backend_dev_type reader_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }
static ggml_backend_buffer_type_t reader_buft(ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); }

static void reader_memory(ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = 0; }

static void reader_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    props->name = reader_name(dev);
    props->description = reader_description(dev);
    props->type = reader_type(dev);
    props->device_id = nullptr;
    props->memory_free = props->memory_total = 0;
    props->caps = {};
    say_weights_are_mapped(props->caps, 0);
}

static bool reader_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    kvq_note_absent(op);
    for (int i = 0; i < GGML_MAX_SRC && !kvq_is_view_op(op->op); i++) {
        if (op->src[i] && kvq_find_target(op->src[i]).cache) { return kvq_supports_op(context(dev), op); }
    }
    return false;
}

static ggml_backend_device_i make_reader_interface(void) {
    ggml_backend_device_i i = device_interface;
    i.get_name = reader_name;
    i.get_description = reader_description;
    i.get_memory = reader_memory;
    i.get_type = reader_type;
    i.get_props = reader_props;
    i.get_buffer_type = reader_buft;
    i.supports_op = reader_supports_op;
    return i;
}

// ---------------------------------------------------------------- registry

// KVQ_HOST_DEVICES: more of them than one, so that what a split over devices does can be tried without GPUs
struct host_device {
    ggml_backend_device device;
    kvq_device_context context;
};
static ggml_backend_device reader;
// Never freed: a context in static storage may outlive this library's own.
static auto & on_cpu = *new std::vector<std::unique_ptr<host_device>>; // KVQ0, KVQ1 ..., then KVQD0 of draft models
static size_t n_for_models = 0;

static const char * reg_name(ggml_backend_reg_t) { return "KVQ"; }
static int n_cuda = 0; // devices over CUDA; without any, one on the CPU and its reader
static size_t reg_count(ggml_backend_reg_t) {
    return n_cuda ? (size_t) n_cuda : n_for_models + (kvq_draft_asked() ? 2 : 1);
}
static ggml_backend_dev_t reg_device(ggml_backend_reg_t, size_t index) {
    if (n_cuda) { return kvq_cuda_get(index); }
    if (index >= reg_count(nullptr)) { return nullptr; }
    return index == n_for_models ? &reader : &on_cpu[index - (index > n_for_models)]->device;
}

static void add_on_cpu(ggml_backend_reg_t reg, int ordinal, bool for_draft) {
    on_cpu.emplace_back(new host_device);
    host_device & d = *on_cpu.back();
    d.context.ordinal = ordinal;
    d.context.for_draft = for_draft;
    d.context.name = (for_draft ? "KVQD" : "KVQ") + std::to_string(ordinal);
    d.context.description = for_draft ? "ggml-kvq KV cache of draft models, CPU"
                                      : std::string("ggml-kvq KV cache, CPU ") + kvq_kernel_name();
    d.device = { device_interface, reg, &d.context };
    kvq_init_buffer_type(d.context, &d.device);
}

static void * reg_proc(ggml_backend_reg_t, const char * name) {
    if (!strcmp(name, "ggml_backend_dev_get_extra_bufts") && n_cuda) { // weights stay in the inner device's buffer type
        return (void *) kvq_cuda_extra_bufts;
    }
    if (void * comm = n_cuda ? kvq_cuda_comm(name) : nullptr) { return comm; }
    if (!strcmp(name, "ggml_backend_set_abort_callback") && !n_cuda) { return (void *) backend_set_abort_callback; }
    return !strcmp(name, "ggml_backend_set_n_threads") ? (void *) backend_set_n_threads : nullptr;
}

static const ggml_backend_reg_i reg_interface = [] {
    ggml_backend_reg_i i = {};
    i.get_name = reg_name;
    i.get_device_count = reg_count;
    i.get_device = reg_device;
    i.get_proc_address = reg_proc;
    return i;
}();

// ---------------------------------------------------------------- the ggml that loads us

// Of a registry that is there before us: what ggml_backend_load compares ours with. 0: there is none.
static int api_of_others(void) {
    const auto count = KVQ_OPTIONAL(ggml_backend_reg_count);
    const auto get = KVQ_OPTIONAL(ggml_backend_reg_get);
    return count && get && count() ? get(0)->api_version : 0;
}

static bool serves(const void * caller, std::string & err) {
    if (!kvq_bind_ggml(caller, err)) { return false; }
    const int api = api_of_others();
    if (!kvq_choose_layout(ggml_version(), api, err)) { return false; }
    if (kvq_check_ggml(err)) { return true; }
    if (api || kvq_layout_here.known) { return false; }
    std::string again; // nobody tells the API number of this version: the check does
    return kvq_choose_layout(ggml_version(), kvq_other_api(kvq_layout_here.api), again) && kvq_check_ggml(again);
}

// GGML_BACKEND_PATH names one file. A program that would name its GPU's there names ours, and that one here.
static void load_inner(void) {
    const char * file = kvq_setting_text(kvq_setting::INNER_BACKEND);
    if (!*file) { return; }
    const auto load = KVQ_OPTIONAL(ggml_backend_load);
    if (!load || !load(file)) {
        kvq_report_error(std::string("KVQ_INNER_BACKEND=") + file + " is no backend that this ggml loads");
    }
}

extern "C" KVQ_API ggml_backend_reg_t ggml_backend_init(void) {
    static ggml_backend_reg reg;
    std::string err;
    if (!serves(__builtin_return_address(0), err)) {
        kvq_report_error(err);
        return nullptr;
    }
    if (!reader.context) {
        reg = { kvq_layout_here.api, reg_interface, nullptr };
        if (kvq_layout_here.newer) {
            kvq_report_note("ggml " + kvq_layout_here.version + " is newer than those that were tested (" +
                kvq_known_versions() + "); it passed the checks of its structures and operations");
        }
        n_for_models = (size_t) std::clamp(kvq_setting_number(kvq_setting::HOST_DEVICES, 1), 1, 8);
        for (size_t i = 0; i < n_for_models; i++) { add_on_cpu(&reg, (int) i, false); }
        add_on_cpu(&reg, 0, true);
        reader = { make_reader_interface(), &reg, &on_cpu[0]->context };
        load_inner();
        n_cuda = kvq_cuda_init(&reg);
    }
    return &reg;
}

// Asked of several files of one backend, the best of which is taken; ours says in ggml_backend_init what is wrong.
extern "C" KVQ_API int ggml_backend_score(void) { return 1; }

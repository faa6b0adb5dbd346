// Buffers. Three kinds behind one type, told apart by the size queries that precede the allocation:
//   cache     the tensors of one KV cache object. Their addresses are reserved, never mapped: a stray access faults
//       instead of
//             reading garbage. Data goes through get/set in the nominal f16 layout, through SET_ROWS and
//             FLASH_ATTN_EXT.
//   upstream  memory of llama.cpp that is not ours to keep: recurrent states, keys of an indexer. A buffer of the
//   type that
//             llama.cpp would have used without us, so that its own backend computes on it.
//   plain     results of our ops in compute buffers: ordinary host memory.
#include "backend.h"
#include "engines.h"
#include "base/settings.h"
#include "cache/lines.h"
#include "state.h"

#include "engine/host.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sys/mman.h>
#include <unistd.h>

kvq_buffer::~kvq_buffer() {
    cache.reset();
    kvq_cuda_drop_inputs(*this);
    if (inner) { ggml_backend_buffer_free(inner); }
    if (base && nb_map) { munmap(base, nb_map); }
}

static kvq_buffer * context(ggml_backend_buffer_t buffer) { return (kvq_buffer *) buffer->context; }

static kvq_device_context & device_of(ggml_backend_buffer_type_t buft) {
    return *(kvq_device_context *) kvq_buft_context(buft);
}

void kvq_report_error(const std::string & text) {
    kvq_set_error(kvq_words_for_caller(text));
    kvq_say(std::string("ggml-kvq: error: ") + kvq_last_error());
}

void kvq_report_note(const std::string & line) { kvq_say("ggml-kvq: " + line); }

kvq_target kvq_find_target(const ggml_tensor * t) {
    kvq_target r;
    const ggml_tensor * root = t && t->view_src ? t->view_src : t;
    if (!root || !root->buffer || !kvq_buft_is_ours(root->buffer->buft)) { return r; }
    const bool allocated = root->buffer->context && root->buffer->size; // a dummy buffer of a size query is not
    if (allocated && !context(root->buffer)->cache) { return r; }
    const kvq_lane_id id = kvq_parse_cache_name(root->name);
    if (id.il < 0 || !id.tag.empty()) { return r; }
    r.ours = true;
    r.value = id.value;
    if (allocated) {
        r.cache = context(root->buffer)->cache.get();
        r.ours = r.cache;
        r.layer = r.cache ? r.cache->layer(id.il) : nullptr;
    }
    return r;
}

// ---------------------------------------------------------------- buffer interface

static void free_buffer(ggml_backend_buffer_t buffer) {
    const bool is_cache = (bool) context(buffer)->cache;
    if (is_cache) {
        kvq_stats_file_freeing(*context(buffer)->cache);
        kvq_say_at_end(context(buffer)->cache->closing_line());
    }
    delete context(buffer);
    if (is_cache) { kvq_stats_file_write(); }
}
static void * get_base(ggml_backend_buffer_t buffer) { return context(buffer)->base; }

static bool is_cache(ggml_backend_buffer_t buffer, const ggml_tensor * tensor) {
    return context(buffer)->cache && kvq_find_target(tensor).layer;
}

static void memset_tensor(
    ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    if (is_cache(buffer, tensor)) {
        kvq_fill_rows(tensor, value, offset, size);
        return;
    }
    kvq_note_written(*context(buffer), tensor, offset, size);
    if (context(buffer)->inner) {
        kvq_cuda_settle_inputs(*context(buffer), (char *) tensor->data + offset, size);
        context(buffer)->inner->iface.memset_tensor(context(buffer)->inner, tensor, value, offset, size);
    } else {
        memset((char *) tensor->data + offset, value, size);
    }
}

static void set_tensor(
    ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    if (is_cache(buffer, tensor)) {
        kvq_write_rows(tensor, data, offset, size, !context(buffer)->found);
        return;
    }
    kvq_note_written(*context(buffer), tensor, offset, size);
    if (ggml_backend_buffer_t inner = context(buffer)->inner) {
        char * const to = (char *) tensor->data + offset;
        if (!kvq_cuda_hold_input(*context(buffer), device_of(buffer->buft).ordinal, to, data, size)) {
            kvq_cuda_settle_inputs(*context(buffer), to, size);
            inner->iface.set_tensor(inner, tensor, data, offset, size);
        }
        auto & kept = context(buffer)->indices;
        if ((tensor->type == GGML_TYPE_I64 || tensor->type == GGML_TYPE_I32) && offset == 0 &&
            size == ggml_nbytes(tensor) && size <= 1 << 20) {
            kept[tensor->data].assign((const uint8_t *) data, (const uint8_t *) data + size);
        } else {
            kept.erase(tensor->data);
        }
    } else {
        memcpy((char *) tensor->data + offset, data, size);
    }
}

static void get_tensor(
    ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    if (is_cache(buffer, tensor)) {
        kvq_read_rows(tensor, data, offset, size);
    } else if (ggml_backend_buffer_t inner = context(buffer)->inner) {
        kvq_cuda_settle_inputs(*context(buffer), (const char *) tensor->data + offset, size);
        inner->iface.get_tensor(inner, tensor, data, offset, size);
    } else {
        memcpy(data, (const char *) tensor->data + offset, size);
    }
}

// n pieces of `size` bytes, `stride` bytes from one to the next in the tensor and `stride_data` in memory: with
// -sm tensor those that a device has of each row. Pieces that follow each other in a cache go as one.
static void set_tensor_2d(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
    size_t size, size_t n, size_t stride, size_t stride_data) {
    ggml_backend_buffer_t const inner = context(buffer)->inner;
    if (inner && inner->iface.set_tensor_2d) {
        const size_t nb = (n - 1) * stride + size;
        kvq_note_written(*context(buffer), tensor, offset, nb);
        kvq_cuda_settle_inputs(*context(buffer), (char *) tensor->data + offset, nb);
        context(buffer)->indices.erase(tensor->data);
        inner->iface.set_tensor_2d(inner, tensor, data, offset, size, n, stride, stride_data);
        return;
    }
    if (!is_cache(buffer, tensor) || stride != size) {
        for (size_t i = 0; i < n; i++) {
            set_tensor(buffer, tensor, (const char *) data + i * stride_data, offset + i * stride, size);
        }
        return;
    }
    std::vector<char> rows(n * size);
    for (size_t i = 0; i < n; i++) { memcpy(&rows[i * size], (const char *) data + i * stride_data, size); }
    set_tensor(buffer, tensor, rows.data(), offset, rows.size());
}

static void get_tensor_2d(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset,
    size_t size, size_t n, size_t stride, size_t stride_data) {
    ggml_backend_buffer_t const inner = context(buffer)->inner;
    if (inner && inner->iface.get_tensor_2d) {
        kvq_cuda_settle_inputs(*context(buffer), (const char *) tensor->data + offset, (n - 1) * stride + size);
        inner->iface.get_tensor_2d(inner, tensor, data, offset, size, n, stride, stride_data);
        return;
    }
    if (!is_cache(buffer, tensor) || stride != size) {
        for (size_t i = 0; i < n; i++) {
            get_tensor(buffer, tensor, (char *) data + i * stride_data, offset + i * stride, size);
        }
        return;
    }
    std::vector<char> rows(n * size);
    get_tensor(buffer, tensor, rows.data(), offset, rows.size());
    for (size_t i = 0; i < n; i++) { memcpy((char *) data + i * stride_data, &rows[i * size], size); }
}

// whole streams of one lane are copied as pages; everything else as rows
static bool cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    if (!is_cache(buffer, dst)) {
        if (ggml_backend_buffer_t inner = context(buffer)->inner) { // false: by way of the host
            ggml_tensor from = *src;
            if (from.buffer && kvq_buft_is_ours(from.buffer->buft)) {
                if (!context(from.buffer)->inner || is_cache(from.buffer, src)) { return false; }
                kvq_cuda_settle_inputs(*context(from.buffer), from.data, ggml_nbytes(src));
                from.buffer = context(from.buffer)->inner;
            }
            ggml_tensor to = *dst;
            to.buffer = inner;
            kvq_cuda_settle_inputs(*context(buffer), to.data, ggml_nbytes(dst));
            kvq_note_written(*context(buffer), dst, 0, ggml_nbytes(dst));
            context(buffer)->indices.erase(to.data);
            return inner->iface.cpy_tensor && inner->iface.cpy_tensor(inner, &from, &to);
        }
        if (src->buffer && ggml_backend_buffer_is_host(src->buffer)) {
            memcpy(dst->data, src->data, ggml_nbytes(src));
            return true;
        }
        return false;
    }
    return kvq_copy_rows(src, dst);
}

static void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    kvq_buffer * b = context(buffer);
    if (b->found) { b->found->written.clear(); }
    if (b->cache) {
        b->cache->clear(); // llama.cpp clears with 0 only: never-written cells read as zeros
    } else if (b->inner) {
        kvq_cuda_drop_inputs(*b);
        ggml_backend_buffer_clear(b->inner, value);
    } else if (value || madvise(b->base, b->nb_map, MADV_DONTNEED)) { // pages given back are zeros when they are used
        memset(b->base, value, buffer->size);
    }
}

static const ggml_backend_buffer_i buffer_interface = [] { // by name: members come and go between versions
    ggml_backend_buffer_i i = {};
    i.free_buffer = free_buffer;
    i.get_base = get_base;
    i.memset_tensor = memset_tensor;
    i.set_tensor = set_tensor;
    i.get_tensor = get_tensor;
    i.set_tensor_2d = set_tensor_2d;
    i.get_tensor_2d = get_tensor_2d;
    i.cpy_tensor = cpy_tensor;
    i.clear = clear;
    return i;
}();

// ---------------------------------------------------------------- buffer type interface

// llama.cpp puts cache layers whose buffer types bear one name into one buffer: every device needs its own
static const char * buft_name(ggml_backend_buffer_type_t buft) {
    return device_of(buft).ordinal || device_of(buft).for_draft ? device_of(buft).name.c_str() : "KVQ";
}
static size_t buft_alignment(ggml_backend_buffer_type_t buft) {
    const ggml_backend_dev_t inner = device_of(buft).inner;
    return inner ? std::max(KVQ_ALIGN, ggml_backend_buft_get_alignment(ggml_backend_dev_buffer_type(inner)))
                 : KVQ_ALIGN;
}
// else the CPU backend would touch the cache
static bool buft_is_host(ggml_backend_buffer_type_t) { return false; }

// where llama.cpp keeps memory of this device's layers without us
static ggml_backend_buffer_type_t upstream_type(const kvq_device_context & dev) {
    return dev.inner ? ggml_backend_dev_buffer_type(dev.inner) : ggml_backend_cpu_buffer_type();
}

bool kvq_buft_is_ours(ggml_backend_buffer_type_t buft) { return buft && buft->iface.get_name == buft_name; }

// A tensor that llama.cpp's memory keeps from one graph to the next: cache_k_l0, cache_r_l0, dsv4_csa_state_kv_l2.
static bool is_memory(const ggml_tensor * t) {
    const char * layer = strrchr(t->name, 'l');
    return t->op == GGML_OP_NONE && !t->view_src && !(t->flags & GGML_TENSOR_FLAG_INPUT) && layer && layer > t->name &&
        layer[-1] == '_' && layer[1] && strspn(layer + 1, "0123456789") == strlen(layer + 1);
}

// Another tensor that is kept from one graph to the next: a gradient, a momentum, a control vector. On the CPU it
// belongs to the CPU backend, which computes with it. Over an inner device that one does, in a buffer of ours.
static bool is_kept(const kvq_device_context & dev, const ggml_tensor * t) {
    return !dev.inner && t->op == GGML_OP_NONE && !t->view_src && !t->buffer && !(t->flags & GGML_TENSOR_FLAG_INPUT);
}

// Bytes of an inner device that a cache may take: graphs want theirs behind it, for which llama.cpp's --fit leaves as
// much.
static size_t room_on(ggml_backend_dev_t inner) {
    constexpr size_t FOR_GRAPHS = (size_t) 1 << 30;
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(inner, &free, &total);
    return free - std::min(free, FOR_GRAPHS);
}

static size_t get_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * tensor) {
    kvq_device_context & dev = device_of(buft);
    dev.used = true;
    const size_t nb_upstream = ggml_backend_buft_get_alloc_size(upstream_type(dev), tensor);
    if (!is_memory(tensor) || kvq_parse_cache_name(tensor->name).il < 0 ||
        !kvq_parse_cache_name(tensor->name).tag.empty()) {
        if (is_memory(tensor) || is_kept(dev, tensor)) {
            std::vector<kvq_creation::asked> & others = dev.creation().others;
            if (others.size() > 1 << 16) { others.clear(); } // of graphs, which nothing was allocated for
            others.push_back({ tensor->name, nb_upstream, is_memory(tensor) });
        }
        return dev.inner && tensor->op != GGML_OP_FLASH_ATTN_EXT ? nb_upstream : ggml_nbytes(tensor);
    }
    if (!tensor->ne[0]) { return 0; } // with -sm tensor other devices have all heads of this layer
    const auto placed = dev.creation().granted.find(tensor->name);
    if (placed != dev.creation().granted.end()) {
        const size_t nb = placed->second.nb;
        if (--placed->second.n_left == 0) { dev.creation().granted.erase(placed); }
        return nb;
    }
    kvq_cache_draft & draft = dev.creation().draft;
    draft.for_draft = dev.for_draft;
    draft.beside_host = dev.inner != nullptr;
    if (dev.inner) {
        draft.free_there = [inner = dev.inner] { return room_on(inner); };
    }
    size_t nb = std::max<size_t>(draft.add(tensor->name, (int) tensor->ne[0], (int) tensor->ne[1], (int) tensor->ne[2],
                                     kvq_declared_of(tensor->type)),
        1);
#ifndef NDEBUG
    nb = std::max(nb, ggml_nbytes(tensor)); // a debug ggml asserts this much: reserved there, never mapped
#endif
    draft.bytes_asked += kvq_pad(nb, buft_alignment(buft));
    draft.bytes_upstream += kvq_pad(nb_upstream, buft_alignment(buft));
    draft.asked[tensor->name] = nb;
    return nb;
}

kvq_declared kvq_declared_of(ggml_type type) {
    return { ggml_type_name(type), (int) ggml_blck_size(type), ggml_type_size(type) };
}

kvq_creation & kvq_device_context::creation() const {
    static thread_local std::map<const kvq_device_context *, kvq_creation> mine;
    return mine[this];
}

static const std::string KEPT = "tensors that are no cache";

// Memory that stays with llama.cpp, NULL when it cannot be had.
static ggml_backend_buffer_t alloc_upstream(kvq_device_context & dev, size_t size, const std::string & what) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(upstream_type(dev), size);
    char mib[32];
    snprintf(mib, sizeof(mib), "%.2f MiB", (double) size / 1048576.0);
    if (!buffer) {
        kvq_report_error("cannot allocate " + std::string(mib) + " for " + what + ": lower -c or -np");
    } else if (what != KEPT) {
        kvq_report_note(what + (what[0] == '1' && what[1] == ' ' ? " stays" : " stay") + " with llama.cpp (" + mib +
            ", device " + dev.name + ")");
    }
    return buffer;
}

// The last tensors that sizes were asked of, if `size` is what they take together: "18 recurrent layers", or KEPT when
// some are of no memory; else "".
static std::string others_of(kvq_device_context & dev, size_t size, size_t alignment) {
    std::set<std::string> recurrent, indexers;
    size_t nb = 0;
    bool all_of_memory = true;
    for (size_t i = dev.creation().others.size(); i-- > 0 && nb < size;) {
        all_of_memory = all_of_memory && dev.creation().others[i].of_memory;
        const std::string & name = dev.creation().others[i].name;
        nb += kvq_pad(dev.creation().others[i].nb, alignment);
        (kvq_parse_cache_name(name.c_str()).il < 0 ? recurrent : indexers).insert(name.substr(name.rfind("_l") + 1));
    }
    dev.creation().others.clear();
    if (!nb || nb != size) { return ""; }
    if (!all_of_memory) { return KEPT; }
    const auto text = [](size_t n, const char * kind) {
        return std::to_string(n) + " " + kind + (n == 1 ? " layer" : " layers");
    };
    std::string what = recurrent.empty() ? "" : text(recurrent.size(), "recurrent");
    if (!indexers.empty()) { what += (what.empty() ? "" : " and ") + text(indexers.size(), "indexer"); }
    return what;
}

static void fill_cache(kvq_device_context & dev, kvq_buffer & b, kvq_cache_draft & draft) {
    if (dev.inner) {
        for (const kvq_draft_layer & d : draft.layers) {
            if (const char * why = kvq_cuda_refuse(d)) {
                kvq_report_error("layer " + std::to_string(d.il) + ": " + why);
                return;
            }
        }
    }
    if (!kvq_take_share(&dev, draft)) { return; }
    b.cache.reset(new kvq_kv_cache(draft, kvq_device_of(dev, b)));
}

// The reason has been printed. A program behind our launcher would print six lines of its own and end: it ends here.
// Servers of other machines' layers live on.
static ggml_backend_buffer_t refuse(size_t size) {
    const char * launcher = kvq_setting_text(kvq_setting::LAUNCHER);
    if (size && *launcher && strcmp(launcher, "ggml-rpc-server") && kvq_verbosity() > 0) {
        fflush(nullptr);
        _exit(1);
    }
    return nullptr;
}

static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    kvq_device_context & dev = device_of(buft);
    kvq_cache_draft draft;
    std::swap(draft, dev.creation().draft);
    dev.creation().draft.before = draft.empty() ? draft.before : draft.as_before();
    dev.creation().granted.clear();
    const std::string others = others_of(dev, size, buft_alignment(buft));
    if (!others.empty()) { return alloc_upstream(dev, size, others); }
    if (draft.bytes_asked != size) { // sizes were asked for (--fit), but something else is allocated
        draft.reset();
    } else if (!draft.declined().empty()) {
        return alloc_upstream(dev, draft.bytes_upstream, draft.declined());
    } else if (!draft.complete()) {
        kvq_report_error(draft.error());
        return refuse(size);
    }
    std::unique_ptr<kvq_buffer> b(new kvq_buffer);
    b->announced = !draft.empty();
    if (!draft.empty()) {
        dev.creation().refused = false;
        try {
            fill_cache(dev, *b, draft);
        } catch (const std::bad_alloc &) {}
        b->nb_map = std::max(draft.bytes_nominal, size);
        b->base = b->cache && b->cache->ok()
            ? mmap(nullptr, b->nb_map, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
            : MAP_FAILED;
    } else {
        if (dev.creation().refused) { // said why when the graph was split
            return refuse(size);
        }
        if (dev.inner) {
            b->inner = ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(dev.inner), size);
            b->base = b->inner ? ggml_backend_buffer_get_base(b->inner) : MAP_FAILED;
        } else {
            b->nb_map = std::max<size_t>(size, 1);
            b->base = mmap(nullptr, b->nb_map, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        }
    }
    if (b->base == MAP_FAILED) {
        b->base = nullptr;
        const std::string what = "cannot allocate " + std::to_string(size >> 20) + " MiB for the " +
            (draft.empty() ? "compute buffer" : "KV cache") + ": lower -c or -ub";
        kvq_report_error(b->cache && !b->cache->lacks().empty() ? b->cache->lacks() : what);
        return refuse(size);
    }
    for (const auto & a : draft.asked) { dev.creation().granted[a.first] = { a.second, 2 }; }
    if (b->cache && !dev.name.empty()) { b->cache->device_name = dev.name; }
    if (b->cache) {
        kvq_stats_file_start();
        kvq_say(b->cache->load_line());
    }
    return ggml_backend_buffer_init(buft, buffer_interface, b.release(), size);
}

void kvq_init_buffer_type(kvq_device_context & dev, ggml_backend_dev_t device) {
    const kvq_layout & l = kvq_layout_here; // what is not put here is optional, and NULL
    dev.buft = {};
    dev.buft.put(offsetof(ggml_backend_buffer_type, iface.get_name), (const void *) buft_name);
    dev.buft.put(offsetof(ggml_backend_buffer_type, iface.alloc_buffer), (const void *) alloc_buffer);
    dev.buft.put(l.get_alignment, (const void *) buft_alignment);
    dev.buft.put(l.get_alloc_size, (const void *) get_alloc_size);
    dev.buft.put(l.is_host, (const void *) buft_is_host);
    dev.buft.put(l.device, device);
    dev.buft.put(l.context, &dev);
}

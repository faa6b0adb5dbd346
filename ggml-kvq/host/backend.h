// Shared by the files of host/: device, buffers, graph.
#pragma once

#include "ggml-backend-impl.h"
#include "ggml.h"
#include "layout.h"
#include "cache/cache.h"

#include <atomic>

struct kvq_creation {
    kvq_cache_draft draft; // of the cache whose sizes ggml is asking for
    struct asked {
        std::string name;
        size_t nb;
        bool of_memory; // else kept for something else: gradients, control vectors
    };
    // tensors that are kept between graphs and are no keys or values, in the order of their size queries
    std::vector<asked> others;
    struct grant {
        size_t nb;
        int n_left;
    };
    std::map<std::string, grant> granted; // ggml asks twice more per tensor while it places them
    bool refused = false; // the graph just split needs something unsupported: the next compute buffer is denied
};

struct kvq_device_context {
    std::string name, description;
    kvq_own_buft buft;
    // the device that is wrapped: owns weights and computes all other nodes; NULL on the CPU
    ggml_backend_dev_t inner = nullptr;
    int ordinal = 0;        // of the inner device
    bool for_draft = false; // KVQD<i>: of draft models, there when KVQ_METHOD_DRAFT is set
    // A layer or a cache was offered. Until then a CPU device takes no node of others: its scheduler would cut a graph
    // whose layers are all elsewhere (-ngl 0) at each norm, which llama.cpp gives to the layer's own device.
    std::atomic<bool> used{ false };
    // What ggml asks of this device while a context is made, call after call in one thread: other threads may make
    // theirs meanwhile.
    kvq_creation & creation() const;
    // printed once each: llama.cpp may try a context for size (--fit) before the real one
    std::vector<std::string> refusals;
};

struct kvq_backend_context {
    ggml_backend_dev_t device;
    int n_threads = 1;
    ggml_backend_t inner = nullptr;
    // without an inner one: compute the graph, our nodes in it (whole_graph.cpp); pooled: in threads of a pool
    ggml_backend_t cpu = nullptr, pooled = nullptr;
    bool (*abort)(void *) = nullptr; // ends a graph early
    void * abort_data = nullptr;
    std::shared_ptr<struct kvq_kept_step> kept;
    void * stream = nullptr;                 // the inner backend's: our kernels run between its own
    bool idle = false;                       // nothing was asked of the stream since it was waited for
    struct kvq_cuda_steps * steps = nullptr; // graphs that are recorded and replayed (cuda_step.cpp)
    std::vector<kvq_kv_cache *> late;        // whose last layer has not sealed (kvq_seal_late)
    // contexts of the buffers that the graph of this uid uses (cuda_inputs.cpp)
    std::vector<const void *> memory;
    uint64_t memory_uid = 0;
    // frequency factors of rotary embeddings, by device address
    mutable std::map<const void *, std::vector<float>> factors;
};

// What a buffer of our type holds (buffer.cpp).
struct kvq_buffer {
    void * base = nullptr;
    size_t nb_map = 0;
    ggml_backend_buffer_t inner = nullptr; // plain, on a wrapped device: the buffer that is wrapped
    std::unique_ptr<kvq_device> device;
    std::unique_ptr<kvq_kv_cache> cache;                  // NULL: plain
    bool announced = false;                               // as a cache, by size queries
    std::map<const void *, std::vector<uint8_t>> indices; // host copies of small integer inputs, by device address
    std::shared_ptr<class kvq_cuda_inputs> inputs;        // small ones that no graph has used yet; NULL: none so far
    std::unique_ptr<struct kvq_found_cache> found;        // a cache that was not announced (remote.cpp)
    ~kvq_buffer();
};

// Lane of a cache tensor or of a view of one; cache is NULL when the tensor is not ours or a size query's dummy.
struct kvq_target {
    bool ours = false; // keys or values in a cache of ours, or in a dummy of our type
    kvq_kv_cache * cache = nullptr;
    kvq_kv_layer * layer = nullptr;
    bool value = false;
};
kvq_target kvq_find_target(const ggml_tensor * t);

bool kvq_buft_is_ours(ggml_backend_buffer_type_t buft);
struct kvq_declared kvq_declared_of(ggml_type type); // cache/declared.h
void kvq_init_buffer_type(kvq_device_context & dev, ggml_backend_dev_t device);

// graph.cpp
bool kvq_is_view_op(ggml_op op);
// Tells the layer what rotary embedding the rows being written went through; NULL in *rope: they went through none.
bool kvq_learn_rope(const kvq_backend_context & b, const ggml_tensor * set_rows, const kvq_target & t,
    const ggml_tensor ** rope, std::string & err);
bool kvq_supports_op(kvq_device_context & dev, const ggml_tensor * op);
ggml_status kvq_compute_graph(kvq_backend_context & backend, ggml_cgraph * graph);
ggml_backend_dev_t kvq_ggml_cpu(void);       // ggml's; NULL: there is none
void kvq_seal_late(kvq_backend_context & b); // what a step left to the next one, or to whoever waits for the device
// before a step on these, and behind it; false: out of memory, and told
bool kvq_has_sealed(kvq_backend_context & b, const std::vector<kvq_kv_cache *> & caches);
bool kvq_has_memory(const std::vector<kvq_kv_cache *> & caches); // false: to seal there was none, and that is told
// straight: the rows are not turned (turned.h)
bool kvq_set_rows(const kvq_backend_context & b, const ggml_tensor * node, const kvq_target & t, bool straight);
// their pages are open already, and their cells below n_kv
bool kvq_rows_stay_open(
    const kvq_backend_context & b, const ggml_tensor * node, const kvq_target & t, int n_kv, bool or_empty);

// share.cpp, with -sm tensor: calibrated data of the heads that this device has; false: they are not there, and told
bool kvq_take_share(const kvq_device_context * dev, kvq_cache_draft & draft);
bool kvq_is_over_devices(const ggml_tensor * t);
void kvq_learn_part(const kvq_device_context & dev, const ggml_tensor * op);

// remote.cpp: what a client on another machine asks, who names no tensors before he sends a graph
struct kvq_found_cache {
    kvq_cache_draft draft;
    std::vector<std::pair<char *, size_t>> written; // ranges of cache tensors that were set before the first graph
    size_t nb_known = 0;                            // nominal bytes of the tensors seen so far
    bool said = false;                              // the load line is printed
};
bool kvq_find_caches(kvq_backend_context & b, const ggml_cgraph * graph); // false: refused, with a line
void kvq_note_written(kvq_buffer & b, const ggml_tensor * tensor, size_t offset, size_t size);

// stats_file.cpp: KVQ_STATS_FILE names a file that tells what the caches hold, rewritten every two seconds
void kvq_stats_file_start(void);                         // there is a new cache
void kvq_stats_file_freeing(const kvq_kv_cache & cache); // its last figures are kept
void kvq_stats_file_write(void);
struct kvq_busy {
    kvq_busy();
    ~kvq_busy();
}; // held while a graph is computed: figures are read between graphs

// absent.cpp: one line when KVQ_METHOD is set and a context keeps its cache elsewhere. Asked of every node that a
// device could take.
void kvq_note_absent(const ggml_tensor * op);

void kvq_report_error(const std::string & line); // stderr and kvq_last_error
void kvq_report_note(const std::string & line);  // stderr

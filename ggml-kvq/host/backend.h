// Shared by the files of host/: device, buffers, graph.
#pragma once

#include "ggml-backend-impl.h"
#include "ggml.h"
#include "kv_cache.h"

struct kvq_device_context {
    std::string name, description;
    ggml_backend_buffer_type buft;
    kvq_cache_draft draft;   // of the cache whose sizes ggml is asking for
    struct grant { size_t nb; int n_left; };
    std::map<std::string, grant> granted; // ggml asks twice more per tensor while it places them
    bool refused = false;    // the graph just split needs something unsupported: the next compute buffer is denied
};

struct kvq_backend_context {
    ggml_backend_dev_t device;
    int n_threads = 1;
};

// Lane of a cache tensor or of a view of one; cache is NULL when the tensor is not ours or a size query's dummy.
struct kvq_target {
    bool           ours  = false; // lives in a buffer of our type and bears a cache name
    kvq_kv_cache * cache = nullptr;
    kvq_kv_layer * layer = nullptr;
    bool           value = false;
};
kvq_target kvq_find_target(const ggml_tensor * t);

bool kvq_buft_is_ours(ggml_backend_buffer_type_t buft);
void kvq_init_buffer_type(kvq_device_context & dev, ggml_backend_dev_t device);

// graph.cpp
bool        kvq_supports_op (kvq_device_context & dev, const ggml_tensor * op);
ggml_status kvq_compute_graph(kvq_backend_context & backend, ggml_cgraph * graph);

void kvq_report_error(const std::string & line); // stderr and kvq_last_error

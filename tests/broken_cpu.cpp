// A CPU backend with a fault, for test_build_probes.py: the real one ($KVQ_REAL_CPU) behind a wrapper that spoils
// products with weights of the type $KVQ_FAULT_TYPE. $KVQ_FAULT: wrong (one value is off), crash, abort, or foreign (a
// library that says it is not for this CPU).
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <dlfcn.h>

#include <csignal>
#include <cstdlib>
#include <string>

static std::string setting(const char * name) {
    const char * value = getenv(name);
    return value ? value : "";
}

static ggml_status (*real_compute)(ggml_backend_t, ggml_cgraph *);

static ggml_status compute(ggml_backend_t backend, ggml_cgraph * graph) {
    const ggml_status status = real_compute(backend, graph);
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_MUL_MAT && setting("KVQ_FAULT_TYPE") == ggml_type_name(node->src[0]->type)) {
            if (setting("KVQ_FAULT") == "crash") { raise(SIGSEGV); }
            if (setting("KVQ_FAULT") == "abort") { GGML_ABORT("a fault"); }
            ((float *) node->data)[7] *= 1.5f;
        }
    }
    return status;
}

extern "C" int ggml_backend_score() { return setting("KVQ_FAULT") == "foreign" ? 0 : 1; }

extern "C" ggml_backend_reg_t ggml_backend_cpu_reg() {
    void * library = dlopen(setting("KVQ_REAL_CPU").c_str(), RTLD_NOW);
    auto open = (ggml_backend_reg_t (*)()) dlsym(library, "ggml_backend_cpu_reg");
    static ggml_backend_reg reg = *open();
    static ggml_backend_dev_t real_dev = ggml_backend_reg_dev_get(open(), 0);
    static ggml_backend_device dev = *real_dev;
    dev.iface.init_backend = [](ggml_backend_dev_t, const char * params) {
        ggml_backend_t backend = real_dev->iface.init_backend(real_dev, params);
        real_compute = backend->iface.graph_compute;
        backend->iface.graph_compute = compute;
        return backend;
    };
    reg.iface.get_device = [](ggml_backend_reg_t, size_t) -> ggml_backend_dev_t { return &dev; };
    return &reg;
}

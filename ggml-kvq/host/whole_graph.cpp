// On the CPU a step is one graph of ggml's CPU backend. A node on a cache of ours stands in it as GGML_OP_CUSTOM with
// our function: one team of threads computes all of a token, without a stop at each layer. The last node seals.
#include "op_params.h"
#include "process.h"
#include "step.h"

#include "base/parallel.h"

#include "ggml-impl.h" // ggml_cgraph

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <vector>

namespace {

// ---------------------------------------------------------------- threads

// A build of ggml without OpenMP starts threads for each graph unless it is given a pool. One pool for each number of
// threads serves all contexts of the process, one graph at a time; whoever finds them in use goes without. Between
// graphs the threads sleep. Waking them takes 3 % of a short step; awake they would share the cores with the program,
// which costs node-llama-cpp 10 %.
class thread_pools {
public:
    // for the graph that is computed while `lock` is held; NULL: none is to be had
    ggml_threadpool * get(ggml_backend_reg_t cpu, int n, std::unique_lock<std::mutex> & lock) {
        lock = std::unique_lock<std::mutex>(in_use, std::try_to_lock);
        const auto init = KVQ_OPTIONAL(ggml_threadpool_params_init);
        const auto make = (make_t) ggml_backend_reg_get_proc_address(cpu, "ggml_threadpool_new");
        if (!lock.owns_lock() || !init || !make) { return nullptr; }
        const auto found = pools.find(n);
        if (found != pools.end()) { return found->second; }
        ggml_threadpool_params params = {};
        init(&params, n);
        params.poll = 0;
        return pools[n] = params.n_threads == n ? make(&params) : nullptr; // the structure is as we know it
    }

private:
    using make_t = ggml_threadpool * (*)(ggml_threadpool_params *);
    std::mutex in_use;
    std::map<int, ggml_threadpool *> pools; // they live as long as the process: backends hold them
};

thread_pools & pools() {
    static thread_pools * const all = new thread_pools;
    return *all;
}

ggml_status compute(kvq_backend_context & b, ggml_cgraph * graph) {
    ggml_backend_dev_t const device = kvq_ggml_cpu();
    ggml_backend_reg_t const reg = device ? ggml_backend_dev_backend_reg(device) : nullptr;
    const auto of_reg = [&](const char * name) { return ggml_backend_reg_get_proc_address(reg, name); };
    using set_pool_t = void (*)(ggml_backend_t, ggml_threadpool *);
    const auto set_pool = reg ? (set_pool_t) of_reg("ggml_backend_cpu_set_threadpool") : nullptr;
    std::unique_lock<std::mutex> lock;
    ggml_threadpool * const pool = set_pool && b.n_threads > 1 ? pools().get(reg, b.n_threads, lock) : nullptr;
    ggml_backend_t & cpu = pool ? b.pooled : b.cpu;
    if (!cpu) { cpu = device ? ggml_backend_dev_init(device, nullptr) : nullptr; }
    if (!cpu) {
        kvq_report_error("ggml's CPU backend cannot be started: out of memory?");
        return GGML_STATUS_FAILED;
    }
    const auto set_threads = (ggml_backend_set_n_threads_t) of_reg("ggml_backend_set_n_threads");
    const auto set_abort = (ggml_backend_set_abort_callback_t) of_reg("ggml_backend_set_abort_callback");
    if (set_threads) { set_threads(cpu, b.n_threads); }
    if (set_abort) { set_abort(cpu, b.abort, b.abort_data); }
    if (pool) { set_pool(cpu, pool); }
    return cpu->iface.graph_compute(cpu, graph);
}

// ---------------------------------------------------------------- nodes of ours

struct whole_step {
    kvq_backend_context & b;
    const kvq_step & step;
    ggml_status status;        // of our nodes; once one has failed the others do nothing
    int n_cpus = kvq_n_cpus(); // a thread without a core of its own would be waited for at each node
};

struct own_node {
    whole_step * of;
    const kvq_step::part * part; // NULL: the end of the step
    ggml_tensor tensor;
    kvq_team team;
};

void lead(whole_step & x, const kvq_step::part * part) {
    const char * const at = part ? kvq_part_name(*part) : "sealing";
    try {
        if (!part) {
            kvq_end_step(x.b, x.step, kvq_run::EAGER);
        } else if (!kvq_compute_part(x.b, *part, kvq_run::EAGER)) {
            x.status = GGML_STATUS_FAILED;
        }
    } catch (const std::bad_alloc &) {
        kvq_report_memory(at);
        x.status = GGML_STATUS_ALLOC_FAILED;
    }
}

void run_own(ggml_tensor *, int ith, int nth, void * userdata) {
    own_node & node = *(own_node *) userdata;
    whole_step & x = *node.of;
    node.team.enter(ith, nth, x.n_cpus, [&] {
        const int n_threads = x.b.n_threads;
        x.b.n_threads = std::min(nth, x.n_cpus);
        if (x.status == GGML_STATUS_SUCCESS) { lead(x, node.part); }
        x.b.n_threads = n_threads;
    });
}

// The node in place of `was`. It has no operands: our code reads those of `was`.
ggml_tensor * stand_in(own_node & node, const ggml_tensor & was) {
    const kvq_custom_params params = { run_own, GGML_N_TASKS_MAX, &node };
    node.tensor = was;
    node.tensor.op = (ggml_op) kvq_layout_here.op_custom;
    memset(node.tensor.src, 0, sizeof(node.tensor.src));
    memset(node.tensor.op_params, 0, sizeof(node.tensor.op_params));
    memcpy(node.tensor.op_params, &params, sizeof(params));
    return &node.tensor;
}

} // namespace

ggml_backend_dev_t kvq_ggml_cpu(void) {
    static std::atomic<ggml_backend_dev_t> found{ nullptr };
    if (!found) {
        const auto by_type = KVQ_OPTIONAL(ggml_backend_dev_by_type); // in libggml, which holds the list of devices
        found = by_type ? by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : nullptr;
    }
    return found;
}

// A process that does not tell its CPU device: then its scheduler gives us nodes of ours alone.
static ggml_status compute_alone(kvq_backend_context & b, ggml_cgraph * graph, const kvq_step & step) {
    whole_step of = { b, step, GGML_STATUS_SUCCESS };
    for (const kvq_step::part & x : step.parts) {
        if (x.what == kvq_step::OTHERS) {
            const ggml_tensor * node = graph->nodes[x.first];
            kvq_report_error(std::string("node ") + node->name + " (" + ggml_op_name(node->op) +
                ") is on no cache of ours, and this program's ggml names no CPU device");
            return GGML_STATUS_FAILED;
        }
        lead(of, &x);
        if (of.status != GGML_STATUS_SUCCESS) { return of.status; }
    }
    lead(of, nullptr);
    return of.status;
}

ggml_status kvq_compute_whole(kvq_backend_context & b, ggml_cgraph * graph, const kvq_step & step) {
    if (!kvq_ggml_cpu()) { return compute_alone(b, graph, step); }
    size_t n_own = 0;
    for (const kvq_step::part & x : step.parts) { n_own += x.what != kvq_step::OTHERS; }
    if (!n_own) { return compute(b, graph); }
    whole_step of = { b, step, GGML_STATUS_SUCCESS };
    std::vector<own_node> own(n_own + 1);
    std::vector<ggml_tensor *> nodes = step.nodes;
    if (nodes.empty()) { nodes.assign(graph->nodes, graph->nodes + graph->n_nodes); }
    size_t n = 0;
    for (const kvq_step::part & x : step.parts) {
        if (x.what == kvq_step::OTHERS) { continue; }
        own[n].of = &of;
        own[n].part = &x;
        nodes[(size_t) x.first] = stand_in(own[n], *x.node);
        n++;
    }
    own[n].of = &of;
    own[n].part = nullptr;
    nodes.push_back(stand_in(own[n], own[n - 1].tensor));
    ggml_cgraph whole = *graph;
    whole.nodes = nodes.data();
    whole.n_nodes = (int) nodes.size();
    whole.size = whole.n_leafs = 0;
    whole.leafs = whole.grads = whole.grad_accs = nullptr;
    whole.uid = 0;
    const ggml_status status = compute(b, &whole);
    return of.status != GGML_STATUS_SUCCESS ? of.status : status;
}

// One evaluation of a graph as a value: what it does to our caches and, between that, what others compute, in order.
// Made from the graph before anything runs (step.cpp), so that what we cannot do ends it at once; then executed node by
// node (graph.cpp), or recorded and replayed (cuda_step.cpp).
#pragma once

#include "backend.h"

// Most tokens of a step that may be computed again and again, for many sequences. Longer ones are prompts: ggml-cuda
// would make a CUDA graph of each part the second time, and few parts come often enough to pay for that.
constexpr int64_t KVQ_RECORDED_ROWS = 256;

struct kvq_step {
    kvq_step() = default;
    kvq_step(kvq_step &&) = default; // nodes point into copies
    kvq_step & operator=(kvq_step &&) = default;
    enum kind {
        OTHERS,       // nodes [first, end) for the inner backend, or for ggml's CPU backend
        WRITE,        // rows go to a cache
        ATTEND,       // a layer is read
        SHIFT,        // keys of a layer get new positions
        BEFORE_SHIFT, // they would be decoded for it: the shift itself works on what is stored
        // CUDA only: the due pages of one layer seal, so that their frames are free for the next layer. Other layers
        // seal when the step has run; those that evict wait for the device, and are left to kvq_seal_late.
        SEAL,
        OWN, // a node of ggml-kvq-graph.h
    };
    struct part {
        kind what;
        int first = 0, end = 0;
        ggml_tensor * node = nullptr;
        kvq_target target = {};
        // Turns of llama.cpp (turned.h) that are left out: of what the node reads, and of the output of attention.
        bool straight = false, straight_out = false;
    };
    std::vector<part> parts;
    std::vector<ggml_tensor *> nodes; // of the graph, copies in place of turns; empty: none is left out
    std::vector<ggml_tensor> copies;
    std::vector<kvq_kv_cache *> caches;              // that it touches
    std::vector<std::vector<kvq_kv_layer *>> layers; // of each of them, in the graph's order
    int64_t n_rows = 0;                              // tokens
    std::string why_not;                             // a node that we cannot compute; "": none
};

// on the CPU: the step of the graph that was computed last
struct kvq_kept_step {
    uint64_t uid = 0; // of the graph; 0: nothing is kept
    ggml_tensor ** nodes = nullptr;
    int n_nodes = 0;
    kvq_step step;
    bool is_of(const ggml_cgraph * graph) const;
};

// EAGER: node by node. BEFORE_RECORDING: node by node too, but the step will be recorded soon, so the inner backend
// makes no CUDA graph of a part. RECORD: nothing seals while a step is recorded. RECORD_UNSEEN: likewise, for steps
// none of whose rows scores cells (policy/probe.h).
enum class kvq_run { EAGER, BEFORE_RECORDING, RECORD, RECORD_UNSEEN };
static inline bool kvq_records(kvq_run how) { return how == kvq_run::RECORD || how == kvq_run::RECORD_UNSEEN; }

kvq_step kvq_step_of(const kvq_backend_context & b, ggml_cgraph * graph);
// Rows that no attention has read, of layers that this step writes (cache.h); false: out of memory, and told.
bool kvq_seal_overdue(kvq_backend_context & b, const kvq_step & step);
// No batch is computed on a state that was refused or lacks rows.
bool kvq_states_are_whole(const kvq_step & step);
ggml_status kvq_run_step(kvq_backend_context & b, ggml_cgraph * graph, const kvq_step & step, kvq_run how);
// whole_graph.cpp, on the CPU: all parts as one graph of ggml's CPU backend
ggml_status kvq_compute_whole(kvq_backend_context & b, ggml_cgraph * graph, const kvq_step & step);
// The part on a cache of ours; false: an error was reported.
bool kvq_compute_part(kvq_backend_context & b, const kvq_step::part & x, kvq_run how);
const char * kvq_part_name(const kvq_step::part & x);
void kvq_end_step(kvq_backend_context & b, const kvq_step & step, kvq_run how); // seals what is due
void kvq_report_memory(const char * at);

// one line on why this node on a cache of ours cannot be computed, "" when it can
std::string kvq_why_not(const ggml_tensor * node, const kvq_target & t);

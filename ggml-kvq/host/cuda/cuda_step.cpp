// One token of a model is the same graph many times over: llama.cpp reuses it while the padded cache length stays.
// Such a graph is recorded once - the inner backend's kernels and ours, on its stream - and launched again as one
// CUDA graph. What changes from step to step comes from device memory: the rows' addresses (kvq_cuda_device's table)
// and the spans, both brought up to date before the launch. Where few steps score cells (zipcache) there is a second
// recording, for those that do not. Sealing follows it. A step that reopens a sealed page runs node by node: what it
// holds is decoded when its turn comes. With -sm tensor a token is many graphs, between which devices add their parts:
// each has a recording of its own, and graphs that touch no cache are the inner backend's.
#ifdef KVQ_CUDA
#include "host/engines.h"
#include "host/step.h"

#include "cuda/device/device.h"
#include "cuda/device/graph.h"
#include "ggml-impl.h" // ggml_cgraph

#include <algorithm>
#include <climits>
#include <cstring>

namespace {

constexpr int MAX_ROWS = 64; // query rows of a KV head: above it prompts run, which do not wait for launches

kvq_cuda_device & cuda(kvq_kv_cache & cache) { return static_cast<kvq_cuda_device &>(cache.device); }

// the inner backend would wait for the device in the middle of this node
bool waits(const ggml_tensor * node) {
    return node->op == GGML_OP_MUL_MAT_ID &&
        (node->ne[2] > 1 || !ggml_is_quantized(node->src[0]->type) || node->src[1]->type != GGML_TYPE_F32);
}

// tokens of many sequences over one cache
bool walks_lists(const kvq_step::part & x) {
    const ggml_tensor *q = x.node->src[0], *k = x.node->src[1], *mask = x.node->src[3];
    const kvq_draft_layer & d = x.target.layer->d;
    if (!mask || d.k.bytes_far) { return false; }
    kvq_attn a = {};
    a.k = d.k.codec;
    a.v = d.v.codec;
    a.n_q = (int) q->ne[1];
    a.n_head = (int) q->ne[2];
    a.n_head_kv = (int) k->ne[2];
    a.n_pages = std::min(((int) k->ne[1] + d.k.page_cells - 1) / d.k.page_cells, x.target.layer->spans.n_pages);
    a.mask = (const uint16_t *) mask; // there is one
    a.mask_stride_head = mask->ne[2] > 1;
    return cuda(*x.target.cache).lists(a, (int) q->ne[3]);
}

} // namespace

struct kvq_cuda_step {
    // n_kv: cells that the attention behind it reads
    struct write {
        const ggml_tensor * node;
        kvq_target target;
        int n_kv;
    };
    // of a stream of a layer whose cells are scored
    struct look {
        kvq_kv_layer * layer;
        kvq_cuda_device * device;
        int stream, n_pages, n_q, n_head;
    };
    uint64_t uid = 0;
    const void * first = nullptr;
    uint64_t last_used = 0; // number of the evaluation
    bool fits = false;
    bool of_others = false; // it touches no cache
    bool whole = true;      // it touches all layers of its caches
    int n_run = 0;
    size_t n_rows = 0;
    // streams of a layer that are attended
    struct read {
        kvq_kv_layer * layer;
        int stream, n;
    };
    std::vector<write> writes;
    std::vector<look> looks;
    std::vector<read> reads;
    kvq_step step;
    struct recording {
        kvq_cuda_graph graph;
        uint64_t generation; // of the caches when it was made
    };
    recording seen, unseen; // unseen: for steps that score no cell

    void learn(const kvq_backend_context & b, ggml_cgraph * g);
    void learn_attention(const kvq_step::part & x);
    void learn_layers();
    bool quiet(const kvq_backend_context & b, bool may_open) const;
    uint64_t moved() const;
    bool begin(kvq_cuda_device::step s);
    void end();
    bool scores() const; // this step may, once its rows are noted
    bool prepare();      // what scores read, once the rows are noted; false: a recording points elsewhere now
    void spans_on();     // spans of its layers go to the device
};

// Those of a backend. A token is one graph, whose place the next one takes, or many of one pass over the layers. Of
// these, one that was not used in the last KEPT evaluations is used no more.
struct kvq_cuda_steps {
    static constexpr uint64_t KEPT = 512;
    std::vector<std::unique_ptr<kvq_cuda_step>> all; // in the order of a pass
    size_t at = 0;                                   // of the one that was used last
    kvq_cuda_step unnamed;                           // a graph without a number: never used again
    kvq_cuda_step * now = nullptr;                   // that is evaluated
    uint64_t n_evaluations = 0;
    std::vector<const kvq_kv_layer *> passed; // of this pass over the layers
    kvq_cuda_step & of(const kvq_backend_context & b, ggml_cgraph * graph);
    // Pages seal once a pass: looking at all layers takes longer than a graph of one layer is queued.
    bool begins_pass(const kvq_cuda_step & s);
};

void kvq_cuda_step::learn(const kvq_backend_context & b, ggml_cgraph * g) {
    uid = g->uid;
    first = g->n_nodes ? g->nodes[0] : nullptr;
    n_run = 0;
    n_rows = 0;
    seen.generation = unseen.generation = ~0ull;
    writes.clear();
    looks.clear();
    reads.clear();
    step = kvq_step_of(b, g);
    of_others = step.why_not.empty() && step.caches.empty();
    fits = uid != 0 && step.why_not.empty();
    for (const kvq_step::part & x : step.parts) {
        switch (x.what) {
        case kvq_step::OTHERS: fits = fits && std::none_of(g->nodes + x.first, g->nodes + x.end, waits); break;
        case kvq_step::WRITE:
            fits = fits && !x.target.cache->refused;
            writes.push_back({ x.node, x.target, INT_MAX });
            n_rows += (size_t) x.node->src[0]->ne[1];
            break;
        case kvq_step::ATTEND: learn_attention(x); break;
        case kvq_step::SEAL: break;
        case kvq_step::BEFORE_SHIFT: fits = false; break;
        default: fits = false; break;
        }
    }
    fits = fits && !writes.empty();
    learn_layers();
}

void kvq_cuda_step::learn_layers() {
    whole = true;
    for (size_t i = 0; i < step.caches.size(); i++) {
        const bool all = step.layers[i].size() == step.caches[i]->layers.size();
        fits = fits && (all || !step.caches[i]->chain()); // the layer before a predicted one is another recording's
        whole = whole && all;
    }
}

void kvq_cuda_step::learn_attention(const kvq_step::part & x) {
    const ggml_tensor *q = x.node->src[0], *k = x.node->src[1];
    const kvq_target & t = x.target;
    const kvq_draft_layer & d = t.layer->d;
    fits = fits && (q->ne[1] * q->ne[2] / k->ne[2] <= MAX_ROWS || walks_lists(x)) && !d.latent &&
        !(d.k.bytes_far && q->ne[1] >= KVQ_PROMPT_ROWS); // these are read as rows
    for (write & w : writes) {                           // attention writes these rows itself when the cache is short
        w.n_kv = w.target.layer == t.layer ? (int) k->ne[1] : w.n_kv;
    }
    const int stream0 = (int) (k->view_offs / (d.declared[0].row(d.n_embd_k) * d.n_cells)), per_page = d.k.page_cells;
    reads.push_back({ t.layer, stream0, (int) q->ne[3] });
    if (!cuda(*t.cache).may_observe || !t.layer->probe || !t.layer->probe->asks((int) q->ne[1])) { return; }
    const kvq_span_table & spans = t.layer->spans;
    const int n_pages =
        spans.packed ? spans.n_pages : std::min(((int) k->ne[1] + per_page - 1) / per_page, spans.n_pages);
    for (int i = 0; i < q->ne[3]; i++) {
        looks.push_back(
            { t.layer, &cuda(*t.cache), stream0 + i, n_pages, (int) q->ne[1], (int) (q->ne[2] * q->ne[3]) });
    }
}

// every row goes into a page that is open already, or into an empty one, and attention is as in other steps
bool kvq_cuda_step::quiet(const kvq_backend_context & b, bool may_open) const {
    for (const write & w : writes) {
        if (!kvq_rows_stay_open(b, w.node, w.target, w.n_kv, may_open)) { return false; }
    }
    for (const read & x : reads) {
        for (const auto & policy : x.layer->policies) {
            for (int s = x.stream; s < x.stream + x.n; s++) {
                if (policy->stands_alone(s)) { return false; }
            }
        }
    }
    return true;
}

uint64_t kvq_cuda_step::moved() const {
    uint64_t sum = 0;
    for (kvq_kv_cache * c : step.caches) { // and attention that takes another way once cells have moved
        sum += cuda(*c).generation();
        for (int s = 0; s < c->layers[0]->d.n_stream; s++) { sum += c->stayed(s) ? 0 : (uint64_t) 1 << 32; }
    }
    return sum;
}

bool kvq_cuda_step::begin(kvq_cuda_device::step s) {
    bool ok = true;
    for (const look & x : looks) {
        if (s == kvq_cuda_device::RECORD) { // everything it will point at
            x.layer->probe->reserve(x.stream, MAX_ROWS, 0);
            ok = ok && x.device->lse_of((size_t) x.n_q * x.n_head);
        }
    }
    if (s == kvq_cuda_device::RECORD) { spans_on(); } // no transfers in a recording
    for (kvq_kv_cache * c : step.caches) { ok = ok && cuda(*c).begin_step(s, n_rows); }
    return ok;
}

void kvq_cuda_step::spans_on() {
    for (size_t i = 0; i < step.caches.size(); i++) {
        for (kvq_kv_layer * l : step.layers[i]) { l->spans.on(step.caches[i]->device); }
    }
}

void kvq_cuda_step::end() {
    spans_on();
    for (kvq_kv_cache * c : step.caches) { cuda(*c).end_step(); }
}

bool kvq_cuda_step::scores() const {
    return looks.empty() || std::any_of(looks.begin(), looks.end(), [](const look & x) {
        // a recording of packed pages knows how many there may be: one of them is enough to look after
        return x.layer->spans.packed || x.layer->probe->sees(x.n_q, (uint64_t) x.layer->k->first_written(x.stream));
    });
}

bool kvq_cuda_step::prepare() {
    for (size_t i = 0; i < step.caches.size(); i++) {
        for (kvq_kv_layer * l : step.layers[i]) {
            l->spans.on(step.caches[i]->device);
            if (l->spans.packed && l->spans.n_used() > l->spans.n_recorded) { return false; }
        }
    }
    const auto pages = [](const look & x) {
        return x.layer->spans.spans.data() + (size_t) x.stream * x.layer->spans.n_pages;
    };
    for (const look & x : looks) {
        const kvq_page * p = pages(x);
        const int n_open =
            (int) std::count_if(p, p + x.n_pages, [](const kvq_page & y) { return y.n_slots && !y.k_params; });
        if (x.layer->probe->reserve(x.stream, x.n_q, n_open)) { return false; }
    }
    for (const look & x : looks) {
        x.layer->probe->prepare(pages(x), x.n_pages, x.stream, x.n_q, (uint64_t) x.layer->k->first_written(x.stream));
    }
    return true;
}

kvq_cuda_step & kvq_cuda_steps::of(const kvq_backend_context & b, ggml_cgraph * graph) {
    n_evaluations++;
    if (!graph->uid) {
        unnamed.learn(b, graph);
        return unnamed;
    }
    const size_t n = all.size(), last = at;
    for (size_t i = 0; i < n; i++) { // the last one again, or the one behind it
        const kvq_cuda_step & s = *all[(last + i) % n];
        if (s.uid == graph->uid && s.first == graph->nodes[0]) {
            at = (last + i) % n;
            all[at]->last_used = n_evaluations;
            return *all[at];
        }
    }
    const bool takes_place = n && all[last]->whole && !all[last]->of_others;
    const auto oldest = std::min_element(
        all.begin(), all.end(), [](const auto & x, const auto & y) { return x->last_used < y->last_used; });
    if (takes_place) {
        at = last;
    } else if (n && (*oldest)->last_used + KEPT <= n_evaluations) {
        at = (size_t) (oldest - all.begin());
    } else {
        at = n;
        all.push_back(std::make_unique<kvq_cuda_step>());
    }
    all[at]->learn(b, graph); // a recording of the same shape is changed, which is cheaper than a new one
    all[at]->last_used = n_evaluations;
    return *all[at];
}

bool kvq_cuda_steps::begins_pass(const kvq_cuda_step & s) {
    const auto was = [&](const kvq_cuda_step::write & w) {
        return std::find(passed.begin(), passed.end(), w.target.layer) != passed.end();
    };
    const bool begins = s.whole || passed.empty() || std::any_of(s.writes.begin(), s.writes.end(), was);
    if (begins) { passed.clear(); }
    for (const kvq_cuda_step::write & w : s.writes) { passed.push_back(w.target.layer); }
    return begins;
}

void kvq_cuda_steps_free(kvq_cuda_steps * steps) { delete steps; }

void kvq_cuda_step_flush(kvq_backend_context & b) {
    for (kvq_kv_cache * c : b.steps->now->step.caches) { cuda(*c).flush_rows(); }
}

ggml_status kvq_cuda_compute(kvq_backend_context & b, ggml_cgraph * graph) {
    if (!kvq_find_caches(b, graph)) { return GGML_STATUS_FAILED; }
    if (!b.steps) { b.steps = new kvq_cuda_steps; }
    kvq_cuda_step & s = b.steps->of(b, graph);
    b.steps->now = &s;
    if (s.of_others) {
        kvq_cuda_inner_graph(b.inner, graph, s.step.n_rows <= KVQ_RECORDED_ROWS);
        return b.inner->iface.graph_compute(b.inner, graph);
    }
    const bool has_memory = b.steps->begins_pass(s) ? kvq_has_sealed(b, s.step.caches) : kvq_has_memory(s.step.caches);
    if (!has_memory || !kvq_seal_overdue(b, s.step)) { return GGML_STATUS_ALLOC_FAILED; }
    const kvq_run node_by_node = s.fits ? kvq_run::BEFORE_RECORDING : kvq_run::EAGER;
    for (kvq_kv_cache * c : s.step.caches) {
        cuda(*c).set_stream(b.stream);
        cuda(*c).begin_evaluation();
    }
    const auto holds = [&](const kvq_cuda_step::recording & r) { return r.graph.ready() && r.generation == s.moved(); };
    const bool replay = holds(s.seen) || holds(s.unseen);
    if (!s.fits || s.n_run++ == 0 || !s.quiet(b, replay) ||
        kvq_observes_queries()) { // the first run brings every buffer to its size
        return kvq_run_step(b, graph, s.step, node_by_node);
    }
    if (!kvq_states_are_whole(s.step)) { return GGML_STATUS_FAILED; }
    kvq_cuda_step::recording * r = &s.seen;
    bool ok = true, ready = false;
    if (replay) {
        const uint64_t before = s.moved();
        ok = s.begin(kvq_cuda_device::REPLAY);
        for (const kvq_cuda_step::write & w : s.writes) {
            if (ok && !kvq_set_rows(b, w.node, w.target, true)) { return GGML_STATUS_FAILED; }
        }
        s.end();
        // a table that the recording reads has grown; rows that were noted are noted again
        if (before != s.moved()) { return kvq_run_step(b, graph, s.step, node_by_node); }
        r = s.scores() ? &s.seen : &s.unseen;
        ready = holds(*r);
        ok = ok && (!ready || s.prepare());
    }
    if (ok && !ready) {
        ok = s.begin(kvq_cuda_device::RECORD);
        r->generation = s.moved();
        ok = ok && r->graph.begin(b.stream);
        if (ok) {
            const kvq_run how = r == &s.seen ? kvq_run::RECORD : kvq_run::RECORD_UNSEEN;
            const bool done = kvq_run_step(b, graph, s.step, how) == GGML_STATUS_SUCCESS;
            for (kvq_kv_cache * c : s.step.caches) { cuda(*c).join_picks(); }
            ok = r->graph.end(b.stream) && done && r->generation == s.moved() && s.prepare();
        }
        s.end();
    }
    if (!ok) { // rows that were noted are noted again, which changes nothing
        s.end();
        s.fits = false;
        return kvq_run_step(b, graph, s.step, kvq_run::EAGER);
    }
    for (kvq_kv_cache * c : s.step.caches) { c->device.flush(); }
    if (!r->graph.launch(b.stream)) {
        kvq_report_error("the recorded step cannot be launched: set KVQ_CUDA_GRAPHS=0");
        return GGML_STATUS_FAILED;
    }
    for (kvq_kv_cache * c : s.step.caches) {
        if (c->chain()) { c->chain()->forget(); }
    }
    for (const kvq_cuda_step::read & x : s.reads) { x.layer->read(); }
    for (kvq_kv_cache * c : s.step.caches) {
        if (std::find(b.late.begin(), b.late.end(), c) == b.late.end()) { b.late.push_back(c); }
    }
    if (s.whole && !kvq_has_sealed(b, s.step.caches)) { return GGML_STATUS_ALLOC_FAILED; }
    for (kvq_kv_cache * c : s.step.caches) {
        if (!kvq_cuda_error(*c).empty()) {
            kvq_report_error(kvq_cuda_error(*c));
            return GGML_STATUS_FAILED;
        }
    }
    return GGML_STATUS_SUCCESS;
}
#endif

#include "step.h"

#include "graph_door.h"
#include "op_params.h"
#include "turned.h"

#include "ggml-impl.h" // ggml_cgraph

#include <algorithm>

std::string kvq_why_not(const ggml_tensor * op, const kvq_target & t) {
    switch (op->op) {
    case GGML_OP_SET_ROWS: {
        const ggml_tensor * root = op->view_src;
        if (op->ne[0] != root->ne[0]) {
            return std::string("SET_ROWS stores ") + root->name +
                " transposed, which means flash attention is off: run with -fa on";
        }
        if (op->src[0]->type != GGML_TYPE_F32) {
            return std::string("rows of type ") + ggml_type_name(op->src[0]->type) + " cannot be stored: f32 is needed";
        }
        return "";
    }
    case GGML_OP_FLASH_ATTN_EXT: {
        const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
        const kvq_target tv = kvq_find_target(v);
        const bool latent = t.layer && t.layer->d.latent;
        if (!t.ours || t.value || !tv.ours || tv.value == latent || (t.layer && tv.layer != t.layer)) {
            return std::string("FLASH_ATTN_EXT reads ") + (k->view_src ? k->view_src : k)->name + " and " +
                (v->view_src ? v->view_src : v)->name +
                ", which are no keys and values of one layer: run this model without --kv-method";
        }
        if (latent && (k->ne[2] != 1 || v->view_offs != k->view_offs)) {
            return "latent attention over " + std::to_string(k->ne[2]) +
                " KV heads is not supported: run this model without --kv-method";
        }
        if (q->type != GGML_TYPE_F32) {
            return std::string("queries of type ") + ggml_type_name(q->type) + " are not supported: f32 is needed";
        }
        if (k->ne[0] % 8 || v->ne[0] % 8 || k->ne[0] > 1024 || v->ne[0] > 1024) {
            return "head size " + std::to_string(k->ne[0] % 8 ? k->ne[0] : v->ne[0]) +
                " is not supported: a multiple of 8 up to 1024 is needed";
        }
        if (k->ne[2] != v->ne[2] || q->ne[2] % k->ne[2]) {
            return std::to_string(q->ne[2]) + " query heads over " + std::to_string(k->ne[2]) +
                " KV heads are not supported";
        }
        if (op->src[3] && op->src[3]->type != GGML_TYPE_F16) {
            return "an attention mask that is not f16 is not supported";
        }
        return "";
    }
    case GGML_OP_ROPE: {
        const int mode = kvq_rope_mode(op);
        if (mode == GGML_ROPE_TYPE_NORMAL || mode == GGML_ROPE_TYPE_NEOX) { return ""; }
        return "context shift with ROPE of mode " + std::to_string(mode) +
            " is not supported: run with --no-context-shift";
    }
    case GGML_OP_CPY: { // CPY(keys) -> f32 -> turned -> ROPE -> turned -> CPY back, of a declared type
        const bool back = kvq_find_target(op).ours;
        const ggml_tensor * rope = back ? kvq_before_turn(op->src[0]) : nullptr;
        if (t.value || (back && (!rope || rope->op != GGML_OP_ROPE)) || (!back && op->type != GGML_TYPE_F32)) {
            return std::string("the graph copies ") + (op->view_src ? op->view_src : op)->name +
                " in a way that is no context shift: run this model without --kv-method";
        }
        return back ? kvq_why_not(rope, t) : "";
    }
    case GGML_OP_GET_ROWS:
        return std::string("the graph gathers rows of the cache with GET_ROWS (") + op->name +
            "), as sparse attention does: run this model without --kv-method";
    default:
        return std::string("the graph reads the cache with ") + ggml_op_name(op->op) + " (" + op->name +
            "), which means flash attention is off: run with -fa on";
    }
}

// is an operand a cache of ours? Its memory is not there to be read.
static bool reads_cache(const ggml_tensor * node) {
    const auto is_cache = [](const ggml_tensor * x) { return x && kvq_find_target(x).layer; };
    return std::any_of(node->src, node->src + GGML_MAX_SRC, is_cache);
}

// Of -sm tensor, where llama.cpp asks nobody for the nodes of a device: heads that are not those that were planned.
static std::string other_heads(const ggml_tensor * node, const kvq_target & t) {
    const ggml_tensor *k = node->src[1], *v = node->src[2];
    const kvq_layer_shape & s = t.layer->d.shape;
    if (t.layer->d.latent || (k->ne[2] == s.n_head_kv && k->ne[0] == s.head_size_k && v->ne[0] == s.head_size_v)) {
        return "";
    }
    return "layer " + std::to_string(t.layer->d.il) + " has " + std::to_string(k->ne[2]) + " KV heads of " +
        std::to_string(k->ne[0]) + ", and its rows were planned as " + std::to_string(s.n_head_kv) + " of " +
        std::to_string(s.head_size_k) + ": run with -sm layer";
}

namespace {

// Puts parts in order. What lies between our nodes becomes one part; views compute nothing.
struct step_maker {
    const kvq_backend_context & b;
    ggml_cgraph * graph;
    kvq_step step;
    int first = 0; // first node that is in no part yet
    // An evicting layer that was attended and is not sealed yet. It seals before the next node of ours, or when the
    // step has run.
    kvq_target unsealed;

    void others_until(int end) {
        if (end > first) { step.parts.push_back({ kvq_step::OTHERS, first, end }); }
        first = end + 1;
    }
    void seal(const kvq_target & t) { step.parts.push_back({ kvq_step::SEAL, 0, 0, nullptr, t }); }

    // Node i touches a tensor of our type; why_not is set when that tensor has no cache, or when no part is made for
    // its operation. What these operations may look like was asked by kvq_supports_op (graph.cpp).
    void add(int i, const kvq_target & t) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        others_until(i);
        if (!t.layer) {
            step.why_not =
                std::string("node ") + node->name + " (" + ggml_op_name(node->op) + ") is not on a cache of ours";
            return;
        }
        const size_t c = (size_t) (std::find(step.caches.begin(), step.caches.end(), t.cache) - step.caches.begin());
        if (c == step.caches.size()) {
            step.caches.push_back(t.cache);
            step.layers.emplace_back();
        }
        std::vector<kvq_kv_layer *> & layers = step.layers[c];
        if (std::find(layers.begin(), layers.end(), t.layer) == layers.end()) { layers.push_back(t.layer); }
        if (unsealed.layer) { seal(unsealed); }
        unsealed = {};
        switch (node->op) {
        case GGML_OP_SET_ROWS:
            t.layer->turn[t.value] = t.layer->d.declared[t.value].is_f16() ? 0 : kvq_turn_of(node->src[0]);
            step.parts.push_back({ kvq_step::WRITE, i, i + 1, node, t });
            step.n_rows = std::max(step.n_rows, node->src[0]->ne[1]);
            break;
        case GGML_OP_FLASH_ATTN_EXT:
            step.why_not = other_heads(node, t);
            step.parts.push_back({ kvq_step::ATTEND, i, i + 1, node, t });
            step.n_rows = std::max(step.n_rows, node->src[0]->ne[1] * node->src[0]->ne[3]);
            break;
        case GGML_OP_CPY:
        case GGML_OP_ROPE: step.parts.push_back({ kvq_step::SHIFT, i, i + 1, node, t }); break;
        default: step.why_not = kvq_why_not(node, t); break;
        }
        // On CUDA a layer seals after it is attended. A cache with predicted layers seals all of them after the step,
        // because a layer is predicted from the rows of the layer below.
        if (!b.inner || node->op != GGML_OP_FLASH_ATTN_EXT || t.cache->chain()) { return; }
        if (t.layer->d.k.evicts) { // sealing waits for the scores: the work after attention is launched first
            unsealed = t;
        } else {
            seal(t);
        }
    }
};

} // namespace

// On a GPU turns are left out or not there. One in another graph, or on another device, is a refusal.
static std::string turned_elsewhere(const kvq_step & step) {
    for (const kvq_step::part & x : step.parts) {
        const bool attends = x.what == kvq_step::ATTEND;
        if (!attends && x.what != kvq_step::WRITE) { continue; }
        const int turn = x.target.layer->d.declared[x.target.value].is_f16() ? 0 : kvq_turn_of(x.node->src[0]);
        if ((turn && !x.straight) || (attends && x.target.layer->turn[1] && !x.straight_out)) {
            return std::string("the ") + (attends ? "queries or the output of " : "rows of ") + x.node->name +
                " are turned in another graph or on another device than their cache: run with "
                "LLAMA_ATTN_ROT_DISABLE=1";
        }
    }
    return "";
}

kvq_step kvq_step_of(const kvq_backend_context & b, ggml_cgraph * graph) {
    step_maker m = { b, graph, {}, 0, {} };
    const int n = ggml_graph_n_nodes(graph);
    for (int i = 0; i < n && m.step.why_not.empty(); i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (kvq_is_view_op(node->op) || ggml_is_empty(node)) {
            m.first += m.first == i; // nothing to hand over yet
            continue;
        }
        if (!b.inner && kvq_graph_op_supported(node)) {
            m.others_until(i);
            m.step.parts.push_back({ kvq_step::OWN, i, i + 1, node });
            continue;
        }
        const kvq_target t = kvq_find_target(node->op == GGML_OP_FLASH_ATTN_EXT ? node->src[1] : node);
        if (t.layer || (t.ours && !b.inner)) {
            m.add(i, t);
        } else if (node->op == GGML_OP_CPY && reads_cache(node)) {
            m.others_until(i);
            m.step.parts.push_back({ kvq_step::BEFORE_SHIFT, i, i + 1, node });
        } else if (!b.inner && reads_cache(node)) {
            m.step.why_not = kvq_why_not(node, t);
        }
    }
    m.others_until(n);
    kvq_leave_turns_out(graph, m.step);
    if (b.inner && m.step.why_not.empty()) { m.step.why_not = turned_elsewhere(m.step); }
    // a part between caches ends in what the next one reads: a row for each token
    if (m.step.caches.empty() && n) { m.step.n_rows = ggml_graph_node(graph, n - 1)->ne[1]; }
    return std::move(m.step);
}

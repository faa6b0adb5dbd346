#include "turned.h"

#include "backend.h"
#include "step.h"

#include "base/parallel.h"
#include "types/lattice.h"

#include "ggml-impl.h" // ggml_cgraph

#include <algorithm>
#include <cstring>
#include <unordered_map>

// MUL_MAT with the input attn_inp_k_rot or attn_inp_v_rot, or with a device's copy of it.
static bool is_turn(const ggml_tensor * x) {
    const ggml_tensor * m = x->op == GGML_OP_MUL_MAT ? x->src[0] : nullptr;
    return m && m->type == GGML_TYPE_F32 && m->ne[0] == m->ne[1] && m->ne[2] == 1 && m->ne[3] == 1 &&
        (m->ne[0] & (m->ne[0] - 1)) == 0 && (strstr(m->name, "attn_inp_k_rot") || strstr(m->name, "attn_inp_v_rot"));
}

static const ggml_tensor * behind_views(const ggml_tensor * x) {
    while (x && (kvq_is_view_op(x->op) || x->op == GGML_OP_CONT) && x->src[0]) { x = x->src[0]; }
    return x;
}

const ggml_tensor * kvq_turn_node(const ggml_tensor * x) {
    x = behind_views(x);
    return x && is_turn(x) ? x : nullptr;
}

int kvq_turn_of(const ggml_tensor * x) {
    x = kvq_turn_node(x);
    return x ? (int) x->src[0]->ne[0] : 0;
}

const ggml_tensor * kvq_before_turn(const ggml_tensor * x) {
    x = behind_views(x);
    return x && is_turn(x) ? behind_views(x->src[1]) : x;
}

void kvq_leave_turns_out(ggml_cgraph * graph, kvq_step & step) {
    using part = kvq_step::part;
    const auto is_declared = [](const part & x) {
        if (x.what != kvq_step::WRITE && x.what != kvq_step::ATTEND) { return false; }
        const kvq_declared * const declared = x.target.layer->d.declared;
        return !declared[0].is_f16() || !declared[1].is_f16();
    };
    if (std::none_of(step.parts.begin(), step.parts.end(), is_declared)) { return; }
    std::unordered_map<const ggml_tensor *, part *> behind; // turns of rows and queries; attention by its output
    for (part & x : step.parts) {
        if (!is_declared(x)) { continue; }
        const ggml_tensor * const turn = kvq_turn_node(x.node->src[0]);
        if (turn) { behind[turn] = &x; }
        if (x.what == kvq_step::ATTEND) { behind[x.node] = &x; }
    }
    std::vector<int> left;
    const int n = ggml_graph_n_nodes(graph);
    for (int i = 0; i < n; i++) {
        const ggml_tensor * const node = graph->nodes[i];
        if (!is_turn(node)) { continue; }
        const auto in = behind.find(node), out = behind.find(behind_views(node->src[1]));
        if (in != behind.end()) {
            in->second->straight = true;
        } else if (out != behind.end()) {
            out->second->straight_out = true;
        } else {
            continue;
        }
        left.push_back(i);
    }
    step.copies.resize(left.size());
    step.nodes.assign(graph->nodes, graph->nodes + n);
    for (size_t i = 0; i < left.size(); i++) {
        ggml_tensor & copy = step.copies[i] = *graph->nodes[left[i]];
        copy.op = GGML_OP_CONT;
        copy.src[0] = copy.src[1];
        copy.src[1] = nullptr;
        memset(copy.op_params, 0, sizeof(copy.op_params));
        step.nodes[(size_t) left[i]] = &copy;
    }
}

void kvq_turn_rows(float * x, int64_t n_rows, int64_t stride, int width, int block, int n_threads) {
    const auto turn = [&](int64_t i) {
        for (int at = 0; at + block <= width; at += block) { kvq_hadamard(block, x + i * stride + at); }
    };
    kvq_parallel_for(n_rows, n_threads, turn, std::max<int64_t>(1, (1 << 14) / width));
}

const float * kvq_turned(
    const float * x, int64_t n_rows, int64_t stride, int width, int block, int n_threads, std::vector<float> & to) {
    to.resize((size_t) (n_rows * width));
    for (int64_t i = 0; i < n_rows; i++) { memcpy(&to[(size_t) (i * width)], x + i * stride, 4 * (size_t) width); }
    kvq_turn_rows(to.data(), n_rows, width, width, block, n_threads);
    return to.data();
}

// From ggml nodes to the store and the kernels. Four nodes touch a cache:
//   SET_ROWS(rows f32 [n_embd, n], idx [n], cache)       rows into the open window
//   FLASH_ATTN_EXT(q, k view, v view, mask, sinks)       attention over spans
//   ROPE(view of cache_k, shift per cell), in place      context shift
//   CPY(view of cache_k, f32), ..., CPY(.., that view)   context shift, of a cache that is not declared f16
//   views of a cache                                     nothing
#include "backend.h"
#include "engines.h"
#include "ggml-impl.h" // ggml_cgraph
#include "graph_door.h"
#include "op_params.h"
#include "state.h"
#include "step.h"
#include "turned.h"

#include "engine/host.h"
#include "engine/rope.h"

#include <algorithm>
#include <cstring>
#include <utility>

// ---------------------------------------------------------------- what a graph may ask

bool kvq_is_view_op(ggml_op op) {
    return op == GGML_OP_NONE || op == GGML_OP_VIEW || op == GGML_OP_RESHAPE || op == GGML_OP_PERMUTE ||
        op == GGML_OP_TRANSPOSE;
}

// Does the other device take this node? `unplaced`: operands in buffers of ours are shown without one. They are host
// memory, but our buffer type, which caches have as well, cannot say so.
static bool takes(ggml_backend_dev_t other, const ggml_tensor * op, bool unplaced) {
    if (!unplaced) { return ggml_backend_dev_supports_op(other, op); }
    ggml_tensor node = *op, operands[GGML_MAX_SRC];
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (!op->src[i] || !op->src[i]->buffer || !kvq_buft_is_ours(op->src[i]->buffer->buft)) { continue; }
        operands[i] = *op->src[i];
        operands[i].buffer = nullptr;
        node.src[i] = &operands[i];
    }
    return ggml_backend_dev_supports_op(other, &node);
}

bool kvq_supports_op(kvq_device_context & dev, const ggml_tensor * op) {
    if (!dev.inner && kvq_graph_op_supported(op)) { // their kernels are CPU kernels
        return true;
    }
    ggml_backend_dev_t const others = dev.inner ? dev.inner : kvq_ggml_cpu();
    kvq_target t = kvq_find_target(op);
    if (!t.ours) { kvq_learn_part(dev, op); }
    if (kvq_is_view_op(op->op)) {
        return (others && (dev.inner || dev.used)) || t.ours || (!op->buffer && !op->view_src) ||
            (op->view_src && kvq_buft_is_ours(op->view_src->buffer ? op->view_src->buffer->buft : nullptr)) ||
            (op->buffer && kvq_buft_is_ours(op->buffer->buft) && op->buffer->size);
    }
    if (op->op == GGML_OP_FLASH_ATTN_EXT) { t = kvq_find_target(op->src[1]); }
    for (int i = 0; i < GGML_MAX_SRC && !t.ours; i++) { t = op->src[i] ? kvq_find_target(op->src[i]) : t; }
    if (!t.ours) {
        // a weight offered in our own type belongs in the other device's
        bool placing = false;
        for (int i = 0; i < GGML_MAX_SRC && others; i++) {
            const bool offered = op->src[i] && op->src[i]->buffer && !op->src[i]->buffer->size;
            placing = placing || (offered && kvq_buft_is_ours(op->src[i]->buffer->buft));
            if (placing || (offered && kvq_is_over_devices(op->src[i]))) { dev.used = true; }
        }
        return others && !placing && (dev.inner || dev.used) && takes(others, op, !dev.inner);
    }
    if (!t.cache) { // a size query: what is read in the end is known once the cache is there
        return true;
    }
    std::string why = kvq_why_not(op, t);
    if (why.empty() && op->op == GGML_OP_FLASH_ATTN_EXT && t.layer && t.layer->d.latent && dev.inner &&
        !ggml_backend_dev_supports_op(dev.inner, op)) {
        why = std::string(ggml_backend_dev_name(dev.inner)) + " has no latent attention for " +
            std::to_string(op->src[0]->ne[2]) + " query heads of " + std::to_string(op->src[0]->ne[0]) +
            " channels: run this model without --kv-method";
    }
    if (why.empty() && op->op == GGML_OP_FLASH_ATTN_EXT && t.layer) {
        const ggml_tensor *k = op->src[1], *v = op->src[2];
        t.cache->set_shape(*t.layer, (int) k->ne[2], (int) k->ne[0], (int) v->ne[0], why);
    }
    if (why.empty() && op->op == GGML_OP_CPY && kvq_find_target(op).ours) { // read when its rows are copied back
        kvq_before_turn(op->src[0])->src[1]->flags |= GGML_TENSOR_FLAG_OUTPUT;
    }
    if (why.empty() && op->op == GGML_OP_SET_ROWS && t.layer && !t.value && t.layer->d.k.turned) {
        const ggml_tensor * rope;
        if (kvq_learn_rope(kvq_backend_context(), op, t, &rope, why) && rope) {
            // positions are read when the rows are written: their memory must not hold something else by then
            rope->src[1]->flags |= GGML_TENSOR_FLAG_OUTPUT;
        }
    }
    if (!why.empty()) {
        const kvq_config * c = t.cache ? &t.cache->config : nullptr;
        const std::string once = (c ? c->method->info.name + (" " + c->options_text) : "") + ": " + why;
        if (!dev.creation().refused &&
            std::find(dev.refusals.begin(), dev.refusals.end(), once) == dev.refusals.end()) {
            kvq_report_error(why);
            dev.refusals.push_back(once);
        }
        if (!dev.creation().refused) { kvq_set_error(why); }
        dev.creation().refused = true;
    }
    if (!why.empty() && t.cache) { t.cache->refused = true; }
    // a node on our cache can run nowhere else: declining would abort the program, refusing its buffer ends it cleanly
    return true;
}

// ---------------------------------------------------------------- nodes

// A tensor's bytes on the host: where they are, the copy kept when they were set, or fetched.
static const void * host_data(const kvq_backend_context & b, const ggml_tensor * t, std::vector<uint8_t> & temp) {
    if (!b.inner || (t->buffer && ggml_backend_buffer_is_host(t->buffer))) { return t->data; }
    if (t->op == GGML_OP_NONE && t->buffer && kvq_buft_is_ours(t->buffer->buft)) {
        const auto & kept = ((kvq_buffer *) t->buffer->context)->indices;
        const auto at = kept.find(t->data);
        if (at != kept.end() && at->second.size() == ggml_nbytes(t)) { return at->second.data(); }
    }
    temp.resize(ggml_nbytes(t));
    ggml_backend_synchronize(b.inner);
    ggml_backend_tensor_get(t, temp.data(), 0, temp.size());
    return temp.data();
}

// parameters of a ROPE node
static kvq_rope rope_of(const kvq_backend_context & b, const ggml_tensor * node) {
    const ggml_tensor * factors = node->src[2];
    kvq_rope r = kvq_rope_of(node);
    if (factors && b.inner) { // weights: fetched once
        auto & kept = b.factors[factors->data];
        if (kept.empty()) {
            std::vector<uint8_t> temp;
            const float * f = (const float *) host_data(b, factors, temp);
            kept.assign(f, f + r.n_dims / 2);
        }
        r.freq_factors = kept;
    } else if (factors && kvq_is_over_devices(factors)) {
        r.freq_factors.resize((size_t) r.n_dims / 2);
        ggml_backend_tensor_get(factors, r.freq_factors.data(), 0, r.freq_factors.size() * sizeof(float));
    } else if (factors) {
        const float * f = (const float *) factors->data;
        r.freq_factors.assign(f, f + r.n_dims / 2);
    }
    return r;
}

bool kvq_learn_rope(const kvq_backend_context & b, const ggml_tensor * set_rows, const kvq_target & t,
    const ggml_tensor ** rope, std::string & err) {
    const ggml_tensor * x = kvq_before_turn(set_rows->src[0]);
    *rope = x && x->op == GGML_OP_ROPE ? x : nullptr;
    if (!*rope) { return t.cache->set_rope(*t.layer, kvq_rope{}, err); }
    const int mode = kvq_rope_mode(x);
    const bool multi = mode == GGML_ROPE_TYPE_MROPE || mode == GGML_ROPE_TYPE_IMROPE;
    if (multi && !t.layer->d.declared[0].is_f16()) {
        err = "keys are declared " + t.layer->d.declared[0].name + ", and a state has no room for four positions a " +
            "cell in rows of that size (" + x->name + "): drop -ctk and -ctv, or use higgs or kivi";
        return false;
    }
    const char * no_way_back = " cannot be undone by this method: use higgs or kivi";
    if (mode != GGML_ROPE_TYPE_NORMAL && mode != GGML_ROPE_TYPE_NEOX && !multi) {
        err = "ROPE of mode " + std::to_string(mode) + " (" + x->name + ")" + no_way_back;
        return false;
    }
    if (const int first = kvq_rope_first(x)) {
        err = "ROPE from channel " + std::to_string(first) + " on (" + x->name + ")" + no_way_back;
        return false;
    }
    if (x->src[1]->ne[0] != set_rows->src[0]->ne[1] * (multi ? 4 : 1)) {
        err = "ROPE of " + std::to_string(x->src[1]->ne[0]) + " positions for " +
            std::to_string(set_rows->src[0]->ne[1]) + " rows (" + x->name + ")" + no_way_back;
        return false;
    }
    if (x->src[2] &&
        (!x->src[2]->data || !x->src[2]->buffer ||
            (!b.inner && !kvq_is_over_devices(x->src[2]) && !ggml_backend_buffer_is_host(x->src[2]->buffer)))) {
        return true; // while graphs are only measured
    }
    return t.cache->set_rope(*t.layer, rope_of(b, x), err);
}

// global cells of a SET_ROWS node
static const std::vector<int64_t> & cells_of(const kvq_backend_context & b, const ggml_tensor * node) {
    const ggml_tensor * idx = node->src[1];
    static thread_local std::vector<int64_t> cells;
    cells.resize((size_t) node->src[0]->ne[1]);
    std::vector<uint8_t> temp;
    const void * data = host_data(b, idx, temp);
    // the destination may start at a later stream
    const int64_t row0 = (int64_t) (node->view_offs / node->view_src->nb[1]);
    for (size_t i = 0; i < cells.size(); i++) {
        cells[i] = row0 + (idx->type == GGML_TYPE_I64 ? ((const int64_t *) data)[i] : ((const int32_t *) data)[i]);
    }
    return cells;
}

bool kvq_rows_stay_open(
    const kvq_backend_context & b, const ggml_tensor * node, const kvq_target & t, int n_kv, bool or_empty) {
    const kvq_lane & lane = t.value ? *t.layer->v : *t.layer->k;
    const kvq_lane_layout & l = lane.layout();
    for (const int64_t c : cells_of(b, node)) {
        if (c < 0 || c >= (int64_t) l.n_cells * l.n_stream || c % l.n_cells >= n_kv) { return false; }
        const kvq_page_state state = lane.state((int) (c / l.n_cells), (int) (c % l.n_cells) / l.page_cells);
        if ((state != KVQ_PAGE_OPEN && !(or_empty && state == KVQ_PAGE_EMPTY)) ||
            !t.layer->k->is_plain((int) (c / l.n_cells), (int) (c % l.n_cells) / l.page_cells)) {
            return false;
        }
    }
    return true;
}

bool kvq_set_rows(const kvq_backend_context & b, const ggml_tensor * node, const kvq_target & t, bool straight) {
    const ggml_tensor * rows = node->src[0];
    const int64_t n = rows->ne[1];
    const std::vector<int64_t> & cells = cells_of(b, node);
    const int64_t n_rows = (int64_t) t.layer->d.n_cells * t.layer->d.n_stream;
    for (const int64_t c : cells) {
        if (c < 0 || c >= n_rows) {
            kvq_report_error(
                "cell " + std::to_string(c) + " is outside the cache of " + std::to_string(n_rows) + " cells");
            return false;
        }
    }
    const int32_t * pos = nullptr;
    if (!t.value && t.layer->d.k.turned) {
        const ggml_tensor * rope;
        std::string err;
        if (!kvq_learn_rope(b, node, t, &rope, err)) {
            kvq_report_error(err);
            return false;
        }
        std::vector<uint8_t> temp;
        pos = rope ? t.cache->positions_of(*t.layer, (const int32_t *) host_data(b, rope->src[1], temp), n) : nullptr;
    }
    const float * data = (const float *) rows->data;
    size_t stride = rows->nb[1] / sizeof(float);
    if (const int turn = b.inner || straight ? 0 : t.layer->turn[t.value]) {
        static thread_local std::vector<float> unturned;
        data = kvq_turned(data, n, (int64_t) stride, (int) rows->ne[0], turn, b.n_threads, unturned);
        stride = (size_t) rows->ne[0];
    }
    for (const kvq_operand & o : t.layer->operands) {
        if (o.of_values != t.value) { continue; }
        o.lane->write(n, cells.data(), data + o.first, stride, b.n_threads, o.first ? nullptr : pos);
        t.layer->unread[o.lane->is_value()] = true;
    }
    return true;
}

// Queries as they were before they were turned, in `to`.
static void undo_turn(kvq_attn & a, int D, int turn, float * to, int n_threads) {
    for (int h = 0; h < a.n_head; h++) {
        for (int i = 0; i < a.n_q; i++) {
            memcpy(to + ((size_t) h * a.n_q + i) * D, a.q + h * a.q_stride_head + i * a.q_stride_token, 4 * (size_t) D);
        }
    }
    kvq_turn_rows(to, (int64_t) a.n_head * a.n_q, D, D, turn, n_threads);
    a.q = to;
    a.q_stride_token = D;
    a.q_stride_head = (int64_t) a.n_q * D;
}

static bool flash_attn(kvq_backend_context & b, const kvq_step::part & x, kvq_run how) {
    const ggml_tensor * const node = x.node;
    const kvq_target & t = x.target;
    const bool recorded = kvq_records(how);
    const ggml_tensor *q = node->src[0], *k = node->src[1], *mask = node->src[3], *sinks = node->src[4];
    kvq_kv_layer & l = *t.layer;
    const int page_cells = l.d.k.page_cells, n_kv = (int) k->ne[1], n_stream = (int) q->ne[3];
    const int stream0 = (int) (k->view_offs / (l.d.declared[0].row(l.d.n_embd_k) * l.d.n_cells));
    const int turn_q = l.d.declared[0].is_f16() ? 0 : kvq_turn_of(q), turn_v = l.turn[1];
    if (turn_q != l.turn[0]) {
        kvq_report_error(std::string(node->name) + " reads queries turned by " + std::to_string(turn_q) +
            " channels and keys turned by " + std::to_string(l.turn[0]) + ": run with LLAMA_ATTN_ROT_DISABLE=1");
        return false;
    }

    // llama.cpp asks for as many as are in use
    bool scored = false;
    for (int s = 0; s < n_stream && !recorded; s++) {
        for (kvq_lane * lane : { l.k.get(), l.v.get() }) { lane->free_from(stream0 + s, n_kv); }
    }
    for (auto & policy : l.policies) {
        for (int s = 0; s < n_stream; s++) { policy->reading(stream0 + s, n_kv); }
        scored |= policy->wants_scores((int) q->ne[1]);
    }
    static thread_local std::vector<float> lse; // of the query rows
    lse.resize(scored && !b.inner ? (size_t) (n_stream * q->ne[1] * q->ne[2]) : 0);
    const kvq_attention_params params = kvq_attention_of(node);
    static thread_local std::vector<kvq_attn> streams;
    streams.assign((size_t) n_stream, kvq_attn{});
    for (int s = 0; s < n_stream; s++) {
        kvq_attn & a = streams[(size_t) s];
        a.k = l.d.k.codec;
        a.v = l.d.v.codec;
        a.n_q = (int32_t) q->ne[1];
        a.n_head = (int32_t) q->ne[2];
        a.n_head_kv = (int32_t) k->ne[2];
        a.n_kv = n_kv;
        a.flags = l.d.plan.flags;
        a.scale = params.scale;
        a.max_bias = params.max_bias;
        a.softcap = params.softcap;
        a.q = (const float *) ((const char *) q->data + s * q->nb[3]);
        a.q_stride_token = (int64_t) (q->nb[1] / 4);
        a.q_stride_head = (int64_t) (q->nb[2] / 4);
        if (mask) {
            a.mask = (const uint16_t *) ((const char *) mask->data + (s % mask->ne[3]) * mask->nb[3]);
            a.mask_stride_token = (int64_t) (mask->nb[1] / 2);
            a.mask_stride_head = mask->ne[2] > 1 ? (int64_t) (mask->nb[2] / 2) : 0;
        }
        a.sinks = sinks ? (const float *) sinks->data : nullptr;
        a.dst = (float *) ((char *) node->data + s * node->nb[3]);
        a.dst_stride_head = (int64_t) (node->nb[1] / 4);
        a.dst_stride_token = (int64_t) (node->nb[2] / 4);
        a.n_pages = std::min((n_kv + page_cells - 1) / page_cells, l.spans.n_pages);
        for (auto & policy : l.policies) { policy->spans(a, stream0 + s); }
        a.lse = lse.empty() ? nullptr : lse.data() + (size_t) s * q->ne[1] * q->ne[2];
        a.pages = l.spans.on(t.cache->device) + (size_t) (stream0 + s) * l.spans.n_pages;
        // room for pages that open while a recording is in use; steps outside of one bring buffers to the same size
        if (l.spans.packed) {
            a.n_pages = std::min((int) kvq_pad((size_t) l.spans.n_used() + 16, 16), l.spans.n_pages);
            l.spans.n_recorded = recorded ? a.n_pages : l.spans.n_recorded;
        }
    }
    static thread_local std::vector<float> unturned;
    if (turn_q && !x.straight) {
        const size_t n = (size_t) (q->ne[0] * q->ne[1] * q->ne[2]);
        unturned.resize(n * (size_t) n_stream);
        for (int s = 0; s < n_stream; s++) {
            undo_turn(streams[(size_t) s], (int) q->ne[0], turn_q, unturned.data() + (size_t) s * n, b.n_threads);
        }
    }
    for (int s = 0; kvq_observes_queries() && !recorded && s < n_stream; s++) {
        kvq_add_queries(l.queries, streams[(size_t) s], l.k->first_written(stream0 + s), t.cache->device);
    }
    // a recorded step's layers follow each other when it runs
    const kvq_kv_cache::reading reading(*t.cache, l, stream0, streams, b.n_threads, !recorded);
    if (!b.inner) {
        t.cache->device.attend(
            { streams.data(), n_stream, &l.k->layout(), &l.v->layout(), reading.predicted(), b.n_threads });
    } else if (!kvq_cuda_attend(b, *t.cache, l, node, stream0, streams, reading.predicted(), how)) {
        return false;
    }
    reading.done();
    if (turn_v && !x.straight_out) { // the graph turns the output back
        kvq_turn_rows((float *) node->data, ggml_nrows(node), node->ne[0], (int) node->ne[0], turn_v, b.n_threads);
    }
    l.read();
    for (int s = 0; !lse.empty() && s < n_stream; s++) {
        kvq_attn & a = streams[(size_t) s];
        a.pages = l.spans.spans.data() + (size_t) (stream0 + s) * l.spans.n_pages; // the host's
        a.n_pages = l.spans.packed ? l.spans.n_pages : a.n_pages;
        for (auto & policy : l.policies) {
            policy->observed(a, stream0 + s, (uint64_t) l.k->first_written(stream0 + s), b.n_threads);
        }
    }
    return true;
}

// node: ROPE in place, or the CPY that ends a shift. Sealed and open rows are turned by the difference where they are;
// what that CPY would bring was computed from rows that were never decoded, and is not read.
static bool shift(const kvq_backend_context & b, const ggml_tensor * node, const kvq_target & t) {
    const bool is_copy = node->op == GGML_OP_CPY;
    const ggml_tensor *rope = is_copy ? kvq_before_turn(node->src[0]) : node, *view = is_copy ? node : node->src[0],
                      *delta = rope->src[1];
    std::vector<uint8_t> temp;
    const kvq_rope r = rope_of(b, rope);
    // The last operand of the keys: channels of latent attention before it are not rotated. Rotated channels may
    // start behind others.
    const auto after = std::find_if(
        t.layer->operands.begin(), t.layer->operands.end(), [](const kvq_operand & o) { return o.of_values; });
    const kvq_operand & keys = *(after - 1);
    kvq_lane & lane = *keys.lane;
    const int n_cells = lane.layout().n_cells, D = lane.layout().codec.head_size;
    const kvq_declared & declared = t.layer->d.declared[0];
    const int at = (int) (view->view_offs / declared.nb_block * declared.n_block % (size_t) (keys.first + D)),
              first = at - keys.first;
    if (first < 0 || first + r.n_dims > D) {
        kvq_report_error("context shift rotates channels " + std::to_string(at) + ".." + std::to_string(at + r.n_dims) +
            " of a key, beyond its rotary part: run with --no-context-shift");
        return false;
    }
    const int32_t * by = (const int32_t *) host_data(b, delta, temp);
    std::map<int32_t, kvq_rope_table> tables;
    std::vector<float> row((size_t) D);
    kvq_transform * const turn = keys.transform;
    kvq_positions * const positions = turn && turn->rotor ? t.cache->positions() : nullptr;
    t.layer->n_shifts += positions ? 1 : 0;
    for (int s = 0; s < lane.layout().n_stream; s++) {
        const auto rotate = [&](int cell, int, uint16_t * f16) {
            const int32_t d = by[s * n_cells + cell];
            if (!d) { return; }
            kvq_rope_table & table = tables[d];
            if (table.cos.empty()) { kvq_rope_fill(r, d, false, table); }
            kvq_cpu_f16_to_f32(f16, row.data(), D);
            kvq_rope_apply(r, table, row.data() + first);
            kvq_cpu_f32_to_f16(row.data(), f16, D);
        };
        if (positions) { // sealed keys have no position in them
            turn->shift_open(lane, s, by + (size_t) s * n_cells, rotate);
            positions->shift(s, by + (size_t) s * n_cells, n_cells, t.layer->n_shifts);
        } else {
            lane.edit(s, [&](int cell) { return by[s * n_cells + cell] != 0; }, rotate);
        }
    }
    if (positions) { positions->n_shifts = std::max(positions->n_shifts, t.layer->n_shifts); }
    return true;
}

// ---------------------------------------------------------------- steps

// nodes of the graph that are on no cache of ours, over CUDA
static ggml_status compute_others(
    kvq_backend_context & b, ggml_cgraph * graph, const kvq_step & step, const kvq_step::part & x, kvq_run how) {
    ggml_cgraph part = *graph;
    part.nodes = (step.nodes.empty() ? graph->nodes : const_cast<ggml_tensor **>(step.nodes.data())) + x.first;
    part.n_nodes = x.end - x.first;
    part.size = part.n_leafs = 0;
    part.leafs = part.grads = part.grad_accs = nullptr;
    part.uid = 0;
    if (kvq_records(how)) { kvq_cuda_step_flush(b); }
    kvq_cuda_inner_graph(b.inner, &part, how == kvq_run::EAGER && step.n_rows <= KVQ_RECORDED_ROWS);
    return b.inner->iface.graph_compute(b.inner, &part);
}

bool kvq_compute_part(kvq_backend_context & b, const kvq_step::part & x, kvq_run how) {
    switch (x.what) {
    case kvq_step::OTHERS: return false; // compute_others, whole_graph.cpp
    case kvq_step::WRITE: return kvq_set_rows(b, x.node, x.target, x.straight);
    case kvq_step::ATTEND: return flash_attn(b, x, how);
    case kvq_step::SHIFT: return shift(b, x.node, x.target);
    case kvq_step::BEFORE_SHIFT:
        if (!b.inner) { memset(x.node->data, 0, ggml_nbytes(x.node)); } // a GPU leaves what is there: nothing reads it
        return true;
    case kvq_step::OWN: kvq_graph_op_compute(x.node, b.n_threads); return true;
    case kvq_step::SEAL:
        if (kvq_records(how)) { return true; }
        x.target.layer->seal(b.n_threads);
        return true;
    }
    return false;
}

void kvq_report_memory(const char * at) {
    kvq_report_error(std::string("out of memory in ") + at + ": lower -c or -ub");
}

void kvq_seal_late(kvq_backend_context & b) {
    std::vector<kvq_kv_cache *> late;
    late.swap(b.late);
    for (kvq_kv_cache * cache : late) {
        if (!kvq_kv_cache::is_alive(cache)) { continue; }
        try {
            cache->commit(b.n_threads);
        } catch (const std::bad_alloc &) { // pages stay open, and are due again
            cache->lacks_memory = true;
        }
    }
}

bool kvq_has_sealed(kvq_backend_context & b, const std::vector<kvq_kv_cache *> & caches) {
    kvq_seal_late(b);
    return kvq_has_memory(caches);
}

bool kvq_has_memory(const std::vector<kvq_kv_cache *> & caches) {
    bool ok = true;
    for (kvq_kv_cache * cache : caches) { ok = !std::exchange(cache->lacks_memory, false) && ok; }
    if (!ok) { kvq_report_memory("sealing"); }
    return ok;
}

bool kvq_seal_overdue(kvq_backend_context & b, const kvq_step & step) {
    try {
        for (const kvq_step::part & x : step.parts) {
            if (x.what != kvq_step::WRITE || !x.target.layer->is_overdue()) { continue; }
            x.target.layer->read();
            x.target.layer->seal(b.n_threads);
        }
    } catch (const std::bad_alloc &) {
        kvq_report_memory("sealing");
        return false;
    }
    return true;
}

const char * kvq_part_name(const kvq_step::part & x) { return x.node ? ggml_op_name(x.node->op) : "sealing"; }

void kvq_end_step(kvq_backend_context & b, const kvq_step & step, kvq_run how) {
    for (size_t i = 0; i < step.caches.size(); i++) {
        kvq_kv_cache * const cache = step.caches[i];
        if (b.inner && how == kvq_run::EAGER && cache->waits_to_seal()) {
            b.late.push_back(cache); // llama.cpp makes its next step while the device ends this one
        } else if (!kvq_records(how)) {
            cache->commit(b.n_threads, step.layers[i]);
        }
        if (step.layers[i].back() != cache->layers.back().get()) { continue; }
        const std::string trouble = cache->trouble();
        if (!trouble.empty()) { kvq_report_note(trouble); }
    }
}

bool kvq_states_are_whole(const kvq_step & step) {
    for (kvq_kv_cache * cache : step.caches) {
        if (cache->refused) { return false; }
        kvq_arrivals & in = cache->arrivals;
        if (!in.blob.empty()) { // the last tensor of a state
            in.damage = kvq_state_missing(in);
            kvq_report_error(in.damage);
            cache->refused = true;
            return false;
        }
        in.reset(); // whatever state came in is complete
    }
    return true;
}

ggml_status kvq_run_step(kvq_backend_context & b, ggml_cgraph * graph, const kvq_step & step, kvq_run how) {
    if (!step.why_not.empty()) {
        kvq_report_error(step.why_not);
        return GGML_STATUS_FAILED;
    }
    // What is due before a recording seals in another step: each replay would seal it again.
    const bool has_memory =
        kvq_records(how) ? kvq_has_memory(step.caches) : kvq_has_sealed(b, step.caches) && kvq_seal_overdue(b, step);
    if (!has_memory) { return GGML_STATUS_ALLOC_FAILED; }
    if (!kvq_states_are_whole(step)) { return GGML_STATUS_FAILED; }
    for (kvq_kv_cache * cache : step.caches) {
        if (b.inner) { kvq_cuda_use_stream(*cache, b.stream); }
    }
    if (!b.inner) { return kvq_compute_whole(b, graph, step); }
    const char * at = "";
    try {
        for (const kvq_step::part & x : step.parts) {
            if (x.what == kvq_step::OTHERS) {
                const ggml_status status = compute_others(b, graph, step, x, how);
                if (status != GGML_STATUS_SUCCESS) { return status; }
                continue;
            }
            at = kvq_part_name(x);
            if (!kvq_compute_part(b, x, how)) { return GGML_STATUS_FAILED; }
        }
        at = "sealing";
        kvq_end_step(b, step, how);
    } catch (const std::bad_alloc &) {
        kvq_report_memory(at);
        return GGML_STATUS_ALLOC_FAILED;
    }
    for (kvq_kv_cache * cache : step.caches) {
        if (!kvq_cuda_error(*cache).empty()) {
            kvq_report_error(kvq_cuda_error(*cache));
            return GGML_STATUS_FAILED;
        }
    }
    return GGML_STATUS_SUCCESS;
}

// llama.cpp gives a graph that it computes again the same number. Its step is kept: looking at a thousand nodes takes
// a hundredth of a small model's token.
bool kvq_kept_step::is_of(const ggml_cgraph * graph) const {
    return uid && graph->uid == uid && graph->nodes == nodes && graph->n_nodes == n_nodes &&
        std::all_of(step.caches.begin(), step.caches.end(), kvq_kv_cache::is_alive);
}

ggml_status kvq_compute_graph(kvq_backend_context & b, ggml_cgraph * graph) {
    if (b.inner || !graph->uid) {
        if (!kvq_find_caches(b, graph)) { return GGML_STATUS_FAILED; }
        return kvq_run_step(b, graph, kvq_step_of(b, graph), kvq_run::EAGER);
    }
    if (!b.kept) { b.kept.reset(new kvq_kept_step); }
    kvq_kept_step & kept = *b.kept;
    if (!kept.is_of(graph)) {
        kept.uid = 0;
        if (!kvq_find_caches(b, graph)) { return GGML_STATUS_FAILED; }
        kept.step = kvq_step_of(b, graph);
        kept.uid = graph->uid;
        kept.nodes = graph->nodes;
        kept.n_nodes = graph->n_nodes;
    }
    return kvq_run_step(b, graph, kept.step, kvq_run::EAGER);
}

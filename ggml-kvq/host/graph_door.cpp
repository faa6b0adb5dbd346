// Graph nodes over our kernels (ggml-kvq-graph.h). A node's parameters are interned: its op_params hold the callback
// and a pointer that stays valid for the life of the process, so graphs may be copied, split and kept.
#include "graph_door.h"

#include "base/parallel.h"
#include "cache/config.h"
#include "ggml-kvq-graph.h"
#include "op_params.h"

#include "engine/host.h"

#include <algorithm>
#include <cstring>
#include <list>
#include <mutex>
#include <vector>

namespace {

struct node_params {
    ggml_kvq_attn_params attn; // encode: only k and n_head_kv
};

void * intern(const ggml_kvq_attn_params & p) {
    static std::mutex mutex;
    static std::list<node_params> all;
    const std::lock_guard<std::mutex> lock(mutex);
    for (node_params & n : all) {
        if (!memcmp(&n.attn, &p, sizeof(p))) { return &n; }
    }
    all.push_back({ p });
    return &all.back();
}

ggml_tensor * refuse(const std::string & line) {
    kvq_set_error(line);
    return nullptr;
}

struct blocks {
    const kvq_codec * codec;
    int n_head;
    size_t nb_codes, nb_params;
    const ggml_tensor * own;   // params, and codes unless they are adopted
    const ggml_tensor * codes; // whose codes: own or another's

    bool adopts() const { return codes != own; }
    const uint8_t * page(const ggml_tensor * t, int page, int stream) const {
        return (const uint8_t *) t->data + page * t->nb[1] + stream * t->nb[2];
    }
    const uint8_t * page_codes(int p, int s) const { return page(codes, p, s); }
    const uint8_t * page_params(int p, int s) const { return page(own, p, s) + (adopts() ? 0 : n_head * nb_codes); }
};

blocks view(const kvq_codec & c, int n_head, const ggml_tensor * own, const ggml_tensor * shared) {
    blocks b = { &c, n_head, 0, 0, own, shared ? shared : own };
    kvq_codec_bytes(&c, &b.nb_codes, &b.nb_params);
    return b;
}

// A tensor that holds pages of `nb` bytes at least, readable as records.
bool holds_pages(const ggml_tensor * t, size_t nb, int64_t n_pages, int64_t n_stream) {
    return t->type == GGML_TYPE_I8 && t->nb[0] == 1 && (size_t) t->ne[0] >= nb && t->nb[1] % 2 == 0 &&
        t->nb[2] % 2 == 0 && t->ne[1] == n_pages && t->ne[2] == n_stream && t->ne[3] == 1;
}

// ---------------------------------------------------------------- encode: src = rows, shared

std::string encode_refuse(const kvq_codec & c, const ggml_tensor * rows, const ggml_tensor * shared) {
    size_t nb_codes, nb_params;
    if (kvq_codec_bytes(&c, &nb_codes, &nb_params) != KVQ_OK) { return kvq_last_error(); }
    if (rows->type != GGML_TYPE_F32 && rows->type != GGML_TYPE_F16) {
        return std::string("rows of type ") + ggml_type_name(rows->type) + ": convert them to f16 or f32";
    }
    if (rows->nb[0] != ggml_type_size(rows->type)) { return "rows are strided inside a head: make them contiguous"; }
    if (rows->ne[0] != c.head_size || rows->ne[2] % c.n_cells) {
        return "rows of " + std::to_string(rows->ne[0]) + " channels and " + std::to_string(rows->ne[2]) +
            " cells: the codec takes " + std::to_string(c.head_size) + " channels and multiples of " +
            std::to_string(c.n_cells) + " cells";
    }
    if (shared && !holds_pages(shared, rows->ne[1] * nb_codes, rows->ne[2] / c.n_cells, rows->ne[3])) {
        return "the shared tensor does not hold codes of this shape: pass what ggml_kvq_encode gave for the other "
               "layer";
    }
    return "";
}

void encode_units(ggml_tensor * dst, int ith, int nth) {
    const ggml_tensor * rows = dst->src[0];
    const kvq_custom_params op = kvq_custom_of(dst);
    const kvq_codec & c = ((const node_params *) op.userdata)->attn.k;
    const int n_head = (int) rows->ne[1], n_pages = (int) dst->ne[1];
    const blocks b = view(c, n_head, dst, dst->src[1]);
    std::vector<uint16_t> page((size_t) c.n_cells * c.head_size);
    const int64_t n_units = rows->ne[3] * n_pages * n_head;
    for (int64_t u = ith; u < n_units; u += nth) {
        const int h = (int) (u % n_head), p = (int) (u / n_head % n_pages), s = (int) (u / n_head / n_pages);
        const char * from = (const char *) rows->data + s * rows->nb[3] + h * rows->nb[1];
        for (int t = 0; t < c.n_cells; t++) {
            const char * row = from + ((size_t) p * c.n_cells + t) * rows->nb[2];
            uint16_t * to = &page[(size_t) t * c.head_size];
            if (rows->type == GGML_TYPE_F32) {
                kvq_cpu_f32_to_f16((const float *) row, to, c.head_size);
            } else {
                memcpy(to, row, 2 * (size_t) c.head_size);
            }
        }
        uint8_t * codes = const_cast<uint8_t *>(b.page_codes(p, s)) + h * b.nb_codes;
        kvq_cpu_encode(c, page.data(), nullptr, b.adopts() ? codes : nullptr, b.adopts() ? nullptr : codes,
            const_cast<uint8_t *>(b.page_params(p, s)) + h * b.nb_params);
    }
}

void encode_callback(ggml_tensor * dst, int ith, int nth, void *) { encode_units(dst, ith, nth); }

// ---------------------------------------------------------------- attention: src = q, k, v, mask, sinks, k_codes,
// v_codes

std::string lane_refuse(const char * name, const kvq_codec & c, int role, int n_head_kv, const ggml_tensor * own,
    const ggml_tensor * shared) {
    size_t nb_codes, nb_params;
    if (kvq_codec_bytes(&c, &nb_codes, &nb_params) != KVQ_OK) { return std::string(name) + ": " + kvq_last_error(); }
    if (c.role != role) {
        return std::string(name) + " has a codec of the other role: keys take KVQ_ROLE_K, values KVQ_ROLE_V";
    }
    if (c.type == KVQ_TYPE_F16 && c.head_size % 16) {
        return std::string(name) + ": f16 blocks of " + std::to_string(c.head_size) +
            " channels cannot be attended: pad them to a multiple of 16";
    }
    if (!holds_pages(own, n_head_kv * (nb_params + (shared ? 0 : nb_codes)), own->ne[1], own->ne[2]) ||
        (shared && !holds_pages(shared, n_head_kv * nb_codes, own->ne[1], own->ne[2]))) {
        return std::string(name) + " is no block tensor of its codec with " + std::to_string(n_head_kv) +
            " heads: pass what ggml_kvq_encode gave";
    }
    return "";
}

std::string attn_refuse(const ggml_kvq_attn_params & p, ggml_tensor * const * src) {
    const ggml_tensor *q = src[0], *k = src[1], *v = src[2], *mask = src[3], *sinks = src[4];
    std::string why =
        p.n_head_kv < 1 ? "n_head_kv must be positive" : lane_refuse("k", p.k, KVQ_ROLE_K, p.n_head_kv, k, src[5]);
    why = why.empty() ? lane_refuse("v", p.v, KVQ_ROLE_V, p.n_head_kv, v, src[6]) : why;
    if (!why.empty()) { return why; }
    if (q->type != GGML_TYPE_F32 || q->nb[0] != 4 || q->ne[0] != p.k.head_size || q->ne[2] % p.n_head_kv ||
        q->ne[3] != k->ne[2]) {
        return "q must be f32 [" + std::to_string(p.k.head_size) + ", n_q, a multiple of " +
            std::to_string(p.n_head_kv) + ", " + std::to_string(k->ne[2]) + "] with contiguous channels";
    }
    if (p.k.n_cells != p.v.n_cells || k->ne[1] != v->ne[1] || k->ne[2] != v->ne[2]) {
        return "k and v must have the same pages and streams";
    }
    if (p.k.n_cells > 256 || p.k.head_size > 1024 || p.v.head_size > 1024) {
        return "attention takes pages up to 256 cells and heads up to 1024 channels";
    }
    if (mask &&
        (mask->type != GGML_TYPE_F16 || mask->nb[0] != 2 || mask->ne[0] > k->ne[1] * p.k.n_cells ||
            mask->ne[1] < q->ne[1] || (mask->ne[2] != 1 && mask->ne[2] != q->ne[2]) ||
            (mask->ne[3] != 1 && mask->ne[3] != q->ne[3]))) {
        return "mask must be f16 [up to " + std::to_string(k->ne[1] * p.k.n_cells) +
            " cells, n_q, 1 or n_head, 1 or n_stream]";
    }
    if (sinks && (sinks->type != GGML_TYPE_F32 || !ggml_is_contiguous(sinks) || sinks->ne[0] != q->ne[2])) {
        return "sinks must be f32 [" + std::to_string(q->ne[2]) + "]";
    }
    return "";
}

// Streams [stream0, stream1), query tokens [q0, q1), KV heads [h0, h1) of a node.
void attend_part(ggml_tensor * dst, int stream0, int stream1, int q0, int q1, int h0, int h1, int n_threads) {
    const kvq_custom_params op = kvq_custom_of(dst);
    const ggml_kvq_attn_params & p = ((const node_params *) op.userdata)->attn;
    const ggml_tensor *q = dst->src[0], *mask = dst->src[3], *sinks = dst->src[4];
    const blocks k = view(p.k, p.n_head_kv, dst->src[1], dst->src[5]),
                 v = view(p.v, p.n_head_kv, dst->src[2], dst->src[6]);
    const int n_pages = (int) dst->src[1]->ne[1], gqa = (int) q->ne[2] / p.n_head_kv, n = stream1 - stream0;
    std::vector<kvq_page> pages((size_t) n * n_pages);
    std::vector<kvq_attn> attn(n);
    for (int i = 0; i < n; i++) {
        const int s = stream0 + i;
        for (int j = 0; j < n_pages; j++) {
            kvq_page & to = pages[(size_t) i * n_pages + j];
            to = {};
            to.k_codes = k.page_codes(j, s) + h0 * k.nb_codes;
            to.v_codes = v.page_codes(j, s) + h0 * v.nb_codes;
            to.k_params = k.nb_params ? k.page_params(j, s) + h0 * k.nb_params : nullptr;
            to.v_params = v.nb_params ? v.page_params(j, s) + h0 * v.nb_params : nullptr;
            to.cell = j * p.k.n_cells;
            to.n_slots = p.k.n_cells;
        }
        kvq_attn & a = attn[i];
        a = {};
        a.k = p.k;
        a.v = p.v;
        a.n_q = q1 - q0;
        a.n_head = (h1 - h0) * gqa;
        a.n_head_kv = h1 - h0;
        a.n_pages = n_pages;
        a.n_kv = mask ? (int) mask->ne[0] : n_pages * p.k.n_cells;
        a.flags = p.flags;
        a.scale = p.scale;
        a.max_bias = p.max_bias;
        a.softcap = p.softcap;
        const int head0 = h0 * gqa;
        a.q = (const float *) ((const char *) q->data + q0 * q->nb[1] + head0 * q->nb[2] + s * q->nb[3]);
        a.q_stride_token = q->nb[1] / 4;
        a.q_stride_head = q->nb[2] / 4;
        if (mask) {
            const size_t per_head = mask->ne[2] > 1 ? mask->nb[2] : 0;
            a.mask = (const uint16_t *) ((const char *) mask->data + q0 * mask->nb[1] + head0 * per_head +
                (mask->ne[3] > 1 ? s * mask->nb[3] : 0));
            a.mask_stride_token = mask->nb[1] / 2;
            a.mask_stride_head = per_head / 2;
        }
        a.sinks = sinks ? (const float *) sinks->data + head0 : nullptr;
        a.dst = (float *) ((char *) dst->data + head0 * dst->nb[1] + q0 * dst->nb[2] + s * dst->nb[3]);
        a.dst_stride_head = dst->nb[1] / 4;
        a.dst_stride_token = dst->nb[2] / 4;
        a.pages = pages.data() + (size_t) i * n_pages;
    }
    kvq_cpu_attend(attn.data(), n, n_threads);
}

// ggml's own threads share (stream, KV head) pairs, or query tokens when there are more of those; ALiBi slopes depend
// on a head's place among all heads, so heads stay together there.
void attn_callback(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const ggml_kvq_attn_params & p = ((const node_params *) userdata)->attn;
    const int n_stream = (int) dst->ne[3], n_q = (int) dst->ne[2], n_head_kv = p.max_bias > 0.0f ? 1 : p.n_head_kv;
    const int per_unit = p.n_head_kv / n_head_kv, chunks = std::min(n_q, std::max(1, nth / (n_stream * n_head_kv)));
    const int n_units = n_stream * n_head_kv * chunks;
    for (int u = ith; u < n_units; u += nth) {
        const int s = u / chunks / n_head_kv, h = u / chunks % n_head_kv, c = u % chunks;
        attend_part(dst, s, s + 1, (int) ((int64_t) n_q * c / chunks), (int) ((int64_t) n_q * (c + 1) / chunks),
            h * per_unit, (h + 1) * per_unit, 1);
    }
}

// ---------------------------------------------------------------- prediction: src = weights, rows, add

kvq_predictor predictor_of(const ggml_tensor * dst) {
    kvq_predictor p;
    p.n_in = (int) dst->src[1]->ne[0];
    p.n_out = (int) dst->ne[0];
    p.bits = kvq_predictor_bytes(p.n_in, p.n_out, 8) == ggml_nbytes(dst->src[0]) ? 8 : 4;
    p.data = (const uint8_t *) dst->src[0]->data;
    return p;
}

std::string predict_refuse(
    const ggml_tensor * weights, int n_out, int bits, const ggml_tensor * rows, const ggml_tensor * add) {
    if (rows->type != GGML_TYPE_F32 || rows->nb[0] != 4) { return "rows must be f32 with contiguous channels"; }
    const size_t nb = rows->ne[0] <= KVQ_PREDICT_MOST ? kvq_predictor_bytes((int) rows->ne[0], n_out, bits) : 0;
    if (!nb || weights->type != GGML_TYPE_I8 || !ggml_is_contiguous(weights) || ggml_nbytes(weights) != nb) {
        return "weights must be i8 [" + std::to_string(nb) + "] for " + std::to_string(n_out) + " x " +
            std::to_string(rows->ne[0]) + " in " + std::to_string(bits) +
            " bits (8 or 4): fill them with kvq_weights_pack";
    }
    if (add &&
        (add->type != GGML_TYPE_F32 || add->nb[0] != 4 || add->ne[0] != n_out || add->ne[1] != rows->ne[1] ||
            add->ne[2] != rows->ne[2] || add->ne[3] != rows->ne[3])) {
        return "add must be f32 of the result's shape with contiguous channels";
    }
    return "";
}

void predict_units(ggml_tensor * dst, int ith, int nth) {
    const ggml_tensor *rows = dst->src[1], *add = dst->src[2];
    const kvq_predictor p = predictor_of(dst);
    const int64_t per = (rows->ne[1] + 31) / 32, n_units = per * rows->ne[2] * rows->ne[3];
    for (int64_t u = ith; u < n_units; u += nth) {
        const int64_t first = u % per * 32, i2 = u / per % rows->ne[2], i3 = u / per / rows->ne[2];
        const auto at = [&](const ggml_tensor * t) {
            return (const float *) ((const char *) t->data + first * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3]);
        };
        kvq_cpu_predict(p, std::min<int64_t>(32, rows->ne[1] - first), at(rows), (int64_t) (rows->nb[1] / 4),
            add ? at(add) : nullptr, add ? (int64_t) (add->nb[1] / 4) : 0, const_cast<float *>(at(dst)),
            (int64_t) (dst->nb[1] / 4), 1);
    }
}

void predict_callback(ggml_tensor * dst, int ith, int nth, void *) { predict_units(dst, ith, nth); }

} // namespace

// ---------------------------------------------------------------- doors

extern "C" size_t ggml_kvq_nb_page(const kvq_codec * codec, int n_head_kv, bool adopts_codes) {
    size_t nb_codes, nb_params;
    if (n_head_kv < 1 || kvq_codec_bytes(codec, &nb_codes, &nb_params) != KVQ_OK) { return 0; }
    return n_head_kv * (nb_params + (adopts_codes ? 0 : nb_codes));
}

extern "C" ggml_tensor * ggml_kvq_encode(
    ggml_context * ctx, const kvq_codec * codec, ggml_tensor * rows, ggml_tensor * shared) {
    if (!codec || !rows) { return refuse("codec and rows must not be NULL"); }
    const std::string why = encode_refuse(*codec, rows, shared);
    if (!why.empty()) { return refuse(why); }
    ggml_kvq_attn_params p;
    memset(&p, 0, sizeof(p));
    p.k = *codec;
    p.n_head_kv = (int) rows->ne[1];
    const int64_t nb = (int64_t) ggml_kvq_nb_page(codec, p.n_head_kv, shared);
    if (!nb) { return refuse("adopted codes of a format without parameters leave nothing to store"); }
    ggml_tensor * args[2] = { rows, shared };
    return ggml_custom_4d(ctx, GGML_TYPE_I8, nb, rows->ne[2] / codec->n_cells, rows->ne[3], 1, args, 2, encode_callback,
        GGML_N_TASKS_MAX, intern(p));
}

extern "C" ggml_tensor * ggml_kvq_attn(ggml_context * ctx, const ggml_kvq_attn_params * params, ggml_tensor * q,
    ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask, ggml_tensor * sinks, ggml_tensor * k_codes,
    ggml_tensor * v_codes) {
    if (!params || !q || !k || !v) { return refuse("params, q, k and v must not be NULL"); }
    ggml_tensor * args[7] = { q, k, v, mask, sinks, k_codes, v_codes };
    const std::string why = attn_refuse(*params, args);
    if (!why.empty()) { return refuse(why); }
    return ggml_custom_4d(ctx, GGML_TYPE_F32, params->v.head_size, q->ne[2], q->ne[1], q->ne[3], args, 7, attn_callback,
        GGML_N_TASKS_MAX, intern(*params));
}

extern "C" ggml_tensor * ggml_kvq_predict(
    ggml_context * ctx, ggml_tensor * weights, int n_out, int bits, ggml_tensor * rows, ggml_tensor * add) {
    if (!weights || !rows) { return refuse("weights and rows must not be NULL"); }
    const std::string why = predict_refuse(weights, n_out, bits, rows, add);
    if (!why.empty()) { return refuse(why); }
    ggml_tensor * args[3] = { weights, rows, add };
    return ggml_custom_4d(ctx, GGML_TYPE_F32, n_out, rows->ne[1], rows->ne[2], rows->ne[3], args, 3, predict_callback,
        GGML_N_TASKS_MAX, nullptr);
}

bool kvq_graph_op_supported(const ggml_tensor * op) {
    const kvq_custom_params p = kvq_custom_of(op);
    return kvq_is_custom(op) && (p.fun == encode_callback || p.fun == attn_callback || p.fun == predict_callback);
}

void kvq_graph_op_compute(ggml_tensor * op, int n_threads) {
    const kvq_custom_params p = kvq_custom_of(op);
    if (p.fun == attn_callback) {
        const ggml_kvq_attn_params & a = ((const node_params *) p.userdata)->attn;
        attend_part(op, 0, (int) op->ne[3], 0, (int) op->ne[2], 0, a.n_head_kv, n_threads);
        return;
    }
    kvq_parallel_for(n_threads, n_threads,
        [&](int64_t i) { (p.fun == predict_callback ? predict_units : encode_units)(op, (int) i, n_threads); });
}

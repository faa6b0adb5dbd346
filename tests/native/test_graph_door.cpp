// ggml-kvq-graph.h on the CPU backend and on device KVQ0: encode nodes against kvq_encode (same bytes), attention
// nodes against a plain f64 loop (KVQ_ATTN_F32) and against kvq_attend (int8: same bits). Guard tensors lie around
// every output.
#include "ggml-kvq-graph.h"

#include "ggml-backend.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

extern "C" ggml_backend_reg_t ggml_backend_init(void);

static int n_failed = 0;

#define CHECK(cond, ...)                                                                                               \
    if (!(cond)) {                                                                                                     \
        n_failed++;                                                                                                    \
        printf("%s:%d: %s: ", __FILE__, __LINE__, #cond);                                                              \
        printf(__VA_ARGS__);                                                                                           \
        printf("\n");                                                                                                  \
    }

struct test_case {
    const char * name;
    int dk, dv, n_head_kv, gqa, n_q, n_pages, n_stream;
    int bits, group, scale;
    bool f16_rows, mask, mask_per_stream, mask_per_head, sinks, share_k, share_v, f32;
    float max_bias, softcap;
    int missing; // n_kv = cells - missing
};

static const test_case cases[] = {
    // name              dk   dv  kv gqa  q pg st  b  grp u8 f16    mask   stream head   sinks  sh k   sh v   f32
    //     bias  cap  missing
    { "plain", 64, 64, 2, 1, 1, 2, 1, 2, 32, 0, false, false, false, false, false, false, false, true, 0.0f, 0.0f, 0 },
    { "int8", 128, 128, 2, 4, 3, 3, 1, 2, 32, 0, false, true, false, false, false, false, false, false, 0.0f, 0.0f, 5 },
    { "f16 rows", 80, 96, 3, 2, 5, 2, 2, 4, 32, 1, true, true, true, false, true, false, false, true, 0.0f, 0.0f, 1 },
    { "shared keys", 64, 64, 2, 4, 2, 3, 1, 1, 32, 0, false, true, false, false, false, true, false, true, 0.0f, 0.0f,
        31 },
    { "shared both", 128, 64, 1, 8, 40, 2, 2, 2, 64, 0, false, true, true, false, false, true, true, true, 0.0f, 0.0f,
        0 },
    { "shared int8", 64, 128, 2, 4, 7, 2, 2, 3, 32, 0, true, true, false, false, true, true, true, false, 0.0f, 0.0f,
        7 },
    { "alibi", 64, 64, 3, 2, 9, 2, 1, 2, 16, 0, false, true, false, true, false, false, false, true, 8.0f, 0.0f, 0 },
    { "alibi streams", 72, 72, 3, 4, 1, 2, 3, 2, 32, 0, false, true, true, true, true, false, true, true, 4.0f, 0.0f,
        3 },
    { "softcap", 96, 80, 2, 2, 6, 2, 1, 2, 32, 1, false, false, false, false, false, false, false, true, 0.0f, 5.0f,
        0 },
    { "no codes", 64, 64, 2, 2, 2, 2, 1, 0, 32, 0, false, true, false, false, false, false, false, true, 0.0f, 0.0f,
        0 },
    { "f16 blocks", 64, 80, 2, 2, 3, 2, 2, 16, 32, 0, false, true, true, false, true, false, false, true, 0.0f, 0.0f,
        9 },
    { "one query, many pages", 64, 64, 1, 4, 1, 40, 1, 2, 32, 0, false, true, false, false, false, false, false, true,
        0.0f, 0.0f, 17 },
};

static kvq_codec make_codec(const test_case & t, int role) {
    kvq_codec c = {};
    c.type = t.bits == 16 ? KVQ_TYPE_F16 : KVQ_TYPE_AFFINE;
    c.role = role;
    c.bits = t.bits;
    c.group = t.group;
    c.scale = t.scale;
    c.eta = 0.045f;
    c.n_cells = t.group > 32 ? t.group : 32;
    c.head_size = role == KVQ_ROLE_K ? t.dk : t.dv;
    return c;
}

// one lane: rows [stream][cell][head][d] as f16 values
struct lane {
    kvq_codec codec;
    int n_head, n_pages, n_stream;
    std::vector<uint16_t> rows;
    std::vector<uint8_t> records;  // what the node must hold
    std::vector<uint16_t> decoded; // [stream][head][cell][d]
    size_t nb_codes, nb_params, nb_page;
    bool adopts;

    int cells() const { return n_pages * codec.n_cells; }

    void fill(std::mt19937 & rng) {
        std::normal_distribution<float> normal;
        rows.resize((size_t) n_stream * cells() * n_head * codec.head_size);
        for (auto & r : rows) { r = ggml_fp32_to_fp16(normal(rng)); }
    }
    void encode(const lane * shared) {
        adopts = shared;
        kvq_codec_bytes(&codec, &nb_codes, &nb_params);
        nb_page = ggml_kvq_nb_page(&codec, n_head, adopts);
        const int d = codec.head_size, n = codec.n_cells;
        records.assign(nb_page * n_pages * n_stream, 0);
        decoded.resize(rows.size());
        std::vector<uint16_t> page((size_t) n * d);
        for (int s = 0; s < n_stream; s++) {
            for (int p = 0; p < n_pages; p++) {
                uint8_t * record = &records[((size_t) s * n_pages + p) * nb_page];
                const uint8_t * codes0 =
                    shared ? &shared->records[((size_t) s * n_pages + p) * shared->nb_page] : record;
                for (int h = 0; h < n_head; h++) {
                    for (int t = 0; t < n; t++) {
                        memcpy(
                            &page[(size_t) t * d], &rows[(((size_t) s * cells() + p * n + t) * n_head + h) * d], 2 * d);
                    }
                    uint8_t * params = record + (shared ? 0 : n_head * nb_codes) + h * nb_params;
                    const uint8_t * codes = codes0 + h * nb_codes;
                    CHECK(kvq_encode(&codec, page.data(), nullptr, shared ? codes : nullptr,
                              shared ? nullptr : const_cast<uint8_t *>(codes), params) == KVQ_OK,
                        "%s", kvq_last_error());
                    CHECK(kvq_decode(&codec, codes, params,
                              &decoded[(((size_t) s * n_head + h) * cells() + p * n) * d]) == KVQ_OK,
                        "%s", kvq_last_error());
                }
            }
        }
    }
};

struct node {
    lane l;
    ggml_tensor *rows = nullptr, *blocks = nullptr;
};

static const uint8_t GUARD = 0x5e;

static ggml_tensor * guard(ggml_context * ctx, std::vector<ggml_tensor *> & all) {
    all.push_back(ggml_new_tensor_1d(ctx, GGML_TYPE_I8, 512));
    return all.back();
}

static double f16(uint16_t h) { return (double) ggml_fp16_to_fp32(h); }

// softmax(scale*q.k + slope*mask) v in f64; *bound: f32 rounding of sums and logits
static void reference(const test_case & t, const lane & k, const lane & v, const std::vector<float> & q,
    const std::vector<uint16_t> & mask, const std::vector<float> & sinks, float scale, int n_kv, int s, int iq, int h,
    std::vector<double> & out, double * bound) {
    const int n_head = t.n_head_kv * t.gqa, kvh = h / t.gqa, cells = k.cells();
    int pow2 = 1;
    while (2 * pow2 <= n_head) { pow2 *= 2; }
    const double slope = t.max_bias <= 0 ? 1.0
        : h < pow2                       ? pow(2.0, -t.max_bias * (h + 1) / pow2)
                                         : pow(2.0, -t.max_bias / 2 * (2 * (h - pow2) + 1) / pow2);
    std::vector<double> x(n_kv);
    double top = t.sinks ? (double) sinks[h] : -INFINITY, largest = 0.0;
    for (int c = 0; c < n_kv; c++) {
        double dot = 0.0, size = 0.0;
        for (int d = 0; d < t.dk; d++) {
            const double a = q[(((size_t) s * n_head + h) * t.n_q + iq) * t.dk + d] *
                f16(k.decoded[(((size_t) s * t.n_head_kv + kvh) * cells + c) * t.dk + d]);
            dot += a;
            size += fabs(a);
        }
        x[c] = dot * scale;
        if (t.softcap > 0) { x[c] = t.softcap * tanh(x[c] / t.softcap); }
        if (t.mask) {
            const int ms = t.mask_per_stream ? s : 0, mh = t.mask_per_head ? h : 0,
                      n_mask_head = t.mask_per_head ? n_head : 1;
            x[c] += slope * f16(mask[(((size_t) ms * n_mask_head + mh) * t.n_q + iq) * n_kv + c]);
        }
        top = std::max(top, x[c]);
        if (x[c] > -INFINITY) {
            largest = std::max(largest, size * scale * (t.dk + 32) + 64 * (fabs(x[c]) + t.softcap + 1));
        }
    }
    double sum = t.sinks ? exp(sinks[h] - top) : 0.0, v_max = 0.0;
    out.assign(t.dv, 0.0);
    for (int c = 0; c < n_kv; c++) {
        const double w = top > -INFINITY ? exp(x[c] - top) : 0.0;
        sum += w;
        for (int d = 0; d < t.dv; d++) {
            const double a = f16(v.decoded[(((size_t) s * t.n_head_kv + kvh) * cells + c) * t.dv + d]);
            out[d] += w * a;
            v_max = std::max(v_max, fabs(a));
        }
    }
    for (auto & o : out) { o = sum > 0 ? o / sum : 0.0; }
    // weights move by a factor exp(2 * logit error), sums by (n_kv + 64) roundings; values are at most v_max
    *bound = v_max * (2 * expm1(2 * largest * 0x1p-24) + 2 * (n_kv + 64) * 0x1p-24 + 2e-6);
}

static void run(const test_case & t, ggml_backend_t backend, int n_threads, unsigned seed) {
    const std::string what = std::string(t.name) + " on " + ggml_backend_name(backend) + ", " +
        std::to_string(n_threads) + " threads, seed " + std::to_string(seed);
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    ggml_init_params ip = { 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
    ggml_context * ctx = ggml_init(ip);
    std::vector<ggml_tensor *> guards;

    // layer 0 gives codes to layer 1, whose keys and values are attended
    node nodes[2][2];
    for (int il = 0; il < 2; il++) {
        for (int role = 0; role < 2; role++) {
            node & n = nodes[il][role];
            n.l.codec = make_codec(t, role);
            n.l.n_head = t.n_head_kv;
            n.l.n_pages = t.n_pages;
            n.l.n_stream = t.n_stream;
            n.l.fill(rng);
            const bool share = il == 1 && (role == KVQ_ROLE_K ? t.share_k : t.share_v);
            n.l.encode(share ? &nodes[0][role].l : nullptr);
            // f32 rows lie strided: a view into rows with 8 channels more
            const int d = n.l.codec.head_size;
            n.rows = ggml_new_tensor_4d(
                ctx, t.f16_rows ? GGML_TYPE_F16 : GGML_TYPE_F32, d + 8, t.n_head_kv, n.l.cells(), t.n_stream);
            ggml_tensor * view = ggml_view_4d(
                ctx, n.rows, d, t.n_head_kv, n.l.cells(), t.n_stream, n.rows->nb[1], n.rows->nb[2], n.rows->nb[3], 0);
            guard(ctx, guards);
            n.blocks = ggml_kvq_encode(ctx, &n.l.codec, view, share ? nodes[0][role].blocks : nullptr);
            guard(ctx, guards);
            CHECK(n.blocks, "%s: %s", what.c_str(), kvq_last_error());
            if (!n.blocks) {
                ggml_free(ctx);
                return;
            }
        }
    }
    const int n_head = t.n_head_kv * t.gqa, cells = nodes[0][0].l.cells(), n_kv = t.mask ? cells - t.missing : cells;
    ggml_tensor * q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, t.dk, t.n_q, n_head, t.n_stream);
    ggml_tensor * mask = t.mask ? ggml_new_tensor_4d(ctx, GGML_TYPE_F16, n_kv, t.n_q, t.mask_per_head ? n_head : 1,
                                      t.mask_per_stream ? t.n_stream : 1)
                                : nullptr;
    ggml_tensor * sinks = t.sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_head) : nullptr;
    ggml_kvq_attn_params p = {};
    p.k = nodes[1][0].l.codec;
    p.v = nodes[1][1].l.codec;
    p.n_head_kv = t.n_head_kv;
    p.flags = t.f32 ? KVQ_ATTN_F32 : 0;
    p.scale = 1.0f / sqrtf((float) t.dk);
    p.max_bias = t.max_bias;
    p.softcap = t.softcap;
    guard(ctx, guards);
    ggml_tensor * out = ggml_kvq_attn(ctx, &p, q, nodes[1][0].blocks, nodes[1][1].blocks, mask, sinks,
        t.share_k ? nodes[0][0].blocks : nullptr, t.share_v ? nodes[0][1].blocks : nullptr);
    guard(ctx, guards);
    CHECK(out, "%s: %s", what.c_str(), kvq_last_error());
    if (!out) {
        ggml_free(ctx);
        return;
    }

    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    for (auto & layer : nodes) {
        for (auto & n : layer) { ggml_build_forward_expand(graph, n.blocks); }
    }
    ggml_backend_dev_t dev = ggml_backend_get_device(backend);
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        const bool supported = node->op != GGML_OP_CUSTOM || ggml_backend_dev_supports_op(dev, node);
        CHECK(supported, "%s: node %d declined", what.c_str(), i);
        if (!supported) {
            ggml_free(ctx);
            return;
        }
    }
    // host memory, which both devices read
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(
        ctx, ggml_backend_dev_buffer_type(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)));
    ggml_backend_buffer_clear(buffer, GUARD);

    for (auto & layer : nodes) {
        for (auto & n : layer) {
            const int d = n.l.codec.head_size;
            for (size_t row = 0; row < n.l.rows.size() / d; row++) {
                char * to = (char *) n.rows->data + row * n.rows->nb[1];
                for (int i = 0; i < d; i++) {
                    const uint16_t h = n.l.rows[row * d + i];
                    if (t.f16_rows) {
                        ((uint16_t *) to)[i] = h;
                    } else {
                        ((float *) to)[i] = ggml_fp16_to_fp32(h);
                    }
                }
            }
        }
    }
    std::vector<float> q_data((size_t) ggml_nelements(q)), sink_data(t.sinks ? n_head : 0);
    for (auto & x : q_data) { x = normal(rng); }
    for (auto & x : sink_data) { x = normal(rng); }
    std::vector<uint16_t> mask_data(mask ? (size_t) ggml_nelements(mask) : 0);
    for (size_t i = 0; i < mask_data.size(); i++) {
        const bool empty_row = i / n_kv % t.n_q == 1; // the second token sees nothing
        mask_data[i] = ggml_fp32_to_fp16(empty_row || rng() % 3 == 0 ? -INFINITY : -fabsf(normal(rng)));
    }
    memcpy(q->data, q_data.data(), ggml_nbytes(q));
    if (mask) { memcpy(mask->data, mask_data.data(), ggml_nbytes(mask)); }
    if (sinks) { memcpy(sinks->data, sink_data.data(), ggml_nbytes(sinks)); }

    auto set_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(dev), "ggml_backend_set_n_threads");
    set_threads(backend, n_threads);
    CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS, "%s", what.c_str());

    for (auto & layer : nodes) {
        for (auto & n : layer) {
            CHECK(ggml_nbytes(n.blocks) == n.l.records.size() &&
                    !memcmp(n.blocks->data, n.l.records.data(), n.l.records.size()),
                "%s: blocks differ from kvq_encode", what.c_str());
        }
    }
    for (ggml_tensor * g : guards) {
        for (int i = 0; i < 512; i++) {
            CHECK(((uint8_t *) g->data)[i] == GUARD, "%s: byte %d of a guard overwritten", what.c_str(), i);
        }
    }
    const float * got = (const float *) out->data;
    if (t.f32) {
        std::vector<double> want;
        double bound, worst = 0.0;
        for (int s = 0; s < t.n_stream; s++) {
            for (int iq = 0; iq < t.n_q; iq++) {
                for (int h = 0; h < n_head; h++) {
                    reference(t, nodes[1][0].l, nodes[1][1].l, q_data, mask_data, sink_data, p.scale, n_kv, s, iq, h,
                        want, &bound);
                    for (int d = 0; d < t.dv; d++) {
                        const double y = got[(((size_t) s * t.n_q + iq) * n_head + h) * t.dv + d];
                        worst = std::isfinite(y) ? std::max(worst, fabs(y - want[d]) / bound) : INFINITY;
                    }
                }
            }
        }
        CHECK(worst <= 1.0, "%s: off by %g of the bound", what.c_str(), worst);
    } else { // int8: the bits of kvq_attend over the same bytes
        std::vector<float> want((size_t) ggml_nelements(out));
        const lane &k = nodes[1][0].l, &v = nodes[1][1].l;
        for (int s = 0; s < t.n_stream; s++) {
            std::vector<kvq_page> pages(t.n_pages);
            for (int j = 0; j < t.n_pages; j++) {
                kvq_page & to = pages[j];
                const size_t at = (size_t) s * t.n_pages + j;
                to = {};
                to.k_codes = &(k.adopts ? nodes[0][0].l : k).records[at * (k.adopts ? nodes[0][0].l : k).nb_page];
                to.v_codes = &(v.adopts ? nodes[0][1].l : v).records[at * (v.adopts ? nodes[0][1].l : v).nb_page];
                to.k_params = &k.records[at * k.nb_page + (k.adopts ? 0 : t.n_head_kv * k.nb_codes)];
                to.v_params = &v.records[at * v.nb_page + (v.adopts ? 0 : t.n_head_kv * v.nb_codes)];
                to.cell = j * k.codec.n_cells;
                to.n_slots = k.codec.n_cells;
            }
            kvq_attn a = {};
            a.k = p.k;
            a.v = p.v;
            a.n_q = t.n_q;
            a.n_head = n_head;
            a.n_head_kv = t.n_head_kv;
            a.n_pages = t.n_pages;
            a.n_kv = n_kv;
            a.scale = p.scale;
            a.max_bias = p.max_bias;
            a.softcap = p.softcap;
            a.q = q_data.data() + (size_t) s * n_head * t.n_q * t.dk;
            a.q_stride_token = t.dk;
            a.q_stride_head = (int64_t) t.n_q * t.dk;
            a.mask = mask_data.data() + (t.mask_per_stream ? (size_t) s * t.n_q * n_kv : 0);
            a.mask_stride_token = n_kv;
            a.sinks = t.sinks ? sink_data.data() : nullptr;
            a.dst = want.data() + (size_t) s * t.n_q * n_head * t.dv;
            a.dst_stride_token = (int64_t) n_head * t.dv;
            a.dst_stride_head = t.dv;
            a.pages = pages.data();
            CHECK(kvq_attend(&a, 1, 1) == KVQ_OK, "%s: %s", what.c_str(), kvq_last_error());
        }
        CHECK(!memcmp(want.data(), got, ggml_nbytes(out)), "%s: differs from kvq_attend", what.c_str());
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
}

// Prediction nodes: the bits of kvq_predict, whatever the strides and threads.
static void predict(ggml_backend_t backend, int n_in, int n_out, int bits, int n, bool with_add, int n_threads) {
    std::mt19937 rng(n_in + bits + n);
    std::normal_distribution<float> normal;
    ggml_init_params ip = { 16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
    ggml_context * ctx = ggml_init(ip);
    std::vector<ggml_tensor *> guards;
    const size_t nb = kvq_weights_bytes(n_in, n_out, bits);
    ggml_tensor * weights = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, (int64_t) nb);
    ggml_tensor * whole = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_in + 3, n, 2);
    ggml_tensor * rows = ggml_view_3d(ctx, whole, n_in, n, 2, whole->nb[1], whole->nb[2], 4);
    ggml_tensor * add = with_add ? ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_out, n, 2) : nullptr;
    guard(ctx, guards);
    ggml_tensor * out = ggml_kvq_predict(ctx, weights, n_out, bits, rows, add);
    guard(ctx, guards);
    CHECK(out, "%s", kvq_last_error());
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    CHECK(ggml_backend_dev_supports_op(ggml_backend_get_device(backend), out), "declined");
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(
        ctx, ggml_backend_dev_buffer_type(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)));
    ggml_backend_buffer_clear(buffer, GUARD);
    std::vector<float> w((size_t) n_in * n_out), x((size_t) n_in * n * 2), a((size_t) n_out * n * 2), want(a.size());
    for (auto * v : { &w, &x, &a }) {
        for (float & f : *v) { f = normal(rng); }
    }
    CHECK(kvq_weights_pack(n_in, n_out, bits, w.data(), weights->data) == KVQ_OK, "%s", kvq_last_error());
    for (int i = 0; i < 2 * n; i++) {
        memcpy((char *) rows->data + (i % n) * rows->nb[1] + (i / n) * rows->nb[2], &x[(size_t) i * n_in],
            4 * (size_t) n_in);
    }
    if (add) { memcpy(add->data, a.data(), 4 * a.size()); }
    CHECK(kvq_predict(n_in, n_out, bits, weights->data, 2 * n, x.data(), add ? a.data() : nullptr, want.data(), 1) ==
            KVQ_OK,
        "%s", kvq_last_error());
    auto set_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_get_device(backend)), "ggml_backend_set_n_threads");
    set_threads(backend, n_threads);
    CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS, "predict");
    CHECK(!memcmp(out->data, want.data(), 4 * want.size()), "%d x %d, %d bits, %d rows: differs from kvq_predict",
        n_out, n_in, bits, n);
    for (ggml_tensor * g : guards) {
        for (int i = 0; i < 512; i++) {
            CHECK(((uint8_t *) g->data)[i] == GUARD, "predict: byte %d of a guard overwritten", i);
        }
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
}

// Operands that do not fit: NULL and a line, before any graph runs.
static void refusals(void) {
    ggml_init_params ip = { 64 * ggml_tensor_overhead(), nullptr, true };
    ggml_context * ctx = ggml_init(ip);
    const test_case t = cases[0];
    const kvq_codec k = make_codec(t, KVQ_ROLE_K), v = make_codec(t, KVQ_ROLE_V);
    const auto rows = [&](ggml_type type, int d, int n_cells) {
        return ggml_new_tensor_4d(ctx, type, d, 2, n_cells, 1);
    };
#define REFUSED(expr) CHECK(!(expr) && strlen(kvq_last_error()) > 10, "accepted, or without a line")
    REFUSED(ggml_kvq_encode(ctx, nullptr, rows(GGML_TYPE_F32, 64, 64), nullptr));
    REFUSED(ggml_kvq_encode(ctx, &k, rows(GGML_TYPE_F32, 64, 65), nullptr));
    REFUSED(ggml_kvq_encode(ctx, &k, rows(GGML_TYPE_F32, 72, 64), nullptr));
    REFUSED(ggml_kvq_encode(ctx, &k, rows(GGML_TYPE_BF16, 64, 64), nullptr));
    REFUSED(ggml_kvq_encode(ctx, &k, rows(GGML_TYPE_F32, 64, 64), rows(GGML_TYPE_F32, 64, 64)));
    REFUSED(ggml_kvq_encode(ctx, &k, ggml_transpose(ctx, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 32, 64)), nullptr));
    kvq_codec bad = k;
    bad.bits = 9;
    REFUSED(ggml_kvq_encode(ctx, &bad, rows(GGML_TYPE_F32, 64, 64), nullptr));

    ggml_tensor * kb = ggml_kvq_encode(ctx, &k, rows(GGML_TYPE_F32, 64, 64), nullptr);
    ggml_tensor * vb = ggml_kvq_encode(ctx, &v, rows(GGML_TYPE_F32, 64, 64), nullptr);
    ggml_tensor * v1 = ggml_kvq_encode(ctx, &v, rows(GGML_TYPE_F32, 64, 32), nullptr);
    ggml_tensor * q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 64, 3, 4, 1);
    ggml_kvq_attn_params p = {};
    p.k = k;
    p.v = v;
    p.n_head_kv = 2;
    p.scale = 1.0f;
    CHECK(ggml_kvq_attn(ctx, &p, q, kb, vb, nullptr, nullptr, nullptr, nullptr), "%s", kvq_last_error());
    REFUSED(ggml_kvq_attn(ctx, &p, nullptr, kb, vb, nullptr, nullptr, nullptr, nullptr));
    REFUSED(ggml_kvq_attn(ctx, &p, q, q, vb, nullptr, nullptr, nullptr, nullptr));
    REFUSED(ggml_kvq_attn(ctx, &p, q, kb, v1, nullptr, nullptr, nullptr, nullptr));
    REFUSED(ggml_kvq_attn(
        ctx, &p, ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 64, 3, 5, 1), kb, vb, nullptr, nullptr, nullptr, nullptr));
    REFUSED(ggml_kvq_attn(
        ctx, &p, ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 72, 3, 4, 1), kb, vb, nullptr, nullptr, nullptr, nullptr));
    REFUSED(ggml_kvq_attn(
        ctx, &p, ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 64, 3, 4, 2), kb, vb, nullptr, nullptr, nullptr, nullptr));
    REFUSED(
        ggml_kvq_attn(ctx, &p, q, kb, vb, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 64, 3), nullptr, nullptr, nullptr));
    REFUSED(
        ggml_kvq_attn(ctx, &p, q, kb, vb, ggml_new_tensor_2d(ctx, GGML_TYPE_F16, 65, 3), nullptr, nullptr, nullptr));
    REFUSED(
        ggml_kvq_attn(ctx, &p, q, kb, vb, ggml_new_tensor_2d(ctx, GGML_TYPE_F16, 64, 2), nullptr, nullptr, nullptr));
    REFUSED(ggml_kvq_attn(ctx, &p, q, kb, vb, nullptr, ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 3), nullptr, nullptr));
    REFUSED(ggml_kvq_attn(ctx, &p, q, kb, vb, nullptr, nullptr, q, nullptr));
    ggml_tensor * w = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, (int64_t) kvq_weights_bytes(64, 32, 8));
    CHECK(ggml_kvq_predict(ctx, w, 32, 8, q, nullptr), "%s", kvq_last_error());
    REFUSED(ggml_kvq_predict(ctx, nullptr, 32, 8, q, nullptr));
    REFUSED(ggml_kvq_predict(ctx, w, 32, 4, q, nullptr));
    REFUSED(ggml_kvq_predict(ctx, w, 32, 5, q, nullptr));
    REFUSED(ggml_kvq_predict(ctx, w, 48, 8, q, nullptr));
    REFUSED(ggml_kvq_predict(ctx, w, 32, 8, rows(GGML_TYPE_F16, 64, 64), nullptr));
    REFUSED(ggml_kvq_predict(ctx, w, 32, 8, q, q));
    p.k = v;
    REFUSED(ggml_kvq_attn(ctx, &p, q, kb, vb, nullptr, nullptr, nullptr, nullptr));
    ggml_free(ctx);
}

int main(void) {
    refusals();
    if (!ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)) {
        ggml_backend_load_all_from_path(getenv("KVQ_LIB_DIR")); // a build whose CPU backend is a module
    }
    const ggml_backend_dev_t devices[] = {
        ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU),
        ggml_backend_reg_dev_get(ggml_backend_init(), 0), // KVQ0 of the objects this test is linked to
    };
    for (ggml_backend_dev_t dev : devices) {
        ggml_backend_t backend = ggml_backend_dev_init(dev, nullptr);
        unsigned seed = 1;
        for (const test_case & t : cases) {
            for (int n_threads : { 1, 2, 5 }) { run(t, backend, n_threads, seed++); }
        }
        for (int n_threads : { 1, 2, 5 }) {
            predict(backend, 128, 64, 8, 70, true, n_threads);
            predict(backend, 72, 40, 4, 1, false, n_threads);
            predict(backend, 256, 16, 8, 33, false, n_threads);
        }
        printf("%s: %u graphs\n", ggml_backend_dev_name(dev), seed - 1);
        ggml_backend_free(backend);
    }
    printf("%s\n", n_failed ? "FAILED" : "OK");
    return n_failed != 0;
}

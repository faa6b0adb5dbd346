// Methods that treat cells by the attention they get, on CUDA (zipcache, minikv): sets, kept cells, sealed bytes and stores as on the
// CPU for the same sums, attention and column sums against f64. Usage: test_cuda_policies [quick | host | decode | bench [decode]]    bench: one layer of 8 KV heads; decode: of one token alone
#include "device_bytes.h"
#include "../../ggml-kvq/cache/store.h"
#include "../../ggml-kvq/cpu/cpu.h"
#include "../../ggml-kvq/types/f16.h"
#include "../../ggml-kvq/types/mixed.h"
#include "../../ggml-kvq/types/types.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>

static float normal() { return std::normal_distribution<float>()(rng); }

static kvq_layer_plan make_plan(const char * method, const char * opts, int n_head, int D, int ordinal = 0) {
    const kvq_method * m = kvq_method_find(method);
    kvq_options o;
    std::string err;
    CHECK(m && kvq_options_parse(*m, opts, o, err) == KVQ_OK, "%s", err.c_str());
    kvq_layer_plan plan;
    const kvq_layer_shape shape = { 0, n_head, D, D };
    const kvq_layer_context context = { ordinal, 2, shape, nullptr };
    CHECK(m->plan(o, context, plan, err) == KVQ_OK, "%s", err.c_str());
    return plan;
}

// ---------------------------------------------------------------- blocks

static uint16_t value_of(int kind) {
    switch (kind) {
        case 0:  return kvq_f32_to_f16(normal());
        case 1:  return (uint16_t) rng();                                // any bits
        case 2:  return kvq_f32_to_f16(uniform(0, 9) ? 0.25f : -0.0f);   // constant groups, both zeros
        case 3:  return (uint16_t) (rng() & 0x83ff);                     // denormals
        default: return kvq_f32_to_f16(normal() * (uniform(0, 50) ? 1.0f : 3000.0f));
    }
}

static int check_blocks(kvq_cuda_device & d, const char * opts, int D) {
    const int n_head = 2, n_pages = 3;
    const kvq_layer_plan plan = make_plan("zipcache", opts, n_head, D);
    int n = 0;
    for (int v = 0; v < 2; v++) {
        kvq_lane_layout l = kvq_make_lane_layout(plan, v, n_head, 256 * n_pages, 1);
        for (int kind = 0; kind < 5; kind++) {
            std::vector<uint16_t> tile(l.nb_frame / 2);
            std::vector<uint8_t>  codes(l.nb_codes * n_head, 0xa5), params(l.nb_params * n_head, 0), valid(32);
            for (auto & x : tile)  { x = value_of(kind); }
            for (auto & x : valid) { x = (uint8_t) rng(); }
            for (int h = 0; h < n_head; h++) { // a set of the right size, once in a while another
                uint8_t * set = &params[h * l.nb_params];
                for (int i = 0; i < l.codec.n_hi + (kind == 4); ) {
                    const int t = uniform(0, l.page_cells - 1);
                    if (i == l.page_cells) { break; }
                    i += !(set[t / 8] >> t % 8 & 1);
                    set[t / 8] |= (uint8_t) (1 << t % 8);
                }
            }
            device_bytes tt(d, l.nb_frame, tile.data()), tc(d, codes.size(), codes.data()), tp(d, params.size(), params.data());
            const uint8_t * bits = kind == 2 ? nullptr : valid.data();
            const kvq_page_block host = { tile.data(), bits, nullptr, codes.data(), params.data() }, there = { (uint16_t *) tt.p, bits, nullptr, tc.p, tp.p };
            kvq_cpu_device().encode(l, &host, 1, 1);
            d.encode(l, &there, 1, 1);
            const std::vector<uint8_t> c = tc.get<uint8_t>(), p = tp.get<uint8_t>();
            for (size_t i = 0; i < params.size(); i++) { CHECK(p[i] == params[i], "%s D %d %s kind %d: parameter byte %zu of %zu is %02x, not %02x", opts, D, v ? "V" : "K", kind, i, l.nb_params, p[i], params[i]); }
            for (size_t i = 0; i < codes.size(); i++)  { CHECK(c[i] == codes[i],  "%s D %d %s kind %d: code byte %zu of %zu is %02x, not %02x", opts, D, v ? "V" : "K", kind, i, l.nb_codes, c[i], codes[i]); }
            if (kind != 1) {
                kvq_cpu_device().decode(l, host);
                d.decode(l, there);
                CHECK(tt.get<uint16_t>() == tile, "%s D %d %s kind %d: decoded tile differs", opts, D, v ? "V" : "K", kind);
            }
            n++;
        }
    }
    CHECK(d.error().empty(), "%s", d.error().c_str());
    return n;
}

// ---------------------------------------------------------------- one layer, on either device

struct layer {
    kvq_device & d;
    kvq_layer_plan plan;
    kvq_scratch    scratch;
    kvq_counters   counters;
    kvq_span_table spans;
    kvq_saliency   saliency;
    kvq_slots      slots;
    bool evicts;
    std::unique_ptr<kvq_lane> lane[2];

    layer(kvq_device & d, const char * method, const char * opts, int n_head, int D, int n_cells, int n_stream) : d(d), plan(make_plan(method, opts, n_head, D)), scratch(d), evicts(plan.keep > 0.0f) {
        for (int v = 0; v < 2; v++) {
            const kvq_lane_layout l = kvq_make_lane_layout(plan, v, n_head, n_cells, n_stream);
            if (!v) { spans.init(n_stream, l.n_pages + (evicts ? l.n_store : 0), l.page_cells); }
            lane[v].reset(new kvq_lane(l, v, nullptr, &spans, &scratch, &counters, d));
            CHECK(lane[v]->ok(), "out of memory");
        }
        saliency.init(lane[0]->layout(), plan.probe, plan.normalise, 0, evicts && !plan.k.codec.n_hi ? KVQ_PROMPT_ROWS : 1, &d);
        if (evicts) { slots.init(*lane[0], *lane[1], spans, saliency, plan.keep, plan.recent); }
        for (auto & x : lane) {
            x->set_saliency(&saliency);
            if (evicts) { x->set_slots(&slots); }
        }
    }
    void commit() { for (auto & x : lane) { x->commit(1); } }
};

struct two_layers {
    layer host, there;
    layer * both[2] = { &host, &there };
    int W, n_cells;
    two_layers(kvq_cuda_device & d, const char * method, const char * opts, int n_head, int D, int n_cells, int n_stream)
        : host(kvq_cpu_device(), method, opts, n_head, D, n_cells, n_stream), there(d, method, opts, n_head, D, n_cells, n_stream), W(n_head * D), n_cells(n_cells) {}

    void write(kvq_cuda_device & d, const std::vector<int64_t> & idx) {
        for (int v = 0; v < 2; v++) {
            std::vector<float> x(idx.size() * (size_t) W);
            for (auto & y : x) { y = normal(); }
            device_bytes up(d, x.size() * 4, x.data());
            host .lane[v]->write((int64_t) idx.size(), idx.data(), x.data(), W, 1);
            there.lane[v]->write((int64_t) idx.size(), idx.data(), (const float *) up.p, W, 1);
            d.synchronize();
        }
    }
    // the same sums for both: what attention would have left, of open pages
    void score(int stream) {
        const kvq_lane_layout & l = host.lane[0]->layout();
        for (int p = 0; p < l.n_pages; p++) {
            if (host.lane[0]->state(stream, p) != KVQ_PAGE_OPEN || !uniform(0, 2)) { continue; }
            std::vector<float>   sums((size_t) l.n_head * l.page_cells);
            std::vector<int32_t> seen((size_t) l.page_cells);
            for (auto & x : sums) { x = uniform(0, 3) ? expf(2.0f * normal()) : 0.5f; } // ties
            for (auto & x : seen) { x = uniform(0, 30); }
            for (layer * x : both) { x->saliency.add(stream, p, sums.data(), seen.data()); }
        }
    }
    int compare(const char * what, int stream, int cell, int n) {
        std::vector<uint16_t> rows[2];
        for (int v = 0; v < 2; v++) {
            for (int w = 0; w < 2; w++) {
                rows[w].assign((size_t) n * W, 0);
                both[w]->lane[v]->read(stream, cell, n, rows[w].data());
            }
            for (size_t i = 0; i < rows[0].size(); i++) {
                CHECK(rows[0][i] == rows[1][i], "%s: %s of stream %d cell %d channel %d is %04x, not %04x", what, v ? "V" : "K", stream, cell + (int) i / W, (int) i % W, rows[1][i], rows[0][i]);
            }
        }
        return 2 * n;
    }
};

static int check_store(kvq_cuda_device & d, const char * method, const char * opts, int n_steps) {
    const int n_cells = 640, n_stream = 2;
    two_layers w(d, method, opts, 2, 64, n_cells, n_stream);
    const int page = w.host.lane[0]->layout().page_cells;
    int cursor[2] = {}, n_compared = 0;
    for (int step = 0; step < n_steps; step++) {
        const int op = uniform(0, 99), stream = uniform(0, n_stream - 1);
        char what[96];
        snprintf(what, sizeof(what), "%s %s, step %d", method, opts, step);
        if (op < 70) { // rows of one ubatch: at the end of the sequence, or anywhere
            const int n = uniform(0, 3) ? uniform(1, 3) : uniform(1, 200), first = uniform(0, n_cells - 1);
            std::vector<int64_t> idx((size_t) n);
            for (int i = 0; i < n; i++) {
                const int cell = op < 64 ? cursor[stream]++ % n_cells : (first + 7*i) % n_cells;
                idx[(size_t) i] = (int64_t) stream * n_cells + cell;
            }
            w.write(d, idx);
            w.score(stream);
            for (layer * x : w.both) { x->commit(); }
        } else if (op < 85) {
            const int cell = uniform(0, n_cells - 1);
            n_compared += w.compare(what, stream, cell, uniform(1, n_cells - cell));
        } else if (op < 90) { // saved and restored elsewhere
            const int cell = uniform(0, n_cells / page - 2) * page, to = uniform(0, n_cells / page - 2) * page, n = uniform(1, 2 * page);
            for (int v = 0; v < 2; v++) {
                std::vector<uint16_t> image((size_t) n * w.W);
                w.host.lane[v]->read(stream, cell, n, image.data());
                for (layer * x : w.both) { x->lane[v]->restore(stream, to, n, image.data(), 1); }
            }
        } else if (op < 95) { // context shift: keys change in place
            const int first = uniform(0, n_cells - 1);
            for (layer * x : w.both) {
                x->lane[0]->edit(stream, [&](int cell) { return cell >= first; }, [&](int cell, int, uint16_t * row) { if (cell >= first) { std::swap(row[0], row[1]); } });
            }
        } else if (op < 99) {
            for (layer * x : w.both) {
                for (auto & lane : x->lane) { lane->copy_stream(stream, 1 - stream); }
                x->commit();
            }
            cursor[1 - stream] = cursor[stream];
        } else {
            for (layer * x : w.both) { for (auto & lane : x->lane) { lane->clear(); } }
        }
    }
    for (int s = 0; s < n_stream; s++) { n_compared += w.compare("at the end", s, 0, n_cells); }
    CHECK(d.error().empty(), "%s", d.error().c_str());
    CHECK(w.host.counters.n_sealed == w.there.counters.n_sealed && w.host.counters.n_sealed > 0, "pages sealed: %d, not %d", (int) w.there.counters.n_sealed, (int) w.host.counters.n_sealed);
    return n_compared;
}

// ---------------------------------------------------------------- attention and column sums

struct attention_case { const char * method, * opts; int D, heads, gqa, n_q, n_past, n_stream; float softcap, max_bias; bool sinks; int torn = 0; };

struct worst { double out = 0, sums = 0; };

// What a state that was restored in part may leave of page 0. 1: values have another set than keys, 2: both have one of a wrong size, 3: keys are open.
static void tear(kvq_cuda_device & d, layer & x, int stream, int n_cells, int how) {
    const kvq_lane_layout & l = x.lane[0]->layout();
    CHECK(x.lane[0]->state(stream, 0) == KVQ_PAGE_SEALED && x.lane[1]->state(stream, 0) == KVQ_PAGE_SEALED, "page 0 is open already");
    if (how == 3) {
        const int64_t cell = (int64_t) stream * n_cells + 5;
        const std::vector<float> row((size_t) l.n_head * l.codec.head_size, 0.5f);
        const device_bytes up(d, row.size() * 4, row.data());
        x.lane[0]->write(1, &cell, (const float *) up.p, (int64_t) row.size(), 1);
        CHECK(x.lane[0]->state(stream, 0) == KVQ_PAGE_OPEN, "page 0 is still sealed");
        return;
    }
    for (int v = how == 1; v < 2; v++) { for (int h = 0; h < l.n_head; h++) {
        uint8_t * there = (uint8_t *) x.lane[v]->params_at(stream, 0, 0) + (size_t) h * x.lane[v]->layout().nb_params;
        std::vector<uint8_t> set((size_t) l.page_cells / 8), other(set.size(), 0);
        d.get(set.data(), there, set.size());
        for (int t = 0; how == 1 && t < l.page_cells; t++) { // one slot further
            const int u = (t + 1) % l.page_cells;
            other[(size_t) u / 8] |= (uint8_t) ((set[(size_t) t / 8] >> t % 8 & 1) << u % 8);
        }
        d.put(there, other.data(), other.size());
    } }
}

// A prompt of n_past cells, then a call of n_q rows: attention over sealed and open pages, and what it leaves open cells.
static void check_attention(kvq_cuda_device & d, const attention_case & c, worst & top) {
    const int H = c.heads * c.gqa, D = c.D, W = c.heads * D, n_cells = c.n_past + c.n_q + 70, n_kv = n_cells - 7, n_mask = (n_cells + 63) / 64 * 64;
    two_layers w(d, c.method, c.opts, c.heads, D, n_cells, c.n_stream);
    layer & x = w.there;
    const kvq_lane_layout & l = x.lane[0]->layout();
    for (int s = 0; s < c.n_stream; s++) {
        for (int at = 0; at < c.n_past; at += 100) {
            std::vector<int64_t> idx;
            for (int i = at; i < std::min(at + 100, c.n_past); i++) { idx.push_back((int64_t) s * n_cells + i); }
            w.write(d, idx);
            w.score(s);
            for (layer * y : w.both) { y->commit(); }
        }
        std::vector<int64_t> idx;
        for (int i = 0; i < c.n_q; i++) { idx.push_back((int64_t) s * n_cells + c.n_past + i); }
        w.write(d, idx);
        w.compare(c.opts, s, 0, n_cells);
        if (c.torn) { tear(d, x, s, n_cells, c.torn); }
    }
    std::vector<float> q((size_t) c.n_stream * c.n_q * H * D), sinks((size_t) H), dst(q.size(), NAN);
    for (auto & y : q)     { y = 1.5f * normal(); }
    for (auto & y : sinks) { y = normal(); }
    std::vector<uint16_t> mask((size_t) c.n_stream * c.n_q * n_mask);
    for (int s = 0; s < c.n_stream; s++) { for (int i = 0; i < c.n_q; i++) { for (int t = 0; t < n_mask; t++) {
        const bool hidden = t > c.n_past + i || !uniform(0, 9);
        mask[((size_t) s * c.n_q + i) * n_mask + t] = hidden ? 0xfc00 : kvq_f32_to_f16(c.max_bias > 0 ? -(float) uniform(0, 20) : 0.0f);
    } } }
    device_bytes tq(d, q.size() * 4, q.data()), tm(d, mask.size() * 2, mask.data()), ts(d, sinks.size() * 4, sinks.data()), to(d, dst.size() * 4, dst.data());
    std::vector<kvq_attn> a((size_t) c.n_stream);
    float * lse = x.saliency.asks(c.n_q) ? d.lse_of((size_t) c.n_stream * c.n_q * H) : nullptr;
    const kvq_page * pages = x.spans.on(d);
    for (int s = 0; s < c.n_stream; s++) {
        kvq_attn & y = a[(size_t) s];
        y = kvq_attn{};
        y.k = l.codec; y.v = x.lane[1]->layout().codec;
        y.n_q = c.n_q; y.n_head = H; y.n_head_kv = c.heads; y.n_kv = n_kv;
        y.n_pages = std::min((n_kv + l.page_cells - 1) / l.page_cells, l.n_pages);
        y.scale = 1.0f / sqrtf((float) D); y.max_bias = c.max_bias; y.softcap = c.softcap;
        y.q = (const float *) tq.p + (size_t) s * c.n_q * H * D; y.q_stride_token = (int64_t) H * D; y.q_stride_head = D;
        y.mask = (const uint16_t *) tm.p + (size_t) s * c.n_q * n_mask; y.mask_stride_token = n_mask;
        y.sinks = c.sinks ? (const float *) ts.p : nullptr;
        y.dst = (float *) to.p + (size_t) s * c.n_q * H * D; y.dst_stride_token = (int64_t) H * D; y.dst_stride_head = D;
        y.pages = pages + (size_t) s * x.spans.n_pages;
        y.lse = lse ? lse + (size_t) s * c.n_q * H : nullptr;
        y.n_pages    = x.evicts ? x.spans.n_used() : y.n_pages;
        y.map_stride = x.evicts ? l.page_cells : 0;
    }
    const int64_t n_decode = d.n_decode;
    d.attend(a.data(), c.n_stream);
    d.get(dst.data(), to.p, dst.size() * 4);
    if (l.codec.type == KVQ_TYPE_MIXED) {
        const bool few = (D == 64 || D == 128) && c.gqa * c.n_q <= 32;
        CHECK((d.n_decode > n_decode) == few, "D %d, %d rows of a KV head: %s", D, c.gqa * c.n_q, few ? "the decode kernel was not used" : "the decode kernel was used");
    }
    CHECK(d.error().empty(), "%s", d.error().c_str());
    void * plain[2];
    double err = 0, norm = 0;
    for (int s = 0; s < c.n_stream; s++) {
        const auto close = [&](double want, double got, double & worst_of, const char * what) {
            const double e = fabs(got - want) / (0.05 + fabs(want));
            worst_of = std::max(worst_of, e);
            CHECK(e < 2e-2, "%s %s, D %d, %d x %d heads, %d rows: %s is %g, not %g", c.method, c.opts, D, c.heads, c.gqa, c.n_q, what, got, want);
        };
        std::vector<uint16_t> kv[2];
        for (int v = 0; v < 2; v++) { // decoded, not the image of a state
            kv[v].resize((size_t) n_cells * W);
            x.lane[v]->read(s, 0, n_cells, kv[v].data());
            if (x.evicts) { x.slots.read(v, s, 0, n_cells, kv[v].data(), false); }
            for (int p = 0; p < l.n_pages; p++) {
                kvq_lane & lane = *x.lane[v];
                if (lane.state(s, p) == KVQ_PAGE_SEALED) {
                    device_bytes t(d, l.nb_frame);
                    d.decode(lane.layout(), { (uint16_t *) t.p, nullptr, nullptr, lane.codes_at(s, p, 0), lane.params_at(s, p, 0) });
                    const std::vector<uint16_t> tile = t.get<uint16_t>();
                    for (int i = 0; i < l.page_cells * c.heads && p * l.page_cells + i % l.page_cells < n_cells; i++) {
                        const int h = i / l.page_cells, slot = i % l.page_cells;
                        memcpy(&kv[v][((size_t) p * l.page_cells + slot) * W + (size_t) h * D], &tile[(size_t) i * l.head_stride()], 2 * (size_t) D);
                    }
                }
            }
        }
        const auto is_there = [&](int t, int h) { // not evicted by the head
            const uint16_t * row = &kv[0][(size_t) t * W + (size_t) h * D];
            return !x.evicts || std::any_of(row, row + D, [](uint16_t y) { return y != KVQ_EVICTED; });
        };
        if (c.n_stream == 1 && !x.evicts) {
            CHECK(d.expand(a.data(), 1, &plain[0], &plain[1]), "out of memory");
            for (int v = 0; v < 2; v++) {
                std::vector<uint16_t> rows((size_t) n_kv * W);
                d.get(rows.data(), plain[v], rows.size() * 2);
                for (size_t i = 0; i < rows.size(); i++) {
                    const float got = kvq_f16_to_f32(rows[i]), want = kvq_f16_to_f32(kv[v][i]);
                    CHECK(fabsf(got - want) <= 2e-3f * fabsf(want) + 1e-3f, "expanded %s of cell %d channel %d is %g, not %g", v ? "V" : "K", (int) i / W, (int) i % W, got, want);
                }
            }
        }
        const uint64_t first = (uint64_t) c.n_past;
        std::vector<int32_t> probes;
        if (x.saliency.asks(c.n_q)) { probes = kvq_probe_rows(c.n_q, first, x.plan.probe, l.page_cells, 0); }
        std::vector<double> sums((size_t) c.heads * n_cells, 0.0);
        std::vector<int>    seen((size_t) n_cells, 0);
        int log2 = 1;
        while (2*log2 <= H) { log2 *= 2; }
        for (int i = 0; i < c.n_q; i++) { for (int h = 0; h < H; h++) {
            const bool probe = std::find(probes.begin(), probes.end(), i) != probes.end();
            if (!probe && (i + h) % 5) { continue; }
            const double slope = c.max_bias <= 0 ? 1.0 : h < log2 ? pow(pow(2.0, -c.max_bias / log2), h + 1) : pow(pow(2.0, -c.max_bias / 2 / log2), 2*(h - log2) + 1);
            std::vector<double> p((size_t) n_cells, 0.0), o((size_t) D, 0.0);
            double sum = c.sinks ? exp((double) sinks[(size_t) h]) : 0.0;
            for (int t = 0; t < n_kv; t++) {
                const uint16_t m = mask[((size_t) s * c.n_q + i) * n_mask + t];
                if (m == 0xfc00) { continue; }
                seen[(size_t) t] += probe && h == 0;
                if (!is_there(t, h / c.gqa)) { continue; }
                double y = 0;
                for (int e = 0; e < D; e++) { y += (double) q[(((size_t) s * c.n_q + i) * H + h) * D + e] * kvq_f16_to_f32(kv[0][(size_t) t * W + (size_t) (h / c.gqa) * D + e]); }
                y /= sqrt((double) D);
                if (c.softcap != 0) { y = c.softcap * tanh(y / c.softcap); }
                sum += p[(size_t) t] = exp(y + slope * kvq_f16_to_f32(m));
            }
            for (int t = 0; t < n_kv; t++) {
                p[(size_t) t] /= sum;
                if (probe) { sums[(size_t) (h / c.gqa) * n_cells + t] += p[(size_t) t]; }
                for (int e = 0; e < D; e++) { o[(size_t) e] += p[(size_t) t] * kvq_f16_to_f32(kv[1][(size_t) t * W + (size_t) (h / c.gqa) * D + e]); }
            }
            for (int e = 0; e < D; e++) {
                const double got = dst[(((size_t) s * c.n_q + i) * H + h) * D + e];
                CHECK(std::isfinite(got), "not finite at token %d head %d channel %d", i, h, e);
                err  += (got - o[(size_t) e]) * (got - o[(size_t) e]);
                norm += o[(size_t) e] * o[(size_t) e];
            }
        } }
        // twice: log-sum-exp as attention left it, then by its own pass over plain keys, on top of the first
        for (int p = 0; p < l.n_pages; p++) { x.saliency.drop(s, p); }
        for (int own = 0; own < (c.n_stream == 1 && !x.evicts ? 2 : 1); own++) {
            const int n = x.saliency.prepare(x.spans.spans.data() + (size_t) s * x.spans.n_pages, x.evicts ? x.spans.n_pages : a[(size_t) s].n_pages, s, c.n_q, first);
            CHECK(n == (int) probes.size(), "%d probe rows, not %d", n, (int) probes.size());
            if (!n) { continue; }
            if (own) { // nothing may be left of the first
                const std::vector<float> none((size_t) c.n_q * H, NAN);
                d.put((void *) a[(size_t) s].lse, none.data(), none.size() * 4);
            }
            d.observe(a[(size_t) s], x.saliency.table_of(s), n, x.saliency.max_pages(s), own ? plain[0] : nullptr);
            CHECK(d.error().empty(), "%s", d.error().c_str());
            x.saliency.fetch();
            for (int t = 0; t < n_kv; t++) {
                for (int h = 0; x.lane[0]->state(s, t / l.page_cells) == KVQ_PAGE_OPEN && h < c.heads; h++) {
                    const double sum = sums[(size_t) h * n_cells + t];
                    close(x.plan.normalise ? sum / std::max(seen[(size_t) t], 1) : sum * (own + 1), x.saliency.score(s, t / l.page_cells, h, t % l.page_cells), top.sums,
                          own ? "a column sum of its own pass" : "a column sum");
                }
            }
        }
    }
    const double rel = sqrt(err / std::max(norm, 1e-30));
    top.out = std::max(top.out, rel);
    // decode multiplies by parameters in f16: what they are off by is the same for all cells that share them
    CHECK(rel < (c.gqa * c.n_q <= 32 ? 4e-3 : 2e-3), "%s %s, D %d, %d x %d heads, %d rows: relative error %.3g", c.method, c.opts, D, c.heads, c.gqa, c.n_q, rel);
}

// ---------------------------------------------------------------- timing

static double microseconds(kvq_cuda_device & d, int n, const std::function<void()> & f) {
    std::vector<double> t;
    for (int r = 0; r < 7; r++) {
        d.synchronize();
        const auto a = std::chrono::steady_clock::now();
        for (int i = 0; i < n; i++) { f(); }
        d.synchronize();
        t.push_back(1e6 * std::chrono::duration<double>(std::chrono::steady_clock::now() - a).count() / n);
    }
    std::sort(t.begin(), t.end());
    return t[t.size() / 2];
}

// A layer whose pages all hold the same block; every KV head of a method that evicts keeps its own cells.
struct bench_layer {
    kvq_layer_plan plan;
    kvq_lane_layout l[2];
    std::unique_ptr<device_bytes> codes[2], params[2], pages, maps;
    int n_pages;

    bench_layer(kvq_cuda_device & d, const char * method, const char * opts, int n_cells) : plan(make_plan(method, opts, 8, 128)) {
        std::vector<kvq_page> list;
        for (int v = 0; v < 2; v++) {
            l[v] = kvq_make_lane_layout(plan, v, 8, n_cells, 1);
            std::vector<uint16_t> tile(l[v].nb_frame / 2);
            for (auto & x : tile) { x = kvq_f32_to_f16(normal()); }
            std::vector<uint8_t> c(l[v].nb_codes * 8), p(l[v].nb_params * 8, 0);
            for (int h = 0; h < 8; h++) { for (int n = 0; n < l[v].codec.n_hi; ) {
                const int t = uniform(0, l[v].page_cells - 1);
                uint8_t & byte = p[h * l[v].nb_params + (size_t) t / 8];
                n += !(byte >> t % 8 & 1);
                byte |= (uint8_t) (1 << t % 8);
            } }
            const kvq_page_block b = { tile.data(), nullptr, nullptr, c.data(), p.data() };
            kvq_cpu_device().encode(l[v], &b, 1, 1);
            std::vector<uint8_t> all_c, all_p;
            for (int i = 0; i < l[v].n_store; i++) {
                all_c.insert(all_c.end(), c.begin(), c.end());
                all_p.insert(all_p.end(), p.begin(), p.end());
            }
            codes [v].reset(new device_bytes(d, all_c.size(), all_c.data()));
            params[v].reset(new device_bytes(d, all_p.size(), all_p.data()));
        }
        n_pages = l[0].n_store;
        const bool evicts = plan.keep > 0.0f;
        const int page = l[0].page_cells;
        std::vector<int32_t> m;
        for (int i = 0; evicts && i < n_pages; i++) { for (int h = 0; h < 8; h++) { for (int t = 0; t < page; t++) {
            m.push_back((int32_t) ((int64_t) (i * page + t) * n_cells / (n_pages * page)) + uniform(0, 1));
        } } }
        maps.reset(new device_bytes(d, m.size() * 4, m.data()));
        for (int i = 0; i < n_pages; i++) {
            kvq_page p = {};
            p.k_codes  = (uint8_t *) codes [0]->p + i * 8 * l[0].nb_codes;  p.v_codes  = (uint8_t *) codes [1]->p + i * 8 * l[1].nb_codes;
            p.k_params = (uint8_t *) params[0]->p + i * 8 * l[0].nb_params; p.v_params = (uint8_t *) params[1]->p + i * 8 * l[1].nb_params;
            p.cell     = i * page;
            p.n_slots  = page;
            p.map      = evicts ? (const int32_t *) maps->p + (size_t) i * 8 * page : nullptr;
            list.push_back(p);
        }
        pages.reset(new device_bytes(d, list.size() * sizeof(kvq_page), list.data()));
    }
    double bytes() const { return (double) (codes[0]->nb + codes[1]->nb + params[0]->nb + params[1]->nb); }
    kvq_attn attn(int n_q, int n_cells, const device_bytes & q, const device_bytes & mask, const device_bytes & out) const {
        kvq_attn a = {};
        a.k = l[0].codec; a.v = l[1].codec; a.n_q = n_q; a.n_head = 32; a.n_head_kv = 8; a.n_kv = n_cells; a.n_pages = n_pages; a.scale = 0.088f;
        a.q = (const float *) q.p;           a.q_stride_token    = 32 * 128; a.q_stride_head = 128;
        a.mask = (const uint16_t *) mask.p;  a.mask_stride_token = n_cells;
        a.dst = (float *) out.p;             a.dst_stride_token  = 32 * 128; a.dst_stride_head = 128;
        a.pages = (const kvq_page *) pages->p;
        a.map_stride = maps->nb ? l[0].page_cells : 0;
        return a;
    }
};

// decode: one token alone
static void bench(kvq_cuda_device & d, bool decode) {
    const int N = 32768;
    std::vector<float> hq((size_t) 512 * 4096);
    for (auto & x : hq) { x = normal(); }
    device_bytes q(d, hq.size() * 4, hq.data()), o(d, hq.size() * 4), mask(d, (size_t) 512 * N * 2 + 4 * N * 2);
    double bandwidth;
    {
        const size_t nb = (size_t) 1 << 30;
        device_bytes x(d, nb), y(d, nb);
        bandwidth = 2e-6 * (double) nb / microseconds(d, 5, [&] { d.copy(y.p, x.p, nb); }); // bytes read and written, TB/s
    }
    printf("copy bandwidth %.2f TB/s\n%-44s %8s %5s %10s %10s %10s %10s\n", bandwidth, "one layer, 8 KV heads x 128", "cells", "n_q", "us", "MB", "floor us", "us a MB");
    struct { const char * method, * opts; } arms[] = { { "kivi", "bits=2,group=128" }, { "kivi", "bits=2,group=16" }, { "kivi", "bits=2,group=16,scales=u8" }, { "minikv", "" }, { "minikv", "group=32" }, { "kivi", "bits=4,group=128" }, { "zipcache", "" } };
    for (const auto & arm : arms) {
        for (int cells : { N, 4*N }) {
            std::vector<std::unique_ptr<bench_layer>> ws; // several, so that L2 does not hold the cache
            for (int i = 0; i < (cells > N ? 2 : 4); i++) { ws.emplace_back(new bench_layer(d, arm.method, arm.opts, cells)); }
            size_t i = 0;
            for (int n_q : { 1, 512 }) {
                if (n_q > 1 && (cells > N || decode)) { continue; }
                const double us = microseconds(d, n_q > 1 ? 3 : 20, [&] {
                    const kvq_attn a = ws[i++ % ws.size()]->attn(n_q, cells, q, mask, o);
                    d.attend(&a, 1);
                });
                const double mb = ws[0]->bytes() / 1e6;
                printf("%-44s %8d %5d %10.1f %10.1f %10.1f %10.3f\n", (std::string("attention, ") + arm.method + " " + arm.opts).c_str(), cells, n_q, us, mb, mb / bandwidth, us / mb);
            }
            if (cells > N || decode || ws[0]->plan.keep > 0.0f) { continue; }
            void * k, * v;
            const double us = microseconds(d, 10, [&] {
                const kvq_attn a = ws[i++ % ws.size()]->attn(512, cells, q, mask, o);
                CHECK(d.expand(&a, 1, &k, &v), "out of memory");
            });
            printf("%-44s %8d %5d %10.1f\n", (std::string("as plain rows, ") + arm.method + " " + arm.opts).c_str(), cells, 512, us);
        }
    }
    // what observation adds to a call of 512 rows
    if (decode) { return; }
    for (const auto & arm : { std::make_pair("zipcache", ""), std::make_pair("minikv", "") }) {
        const bench_layer w(d, arm.first, arm.second, N);
        two_layers x(d, arm.first, arm.second, 8, 128, 1024, 1);
        std::vector<int64_t> idx;
        for (int i = 0; i < 512; i++) { idx.push_back(i); }
        x.write(d, idx);
        const bool own = x.there.plan.keep == 0.0f;
        kvq_attn a = w.attn(512, N, q, mask, o);
        a.lse = d.lse_of(512 * 32);
        const int n = x.there.saliency.prepare(x.there.spans.spans.data(), x.there.spans.n_pages, 0, 512, 0);
        void * k = nullptr, * v;
        CHECK(!own || d.expand(&a, 1, &k, &v), "out of memory");
        const double us = microseconds(d, 10, [&] { d.observe(a, x.there.saliency.table_of(0), n, x.there.saliency.max_pages(0), k); });
        printf("%-44s %8d %5d %10.1f\n", (std::string("column sums of ") + std::to_string(n) + " probes" + (own ? " and log-sum-exp" : "")).c_str(), N, 512, us);
    }
    CHECK(d.error().empty(), "%s", d.error().c_str());
}

int main(int argc, char ** argv) {
    kvq_cuda_device d(0);
    CHECK(d.error().empty(), "%s", d.error().c_str());
    rng.seed(1);
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        bench(d, argc > 2 && !strcmp(argv[2], "decode"));
        return 0;
    }
    const bool decode = argc > 1 && !strcmp(argv[1], "decode"), on_host = argc > 1 && !strcmp(argv[1], "host"), quick = on_host || (argc > 1 && !strcmp(argv[1], "quick"));
    int n = 0;
    worst top;
    const auto attention = [&](attention_case c) { check_attention(d, c, top); n++; };
    // decode over pages of two widths: whole and half steps, one part alone, sets that differ
    attention({ "zipcache", "", 128, 1, 4, 1, 400, 1, 0, 0, false });
    attention({ "zipcache", "scales=u8", 64, 2, 3, 1, 400, 2, 0, 8.0f, true });
    attention({ "zipcache", "interval=96,salient=0.33,hi=3,lo=1,scales=f16,window=40", 64, 1, 16, 2, 300, 1, 20.0f, 0, false });
    for (int torn : { 1, 2, 3 }) { attention({ "zipcache", "", 64, 2, 4, 1, 350, 1, 0, 0, false, torn }); }
    if (!quick) {
        const char * formats[] = { "", "scales=u8", "scales=f16", "interval=32,salient=0", "interval=32,salient=1", "interval=64,salient=0.5", "interval=64,salient=1,hi=1", "interval=128,salient=0,lo=4",
                                   "interval=256,salient=0.25,hi=4,lo=1", "interval=96,salient=0.33,hi=3,lo=1,window=100", "interval=224,salient=0.42,hi=2,lo=3,scales=f16", "interval=160,salient=0.2,hi=3,lo=2,scales=u8",
                                   "keep=0.5", "keep=0.6,interval=64,salient=0.5,hi=3,lo=1" };
        for (int D : { 64, 128 }) { for (const char * opts : formats) { for (int gqa : { 1, 2, 3, 4, 5, 7, 8, 12, 16 }) {
            const int n_q = gqa % 3 ? 1 : 2;
            attention({ "zipcache", opts, D, 2, gqa, n_q, 600 + 37 * gqa, 1 + gqa % 3, gqa == 5 ? 20.0f : 0.0f, gqa == 7 ? 8.0f : 0.0f, gqa % 2 == 0 });
        } }
            for (int torn : { 1, 2, 3 }) { for (const char * opts : { "", "scales=f16", "interval=96,salient=0.33,hi=3,lo=1" }) { attention({ "zipcache", opts, D, 2, 4, 1 + torn % 2, 700, torn, 0, 0, false, torn }); } }
            for (int n_past : { 3, 40, 159, 160, 161, 5000 }) { attention({ "zipcache", "", D, 8, 4, 1, std::max(n_past, 1), 1, 0, 0, false }); } // one block, many
            attention({ "zipcache", "", D, 1, 1, 32, 500, 1, 0, 0, false });
            for (const char * opts : { "", "scales=f16,window=32", "group=32,bits=4,window=64", "bits=3,window=0" }) { for (int gqa : { 1, 4, 8 }) { // cells by way of maps
                attention({ "minikv", opts, D, 2, gqa, gqa == 1 ? 2 : 1, 900 + 50 * gqa, 1 + gqa % 3, 0, 0, gqa == 4 });
            } }
        }
    }
    printf("decode: %d cases, worst relative error %.2g\n", n, top.out);
    if (decode) {
        return 0;
    }
    n = 0;
    for (const char * opts : { "", "interval=64,salient=0.5,scales=f16", "interval=32,salient=1,hi=3,scales=u8", "interval=256,salient=0.25,hi=4,lo=1,eta=0.1", "interval=96,salient=0,lo=3" }) {
        for (int D : { 64, 80, 128, 256 }) {
            if (!quick || D == 80) { n += check_blocks(d, opts, D); }
        }
    }
    printf("mixed pages: %d identical to the C reference\n", n);
    for (const char * opts : { "", "hh=0.1,rw=0.1,window=64", "scales=f16,group=32,sinks=4,window=0" }) {
        const int steps = on_host ? 25 : quick ? 40 : 1000, n_rows = check_store(d, "minikv", opts, steps);
        printf("store, minikv %s: %d random operations, %d rows as on the CPU\n", opts, steps, n_rows);
    }
    for (const char * opts : { "interval=64,salient=0.5,keep=0.5,eta=0.1", "interval=32,salient=0.5", "interval=64,salient=0.5,normalise=false,window=64", "interval=96,salient=0.33,scales=f16,sinks=4", "interval=32,salient=1,hi=2" }) {
        const int steps = on_host ? 25 : quick ? 40 : 1000, n_rows = check_store(d, "zipcache", opts, steps);
        printf("store, zipcache %s: %d random operations, %d rows as on the CPU\n", opts, steps, n_rows);
    }
    n = 0;
    attention({ "zipcache", "interval=32,salient=0.5,probe=0.5", 80, 2, 2, 3, 200, 2, 0, 0, false });
    attention({ "zipcache", "interval=64,salient=0.5,normalise=false,window=64", 64, 1, 4, 40, 300, 1, 0, 0, true });
    attention({ "minikv", "window=32", 64, 2, 4, 1, 400, 2, 0, 0, false });
    attention({ "minikv", "window=64", 128, 1, 2, 40, 300, 1, 0, 0, true });
    attention({ "zipcache", "interval=32,salient=1,keep=0.5", 80, 2, 2, 3, 300, 1, 0, 0, false });
    if (!quick) {
        for (int D : { 64, 80, 128 }) { for (int gqa : { 1, 4, 5 }) { for (int n_q : { 1, 2, 33, 200 }) {
            attention({ "minikv", "", D, 2, gqa, n_q, 900, 1, 0, 0, n_q == 2 });
            attention({ "minikv", "bits=3,group=32,window=64,hh=0.1,rw=0.1", D, 2, gqa, n_q, 700, 2, 20.0f, n_q == 33 ? 8.0f : 0.0f, false });
            attention({ "zipcache", "interval=64,salient=0.5,keep=0.5,normalise=false", D, 2, gqa, n_q, 500, 1, 0, 0, true });
        } } }
        attention({ "minikv", "", 128, 8, 4, 1, 4000, 1, 0, 0, false });
        for (int D : { 64, 80, 96, 128, 192, 256 }) { for (int gqa : { 1, 4, 5 }) {
            attention({ "zipcache", "", D, 2, gqa, 100, 700, 1, 0, 0, false });
            attention({ "zipcache", "interval=96,salient=0.33,hi=3,lo=1,window=100,normalise=false", D, 2, gqa, 33, 500, 1, 20.0f, 0, true });
            attention({ "zipcache", "interval=32,salient=0.5,probe=1,scales=f16", D, 1, gqa, 5, 300, 3, 0, 8.0f, false });
        } }
        attention({ "zipcache", "", 128, 8, 4, 512, 2000, 1, 0, 0, false });
    }
    printf("attention: %d cases, worst relative error %.2g, of a column sum %.2g\n", n, top.out, top.sums);
    return 0;
}

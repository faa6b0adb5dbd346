// One layer on the CPU and on another device: random operations on both, whose rows must stay the same.
#pragma once

#include "device_bytes.h"
#include "layer.h"

#include "base/f16.h"

#include <cmath>
#include <functional>
#include <random>
#include <string>

static inline float normal() { return std::normal_distribution<float>()(rng); }

static inline kvq_layer_plan make_plan(const char * method, const char * opts, int n_head, int D, int ordinal = 0) {
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

// ---------------------------------------------------------------- one layer, on either device

struct layer : composed_layer {
    cache_of_layers cache;
    kvq_counters & counters = cache.counters;

    layer(kvq_device & d, const char * method, const char * opts, int n_head, int D, int n_cells, int n_stream) :
        cache(d) {
        const kvq_layer_plan its_plan = make_plan(method, opts, n_head, D);
        for (int v = 0; v < 2; v++) {
            cache.bytes_far += kvq_make_lane_layout(its_plan, v, n_head, n_cells, n_stream).bytes_far;
        }
        make(cache, its_plan, n_head, n_cells, n_stream);
    }
    ~layer() { policies.clear(); }
    bool evicts() const { return slots; }
    bool normalises() const { return plan.part("probe")->get("normalise") > 0; }
    float share() const { return (float) plan.part("probe")->get("share"); }
    void commit() {
        for (auto & x : lane) { x->commit(1); }
    }
};

// A layer of this method on the CPU and on d.
struct two_layers {
    layer host, there;
    layer * both[2] = { &host, &there };
    int W, n_cells;
    two_layers(kvq_device & d, const char * method, const char * opts, int n_head, int D, int n_cells, int n_stream) :
        host(kvq_cpu_device(), method, opts, n_head, D, n_cells, n_stream),
        there(d, method, opts, n_head, D, n_cells, n_stream),
        W(n_head * D),
        n_cells(n_cells) {}

    void write(kvq_device & d, const std::vector<int64_t> & idx) {
        for (int v = 0; v < 2; v++) {
            std::vector<float> x(idx.size() * (size_t) W);
            for (auto & y : x) { y = normal(); }
            device_bytes up(d, x.size() * 4, x.data());
            host.lane[v]->write((int64_t) idx.size(), idx.data(), x.data(), W, 1);
            there.lane[v]->write((int64_t) idx.size(), idx.data(), (const float *) up.p, W, 1);
        }
    }
    // the same sums for both: what attention would have left, of open pages
    void score(int stream) {
        if (!host.probe) { return; }
        const kvq_lane_layout & l = host.lane[0]->layout();
        for (int p = 0; p < l.n_pages; p++) {
            if (host.lane[0]->state(stream, p) != KVQ_PAGE_OPEN || !uniform(0, 2)) { continue; }
            std::vector<float> sums((size_t) l.n_head * l.page_cells);
            std::vector<int32_t> seen((size_t) l.page_cells);
            for (auto & x : sums) { x = uniform(0, 3) ? expf(2.0f * normal()) : 0.5f; } // ties
            for (auto & x : seen) { x = uniform(0, 30); }
            for (layer * x : both) { x->probe->add(stream, p, sums.data(), seen.data()); }
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
                CHECK(rows[0][i] == rows[1][i], "%s: %s of stream %d cell %d channel %d is %04x, not %04x", what,
                    v ? "V" : "K", stream, cell + (int) i / W, (int) i % W, rows[1][i], rows[0][i]);
            }
        }
        return 2 * n;
    }
};

// ---------------------------------------------------------------- stores

// Returns rows that were compared. each: behind every step
static inline int check_store(
    kvq_device & d, const char * method, const char * opts, int n_steps,
    const std::function<void(two_layers &, int stream)> & each = [](two_layers &, int) {}) {
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
                const int cell = op < 64 ? cursor[stream]++ % n_cells : (first + 7 * i) % n_cells;
                idx[(size_t) i] = (int64_t) stream * n_cells + cell;
            }
            w.write(d, idx);
            w.score(stream);
            const int limit = uniform(0, 9) ? n_cells : uniform(page, n_cells);
            for (layer * x : w.both) {
                if (x->evicts()) { x->slots->limit(stream, limit); }
            }
            for (layer * x : w.both) { x->commit(); }
        } else if (op < 85) {
            const int cell = uniform(0, n_cells - 1);
            n_compared += w.compare(what, stream, cell, uniform(1, n_cells - cell));
        } else if (op < 90) { // saved and restored elsewhere
            const int cell = uniform(0, n_cells / page - 2) * page, to = uniform(0, n_cells / page - 2) * page,
                      n = uniform(1, std::min(12 * page, n_cells - std::max(cell, to)));
            for (int v = 0; v < 2; v++) {
                std::vector<uint16_t> image((size_t) n * w.W);
                w.host.lane[v]->read(stream, cell, n, image.data());
                for (layer * x : w.both) { x->lane[v]->restore(stream, to, n, image.data(), 1); }
            }
        } else if (op < 95) { // context shift: keys change in place
            const int first = uniform(0, n_cells - 1);
            for (layer * x : w.both) {
                x->lane[0]->edit(
                    stream, [&](int cell) { return cell >= first; },
                    [&](int cell, int, uint16_t * row) {
                        if (cell >= first) { std::swap(row[0], row[1]); }
                    });
            }
        } else if (op < 99) {
            for (layer * x : w.both) {
                for (auto & lane : x->lane) { lane->copy_stream(stream, 1 - stream); }
                x->commit();
            }
            cursor[1 - stream] = cursor[stream];
        } else {
            for (layer * x : w.both) {
                for (auto & lane : x->lane) { lane->clear(); }
            }
        }
        each(w, stream);
    }
    for (int s = 0; s < n_stream; s++) { n_compared += w.compare("at the end", s, 0, n_cells); }
    CHECK(w.host.counters.n_sealed == w.there.counters.n_sealed && w.host.counters.n_sealed > 0,
        "pages sealed: %d, not %d", (int) w.there.counters.n_sealed, (int) w.host.counters.n_sealed);
    return n_compared;
}

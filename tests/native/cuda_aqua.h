// Part of test_cuda.cpp: aqua. Predicted layers (policy/chain.h) on the device: the same random operations on a stack
// of layers there and on the CPU leave the same bytes, whatever is read in between, and attention agrees.
#pragma once

#include "layer.h"

template <int HEADS, int D> struct chain_stack {
    static constexpr int LAYERS = 3, W = HEADS * D, CELLS = 224, STREAMS = 2;
    kvq_device & d;
    cache_of_layers cache;
    kvq_counters & counters = cache.counters;
    kvq_layer_calibration data[LAYERS];
    composed_layer layer[LAYERS];
    kvq_chain * chain = nullptr;
    kvq_lane * lane[LAYERS][2];

    chain_stack(kvq_device & d, const char * opts, const std::vector<kvq_chain_weights> & w,
        const float * const (&mean)[LAYERS][2], kvq_rotor * rotor) :
        d(d), cache(d) {
        const kvq_layer_shape shape = { 0, HEADS, D, D };
        for (int i = 0; i < LAYERS; i++) {
            const kvq_layer_plan plan = plan_of("aqua", opts, { i, LAYERS, shape, i ? &shape : nullptr });
            CHECK(!kvq_cuda_device::refuse(plan.flags, plan.k, plan.v, false), "refused");
            data[i].w = w[(size_t) i];
            layer[i].make(cache, plan, HEADS, CELLS, STREAMS, i, i ? &layer[i - 1] : nullptr, &data[i]);
            for (int v = 0; v < 2; v++) {
                lane[i][v] = layer[i].lane[v].get();
                layer[i].transforms[v]->mean = mean[i][v];
            }
            layer[i].transforms[0]->rotor = rotor;
        }
        chain = cache.chain();
    }
    void commit() {
        for (auto & l : lane) {
            l[0]->commit(1);
            l[1]->commit(1);
        }
    }
    void shift(int s, int first, int by) {
        std::vector<int32_t> cells(CELLS, 0);
        std::fill(cells.begin() + first, cells.end(), by);
        for (auto & l : layer) {
            l.transforms[0]->shift_open(
                *l.lane[0], s, cells.data(), [](int, int, uint16_t * row) { std::swap(row[0], row[1]); });
        }
        layer[0].transforms[0]->rotor->cover(1 << 12);
        kvq_positions & p = *cache.positions();
        p.shift(s, cells.data(), CELLS, p.n_shifts + 1);
        p.n_shifts++;
    }
    kvq_attn attention(int l, int s, int n_kv) {
        kvq_attn a = {};
        a.k = lane[l][0]->layout().codec;
        a.v = lane[l][1]->layout().codec;
        a.n_head_kv = HEADS;
        a.n_kv = n_kv;
        a.n_pages = (n_kv + 31) / 32;
        a.scale = 0.1f;
        a.pages = layer[l].spans.on(d) + (size_t) s * layer[l].spans.n_pages;
        a.k_mean = layer[l].transforms[0]->mean;
        a.v_mean = layer[l].transforms[1]->mean;
        a.rotary = &layer[l].transforms[0]->rotor->view();
        a.positions = cache.positions()->now_there(s);
        return a;
    }
};

// Queries of layer l on both; recorded: as a recorded step runs, whose layers follow each other.
template <int HEADS, int D>
static double check_chain_attention(kvq_cuda_device & d, chain_stack<HEADS, D> & host, chain_stack<HEADS, D> & there,
    int l, int s, int n_kv, int n_q, bool recorded) {
    constexpr int H = 2 * HEADS;
    std::vector<float> q((size_t) n_q * H * D), want(q.size()), got(q.size(), NAN);
    for (auto & x : q) { x = normal(); }
    device_bytes tq(d, 4 * q.size(), q.data()), to(d, 4 * q.size(), got.data());
    for (chain_stack<HEADS, D> * w : { &host, &there }) {
        kvq_attn a = w->attention(l, s, n_kv);
        const bool on = w == &there;
        a.n_q = n_q;
        a.n_head = H;
        a.q_stride_token = a.dst_stride_token = H * D;
        a.q_stride_head = a.dst_stride_head = D;
        a.q = on ? (const float *) tq.p : q.data();
        a.dst = on ? (float *) to.p : want.data();
        if (!on) { a.flags = KVQ_ATTN_F32; }
        if (!on || !recorded) { w->chain->layer_below(l, s, a.n_pages, 1); }
        kvq_chain_pages lanes[2];
        for (const bool v : { false, true }) {
            lanes[v] = w->chain->chains(v) ? w->chain->pages_of(l, v, s, 0, a.n_pages) : kvq_chain_pages();
        }
        kvq_device & device = on ? (kvq_device &) d : kvq_cpu_device();
        device.attend({ &a, 1, nullptr, nullptr, lanes, 1 });
        w->chain->layer_read(l, s, a.n_pages);
    }
    d.get(got.data(), to.p, 4 * got.size());
    double err = 0, norm = 0;
    for (size_t i = 0; i < got.size(); i++) {
        err += (double) (got[i] - want[i]) * (got[i] - want[i]);
        norm += (double) want[i] * want[i];
    }
    const double rel = sqrt(err / norm);
    CHECK(rel < 2e-3, "predicted layer %d, stream %d, %d cells, %d queries: relative error %.3g", l, s, n_kv, n_q, rel);
    return rel;
}

template <int HEADS, int D>
static int check_chain(kvq_cuda_device & d, const char * opts, int bits, bool values, int n_steps, double & worst) {
    using stack = chain_stack<HEADS, D>;
    constexpr int W = stack::W, CELLS = stack::CELLS, L = stack::LAYERS;
    static std::vector<std::vector<uint8_t>> packed; // stay: a device keeps copies of them by address
    std::vector<kvq_chain_weights> w(L);
    const auto predictor = [&] {
        std::vector<float> m((size_t) W * W);
        for (auto & x : m) { x = 0.6f * normal() / sqrtf(W); }
        packed.emplace_back(kvq_predictor_bytes(W, W, bits));
        kvq_predictor_pack(W, W, bits, m.data(), packed.back().data());
        kvq_predictor p;
        p.n_in = p.n_out = W;
        p.bits = bits;
        p.data = packed.back().data();
        return p;
    };
    const float * mean[L][2];
    for (int i = 0; i < L; i++) {
        if (i) { w[(size_t) i].k = predictor(); }
        if (i && values) {
            w[(size_t) i].v_from_k = predictor();
            w[(size_t) i].v_from_below = predictor();
        }
        for (auto & x : mean[i]) { x = some_means(W); }
    }
    kvq_rotor * rotor = some_rotor(D, uniform(0, 1));
    stack host(kvq_cpu_device(), opts, w, mean, rotor), there(d, opts, w, mean, rotor);
    stack * both[2] = { &host, &there };
    int cursor[2] = {}, n_compared = 0;
    const auto compare = [&](int step, int s) {
        for (int i = 0; i < L; i++) {
            for (int v = 0; v < 2; v++) {
                std::vector<uint16_t> rows[2];
                for (int k = 0; k < 2; k++) {
                    rows[k].resize((size_t) CELLS * W);
                    both[k]->lane[i][v]->read(s, 0, CELLS, rows[k].data());
                }
                for (size_t x = 0; x < rows[0].size(); x++) {
                    CHECK(rows[0][x] == rows[1][x],
                        "aqua %s, step %d: layer %d %s stream %d cell %d channel %d is %04x, not %04x", opts, step, i,
                        v ? "V" : "K", s, (int) x / W, (int) x % W, rows[1][x], rows[0][x]);
                }
                n_compared += CELLS;
            }
        }
    };
    for (int step = 0; step < n_steps; step++) {
        const int op = step < 3 ? 0 : uniform(0, 99), s = step < 3 ? 0 : uniform(0, 1);
        if (op < 70) { // rows of one ubatch, attention, sealing
            const int n = std::min(op < 60 ? (step < 3 ? 60 : uniform(1, 50)) : uniform(1, 8), CELLS),
                      first = op < 60 && cursor[s] + n <= CELLS ? cursor[s] : uniform(0, CELLS - n);
            cursor[s] = std::max(cursor[s], first + n);
            std::vector<int64_t> idx((size_t) n);
            std::vector<int32_t> pos((size_t) n);
            for (int i = 0; i < n; i++) {
                idx[(size_t) i] = (int64_t) s * CELLS + first + i;
                pos[(size_t) i] = first + i + step % 40;
            }
            const int reads = uniform(0, 3), n_q = uniform(0, 1) ? 1 : uniform(0, 1) ? 20 : 150; // few rows, many
            if (reads == 1) { there.chain->forget(); }
            for (int i = 0; i < L; i++) {
                for (int v = 0; v < 2; v++) {
                    std::vector<float> x((size_t) n * W);
                    for (size_t j = 0; j < x.size(); j++) { x[j] = normal() + mean[i][v][j % W]; }
                    device_bytes up(d, x.size() * 4, x.data());
                    host.lane[i][v]->write(n, idx.data(), x.data(), W, 1, v ? nullptr : pos.data());
                    there.lane[i][v]->write(n, idx.data(), (const float *) up.p, W, 1, v ? nullptr : pos.data());
                }
                if (reads == 1 || (reads == 2 && uniform(0, 1))) {
                    worst = std::max(worst, check_chain_attention(d, host, there, i, s, cursor[s], n_q, reads == 1));
                }
            }
            for (stack * x : both) { x->commit(); }
        } else if (op < 80) {
            compare(step, s);
        } else if (op < 87) { // all keys, then all values, as llama.cpp loads them
            const int page = uniform(0, CELLS / 32 - 3), to = uniform(0, CELLS / 32 - 3), n = uniform(1, 80);
            std::vector<uint16_t> image[2 * L]; // of all before any is loaded: layers share their positions
            for (int x = 0; x < 2 * L; x++) {
                image[x].resize((size_t) n * W);
                host.lane[x % L][x / L]->read(s, page * 32, n, image[x].data());
            }
            for (int x = 0; x < 2 * L; x++) {
                for (stack * c : both) { c->lane[x % L][x / L]->restore(s, to * 32, n, image[x].data(), 1); }
            }
            cursor[s] = std::max(cursor[s], to * 32 + n);
        } else if (op < 93) {
            const int first = uniform(0, CELLS - 1);
            for (stack * x : both) { x->shift(s, first, 2); }
        } else if (op < 97) {
            for (stack * x : both) {
                for (auto & l : x->lane) {
                    l[0]->copy_stream(s, 1 - s);
                    l[1]->copy_stream(s, 1 - s);
                }
                x->commit();
            }
            cursor[1 - s] = cursor[s];
        } else if (op == 99) {
            for (stack * x : both) {
                for (auto & l : x->lane) {
                    l[0]->clear();
                    l[1]->clear();
                }
            }
            cursor[0] = cursor[1] = 0;
        }
        CHECK(d.error().empty(), "%s", d.error().c_str());
    }
    for (int s = 0; s < 2; s++) { compare(n_steps, s); }
    CHECK(host.counters.n_sealed == there.counters.n_sealed && host.counters.n_sealed, "pages sealed: %d, not %d",
        (int) there.counters.n_sealed, (int) host.counters.n_sealed);
    return n_compared;
}

// A recorded step may be the first one that has positions: nothing is sealed yet, and there are no means.
static void check_first_positions() {
    kvq_cuda_device d(0);
    const int D = 64, H = 2, slot = 5, pos = 1234;
    const kvq_lane_layout l = make_layout(make_codec(KVQ_ROLE_K, 2, 2, 1, 0, 0.0f, 64, D), H, 128);
    std::vector<float> x((size_t) H * D);
    for (auto & y : x) { y = normal(); }
    device_bytes tile(d, l.nb_frame), rows(d, 4 * x.size(), x.data());
    uint16_t * const to = (uint16_t *) tile.p + (size_t) slot * l.head_stride();
    for (const auto step : { kvq_cuda_device::REPLAY, kvq_cuda_device::RECORD }) { // the first fills the table
        CHECK(d.begin_step(step, 1), "%s", d.error().c_str());
        d.write_rows(l, 1, &to, (const float *) rows.p, H * D, &pos, 1);
        d.flush_rows();
        d.end_step();
    }
    std::vector<uint16_t> want(x.size()), got((size_t) D);
    for (size_t i = 0; i < x.size(); i++) { want[i] = kvq_f32_to_f16(x[i]); }
    kvq_tag_put(l, want.data(), (size_t) D, pos);
    for (int h = 0; h < H; h++) {
        d.get(got.data(), to + (size_t) h * l.page_cells * l.head_stride(), 2 * (size_t) D);
        CHECK(d.error().empty(), "%s", d.error().c_str());
        CHECK(
            std::equal(got.begin(), got.end(), &want[(size_t) h * D]), "head %d: the row came without its position", h);
    }
}

static void check_aqua(kvq_cuda_device & d, int n_steps, bool many) {
    check_first_positions();
    for (const char * opts : { "predictor=bias,window=32", "predictor=bias,window=auto",
             "predictor=bias,bits=3,first_bits=0,sinks=0,window=64,scales=f16" }) {
        check_store(d, "aqua", opts, n_steps, true);
        const int n_rows = check_store(d, "aqua", opts, n_steps, false);
        printf("store, aqua %s: %d random operations, %d rows as on the CPU\n", opts, n_steps, n_rows);
    }
    for (const char * opts : { "predictor=k,bits=3,first_bits=0,sinks=0,window=64,scales=f16",
             "predictor=full,window=32", "predictor=fold,window=32" }) {
        const bool fold = strstr(opts, "fold") != nullptr, values = fold || strstr(opts, "full");
        const auto check = [&](int D, auto run, int n) {
            double worst = 0;
            int n_rows = 0;
            const int64_t before = d.n_folded;
            const auto folded = [&] { return d.n_folded > before; };
            for (int turn = 0; turn < 20 && (worst == 0 || folded() != fold); turn++) { // few steps may attend nothing
                n_rows += run(d, opts, values ? 8 : 4, values, n, worst);
            }
            CHECK(folded() == fold, "%s: %d calls folded values", opts, (int) (d.n_folded - before));
            CHECK(worst > 0, "attention was not compared");
            printf("store, aqua %s, head size %d: %d random operations, %d rows as on the CPU, attention's worst "
                   "relative error %.2g\n",
                opts, D, n, n_rows, worst);
        };
        check(64, check_chain<3, 64>, n_steps);
        const int fewer = std::max(n_steps / 4, 4); // other shapes of the kernels
        if (many || values) { check(128, check_chain<1, 128>, fewer); }
        if (many || !values) { check(80, check_chain<1, 80>, fewer); }
        if (many) { check(256, check_chain<1, 256>, fewer); }
    }
    double worst = 0;
    int n = 0;
    const auto attention = [&](attention_case c) {
        c.sorted = n++ / 2 % 2; // every other two have gains
        worst = std::max(worst, check_attention(d, c));
    };
    const auto stays = [&](attention_case c) { // read as they are sealed, and as f16 rows
        const int64_t before = d.n_means;
        for (bool stayed : { true, false }) {
            c.stayed = stayed;
            attention(c);
        }
        CHECK(d.n_means - before == (c.turns == 4 ? 0 : 2),
            "bits %d/%d D %d turns %d: %d launches over pages without their means", c.kb, c.vb, c.D, c.turns,
            (int) (d.n_means - before));
    };
    stays({ 2, 2, 2, 2, 128, 2, 4, 1, 700, 2, 0, 0, false, false, 1 });
    stays({ 3, 3, 2, 0, 64, 1, 4, 1, 500, 1, 0, 0, true, false, 3, 32, 0 });
    stays({ 2, 1, 2, 1, 64, 1, 4, 2, 300, 1, 0, 0, false, false, 1 });
    stays({ 4, 3, 2, 0, 64, 1, 4, 1, 200, 1, 0, 0, false, false, 4 });
    stays({ 2, 2, 2, 1, 128, 1, 4, 1, 400, 1, 0, 0, false, false, 5 });
    attention({ 2, 3, 2, 1, 80, 1, 2, 20, 150, 1, 0, 0, false, false, 2, 64, 0 });
    attention({ 4, 4, 2, 2, 128, 2, 4, 20, 300, 1, 0, 0, false, false, 1, 0, 1 });
    attention({ 4, 4, 2, 2, 64, 1, 3, 90, 300, 1, 0, 0, false, false, 2, 0, 0 });
    attention({ 2, 3, 2, 1, 80, 1, 2, 20, 150, 1, 0, 0, false, false, 5, 64 });
    // bits: 8*k + v
    for (int D : { 64, 128 }) {
        for (int bits : { 9, 17, 18, 27, 36 }) {
            for (int turns : { 1, 3, 4, 5 }) {
                for (int neox : { 0, 1 }) {
                    if (many) {
                        stays({ bits / 8, bits % 8, 2, 2 * neox, D, 2, 4, 1, 1100, turns, 0, 0, false, false, turns,
                            neox ? 0 : D / 2, neox });
                        stays({ bits / 8, bits % 8, 2, 1 - neox, D, 1, bits == 18 ? 8 : 5, turns == 1 ? 3 : 1, 3000, 1,
                            bits == 27 ? 20.0f : 0.0f, bits == 36 ? 8.0f : 0.0f, neox == 1, false, turns, 0, neox });
                    }
                }
            }
        }
    }
    for (int D : { 64, 80, 128, 256 }) {
        for (int n_q : { 1, 20 }) {
            for (int turns : { 1, 2, 5 }) {
                for (int neox : { 0, 1 }) {
                    if (many) {
                        attention({ 2, 2, 2, 1, D, 2, 4, n_q, 1100, turns, 0, 0, false, false, turns, 0, neox });
                        attention({ 4, 3, 2, 0, D, 1, 2, n_q, 300, 1, 0, 0, true, false, turns, D / 2, neox });
                    }
                }
            }
        }
    }
    printf("attention over turned keys: %d cases, worst relative error %.2g\n", n, worst);
}

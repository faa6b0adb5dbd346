// Part of test_cuda.cpp: coordinates of cells (types/basis.h). The store's bytes are those of the CPU, and attention
// agrees with the CPU's.
#pragma once

#include "cuda_world.h"

// Both layers of both sides read one basis and one order; without coordinates nothing happens.
static void share_coords(pair_of_layers * const (&both)[2], int n_head, int D) {
    static std::vector<std::unique_ptr<kvq_basis_data>> all;
    const kvq_basis * basis[2][2] = {};
    const kvq_order * order[2] = {};
    for (int i = 0; i < 2; i++) {
        const kvq_codec & keys = both[0]->lane[i][0]->layout().codec;
        if (!keys.coords) { return; }
        const int n = n_head * keys.coords - 2, W = n_head * D;
        for (int v = 0; v < 2; v++) {
            std::vector<float> axes((size_t) n * W);
            for (auto & x : axes) { x = normal() / sqrtf((float) W); }
            all.emplace_back(new kvq_basis_data);
            all.back()->make(n, W, axes.data(), v ? nullptr : axes.data());
            basis[i][v] = &all.back()->view;
        }
        order[i] = some_order(n_head, D, keys.split != 0);
    }
    for (pair_of_layers * p : both) { p->have_coords(basis, order); }
}

// Queries of a layer on both sides
static double check_coords_attention(
    kvq_cuda_device & d, pair_of_layers * const (&both)[2], int layer, int n_kv, int n_q, int gqa, bool stayed) {
    const kvq_lane_layout & l = both[0]->lane[layer][0]->layout();
    const int D = l.codec.head_size, H = gqa * l.n_head;
    std::vector<float> q((size_t) n_q * H * D), want(q.size()), got(q.size(), NAN);
    for (auto & x : q) { x = normal(); }
    device_bytes tq(d, 4 * q.size(), q.data()), to(d, 4 * q.size(), got.data());
    for (const bool on : { false, true }) {
        pair_of_layers & w = *both[on];
        kvq_attn a = {};
        for (int v = 0; v < 2; v++) { w.layer[layer].transforms[v]->spans(a, 0); }
        a.k = l.codec;
        a.v = w.lane[layer][1]->layout().codec;
        a.n_head = H;
        a.n_head_kv = l.n_head;
        a.n_q = n_q;
        a.n_kv = n_kv;
        a.n_pages = (n_kv + l.page_cells - 1) / l.page_cells;
        a.scale = 0.1f;
        a.pages = w.lane[layer][0]->spans_on(0, 0);
        a.q_stride_token = a.dst_stride_token = H * D;
        a.q_stride_head = a.dst_stride_head = D;
        a.q = on ? (const float *) tq.p : q.data();
        a.dst = on ? (float *) to.p : want.data();
        a.flags |= (on ? 0 : KVQ_ATTN_F32) | (stayed ? KVQ_ATTN_STAYED : 0);
        kvq_device & device = on ? (kvq_device &) d : kvq_cpu_device();
        device.attend({ &a, 1, nullptr, nullptr, nullptr, 1 });
    }
    d.get(got.data(), to.p, 4 * got.size());
    double err = 0, norm = 0;
    for (size_t i = 0; i < got.size(); i++) {
        err += (double) (got[i] - want[i]) * (got[i] - want[i]);
        norm += (double) want[i] * want[i];
    }
    const double rel = sqrt(err / norm);
    CHECK(rel < 2e-3, "layer %d, %d cells, %d queries of %d heads: relative error %.3g", layer, n_kv, n_q, H, rel);
    return rel;
}

static int check_store(kvq_cuda_device & d, const char * method, const char * opts, int n_steps, bool images);

// apart: positions of a page are further from each other than a table reaches
static double check_coords_reading(
    kvq_cuda_device & d, const char * opts, int n_head, int D, int gqa, bool apart = false) {
    const int W = n_head * D, n_cells = 512, n_kv = 400;
    pair_of_layers host(kvq_cpu_device(), "auto", opts, n_head, D, n_cells, 1),
        there(d, "auto", opts, n_head, D, n_cells, 1);
    pair_of_layers * both[2] = { &host, &there };
    const float * mean[2][2] = { { some_means(W), some_means(W) }, { some_means(W), some_means(W) } };
    kvq_rotor * rotor = some_rotor(D, uniform(0, 1));
    for (pair_of_layers * p : both) { p->leave_out(mean, rotor); }
    share_coords(both, n_head, D);
    double worst = 0;
    for (int first = 0; first < n_kv; first += 100) {
        std::vector<int64_t> idx(100);
        std::vector<int32_t> pos(100);
        for (int i = 0; i < 100; i++) {
            const int cell = first + i;
            idx[(size_t) i] = cell;
            pos[(size_t) i] = apart ? cell % 3 * 500 + cell / 3 : cell + 37;
        }
        for (int x = 0; x < 4; x++) {
            std::vector<float> rows((size_t) 100 * W);
            for (size_t j = 0; j < rows.size(); j++) { rows[j] = normal() + mean[x / 2][x % 2][j % (size_t) W]; }
            device_bytes up(d, rows.size() * 4, rows.data());
            host.lane[x / 2][x % 2]->write(100, idx.data(), rows.data(), (size_t) W, 1, x % 2 ? nullptr : pos.data());
            there.lane[x / 2][x % 2]->write(
                100, idx.data(), (const float *) up.p, (size_t) W, 1, x % 2 ? nullptr : pos.data());
        }
        for (pair_of_layers * p : both) {
            for (int x = 0; x < 4; x++) { p->lane[x / 2][x % 2]->commit(1); }
        }
    }
    CHECK(there.counters.n_sealed > 8, "few pages are sealed");
    const int64_t n_folded = d.n_folded;
    for (const int n_q : { 1, 20, 150 }) {
        for (int i = 0; i < 2; i++) {
            worst = std::max(worst, check_coords_attention(d, both, i, n_kv, n_q, gqa, true));
        }
    }
    CHECK((d.n_folded > n_folded) == (D == 64 || D == 128), "heads of %d: sums of coordinates %d times", D,
        (int) (d.n_folded - n_folded));
    for (pair_of_layers * p : both) { p->shift(0, 100, 2); }
    worst = std::max(worst, check_coords_attention(d, both, 1, n_kv, 1, gqa, false));
    CHECK(d.error().empty(), "%s", d.error().c_str());
    return worst;
}

static void check_coords(kvq_cuda_device & d, int n_steps) {
    double worst = 0;
    for (const char * opts : { "level=3,means=on,pairs=sorted,coords=8,window=32,coordinates=on",
             "level=0,means=on,pairs=sorted,coords=10,window=32,sinks=0,scales=f16,coordinates=on",
             "level=14,means=on,pairs=sorted,coords=4,window=32,coordinates=on" }) {
        check_store(d, "auto", opts, n_steps, true);
        const int n_rows = check_store(d, "auto", opts, n_steps, false);
        worst =
            std::max({ worst, check_coords_reading(d, opts, 2, 64, 3), check_coords_reading(d, opts, 2, 64, 1, true),
                check_coords_reading(d, opts, 1, 128, 8), check_coords_reading(d, opts, 3, 80, 2) });
        printf("store, auto %s: %d random operations, %d rows as on the CPU; attention's worst relative error %.2g\n",
            opts, n_steps, n_rows, worst);
    }
    // more coordinates than the usual kernel takes
    const char * many = "level=3,means=on,pairs=sorted,coords=64,window=32,coordinates=on";
    worst = std::max(check_coords_reading(d, many, 2, 64, 2), check_coords_reading(d, many, 4, 128, 4));
    printf("attention over 126 and 254 coordinates: worst relative error %.2g\n", worst);
}

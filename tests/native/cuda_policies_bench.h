// Part of test_cuda_policies.cpp: time of one layer's attention and of what observation adds.
#pragma once

#include "cuda_timing.h"

static double microseconds(kvq_cuda_device & d, int n, const std::function<void()> & f) {
    return 1e6 * seconds(d, n, f);
}

// A layer whose pages all hold the same block; every KV head of a method that evicts keeps its own cells.
struct bench_layer {
    kvq_layer_plan plan;
    kvq_lane_layout l[2];
    std::unique_ptr<device_bytes> codes[2], params[2], pages, maps;
    int n_pages;

    bench_layer(kvq_cuda_device & d, const char * method, const char * opts, int n_cells) :
        plan(make_plan(method, opts, 8, 128)) {
        std::vector<kvq_page> list;
        std::vector<uint8_t> chosen; // sets of the salient cells of every head: values have those of the keys
        for (int v = 0; v < 2; v++) {
            l[v] = kvq_make_lane_layout(plan, v, 8, n_cells, 1);
            std::vector<uint16_t> tile(l[v].nb_frame / 2);
            for (auto & x : tile) { x = kvq_f32_to_f16(normal()); }
            std::vector<uint8_t> c(l[v].nb_codes * 8), p(l[v].nb_params * 8, 0);
            const size_t nb_set = (size_t) l[v].page_cells / 8;
            chosen.resize(8 * nb_set);
            for (int h = 0; l[v].codec.n_hi && h < 8; h++) {
                for (int n = 0; !v && n < l[v].codec.n_hi;) {
                    const int t = uniform(0, l[v].page_cells - 1);
                    uint8_t & byte = chosen[h * nb_set + (size_t) t / 8];
                    n += !(byte >> t % 8 & 1);
                    byte |= (uint8_t) (1 << t % 8);
                }
                std::copy_n(&chosen[h * nb_set], nb_set, &p[h * l[v].nb_params]);
            }
            const kvq_page_block b = { tile.data(), nullptr, nullptr, c.data(), p.data() };
            kvq_cpu_device().encode(l[v], &b, 1, 1);
            std::vector<uint8_t> all_c, all_p;
            for (int i = 0; i < l[v].n_store; i++) {
                all_c.insert(all_c.end(), c.begin(), c.end());
                all_p.insert(all_p.end(), p.begin(), p.end());
            }
            codes[v].reset(new device_bytes(d, all_c.size(), all_c.data()));
            params[v].reset(new device_bytes(d, all_p.size(), all_p.data()));
        }
        n_pages = l[0].n_store;
        const bool evicts = l[0].evicts;
        const int page = l[0].page_cells;
        std::vector<int32_t> m;
        for (int i = 0; evicts && i < n_pages; i++) {
            for (int h = 0; h < 8; h++) {
                for (int t = 0; t < page; t++) {
                    m.push_back((int32_t) ((int64_t) (i * page + t) * n_cells / (n_pages * page)) + uniform(0, 1));
                }
            }
        }
        maps.reset(new device_bytes(d, m.size() * 4, m.data()));
        for (int i = 0; i < n_pages; i++) {
            kvq_page p = {};
            p.k_codes = (uint8_t *) codes[0]->p + i * 8 * l[0].nb_codes;
            p.v_codes = (uint8_t *) codes[1]->p + i * 8 * l[1].nb_codes;
            p.k_params = (uint8_t *) params[0]->p + i * 8 * l[0].nb_params;
            p.v_params = (uint8_t *) params[1]->p + i * 8 * l[1].nb_params;
            p.cell = i * page;
            p.n_slots = page;
            p.map = evicts ? (const int32_t *) maps->p + (size_t) i * 8 * page : nullptr;
            list.push_back(p);
        }
        pages.reset(new device_bytes(d, list.size() * sizeof(kvq_page), list.data()));
    }
    double bytes() const { return (double) (codes[0]->nb + codes[1]->nb + params[0]->nb + params[1]->nb); }
    kvq_attn attn(
        int n_q, int n_cells, const device_bytes & q, const device_bytes & mask, const device_bytes & out) const {
        kvq_attn a = {};
        a.k = l[0].codec;
        a.v = l[1].codec;
        a.n_q = n_q;
        a.n_head = 32;
        a.n_head_kv = 8;
        a.n_kv = n_cells;
        a.n_pages = n_pages;
        a.scale = 0.088f;
        a.q = (const float *) q.p;
        a.q_stride_token = 32 * 128;
        a.q_stride_head = 128;
        a.mask = (const uint16_t *) mask.p;
        a.mask_stride_token = n_cells;
        a.dst = (float *) out.p;
        a.dst_stride_token = 32 * 128;
        a.dst_stride_head = 128;
        a.pages = (const kvq_page *) pages->p;
        a.map_stride = maps->nb ? l[0].page_cells : 0;
        return a;
    }
};

// decode: one token alone; prompt: 512 alone
static void bench(kvq_cuda_device & d, bool decode, bool prompt) {
    const int N = 32768;
    std::vector<float> hq((size_t) 512 * 4096);
    for (auto & x : hq) { x = normal(); }
    device_bytes q(d, hq.size() * 4, hq.data()), o(d, hq.size() * 4), mask(d, (size_t) 512 * N * 2 + 4 * N * 2);
    double bandwidth;
    {
        const size_t nb = (size_t) 1 << 30;
        device_bytes x(d, nb), y(d, nb);
        // bytes read and written, TB/s
        bandwidth = 2e-6 * (double) nb / microseconds(d, 5, [&] { d.copy(y.p, x.p, nb); });
    }
    printf("copy bandwidth %.2f TB/s\n%-44s %8s %5s %10s %10s %10s %10s\n", bandwidth, "one layer, 8 KV heads x 128",
        "cells", "n_q", "us", "MB", "floor us", "us a MB");
    struct {
        const char *method, *opts;
    } arms[] = { { "kivi", "bits=2,group=128" }, { "kivi", "bits=2,group=16" }, { "kivi", "bits=2,group=16,scales=u8" },
        { "minikv", "" }, { "minikv", "group=32" }, { "kivi", "bits=4,group=128" }, { "zipcache", "" } };
    for (const auto & arm : arms) {
        for (int cells : { N, 4 * N }) {
            if (prompt && (cells > N || !strcmp(arm.opts, "bits=4,group=128"))) { continue; }
            std::vector<std::unique_ptr<bench_layer>> ws; // several, so that L2 does not hold the cache
            for (int i = 0; i < (cells > N ? 2 : 4); i++) {
                ws.emplace_back(new bench_layer(d, arm.method, arm.opts, cells));
            }
            size_t i = 0;
            for (int n_q : { 1, 512 }) {
                if (n_q > 1 ? cells > N || decode : prompt) { continue; }
                const double us = microseconds(d, n_q > 1 ? 3 : 20, [&] {
                    const kvq_attn a = ws[i++ % ws.size()]->attn(n_q, cells, q, mask, o);
                    d.attend(&a, 1);
                });
                const double mb = ws[0]->bytes() / 1e6;
                printf("%-44s %8d %5d %10.1f %10.1f %10.1f %10.3f\n",
                    (std::string("attention, ") + arm.method + " " + arm.opts).c_str(), cells, n_q, us, mb,
                    mb / bandwidth, us / mb);
            }
            if (cells > N || decode || ws[0]->l[0].evicts) { continue; }
            void *k, *v;
            const double us = microseconds(d, 10, [&] {
                const kvq_attn a = ws[i++ % ws.size()]->attn(512, cells, q, mask, o);
                CHECK(d.expand(&a, 1, &k, &v), "out of memory");
            });
            printf("%-44s %8d %5d %10.1f\n", (std::string("as plain rows, ") + arm.method + " " + arm.opts).c_str(),
                cells, 512, us);
        }
    }
    // what observation adds to a call of 512 rows
    if (decode) { return; }
    {
        const kvq_lane_layout l = kvq_make_lane_layout(make_plan("minikv", "", 8, 128), false, 8, N, 1);
        const int n = 512 / l.page_cells;
        std::vector<float> sums((size_t) n * 9 * l.page_cells);
        for (auto & x : sums) { x = expf(normal()); }
        device_bytes there(d, 4 * sums.size(), sums.data());
        const std::vector<uint8_t> present((size_t) l.page_cells, 0xff), stale((size_t) l.page_cells / 8, 0);
        std::vector<kvq_pack_page> pages;
        for (int i = 0; i < n; i++) {
            pages.push_back({ (const float *) there.p + (size_t) i * 9 * l.page_cells, stale.data(), present.data(),
                i * l.page_cells, 0, n, true });
        }
        kvq_packed out;
        printf("%-44s %8d %5s %10.1f\n", "cells sorted into pages, with the transfer", n * l.page_cells, "",
            microseconds(d, 20, [&] { d.pack(l, false, pages.data(), n, out); }));
    }
    for (const auto & arm : { std::make_pair("zipcache", ""), std::make_pair("minikv", "") }) {
        const bench_layer w(d, arm.first, arm.second, N);
        two_layers x(d, arm.first, arm.second, 8, 128, 1024, 1);
        std::vector<int64_t> idx;
        for (int i = 0; i < 512; i++) { idx.push_back(i); }
        x.write(d, idx);
        const bool own = !x.there.evicts();
        kvq_attn a = w.attn(512, N, q, mask, o);
        a.lse = d.lse_of(512 * 32);
        const int n = x.there.probe->prepare(x.there.spans.spans.data(), x.there.spans.n_pages, 0, 512, 0);
        void *k = nullptr, *v;
        CHECK(!own || d.expand(&a, 1, &k, &v), "out of memory");
        const double us =
            microseconds(d, 10, [&] { d.observe(a, x.there.probe->table_of(0), n, x.there.probe->max_pages(0), k); });
        printf("%-44s %8d %5d %10.1f\n",
            (std::string("column sums of ") + std::to_string(n) + " probes" + (own ? " and log-sum-exp" : "")).c_str(),
            N, 512, us);
    }
    CHECK(d.error().empty(), "%s", d.error().c_str());
}

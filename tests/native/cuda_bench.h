// Part of test_cuda.cpp: time of one layer's attention, launched one after another and (cold) as a model finds it, with
// other bytes and instructions in the caches; floor = bytes / copy bandwidth; rows: to make f16 rows of it (prompts).
#pragma once

#include "cuda_timing.h"

// Warps and shared memory of a block of every decode kernel on this device (KVQ_CUDA_AS: on another), and what has
// none and takes tiles.
static void print_limits(kvq_cuda_device & d) {
    printf("%s\n%-14s %6s %8s %16s %8s %10s\n", d.name(), "format", "heads", "group", "kernel", "warps", "bytes");
    int n_none = 0;
    const auto line = [&](const char * name, int kb, int vb, int group, int scale, int D, int split = 0, int fast = 0) {
        kvq_codec k = make_codec(KVQ_ROLE_K, kb, group, scale, 0, 0.0f, std::max(32, group), D);
        k.split = split;
        k.fast_bits = fast;
        const kvq_codec v = make_codec(KVQ_ROLE_V, vb, std::min(group, D), scale, 0, 0.0f, std::max(32, group), D);
        if (kb < 16 && (kvq_traits(k.type)->refuse(k) || kvq_traits(v.type)->refuse(v))) { return; }
        const auto room = d.room_of(k, v);
        char bits[32];
        snprintf(bits, sizeof(bits), "%s %d/%d%s", name, kb, vb, scale ? " u8" : "");
        printf("%-14s %6d %8d %16s %8d %10d\n", bits, D, group, room.n_warps ? room.kernel : "none", room.n_warps,
            room.n_warps ? room.nb_shared : 0);
        n_none += !room.n_warps;
    };
    const std::pair<int, int> pairs[] = { { 1, 1 }, { 2, 1 }, { 2, 2 }, { 3, 2 }, { 3, 3 }, { 4, 2 }, { 4, 4 } };
    for (int D : { 64, 80, 96, 128, 192, 256, 512 }) {
        line("f16", 16, 16, 32, 0, D);
        for (const auto & p : pairs) {
            for (int scale : { 0, 1 }) {
                for (int group : { 16, 32, 128 }) { line("affine", p.first, p.second, group, scale, D); }
                if (scale) { line("lattice", p.first, p.second, 2, scale, D); }
            }
        }
#define KVQ_LINE(F, K, V) line("split " #F "/", K, V, 2, 1, D, KVQ_SPLIT_NORM + D % 3 % 2, F);
        KVQ_TEST_SPLIT_BITS(KVQ_LINE)
#undef KVQ_LINE
    }
    printf("%d without a kernel\n", n_none);
}

struct bench_heads {
    int heads, heads_kv, D;
};

__attribute__((weak)) void cool_code(); // cuda_cold.cu

static void bench(kvq_cuda_device & d, const char * only, int only_cells, bench_heads shape = { 32, 8, 128 }) {
    const int width = shape.heads * shape.D;
    const size_t nb = (size_t) 2 << 30;
    printf("%d query heads, %d KV heads of %d\n", shape.heads, shape.heads_kv, shape.D);
    double bandwidth;
    {
        device_bytes x(d, nb), y(d, nb);
        bandwidth = 2.0 * nb / seconds(d, 5, [&] { d.copy(y.p, x.p, nb); });
    }
    device_bytes big(d, nb);
    printf("copy bandwidth %.2f TB/s (bytes read plus written)\n%-22s %8s %5s %10s %10s %10s %8s %10s\n",
        bandwidth / 1e12, "attention, one layer", "cells", "n_q", "us", "cold us", "floor us", "ratio", "rows us");
    struct {
        const char * name;
        int kb, vb, group, scale, turns = 0;
        bool stayed = false;
        int split = 0, fast = 0;
    } formats[] = { { "f16", 16, 16, 32, 0 }, { "kivi-2 g128", 2, 2, 128, 0 }, { "kivi-2 g16 u8", 2, 2, 16, 1 },
        { "kivi-2 g32 u8", 2, 2, 32, 1 }, { "xquant 2/1 g32", 2, 1, 32, 0 }, { "affine-1 g128", 1, 1, 128, 0 },
        { "kivi-4 g128", 4, 4, 128, 0 }, { "higgs-1", 1, 1, 2, 1 }, { "higgs-2", 2, 2, 2, 1 },
        { "higgs-3", 3, 3, 2, 1 }, { "higgs-4", 4, 4, 2, 1 }, { "aqua-2 none", 2, 2, 2, 1, 4, true },
        { "aqua-2 bias", 2, 2, 2, 1, 1, true }, { "aqua-4 bias", 4, 4, 2, 1, 1, true },
        { "aqua-2 bias as rows", 2, 2, 2, 1, 1, false }, { "split 0|4/2", 4, 2, 2, 1, 1, true, KVQ_SPLIT_NEOX, 0 },
        { "split 2|4/4 as rows", 4, 4, 2, 1, 1, false, KVQ_SPLIT_NEOX, 2 },
        { "sorted 1|2/2", 2, 2, 2, 2, 1, true, KVQ_SPLIT_NORM, 1 },
        { "sorted 1|3/2", 3, 2, 2, 2, 1, true, KVQ_SPLIT_NORM, 1 },
        { "sorted 1|4/2", 4, 2, 2, 2, 1, true, KVQ_SPLIT_NORM, 1 },
        { "sorted 2|4/3", 4, 3, 2, 2, 1, true, KVQ_SPLIT_NORM, 2 }, { "sorted 4/4", 4, 4, 2, 2, 1, true } };
    for (const auto & f : formats) {
        for (int cells : { 1024, 8192, 32768, 131072 }) {
            if (!strstr(f.name, only) || (only_cells && cells != only_cells)) { continue; }
            for (int n_q : { 1, 512 }) {
                if (n_q > 1 && (cells != 32768 || shape.D > 256)) { continue; }
                attention_case c = { f.kb, f.vb, f.group, f.scale, shape.D, shape.heads_kv,
                    shape.heads / shape.heads_kv, n_q, cells, 1, 0, 0, false, false, f.turns, 0, 1, f.stayed };
                c.split = f.split;
                c.fast = f.fast;
                c.sorted = strstr(f.name, "sorted");
                std::vector<std::unique_ptr<world>> ws; // several layers, so that L2 does not hold the cache
                for (int i = 0; i < (cells < 100000 ? 4 : 2); i++) { ws.emplace_back(new world(d, c, false)); }
                device_bytes q(d, (size_t) n_q * width * 4), o(d, (size_t) n_q * width * 4),
                    m(d, (size_t) n_q * cells * 2);
                std::vector<float> hq((size_t) n_q * width);
                for (auto & x : hq) { x = normal(); }
                d.put(q.p, hq.data(), hq.size() * 4);
                size_t i = 0;
                const auto next = [&] {
                    world & w = *ws[i++ % ws.size()];
                    kvq_attn a = {};
                    a.k = w.k.codec;
                    a.v = w.v.codec;
                    a.n_q = n_q;
                    a.n_head = shape.heads;
                    a.n_head_kv = shape.heads_kv;
                    a.n_kv = cells;
                    a.n_pages = w.k.n_pages;
                    a.scale = 1.0f / sqrtf((float) shape.D);
                    a.q = (const float *) q.p;
                    a.q_stride_token = width;
                    a.q_stride_head = shape.D;
                    a.mask = (const uint16_t *) m.p;
                    a.mask_stride_token = cells;
                    a.dst = (float *) o.p;
                    a.dst_stride_token = width;
                    a.dst_stride_head = shape.D;
                    a.pages = (const kvq_page *) w.pages_there->p;
                    w.leave_out(a, 0);
                    return a;
                };
                const auto attend = [&] {
                    const kvq_attn a = next();
                    d.attend(&a, 1);
                };
                const auto expand = [&] {
                    const kvq_attn a = next();
                    void * rows[2];
                    CHECK(d.expand(&a, 1, &rows[0], &rows[1]), "out of memory");
                };
                const double s = seconds(d, n_q == 1 ? 40 : 4, attend), s_rows = n_q == 1 ? seconds(d, 20, expand) : 0;
                double cold = 0.0;
                if (n_q == 1 && cool_code) {
                    const auto cool = [&] { // the L2 cache has other bytes then, and instructions are fetched anew
                        d.copy(big.p, (const char *) big.p + nb / 2, (size_t) 100 << 20);
                        cool_code();
                    };
                    const double without = seconds(d, 40, cool);
                    cold = seconds(d, 40, [&] {
                        cool();
                        attend();
                    }) - without;
                }
                const world & w = *ws[0];
                const double bytes = f.kb == 16
                    ? (double) (w.frames[0]->nb + w.frames[1]->nb)
                    : (double) (w.codes[0]->nb + w.codes[1]->nb + w.params[0]->nb + w.params[1]->nb);
                printf("%-22s %8d %5d %10.1f %10.1f %10.1f %8.2f %10.1f\n", f.name, cells, n_q, s * 1e6, cold * 1e6,
                    bytes / bandwidth * 1e6, s / (bytes / bandwidth), s_rows * 1e6);
            }
        }
    }
    printf("%-34s %10s %10s\n", "predictors, 8192 cells, one layer", "us", "TMAC/s");
    for (int bits : { 8, 4 }) {
        if (!strstr("predict", only)) { continue; }
        predict_world p(d, { 1024, 1024, bits, 8192 });
        const double s = seconds(d, 20, [&] { p.run(d, 8192, false); });
        char name[64];
        snprintf(name, sizeof(name), "1024 -> 1024, %d-bit weights", bits);
        printf("%-34s %10.1f %10.1f\n", name, s * 1e6, 8192.0 * 1024 * 1024 / s / 1e12);
    }
    printf("%-34s %10s\n", "predicted layer, 8192 cells", "us");
    for (int bits : { 2, 4 }) {
        if (!strstr("chain", only)) { continue; }
        // 8 heads of 128: rows without their products, as keys, as both; then attention, which makes tiles of them
        // first
        const attention_case c = { bits, bits, 2, 1, 128, 8, 4, 1, 8192, 1, 0, 0, false, false, 1, 0, 1, false };
        world w(d, c, false);
        const int width = 8 * 128, n = w.k.n_pages * w.k.page_cells;
        device_bytes q(d, 32 * 128 * 4), o(d, 32 * 128 * 4), m(d, (size_t) n * 2), rows(d, (size_t) 2 * n * width),
            scales(d, (size_t) 8 * n);
        kvq_attn a = {};
        a.k = w.k.codec;
        a.v = w.v.codec;
        a.n_q = 1;
        a.n_head = 32;
        a.n_head_kv = 8;
        a.n_kv = 8192;
        a.n_pages = w.k.n_pages;
        a.scale = 0.088f;
        a.q = (const float *) q.p;
        a.q_stride_token = 32 * 128;
        a.q_stride_head = 128;
        a.mask = (const uint16_t *) m.p;
        a.mask_stride_token = 8192;
        a.dst = (float *) o.p;
        a.dst_stride_token = 32 * 128;
        a.dst_stride_head = 128;
        a.pages = (const kvq_page *) w.pages_there->p;
        w.leave_out(a, 0);
        predict_world p(d, { width, width, 8, 1 });
        for (const char * predicted : { "", " + products", " + products, fold" }) {
            const bool folds = strstr(predicted, "fold");
            kvq_chain_pages lanes[2];
            for (int v = 0; v < 2; v++) {
                kvq_chain_pages & x = lanes[v];
                x.l = v ? &w.v : &w.k;
                x.value = v;
                x.n = a.n_pages;
                x.pages = a.pages;
                for (int r = 0; r < 2; r++) {
                    x.in[r] = { (int8_t *) rows.p + (size_t) r * n * width, (float *) scales.p + (size_t) r * n,
                        (size_t) width };
                }
                x.out = x.in[v || folds];
                if (folds && v) {
                    std::swap(x.in[0], x.in[1]);
                    x.out = {};
                }
                x.stride = (size_t) width;
                x.turn.mean = v ? a.v_mean : a.k_mean;
                if (!v) {
                    x.turn.rotary = a.rotary;
                    x.turn.positions = a.positions;
                }
                if (*predicted) {
                    x.from[0] = p.w;
                    if (v) { x.from[1] = p.w; }
                }
            }
            const auto line = [&](const char * what, const std::function<void()> & f) {
                char name[64];
                snprintf(name, sizeof(name), "%d bits, %s%s", bits, what, predicted);
                printf("%-34s %10.1f\n", name, seconds(d, 20, f) * 1e6);
            };
            line("rows of K", [&] { d.chain_step(lanes[0]); });
            line("rows of K and V", [&] {
                d.chain_step(lanes[0]);
                d.chain_step(lanes[1]);
            });
            line("attention", [&] { d.attend(&a, 1, nullptr, nullptr, lanes); });
        }
        printf("%d bits, as rows, no prediction      %10.1f\n", bits, seconds(d, 20, [&] { d.attend(&a, 1); }) * 1e6);
    }
    CHECK(d.error().empty(), "%s", d.error().c_str());
}

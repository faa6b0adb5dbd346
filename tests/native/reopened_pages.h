// Of test_store.cpp: pages that are written into again and again (store/reopened.h).
#pragma once

#include "layer.h"

#include "base/f16.h"

#include <random>

static float normal() { return std::normal_distribution<float>()(rng); }

// A page whose end is written again and again: its first rows are rounded twice, not once more each time.
static void test_reopened() {
    const std::pair<const char *, const char *> caches[] = { { "kivi", "window=0,sinks=0" },
        { "kivi", "group=128,window=0,sinks=0" }, { "kivi", "bits=4,scales=u8,window=0,sinks=0" },
        { "kivi", "window=auto" }, { "higgs", "window=0,sinks=0" }, { "xquant", "kq=2,vq=0,km=0,vm=0,window=0" },
        { "zipcache", "window=0,sinks=0" } };
    for (const auto & c : caches) {
        cache_of_layers cache;
        composed_layer x;
        const kvq_layer_shape shape = { 0, 2, 64, 64 };
        x.make(cache, plan_of(c.first, c.second, { 0, 2, shape, nullptr }), 2, 512, 1);
        constexpr int KEPT = 20, W = 128;
        std::vector<float> rows((size_t) 512 * W);
        std::vector<int64_t> idx;
        std::vector<uint16_t> out((size_t) KEPT * W);
        double error[2] = {};
        for (int turn = 0; turn <= 40; turn++) { // the first one writes all, the others what follows the first rows
            const int first = turn ? KEPT : 0;
            idx.clear();
            for (int i = first; i < 512; i++) { idx.push_back(i); }
            std::vector<float> more((size_t) (512 - first) * W);
            for (float & r : more) { r = normal() * (1.0f + (float) (turn % 3)); }
            if (!turn) { rows = more; }
            for (int v = 0; v < 2; v++) { x.lane[v]->write((int64_t) idx.size(), idx.data(), more.data(), W, 1); }
            for (int v = 0; v < 2; v++) { x.lane[v]->commit(1); }
            for (int v = 0; v < 2 && (turn == 0 || turn == 40); v++) {
                CHECK(x.lane[v]->state(0, 0) == KVQ_PAGE_SEALED, "%s %s: open", c.first, c.second);
                x.lane[v]->read(0, 0, KEPT, out.data());
                for (size_t i = 0; i < out.size(); i++) {
                    const double d = kvq_f16_to_f32(out[i]) - rows[i];
                    error[turn > 0] += d * d;
                }
            }
        }
        CHECK(error[1] < 6.0 * error[0], "%s %s: 40 prompts took the error of kept rows from %.3g to %.3g", c.first,
            c.second, error[0], error[1]);
        printf("%s %s: error of kept rows %.3g, after 40 prompts %.3g\n", c.first, c.second, error[0], error[1]);
    }
}

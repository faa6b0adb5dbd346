// Predicted layers (policy/chain.h): random writes, commits, saves and reads on a stack of layers. After every step
// each sealed page must hold, to the bit, what the plain definition gives: rows of the layer below rebuilt from its
// blocks by kvq_predict_row and the type's own decode (AQUA-KV, section 3.1), and blocks that are the encoding of what
// that prediction leaves. Attention over stripes equals f64. Usage: test_chain [seed] [steps]
#include "layer.h"
#include "policy/chain.h"
#include "engine/host.h"
#include "base/f16.h"
#include "types/types.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

static float normal() { return std::normal_distribution<float>()(rng); }

struct config {
    const char * opts;
    int n_layer, n_head, head, n_cells, n_stream, bits;
    bool values;
    bool fold() const { return strstr(opts, "predictor=fold") != nullptr; }
};

// Predictions for a layer and its rows, of one page that every layer up to it has sealed.
struct rebuilt {
    std::vector<float> k, v, k_pred, v_pred;
};

struct world {
    config c;
    int W;
    cache_of_layers cache;
    kvq_chain * chain = nullptr;
    struct data : kvq_layer_calibration {
        std::vector<uint8_t> packed[3];
    };
    struct layer : composed_layer {
        std::shared_ptr<data> calibrated;
        const std::vector<float> * mean[2];
        kvq_chain_weights w;
        std::vector<float> plain[2]; // [stream][cell][W] as written, f16 values
    };
    std::vector<layer> layers;
    std::vector<bool> written;
    struct kept {
        std::vector<uint8_t> blocks;
        rebuilt now;
    };
    mutable std::map<std::array<int, 3>, kept> known; // of rebuild: layer, stream, page
};

static kvq_predictor make_predictor(int n_in, int n_out, int bits, std::vector<uint8_t> & packed) {
    std::vector<float> w((size_t) n_in * n_out);
    for (float & x : w) { x = normal() * 0.6f / sqrtf((float) n_in); }
    packed.resize(kvq_predictor_bytes(n_in, n_out, bits));
    kvq_predictor_pack(n_in, n_out, bits, w.data(), packed.data());
    kvq_predictor p;
    p.n_in = n_in;
    p.n_out = n_out;
    p.bits = bits;
    p.data = packed.data();
    return p;
}

static std::shared_ptr<world::data> make_data(const config & c, int W, bool first) {
    auto d = std::make_shared<world::data>();
    for (std::vector<float> * mean : { &d->k_mean, &d->v_mean }) {
        mean->resize((size_t) W);
        for (float & y : *mean) { y = normal(); }
    }
    if (first) { return d; }
    d->w.k = make_predictor(W, W, c.bits, d->packed[0]);
    if (c.values) {
        d->w.v_from_k = make_predictor(W, W, c.bits, d->packed[1]);
        d->w.v_from_below = make_predictor(W, W, c.bits, d->packed[2]);
    }
    return d;
}

// like: takes its weights and means
static void build(world & w, const config & c, const world * like = nullptr) {
    w.c = c;
    w.W = c.n_head * c.head;
    const kvq_layer_shape shape = { 0, c.n_head, c.head, c.head };
    w.layers = std::vector<world::layer>(c.n_layer);
    for (int i = 0; i < c.n_layer; i++) {
        world::layer & l = w.layers[i];
        l.calibrated = like ? like->layers[i].calibrated : make_data(c, w.W, !i);
        l.mean[0] = &l.calibrated->k_mean;
        l.mean[1] = &l.calibrated->v_mean;
        l.w = l.calibrated->w;
        const kvq_layer_plan plan = plan_of("aqua", c.opts, { i, c.n_layer, shape, i ? &shape : nullptr });
        l.make(w.cache, plan, c.n_head, c.n_cells, c.n_stream, i, i ? &w.layers[i - 1] : nullptr, l.calibrated.get());
        for (int v = 0; v < 2; v++) { l.plain[v].assign((size_t) c.n_cells * c.n_stream * w.W, 0.0f); }
    }
    w.chain = w.cache.chain();
    w.written.assign((size_t) c.n_cells * c.n_stream, false);
}

// ---------------------------------------------------------------- the definition

static std::vector<float> decoded(const kvq_lane & lane, int s, int p) {
    const kvq_lane_layout & x = lane.layout();
    const int n = x.page_cells, D = x.codec.head_size, W = D * x.n_head;
    std::vector<float> out((size_t) n * W);
    std::vector<uint16_t> rows((size_t) n * D);
    for (int h = 0; h < x.n_head; h++) {
        kvq_traits(x.codec.type)->decode(x.codec, lane.codes_at(s, p, h), lane.params_at(s, p, h), rows.data());
        for (int t = 0; t < n; t++) {
            for (int i = 0; i < D; i++) { out[(size_t) t * W + h * D + i] = kvq_f16_to_f32(rows[(size_t) t * D + i]); }
        }
    }
    return out;
}

static void add_product(
    const kvq_predictor & p, const std::vector<float> & x, int n, bool add, std::vector<float> & y) {
    std::vector<int8_t> x8(kvq_pad((size_t) p.n_in, 32), 0);
    for (int t = 0; t < n; t++) {
        float s;
        kvq_quantise_row(p.n_in, &x[(size_t) t * p.n_in], x8.data(), &s);
        kvq_predict_row(p, x8.data(), s, add, &y[(size_t) t * p.n_out]);
    }
}

// Blocks of layers 0..l of a page: all that a rebuilt page depends on.
static std::vector<uint8_t> blocks_of(const world & w, int l, int s, int p) {
    std::vector<uint8_t> out;
    for (int i = 0; i <= l; i++) {
        for (int v = 0; v < 2; v++) {
            const kvq_lane & lane = *w.layers[i].lane[v];
            const kvq_lane_layout & x = lane.layout();
            for (int h = 0; h < x.n_head; h++) {
                const uint8_t * codes = (const uint8_t *) lane.codes_at(s, p, h);
                const uint8_t * params = (const uint8_t *) lane.params_at(s, p, h);
                out.insert(out.end(), codes, codes + x.nb_codes);
                out.insert(out.end(), params, params + x.nb_params);
            }
        }
    }
    return out;
}

// A page is compared after every step and seldom changes: what the definition gives is kept as long as its blocks are
// the same to the byte.
static const rebuilt & rebuild(const world & w, int l, int s, int p) {
    world::kept & known = w.known[{ l, s, p }];
    std::vector<uint8_t> blocks = blocks_of(w, l, s, p);
    if (blocks == known.blocks) { return known.now; }
    known.blocks = std::move(blocks);
    const world::layer & x = w.layers[l];
    static const rebuilt none;
    const rebuilt & below = l ? rebuild(w, l - 1, s, p) : none;
    rebuilt & now = known.now;
    const int n = x.lane[0]->layout().page_cells;
    now.k_pred.assign((size_t) n * w.W, 0.0f);
    now.v_pred = now.k_pred;
    if (l) { add_product(x.w.k, below.k, n, false, now.k_pred); }
    now.k = decoded(*x.lane[0], s, p);
    for (size_t j = 0; j < now.k.size(); j++) { now.k[j] = now.k_pred[j] + now.k[j]; }
    if (l && w.c.values) {
        add_product(x.w.v_from_k, now.k, n, false, now.v_pred);
        add_product(x.w.v_from_below, w.c.fold() ? below.k : below.v, n, true, now.v_pred);
    }
    now.v = decoded(*x.lane[1], s, p);
    for (size_t j = 0; j < now.v.size(); j++) { now.v[j] = now.v_pred[j] + now.v[j]; }
    return now;
}

static bool all_sealed(const world & w, int s, int p) {
    for (const auto & l : w.layers) {
        if (l.lane[0]->state(s, p) != KVQ_PAGE_SEALED || l.lane[1]->state(s, p) != KVQ_PAGE_SEALED) { return false; }
    }
    return true;
}

static long n_compared = 0;

static void compare(world & w, const char * after) {
    const int n_pages = w.layers[0].lane[0]->layout().n_pages, n = w.layers[0].lane[0]->layout().page_cells;
    for (int s = 0; s < w.c.n_stream; s++) {
        for (int p = 0; p < n_pages; p++) {
            if (!all_sealed(w, s, p)) { continue; }
            const int l = uniform(0, w.c.n_layer - 1);
            const rebuilt & r = rebuild(w, l, s, p);
            for (int v = 0; v < 1 + w.c.values; v++) {
                const size_t stride = w.chain->stride(v);
                std::vector<float> got(n * stride);
                std::copy_n(w.chain->predict(l, v, s, { p }), got.size(), got.data());
                const std::vector<float> & want = v ? r.v_pred : r.k_pred;
                for (int t = 0; t < n; t++) {
                    CHECK(!memcmp(&got[t * stride], &want[(size_t) t * w.W], 4 * (size_t) w.W),
                        "after %s: layer %d page %d cell %d %s is predicted otherwise than when it was written", after,
                        l, p, t, v ? "value" : "key");
                }
                n_compared++;
            }
        }
    }
}

// A page just sealed from rows as they were written: its blocks are the encoding of what the definition's prediction
// leaves.
static void compare_blocks(world & w, int l, int s, int p) {
    const rebuilt & r = rebuild(w, l, s, p);
    for (int v = 0; v < 2; v++) {
        const world::layer & x = w.layers[l];
        const kvq_lane_layout & y = x.lane[v]->layout();
        const int n = y.page_cells, D = w.c.head;
        const std::vector<float> & pred = v ? r.v_pred : r.k_pred;
        std::vector<uint16_t> rows((size_t) n * D);
        std::vector<uint8_t> codes(y.nb_codes), params(y.nb_params);
        for (int h = 0; h < y.n_head; h++) {
            for (int t = 0; t < n; t++) {
                for (int i = 0; i < D; i++) {
                    const int c = h * D + i;
                    const float value = x.plain[v][((size_t) s * w.c.n_cells + p * n + t) * w.W + c];
                    rows[(size_t) t * D + i] = kvq_f32_to_f16(value - (*x.mean[v])[c] - pred[(size_t) t * w.W + c]);
                }
            }
            kvq_cpu_encode(y.codec, rows.data(), nullptr, nullptr, codes.data(), params.data());
            CHECK(!memcmp(codes.data(), x.lane[v]->codes_at(s, p, h), y.nb_codes) &&
                    !memcmp(params.data(), x.lane[v]->params_at(s, p, h), y.nb_params),
                "layer %d page %d head %d: %s blocks encode something else", l, p, h, v ? "value" : "key");
        }
    }
}

// ---------------------------------------------------------------- operations

static void commit(world & w) {
    for (auto & l : w.layers) {
        l.lane[0]->commit(uniform(1, 2));
        l.lane[1]->commit(1);
    }
}

static void write(world & w, int s, int cell, int n) {
    std::vector<int64_t> idx(n);
    std::vector<float> rows((size_t) n * w.W);
    for (int i = 0; i < n; i++) {
        idx[i] = (int64_t) s * w.c.n_cells + cell + i;
        w.written[idx[i]] = true;
    }
    for (auto & l : w.layers) {
        for (int v = 0; v < 2; v++) {
            for (int i = 0; i < n; i++) {
                for (int c = 0; c < w.W; c++) {
                    rows[(size_t) i * w.W + c] = l.plain[v][idx[i] * w.W + c] =
                        kvq_f16_to_f32(kvq_f32_to_f16(normal() + (*l.mean[v])[c]));
                }
            }
            l.lane[v]->write(n, idx.data(), rows.data(), w.W, uniform(1, 2));
        }
    }
}

// As llama.cpp saves and loads: all keys, then all values, each layer whole.
static void save_and_load(world & w) {
    commit(w);
    world other;
    build(other, w.c, &w);
    for (int v = 0; v < 2; v++) {
        for (size_t i = 0; i < w.layers.size(); i++) {
            for (int s = 0; s < w.c.n_stream; s++) {
                int n = 0;
                while (n < w.c.n_cells && w.written[(size_t) s * w.c.n_cells + n]) { n++; }
                n -= n % 32; // rows of a page that is not whole are quantised once more
                std::vector<uint16_t> saved((size_t) n * w.W), again(saved.size());
                w.layers[i].lane[v]->read(s, 0, n, saved.data());
                other.layers[i].lane[v]->restore(s, 0, n, saved.data(), 1);
                other.layers[i].lane[v]->read(s, 0, n, again.data());
                for (int p = 0; p < n / 32; p++) { // a page that was open may be sealed by now: its rows are codes then
                    const size_t at = (size_t) p * 32 * w.W, nb = 2 * (size_t) 32 * w.W;
                    const bool sealed_since = w.layers[i].lane[v]->state(s, p) == KVQ_PAGE_OPEN &&
                        other.layers[i].lane[v]->state(s, p) == KVQ_PAGE_SEALED;
                    CHECK(sealed_since || !memcmp(&saved[at], &again[at], nb),
                        "layer %zu %s, page %d: a saved state reads back otherwise", i, v ? "values" : "keys", p);
                }
                for (int p = 0; p < n / 32; p++) {
                    if (w.layers[i].lane[v]->state(s, p) == KVQ_PAGE_SEALED) {
                        CHECK(other.layers[i].lane[v]->state(s, p) == KVQ_PAGE_SEALED,
                            "layer %zu page %d did not come back as blocks", i, p);
                        for (int h = 0; h < w.c.n_head; h++) {
                            CHECK(
                                !memcmp(w.layers[i].lane[v]->codes_at(s, p, h),
                                    other.layers[i].lane[v]->codes_at(s, p, h), w.layers[i].lane[v]->layout().nb_codes),
                                "layer %zu page %d came back as other blocks", i, p);
                        }
                    }
                }
            }
        }
    }
}

static void attend(world & w) {
    const int l = uniform(0, w.c.n_layer - 1), s = uniform(0, w.c.n_stream - 1), D = w.c.head, n_head = 2 * w.c.n_head,
              n_q = uniform(0, 1) ? 1 : 7;
    int n_kv = 0;
    while (n_kv < w.c.n_cells && w.written[(size_t) s * w.c.n_cells + n_kv]) { n_kv++; }
    if (!n_kv) { return; }
    world::layer & x = w.layers[l];
    const kvq_lane_layout & y = x.lane[0]->layout();
    std::vector<float> q((size_t) n_q * n_head * D), dst(q.size()), sinks(n_head);
    for (float & z : q) { z = normal(); }
    for (float & z : sinks) { z = normal(); }
    kvq_attn a = {};
    a.k = x.lane[0]->layout().codec;
    a.v = x.lane[1]->layout().codec;
    a.n_q = n_q;
    a.n_head = n_head;
    a.n_head_kv = w.c.n_head;
    a.n_pages = (n_kv + 31) / 32;
    a.n_kv = n_kv;
    a.scale = 0.1f;
    a.q = q.data();
    a.q_stride_token = (int64_t) n_head * D;
    a.q_stride_head = D;
    a.sinks = sinks.data();
    a.dst = dst.data();
    a.dst_stride_token = (int64_t) n_head * D;
    a.dst_stride_head = D;
    a.pages = x.spans.spans.data() + (size_t) s * y.n_pages;
    a.k_mean = x.mean[0]->data();
    a.v_mean = x.mean[1]->data();
    a.flags = uniform(0, 1) ? KVQ_ATTN_F32 : 0; // without it few rows fold values
    const int n_threads = uniform(1, 3);
    w.chain->layer_below(l, s, a.n_pages, n_threads);
    kvq_chain_pages lanes[2];
    for (const bool v : { false, true }) {
        lanes[v] = w.chain->chains(v) ? w.chain->pages_of(l, v, s, 0, a.n_pages, n_threads) : kvq_chain_pages();
    }
    kvq_cpu_device().attend({ &a, 1, nullptr, nullptr, lanes, n_threads });
    w.chain->layer_read(l, s, a.n_pages);
    // rows as they are read, in f64
    std::vector<double> rows[2];
    for (int v = 0; v < 2; v++) {
        rows[v].resize((size_t) n_kv * w.W);
        for (int p = 0; p * 32 < n_kv; p++) {
            std::vector<float> page(32 * w.W);
            if (x.lane[v]->state(s, p) == KVQ_PAGE_SEALED) {
                const rebuilt & r = rebuild(w, l, s, p);
                page = v ? r.v : r.k;
            } else {
                const kvq_page_info & open = x.lane[v]->info(s, p);
                const int n = open.state == KVQ_PAGE_OPEN ? 32 : 0;
                for (int i = 0; i < n * w.W; i++) { // an f16 row less its mean, rounded to f16 once more
                    const int t = i / w.W, ch = i % w.W;
                    const uint16_t f16 = open.frame[((size_t) (ch / D) * 32 + t) * y.head_stride() + ch % D];
                    page[(size_t) i] = kvq_f16_to_f32(kvq_f32_to_f16(kvq_f16_to_f32(f16) - (*x.mean[v])[ch]));
                }
            }
            for (int t = 0; t < 32 && p * 32 + t < n_kv; t++) {
                for (int c = 0; c < w.W; c++) {
                    rows[v][(size_t) (p * 32 + t) * w.W + c] = (double) page[(size_t) t * w.W + c] + (*x.mean[v])[c];
                }
            }
        }
    }
    for (int i = 0; i < n_q; i++) {
        for (int h = 0; h < n_head; h++) {
            const float * z = &q[((size_t) i * n_head + h) * D];
            std::vector<double> o(D, 0.0);
            double top = sinks[h], sum;
            std::vector<double> logit(n_kv);
            for (int c = 0; c < n_kv; c++) {
                for (int d = 0; d < D; d++) { logit[c] += 0.1 * z[d] * rows[0][(size_t) c * w.W + h / 2 * D + d]; }
                top = std::max(top, logit[c]);
            }
            sum = exp(sinks[h] - top);
            for (int c = 0; c < n_kv; c++) {
                const double e = exp(logit[c] - top);
                sum += e;
                for (int d = 0; d < D; d++) { o[d] += e * rows[1][(size_t) c * w.W + h / 2 * D + d]; }
            }
            for (int d = 0; d < D; d++) {
                const double got = dst[((size_t) i * n_head + h) * D + d];
                CHECK(fabs(got - o[d] / sum) < 0.02, "layer %d, %d cells, row %d head %d channel %d: %g, not %g", l,
                    n_kv, i, h, d, got, o[d] / sum);
            }
        }
    }
}

static void run(const config & c, int n_steps) {
    world w;
    build(w, c);
    for (int step = 0; step < n_steps; step++) {
        const int s = uniform(0, c.n_stream - 1);
        int end = 0;
        while (end < c.n_cells && w.written[(size_t) s * c.n_cells + end]) { end++; }
        switch (uniform(0, 9)) {
        default: {
            const int n = std::min(uniform(0, 2) ? uniform(1, 9) : uniform(30, 90), c.n_cells - end);
            if (n > 0) {
                const int first = end / 32, last = (end + n - 1) / 32;
                write(w, s, end, n);
                commit(w);
                for (int p = std::max(0, first - 3); p <= last; p++) {
                    if (all_sealed(w, s, p)) {
                        compare(w, "append");
                        break;
                    }
                }
            }
            break;
        }
        case 6: // over cells that hold something, as a reused slot is written
            if (end > 40) {
                const int at = uniform(0, end - 20);
                write(w, s, at, uniform(1, std::min(70, end - at)));
                attend(w);
                commit(w);
                compare(w, "overwrite");
            }
            break;
        case 7:
            save_and_load(w);
            compare(w, "save");
            break;
        case 8:
            attend(w);
            compare(w, "attention");
            break;
        case 9:
            if (!uniform(0, 5)) { // whole streams
                const int to = uniform(0, c.n_stream - 1);
                if (to != s) {
                    for (auto & l : w.layers) {
                        for (int v = 0; v < 2; v++) {
                            l.lane[v]->copy_stream(s, to);
                            std::copy_n(l.plain[v].begin() + (long) s * c.n_cells * w.W, (size_t) c.n_cells * w.W,
                                l.plain[v].begin() + (long) to * c.n_cells * w.W);
                        }
                    }
                    std::copy_n(w.written.begin() + s * c.n_cells, c.n_cells, w.written.begin() + to * c.n_cells);
                    compare(w, "copy");
                }
            } else if (!uniform(0, 5)) {
                for (auto & l : w.layers) {
                    l.lane[0]->clear();
                    l.lane[1]->clear();
                }
                w.written.assign(w.written.size(), false);
            }
        }
    }
    // blocks of a stream written in one go
    for (auto & l : w.layers) {
        l.lane[0]->clear();
        l.lane[1]->clear();
    }
    w.written.assign(w.written.size(), false);
    write(w, 0, 0, c.n_cells);
    commit(w);
    int n_sealed = 0;
    for (int p = 0; p < c.n_cells / 32; p++) {
        for (int l = 0; l < c.n_layer && all_sealed(w, 0, p); l++) {
            compare_blocks(w, l, 0, p);
            n_sealed++;
        }
    }
    CHECK(n_sealed > 0, "nothing was sealed");
    attend(w);
}

// ggml's kernels set their tiles once a thread and use them ever after: ours give them back.
static void tiles_come_back() {
#if defined(__x86_64__)
    if (strcmp(kvq_kernel_name(), "avx512-amx")) { return; }
    constexpr int W = 64, N = 32;
    const std::vector<float> w(W * W, 0.5f), rows(N * W, 1.0f);
    std::vector<float> out(N * W);
    std::vector<uint8_t> packed(kvq_predictor_bytes(W, W, 8));
    kvq_predictor_pack(W, W, 8, w.data(), packed.data());
    const kvq_predictor p = { W, W, 8, packed.data() };
    const auto predict = [&] { kvq_cpu_predict(p, N, rows.data(), W, nullptr, 0, out.data(), W, 1); };
    predict(); // asks the kernel for tiles
    struct tiles {
        uint8_t palette, row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } mine = { 1, 0, {}, { 32, 32 }, { 8, 4 } }, after = {};
    __asm__ volatile("ldtilecfg %0" : : "m"(mine));
    predict();
    __asm__ volatile("sttilecfg %0" : "=m"(after));
    __asm__ volatile("tilerelease");
    CHECK(!memcmp(&mine, &after, sizeof mine), "tiles of this thread are gone: palette %d", after.palette);
    CHECK(fabsf(out[0] - W / 2) < 0.5f, "predicted %g, not %d", (double) out[0], W / 2);
#endif
}

int main(int argc, char ** argv) {
    const unsigned seed = argc > 1 ? (unsigned) atoi(argv[1]) : 1;
    const int steps = argc > 2 ? atoi(argv[2]) : 60;
    const config cases[] = {
        { "predictor=full,window=32", 3, 2, 64, 512, 1, 8, true },
        { "predictor=full,window=64,k_bits=2,v_bits=1", 4, 2, 32, 300, 2, 8, true },
        { "predictor=full,window=0,bits=1,weights=4", 3, 1, 128, 400, 2, 4, true },
        { "predictor=k,window=32,sinks=0", 3, 2, 64, 512, 2, 8, false },
        { "predictor=full,window=32,bits=3,first_bits=0", 2, 3, 72, 1600, 1, 8, true },
        { "predictor=full,window=32,bits=1,grid=d8", 2, 1, 128, 256, 1, 4, true },
        { "predictor=fold,window=32", 4, 2, 64, 512, 1, 8, true },
        { "predictor=fold,window=64,k_bits=2,v_bits=1", 5, 2, 32, 300, 2, 8, true },
        { "predictor=fold,window=0,bits=1,weights=4", 3, 1, 128, 400, 2, 4, true },
        { "predictor=fold,window=32,bits=3,first_bits=0", 2, 3, 72, 1600, 1, 8, true },
        { "predictor=k,window=96,bits=2,grid=d4,scales=f16", 3, 4, 80, 200, 1, 4, false },
    };
    tiles_come_back();
    for (const config & c : cases) {
        rng.seed(seed);
        run(c, steps);
        printf("%s: %d layers of %d x %d, %d cells x %d\n", c.opts, c.n_layer, c.n_head, c.head, c.n_cells, c.n_stream);
    }
    CHECK(n_compared > 200, "only %ld pages were compared", n_compared);
    printf("OK, seed %u: %ld predictions of pages to the bit\n", seed, n_compared);
    return 0;
}

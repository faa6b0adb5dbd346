// Random operations on a layer pair of lanes against a plain array: write, overwrite, commit, read, shift, copy,
// save, restore, clear. f16 must be identical; quantised lanes stay within the codec's error; attention over the
// spans equals attention over what is read. Usage: test_store [seed] [steps]
#include "layer.h"
#include "reopened_pages.h"

#include "base/f16.h"
#include "base/host_memory.h"
#include "policy/fetch.h"
#include "types/types.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <unistd.h>

struct config {
    const char *method, *opts;
    int n_head, dk, dv, n_cells, n_stream;
    const char * far_limit = ""; // MiB of the second tier
};

// What a cell must hold: the value written, or after requantisations an error bound around it.
struct plain_lane {
    int W;
    std::vector<float> value;
    std::vector<float> slack; // per cell: largest |read - value| allowed
    std::vector<bool> written;
    bool exact_read = false;
    int far = -1; // kvq_far_format of a second tier
};

struct layer_under_test : composed_layer {
    plain_lane plain[2];
};

struct world {
    config c;
    cache_of_layers cache;
    layer_under_test layer[2];
    int n_total() const { return c.n_cells * c.n_stream; }
};

static void build(world & w, const config & c) {
    w.c = c;
    const kvq_layer_shape shape = { 0, c.n_head, c.dk, c.dv };
    for (int i = 0; i < 2; i++) {
        const kvq_layer_plan plan = plan_of(c.method, c.opts, { i, 2, shape, i ? &shape : nullptr });
        w.layer[i].make(w.cache, plan, c.n_head, c.n_cells, c.n_stream, i, i ? &w.layer[0] : nullptr);
        for (int v = 0; v < 2; v++) {
            plain_lane & p = w.layer[i].plain[v];
            p.W = c.n_head * (v ? c.dv : c.dk);
            p.value.assign((size_t) w.n_total() * p.W, 0.0f);
            p.slack.assign(w.n_total(), 0.0f);
            p.written.assign(w.n_total(), false);
            if (const kvq_part * x = plan.part("fetch")) { p.far = (int) x->get("format"); }
            p.exact_read = w.layer[i].lane[v]->layout().is_f16() || p.far == KVQ_FAR_F16;
        }
    }
}

// Values lie within +-1, so an affine block of `bits` with eta has error <= range*(0.5/(2^b - 1) + eta), range <= 2;
// the low mantissa bits of an image and f16 rounding add 2^-7 of the value. Adopted codes bound nothing but the range
// itself.
static float seal_error(const kvq_lane_layout & l, const plain_lane & p) {
    if (p.exact_read) { return 0.0f; }
    if (p.far == KVQ_FAR_Q8) { return 0.5f / 127 + 0.002f; }
    if (p.far == KVQ_FAR_Q4) { return 1.0f / 8 + 0.002f; }
    if (l.shares_codes || !l.codec.bits) { return 2.1f; }
    return 2.0f * (0.5f / (float) ((1 << l.codec.bits) - 1) + l.codec.eta) + 0.02f;
}

static void compare(world & w, const char * after) {
    std::vector<uint16_t> rows;
    for (auto & layer : w.layer) {
        for (int v = 0; v < 2; v++) {
            kvq_lane & lane = *layer.lane[v];
            plain_lane & p = layer.plain[v];
            for (int s = 0; s < w.c.n_stream; s++) {
                const int a = uniform(0, w.c.n_cells - 1), n = uniform(1, w.c.n_cells - a);
                rows.assign((size_t) n * p.W, 0x7e00);
                lane.read(s, a, n, rows.data());
                for (int i = 0; i < n; i++) {
                    const size_t cell = (size_t) s * w.c.n_cells + a + i;
                    const bool sealed = lane.state(s, (a + i) / lane.layout().page_cells) == KVQ_PAGE_SEALED;
                    // a seal, or several when the page was written into, each from the values of the one before
                    const float bound =
                        p.exact_read ? 0.0f : p.slack[cell] + (sealed ? seal_error(lane.layout(), p) : 0.0f);
                    for (int d = 0; d < p.W && p.written[cell]; d++) {
                        const float x = kvq_f16_to_f32(rows[(size_t) i * p.W + d]), y = p.value[cell * p.W + d];
                        CHECK(fabsf(x - y) <= bound, "after %s: cell %zu channel %d is %g, was %g, bound %g", after,
                            cell, d, x, y, bound);
                    }
                }
            }
        }
    }
}

// pages that hold quantised values: what is decoded now becomes the reference, the slack grows
static void absorb(world & w, int li, int v, int s, int page) {
    layer_under_test & layer = w.layer[li];
    kvq_lane & lane = *layer.lane[v];
    if (lane.state(s, page) != KVQ_PAGE_SEALED) { return; }
    const int pc = lane.layout().page_cells;
    for (int t = 0; t < pc && page * pc + t < w.c.n_cells; t++) {
        layer.plain[v].slack[(size_t) s * w.c.n_cells + page * pc + t] += seal_error(lane.layout(), layer.plain[v]);
    }
}

static void commit(world & w) {
    for (auto & layer : w.layer) {
        layer.lane[0]->commit(uniform(1, 2));
        layer.lane[1]->commit(1);
    }
}

static void write(world & w, std::vector<int64_t> idx) {
    std::vector<float> rows;
    for (int li = 0; li < 2; li++) {
        for (int v = 0; v < 2; v++) {
            plain_lane & p = w.layer[li].plain[v];
            const int pc = w.layer[li].lane[v]->layout().page_cells;
            std::vector<int> pages;
            for (int64_t i : idx) {
                const int page = (int) (i / w.c.n_cells) * 100000 + (int) (i % w.c.n_cells) / pc;
                if (std::find(pages.begin(), pages.end(), page) == pages.end()) {
                    pages.push_back(page);
                    for (int k = li; k < 2; k++) { // reopening decodes a sharer too
                        absorb(w, k, v, page / 100000, page % 100000);
                    }
                }
            }
            rows.resize(idx.size() * p.W);
            for (size_t i = 0; i < idx.size(); i++) {
                for (int d = 0; d < p.W; d++) {
                    const float x = kvq_f16_to_f32(kvq_f32_to_f16(std::uniform_real_distribution<float>(-1, 1)(rng)));
                    rows[i * p.W + d] = x;
                    p.value[idx[i] * p.W + d] = x;
                }
                p.slack[idx[i]] = 0;
                p.written[idx[i]] = true;
            }
            // a lane that adopts these codes must keep what it holds, to the image's low bits, or have rows again that
            // were rounded since (reopened.h)
            std::vector<uint16_t> before, after;
            const kvq_lane & sharer = *w.layer[1].lane[v];
            const bool shared = li == 0 && sharer.layout().shares_codes;
            const int s0 = (int) (idx[0] / w.c.n_cells);
            if (shared) {
                before.resize((size_t) w.c.n_cells * p.W);
                sharer.read(s0, 0, w.c.n_cells, before.data());
            }
            w.layer[li].lane[v]->write((int64_t) idx.size(), idx.data(), rows.data(), p.W, uniform(1, 2));
            if (shared) {
                after.resize(before.size());
                sharer.read(s0, 0, w.c.n_cells, after.data());
                for (size_t i = 0; i < before.size(); i++) {
                    const float x = kvq_f16_to_f32(before[i]), y = kvq_f16_to_f32(after[i]);
                    const float slack = w.layer[1].plain[v].slack[(size_t) s0 * w.c.n_cells + i / p.W];
                    CHECK(fabsf(x - y) <= 0.01f * fabsf(x) + 1e-6f + slack,
                        "writing layer 0 changed layer 1: %g became %g", x, y);
                }
            }
        }
    }
}

// keys and values of a sealed page hold one set
static void check_sets(world & w) {
    for (auto & layer : w.layer) {
        const kvq_lane_layout &lk = layer.lane[0]->layout(), &lv = layer.lane[1]->layout();
        for (const kvq_page & p : layer.spans.spans) {
            for (int h = 0; lk.codec.type == KVQ_TYPE_MIXED && p.k_params && p.v_params && h < w.c.n_head; h++) {
                const uint8_t *a = (const uint8_t *) p.k_params + h * lk.nb_params,
                              *b = (const uint8_t *) p.v_params + h * lv.nb_params;
                CHECK(!memcmp(a, b, (size_t) lk.page_cells / 8), "keys and values of cell %d have different sets",
                    p.cell);
            }
        }
    }
}

// What a lane whose window fills its room holds lies apart, inside its pool; after a commit nothing is in scratch.
static void check_pool(world & w, const char * after, bool committed) {
    for (auto & layer : w.layer) {
        for (auto & lane : layer.lane) {
            const kvq_lane_layout & l = lane->layout();
            for (int s = 0; l.pooled && s < w.c.n_stream; s++) {
                std::vector<std::pair<const uint8_t *, const uint8_t *>> taken;
                for (int p = 0; p < l.n_pages; p++) {
                    const kvq_page_info & i = lane->info(s, p);
                    const kvq_page & span = layer.spans.spans[(size_t) s * layer.spans.n_pages + p];
                    const void * at = lane->is_value() ? span.v_codes : span.k_codes;
                    if (i.state == KVQ_PAGE_SEALED) {
                        const uint8_t *c = lane->codes_at(s, p, 0), *q = lane->params_at(s, p, 0);
                        CHECK(at == c, "after %s: page %d is read elsewhere than its codes are", after, p);
                        if (!l.shares_codes) { taken.emplace_back(c, c + l.nb_codes * l.n_head); }
                        taken.emplace_back(q, q + l.nb_params * l.n_head);
                    } else if (i.state == KVQ_PAGE_OPEN) {
                        CHECK(at == i.frame, "after %s: page %d is read elsewhere than its rows are", after, p);
                        CHECK(i.own >= 0 || !committed, "after %s: page %d is still in scratch", after, p);
                        if (i.own >= 0) { taken.emplace_back((uint8_t *) i.frame, (uint8_t *) i.frame + l.nb_frame); }
                    }
                }
                std::sort(taken.begin(), taken.end());
                for (size_t i = 1; i < taken.size(); i++) {
                    CHECK(taken[i - 1].second <= taken[i].first, "after %s: two pages share bytes", after);
                }
                CHECK(taken.empty() || (size_t) (taken.back().second - taken[0].first) <= l.nb_pool,
                    "after %s: pages lie outside of the pool", after);
            }
        }
    }
}

static void save_and_restore(world & w) {
    commit(w);
    world other;
    build(other, w.c);
    for (int v = 0; v < 2; v++) {
        for (int li = 0; li < 2; li++) {
            plain_lane & p = w.layer[li].plain[v];
            for (int s = 0; s < w.c.n_stream; s++) {
                // the cells in use, as llama.cpp saves them: a prefix
                int n = 0;
                while (n < w.c.n_cells && p.written[(size_t) s * w.c.n_cells + n]) { n++; }
                if (!n) { continue; }
                std::vector<uint16_t> saved((size_t) n * p.W), again(saved.size());
                w.layer[li].lane[v]->read(s, 0, n, saved.data());
                other.layer[li].lane[v]->restore(s, 0, n, saved.data(), 1);
                other.layer[li].lane[v]->read(s, 0, n, again.data());
                const int pc = w.layer[li].lane[v]->layout().page_cells;
                for (int page = 0; page < n / pc; page++) { // whole pages sealed on both sides are the same block
                    const bool sealed = w.layer[li].lane[v]->state(s, page) == KVQ_PAGE_SEALED;
                    bool exact = other.layer[li].lane[v]->state(s, page) == w.layer[li].lane[v]->state(s, page);
                    CHECK(p.far >= 0 || !sealed || exact, "restored page %d of layer %d is not sealed", page, li);
                    // as many pages as were exact are, unless one that was sealed came in part
                    const bool whole = n % pc == 0 || w.layer[li].lane[v]->state(s, n / pc) == KVQ_PAGE_OPEN;
                    CHECK(exact || !whole || !w.layer[li].lane[v]->layout().pooled,
                        "restored page %d of layer %d is not open", page, li);
                    exact = p.far >= 0 ? p.far == KVQ_FAR_F16 : exact; // a second tier gives rows, sealed or not
                    const bool same = !memcmp(
                        &saved[(size_t) page * pc * p.W], &again[(size_t) page * pc * p.W], 2 * (size_t) pc * p.W);
                    CHECK(!exact || same, "restored page %d of layer %d %s differs (sealed %d)", page, li,
                        v ? "V" : "K", sealed);
                }
            }
        }
    }
}

// llama.cpp copies whole streams as rows where heads are split: pages without cells come as zeros.
static void copy_whole_streams(world & w) {
    commit(w);
    world other;
    build(other, w.c);
    for (int v = 0; v < 2; v++) {
        for (int li = 0; li < 2; li++) {
            kvq_lane &from = *w.layer[li].lane[v], &to = *other.layer[li].lane[v];
            std::vector<uint16_t> rows((size_t) w.c.n_cells * w.layer[li].plain[v].W);
            for (int s = 0; s < w.c.n_stream; s++) {
                from.read(s, 0, w.c.n_cells, rows.data());
                to.restore(s, 0, w.c.n_cells, rows.data(), 1);
                const kvq_lane_layout & l = from.layout();
                const auto has_cells = [&](int p) { return from.state(s, p) != KVQ_PAGE_EMPTY; };
                bool any = false;
                for (int p = 0; p < l.n_pages; p++) { any = any || has_cells(p); }
                for (int p = 0; p < l.n_pages && any && l.codec.bits; p++) {
                    CHECK(!has_cells(p) || to.state(s, p) != KVQ_PAGE_EMPTY, "%s page %d lost its cells",
                        v ? "value" : "key", p);
                    CHECK(has_cells(p) || (p + 1) * l.page_cells > w.c.n_cells || to.state(s, p) == KVQ_PAGE_EMPTY,
                        "%s page %d without cells came as one of zeros", v ? "value" : "key", p);
                }
            }
        }
    }
}

// attention over the spans against f64 over the decoded pages
static void attend(world & w) {
    const int li = uniform(0, 1), s = uniform(0, w.c.n_stream - 1);
    layer_under_test & layer = w.layer[li];
    const kvq_lane_layout &lk = layer.lane[0]->layout(), &lv = layer.lane[1]->layout();
    const int n_q = uniform(1, 3), gqa = uniform(1, 4), n_head = gqa * w.c.n_head, n_kv = uniform(1, w.c.n_cells);
    std::vector<float> q((size_t) n_q * n_head * w.c.dk), dst((size_t) n_q * n_head * w.c.dv, NAN);
    for (float & x : q) { x = std::uniform_real_distribution<float>(-1, 1)(rng); }
    std::vector<uint16_t> mask((size_t) n_q * n_kv);
    for (size_t i = 0; i < mask.size(); i++) {
        mask[i] = layer.plain[0].written[(size_t) s * w.c.n_cells + i % n_kv] && uniform(0, 9) ? 0 : 0xfc00;
    }
    kvq_attn a = {};
    a.k = lk.codec;
    a.v = lv.codec;
    a.n_q = n_q;
    a.n_head = n_head;
    a.n_head_kv = w.c.n_head;
    a.n_kv = n_kv;
    a.flags = KVQ_ATTN_F32;
    a.scale = 1.0f / sqrtf((float) w.c.dk);
    a.q = q.data();
    a.q_stride_token = (int64_t) n_head * w.c.dk;
    a.q_stride_head = w.c.dk;
    a.mask = mask.data();
    a.mask_stride_token = n_kv;
    a.dst = dst.data();
    a.dst_stride_token = (int64_t) n_head * w.c.dv;
    a.dst_stride_head = w.c.dv;
    a.n_pages = (n_kv + lk.page_cells - 1) / lk.page_cells;
    a.pages = layer.spans.spans.data() + (size_t) s * layer.spans.n_pages;
    std::vector<float> lse((size_t) n_q * n_head);
    a.lse = layer.probe ? lse.data() : nullptr;
    for (const auto & x : layer.policies) {
        if (dynamic_cast<kvq_fetcher *>(x.get())) { x->spans(a, s); }
    }
    if (a.far && (a.far->top < w.c.n_cells || a.far->fetch == KVQ_FETCH_AHEAD)) { // picks: test_specache.py
        CHECK(kvq_attend(&a, 1, uniform(1, 2)) == KVQ_OK, "attend");
        for (float x : dst) { CHECK(std::isfinite(x), "attention over two tiers"); }
        a.far = nullptr;
    }
    CHECK(kvq_attend(&a, 1, uniform(1, 2)) == KVQ_OK, "attend");
    if (a.lse) { layer.probe->observe(a, s, (uint64_t) layer.lane[0]->first_written(s), uniform(1, 2)); }

    // what the pages decode to; read() would return saved-state images
    std::vector<float> kv[2];
    for (int v = 0; v < 2; v++) {
        const kvq_lane_layout & l = v ? lv : lk;
        const int D = l.codec.head_size, stride = l.head_stride();
        kv[v].assign((size_t) w.c.n_cells * w.c.n_head * D, 0.0f);
        std::vector<uint16_t> rows((size_t) l.page_cells * D);
        for (int p = 0; p < a.n_pages; p++) {
            const kvq_page & page = a.pages[p];
            for (int h = 0; page.n_slots && h < w.c.n_head; h++) {
                const uint8_t *codes = (const uint8_t *) (v ? page.v_codes : page.k_codes),
                              *params = (const uint8_t *) (v ? page.v_params : page.k_params);
                if (params) { kvq_decode(&l.codec, codes + h * l.nb_codes, params + h * l.nb_params, rows.data()); }
                for (int t = 0; t < l.page_cells && p * l.page_cells + t < w.c.n_cells; t++) {
                    for (int d = 0; d < D; d++) {
                        const uint16_t x = params
                            ? rows[(size_t) t * D + d]
                            : ((const uint16_t *) codes)[((size_t) h * l.page_cells + t) * stride + d];
                        kv[v][((size_t) (p * l.page_cells + t) * w.c.n_head + h) * D + d] = kvq_f16_to_f32(x);
                    }
                }
            }
            if (a.far && page.n_slots && page.k_params && page.v_params) { // all of it comes from far
                const int n = std::min(l.page_cells, w.c.n_cells - p * l.page_cells), W = w.c.n_head * D;
                rows.resize((size_t) n * W);
                layer.lane[v]->read(s, p * l.page_cells, n, rows.data());
                for (int i = 0; i < n * W; i++) { kv[v][(size_t) p * l.page_cells * W + i] = kvq_f16_to_f32(rows[i]); }
                rows.resize((size_t) l.page_cells * D);
            }
        }
    }
    for (int iq = 0; iq < n_q; iq++) {
        for (int h = 0; h < n_head; h++) {
            std::vector<double> o(w.c.dv, 0.0);
            double sum = 0;
            for (int t = 0; t < n_kv; t++) {
                if (mask[(size_t) iq * n_kv + t]) { continue; }
                double x = 0;
                for (int d = 0; d < w.c.dk; d++) {
                    x += (double) q[((size_t) iq * n_head + h) * w.c.dk + d] *
                        kv[0][((size_t) t * w.c.n_head + h / gqa) * w.c.dk + d];
                }
                const double e = exp(x * a.scale);
                sum += e;
                for (int d = 0; d < w.c.dv; d++) {
                    o[d] += e * kv[1][((size_t) t * w.c.n_head + h / gqa) * w.c.dv + d];
                }
            }
            for (int d = 0; d < w.c.dv; d++) {
                const float y = dst[((size_t) iq * n_head + h) * w.c.dv + d];
                const double want = sum > 0 ? o[d] / sum : 0.0;
                CHECK(std::isfinite(y) && fabs(y - want) < 1e-4,
                    "attention: query %d head %d channel %d is %g, want %g", iq, h, d, y, want);
            }
        }
    }
}

static void run(const config & c, unsigned seed, int steps) {
    rng.seed(seed);
    setenv("KVQ_FAR_LIMIT", c.far_limit, 1);
    world w;
    build(w, c);
    std::vector<int> head(c.n_stream, 0);
    for (int step = 0; step < steps; step++) {
        const int op = uniform(0, 99), s = uniform(0, c.n_stream - 1);
        const char * name = "write";
        if (op < 70) { // a ubatch: decode steps, prompts; sometimes several streams
            std::vector<int64_t> idx;
            for (int t = s; t < (uniform(0, 3) ? s + 1 : c.n_stream); t++) {
                const int n = std::min(uniform(0, 9) ? uniform(1, 4) : uniform(1, 300), c.n_cells - head[t]);
                for (int i = 0; i < n; i++) { idx.push_back((int64_t) t * c.n_cells + head[t]++); }
                if (head[t] == c.n_cells) { head[t] = 0; }
            }
            write(w, idx);
            if (uniform(0, 2)) { attend(w); }
            commit(w);
        } else if (op < 78) { // rollback: the last cells are written again
            name = "rollback";
            head[s] = std::max(0, head[s] - uniform(1, 8));
        } else if (op < 82) { // freed cells anywhere are reused
            name = "overwrite";
            std::vector<int64_t> idx;
            const int at = uniform(0, c.n_cells - 1), n = std::min(uniform(1, 70), c.n_cells - at);
            for (int i = 0; i < n; i++) {
                if (w.layer[0].plain[0].written[(size_t) s * c.n_cells + at + i] || uniform(0, 1)) {
                    idx.push_back((int64_t) s * c.n_cells + at + i);
                }
            }
            if (!idx.empty()) {
                write(w, idx);
                attend(w);
                commit(w);
            }
        } else if (op < 86) { // negation stands for the rotation of a context shift: exact in f16
            name = "shift";
            const int a = uniform(0, c.n_cells - 1), b = uniform(a, c.n_cells - 1);
            commit(w);
            for (int li = 0; li < 2; li++) {
                plain_lane & p = w.layer[li].plain[0];
                const int pc = w.layer[li].lane[0]->layout().page_cells;
                for (int page = a / pc; page <= b / pc; page++) {
                    for (int k = li; k < 2; k++) { absorb(w, k, 0, s, page); }
                }
                w.layer[li].lane[0]->edit(
                    s, [&](int cell) { return cell >= a && cell <= b; },
                    [&](int cell, int, uint16_t * row) {
                        for (int d = 0; cell >= a && cell <= b && d < c.dk; d++) { row[d] ^= 0x8000; }
                    });
                for (int cell = a; cell <= b; cell++) {
                    for (int d = 0; d < p.W; d++) { p.value[((size_t) s * c.n_cells + cell) * p.W + d] *= -1; }
                }
            }
        } else if (op < 90 && c.n_stream > 1) {
            name = "copy";
            const int to = (s + 1) % c.n_stream;
            commit(w);
            for (auto & layer : w.layer) {
                for (int v = 0; v < 2; v++) {
                    plain_lane & p = layer.plain[v];
                    layer.lane[v]->copy_stream(s, to);
                    std::copy_n(p.value.begin() + (long) s * c.n_cells * p.W, (size_t) c.n_cells * p.W,
                        p.value.begin() + (long) to * c.n_cells * p.W);
                    std::copy_n(
                        p.slack.begin() + (long) s * c.n_cells, c.n_cells, p.slack.begin() + (long) to * c.n_cells);
                    std::copy_n(
                        p.written.begin() + (long) s * c.n_cells, c.n_cells, p.written.begin() + (long) to * c.n_cells);
                }
            }
            head[to] = head[s];
            commit(w);
        } else if (op < 93) {
            name = "save";
            save_and_restore(w);
            copy_whole_streams(w);
        } else if (op < 99 && w.layer[0].lane[0]->layout().pooled) {
            name = "free";
            commit(w);
            const int from = uniform(0, 2) ? uniform(0, head[s]) : 0;
            for (auto & layer : w.layer) {
                for (int v = 0; v < 2; v++) {
                    const int pc = layer.lane[v]->layout().page_cells, first = (from + pc - 1) / pc * pc;
                    layer.lane[v]->free_from(s, from);
                    for (int cell = first; cell < c.n_cells; cell++) {
                        layer.plain[v].written[(size_t) s * c.n_cells + cell] = false;
                        layer.plain[v].slack[(size_t) s * c.n_cells + cell] = 0;
                    }
                }
            }
            head[s] = from;
        } else if (op == 99 && !uniform(0, 3)) {
            name = "clear";
            for (auto & layer : w.layer) {
                for (int v = 0; v < 2; v++) {
                    layer.lane[v]->clear();
                    layer.plain[v].written.assign(w.n_total(), false);
                    layer.plain[v].slack.assign(w.n_total(), 0.0f);
                }
            }
            head.assign(c.n_stream, 0);
        }
        check_pool(w, name, op < 70);
        if (step % 5 == 0) {
            check_sets(w);
            compare(w, name);
        }
    }
    compare(w, "the end");
    std::string trouble;
    for (const auto & x : w.layer[1].policies) { trouble += x->trouble(); }
    CHECK(trouble.empty() == !*c.far_limit, "the second tier says: %s", trouble.c_str());
    CHECK(!strcmp(c.method, "f16") || w.cache.counters.n_sealed > 20, "only %d pages were sealed",
        (int) w.cache.counters.n_sealed);
    printf("%-8s %-34s seed %u: %d steps, %d sealed, %d reopened, %d forced\n", c.method, c.opts, seed, steps,
        (int) w.cache.counters.n_sealed, (int) w.cache.counters.n_reopened, (int) w.cache.counters.n_forced);
}

// What a control group allows, from files as Linux writes them.
static void test_groups() {
    const kvq_group_names now = { "/memory.max", "/memory.current", "inactive_file" };
    const kvq_group_names before = { "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file" };
    char folder[] = "/tmp/kvq-groups-XXXXXX";
    CHECK(mkdtemp(folder), "no folder %s", folder);
    const std::string at = folder;
    const auto write_file = [&](const char * name, const char * text) { std::ofstream(at + name) << text; };
    const auto room = [&](const kvq_group_names & names) { return kvq_room_in_group(at, names); };
    CHECK(room(now) == SIZE_MAX && room(before) == SIZE_MAX, "an empty folder limits memory");
    write_file("/memory.current", "900\n");
    write_file("/memory.stat", "anon 700\nactive_file 100\ninactive_file 50\ntotal_inactive_file 60\n");
    write_file("/memory.max", "max\n");
    CHECK(room(now) == SIZE_MAX, "no limit is %zu", room(now));
    write_file("/memory.max", "1000\n");
    CHECK(room(now) == 150, "1000 of which 900 are taken, 50 by files: %zu", room(now));
    write_file("/memory.max", "800\n");
    CHECK(room(now) == 0, "more is taken than the limit: %zu", room(now));
    write_file("/memory.usage_in_bytes", "400\n");
    write_file("/memory.limit_in_bytes", "9223372036854771712\n");
    CHECK(room(before) == SIZE_MAX, "version 1 without a limit: %zu", room(before));
    write_file("/memory.limit_in_bytes", "500\n");
    CHECK(room(before) == 160, "version 1: %zu", room(before));
    for (const char * name :
        { "/memory.current", "/memory.stat", "/memory.max", "/memory.usage_in_bytes", "/memory.limit_in_bytes" }) {
        remove((at + name).c_str());
    }
    CHECK(rmdir(folder) == 0, "%s is not empty", folder);
    CHECK(kvq_host_available() > (size_t) 16 << 20, "this process has %zu bytes left", kvq_host_available());
}

// Blocks of a lane follow each other, whoever else takes some between; when memory ends, those that one lane has not
// needed serve another.
static void test_far_pool() {
    constexpr size_t NB = 4096, N = 300; // two lanes of so many
    setenv("KVQ_FAR_LIMIT", "1", 1);     // MiB: 256 blocks
    kvq_far_pool pool(kvq_cpu_device(), "host", 2 * N * NB);
    CHECK(pool.ok(), "%s", pool.error().c_str());
    std::vector<uint8_t *> of[2];
    int lane[2];
    for (size_t i = 0; i < 100; i++) {
        for (int x = 0; x < 2; x++) { of[x].push_back((uint8_t *) pool.take(NB, &lane[x], N)); }
    }
    for (const auto & blocks : of) {
        int n_breaks = 0;
        for (size_t i = 1; i < blocks.size(); i++) { n_breaks += blocks[i] != blocks[i - 1] + NB; }
        CHECK(n_breaks < 8, "100 blocks lie in %d pieces", n_breaks + 1);
    }
    while (void * p = pool.take(NB, &lane[0], N)) { of[0].push_back((uint8_t *) p); }
    CHECK(of[0].size() + of[1].size() == 256, "%zu blocks of 256 were had", of[0].size() + of[1].size());
    CHECK(!pool.error().empty(), "memory ended and nothing is said");
    std::set<void *> all(of[0].begin(), of[0].end());
    all.insert(of[1].begin(), of[1].end());
    CHECK(all.size() == 256, "a block was given twice");
    for (uint8_t * p : of[1]) { pool.give(p, NB, &lane[1]); }
    pool.leave(NB, &lane[1]);
    int other = 0;
    std::set<void *> again;
    for (size_t i = 0; i < of[1].size(); i++) { again.insert(pool.take(NB, &other, N)); }
    CHECK(again == std::set<void *>(of[1].begin(), of[1].end()), "what a lane left is not used again");
    setenv("KVQ_FAR_LIMIT", "", 1);
}

int main(int argc, char ** argv) {
    test_groups();
    test_reopened();
    test_far_pool();
    const unsigned seed = argc > 1 ? (unsigned) atoi(argv[1]) : 42;
    const int steps = argc > 2 ? atoi(argv[2]) : 1500;
    const config configs[] = {
        { "f16", "", 2, 64, 64, 512, 2 },
        { "kivi", "", 2, 64, 64, 512, 2 },
        { "kivi", "bits=4,group=128,group_v=64", 1, 64, 80, 640, 1 },
        { "kivi", "bits=3,group=64,scales=u8,sinks=4", 1, 80, 64, 512, 2 },
        { "kivi", "bits=1,levels=mid,window=0", 2, 64, 64, 256, 3 },
        { "xquant", "kq=2,vq=0,km=0,vm=0", 2, 64, 64, 512, 2 },
        { "xquant", "kq=0,vq=0,km=0,vm=0,shared=none", 1, 64, 64, 512, 1 },
        { "xquant", "kq=0,vq=2,km=0,vm=2,group=16,window=32", 1, 96, 64, 512, 2 },
        { "zipcache", "probe=0.5", 2, 64, 64, 640, 2 },
        { "specache", "top=1024", 2, 64, 64, 512, 2 },
        { "specache", "near=kivi,k_bits=2,v_bits=1,group=128,window=0,sinks=0,top=1024,far=q8", 1, 80, 64, 640, 2 },
        { "specache", "preset=paper1,fetch=ahead", 2, 64, 64, 512, 3 },
        { "specache", "bits=1,grid=d8,far=q4,top=1024,window=32", 1, 96, 96, 512, 1 },
        { "specache", "top=1024,window=32", 2, 64, 64, 768, 2, "1" }, // a third of the memory that it asks for
        { "zipcache", "interval=64,salient=0.5,hi=3,window=64,sinks=4,scales=f16", 1, 64, 96, 448, 2 },
        { "kivi", "window=auto", 2, 64, 64, 1024, 2 },
        { "kivi", "bits=1,group=64,window=auto,sinks=4", 1, 64, 96, 832, 3 },
        { "kivi", "bits=4,scales=u8,window=auto", 1, 80, 64, 640, 2 },
        { "xquant", "kq=2,vq=0,km=0,vm=0,window=auto", 2, 64, 64, 1024, 2 },
    };
    for (const config & c : configs) { run(c, seed, steps); }
    return 0;
}

// Lanes that evict (policy/evict.h), one layer: what stays of a prompt against an explicit softmax, attention against
// what read() returns, and random operations. Usage: test_slots [seed] [steps]
#include "layer.h"
#include "base/f16.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>

static const char *const ZIP_32 = "zipcache:interval=32,salient=1,keep=0.5",
                         *const ZIP_64 = "zipcache:interval=64,salient=0.5,keep=0.5";
constexpr int HEADS = 2, GQA = 2, D = 32, W = HEADS * D;

struct world : composed_layer {
    cache_of_layers cache;
    int n_cells, n_stream;
    bool tells = true;                   // how many cells are in use,
    int pad = 64;                        // a multiple of this
    std::vector<std::vector<bool>> live; // cells that the caller has not freed
    std::vector<double> column;          // of the last attend: [HEADS][n_cells] sums of probabilities
};

// spec: options of minikv, or METHOD:OPTIONS
static std::unique_ptr<world> build(const char * spec, int n_cells, int n_stream) {
    std::unique_ptr<world> w(new world);
    const char *colon = strchr(spec, ':'), *opts = colon ? colon + 1 : spec;
    const std::string method = colon ? std::string(spec, colon) : "minikv";
    kvq_layer_plan plan = plan_of(method.c_str(), opts, { 0, 2, { 0, HEADS, D, D }, nullptr });
    plan.flags = KVQ_ATTN_F32;
    w->make(w->cache, plan, HEADS, n_cells, n_stream);
    w->n_cells = n_cells;
    w->n_stream = n_stream;
    w->live.assign((size_t) n_stream, std::vector<bool>((size_t) n_cells, false));
    return w;
}

static bool evicted(const uint16_t * row) {
    return std::all_of(row, row + D, [](uint16_t x) { return x == 0x8000; });
}

// Attention in f64 over the cells that are seen, rows W apart: weights p [n_cells] and their sum of v, out [D].
// The sanitizers look at the library, not at this loop, which would take a third of the run.
__attribute__((no_sanitize("address", "undefined"))) static void softmax_of_rows(int n_cells, float scale,
    const float * q, const float * k, const float * v, const uint8_t * seen, double * p, double * out) {
    double sum = 0;
    for (int c = 0; c < n_cells; c++) {
        if (!seen[c]) { continue; }
        double x = 0;
        for (int d = 0; d < D; d++) { x += (double) q[d] * k[(size_t) c * W + d]; }
        sum += p[c] = exp(x * scale);
    }
    for (int c = 0; c < n_cells; c++) {
        if (p[c] == 0.0) { continue; }
        p[c] /= sum;
        for (int d = 0; d < D; d++) { out[d] += p[c] * v[(size_t) c * W + d]; }
    }
}

// n rows into the cells from `first` on, attended causally, then sealed. The output must be the softmax over the live
// rows that read() returns before the commit.
static void decode(world & w, int s, int first, int n, bool check) {
    std::vector<int64_t> idx((size_t) n);
    std::vector<float> rows((size_t) n * W);
    std::normal_distribution<float> normal;
    for (int i = 0; i < n; i++) { idx[(size_t) i] = (int64_t) s * w.n_cells + first + i; }
    for (int v = 0; v < 2; v++) {
        for (float & x : rows) { x = normal(rng); }
        w.lane[v]->write(n, idx.data(), rows.data(), W, 1);
    }
    for (int i = 0; i < n; i++) { w.live[(size_t) s][(size_t) (first + i)] = true; }
    if (w.slots && w.tells) { // as llama.cpp, which asks for the cells in use
        int end = w.n_cells;
        while (!w.live[(size_t) s][(size_t) (end - 1)]) { end--; }
        w.slots->limit(s, std::min((end + w.pad - 1) / w.pad * w.pad, w.n_cells));
    }

    const int heads = HEADS * GQA;
    std::vector<float> q((size_t) n * heads * D), dst(q.size(), NAN), lse((size_t) n * heads);
    for (float & x : q) { x = 2.0f * normal(rng); }
    std::vector<uint16_t> mask((size_t) n * w.n_cells);
    for (int i = 0; i < n; i++) {
        for (int c = 0; c < w.n_cells; c++) {
            const bool later = c > first + i && c < first + n;
            mask[(size_t) i * w.n_cells + c] = w.live[(size_t) s][(size_t) c] && !later ? 0 : 0xfc00;
        }
    }
    kvq_attn a = {};
    a.k = w.lane[0]->layout().codec;
    a.v = w.lane[1]->layout().codec;
    a.n_q = n;
    a.n_head = heads;
    a.n_head_kv = HEADS;
    a.n_kv = w.n_cells;
    a.flags = KVQ_ATTN_F32;
    a.scale = 1.0f / sqrtf((float) D);
    a.q = q.data();
    a.q_stride_token = heads * D;
    a.q_stride_head = D;
    a.mask = mask.data();
    a.mask_stride_token = w.n_cells;
    a.dst = dst.data();
    a.dst_stride_token = heads * D;
    a.dst_stride_head = D;
    a.n_pages = w.spans.n_pages;
    a.pages = w.spans.spans.data() + (size_t) s * w.spans.n_pages;
    a.lse = lse.data();
    a.map_stride = w.lane[0]->layout().page_cells;
    CHECK(kvq_attend(&a, 1, uniform(1, 2)) == KVQ_OK, "attend");
    if (w.probe) { w.probe->observe(a, s, (uint64_t) first, uniform(1, 2)); }
    if (check) {
        std::vector<uint16_t> kv[2];
        for (int v = 0; v < 2; v++) {
            kv[v].resize((size_t) w.n_cells * W);
            w.lane[v]->read(s, 0, w.n_cells, kv[v].data());
            if (w.slots) { w.slots->read(v, s, 0, w.n_cells, kv[v].data(), false); }
        }
        std::vector<float> f32[2];
        std::vector<bool> gone((size_t) w.n_cells * HEADS);
        for (int v = 0; v < 2; v++) {
            for (uint16_t x : kv[v]) { f32[v].push_back(kvq_f16_to_f32(x)); }
        }
        for (size_t i = 0; i < gone.size(); i++) { gone[i] = evicted(&kv[0][i * D]); }
        w.column.assign((size_t) HEADS * w.n_cells, 0.0);
        std::vector<uint8_t> seen((size_t) w.n_cells);
        for (int i = 0; i < n; i++) {
            for (int h = 0; h < heads; h++) {
                std::vector<double> p((size_t) w.n_cells, 0.0), out(D, 0.0);
                for (int c = 0; c < w.n_cells; c++) {
                    seen[(size_t) c] = !mask[(size_t) i * w.n_cells + c] && !gone[(size_t) c * HEADS + h / GQA];
                }
                const size_t at = (size_t) (h / GQA) * D;
                softmax_of_rows(w.n_cells, a.scale, &q[((size_t) i * heads + h) * D], &f32[0][at], &f32[1][at],
                    seen.data(), p.data(), out.data());
                for (int c = 0; c < w.n_cells; c++) { w.column[(size_t) (h / GQA) * w.n_cells + c] += p[(size_t) c]; }
                for (int d = 0; d < D; d++) {
                    const float y = dst[((size_t) i * heads + h) * D + d];
                    CHECK(std::isfinite(y) && fabs(y - out[(size_t) d]) < 2e-4,
                        "cell %d head %d channel %d: %g, want %g", first + i, h, d, y, out[(size_t) d]);
                }
            }
        }
    }
    w.lane[0]->commit(uniform(1, 2));
    w.lane[1]->commit(uniform(1, 2));
    CHECK(!w.slots || w.slots->n_used(s) <= w.lane[0]->layout().n_store, "more pages than there are");
}

static std::vector<bool> kept(world & w, int s, int h, int n) {
    std::vector<uint16_t> rows((size_t) n * W);
    w.lane[0]->read(s, 0, n, rows.data());
    std::vector<bool> out;
    for (int c = 0; c < n; c++) { out.push_back(!evicted(&rows[(size_t) c * W + (size_t) h * D])); }
    return out;
}

static int count(const std::vector<bool> & x, size_t from = 0) {
    return (int) std::count(x.begin() + (long) from, x.end(), true);
}

// A prompt in one call: the window, and of the rest the cells of the largest column sums, per head.
static void one_prompt() {
    auto w = build("", 1024, 1);
    decode(*w, 0, 0, 512, true);
    for (int h = 0; h < HEADS; h++) {
        std::vector<int> order;
        for (int c = 0; c < 384; c++) { order.push_back(c); }
        const double * sums = &w->column[(size_t) h * w->n_cells];
        std::sort(order.begin(), order.end(), [&](int a, int b) { return sums[a] > sums[b]; });
        const std::vector<bool> k = kept(*w, 0, h, 512);
        CHECK(count(k) == 256 && count(k, 384) == 128, "head %d keeps %d cells, %d of the newest 128", h, count(k),
            count(k, 384));
        for (int i = 0; i < 128; i++) {
            const bool tie = sums[order[(size_t) i]] - sums[order[128]] < 1e-4 * sums[order[128]];
            CHECK(k[(size_t) order[(size_t) i]] || tie, "head %d lost cell %d, number %d of %g", h, order[(size_t) i],
                i, sums[order[(size_t) i]]);
        }
    }
    std::vector<bool> before = kept(*w, 0, 0, 512);
    // generated cells stay, and so does what was kept
    for (int c = 512; c < 768; c++) { decode(*w, 0, c, 1, c % 40 == 0); }
    CHECK(kept(*w, 0, 0, 512) == before, "generation changed the kept cells");
    CHECK(count(kept(*w, 0, 0, 768), 512) == 256, "a generated cell was evicted");
    for (int c = 768; c < 1024; c++) { decode(*w, 0, c, 1, c % 40 == 0); } // full: of the prompt first
    CHECK(count(kept(*w, 0, 0, 1024), 512) == 512, "a generated cell was evicted before the prompt");
    CHECK(count(kept(*w, 0, 0, 512)) < count(before), "nothing was evicted from a full cache");
}

// A prompt that arrives in pieces, beyond what fits: budget and window hold after every piece.
static void long_prompt(const char * opts, float keep, float recent) {
    auto w = build(opts, 2048, 1);
    for (int at = 0; at < 2048; at += 256) {
        decode(*w, 0, at, 256, at % 512 == 0);
        const int t = at + 256;
        for (int h = 0; h < HEADS; h++) {
            const std::vector<bool> k = kept(*w, 0, h, t);
            CHECK(count(k) <= std::max(keep * t, 128.0f + 32) + 32, "%s: %d of %d cells are kept", opts, count(k), t);
            CHECK(count(k, t - 128) == 128, "%s: a cell of the window was evicted", opts);
            const int first = t - (int) (recent * t) + 64; // pages straddle the limit
            CHECK(first >= t || count(k, first) == t - first, "%s: %d of the newest %d cells are kept", opts,
                count(k, first), t - first);
        }
    }
}

// Everything kept: the blocks of kivi with groups of 16.
static void all_kept() {
    auto a = build("hh=0.75", 1024, 1), b = build("kivi:group=16,scales=u8", 1024, 1);
    for (auto * w : { a.get(), b.get() }) {
        rng.seed(5);
        for (int at = 0; at < 512; at += 128) {
            std::vector<int64_t> idx;
            std::vector<float> rows(128 * W);
            for (int i = 0; i < 128; i++) { idx.push_back(at + i); }
            for (int v = 0; v < 2; v++) {
                for (float & x : rows) { x = std::normal_distribution<float>()(rng); }
                w->lane[v]->write(128, idx.data(), rows.data(), W, 1);
            }
            w->lane[0]->commit(1);
            w->lane[1]->commit(1);
        }
    }
    for (int v = 0; v < 2; v++) {
        const kvq_lane_layout & l = a->lane[v]->layout();
        for (int p = 0; p < 12; p++) {
            CHECK(b->lane[v]->state(0, p) == KVQ_PAGE_SEALED && a->spans.spans[(size_t) l.n_pages + p].map[0] == 32 * p,
                "page %d is not sealed", p);
            CHECK(!memcmp(a->lane[v]->codes_at(0, p, 0), b->lane[v]->codes_at(0, p, 0), l.nb_codes * HEADS),
                "codes of page %d differ", p);
            CHECK(!memcmp(a->lane[v]->params_at(0, p, 0), b->lane[v]->params_at(0, p, 0), l.nb_params * HEADS),
                "parameters of page %d differ", p);
        }
    }
}

static void save_and_restore(world & w, const char * opts, int s, int n) {
    auto other = build(opts, w.n_cells, w.n_stream);
    for (int v = 0; v < 2; v++) {
        std::vector<uint16_t> rows((size_t) n * W);
        w.lane[v]->read(s, 0, n, rows.data());
        other->lane[v]->restore(0, 0, n, rows.data(), 1);
    }
    for (int h = 0; h < HEADS; h++) {
        CHECK(kept(*other, 0, h, n) == kept(w, s, h, n), "the restored state keeps other cells");
    }
    for (int c = 0; c < n; c++) { other->live[0][(size_t) c] = w.live[(size_t) s][(size_t) c]; }
    if (n < w.n_cells) { decode(*other, 0, n, 1, true); }
}

// A state of pages that lost no cell: the same bytes come out of the cache that it went into, through a second one
// and at other cells.
static void states_are_exact(const char * opts) {
    auto w = build(opts, 1024, 1);
    decode(*w, 0, 0, 500, false);
    for (int c = 500; c < 700; c++) { decode(*w, 0, c, 1, false); }
    for (const int shift : { 0, 77 }) {
        auto other = build(opts, 1024, 2);
        decode(*other, 1, 0, 300, false); // something to overwrite
        for (int v = 0; v < 2; v++) {
            std::vector<uint16_t> rows((size_t) 700 * W);
            w->lane[v]->read(0, 0, 700, rows.data());
            other->lane[v]->restore(1, shift, 700, rows.data(), 1);
        }
        for (int v = 0; v < 2; v++) {
            std::vector<uint16_t> rows((size_t) 700 * W), back(rows.size());
            w->slots->read(v, 0, 0, 700, rows.data(), false);
            other->slots->read(v, 1, shift, 700, back.data(), false);
            int n = 0;
            for (int c = 0; c < 576 - 32; c++) { // older than both windows
                for (int i = 0; i < W; i++) { n += rows[(size_t) c * W + i] != back[(size_t) c * W + i]; }
            }
            CHECK(n == 0, "%s, moved by %d: %d values of %d differ", opts, shift, n, 544 * W);
            CHECK(std::count_if(
                      back.begin(), back.begin() + 544 * W, [](uint16_t x) { return x != 0 && x != 0x8000; }) > 100 * W,
                "nothing was kept");
        }
        CHECK(shift || w->slots->n_used(0) == other->slots->n_used(1), "%d pages, restored %d", w->slots->n_used(0),
            other->slots->n_used(1));
        for (int c = 0; c < shift + 700; c++) { other->live[1][(size_t) c] = c >= shift; }
        decode(*other, 1, shift + 700, 1, true);
        decode(*other, 1, shift + 701, 100, true); // a later turn
    }
}

static int n_kept(const world & w, int s, int first, int n) { // of both heads
    std::vector<uint16_t> rows((size_t) n * W);
    w.slots->read(false, s, first, n, rows.data(), false);
    w.lane[0]->read(s, first, n, rows.data());
    int kept = 0;
    for (int i = 0; i < n * HEADS; i++) { kept += !evicted(&rows[(size_t) i * D]); }
    return kept;
}

// A later prompt may cost cells of the first, but no generated ones while there is room, nor those that were open
// when it came.
static void a_second_turn(const char * opts) {
    auto w = build(opts, 2048, 1);
    decode(*w, 0, 0, 200, false);
    for (int c = 200; c < 500; c++) { decode(*w, 0, c, 1, false); }
    CHECK(n_kept(*w, 0, 200, 300) == 300 * HEADS, "%s: %d of %d generated rows", opts, n_kept(*w, 0, 200, 300),
        300 * HEADS);
    decode(*w, 0, 500, 300, true);
    const int page = w->lane[0]->layout().page_cells; // cells of the prompt and of the answer share a page
    CHECK(n_kept(*w, 0, 200, 300) >= (300 - page) * HEADS, "%s: %d of %d generated rows behind a second prompt", opts,
        n_kept(*w, 0, 200, 300), 300 * HEADS);
    CHECK(n_kept(*w, 0, 0, 200) < 200 * HEADS, "%s: the first prompt is whole", opts);
}

// A context shift frees cells in the middle: what is then written there is newer than what lies behind it.
static void text_behind_a_shift(const char * opts) {
    auto w = build(opts, 1024, 1);
    decode(*w, 0, 0, 100, false);
    for (int c = 100; c < 1024; c++) { decode(*w, 0, c, 1, false); }
    std::fill_n(w->live[0].begin() + 100, 500, false);
    for (int c = 100; c < 400; c++) { decode(*w, 0, c, 1, false); }
    CHECK(n_kept(*w, 0, 100, 300) == 300 * HEADS, "%s: %d of the newest %d rows", opts, n_kept(*w, 0, 100, 300),
        300 * HEADS);
}

// What a slot held before makes no difference to the cells that a prompt keeps.
static void a_slot_again(const char * opts) {
    std::vector<uint16_t> rows[2];
    for (const bool again : { false, true }) {
        auto w = build(opts, 1024, 1);
        w->pad = 1;
        rng.seed(7);
        if (again) {
            decode(*w, 0, 0, 700, false);
            for (int c = 700; c < 900; c++) { decode(*w, 0, c, 1, false); }
            w->live[0].assign(1024, false);
        }
        rng.seed(8);
        decode(*w, 0, 0, 300, false);
        decode(*w, 0, 300, 200, true);
        rows[again].resize((size_t) 500 * W);
        w->slots->read(false, 0, 0, 500, rows[again].data(), false);
        w->lane[0]->read(0, 0, 500, rows[again].data());
    }
    int n = 0;
    for (size_t i = 0; i < rows[0].size(); i++) { n += rows[0][i] != rows[1][i]; }
    CHECK(n == 0, "%s: %d of %d values differ in a slot used again", opts, n, (int) rows[0].size());
}

// A state that comes into a full cache: what else is kept there keeps its values.
static void a_state_among_others(const char * opts) {
    for (int n = 140; n <= 340; n += 40) {
        auto w = build(opts, 2 * n + 40, 1);
        decode(*w, 0, 0, 12, false);
        decode(*w, 0, 12, n, false);
        decode(*w, 0, 12 + n, n, false);
        std::vector<uint16_t> was[2], image((size_t) n * W), now((size_t) n * W);
        for (int v = 0; v < 2; v++) {
            was[v].resize((size_t) n * W);
            w->lane[v]->read(0, 12 + n, n, was[v].data());
            w->slots->read(v, 0, 12 + n, n, was[v].data(), false);
        }
        std::vector<uint16_t> images[2];
        for (int v = 0; v < 2; v++) {
            images[v].resize((size_t) n * W);
            w->lane[v]->read(0, 12 + n, n, images[v].data());
        }
        for (int v = 0; v < 2; v++) { w->lane[v]->restore(0, 12, n, images[v].data(), 1); }
        for (int v = 0; v < 2; v++) {
            w->lane[v]->read(0, 12 + n, n, now.data());
            w->slots->read(v, 0, 12 + n, n, now.data(), false);
            int wrong = 0;
            for (int i = 0; i < n * HEADS; i++) {
                float most = 0.0f;
                for (int d = 0; d < D && !evicted(&now[(size_t) i * D]); d++) {
                    most = std::max(most,
                        fabsf(kvq_f16_to_f32(now[(size_t) i * D + d]) - kvq_f16_to_f32(was[v][(size_t) i * D + d])));
                }
                wrong += most > 2.0f; // what sealing now may make of a row in 2 bits
            }
            CHECK(!wrong, "%s, %d cells: %d %s of a sequence that nobody touched are others", opts, n, wrong,
                v ? "values" : "keys");
        }
        for (int c = 0; c < 2 * n + 12; c++) { w->live[0][(size_t) c] = true; }
        decode(*w, 0, 2 * n + 12, 20, true);
    }
}

// A state of the first n cells brings the same cells, in no more pages of slots (some may hold freed cells alone).
static void restore_and_compare(world & w, const char * opts, int n) {
    auto other = build(opts, w.n_cells, 1);
    for (int v = 0; v < 2; v++) {
        std::vector<uint16_t> rows((size_t) n * W);
        w.lane[v]->read(0, 0, n, rows.data());
        other->lane[v]->restore(0, 0, n, rows.data(), 1);
    }
    for (int h = 0; h < HEADS; h++) {
        CHECK(kept(*other, 0, h, n) == kept(w, 0, h, n), "%s, %d cells: head %d keeps others", opts, n, h);
    }
    CHECK(other->slots->n_used(0) <= w.slots->n_used(0), "%s, %d cells: %d pages, restored %d", opts, n,
        w.slots->n_used(0), other->slots->n_used(0));
    const auto numbers = rng; // what follows in the first cache is the same without this
    std::copy_n(w.live[0].begin(), n, other->live[0].begin());
    decode(*other, 0, n, 1, true);
    rng = numbers;
}

// Pages that lost cells, since prompts were taken back in part: a state brings the same cells into the same number of
// pages, whatever holes each head has.
static void pages_with_holes(const char * opts) {
    auto w = build(opts, 832, 1);
    w->pad = 1;
    int head = 0, most = 0;
    for (int step = 0; head < 700; step++) {
        decode(*w, 0, head, 68 + step % 5 * 10, false);
        head += 68 + step % 5 * 10 - 40;
        std::fill(w->live[0].begin() + head, w->live[0].end(), false);
        decode(*w, 0, head++, 1, false);
        restore_and_compare(*w, opts, head);
        most = std::max(most, w->slots->n_used(0));
    }
    CHECK(most > w->lane[0]->layout().n_store / 2, "%s: %d pages were never many", opts, most);
}

// The rows of a state come in as many calls as its cells have runs, of keys and then of values: no cell loses its value
// when a page's cells are in several of them.
static void holes_in_several_runs(const char * opts) {
    auto w = build(opts, 832, 1), other = build(opts, 832, 1);
    w->pad = 1;
    int head = 0;
    for (int step = 0; head < 500; step++) { // pages lose cells, as in pages_with_holes
        decode(*w, 0, head, 68 + step % 5 * 10, false);
        head += 68 + step % 5 * 10 - 40;
        std::fill(w->live[0].begin() + head, w->live[0].end(), false);
        decode(*w, 0, head++, 1, false);
    }
    std::vector<uint16_t> was[2], now[2];
    for (int v = 0; v < 2; v++) {
        std::vector<uint16_t> image((size_t) head * W);
        w->lane[v]->read(0, 0, head, image.data());
        for (int from = 0; from < head; from += 37) {
            other->lane[v]->restore(0, from, std::min(37, head - from), image.data() + (size_t) from * W, 1);
        }
    }
    for (int v = 0; v < 2; v++) {
        for (auto * x : { w.get(), other.get() }) {
            auto & rows = x == w.get() ? was[v] : now[v];
            rows.resize((size_t) head * W);
            x->lane[v]->read(0, 0, head, rows.data());
            x->slots->read(v, 0, 0, head, rows.data(), false);
        }
    }
    int wrong = 0, n = 0;
    for (size_t i = 0; i < (size_t) head * HEADS; i++) {
        float most = 0.0f;
        for (size_t d = 0; d < D; d++) {
            most = std::max(most, fabsf(kvq_f16_to_f32(now[1][i * D + d]) - kvq_f16_to_f32(was[1][i * D + d])));
        }
        const bool held = !evicted(&was[0][i * D]);
        n += held;
        wrong += held && (evicted(&now[0][i * D]) || most > 2.0f); // what sealing again may make of a row in 2 bits
    }
    CHECK(n > head / 2 && !wrong, "%s: %d of %d values are others behind a state of several runs", opts, wrong, n);
}

// Prompts that come and are taken back in part, so that pages of slots lose cells: whatever is kept, a state brings.
static void prompts_taken_back(const char * opts, unsigned seed) {
    rng.seed(seed);
    auto w = build(opts, 768, 1);
    w->pad = 1;
    for (int step = 0, head = 0; step < 30; step++) {
        if (uniform(0, 2) < 2) {
            const int n = std::min(uniform(0, 2) ? uniform(33, 200) : uniform(1, 40), 767 - head);
            if (n < 1) { break; }
            decode(*w, 0, head, n, false);
            head += n;
        } else {
            const int n = std::min(uniform(1, 150), head);
            head -= n;
            std::fill_n(w->live[0].begin() + head, n, false);
        }
        if (head > 64) { restore_and_compare(*w, opts, head); }
    }
}

// A context shift leaves cells evicted that a state brought for some heads only: their rows in open pages are no keys.
static void a_shift_of_open_pages(const char * opts) {
    auto w = build(opts, 1024, 1), other = build(opts, 1024, 1);
    decode(*w, 0, 0, 500, false);
    const int n = 150; // pages of slots are not whole among them: rows go into frames
    for (int v = 0; v < 2; v++) {
        std::vector<uint16_t> rows((size_t) 500 * W);
        w->lane[v]->read(0, 0, 500, rows.data());
        other->lane[v]->restore(0, 0, n, rows.data(), 1);
    }
    std::vector<bool> before[HEADS];
    const int page = other->lane[0]->layout().page_cells;
    int n_half = 0; // in frames, and not for all heads
    for (int h = 0; h < HEADS; h++) { before[h] = kept(*other, 0, h, n); }
    for (int c = 0; c < n; c++) {
        n_half += before[0][(size_t) c] != before[1][(size_t) c] && other->lane[0]->is_valid(0, c / page, c % page);
    }
    CHECK(n_half > 5, "%s: %d cells of open pages are evicted by one head", opts, n_half);
    other->lane[0]->edit(
        0, [](int) { return true; },
        [](int, int, uint16_t * row) {
            for (int d = 0; d < D; d++) { row[d] ^= 0x8000; }
        });
    for (int h = 0; h < HEADS; h++) {
        CHECK(kept(*other, 0, h, n) == before[h], "%s: head %d has other cells after a shift", opts, h);
    }
    std::fill_n(other->live[0].begin(), n, true);
    decode(*other, 0, n, 1, true);
    save_and_restore(*other, opts, 0, n);
}

static void random_operations(const char * opts, int steps) {
    auto w = build(opts, 768, 2);
    std::vector<int> head(2, 0);
    int n_saved = 0;
    for (int step = 0; step < steps; step++) {
        const int op = uniform(0, 99), s = uniform(0, 1);
        w->tells = uniform(0, 3) != 0;
        if (op < 75) {
            const int n = std::min(uniform(0, 5) ? uniform(1, 3) : uniform(33, 300), w->n_cells - head[(size_t) s]);
            decode(*w, s, head[(size_t) s], n, uniform(0, 3) == 0);
            head[(size_t) s] += n;
            if (head[(size_t) s] == w->n_cells) { // the caller frees all and starts again
                head[(size_t) s] = 0;
                w->live[(size_t) s].assign((size_t) w->n_cells, false);
            }
        } else if (op < 83) { // a draft is taken back
            const int n = std::min(uniform(1, 200), head[(size_t) s]);
            head[(size_t) s] -= n;
            std::fill_n(w->live[(size_t) s].begin() + head[(size_t) s], n, false);
        } else if (op < 87) { // negation stands for the rotation of a context shift
            const int a = uniform(0, w->n_cells - 1), b = uniform(a, w->n_cells - 1);
            w->lane[0]->edit(
                s, [&](int c) { return c >= a && c <= b; },
                [&](int c, int, uint16_t * row) {
                    for (int d = 0; c >= a && c <= b && d < D; d++) { row[d] ^= 0x8000; }
                });
        } else if (op < 91) {
            for (auto & lane : w->lane) { lane->copy_stream(s, 1 - s); }
            w->live[(size_t) (1 - s)] = w->live[(size_t) s];
            head[(size_t) (1 - s)] = head[(size_t) s];
        } else if (op < 96 && head[(size_t) s] > 64) {
            save_and_restore(*w, opts, s, head[(size_t) s]);
            n_saved++;
        } else if (op == 99 && !uniform(0, 3)) {
            for (auto & lane : w->lane) { lane->clear(); }
            for (auto & live : w->live) { live.assign((size_t) w->n_cells, false); }
            head.assign(2, 0);
        }
    }
    printf("%-50s %d steps, %d sealed, %d saved\n", opts, steps, (int) w->cache.counters.n_sealed, n_saved);
}

// Where a text outgrows its cache the first cells stay: attention rests on them.
static void outgrown(const char * opts) {
    auto w = build(opts, 512, 1);
    for (int c = 0, n = 36; c < 512; c += n, n = 4) { decode(*w, 0, c, n, c % 64 == 0); }
    for (int h = 0; h < HEADS; h++) { CHECK(count(kept(*w, 0, h, 4)) == 4, "%s: head %d lost first cells", opts, h); }
}

int main(int argc, char ** argv) {
    const unsigned seed = argc > 1 ? (unsigned) atoi(argv[1]) : 42;
    const int steps = argc > 2 ? atoi(argv[2]) : 400;
    rng.seed(seed);
    for (const char * opts :
        { "", "bits=4,group=32", "hh=0.25,rw=0.25", "zipcache:interval=64,salient=0.5,keep=0.5,eta=0.1" }) {
        pages_with_holes(opts);
        holes_in_several_runs(opts);
    }
    prompts_taken_back("hh=0.1,rw=0.1,window=64", 101);
    for (const char * opts : { "", "bits=4", ZIP_32 }) {
        a_shift_of_open_pages(opts);
        outgrown(opts);
    }
    one_prompt();
    long_prompt("", 0.5f, 0.25f);
    long_prompt("hh=0.1,rw=0.1", 0.2f, 0.1f);
    long_prompt("hh=0,rw=0.5", 0.5f, 0.5f);
    long_prompt("hh=0.5,rw=0", 0.5f, 0.0f);
    all_kept();
    for (const char * opts :
        { "", "scales=f16", "bits=4,group=32", "hh=0.75", ZIP_32, "zipcache:interval=64,salient=0.5,keep=0.4" }) {
        states_are_exact(opts);
    }
    for (const char * opts : { "", "window=64", "hh=0.5,rw=0", ZIP_64 }) { a_second_turn(opts); }
    for (const char * opts : { "", ZIP_64 }) { text_behind_a_shift(opts); }
    for (const char * opts : { "", "hh=0,rw=0.5", "hh=0.5,rw=0", ZIP_32 }) { a_slot_again(opts); }
    for (const char * opts : { "", "bits=4,window=64", "window=32", ZIP_32 }) { a_state_among_others(opts); }
    for (const char * opts : { "", "hh=0.1,rw=0.1,window=64", "scales=f16,group=32,sinks=4,window=0",
             "zipcache:interval=64,salient=0.5,keep=0.5,eta=0.1" }) {
        rng.seed(seed);
        random_operations(opts, steps);
    }
    return 0;
}

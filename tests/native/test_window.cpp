// window=auto: a lane's room that blocks do not take yet holds pages as they came (store/pool.h). Beside each lane runs
// one of the least window, and what was written lies in an array. Usage: test_window [seed]
#include "layer.h"

#include "base/f16.h"
#include "types/types.h"

#include <algorithm>
#include <cmath>
#include <cstring>

struct config {
    const char *method, *opts;
    int n_head, dk, dv, n_cells, n_stream;
};

struct world {
    config c;
    cache_of_layers cache;
    composed_layer layer[2];
    std::vector<uint16_t> plain[2][2]; // [layer][keys, values], f16 [stream][cell][W]
    world(const config & config, const std::string & window) : c(config) {
        const kvq_layer_shape shape = { 0, c.n_head, c.dk, c.dv };
        const std::string opts = std::string(c.opts) + window;
        for (int i = 0; i < 2; i++) {
            const kvq_layer_plan plan = plan_of(c.method, opts.c_str(), { i, 2, shape, i ? &shape : nullptr });
            layer[i].make(cache, plan, c.n_head, c.n_cells, c.n_stream, i, i ? &layer[0] : nullptr);
            for (int v = 0; v < 2; v++) { plain[i][v].resize((size_t) c.n_cells * c.n_stream * width(v)); }
        }
    }
    int width(bool v) const { return c.n_head * (v ? c.dv : c.dk); }
    kvq_lane & lane(int i, int v) { return *layer[i].lane[v]; }
    void commit() {
        for (auto & l : layer) {
            for (auto & x : l.lane) { x->commit(1); }
        }
    }
};

// The same rows for cells [cell, cell + n) of each stream go to every world.
static void write(const std::vector<world *> & all, int s, int cell, int n) {
    for (int i = 0; i < 2; i++) {
        for (int v = 0; v < 2; v++) {
            const int W = all[0]->width(v);
            std::vector<float> rows((size_t) n * W);
            std::vector<int64_t> idx((size_t) n);
            for (float & x : rows) {
                x = kvq_f16_to_f32(kvq_f32_to_f16(std::uniform_real_distribution<float>(-1, 1)(rng)));
            }
            for (int t = 0; t < n; t++) { idx[(size_t) t] = (int64_t) s * all[0]->c.n_cells + cell + t; }
            for (world * w : all) {
                w->lane(i, v).write(n, idx.data(), rows.data(), (size_t) W, 1);
                for (size_t x = 0; x < rows.size(); x++) {
                    w->plain[i][v][(size_t) idx[0] * W + x] = kvq_f32_to_f16(rows[x]);
                }
            }
        }
    }
}

static int n_open(const kvq_lane & x, int s) { return (int) x.open_pages(s).size(); }

// Cells [0, n) of a stream are open, and are what was written.
static void check_exact(world & w, int s, int n, const char * when) {
    for (int i = 0; i < 2; i++) {
        for (int v = 0; v < 2; v++) {
            const int W = w.width(v), pc = w.lane(i, v).layout().page_cells;
            std::vector<uint16_t> rows((size_t) n * W);
            w.lane(i, v).read(s, 0, n, rows.data());
            for (int p = 0; p * pc < n; p++) {
                CHECK(w.lane(i, v).state(s, p) == KVQ_PAGE_OPEN, "%s %s, %s: page %d of %d cells is sealed", w.c.method,
                    w.c.opts, when, p, n);
            }
            CHECK(!memcmp(rows.data(), &w.plain[i][v][(size_t) s * w.c.n_cells * W], 2 * rows.size()),
                "%s %s, %s: rows are not those that were written", w.c.method, w.c.opts, when);
        }
    }
}

// A page that the least window keeps open is kept open here too.
static void check_no_worse(world & w, world & least, int s, const char * when) {
    for (int i = 0; i < 2; i++) {
        for (int v = 0; v < 2; v++) {
            for (const int p : least.lane(i, v).open_pages(s)) {
                const bool shares = w.lane(i, v).layout().shares_codes || w.lane(1, v).layout().shares_codes;
                CHECK(shares || w.lane(i, v).state(s, p) == KVQ_PAGE_OPEN,
                    "%s %s, %s: page %d is sealed and would be open with the least window", w.c.method, w.c.opts, when,
                    p);
            }
        }
    }
}

static int n_exact(world & w) {
    int n = w.c.n_cells;
    for (auto & l : w.layer) {
        for (auto & x : l.lane) { n = std::min(n, x->layout().n_exact()); }
    }
    return n;
}

static void check_bytes(world & w, world & least) {
    for (int i = 0; i < 2; i++) {
        for (int v = 0; v < 2; v++) {
            const kvq_lane_layout &a = w.lane(i, v).layout(), &b = least.lane(i, v).layout();
            const size_t of_a = a.bytes_codes + a.bytes_params + a.bytes_window,
                         of_b = b.bytes_codes + b.bytes_params + b.bytes_window;
            const size_t pad = 15 * 2 * (size_t) a.n_pages * (size_t) a.n_stream + 64; // blocks lie at multiples of 16
            CHECK(of_a >= of_b && of_a <= of_b + pad, "%s %s: %zu bytes, %zu with the least window", w.c.method,
                w.c.opts, of_a, of_b);
            CHECK(a.bytes_tables - b.bytes_tables <= 12 * (size_t) a.n_pages * (size_t) a.n_stream + 64,
                "tables of %zu bytes, %zu with the least window", a.bytes_tables, b.bytes_tables);
            CHECK(a.nb_pool * (size_t) a.n_stream <= of_a, "the pools are larger than their memory");
        }
    }
}

// Generated cell by cell, then as prompts after it was freed.
static void fill_and_free(const config & c) {
    world w(c, ",window=auto"), least(c, "");
    const int exact = n_exact(w), pc = w.lane(0, 0).layout().page_cells;
    check_bytes(w, least);
    std::vector<std::vector<uint16_t>> others(4);
    if (c.n_stream > 1) { // a stream that nothing is done to
        write({ &w, &least }, 1, 0, exact + 3 * pc);
        w.commit();
        least.commit();
        for (int j = 0; j < 4; j++) {
            others[(size_t) j].resize((size_t) (exact + 3 * pc) * w.width(j % 2));
            w.lane(j / 2, j % 2).read(1, 0, exact + 3 * pc, others[(size_t) j].data());
        }
    }
    int most_at_once = 0, n_sealed = 0;
    for (int t = 0; t < c.n_cells; t++) {
        write({ &w, &least }, 0, t, 1);
        least.commit();
        for (int i = 0; i < 2; i++) {
            for (int v = 0; v < 2; v++) {
                const int before = (int) w.cache.counters.n_sealed;
                w.lane(i, v).commit(1);
                const int now = (int) w.cache.counters.n_sealed - before;
                most_at_once = std::max(most_at_once, now);
                n_sealed += now;
            }
        }
        check_no_worse(w, least, 0, "generated");
        if (t < exact && (t % 37 == 0 || t == exact - 1)) { check_exact(w, 0, t + 1, "generated"); }
    }
    const bool shares = w.lane(1, 0).layout().shares_codes || w.lane(1, 1).layout().shares_codes;
    CHECK(shares || most_at_once == 1, "%s %s: a token waited for %d pages", c.method, c.opts, most_at_once);
    CHECK(n_sealed > 0, "nothing was sealed");
    CHECK(w.cache.scratch.bytes() <= 16 * 2 * w.lane(0, 0).layout().nb_frame + others[0].size() * 8 * 2 * 4,
        "%zu bytes of scratch", w.cache.scratch.bytes());

    // The sequence ends, and a short one comes in calls of 100. Attention tells where free cells begin.
    for (int round = 0; round < 2; round++) {
        const int n = round ? exact : std::min(exact, 70);
        for (int t = 0; t < n; t += 100) {
            const int part = std::min(100, n - t), n_kv = t + part;
            write({ &w }, 0, t, part);
            for (int i = 0; i < 2; i++) {
                for (int v = 0; v < 2; v++) { w.lane(i, v).free_from(0, n_kv); }
            }
            w.commit();
        }
        check_exact(w, 0, n, "after a long one");
    }
    for (int j = 0; c.n_stream > 1 && j < 4; j++) {
        std::vector<uint16_t> again(others[(size_t) j].size());
        w.lane(j / 2, j % 2).read(1, 0, exact + 3 * pc, again.data());
        CHECK(again == others[(size_t) j], "another stream changed");
    }
    printf("%-8s %-28s %4d cells: %4d of them exact, at most %d pages at once\n", c.method, c.opts, c.n_cells, exact,
        most_at_once);
}

// A prompt that is longer than the room: of every call as many pages seal as it needs frames, and their own blocks.
static void count_pages(const config & c) {
    world w(c, ",window=auto");
    const kvq_lane_layout & l = w.lane(0, 0).layout();
    const int n_call = 8 * l.page_cells;
    for (int t = 0; t + n_call <= c.n_cells; t += n_call) {
        write({ &w }, 0, t, n_call);
        const int open = n_open(w.lane(0, 0), 0), before = (int) w.cache.counters.n_sealed;
        w.lane(0, 0).commit(1);
        const int sealed = (int) w.cache.counters.n_sealed - before, room = (int) (l.nb_pool / l.nb_frame);
        const double each = (double) l.nb_frame / (double) (l.nb_frame - l.nb_block);
        CHECK(sealed <= std::max(0, open - room) + (int) std::ceil(8 * each) + 1, "%d pages sealed for 8", sealed);
        w.commit();
    }
}

// Pages come and go at random in two streams; after each commit the pool is full before a page seals.
static void no_page_seals_early(const config & c, int steps) {
    world w(c, ",window=auto");
    std::vector<int> head((size_t) c.n_stream, 0);
    for (int step = 0; step < steps; step++) {
        const int s = uniform(0, c.n_stream - 1), n = std::min(uniform(1, 200), c.n_cells - head[(size_t) s]);
        if (n > 0) { write({ &w }, s, head[(size_t) s], n); }
        head[(size_t) s] += n;
        const uint64_t before = w.cache.counters.n_sealed;
        w.commit();
        if (w.cache.counters.n_sealed > before) {
            bool full = false; // of some lane: the others may have had to follow it
            for (int i = 0; i < 2; i++) {
                for (int v = 0; v < 2; v++) {
                    const kvq_lane_layout & l = w.lane(i, v).layout();
                    int n_blocks = 0;
                    for (int p = 0; p < l.n_pages; p++) { n_blocks += w.lane(i, v).state(s, p) == KVQ_PAGE_SEALED; }
                    full |= (size_t) n_blocks * l.nb_block + (size_t) (n_open(w.lane(i, v), s) + 2) * l.nb_frame >
                        l.nb_pool;
                }
            }
            CHECK(full, "%s %s: pages sealed with room for two more", c.method, c.opts);
        }
        if (head[(size_t) s] == c.n_cells || !uniform(0, 9)) { // it ends, or its last cells are taken back
            const int from = uniform(0, head[(size_t) s]);
            for (int i = 0; i < 2; i++) {
                for (int v = 0; v < 2; v++) { w.lane(i, v).free_from(s, from); }
            }
            head[(size_t) s] = from;
        }
    }
}

// Pages written from the last to the first seal in that order, so those in front have blocks far behind. When the
// others are freed, these blocks must make room, and whoever reads them must find them.
static void blocks_close_up(config c) {
    c.n_cells *= !strcmp(c.method, "xquant") ? 4 : 1; // the lane that adopts has little room of its own
    world w(c, ",window=auto");
    const kvq_lane_layout & l = w.lane(0, 0).layout();
    const int pc = l.page_cells, n_keep = 4, n_more = n_exact(w) / pc - n_keep - 2;
    for (int p = l.n_pages - 1; p >= 0; p--) {
        write({ &w }, 0, p * pc, pc);
        w.commit();
    }
    for (int i = 0; i < 20 * l.n_pages; i++) { // the oldest pages: until those in front are sealed too
        if (w.lane(0, 0).state(0, n_keep - 1) == KVQ_PAGE_SEALED && w.lane(1, 1).state(0, 0) == KVQ_PAGE_SEALED) {
            break;
        }
        write({ &w }, 0, (n_keep + i % (l.n_pages - n_keep)) * pc, pc);
        w.commit();
    }
    std::vector<uint16_t> kept[4], again;
    for (int j = 0; j < 4; j++) {
        kept[j].resize((size_t) n_keep * pc * w.width(j % 2));
        w.lane(j / 2, j % 2).read(0, 0, n_keep * pc, kept[j].data());
        w.lane(j / 2, j % 2).free_from(0, n_keep * pc);
    }
    int n_moved = 0;
    for (int k = 0; k < n_more; k++) {
        const uint8_t * before = w.lane(0, 0).codes_at(0, 0, 0);
        write({ &w }, 0, (n_keep + k) * pc, pc);
        for (const auto & x : w.layer[0].lane) { x->commit(1); }
        n_moved += w.lane(0, 0).codes_at(0, 0, 0) != before;
        for (int j = 0; j < 4; j++) { // a layer that adopts codes has not sealed yet
            const kvq_lane & lane = w.lane(j / 2, j % 2);
            for (int p = 0; p < n_keep; p++) {
                const kvq_page & span = w.layer[j / 2].spans.spans[(size_t) p];
                CHECK(lane.state(0, p) != KVQ_PAGE_SEALED ||
                        (j % 2 ? span.v_codes : span.k_codes) == lane.codes_at(0, p, 0),
                    "%s %s: page %d is read where it was", c.method, c.opts, p);
            }
        }
        w.commit();
    }
    CHECK(n_more < 4 || n_moved > 0, "%s %s: no block moved", c.method, c.opts);
    for (int j = 0; j < 4; j++) {
        kvq_lane & lane = w.lane(j / 2, j % 2);
        again.resize(kept[j].size());
        lane.read(0, 0, n_keep * pc, again.data());
        CHECK(again == kept[j], "%s %s: pages whose blocks moved hold something else", c.method, c.opts);
        for (int k = 0; k < n_more; k++) {
            CHECK(lane.state(0, n_keep + k) == KVQ_PAGE_OPEN && lane.info(0, n_keep + k).own >= 0,
                "%s %s: page %d of %d has no frame", c.method, c.opts, n_keep + k, n_keep + n_more);
        }
    }
}

// Saved and restored: into a cache that is clear, what was exact is; into one that is full, what fits.
static void states(const config & c) {
    world a(c, ",window=auto"), clear(c, ",window=auto"), full(c, ",window=auto"), fixed(c, "");
    write({ &full }, 0, 0, c.n_cells);
    full.commit();
    const int n = c.n_cells * 3 / 4;
    for (int t = 0; t < n; t += 50) {
        write({ &a }, 0, t, std::min(50, n - t));
        a.commit();
    }
    for (int i = 0; i < 2; i++) {
        for (int v = 0; v < 2; v++) {
            std::vector<uint16_t> rows((size_t) n * a.width(v)), again(rows.size());
            a.lane(i, v).read(0, 0, n, rows.data());
            for (world * w : { &clear, &full, &fixed }) {
                w->lane(i, v).restore(0, 0, n, rows.data(), 1);
                w->lane(i, v).read(0, 0, n, again.data());
                for (int p = 0; p < n / a.lane(i, v).layout().page_cells; p++) {
                    const kvq_page_state was = a.lane(i, v).state(0, p), is = w->lane(i, v).state(0, p);
                    const size_t nb = 2 * (size_t) a.lane(i, v).layout().page_cells * a.width(v), at = p * nb / 2;
                    CHECK(was != KVQ_PAGE_SEALED || is == KVQ_PAGE_SEALED, "page %d did not come back as a block", p);
                    CHECK(w != &clear || was == is, "page %d did not come back as rows", p);
                    CHECK(was != is || !memcmp(&rows[at], &again[at], nb), "page %d is not as it was", p);
                }
                CHECK(w != &clear || rows == again, "%s %s: a state reads back otherwise", c.method, c.opts);
            }
        }
    }
}

// Layers of other bits seal a page at other times, and a context shift may come between: keys must be where they are.
static void shifts() {
    const int n_head = 2, D = 64, W = n_head * D, n_cells = 1024;
    const kvq_layer_shape shape = { 0, n_head, D, D };
    kvq_layer_calibration data;
    for (std::vector<float> * mean : { &data.k_mean, &data.v_mean }) {
        for (int i = 0; i < W; i++) { mean->push_back(std::normal_distribution<float>()(rng)); }
    }
    cache_of_layers cache;
    composed_layer layer[2];
    kvq_rope rope;
    rope.n_dims = D;
    rope.neox = true;
    kvq_rotor rotor(rope);
    for (int i = 0; i < 2; i++) {
        const char * opts = i ? "predictor=bias,first_bits=0,bits=3,window=auto" : "predictor=bias,bits=4,window=auto";
        layer[i].make(cache, plan_of("aqua", opts, { i, 2, shape, i ? &shape : nullptr }), n_head, n_cells, 1, i,
            i ? &layer[0] : nullptr, &data);
        layer[i].transforms[0]->rotor = &rotor;
    }
    std::vector<float> keys((size_t) n_cells * W); // without their rotary embedding
    std::vector<int32_t> pos((size_t) n_cells);
    int n_apart = 0;
    for (int t = 0, at = 0; t < n_cells; t++, at++) {
        std::vector<float> rows[2] = { std::vector<float>((size_t) W), std::vector<float>((size_t) W) };
        for (int i = 0; i < W; i++) {
            rows[1][(size_t) i] = std::normal_distribution<float>()(rng);
            rows[0][(size_t) i] = keys[(size_t) t * W + i] =
                data.k_mean[(size_t) i] + std::normal_distribution<float>()(rng);
        }
        pos[(size_t) t] = at;
        rotor.cover(at);
        for (int h = 0; h < n_head; h++) { rotor.apply(at, false, &rows[0][(size_t) h * D]); }
        const int64_t cell = t;
        const int32_t its_pos = at;
        for (auto & l : layer) {
            for (int v = 0; v < 2; v++) {
                l.lane[v]->write(1, &cell, rows[v].data(), (size_t) W, 1, v ? nullptr : &its_pos);
                l.lane[v]->commit(1);
            }
        }
        for (int p = 0; p < t / 32; p++) { n_apart += layer[0].lane[0]->state(0, p) != layer[1].lane[0]->state(0, p); }
        if (t % 150 != 149) { continue; }
        std::vector<int32_t> by((size_t) n_cells, 0);
        for (int c = 0; c <= t; c++) {
            by[(size_t) c] = -std::min(pos[(size_t) c], 20);
            pos[(size_t) c] += by[(size_t) c];
        }
        at -= 20;
        kvq_rope_table tables[21];
        for (int d = 1; d <= 20; d++) { kvq_rope_fill(rope, -d, false, tables[d]); }
        for (int i = 0; i < 2; i++) {
            layer[i].transforms[0]->shift_open(*layer[i].lane[0], 0, by.data(), [&](int c, int, uint16_t * row) {
                std::vector<float> x((size_t) D);
                for (int d = 0; d < D; d++) { x[(size_t) d] = kvq_f16_to_f32(row[d]); }
                if (by[(size_t) c]) { kvq_rope_apply(rope, tables[-by[(size_t) c]], x.data()); }
                for (int d = 0; d < D; d++) { row[d] = kvq_f32_to_f16(x[(size_t) d]); }
            });
            cache.positions()->shift(0, by.data(), n_cells, t / 150 + 1);
            cache.positions()->n_shifts = t / 150 + 1; // the second layer finds it done
        }
    }
    CHECK(n_apart > 100, "the layers sealed the same pages at the same time");
    for (int i = 0; i < 2; i++) {
        kvq_lane & lane = *layer[i].lane[0];
        std::vector<uint16_t> tile(lane.layout().nb_frame / 2);
        double off = 0, all = 0;
        int n_sealed = 0;
        for (int p = 0; p < lane.layout().n_pages; p++) {
            if (lane.state(0, p) != KVQ_PAGE_SEALED) { continue; }
            n_sealed++;
            lane.decode_page(0, p, tile.data());
            for (int c = p * 32; c < p * 32 + 32; c++) {
                for (int h = 0; h < n_head; h++) {
                    std::vector<float> want(&keys[(size_t) c * W + h * D], &keys[(size_t) c * W + h * D] + D);
                    rotor.apply(pos[(size_t) c], false, want.data());
                    for (int d = 0; d < D; d++) {
                        const double x = want[(size_t) d],
                                     e = kvq_f16_to_f32(tile[((size_t) h * 32 + c % 32) * D + d]) - x;
                        off += e * e;
                        all += x * x;
                    }
                }
            }
        }
        CHECK(n_sealed > 4, "%d pages are sealed", n_sealed);
        CHECK(off < 0.04 * all, "layer %d: keys lose %g of themselves", i, off / all);
        printf("shifts, layer %d: %d pages sealed, keys lose %.4f of themselves\n", i, n_sealed, off / all);
    }
}

int main(int argc, char ** argv) {
    rng.seed(argc > 1 ? (unsigned) atoi(argv[1]) : 1);
    const config configs[] = {
        { "kivi", "bits=2", 2, 64, 64, 1536, 2 },
        { "kivi", "bits=1,group=64,sinks=4", 1, 96, 80, 1600, 1 },
        { "higgs", "bits=2", 2, 64, 64, 1536, 2 },
        { "higgs", "k_bits=3,v_bits=1,scales=f16", 4, 64, 128, 1024, 1 },
        { "auto", "level=3,means=off", 2, 128, 128, 2048, 1 },
        { "xquant", "kq=2,vq=0,km=0,vm=0", 2, 64, 64, 2048, 2 },
        { "aqua", "predictor=none", 1, 64, 64, 1024, 2 },
        { "kivi", "bits=4", 2, 64, 64, 192, 1 }, // little more than the window
    };
    for (const config & c : configs) {
        fill_and_free(c);
        count_pages(c);
        no_page_seals_early(c, 200);
        if (c.n_cells >= 1024) { blocks_close_up(c); }
        states(c);
    }
    shifts();
    return 0;
}

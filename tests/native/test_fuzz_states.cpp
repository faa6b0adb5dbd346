// Saved states against random changes: rows with marks and blocks as they are, whole, cut off, with a good checksum
// over what is wrong. Each is refused or restored; none crashes, and a lane that took one goes on working. Usage:
// test_fuzz_states [n] [seed]
#include "layer.h"
#include "store/mark.h"
#include "store/state_blocks.h"
#include "types/types.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

struct config {
    const char *method, *opts;
    int n_head, head_size, n_cells;
};

// Keys of two layers; the second may share codes of the first.
struct world {
    cache_of_layers cache;
    composed_layer layer[2];
    kvq_lane * lane[2];
    explicit world(const config & c) {
        const kvq_layer_shape shape = { 0, c.n_head, c.head_size, c.head_size };
        for (int i = 0; i < 2; i++) {
            const kvq_layer_plan plan = plan_of(c.method, c.opts, { i, 2, shape, i ? &shape : nullptr });
            layer[i].make(cache, plan, c.n_head, c.n_cells, 1, i, i ? &layer[0] : nullptr);
            lane[i] = layer[i].lane[0].get();
        }
    }
    void fill(int W, int n) {
        std::vector<float> rows((size_t) n * W);
        std::vector<int64_t> idx((size_t) n);
        for (int i = 0; i < 2; i++) {
            for (float & x : rows) { x = std::uniform_real_distribution<float>(-1, 1)(rng); }
            for (int t = 0; t < n; t++) { idx[(size_t) t] = t; }
            lane[i]->write(n, idx.data(), rows.data(), (size_t) W, 1);
        }
        for (auto & l : lane) { l->commit(1); }
    }
};

static void change(std::vector<uint8_t> & x, size_t first) {
    for (int n = uniform(1, 8); n > 0 && x.size() > first; n--) {
        const size_t at = first + (size_t) uniform(0, (int) (x.size() - first) - 1);
        switch (uniform(0, 3)) {
        case 0: x[at] ^= (uint8_t) (1 << uniform(0, 7)); break;
        case 1: x[at] = (uint8_t) uniform(0, 255); break;
        case 2:
            memset(&x[at], uniform(0, 1) ? 0xff : 0, std::min<size_t>(x.size() - at, (size_t) uniform(1, 16)));
            break;
        default: x.resize(uniform(0, 3) ? x.size() : at); break;
        }
    }
}

static void stamp(std::vector<uint8_t> & blob) { // a good checksum and length over whatever there is
    const uint64_t nb = blob.size();
    memcpy(&blob[8], &nb, 8);
    const uint32_t sum = kvq_crc32(0, blob.data() + 20, blob.size() - 20);
    memcpy(&blob[16], &sum, 4);
}

static void run(const config & c, int steps, unsigned seed) {
    rng.seed(seed);
    const int W = c.n_head * c.head_size, n = c.n_cells - 13;
    world from(c), to(c);
    from.fill(W, n);
    std::vector<uint8_t> blob[2];
    std::vector<uint16_t> rows[2];
    for (int i = 0; i < 2; i++) {
        const kvq_lane * lane = from.lane[i];
        blob[i] = kvq_blob_write(&lane, 0, 0, n, 2 * (size_t) W * n, { 0, 0, 7, 9, 0, 1, i, n });
        rows[i].resize((size_t) n * W);
        lane->read(0, 0, n, rows[i].data());
        CHECK(!blob[i].empty(), "%s %s: no blocks", c.method, c.opts);
    }
    int n_refused = 0, n_taken = 0;
    for (int step = 0; step < steps; step++) {
        const int i = uniform(0, 1), at = uniform(0, 3) ? 0 : uniform(0, 12);
        kvq_lane * lane = to.lane[i];
        if (step % 1000 == 0) { // what came in whole is what went out
            for (int k = 0; k < 2; k++) {
                kvq_lane * l = to.lane[k];
                std::string note;
                std::vector<uint16_t> again(rows[k].size());
                l->clear();
                const std::string why = kvq_blob_restore(blob[k], blob[0], &l, { { 0, 0, n } }, note);
                CHECK(why.empty() && note.empty(), "%s: %s %s", c.method, why.c_str(), note.c_str());
                l->read(0, 0, n, again.data());
                CHECK(again == rows[k], "%s %s: layer %d is not as it was", c.method, c.opts, k);
            }
        }
        if (uniform(0, 1)) {
            std::vector<uint8_t> bad = blob[i];
            const bool good_sum = uniform(0, 3);
            change(bad, good_sum ? 36 : 0);
            if (good_sum && bad.size() >= KVQ_BLOB_HEAD) { stamp(bad); }
            kvq_blob_head head;
            if (!kvq_blob_read_head(bad.data(), bad.size(), head) || head.n != n) {
                n_refused++;
                continue;
            }
            bad.resize(head.nb);
            std::string note;
            const int first = uniform(1, n - 1);
            const std::vector<kvq_blob_run> one = { { 0, at, n } }, two = { { 0, 0, first }, { 0, first, n - first } };
            n_refused += !kvq_blob_restore(
                bad, uniform(0, 3) ? blob[0] : std::vector<uint8_t>(), &lane, uniform(0, 3) ? one : two, note)
                              .empty();
            n_taken++;
        } else {
            std::vector<uint8_t> bytes(
                (const uint8_t *) rows[i].data(), (const uint8_t *) (rows[i].data() + rows[i].size()));
            change(bytes, 0);
            bytes.resize(2 * rows[i].size());
            std::vector<uint16_t> bad(rows[i].size()), cleared;
            memcpy(bad.data(), bytes.data(), bytes.size());
            for (const kvq_mark_found & f : kvq_mark_find({ bad.data(), n, W, c.head_size }, cleared)) {
                CHECK(f.at >= 0 && f.at < n, "a mark at row %d", f.at);
            }
            for (uint16_t & x : bad) { x = (x & 0x7c00) == 0x7c00 ? 0 : x; } // refused before a lane sees them
            lane->restore(0, at, n, bad.data(), 1);
            n_taken++;
        }
        if (step % 16 == 0) {
            std::vector<uint16_t> again((size_t) c.n_cells * W);
            lane->read(0, 0, c.n_cells, again.data());
        }
    }
    printf("%-8s %-28s seed %u: %d states, %d refused, %d restored in part or whole\n", c.method, c.opts, seed, steps,
        n_refused, n_taken);
}

static void marks() { // every single changed bit of marked rows is seen
    const int n = 64, W = 128, D = 64;
    std::vector<uint16_t> rows((size_t) n * W), cleared;
    for (uint16_t & x : rows) { x = (uint16_t) uniform(0x2c00, 0x3c00); }
    const kvq_mark_rows_view v = { rows.data(), n, W, D };
    const int a[3] = { 0, 1, 2 }, b[3] = { 29, 30, 31 };
    const auto sum_of = [&](const std::vector<uint16_t> & x) {
        std::vector<uint64_t> h;
        for (int i = 0; i < n; i++) { h.push_back(kvq_mark_hash(&x[(size_t) i * W], W)); }
        return kvq_mark_sum(h.data(), n, 3, true);
    };
    kvq_mark_clear(v, a, 2);
    kvq_mark_clear(v, b, 2);
    kvq_mark m;
    m.sum = sum_of(rows);
    m.page_cells = 32;
    m.n = n;
    kvq_mark_put(v, a, 2, m);
    m.row = 29;
    kvq_mark_put(v, b, 2, m);
    CHECK(kvq_mark_find(v, cleared).size() == 2 && sum_of(cleared) == m.sum, "the marks are not found");
    for (size_t bit = 0; bit < 16 * rows.size(); bit++) {
        rows[bit / 16] ^= (uint16_t) (1 << bit % 16);
        cleared.clear();
        const std::vector<kvq_mark_found> found = kvq_mark_find(v, cleared);
        CHECK(!found.empty() && sum_of(cleared) != m.sum, "bit %zu is not seen", bit);
        rows[bit / 16] ^= (uint16_t) (1 << bit % 16);
    }
}

int main(int argc, char ** argv) {
    const int steps = argc > 1 ? atoi(argv[1]) : 1500;
    const unsigned seed = argc > 2 ? (unsigned) atoi(argv[2]) : 1;
    const config configs[] = {
        { "kivi", "window=32", 2, 64, 256 },
        { "kivi", "bits=4,group=64,scales=u8,sinks=4,window=64", 1, 80, 256 },
        { "xquant", "kq=2,vq=0,km=0,vm=0,window=32", 2, 64, 256 },
        { "higgs", "", 2, 64, 256 },
        { "zipcache", "interval=64,window=0", 2, 64, 256 },
    };
    rng.seed(seed);
    marks();
    for (const config & c : configs) { run(c, steps, seed); }
    return 0;
}

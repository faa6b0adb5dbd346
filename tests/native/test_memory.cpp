// Memory that runs out while pages seal: nothing is lost, and what could not seal is due again. An allocation fails in
// each of the places where one is made; rows that are written later find the pages as if nobody had tried to seal them.
#include "layer.h"
#include "base/f16.h"

#include <cmath>
#include <cstring>
#include <new>

constexpr int HEADS = 2, D = 64, W = HEADS * D, N_CELLS = 2048;

// The host's memory, which has none from the allocation on that is numbered `fails`.
struct short_memory : kvq_space {
    kvq_space & from = kvq_cpu_device();
    int n = 0, fails = -1;
    bool is_host() const override { return true; }
    void reserve(size_t nb) override { from.reserve(nb); }
    void * alloc(size_t nb) override { return fails >= 0 && n++ >= fails ? nullptr : from.alloc(nb); }
    void free(void * p, size_t nb) override { from.free(p, nb); }
    void zero(void * p, size_t nb) override { from.zero(p, nb); }
    void copy(void * to, const void * what, size_t nb) override { from.copy(to, what, nb); }
    void copy_later(void * to, const void * what, size_t nb) override { from.copy_later(to, what, nb); }
    void get(void * host, const void * what, size_t nb) override { from.get(host, what, nb); }
    void put(void * to, const void * host, size_t nb) override { from.put(to, host, nb); }
    void put_address_later(void * to, const void * address) override { from.put_address_later(to, address); }
    void put_pages(kvq_page * to, const kvq_page * what, size_t n_pages) override { from.put_pages(to, what, n_pages); }
    void flush() override {}
};

struct world : composed_layer {
    short_memory memory;
    cache_of_layers cache;
    world(const char * method, const char * opts) : cache(kvq_cpu_device(), &memory) {
        make(cache, plan_of(method, opts, { 0, 2, { 0, HEADS, D, D }, nullptr }), HEADS, N_CELLS, 1);
    }
    ~world() { policies.clear(); }

    void write(int first, int n) {
        std::vector<int64_t> at((size_t) n);
        std::vector<float> rows((size_t) n * W);
        for (int v = 0; v < 2; v++) {
            for (int i = 0; i < n; i++) { at[(size_t) i] = first + i; }
            for (int i = 0; i < n * W; i++) {
                rows[(size_t) i] = sinf((float) ((first * W + i) % 977 + 1) * (v ? 0.37f : 0.11f));
            }
            lane[v]->write(n, at.data(), rows.data(), W, 1);
        }
    }
    void commit() {
        for (auto & x : lane) { x->commit(1); }
    }
    std::vector<uint16_t> rows(int n) const {
        std::vector<uint16_t> out(2 * (size_t) n * W);
        for (int v = 0; v < 2; v++) {
            lane[v]->read(0, 0, n, &out[(size_t) v * n * W]);
            if (slots) { slots->read(v, 0, 0, n, &out[(size_t) v * n * W], false); }
        }
        return out;
    }
};

// fails: an allocation of the first sealing; -1: none, and pages are not asked to seal then. False: sealing went well.
static bool run(const char * method, const char * opts, int fails, int more, std::vector<uint16_t> & out) {
    world w(method, opts);
    w.write(0, 512);
    bool failed = fails < 0;
    w.memory.n = 0;
    w.memory.fails = fails;
    try {
        if (fails >= 0) { w.commit(); }
    } catch (const std::bad_alloc &) { failed = true; }
    w.memory.fails = -1;
    if (!more) { w.commit(); }
    for (int i = 0; i < more; i++) { // as tokens come
        w.write(512 + i, 1);
        w.commit();
    }
    out = w.rows(512 + more);
    if (w.slots) {
        int n_shown = 0;
        for (int i = w.lane[0]->layout().n_pages; i < w.spans.n_pages; i++) {
            n_shown += w.spans.spans[(size_t) i].n_slots > 0;
        }
        CHECK(n_shown == w.slots->n_used(0), "%s %s: %d pages are used, %d shown", method, opts, w.slots->n_used(0),
            n_shown);
    }
    return failed;
}

int main() {
    const struct {
        const char *method, *opts;
    } cases[] = { { "minikv", "" }, { "minikv", "hh=0.75" }, { "zipcache", "keep=0.5" }, { "zipcache", "" },
        { "kivi", "bits=2,group=32" }, { "higgs", "bits=2" } };
    int n_failed = 0;
    for (const auto & c : cases) {
        for (int more : { 0, 1, 200 }) {
            std::vector<uint16_t> right, out;
            run(c.method, c.opts, -1, more, right);
            for (int fails = 0; run(c.method, c.opts, fails, more, out); fails++) {
                CHECK(out == right, "%s %s: rows differ after allocation %d of sealing failed, %d tokens later",
                    c.method, c.opts, fails, more);
                n_failed++;
            }
        }
    }
    CHECK(n_failed > 0, "no allocation failed");
    printf("memory: %d failures, nothing lost\n", n_failed);
    return 0;
}

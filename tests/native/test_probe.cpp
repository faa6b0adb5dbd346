// Tables of probes (policy/probe.h) of several streams: what is made for one of them holds while others are made, and
// the pool of sums grows.
#include "layer.h"

#include <cstring>

// sums that the table of a stream names, by page; it is in the host's memory here
static std::vector<const float *> named(const kvq_probe & probe, int stream) {
    const kvq_probe_table * t = probe.table_of(stream);
    const auto * pages = (const kvq_score_page *) ((const int32_t *) (t + 1) + t->max_rows);
    std::vector<const float *> out;
    for (int i = 0; i < t->n_pages; i++) { out.push_back(pages[i].sums); }
    return out;
}

static void check_streams(const char * method, int n_streams, int n_pages) {
    cache_of_layers cache;
    composed_layer x;
    x.make(cache, plan_of(method, "", { 0, 2, { 0, 2, 64, 64 }, nullptr }), 2, 128 * n_pages, n_streams);
    kvq_probe & probe = *x.probe;
    const int P = x.lane[0]->layout().page_cells;
    std::vector<kvq_page> spans((size_t) n_pages, kvq_page{});
    for (int i = 0; i < n_pages; i++) { // open
        spans[(size_t) i].cell = i * P;
        spans[(size_t) i].n_slots = P;
    }
    for (int s = 0; s < n_streams; s++) { // the way a call of attention makes them
        CHECK(probe.prepare(spans.data(), n_pages, s, 512, 0) > 0, "%s: no row of 512 is a probe", method);
    }
    for (int s = 0; s < n_streams; s++) {
        const std::vector<const float *> sums = named(probe, s);
        CHECK((int) sums.size() == n_pages, "%s: %zu open pages of %d in the table", method, sums.size(), n_pages);
        for (int p = 0; p < n_pages; p++) {
            const float * there = probe.choice(s, p, nullptr, nullptr).sums;
            CHECK(
                sums[(size_t) p] == there, "%s: sums of stream %d, page %d are not where its table says", method, s, p);
        }
    }
}

int main() {
    for (const char * method : { "minikv", "zipcache" }) {
        for (int n_streams : { 1, 2, 5 }) {
            for (int n_pages : { 1, 4, 40 }) { check_streams(method, n_streams, n_pages); }
        }
    }
    printf("probe tables: ok\n");
    return 0;
}

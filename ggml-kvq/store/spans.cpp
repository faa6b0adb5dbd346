#include "spans.h"

#include "page.h"

#include <algorithm>
#include <iterator>
#include <new>

// ---------------------------------------------------------------- scratch

kvq_scratch::~kvq_scratch() {
    for (const auto & b : blocks) { space.free(b.first, b.second); }
}

uint16_t * kvq_scratch::take(size_t nb) {
    auto & list = idle[nb];
    if (list.empty() && resting[nb].size() >= KVQ_RESTING_TILES) { list.swap(resting[nb]); }
    if (list.empty()) {
        size_t & n_made = made[nb];
        const size_t n = space.is_host() || !n_made ? 1 : n_made; // an allocation there may cost more than a token
        uint8_t * p = (uint8_t *) space.alloc(n * nb);
        if (!p) { throw std::bad_alloc(); }
        blocks.emplace_back(p, n * nb);
        total += n * nb;
        n_made += n;
        for (size_t i = 0; i < n; i++) { list.push_back((uint16_t *) (p + i * nb)); }
    }
    uint16_t * p = list.back();
    list.pop_back();
    return p;
}

void kvq_scratch::give(uint16_t * p, size_t nb) { idle[nb].push_back(p); }

void kvq_scratch::expect(size_t nb, size_t n) {
    struct borrowed {
        kvq_scratch & from;
        size_t nb;
        std::vector<uint16_t *> tiles;
        ~borrowed() {
            for (uint16_t * p : tiles) { from.give(p, nb); }
        }
    } all = { *this, nb, {} };
    while (all.tiles.size() < n) { all.tiles.push_back(take(nb)); }
}

void kvq_scratch::rest(uint16_t * p, size_t nb) { (space.is_host() ? idle : resting)[nb].push_back(p); }

// ---------------------------------------------------------------- spans

void kvq_span_table::init(int n_stream, int n, int page_cells) {
    n_pages = n;
    spans.assign((size_t) n_stream * n, kvq_page{});
    k_state.assign(spans.size(), KVQ_PAGE_EMPTY);
    v_state.assign(spans.size(), KVQ_PAGE_EMPTY);
    all_changed = true;
    for (size_t i = 0; i < spans.size(); i++) { spans[i].cell = (int) (i % n) * page_cells; }
}

void kvq_span_table::changed(size_t at) {
    all_changed = all_changed || listed.size() == MOST_LISTED;
    if (!all_changed) { listed.push_back(at); }
}

void kvq_span_table::send() {
    if (all_changed) { device->put_pages(copy, spans.data(), n_copy); }
    for (size_t i = 0, n; !all_changed && i < listed.size(); i += n) { // neighbours together
        for (n = 1; i + n < listed.size() && listed[i + n] == listed[i] + n; n++) {}
        device->put_pages(copy + listed[i], spans.data() + listed[i], n);
    }
}

void kvq_span_table::send_packed() {
    const size_t n_stream = spans.size() / (size_t) n_pages;
    n_packed.resize(n_stream, 0);
    for (size_t s = 0; s < n_stream; s++) {
        const auto first = std::lower_bound(listed.begin(), listed.end(), s * (size_t) n_pages);
        if (!all_changed && (first == listed.end() || *first >= (s + 1) * (size_t) n_pages)) { continue; }
        std::vector<kvq_page> list;
        std::copy_if(spans.begin() + (long) s * n_pages, spans.begin() + (long) (s + 1) * n_pages,
            std::back_inserter(list), [](const kvq_page & p) { return p.n_slots; });
        const int n = (int) list.size();
        list.resize((size_t) std::max(n, n_packed[s])); // what was there before becomes empty
        n_packed[s] = n;
        if (!list.empty()) { device->put_pages(copy + s * (size_t) n_pages, list.data(), list.size()); }
    }
}

int kvq_span_table::n_used() const {
    return n_packed.empty() ? 0 : *std::max_element(n_packed.begin(), n_packed.end());
}

kvq_span_table::~kvq_span_table() {
    if (copy) { device->free(copy, n_copy * sizeof(kvq_page)); }
}

const kvq_page * kvq_span_table::on(kvq_device & d) {
    if (d.is_host()) { return spans.data(); }
    if (n_copy != spans.size()) {
        if (copy) { device->free(copy, n_copy * sizeof(kvq_page)); }
        device = &d;
        n_copy = spans.size();
        copy = (kvq_page *) d.alloc(n_copy * sizeof(kvq_page));
        if (!copy) {
            n_copy = 0;
            throw std::bad_alloc();
        }
        all_changed = true;
    }
    if (!all_changed && listed.empty()) { return copy; }
    std::sort(listed.begin(), listed.end());
    listed.erase(std::unique(listed.begin(), listed.end()), listed.end());
    if (packed) {
        send_packed();
    } else {
        send();
    }
    listed.clear();
    all_changed = false;
    return copy;
}

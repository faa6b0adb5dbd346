#include "probe.h"
#include "kind.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <numeric>

// 32-bit mix (two rounds of multiply and shift)
static uint32_t hash(uint64_t row, uint32_t seed) {
    uint32_t x = (uint32_t) row * 0x9e3779b1u + (uint32_t) (row >> 32) + seed * 0x85ebca77u;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

static size_t nb_table(int max_rows, int max_pages) {
    return sizeof(kvq_probe_table) + 4 * (size_t) max_rows + (size_t) max_pages * sizeof(kvq_score_page);
}

std::vector<int32_t> kvq_probe_rows(int n, uint64_t at, float share, int page_cells, uint32_t seed) {
    const double half = (double) share / 2, of = half * (1 - 1e-6); // a share in f32 may be a little too large
    std::vector<int32_t> rows;
    if (n < 32) {
        const int tail = page_cells - (int) std::ceil(of * page_cells);
        for (int i = 0; i < n; i++) {
            const uint64_t row = at + (uint64_t) i;
            if ((int) (row % (uint64_t) page_cells) >= tail || hash(row, 0) < half * 4294967296.0) {
                rows.push_back(i);
            }
        }
        return rows;
    }
    const int n_half = (int) std::ceil(of * n), n_rest = std::max(n - n_half, 0);
    std::vector<int32_t> rest((size_t) n_rest);
    std::iota(rest.begin(), rest.end(), 0);
    const auto before = [&](int32_t a, int32_t b) {
        const uint32_t x = hash(at + (uint64_t) a, seed), y = hash(at + (uint64_t) b, seed);
        return x != y ? x < y : a < b;
    };
    std::sort(rest.begin(), rest.end(), before);
    rows.assign(rest.begin(), rest.begin() + std::min(n_half, n_rest));
    std::sort(rows.begin(), rows.end());
    for (int i = n_rest; i < n; i++) { rows.push_back(i); }
    return rows;
}

void kvq_probe::release() {
    for (const table & t : tables) {
        if (t.there) { device->free(t.there, nb_table(t.max_rows, t.max_pages)); }
    }
    for (const chunk & c : pool) { device->free(c.at, c.n * nb_entry()); }
    tables.clear();
    free_places.clear();
    pages.clear();
    pool.clear();
    n_pool = 0;
}

void kvq_probe::init(
    const kvq_lane_layout & keys, float share_, bool normalise_, uint32_t seed_, int min_rows_, kvq_device & device_) {
    release();
    tables.assign((size_t) keys.n_stream, table());
    device = &device_;
    n_frames = keys.n_frames;
    n_head = keys.n_head;
    page_cells = keys.page_cells;
    n_hi = keys.codec.n_hi;
    share = share_;
    normalise = normalise_;
    seed = seed_;
    min_rows = min_rows_;
}

// ---------------------------------------------------------------- sums

kvq_probe::entry & kvq_probe::at(int stream, int page) {
    entry & e = pages[{ stream, page }];
    if (e.place < 0) {
        if (free_places.empty()) { // twice as many
            const int n = std::max(n_pool, n_frames + 4);
            uint8_t * more = (uint8_t *) device->alloc(n * nb_entry());
            if (!more) {
                pages.erase({ stream, page });
                throw std::bad_alloc();
            }
            for (int i = n; i > 0; i--) { free_places.push_back(n_pool + i - 1); }
            pool.push_back({ more, n_pool, n });
            n_pool += n;
        }
        e.place = free_places.back();
        free_places.pop_back();
        memset(e.stale, 0xff, sizeof(e.stale));
    }
    return e;
}

float * kvq_probe::there(const entry & e) const {
    const auto holds = [&](const chunk & c) { return e.place < c.first + c.n; };
    const chunk & c = *std::find_if(pool.begin(), pool.end(), holds);
    return (float *) (c.at + (size_t) (e.place - c.first) * nb_entry());
}

void kvq_probe::get(const entry & e, std::vector<float> & s, std::vector<int32_t> & n) const {
    s.resize((size_t) n_head * page_cells);
    n.resize((size_t) page_cells);
    device->get(s.data(), there(e), 4 * s.size());
    device->get(n.data(), there(e) + s.size(), 4 * n.size());
    for (int t = 0; t < page_cells; t++) {
        for (int h = 0; e.stale[t / 8] >> t % 8 & 1 && h < n_head; h++) { s[(size_t) h * page_cells + t] = 0.0f; }
        n[(size_t) t] = e.stale[t / 8] >> t % 8 & 1 ? 0 : n[(size_t) t];
    }
}

void kvq_probe::add(int stream, int page, const float * more, const int32_t * more_seen) {
    entry & e = at(stream, page);
    std::vector<float> s;
    std::vector<int32_t> n;
    get(e, s, n);
    for (size_t i = 0; i < s.size(); i++) { s[i] += more[i]; }
    for (size_t i = 0; i < n.size(); i++) { n[i] += more_seen[i]; }
    device->put(there(e), s.data(), 4 * s.size());
    device->put(there(e) + s.size(), n.data(), 4 * n.size());
    memset(e.stale, 0, sizeof(e.stale));
}

// ---------------------------------------------------------------- the table of a device

bool kvq_probe::sees(int n_q, uint64_t first) const {
    return asks(n_q) && !kvq_probe_rows(n_q, first, share, page_cells, seed).empty();
}

bool kvq_probe::reserve(int stream, int n_rows, int n_pages) {
    table & t = tables[(size_t) stream];
    if (t.there && n_rows <= t.max_rows && n_pages <= t.max_pages) { return false; }
    table more;
    more.max_rows = std::max((int) kvq_pad((size_t) n_rows, 64), t.max_rows);
    more.max_pages = std::max({ n_pages + 4, n_frames + 4, t.max_pages });
    more.there = (uint8_t *) device->alloc(nb_table(more.max_rows, more.max_pages)); // zeros: no rows
    if (!more.there) { throw std::bad_alloc(); }
    if (t.there) { device->free(t.there, nb_table(t.max_rows, t.max_pages)); }
    t = more;
    t.empty = true;
    return true;
}

int kvq_probe::prepare(const kvq_page * spans, int n_spans, int stream, int n_q, uint64_t first, bool * moved) {
    const bool asked = asks(n_q), all = share >= 1.0f && n_q >= 32; // of fewer not all are probes
    std::vector<int32_t> rows;
    if (asked && !all) { rows = kvq_probe_rows(n_q, first, share, page_cells, seed); }
    const int n_rows = asked ? (all ? n_q : (int) rows.size()) : 0;
    if (!n_rows && !tables[(size_t) stream].there) { return 0; }
    std::vector<kvq_score_page> jobs;
    for (int p = 0; n_rows && p < n_spans; p++) {
        if (!spans[p].n_slots || spans[p].k_params) { continue; }
        entry & e = at(stream, spans[p].cell / page_cells);
        kvq_score_page job = { (const uint16_t *) spans[p].k_codes, spans[p].map, there(e), spans[p].cell, {} };
        memcpy(job.stale, e.stale, sizeof(job.stale));
        memset(e.stale, 0, sizeof(e.stale));
        jobs.push_back(job);
    }
    const int n_listed = all ? 0 : n_rows;
    const bool grew = reserve(stream, n_listed, (int) jobs.size());
    table & t = tables[(size_t) stream];
    if (moved) { *moved = *moved || grew; }
    if (!n_rows && t.empty) { return 0; }
    t.empty = !n_rows;
    std::vector<uint8_t> bytes(nb_table(n_rows ? t.max_rows : 0, (int) jobs.size()));
    const kvq_probe_table head = { n_rows, (int) jobs.size(), all, t.max_rows };
    memcpy(bytes.data(), &head, sizeof(head));
    const auto put = [&](size_t at, const void * from, size_t nb) {
        if (nb) { memcpy(bytes.data() + at, from, nb); }
    };
    put(sizeof(head), rows.data(), 4 * rows.size());
    put(nb_table(n_rows ? t.max_rows : 0, 0), jobs.data(), jobs.size() * sizeof(kvq_score_page));
    device->put(t.there, bytes.data(), bytes.size());
    return n_rows;
}

kvq_choice kvq_probe::choice(int stream, int page, const uint8_t * valid, void * params) const {
    const auto found = pages.find({ stream, page });
    return found == pages.end() ? kvq_choice{ nullptr, valid, nullptr, params }
                                : kvq_choice{ there(found->second), valid, found->second.stale, params };
}

void kvq_probe::drop(int stream, int page) {
    const auto found = pages.find({ stream, page });
    if (found != pages.end()) {
        if (found->second.place >= 0) { free_places.push_back(found->second.place); }
        pages.erase(found);
    }
}

void kvq_probe::clear() {
    for (const auto & e : pages) {
        if (e.second.place >= 0) { free_places.push_back(e.second.place); }
    }
    pages.clear();
}

// ---------------------------------------------------------------- behind attention

void kvq_probe::observe(const kvq_attn & attn, int stream, uint64_t first, int n_threads) {
    if (attn.n_q < min_rows) { return; }
    const std::vector<int32_t> rows = kvq_probe_rows(attn.n_q, first, share, page_cells, seed);
    if (rows.empty()) { return; }
    open.clear();
    for (int p = 0; p < attn.n_pages; p++) {
        if (attn.pages[p].n_slots && !attn.pages[p].k_params) { open.push_back(attn.pages[p]); }
    }
    kvq_attn a = attn;
    a.pages = open.data();
    a.n_pages = (int32_t) open.size();
    const size_t n = open.size() * (size_t) page_cells;
    sums.assign(n * n_head, 0.0f);
    seen.assign(n * n_head, 0);
    if (!device->scores()->column_sums(a, rows.data(), (int) rows.size(), sums.data(), seen.data(), n_threads)) {
        return;
    }
    std::vector<float> of_page((size_t) n_head * page_cells);
    for (size_t i = 0; i < open.size(); i++) {
        for (int h = 0; h < n_head; h++) {
            std::copy_n(&sums[h * n + i * page_cells], page_cells, &of_page[(size_t) h * page_cells]);
        }
        // who sees a cell does not depend on the head
        add(stream, open[i].cell / page_cells, of_page.data(), &seen[i * page_cells]);
    }
}

void kvq_probe::scores(int stream, int page, int head, float * out) const {
    const auto found = pages.find({ stream, page });
    std::vector<float> s((size_t) n_head * page_cells, 0.0f);
    std::vector<int32_t> n((size_t) page_cells, 0);
    if (found != pages.end()) { get(found->second, s, n); }
    for (int t = 0; t < page_cells; t++) {
        const float by = normalise ? (float) std::max(n[(size_t) t], 1) : 1.0f;
        out[t] = s[(size_t) head * page_cells + t] / by;
    }
}

void kvq_probe::reopen(int stream, int page, int head, const uint8_t * set) {
    entry & e = at(stream, page);
    std::vector<float> s((size_t) page_cells);
    const std::vector<int32_t> n((size_t) page_cells, 1);
    for (int t = 0; t < page_cells; t++) { s[(size_t) t] = (float) (set[t / 8] >> t % 8 & 1); }
    device->put(there(e) + (size_t) head * page_cells, s.data(), 4 * s.size());
    device->put(there(e) + (size_t) n_head * page_cells, n.data(), 4 * n.size());
    memset(e.stale, 0, sizeof(e.stale)); // of all heads: they follow
}

void kvq_probe::forget(int stream, int page, int slot) {
    const auto found = pages.find({ stream, page });
    if (found != pages.end()) { found->second.stale[slot / 8] |= (uint8_t) (1 << slot % 8); }
}

void kvq_probe::copy(int from, int to) {
    for (auto i = pages.begin(); i != pages.end();) {
        const auto next = std::next(i);
        if (i->first.first == to) { drop(to, i->first.second); }
        i = next;
    }
    std::vector<int> held;
    for (const auto & i : pages) {
        if (i.first.first == from) { held.push_back(i.first.second); }
    }
    for (int p : held) {
        entry & e = at(to, p);
        const entry & f = pages.at({ from, p });
        memcpy(e.stale, f.stale, sizeof(e.stale));
        device->copy(there(e), there(f), nb_entry());
    }
}

// ---------------------------------------------------------------- as a policy of a layer

void kvq_probe::wrote(kvq_lane & x, int s, int p, const uint8_t * slots, int64_t) {
    for (int t = 0; !x.is_value() && t < page_cells; t++) {
        if (slots[t / 8] >> t % 8 & 1) { forget(s, p, t); }
    }
}

void kvq_probe::sealed(kvq_lane & x, int s, const std::vector<int> & due) {
    for (int p : due) { emptied(x, s, p); }
}

void kvq_probe::placing(kvq_lane & x, int s, int p, const kvq_page_image &) { emptied(x, s, p); }

// keys sealed before, from the same scores
void kvq_probe::emptied(kvq_lane & x, int s, int p) {
    if (x.is_value()) { drop(s, p); }
}

void kvq_probe::observed(const kvq_attn & a, int s, uint64_t first, int n_threads) { observe(a, s, first, n_threads); }

static void bytes(const kvq_part &, const kvq_layer_plan &, bool value, kvq_lane_layout & l) {
    if (value) { return; } // sums per head, and who saw a cell
    l.bytes_tables += kvq_pad((size_t) l.n_stream * l.n_frames * l.page_cells * (4 * (size_t) l.n_head + 4), KVQ_ALIGN);
}

static bool attach(const kvq_part & part, kvq_layer_parts & at) {
    if (!at.device.scores()) { return false; }
    at.probe = at.own(new kvq_probe);
    at.probe->init(at.k->layout(), (float) part.get("share"), part.get("normalise") > 0, (uint32_t) at.number,
        (int) part.get("min_rows", 1), at.device);
    at.k->add(at.probe);
    at.v->add(at.probe);
    return true;
}

extern const kvq_policy_kind kvq_policy_probe;
const kvq_policy_kind kvq_policy_probe = { "probe", nullptr, bytes, attach, nullptr };

#include "fetch.h"
#include "kind.h"

#include "engine/far_buffer.h"
#include "store/mark.h"
#include "types/far_rows.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

static size_t nb_table(const kvq_lane_layout & l) {
    return kvq_pad(sizeof(void *) * (size_t) l.n_stream * l.n_pages, KVQ_ALIGN);
}
static size_t nb_cells(const kvq_lane_layout & l, int keeps) {
    return kvq_pad(4 * (size_t) l.n_stream * l.n_head * std::max(keeps, 1), KVQ_ALIGN);
}
static kvq_far_buffer buffer_of(const kvq_lane_layout & l, int format, int keeps) {
    return { l.n_head, keeps, l.n_pages * l.page_cells / 32, 2 * kvq_far_row_bytes(format, l.codec.head_size) };
}
static size_t n_far_pages(const kvq_lane_layout & l) { // pages that may have far rows at once
    return (size_t) l.n_stream * (size_t) (l.n_pages - l.n_sink_pages);
}
static size_t nb_far_page(const kvq_lane_layout & l, int format) {
    return kvq_far_row_bytes(format, l.codec.head_size) * (size_t) l.n_head * l.page_cells;
}

kvq_fetcher::kvq_fetcher(const kvq_part & part, const kvq_lane_layout & keys, const kvq_lane_layout & values,
    kvq_device & device, std::shared_ptr<kvq_far_pool> pool) :
    top((int) part.get("top")),
    format((int) part.get("format")),
    fetch((int) part.get("fetch")),
    keeps((int) part.get("kept")),
    exact(part.get("exact") > 0),
    rows_are_here(device.is_host() || part.text == "host"),
    device(device),
    pool(std::move(pool)) {
    lanes[0].l = keys;
    lanes[1].l = values;
    nb_memory = nb_table(keys) + nb_table(values) + nb_cells(keys, keeps) + KVQ_ALIGN;
    if (keys.bytes_ahead && !device.is_host()) {
        const kvq_far_buffer b = buffer_of(keys, format, keeps);
        nb_buffer = b.size;
        nb_memory += (size_t) keys.n_stream * nb_buffer;
    }
    memory = (uint8_t *) device.alloc(nb_memory); // zeros: no page has rows
    if (!memory) { return; }
    size_t at = 0;
    for (lane_rows & x : lanes) {
        x.nb_page = nb_far_page(x.l, format);
        x.rows.resize((size_t) x.l.n_stream * x.l.n_pages, nullptr);
        x.is_put.resize(x.rows.size(), 0);
        x.there = (void **) (memory + at);
        at += nb_table(x.l);
        device.fetches()->name_far_table(x.there, x.rows.data(), x.rows.size());
    }
    kept = (int32_t *) (memory + at);
    counts = (uint64_t *) (memory + at + nb_cells(keys, keeps));
    if (nb_buffer) { buffer = memory + at + nb_cells(keys, keeps) + KVQ_ALIGN; }
    far.resize((size_t) keys.n_stream);
    anew.resize((size_t) keys.n_stream, picks_ahead());
    std::vector<int32_t> none(nb_cells(keys, keeps) / 4, -1);
    device.put(kept, none.data(), 4 * none.size());
}

kvq_fetcher::~kvq_fetcher() {
    for (lane_rows & x : lanes) {
        for (void * p : x.rows) {
            if (p) { pool->give(p, x.nb_page, &x); }
        }
        pool->leave(x.nb_page, &x);
        if (x.there) { device.fetches()->name_far_table(x.there, nullptr, 0); }
    }
    for (int s = 0; s < lanes[0].l.n_stream; s++) { renew(s, 0, 0, false); }
    if (memory) { device.free(memory, nb_memory); }
}

// ---------------------------------------------------------------- rows of a page

bool kvq_fetcher::take(const kvq_lane & x, int s, int p) const {
    void *& rows = at(x, s, p);
    if (!rows) { rows = pool->take(of(x).nb_page, &of(x), n_far_pages(of(x).l)); }
    return rows != nullptr;
}

void kvq_fetcher::publish(const kvq_lane & x, int s, int p) {
    device.put_address_later(of(x).there + (size_t) s * of(x).l.n_pages + p, at(x, s, p));
}

void kvq_fetcher::release(const kvq_lane & x, int s, int p) {
    void *& rows = at(x, s, p);
    if (!rows) { return; }
    pool->give(rows, of(x).nb_page, &of(x));
    rows = nullptr;
    publish(x, s, p);
    is_put(x, s, p) = 0;
    renew(s, p * of(x).l.page_cells, (p + 1) * of(x).l.page_cells, false);
}

void kvq_fetcher::name_kept(kvq_far & f, int s) const {
    f.kept = kept + (size_t) s * n_kept();
    f.n_kept = keeps;
    f.buffer = buffer ? buffer + (size_t) s * nb_buffer : nullptr;
    f.n_slots = lanes[0].l.n_pages * lanes[0].l.page_cells;
    f.format = format;
    f.n_cells = lanes[0].l.page_cells;
    f.k_rows = lanes[0].there + (size_t) s * lanes[0].l.n_pages;
    f.v_rows = lanes[1].there + (size_t) s * lanes[1].l.n_pages;
}

void kvq_fetcher::renew(int s, int first, int last, bool again) const {
    if (!buffer) { return; }
    kvq_far f = {};
    name_kept(f, s);
    device.fetches()->renew_kept(f, lanes[0].l, first, last, again);
}

// A page without memory for its rows stays open, and exact.
bool kvq_fetcher::may_seal(const kvq_lane & x, int s, int p) const { return take(x, s, p); }

void kvq_fetcher::keep(
    kvq_lane & x, int s, const std::vector<int> & pages, const std::vector<kvq_page_block> & blocks, int n_threads) {
    std::vector<const uint16_t *> tiles;
    std::vector<void *> rows;
    for (size_t i = 0; i < pages.size(); i++) {
        if (!take(x, s, pages[i])) { throw std::bad_alloc(); }
        publish(x, s, pages[i]);
        tiles.push_back(blocks[i].tile);
        rows.push_back(at(x, s, pages[i]));
    }
    device.fetches()->put_far(of(x).l, format, (int) pages.size(), tiles.data(), rows.data(), n_threads);
    for (int p : pages) { // a context shift writes them a second time
        if (is_put(x, s, p)) { renew(s, p * of(x).l.page_cells, (p + 1) * of(x).l.page_cells, true); }
        is_put(x, s, p) = 1;
    }
}

bool kvq_fetcher::recall(const kvq_lane & x, int s, int p, uint16_t * tile) const {
    if (!at(x, s, p)) { return false; }
    device.fetches()->get_far(of(x).l, format, at(x, s, p), tile);
    return true;
}

void kvq_fetcher::state_changed(kvq_lane & x, int s, int p, kvq_page_state, kvq_page_state to) {
    if (to != KVQ_PAGE_SEALED) { release(x, s, p); }
}

void kvq_fetcher::copied_page(kvq_lane & x, int from, int to, int p) {
    if (x.state(from, p) != KVQ_PAGE_SEALED || !at(x, to, p)) { return; }
    device.copy_later(at(x, to, p), at(x, from, p), of(x).nb_page);
    publish(x, to, p);
    is_put(x, to, p) = 1;
}

void kvq_fetcher::copied(kvq_lane & x, int from, int to) {
    const size_t n = n_kept();
    if (x.is_value() || !n) { return; }
    anew[(size_t) to] = anew[(size_t) from];
    device.copy(kept + to * n, kept + from * n, 4 * n); // what the copy reads first
    if (buffer) { device.copy(buffer + (size_t) to * nb_buffer, buffer + (size_t) from * nb_buffer, nb_buffer); }
}

// Its pages are released one by one.
void kvq_fetcher::cleared(kvq_lane & x) {
    for (int s = 0; s < of(x).l.n_stream; s++) { begin_anew(s); }
}

// ---------------------------------------------------------------- saved states

int kvq_fetcher::image_low_bits(const kvq_lane &) const { return KVQ_MARK_PLANES; }

void kvq_fetcher::write_image(
    const kvq_lane & x, int s, int p, const uint8_t *, const uint8_t *, uint16_t * rows) const {
    const kvq_lane_layout & l = of(x).l;
    const int D = l.codec.head_size, stride = l.head_stride(), n = l.n_head * l.page_cells;
    const size_t nb_row = kvq_far_row_bytes(format, D);
    std::vector<uint8_t> copy;
    // the caller has waited for the device: what it wrote to host memory has arrived
    const uint8_t * far_rows =
        rows_are_here ? (const uint8_t *) at(x, s, p) : x.view<uint8_t>(at(x, s, p), of(x).nb_page, copy);
    static thread_local std::vector<uint16_t> row;
    row.resize((size_t) stride);
    for (int i = 0; i < n; i++) {
        kvq_far_get(format, D, far_rows + (size_t) i * nb_row, row.data());
        memcpy(rows + ((size_t) (i % l.page_cells) * l.n_head + i / l.page_cells) * D, row.data(), 2 * (size_t) D);
    }
}

// ---------------------------------------------------------------- attention

void kvq_fetcher::spans(kvq_attn & a, int s) {
    const int all = exact && a.n_q >= KVQ_PROMPT_ROWS;
    a.far = nullptr;
    if (!all && (fetch == KVQ_FETCH_OFF || !top)) { return; }
    kvq_far & f = far[(size_t) s];
    f.fetch = all ? KVQ_FETCH_ALL : anew[(size_t) s] ? KVQ_FETCH_NOW : fetch;
    anew[(size_t) s] = picks_ahead() && a.n_q >= KVQ_PROMPT_ROWS;
    f.top = top;
    f.counts = counts;
    name_kept(f, s);
    a.far = &f;
}

void kvq_fetcher::tell(kvq_stats & stats) const {
    uint64_t now[4];
    device.get(now, counts, sizeof(now));
    stats.n_fetched += now[0];
    stats.n_wanted += now[1];
    stats.n_hits += now[2];
    stats.n_steps += now[3];
}

std::string kvq_fetcher::trouble() { return pool->error(); }

// ---------------------------------------------------------------- as a part of a plan

static void bytes(const kvq_part & part, const kvq_layer_plan &, bool value, kvq_lane_layout & l) {
    const int format = (int) part.get("format");
    l.bytes_far = nb_far_page(l, format) * n_far_pages(l);
    l.bytes_tables += nb_table(l) + (value ? KVQ_ALIGN : nb_cells(l, (int) part.get("kept")));
    if (!value && part.get("kept") > 0) {
        l.bytes_ahead = (size_t) l.n_stream * buffer_of(l, format, (int) part.get("kept")).size;
    }
    l.far_place = part.text == "host" ? kvq_far_place::HOST
        : part.text == "device"       ? kvq_far_place::DEVICE
                                      : kvq_far_place::FILE;
}

static bool attach(const kvq_part & part, kvq_layer_parts & at) {
    if (!at.device.fetches()) {
        at.why = std::string("a second tier is not supported on ") + at.device.name() + ": use kivi or higgs";
        return false;
    }
    const char * why = at.device.fetches()->refuse_far(
        at.k->layout().codec, at.v->layout().codec, (int) part.get("format"), (int) part.get("top"));
    if (why) {
        at.why = why;
        return false;
    }
    std::shared_ptr<void> & pool = at.shared["far"];
    if (!pool) { pool = std::make_shared<kvq_far_pool>(at.device, part.text, at.bytes_far); }
    kvq_far_pool & its = *(kvq_far_pool *) pool.get();
    at.why = its.error();
    if (!its.ok()) { return false; }
    kvq_fetcher * x = at.own(
        new kvq_fetcher(part, at.k->layout(), at.v->layout(), at.device, std::static_pointer_cast<kvq_far_pool>(pool)));
    at.k->add(x);
    at.v->add(x);
    return x->ok();
}

// "; near copy 2.44 bits, 7.32 MiB; every cell once more in host memory, 15.94 bits, 47.81 MiB, 64 of them fetched ..."
static std::string words(const std::vector<kvq_part_of_layer> & layers, const kvq_stats & stats) {
    const kvq_part & part = *layers.front().part;
    const int top = (int) part.get("top"), fetch = (int) part.get("fetch");
    const std::string where = part.text == "host" ? "host memory" : part.text == "device" ? "device memory" : part.text;
    const uint64_t near = stats.bytes_codes + stats.bytes_params + stats.bytes_window + stats.bytes_tables +
        stats.bytes_calibration + stats.bytes_chain;
    const double f16 = (double) std::max<uint64_t>(stats.bytes_f16, 1);
    const auto size = [&](uint64_t nb) {
        char text[64];
        snprintf(text, sizeof(text), "%.2f bits, %.2f MiB", 16.0 * (double) nb / f16, (double) nb / 1048576.0);
        return std::string(text);
    };
    const std::string text =
        "; near copy " + size(near) + "; every cell once more in " + where + ", " + size(stats.bytes_far);
    return text +
        (fetch == KVQ_FETCH_OFF || !top ? std::string(", none is fetched")
                                        : ", " + std::to_string(top) + " of them fetched per KV head and token" +
                    (fetch == KVQ_FETCH_AHEAD
                            ? ", one step ahead, " + std::to_string((int) part.get("kept")) + " stay per KV head"
                            : ""));
}

extern const kvq_policy_kind kvq_policy_fetch;
const kvq_policy_kind kvq_policy_fetch = { "fetch", nullptr, bytes, attach, words };

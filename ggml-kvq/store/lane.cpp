#include "lane.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

// ---------------------------------------------------------------- lane

kvq_lane::kvq_lane(const kvq_lane_layout & layout, bool value, kvq_lane * codes_of, kvq_span_table * spans,
    kvq_scratch * scratch, kvq_counters * counters, kvq_device & device) :
    device(device), scratch(scratch), counters(counters), l(layout), value(value), codes_of(codes_of), spans(spans) {
    nb_on_host = l.bytes_on_host();
    nb_memory = std::max<size_t>(l.bytes_codes + l.bytes_params + l.bytes_window - nb_on_host, 1);
    host_memory = nb_on_host ? (uint8_t *) device.alloc_host(nb_on_host) : nullptr;
    if (nb_on_host && !host_memory) { return; }
    memory = (uint8_t *) device.alloc(nb_memory);
    if (!memory) { return; }
    codes = host_memory ? host_memory : memory;
    params = codes + l.bytes_codes;
    frames = host_memory ? memory : params + l.bytes_params;
    pages.resize((size_t) l.n_pages * l.n_stream);
    valid_bits.resize(pages.size() * (l.page_cells / 8));
    streams.resize(l.n_stream);
    stored.resize(l.moves || l.pooled ? pages.size() : 0, -1);
    pools.resize(l.pooled ? (size_t) l.n_stream : 0, kvq_pool(l));
    clear();
}

kvq_lane::~kvq_lane() {
    if (memory) { device.free(memory, nb_memory); }
    if (host_memory) { device.free(host_memory, nb_on_host); }
}

uint8_t * kvq_lane::codes_at(int s, int p, int h) const {
    const kvq_lane * c = codes_of ? codes_of : this;
    const size_t i = (size_t) c->store_of(s, p);
    if (c->l.pooled) { return c->memory + (size_t) s * c->l.nb_pool + i * c->l.nb_block + (size_t) h * l.nb_codes; }
    return c->codes + (((size_t) s * l.n_store + i) * l.n_head + h) * l.nb_codes;
}

uint8_t * kvq_lane::params_at(int s, int p, int h) const {
    const size_t i = (size_t) store_of(s, p);
    if (l.pooled) {
        return memory + (size_t) s * l.nb_pool + i * l.nb_block + l.nb_block_codes + (size_t) h * l.nb_params;
    }
    return params + (((size_t) s * l.n_store + i) * l.n_head + h) * l.nb_params;
}

uint16_t * kvq_lane::frame_at(int s, int i) const {
    return (uint16_t *) (l.pooled ? memory + ((size_t) s + 1) * l.nb_pool - ((size_t) i + 1) * l.nb_frame
                                  : frames + ((size_t) s * l.n_frames + i) * l.nb_frame);
}

void kvq_lane::set_state(int s, int p, kvq_page_state state) {
    kvq_page_info & i = info(s, p);
    for (kvq_policy * x : policies) { x->state_changed(*this, s, p, (kvq_page_state) i.state, state); }
    i.state = state;
    refresh_span(s, p);
    for (kvq_policy * x : policies) { x->changed(*this, s, p); }
}

void kvq_lane::refresh_span(int s, int p) {
    const kvq_page_info & i = info(s, p);
    const uint8_t state = i.state;
    const size_t at = (size_t) s * spans->n_pages + p;
    kvq_page & span = spans->spans[at];
    if (state == KVQ_PAGE_EMPTY) { span.map = nullptr; }
    const void * c = state == KVQ_PAGE_SEALED ? (const void *) codes_at(s, p, 0) : i.frame;
    const void * q = state == KVQ_PAGE_SEALED && !l.copies ? (const void *) params_at(s, p, 0) : nullptr;
    if (value) {
        span.v_codes = c;
        span.v_params = q;
        spans->v_state[at] = state;
    } else {
        span.k_codes = c;
        span.k_params = q;
        spans->k_state[at] = state;
    }
    span.n_slots = spans->k_state[at] && spans->v_state[at] ? l.page_cells : 0;
    spans->changed(at);
}

int kvq_lane::take_own_frame(int s, int p) {
    if (l.is_f16()) { return p; } // one frame a page, in page order
    if (l.pooled) {
        const int i = pools[(size_t) s].free_frame();
        if (i >= 0) { pools[(size_t) s].put_frame(i, p); }
        return i;
    }
    std::vector<int> & free = streams[s].free_frames;
    const int i = free.empty() ? -1 : free.back();
    if (i >= 0) { free.pop_back(); }
    return i;
}

void kvq_lane::take_frame(int s, int p) {
    kvq_page_info & i = info(s, p);
    stream_state & st = streams[s];
    i.own = take_own_frame(s, p);
    i.frame = i.own < 0 ? scratch->take(l.nb_frame) : frame_at(s, i.own);
    if (!l.is_f16()) { st.open.push_back(p); }
}

void kvq_lane::drop_frame(int s, int p) {
    kvq_page_info & i = info(s, p);
    stream_state & st = streams[s];
    if (!i.frame) { return; }
    if (i.own < 0) {
        scratch->give(i.frame, l.nb_frame);
    } else if (l.pooled) {
        pools[(size_t) s].drop_frame(i.own);
    } else if (!l.is_f16()) {
        st.free_frames.push_back(i.own);
    }
    st.open.erase(std::remove(st.open.begin(), st.open.end(), p), st.open.end());
    i.frame = nullptr;
    i.own = -1;
}

void kvq_lane::take_block(int s, int p) {
    if (l.pooled && stored[(size_t) s * l.n_pages + p] < 0) {
        const int i = pools[(size_t) s].free_block();
        clear_way(s, i);
        pools[(size_t) s].put_block(i, p);
        stored[(size_t) s * l.n_pages + p] = i;
    }
    int32_t * to = l.moves ? &stored[(size_t) s * l.n_pages + p] : nullptr;
    if (to && *to < 0) {
        *to = streams[s].free_blocks.back();
        streams[s].free_blocks.pop_back();
    }
}

void kvq_lane::drop_block(int s, int p) {
    if (l.pooled && stored[(size_t) s * l.n_pages + p] >= 0) {
        pools[(size_t) s].drop_block(stored[(size_t) s * l.n_pages + p]);
        stored[(size_t) s * l.n_pages + p] = -1;
    }
    int32_t * to = l.moves ? &stored[(size_t) s * l.n_pages + p] : nullptr;
    if (to && *to >= 0) {
        streams[s].free_blocks.push_back(*to);
        *to = -1;
    }
}

void kvq_lane::open_page(int s, int p, bool keep) {
    kvq_page_info & i = info(s, p);
    if (i.state == KVQ_PAGE_OPEN) { return; }
    if (i.state == KVQ_PAGE_SEALED) {
        for (kvq_policy * x : policies) {
            if (keep) {
                x->reopening(*this, s, p);
            } else {
                x->replacing(*this, s, p);
            }
        }
        counters->n_reopened++;
    }
    take_frame(s, p);
    if (i.state == KVQ_PAGE_SEALED && keep) {
        decode_page(s, p, i.frame);
        reopened.opened(l, device, s, p, valid(s, p), i.frame);
    } else if (i.state == KVQ_PAGE_EMPTY && (keep || l.head_stride() != l.codec.head_size)) {
        device.zero(i.frame, l.nb_frame); // never-written cells are read as zeros
    }
    drop_block(s, p);
    set_state(s, p, KVQ_PAGE_OPEN);
}

// Rows that follow each other go to one page mostly: what holds for the page is asked once for a run of them.
struct kvq_lane::row_run {
    int64_t begin, end; // of the rows
    int64_t cell0;      // index of the page's first cell
    int s, p;
};

std::vector<kvq_lane::row_run> kvq_lane::runs_of(int64_t n, const int64_t * idx) const {
    std::vector<row_run> runs;
    for (int64_t i = 0; i < n;) {
        const int64_t s = idx[i] / l.n_cells, p = idx[i] % l.n_cells / l.page_cells;
        const int64_t cell0 = s * l.n_cells + p * l.page_cells,
                      end0 = std::min(cell0 + l.page_cells, (s + 1) * l.n_cells);
        int64_t j = i + 1;
        while (j < n && idx[j] >= cell0 && idx[j] < end0) { j++; }
        runs.push_back({ i, j, cell0, (int) s, (int) p });
        i = j;
    }
    return runs;
}

std::vector<uint16_t *> kvq_lane::open_cells(int64_t n, const int64_t * idx) {
    waiting = false;
    const std::vector<row_run> runs = runs_of(n, idx);
    std::vector<int64_t> n_rows((size_t) l.n_stream, 0); // by stream
    for (const row_run & r : runs) { n_rows[(size_t) r.s] += r.end - r.begin; }
    int before = -1; // stream of the run before
    for (const row_run & r : runs) {
        stream_state & stream = streams[(size_t) r.s];
        if (r.s != before) { stream.first = (int) (idx[r.begin] % l.n_cells); }
        before = r.s;
        open_page(r.s, r.p, r.end - r.begin < l.page_cells);
        for (kvq_policy * x : policies) { x->changed(*this, r.s, r.p); }
        kvq_page_info & pi = info(r.s, r.p);
        uint8_t *bits = valid(r.s, r.p), slots[32] = {};
        for (int64_t i = r.begin; i < r.end; i++) {
            const int slot = (int) (idx[i] - r.cell0);
            const uint8_t bit = (uint8_t) (1 << slot % 8);
            slots[slot / 8] |= bit;
            pi.n_valid += bits[slot / 8] & bit ? 0 : 1;
            bits[slot / 8] |= bit;
        }
        stream.clock += (uint64_t) (r.end - r.begin);
        pi.stamp = stream.clock;
        stream.may_seal_ahead = true;
        stream.last = (int) (idx[r.end - 1] % l.n_cells);
        reopened.wrote(r.s, r.p, slots);
        for (kvq_policy * x : policies) { x->wrote(*this, r.s, r.p, slots, n_rows[(size_t) r.s]); }
    }
    is_dirty = true;

    std::vector<uint16_t *> to((size_t) n); // frames move while pages open: asked for behind all of that
    for (const row_run & r : runs) {
        uint16_t * const frame = info(r.s, r.p).frame;
        for (int64_t i = r.begin; i < r.end; i++) { to[(size_t) i] = frame + (idx[i] - r.cell0) * l.head_stride(); }
    }
    return to;
}

void kvq_lane::write(
    int64_t n, const int64_t * idx, const float * rows, size_t row_stride, int n_threads, const int32_t * pos) {
    const std::vector<uint16_t *> to = open_cells(n, idx);
    bool tagged = false;
    for (kvq_policy * x : policies) { tagged |= pos && x->tags_rows(*this); }
    device.write_rows(l, n, to.data(), rows, row_stride, tagged ? pos : nullptr, n_threads);
    for (kvq_policy * x : policies) { x->written(*this, n, idx, pos, to.data()); }
}

// ---------------------------------------------------------------- encode, decode

kvq_page_block kvq_lane::block(int s, int p, uint16_t * tile) const {
    const bool all = info(s, p).n_valid == l.page_cells;
    uint8_t * c = codes_at(s, p, 0);
    return { tile, all ? nullptr : valid(s, p), codes_of ? c : nullptr, codes_of ? nullptr : c, params_at(s, p, 0) };
}

bool kvq_lane::recall_page(int s, int p, uint16_t * tile) const {
    return std::any_of(
        policies.begin(), policies.end(), [&](const kvq_policy * x) { return x->recall(*this, s, p, tile); });
}

void kvq_lane::keep_page(int s, int p, uint16_t * tile) {
    for (kvq_policy * x : policies) { x->keep(*this, s, { p }, { block(s, p, tile) }, 1); }
}

void kvq_lane::encode_page(int s, int p, uint16_t * tile) {
    keep_page(s, p, tile);
    std::vector<kvq_page_block> b = { block(s, p, tile) };
    for (kvq_policy * x : policies) { x->leave_out(*this, s, { p }, b, 1); }
    device.encode(l, b.data(), 1, 1);
    for (kvq_policy * x : policies) { x->encoded(*this); }
}

void kvq_lane::decode_page(int s, int p, uint16_t * tile) const {
    if (recall_page(s, p, tile)) { return; }
    device.decode(l, { tile, nullptr, nullptr, codes_at(s, p, 0), params_at(s, p, 0) });
    for (const kvq_policy * x : policies) { x->put_back(*this, s, p, tile); }
}

// ---------------------------------------------------------------- commit

void kvq_lane::seal(int s, const std::vector<int> & due, int n_threads) {
    if (due.empty()) { return; }
    for (kvq_policy * x : policies) {
        if (!x->take(*this, s, due, n_threads)) { continue; }
        for (int p : due) { empty_page(s, p); }
        return;
    }
    std::vector<kvq_page_block> blocks;
    for (int p : due) { take_block(s, p); } // frames may move
    for (int p : due) { blocks.push_back(block(s, p, info(s, p).frame)); }
    for (kvq_policy * x : policies) { x->choose(*this, s, due); }
    for (kvq_policy * x : policies) { x->keep(*this, s, due, blocks, n_threads); }
    for (kvq_policy * x : policies) { x->leave_out(*this, s, due, blocks, n_threads); }
    device.encode(l, blocks.data(), (int) blocks.size(), n_threads);
    for (kvq_policy * x : policies) { x->encoded(*this); }
    for (int p : due) {
        drop_frame(s, p);
        set_state(s, p, KVQ_PAGE_SEALED);
        counters->n_sealed++;
    }
    for (kvq_policy * x : policies) { x->sealed(*this, s, due); }
    if (l.pooled) { bring_home(s); } // what made way for blocks
}

void kvq_lane::commit(int n_threads) {
    if (!is_dirty || waiting) { return; }
    is_dirty = false;
    try {
        for (int s = 0; s < l.n_stream && !l.is_f16(); s++) { commit_stream(s, n_threads); }
    } catch (const std::bad_alloc &) {
        is_dirty = true; // what is open still is due again
        throw;
    }
    is_dirty = is_dirty && !l.pooled; // what made way while pages sealed has its place again
}

// Pages that leave the window, oldest first.
std::vector<int> kvq_lane::due_pages(int s) {
    const stream_state & st = streams[s];
    // cells behind the one just written may be left from a freed sequence
    const auto n_live = [&](int p) {
        const int n = info(s, p).n_valid;
        return st.last / l.page_cells == p ? std::min(n, st.last % l.page_cells + 1) : n;
    };
    // open pages but the sinks, oldest first
    std::vector<int> open;
    int rows = 0;
    for (int p : st.open) {
        if (p >= l.n_sink_pages) {
            open.push_back(p);
            rows += n_live(p);
        }
    }
    std::sort(open.begin(), open.end(), [&](int a, int b) { return info(s, a).stamp < info(s, b).stamp; });

    if (l.pooled) { return due_pages_of_pool(s, open); }
    std::vector<int> due;
    const auto take = [&](size_t i) {
        rows -= n_live(open[i]);
        due.push_back(open[i]);
        open.erase(open.begin() + (long) i);
    };
    const auto full = [&](int p) {
        return info(s, p).n_valid == l.page_cells &&
            (st.last / l.page_cells != p || st.last % l.page_cells == l.page_cells - 1);
    };
    // The newest page waits until it is full: to its last cell, since what is left behind that would be sealed anew
    // with every cell that overwrites it. Others that are not full were left behind by freed cells and seal as they
    // are: if they stayed, they would take the window's room from live cells.
    while (rows > l.window && (int) due.size() < n_may_seal(s) && !open.empty() && (open.size() > 1 || full(open[0]))) {
        counters->n_forced += info(s, open[0]).n_valid < l.page_cells;
        take(0);
    }
    // more open pages than frames
    const int n_frames = l.n_frames - std::min(l.n_sink_pages, l.n_frames);
    while ((int) open.size() > std::max(n_frames, 1) &&
        (int) due.size() < n_may_seal(s)) { // without room no more are open
        counters->n_forced++;
        take(0);
    }
    return due;
}

void kvq_lane::commit_stream(int s, int n_threads) {
    stream_state & st = streams[s];
    std::vector<int> due = due_pages(s);
    const auto waits = [&](int p) {
        return std::any_of(
            policies.begin(), policies.end(), [&](const kvq_policy * x) { return !x->may_seal(*this, s, p); });
    };
    const auto end = std::remove_if(due.begin(), due.end(), waits);
    is_dirty = is_dirty || end != due.end();
    due.erase(end, due.end());
    for (kvq_policy * x : policies) { x->before_seal(*this, s, due, n_threads); }
    seal(s, due, n_threads);
    bring_home(s);
    st.committed = st.clock;
    st.may_seal_ahead = false;
}

// Open pages in scratch move into frames of the lane.
void kvq_lane::bring_home(int s) {
    for (int p : streams[(size_t) s].open) {
        kvq_page_info & i = info(s, p);
        if (i.own >= 0) { continue; }
        if (l.pooled) { close_up(s); }
        i.own = take_own_frame(s, p);
        if (i.own < 0) { break; }
        uint16_t * from = i.frame;
        i.frame = frame_at(s, i.own);
        device.copy_later(i.frame, from, l.nb_frame);
        if (l.turned || l.centred) { // other lanes take tiles for sealing now
            scratch->rest(from, l.nb_frame);
        } else {
            scratch->give(from, l.nb_frame);
        }
        set_state(s, p, KVQ_PAGE_OPEN);
    }
}

// ---------------------------------------------------------------- copy, clear

void kvq_lane::copy_stream(int from, int to) {
    waiting = false;
    reopened.forget_stream(to);
    device.flush(); // pages are copied together: all of their bytes must have arrived
    if (l.moves) {
        std::copy_n(stored.begin() + (long) from * l.n_pages, l.n_pages, stored.begin() + (long) to * l.n_pages);
        streams[to].free_blocks = streams[from].free_blocks;
    }
    if (l.pooled) { // what lies where is copied too
        for (const int p : std::vector<int>(streams[(size_t) to].open)) { drop_frame(to, p); }
        std::copy_n(stored.begin() + (long) from * l.n_pages, l.n_pages, stored.begin() + (long) to * l.n_pages);
        pools[(size_t) to] = pools[(size_t) from];
    }
    for (int p = 0; p < l.n_pages; p++) {
        drop_frame(to, p);
        kvq_page_info &src = info(from, p), &dst = info(to, p);
        dst.stamp = src.stamp;
        dst.n_valid = src.n_valid;
        const bool fits = src.state != KVQ_PAGE_SEALED ||
            std::all_of(policies.begin(), policies.end(), [&](kvq_policy * x) { return x->may_copy(*this, to, p); });
        for (kvq_policy * x : policies) { x->copied_page(*this, from, to, p); }
        memcpy(valid(to, p), valid(from, p), l.page_cells / 8);
        if (!fits) {
            take_frame(to, p);
            decode_page(from, p, dst.frame);
            set_state(to, p, KVQ_PAGE_OPEN);
            continue;
        }
        if (src.state == KVQ_PAGE_SEALED) {
            if (!codes_of && l.nb_codes) {
                device.copy_later(codes_at(to, p, 0), codes_at(from, p, 0), l.nb_codes * l.n_head);
            }
            device.copy_later(params_at(to, p, 0), params_at(from, p, 0), l.nb_params * l.n_head);
        } else if (src.state == KVQ_PAGE_OPEN && l.pooled) {
            dst.own = src.own;
            dst.frame = src.own < 0 ? scratch->take(l.nb_frame) : frame_at(to, src.own);
            streams[to].open.push_back(p);
            device.copy_later(dst.frame, src.frame, l.nb_frame);
        } else if (src.state == KVQ_PAGE_OPEN) {
            take_frame(to, p);
            device.copy_later(dst.frame, src.frame, l.nb_frame);
        }
        set_state(to, p, (kvq_page_state) src.state);
        if (l.pooled && src.state == KVQ_PAGE_SEALED) {
            for (kvq_policy * x : policies) { x->moved(*this, to, p); }
        }
    }
    device.flush();
    for (kvq_policy * x : policies) { x->copied(*this, from, to); }
    streams[to].clock = streams[to].committed = streams[from].clock;
    streams[to].restored = streams[from].restored;
    is_dirty = true; // frames taken from scratch go home at the next commit
}

void kvq_lane::drop_from(int s, int cell) {
    for (const int p : std::vector<int>(streams[s].open)) {
        kvq_page_info & i = info(s, p);
        uint8_t * bits = valid(s, p);
        for (int t = std::max(cell - p * l.page_cells, 0); t < l.page_cells; t++) {
            i.n_valid = (uint16_t) (i.n_valid - (bits[t / 8] >> t % 8 & 1));
            bits[t / 8] &= (uint8_t) ~(1 << t % 8);
        }
        if (!i.n_valid) { empty_page(s, p); }
    }
}

void kvq_lane::empty_page(int s, int p) {
    reopened.forget(s, p);
    drop_frame(s, p);
    drop_block(s, p);
    std::fill_n(valid(s, p), l.page_cells / 8, (uint8_t) 0);
    info(s, p).n_valid = 0;
    set_state(s, p, KVQ_PAGE_EMPTY);
    for (kvq_policy * x : policies) { x->emptied(*this, s, p); }
}

void kvq_lane::clear() {
    for (int s = 0; s < l.n_stream; s++) {
        stream_state & st = streams[s];
        for (int p = 0; p < l.n_pages; p++) {
            kvq_page_info & i = info(s, p);
            if (i.frame && i.own < 0) { scratch->give(i.frame, l.nb_frame); }
            for (kvq_policy * x : policies) { x->state_changed(*this, s, p, (kvq_page_state) i.state, KVQ_PAGE_EMPTY); }
            i = kvq_page_info{};
            i.own = -1;
            set_state(s, p, KVQ_PAGE_EMPTY);
        }
        st.clock = st.committed = 0;
        st.may_seal_ahead = st.restored = false;
        st.open.clear();
        st.free_blocks.clear();
        for (int i = l.moves ? l.n_store : 0; i > 0; i--) { st.free_blocks.push_back(i - 1); }
        st.free_frames.clear();
        for (int f = l.is_f16() ? 0 : l.n_frames; f > 0; f--) { st.free_frames.push_back(f - 1); }
    }
    for (kvq_policy * x : policies) { x->cleared(*this); }
    for (kvq_pool & x : pools) { x.clear(); }
    std::fill(stored.begin(), stored.end(), -1);
    std::fill(valid_bits.begin(), valid_bits.end(), 0);
    reopened.clear();
    is_dirty = waiting = false;
}

// ---------------------------------------------------------------- rows edited in place

void kvq_lane::edit(int stream, const kvq_any_cell & any, const kvq_edit_row & fn) {
    const int stride = l.head_stride();
    std::vector<uint8_t> copy;
    for (kvq_policy * x : policies) { x->edit(*this, stream, any, fn); }
    for (int p = 0; p < l.n_pages; p++) {
        kvq_page_info & i = info(stream, p);
        const auto holds = [&](int t) { return p * l.page_cells + t < l.n_cells && is_valid(stream, p, t); };
        bool touched = false;
        for (int t = 0; i.state != KVQ_PAGE_EMPTY && t < l.page_cells && !touched; t++) {
            touched = holds(t) && any(p * l.page_cells + t);
        }
        if (!touched) { continue; }
        reopened.forget(stream, p);
        const bool sealed = i.state == KVQ_PAGE_SEALED;
        uint16_t * tile = i.frame;
        if (sealed) {
            tile = scratch->take(l.nb_frame);
            decode_page(stream, p, tile);
            for (kvq_policy * x : policies) { x->reencoding(*this, stream, p); }
        }
        uint16_t * rows = view<uint16_t>(tile, l.nb_frame, copy);
        for (int h = 0; h < l.n_head; h++) {
            for (int t = 0; t < l.page_cells; t++) {
                if (holds(t)) { fn(p * l.page_cells + t, h, rows + ((size_t) h * l.page_cells + t) * stride); }
            }
        }
        if (rows != tile) { device.put(tile, rows, l.nb_frame); }
        if (sealed) {
            encode_page(stream, p, tile);
            scratch->give(tile, l.nb_frame);
            for (kvq_policy * x : policies) { x->reencoded(*this, stream, p); }
        }
    }
}

bool kvq_lane::is_plain(int stream, int page) const {
    return std::all_of(
        policies.begin(), policies.end(), [&](const kvq_policy * x) { return x->is_plain(stream, page); });
}

#include "evict.h"
#include "kind.h"

#include "engine/host.h"
#include "types/types.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <new>

constexpr size_t RECENT_RUN = 4; // pages
constexpr int FIRST_CELLS = 4;   // of a stream, as many as StreamingLLM (arXiv 2309.17453) keeps

bool kvq_evict::candidate::holds_nothing() const {
    return std::all_of(map.begin(), map.end(), [](int32_t c) { return c < 0; });
}

size_t kvq_evict::nb_page(int n_head, int page_cells) {
    return sizeof(slot_page) + sizeof(kvq_page) + 4 * (size_t) n_head * page_cells;
}

void kvq_evict::init(
    kvq_lane & k, kvq_lane & v, kvq_span_table & table, kvq_probe & its_scores, float keep_, float recent_) {
    release();
    device = &k.device;
    lane[0] = &k;
    lane[1] = &v;
    spans_table = &table;
    scores = &its_scores;
    keep = keep_;
    recent = recent_;
    n_head = k.layout().n_head;
    page_cells = k.layout().page_cells;
    n_store = k.layout().n_store;
    n_pages = k.layout().n_pages;
    n_stream = k.layout().n_stream;
    pages.resize((size_t) n_stream * n_store);
    maps.resize(pages.size() * n_head * page_cells);
    prompt.resize((size_t) n_stream * n_pages * page_cells);
    open_maps.resize((size_t) n_stream * n_pages);
    open_there.assign(open_maps.size(), nullptr);
    spans_table->packed = !device->is_host();
    maps_there = device->is_host() ? maps.data() : (int32_t *) device->alloc(4 * maps.size());
    if (!maps_there) { throw std::bad_alloc(); }
    clear();
}

void kvq_evict::release() {
    if (maps_there && maps_there != maps.data()) { device->free(maps_there, 4 * maps.size()); }
    maps_there = nullptr;
}

void kvq_evict::set_map(int s, int i, const int32_t * from) {
    slot_page & p = page(s, i);
    p.lo = n_pages * page_cells;
    p.hi = -1;
    for (int j = 0; j < n_head * page_cells; j++) {
        map(s, i, 0)[j] = from[j];
        p.lo = from[j] >= 0 ? std::min(p.lo, from[j]) : p.lo;
        p.hi = std::max(p.hi, from[j]);
    }
}

void kvq_evict::put_map(int s, int i) {
    const size_t n = (size_t) n_head * page_cells;
    if (maps_there != maps.data()) { device->put(maps_there + ((size_t) s * n_store + i) * n, map(s, i, 0), 4 * n); }
}

void kvq_evict::clear() {
    for (int s = 0; s < n_stream; s++) {
        for (int i = 0; i < n_store; i++) { free_page(s, i); }
    }
    std::fill(prompt.begin(), prompt.end(), 0);
    top.assign((size_t) n_stream, 0);
    restored_at.assign((size_t) n_stream, 0);
    written_end.assign((size_t) n_stream, 0);
    in_prompt.assign((size_t) n_stream, 0);
    keys_arrive.assign((size_t) n_stream, 0);
    for (auto & m : open_maps) { m.clear(); }
    for (auto & m : open_there) {
        if (m) { lane[0]->scratch->give((uint16_t *) m, 4 * (size_t) n_head * page_cells); }
        m = nullptr;
    }
    absent.clear();
    queue.clear();
    arrived.clear();
}

int kvq_evict::n_used(int s) const {
    int n = 0;
    for (int i = 0; i < n_store; i++) { n += pages[(size_t) s * n_store + i].used; }
    return n;
}

void kvq_evict::free_page(int s, int i) {
    page(s, i) = slot_page{};
    std::fill_n(map(s, i, 0), n_head * page_cells, -1);
    show(s, i);
}

void kvq_evict::show(int s, int i) {
    const size_t at = (size_t) s * spans_table->n_pages + n_pages + i;
    kvq_page & span = spans_table->spans[at];
    const bool on = page(s, i).used;
    spans_table->changed(at);
    span.k_codes = on ? lane[0]->codes_at(s, i, 0) : nullptr;
    span.k_params = on ? lane[0]->params_at(s, i, 0) : nullptr;
    span.v_codes = on ? lane[1]->codes_at(s, i, 0) : nullptr;
    span.v_params = on ? lane[1]->params_at(s, i, 0) : nullptr;
    span.map = maps_there + (size_t) (map(s, i, 0) - maps.data());
    span.n_slots = on ? page_cells : 0;
    const int32_t *m = map(s, i, 0), *end = m + (size_t) n_head * page_cells;
    // without gaps: the mask is looked at once
    span.cell = on && *std::min_element(m, end) >= 0 ? -1 - *std::max_element(m, end) : 0;
}

// ---------------------------------------------------------------- writing

void kvq_evict::wrote(kvq_lane & x, int s, int p, const uint8_t * slots, int64_t n_rows) {
    if (x.is_value()) { return; }
    for (int t = 0; t < page_cells; t++) {
        if (slots[t / 8] >> t % 8 & 1) { forget(s, p * page_cells + t); }
    }
    const bool asked = n_rows >= KVQ_PROMPT_ROWS && !is_restoring; // who wrote what a state holds is not known
    uint8_t * flags = prompt.data() + ((size_t) s * n_pages + p) * page_cells;
    forget_all(s);
    for (int t = 0; t < page_cells; t++) {
        if (slots[t / 8] >> t % 8 & 1) {
            flags[t] |= asked ? OF_PROMPT : 0;
            written_end[(size_t) s] = std::max(written_end[(size_t) s], p * page_cells + t + 1);
        }
    }
    in_prompt[(size_t) s] = asked;
    keys_arrive[(size_t) s] &= is_restoring;
    if (asked) { top[(size_t) s] = (int64_t) lane[0]->clock(s); }
    mask_open(s, p);
}

void kvq_evict::limit(int s, int n_cells) {
    int & end = written_end[(size_t) s];
    if (n_cells >= end) { return; }
    for (int c = n_cells; c < end; c++) { forget(s, c); }
    forget_all(s);
    end = n_cells;
    for (kvq_lane * x : lane) { x->drop_from(s, n_cells); }
    if (n_cells % page_cells && lane[0]->state(s, n_cells / page_cells) == KVQ_PAGE_OPEN) {
        mask_open(s, n_cells / page_cells);
    }
}

void kvq_evict::forget(int s, int cell) {
    if (is_restoring) { // restore() has
        return;
    }
    uint8_t & flags = prompt[(size_t) s * n_pages * page_cells + cell];
    if (flags & (AWAY | PARTLY)) { rewritten.push_back(cell); }
    flags = 0;
    const int p = cell / page_cells, t = cell % page_cells;
    const auto found = absent.find({ s, p });
    for (int h = 0; found != absent.end() && h < n_head; h++) { found->second[(size_t) h * page_cells + t] = 0; }
}

void kvq_evict::forget_all(int s) {
    if (rewritten.empty()) { return; }
    const int first = *std::min_element(rewritten.begin(), rewritten.end()),
              last = *std::max_element(rewritten.begin(), rewritten.end());
    std::vector<uint8_t> gone((size_t) (last - first + 1), 0);
    for (int c : rewritten) { gone[(size_t) (c - first)] = 1; }
    rewritten.clear();
    for (int i = 0; i < n_store; i++) {
        if (!page(s, i).used || page(s, i).lo > last || page(s, i).hi < first) { continue; }
        bool any = false, all = true;
        for (int32_t *m = map(s, i, 0), *end = m + (size_t) n_head * page_cells; m < end; m++) {
            if (*m >= first && *m <= last && gone[(size_t) (*m - first)]) {
                *m = -1;
                any = true;
            }
            all &= *m < 0;
        }
        if (any) { put_map(s, i); }
        if (any && all) {
            free_page(s, i);
        } else if (any) {
            show(s, i);
        }
    }
}

// Cells of an open page that are sealed elsewhere, or were evicted, must not be seen as zeros.
void kvq_evict::mask_open(int s, int p) {
    const uint8_t * flags = prompt.data() + ((size_t) s * n_pages + p) * page_cells;
    kvq_page & span = spans_table->spans[(size_t) s * spans_table->n_pages + p];
    std::vector<int32_t> & m = open_maps[(size_t) s * n_pages + p];
    m.resize((size_t) n_head * page_cells);
    bool any = false;
    const bool some_evicted = absent.count({ s, p });
    for (int h = 0; h < n_head; h++) {
        for (int t = 0; t < page_cells; t++) {
            const bool gone = flags[t] & AWAY || (some_evicted && is_evicted(s, p, h, t));
            m[(size_t) h * page_cells + t] = gone ? -1 : p * page_cells + t;
            any |= gone;
        }
    }
    if (!any) { m = {}; }
    const int32_t * was = span.map;
    span.map = any ? m.data() : nullptr;
    if (!device->is_host()) {
        int32_t *& there = open_there[(size_t) s * n_pages + p];
        const size_t nb = 4 * (size_t) n_head * page_cells;
        if (any) {
            there = there ? there : (int32_t *) lane[0]->scratch->take(nb);
            device->put(there, m.data(), nb);
        } else if (there) {
            lane[0]->scratch->give((uint16_t *) there, nb);
            there = nullptr;
        }
        span.map = there;
    }
    if (span.map != was) { spans_table->changed((size_t) s * spans_table->n_pages + p); }
}

void kvq_evict::note_absent(int s, int cell, const uint8_t * left) {
    const int p = cell / page_cells, t = cell % page_cells;
    const bool all = std::all_of(left, left + n_head, [](uint8_t held) { return held; });
    if (lane[0]->state(s, p) != KVQ_PAGE_OPEN || (all && !absent.count({ s, p }))) { return; }
    std::vector<uint8_t> & of = absent[{ s, p }];
    of.resize((size_t) n_head * page_cells, 0);
    for (int h = 0; h < n_head; h++) { of[(size_t) h * page_cells + t] = !left[h]; }
}

bool kvq_evict::is_plain(int s, int p) const {
    const uint8_t * flags = prompt.data() + ((size_t) s * n_pages + p) * page_cells;
    return !absent.count({ s, p }) &&
        std::none_of(flags, flags + page_cells, [](uint8_t x) { return x & (AWAY | PARTLY); });
}

// An open key that was restored, and not for head h. What its row holds does not tell: a context shift may edit it.
bool kvq_evict::is_evicted(int s, int p, int h, int t) const {
    if (absent.empty() || !lane[0]->info(s, p).frame) { return false; }
    const auto found = absent.find({ s, p });
    return found != absent.end() && found->second[(size_t) h * page_cells + t];
}

void kvq_evict::restoring(bool on) {
    is_restoring = on;
    for (int s = 0; !on && s < n_stream; s++) {
        for (int p : lane[0]->open_pages(s)) { mask_open(s, p); }
    }
}

// ---------------------------------------------------------------- sealing

// Cells of a prompt in an open page.
int kvq_evict::n_prompt_cells(int s, int p) const {
    const uint8_t * flags = prompt.data() + ((size_t) s * n_pages + p) * page_cells;
    int n = 0;
    for (int t = 0; t < page_cells; t++) { n += lane[0]->is_valid(s, p, t) && (flags[t] & OF_PROMPT); }
    return n;
}

// In the order of writing; older cells of the prompt in one run, those within the newest in short ones.
std::vector<kvq_evict::run> kvq_evict::runs_of(int s, const std::vector<int> & due, int64_t first_recent) const {
    const kvq_lane & k = *lane[0];
    std::vector<int> order = due;
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return k.info(s, a).stamp < k.info(s, b).stamp; });
    std::vector<run> runs;
    for (int p : order) {
        const bool asked = 2 * n_prompt_cells(s, p) >= k.info(s, p).n_valid,
                   is_recent = asked && (int64_t) k.info(s, p).stamp >= first_recent;
        if (runs.empty() || runs.back().of_prompt != asked || runs.back().recent != is_recent ||
            (is_recent && runs.back().pages.size() == RECENT_RUN)) {
            runs.push_back({ {}, asked, is_recent });
        }
        runs.back().pages.push_back(p);
    }
    return runs;
}

bool kvq_evict::has_first_cell(const int32_t * m) const {
    return std::any_of(m, m + (size_t) n_head * page_cells, [](int32_t c) { return c >= 0 && c < FIRST_CELLS; });
}

// Pages go, the worst first, until with the fresh ones there are no more than `budget`. The page with the first cells
// of the stream goes last, unless they belong to a prompt and prompts are `judged`: then scores alone decide.
void kvq_evict::drop_excess(int s, int budget, bool judged, int64_t first_recent, std::vector<candidate> & fresh) {
    if (n_used(s) + (int) fresh.size() <= budget) { return; }
    std::vector<int> may_go; // pages; those being restored, whose values are still to come, stay
    std::vector<uint8_t> begins((size_t) n_store, 0);
    for (int i = 0; i < n_store; i++) {
        if (page(s, i).used && std::none_of(arrived.begin(), arrived.end(), [&](const auto & a) {
                return a.first.first == s && a.second.page == i;
            })) {
            may_go.push_back(i);
            begins[(size_t) i] =
                (page(s, i).generated || !judged) && page(s, i).lo < FIRST_CELLS && has_first_cell(map(s, i, 0));
        }
    }
    const auto rank = [&](const slot_page & x, bool first) {
        return first ? 3 : x.generated ? 2 : x.newest >= first_recent;
    };
    const auto worse = [&](const slot_page & a, bool first_a, const slot_page & b, bool first_b) {
        const int ra = rank(a, first_a), rb = rank(b, first_b);
        return ra != rb ? ra < rb : ra >= 2 ? a.newest < b.newest : a.score < b.score;
    };
    const auto worse_page = [&](int x, int y) {
        return worse(page(s, x), begins[(size_t) x], page(s, y), begins[(size_t) y]);
    };
    const auto begins_fresh = [&](const candidate & x) {
        return (x.info.generated || !judged) && has_first_cell(x.map.data());
    };
    const auto worse_fresh = [&](const candidate & x, const candidate & y) {
        return worse(x.info, begins_fresh(x), y.info, begins_fresh(y));
    };
    for (int n = n_used(s) + (int) fresh.size(); n > budget && may_go.size() + fresh.size() > 0; n--) {
        const auto a = std::min_element(may_go.begin(), may_go.end(), worse_page);
        const auto b = std::min_element(fresh.begin(), fresh.end(), worse_fresh);
        if (b == fresh.end() ||
            (a != may_go.end() && !worse(b->info, begins_fresh(*b), page(s, *a), begins[(size_t) *a]))) {
            free_page(s, *a);
            may_go.erase(a);
        } else {
            fresh.erase(b);
        }
    }
}

// Decides what stays of pages that are due; made: pages that were filled, places: where the engine packed them.
void kvq_evict::seal_keys(
    int s, const std::vector<int> & due, std::vector<int> & made, std::vector<int> & places, kvq_packed & packed) {
    const kvq_lane & k = *lane[0];
    uint8_t * const flags = prompt.data() + (size_t) s * n_pages * page_cells;
    int n_prompt = 0, n_open = 0;
    for (int c = 0; c < n_pages * page_cells; c++) { n_prompt += flags[c] & OF_PROMPT; }
    for (int p : k.open_pages(s)) {
        n_open += std::binary_search(due.begin(), due.end(), p) ? 0 : n_prompt_cells(s, p);
    }
    const bool judged = in_prompt[(size_t) s] && !is_restoring && keep < 1.0f;
    const int64_t first_recent = top[(size_t) s] + 1 - std::lround(recent * (float) n_prompt);
    const std::vector<run> runs = runs_of(s, due, first_recent);
    std::vector<candidate> fresh = pack(s, runs, judged, packed);
    int n_generated = 0; // pages
    for (candidate & c : fresh) {
        const run & r = runs[(size_t) c.run];
        c.info.used = true;
        c.info.generated = !r.of_prompt;
        c.info.newest = (int64_t) k.info(s, r.of_prompt ? r.pages.back() : r.pages[(size_t) c.index]).stamp;
        n_generated += !r.of_prompt;
    }
    for (int i = 0; i < n_store; i++) { n_generated += page(s, i).used && page(s, i).generated; }
    int budget = n_store;
    if (judged) {
        const float n_kept = keep * (float) n_prompt - (float) n_open;
        budget = std::min(budget, std::max((int) std::lround(n_kept / (float) page_cells), 1) + n_generated);
    }
    drop_excess(s, budget, judged, first_recent, fresh);
    for (int i = 0, j = 0; j < (int) fresh.size(); i++) {
        if (page(s, i).used) { continue; }
        page(s, i) = fresh[(size_t) j].info;
        set_map(s, i, fresh[(size_t) j].map.data());
        made.push_back(i);
        places.push_back(fresh[(size_t) j].place);
        j++;
    }
    for (int p : due) {
        for (int t = 0; t < page_cells; t++) {
            if (k.is_valid(s, p, t)) { flags[p * page_cells + t] |= AWAY; }
        }
        absent.erase({ s, p });
    }
}

bool kvq_evict::take(kvq_lane & x, int s, const std::vector<int> & due_, int n_threads) {
    const bool value = x.is_value();
    std::vector<int> due = due_;
    std::sort(due.begin(), due.end());
    std::vector<int> made, places;
    kvq_packed packed;
    const auto found =
        std::find_if(queue.begin(), queue.end(), [&](const pending & y) { return y.stream == s && y.due == due; });
    if (value) {
        if (found == queue.end()) { return true; } // values without keys: cells that are nowhere are evicted ones
        made = found->pages;
    } else {
        // both lanes' memory first: what is decided then holds
        for (const kvq_lane * y : lane) { y->scratch->expect(y->layout().nb_frame, due.size()); }
        seal_keys(s, due, made, places, packed);
        queue.push_back({ s, due, made });
    }
    encode(value, s, due, made, packed, places, n_threads);
    if (value) { queue.erase(found); }
    for (int i : made) {
        x.counters->n_sealed++;
        if (value) { show(s, i); }
    }
    return true;
}

// ---------------------------------------------------------------- shift, copy

void kvq_evict::edit(kvq_lane & x, int s, const kvq_any_cell & any, const kvq_edit_row & fn) {
    const bool value = x.is_value();
    const kvq_lane_layout & l = x.layout();
    const size_t D = (size_t) l.codec.head_size;
    std::vector<uint16_t> block((size_t) page_cells * D);
    std::vector<uint8_t> codes, params;
    for (int i = 0; i < n_store; i++) {
        for (int h = 0; page(s, i).used && h < n_head; h++) {
            const int32_t * m = map(s, i, h);
            if (std::none_of(m, m + page_cells, [&](int32_t c) { return c >= 0 && any(c); })) { continue; }
            kvq_traits(l.codec.type)
                ->decode(l.codec, x.view<uint8_t>(x.codes_at(s, i, h), l.nb_codes, codes),
                    x.view<uint8_t>(x.params_at(s, i, h), l.nb_params, params), block.data());
            std::vector<uint8_t> valid((size_t) page_cells / 8, 0);
            for (int t = 0; t < page_cells; t++) {
                if (m[t] >= 0) {
                    fn(m[t], h, &block[(size_t) t * D]);
                    valid[(size_t) t / 8] |= (uint8_t) (1 << t % 8);
                }
            }
            encode_rows(value, s, i, h, block, valid.data());
        }
    }
}

void kvq_evict::copied(kvq_lane & x, int from, int to) {
    const kvq_lane_layout & l = x.layout();
    kvq_device & d = x.device;
    for (int i = 0; i < n_store; i++) {
        d.copy(x.codes_at(to, i, 0), x.codes_at(from, i, 0), l.nb_codes * n_head);
        d.copy(x.params_at(to, i, 0), x.params_at(from, i, 0), l.nb_params * n_head);
        page(to, i) = page(from, i);
        std::copy_n(map(from, i, 0), n_head * page_cells, map(to, i, 0));
        put_map(to, i);
        show(to, i);
    }
    for (int p = 0; p < n_pages; p++) {
        absent.erase({ to, p });
        const auto found = absent.find({ from, p });
        if (found != absent.end()) { absent[{ to, p }] = found->second; }
    }
    std::copy_n(prompt.begin() + (long) from * n_pages * page_cells, n_pages * page_cells,
        prompt.begin() + (long) to * n_pages * page_cells);
    top[(size_t) to] = top[(size_t) from];
    written_end[(size_t) to] = written_end[(size_t) from];
    in_prompt[(size_t) to] = in_prompt[(size_t) from];
    for (int p = 0; p < n_pages; p++) { mask_open(to, p); }
}

// ---------------------------------------------------------------- as a policy of a layer

void kvq_evict::spans(kvq_attn & a, int) {
    a.n_pages = spans_table->n_pages; // pages of slots lie behind the others
    a.map_stride = page_cells;
}

static void shape(const kvq_part & part, const kvq_layer_plan &, bool, kvq_lane_layout & l) {
    l.evicts = true;
    const float keep = (float) part.get("keep");
    l.n_store = std::min(std::max((int) std::ceil(keep * (float) l.n_pages), 1), l.n_pages);
}

static void bytes(const kvq_part &, const kvq_layer_plan &, bool value, kvq_lane_layout & l) {
    if (value) { return; } // maps, and a byte a cell
    const size_t pages = (size_t) l.n_pages * l.n_stream, stored = (size_t) l.n_store * l.n_stream;
    l.bytes_tables += kvq_pad(stored * kvq_evict::nb_page(l.n_head, l.page_cells) + pages * l.page_cells, KVQ_ALIGN);
}

static bool attach(const kvq_part & part, kvq_layer_parts & at) {
    kvq_evict * x = at.own(new kvq_evict);
    x->init(*at.k, *at.v, *at.spans, *at.probe, (float) part.get("keep"), (float) part.get("recent"));
    at.k->add(x);
    at.v->add(x);
    return true;
}

extern const kvq_policy_kind kvq_policy_evict;
const kvq_policy_kind kvq_policy_evict = { "evict", shape, bytes, attach, nullptr };

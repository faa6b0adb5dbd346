#include "lab.h"
#include "kind.h"

#include "engine/host.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>

static thread_local kvq_lab current = {};

extern "C" int kvq_lab_set(const kvq_lab * lab) {
    current = lab ? *lab : kvq_lab{};
    return KVQ_OK;
}

extern "C" int kvq_lab_rows(void * handle, int what, float * out) {
    return handle && out ? ((kvq_lab_layer *) handle)->rows(what, out) : KVQ_ERR_ARGUMENT;
}

extern "C" int kvq_lab_turn(void * handle, int before, int back, float * keys) {
    return handle && keys ? ((kvq_lab_layer *) handle)->turn_keys(before, back, keys) : KVQ_ERR_ARGUMENT;
}

kvq_lab_layer::kvq_lab_layer(const std::shared_ptr<kvq_lab_cache> & of_all, kvq_lane & k, kvq_lane & v,
    kvq_span_table & spans, kvq_positions & positions, kvq_transform & turn, int il, int ordinal) :
    of_all(of_all),
    cache(*of_all),
    k(k),
    v(v),
    table(spans),
    positions(positions),
    turn(turn),
    il(il),
    ordinal(ordinal) {
    cache.layers.resize(std::max(cache.layers.size(), (size_t) ordinal + 1));
    cache.layers[(size_t) ordinal] = this; // layers are made in order, also when all of them are made again
}

kvq_lab_layer * kvq_lab_layer::before() const { return ordinal ? cache.layers[(size_t) ordinal - 1] : nullptr; }

// ---------------------------------------------------------------- writing

void kvq_lab_layer::wrote(kvq_lane & x, int s, int p, const uint8_t * slots, int64_t) {
    const auto found = maps.find({ s, p });
    if (x.is_value() || found == maps.end()) { return; }
    std::vector<int32_t> & m = found->second; // cells that are written anew are held by every head
    const int n = x.layout().page_cells;
    for (size_t i = 0; i < m.size(); i++) {
        const int t = (int) i % n;
        m[i] = slots[t / 8] >> t % 8 & 1 ? p * n + t : m[i];
    }
    show(s, p);
}

void kvq_lab_layer::written(kvq_lane & x, int64_t n, const int64_t * idx, const int32_t * pos, uint16_t * const *) {
    const kvq_lane_layout & l = x.layout();
    for (int64_t i = 0; !x.is_value() && i < n; i++) {
        const int s = (int) (idx[i] / l.n_cells), cell = (int) (idx[i] % l.n_cells);
        positions.now_at(s, cell / l.page_cells)[cell % l.page_cells] = pos ? pos[i] : 0;
        if (pos && turn.rotor && turn.rotor->view().n_high <= pos[i] / 64) { turn.rotor->cover(pos[i] + 8192); }
    }
}

// ---------------------------------------------------------------- sealing

bool kvq_lab_layer::may_seal(const kvq_lane &, int s, int p) const {
    const kvq_lab_layer * b = before();
    return !b || !cache.has_program() || (b->k.state(s, p) != KVQ_PAGE_OPEN && b->v.state(s, p) != KVQ_PAGE_OPEN);
}

// Sealed rows that were edited. Those that are about to seal are in an open page still.
void kvq_lab_layer::keep(
    kvq_lane & x, int s, const std::vector<int> & pages, const std::vector<kvq_page_block> & blocks, int) {
    for (size_t i = 0; i < pages.size(); i++) {
        if (x.state(s, pages[i]) != KVQ_PAGE_SEALED) { continue; }
        memcpy(x.codes_at(s, pages[i], 0), blocks[i].tile, x.layout().nb_frame);
    }
}

bool kvq_lab_layer::recall(const kvq_lane & x, int s, int p, uint16_t * tile) const {
    if (x.state(s, p) != KVQ_PAGE_SEALED) { return false; }
    memcpy(tile, x.codes_at(s, p, 0), x.layout().nb_frame);
    return true;
}

int32_t kvq_lab_layer::position(int s, int p, int t) const {
    if (!k.is_valid(s, p, t)) { return -1; }
    const int32_t number = positions.now_at(s, p)[t];
    kvq_rotor::place_t at;
    return turn.rotor && turn.rotor->first() && turn.rotor->place_of(number, at) ? at[0] : number;
}

bool kvq_lab_layer::open_rows(
    const kvq_lane & x, int s, const std::vector<int> & pages, std::vector<float> & out) const {
    const kvq_lane_layout & l = x.layout();
    const size_t D = (size_t) l.codec.head_size, H = (size_t) l.n_head, n = (size_t) l.page_cells;
    out.assign(pages.size() * n * H * D, 0.0f);
    for (size_t i = 0; i < pages.size(); i++) {
        const uint16_t * tile = x.info(s, pages[i]).frame;
        if (x.state(s, pages[i]) == KVQ_PAGE_SEALED) { tile = (const uint16_t *) x.codes_at(s, pages[i], 0); }
        if (x.state(s, pages[i]) == KVQ_PAGE_EMPTY || !tile) { return false; }
        for (size_t t = 0; t < n; t++) {
            for (size_t h = 0; h < H && x.is_valid(s, pages[i], (int) t); h++) {
                kvq_cpu_f16_to_f32(tile + (h * n + t) * D, &out[((i * n + t) * H + h) * D], (int64_t) D);
            }
        }
    }
    return true;
}

void kvq_lab_layer::put_tile(kvq_lane & x, const float * rows, uint16_t * tile) const {
    const kvq_lane_layout & l = x.layout();
    const size_t D = (size_t) l.codec.head_size, H = (size_t) l.n_head, n = (size_t) l.page_cells;
    for (size_t t = 0; t < n; t++) {
        for (size_t h = 0; h < H; h++) {
            kvq_cpu_f32_to_f16(rows + (t * H + h) * D, tile + (h * n + t) * D, (int64_t) D);
        }
    }
}

void kvq_lab_layer::ask(int s, const std::vector<int> & pages, std::vector<kvq_page_block> & blocks) {
    const kvq_lane_layout &lk = k.layout(), &lv = v.layout();
    const kvq_lab_layer * b = before();
    std::vector<float> keys, values;
    if (!open_rows(k, s, pages, keys) || !open_rows(v, s, pages, values)) { return; }
    std::vector<float> new_keys(keys), new_values(values);
    std::vector<int32_t> at;
    for (const int p : pages) {
        for (int t = 0; t < lk.page_cells; t++) { at.push_back(position(s, p, t)); }
    }
    kvq_lab_page x = {};
    x.handle = this;
    x.il = il;
    x.ordinal = ordinal;
    x.stream = s;
    x.n_pages = (int32_t) pages.size();
    x.page_cells = lk.page_cells;
    x.n_head = lk.n_head;
    x.head_size_k = lk.codec.head_size;
    x.head_size_v = lv.codec.head_size;
    x.n_dims = turn.rotor ? turn.rotor->rope().n_dims : 0;
    x.neox = turn.rotor && turn.rotor->rope().neox;
    x.before_il = b ? b->il : -1;
    x.before_head = b ? b->k.layout().n_head : 0;
    x.before_k = b ? b->k.layout().codec.head_size : 0;
    x.before_v = b ? b->v.layout().codec.head_size : 0;
    x.pages = pages.data();
    x.positions = at.data();
    x.keys = keys.data();
    x.values = values.data();
    x.new_keys = new_keys.data();
    x.new_values = new_values.data();
    page = &x;
    cache.failed = cache.lab.seal(cache.lab.user, &x) != 0;
    page = nullptr;
    if (cache.failed) { return; }
    const size_t nk = keys.size() / pages.size(), nv = values.size() / pages.size();
    for (size_t i = 0; i < pages.size(); i++) {
        uint16_t * tile = k.scratch->take(lk.nb_frame);
        tiles.push_back(tile);
        put_tile(k, &new_keys[i * nk], tile);
        blocks[i].tile = tile;
        std::vector<uint16_t> & of_values = waiting[{ s, pages[i] }];
        of_values.resize(lv.nb_frame / sizeof(uint16_t));
        put_tile(v, &new_values[i * nv], of_values.data());
    }
}

void kvq_lab_layer::leave_out(
    kvq_lane & x, int s, const std::vector<int> & pages, std::vector<kvq_page_block> & blocks, int) {
    if (x.state(s, pages[0]) == KVQ_PAGE_SEALED) { return; } // sealed rows were edited
    if (!x.is_value()) {
        if (cache.has_program()) { ask(s, pages, blocks); }
        return;
    }
    for (size_t i = 0; i < pages.size(); i++) {
        const auto found = waiting.find({ s, pages[i] });
        if (found == waiting.end()) { continue; }
        uint16_t * tile = x.scratch->take(x.layout().nb_frame);
        tiles.push_back(tile);
        memcpy(tile, found->second.data(), x.layout().nb_frame);
        blocks[i].tile = tile;
        waiting.erase(found);
    }
}

void kvq_lab_layer::encoded(kvq_lane & x) {
    for (uint16_t * tile : tiles) { x.scratch->give(tile, x.layout().nb_frame); }
    tiles.clear();
}

int kvq_lab_layer::rows(int what, float * out) const {
    const kvq_lab_layer * b = before();
    if (!page) { return KVQ_ERR_ARGUMENT; }
    if (what == KVQ_LAB_QUERIES) {
        const size_t n = (size_t) (page->n_head * page->head_size_k);
        for (size_t i = 0; i < n; i++) {
            out[i] = i < squares.size() ? (float) (squares[i] / (double) std::max<uint64_t>(n_squares, 1)) : 0.0f;
        }
        return KVQ_OK;
    }
    if (!b || (what != KVQ_LAB_BEFORE_K && what != KVQ_LAB_BEFORE_V)) { return KVQ_ERR_ARGUMENT; }
    std::vector<float> found;
    const std::vector<int> pages(page->pages, page->pages + page->n_pages);
    if (!b->open_rows(what == KVQ_LAB_BEFORE_V ? b->v : b->k, page->stream, pages, found)) { return KVQ_ERR_ARGUMENT; }
    std::copy(found.begin(), found.end(), out);
    return KVQ_OK;
}

int kvq_lab_layer::turn_keys(bool of_before, bool back, float * keys) const {
    const kvq_lab_layer * x = of_before ? before() : this;
    if (!page || !x) { return KVQ_ERR_ARGUMENT; }
    const size_t D = (size_t) x->k.layout().codec.head_size, H = (size_t) x->k.layout().n_head;
    for (int i = 0; x->turn.rotor && i < page->n_pages; i++) {
        const int32_t * at = positions.now_at(page->stream, page->pages[i]);
        for (int t = 0; t < page->page_cells; t++, keys += H * D) {
            if (!k.is_valid(page->stream, page->pages[i], t)) { continue; }
            for (size_t h = 0; h < H; h++) { x->turn.rotor->apply(at[t], back, keys + h * D); }
        }
    }
    return KVQ_OK;
}

// ---------------------------------------------------------------- cells that go

void kvq_lab_layer::show(int s, int p) {
    const size_t at = (size_t) s * (size_t) table.n_pages + (size_t) p;
    const auto found = maps.find({ s, p });
    const bool any = found != maps.end() &&
        std::any_of(found->second.begin(), found->second.end(), [](int32_t cell) { return cell < 0; });
    if (!any && found != maps.end()) { maps.erase(found); }
    table.spans[at].map = any ? maps.at({ s, p }).data() : nullptr;
    table.changed(at);
}

void kvq_lab_layer::emptied(kvq_lane & x, int s, int p) {
    if (x.is_value()) { return; }
    maps.erase({ s, p });
    show(s, p);
}

void kvq_lab_layer::copied_page(kvq_lane & x, int from, int to, int p) {
    if (x.is_value()) { return; }
    std::copy_n(positions.now_at(from, p), x.layout().page_cells, positions.now_at(to, p));
    maps.erase({ to, p });
    const auto found = maps.find({ from, p });
    if (found != maps.end()) { maps[{ to, p }] = found->second; }
}

void kvq_lab_layer::copied(kvq_lane & x, int, int to) {
    for (int p = 0; p < x.layout().n_pages; p++) { show(to, p); }
}

void kvq_lab_layer::cleared(kvq_lane & x) {
    waiting.clear();
    maps.clear();
    squares.clear();
    n_squares = 0;
    n_read.clear();
    for (int i = 0; i < x.layout().n_stream * x.layout().n_pages; i++) {
        show(i / x.layout().n_pages, i % x.layout().n_pages);
    }
}

bool kvq_lab_layer::wants_scores(int) const { return cache.has_program() && (cache.lab.judge || cache.lab.queries); }

void kvq_lab_layer::spans(kvq_attn & a, int) { a.map_stride = k.layout().page_cells; }

void kvq_lab_layer::observed(const kvq_attn & a, int s, uint64_t, int n_threads) {
    const size_t D = (size_t) a.k.head_size, gqa = (size_t) (a.n_head / a.n_head_kv);
    squares.resize((size_t) a.n_head_kv * D);
    for (int t = 0; cache.lab.queries && t < a.n_q; t++) {
        for (size_t h = 0; h < (size_t) a.n_head; h++) {
            const float * q = a.q + t * a.q_stride_token + (int64_t) h * a.q_stride_head;
            double * to = &squares[h / gqa * D];
            for (size_t i = 0; i < D; i++) { to[i] += (double) q[i] * (double) q[i]; }
        }
        n_squares += gqa;
    }
    if (!cache.lab.judge || !cache.has_program()) { return; }
    n_read[s] = a.n_pages;
    judge(s, sums(a, n_threads).data(), std::min(a.n_q, std::max(cache.lab.n_observed, 1)));
}

// [head][cell] of all pages that attention has read
std::vector<float> kvq_lab_layer::sums(const kvq_attn & a, int n_threads) const {
    const size_t n = (size_t) k.layout().page_cells, H = (size_t) k.layout().n_head;
    std::vector<kvq_page> held; // pages that hold something
    std::copy_if(a.pages, a.pages + a.n_pages, std::back_inserter(held), [](const kvq_page & p) { return p.n_slots; });
    std::vector<int32_t> rows;
    for (int i = std::max(0, a.n_q - std::max(cache.lab.n_observed, 1)); i < a.n_q; i++) { rows.push_back(i); }
    const size_t n_cells = (size_t) a.n_pages * n, n_slots = held.size() * n;
    std::vector<float> found(n_slots * H, 0.0f), out(n_cells * H, 0.0f);
    std::vector<int32_t> seen(n_slots * H, 0);
    kvq_attn of_held = a;
    of_held.pages = held.data();
    of_held.n_pages = (int32_t) held.size();
    kvq_cpu_column_sums(of_held, rows.data(), (int) rows.size(), found.data(), seen.data(), n_threads);
    const float by = (float) (rows.size() * (size_t) (a.n_head / a.n_head_kv));
    for (size_t i = 0; i < n_slots * H; i++) {
        const size_t h = i / n_slots, slot = i % n_slots;
        out[h * n_cells + (size_t) held[slot / n].cell + slot % n] = found[i] / by;
    }
    return out;
}

// What attention read in this step may have been sealed by it: it may go before anybody reads it again.
void kvq_lab_layer::sealed(kvq_lane & x, int s, const std::vector<int> &) {
    if (x.is_value() && n_read[s] && cache.lab.judge && cache.has_program()) { judge(s, nullptr, 0); }
}

void kvq_lab_layer::judge(int s, const float * probabilities, int n_queries) {
    const kvq_lane_layout & l = k.layout();
    const size_t n = (size_t) l.page_cells, H = (size_t) l.n_head, n_cells = (size_t) n_read[s] * n;
    std::vector<int32_t> at(n_cells, -1);
    std::vector<uint8_t> is_sealed(n_cells, 0), held(n_cells * H, 1);
    for (size_t cell = 0; cell < n_cells; cell++) {
        const int p = (int) (cell / n);
        const auto found = maps.find({ s, p });
        at[cell] = position(s, p, (int) (cell % n));
        is_sealed[cell] = at[cell] >= 0 && k.state(s, p) == KVQ_PAGE_SEALED && v.state(s, p) == KVQ_PAGE_SEALED;
        for (size_t h = 0; h < H && found != maps.end(); h++) {
            held[h * n_cells + cell] = found->second[h * n + cell % n] >= 0;
        }
    }
    const std::vector<uint8_t> before = held;
    kvq_lab_cells x = {};
    x.handle = this;
    x.il = il;
    x.ordinal = ordinal;
    x.stream = s;
    x.n_cells = (int32_t) n_cells;
    x.n_head = l.n_head;
    x.page_cells = l.page_cells;
    x.positions = at.data();
    x.sealed = is_sealed.data();
    x.probabilities = probabilities;
    x.n_queries = n_queries;
    x.held = held.data();
    cache.failed = cache.lab.judge(cache.lab.user, &x) != 0;
    std::set<int> changed;
    for (size_t cell = 0; !cache.failed && cell < n_cells; cell++) {
        const int p = (int) (cell / n);
        for (size_t h = 0; is_sealed[cell] && h < H; h++) {
            if (held[h * n_cells + cell] || !before[h * n_cells + cell]) { continue; }
            std::vector<int32_t> & m = maps[{ s, p }];
            for (size_t i = m.size(); i < H * n; i++) { m.push_back(p * l.page_cells + (int) (i % n)); }
            m[h * n + cell % n] = -1;
            changed.insert(p);
        }
    }
    for (const int p : changed) { show(s, p); }
}

// ---------------------------------------------------------------- as a part of a plan

static void shape(const kvq_part &, const kvq_layer_plan &, bool value, kvq_lane_layout & l) {
    l.copies = true;
    l.turned = !value; // graphs tell of the rotary embedding, and writes of positions
    l.nb_codes = 2 * (size_t) l.page_cells * (size_t) l.codec.head_size;
    l.nb_params = 0;
    l.n_frames = std::min(std::max(l.window / l.page_cells, 1) + l.n_sink_pages, l.n_pages);
}

static bool attach(const kvq_part &, kvq_layer_parts & at) {
    const kvq_lane_layout & l = at.k->layout();
    if (!at.device.is_host()) {
        at.why = "method lab calls Python for every page, which it does on the CPU only: hide the GPU with "
                 "CUDA_VISIBLE_DEVICES=";
        return false;
    }
    std::shared_ptr<void> &table = at.shared["positions"], &common = at.shared["lab"];
    if (!table) { table = std::make_shared<kvq_positions>(l.n_stream, l.n_pages, l.page_cells, at.device); }
    if (!common) {
        common = std::make_shared<kvq_lab_cache>();
        ((kvq_lab_cache *) common.get())->lab = current;
    }
    at.transforms[0] = at.own(new kvq_transform);
    kvq_policy * x = at.own(new kvq_lab_layer(std::static_pointer_cast<kvq_lab_cache>(common), *at.k, *at.v, *at.spans,
        *(kvq_positions *) table.get(), *at.transforms[0], at.number, at.ordinal));
    at.k->add(x);
    at.v->add(x);
    return true;
}

static std::string words(const std::vector<kvq_part_of_layer> &, const kvq_stats &) {
    return "; simulated: f16 rows, whatever a program makes of them";
}

extern const kvq_policy_kind kvq_policy_lab;
const kvq_policy_kind kvq_policy_lab = { "lab", shape, nullptr, attach, words };

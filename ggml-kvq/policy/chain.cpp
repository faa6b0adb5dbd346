#include "chain.h"
#include "calibrated.h"
#include "kind.h"

#include "engine/host.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#ifdef _OPENMP
#include <omp.h>
#endif

kvq_chain::kvq_chain(int n_stream, int n_pages, int page_cells, int width_k, int width_v, kvq_device & device) :
    device(device), n_pages(n_pages), page_cells(page_cells), width{ width_k, width_v } {
    const size_t n = (size_t) n_stream * n_pages;
    for (int v = 0; v < 2; v++) {
        row_stride[v] = kvq_pad((size_t) width[v], 16);
        stride8[v] = kvq_pad((size_t) width[v], KVQ_PREDICT_GROUP);
        rows[v].level.assign(n, -1);
        if (device.is_host()) {
            rows[v].row.resize(n * page_cells * stride8[v]);
            rows[v].scale.resize(width[v] ? n * page_cells : 0);
        } else if (width[v]) {
            rows[v].row_there = (int8_t *) device.alloc(n * page_cells * stride8[v]);
            rows[v].scale_there = (float *) device.alloc(n * page_cells * sizeof(float));
            is_ok = is_ok && rows[v].row_there && rows[v].scale_there;
        }
    }
    if (!device.is_host()) {
        nb_predictions =
            std::min(STRIPE, n_pages) * page_cells * std::max(row_stride[0], row_stride[1]) * sizeof(float);
        predictions = (float *) device.alloc(nb_predictions);
        is_ok = is_ok && predictions;
    }
}

kvq_chain::~kvq_chain() {
    const size_t n = rows[0].level.size() * page_cells;
    for (int v = 0; v < 2; v++) {
        if (rows[v].row_there) { device.free(rows[v].row_there, n * stride8[v]); }
        if (rows[v].scale_there) { device.free(rows[v].scale_there, n * sizeof(float)); }
    }
    if (predictions) { device.free(predictions, nb_predictions); }
}

size_t kvq_chain::bytes(int n_stream, int n_pages, int page_cells, int width, size_t nb_frame) {
    const size_t cells = (size_t) n_stream * n_pages * page_cells;
    return cells * (kvq_pad((size_t) width, KVQ_PREDICT_GROUP) + 4) + 2 * (size_t) n_stream * n_pages +
        std::min(STRIPE, n_pages) * nb_frame;
}

void kvq_chain::add_layer(
    kvq_lane * k, kvq_lane * v, kvq_transform * turn_k, kvq_transform * turn_v, const kvq_chain_weights & w) {
    const int ordinal = (int) layers.size();
    layers.push_back({ { k, v }, { turn_k, turn_v }, w });
    for (const bool value : { false, true }) {
        layers.back().turn[value]->chain = chains(value) ? this : nullptr;
        layers.back().turn[value]->ordinal = ordinal;
    }
    space(0);
}

kvq_chain::workspace & kvq_chain::space(size_t i) {
    int head = 0, groups = 1;
    for (const layer & l : layers) {
        head = std::max({ head, l.lane[0]->layout().codec.head_size, l.lane[1]->layout().codec.head_size });
        groups = std::max({ groups, l.w.k.n_groups(), l.w.v_from_k.n_groups(), l.w.v_from_v.n_groups() });
    }
    while (spaces.size() <= i) { spaces.emplace_back(new workspace); }
    workspace & w = *spaces[i];
    for (int v = 0; v < 2; v++) { w.rows[v].resize(page_cells * row_stride[v]); }
    w.decoded.resize(page_cells * kvq_pad((size_t) head, 16));
    w.work.resize((size_t) page_cells * groups);
    return w;
}

// ---------------------------------------------------------------- rows

bool kvq_chain::alone(int l, bool value, size_t, int s, int p) const {
    const layer & x = layers[l];
    return !(value ? x.w.v_from_k.bits : x.w.k.bits) || x.lane[value]->state(s, p) != KVQ_PAGE_SEALED;
}

// W x of a page, from rows that are at the right layers
void kvq_chain::apply(int l, bool value, size_t at, float * out, workspace & w) const {
    const kvq_chain_weights & m = layers[l].w;
    const auto from = [&](const kvq_predictor & p, int v, bool add) {
        kvq_cpu_predict_rows(p, page_cells, &rows[v].row[at * page_cells * stride8[v]], stride8[v],
            &rows[v].scale[at * page_cells], add, out, row_stride[value], w.work.data());
    };
    if (value ? !m.v_from_k.bits : !m.k.bits) {
        std::fill_n(out, page_cells * row_stride[value], 0.0f);
    } else if (value) {
        from(m.v_from_k, 0, false);
        from(m.v_from_v, 1, true);
    } else {
        from(m.k, 0, false);
    }
}

// The rows of layer l from those of layer l-1 (values: and the keys of layer l).
void kvq_chain::step(int l, bool value, int s, int p, workspace & w) {
    const kvq_lane & lane = *layers[l].lane[value];
    const size_t at = (size_t) s * n_pages + p, stride = row_stride[value];
    float * out = w.rows[value].data();
    if (lane.state(s, p) == KVQ_PAGE_SEALED) {
        apply(l, value, at, out, w);
        kvq_cpu_add_lattice(
            lane.layout(), lane.codes_at(s, p, 0), lane.params_at(s, p, 0), w.decoded.data(), out, stride);
    } else {
        layers[l].turn[value]->plain_rows(lane, s, p, out, stride);
    }
    kvq_cpu_quantise_rows(page_cells, width[value], out, stride, &rows[value].row[at * page_cells * stride8[value]],
        stride8[value], &rows[value].scale[at * page_cells]);
    rows[value].level[at] = (int16_t) l;
}

void kvq_chain::reach(int l, bool value, int s, int p, workspace & w) {
    const size_t at = (size_t) s * n_pages + p;
    int16_t & level = rows[value].level[at];
    if (level == l) { return; }
    int first = l;
    while (first > 0 && level != first - 1 && !alone(first, value, at, s, p)) { first--; }
    for (int i = first; i <= l; i++) {
        if (value && !alone(i, value, at, s, p)) { reach(i, false, s, p, w); }
        step(i, value, s, p, w);
    }
}

void kvq_chain::predict(int l, bool value, int s, int p, float * out) {
    if (!device.is_host()) {
        const float * there = predict_there(l, value, s, { p });
        device.get(out, there, page_cells * row_stride[value] * sizeof(float));
        return;
    }
    workspace & w = space(0);
    const kvq_chain_weights & m = layers[l].w;
    if (value && m.v_from_k.bits) {
        reach(l - 1, true, s, p, w);
        reach(l, false, s, p, w);
    } else if (!value && m.k.bits) {
        reach(l - 1, false, s, p, w);
    }
    apply(l, value, (size_t) s * n_pages + p, out, w);
}

// ---------------------------------------------------------------- rows on a device

kvq_chain_pages kvq_chain::lane_there(int l, bool value, int s, int p0, int n) const {
    const layer & x = layers[l];
    const kvq_lane & lane = *x.lane[value];
    const size_t at = ((size_t) s * n_pages + p0) * page_cells;
    kvq_chain_pages c;
    c.l = &lane.layout();
    c.value = value;
    c.n = n;
    c.from_k = value ? x.w.v_from_k : x.w.k;
    c.from_v = value ? x.w.v_from_v : kvq_predictor();
    c.pages = lane.spans_on(s, p0);
    for (int v = 0; v < 2 && (!v || width[1]); v++) {
        c.row[v] = rows[v].row_there + at * stride8[v];
        c.scale[v] = rows[v].scale_there + at;
        c.stride8[v] = stride8[v];
    }
    c.stride = row_stride[value];
    c.turn = x.turn[value]->turn_of(lane, s, 0);
    return c;
}

bool kvq_chain::alike(int l, int s, int p, int q) const {
    const size_t a = (size_t) s * n_pages + p, b = (size_t) s * n_pages + q;
    bool same = true;
    for (int v = 0; v < 1 + (width[1] > 0); v++) {
        same = same && rows[v].level[a] == rows[v].level[b];
        for (int i = 0; i <= l && same; i++) { same = alone(i, v, a, s, p) == alone(i, v, b, s, q); }
    }
    return same;
}

// As reach, for n pages that are alike.
void kvq_chain::reach_there(int l, bool value, int s, int p, int n) {
    const size_t at = (size_t) s * n_pages + p;
    int16_t * const level = &rows[value].level[at];
    if (*level == l) { return; }
    int first = l;
    while (first > 0 && *level != first - 1 && !alone(first, value, at, s, p)) { first--; }
    for (int i = first; i <= l; i++) {
        if (value && !alone(i, value, at, s, p)) { reach_there(i, false, s, p, n); }
        device.chains()->chain_step(lane_there(i, value, s, p, n));
        std::fill_n(level, n, (int16_t) i);
    }
}

const float * kvq_chain::predict_there(int l, bool value, int s, const std::vector<int> & pages) {
    const kvq_chain_weights & m = layers[l].w;
    const size_t page = page_cells * row_stride[value];
    const bool zero = value ? !m.v_from_k.bits : !m.k.bits;
    if (zero) { device.zero(predictions, pages.size() * page * sizeof(float)); }
    for (size_t i = 0, n = 1; !zero && i < pages.size(); i += n, n = 1) {
        const int p = pages[i];
        while (i + n < pages.size() && pages[i + n] == p + (int) n && alike(l, s, p, pages[i + n])) { n++; }
        reach_there(l - 1, value, s, p, (int) n);
        if (value) { reach_there(l, false, s, p, (int) n); }
        device.chains()->chain_predict(lane_there(l, value, s, p, (int) n), predictions + i * page);
    }
    return predictions;
}

void kvq_chain::layer_below(int l, int s, int n_read) {
    for (int v = 0; l > 0 && v < 1 + (width[1] > 0); v++) {
        for (int p = 0, n = 1; p < n_read; p += n, n = 1) {
            while (p + n < n_read && alike(l - 1, s, p, p + n)) { n++; }
            reach_there(l - 1, v, s, p, n);
        }
    }
}

void kvq_chain::layer_read(int l, int s, int n) {
    for (kept & r : rows) { std::fill_n(r.level.begin() + (long) s * n_pages, n, (int16_t) l); }
}

void kvq_chain::forget() {
    for (kept & r : rows) { std::fill(r.level.begin(), r.level.end(), (int16_t) -1); }
}

// ---------------------------------------------------------------- pages that change

void kvq_chain::changed(int l, bool value, int s, int p) {
    const size_t at = (size_t) s * n_pages + p;
    for (int v = value; v < 2; v++) { // values depend on keys
        if (rows[v].level[at] >= l) { rows[v].level[at] = -1; }
    }
}

bool kvq_chain::ready(int l, bool value, int s, int p) const {
    const layer & x = layers[l];
    const auto open = [&](int i, bool v) { return layers[i].lane[v]->state(s, p) == KVQ_PAGE_OPEN; };
    return value ? !x.w.v_from_k.bits || (!open(l, false) && !open(l - 1, true)) : !x.w.k.bits || !open(l - 1, false);
}

void kvq_chain::release(int l, bool value, int s, int p) {
    const auto give_up = [&](int i, bool v) {
        if (i < (int) layers.size() && (v ? layers[i].w.v_from_k.bits : layers[i].w.k.bits) &&
            layers[i].lane[v]->state(s, p) == KVQ_PAGE_SEALED) {
            layers[i].lane[v]->reopen(s, p);
        }
    };
    if (value) {
        give_up(l + 1, true);
    } else {
        give_up(l + 1, false);
        give_up(l, true);
    }
}

// ---------------------------------------------------------------- attention

// dst = sum_i exp(lse_i - top) o_i / sum_i exp(lse_i - top), a sink being one more term without a value
static void merge(
    const kvq_attn & a, const std::vector<std::vector<float>> & out, const std::vector<std::vector<float>> & lse) {
    const int D = a.v.head_size;
    for (int i = 0; i < a.n_q; i++) {
        for (int h = 0; h < a.n_head; h++) {
            const size_t row = (size_t) i * a.n_head + h;
            float top = a.sinks ? a.sinks[h] : -INFINITY;
            for (const auto & x : lse) { top = std::max(top, x[row]); }
            float * dst = a.dst + i * a.dst_stride_token + h * a.dst_stride_head;
            std::fill_n(dst, D, 0.0f);
            if (top == -INFINITY) { continue; }
            float sum = a.sinks ? expf(a.sinks[h] - top) : 0.0f;
            for (const auto & x : lse) { sum += expf(x[row] - top); }
            for (size_t j = 0; j < lse.size(); j++) {
                const float weight = expf(lse[j][row] - top) / sum;
                for (int d = 0; d < D; d++) { dst[d] += weight * out[j][row * D + d]; }
            }
        }
    }
}

void kvq_chain::attend(int l, int stream0, const kvq_attn * attn, int n, int n_threads) {
    const kvq_lane_layout * x[2] = { &layers[l].lane[0]->layout(), &layers[l].lane[1]->layout() };
    for (int v = 0; v < 2; v++) { tiles[v].resize(chains(v) ? std::min(STRIPE, n_pages) * x[v]->nb_frame / 2 : 0); }
    n_threads = std::max(n_threads, 1);
    for (int t = 0; t < n_threads; t++) { // grown here: nothing may throw between threads
        space((size_t) t);
    }
    for (int i = 0; i < n; i++) {
        kvq_attn a = attn[i];
        const int s = stream0 + i;
        a.k_mean = nullptr;
        a.v_mean = chains(true) ? nullptr : a.v_mean;
        a.rotary = nullptr;
        std::vector<std::vector<float>> out, lse;
        std::vector<kvq_page> pages;
        for (int p0 = 0; p0 < a.n_pages;) {
            // a stripe: as many pages as there are tiles for
            std::vector<int> sealed;
            pages.clear();
            int p1 = p0;
            for (; p1 < a.n_pages; p1++) {
                const kvq_page & page = attn[i].pages[p1];
                const bool closed = page.n_slots && (page.k_params || (chains(true) && page.v_params));
                if (closed && sealed.size() == (size_t) STRIPE) { break; }
                pages.push_back(page);
                if (closed) { sealed.push_back(p1); }
            }
            const int n_sealed = (int) sealed.size();
#pragma omp parallel for schedule(dynamic) num_threads(n_threads) if (n_sealed > 1 && n_threads > 1)
            for (int j = 0; j < n_sealed; j++) {
#ifdef _OPENMP
                workspace & w = *spaces[(size_t) omp_get_thread_num()];
#else
                workspace & w = *spaces[0];
#endif
                const int p = sealed[(size_t) j];
                kvq_page & page = pages[(size_t) (p - p0)];
                for (int v = 0; v < 2; v++) {
                    if (!chains(v) || !(v ? page.v_params : page.k_params)) { continue; }
                    int16_t & level = rows[v].level[(size_t) s * n_pages + p];
                    // the rows themselves are wanted, not only what was kept of them
                    level = level == l ? (int16_t) -1 : level;
                    reach(l, v, s, p, w);
                    uint16_t * tile = tiles[v].data() + (size_t) j * x[v]->nb_frame / 2;
                    const kvq_transform & t = *layers[l].turn[v];
                    const int D = x[v]->codec.head_size;
                    for (int h = 0; h < x[v]->n_head; h++) {
                        kvq_cpu_rows_to_f16(page_cells, D, w.rows[v].data() + (size_t) h * D, row_stride[v],
                            t.mean ? t.mean + (size_t) h * D : nullptr, t.rotor ? &t.rotor->view() : nullptr,
                            t.positions_at(s, p), tile + h * x[v]->nb_tile_head / 2, x[v]->head_stride());
                    }
                    (v ? page.v_codes : page.k_codes) = tile;
                    (v ? page.v_params : page.k_params) = nullptr;
                }
            }
            a.pages = pages.data();
            a.n_pages = (int) pages.size();
            const bool whole = p0 == 0 && p1 == attn[i].n_pages;
            if (whole) {
                kvq_cpu_attend(&a, 1, n_threads);
                break;
            }
            kvq_attn part = a;
            out.emplace_back((size_t) a.n_q * a.n_head * a.v.head_size);
            lse.emplace_back((size_t) a.n_q * a.n_head);
            part.sinks = nullptr;
            part.dst = out.back().data();
            part.dst_stride_head = a.v.head_size;
            part.dst_stride_token = (int64_t) a.n_head * a.v.head_size;
            float * to = lse.back().data();
            kvq_cpu_attend_part(&part, 1, &to, n_threads);
            p0 = p1;
            a.n_pages = attn[i].n_pages;
        }
        if (!lse.empty()) { merge(attn[i], out, lse); }
    }
}

// ---------------------------------------------------------------- as a policy of a layer

bool kvq_chained::may_seal(const kvq_lane & x, int s, int p) const { return chain.ready(ordinal, x.is_value(), s, p); }

void kvq_chained::before_seal(kvq_lane & x, int s, const std::vector<int> & due, int) {
    for (int p : due) { chain.release(ordinal, x.is_value(), s, p); }
}

void kvq_chained::changed(kvq_lane & x, int s, int p) { chain.changed(ordinal, x.is_value(), s, p); }

void kvq_chained::placing(kvq_lane & x, int s, int p, const kvq_page_image &) {
    chain.release(ordinal, x.is_value(), s, p);
}

static void room(const kvq_part & part, const kvq_layer_plan &, bool value, kvq_lane_layout & l) {
    l.chained = !value || part.get("values") > 0;
}

static void bytes(const kvq_part & part, const kvq_layer_plan &, bool value, kvq_lane_layout & l) {
    const int width = l.n_head * l.codec.head_size;
    for (const char * input : { value ? "v_from_k" : "k_from_k", value ? "v_from_v" : "" }) {
        const int n_in = (int) part.get(input);
        if (!n_in) { continue; }
        l.bytes_calibration += kvq_pad(kvq_predictor_bytes(n_in, width, (int) part.get("weight_bits")), KVQ_ALIGN);
        l.predict_macs += (uint64_t) n_in * width;
    }
    if (part.get("pays") > 0 && l.chained) {
        l.bytes_chain = kvq_pad(kvq_chain::bytes(l.n_stream, l.n_pages, l.page_cells, width, l.nb_frame), KVQ_ALIGN);
    }
}

static bool attach(const kvq_part & part, kvq_layer_parts & at) {
    const kvq_lane_layout &k = at.k->layout(), &v = at.v->layout();
    if (!at.device.is_host() && !at.device.chains()) { return false; }
    std::shared_ptr<void> & shared = at.shared["chain"];
    if (!at.ordinal) { // the layers of a cache are made in order
        shared = std::make_shared<kvq_chain>(k.n_stream, k.n_pages, k.page_cells, k.n_head * k.codec.head_size,
            part.get("values") > 0 ? v.n_head * v.codec.head_size : 0, at.device);
    }
    kvq_chain & chain = *(kvq_chain *) shared.get();
    if (!chain.ok()) { return false; }
    at.chain = &chain;
    chain.add_layer(at.k, at.v, at.turns[0], at.turns[1], at.ordinal ? at.data->w : kvq_chain_weights());
    kvq_policy * x = at.own(new kvq_chained(chain, at.ordinal));
    at.k->add(x);
    if (chain.chains(true)) { at.v->add(x); }
    return true;
}

static std::string words(const std::vector<kvq_part_of_layer> & layers, const kvq_stats & s) {
    const double MiB = 1024.0 * 1024.0;
    const kvq_part & part = *layers[0].part;
    if (!s.predict_macs) { return ""; }
    char text[224];
    snprintf(text, sizeof(text),
        "; predictor %s: reading costs %.2f million multiply-adds a cell and token (%d-bit weights, %.2f MiB), %.2f "
        "MiB "
        "hold the rows of one layer",
        part.get("values") > 0 ? "full" : "k", (double) s.predict_macs / 1e6, (int) part.get("weight_bits"),
        (double) s.bytes_calibration / MiB, (double) s.bytes_chain / MiB);
    return text;
}

extern const kvq_policy_kind kvq_policy_chain;
const kvq_policy_kind kvq_policy_chain = { "chain", room, bytes, attach, words };

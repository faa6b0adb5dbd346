#include "chain.h"
#include "calibrated.h"
#include "kind.h"

#include <algorithm>
#include <cstdio>

kvq_chain::kvq_chain(
    int n_stream, int n_pages, int page_cells, int width_k, int width_v, bool fold, kvq_device & device) :
    device(device),
    fold(fold),
    n_pages(n_pages),
    page_cells(page_cells),
    row_stride{ kvq_pad((size_t) width_k, 16), kvq_pad((size_t) width_v, 16) } {
    const size_t n = (size_t) n_stream * n_pages;
    for (int i = 0; i < 2; i++) {
        const int width = fold || !i ? width_k : width_v;
        kvq_rows8 & x = rows[i].x;
        x.stride = kvq_pad((size_t) width, KVQ_PREDICT_GROUP);
        rows[i].layer_of.assign(n, -1);
        if (!width) { continue; }
        x.row = (int8_t *) device.alloc(n * page_cells * x.stride);
        x.scale = (float *) device.alloc(n * page_cells * sizeof(float));
        is_ok = is_ok && x.row && x.scale;
        if (x.scale) { device.zero(x.scale, n * page_cells * sizeof(float)); } // sums meet those of empty cells too
    }
    nb_predictions =
        std::min(KVQ_CHAIN_STRIPE, n_pages) * page_cells * std::max(row_stride[0], row_stride[1]) * sizeof(float);
    predictions = (float *) device.alloc(nb_predictions);
    is_ok = is_ok && predictions;
}

kvq_chain::~kvq_chain() {
    const size_t n = rows[0].layer_of.size() * page_cells;
    for (const kept_rows & r : rows) {
        if (r.x.row) { device.free(r.x.row, n * r.x.stride); }
        if (r.x.scale) { device.free(r.x.scale, n * sizeof(float)); }
    }
    if (predictions) { device.free(predictions, nb_predictions); }
}

size_t kvq_chain::bytes(int n_stream, int n_pages, int page_cells, int width, size_t predicted, size_t nb_frame) {
    const size_t cells = (size_t) n_stream * n_pages * page_cells;
    return cells * (kvq_pad((size_t) width, KVQ_PREDICT_GROUP) + 4) + 2 * (size_t) n_stream * n_pages +
        std::min(KVQ_CHAIN_STRIPE, n_pages) * (nb_frame + page_cells * predicted * sizeof(float));
}

void kvq_chain::add_layer(
    kvq_lane * k, kvq_lane * v, kvq_transform * turn_k, kvq_transform * turn_v, const kvq_chain_weights & w) {
    const int ordinal = (int) layers.size();
    layers.push_back({ { k, v }, { turn_k, turn_v }, w });
    for (const bool value : { false, true }) {
        layers.back().turn[value]->chain = chains(value) ? this : nullptr;
        layers.back().turn[value]->ordinal = ordinal;
    }
}

// ---------------------------------------------------------------- rows

kvq_chain_pages kvq_chain::pages_of(int l, bool value, int s, int p0, int n, int n_threads) const {
    const layer & x = layers[l];
    const kvq_lane & lane = *x.lane[value];
    kvq_chain_pages c;
    c.l = &lane.layout();
    c.value = value;
    c.n = n;
    c.from[0] = value ? x.w.v_from_k : x.w.k;
    c.from[1] = value ? x.w.v_from_below : kvq_predictor();
    c.pages = lane.spans_on(s, p0);
    const auto rows_of = [&](int i, bool v) { return kept(i, v).x.from(index_of(s, p0) * page_cells); };
    c.in[0] = rows_of(value ? l : l - 1, false);
    if (value) { c.in[1] = rows_of(l - 1, !fold); }
    if (feeds(value)) { c.out = rows_of(l, value); }
    c.stride = row_stride[value];
    c.turn = x.turn[value]->transform_of(lane, s, 0);
    c.n_threads = n_threads;
    return c;
}

bool kvq_chain::is_predicted(int l, bool value, int s, int p) const {
    const layer & x = layers[l];
    return (value ? x.w.v_from_k.bits : x.w.k.bits) && x.lane[value]->state(s, p) == KVQ_PAGE_SEALED;
}

bool kvq_chain::have_same_past(int l, int s, int p, int q) const {
    bool same = true;
    for (const kept_rows & r : rows) { same = same && r.layer_of[index_of(s, p)] == r.layer_of[index_of(s, q)]; }
    for (const bool v : { false, true }) {
        for (int i = 0; i <= l && same && feeds(v); i++) {
            same = is_predicted(i, v, s, p) == is_predicted(i, v, s, q);
        }
    }
    return same;
}

void kvq_chain::bring_to(int l, bool value, int s, int p, int n, int n_threads) {
    const auto layer_of = [&](int i) -> int16_t & { return kept(i, value).layer_of[index_of(s, p)]; }; // one a page
    if (layer_of(l) == l) { return; }
    // Go down to a layer that can start: there are rows of the layer below it, or it needs no layer below.
    int first = l;
    while (first > 0 && layer_of(first - 1) != first - 1 && is_predicted(first, value, s, p)) { first--; }
    for (int i = first; i <= l; i++) {
        // values are predicted from the keys of the same layer, so the keys go first
        if (value && is_predicted(i, value, s, p)) { bring_to(i, false, s, p, n, n_threads); }
        device.chains()->chain_step(pages_of(i, value, s, p, n, n_threads));
        std::fill_n(&layer_of(i), n, (int16_t) i);
    }
}

const float * kvq_chain::predict(int l, bool value, int s, const std::vector<int> & pages) {
    const kvq_chain_weights & m = layers[l].w;
    const size_t page = page_cells * row_stride[value];
    const bool zero = value ? !m.v_from_k.bits : !m.k.bits;
    if (zero) { device.zero(predictions, pages.size() * page * sizeof(float)); }
    for (size_t i = 0, n = 1; !zero && i < pages.size(); i += n, n = 1) {
        const int p = pages[i];
        while (i + n < pages.size() && pages[i + n] == p + (int) n && have_same_past(l, s, p, pages[i + n])) { n++; }
        bring_to(l - 1, feeds(value) && value, s, p, (int) n, 1);
        if (value) { bring_to(l, false, s, p, (int) n, 1); }
        device.chains()->chain_predict(pages_of(l, value, s, p, (int) n), predictions + i * page);
    }
    return predictions;
}

void kvq_chain::layer_below(int l, int s, int n_read, int n_threads) {
    for (const bool value : { false, true }) {
        const bool v = value && !fold; // whose rows it wants of the layer below
        const auto wants = [&](int p) {
            return is_predicted(l, value, s, p) && kept(l - 1, v).layer_of[index_of(s, p)] != l - 1;
        };
        for (int p = 0, n = 1; chains(value) && p < n_read; p += n, n = 1) {
            if (!wants(p)) { continue; }
            while (p + n < n_read && wants(p + n) && have_same_past(l - 1, s, p, p + n)) { n++; }
            bring_to(l - 1, v, s, p, n, n_threads);
        }
    }
}

// An engine may skip pages that are open in this layer: of which layer their kept rows are is not known then.
void kvq_chain::layer_read(int l, int s, int n) {
    for (const bool v : { false, true }) {
        for (int p = 0; feeds(v) && p < n; p++) {
            const bool sealed = layers[l].lane[v]->state(s, p) == KVQ_PAGE_SEALED;
            kept(l, v).layer_of[index_of(s, p)] = (int16_t) (sealed ? l : -1);
        }
    }
}

void kvq_chain::forget() {
    for (kept_rows & r : rows) { std::fill(r.layer_of.begin(), r.layer_of.end(), (int16_t) -1); }
}

// ---------------------------------------------------------------- pages that change

void kvq_chain::changed(int l, bool value, int s, int p) {
    for (int i = value; i < 2 && feeds(value); i++) { // values depend on keys
        int16_t & layer_of = rows[i].layer_of[index_of(s, p)];
        layer_of = layer_of >= l ? (int16_t) -1 : layer_of;
    }
}

bool kvq_chain::ready(int l, bool value, int s, int p) const {
    const layer & x = layers[l];
    const auto open = [&](int i, bool v) { return layers[i].lane[v]->state(s, p) == KVQ_PAGE_OPEN; };
    return value ? !x.w.v_from_k.bits || (!open(l, false) && !open(l - 1, !fold)) : !x.w.k.bits || !open(l - 1, false);
}

void kvq_chain::release(int l, bool value, int s, int p) {
    const auto give_up = [&](int i, bool v) {
        if (i < (int) layers.size() && (v ? layers[i].w.v_from_k.bits : layers[i].w.k.bits) &&
            layers[i].lane[v]->state(s, p) == KVQ_PAGE_SEALED) {
            // layers above are about to write: sealed before that they would give up theirs, and so on, each once more
            if (i > l) {
                layers[i].lane[v]->reopen_and_wait(s, p);
            } else {
                layers[i].lane[v]->reopen(s, p);
            }
        }
    };
    if (!value) {
        give_up(l + 1, false);
        give_up(l, true);
    }
    if (value != fold) { give_up(l + 1, true); } // what is predicted from values, or from the keys two layers
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

static void shape(const kvq_part & part, const kvq_layer_plan &, bool value, kvq_lane_layout & l) {
    l.chained = !value || part.get("values") > 0;
}

static void bytes(const kvq_part & part, const kvq_layer_plan & plan, bool value, kvq_lane_layout & l) {
    const int width = l.n_head * l.codec.head_size, width_k = l.n_head * plan.k.head_size;
    const bool folds = part.get("fold") > 0 && part.get("weight_bits") == 8 && l.codec.head_size % 16 == 0;
    for (const char * input : { value ? "v_from_k" : "k_from_k", value ? "v_from_below" : "" }) {
        const int n_in = (int) part.get(input);
        if (!n_in) { continue; }
        l.bytes_calibration += kvq_pad(kvq_predictor_bytes(n_in, width, (int) part.get("weight_bits")), KVQ_ALIGN);
        if (!value || !folds) { l.predict_macs += (uint64_t) n_in * width; } // of values once a query
    }
    if (part.get("counts_shared") > 0 && l.chained) {
        const size_t of_keys = kvq_pad((size_t) width_k, 16), own = kvq_pad((size_t) width, 16),
                     predicted = !value ? own
            : own > of_keys             ? own - of_keys
                                        : 0;
        const int kept = part.get("fold") > 0 ? width_k : width;
        l.bytes_chain =
            kvq_pad(kvq_chain::bytes(l.n_stream, l.n_pages, l.page_cells, kept, predicted, l.nb_frame), KVQ_ALIGN);
    }
}

static bool attach(const kvq_part & part, kvq_layer_parts & at) {
    const kvq_lane_layout &k = at.k->layout(), &v = at.v->layout();
    if (!at.device.chains()) { return false; }
    std::shared_ptr<void> & shared = at.shared["chain"];
    if (!at.ordinal) { // the layers of a cache are made in order
        shared = std::make_shared<kvq_chain>(k.n_stream, k.n_pages, k.page_cells, k.n_head * k.codec.head_size,
            part.get("values") > 0 ? v.n_head * v.codec.head_size : 0, part.get("fold") > 0, at.device);
    }
    kvq_chain & chain = *(kvq_chain *) shared.get();
    if (!chain.ok()) { return false; }
    at.chain = &chain;
    chain.add_layer(at.k, at.v, at.transforms[0], at.transforms[1], at.ordinal ? at.data->w : kvq_chain_weights());
    kvq_policy * x = at.own(new kvq_chained(chain, at.ordinal));
    at.k->add(x);
    if (chain.chains(true)) { at.v->add(x); }
    return true;
}

static const char * name_of(const kvq_part & part) {
    return part.get("fold") > 0 ? "fold" : part.get("values") > 0 ? "full" : "k";
}

static std::string words(const std::vector<kvq_part_of_layer> & layers, const kvq_stats & s) {
    const double MiB = 1024.0 * 1024.0;
    const kvq_part & part = *layers[0].part;
    if (!s.predict_macs) { return ""; }
    char text[224];
    snprintf(text, sizeof(text),
        "; predictor %s: reading costs %.2f million multiply-adds a cell and token (%d-bit weights, %.2f MiB), %.2f "
        "MiB hold the rows of %s",
        name_of(part), (double) s.predict_macs / 1e6, (int) part.get("weight_bits"), (double) s.bytes_calibration / MiB,
        (double) s.bytes_chain / MiB, part.get("fold") > 0 ? "two layers" : "one layer");
    return text;
}

extern const kvq_policy_kind kvq_policy_chain;
const kvq_policy_kind kvq_policy_chain = { "chain", shape, bytes, attach, words };

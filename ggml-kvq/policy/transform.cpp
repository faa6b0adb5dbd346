#include "transform.h"
#include "calibrated.h"
#include "chain.h"
#include "kind.h"
#include "tags.h"

#include "engine/host.h"

#include <algorithm>
#include <mutex>

// ---------------------------------------------------------------- rows

std::vector<float> kvq_transform::predicted(const kvq_lane & x, int s, int p) const {
    std::vector<float> out;
    if (chain && chain->chains(value)) {
        out.resize(x.layout().page_cells * chain->stride(value));
        x.device.get(out.data(), chain->predict(ordinal, value, s, { p }), 4 * out.size());
    }
    return out;
}

std::vector<float> kvq_transform::said(const kvq_coord_pairs<const uint8_t> & pairs) const {
    std::vector<float> out((size_t) pairs.n_cells * (size_t) basis->width);
    kvq_basis_decode(*basis, pairs, out.data());
    return out;
}

// Threads that take images of values come here side by side, and a device takes one call at a time.
const uint8_t * kvq_transform::key_params(int s, int p, std::vector<uint8_t> & copy) const {
    static std::mutex one;
    const std::lock_guard<std::mutex> lock(one);
    return keys->view<uint8_t>(keys->params_at(s, p, 0), keys->layout().nb_params * keys->layout().n_head, copy);
}

std::vector<float> kvq_transform::said(int s, int p, const uint8_t * params) const {
    if (!basis || (value && keys->state(s, p) != KVQ_PAGE_SEALED)) { return {}; }
    const kvq_lane_layout & l = keys->layout();
    std::vector<uint8_t> copy;
    return said(kvq_coords_in(l.codec, l.nb_params, value ? key_params(s, p, copy) : params));
}

kvq_row_transform kvq_transform::transform_here(
    const kvq_lane & x, const int32_t * pos, const int32_t * was, const std::vector<float> & pred) const {
    return { mean, rotor ? &rotor->view() : nullptr, pos, was, pred.empty() ? nullptr : pred.data(),
        pred.size() / x.layout().page_cells, order };
}

void kvq_transform::shift_open(kvq_lane & x, int s, const int32_t * by, const kvq_edit_row & fn) {
    const kvq_lane_layout & l = x.layout();
    const size_t stride = (size_t) l.head_stride(), nb_head = (size_t) l.page_cells * stride;
    std::vector<uint8_t> copy;
    const auto shift_tile = [&](int p, uint16_t * tile) {
        uint16_t * const rows = x.view<uint16_t>(tile, l.nb_frame, copy);
        for (int t = 0; t < l.page_cells; t++) {
            const int cell = p * l.page_cells + t;
            if (cell >= l.n_cells || !by[cell] || !x.is_valid(s, p, t)) { continue; }
            uint16_t * row = rows + (size_t) t * stride;
            const int32_t pos = kvq_tag_get(l, row, nb_head);
            for (int h = 0; h < l.n_head; h++) { fn(cell, h, row + (size_t) h * nb_head); }
            if (pos < 0) { continue; } // rows without a position stay so
            kvq_tag_put(l, row, nb_head, pos + by[cell]);
            rotor->cover(pos + by[cell]);
        }
        if (rows != tile) { x.device.put(tile, rows, l.nb_frame); }
    };
    for (int p : x.open_pages(s)) { shift_tile(p, x.info(s, p).frame); }
    uint16_t * tile = nullptr;
    for (int p = 0; p < l.n_pages; p++) { // rows that are kept as they came
        if (x.state(s, p) != KVQ_PAGE_SEALED) { continue; }
        tile = tile ? tile : x.scratch->take(l.nb_frame);
        if (!x.recall_page(s, p, tile)) { break; }
        shift_tile(p, tile);
        x.keep_page(s, p, tile);
    }
    if (tile) { x.scratch->give(tile, l.nb_frame); }
}

// ---------------------------------------------------------------- writing

void kvq_transform::written(kvq_lane & x, int64_t n, const int64_t * idx, const int32_t * pos, uint16_t * const *) {
    const kvq_lane_layout & l = x.layout();
    for (int64_t i = 0; rotor && pos && i < n; i++) {
        const int s = (int) (idx[i] / l.n_cells), cell = (int) (idx[i] % l.n_cells);
        positions->now_at(s, cell / l.page_cells)[cell % l.page_cells] = pos[i];
        // in strides: a device uploads tables that have grown
        if (rotor->view().n_high <= pos[i] / 64) { rotor->cover(pos[i] + 8192); }
    }
}

bool kvq_transform::is_held_elsewhere(const kvq_lane & x, int s, int p) const {
    return positions->users_of(s, p) > (x.state(s, p) == KVQ_PAGE_SEALED);
}

void kvq_transform::state_changed(kvq_lane &, int s, int p, kvq_page_state from, kvq_page_state to) {
    if (!keeps_turn()) { return; }
    uint16_t & n = positions->users_of(s, p);
    n = (uint16_t) (n + (to == KVQ_PAGE_SEALED) - (from == KVQ_PAGE_SEALED));
}

void kvq_transform::note_sealed(kvq_lane & x, int s, int p) {
    if (!rotor) { return; }
    int32_t * pos = positions->now_at(s, p);
    for (int t = 0; t < x.layout().page_cells; t++) {
        if (!x.is_valid(s, p, t)) { pos[t] = -1; } // as the tag of a row of zeros
    }
    if (keeps_turn() && !is_held_elsewhere(x, s, p)) {
        std::copy_n(pos, x.layout().page_cells, positions->sealed_at(s, p));
    }
    positions->put(s, p, keeps_turn());
}

kvq_row_transform kvq_transform::transform_of(const kvq_lane & x, int s, int p) const {
    const size_t at = (size_t) p * x.layout().page_cells;
    kvq_row_transform out = { mean, rotor ? &rotor->view() : nullptr, rotor ? positions->now_there(s) + at : nullptr,
        keeps_turn() ? positions->sealed_there(s) + at : nullptr, nullptr, 0, order };
    if (basis && (!value || keys->state(s, p) == KVQ_PAGE_SEALED)) {
        out.basis = basis;
        out.keys = &keys->layout().codec;
        out.coords = keys->params_at(s, p, 0);
    }
    return out;
}

// ---------------------------------------------------------------- sealing

void kvq_transform::leave_out(
    kvq_lane & x, int s, const std::vector<int> & pages, std::vector<kvq_page_block> & blocks, int n_threads) {
    if (!active()) { return; }
    const kvq_lane_layout & l = x.layout();
    const bool chained = chain && chain->chains(value);
    for (size_t i = 0; i < pages.size();) { // the buffer of predictions holds one stripe
        const size_t n = std::min(pages.size() - i, chained ? (size_t) KVQ_CHAIN_STRIPE : pages.size());
        const std::vector<int> stripe(pages.begin() + (long) i, pages.begin() + (long) (i + n));
        for (int p : stripe) { note_sealed(x, s, p); } // before predictions and transforms read positions
        const float * pred = chained ? chain->predict(ordinal, value, s, stripe) : nullptr;
        const size_t pred_stride = chained ? chain->stride(value) : 0;
        const size_t first = reduced.size();
        std::vector<const uint16_t *> from;
        std::vector<kvq_row_transform> jobs;
        for (size_t j = 0; j < n; j++) {
            from.push_back(blocks[i + j].tile);
            reduced.push_back(x.scratch->take(l.nb_frame));
            blocks[i + j].tile = reduced.back();
            jobs.push_back(transform_of(x, s, stripe[j]));
            if (basis && !value) { jobs.back().coords = (uint8_t *) blocks[i + j].params; }
            if (pred) {
                jobs.back().pred = pred + j * (size_t) l.page_cells * pred_stride;
                jobs.back().pred_stride = pred_stride;
            }
        }
        if (basis && !value) { x.device.transforms()->take_coords(l, (int) n, from.data(), jobs.data(), n_threads); }
        x.device.transforms()->take_out(l, (int) n, from.data(), reduced.data() + first, jobs.data(), n_threads);
        i += n;
    }
}

void kvq_transform::encoded(kvq_lane & x) {
    for (uint16_t * tile : reduced) { x.scratch->rest(tile, x.layout().nb_frame); } // encode may not have begun
    reduced.clear();
}

// In place, tags included.
void kvq_transform::put_back(const kvq_lane & x, int s, int p, uint16_t * tile) const {
    if (!active()) { return; }
    kvq_row_transform turn = transform_of(x, s, p);
    if (chain && chain->chains(value)) {
        turn.pred = chain->predict(ordinal, value, s, { p });
        turn.pred_stride = chain->stride(value);
    }
    x.device.transforms()->put_back(x.layout(), tile, turn);
}

void kvq_transform::copied_page(kvq_lane & x, int from, int to, int p) {
    const uint8_t state = x.info(from, p).state;
    if (!rotor || !(state == KVQ_PAGE_SEALED || state == KVQ_PAGE_OPEN)) { return; }
    const int n = x.layout().page_cells;
    std::copy_n(positions->now_at(from, p), n, positions->now_at(to, p));
    if (keeps_turn()) { // every layer copies: no layer holds another page there any more
        std::copy_n(positions->sealed_at(from, p), n, positions->sealed_at(to, p));
    }
    positions->put(to, p, keeps_turn());
}

// ---------------------------------------------------------------- attention

void kvq_transform::spans(kvq_attn & a, int s) {
    (value ? a.v_mean : a.k_mean) = mean;
    (value ? a.v_basis : a.k_basis) = basis;
    if (!value) { a.k_order = order; }
    if (!positions) { return; }
    a.rotary = rotor ? &rotor->view() : nullptr;
    a.positions = positions->now_there(s);
    a.sealed = keeps_turn() ? positions->sealed_there(s) : nullptr;
    a.flags |= a.sealed && positions->is_elsewhere() && positions->stayed(s) ? KVQ_ATTN_STAYED : 0;
}

// ---------------------------------------------------------------- as a part of a plan

static void shape(const kvq_part & part, const kvq_layer_plan &, bool value, kvq_lane_layout & l) {
    l.turned = !value && part.get("unrotate") > 0;
    l.centred = part.get("mean") > 0;
    l.sorted = !value && part.get("sort") > 0;
}

static void bytes(const kvq_part & part, const kvq_layer_plan &, bool value, kvq_lane_layout & l) {
    if (l.centred) { l.bytes_calibration += kvq_pad(4 * (size_t) l.n_head * l.codec.head_size, KVQ_ALIGN); }
    if (l.sorted) { l.bytes_calibration += kvq_pad(10 * (size_t) l.n_head * l.codec.head_size, KVQ_ALIGN); }
    if (part.get("counts_shared") > 0 && !value) { // positions now and when sealed; layers that hold the page
        const size_t pages = (size_t) l.n_pages * l.n_stream;
        l.bytes_tables += kvq_pad(8 * pages * l.page_cells + 2 * pages, KVQ_ALIGN);
    }
}

static bool attach(const kvq_part & part, kvq_layer_parts & at) {
    const kvq_lane_layout & l = at.k->layout();
    if (!at.device.transforms()) { return false; }
    std::shared_ptr<void> & table = at.shared["positions"];
    if (part.get("unrotate") > 0 && !table) {
        table = std::make_shared<kvq_positions>(l.n_stream, l.n_pages, l.page_cells, at.device);
    }
    kvq_positions * positions = (kvq_positions *) table.get();
    if (positions && !positions->ok()) { return false; }
    const bool mean = part.get("mean") > 0;
    for (const bool value : { false, true }) {
        const float * its_mean = mean ? (value ? at.data->v_mean : at.data->k_mean).data() : nullptr;
        at.transforms[value] = at.own(new kvq_transform(value, its_mean, value ? nullptr : positions));
        if (!value && part.get("sort") > 0) {
            const bool gains = part.get("sort") == KVQ_SORT_GAINS;
            const auto & order = at.plan.part("chain") ? at.data->k_left
                : l.codec.coords                       ? (gains ? at.data->k_left_gains : at.data->k_left)
                : gains                                ? at.data->k_gains
                                                       : at.data->k_order;
            at.transforms[value]->order = &order.view;
        }
        at.lane(value).add(at.transforms[value]);
    }
    return true;
}

static std::string words(const std::vector<kvq_part_of_layer> & layers, const kvq_stats &) {
    const kvq_part & part = *layers[0].part;
    return part.get("mean") > 0 ? "; channel means are taken off keys and values" : "";
}

extern const kvq_policy_kind kvq_policy_transform;
const kvq_policy_kind kvq_policy_transform = { "transform", shape, bytes, attach, words };

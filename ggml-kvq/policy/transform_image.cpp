// Saved states of lanes that leave something out.
#include "chain.h"
#include "tags.h"
#include "transform.h"

#include "base/parallel.h"
#include "engine/host.h"
#include "store/mark.h"
#include "types/types.h"

#include <algorithm>
#include <cstring>

// Image of a whole page, rows [page_cells][n_head*head_size]: decoded and put back, parameters in the low bits (above
// the tag's), behind those of the first head the positions when sealed.
void kvq_transform::image_page(const kvq_lane & x, const int32_t * pos, const int32_t * was, const uint8_t * codes,
    const uint8_t * params, const std::vector<float> & pred, kvq_row_turns & turns, uint16_t * rows) const {
    const kvq_lane_layout & l = x.layout();
    const int D = l.codec.head_size, W = D * l.n_head;
    std::vector<uint16_t> head((size_t) l.page_cells * D);
    kvq_row_transform turn = transform_here(x, pos, was, pred);
    kvq_cpu_turns(l, turn, true, turns);
    turn.turns = &turns;
    for (int h = 0; h < l.n_head; h++) {
        kvq_cpu_decode(l.codec, codes + h * l.nb_codes, params + h * l.nb_params, head.data());
        kvq_cpu_put_back_rows(l, h, turn, head.data(), D);
        std::vector<uint8_t> bytes(params + h * l.nb_params, params + (h + 1) * l.nb_params);
        if (was && !h) {
            std::vector<int32_t> then(was, was + l.page_cells);
            for (int t = 0; rotor->first() && t < l.page_cells; t++) {
                if (was[t] == pos[t] && was[t] >= rotor->first()) { then[(size_t) t] = KVQ_SEALED_HERE; }
            }
            bytes.insert(bytes.end(), (const uint8_t *) then.data(), (const uint8_t *) (then.data() + l.page_cells));
        }
        kvq_image_put(head.size(), head.data(), rotor ? 1 : 0, bytes.size(), bytes.data());
        for (int t = 0; t < l.page_cells; t++) {
            memcpy(rows + (size_t) t * W + (size_t) h * D, &head[(size_t) t * D], 2 * (size_t) D);
        }
    }
    for (int t = 0; rotor && t < l.page_cells; t++) { kvq_tag_put(l, rows + (size_t) t * W, (size_t) D, pos[t]); }
}

void kvq_transform::write_image(
    const kvq_lane & x, int s, int p, const uint8_t * codes, const uint8_t * params, uint16_t * rows) const {
    kvq_row_turns turns;
    const std::vector<float> pred = basis ? said(s, p, params) : predicted(x, s, p);
    image_page(x, positions_at(s, p), sealed_at(s, p), codes, params, pred, turns, rows);
}

bool kvq_transform::rows_of_block(const kvq_lane & x, const kvq_page_image & image, const uint8_t * codes,
    const uint8_t * params, uint16_t * rows) const {
    const size_t n = (size_t) x.layout().page_cells;
    if ((chain && chain->chains(value)) || image.pos.size() != (rotor ? n : 0) ||
        image.was.size() != (keeps_turn() ? n : 0) || image.beside.size() != x.layout().nb_beside) {
        return false;
    }
    for (const std::vector<int32_t> * list : { &image.pos, &image.was }) {
        for (const int32_t pos : *list) {
            if (pos < -1 || pos >= position_bound(x)) { return false; }
            rotor->cover(pos);
        }
    }
    kvq_row_turns turns;
    const kvq_codec * of = basis ? &keys->layout().codec : nullptr;
    const std::vector<float> pred = !basis ? std::vector<float>()
        : value                            ? said(kvq_coords_alone(*of, image.beside.data()))
                                           : said(kvq_coords_in(*of, keys->layout().nb_params, params));
    image_page(x, rotor ? image.pos.data() : nullptr, image.was.empty() ? nullptr : image.was.data(), codes, params,
        pred, turns, rows);
    return true;
}

size_t kvq_transform::image_bytes(const kvq_lane & x) const {
    return keeps_turn() ? 4 * (size_t) x.layout().page_cells : 0;
}

// Far above what a context shift leaves, and tables of a few MB. Four positions are numbers of the rotor, which bounds
// them itself.
int32_t kvq_transform::position_bound(const kvq_lane & x) const {
    constexpr int64_t AT_LEAST = 1 << 20, AT_MOST = 1 << 26; // the latter: a tag has no more
    if (!rotor) { return 0; }
    return (
        int32_t) (rotor->first() ? AT_MOST : std::min(std::max<int64_t>(8ll * x.layout().n_cells, AT_LEAST), AT_MOST));
}

bool kvq_transform::images_together(const kvq_lane &) const { return !(chain && chain->chains(value)); }

// Tables of rotary embeddings grow here: threads read them while images are taken.
void kvq_transform::images_come(const kvq_lane & x, const std::vector<const uint16_t *> & pages, int n_threads) const {
    const kvq_lane_layout & l = x.layout();
    const size_t D = (size_t) l.codec.head_size, W = D * (size_t) l.n_head, pc = (size_t) l.page_cells;
    if (!rotor) { return; }
    std::vector<int32_t> said(2 * pc * pages.size(), -1); // of each page: where rows stand, where they stood
    const auto hear = [&](int64_t i) {
        const uint16_t * const rows = pages[(size_t) i];
        int32_t * const now = &said[2 * pc * (size_t) i];
        for (size_t t = 0; t < pc; t++) { now[t] = kvq_tag_get(l, rows + t * W, D); }
        if (!keeps_turn()) { return; }
        std::vector<uint16_t> head(pc * D);
        std::vector<uint8_t> bytes(l.nb_params + 4 * pc);
        for (size_t t = 0; t < pc; t++) { memcpy(&head[t * D], rows + t * W, 2 * D); }
        if (kvq_image_take(head.size(), head.data(), image_low_bits(x), bytes.size(), bytes.data())) {
            memcpy(now + pc, &bytes[l.nb_params], 4 * pc);
        }
    };
    kvq_parallel_for((int64_t) pages.size(), n_threads, hear, 8);
    const int32_t bound = position_bound(x);
    for (const int32_t pos : said) {
        if (pos < bound) { rotor->cover(pos); }
    }
}

// Parameters of head h, and with the first head positions when sealed, from the low bits of its rows, which go to
// `head`. False: the rows are no image.
bool kvq_transform::take_params(const kvq_lane & x, int h, int low, const uint16_t * rows, std::vector<uint16_t> & head,
    kvq_page_image & out) const {
    const kvq_lane_layout & l = x.layout();
    const size_t D = (size_t) l.codec.head_size, W = D * (size_t) l.n_head;
    std::vector<int32_t> & was = out.was;
    for (int t = 0; t < l.page_cells; t++) {
        memcpy(&head[(size_t) t * D], rows + (size_t) t * W + (size_t) h * D, 2 * D);
    }
    std::vector<uint8_t> bytes(l.nb_params + (h ? 0 : 4 * was.size()));
    if (!kvq_image_take(head.size(), head.data(), low, bytes.size(), bytes.data())) { return false; }
    std::copy_n(bytes.data(), l.nb_params, &out.params[h * l.nb_params]);
    if (!h && !was.empty()) { memcpy(was.data(), &bytes[l.nb_params], 4 * was.size()); }
    return true;
}

// take_params, then its codes.
bool kvq_transform::take_head(const kvq_lane & x, int h, int low, const uint16_t * rows,
    const std::vector<float> & pred, kvq_row_turns & turns, bool marked, std::vector<uint16_t> & head,
    kvq_page_image & out) const {
    const kvq_lane_layout & l = x.layout();
    const size_t D = (size_t) l.codec.head_size, nb = l.nb_params + (h ? 0 : 4 * out.was.size());
    std::vector<int32_t> &pos = out.pos, &was = out.was;
    if (!take_params(x, h, low, rows, head, out)) { return false; }
    for (size_t t = 0; !h && t < was.size(); t++) {
        if (rotor->first() && was[t] == KVQ_SEALED_HERE) {
            was[t] = pos[t];
        } else if (rotor->first() && was[t] > rotor->first() - 128) {
            return false; // text further on than this rotor knows
        }
        if (was[t] < -1 || was[t] >= position_bound(x)) { return false; } // no image
        rotor->cover(was[t]);
    }
    const kvq_low_bits more = { low + kvq_image_width(head.size(), nb), marked && !h };
    const uint16_t plain = (uint16_t) ~((1 << more.n) - 1);
    for (uint16_t & v : head) { v &= plain; }
    for (size_t i = 0; more.marked && i < head.size(); i++) { head[i] &= (uint16_t) ~more.mask(l.codec, i); }
    kvq_row_transform turn = transform_here(x, pos.data(), was.empty() ? nullptr : was.data(), pred);
    if (!h) { kvq_cpu_turns(l, turn, false, turns); }
    turn.turns = &turns;
    kvq_cpu_take_out_rows(l, h, turn, head.data(), (int) D);
    kvq_cpu_assign(l.codec, head.data(), &out.codes[h * l.nb_codes], &out.params[h * l.nb_params]);
    return true;
}

// The block whose image the rows are: parameters and positions from the low bits, codes as the nearest ones to what
// the rows were encoded from; the image made of them must equal the rows bit for bit.
bool kvq_transform::take_image(
    const kvq_lane & x, int s, int p, const uint16_t * rows, bool marked, kvq_page_image & out) const {
    const kvq_lane_layout & l = x.layout();
    const int D = l.codec.head_size, W = D * l.n_head;
    if (!kvq_traits(l.codec.type)->assign) { return false; }
    std::vector<int32_t> &pos = out.pos, &was = out.was;
    pos.assign((size_t) l.page_cells, -1);
    for (int t = 0; rotor && t < l.page_cells; t++) {
        pos[(size_t) t] = kvq_tag_get(l, rows + (size_t) t * W, (size_t) D);
        if (pos[(size_t) t] >= position_bound(x)) { return false; }
        rotor->cover(pos[(size_t) t]);
    }
    std::vector<uint16_t> head((size_t) l.page_cells * D), again((size_t) l.page_cells * W);
    kvq_row_turns turns; // made with the first head
    was.assign(keeps_turn() ? (size_t) l.page_cells : 0, 0);
    for (int h = 0; basis && !value && h < l.n_head; h++) { // all heads have coordinates of each
        if (!take_params(x, h, image_low_bits(x), rows, head, out)) { return false; }
    }
    const std::vector<float> pred = basis ? said(s, p, out.params.data()) : predicted(x, s, p);
    for (int h = 0; h < l.n_head; h++) {
        if (!take_head(x, h, image_low_bits(x), rows, pred, turns, marked, head, out)) { return false; }
    }
    if (!was.empty() && is_held_elsewhere(x, s, p) && memcmp(was.data(), sealed_at(s, p), 4 * was.size())) {
        return false; // other layers hold the page: it has to be sealed as theirs is
    }
    image_page(x, pos.data(), was.empty() ? nullptr : was.data(), out.codes.data(), out.params.data(), pred, turns,
        again.data());
    for (int i = 0; marked && i < l.page_cells * D; i++) { // bits of a mark do not belong to the row
        const size_t at = (size_t) (i / D) * W + (size_t) (i % D);
        if (kvq_mark_covers(l.codec, (size_t) i)) {
            again[at] = (uint16_t) ((again[at] & ~(1 << x.mark_plane())) | (rows[at] & 1 << x.mark_plane()));
        }
    }
    if (!rotor) { pos.clear(); }
    return !memcmp(again.data(), rows, 2 * again.size());
}

void kvq_transform::describe(const kvq_lane & x, int s, int p, kvq_page_image & image) const {
    const int n = x.layout().page_cells;
    if (const int32_t * pos = positions_at(s, p)) { image.pos.assign(pos, pos + n); }
    if (const int32_t * was = sealed_at(s, p)) { image.was.assign(was, was + n); }
    image.beside = beside(x, s, p);
}

std::vector<uint8_t> kvq_transform::beside(const kvq_lane & x, int s, int p) const {
    std::vector<uint8_t> out(x.layout().nb_beside);
    if (out.empty() || keys->state(s, p) != KVQ_PAGE_SEALED) { return out; }
    const kvq_lane_layout & l = keys->layout();
    std::vector<uint8_t> copy;
    const auto pairs = kvq_coords_in(l.codec, l.nb_params, key_params(s, p, copy));
    const size_t nb = kvq_coords_nb(l.codec, 1);
    for (int h = 0; h < l.n_head; h++) { memcpy(&out[(size_t) h * nb], pairs.of(h * pairs.each), nb); }
    return out;
}

bool kvq_transform::accepts(const kvq_lane & x, int s, int p, const kvq_page_image & image) const {
    const size_t n = (size_t) x.layout().page_cells;
    if (image.pos.size() != (rotor ? n : 0) || image.was.size() != (keeps_turn() ? n : 0)) { return false; }
    if (x.layout().nb_beside && image.beside != beside(x, s, p)) { return false; } // keys were sealed anew
    for (const std::vector<int32_t> * list : { &image.pos, &image.was }) {
        for (const int32_t pos : *list) {
            if (pos < -1 || pos >= position_bound(x)) { return false; }
            rotor->cover(pos);
        }
    }
    // other layers hold the page: it has to be sealed as theirs is
    return image.was.empty() || !is_held_elsewhere(x, s, p) || !memcmp(image.was.data(), sealed_at(s, p), 4 * n);
}

void kvq_transform::placing(kvq_lane &, int s, int p, const kvq_page_image & image) {
    if (!rotor) { return; }
    std::copy(image.pos.begin(), image.pos.end(), positions->now_at(s, p));
    std::copy(image.was.begin(), image.was.end(), positions->sealed_at(s, p));
    positions->put(s, p, keeps_turn());
}

void kvq_transform::save(const kvq_lane & x, int, int, int n, uint16_t * rows, int) const {
    if (rotor) { kvq_tags_leave(x.layout(), *rotor, rows, n); }
}

void kvq_transform::enter(const kvq_lane & x, uint16_t * rows, int n) const {
    if (rewrites_rows(x)) { kvq_tags_enter(x.layout(), *rotor, rows, n); }
}

void kvq_transform::entered(kvq_lane & x, int s, int cell, const uint16_t * rows, int n) {
    const kvq_lane_layout & l = x.layout();
    const size_t D = (size_t) l.codec.head_size;
    for (int i = 0; rotor && i < n; i++) {
        const int32_t pos = kvq_tag_get(l, rows + i * D * l.n_head, D);
        rotor->cover(pos);
        positions->now_at(s, (cell + i) / l.page_cells)[(cell + i) % l.page_cells] = pos;
    }
}

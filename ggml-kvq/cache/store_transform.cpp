// Rows edited in place; and lanes whose sealed pages leave something out (transform.h): saving, restoring and
// shifting them.
#include "store.h"
#include "chain.h"

#include "../cpu/cpu.h"
#include "../types/types.h"

#include <algorithm>
#include <cstring>

void kvq_lane::edit(
    int stream, const std::function<bool(int)> & any, const std::function<void(int, int, uint16_t *)> & fn) {
    const int stride = l.head_stride();
    std::vector<uint8_t> copy;
    std::vector<uint16_t *> shared(sharers.size(), nullptr);
    if (slots) { slots->edit(value, stream, any, fn); }
    for (int p = 0; p < l.n_pages; p++) {
        kvq_page_info & i = info(stream, p);
        bool touched = false;
        for (int t = 0; i.state != KVQ_PAGE_EMPTY && t < l.page_cells && !touched; t++) {
            touched =
                p * l.page_cells + t < l.n_cells && (valid(stream, p)[t / 8] >> t % 8 & 1) && any(p * l.page_cells + t);
        }
        if (!touched) { continue; }
        const bool sealed = i.state == KVQ_PAGE_SEALED;
        uint16_t * tile = i.frame;
        if (sealed) {
            tile = scratch->take(l.nb_frame);
            decode_page(stream, p, tile);
            for (size_t k = 0; k < sharers.size(); k++) {
                if (sharers[k]->info(stream, p).state == KVQ_PAGE_SEALED) {
                    shared[k] = scratch->take(l.nb_frame);
                    sharers[k]->decode_page(stream, p, shared[k]);
                }
            }
        }
        uint16_t * rows = view<uint16_t>(tile, l.nb_frame, copy);
        for (int h = 0; h < l.n_head; h++) {
            for (int t = 0; t < l.page_cells; t++) {
                if (p * l.page_cells + t < l.n_cells && (valid(stream, p)[t / 8] >> t % 8 & 1)) {
                    fn(p * l.page_cells + t, h, rows + ((size_t) h * l.page_cells + t) * stride);
                }
            }
        }
        if (rows != tile) { device.put(tile, rows, l.nb_frame); }
        if (sealed) {
            encode_page(stream, p, tile);
            scratch->give(tile, l.nb_frame);
            for (size_t k = 0; k < sharers.size(); k++) { // refitted to the new codes
                if (shared[k]) {
                    sharers[k]->encode_page(stream, p, shared[k]);
                    scratch->give(shared[k], l.nb_frame);
                    shared[k] = nullptr;
                }
            }
        }
    }
}

void kvq_lane::count_user(int s, int p, int by) {
    if (x.keeps_turn() && by) {
        uint16_t & n = x.users[(size_t) s * l.n_pages + p];
        n = (uint16_t) (n + by);
    }
}

// Image of a whole page, rows [page_cells][n_head*head_size]: decoded and put back, parameters in the low bits (above
// the tag's), behind those of the first head the positions when sealed.
void kvq_lane::image_page(int s, int p, const int32_t * pos, const int32_t * was, const uint8_t * codes,
    const uint8_t * params, uint16_t * rows) const {
    const int D = l.codec.head_size, W = D * l.n_head;
    std::vector<uint16_t> head((size_t) l.page_cells * D);
    const std::vector<float> pred = predicted(s, p);
    for (int h = 0; h < l.n_head; h++) {
        kvq_traits(l.codec.type)->decode(l.codec, codes + h * l.nb_codes, params + h * l.nb_params, head.data());
        x.restore(
            l, h, pos, was, head.data(), D, pred.empty() ? nullptr : &pred[(size_t) h * D], pred.size() / l.page_cells);
        std::vector<uint8_t> bytes(params + h * l.nb_params, params + (h + 1) * l.nb_params);
        if (was && !h) {
            std::vector<int32_t> then(was, was + l.page_cells);
            for (int t = 0; x.rotor->first() && t < l.page_cells; t++) {
                if (was[t] == pos[t] && was[t] >= x.rotor->first()) { then[(size_t) t] = KVQ_SEALED_HERE; }
            }
            bytes.insert(bytes.end(), (const uint8_t *) then.data(), (const uint8_t *) (then.data() + l.page_cells));
        }
        kvq_image_put(head.size(), head.data(), x.rotor ? 1 : 0, bytes.size(), bytes.data());
        for (int t = 0; t < l.page_cells; t++) {
            memcpy(rows + (size_t) t * W + (size_t) h * D, &head[(size_t) t * D], 2 * (size_t) D);
        }
    }
    for (int t = 0; x.rotor && t < l.page_cells; t++) { kvq_tag_put(l, rows + (size_t) t * W, (size_t) D, pos[t]); }
}

// The block whose image the rows are: parameters and positions from the low bits, codes as the nearest ones to what
// the rows were encoded from; the image made of them must equal the rows bit for bit.
bool kvq_lane::take_transformed(int s, int p, const uint16_t * rows, bool marked, kvq_page_image & out) const {
    const kvq_type_traits * type = kvq_traits(l.codec.type);
    const int D = l.codec.head_size, W = D * l.n_head, low = x.rotor ? 1 : 0;
    if (!type->assign) { return false; }
    std::vector<uint8_t> &codes = out.codes, &params = out.params;
    std::vector<int32_t> &pos = out.pos, &was = out.was;
    pos.assign((size_t) l.page_cells, -1);
    for (int t = 0; x.rotor && t < l.page_cells; t++) {
        pos[(size_t) t] = kvq_tag_get(l, rows + (size_t) t * W, (size_t) D);
        x.rotor->reach(pos[(size_t) t]);
    }
    std::vector<uint16_t> head((size_t) l.page_cells * D), again((size_t) l.page_cells * W);
    const std::vector<float> pred = predicted(s, p);
    was.assign(x.keeps_turn() ? (size_t) l.page_cells : 0, 0);
    for (int h = 0; h < l.n_head; h++) {
        for (int t = 0; t < l.page_cells; t++) {
            memcpy(&head[(size_t) t * D], rows + (size_t) t * W + (size_t) h * D, 2 * (size_t) D);
        }
        std::vector<uint8_t> bytes(l.nb_params + (h ? 0 : 4 * was.size()));
        if (!kvq_image_take(head.size(), head.data(), low, bytes.size(), bytes.data())) { return false; }
        std::copy_n(bytes.data(), l.nb_params, &params[h * l.nb_params]);
        if (!h && !was.empty()) {
            memcpy(was.data(), &bytes[l.nb_params], 4 * was.size());
            for (int t = 0; t < l.page_cells; t++) {
                if (x.rotor->first() && was[(size_t) t] == KVQ_SEALED_HERE) {
                    was[(size_t) t] = pos[(size_t) t];
                } else if (x.rotor->first() && was[(size_t) t] > x.rotor->first() - 128) {
                    return false; // text further on than this rotor knows
                }
                if (was[(size_t) t] < -1 || was[(size_t) t] >= 1 << 26) { // no image
                    return false;
                }
                x.rotor->reach(was[(size_t) t]);
            }
        }
        const kvq_low_bits more = { low + kvq_image_width(head.size(), bytes.size()), marked && !h };
        for (size_t i = 0; i < head.size(); i++) { head[i] &= (uint16_t) ~more.mask(l.codec, i); }
        x.remove(l, h, pos.data(), was.empty() ? nullptr : was.data(), head.data(), D,
            pred.empty() ? nullptr : &pred[(size_t) h * D], pred.size() / l.page_cells);
        type->assign(l.codec, head.data(), &codes[h * l.nb_codes], &params[h * l.nb_params]);
    }
    if (!was.empty()) { // other layers hold the page: it has to be sealed as theirs is
        const uint16_t users = x.users[(size_t) s * l.n_pages + p];
        if (users > (state(s, p) == KVQ_PAGE_SEALED) && memcmp(was.data(), sealed_at(s, p), 4 * was.size())) {
            return false;
        }
    }
    image_page(s, p, pos.data(), was.empty() ? nullptr : was.data(), codes.data(), params.data(), again.data());
    for (int i = 0; marked && i < l.page_cells * D; i++) { // what a mark has there says nothing
        const size_t at = (size_t) (i / D) * W + (size_t) (i % D);
        if (kvq_mark_covers(l.codec, (size_t) i)) {
            again[at] = (uint16_t) ((again[at] & ~(1 << mark_plane())) | (rows[at] & 1 << mark_plane()));
        }
    }
    if (!x.rotor) { pos.clear(); }
    return !memcmp(again.data(), rows, 2 * again.size());
}

void kvq_lane::shift_open(int stream, const int32_t * by, const std::function<void(int, int, uint16_t *)> & fn) {
    const size_t stride = (size_t) l.head_stride(), nb_head = (size_t) l.page_cells * stride;
    std::vector<uint8_t> copy;
    for (int p : streams[stream].open) {
        uint16_t *const tile = info(stream, p).frame, *const rows = view<uint16_t>(tile, l.nb_frame, copy);
        for (int t = 0; t < l.page_cells; t++) {
            const int cell = p * l.page_cells + t;
            if (cell >= l.n_cells || !by[cell] || !(valid(stream, p)[t / 8] >> t % 8 & 1)) { continue; }
            uint16_t * row = rows + (size_t) t * stride;
            const int32_t pos = kvq_tag_get(l, row, nb_head);
            for (int h = 0; h < l.n_head; h++) { fn(cell, h, row + (size_t) h * nb_head); }
            kvq_tag_put(l, row, nb_head, pos < 0 ? pos : pos + by[cell]);
            x.rotor->reach(pos < 0 ? 0 : pos + by[cell]);
        }
        if (rows != tile) { device.put(tile, rows, l.nb_frame); }
    }
}

void kvq_lane::put_positions(int s, int p) {
    if (!device.is_host() && x.rotor) {
        const size_t at = ((size_t) s * l.n_pages + p) * l.page_cells;
        device.put(x.positions_there + at, x.positions + at, 4 * (size_t) l.page_cells);
        if (x.keeps_turn()) {
            device.put(x.sealed_there + at, x.sealed + at, 4 * (size_t) l.page_cells);
            if (x.apart) {
                x.apart[(size_t) s * l.n_pages + p] = kvq_moved(l.page_cells, x.positions + at, x.sealed + at);
            }
        }
    }
}

kvq_row_turn kvq_lane::turn_of(int s, int p) const {
    const size_t at = ((size_t) s * l.n_pages + p) * l.page_cells;
    return { x.mean, x.rotor ? &x.rotor->view() : nullptr, x.rotor ? x.positions_there + at : nullptr,
        x.keeps_turn() ? x.sealed_there + at : nullptr, nullptr, 0 };
}

void kvq_lane::note_sealed(int s, int p) {
    for (int t = 0; !device.is_host() && x.rotor && t < l.page_cells; t++) {
        if (!(valid(s, p)[t / 8] >> t % 8 & 1)) {
            positions_at(s, p)[t] = -1; // as the tag of a row of zeros
        }
    }
    if (x.keeps_turn() && x.users[(size_t) s * l.n_pages + p] == (state(s, p) == KVQ_PAGE_SEALED)) {
        std::copy_n(positions_at(s, p), l.page_cells, sealed_at(s, p));
    }
    put_positions(s, p);
}

void kvq_lane::note_positions(int64_t n, const int64_t * idx, const int32_t * pos, uint16_t * const * to) {
    for (int64_t i = 0; i < n; i++) {
        if (device.is_host()) {
            kvq_tag_put(l, to[(size_t) i], (size_t) l.page_cells * l.head_stride(), pos[i]);
            x.rotor->reach(pos[i]);
            // rows that cannot be read here: their positions are noted at once, and reached in strides, which upload
            // tables
        } else {
            const int s = (int) (idx[i] / l.n_cells), cell = (int) (idx[i] % l.n_cells);
            positions_at(s, cell / l.page_cells)[cell % l.page_cells] = pos[i];
            if (x.rotor->view().n_high <= pos[i] / 64) { x.rotor->reach(pos[i] + 8192); }
        }
    }
}

kvq_lane::left_tiles kvq_lane::leave_out(int s, const std::vector<int> & pages, std::vector<kvq_page_block> & blocks) {
    left_tiles left;
    if (!x.active()) { return left; }
    if (device.is_host()) {
        for (size_t i = 0; i < pages.size(); i++) {
            left.host.push_back(take_out(s, pages[i], blocks[i].tile));
            blocks[i].tile = left.host.back().data();
        }
        return left;
    }
    const bool chained = x.chain && x.chain->chains(value);
    for (size_t i = 0; i < pages.size();) { // predictions of a stripe at a time
        const size_t n = std::min(pages.size() - i, chained ? (size_t) kvq_chain::STRIPE : pages.size());
        const std::vector<int> some(pages.begin() + (long) i, pages.begin() + (long) (i + n));
        for (int p : some) { note_sealed(s, p); }
        const float * pred = chained ? x.chain->predict_there(x.ordinal, value, s, some) : nullptr;
        std::vector<const uint16_t *> from;
        std::vector<kvq_row_turn> turns;
        for (size_t j = 0; j < n; j++) {
            from.push_back(blocks[i + j].tile);
            left.there.push_back(scratch->take(l.nb_frame));
            blocks[i + j].tile = left.there.back();
            turns.push_back(turn_of(s, some[j]));
            turns.back().pred = pred ? pred + j * l.page_cells * x.chain->stride(value) : nullptr;
            turns.back().pred_stride = pred ? x.chain->stride(value) : 0;
        }
        device.take_out(l, (int) n, from.data(), left.there.data() + i, turns.data());
        i += n;
    }
    return left;
}

void kvq_lane::give(const left_tiles & left) {
    for (uint16_t * tile : left.there) { // the device works in order
        scratch->give(tile, l.nb_frame);
    }
}

// A copy of an open tile without means, rotary embedding and prediction; positions go from the rows' tags to the table.
std::vector<uint16_t> kvq_lane::take_out(int s, int p, const uint16_t * tile) {
    const size_t stride = (size_t) l.head_stride(), nb_head = (size_t) l.page_cells * stride;
    for (int t = 0; x.rotor && t < l.page_cells; t++) {
        const int32_t pos = kvq_tag_get(l, tile + (size_t) t * stride, nb_head);
        positions_at(s, p)[t] = pos;
        x.rotor->reach(pos);
    }
    note_sealed(s, p);
    std::vector<uint16_t> out(tile, tile + nb_head * l.n_head);
    const std::vector<float> pred = predicted(s, p);
    for (int h = 0; h < l.n_head; h++) {
        x.remove(l, h, positions_at(s, p), sealed_at(s, p), &out[h * nb_head], (int) stride,
            pred.empty() ? nullptr : &pred[(size_t) h * l.codec.head_size], pred.size() / l.page_cells);
    }
    return out;
}

std::vector<float> kvq_lane::predicted(int s, int p) const {
    std::vector<float> out;
    if (x.chain && x.chain->chains(value)) {
        out.resize(l.page_cells * x.chain->stride(value));
        x.chain->predict(x.ordinal, value, s, p, out.data());
    }
    return out;
}

void kvq_lane::note_change(int s, int p) {
    if (x.chain) { x.chain->changed(x.ordinal, value, s, p); }
}

void kvq_lane::reach_tags(int s, int cell, const uint16_t * rows, int n) {
    const size_t D = (size_t) l.codec.head_size;
    for (int i = 0; x.rotor && i < n; i++) {
        const int32_t pos = kvq_tag_get(l, rows + i * D * l.n_head, D);
        x.rotor->reach(pos);
        if (!device.is_host()) { positions_at(s, (cell + i) / l.page_cells)[(cell + i) % l.page_cells] = pos; }
    }
}

bool kvq_lane::settle(int s, std::vector<int> & due) {
    const size_t n = due.size();
    due.erase(std::remove_if(due.begin(), due.end(), [&](int p) { return !x.chain->ready(x.ordinal, value, s, p); }),
        due.end());
    for (int p : due) { x.chain->release(x.ordinal, value, s, p); }
    return due.size() == n;
}

void kvq_lane::plain_rows(int s, int p, float * out, size_t stride) const {
    const int D = l.codec.head_size, tile_stride = l.head_stride();
    const size_t nb_head = (size_t) l.page_cells * tile_stride;
    const kvq_page_info & i = info(s, p);
    if (i.state != KVQ_PAGE_OPEN) {
        std::fill_n(out, l.page_cells * stride, 0.0f);
        return;
    }
    std::vector<int32_t> pos((size_t) l.page_cells, 0);
    std::vector<uint16_t> tile(i.frame, i.frame + nb_head * l.n_head);
    for (int t = 0; x.rotor && t < l.page_cells; t++) {
        pos[(size_t) t] = kvq_tag_get(l, i.frame + (size_t) t * tile_stride, nb_head);
    }
    for (int h = 0; h < l.n_head; h++) {
        x.remove(l, h, pos.data(), nullptr, &tile[h * nb_head], tile_stride);
        for (int t = 0; t < l.page_cells; t++) {
            kvq_cpu_f16_to_f32(&tile[h * nb_head + (size_t) t * tile_stride], out + t * stride + (size_t) h * D, D);
        }
    }
}

// The reverse, in place, tags included.
void kvq_lane::put_back(int s, int p, uint16_t * tile) const {
    if (!device.is_host()) {
        if (x.active()) {
            kvq_row_turn turn = turn_of(s, p);
            if (x.chain && x.chain->chains(value)) {
                turn.pred = x.chain->predict_there(x.ordinal, value, s, { p });
                turn.pred_stride = x.chain->stride(value);
            }
            device.put_back(l, tile, turn);
        }
        return;
    }
    const size_t stride = (size_t) l.head_stride(), nb_head = (size_t) l.page_cells * stride;
    const std::vector<float> pred = predicted(s, p);
    for (int h = 0; x.active() && h < l.n_head; h++) {
        x.restore(l, h, positions_at(s, p), sealed_at(s, p), tile + h * nb_head, (int) stride,
            pred.empty() ? nullptr : &pred[(size_t) h * l.codec.head_size], pred.size() / l.page_cells);
    }
    for (int t = 0; x.rotor && t < l.page_cells; t++) {
        kvq_tag_put(l, tile + (size_t) t * stride, nb_head, positions_at(s, p)[t]);
    }
}

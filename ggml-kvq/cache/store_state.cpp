// Saving and restoring a lane: rows as a state carries them, and blocks as they are.
#include "store.h"
#include "chain.h"
#include "mark.h"

#include "../cpu/cpu.h"
#include "../types/types.h"

#include <algorithm>
#include <cstring>

// ---------------------------------------------------------------- blocks

bool kvq_lane::may_place(int s, int p) const {
    return p >= l.n_sink_pages && !l.is_f16() && (info(s, p).state == KVQ_PAGE_SEALED || room(s)) &&
        !(x.chain && !x.chain->ready(x.ordinal, value, s, p)) && !(owner && owner->info(s, p).state != KVQ_PAGE_SEALED);
}

kvq_page_image kvq_lane::block_of(int s, int p) const {
    kvq_page_image out;
    out.codes.resize(owner ? 0 : l.nb_codes * l.n_head);
    out.params.resize(l.nb_params * l.n_head);
    if (!out.codes.empty()) { device.get(out.codes.data(), codes_at(s, p, 0), out.codes.size()); }
    device.get(out.params.data(), params_at(s, p, 0), out.params.size());
    if (const int32_t * pos = positions_at(s, p)) { out.pos.assign(pos, pos + l.page_cells); }
    if (const int32_t * was = sealed_at(s, p)) { out.was.assign(was, was + l.page_cells); }
    return out;
}

bool kvq_lane::take_image(int s, int p, const uint16_t * rows, bool marked, kvq_page_image & out) const {
    const int D = l.codec.head_size, W = D * l.n_head;
    out.codes.assign(l.nb_codes * l.n_head, 0);
    out.params.assign(l.nb_params * l.n_head, 0);
    if (x.active()) { return take_transformed(s, p, rows, marked, out); }
    std::vector<uint16_t> head((size_t) l.page_cells * D);
    std::vector<uint8_t> codes_copy;
    const uint8_t * adopted = view<uint8_t>(owner ? codes_at(s, p, 0) : nullptr, l.nb_codes * l.n_head, codes_copy);
    for (int h = 0; h < l.n_head; h++) {
        for (int t = 0; t < l.page_cells; t++) {
            memcpy(&head[(size_t) t * D], rows + (size_t) t * W + (size_t) h * D, 2 * (size_t) D);
        }
        if (!kvq_image_read(l.codec, head.data(), owner ? adopted + h * l.nb_codes : nullptr,
                out.codes.data() + h * l.nb_codes, out.params.data() + h * l.nb_params, marked && !h)) {
            return false;
        }
    }
    if (owner) { out.codes.clear(); }
    return true;
}

int kvq_lane::mark_plane() const {
    const size_t nb = l.nb_params + (x.keeps_turn() ? 4 * (size_t) l.page_cells : 0);
    const int plane = (x.rotor ? 1 : 0) + kvq_image_width((size_t) l.page_cells * l.codec.head_size, nb);
    return plane < KVQ_MARK_PLANES && l.page_cells >= 2 * kvq_mark_rows(l.codec.head_size) ? plane : -1;
}

bool kvq_lane::is_marked_image(int s, int p, const uint16_t * rows) const {
    std::vector<uint16_t> entered(rows, rows + (size_t) l.page_cells * l.codec.head_size * l.n_head);
    if (x.rotor && x.rotor->first()) { kvq_tags_enter(l, *x.rotor, entered.data(), l.page_cells); }
    kvq_page_image taken;
    const kvq_page_image is = block_of(s, p);
    return !take_image(s, p, entered.data(), false, taken) && take_image(s, p, entered.data(), true, taken) &&
        taken.codes == is.codes && taken.params == is.params;
}

void kvq_lane::place(int s, int p, const kvq_page_image & image) {
    if (saliency && value) { saliency->drop(s, p); }
    for (kvq_lane * x : sharers) {
        if (x->info(s, p).state == KVQ_PAGE_SEALED) {
            x->open_page(s, p, true);
            x->is_dirty = x->waiting = true;
        }
    }
    if (x.rotor) {
        std::copy(image.pos.begin(), image.pos.end(), positions_at(s, p));
        std::copy(image.was.begin(), image.was.end(), sealed_at(s, p));
        put_positions(s, p);
    }
    if (x.chain) { x.chain->release(x.ordinal, value, s, p); }
    drop_frame(s, p);
    take_block(s, p);
    if (!owner && l.nb_codes) { device.put(codes_at(s, p, 0), image.codes.data(), image.codes.size()); }
    device.put(params_at(s, p, 0), image.params.data(), image.params.size());
    kvq_page_info & i = info(s, p);
    streams[s].clock += l.page_cells;
    i.stamp = streams[s].clock;
    i.n_valid = (uint16_t) l.page_cells;
    memset(valid(s, p), 0xff, l.page_cells / 8);
    set_state(s, p, KVQ_PAGE_SEALED);
}

bool kvq_lane::place_block(int s, int p, const kvq_page_image & image) {
    const size_t n_pos = x.rotor ? (size_t) l.page_cells : 0, n_was = x.keeps_turn() ? (size_t) l.page_cells : 0;
    if (!may_place(s, p) || image.codes.size() != (owner ? 0 : l.nb_codes * l.n_head) ||
        image.params.size() != l.nb_params * l.n_head || image.pos.size() != n_pos || image.was.size() != n_was) {
        return false;
    }
    for (const std::vector<int32_t> * list : { &image.pos, &image.was }) {
        for (const int32_t pos : *list) {
            if (pos < -1 || pos >= 1 << 26) { return false; }
            x.rotor->reach(pos);
        }
    }
    if (n_was) { // other layers hold the page: it has to be sealed as theirs is
        const uint16_t users = x.users[(size_t) s * l.n_pages + p];
        if (users > (state(s, p) == KVQ_PAGE_SEALED) && memcmp(image.was.data(), sealed_at(s, p), 4 * n_was)) {
            return false;
        }
    }
    waiting = false;
    place(s, p, image);
    return true;
}

bool kvq_lane::restore_page(int s, int p, const uint16_t * rows) {
    kvq_page_image image;
    if (!may_place(s, p) ||
        (!take_image(s, p, rows, false, image) && !(mark_plane() >= 0 && take_image(s, p, rows, true, image)))) {
        return false;
    }
    place(s, p, image);
    return true;
}

// ---------------------------------------------------------------- rows

void kvq_lane::read(int stream, int cell, int n, uint16_t * rows) const {
    const int D = l.codec.head_size, stride = l.head_stride(), W = D * l.n_head;
    std::vector<uint16_t> image((size_t) l.page_cells * D);
    std::vector<uint8_t> codes_copy, params_copy, frame_copy;
    std::vector<uint16_t> page;
    for (int at = cell; at < cell + n;) {
        const int p = at / l.page_cells, end = std::min((p + 1) * l.page_cells, cell + n);
        const kvq_page_info & i = info(stream, p);
        const bool sealed = i.state == KVQ_PAGE_SEALED;
        const uint8_t * c = view<uint8_t>(sealed ? codes_at(stream, p, 0) : nullptr, l.nb_codes * l.n_head, codes_copy);
        const uint8_t * q =
            view<uint8_t>(sealed ? params_at(stream, p, 0) : nullptr, l.nb_params * l.n_head, params_copy);
        const uint16_t * f = view<uint16_t>(i.frame, l.nb_frame, frame_copy);
        if (sealed && x.active()) {
            page.resize((size_t) l.page_cells * W);
            image_page(stream, p, positions_at(stream, p), sealed_at(stream, p), c, q, page.data());
            memcpy(
                rows + (size_t) (at - cell) * W, &page[(size_t) (at % l.page_cells) * W], 2 * (size_t) (end - at) * W);
            at = end;
            continue;
        }
        for (int h = 0; h < l.n_head; h++) {
            if (sealed) { kvq_image_write(l.codec, c + h * l.nb_codes, q + h * l.nb_params, image.data()); }
            for (int c = at; c < end; c++) {
                uint16_t * out = rows + (size_t) (c - cell) * W + (size_t) h * D;
                const int slot = c % l.page_cells;
                if (sealed) {
                    memcpy(out, &image[(size_t) slot * D], 2 * (size_t) D);
                } else if (i.state == KVQ_PAGE_OPEN) {
                    memcpy(out, f + ((size_t) h * l.page_cells + slot) * stride, 2 * (size_t) D);
                } else {
                    memset(out, 0, 2 * (size_t) D);
                }
            }
        }
        at = end;
    }
    if (slots) { slots->read(value, stream, cell, n, rows); }
    if (x.rotor) { kvq_tags_leave(l, *x.rotor, rows, n); }
}

void kvq_lane::restore(int stream, int cell, int n, const uint16_t * rows, int n_threads) {
    waiting = false;
    if (slots) {
        restore_slots(stream, cell, n, rows, n_threads);
        return;
    }
    const int W = l.codec.head_size * l.n_head;
    std::vector<float> f32;
    std::vector<int64_t> idx;
    std::vector<uint16_t> entered;
    if (x.rotor && x.rotor->first()) {
        entered.assign(rows, rows + (size_t) n * W);
        kvq_tags_enter(l, *x.rotor, entered.data(), n);
        rows = entered.data();
    }
    for (int at = cell; at < cell + n;) {
        const int p = at / l.page_cells, end = std::min((p + 1) * l.page_cells, cell + n);
        const uint16_t * from = rows + (size_t) (at - cell) * W;
        if (end - at < l.page_cells || !restore_page(stream, p, from)) {
            f32.resize((size_t) (end - at) * W);
            idx.resize(end - at);
            kvq_cpu_f16_to_f32(from, f32.data(), (int64_t) f32.size());
            for (int i = 0; i < end - at; i++) { idx[i] = (int64_t) stream * l.n_cells + at + i; }
            if (device.is_host()) {
                write(end - at, idx.data(), f32.data(), W, 1);
            } else {
                const size_t nb = 4 * f32.size();
                uint16_t * there = scratch->take(nb);
                device.put(there, f32.data(), nb);
                write(end - at, idx.data(), (const float *) there, W, 1);
                scratch->give(there, nb);
            }
            reach_tags(stream, at, from, end - at);
            if (streams[stream].open.size() > (size_t) l.n_frames + 32) { // bounds the scratch of a long restore
                commit(n_threads);
            }
        }
        at = end;
    }
    commit(n_threads);
}

// Saving and restoring a lane: rows as a state carries them, and blocks as they are.
#include "lane.h"
#include "mark.h"

#include "engine/host.h"
#include "engine/tags.h"
#include "types/types.h"

#include <algorithm>
#include <cstring>

// ---------------------------------------------------------------- blocks

bool kvq_lane::may_place(int s, int p) const {
    return p >= l.n_sink_pages && !l.is_f16() && (info(s, p).state == KVQ_PAGE_SEALED || n_may_seal(s)) &&
        std::all_of(policies.begin(), policies.end(), [&](const kvq_policy * x) { return x->may_place(*this, s, p); });
}

const kvq_policy * kvq_lane::imager() const {
    for (const kvq_policy * x : policies) {
        if (x->has_images(*this)) { return x; }
    }
    return nullptr;
}

bool kvq_lane::blocks_travel() const {
    return !l.is_f16() &&
        std::all_of(policies.begin(), policies.end(), [&](const kvq_policy * x) { return x->blocks_travel(*this); });
}

kvq_page_image kvq_lane::block_of(int s, int p) const {
    kvq_page_image out;
    out.codes.resize(codes_of ? 0 : l.nb_codes * l.n_head);
    out.params.resize(l.nb_params * l.n_head);
    if (!out.codes.empty()) { device.get(out.codes.data(), codes_at(s, p, 0), out.codes.size()); }
    device.get(out.params.data(), params_at(s, p, 0), out.params.size());
    for (const kvq_policy * x : policies) { x->describe(*this, s, p, out); }
    return out;
}

bool kvq_lane::take_image(int s, int p, const uint16_t * rows, bool marked, kvq_page_image & out) const {
    const int D = l.codec.head_size, W = D * l.n_head;
    out.codes.assign(l.nb_codes * l.n_head, 0);
    out.params.assign(l.nb_params * l.n_head, 0);
    if (const kvq_policy * x = imager()) { return x->take_image(*this, s, p, rows, marked, out); }
    std::vector<uint16_t> head((size_t) l.page_cells * D);
    std::vector<uint8_t> codes_copy;
    const uint8_t * adopted = view<uint8_t>(codes_of ? codes_at(s, p, 0) : nullptr, l.nb_codes * l.n_head, codes_copy);
    for (int h = 0; h < l.n_head; h++) {
        for (int t = 0; t < l.page_cells; t++) {
            memcpy(&head[(size_t) t * D], rows + (size_t) t * W + (size_t) h * D, 2 * (size_t) D);
        }
        if (!kvq_image_read(l.codec, head.data(), codes_of ? adopted + h * l.nb_codes : nullptr,
                out.codes.data() + h * l.nb_codes, out.params.data() + h * l.nb_params, marked && !h)) {
            return false;
        }
    }
    if (codes_of) { out.codes.clear(); }
    return true;
}

int kvq_lane::mark_plane() const {
    const kvq_policy * x = imager();
    const size_t nb = l.nb_params + (x ? x->image_bytes(*this) : 0);
    const int plane =
        (x ? x->image_low_bits(*this) : 0) + kvq_image_width((size_t) l.page_cells * l.codec.head_size, nb);
    return plane < KVQ_MARK_PLANES && l.page_cells >= 2 * kvq_mark_rows(l.codec.head_size) ? plane : -1;
}

bool kvq_lane::is_marked_image(int s, int p, const uint16_t * rows) const {
    std::vector<uint16_t> entered(rows, rows + (size_t) l.page_cells * l.codec.head_size * l.n_head);
    for (const kvq_policy * x : policies) { x->enter(*this, entered.data(), l.page_cells); }
    kvq_page_image taken;
    const kvq_page_image is = block_of(s, p);
    return !take_image(s, p, entered.data(), false, taken) && take_image(s, p, entered.data(), true, taken) &&
        taken.codes == is.codes && taken.params == is.params;
}

void kvq_lane::place(int s, int p, const kvq_page_image & image) {
    streams[(size_t) s].restored = true;
    for (kvq_policy * x : policies) { x->placing(*this, s, p, image); }
    reopened.forget(s, p);
    drop_frame(s, p);
    take_block(s, p);
    if (!codes_of && l.nb_codes) { device.put(codes_at(s, p, 0), image.codes.data(), image.codes.size()); }
    device.put(params_at(s, p, 0), image.params.data(), image.params.size());
    kvq_page_info & i = info(s, p);
    streams[s].clock += l.page_cells;
    i.stamp = streams[s].clock;
    i.n_valid = (uint16_t) l.page_cells;
    memset(valid(s, p), 0xff, l.page_cells / 8);
    set_state(s, p, KVQ_PAGE_SEALED);
    counters->n_placed++;
}

bool kvq_lane::place_block(int s, int p, const kvq_page_image & image) {
    if (!may_place(s, p) || image.codes.size() != (codes_of ? 0 : l.nb_codes * l.n_head) ||
        image.params.size() != l.nb_params * l.n_head || (!imager() && image.pos.size() + image.was.size() > 0)) {
        return false;
    }
    for (const kvq_policy * x : policies) {
        if (!x->accepts(*this, s, p, image)) { return false; }
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

int32_t kvq_lane::position_bound() const {
    int32_t bound = 0;
    for (const kvq_policy * x : policies) { bound = std::max(bound, x->position_bound(*this)); }
    return bound;
}

std::string kvq_lane::refuses_position(int32_t pos) const {
    const int32_t bound = position_bound();
    if (!bound || pos < bound) { return ""; }
    return "the saved state has a key at position " + std::to_string(pos) + ", and a cache of " +
        std::to_string(l.n_cells) + " cells takes positions below " + std::to_string(bound) +
        ": the state is damaged, or needs a longer context";
}

std::string kvq_lane::refuses(int n, const uint16_t * rows) const {
    const size_t D = (size_t) l.codec.head_size;
    int32_t most = -1;
    for (int i = 0; i < n && position_bound(); i++) {
        most = std::max(most, kvq_tag_get(l, rows + (size_t) i * D * (size_t) l.n_head, D));
    }
    return refuses_position(most);
}

std::string kvq_lane::refuses(const kvq_page_image & image) const {
    int32_t most = -1;
    for (const std::vector<int32_t> * list : { &image.pos, &image.was }) {
        for (const int32_t pos : *list) { most = std::max(most, pos); }
    }
    return refuses_position(most);
}

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
        if (const kvq_policy * x = sealed ? imager() : nullptr) {
            page.resize((size_t) l.page_cells * W);
            x->write_image(*this, stream, p, c, q, page.data());
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
    for (const kvq_policy * x : policies) { x->save(*this, stream, cell, n, rows); }
}

void kvq_lane::enter_rows(int stream, int64_t n, const int64_t * idx, const uint16_t * rows, int n_threads) {
    const size_t W = (size_t) l.codec.head_size * (size_t) l.n_head, nb = 4 * W * (size_t) l.page_cells;
    std::vector<float> f32((size_t) n * W);
    kvq_cpu_f16_to_f32(rows, f32.data(), (int64_t) f32.size());
    if (device.is_host()) {
        write(n, idx, f32.data(), W, 1);
    } else {
        uint16_t * there = scratch->take(nb);
        device.put(there, f32.data(), 4 * f32.size());
        write(n, idx, (const float *) there, W, 1);
        scratch->give(there, nb);
    }
    for (kvq_policy * x : policies) { x->entered(*this, stream, (int) (idx[0] % l.n_cells), rows, (int) n); }
    streams[(size_t) stream].may_seal_ahead = false;
    streams[(size_t) stream].restored = true;
    const std::vector<int> & open = streams[(size_t) stream].open;
    const auto in_scratch = [&](int p) { return info(stream, p).own < 0; };
    if (l.pooled ? std::count_if(open.begin(), open.end(), in_scratch) > KVQ_RESTORE_PAGES
                 : open.size() > (size_t) l.n_frames + KVQ_RESTORE_PAGES) { // bounds the scratch of a long restore
        commit(n_threads);
    }
}

void kvq_lane::restore(int stream, int cell, int n, const uint16_t * rows, int n_threads) {
    waiting = false;
    for (kvq_policy * x : policies) {
        if (x->load(*this, stream, cell, n, rows, n_threads)) { return; }
    }
    const size_t W = (size_t) l.codec.head_size * (size_t) l.n_head;
    std::vector<int64_t> idx;
    std::vector<uint16_t> copy;
    if (std::any_of(policies.begin(), policies.end(), [&](const kvq_policy * x) { return x->rewrites_rows(*this); })) {
        copy.assign(rows, rows + (size_t) n * W);
        for (const kvq_policy * x : policies) { x->enter(*this, copy.data(), n); }
        rows = copy.data();
    }
    for (int at = cell; at < cell + n;) {
        const int p = at / l.page_cells, end = std::min((p + 1) * l.page_cells, cell + n);
        const uint16_t * from = rows + (size_t) (at - cell) * W;
        if (end - at < l.page_cells || !restore_page(stream, p, from)) {
            idx.resize((size_t) (end - at));
            for (int i = 0; i < end - at; i++) { idx[(size_t) i] = (int64_t) stream * l.n_cells + at + i; }
            enter_rows(stream, end - at, idx.data(), from, n_threads);
        }
        at = end;
    }
    commit(n_threads);
}

// Saving and restoring a lane: rows as a state carries them, and blocks as they are.
#include "lane.h"
#include "mark.h"

#include "base/parallel.h"
#include "engine/host.h"
#include "engine/tags.h"
#include "types/types.h"

#include <algorithm>
#include <cstring>

// ---------------------------------------------------------------- bytes on the host

// Neighbours lie side by side where blocks do not move: they come in one piece.
void kvq_host_pages::fetch(kvq_space & space, const std::vector<piece> & from, bytes & to) {
    size_t nb = 0;
    for (const piece & x : from) { nb += x.nb; }
    to.reset(new uint8_t[nb]);
    std::vector<kvq_copy_job> jobs;
    size_t at = 0;
    for (const piece & x : from) {
        jobs.push_back({ to.get() + at, x.p, x.nb });
        at += x.nb;
    }
    space.get_all(jobs.data(), jobs.size());
}

kvq_host_pages::kvq_host_pages(const kvq_lane & x, int s, int first, int last) : first(first) {
    const kvq_lane_layout & l = x.layout();
    const size_t nb_codes = l.nb_codes * l.n_head, nb_params = l.nb_params * l.n_head;
    std::vector<piece> c, q, f;
    for (int p = first; p <= last; p++) {
        const bool sealed = x.state(s, p) == KVQ_PAGE_SEALED, open = x.state(s, p) == KVQ_PAGE_OPEN;
        at.push_back({ sealed ? x.codes_at(s, p, 0) : nullptr, sealed ? x.params_at(s, p, 0) : nullptr,
            open ? x.info(s, p).frame : nullptr });
        if (sealed) {
            c.push_back({ at.back().codes, nb_codes });
            q.push_back({ at.back().params, nb_params });
        }
        if (open) { f.push_back({ at.back().frame, l.nb_frame }); }
    }
    if (x.device.is_host()) { return; }
    fetch(x.device, c, codes_here);
    fetch(x.device, q, params_here);
    fetch(x.device, f, frames_here);
    size_t n_sealed = 0, n_open = 0;
    for (page & p : at) {
        if (p.params) {
            p.codes = codes_here.get() + nb_codes * n_sealed;
            p.params = params_here.get() + nb_params * n_sealed++;
        }
        if (p.frame) { p.frame = (const uint16_t *) (frames_here.get() + l.nb_frame * n_open++); }
    }
}

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

kvq_page_image kvq_lane::positions_of(int s, int p) const {
    kvq_page_image out;
    for (const kvq_policy * x : policies) { x->describe(*this, s, p, out); }
    return out;
}

kvq_page_image kvq_lane::block_of(int s, int p) const {
    kvq_page_image out = positions_of(s, p);
    out.codes.resize(codes_of ? 0 : l.nb_codes * l.n_head);
    out.params.resize(l.nb_params * l.n_head);
    if (!out.codes.empty()) { device.get(out.codes.data(), codes_at(s, p, 0), out.codes.size()); }
    device.get(out.params.data(), params_at(s, p, 0), out.params.size());
    return out;
}

bool kvq_lane::take_head(
    int h, const uint16_t * rows, bool marked, const uint8_t * adopted, uint8_t * codes, uint8_t * params) const {
    const size_t D = (size_t) l.codec.head_size, W = D * (size_t) l.n_head;
    static thread_local std::vector<uint16_t> head;
    head.resize((size_t) l.page_cells * D);
    for (size_t t = 0; t < (size_t) l.page_cells; t++) { memcpy(&head[t * D], rows + t * W + (size_t) h * D, 2 * D); }
    return kvq_cpu_image_read(l.codec, head.data(), adopted, codes, params, marked && !h);
}

bool kvq_lane::take_image(int s, int p, const uint16_t * rows, bool marked, kvq_page_image & out) const {
    out.codes.assign(l.nb_codes * l.n_head, 0);
    out.params.assign(l.nb_params * l.n_head, 0);
    if (const kvq_policy * x = imager()) { return x->take_image(*this, s, p, rows, marked, out); }
    std::vector<uint8_t> codes_copy;
    const uint8_t * adopted = view<uint8_t>(codes_of ? codes_at(s, p, 0) : nullptr, l.nb_codes * l.n_head, codes_copy);
    for (int h = 0; h < l.n_head; h++) {
        if (!take_head(h, rows, marked, codes_of ? adopted + h * l.nb_codes : nullptr,
                out.codes.data() + h * l.nb_codes, out.params.data() + h * l.nb_params)) {
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

// With a mark it comes back as the same block. Where a channel hardly varies, several codes give its rows: then it
// comes back as another block without a mark, too.
bool kvq_lane::is_marked_image(int s, int p, const uint16_t * bare, const uint16_t * marked) const {
    const kvq_page_image is = block_of(s, p);
    const auto as = [](const kvq_page_image & x, const kvq_page_image & y) {
        return x.codes == y.codes && x.params == y.params;
    };
    kvq_page_image with, without;
    if (imager()) {
        const size_t n = (size_t) l.page_cells * (size_t) (l.codec.head_size * l.n_head);
        std::vector<uint16_t> rows[2] = { { bare, bare + n }, { marked, marked + n } };
        for (const kvq_policy * x : policies) {
            for (auto & entered : rows) { x->enter(*this, entered.data(), l.page_cells); }
        }
        return !take_image(s, p, rows[1].data(), false, without) && take_image(s, p, rows[1].data(), true, with) &&
            (as(with, is) || (take_image(s, p, rows[0].data(), false, without) && !as(without, is)));
    }
    std::vector<uint8_t> copy; // a mark lies in head 0
    const uint8_t * const adopted = view<uint8_t>(codes_of ? codes_at(s, p, 0) : nullptr, l.nb_codes, copy);
    const auto take = [&](const uint16_t * rows, bool of_mark, kvq_page_image & out) {
        out.codes.assign(l.nb_codes, 0);
        out.params.assign(l.nb_params, 0);
        const bool ok = take_head(0, rows, of_mark, adopted, out.codes.data(), out.params.data());
        if (adopted) { out.codes.clear(); }
        return ok;
    };
    kvq_page_image of_head;
    of_head.codes.assign(is.codes.begin(), is.codes.begin() + (adopted ? 0 : (ptrdiff_t) l.nb_codes));
    of_head.params.assign(is.params.begin(), is.params.begin() + (ptrdiff_t) l.nb_params);
    return !take(marked, false, without) && take(marked, true, with) &&
        (as(with, of_head) || (take(bare, false, without) && !as(without, of_head)));
}

void kvq_lane::place(
    int s, int p, const kvq_page_image & image, const uint8_t * codes, const uint8_t * params, kvq_block_puts * later) {
    streams[(size_t) s].restored = true;
    for (kvq_policy * x : policies) { x->placing(*this, s, p, image); }
    reopened.forget(s, p);
    drop_frame(s, p);
    take_block(s, p);
    const auto put = [&](uint8_t * to, const uint8_t * from, size_t nb) {
        if (later && !l.moves && !l.pooled) {
            later->add(to, from, nb);
        } else {
            device.put(to, from, nb);
        }
    };
    if (!codes_of && l.nb_codes) { put(codes_at(s, p, 0), codes, l.nb_codes * l.n_head); }
    put(params_at(s, p, 0), params, l.nb_params * l.n_head);
    kvq_page_info & i = info(s, p);
    streams[s].clock += l.page_cells;
    i.stamp = streams[s].clock;
    i.n_valid = (uint16_t) l.page_cells;
    memset(valid(s, p), 0xff, l.page_cells / 8);
    set_state(s, p, KVQ_PAGE_SEALED);
    counters->n_placed++;
}

void kvq_block_puts::flush() {
    std::sort(waiting.begin(), waiting.end(), [](const auto & a, const auto & b) { return a.to < b.to; });
    space.put_all(waiting.data(), waiting.size(), n_threads);
    waiting.clear();
}

bool kvq_lane::place_block(
    int s, int p, const kvq_page_image & image, const kvq_block_bytes & block, kvq_block_puts * later) {
    if (!may_place(s, p) || block.nb_codes != (codes_of ? 0 : l.nb_codes * l.n_head) ||
        block.nb_params != l.nb_params * l.n_head || (!imager() && image.pos.size() + image.was.size() > 0)) {
        return false;
    }
    for (const kvq_policy * x : policies) {
        if (!x->accepts(*this, s, p, image)) { return false; }
    }
    waiting = false;
    place(s, p, image, block.codes, block.params, later);
    return true;
}

// Either with the bits of a mark or without.
bool kvq_lane::take_any_image(int s, int p, const uint16_t * rows, kvq_page_image & image) const {
    return take_image(s, p, rows, false, image) || (mark_plane() >= 0 && take_image(s, p, rows, true, image));
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

std::string kvq_lane::refuses(int n, const uint16_t * rows, int n_threads) const {
    const size_t D = (size_t) l.codec.head_size;
    std::vector<int32_t> pos(position_bound() ? (size_t) n : 0);
    const auto look = [&](int64_t i) {
        pos[(size_t) i] = kvq_tag_get(l, rows + (size_t) i * D * (size_t) l.n_head, D);
    };
    kvq_parallel_for((int64_t) pos.size(), n_threads, look, 128);
    return pos.empty() ? "" : refuses_position(*std::max_element(pos.begin(), pos.end()));
}

std::string kvq_lane::refuses(const kvq_page_image & image) const {
    int32_t most = -1;
    for (const std::vector<int32_t> * list : { &image.pos, &image.was }) {
        for (const int32_t pos : *list) { most = std::max(most, pos); }
    }
    return refuses_position(most);
}

// Cells [from, to) of page p, rows as a state has them.
void kvq_lane::read_page(int s, int p, const kvq_host_pages::page & page, int from, int to, uint16_t * rows) const {
    const size_t D = (size_t) l.codec.head_size, W = D * (size_t) l.n_head, pc = (size_t) l.page_cells;
    const size_t first = (size_t) from % pc, n = (size_t) (to - from);
    static thread_local std::vector<uint16_t> image;
    if (page.params && imager()) {
        image.resize(pc * W);
        imager()->write_image(*this, s, p, page.codes, page.params, image.data());
        memcpy(rows, &image[first * W], 2 * n * W);
        return;
    }
    image.resize(pc * D);
    for (size_t h = 0; h < (size_t) l.n_head; h++) {
        const uint16_t * of = nullptr;
        size_t stride = D;
        if (page.params) {
            kvq_cpu_image_write(l.codec, page.codes + h * l.nb_codes, page.params + h * l.nb_params, image.data());
            of = image.data();
        } else if (page.frame) {
            stride = (size_t) l.head_stride();
            of = page.frame + h * pc * stride;
        }
        for (size_t t = 0; t < n; t++) {
            uint16_t * out = rows + t * W + h * D;
            if (of) {
                memcpy(out, of + (first + t) * stride, 2 * D);
            } else {
                memset(out, 0, 2 * D);
            }
        }
    }
}

static constexpr size_t NB_READ = 8u << 20;

void kvq_lane::read(int stream, int cell, int n, uint16_t * rows, int n_threads) const {
    const size_t W = (size_t) l.codec.head_size * (size_t) l.n_head;
    const int pc = l.page_cells, end = n > 0 ? (cell + n - 1) / pc + 1 : 0;
    const bool together = !imager() || imager()->images_together(*this);
    // of a device some at a time: what came is then still in the processor's cache when it is written out
    const int most = device.is_host() ? end : std::max(1, (int) (NB_READ / std::max<size_t>(l.nb_frame, 1)));
    for (int first = cell / pc; first < end; first += most) {
        const int last = std::min(first + most, end) - 1;
        const kvq_host_pages pages(*this, stream, first, last);
        kvq_parallel_for(last - first + 1, together ? n_threads : 1, [&](int64_t i) {
            const int p = first + (int) i;
            const int from = std::max(p * pc, cell), to = std::min((p + 1) * pc, cell + n);
            read_page(stream, p, pages.at[(size_t) (p - first)], from, to, rows + (size_t) (from - cell) * W);
        });
    }
    for (const kvq_policy * x : policies) { x->save(*this, stream, cell, n, rows, n_threads); }
}

void kvq_lane::enter_rows(int stream, int64_t n, const int64_t * idx, const uint16_t * rows, int n_threads) {
    const size_t W = (size_t) l.codec.head_size * (size_t) l.n_head;
    const std::vector<uint16_t *> to = open_cells(n, idx);
    if (!device.enter_rows(l, n, to.data(), rows, n_threads)) { // as f32 rows then, so many at a time
        std::vector<float> f32(W * (size_t) l.page_cells);
        uint16_t * there = scratch->take(4 * f32.size());
        for (int64_t i = 0; i < n; i += l.page_cells) {
            const int64_t some = std::min<int64_t>(n - i, l.page_cells);
            kvq_cpu_f16_to_f32(rows + (size_t) i * W, f32.data(), some * (int64_t) W);
            device.put(there, f32.data(), 4 * W * (size_t) some);
            device.write_rows(l, some, to.data() + i, (const float *) there, W, nullptr, n_threads);
        }
        scratch->give(there, 4 * f32.size());
    }
    for (kvq_policy * x : policies) { x->written(*this, n, idx, nullptr, to.data()); }
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

// Which pages of these rows are those of a page without cells: zeros, as read_page gives them. llama.cpp copies whole
// streams that way where it splits a layer's heads. Keys come first, so a page of values goes with theirs. Where all
// pages are zeros they are taken as cells: a layer may have such keys, and codes of no bits give zeros.
std::vector<uint8_t> kvq_lane::find_no_cells(
    int s, int cell, int n, const uint16_t * rows, const kvq_mark_rows_view * v) const {
    const size_t W = (size_t) l.codec.head_size * (size_t) l.n_head;
    const int pc = l.page_cells, first = cell / pc, last = n > 0 ? (cell + n - 1) / pc : first - 1;
    std::vector<uint8_t> found((size_t) (last - first + 1), 0);
    bool has_others = false;
    for (int p = first; p <= last && l.codec.bits > 0; p++) {
        const int from = std::max(p * pc, cell) - cell, to = std::min((p + 1) * pc, cell + n) - cell;
        const uint16_t * page = rows + (size_t) from * W;
        const bool zeros = !(v && v->has_copies(from, to - from)) && page[0] == 0 &&
            !memcmp(page, page + 1, 2 * ((size_t) (to - from) * W - 1));
        has_others = has_others || !zeros;
        found[(size_t) (p - first)] = zeros && to - from == pc && info(s, p).state == KVQ_PAGE_EMPTY &&
            (!value || spans->k_state[(size_t) s * spans->n_pages + p] == KVQ_PAGE_EMPTY);
    }
    if (!has_others) { std::fill(found.begin(), found.end(), 0); }
    return found;
}

void kvq_lane::restore(
    int stream, int cell, int n, const uint16_t * rows, int n_threads, const kvq_mark_rows_view * v) {
    waiting = false;
    for (kvq_policy * x : policies) {
        if (x->load(*this, stream, cell, n, rows, n_threads)) { return; }
    }
    const size_t W = (size_t) l.codec.head_size * (size_t) l.n_head;
    const int pc = l.page_cells, first = cell / pc, last = n > 0 ? (cell + n - 1) / pc : first - 1;
    const std::vector<uint8_t> no_cells = find_no_cells(stream, cell, n, rows, v);
    std::vector<uint16_t> copy;
    if (std::any_of(policies.begin(), policies.end(), [&](const kvq_policy * x) { return x->rewrites_rows(*this); })) {
        copy.assign(rows, rows + (size_t) n * W);
        if (v) { v->put_edited(0, n, copy.data()); }
        for (const kvq_policy * x : policies) { x->enter(*this, copy.data(), n); }
        rows = copy.data();
        v = nullptr;
    }
    struct arriving {
        int from, to; // cells
        const uint16_t * rows;
        std::vector<uint16_t> edited;
        kvq_page_image image;
        bool tried = false, is_image = false;
    };
    std::vector<arriving> pages((size_t) (last - first + 1));
    std::vector<const uint16_t *> whole;
    for (int p = first; p <= last; p++) {
        arriving & x = pages[(size_t) (p - first)];
        x.from = std::max(p * pc, cell);
        x.to = std::min((p + 1) * pc, cell + n);
        x.rows = rows + (size_t) (x.from - cell) * W;
        if (v && v->has_copies(x.from - cell, x.to - x.from)) {
            x.edited.assign(x.rows, x.rows + (size_t) (x.to - x.from) * W);
            v->put_edited(x.from - cell, x.to - x.from, x.edited.data());
            x.rows = x.edited.data();
        }
        x.tried = x.to - x.from == pc && may_place(stream, p) && !no_cells[(size_t) (p - first)];
        if (x.tried) { whole.push_back(x.rows); }
    }
    if (imager()) { imager()->images_come(*this, whole, n_threads); }
    // adopted codes of a device are asked for page by page
    const bool together = imager() ? imager()->images_together(*this) : device.is_host() || !codes_of;
    kvq_parallel_for(last - first + 1, together && whole.size() > 1 ? n_threads : 1, [&](int64_t i) {
        arriving & x = pages[(size_t) i];
        x.is_image = x.tried && take_any_image(stream, first + (int) i, x.rows, x.image);
    });
    kvq_block_puts puts(device, n_threads);
    std::vector<int64_t> idx;
    const auto is_rows = [&](int p) { // a whole page, and no image
        const arriving & x = pages[(size_t) (p - first)];
        return x.to - x.from == pc && !no_cells[(size_t) (p - first)] &&
            (x.tried ? !x.is_image : !may_place(stream, p));
    };
    for (int p = first, next; p <= last; p = next) {
        arriving & x = pages[(size_t) (p - first)];
        next = p + 1;
        if (no_cells[(size_t) (p - first)]) { continue; }
        if (x.to - x.from == pc && may_place(stream, p) &&
            (x.tried ? x.is_image : take_any_image(stream, p, x.rows, x.image))) {
            place(stream, p, x.image, x.image.codes.data(), x.image.params.data(), &puts);
            continue;
        }
        int to = x.to; // such pages go together
        const auto follows = [&](int q) {
            const arriving & y = pages[(size_t) (q - first)];
            return is_rows(q) && y.rows == x.rows + (size_t) (y.from - x.from) * W;
        };
        while (!l.pooled && is_rows(p) && next <= last && next - p < KVQ_ENTER_PAGES && follows(next)) {
            to = pages[(size_t) (next++ - first)].to;
        }
        idx.resize((size_t) (to - x.from));
        for (size_t i = 0; i < idx.size(); i++) { idx[i] = (int64_t) stream * l.n_cells + x.from + (int64_t) i; }
        enter_rows(stream, to - x.from, idx.data(), x.rows, n_threads);
    }
    puts.flush();
    commit(n_threads);
}

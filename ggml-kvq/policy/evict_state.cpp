// Slots in a saved state, which has f16 rows of cells and no room besides. An evicted row is -0 throughout. A kept
// row is its decoded values, whose low mantissa bits hold (types.h, kvq_image_put)
//   u32     page | slot << 20 | generated << 28 | of the prompt << 29
//   bytes   its share of the head's stream, rows in slot order:  parameters of the block, f32 score, i32 rows written
//       between its newest and that of the newest page
// so that a page whose rows are all there is restored as it was. A page that lost cells is written without; its
// values are quantised anew.
#include "evict.h"

#include "engine/host.h"
#include "types/types.h"

#include <algorithm>
#include <cstring>

constexpr int MAX_IMAGE = 8; // mantissa bits
constexpr size_t TAIL = 8;   // score, age
constexpr int MAX_PAGE = (1 << 20) - 1;

// A page as it comes out of a state.
struct kvq_evict::arrival {
    std::vector<int32_t> cells;  // [n_head][page_cells], -1: not seen
    std::vector<uint32_t> heads; // of the rows
    int n = 0;
    bool bad = false; // two rows for one slot
};

static bool all_evicted(const uint16_t * row, size_t D) {
    return std::all_of(row, row + D, [](uint16_t x) { return x == KVQ_EVICTED; });
}

size_t kvq_evict::nb_share(bool value) const {
    return 4 + (lane[value]->layout().nb_params + TAIL + (size_t) page_cells - 1) / (size_t) page_cells;
}

void kvq_evict::read(bool value, int s, int cell, int n, uint16_t * rows, bool image) const {
    const kvq_lane & x = *lane[value];
    const kvq_lane_layout & l = x.layout();
    const size_t D = (size_t) l.codec.head_size, W = D * (size_t) n_head, nb_row = nb_share(value), nb = nb_row - 4;
    for (int c = cell; c < cell + n; c++) {
        const bool open = x.info(s, c / page_cells).state == KVQ_PAGE_OPEN &&
            (x.valid(s, c / page_cells)[c % page_cells / 8] >> c % 8 & 1);
        if (!open && (prompt[(size_t) s * n_pages * page_cells + c] & AWAY)) {
            std::fill_n(rows + (size_t) (c - cell) * W, W, KVQ_EVICTED);
        }
    }
    std::vector<uint16_t> block((size_t) page_cells * D);
    std::vector<uint8_t> stream(nb * (size_t) page_cells), bytes(nb_row), codes_copy, params_copy;
    int64_t last = INT64_MIN; // ages are counted from the newest page: the same after a save and a restore
    for (int i = 0; i < n_store; i++) {
        const slot_page & page = pages[(size_t) s * n_store + i];
        last = page.used ? std::max(last, page.newest) : last;
    }
    for (int i = 0; i < n_store; i++) {
        const slot_page & page = pages[(size_t) s * n_store + i];
        if (!page.used) { continue; }
        const bool whole = image && i <= MAX_PAGE && kvq_image_width(D, nb_row) <= MAX_IMAGE &&
            std::all_of(map(s, i, 0), map(s, i, 0) + n_head * page_cells, [](int32_t c) { return c >= 0; });
        for (int h = 0; h < n_head; h++) {
            const int32_t * m = map(s, i, h);
            if (std::none_of(m, m + page_cells, [&](int32_t c) { return c >= cell && c < cell + n; })) { continue; }
            const uint8_t *codes = x.codes_at(s, i, h), *params = x.params_at(s, i, h);
            if (device) {
                codes_copy.resize(l.nb_codes);
                params_copy.resize(l.nb_params);
                device->get(codes_copy.data(), codes, codes_copy.size());
                device->get(params_copy.data(), params, params_copy.size());
                codes = codes_copy.data();
                params = params_copy.data();
            }
            kvq_traits(l.codec.type)->decode(l.codec, codes, params, block.data());
            const int32_t age = (int32_t) std::min<int64_t>(last - page.newest, INT32_MAX);
            memcpy(stream.data(), params, l.nb_params);
            memcpy(stream.data() + l.nb_params, &page.score, 4);
            memcpy(stream.data() + l.nb_params + 4, &age, 4);
            for (int t = 0; t < page_cells; t++) {
                if (m[t] < cell || m[t] >= cell + n) { continue; }
                uint16_t * row = &block[(size_t) t * D];
                if (whole) {
                    const bool asked = prompt[(size_t) s * n_pages * page_cells + m[t]] & OF_PROMPT;
                    const uint32_t head =
                        (uint32_t) i | (uint32_t) t << 20 | (uint32_t) page.generated << 28 | (uint32_t) asked << 29;
                    memcpy(bytes.data(), &head, 4);
                    memcpy(bytes.data() + 4, stream.data() + (size_t) t * nb, nb);
                    kvq_image_put(D, row, 0, nb_row, bytes.data());
                }
                memcpy(rows + (size_t) (m[t] - cell) * W + (size_t) h * D, row, 2 * D);
            }
        }
    }
}

// Codes and stream of one head from its rows; false: they are no image.
bool kvq_evict::take_block(const kvq_lane & x, const arrival & a, int h, int cell, const uint16_t * rows,
    std::vector<uint8_t> & codes, std::vector<uint8_t> & stream) const {
    const kvq_lane_layout & l = x.layout();
    const size_t D = (size_t) l.codec.head_size, W = D * (size_t) n_head, nb = stream.size() / (size_t) page_cells;
    std::vector<uint16_t> block((size_t) page_cells * D);
    std::vector<uint8_t> bytes(nb + 4);
    for (int t = 0; t < page_cells; t++) {
        memcpy(&block[(size_t) t * D],
            rows + (size_t) (a.cells[(size_t) h * page_cells + t] - cell) * W + (size_t) h * D, 2 * D);
        if (!kvq_image_take(D, &block[(size_t) t * D], 0, bytes.size(), bytes.data())) { return false; }
        memcpy(stream.data() + (size_t) t * nb, bytes.data() + 4, nb);
    }
    return kvq_traits(l.codec.type)
        ->match(
            l.codec, block.data(), { kvq_image_width(D, bytes.size()), false }, nullptr, codes.data(), stream.data());
}

// Values that do not go with their keys: quantised anew into the same page.
void kvq_evict::encode_arrived(int s, int cell, int n, const uint16_t * rows, std::vector<uint8_t> & left) {
    const size_t D = (size_t) lane[1]->layout().codec.head_size, W = D * (size_t) n_head;
    std::vector<uint16_t> block((size_t) page_cells * D);
    for (auto it = arrived.begin(); it != arrived.end();) {
        const int i = it->second;
        const auto here = [&](int32_t c) { return c >= cell && c < cell + n; };
        if (it->first.first != s || std::none_of(map(s, i, 0), map(s, i, 0) + n_head * page_cells, here)) {
            ++it;
            continue;
        }
        for (int h = 0; h < n_head; h++) {
            std::vector<uint8_t> valid((size_t) page_cells / 8, 0);
            std::fill(block.begin(), block.end(), (uint16_t) 0);
            for (int t = 0; t < page_cells; t++) {
                const int32_t c = map(s, i, h)[t];
                if (here(c)) {
                    memcpy(&block[(size_t) t * D], rows + (size_t) (c - cell) * W + (size_t) h * D, 2 * D);
                    valid[(size_t) t / 8] |= (uint8_t) (1 << t % 8);
                    left[(size_t) (c - cell) * n_head + h] = 0;
                }
            }
            encode_rows(true, s, i, h, block, valid.data(), true);
        }
        show(s, i);
        it = arrived.erase(it);
    }
}

void kvq_evict::restore(bool value, int s, int cell, int n, const uint16_t * rows, std::vector<uint8_t> & left) {
    kvq_lane & x = *lane[value];
    const kvq_lane_layout & l = x.layout();
    const size_t D = (size_t) l.codec.head_size, W = D * (size_t) n_head, nb_row = nb_share(value);
    uint8_t * const flags = prompt.data() + (size_t) s * n_pages * page_cells;
    left.assign((size_t) n * n_head, 1);
    std::map<int, arrival> found; // by page in the state
    std::vector<uint8_t> bytes(nb_row);
    if (!value && !keys_arrive[(size_t) s]) { // nothing is left of a state that did not come to its end
        for (auto it = arrived.begin(); it != arrived.end();) {
            if (it->first.first == s) { free_page(s, it->second); }
            it = it->first.first == s ? arrived.erase(it) : std::next(it);
        }
        queue.erase(
            std::remove_if(queue.begin(), queue.end(), [&](const pending & x) { return x.stream == s; }), queue.end());
        restored_at[(size_t) s] = (int64_t) lane[0]->clock(s);
    }
    keys_arrive[(size_t) s] = !value;
    for (int c = cell; !value && c < cell + n; c++) { forget(s, c); }
    forget_all(s);
    reach[(size_t) s] = std::max(reach[(size_t) s], cell + n);
    for (int c = cell; c < cell + n; c++) {
        for (int h = 0; h < n_head; h++) {
            const uint16_t * row = rows + (size_t) (c - cell) * W + (size_t) h * D;
            uint32_t head;
            if (all_evicted(row, D)) {
                left[(size_t) (c - cell) * n_head + h] = 0;
                continue;
            }
            if (kvq_image_width(D, nb_row) > MAX_IMAGE || !kvq_image_take(D, row, 0, nb_row, bytes.data())) {
                continue;
            }
            memcpy(&head, bytes.data(), 4);
            const int t = (int) (head >> 20 & 255);
            if (t >= page_cells || head >> 30) { continue; }
            arrival & a = found[(int) (head & MAX_PAGE)];
            a.cells.resize((size_t) n_head * page_cells, -1);
            a.heads.resize(a.cells.size());
            int32_t & at = a.cells[(size_t) h * page_cells + t];
            a.bad |= at >= 0;
            a.n++;
            at = c;
            a.heads[(size_t) h * page_cells + t] = head;
        }
    }
    std::vector<uint8_t> codes(l.nb_codes * (size_t) n_head), params(l.nb_params * (size_t) n_head), one(l.nb_codes),
        stream((nb_row - 4) * (size_t) page_cells);
    for (const auto & f : found) {
        const arrival & a = f.second;
        const auto known = arrived.find({ s, f.first });
        int i = value && known != arrived.end() ? known->second : -1;
        if (a.bad || a.n != n_head * page_cells ||
            (value && (i < 0 || !std::equal(a.cells.begin(), a.cells.end(), map(s, i, 0))))) {
            continue;
        }
        bool ok = true;
        for (int h = 0; ok && h < n_head; h++) {
            ok = take_block(x, a, h, cell, rows, one, stream);
            memcpy(&codes[l.nb_codes * (size_t) h], one.data(), l.nb_codes);
            memcpy(&params[l.nb_params * (size_t) h], stream.data(), l.nb_params);
        }
        for (int j = 0; !value && ok && i < 0 && j < n_store; j++) { i = page(s, j).used ? -1 : j; }
        if (!ok || i < 0) { continue; }
        x.device.put(x.codes_at(s, i, 0), codes.data(), codes.size());
        x.device.put(x.params_at(s, i, 0), params.data(), params.size());
        for (int h = 0; h < n_head; h++) {
            for (int t = 0; t < page_cells; t++) {
                left[(size_t) (a.cells[(size_t) h * page_cells + t] - cell) * n_head + h] = 0;
            }
        }
        if (value) {
            show(s, i);
            arrived.erase(known);
            continue;
        }
        slot_page & p = page(s, i);
        int32_t age;
        memcpy(&p.score, stream.data() + l.nb_params, 4);
        memcpy(&age, stream.data() + l.nb_params + 4, 4);
        p.used = true;
        p.generated = a.heads[0] >> 28 & 1;
        p.newest = restored_at[(size_t) s] - std::max(age, 0);
        top[(size_t) s] = std::max(top[(size_t) s], p.generated ? 0 : p.newest);
        set_map(s, i, a.cells.data());
        put_map(s, i);
        for (size_t j = 0; j < a.cells.size(); j++) {
            flags[a.cells[j]] |= (uint8_t) (PARTLY | (a.heads[j] >> 29 & 1 ? OF_PROMPT : 0));
        }
        arrived[{ s, f.first }] = i;
    }
    if (value) { encode_arrived(s, cell, n, rows, left); }
    for (int c = cell; c < cell + n; c++) {
        const uint8_t * of = &left[(size_t) (c - cell) * n_head];
        if (std::any_of(of, of + n_head, [](uint8_t x) { return x; })) { continue; }
        if (!value) { // no frame has it; evicted by all heads: of a prompt
            flags[c] = (uint8_t) (flags[c] & PARTLY ? (flags[c] & OF_PROMPT) | AWAY : OF_PROMPT | AWAY);
        }
        uint8_t & bits = x.valid(s, c / page_cells)[c % page_cells / 8];
        x.info(s, c / page_cells).n_valid = (uint16_t) (x.info(s, c / page_cells).n_valid - (bits >> c % 8 & 1));
        bits &= (uint8_t) ~(1 << c % 8);
    }
}

// What restore() left goes into frames, a page at a time.
bool kvq_evict::load(kvq_lane & x, int s, int cell, int n, const uint16_t * rows, int n_threads) {
    const bool value = x.is_value();
    const size_t D = (size_t) x.layout().codec.head_size, W = D * (size_t) n_head;
    std::vector<uint8_t> left;
    restore(value, s, cell, n, rows, left);
    if (!value) { restoring(true); }
    entering_left = left.data();
    entering_first = cell;
    std::vector<uint16_t> some;
    for (int c = cell; c < cell + n; c++) {
        const uint8_t * of = &left[(size_t) (c - cell) * n_head];
        if (std::any_of(of, of + n_head, [](uint8_t held) { return held; })) {
            some.insert(some.end(), rows + (size_t) (c - cell) * W, rows + (size_t) (c - cell + 1) * W);
            for (int h = 0; h < n_head; h++) {
                if (!of[h]) { std::fill_n(some.end() - (long) (W - D * (size_t) h), D, KVQ_EVICTED); }
            }
            entering.push_back((int64_t) s * x.layout().n_cells + c);
        }
        if (!entering.empty() && ((c + 1) % page_cells == 0 || c + 1 == cell + n)) {
            x.enter_rows(s, (int64_t) entering.size(), entering.data(), some.data(), n_threads);
            entering.clear();
            some.clear();
        }
    }
    entering_left = nullptr;
    x.commit(n_threads);
    if (!value) { restoring(false); }
    return true;
}

void kvq_evict::entered(kvq_lane & x, int s, int, const uint16_t *, int) {
    for (const int64_t at : entering) {
        const int cell = (int) (at % x.layout().n_cells);
        if (!x.is_value()) { note_absent(s, cell, &entering_left[(size_t) (cell - entering_first) * n_head]); }
    }
}

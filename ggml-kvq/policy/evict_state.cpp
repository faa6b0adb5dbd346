// Slots in a saved state, which has f16 rows of cells and no room besides. An evicted row is -0 throughout. A kept
// row is its decoded values, whose low mantissa bits hold (types.h, kvq_image_put)
//   u32     page | slot << 20 | generated << 28 | of the prompt << 29
//   bytes   its share of the head's stream, rows in slot order:  parameters of the block, f32 score, i32 rows written
//       between its newest and that of the newest page
// so that a page whose rows are all there is restored as it was. Keys of a page that lost cells hold
//   u32     the same | 1 << 30 | its key is a salient one << 31
//   u8      byte slot % 8 of the score and the age
//   u32     CRC-32 of these, the row and the number of slots of a page
// The page is restored with the same cells in the same slots, and its rows are quantised anew: packing them otherwise
// could fill more pages than there are. Where the page has no place they go into frames like rows of other caches.
#include "evict.h"

#include "engine/host.h"
#include "base/constants.h"
#include "base/parallel.h"
#include "store/state_blocks.h"
#include "types/types.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>

constexpr int MAX_IMAGE = 8; // mantissa bits
constexpr size_t TAIL = 8;   // score, age
constexpr int MAX_PAGE = (1 << 20) - 1;
constexpr size_t NB_HOLED = 9; // bytes that a key of a page with empty slots carries
constexpr uint32_t HOLED = 1u << 30, SALIENT = 1u << 31;

// A page as it comes out of a state. Its cells may lie apart: then its rows come in several calls, of keys and later of
// values.
struct kvq_evict::arrival {
    std::vector<int32_t> cells;  // [n_head][page_cells], -1: not seen
    std::vector<uint32_t> heads; // of the rows
    int n = 0, n_values = 0;     // rows that are here
    bool bad = false;            // two rows for one slot
    // a page that lost cells: its score and its age, as far as rows tell them
    bool holed = false;
    uint8_t tail[TAIL] = {}, known = 0;
    std::vector<uint16_t> rows[2]; // of keys, of values that are quantised anew: [n_head][page_cells][head size]

    uint32_t first_head() const { // of any row: they agree on what is said of the page
        const auto held = std::find_if(cells.begin(), cells.end(), [](int32_t c) { return c >= 0; });
        return heads[(size_t) (held - cells.begin())];
    }

    bool join(const arrival & a) { // more of it; false: a slot has two rows
        for (size_t j = 0; j < cells.size(); j++) {
            if (cells[j] >= 0 && a.cells[j] >= 0) { return false; }
        }
        for (size_t j = 0; j < cells.size(); j++) {
            if (a.cells[j] < 0) { continue; }
            cells[j] = a.cells[j];
            heads[j] = a.heads[j];
        }
        for (size_t t = 0; t < TAIL; t++) { tail[t] = a.known >> t & 1 ? a.tail[t] : tail[t]; }
        known |= a.known;
        n += a.n;
        return true;
    }

    // its rows of this call: of cells from `cell` on, W apart
    void keep(bool value, size_t D, size_t W, int n_head, int cell, int n_cells, const uint16_t * from, int32_t * map) {
        const size_t page_cells = cells.size() / (size_t) n_head;
        rows[value].resize(cells.size() * D, 0);
        for (size_t j = 0; j < cells.size(); j++) {
            if (map[j] < cell || map[j] >= cell + n_cells) { continue; }
            memcpy(&rows[value][j * D], from + (size_t) (map[j] - cell) * W + j / page_cells * D, 2 * D);
        }
    }
};

static uint32_t sum_of(const uint16_t * row, size_t D, int page_cells, const uint8_t * bytes) {
    std::vector<uint16_t> bare(row, row + D);
    const int low = (1 << kvq_image_width(D, NB_HOLED)) - 1;
    for (uint16_t & x : bare) { x = (uint16_t) (x & ~low); }
    return kvq_crc32(kvq_crc32((uint32_t) page_cells, bytes, NB_HOLED - 4), bare.data(), 2 * D);
}

static void put_holed(uint16_t * row, size_t D, int page_cells, uint32_t head, uint8_t of_tail) {
    uint8_t bytes[NB_HOLED];
    memcpy(bytes, &head, 4);
    bytes[4] = of_tail;
    const uint32_t sum = sum_of(row, D, page_cells, bytes);
    memcpy(bytes + 5, &sum, 4);
    kvq_image_put(D, row, 0, NB_HOLED, bytes);
}

static bool take_holed(const uint16_t * row, size_t D, int page_cells, uint32_t & head, uint8_t & of_tail) {
    uint8_t bytes[NB_HOLED];
    uint32_t sum;
    if (kvq_image_width(D, NB_HOLED) > MAX_IMAGE || !kvq_image_take(D, row, 0, NB_HOLED, bytes)) { return false; }
    memcpy(&head, bytes, 4);
    memcpy(&sum, bytes + 5, 4);
    of_tail = bytes[4];
    return head & HOLED && sum == sum_of(row, D, page_cells, bytes);
}

static bool all_evicted(const uint16_t * row, size_t D) {
    return std::all_of(row, row + D, [](uint16_t x) { return x == KVQ_EVICTED; });
}

size_t kvq_evict::nb_share(bool value) const {
    return 4 + (lane[value]->layout().nb_params + TAIL + (size_t) page_cells - 1) / (size_t) page_cells;
}

void kvq_evict::read(bool value, int s, int cell, int n, uint16_t * rows, bool image, int n_threads) const {
    const kvq_lane & x = *lane[value];
    const kvq_lane_layout & l = x.layout();
    const size_t D = (size_t) l.codec.head_size, W = D * (size_t) n_head;
    const auto blank = [&](int64_t i) {
        const int c = cell + (int) i;
        uint16_t * const row = rows + (size_t) i * W;
        const bool open = x.info(s, c / page_cells).state == KVQ_PAGE_OPEN &&
            (x.valid(s, c / page_cells)[c % page_cells / 8] >> c % 8 & 1);
        if (!open && (prompt[(size_t) s * n_pages * page_cells + c] & AWAY)) { std::fill_n(row, W, KVQ_EVICTED); }
        for (int h = 0; open && h < n_head; h++) {
            if (is_evicted(s, c / page_cells, h, c % page_cells)) { std::fill_n(row + D * (size_t) h, D, KVQ_EVICTED); }
        }
    };
    kvq_parallel_for(n, n_threads, blank, 64);
    int64_t last = INT64_MIN; // ages are counted from the newest page: the same after a save and a restore
    struct block {
        int page, head;
    };
    std::vector<block> blocks;
    for (int i = 0; i < n_store; i++) {
        const slot_page & page = pages[(size_t) s * n_store + i];
        last = page.used ? std::max(last, page.newest) : last;
        for (int h = 0; page.used && page.lo < cell + n && page.hi >= cell && h < n_head; h++) {
            const int32_t * m = map(s, i, h);
            if (std::any_of(m, m + page_cells, [&](int32_t c) { return c >= cell && c < cell + n; })) {
                blocks.push_back({ i, h });
            }
        }
    }
    if (blocks.empty()) { return; }
    const size_t n_blocks = (size_t) (blocks.back().page + 1) * (size_t) n_head; // pages of slots lie side by side
    std::unique_ptr<uint8_t[]> copies[2];
    const auto here = [&](const uint8_t * from, size_t nb, std::unique_ptr<uint8_t[]> & copy) {
        if (x.device.is_host()) { return from; }
        copy.reset(new uint8_t[nb]);
        x.device.get(copy.get(), from, nb);
        return (const uint8_t *) copy.get();
    };
    const uint8_t * const codes = here(x.codes_at(s, 0, 0), n_blocks * l.nb_codes, copies[0]);
    const uint8_t * const params = here(x.params_at(s, 0, 0), n_blocks * l.nb_params, copies[1]);
    const auto read = [&](int64_t i) {
        const size_t b = (size_t) i;
        const size_t at = (size_t) blocks[b].page * (size_t) n_head + (size_t) blocks[b].head;
        read_block(value, s, blocks[b].page, blocks[b].head, cell, n, rows, image, last, codes + at * l.nb_codes,
            params + at * l.nb_params);
    };
    kvq_parallel_for((int64_t) blocks.size(), n_threads, read, 4);
}

// Rows of the block of head h in page i of slots, where their cells lie.
void kvq_evict::read_block(bool value, int s, int i, int h, int cell, int n, uint16_t * rows, bool image, int64_t last,
    const uint8_t * codes, const uint8_t * params) const {
    const kvq_lane_layout & l = lane[value]->layout();
    const size_t D = (size_t) l.codec.head_size, W = D * (size_t) n_head, nb_row = nb_share(value), nb = nb_row - 4;
    const slot_page & page = pages[(size_t) s * n_store + i];
    const int32_t *const m = map(s, i, h), *const all = map(s, i, 0);
    const bool full = std::all_of(all, all + n_head * page_cells, [](int32_t c) { return c >= 0; });
    const bool whole = full && image && i <= MAX_PAGE && kvq_image_width(D, nb_row) <= MAX_IMAGE,
               holed = !full && !value && image && i <= MAX_PAGE && kvq_image_width(D, NB_HOLED) <= MAX_IMAGE;
    static thread_local std::vector<uint16_t> block;
    static thread_local std::vector<uint8_t> stream, bytes;
    block.resize((size_t) page_cells * D);
    stream.assign(nb * (size_t) page_cells, 0);
    bytes.resize(nb_row);
    kvq_cpu_decode(l.codec, codes, params, block.data());
    const int32_t age = (int32_t) std::min<int64_t>(last - page.newest, INT32_MAX);
    memcpy(stream.data(), params, l.nb_params);
    memcpy(stream.data() + l.nb_params, &page.score, 4);
    memcpy(stream.data() + l.nb_params + 4, &age, 4);
    for (int t = 0; t < page_cells; t++) {
        if (m[t] < cell || m[t] >= cell + n) { continue; }
        uint16_t * row = &block[(size_t) t * D];
        const bool asked = prompt[(size_t) s * n_pages * page_cells + m[t]] & OF_PROMPT;
        const uint32_t head =
            (uint32_t) i | (uint32_t) t << 20 | (uint32_t) page.generated << 28 | (uint32_t) asked << 29;
        if (holed) {
            const bool salient = l.codec.type == KVQ_TYPE_MIXED && params[t / 8] >> t % 8 & 1;
            put_holed(
                row, D, page_cells, head | HOLED | (salient ? SALIENT : 0), stream[l.nb_params + (size_t) t % TAIL]);
        }
        if (whole) {
            memcpy(bytes.data(), &head, 4);
            memcpy(bytes.data() + 4, stream.data() + (size_t) t * nb, nb);
            kvq_image_put(D, row, 0, nb_row, bytes.data());
        }
        memcpy(rows + (size_t) (m[t] - cell) * W + (size_t) h * D, row, 2 * D);
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
    return kvq_cpu_match(
        l.codec, block.data(), { kvq_image_width(D, bytes.size()), false }, nullptr, codes.data(), stream.data());
}

// Blocks of a page whose rows are all there.
struct kvq_evict::taken_page {
    const arrival * rows;
    bool ok;
    std::vector<uint8_t> codes, params;
    uint8_t tail[TAIL];
};

void kvq_evict::take_blocks(const kvq_lane & x, int cell, const uint16_t * rows, taken_page & out) const {
    const kvq_lane_layout & l = x.layout();
    const arrival & a = *out.rows;
    out.ok = !a.bad && !a.holed && a.n == n_head * page_cells;
    if (!out.ok) { return; }
    out.codes.resize(l.nb_codes * (size_t) n_head);
    out.params.resize(l.nb_params * (size_t) n_head);
    std::vector<uint8_t> codes(l.nb_codes), stream((nb_share(x.is_value()) - 4) * (size_t) page_cells);
    for (int h = 0; out.ok && h < n_head; h++) {
        out.ok = take_block(x, a, h, cell, rows, codes, stream);
        memcpy(&out.codes[l.nb_codes * (size_t) h], codes.data(), l.nb_codes);
        memcpy(&out.params[l.nb_params * (size_t) h], stream.data(), l.nb_params);
    }
    memcpy(out.tail, stream.data() + l.nb_params, TAIL);
}

// Keys of a page that lost cells, quantised anew into the same slots.
void kvq_evict::encode_holed(int s, int i, const arrival & a) {
    kvq_lane & x = *lane[0];
    const kvq_lane_layout & l = x.layout();
    const size_t D = (size_t) l.codec.head_size, nb_block = (size_t) page_cells * D, nb_set = (size_t) page_cells / 8;
    std::vector<uint8_t> valid(nb_set), set(nb_set);
    for (int h = 0; h < n_head; h++) {
        const auto first = a.rows[0].begin() + (long) (nb_block * (size_t) h);
        const std::vector<uint16_t> block(first, first + (long) nb_block);
        std::fill(valid.begin(), valid.end(), (uint8_t) 0);
        std::fill(set.begin(), set.end(), (uint8_t) 0);
        int n_salient = 0;
        for (int t = 0; t < page_cells; t++) {
            const size_t j = (size_t) h * page_cells + t;
            if (a.cells[j] < 0) { continue; }
            valid[(size_t) t / 8] |= (uint8_t) (1 << t % 8);
            if (a.heads[j] & SALIENT && n_salient < l.codec.n_hi) {
                set[(size_t) t / 8] |= (uint8_t) (1 << t % 8);
                n_salient++;
            }
        }
        if (l.codec.type == KVQ_TYPE_MIXED) { // as many as the block has: cells before empty slots
            for (const bool held : { true, false }) {
                for (int t = 0; t < page_cells && n_salient < l.codec.n_hi; t++) {
                    const uint8_t bit = (uint8_t) (1 << t % 8);
                    if (bool(valid[(size_t) t / 8] & bit) != held || set[(size_t) t / 8] & bit) { continue; }
                    set[(size_t) t / 8] |= bit;
                    n_salient++;
                }
            }
            x.device.put(x.params_at(s, i, h), set.data(), nb_set);
        }
        encode_rows(false, s, i, h, block, valid.data());
    }
}

// Values that do not go with their keys: quantised anew into the same page, once all of them are here.
void kvq_evict::encode_arrived(int s, int cell, int n, const uint16_t * rows, std::vector<uint8_t> & left) {
    kvq_lane & x = *lane[1];
    const kvq_lane_layout & l = x.layout();
    const size_t D = (size_t) l.codec.head_size, W = D * (size_t) n_head, nb_block = (size_t) page_cells * D;
    for (auto it = arrived.begin(); it != arrived.end();) {
        const int i = it->second.page;
        arrival & a = *it->second.rows;
        int32_t *const m = map(s, i, 0), *const end = m + n_head * page_cells;
        const auto here = [&](int32_t c) { return c >= cell && c < cell + n; };
        const int n_here = it->first.first == s ? (int) std::count_if(m, end, here) : 0;
        if (n_here) { a.keep(true, D, W, n_head, cell, n, rows, m); }
        for (int j = 0; n_here && j < n_head * page_cells; j++) {
            if (here(m[j])) { left[(size_t) (m[j] - cell) * n_head + (size_t) (j / page_cells)] = 0; }
        }
        a.n_values += n_here;
        if (!n_here || a.n_values < end - m - std::count(m, end, -1)) {
            ++it;
            continue;
        }
        for (int h = 0; h < n_head; h++) {
            std::vector<uint8_t> valid((size_t) page_cells / 8, 0);
            for (int t = 0; t < page_cells; t++) {
                valid[(size_t) t / 8] |= (uint8_t) ((m[h * page_cells + t] >= 0) << t % 8);
            }
            if (l.codec.type == KVQ_TYPE_MIXED) { // the set of its keys
                x.device.copy(x.params_at(s, i, h), lane[0]->params_at(s, i, h), (size_t) page_cells / 8);
            }
            const auto first = a.rows[1].begin() + (long) (nb_block * (size_t) h);
            encode_rows(true, s, i, h, { first, first + (long) nb_block }, valid.data());
        }
        x.counters->n_placed++;
        show(s, i);
        it = arrived.erase(it);
    }
}

// What the row of one head says of its place in a page of slots.
struct kvq_evict::said {
    enum { NOTHING, EVICTED, HELD, IN_HOLED } what = NOTHING;
    uint8_t of_tail = 0;
    uint32_t head = 0;
};

kvq_evict::said kvq_evict::said_by(bool value, const uint16_t * row, size_t D, size_t nb_row) const {
    said x;
    uint8_t bytes[KVQ_MAX_HEAD];
    if (all_evicted(row, D)) {
        x.what = said::EVICTED;
    } else if (!value && take_holed(row, D, page_cells, x.head, x.of_tail)) {
        x.what = said::IN_HOLED;
    } else if (kvq_image_width(D, nb_row) <= MAX_IMAGE && kvq_image_take(D, row, 0, nb_row, bytes)) {
        x.what = said::HELD;
        memcpy(&x.head, bytes, 4);
    }
    return x;
}

// Pages that rows belong to, by their number in the state; left: 0 for evicted rows.
std::map<int, kvq_evict::arrival> kvq_evict::pages_in(
    bool value, int cell, int n, const uint16_t * rows, std::vector<uint8_t> & left, int n_threads) const {
    const size_t D = (size_t) lane[value]->layout().codec.head_size, nb_row = nb_share(value);
    std::vector<said> of_rows((size_t) n * (size_t) n_head);
    const auto hear = [&](int64_t i) { of_rows[(size_t) i] = said_by(value, rows + (size_t) i * D, D, nb_row); };
    kvq_parallel_for((int64_t) of_rows.size(), n_threads, hear, 64);
    std::map<int, arrival> found;
    std::vector<arrival *> of_page[2]; // whole pages, pages that lost cells
    for (size_t i = 0; i < of_rows.size(); i++) {
        said & x = of_rows[i];
        if (x.what == said::EVICTED) { left[i] = 0; }
        const bool holed = x.what == said::IN_HOLED;
        const size_t j = x.head & MAX_PAGE, t = x.head >> 20 & 255;
        if ((x.what != said::HELD && !holed) || t >= (size_t) page_cells || (!holed && x.head >> 30)) {
            x.what = said::NOTHING;
            continue;
        }
        if (of_page[holed].size() <= j) { of_page[holed].resize(j + 1); }
        arrival *& a = of_page[holed][j];
        if (!a) {
            a = &found[holed ? -1 - (int) j : (int) j];
            a->holed = holed;
            a->cells.resize((size_t) n_head * page_cells, -1);
            a->heads.resize(a->cells.size());
        }
        if (holed) {
            a->tail[t % TAIL] = x.of_tail;
            a->known |= (uint8_t) (1 << t % TAIL);
        }
        a->n++;
    }
    std::atomic<bool> twice{ false };
    kvq_parallel_for(n_head, n_threads, [&](int64_t h) { // heads have slots of their own
        for (int c = cell; c < cell + n; c++) {
            const said & x = of_rows[(size_t) (c - cell) * (size_t) n_head + (size_t) h];
            if (x.what != said::HELD && x.what != said::IN_HOLED) { continue; }
            arrival & a = *of_page[x.what == said::IN_HOLED][x.head & MAX_PAGE];
            const size_t at = (size_t) h * (size_t) page_cells + (x.head >> 20 & 255);
            if (a.cells[at] >= 0) { twice = true; }
            a.cells[at] = c;
            a.heads[at] = x.head;
        }
    });
    for (auto & x : found) { // as many slots as rows, unless two rows were for one
        arrival & a = x.second;
        const auto held = [](int32_t c) { return c >= 0; };
        a.bad = twice && std::count_if(a.cells.begin(), a.cells.end(), held) != a.n;
    }
    return found;
}

void kvq_evict::restore(
    bool value, int s, int cell, int n, const uint16_t * rows, std::vector<uint8_t> & left, int n_threads) {
    kvq_lane & x = *lane[value];
    const kvq_lane_layout & l = x.layout();
    const size_t D = (size_t) l.codec.head_size, W = D * (size_t) n_head;
    uint8_t * const flags = prompt.data() + (size_t) s * n_pages * page_cells;
    left.assign((size_t) n * n_head, 1);
    if (!value && !keys_arrive[(size_t) s]) { // a state that was not read to its end leaves no keys
        for (auto it = arrived.begin(); it != arrived.end();) {
            if (it->first.first == s) { free_page(s, it->second.page); }
            it = it->first.first == s ? arrived.erase(it) : std::next(it);
        }
        queue.erase(
            std::remove_if(queue.begin(), queue.end(), [&](const pending & x) { return x.stream == s; }), queue.end());
        restored_at[(size_t) s] = (int64_t) lane[0]->clock(s);
    }
    keys_arrive[(size_t) s] = !value;
    for (int c = cell; !value && c < cell + n; c++) { forget(s, c); }
    forget_all(s);
    written_end[(size_t) s] = std::max(written_end[(size_t) s], cell + n);
    const std::map<int, arrival> found = pages_in(value, cell, n, rows, left, n_threads);
    std::vector<taken_page> taken;
    for (const auto & f : found) { taken.push_back({ &f.second, false, {}, {}, {} }); }
    const auto take = [&](int64_t j) { take_blocks(x, cell, rows, taken[(size_t) j]); };
    kvq_parallel_for((int64_t) taken.size(), n_threads, take);
    kvq_block_puts puts(x.device, n_threads), map_puts(x.device, n_threads); // pages of slots lie side by side
    size_t next = 0;
    for (const auto & f : found) {
        const arrival & a = f.second;
        const taken_page & blocks = taken[next++];
        const auto known = arrived.find({ s, f.first });
        const auto of = known == arrived.end() ? nullptr : known->second.rows; // its keys, or some of them
        int i = of ? known->second.page : -1;
        if (a.bad || (!a.holed && a.n != n_head * page_cells)) { continue; }
        if (value && !(of && std::equal(a.cells.begin(), a.cells.end(), map(s, i, 0)))) { continue; }
        if (!value && of && !of->join(a)) { continue; }
        const bool ok = a.holed || blocks.ok;
        for (int j = 0; !value && ok && i < 0 && j < n_store; j++) { i = page(s, j).used ? -1 : j; }
        if (!ok || i < 0) { continue; }
        if (!a.holed) {
            puts.add(x.codes_at(s, i, 0), blocks.codes.data(), blocks.codes.size());
            puts.add(x.params_at(s, i, 0), blocks.params.data(), blocks.params.size());
        }
        for (int h = 0; h < n_head; h++) {
            for (int t = 0; t < page_cells; t++) {
                const int32_t c = a.cells[(size_t) h * page_cells + t];
                if (c >= 0) { left[(size_t) (c - cell) * n_head + h] = 0; }
            }
        }
        x.counters->n_placed += !of || value;
        if (value) {
            show(s, i);
            arrived.erase(known);
            continue;
        }
        const auto all = of ? of : std::make_shared<arrival>(a);
        slot_page & p = page(s, i);
        const uint8_t * tail = a.holed ? all->tail : blocks.tail;
        int32_t age = 0;
        if (!a.holed || (all->known & 0x0f) == 0x0f) { memcpy(&p.score, tail, 4); }
        if (!std::isfinite(p.score)) { p.score = 0.0f; } // pages are sorted by it
        if (!a.holed || (all->known & 0xf0) == 0xf0) { memcpy(&age, tail + 4, 4); }
        p.used = true;
        p.generated = a.first_head() >> 28 & 1;
        p.newest = restored_at[(size_t) s] - std::max(age, 0);
        top[(size_t) s] = std::max(top[(size_t) s], p.generated ? 0 : p.newest);
        set_map(s, i, all->cells.data());
        if (maps_there != maps.data()) {
            const size_t at = (size_t) (map(s, i, 0) - maps.data());
            map_puts.add((uint8_t *) (maps_there + at), (const uint8_t *) map(s, i, 0), 4 * all->cells.size());
        }
        for (size_t j = 0; j < a.cells.size(); j++) {
            if (a.cells[j] < 0) { continue; }
            flags[a.cells[j]] |= (uint8_t) (PARTLY | (a.heads[j] >> 29 & 1 ? OF_PROMPT : 0));
        }
        if (a.holed) {
            all->keep(false, D, W, n_head, cell, n, rows, all->cells.data());
            encode_holed(s, i, *all);
        }
        arrived[{ s, f.first }] = { i, all };
    }
    puts.flush();
    map_puts.flush();
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
    restore(value, s, cell, n, rows, left, n_threads);
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

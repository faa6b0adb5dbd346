#include "state_blocks.h"

#include "small_rows.h"

#include "base/parallel.h"
#include "engine/host.h"
#include "engine/tags.h"
#include "types/types.h"

#include <algorithm>
#include <cstring>
#include <memory>

namespace {

constexpr uint64_t MAGIC = 0x31534b434f4c4251; // "QBLOCKS1"
enum : int32_t { SHARED = 1, POSITIONS = 2, SEALED_AT = 4, LEFT_OUT = 8, BESIDE = 16 };

struct lane_head {
    kvq_codec codec;
    int32_t n_head, flags, lead, n_pages;
};

template <typename T> void put(std::vector<uint8_t> & out, const T * x, size_t n) {
    out.insert(out.end(), (const uint8_t *) x, (const uint8_t *) (x + n));
}

struct reader {
    const uint8_t *p, *end;
    template <typename T> bool get(T * out, size_t n) {
        if (n * sizeof(T) > (size_t) (end - p)) { return false; }
        if (n) { memcpy(out, p, n * sizeof(T)); }
        p += n * sizeof(T);
        return true;
    }
    const uint8_t * skip(size_t nb) { // NULL: there are not so many
        const uint8_t * at = p;
        if (nb > (size_t) (end - p)) { return nullptr; }
        p += nb;
        return at;
    }
};

int width_of(const kvq_lane & lane) { return lane.layout().n_head * lane.layout().codec.head_size; }

// What stands in front of a page: a block, or rows, of 16 bits or of fewer (store/small_rows.h).
enum : uint32_t { ROWS = 0, BLOCK = 1, SMALL_ROWS = 2 }; // SMALL_ROWS | bits << 8

// One page as it came, in the bytes that hold it: a block, or rows of its cells [from, to).
struct page {
    bool block = false;
    int bits = 0; // of small rows, 0: f16
    kvq_block_bytes bytes = {};
    kvq_page_image image; // positions
    const uint8_t * rows = nullptr;
    const uint8_t * pos = nullptr; // of small rows that have positions
    int from = 0, to = 0;
};

struct section {
    lane_head head;
    std::vector<page> pages;
};

bool read_section(reader & r, int n_rows, section & out) {
    lane_head & h = out.head;
    if (!r.get(&h, 1) || h.n_head < 1 || h.n_head > 4096 || h.codec.head_size < 1 || h.codec.head_size > 65536 ||
        h.codec.n_cells < 1 || h.codec.n_cells > 4096 || h.lead < 0 || h.lead >= h.codec.n_cells ||
        h.n_pages != (h.lead + n_rows + h.codec.n_cells - 1) / h.codec.n_cells) {
        return false;
    }
    const kvq_type_traits * type = kvq_traits(h.codec.type);
    if (!type || type->refuse(h.codec)) { return false; }
    const size_t heads = (size_t) h.n_head, pc = (size_t) h.codec.n_cells;
    const size_t nb_codes = h.flags & SHARED ? 0 : heads * type->nb_codes(h.codec),
                 nb_params = heads * type->nb_params(h.codec);
    for (int i = 0; i < h.n_pages; i++) {
        page p;
        uint32_t what;
        p.from = std::max(i * h.codec.n_cells - h.lead, 0);
        p.to = std::min((i + 1) * h.codec.n_cells - h.lead, n_rows);
        if (!r.get(&what, 1)) { return false; }
        p.block = what == BLOCK;
        p.bits = what > BLOCK ? (int) (what >> 8) : 0;
        const bool known = what <= BLOCK ||
            (what == (SMALL_ROWS | (uint32_t) p.bits << 8) && p.bits >= KVQ_SMALL_LEAST && p.bits <= KVQ_SMALL_MOST);
        if (!known) { return false; }
        const size_t n_rows_here = (size_t) (p.to - p.from), width = heads * (size_t) h.codec.head_size;
        if (p.block) {
            if (p.to - p.from != h.codec.n_cells) { return false; }
            p.bytes = { r.skip(nb_codes), r.skip(nb_params), nb_codes, nb_params };
            p.image.pos.resize(h.flags & POSITIONS ? pc : 0);
            p.image.was.resize(h.flags & SEALED_AT ? pc : 0);
            if (!p.bytes.codes || !p.bytes.params || !r.get(p.image.pos.data(), p.image.pos.size()) ||
                !r.get(p.image.was.data(), p.image.was.size())) {
                return false;
            }
            uint32_t nb_beside = 0;
            const uint8_t * beside = h.flags & BESIDE && r.get(&nb_beside, 1) ? r.skip(nb_beside) : nullptr;
            if (h.flags & BESIDE && !beside) { return false; }
            p.image.beside.assign(beside, beside + nb_beside);
        } else {
            p.rows = r.skip(n_rows_here * (p.bits ? kvq_small_nb((int) width, p.bits) : 2 * width));
            p.pos = p.bits && (h.flags & POSITIONS) ? r.skip(4 * n_rows_here) : nullptr;
            if (!p.rows || (p.bits && (h.flags & POSITIONS) && !p.pos)) { return false; }
        }
        out.pages.push_back(std::move(p));
    }
    return true;
}

// false: no head, or of more bytes than there are
bool parse_head(const void * data, size_t nb, kvq_blob_head & head) {
    if (nb < KVQ_BLOB_HEAD || !kvq_blob_begins(data)) { return false; }
    reader r = { (const uint8_t *) data + 8, (const uint8_t *) data + nb };
    r.get(&head.nb, 1);
    r.get(&head.sum, 1);
    r.get(&head.tag, 1);
    r.get(&head.model, 1);
    r.get(&head.value, 1);
    r.get(&head.n_lanes, 1);
    r.get(&head.il, 1);
    r.get(&head.n, 1);
    return head.nb >= KVQ_BLOB_HEAD && head.nb <= nb && head.n > 0 && head.n_lanes >= 1 && head.n_lanes <= 2;
}

bool read_sections(const kvq_blob_bytes & blob, std::vector<section> & out) {
    kvq_blob_head head = {};
    if (!parse_head(blob.data, blob.nb, head)) { return false; }
    reader r = { blob.data + KVQ_BLOB_HEAD, blob.data + head.nb };
    for (int i = 0; i < head.n_lanes; i++) {
        section s;
        if (!read_section(r, head.n, s)) { return false; }
        out.push_back(std::move(s));
    }
    return r.p == r.end;
}

// The rows of a block as a state with rows has them. codes: the block's, or those that it adopts.
void expand(const lane_head & h, const uint8_t * params, const uint8_t * codes, uint16_t * rows) {
    const kvq_type_traits * type = kvq_traits(h.codec.type);
    const size_t D = (size_t) h.codec.head_size, W = D * (size_t) h.n_head, nb_codes = type->nb_codes(h.codec),
                 nb_params = type->nb_params(h.codec);
    std::vector<uint16_t> head((size_t) h.codec.n_cells * D);
    for (size_t i = 0; i < (size_t) h.n_head; i++) {
        kvq_cpu_image_write(h.codec, codes + i * nb_codes, params + i * nb_params, head.data());
        for (size_t t = 0; t < (size_t) h.codec.n_cells; t++) { memcpy(rows + t * W + i * D, &head[t * D], 2 * D); }
    }
}

// Rows in their order, to where they go.
void restore_rows(
    kvq_lane & lane, const std::vector<kvq_blob_run> & runs, int from, int n, const uint16_t * rows, int n_threads) {
    const size_t W = (size_t) width_of(lane);
    int at = 0; // first row of the run
    for (const kvq_blob_run & run : runs) {
        const int a = std::max(from, at), b = std::min(from + n, at + run.n);
        if (a < b) { lane.restore(run.stream, run.cell + a - at, b - a, rows + (size_t) (a - from) * W, n_threads); }
        at += run.n;
    }
}

std::string restore_lane(const section & s, const section * owner, kvq_lane & lane,
    const std::vector<kvq_blob_run> & runs, int n_threads, std::string & note) {
    const kvq_lane_layout & l = lane.layout();
    const lane_head & h = s.head;
    const int pc = h.codec.n_cells;
    const size_t W = (size_t) width_of(lane);
    if (h.n_head * h.codec.head_size != width_of(lane)) {
        return "the saved state is compact and of other heads: give it the model that it was saved with";
    }
    std::vector<uint16_t> rows; // those that wait for the rows behind them: pages that were apart may be one here
    const auto add_rows = [&](const page & p) {
        const size_t at = rows.size();
        const size_t n = (size_t) (p.to - p.from);
        rows.resize(at + n * W);
        if (!p.bits) { memcpy(rows.data() + at, p.rows, 2 * n * W); }
        const size_t nb = p.bits ? kvq_small_nb((int) W, p.bits) : 0;
        for (size_t i = 0; p.bits && i < n; i++) {
            uint16_t * const row = rows.data() + at + i * W;
            kvq_small_get(p.rows + i * nb, (int) W, p.bits, row);
            int32_t pos = -1;
            if (p.pos) {
                memcpy(&pos, p.pos + 4 * i, 4);
                kvq_tag_put(l, row, (size_t) l.codec.head_size, pos);
            }
        }
        return rows.data() + at;
    };
    for (const page & p : s.pages) {
        const std::string why = p.block ? lane.refuses(p.image) : lane.refuses(p.to - p.from, add_rows(p));
        rows.clear();
        if (!why.empty()) { return why; }
    }
    const bool same = !memcmp(&h.codec, &l.codec, sizeof(kvq_codec)) && h.n_head == l.n_head &&
        !(h.flags & SHARED) == !l.shares_codes && !(h.flags & LEFT_OUT) == !lane.leaves_out() &&
        !(h.flags & BESIDE) == !l.nb_beside && lane.blocks_travel();
    const bool there = same && runs.size() == 1 && runs[0].cell % pc == h.lead;
    bool anew = false;
    const auto flush = [&](int to) {
        const int from = to - (int) (rows.size() / W);
        if (!rows.empty()) { restore_rows(lane, runs, from, to - from, rows.data(), n_threads); }
        rows.clear();
    };
    kvq_block_puts puts(lane.device, n_threads);
    for (size_t i = 0; i < s.pages.size(); i++) {
        const page & p = s.pages[i];
        if (!p.block) {
            add_rows(p);
            continue;
        }
        if (there &&
            (flush(p.from), lane.place_block(runs[0].stream, (runs[0].cell + p.from) / pc, p.image, p.bytes, &puts))) {
            continue;
        }
        if (h.flags & LEFT_OUT) { // in another place the policy that left it out puts it back
            const size_t at = rows.size();
            rows.resize(at + (size_t) pc * W);
            anew = true;
            if (same && lane.rows_of_block(p.image, p.bytes.codes, p.bytes.params, rows.data() + at)) { continue; }
            puts.flush(); // pages that were placed hold what they say
            return "the saved state is compact and its pages cannot be placed here: restore it under the same method "
                   "and options into a cache that is as long "
                   "and not divided, or save it with state=rows";
        }
        const uint8_t * codes = p.bytes.codes;
        if (h.flags & SHARED) {
            const bool has = owner && owner->pages.size() == s.pages.size() && owner->pages[i].block &&
                !(owner->head.flags & SHARED) &&
                owner->pages[i].bytes.nb_codes == (size_t) h.n_head * kvq_traits(h.codec.type)->nb_codes(h.codec);
            if (!has) {
                return "the saved state is compact and lacks codes that a layer shares: save it with state=rows";
            }
            codes = owner->pages[i].bytes.codes;
        }
        const size_t at = rows.size();
        rows.resize(at + (size_t) pc * W);
        expand(h, p.bytes.params, codes, rows.data() + at);
        anew = true;
    }
    puts.flush();
    if (!s.pages.empty()) { flush(s.pages.back().to); }
    if (anew) {
        note = "a compact state was restored to other places or under another format: its blocks are made anew";
    }
    lane.commit(n_threads);
    return "";
}

} // namespace

// of a head, less the sum of all and this one
static uint32_t head_sum(const uint8_t * head) { return kvq_crc32(kvq_crc32(0, head, 16), head + 20, 16); }

namespace {

// A lane's part of a blob: where each page begins, and what it is.
struct lane_part {
    const kvq_lane & lane;
    kvq_host_pages pages;
    lane_head head;
    size_t at; // of the head
    struct entry {
        int from, to; // cells
        bool block;
        size_t at;
        kvq_page_image image; // positions
    };
    std::vector<entry> entries;
    int bits = 0; // of rows, 0: f16

    lane_part(const kvq_lane & lane, int stream, int cell, int n) :
        lane(lane), pages(lane, stream, cell / pc(), (cell + n - 1) / pc()) {
        const kvq_lane_layout & l = lane.layout();
        const int n_lists = lane.n_position_lists();
        const int32_t flags = (l.shares_codes ? SHARED : 0) | (n_lists > 0 ? POSITIONS : 0) |
            (n_lists > 1 ? SEALED_AT : 0) | (lane.leaves_out() ? LEFT_OUT : 0) | (l.nb_beside ? BESIDE : 0);
        head = { l.codec, l.n_head, flags, cell % pc(), (cell % pc() + n + pc() - 1) / pc() };
        for (int p = cell / pc(); p * pc() < cell + n; p++) {
            entry e = { std::max(p * pc(), cell), std::min((p + 1) * pc(), cell + n), false, 0, {} };
            e.block = e.to - e.from == pc() && lane.state(stream, p) == KVQ_PAGE_SEALED;
            if (e.block) { e.image = lane.positions_of(stream, p); }
            entries.push_back(std::move(e));
        }
    }
    // Behind `nb` bytes, rows of so many bits.
    void lay_out(int row_bits, size_t & nb) {
        bits = row_bits;
        at = nb;
        nb += sizeof(head);
        for (entry & e : entries) {
            e.at = nb;
            nb += sizeof(uint32_t) +
                (e.block ? nb_codes() + nb_params() + 4 * (e.image.pos.size() + e.image.was.size()) + nb_beside()
                         : (size_t) (e.to - e.from) * nb_row());
        }
    }
    bool has_positions() const { return head.flags & POSITIONS; }
    size_t nb_row() const {
        return bits ? kvq_small_nb(width_of(lane), bits) + (has_positions() ? 4 : 0) : 2 * (size_t) width_of(lane);
    }
    int pc() const { return lane.layout().page_cells; }
    size_t nb_codes() const {
        return lane.layout().shares_codes ? 0 : lane.layout().nb_codes * (size_t) lane.layout().n_head;
    }
    size_t nb_params() const { return lane.layout().nb_params * (size_t) lane.layout().n_head; }
    size_t nb_beside() const { return lane.layout().nb_beside ? sizeof(uint32_t) + lane.layout().nb_beside : 0; }

    void put_small(const std::vector<uint16_t> & rows, uint8_t * to) const {
        const size_t W = (size_t) width_of(lane), n = rows.size() / W, nb = kvq_small_nb((int) W, bits);
        for (size_t i = 0; i < n; i++) {
            kvq_small_put(&rows[i * W], (int) W, bits, to + i * nb);
            const int32_t pos = kvq_tag_get(lane.layout(), &rows[i * W], (size_t) lane.layout().codec.head_size);
            if (has_positions()) { memcpy(to + n * nb + 4 * i, &pos, 4); }
        }
    }

    void put_block(const entry & e, uint8_t * to) const {
        const kvq_host_pages::page & page = pages.at[(size_t) (e.from / pc() - pages.first)];
        const auto put = [&](const void * from, size_t nb) {
            if (nb) { memcpy(to, from, nb); }
            to += nb;
        };
        put(page.codes, nb_codes());
        put(page.params, nb_params());
        put(e.image.pos.data(), 4 * e.image.pos.size());
        put(e.image.was.data(), 4 * e.image.was.size());
        const uint32_t n = (uint32_t) e.image.beside.size();
        put(&n, head.flags & BESIDE ? sizeof(n) : 0);
        put(e.image.beside.data(), n);
    }

    void write(int stream, uint8_t * blob, int n_threads) const {
        memcpy(blob + at, &head, sizeof(head));
        std::vector<uint16_t> rows;
        for (const entry & e : entries) {
            uint8_t * const to = blob + e.at;
            const uint32_t what = e.block ? BLOCK : bits ? SMALL_ROWS | (uint32_t) bits << 8 : ROWS;
            memcpy(to, &what, sizeof(what));
            if (e.block) { continue; }
            rows.resize((size_t) (e.to - e.from) * (size_t) width_of(lane));
            lane.read(stream, e.from, e.to - e.from, rows.data());
            if (!bits) {
                memcpy(to + sizeof(what), rows.data(), 2 * rows.size());
            } else {
                put_small(rows, to + sizeof(what));
            }
        }
        const auto block = [&](int64_t i) {
            const entry & e = entries[(size_t) i];
            if (e.block) { put_block(e, blob + e.at + sizeof(uint32_t)); }
        };
        kvq_parallel_for((int64_t) entries.size(), n_threads, block, 4);
    }
};

} // namespace

size_t kvq_blob_write(const kvq_lane * const * lanes, int stream, int cell, int n, uint8_t * to, size_t nb_rows,
    kvq_blob_head head, int least_bits, int n_threads) {
    std::vector<std::unique_ptr<lane_part>> parts;
    for (int i = 0; i < head.n_lanes; i++) {
        if (!lanes[i]->blocks_travel()) { return 0; }
        parts.emplace_back(new lane_part(*lanes[i], stream, cell, n));
    }
    static constexpr int room[] = { 0, 12, 10, 8, 7, 6, 5, 4, 3, 2 }; // bits of rows, 0: f16
    size_t nb = nb_rows + 1;
    for (const int bits : room) {
        if (nb <= nb_rows || (bits ? bits : 16) < least_bits) { break; }
        nb = KVQ_BLOB_HEAD;
        for (const auto & part : parts) { part->lay_out(bits, nb); }
    }
    if (nb > nb_rows) { return 0; }
    for (const auto & part : parts) { part->write(stream, to, n_threads); }
    head.nb = nb;
    head.sum = 0;
    const int32_t zero = 0;
    std::vector<uint8_t> front;
    put(front, &MAGIC, 1);
    put(front, &head.nb, 1);
    put(front, &head.sum, 1);
    put(front, &head.tag, 1);
    put(front, &head.model, 1);
    put(front, &head.value, 1);
    put(front, &head.n_lanes, 1);
    put(front, &head.il, 1);
    put(front, &head.n, 1);
    put(front, &zero, 1);
    const uint32_t of_head = head_sum(front.data());
    memcpy(front.data() + 36, &of_head, 4);
    std::copy(front.begin(), front.end(), to);
    const uint32_t sum = kvq_crc32_parts(to + 20, nb - 20, n_threads);
    memcpy(to + 16, &sum, 4);
    return nb;
}

bool kvq_blob_head_is_whole(const void * data) {
    uint32_t sum;
    memcpy(&sum, (const uint8_t *) data + 36, 4);
    return !sum || sum == head_sum((const uint8_t *) data);
}

bool kvq_blob_begins(const void * data) { return !memcmp(data, &MAGIC, 8); }

bool kvq_blob_read_head(const void * data, size_t nb, kvq_blob_head & head, int n_threads) {
    return parse_head(data, nb, head) &&
        kvq_crc32_parts((const uint8_t *) data + 20, head.nb - 20, n_threads) == head.sum;
}

std::string kvq_blob_restore(const kvq_blob_bytes & blob, const kvq_blob_bytes & owner, kvq_lane * const * lanes,
    const std::vector<kvq_blob_run> & runs, int n_threads, std::string & note) {
    std::vector<section> own, others;
    if (!read_sections(blob, own)) {
        return "the saved state is damaged: a compact tensor does not hold what it says; save it again";
    }
    const bool shared = std::any_of(own.begin(), own.end(), [](const section & s) { return s.head.flags & SHARED; });
    if (!shared || !owner.nb || !read_sections(owner, others)) { others.clear(); }
    for (size_t i = 0; i < own.size(); i++) {
        const std::string why =
            restore_lane(own[i], i < others.size() ? &others[i] : nullptr, *lanes[i], runs, n_threads, note);
        if (!why.empty()) { return why; }
    }
    return "";
}

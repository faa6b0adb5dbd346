#include "state_blocks.h"

#include "types/types.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace {

constexpr uint64_t MAGIC = 0x31534b434f4c4251; // "QBLOCKS1"
enum : int32_t { SHARED = 1, POSITIONS = 2, SEALED_AT = 4, LEFT_OUT = 8 };

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
};

int width_of(const kvq_lane & lane) { return lane.layout().n_head * lane.layout().codec.head_size; }

// One page as it came: a block, or rows of its cells [from, to).
struct page {
    bool block = false;
    kvq_page_image image;
    std::vector<uint16_t> rows;
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
    for (int i = 0; i < h.n_pages; i++) {
        page p;
        uint32_t block;
        p.from = std::max(i * h.codec.n_cells - h.lead, 0);
        p.to = std::min((i + 1) * h.codec.n_cells - h.lead, n_rows);
        if (!r.get(&block, 1) || block > 1) { return false; }
        p.block = block;
        if (block) {
            const size_t nb_codes = h.flags & SHARED ? 0 : heads * type->nb_codes(h.codec),
                         nb_params = heads * type->nb_params(h.codec);
            if (p.to - p.from != h.codec.n_cells || nb_codes + nb_params > (size_t) (r.end - r.p)) { return false; }
            p.image.codes.resize(nb_codes);
            p.image.params.resize(nb_params);
            p.image.pos.resize(h.flags & POSITIONS ? pc : 0);
            p.image.was.resize(h.flags & SEALED_AT ? pc : 0);
            if (!r.get(p.image.codes.data(), nb_codes) || !r.get(p.image.params.data(), nb_params) ||
                !r.get(p.image.pos.data(), p.image.pos.size()) || !r.get(p.image.was.data(), p.image.was.size())) {
                return false;
            }
        } else {
            const size_t n = (size_t) (p.to - p.from) * heads * (size_t) h.codec.head_size;
            if (2 * n > (size_t) (r.end - r.p)) { return false; }
            p.rows.resize(n);
            r.get(p.rows.data(), n);
        }
        out.pages.push_back(std::move(p));
    }
    return true;
}

bool read_sections(const std::vector<uint8_t> & blob, std::vector<section> & out) {
    kvq_blob_head head;
    if (!kvq_blob_read_head(blob.data(), blob.size(), head)) { return false; }
    reader r = { blob.data() + KVQ_BLOB_HEAD, blob.data() + head.nb };
    for (int i = 0; i < head.n_lanes; i++) {
        section s;
        if (!read_section(r, head.n, s)) { return false; }
        out.push_back(std::move(s));
    }
    return r.p == r.end;
}

// The rows of a block as a state with rows has them. codes: the block's, or those that it adopts.
void expand(const lane_head & h, const kvq_page_image & image, const std::vector<uint8_t> & codes, uint16_t * rows) {
    const kvq_type_traits * type = kvq_traits(h.codec.type);
    const size_t D = (size_t) h.codec.head_size, W = D * (size_t) h.n_head, nb_codes = type->nb_codes(h.codec),
                 nb_params = type->nb_params(h.codec);
    std::vector<uint16_t> head((size_t) h.codec.n_cells * D);
    for (size_t i = 0; i < (size_t) h.n_head; i++) {
        kvq_image_write(h.codec, codes.data() + i * nb_codes, image.params.data() + i * nb_params, head.data());
        for (size_t t = 0; t < (size_t) h.codec.n_cells; t++) { memcpy(rows + t * W + i * D, &head[t * D], 2 * D); }
    }
}

// Rows in their order, to where they go.
void restore_rows(kvq_lane & lane, const std::vector<kvq_blob_run> & runs, int from, int n, const uint16_t * rows) {
    const size_t W = (size_t) width_of(lane);
    int at = 0; // first row of the run
    for (const kvq_blob_run & run : runs) {
        const int a = std::max(from, at), b = std::min(from + n, at + run.n);
        if (a < b) { lane.restore(run.stream, run.cell + a - at, b - a, rows + (size_t) (a - from) * W, 1); }
        at += run.n;
    }
}

std::string restore_lane(const section & s, const section * owner, kvq_lane & lane,
    const std::vector<kvq_blob_run> & runs, std::string & note) {
    const kvq_lane_layout & l = lane.layout();
    const lane_head & h = s.head;
    const int pc = h.codec.n_cells;
    if (h.n_head * h.codec.head_size != width_of(lane)) {
        return "the saved state is compact and of other heads: give it the model that it was saved with";
    }
    for (const page & p : s.pages) {
        const std::string why = p.block ? lane.refuses(p.image) : lane.refuses(p.to - p.from, p.rows.data());
        if (!why.empty()) { return why; }
    }
    const bool same = !memcmp(&h.codec, &l.codec, sizeof(kvq_codec)) && h.n_head == l.n_head &&
        !(h.flags & SHARED) == !l.shares_codes && !(h.flags & LEFT_OUT) == !lane.leaves_out() && lane.blocks_travel();
    const bool there = same && runs.size() == 1 && runs[0].cell % pc == h.lead;
    std::vector<uint16_t> rows; // those that wait for the rows behind them: pages that were apart may be one here
    bool anew = false;
    const auto flush = [&](int to) {
        const int from = to - (int) (rows.size() / (size_t) width_of(lane));
        if (!rows.empty()) { restore_rows(lane, runs, from, to - from, rows.data()); }
        rows.clear();
    };
    for (size_t i = 0; i < s.pages.size(); i++) {
        const page & p = s.pages[i];
        if (!p.block) {
            rows.insert(rows.end(), p.rows.begin(), p.rows.end());
            continue;
        }
        if (there && (flush(p.from), lane.place_block(runs[0].stream, (runs[0].cell + p.from) / pc, p.image))) {
            continue;
        }
        if (h.flags & LEFT_OUT) { // rows of such a block are known in its own place only
            return "the saved state is compact and its pages cannot be placed here: restore it under the same method "
                   "and options into a cache that is as long "
                   "and not divided, or save it with state=rows";
        }
        const std::vector<uint8_t> * codes = &p.image.codes;
        if (h.flags & SHARED) {
            const bool has = owner && owner->pages.size() == s.pages.size() && owner->pages[i].block &&
                !(owner->head.flags & SHARED) &&
                owner->pages[i].image.codes.size() == (size_t) h.n_head * kvq_traits(h.codec.type)->nb_codes(h.codec);
            if (!has) {
                return "the saved state is compact and lacks codes that a layer shares: save it with state=rows";
            }
            codes = &owner->pages[i].image.codes;
        }
        const size_t at = rows.size();
        rows.resize(at + (size_t) pc * (size_t) width_of(lane));
        expand(h, p.image, *codes, rows.data() + at);
        anew = true;
    }
    if (!s.pages.empty()) { flush(s.pages.back().to); }
    if (anew) {
        note = "a compact state was restored to other places or under another format: its blocks are made anew";
    }
    lane.commit(1);
    return "";
}

} // namespace

uint32_t kvq_crc32(uint32_t crc, const void * data, size_t nb) {
    static const std::array<uint32_t, 256> table = [] {
        std::array<uint32_t, 256> t;
        for (uint32_t i = 0; i < 256; i++) {
            t[i] = i;
            for (int j = 0; j < 8; j++) { t[i] = t[i] >> 1 ^ (t[i] & 1 ? 0xedb88320u : 0); }
        }
        return t;
    }();
    crc = ~crc;
    for (size_t i = 0; i < nb; i++) { crc = crc >> 8 ^ table[(crc ^ ((const uint8_t *) data)[i]) & 255]; }
    return ~crc;
}

// of a head, less the sum of all and this one
static uint32_t head_sum(const uint8_t * head) { return kvq_crc32(kvq_crc32(0, head, 16), head + 20, 16); }

std::vector<uint8_t> kvq_blob_write(
    const kvq_lane * const * lanes, int stream, int cell, int n, size_t nb_rows, kvq_blob_head head) {
    std::vector<uint8_t> out(KVQ_BLOB_HEAD);
    for (int i = 0; i < head.n_lanes; i++) {
        const kvq_lane & lane = *lanes[i];
        const kvq_lane_layout & l = lane.layout();
        const int pc = l.page_cells;
        if (!lane.blocks_travel()) { return {}; }
        const int n_lists = lane.n_position_lists();
        const int32_t flags = (l.shares_codes ? SHARED : 0) | (n_lists > 0 ? POSITIONS : 0) |
            (n_lists > 1 ? SEALED_AT : 0) | (lane.leaves_out() ? LEFT_OUT : 0);
        const lane_head h = { l.codec, l.n_head, flags, cell % pc, (cell % pc + n + pc - 1) / pc };
        put(out, &h, 1);
        std::vector<uint16_t> rows;
        for (int p = cell / pc; p * pc < cell + n; p++) {
            const int from = std::max(p * pc, cell), to = std::min((p + 1) * pc, cell + n);
            const uint32_t block = to - from == pc && lane.state(stream, p) == KVQ_PAGE_SEALED;
            put(out, &block, 1);
            if (block) {
                const kvq_page_image image = lane.block_of(stream, p);
                put(out, image.codes.data(), image.codes.size());
                put(out, image.params.data(), image.params.size());
                put(out, image.pos.data(), image.pos.size());
                put(out, image.was.data(), image.was.size());
            } else {
                rows.resize((size_t) (to - from) * (size_t) width_of(lane));
                lane.read(stream, from, to - from, rows.data());
                put(out, rows.data(), rows.size());
            }
        }
        if (out.size() > nb_rows) { return {}; }
    }
    head.nb = out.size();
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
    std::copy(front.begin(), front.end(), out.begin());
    const uint32_t sum = kvq_crc32(0, out.data() + 20, out.size() - 20);
    memcpy(out.data() + 16, &sum, 4);
    return out;
}

bool kvq_blob_head_is_whole(const void * data) {
    uint32_t sum;
    memcpy(&sum, (const uint8_t *) data + 36, 4);
    return !sum || sum == head_sum((const uint8_t *) data);
}

bool kvq_blob_begins(const void * data, size_t nb) { return nb >= KVQ_BLOB_HEAD && !memcmp(data, &MAGIC, 8); }

bool kvq_blob_read_head(const void * data, size_t nb, kvq_blob_head & head) {
    if (!kvq_blob_begins(data, nb)) { return false; }
    reader r = { (const uint8_t *) data + 8, (const uint8_t *) data + nb };
    r.get(&head.nb, 1);
    r.get(&head.sum, 1);
    r.get(&head.tag, 1);
    r.get(&head.model, 1);
    r.get(&head.value, 1);
    r.get(&head.n_lanes, 1);
    r.get(&head.il, 1);
    r.get(&head.n, 1);
    return head.nb >= KVQ_BLOB_HEAD && head.nb <= nb && head.n > 0 && head.n_lanes >= 1 && head.n_lanes <= 2 &&
        kvq_crc32(0, (const uint8_t *) data + 20, head.nb - 20) == head.sum;
}

std::string kvq_blob_restore(const std::vector<uint8_t> & blob, const std::vector<uint8_t> & owner,
    kvq_lane * const * lanes, const std::vector<kvq_blob_run> & runs, std::string & note) {
    std::vector<section> own, others;
    if (!read_sections(blob, own)) {
        return "the saved state is damaged: a compact tensor does not hold what it says; save it again";
    }
    if (owner.empty() || !read_sections(owner, others)) { others.clear(); }
    for (size_t i = 0; i < own.size(); i++) {
        const std::string why = restore_lane(own[i], i < others.size() ? &others[i] : nullptr, *lanes[i], runs, note);
        if (!why.empty()) { return why; }
    }
    return "";
}

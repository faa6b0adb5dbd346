// Saved states against random changes: rows with marks and blocks as they are, whole, cut off, with a good checksum
// over what is wrong. Each is refused or restored; none crashes, and a lane that took one goes on working. Usage:
// test_fuzz_states [n] [seed] [method]
#include "layer.h"
#include "policy/tags.h"
#include "store/mark.h"
#include "store/small_rows.h"
#include "store/state_blocks.h"
#include "types/types.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

struct config {
    const char *method, *opts;
    int n_head, head_size, n_cells;
};

// Calibrated data of a layer: means, and predictors where one is asked for.
struct data_of_layer : kvq_layer_calibration {
    std::vector<uint8_t> packed[3];
    explicit data_of_layer(int W, bool predicts) {
        for (std::vector<float> * mean : { &k_mean, &v_mean }) {
            mean->resize((size_t) W);
            for (float & x : *mean) { x = std::uniform_real_distribution<float>(-1, 1)(rng); }
        }
        kvq_predictor * const all[3] = { &w.k, &w.v_from_k, &w.v_from_below };
        for (int i = 0; predicts && i < 3; i++) {
            std::vector<float> weights((size_t) W * W);
            for (float & x : weights) { x = std::uniform_real_distribution<float>(-0.1f, 0.1f)(rng); }
            packed[i].resize(kvq_predictor_bytes(W, W, 8));
            kvq_predictor_pack(W, W, 8, weights.data(), packed[i].data());
            *all[i] = { W, W, 8, packed[i].data() };
        }
    }
};

constexpr int32_t BOUND = 1 << 20;        // of positions, in a cache of so few cells
constexpr int MOST_HIGH = BOUND / 64 + 1; // rows of tables

// Two layers; the second may share codes of the first, or be predicted from it.
struct world {
    cache_of_layers cache;
    composed_layer layer[2];
    kvq_lane * lane[2][2]; // [layer][keys, values]
    kvq_rotor rotor;
    bool turns = false;
    int W, n_cells;
    static kvq_rope rope(int n_dims) {
        kvq_rope r;
        r.n_dims = n_dims;
        r.neox = true;
        return r;
    }
    world(const config & c, const data_of_layer * data) :
        rotor(rope(c.head_size)), W(c.n_head * c.head_size), n_cells(c.n_cells) {
        const kvq_layer_shape shape = { 0, c.n_head, c.head_size, c.head_size };
        for (int i = 0; i < 2; i++) {
            const kvq_layer_plan plan = plan_of(c.method, c.opts, { i, 2, shape, i ? &shape : nullptr });
            layer[i].make(cache, plan, c.n_head, c.n_cells, 1, i, i ? &layer[0] : nullptr, &data[i]);
            for (int v = 0; v < 2; v++) { lane[i][v] = layer[i].lane[v].get(); }
            if (layer[i].transforms[0] && layer[i].transforms[0]->positions) {
                layer[i].transforms[0]->rotor = &rotor;
                turns = true;
            }
        }
    }
    // n new rows from cell `first` on, attended where scores are kept
    void write(int first, int n) {
        std::vector<float> rows((size_t) n * W);
        std::vector<int64_t> idx((size_t) n);
        std::vector<int32_t> pos((size_t) n);
        for (int t = 0; t < n; t++) { idx[(size_t) t] = pos[(size_t) t] = first + t; }
        for (auto & l : lane) {
            for (int v = 0; v < 2; v++) {
                for (float & x : rows) { x = std::uniform_real_distribution<float>(-1, 1)(rng); }
                l[v]->write(n, idx.data(), rows.data(), (size_t) W, 1, pos.data());
            }
        }
        for (composed_layer & l : layer) {
            if (l.slots) { attend(l, first, n); }
        }
        for (auto & l : lane) {
            for (int v = 0; v < 2; v++) { l[v]->commit(1); }
        }
    }
    void attend(composed_layer & l, int first, int n) {
        const int heads = l.lane[0]->layout().n_head, D = W / heads;
        std::vector<float> q((size_t) n * W), dst(q.size()), lse((size_t) n * heads);
        for (float & x : q) { x = std::uniform_real_distribution<float>(-1, 1)(rng); }
        std::vector<uint16_t> mask((size_t) n * n_cells);
        for (int i = 0; i < n; i++) {
            for (int c = 0; c < n_cells; c++) { mask[(size_t) i * n_cells + c] = c > first + i ? 0xfc00 : 0; }
        }
        kvq_attn a = {};
        a.k = l.lane[0]->layout().codec;
        a.v = l.lane[1]->layout().codec;
        a.n_q = n;
        a.n_head = a.n_head_kv = heads;
        a.n_kv = n_cells;
        a.scale = 0.1f;
        a.q = q.data();
        a.q_stride_token = a.dst_stride_token = W;
        a.q_stride_head = a.dst_stride_head = D;
        a.mask = mask.data();
        a.mask_stride_token = n_cells;
        a.dst = dst.data();
        a.n_pages = l.spans.n_pages;
        a.pages = l.spans.spans.data();
        a.lse = lse.data();
        a.map_stride = l.lane[0]->layout().page_cells;
        CHECK(kvq_attend(&a, 1, 1) == KVQ_OK, "attend");
        l.probe->observe(a, 0, (uint64_t) first, 1);
        CHECK(l.slots->n_used(0) <= l.lane[0]->layout().n_store, "more pages than there are");
    }
    void fill(int n) {
        const int n_new = layer[0].slots ? 70 : 0; // behind a prompt, and cells of it written anew: pages with holes
        write(0, n - n_new);
        for (int c = n - n_new; c < n; c++) { write(c, 1); }
        for (int c = 40; n_new && c < 60; c += 6) { write(c, 1); }
    }
    void clear() {
        for (auto & l : lane) {
            for (int v = 0; v < 2; v++) { l[v]->clear(); }
        }
    }
};

static void change(std::vector<uint8_t> & x, size_t first) {
    for (int n = uniform(1, 8); n > 0 && x.size() > first; n--) {
        const size_t at = first + (size_t) uniform(0, (int) (x.size() - first) - 1);
        switch (uniform(0, 3)) {
        case 0: x[at] ^= (uint8_t) (1 << uniform(0, 7)); break;
        case 1: x[at] = (uint8_t) uniform(0, 255); break;
        case 2:
            memset(&x[at], uniform(0, 1) ? 0xff : 0, std::min<size_t>(x.size() - at, (size_t) uniform(1, 16)));
            break;
        default: x.resize(uniform(0, 3) ? x.size() : at); break;
        }
    }
}

static std::vector<uint8_t> blob_of(
    const kvq_lane * const * lane, int n, size_t nb_rows, const kvq_blob_head & head, int least_bits = 16) {
    std::vector<uint8_t> blob(nb_rows);
    blob.resize(kvq_blob_write(lane, 0, 0, n, blob.data(), nb_rows, head, least_bits));
    return blob;
}
static kvq_blob_bytes bytes_of(const std::vector<uint8_t> & blob) { return { blob.data(), blob.size() }; }

static void stamp(std::vector<uint8_t> & blob) { // a good checksum and length over whatever there is
    const uint64_t nb = blob.size();
    memcpy(&blob[8], &nb, 8);
    const uint32_t sum = kvq_crc32(0, blob.data() + 20, blob.size() - 20);
    memcpy(&blob[16], &sum, 4);
}

// ---------------------------------------------------------------- rows that say what no cache says

// A key of a page of slots, or its image (policy/evict_state.cpp), with any page, slot, score and age; checksums fit.
static void forge_slot(const kvq_lane_layout & l, bool value, uint16_t * row) {
    const size_t D = (size_t) l.codec.head_size;
    uint8_t bytes[64];
    for (uint8_t & x : bytes) { x = (uint8_t) (uniform(0, 3) ? uniform(0, 255) : 0xff); }
    uint32_t head = (uint32_t) uniform(0, uniform(0, 3) ? l.n_store : 1 << 20) | (uint32_t) uniform(0, 40) << 20 |
        (uint32_t) uniform(0, 3) << 28;
    if (!value && uniform(0, 1)) {
        head |= 1u << 30 | (uint32_t) uniform(0, 1) << 31;
        memcpy(bytes, &head, 4);
        std::vector<uint16_t> bare(row, row + D);
        for (uint16_t & x : bare) { x = (uint16_t) (x & -(1 << kvq_image_width(D, 9))); }
        const uint32_t sum = kvq_crc32(kvq_crc32((uint32_t) l.page_cells, bytes, 5), bare.data(), 2 * D);
        memcpy(bytes + 5, &sum, 4);
        kvq_image_put(D, row, 0, 9, bytes);
        return;
    }
    const size_t nb = 4 + (l.nb_params + 8 + (size_t) l.page_cells - 1) / (size_t) l.page_cells;
    memcpy(bytes, &head, 4);
    if (nb <= sizeof(bytes) && kvq_image_width(D, nb) <= 8) { kvq_image_put(D, row, 0, nb, bytes); }
}

// A row's position, or the positions at which a page was sealed (policy/tags.h, policy/transform_image.cpp).
static void forge_position(const kvq_lane_layout & l, uint16_t * rows, int n) {
    const auto some = [] { return uniform(0, 3) ? uniform(-2, 300) : uniform(0, 1 << (uniform(0, 3) ? 14 : 26)); };
    const size_t W = (size_t) l.codec.head_size * l.n_head, D = (size_t) l.codec.head_size;
    const int p = uniform(0, n / l.page_cells - 1) * l.page_cells;
    if (uniform(0, 1)) {
        for (int i = uniform(1, 4); i > 0; i--) {
            kvq_tag_put(l, rows + (size_t) (p + uniform(0, l.page_cells - 1)) * W, D, some());
        }
        return;
    }
    std::vector<uint16_t> head((size_t) l.page_cells * D);
    std::vector<uint8_t> bytes(l.nb_params + 4 * (size_t) l.page_cells);
    for (int t = 0; t < l.page_cells; t++) { memcpy(&head[(size_t) t * D], rows + (size_t) (p + t) * W, 2 * D); }
    if (!kvq_image_take(head.size(), head.data(), 1, bytes.size(), bytes.data())) { return; }
    for (int i = uniform(1, 4); i > 0; i--) {
        const int32_t pos = uniform(0, 7) ? some() : (int32_t) rng();
        memcpy(&bytes[l.nb_params + 4 * (size_t) uniform(0, l.page_cells - 1)], &pos, 4);
    }
    kvq_image_put(head.size(), head.data(), 1, bytes.size(), bytes.data());
    for (int t = 0; t < l.page_cells; t++) { memcpy(rows + (size_t) (p + t) * W, &head[(size_t) t * D], 2 * D); }
}

static std::vector<uint16_t> changed(const world & w, int i, int v, std::vector<uint16_t> rows) {
    const kvq_lane & lane = *w.lane[i][v];
    const size_t D = (size_t) lane.layout().codec.head_size, W = (size_t) w.W, H = W / D;
    const int n = (int) (rows.size() / W), kind = uniform(0, 4);
    if (kind <= 1 || (kind == 4 && !w.layer[i].slots && !(w.turns && !v))) {
        std::vector<uint8_t> bytes((const uint8_t *) rows.data(), (const uint8_t *) (rows.data() + rows.size()));
        change(bytes, 0);
        bytes.resize(2 * rows.size());
        memcpy(rows.data(), bytes.data(), bytes.size());
    } else if (kind == 4 && !w.layer[i].slots) {
        forge_position(lane.layout(), rows.data(), n);
    } else {
        for (int k = uniform(1, 40); k > 0; k--) { // rows of one head: said twice, evicted, forged
            uint16_t * row = &rows[(size_t) uniform(0, n - 1) * W + (size_t) uniform(0, (int) H - 1) * D];
            if (kind == 2) {
                memcpy(row, &rows[(size_t) uniform(0, n - 1) * W + (size_t) uniform(0, (int) H - 1) * D], 2 * D);
            } else if (kind == 3) {
                std::fill_n(row, D, KVQ_EVICTED);
            } else {
                forge_slot(lane.layout(), v, row);
            }
        }
    }
    for (uint16_t & x : rows) { x = (x & 0x7c00) == 0x7c00 ? 0 : x; } // refused before a lane sees them
    return rows;
}

struct saved { // of the lanes of a cache, [layer][keys, values]
    std::vector<uint8_t> blob[2][2];
    std::vector<uint8_t> small[2][2]; // with less room for rows, as a declared type leaves
    std::vector<uint16_t> rows[2][2];
};

// What came in whole is what went out. Slots: of every head the same cells; keys of pages with holes are encoded anew.
static void comes_back(const config & c, world & to, const saved & from, int n) {
    to.clear();
    for (int v = 0; v < 2; v++) {
        for (int i = 0; i < 2; i++) {
            kvq_lane * l = to.lane[i][v];
            std::string note, why;
            std::vector<uint16_t> again(from.rows[i][v].size());
            if (from.blob[i][v].empty()) {
                l->restore(0, 0, n, from.rows[i][v].data(), 2);
            } else {
                why = kvq_blob_restore(
                    bytes_of(from.blob[i][v]), bytes_of(from.blob[0][v]), &l, { { 0, 0, n } }, 2, note);
            }
            CHECK(why.empty() && note.empty(), "%s: %s %s", c.method, why.c_str(), note.c_str());
            if (to.layer[i].slots && !v) { continue; } // until values are there
            l->read(0, 0, n, again.data());
            CHECK(
                to.layer[i].slots || again == from.rows[i][v], "%s %s: layer %d is not as it was", c.method, c.opts, i);
            for (size_t at = 0; at < again.size(); at += (size_t) c.head_size) {
                const auto gone = [&](const std::vector<uint16_t> & rows) {
                    return std::count(rows.begin() + (long) at, rows.begin() + (long) at + c.head_size, KVQ_EVICTED) ==
                        c.head_size;
                };
                CHECK(gone(again) == gone(from.rows[i][v]), "%s %s: layer %d keeps other cells", c.method, c.opts, i);
            }
        }
    }
}

static void run(const config & c, int steps, unsigned seed) {
    rng.seed(seed);
    const int W = c.n_head * c.head_size, n = c.n_cells - 13;
    const bool predicts =
        strstr(c.opts, "predictor=full") || strstr(c.opts, "predictor=k") || strstr(c.opts, "predictor=fold");
    const data_of_layer data[2] = { data_of_layer(W, false), data_of_layer(W, predicts) };
    world from(c, data), to(c, data);
    from.fill(n);
    saved state;
    for (int i = 0; i < 2; i++) {
        for (int v = 0; v < 2; v++) {
            const kvq_lane * lane = from.lane[i][v];
            state.blob[i][v] = blob_of(&lane, n, 2 * (size_t) W * n, { 0, 0, 7, 9, (uint8_t) v, 1, i, n });
            for (int bits = 11; state.small[i][v].empty() && bits < 16; bits++) { // a value, of all rows
                state.small[i][v] = blob_of(
                    &lane, n, 2 * (size_t) W * n * bits / 16, { 0, 0, 7, 9, (uint8_t) v, 1, i, n }, KVQ_SMALL_LEAST);
                if (!lane->blocks_travel()) { break; }
            }
            CHECK(state.small[i][v].empty() == !lane->blocks_travel(), "%s %s: no room", c.method, c.opts);
            state.rows[i][v].resize((size_t) n * W);
            lane->read(0, 0, n, state.rows[i][v].data());
            CHECK(state.blob[i][v].empty() == !lane->blocks_travel(), "%s %s: no blocks", c.method, c.opts);
        }
    }
    int n_refused = 0, n_taken = 0, n_evicted = 0, n_sealed = 0;
    for (int step = 0; step < steps; step++) {
        const int i = uniform(0, 1), v = uniform(0, 1), at = uniform(0, 3) ? 0 : uniform(0, 12);
        const std::vector<uint8_t> & blob = uniform(0, 1) ? state.small[i][v] : state.blob[i][v];
        kvq_lane * lane = to.lane[i][v];
        if (step % 1000 == 0) { comes_back(c, to, state, n); }
        if (!blob.empty() && uniform(0, 1)) {
            std::vector<uint8_t> bad = blob;
            const bool good_sum = uniform(0, 3);
            change(bad, good_sum ? 36 : 0);
            if (good_sum && bad.size() >= KVQ_BLOB_HEAD) { stamp(bad); }
            kvq_blob_head head;
            if (!kvq_blob_read_head(bad.data(), bad.size(), head) || head.n != n) {
                n_refused++;
                continue;
            }
            bad.resize(head.nb);
            std::string note;
            const int first = uniform(1, n - 1);
            const std::vector<kvq_blob_run> one = { { 0, at, n } }, two = { { 0, 0, first }, { 0, first, n - first } };
            const kvq_blob_bytes owner = uniform(0, 3) ? bytes_of(state.blob[0][v]) : kvq_blob_bytes{};
            n_refused += !kvq_blob_restore(bytes_of(bad), owner, &lane, uniform(0, 3) ? one : two, 2, note).empty();
            n_taken++;
        } else if (to.layer[i].slots) { // values go to the pages of their keys
            to.lane[i][0]->restore(0, at, n, (v ? state.rows[i][0] : changed(to, i, 0, state.rows[i][0])).data(), 1);
            if (uniform(0, 7)) {
                to.lane[i][1]->restore(
                    0, at, n, (v ? changed(to, i, 1, state.rows[i][1]) : state.rows[i][1]).data(), 1);
            }
            n_taken++;
        } else {
            const std::vector<uint16_t> bad = changed(to, i, v, state.rows[i][v]);
            const bool is_refused = !lane->refuses(n, bad.data()).empty();
            if (!is_refused) { lane->restore(0, at, n, bad.data(), 1); }
            n_refused += is_refused;
            n_taken += !is_refused;
        }
        CHECK(to.rotor.view().n_high <= MOST_HIGH, "%s %s: %d rows of tables of rotary embedding", c.method, c.opts,
            to.rotor.view().n_high);
        if (step % 16 == 0) {
            std::vector<uint16_t> again((size_t) c.n_cells * W);
            for (auto & l : to.lane) {
                for (int of = 0; of < 2; of++) { l[of]->read(0, 0, c.n_cells, again.data()); }
            }
            n_evicted += (int) std::count(again.begin(), again.end(), KVQ_EVICTED);
            n_sealed += lane->state(0, 1) == KVQ_PAGE_SEALED;
        }
        if (step % 64 == 63) { to.write(c.n_cells - 13, uniform(1, 13)); }
    }
    CHECK(to.layer[0].slots ? n_evicted > 0 : n_sealed > 0, "%s %s: nothing is sealed", c.method, c.opts);
    printf("%-8s %-44s seed %u: %d states, %d refused, %d restored in part or whole\n", c.method, c.opts, seed, steps,
        n_refused, n_taken);
}

// Positions that no cache of 256 cells has: in tags of rows, in blocks by themselves, in the images of sealed pages.
static void far_positions(const config & c, int32_t bound) {
    const int W = c.n_head * c.head_size, n = 243;
    const bool predicts = strstr(c.opts, "predictor=k");
    const data_of_layer data[2] = { data_of_layer(W, false), data_of_layer(W, predicts) };
    world from(c, data), to(c, data);
    from.fill(n);
    const kvq_lane * lane = from.lane[1][0];
    kvq_lane * there = to.lane[1][0];
    const kvq_lane_layout & l = lane->layout();
    const size_t D = (size_t) c.head_size;
    std::vector<uint16_t> rows((size_t) n * W), before(rows.size()), after(rows.size());
    lane->read(0, 0, n, rows.data());
    CHECK(to.turns && lane->state(0, 1) == KVQ_PAGE_SEALED, "%s: no page is sealed", c.opts);
    CHECK(there->refuses(n, rows.data()).empty(), "%s: a good state is refused", c.opts);
    there->restore(0, 0, n, rows.data(), 1);
    there->read(0, 0, n, before.data());
    const auto names = [&](const std::string & why, int32_t pos) {
        return why.find("position " + std::to_string(pos) + ",") != std::string::npos &&
            why.find("below " + std::to_string(bound)) != std::string::npos;
    };
    for (const int cell : { 1, l.page_cells + 3, n - 1 }) {
        for (const int32_t pos : { bound - 1, bound, (1 << 26) - 1 }) {
            std::vector<uint16_t> far = rows;
            kvq_tag_put(l, &far[(size_t) cell * W], D, pos);
            const std::string why = there->refuses(n, far.data());
            CHECK(pos < bound ? why.empty() : names(why, pos), "%s: cell %d, position %d: %s", c.opts, cell, pos,
                why.c_str());
        }
    }
    CHECK(to.lane[1][1]->refuses(n, rows.data()).empty(), "%s: values have no positions", c.opts);

    const std::vector<uint8_t> blob = blob_of(&lane, n, 2 * rows.size(), { 0, 0, 7, 9, 0, 1, 1, n });
    for (int of = 0; of < lane->n_position_lists(); of++) { // positions, and those when sealed
        kvq_page_image image = lane->block_of(0, 1);
        const std::vector<int32_t> was = of ? image.was : image.pos;
        (of ? image.was : image.pos)[5] = bound;
        CHECK(names(there->refuses(image), bound), "%s: a block, list %d", c.opts, of);
        const kvq_block_bytes block = { image.codes.data(), image.params.data(), image.codes.size(),
            image.params.size() };
        CHECK(!there->place_block(0, 1, image, block), "%s: a block with position %d is placed", c.opts, bound);
        std::vector<uint8_t> bad = blob;
        const uint8_t * list = (const uint8_t *) was.data();
        auto at = std::search(bad.begin(), bad.end(), list, list + 4 * was.size());
        CHECK(at != bad.end(), "%s: the blob has no positions", c.opts);
        at += of ? 4 * (long) was.size() : 0;
        memcpy(&*at + 4 * 5, &bound, 4);
        stamp(bad);
        std::string note;
        CHECK(names(kvq_blob_restore(bytes_of(bad), {}, &there, { { 0, 0, n } }, 1, note), bound),
            "%s: a blob, list %d", c.opts, of);
    }
    there->read(0, 0, n, after.data());
    CHECK(before == after, "%s: what is refused left something", c.opts);
    if (lane->n_position_lists() > 1) { // in the low bits of an image: the page is encoded anew from its rows
        std::vector<uint16_t> head((size_t) l.page_cells * D), far = rows;
        std::vector<uint8_t> bytes(l.nb_params + 4 * (size_t) l.page_cells);
        uint16_t * const page = &far[(size_t) l.page_cells * W];
        for (int t = 0; t < l.page_cells; t++) { memcpy(&head[(size_t) t * D], page + (size_t) t * W, 2 * D); }
        CHECK(kvq_image_take(head.size(), head.data(), 1, bytes.size(), bytes.data()), "%s: no image", c.opts);
        memcpy(&bytes[l.nb_params + 4 * 5], &bound, 4);
        kvq_image_put(head.size(), head.data(), 1, bytes.size(), bytes.data());
        for (int t = 0; t < l.page_cells; t++) { memcpy(page + (size_t) t * W, &head[(size_t) t * D], 2 * D); }
        CHECK(there->refuses(n, far.data()).empty(), "%s: its tags are good", c.opts);
        there->restore(0, 0, n, far.data(), 1);
    }
    CHECK(to.rotor.view().n_high < 1024, "%s: %d rows of tables", c.opts, to.rotor.view().n_high);
}

// Rows that come in three calls: what their marks say, and their sum.
static kvq_mark_stream in_calls(const std::vector<uint16_t> & rows, int n, int W, int D, int first, int second) {
    kvq_mark_stream out;
    const int at[4] = { 0, first, second, n };
    std::vector<uint16_t> part;
    for (int i = 0; i < 3; i++) {
        part.assign(rows.begin() + at[i] * W, rows.begin() + at[i + 1] * W);
        const std::vector<uint16_t> as_it_came = part;
        kvq_mark_rows_view v = { part.data(), at[i + 1] - at[i], W, D, (first + second) % 2 == 0 };
        CHECK(out.add(v), "all rows are finite");
        CHECK(v.own || part == as_it_came, "rows of the caller were changed");
    }
    return out;
}

// Two copies of a mark, at rows a and b: found however the rows are cut, and a changed bit of them is seen.
static void marks(std::vector<uint16_t> rows, int n, int W, int D, const int * a, const int * b, int plane, int page) {
    kvq_mark_rows_view v = { rows.data(), n, W, D };
    const auto sum_of = [&](const std::vector<uint64_t> & h) { return kvq_mark_sum(h.data(), n, 3, true); };
    kvq_mark_clear(v, a, plane);
    kvq_mark_clear(v, b, plane);
    kvq_mark m;
    m.sum = sum_of(in_calls(rows, n, W, D, n, n).hashes);
    m.page_cells = (uint16_t) page;
    m.n = n;
    m.row = a[0];
    kvq_mark_put(v, a, plane, m);
    m.row = b[0];
    kvq_mark_put(v, b, plane, m);
    for (int first = 0; first <= n; first++) {
        for (int second = first; second <= n; second++) {
            const kvq_mark_stream got = in_calls(rows, n, W, D, first, second);
            CHECK(got.found.size() == 2 && sum_of(got.hashes) == m.sum, "cut at %d and %d: %zu marks", first, second,
                got.found.size());
            for (const kvq_mark_found & f : got.found) {
                CHECK(f.at == f.mark.row, "cut at %d and %d: a mark of row %d in row %d", first, second, f.mark.row,
                    f.at);
            }
        }
    }
    for (size_t bit = (size_t) uniform(0, 6); bit < 16 * rows.size(); bit += 7) { // each place in a value
        rows[bit / 16] ^= (uint16_t) (1 << bit % 16);
        const int cut = uniform(0, n);
        const kvq_mark_stream got = in_calls(rows, n, W, D, cut, uniform(cut, n));
        CHECK(!got.found.empty() && sum_of(got.hashes) != m.sum, "bit %zu is not seen", bit);
        rows[bit / 16] ^= (uint16_t) (1 << bit % 16);
    }
}

static void marks() {
    const int n = 64, W = 128, D = 64;
    std::vector<uint16_t> rows((size_t) n * W);
    for (uint16_t & x : rows) { x = (uint16_t) uniform(0x2c00, 0x3bff); }
    const int a[3] = { 0, 1, 2 }, b[3] = { 29, 30, 31 };
    marks(rows, n, W, D, a, b, 2, 32);
    const int gone[7] = { 3, 4, 17, 18, 40, 41, 60 }; // evicted rows, the last of which carries nothing
    for (const int r : gone) { std::fill_n(&rows[(size_t) r * W], D, KVQ_EVICTED); }
    marks(rows, n, W, D, gone, gone + 3, 0, 0);
}

// zlib's sum of a known text, and sums of parts put together.
static void check_sums() {
    CHECK(kvq_crc32(0, "123456789", 9) == 0xcbf43926u, "CRC-32 of a known text");
    std::vector<uint8_t> bytes((3 << 20) + 77);
    for (uint8_t & x : bytes) { x = (uint8_t) rng(); }
    for (const size_t nb : { (size_t) 0, (size_t) 5, (size_t) 1 << 20, ((size_t) 1 << 20) + 1, bytes.size() }) {
        CHECK(
            kvq_crc32_parts(bytes.data(), nb, 2) == kvq_crc32(0, bytes.data(), nb), "CRC-32 of %zu bytes in parts", nb);
    }
}

int main(int argc, char ** argv) {
    check_sums();
    const int steps = argc > 1 ? atoi(argv[1]) : 1500;
    const unsigned seed = argc > 2 ? (unsigned) atoi(argv[2]) : 1;
    const config configs[] = {
        { "kivi", "window=32", 2, 64, 256 },
        { "kivi", "bits=4,group=64,scales=u8,sinks=4,window=64", 1, 80, 256 },
        { "xquant", "kq=2,vq=0,km=0,vm=0,window=32", 2, 64, 256 },
        { "higgs", "", 2, 64, 256 },
        { "zipcache", "interval=64,window=0", 2, 64, 256 },
        { "specache", "window=32", 2, 64, 256 },
        { "specache", "near=aqua,bits=1,window=32", 2, 64, 256 },
        { "specache", "near=higgs,far=q8,window=32", 2, 64, 256 },
        { "specache", "preset=paper1,far=q4", 1, 128, 256 },
        { "minikv", "window=32", 2, 64, 256 },
        { "minikv", "hh=0.1,rw=0.1,bits=4,group=32,window=32,scales=f16", 2, 64, 320 },
        { "zipcache", "interval=64,salient=0.5,keep=0.5,window=32", 2, 64, 256 },
        { "aqua", "predictor=bias,window=32", 2, 64, 256 },
        { "aqua", "predictor=none,window=32,sinks=0,bits=1", 1, 128, 256 },
        { "aqua", "predictor=k,window=32", 2, 64, 256 },
        { "aqua", "predictor=full,window=32", 2, 64, 256 },
        { "aqua", "predictor=fold,window=32", 2, 64, 256 },
        { "auto", "level=4,means=on,window=32", 2, 64, 256 },
        { "auto", "level=9,means=off,window=32", 2, 64, 256 },
        { "auto", "level=5,means=on,pairs=neox,window=32", 2, 64, 256 },
        { "auto", "level=9,means=on,pairs=norm,window=32", 2, 64, 256 },
        { "auto", "level=4,means=on,window=auto", 2, 64, 512 },
        { "xquant", "kq=2,vq=0,km=0,vm=0,window=auto", 2, 64, 512 },
    };
    rng.seed(seed);
    marks();
    for (const char * opts : { "predictor=bias,window=32", "predictor=k,window=32" }) {
        far_positions({ "aqua", opts, 2, 64, 256 }, BOUND);
    }
    far_positions({ "aqua", "predictor=bias,window=32", 2, 64, 1 << 18 }, 1 << 21);
    far_positions({ "specache", "near=aqua,window=32", 2, 64, 256 }, BOUND);
    for (const config & c : configs) {
        if (argc <= 3 || !strcmp(argv[3], c.method)) { run(c, steps, seed); }
    }
    return 0;
}

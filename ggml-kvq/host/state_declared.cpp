// States of a cache that is declared in a type smaller than f16. A range of rows has as many bytes as llama.cpp's own
// rows of that type would take. Blocks fill it, and rows that are in no block with as many bits as there is room for
// (store/state_blocks.h). Where not even blocks and their head fit - a range of a few rows -, each row stands by itself
// with a sum of its own (store/small_rows.h). Rows of zeros are cells that llama.cpp clears.
#include "state_lanes.h"
#include "store/small_rows.h"

#include "base/parallel.h"
#include "engine/tags.h"

// of a tensor, so that a row of another one is seen
static uint32_t seed_of(const kvq_target & t) {
    return (uint32_t) (2 * t.layer->d.il + t.value) << 16 | t.cache->model_mark();
}

static bool has_positions(const row_lanes & lanes) { return lanes.lane[0]->n_position_lists() > 0; }

static bool is_zero(const uint8_t * data, size_t nb) { return !nb || (!data[0] && !memcmp(data, data + 1, nb - 1)); }

// Bytes that are no whole rows have no meaning here; a program that asks for them hears so and computes no more.
static void refuse_part(const kvq_target & t) {
    kvq_report_error("the program reads or writes parts of rows of the " + kvq_side_of_layer(t) +
        ", which are declared " + t.layer->d.declared[t.value].name + ": drop -ctk and -ctv");
    t.cache->refused = true;
}

void kvq_read_declared(const kvq_target & t, const row_lanes & lanes, const row_range & r, uint8_t * data) {
    if (!r.whole()) {
        memset(data, 0, (size_t) (r.row1 - r.row0) * lanes.nb_row - r.head - r.tail);
        refuse_part(t);
        return;
    }
    const int n_threads = threads_of(t);
    each_stream(lanes.layout(), r.row0, r.row1, [&](int s, int cell, int n, int64_t row) {
        uint8_t * const to = data + (size_t) (row - r.row0) * lanes.nb_row;
        if (kvq_blocks_leave(t, lanes, s, cell, n, to)) { return; }
        const size_t W = (size_t) lanes.row;
        std::vector<uint16_t> rows((size_t) n * W);
        lanes.read(s, cell, n, rows.data(), n_threads);
        const bool tagged = has_positions(lanes);
        const kvq_lane_layout & l = lanes.layout();
        const uint32_t seed = seed_of(t);
        const auto put = [&](int64_t i) {
            const uint16_t * const from = &rows[(size_t) i * W];
            const int32_t pos = tagged ? kvq_tag_get(l, from, (size_t) l.codec.head_size) : -1;
            kvq_lone_put(from, lanes.row, lanes.nb_row, tagged ? &pos : nullptr, seed, to + (size_t) i * lanes.nb_row);
        };
        kvq_parallel_for(n, n_threads, put, 32);
    });
}

// Lone rows, or zeros: f16 rows of them; "" or why they are refused.
static std::string take_lone(
    const kvq_target & t, const row_lanes & lanes, int n, const uint8_t * data, std::vector<uint16_t> & rows) {
    const size_t W = (size_t) lanes.row, nb = lanes.nb_row;
    const bool tagged = has_positions(lanes);
    const kvq_lane_layout & l = lanes.layout();
    const uint32_t seed = seed_of(t);
    rows.assign((size_t) n * W, 0);
    for (int i = 0; i < n; i++) {
        if (is_zero(data + (size_t) i * nb, nb)) { continue; }
        uint16_t * const row = &rows[(size_t) i * W];
        int32_t pos = -1;
        if (!kvq_lone_get(data + (size_t) i * nb, lanes.row, nb, tagged ? &pos : nullptr, seed, row)) {
            return "the saved state's " + kvq_side_of_layer(t) + " are " + t.layer->d.declared[t.value].name +
                " rows of llama.cpp's own cache or of another model or method, or are damaged: restore it where it was "
                "saved, or save it again";
        }
        if (tagged) { kvq_tag_put(l, row, (size_t) l.codec.head_size, pos); }
    }
    return lanes.refuses(n, rows.data(), threads_of(t));
}

void kvq_write_declared(
    const kvq_target & t, const row_lanes & lanes, const row_range & r, const uint8_t * data, bool may_throw) {
    const size_t nb = (size_t) (r.row1 - r.row0) * lanes.nb_row - r.head - r.tail;
    const int n_threads = threads_of(t);
    kvq_arrivals & in = t.cache->arrivals;
    std::vector<uint16_t> rows;
    const bool awaited = !in.blob.empty() && in.layer == t.layer && in.value == t.value; // zeros behind blocks
    if (!awaited && is_zero(data, nb)) { // llama.cpp clears cells in pieces that are no whole rows
        if (in.damage.empty()) { in.reset(); }
        each_stream(lanes.layout(), r.row0, r.row1, [&](int s, int cell, int n, int64_t) {
            rows.assign((size_t) n * (size_t) lanes.row, 0);
            lanes.restore(s, cell, n, rows.data(), n_threads);
        });
        return;
    }
    if (!r.whole()) {
        refuse_part(t);
        return;
    }
    const bool staged = in.data == data;
    std::string why = in.damage;
    each_stream(lanes.layout(), r.row0, r.row1, [&](int s, int cell, int n, int64_t row) {
        const uint8_t * const from = data + (size_t) (row - r.row0) * lanes.nb_row;
        why = why.empty() ? kvq_tensor_begins(t, s) : why;
        for (int at = 0, n_taken; at < n && why.empty(); at += n_taken) {
            const uint8_t * const next = from + (size_t) at * lanes.nb_row;
            n_taken = kvq_blocks_come(t, lanes, s, cell + at, n - at, next, why);
            if (!n_taken) { // lone rows, until blocks begin
                n_taken = 1;
                while (at + n_taken < n && !kvq_blob_begins(next + (size_t) n_taken * lanes.nb_row)) { n_taken++; }
                why = take_lone(t, lanes, n_taken, next, rows);
                if (why.empty()) { lanes.restore(s, cell + at, n_taken, rows.data(), n_threads); }
            }
            in.n += n_taken;
        }
    });
    in.data = data;
    if (!why.empty()) { kvq_refuse_state(t, why, staged, may_throw); }
}

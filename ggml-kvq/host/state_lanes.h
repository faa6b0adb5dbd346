// Rows of a cache tensor: which rows a range of bytes is, and the lanes that hold them.
#pragma once

#include "backend.h"
#include "state.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <thread>

// Offsets are nominal: byte = nb_row*(stream*n_cells + cell), of the declared type. Ranges need not be whole rows.

struct row_range {
    int64_t row0, row1;
    size_t head, tail;
    bool whole() const { return !head && !tail; }
};

static inline row_range rows_of(size_t offset, size_t size, size_t nb_row) {
    row_range r;
    r.row0 = (int64_t) (offset / nb_row);
    r.row1 = (int64_t) ((offset + size + nb_row - 1) / nb_row);
    r.head = offset - (size_t) r.row0 * nb_row;
    r.tail = (size_t) r.row1 * nb_row - (offset + size);
    return r;
}

static inline void each_stream(const kvq_lane_layout & l, int64_t row0, int64_t row1,
    const std::function<void(int stream, int cell, int n, int64_t row)> & fn) {
    const int64_t n_cells = l.n_cells;
    for (int64_t row = row0; row < row1;) {
        const int64_t end = std::min((row / n_cells + 1) * n_cells, row1);
        fn((int) (row / n_cells), (int) (row % n_cells), (int) (end - row), row);
        row = end;
    }
}

// The lanes that hold a row of a cache tensor side by side.
struct row_lanes {
    kvq_lane * lane[2];
    int n = 0, width[2], row = 0; // channels
    explicit row_lanes(const kvq_target & t) {
        for (const kvq_operand & o : t.layer->operands) {
            if (o.of_values != t.value) { continue; }
            lane[n] = o.lane;
            width[n++] = o.n;
            row += o.n;
        }
        nb_row = t.layer->d.declared[t.value].row(row);
    }
    size_t nb_row = 0; // nominal bytes
    const kvq_lane_layout & layout() const { return lane[0]->layout(); }

    // channels of lane i out of rows [n_rows][row], or into them
    void part(int i, int n_rows, const uint16_t * rows, uint16_t * out) const {
        const int at = i ? width[0] : 0;
        for (int t = 0; t < n_rows; t++) {
            memcpy(out + (size_t) t * width[i], rows + (size_t) t * row + at, 2 * (size_t) width[i]);
        }
    }
    void read(int stream, int cell, int n_rows, uint16_t * rows, int n_threads) const {
        std::vector<uint16_t> one;
        for (int i = 0, at = 0; i < n; at += width[i++]) {
            if (n == 1) {
                lane[i]->read(stream, cell, n_rows, rows, n_threads);
                continue;
            }
            one.resize((size_t) n_rows * width[i]);
            lane[i]->read(stream, cell, n_rows, one.data(), n_threads);
            for (int t = 0; t < n_rows; t++) {
                memcpy(rows + (size_t) t * row + at, &one[(size_t) t * width[i]], 2 * (size_t) width[i]);
            }
        }
    }
    // why rows cannot be restored, "" when they can
    std::string refuses(int n_rows, const uint16_t * rows, int n_threads) const {
        if (n == 1) { return lane[0]->refuses(n_rows, rows, n_threads); }
        std::vector<uint16_t> one;
        std::string why;
        for (int i = 0; i < n && why.empty(); i++) {
            one.resize((size_t) n_rows * width[i]);
            part(i, n_rows, rows, one.data());
            why = lane[i]->refuses(n_rows, one.data());
        }
        return why;
    }
    // v: the same rows with what of them was edited, NULL: nothing
    void restore(int stream, int cell, int n_rows, const uint16_t * rows, int n_threads,
        const kvq_mark_rows_view * v = nullptr) const {
        std::vector<uint16_t> one;
        for (int i = 0; i < n; i++) {
            if (n == 1) {
                lane[i]->restore(stream, cell, n_rows, rows, n_threads, v);
                continue;
            }
            one.resize((size_t) n_rows * width[i]);
            part(i, n_rows, rows, one.data());
            lane[i]->restore(stream, cell, n_rows, one.data(), n_threads);
        }
    }
    // Do rows on their way in have to be ours, to be changed in place?
    bool wants_own() const { return n > 1 || layout().evicts; }
};

// What the host's part of a state may use: llama.cpp tells no number here, the last graph had one.
static inline int threads_of(const kvq_target & t) {
    const int here = (int) std::thread::hardware_concurrency() / 2;
    return std::max(t.cache->n_threads, t.cache->device.is_host() ? 1 : std::min(here, 16));
}

// A view that came from another machine alone, not in a graph, has lost its parent: its address tells where it starts.
static inline size_t root_offset(const kvq_target & t, const ggml_tensor * x, size_t offset) {
    const char * base = t.layer->base[t.value];
    return offset + (base ? (size_t) ((const char *) x->data - base) : x->view_src ? x->view_offs : 0);
}

// state.cpp. Rows leave as blocks, all of them in `to`; false: they do not.
bool kvq_blocks_leave(const kvq_target & t, const row_lanes & lanes, int s, int cell, int n, uint8_t * to);
// Of n rows on their way in, how many belong to blocks; 0: these are rows. why: they are refused
int kvq_blocks_come(
    const kvq_target & t, const row_lanes & lanes, int s, int cell, int n, const uint8_t * rows, std::string & why);
std::string kvq_tensor_begins(const kvq_target & t, int s); // rows of stream s come: why they cannot
std::string kvq_side_of_layer(const kvq_target & t);        // "keys of layer 3"
void kvq_refuse_state(const kvq_target & t, const std::string & why, bool staged, bool may_throw);

// state_declared.cpp: the same of a cache that is declared in another type than f16
void kvq_read_declared(const kvq_target & t, const row_lanes & lanes, const row_range & r, uint8_t * data);
void kvq_write_declared(
    const kvq_target & t, const row_lanes & lanes, const row_range & r, const uint8_t * data, bool may_throw);

// The keys, or the values, of one layer: cells in, spans out. Knows no ggml op and no method; what a method adds are
// policies (policy.h). The life of a page:
//
//            write                     commit: complete, and older than the window
//   EMPTY ----------->  OPEN (f16 tile) ------------------------------------> SEALED (block of the method's codec)
//     ^                  |   ^   ^                                              |
//     |  clear           |   |   +---- write into it: decoded (reopened.h), sealed again later
//     +------------------+   +-------- restore of rows that are no saved image
//   shift       SEALED: decoded, rotated, sealed at once      OPEN: rotated in place
//   copy        state and bytes as they are
//   save        SEALED: image (types.h)                       OPEN: rows
//   restore     image -> SEALED, identical block              rows -> OPEN
//
// Open pages live in the lane's own frames (the window, counted in its bytes); pages of the ubatch being written that
// do not fit there live in scratch frames until commit. Attention inside the ubatch therefore sees exact values. The
// store does not learn that a cell was freed: stale cells are masked by the caller and overwritten later. A lane whose
// window fills what is left (pool.h) learns of the cells behind the last one in use (free_from).
#pragma once

#include "policy.h"
#include "pool.h"
#include "reopened.h"
#include "spans.h"

#include <memory>

struct kvq_counters {
    uint64_t n_sealed = 0, n_reopened = 0, n_forced = 0;
    uint64_t n_placed = 0; // pages that came out of a state as they were sealed
};

constexpr int KVQ_RESTORE_PAGES = 32; // of a state that is restored, in scratch
constexpr int KVQ_ENTER_PAGES = 8;    // whose rows are restored in one piece

class kvq_lane;
struct kvq_mark_rows_view;

// Bytes of pages [first, last] of a stream where the host can read them: the lane's own, or copies.
struct kvq_host_pages {
    struct page {
        const uint8_t *codes, *params; // of a sealed page, else NULL
        const uint16_t * frame;        // of an open one
    };
    const int first;
    std::vector<page> at;
    kvq_host_pages(const kvq_lane & x, int s, int first, int last);

private:
    struct piece {
        const void * p;
        size_t nb;
    };
    using bytes = std::unique_ptr<uint8_t[]>; // not filled with zeros first, as a vector would be
    static void fetch(kvq_space & space, const std::vector<piece> & from, bytes & to);
    bytes codes_here, params_here, frames_here;
};

// Blocks on their way to a lane: they go together with flush().
class kvq_block_puts {
public:
    kvq_block_puts(kvq_space & space, int n_threads) : space(space), n_threads(n_threads) {}
    void add(uint8_t * to, const uint8_t * from, size_t nb) { waiting.push_back({ to, from, nb }); } // `from` stays
    void flush();

private:
    kvq_space & space;
    int n_threads;
    std::vector<kvq_copy_job> waiting;
};

struct kvq_block_bytes {
    const uint8_t *codes, *params;
    size_t nb_codes, nb_params;
};

class kvq_lane {
public:
    // codes_of: the lane whose codes are adopted, NULL unless layout.shares_codes
    kvq_lane(const kvq_lane_layout & layout, bool value, kvq_lane * codes_of, kvq_span_table * spans,
        kvq_scratch * scratch, kvq_counters * counters, kvq_device & device);
    ~kvq_lane();
    kvq_lane(const kvq_lane &) = delete;
    kvq_lane & operator=(const kvq_lane &) = delete;

    bool ok() const { return memory != nullptr; } // false: out of memory
    bool lacks_host() const { return nb_on_host && !host_memory; }
    const kvq_lane_layout & layout() const { return l; }
    bool is_value() const { return value; }
    void add(kvq_policy * p) { policies.push_back(p); } // before anything is written

    // rows: f32, row i goes to global cell idx[i] = stream*n_cells + cell
    // pos: position of every row, for policies that ask for them
    void write(int64_t n, const int64_t * idx, const float * rows, size_t row_stride, int n_threads,
        const int32_t * pos = nullptr);
    // Seals what is due and moves what stays open into the lane's own frames. After attention of the ubatch.
    void commit(int n_threads);
    bool dirty() const { return is_dirty; }

    // f16 rows [n][n_head*head_size] of one stream, as a saved state carries them
    void read(int stream, int cell, int n, uint16_t * rows, int n_threads = 1) const;
    // Why rows, or a block by itself, cannot be restored here, "" when they can: their positions are no cache's. Tables
    // of rotary embeddings grow with the largest position, so one that is made up would cost hundreds of MB. Asked
    // before anything is restored.
    std::string refuses(int n, const uint16_t * rows, int n_threads = 1) const;
    std::string refuses(const kvq_page_image & image) const;
    // v: the same rows, of which some were edited; NULL: no row was edited
    void restore(
        int stream, int cell, int n, const uint16_t * rows, int n_threads, const kvq_mark_rows_view * v = nullptr);
    // f16 rows into open pages, without a look at whether they are an image
    void enter_rows(int stream, int64_t n, const int64_t * idx, const uint16_t * rows, int n_threads);

    // Of a sealed page: the block as it is, and may its rows carry a mark? bare: without its bits
    kvq_page_image block_of(int s, int p) const;
    kvq_page_image positions_of(int s, int p) const; // what goes with it
    bool is_marked_image(int s, int p, const uint16_t * bare, const uint16_t * marked) const;
    bool blocks_travel() const; // do blocks mean the same in another cache?
    // image: its positions. False: the page cannot hold it and is unchanged
    bool place_block(
        int s, int p, const kvq_page_image & image, const kvq_block_bytes & block, kvq_block_puts * later = nullptr);
    bool leaves_out() const { return imager(); } // do sealed pages lack something?
    // Rows of a saved block that lacks something, as a state has them, whatever page it was. False: they rest on other
    // rows.
    bool rows_of_block(
        const kvq_page_image & image, const uint8_t * codes, const uint8_t * params, uint16_t * rows) const {
        return imager() && imager()->rows_of_block(*this, image, codes, params, rows);
    }
    int n_position_lists() const { return imager() ? imager()->n_position_lists(*this) : 0; } // of a block by itself
    int mark_plane() const; // the mantissa bit that marks take, -1: the lane has no such bit

    void clear();
    void drop_from(int s, int cell); // open cells from `cell` on
    // Cells from `cell` on are free: where the window fills what is left, their pages become empty.
    void free_from(int s, int cell);
    void copy_stream(int from, int to);

    // Calls fn(cell, head, row f16 of one head) for every written cell of `stream` whose page has any(cell) true.
    void edit(int stream, const kvq_any_cell & any, const kvq_edit_row & fn);

    kvq_page_state state(int stream, int page) const { return (kvq_page_state) info(stream, page).state; }
    bool is_plain(int stream, int page) const;                            // an open page: all of its cells are its own
    int first_written(int stream) const { return streams[stream].first; } // cell of the first row of the last write

    // --- for policies

    kvq_page_info & info(int s, int p) { return pages[(size_t) s * l.n_pages + p]; }
    const kvq_page_info & info(int s, int p) const { return pages[(size_t) s * l.n_pages + p]; }
    // bit per cell: ever written
    uint8_t * valid(int s, int p) { return valid_bits.data() + ((size_t) s * l.n_pages + p) * (l.page_cells / 8); }
    const uint8_t * valid(int s, int p) const {
        return valid_bits.data() + ((size_t) s * l.n_pages + p) * (l.page_cells / 8);
    }
    bool is_valid(int s, int p, int t) const { return valid(s, p)[t / 8] >> t % 8 & 1; }
    const std::vector<int> & open_pages(int s) const { return streams[(size_t) s].open; }
    uint64_t clock(int s) const { return streams[(size_t) s].clock; } // rows written so far
    uint8_t * codes_at(int s, int p, int h) const;
    uint8_t * params_at(int s, int p, int h) const;
    const kvq_page * spans_on(int s, int p) const { return spans->on(device) + (size_t) s * spans->n_pages + p; }
    void reopen(int s, int p) {
        open_page(s, p, true);
        is_dirty = true;
    }
    void reopen_and_wait(int s, int p) { // no commit of this lane before its next write
        reopen(s, p);
        waiting = true;
    }
    void seal(int s, const std::vector<int> & due, int n_threads);
    void empty_page(int s, int p);
    void refresh_span(int s, int p); // its block lies elsewhere
    // of a sealed page, where a policy has its rows as they came: they go to a tile; a tile becomes those rows
    bool recall_page(int s, int p, uint16_t * tile) const;
    void keep_page(int s, int p, uint16_t * tile);
    void encode_page(int s, int p, uint16_t * tile);
    void decode_page(int s, int p, uint16_t * tile) const;
    bool take_image(int s, int p, const uint16_t * rows, bool marked, kvq_page_image & out) const;
    bool take_head( // adopted: codes of that head, NULL: its own
        int h, const uint16_t * rows, bool marked, const uint8_t * adopted, uint8_t * codes, uint8_t * params) const;
    // host view of device bytes: the bytes themselves, or a copy in `temp`
    template <typename T> T * view(const void * p, size_t nb, std::vector<uint8_t> & temp) const {
        if (device.is_host() || !p) { return (T *) p; }
        temp.resize(nb);
        device.get(temp.data(), p, nb);
        return (T *) temp.data();
    }

    kvq_device & device;
    kvq_scratch * const scratch;
    kvq_counters * const counters;

private:
    struct stream_state {
        uint64_t clock = 0, committed = 0; // now, at the last commit
        bool may_seal_ahead = false;       // a graph has written since the last commit
        bool restored = false;             // and not read since: which cells are free is not known
        int first = 0, last = -1;          // cells of the first and the last row of the last write
        std::vector<int> open;             // open pages
        std::vector<int> free_frames;      // own frames not in use
        std::vector<int> free_blocks;      // of a lane whose blocks move
    };

    // keep: what it holds is decoded into the frame, an empty one reads as zeros; else all of it is overwritten
    void open_page(int s, int p, bool keep);
    void take_frame(int s, int p);
    void drop_frame(int s, int p);
    void set_state(int s, int p, kvq_page_state state);
    // stored block of a page, -1: the page has no block
    int store_of(int s, int p) const { return l.moves || l.pooled ? stored[(size_t) s * l.n_pages + p] : p; }
    // pages that may still seal
    int n_may_seal(int s) const { return l.moves ? (int) streams[s].free_blocks.size() : l.n_pages; }
    void take_block(int s, int p);
    void drop_block(int s, int p);
    uint16_t * frame_at(int s, int i) const; // own frame i
    int take_own_frame(int s, int p);        // -1: all frames are in use
    void move_frame(int s, int p, int i);    // to own frame i, -1: to scratch
    // of a pool (lane_pool.cpp)
    void clear_way(int s, int i); // frames where block i goes make room
    void close_up(int s);         // the last blocks move into the first holes until a frame is free
    std::vector<int> due_pages_of_pool(int s, std::vector<int> & open) const;
    kvq_page_block block(int s, int p, uint16_t * tile) const; // tile: the device's memory
    std::vector<int> due_pages(int s);
    void commit_stream(int s, int n_threads);
    void bring_home(int s);
    bool take_any_image(int s, int p, const uint16_t * rows, kvq_page_image & image) const;
    std::vector<uint8_t> find_no_cells(
        int s, int cell, int n, const uint16_t * rows, const kvq_mark_rows_view * v) const;
    void read_page(int s, int p, const kvq_host_pages::page & page, int from, int to, uint16_t * rows) const;
    // pages of these cells open; where the rows go
    std::vector<uint16_t *> open_cells(int64_t n, const int64_t * idx);
    struct row_run;
    std::vector<row_run> runs_of(int64_t n, const int64_t * idx) const;
    bool may_place(int s, int p) const; // may this page be sealed now?
    int32_t position_bound() const;     // of policies, 0: rows carry no positions
    std::string refuses_position(int32_t pos) const;
    const kvq_policy * imager() const; // who makes images of sealed pages, NULL: types.h does
    void place(int s, int p, const kvq_page_image & image, const uint8_t * codes, const uint8_t * params,
        kvq_block_puts * later);

    kvq_lane_layout l;
    bool value;
    kvq_lane * codes_of;
    kvq_span_table * spans;
    std::vector<kvq_policy *> policies;

    uint8_t *memory = nullptr, *host_memory = nullptr; // codes, params, frames; place=host: codes and params apart
    size_t nb_memory = 0, nb_on_host = 0;
    uint8_t *codes = nullptr, *params = nullptr, *frames = nullptr;

    std::vector<kvq_page_info> pages;
    std::vector<int32_t> stored; // page -> block, when blocks move
    std::vector<uint8_t> valid_bits;
    std::vector<stream_state> streams;
    std::vector<kvq_pool> pools; // by stream, when pooled
    kvq_reopened reopened;
    bool is_dirty = false;
    // The lane whose codes we adopt has this ubatch's rows, we have not: sealing now would seal pages that are about to
    // be written.
    bool waiting = false;
};

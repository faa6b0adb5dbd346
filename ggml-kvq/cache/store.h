// The page store: cells in, spans out. Knows no ggml op and no device.
//
// A page is `page_cells` neighbouring cells of one stream in one lane. Its life:
//
//            write                     commit: complete, and older than the window
//   EMPTY ----------->  OPEN (f16 tile) ------------------------------------> SEALED (block of the method's codec)
//     ^                  |   ^   ^                                              |
//     |  clear           |   |   +---- write into it: decoded, sealed again later
//     +------------------+   +-------- restore of rows that are no saved image
//   shift       SEALED: decoded, rotated, sealed at once      OPEN: rotated in place
//   copy        state and bytes as they are
//   save        SEALED: image (types.h)                       OPEN: rows
//   restore     image -> SEALED, identical block              rows -> OPEN
//
// Open pages live in the lane's own frames (the window, counted in its bytes); pages of the ubatch being written that
// do not fit there live in scratch frames until commit. Attention inside the ubatch therefore sees exact values. The
// store never learns that a cell was freed: stale cells are masked by the caller and overwritten later.
#pragma once

#include "device.h"
#include "saliency.h"
#include "slots.h"
#include "transform.h"

#include <functional>
#include <map>
#include <memory>
#include <vector>

enum kvq_page_state : uint8_t { KVQ_PAGE_EMPTY = 0, KVQ_PAGE_OPEN = 1, KVQ_PAGE_SEALED = 2 };

// f16 tiles handed out by size, kept for reuse.
class kvq_scratch {
public:
    explicit kvq_scratch(kvq_device & device = kvq_cpu_device()) : device(device) {}
    ~kvq_scratch();
    kvq_scratch(const kvq_scratch &) = delete;
    kvq_scratch & operator=(const kvq_scratch &) = delete;
    uint16_t * take(size_t nb);
    void give(uint16_t * p, size_t nb);
    size_t bytes() const { return total; }

private:
    kvq_device & device;
    std::vector<std::pair<void *, size_t>> blocks;
    std::map<size_t, std::vector<uint16_t *>> idle;
    std::map<size_t, size_t> made; // tiles by size
    size_t total = 0;
};

struct kvq_counters {
    uint64_t n_sealed = 0, n_reopened = 0, n_forced = 0;
};

// Spans of one layer, kept up to date by its two lanes: [stream][page].
struct kvq_span_table {
    int n_pages = 0;
    std::vector<kvq_page> spans;
    std::vector<uint8_t> k_state, v_state;
    size_t changed0 = 0, changed1 = 0; // spans [changed0, changed1) differ from the device's copy
    bool packed = false;               // the device's copy of a stream has only spans that hold something, in front
    int n_recorded = 0;                // spans that a recorded step reads of a packed copy

    kvq_span_table() {}
    ~kvq_span_table();
    kvq_span_table(const kvq_span_table &) = delete;
    kvq_span_table & operator=(const kvq_span_table &) = delete;
    void init(int n_stream, int n_pages, int page_cells);
    void changed(size_t at);
    int n_used() const;                       // of a packed copy, the stream that has most
    const kvq_page * on(kvq_device & device); // the spans where the device reads them
private:
    kvq_device * device = nullptr;
    kvq_page * copy = nullptr;
    size_t n_copy = 0;
    std::vector<int> n_packed; // by stream
};

class kvq_chain;

// A sealed page by itself. codes: empty where they are another lane's; pos, was: positions now and when sealed, where
// the lane keeps them.
struct kvq_page_image {
    std::vector<uint8_t> codes, params;
    std::vector<int32_t> pos, was;
};

class kvq_lane {
public:
    // owner: the lane whose codes are adopted, NULL unless layout.shares_codes
    kvq_lane(const kvq_lane_layout & layout, bool value, kvq_lane * owner, kvq_span_table * spans,
        kvq_scratch * scratch, kvq_counters * counters, kvq_device & device = kvq_cpu_device());
    ~kvq_lane();
    kvq_lane(const kvq_lane &) = delete;
    kvq_lane & operator=(const kvq_lane &) = delete;

    bool ok() const { return memory != nullptr; } // false: out of memory
    const kvq_lane_layout & layout() const { return l; }

    // rows: f32, row i goes to global cell idx[i] = stream*n_cells + cell
    // pos: position of every row, for lanes whose transform has a rotor
    void write(int64_t n, const int64_t * idx, const float * rows, size_t row_stride, int n_threads,
        const int32_t * pos = nullptr);
    // Seals what is due and moves what stays open into the lane's own frames. After attention of the ubatch.
    void commit(int n_threads);
    bool dirty() const { return is_dirty; }

    // f16 rows [n][n_head*head_size] of one stream, as a saved state carries them
    void read(int stream, int cell, int n, uint16_t * rows) const;
    void restore(int stream, int cell, int n, const uint16_t * rows, int n_threads);

    // Of a sealed page: the block as it is, and may the rows of its image carry a mark, whose bits they have?
    kvq_page_image block_of(int s, int p) const;
    bool is_marked_image(int s, int p, const uint16_t * rows) const;
    // do blocks mean the same in another cache?
    bool blocks_travel() const { return !slots && !l.is_f16() && !(x.rotor && x.rotor->first()); }
    bool place_block(int s, int p, const kvq_page_image & image); // false: the page cannot hold it, nothing changed
    int mark_plane() const;                                       // the mantissa bit that marks take, -1: there is none

    void clear();
    void drop_from(int s, int cell); // open cells from `cell` on
    void copy_stream(int from, int to);

    // Calls edit(cell, row f16 of one head) for every written cell of `stream` whose page has any(cell) true.
    void edit(int stream, const std::function<bool(int cell)> & any,
        const std::function<void(int cell, int head, uint16_t * row)> & fn);

    // What sealed pages leave out; before anything is written, the rotor before the first restored or written key.
    void set_transform(const kvq_transform & t) { x = t; }
    const kvq_transform & transform() const { return x; }
    // Who chooses the salient cells of pages about to seal; shared by the two lanes of a layer.
    void set_saliency(kvq_saliency * s) { saliency = s; }
    // Where sealed cells go when they are not kept page by page; shared by the two lanes of a layer.
    void set_slots(kvq_slots * s) { slots = s; }
    // an open page: all of its cells are its own
    bool is_plain(int stream, int page) const { return !slots || slots->is_plain(stream, page); }
    int first_written(int stream) const { return streams[stream].first; } // cell of the first row of the last write
    // Open rows of a lane with a rotor: fn as in edit(), and the position moves by by[cell]. Sealed pages need their
    // positions moved only.
    void shift_open(int stream, const int32_t * by, const std::function<void(int cell, int head, uint16_t * row)> & fn);

    kvq_page_state state(int stream, int page) const { return (kvq_page_state) info(stream, page).state; }

    // For cache/chain.h.
    const kvq_page * spans_on(int s, int p) const { return spans->on(device) + (size_t) s * spans->n_pages + p; }
    kvq_row_turn turn_of(int s, int p) const; // where memory is not the host's
    uint8_t * codes_at(int s, int p, int h) const;
    uint8_t * params_at(int s, int p, int h) const;
    int32_t * positions_at(int s, int p) const {
        return x.rotor ? x.positions + ((size_t) s * l.n_pages + p) * l.page_cells : nullptr;
    }
    int32_t * sealed_at(int s, int p) const {
        return x.keeps_turn() ? x.sealed + ((size_t) s * l.n_pages + p) * l.page_cells : nullptr;
    }
    // rows of an open page without means and rotary embedding, f32 [page_cells][stride]; zeros for an empty one
    void plain_rows(int s, int p, float * out, size_t stride) const;
    void reopen(int s, int p) {
        open_page(s, p, true);
        is_dirty = true;
    }

private:
    friend class kvq_slots;
    struct stream_state {
        uint64_t clock = 0;
        int first = 0, last = -1;     // cells of the first and the last row of the last write
        std::vector<int> open;        // open pages
        std::vector<int> free_frames; // own frames not in use
        std::vector<int> free_blocks; // of a lane whose blocks move
    };

    kvq_page_info & info(int s, int p) { return pages[(size_t) s * l.n_pages + p]; }
    const kvq_page_info & info(int s, int p) const { return pages[(size_t) s * l.n_pages + p]; }
    uint8_t * valid(int s, int p) { return valid_bits.data() + ((size_t) s * l.n_pages + p) * (l.page_cells / 8); }
    const uint8_t * valid(int s, int p) const {
        return valid_bits.data() + ((size_t) s * l.n_pages + p) * (l.page_cells / 8);
    }
    const kvq_lane * code_lane() const { return owner ? owner : this; }

    void open_page(int s, int p, bool keep); // keep: what it holds is decoded into the frame
    void take_frame(int s, int p);
    void drop_frame(int s, int p);
    void set_state(int s, int p, kvq_page_state state);
    // tile: the device's memory
    // stored block of a page, -1: none
    int store_of(int s, int p) const { return l.moves ? stored[(size_t) s * l.n_pages + p] : p; }
    // pages that may still seal
    int room(int s) const { return l.moves ? (int) streams[s].free_blocks.size() : l.n_pages; }
    void take_block(int s, int p);
    void drop_block(int s, int p);
    kvq_page_block block(int s, int p, uint16_t * tile) const;
    void encode_page(int s, int p, uint16_t * tile);
    void decode_page(int s, int p, uint16_t * tile) const;
    // host view of device bytes: the bytes themselves, or a copy in `temp`
    template <typename T> T * view(const void * p, size_t nb, std::vector<uint8_t> & temp) const {
        if (device.is_host() || !p) { return (T *) p; }
        temp.resize(nb);
        device.get(temp.data(), p, nb);
        return (T *) temp.data();
    }
    void seal(int s, const std::vector<int> & due, int n_threads);
    void commit_stream(int s, int n_threads);
    bool restore_page(int s, int p, const uint16_t * rows);
    bool may_place(int s, int p) const; // may this page be sealed now?
    void restore_slots(int s, int cell, int n, const uint16_t * rows, int n_threads);
    // The block whose image the rows are; marked: they may carry a mark (mark.h). False: they are none.
    bool take_image(int s, int p, const uint16_t * rows, bool marked, kvq_page_image & out) const;
    bool take_transformed(int s, int p, const uint16_t * rows, bool marked, kvq_page_image & out) const;
    void place(int s, int p, const kvq_page_image & image);
    void image_page(int s, int p, const int32_t * pos, const int32_t * was, const uint8_t * codes,
        const uint8_t * params, uint16_t * rows) const;
    void count_user(int s, int p, int by);
    // Tiles without what sealed pages leave out, in the place of those in `blocks`, until they are given back.
    struct left_tiles {
        std::vector<std::vector<uint16_t>> host;
        std::vector<uint16_t *> there;
    };
    left_tiles leave_out(int s, const std::vector<int> & pages, std::vector<kvq_page_block> & blocks);
    void give(const left_tiles & left);
    std::vector<uint16_t> take_out(int s, int p, const uint16_t * tile);
    // of rows just written
    void note_positions(int64_t n, const int64_t * idx, const int32_t * pos, uint16_t * const * to);
    void put_positions(int s, int p); // the device's copy
    void put_back(int s, int p, uint16_t * tile) const;
    std::vector<float> predicted(int s, int p) const; // empty: nothing is predicted
    void note_change(int s, int p);
    void reach_tags(int s, int cell, const uint16_t * rows, int n); // positions of rows as a saved state carries them
    void note_sealed(int s, int p);                                 // positions of a page that is about to be sealed
    // of a chain: keeps the pages that may be sealed now; false: some wait
    bool settle(int s, std::vector<int> & due);

    kvq_lane_layout l;
    kvq_transform x;
    bool value;
    kvq_lane * owner;
    std::vector<kvq_lane *> sharers; // lanes that adopt our codes
    kvq_span_table * spans;
    kvq_scratch * scratch;
    kvq_counters * counters;
    kvq_device & device;
    kvq_saliency * saliency = nullptr;
    kvq_slots * slots = nullptr;

    uint8_t * memory = nullptr; // codes, params, frames
    size_t nb_memory = 0;
    uint8_t *codes = nullptr, *params = nullptr, *frames = nullptr;

    std::vector<kvq_page_info> pages;
    std::vector<int32_t> stored; // page -> block, when blocks move
    std::vector<uint8_t> valid_bits;
    std::vector<stream_state> streams;
    bool is_dirty = false;
    // the owner of our codes was written, we were not yet: sealing now would seal its live pages too
    bool waiting = false;
};

#include "state.h"

#include "base/parallel.h"
#include "engine/host.h"
#include "gguf/fingerprint.h"
#include "state_lanes.h"
#include "store/small_rows.h"
#include "store/state_blocks.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

// ---------------------------------------------------------------- marks

static thread_local uint32_t tag_out = 0, tag_in = 0;

extern "C" void kvq_state_begin(uint32_t tag) {
    tag_out = tag;
    tag_in = 0;
    kvq_set_error("");
}
extern "C" uint32_t kvq_state_tag(void) { return tag_in; }

// Tokens and the first norm, which no quantisation changes.
uint16_t kvq_kv_cache::model_mark() {
    if (mark < 0) {
        uint64_t h = model.arch.empty() ? 0 : strtoull(model.hash.c_str(), nullptr, 16);
        const std::vector<float> sketch = h ? kvq_make_sketch(config.model_path) : std::vector<float>();
        if (sketch.size() >= KVQ_SKETCH) { h ^= kvq_mark_hash((const uint16_t *) &sketch[KVQ_SKETCH - 16], 2 * 16); }
        mark = h ? (int) (uint16_t) (h ^ h >> 16 ^ h >> 32 ^ h >> 48) | 1 : 0;
    }
    return (uint16_t) mark;
}

// Both copies of a mark go into plane `plane` of the rows a[] and b[]. hashes: of all rows as they are
static void put_marks(const kvq_target & t, kvq_mark_rows_view & v, std::vector<uint64_t> hashes, const int * a,
    const int * b, int plane, int page_cells) {
    kvq_mark m;
    kvq_mark_clear(v, a, plane);
    kvq_mark_clear(v, b, plane);
    for (const int * rows : { a, b }) {
        for (int i = 0; i < kvq_mark_rows(v.head_size); i++) {
            hashes[(size_t) rows[i]] = kvq_mark_hash(v.row(rows[i]), v.width);
        }
    }
    m.sum = kvq_mark_sum(hashes.data(), v.n, t.layer->d.il, t.value);
    m.tag = tag_out;
    m.model = t.cache->model_mark();
    m.page_cells = (uint16_t) page_cells;
    m.n = v.n;
    m.row = a[0];
    kvq_mark_put(v, a, plane, m);
    m.row = b[0];
    kvq_mark_put(v, b, plane, m);
}

constexpr int MOST_TRIES = 8; // pages

// Marks the rows of cells [cell, cell + n) as they leave; unchanged where nothing can carry a mark.
static void sign(const kvq_target & t, const row_lanes & lanes, int s, int cell, int n, uint16_t * rows) {
    const kvq_lane & lane = *lanes.lane[0];
    const kvq_lane_layout & l = lane.layout();
    kvq_mark_rows_view v = { rows, n, lanes.row, l.codec.head_size };
    const int k = kvq_mark_rows(l.codec.head_size), pc = l.page_cells, plane = lane.mark_plane();
    if (l.is_f16() || n >= 1 << 24 || t.layer->some_heads) { return; }
    std::vector<uint64_t> hashes((size_t) n);
    const auto hash_all = [&] { kvq_mark_hashes(rows, n, lanes.row, threads_of(t), hashes.data()); };
    if (l.evicts) {
        const std::vector<int> evicted = kvq_mark_evicted(v, threads_of(t));
        if (evicted.size() >= 2 * (size_t) k) {
            hash_all();
            put_marks(t, v, hashes, &evicted[0], &evicted[(size_t) k], 0, 0);
        }
        return;
    }
    std::vector<int> a((size_t) k), b((size_t) k);
    std::vector<uint16_t> before, bare((size_t) pc * lanes.width[0]), page(bare);
    int n_tries = 0;
    for (int p = (cell + pc - 1) / pc; plane >= 0 && (p + 1) * pc <= cell + n && n_tries < MOST_TRIES; p++) {
        if (lane.state(s, p) != KVQ_PAGE_SEALED) { continue; }
        if (!n_tries) { hash_all(); }
        const int r = p * pc - cell;
        uint16_t * const rows_of_page = rows + (size_t) r * lanes.row;
        before.assign(rows_of_page, rows_of_page + (size_t) pc * lanes.row);
        for (int i = 0; i < k; i++) {
            a[(size_t) i] = r + i;
            b[(size_t) i] = r + pc - k + i;
        }
        put_marks(t, v, hashes, a.data(), b.data(), plane, pc);
        lanes.part(0, pc, before.data(), bare.data());
        lanes.part(0, pc, rows_of_page, page.data());
        if (lane.is_marked_image(s, p, bare.data(), page.data())) { return; }
        std::copy(before.begin(), before.end(), rows_of_page); // another page can be restored without those bits
        n_tries++;
    }
}

std::string kvq_side_of_layer(const kvq_target & t) {
    return std::string(t.value ? "values" : "keys") + " of layer " + std::to_string(t.layer->d.il);
}

// Rows of an earlier call lose what a mark had in them, as those of this call do, where they are still rows.
static void take_marks_out(const kvq_target & t, const row_lanes & lanes) {
    const kvq_arrivals & in = t.cache->arrivals;
    for (const kvq_mark_stream::changed_row & x : in.marks.changed) {
        int i = x.at;
        for (const kvq_blob_run & run : in.rows) {
            if (i >= 0 && i < run.n) {
                const int cell = run.cell + i, p = cell / lanes.layout().page_cells;
                bool open = true;
                for (int k = 0; k < lanes.n; k++) {
                    open = open && lanes.lane[k]->state(run.stream, p) == KVQ_PAGE_OPEN;
                }
                if (open) { lanes.restore(run.stream, cell, 1, x.row.data(), 1); }
            }
            i -= run.n;
        }
    }
}

std::string kvq_state_missing(const kvq_arrivals & in) {
    return "the saved state is damaged or cut off: rows of the " + std::string(in.value ? "values" : "keys") +
        " of layer " + std::to_string(in.layer->d.il) + " are missing; save it again";
}

// Rows of stream s come in. Why they cannot: the tensor before this one is not whole.
std::string kvq_tensor_begins(const kvq_target & t, int s) {
    kvq_arrivals & in = t.cache->arrivals;
    if (in.layer == t.layer && in.value == t.value && in.stream == s) { return ""; }
    const std::string why = in.marks.found.empty() && in.blob.empty() ? "" : kvq_state_missing(in);
    in.begin(t.layer, t.value, s);
    return why;
}

// Why the rows are refused, "" when they are not. They lose the bits of marks.
static std::string check(const kvq_target & t, const row_lanes & lanes, int s, int cell, kvq_mark_rows_view & v) {
    kvq_arrivals & in = t.cache->arrivals;
    std::vector<kvq_mark_found> & open = in.marks.found;
    const size_t n_open = open.size();
    if (!in.marks.add(v, threads_of(t))) {
        return "the saved state is damaged: the " + kvq_side_of_layer(t) +
            " hold a value that is not finite; save it again";
    }
    in.rows.push_back({ s, cell, v.n });
    for (size_t i = n_open; i < open.size(); i++) { tag_in = open[i].mark.tag ? open[i].mark.tag : tag_in; }
    open.erase(std::remove_if(open.begin() + (ptrdiff_t) n_open, open.end(),
                   [](const kvq_mark_found & f) { return f.at < f.mark.row; }), // the rows before were never set
        open.end());
    take_marks_out(t, lanes);
    const std::vector<int> & evicted = in.marks.evicted_now;
    if (!evicted.empty() && !lanes.layout().evicts) {
        return "the saved state lacks " + kvq_side_of_layer(t) +
            " of cells that were evicted: restore it with its method";
    }
    for (const int r : evicted) { // a mark may have its other rows in the next call
        const uint16_t * const row = v.row(r);
        if (std::any_of(row, row + v.head_size, [](uint16_t x) { return x != KVQ_EVICTED; })) {
            std::fill_n(v.edit(r), v.head_size, KVQ_EVICTED);
        }
    }
    for (auto f = open.begin(); f != open.end();) {
        const kvq_mark & m = f->mark;
        if (t.layer->some_heads) { // it is the sum of whole rows
            f = open.erase(f);
            continue;
        }
        const size_t from = (size_t) (f->at - m.row);
        if (from + (size_t) m.n > in.marks.hashes.size()) {
            ++f;
            continue;
        }
        const uint16_t mine = t.cache->model_mark();
        if (m.model && mine && m.model != mine) {
            return "the saved state is of another model: give it the model that it was saved with";
        }
        if (kvq_mark_sum(&in.marks.hashes[from], m.n, t.layer->d.il, t.value) != m.sum) {
            return "the saved state is damaged or cut off: the checksum of the " + kvq_side_of_layer(t) +
                " does not fit; save it again";
        }
        f = open.erase(f);
    }
    return "";
}

// ---------------------------------------------------------------- blocks as they are

// Zeros are left where memory has them already: fresh pages of it then stay untouched (states.py maps a whole state,
// most of it zeros).
static void zero_rest(uint8_t * data, size_t nb, int n_threads) {
    constexpr int64_t PART = 1 << 16;
    static const char zeros[4096] = {};
    kvq_parallel_for(((int64_t) nb + PART - 1) / PART, n_threads, [&](int64_t i) {
        const int64_t part = i * PART;
        const size_t end = std::min(nb, (size_t) (part + PART));
        for (size_t at = (size_t) part; at < end; at += sizeof(zeros)) {
            const size_t n = std::min(sizeof(zeros), end - at);
            if (memcmp(data + at, zeros, n)) { memset(data + at, 0, n); }
        }
    });
}

// Blocks that are known in their own place only leave when Model.save_state asks, which can be told that they have no
// place. In a cache that sequences share they come back elsewhere.
bool kvq_blocks_leave(const kvq_target & t, const row_lanes & lanes, int s, int cell, int n, uint8_t * to) {
    const kvq_declared & declared = t.layer->d.declared[t.value];
    for (int i = 0; declared.is_f16() && i < lanes.n; i++) {
        if (lanes.lane[i]->leaves_out() && !tag_out) { return false; }
    }
    // f16 rows that come one by one do not tell what they are
    if (declared.is_f16() && lanes.nb_row < KVQ_BLOB_HEAD) { return false; }
    const int least_bits = declared.is_f16()
        ? 16
        : std::max(kvq_lone_bits(lanes.row, lanes.nb_row, lanes.lane[0]->n_position_lists() > 0), KVQ_SMALL_LEAST);
    const kvq_blob_head head = { 0, 0, tag_out, t.cache->model_mark(), t.value, (uint8_t) lanes.n, t.layer->d.il, n };
    const size_t nb_rows = lanes.nb_row * (size_t) n,
                 nb = kvq_blob_write(lanes.lane, s, cell, n, to, nb_rows, head, least_bits, threads_of(t));
    if (nb) { zero_rest(to + nb, nb_rows - nb, threads_of(t)); }
    return nb;
}

// Of n rows on their way in, how many belong to blocks; 0: these are rows. llama.cpp saves a sequence in ranges of
// cells and restores it in runs of free ones, and neither knows of the other: a compact part is as many bytes as its
// own range has, whatever stands before and behind it.
int kvq_blocks_come(
    const kvq_target & t, const row_lanes & lanes, int s, int cell, int n, const uint8_t * rows, std::string & why) {
    kvq_arrivals & in = t.cache->arrivals;
    if (in.blob.empty() && !kvq_blob_begins(rows)) { return 0; }
    const std::string damaged = "the saved state is damaged or cut off: the checksum of the " + kvq_side_of_layer(t) +
        " does not fit; save it again";
    int n_have = 0;
    for (const kvq_blob_run & r : in.runs) { n_have += r.n; }
    uint8_t front[KVQ_BLOB_HEAD]; // rows of few channels may bring it in pieces
    const size_t nb_have = std::min(in.blob.size(), KVQ_BLOB_HEAD),
                 nb_front = std::min(KVQ_BLOB_HEAD - nb_have, lanes.nb_row * (size_t) n);
    std::copy_n(in.blob.data(), nb_have, front);
    std::copy_n(rows, nb_front, front + nb_have);
    int32_t n_rows = n_have + n + 1;
    if (nb_have + nb_front == KVQ_BLOB_HEAD) {
        memcpy(&n_rows, front + 32, 4);
        if (n_rows <= n_have || (nb_have < KVQ_BLOB_HEAD && !kvq_blob_head_is_whole(front))) {
            why = damaged;
            return n;
        }
    }
    const int n_now = std::min(n, n_rows - n_have), first = in.n - n_have;
    kvq_blob_bytes blob = { rows, lanes.nb_row * (size_t) n_now };
    in.runs.push_back({ s, cell, n_now });
    if (n_have || n_now < n_rows) { // it comes in pieces
        in.blob.insert(in.blob.end(), blob.data, blob.data + blob.nb);
        blob = { in.blob.data(), in.blob.size() };
    }
    if (n_have + n_now < n_rows) {
        return n_now; // the rest goes to cells elsewhere
    }
    kvq_blob_head head = {};
    const uint16_t mine = t.cache->model_mark();
    if (!kvq_blob_read_head(blob.data, blob.nb, head, threads_of(t)) || head.il != t.layer->d.il ||
        head.value != t.value || head.n_lanes != lanes.n) {
        why = damaged;
    } else if (head.model && mine && head.model != mine) {
        why = "the saved state is of another model: give it the model that it was saved with";
    } else {
        std::string note;
        blob.nb = head.nb;
        tag_in = head.tag ? head.tag : tag_in;
        const std::vector<uint8_t> & owner = in.owner[t.value][first];
        why = kvq_blob_restore(blob, { owner.data(), owner.size() }, lanes.lane, in.runs, threads_of(t), note);
        if (!note.empty() && !in.noted) {
            kvq_report_note(note);
            in.noted = true;
        }
        in.parts[first].assign(blob.data, blob.data + blob.nb); // the next layer's may lack codes
    }
    in.blob.clear();
    in.runs.clear();
    return n_now;
}

// ---------------------------------------------------------------- entry points

void kvq_read_rows(const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    const kvq_target t = kvq_find_target(tensor);
    const row_lanes lanes(t);
    const int n_threads = threads_of(t);
    t.cache->commit(t.cache->n_threads);
    t.cache->arrivals.reset();
    const row_range r = rows_of(root_offset(t, tensor, offset), size, lanes.nb_row);
    if (!t.layer->d.declared[t.value].is_f16()) {
        kvq_read_declared(t, lanes, r, (uint8_t *) data);
        return;
    }
    std::unique_ptr<uint16_t[]> own; // where the program's memory does not hold whole rows of 16-bit values
    if (!r.whole() || (uintptr_t) data % sizeof(uint16_t)) {
        own.reset(new uint16_t[(size_t) (r.row1 - r.row0) * (size_t) lanes.row]);
    }
    uint16_t * const rows = own ? own.get() : (uint16_t *) data;
    each_stream(lanes.layout(), r.row0, r.row1, [&](int s, int cell, int n, int64_t row) {
        uint16_t * const to = rows + (size_t) (row - r.row0) * (size_t) lanes.row;
        if (r.whole() && t.cache->compact && kvq_blocks_leave(t, lanes, s, cell, n, (uint8_t *) to)) { return; }
        lanes.read(s, cell, n, to, n_threads);
        if (r.whole()) { sign(t, lanes, s, cell, n, to); }
    });
    if (own) { memcpy(data, (const char *) own.get() + r.head, size); }
}

// staged: of a file, so that llama.cpp hears of an exception and empties what it began to restore
void kvq_refuse_state(const kvq_target & t, const std::string & why, bool staged, bool may_throw) {
    kvq_arrivals & in = t.cache->arrivals;
    const bool told = staged && may_throw;
    if (in.damage.empty()) {
        kvq_report_error(why + (told ? "" : " (nothing is computed with this cache until it is cleared)"));
    }
    in.damage = why;
    t.cache->refused = true;
    if (told) {
        t.cache->refused = false;
        in.reset();
        throw kvq_state_error(why);
    }
}

static void put_rows(const kvq_target & t, const ggml_tensor * tensor, const void * data, size_t offset, size_t size,
    bool from_state, bool may_throw) {
    const row_lanes lanes(t);
    const int n_threads = threads_of(t);
    t.cache->commit(t.cache->n_threads);
    const row_range r = rows_of(root_offset(t, tensor, offset), size, lanes.nb_row);
    if (!t.layer->d.declared[t.value].is_f16()) {
        kvq_write_declared(t, lanes, r, (const uint8_t *) data, may_throw);
        return;
    }
    uint16_t * own = nullptr;
    if (!r.whole() || (uintptr_t) data % sizeof(uint16_t) || lanes.wants_own()) {
        t.cache->arrivals.copy.resize((size_t) (r.row1 - r.row0) * (size_t) lanes.row);
        own = t.cache->arrivals.copy.data();
    }
    const auto read = [&](int64_t at) { // rows that are only partly replaced
        each_stream(lanes.layout(), at, at + 1, [&](int s, int cell, int n, int64_t row) {
            lanes.read(s, cell, n, own + (size_t) (row - r.row0) * (size_t) lanes.row, 1);
        });
    };
    if (r.head) { read(r.row0); }
    if (r.tail) { read(r.row1 - 1); }
    if (own) {
        const kvq_copy_job all = { (char *) own + r.head, data, size };
        kvq_cpu_copy_all(&all, 1, n_threads);
    }
    const uint16_t * const rows = own ? own : (const uint16_t *) data;

    kvq_arrivals & in = t.cache->arrivals;
    const bool staged = in.data == data; // one buffer for one tensor after the other: they come from a file
    std::string why = in.damage;
    const auto restore = [&](int s, int cell, const kvq_mark_rows_view & v) {
        why = lanes.refuses(v.n, v.rows, n_threads);
        if (why.empty()) { lanes.restore(s, cell, v.n, v.rows, n_threads, &v); }
    };
    each_stream(lanes.layout(), r.row0, r.row1, [&](int s, int cell, int n, int64_t row) {
        const uint16_t * const from = rows + (size_t) (row - r.row0) * (size_t) lanes.row;
        const auto view = [&](const uint16_t * first, int n_rows) {
            return kvq_mark_rows_view{ first, n_rows, lanes.row, lanes.layout().codec.head_size, own != nullptr };
        };
        if (!from_state || !r.whole()) {
            if (why.empty()) { restore(s, cell, view(from, n)); }
            return;
        }
        why = why.empty() ? kvq_tensor_begins(t, s) : why;
        for (int at = 0, n_taken; at < n && why.empty(); at += n_taken) {
            const uint16_t * const next = from + (size_t) at * lanes.row;
            n_taken = kvq_blocks_come(t, lanes, s, cell + at, n - at, (const uint8_t *) next, why);
            if (!n_taken) { // rows, until blocks begin
                n_taken = 1;
                while (at + n_taken < n && !kvq_blob_begins(next + (size_t) n_taken * lanes.row)) { n_taken++; }
                kvq_mark_rows_view v = view(next, n_taken);
                why = check(t, lanes, s, cell + at, v);
                if (why.empty()) { restore(s, cell + at, v); }
            }
            in.n += n_taken;
        }
    });
    in.data = data;
    if (!why.empty()) { kvq_refuse_state(t, why, staged, may_throw); }
}

void kvq_write_rows(const ggml_tensor * tensor, const void * data, size_t offset, size_t size, bool may_throw) {
    put_rows(kvq_find_target(tensor), tensor, data, offset, size, true, may_throw);
}

void kvq_fill_rows(const ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    const kvq_target t = kvq_find_target(tensor);
    const std::vector<uint8_t> data(size, value);
    if (t.cache->arrivals.damage.empty()) {
        t.cache->arrivals.reset();
        put_rows(t, tensor, data.data(), offset, size, false, false);
    }
}

bool kvq_copy_rows(const ggml_tensor * src, const ggml_tensor * dst) {
    const kvq_target a = kvq_find_target(src), b = kvq_find_target(dst);
    if (!a.layer || a.layer != b.layer || a.value != b.value) { return false; }
    const row_lanes lanes(a);
    const size_t nb_stream = lanes.nb_row * (size_t) lanes.layout().n_cells;
    const size_t from = root_offset(a, src, 0), to = root_offset(b, dst, 0);
    if (from % nb_stream || to % nb_stream || ggml_nbytes(src) != nb_stream || ggml_nbytes(dst) != nb_stream) {
        return false;
    }
    a.cache->commit(a.cache->n_threads);
    for (int i = 0; i < lanes.n; i++) { lanes.lane[i]->copy_stream((int) (from / nb_stream), (int) (to / nb_stream)); }
    a.cache->commit(a.cache->n_threads);
    return true;
}

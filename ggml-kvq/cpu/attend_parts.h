// Attention over pages, in parts: what a call plans for each stream, the working set of a thread, and the steps of a
// task. attend.cpp tells how tasks are made; attend_plan.cpp plans, attend_pages.cpp reads pages.
#pragma once

#include "engine/host.h"
#include "kernels.h"
#include "lattice.h"
#include "types/mixed.h"
#include "types/types.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <vector>

namespace kvq_attention {

constexpr float LOG2_E = 1.44269504088896341f;
// as many rows of a KV head go through the pages together with the other heads, in runs of pages
constexpr int FEW_ROWS = 16;

struct stream_plan;

// The queries of a KV head as its sealed lattice keys want them. Keys that moved by `by` positions since they were
// encoded meet queries turned back as far, so one set a distance.
struct key_queries {
    struct set {
        kvq_lattice_queries folded[2]; // of each half, as stream_plan::lk
        // of the keys' mean: kvq_turn_coefficients, and the logit of the channels that are not turned
        std::vector<float> coef, step, rest;
    };
    std::vector<set> sets; // as stream_plan::moved
    void make(const stream_plan & s, int kvh, int n_rows, const float * q);
};

// of a sealed page: set of queries, -1: no set fits; position of its first cell when sealed
struct key_place {
    int set;
    int32_t first;
};

constexpr size_t MAX_SETS = 8; // of pages that moved farther apart each cell is turned by itself

struct stream_plan {
    const kvq_attn * p;
    float * lse;
    kvq_view k, v, k_open, v_open;
    kvq_lattice_keys lk;
    kvq_lattice_view lv;
    bool maps;             // pages hold other cells for each KV head
    bool mixed;            // pages of two widths, read part by part
    bool latent;           // values are part of the keys
    kvq_view kp[2], vp[2]; // their parts
    kvq_mixed_map km, vm;
    // lattice: keys lack their mean or some rotary embedding; int8 keys; values leave a rotated sum
    bool rope, folded_k, rotated_v;
    std::vector<int32_t> moved;    // distances that sealed keys moved
    std::vector<key_place> places; // of pages, with `rope`
    kvq_mean_tables turns;
    bool few;                          // all rows of a KV head fit a block: its queries are made once, not once a task
    std::vector<key_queries> prepared; // by KV head, with `few`
    int gqa, n_rows, n_blocks;         // rows of a KV head
    int n_seen, n_active;              // pages up to the last one that is seen; of them, those that hold anything
    int n_groups, n_splits;
    std::vector<int> cuts; // first page of each split, then n_pages
    int dpk, dpv, n_out;   // padded rows of queries and of outputs; channels of an output
    size_t rot;            // floats of a rotated sum
    // values that follow from keys alone (policy/chain.h): sums of rows of both inputs behind the outputs, NULL: not
    // folded
    const kvq_chain_pages * fold;
    int n_fold;          // floats of such sums, 0: not folded
    size_t partial;      // offset of this stream's partial results, [kvh][split][row][m, l, out of dpv, fold]
    bool leaves_partial; // rows are left there
    float m0, m1;        // ALiBi bases
    int n_head_log2;

    key_place place_of(const kvq_page & page) const {
        return rope ? places[(size_t) (&page - p->pages)] : key_place{ 0, 0 };
    }
    int n_coords[2]; // of a cell, of which keys and values are read (types/basis.h); 0: they are not
    int v_stride;    // floats of a cell's coordinates of values, padded
    // Angles of positions 0, 1, .. as turn_table has them: of a run's keys with coordinates, whose queries are turned
    // back to its first position. Empty: each page has a table of its own.
    std::vector<float> near;
    int n_near() const { return near.empty() ? 0 : (int) (near.size() / (size_t) p->rotary->n_dims); }
    bool has_coords() const { return n_coords[0] || n_coords[1]; }
    // floats of a page's coordinates: keys and their scales, angles of its positions, values
    size_t key_floats() const { return n_coords[0] ? (size_t) (((n_coords[0] + 3) / 4 + 1) * p->k.n_cells) : 0; }
    size_t turn_floats() const { return n_coords[0] && p->rotary ? (size_t) (p->rotary->n_dims * p->k.n_cells) : 0; }
    size_t coord_floats() const { return key_floats() + turn_floats() + (size_t) (p->v.n_cells * v_stride); }
    bool has_means() const { return (folded_k && p->k_mean) || n_coords[0]; }
    size_t part_of(int kvh, int split, int row) const {
        return partial + (((size_t) kvh * n_splits + split) * n_rows + row) * ((size_t) n_sums() + 2);
    }
    int n_sums() const { return dpv + n_fold; }
    int n_tasks() const { return n_groups * n_blocks * n_splits; }
    int block_rows() const { return std::min(n_rows, KVQ_MAX_ROWS); }
};

// A KV head and its block of rows, while a task runs.
struct head_rows {
    int kvh;
    float *q, *out, *rot, *fold; // rows of dpk, dpv, stream_plan::rot, n_fold
    float * coords;              // rows of v_stride: sums of f p c of sealed values
    // open: of l, the part of values that were not sealed: the others lack their mean, which is added at the end
    float *m, *l, *open;
    float slope[KVQ_MAX_ROWS];
    float * means; // of a run: mean_part
    key_queries own;
    const key_queries * keys;
};

// One thread's working set, grown to the largest task and kept.
struct workspace {
    float *logits, *tile, *floats, *part; // part: rows of dpv, of a mixed page
    float * coords;                       // of a run's pages, coord_floats each: take_coords
    int32_t near_from;        // take_coords: where stream_plan::near begins for this run's first page, -1: nowhere
    float back[KVQ_MAX_HEAD]; // and by how much queries are turned back there, [2][pairs]
    uint16_t *mask, *rows, *part_mask;
    void * work;
    std::vector<head_rows> heads;

    struct sizes {
        size_t floats = 0, slots = 0, tile = 0, work = 0, heads = 0, part = 0, part_mask = 0, coords = 0;
        void cover(const sizes & o) {
            for (auto m : { &sizes::floats, &sizes::slots, &sizes::tile, &sizes::work, &sizes::heads, &sizes::part,
                     &sizes::part_mask, &sizes::coords }) {
                this->*m = std::max(this->*m, o.*m);
            }
        }
    };

    void fit(const sizes & z) {
        size_t at = 0;
        const auto take = [&](size_t nb) {
            const size_t here = at;
            at += (nb + 63) / 64 * 64;
            return here;
        };
        const size_t o[9] = { take(4 * z.floats), take(4 * z.slots), take(4 * z.tile), take(2 * z.slots),
            take(2 * z.tile), take(z.work), take(4 * z.part), take(2 * z.part_mask), take(4 * z.coords) };
        if (at > size) {
            memory.reset((uint8_t *) aligned_alloc(64, at));
            if (!memory) {
                size = 0;
                throw std::bad_alloc();
            }
            size = at;
        }
        uint8_t * m = memory.get();
        floats = (float *) (m + o[0]);
        logits = (float *) (m + o[1]);
        tile = (float *) (m + o[2]);
        mask = (uint16_t *) (m + o[3]);
        rows = (uint16_t *) (m + o[4]);
        work = m + o[5];
        part = (float *) (m + o[6]);
        part_mask = (uint16_t *) (m + o[7]);
        coords = (float *) (m + o[8]);
        if (heads.size() < z.heads) { heads.resize(z.heads); }
    }

private:
    struct release {
        void operator()(void * p) const { free(p); }
    };
    std::unique_ptr<uint8_t, release> memory;
    size_t size = 0;
};

// Pages of which the same rows see something.
struct page_run {
    int n_pages = 0, first = 0, n_rows = 0;
    const kvq_page * page[KVQ_MAX_RUN];
    const uint16_t * mask[KVQ_MAX_RUN * KVQ_MAX_ROWS]; // as the softmax takes it
};

// Blocks that the next call of run_head reads. A page's blocks lie in four places, and those of a KV head n_head
// blocks apart, which is beyond what the hardware foresees. They are asked for in parts between the kernels: in one
// burst they hold up the loads behind them.
struct ahead {
    int n_pages = 0, kvh = 0;
    bool of_all = false; // pages that no head has read: their coordinates are read first
    const kvq_page * page[KVQ_MAX_RUN];

    static void ask(const void * codes, const void * params, int kvh, const kvq_view & sealed, const kvq_view & open) {
        const kvq_view & v = params ? sealed : open;
        const char *c = (const char *) codes + kvh * v.nb_codes, *p = (const char *) params + kvh * v.nb_params;
        if (!params && sealed.codec.type != KVQ_TYPE_F16) { // a window's pages: more than the first level holds
            for (size_t i = 0; c && i < v.nb_codes; i += 64) { __builtin_prefetch(c + i, 0, 2); }
            return;
        }
        for (size_t i = 0; c && i < std::min<size_t>(v.nb_codes, 4096); i += 64) { __builtin_prefetch(c + i); }
        for (size_t i = 0; params && i < v.nb_params; i += 64) { __builtin_prefetch(p + i); }
    }
    void keys(const stream_plan & s, int from, int to) const {
        for (int i = from; i < std::min(to, n_pages); i++) {
            ask(page[i]->k_codes, page[i]->k_params, kvh, s.k, s.k_open);
            if (s.n_coords[0] && of_all && page[i]->k_params) { ask_coords(s, page[i]->k_params); }
        }
    }
    static void ask_coords(const stream_plan & s, const void * params) {
        const auto at = kvq_coords_in(s.p->k, s.k.nb_params, (const uint8_t *) params);
        for (int j = 0; j <= s.n_coords[0] / 2; j++) {
            for (int i = 0; i < at.n_cells; i += 64) { __builtin_prefetch(at.of(j) + i); }
        }
    }
    void values(const stream_plan & s) const {
        for (int i = 0; i < n_pages; i++) { ask(page[i]->v_codes, page[i]->v_params, kvh, s.v, s.v_open); }
    }
};

// ---------------------------------------------------------------- attend.cpp

// What is done with a KV head and a run of pages.
using head_step = std::function<void(workspace & w, head_rows & h, const page_run & r, const ahead & next)>;

// KV heads [kvh0, kvh0 + n_heads), rows [r0, r0 + n_rows) of each, pages [page0, page1): `step` for each run of pages
// and each head, in that order; end_head is the caller's. Several heads share the mask rows.
void run_task(const kvq_kernels & K, const stream_plan & s, workspace & w, int kvh0, int n_heads, int r0, int n_rows,
    int page0, int page1, const head_step & step);
// Few rows: page ranges are cut first, of all heads together; many: heads and row blocks first.
bool has_few_rows(const stream_plan & s);
// How a stream is cut into tasks for so many of them; `want` is a wish.
void cut_tasks(stream_plan & s, bool few, int want);
workspace::sizes sizes_of(const stream_plan & s, int n_rows, int n_heads, int cells);
// Log-sum-exp of two parts of a row, each m, l and n sums: `to` becomes both.
void join(int n, float * to, const float * part);
// Row `row` of KV head kvh leaves: m in units of ln 2, l and the sums that belong to it, before the attention sink.
void store_row(const stream_plan & s, int kvh, int row, float m, float l, const float * out);

// Where the pages of a stream come from when they are not stored as they are read: predicted or fetched rows become
// open tiles, some pages at a time.
class page_source {
public:
    // The pages of the next batch, whose tiles stay until the next call; true: more batches follow.
    virtual bool next(std::vector<kvq_page> & pages) = 0;

protected:
    ~page_source() {}
};
// fold: pages of values, where these stay as they are stored and follow from keys alone; NULL: no
void attend_from(page_source & source, const kvq_attn & attn, int n_threads, const kvq_chain_pages * fold = nullptr);

// ---------------------------------------------------------------- attend_fold.cpp

// Few rows over values of such a layer, by predictors in 8 bits?
bool may_fold(const kvq_attn & attn, const kvq_chain_pages & values);
// Sums of a run's rows under probabilities, as value_part takes them.
void fold_part(const kvq_kernels & K, const stream_plan & s, head_rows & h, const page_run & r, const float * prob,
    const float * f);
// Rows of KV head kvh [m, l, out, fold], `stride` apart: out += W_v fold.
void apply_fold(const kvq_kernels & K, const stream_plan & s, int kvh, float * rows, size_t stride);

// ---------------------------------------------------------------- attend_far.cpp

void attend_far(const kvq_attn & attn, int n_threads);

// ---------------------------------------------------------------- attend_plan.cpp

// Everything that does not depend on the other streams of the call; the most cells of a page.
int make_plan(stream_plan & s, const kvq_attn & attn);
// Splits that take about the same time: an open page beside sealed ones costs some two and a half of them, and a
// cache has all of its open pages in the last split but for the sinks.
void cut_pages(stream_plan & s);
// Queries are gathered because query heads and tokens have free strides; tokens: of the rows, NULL: all of them.
void gather(const stream_plan & s, int kvh, int r0, int n_rows, const int32_t * tokens, float * to);
// folds: the rows meet sealed lattice keys.
void start_head(const stream_plan & s, workspace & w, head_rows & h, int kvh, int r0, int n_rows, size_t & at,
    const int32_t * tokens = nullptr, bool folds = true);
void end_head(const stream_plan & s, head_rows & h, int n_rows);

// ---------------------------------------------------------------- attend_pages.cpp

// Logits of the pages of a run from page i on that are of one kind; how many there are. means: as mean_part leaves
// them, or NULL.
int score_part(const kvq_kernels & K, const stream_plan & s, workspace & w, const head_rows & h, const page_run & r,
    int i, const float * q, const float * means, float * to);
// What the mean of keys adds to the logits of a run's sealed pages, [page][row][n]; other pages' are left as they
// are. Of all heads before the first is scored: the tables are then read once.
void mean_part(
    const kvq_kernels & K, const stream_plan & s, workspace & w, const head_rows & h, const page_run & r, float * to);
// Coordinates of a run's sealed pages and the angles of their keys, for all heads.
void take_coords(const kvq_kernels & K, const stream_plan & s, workspace & w, const page_run & r);
// out += sum of f p v over a run; prob [page][row][n_slots], f as the softmax leaves it.
void value_part(const kvq_kernels & K, const stream_plan & s, workspace & w, head_rows & h, const page_run & r,
    const float * prob, const float * f);
// One KV head against a run. next: blocks that the next call reads.
void run_head(
    const kvq_kernels & K, const stream_plan & s, workspace & w, head_rows & h, const page_run & r, const ahead & next);
// Mixed pages: are both lanes sealed with one set?
bool one_set(const stream_plan & s, const kvq_page & page, int kvh);
void run_mixed(const kvq_kernels & K, const stream_plan & s, workspace & w, head_rows & h, const page_run & r,
    const ahead & next); // attend_mixed.cpp
void run_latent(const kvq_kernels & K, const stream_plan & s, workspace & w, head_rows & h,
    const page_run & r); // attend_latent.cpp
void plan_mixed(stream_plan & s);
void plan_latent(stream_plan & s);

} // namespace kvq_attention

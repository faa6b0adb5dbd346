// The attention loop, written once over pages: score, online softmax, accumulate.
//
//   tasks = streams x groups of KV heads x row blocks x splits.  Rows of a block read one KV head: gqa query heads of
//   consecutive tokens. A split is a contiguous range of pages; partial results (m, l, o) are merged afterwards
//   (log-sum-exp). With few rows a task runs over pages and visits all its heads in each: bytes are read in the order
//   in which they lie. Pages go to the kernels in runs of up to KVQ_MAX_RUN. Logits and maxima are in units of ln 2.
#include "engine/host.h"
#include "kernels.h"
#include "lattice.h"
#include "transpose.h"
#include "engine/turns.h"
#include "base/f16.h"
#include "types/mixed.h"
#include "types/types.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace {

constexpr uint16_t F16_NEG_INF = 0xfc00;

constexpr float LOG2_E = 1.44269504088896341f;
// as many rows of a KV head go through the pages together with the other heads, in runs of pages
constexpr int FEW_ROWS = 16;

struct stream_plan;

// The queries of a KV head as its sealed lattice keys want them. Keys that moved by `by` positions since they were
// encoded meet queries turned back as far, so one set a distance.
struct key_queries {
    struct set {
        kvq_lattice_queries folded;
        // of the keys' mean: kvq_turn_coefficients, and the logit of the channels that are not turned
        std::vector<float> coef, step, rest;
    };
    std::vector<set> sets; // as stream_plan::moved
    void make(const stream_plan & s, int kvh, int n_rows, const float * q);
};

// of a sealed page: set of queries, -1: none fits; position of its first cell when sealed
struct key_place {
    int set;
    int32_t first;
};

constexpr size_t MAX_SETS = 8; // of pages that moved farther apart each cell is turned by itself

struct stream_plan {
    const kvq_attn * p;
    float * lse;
    kvq_view k, v, k_open, v_open;
    kvq_lattice_view lk, lv;
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
    int gqa, n_rows, n_blocks, n_active; // rows of a KV head; pages that hold anything
    int n_groups, n_splits;
    std::vector<int> cuts; // first page of each split, then n_pages
    int dpk, dpv, n_out;   // padded rows of queries and of outputs; channels of an output
    size_t rot;            // floats of a rotated sum
    size_t partial;        // offset of this stream's partials
    float m0, m1;          // ALiBi bases
    int n_head_log2;

    key_place place_of(const kvq_page & page) const {
        return rope ? places[(size_t) (&page - p->pages)] : key_place{ 0, 0 };
    }
    bool has_means() const { return folded_k && p->k_mean; }
    int n_tasks() const { return n_groups * n_blocks * n_splits; }
    int block_rows() const { return std::min(n_rows, KVQ_MAX_ROWS); }
};

// A KV head and its block of rows, while a task runs.
struct head_rows {
    int kvh;
    float *q, *out, *rot; // rows of dpk, dpv, stream_plan::rot
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
    uint16_t *mask, *rows, *part_mask;
    void * work;
    std::vector<head_rows> heads;

    struct sizes {
        size_t floats = 0, slots = 0, tile = 0, work = 0, heads = 0, part = 0, part_mask = 0;
    };

    void fit(const sizes & z) {
        size_t at = 0;
        const auto take = [&](size_t nb) {
            const size_t here = at;
            at += (nb + 63) / 64 * 64;
            return here;
        };
        const size_t o[8] = { take(4 * z.floats), take(4 * z.slots), take(4 * z.tile), take(2 * z.slots),
            take(2 * z.tile), take(z.work), take(4 * z.part), take(2 * z.part_mask) };
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
        if (heads.size() < z.heads) { heads.resize(z.heads); }
    }

private:
    struct release {
        void operator()(void * p) const { free(p); }
    };
    std::unique_ptr<uint8_t, release> memory;
    size_t size = 0;
};

float alibi_slope(const stream_plan & s, int h) {
    if (s.p->max_bias <= 0.0f) { return 1.0f; }
    return h < s.n_head_log2 ? powf(s.m0, (float) (h + 1)) : powf(s.m1, (float) (2 * (h - s.n_head_log2) + 1));
}

// Pages of which the same rows see something.
struct page_run {
    int n_pages = 0, first = 0, n_rows = 0;
    const kvq_page * page[KVQ_MAX_RUN];
    const uint16_t * mask[KVQ_MAX_RUN * KVQ_MAX_ROWS]; // as the softmax takes it
};

// One lane of a run from page i on: a part of one kind, blocks of one head.
struct lane_part {
    const kvq_view * view;
    const kvq_block_kernels * kernels; // NULL: lattice kernels
    bool tile;                         // through an f32 tile
    kvq_run run;

    lane_part(const kvq_kernels & K, const kvq_view & sealed, const kvq_view & open, const page_run & r, int i,
        bool value, int kvh, bool f32, bool lattice, int most, workspace & w) {
        const auto params_of = [&](int j) { return value ? r.page[j]->v_params : r.page[j]->k_params; };
        const auto codes_of = [&](int j) { return value ? r.page[j]->v_codes : r.page[j]->k_codes; };
        const bool is_sealed = params_of(i), decoded = is_sealed && !lattice && sealed.codec.type >= KVQ_N_TYPES;
        view = is_sealed && !decoded ? &sealed : &open;
        kernels = is_sealed && lattice ? nullptr : &K.block[view->codec.type];
        tile = kernels && (r.n_rows >= kernels->tile_rows || (is_sealed && f32));
        run.n_pages = 0;
        for (int j = i; j < r.n_pages && (bool) params_of(j) == is_sealed && (!is_sealed || j - i < most); j++) {
            const kvq_view & v = is_sealed ? sealed : open;
            run.codes[run.n_pages] = (const uint8_t *) codes_of(j) + kvh * v.nb_codes;
            run.params[run.n_pages++] = is_sealed ? (const uint8_t *) params_of(j) + kvh * v.nb_params : nullptr;
            if (decoded || tile) { break; }
        }
        if (decoded) { // the type's own decode, then as an open page; w.tile is not in use yet
            uint16_t * rows = (uint16_t *) w.tile;
            kvq_traits(sealed.codec.type)->decode(sealed.codec, run.codes[0], run.params[0], rows);
            for (int t = 0; t < sealed.codec.n_cells; t++) {
                memcpy(w.rows + (size_t) t * sealed.dp, rows + (size_t) t * sealed.codec.head_size,
                    2 * (size_t) sealed.codec.head_size);
                memset(w.rows + (size_t) t * sealed.dp + sealed.codec.head_size, 0,
                    2 * (size_t) (sealed.dp - sealed.codec.head_size));
            }
            run.codes[0] = w.rows;
            run.params[0] = nullptr;
        }
    }
};

// Blocks that the next call of run_head reads. A page's blocks lie in four places, and those of a KV head n_head
// blocks apart, which is beyond what the hardware foresees. They are asked for in parts between the kernels: in one
// burst they hold up the loads behind them.
struct ahead {
    int n_pages = 0, kvh = 0;
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
        }
    }
    void values(const stream_plan & s) const {
        for (int i = 0; i < n_pages; i++) { ask(page[i]->v_codes, page[i]->v_params, kvh, s.v, s.v_open); }
    }
};

#include "attend_mask.h"
#include "attend_keys.h"

// Logits of the pages of a run from page i on that are of one kind; how many there are. means: as mean_part leaves
// them, or NULL
int score_part(const kvq_kernels & K, const stream_plan & s, workspace & w, const head_rows & h, const page_run & r,
    int i, const float * q, const float * means, float * to) {
    const kvq_attn & p = *s.p;
    const int n = r.page[0]->n_slots, rows = r.n_rows;
    const key_place at = s.place_of(*r.page[i]);
    int most = 1; // pages that take the same queries
    while (at.set >= 0 && i + most < r.n_pages && s.place_of(*r.page[i + most]).set == at.set) { most++; }
    const lane_part k(K, s.k, s.k_open, r, i, false, h.kvh, p.flags & KVQ_ATTN_F32, s.rope || s.folded_k, most, w);
    if (!k.kernels && at.set < 0) {
        const auto of = [&](const int32_t * x) { return x ? x + r.page[i]->cell : nullptr; };
        K.score_rope(s.lk, rows, (const uint8_t *) k.run.codes[0], k.run.params[0],
            p.k_mean ? p.k_mean + (size_t) h.kvh * p.k.head_size : nullptr, p.rotary, of(p.sealed), of(p.positions),
            s.dpk, q, to);
    } else if (!k.kernels) {
        K.score_lattice(s.lk, rows, k.run, h.keys->sets[(size_t) at.set].folded.rows.data() + r.first,
            means ? means + (size_t) i * rows * n : nullptr, to);
    } else if (k.tile) {
        k.kernels->to_tile(*k.view, k.run.codes[0], k.run.params[0], w.tile, w.work);
        K.score_tile(rows, s.dpk, n, w.tile, q, to);
    } else {
        k.kernels->score(*k.view, rows, k.run, q, to, w.work);
    }
    return k.run.n_pages;
}

void run_head(
    const kvq_kernels & K, const stream_plan & s, workspace & w, head_rows & h, const page_run & r, const ahead & next);
#include "attend_mixed.h"
#include "attend_latent.h"

// One KV head against a run.
void run_head(const kvq_kernels & K, const stream_plan & s, workspace & w, head_rows & h, const page_run & r,
    const ahead & next) {
    const kvq_attn & p = *s.p;
    if (s.latent) {
        run_latent(K, s, w, h, r);
        return;
    }
    if (s.mixed && (r.n_pages > 1 || one_set(s, *r.page[0], h.kvh))) {
        run_mixed(K, s, w, h, r, next);
        return;
    }
    const bool f32 = p.flags & KVQ_ATTN_F32;
    const int n = r.page[0]->n_slots, rows = r.n_rows;
    const size_t per_page = (size_t) rows * n;
    const float * q = h.q + (size_t) r.first * s.dpk;
    next.keys(s, 0, KVQ_MAX_RUN / 2);
    for (int i = 0; i < r.n_pages;) {
        i += score_part(K, s, w, h, r, i, q, s.has_means() ? h.means : nullptr, w.logits + i * per_page);
    }

    next.keys(s, KVQ_MAX_RUN / 2, KVQ_MAX_RUN);
    float c[KVQ_MAX_ROWS], f[KVQ_MAX_RUN * KVQ_MAX_ROWS + 16], sums[KVQ_MAX_RUN * KVQ_MAX_ROWS + 16];
    float *const out = h.out + (size_t) r.first * s.dpv, *const rot = h.rot + r.first * s.rot;
    if (K.softmax(rows, n, r.n_pages, w.logits, p.scale, p.softcap, h.slope + r.first, r.mask, h.m + r.first,
            h.l + r.first, c, f, sums)) {
        for (int i = 0; i < rows; i++) {
            if (c[i] != 1.0f) {
                h.open[r.first + i] *= c[i];
                K.scale(s.dpv, out + (size_t) i * s.dpv, c[i]);
                K.scale((int) s.rot, rot + i * s.rot, c[i]);
            }
        }
    }
    for (int i = 0; p.v_mean && i < r.n_pages; i++) {
        for (int j = 0; j < rows && !r.page[i]->v_params; j++) {
            h.open[r.first + j] += f[i * KVQ_MAX_ROWS + j] * sums[i * KVQ_MAX_ROWS + j];
        }
    }

    next.values(s);
    for (int i = 0; i < r.n_pages;) {
        const lane_part v(K, s.v, s.v_open, r, i, true, h.kvh, f32, s.rotated_v, KVQ_MAX_RUN, w);
        const float *prob = w.logits + i * per_page, *by = f + i * KVQ_MAX_ROWS;
        if (!v.kernels) {
            K.accum_lattice(s.lv, rows, v.run, prob, by, rot);
        } else if (v.tile) {
            v.kernels->to_tile(*v.view, v.run.codes[0], v.run.params[0], w.tile, w.work);
            K.accum_tile(rows, s.dpv, n, w.tile, prob, by, out);
        } else {
            v.kernels->accum(*v.view, rows, v.run, prob, by, out, w.work);
        }
        i += v.run.n_pages;
    }
}

void start_head(const stream_plan & s, workspace & w, head_rows & h, int kvh, int r0, int n_rows, size_t & at,
    const int32_t * tokens = nullptr) {
    const auto take = [&](size_t n) {
        float * here = w.floats + at;
        at += (n + 15) / 16 * 16;
        return here;
    };
    const size_t rows = (size_t) n_rows;
    h.kvh = kvh;
    h.q = take(rows * s.dpk);
    h.out = take(rows * s.dpv);
    h.rot = take(rows * s.rot);
    h.m = take(rows + 16); // the softmax reads whole registers
    h.l = take(rows + 16);
    h.open = take(rows);
    h.means = take(s.has_means() ? (size_t) (n_rows <= FEW_ROWS ? KVQ_MAX_RUN : 1) * rows * s.p->k.n_cells : 0);
    gather(s, kvh, r0, n_rows, tokens, h.q);
    for (int r = 0; r < n_rows; r++) {
        h.slope[r] = alibi_slope(s, kvh * s.gqa + (r0 + r) % s.gqa);
        h.m[r] = -INFINITY;
        h.l[r] = h.open[r] = 0.0f;
    }
    memset(h.out, 0, 4 * rows * s.dpv);
    memset(h.rot, 0, 4 * rows * s.rot);
    h.keys = s.few ? &s.prepared[(size_t) kvh] : &h.own;
    if (s.folded_k && !s.few) { h.own.make(s, kvh, n_rows, h.q); }
}

void end_head(const stream_plan & s, head_rows & h, int n_rows) {
    const kvq_attn & p = *s.p;
    for (int r = 0; r < n_rows; r++) {
        float * out = h.out + (size_t) r * s.dpv;
        if (s.rotated_v) { kvq_lattice_unrotate(s.lv, h.rot + r * s.rot, out); }
        for (int d = 0; p.v_mean && d < p.v.head_size; d++) {
            out[d] += (h.l[r] - h.open[r]) * p.v_mean[(size_t) h.kvh * p.v.head_size + d];
        }
    }
}

// KV heads [kvh0, kvh0 + n_heads), rows [r0, r0 + n_rows) of each, pages [page0, page1). Several heads share the mask
// rows.
void run_task(const kvq_kernels & K, const stream_plan & s, workspace & w, int kvh0, int n_heads, int r0, int n_rows,
    int page0, int page1) {
    const kvq_attn & p = *s.p;
    size_t at = 0;
    for (int h = 0; h < n_heads; h++) { start_head(s, w, w.heads[(size_t) h], kvh0 + h, r0, n_rows, at); }
    const int max_run = n_rows <= FEW_ROWS ? KVQ_MAX_RUN : 1;
    int clear[KVQ_MAX_ROWS] = {};
    for (int r = 0; s.maps && r < n_rows; r++) {
        const int iq = (r0 + r) / s.gqa, head = kvh0 * s.gqa + (r0 + r) % s.gqa;
        const bool again = r && (!p.mask || (!p.mask_stride_head && (r0 + r) % s.gqa));
        clear[r] = again ? clear[r - 1]
            : p.mask     ? clear_cells(p.mask + iq * p.mask_stride_token + head * p.mask_stride_head, p.n_kv)
                         : p.n_kv;
    }
    page_run run;
    int slot = 0; // of w.mask
    const auto flush = [&](int next) {
        for (int h = 0; run.n_pages && s.has_means() && h < n_heads; h++) {
            mean_part(K, s, w.heads[(size_t) h], run, w.heads[(size_t) h].means);
        }
        for (int h = 0; run.n_pages && h < n_heads; h++) {
            const bool here = h + 1 < n_heads;
            ahead a;
            a.kvh = kvh0 + (here ? h + 1 : 0);
            for (int i = 0; i < run.n_pages && (here || next + i < page1); i++) {
                a.page[a.n_pages++] = here ? run.page[i] : &p.pages[next + i];
            }
            run_head(K, s, w, w.heads[(size_t) h], run, a);
        }
        run.n_pages = 0;
    };
    for (int ip = page0; ip < page1; ip++) {
        const kvq_page & page = p.pages[ip];
        const int n = page.n_slots;
        if (!n) { continue; }
        // rows that see anything of the page: all others, before and behind, are left out
        const uint16_t * use[KVQ_MAX_ROWS];
        int first = n_rows, end = 0;
        for (int r = 0, alive = 0; r < n_rows; r++) {
            const int iq = (r0 + r) / s.gqa, head = kvh0 * s.gqa + (r0 + r) % s.gqa;
            if (r && (!p.mask || (!p.mask_stride_head && (r0 + r) % s.gqa))) {
                use[r] = use[r - 1];
            } else {
                const uint16_t * row = p.mask ? p.mask + iq * p.mask_stride_token + head * p.mask_stride_head : nullptr;
                alive = page_mask(p, page, kvh0, row, clear[r], w.mask + ((size_t) slot * n_rows + r) * n, &use[r]);
            }
            if (alive) {
                first = std::min(first, r);
                end = r + 1;
            }
        }
        if (!end) { continue; }
        if (run.n_pages && (run.first != first || run.n_rows != end - first)) { flush(ip); }
        run.first = first;
        run.n_rows = end - first;
        std::copy(use + first, use + end, run.mask + run.n_pages * KVQ_MAX_ROWS);
        run.page[run.n_pages++] = &page;
        slot = (slot + 1) % max_run;
        if (run.n_pages == max_run) { flush(ip + 1); }
    }
    flush(page1);
    for (int h = 0; h < n_heads; h++) { end_head(s, w.heads[(size_t) h], n_rows); }
}

void store_row(const stream_plan & s, int kvh, int row, float m, float l, const float * out) {
    const kvq_attn & p = *s.p;
    const int iq = row / s.gqa, h = kvh * s.gqa + row % s.gqa;
    float * dst = p.dst + iq * p.dst_stride_token + h * p.dst_stride_head;
    float c = 1.0f;
    if (p.sinks) { // one more logit without a value
        const float sink = p.sinks[h] * LOG2_E, top = std::max(m, sink);
        c = m == -INFINITY ? 0.0f : exp2f(m - top);
        l = l * c + exp2f(sink - top);
    }
    if (s.lse) { // nothing seen: -inf
        s.lse[(size_t) iq * p.n_head + h] = std::max(m, p.sinks ? p.sinks[h] * LOG2_E : m) / LOG2_E + logf(l);
    }
    const float inv = l > 0.0f ? c / l : 0.0f;
    for (int d = 0; d < s.n_out; d++) { dst[d] = out[d] * inv; }
}

// Partials of a row: m, l, then the output.
void merge_rows(const stream_plan & s, float * partial) {
    const size_t stride = (size_t) s.dpv + 2;
    for (int i = 0; i < s.p->n_head_kv * s.n_rows; i++) {
        const int kvh = i / s.n_rows, row = i % s.n_rows;
        float * a = partial + ((size_t) kvh * s.n_splits * s.n_rows + row) * stride;
        for (int j = 1; j < s.n_splits; j++) {
            const float * b = a + (size_t) j * s.n_rows * stride;
            const float top = std::max(a[0], b[0]);
            if (b[0] == -INFINITY) { continue; }
            const float ca = a[0] == -INFINITY ? 0.0f : exp2f(a[0] - top), cb = exp2f(b[0] - top);
            a[0] = top;
            a[1] = a[1] * ca + b[1] * cb;
            for (int d = 2; d < s.dpv + 2; d++) { a[d] = a[d] * ca + b[d] * cb; }
        }
        store_row(s, kvh, row, a[0], a[1], a + 2);
    }
}

// Everything that does not depend on the other streams of the call; the most cells of a page.
int make_plan(stream_plan & s, const kvq_attn & attn) {
    s.p = &attn;
    s.gqa = attn.n_head / attn.n_head_kv;
    s.n_rows = s.gqa * attn.n_q;
    s.n_blocks = (s.n_rows + KVQ_MAX_ROWS - 1) / KVQ_MAX_ROWS;
    s.k = kvq_make_view(attn.k);
    s.v = kvq_make_view(attn.v);
    s.k_open = kvq_make_open_view(attn.k);
    s.v_open = kvq_make_open_view(attn.v);
    s.dpk = s.k.dp;
    s.dpv = s.v.dp;
    s.n_out = attn.v.head_size;
    s.latent = attn.flags & (KVQ_ATTN_LATENT | KVQ_ATTN_LATENT_ALL);
    const bool lattice_k = attn.k.type == KVQ_TYPE_LATTICE && !s.latent,
               lattice_v = attn.v.type == KVQ_TYPE_LATTICE && !s.latent;
    const bool f32 = attn.flags & KVQ_ATTN_F32;
    if (lattice_k) { s.lk = kvq_lattice_make_view(attn.k); }
    if (lattice_v) { s.lv = kvq_lattice_make_view(attn.v); }
    s.rope = lattice_k && (attn.rotary || attn.k_mean);
    s.few = false;
    s.folded_k = lattice_k && !f32 && (!attn.rotary || (attn.sealed && attn.positions && attn.rotary->turns));
    s.rotated_v = lattice_v && !f32;
    s.rot = s.rotated_v ? (size_t) s.lv.d * s.lv.n_tiles * 16 : 0;
    s.mixed = attn.k.type == KVQ_TYPE_MIXED && attn.v.type == KVQ_TYPE_MIXED && !f32;
    if (s.mixed) { plan_mixed(s); }
    if (s.latent) { plan_latent(s); }
    find_places(s);
    s.n_head_log2 = 1;
    while (2 * s.n_head_log2 <= attn.n_head) { s.n_head_log2 *= 2; }
    s.m0 = powf(2.0f, -attn.max_bias / (float) s.n_head_log2);
    s.m1 = powf(2.0f, -attn.max_bias / 2.0f / (float) s.n_head_log2);
    s.n_active = 0;
    s.maps = attn.map_stride != 0;
    int cells = attn.k.n_cells;
    for (int j = 0; j < attn.n_pages; j++) {
        s.n_active += attn.pages[j].n_slots > 0;
        cells = std::max(cells, attn.pages[j].n_slots);
    }
    return cells;
}

// Splits that take about the same time: an open page beside sealed ones costs some two and a half of them, and a
// cache has all of its open pages in the last split but for the sinks.
void cut_pages(stream_plan & s) {
    const kvq_attn & p = *s.p;
    const auto cost = [&](const kvq_page & page) {
        return !page.n_slots ? 0 : !page.k_params && p.k.type != KVQ_TYPE_F16 ? 5 : 2;
    };
    int64_t total = 0, before = 0;
    for (int j = 0; j < p.n_pages; j++) { total += cost(p.pages[j]); }
    s.cuts.assign(1, 0);
    for (int j = 0; j < p.n_pages; j++) {
        while ((int) s.cuts.size() < s.n_splits && before * s.n_splits >= total * (int64_t) s.cuts.size()) {
            s.cuts.push_back(j);
        }
        before += cost(p.pages[j]);
    }
    s.cuts.resize((size_t) s.n_splits + 1, p.n_pages);
}

} // namespace

void kvq_cpu_attend(const kvq_attn * attn, int n, int n_threads) { kvq_cpu_attend_part(attn, n, nullptr, n_threads); }

void kvq_cpu_attend_part(const kvq_attn * attn, int n, float * const * lse, int n_threads) {
    const kvq_kernels & K = kvq_get_kernels();
    n_threads = std::max(n_threads, 1);

    static thread_local std::vector<stream_plan> plans;
    static thread_local std::vector<int> first;
    static thread_local std::vector<float> partial_buffer;
    plans.resize((size_t) n);
    first.assign((size_t) n + 1, 0);
    stream_plan * const plan = plans.data();
    workspace::sizes size;
    size_t n_partial = 0;
    int n_prepared = 0; // streams
    // enough tasks that the last one to finish does not matter much
    const int want = n_threads > 1 ? (4 * n_threads + n - 1) / n : 1;
    for (int i = 0; i < n; i++) {
        stream_plan & s = plan[i];
        const int cells = make_plan(s, attn[i]);
        s.lse = lse ? lse[i] : attn[i].lse;
        // few rows: page ranges first, of all heads together; many: heads and row blocks first
        const bool few = s.n_rows <= FEW_ROWS && !attn[i].mask_stride_head && (!s.maps || masks_are_shared(attn[i]));
        s.few = few && s.folded_k;
        if (s.few) {
            s.prepared.resize((size_t) attn[i].n_head_kv);
            n_prepared = i + 1;
        }
        const int most = std::max(s.n_active / 8, 1), n_base = attn[i].n_head_kv * s.n_blocks;
        s.n_splits = std::min(most, few ? want : (want + n_base - 1) / n_base);
        s.n_groups = few ? std::min(attn[i].n_head_kv, (want + s.n_splits - 1) / s.n_splits) : attn[i].n_head_kv;
        s.partial = n_partial;
        cut_pages(s);
        if (s.n_splits > 1) { n_partial += (size_t) attn[i].n_head_kv * s.n_splits * s.n_rows * (s.dpv + 2); }
        first[i + 1] = first[i] + s.n_tasks();

        const size_t rows = (size_t) s.block_rows(), heads = (size_t) (attn[i].n_head_kv + s.n_groups - 1) / s.n_groups;
        const auto pad = [](size_t x) { return (x + 15) / 16 * 16; };
        size.heads = std::max(size.heads, heads);
        size.floats = std::max(size.floats,
            heads *
                (pad(rows * s.dpk) + pad(rows * s.dpv) + pad(rows * s.rot) + 3 * pad(rows) + 32 +
                    (s.has_means() ? pad((size_t) (rows <= FEW_ROWS ? KVQ_MAX_RUN : 1) * rows * attn[i].k.n_cells)
                                   : 0)));
        size.slots = std::max(size.slots, (s.block_rows() <= FEW_ROWS ? KVQ_MAX_RUN : 1) * rows * cells);
        size.tile = std::max(
            size.tile, (size_t) cells * (s.latent ? s.dpk + s.dpv + std::max(s.k.dp, s.v.dp) : std::max(s.dpk, s.dpv)));
        size.work = std::max({ size.work, kvq_work_bytes(s.k), kvq_work_bytes(s.v) });
        size.part = std::max(size.part, s.mixed ? rows * s.dpv : 0);
        size.part_mask = std::max(size.part_mask, s.mixed ? rows * cells : 0);
    }
    partial_buffer.resize(std::max(partial_buffer.size(), n_partial));
    float * const partial = partial_buffer.data();
    const int * const first_task = first.data();

    const int n_tasks = first[n];
    int n_heads = 0;
    for (int i = 0; i < n_prepared; i++) { n_heads = std::max(n_heads, attn[i].n_head_kv); }
#pragma omp parallel num_threads(n_threads) if (n_tasks > 1 && n_threads > 1)
    {
#pragma omp for schedule(dynamic)
        for (int j = 0; j < n_prepared * n_heads; j++) {
            static thread_local std::vector<float> q;
            stream_plan & s = plan[j / n_heads];
            const int kvh = j % n_heads;
            if (s.few && kvh < s.p->n_head_kv) {
                q.resize((size_t) s.n_rows * s.dpk);
                gather(s, kvh, 0, s.n_rows, nullptr, q.data());
                s.prepared[(size_t) kvh].make(s, kvh, s.n_rows, q.data());
            }
        }
#pragma omp for schedule(dynamic)
        for (int task = 0; task < n_tasks; task++) {
            static thread_local workspace w;
            w.fit(size);
            int i = 0;
            while (task >= first_task[i + 1]) { i++; }
            const stream_plan & s = plan[i];
            const int t = task - first_task[i];
            const int split = t % s.n_splits, block = t / s.n_splits % s.n_blocks, group = t / s.n_splits / s.n_blocks;
            const int h0 = s.p->n_head_kv * group / s.n_groups, h1 = s.p->n_head_kv * (group + 1) / s.n_groups;
            const int r0 = block * KVQ_MAX_ROWS, rows = std::min(KVQ_MAX_ROWS, s.n_rows - r0);
            const int p0 = s.cuts[(size_t) split], p1 = s.cuts[(size_t) split + 1];
            run_task(K, s, w, h0, h1 - h0, r0, rows, p0, p1);
            for (int kvh = h0; kvh < h1; kvh++) {
                const head_rows & h = w.heads[(size_t) (kvh - h0)];
                for (int r = 0; r < rows; r++) {
                    const float * out = h.out + (size_t) r * s.dpv;
                    if (s.n_splits == 1) {
                        store_row(s, kvh, r0 + r, h.m[r], h.l[r], out);
                    } else {
                        float * to = partial + s.partial +
                            (((size_t) kvh * s.n_splits + split) * s.n_rows + r0 + r) * (s.dpv + 2);
                        to[0] = h.m[r];
                        to[1] = h.l[r];
                        memcpy(to + 2, out, 4 * (size_t) s.dpv);
                    }
                }
            }
        }
    }
    for (int i = 0; i < n; i++) {
        if (plan[i].n_splits > 1) { merge_rows(plan[i], partial + plan[i].partial); }
    }
}

#include "attend_sums.h"

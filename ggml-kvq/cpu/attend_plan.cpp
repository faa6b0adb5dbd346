// What a call of attention knows before it reads a page.
#include "attend_mask.h"
#include "attend_parts.h"

#include "engine/turns.h"

#include <cmath>
#include <cstring>
#include <numeric>

namespace kvq_attention {

static float alibi_slope(const stream_plan & s, int h) {
    if (s.p->max_bias <= 0.0f) { return 1.0f; }
    return h < s.n_head_log2 ? powf(s.m0, (float) (h + 1)) : powf(s.m1, (float) (2 * (h - s.n_head_log2) + 1));
}

// ---------------------------------------------------------------- keys that were sealed with their rotary embedding

// Lattice keys may lack their mean (policy/transform.h): which queries a page meets.
void key_queries::make(const stream_plan & s, int kvh, int n_rows, const float * q) {
    const kvq_attn & p = *s.p;
    const int D = p.k.head_size;
    // with coordinates the mean is part of the rows that they say
    const float * mean = p.k_mean && !p.k_basis ? p.k_mean + (size_t) kvh * D : nullptr;
    std::vector<float> turned, sorted;
    sets.resize(std::max<size_t>(sets.size(), s.moved.size()));
    for (size_t i = 0; i < s.moved.size(); i++) {
        set & x = sets[i];
        const float * rows = q;
        if (s.moved[i]) {
            turned.assign(q, q + (size_t) n_rows * s.dpk);
            for (int r = 0; r < n_rows; r++) { kvq_turn_back(*p.rotary, s.moved[i], &turned[(size_t) r * s.dpk]); }
            rows = turned.data();
        }
        const float * folds = rows;
        if (p.k_order) { // q . sorted^-1(k) = (q[channel] back) . k
            sorted.assign((size_t) n_rows * s.dpk, 0.0f);
            const size_t head = (size_t) kvh * D;
            for (int r = 0; r < n_rows; r++) {
                for (int d = 0; d < D; d++) {
                    sorted[(size_t) r * s.dpk + d] =
                        rows[(size_t) r * s.dpk + p.k_order->channel[head + d]] * p.k_order->back[head + d];
                }
            }
            folds = sorted.data();
        }
        for (int half = 0; half < s.lk.n; half++) { x.folded[half].fold(s.lk.half[half], n_rows, s.dpk, folds); }
        x.coef.resize(p.rotary ? (size_t) n_rows * 2 * s.turns.n_pad : 0);
        x.step.assign((size_t) 2 * n_rows, 0.0f);
        x.rest.assign((size_t) n_rows, 0.0f);
        for (int r = 0; mean && r < n_rows; r++) {
            const float * row = rows + (size_t) r * s.dpk;
            if (p.rotary) {
                kvq_turn_coefficients(
                    *p.rotary, row, mean, &x.coef[(size_t) r * 2 * s.turns.n_pad], &x.step[(size_t) 2 * r]);
            }
            for (int d = p.rotary ? p.rotary->n_dims : 0; d < D; d++) { x.rest[(size_t) r] += row[d] * mean[d]; }
        }
    }
}

// Sealed pages whose cells moved together, and, where keys lack a mean, have positions in a row.
static void find_places(stream_plan & s) {
    const kvq_attn & p = *s.p;
    s.moved.assign(1, 0);
    s.places.clear();
    s.turns = {};
    if (!s.rope) { return; }
    const kvq_turns * turns = p.rotary ? (const kvq_turns *) p.rotary->turns : nullptr;
    if (turns) { s.turns = turns->view(); }
    const kvq_kernels & K = kvq_get_kernels();
    const int n = p.k.n_cells;
    s.places.assign((size_t) p.n_pages, { -1, 0 });
    for (int j = 0; s.folded_k && j < p.n_pages; j++) {
        const kvq_page & page = p.pages[j];
        if (!page.n_slots || !page.k_params || page.map) { continue; }
        if (!p.rotary) {
            s.places[(size_t) j] = { 0, 0 };
            continue;
        }
        const int32_t *sealed = p.sealed + page.cell, *now = p.positions + page.cell, first = sealed[0],
                      by = now[0] - first;
        int32_t apart, gap, sign;
        K.page_positions(n, now, sealed, &apart, &gap, &sign);
        const bool fits = !apart && sign >= 0 && (!p.k_mean || p.k_basis || (!gap && n <= 2 * KVQ_TURN_HALF));
        const size_t set = (size_t) (std::find(s.moved.begin(), s.moved.end(), by) - s.moved.begin());
        if (!fits || set >= MAX_SETS) { continue; }
        if (set == s.moved.size()) { s.moved.push_back(by); }
        s.places[(size_t) j] = { (int) set, first };
    }
}

// ---------------------------------------------------------------- streams

// Pages up to the last one that a query token sees. Those behind it may be left from a freed sequence: how work is cut,
// and with it the order of sums, must not depend on them.
static int n_seen_pages(const kvq_attn & p) {
    if (!p.mask || p.mask_stride_head || p.map_stride) { return p.n_pages; }
    int last = -1; // cell
    for (int iq = 0; iq < p.n_q; iq++) { last = last_seen_cell(p.mask + iq * p.mask_stride_token, last + 1, p.n_kv); }
    int n = p.n_pages;
    while (n > 0 && (!p.pages[n - 1].n_slots || p.pages[n - 1].cell > last)) { n--; }
    return n;
}

static int p_coords(const kvq_basis * b, const kvq_codec & keys) { return b && keys.coords ? b->n : 0; }

// stream_plan::near, for few rows
static void make_near(stream_plan & s) {
    const kvq_attn & p = *s.p;
    s.near.clear();
    if (!s.n_coords[0] || !p.rotary || p.rotary->n_dims != p.k.head_size || s.n_rows > FEW_ROWS) { return; }
    const int n = std::min(KVQ_MAX_RUN * p.k.n_cells, 64 * p.rotary->n_high) / 16 * 16, D = p.k.head_size;
    s.near.resize((size_t) (n * D));
    for (int32_t t = 0; t < n; t += 16) {
        int32_t at[16];
        std::iota(at, at + 16, t);
        kvq_get_kernels().turn_table(*p.rotary, at, false, s.near.data() + (size_t) t * D);
    }
}

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
    if (lattice_k) { s.lk = kvq_lattice_make_keys(attn.k); }
    if (lattice_v) { s.lv = kvq_lattice_make_view(attn.v); }
    s.rope = lattice_k && (attn.rotary || attn.k_mean || attn.k_order);
    s.n_coords[0] = p_coords(attn.k_basis, attn.k);
    s.n_coords[1] = p_coords(attn.v_basis, attn.k);
    s.v_stride = (s.n_coords[1] + 15) / 16 * 16;
    make_near(s);
    s.few = false;
    s.fold = nullptr;
    s.n_fold = 0;
    // a short context is all window: then queries are not folded, nor outputs rotated
    const bool sealed = std::any_of(attn.pages, attn.pages + attn.n_pages,
        [](const kvq_page & p) { return p.n_slots && (p.k_params || p.v_params); });
    s.folded_k = lattice_k && sealed && !f32 && (!attn.rotary || (attn.sealed && attn.positions && attn.rotary->turns));
    s.rotated_v = lattice_v && sealed && !f32;
    s.rot = s.rotated_v ? (size_t) s.lv.d * s.lv.n_tiles * 16 : 0;
    s.mixed = attn.k.type == KVQ_TYPE_MIXED && attn.v.type == KVQ_TYPE_MIXED && !f32;
    if (s.mixed) { plan_mixed(s); }
    if (s.latent) { plan_latent(s); }
    find_places(s);
    s.n_head_log2 = 1;
    while (2 * s.n_head_log2 <= attn.n_head) { s.n_head_log2 *= 2; }
    s.m0 = powf(2.0f, -attn.max_bias / (float) s.n_head_log2);
    s.m1 = powf(2.0f, -attn.max_bias / 2.0f / (float) s.n_head_log2);
    s.n_seen = n_seen_pages(attn);
    s.n_active = 0;
    s.maps = attn.map_stride != 0;
    int cells = attn.k.n_cells;
    for (int j = 0; j < attn.n_pages; j++) {
        s.n_active += j < s.n_seen && attn.pages[j].n_slots > 0;
        cells = std::max(cells, attn.pages[j].n_slots);
    }
    return cells;
}

void cut_pages(stream_plan & s) {
    const kvq_attn & p = *s.p;
    const auto cost = [&](const kvq_page & page) {
        return !page.n_slots ? 0 : !page.k_params && p.k.type != KVQ_TYPE_F16 ? 5 : 2;
    };
    int64_t total = 0, before = 0;
    for (int j = 0; j < s.n_seen; j++) { total += cost(p.pages[j]); }
    s.cuts.assign(1, 0);
    for (int j = 0; j < s.n_seen; j++) {
        while ((int) s.cuts.size() < s.n_splits && before * s.n_splits >= total * (int64_t) s.cuts.size()) {
            s.cuts.push_back(j);
        }
        before += cost(p.pages[j]);
    }
    s.cuts.resize((size_t) s.n_splits + 1, p.n_pages);
}

// ---------------------------------------------------------------- heads

void gather(const stream_plan & s, int kvh, int r0, int n_rows, const int32_t * tokens, float * to) {
    const kvq_attn & p = *s.p;
    const size_t dk = (size_t) p.k.head_size;
    for (int r = 0; r < n_rows; r++, to += s.dpk) {
        const int token = (r0 + r) / s.gqa, iq = tokens ? tokens[token] : token, head = kvh * s.gqa + (r0 + r) % s.gqa;
        const float * from = p.q + iq * p.q_stride_token + head * p.q_stride_head;
        memset(to, 0, 4 * (size_t) s.dpk);
        memcpy(to, from, 4 * dk);
        if (s.latent) { memcpy(to + s.k.dp, from + dk, 4 * (size_t) p.v.head_size); }
    }
}

void start_head(const stream_plan & s, workspace & w, head_rows & h, int kvh, int r0, int n_rows, size_t & at,
    const int32_t * tokens, bool folds) {
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
    h.fold = take(rows * (size_t) s.n_fold);
    h.coords = take(rows * (size_t) s.v_stride);
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
    memset(h.fold, 0, 4 * rows * (size_t) s.n_fold);
    memset(h.coords, 0, 4 * rows * (size_t) s.v_stride);
    h.keys = s.few ? &s.prepared[(size_t) kvh] : &h.own;
    if (s.folded_k && !s.few && folds) { h.own.make(s, kvh, n_rows, h.q); }
}

void end_head(const stream_plan & s, head_rows & h, int n_rows) {
    const kvq_attn & p = *s.p;
    for (int r = 0; r < n_rows; r++) {
        float * out = h.out + (size_t) r * s.dpv;
        if (s.rotated_v) { kvq_get_kernels().unrotate(s.lv, h.rot + r * s.rot, out); }
        if (s.n_coords[1]) { // sum f p (2 c - 15), then the basis once
            kvq_get_kernels().add_basis(
                *p.v_basis, h.kvh * p.v.head_size, p.v.head_size, h.coords + (size_t) r * s.v_stride, out);
        }
        for (int d = 0; p.v_mean && d < p.v.head_size; d++) {
            out[d] += (h.l[r] - h.open[r]) * p.v_mean[(size_t) h.kvh * p.v.head_size + d];
        }
    }
}

} // namespace kvq_attention

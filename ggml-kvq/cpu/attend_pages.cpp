// A run of pages: score, online softmax, accumulate.
#include "attend_parts.h"

#include "engine/rope.h"
#include "engine/turns.h"
#include "types/lattice.h"

#include <cstring>

namespace kvq_attention {

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

constexpr int MOST_TURNED = 8; // rows: turning more of them costs as much as a table of angles for each page

// Where the run's first page begins, when its sealed keys lie at positions in a row that stream_plan::near has.
static int32_t near_of(const stream_plan & s, const page_run & r) {
    const int n = s.p->k.n_cells;
    if (s.near.empty()) { return -1; }
    int32_t from = -1;
    for (int i = 0; i < r.n_pages; i++) {
        const kvq_page & page = *r.page[i];
        if (!page.k_params) { continue; }
        const int32_t * at = s.p->positions + page.cell;
        if (from < 0) { from = at[0] - i * n; }
        if (from < 0 || page.map || (i + 1) * n > s.n_near()) { return -1; }
        int32_t apart = 0;
        for (int t = 0; t < n; t++) { apart |= at[t] - from - i * n - t; }
        if (apart) { return -1; }
    }
    return from;
}

void take_coords(const kvq_kernels & K, const stream_plan & s, workspace & w, const page_run & r) {
    const kvq_attn & p = *s.p;
    w.near_from = s.n_coords[0] && r.n_rows <= MOST_TURNED ? near_of(s, r) : -1;
    if (w.near_from >= 0) {
        kvq_rotary_turn(*p.rotary, w.near_from, false, w.back);
        const float inv = 1.0f / p.rotary->high[0]; // `near` has the magnitude
        for (int i = 0; i < p.rotary->n_dims; i++) { w.back[i] *= inv; }
    }
    for (int i = 0; i < r.n_pages; i++) {
        const kvq_page & page = *r.page[i];
        float * to = w.coords + (size_t) i * s.coord_floats();
        if (s.n_coords[0] && page.k_params) {
            K.key_coords(
                kvq_coords_in(p.k, s.k.nb_params, (const uint8_t *) page.k_params), s.n_coords[0], (uint8_t *) to);
            for (int t = 0; p.rotary && w.near_from < 0 && t < p.k.n_cells; t += 16) {
                K.turn_table(
                    *p.rotary, p.positions + page.cell + t, false, to + s.key_floats() + (size_t) t * p.rotary->n_dims);
            }
        }
        if (s.n_coords[1] && page.v_params && page.k_params) {
            K.value_coords(kvq_coords_in(p.k, s.k.nb_params, (const uint8_t *) page.k_params), s.n_coords[1],
                s.v_stride, to + s.key_floats() + s.turn_floats());
        }
    }
}

// Few rows meet coordinates directly. More of them share a tile of what mean and coordinates say.
static void coord_part(
    const kvq_kernels & K, const stream_plan & s, workspace & w, const head_rows & h, const page_run & r, float * to) {
    const kvq_attn & p = *s.p;
    const int n = r.page[0]->n_slots, D = p.k.head_size;
    const bool turns = p.rotary, neox = turns && p.rotary->neox, whole = turns && p.rotary->n_dims == D && D % 8 == 0;
    float turned[MOST_TURNED * KVQ_MAX_HEAD];
    const float *q = h.q + (size_t) r.first * s.dpk, *mean = p.k_mean + (size_t) h.kvh * D;
    if (w.near_from >= 0) {
        K.turn_back(r.n_rows, D, s.dpk, neox, w.back, q, turned);
        q = turned;
    }
    for (int i = 0; i < r.n_pages; i++, to += (size_t) r.n_rows * n) {
        if (!r.page[i]->k_params) { continue; }
        const float * const from = w.coords + (size_t) i * s.coord_floats();
        const float * const table = !turns ? nullptr
            : w.near_from < 0              ? from + s.key_floats()
                                           : s.near.data() + (size_t) i * n * D;
        if (whole && r.n_rows <= K.coord_rows) {
            K.coord_logits(*p.k_basis, h.kvh, D, s.dpk, n, (const uint8_t *) from, mean, table, neox, r.n_rows, q, to);
            continue;
        }
        K.basis_keys(*p.k_basis, h.kvh, D, s.dpk, n, (const uint8_t *) from, mean, table, turns ? p.rotary->n_dims : 0,
            neox, w.tile);
        K.score_tile(r.n_rows, s.dpk, n, w.tile, q, to);
    }
}

void mean_part(
    const kvq_kernels & K, const stream_plan & s, workspace & w, const head_rows & h, const page_run & r, float * to) {
    if (s.n_coords[0]) {
        coord_part(K, s, w, h, r, to);
        return;
    }
    const kvq_attn & p = *s.p;
    const int n = r.page[0]->n_slots, rows = r.n_rows;
    for (int i = 0, pages = 1; i < r.n_pages; i += pages, pages = 1) {
        const key_place at = s.place_of(*r.page[i]);
        if (at.set < 0 || !r.page[i]->k_params) { continue; }
        const key_queries::set & set = h.keys->sets[(size_t) at.set];
        float * const logits = to + (size_t) i * rows * n;
        const auto follows = [&](const kvq_page & page, int32_t first) {
            const key_place x = s.place_of(page);
            return page.k_params && x.set == at.set && x.first == first;
        };
        while (p.rotary && i + pages < r.n_pages && (pages + 1) * n <= 2 * KVQ_TURN_HALF &&
            follows(*r.page[i + pages], at.first + pages * n)) {
            pages++;
        }
        if (p.rotary) {
            K.score_mean(s.turns, at.first, pages, n, rows, set.coef.data() + (size_t) r.first * 2 * s.turns.n_pad,
                set.step.data() + 2 * r.first, logits);
        } else {
            std::fill_n(logits, (size_t) rows * n, 0.0f);
        }
        for (int x = 0; (!p.rotary || p.rotary->n_dims < p.k.head_size) && x < pages * rows * n; x++) {
            logits[x] += set.rest[(size_t) (r.first + x / n % rows)];
        }
    }
}

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
        K.score_rope(s.lk, rows, (const uint8_t *) k.run.codes[0], k.run.params[0], p.k_order, h.kvh,
            p.k_mean && !s.n_coords[0] ? p.k_mean + (size_t) h.kvh * p.k.head_size : nullptr, p.rotary, of(p.sealed),
            of(p.positions), s.dpk, q, to);
        for (int x = 0; s.n_coords[0] && x < rows * n; x++) { to[x] += means[(size_t) i * rows * n + x]; }
    } else if (!k.kernels) {
        const key_queries::set & set = h.keys->sets[(size_t) at.set];
        const float * add = means ? means + (size_t) i * rows * n : nullptr;
        for (int half = 0; half < s.lk.n; half++, add = to) { // a logit is the sum over both
            K.score_lattice(s.lk.half[half], rows, k.run, set.folded[half].rows.data() + r.first, add, to);
        }
    } else if (k.tile) {
        k.kernels->to_tile(*k.view, k.run.codes[0], k.run.params[0], w.tile, w.work);
        K.score_tile(rows, s.dpk, n, w.tile, q, to);
    } else {
        k.kernels->score(*k.view, rows, k.run, q, to, w.work);
    }
    return k.run.n_pages;
}

void value_part(const kvq_kernels & K, const stream_plan & s, workspace & w, head_rows & h, const page_run & r,
    const float * prob, const float * f) {
    const size_t per_page = (size_t) r.page[0]->n_slots * r.n_rows;
    float *const out = h.out + (size_t) r.first * s.dpv, *const rot = h.rot + r.first * s.rot;
    for (int i = 0; i < r.n_pages;) {
        const lane_part v(K, s.v, s.v_open, r, i, true, h.kvh, s.p->flags & KVQ_ATTN_F32, s.rotated_v, KVQ_MAX_RUN, w);
        const float *p = prob + i * per_page, *by = f + i * KVQ_MAX_ROWS;
        if (!v.kernels) {
            K.accum_lattice(s.lv, r.n_rows, v.run, p, by, rot);
        } else if (v.tile) {
            v.kernels->to_tile(*v.view, v.run.codes[0], v.run.params[0], w.tile, w.work);
            K.accum_tile(r.n_rows, s.dpv, r.page[0]->n_slots, w.tile, p, by, out);
        } else {
            v.kernels->accum(*v.view, r.n_rows, v.run, p, by, out, w.work);
        }
        i += v.run.n_pages;
    }
}

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
                K.scale(s.v_stride, h.coords + (size_t) (r.first + i) * s.v_stride, c[i]);
                K.scale(s.n_fold, h.fold + (size_t) (r.first + i) * s.n_fold, c[i]);
            }
        }
    }
    for (int i = 0; p.v_mean && i < r.n_pages; i++) {
        for (int j = 0; j < rows && !r.page[i]->v_params; j++) {
            h.open[r.first + j] += f[i * KVQ_MAX_ROWS + j] * sums[i * KVQ_MAX_ROWS + j];
        }
    }

    next.values(s);
    value_part(K, s, w, h, r, w.logits, f);
    for (int i = 0; s.n_coords[1] && i < r.n_pages; i++) {
        if (!r.page[i]->v_params || !r.page[i]->k_params) { continue; }
        K.accum_tile(rows, s.v_stride, n, w.coords + (size_t) i * s.coord_floats() + s.key_floats() + s.turn_floats(),
            w.logits + (size_t) i * per_page, f + i * KVQ_MAX_ROWS, h.coords + (size_t) r.first * s.v_stride);
    }
    if (s.fold) { fold_part(K, s, h, r, w.logits, f); }
}

} // namespace kvq_attention

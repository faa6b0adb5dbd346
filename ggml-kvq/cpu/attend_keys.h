// Part of attend.cpp. Lattice keys that were sealed with their rotary embedding and without their mean
// (cache/transform.h): which queries a page meets, and what the mean adds.

void key_queries::make(const stream_plan & s, int kvh, int n_rows, const float * q) {
    const kvq_attn & p = *s.p;
    const int D = p.k.head_size;
    const float * mean = p.k_mean ? p.k_mean + (size_t) kvh * D : nullptr;
    std::vector<float> turned;
    sets.resize(std::max<size_t>(sets.size(), s.moved.size()));
    for (size_t i = 0; i < s.moved.size(); i++) {
        set & x = sets[i];
        const float * rows = q;
        if (s.moved[i]) {
            turned.assign(q, q + (size_t) n_rows * s.dpk);
            for (int r = 0; r < n_rows; r++) { kvq_turn_back(*p.rotary, s.moved[i], &turned[(size_t) r * s.dpk]); }
            rows = turned.data();
        }
        x.folded.fold(s.lk, n_rows, s.dpk, rows);
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
void find_places(stream_plan & s) {
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
        const bool fits = !apart && sign >= 0 && (!p.k_mean || (!gap && n <= 2 * KVQ_TURN_HALF));
        const size_t set = (size_t) (std::find(s.moved.begin(), s.moved.end(), by) - s.moved.begin());
        if (!fits || set >= MAX_SETS) { continue; }
        if (set == s.moved.size()) { s.moved.push_back(by); }
        s.places[(size_t) j] = { (int) set, first };
    }
}

// What the mean of keys adds to the logits of a run's sealed pages, [page][row][n]; other pages' are left as they
// are. Of all heads before the first is scored: the tables are then read once.
void mean_part(const kvq_kernels & K, const stream_plan & s, const head_rows & h, const page_run & r, float * to) {
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

// Queries are gathered because query heads and tokens have free strides.
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

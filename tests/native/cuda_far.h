// Attention that fetches far rows (kvq_far) against its definition in f64, and far rows against the C reference. Part
// of test_cuda.cpp.
#pragma once

#include "cuda_far_rows.h"

struct far_case {
    attention_case c;
    int top, format;
    int room = 0; // ahead, some steps, each reads what those before have picked: rows per KV head that stay
};

static double check_far(kvq_cuda_device & d, const far_case & f, int & n_checked, bool all = false) {
    const attention_case & c = f.c;
    const bool ahead = f.room > 0;
    world w(d, c);
    const char * why = d.refuse_far(w.k.codec, w.v.codec, f.format, f.top);
    CHECK(!why || getenv("KVQ_CUDA_AS"), "refused: %s", why);
    if (why) { return 0.0; }
    const int H = c.n_kv_heads * c.gqa, D = c.D, P = w.k.page_cells, np = w.k.n_pages,
              n_kv_most = std::min(c.n_cells, np * P) - uniform(0, 20), n_mask = (n_kv_most + 63) / 64 * 64;
    int n_kv = n_kv_most;
    std::vector<uint8_t> has(w.pages.size());
    for (size_t p = 0; p < has.size(); p++) { has[p] = w.pages[p].k_params && w.pages[p].v_params && uniform(0, 5); }
    far_lane lane[2] = { { d, w, false, f.format, has }, { d, w, true, f.format, has } };
    std::vector<float> q((size_t) c.n_stream * c.n_q * H * D), sinks(H), dst(q.size(), NAN);
    for (auto & x : q) { x = 1.5f * normal(); }
    for (auto & x : sinks) { x = normal(); }
    const int n_masks = c.head_masks ? H : 1;
    std::vector<uint16_t> mask((size_t) c.n_stream * c.n_q * n_masks * n_mask);
    for (auto & x : mask) {
        x = uniform(0, 4) ? kvq_f32_to_f16(c.max_bias > 0 ? -(float) uniform(0, 20) : 0.0f) : 0xfc00;
    }
    device_bytes tq(d, q.size() * 4, q.data()), tm(d, mask.size() * 2, mask.data()),
        ts(d, sinks.size() * 4, sinks.data()), to(d, dst.size() * 4, dst.data()),
        tk(d, lane[0].rows.size() * sizeof(void *), lane[0].rows.data()),
        tv(d, lane[1].rows.size() * sizeof(void *), lane[1].rows.data());
    const std::vector<uint64_t> zeros(4, 0);
    device_bytes counts(d, 32, zeros.data());
    std::vector<kvq_attn> a(c.n_stream);
    std::vector<kvq_far> far(c.n_stream);
    for (int s = 0; s < c.n_stream; s++) {
        kvq_attn & x = a[s];
        x = kvq_attn{};
        x.k = w.k.codec;
        x.v = w.v.codec;
        x.n_q = c.n_q;
        x.n_head = H;
        x.n_head_kv = c.n_kv_heads;
        x.n_kv = n_kv;
        x.n_pages = std::min((n_kv + P - 1) / P, np);
        x.scale = 1.0f / sqrtf((float) D);
        x.max_bias = c.max_bias;
        x.softcap = c.softcap;
        x.q = (const float *) tq.p + (size_t) s * c.n_q * H * D;
        x.q_stride_token = (int64_t) H * D;
        x.q_stride_head = D;
        x.mask = (const uint16_t *) tm.p + (size_t) s * c.n_q * n_masks * n_mask;
        x.mask_stride_token = n_masks * n_mask;
        x.mask_stride_head = c.head_masks ? n_mask : 0;
        x.sinks = c.sinks ? (const float *) ts.p : nullptr;
        x.dst = (float *) to.p + (size_t) s * c.n_q * H * D;
        x.dst_stride_token = (int64_t) H * D;
        x.dst_stride_head = D;
        x.pages = (const kvq_page *) w.pages_there->p + (size_t) s * np;
        w.leave_out(x, s);
        far[s] = { all  ? KVQ_FETCH_ALL
                : ahead ? KVQ_FETCH_AHEAD
                        : KVQ_FETCH_NOW,
            f.top, f.format, P, (const void * const *) tk.p + (size_t) s * np,
            (const void * const *) tv.p + (size_t) s * np, nullptr, (uint64_t *) counts.p, nullptr, np * P, f.room };
        x.far = &far[s];
    }
    std::unique_ptr<kept_rows> kept;
    if (ahead) {
        kept.reset(new kept_rows(d, w, c.n_stream, f.top, f.room, f.format));
        for (int s = 0; s < c.n_stream; s++) {
            far[s].kept = (int32_t *) kept->cells_there->p + (size_t) s * c.n_kv_heads * f.room;
            far[s].buffer = (uint8_t *) kept->buffer->p + s * kept->at.size;
        }
    }
    int log2 = 1;
    while (2 * log2 <= H) { log2 *= 2; }
    double err = 0, norm = 0;
    uint64_t n_picked = 0, n_anew = 0, n_wanted = 0, n_hits = 0, n_unsure = 0;
    const int n_slots = np * P, n_steps = ahead ? 4 : 1;
    std::vector<double> o(D), logit((size_t) c.gqa * n_slots), score(n_slots);
    for (int step = 0; step < n_steps; step++) {
        if (step) {
            for (auto & x : q) { x = 0.8f * x + 0.9f * normal(); }
            d.put(tq.p, q.data(), q.size() * 4);
            n_kv = n_kv_most - (step == 2 ? n_kv_most / 3 : 0); // cells that were picked may be gone
            for (kvq_attn & x : a) {
                x.n_kv = n_kv;
                x.n_pages = std::min((n_kv + P - 1) / P, np);
                x.flags ^= c.turns && c.stayed && step != 1 ? KVQ_ATTN_STAYED : 0; // read in parts for once
            }
        }
        for (int s = 0; s < c.n_stream && kept && step > 1; s++) { // a page, or all of them
            const bool again = step == 3 && s == 0;
            kept->renew(d, w, far[s], s, again ? 0 : np / 3, again ? np : np / 3 + 1, again);
        }
        // a call that reads its own picks, and what was kept before goes
        const bool anew = ahead && f.top % 2 && step % 3 == 0;
        for (kvq_far & x : far) {
            x.fetch = anew ? KVQ_FETCH_NOW : x.fetch == KVQ_FETCH_NOW && ahead ? KVQ_FETCH_AHEAD : x.fetch;
        }
        if (anew) { std::fill(kept->cells.begin(), kept->cells.end(), -1); }
        const std::vector<int32_t> given = kept ? kept->cells : std::vector<int32_t>();
        const int from = ahead ? kvq_far_first_kept(c.n_q, f.room, f.top) : c.n_q; // the first token whose picks stay
        std::vector<std::vector<token_picks>> staying((size_t) c.n_stream * c.n_kv_heads);
        const int64_t before = d.n_far, before_ahead = d.n_ahead;
        const int n_times = ahead ? 1 : 2; // sums are zero again
        for (int again = 0; again < n_times; again++) { d.attend(a.data(), c.n_stream, &w.k, &w.v); }
        d.get(dst.data(), to.p, dst.size() * 4);
        CHECK(d.error().empty(), "%s", d.error().c_str());
        CHECK(all || d.n_far == before + n_times, "%s", "nothing was fetched");
        CHECK(!ahead || d.n_ahead == before_ahead + (!anew && (!c.turns || a[0].flags)),
            "no kernel read what was kept: kb %d vb %d group %d D %d gqa %d n_q %d turns %d", c.kb, c.vb, c.group, c.D,
            c.gqa, c.n_q, c.turns);
        const std::vector<int32_t> kept_now = kept ? kept->cells_there->get<int32_t>() : std::vector<int32_t>();
        for (int s = 0; s < c.n_stream; s++) {
            for (int t = 0; t < c.n_q; t++) {
                for (int kvh = 0; kvh < c.n_kv_heads; kvh++) {
                    std::vector<double> lse(c.gqa);
                    const auto logit_of = [&](int head, int cell, const float * key) {
                        const double slope = c.max_bias <= 0 ? 1.0
                            : head < log2 ? pow(pow(2.0, -c.max_bias / log2), head + 1)
                                          : pow(pow(2.0, -c.max_bias / 2 / log2), 2 * (head - log2) + 1);
                        const uint16_t m =
                            mask[(((size_t) s * c.n_q + t) * n_masks + (c.head_masks ? head : 0)) * n_mask + cell];
                        if (m == 0xfc00) { return -(double) INFINITY; }
                        const float * qr = &q[(((size_t) s * c.n_q + t) * H + head) * D];
                        double y = 0;
                        for (int i = 0; i < D; i++) { y += (double) qr[i] * key[i]; }
                        y /= sqrt((double) D);
                        if (c.softcap != 0) { y = c.softcap * tanh(y / c.softcap); }
                        return y + slope * kvq_f16_to_f32(m);
                    };
                    const auto far_row = [&](int r, int cell) {
                        return &lane[r].x[((((size_t) s * np + cell / P) * c.n_kv_heads + kvh) * P + cell % P) * D];
                    };
                    const auto near_row = [&](int r, int cell) {
                        return &(r ? w.vx : w.kx)[s][((size_t) cell * c.n_kv_heads + kvh) * D];
                    };
                    std::fill(score.begin(), score.end(), 0.0);
                    for (int g = 0; g < c.gqa; g++) {
                        const int head = kvh * c.gqa + g;
                        double top = c.sinks ? sinks[head] : -INFINITY, sum = 0;
                        for (int cell = 0; cell < n_slots; cell++) {
                            double & y = logit[(size_t) g * n_slots + cell];
                            y = w.pages[(size_t) s * np + cell / P].n_slots && cell < n_kv
                                ? logit_of(head, cell, near_row(0, cell))
                                : -INFINITY;
                            top = std::max(top, y);
                        }
                        for (int cell = 0; cell < n_slots; cell++) {
                            sum += exp(logit[(size_t) g * n_slots + cell] - top);
                        }
                        lse[g] = top + log(sum + (c.sinks ? exp(sinks[head] - top) : 0.0));
                        for (int cell = 0; cell < n_slots && top > -INFINITY; cell++) {
                            if (has[(size_t) s * np + cell / P]) {
                                score[cell] += exp(logit[(size_t) g * n_slots + cell] - lse[g]);
                            }
                        }
                    }
                    std::vector<int> order;
                    for (int cell = 0; cell < n_slots; cell++) {
                        if (score[cell] > 0) { order.push_back(cell); }
                    }
                    std::stable_sort(order.begin(), order.end(), [&](int x, int y) { return score[x] > score[y]; });
                    bool close = false;
                    if (all) {
                        order.clear();
                        for (int cell = 0; cell < n_kv; cell++) {
                            if (has[(size_t) s * np + cell / P]) { order.push_back(cell); }
                        }
                    } else if ((int) order.size() > f.top) {
                        close = score[order[f.top]] > 0.985 * score[order[f.top - 1]];
                        order.resize(f.top);
                    }
                    n_picked += order.size();
                    if (anew) { n_anew += order.size(); }
                    if (ahead) {
                        const size_t list = (size_t) s * c.n_kv_heads + kvh;
                        const int32_t * before = &given[list * f.room];
                        std::vector<int> old;
                        for (int i = 0; i < f.room && before[i] >= 0; i++) {
                            if (before[i] < n_kv) { old.push_back(before[i]); }
                        }
                        std::sort(order.begin(), order.end());
                        if (t == 0) {
                            n_wanted += order.size();
                            n_unsure += close;
                            for (int cell : order) { n_hits += std::count(before, before + f.room, cell); }
                        }
                        if (t >= from) { staying[list].push_back({ { order.begin(), order.end() }, close }); }
                        if (t == c.n_q - 1) {
                            CHECK(close || std::equal(order.begin(), order.end(), &kept_now[list * f.room]),
                                "picks of step %d stream %d head %d differ", step, s, kvh);
                        }
                        if (!anew) { order = old; }
                    }
                    if (close && (!ahead || anew)) { continue; } // rounding decides
                    std::vector<uint8_t> picked(n_slots, 0);
                    for (int cell : order) { picked[cell] = 1; }
                    for (int g = 0; g < c.gqa; g++) {
                        const int head = kvh * c.gqa + g;
                        double top = c.sinks ? sinks[head] : -INFINITY, sum = 0;
                        for (int cell = 0; cell < n_slots; cell++) {
                            double & y = logit[(size_t) g * n_slots + cell];
                            if (picked[cell]) { y = logit_of(head, cell, far_row(0, cell)); }
                            top = std::max(top, y);
                        }
                        sum = c.sinks ? exp(sinks[head] - top) : 0;
                        std::fill(o.begin(), o.end(), 0.0);
                        for (int cell = 0; cell < n_slots; cell++) {
                            const double y = logit[(size_t) g * n_slots + cell];
                            if (y == -INFINITY) { continue; }
                            const double p = exp(y - top);
                            sum += p;
                            const float * vr = picked[cell] ? far_row(1, cell) : near_row(1, cell);
                            for (int i = 0; i < D; i++) { o[i] += p * vr[i]; }
                        }
                        for (int i = 0; i < D; i++) {
                            const double ref = sum > 0 ? o[i] / sum : 0,
                                         got = dst[(((size_t) s * c.n_q + t) * H + head) * D + i];
                            CHECK(std::isfinite(got), "not finite at token %d head %d channel %d", t, head, i);
                            err += (got - ref) * (got - ref);
                            norm += ref * ref;
                        }
                        n_checked++;
                    }
                }
            }
        }
        if (kept) { kept->step(lane, n_kv, staying, !anew); }
    }
    const std::vector<uint64_t> counted = counts.get<uint64_t>();
    const uint64_t n_come = ahead ? n_anew + kept->n_come : 2 * n_picked, n_calls = ahead ? 4 : 2;
    const uint64_t n_loose = kept ? kept->n_loose : 0;
    CHECK(
        all || (counted[0] + n_loose >= n_come && counted[0] <= n_come + n_loose && counted[3] == n_calls * c.n_stream),
        "%d rows counted, not %d, in %d steps", (int) counted[0], (int) n_come, (int) counted[3]);
    CHECK(!ahead || (counted[1] == n_wanted && (n_unsure || counted[2] == n_hits)), "%d of %d hits, not %d of %d",
        (int) counted[2], (int) counted[1], (int) n_hits, (int) n_wanted);
    for (far_lane & l : lane) { d.free_far(l.memory, 0); }
    const double rel = sqrt(err / std::max(norm, 1e-30));
    const double bound = c.group >= 16 && std::min(c.kb, c.vb) == 1 ? 4e-3 : 2e-3;
    CHECK(rel < bound,
        "relative error %.3g: kb %d vb %d group %d scale %d D %d heads %dx%d n_q %d cells %d streams %d top %d of %d "
        "format %d softcap %g alibi %g sinks %d turns %d",
        rel, c.kb, c.vb, c.group, c.scale, c.D, c.n_kv_heads, c.gqa, c.n_q, c.n_cells, c.n_stream, f.top, f.room,
        f.format, c.softcap, c.max_bias, c.sinks, c.turns);
    return rel;
}

// Queries of 0: all cells score alike, and the first ones are picked.
static void far_ties(kvq_cuda_device & d) {
    const int D = 64, P = 64, cells = 5 * 2048;
    const attention_case c = { 2, 2, 64, 0, D, 1, 2, 1, cells, 1, 0, 0, false, false };
    world w(d, c, false);
    const int np = w.k.n_pages;
    const size_t nb_page = (size_t) P * D * 2;
    uint16_t * const memory = (uint16_t *) d.alloc_far(2 * np * nb_page);
    CHECK(memory, "no pinned memory");
    for (size_t i = 0; i < (size_t) 2 * np * P * D; i++) { memory[i] = 0; }
    std::vector<const void *> rows(2 * np);
    for (size_t i = 0; i < rows.size(); i++) { rows[i] = memory + i * nb_page / 2; }
    const std::vector<float> hq(2 * D, 0.0f);
    const std::vector<int32_t> none(1024, -1);
    device_bytes q(d, hq.size() * 4, hq.data()), o(d, hq.size() * 4),
        table(d, rows.size() * sizeof(void *), rows.data()), cells_there(d, 4096, none.data());
    const kvq_far_buffer at(1, 1024, np * P / 32, 4 * D);
    const std::vector<uint8_t> zeros(at.size, 0);
    device_bytes buffer(d, at.size, zeros.data());
    for (int top : { 1, 64, 1000 }) {
        const kvq_far far = { KVQ_FETCH_AHEAD, top, KVQ_FAR_F16, P, (const void * const *) table.p,
            (const void * const *) table.p + np, (int32_t *) cells_there.p, nullptr, buffer.p, np * P, 1024 };
        kvq_attn a = {};
        a.k = w.k.codec;
        a.v = w.v.codec;
        a.n_q = 1;
        a.n_head = 2;
        a.n_head_kv = 1;
        a.n_kv = cells;
        a.n_pages = np;
        a.scale = 0.1f;
        a.q = (const float *) q.p;
        a.q_stride_token = 2 * D;
        a.q_stride_head = D;
        a.dst = (float *) o.p;
        a.dst_stride_token = 2 * D;
        a.dst_stride_head = D;
        a.pages = (const kvq_page *) w.pages_there->p;
        a.far = &far;
        d.attend(&a, 1);
        const std::vector<int32_t> got = cells_there.get<int32_t>();
        for (int i = 0; i < top; i++) { CHECK(got[i] == i, "pick %d of %d is cell %d", i, top, got[i]); }
    }
    d.free_far(memory, 0);
    CHECK(d.error().empty(), "%s", d.error().c_str());
}

static void far_ahead(kvq_cuda_device & d, bool quick) {
    double worst = 0;
    int n = 0, n_checked = 0;
    const auto ahead = [&](attention_case c, int top, int format, bool head_masks = false, int page = 0) {
        c.head_masks = head_masks;
        c.page = page;
        const int room = std::min(top * (1 + n % 4) + n % 3, 2048); // no more are kept
        worst = std::max(worst, check_far(d, { c, top, format, room }, n_checked));
        n++;
    };
    ahead({ 2, 2, 128, 0, 128, 2, 4, 1, 1100, 1, 0, 0, false, false }, 16, KVQ_FAR_F16);
    ahead({ 2, 2, 32, 0, 64, 1, 2, 1, 400, 2, 0, 0, true, false }, 7, KVQ_FAR_Q8);
    ahead({ 2, 1, 2, 1, 128, 2, 3, 2, 500, 1, 0, 0, false, false }, 9, KVQ_FAR_Q4);
    ahead({ 1, 1, 64, 0, 80, 1, 4, 3, 500, 1, 20.0f, 0, false, false }, 16, KVQ_FAR_Q8, true);
    ahead({ 2, 2, 2, 0, 256, 1, 6, 1, 400, 1, 0, 8.0f, true, false }, 500, KVQ_FAR_F16); // all cells
    for (int n_q : { 5, 21 }) { // picks of some tokens stay, and these are not read at once
        const attention_case c = { 2, 2, 64 << n_q % 2, 0, 64, 2, 4, n_q, 700, 2, 0, 0, false, false };
        worst = std::max(worst, check_far(d, { c, 9, n_q % 3, n_q == 5 ? 50 : 110 }, n_checked));
        n++;
    }
    if (!quick) {
        for (int D : { 64, 80, 96, 128, 192, 256, 512 }) {
            const int pairs[3][2] = { { 1, 1 }, { 2, 1 }, { 2, 2 } };
            for (const auto & b : pairs) {
                for (int group : { 32, 64, 128 }) {
                    if (D == 512 && getenv("KVQ_CUDA_AS")) { continue; } // refused there
                    const int gqa = 1 + (b[1] * 5 + group / 16 + D / 16) % 16;
                    ahead({ b[0], b[1], group, group / 32 % 2, D, 2, gqa, 1 + (b[1] + group / 32) % 3, 700 + D,
                              1 + b[1] % 2, b[0] == 1 ? 20.0f : 0.0f, b[1] == 2 ? 8.0f : 0.0f, b[1] == 1, false },
                        b[0] * 20, (b[1] + group / 32) % 3, group == 64);
                }
                ahead({ b[0], b[1], 2, b[1] % 2, D, 2, 1 + 3 * b[1] % 8, 1 + b[0] % 3, 900, 1 + b[1] % 2, 0, 0,
                          b[1] == 1, false },
                    1 + 30 * b[0], b[0] % 3);
                for (int turns : { 1, 3 }) {
                    attention_case c = { b[0], b[1], 2, b[1] % 2, D, 2, 1 + 3 * b[1] % 8, 1, 700, 1, 0, 0, false,
                        false };
                    c.turns = turns;
                    c.neox = turns == 3;
                    c.stayed = b[1] == 2;
                    worst = std::max(worst, check_far(d, { c, 32, b[0] % 3, 32 + 41 * (n % 4) }, n_checked));
                    n++;
                }
            }
        }
        for (int D : { 64, 80, 128, 192, 256, 512 }) { // few rows: in 8-bit products where there are any
            if (D == 512 && getenv("KVQ_CUDA_AS")) { continue; }
            for (int bits = 1; bits <= 2; bits++) {
                ahead({ 2, bits, 64 * bits, bits % 2, D, 2, 5 - bits, 1, 1500, bits, 0, bits == 2 ? 8.0f : 0.0f, true,
                          false },
                    40, bits % 3);
                ahead({ 2, 2, 2, bits % 2, D, 2, 5 - 2 * bits, bits, 1500, bits, bits == 2 ? 20.0f : 0.0f, 0, false,
                          false },
                    40, bits % 3, bits == 1);
                attention_case c = { 2, 2, 2, bits % 2, D, 2, 4, 1, 1500, 1, 0, 0, false, false };
                c.turns = 1;
                c.neox = bits == 2;
                c.stayed = true;
                worst = std::max(worst, check_far(d, { c, 40, bits % 3, 40 + 41 * (n % 4) }, n_checked));
                n++;
            }
        }
        for (int top : { 1, 64, 1000 }) {
            ahead({ 2, 2, 128, 0, 128, 4, 4, 1, 20000, 1, 0, 0, false, false }, top, KVQ_FAR_F16);
        }
        ahead({ 2, 2, 128, 0, 128, 2, 4, 24, 3000, 1, 0, 0, false, false }, 64, KVQ_FAR_F16); // some rows at a time
    }
    printf("attention one step ahead: %d cases, %d rows, worst relative error %.2g\n", n, n_checked, worst);
}

static void far_attention(kvq_cuda_device & d, bool quick) {
    double worst = 0;
    int n = 0, n_checked = 0;
    const auto far = [&](attention_case c, int top, int format, bool torn = false, bool head_masks = false,
                         int page = 0) {
        c.torn = torn;
        c.head_masks = head_masks;
        c.page = page;
        worst = std::max(worst, check_far(d, { c, top, format }, n_checked));
        n++;
    };
    far({ 2, 2, 128, 0, 128, 2, 4, 1, 1100, 1, 0, 0, false, false }, 16, KVQ_FAR_F16);
    far({ 2, 2, 32, 0, 64, 1, 2, 1, 400, 2, 0, 0, true, false }, 7, KVQ_FAR_Q8, true);
    far({ 2, 1, 2, 1, 128, 2, 3, 2, 500, 1, 0, 0, false, false }, 9, KVQ_FAR_Q4);
    far({ 1, 2, 64, 1, 80, 1, 4, 3, 500, 1, 20.0f, 0, false, false }, 16, KVQ_FAR_Q8, false, true);
    far({ 2, 2, 2, 0, 256, 1, 6, 1, 400, 1, 0, 8.0f, true, false }, 500, KVQ_FAR_F16); // all cells
    // more than 99 KB a block: refused as 8.6
    far({ 2, 2, 128, 0, 512, 1, 2, 1, 300, 1, 0, 0, false, false }, 16, KVQ_FAR_F16);
    far({ 2, 2, 128, 0, 512, 1, 2, 1, 300, 1, 0, 0, false, false }, 16, KVQ_FAR_Q8);
    far_ties(d);
    if (!quick) {
        for (int D : { 64, 80, 96, 128, 192, 256, 512 }) {
            for (int bits = 1; bits <= 4; bits++) {
                const int other = 1 + (bits + D / 16) % 4;
                for (int group : { 16, 32, 64, 128 }) {
                    const int gqa = 1 + (bits * 5 + group / 16 + D / 16) % 16;
                    far({ bits, other, group, group / 32 % 2, D, 2, gqa, 1 + (bits + group / 32) % 3, 700 + D,
                            1 + bits % 2, bits == 3 ? 20.0f : 0.0f, bits == 2 ? 8.0f : 0.0f, bits == 4, false },
                        bits * 20, (bits + group / 32) % 3, bits % 2, group == 64);
                }
                far({ bits, other, 2, bits % 2, D, 2, 1 + 3 * bits % 8, 1 + bits % 3, 900, 1 + bits % 2, 0, 0,
                        bits == 1, false },
                    1 + 30 * bits, bits % 3, bits == 2);
                attention_case c = { bits, other, 2, bits % 2, D, 2, 1 + 3 * bits % 8, 1, 700, 1, 0, 0, false, false };
                c.turns = bits % 2 ? 3 : 1;
                c.neox = bits % 2;
                c.stayed = bits != 3;
                worst = std::max(worst, check_far(d, { c, 32, bits % 3 }, n_checked));
                n++;
            }
        }
        for (int top : { 1, 64, 1000, 4096 }) {
            far({ 2, 2, 128, 0, 128, 4, 4, 1, 20000, 1, 0, 0, false, false }, top, KVQ_FAR_F16);
        }
        far({ 2, 2, 128, 0, 128, 2, 4, 40, 3000, 1, 0, 0, false, false }, 64, KVQ_FAR_F16); // some rows at a time
        for (int format : { KVQ_FAR_F16, KVQ_FAR_Q8, KVQ_FAR_Q4 }) {
            worst = std::max(worst,
                check_far(d, { { 2, 2, 128, 0, 128, 2, 4, 100, 2000, 1 + format, 0, 0, false, false }, 1, format },
                    n_checked, true));
            n++;
        }
    }
    printf("attention that fetches: %d cases, %d rows, worst relative error %.2g\n", n, n_checked, worst);
}

// Time of one layer's attention without and with a second tier, warm and cold (cuda_bench.h). 32 query heads, 8 KV
// heads of 128; far rows f16.
static void far_bench(kvq_cuda_device & d, int only_cells) {
    const int heads = 32, heads_kv = 8, D = 128, width = heads * D;
    const size_t nb = (size_t) 256 << 20;
    device_bytes big(d, nb), q(d, (size_t) width * 4), o(d, (size_t) width * 4), counts(d, 32);
    std::vector<float> hq((size_t) width);
    for (auto & x : hq) { x = normal(); }
    d.put(q.p, hq.data(), hq.size() * 4);
    printf("%-14s %8s %6s %10s %10s\n", "one layer", "cells", "top", "us", "cold us");
    const struct {
        const char * name;
        int kb, vb, group, scale;
    } formats[] = { { "kivi-2 g128", 2, 2, 128, 0 }, { "kivi-2 g32", 2, 2, 32, 0 }, { "higgs-2", 2, 2, 2, 1 },
        { "higgs 2/1", 2, 1, 2, 1 }, { "higgs-1", 1, 1, 2, 1 } };
    for (const auto & f : formats) {
        for (int cells : { 8192, 32768, 131072 }) {
            if (only_cells && cells != only_cells) { continue; }
            const attention_case c = { f.kb, f.vb, f.group, f.scale, D, heads_kv, heads / heads_kv, 1, cells, 1, 0, 0,
                false, false };
            world w(d, c, false), w2(d, c, false);
            world * const ws[2] = { &w, &w2 };
            const int P = w.k.page_cells, np = w.k.n_pages;
            const size_t nb_page = (size_t) heads_kv * P * D * 2;
            uint8_t * const memory = (uint8_t *) d.alloc_far(2 * np * nb_page);
            CHECK(memory, "no pinned memory");
            memset(memory, 0, 2 * np * nb_page);
            std::vector<const void *> rows(2 * np);
            for (size_t i = 0; i < rows.size(); i++) { rows[i] = memory + i * nb_page; }
            device_bytes m(d, (size_t) cells * 2), table(d, rows.size() * sizeof(void *), rows.data());
            for (int top : { 0, 16, 64, 128 }) {
                const kvq_far far = { KVQ_FETCH_NOW, top, KVQ_FAR_F16, P, (const void * const *) table.p,
                    (const void * const *) table.p + np, nullptr, (uint64_t *) counts.p, nullptr, 0 };
                size_t i = 0;
                const auto attend = [&] {
                    const world & w = *ws[i++ % 2];
                    kvq_attn a = {};
                    a.k = w.k.codec;
                    a.v = w.v.codec;
                    a.n_q = 1;
                    a.n_head = heads;
                    a.n_head_kv = heads_kv;
                    a.n_kv = cells;
                    a.n_pages = np;
                    a.scale = 1.0f / sqrtf((float) D);
                    a.q = (const float *) q.p;
                    a.q_stride_token = width;
                    a.q_stride_head = D;
                    a.mask = (const uint16_t *) m.p;
                    a.mask_stride_token = cells;
                    a.dst = (float *) o.p;
                    a.dst_stride_token = width;
                    a.dst_stride_head = D;
                    a.pages = (const kvq_page *) w.pages_there->p;
                    a.far = top ? &far : nullptr;
                    d.attend(&a, 1);
                };
                const double s = seconds(d, 40, attend);
                const auto cool = [&] {
                    d.copy(big.p, (const char *) big.p + nb / 2, (size_t) 100 << 20);
                    if (cool_code) { cool_code(); }
                };
                const double without = seconds(d, 40, cool), cold = seconds(d, 40, [&] {
                    cool();
                    attend();
                }) - without;
                printf("%-14s %8d %6d %10.1f %10.1f\n", f.name, cells, top, s * 1e6, cold * 1e6);
            }
            d.free_far(memory, 0);
        }
    }
    CHECK(d.error().empty(), "%s", d.error().c_str());
}

// Part of test_cuda_policies.cpp: attention over sealed and open pages, and the column sums of its probe rows,
// against f64.
#pragma once

struct attention_case {
    const char *method, *opts;
    int D, heads, gqa, n_q, n_past, n_stream;
    float softcap, max_bias;
    bool sinks;
    int torn = 0;
};

static bool take_turns = false; // blocks run one after another, none waits for a later one: on the host

struct worst {
    double out = 0, sums = 0;
};

// What a state that was restored in part may leave of page 0. 1: values have another set than keys, 2: both have one
// of a wrong size, 3: keys are open.
static void tear(kvq_cuda_device & d, layer & x, int stream, int n_cells, int how) {
    const kvq_lane_layout & l = x.lane[0]->layout();
    CHECK(x.lane[0]->state(stream, 0) == KVQ_PAGE_SEALED && x.lane[1]->state(stream, 0) == KVQ_PAGE_SEALED,
        "page 0 is open already");
    if (how == 3) {
        const int64_t cell = (int64_t) stream * n_cells + 5;
        const std::vector<float> row((size_t) l.n_head * l.codec.head_size, 0.5f);
        const device_bytes up(d, row.size() * 4, row.data());
        x.lane[0]->write(1, &cell, (const float *) up.p, (int64_t) row.size(), 1);
        CHECK(x.lane[0]->state(stream, 0) == KVQ_PAGE_OPEN, "page 0 is still sealed");
        return;
    }
    for (int v = how == 1; v < 2; v++) {
        for (int h = 0; h < l.n_head; h++) {
            uint8_t * there =
                (uint8_t *) x.lane[v]->params_at(stream, 0, 0) + (size_t) h * x.lane[v]->layout().nb_params;
            std::vector<uint8_t> set((size_t) l.page_cells / 8), other(set.size(), 0);
            d.get(set.data(), there, set.size());
            for (int t = 0; how == 1 && t < l.page_cells; t++) { // one slot further
                const int u = (t + 1) % l.page_cells;
                other[(size_t) u / 8] |= (uint8_t) ((set[(size_t) t / 8] >> t % 8 & 1) << u % 8);
            }
            d.put(there, other.data(), other.size());
        }
    }
}

// A prompt of n_past cells, then a call of n_q rows: attention over sealed and open pages, and what it leaves open
// cells.
static void check_attention(kvq_cuda_device & d, const attention_case & c, worst & top) {
    const int H = c.heads * c.gqa, D = c.D, W = c.heads * D, n_cells = c.n_past + c.n_q + 70, n_kv = n_cells - 7,
              n_mask = (n_cells + 63) / 64 * 64;
    two_layers w(d, c.method, c.opts, c.heads, D, n_cells, c.n_stream);
    layer & x = w.there;
    const kvq_lane_layout & l = x.lane[0]->layout();
    // refused at load there
    if (getenv("KVQ_CUDA_AS") && D > 256 && !d.room_of(l.codec, x.lane[1]->layout().codec, l.evicts).n_warps) {
        printf("%s %s, D %d: no room\n", c.method, c.opts, D);
        return;
    }
    for (int s = 0; s < c.n_stream; s++) {
        for (int at = 0; at < c.n_past; at += 100) {
            std::vector<int64_t> idx;
            for (int i = at; i < std::min(at + 100, c.n_past); i++) { idx.push_back((int64_t) s * n_cells + i); }
            w.write(d, idx);
            w.score(s);
            for (layer * y : w.both) { y->commit(); }
        }
        std::vector<int64_t> idx;
        for (int i = 0; i < c.n_q; i++) { idx.push_back((int64_t) s * n_cells + c.n_past + i); }
        w.write(d, idx);
        w.compare(c.opts, s, 0, n_cells);
        if (c.torn) { tear(d, x, s, n_cells, c.torn); }
    }
    std::vector<float> q((size_t) c.n_stream * c.n_q * H * D), sinks((size_t) H), dst(q.size(), NAN);
    for (auto & y : q) { y = 1.5f * normal(); }
    for (auto & y : sinks) { y = normal(); }
    std::vector<uint16_t> mask((size_t) c.n_stream * c.n_q * n_mask);
    for (int s = 0; s < c.n_stream; s++) {
        for (int i = 0; i < c.n_q; i++) {
            for (int t = 0; t < n_mask; t++) {
                const bool hidden = t > c.n_past + i || !uniform(0, 9);
                mask[((size_t) s * c.n_q + i) * n_mask + t] =
                    hidden ? 0xfc00 : kvq_f32_to_f16(c.max_bias > 0 ? -(float) uniform(0, 20) : 0.0f);
            }
        }
    }
    device_bytes tq(d, q.size() * 4, q.data()), tm(d, mask.size() * 2, mask.data()),
        ts(d, sinks.size() * 4, sinks.data()), to(d, dst.size() * 4, dst.data());
    std::vector<kvq_attn> a((size_t) c.n_stream);
    float * lse = x.probe->asks(c.n_q) ? d.lse_of((size_t) c.n_stream * c.n_q * H) : nullptr;
    const kvq_page * pages = x.spans.on(d);
    for (int s = 0; s < c.n_stream; s++) {
        kvq_attn & y = a[(size_t) s];
        y = kvq_attn{};
        y.k = l.codec;
        y.v = x.lane[1]->layout().codec;
        y.n_q = c.n_q;
        y.n_head = H;
        y.n_head_kv = c.heads;
        y.n_kv = n_kv;
        y.n_pages = std::min((n_kv + l.page_cells - 1) / l.page_cells, l.n_pages);
        y.scale = 1.0f / sqrtf((float) D);
        y.max_bias = c.max_bias;
        y.softcap = c.softcap;
        y.q = (const float *) tq.p + (size_t) s * c.n_q * H * D;
        y.q_stride_token = (int64_t) H * D;
        y.q_stride_head = D;
        y.mask = (const uint16_t *) tm.p + (size_t) s * c.n_q * n_mask;
        y.mask_stride_token = n_mask;
        y.sinks = c.sinks ? (const float *) ts.p : nullptr;
        y.dst = (float *) to.p + (size_t) s * c.n_q * H * D;
        y.dst_stride_token = (int64_t) H * D;
        y.dst_stride_head = D;
        y.pages = pages + (size_t) s * x.spans.n_pages;
        y.lse = lse ? lse + (size_t) s * c.n_q * H : nullptr;
        y.n_pages = x.evicts() ? x.spans.n_used() : y.n_pages;
        y.map_stride = x.evicts() ? l.page_cells : 0;
    }
    // As in a recorded step: rows of the call once more, in memory that the output may take. The first turn fills the
    // table of where they go.
    const size_t n_new = (size_t) (x.evicts() ? 0 : c.n_stream * c.n_q);
    std::vector<float> rows_new[2];
    const float * up[2] = {};
    std::unique_ptr<device_bytes> own[2];
    const bool overlap = n_new && c.gqa > 1 && !take_turns && uniform(0, 1);
    for (int v = 0; v < 2 && n_new; v++) {
        rows_new[v].resize(n_new * (size_t) W);
        for (auto & y : rows_new[v]) { y = normal(); }
        own[v].reset(new device_bytes(d, rows_new[v].size() * 4, rows_new[v].data()));
        up[v] = (const float *) own[v]->p;
        if (overlap) {
            float * const at = (float *) to.p + (v ? dst.size() - rows_new[v].size() : 0);
            d.put(at, rows_new[v].data(), rows_new[v].size() * 4);
            d.synchronize();
            up[v] = at;
        }
    }
    std::vector<int64_t> cells_new;
    for (int s = 0; s < (n_new ? c.n_stream : 0); s++) {
        for (int i = 0; i < c.n_q; i++) { cells_new.push_back((int64_t) s * n_cells + c.n_past + i); }
    }
    const int64_t n_decode = d.n_decode, n_prompt = d.n_prompt, n_fine = d.n_fine, n_short = d.n_short;
    for (const auto step : { kvq_cuda_device::REPLAY, kvq_cuda_device::RECORD }) {
        CHECK(d.begin_step(step, 2 * n_new), "too many rows");
        for (int v = 0; v < 2 && n_new; v++) {
            x.lane[v]->write((int64_t) n_new, cells_new.data(), up[v], W, 1);
            if (step == kvq_cuda_device::RECORD) { // the reference has them too
                w.host.lane[v]->write((int64_t) n_new, cells_new.data(), rows_new[v].data(), W, 1);
            }
        }
        if (step == kvq_cuda_device::RECORD) {
            d.attend(a.data(), c.n_stream, &x.lane[0]->layout(), &x.lane[1]->layout());
        }
        d.end_step();
        pages = x.spans.on(d); // a write may find no room beside a torn page and seal one
        for (int s = 0; s < c.n_stream; s++) { a[(size_t) s].pages = pages + (size_t) s * x.spans.n_pages; }
    }
    d.get(dst.data(), to.p, dst.size() * 4);
    if (n_new && !c.torn) {
        for (int s = 0; s < c.n_stream; s++) { w.compare("rows of a recorded step", s, 0, n_cells); }
    }
    const int rows = c.gqa * c.n_q; // of a KV head
    // heads of 256 take 135 KB a block, of 512 205
    const bool many = rows > 64 && (D <= 128 || !getenv("KVQ_CUDA_AS"));
    const bool few = D % 16 == 0 && !many && (D > 128 || rows <= 32);
    const bool fine = few && l.codec.group == 16 && x.lane[1]->layout().codec.group == 16;
    if (l.codec.type == KVQ_TYPE_MIXED) {
        CHECK((d.n_decode > n_decode) == few, "D %d, %d rows of a KV head: %s", D, rows,
            few ? "the decode kernel was not used" : "the decode kernel was used");
    }
    if (l.codec.type == KVQ_TYPE_AFFINE) {
        CHECK((d.n_fine > n_fine) == (fine && d.n_short == n_short), "%s %s, D %d, %d rows of a KV head: %s", c.method,
            c.opts, D, rows,
            fine ? "the kernel for groups of 16 was not used" : "the kernel for groups of 16 was used");
    }
    CHECK((d.n_prompt > n_prompt) == many, "D %d, %d rows of a KV head: %s", D, rows,
        many ? "the kernel for prompts was not used" : "the kernel for prompts was used");
    CHECK(d.error().empty(), "%s", d.error().c_str());
    void * plain[2];
    double err = 0, norm = 0;
    for (int s = 0; s < c.n_stream; s++) {
        const auto close = [&](double want, double got, double & worst_of, const char * what) {
            const double e = fabs(got - want) / (0.05 + fabs(want));
            worst_of = std::max(worst_of, e);
            CHECK(e < 2e-2, "%s %s, D %d, %d x %d heads, %d rows: %s is %g, not %g", c.method, c.opts, D, c.heads,
                c.gqa, c.n_q, what, got, want);
        };
        std::vector<uint16_t> kv[2];
        for (int v = 0; v < 2; v++) { // decoded, not the image of a state
            kv[v].resize((size_t) n_cells * W);
            x.lane[v]->read(s, 0, n_cells, kv[v].data());
            if (x.evicts()) { x.slots->read(v, s, 0, n_cells, kv[v].data(), false); }
            for (int p = 0; p < l.n_pages; p++) {
                kvq_lane & lane = *x.lane[v];
                if (lane.state(s, p) == KVQ_PAGE_SEALED) {
                    device_bytes t(d, l.nb_frame);
                    d.decode(lane.layout(),
                        { (uint16_t *) t.p, nullptr, nullptr, lane.codes_at(s, p, 0), lane.params_at(s, p, 0) });
                    const std::vector<uint16_t> tile = t.get<uint16_t>();
                    for (int i = 0; i < l.page_cells * c.heads && p * l.page_cells + i % l.page_cells < n_cells; i++) {
                        const int h = i / l.page_cells, slot = i % l.page_cells;
                        memcpy(&kv[v][((size_t) p * l.page_cells + slot) * W + (size_t) h * D],
                            &tile[(size_t) i * l.head_stride()], 2 * (size_t) D);
                    }
                }
            }
        }
        const auto is_there = [&](int t, int h) { // not evicted by the head
            const uint16_t * row = &kv[0][(size_t) t * W + (size_t) h * D];
            return !x.evicts() || std::any_of(row, row + D, [](uint16_t y) { return y != KVQ_EVICTED; });
        };
        if (c.n_stream == 1 && !x.evicts()) {
            CHECK(d.expand(a.data(), 1, &plain[0], &plain[1]), "out of memory");
            for (int v = 0; v < 2; v++) {
                std::vector<uint16_t> rows((size_t) n_kv * W);
                d.get(rows.data(), plain[v], rows.size() * 2);
                for (size_t i = 0; i < rows.size(); i++) {
                    const float got = kvq_f16_to_f32(rows[i]), want = kvq_f16_to_f32(kv[v][i]);
                    CHECK(fabsf(got - want) <= 2e-3f * fabsf(want) + 1e-3f,
                        "expanded %s of cell %d channel %d is %g, not %g", v ? "V" : "K", (int) i / W, (int) i % W, got,
                        want);
                }
            }
        }
        const uint64_t first = (uint64_t) c.n_past;
        std::vector<int32_t> probes;
        if (x.probe->asks(c.n_q)) { probes = kvq_probe_rows(c.n_q, first, x.share(), l.page_cells, 0); }
        std::vector<double> sums((size_t) c.heads * n_cells, 0.0);
        std::vector<int> seen((size_t) n_cells, 0);
        int log2 = 1;
        while (2 * log2 <= H) { log2 *= 2; }
        for (int i = 0; i < c.n_q; i++) {
            for (int h = 0; h < H; h++) {
                const bool probe = std::find(probes.begin(), probes.end(), i) != probes.end();
                if (!probe && (i + h) % 5) { continue; }
                const double slope = c.max_bias <= 0 ? 1.0
                    : h < log2                       ? pow(pow(2.0, -c.max_bias / log2), h + 1)
                                                     : pow(pow(2.0, -c.max_bias / 2 / log2), 2 * (h - log2) + 1);
                std::vector<double> p((size_t) n_cells, 0.0), o((size_t) D, 0.0);
                double sum = c.sinks ? exp((double) sinks[(size_t) h]) : 0.0;
                for (int t = 0; t < n_kv; t++) {
                    const uint16_t m = mask[((size_t) s * c.n_q + i) * n_mask + t];
                    if (m == 0xfc00) { continue; }
                    seen[(size_t) t] += probe && h == 0;
                    if (!is_there(t, h / c.gqa)) { continue; }
                    double y = 0;
                    for (int e = 0; e < D; e++) {
                        y += (double) q[(((size_t) s * c.n_q + i) * H + h) * D + e] *
                            kvq_f16_to_f32(kv[0][(size_t) t * W + (size_t) (h / c.gqa) * D + e]);
                    }
                    y /= sqrt((double) D);
                    if (c.softcap != 0) { y = c.softcap * tanh(y / c.softcap); }
                    sum += p[(size_t) t] = exp(y + slope * kvq_f16_to_f32(m));
                }
                for (int t = 0; t < n_kv; t++) {
                    p[(size_t) t] /= sum;
                    if (probe) { sums[(size_t) (h / c.gqa) * n_cells + t] += p[(size_t) t]; }
                    for (int e = 0; e < D; e++) {
                        o[(size_t) e] +=
                            p[(size_t) t] * kvq_f16_to_f32(kv[1][(size_t) t * W + (size_t) (h / c.gqa) * D + e]);
                    }
                }
                for (int e = 0; e < D; e++) {
                    const double got = dst[(((size_t) s * c.n_q + i) * H + h) * D + e];
                    CHECK(std::isfinite(got), "not finite at token %d head %d channel %d", i, h, e);
                    err += (got - o[(size_t) e]) * (got - o[(size_t) e]);
                    norm += o[(size_t) e] * o[(size_t) e];
                }
            }
        }
        // twice: log-sum-exp as attention left it, then by its own pass over plain keys, on top of the first
        for (int p = 0; p < l.n_pages; p++) { x.probe->drop(s, p); }
        for (int own = 0; own < (c.n_stream == 1 && !x.evicts() ? 2 : 1); own++) {
            const int n = x.probe->prepare(x.spans.spans.data() + (size_t) s * x.spans.n_pages,
                x.evicts() ? x.spans.n_pages : a[(size_t) s].n_pages, s, c.n_q, first);
            CHECK(n == (int) probes.size(), "%d probe rows, not %d", n, (int) probes.size());
            if (!n) { continue; }
            if (own) { // nothing may be left of the first
                const std::vector<float> none((size_t) c.n_q * H, NAN);
                d.put((void *) a[(size_t) s].lse, none.data(), none.size() * 4);
            }
            d.observe(a[(size_t) s], x.probe->table_of(s), n, x.probe->max_pages(s), own ? plain[0] : nullptr);
            CHECK(d.error().empty(), "%s", d.error().c_str());
            std::vector<float> scores((size_t) l.page_cells);
            for (int p = 0; p * l.page_cells < n_kv; p++) {
                for (int h = 0; x.lane[0]->state(s, p) == KVQ_PAGE_OPEN && h < c.heads; h++) {
                    x.probe->scores(s, p, h, scores.data());
                    for (int t = p * l.page_cells; t < std::min((p + 1) * l.page_cells, n_kv); t++) {
                        const double sum = sums[(size_t) h * n_cells + t];
                        close(x.normalises() ? sum / std::max(seen[(size_t) t], 1) : sum * (own + 1),
                            scores[(size_t) (t % l.page_cells)], top.sums,
                            own ? "a column sum of its own pass" : "a column sum");
                    }
                }
            }
        }
    }
    const double rel = sqrt(err / std::max(norm, 1e-30));
    top.out = std::max(top.out, rel);
    // decode multiplies by parameters in f16: what they are off by is the same for all cells that share them
    CHECK(rel < (D > 128 || c.gqa * c.n_q <= 32 ? 4e-3 : 2e-3),
        "%s %s, D %d, %d x %d heads, %d rows: relative error %.3g", c.method, c.opts, D, c.heads, c.gqa, c.n_q, rel);
}

// Attention over pages of random states against f64 over their decoded values. Part of test_cuda.cpp.
#pragma once

#include "cuda_world.h"
#include "policy/tags.h"

static bool take_turns = false; // blocks run one after another, none waits for a later one: on the host

static double check_attention(kvq_cuda_device & d, const attention_case & c) {
    world w(d, c);
    const int H = c.n_kv_heads * c.gqa, D = c.D, P = w.k.page_cells,
              n_kv = std::min(c.n_cells, w.k.n_pages * P) - uniform(0, 20), n_mask = (n_kv + 63) / 64 * 64;
    std::vector<float> q((size_t) c.n_stream * c.n_q * H * D), sinks(H), dst(q.size(), NAN);
    for (auto & x : q) { x = normal(); }
    for (auto & x : sinks) { x = normal(); }
    const int n_masks = c.head_masks ? H : 1; // of a token
    std::vector<uint16_t> mask((size_t) c.n_stream * c.n_q * n_masks * n_mask);
    for (auto & x : mask) {
        x = uniform(0, 4) ? kvq_f32_to_f16(c.max_bias > 0 ? -(float) uniform(0, 20) : 0.0f) : 0xfc00;
    }
    for (size_t i = 0; i < mask.size() && c.low != 0; i++) {
        mask[i] = i % (size_t) n_mask ? kvq_f32_to_f16(c.low) : 0;
    }
    if (c.sequences) {
        std::vector<int> owner((size_t) n_mask);
        for (int cell = 0, who = 0, left = 0; cell < n_mask; cell++) { // the first sequence is long
            if (!left--) {
                who = uniform(0, 1) ? 0 : uniform(0, c.sequences - 1);
                left = who ? uniform(0, 90) : uniform(0, 500);
            }
            owner[(size_t) cell] = who;
        }
        for (size_t i = 0; i < mask.size(); i++) {
            const int token = (int) (i / (size_t) (n_masks * n_mask)) % c.n_q;
            if (owner[i % (size_t) n_mask] != token % c.sequences) { mask[i] = 0xfc00; }
        }
    }
    // a row that sees nothing
    if (c.n_q > 2) { std::fill(mask.begin() + n_masks * n_mask, mask.begin() + 2 * n_masks * n_mask, 0xfc00); }
    device_bytes tq(d, q.size() * 4, q.data()), tm(d, mask.size() * 2, mask.data()),
        ts(d, sinks.size() * 4, sinks.data()), to(d, dst.size() * 4, dst.data());
    std::vector<kvq_attn> a(c.n_stream);
    for (int s = 0; s < c.n_stream; s++) {
        kvq_attn & x = a[s];
        x = kvq_attn{};
        x.k = w.k.codec;
        x.v = w.v.codec;
        x.n_q = c.n_q;
        x.n_head = H;
        x.n_head_kv = c.n_kv_heads;
        x.n_kv = n_kv;
        x.n_pages = std::min((n_kv + P - 1) / P, w.k.n_pages);
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
        x.pages = (const kvq_page *) w.pages_there->p + (size_t) s * w.k.n_pages;
        w.leave_out(x, s);
    }
    // as in a recorded step: one new row a stream, addressed by the table
    std::vector<uint16_t *> new_to[2];
    std::vector<float> new_rows[2];
    std::vector<int32_t> new_pos; // that keys carry
    const int width = c.n_kv_heads * D;
    for (int s = 0; s < c.n_stream && !c.map; s++) {
        for (int i = s * w.k.n_pages; i < (s + 1) * w.k.n_pages; i++) {
            const kvq_page & p = w.pages[i];
            const int slot = uniform(0, P - 1), cell = p.cell + slot;
            if (!p.n_slots || p.k_params || p.v_params || cell >= n_kv || uniform(0, 2)) { continue; }
            new_pos.push_back(uniform(0, 1 << 20));
            for (int r = 0; r < 2; r++) {
                new_to[r].push_back(
                    (uint16_t *) (r ? p.v_codes : p.k_codes) + (size_t) slot * (r ? w.v : w.k).head_stride());
                for (int x = 0; x < width; x++) {
                    new_rows[r].push_back(normal());
                    (r ? w.vx : w.kx)[s][(size_t) cell * width + x] =
                        kvq_f16_to_f32(kvq_f32_to_f16(new_rows[r].back()));
                }
            }
            break;
        }
    }
    device_bytes up_k(d, new_rows[0].size() * 4, new_rows[0].data()),
        up_v(d, new_rows[1].size() * 4, new_rows[1].data());
    const float * up[2] = { (const float *) up_k.p, (const float *) up_v.p };
    // tables of rotary embedding come to the device outside of recordings
    if (c.sequences) { // lists of another evaluation, in which nothing was seen; the recorded call finds those of this
        const std::vector<uint16_t> nothing(mask.size(), 0xfc00);
        d.put(tm.p, nothing.data(), 2 * nothing.size());
        d.begin_evaluation();
        d.attend(a.data(), c.n_stream);
        d.synchronize();
        d.put(tm.p, mask.data(), 2 * mask.size());
        d.begin_evaluation();
    }
    const uint64_t moved = d.generation();
    if (c.turns || c.sequences) { d.attend(a.data(), c.n_stream); }
    CHECK(!c.sequences || d.generation() == moved, "lists of one shape moved: no recording would stay");
    // as ggml may place them
    const bool overlap =
        !take_turns && !new_rows[0].empty() && uniform(0, 1) && new_rows[0].size() + new_rows[1].size() <= dst.size();
    for (int r = 0; r < 2 && overlap; r++) {
        float * at = (float *) to.p + (r ? dst.size() - new_rows[1].size() : 0);
        d.put(at, new_rows[r].data(), new_rows[r].size() * 4);
        d.synchronize();
        up[r] = at;
    }
    for (const auto step : { kvq_cuda_device::REPLAY, kvq_cuda_device::RECORD }) { // the first fills the table
        CHECK(d.begin_step(step, 2 * new_to[0].size()), "too many rows");
        for (int r = 0; r < 2 && !new_to[0].empty(); r++) {
            d.write_rows(r ? w.v : w.k, (int64_t) new_to[r].size(), new_to[r].data(), up[r], width,
                r || !c.turns ? nullptr : new_pos.data(), 1);
        }
        if (step == kvq_cuda_device::RECORD) { d.attend(a.data(), c.n_stream, &w.k, &w.v); }
        d.end_step();
    }
    for (size_t i = 0; i < new_to[0].size() + new_to[1].size(); i++) { // whoever wrote them
        const int r = i >= new_to[0].size();
        const size_t row = r ? i - new_to[0].size() : i;
        std::vector<uint16_t> stays(c.D), want((size_t) width);
        for (int x = 0; x < width; x++) { want[(size_t) x] = kvq_f32_to_f16(new_rows[r][row * width + (size_t) x]); }
        if (!r && c.turns) { kvq_tag_put(w.k, want.data(), (size_t) c.D, new_pos[row]); }
        for (int h = 0; h < c.n_kv_heads; h++) {
            d.get(stays.data(), new_to[r][row] + (size_t) h * P * (r ? w.v : w.k).head_stride(), 2 * (size_t) c.D);
            for (int x = 0; x < c.D; x++) {
                CHECK(stays[x] == want[(size_t) h * c.D + x],
                    "row %zu of %s, head %d, channel %d did not reach its page", row, r ? "V" : "K", h, x);
            }
        }
    }
    d.get(dst.data(), to.p, dst.size() * 4);
    CHECK(d.error().empty(), "%s", d.error().c_str());
    if (!c.map) { // plain rows of the same cells
        void * there[2];
        CHECK(d.expand(a.data(), c.n_stream, &there[0], &there[1]), "out of memory");
        std::vector<uint16_t> rows((size_t) c.n_stream * n_kv * c.n_kv_heads * D);
        for (int r = 0; r < 2; r++) {
            const float most = c.sorted && !r ? 4.0f : 1.0f; // some_order's gains: what rounding before them grows by
            d.get(rows.data(), there[r], rows.size() * 2);
            for (size_t i = 0; i < rows.size(); i++) {
                const size_t per = rows.size() / c.n_stream, s = i / per, cell = i % per / ((size_t) c.n_kv_heads * D);
                const float want = w.pages[s * w.k.n_pages + cell / P].n_slots ? (r ? w.vx : w.kx)[s][i % per] : 0.0f,
                            got = kvq_f16_to_f32(rows[i]);
                CHECK(fabsf(got - want) <= 2e-3f * fabsf(want) + 5e-3f * most,
                    "expanded %s of cell %zu is %g, not %g (bits %d/%d group %d scale %d D %d)", r ? "V" : "K", cell,
                    got, want, c.kb, c.vb, c.group, c.scale, D);
            }
        }
    }
    int log2 = 1;
    while (2 * log2 <= H) { log2 *= 2; }
    double err = 0, norm = 0;
    std::vector<double> o(D);
    for (int s = 0; s < c.n_stream; s++) {
        for (int t = 0; t < c.n_q; t++) {
            for (int h = 0; h < H; h++) {
                if (c.n_q > 64 && (t + h) % 7) { continue; }
                const double slope = c.max_bias <= 0 ? 1.0
                    : h < log2                       ? pow(pow(2.0, -c.max_bias / log2), h + 1)
                                                     : pow(pow(2.0, -c.max_bias / 2 / log2), 2 * (h - log2) + 1);
                const float * qr = &q[(((size_t) s * c.n_q + t) * H + h) * D];
                double top = c.sinks ? sinks[h] : -INFINITY;
                std::vector<double> x((size_t) w.k.n_pages * P, -INFINITY);
                for (int slot = 0; slot < (int) x.size(); slot++) {
                    const int cell = w.map_host[slot];
                    if (!w.pages[(size_t) s * w.k.n_pages + slot / P].n_slots || cell < 0 || cell >= n_kv) { continue; }
                    const uint16_t m =
                        mask[(((size_t) s * c.n_q + t) * n_masks + (c.head_masks ? h : 0)) * n_mask + cell];
                    if (m == 0xfc00) { continue; }
                    const float * kr = &w.kx[s][((size_t) slot * c.n_kv_heads + h / c.gqa) * D];
                    double y = 0;
                    for (int i = 0; i < D; i++) { y += (double) qr[i] * kr[i]; }
                    y /= sqrt((double) D);
                    if (c.softcap != 0) { y = c.softcap * tanh(y / c.softcap); }
                    x[slot] = y + slope * kvq_f16_to_f32(m);
                    top = std::max(top, x[slot]);
                }
                double sum = c.sinks ? exp(sinks[h] - top) : 0;
                std::fill(o.begin(), o.end(), 0.0);
                for (int slot = 0; slot < (int) x.size(); slot++) {
                    if (x[slot] == -INFINITY) { continue; }
                    const double p = exp(x[slot] - top);
                    sum += p;
                    const float * vr = &w.vx[s][((size_t) slot * c.n_kv_heads + h / c.gqa) * D];
                    for (int i = 0; i < D; i++) { o[i] += p * vr[i]; }
                }
                for (int i = 0; i < D; i++) {
                    const double ref = sum > 0 ? o[i] / sum : 0, got = dst[(((size_t) s * c.n_q + t) * H + h) * D + i];
                    CHECK(std::isfinite(got), "not finite at token %d head %d channel %d", t, h, i);
                    err += (got - ref) * (got - ref);
                    norm += ref * ref;
                }
            }
        }
    }
    const double rel = sqrt(err / std::max(norm, 1e-30));
    // one bit: zeros and scales, each rounded to f16 with its probability, nearly cancel
    const double bound = c.group >= 16 && std::min(c.kb, c.vb) == 1 ? 4e-3 : 2e-3;
    CHECK(rel < bound,
        "relative error %.3g: kb %d fast %d split %d vb %d group %d scale %d D %d heads %dx%d n_q %d cells %d streams "
        "%d softcap %g alibi %g sinks %d map %d turns %d",
        rel, c.kb, c.fast, c.split, c.vb, c.group, c.scale, c.D, c.n_kv_heads, c.gqa, c.n_q, c.n_cells, c.n_stream,
        c.softcap, c.max_bias, c.sinks, c.map, c.turns);
    return rel;
}

// groups of 16 in keys and values: every state of pages, masks, maps, rows up to those that the decode kernels take
static void fine_attention(kvq_cuda_device & d, bool quick) {
    double worst = 0;
    int n = 0;
    d.allow_short = false; // another kernel
    const auto attention = [&](attention_case c) {
        const int64_t before = d.n_fine;
        worst = std::max(worst, check_attention(d, c));
        CHECK(d.n_fine == before + 1, "bits %d/%d D %d: the kernel for groups of 16 did not run once", c.kb, c.vb, c.D);
        n++;
    };
    const auto with = [](attention_case c, bool torn, bool head_masks) {
        c.torn = torn;
        c.head_masks = head_masks;
        return c;
    };
    for (int D : { 64, 128 }) {
        for (int scale : { 0, 1 }) {
            for (int bits : { 1, 2, 3, 4 }) {
                if (!quick || bits == 2 || D == 64 * (1 + bits % 2)) {
                    attention(
                        with({ bits, bits, 16, scale, D, 1, 4, 1, 700 + 90 * bits, 1, 0, 0, bits == 3, bits == 4 },
                            bits % 2, bits == 1));
                }
            }
            if (quick) { continue; }
            for (int gqa : { 1, 2, 3, 4, 5, 7, 8, 9, 16 }) {
                const float softcap = gqa == 5 ? 20.0f : 0.0f, alibi = gqa % 3 == 1 ? 8.0f : 0.0f;
                attention(with({ 2, 2, 16, scale, D, 2, gqa, 1, 1300 + 61 * gqa, 1 + gqa % 3, softcap, alibi,
                                   gqa % 4 == 0, false },
                    gqa % 2, gqa % 3 == 0));
                attention(
                    with({ 2, 2, 16, scale, D, 1, gqa, 32 / gqa, 500 + 17 * gqa, 1, softcap, alibi, gqa == 3, true },
                        gqa % 2 == 0, gqa == 2));
            }
            for (int cells : { 1, 33, 64, 65, 250, 9000 }) {
                attention({ 2, 2, 16, scale, D, cells == 9000 ? 1 : 2, 4, 1, cells + 20, 1, 0, 0, false, false });
            }
            for (int page : { 64, 128 }) {
                for (bool map : { false, true }) {
                    attention_case c =
                        with({ 2, 2, 16, scale, D, 2, 4, 1, 2300, 2, 0, 0, false, map }, page == 64, false);
                    c.page = page;
                    attention(c);
                }
            }
            for (int bits : { 1, 3, 4 }) {
                for (int gqa : { 1, 6, 8 }) {
                    attention(with({ bits, bits, 16, scale, D, 2, gqa, 1, 2100, 1, 0, 0, gqa == 6, gqa == 8 }, gqa != 6,
                        gqa == 1));
                }
            }
        }
    }
    d.allow_short = true;
    printf("attention, groups of 16: %d cases, worst relative error %.2g\n", n, worst);
}

// Heads that are not 64 or 128 channels: every kernel that takes them by slices (cuda/walk/attend.cuh, KVQ_WIDE_BITS),
// with parts of a slice, one slice, two, and four; groups of values over several slices; rotations over several
// slices; rows that are no power of two
static void wide_attention(kvq_cuda_device & d, bool quick) {
    double worst = 0;
    int n = 0;
    int n_no_room = 0; // where shared memory is short, some formats are refused at load (kvq_cuda_device::refuse)
    const auto has_room = [&](const attention_case & c) {
        const int P = c.page ? c.page : std::max(32, c.group);
        const bool room = c.kb == 16 ||
            d.room_of(make_codec(KVQ_ROLE_K, c.kb, c.group, c.scale, 0, 0.0f, P, c.D),
                 make_codec(KVQ_ROLE_V, c.vb, std::min(c.group, c.D), c.scale, 0, 0.0f, P, c.D))
                .n_warps;
        n_no_room += !room;
        return room;
    };
    const auto attention = [&](attention_case c) {
        if (!has_room(c)) { return; }
        for (const bool on : { true, false }) {
            d.allow_short = on;
            const int64_t before = d.n_decode;
            worst = std::max(worst, check_attention(d, c));
            CHECK(
                d.n_decode > before, "bits %d/%d group %d heads of %d: no decode kernel ran", c.kb, c.vb, c.group, c.D);
            n++;
            if (quick && n % 2) { break; }
        }
        d.allow_short = true;
    };
    const auto with = [](attention_case c, bool torn, bool head_masks, int page = 0) {
        c.torn = torn;
        c.head_masks = head_masks;
        c.page = page;
        return c;
    };
#define KVQ_PAIR(K, V) { K, V },
    const std::vector<std::pair<int, int>> pairs = { KVQ_TEST_WIDE_BITS(KVQ_PAIR) },
                                           means = { KVQ_TEST_MEANS_BITS(KVQ_PAIR) };
#undef KVQ_PAIR
    for (int D : { 80, 96, 192, 256, 512 }) {
        for (size_t i = 0; i < pairs.size(); i++) {
            const int k = pairs[i].first, v = pairs[i].second, x = (int) i + D / 16, gqa = 1 + x * 5 % 16;
            if (quick && (i + D / 16) % 3) { continue; }
            // affine
            attention(with({ k, v, 32 << x % 3, x % 2, D, 1, gqa, 1, 350 + 30 * x, 1, 0, 0, k == 3, v == 4 },
                i % 3 == 0, i % 4 == 2));
            // lattice
            attention(with({ k, v, 2, (x + 1) % 2, D, 1, 1 + gqa % 8, 1, 350 + 30 * x, 1, 0, 0, k == 2, v == 3 },
                i % 3 == 1, i % 4 == 3));
        }
        attention({ 16, 16, 32, 0, D, 2, 6, 1, 600, 1, 0, 0, false, false });
        attention({ 2, 2, 2, 1, D, 1, 6, 1, 900, 2, D == 256 ? 20.0f : 0.0f, D == 192 ? 8.0f : 0.0f, true, false });
        if (quick && D != 80 && D != 512) { continue; }
        attention({ 2, 2, 256, 0, D, 1, 6, 1, 700, 1, 0, 0, false, false }); // one group of values in the whole head
        attention(with({ 2, 1, 128, 1, D, 1, 3, 2, 500, 2, 0, 0, true, true }, true, true, 256));
    }
    for (int D : { 80, 96, 192, 256, 512 }) {
        for (size_t i = 0; i < means.size(); i++) {
            if (quick && (i + D / 16) % 3) { continue; }
            attention_case c = { means[i].first, means[i].second, 2, (int) i % 2, D, 1, 1 + (int) i * 3, 1, 500, 1, 0,
                0, i == 2, false };
            c.turns = i % 2 ? 3 : 1;
            c.n_dims = i % 3 ? 0 : D / 2;
            c.neox = i % 2;
            c.stayed = true;
            c.sorted = (i + D / 16) % 2;
            const int64_t before = d.n_means;
            attention(c);
            CHECK(d.n_means > before || (D == 512 && c.kb >= 3 && getenv("KVQ_CUDA_AS")),
                "heads of %d: no kernel for pages without their means ran", D);
        }
        for (int bits : { 1, 2, 3, 4 }) {
            if (quick && (bits + D / 16) % 3) { continue; }
            const int64_t before = d.n_fine + d.n_short;
            // groups of 16
            attention(with({ bits, bits, 16, bits % 2, D, 1, 2 * bits, 1, 400, 1, 0, 0, bits == 3, bits == 4 },
                bits % 2, bits == 1));
            CHECK(
                d.n_fine + d.n_short > before || n_no_room, "heads of %d: the kernel for groups of 16 did not run", D);
        }
    }
    d.allow_short = false; // groups of 32 with more than 4 query rows (cuda/walk/attend.cuh, KVQ_FINE_BITS)
    for (int D : { 80, 96, 192, 256, 512 }) {
        for (const auto & p : { std::make_pair(1, 1), { 2, 1 }, { 2, 2 }, { 3, 3 }, { 4, 4 } }) {
            const attention_case c =
                with({ p.first, p.second, 32, 0, D, 1, 5 + p.first, 1, 470, 1, 0, 0, p.second == 2, false },
                    p.first % 2, false);
            if ((quick && (p.first + p.second + D / 16) % 3) || !has_room(c)) { continue; }
            const int64_t before = d.n_fine;
            worst = std::max(worst, check_attention(d, c));
            CHECK(d.n_fine == before + 1 || getenv("KVQ_CUDA_AS"),
                "bits %d/%d heads of %d: not the kernel for many rows", p.first, p.second, D);
            n++;
        }
    }
    d.allow_short = true;
    if (!quick) {
        for (int D : { 80, 96, 192, 256, 512 }) {
            for (int gqa = 1; gqa <= 16; gqa++) {
                attention(with({ 2, 2, 128, 0, D, 2, gqa, 1, 1300 + 70 * gqa, 1 + gqa % 2, 0, 0, gqa == 4, gqa == 9 },
                    gqa % 5 == 0, gqa == 7));
                attention(with({ 2, 2, 2, 1, D, 2, gqa, 1, 1300 + 70 * gqa, 1 + gqa % 2, 0, 0, gqa == 4, gqa == 9 },
                    gqa % 5 == 0, gqa == 7));
                attention({ 2, 2, 128, 0, D, 1, gqa, 1 + 16 / gqa, 3000, 1, 0, 0, false, false });
            }
            for (int cells : { 1, 33, 64, 65, 250, 9000 }) {
                attention({ 2, 2, 32, 0, D, 1, 6, 1, cells + 20, 1, 0, 0, false, false });
                attention({ 2, 2, 2, 1, D, 1, 6, 1, cells + 20, 1, 0, 0, false, false });
            }
        }
    }
    CHECK(!n_no_room || getenv("KVQ_CUDA_AS"), "%d cases found no room in shared memory", n_no_room);
    printf("attention, other heads than 64 and 128: %d cases, %d without room, worst relative error %.2g\n", n,
        n_no_room, worst);
}

// Several tokens over one cache: every kernel, tokens of one sequence and of many, blocks of rows that see nothing
static void listed_attention(kvq_cuda_device & d, bool quick) {
    double worst = 0;
    int n = 0;
    const auto attention = [&](attention_case c, int sequences, int turns = 0) {
        c.sequences = sequences;
        c.turns = turns;
        c.stayed = turns != 0;
        const int64_t before = d.n_listed;
        d.allow_lists = c.gqa * c.n_q > 64 ? 1 : 2;
        worst = std::max(worst, check_attention(d, c));
        d.allow_lists = 1;
        CHECK(d.n_listed == before + 3, "bits %d/%d group %d D %d, %d tokens: pages were not listed", c.kb, c.vb,
            c.group, c.D, c.n_q);
        n++;
    };
    if (quick) {
        attention({ 2, 2, 128, 0, 128, 1, 4, 17, 2300, 1, 0, 0, false, false }, 5);
        attention({ 2, 2, 32, 1, 64, 2, 1, 6, 2200, 1, 0, 8.0f, true, false }, 3);
        attention({ 3, 3, 16, 0, 64, 1, 3, 4, 2200, 1, 0, 0, false, true }, 2);
        attention({ 2, 3, 2, 1, 64, 1, 2, 9, 2200, 1, 20.0f, 0, false, false }, 9);
        attention({ 2, 2, 2, 1, 80, 1, 4, 3, 2200, 1, 0, 0, false, false }, 3, 3);
    } else {
        for (int D : { 64, 80, 128, 256 }) {
            for (int gqa : { 1, 3, 4, 8 }) {
                for (int n_q : { 2, 5, 16, 33, 64 }) {
                    const int sequences = n_q == 16 ? 1 : n_q == 5 ? 2 : n_q, cells = 2100 + 90 * n_q;
                    if (gqa * n_q > 8 * 32) { continue; } // blocks of rows
                    const float softcap = gqa == 3 ? 20.0f : 0.0f, alibi = n_q == 5 ? 8.0f : 0.0f;
                    attention({ 2, 2, 128, 0, D, 2, gqa, n_q, cells, 1, softcap, alibi, gqa == 8, false }, sequences);
                    attention({ 2, 2, 2, 1, D, 2, gqa, n_q, cells, 1, softcap, alibi, gqa == 8, false }, sequences);
                    attention(
                        { 2, 2, 2, 0, D, 1, gqa, n_q, cells, 1, 0, 0, false, false }, sequences, 1 + 2 * (gqa % 2));
                    attention({ 16, 16, 32, 0, D, 1, gqa, n_q, cells, 1, 0, 0, false, n_q == 2 }, sequences);
                    if (gqa * n_q > 4 * 32) { continue; }
                    attention({ 4, 2, 32, 1, D, 1, gqa, n_q, cells, 1, 0, alibi, gqa == 1, n_q == 5 }, sequences);
                    if (gqa * n_q <= 64 && (D == 64 || D == 128)) {
                        attention({ 2, 2, 16, 1, D, 1, gqa, n_q, cells, 1, 0, 0, false, n_q == 16 }, sequences);
                    }
                }
            }
        }
        attention({ 2, 2, 128, 0, 128, 8, 4, 32, 40000, 1, 0, 0, false, false }, 32);
        attention({ 2, 2, 2, 0, 128, 8, 4, 32, 40000, 1, 0, 0, false, false }, 32, 3);
    }
    for (const int D : { 64, 128 }) { // points from tables, split keys, in 8-bit products
        attention_case c = { 3, 2, 2, 1, D, 2, 4, D == 64 ? 9 : 10, 2300, 1, 0, 0, false, false };
        const int64_t before = d.n_fine;
        attention(c, c.n_q);
        c.split = KVQ_SPLIT_NORM;
        c.fast = 1;
        c.sorted = true;
        attention(c, D == 64 ? 2 : c.n_q, 1);
        CHECK(d.n_fine > before + 1, "heads of %d: not in 8-bit products", D);
    }
    printf("attention, several sequences of one cache: %d cases, worst relative error %.2g\n", n, worst);
}

// quick: under a sanitizer, or on the host
static void attention_matrix(kvq_cuda_device & d, bool quick, bool rest = false) {
    double worst = 0;
    int n = 0;
    const auto attention = [&](attention_case c) {
        for (bool on : { true, false }) {
            d.allow_short = on;
            worst = std::max(worst, check_attention(d, c));
            n++;
        }
        d.allow_short = true;
    };
    const auto short_attention = [&](attention_case c) {
        const int64_t before = d.n_short;
        attention(c);
        // cards with less shared memory a block take the long kernel where the short one does not fit
        CHECK(d.n_short > before || getenv("KVQ_CUDA_AS"),
            "bits %d/%d group %d D %d: the kernel for short caches did not run", c.kb, c.vb, c.group, c.D);
    };
    // groups of 16 in both, and lattice pages that lack their means
    const auto short_others = [&](int D, int gqa, bool few) {
        for (const int bits : { 1, 2, 3, 4 }) {
            if (few && bits != (D == 64 ? 2 : 3)) { continue; }
            attention_case c = { bits, bits, 16, bits % 2, D, 1, few ? 2 : gqa, 1, 330, 1, 0, 0, bits == 4, false };
            c.torn = bits == 2;
            short_attention(c);
        }
        for (const auto & x : { std::make_pair(2, 2), { 3, 2 }, { 3, 3 }, { 4, 4 } }) {
            if (few && x.first + x.second != (D == 64 ? 4 : 5)) { continue; }
            for (const int turns : { 1, 3 }) {
                attention_case c = { x.first, x.second, 2, turns == 1 ? 2 : 1, D, 1, gqa, 1, 330, 1, 0, 0,
                    x.second == 3, false };
                c.turns = turns;
                c.n_dims = turns == 1 ? D / 2 : 0;
                c.neox = turns == 3;
                c.stayed = true;
                c.torn = x.first == 3;
                c.sorted = (x.first + D / 64 + turns / 2) % 2;
                const int64_t before = d.n_means;
                short_attention(c);
                CHECK(d.n_means > before, "bits %d/%d D %d: no kernel for pages without their means ran", c.kb, c.vb,
                    c.D);
            }
        }
    };
    if (!rest) {
        fine_attention(d, quick);
        wide_attention(d, quick);
        listed_attention(d, quick);
    }
    if (quick) {
        attention({ 2, 1, 32, 0, 128, 2, 4, 1, 300, 2, 0, 0, true, false });
        attention({ 3, 4, 32, 1, 80, 1, 4, 20, 150, 1, 0, 0, false, true });
        attention({ 4, 3, 32, 1, 64, 1, 4, 1, 700, 1, 0, 0, false, false });
        attention({ 2, 2, 128, 0, 128, 1, 4, 1, 1500, 1, 0, 0, false, false });
        attention({ 16, 16, 32, 0, 128, 1, 4, 1, 600, 1, 0, 0, false, false });
        attention({ 2, 3, 2, 1, 128, 2, 4, 1, 1500, 1, 0, 0, true, false });
        attention({ 4, 1, 2, 0, 64, 1, 4, 2, 700, 1, 0, 0, false, false });
        attention({ 2, 1, 4, 1, 80, 1, 4, 20, 150, 1, 0, 0, false, true });
        for (int bits : { 1, 2, 3, 4, 16 }) { // short enough for a few multiprocessors
            attention({ bits, bits, 32, bits % 2, 64, 1, 4, 1, 330, 1, 0, 0, bits == 3, bits == 4 });
            attention({ bits, bits, 128, 0, 128, 1, 1 << bits % 4, 1, 500, 1, bits == 2 ? 20.0f : 0.0f,
                bits == 4 ? 8.0f : 0.0f, false, false });
        }
        for (int bits : { 2, 3, 4 }) {
            short_attention({ bits, 2 + (bits + 1) % 3, 2, bits % 3, 64, 1, 4, 1, 330, 1, 0, 0, bits == 3, bits == 4 });
            short_attention({ bits, 2 + bits % 3, 2, (bits + 1) % 3, 128, 1, 1 << bits % 4, 1, 480, 1,
                bits == 2 ? 20.0f : 0.0f, bits == 3 ? 8.0f : 0.0f, false, false });
        }
        for (int D : { 64, 128 }) { short_others(D, D == 64 ? 4 : 3, true); }
        CHECK(d.n_short >= 10, "only %d launches for short caches", (int) d.n_short);
        CHECK(d.n_prompt >= 2, "only %d launches of the kernel for prompts", (int) d.n_prompt);
        printf("attention: %d cases, %d of short caches, worst relative error %.2g\n", n, (int) d.n_short, worst);
        return;
    }
    for (int bits : { 1, 2, 3, 4, 16 }) {
        for (int group : { 32, 128 }) {
            for (int n_q : { 1, 2, 7, 40, 200 }) {
                attention(
                    { bits, bits, group, group == 32, 128, 2, n_q == 7 ? 1 : 4, n_q, 1100, 1, 0, 0, false, false });
            }
        }
    }
    for (int D : { 64, 80, 96, 128, 256 }) {
        for (int gqa : { 1, 4, 8, 16 }) {
            attention({ 2, 1, 32, 0, D, 2, gqa, 3, 700, 2, 0, 0, true, false });
            attention({ 1, 2, 32, 0, D, 2, gqa, 1, 2100, 1, 20.0f, 0, false, false });
            attention({ 2, 2, 64, 1, D, 1, gqa, 1, 31 + D, 3, 0, 8.0f, true, false });
            attention({ 4, 3, 32, 0, D, 1, gqa, 5, 300, 1, 0, 0, false, true });
        }
    }
    // short caches of lattice pages
    for (int kb : { 2, 3, 4 }) {
        for (int vb : { 2, 3, 4 }) {
            for (int D : { 64, 128 }) {
                for (int scale : { 0, 1, 2 }) {
                    short_attention({ kb, vb, 2, scale, D, 2, 4, 1, 1100, 1, 0, 0, false, false });
                    short_attention({ kb, vb, 2, scale, D, 1, 1 << kb, 1, 31 + D, 3, vb == 2 ? 20.0f : 0.0f,
                        vb == 3 ? 8.0f : 0.0f, vb == 4, kb == vb });
                }
            }
        }
    }
    for (int D : { 64, 128 }) {
        for (int gqa : { 1, 4, 8 }) { short_others(D, gqa, false); }
    }
    for (int gqa : { 1, 3, 7, 16 }) { short_attention({ 2, 2, 2, 1, 128, 1, gqa, 1, 2000, 2, 0, 0, gqa == 3, false }); }
    for (int kb : { 1, 2, 3, 4 }) {
        for (int vb : { 1, 2, 3, 4 }) {
            for (int D : { 64, 128 }) { // lattices
                attention({ kb, vb, 2, vb % 2, D, 2, 4, 1, 1100, 1, 0, 0, false, false });
                attention({ kb, vb, 2, kb % 2, D, 2, vb, 3, 3000, 2, vb == 2 ? 20.0f : 0.0f, vb == 3 ? 8.0f : 0.0f,
                    vb == 4, kb == vb });
            }
        }
    }
    for (int D : { 64, 80, 96, 128, 256 }) {
        for (int vec : { 2, 4, 8 }) {
            for (int n_q : { 1, 7, 40 }) {
                attention({ 1, 1, vec, 1, D, 2, n_q == 7 ? 1 : 8, n_q, 500, 1, 0, 0, false, false });
                if (vec < 8) { attention({ 2, 2, vec, 0, D, 1, 4, n_q, 333, 2, 0, 0, true, n_q == 7 }); }
            }
        }
    }
    for (int gqa : { 3, 5, 7 }) { attention({ 2, 2, 128, 0, 128, 2, gqa, 1, 5000, 1, 0, 0, false, false }); }
    CHECK(d.n_short >= 10, "only %d launches for short caches", (int) d.n_short);
    printf("attention: %d cases, %d of short caches, worst relative error %.2g\n", n, (int) d.n_short, worst);
}

// One layer of pages of random states, on a device and as decoded values. Part of test_cuda.cpp.
#pragma once

// as cuda/walk/attend.cuh, which is no header of C++
#define KVQ_TEST_WIDE_BITS(X) X(1, 1) X(2, 1) X(2, 2) X(3, 2) X(3, 3) X(4, 2) X(4, 4)
#define KVQ_TEST_VALUES(X, F, K) X(F, K, 1) X(F, K, 2) X(F, K, 3) X(F, K, 4)
#define KVQ_TEST_SORTED(X, V) V(X, 1, 2) V(X, 1, 3) V(X, 1, 4) V(X, 2, 4)
#define KVQ_TEST_SPLIT_BITS(X) X(0, 2, 1) X(0, 2, 2) X(0, 4, 2) X(0, 4, 3) KVQ_TEST_SORTED(X, KVQ_TEST_VALUES)
#define KVQ_TEST_MEANS_BITS(X) X(1, 1) X(2, 1) X(2, 2) X(3, 2) X(3, 3) X(4, 4)

// turns: what sealed pages leave out; 1: means and positions, 2: some cells have moved since, 3: none has, positions
// of three sequences that take turns, 4: no means, 5: images stayed: the promise that none has moved is given. torn:
// some pages are sealed in keys or in values alone; head_masks: a mask for every head page: cells of a page, 0: as
// few as there may be. sequences: token t sees cells of sequence t % sequences alone, which lie between each other's;
// 0: most cells
struct attention_case {
    int kb, vb, group, scale, D, n_kv_heads, gqa, n_q, n_cells, n_stream;
    float softcap, max_bias;
    bool sinks, map;
    int turns = 0, n_dims = 0, neox = 1;
    bool stayed = false, torn = false, head_masks = false;
    int page = 0, sequences = 0;
    int split = 0, fast = 0; // of keys: kvq_split, bits of the fast half; kb are those of the slow one
    float low = 0;           // mask of all cells but the first
    int open = 0;            // pages at each end that are open, all between them sealed
    bool sorted = false;     // channels of sealed keys have gains, and another order where they are split
};

// Means and rotary embeddings stay: a device keeps copies of them by address.
static const float * some_means(int n) {
    static std::vector<std::vector<float>> all;
    all.emplace_back((size_t) n);
    for (auto & x : all.back()) { x = 2.0f * normal(); }
    return all.back().data();
}
static const kvq_order * some_order(int n_head, int D, bool sorts) {
    struct held {
        std::vector<uint16_t> channel;
        std::vector<float> gain, back;
        kvq_order order;
    };
    static std::vector<std::unique_ptr<held>> all;
    all.emplace_back(new held);
    held & x = *all.back();
    for (int i = 0; i < n_head * D; i++) {
        x.channel.push_back((uint16_t) (i % D));
        if (sorts) { std::swap(x.channel.back(), x.channel[(size_t) (i / D * D + uniform(0, i % D))]); }
        x.gain.push_back(exp2f(0.25f * (float) uniform(-8, 8)));
        x.back.push_back(1.0f / x.gain.back());
    }
    x.order = { x.channel.data(), x.gain.data(), x.back.data() };
    return &x.order;
}
static kvq_rotor * some_rotor(int n_dims, bool neox, bool images = false) {
    static std::vector<std::unique_ptr<kvq_rotor>> all;
    kvq_rope r;
    r.n_dims = n_dims;
    r.neox = neox;
    for (int i = 0; i < 3 && images; i++) { r.sections[i] = (n_dims / 2 + 2) / 3; }
    all.emplace_back(new kvq_rotor(r));
    return all.back().get();
}

// Number of the positions of a cell: every other 64 cells are text, the others are images of 9 columns.
static int32_t some_place(kvq_rotor & rotor, int cell) {
    const int p = cell / 64 * 32, i = cell % 64;
    return rotor.place(cell / 64 % 2 ? kvq_rotor::place_t{ p, p + i / 9, p + i % 9, 0 }
                                     : kvq_rotor::place_t{ p + i, p + i, p + i, 0 });
}

struct world { // one layer, random page states; decoded values kept in f64-ready floats
    kvq_cuda_device & d;
    kvq_lane_layout k, v;
    int n_stream;
    bool stayed;
    std::vector<std::vector<float>> kx, vx; // per stream [cell][head][D]
    std::vector<kvq_page> pages;
    std::vector<int32_t> map_host;
    std::unique_ptr<device_bytes> codes[2], params[2], frames[2], pages_there, map_there, pos_there, was_there;
    kvq_transform left_out[2];
    std::vector<int32_t> pos, was; // [stream][cell]

    world(kvq_cuda_device & d, const attention_case & c, bool fill = true) :
        d(d), n_stream(c.n_stream), stayed(c.stayed) {
        const int P = c.page ? c.page : std::max(32, c.group);
        kvq_codec codec = make_codec(KVQ_ROLE_K, c.kb, c.group, c.scale, 0, 0.0f, P, c.D);
        codec.split = c.split;
        codec.fast_bits = c.fast;
        k = make_layout(codec, c.n_kv_heads, c.n_cells);
        v = make_layout(
            make_codec(KVQ_ROLE_V, c.vb, std::min(c.group, c.D), c.scale, 0, 0.0f, P, c.D), c.n_kv_heads, c.n_cells);
        const int np = k.n_pages, H = c.n_kv_heads, D = c.D;
        pages.resize((size_t) np * n_stream);
        std::vector<uint8_t> hc[2], hp[2];
        std::vector<uint16_t> hf[2];
        const kvq_lane_layout * ls[2] = { &k, &v };
        const bool f16 = c.kb == 16;
        for (int r = 0; r < 2; r++) {
            hc[r].resize(pages.size() * H * ls[r]->nb_codes);
            hp[r].resize(pages.size() * H * ls[r]->nb_params);
            hf[r].assign(f16 || fill ? pages.size() * ls[r]->nb_frame / 2 : 0, 0);
        }
        if (c.turns) {
            left_out[0].rotor = some_rotor(c.n_dims ? c.n_dims : D, c.neox, c.turns == 5);
            for (int r = 0; r < 2 && c.turns != 4; r++) { left_out[r].mean = some_means(H * D); }
            left_out[0].order = c.sorted ? some_order(H, D, c.split != 0) : nullptr;
            const int lead = fill ? 37 * uniform(0, 2) : 0; // 0: windows of 64 positions begin with pages
            for (size_t i = 0; i < pages.size() * P; i++) {
                const int cell = (int) (i % ((size_t) np * P));
                pos.push_back(c.turns == 5 ? some_place(*left_out[0].rotor, cell)
                        : c.turns == 3     ? cell % 3 * 500 + cell / 3
                                           : cell + lead + (fill && cell / 64 % 2 ? uniform(0, 1) : 0));
                was.push_back(c.turns == 2 && uniform(0, 1) ? pos.back() + uniform(-4, 100) : pos.back());
                left_out[0].rotor->cover(std::max(pos.back(), was.back()));
            }
            pos_there.reset(new device_bytes(d, 4 * pos.size(), pos.data()));
            was_there.reset(new device_bytes(d, 4 * was.size(), was.data()));
        }
        kx.resize(n_stream);
        vx.resize(n_stream);
        for (int s = 0; s < n_stream; s++) {
            for (int r = 0; r < 2; r++) { (r ? vx : kx)[s].assign(fill ? (size_t) np * P * H * D : 0, 0.0f); }
        }
        std::vector<uint8_t> state(pages.size()); // 0: unused, 1: open, 2: sealed, 3: keys alone are, 4: values alone
        for (size_t i = 0; i < pages.size(); i++) {
            state[i] = f16 ? 1 : !fill ? 2 : (uint8_t) (uniform(0, 7) == 0 ? 0 : uniform(0, 3) ? 2 : 1);
            if (c.open && fill) {
                const int page = (int) (i % (size_t) np);
                state[i] = page < c.open || page >= np - c.open ? 1 : 2;
            }
            if (c.torn && state[i] && !uniform(0, 1)) { state[i] = (uint8_t) (3 + uniform(0, 1)); }
        }
        const auto is_sealed = [&](int r, size_t i) { return state[i] == 2 || state[i] == 3 + r; };
        if (fill) {
            for (int r = 0; r < 2; r++) {
                const kvq_lane_layout & l = *ls[r];
                for (size_t i = 0; i < pages.size(); i++) {
                    uint16_t * tile = &hf[r][i * l.nb_frame / 2];
                    for (size_t j = 0; j < l.nb_frame / 2; j++) {
                        tile[j] = (int) (j % l.head_stride()) < D ? kvq_f32_to_f16(normal() + (r ? 0.0f : 0.5f)) : 0;
                    }
                    std::vector<uint16_t> out(tile, tile + l.nb_frame / 2);
                    if (is_sealed(r, i)) {
                        kvq_page_block b = { tile, nullptr, nullptr, &hc[r][i * H * l.nb_codes],
                            &hp[r][i * H * l.nb_params] };
                        kvq_cpu_device().encode(l, &b, 1, 1);
                        b.tile = out.data();
                        kvq_cpu_device().decode(l, b);
                        for (int h = 0; h < H && c.turns; h++) {
                            const kvq_transform & x = left_out[r];
                            const kvq_row_transform turn = { x.mean, x.rotor ? &x.rotor->view() : nullptr, &pos[i * P],
                                r ? nullptr : &was[i * P], nullptr, 0, x.order };
                            kvq_cpu_put_back_rows(
                                l, h, turn, out.data() + (size_t) h * P * l.head_stride(), l.head_stride());
                        }
                    }
                    for (int t = 0; t < P; t++) {
                        for (int h = 0; h < H; h++) {
                            for (int x = 0; x < D; x++) {
                                (r ? vx : kx)[i / np][((i % np * P + t) * H + h) * (size_t) D + x] =
                                    kvq_f16_to_f32(out[((size_t) h * P + t) * l.head_stride() + x]);
                            }
                        }
                    }
                }
            }
        } else { // timing: random bits, small parameters
            for (int r = 0; r < 2; r++) {
                for (auto & x : hc[r]) { x = (uint8_t) rng(); }
                for (size_t i = 0; i + 1 < hp[r].size(); i += 2) {
                    const uint16_t x = kvq_f32_to_f16(0.1f * normal());
                    memcpy(&hp[r][i], &x, 2);
                }
                for (auto & x : hf[r]) { x = kvq_f32_to_f16(normal()); }
            }
        }
        for (int r = 0; r < 2; r++) {
            codes[r].reset(new device_bytes(d, hc[r].size(), hc[r].data()));
            params[r].reset(new device_bytes(d, hp[r].size(), hp[r].data()));
            frames[r].reset(new device_bytes(d, hf[r].size() * 2, hf[r].data()));
        }
        map_host.resize((size_t) np * P);
        for (size_t i = 0; i < map_host.size(); i++) { map_host[i] = c.map && uniform(0, 5) == 0 ? -1 : (int) i; }
        if (c.map) { map_there.reset(new device_bytes(d, map_host.size() * 4, map_host.data())); }
        for (size_t i = 0; i < pages.size(); i++) {
            kvq_page & p = pages[i];
            p.k_codes = is_sealed(0, i) ? (uint8_t *) codes[0]->p + i * H * k.nb_codes
                                        : (uint8_t *) frames[0]->p + i * k.nb_frame;
            p.v_codes = is_sealed(1, i) ? (uint8_t *) codes[1]->p + i * H * v.nb_codes
                                        : (uint8_t *) frames[1]->p + i * v.nb_frame;
            p.k_params = is_sealed(0, i) ? (uint8_t *) params[0]->p + i * H * k.nb_params : nullptr;
            p.v_params = is_sealed(1, i) ? (uint8_t *) params[1]->p + i * H * v.nb_params : nullptr;
            p.cell = (int) (i % np) * P;
            p.n_slots = state[i] ? P : 0;
            p.map = c.map ? (const int32_t *) map_there->p + i % np * P : nullptr;
        }
        pages_there.reset(new device_bytes(d, pages.size() * sizeof(kvq_page), pages.data()));
    }
    void leave_out(kvq_attn & x, int s) const { // of stream s
        if (!pos_there) { return; }
        x.flags = stayed ? KVQ_ATTN_STAYED : 0;
        x.rotary = &left_out[0].rotor->view();
        x.k_mean = left_out[0].mean;
        x.v_mean = left_out[1].mean;
        x.k_order = left_out[0].order;
        x.positions = (const int32_t *) pos_there->p + (size_t) s * k.n_pages * k.page_cells;
        x.sealed = (const int32_t *) was_there->p + (size_t) s * k.n_pages * k.page_cells;
    }
};

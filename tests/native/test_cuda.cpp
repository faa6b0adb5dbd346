// CUDA against the C reference: sealed bytes and decoded tiles identical, attention against f64 over decoded values.
// Usage: test_cuda [quick | host [STEPS] | aqua [STEPS] | bench [FORMAT [CELLS]]]    host: least, for kernels on the host (tests/cuda_on_host); bench: time of one layer's attention and the floor = bytes / copy bandwidth
#include "../../ggml-kvq/cache/store.h"
#include "device_bytes.h"
#include "../../ggml-kvq/types/f16.h"
#include "../../ggml-kvq/types/types.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>

static float normal() { return std::normal_distribution<float>()(rng); }

static kvq_codec make_codec(int role, int bits, int group, int scale, int levels, float eta, int n_cells, int head_size) {
    kvq_codec c = {};
    c.type = bits == 16 ? KVQ_TYPE_F16 : group < 16 ? KVQ_TYPE_LATTICE : KVQ_TYPE_AFFINE; // less than 16: channels of a point
    c.role = role; c.bits = bits; c.group = group; c.scale = scale; c.levels = levels; c.eta = eta; c.n_cells = n_cells; c.head_size = head_size;
    return c;
}

static kvq_lane_layout make_layout(const kvq_codec & c, int n_head, int n_cells) {
    kvq_layer_plan plan;
    plan.k.codec = plan.v.codec = c;
    return kvq_make_lane_layout(plan, c.role == KVQ_ROLE_V, n_head, n_cells, 1);
}

static std::vector<uint16_t> random_tile(const kvq_lane_layout & l, int kind) {
    std::vector<uint16_t> t(l.nb_frame / 2);
    for (auto & x : t) {
        switch (kind) {
            case 0: x = kvq_f32_to_f16(normal()); break;
            case 1: x = (uint16_t) rng(); break;                                 // any bits: infinities, nans, denormals
            case 2: x = kvq_f32_to_f16(uniform(0, 9) ? 0.25f : -0.0f); break;    // constant groups, both zeros
            case 3: x = (uint16_t) (rng() & 0x83ff); break;                      // denormals
            default: x = kvq_f32_to_f16(normal() * (uniform(0, 50) ? 1.0f : 3000.0f)); break;
        }
    }
    return t;
}

static int check_codec(kvq_cuda_device & d, const kvq_codec & c) {
    const int n_head = 2, n_pages = 3;
    const kvq_lane_layout l = make_layout(c, n_head, c.n_cells * n_pages);
    int n = 0;
    for (int kind = 0; kind < 5; kind++) {
        std::vector<std::vector<uint16_t>> tiles;
        std::vector<std::vector<uint8_t>>  codes, params, valid;
        std::vector<kvq_page_block> host, there;
        std::vector<std::unique_ptr<device_bytes>> mem;
        const auto there_of = [&](const void * p, size_t nb) { mem.emplace_back(new device_bytes(d, nb, p)); return mem.back()->p; };
        for (int p = 0; p < n_pages; p++) { // page 2 adopts the codes of page 0
            tiles.push_back(random_tile(l, kind));
            codes.emplace_back(l.nb_codes * n_head, 0xa5);
            params.emplace_back(l.nb_params * n_head, 0x5a);
            valid.emplace_back(32, 0);
            for (auto & v : valid.back()) { v = (uint8_t) rng(); }
        }
        for (int p = 0; p < n_pages; p++) {
            const uint8_t * v = p == 1 ? valid[p].data() : nullptr;
            const bool adopts = p == 2 && l.nb_codes;
            host.push_back({ tiles[p].data(), v, adopts ? codes[0].data() : nullptr, adopts ? nullptr : codes[p].data(), params[p].data() });
            void * tile = there_of(tiles[p].data(), l.nb_frame), * cd = there_of(codes[p].data(), codes[p].size());
            there.push_back({ (uint16_t *) tile, v, adopts ? there[0].codes : nullptr, adopts ? nullptr : cd, there_of(params[p].data(), params[p].size()) });
        }
        kvq_cpu_device().encode(l, host.data(), n_pages, 1);
        d.encode(l, there.data(), n_pages, 1);
        for (int p = 0; p < n_pages; p++) {
            std::vector<uint8_t> b(params[p].size());
            d.get(b.data(), there[p].params, b.size());
            for (size_t i = 0; i < b.size(); i++) {
                CHECK(b[i] == params[p][i], "role %d bits %d group %d scale %d levels %d D %d cells %d kind %d page %d: parameter byte %zu is %02x, not %02x",
                      c.role, c.bits, c.group, c.scale, c.levels, c.head_size, c.n_cells, kind, p, i, b[i], params[p][i]);
            }
            if (host[p].codes && l.nb_codes) {
                b.resize(codes[p].size());
                d.get(b.data(), there[p].codes, b.size());
                for (size_t i = 0; i < b.size(); i++) {
                    CHECK(b[i] == codes[p][i], "role %d bits %d group %d scale %d levels %d D %d cells %d kind %d page %d: code byte %zu is %02x, not %02x",
                          c.role, c.bits, c.group, c.scale, c.levels, c.head_size, c.n_cells, kind, p, i, b[i], codes[p][i]);
                }
            }
            if (kind != 1) {
                std::vector<uint16_t> want(l.nb_frame / 2), got(l.nb_frame / 2);
                const void * from = host[p].shared ? host[p].shared : host[p].codes;
                kvq_cpu_device().decode(l, { want.data(), nullptr, nullptr, (void *) from, host[p].params });
                device_bytes tile(d, l.nb_frame);
                d.decode(l, { (uint16_t *) tile.p, nullptr, nullptr, (void *) (there[p].shared ? there[p].shared : there[p].codes), there[p].params });
                d.get(got.data(), tile.p, l.nb_frame);
                CHECK(!memcmp(want.data(), got.data(), l.nb_frame), "decoded tile differs: role %d bits %d group %d scale %d D %d", c.role, c.bits, c.group, c.scale, c.head_size);
            }
            n++;
        }
    }
    CHECK(d.error().empty(), "%s", d.error().c_str());
    return n;
}

// ---------------------------------------------------------------- predictors

struct predict_case { int n_in, n_out, bits, n_rows; };

struct predict_world {
    kvq_predictor w;
    std::vector<uint8_t> packed;
    std::vector<int8_t> x;
    std::vector<float>  s;
    size_t x_stride;
    std::unique_ptr<device_bytes> weights, rows, scales, out;

    predict_world(kvq_cuda_device & d, const predict_case & c) : packed(kvq_predictor_bytes(c.n_in, c.n_out, c.bits)), s((size_t) c.n_rows), x_stride((size_t) (c.n_in + 31) / 32 * 32) {
        std::vector<float> m((size_t) c.n_in * c.n_out), row((size_t) c.n_in);
        for (auto & v : m) { v = 0.05f * normal(); }
        kvq_predictor_pack(c.n_in, c.n_out, c.bits, m.data(), packed.data());
        x.assign(x_stride * c.n_rows, 0);
        for (int i = 0; i < c.n_rows; i++) {
            const float f = i % 5 ? expf(normal()) : 0.0f;
            for (auto & v : row) { v = f * normal(); }
            kvq_quantise_row(c.n_in, row.data(), &x[i * x_stride], &s[(size_t) i]);
        }
        weights.reset(new device_bytes(d, packed.size(), packed.data()));
        rows   .reset(new device_bytes(d, x.size(), x.data()));
        scales .reset(new device_bytes(d, s.size() * 4, s.data()));
        out    .reset(new device_bytes(d, (size_t) c.n_rows * c.n_out * 4));
        w.n_in = c.n_in; w.n_out = c.n_out; w.bits = c.bits;
    }
    void run(kvq_cuda_device & d, int n, bool add) {
        kvq_predictor there = w;
        there.data = (const uint8_t *) weights->p;
        d.predict(there, n, (const int8_t *) rows->p, x_stride, (const float *) scales->p, add, (float *) out->p, (size_t) w.n_out);
    }
};

static void check_predict(kvq_cuda_device & d, const predict_case & c) {
    predict_world p(d, c);
    p.w.data = p.packed.data();
    std::vector<float> want((size_t) c.n_rows * c.n_out, 0.0f);
    for (const bool add : { false, true }) {
        p.run(d, c.n_rows, add);
        for (int i = 0; i < c.n_rows; i++) { kvq_predict_row(p.w, &p.x[i * p.x_stride], p.s[(size_t) i], add, &want[(size_t) i * c.n_out]); }
        const std::vector<float> got = p.out->get<float>();
        for (size_t i = 0; i < want.size(); i++) {
            CHECK(!memcmp(&got[i], &want[i], 4), "predictor %d -> %d, %d bits: row %d output %d is %.9g, not %.9g", c.n_in, c.n_out, c.bits, (int) i / c.n_out, (int) i % c.n_out, got[i], want[i]);
        }
    }
    CHECK(d.error().empty(), "%s", d.error().c_str());
}

// ---------------------------------------------------------------- attention

// turns: what sealed pages leave out; 1: means and positions, 2: some cells have moved since
struct attention_case { int kb, vb, group, scale, D, n_kv_heads, gqa, n_q, n_cells, n_stream; float softcap, max_bias; bool sinks, map; int turns = 0, n_dims = 0, neox = 1; };

// Means and rotary embeddings stay: a device keeps copies of them by address.
static const float * some_means(int n) {
    static std::vector<std::vector<float>> all;
    all.emplace_back((size_t) n);
    for (auto & x : all.back()) { x = 2.0f * normal(); }
    return all.back().data();
}
static kvq_rotor * some_rotor(int n_dims, bool neox) {
    static std::vector<std::unique_ptr<kvq_rotor>> all;
    kvq_rope r;
    r.n_dims = n_dims;
    r.neox   = neox;
    all.emplace_back(new kvq_rotor(r));
    return all.back().get();
}

struct world { // one layer, random page states; decoded values kept in f64-ready floats
    kvq_cuda_device & d;
    kvq_lane_layout k, v;
    int n_stream;
    std::vector<std::vector<float>> kx, vx; // per stream [cell][head][D]
    std::vector<kvq_page> pages;
    std::vector<int32_t> map_host;
    std::unique_ptr<device_bytes> codes[2], params[2], frames[2], pages_there, map_there, pos_there, was_there;
    kvq_transform left_out[2];
    std::vector<int32_t> pos, was; // [stream][cell]

    world(kvq_cuda_device & d, const attention_case & c, bool fill = true) : d(d), n_stream(c.n_stream) {
        const int P = std::max(32, c.group);
        k = make_layout(make_codec(KVQ_ROLE_K, c.kb, c.group, c.scale, 0, 0.0f, P, c.D), c.n_kv_heads, c.n_cells);
        v = make_layout(make_codec(KVQ_ROLE_V, c.vb, std::min(c.group, c.D), c.scale, 0, 0.0f, P, c.D), c.n_kv_heads, c.n_cells);
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
            left_out[0].rotor = some_rotor(c.n_dims ? c.n_dims : D, c.neox);
            for (int r = 0; r < 2; r++) { left_out[r].mean = some_means(H * D); }
            for (size_t i = 0; i < pages.size() * P; i++) {
                pos.push_back((int) (i % ((size_t) np * P)) + 5 + uniform(0, 1));
                was.push_back(c.turns == 2 && uniform(0, 1) ? pos.back() + uniform(-4, 100) : pos.back());
                left_out[0].rotor->reach(std::max(pos.back(), was.back()));
            }
            pos_there.reset(new device_bytes(d, 4 * pos.size(), pos.data()));
            was_there.reset(new device_bytes(d, 4 * was.size(), was.data()));
        }
        kx.resize(n_stream); vx.resize(n_stream);
        for (int s = 0; s < n_stream; s++) {
            for (int r = 0; r < 2; r++) { (r ? vx : kx)[s].assign(fill ? (size_t) np * P * H * D : 0, 0.0f); }
        }
        std::vector<uint8_t> state(pages.size());
        for (size_t i = 0; i < pages.size(); i++) {
            state[i] = f16 ? 1 : !fill ? 2 : (uint8_t) (uniform(0, 7) == 0 ? 0 : uniform(0, 3) ? 2 : 1);
        }
        if (fill) {
            for (int r = 0; r < 2; r++) {
                const kvq_lane_layout & l = *ls[r];
                for (size_t i = 0; i < pages.size(); i++) {
                    uint16_t * tile = &hf[r][i * l.nb_frame / 2];
                    for (size_t j = 0; j < l.nb_frame / 2; j++) { tile[j] = (int) (j % l.head_stride()) < D ? kvq_f32_to_f16(normal() + (r ? 0.0f : 0.5f)) : 0; }
                    std::vector<uint16_t> out(tile, tile + l.nb_frame / 2);
                    if (state[i] == 2) {
                        kvq_page_block b = { tile, nullptr, nullptr, &hc[r][i * H * l.nb_codes], &hp[r][i * H * l.nb_params] };
                        kvq_cpu_device().encode(l, &b, 1, 1);
                        b.tile = out.data();
                        kvq_cpu_device().decode(l, b);
                        for (int h = 0; h < H && c.turns; h++) {
                            left_out[r].restore(l, h, r ? nullptr : &pos[i * P], r ? nullptr : &was[i * P], out.data() + (size_t) h * P * l.head_stride(), l.head_stride());
                        }
                    }
                    for (int t = 0; t < P; t++) { for (int h = 0; h < H; h++) { for (int x = 0; x < D; x++) {
                        (r ? vx : kx)[i / np][((i % np * P + t) * H + h) * (size_t) D + x] = kvq_f16_to_f32(out[((size_t) h * P + t) * l.head_stride() + x]);
                    } } }
                }
            }
        } else { // timing: random bits, small parameters
            for (int r = 0; r < 2; r++) {
                for (auto & x : hc[r]) { x = (uint8_t) rng(); }
                for (size_t i = 0; i + 1 < hp[r].size(); i += 2) { const uint16_t x = kvq_f32_to_f16(0.1f * normal()); memcpy(&hp[r][i], &x, 2); }
                for (auto & x : hf[r]) { x = kvq_f32_to_f16(normal()); }
            }
        }
        for (int r = 0; r < 2; r++) {
            codes[r] .reset(new device_bytes(d, hc[r].size(), hc[r].data()));
            params[r].reset(new device_bytes(d, hp[r].size(), hp[r].data()));
            frames[r].reset(new device_bytes(d, hf[r].size() * 2, hf[r].data()));
        }
        map_host.resize((size_t) np * P);
        for (size_t i = 0; i < map_host.size(); i++) { map_host[i] = c.map && uniform(0, 5) == 0 ? -1 : (int) i; }
        if (c.map) { map_there.reset(new device_bytes(d, map_host.size() * 4, map_host.data())); }
        for (size_t i = 0; i < pages.size(); i++) {
            kvq_page & p = pages[i];
            const bool sealed = state[i] == 2;
            p.k_codes  = sealed ? (uint8_t *) codes[0]->p + i * H * k.nb_codes : (uint8_t *) frames[0]->p + i * k.nb_frame;
            p.v_codes  = sealed ? (uint8_t *) codes[1]->p + i * H * v.nb_codes : (uint8_t *) frames[1]->p + i * v.nb_frame;
            p.k_params = sealed ? (uint8_t *) params[0]->p + i * H * k.nb_params : nullptr;
            p.v_params = sealed ? (uint8_t *) params[1]->p + i * H * v.nb_params : nullptr;
            p.cell     = (int) (i % np) * P;
            p.n_slots  = state[i] ? P : 0;
            p.map      = c.map ? (const int32_t *) map_there->p + i % np * P : nullptr;
        }
        pages_there.reset(new device_bytes(d, pages.size() * sizeof(kvq_page), pages.data()));
    }
};

static bool take_turns = false; // blocks run one after another, none waits for a later one: on the host

static double check_attention(kvq_cuda_device & d, const attention_case & c) {
    world w(d, c);
    const int H = c.n_kv_heads * c.gqa, D = c.D, P = w.k.page_cells, n_kv = std::min(c.n_cells, w.k.n_pages * P) - uniform(0, 20), n_mask = (n_kv + 63) / 64 * 64;
    std::vector<float> q((size_t) c.n_stream * c.n_q * H * D), sinks(H), dst(q.size(), NAN);
    for (auto & x : q) { x = normal(); }
    for (auto & x : sinks) { x = normal(); }
    std::vector<uint16_t> mask((size_t) c.n_stream * c.n_q * n_mask);
    for (auto & x : mask) { x = uniform(0, 4) ? kvq_f32_to_f16(c.max_bias > 0 ? -(float) uniform(0, 20) : 0.0f) : 0xfc00; }
    if (c.n_q > 2) { std::fill(mask.begin() + n_mask, mask.begin() + 2 * n_mask, 0xfc00); } // a row that sees nothing
    device_bytes tq(d, q.size() * 4, q.data()), tm(d, mask.size() * 2, mask.data()), ts(d, sinks.size() * 4, sinks.data()), to(d, dst.size() * 4, dst.data());
    std::vector<kvq_attn> a(c.n_stream);
    for (int s = 0; s < c.n_stream; s++) {
        kvq_attn & x = a[s];
        x = kvq_attn{};
        x.k = w.k.codec; x.v = w.v.codec;
        x.n_q = c.n_q; x.n_head = H; x.n_head_kv = c.n_kv_heads; x.n_kv = n_kv;
        x.n_pages = std::min((n_kv + P - 1) / P, w.k.n_pages);
        x.scale = 1.0f / sqrtf((float) D); x.max_bias = c.max_bias; x.softcap = c.softcap;
        x.q = (const float *) tq.p + (size_t) s * c.n_q * H * D; x.q_stride_token = (int64_t) H * D; x.q_stride_head = D;
        x.mask = (const uint16_t *) tm.p + (size_t) s * c.n_q * n_mask; x.mask_stride_token = n_mask;
        x.sinks = c.sinks ? (const float *) ts.p : nullptr;
        x.dst = (float *) to.p + (size_t) s * c.n_q * H * D; x.dst_stride_token = (int64_t) H * D; x.dst_stride_head = D;
        x.pages = (const kvq_page *) w.pages_there->p + (size_t) s * w.k.n_pages;
        if (c.turns) {
            x.rotary = &w.left_out[0].rotor->view();
            x.k_mean = w.left_out[0].mean;
            x.v_mean = w.left_out[1].mean;
            x.positions = (const int32_t *) w.pos_there->p + (size_t) s * w.k.n_pages * P;
            x.sealed    = (const int32_t *) w.was_there->p + (size_t) s * w.k.n_pages * P;
        }
    }
    // as in a recorded step: one new row a stream, addressed by the table
    std::vector<uint16_t *> new_to[2];
    std::vector<float> new_rows[2];
    const int width = c.n_kv_heads * D;
    for (int s = 0; s < c.n_stream && !c.map; s++) {
        for (int i = s * w.k.n_pages; i < (s + 1) * w.k.n_pages; i++) {
            const kvq_page & p = w.pages[i];
            const int slot = uniform(0, P - 1), cell = p.cell + slot;
            if (!p.n_slots || p.k_params || cell >= n_kv || uniform(0, 2)) { continue; }
            for (int r = 0; r < 2; r++) {
                new_to[r].push_back((uint16_t *) (r ? p.v_codes : p.k_codes) + (size_t) slot * (r ? w.v : w.k).head_stride());
                for (int x = 0; x < width; x++) {
                    new_rows[r].push_back(normal());
                    (r ? w.vx : w.kx)[s][(size_t) cell * width + x] = kvq_f16_to_f32(kvq_f32_to_f16(new_rows[r].back()));
                }
            }
            break;
        }
    }
    device_bytes up_k(d, new_rows[0].size() * 4, new_rows[0].data()), up_v(d, new_rows[1].size() * 4, new_rows[1].data());
    const float * up[2] = { (const float *) up_k.p, (const float *) up_v.p };
    if (c.turns) { d.attend(a.data(), c.n_stream); } // tables of rotary embedding come to the device outside of recordings
    const bool overlap = !take_turns && !new_rows[0].empty() && uniform(0, 1) && new_rows[0].size() + new_rows[1].size() <= dst.size(); // as ggml may place them
    for (int r = 0; r < 2 && overlap; r++) {
        float * at = (float *) to.p + (r ? dst.size() - new_rows[1].size() : 0);
        d.put(at, new_rows[r].data(), new_rows[r].size() * 4);
        d.synchronize();
        up[r] = at;
    }
    for (const auto step : { kvq_cuda_device::REPLAY, kvq_cuda_device::RECORD }) { // the first fills the table
        CHECK(d.begin_step(step, 2 * new_to[0].size()), "too many rows");
        for (int r = 0; r < 2 && !new_to[0].empty(); r++) {
            d.write_rows(r ? w.v : w.k, (int64_t) new_to[r].size(), new_to[r].data(), up[r], width, nullptr, 1);
        }
        if (step == kvq_cuda_device::RECORD) { d.attend(a.data(), c.n_stream, &w.k, &w.v); }
        d.end_step();
    }
    for (size_t i = 0; i < new_to[0].size() + new_to[1].size(); i++) { // whoever wrote them
        const int r = i >= new_to[0].size();
        const size_t row = r ? i - new_to[0].size() : i;
        std::vector<uint16_t> stays(c.D);
        for (int h = 0; h < c.n_kv_heads; h++) {
            d.get(stays.data(), new_to[r][row] + (size_t) h * P * (r ? w.v : w.k).head_stride(), 2 * (size_t) c.D);
            for (int x = 0; x < c.D; x++) {
                CHECK(stays[x] == kvq_f32_to_f16(new_rows[r][row * width + (size_t) h * c.D + x]), "row %zu of %s, head %d, channel %d did not reach its page", row, r ? "V" : "K", h, x);
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
            d.get(rows.data(), there[r], rows.size() * 2);
            for (size_t i = 0; i < rows.size(); i++) {
                const size_t per = rows.size() / c.n_stream, s = i / per, cell = i % per / ((size_t) c.n_kv_heads * D);
                const float want = w.pages[s * w.k.n_pages + cell / P].n_slots ? (r ? w.vx : w.kx)[s][i % per] : 0.0f, got = kvq_f16_to_f32(rows[i]);
                CHECK(fabsf(got - want) <= 2e-3f * fabsf(want) + 5e-3f, "expanded %s of cell %zu is %g, not %g (bits %d/%d group %d scale %d D %d)", r ? "V" : "K", cell, got, want, c.kb, c.vb, c.group, c.scale, D);
            }
        }
    }
    int log2 = 1;
    while (2*log2 <= H) { log2 *= 2; }
    double err = 0, norm = 0;
    std::vector<double> o(D);
    for (int s = 0; s < c.n_stream; s++) { for (int t = 0; t < c.n_q; t++) { for (int h = 0; h < H; h++) {
        if (c.n_q > 64 && (t + h) % 7) { continue; }
        const double slope = c.max_bias <= 0 ? 1.0 : h < log2 ? pow(pow(2.0, -c.max_bias / log2), h + 1) : pow(pow(2.0, -c.max_bias / 2 / log2), 2*(h - log2) + 1);
        const float * qr = &q[(((size_t) s * c.n_q + t) * H + h) * D];
        double top = c.sinks ? sinks[h] : -INFINITY;
        std::vector<double> x((size_t) w.k.n_pages * P, -INFINITY);
        for (int slot = 0; slot < (int) x.size(); slot++) {
            const int cell = w.map_host[slot];
            if (!w.pages[(size_t) s * w.k.n_pages + slot / P].n_slots || cell < 0 || cell >= n_kv) { continue; }
            const uint16_t m = mask[((size_t) s * c.n_q + t) * n_mask + cell];
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
            err  += (got - ref) * (got - ref);
            norm += ref * ref;
        }
    } } }
    const double rel = sqrt(err / std::max(norm, 1e-30));
    CHECK(rel < 2e-3, "relative error %.3g: kb %d vb %d group %d scale %d D %d heads %dx%d n_q %d cells %d streams %d softcap %g alibi %g sinks %d map %d", rel, c.kb, c.vb, c.group,
          c.scale, c.D, c.n_kv_heads, c.gqa, c.n_q, c.n_cells, c.n_stream, c.softcap, c.max_bias, c.sinks, c.map);
    return rel;
}

// ---------------------------------------------------------------- the store over the device

// A layer pair over one device; the same operations on the CPU's must leave the same bytes.
struct pair_of_layers {
    kvq_device & d;
    kvq_scratch  scratch;
    kvq_counters counters;
    kvq_span_table spans[2];
    std::vector<int32_t> positions, sealed; // of methods that leave rotary embedding and means out
    std::vector<uint16_t> users;
    std::unique_ptr<device_bytes> there;
    std::unique_ptr<kvq_lane> lane[2][2];
    bool turns = false;

    pair_of_layers(kvq_device & d, const char * method, const char * opts, int n_head, int head_size, int n_cells, int n_stream) : d(d), scratch(d) {
        const kvq_method * m = kvq_method_find(method);
        kvq_options o;
        std::string err;
        CHECK(m && kvq_options_parse(*m, opts, o, err) == KVQ_OK, "%s", err.c_str());
        const kvq_layer_shape shape = { 0, n_head, head_size, head_size };
        for (int i = 0; i < 2; i++) {
            kvq_layer_plan plan;
            const kvq_layer_context context = { i, 2, shape, i ? &shape : nullptr };
            CHECK(m->plan(o, context, plan, err) == KVQ_OK, "%s", err.c_str());
            for (int v = 0; v < 2; v++) {
                const kvq_lane_layout l = kvq_make_lane_layout(plan, v, n_head, n_cells, n_stream);
                if (!v) { spans[i].init(n_stream, l.n_pages, l.page_cells); }
                lane[i][v].reset(new kvq_lane(l, v, l.shares_codes ? lane[0][v].get() : nullptr, &spans[i], &scratch, &counters, d));
                CHECK(lane[i][v]->ok(), "out of memory");
                turns = turns || plan.pre_rope;
            }
        }
    }
    // positions for every cell of the pages
    void leave_out(const float * const (&mean)[2][2], kvq_rotor * rotor) {
        const kvq_lane_layout & l = lane[0][0]->layout();
        const size_t n = (size_t) l.n_stream * l.n_pages * l.page_cells;
        positions.assign(n, -1);
        sealed.assign(n, -1);
        users.assign((size_t) l.n_stream * l.n_pages, 0);
        if (!d.is_host()) { there.reset(new device_bytes(static_cast<kvq_cuda_device &>(d), 8 * n)); }
        for (int i = 0; i < 2; i++) { for (int v = 0; v < 2; v++) {
            kvq_transform t;
            t.mean = mean[i][v];
            if (!v) {
                t.rotor = rotor; t.positions = positions.data(); t.sealed = sealed.data(); t.users = users.data();
                t.positions_there = there ? (int32_t *) there->p : nullptr;
                t.sealed_there    = there ? (int32_t *) there->p + n : nullptr;
            }
            lane[i][v]->set_transform(t);
        } }
    }
    void shift(int stream, int first, int by) {
        const kvq_lane_layout & l = lane[0][0]->layout();
        std::vector<int32_t> cells((size_t) l.n_cells);
        for (int c = first; c < l.n_cells; c++) { cells[(size_t) c] = by; }
        for (int i = 0; i < 2; i++) { lane[i][0]->shift_open(stream, cells.data(), [](int, int, uint16_t * row) { std::swap(row[0], row[1]); }); }
        const size_t at = (size_t) stream * l.n_pages * l.page_cells;
        for (int c = first; c < l.n_cells; c++) { positions[at + c] += positions[at + c] < 0 ? 0 : by; }
        lane[0][0]->transform().rotor->reach(1 << 14);
        if (there) { d.put((int32_t *) there->p + at, &positions[at], 4 * (size_t) l.n_pages * l.page_cells); }
    }
};

static int check_store(kvq_cuda_device & d, const char * method, const char * opts, int n_steps) {
    const int n_head = 2, D = 64, W = n_head * D, n_cells = 480, n_stream = 2;
    pair_of_layers host(kvq_cpu_device(), method, opts, n_head, D, n_cells, n_stream), there(d, method, opts, n_head, D, n_cells, n_stream);
    pair_of_layers * both[2] = { &host, &there };
    if (host.turns) {
        const float * mean[2][2] = { { some_means(W), some_means(W) }, { some_means(W), some_means(W) } };
        kvq_rotor * rotor = some_rotor(D, true);
        for (pair_of_layers * p : both) { p->leave_out(mean, rotor); }
    }
    std::vector<uint16_t> rows[2];
    int cursor[2] = {}, n_compared = 0;
    const auto compare = [&](int step, int stream, int cell, int n) {
        for (int i = 0; i < 2; i++) { for (int v = 0; v < 2; v++) {
            for (int w = 0; w < 2; w++) {
                rows[w].assign((size_t) n * W, 0);
                both[w]->lane[i][v]->read(stream, cell, n, rows[w].data());
            }
            for (size_t x = 0; x < rows[0].size(); x++) {
                CHECK(rows[0][x] == rows[1][x], "%s %s, step %d: layer %d %s stream %d cell %d channel %d is %04x, not %04x", method, opts, step, i, v ? "V" : "K", stream,
                      cell + (int) x / W, (int) x % W, rows[1][x], rows[0][x]);
            }
            n_compared += n;
        } }
    };
    for (int step = 0; step < n_steps; step++) {
        const int op = uniform(0, 99), stream = uniform(0, n_stream - 1);
        if (op < 70) { // rows of one ubatch: at the end of the sequence, or anywhere
            const int n = uniform(0, 3) ? uniform(1, 3) : uniform(1, 70);
            std::vector<int64_t> idx(n);
            std::vector<int32_t> pos(n);
            const int first = uniform(0, n_cells - 1);
            for (int i = 0; i < n; i++) { // distinct
                const int cell = op < 60 ? cursor[stream]++ % n_cells : (first + 7*i) % n_cells;
                idx[i] = (int64_t) stream * n_cells + cell;
                pos[i] = cell + step % 60;
            }
            for (int i = 0; i < 2; i++) { for (int v = 0; v < 2; v++) {
                std::vector<float> x((size_t) n * W);
                for (auto & y : x) { y = normal(); }
                device_bytes up(d, x.size() * 4, x.data());
                host .lane[i][v]->write(n, idx.data(), x.data(), W, 1, v ? nullptr : pos.data());
                there.lane[i][v]->write(n, idx.data(), (const float *) up.p, W, 1, v ? nullptr : pos.data());
            } }
            for (int w = 0; w < 2; w++) { for (int i = 0; i < 4; i++) { both[w]->lane[i / 2][i % 2]->commit(1); } }
        } else if (op < 85) {
            const int cell = uniform(0, n_cells - 1);
            compare(step, stream, cell, uniform(1, n_cells - cell));
        } else if (op < 90) { // saved and restored elsewhere
            const int cell = uniform(0, n_cells / 32 - 3) * 32, n = uniform(1, 80), to = uniform(0, n_cells / 32 - 3) * 32;
            for (int i = 0; i < 2; i++) { for (int v = 0; v < 2; v++) {
                std::vector<uint16_t> image((size_t) n * W);
                host.lane[i][v]->read(stream, cell, n, image.data());
                for (pair_of_layers * p : both) { p->lane[i][v]->restore(stream, to, n, image.data(), 1); }
            } }
        } else if (op < 95) { // context shift: keys change in place
            const int first = uniform(0, n_cells - 1);
            for (pair_of_layers * p : both) { for (int i = 0; i < 2; i++) {
                if (p->turns) {
                    if (!i) { p->shift(stream, first, 2); }
                    continue;
                }
                p->lane[i][0]->edit(stream, [&](int cell) { return cell >= first; }, [&](int cell, int, uint16_t * row) { if (cell >= first) { std::swap(row[0], row[1]); } });
            } }
        } else if (op < 99) {
            for (pair_of_layers * p : both) { for (int i = 0; i < 4; i++) { p->lane[i / 2][i % 2]->copy_stream(stream, 1 - stream); } }
            cursor[1 - stream] = cursor[stream];
            for (int w = 0; w < 2; w++) { for (int i = 0; i < 4; i++) { both[w]->lane[i / 2][i % 2]->commit(1); } }
        } else {
            for (pair_of_layers * p : both) { for (int i = 0; i < 4; i++) { p->lane[i / 2][i % 2]->clear(); } }
        }
    }
    for (int s = 0; s < n_stream; s++) { compare(n_steps, s, 0, n_cells); }
    CHECK(d.error().empty(), "%s", d.error().c_str());
    CHECK(host.counters.n_sealed == there.counters.n_sealed, "pages sealed: %d, not %d", (int) there.counters.n_sealed, (int) host.counters.n_sealed);
    return n_compared;
}

#include "cuda_bench.h"
#include "cuda_aqua.h"

int main(int argc, char ** argv) {
    rng.seed(1);
    setenv("KVQ_CUDA_UNPROVEN", "1", 0); // this is where it is proven
    kvq_cuda_device d(0);
    CHECK(d.error().empty(), "%s", d.error().c_str());
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        bench(d, argc > 2 ? argv[2] : "", argc > 3 ? atoi(argv[3]) : 0);
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "aqua")) {
        check_aqua(d, argc > 2 ? atoi(argv[2]) : 1000, argc < 3);
        return 0;
    }
    int n = 0;
    const bool on_host = argc > 1 && !strcmp(argv[1], "host");
    take_turns = on_host;
    const int  host_steps = on_host && argc > 2 ? atoi(argv[2]) : 8;
    const bool quick   = on_host || (argc > 1 && !strcmp(argv[1], "quick")); // under a sanitizer
    for (int role : { KVQ_ROLE_K, KVQ_ROLE_V }) { for (int bits = 0; bits <= 4; bits++) { for (int group : { 16, 32, 64, 128 }) { for (int scale : { 0, 1 }) { for (int D : { 64, 80, 128, 256 }) {
        for (int levels : { 0, 1 }) {
            const kvq_codec c = make_codec(role, bits, role == KVQ_ROLE_V ? std::min(group, D) : group, scale, levels, levels ? 0.125f : bits == 1 ? 0.16666667f : 0.045f, std::max(32, group), D);
            if (!kvq_traits(c.type)->refuse(c) && (!quick || (group == 32 && D == 80)) && (!on_host || scale == bits % 2)) { n += check_codec(d, c); }
        }
    } } } } }
    const int n_affine = n;
    for (int role : { KVQ_ROLE_K, KVQ_ROLE_V }) { for (int bits = 1; bits <= 4; bits++) { for (int vec : { 2, 4, 8 }) { for (int scale : { 0, 1 }) { for (int D : { 8, 64, 80, 96, 128, 192, 256 }) {
        for (int cells : { 32, 96 }) {
            const kvq_codec c = make_codec(role, bits, vec, scale, 0, 0.0f, cells, D);
            if (!kvq_traits(c.type)->refuse(c) && (!quick || D == 80) && (!on_host || scale == cells / 96)) { n += check_codec(d, c); }
        }
    } } } } }
    CHECK(quick || (n_affine > 2000 && n - n_affine > 2000), "only %d and %d blocks compared", n_affine, n - n_affine);
    printf("sealing: %d pages of 2 heads identical to the C reference\n", n);
    for (int bits : { 8, 4 }) {
        for (const predict_case & c : { predict_case{ 96, 80, bits, 33 }, { 40, 200, bits, 7 }, { 512, 256, bits, 300 } }) { check_predict(d, c); }
    }
    printf("predictors: the bits of the C reference\n");
    double worst = 0;
    n = 0;
    for (const auto & m : { std::make_pair("f16", ""), std::make_pair("kivi", "bits=2,window=64"), std::make_pair("kivi", "bits=4,group=64,scales=u8,window=0,sinks=4"),
                            std::make_pair("xquant", "km=0,vm=0,window=32"), std::make_pair("higgs", "bits=2,window=64"),
                            std::make_pair("higgs", "k_bits=4,v_bits=3,scales=f16,window=0,sinks=4"), std::make_pair("higgs", "bits=1,grid=d8,window=32") }) {
        const int steps = on_host ? host_steps : quick ? 20 : 1000, n_rows = check_store(d, m.first, m.second, steps);
        printf("store, %s %s: %d random operations, %d rows as on the CPU\n", m.first, m.second, steps, n_rows);
    }
    check_aqua(d, on_host ? host_steps : quick ? 20 : 1000, !quick);
    const auto attention = [&](attention_case c) {
        for (bool on : { true, false }) {
            d.allow_short = on;
            worst = std::max(worst, check_attention(d, c));
            n++;
        }
        d.allow_short = true;
    };
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
            attention({ bits, bits, 128, 0, 128, 1, 1 << bits % 4, 1, 500, 1, bits == 2 ? 20.0f : 0.0f, bits == 4 ? 8.0f : 0.0f, false, false });
        }
        CHECK(d.n_short >= 10, "only %d launches for short caches", (int) d.n_short);
        printf("attention: %d cases, %d of short caches, worst relative error %.2g\n", n, (int) d.n_short, worst);
        return 0;
    }
    for (int bits : { 1, 2, 3, 4, 16 }) { for (int group : { 32, 128 }) { for (int n_q : { 1, 2, 7, 40, 200 }) {
        attention({ bits, bits, group, group == 32, 128, 2, n_q == 7 ? 1 : 4, n_q, 1100, 1, 0, 0, false, false });
    } } }
    for (int D : { 64, 80, 96, 128, 256 }) { for (int gqa : { 1, 4, 8, 16 }) {
        attention({ 2, 1, 32, 0, D, 2, gqa, 3, 700, 2, 0, 0, true, false });
        attention({ 1, 2, 32, 0, D, 2, gqa, 1, 2100, 1, 20.0f, 0, false, false });
        attention({ 2, 2, 64, 1, D, 1, gqa, 1, 31 + D, 3, 0, 8.0f, true, false });
        attention({ 4, 3, 32, 0, D, 1, gqa, 5, 300, 1, 0, 0, false, true });
    } }
    for (int kb : { 1, 2, 3, 4 }) { for (int vb : { 1, 2, 3, 4 }) { for (int D : { 64, 128 }) { // lattices
        attention({ kb, vb, 2, vb % 2, D, 2, 4, 1, 1100, 1, 0, 0, false, false });
        attention({ kb, vb, 2, kb % 2, D, 2, vb, 3, 3000, 2, vb == 2 ? 20.0f : 0.0f, vb == 3 ? 8.0f : 0.0f, vb == 4, kb == vb });
    } } }
    for (int D : { 64, 80, 96, 128, 256 }) { for (int vec : { 2, 4, 8 }) { for (int n_q : { 1, 7, 40 }) {
        attention({ 1, 1, vec, 1, D, 2, n_q == 7 ? 1 : 8, n_q, 500, 1, 0, 0, false, false });
        if (vec < 8) { attention({ 2, 2, vec, 0, D, 1, 4, n_q, 333, 2, 0, 0, true, n_q == 7 }); }
    } } }
    for (int gqa : { 3, 5, 7 }) { attention({ 2, 2, 128, 0, 128, 2, gqa, 1, 5000, 1, 0, 0, false, false }); }
    CHECK(d.n_short >= 10, "only %d launches for short caches", (int) d.n_short);
    printf("attention: %d cases, %d of short caches, worst relative error %.2g\n", n, (int) d.n_short, worst);
    return 0;
}

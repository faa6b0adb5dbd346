// CUDA against the C reference: sealed bytes and decoded tiles identical, attention against f64 over decoded values.
// Usage: test_cuda [quick | host [STEPS] | attention [fine | bytes] | far [quick | ahead | bench [CELLS]] |
//     split [quick] | aqua [STEPS] | coords [STEPS] | bench [FORMAT [CELLS]]]    host: least, for kernels on the host
//     (tests/cuda_on_host); bench: time of one layer's attention and the floor = bytes / copy bandwidth
#include "cuda/device/device.h"
#include "layer.h"
#include "device_bytes.h"
#include "base/f16.h"
#include "types/types.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>

// One of 65536: making each anew took a sixth of the time of kernels on the host.
static float normal() {
    static const std::vector<float> all = [] {
        std::vector<float> x(1 << 16);
        std::normal_distribution<float> of;
        for (float & y : x) { y = of(rng); }
        return x;
    }();
    return all[rng() & 0xffff];
}

static kvq_codec make_codec(
    int role, int bits, int group, int scale, int levels, float eta, int n_cells, int head_size) {
    kvq_codec c = {};
    // less than 16: channels of a point
    c.type = bits == 16 ? KVQ_TYPE_F16 : group < 16 ? KVQ_TYPE_LATTICE : KVQ_TYPE_AFFINE;
    c.role = role;
    c.bits = bits;
    c.group = group;
    c.scale = scale;
    c.levels = levels;
    c.eta = eta;
    c.n_cells = n_cells;
    c.head_size = head_size;
    return c;
}

static kvq_lane_layout make_layout(const kvq_codec & c, int n_head, int n_cells) {
    kvq_layer_plan plan;
    plan.k = plan.v = c;
    return kvq_make_lane_layout(plan, c.role == KVQ_ROLE_V, n_head, n_cells, 1);
}

static std::vector<uint16_t> random_tile(const kvq_lane_layout & l, int kind) {
    std::vector<uint16_t> t(l.nb_frame / 2);
    for (auto & x : t) {
        switch (kind) {
        case 0: x = kvq_f32_to_f16(normal()); break;
        // any bits: infinities, nans, denormals
        case 1: x = (uint16_t) rng(); break;
        case 2: x = kvq_f32_to_f16(uniform(0, 9) ? 0.25f : -0.0f); break; // constant groups, both zeros
        case 3: x = (uint16_t) (rng() & 0x83ff); break;                   // denormals
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
        std::vector<std::vector<uint8_t>> codes, params, valid;
        std::vector<kvq_page_block> host, there;
        std::vector<std::unique_ptr<device_bytes>> mem;
        const auto there_of = [&](const void * p, size_t nb) {
            mem.emplace_back(new device_bytes(d, nb, p));
            return mem.back()->p;
        };
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
            host.push_back({ tiles[p].data(), v, adopts ? codes[0].data() : nullptr, adopts ? nullptr : codes[p].data(),
                params[p].data() });
            void *tile = there_of(tiles[p].data(), l.nb_frame), *cd = there_of(codes[p].data(), codes[p].size());
            there.push_back({ (uint16_t *) tile, v, adopts ? there[0].codes : nullptr, adopts ? nullptr : cd,
                there_of(params[p].data(), params[p].size()) });
        }
        kvq_cpu_device().encode(l, host.data(), n_pages, 1);
        d.encode(l, there.data(), n_pages, 1);
        for (int p = 0; p < n_pages; p++) {
            std::vector<uint8_t> b(params[p].size());
            d.get(b.data(), there[p].params, b.size());
            for (size_t i = 0; i < b.size(); i++) {
                CHECK(b[i] == params[p][i],
                    "role %d bits %d group %d scale %d levels %d D %d cells %d kind %d page %d: parameter byte %zu is "
                    "%02x, not %02x",
                    c.role, c.bits, c.group, c.scale, c.levels, c.head_size, c.n_cells, kind, p, i, b[i], params[p][i]);
            }
            if (host[p].codes && l.nb_codes) {
                b.resize(codes[p].size());
                d.get(b.data(), there[p].codes, b.size());
                for (size_t i = 0; i < b.size(); i++) {
                    CHECK(b[i] == codes[p][i],
                        "role %d bits %d group %d scale %d levels %d D %d cells %d kind %d page %d: code byte %zu is "
                        "%02x, not %02x",
                        c.role, c.bits, c.group, c.scale, c.levels, c.head_size, c.n_cells, kind, p, i, b[i],
                        codes[p][i]);
                }
            }
            if (kind != 1) {
                std::vector<uint16_t> want(l.nb_frame / 2), got(l.nb_frame / 2);
                const void * from = host[p].shared ? host[p].shared : host[p].codes;
                kvq_cpu_device().decode(l, { want.data(), nullptr, nullptr, (void *) from, host[p].params });
                device_bytes tile(d, l.nb_frame);
                d.decode(l,
                    { (uint16_t *) tile.p, nullptr, nullptr,
                        (void *) (there[p].shared ? there[p].shared : there[p].codes), there[p].params });
                d.get(got.data(), tile.p, l.nb_frame);
                CHECK(!memcmp(want.data(), got.data(), l.nb_frame),
                    "decoded tile differs: role %d bits %d group %d scale %d D %d", c.role, c.bits, c.group, c.scale,
                    c.head_size);
            }
            n++;
        }
    }
    CHECK(d.error().empty(), "%s", d.error().c_str());
    return n;
}

// ---------------------------------------------------------------- predictors

struct predict_case {
    int n_in, n_out, bits, n_rows;
};

struct predict_world {
    kvq_predictor w;
    std::vector<uint8_t> & packed; // stays: a device keeps copies of predictors by address
    std::vector<int8_t> x;
    std::vector<float> s;
    size_t x_stride;
    std::unique_ptr<device_bytes> rows, scales, out;

    predict_world(kvq_cuda_device & d, const predict_case & c) :
        packed(*new std::vector<uint8_t>(kvq_predictor_bytes(c.n_in, c.n_out, c.bits))),
        s((size_t) c.n_rows),
        x_stride((size_t) (c.n_in + 31) / 32 * 32) {
        std::vector<float> m((size_t) c.n_in * c.n_out), row((size_t) c.n_in);
        for (auto & v : m) { v = 0.05f * normal(); }
        kvq_predictor_pack(c.n_in, c.n_out, c.bits, m.data(), packed.data());
        x.assign(x_stride * c.n_rows, 0);
        for (int i = 0; i < c.n_rows; i++) {
            const float f = i % 5 ? expf(normal()) : 0.0f;
            for (auto & v : row) { v = f * normal(); }
            kvq_quantise_row(c.n_in, row.data(), &x[i * x_stride], &s[(size_t) i]);
        }
        rows.reset(new device_bytes(d, x.size(), x.data()));
        scales.reset(new device_bytes(d, s.size() * 4, s.data()));
        out.reset(new device_bytes(d, (size_t) c.n_rows * c.n_out * 4));
        w.n_in = c.n_in;
        w.n_out = c.n_out;
        w.bits = c.bits;
        w.data = packed.data();
    }
    void run(kvq_cuda_device & d, int n, bool add) {
        d.predict(w, n, (const int8_t *) rows->p, x_stride, (const float *) scales->p, add, (float *) out->p,
            (size_t) w.n_out);
    }
};

static void check_predict(kvq_cuda_device & d, const predict_case & c) {
    predict_world p(d, c);
    std::vector<float> want((size_t) c.n_rows * c.n_out, 0.0f);
    for (const bool add : { false, true }) {
        p.run(d, c.n_rows, add);
        for (int i = 0; i < c.n_rows; i++) {
            kvq_predict_row(p.w, &p.x[i * p.x_stride], p.s[(size_t) i], add, &want[(size_t) i * c.n_out]);
        }
        const std::vector<float> got = p.out->get<float>();
        for (size_t i = 0; i < want.size(); i++) {
            CHECK(!memcmp(&got[i], &want[i], 4), "predictor %d -> %d, %d bits: row %d output %d is %.9g, not %.9g",
                c.n_in, c.n_out, c.bits, (int) i / c.n_out, (int) i % c.n_out, got[i], want[i]);
        }
    }
    CHECK(d.error().empty(), "%s", d.error().c_str());
}

// ---------------------------------------------------------------- attention

#include "cuda_attention.h"

// ---------------------------------------------------------------- the store over the device

// A layer pair over one device; the same operations on the CPU's must leave the same bytes.

struct pair_of_layers {
    kvq_device & d;
    cache_of_layers cache;
    kvq_layer_calibration data; // whose means leave_out() gives
    composed_layer layer[2];
    kvq_lane * lane[2][2];
    kvq_counters & counters = cache.counters;
    bool turns = false;

    pair_of_layers(
        kvq_device & d, const char * method, const char * opts, int n_head, int head_size, int n_cells, int n_stream) :
        d(d), cache(d) {
        const kvq_layer_shape shape = { 0, n_head, head_size, head_size };
        for (int i = 0; i < 2; i++) {
            const kvq_layer_plan plan = plan_of(method, opts, { i, 2, shape, i ? &shape : nullptr });
            layer[i].make(cache, plan, n_head, n_cells, n_stream, i, i ? &layer[0] : nullptr, &data);
            for (int v = 0; v < 2; v++) { lane[i][v] = layer[i].lane[v].get(); }
            turns = turns || layer[i].transforms[0];
        }
    }
    void leave_out(const float * const (&mean)[2][2], kvq_rotor * rotor) {
        for (int i = 0; i < 2; i++) {
            for (int v = 0; v < 2; v++) { layer[i].transforms[v]->mean = mean[i][v]; }
            layer[i].transforms[0]->rotor = rotor;
        }
    }
    void have_coords(const kvq_basis * const (&basis)[2][2], const kvq_order * const (&order)[2]) {
        for (int i = 0; i < 2; i++) {
            for (int v = 0; v < 2; v++) { layer[i].transforms[v]->basis = basis[i][v]; }
            kvq_transform & keys = *layer[i].transforms[0];
            keys.order = keys.order ? order[i] : nullptr;
        }
    }
    void shift(int stream, int first, int by) {
        const kvq_lane_layout & l = lane[0][0]->layout();
        std::vector<int32_t> cells((size_t) l.n_cells);
        for (int c = first; c < l.n_cells; c++) { cells[(size_t) c] = by; }
        for (auto & x : layer) {
            x.transforms[0]->shift_open(
                *x.lane[0], stream, cells.data(), [](int, int, uint16_t * row) { std::swap(row[0], row[1]); });
        }
        layer[0].transforms[0]->rotor->cover(1 << 14);
        kvq_positions & p = *cache.positions();
        p.shift(stream, cells.data(), l.n_cells, p.n_shifts + 1);
        p.n_shifts++;
    }
};

#include "cuda_coords.h"

static int check_store(kvq_cuda_device & d, const char * method, const char * opts, int n_steps, bool images) {
    const int n_head = 2, D = 64, W = n_head * D, n_cells = 480, n_stream = 2;
    pair_of_layers host(kvq_cpu_device(), method, opts, n_head, D, n_cells, n_stream),
        there(d, method, opts, n_head, D, n_cells, n_stream);
    pair_of_layers * both[2] = { &host, &there };
    const int64_t n_seals = d.n_seals;
    kvq_rotor * rotor = nullptr;
    if (host.turns) {
        const float * mean[2][2] = { { some_means(W), some_means(W) }, { some_means(W), some_means(W) } };
        rotor = some_rotor(D, true, images);
        for (pair_of_layers * p : both) { p->leave_out(mean, rotor); }
    }
    share_coords(both, n_head, D);
    std::vector<uint16_t> rows[2];
    int cursor[2] = {}, n_compared = 0;
    const auto compare = [&](int step, int stream, int cell, int n) {
        for (int i = 0; i < 2; i++) {
            for (int v = 0; v < 2; v++) {
                for (int w = 0; w < 2; w++) {
                    rows[w].assign((size_t) n * W, 0);
                    both[w]->lane[i][v]->read(stream, cell, n, rows[w].data());
                }
                for (size_t x = 0; x < rows[0].size(); x++) {
                    CHECK(rows[0][x] == rows[1][x],
                        "%s %s, step %d: layer %d %s stream %d cell %d channel %d is %04x, not %04x", method, opts,
                        step, i, v ? "V" : "K", stream, cell + (int) x / W, (int) x % W, rows[1][x], rows[0][x]);
                }
                n_compared += n;
            }
        }
    };
    for (int step = 0; step < n_steps; step++) {
        const bool pooled = host.lane[0][0]->layout().pooled;
        const int op = step + 1 == n_steps ? 98
            : pooled && !uniform(0, 9)     ? 99
                                           : uniform(0, 99),
                  stream = uniform(0, n_stream - 1); // a copy ends it
        if (op < 70) {                               // rows of one ubatch: at the end of the sequence, or anywhere
            const int n = uniform(0, 3) ? uniform(1, 3) : uniform(1, 70);
            std::vector<int64_t> idx(n);
            std::vector<int32_t> pos(n);
            const int first = uniform(0, n_cells - 1);
            for (int i = 0; i < n; i++) { // distinct
                const int cell = op < 60 ? cursor[stream]++ % n_cells : (first + 7 * i) % n_cells;
                idx[i] = (int64_t) stream * n_cells + cell;
                pos[i] = images ? some_place(*rotor, cell + step % 60) : cell + step % 60;
            }
            for (int i = 0; i < 2; i++) {
                for (int v = 0; v < 2; v++) {
                    std::vector<float> x((size_t) n * W);
                    for (auto & y : x) { y = normal(); }
                    device_bytes up(d, x.size() * 4, x.data());
                    host.lane[i][v]->write(n, idx.data(), x.data(), W, 1, v ? nullptr : pos.data());
                    there.lane[i][v]->write(n, idx.data(), (const float *) up.p, W, 1, v ? nullptr : pos.data());
                }
            }
            for (int w = 0; w < 2; w++) {
                for (int i = 0; i < 4; i++) { both[w]->lane[i / 2][i % 2]->commit(1); }
            }
        } else if (op < 85) {
            const int cell = uniform(0, n_cells - 1);
            compare(step, stream, cell, uniform(1, n_cells - cell));
        } else if (op < 90) { // saved and restored elsewhere
            const int cell = uniform(0, n_cells / 32 - 3) * 32, n = uniform(1, 80),
                      to = uniform(0, n_cells / 32 - 3) * 32;
            std::vector<uint16_t> image[4]; // of all before any is loaded: layers share their positions
            for (int i = 0; i < 4; i++) {
                image[i].resize((size_t) n * W);
                host.lane[i / 2][i % 2]->read(stream, cell, n, image[i].data());
            }
            for (int i = 0; i < 4; i++) {
                for (pair_of_layers * p : both) { p->lane[i / 2][i % 2]->restore(stream, to, n, image[i].data(), 1); }
            }
        } else if (op < 95 && !images) { // context shift: keys change in place
            const int first = uniform(0, n_cells - 1);
            for (pair_of_layers * p : both) {
                for (int i = 0; i < 2; i++) {
                    if (p->turns) {
                        if (!i) { p->shift(stream, first, 2); }
                        continue;
                    }
                    p->lane[i][0]->edit(
                        stream, [&](int cell) { return cell >= first; },
                        [&](int cell, int, uint16_t * row) {
                            if (cell >= first) { std::swap(row[0], row[1]); }
                        });
                }
            }
        } else if (op < 99) {
            const int64_t n_copied = d.n_copied;
            for (pair_of_layers * p : both) {
                for (int i = 0; i < 4; i++) { p->lane[i / 2][i % 2]->copy_stream(stream, 1 - stream); }
            }
            CHECK(d.n_copied == n_copied, "%s %s: %d pages are copied one by one", method, opts,
                (int) (d.n_copied - n_copied));
            cursor[1 - stream] = cursor[stream];
            for (int w = 0; w < 2; w++) {
                for (int i = 0; i < 4; i++) { both[w]->lane[i / 2][i % 2]->commit(1); }
            }
        } else if (host.lane[0][0]->layout().pooled && uniform(0, 3)) { // what lies behind a cell is free
            const int from = uniform(0, n_cells / 2);
            for (pair_of_layers * p : both) {
                for (int i = 0; i < 4; i++) { p->lane[i / 2][i % 2]->free_from(stream, from); }
            }
            cursor[stream] = from;
        } else {
            for (pair_of_layers * p : both) {
                for (int i = 0; i < 4; i++) { p->lane[i / 2][i % 2]->clear(); }
            }
        }
    }
    for (int s = 0; s < n_stream; s++) { compare(n_steps, s, 0, n_cells); }
    CHECK(d.error().empty(), "%s", d.error().c_str());
    CHECK(host.counters.n_sealed == there.counters.n_sealed, "pages sealed: %d, not %d", (int) there.counters.n_sealed,
        (int) host.counters.n_sealed);
    const kvq_lane_layout & layout = there.lane[1][0]->layout();
    CHECK(host.turns || layout.shares_codes || layout.pooled || there.counters.n_sealed < 8 ||
            4 * (d.n_seals - n_seals) <= 3 * (int64_t) there.counters.n_sealed,
        "%d launches for %d pages: layers do not seal together", (int) (d.n_seals - n_seals),
        (int) there.counters.n_sealed);
    return n_compared;
}

#include "cuda_bench.h"
#include "cuda_aqua.h"
#include "cuda_bytes.h"
#include "cuda_far.h"
#include "cuda_far_prompts.h"
#include "cuda_inputs.h"
#include "cuda_split.h"

static bool check_one(kvq_cuda_device & d, const char * what, int n_steps, bool many) {
    if (!strcmp(what, "coords")) {
        check_coords(d, n_steps);
    } else if (!strcmp(what, "aqua")) {
        check_aqua(d, n_steps, many);
    } else {
        return false;
    }
    return true;
}

int main(int argc, char ** argv) {
    rng.seed(1);
    kvq_cuda_device d(0);
    CHECK(d.error().empty(), "%s", d.error().c_str());
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        bench_heads shape = { 32, 8, 128 };
        if (argc > 4) { // bench FORMAT CELLS 24/4x256
            CHECK(sscanf(argv[4], "%d/%dx%d", &shape.heads, &shape.heads_kv, &shape.D) == 3,
                "%s is no shape, as 24/4x256 is", argv[4]);
        }
        bench(d, argc > 2 ? argv[2] : "", argc > 3 ? atoi(argv[3]) : 0, shape);
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "attention")) {
        take_turns = argc > 3 && !strcmp(argv[3], "host");
        d.one_team = argc > 4; // racecheck does not know barriers of some of a block's warps
        if (argc > 2 && !strcmp(argv[2], "wide")) {
            wide_attention(d, argc > 3);
        } else if (argc > 2 && !strcmp(argv[2], "listed")) {
            listed_attention(d, argc > 3);
        } else if (argc > 2 && !strcmp(argv[2], "bytes")) {
            bytes_attention(d, argc > 3);
        } else if (argc > 2 && !strcmp(argv[2], "open")) {
            open_ends(d, argc > 3);
        } else if (argc > 2 && !strcmp(argv[2], "rest")) {
            attention_matrix(d, argc > 3, true);
        } else if (argc > 2) {
            fine_attention(d, argc > 3);
        } else {
            attention_matrix(d, false);
        }
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "split")) {
        check_split(d, argc > 2);
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "far")) {
        if (argc > 2 && !strcmp(argv[2], "bench")) {
            far_bench(d, argc > 3 ? atoi(argv[3]) : 0);
        } else {
            if (argc < 3 || strcmp(argv[2], "ahead")) { far_attention(d, argc > 2); }
            far_ahead(d, argc > 2 && strcmp(argv[2], "ahead"));
            far_prompts(d);
        }
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "limits")) {
        print_limits(d);
        return 0;
    }
    check_inputs(d);
    check_copies(d);
    if (argc > 1 && (!strcmp(argv[1], "host") || !strcmp(argv[1], "quick"))) {
        far_attention(d, true);
        far_ahead(d, true);
        far_prompts(d);
    }
    if (argc > 1 && check_one(d, argv[1], argc > 2 ? atoi(argv[2]) : 1000, argc < 3)) { return 0; }
    int n = 0;
    const bool on_host = argc > 1 && !strcmp(argv[1], "host");
    take_turns = on_host;
    const int host_steps = on_host && argc > 2 ? atoi(argv[2]) : 8;
    const bool quick = on_host || (argc > 1 && !strcmp(argv[1], "quick")); // under a sanitizer
    for (int role : { KVQ_ROLE_K, KVQ_ROLE_V }) {
        for (int bits = 0; bits <= 4; bits++) {
            for (int group : { 16, 32, 64, 128 }) {
                for (int scale : { 0, 1 }) {
                    for (int D : { 64, 80, 96, 128, 192, 256, 512 }) {
                        for (int levels : { 0, 1 }) {
                            const kvq_codec c =
                                make_codec(role, bits, role == KVQ_ROLE_V ? std::min(group, D) : group, scale, levels,
                                    levels          ? 0.125f
                                        : bits == 1 ? 0.16666667f
                                                    : 0.045f,
                                    std::max(32, group), D);
                            if (!kvq_traits(c.type)->refuse(c) && (!quick || (group == 32 && (D == 80 || D == 512))) &&
                                (!on_host || scale == bits % 2)) {
                                n += check_codec(d, c);
                            }
                        }
                    }
                }
            }
        }
    }
    const int n_affine = n;
    for (int role : { KVQ_ROLE_K, KVQ_ROLE_V }) {
        for (int bits = 1; bits <= 4; bits++) {
            for (int vec : { 2, 4, 8 }) {
                for (int scale : { 0, 1, 2 }) {
                    for (int D : { 8, 64, 80, 96, 128, 192, 256, 512 }) {
                        for (int cells : { 32, 96 }) {
                            const kvq_codec c = make_codec(role, bits, vec, scale, 0, 0.0f, cells, D);
                            if (!kvq_traits(c.type)->refuse(c) && (!quick || D == 80 || (D == 512 && vec == 2)) &&
                                (!on_host || scale == (cells / 96 + vec / 4) % 3)) {
                                n += check_codec(d, c);
                            }
                        }
                    }
                }
            }
        }
    }
    CHECK(quick || (n_affine > 2000 && n - n_affine > 2000), "only %d and %d blocks compared", n_affine, n - n_affine);
    printf("sealing: %d pages of 2 heads identical to the C reference\n", n);
    for (int bits : { 8, 4 }) {
        for (const predict_case & c :
            { predict_case{ 96, 80, bits, 33 }, { 40, 200, bits, 7 }, { 512, 256, bits, 300 } }) {
            check_predict(d, c);
        }
    }
    printf("predictors: the bits of the C reference\n");
    for (const auto & m : { std::make_pair("f16", ""), std::make_pair("kivi", "bits=2,window=64"),
             std::make_pair("kivi", "bits=4,group=64,scales=u8,window=0,sinks=4"),
             std::make_pair("xquant", "km=0,vm=0,window=32"), std::make_pair("higgs", "bits=2,window=64"),
             std::make_pair("higgs", "k_bits=4,v_bits=3,scales=f16,window=0,sinks=4"),
             std::make_pair("higgs", "bits=1,grid=d8,window=32"), std::make_pair("kivi", "bits=2,window=auto"),
             std::make_pair("higgs", "bits=2,window=auto"), std::make_pair("xquant", "km=0,vm=0,window=auto") }) {
        const bool fills = strstr(m.second, "window=auto"); // pages seal late
        const int steps = (on_host        ? host_steps
                                  : quick ? 20
                                          : 1000) *
            (fills && quick ? 6 : 1),
                  n_rows = check_store(d, m.first, m.second, steps, false);
        CHECK(!fills || n_rows > 0, "nothing was compared");
        printf("store, %s %s: %d random operations, %d rows as on the CPU\n", m.first, m.second, steps, n_rows);
    }
    check_coords(d, on_host ? host_steps : quick ? 20 : 1000);
    check_aqua(d, on_host ? host_steps : quick ? 20 : 1000, !quick);
    check_split(d, quick);
    bytes_attention(d, quick);
    open_ends(d, quick);
    attention_matrix(d, quick);
    return 0;
}

// Methods that treat cells by the attention they get, on CUDA (zipcache, minikv): sets, kept cells, sealed bytes and
// stores as on the CPU for the same sums, attention and column sums against f64. Far rows that specache keeps beside
// attention. Usage: test_cuda_policies [quick | host | decode | bench [decode | prompt]]
//     bench: one layer of 8 KV heads; of one token alone, of 512 alone
#include "cuda/device/device.h"
#include "two_devices.h"
#include "engine/host.h"
#include "types/mixed.h"
#include "types/types.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>

// ---------------------------------------------------------------- blocks

static uint16_t value_of(int kind) {
    switch (kind) {
    case 0: return kvq_f32_to_f16(normal());
    case 1: return (uint16_t) rng();                              // any bits
    case 2: return kvq_f32_to_f16(uniform(0, 9) ? 0.25f : -0.0f); // constant groups, both zeros
    case 3: return (uint16_t) (rng() & 0x83ff);                   // denormals
    default: return kvq_f32_to_f16(normal() * (uniform(0, 50) ? 1.0f : 3000.0f));
    }
}

static int check_blocks(kvq_cuda_device & d, const char * opts, int D) {
    const int n_head = 2, n_pages = 3;
    const kvq_layer_plan plan = make_plan("zipcache", opts, n_head, D);
    int n = 0;
    for (int v = 0; v < 2; v++) {
        kvq_lane_layout l = kvq_make_lane_layout(plan, v, n_head, 256 * n_pages, 1);
        for (int kind = 0; kind < 5; kind++) {
            std::vector<uint16_t> tile(l.nb_frame / 2);
            std::vector<uint8_t> codes(l.nb_codes * n_head, 0xa5), params(l.nb_params * n_head, 0), valid(32);
            for (auto & x : tile) { x = value_of(kind); }
            for (auto & x : valid) { x = (uint8_t) rng(); }
            for (int h = 0; h < n_head; h++) { // a set of the right size, once in a while another
                uint8_t * set = &params[h * l.nb_params];
                for (int i = 0; i < l.codec.n_hi + (kind == 4);) {
                    const int t = uniform(0, l.page_cells - 1);
                    if (i == l.page_cells) { break; }
                    i += !(set[t / 8] >> t % 8 & 1);
                    set[t / 8] |= (uint8_t) (1 << t % 8);
                }
            }
            device_bytes tt(d, l.nb_frame, tile.data()), tc(d, codes.size(), codes.data()),
                tp(d, params.size(), params.data());
            const uint8_t * bits = kind == 2 ? nullptr : valid.data();
            const kvq_page_block host = { tile.data(), bits, nullptr, codes.data(), params.data() },
                                 there = { (uint16_t *) tt.p, bits, nullptr, tc.p, tp.p };
            kvq_cpu_device().encode(l, &host, 1, 1);
            d.encode(l, &there, 1, 1);
            const std::vector<uint8_t> c = tc.get<uint8_t>(), p = tp.get<uint8_t>();
            for (size_t i = 0; i < params.size(); i++) {
                CHECK(p[i] == params[i], "%s D %d %s kind %d: parameter byte %zu of %zu is %02x, not %02x", opts, D,
                    v ? "V" : "K", kind, i, l.nb_params, p[i], params[i]);
            }
            for (size_t i = 0; i < codes.size(); i++) {
                CHECK(c[i] == codes[i], "%s D %d %s kind %d: code byte %zu of %zu is %02x, not %02x", opts, D,
                    v ? "V" : "K", kind, i, l.nb_codes, c[i], codes[i]);
            }
            if (kind != 1) {
                kvq_cpu_device().decode(l, host);
                d.decode(l, there);
                CHECK(tt.get<uint16_t>() == tile, "%s D %d %s kind %d: decoded tile differs", opts, D, v ? "V" : "K",
                    kind);
            }
            n++;
        }
    }
    CHECK(d.error().empty(), "%s", d.error().c_str());
    return n;
}

static int check_stores(kvq_cuda_device & d, const char * method, const char * opts, int n_steps) {
    const int n_rows = check_store(d, method, opts, n_steps);
    CHECK(d.error().empty(), "%s", d.error().c_str());
    return n_rows;
}

// ---------------------------------------------------------------- cells into pages of slots

// Runs of pages of random scores, among them ties, cells that are not packed and pages that were never observed,
// against a plain sort.
static int check_pack(
    kvq_cuda_device & d, int page, int n_head, const std::vector<int> & runs, bool normalise, bool sorted) {
    const kvq_lane_layout l = kvq_make_lane_layout(
        make_plan("zipcache", ("interval=" + std::to_string(page)).c_str(), n_head, 64), false, n_head, 4 * page, 1);
    const size_t nb_bits = (size_t) page / 8, n_map = (size_t) n_head * page;
    CHECK(l.page_cells == page, "pages of %d cells", l.page_cells);
    std::vector<kvq_pack_page> pages;
    int cell = 0;
    for (int n : runs) {
        const int first = (int) pages.size();
        for (int i = 0; i < n; i++) {
            pages.push_back({ nullptr, nullptr, nullptr, cell, first, n, sorted != (n == 4) });
            cell += page * uniform(1, 3);
        }
    }
    std::vector<uint8_t> present(pages.size() * n_head * nb_bits), stale(pages.size() * nb_bits);
    std::vector<float> sums(pages.size() * (n_map + page)); // sums of the heads, then how many rows saw the cells
    const int away = uniform(0, 20);
    for (auto & b : present) { b = (uint8_t) (rng() | rng() | rng()); }
    for (auto & b : stale) { b = (uint8_t) (rng() & rng() & rng()); }
    for (auto & x : sums) { x = uniform(0, 3) ? expf(3.0f * normal()) : (float) uniform(-1, 1); }
    for (size_t i = 0; i < pages.size(); i++) {
        for (int t = 0; t < page; t++) {
            const int n = uniform(0, 9);
            memcpy(&sums[i * (n_map + page) + n_map + t], &n, 4);
        }
        if ((int) i % 7 == away) { std::fill_n(&present[i * n_head * nb_bits], n_head * nb_bits, (uint8_t) 0); }
    }
    device_bytes there(d, 4 * sums.size(), sums.data());
    for (size_t i = 0; i < pages.size(); i++) {
        pages[i].sums = i % 5 == 3 ? nullptr : (const float *) there.p + i * (n_map + page);
        pages[i].stale = &stale[i * nb_bits];
        pages[i].present = &present[i * n_head * nb_bits];
    }
    kvq_packed out;
    d.pack(l, normalise, pages.data(), (int) pages.size(), out);
    CHECK(d.error().empty(), "%s", d.error().c_str());
    std::vector<int32_t> maps(out.maps.size());
    std::vector<float> scores(out.maps.size());
    d.get(maps.data(), out.maps_there, 4 * maps.size());
    d.get(scores.data(), out.scores_there, 4 * scores.size());
    CHECK(maps == out.maps, "maps there differ from those that came back");
    for (size_t first = 0; first < pages.size(); first += (size_t) pages[first].n) {
        for (int h = 0; h < n_head; h++) {
            std::vector<std::pair<float, int32_t>> cells; // of the run
            for (size_t i = first; i < first + (size_t) pages[first].n; i++) {
                for (int t = 0; t < page; t++) {
                    const float * of = &sums[i * (n_map + page)];
                    int seen;
                    memcpy(&seen, of + n_map + t, 4);
                    const bool known = pages[i].sums && !(pages[i].stale[t / 8] >> t % 8 & 1);
                    const float score =
                        known ? of[(size_t) h * page + t] / (normalise ? (float) std::max(seen, 1) : 1.0f) : 0.0f;
                    if (pages[i].present[h * nb_bits + t / 8] >> t % 8 & 1) {
                        cells.emplace_back(score, pages[i].cell + t);
                    }
                }
            }
            if (pages[first].sorted) {
                std::stable_sort(
                    cells.begin(), cells.end(), [](const auto & a, const auto & b) { return a.first > b.first; });
            }
            for (size_t at = 0; at < (size_t) pages[first].n; at++) {
                const auto begin = cells.begin() + (long) std::min(at * page, cells.size()),
                           end = cells.begin() + (long) std::min((at + 1) * page, cells.size());
                std::sort(begin, end, [](const auto & a, const auto & b) { return a.second < b.second; });
                float sum = 0.0f;
                for (int t = 0; t < page; t++) {
                    const size_t slot = ((first + at) * n_head + h) * page + t;
                    const bool here = begin + t < end;
                    CHECK(maps[slot] == (here ? begin[t].second : -1), "page %zu head %d slot %d holds cell %d, not %d",
                        first + at, h, t, maps[slot], here ? begin[t].second : -1);
                    CHECK(scores[slot] == (here ? begin[t].first : -1.0f), "page %zu head %d slot %d has score %g",
                        first + at, h, t, scores[slot]);
                    sum += here ? begin[t].first : 0.0f;
                }
                CHECK(out.sums[(first + at) * n_head + h] == sum, "page %zu head %d: sum %g, not %g", first + at, h,
                    out.sums[(first + at) * n_head + h], sum);
            }
        }
    }
    return (int) pages.size() * n_head;
}

#include "cuda_policies_attention.h"
#include "cuda_policies_bench.h"
#include "cuda_kept.h"

int main(int argc, char ** argv) {
    kvq_cuda_device d(0);
    CHECK(d.error().empty(), "%s", d.error().c_str());
    rng.seed(1);
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        bench(d, argc > 2 && !strcmp(argv[2], "decode"), argc > 2 && !strcmp(argv[2], "prompt"));
        return 0;
    }
    const bool decode = argc > 1 && !strcmp(argv[1], "decode"), on_host = argc > 1 && !strcmp(argv[argc - 1], "host"),
               quick = (on_host && argc == 2) || (argc > 1 && !strcmp(argv[1], "quick"));
    take_turns = on_host;
    int n = 0, n_short[2] = {}; // of pages of two widths, of one
    worst top;
    const auto attention = [&](attention_case c) {
        for (const bool on : { true, false }) { // with and without kernels for short caches
            if (!on && !quick && n % 4 && strcmp(c.method, "minikv")) { continue; }
            d.allow_short = on;
            const int64_t before = d.n_short;
            check_attention(d, c, top);
            CHECK(on || d.n_short == before, "%s", "a kernel for short caches ran");
            n_short[!strcmp(c.method, "minikv")] += d.n_short > before;
            n++;
        }
        d.allow_short = true;
    };
    // decode over pages of two widths: whole and half steps, one part alone, sets that differ
    attention({ "zipcache", "", 128, 1, 4, 1, 400, 1, 0, 0, false });
    attention({ "zipcache", "scales=u8,place=host", 64, 2, 3, 1, 400, 2, 0, 8.0f, true });
    attention({ "zipcache", "interval=96,salient=0.33,hi=3,lo=1,scales=f16,window=40", 64, 1, 16, 2, 300, 1, 20.0f, 0,
        false });
    for (int torn : { 1, 2, 3 }) { attention({ "zipcache", "", 64, 2, 4, 1, 350, 1, 0, 0, false, torn }); }
    attention({ "minikv", "window=32,place=host", 64, 1, 2, 1, 200, 1, 0, 0, false }); // few cells, few blocks
    attention({ "minikv", "scales=f16,window=32", 128, 1, 1, 1, 250, 1, 0, 8.0f, true });
    // several tokens of one cache: blocks of rows walk the pages that they see (cuda/walk/seen.cuh)
    const int64_t n_listed = d.n_listed;
    d.allow_lists = 2;
    attention({ "zipcache", "", 128, 1, 4, 5, 2300, 1, 0, 0, true });
    d.allow_lists = 1;
    CHECK(d.n_listed > n_listed, "pages were not listed");
    for (int D : { 80, 192, 256, 512 }) { // by slices
        attention({ "zipcache",
            D == 80        ? "scales=u8"
                : D == 192 ? "interval=96,salient=0.33,hi=3,lo=1,scales=f16,window=40"
                           : "",
            D, 1, D == 256 ? 6 : 3, 1, 350, 1, 0, 0, D == 80 });
        if (!quick || D == 192) { attention({ "zipcache", "", D, 2, 4, 1, 350, 1, 0, 0, false, 1 + D / 64 % 3 }); }
        if (!quick || D == 512) {
            attention({ "minikv", D == 256 ? "scales=f16,window=32" : "window=32", D, 2, 6, 1, 400, 1, 0, 0, false });
        }
    }
    attention({ "minikv", "window=32", 512, 2, 4, 40, 500, 1, 0, 0, false }); // two warps share rows
    attention({ "minikv", "window=32", 512, 1, 3, 30, 300, 2, 20.0f, 8.0f, true });
    attention({ "minikv", "window=32", 400, 1, 5, 20, 300, 1, 0, 0, false });
    if (!quick) {
        const char * formats[] = { "", "scales=u8", "scales=f16", "interval=32,salient=0", "interval=32,salient=1",
            "interval=64,salient=0.5", "interval=64,salient=1,hi=1", "interval=128,salient=0,lo=4",
            "interval=256,salient=0.25,hi=4,lo=1", "interval=96,salient=0.33,hi=3,lo=1,window=100",
            "interval=224,salient=0.42,hi=2,lo=3,scales=f16", "interval=160,salient=0.2,hi=3,lo=2,scales=u8",
            "keep=0.5", "keep=0.6,interval=64,salient=0.5,hi=3,lo=1" };
        for (int D : { 64, 128, 96, 256, 512 }) {
            for (const char * opts : formats) {
                for (int gqa : { 1, 2, 3, 4, 5, 7, 8, 12, 16 }) {
                    const int n_q = gqa % 3 ? 1 : 2;
                    attention({ "zipcache", opts, D, 2, gqa, n_q, 600 + 37 * gqa, 1 + gqa % 3, gqa == 5 ? 20.0f : 0.0f,
                        gqa == 7 ? 8.0f : 0.0f, gqa % 2 == 0 });
                }
            }
            for (int torn : { 1, 2, 3 }) {
                for (const char * opts : { "", "scales=f16", "interval=96,salient=0.33,hi=3,lo=1" }) {
                    attention({ "zipcache", opts, D, 2, 4, 1 + torn % 2, 700, torn, 0, 0, false, torn });
                }
            }
            // one block, many
            for (int n_past : { 3, 40, 159, 160, 161, 5000 }) {
                attention({ "zipcache", "", D, 8, 4, 1, std::max(n_past, 1), 1, 0, 0, false });
            }
            attention({ "zipcache", "", D, 1, 1, 32, 500, 1, 0, 0, false });
            // cells by way of maps
            for (const char * opts : { "", "scales=f16,window=32", "group=32,bits=4,window=64", "bits=3,window=0" }) {
                for (int gqa : { 1, 4, 8 }) {
                    attention(
                        { "minikv", opts, D, 2, gqa, gqa == 1 ? 2 : 1, 900 + 50 * gqa, 1 + gqa % 3, 0, 0, gqa == 4 });
                }
            }
        }
    }
    CHECK(d.n_short > 0, "the kernel for short caches did not run");
    printf("decode: %d cases, %d of short caches, worst relative error %.2g\n", n, (int) d.n_short, top.out);
    if (decode) { return 0; }
    n = 0;
    for (const char * opts : { "", "interval=64,salient=0.5,scales=f16", "interval=32,salient=1,hi=3,scales=u8",
             "interval=256,salient=0.25,hi=4,lo=1,eta=0.1", "interval=96,salient=0,lo=3" }) {
        for (int D : { 64, 80, 128, 192, 256, 512 }) {
            if (!quick || D == 80 || D == 512) { n += check_blocks(d, opts, D); }
        }
    }
    printf("mixed pages: %d identical to the C reference\n", n);
    n = 0;
    for (int page : { 32, 160, 256 }) {
        for (const auto & runs : std::vector<std::vector<int>>{ { 1 }, { 9, 4, 4, 1 }, { 3 } }) {
            for (const bool sorted : { true, false }) {
                n += check_pack(d, page, 3, runs, sorted != (page == 160), sorted);
            }
        }
    }
    if (!quick) { n += check_pack(d, 128, 8, { 250, 4, 4 }, true, true); }
    printf("cells sorted into pages: %d heads of pages as by a plain sort\n", n);
    for (const char * opts : { "", "hh=0.1,rw=0.1,window=64", "scales=f16,group=32,sinks=4,window=0" }) {
        const int steps = on_host ? 25 : quick ? 40 : 1000, n_rows = check_stores(d, "minikv", opts, steps);
        printf("store, minikv %s: %d random operations, %d rows as on the CPU\n", opts, steps, n_rows);
    }
    for (const char * opts : { "interval=64,salient=0.5,keep=0.5,eta=0.1", "interval=32,salient=0.5",
             "interval=64,salient=0.5,normalise=false,window=64", "interval=96,salient=0.33,scales=f16,sinks=4",
             "interval=32,salient=1,hi=2,place=host" }) {
        const int steps = on_host ? 25 : quick ? 40 : 1000, n_rows = check_stores(d, "zipcache", opts, steps);
        printf("store, zipcache %s: %d random operations, %d rows as on the CPU\n", opts, steps, n_rows);
    }
    check_kept(d, on_host ? 100 : quick ? 200 : 2000);
    n = 0;
    attention({ "zipcache", "interval=32,salient=0.5,probe=0.5", 80, 2, 2, 3, 200, 2, 0, 0, false });
    attention({ "zipcache", "interval=64,salient=0.5,normalise=false,window=64", 64, 1, 4, 40, 300, 1, 0, 0, true });
    attention({ "minikv", "window=32", 64, 2, 4, 1, 400, 2, 0, 0, false });
    attention({ "minikv", "window=64", 128, 1, 2, 40, 300, 1, 0, 0, true });
    attention({ "zipcache", "interval=32,salient=1,keep=0.5", 80, 2, 2, 3, 300, 1, 0, 0, false });
    // prompts: heads have their own cells, blocks begin within a token
    attention({ "minikv", "", 128, 2, 3, 50, 700, 1, 0, 0, true });
    attention({ "zipcache", "interval=32,salient=0.5,keep=0.5", 80, 1, 2, 35, 200, 2, 20.0f, 8.0f, false });
    if (!quick) {
        for (int D : { 64, 80, 128 }) {
            for (int gqa : { 1, 4, 5 }) {
                for (int n_q : { 1, 2, 33, 200 }) {
                    attention({ "minikv", "", D, 2, gqa, n_q, 900, 1, 0, 0, n_q == 2 });
                    attention({ "minikv", "bits=3,group=32,window=64,hh=0.1,rw=0.1", D, 2, gqa, n_q, 700, 2, 20.0f,
                        n_q == 33 ? 8.0f : 0.0f, false });
                    attention({ "zipcache", "interval=64,salient=0.5,keep=0.5,normalise=false", D, 2, gqa, n_q, 500, 1,
                        0, 0, true });
                }
            }
        }
        attention({ "minikv", "", 128, 8, 4, 1, 4000, 1, 0, 0, false });
        for (int gqa : { 1, 6 }) { attention({ "minikv", "", 256, 1, gqa, 65, 600, 1, 0, 0, gqa == 1 }); }
        for (int D : { 64, 80, 96, 128, 512 }) {
            for (int gqa : { 1, 3, 4, 8 }) { // prompts
                attention({ "minikv", "", D, 1, gqa, 65, 600, 1 + (gqa == 3), gqa == 8 ? 20.0f : 0.0f,
                    gqa == 4 ? 8.0f : 0.0f, gqa != 4 });
                if (gqa == 3) {
                    attention({ "minikv", "scales=f16,group=32,window=0", D, 1, gqa, 129, 900, 1, 0, 0, false });
                }
            }
        }
        attention({ "minikv", "", 128, 1, 4, 512, 1500, 1, 0, 0, false });
        for (int D : { 64, 80, 96, 128, 192, 256 }) {
            for (int gqa : { 1, 4, 5 }) {
                attention({ "zipcache", "", D, 2, gqa, 100, 700, 1, 0, 0, false });
                attention({ "zipcache", "interval=96,salient=0.33,hi=3,lo=1,window=100,normalise=false", D, 2, gqa, 33,
                    500, 1, 20.0f, 0, true });
                attention(
                    { "zipcache", "interval=32,salient=0.5,probe=1,scales=f16", D, 1, gqa, 5, 300, 3, 0, 8.0f, false });
            }
        }
        attention({ "zipcache", "", 128, 8, 4, 512, 2000, 1, 0, 0, false });
    }
    // cards with less shared memory a block take the long kernel where the short one does not fit
    const bool small = getenv("KVQ_CUDA_AS");
    CHECK(n_short[0] > (small ? 2 : 5) && n_short[1] > (small ? 0 : 1), "only %d and %d cases of short caches",
        n_short[0], n_short[1]);
    printf("attention: %d cases, %d of short caches, worst relative error %.2g, of a column sum %.2g\n", n,
        n_short[0] + n_short[1], top.out, top.sums);
    return 0;
}

// Split keys (types/lattice.h): sealing and decoding against the C reference, attention and attention that fetches
// against f64. Part of test_cuda.cpp.
#pragma once

#include "cuda_attention.h"
#include "cuda_far.h"

static int check_split_codecs(kvq_cuda_device & d, bool quick) {
    int n = 0;
    for (int split : { KVQ_SPLIT_NORM, KVQ_SPLIT_NEOX }) {
        for (int D : { 16, 64, 80, 96, 128, 192, 256, 512 }) {
            for (int bits = 1; bits <= 4; bits++) {
                for (int fast = 0; fast <= 4; fast++) {
                    const int scale = (bits + fast + D / 16) % 3, cells = (bits + fast / 2) % 2 ? 96 : 32;
                    if (quick && (bits * 5 + fast + D / 16 + split) % (D > 128 ? 29 : 11)) { continue; }
                    kvq_codec c = make_codec(KVQ_ROLE_K, bits, 2, scale, 0, 0.0f, cells, D);
                    c.split = split;
                    c.fast_bits = fast;
                    CHECK(!kvq_traits(c.type)->refuse(c), "split %d, bits %d/%d, D %d: refused", split, fast, bits, D);
                    n += check_codec(d, c);
                }
            }
        }
    }
    return n;
}

static void check_split(kvq_cuda_device & d, bool quick) {
    const int n_sealed = check_split_codecs(d, quick);
    double worst = 0;
    int n = 0, n_rows = 0, n_checked = 0;
    int64_t n_short = 0;
    const auto attention = [&](attention_case c, bool direct) { // direct: pages are read as they are
        const int64_t before = d.n_means, before_short = d.n_short;
        worst = std::max(worst, check_attention(d, c));
        CHECK((d.n_means > before) == direct || getenv("KVQ_CUDA_AS"),
            "split %d, bits %d/%d/%d D %d turns %d: pages were read %s", c.split, c.fast, c.kb, c.vb, c.D, c.turns,
            direct ? "as rows" : "as they are");
        n_short += d.n_short - before_short;
        n++;
        n_rows += !direct;
    };
    const auto far = [&](attention_case c, int top, int format) { // some rows' picks hang on rounding: several tokens
        c.n_q = 3;
        c.n_kv_heads = 2;
        const int before = n_checked;
        worst = std::max(worst, check_far(d, { c, top, format }, n_checked));
        CHECK(n_checked > before || getenv("KVQ_CUDA_AS"), "heads of %d: all picks hang on rounding", c.D);
    };
    const struct {
        int fast, slow, v;
    } triples[] = {
#define KVQ_TRIPLE(F, K, V) { F, K, V },
        KVQ_TEST_SPLIT_BITS(KVQ_TRIPLE)
#undef KVQ_TRIPLE
    };
    for (int D : { 64, 80, 96, 128, 256 }) {
        for (int i = 0; i < (int) (sizeof(triples) / sizeof(*triples)); i++) {
            for (int split : { KVQ_SPLIT_NORM, KVQ_SPLIT_NEOX }) {
                const int x = i + D / 16 + split;
                if (quick && x % (D == 64 || D == 128 ? 5 : 10)) { continue; }
                attention_case c = { triples[i].slow, triples[i].v, 2, x / 2 % 3, D, 1 + i % 2, 1 + i * 3 % 8, 1, 500,
                    1 + i % 2, i == 1 ? 20.0f : 0.0f, i == 4 ? 8.0f : 0.0f, i == 2, false };
                c.split = split;
                c.fast = triples[i].fast;
                c.turns = i % 2 ? 3 : 1;
                c.n_dims = i % 3 ? 0 : D / 2;
                c.neox = split == KVQ_SPLIT_NEOX;
                c.sorted = split == KVQ_SPLIT_NORM && i > 1;
                c.stayed = true;
                c.torn = i == 3;
                c.head_masks = i == 5;
                if (D == 512 && getenv("KVQ_CUDA_AS")) { continue; }
                for (const bool on : { true, false }) {
                    d.allow_short = on;
                    if (!quick || !on || x % 4 == 0) { attention(c, true); }
                }
                d.allow_short = true;
                if (!quick || x % 20 == 0) { far(c, 20, x % 3); }
                if (quick && x % 3) { continue; }
                c.stayed = false;
                c.turns = 2; // some have moved
                attention(c, false);
                c.turns = 0; // kept as they came
                c.n_q = 20;
                attention(c, false);
                if (quick) { continue; }
                c.n_q = 90;
                c.turns = 1;
                attention(c, false);
                c.turns = 3; // several tokens; a long cache
                c.stayed = true;
                c.n_q = 3;
                attention(c, true);
                c.n_q = 1;
                c.n_cells = 5000 + 64 * i;
                c.n_stream = 3;
                attention(c, true);
            }
        }
    }
    for (const auto & x : { std::make_pair(3, 2), { 4, 3 }, { 1, 4 }, { 2, 2 } }) { // formats without a kernel
        attention_case c = { x.first, 2, 2, 1, quick ? 80 : 128, 1, 4, 1, 200, 1, 0, 0, false, false };
        c.split = 1 + x.second % 2;
        c.neox = x.second % 2;
        c.fast = x.second;
        c.turns = 1;
        c.stayed = true;
        attention(c, false);
    }
    CHECK(n_short || getenv("KVQ_CUDA_AS"), "%s", "the kernel for short caches did not run");
    CHECK(d.error().empty(), "%s", d.error().c_str());
    printf("split keys: %d pages of 2 heads identical to the C reference, attention: %d cases, %d as rows, %d of short "
           "caches, %d rows that fetch, worst relative error %.2g\n",
        n_sealed, n, n_rows, (int) n_short, n_checked, worst);
}

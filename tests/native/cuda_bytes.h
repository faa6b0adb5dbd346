// Decode attention in 8-bit products (cuda/walk/attend_bytes.cuh) against f64. Part of test_cuda.cpp.
#pragma once

#include "cuda_attention.h"

// Split keys, and lattices of other bits than 2: cuda/walk/decode_bytes_tables.cuh.
template <typename F> static void tables_in_bytes(bool quick, F && attention) {
    const struct {
        int fast, slow, v;
    } formats[] = {
#define KVQ_TRIPLE(F, K, V) { F, K, V },
        KVQ_TEST_SORTED(KVQ_TRIPLE, KVQ_TEST_VALUES)
#undef KVQ_TRIPLE
            { 0, 2, 1 },
        { 0, 3, 2 }, { 0, 3, 3 }, { 0, 4, 4 } // not split
    };
    const int n = sizeof(formats) / sizeof(*formats);
    for (const int D : { 64, 128 }) {
        for (int i = 0; i < 4 * n; i++) {
            const auto & f = formats[i % n];
            const int gqa = 1 + i / 2 % 4, page = i / n == 3 ? 256 : 32 << i / n;
            if (quick && (i + D / 64) % 5) { continue; }
            attention_case c = { f.slow, f.v, 2, (i + i / n) % 3, D, 2, gqa, i % 3 ? 1 : 4 / gqa, 700 + 97 * (i % n),
                1 + i % 2, i % 5 == 1 ? 20.0f : 0.0f, i % 7 == 3 ? 8.0f : 0.0f, i % 4 == 2, false };
            c.split = f.fast ? KVQ_SPLIT_NORM : 0;
            c.fast = f.fast;
            if (f.fast || i / n % 2) { // pages lack their means
                c.turns = i % 2 ? 3 : 1;
                c.n_dims = i % 3 ? 0 : D / 2;
                c.neox = i / 3 % 2;
                c.sorted = i % 4 != 3;
                c.stayed = true;
            }
            attention(c, i % 3 == 1, i % 6 == 1, page);
            if (i / 2 % 2) { continue; }
            c.gqa = 5 + (i + i / n) % 4; // more than 4 rows, up to 24
            c.n_q = 1 + i / 4 % 3;
            attention(c, i % 3 == 2, i % 6 == 2, page);
        }
    }
}

static void bytes_attention(kvq_cuda_device & d, bool quick) {
    double worst = 0;
    int n = 0;
    d.allow_short = false; // another kernel
    const auto attention = [&](attention_case c, bool torn, bool head_masks, int page = 0) {
        c.torn = torn;
        c.head_masks = head_masks;
        c.page = page;
        const int64_t before = d.n_fine;
        worst = std::max(worst, check_attention(d, c));
        const bool may_lack_room = c.D == 512 && getenv("KVQ_CUDA_AS"); // then the kernel that multiplies in f16 runs
        // turned keys: tables come to the device in a call of their own
        CHECK(d.n_fine == before + (c.turns ? 2 : 1) || (may_lack_room && d.n_fine == before),
            "bits %d/%d group %d D %d turns %d gqa %d page %d: %d, not once", c.kb, c.vb, c.group, c.D, c.turns, c.gqa,
            page, (int) (d.n_fine - before));
        n++;
    };
    for (const int D : { 64, 128 }) {
        for (const auto & bits : { std::make_pair(1, 1), { 2, 1 }, { 2, 2 }, { 3, 2 }, { 3, 3 }, { 4, 2 }, { 4, 4 } }) {
            const int x = 5 * bits.first + bits.second;
            if (quick && (x + D / 64) % 3) { continue; }
            for (const int group : { 64, 128 }) {
                attention(
                    { bits.first, bits.second, group, x % 2, D, 1, 4, 1, 700 + 90 * x, 1, 0, 0, x % 3 == 0, false },
                    x % 2, x % 4 == 1);
            }
        }
        for (const int scale : { 0, 1 }) {
            for (const int gqa : { 1, 2, 3, 4 }) { // and several tokens
                if (quick && (gqa + scale + D / 64) % 4) { continue; }
                const float softcap = gqa == 3 ? 20.0f : 0.0f, alibi = gqa % 3 == 1 ? 8.0f : 0.0f;
                attention({ 2, 2, 64 << scale, scale, D, 2, gqa, 4 / gqa, 1300 + 61 * gqa, 1 + gqa, softcap, alibi,
                              gqa % 2 == 0, false },
                    gqa % 2, gqa == 3, 256);
                attention({ 2, 2, 128, scale, D, 2, gqa, 1, 3000 + 91 * gqa, 2, softcap, alibi, gqa == 3, true },
                    gqa % 2 == 0, gqa == 2);
            }
            for (const int cells : { 1, 63, 129, 250, 9000 }) {
                if (quick && cells != 129) { continue; }
                attention({ 2, 2, 128, scale, D, cells == 9000 ? 1 : 2, 4, 1, cells + 20, 1, 0, 0, false, false },
                    cells == 250, false);
            }
        }
    }
    for (const int D : { 64, 128 }) { // lattices of 2 bits, with means and without, pages of 32 cells and more
        for (const int page : { 32, 64, 256 }) {
            for (const int gqa : { 1, 2, 3, 4 }) {
                if (quick && (gqa + page / 32 + D / 64) % 4) { continue; }
                const float softcap = gqa == 3 ? 20.0f : 0.0f, alibi = gqa % 3 == 1 ? 8.0f : 0.0f;
                attention({ 2, 2, 2, gqa % 3, D, 2, gqa, 4 / gqa, 700 + 161 * gqa, 1 + gqa, softcap, alibi, gqa == 2,
                              page == 64 },
                    page == 32 || gqa == 1, gqa == 3, page);
                attention_case c = { 2, 2, 2, (gqa + 1) % 3, D, 2, gqa, 1, 1500 + 91 * gqa, 1 + gqa % 2, softcap, 0,
                    gqa == 4, false };
                c.turns = gqa % 2 ? 3 : 1;
                c.n_dims = gqa % 3 ? 0 : D / 2;
                c.neox = gqa / 2 % 2;
                c.stayed = true;
                attention(c, gqa % 2, gqa == 2, page);
            }
        }
        for (const int cells : { 1, 31, 65, 250, 9000 }) {
            if (quick && cells != 65) { continue; }
            attention({ 2, 2, 2, 1, D, 2, 4, 1, cells + 20, 1, 0, 0, false, false }, false, false);
        }
    }
    tables_in_bytes(quick, attention);
    for (const int D : { 80, 96, 144, 192, 208, 256, 512 }) { // heads in slices
        for (const int gqa : { 1, 2, 3, 4 }) {
            const int x = gqa + D / 16, n_q = 4 / gqa, page = gqa % 2 ? 256 : 0;
            if (quick && x % 3) { continue; }
            const float softcap = gqa == 3 ? 20.0f : 0.0f, alibi = gqa == 2 ? 8.0f : 0.0f;
            const std::pair<int, int> bits[] = { { 1, 1 }, { 2, 1 }, { 2, 2 }, { 4, 2 }, { 4, 4 } };
            for (int i = 0; i < 5; i++) {
                if ((i + x) % 2) { continue; }
                attention({ bits[i].first, bits[i].second, 64 << (x + i) / 2 % 3, x / 2 % 2, D, 2, gqa, n_q,
                              500 + 161 * gqa, 1 + gqa % 2, softcap, alibi, gqa == 4, i == 2 },
                    gqa % 3 == 0, x % 4 == 1, page);
            }
            attention({ 2, 2, 2, x / 2 % 2, D, 2, gqa, n_q, 500 + 121 * gqa, 1 + gqa % 2, softcap, alibi, gqa == 4,
                          gqa == 2 },
                gqa % 3 == 1, x % 4 == 1, gqa % 2 ? 32 : 256);
            attention_case c = { 2, 2, 2, (x + 1) / 2 % 2, D, 2, gqa, n_q, 500 + 91 * gqa, 1, softcap, 0, gqa == 4,
                false };
            c.turns = gqa % 2 ? 3 : 1;
            c.n_dims = gqa % 3 ? 0 : D / 2;
            c.neox = gqa / 2 % 2;
            c.stayed = true;
            if (D <= 256 || !getenv("KVQ_CUDA_AS")) { // else there is no room for the table
                attention(c, gqa % 3 == 2, false, gqa % 4 ? 64 : 256);
            }
        }
        for (const int group : { 2, 128 }) {
            for (const int cells : { 1, 33, 129, 9000 }) {
                if (quick && cells > 33) { continue; }
                attention({ 2, 2, group, group == 2, D, 2, 4, 1, cells + 20, 1, 0, 0, false, false }, false, false);
            }
        }
    }
    const double of_two = worst;
    worst = 0;
    for (const int D : { 64, 128, 80, 192, 256, 512 }) { // more than 4 rows
        for (const int rows : { 5, 6, 7, 8, 12, 16, 24, 32 }) {
            const int x = rows + D / 16;
            if (quick && x % 4) { continue; }
            const int n_q = rows % 3 ? rows % 4 ? 1 : rows / 4 : rows / 3, gqa = rows / n_q;
            const float softcap = rows == 6 ? 20.0f : 0.0f, alibi = rows == 7 ? 8.0f : 0.0f;
            const std::pair<int, int> bits[] = { { 1, 1 }, { 2, 1 }, { 2, 2 }, { 4, 4 } };
            const auto & b = bits[(x + rows / 4) % 4];
            attention({ b.first, b.second, 64 << x / 2 % 2, x % 2, D, 2, gqa, n_q, 500 + 61 * rows, 1 + rows % 2,
                          softcap, alibi, rows % 3 == 0, rows % 4 == 1 },
                rows % 2, rows == 8, x % 2 ? 256 : 0);
            attention({ 2, 2, 2, x % 2, D, 2, gqa, n_q, 700 + 61 * rows, 1 + rows % 2, softcap, alibi, rows % 3 == 1,
                          rows % 4 == 2 },
                rows % 3 == 0, rows == 7, rows % 2 ? 32 : 256);
            attention_case c = { 2, 2, 2, (x + 1) % 2, D, 2, gqa, n_q, 500 + 91 * rows, 1, softcap, 0, rows % 2 == 0,
                false };
            c.turns = gqa % 2 ? 3 : 1;
            c.n_dims = gqa % 3 ? 0 : D / 2;
            c.neox = rows % 2;
            c.stayed = true;
            if (D <= 256 || !getenv("KVQ_CUDA_AS")) { // else there is no room for the table
                attention(c, rows % 3 == 2, false, rows % 4 ? 64 : 256);
            }
        }
        for (const int group : { 2, 128 }) {
            for (const int cells : { 1, 33, 129, 9000 }) {
                if (quick && cells > 33) { continue; }
                attention({ 2, 2, group, group == 2, D, 2, 8, 1, cells + 20, 1, 0, 0, false, false }, false, false);
            }
        }
    }
    printf("more than 4 rows: worst relative error %.2g\n", worst);
    worst = of_two;
    for (const int group : { 2, 128 }) { // one cell far above many, which together count as much
        for (const int cells : { 2000, 9000 }) {
            if (quick && cells == 9000) { continue; }
            const int gqa = cells == 9000 ? 4 : 8;
            attention_case c = { 2, 2, group, group == 2, 64, 2, gqa, 1, cells, 1, 0, 0, false, false };
            c.low = -logf((float) cells) - 1.0f;
            attention(c, false, false);
        }
    }
    // scales of one head begin at multiples of two bytes: the kernel that multiplies in f16 reads them
    const int64_t before = d.n_fine;
    worst = std::max(worst, check_attention(d, { 2, 2, 2, 1, 128, 1, 4, 1, 500, 1, 0, 0, false, false }));
    CHECK(d.n_fine == before, "words of scales would begin between two others");
    d.allow_short = true;
    printf("attention, 8-bit products: %d cases, worst relative error %.2g\n", n, worst);
}

// Open cells at the ends of long caches are parts of their own (cuda/walk/decode_open.cuh), in every kernel that has
// them: where there are 8 blocks or more of a row.
static void open_ends(kvq_cuda_device & d, bool quick) {
    double worst = 0;
    int n = 0, n_opens = 0;
    d.allow_short = false;
    for (const int D : { 64, 128, 80, 256, 512 }) {
        const bool slices = D != 64 && D != 128;
        const int teams = D == 80 ? 12 : D == 256 ? 6 : D == 512 ? 3 : 4;
        for (const int rows : { 4, 8, 12 }) {
            const int gqa = rows == 12 ? 6 : rows, n_q = rows / gqa;
            struct {
                int kb, vb, group, page, turns;
            } formats[] = { { 2, 2, 128, 0, 0 }, { 2, 2, 2, 32, 0 }, { 2, 2, 2, 64, 3 }, { 2, 1, 32, 0, 0 },
                { 4, 4, 2, 32, 1 } };
            int i = 0;
            for (const auto & f : formats) {
                const bool others = f.kb == 4 || f.group == 32; // only in slices, those of 32 with many rows
                if ((others && !slices) || (f.group == 32 && rows < 8) ||
                    (D == 512 && f.turns && getenv("KVQ_CUDA_AS")) || (quick && (D / 16 + rows / 4 + i++) % 4)) {
                    continue;
                }
                for (const int open : { 0, 1, 3 }) { // 0: at random
                    attention_case c = { f.kb, f.vb, f.group, 0, D, 1, gqa, n_q, 64 * 8 * teams + 61 * rows,
                        rows == 8 && !quick ? 2 : 1, rows == 12 ? 20.0f : 0.0f, open == 3 ? 8.0f : 0.0f, rows == 8,
                        open == 0 };
                    c.page = f.page;
                    c.turns = f.turns;
                    c.stayed = true;
                    c.open = open;
                    const int64_t before = d.n_opens;
                    worst = std::max(worst, check_attention(d, c));
                    n_opens += d.n_opens > before;
                    n++;
                }
            }
        }
    }
    d.allow_short = true;
    CHECK(2 * n_opens > n, "%d of %d cases had parts of open cells", n_opens, n);
    printf("attention, open cells at the ends: %d cases, %d with parts of their own, worst relative error %.2g\n", n,
        n_opens, worst);
}

// Which slots of a page a query token sees.
#pragma once

#include "ggml-kvq.h"

#include <algorithm>
#include <cstring>

constexpr uint16_t KVQ_F16_NEG_INF = 0xfc00;

// Leading cells that a query token sees without a bias, of a row of its mask.
static inline int clear_cells(const uint16_t * row, int n) {
    int i = 0;
    for (; i + 32 <= n; i += 32) {
        uint64_t x[8];
        memcpy(x, row + i, sizeof(x));
        if (x[0] | x[1] | x[2] | x[3] | x[4] | x[5] | x[6] | x[7]) { break; }
    }
    while (i < n && !row[i]) { i++; }
    return i;
}

// The last cell in [from, n) that a query token sees, from - 1: it sees no cell. row: of its mask.
static inline int last_seen_cell(const uint16_t * row, int from, int n) {
    constexpr uint64_t hidden = KVQ_F16_NEG_INF * 0x0001000100010001ull;
    for (; n - 32 >= from; n -= 32) {
        uint64_t x[8], seen = 0;
        memcpy(x, row + n - 32, sizeof(x));
        for (uint64_t y : x) { seen |= y ^ hidden; }
        if (seen) { break; }
    }
    while (n > from && row[n - 1] == KVQ_F16_NEG_INF) { n--; }
    return n - 1;
}

// Pages with maps all of whose cells every query token sees, or pages without: the heads share their masks.
static inline bool masks_are_shared(const kvq_attn & p) {
    int clear = p.n_kv;
    for (int iq = 0; p.mask && iq < p.n_q; iq++) {
        clear = std::min(clear, clear_cells(p.mask + iq * p.mask_stride_token, p.n_kv));
    }
    for (int j = 0; j < p.n_pages; j++) {
        const kvq_page & page = p.pages[j];
        if (page.n_slots && page.map && !(page.cell < 0 && -page.cell <= clear)) { return false; }
    }
    return true;
}

// Mask of the page's slots for one query token: false when every slot is masked out. *use is NULL when no slot is.
// clear: as above, for pages with maps.
static inline bool page_mask(const kvq_attn & p, const kvq_page & page, int kvh, const uint16_t * row, int clear,
    uint16_t * out, const uint16_t ** use) {
    const int n = page.n_slots;
    const int32_t * map = page.map ? page.map + kvh * p.map_stride : nullptr;
    if (map && page.cell < 0 && -page.cell <= clear) { // every slot is seen
        *use = nullptr;
        return true;
    }
    if (!page.map && page.cell + n <= p.n_kv) {
        *use = nullptr;
        if (!row) { return true; }
        constexpr uint64_t hidden = KVQ_F16_NEG_INF * 0x0001000100010001ull;
        uint64_t any = 0, seen = 0;
        for (int i = 0; i < n; i += 4) {
            uint64_t x;
            memcpy(&x, row + page.cell + i, 8);
            any |= x;
            seen |= x ^ hidden;
        }
        *use = any ? row + page.cell : nullptr;
        return seen;
    }
    bool any = false;
    for (int i = 0; i < n; i++) {
        const int cell = map ? map[i] : page.cell + i;
        out[i] = cell < 0 || cell >= p.n_kv ? KVQ_F16_NEG_INF : row ? row[cell] : 0;
        any |= out[i] != KVQ_F16_NEG_INF;
    }
    *use = out;
    return any;
}

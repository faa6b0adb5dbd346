// Part of attend.cpp.
// Mask of the page's slots for one query token: false when every slot is masked out. *use is NULL when none is. clear: as above, for pages with maps.
bool page_mask(const kvq_attn & p, const kvq_page & page, int kvh, const uint16_t * row, int clear, uint16_t * out, const uint16_t ** use) {
    const int n = page.n_slots;
    const int32_t * map = page.map ? page.map + kvh * p.map_stride : nullptr;
    if (map) { // gathered only when there is something to hide
        int lo = map[0], hi = map[0];
        for (int i = 0; i < n; i++) {
            lo = std::min(lo, (int) map[i]);
            hi = std::max(hi, (int) map[i]);
        }
        if (lo >= 0 && hi < clear) {
            *use = nullptr;
            return true;
        }
    }
    if (!page.map && page.cell + n <= p.n_kv) {
        *use = nullptr;
        if (!row) {
            return true;
        }
        constexpr uint64_t hidden = F16_NEG_INF * 0x0001000100010001ull;
        uint64_t any = 0, seen = 0;
        for (int i = 0; i < n; i += 4) {
            uint64_t x;
            memcpy(&x, row + page.cell + i, 8);
            any  |= x;
            seen |= x ^ hidden;
        }
        *use = any ? row + page.cell : nullptr;
        return seen;
    }
    bool any = false;
    for (int i = 0; i < n; i++) {
        const int cell = map ? map[i] : page.cell + i;
        out[i] = cell < 0 || cell >= p.n_kv ? F16_NEG_INF : row ? row[cell] : 0;
        any |= out[i] != F16_NEG_INF;
    }
    *use = out;
    return any;
}

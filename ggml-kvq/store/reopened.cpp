#include "reopened.h"

#include <algorithm>
#include <cstring>

void kvq_reopened::opened(
    const kvq_lane_layout & l, kvq_space & space, int s, int p, const uint8_t * valid, uint16_t * frame) {
    const size_t row = (size_t) l.head_stride(), n_slots = (size_t) l.page_cells;
    const auto at = std::find_if(pages.begin(), pages.end(), [&](const page & x) { return x.s == s && x.p == p; });
    page now = { s, p, {}, std::vector<uint8_t>(valid, valid + n_slots / 8) };
    now.rows.resize(l.nb_frame / sizeof(uint16_t));
    space.get(now.rows.data(), frame, l.nb_frame);
    bool kept = false;
    for (size_t t = 0; t < n_slots && at != pages.end(); t++) {
        if (!(at->slots[t / 8] & valid[t / 8] & 1 << t % 8)) { continue; }
        for (size_t h = 0; h < (size_t) l.n_head; h++) {
            std::copy_n(&at->rows[(h * n_slots + t) * row], row, &now.rows[(h * n_slots + t) * row]);
        }
        kept = true;
    }
    if (kept) { space.put(frame, now.rows.data(), l.nb_frame); }
    if (at != pages.end()) { pages.erase(at); }
    if (pages.size() == KVQ_REOPENED_PAGES) { pages.erase(pages.begin()); }
    pages.push_back(std::move(now));
}

void kvq_reopened::wrote(int s, int p, const uint8_t * slots) {
    for (page & x : pages) {
        if (x.s != s || x.p != p) { continue; }
        for (size_t i = 0; i < x.slots.size(); i++) { x.slots[i] &= (uint8_t) ~slots[i]; }
    }
}

void kvq_reopened::forget(int s, int p) {
    pages.erase(
        std::remove_if(pages.begin(), pages.end(), [&](const page & x) { return x.s == s && x.p == p; }), pages.end());
}

void kvq_reopened::forget_stream(int s) {
    pages.erase(std::remove_if(pages.begin(), pages.end(), [&](const page & x) { return x.s == s; }), pages.end());
}

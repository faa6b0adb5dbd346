#include "positions.h"

#include <algorithm>
#include <climits>

static constexpr int32_t NOT_KNOWN = INT_MIN; // no position

kvq_positions::kvq_positions(int n_stream, int n_pages, int page_cells, kvq_device & device) :
    n_pages(n_pages), page_cells(page_cells), device(device) {
    now.assign((size_t) n_stream * n_pages * page_cells, -1);
    sealed = now;
    users.assign((size_t) n_stream * n_pages, 0);
    has_moved.assign(users.size(), 0);
    if (!device.is_host()) {
        there = (int32_t *) device.alloc(8 * now.size());
        device_now.assign(now.size(), NOT_KNOWN);
        device_sealed = device_now;
    }
}

kvq_positions::~kvq_positions() {
    if (there) { device.free(there, 8 * now.size()); }
}

void kvq_positions::note_moved(int s, int p) {
    bool moved = false;
    const size_t at = cell(s, p);
    for (size_t i = at; i < at + page_cells; i++) { moved |= now[i] >= 0 && now[i] != sealed[i]; }
    has_moved[(size_t) s * n_pages + p] = moved;
}

// Each layer brings the same positions: those that are there do not go again.
void kvq_positions::send(int32_t * to, const std::vector<int32_t> & from, std::vector<int32_t> & sent, size_t at) {
    const int32_t * const page = &from[at];
    if (std::equal(page, page + page_cells, &sent[at])) { return; }
    device.put(to + at, page, 4 * (size_t) page_cells);
    std::copy_n(page, page_cells, &sent[at]);
}

void kvq_positions::put(int s, int p, bool with_sealed) {
    if (!there) { return; }
    const size_t at = cell(s, p);
    send(there, now, device_now, at);
    if (with_sealed) {
        send(there + now.size(), sealed, device_sealed, at);
        note_moved(s, p);
    }
}

bool kvq_positions::stayed(int s) const {
    for (size_t i = (size_t) s * n_pages; i < ((size_t) s + 1) * n_pages; i++) {
        if (has_moved[i] && users[i]) { return false; }
    }
    return true;
}

void kvq_positions::shift(int s, const int32_t * by, int n_cells, int n_seen) {
    if (n_seen <= n_shifts) { return; } // another layer did
    int32_t top = 0;
    for (int c = 0; c < n_cells; c++) {
        int32_t & p = now[cell(s, 0) + c];
        p = p < 0 ? p : std::max(p + by[c], 0);
        top = std::max(top, p);
    }
    for (auto & r : rotors) { r->cover(top); }
    if (there) {
        for (int p = 0; p < n_pages; p++) { send(there, now, device_now, cell(s, p)); }
        for (int p = 0; p < n_pages; p++) { note_moved(s, p); }
    }
}

kvq_rotor * kvq_positions::rotor(const kvq_rope & rope, int n_text) {
    for (auto & r : rotors) {
        if (r->rope() == rope) { return r.get(); }
    }
    rotors.emplace_back(new kvq_rotor(rope, n_text));
    return rotors.back().get();
}

void kvq_positions::forget() {
    for (auto & r : rotors) {
        if (device.is_host()) { r->forget(); } // another device has copies
    }
}

// A lane whose window fills what is left: where its blocks and frames lie (pool.h), and when its pages seal.
#include "lane.h"

#include <algorithm>

// Pages to seal, oldest first, of the open ones that are no sinks: as few as let the others stay. When the pool has no
// room for one more frame, one page seals ahead of need, so that no token waits for two; not below the least window,
// and not for a saved state, which stays as it came.
std::vector<int> kvq_lane::due_pages_of_pool(int s, std::vector<int> & open) const {
    const kvq_pool & pool = pools[(size_t) s];
    const stream_state & st = streams[(size_t) s];
    const int n_open = (int) st.open.size();
    std::vector<int> due;
    const auto seal_oldest = [&] {
        counters->n_forced += info(s, open.front()).n_valid < l.page_cells;
        due.push_back(open.front());
        open.erase(open.begin());
    };
    const auto fits = [&](int more) {
        // Pages of a text that ended may take the room of a state that was restored: its rows wait in scratch until
        // attention tells (free_from).
        const int in_frames = n_open - (int) due.size() + more - (st.restored ? KVQ_RESTORE_PAGES : 0);
        return pool.fits(pool.n_blocks() + (int) due.size(), in_frames);
    };
    while (!fits(0) && open.size() > 1) { seal_oldest(); } // the newest page is being filled
    const bool more_to_come = n_open + pool.n_blocks() < l.n_pages;
    if (due.empty() && st.may_seal_ahead && more_to_come && n_open > l.n_frames && !fits(1)) { seal_oldest(); }
    return due;
}

void kvq_lane::move_frame(int s, int p, int to) {
    kvq_page_info & i = info(s, p);
    uint16_t * const from = i.frame;
    pools[(size_t) s].drop_frame(i.own);
    if (to >= 0) { pools[(size_t) s].put_frame(to, p); }
    i.own = to;
    i.frame = to < 0 ? scratch->take(l.nb_frame) : frame_at(s, to);
    device.copy(i.frame, from, l.nb_frame); // not later: a block may come where the frame was
    refresh_span(s, p);
}

void kvq_lane::clear_way(int s, int i) {
    kvq_pool & pool = pools[(size_t) s];
    const int n_left = pool.n_frames(std::max(pool.n_extent(), i + 1));
    for (int j = n_left; j < pool.n_frames(pool.n_extent()); j++) {
        if (pool.page_of_frame(j) < 0) { continue; }
        const int to = pool.free_frame();
        move_frame(s, pool.page_of_frame(j), to < n_left ? to : -1);
        is_dirty = true; // out of scratch at the next commit
    }
}

void kvq_lane::close_up(int s) {
    kvq_pool & pool = pools[(size_t) s];
    while (pool.free_frame() < 0 && pool.n_extent() > pool.n_blocks()) {
        const int from = pool.n_extent() - 1, to = pool.free_block(), p = pool.page_of_block(from);
        const size_t at = (size_t) s * l.n_pages + (size_t) p;
        uint8_t * const pool_at = memory + (size_t) s * l.nb_pool;
        device.copy(pool_at + (size_t) to * l.nb_block, pool_at + (size_t) from * l.nb_block, l.nb_block);
        pool.drop_block(from);
        pool.put_block(to, p);
        stored[at] = to;
        refresh_span(s, p);
        for (kvq_policy * x : policies) { x->moved(*this, s, p); }
    }
}

void kvq_lane::free_from(int s, int cell) {
    is_dirty = is_dirty || streams[(size_t) s].restored;
    streams[(size_t) s].restored = false;
    for (int p = (cell + l.page_cells - 1) / l.page_cells; l.pooled && p < l.n_pages; p++) {
        const kvq_page_info & i = info(s, p);
        if (i.state != KVQ_PAGE_EMPTY && i.stamp <= streams[(size_t) s].committed) { empty_page(s, p); }
    }
}

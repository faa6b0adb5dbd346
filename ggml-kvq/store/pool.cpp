#include "pool.h"

#include <algorithm>

kvq_pool::kvq_pool(const kvq_lane_layout & l) : nb_pool(l.nb_pool), nb_block(l.nb_block), nb_frame(l.nb_frame) {
    blocks.resize((size_t) l.n_store);
    frames.resize(std::min<size_t>(nb_pool / nb_frame, (size_t) l.n_pages));
    clear();
}

void kvq_pool::clear() {
    std::fill(blocks.begin(), blocks.end(), -1);
    std::fill(frames.begin(), frames.end(), -1);
    n_used = extent = 0;
}

int kvq_pool::n_frames(int n_blocks) const {
    return (int) std::min((nb_pool - (size_t) n_blocks * nb_block) / nb_frame, frames.size());
}

int kvq_pool::free_block() const { return (int) (std::find(blocks.begin(), blocks.end(), -1) - blocks.begin()); }

int kvq_pool::free_frame() const {
    const auto end = frames.begin() + n_frames(extent), at = std::find(frames.begin(), end, -1);
    return at == end ? -1 : (int) (at - frames.begin());
}

void kvq_pool::put_block(int i, int page) {
    blocks[(size_t) i] = page;
    n_used++;
    extent = std::max(extent, i + 1);
}

void kvq_pool::drop_block(int i) {
    blocks[(size_t) i] = -1;
    n_used--;
    while (extent > 0 && blocks[(size_t) extent - 1] < 0) { extent--; }
}

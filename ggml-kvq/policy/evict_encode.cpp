// Blocks of pages of slots, on the host.
#include "evict.h"

#include "engine/host.h"
#include "types/types.h"

#include <algorithm>
#include <cstring>

void kvq_evict::choose_set(bool value, int s, int i, int h, uint8_t * set) {
    const kvq_codec & c = lane[value]->layout().codec;
    if (c.type != KVQ_TYPE_MIXED) { return; }
    if (value) { // of its keys
        std::vector<uint8_t> copy;
        memcpy(set, view<uint8_t>(lane[0]->params_at(s, i, h), (size_t) page_cells / 8, copy), (size_t) page_cells / 8);
        return;
    }
    std::vector<std::pair<float, int>> order;
    for (int t = 0; t < page_cells; t++) {
        const int32_t cell = map(s, i, h)[t];
        order.push_back({ cell >= 0 ? scores->score(s, cell / page_cells, h, cell % page_cells) : -1.0f, t });
    }
    std::stable_sort(order.begin(), order.end(), [](const auto & a, const auto & b) { return a.first > b.first; });
    memset(set, 0, (size_t) page_cells / 8);
    for (int j = 0; j < c.n_hi; j++) {
        set[order[(size_t) j].second / 8] |= (uint8_t) (1 << order[(size_t) j].second % 8);
    }
}

// Rows of the map's cells, which lie in open pages, into the block of page i.
void kvq_evict::encode(bool value, int s, int i, int h) {
    kvq_lane & x = *lane[value];
    const kvq_lane_layout & l = x.layout();
    const size_t D = (size_t) l.codec.head_size;
    static thread_local std::vector<uint16_t> rows;
    rows.assign((size_t) page_cells * D, 0);
    std::vector<uint8_t> valid((size_t) page_cells / 8, 0);
    bool all = true;
    for (int t = 0; t < page_cells; t++) {
        const int32_t cell = map(s, i, h)[t];
        const uint16_t * frame = cell >= 0 ? x.info(s, cell / page_cells).frame : nullptr;
        if (frame) {
            memcpy(
                &rows[(size_t) t * D], frame + ((size_t) h * page_cells + cell % page_cells) * l.head_stride(), 2 * D);
            valid[(size_t) t / 8] |= (uint8_t) (1 << t % 8);
        }
        all &= frame != nullptr;
    }
    choose_set(value, s, i, h, x.params_at(s, i, h));
    kvq_cpu_encode(
        l.codec, rows.data(), all ? nullptr : valid.data(), nullptr, x.codes_at(s, i, h), x.params_at(s, i, h));
}

void kvq_evict::encode_rows(
    bool value, int s, int i, int h, const std::vector<uint16_t> & block, const uint8_t * valid, bool choose) {
    kvq_lane & x = *lane[value];
    const kvq_lane_layout & l = x.layout();
    uint8_t *codes = x.codes_at(s, i, h), *params = x.params_at(s, i, h);
    std::vector<uint8_t> c, q;
    if (device) {
        c.resize(l.nb_codes);
        q.resize(l.nb_params);
        device->get(q.data(), params, q.size()); // its set stays
    }
    if (choose) { choose_set(value, s, i, h, device ? q.data() : params); }
    kvq_cpu_encode(l.codec, block.data(), valid, nullptr, device ? c.data() : codes, device ? q.data() : params);
    if (device) {
        device->put(codes, c.data(), c.size());
        device->put(params, q.data(), q.size());
    }
}

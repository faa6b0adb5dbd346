#include "layout.h"
#include "slots.h"

#include "chain.h"
#include "../types/types.h"

#include <algorithm>
#include <cmath>

kvq_lane_layout kvq_make_lane_layout(const kvq_layer_plan & plan, bool value, int n_head, int n_cells, int n_stream) {
    const kvq_lane_plan & lane = value ? plan.v : plan.k;
    kvq_lane_layout l;
    l.codec = lane.codec;
    l.shares_codes = lane.shares_codes;
    l.n_head = n_head;
    l.n_cells = n_cells;
    l.n_stream = n_stream;
    l.page_cells = lane.codec.n_cells;
    l.n_pages = (n_cells + l.page_cells - 1) / l.page_cells;
    l.evicts = plan.keep > 0.0f;
    l.n_store = l.evicts ? std::min(std::max((int) std::ceil(plan.keep * (float) l.n_pages), 1), l.n_pages) : l.n_pages;
    l.n_sink_pages = std::min((plan.sinks + l.page_cells - 1) / l.page_cells, l.n_pages);
    l.window = (int) kvq_pad((size_t) plan.window, (size_t) l.page_cells);

    const kvq_type_traits * t = kvq_traits(l.codec.type);
    l.nb_tile_head = 2 * (size_t) l.page_cells * l.head_stride();
    l.nb_frame = l.nb_tile_head * n_head;
    if (l.is_f16()) {
        l.n_frames = l.n_pages; // every page stays open
    } else {
        l.nb_codes = t->nb_codes(l.codec);
        l.nb_params = t->nb_params(l.codec);
        // window rows, at least the page being filled, and the sink pages
        l.n_frames = std::min(std::max(l.window / l.page_cells, 1) + l.n_sink_pages, l.n_pages);
    }
    l.moves = plan.probe > 0.0f && !l.evicts && !l.is_f16() && l.n_frames < l.n_pages;
    if (l.moves) { // pages are long there: as many as there are frames need no block at any time
        l.n_store = l.n_pages - l.n_frames;
    }
    const size_t pages = (size_t) l.n_pages * n_stream, stored = (size_t) l.n_store * n_stream;
    l.bytes_codes = l.shares_codes ? 0 : kvq_pad(stored * n_head * l.nb_codes, KVQ_ALIGN);
    l.bytes_params = kvq_pad(stored * n_head * l.nb_params, KVQ_ALIGN);
    l.bytes_window = kvq_pad((size_t) l.n_frames * n_stream * l.nb_frame, KVQ_ALIGN);
    l.bytes_tables = kvq_pad(
        pages * (sizeof(kvq_page_info) + l.page_cells / 8 + sizeof(kvq_page) / 2 + (l.moves ? 4 : 0)), KVQ_ALIGN);
    if (plan.mean) { l.bytes_calibration = kvq_pad(4 * (size_t) n_head * l.codec.head_size, KVQ_ALIGN); }
    for (const int n_in : lane.inputs) {
        l.bytes_calibration +=
            kvq_pad(kvq_predictor_bytes(n_in, n_head * l.codec.head_size, plan.weight_bits), KVQ_ALIGN);
        l.predict_macs += (uint64_t) n_in * n_head * l.codec.head_size;
    }
    if (plan.holds_chain && lane.chained) {
        l.bytes_chain = kvq_pad(
            kvq_chain::bytes(n_stream, l.n_pages, l.page_cells, n_head * l.codec.head_size, l.nb_frame), KVQ_ALIGN);
    }
    if (plan.probe > 0.0f && !value) { // sums per head, and who saw a cell
        l.bytes_tables += kvq_pad((size_t) n_stream * l.n_frames * l.page_cells * (4 * (size_t) n_head + 4), KVQ_ALIGN);
    }
    if (plan.keep > 0.0f && !value) {
        // and a byte a cell
        l.bytes_tables += kvq_pad(stored * kvq_slots::nb_page(n_head, l.page_cells) + pages * l.page_cells, KVQ_ALIGN);
    }
    if (plan.holds_positions && !value) {
        // now and when sealed; layers that hold the page
        l.bytes_tables += kvq_pad(8 * pages * l.page_cells + 2 * pages, KVQ_ALIGN);
    }
    return l;
}

void kvq_accounting::add(const kvq_lane_layout & l, bool value) {
    const double n = (double) l.n_head * l.codec.head_size * l.n_cells * l.n_stream;
    s.bytes_f16 += 2 * (uint64_t) n;
    s.bytes_codes += l.bytes_codes;
    s.bytes_params += l.bytes_params;
    s.bytes_window += l.bytes_window;
    s.bytes_tables += l.bytes_tables;
    s.bytes_calibration += l.bytes_calibration;
    s.bytes_chain += l.bytes_chain;
    s.predict_macs += l.predict_macs;
    s.page_cells = std::max(s.page_cells, (int32_t) l.page_cells);
    values[value] += n;
    bytes[value] += (double) l.bytes();
    const double hi = l.codec.type == KVQ_TYPE_MIXED ? (double) l.codec.n_hi / l.codec.n_cells : 0.0;
    code_bits += (l.is_f16()              ? 16.0
                         : l.shares_codes ? 0.0
                                          : hi * l.codec.hi + (1.0 - hi) * l.codec.bits) *
        n * (l.evicts ? (double) l.n_store / l.n_pages : 1.0);
}

void kvq_accounting::finish() {
    s.bytes_total =
        s.bytes_codes + s.bytes_params + s.bytes_window + s.bytes_tables + s.bytes_calibration + s.bytes_chain;
    s.bits_k = values[0] > 0 ? 8 * bytes[0] / values[0] : 0;
    s.bits_v = values[1] > 0 ? 8 * bytes[1] / values[1] : 0;
    s.bits = s.bytes_f16 ? 16.0 * (double) s.bytes_total / (double) s.bytes_f16 : 0;
    s.bits_headline = s.bytes_f16 ? code_bits / (values[0] + values[1]) : 0;
}

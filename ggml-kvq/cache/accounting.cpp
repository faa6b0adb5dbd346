#include "accounting.h"

#include <algorithm>

void kvq_accounting::add(const kvq_lane_layout & l, bool value, bool on_host) {
    const double n = (double) l.n_head * l.codec.head_size * l.n_cells * l.n_stream;
    s.bytes_f16 += 2 * (uint64_t) n;
    s.bytes_codes += l.bytes_codes;
    s.bytes_params += l.bytes_params;
    s.bytes_window += l.bytes_window;
    s.bytes_tables += l.bytes_tables + (on_host ? 0 : l.bytes_ahead);
    s.bytes_calibration += l.bytes_calibration;
    s.bytes_chain += l.bytes_chain;
    s.bytes_far += l.bytes_far;
    if (l.far_place == kvq_far_place::DEVICE || (on_host && l.far_place == kvq_far_place::HOST)) {
        far[value] += (double) l.bytes_far;
    }
    s.predict_macs += l.predict_macs;
    s.page_cells = std::max(s.page_cells, (int32_t) l.page_cells);
    values[value] += n;
    bytes[value] += (double) (l.bytes() + (on_host ? 0 : l.bytes_ahead));
    const double hi = l.codec.type == KVQ_TYPE_MIXED ? (double) l.codec.n_hi / l.codec.n_cells : 0.0;
    code_bits += (l.is_f16()              ? 16.0
                         : l.shares_codes ? 0.0
                         : l.codec.split  ? (l.codec.bits + l.codec.fast_bits) / 2.0
                                          : hi * l.codec.hi + (1.0 - hi) * l.codec.bits) *
        n * (l.evicts ? (double) l.n_store / l.n_pages : 1.0);
}

void kvq_accounting::finish() {
    s.bytes_total =
        s.bytes_codes + s.bytes_params + s.bytes_window + s.bytes_tables + s.bytes_calibration + s.bytes_chain;
    s.bytes_total += (uint64_t) (far[0] + far[1]);
    s.bits_k = values[0] > 0 ? 8 * (bytes[0] + far[0]) / values[0] : 0;
    s.bits_v = values[1] > 0 ? 8 * (bytes[1] + far[1]) / values[1] : 0;
    s.bits = s.bytes_f16 ? 16.0 * (double) s.bytes_total / (double) s.bytes_f16 : 0;
    s.bits_headline = s.bytes_f16 ? code_bits / (values[0] + values[1]) : 0;
}

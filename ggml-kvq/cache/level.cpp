#include "level.h"

#include "policy/compose.h"

#include <algorithm>
#include <cstdio>

// True bits of a level: bytes of all lanes over values of the f16 cache.
kvq_status kvq_levels::bits(int level, int cells, double & out, std::string & err) const {
    double bytes = 0.0, values = 0.0;
    for (size_t i = 0; i < shapes.size(); i++) {
        kvq_layer_context c = { (int) i, n_layer, shapes[i], i ? &shapes[i - 1] : nullptr };
        c.level = level;
        kvq_layer_plan plan;
        const kvq_status status = method.plan(options, c, plan, err);
        if (status != KVQ_OK) { return status; }
        for (const bool value : { false, true }) {
            const kvq_lane_layout l = kvq_make_lane_layout(plan, value, shapes[i].n_head_kv, cells, n_stream);
            bytes += (double) l.bytes();
            values += (double) l.n_head * l.codec.head_size * cells * n_stream;
        }
    }
    out = values > 0 ? 8.0 * bytes / values : 0.0;
    return KVQ_OK;
}

kvq_status kvq_levels::find(int & level, std::string & err) const {
    const kvq_status status = find_allowed(level, err);
    if (status != KVQ_OK || more <= 0 || !method.n_levels || method.most(options).bits <= 0) { return status; }
    double start = 0.0;
    const kvq_status counted = bits(level, n_cells, start, err);
    return counted == KVQ_OK ? highest(start + more, n_cells, level, err) : counted;
}

// From a level that takes no more than `most` bits at `cells` cells to the highest that does not.
kvq_status kvq_levels::highest(double most, int cells, int & level, std::string & err) const {
    int above = method.n_levels(options, n_layer); // the lowest that does not fit, as far as known
    while (above - level > 1) {
        const int middle = (level + above) / 2;
        double now = 0.0;
        const kvq_status status = bits(middle, cells, now, err);
        if (status != KVQ_OK) { return status; }
        (now <= most ? level : above) = middle;
    }
    return KVQ_OK;
}

kvq_status kvq_levels::find_allowed(int & level, std::string & err) const {
    level = 0;
    if (!method.n_levels) { return KVQ_OK; }
    const kvq_method::limit most = method.most(options);
    if (most.bits <= 0) { return KVQ_OK; } // the options name the level
    const int cells = most.n_cells > 0 ? most.n_cells : n_cells;
    double now = 0.0;
    kvq_status status = bits(0, cells, now, err);
    if (status != KVQ_OK) { return status; }
    if (now > most.bits) {
        if (!most.strict) { return KVQ_OK; }
        char text[192];
        snprintf(text, sizeof(text),
            "%.2f bits are not possible: %.2f are the least in a context of %d tokens, window and tables included; ask "
            "for that many or more",
            most.bits, now + 0.005, cells);
        err = text;
        kvq_options whole = options; // keys that are not split have rungs below
        const auto pairs = whole.values.find("pairs");
        if (pairs != whole.values.end() && pairs->second != "none") {
            pairs->second = whole.values["order"] = "none"; // an order is one of its ladder
            std::string other;
            if (kvq_levels{ method, whole, shapes, n_layer, n_cells, n_stream, 0.0 }.bits(0, cells, now, other) ==
                    KVQ_OK &&
                now <= most.bits) {
                err += ", or set pairs=none: whole keys can do with fewer bits";
            }
        }
        return KVQ_ERR_OPTION;
    }
    return highest(most.bits, cells, level, err);
}

double kvq_more_bits(const kvq_method & method, const kvq_options & o, double channels, int n_cells,
    double channels_whole, int cells_whole) {
    constexpr double ON_AVERAGE = 0.05;
    if (!method.most || channels <= 0 || channels_whole <= 0 || n_cells >= cells_whole) { return 0; }
    const double here = channels * n_cells, there = channels_whole * std::max(method.most(o).n_cells, cells_whole);
    return ON_AVERAGE * (here + there) / here;
}

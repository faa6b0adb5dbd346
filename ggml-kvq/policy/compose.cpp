#include "compose.h"

#include "types/types.h"

#include <algorithm>
#include <stdexcept>

#define KVQ_POLICY(name) extern const kvq_policy_kind kvq_policy_##name;
#include "policies.inc"
#undef KVQ_POLICY

#define KVQ_POLICY(name) &kvq_policy_##name,
static const kvq_policy_kind * const kinds[] = {
#include "policies.inc"
};
#undef KVQ_POLICY

const kvq_policy_kind * kvq_policy_find(const std::string & name) {
    for (const kvq_policy_kind * k : kinds) {
        if (name == k->name) { return k; }
    }
    return nullptr;
}

static const kvq_policy_kind & kind_of(const kvq_part & part) {
    const kvq_policy_kind * k = kvq_policy_find(part.name);
    if (!k) { throw std::invalid_argument("no policy '" + part.name + "': policy/policies.inc names them"); }
    return *k;
}

kvq_lane_layout kvq_make_lane_layout(const kvq_layer_plan & plan, bool value, int n_head, int n_cells, int n_stream) {
    kvq_lane_layout l;
    l.codec = value ? plan.v : plan.k;
    l.n_head = n_head;
    l.n_cells = n_cells;
    l.n_stream = n_stream;
    l.page_cells = l.codec.n_cells;
    l.n_pages = l.n_store = (n_cells + l.page_cells - 1) / l.page_cells;
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
    for (const kvq_part & part : plan.parts) {
        const auto shape = kind_of(part).shape;
        if (shape) { shape(part, plan, value, l); }
    }
    // policies that keep pages elsewhere, read them through others or score open ones count on fixed frames
    for (const char * name : { "evict", "choose", "chain", "fetch" }) {
        if (plan.fills && plan.part(name)) {
            throw std::invalid_argument("window=auto with policy '" + std::string(name) + "': its method refuses it");
        }
    }
    l.pooled = plan.fills && !l.is_f16();
    l.on_host = plan.place == kvq_place::HOST && !l.is_f16();
    const size_t pages = (size_t) l.n_pages * n_stream, stored = (size_t) l.n_store * n_stream;
    l.bytes_codes = l.shares_codes ? 0 : kvq_pad(stored * n_head * l.nb_codes, KVQ_ALIGN);
    l.bytes_params = kvq_pad(stored * n_head * l.nb_params, KVQ_ALIGN);
    if (l.pooled) {
        l.nb_block_codes = l.shares_codes ? 0 : kvq_pad(l.nb_codes * n_head, KVQ_ALIGN_BLOCK);
        l.nb_block = l.nb_block_codes + kvq_pad(l.nb_params * n_head, KVQ_ALIGN_BLOCK);
        l.bytes_params = kvq_pad(stored * l.nb_block, KVQ_ALIGN) - l.bytes_codes;
    }
    l.bytes_window = kvq_pad((size_t) l.n_frames * n_stream * l.nb_frame, KVQ_ALIGN);
    if (l.pooled) {
        l.nb_pool = (l.bytes_codes + l.bytes_params + l.bytes_window) / (size_t) n_stream / KVQ_ALIGN * KVQ_ALIGN;
    }
    // keys and values each count half of a span
    l.bytes_tables = kvq_pad(pages *
            (sizeof(kvq_page_info) + l.page_cells / 8 + sizeof(kvq_page) / 2 +
                (l.moves           ? 4
                        : l.pooled ? 12
                                   : 0)),
        KVQ_ALIGN);
    for (const kvq_part & part : plan.parts) {
        const auto bytes = kind_of(part).bytes;
        if (bytes) { bytes(part, plan, value, l); }
    }
    return l;
}

int kvq_n_spans(const kvq_lane_layout & keys) { return keys.n_pages + (keys.evicts ? keys.n_store : 0); }

bool kvq_attach_policies(kvq_layer_parts & at) {
    return std::all_of(at.plan.parts.begin(), at.plan.parts.end(), [&](const kvq_part & part) {
        const auto attach = kind_of(part).attach;
        return !attach || attach(part, at);
    });
}

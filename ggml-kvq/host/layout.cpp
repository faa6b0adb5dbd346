#include "layout.h"

#include <algorithm>
#include <cstdio>
#include <tuple>

namespace {

struct row {
    const char * version;
    int api;
    size_t get_alignment, get_max_size, get_alloc_size, is_host, device, context, size;

    bool same(const row & o) const {
        return std::tie(api, get_alignment, get_max_size, get_alloc_size, is_host, device, context, size) ==
            std::tie(o.api, o.get_alignment, o.get_max_size, o.get_alloc_size, o.is_host, o.device, o.context, o.size);
    }
};

// in the order of versions
const row rows[] = {
#define KVQ_MEMBER(...)
#define KVQ_SIZE(...)
#define KVQ_CONSTANT(...)
#define KVQ_DIFFERS(...)
#define KVQ_LAYOUT_OF(...) { __VA_ARGS__ },
#include "layouts.inc"
};
constexpr int N = sizeof(rows) / sizeof(row);
#undef KVQ_LAYOUT_OF

struct cuda_row {
    const char * version;
    size_t graphs;
};

const cuda_row cuda_rows[] = {
#define KVQ_LAYOUT_OF(...) { __VA_ARGS__ },
#include "host/cuda/cuda_layouts.inc"
};

struct number {
    int major = 0, minor = 0, patch = 0;
    explicit number(const char * text) { sscanf(text, "%d.%d.%d", &major, &minor, &patch); }
    bool operator<(const number & o) const {
        return std::tie(major, minor, patch) < std::tie(o.major, o.minor, o.patch);
    }
};

// Nothing proves a private context at run time: known are the versions of the table, and those between two equal rows.
size_t cuda_graphs_of(const number & here) {
    const cuda_row *below = nullptr, *above = nullptr;
    for (const cuda_row & r : cuda_rows) {
        if (!(here < number(r.version))) { below = &r; }
        if (!(number(r.version) < here) && !above) { above = &r; }
    }
    return below && above && below->graphs == above->graphs ? below->graphs : 0;
}

} // namespace

kvq_layout kvq_layout_here = { KVQ_GGML_VERSION, GGML_BACKEND_API_VERSION,
    offsetof(ggml_backend_buffer_type, iface.get_alignment), offsetof(ggml_backend_buffer_type, iface.get_max_size),
    offsetof(ggml_backend_buffer_type, iface.get_alloc_size), offsetof(ggml_backend_buffer_type, iface.is_host),
    offsetof(ggml_backend_buffer_type, device), offsetof(ggml_backend_buffer_type, context),
    sizeof(ggml_backend_buffer_type), GGML_OP_CUSTOM };

std::string kvq_known_versions(void) { return std::string(rows[0].version) + " to " + rows[N - 1].version; }

std::string kvq_known_cuda_versions(void) {
    return std::string(std::begin(cuda_rows)->version) + " to " + (std::end(cuda_rows) - 1)->version;
}

bool kvq_choose_layout(const char * version, int api, std::string & err) {
    const number here(version);
    const auto refused = [&](const std::string & why) {
        err = std::string("this is ggml ") + version + ", " + why + "; libggml-kvq.so knows " + kvq_known_versions();
        return false;
    };
    // the neighbours: the newest that is not newer, and the oldest that is not older
    const row *below = nullptr, *above = nullptr;
    for (const row & r : rows) {
        if (!(here < number(r.version))) { below = &r; }
        if (!(number(r.version) < here) && !above) { above = &r; }
    }
    if (!below) { return refused("older than all that are known"); }
    const row * taken = below;
    if (above && !below->same(*above)) { // the interface changed between these two
        taken = api == below->api ? below : api == above->api ? above : nullptr;
        taken = taken ? taken : below;
    }
    if (api && api != taken->api) {
        const row * other = std::find_if(rows, rows + N, [&](const row & r) { return r.api == api; });
        if (other == rows + N) { return refused("its backend interface has the API number " + std::to_string(api)); }
        taken = other;
    }
    kvq_layout_here = { version, taken->api, taken->get_alignment, taken->get_max_size, taken->get_alloc_size,
        taken->is_host, taken->device, taken->context, taken->size, GGML_OP_CUSTOM, below == above, !above,
        cuda_graphs_of(here) };
    return true;
}

int kvq_other_api(int api) {
    for (const row & r : rows) {
        if (r.api > api) { return r.api; }
    }
    return rows[0].api;
}

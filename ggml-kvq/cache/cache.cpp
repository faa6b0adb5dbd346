#include "cache.h"

#include "accounting.h"
#include "base/host_memory.h"
#include "engine/host.h"
#include "policy/tags.h"

#include <algorithm>
#include <cstring>
#include <mutex>

static constexpr size_t HOST_KEEPS = (size_t) 256 << 20; // bytes that a cache leaves to others

static std::mutex live_mutex;
static std::vector<kvq_kv_cache *> live;

kvq_kv_cache::kvq_kv_cache(const kvq_cache_draft & draft, kvq_device & device) :
    device(device), config(draft.config), model(draft.model), calibration(draft.calibration), scratch(device) {
    size_t nb = 0, nb_on_host = 0;
    for (const kvq_draft_layer & d : draft.layers) {
        nb_on_host += d.k.bytes_on_host() + d.v.bytes_on_host();
        for (const kvq_lane_layout * l : { &d.k, &d.v }) {
            const size_t nb_lane = l->bytes_codes + l->bytes_params + l->bytes_window - l->bytes_on_host();
            nb += kvq_pad(nb_lane + 1, KVQ_ALIGN_SLAB);
        }
        nb += kvq_pad(sizeof(kvq_page) * (size_t) d.n_stream * (d.k.n_pages + d.k.n_store), KVQ_ALIGN_SLAB);
        const size_t n_slots = d.k.evicts ? (size_t) d.n_stream * d.k.n_store * d.k.page_cells : 0;
        nb += kvq_pad(4 * n_slots * d.k.n_head, KVQ_ALIGN_SLAB); // maps
    }
    // memory that stays in RAM: with the last of it the system would end some program
    if (nb_on_host && kvq_host_available() < nb_on_host + nb_on_host / 8 + HOST_KEEPS) {
        missing = std::to_string(nb_on_host >> 20) +
            " MiB of blocks shall lie in the host's memory (place), which has " +
            std::to_string(kvq_host_available() >> 20) + " MiB left: lower -c, or take fewer bits";
        is_ok = false;
    }
    if (is_ok) { device.reserve(nb); }
    for (const kvq_draft_layer & d : draft.layers) { bytes_far += d.k.bytes_far + d.v.bytes_far; }
    for (const kvq_draft_layer & d : draft.layers) {
        layers.emplace_back(new kvq_kv_layer);
        layers.back()->ordinal = (int) layers.size() - 1;
        layers.back()->d = d;
        layers.back()->some_heads = kvq_is_part(model, d);
        is_ok = is_ok && build(*layers.back());
    }
    const auto state = config.options.values.find("state");
    compact = state != config.options.values.end() && state->second != "rows";
    std::lock_guard<std::mutex> lock(live_mutex);
    live.push_back(this);
}

bool kvq_kv_cache::append(const kvq_draft_layer & d) {
    if (chain() && counters.n_sealed) { return false; }
    layers.emplace_back(new kvq_kv_layer);
    layers.back()->ordinal = (int) layers.size() - 1;
    layers.back()->d = d;
    is_ok = is_ok && build(*layers.back());
    return is_ok;
}

kvq_kv_cache::~kvq_kv_cache() {
    std::lock_guard<std::mutex> lock(live_mutex);
    live.erase(std::find(live.begin(), live.end(), this));
}

int kvq_kv_cache::number_of(const kvq_kv_cache * cache) {
    std::lock_guard<std::mutex> lock(live_mutex);
    const auto found = std::find(live.begin(), live.end(), cache);
    return found == live.end() ? -1 : (int) (found - live.begin());
}

kvq_kv_cache * kvq_kv_cache::youngest(const std::string & device_name, int il, bool value, const int64_t shape[3]) {
    std::lock_guard<std::mutex> lock(live_mutex);
    const auto is_it = [&](kvq_kv_cache * c) {
        const kvq_kv_layer * l = c->device_name == device_name ? c->layer(il) : nullptr;
        return l && (value ? l->d.n_embd_v : l->d.n_embd_k) <= shape[0] && l->d.n_cells == shape[1] &&
            l->d.n_stream == shape[2];
    };
    const auto found = std::find_if(live.rbegin(), live.rend(), is_it);
    return found == live.rend() ? nullptr : *found;
}

bool kvq_kv_cache::waits_to_seal() const {
    return std::any_of(layers.begin(), layers.end(), [](const auto & l) { return l->d.k.evicts; });
}

kvq_positions * kvq_kv_cache::positions() const {
    const auto found = shared.find("positions");
    return found == shared.end() ? nullptr : (kvq_positions *) found->second.get();
}

kvq_chain * kvq_kv_cache::chain() const {
    const auto found = shared.find("chain");
    return found == shared.end() ? nullptr : (kvq_chain *) found->second.get();
}

bool kvq_kv_cache::build(kvq_kv_layer & l) {
    kvq_kv_layer * prev = l.ordinal ? layers[l.ordinal - 1].get() : nullptr;
    l.v.reset();
    l.k.reset();
    l.policies.clear();
    l.spans.init(l.d.n_stream, kvq_n_spans(l.d.k), l.d.k.page_cells);
    l.k.reset(new kvq_lane(
        l.d.k, false, l.d.k.shares_codes ? prev->k.get() : nullptr, &l.spans, &scratch, &counters, device));
    l.v.reset(
        new kvq_lane(l.d.v, true, l.d.v.shares_codes ? prev->v.get() : nullptr, &l.spans, &scratch, &counters, device));
    if (!l.k->ok() || !l.v->ok()) {
        if (l.k->lacks_host() || l.v->lacks_host()) {
            missing = "layer " + std::to_string(l.d.il) +
                ": no memory of the host could be pinned for its blocks (place): raise `ulimit -l`, or lower -c";
        }
        return false;
    }
    kvq_layer_parts parts(device, shared, l.policies);
    parts.plan = l.d.plan;
    parts.k = l.k.get();
    parts.v = l.v.get();
    parts.spans = &l.spans;
    parts.before[0] = prev ? prev->k.get() : nullptr;
    parts.before[1] = prev ? prev->v.get() : nullptr;
    parts.number = l.d.number;
    parts.ordinal = l.ordinal;
    parts.bytes_far = bytes_far;
    parts.data = calibration ? &calibration->layers.at(l.d.il) : nullptr;
    if (!kvq_attach_policies(parts)) {
        missing = parts.why;
        return false;
    }
    std::copy(parts.transforms, parts.transforms + 2, l.transforms);
    l.probe = parts.probe;
    l.operands.clear();
    for (kvq_lane * lane : { l.k.get(), l.v.get() }) {
        const int n = lane->layout().n_head * lane->layout().codec.head_size;
        const bool behind_keys = lane->is_value() && l.d.latent; // in rows of the same tensor
        l.operands.push_back({ lane->is_value() && !l.d.latent, behind_keys ? l.operands[0].n : 0, n, lane,
            behind_keys ? nullptr : l.transforms[lane->is_value()] });
    }
    return true;
}

// Sorting and turning commute: what is turned together has one gain, and of keys in halves neighbouring channels.
static bool keeps_pairs(const kvq_order & order, const kvq_rope & rope, const kvq_lane_layout & l) {
    const int D = l.codec.head_size, apart = rope.neox ? D / 2 : 1;
    const bool halves = l.codec.split != 0;
    if (rope.n_dims && rope.n_dims != D) { return false; }
    for (int j = 0; rope.n_dims && j < l.n_head * D / 2; j++) {
        const int head = j / (D / 2) * D, pair = j % (D / 2);
        const int x = head + (halves || !rope.neox ? 2 * pair : pair), y = x + (halves ? 1 : apart); // their places
        const int c = order.channel[x];
        const bool first = rope.neox ? c < D / 2 : c % 2 == 0;
        if (!first || order.channel[y] != c + apart || order.gain[x] != order.gain[y]) { return false; }
    }
    return true;
}

static bool has_sealed(const kvq_lane & lane) {
    const kvq_lane_layout & l = lane.layout();
    for (int s = 0; s < l.n_stream; s++) {
        for (int p = 0; p * l.page_cells < l.n_cells; p++) {
            if (lane.state(s, p) == KVQ_PAGE_SEALED) { return true; }
        }
    }
    return false;
}

bool kvq_kv_cache::set_rope(kvq_kv_layer & l, const kvq_rope & rope, std::string & err) {
    kvq_rotor *& rotor = l.transforms[0]->rotor;
    if (rope.n_dims == 0 ? !rotor : rotor && rotor->rope() == rope) { return true; }
    if (has_sealed(*l.k)) { // other layers of a graph that comes in parts may have sealed
        err = "layer " + std::to_string(l.d.il) +
            " changed its rotary embedding after keys were stored: clear the cache first";
        return false;
    }
    if (l.transforms[0]->order && !keeps_pairs(*l.transforms[0]->order, rope, l.k->layout())) {
        err = "layer " + std::to_string(l.d.il) + ": calibrated data '" + calibration->path +
            "' sort keys into pairs that its rotary embedding does not have: make them again with ggml-kvq calibrate";
        return false;
    }
    rotor = rope.n_dims ? positions()->rotor(rope, std::min(l.d.n_cells, 1 << 20)) : nullptr;
    return true;
}

const int32_t * kvq_kv_cache::positions_of(const kvq_kv_layer & l, const int32_t * source, int64_t n) {
    kvq_rotor * rotor = l.transforms[0] ? l.transforms[0]->rotor : nullptr;
    const size_t n_each = rotor && rotor->first() ? 4 : 1; // all times, all rows, ...
    const bool fresh = ubatch.source != source || ubatch.pos.size() != n_each * n || l.ordinal <= ubatch.ordinal;
    if (fresh) {
        ubatch.pos.assign(source, source + n_each * n);
        ubatch.source = source;
    }
    ubatch.ordinal = l.ordinal;
    if (n_each == 1) { return ubatch.pos.data(); }
    if (fresh || ubatch.rotor != rotor) {
        ubatch.placed.clear();
        for (size_t i = 0; i < (size_t) n; i++) {
            const int32_t * p = &ubatch.pos[i];
            ubatch.placed.push_back(rotor->place({ p[0], p[n], p[2 * n], p[3 * n] }));
        }
        ubatch.rotor = rotor;
    }
    return ubatch.placed.data();
}

kvq_kv_layer * kvq_kv_cache::layer(int il) {
    for (auto & l : layers) {
        if (l->d.il == il) { return l.get(); }
    }
    return nullptr;
}

bool kvq_kv_cache::set_shape(kvq_kv_layer & l, int n_head_kv, int head_size_k, int head_size_v, std::string & err) {
    const kvq_layer_shape & s = l.d.shape;
    if (l.d.latent) {
        if (n_head_kv == 1 && head_size_k == l.d.n_embd_k && head_size_v == l.d.latent) { return true; }
        err = "layer " + std::to_string(l.d.il) + " reads " + std::to_string(n_head_kv) + " heads of " +
            std::to_string(head_size_k) + " and values of " + std::to_string(head_size_v) +
            ", not latent attention with " + std::to_string(l.d.latent) + " of " + std::to_string(l.d.n_embd_k) +
            " channels";
        return false;
    }
    if (s.n_head_kv == n_head_kv && s.head_size_k == head_size_k && s.head_size_v == head_size_v) { return true; }
    const std::string where = "layer " + std::to_string(l.d.il) + " has " + std::to_string(n_head_kv) +
        " KV heads of " + std::to_string(head_size_k);
    if (counters.n_sealed || l.k->dirty()) {
        err = where + ", not " + std::to_string(s.n_head_kv) + " of " + std::to_string(s.head_size_k) +
            " as before: the graph changed";
        return false;
    }
    // every layer at once, so that lanes that share codes see one shape
    std::vector<kvq_draft_layer> planned;
    for (auto & x : layers) {
        kvq_draft_layer d = x->d;
        if (d.n_embd_k != n_head_kv * head_size_k || d.n_embd_v != n_head_kv * head_size_v) {
            planned.push_back(d);
            continue;
        }
        d.shape = { d.il, n_head_kv, head_size_k, head_size_v };
        const kvq_layer_context c = kvq_context_of(model, d, planned.empty() ? nullptr : &planned.back());
        d.plan = {};
        if (config.method->plan(config.options, c, d.plan, err) != KVQ_OK) { return false; }
        const size_t before = d.k.bytes() + d.v.bytes();
        d.k = kvq_make_lane_layout(d.plan, false, n_head_kv, d.n_cells, d.n_stream);
        d.v = kvq_make_lane_layout(d.plan, true, n_head_kv, d.n_cells, d.n_stream);
        if (d.k.bytes() + d.v.bytes() > before) {
            err = where + ", which was not known when the cache was allocated: set KVQ_MODEL to the model's path";
            return false;
        }
        planned.push_back(d);
    }
    for (size_t i = layers.size(); i > 0; i--) { // those that adopt codes before their owners
        layers[i - 1]->policies.clear();
        layers[i - 1]->v.reset();
        layers[i - 1]->k.reset();
    }
    shared.erase("chain");
    for (size_t i = 0; i < layers.size(); i++) {
        layers[i]->d = planned[i];
        if (!build(*layers[i])) {
            err = "out of memory while rebuilding the KV cache: lower -c";
            return false;
        }
    }
    return true;
}

kvq_kv_cache::reading::reading(kvq_kv_cache & cache, const kvq_kv_layer & l, int stream0,
    const std::vector<kvq_attn> & streams, int n_threads, bool follow) :
    chain(cache.chain()),
    ordinal(l.ordinal),
    stream0(stream0),
    n_stream((int) streams.size()),
    n_pages(streams[0].n_pages),
    follow(follow) {
    for (int s = 0; chain && s < n_stream; s++) {
        if (follow) { chain->layer_below(ordinal, stream0 + s, n_pages, n_threads); }
        for (const bool value : { false, true }) {
            lanes.push_back(chain->chains(value) ? chain->pages_of(ordinal, value, stream0 + s, 0, n_pages, n_threads)
                                                 : kvq_chain_pages());
        }
    }
}

void kvq_kv_cache::reading::done() const {
    for (int s = 0; chain && follow && s < n_stream; s++) { chain->layer_read(ordinal, stream0 + s, n_pages); }
}

void kvq_kv_layer::seal(int n_threads) {
    k->commit(n_threads);
    v->commit(n_threads);
}

void kvq_kv_cache::commit(int threads) {
    n_threads = threads;
    for (auto & l : layers) { // graph order: owners of shared codes first
        if (!l->is_unread()) { l->seal(n_threads); }
    }
    device.flush();
}

void kvq_kv_cache::commit(int threads, const std::vector<kvq_kv_layer *> & some) {
    if (some.size() == layers.size() || chain()) { // predicted layers seal together
        commit(threads);
        return;
    }
    n_threads = threads;
    for (kvq_kv_layer * l : some) {
        if (!l->is_unread()) { l->seal(n_threads); }
    }
    device.flush();
}

void kvq_kv_cache::clear() {
    for (auto & l : layers) {
        l->k->clear();
        l->v->clear();
        l->read(); // the cache has no rows to read
    }
    if (positions()) { positions()->forget(); }
    ubatch = {};
    lacks_memory = false;
    refused = refused && arrivals.damage.empty(); // a state that was refused is gone
    arrivals.reset();
}

std::string kvq_kv_cache::trouble() {
    for (const auto & l : layers) {
        for (const auto & policy : l->policies) {
            const std::string now = policy->trouble();
            if (now.empty()) { continue; }
            const bool again = now == said;
            said = now;
            return again ? "" : now;
        }
    }
    said.clear();
    return "";
}

kvq_stats kvq_kv_cache::stats() const {
    kvq_accounting sum;
    for (const auto & l : layers) {
        sum.add(l->d.k, false, device.is_host());
        sum.add(l->d.v, true, device.is_host());
    }
    sum.finish();
    kvq_stats & s = sum.s;
    strncpy(s.method, config.method->info.name, sizeof(s.method) - 1);
    strncpy(s.options, config.options_text.c_str(), sizeof(s.options) - 1);
    strncpy(s.kernel, device.name(), sizeof(s.kernel) - 1);
    s.n_layer = (int32_t) layers.size();
    s.n_cells = layers.empty() ? 0 : layers[0]->d.n_cells;
    s.n_stream = layers.empty() ? 0 : layers[0]->d.n_stream;
    if (!layers.empty()) {
        const kvq_declared * const declared = layers[0]->d.declared;
        snprintf(s.type_k, sizeof(s.type_k), "%s", declared[0].name.c_str());
        snprintf(s.type_v, sizeof(s.type_v), "%s", declared[1].name.c_str());
    }
    for (const auto & l : layers) {
        for (const auto & policy : l->policies) { policy->tell(s); }
    }
    s.bytes_scratch = scratch.bytes();
    s.n_sealed = counters.n_sealed + counters.n_placed;
    s.n_reopened = counters.n_reopened;
    s.n_forced = counters.n_forced;
    return s;
}

// ---------------------------------------------------------------- C ABI

extern "C" int kvq_cache_count(void) {
    std::lock_guard<std::mutex> lock(live_mutex);
    return (int) live.size();
}

extern "C" int kvq_cache_stats(int i, kvq_stats * out) {
    std::lock_guard<std::mutex> lock(live_mutex);
    if (i < 0 || i >= (int) live.size() || !out) {
        kvq_set_error("no live cache number " + std::to_string(i));
        return KVQ_ERR_ARGUMENT;
    }
    *out = live[i]->stats();
    return KVQ_OK;
}

extern "C" int kvq_cache_fetched(int i, int n, int32_t * il, uint64_t * counts) {
    std::lock_guard<std::mutex> lock(live_mutex);
    if (i < 0 || i >= (int) live.size() || n < 0 || (n && (!il || !counts))) {
        kvq_set_error("no live cache number " + std::to_string(i));
        return -1;
    }
    int found = 0;
    for (const auto & l : live[i]->layers) {
        if (!l->d.k.bytes_far) { continue; }
        if (found < n) {
            kvq_stats s = {};
            for (const auto & policy : l->policies) { policy->tell(s); }
            const uint64_t of_layer[4] = { s.n_fetched, s.n_wanted, s.n_hits, s.n_steps };
            std::copy(of_layer, of_layer + 4, counts + 4 * found);
            il[found] = l->d.il;
        }
        found++;
    }
    return found;
}

extern "C" const char * kvq_cache_line(int i) {
    static thread_local std::string line;
    std::lock_guard<std::mutex> lock(live_mutex);
    line = i >= 0 && i < (int) live.size() ? live[i]->load_line() : "";
    return line.c_str();
}

extern "C" int kvq_cache_split(int i, int il) {
    std::lock_guard<std::mutex> lock(live_mutex);
    kvq_kv_layer * l = i >= 0 && i < (int) live.size() ? live[i]->layer(il) : nullptr;
    if (!l) {
        kvq_set_error("no such layer: cache " + std::to_string(i) + ", layer " + std::to_string(il));
        return -1;
    }
    const kvq_rotor * rotor = l->transforms[0] ? l->transforms[0]->rotor : nullptr;
    if (!rotor || rotor->rope().multi() || rotor->rope().n_dims != l->d.k.codec.head_size) { return KVQ_SPLIT_NONE; }
    return rotor->rope().neox ? KVQ_SPLIT_NEOX : KVQ_SPLIT_NORM;
}

extern "C" int64_t kvq_cache_queries(int i, int il, int n, double * out) {
    std::lock_guard<std::mutex> lock(live_mutex);
    const kvq_kv_layer * l = i >= 0 && i < (int) live.size() ? live[i]->layer(il) : nullptr;
    if (!l || n < 0 || (n && !out)) {
        kvq_set_error("no such layer: cache " + std::to_string(i) + ", layer " + std::to_string(il));
        return -1;
    }
    const std::vector<double> & square = l->queries.square;
    for (size_t k = 0; k < std::min(square.size(), (size_t) n); k++) { out[k] = square[k] / (double) l->queries.n; }
    return (int64_t) square.size();
}

// Rows as calibration needs them; a lane of open pages gives them exactly as they came.
extern "C" int kvq_cache_rows(int i, int il, int value, int stream, int cell, int n, float * out) {
    std::lock_guard<std::mutex> lock(live_mutex);
    kvq_kv_layer * l = i >= 0 && i < (int) live.size() ? live[i]->layer(il) : nullptr;
    if (!l || !out || stream < 0 || stream >= l->d.n_stream || cell < 0 || n < 0 || n > l->d.n_cells - cell) {
        kvq_set_error("no such rows: cache " + std::to_string(i) + ", layer " + std::to_string(il) + ", cells " +
            std::to_string(cell) + "+" + std::to_string(n));
        return KVQ_ERR_ARGUMENT;
    }
    const kvq_lane & lane = value ? *l->v : *l->k;
    const kvq_lane_layout & x = lane.layout();
    const size_t width = (size_t) x.n_head * x.codec.head_size;
    std::vector<uint16_t> rows(width * n);
    lane.read(stream, cell, n, rows.data());
    kvq_cpu_f16_to_f32(rows.data(), out, (int64_t) rows.size());
    kvq_rotor * rotor = !value && l->transforms[0] ? l->transforms[0]->rotor : nullptr;
    for (int t = 0; rotor && t < n; t++) {
        kvq_tags_enter(x, *rotor, &rows[t * width], 1);
        const int32_t pos = kvq_tag_get(x, &rows[t * width], (size_t) x.codec.head_size);
        rotor->cover(pos);
        for (int h = 0; h < x.n_head; h++) {
            rotor->apply(pos, true, out + t * width + (size_t) h * x.codec.head_size);
        }
    }
    return KVQ_OK;
}

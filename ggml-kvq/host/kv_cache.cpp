#include "kv_cache.h"

#include "../cpu/cpu.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

kvq_lane_id kvq_parse_cache_name(const char * name) {
    kvq_lane_id id;
    if (strncmp(name, "cache_", 6)) { return id; }
    const char * l = strrchr(name, '_');
    int il = 0, end = 0;
    if (!l || l - name < 6 || (l[-1] != 'k' && l[-1] != 'v') || sscanf(l, "_l%d%n", &il, &end) != 1 || il < 0 ||
        (l[end] && l[end] != ' ')) {
        return id; // "cache_k_l3 (view)" still names the lane
    }
    id.il = il;
    id.value = l[-1] == 'v';
    id.tag.assign(name + 6, l - 1);
    return id;
}

// ---------------------------------------------------------------- draft

void kvq_cache_draft::reset() {
    layers.clear();
    asked.clear();
    bytes_asked = bytes_nominal = bytes_upstream = 0;
    err.clear();
}

bool kvq_cache_draft::begin(int il) {
    reset();
    if ((for_draft ? kvq_config_draft(config, model, err) : kvq_config_current(config, model, err)) != KVQ_OK) {
        return false;
    }
    predicts = model.n_layer_nextn > 0 && il >= model.n_layer - model.n_layer_nextn;
    if (predicts && kvq_draft_asked()) {
        kvq_model_info none;
        if (kvq_config_draft(config, none, err) != KVQ_OK) { return false; }
    }
    return kvq_calibration_for(config, model, calibration, err) == KVQ_OK;
}

// What a method may know of a layer; prev: the one before it in the same cache, or NULL.
static kvq_layer_context context_of(
    const kvq_model_info & model, const kvq_draft_layer & d, const kvq_draft_layer * prev) {
    const int n_model = model.n_attention(), gap = prev ? d.number - prev->number - 1 : 0;
    return { d.number, n_model > 0 ? n_model : 32, d.shape, prev ? &prev->shape : nullptr, gap };
}

// Keys of n_embd channels, of which the first are the values too; altogether: two halves.
static kvq_layer_shape latent_shape(int il, int latent, int n_embd) {
    const int first = latent == n_embd ? (int) kvq_pad((size_t) n_embd / 2, 16) : latent;
    return { il, 1, first, n_embd - first };
}

size_t kvq_cache_draft::add(const char * name, int n_embd, int n_cells, int n_stream, bool is_f16) {
    const kvq_lane_id id = kvq_parse_cache_name(name);
    const bool next = last.il >= 0 && (last.il < id.il || (last.il == id.il && id.value && !last.value));
    last = id;
    const bool begun = next || begin(id.il);
    if (layers.empty() || layers.back().il != id.il) {
        layers.emplace_back();
        layers.back().il = id.il;
        layers.back().number = model.number_of(id.il);
    }
    kvq_draft_layer & d = layers.back();
    d.n_cells = n_cells;
    d.n_stream = n_stream;
    (id.value ? d.n_embd_v : d.n_embd_k) = n_embd;
    (id.value ? d.has_v : d.has_k) = true;
    if (!begun || !err.empty()) { return 0; }
    if (!is_f16) {
        err = "the cache type is not f16: drop -ctk and -ctv, the method chooses the format";
        return 0;
    }
    if (!d.has_k) { // a query for values alone
        d.n_embd_k = n_embd;
    }
    d.latent = id.value ? 0 : model.latent_of(n_embd);
    d.shape = d.latent ? latent_shape(d.il, d.latent, n_embd)
                       : kvq_guess_shape(model, d.il, d.n_embd_k, id.value ? d.n_embd_v : d.n_embd_k);
    return plan_lane(d, id.value, n_embd);
}

bool kvq_cache_draft::add_known(const kvq_layer_shape & shape, int latent, int n_cells, int n_stream) {
    if (layers.empty() && !begin(shape.il)) { return false; }
    layers.emplace_back();
    kvq_draft_layer & d = layers.back();
    d.il = shape.il;
    d.number = model.number_of(shape.il);
    d.latent = latent;
    d.shape = latent ? latent_shape(shape.il, latent, shape.head_size_k) : shape;
    d.n_embd_k = shape.n_head_kv * shape.head_size_k;
    d.n_embd_v = latent ? 0 : shape.n_head_kv * shape.head_size_v;
    d.n_cells = n_cells;
    d.n_stream = n_stream;
    d.has_k = true;
    d.has_v = !latent;
    plan_lane(d, false, d.n_embd_k);
    if (!latent) { plan_lane(d, true, d.n_embd_v); }
    return err.empty();
}

// of the last layer
size_t kvq_cache_draft::plan_lane(kvq_draft_layer & d, bool value, int n_embd) {
    const kvq_layer_context c = context_of(model, d, layers.size() > 1 ? &layers[layers.size() - 2] : nullptr);
    if (config.method->plan(config.options, c, d.plan, err) != KVQ_OK) { return 0; }
    bytes_nominal += kvq_pad(2 * (size_t) n_embd * d.n_cells * d.n_stream, KVQ_ALIGN);
    if (d.latent) {
        if (!kvq_plan_latent(d.plan, *config.method, d.shape, d.latent, err)) { return 0; }
        d.k = kvq_make_lane_layout(d.plan, false, 1, d.n_cells, d.n_stream);
        d.v = kvq_make_lane_layout(d.plan, true, 1, d.n_cells, d.n_stream);
        return d.k.bytes() + d.v.bytes();
    }
    const int prev = layers.size() > 1 ? layers[layers.size() - 2].il : -1;
    if (d.plan.mean && !calibration->fits(d.il, prev, d.plan, d.n_embd_k, value ? d.n_embd_v : 0, err)) { return 0; }
    kvq_lane_layout & l = value ? d.v : d.k;
    l = kvq_make_lane_layout(d.plan, value, d.shape.n_head_kv, d.n_cells, d.n_stream);
    return l.bytes();
}

std::string kvq_cache_draft::declined() const {
    bool indexer = !layers.empty() && model.indexer_key;
    for (const kvq_draft_layer & d : layers) {
        indexer = indexer && !d.latent && d.n_embd_k == model.indexer_key &&
            d.n_embd_k != model.n_head_kv * model.head_size_k;
    }
    const std::string n = std::to_string(layers.size()), s = layers.size() == 1 ? "" : "s";
    return indexer                       ? n + " indexer layer" + s
        : predicts && !kvq_draft_asked() ? n + " layer" + s + " for multi-token prediction"
                                         : "";
}

// Architectures that llama.cpp computes without flash attention whatever was asked for, and why.
static const struct {
    const char *arch, *why;
} no_flash[] = {
    { "grok", "its attention logits go through tanh" },
    { "t5", "its attention logits have a bias for every pair of positions" },
    { "minimax-m3", "rows of the cells that an indexer picks are gathered" },
};

bool kvq_cache_draft::complete() {
    for (const auto & x : no_flash) {
        if (err.empty() && model.arch == x.arch) {
            err = "llama.cpp computes architecture " + model.arch + " without flash attention (" + x.why +
                "), which this cache needs: run this model without --kv-method";
        }
    }
    for (const kvq_draft_layer & d : layers) {
        if (err.empty() && !d.has_k) {
            err = "layer " + std::to_string(d.il) + " keeps values without keys: run this model without --kv-method";
        } else if (err.empty() && !d.has_v && !d.latent) {
            err = "layer " + std::to_string(d.il) + " keeps keys without values" +
                (model.arch.empty() ? ", and the model's file is not known: set KVQ_MODEL if this is latent attention"
                                    : ": run this model without --kv-method");
        }
    }
    return err.empty();
}

// ---------------------------------------------------------------- cache

static std::mutex live_mutex;
static std::vector<kvq_kv_cache *> live;

kvq_kv_cache::kvq_kv_cache(const kvq_cache_draft & draft, kvq_device & device) :
    device(device), config(draft.config), model(draft.model), calibration(draft.calibration), scratch(device) {
    size_t nb = 0;
    for (const kvq_draft_layer & d : draft.layers) {
        for (const kvq_lane_layout * l : { &d.k, &d.v }) {
            nb += kvq_pad(l->bytes_codes + l->bytes_params + l->bytes_window + 1, KVQ_ALIGN_SLAB);
        }
        nb += kvq_pad(sizeof(kvq_page) * (size_t) d.n_stream * (d.k.n_pages + d.k.n_store), KVQ_ALIGN_SLAB);
        // maps
        nb += d.plan.keep > 0.0f
            ? kvq_pad(4 * (size_t) d.n_stream * d.k.n_store * d.k.n_head * d.k.page_cells, KVQ_ALIGN_SLAB)
            : 0;
    }
    device.reserve(nb);
    for (const kvq_draft_layer & d : draft.layers) {
        layers.emplace_back(new kvq_kv_layer);
        layers.back()->ordinal = (int) layers.size() - 1;
        layers.back()->d = d;
        is_ok = is_ok && build(*layers.back());
    }
    link();
    const auto state = config.options.values.find("state");
    compact = state != config.options.values.end() && state->second != "rows";
    std::lock_guard<std::mutex> lock(live_mutex);
    live.push_back(this);
}

bool kvq_kv_cache::append(const kvq_draft_layer & d) {
    if (chain && counters.n_sealed) { return false; }
    layers.emplace_back(new kvq_kv_layer);
    layers.back()->ordinal = (int) layers.size() - 1;
    layers.back()->d = d;
    is_ok = is_ok && build(*layers.back());
    link();
    return is_ok;
}

kvq_kv_cache::~kvq_kv_cache() {
    if (positions_there) { device.free(positions_there, 8 * positions.size()); }
    std::lock_guard<std::mutex> lock(live_mutex);
    live.erase(std::find(live.begin(), live.end(), this));
}

bool kvq_kv_cache::build(kvq_kv_layer & l) {
    kvq_kv_layer * prev = l.ordinal ? layers[l.ordinal - 1].get() : nullptr;
    l.v.reset();
    l.k.reset();
    l.spans.init(l.d.n_stream, l.d.k.n_pages + (l.d.plan.keep > 0.0f ? l.d.k.n_store : 0), l.d.k.page_cells);
    l.k.reset(new kvq_lane(
        l.d.k, false, l.d.k.shares_codes ? prev->k.get() : nullptr, &l.spans, &scratch, &counters, device));
    l.v.reset(
        new kvq_lane(l.d.v, true, l.d.v.shares_codes ? prev->v.get() : nullptr, &l.spans, &scratch, &counters, device));
    if (!l.k->ok() || !l.v->ok()) { return false; }
    if (l.d.plan.keep > 0.0f) {
        l.slots.init(*l.k, *l.v, l.spans, l.saliency, l.d.plan.keep, l.d.plan.recent);
        l.k->set_slots(&l.slots);
        l.v->set_slots(&l.slots);
    }
    if (l.d.plan.probe > 0.0f) {
        l.saliency.init(l.d.k, l.d.plan.probe, l.d.plan.normalise, (uint32_t) l.d.number,
            l.d.plan.keep > 0.0f && !l.d.k.codec.n_hi ? KVQ_PROMPT_ROWS : 1, &device);
        l.k->set_saliency(&l.saliency);
        l.v->set_saliency(&l.saliency);
    }
    kvq_transform k, v;
    if (l.d.plan.mean) {
        k.mean = calibration->layers.at(l.d.il).k_mean.data();
        v.mean = calibration->layers.at(l.d.il).v_mean.data();
    }
    if (l.d.plan.pre_rope && positions.empty()) {
        n_positions = (size_t) l.d.k.n_pages * l.d.k.page_cells;
        positions.assign(n_positions * l.d.n_stream, -1);
        sealed = positions;
        sealed_users.assign((size_t) l.d.k.n_pages * l.d.n_stream, 0);
        apart.assign(sealed_users.size(), 0);
        if (!device.is_host()) {
            positions_there = (int32_t *) device.alloc(8 * positions.size());
            if (!positions_there) { return false; }
        }
    }
    k.positions = positions.data();
    k.sealed = sealed.data();
    k.users = sealed_users.data();
    k.apart = apart.data();
    k.positions_there = positions_there;
    k.sealed_there = positions_there ? positions_there + positions.size() : nullptr;
    l.k->set_transform(k);
    l.v->set_transform(v);
    return true;
}

void kvq_kv_cache::link() {
    chain.reset();
    if (!is_ok || layers.empty() || !layers[0]->d.plan.k.chained) { return; }
    const kvq_draft_layer & d = layers[0]->d;
    chain.reset(new kvq_chain(d.n_stream, d.k.n_pages, d.k.page_cells, d.k.n_head * d.k.codec.head_size,
        d.plan.v.chained ? d.v.n_head * d.v.codec.head_size : 0, device));
    is_ok = chain->ok();
    for (auto & l : layers) {
        chain->add_layer(l->k.get(), l->v.get(), l->ordinal ? calibration->layers.at(l->d.il).w : kvq_chain_weights());
        for (kvq_lane * lane : { l->k.get(), l->v.get() }) {
            kvq_transform t = lane->transform();
            t.chain = lane == l->k.get() || d.plan.v.chained ? chain.get() : nullptr;
            t.ordinal = l->ordinal;
            lane->set_transform(t);
        }
    }
}

bool kvq_kv_cache::set_rope(kvq_kv_layer & l, const kvq_rope & rope, std::string & err) {
    kvq_transform t = l.k->transform();
    if (rope.n_dims == 0 ? !t.rotor : t.rotor && t.rotor->rope() == rope) { return true; }
    if (counters.n_sealed) {
        err = "layer " + std::to_string(l.d.il) +
            " changed its rotary embedding after keys were stored: clear the cache first";
        return false;
    }
    t.rotor = nullptr;
    for (auto & r : rotors) { t.rotor = rope.n_dims && r->rope() == rope ? r.get() : t.rotor; }
    if (rope.n_dims && !t.rotor) {
        rotors.emplace_back(new kvq_rotor(rope, std::min(l.d.n_cells, 1 << 20)));
        t.rotor = rotors.back().get();
    }
    l.k->set_transform(t);
    return true;
}

const int32_t * kvq_kv_cache::positions_of(const kvq_kv_layer & l, const int32_t * source, int64_t n) {
    kvq_rotor * rotor = l.k->transform().rotor;
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

void kvq_kv_cache::shift_positions(kvq_kv_layer & l, int stream, const int32_t * by) {
    if (l.n_shifts <= n_shifts) {
        return; // another layer did
    }
    int32_t top = 0;
    for (int c = 0; c < l.d.n_cells; c++) {
        int32_t & p = positions[(size_t) stream * n_positions + c];
        p = p < 0 ? p : std::max(p + by[c], 0);
        top = std::max(top, p);
    }
    for (auto & r : rotors) { r->reach(top); }
    if (positions_there) {
        const size_t at = (size_t) stream * n_positions,
                     n_pages = sealed_users.size() / (positions.size() / n_positions), n = n_positions / n_pages;
        device.put(positions_there + at, positions.data() + at, 4 * n_positions);
        for (size_t p = 0; p < n_pages; p++) {
            apart[stream * n_pages + p] = kvq_moved((int) n, &positions[at + p * n], &sealed[at + p * n]);
        }
    }
}

bool kvq_kv_cache::stayed(int stream) const {
    const size_t n_pages = positions.empty() ? 0 : sealed_users.size() / (positions.size() / n_positions);
    for (size_t i = stream * n_pages; i < (stream + 1) * n_pages; i++) {
        if (apart[i] && sealed_users[i]) { return false; }
    }
    return true;
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
        const kvq_layer_context c = context_of(model, d, planned.empty() ? nullptr : &planned.back());
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
    chain.reset();
    for (size_t i = layers.size(); i > 0; i--) { // sharers before their owners
        layers[i - 1]->v.reset();
        layers[i - 1]->k.reset();
    }
    for (size_t i = 0; i < layers.size(); i++) {
        layers[i]->d = planned[i];
        if (!build(*layers[i])) {
            err = "out of memory while rebuilding the KV cache: lower -c";
            return false;
        }
    }
    link();
    return true;
}

void kvq_kv_cache::commit(int n_threads) {
    for (auto & l : layers) { // graph order: owners of shared codes first
        l->k->commit(n_threads);
        l->v->commit(n_threads);
    }
    device.flush();
}

void kvq_kv_cache::clear() {
    for (auto & l : layers) {
        l->k->clear();
        l->v->clear();
    }
    for (auto & r : rotors) {
        if (device.is_host()) { r->forget(); } // another device has copies
    }
    ubatch = {};
    refused = refused && arrivals.damage.empty(); // a state that was refused is gone
    arrivals.reset();
}

kvq_stats kvq_kv_cache::stats() const {
    kvq_accounting sum;
    for (const auto & l : layers) {
        sum.add(l->d.k, false);
        sum.add(l->d.v, true);
    }
    sum.finish();
    kvq_stats & s = sum.s;
    strncpy(s.method, config.method->info.name, sizeof(s.method) - 1);
    strncpy(s.options, config.options_text.c_str(), sizeof(s.options) - 1);
    strncpy(s.kernel, device.name(), sizeof(s.kernel) - 1);
    s.n_layer = (int32_t) layers.size();
    s.n_cells = layers.empty() ? 0 : layers[0]->d.n_cells;
    s.n_stream = layers.empty() ? 0 : layers[0]->d.n_stream;
    s.bytes_scratch = scratch.bytes();
    s.n_sealed = counters.n_sealed;
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

extern "C" const char * kvq_cache_line(int i) {
    static thread_local std::string line;
    std::lock_guard<std::mutex> lock(live_mutex);
    line = i >= 0 && i < (int) live.size() ? live[i]->load_line() : "";
    return line.c_str();
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
    kvq_rotor * rotor = lane.transform().rotor;
    for (int t = 0; rotor && t < n; t++) {
        kvq_tags_enter(x, *rotor, &rows[t * width], 1);
        const int32_t pos = kvq_tag_get(x, &rows[t * width], (size_t) x.codec.head_size);
        rotor->reach(pos);
        for (int h = 0; h < x.n_head; h++) {
            rotor->apply(pos, true, out + t * width + (size_t) h * x.codec.head_size);
        }
    }
    return KVQ_OK;
}

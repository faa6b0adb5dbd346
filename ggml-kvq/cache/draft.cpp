#include "draft.h"

#include "engine/host.h"
#include "level.h"

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
    fitted_to.clear();
    err.clear();
}

kvq_cache_before kvq_cache_draft::as_before() const {
    kvq_cache_before out;
    for (const kvq_draft_layer & d : layers) {
        out.layers.push_back(d.il);
        out.channels += d.n_embd_k + d.n_embd_v;
        out.n_cells = d.n_cells;
        out.windowed = more_bits(d) > 0;
    }
    out.model = layers.empty() ? "" : config.model_path;
    return out;
}

// Without a method, options of the one that fits itself to bits. They count in this cache, window and tables included:
// that is what the declared type allows. The f16 window of a short one is short, too: else it takes most of the bits,
// and below AT_LEAST cells it does so at any length. Codes and tables end at TOP bits, with heads of 64. Where states
// may keep any row in 8 bits (ROW, store/small_rows.h), the window takes what a larger type leaves: 16 bits a value of
// a cell.
static std::string options_for(const kvq_declared & declared, int n_cells) {
    constexpr int AT_LEAST = 512, SHORT = 2048, PAGE = 32, MOST = 4096;
    constexpr double TOP = 4.6, ROW = 8.25;
    int window = n_cells < SHORT ? PAGE : 0; // 0: the method's own
    if (declared.bits() >= ROW) {
        const int left = (int) (n_cells * (declared.bits() - TOP) / 16) - PAGE;
        window = std::min(std::max(left / PAGE * PAGE, window), MOST);
    }
    char text[64];
    snprintf(text, sizeof(text), "bits=%.6g,at=%d", declared.bits(), std::max(n_cells, AT_LEAST));
    // coordinates stand with the keys, whose side would exceed what is declared for it
    return text + (window ? ",window=" + std::to_string(window) : "") + ",coordinates=off";
}

void kvq_cache_draft::leave_coords() {
    kvq_options & o = config.options;
    const bool asked = o.given.count("coords") && !o.of_data.count("coords");
    if (o.values.count("coords") && !asked && !o.is("coordinates", "on")) { o.values["coords"] = "0"; }
}

bool kvq_cache_draft::begin(int il, int n_cells, const kvq_declared & declared) {
    const kvq_cache_before last_one = as_before(); // or this very cache, which is asked for once more
    if (!last_one.layers.empty() && std::count(last_one.layers.begin(), last_one.layers.end(), il) == 0) {
        before = last_one;
    }
    reset();
    room = SIZE_MAX;
    const bool fitting = !declared.is_f16() && declared.is_served();
    const std::string instead = fitting ? options_for(declared, n_cells) : "";
    if ((for_draft ? kvq_config_draft(config, model, err) : kvq_config_current(config, model, err, instead)) !=
        KVQ_OK) {
        return false;
    }
    if (config.is_instead) { fitted_to = declared.name; }
    if (beside_host) { leave_coords(); } // read slowly there: nothing takes them unless asked
    predicts = model.n_layer_nextn > 0 && il >= model.n_layer - model.n_layer_nextn;
    if (predicts && kvq_draft_asked()) {
        kvq_model_info none;
        if (kvq_config_draft(config, none, err) != KVQ_OK) { return false; }
    }
    return kvq_calibration_for(config, model, calibration, err) == KVQ_OK;
}

kvq_layer_context kvq_context_of(
    const kvq_model_info & model, const kvq_draft_layer & d, const kvq_draft_layer * prev) {
    const int n_model = model.n_attention(), gap = prev ? d.number - prev->number - 1 : 0;
    return { d.number, n_model > 0 ? n_model : 32, d.shape, prev ? &prev->shape : nullptr, gap, std::max(d.level, 0) };
}

// Keys of n_embd channels, of which the first are the values too; altogether: two halves.
static kvq_layer_shape latent_shape(int il, int latent, int n_embd) {
    const int first = latent == n_embd ? (int) kvq_pad((size_t) n_embd / 2, 16) : latent;
    return { il, 1, first, n_embd - first };
}

// May a tensor of this type be a cache? false, with error(): it may not.
bool kvq_cache_draft::takes(const kvq_draft_layer & d, bool value, const kvq_declared & declared) {
    const std::string flag = value ? "-ctv" : "-ctk", is = "the cache type is " + declared.name + " (" + flag + ")";
    if (!declared.is_f16() && d.latent) {
        err = is + ": latent attention takes f16 alone: drop -ctk and -ctv, the method chooses the format";
    } else if (!declared.is_served()) {
        err = is + ", and this cache takes f16, q8_0, q5_1, q5_0, q4_1, q4_0 and iq4_nl: give one of these, or drop " +
            flag;
    } else if (value && !fitted_to.empty() && declared.name != fitted_to) {
        err = "keys are declared " + fitted_to + " and values " + declared.name +
            ", and no method is named: give -ctk and -ctv one type, or set KVQ_METHOD";
    }
    return err.empty();
}

// Is what the lane takes of a long context within what is declared, and can a state hold it in rows of that size?
// false, with error()
bool kvq_cache_draft::fits(const kvq_draft_layer & d, bool value, const kvq_lane_layout & l) {
    const kvq_declared & declared = d.declared[value];
    if (declared.is_f16()) { return true; }
    const std::string method = std::string("method ") + config.method->info.name, side = value ? "values" : "keys",
                      is = side + " are declared " + declared.name, what = kvq_needs_f16_rows(l);
    const double bits = kvq_stored_bits(d.plan, value, l.n_head);
    if (!what.empty()) {
        err = is + ", and " + method + " " + what + ", which its states hold in f16: drop -ctk and -ctv";
    } else if (bits > declared.bits()) {
        char text[96];
        snprintf(text, sizeof(text), " takes %.2f bits a value and %s has %.2f", bits, declared.name.c_str(),
            declared.bits());
        err = is + ", and " + method + text +
            ": declare a larger type, drop -ctk and -ctv, or take a method of fewer bits";
    }
    return err.empty();
}

size_t kvq_cache_draft::add(const char * name, int n_embd, int n_cells, int n_stream, const kvq_declared & declared) {
    const kvq_lane_id id = kvq_parse_cache_name(name);
    const bool next = last.il >= 0 && (last.il < id.il || (last.il == id.il && id.value && !last.value));
    last = id;
    const bool begun = next || begin(id.il, n_cells, declared);
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
    if (!d.has_k) { // a query for values alone
        d.n_embd_k = n_embd;
    }
    d.latent = id.value ? 0 : model.latent_of(n_embd);
    d.declared[id.value] = declared;
    if (!takes(d, id.value, declared)) { return 0; }
    d.shape = d.latent ? latent_shape(d.il, d.latent, n_embd)
                       : kvq_guess_shape(model, d.il, d.n_embd_k, id.value ? d.n_embd_v : d.n_embd_k);
    return plan_lane(d, id.value, n_embd);
}

bool kvq_cache_draft::add_known(
    const kvq_layer_shape & shape, int latent, int n_cells, int n_stream, const kvq_declared * declared) {
    if (layers.empty() && !begin(shape.il, n_cells, declared[0])) { return false; }
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
    std::copy_n(declared, 2, d.declared);
    if (takes(d, false, declared[0]) && (latent || takes(d, true, declared[1]))) {
        plan_lane(d, false, d.n_embd_k);
        if (!latent) { plan_lane(d, true, d.n_embd_v); }
    }
    if (!err.empty()) { layers.pop_back(); } // a graph that asks once more is told the same
    return err.empty();
}

double kvq_cache_draft::more_bits(const kvq_draft_layer & d) const {
    const int n = model.n_attention() - (int) before.layers.size(); // layers of this cache
    if (!fitted_to.empty() || !model.window || before.model.empty() || before.model != config.model_path ||
        before.windowed || n < 1) {
        return 0;
    }
    return kvq_more_bits(
        *config.method, config.options, (double) n * 2 * d.n_embd_k, d.n_cells, before.channels, before.n_cells);
}

// Of the layer's cache. ggml asks layer by layer: all of them are taken to be as this one.
kvq_status kvq_cache_draft::level_of(const kvq_draft_layer & d, int & level) {
    const int n = std::max(model.n_attention(), d.number + 1);
    kvq_layer_shape shape = d.shape;
    const bool windowed = model.head_size_k_swa && shape.head_size_k == model.head_size_k_swa;
    const int head_size_v = windowed && model.head_size_v_swa ? model.head_size_v_swa : model.head_size_v;
    shape.head_size_v = head_size_v ? head_size_v : shape.head_size_v; // values may not have been asked for yet
    const std::vector<kvq_layer_shape> shapes((size_t) (model.n_layer ? n : 32), shape);
    const kvq_levels levels = { *config.method, config.options, shapes, (int) shapes.size(), d.n_cells, d.n_stream,
        more_bits(d) };
    return levels.find(level, err);
}

bool kvq_is_part(const kvq_model_info & model, const kvq_draft_layer & d) {
    const int heads = model.heads_of(d.il), own = heads * model.key_of(d.il);
    const int whole = own ? own : heads * model.head_size_k, windowed = own ? 0 : heads * model.head_size_k_swa;
    return !d.latent && whole && d.n_embd_k != windowed && d.n_embd_k < whole;
}

// Of the layer's sealed blocks. What auto decides for its keys holds for its values, and from the first layer on the
// host all others lie there. Room is kept for what a device needs besides blocks: windows and tables of the layers to
// come, taken to be as this one, and f16 rows of a layer, through which prompts are read (twice where means are added).
kvq_place kvq_cache_draft::place_of(kvq_draft_layer & d) {
    if (!beside_host) { return kvq_place::DEVICE; }
    if (d.plan.place != kvq_place::AUTO) { return d.plan.place; }
    if (d.place != kvq_place::AUTO) { return d.place; }
    if (room == SIZE_MAX && free_there) { room = free_there(); }
    size_t nb = 0, nb_blocks = 0, nb_rows = 0;
    bool changed = false;
    for (const bool value : { false, true }) {
        const kvq_lane_layout l =
            kvq_make_lane_layout(d.plan, value, d.latent ? 1 : d.shape.n_head_kv, d.n_cells, d.n_stream);
        nb += l.bytes();
        nb_blocks += l.bytes_codes + l.bytes_params;
        nb_rows += 2 * (size_t) l.n_head * l.codec.head_size * d.n_cells;
        changed = changed || l.centred || l.turned;
    }
    const int n_after = std::max(model.n_attention() - (int) layers.size(), 0);
    const size_t besides = (size_t) n_after * (nb - nb_blocks) + (changed ? 2 : 1) * nb_rows;
    const bool before_lie_there = layers.size() > 1 && layers[layers.size() - 2].place == kvq_place::HOST;
    d.place = !before_lie_there && nb + besides <= room ? kvq_place::DEVICE : kvq_place::HOST;
    room -= std::min(room, d.place == kvq_place::HOST ? nb - nb_blocks : nb);
    return d.place;
}

// of the last layer
size_t kvq_cache_draft::plan_lane(kvq_draft_layer & d, bool value, int n_embd) {
    if (kvq_is_part(model, d)) { leave_coords(); } // they take whole layers
    if (d.level < 0 && level_of(d, d.level) != KVQ_OK) { return 0; }
    const kvq_layer_context c = kvq_context_of(model, d, layers.size() > 1 ? &layers[layers.size() - 2] : nullptr);
    d.plan = {};
    if (config.method->plan(config.options, c, d.plan, err) != KVQ_OK) { return 0; }
    d.plan.place = place_of(d);
    bytes_nominal += kvq_pad(2 * (size_t) n_embd * d.n_cells * d.n_stream, KVQ_ALIGN);
    if (d.latent) {
        if (!kvq_plan_latent(d.plan, *config.method, d.shape, d.latent, err)) { return 0; }
        d.k = kvq_make_lane_layout(d.plan, false, 1, d.n_cells, d.n_stream);
        d.v = kvq_make_lane_layout(d.plan, true, 1, d.n_cells, d.n_stream);
        return d.k.bytes() + d.v.bytes() - d.k.bytes_on_host() - d.v.bytes_on_host();
    }
    const int prev = layers.size() > 1 ? layers[layers.size() - 2].il : -1;
    kvq_lane_layout & l = value ? d.v : d.k;
    l = kvq_make_lane_layout(d.plan, value, d.shape.n_head_kv, d.n_cells, d.n_stream);
    if (l.centred &&
        !calibration->fits(d.il, prev, d.plan, d.n_embd_k, value ? d.n_embd_v : 0, kvq_is_part(model, d), err)) {
        return 0;
    }
    if (!fits(d, value, l)) { return 0; }
    return l.bytes() - l.bytes_on_host();
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

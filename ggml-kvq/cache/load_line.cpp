// What is said of a cache: the line at load, the line when it is freed.
#include "cache.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

static std::string n_layers(size_t n) { return std::to_string(n) + (n == 1 ? " layer" : " layers"); }

// "K 3.2" or "K 2.7 (12 layers of 2 code bits, 4 of 1, 4 shared)"; 0|4-bit: of fast and of slow rotary pairs
static std::string layer_classes(const std::vector<std::unique_ptr<kvq_kv_layer>> & layers, bool value, double bits) {
    std::map<std::string, int> classes;
    for (const auto & l : layers) {
        const kvq_lane_layout & x = value ? l->d.v : l->d.k;
        const std::string name = x.is_f16()  ? "f16"
            : x.shares_codes                 ? "shared codes"
            : !x.codec.bits                  ? "no codes"
            : x.codec.type == KVQ_TYPE_MIXED ? std::to_string(x.codec.n_hi) + " of " + std::to_string(x.page_cells) +
                " cells " + std::to_string(x.codec.hi) + "-bit, others " + std::to_string(x.codec.bits) + "-bit"
            : x.codec.split ? std::to_string(x.codec.fast_bits) + "|" + std::to_string(x.codec.bits) + "-bit halves"
                            : std::to_string(x.codec.bits) + "-bit";
        classes[name + (x.evicts ? ", evicting" : "")]++;
    }
    char text[64];
    snprintf(text, sizeof(text), "%s %.2f bits", value ? "V" : "K", bits);
    std::string out = text;
    if (!layers.empty() && layers[0]->d.latent) {
        snprintf(text, sizeof(text), "%s %.2f bits", value ? "rotary part" : "latent", bits);
        out = text;
    }
    if (classes.size() > 1 || classes.begin()->first.find(' ') != std::string::npos) {
        std::string list;
        for (const auto & c : classes) {
            list += (list.empty() ? "" : ", ") + n_layers((size_t) c.second) + " " + c.first;
        }
        out += " (" + list + ")";
    }
    return out;
}

std::string kvq_kv_cache::words_of_policies(const kvq_stats & s) const {
    std::vector<std::string> names;
    std::string out;
    for (const auto & l : layers) {
        for (const kvq_part & part : l->d.plan.parts) {
            if (std::find(names.begin(), names.end(), part.name) != names.end()) { continue; }
            names.push_back(part.name);
            const kvq_policy_kind * kind = kvq_policy_find(part.name);
            std::vector<kvq_part_of_layer> having;
            for (const auto & x : layers) {
                if (const kvq_part * its = x->d.plan.part(part.name.c_str())) { having.push_back({ x->d.il, its }); }
            }
            if (kind && kind->words) { out += kind->words(having, s); }
        }
    }
    return out;
}

// "8 of 12 layers" when the model has more: the others lie on another device, in another cache, or are llama.cpp's own
// (-ngl, --fit).
std::string kvq_kv_cache::part_of_model() const {
    const int n = (int) layers.size(), n_all = model.n_attention();
    const bool predicts = n && layers[0]->d.il >= model.n_layer - model.n_layer_nextn;
    return model.arch.empty() || predicts || n >= n_all ? "" : std::to_string(n) + " of " + n_layers((size_t) n_all);
}

// "; window: as much as fits, 64 to 2144 tokens": those that the lane with the least room keeps as they came
static std::string words_of_window(const std::vector<std::unique_ptr<kvq_kv_layer>> & layers) {
    int least = 0, most = -1;
    for (const auto & l : layers) {
        for (const kvq_lane_layout * x : { &l->d.k, &l->d.v }) {
            if (!x->pooled) { continue; }
            least = l->d.plan.window;
            most = most < 0 ? x->n_exact() : std::min(most, x->n_exact());
        }
    }
    return most < 0 ? ""
                    : "; window: as much as fits, " + std::to_string(std::min(least, most)) + " to " +
            std::to_string(most) + " tokens";
}

// "; blocks of 12 layers lie in the host's memory, 640.00 MiB: of a full cache a token reads them in 13.4 ms"
static std::string words_of_place(const std::vector<std::unique_ptr<kvq_kv_layer>> & layers, kvq_device & device) {
    double bytes = 0.0;
    size_t n = 0;
    for (const auto & l : layers) {
        n += l->d.k.on_host || l->d.v.on_host;
        bytes += (double) (l->d.k.bytes_on_host() + l->d.v.bytes_on_host());
    }
    if (!n || device.is_host()) { return ""; }
    char text[160], cost[64] = "";
    if (const double speed = device.host_speed()) {
        snprintf(cost, sizeof(cost), ": of a full cache a token reads them in %.1f ms", 1e3 * bytes / speed);
    }
    snprintf(text, sizeof(text), " lie in the host's memory, %.2f MiB%s", bytes / 1048576.0, cost);
    return "; blocks of " + n_layers(n) + text;
}

static std::string capacity(const kvq_stats & s) {
    const std::string slots = s.n_stream > 1 ? " x " + std::to_string(s.n_stream) + " slots" : "";
    return std::to_string(s.n_cells) + " tokens" + slots;
}

// "; declared q4_0: 4.50 bits a value, 3.38 MiB": more than what is taken, or less where the window is most of a cache
static std::string words_of_declared(const std::vector<std::unique_ptr<kvq_kv_layer>> & layers, bool chosen) {
    std::string names;
    double bytes = 0.0, values = 0.0;
    for (const auto & l : layers) {
        const kvq_draft_layer & d = l->d;
        const std::string its = d.declared[0].name == d.declared[1].name || d.latent
            ? d.declared[0].name
            : d.declared[0].name + "/" + d.declared[1].name;
        names = names.empty() || names == its ? its : names;
        for (const bool value : { false, true }) {
            const int n = value ? d.n_embd_v : d.n_embd_k;
            bytes += (double) d.declared[value].row(n) * d.n_cells * d.n_stream;
            values += (double) n * d.n_cells * d.n_stream;
        }
    }
    if (names.empty() || names == "f16") { return ""; }
    char text[160];
    snprintf(text, sizeof(text), "; declared %s: %.2f bits a value, %.2f MiB%s", names.c_str(), 8.0 * bytes / values,
        bytes / 1048576.0, chosen ? ", for which auto has chosen the codes" : "");
    return text;
}

// "; 4.25 bits count at 131072 tokens: these 512 take 7.90 with their f16 window": of a context that is shorter
// top: words_of_top
static std::string words_of_short_context(const kvq_config & config, const kvq_stats & s, const std::string & top) {
    if (!config.method || !config.method->most) { return ""; }
    const kvq_method::limit most = config.method->most(config.options);
    if (most.bits <= 0) { return ""; }
    char text[160];
    snprintf(text, sizeof(text), "; %.4g bits%s", most.bits, most.strict ? "" : ", the default,");
    if (most.n_cells <= s.n_cells || s.bits < most.bits + 0.005 || !top.empty()) {
        return most.strict ? "" : text + std::string(" were chosen");
    }
    const std::string out = text;
    snprintf(text, sizeof(text), " count at %d tokens: these %d take %.2f with their f16 window", most.n_cells,
        s.n_cells, s.bits);
    return out + text;
}

// "; auto ends at 4.22 bits": more were asked for than its highest level takes where bits count
static std::string words_of_top(
    const kvq_config & config, const std::vector<std::unique_ptr<kvq_kv_layer>> & layers, int n_layer) {
    constexpr double CLOSE = 0.1; // what the levels of a model lie apart, at most
    if (!config.method || !config.method->most || !config.method->n_levels) { return ""; }
    const kvq_method::limit most = config.method->most(config.options);
    if (most.bits <= 0 || layers.empty() || layers[0]->d.level < config.method->n_levels(config.options, n_layer) - 1) {
        return "";
    }
    double bytes = 0.0, values = 0.0;
    for (const auto & l : layers) {
        for (const bool value : { false, true }) {
            const kvq_lane_layout & of = value ? l->d.v : l->d.k;
            const kvq_lane_layout x = kvq_make_lane_layout(l->d.plan, value, of.n_head, most.n_cells, 1);
            bytes += (double) x.bytes();
            values += (double) x.n_head * x.codec.head_size * x.n_cells;
        }
    }
    const double top = values > 0 ? 8.0 * bytes / values : most.bits;
    if (most.bits < top + CLOSE) { return ""; }
    char text[64];
    snprintf(text, sizeof(text), "; auto ends at %.2f bits", top);
    return text;
}

// Where calibrated data come from, or that no data are there.
static std::string words_of_data(const kvq_config & config) {
    if (config.lacks_means) {
        return "; nothing is known of this model's keys, which costs quality at these bits: ggml-kvq plugin -m MODEL "
               "measures them once";
    }
    const kvq_options & o = config.options;
    const std::string none = o.values.count("coords") && o.is("coordinates", "on") && o.num("coords") == 0
        ? "; coordinates lose more than they bring with this model: it has none"
        : "";
    return none +
        (config.config_from == "measured"          ? "; data measured on the model's first use"
                : config.config_from == "embedded" ? "; calibrated data in the model's file"
                : config.config_path.empty()       ? ""
                                                   : "; calibrated data in " + config.config_path);
}

std::string kvq_kv_cache::load_line() const {
    const kvq_stats s = stats();
    const double MiB = 1024.0 * 1024.0;
    char text[384];
    const double saved = (double) s.bytes_f16 - (double) s.bytes_total;
    snprintf(text, sizeof(text),
        ": %.2f MiB KV cache instead of %.2f MiB at f16 (%s %.2f MiB, %.1fx), %s, device %s, kernels %s",
        (double) s.bytes_total / MiB, (double) s.bytes_f16 / MiB, saved < 0 ? "takes more:" : "saved",
        (saved < 0 ? -saved : saved) / MiB, (double) s.bytes_f16 / (double) std::max<uint64_t>(s.bytes_total, 1),
        capacity(s).c_str(), device_name.c_str(), s.kernel);
    std::string reading;
    size_t nb_workspace = 0; // of one layer at a time
    for (const auto & l : layers) { nb_workspace = std::max(nb_workspace, device.bytes_workspace(l->d.k, l->d.v)); }
    if (nb_workspace) {
        char more[96];
        snprintf(more, sizeof(more), "; prompts and attention take up to %.2f MiB more", (double) nb_workspace / MiB);
        reading += more;
    }
    std::map<std::string, int> slow; // what layers are read by that no kernel was made for
    for (const auto & l : layers) {
        if (const char * by = device.slow_reading(l->d.plan.flags, l->d.k, l->d.v)) { slow[by]++; }
    }
    for (const auto & s : slow) {
        reading += "; no kernel for tokens has these heads and bits: " + n_layers((size_t) s.second) +
            (s.second == 1 ? " is read by " : " are read by ") + s.first;
    }
    const std::string part = part_of_model(), top = words_of_top(config, layers, model.n_attention());
    reading = (part.empty() ? "" : "; " + part) + words_of_declared(layers, config.is_instead) +
        words_of_short_context(config, s, top) + top + words_of_window(layers) + words_of_place(layers, device) +
        words_of_policies(s) + words_of_data(config) + reading;
    const std::string note = reading +
        (model.arch.empty() && s.bits_headline < 16 ? ", model file unknown (set KVQ_MODEL): presets as for 32 layers"
                                                    : "");
    return std::string("ggml-kvq: ") + s.method + (config.asked_text.empty() ? "" : " [" + config.asked_text + "]") +
        ", " + layer_classes(layers, false, s.bits_k) + ", " + layer_classes(layers, true, s.bits_v) + text + note;
}

std::string kvq_kv_cache::closing_line() const {
    const kvq_stats s = stats();
    const std::string part = part_of_model();
    std::string text = std::string("ggml-kvq: ") + s.method + ": " + (part.empty() ? "" : part + ": ");
    if (!strcmp(s.method, "f16")) { return text + "every token was kept as it came"; }
    if (!s.n_sealed) { return text + "no page was sealed: all that was read lay in the f16 window"; }
    const uint64_t n_lanes = std::max<uint64_t>(1, 2 * layers.size());
    char what[160];
    snprintf(what, sizeof(what), "%llu pages sealed, about %llu tokens of every layer were read from codes",
        (unsigned long long) s.n_sealed, (unsigned long long) (s.n_sealed / n_lanes * (uint64_t) s.page_cells));
    text += what;
    return s.n_reopened ? text + "; " + std::to_string(s.n_reopened) + " pages were written again" : text;
}

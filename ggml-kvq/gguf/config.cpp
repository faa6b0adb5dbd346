#include "cache/config.h"
#include "base/settings.h"
#include "fingerprint.h"
#include "cache/lines.h"
#include "measured.h"
#include "open_model.h"
#include "resolve.h"

#include "gguf.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

// ---------------------------------------------------------------- errors, notes

static thread_local std::string last_error;

// A message may quote a damaged file; it stays one line.
void kvq_set_error(const std::string & line) {
    last_error = line;
    for (char & c : last_error) { c = (unsigned char) c < 0x20 ? '?' : c; }
}

static thread_local std::string last_note;

extern "C" const char * kvq_last_note(void) { return last_note.c_str(); }

extern "C" const char * kvq_last_error(void) { return last_error.c_str(); }

static void note(const std::string & line) {
    last_note += (last_note.empty() ? "" : "; ") + line;
    kvq_say("ggml-kvq: " + line);
}

// Variables whose values are not used, each value once a process.
static void note_settings(void) {
    static std::mutex mutex;
    static std::set<std::string> said;
    const std::lock_guard<std::mutex> lock(mutex);
    for (int s = 0; s < (int) kvq_setting::COUNT; s++) {
        const std::string fault = kvq_setting_fault((kvq_setting) s);
        if (!fault.empty() && said.insert(fault).second) { note(fault); }
    }
}

// ---------------------------------------------------------------- kvq_configure

struct request {
    bool set = false;
    std::string method, opts, config, model;
};
static thread_local request configured;

extern "C" int kvq_check(const char * method, const char * opts) {
    const kvq_method * m = kvq_method_find(method);
    if (!m) {
        std::string names;
        for (int i = 0; i < kvq_method_count(); i++) { names += std::string(i ? ", " : "") + kvq_method_at(i)->name; }
        kvq_set_error("unknown method '" + std::string(method ? method : "") + "': choose one of " + names);
        return KVQ_ERR_METHOD;
    }
    kvq_options o;
    std::string err;
    kvq_status status = kvq_options_parse(*m, opts, o, err);
    if (status == KVQ_OK) { // ranges, on a shape that no method refuses
        const kvq_layer_shape shape = { 0, 8, 128, 128 };
        const kvq_layer_context c = { 0, 128, shape, nullptr, 0, -1 };
        kvq_layer_plan plan;
        status = m->plan(o, c, plan, err);
    }
    if (status != KVQ_OK) { kvq_set_error(err); }
    return status;
}

extern "C" int kvq_configure(const char * method, const char * opts, const char * config, const char * model) {
    last_note.clear();
    kvq_set_error(""); // what is read after a cache was refused must not be of a call before
    if (!method) {
        configured = request{};
        return KVQ_OK;
    }
    const int status = kvq_check(method, opts);
    if (status != KVQ_OK) { return status; }
    configured = { true, method, opts ? opts : "", config ? config : "", model ? model : "" };
    return KVQ_OK;
}

std::string kvq_words_for_caller(const std::string & text) {
    if (configured.set) { return text; } // Python has words of its own for them
    static const struct {
        const char *ours, *variable, *flag;
    } words[] = {
        { "--kv-config (", "KVQ_CONFIG=FILE.gguf (", nullptr },
        { "--kv-config none", "KVQ_CONFIG=none", nullptr },
        { "set predictor=none", "set KVQ_OPTS=predictor=none", "write --kv-opt predictor=none" },
        { "set pairs=none", "set KVQ_OPTS=pairs=none", "write --kv-opt pairs=none" },
        { "set order=none", "set KVQ_OPTS=order=none", "write --kv-opt order=none" },
        { "--kv-method ", "KVQ_METHOD=", nullptr },
    };
    const bool launched = *kvq_setting_text(kvq_setting::LAUNCHER);
    std::string out = text;
    for (const auto & w : words) {
        const size_t at = out.find(w.ours);
        const char * const theirs = launched ? w.flag : w.variable;
        if (at != std::string::npos && theirs) { out.replace(at, strlen(w.ours), theirs); }
    }
    return out;
}

// ---------------------------------------------------------------- the model file

static std::string model_of_command_line(void) {
    FILE * f = fopen("/proc/self/cmdline", "rb");
    if (!f) { return ""; }
    std::string all;
    char buffer[4096];
    size_t n;
    while ((n = fread(buffer, 1, sizeof(buffer), f)) > 0) { all.append(buffer, n); }
    fclose(f);
    std::vector<std::string> args;
    for (size_t at = 0; at < all.size();) {
        const size_t end = std::min(all.find('\0', at), all.size());
        args.push_back(all.substr(at, end - at));
        at = end + 1;
    }
    std::vector<std::string> models;
    for (size_t i = 1; i + 1 < args.size(); i++) {
        if (args[i] == "-m" || args[i] == "--model") { models.push_back(args[++i]); }
    }
    const bool all_run = !args.empty() && args[0].find("llama-bench") != std::string::npos;
    const bool several =
        all_run && (models.size() > 1 || (models.size() == 1 && models[0].find(',') != std::string::npos));
    if (several) {
        std::string all_named;
        for (const std::string & m : models) { all_named += (all_named.empty() ? "" : ",") + m; }
        return kvq_mapped_model(all_named); // they are loaded one at a time
    }
    if (!models.empty()) { return models.back(); } // llama.cpp takes the last
    const std::string by_variable = kvq_setting_text(kvq_setting::LLAMA_MODEL);
    return by_variable.empty() ? kvq_mapped_model() : by_variable; // -hf, a program of the user's own
}

static std::vector<int> get_ints(const gguf_context * g, const std::string & key) {
    const int64_t id = gguf_find_key(g, key.c_str());
    if (id < 0 || gguf_get_kv_type(g, id) != GGUF_TYPE_ARRAY) { return {}; }
    const auto type = gguf_get_arr_type(g, id);
    if (type != GGUF_TYPE_UINT32 && type != GGUF_TYPE_INT32) { return {}; }
    const int32_t * v = (const int32_t *) gguf_get_arr_data(g, id);
    return std::vector<int>(v, v + gguf_get_arr_n(g, id));
}

// An array of flags, which some converters write as whole numbers.
static std::vector<uint8_t> get_bools(const gguf_context * g, const std::string & key) {
    const int64_t id = gguf_find_key(g, key.c_str());
    if (id >= 0 && gguf_get_kv_type(g, id) == GGUF_TYPE_ARRAY && gguf_get_arr_type(g, id) == GGUF_TYPE_BOOL) {
        const uint8_t * v = (const uint8_t *) gguf_get_arr_data(g, id);
        return std::vector<uint8_t>(v, v + gguf_get_arr_n(g, id));
    }
    const std::vector<int> v = get_ints(g, key);
    return std::vector<uint8_t>(v.begin(), v.end());
}

static int64_t get_int(const gguf_context * g, const std::string & key, int64_t missing) {
    const int64_t id = gguf_find_key(g, key.c_str());
    if (id < 0) { return missing; }
    switch (gguf_get_kv_type(g, id)) {
    case GGUF_TYPE_UINT16: return gguf_get_val_u16(g, id);
    case GGUF_TYPE_UINT32: return gguf_get_val_u32(g, id);
    case GGUF_TYPE_INT32: return gguf_get_val_i32(g, id);
    case GGUF_TYPE_UINT64: return (int64_t) gguf_get_val_u64(g, id);
    case GGUF_TYPE_ARRAY: { // per layer: the largest
        int64_t top = missing;
        for (const int x : get_ints(g, key)) { top = std::max<int64_t>(top, x); }
        return top;
    }
    default: return missing;
    }
}

static std::string get_str(const gguf_context * g, const char * key) {
    const int64_t id = gguf_find_key(g, key);
    return id >= 0 && gguf_get_kv_type(g, id) == GGUF_TYPE_STRING ? gguf_get_val_str(g, id) : "";
}

// Which layers have attention: head_count_kv is 0 where they have not. Models that give one number for all layers
// show it by the names of their tensors, of which a file that is one of several holds only some.
static std::vector<uint8_t> attention_layers(const gguf_context * g, const std::string & arch, int n_layer) {
    std::vector<uint8_t> out((size_t) std::max(n_layer, 0), 0);
    const int64_t heads = gguf_find_key(g, (arch + ".attention.head_count_kv").c_str());
    if (heads >= 0 && gguf_get_kv_type(g, heads) == GGUF_TYPE_ARRAY) {
        const auto type = gguf_get_arr_type(g, heads);
        const bool is_int = type == GGUF_TYPE_UINT32 || type == GGUF_TYPE_INT32;
        const bool known = is_int && gguf_get_arr_n(g, heads) >= out.size();
        const int32_t * n = known ? (const int32_t *) gguf_get_arr_data(g, heads) : nullptr;
        for (size_t il = 0; n && il < out.size(); il++) { out[il] = n[il] > 0; }
    } else if (get_int(g, "split.count", 1) <= 1) {
        std::vector<uint8_t> fused(out.size(), 0), state(out.size(), 0);
        for (int64_t i = 0; i < gguf_get_n_tensors(g); i++) {
            int il = 0, end = 0;
            const char * name = gguf_get_tensor_name(g, i);
            if (sscanf(name, "blk.%d.%n", &il, &end) == 1 && end && il >= 0 && il < n_layer) {
                out[il] |= !strncmp(name + end, "attn_k.", 7) || !strncmp(name + end, "attn_kv_", 8);
                fused[il] |= !strncmp(name + end, "attn_qkv.", 9);
                state[il] |= !strncmp(name + end, "ssm_", 4); // linear attention: projections may bear the same name
            }
        }
        for (size_t il = 0; il < out.size(); il++) { out[il] |= fused[il] && !state[il]; }
    }
    const bool all = std::all_of(out.begin(), out.end(), [](uint8_t x) { return x != 0; });
    const bool any = std::any_of(out.begin(), out.end(), [](uint8_t x) { return x != 0; });
    return all || !any ? std::vector<uint8_t>() : out;
}

int kvq_model_info::n_attention() const {
    return attends.empty() ? n_layer - n_layer_nextn : (int) std::count(attends.begin(), attends.end(), 1);
}

int kvq_model_info::number_of(int il) const {
    const bool known = (size_t) il < attends.size() && attends[il];
    return known ? (int) std::count(attends.begin(), attends.begin() + il, 1) : il;
}

kvq_status kvq_read_model_info(const std::string & path, kvq_model_info & out, std::string & err) {
    out = kvq_model_info{};
    gguf_init_params params = { /*no_alloc =*/true, /*ctx =*/nullptr };
    gguf_context * g = gguf_init_from_file(path.c_str(), params);
    if (!g) {
        err = "cannot read '" + path + "' as GGUF: give the model's path with -m or KVQ_MODEL";
        return KVQ_ERR_MODEL;
    }
    out.arch = get_str(g, "general.architecture");
    out.method = get_str(g, "kvq.method");
    out.calibrated = gguf_find_key(g, "kvq.version") >= 0;
    uint64_t hash = 0xcbf29ce484222325u;
    const auto mix = [&](const char * text) { // with its final zero
        do { hash = (hash ^ (uint8_t) *text) * 0x100000001b3u; } while (*text++);
    };
    mix(out.arch.c_str());
    const int64_t tokens = gguf_find_key(g, "tokenizer.ggml.tokens");
    if (tokens >= 0 && gguf_get_kv_type(g, tokens) == GGUF_TYPE_ARRAY &&
        gguf_get_arr_type(g, tokens) == GGUF_TYPE_STRING) {
        for (size_t i = 0; i < gguf_get_arr_n(g, tokens); i++) { mix(gguf_get_arr_str(g, tokens, i)); }
    }
    char hex[17];
    snprintf(hex, sizeof(hex), "%016llx", (unsigned long long) hash);
    out.hash = hex;
    const std::string a = out.arch + ".";
    out.n_layer = (int) get_int(g, a + "block_count", 0);
    out.attends = attention_layers(g, out.arch, out.n_layer);
    const int64_t n_embd = get_int(g, a + "embedding_length", 0), n_head = get_int(g, a + "attention.head_count", 0);
    const int64_t d = n_head > 0 ? n_embd / n_head : 0;
    out.head_size_k = (int) get_int(g, a + "attention.key_length", d);
    out.head_size_v = (int) get_int(g, a + "attention.value_length", d);
    out.head_size_k_swa = (int) get_int(g, a + "attention.key_length_swa", 0);
    out.head_size_v_swa = (int) get_int(g, a + "attention.value_length_swa", 0);
    if (gguf_find_key(g, (a + "attention.key_length_mla").c_str()) >= 0) {
        out.latent = (int) get_int(g, a + "attention.kv_lora_rank", 0);
        out.latent_swa = (int) get_int(g, a + "attention.kv_lora_rank_swa", out.latent);
    }
    out.n_head_kv = (int) get_int(g, a + "attention.head_count_kv", n_head);
    out.n_heads_kv = get_ints(g, a + "attention.head_count_kv");
    out.indexer_key = (int) get_int(g, a + "attention.indexer.key_length", 0);
    out.window = (int) get_int(g, a + "attention.sliding_window", 0);
    out.slides = get_bools(g, a + "attention.sliding_window_pattern");
    out.n_layer_nextn = (int) std::clamp<int64_t>(get_int(g, a + "nextn_predict_layers", 0), 0, out.n_layer);
    if (!out.attends.empty()) { // they draft for the others
        std::fill(out.attends.end() - out.n_layer_nextn, out.attends.end(), (uint8_t) 0);
    }
    gguf_free(g);
    return KVQ_OK;
}

static std::string value_text(const gguf_context * g, int64_t id) {
    char text[64];
    switch (gguf_get_kv_type(g, id)) {
    case GGUF_TYPE_UINT32: return std::to_string(gguf_get_val_u32(g, id));
    case GGUF_TYPE_INT32: return std::to_string(gguf_get_val_i32(g, id));
    case GGUF_TYPE_FLOAT32: snprintf(text, sizeof(text), "%.9g", (double) gguf_get_val_f32(g, id)); return text;
    case GGUF_TYPE_BOOL: return gguf_get_val_bool(g, id) ? "true" : "false";
    case GGUF_TYPE_STRING: return gguf_get_val_str(g, id);
    default: return "";
    }
}

// A key kvq.<method>.* that this library does not read; "": no such key. Arrays, and what ggml-kvq info shows, are no
// options.
static std::string unknown_key(const gguf_context * g, const kvq_method & m) {
    const std::string prefix = "kvq." + std::string(m.info.name) + ".";
    std::vector<std::string> known = { "inputs", "tokens", "frontier", "text" };
    for (int i = 0; i < m.info.n_options; i++) { known.push_back(m.info.options[i].key); }
    for (int64_t id = 0; id < gguf_get_n_kv(g); id++) {
        const std::string key = gguf_get_key(g, id);
        if (key.compare(0, prefix.size(), prefix) || !key.compare(prefix.size(), 4, "blk.")) { continue; }
        if (std::find(known.begin(), known.end(), key.substr(prefix.size())) == known.end()) { return key; }
    }
    return "";
}

kvq_status kvq_stored_options(
    const std::string & path, const kvq_method & m, const std::string & given, std::string & out, std::string & err) {
    static const std::vector<std::vector<std::string>> groups = { { "bits", "k_bits", "v_bits" },
        { "preset", "kq", "vq", "km", "vm" } };
    const auto has = [&](const std::string & key) { return ("," + given).find("," + key + "=") != std::string::npos; };
    const auto ruled_out = [&](const std::string & key) {
        bool out = has(key);
        for (const auto & group : groups) {
            if (std::find(group.begin(), group.end(), key) != group.end()) {
                for (const std::string & other : group) { out = out || has(other); }
            }
        }
        return out;
    };
    out.clear();
    kvq_options asked;
    const bool known = m.keeps && kvq_options_parse(m, given.c_str(), asked, err) == KVQ_OK;
    gguf_context * g = gguf_init_from_file(path.c_str(), { /*no_alloc =*/true, /*ctx =*/nullptr });
    if (!g) { return KVQ_OK; } // the reader of the data says so
    std::string why = unknown_key(g, m);
    if (!why.empty()) { why += std::string(" is no option of ") + m.info.name + " that this library knows"; }
    for (int i = 0; i < m.info.n_options; i++) {
        const std::string key = m.info.options[i].key, name = "kvq." + std::string(m.info.name) + "." + key;
        const int64_t id = gguf_find_key(g, name.c_str());
        if (id < 0 || ruled_out(key) || (known && !m.keeps(asked, key))) { continue; }
        const std::string value = value_text(g, id);
        // data's order is one of the ladder of data's pairs
        const int64_t pairs = key == "order" && has("pairs") ? gguf_find_key(g, "kvq.auto.pairs") : -1;
        if (pairs >= 0 && ("," + given + ",").find(",pairs=" + value_text(g, pairs) + ",") == std::string::npos) {
            continue;
        }
        if (value.empty() || value.find_first_of(",=\n") != std::string::npos) {
            why = name + (value.empty() ? " is no u32, i32, f32, bool or text" : " is '" + value + "'");
        }
        out += (out.empty() ? "" : ",") + key + "=" + value;
    }
    gguf_free(g);
    if (why.empty()) { return KVQ_OK; }
    err = "calibrated data in '" + path + "': " + why + ": make it again with ggml-kvq calibrate";
    return KVQ_ERR_CONFIG;
}

int kvq_model_info::latent_of(int n_embd_k) const {
    if (latent && n_embd_k == head_size_k) { return latent; }
    return latent_swa && head_size_k_swa && n_embd_k == head_size_k_swa ? latent_swa : 0;
}

static int fitting(int width, int a, int b) {
    for (int d : { a, b, 64, 32, 16, 8 }) {
        if (d > 0 && width % d == 0) { return d; }
    }
    return width;
}

kvq_layer_shape kvq_guess_shape(const kvq_model_info & m, int il, int n_embd_k, int n_embd_v) {
    kvq_layer_shape s;
    s.il = il;
    const int own = m.key_of(il);
    s.head_size_k = fitting(n_embd_k, own ? own : m.head_size_k, m.head_size_k_swa);
    s.n_head_kv = n_embd_k / s.head_size_k;
    s.head_size_v =
        n_embd_v % s.n_head_kv == 0 ? n_embd_v / s.n_head_kv : fitting(n_embd_v, m.head_size_v, m.head_size_v_swa);
    return s;
}

// ---------------------------------------------------------------- current configuration

// Options as the load line has them: of a text, which may be long, only that there is one.
static std::string shown_options(const kvq_method & m, std::string text) {
    for (int i = 0; i < m.info.n_options; i++) {
        const std::string key = std::string(m.info.options[i].key) + "=";
        const size_t at = ("," + text).find("," + key);
        if (strcmp(m.info.options[i].type, "text") || at == std::string::npos) { continue; }
        const size_t from = at + key.size(), end = std::min(text.find(',', from), text.size());
        text.replace(from, end - from, "given");
    }
    return text;
}

// Calibrated data that the decision names, held against the model. Those that were measured on first use are left out
// when they are damaged, because the user did not ask for them; the launcher measures again.
static kvq_status check_data(const kvq_request & r, const kvq_model_info & model, kvq_decision & d, std::string & err) {
    const std::string from = d.config.empty() && model.calibrated ? r.model : d.config;
    if (from.empty()) { return KVQ_OK; }
    std::string line;
    kvq_status status = kvq_check_calibrated(from, r.model, model, line, err);
    if (status != KVQ_OK && d.config_from == KVQ_MEASURED) {
        static std::mutex mutex;
        static std::set<std::string> said;
        const std::lock_guard<std::mutex> lock(mutex);
        line = said.insert(err).second ? err + "; they are not used" : "";
        err.clear();
        const std::string damaged = d.config;
        d.config.clear();
        for (const auto what : { kvq_first_use::COORDINATES, kvq_first_use::MEANS }) { // another file may serve
            const std::string other = kvq_measured_path(r.model, what);
            std::string line_of, why;
            if (d.config.empty() && other != damaged && !access(other.c_str(), F_OK) &&
                kvq_check_calibrated(other, r.model, model, line_of, why) == KVQ_OK) {
                d.config = other;
            }
        }
        d.lacks_means = d.config.empty();
        if (d.lacks_means) { d.config_from.clear(); }
        status = KVQ_OK;
    } else if (status != KVQ_OK && r.model && from == kvq_path_beside(r.model)) { // launchers and Python name it, too
        err += ", or leave it aside with --kv-config none";
    }
    if (!line.empty()) { note(line); }
    return status;
}

static bool has(const char * text) { return text && *text; }

static kvq_status resolve(const kvq_request & r, kvq_config & out, kvq_model_info & model, std::string & err,
    const std::string & instead = "") {
    note_settings();
    kvq_decision d;
    kvq_status status = kvq_decide(r, model, d, err);
    out.is_instead = status == KVQ_OK && !instead.empty() && d.method_from == "default";
    if (out.is_instead) {
        kvq_request again = r;
        const std::string opts = instead + (has(r.env_opts) ? "," + std::string(r.env_opts) : "");
        again.number = "the declared cache type";
        again.opts = opts.c_str();
        again.env_opts = nullptr;
        status = kvq_decide(again, model, d, err);
    }
    if (status != KVQ_OK) { return status; }
    out.method = kvq_method_find(d.method.c_str());
    const kvq_status checked = check_data(r, model, d, err);
    if (checked != KVQ_OK) { return checked; }
    std::string options;
    const kvq_status read = kvq_all_options(d, model, r.model, options, err);
    if (read != KVQ_OK) { return read; }
    out.options_text = shown_options(*out.method, options);
    const std::string asked = r.asker == KVQ_ASKS_BY_VARIABLES ? kvq_setting_text(kvq_setting::ASKED) : "";
    // of a method that fits itself, data set pairs and an order that the user did not give
    const std::string shown = out.method->n_levels ? shown_options(*out.method, d.opts) : out.options_text;
    out.asked_text = asked.empty() ? shown : asked;
    bool measured = false; // a launcher names them, too
    for (const auto what : { kvq_first_use::MEANS, kvq_first_use::PREDICTORS, kvq_first_use::COORDINATES }) {
        measured = measured || (!d.config.empty() && d.config == kvq_measured_path(r.model, what));
    }
    out.config_from = measured ? KVQ_MEASURED : d.config_from;
    out.lacks_means = d.lacks_means;
    out.config_path = d.config;
    out.model_path = r.model;
    kvq_options asked_for;
    status = kvq_options_parse(*out.method, d.opts.c_str(), asked_for, err);
    if (status == KVQ_OK) { status = kvq_options_parse(*out.method, options.c_str(), out.options, err); }
    for (const std::string & key : out.options.given) {
        if (!asked_for.given.count(key)) { out.options.of_data.insert(key); }
    }
    return status;
}

kvq_status kvq_config_current(
    kvq_config & out, kvq_model_info & model, std::string & err, const std::string & instead) {
    kvq_request r = {};
    std::string path;
    if (configured.set) {
        r.asker = KVQ_ASKS_BY_ARGUMENTS;
        r.method = configured.method.c_str();
        r.opts = configured.opts.c_str();
        r.config = configured.config.c_str();
        path = configured.model;
    } else {
        r.env_method = kvq_setting_text(kvq_setting::METHOD);
        r.env_opts = kvq_setting_text(kvq_setting::OPTS);
        r.env_config = kvq_setting_text(kvq_setting::CONFIG);
        path = kvq_setting_text(kvq_setting::MODEL);
    }
    if (path.empty()) {
        path = model_of_command_line(); // of other programs, -m is no model: of Python it is a module
        path = kvq_is_gguf(path) ? path : kvq_mapped_model();
    }
    r.model = path.c_str();
    return resolve(r, out, model, err, instead);
}

bool kvq_draft_asked(void) { return *kvq_setting_text(kvq_setting::METHOD_DRAFT); }

kvq_status kvq_config_draft(kvq_config & out, kvq_model_info & model, std::string & err) {
    kvq_request r = {};
    r.env_method = kvq_setting_text(kvq_setting::METHOD_DRAFT);
    r.env_opts = kvq_setting_text(kvq_setting::OPTS_DRAFT);
    r.env_config = "none"; // its data must be in the draft model itself
    r.model = kvq_setting_text(kvq_setting::MODEL_DRAFT);
    return resolve(r, out, model, err);
}

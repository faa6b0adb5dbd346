#include "resolve.h"
#include "measured.h"

#include <algorithm>
#include <cstring>
#include <sys/stat.h>
#include <utility>
#include <vector>

std::string kvq_path_beside(const std::string & model) {
    const size_t slash = model.rfind('/'), from = slash == std::string::npos ? 0 : slash + 1;
    const size_t dot = model.rfind('.');
    const bool has_ending = dot != std::string::npos && model.find_first_not_of('.', from) < dot;
    return (has_ending ? model.substr(0, dot) : model) + ".kvq.gguf";
}

namespace {

constexpr const char * OFF = "none";  // a method: llama.cpp's own cache; a file: not the one beside the model
constexpr const char * EXACT = "f16"; // a cache that was given to us without a method
constexpr const char * CALIBRATE = "written by `ggml-kvq calibrate`";

// The names of the options where the request was made, for messages.
struct vocabulary {
    const char *method, *opts, *config;
};
constexpr vocabulary VARIABLES = { "KVQ_METHOD=", "KVQ_OPTS", "KVQ_CONFIG=" };
constexpr vocabulary FLAGS = { "--kv-method ", "--kv-opt", "--kv-config " };
constexpr vocabulary ARGUMENTS = { "kv_method=", "kv_opts", "kv_config=" };

const vocabulary & words_of(int asker) {
    return asker == KVQ_ASKS_BY_FLAGS ? FLAGS : asker == KVQ_ASKS_BY_ARGUMENTS ? ARGUMENTS : VARIABLES;
}

bool has(const char * text) { return text && *text; }

bool is_file(const std::string & path) {
    struct stat st = {};
    return !stat(path.c_str(), &st) && S_ISREG(st.st_mode);
}

// Are data of method `held` what `method` takes? Methods that take channel means take those of each other.
bool serves(const std::string & held, const kvq_method & method) {
    const kvq_method * other = kvq_method_find(held.c_str());
    return held == method.info.name || (other && other->data && method.data);
}

// The method that fits itself to a number of bits or bytes.
const char * method_of_a_number(void) {
    for (int i = 0; i < kvq_method_count(); i++) {
        const char * name = kvq_method_at(i)->name;
        if (kvq_method_find(name)->most) { return name; }
    }
    return "";
}

std::string trimmed(const std::string & s) {
    const char * blank = " \t\n\r\f\v";
    const size_t a = s.find_first_not_of(blank);
    return a == std::string::npos ? "" : s.substr(a, s.find_last_not_of(blank) - a + 1);
}

// Options in the order in which they were first named; a text added later wins.
struct option_list {
    std::vector<std::pair<std::string, std::string>> items; // key, "key=value"

    // False with err: the text gives one key two values, and it is not known which was meant.
    bool add(const std::string & text, const char * words, std::string & err) {
        option_list own;
        for (size_t at = 0; at <= text.size();) {
            const size_t comma = std::min(text.find(',', at), text.size());
            const std::string part = trimmed(text.substr(at, comma - at));
            at = comma + 1;
            if (part.empty()) { continue; }
            std::string & held = own.of(trimmed(part.substr(0, part.find('='))));
            if (!held.empty() && held != part) {
                err = std::string(words) + ": " + held + " and " + part + " name one option twice; drop one of them";
                return false;
            }
            held = part;
        }
        for (const auto & item : own.items) { of(item.first) = item.second; }
        return true;
    }

    std::string & of(const std::string & key) {
        for (auto & item : items) {
            if (item.first == key) { return item.second; }
        }
        items.emplace_back(key, "");
        return items.back().second;
    }

    std::string text() const {
        std::string out;
        for (const auto & item : items) { out += (out.empty() ? "" : ",") + item.second; }
        return out;
    }
};

// The file of calibrated data that was named.
struct named_file {
    std::string path, from, words; // path "": no file; words: with what named it
    std::string method;            // whose data it holds
    bool off = false;              // not even the one beside the model
};

kvq_status read_named(const kvq_request & r, named_file & out, std::string & err) {
    const bool flag = has(r.config);
    const vocabulary & words = flag ? words_of(r.asker) : VARIABLES;
    const char * path = flag ? r.config : has(r.env_config) ? r.env_config : "";
    out.off = !strcmp(path, OFF);
    if (out.off || !*path) { return KVQ_OK; }
    out.path = path;
    out.from = flag ? "flag" : "environment";
    out.words = std::string(words.config) + path;
    if (!is_file(out.path)) {
        const bool argument = flag && r.asker == KVQ_ASKS_BY_ARGUMENTS;
        err = out.words + " is not a file; give " + (argument ? "the sidecar GGUF " : "a GGUF ") + CALIBRATE;
        return KVQ_ERR_CONFIG;
    }
    kvq_model_info held;
    if (kvq_read_model_info(out.path, held, err) != KVQ_OK) {
        err = "calibrated data in '" + out.path +
            "': it is not a readable GGUF file: make it again with ggml-kvq calibrate";
        return KVQ_ERR_CONFIG;
    }
    if (held.method.empty()) {
        err = out.words + " holds no kvq.* metadata; give a GGUF " + CALIBRATE;
        return KVQ_ERR_CONFIG;
    }
    out.method = held.method;
    return KVQ_OK;
}

kvq_status choose_method(const kvq_request & r, const named_file & file, const kvq_model_info & model,
    kvq_decision & out, std::string & err) {
    const vocabulary & words = words_of(r.asker);
    const auto choose = [&](const std::string & method, const char * from, const std::string & why) {
        out.method = method;
        out.method_from = from;
        out.method_words = why;
        return KVQ_OK;
    };
    if (has(r.number)) {
        const std::string fits = method_of_a_number();
        if (r.method && fits != r.method) {
            err = r.asker == KVQ_ASKS_BY_ARGUMENTS ? std::string("kv_method='") + r.method +
                    "' chooses by itself, kv_bits and kv_budget let '" + fits + "' choose; drop one"
                                                   : std::string(r.number) + " lets method " + fits + " choose, " +
                    words.method + r.method + " chooses by itself: drop one of them";
            return KVQ_ERR_METHOD;
        }
        return choose(fits, "flag", r.number);
    }
    if (r.method) { return choose(r.method, "flag", words.method + std::string(r.method)); }
    if (has(r.env_method)) { return choose(r.env_method, "environment", VARIABLES.method + std::string(r.env_method)); }
    if (!file.path.empty()) { return choose(file.method, "config", "method " + file.method + " of " + file.path); }
    if (!model.method.empty()) {
        return choose(
            model.method, "embedded", "method " + model.method + " of the model's metadata (" + r.model + ")");
    }
    return r.asker == KVQ_ASKS_BY_VARIABLES ? choose(EXACT, "default", std::string("method ") + EXACT)
                                            : choose("", "", "");
}

kvq_status choose_options(const kvq_request & r, kvq_decision & out, std::string & err) {
    std::string of_env = has(r.env_opts) ? r.env_opts : "";
    if (!of_env.empty() && has(r.env_method) && out.method != r.env_method) {
        out.note = "KVQ_OPTS=" + of_env + " goes with KVQ_METHOD=" + r.env_method + " and is not used";
        of_env.clear();
    }
    option_list all;
    if (!all.add(of_env, VARIABLES.opts, err) || !all.add(has(r.opts) ? r.opts : "", words_of(r.asker).opts, err)) {
        return KVQ_ERR_OPTION;
    }
    out.opts = all.text();
    out.opts_from = has(r.opts) ? "flag" : !of_env.empty() ? "environment" : "";
    const int status = kvq_check(out.method.c_str(), out.opts.c_str());
    if (status != KVQ_OK) {
        const bool say_why = r.asker == KVQ_ASKS_BY_FLAGS && out.method_from != "flag";
        err = (say_why ? out.method_words + ": " : "") + kvq_last_error();
    }
    return (kvq_status) status;
}

// What is measured for the method on a model's first use, where the user gave no data (kvq_resolved.wants_means).
enum wanted { NOTHING, MEANS, PREDICTORS, COORDINATES }; // but for the first, kvq_first_use and one

wanted wants(const kvq_method & method, kvq_options o) {
    const kvq_data as_given = method.data ? method.data(o) : kvq_data::NONE;
    if (as_given == kvq_data::NONE) { return NOTHING; }
    if (as_given == kvq_data::TAKES) {
        // a GPU reads coordinates slower than f16 rows, a CPU faster (docs/methods/auto.md)
        const bool more = method.keeps && method.keeps(o, "coords") && o.values.count("coordinates") &&
            !(kvq_has_accelerator && kvq_has_accelerator());
        method.settle(o, "bias", 8);
        return method.data(o) != kvq_data::NEEDS ? NOTHING : more ? COORDINATES : MEANS;
    }
    if (!method.most) { return NOTHING; } // a paper's own setting is of a text that its user chose
    method.settle(o, "full", 8);
    return o.is("predictor", "full") || o.is("predictor", "k") ? PREDICTORS
        : o.is("coordinates", "on")                            ? COORDINATES
                                                               : NOTHING;
}

kvq_status choose_config(const kvq_request & r, const named_file & file, const kvq_model_info & model,
    kvq_decision & out, std::string & err) {
    const kvq_method & method = *kvq_method_find(out.method.c_str());
    if (!file.path.empty()) {
        if (!serves(file.method, method)) {
            const bool argument = r.asker == KVQ_ASKS_BY_ARGUMENTS;
            err = file.words + " holds data for method " + file.method + ", not " + out.method +
                "; give another file or " + words_of(r.asker).method + (argument ? "'" : "") + file.method +
                (argument ? "'" : "");
            return KVQ_ERR_CONFIG;
        }
        out.config = file.path;
        out.config_from = file.from;
        return KVQ_OK;
    }
    if (model.calibrated && serves(model.method, method)) {
        out.config_from = "embedded";
        return KVQ_OK;
    }
    const std::string beside = has(r.model) && !file.off ? kvq_path_beside(r.model) : "";
    kvq_model_info held;
    if (is_file(beside) && kvq_read_model_info(beside, held, err) != KVQ_OK) {
        const bool argument = r.asker == KVQ_ASKS_BY_ARGUMENTS;
        err = "calibrated data in '" + beside +
            "', beside the model: it is not a readable GGUF file: make it again with " +
            "ggml-kvq calibrate, or leave it aside with " + words_of(r.asker).config + (argument ? "'none'" : OFF);
        return KVQ_ERR_CONFIG;
    }
    if (is_file(beside) && serves(held.method, method)) {
        out.config = beside;
        out.config_from = "sidecar";
    }
    kvq_options asked;
    if (!out.config_from.empty() || kvq_options_parse(method, out.opts.c_str(), asked, err) != KVQ_OK) {
        return KVQ_OK;
    }
    const wanted best = wants(method, asked);
    out.wants = best;
    // A file with coordinates has means, too; those serve until coordinates are fitted, unless the user insists.
    const wanted other = best == MEANS                           ? COORDINATES
        : best == COORDINATES && asked.is("coordinates", "auto") ? MEANS
                                                                 : NOTHING;
    for (const wanted what : { best, other }) {
        if (what == NOTHING || !has(r.model) || file.off || out.config_from == KVQ_MEASURED) { continue; }
        const std::string measured = kvq_measured_path(r.model, (kvq_first_use) (what - 1));
        out.lacks_means = !is_file(measured);
        if (!out.lacks_means) {
            out.config = measured;
            out.config_from = KVQ_MEASURED;
            out.wants = what < best ? best : NOTHING;
        }
    }
    return KVQ_OK;
}

} // namespace

kvq_status kvq_decide(const kvq_request & r, kvq_model_info & model, kvq_decision & out, std::string & err) {
    model = kvq_model_info{};
    out = kvq_decision{};
    kvq_status status = has(r.model) ? kvq_read_model_info(r.model, model, err) : KVQ_OK;
    named_file file;
    if (status == KVQ_OK) { status = read_named(r, file, err); }
    if (status == KVQ_OK) { status = choose_method(r, file, model, out, err); }
    const bool upstream = out.method_from.empty() || (out.method == OFF && r.asker != KVQ_ASKS_BY_VARIABLES);
    if (status != KVQ_OK || upstream) { return status; }
    status = choose_options(r, out, err);
    return status == KVQ_OK ? choose_config(r, file, model, out, err) : status;
}

kvq_status kvq_all_options(const kvq_decision & d, const kvq_model_info & model, const std::string & model_path,
    std::string & out, std::string & err) {
    const std::string from = d.config.empty() && model.calibrated ? model_path : d.config;
    std::string stored;
    if (!from.empty()) {
        const kvq_status status = kvq_stored_options(from, *kvq_method_find(d.method.c_str()), d.opts, stored, err);
        if (status != KVQ_OK) { return status; }
    }
    out = stored + (stored.empty() || d.opts.empty() ? "" : ",") + d.opts;
    return KVQ_OK;
}

// ---------------------------------------------------------------- C ABI

extern "C" int kvq_resolve(const kvq_request * in, kvq_resolved * out) {
    static thread_local kvq_decision d;
    static thread_local std::string options;
    std::string err;
    kvq_model_info model;
    kvq_status status = KVQ_ERR_ARGUMENT;
    if (!in || !out) {
        err = "kvq_resolve: request and answer must not be NULL";
    } else {
        options.clear();
        status = kvq_decide(*in, model, d, err);
    }
    if (status == KVQ_OK) {
        const kvq_method * method = kvq_method_find(d.method.c_str());
        kvq_options parsed;
        if (method) {
            status = kvq_all_options(d, model, has(in->model) ? in->model : "", options, err);
            if (status == KVQ_OK) { status = kvq_options_parse(*method, options.c_str(), parsed, err); }
        }
        if (status == KVQ_OK) {
            if (method && d.opts_from.empty()) { d.opts_from = options.empty() ? "default" : d.config_from; }
            if (d.config_from == "embedded") { d.config = in->model; }
            *out = { d.method.c_str(), d.method_from.c_str(), d.method_words.c_str(), d.opts.c_str(), options.c_str(),
                d.opts_from.c_str(), d.config.c_str(), d.config_from.c_str(), d.note.c_str(), d.wants };
        }
    }
    if (status != KVQ_OK) { kvq_set_error(err); }
    return status;
}

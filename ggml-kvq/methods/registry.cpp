#include "method.h"

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>

#define KVQ_METHOD(name) extern const kvq_method kvq_method_##name;
#include "methods.inc"
#undef KVQ_METHOD

#define KVQ_METHOD(name) &kvq_method_##name,
static const kvq_method * const methods[] = {
#include "methods.inc"
};
#undef KVQ_METHOD

static constexpr int n_methods = sizeof(methods) / sizeof(methods[0]);

extern "C" int kvq_method_count(void) { return n_methods; }

extern "C" const kvq_method_info * kvq_method_at(int i) {
    return i >= 0 && i < n_methods ? &methods[i]->info : nullptr;
}

const kvq_method * kvq_method_find(const char * name) {
    for (const kvq_method * m : methods) {
        if (name && !strcmp(m->info.name, name)) { return m; }
    }
    return nullptr;
}

kvq_status kvq_plan_open(const kvq_options & o, kvq_layer_plan & out, std::string & err) {
    out.fills = o.is("window", "auto");
    out.window = o.num_or_auto("window");
    out.sinks = o.num("sinks");
    const std::string place = o.values.count("place") ? o.str("place") : "";
    out.place = place == "host" ? kvq_place::HOST : place == "auto" ? kvq_place::AUTO : kvq_place::DEVICE;
    if (out.window < 0 || out.window > 4096) {
        err = "option window=" + o.str("window") + " is not within 0..4096";
    } else if (out.sinks < 0 || out.sinks > 64) {
        err = "option sinks=" + o.str("sinks") + " is not within 0..64";
    } else if (out.place != kvq_place::DEVICE && out.fills) { // blocks and rows of the window share their memory
        err = "option place=" + place + " cannot go with window=auto: leave one of them out";
    }
    return err.empty() ? KVQ_OK : KVQ_ERR_OPTION;
}

// ---------------------------------------------------------------- option text

static bool one_of(const std::string & choices, const std::string & value) {
    size_t at = 0;
    while (at <= choices.size()) {
        const size_t bar = std::min(choices.find('|', at), choices.size());
        if (choices.compare(at, bar - at, value) == 0) { return true; }
        at = bar + 1;
    }
    return false;
}

// canonical text of a value, or "" when it is not of the type
static std::string check_value(const std::string & type, const std::string & value) {
    char * end = nullptr;
    if (type == "int") {
        const long v = strtol(value.c_str(), &end, 10);
        return !value.empty() && !*end && v >= -1 && v <= 1000000 ? std::to_string(v) : "";
    }
    if (type == "int|auto") { return value == "auto" ? value : check_value("int", value); }
    if (type == "float") {
        const double v = strtod(value.c_str(), &end);
        return !value.empty() && !*end && std::isfinite(v) ? value : "";
    }
    if (type == "bool") {
        if (value == "true" || value == "1" || value == "on") { return "true"; }
        if (value == "false" || value == "0" || value == "off") { return "false"; }
        return "";
    }
    if (type == "text") { return value; }
    const bool path = one_of(type, "PATH") && value.find('/') != std::string::npos;
    return path || (one_of(type, value) && value != "PATH") ? value : "";
}

static std::string trim(const std::string & s) {
    size_t a = 0, b = s.size();
    while (a < b && isspace((unsigned char) s[a])) { a++; }
    while (b > a && isspace((unsigned char) s[b - 1])) { b--; }
    return s.substr(a, b - a);
}

kvq_status kvq_options_parse(const kvq_method & m, const char * text, kvq_options & out, std::string & err) {
    out.values.clear();
    out.defaults.clear();
    out.given.clear();
    out.of_data.clear();
    std::string keys;
    for (int i = 0; i < m.info.n_options; i++) {
        const kvq_option_info & o = m.info.options[i];
        out.values[o.key] = out.defaults[o.key] = o.default_value;
        keys += std::string(i ? ", " : "") + o.key;
    }
    const std::string all = text ? text : "";
    for (size_t at = 0; at < all.size();) {
        const size_t comma = std::min(all.find(',', at), all.size());
        const std::string item = trim(all.substr(at, comma - at));
        at = comma + 1;
        if (item.empty()) { continue; }
        const size_t eq = item.find('=');
        if (eq == std::string::npos) {
            err = "option '" + item + "' has no value: write " + item + "=VALUE";
            return KVQ_ERR_OPTION;
        }
        const std::string key = trim(item.substr(0, eq)), value = trim(item.substr(eq + 1));
        const kvq_option_info * found = nullptr;
        for (int i = 0; i < m.info.n_options; i++) {
            if (key == m.info.options[i].key) { found = &m.info.options[i]; }
        }
        if (!found) {
            err = "method " + std::string(m.info.name) + " has no option '" + key + "': it has " +
                (keys.empty() ? "none" : keys);
            return KVQ_ERR_OPTION;
        }
        if (key == "window" && value == "auto" && !strcmp(found->type, "int")) {
            err = "option window=auto does not go with method " + std::string(m.info.name) +
                ", whose pages do more than wait for their turn to seal: give a number, or take kivi, higgs, xquant, "
                "aqua or auto";
            return KVQ_ERR_OPTION;
        }
        const std::string canonical = check_value(found->type, value);
        if (canonical.empty()) {
            const bool negative = value[0] == '-' && !strncmp(found->type, "int", 3) &&
                !check_value(found->type, value.substr(1)).empty();
            err = "option " + key + "=" + value +
                (negative ? " is below 0: " : std::string(" is not of type ") + found->type + ": ") + found->help;
            return KVQ_ERR_OPTION;
        }
        out.values[key] = canonical;
        out.given.insert(key);
    }
    return KVQ_OK;
}

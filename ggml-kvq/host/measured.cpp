#include "measured.h"

#include "base/settings.h"
#include "fingerprint.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

// Of the data that are measured: another text (python/ggml_kvq/data/means.txt) or other figures have another one.
static constexpr const char * EDITION = "sorted 1";
static constexpr size_t ENDS = 1 << 18; // bytes at either end of a model file that tell it from others

// 64-bit FNV-1a
static void mix(uint64_t & hash, const void * data, size_t nb) {
    for (size_t i = 0; i < nb; i++) { hash = (hash ^ ((const uint8_t *) data)[i]) * 0x100000001b3u; }
}

// Of the file's size, both its ends (metadata, last weights), its weights (a fine-tune may differ between the ends
// alone) and the edition, 16 hexadecimal digits; "": not readable.
static std::string fingerprint(const std::string & model) {
    FILE * f = fopen(model.c_str(), "rb");
    if (!f) { return ""; }
    uint64_t hash = 0xcbf29ce484222325u;
    mix(hash, EDITION, strlen(EDITION));
    std::vector<uint8_t> end(ENDS);
    fseeko(f, 0, SEEK_END);
    const int64_t size = ftello(f);
    mix(hash, &size, sizeof(size));
    for (const int64_t from : { (int64_t) 0, std::max<int64_t>(0, size - (int64_t) ENDS) }) {
        fseeko(f, (off_t) from, SEEK_SET);
        mix(hash, end.data(), fread(end.data(), 1, ENDS, f));
    }
    fclose(f);
    const std::vector<float> weights = kvq_make_sketch(model);
    if (weights.empty()) { return ""; }
    mix(hash, weights.data(), weights.size() * sizeof(float));
    char text[17];
    snprintf(text, sizeof(text), "%016llx", (unsigned long long) hash);
    return text;
}

// A service may run without $HOME.
static std::string home_folder(void) {
    const std::string home = kvq_setting_text(kvq_setting::HOME);
    const passwd * user = home.empty() ? getpwuid(getuid()) : nullptr;
    return user && user->pw_dir ? user->pw_dir : home;
}

static std::string folder(void) {
    const std::string ours = kvq_setting_text(kvq_setting::CACHE_DIR), all = kvq_setting_text(kvq_setting::XDG_CACHE);
    return (!ours.empty() ? ours : !all.empty() ? all + "/ggml-kvq" : home_folder() + "/.cache/ggml-kvq") + "/means";
}

std::string kvq_measured_path(const std::string & model) {
    struct stat st = {};
    if (stat(model.c_str(), &st) || !S_ISREG(st.st_mode)) { return ""; }
    // asked for several times before a cache is made: a file that stays as it is is read once
    static std::mutex mutex;
    static std::map<std::string, std::string> known;
    const std::string key = model + "\n" + std::to_string(st.st_size) + " " + std::to_string(st.st_mtim.tv_sec) + "." +
        std::to_string(st.st_mtim.tv_nsec) + " " + std::to_string(st.st_ino);
    const std::lock_guard<std::mutex> lock(mutex);
    if (known.size() >= 64) { known.clear(); }
    if (!known.count(key)) { known[key] = fingerprint(model); }
    const std::string & name = known[key];
    return name.empty() ? "" : folder() + "/" + name + ".kvq.gguf";
}

extern "C" int kvq_measured(const char * model, const char ** path) {
    static thread_local std::string there;
    std::string err, line;
    kvq_model_info info;
    kvq_status status = kvq_read_model_info(model ? model : "", info, err);
    there = status == KVQ_OK ? kvq_measured_path(model) : "";
    if (status == KVQ_OK && there.empty()) {
        err = "cannot read the weights of '" + std::string(model) + "': give a GGUF model";
        status = KVQ_ERR_MODEL;
    } else if (status == KVQ_OK && !access(there.c_str(), F_OK)) {
        status = kvq_check_calibrated(there, model, info, line, err);
    } else if (status == KVQ_OK) {
        err = there + " is not there";
        status = KVQ_ERR_CONFIG;
    }
    if (path) { *path = there.c_str(); }
    if (status != KVQ_OK) { kvq_set_error(err); }
    return status;
}

// ---------------------------------------------------------------- files that are mapped

// NAME-00001-of-00003.gguf of any part of a model of three
static std::string first_part(std::string path) {
    const size_t of = path.rfind("-of-");
    const bool part = of != std::string::npos && of >= 6 && path[of - 6] == '-' && path.size() == of + 14 &&
        strspn(path.c_str() + of - 5, "0123456789") == 5;
    return part ? path.replace(of - 5, 5, "00001") : path;
}

static bool is_model(const std::string & path) {
    kvq_model_info info;
    std::string err;
    return kvq_read_model_info(path, info, err) == KVQ_OK && info.n_layer > 0 && info.arch != "clip";
}

static bool is_one_file(const std::string & a, const std::string & b) {
    struct stat x = {}, y = {};
    return !stat(a.c_str(), &x) && !stat(b.c_str(), &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

std::string kvq_mapped_model(const std::string & named) {
    FILE * f = fopen("/proc/self/maps", "r");
    if (!f) { return ""; }
    std::vector<std::string> found;
    char line[4600];
    while (fgets(line, sizeof(line), f)) {
        line[strcspn(line, "\n")] = 0;
        const char * path = strchr(line, '/');
        const size_t n = path ? strlen(path) : 0;
        if (n < 6 || strcmp(path + n - 5, ".gguf")) { continue; }
        const std::string first = first_part(path);
        if (std::find(found.begin(), found.end(), first) == found.end() && is_model(first)) { found.push_back(first); }
    }
    fclose(f);
    std::string out;
    int n = 0;
    for (size_t at = 0; at <= named.size() && !named.empty();) { // each of them once
        const size_t comma = std::min(named.find(',', at), named.size());
        const std::string path = named.substr(at, comma - at);
        at = comma + 1;
        const auto is = std::find_if(found.begin(), found.end(), [&](const auto & x) { return is_one_file(x, path); });
        if (is == found.end()) { continue; }
        const bool again = !out.empty() && is_one_file(out, path);
        out = again && out != path ? *is : path; // of two names the file's own: what lies beside one is not the other's
        n += !again;
    }
    return named.empty() ? (found.size() == 1 ? found[0] : "") : n == 1 ? out : "";
}

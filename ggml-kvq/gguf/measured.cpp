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

bool (*kvq_has_accelerator)() = nullptr;

std::string kvq_measured_path(const std::string & model, kvq_first_use what) {
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
    static constexpr const char * more[] = { "", ".predictors", ".coordinates" };
    return name.empty() ? "" : folder() + "/" + name + more[(int) what] + ".kvq.gguf";
}

extern "C" int kvq_measured(const char * model, int what, const char ** path) {
    static thread_local std::string there;
    std::string err, line;
    kvq_model_info info;
    kvq_status status = kvq_read_model_info(model ? model : "", info, err);
    const bool known = what >= (int) kvq_first_use::MEANS && what <= (int) kvq_first_use::COORDINATES;
    there = status == KVQ_OK && known ? kvq_measured_path(model, (kvq_first_use) what) : "";
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

#include "open_model.h"

#include "ggml.h"
#include "gguf.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>
#include <sys/stat.h>
#include <vector>

bool kvq_is_gguf(const std::string & path) {
    struct stat st = {};
    if (path.empty() || stat(path.c_str(), &st) || !S_ISREG(st.st_mode)) { return false; }
    FILE * f = fopen(path.c_str(), "rb");
    if (!f) { return false; }
    char magic[4] = {};
    const bool is = fread(magic, 1, 4, f) == 4 && !memcmp(magic, "GGUF", 4);
    fclose(f);
    return is;
}

static bool is_model(const std::string & path) {
    gguf_context * g = gguf_init_from_file(path.c_str(), { /*no_alloc =*/true, /*ctx =*/nullptr });
    if (!g) { return false; }
    const auto text = [g](const char * key) {
        const int64_t id = gguf_find_key(g, key);
        return std::string(id >= 0 && gguf_get_kv_type(g, id) == GGUF_TYPE_STRING ? gguf_get_val_str(g, id) : "");
    };
    const std::string type = text("general.type"), arch = text("general.architecture");
    gguf_free(g);
    return (type.empty() || type == "model") && !arch.empty() && arch != "clip";
}

// NAME-00001-of-00003.gguf of any part of a model of three
static std::string first_part(std::string path) {
    const size_t of = path.rfind("-of-");
    const bool part = of != std::string::npos && of >= 6 && path[of - 6] == '-' && path.size() == of + 14 &&
        strspn(path.c_str() + of - 5, "0123456789") == 5;
    return part ? path.replace(of - 5, 5, "00001") : path;
}

static bool is_one_file(const std::string & a, const std::string & b) {
    struct stat x = {}, y = {};
    return !stat(a.c_str(), &x) && !stat(b.c_str(), &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

std::string kvq_mapped_model(const std::string & named) {
    FILE * f = fopen("/proc/self/maps", "r");
    if (!f) { return ""; }
    std::set<std::string> seen; // whatever their ending: Ollama's have none
    std::vector<std::string> found;
    char line[4600];
    while (fgets(line, sizeof(line), f)) {
        line[strcspn(line, "\n")] = 0;
        const char * path = strchr(line, '/');
        const std::string first = path ? first_part(path) : "";
        if (first.empty() || !seen.insert(first).second) { continue; }
        if (kvq_is_gguf(first) && is_model(first)) { found.push_back(first); }
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

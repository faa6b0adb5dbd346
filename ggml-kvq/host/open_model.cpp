#include "open_model.h"

#include "ggml.h"
#include "gguf.h"

#include <cstdio>
#include <cstring>
#include <set>
#include <sys/stat.h>

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

std::string kvq_open_model(void) {
    FILE * maps = fopen("/proc/self/maps", "r");
    if (!maps) { return ""; }
    std::set<std::string> files;
    char line[4352];
    while (fgets(line, sizeof(line), maps)) { // address, rights, offset, device, inode, path
        const char * path = strchr(line, '/');
        if (path) { files.insert(std::string(path, strcspn(path, "\n"))); }
    }
    fclose(maps);
    std::string found;
    for (const std::string & file : files) {
        if (!kvq_is_gguf(file) || !is_model(file)) { continue; }
        if (!found.empty()) { return ""; }
        found = file;
    }
    return found;
}

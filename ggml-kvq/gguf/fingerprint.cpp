#include "fingerprint.h"
#include "cache/calibration.h"
#include "store/state_blocks.h"
#include "tensor_file.h"

#include "ggml.h"
#include "gguf.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <sys/stat.h>

namespace {

struct file {
    gguf_context * g = nullptr;
    ggml_context * data = nullptr;
    file(const std::string & path, bool no_alloc) { g = gguf_init_from_file(path.c_str(), { no_alloc, &data }); }
    ~file() {
        if (g) { gguf_free(g); }
        if (data) { ggml_free(data); }
    }
    file(const file &) = delete;
    file & operator=(const file &) = delete;
};

std::string get_str(const gguf_context * g, const std::string & key) {
    const int64_t id = gguf_find_key(g, key.c_str());
    return id >= 0 && gguf_get_kv_type(g, id) == GGUF_TYPE_STRING ? gguf_get_val_str(g, id) : "";
}

bool get_u32(const gguf_context * g, const char * key, uint32_t & out) {
    const int64_t id = gguf_find_key(g, key);
    if (id < 0 || gguf_get_kv_type(g, id) != GGUF_TYPE_UINT32) { return false; }
    out = gguf_get_val_u32(g, id);
    return true;
}

// ---------------------------------------------------------------- sketch

constexpr int SUMS = 16, NORMS = 16, MAX_LAYERS = 4096;

float sign_of(uint64_t i) { // of channel i
    i = (i + 1) * 0x9e3779b97f4a7c15u;
    i = (i ^ i >> 31) * 0xd6e8feb86659fd93u;
    return i >> 63 ? -1.0f : 1.0f;
}

} // namespace

std::vector<float> kvq_make_sketch(const std::string & model) {
    const kvq_tensor_file f(model);
    if (!f.ok()) { return {}; }
    uint32_t n_layer = 0;
    get_u32(f.header(), (get_str(f.header(), "general.architecture") + ".block_count").c_str(), n_layer);
    std::vector<float> out(n_layer <= MAX_LAYERS ? (size_t) n_layer * KVQ_SKETCH : 0), row;
    for (size_t il = 0; il * KVQ_SKETCH < out.size(); il++) {
        float * const s = &out[il * KVQ_SKETCH];
        const auto tensor = [&](const char * name) {
            return f.tensor("blk." + std::to_string(il) + "." + name + ".weight");
        };
        static const char * const names[2][4] = { { "attn_k", "attn_qkv", "attn_kv_a_mqa", "attn_k_b" },
            { "attn_v", "attn_output", "attn_kv_b", "attn_v_b" } };
        for (int v = 0; v < 2; v++) {
            const ggml_tensor * t = nullptr;
            for (int i = 0; !t && i < 4; i++) { t = tensor(names[v][i]); }
            for (int j = 0; t && j < SUMS; j++) {
                if (!f.row(t, ggml_nrows(t) * j / SUMS, row)) {
                    t = nullptr;
                    break;
                }
                double sum = 0;
                for (size_t i = 0; i < row.size(); i++) { sum += sign_of(i + 4099 * (size_t) j) * row[i]; }
                s[2 + v * SUMS + j] = (float) sum;
            }
            s[v] = t ? (float) t->type + 1 : 0;
        }
        const ggml_tensor * norm = tensor("attn_norm");
        if (norm && norm->type == GGML_TYPE_F32 && f.row(norm, 0, row)) {
            std::copy_n(row.begin(), std::min<size_t>(row.size(), NORMS), s + 2 + 2 * SUMS);
        }
    }
    return out;
}

extern "C" size_t kvq_model_sketch(const char * path, float * out, size_t n) {
    const std::vector<float> s = path ? kvq_make_sketch(path) : std::vector<float>();
    if (s.empty()) {
        kvq_set_error("cannot read the weights of '" + std::string(path ? path : "") + "': give a GGUF model");
    } else if (out) {
        std::copy_n(s.begin(), std::min(n, s.size()), out);
    }
    return s.size();
}

namespace {

enum kinship { SAME, TUNED, OTHER };

kinship compare(const std::vector<float> & a, const std::vector<float> & b) {
    double apart = 0, size = 0;
    bool differ = false; // where nothing but other weights explains it
    for (size_t at = 0; at < a.size(); at += KVQ_SKETCH) {
        for (int v = 0; v < 2; v++) {
            const float *x = &a[at + 2 + (size_t) v * SUMS], *y = &b[at + 2 + (size_t) v * SUMS];
            if (!a[at + (size_t) v] || !b[at + (size_t) v]) { continue; }
            double d = 0, n = 0;
            for (int i = 0; i < SUMS; i++) {
                d += ((double) x[i] - y[i]) * ((double) x[i] - y[i]);
                n += ((double) x[i] * x[i] + (double) y[i] * y[i]) / 2;
            }
            apart += d;
            size += n;
            differ = differ || (a[at + (size_t) v] == b[at + (size_t) v] && d > 1e-8 * n);
        }
        const float *x = &a[at + 2 + 2 * SUMS], *y = &b[at + 2 + 2 * SUMS];
        for (int i = 0; x[0] && y[0] && i < NORMS; i++) {
            // a file that kept norms in f16 or bf16
            differ = differ || fabsf(x[i] - y[i]) > 0.004f * (fabsf(x[i]) + fabsf(y[i]));
        }
    }
    const double far = size > 0 ? sqrt(apart / size) : 0;
    return far > 0.7 ? OTHER : far > 0.35 || differ ? TUNED : SAME;
}

// ---------------------------------------------------------------- checksum

struct entry {
    std::string head;
    const void * data;
    size_t nb;
}; // head: kind, and of arrays type and shape

std::string head_of(const std::string & type, const std::vector<uint32_t> & shape) {
    return "a" + type + std::string("\0", 1) + std::string((const char *) shape.data(), 4 * shape.size());
}

// Everything named kvq.* but the checksum itself, by name. Arrays are tensors, or arrays of u8 with .type and .shape
// beside them.
std::map<std::string, entry> entries_of(const file & f) {
    std::map<std::string, entry> out;
    for (int64_t i = 0; i < gguf_get_n_kv(f.g); i++) {
        const std::string key = gguf_get_key(f.g, i);
        const gguf_type type = gguf_get_kv_type(f.g, i);
        if (key.compare(0, 4, "kvq.") || key == "kvq.checksum") { continue; }
        if (type == GGUF_TYPE_STRING) {
            const char * text = gguf_get_val_str(f.g, i);
            out[key] = { "s", text, strlen(text) };
        } else if (type != GGUF_TYPE_ARRAY) {
            const size_t nb = type == GGUF_TYPE_BOOL                                               ? 1
                : type == GGUF_TYPE_UINT32 || type == GGUF_TYPE_INT32 || type == GGUF_TYPE_FLOAT32 ? 4
                                                                                                   : 0;
            out[key] = { type == GGUF_TYPE_FLOAT32 ? "f" : "u", nb ? gguf_get_val_data(f.g, i) : nullptr, nb };
        } else if (gguf_get_arr_type(f.g, i) == GGUF_TYPE_UINT8) {
            const int64_t shape = gguf_find_key(f.g, (key + ".shape").c_str());
            std::vector<uint32_t> n;
            if (shape >= 0 && gguf_get_kv_type(f.g, shape) == GGUF_TYPE_ARRAY &&
                gguf_get_arr_type(f.g, shape) == GGUF_TYPE_UINT32) {
                const uint32_t * p = (const uint32_t *) gguf_get_arr_data(f.g, shape);
                n.assign(p, p + gguf_get_arr_n(f.g, shape));
            }
            out[key] = { head_of(get_str(f.g, key + ".type"), n), gguf_get_arr_data(f.g, i), gguf_get_arr_n(f.g, i) };
        }
    }
    std::vector<std::string> arrays;
    for (const auto & e : out) {
        if (e.second.head[0] == 'a') { arrays.push_back(e.first); }
    }
    for (const std::string & name : arrays) {
        out.erase(name + ".type");
        out.erase(name + ".shape");
    }
    for (ggml_tensor * t = f.data ? ggml_get_first_tensor(f.data) : nullptr; t; t = ggml_get_next_tensor(f.data, t)) {
        if (strncmp(t->name, "kvq.", 4) || !t->data) { continue; }
        std::vector<uint32_t> n;
        for (int d = ggml_n_dims(t) - 1; d >= 0; d--) { n.push_back((uint32_t) t->ne[d]); }
        out[t->name] = { head_of(ggml_type_name(t->type), n), t->data, ggml_nbytes(t) };
    }
    return out;
}

std::string checksum(const std::map<std::string, entry> & entries) {
    uint32_t crc = 0;
    for (const auto & e : entries) {
        crc = kvq_crc32(crc, e.first.c_str(), e.first.size() + 1);
        crc = kvq_crc32(crc, e.second.head.data(), e.second.head.size());
        crc = kvq_crc32(crc, e.second.data, e.second.nb);
    }
    char text[9];
    snprintf(text, sizeof(text), "%08x", crc);
    return text;
}

// Tensors that do not fit into the file; reading them would allocate what a damaged header says.
bool is_cut(const gguf_context * g, size_t nb_file) {
    size_t nb = gguf_get_data_offset(g);
    for (int64_t i = 0; i < gguf_get_n_tensors(g) && nb <= nb_file; i++) {
        nb = gguf_get_tensor_size(g, i) <= nb_file ? nb + gguf_get_tensor_size(g, i) : SIZE_MAX;
    }
    return nb > nb_file;
}

kvq_status check(const std::string & path, const std::string & model_path, const kvq_model_info & model, size_t nb_file,
    std::string & note, std::string & err) {
    const std::string what = "calibrated data in '" + path + "'", again = ": make it again with ggml-kvq calibrate";
    std::unique_ptr<file> f(new file(path, true));
    if (!f->g) {
        err = what + ": it is not a readable GGUF file" + again;
        return KVQ_ERR_CONFIG;
    }
    if (get_str(f->g, "general.type") == "kvq") { // small, and whole in memory
        if (is_cut(f->g, nb_file) || nb_file > (size_t) 1 << 30) {
            err = what + ": it is cut off, or its tensors are larger than it" + again;
            return KVQ_ERR_CONFIG;
        }
        f.reset(new file(path, false));
        if (!f->g) {
            err = what + ": its tensors cannot be read" + again;
            return KVQ_ERR_CONFIG;
        }
    }
    const std::map<std::string, entry> entries = entries_of(*f);
    const std::string sum = get_str(f->g, "kvq.checksum");
    std::string why = kvq_refuse_format(f->g); // of another format the checksum would be, too
    if (why.empty() && !sum.empty() && checksum(entries) != sum) {
        why = "it is damaged (checksum " + checksum(entries) + ", " + sum + " when it was made)";
    }
    if (why.empty() && sum.empty() && entries.count("kvq.model.sketch")) { // a file has both
        why = "it is damaged (kvq.model.sketch is in it and kvq.checksum is not)";
    }
    if (why.empty()) { why = kvq_refuse_model(f->g, model); }
    if (!why.empty()) {
        err = what + ": " + why + again;
        return KVQ_ERR_CONFIG;
    }
    if (sum.empty()) {
        note = what +
            " has no checksum and no fingerprint of the model: an older version made it, ggml-kvq calibrate makes both";
        return KVQ_OK;
    }
    const auto sketch = entries.find("kvq.model.sketch");
    if (sketch == entries.end() || model_path.empty()) { return KVQ_OK; }
    const std::vector<float> is = kvq_make_sketch(model_path);
    std::vector<float> was(sketch->second.nb / 4);
    memcpy(was.data(), sketch->second.data, 4 * was.size());
    const bool comparable = !is.empty() && was.size() == is.size() &&
        std::all_of(was.begin(), was.end(), [](float x) { return std::isfinite(x); });
    const kinship k = comparable ? compare(was, is) : is.empty() ? SAME : OTHER;
    if (k == OTHER) {
        err = what + " is of another model than '" + model_path + "': their weights have nothing in common" + again;
        return KVQ_ERR_CONFIG;
    }
    if (k == TUNED) {
        note = what + " is of other weights than '" + model_path +
            "' (another fine-tune?): it may fit less well, ggml-kvq calibrate fits it";
    }
    return KVQ_OK;
}

} // namespace

std::string kvq_refuse_format(const gguf_context * g) {
    uint32_t version = 0;
    if (!get_u32(g, "kvq.version", version)) { return "kvq.version is missing"; }
    if (version == KVQ_CALIBRATION_VERSION) { return ""; }
    return "kvq.version is " + std::to_string(version) + ", this library reads " +
        std::to_string(KVQ_CALIBRATION_VERSION);
}

std::string kvq_refuse_model(const gguf_context * g, const kvq_model_info & model) {
    uint32_t n_layer = 0;
    if (!get_u32(g, "kvq.model.n_layer", n_layer)) { return "kvq.model.n_layer is missing"; }
    if (model.arch.empty()) { return ""; }
    const std::string arch = get_str(g, "kvq.model.arch"), hash = get_str(g, "kvq.model.hash");
    if (arch != model.arch) { return "kvq.model.arch is '" + arch + "', the model's is '" + model.arch + "'"; }
    if (n_layer != (uint32_t) model.n_layer) {
        return "kvq.model.n_layer is " + std::to_string(n_layer) + ", the model has " + std::to_string(model.n_layer);
    }
    if (hash != model.hash) { return "kvq.model.hash is '" + hash + "', the model's is '" + model.hash + "'"; }
    return "";
}

kvq_status kvq_check_calibrated(const std::string & path, const std::string & model_path, const kvq_model_info & model,
    std::string & note, std::string & err) {
    // sizes are asked for several times before a cache is made: a file that stays as it is is read once
    struct answer {
        kvq_status status;
        std::string err;
    };
    static std::mutex mutex;
    static std::map<std::string, answer> known;
    std::string key = path + "\n" + model_path;
    struct stat st = {};
    for (const std::string & p : { path, model_path }) {
        if (!p.empty() && !stat(p.c_str(), &st)) {
            key += "\n" + std::to_string(st.st_size) + " " + std::to_string(st.st_mtim.tv_sec) + "." +
                std::to_string(st.st_mtim.tv_nsec) + " " + std::to_string(st.st_ino);
        }
    }
    note.clear();
    if (stat(path.c_str(), &st)) {
        err = "cannot open calibrated data '" + path + "': check --kv-config";
        return KVQ_ERR_CONFIG;
    }
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = known.find(key);
    if (found != known.end()) {
        err = found->second.err;
        return found->second.status;
    }
    const kvq_status status = check(path, model_path, model, (size_t) st.st_size, note, err);
    if (known.size() >= 64) { known.clear(); }
    known[key] = { status, status == KVQ_OK ? "" : err };
    return status;
}

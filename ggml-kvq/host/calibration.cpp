#include "calibration.h"

#include "gguf.h"
#include "ggml.h"

#include <cmath>
#include <cstdio>
#include <cstring>

namespace {

constexpr size_t MAX_VALUES = (size_t) 1 << 20; // of one mean: far above any KV width

struct file {
    gguf_context * g = nullptr;
    ggml_context * data = nullptr;
    ~file() {
        if (g)    { gguf_free(g); }
        if (data) { ggml_free(data); }
    }
};

bool get_u32(const gguf_context * g, const char * key, uint32_t & out) {
    const int64_t id = gguf_find_key(g, key);
    if (id < 0 || gguf_get_kv_type(g, id) != GGUF_TYPE_UINT32) {
        return false;
    }
    out = gguf_get_val_u32(g, id);
    return true;
}

std::string get_str(const gguf_context * g, const std::string & key) {
    const int64_t id = gguf_find_key(g, key.c_str());
    return id >= 0 && gguf_get_kv_type(g, id) == GGUF_TYPE_STRING ? gguf_get_val_str(g, id) : "";
}

// f32 vector stored as a tensor or as a metadata array; false: absent. err is set when it is there and wrong.
bool get_vector(const file & f, const std::string & name, std::vector<float> & out, std::string & err) {
    const float * from = nullptr;
    size_t n = 0;
    const int64_t key = gguf_find_key(f.g, name.c_str());
    if (ggml_tensor * t = f.data ? ggml_get_tensor(f.data, name.c_str()) : nullptr) {
        if (t->type != GGML_TYPE_F32 || ggml_n_dims(t) != 1 || !t->data) {
            err = name + " is not an f32 vector";
            return false;
        }
        from = (const float *) t->data;
        n    = (size_t) t->ne[0];
    } else if (key >= 0) {
        const int64_t shape = gguf_find_key(f.g, (name + ".shape").c_str());
        if (gguf_get_kv_type(f.g, key) != GGUF_TYPE_ARRAY || gguf_get_arr_type(f.g, key) != GGUF_TYPE_UINT8 || get_str(f.g, name + ".type") != "f32") {
            err = name + " is not an array of u8 with " + name + ".type f32";
            return false;
        }
        if (shape < 0 || gguf_get_kv_type(f.g, shape) != GGUF_TYPE_ARRAY || gguf_get_arr_type(f.g, shape) != GGUF_TYPE_UINT32 || gguf_get_arr_n(f.g, shape) != 1) {
            err = name + ".shape is not an array of one u32";
            return false;
        }
        n    = ((const uint32_t *) gguf_get_arr_data(f.g, shape))[0];
        from = (const float *) gguf_get_arr_data(f.g, key);
        if (gguf_get_arr_n(f.g, key) != 4 * n) {
            err = name + " has " + std::to_string(gguf_get_arr_n(f.g, key)) + " bytes, its shape says " + std::to_string(n) + " values";
            return false;
        }
    } else {
        return false;
    }
    if (n == 0 || n > MAX_VALUES) {
        err = name + " has " + std::to_string(n) + " values";
        return false;
    }
    out.resize(n);
    memcpy(out.data(), from, 4 * n);
    for (const float x : out) {
        if (!std::isfinite(x) || fabsf(x) > 65504.0f) {
            err = name + " holds a value that is not finite in f16";
            return false;
        }
    }
    return true;
}

} // namespace

kvq_status kvq_calibration_load(const std::string & path, const kvq_model_info & model, kvq_calibration & out, std::string & err) {
    const std::string again = ": make it again with ggml-kvq calibrate";
    kvq_model_info self; // a model file is read without its weights
    const auto refuse = [&](const std::string & why) {
        err = "calibrated data in '" + path + "': " + why + again;
        return KVQ_ERR_CONFIG;
    };
    FILE * exists = fopen(path.c_str(), "rb");
    if (!exists) {
        err = "cannot open calibrated data '" + path + "': check --kv-config";
        return KVQ_ERR_CONFIG;
    }
    fseek(exists, 0, SEEK_END);
    const long size = ftell(exists);
    fclose(exists);
    file f;
    f.g = gguf_init_from_file(path.c_str(), { /*no_alloc =*/ true, /*ctx =*/ nullptr });
    if (!f.g) {
        return refuse("it is not a readable GGUF file");
    }
    if (get_str(f.g, "general.type") == "kvq") { // a sidecar is small and read whole; its size bounds what is allocated
        gguf_free(f.g);
        f.g = size <= (1l << 30) ? gguf_init_from_file(path.c_str(), { false, &f.data }) : nullptr;
        if (!f.g) {
            return refuse("its tensors cannot be read");
        }
    }
    uint32_t version = 0, n_layer = 0;
    if (!get_u32(f.g, "kvq.version", version)) {
        return refuse("kvq.version is missing");
    }
    if (version != KVQ_CALIBRATION_VERSION) {
        return refuse("kvq.version is " + std::to_string(version) + ", this library reads " + std::to_string(KVQ_CALIBRATION_VERSION));
    }
    if (!get_u32(f.g, "kvq.model.n_layer", n_layer)) {
        return refuse("kvq.model.n_layer is missing");
    }
    const std::string arch = get_str(f.g, "kvq.model.arch"), hash = get_str(f.g, "kvq.model.hash");
    if (!model.arch.empty()) {
        if (arch != model.arch) {
            return refuse("kvq.model.arch is '" + arch + "', the model's is '" + model.arch + "'");
        }
        if ((int) n_layer != model.n_layer) {
            return refuse("kvq.model.n_layer is " + std::to_string(n_layer) + ", the model has " + std::to_string(model.n_layer));
        }
        if (hash != model.hash) {
            return refuse("kvq.model.hash is '" + hash + "', the model's is '" + model.hash + "'");
        }
    }
    out = kvq_calibration{};
    out.path = path;
    for (uint32_t il = 0; il < n_layer && il < 4096; il++) {
        kvq_calibration::layer l;
        const std::string base = "kvq.aqua.blk." + std::to_string(il);
        for (int v = 0; v < 2; v++) {
            std::string why;
            if (!get_vector(f, base + (v ? ".v.bias" : ".k.bias"), v ? l.v_mean : l.k_mean, why) && !why.empty()) {
                return refuse(why);
            }
        }
        if (l.k_mean.empty() != l.v_mean.empty()) {
            return refuse(base + (l.k_mean.empty() ? ".k.bias" : ".v.bias") + " is missing");
        }
        if (!l.k_mean.empty()) {
            out.layers[(int) il] = l;
        }
    }
    return out.layers.empty() ? refuse("kvq.aqua.blk.0.k.bias is missing") : KVQ_OK;
}

bool kvq_calibration::fits(int il, int width_k, int width_v, std::string & err) const {
    const auto l = layers.find(il);
    const std::string base = "calibrated data in '" + path + "': kvq.aqua.blk." + std::to_string(il);
    if (l == layers.end()) {
        err = base + ".k.bias is missing: make it again with ggml-kvq calibrate";
        return false;
    }
    for (int v = 0; v < 2; v++) {
        const size_t have = (v ? l->second.v_mean : l->second.k_mean).size(), want = (size_t) (v ? width_v : width_k);
        if (want && have != want) {
            err = base + (v ? ".v" : ".k") + ".bias has " + std::to_string(have) + " values, the model's layer " + std::to_string(want);
            return false;
        }
    }
    return true;
}

kvq_status kvq_calibration_for(const kvq_config & config, const kvq_model_info & model, std::shared_ptr<const kvq_calibration> & out, std::string & err) {
    out.reset();
    if (strcmp(config.method->info.name, "aqua") || config.options.is("predictor", "none")) {
        return KVQ_OK;
    }
    const std::string path = config.config_path.empty() ? config.model_path : config.config_path;
    if (path.empty() || (config.config_path.empty() && !model.calibrated)) {
        err = "method aqua needs calibrated means and '" + path + "' holds none: give a sidecar with --kv-config (ggml-kvq calibrate makes it), or set predictor=none";
        return KVQ_ERR_CONFIG;
    }
    std::shared_ptr<kvq_calibration> c(new kvq_calibration);
    const kvq_status status = kvq_calibration_load(path, model, *c, err);
    out = c;
    return status;
}

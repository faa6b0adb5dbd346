#include "cache/calibration.h"
#include "fingerprint.h"

#include "gguf.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace {

constexpr size_t MAX_VALUES = (size_t) 1 << 20; // of one mean: far above any KV width

struct file {
    gguf_context * g = nullptr;
    ggml_context * data = nullptr;
    ~file() {
        if (g) { gguf_free(g); }
        if (data) { ggml_free(data); }
    }
};

std::string number(float x) {
    char text[32];
    snprintf(text, sizeof(text), "%g", (double) x);
    return text;
}

bool get_u32(const gguf_context * g, const char * key, uint32_t & out) {
    const int64_t id = gguf_find_key(g, key);
    if (id < 0 || gguf_get_kv_type(g, id) != GGUF_TYPE_UINT32) { return false; }
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
        n = (size_t) t->ne[0];
    } else if (key >= 0) {
        const int64_t shape = gguf_find_key(f.g, (name + ".shape").c_str());
        if (gguf_get_kv_type(f.g, key) != GGUF_TYPE_ARRAY || gguf_get_arr_type(f.g, key) != GGUF_TYPE_UINT8 ||
            get_str(f.g, name + ".type") != "f32") {
            err = name + " is not an array of u8 with " + name + ".type f32";
            return false;
        }
        if (shape < 0 || gguf_get_kv_type(f.g, shape) != GGUF_TYPE_ARRAY ||
            gguf_get_arr_type(f.g, shape) != GGUF_TYPE_UINT32 || gguf_get_arr_n(f.g, shape) != 1) {
            err = name + ".shape is not an array of one u32";
            return false;
        }
        n = ((const uint32_t *) gguf_get_arr_data(f.g, shape))[0];
        from = (const float *) gguf_get_arr_data(f.g, key);
        if (gguf_get_arr_n(f.g, key) != 4 * n) {
            err = name + " has " + std::to_string(gguf_get_arr_n(f.g, key)) + " bytes, its shape says " +
                std::to_string(n) + " values";
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

// Rows of n_out outputs; err is set when it is there and wrong.
bool get_matrix(const file & f, const std::string & name, kvq_calibration::matrix & out, std::string & err) {
    const void * from = nullptr;
    size_t nb = 0;
    int64_t n_in = 0, n_out = 0;
    const int64_t key = gguf_find_key(f.g, name.c_str());
    if (ggml_tensor * t = f.data ? ggml_get_tensor(f.data, name.c_str()) : nullptr) {
        out.type = t->type;
        n_in = t->ne[0];
        n_out = t->ne[1];
        nb = ggml_nbytes(t);
        from = ggml_n_dims(t) <= 2 ? t->data : nullptr;
    } else if (key >= 0) {
        const std::string type = get_str(f.g, name + ".type");
        const int64_t shape = gguf_find_key(f.g, (name + ".shape").c_str());
        out.type = type == "f32" ? GGML_TYPE_F32
            : type == "f16"      ? GGML_TYPE_F16
            : type == "q4_0"     ? GGML_TYPE_Q4_0
                                 : GGML_TYPE_COUNT;
        if (gguf_get_kv_type(f.g, key) != GGUF_TYPE_ARRAY || gguf_get_arr_type(f.g, key) != GGUF_TYPE_UINT8) {
            err = name + " is not an array of u8";
            return false;
        }
        if (shape < 0 || gguf_get_kv_type(f.g, shape) != GGUF_TYPE_ARRAY ||
            gguf_get_arr_type(f.g, shape) != GGUF_TYPE_UINT32 || gguf_get_arr_n(f.g, shape) != 2) {
            err = name + ".shape is not an array of two u32";
            return false;
        }
        n_out = ((const uint32_t *) gguf_get_arr_data(f.g, shape))[0];
        n_in = ((const uint32_t *) gguf_get_arr_data(f.g, shape))[1];
        nb = gguf_get_arr_n(f.g, key);
        from = gguf_get_arr_data(f.g, key);
    } else {
        return false;
    }
    if (out.type != GGML_TYPE_F32 && out.type != GGML_TYPE_F16 && out.type != GGML_TYPE_Q4_0) {
        err = name + " is not of type f32, f16 or q4_0";
        return false;
    }
    const ggml_type type = (ggml_type) out.type;
    if (!from || n_in < 1 || n_out < 1 || n_in > KVQ_PREDICT_MOST || n_out > KVQ_PREDICT_MOST ||
        n_in % ggml_blck_size(type) || nb != (size_t) n_out * ggml_row_size(type, n_in)) {
        err = name + " has " + std::to_string(nb) + " bytes for " + std::to_string(n_out) + " x " +
            std::to_string(n_in) + " values";
        return false;
    }
    out.n_in = (int) n_in;
    out.n_out = (int) n_out;
    out.raw.assign((const uint8_t *) from, (const uint8_t *) from + nb);
    // the scale is the first of a block
    const size_t step = type == GGML_TYPE_F32 ? 4 : type == GGML_TYPE_F16 ? 2 : ggml_type_size(type);
    for (size_t at = 0; at < nb; at += step) {
        float x;
        uint16_t h;
        memcpy(&x, &out.raw[at], type == GGML_TYPE_F32 ? 4 : 2);
        memcpy(&h, &out.raw[at], 2);
        x = type == GGML_TYPE_F32 ? x : ggml_fp16_to_fp32(h);
        if (!std::isfinite(x) || fabsf(x) > 65504.0f) {
            err = name + " holds a value that is not finite in f16";
            return false;
        }
    }
    return true;
}

// Root mean square of the captured rows of a layer; -1: an older file, which does not say. False: it says nonsense.
bool get_rms(const gguf_context * g, const std::string & name, float & out) {
    const int64_t id = gguf_find_key(g, name.c_str());
    out = id < 0 ? -1.0f : gguf_get_kv_type(g, id) == GGUF_TYPE_FLOAT32 ? gguf_get_val_f32(g, id) : NAN;
    return id < 0 || (std::isfinite(out) && out >= 0);
}

// A mean cannot carry more energy than the rows it is of. Without their size: far more than keys of any model known
// have.
bool mean_fits(const std::vector<float> & mean, float rms) {
    double sum = 0;
    float top = 0;
    for (const float x : mean) {
        sum += (double) x * x;
        top = std::max(top, fabsf(x));
    }
    return rms >= 0 ? sum <= 1.02 * (double) mean.size() * rms * rms + 1e-6 : top <= 8192.0f;
}

// Predictions are about as large as what they predict; rows of correlated channels may take large weights, which
// cancel.
bool matrix_fits(const kvq_calibration::matrix & m, float rms_in, float rms_out) {
    std::vector<float> row((size_t) m.n_in);
    const size_t nb_row = ggml_row_size((ggml_type) m.type, m.n_in);
    double sum = 0;
    for (int i = 0; i < m.n_out; i++) {
        if (m.type == GGML_TYPE_F32) {
            memcpy(row.data(), &m.raw[i * nb_row], nb_row);
        } else {
            ggml_get_type_traits((ggml_type) m.type)->to_float(&m.raw[i * nb_row], row.data(), m.n_in);
        }
        for (const float x : row) { sum += (double) x * x; }
    }
    return sqrt(sum / m.n_out) * rms_in <= 1000.0 * rms_out;
}

std::vector<float> values_of(const kvq_calibration::matrix & m) {
    std::vector<float> out((size_t) m.n_in * m.n_out);
    if (m.type == GGML_TYPE_F32) {
        memcpy(out.data(), m.raw.data(), m.raw.size());
    } else {
        ggml_get_type_traits((ggml_type) m.type)->to_float(m.raw.data(), out.data(), (int64_t) out.size());
    }
    return out;
}

// A basis, NAME.axes and of keys NAME.read. "": it is absent, or good; else what is wrong.
std::string get_basis(const file & f, const std::string & name, bool value, size_t width, kvq_basis_data & out) {
    kvq_calibration::matrix axes, read;
    std::string why;
    if (!get_matrix(f, name + ".axes", axes, why)) { return why; }
    if (!value && !get_matrix(f, name + ".read", read, why)) { return why.empty() ? name + ".read is missing" : why; }
    for (const auto * m : { &axes, &read }) {
        if (m == &read && value) { continue; }
        if ((size_t) m->n_in != width || m->n_out != axes.n_out || m->n_out % 2 || m->n_out > KVQ_MAX_COORDS) {
            return name + (m == &axes ? ".axes" : ".read") + " is " + std::to_string(m->n_out) + " x " +
                std::to_string(m->n_in) + ", not an even number of coordinates up to " +
                std::to_string(KVQ_MAX_COORDS) + " x " + std::to_string(width) + " channels";
        }
    }
    const std::vector<float> reads = value ? std::vector<float>() : values_of(read);
    out.make(axes.n_out, axes.n_in, values_of(axes).data(), value ? nullptr : reads.data());
    return "";
}

// Order and gains of keys (kvq_order), NAME.order and NAME.gain. "": they are absent, or good; else what is wrong.
// Whether the order is one of heads is seen where their size is known (fits).
std::string get_order(const file & f, const std::string & name, size_t width, kvq_calibration::layer::order & out) {
    std::vector<float> order;
    std::string why;
    if (!get_vector(f, name + ".order", order, why)) { return why; }
    if (!get_vector(f, name + ".gain", out.gain, why)) { return why.empty() ? name + ".gain is missing" : why; }
    if (order.size() != width || out.gain.size() != width) {
        return name + ".order has " + std::to_string(order.size()) + " values and .gain " +
            std::to_string(out.gain.size()) + ", keys " + std::to_string(width);
    }
    constexpr float MOST = 16384.0f; // of a gain: what a clamp in Python leaves, and f16 rows hold
    for (size_t i = 0; i < order.size(); i++) {
        if (!(order[i] >= 0.0f && order[i] < 65536.0f) || order[i] != floorf(order[i])) {
            return name + ".order holds " + number(order[i]) + ", which is not the number of a channel";
        }
        if (!(out.gain[i] >= 1.0f / MOST && out.gain[i] <= MOST)) {
            return name + ".gain holds " + number(out.gain[i]) + ", outside 1/16384..16384";
        }
        out.channel.push_back((uint16_t) order[i]);
        out.back.push_back(1.0f / out.gain[i]);
    }
    return "";
}

} // namespace

kvq_status kvq_calibration_load(
    const std::string & path, const kvq_model_info & model, kvq_calibration & out, std::string & err) {
    const std::string again = ": make it again with ggml-kvq calibrate";
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
    f.g = gguf_init_from_file(path.c_str(), { /*no_alloc =*/true, /*ctx =*/nullptr });
    if (!f.g) { return refuse("it is not a readable GGUF file"); }
    if (get_str(f.g, "general.type") == "kvq") { // a sidecar is small and read whole; its size bounds what is allocated
        size_t nb = gguf_get_data_offset(f.g);
        for (int64_t i = 0; i < gguf_get_n_tensors(f.g) && nb <= (size_t) size; i++) {
            nb = gguf_get_tensor_size(f.g, i) <= (size_t) size ? nb + gguf_get_tensor_size(f.g, i) : SIZE_MAX;
        }
        if (nb > (size_t) size) { return refuse("it is cut off, or its tensors are larger than it"); }
        gguf_free(f.g);
        f.g = size <= (1l << 30) ? gguf_init_from_file(path.c_str(), { false, &f.data }) : nullptr;
        if (!f.g) { return refuse("its tensors cannot be read"); }
    }
    std::string other = kvq_refuse_format(f.g);
    if (other.empty()) { other = kvq_refuse_model(f.g, model); }
    if (!other.empty()) { return refuse(other); }
    uint32_t n_layer = 0;
    get_u32(f.g, "kvq.model.n_layer", n_layer);
    out = kvq_calibration{};
    out.path = path;
    out.predictor = get_str(f.g, "kvq.aqua.predictor");
    out.tried_coords = gguf_find_key(f.g, "kvq.aqua.coords") >= 0;
    for (uint32_t il = 0; il < n_layer && il < 4096; il++) {
        kvq_calibration::layer l;
        const std::string base = "kvq.aqua.blk." + std::to_string(il);
        for (int v = 0; v < 2; v++) {
            std::string why;
            if (!get_vector(f, base + (v ? ".v.bias" : ".k.bias"), v ? l.v_mean : l.k_mean, why) && !why.empty()) {
                return refuse(why);
            }
        }
        const std::pair<const char *, kvq_calibration::matrix *> matrices[] = { { ".k.weight", &l.k },
            { ".v.weight", &l.v }, { ".v.fold", &l.fold } };
        for (const auto & m : matrices) {
            std::string why;
            if (!get_matrix(f, base + m.first, *m.second, why) && !why.empty()) { return refuse(why); }
        }
        float rms[2];
        for (int v = 0; v < 2; v++) {
            const std::string name = base + (v ? ".v.rms" : ".k.rms");
            if (!get_rms(f.g, name, rms[v])) {
                return refuse(name + " is " + number(rms[v]) + ", not the size of rows");
            }
            if (!mean_fits(v ? l.v_mean : l.k_mean, rms[v])) {
                return refuse(base + (v ? ".v" : ".k") + ".bias is larger than the rows that were calibrated");
            }
        }
        for (const auto & m : matrices) {
            const float rms_out = rms[m.second != &l.k];
            if (m.second->n_in && rms[0] > 0 && rms[1] > 0 &&
                !matrix_fits(*m.second, std::min(rms[0], rms[1]), rms_out)) {
                return refuse(base + m.first + " predicts far larger rows than those that were calibrated");
            }
        }
        if (l.k_mean.empty() != l.v_mean.empty()) {
            return refuse(base + (l.k_mean.empty() ? ".k.bias" : ".v.bias") + " is missing");
        }
        std::string disorder = get_order(f, base + ".k", l.k_mean.size(), l.k_order);
        if (disorder.empty()) { disorder = get_order(f, base + ".k.left", l.k_mean.size(), l.k_left); }
        for (const bool v : { false, true }) {
            const size_t width = (v ? l.v_mean : l.k_mean).size();
            if (disorder.empty()) { disorder = get_basis(f, base + (v ? ".v" : ".k"), v, width, l.basis[v]); }
        }
        if (!disorder.empty()) { return refuse(disorder); }
        uint32_t prev;
        if (get_u32(f.g, (base + ".prev").c_str(), prev)) { l.prev = (int) prev; }
        if (l.k_mean.empty()) { continue; }
        kvq_calibration::layer & kept = out.layers[(int) il] = l;
        kept.look();
    }
    return out.layers.empty() ? refuse("kvq.aqua.blk.0.k.bias is missing") : KVQ_OK;
}

bool kvq_calibration::fits(
    int il, int prev, const kvq_layer_plan & plan, int width_k, int width_v, bool part, std::string & err) const {
    const auto l = layers.find(il);
    const std::string base = "calibrated data in '" + path + "': kvq.aqua.blk." + std::to_string(il);
    if (l == layers.end()) {
        err = base + ".k.bias is missing: make it again with ggml-kvq calibrate";
        return false;
    }
    const kvq_part * transform = plan.part("transform");
    if (transform && transform->get("sort") > 0) {
        const bool left = plan.part("chain") || plan.k.coords;
        const std::vector<uint16_t> & channel = (left ? l->second.k_left : l->second.k_order).channel;
        const size_t D = (size_t) plan.k.head_size;
        std::vector<bool> seen;
        bool good = !channel.empty() && D && channel.size() % D == 0;
        for (size_t i = 0; good && i < channel.size(); i++) {
            if (i % D == 0) { seen.assign(D, false); }
            good = channel[i] < D && !seen[channel[i]];
            if (good) { seen[channel[i]] = true; }
        }
        if (!good) {
            err = base + (left ? ".k.left.order" : ".k.order") + " does not name each channel of a head of " +
                std::to_string(D) + " once: make it again with ggml-kvq calibrate";
            return false;
        }
    }
    for (int v = 0; v < 2; v++) {
        const size_t have = (v ? l->second.v_mean : l->second.k_mean).size(), want = (size_t) (v ? width_v : width_k);
        const bool share = part && want && want < have;
        const int coords = plan.k.coords, heads = coords && want ? (int) want / (v ? plan.v : plan.k).head_size : 0;
        if (share && coords) {
            err = "coordinates take whole layers, and this device has some heads of layer " + std::to_string(il) +
                ": run with -sm layer, or set coordinates=off";
            return false;
        }
        if (heads && l->second.basis[v].view.n != heads * coords - 2) {
            err = base + (v ? ".v" : ".k") + ".axes has " + std::to_string(l->second.basis[v].view.n) +
                " coordinates, option coords=" + std::to_string(coords) + " asks for " +
                std::to_string(heads * coords - 2) + ": make them again with ggml-kvq calibrate, or set coords=0";
            return false;
        }
        if (share && plan.part("chain")) {
            err = "a predictor takes whole layers, and this device has some heads of layer " + std::to_string(il) +
                ": run with -sm layer, or predictor=bias";
            return false;
        }
        if (want && have != want && !share) {
            err = base + (v ? ".v" : ".k") + ".bias has " + std::to_string(have) + " values, the model's layer " +
                std::to_string(want);
            return false;
        }
        const kvq_part * chain = plan.part("chain");
        const bool folds = chain && chain->get("fold") > 0;
        const matrix & m = !v ? l->second.k : folds ? l->second.fold : l->second.v;
        const int n_in = !chain ? 0
            : v                 ? (int) (chain->get("v_from_k") + chain->get("v_from_below"))
                                : (int) chain->get("k_from_k");
        const std::string name = base +
            (!v ? ".k.weight"
                    : folds ? ".v.fold"
                            : ".v.weight"),
                          again = ": make it again with ggml-kvq calibrate --predictor " +
            std::string(folds                           ? "fold"
                    : chain && chain->get("values") > 0 ? "full"
                                                        : "k");
        if (!n_in || !want) { continue; }
        if (!m.n_in) {
            err = name + " is missing" + again;
            return false;
        }
        if (m.n_in != n_in || m.n_out != (int) want) {
            err = name + " is " + std::to_string(m.n_out) + " x " + std::to_string(m.n_in) + ", the model needs " +
                std::to_string(want) + " x " + std::to_string(n_in) + again;
            return false;
        }
        if (l->second.prev != prev) {
            err = base + ".prev is " + std::to_string(l->second.prev) + ", in this cache layer " +
                std::to_string(prev) + " comes before" + again;
            return false;
        }
    }
    return true;
}

// q4_0 goes over as it is, other types by value
static void pack_matrix(
    const kvq_calibration::matrix & m, int in0, int n_in, int bits, kvq_predictor & p, std::vector<uint8_t> & packed) {
    packed.assign(kvq_predictor_bytes(n_in, m.n_out, bits), 0);
    const size_t nb_row = ggml_row_size((ggml_type) m.type, m.n_in);
    if (m.type == GGML_TYPE_Q4_0 && bits == 4 && in0 % 32 == 0 && n_in % 32 == 0) {
        for (int i = 0; i < m.n_out; i++) {
            for (int g = 0; g < n_in / 32; g++) {
                // f16 scale, 16 bytes: low halves first
                const uint8_t * block = &m.raw[i * nb_row + (size_t) (in0 / 32 + g) * 18];
                uint8_t code[32];
                for (int j = 0; j < 16; j++) {
                    code[j] = block[2 + j] & 15;
                    code[16 + j] = block[2 + j] >> 4;
                }
                uint16_t step;
                memcpy(&step, block, 2);
                kvq_predictor_put4(n_in, m.n_out, i, g, step, code, packed.data());
            }
        }
    } else {
        std::vector<float> row((size_t) m.n_in), w((size_t) m.n_out * n_in);
        for (int i = 0; i < m.n_out; i++) {
            if (m.type == GGML_TYPE_F32) {
                memcpy(row.data(), &m.raw[i * nb_row], nb_row);
            } else {
                ggml_get_type_traits((ggml_type) m.type)->to_float(&m.raw[i * nb_row], row.data(), m.n_in);
            }
            std::copy_n(row.begin() + in0, n_in, w.begin() + (long) i * n_in);
        }
        kvq_predictor_pack(n_in, m.n_out, bits, w.data(), packed.data());
    }
    p.n_in = n_in;
    p.n_out = m.n_out;
    p.bits = bits;
    p.data = packed.data();
}

void kvq_calibration::pack(int bits, bool values, bool fold) {
    for (auto & x : layers) {
        layer & l = x.second;
        const int width_k = (int) l.k_mean.size();
        if (l.k.n_in) { pack_matrix(l.k, 0, l.k.n_in, bits, l.w.k, l.packed[0]); }
        const matrix & v = fold ? l.fold : l.v;
        if (values && v.n_in > width_k) {
            pack_matrix(v, 0, width_k, bits, l.w.v_from_k, l.packed[1]);
            pack_matrix(v, width_k, v.n_in - width_k, bits, l.w.v_from_below, l.packed[2]);
        }
        l.k.raw = l.v.raw = l.fold.raw = {};
    }
}

// Where nothing was measured: what the weights say. The option `pairs` is as given, if it was.
static void take_weights(kvq_config & config, const kvq_model_info & model, const std::string & path,
    std::shared_ptr<const kvq_calibration> & out) {
    std::shared_ptr<kvq_calibration> c(new kvq_calibration);
    bool sorted = false;
    if (path.empty() || !kvq_calibration_of_weights(path, model, *c, sorted)) { return; }
    const auto pairs = config.options.values.find("pairs");
    if (sorted && !config.options.given.count("pairs") && pairs != config.options.values.end()) {
        pairs->second = "sorted";
    }
    out = c;
}

kvq_status kvq_calibration_for(kvq_config & config, const kvq_model_info & model,
    std::shared_ptr<const kvq_calibration> & out, std::string & err) {
    out.reset();
    const kvq_method & method = *config.method;
    const kvq_data wants = method.data ? method.data(config.options) : kvq_data::NONE;
    if (wants == kvq_data::NONE) { return KVQ_OK; }
    const std::string path = config.config_path.empty() ? config.model_path : config.config_path;
    if (path.empty() || (config.config_path.empty() && !model.calibrated)) {
        if (wants == kvq_data::TAKES) {
            take_weights(config, model, path, out);
            method.settle(config.options, out ? "bias" : nullptr, 8);
            return KVQ_OK;
        }
        const bool aqua = !method.most && config.options.values.count("predictor");
        const std::string first_use = !method.most   ? ""
            : config.options.is("predictors", "on")  ? "predictors"
            : config.options.is("coordinates", "on") ? "coordinates"
                                                     : "";
        err = std::string("method ") + method.info.name + " needs calibrated data and '" + path + "' holds none: " +
            (first_use.empty() ? "" : "ggml-kvq plugin -m MODEL --" + first_use + " fits them once, or ") +
            "give a sidecar with --kv-config (ggml-kvq calibrate makes it), or set " +
            (!first_use.empty()   ? first_use + "=off"
                    : method.most ? "means=auto and predictor=none"
                    : aqua        ? "predictor=none"
                                  : "near=higgs");
        return KVQ_ERR_CONFIG;
    }
    std::shared_ptr<kvq_calibration> c(new kvq_calibration);
    const kvq_status status = kvq_calibration_load(path, model, *c, err);
    if (status != KVQ_OK) { return status; }
    int weight_bits = 8;
    for (const auto & l : c->layers) { weight_bits = l.second.k.type == GGML_TYPE_Q4_0 ? 4 : weight_bits; }
    method.settle(config.options, c->predictor.c_str(), weight_bits);
    if (method.most && config.options.is("coordinates", "on") && !config.options.given.count("coords") &&
        config.options.num("coords") == 0 && !c->tried_coords) {
        err = "calibrated data in '" + path +
            "' hold no coordinates: make them with ggml-kvq calibrate --coords auto, or set coordinates=off";
        return KVQ_ERR_CONFIG;
    }
    const auto predictor = config.options.values.find("predictor");
    if (predictor != config.options.values.end() && predictor->second != "bias" && predictor->second != "none") {
        const bool fold = predictor->second == "fold";
        c->pack(config.options.is("weights", "4") ? 4 : 8, fold || predictor->second == "full", fold);
    }
    out = c;
    return status;
}

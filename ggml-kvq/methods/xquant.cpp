// XQuant (Yang et al. 2025, cross-layer): KIVI blocks whose end points are calibrated by eta, and whose codes layer
// pairs share.
//   keys of layers below kq and values of layers below vq take 2 bits, all others 1 (section 3.3)
//   an odd layer at or above km (vm) adopts the codes of the layer before it and keeps only its own scale and zero;
//   where that layer is in another cache (on another device), it keeps codes of its own
//   eta1 for 1-bit, eta2 for 2-bit blocks (section 3.2)
// Presets name the equivalent bits of a 32-layer model; -1 scales them to the layer count, rounded so that pairs stay
// whole. The paper prints no split for 1.156; 26/0/32/0 is ours: all value codes shared, keys favoured.
#include "method.h"

#include <algorithm>

static const kvq_option_info options[] = {
    { "preset", "1.38|1.41|1.16", "1.38",
        "kq/vq/km/vm of 32 layers: 1.38 = 30/2/32/16, 1.41 = 28/0/32/28, 1.16 = 26/0/32/0", "XQuant section 4.1" },
    { "kq", "int", "-1", "layers with 2-bit key codes; -1: from the preset", "XQuant section 3.3" },
    { "vq", "int", "-1", "layers with 2-bit value codes; -1: from the preset", "XQuant section 3.3" },
    { "km", "int", "-1", "first layer whose keys share codes in pairs; -1: from the preset", "XQuant section 3.3" },
    { "vm", "int", "-1", "first layer whose values share codes in pairs; -1: from the preset", "XQuant section 3.3" },
    { "eta1", "float", "0.16666667", "calibration of 1-bit blocks, 0..0.49", "XQuant section 3.2" },
    { "eta2", "float", "0.045", "calibration of 2-bit blocks, 0..0.49", "XQuant section 3.2" },
    { "shared", "codes|none", "codes", "none: sharing layers store no codes at all, the null baseline", "ggml-kvq" },
    KVQ_OPTIONS_AFFINE,
};

struct preset {
    const char * name;
    int kq, vq, km, vm;
};
static const preset presets[] = {
    { "1.38", 30, 2, 32, 16 },
    { "1.41", 28, 0, 32, 28 },
    { "1.16", 26, 0, 32, 0 },
};

// even counts: key splits round down, value splits up, which keeps the preset's mean bits (16 layers: 14/2/16/8 =
// 1.375)
static int scaled(int of32, int n_layer, bool up) {
    const int pairs = up ? (of32 * n_layer + 63) / 64 : of32 * n_layer / 64;
    return std::min(2 * pairs, n_layer + n_layer % 2);
}

static kvq_status plan(const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err) {
    const kvq_status status = kvq_plan_affine(o, c, out, err);
    if (status != KVQ_OK) { return status; }
    const preset * p = presets;
    while (!o.is("preset", p->name)) { p++; }
    const char * keys[4] = { "kq", "vq", "km", "vm" };
    const int of32[4] = { p->kq, p->vq, p->km, p->vm };
    int split[4];
    for (int i = 0; i < 4; i++) {
        split[i] = o.num(keys[i]);
        if (split[i] == -1) { split[i] = scaled(of32[i], c.n_layer, i % 2); }
        if (split[i] > c.n_layer + c.n_layer % 2) {
            err = "option " + std::string(keys[i]) + "=" + std::to_string(split[i]) + " exceeds the model's " +
                std::to_string(c.n_layer) + " layers";
            return KVQ_ERR_OPTION;
        }
        if (split[i] % 2) {
            err = "option " + std::string(keys[i]) + "=" + std::to_string(split[i]) +
                " cuts a layer pair in two: use an even number";
            return KVQ_ERR_OPTION;
        }
    }
    const bool here = c.prev && c.gap == 0;
    const bool same_shape = here && c.prev->n_head_kv == c.shape.n_head_kv &&
        c.prev->head_size_k == c.shape.head_size_k && c.prev->head_size_v == c.shape.head_size_v;
    bool shares[2], apart[2]; // apart: the layer of those codes is in another cache
    for (int i = 0; i < 2; i++) {
        kvq_codec & codec = i ? out.v : out.k;
        codec.bits = c.number < split[i] ? 2 : 1;
        for (const char * key : { "eta1", "eta2" }) {
            if (!(o.real(key) >= 0.0f && o.real(key) < 0.5f)) {
                err = "option " + std::string(key) + "=" + o.str(key) + " is not within 0..0.49";
                return KVQ_ERR_OPTION;
            }
        }
        codec.eta = o.real(codec.bits == 1 ? "eta1" : "eta2");
        const bool paired = c.number % 2 && c.number >= split[2 + i];
        shares[i] = paired && same_shape;
        apart[i] = paired && !here;
        if (shares[i] && o.is("shared", "none")) {
            shares[i] = false;
            codec.bits = 0;
        }
    }
    if (shares[0] || shares[1] || apart[0] || apart[1]) {
        out.add("share_codes",
            { { "k", shares[0] }, { "v", shares[1] }, { "k_apart", apart[0] }, { "v_apart", apart[1] } });
    }
    return KVQ_OK;
}

extern const kvq_method kvq_method_xquant;
const kvq_method kvq_method_xquant = {
    { "xquant", "1-2 bit codes shared by layer pairs, calibrated end points", "XQuant (cross-layer KV quantization)",
        sizeof(options) / sizeof(options[0]), options },
    plan,
};

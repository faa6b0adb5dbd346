// What a model file itself says of its keys, for a program that brings no measured data: means and an order.
//
// Where attn_k has a bias, keys are W x + bias. The bias is most of their mean, and it does not change with the text:
//   k_mean, v_mean  the biases of attn_k and attn_v; 0 where values have none
//   k_order         sorted keys (kvq_order; the rule is that of python/ggml_kvq/calibrate/order.py), with the energies
//                   that inputs of equal size would give, n being the weight of attn_norm:
//                     e_c = sum_i (W_k[c][i] n_i)^2      q_c = sum_i (W_q[c][i] n_i)^2 + b_q[c]^2
// Models whose keys have no bias get nothing: there an order from weights alone loses more than it gains
// (docs/methods/auto.md, "Without measured means").
#include "cache/calibration.h"
#include "tensor_file.h"

#include "ggml.h"
#include "gguf.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace {

// Architectures with biases of keys whose heads turn as a whole, in the NeoX layout.
constexpr const char * turns_neox[] = { "qwen2", "qwen2moe", "starcoder2", "seed_oss", "gpt-oss" };

constexpr int64_t MOST = 1 << 20; // channels: far above any width

using energies = std::vector<double>; // mean squares by channel

// += squares of the rows of t, each entry times the one of `norm`
bool add_squares(const kvq_tensor_file & f, const std::string & name, const std::vector<float> & norm, energies & out) {
    const ggml_tensor * t = f.tensor(name);
    if (!t || t->ne[0] != (int64_t) norm.size() || t->ne[1] != (int64_t) out.size()) { return false; }
    std::vector<float> row;
    for (size_t c = 0; c < out.size(); c++) {
        if (!f.row(t, (int64_t) c, row)) { return false; }
        for (size_t i = 0; i < norm.size(); i++) { out[c] += (double) row[i] * norm[i] * row[i] * norm[i]; }
    }
    return true;
}

bool vector_of(const kvq_tensor_file & f, const std::string & name, std::vector<float> & out) {
    const ggml_tensor * t = f.tensor(name);
    return t && ggml_nrows(t) == 1 && t->ne[0] <= MOST && f.row(t, 0, out) &&
        std::all_of(out.begin(), out.end(), [](float x) { return std::fabs(x) <= 65504.0f; });
}

// Channels and gains of one head of D channels in the order of a block: weak pairs first, the channels of a pair side
// by side (order.py). g^2 = sqrt(q / e), with a geometric mean of 1.
void sort_head(int D, const double * e_channel, const double * q_channel, uint16_t * channel, float * gain) {
    constexpr double LEAST = 1e-6;
    const size_t n = (size_t) D / 2;
    energies e(n), q(n), g(n);
    const auto pairs = [&](const double * x, energies & out) {
        for (size_t p = 0; p < n; p++) { out[p] = x[p] + x[p + n]; }
        const double least = std::max(*std::max_element(out.begin(), out.end()) * LEAST, 1e-30);
        for (double & y : out) { y = std::max(y, least); }
    };
    pairs(e_channel, e);
    pairs(q_channel, q);
    double mean = 0;
    for (size_t p = 0; p < n; p++) {
        g[p] = std::pow(q[p] / e[p], 0.25);
        mean += std::log(g[p]) / (double) n;
    }
    std::vector<size_t> by_weight(n);
    std::iota(by_weight.begin(), by_weight.end(), (size_t) 0);
    std::stable_sort(by_weight.begin(), by_weight.end(), [&](size_t a, size_t b) { return e[a] * q[a] < e[b] * q[b]; });
    for (size_t i = 0; i < n; i++) {
        const size_t p = by_weight[i];
        const double clamped = std::min(std::max(g[p] / std::exp(mean), 1.0 / 16384.0), 16384.0);
        for (size_t half = 0; half < 2; half++) {
            channel[2 * i + half] = (uint16_t) (p + half * n);
            gain[2 * i + half] = (float) clamped;
        }
    }
}

// False: the weights are not such that keys can be sorted by them.
bool sort_layer(const kvq_tensor_file & f, const std::string & base, int D, kvq_calibration::layer & l) {
    std::vector<float> norm, bias;
    const size_t width = l.k_mean.size(), n_head_kv = D ? width / (size_t) D : 0;
    const ggml_tensor * wq = f.tensor(base + "attn_q.weight");
    if (!wq || !n_head_kv || width % (size_t) D || D % 2 || !vector_of(f, base + "attn_norm.weight", norm)) {
        return false;
    }
    energies e(width), q((size_t) wq->ne[1]), mean(width);
    const size_t n_head = q.size() / (size_t) D, each = n_head / n_head_kv; // query heads of a KV head
    if (q.size() % (size_t) D || !each || n_head % n_head_kv || !add_squares(f, base + "attn_k.weight", norm, e) ||
        !add_squares(f, base + "attn_q.weight", norm, q)) {
        return false;
    }
    if (vector_of(f, base + "attn_q.bias", bias) && bias.size() == q.size()) {
        for (size_t c = 0; c < q.size(); c++) { q[c] += (double) bias[c] * bias[c]; }
    }
    for (size_t c = 0; c < q.size(); c++) {
        mean[c / ((size_t) D * each) * (size_t) D + c % (size_t) D] += q[c] / (double) each;
    }
    kvq_calibration::layer::order & o = l.k_order;
    o.channel.resize(width);
    o.gain.resize(width);
    for (size_t h = 0; h < width; h += (size_t) D) { sort_head(D, &e[h], &mean[h], &o.channel[h], &o.gain[h]); }
    for (const float g : o.gain) { o.back.push_back(1.0f / g); }
    return true;
}

} // namespace

bool kvq_calibration_of_weights(
    const std::string & path, const kvq_model_info & model, kvq_calibration & out, bool & sorted) {
    const kvq_tensor_file f(path);
    out = kvq_calibration{};
    out.path = path;
    out.predictor = "bias";
    sorted = std::any_of(std::begin(turns_neox), std::end(turns_neox), [&](auto x) { return model.arch == x; });
    for (int il = 0; f.ok() && il < model.n_layer; il++) {
        if (!model.attends.empty() && !model.attends[(size_t) il]) { continue; }
        const std::string base = "blk." + std::to_string(il) + ".";
        kvq_calibration::layer l;
        const ggml_tensor * wv = f.tensor(base + "attn_v.weight");
        if (!wv || wv->ne[1] > MOST || !vector_of(f, base + "attn_k.bias", l.k_mean)) { return false; }
        if (!vector_of(f, base + "attn_v.bias", l.v_mean)) { l.v_mean.assign((size_t) wv->ne[1], 0.0f); }
        sorted = sorted && sort_layer(f, base, model.head_size_k, l);
        (out.layers[il] = l).look();
    }
    return !out.layers.empty();
}

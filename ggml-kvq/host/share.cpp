// With -sm tensor the heads of a layer lie on several devices, whose caches are made one after the other. Calibrated
// data are of whole layers, channel by channel: each cache takes those of its heads.
#include "backend.h"
#include "op_params.h"
#include "turned.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace {

// Channels of a layer that caches before this one have.
struct given {
    std::string path; // of the data
    std::vector<const kvq_device_context *> devices;
    std::map<int, std::array<size_t, 2>> channels; // by layer: of keys, of values
};

template <typename T> void cut(std::vector<T> & all, size_t first, size_t n) {
    if (!all.empty()) { all = std::vector<T>(all.begin() + (long) first, all.begin() + (long) (first + n)); }
}

void cut(kvq_layer_calibration::order & o, size_t first, size_t n) {
    cut(o.channel, first, n);
    cut(o.gain, first, n);
    cut(o.back, first, n);
    o.look();
}

} // namespace

bool kvq_take_share(const kvq_device_context * dev, kvq_cache_draft & draft) {
    static thread_local given before; // a context is made by one thread
    if (!draft.calibration) { return true; }
    const kvq_calibration & whole = *draft.calibration;
    const auto is_part = [&](const kvq_draft_layer & d) {
        const auto l = whole.layers.find(d.il);
        return l != whole.layers.end() && (size_t) d.n_embd_k < l->second.k_mean.size();
    };
    if (std::none_of(draft.layers.begin(), draft.layers.end(), is_part)) {
        before = {};
        return true;
    }
    const auto is_given = [&](const kvq_draft_layer & d) { // all of it, to devices of another context
        return before.channels[d.il][0] >= whole.layers.at(d.il).k_mean.size();
    };
    if (before.path != whole.path || std::count(before.devices.begin(), before.devices.end(), dev) ||
        std::any_of(draft.layers.begin(), draft.layers.end(), is_given)) {
        before = {};
    }
    before.path = whole.path;
    before.devices.push_back(dev);
    std::shared_ptr<kvq_calibration> mine(new kvq_calibration);
    mine->path = whole.path;
    mine->predictor = whole.predictor;
    for (const kvq_draft_layer & d : draft.layers) {
        kvq_calibration::layer l = whole.layers.at(d.il);
        std::array<size_t, 2> & first = before.channels[d.il];
        const size_t n[2] = { (size_t) d.n_embd_k, (size_t) d.n_embd_v };
        if (first[0] + n[0] > l.k_mean.size() || first[1] + n[1] > l.v_mean.size()) {
            kvq_report_error("layer " + std::to_string(d.il) + ": " + std::to_string(first[0] + n[0]) +
                " channels of keys on the devices of -sm tensor, and calibrated data of " +
                std::to_string(l.k_mean.size()) + ": run with -sm layer");
            before = {};
            return false;
        }
        cut(l.k_mean, first[0], n[0]);
        cut(l.v_mean, first[1], n[1]);
        cut(l.k_order, first[0], n[0]);
        cut(l.k_left, first[0], n[0]);
        l.k = l.v = l.fold = {};
        for (int v = 0; v < 2; v++) { first[v] += n[v]; }
        kvq_calibration::layer & kept = mine->layers[d.il] = std::move(l);
        kept.look();
    }
    draft.calibration = mine;
    return true;
}

// With -sm tensor llama.cpp asks for nodes on tensors of its own, each of which stands for one on every device.
bool kvq_is_over_devices(const ggml_tensor * t) {
    const ggml_tensor * root = t->view_src ? t->view_src : t;
    return root->buffer && !strncmp(ggml_backend_buft_name(root->buffer->buft), "Meta(", 5);
}

// A node on a cache over several devices: what this one can learn of it before its own graph comes. The youngest cache
// of that shape is the one whose context is being made; what it has learned already is not changed.
void kvq_learn_part(const kvq_device_context & dev, const ggml_tensor * op) {
    const bool writes = op->op == GGML_OP_SET_ROWS, attends = op->op == GGML_OP_FLASH_ATTN_EXT;
    const ggml_tensor * rows = writes ? op : attends ? op->src[1] : nullptr;
    if (!rows || !rows->view_src || !kvq_is_over_devices(rows)) { return; }
    const kvq_lane_id id = kvq_parse_cache_name(rows->view_src->name);
    const bool known = id.il >= 0 && id.tag.empty();
    kvq_kv_cache * const cache =
        known ? kvq_kv_cache::youngest(dev.name, id.il, id.value, rows->view_src->ne) : nullptr;
    kvq_kv_layer * const layer = cache ? cache->layer(id.il) : nullptr;
    if (!layer || layer->d.latent) { return; }
    std::string why; // the device's own graph says what is wrong
    if (attends) {
        const int size_k = (int) op->src[1]->ne[0], size_v = (int) op->src[2]->ne[0], n = layer->d.n_embd_k / size_k;
        layer->some_heads = layer->some_heads || n < op->src[1]->ne[2];
        if (!layer->is_unread() && layer->d.n_embd_k % size_k == 0) {
            cache->set_shape(*layer, n, size_k, size_v, why);
        }
    } else if (!id.value && layer->d.k.turned) {
        const ggml_tensor * rope = kvq_before_turn(op->src[0]);
        if (!rope || rope->op != GGML_OP_ROPE) { return; }
        rope->src[1]->flags |= GGML_TENSOR_FLAG_OUTPUT; // positions are read when the rows are written
        if (layer->transforms[0]->rotor) { return; }
        kvq_learn_rope(kvq_backend_context(), op, { true, cache, layer, false }, &rope, why);
    }
}

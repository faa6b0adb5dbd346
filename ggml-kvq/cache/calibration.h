// Calibrated data of a method: a sidecar GGUF (general.type "kvq", tensors) or metadata arrays of the model file itself
// (u8 payload <name>, <name>.type, <name>.shape, outermost dimension first). Both hold the same names, for layer il:
//   kvq.aqua.blk.<il>.{k,v}.bias    f32 [width], channel means of un-rotated keys and of values
//   kvq.aqua.blk.<il>.k.order       f32 [width], of each channel of a block of sorted keys the channel of its head
//   kvq.aqua.blk.<il>.k.gain        f32 [width], its gain (kvq_order)
//   kvq.aqua.blk.<il>.k.left.{order,gain}   the same of what a predictor, or coordinates, leave of keys
//   kvq.aqua.blk.<il>.{k,v}.axes    f32 or f16 [n][width], what a coordinate of 1 adds to a row (types/basis.h)
//   kvq.aqua.blk.<il>.{k,v}.read    likewise, what a coordinate is read with
//   kvq.aqua.blk.<il>.k.weight      f32, f16 or q4_0 [width][width of keys of layer prev], on rows less their means
//   kvq.aqua.blk.<il>.v.weight      likewise, inputs: keys of layer il, then values of layer prev
//   kvq.aqua.blk.<il>.v.fold        likewise, inputs: keys of layer il, then keys of layer prev
//   kvq.aqua.blk.<il>.prev          u32, the layer before it in the cache
// Implemented in gguf/calibration.cpp, which reads GGUF files.
#pragma once

#include "config.h"

#include "policy/calibrated.h"

#include <map>
#include <memory>

constexpr uint32_t KVQ_CALIBRATION_VERSION = 1;

struct kvq_calibration {
    struct matrix {
        int n_in = 0, n_out = 0, type = -1; // ggml_type
        std::vector<uint8_t> raw;           // rows of ggml blocks; empty once packed
    };
    struct layer : kvq_layer_calibration {
        matrix k, v, fold;              // fold: of values, from keys alone
        std::vector<uint8_t> packed[3]; // what w points at
    };
    std::map<int, layer> layers;
    std::string path, predictor;
    bool tried_coords = false; // kvq.aqua.coords is there: coordinates lost more than they brought
    // il: a layer of this plan, prev: the one before it in the cache or -1; width_v 0: not known yet; part: a device
    // has some heads of a layer (host/share.cpp)
    bool fits(
        int il, int prev, const kvq_layer_plan & plan, int width_k, int width_v, bool part, std::string & err) const;
    void pack(int bits, bool values, bool fold); // predictors for kernels
};

// Refuses with the field named: another model, version, type, shape, or a value that is not finite.
kvq_status kvq_calibration_load(
    const std::string & path, const kvq_model_info & model, kvq_calibration & out, std::string & err);

// Means, and an order where `sorted`, of a model whose keys have a bias, from its weights (gguf/weights.cpp). False:
// its file says nothing of the kind.
bool kvq_calibration_of_weights(
    const std::string & path, const kvq_model_info & model, kvq_calibration & out, bool & sorted);

// What the configured method needs; out is NULL when it needs no data. Options that leave a choice to the data are set.
kvq_status kvq_calibration_for(
    kvq_config & config, const kvq_model_info & model, std::shared_ptr<const kvq_calibration> & out, std::string & err);

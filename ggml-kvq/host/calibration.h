// Calibrated data of a method: a sidecar GGUF (general.type "kvq", tensors) or metadata arrays of the model file itself
// (u8 payload <name>, <name>.type, <name>.shape). Both hold the same names: kvq.aqua.blk.<il>.{k,v}.bias, f32.
#pragma once

#include "config.h"

#include <map>
#include <memory>

constexpr uint32_t KVQ_CALIBRATION_VERSION = 1;

struct kvq_calibration {
    struct layer { std::vector<float> k_mean, v_mean; };
    std::map<int, layer> layers;
    std::string path;
    // width_v 0: not known yet
    bool fits(int il, int width_k, int width_v, std::string & err) const;
};

// Refuses with the field named: another model, version, type, shape, or a value that is not finite.
kvq_status kvq_calibration_load(const std::string & path, const kvq_model_info & model, kvq_calibration & out, std::string & err);

// What the configured method needs; out is NULL when it needs nothing.
kvq_status kvq_calibration_for(const kvq_config & config, const kvq_model_info & model, std::shared_ptr<const kvq_calibration> & out, std::string & err);

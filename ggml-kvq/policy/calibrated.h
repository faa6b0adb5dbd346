// Calibrated data of one layer, as policies take it (cache/calibration.h reads it).
#pragma once

#include "chain.h"

#include <vector>

struct kvq_layer_calibration {
    std::vector<float> k_mean, v_mean; // of un-rotated keys and of values, [width]
    // sorted keys, views of what is behind; no channels: keys are not sorted
    kvq_order k_order = {};
    std::vector<uint16_t> k_channel;
    std::vector<float> k_gain, k_back;
    int prev = -1; // the layer before it in the cache
    kvq_chain_weights w;
};

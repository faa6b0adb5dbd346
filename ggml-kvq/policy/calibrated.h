// Calibrated data of one layer, as policies take it (cache/calibration.h reads it).
#pragma once

#include "chain.h"

#include <vector>

struct kvq_layer_calibration {
    std::vector<float> k_mean, v_mean; // of un-rotated keys and of values, [width]
    // Sorted keys: of rows less their means, and of what predictors leave of them. No channels: keys are not sorted.
    struct order {
        std::vector<uint16_t> channel;
        std::vector<float> gain, back;
        kvq_order view = {}; // of those three, where they lie now
        void look() { view = { channel.data(), gain.data(), back.data() }; }
    } k_order, k_left;
    int prev = -1; // the layer before it in the cache
    kvq_chain_weights w;
};

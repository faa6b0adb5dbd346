// Calibrated data of one layer, as policies take it (cache/calibration.h reads it).
#pragma once

#include "chain.h"

#include "types/basis.h"

#include <algorithm>
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
    order k_gains, k_left_gains; // of keys in one block: the gains of those, channels stay where they are
    kvq_basis_data basis[2];     // of un-rotated keys less their means, and of values; n 0: not in the data
    int prev = -1;               // the layer before it in the cache
    kvq_chain_weights w;

    // Once the vectors lie where they stay. What k_order names wrongly is left out: kvq_calibration::fits refuses it.
    void look() {
        k_gains = gains_of(k_order);
        k_left_gains = gains_of(k_left);
        for (order * o : { &k_order, &k_left, &k_gains, &k_left_gains }) { o->look(); }
        for (kvq_basis_data & b : basis) { b.look(); }
    }

private:
    static order gains_of(const order & x) {
        const size_t n = x.channel.size(),
                     head = n ? 1 + (size_t) *std::max_element(x.channel.begin(), x.channel.end()) : 0;
        order out;
        out.channel.resize(n);
        out.gain.assign(n, 1.0f);
        out.back.assign(n, 1.0f);
        for (size_t i = 0; i < n; i++) {
            const size_t at = i / head * head + x.channel[i];
            out.channel[i] = (uint16_t) (i % head);
            if (at < n) {
                out.gain[at] = x.gain[i];
                out.back[at] = x.back[i];
            }
        }
        return out;
    }
};

// What a policy is to a plan: how its part changes a lane's layout and bytes, and how it takes its place in a layer.
// compose.h calls these; a policy registers itself with one row in policies.inc.
#pragma once

#include "plan/plan.h"
#include "store/lane.h"

#include <map>
#include <memory>
#include <string>

struct kvq_layer_calibration; // of one layer (calibration.h)

// A layer while its policies are made.
struct kvq_layer_parts {
    kvq_device & device;
    std::map<std::string, std::shared_ptr<void>> & shared; // what the layers of a cache have in common, by its owner
    std::vector<std::unique_ptr<kvq_policy>> & owned;
    kvq_layer_plan plan;
    kvq_lane *k = nullptr, *v = nullptr;
    kvq_span_table * spans = nullptr;
    kvq_lane * before[2] = {};                    // keys and values of the layer before, NULL in the first
    const kvq_layer_calibration * data = nullptr; // NULL: the method takes no calibrated data
    int number = 0, ordinal = 0;                  // among the model's layers with attention; in this cache
    size_t bytes_far = 0;                         // of a second tier, of all layers of the cache
    std::string why;                              // what is missing where a policy cannot be made; "": memory
    // parts that others ask for by type
    class kvq_transform * transforms[2] = {};
    class kvq_chain * chain = nullptr;
    class kvq_probe * probe = nullptr;

    kvq_layer_parts(kvq_device & device, std::map<std::string, std::shared_ptr<void>> & shared,
        std::vector<std::unique_ptr<kvq_policy>> & owned) :
        device(device), shared(shared), owned(owned) {}
    kvq_lane & lane(bool value) { return value ? *v : *k; }
    template <typename T> T * own(T * policy) {
        owned.emplace_back(policy);
        return policy;
    }
};

struct kvq_part_of_layer {
    int il;
    const kvq_part * part;
};

struct kvq_policy_kind {
    const char * name;
    // Room: pages that may be sealed at once, what the lane is. Before its bytes are counted. NULL: as it is.
    void (*shape)(const kvq_part & part, const kvq_layer_plan & plan, bool value, kvq_lane_layout & l);
    // Bytes that come on top. NULL: no further bytes.
    void (*bytes)(const kvq_part & part, const kvq_layer_plan & plan, bool value, kvq_lane_layout & l);
    // Makes the policy and adds it to its lanes; false: at.why says what is missing, "": memory.
    bool (*attach)(const kvq_part & part, kvq_layer_parts & at);
    // What the load line says of it, "; ..."; of all layers of a cache that have the part. NULL: no words.
    std::string (*words)(const std::vector<kvq_part_of_layer> & layers, const kvq_stats & stats);
};

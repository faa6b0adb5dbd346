// A layer of any method of the table, composed as cache/cache.cpp composes it.
#pragma once

#include "check.h"

#include "engine/host.h"
#include "methods/method.h"
#include "policy/calibrated.h"
#include "policy/compose.h"
#include "policy/evict.h"

static inline kvq_layer_plan plan_of(
    const char * method, const char * opts, const kvq_layer_context & context, bool * latent = nullptr) {
    const kvq_method * m = kvq_method_find(method);
    kvq_options o;
    kvq_layer_plan plan;
    std::string err;
    CHECK(m && kvq_options_parse(*m, opts, o, err) == KVQ_OK, "%s", err.c_str());
    CHECK(m->plan(o, context, plan, err) == KVQ_OK, "%s", err.c_str());
    if (latent) { *latent = m->latent; }
    return plan;
}

// What the layers of a test's cache share.
struct cache_of_layers {
    kvq_device & device;
    kvq_scratch scratch;
    kvq_counters counters;
    std::map<std::string, std::shared_ptr<void>> shared;
    size_t bytes_far = 0; // of a second tier, all layers
    // memory: of tiles, where it is not the device's
    explicit cache_of_layers(kvq_device & device = kvq_cpu_device(), kvq_space * memory = nullptr) :
        device(device), scratch(memory ? *memory : device) {}
    kvq_chain * chain() { return (kvq_chain *) shared["chain"].get(); }
    kvq_positions * positions() { return (kvq_positions *) shared["positions"].get(); }
};

struct composed_layer {
    kvq_layer_plan plan;
    kvq_span_table spans;
    std::unique_ptr<kvq_lane> lane[2];
    std::vector<std::unique_ptr<kvq_policy>> policies;
    kvq_transform * transforms[2] = {};
    kvq_probe * probe = nullptr;
    kvq_evict * slots = nullptr;

    // before: the layer before it, NULL for the first; data: calibrated, which stays
    void make(cache_of_layers & c, const kvq_layer_plan & its_plan, int n_head, int n_cells, int n_stream,
        int ordinal = 0, composed_layer * before = nullptr, const kvq_layer_calibration * data = nullptr) {
        plan = its_plan;
        for (int v = 0; v < 2; v++) {
            const kvq_lane_layout l = kvq_make_lane_layout(plan, v, n_head, n_cells, n_stream);
            if (!v) { spans.init(n_stream, kvq_n_spans(l), l.page_cells); }
            kvq_lane * codes_of = l.shares_codes ? before->lane[v].get() : nullptr;
            lane[v].reset(new kvq_lane(l, v, codes_of, &spans, &c.scratch, &c.counters, c.device));
            CHECK(lane[v]->ok(), "out of memory");
        }
        kvq_layer_parts parts(c.device, c.shared, policies);
        parts.plan = plan;
        parts.k = lane[0].get();
        parts.v = lane[1].get();
        parts.spans = &spans;
        for (int v = 0; v < 2; v++) { parts.before[v] = before ? before->lane[v].get() : nullptr; }
        parts.number = parts.ordinal = ordinal;
        parts.data = data;
        parts.bytes_far = c.bytes_far;
        CHECK(kvq_attach_policies(parts), "out of memory");
        std::copy(parts.transforms, parts.transforms + 2, transforms);
        probe = parts.probe;
        for (const auto & p : policies) {
            if (auto * x = dynamic_cast<kvq_evict *>(p.get())) { slots = x; }
        }
    }
};

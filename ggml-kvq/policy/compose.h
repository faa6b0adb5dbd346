// From a plan, which is data, to layouts and policies.
#pragma once

#include "kind.h"

const kvq_policy_kind * kvq_policy_find(const std::string & name); // NULL: no policy has this name

// Layout of the keys, or of the values, of a layer; a name that no policy has throws std::invalid_argument.
kvq_lane_layout kvq_make_lane_layout(const kvq_layer_plan & plan, bool value, int n_head, int n_cells, int n_stream);

// Spans of a layer: pages, and pages of slots behind them.
int kvq_n_spans(const kvq_lane_layout & keys);

// Makes the policies of a layer, in the plan's order. False: out of memory.
bool kvq_attach_policies(kvq_layer_parts & at);

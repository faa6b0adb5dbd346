// What calibration asks of queries: how much energy each channel of a head has, which says how much an error of the
// keys' channel costs. Attention leaves it with the layer while a program asks for it.
#pragma once

#include "ggml-kvq.h"

#include <cstdint>
#include <vector>

struct kvq_kv_layer;
class kvq_device;

struct kvq_query_sums {
    // [n_head_kv][head size]: sums over tokens and the query heads of a KV head, of queries as a logit would have them
    // that is scaled by 1/sqrt(head size)
    std::vector<double> square;
    uint64_t n = 0; // summands of each
};

bool kvq_observes_queries(); // does the program ask? (kvq_observe_queries)

// Adds the queries of one call of attention. cell: of its first token; tokens of the first `KVQ_OBSERVED_FROM` cells
// are left out, as attention sinks are unlike all others.
constexpr int KVQ_OBSERVED_FROM = 4;
void kvq_add_queries(kvq_query_sums & sums, const kvq_attn & a, int cell, kvq_device & device);

// The type that llama.cpp declares for a tensor of the cache (-ctk, -ctv). What is stored is the method's; a state has
// rows of this size. Smaller than f16, it is also the most that the method may take in a long context.
#pragma once

#include "policy/compose.h"

#include <string>

struct kvq_declared {
    std::string name = "f16"; // as -ctk and -ctv name it
    int n_block = 1;          // values of a block, and its bytes
    size_t nb_block = 2;
    bool is_f16() const { return name == "f16"; }
    size_t row(int n) const { return (size_t) (n / n_block) * nb_block; }
    double bits() const { return 8.0 * (double) nb_block / n_block; }
    bool is_served() const; // a cache of ours may be declared so
};

// Why states of such a lane need rows of f16: "evicts cells"; "": they do not.
std::string kvq_needs_f16_rows(const kvq_lane_layout & l);

// Bits a value of a lane of this plan in a context of 131072 tokens, in what a state holds: codes, scales and window,
// without the tables that all layers share.
double kvq_stored_bits(const kvq_layer_plan & plan, bool value, int n_head);

// The smallest type that is enough for this lane and not below `so_far`, that of the lanes before. The first lane
// brings "".
std::string kvq_smallest_declared(const std::string & so_far, const kvq_layer_plan & plan, bool value, int n_head);

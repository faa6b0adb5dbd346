// True bits: bytes of a cache's lanes, everything included, over the values they hold.
#pragma once

#include "engine/layout.h"

// Sums lanes up to a kvq_stats: the one place where true bits are computed.
struct kvq_accounting {
    kvq_stats s = {};
    void add(const kvq_lane_layout & l, bool value);
    void finish();

private:
    double values[2] = {}, bytes[2] = {}, code_bits = 0;
};

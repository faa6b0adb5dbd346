// True bits: bytes of a cache's lanes, everything included, over the values they hold.
#pragma once

#include "engine/layout.h"

// Sums lanes up to a kvq_stats: the one place where true bits are computed.
struct kvq_accounting {
    kvq_stats s = {};
    // on_host: attention computes in the host's memory, where far rows may lie as well
    void add(const kvq_lane_layout & l, bool value, bool on_host);
    void finish();

private:
    double values[2] = {}, bytes[2] = {}, far[2] = {}, code_bits = 0;
};

// Time of work on a device.
#pragma once

#include "cuda/device/device.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

// Median of 7 times n calls, of one call.
static double seconds(kvq_cuda_device & d, int n, const std::function<void()> & f) {
    std::vector<double> t;
    for (int r = 0; r < 7; r++) {
        d.synchronize();
        const auto a = std::chrono::steady_clock::now();
        for (int i = 0; i < n; i++) { f(); }
        d.synchronize();
        t.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - a).count() / n);
    }
    std::sort(t.begin(), t.end());
    return t[t.size() / 2];
}

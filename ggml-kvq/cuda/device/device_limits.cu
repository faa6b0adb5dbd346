// What a device has: asked when a model loads.
#include "device.h"
#include "base/settings.h"

#include "cuda/common.cuh"

#include <algorithm>
#include <map>
#include <mutex>

static const kvq_device_limits LIMITS[] = { { 8, 0, 163 << 10, 164 << 10 }, { 8, 6, 99 << 10, 100 << 10 },
    { 8, 7, 163 << 10, 164 << 10 }, { 8, 9, 99 << 10, 100 << 10 }, { 9, 0, 227 << 10, 228 << 10 },
    { 10, 0, 227 << 10, 228 << 10 }, { 12, 0, 99 << 10, 100 << 10 } };

// NULL: not set, or not a known capability
static const kvq_device_limits * asked_limits() {
    const std::string as = kvq_setting_text(kvq_setting::CUDA_AS);
    for (const kvq_device_limits & l : LIMITS) {
        if (as == std::to_string(l.major) + "." + std::to_string(l.minor)) { return &l; }
    }
    return nullptr;
}

std::string kvq_cuda_device::refuse_settings() {
    const std::string as = kvq_setting_text(kvq_setting::CUDA_AS);
    if (as.empty() || asked_limits()) { return ""; }
    return "KVQ_CUDA_AS=" + as +
        " is no compute capability with limits of its own: use 8.0, 8.6, 8.7, 8.9, 9.0, 10.0 or 12.0";
}

static kvq_device_limits limits_now(int device) {
    cudaDeviceProp p = {};
    if (cudaGetDeviceProperties(&p, device) != cudaSuccess) {
        cudaGetLastError();
        return { 0, 0, 48 << 10, 48 << 10 };
    }
    kvq_device_limits limits = { p.major, p.minor, (int) p.sharedMemPerBlockOptin, (int) p.sharedMemPerMultiprocessor };
    if (const kvq_device_limits * as = asked_limits()) { // never more than there is
        const bool older = as->major < p.major || (as->major == p.major && as->minor < p.minor);
        limits = { older ? as->major : p.major, older ? as->minor : p.minor,
            std::min(as->max_shared, limits.max_shared), std::min(as->max_shared_sm, limits.max_shared_sm) };
    }
    return limits;
}

kvq_device_limits kvq_limits_of(int device) {
    static std::mutex mutex;
    static std::map<int, kvq_device_limits> known;
    std::lock_guard<std::mutex> lock(mutex);
    const auto at = known.find(device);
    return at != known.end() ? at->second : known[device] = limits_now(device);
}

bool kvq_cuda_device::has_card() {
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess && n > 0;
}

std::string kvq_cuda_device::too_old(int ordinal) {
    cudaDeviceProp p = {};
    const bool old = cudaGetDeviceProperties(&p, ordinal) == cudaSuccess && p.major < 8;
    return old ? std::to_string(p.major) + "." + std::to_string(p.minor) : "";
}

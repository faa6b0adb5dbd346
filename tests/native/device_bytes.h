// Memory of a device, freed with its holder.
#pragma once

#include "check.h"
#include "engine/device.h"

#include <algorithm>

struct device_bytes {
    kvq_device & d;
    void * p;
    size_t nb;
    device_bytes(kvq_device & d, size_t nb, const void * host = nullptr) :
        d(d), p(d.alloc(std::max<size_t>(nb, 16))), nb(nb) {
        CHECK(p, "out of device memory for %zu bytes", nb);
        if (host) { d.put(p, host, nb); }
    }
    ~device_bytes() { d.free(p, nb); }
    device_bytes(const device_bytes &) = delete;
    template <typename T> std::vector<T> get() const {
        std::vector<T> v(nb / sizeof(T));
        d.get(v.data(), p, nb);
        return v;
    }
};

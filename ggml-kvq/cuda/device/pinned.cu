#include "pinned.h"

#include "base/constants.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <sys/mman.h>
#include <system_error>
#include <thread>
#include <vector>

static constexpr size_t NB_HUGE = 2u << 20, NB_PAGE = 4096;

// What no thread could be had for is touched when it is pinned.
static void touch(uint8_t * memory, size_t nb) {
    const size_t n = std::min({ (size_t) std::max(std::thread::hardware_concurrency(), 1u), (size_t) 8, nb / NB_HUGE });
    const size_t part = kvq_pad(nb / std::max<size_t>(n, 1), NB_HUGE);
    const auto touch_part = [=](size_t at) {
        for (size_t i = at; i < std::min(at + part, nb); i += NB_PAGE) { ((volatile uint8_t *) memory)[i] = 0; }
    };
    std::vector<std::thread> others;
    try {
        for (size_t at = part; at < nb; at += part) { others.emplace_back(touch_part, at); }
    } catch (const std::system_error &) {}
    touch_part(0);
    for (std::thread & t : others) { t.join(); }
}

// NULL: no memory, or a device that does not take a process's own at the same address
static uint8_t * map_pinned(size_t nb) {
    void * all = mmap(nullptr, nb + NB_HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) { return nullptr; }
    uint8_t *const p = (uint8_t *) kvq_pad((size_t) all, NB_HUGE), *const end = (uint8_t *) all + nb + NB_HUGE;
    if (p > all) { munmap(all, (size_t) (p - (uint8_t *) all)); }
    if (end > p + nb) { munmap(p + nb, (size_t) (end - p) - nb); }
    madvise(p, nb, MADV_HUGEPAGE);
    madvise(p, nb, MADV_DONTFORK); // a child's copy would leave the device with pages that this process no longer has
    touch(p, nb);
    void * of_device = nullptr;
    if (cudaHostRegister(p, nb, cudaHostRegisterMapped | cudaHostRegisterPortable) == cudaSuccess) {
        if (cudaHostGetDevicePointer(&of_device, p, 0) == cudaSuccess && of_device == p) { return p; }
        cudaHostUnregister(p);
    }
    cudaGetLastError();
    munmap(p, nb);
    return nullptr;
}

void * kvq_pinned_memory::alloc(size_t nb) {
    nb = kvq_pad(nb, NB_PAGE);
    block b = { nb, true };
    void * p = map_pinned(nb);
    if (!p) {
        b.mapped = false;
        if (cudaHostAlloc(&p, nb, cudaHostAllocMapped | cudaHostAllocPortable) != cudaSuccess) {
            cudaGetLastError();
            return nullptr;
        }
        memset(p, 0, nb);
    }
    blocks[(const uint8_t *) p] = b;
    return p;
}

void kvq_pinned_memory::release(void * p, const block & b) {
    if (!b.mapped) {
        cudaFreeHost(p);
        return;
    }
    cudaHostUnregister(p);
    munmap(p, b.nb);
}

bool kvq_pinned_memory::free(void * p) {
    const auto at = blocks.find((const uint8_t *) p);
    if (at == blocks.end()) { return false; }
    release(p, at->second);
    blocks.erase(at);
    return true;
}

size_t kvq_pinned_memory::left(const void * p) const {
    const auto at = blocks.upper_bound((const uint8_t *) p);
    if (at == blocks.begin()) { return 0; }
    const uint8_t * end = std::prev(at)->first + std::prev(at)->second.nb;
    return (const uint8_t *) p < end ? (size_t) (end - (const uint8_t *) p) : 0;
}

kvq_pinned_memory::~kvq_pinned_memory() {
    for (const auto & x : blocks) { release((void *) x.first, x.second); }
}

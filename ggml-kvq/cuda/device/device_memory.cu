// kvq_cuda_device as a space: memory, and copies from and to the host.
#include "device.h"
#include "engine/host.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstring>

void kvq_cuda_device::reserve(size_t nb) {
    void * p = nullptr;
    if (slab || !use()) { return; }
    if (cudaMalloc(&p, nb) != cudaSuccess) { // too large in one piece: pieces then
        cudaGetLastError();
        return;
    }
    slab = (uint8_t *) p;
    nb_slab = nb;
}

void * kvq_cuda_device::alloc(size_t nb) {
    void * p = nullptr;
    if (slab && slab_used + nb <= nb_slab) {
        p = slab + slab_used;
        slab_used += kvq_pad(nb, KVQ_ALIGN_SLAB);
        n_in_slab++;
        zero(p, nb);
        return p;
    }
    if (!use() || cudaMalloc(&p, nb) != cudaSuccess) {
        cudaGetLastError();
        return nullptr;
    }
    blocks[(const uint8_t *) p] = nb;
    zero(p, nb);
    return p;
}

void * kvq_cuda_device::alloc_host(size_t nb) { return use() ? pinned.alloc(nb) : nullptr; }

// A copy goes as fast as kernels that read there: both are bound by the bus.
double kvq_cuda_device::host_speed() {
    constexpr size_t NB = 16u << 20;
    constexpr int TIMES = 3;
    void *from = use() ? pinned.alloc(NB) : nullptr, *to = nullptr;
    double best = 0.0;
    if (from && cudaMalloc(&to, NB) == cudaSuccess) {
        for (int i = 0; i < TIMES; i++) {
            const auto begin = std::chrono::steady_clock::now();
            cudaMemcpyAsync(to, from, NB, cudaMemcpyHostToDevice, (cudaStream_t) stream);
            synchronize();
            const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
            best = std::max(best, (double) NB / std::max(took.count(), 1e-9));
        }
    }
    cudaFree(to);
    if (from) { pinned.free(from); }
    cudaGetLastError();
    return best;
}

size_t kvq_cuda_device::left(const void * at) const {
    const auto * const p = (const uint8_t *) at;
    if (p >= slab && p < slab + nb_slab) { return (size_t) (slab + nb_slab - p); }
    auto block = blocks.upper_bound(p);
    if (block == blocks.begin()) { return pinned.left(p); }
    --block;
    return p < block->first + block->second ? (size_t) (block->first + block->second - p) : pinned.left(p);
}

void kvq_cuda_device::free(void * p, size_t) {
    synchronize();
    if (p >= slab && p < slab + nb_slab) {
        slab_used = --n_in_slab ? slab_used : 0;
        return;
    }
    if (pinned.free(p)) { return; }
    blocks.erase((const uint8_t *) p);
    check(cudaFree(p), "cudaFree");
}

void kvq_cuda_device::zero(void * p, size_t nb) {
    use();
    check(cudaMemsetAsync(p, 0, nb, (cudaStream_t) stream), "cudaMemsetAsync");
}

void kvq_cuda_device::copy(void * to, const void * from, size_t nb) {
    use();
    n_copied++;
    if (pinned.holds(to) && pinned.holds(from)) { // CUDA does not say that such a copy waits for kernels
        synchronize();
        memcpy(to, from, nb);
        return;
    }
    // far rows and blocks too, which lie on the host
    check(cudaMemcpyAsync(
              to, from, nb, pinned.empty() ? cudaMemcpyDeviceToDevice : cudaMemcpyDefault, (cudaStream_t) stream),
        "cudaMemcpyAsync");
}

void kvq_cuda_device::get(void * host, const void * from, size_t nb) {
    use();
    if (pinned.holds(from)) {
        synchronize(); // far rows that are on their way
        memcpy(host, from, nb);
        return;
    }
    check(cudaMemcpyAsync(host, from, nb, cudaMemcpyDeviceToHost, (cudaStream_t) stream), "cudaMemcpyAsync");
    synchronize();
}

// pageable memory is staged before the call returns: the host bytes may go at once
void kvq_cuda_device::put(void * to, const void * host, size_t nb) {
    use();
    if (pinned.holds(to)) {
        synchronize();
        memcpy(to, host, nb);
        return;
    }
    check(cudaMemcpyAsync(to, host, nb, cudaMemcpyHostToDevice, (cudaStream_t) stream), "cudaMemcpyAsync");
}

void kvq_cuda_device::put_all(const kvq_copy_job * jobs, size_t n, int n_threads) {
    use();
    if (n && pinned.holds(jobs[0].to)) { // blocks of a lane, which lie on the host together
        synchronize();
        kvq_cpu_copy_all(jobs, n, n_threads);
        return;
    }
    if (staging.put(*this, jobs, n, n_threads, stream)) { return; }
    cudaGetLastError();
    kvq_space::put_all(jobs, n, n_threads);
}

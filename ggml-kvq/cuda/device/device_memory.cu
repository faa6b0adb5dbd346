// kvq_cuda_device as a space: memory, and copies from and to the host.
#include "device.h"

#include <cuda_runtime.h>

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
    // far rows too, which lie on the host
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
    check(cudaMemcpyAsync(to, host, nb, cudaMemcpyHostToDevice, (cudaStream_t) stream), "cudaMemcpyAsync");
}

void kvq_cuda_device::put_all(const kvq_copy_job * jobs, size_t n, int n_threads) {
    use();
    if (staging.put(*this, jobs, n, n_threads, stream)) { return; }
    cudaGetLastError();
    kvq_space::put_all(jobs, n, n_threads);
}

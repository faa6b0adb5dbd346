#include "inputs.h"

#include "cuda/common.cuh"
#include "base/constants.h"

#include <algorithm>
#include <cstring>

// A mask of one token over 128k cells. The host copies what is held once more: of larger pieces that would take longer
// than to wait for a copy.
static constexpr size_t NB_PIECE = 256 << 10, NB_HELD = 1 << 20;
static constexpr int PIECES = 24, THREADS = 256, MOST_BLOCKS = 64;

namespace {

struct kvq_inputs_args {
    const uint8_t * from;
    struct {
        uint8_t * to; // of 16 bytes each, but for the end
        uint32_t at, nb;
    } piece[PIECES];
};

// blockIdx.y: the piece. The host wrote this memory: it is read anew, past the caches.
__global__ void inputs_kernel(const __grid_constant__ kvq_inputs_args a) {
    early_start();
    const auto & p = a.piece[blockIdx.y];
    const uint8_t * const from = a.from + p.at;
    const uint32_t thread = blockIdx.x * THREADS + threadIdx.x, n = p.nb / 16;
    early_wait(); // kernels of the step before read what is overwritten here
    for (uint32_t i = thread; i < n; i += gridDim.x * THREADS) {
        ((uint4 *) p.to)[i] = __ldcv((const uint4 *) from + i);
    }
    if (thread < p.nb % 16) { p.to[16 * n + thread] = __ldcv(from + 16 * n + thread); }
}

} // namespace

kvq_cuda_inputs::~kvq_cuda_inputs() {
    if (!memory && !read) { return; }
    cudaSetDevice(ordinal);
    if (reading) { cudaEventSynchronize((cudaEvent_t) read); }
    if (read) { cudaEventDestroy((cudaEvent_t) read); }
}

bool kvq_cuda_inputs::ready() {
    if (failed) { return false; }
    cudaSetDevice(ordinal);
    if (!memory) {
        cudaEvent_t event = nullptr;
        memory = (uint8_t *) pinned.alloc(NB_HELD);
        failed = !memory || cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess;
        read = event;
        cudaGetLastError();
    }
    if (!failed && reading) {
        failed = cudaEventSynchronize((cudaEvent_t) read) != cudaSuccess;
        reading = false;
    }
    return !failed;
}

bool kvq_cuda_inputs::overlaps(const void * to, size_t nb) const {
    return std::any_of(held.begin(), held.end(), [&](const piece & p) {
        return (const uint8_t *) to < (uint8_t *) p.to + p.nb && (uint8_t *) p.to < (const uint8_t *) to + nb;
    });
}

bool kvq_cuda_inputs::hold(void * to, const void * data, size_t nb) {
    if ((uintptr_t) to % 16 || !nb || nb > NB_PIECE || held.size() == PIECES || overlaps(to, nb)) { return false; }
    const size_t at = held.empty() ? 0 : kvq_pad(held.back().at + held.back().nb, (size_t) 16);
    if (at + nb > NB_HELD || !ready()) { return false; }
    memcpy(memory + at, data, nb);
    held.push_back({ to, (uint32_t) at, (uint32_t) nb });
    return true;
}

bool kvq_cuda_inputs::send(void * stream) {
    if (held.empty()) { return true; }
    cudaSetDevice(ordinal);
    kvq_inputs_args a = { memory, {} };
    uint32_t most = 0;
    for (size_t i = 0; i < held.size(); i++) {
        a.piece[i] = { (uint8_t *) held[i].to, held[i].at, held[i].nb };
        most = std::max(most, held[i].nb);
    }
    const unsigned n_blocks = std::clamp<unsigned>(most / (16 * THREADS), 1, MOST_BLOCKS);
    kvq_launch_early(inputs_kernel, dim3(n_blocks, (unsigned) held.size()), THREADS, 0, (cudaStream_t) stream, a);
    if (cudaGetLastError() != cudaSuccess) { return false; }
    reading = cudaEventRecord((cudaEvent_t) read, (cudaStream_t) stream) == cudaSuccess;
    if (!reading) { cudaStreamSynchronize((cudaStream_t) stream); }
    held.clear();
    return true;
}

bool kvq_cuda_get_async(int ordinal, void * host, const void * from, size_t nb, void * stream) {
    cudaSetDevice(ordinal);
    const bool ok = cudaMemcpyAsync(host, from, nb, cudaMemcpyDeviceToHost, (cudaStream_t) stream) == cudaSuccess;
    return ok || (cudaGetLastError(), false);
}

bool kvq_cuda_set_async(int ordinal, void * to, const void * host, size_t nb, void * stream) {
    cudaSetDevice(ordinal);
    const bool ok = cudaMemcpyAsync(to, host, nb, cudaMemcpyHostToDevice, (cudaStream_t) stream) == cudaSuccess;
    return ok || (cudaGetLastError(), false);
}

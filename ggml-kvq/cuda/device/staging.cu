#include "staging.h"

#include "engine/host.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

static constexpr size_t NB_HALF = 4u << 20;

bool kvq_staging::make() {
    if (half[1]) { return true; }
    for (int i = 0; i < 2; i++) {
        const bool ok = (half[i] ||
                            cudaHostAlloc((void **) &half[i], NB_HALF, cudaHostAllocMapped | cudaHostAllocPortable) ==
                                cudaSuccess) &&
            (left[i] || cudaEventCreateWithFlags((cudaEvent_t *) &left[i], cudaEventDisableTiming) == cudaSuccess);
        if (!ok) {
            cudaGetLastError();
            cudaFreeHost(half[i]);
            half[i] = nullptr;
            return false;
        }
    }
    return true;
}

kvq_staging::~kvq_staging() {
    for (int i = 0; i < 2; i++) {
        if (left[i]) {
            cudaEventSynchronize((cudaEvent_t) left[i]);
            cudaEventDestroy((cudaEvent_t) left[i]);
        }
        if (half[i]) { cudaFreeHost(half[i]); }
    }
}

bool kvq_staging::put(const kvq_space & space, const kvq_copy_job * jobs, size_t n, int n_threads, void * stream) {
    if (!make()) { return false; }
    size_t used = 0;
    int now = 0;
    std::vector<kvq_copy_job> in, out; // into the half, out of it
    const auto leave = [&] {
        bool ok = cudaEventSynchronize((cudaEvent_t) left[now]) == cudaSuccess;
        kvq_cpu_copy_all(in.data(), in.size(), n_threads);
        for (const kvq_copy_job & x : out) {
            ok =
                ok && cudaMemcpyAsync(x.to, x.from, x.nb, cudaMemcpyHostToDevice, (cudaStream_t) stream) == cudaSuccess;
        }
        ok = ok && cudaEventRecord((cudaEvent_t) left[now], (cudaStream_t) stream) == cudaSuccess;
        in.clear();
        out.clear();
        used = 0;
        now ^= 1;
        return ok;
    };
    for (size_t i = 0; i < n; i++) {
        for (size_t at = 0, nb; at < jobs[i].nb; at += nb) {
            if (used == NB_HALF && !leave()) { return false; }
            nb = std::min(jobs[i].nb - at, NB_HALF - used);
            char * const to = (char *) jobs[i].to + at;
            in.push_back({ half[now] + used, (const char *) jobs[i].from + at, nb });
            if (!out.empty() && (char *) out.back().to + out.back().nb == to &&
                out.back().nb + nb <= space.left(out.back().to)) {
                out.back().nb += nb; // they lie one behind the other here too
            } else {
                out.push_back({ to, half[now] + used, nb });
            }
            used += nb;
        }
    }
    return leave();
}

#include "graph.h"

#include <cuda_runtime.h>

void kvq_cuda_graph::reset() {
    if (exec) {
        cudaGraphExecDestroy((cudaGraphExec_t) exec);
        exec = nullptr;
    }
}

bool kvq_cuda_graph::begin(void * stream) {
    if (cudaStreamBeginCapture((cudaStream_t) stream, cudaStreamCaptureModeRelaxed) != cudaSuccess) {
        cudaGetLastError();
        reset();
        return false;
    }
    return true;
}

bool kvq_cuda_graph::end(void * stream) {
    cudaGraph_t graph = nullptr;
    bool ok = cudaStreamEndCapture((cudaStream_t) stream, &graph) == cudaSuccess && graph;
    cudaGraphExecUpdateResultInfo info;
    if (ok && exec && cudaGraphExecUpdate((cudaGraphExec_t) exec, graph, &info) != cudaSuccess) {
        cudaGetLastError();
        reset();
    }
    if (ok && !exec) {
        cudaGraphExec_t made = nullptr;
        ok = cudaGraphInstantiate(&made, graph, 0) == cudaSuccess;
        exec = ok ? made : nullptr;
    }
    if (graph) { cudaGraphDestroy(graph); }
    if (!ok) {
        cudaGetLastError();
        reset();
    }
    return ok;
}

bool kvq_cuda_graph::launch(void * stream) {
    return cudaGraphLaunch((cudaGraphExec_t) exec, (cudaStream_t) stream) == cudaSuccess;
}

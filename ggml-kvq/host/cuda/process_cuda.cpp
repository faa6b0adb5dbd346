// What ggml-cuda's header, which cuda_stream.cu includes, calls of libggml-cuda.so. These names are C++ names of one
// build; libggml-cuda may be a module that shows none of them. They are small enough to be ours.
#ifdef KVQ_CUDA
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

int ggml_cuda_get_device() {
    int device = 0;
    return cudaGetDevice(&device) == cudaSuccess ? device : 0;
}

void ggml_cuda_set_device(int device) {
    int now = -1;
    if (cudaGetDevice(&now) != cudaSuccess || now != device) { cudaSetDevice(device); }
}

[[noreturn]] void ggml_cuda_error(
    const char * call, const char * function, const char * file, int line, const char * said) {
    fprintf(stderr, "ggml-kvq: error: CUDA: %s, in %s (%s:%d, %s)\n", said, function, file, line, call);
    abort();
}
#endif

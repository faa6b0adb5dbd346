// What upstream's ggml-cuda/common.cuh names of cuBLAS, for ggml-kvq/host/cuda/cuda_stream.cu where the CUDA toolkit
// came without it (kvq_library.cmake). That file reads the stream of upstream's context and calls nothing of cuBLAS:
// handles have to be as wide as cuBLAS's, functions only have to be declared. (The one that a build without
// optimisation would want has a body.)
#pragma once

#include <cuda_runtime_api.h>

typedef struct cublasContext * cublasHandle_t;
enum cublasStatus_t { CUBLAS_STATUS_SUCCESS };
enum cublasMath_t { CUBLAS_TF32_TENSOR_OP_MATH };

inline const char * cublasGetStatusString(cublasStatus_t) { return ""; }
extern "C" {
cublasStatus_t cublasCreate_v2(cublasHandle_t * handle);
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode);
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream);
}
#define cublasCreate cublasCreate_v2
#define cublasSetStream cublasSetStream_v2

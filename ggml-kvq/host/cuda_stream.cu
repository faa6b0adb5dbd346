// The one look into ggml-cuda's own context: its stream. The type comes from the source that libggml-cuda was built from.
#include "ggml-cuda/common.cuh"

#include "ggml-backend-impl.h"

void * kvq_cuda_stream(ggml_backend_t inner) {
    ggml_backend_cuda_context * c = (ggml_backend_cuda_context *) inner->context;
    return c->stream(c->device, 0);
}

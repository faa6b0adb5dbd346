// Rows of open pages into the tiles of pages that will keep them (cache/slots.h).
#include "select.cuh"

// a warp a row; strides are multiples of 16
static __global__ void gather_kernel(uint16_t * const * tiles, const uint16_t * const * from, int n_rows, int stride) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= n_rows) {
        return;
    }
    const uint16_t * x = from[(size_t) blockIdx.y * n_rows + row];
    uint16_t * to = tiles[blockIdx.y] + (size_t) row * stride;
    for (int i = threadIdx.x % 32 * 8; i < stride; i += 32 * 8) {
        *(uint4 *) (to + i) = x ? *(const uint4 *) (x + i) : make_uint4(0, 0, 0, 0);
    }
}

void kvq_launch_gather(uint16_t * const * tiles, const uint16_t * const * from, int n, int n_rows, int stride, cudaStream_t stream) {
    gather_kernel<<<dim3((n_rows + 7) / 8, n), 256, 0, stream>>>(tiles, from, n_rows, stride);
}

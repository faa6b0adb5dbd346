// Decode attention in 8-bit products, head size 128.
#include "attend_bytes_launch.cuh"

void kvq_launch_decode_bytes_128(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_bytes<128, false>(a, n_streams, stream, occupancy);
}

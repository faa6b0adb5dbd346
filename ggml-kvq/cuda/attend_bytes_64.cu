// Decode attention in 8-bit products, head size 64.
#include "attend_bytes_launch.cuh"

void kvq_launch_decode_bytes_64(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_bytes<64, false>(a, n_streams, stream, occupancy);
}

// Decode attention in 8-bit products, heads of other sizes than 64 and 128, by slices of 128 channels.
#include "attend_bytes_launch.cuh"

void kvq_launch_decode_bytes_wide(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_bytes<128, true>(a, n_streams, stream, occupancy);
}

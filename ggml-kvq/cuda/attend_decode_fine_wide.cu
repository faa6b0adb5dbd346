// Heads of other sizes than 64 and 128, by slices of 128 channels.
#include "attend_decode_launch.cuh"

void kvq_launch_decode_fine_wide(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    (a.k.scale ? launch_fine<128, 2, true> : launch_fine<128, 1, true>) (a, n_streams, stream, occupancy);
}

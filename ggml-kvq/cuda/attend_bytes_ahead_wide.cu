// Heads of other sizes than 64 and 128, by slices of 128 channels.
#include "attend_bytes_launch.cuh"

void kvq_launch_bytes_ahead_wide(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_bytes_ahead<128, true>(a, n_streams, stream, occupancy);
}

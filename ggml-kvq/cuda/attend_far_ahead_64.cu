#include "attend_decode_launch.cuh"

void kvq_launch_far_ahead_64(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_ahead<64, false>(a, n_streams, stream, occupancy);
}

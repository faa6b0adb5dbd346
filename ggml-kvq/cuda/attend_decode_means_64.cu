#include "attend_decode_launch.cuh"

void kvq_launch_decode_means_64(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_means<64, false>(a, n_streams, stream, occupancy);
}

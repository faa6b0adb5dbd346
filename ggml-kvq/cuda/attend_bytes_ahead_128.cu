#include "attend_bytes_launch.cuh"

void kvq_launch_bytes_ahead_128(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_bytes_ahead<128, false>(a, n_streams, stream, occupancy);
}

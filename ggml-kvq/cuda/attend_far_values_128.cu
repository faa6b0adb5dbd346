#include "attend_decode_launch.cuh"

void kvq_launch_far_values_128(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_part<128, false, VALUES>(a, n_streams, stream, occupancy);
}

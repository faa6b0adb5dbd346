#include "attend_decode_launch.cuh"

void kvq_launch_decode_fine_64(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    (a.k.scale ? launch_fine<64, 2, false> : launch_fine<64, 1, false>) (a, n_streams, stream, occupancy);
}

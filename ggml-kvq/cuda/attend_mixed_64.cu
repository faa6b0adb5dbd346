#include "attend_mixed.cuh"

void kvq_launch_decode_mixed_64(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_mixed<64, false, false>(a, n_streams, stream, occupancy);
}

#include "attend_mixed.cuh"

void kvq_launch_short_mixed_128(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_mixed<128, false, true>(a, n_streams, stream, occupancy);
}

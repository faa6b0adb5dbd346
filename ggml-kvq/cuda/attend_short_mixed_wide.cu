// Heads of other sizes than 64 and 128, by slices of 128 channels.
#include "attend_mixed.cuh"

void kvq_launch_short_mixed_wide(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_mixed<128, true, true>(a, n_streams, stream, occupancy);
}

// Heads of other sizes than 64 and 128, by slices of 128 channels.
#include "attend_mixed.cuh"

void kvq_launch_decode_mixed_wide(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_mixed<128, true, false>(a, n_streams, stream, occupancy);
}

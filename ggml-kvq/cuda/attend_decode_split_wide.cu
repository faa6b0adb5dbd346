// Decode attention over split keys, other heads.
#include "attend_decode_launch.cuh"

void kvq_launch_decode_split_wide(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_split<128, true>(a, n_streams, stream, occupancy);
}

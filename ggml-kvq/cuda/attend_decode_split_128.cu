// Decode attention over split keys, heads of 128.
#include "attend_decode_launch.cuh"

void kvq_launch_decode_split_128(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_split<128, false>(a, n_streams, stream, occupancy);
}

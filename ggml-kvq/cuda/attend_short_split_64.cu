// Short caches of split keys, heads of 64.
#include "attend_short.cuh"

void kvq_launch_short_split_64(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_short_split<64, false>(a, n_streams, stream, occupancy);
}

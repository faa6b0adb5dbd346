// Short caches of split keys, other heads.
#include "attend_short.cuh"

void kvq_launch_short_split_wide(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_short_split<128, true>(a, n_streams, stream, occupancy);
}

// Decode attention of short caches, head size 64.
#include "attend_short.cuh"

void kvq_launch_short_64(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_short<64>(a, n_streams, stream, occupancy);
}

// Decode attention of short caches, head size 128.
#include "attend_short.cuh"

void kvq_launch_short_128(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_short<128>(a, n_streams, stream, occupancy);
}

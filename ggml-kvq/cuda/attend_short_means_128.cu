// Short caches of lattice pages that lack their means, heads of 128.
#include "attend_short.cuh"

void kvq_launch_short_means_128(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_short_means<128, false>(a, n_streams, stream, occupancy);
}

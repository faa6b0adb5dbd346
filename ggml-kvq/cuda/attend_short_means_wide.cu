// Short caches of lattice pages that lack their means, heads of other sizes.
#include "attend_short.cuh"

void kvq_launch_short_means_wide(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_short_means<128, true>(a, n_streams, stream, occupancy);
}

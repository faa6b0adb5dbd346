// Decode attention of short caches of lattice pages, head size 64.
#include "attend_short.cuh"

void kvq_launch_short_lattice_64(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_short_lattice<64>(a, n_streams, stream, occupancy);
}

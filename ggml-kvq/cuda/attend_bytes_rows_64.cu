// Decode attention, heads of 64 channels, more than 4 query rows a KV head.
#include "attend_bytes_launch.cuh"

void kvq_launch_bytes_rows_64(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_bytes_rows<64, false>(a, n_streams, stream, occupancy);
}

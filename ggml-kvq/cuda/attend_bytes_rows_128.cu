// Decode attention, heads of 128 channels, more than 4 query rows a KV head.
#include "attend_bytes_launch.cuh"

void kvq_launch_bytes_rows_128(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_bytes_rows<128, false>(a, n_streams, stream, occupancy);
}

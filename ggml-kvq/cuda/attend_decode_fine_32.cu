// Groups of 32 in keys and values with more than 4 query rows, of heads by slices (decode_fine.cuh).
#include "attend_decode_launch.cuh"

void kvq_launch_decode_fine_32(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_fine_32<128>(a, n_streams, stream, occupancy);
}

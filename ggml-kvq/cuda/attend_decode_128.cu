// Head size 128 in a file of its own: the kernels of one head size take most of a minute to compile.
#include "attend_decode_launch.cuh"

void kvq_launch_decode_128(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_decode<128>(a, n_streams, stream, occupancy);
}

#include "attend_decode_launch.cuh"

void kvq_launch_far_logits_128(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_part<128, false, LOGITS>(a, n_streams, stream, occupancy);
}

// Logits of split keys, where attention picks cells, heads of 128.
#include "attend_decode_launch.cuh"

void kvq_launch_far_split_128(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_split_logits<128, false>(a, n_streams, stream, occupancy);
}

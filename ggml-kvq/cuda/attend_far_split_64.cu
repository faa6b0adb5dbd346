// Logits of split keys, where attention picks cells, heads of 64.
#include "attend_decode_launch.cuh"

void kvq_launch_far_split_64(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_split_logits<64, false>(a, n_streams, stream, occupancy);
}

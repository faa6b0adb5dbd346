// Logits of split keys, where attention picks cells, other heads.
#include "attend_decode_launch.cuh"

void kvq_launch_far_split_wide(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    launch_split_logits<128, true>(a, n_streams, stream, occupancy);
}

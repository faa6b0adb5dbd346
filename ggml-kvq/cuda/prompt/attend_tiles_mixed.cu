// Mixed pages, in a file of their own: the kernels of six head sizes take most of a minute to compile.
#include "attend_tiles.cuh"

bool kvq_launch_tiles_mixed(const kvq_attend_args & a, int n_streams, int n_warps, cudaStream_t stream) {
    return launch_tiles_of<true>(a, n_streams, n_warps, stream);
}

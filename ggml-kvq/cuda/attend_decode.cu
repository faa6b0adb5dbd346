// Which attention the decode kernels take, and how it is shared among blocks (attend_decode.cuh).
#include "attend.cuh"

static constexpr int CELLS = 64, WARPS = 4, COLUMNS = 8, MAX_ROW_BLOCKS = 4;

bool kvq_decode_fits(kvq_attend_args & a, int n_streams) {
    bool fits = a.mask_stride_token % 2 == 0 && a.mask_stride_head % 2 == 0 && a.q_stride_token % 4 == 0 && a.q_stride_head % 4 == 0;
    for (int i = 0; i < n_streams; i++) {
        fits = fits && (uintptr_t) a.stream[i].mask % 4 == 0 && (uintptr_t) a.stream[i].q % 16 == 0;
    }
    const bool codes = a.k.np != 0;
    fits = fits && codes == (a.v.np != 0) && a.k.head_size == a.v.head_size && (a.k.head_size == 64 || a.k.head_size == 128);
    if (codes) {
        fits = fits && a.k.bits >= 1 && a.v.bits >= 1 && a.k.group % 16 == 0 && a.v.group % 32 == 0;
    }
    a.k_parts = !codes || a.k.group % CELLS == 0 ? 1 : a.k.group % 32 == 0 ? 2 : 4;
    return fits && kvq_decode_row_blocks(a) <= MAX_ROW_BLOCKS;
}

int kvq_decode_row_blocks(const kvq_attend_args & a) { return (a.n_rows * a.k_parts + COLUMNS - 1) / COLUMNS; }

int kvq_decode_max_splits(const kvq_attend_args & a) { return (a.n_pages * a.page_cells + CELLS * WARPS - 1) / (CELLS * WARPS); }

void kvq_launch_decode_attention(const kvq_attend_args & a, int n_streams, cudaStream_t stream) {
    if (a.k.head_size == 128) {
        kvq_launch_decode_128(a, n_streams, stream);
    } else {
        kvq_launch_decode_64(a, n_streams, stream);
    }
}

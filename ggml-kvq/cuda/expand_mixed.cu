// A lane's mixed pages as plain f16 rows (kvq_launch_expand). A thread: 4 channels of a cell.
#include "expand.cuh"
#include "select.cuh"

static __global__ void expand_mixed_kernel(const kvq_affine_geometry g, const kvq_mixed_geometry m, const kvq_page * pages, int n_head, const kvq_row_place to) {
    packed_page p;
    if (!p.find(g, pages, n_head, to)) { return; }
    __shared__ int s_place[256];
    for (int t = threadIdx.x; t < p.n; t += blockDim.x) { s_place[t] = mixed_place(p.params, t); }
    __syncthreads();
    const int units = m.head_size / 4;
    for (int i = threadIdx.x; i < p.n * units; i += blockDim.x) {
        const int t = i / units, c = i % units * 4;
        *(uint2 *) (p.rows + t * p.step + c) = mixed_halves(mixed_values(m, p.codes, p.params, s_place[t], c));
    }
}

void kvq_launch_expand_mixed(const kvq_mixed_geometry & m, const kvq_page * pages, int n_pages, int n_head, const kvq_row_place & to, cudaStream_t stream) {
    kvq_affine_geometry g = {};
    g.role = m.role; g.n_cells = m.n_cells; g.head_size = m.head_size; g.stride = m.stride; g.nb_codes = m.nb_codes; g.nb_params = m.nb_params;
    expand_mixed_kernel<<<dim3(n_pages, n_head), 256, 0, stream>>>(g, m, pages, n_head, to);
}

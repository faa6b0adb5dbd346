// A layer as plain f16 rows: for upstream's kernel, or for ours where that one cannot go.
#include "device.h"

#include "cuda/prompt/attend_rows.cuh"
#include "cuda/seal/seal.cuh"
#include "cuda/policy/select.cuh"

#include <algorithm>

// A prompt asks for more from batch to batch, and each time the device stands still: half of it on top, as long as
// that is within what the load line says.
// Every change waits for the device, and devices that work on one prompt wait for each other: memory grows seldom.
static constexpr size_t NB_FIRST = 64u << 20;

bool kvq_cuda_device::more_memory(void *& memory, size_t & nb_memory, size_t nb) {
    if (nb <= nb_memory) { return true; }
    synchronize();
    cudaFree(memory);
    memory = nullptr;
    nb_memory = 0;
    for (const size_t n : { std::min(std::max(2 * nb, NB_FIRST), std::max(nb, nb_promised)), nb }) {
        if (cudaMalloc(&memory, n) == cudaSuccess) {
            nb_memory = n;
            return true;
        }
        cudaGetLastError();
        memory = nullptr;
    }
    return false;
}

bool kvq_cuda_device::room_for_rows(size_t nb) {
    n_moved += nb > nb_expanded;
    return more_memory(expanded, nb_expanded, nb);
}

void kvq_cuda_device::expand_lane(const kvq_codec & c, const kvq_page * pages, int n_pages, int n_head,
    const kvq_row_place & to, const kvq_turn & turn) {
    const kvq_affine_geometry g = geometry(c);
    if (g.type == KVQ_TYPE_MIXED) {
        kvq_launch_expand_mixed(kvq_mixed_get_geometry(c), pages, n_pages, n_head, to, (cudaStream_t) stream);
    } else if (g.split) {
        kvq_launch_expand_split(g, half_geometry(c, true), pages, n_pages, n_head, to, turn, (cudaStream_t) stream);
    } else if (g.type == KVQ_TYPE_LATTICE) {
        kvq_launch_expand_lattice(g, pages, n_pages, n_head, to, turn, (cudaStream_t) stream);
    } else {
        kvq_launch_expand(g, pages, n_pages, n_head, to, (cudaStream_t) stream);
    }
}

bool kvq_cuda_device::expand(const kvq_attn * attn, int n, void ** k, void ** v, const kvq_chain_pages * chain) {
    use();
    const kvq_attn & f = attn[0];
    const bool all = f.far && f.far->fetch == KVQ_FETCH_ALL, there = all && take_ahead(attn, n);
    const size_t rows = (size_t) f.n_kv * f.n_head_kv, nk = rows * f.k.head_size, nv = rows * f.v.head_size;
    if (!room_for_rows(2 * (nk + nv) * n) || (chain && !unfold(attn, n, chain))) { return false; }
    for (int i = 0; i < n; i++) {
        for (const bool value : { false, true }) {
            kvq_codec c = value ? f.v : f.k;
            const kvq_row_place to = place_of(attn, n, i, value, expanded);
            if (chain) { // rows already
                c.type = KVQ_TYPE_F16;
                c.bits = 16;
            }
            const kvq_page * pages = chain ? (const kvq_page *) (unfolded + i * unfolded_table) : attn[i].pages;
            expand_lane(c, pages, f.n_pages, f.n_head_kv, to, chain ? kvq_turn() : turn(attn[i], value));
            if (all) { overlay_far(attn[i], to, there ? &coming[(size_t) i] : nullptr); }
        }
    }
    if (all) { ask_ahead(attn, n); }
    *k = expanded;
    *v = (uint16_t *) expanded + nk * n;
    return check(cudaGetLastError(), "expand kernel");
}

bool kvq_cuda_device::expand_latent(const kvq_attn * attn, int n, void ** rows) {
    use();
    const kvq_attn & f = attn[0];
    const int width = f.k.head_size + f.v.head_size;
    if (!room_for_rows(2 * (size_t) f.n_kv * width * n)) { return false; }
    for (int i = 0; i < n; i++) {
        uint16_t * const at = (uint16_t *) expanded + (size_t) i * f.n_kv * width;
        expand_lane(
            f.k, attn[i].pages, f.n_pages, 1, { at, f.n_kv, false, false, width, nullptr, nullptr }, kvq_turn());
        expand_lane(f.v, attn[i].pages, f.n_pages, 1,
            { at + f.k.head_size, f.n_kv, false, true, width, nullptr, nullptr }, kvq_turn());
    }
    *rows = expanded;
    return check(cudaGetLastError(), "expand kernel of latent attention");
}

bool kvq_cuda_device::attend_rows(
    const kvq_attend_args & all, const kvq_codec & k, const kvq_codec & v, const kvq_attn * attn, int n_streams) {
    if (!kvq_rows_fit(all)) { return false; }
    kvq_attend_args a = all;
    kvq_rows_args r = {};
    const int n_slots = a.n_pages * a.page_cells;
    r.n_tiles = (n_slots + KVQ_ROWS_TILE - 1) / KVQ_ROWS_TILE;
    const size_t n_rows = (size_t) r.n_tiles * KVQ_ROWS_TILE * a.n_head_kv, nk = n_rows * a.k.head_size,
                 nv = n_rows * a.v.head_size, n_blocks = (size_t) kvq_rows_blocks(a);
    if (!room_for_rows(2 * (nk + nv) + 4 * n_rows + n_blocks * ((size_t) a.n_kv + (size_t) a.n_head_kv * r.n_tiles))) {
        return false;
    }
    uint16_t * const rows[2] = { (uint16_t *) expanded, (uint16_t *) expanded + nk };
    r.k = rows[0];
    r.v = rows[1];
    r.cells = (int32_t *) (rows[1] + nv);
    r.seen_cells = (uint8_t *) (r.cells + n_rows);
    r.seen_tiles = r.seen_cells + n_blocks * a.n_kv;
    // no split of less than 256 slots
    const int at_once = n_sm * kvq_rows_at_once(a);
    a.n_splits = std::max(1, std::min({ at_once / std::max((int) n_blocks * a.n_head_kv, 1), r.n_tiles / 4, 1024 }));
    if (a.n_splits > 1) {
        if (!grow(partial, n_partial, (size_t) a.n_head_kv * a.n_rows * a.n_splits * (a.v.head_size + 4),
                "attention's partial results")) {
            return true; // noted as an error
        }
        a.partial = partial;
    }
    for (int i = 0; i < n_streams; i++) { // one after another in the same memory
        a.stream[0] = all.stream[i];
        for (int value = 0; value < 2; value++) {
            const kvq_codec & c = value ? v : k;
            const size_t row = (size_t) a.n_head_kv * c.head_size, used = row * n_slots;
            const bool all = attn[i].far && attn[i].far->fetch == KVQ_FETCH_ALL;
            const kvq_row_place to = { rows[value], a.n_kv, true, (bool) value, 0, all ? attn[i].far->k_rows : nullptr,
                all ? attn[i].far->v_rows : nullptr };
            expand_lane(c, a.stream[0].pages, a.n_pages, a.n_head_kv, to, kvq_turn());
            if (all) { overlay_far(attn[i], to, nullptr); }
            if (used < (value ? nv : nk)) { zero(rows[value] + used, 2 * ((value ? nv : nk) - used)); }
        }
        kvq_launch_rows_attention(a, r, (cudaStream_t) stream);
        n_prompt++;
    }
    check(cudaGetLastError(), "prompt attention kernel");
    return true;
}

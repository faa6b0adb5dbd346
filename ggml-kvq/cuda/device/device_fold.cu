// Attention of few rows in three parts: logits, sums of values that stay codes, and what else values are, which is
// applied to sums of rows once a query (fold.cuh). Of two kinds of layers:
//   values that follow from keys alone (policy/chain.h): keys become f16 rows as in any predicted layer
//   cells with coordinates (policy/coords.h): logits of blocks, then of what coordinates say (coords.cuh)
#include "device.h"

#include "cuda/policy/coords.cuh"
#include "cuda/policy/fold.cuh"
#include "cuda/seal/seal.cuh"

#include <algorithm>

static constexpr int MOST_ROWS = 256; // query rows of a call; more make their values' rows once for all

// Are values of these calls predicted from keys alone or not at all, and is there a kernel for that?
bool kvq_cuda_device::may_fold(const kvq_attend_args & a, const kvq_attn * attn, const kvq_chain_pages * chain) {
    if (!allow_means || !chain || !a.n_pages || a.n_q * a.n_head > MOST_ROWS || !attn[0].rotary || !attn[0].v_mean) {
        return false;
    }
    const kvq_chain_pages &k = chain[0], &v = chain[1];
    if (!k.l || !v.l || v.out.row || a.v.head_size % 16 || a.page_cells % 16) { return false; }
    for (const kvq_predictor & w : v.from) {
        if (w.bits && w.bits != 8) { return false; }
    }
    kvq_attend_args b = a;
    b.part = 2;
    return a.v.type == KVQ_TYPE_LATTICE && kvq_decode_fits(b, 0);
}

// The same of cells with coordinates. Such rows have been turned as they were when they were sealed.
bool kvq_cuda_device::may_read_coords(const kvq_attend_args & a, const kvq_attn * attn, int n_streams) {
    const kvq_attn & f = attn[0];
    const int D = f.k.head_size;
    bool may = allow_means && f.k_basis && f.v_basis && f.rotary && f.k_mean && f.v_mean && !f.softcap && a.n_pages &&
        !a.map_stride && a.n_q * a.n_head <= MOST_ROWS && a.gqa <= KVQ_COORD_ROWS &&
        kvq_reads_coords(f.k, f.n_head_kv) && f.v.head_size == D && f.rotary->n_dims == D;
    for (int i = 0; i < n_streams; i++) { may = may && attn[i].flags & KVQ_ATTN_STAYED; }
    for (const int part : { 1, 2 }) {
        kvq_attend_args b = a;
        b.part = part;
        may = may && (part == 2 || kvq_decode_means(b)) && kvq_decode_fits(b, n_streams);
    }
    return may;
}

// What coordinates say, added to logits; sums over them follow. x: [stream] [cell][stride], scales behind all of them
bool kvq_cuda_device::add_coord_logits(
    const kvq_attend_args & a, const kvq_attn * attn, int n_streams, kvq_coord_read_args & r) {
    const kvq_attn & f = attn[0];
    const size_t n_cells = (size_t) a.n_pages * a.page_cells;
    r.n_pages = a.n_pages;
    r.page_cells = a.page_cells;
    r.n_head_kv = a.n_head_kv;
    r.head_size = f.k.head_size;
    r.n_rows = a.n_rows;
    r.n_q = a.n_q;
    r.gqa = a.gqa;
    r.n_logits = a.n_logits;
    r.q_stride_token = a.q_stride_token;
    r.q_stride_head = a.q_stride_head;
    r.scale = a.scale * 1.4426950408889634f;
    r.rotary = rotary(f.rotary);
    r.weights = basis_weights(*f.k_basis, r.head_size, !f.rotary->neox);
    r.waves = waves_of(f.rotary, r.head_size);
    const int most = 2 * n_sm / std::max(a.n_head_kv * n_streams, 1);
    r.chunk = std::max(1, (a.n_pages + most - 1) / std::max(most, 1));
    for (int i = 0; i < n_streams; i++) {
        r.stream[i].pages = attn[i].pages;
        r.stream[i].positions = attn[i].positions;
        r.stream[i].q = a.stream[i].q;
        r.stream[i].logits = a.stream[i].logits;
        r.stream[i].x = (int8_t *) unfolded + (size_t) i * n_cells * (size_t) (r.stride + 4);
        r.stream[i].s = (float *) (r.stream[i].x + n_cells * (size_t) r.stride);
    }
    return r.weights && r.waves;
}

const uint8_t * kvq_cuda_device::basis_weights(const kvq_basis & b, int head_size, bool apart) {
    const auto at = constants.find(&b);
    if (at != constants.end()) { return (const uint8_t *) at->second; }
    const std::vector<uint8_t> ordered = kvq_order_basis(b, head_size, apart);
    return (const uint8_t *) keep(&b, ordered.data(), ordered.size());
}

bool kvq_cuda_device::unfold_keys(const kvq_attn * attn, int n, const kvq_chain_pages * chain) {
    const kvq_attn & f = attn[0];
    const kvq_affine_geometry g = geometry(f.k);
    const size_t table = (f.n_pages * sizeof(kvq_page) + 255) / 256 * 256,
                 tiles = 2 * (size_t) f.n_pages * f.n_head_kv * g.n_cells * g.stride;
    if (!grow(unfolded, nb_unfolded, n * (table + tiles), "a layer's rows")) { return false; }
    unfolded_table = table;
    for (int i = 0; i < n; i++) {
        run_chain(
            chain[2 * i], (kvq_page *) (unfolded + i * table), (uint16_t *) (unfolded + n * table + i * tiles), true);
    }
    return check(cudaGetLastError(), "unfolding kernel");
}

// Sums of rows and what is applied to them, of these tokens; memory is not yet named. No chunks: nothing is.
bool kvq_cuda_device::describe_fold(
    const kvq_attend_args & a, const kvq_attn * attn, int n_streams, const kvq_chain_pages * chain, kvq_fold_args & f) {
    const int stride = chain ? 0 : kvq_coord_stride(*attn[0].k_basis);
    f.n_ids = a.n_head_kv * a.n_rows;
    f.n_rows = a.n_rows;
    f.n_q = a.n_q;
    f.gqa = a.gqa;
    f.n_head = a.n_head;
    f.size_v = a.v.head_size;
    f.page_cells = a.page_cells;
    f.n_logits = f.n_cells = a.n_logits;
    f.dst_stride_token = a.dst_stride_token;
    f.dst_stride_head = a.dst_stride_head;
    f.n_in = chain ? 2 : 1;
    f.fresh = !chain;
    if (chain && !chain[1].from[0].bits) { return true; }
    const kvq_predictor * const from = chain ? chain[1].from : nullptr;
    f.n_tiles = chain ? from[0].n_tiles() : (attn[0].v_basis->width + 15) / 16;
    f.n_groups = chain ? from[0].n_groups() : stride / 32;
    f.stride = chain ? (int) chain[1].in[0].stride : stride;
    for (int j = 0; j < f.n_in; j++) {
        if (!(f.weights[j] =
                    chain ? weights_of(from[j]) : basis_weights(*attn[0].v_basis, attn[0].v.head_size, false))) {
            return false;
        }
    }
    f.mean = mean_of(attn[0].v_mean, (size_t) a.n_head_kv * a.v.head_size);
    f.n_chunks = std::max(1, std::min(n_sm / (kvq_fold_blocks(f) * n_streams), (f.n_cells + 255) / 256));
    f.chunk = (f.n_cells + f.n_chunks * 64 - 1) / (f.n_chunks * 64) * 64;
    f.n_chunks = (f.n_cells + f.chunk - 1) / f.chunk;
    const int parts = (f.chunk + FOLD_CELLS - 1) / FOLD_CELLS;
    f.at_once = (f.chunk + parts * 64 - 1) / (parts * 64) * 64;
    return f.mean;
}

bool kvq_cuda_device::attend_fold(
    const kvq_attend_args & all, const kvq_attn * attn, int n_streams, const kvq_chain_pages * chain) {
    flush_rows();
    kvq_coord_read_args coords = {};
    if (chain && !unfold_keys(attn, n_streams, chain)) { return false; }
    if (!chain) {
        coords.stride = kvq_coord_stride(*attn[0].k_basis);
        coords.basis = basis_of(attn[0].k_basis, attn[0].k);
        const size_t nb = (size_t) all.n_pages * all.page_cells * (size_t) (coords.stride + 4);
        if (!grow(unfolded, nb_unfolded, n_streams * nb, "a layer's coordinates")) { return false; }
    }
    kvq_codec rows = attn[0].k;
    rows.type = KVQ_TYPE_F16;
    rows.bits = 16;
    const kvq_affine_geometry of_rows = geometry(rows);
    const bool folds = !chain || chain[1].from[0].bits != 0;
    const float * const mean = mean_of(attn[0].v_mean, (size_t) all.n_head_kv * all.v.head_size);
    if (!mean) { return false; }
    const int P = all.page_cells, most = std::max(1, (chain ? 32 : KVQ_COORD_ROWS) / all.gqa);
    for (int t0 = 0; t0 < all.n_q; t0 += most) {
        kvq_attend_args a = all;
        a.n_q = std::min(all.n_q - t0, most);
        a.n_rows = a.gqa * a.n_q;
        a.n_logits = a.n_pages * P;
        a.top = 0;
        kvq_fold_args f = {};
        if (!describe_fold(a, attn, n_streams, chain, f)) { return false; }
        const size_t S = (size_t) n_streams, nb_z = (size_t) f.n_ids * f.n_in * f.stride * sizeof(float),
                     nb_logits = kvq_pad((size_t) f.n_ids * a.n_logits * sizeof(float), 256),
                     nb_tops = kvq_pad((size_t) f.n_ids * MOST_SPLITS * sizeof(float2), 256),
                     nb_lse = kvq_pad((size_t) a.n_q * a.n_head * sizeof(float), 256),
                     nb = nb_logits + nb_tops + nb_lse + nb_z * (f.n_chunks + 1) +
            kvq_pad((size_t) f.n_chunks * f.n_ids * sizeof(float), 256);
        if (!grow(logits_memory, nb_logits_memory, S * nb, "attention's logits")) { return false; }
        for (int s = 0; s < n_streams; s++) {
            auto & x = a.stream[s];
            uint8_t * at = logits_memory + s * nb;
            x.q += t0 * a.q_stride_token;
            x.mask = x.mask ? x.mask + t0 * a.mask_stride_token : nullptr;
            x.dst += t0 * a.dst_stride_token;
            x.pages = attn[s].pages;
            x.logits = (float *) at;
            x.tops = (float *) (at += nb_logits);
            float * const lse = (float *) (at += nb_tops);
            x.lse = x.lse ? x.lse + (size_t) t0 * a.n_head : lse;
            auto & to = f.stream[s];
            to.logits = x.logits;
            to.lse = x.lse;
            to.pages = attn[s].pages;
            to.z = (float *) (at += nb_lse);
            to.partial = (float *) (at += nb_z);
            to.sealed = (float *) (at + nb_z * f.n_chunks);
            to.dst = x.dst;
            for (int j = 0; chain && j < 2; j++) {
                to.x[j] = chain[2 * s + 1].in[j].row;
                to.s[j] = chain[2 * s + 1].in[j].scale;
            }
        }
        if (!chain) {
            if (!add_coord_logits(a, attn, n_streams, coords)) { return false; }
            for (int s = 0; s < n_streams; s++) {
                f.stream[s].x[0] = coords.stream[s].x;
                f.stream[s].s[0] = coords.stream[s].s;
            }
            if (t0 == 0) { kvq_launch_unpack_coords(coords, n_streams, (cudaStream_t) stream); }
        }
        for (const int part : { 1, 2 }) {
            kvq_attend_args b = a;
            b.part = part;
            b.is_short = false;
            b.n_splits = 0;
            if (part == 1 && !chain) {
                if (!reads_sealed(attn, n_streams, b)) { return false; }
                for (int s = 0; s < n_streams; s++) { b.stream[s].lse = nullptr; }
            } else if (part == 1) {
                b.k = b.v = of_rows;
                b.in_order = 1; // the kernel before makes these rows
                for (int s = 0; s < n_streams; s++) {
                    b.stream[s].pages = (const kvq_page *) (unfolded + s * unfolded_table);
                    b.stream[s].lse = nullptr;
                }
            } else if (!folds) { // then no other kernel adds the mean of sealed values
                b.waves = waves_of(attn[0].rotary, attn[0].k.head_size);
                b.v_mean = mean;
                if (!b.waves) { return false; }
            }
            if (!kvq_decode_fits(b, n_streams)) {
                err = err.empty() ? "attention over folded values has no kernel for these heads" : err;
                return false;
            }
            if (!split(b, n_streams, 0, true)) { return false; }
            if (part == 1) { b.n_splits = std::min(b.n_splits, MOST_SPLITS); }
            kvq_launch_decode_attention(b, n_streams, (cudaStream_t) stream);
            if (part == 1 && !chain) { kvq_launch_coord_logits(coords, n_streams, (cudaStream_t) stream); }
        }
        if (folds) { kvq_launch_fold(f, n_streams, (cudaStream_t) stream); }
    }
    n_folded++;
    return check(cudaGetLastError(), "attention over folded values");
}

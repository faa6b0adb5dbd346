// Which pages the tokens of one cache see (seen.cuh): listed once an evaluation, for all layers that ask alike.
#include "device.h"

#include "cuda/walk/seen.cuh"

#include <algorithm>

bool kvq_cuda_device::may_list(const kvq_attn & f, int n) const {
    return n == 1 && allow_lists && f.n_q > 1 && f.n_q <= KVQ_SEEN_TOKENS && f.mask && !f.mask_stride_head && !f.far &&
        f.n_pages * f.k.n_cells >= KVQ_SEEN_CELLS;
}

// Called with what kvq_decode_fits set.
bool kvq_cuda_device::list_pages(kvq_attend_args & a) {
    const int n_blocks = kvq_decode_row_blocks(a), n_slots = std::max(1, n_sm * a.occupancy / a.n_head_kv),
              n_work = n_slots + n_blocks;
    const bool mixed = a.k.type == KVQ_TYPE_MIXED;
    const size_t rows = (size_t) a.n_head_kv * a.n_rows; // partial results stay within those of other attention
    a.n_splits = (int) std::max<size_t>(1,
        std::min({ (size_t) kvq_decode_max_splits(a), (size_t) n_slots, (size_t) n_sm * 2 * 128 / rows,
            (size_t) KVQ_SEEN_SPLITS }));
    kvq_seen_args x = { a.stream[0].pages, a.stream[0].mask, a.mask_stride_token, a.n_pages, a.page_cells, a.n_kv,
        a.n_rows, a.gqa, 8 >> row_columns_log2(a), n_blocks, n_work, n_slots, a.n_splits,
        mixed ? 2 * a.page_steps : a.page_cells / 32, a.n_warps >> a.slices_log2, nullptr };
    const std::array<int64_t, 12> key = { (int64_t) (uintptr_t) x.mask, x.mask_stride_token, x.n_pages, x.page_cells,
        x.n_kv, x.n_rows, x.gqa, x.per_row, n_slots, x.most, x.n_teams, x.units2 };
    // its table of this evaluation or of one before, which a recording has room in; else the oldest
    auto t = std::find_if(seen.begin(), seen.end(), [&](const seen_table & y) { return y.key == key; });
    if (t == seen.end()) {
        t = std::min_element(seen.begin(), seen.end(),
            [](const seen_table & y, const seen_table & z) { return y.evaluation < z.evaluation; });
        t->key = {};
    }
    if (!n_evaluations || t->evaluation != n_evaluations || t->key != key) {
        if (!grow(t->work, t->n_words, kvq_seen_words(n_work, n_blocks, a.n_pages), "lists of pages")) { return false; }
        x.work = t->work;
        kvq_launch_seen(x, (cudaStream_t) stream);
        a.in_order = 1; // attention reads them before it waits
        t->evaluation = n_evaluations;
        t->key = key;
    }
    n_listed++;
    a.work = (const int32_t *) t->work;
    a.n_work = n_work;
    if (!grow(partial, n_partial, rows * a.n_splits * (a.v.head_size + 4), "attention's partial results") ||
        !grow(tickets, n_tickets, (size_t) n_blocks * a.n_head_kv, "attention's tickets")) {
        return false;
    }
    a.partial = partial;
    a.tickets = tickets;
    return true;
}

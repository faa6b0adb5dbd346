// The device's second tier one step ahead (KVQ_FETCH_AHEAD): one kernel attends to near cells and to far rows that have
// come before (attend_decode.cuh, AHEAD). What the next step reads is picked and brought behind it; in a recording on a
// stream of its own, beside the layers that follow.
#include "device.h"

#include "engine/far_buffer.h"
#include "cuda/far/far.cuh"
#include "types/far_rows.h"

#include <algorithm>

void kvq_cuda_device::renew_kept(const kvq_far & f, const kvq_lane_layout & k, int first, int last, bool again) {
    if (first == last) {
        to_renew.erase(f.buffer);
        return;
    }
    std::shared_ptr<kvq_far_renew> & job = to_renew[f.buffer];
    if (!job) {
        const int nb_row = (int) kvq_far_row_bytes(f.format, k.codec.head_size), n_words = f.n_slots / 32;
        const kvq_far_buffer at(k.n_head, f.n_kept, n_words, 2 * (size_t) nb_row);
        uint8_t * const buffer = (uint8_t *) f.buffer;
        job.reset(new kvq_far_renew{ f.kept, (const int32_t *) buffer, (uint32_t *) (buffer + at.bits),
            buffer + at.rows, f.k_rows, f.v_rows, k.n_head, f.n_kept, n_words, f.n_cells, nb_row, 0, {} });
    }
    kvq_far_renew & x = *job;
    if (x.n && x.cells[x.n - 1].again == again) {
        auto & before = x.cells[x.n - 1];
        if (first >= before.from && last <= before.to) { return; } // keys and values of a page
        if (first == before.to) {
            before.to = last;
            return;
        }
    }
    if (x.n == kvq_far_renew::MOST) { // no row is kept
        x.n = 1;
        x.cells[0] = { 0, f.n_slots, false };
        return;
    }
    x.cells[x.n++] = { first, last, again };
}

// behind rows on their way to the second tier
void kvq_cuda_device::flush_renewed() {
    for (const auto & x : to_renew) { kvq_launch_far_renew(*x.second, (cudaStream_t) stream); }
    to_renew.clear();
}

// Is there a kernel for these pages that reads near cells and kept rows at once?
bool kvq_cuda_device::reads_kept(const kvq_attend_args & all, const kvq_attn * attn) const {
    const kvq_far & f = *attn[0].far;
    kvq_attend_args a = all;
    a.part = 3;
    a.far_row_k = (int) kvq_far_row_bytes(f.format, a.k.head_size);
    a.far_row_v = (int) kvq_far_row_bytes(f.format, a.v.head_size);
    return kvq_decode_fits(a, 0);
}

// Where picks are made: they wait for what the stream has now.
void * kvq_cuda_device::begin_picks() {
    if (now != RECORD || !make_far_stream()) { return stream; }
    if (!check(cudaEventRecord((cudaEvent_t) picks_asked, (cudaStream_t) stream), "cudaEventRecord") ||
        !check(cudaStreamWaitEvent((cudaStream_t) far_stream, (cudaEvent_t) picks_asked, 0), "cudaStreamWaitEvent")) {
        return stream;
    }
    picks_pending = true;
    return far_stream;
}

void kvq_cuda_device::end_picks() {
    const int half = half_of_places();
    if (!picks_pending || place % half != half - 1) { return; }
    check(cudaEventRecord((cudaEvent_t) half_there[place / half], (cudaStream_t) far_stream), "cudaEventRecord");
    half_pending[place / half] = true;
}

void kvq_cuda_device::join_picks() {
    place = -1;
    half_pending[0] = half_pending[1] = false;
    if (!picks_pending) { return; }
    picks_pending = false;
    check(cudaEventRecord((cudaEvent_t) picks_there, (cudaStream_t) far_stream), "cudaEventRecord");
    check(cudaStreamWaitEvent((cudaStream_t) stream, (cudaEvent_t) picks_there, 0), "cudaStreamWaitEvent");
}

// Memory of nb bytes for what kernels leave each other. beside: picks are made on a stream of their own, so that
// attention takes another place than the layers before; all others wait for these picks.
bool kvq_cuda_device::take_place(size_t nb, bool beside) {
    if (!beside || nb != nb_place) { join_picks(); }
    nb_place = nb;
    n_places = std::max(1, (int) std::min<size_t>(NB_PLACES / nb, MOST_PLACES) / 2 * 2);
    if (!grow(logits_memory, nb_logits_memory, nb_place * n_places, "attention's logits")) { return false; }
    if (!beside || now != RECORD) { return true; }
    place = (place + 1) % n_places;
    const int half = place / half_of_places();
    if (place % half_of_places() == 0 && half_pending[half]) {
        half_pending[half] = false;
        return check(
            cudaStreamWaitEvent((cudaStream_t) stream, (cudaEvent_t) half_there[half], 0), "cudaStreamWaitEvent");
    }
    return true;
}

// What does not change from token to token, and the streams' far rows and buffers.
kvq_far_kept kvq_cuda_device::kept_of(const kvq_far_args & r, const kvq_attn * attn, int n_streams) {
    const kvq_far & f = *attn[0].far;
    kvq_far_kept b = {};
    b.n_q = attn[0].n_q;
    b.from = kvq_far_first_kept(b.n_q, f.n_kept, f.top);
    b.anew = f.fetch == KVQ_FETCH_NOW;
    b.n_rows = r.n_rows;
    b.n_head_kv = r.n_head_kv;
    b.top = f.top;
    b.n_kept = f.n_kept;
    b.page_cells = r.page_cells;
    b.n_cells = std::min(r.n_kv, r.n_near * r.page_cells);
    b.n_logits = r.n_logits;
    b.nb_key = (int) kvq_far_row_bytes(f.format, attn[0].k.head_size);
    b.nb_value = (int) kvq_far_row_bytes(f.format, attn[0].v.head_size);
    b.n_words = f.n_slots / 32;
    const kvq_far_buffer at(b.n_head_kv, f.n_kept, b.n_words, (size_t) b.nb_key + b.nb_value);
    b.bits = at.bits;
    b.rows = at.rows;
    for (int s = 0; s < n_streams; s++) {
        const kvq_far & y = *attn[s].far;
        b.stream[s] = { y.k_rows, y.v_rows, r.stream[s].picks - r.before * r.n_head_kv * r.top, y.kept,
            (uint8_t *) y.buffer, r.stream[s].logits, (unsigned long long *) y.counts };
    }
    return b;
}

// Does anybody read what these tokens pick?
bool kvq_cuda_device::reads_picks(const kvq_far_args & r, const kvq_far_kept & kept) {
    return !r.before || r.before + r.n_q > kept.from;
}

// Far rows of this call are those that are kept.
void kvq_cuda_device::read_kept(const kvq_far_kept & kept, kvq_attend_args & a, int n_streams) {
    a.top = kept.n_kept;
    a.here_rows = (int) kept.rows;
    a.n_picked_words = kept.n_words;
    for (int s = 0; s < n_streams; s++) {
        const auto & x = kept.stream[s];
        a.stream[s].picks = x.kept;
        a.stream[s].here = x.buffer;
        a.stream[s].picked = (const uint32_t *) (x.buffer + kept.bits);
    }
}

bool kvq_cuda_device::attend_kept(
    const kvq_attend_args & all, const kvq_attn * attn, int n_streams, const far_sizes & size) {
    kvq_attend_args a;
    kvq_far_args r;
    for (int t0 = 0; t0 < all.n_q; t0 += a.n_q) {
        if (!far_tokens(all, attn, n_streams, size, t0, a, r)) { return false; }
        const kvq_far_kept kept = kept_of(r, attn, n_streams);
        read_kept(kept, a, n_streams);
        a.part = 3;
        if (!kvq_decode_fits(a, n_streams)) {
            if (err.empty()) { err = "attention one step ahead has no kernel for these pages"; }
            return false;
        }
        if (!split(a, n_streams, 0, true)) { return false; }
        a.n_splits = std::min(a.n_splits, MOST_SPLITS + a.n_picking);
        kvq_launch_decode_attention(a, n_streams, (cudaStream_t) stream);
        r.n_splits = a.n_splits - a.n_picking;
        const bool last = t0 + a.n_q == all.n_q;
        void * const beside = last ? begin_picks() : stream; // memory is used again by tokens behind
        if (reads_picks(r, kept)) { kvq_launch_far_pick(r, n_streams, (cudaStream_t) beside); }
        if (last) {
            kvq_launch_far_keep(kept, n_streams, (cudaStream_t) beside);
            end_picks();
        }
    }
    n_ahead++;
    return check(cudaGetLastError(), "attention one step ahead");
}

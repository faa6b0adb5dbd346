// The device's second tier one step ahead (KVQ_FETCH_AHEAD): one kernel attends to near cells and to far rows that have
// come before (attend_decode.cuh, AHEAD). What the next step reads is picked and brought behind it; in a recording on a
// stream of its own, beside the layers that follow.
#include "device.h"

#include "engine/far_buffer.h"
#include "far.cuh"

#include <algorithm>

void kvq_cuda_device::forget_picks(int32_t * picks, size_t n, void * buffer, size_t nb) {
    if (n) {
        to_forget[buffer] = { n, nb, picks };
    } else {
        to_forget.erase(buffer);
    }
}

void kvq_cuda_device::flush_forgotten() {
    for (const auto & x : to_forget) {
        check(cudaMemsetAsync(x.second.picks, 0xff, x.second.n * sizeof(int32_t), (cudaStream_t) stream), "cudaMemset");
        check(cudaMemsetAsync(x.first, 0, x.second.nb, (cudaStream_t) stream), "cudaMemset");
    }
    to_forget.clear();
}

// Are rows of these blocks worth the buffer: is there a kernel that reads them there? Else they would come twice.
static bool keeps_rows(const kvq_attn & a) {
    const kvq_far & f = *a.far;
#define KVQ_PAIR(K, V) || (a.k.bits == K && a.v.bits == V)
    const bool has_kernel = !a.k.split && (false KVQ_AHEAD_BITS(KVQ_PAIR));
#undef KVQ_PAIR
    return has_kernel && f.fetch == KVQ_FETCH_AHEAD && f.buffer && f.top <= FAR_KEPT;
}

// Is there a kernel for these pages that reads what was kept?
bool kvq_cuda_device::reads_kept(const kvq_attend_args & all, const kvq_attn * attn) const {
    const kvq_far & f = *attn[0].far;
    if (!keeps_rows(attn[0])) { return false; }
    kvq_attend_args a = all;
    a.part = 3;
    a.top = f.top;
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

void kvq_cuda_device::join_picks() {
    if (!picks_pending) { return; }
    picks_pending = false;
    check(cudaEventRecord((cudaEvent_t) picks_there, (cudaStream_t) far_stream), "cudaEventRecord");
    check(cudaStreamWaitEvent((cudaStream_t) stream, (cudaEvent_t) picks_there, 0), "cudaStreamWaitEvent");
}

// What does not change from token to token, and the streams' far rows and buffers.
static kvq_far_bring bring_of(const kvq_far_args & r, const kvq_attn * attn, int n_streams) {
    const kvq_far & f = *attn[0].far;
    kvq_far_bring b = {};
    b.first = r.first;
    b.last = r.last;
    b.n_q = r.n_q;
    b.n_head_kv = r.n_head_kv;
    b.top = f.top;
    b.page_cells = r.page_cells;
    b.nb_key = (int) kvq_far_row_bytes(f.format, attn[0].k.head_size);
    b.nb_value = (int) kvq_far_row_bytes(f.format, attn[0].v.head_size);
    b.n_words = f.n_slots / 32;
    const kvq_far_buffer at(b.n_head_kv, f.top, b.n_words, (size_t) b.nb_key + b.nb_value);
    b.tags = at.tags;
    b.hands = at.hands;
    b.bits = at.bits;
    b.rows = at.rows;
    for (int s = 0; s < n_streams; s++) {
        const kvq_far & y = *attn[s].far;
        b.stream[s] = { y.k_rows, y.v_rows, r.stream[s].picks, y.picks, (uint8_t *) y.buffer,
            (unsigned long long *) y.counts };
    }
    return b;
}

// Attention in parts: this call reads what the one before picked, where it lies, and what it picked itself is kept.
void kvq_cuda_device::recall_picks(const kvq_far_args & r, const kvq_attn * attn, int n_streams) {
    kvq_far_args x = r;
    const bool keeps = keeps_rows(attn[0]);
    x.last = r.last && !keeps;
    kvq_far_bring b = {};
    if (r.last && keeps) {
        b = bring_of(r, attn, n_streams);
        b.first = false; // counted by the other kernel
        const size_t nb = (size_t) r.n_q * r.n_head_kv * r.top * sizeof(int32_t);
        for (int s = 0; s < n_streams; s++) { // this call's own picks give way
            int32_t * const own = r.stream[s].picks + kvq_pad(nb, 256) / sizeof(int32_t);
            check(cudaMemcpyAsync(own, r.stream[s].picks, nb, cudaMemcpyDeviceToDevice, (cudaStream_t) stream),
                "cudaMemcpyAsync of picks");
            b.stream[s].picks = own;
        }
    }
    kvq_launch_far_recall(x, n_streams, (cudaStream_t) stream);
    if (b.last) { kvq_launch_far_bring(b, n_streams, (cudaStream_t) stream); }
}

bool kvq_cuda_device::attend_kept(
    const kvq_attend_args & all, const kvq_attn * attn, int n_streams, const kvq_lane_layout * k) {
    kvq_attend_args a;
    kvq_far_args r;
    for (int t0 = 0; t0 < all.n_q; t0 += a.n_q) {
        if (!far_tokens(all, attn, n_streams, k, t0, a, r)) { return false; }
        const kvq_far_bring b = bring_of(r, attn, n_streams);
        a.part = 3;
        a.here_rows = (int) b.rows;
        a.n_picked_words = b.n_words;
        for (int s = 0; s < n_streams; s++) {
            a.stream[s].picks = b.stream[s].kept;
            a.stream[s].here = b.stream[s].buffer;
            a.stream[s].picked = (const uint32_t *) (b.stream[s].buffer + b.bits);
        }
        if (!kvq_decode_fits(a, n_streams)) {
            if (err.empty()) { err = "attention one step ahead has no kernel for these pages"; }
            return false;
        }
        if (!split(a, n_streams, 0, true)) { return false; }
        a.n_splits = std::min(a.n_splits, MOST_SPLITS + a.n_picking);
        kvq_launch_decode_attention(a, n_streams, (cudaStream_t) stream);
        if (!r.first && !r.last) { continue; } // nobody reads what is picked
        r.n_splits = a.n_splits - a.n_picking;
        void * const beside = r.last ? begin_picks() : stream; // memory is used again by tokens behind
        kvq_launch_far_pick(r, n_streams, (cudaStream_t) beside);
        kvq_launch_far_bring(b, n_streams, (cudaStream_t) beside);
    }
    n_ahead++;
    return check(cudaGetLastError(), "attention one step ahead");
}

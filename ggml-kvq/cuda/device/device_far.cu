// The device's second tier (kvq_far): far rows in pinned memory of the host, and attention that fetches some of them.
#include "device.h"

#include "cuda/far/far.cuh"
#include "types/far_rows.h"

#include <algorithm>
#include <cstring>

// ---------------------------------------------------------------- rows

void * kvq_cuda_device::alloc_far(size_t nb) {
    return check(cudaSetDevice(ordinal), "cudaSetDevice") ? pinned.alloc(nb) : nullptr;
}

void kvq_cuda_device::free_far(void * p, size_t) {
    synchronize();
    if (far_stream) { check(cudaStreamSynchronize((cudaStream_t) far_stream), "cudaStreamSynchronize"); }
    coming.clear();
    pinned.free(p);
}

struct kvq_cuda_device::far_batch {
    kvq_far_jobs shape; // no jobs
    std::vector<std::pair<uint16_t *, void *>> jobs;
};

static kvq_far_jobs shape_of(const kvq_lane_layout & l, int format) {
    kvq_far_jobs a = {};
    a.format = format;
    a.head_size = l.codec.head_size;
    a.stride = l.head_stride();
    a.n_rows = l.n_head * l.page_cells;
    a.nb_row = kvq_far_row_bytes(format, l.codec.head_size);
    return a;
}

// Waits, as sealing does, and goes before it: tiles are used again behind both.
void kvq_cuda_device::put_far(
    const kvq_lane_layout & l, int format, int n, const uint16_t * const * tiles, void * const * rows, int) {
    const kvq_far_jobs shape = shape_of(l, format);
    auto at = std::find_if(to_far.begin(), to_far.end(),
        [&](const auto & x) { return !memcmp(&x->shape, &shape, offsetof(kvq_far_jobs, job)); });
    if (at == to_far.end()) {
        to_far.emplace_back(new far_batch{ shape, {} });
        at = to_far.end() - 1;
    }
    for (int i = 0; i < n; i++) {
        (*at)->jobs.emplace_back((uint16_t *) tiles[i], rows[i]);
        to_read.insert(tiles[i]);
    }
}

void kvq_cuda_device::flush_far() {
    std::vector<std::shared_ptr<far_batch>> batches;
    batches.swap(to_far);
    for (const auto & b : batches) {
        for (size_t i = 0; i < b->jobs.size(); i += kvq_far_jobs::MOST) {
            const int n = (int) std::min<size_t>(b->jobs.size() - i, kvq_far_jobs::MOST);
            kvq_far_jobs a = b->shape;
            for (int j = 0; j < n; j++) {
                a.job[j] = { b->jobs[i + (size_t) j].first, b->jobs[i + (size_t) j].second };
            }
            kvq_launch_far_put(a, n, (cudaStream_t) stream);
        }
    }
}

void kvq_cuda_device::get_far(const kvq_lane_layout & l, int format, const void * rows, uint16_t * tile) {
    use();
    kvq_far_jobs a = shape_of(l, format);
    a.job[0] = { tile, (void *) rows };
    kvq_launch_far_get(a, 1, (cudaStream_t) stream);
    check(cudaGetLastError(), "kernel of far rows");
}

// ---------------------------------------------------------------- prompts
// Far rows of a layer come over the bus while the layer before it computes: by the device's copy engines, which leave
// its multiprocessors alone, page by page as they lie, and as many as lie in a row at once. Where they go is free again
// when the layer before has its rows. Which layer follows is what it was in the call before.

void kvq_cuda_device::name_far_table(const void * const * there, const void * const * here, size_t n) {
    if (here) {
        far_tables[there] = { here, n };
    } else {
        far_tables.erase(there);
        coming.clear();
        next_far.clear();
    }
}

kvq_cuda_device::table_here kvq_cuda_device::here(const void * const * table) const {
    auto at = far_tables.upper_bound(table);
    if (at == far_tables.begin()) { return {}; }
    --at;
    const size_t i = std::min((size_t) (table - at->first), at->second.n);
    return { at->second.rows + i, at->second.n - i };
}

void kvq_cuda_device::overlay_far(const kvq_attn & a, const kvq_row_place & to, const far_call * came) {
    const int D = to.value ? a.v.head_size : a.k.head_size;
    kvq_launch_far_overlay(
        { a.far->format, D, a.far->n_cells, a.n_head_kv, a.n_pages, kvq_far_row_bytes(a.far->format, D), a.pages, to,
            came ? (const uint8_t *) stage + came->at[to.value] : nullptr, came ? came->nb_page[to.value] : 0,
            came ? came->n_staged : 0 },
        (cudaStream_t) stream);
}

kvq_row_place kvq_cuda_device::place_of(const kvq_attn * attn, int n, int i, bool value, void * memory) const {
    const kvq_attn & f = attn[0];
    const size_t rows = (size_t) f.n_kv * f.n_head_kv, nk = rows * f.k.head_size, nv = rows * f.v.head_size;
    const bool all = attn[i].far && attn[i].far->fetch == KVQ_FETCH_ALL;
    return { (uint16_t *) memory + (value ? nk * n + i * nv : i * nk), f.n_kv, false, value, 0,
        all ? attn[i].far->k_rows : nullptr, all ? attn[i].far->v_rows : nullptr };
}

// Is what has come for these calls? Then the first pages of each are in `stage`.
bool kvq_cuda_device::take_ahead(const kvq_attn * attn, int n) {
    bool same = n == (int) coming.size();
    for (int i = 0; same && i < n; i++) {
        const kvq_attn &x = attn[i], &y = coming[(size_t) i].attn;
        const kvq_far & far = coming[(size_t) i].far;
        same = x.pages == y.pages && x.n_head_kv == y.n_head_kv && x.k.head_size == y.k.head_size &&
            x.v.head_size == y.v.head_size && x.far->k_rows == far.k_rows && x.far->v_rows == far.v_rows &&
            x.far->format == far.format && x.far->n_cells == far.n_cells;
    }
    if (same) { check(cudaStreamWaitEvent((cudaStream_t) stream, (cudaEvent_t) far_ready, 0), "cudaStreamWaitEvent"); }
    return same;
}

// Pages that lie one behind the other come in one copy; what lies between two pages of a block comes with them.
void kvq_cuda_device::stage_pages(const void * const * rows, int n_pages, size_t nb_page, uint8_t * to) {
    for (int p = 0, n; p < n_pages; p += n) {
        n = 1;
        if (!rows[p]) { continue; }
        const auto * const from = (const uint8_t *) rows[p];
        const size_t left = pinned.left(from);
        while (p + n < n_pages && rows[p + n] == from + (size_t) n * nb_page && (size_t) (n + 1) * nb_page <= left) {
            n++;
        }
        check(cudaMemcpyAsync(to + (size_t) p * nb_page, from, std::min((size_t) n * nb_page, left),
                  cudaMemcpyHostToDevice, (cudaStream_t) far_stream),
            "cudaMemcpyAsync of far rows");
        n_stagings++;
        n_staged += n;
    }
}

bool kvq_cuda_device::make_far_stream() {
    cudaStream_t s = nullptr;
    if (!far_stream && check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "cudaStreamCreate")) {
        far_stream = s;
    }
    bool ok = far_stream != nullptr;
    for (void ** e : { &far_ready, &far_left, &picks_asked, &picks_there, &half_there[0], &half_there[1] }) {
        cudaEvent_t made = nullptr;
        if (!*e && check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreate")) { *e = made; }
        ok = ok && *e;
    }
    return ok;
}

void kvq_cuda_device::ask_ahead(const kvq_attn * attn, int n) {
    coming.clear();
    std::vector<far_call> now((size_t) n);
    for (int i = 0; i < n; i++) { now[(size_t) i] = { attn[i], *attn[i].far, {}, {}, 0 }; }
    if (last_far) { next_far[last_far] = now; }
    last_far = attn[0].far->k_rows;
    const auto at = next_far.find(last_far);
    if (at == next_far.end() || (int) at->second.size() != n || !make_far_stream()) { return; }
    std::vector<far_call> next = at->second;
    size_t nb = 0;
    const auto is_pinned = [&](const table_here & t, int n_pages) { // all pages of a lane are, or no page is
        const auto * const p = std::find_if(t.rows, t.rows + n_pages, [](const void * x) { return x != nullptr; });
        return p != t.rows + n_pages && pinned.holds(*p);
    };
    for (int i = 0; i < n; i++) {
        far_call & x = next[(size_t) i];
        const table_here k = here(x.far.k_rows), v = here(x.far.v_rows);
        x.n_staged = (int) std::min({ (size_t) ((attn[i].n_kv + x.far.n_cells - 1) / x.far.n_cells), k.n, v.n });
        // rows on the device itself are read where they are
        if (!is_pinned(k, x.n_staged) || !is_pinned(v, x.n_staged)) { return; }
        for (const bool value : { false, true }) {
            const int D = value ? x.attn.v.head_size : x.attn.k.head_size;
            x.nb_page[value] =
                kvq_pad(kvq_far_row_bytes(x.far.format, D) * (size_t) x.attn.n_head_kv * x.far.n_cells, KVQ_ALIGN);
            x.at[value] = nb;
            nb += (size_t) x.n_staged * x.nb_page[value];
        }
    }
    if (!more_memory(stage, nb_stage, nb)) { return; } // then rows come when they are needed
    check(cudaEventRecord((cudaEvent_t) far_left, (cudaStream_t) stream), "cudaEventRecord");
    check(cudaStreamWaitEvent((cudaStream_t) far_stream, (cudaEvent_t) far_left, 0), "cudaStreamWaitEvent");
    for (far_call & x : next) {
        for (const bool value : { false, true }) {
            stage_pages(here(value ? x.far.v_rows : x.far.k_rows).rows, x.n_staged, x.nb_page[value],
                (uint8_t *) stage + x.at[value]);
        }
    }
    check(cudaEventRecord((cudaEvent_t) far_ready, (cudaStream_t) far_stream), "cudaEventRecord");
    coming = std::move(next);
}

// ---------------------------------------------------------------- attention

kvq_cuda_device::far_sizes kvq_cuda_device::sizes_of_far(
    const kvq_attend_args & all, const kvq_attn & f, const kvq_lane_layout * k) const {
    const int parts = all.k.np == 0 || all.k.group % 64 == 0 ? 0 : all.k.group % 32 == 0 ? 1 : 2;
    far_sizes x;
    // few enough rows for a few blocks of columns; a token at least
    x.n_q = std::min(all.n_q, std::max(1, (32 >> parts) / all.gqa));
    // for the longest cache: pages open while a recording is in use
    const size_t n_slots = (size_t) (k ? std::max(k->n_pages, all.n_pages) : all.n_pages) * all.page_cells,
                 n_rows = (size_t) all.n_head_kv * all.gqa * x.n_q, n_lists = (size_t) all.n_head_kv * x.n_q,
                 n_picks = (size_t) all.n_head_kv * (f.far->n_kept > 0 ? all.n_q : x.n_q);
    x.logits = kvq_pad(n_rows * n_slots * sizeof(float), 256);
    x.keys = kvq_pad(n_lists * n_slots * sizeof(unsigned long long), 256);
    x.tops = kvq_pad(n_rows * MOST_SPLITS * sizeof(float2), 256);
    x.list = kvq_pad(n_picks * f.far->top * sizeof(int32_t), 256); // kept: read behind the last token
    x.all = x.logits + x.keys + x.tops + x.list;
    return x;
}

// Some tokens from t0 on as a call of their own: what its kernels take, and memory for what they leave each other.
bool kvq_cuda_device::far_tokens(const kvq_attend_args & all, const kvq_attn * attn, int n_streams,
    const far_sizes & size, int t0, kvq_attend_args & a, kvq_far_args & r) {
    const kvq_far & f = *attn[0].far;
    const int H = all.n_head_kv, P = all.page_cells;
    a = all;
    a.n_q = std::min(all.n_q - t0, size.n_q);
    a.n_rows = a.gqa * a.n_q;
    a.n_logits = a.n_pages * P;
    a.top = f.top;
    a.far_format = f.format;
    a.far_row_k = (int) kvq_far_row_bytes(f.format, a.k.head_size);
    a.far_row_v = (int) kvq_far_row_bytes(f.format, a.v.head_size);
    const size_t n_lists = (size_t) H * size.n_q;
    if (!grow(far_sums, n_far_sums, n_streams * n_lists * sizeof(kvq_far_sums), "what is picked")) { return false; }
    r = {};
    r.before = t0;
    r.ahead = f.fetch == KVQ_FETCH_AHEAD;
    r.n_q = a.n_q;
    r.n_rows = a.n_rows;
    r.gqa = a.gqa;
    r.n_head_kv = H;
    r.n_near = a.n_pages;
    r.page_cells = P;
    r.n_kv = a.n_kv;
    r.n_logits = a.n_logits;
    r.top = f.top;
    r.sinks = a.sinks;
    for (int s = 0; s < n_streams; s++) {
        auto & x = a.stream[s];
        uint8_t * at = logits_memory + std::max(place, 0) * nb_place + s * size.all;
        x.q += t0 * a.q_stride_token;
        x.mask = x.mask ? x.mask + t0 * a.mask_stride_token : nullptr;
        x.dst += t0 * a.dst_stride_token;
        x.lse = x.lse ? x.lse + (size_t) t0 * a.n_head : nullptr;
        x.logits = (float *) at;
        const kvq_far & y = *attn[s].far;
        auto & to = r.stream[s];
        to.pages = attn[s].pages; // x.pages may be rows by now
        to.k_rows = x.k_rows = y.k_rows;
        to.v_rows = x.v_rows = y.v_rows;
        to.logits = x.logits;
        to.keys = (unsigned long long *) (at += size.logits);
        to.tops = x.tops = (float *) (at += size.keys);
        to.sums = (kvq_far_sums *) far_sums + s * n_lists;
        to.picks = (int32_t *) (at += size.tops) + (f.n_kept > 0 ? (size_t) t0 * H * f.top : 0);
        x.picks = to.picks;
        to.counts = (unsigned long long *) y.counts;
    }
    a.is_short = false;
    a.n_splits = 0;
    return true;
}

bool kvq_cuda_device::attend_far(
    const kvq_attend_args & all, const kvq_attn * attn, int n_streams, const kvq_lane_layout * k) {
    n_far++;
    const far_sizes size = sizes_of_far(all, attn[0], k);
    const bool keeps = attn[0].far->n_kept > 0, kept = attn[0].far->fetch == KVQ_FETCH_AHEAD,
               at_once = kept && reads_kept(all, attn);
    if (keeps && !attn[0].far->buffer) {
        err = err.empty() ? "attention one step ahead has no buffer for far rows" : err;
        return false;
    }
    if (!take_place(n_streams * size.all, at_once && size.n_q == all.n_q)) { return false; }
    flush_rows();
    if (at_once) { return attend_kept(all, attn, n_streams, size); }
    kvq_attend_args a;
    kvq_far_args r;
    for (int t0 = 0; t0 < all.n_q; t0 += a.n_q) {
        if (!far_tokens(all, attn, n_streams, size, t0, a, r)) { return false; }
        const kvq_far_kept rows = keeps ? kept_of(r, attn, n_streams) : kvq_far_kept{};
        for (const int part : { 1, 2 }) {
            kvq_attend_args b = a;
            b.part = part;
            if (part == 2) {
                if (!kept || reads_picks(r, rows)) { kvq_launch_far_pick(r, n_streams, (cudaStream_t) stream); }
                if (kept) {
                    kvq_launch_far_hide(rows, n_streams, (cudaStream_t) stream);
                    read_kept(rows, b, n_streams);
                }
            } else {
                for (int s = 0; s < n_streams; s++) { b.stream[s].lse = nullptr; }
            }
            if (!kvq_decode_fits(b, n_streams)) {
                if (err.empty()) { err = "attention that fetches has no kernel for these pages"; }
                return false;
            }
            if (!split(b, n_streams, 0, true)) { return false; }
            if (part == 1) {
                r.n_splits = b.n_splits = std::min(b.n_splits, MOST_SPLITS);
                // one block each that picks, and room for these beside the blocks that make logits
                const int n_blocks = kvq_decode_row_blocks(b) * all.n_head_kv * n_streams,
                          n_pickers = all.n_head_kv * a.n_q * n_streams;
                r.warm_up = kvq_limits_of(ordinal).major >= 9 && a.n_logits <= FAR_CHUNK &&
                    b.n_splits * n_blocks + n_pickers <= b.occupancy * n_sm;
            }
            kvq_launch_decode_attention(b, n_streams, (cudaStream_t) stream);
        }
        if (keeps && t0 + a.n_q == all.n_q) { kvq_launch_far_keep(rows, n_streams, (cudaStream_t) stream); }
    }
    return check(cudaGetLastError(), "attention that fetches");
}

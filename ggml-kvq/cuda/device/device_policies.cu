// kvq_cuda_device, the part of methods that treat cells by the attention they get.
#include "device.h"

#include "cuda/policy/saliency.cuh"
#include "cuda/seal/seal.cuh"
#include "cuda/policy/select.cuh"
#include "types/mixed.h"

#include <algorithm>
#include <cstring>
#include <vector>

kvq_mixed_geometry kvq_mixed_get_geometry(const kvq_codec & c) {
    kvq_mixed_geometry g = {};
    if (c.type != KVQ_TYPE_MIXED) { return g; }
    const kvq_mixed_map m = kvq_mixed_offsets(c);
    for (int i = 0; i < 2; i++) {
        const kvq_codec part = kvq_mixed_part(c, i);
        g.codes[i] = (int) m.codes[i];
        g.params[i] = (int) m.params[i];
        if (part.n_cells) { g.part[i] = kvq_affine_get_geometry(part); }
    }
    g.channels = (int) m.channels;
    g.n_cells = c.n_cells;
    g.n_hi = c.n_hi;
    g.head_size = c.head_size;
    g.stride = (c.head_size + 15) / 16 * 16;
    g.role = c.role;
    g.nb_codes = (int) m.nb_codes;
    g.nb_params = (int) m.nb_params;
    return g;
}

// The host waits for what is sorted, but not for what else the device was given since attention: sorting has a stream
// of its own.
bool kvq_cuda_device::begin_side() {
    const bool alone = n_calls == n_calls_observed; // the inner backend's work, which does not touch scores, aside
    use();
    int least = 0, most = 0;
    if (!side &&
        (!check(cudaDeviceGetStreamPriorityRange(&least, &most), "cudaDeviceGetStreamPriorityRange") ||
            !check(cudaEventCreateWithFlags((cudaEvent_t *) &observed, cudaEventDisableTiming), "cudaEventCreate") ||
            !check(cudaStreamCreateWithPriority((cudaStream_t *) &side, cudaStreamNonBlocking, most),
                "cudaStreamCreate"))) {
        return false;
    }
    if (!alone) { check(cudaEventRecord((cudaEvent_t) observed, (cudaStream_t) stream), "cudaEventRecord"); }
    return check(cudaStreamWaitEvent((cudaStream_t) side, (cudaEvent_t) observed, 0), "cudaStreamWaitEvent");
}

void kvq_cuda_device::pack(
    const kvq_lane_layout & l, bool normalise, const kvq_pack_page * pages, int n, kvq_packed & out) {
    const size_t n_heads = (size_t) n * l.n_head, n_slots = n_heads * l.page_cells, nb_present = l.page_cells / 8;
    const size_t nb_jobs = n * sizeof(kvq_pack_job), nb_table = kvq_pad(nb_jobs + n_heads * nb_present, 16);
    out.sums.assign(n_heads, 0.0f);
    out.maps.assign(n_slots, -1);
    const size_t need = nb_table / 4 + kvq_pad(n_heads, 4) + 5 * n_slots;
    if (!n || (need > n_packing && !grow(packing, n_packing, need, "cells being sorted")) || !begin_side()) { return; }
    std::vector<uint8_t> table(nb_table);
    for (int i = 0; i < n; i++) {
        kvq_pack_job job = { pages[i].sums, pages[i].cell, pages[i].first, pages[i].n, pages[i].sorted, {} };
        if (job.sums) { memcpy(job.stale, pages[i].stale, nb_present); }
        memcpy(&table[i * sizeof(job)], &job, sizeof(job));
        memcpy(&table[nb_jobs + (size_t) i * l.n_head * nb_present], pages[i].present, l.n_head * nb_present);
    }
    const cudaStream_t on = (cudaStream_t) side;
    check(cudaMemcpyAsync(packing, table.data(), table.size(), cudaMemcpyHostToDevice, on), "cudaMemcpyAsync");
    kvq_pack_args a = {};
    a.jobs = (const kvq_pack_job *) packing;
    a.present = (const uint8_t *) packing + nb_jobs;
    a.sums = (float *) packing + nb_table / 4;
    a.maps = (int32_t *) a.sums + kvq_pad(n_heads, 4);
    a.slot_scores = (float *) a.maps + n_slots;
    a.scores = a.slot_scores + n_slots;
    a.keys = (uint32_t *) a.scores + n_slots;
    a.page_of = (int32_t *) a.keys + n_slots;
    a.n = n;
    a.n_head = l.n_head;
    a.page_cells = l.page_cells;
    a.normalise = normalise;
    kvq_launch_pack(a, on);
    check(cudaGetLastError(), "sorting kernel");
    std::vector<int32_t> both(kvq_pad(n_heads, 4) + n_slots); // in one transfer
    check(cudaMemcpyAsync(both.data(), a.sums, 4 * both.size(), cudaMemcpyDeviceToHost, on), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(on), "sorting kernel");
    memcpy(out.sums.data(), both.data(), 4 * n_heads);
    memcpy(out.maps.data(), both.data() + kvq_pad(n_heads, 4), 4 * n_slots);
    out.maps_there = a.maps;
    out.scores_there = a.slot_scores;
}

void kvq_cuda_device::gather(const kvq_lane_layout & l, int n, uint16_t * const * tiles, const int32_t * const * maps,
    const uint16_t * const * frames, int first, int n_frames) {
    use();
    std::vector<const void *> all(tiles, tiles + n);
    all.insert(all.end(), maps, maps + n);
    all.insert(all.end(), frames, frames + n_frames);
    if (!n || !grow(addresses, n_addresses, 2 * all.size(), "addresses of rows")) { return; }
    put(addresses, all.data(), 8 * all.size());
    const void * const * at = (const void * const *) addresses;
    const kvq_gather_args a = { (uint16_t * const *) at, (const int32_t * const *) (at + n),
        (const uint16_t * const *) (at + 2 * n), first, n_frames, l.page_cells, l.n_head * l.page_cells,
        (int) l.head_stride() };
    kvq_launch_gather(a, n, (cudaStream_t) stream);
    check(cudaGetLastError(), "gather kernel");
}

struct kvq_cuda_device::choice_batch {
    int n_head, page_cells, n_hi;
    bool normalise;
    std::vector<kvq_choose_job> jobs;
};

void kvq_cuda_device::choose_later(const kvq_lane_layout & l, bool normalise, const kvq_choose_job & job) {
    auto at = std::find_if(to_choose.begin(), to_choose.end(), [&](const auto & x) {
        return x->n_head == l.n_head && x->page_cells == l.page_cells && x->n_hi == l.codec.n_hi &&
            x->normalise == normalise;
    });
    if (at == to_choose.end()) {
        to_choose.emplace_back(new choice_batch{ l.n_head, l.page_cells, l.codec.n_hi, normalise, {} });
        at = to_choose.end() - 1;
    }
    (*at)->jobs.push_back(job);
}

// Waits, as the sealing by these choices does, and goes before it: keys and values of a layer then seal together.
void kvq_cuda_device::choose(const kvq_lane_layout & l, bool normalise, const kvq_choice * pages, int n) {
    n_calls++;
    for (int i = 0; i < n; i++) {
        kvq_choose_job job = { pages[i].sums, (uint8_t *) pages[i].params, (int) l.nb_params, false, {}, {} };
        memcpy(job.valid, pages[i].valid, l.page_cells / 8);
        if (pages[i].stale) { memcpy(job.stale, pages[i].stale, l.page_cells / 8); }
        choose_later(l, normalise, job);
    }
}

// A set that was not chosen here may have any size.
void kvq_cuda_device::mend_set(const kvq_lane_layout & l, uint8_t * params) {
    for (const auto & b : to_choose) {
        for (const kvq_choose_job & x : b->jobs) {
            if (x.params <= params && params < x.params + (size_t) b->n_head * x.nb_params) { return; }
        }
    }
    choose_later(l, false, { nullptr, params, (int) l.nb_params, true, {}, {} });
}

void kvq_cuda_device::flush_choices() {
    std::vector<std::shared_ptr<choice_batch>> batches;
    batches.swap(to_choose);
    for (const auto & b : batches) {
        for (size_t i = 0; i < b->jobs.size(); i += KVQ_CHOOSE_JOBS) {
            const int part = (int) std::min<size_t>(b->jobs.size() - i, KVQ_CHOOSE_JOBS);
            kvq_choose_jobs arg;
            std::copy_n(b->jobs.begin() + (long) i, part, arg.job);
            kvq_launch_choose(arg, part, b->n_head, b->page_cells, b->n_hi, b->normalise, (cudaStream_t) stream);
        }
    }
}

float * kvq_cuda_device::lse_of(size_t n) {
    use();
    return grow(lse, n_lse, n, "rows' log-sum-exp") ? lse : nullptr;
}

void kvq_cuda_device::observe(
    const kvq_attn & x, const kvq_probe_table * table, int max_rows, int max_pages, const void * keys) {
    use();
    kvq_score_args a = {};
    a.table = table;
    a.q = x.q;
    a.mask = (const __half *) x.mask;
    a.lse = x.lse;
    a.sinks = x.sinks;
    a.keys = (const uint16_t *) keys;
    a.q_stride_token = x.q_stride_token;
    a.q_stride_head = x.q_stride_head;
    a.mask_stride_token = x.mask_stride_token;
    a.mask_stride_head = x.mask_stride_head;
    const auto aligned = [&](int n) {
        return (x.mask_stride_token | x.mask_stride_head) % n == 0 && (uintptr_t) x.mask % (2 * (size_t) n) == 0;
    };
    a.mask_align = aligned(8) ? 8 : aligned(2) ? 2 : 1;
    a.n_head = x.n_head;
    a.n_head_kv = x.n_head_kv;
    a.gqa = x.n_head / x.n_head_kv;
    a.n_rows = max_rows * a.gqa;
    a.head_size = x.k.head_size;
    a.stride = (x.k.head_size + 15) / 16 * 16;
    a.page_cells = x.k.n_cells;
    a.map_stride = (int) x.map_stride;
    a.n_kv = x.n_kv;
    a.scale = x.scale;
    a.softcap = x.softcap;
    kvq_set_alibi(a, x.max_bias, x.n_head);
    if (keys) {
        const kvq_lse_shape shape = kvq_lse_shape_of(a.head_size, a.n_rows);
        const int blocks = std::max(1, shape.n_blocks * a.n_head_kv);
        a.n_splits = std::max(1, std::min({ n_sm * shape.at_once / blocks, x.n_kv / 256, 256 }));
        if (!grow(parts, n_parts, 2 * (size_t) a.n_splits * a.n_head_kv * a.n_rows, "parts of log-sum-exp")) { return; }
        a.partial = (float2 *) parts;
        kvq_launch_lse(a, (cudaStream_t) stream);
    }
    const int n_shares = now == EAGER ? kvq_score_shares(a, max_pages, 4 * n_sm) : 1;
    if (!grow(parts, n_parts, kvq_score_words(a, max_pages, n_shares), "parts of column sums")) { return; }
    a.partial = (float2 *) parts;
    kvq_launch_scores(a, max_pages, n_shares, (cudaStream_t) stream);
    check(cudaGetLastError(), "column sums kernel");
    if (observed && now != RECORD) {
        check(cudaEventRecord((cudaEvent_t) observed, (cudaStream_t) stream), "cudaEventRecord");
        n_calls_observed = n_calls;
    }
}

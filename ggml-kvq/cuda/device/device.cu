#include "device.h"
#include "base/settings.h"

#include "cuda/walk/seen.cuh"
#include "cuda/lattice.cuh"
#include "cuda/policy/predict.cuh"
#include "cuda/seal/seal.cuh"
#include "cuda/policy/select.cuh"
#include "types/lattice.h"
#include "types/mixed.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

static constexpr size_t TABLE_ROWS = 16384; // rows of one replayed step
static constexpr int NEW_ROWS = 8;          // that attention writes itself
// query rows of a KV head: above it pages are decoded once, into rows; a recorded step has no more
static constexpr int PROMPT_ROWS = 64;

struct kvq_cuda_device::row_job : kvq_row_job {
    const kvq_lane_layout * lane = nullptr;
};

static std::mutex live_mutex;
static std::vector<kvq_cuda_device *> live;

// ---------------------------------------------------------------- life

kvq_cuda_device::kvq_cuda_device(int ordinal) : ordinal(ordinal), kernels("cuda") {
    allow_short = kvq_setting_on(kvq_setting::CUDA_SHORT, true);
    allow_lists = kvq_setting_number(kvq_setting::CUDA_LISTS, 1);
    allow_means = kvq_setting_on(kvq_setting::CUDA_MEANS, true);
    may_observe = kvq_setting_on(kvq_setting::CUDA_OBSERVE, true);
    cudaDeviceProp p;
    if (check(cudaGetDeviceProperties(&p, ordinal), "cudaGetDeviceProperties")) {
        n_sm = p.multiProcessorCount;
        const kvq_device_limits limits = kvq_limits_of(ordinal);
        max_shared = limits.max_shared;
        max_shared_sm = limits.max_shared_sm;
        kernels = "cuda sm_" + std::to_string(p.major) + std::to_string(p.minor);
        if (limits.major != p.major || limits.minor != p.minor) {
            kernels += " as sm_" + std::to_string(limits.major) + std::to_string(limits.minor);
        }
    }
    std::lock_guard<std::mutex> lock(live_mutex);
    live.push_back(this);
}

kvq_cuda_device::~kvq_cuda_device() {
    {
        std::lock_guard<std::mutex> lock(live_mutex);
        live.erase(std::find(live.begin(), live.end(), this));
    }
    if (use()) {
        synchronize();
        cudaFree(slab);
        cudaFree(partial);
        cudaFree(tickets);
        for (seen_table & t : seen) { cudaFree(t.work); }
        cudaFree(points);
        cudaFree(expanded);
        cudaFree(row_table);
        cudaFree(row_positions);
        cudaFree(unfolded);
        cudaFree(predicted);
        for (auto & c : constants) { cudaFree(c.second); }
        for (auto & w : waves) { cudaFree(w.rows); }
        for (auto & r : rotaries) {
            cudaFree(r.high);
            cudaFree(r.low);
        }
        if (far_stream) {
            cudaStreamSynchronize((cudaStream_t) far_stream);
            cudaStreamDestroy((cudaStream_t) far_stream);
        }
        for (void * e : { far_ready, far_left, picks_asked, picks_there, half_there[0], half_there[1] }) {
            if (e) { cudaEventDestroy((cudaEvent_t) e); }
        }
        cudaFree(stage);
        cudaFree(far_sums);
        cudaFree(logits_memory);
        cudaFree(lse);
        cudaFree(parts);
        cudaFree(addresses);
        cudaFree(packing);
        if (side) {
            cudaStreamDestroy((cudaStream_t) side);
            cudaEventDestroy((cudaEvent_t) observed);
        }
    }
}

bool kvq_cuda_device::check(int status, const char * what) {
    if (status != cudaSuccess && err.empty()) {
        err = std::string(what) + " failed on CUDA device " + std::to_string(ordinal) + ": " +
            cudaGetErrorString((cudaError_t) status);
    }
    return status == cudaSuccess;
}

bool kvq_cuda_device::use() {
    const bool ok = check(cudaSetDevice(ordinal), "cudaSetDevice");
    n_calls++;
    if (waits()) { flush(); }
    return ok;
}

// Grows an array, zeroed; what it held is lost.
template <typename T> bool kvq_cuda_device::grow(T *& p, size_t & n, size_t need, const char * what) {
    if (need <= n) { return true; }
    n_moved++;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    // memory cannot be allocated during capture: this recording is given up, and the step, run at once, allocates it
    if (now == RECORD && cudaStreamIsCapturing((cudaStream_t) stream, &capture) == cudaSuccess &&
        capture != cudaStreamCaptureStatusNone) {
        wanted[&n] = need;
        return false;
    }
    need = std::max(need, wanted[&n]);
    synchronize();
    cudaFree(p);
    p = nullptr;
    n = 0;
    if (!check(cudaMalloc(&p, sizeof(T) * need), what)) { return false; }
    n = need;
    zero(p, sizeof(T) * need);
    return true;
}
template bool kvq_cuda_device::grow(float *&, size_t &, size_t, const char *);
template bool kvq_cuda_device::grow(uint32_t *&, size_t &, size_t, const char *);
template bool kvq_cuda_device::grow(uint8_t *&, size_t &, size_t, const char *);

static constexpr int N_SQUARES = KVQ_LATTICE_SQUARES * KVQ_LATTICE_SQUARES;

kvq_affine_geometry kvq_cuda_device::geometry(const kvq_codec & c) {
    kvq_affine_geometry g = kvq_affine_get_geometry(c);
    if (c.type != KVQ_TYPE_LATTICE) { return g; }
    constexpr int n = LATTICE_MAX_VALUES; // of each of the grids, by d and bits
    const int at = ((c.group == 8 ? 2 : c.group / 4) * 4 + c.bits - 1) * n;
    if (!points) {
        std::vector<float> all(3 * 4 * n + 2 * N_SQUARES, 0.0f);
        for (int d = 2, i = 0; d <= 8; d *= 2) {
            for (int bits = 1; bits <= 4; bits++, i += n) {
                const kvq_grid * grid = kvq_grid_find(d, bits);
                for (int j = 0; grid && j < grid->n * d; j++) {
                    all[(size_t) (i + j)] = (float) (grid->point[j] * grid->step) * (1.0f / 4096.0f);
                    if (d == 2) {
                        ((int8_t *) &all[(size_t) (i + KVQ_GRID_BYTES)])[j] = grid->point[j];
                        ((int8_t *) &all[(size_t) (i + KVQ_POINT_BYTES)])[j % 2 * 16 + j / 2 % 16] =
                            (int8_t) (KVQ_POINT_MIDDLE + grid->point[j]);
                    }
                }
            }
        }
        for (int bits = 3; bits <= 4; bits++) {
            memcpy(&all[(size_t) (3 * 4 * n + (bits - 3) * N_SQUARES)], kvq_lattice_squares(*kvq_grid_find(2, bits)),
                N_SQUARES * sizeof(int32_t));
        }
        if (!check(cudaMalloc(&points, all.size() * sizeof(float)), "cudaMalloc of grid points")) {
            points = nullptr;
            return g;
        }
        put(points, all.data(), all.size() * sizeof(float));
    }
    g.points = points + at;
    return g;
}

kvq_affine_geometry kvq_cuda_device::half_geometry(const kvq_codec & c, bool fast) {
    kvq_lattice_half halves[2];
    if (fast >= kvq_lattice_halves(c, halves)) { return {}; }
    kvq_affine_geometry g = kvq_split_get_geometry(c, fast);
    g.points = geometry(halves[fast].codec).points;
    return g;
}

const int32_t * kvq_cuda_device::squares(const kvq_codec & c) const {
    const bool tries = points && kvq_lattice_squares(*kvq_grid_find(c.group, c.bits)) != nullptr;
    return tries ? (const int32_t *) points + 3 * 4 * LATTICE_MAX_VALUES + (c.bits - 3) * N_SQUARES : nullptr;
}

void kvq_cuda_device::set_stream(void * s) {
    if (s != stream) {
        synchronize();
        stream = s;
    }
}

void kvq_cuda_device::synchronize() {
    use();
    check(cudaStreamSynchronize((cudaStream_t) stream), "cudaStreamSynchronize");
}

void kvq_cuda_device::forget_stream(void * s) {
    std::lock_guard<std::mutex> lock(live_mutex);
    for (kvq_cuda_device * d : live) {
        if (d->stream == s) { d->set_stream(nullptr); }
    }
}

// ---------------------------------------------------------------- pages

void kvq_cuda_device::put_address_later(void * to, const void * address) {
    for (far_call & x : coming) { // rows that are on their way have another place now
        for (const void * const * rows : { x.far.k_rows, x.far.v_rows }) {
            const ptrdiff_t page = (const void * const *) to - rows;
            if (page >= 0 && page < x.n_staged) { x.n_staged = (int) page; }
        }
    }
    to_set.emplace_back((uint64_t *) to, (uint64_t) (uintptr_t) address);
}

// keys and values of all cells as f16 while a prompt is read, and what blocks of attention leave each other
size_t kvq_cuda_device::bytes_workspace(const kvq_lane_layout & k, const kvq_lane_layout & v) const {
    const size_t width = (size_t) k.n_head * (k.codec.head_size + v.codec.head_size), n_rows = (size_t) n_sm * 2 * 128;
    // plain rows of a layer: of all cells, or of one stream's slots and open pages
    const size_t slots = (size_t) (k.n_store + std::min(k.n_frames + 2048 / k.page_cells, k.n_pages)) * k.page_cells;
    size_t nb = (k.evicts ? slots * (2 * width + 4 * (size_t) k.n_head) : 2 * width * k.n_cells * k.n_stream) +
        4 * n_rows * (v.codec.head_size + 4) + TABLE_ROWS * (sizeof(uint16_t *) + sizeof(int32_t));
    if (k.turned || k.centred) { // sealed pages leave something out: attention reads them as rows
        nb += (k.nb_frame + v.nb_frame + sizeof(kvq_page)) * k.n_pages * k.n_stream +
            KVQ_RESTING_TILES * std::max(k.nb_frame, v.nb_frame);
    }
    if (k.bytes_far) { // logits and scores of a token, and what is picked; a layer's far rows on their way
        nb += k.far_place == kvq_far_place::HOST ? k.bytes_far + v.bytes_far : 0;
        nb += (size_t) k.n_head * (k.n_pages + 8) * k.page_cells * k.n_stream * sizeof(float) * (1 + 8) + (8u << 20);
        nb += k.bytes_ahead ? NB_PLACES : 0;
    }
    nb += seen.size() * KVQ_SEEN_BLOCKS * ((size_t) k.n_pages + 1) * sizeof(int32_t);
    if (k.chained) { // predictions of a stripe
        for (const kvq_lane_layout * l : { &k, &v }) {
            const size_t channels = (size_t) l->n_head * l->codec.head_size;
            nb += sizeof(float) * channels * std::min(k.n_pages * k.page_cells, stripe_cells((int) channels));
        }
    }
    if (k.chained || k.codec.coords) { // attention in parts (device_fold.cu): logits, a chunk's sums of rows
        nb +=
            ((size_t) k.n_head * k.n_pages * k.page_cells * sizeof(float) * 8 + (1u << 20)) * k.n_stream + (16u << 20);
    }
    nb_promised = std::max(nb_promised, nb);
    return nb;
}

bool kvq_cuda_device::begin_step(step s, size_t n_rows) {
    use();
    if (n_rows > TABLE_ROWS / 2 ||
        (!row_table &&
            !check(cudaMalloc(&row_table, TABLE_ROWS * sizeof(*row_table)), "cudaMalloc of row addresses")) ||
        (!row_positions &&
            !check(cudaMalloc(&row_positions, TABLE_ROWS * sizeof(*row_positions)), "cudaMalloc of row positions"))) {
        return false;
    }
    refresh();
    picks_pending = half_pending[0] = half_pending[1] = false; // of a recording that was given up
    place = -1;
    now = s;
    rows_to.clear();
    rows_at.clear();
    return true;
}

void kvq_cuda_device::flush_rows() {
    if (held.empty()) { return; }
    kvq_row_jobs jobs = {};
    for (size_t i = 0; i < held.size(); i++) { jobs.job[i] = held[i]; }
    kvq_launch_row_jobs(jobs, (int) held.size(), (cudaStream_t) stream);
    check(cudaGetLastError(), "rows kernel");
    held.clear();
}

void kvq_cuda_device::end_step() {
    held.clear();
    now = EAGER;
    if (rows_to.empty()) { return; }
    if (rows_to.size() <= kvq_row_table::MOST) {
        use();
        kvq_row_table table;
        table.to = row_table;
        table.at = row_positions;
        table.n = (int) rows_to.size();
        table.n_at = (int) rows_at.size();
        std::copy(rows_to.begin(), rows_to.end(), table.row);
        std::copy(rows_at.begin(), rows_at.end(), table.position);
        kvq_launch_row_table(table, (cudaStream_t) stream);
        check(cudaGetLastError(), "kernel of row addresses");
    } else {
        put(row_table, rows_to.data(), rows_to.size() * sizeof(rows_to[0]));
        if (!rows_at.empty()) { put(row_positions, rows_at.data(), rows_at.size() * sizeof(rows_at[0])); }
    }
    refresh();
}

void kvq_cuda_device::write_rows(const kvq_lane_layout & l, int64_t n, uint16_t * const * to, const float * rows,
    size_t row_stride, const int32_t * pos, int) {
    if (now != EAGER) {
        if (now == RECORD) { // keys and values of a layer go together
            if (held.size() == KVQ_ROW_JOBS) { flush_rows(); }
            held.emplace_back();
            held.back().lane = &l;
            (kvq_row_job &) held.back() = { row_table + rows_to.size(), pos ? row_positions + rows_to.size() : nullptr,
                rows, row_stride, (size_t) l.page_cells * l.head_stride(), (int) n, l.n_head * l.codec.head_size,
                l.codec.head_size };
        }
        rows_to.insert(rows_to.end(), to, to + n);
        rows_to.push_back(nullptr); // a counter for the kernel that reads them
        if (pos) {
            rows_at.resize(rows_to.size(), -1);
            std::copy(pos, pos + n, rows_at.end() - n - 1);
        }
        return;
    }
    use();
    for (int64_t i = 0; i < n; i += KVQ_SEAL_ROWS) {
        const int part = (int) std::min<int64_t>(n - i, KVQ_SEAL_ROWS);
        kvq_seal_rows arg;
        memcpy(arg.to, to + i, part * sizeof(to[0]));
        const float * from = rows + i * row_stride;
        if (pos) {
            kvq_seal_positions at;
            memcpy(at.pos, pos + i, part * sizeof(pos[0]));
            kvq_launch_rows_with_positions(arg, at, part, l.n_head, l.codec.head_size,
                (size_t) l.page_cells * l.head_stride(), from, row_stride, (cudaStream_t) stream);
        } else {
            kvq_launch_rows(arg, part, l.n_head, l.codec.head_size, (size_t) l.page_cells * l.head_stride(), from,
                row_stride, (cudaStream_t) stream);
        }
    }
    check(cudaGetLastError(), "rows kernel");
}

// ---------------------------------------------------------------- attention

// rows of one layer's keys and values that decode attention can write itself
static bool rows_go_along(const kvq_row_job & k, const kvq_row_job & v) {
    bool ok = k.n == v.n && k.n <= NEW_ROWS;
    for (const kvq_row_job * j : { &k, &v }) {
        ok = ok && (uintptr_t) j->rows % 16 == 0 && (j->n == 1 || j->row_stride % 4 == 0);
    }
    return ok;
}

bool kvq_cuda_device::split(kvq_attend_args & a, int n_streams, int n_warps, bool few) {
    const int blocks =
        (few ? kvq_decode_row_blocks(a) : (a.n_rows + 16 * n_warps - 1) / (16 * n_warps)) * a.n_head_kv * n_streams;
    if (!a.is_short) {
        const int want = n_sm * (few ? a.occupancy : n_warps > 1 ? 3 : 10);
        a.n_splits = std::max(1,
            std::min(
                { want / std::max(blocks, 1), few ? kvq_decode_max_splits(a) : a.n_pages * a.page_cells / 32, 1024 }));
        const int most = few ? kvq_decode_max_splits(a) : 0;
        if (few && 4 * blocks > want) { // many blocks as they are: waves of them, filled well
            constexpr int EXTRA = 4;    // what a block costs beside its units of cells, in units
            int best = INT_MAX;
            for (int s = 1; s <= std::min(most, 16); s++) {
                const int cost = (blocks * s + want - 1) / want * ((most + s - 1) / s + EXTRA);
                if (cost < best) {
                    best = cost;
                    a.n_splits = s;
                }
            }
        }
        if (few && a.part > 1) { // some read far rows; where blocks are few, all start at once
            const int room = want / std::max(blocks, 1);
            a.n_picking = kvq_decode_picking(a, room);
            a.n_splits =
                (4 * blocks > want ? a.n_splits : std::max(1, std::min(a.n_splits, room - a.n_picking))) + a.n_picking;
        }
        // the last block reads them by 32 (decode_merge.cuh)
        if (few && a.wide && a.part && a.n_splits % 32 <= a.n_splits / 16) { a.n_splits -= a.n_splits % 32; }
    }
    a.n_open = few ? kvq_decode_open_parts(a) : 0;
    if (a.n_splits == 1) { return true; }
    const size_t n_tickets = few ? blocks : 0,
                 n = (size_t) n_streams * a.n_head_kv * a.n_rows * (a.n_splits + a.n_open) * (a.v.head_size + 4);
    if (!grow(partial, n_partial, n, "attention's partial results") ||
        !grow(tickets, this->n_tickets, n_tickets, "attention's tickets")) {
        return false;
    }
    a.partial = partial;
    a.tickets = tickets;
    return true;
}

void kvq_cuda_device::attend(
    const kvq_attn * attn, int n, const kvq_lane_layout * k, const kvq_lane_layout * v, const kvq_chain_pages * chain) {
    use();
    // kernels for split keys are for pages that lack their means
    const bool left_out = attn[0].rotary || attn[0].k_mean || attn[0].v_mean || chain || attn[0].k.split;
    const bool held_here = held.size() == 2 && held[0].lane == k && held[1].lane == v && n <= KVQ_ATTEND_STREAMS &&
        rows_go_along(held[0], held[1]);
    if (!held_here) { flush_rows(); }
    for (int i0 = 0, n_streams; i0 < n; i0 += n_streams) {
        const kvq_attn & f = attn[i0];
        const auto fetch_of = [&](int i) { return attn[i].far ? attn[i].far->fetch : KVQ_FETCH_OFF; };
        n_streams = 1; // and those behind it that fetch as it does
        while (n_streams < std::min(n - i0, KVQ_ATTEND_STREAMS) && fetch_of(i0 + n_streams) == fetch_of(i0)) {
            n_streams++;
        }
        kvq_attend_args a = {};
        kvq_codec codec_k = f.k, codec_v = f.v;
        a.k = geometry(codec_k);
        a.v = geometry(codec_v);
        if (f.k.split) { a.k_fast = half_geometry(f.k, true); }
        a.n_q = f.n_q;
        a.n_head = f.n_head;
        a.n_head_kv = f.n_head_kv;
        a.gqa = f.n_head / f.n_head_kv;
        a.n_rows = a.gqa * f.n_q;
        a.n_pages = f.n_pages;
        a.page_cells = f.k.n_cells;
        a.n_kv = f.n_kv;
        a.scale = f.scale;
        a.softcap = f.softcap;
        kvq_set_alibi(a, f.max_bias, f.n_head);
        a.q_stride_token = f.q_stride_token;
        a.q_stride_head = f.q_stride_head;
        a.mask_stride_token = f.mask_stride_token;
        a.mask_stride_head = f.mask_stride_head;
        a.dst_stride_token = f.dst_stride_token;
        a.dst_stride_head = f.dst_stride_head;
        a.sinks = f.sinks;
        a.one_team = one_team;
        a.max_shared = max_shared;
        a.max_shared_sm = max_shared_sm;
        a.map_stride = (int) f.map_stride;
        a.listed = may_list(f, n);
        a.list_few = allow_lists > 1;
        const bool mixed = f.k.type == KVQ_TYPE_MIXED;
        if (mixed) {
            a.km = kvq_mixed_get_geometry(f.k);
            a.vm = kvq_mixed_get_geometry(f.v);
        }
        for (int i = 0; i < n_streams; i++) {
            const kvq_attn & s = attn[i0 + i];
            a.stream[i] = { s.q, (const __half *) s.mask, s.dst, s.pages, s.lse, nullptr, nullptr, nullptr, nullptr };
        }
        const kvq_chain_pages * const below = chain ? chain + 2 * i0 : nullptr;
        if (below ? may_fold(a, attn + i0, below) : may_read_coords(a, attn + i0, n_streams)) {
            if (!attend_fold(a, attn + i0, n_streams, below)) { return; }
            continue;
        }
        // as f16 rows then
        if (left_out &&
            (chain || f.lse || f.k_basis || !kvq_decode_fits(a, n_streams) || !reads_sealed(attn + i0, n_streams, a) ||
                !kvq_decode_fits(a, n_streams))) {
            flush_rows();
            if (!unfold(attn + i0, n_streams, below)) { return; }
            codec_k.type = codec_v.type = KVQ_TYPE_F16;
            codec_k.bits = codec_v.bits = 16;
            a.k = geometry(codec_k);
            a.v = geometry(codec_v);
            for (int i = 0; i < n_streams; i++) {
                a.stream[i].pages = (const kvq_page *) (unfolded + i * unfolded_table);
            }
            a.waves = nullptr;
            a.in_order = 1;
        }
        if (f.far && f.far->fetch != KVQ_FETCH_OFF && f.far->fetch != KVQ_FETCH_ALL && f.far->top > 0 &&
            a.n_pages > 0) {
            if (!attend_far(a, attn + i0, n_streams, k)) { return; }
            continue;
        }
        // few rows: as many blocks as fit, all at once; else four warps of rows when there are so many, or one and
        // more splits
        const bool few = kvq_decode_fits(a, n_streams),
                   is_short = few && allow_short && !f.far && kvq_decode_short(a, n_streams, n_sm);
        const bool takes_rows = held_here && !held.empty() && a.k.type != KVQ_TYPE_MIXED &&
            (is_short || (few && !a.listed && a.n_rows <= PROMPT_ROWS && split(a, n_streams, 1, few) && a.n_open));
        if (takes_rows) {
            for (int i = 0; i < 2; i++) {
                a.fresh[i] = { held[i].to, held[i].rows, held[i].row_stride, held[i].head_stride, held[i].pos };
            }
            a.n_new = held[0].n;
            const float *first = f.dst, *last = first; // of the output
            for (int i = 0; i < n_streams; i++) {
                first = std::min(first, (const float *) attn[i].dst);
                last = std::max(last,
                    (const float *) attn[i].dst + (size_t) (a.n_q - 1) * a.dst_stride_token +
                        (size_t) (a.n_head - 1) * a.dst_stride_head + a.v.head_size);
            }
            for (const row_job & j : held) {
                if (is_short && j.rows < last && first < j.rows + (size_t) (j.n - 1) * j.row_stride + j.width) {
                    a.n_taken = (unsigned long long *) (held[0].to + held[0].n);
                    a.n_takers = a.n_new * a.n_head_kv * kvq_decode_row_blocks(a) << (a.wide ? a.slices_log2 : 0);
                }
            }
            held.clear();
        }
        flush_rows();
        if (!(few && a.listed) && (a.n_rows > PROMPT_ROWS || (f.far && f.far->fetch == KVQ_FETCH_ALL)) && !a.waves &&
            attend_rows(a, codec_k, codec_v, attn + i0, n_streams)) {
            continue;
        }
        if (f.far && f.far->fetch == KVQ_FETCH_ALL) {
            err = err.empty() ? "attention over all far rows has no kernel for these heads: set prompt=near" : err;
            return;
        }
        const int n_warps = a.n_rows > 16 ? 4 : 1;
        if (!(few && a.listed ? list_pages(a) : split(a, n_streams, n_warps, few))) { return; }
        n_short += is_short;
        n_decode += few;
        n_means += a.waves != nullptr;
        n_fine += few && a.fine;
        n_opens += few && a.n_open;
        if (few) {
            kvq_launch_decode_attention(a, n_streams, (cudaStream_t) stream);
        } else {
            (mixed ? kvq_launch_tiles_mixed : kvq_launch_tiles)(a, n_streams, n_warps, (cudaStream_t) stream);
        }
        if (a.n_splits > 1 && !few) { kvq_launch_merge(a, n_streams, (cudaStream_t) stream); }
    }
    check(cudaGetLastError(), "attention kernel");
}

void kvq_cuda_device::predict(const kvq_predictor & w, int n, const int8_t * x, size_t x_stride, const float * s,
    bool add, float * out, size_t out_stride) {
    use();
    const uint8_t * const weights = weights_of(w);
    if (!weights) { return; }
    const kvq_predict_args a = { weights, w.n_in, w.n_out, n, x, s, x_stride, out_stride, out, add };
    if (w.bits == 8) {
        kvq_launch_predict8(a, n_sm, (cudaStream_t) stream);
    } else {
        kvq_launch_predict4(a, (cudaStream_t) stream);
    }
    check(cudaGetLastError(), "predictor kernel");
}

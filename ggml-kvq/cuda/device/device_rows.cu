// Rows that the host holds, and the device's part of aqua: rows as they are sealed and back, and predicted layers
// (policy/transform.h, policy/chain.h).
#include "device.h"

#include "cuda/walk/attend.cuh"
#include "cuda/policy/predict.cuh"
#include "cuda/seal/seal.cuh"
#include "base/f16.h"
#include "base/parallel.h"
#include "types/lattice.h"

#include <algorithm>
#include <cstring>

// ---------------------------------------------------------------- rows of the host

// Pages that come whole go as the tiles that they are there; fewer rows go as others do.
bool kvq_cuda_device::enter_rows(
    const kvq_lane_layout & l, int64_t n, uint16_t * const * to, const uint16_t * rows, int n_threads) {
    const size_t D = (size_t) l.codec.head_size, stride = (size_t) l.head_stride(), pc = (size_t) l.page_cells,
                 n_head = (size_t) l.n_head, tile = n_head * pc * stride;
    if (n % l.page_cells) { return false; }
    for (size_t i = 0; i < (size_t) n; i++) {
        if (to[i] != to[i / pc * pc] + i % pc * stride) { return false; }
    }
    entering.resize((size_t) n / pc * tile);
    const auto gather = [&](int64_t i) { // one head of a page
        const size_t page = (size_t) i / n_head, h = (size_t) i % n_head;
        for (size_t t = 0; t < pc; t++) {
            memcpy(&entering[page * tile + (h * pc + t) * stride], rows + ((page * pc + t) * n_head + h) * D, 2 * D);
        }
    };
    kvq_parallel_for(n / l.page_cells * l.n_head, n_threads, gather);
    std::vector<kvq_copy_job> jobs;
    for (size_t page = 0; page < (size_t) n / pc; page++) {
        jobs.push_back({ to[page * pc], &entering[page * tile], 2 * tile });
    }
    put_all(jobs.data(), jobs.size(), n_threads);
    return true;
}

// ---------------------------------------------------------------- what sealed rows leave out

const void * kvq_cuda_device::constant(const void * host, size_t nb) {
    const auto at = constants.find(host);
    return at != constants.end() ? at->second : keep(host, host, nb);
}

void * kvq_cuda_device::keep(const void * name, const void * host, size_t nb) {
    void * p = nullptr;
    if (host && check(cudaMalloc(&p, nb), "cudaMalloc of calibrated data")) {
        put(p, host, nb);
        constants[name] = p;
    }
    return p;
}

const uint8_t * kvq_cuda_device::weights_of(const kvq_predictor & w) {
    const size_t nb = kvq_predictor_bytes(w.n_in, w.n_out, w.bits);
    if (w.bits == 4 || constants.count(w.data)) { return (const uint8_t *) constant(w.data, nb); }
    return (const uint8_t *) keep(w.data, kvq_order_weights8(w).data(), nb);
}

const float * kvq_cuda_device::mean_of(const float * host, size_t n) {
    return (const float *) constant(host, n * sizeof(float));
}

kvq_device_order kvq_cuda_device::order_of(const kvq_order * host, size_t n, bool back) {
    if (!host) { return {}; }
    return { (const uint16_t *) constant(host->channel, n * sizeof(uint16_t)),
        mean_of(back ? host->back : host->gain, n) };
}

kvq_device_basis kvq_cuda_device::basis_of(const kvq_basis * host, const kvq_codec & keys) {
    if (!host) { return {}; }
    return { host->n, host->width, keys.coords / 2, keys.n_cells, kvq_lattice_nb_params(keys),
        kvq_lattice_coords_at(keys),
        (const int8_t *) constant(host->out, (size_t) (host->n + 3) / 4 * 4 * (size_t) host->width),
        mean_of(host->step, (size_t) host->width) };
}

kvq_device_rotary kvq_cuda_device::rotary(const kvq_rotary * host) {
    if (!host) { return {}; }
    size_t i = 0;
    while (i < rotaries.size() && rotaries[i].host != host) { i++; }
    if (i == rotaries.size()) {
        rotaries.push_back({ host, nullptr, nullptr, 0, 0 });
        const size_t nb = (size_t) host->n_dims * KVQ_ROTARY_LOW * sizeof(float);
        if (check(cudaMalloc(&rotaries[i].low, nb), "cudaMalloc of rotary embedding")) {
            put(rotaries[i].low, host->low, nb);
        }
    }
    refresh();
    return { host->n_dims / 2, host->neox, rotaries[i].high, rotaries[i].low };
}

void kvq_cuda_device::refresh() {
    for (rotary_copy & r : rotaries) {
        const size_t row = (size_t) r.host->n_dims;
        // no transfers in a recording: it counts as void, and the step runs node by node
        if (now == RECORD && r.host->n_high > r.n_high) {
            n_moved++;
            return;
        }
        if (r.host->n_high > r.capacity) {
            synchronize();
            cudaFree(r.high);
            r.high = nullptr;
            r.n_high = 0;
            r.capacity = std::max(2 * r.host->n_high, 256);
            n_moved++;
            if (!check(cudaMalloc(&r.high, r.capacity * row * sizeof(float)), "cudaMalloc of rotary embedding")) {
                r.capacity = 0;
                return;
            }
        }
        if (r.host->n_high > r.n_high) {
            put(r.high + r.n_high * row, r.host->high + r.n_high * row,
                (r.host->n_high - r.n_high) * row * sizeof(float));
            r.n_high = r.host->n_high;
        }
    }
}

struct kvq_cuda_device::turn_batch {
    kvq_turn_args shape; // no jobs
    int n_head;
    std::vector<kvq_turn_job> jobs;
};

kvq_turn_args kvq_cuda_device::turn_shape(const kvq_lane_layout & l, const kvq_row_transform & x) {
    kvq_turn_args a = {};
    a.head_size = l.codec.head_size;
    a.stride = l.head_stride();
    a.n_cells = l.page_cells;
    a.rotary = rotary(x.rotary);
    a.pred_stride = x.pred_stride;
    if (x.basis) { a.basis = basis_of(x.basis, *x.keys); }
    return a;
}

struct kvq_cuda_device::coord_batch {
    kvq_coord_args shape; // no jobs
    std::vector<kvq_coord_job> jobs;
};

// Waits, and goes before what reads these coordinates: take_out of the same keys, and of their values.
void kvq_cuda_device::take_coords(
    const kvq_lane_layout & l, int n, const uint16_t * const * tiles, const kvq_row_transform * x, int) {
    const size_t width = (size_t) l.n_head * l.codec.head_size;
    kvq_coord_args shape = {};
    shape.n_head = l.n_head;
    shape.head_size = l.codec.head_size;
    shape.stride = l.head_stride();
    shape.n_cells = l.page_cells;
    shape.rotary = rotary(x[0].rotary);
    shape.basis = basis_of(x[0].basis, l.codec);
    shape.in = mean_of(x[0].basis->in, (size_t) x[0].basis->n * width);
    shape.mean = mean_of(x[0].mean, width);
    for (int i = 0; i < n; i++) {
        if (to_write.count(tiles[i]) || to_say.count(x[i].coords)) {
            flush();
            break;
        }
    }
    auto at = std::find_if(to_take.begin(), to_take.end(),
        [&](const auto & b) { return !memcmp(&b->shape, &shape, offsetof(kvq_coord_args, job)); });
    if (at == to_take.end()) {
        to_take.emplace_back(new coord_batch{ shape, {} });
        at = to_take.end() - 1;
    }
    for (int i = 0; i < n; i++) {
        (*at)->jobs.push_back({ tiles[i], x[i].positions, x[i].coords });
        to_read.insert(tiles[i]);
    }
}

void kvq_cuda_device::flush_coords() {
    std::vector<std::shared_ptr<coord_batch>> batches;
    batches.swap(to_take);
    for (const auto & b : batches) {
        for (size_t i = 0; i < b->jobs.size(); i += KVQ_COORD_JOBS) {
            const int part = (int) std::min<size_t>(b->jobs.size() - i, KVQ_COORD_JOBS);
            kvq_coord_args a = b->shape;
            std::copy_n(b->jobs.begin() + (long) i, part, a.job);
            kvq_launch_take_coords(a, part, (cudaStream_t) stream);
        }
    }
    to_say.clear();
}

// Waits, as the sealing of these rows does, and goes before it.
void kvq_cuda_device::take_out(const kvq_lane_layout & l, int n, const uint16_t * const * tiles, uint16_t * const * out,
    const kvq_row_transform * x, int) {
    const float * const mean = mean_of(x[0].mean, (size_t) l.n_head * l.codec.head_size);
    const kvq_device_order order = order_of(x[0].order, (size_t) l.n_head * l.codec.head_size, false);
    int of = 0; // a page with coordinates, where there is one
    while (of + 1 < n && !x[of].basis) { of++; }
    const kvq_turn_args shape = turn_shape(l, x[of]);
    // These go before all else that waits: a tile that was given back may still have to be read, and one that is read
    // here may still have to be written.
    const auto writes = [&](const uint16_t * p) { return to_write.count(p) > 0; };
    const auto uses = [&](const uint16_t * p) { return writes(p) || to_read.count(p) > 0; };
    if (std::any_of(out, out + n, uses) || std::any_of(tiles, tiles + n, writes)) { flush(); }
    auto at = std::find_if(to_turn.begin(), to_turn.end(), [&](const auto & b) {
        return b->n_head == l.n_head && !memcmp(&b->shape, &shape, offsetof(kvq_turn_args, job));
    });
    if (at == to_turn.end()) {
        to_turn.emplace_back(new turn_batch{ shape, l.n_head, {} });
        at = to_turn.end() - 1;
    }
    for (int i = 0; i < n; i++) {
        (*at)->jobs.push_back({ tiles[i], out[i], x[i].positions, x[i].sealed, mean, x[i].pred, order, x[i].coords });
        if (x[i].coords) { to_say.insert(x[i].coords); }
        to_read.insert(tiles[i]);
        to_write.insert(out[i]);
    }
}

void kvq_cuda_device::flush_turns() {
    std::vector<std::shared_ptr<turn_batch>> batches;
    batches.swap(to_turn);
    for (const auto & b : batches) {
        for (size_t i = 0; i < b->jobs.size(); i += KVQ_TURN_JOBS) {
            const int part = (int) std::min<size_t>(b->jobs.size() - i, KVQ_TURN_JOBS);
            kvq_turn_args a = b->shape;
            std::copy_n(b->jobs.begin() + (long) i, part, a.job);
            kvq_launch_turn(a, part, b->n_head, false, (cudaStream_t) stream);
        }
    }
}

void kvq_cuda_device::put_back(const kvq_lane_layout & l, uint16_t * tile, const kvq_row_transform & x) {
    use();
    kvq_turn_args a = turn_shape(l, x);
    const size_t width = (size_t) l.n_head * l.codec.head_size;
    a.job[0] = { tile, tile, x.positions, x.sealed, mean_of(x.mean, width), x.pred, order_of(x.order, width, true),
        x.coords };
    kvq_launch_turn(a, 1, l.n_head, true, (cudaStream_t) stream);
    check(cudaGetLastError(), "kernel of sealed rows");
}

kvq_turn kvq_cuda_device::turn(const kvq_attn & a, bool value) {
    const kvq_codec & c = value ? a.v : a.k;
    kvq_turn t = {};
    t.mean = mean_of(value ? a.v_mean : a.k_mean, (size_t) a.n_head_kv * c.head_size);
    if (!value) {
        t.rotary = rotary(a.rotary);
        t.positions = a.positions;
        t.sealed = a.sealed;
        t.back = order_of(a.k_order, (size_t) a.n_head_kv * c.head_size, true);
    }
    t.basis = basis_of(value ? a.v_basis : a.k_basis, a.k);
    return t;
}

// The rows of positions 0 .. 63 by pairs, as attention in 8-bit products has them (decode_bytes_means.cuh): 2 channels
// of one row, 2 of the next, and so on; 8 numbers between pairs.
static void kvq_put_wave_pairs(const uint16_t * rows, int head_size, uint16_t * out) {
    for (int d = 0; d < 64; d++) {
        uint16_t * const pair = out + (size_t) (d / 2) * (2 * head_size + 8);
        for (int c = 0; c < head_size; c++) { pair[c / 2 * 4 + d % 2 * 2 + c % 2] = rows[(size_t) d * head_size + c]; }
    }
}

const uint16_t * kvq_cuda_device::waves_of(const kvq_rotary * host, int head_size) {
    for (const wave_table & w : waves) {
        if (w.host == host && w.head_size == head_size) { return w.rows; }
    }
    const int n = host->n_dims / 2;
    const size_t n_rows = (size_t) 128 * head_size, n_pairs = (size_t) 32 * (2 * head_size + 8);
    std::vector<uint16_t> rows(n_rows + n_pairs);
    for (int d = 0; d < 128; d++) {
        for (int i = 0; i < head_size / 2; i++) {
            const float * x = host->low + (size_t) i * 2 * KVQ_ROTARY_LOW;
            double c = 1.0, s = 0.0;
            if (i < n) {
                c = x[d % 64];
                s = x[KVQ_ROTARY_LOW + d % 64];
            }
            if (i < n && d >= 64) {
                const double c64 = x[64], s64 = x[KVQ_ROTARY_LOW + 64], y = c * c64 - s * s64;
                s = s * c64 + c * s64;
                c = y;
            }
            rows[(size_t) d * head_size + 2 * i] = kvq_f32_to_f16((float) c);
            rows[(size_t) d * head_size + 2 * i + 1] = kvq_f32_to_f16((float) s);
        }
    }
    kvq_put_wave_pairs(rows.data(), head_size, rows.data() + n_rows);
    wave_table w = { host, head_size, nullptr };
    if (!check(cudaMalloc(&w.rows, 2 * rows.size()), "cudaMalloc of rotary embedding")) { return nullptr; }
    put(w.rows, rows.data(), 2 * rows.size());
    waves.push_back(w);
    return w.rows;
}

bool kvq_cuda_device::reads_sealed(const kvq_attn * attn, int n, kvq_attend_args & a) {
    const kvq_attn & f = attn[0];
    for (int i = 0; i < n; i++) {
        if (!allow_means || !(attn[i].flags & KVQ_ATTN_STAYED)) { return false; }
        a.stream[i].positions = attn[i].positions;
    }
    if (!f.k_mean && !f.v_mean) { // keys as they are
        return !f.k.split && !f.k_order;
    }
    if (!f.k_mean || !f.v_mean || !f.rotary || !kvq_decode_means(a)) { return false; }
    const kvq_device_rotary r = rotary(f.rotary);
    a.k_mean = mean_of(f.k_mean, (size_t) f.n_head_kv * f.k.head_size);
    a.v_mean = mean_of(f.v_mean, (size_t) f.n_head_kv * f.v.head_size);
    const kvq_device_order order = order_of(f.k_order, (size_t) f.n_head_kv * f.k.head_size, true);
    a.sorted = { f.k.split ? order.channel : nullptr, order.gain };
    a.waves = waves_of(f.rotary, f.k.head_size);
    a.rotary_high = r.high;
    a.rotary_low = r.low;
    a.n_pairs = r.n;
    a.neox = r.neox;
    return a.k_mean && a.v_mean && a.waves;
}

bool kvq_cuda_device::unfold(const kvq_attn * attn, int n, const kvq_chain_pages * chain) {
    const kvq_attn & f = attn[0];
    kvq_unfold_args a = {};
    a.g[0] = geometry(f.k);
    a.g[1] = geometry(f.v);
    const size_t table = (f.n_pages * sizeof(kvq_page) + 255) / 256 * 256;
    size_t tiles[2];
    for (int v = 0; v < 2; v++) { tiles[v] = 2 * (size_t) f.n_pages * f.n_head_kv * a.g[v].n_cells * a.g[v].stride; }
    if (!grow(unfolded, nb_unfolded, n * (table + tiles[0] + tiles[1]), "a layer's rows")) { return false; }
    unfolded_table = table;
    for (int i = 0; i < n; i++) {
        uint8_t * rows = unfolded + n * table + i * (tiles[0] + tiles[1]);
        a.turn[0] = turn(attn[i], false);
        a.turn[1] = turn(attn[i], true);
        a.pages = attn[i].pages;
        a.table = (kvq_page *) (unfolded + i * table);
        a.tiles[0] = (uint16_t *) rows;
        a.tiles[1] = (uint16_t *) (rows + tiles[0]);
        if (f.k.split) { // no layer predicts them
            kvq_launch_unfold_split(a, half_geometry(f.k, true), f.n_pages, f.n_head_kv, (cudaStream_t) stream);
            kvq_launch_unfold(a, 1, 1, f.n_pages, f.n_head_kv, (cudaStream_t) stream);
            continue;
        }
        if (!chain) {
            kvq_launch_unfold(a, 0, 2, f.n_pages, f.n_head_kv, (cudaStream_t) stream);
            continue;
        }
        for (int v = 0; v < 2; v++) { // values may follow from the keys of their layer
            if (chain[2 * i + v].l) {
                run_chain(chain[2 * i + v], a.table, a.tiles[v]);
            } else {
                kvq_launch_unfold(a, v, 1, f.n_pages, f.n_head_kv, (cudaStream_t) stream);
            }
        }
    }
    return check(cudaGetLastError(), "unfolding kernel");
}

// ---------------------------------------------------------------- predicted layers

void kvq_cuda_device::chain_predict(const kvq_chain_pages & c, float * out) {
    use();
    for (int j = 0; j < 2 && c.from[j].bits; j++) {
        predict(c.from[j], c.n * c.l->page_cells, c.in[j].row, c.in[j].stride, c.in[j].scale, j > 0, out, c.stride);
    }
}

// Cells whose predictions exist at once: as many as all multiprocessors predict at a time, so that predictions of
// 17 MB on the largest devices are still in the second level of the cache when they are read.
int kvq_cuda_device::stripe_cells(int width) const {
    return std::max(2 * n_sm / ((width + KVQ_PREDICT_TILE - 1) / KVQ_PREDICT_TILE), 1) * KVQ_PREDICT_TILE;
}

// Predictions of some pages at a time, and from them the pages' rows.
void kvq_cuda_device::run_chain(const kvq_chain_pages & c, kvq_page * table, uint16_t * tiles, bool whole) {
    if (!c.n) { return; }
    use();
    const kvq_lane_layout & l = *c.l;
    const int most = std::max(1, stripe_cells(l.n_head * l.codec.head_size) / l.page_cells),
              stripe = (c.n + (c.n + most - 1) / most - 1) / ((c.n + most - 1) / most); // all stripes alike
    if (c.from[0].bits &&
        !grow(predicted, nb_predicted, (size_t) stripe * l.page_cells * c.stride * sizeof(float), "predictions")) {
        return;
    }
    const int width = l.n_head * l.codec.head_size;
    kvq_chain_args a = { geometry(l.codec),
        { mean_of(c.turn.mean, (size_t) width), rotary(c.turn.rotary), c.turn.positions, nullptr }, c.pages, l.n_head,
        width, c.from[0].bits ? (const float *) predicted : nullptr, c.stride, nullptr, nullptr, c.out.stride, table,
        tiles, whole };
    for (int p = 0; p < c.n; p += stripe) {
        kvq_chain_pages some = c;
        some.n = std::min(stripe, c.n - p);
        const size_t first = (size_t) p * l.page_cells;
        for (kvq_rows8 & x : some.in) { x = x.from(first); }
        some.out = c.out.from(first);
        chain_predict(some, (float *) predicted);
        a.pages = c.pages + p;
        a.row = some.out.row;
        a.scale = some.out.scale;
        a.table = table ? table + p : nullptr;
        a.tiles = tiles ? tiles + (size_t) p * l.nb_frame / 2 : nullptr;
        kvq_launch_chain(a, some.n, (cudaStream_t) stream);
    }
    check(cudaGetLastError(), "kernel of predicted rows");
}

void kvq_cuda_device::chain_step(const kvq_chain_pages & c) { run_chain(c, nullptr, nullptr); }

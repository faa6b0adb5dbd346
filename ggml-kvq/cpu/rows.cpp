// Rows of a page less what its block leaves out, and back (policy/transform.h has the formula).
#include "base/parallel.h"
#include "engine/host.h"
#include "engine/tags.h"
#include "kernels.h"
#include "types/lattice.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace {

constexpr int GROUP = 16; // cells that a kernel works on

// sealed where it is now: its rotary embedding stays in the block
bool stays_at(const kvq_row_transform & x, int t) { return x.rotary && x.sealed && x.sealed[t] == x.positions[t]; }

// Where the angles of some cells begin, made at the end of `to`
int angles_of(const kvq_row_transform & x, const int32_t * pos, bool inverse, std::vector<float> & to) {
    const size_t at = to.size();
    to.resize(at + (size_t) GROUP * (size_t) x.rotary->n_dims);
    kvq_get_kernels().turn_table(*x.rotary, pos, inverse, &to[at]);
    return (int) at;
}

void rows_of_head(
    const kvq_lane_layout & l, int h, const kvq_row_transform & x, bool back, uint16_t * rows, int stride) {
    kvq_row_turns own;
    if (!x.turns) { kvq_cpu_turns(l, x, back, own); }
    const kvq_row_turns & turns = x.turns ? *x.turns : own;
    const kvq_kernels & K = kvq_get_kernels();
    const size_t D = (size_t) l.codec.head_size, head = (size_t) h * D;
    kvq_row_turn a = {};
    a.head_size = (int) D;
    a.n_dims = x.rotary ? x.rotary->n_dims : 0;
    a.neox = x.rotary && x.rotary->neox;
    a.mean = x.mean ? x.mean + head : nullptr;
    a.pred_stride = x.pred_stride;
    if (x.order) {
        a.channel = x.order->channel + head;
        a.gain = (back ? x.order->back : x.order->gain) + head;
    }
    const auto run = [&](const kvq_row_turns::group & g, uint16_t * at, int apart) {
        const auto table = [&](int from) { return from < 0 ? nullptr : &turns.angles[(size_t) from]; };
        a.before = table(g.before);
        a.of_mean = table(g.of_mean);
        a.behind = table(g.behind);
        K.turn_rows(a, back, at, apart);
    };
    uint16_t copy[GROUP * KVQ_MAX_HEAD];
    for (int t0 = 0; t0 < l.page_cells; t0 += GROUP) {
        uint16_t * const at = rows + (size_t) t0 * (size_t) stride;
        a.pred = x.pred ? x.pred + (size_t) t0 * x.pred_stride + head : nullptr;
        const uint8_t * stays = &turns.stays[(size_t) t0];
        const auto n = std::count(stays, stays + GROUP, 1);
        const size_t group = (size_t) (t0 / GROUP);
        if (n == 0 || n == GROUP) {
            run((n ? turns.staying : turns.moving)[group], at, stride);
            continue;
        }
        for (int t = 0; t < GROUP; t++) { memcpy(copy + (size_t) t * D, at + (size_t) t * (size_t) stride, 2 * D); }
        run(turns.staying[group], at, stride);
        run(turns.moving[group], copy, (int) D);
        for (int t = 0; t < GROUP; t++) {
            if (!stays[t]) { memcpy(at + (size_t) t * (size_t) stride, copy + (size_t) t * D, 2 * D); }
        }
    }
}

// What the coordinates of a page say, in the place of predictions
struct said_rows {
    std::vector<float> rows;
    void take(const kvq_lane_layout & l, kvq_row_transform & x) {
        if (!x.basis) { return; }
        rows.resize((size_t) l.page_cells * (size_t) x.basis->width);
        const kvq_coord_pairs<const uint8_t> pairs =
            kvq_coords_in(*x.keys, kvq_lattice_nb_params(*x.keys), (const uint8_t *) x.coords);
        kvq_basis_decode(*x.basis, pairs, rows.data());
        x.pred = rows.data();
        x.pred_stride = (size_t) x.basis->width;
    }
};

} // namespace

void kvq_cpu_turns(const kvq_lane_layout & l, const kvq_row_transform & x, bool back, kvq_row_turns & out) {
    const size_t n = (size_t) l.page_cells;
    const auto is = [&](const std::vector<int32_t> & held, const int32_t * now) {
        return now ? held.size() == n && std::equal(held.begin(), held.end(), now) : held.empty();
    };
    const bool all_stay = out.now == out.was; // then both ways take the same ones
    if (x.rotary && out.rotary == x.rotary && out.of_mean == !!x.mean && (out.back == back || all_stay) &&
        is(out.now, x.positions) && is(out.was, x.sealed)) {
        return;
    }
    out.rotary = x.rotary;
    out.of_mean = x.mean;
    out.back = back;
    out.now.assign(x.positions, x.positions + (x.rotary ? n : 0));
    out.was.assign(x.sealed, x.sealed + (x.rotary && x.sealed ? n : 0));
    out.stays.assign(n, 0);
    out.staying.assign(n / GROUP, {});
    out.moving.assign(n / GROUP, {});
    out.angles.clear();
    for (size_t t = 0; t < n; t++) { out.stays[t] = stays_at(x, (int) t); }
    for (size_t t = 0; x.rotary && t < n; t += GROUP) {
        const int32_t *now = x.positions + t, *was = x.sealed ? x.sealed + t : nullptr;
        const auto stays = std::count(&out.stays[t], &out.stays[t] + GROUP, 1);
        kvq_row_turns::group &here = out.staying[t / GROUP], &elsewhere = out.moving[t / GROUP];
        if (stays > 0 && x.mean) { here.of_mean = angles_of(x, now, false, out.angles); }
        if (stays == GROUP) { continue; }
        if (!back || was) { elsewhere.before = angles_of(x, back ? was : now, true, out.angles); }
        if (back || was) { elsewhere.behind = angles_of(x, back ? now : was, false, out.angles); }
    }
}

void kvq_cpu_take_out_rows(const kvq_lane_layout & l, int h, const kvq_row_transform & x, uint16_t * rows, int stride) {
    rows_of_head(l, h, x, false, rows, stride);
}

void kvq_cpu_put_back_rows(const kvq_lane_layout & l, int h, const kvq_row_transform & x, uint16_t * rows, int stride) {
    rows_of_head(l, h, x, true, rows, stride);
}

void kvq_cpu_take_out(const kvq_lane_layout & l, int n, const uint16_t * const * tiles, uint16_t * const * out,
    const kvq_row_transform * x, int n_threads) {
    kvq_parallel_for(n, n_threads, [&](int64_t i) {
        kvq_row_turns turns;
        said_rows said;
        kvq_row_transform of = x[i];
        kvq_cpu_turns(l, of, false, turns);
        of.turns = &turns;
        said.take(l, of);
        memcpy(out[i], tiles[i], l.nb_frame);
        for (int h = 0; h < l.n_head; h++) {
            rows_of_head(l, h, of, false, out[i] + h * l.nb_tile_head / 2, l.head_stride());
        }
    });
}

void kvq_cpu_take_coords(
    const kvq_lane_layout & l, int n, const uint16_t * const * tiles, const kvq_row_transform * x, int n_threads) {
    kvq_parallel_for(n, n_threads, [&](int64_t i) {
        const kvq_basis & b = *x[i].basis;
        const size_t D = (size_t) l.codec.head_size, cells = (size_t) l.page_cells, width = (size_t) b.width;
        kvq_row_transform of = { x[i].mean, x[i].rotary, x[i].positions };
        kvq_row_turns turns;
        kvq_cpu_turns(l, of, false, turns);
        of.turns = &turns;
        std::vector<uint16_t> tile(tiles[i], tiles[i] + l.nb_frame / 2);
        std::vector<float> rows(cells * width);
        for (int h = 0; h < l.n_head; h++) {
            uint16_t * const head = &tile[(size_t) h * l.nb_tile_head / 2];
            rows_of_head(l, h, of, false, head, l.head_stride());
            for (size_t t = 0; t < cells; t++) {
                kvq_cpu_f16_to_f32(head + t * (size_t) l.head_stride(), &rows[t * width + (size_t) h * D], (int64_t) D);
            }
        }
        kvq_basis_encode(b, kvq_coords_in(l.codec, l.nb_params, x[i].coords), rows.data());
    });
}

void kvq_cpu_put_back(const kvq_lane_layout & l, uint16_t * tile, const kvq_row_transform & x) {
    const size_t stride = (size_t) l.head_stride(), head = l.nb_tile_head / 2;
    kvq_row_turns turns;
    said_rows said;
    kvq_row_transform of = x;
    kvq_cpu_turns(l, of, true, turns);
    of.turns = &turns;
    said.take(l, of);
    for (int h = 0; h < l.n_head; h++) { rows_of_head(l, h, of, true, tile + h * head, (int) stride); }
    for (int t = 0; x.rotary && t < l.page_cells; t++) { kvq_tag_put(l, tile + t * stride, head, x.positions[t]); }
}

// Rows of a page less what its block leaves out, and back (policy/transform.h has the formula).
#include "base/parallel.h"
#include "engine/host.h"
#include "engine/rope.h"
#include "engine/tags.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace {

void turn(const kvq_row_transform & x, int t, float * row) {
    if (x.turns) {
        kvq_rotary_turn_row(*x.rotary, x.turns + (size_t) t * (size_t) x.rotary->n_dims, row);
    } else {
        kvq_rotary_apply(*x.rotary, x.positions[t], false, row);
    }
}

// What is added to, or taken from, row t of head h besides its prediction: the mean, turned as the row is.
struct row_mean {
    const kvq_row_transform & x;
    const float * mean; // of the head, NULL: no mean
    std::vector<float> turned;

    row_mean(const kvq_row_transform & x, int h, int D) :
        x(x), mean(x.mean ? x.mean + (size_t) h * D : nullptr), turned((size_t) D) {}
    const float * of(int t, bool stays) {
        if (!mean || !stays) { return mean; }
        std::copy_n(mean, turned.size(), turned.data());
        turn(x, t, turned.data());
        return turned.data();
    }
};

void clamp(std::vector<float> & x) {
    for (float & y : x) { y = std::min(std::max(y, -65504.0f), 65504.0f); }
}

// Channels of head h in the order of its block, and back; NULL: they stay.
struct row_order {
    const kvq_order * order;
    size_t at;
    std::vector<float> own;

    row_order(const kvq_order * order, int h, int D) : order(order), at((size_t) h * (size_t) D), own((size_t) D) {}
    void sort(std::vector<float> & row) {
        if (!order) { return; }
        for (size_t i = 0; i < row.size(); i++) { own[i] = row[order->channel[at + i]] * order->gain[at + i]; }
        row.swap(own);
    }
    void unsort(std::vector<float> & row) {
        if (!order) { return; }
        for (size_t i = 0; i < row.size(); i++) { own[order->channel[at + i]] = row[i] * order->back[at + i]; }
        row.swap(own);
    }
};

// Rows of a head in f32 while they are worked on, converted together where they lie side by side.
class f32_rows {
public:
    f32_rows(uint16_t * rows, int n, int D, int stride) : rows(rows), n(n), D(D), stride(stride) {
        x.resize((size_t) n * (size_t) D);
        each([&](uint16_t * h, float * f, int64_t count) { kvq_cpu_f16_to_f32(h, f, count); });
    }
    ~f32_rows() {
        each([&](uint16_t * h, float * f, int64_t count) { kvq_cpu_f32_to_f16(f, h, count); });
    }
    void get(int t, std::vector<float> & row) const { std::copy_n(&x[(size_t) t * (size_t) D], D, row.data()); }
    void put(int t, const std::vector<float> & row) { std::copy_n(row.data(), D, &x[(size_t) t * (size_t) D]); }

private:
    template <typename F> void each(const F & convert) {
        const int64_t width = D;
        if (stride == D) {
            convert(rows, x.data(), n * width);
            return;
        }
        for (int t = 0; t < n; t++) { convert(rows + (size_t) t * stride, &x[(size_t) t * (size_t) D], width); }
    }
    uint16_t * const rows;
    const int n, D, stride;
    static thread_local std::vector<float> x;
};
thread_local std::vector<float> f32_rows::x;

// sealed where it is now: its rotary embedding stays in the block
bool stays_at(const kvq_row_transform & x, int t) { return x.rotary && x.sealed && x.sealed[t] == x.positions[t]; }

} // namespace

void kvq_cpu_take_out_rows(const kvq_lane_layout & l, int h, const kvq_row_transform & x, uint16_t * rows, int stride) {
    const int D = l.codec.head_size;
    std::vector<float> row((size_t) D);
    row_mean mean(x, h, D);
    row_order order(x.order, h, D);
    f32_rows all(rows, l.page_cells, D, stride);
    for (int t = 0; t < l.page_cells; t++) {
        const float * pred = x.pred ? x.pred + t * x.pred_stride + (size_t) h * D : nullptr;
        all.get(t, row);
        const bool stays = stays_at(x, t);
        if (x.rotary && !stays) { kvq_rotary_apply(*x.rotary, x.positions[t], true, row.data()); }
        const float * mu = mean.of(t, stays);
        for (int i = 0; i < D; i++) { row[i] = row[i] - (mu ? mu[i] : 0.0f) - (pred ? pred[i] : 0.0f); }
        if (x.rotary && x.sealed && !stays) { kvq_rotary_apply(*x.rotary, x.sealed[t], false, row.data()); }
        order.sort(row);
        clamp(row);
        all.put(t, row);
    }
}

void kvq_cpu_put_back_rows(const kvq_lane_layout & l, int h, const kvq_row_transform & x, uint16_t * rows, int stride) {
    const int D = l.codec.head_size;
    std::vector<float> row((size_t) D);
    row_mean mean(x, h, D);
    row_order order(x.order, h, D);
    f32_rows all(rows, l.page_cells, D, stride);
    for (int t = 0; t < l.page_cells; t++) {
        const float * pred = x.pred ? x.pred + t * x.pred_stride + (size_t) h * D : nullptr;
        all.get(t, row);
        order.unsort(row);
        const bool stays = stays_at(x, t);
        if (x.rotary && x.sealed && !stays) { kvq_rotary_apply(*x.rotary, x.sealed[t], true, row.data()); }
        const float * mu = mean.of(t, stays);
        for (int i = 0; i < D; i++) {
            row[i] += (pred ? pred[i] : 0.0f);
            row[i] += (mu ? mu[i] : 0.0f);
        }
        if (x.rotary && !stays) { turn(x, t, row.data()); }
        clamp(row);
        all.put(t, row);
    }
}

void kvq_cpu_turns(const kvq_lane_layout & l, const kvq_row_transform & x, std::vector<float> & turns) {
    turns.resize(x.rotary ? (size_t) l.page_cells * (size_t) x.rotary->n_dims : 0);
    for (int t = 0; x.rotary && t < l.page_cells; t++) {
        kvq_rotary_turn(*x.rotary, x.positions[t], false, &turns[(size_t) t * (size_t) x.rotary->n_dims]);
    }
}

void kvq_cpu_take_out(const kvq_lane_layout & l, int n, const uint16_t * const * tiles, uint16_t * const * out,
    const kvq_row_transform * x, int n_threads) {
    kvq_parallel_for(n, n_threads, [&](int64_t i) {
        static thread_local std::vector<float> turns;
        kvq_row_transform of = x[i];
        kvq_cpu_turns(l, of, turns);
        of.turns = turns.empty() ? nullptr : turns.data();
        memcpy(out[i], tiles[i], l.nb_frame);
        for (int h = 0; h < l.n_head; h++) {
            kvq_cpu_take_out_rows(l, h, of, out[i] + h * l.nb_tile_head / 2, l.head_stride());
        }
    });
}

void kvq_cpu_put_back(const kvq_lane_layout & l, uint16_t * tile, const kvq_row_transform & x) {
    const size_t stride = (size_t) l.head_stride(), head = l.nb_tile_head / 2;
    std::vector<float> turns;
    kvq_row_transform of = x;
    kvq_cpu_turns(l, of, turns);
    of.turns = turns.empty() ? nullptr : turns.data();
    for (int h = 0; h < l.n_head; h++) { kvq_cpu_put_back_rows(l, h, of, tile + h * head, (int) stride); }
    for (int t = 0; x.rotary && t < l.page_cells; t++) { kvq_tag_put(l, tile + t * stride, head, x.positions[t]); }
}

// Part of test_cuda_policies.cpp: rows that stay beside attention one step ahead (policy/fetch.h, engine/far_buffer.h)
// follow what happens to their cells. Random operations on a layer of specache: the rows are those of the second tier,
// byte by byte, and the cells and what attention makes of them those of the CPU.
#pragma once

#include "engine/far_buffer.h"
#include "policy/fetch.h"
#include "types/far_rows.h"

struct kept_counts {
    int n_kept = 0, n_shifted = 0, n_lists = 0, n_other = 0; // n_other: lists that rounding changed
    double worst = 0;
};

class kept_test {
    static constexpr int HEADS = 2, GQA = 2, D = 64, N_CELLS = 288, N_STREAM = 2, MOST_ROWS = 90;
    kvq_cuda_device & d;
    two_layers w;
    kvq_fetcher * fetchers[2] = {};
    kvq_far far[2][N_STREAM] = {}; // of the CPU, of CUDA
    std::vector<uint8_t> used[N_STREAM];
    int end[N_STREAM] = {};
    std::string what;
    kept_counts & n;

    std::vector<int32_t> get_kept(int s) const {
        std::vector<int32_t> cells((size_t) HEADS * (size_t) far[1][s].n_kept);
        d.get(cells.data(), far[1][s].kept, 4 * cells.size());
        return cells;
    }
    bool has_far(int s, int cell) const {
        const int p = cell / far[1][s].n_cells;
        return w.host.lane[0]->state(s, p) == KVQ_PAGE_SEALED && w.host.lane[1]->state(s, p) == KVQ_PAGE_SEALED;
    }

    // Behind a call of few tokens: the cells that stay are those of the CPU, but for rounding. From here on they are.
    bool takes_list(int s) {
        const std::vector<int32_t> there = get_kept(s);
        const bool same = std::equal(there.begin(), there.end(), far[0][s].kept);
        std::copy(there.begin(), there.end(), far[0][s].kept);
        n.n_lists++;
        n.n_other += !same;
        return same;
    }

    // Rows, slots and bits of stream s, and its cells.
    void check_buffer(int s) {
        const kvq_far & f = far[1][s];
        const size_t room = (size_t) f.n_kept, nb_row = kvq_far_row_bytes(f.format, D);
        const kvq_far_buffer at(HEADS, f.n_kept, f.n_slots / 32, 2 * nb_row);
        const std::vector<int32_t> kept = get_kept(s);
        std::vector<uint8_t> memory(at.size), its(nb_row);
        d.get(memory.data(), f.buffer, memory.size());
        for (size_t h = 0; h < HEADS; h++) {
            const int32_t *cells = &kept[h * room], *slots = (const int32_t *) &memory[at.slots] + h * room;
            std::vector<uint32_t> bits((size_t) f.n_slots / 32, 0);
            std::vector<uint8_t> taken(room, 0);
            std::vector<int32_t> there, here;
            for (size_t i = 0; i < room && cells[i] >= 0; i++) {
                const int cell = cells[i], slot = slots[i];
                CHECK(slot >= 0 && slot < (int) room && !taken[(size_t) slot]++, "%s: slot %d", what.c_str(), slot);
                if (cell >= f.n_slots) { continue; } // kept no more
                CHECK(
                    has_far(s, cell), "%s: stream %d head %zu keeps cell %d of an open page", what.c_str(), s, h, cell);
                there.push_back(cell);
                bits[(size_t) cell / 32] |= 1u << cell % 32;
                for (size_t v = 0; v < 2; v++) {
                    const void * rows;
                    d.get(&rows, (v ? f.v_rows : f.k_rows) + cell / f.n_cells, sizeof(rows));
                    const size_t row = h * (size_t) f.n_cells + (size_t) (cell % f.n_cells);
                    d.get(its.data(), (const uint8_t *) rows + row * nb_row, nb_row);
                    CHECK(!memcmp(&memory[at.rows + ((h * room + (size_t) slot) * 2 + v) * nb_row], its.data(), nb_row),
                        "%s: %s of stream %d head %zu cell %d is not its far row", what.c_str(), v ? "value" : "key", s,
                        h, cell);
                }
            }
            n.n_kept += (int) there.size();
            CHECK(!memcmp(bits.data(), &memory[at.bits + 4 * h * bits.size()], 4 * bits.size()),
                "%s: bits of stream %d head %zu", what.c_str(), s, h);
            if (fetchers[0]->stands_alone(s)) { continue; } // what is kept now nobody reads
            const int32_t * const host = far[0][s].kept + h * room;
            std::copy_if(host, std::find(host, host + room, -1), std::back_inserter(here),
                [&](int32_t cell) { return has_far(s, cell); });
            CHECK(here == there, "%s: stream %d head %zu keeps %zu cells, not the %zu of the CPU", what.c_str(), s, h,
                there.size(), here.size());
        }
    }
    void check() {
        d.flush();
        for (int s = 0; s < N_STREAM; s++) {
            CHECK(fetchers[0]->stands_alone(s) == fetchers[1]->stands_alone(s), "%s: stream %d", what.c_str(), s);
            check_buffer(s);
            w.compare(what.c_str(), s, 0, N_CELLS);
        }
        CHECK(d.error().empty(), "%s: %s", what.c_str(), d.error().c_str());
    }

    // Tokens of streams from s0 on, a cell each, and attention.
    void step(int s0, const std::vector<std::vector<int>> & cells) {
        const int n_s = (int) cells.size(), n_q = (int) cells[0].size(), H = HEADS * GQA,
                  n_mask = 64 * ((N_CELLS + 63) / 64);
        std::vector<int64_t> idx;
        int n_kv = 0;
        for (int s = s0; s < s0 + n_s; s++) {
            for (int cell : cells[(size_t) (s - s0)]) {
                idx.push_back((int64_t) s * N_CELLS + cell);
                used[s][(size_t) cell] = 1;
                end[s] = std::max(end[s], cell + 1);
            }
            n_kv = std::max(n_kv, end[s]);
        }
        w.write(d, idx);
        bool anew[N_STREAM];
        for (int s = 0; s < N_STREAM; s++) { anew[s] = fetchers[0]->stands_alone(s); }
        std::vector<float> q((size_t) (n_s * n_q * H * D)), dst[2] = { q, q };
        for (auto & x : q) { x = 2.0f * normal(); }
        std::vector<uint16_t> mask((size_t) (n_s * n_q * n_mask), 0xfc00);
        for (int i = 0; i < n_s * n_q; i++) { // all but tokens behind it
            const auto & mine = cells[(size_t) (i / n_q)];
            for (int t = 0; t < N_CELLS; t++) {
                const bool behind = std::find(mine.begin() + i % n_q + 1, mine.end(), t) != mine.end();
                if (used[s0 + i / n_q][(size_t) t] && !behind) { mask[(size_t) (i * n_mask + t)] = 0; }
            }
        }
        device_bytes tq(d, q.size() * 4, q.data()), tm(d, mask.size() * 2, mask.data()), to(d, q.size() * 4, q.data());
        for (const bool there : { false, true }) {
            layer & x = *w.both[there];
            const kvq_lane_layout &k = x.lane[0]->layout(), &v = x.lane[1]->layout();
            const kvq_page * pages = there ? x.spans.on(d) : x.spans.on(kvq_cpu_device());
            std::vector<kvq_attn> a((size_t) n_s);
            for (int i = 0; i < n_s; i++) {
                const int64_t at = (int64_t) i * n_q * H * D;
                kvq_attn & y = a[(size_t) i];
                y = kvq_attn{};
                y.k = k.codec;
                y.v = v.codec;
                y.n_q = n_q;
                y.n_head = H;
                y.n_head_kv = HEADS;
                y.n_kv = n_kv;
                y.n_pages = std::min((n_kv + k.page_cells - 1) / k.page_cells, k.n_pages);
                y.scale = 0.125f;
                y.q = (there ? (const float *) tq.p : q.data()) + at;
                y.mask = (there ? (const uint16_t *) tm.p : mask.data()) + (size_t) (i * n_q * n_mask);
                y.mask_stride_token = n_mask;
                y.dst = (there ? (float *) to.p : dst[0].data()) + at;
                y.q_stride_token = y.dst_stride_token = H * D;
                y.q_stride_head = y.dst_stride_head = D;
                y.pages = pages + (size_t) (s0 + i) * (size_t) x.spans.n_pages;
                for (auto & policy : x.policies) { policy->spans(y, s0 + i); }
            }
            if (there) {
                d.attend(a.data(), n_s, &k, &v);
            } else {
                kvq_cpu_device().attend({ a.data(), n_s, &k, &v, nullptr, 1 });
            }
        }
        d.get(dst[1].data(), to.p, to.nb);
        for (int s = s0; s < s0 + n_s; s++) {
            const bool same = n_q >= KVQ_PROMPT_ROWS || takes_list(s);
            if (!same && anew[s]) { continue; } // it has read other rows
            double err = 0, norm = 1e-30;
            for (int i = (s - s0) * n_q * H * D; i < (s - s0 + 1) * n_q * H * D; i++) {
                err += pow((double) dst[1][(size_t) i] - dst[0][(size_t) i], 2);
                norm += pow((double) dst[0][(size_t) i], 2);
            }
            n.worst = std::max(n.worst, sqrt(err / norm));
            CHECK(err < 4e-4 * norm, "%s, stream %d: relative error %.3g of attention", what.c_str(), s,
                sqrt(err / norm));
        }
        for (layer * x : w.both) { x->commit(); }
    }

    // of n tokens: behind all others, or where the first free ones are
    std::vector<int> cells_of(int s, int n_q, bool first) {
        if (end[s] + n_q > N_CELLS) { roll_back(s, uniform(MOST_ROWS, N_CELLS)); }
        std::vector<int> cells;
        for (int t = first ? 0 : end[s]; (int) cells.size() < n_q; t++) {
            if (t >= end[s] || !used[s][(size_t) t]) { cells.push_back(t); }
        }
        return cells;
    }
    void roll_back(int s, int by) {
        end[s] = std::max(end[s] - by, 0);
        std::fill(used[s].begin() + end[s], used[s].end(), 0);
    }
    // some cells go, keys behind them turn
    void shift(int s) {
        const int first = uniform(0, end[s] / 2), last = std::min(first + uniform(1, 20), end[s]);
        std::fill(used[s].begin() + first, used[s].begin() + last, 0);
        for (layer * x : w.both) {
            x->lane[0]->edit(
                s, [&](int cell) { return cell >= last; },
                [&](int cell, int, uint16_t * row) {
                    if (cell >= last) { std::rotate(row, row + 1, row + D); }
                });
        }
        const int32_t * const kept = far[0][s].kept;
        n.n_shifted += (int) std::count_if(
            kept, kept + HEADS * far[0][s].n_kept, [&](int32_t cell) { return cell >= last && has_far(s, cell); });
    }
    // rows of a state come back, the same ones
    void restore(int s) {
        const int cell = uniform(0, N_CELLS - 1), n_rows = uniform(1, N_CELLS - cell);
        for (int v = 0; v < 2; v++) {
            std::vector<uint16_t> image((size_t) (n_rows * w.W));
            w.host.lane[v]->read(s, cell, n_rows, image.data());
            for (layer * x : w.both) { x->lane[v]->restore(s, cell, n_rows, image.data(), 1); }
        }
        for (layer * x : w.both) { x->commit(); }
    }

public:
    kept_test(kvq_cuda_device & d, const char * opts, kept_counts & n) :
        d(d), w(d, "specache", opts, HEADS, D, N_CELLS, N_STREAM), n(n) {
        for (int i = 0; i < 2; i++) {
            for (const auto & p : w.both[i]->policies) {
                if (auto * x = dynamic_cast<kvq_fetcher *>(p.get())) { fetchers[i] = x; }
            }
            CHECK(fetchers[i], "%s fetches nothing", opts);
            for (int s = 0; s < N_STREAM; s++) {
                kvq_attn a = {};
                a.n_q = KVQ_PROMPT_ROWS; // behind it calls pick anew, as they do now
                fetchers[i]->spans(a, s);
                far[i][s] = *a.far;
                CHECK(!i || a.far->buffer, "%s: no buffer", opts);
            }
        }
        for (auto & x : used) { x.assign(N_CELLS, 0); }
    }
    void run(int n_steps) {
        for (int i = 0; i < n_steps; i++) {
            const int s = uniform(0, N_STREAM - 1), op = i < 6 ? 75 : uniform(0, 99);
            const char * name = op < 66 ? "tokens"
                : op < 76               ? "a prompt"
                : op < 80               ? "rolled back"
                : op < 90               ? "shifted"
                : op < 94               ? "copied"
                : op < 98               ? "restored"
                                        : "cleared";
            what = std::string(name) + ", operation " + std::to_string(i);
            if (op < 66) {
                const int n_q = uniform(1, 3), n_s = uniform(1, N_STREAM), s0 = n_s > 1 ? 0 : s;
                std::vector<std::vector<int>> cells;
                for (int j = s0; j < s0 + n_s; j++) { cells.push_back(cells_of(j, n_q, !uniform(0, 7))); }
                step(s0, cells);
            } else if (op < 76) {
                if (i >= 6) { roll_back(s, uniform(0, 100)); } // it goes to pages that are sealed
                step(s, { cells_of(s, uniform(KVQ_PROMPT_ROWS, MOST_ROWS), false) });
            } else if (op < 80) {
                roll_back(s, uniform(1, 100));
            } else if (op < 90) {
                shift(s);
            } else if (op < 94) {
                for (layer * x : w.both) {
                    for (auto & lane : x->lane) { lane->copy_stream(s, 1 - s); }
                    x->commit();
                }
                used[1 - s] = used[s];
                end[1 - s] = end[s];
                CHECK(fetchers[1]->stands_alone(0) == fetchers[1]->stands_alone(1), "%s", what.c_str());
            } else if (op < 98) {
                restore(s);
            } else {
                for (layer * x : w.both) {
                    for (auto & lane : x->lane) { lane->clear(); }
                }
                for (int j = 0; j < N_STREAM; j++) { roll_back(j, N_CELLS); }
            }
            for (int j = 0; j < N_STREAM && op >= 94; j++) { // nobody has picked for the next call
                CHECK(fetchers[1]->stands_alone(j) || (op < 98 && j != s), "%s: stream %d", what.c_str(), j);
            }
            if (uniform(0, 3) || i + 1 == n_steps) { check(); } // else more happens before the device hears of it
        }
    }
};

static void check_kept(kvq_cuda_device & d, int n_steps) {
    const std::mt19937 before = rng;
    for (const char * opts : { "near=kivi,fetch=ahead,top=8,kept=24,window=0,precision=f32",
             "near=higgs,fetch=ahead,top=8,kept=32,window=32,far=q8,precision=f32" }) {
        rng.seed(1);
        kept_counts n;
        kept_test(d, opts, n).run(n_steps);
        CHECK(n.n_kept > 5 * n_steps && n.n_shifted > 0, "%s: %d rows kept, %d shifted", opts, n.n_kept, n.n_shifted);
        CHECK(n.n_other * 25 <= n.n_lists + 50, "%s: %d of %d lists of kept cells differ", opts, n.n_other, n.n_lists);
        printf("kept rows, %s: %d random operations, %d rows as in the second tier, %d were shifted, %d of %d lists "
               "not as on the CPU, worst relative error %.2g\n",
            opts, n_steps, n.n_kept, n.n_shifted, n.n_other, n.n_lists, n.worst);
    }
    rng = before;
}

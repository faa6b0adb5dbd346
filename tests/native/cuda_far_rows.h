// Far rows of a test, and those that are kept beside attention: what should be there, and what is. Part of
// test_cuda.cpp.
#pragma once

#include "cuda_world.h"
#include "engine/far_buffer.h"
#include "types/far_rows.h"

#include <climits>
#include <memory>

// far rows of a lane's sealed pages, as they came, and what they are worth
struct far_lane {
    std::vector<float> x; // [page][head][cell][channel]
    std::vector<const void *> rows;
    uint8_t * memory;
    size_t nb_page;
    far_lane(kvq_cuda_device & d, const world & w, bool value, int format, const std::vector<uint8_t> & has) {
        const kvq_lane_layout & l = value ? w.v : w.k;
        const int D = l.codec.head_size, n = l.n_head * l.page_cells, stride = l.head_stride();
        nb_page = n * kvq_far_row_bytes(format, D);
        memory = (uint8_t *) d.alloc_far(nb_page * w.pages.size());
        CHECK(memory, "no pinned memory");
        const std::vector<uint16_t> tiles = w.frames[value]->get<uint16_t>();
        x.resize(w.pages.size() * n * D);
        rows.assign(w.pages.size(), nullptr);
        std::vector<uint8_t> want(nb_page), got(nb_page);
        std::vector<uint16_t> row(stride), back(l.nb_frame / 2), back_there(l.nb_frame / 2);
        for (size_t p = 0; p < w.pages.size(); p++) {
            if (!has[p]) { continue; }
            const uint16_t * there = (const uint16_t *) w.frames[value]->p + p * l.nb_frame / 2;
            void * to = memory + p * nb_page;
            rows[p] = to;
            d.put_far(l, format, 1, &there, &to, 1);
        }
        for (size_t p = 0; p < w.pages.size(); p++) {
            if (!has[p]) { continue; }
            for (int t = 0; t < n; t++) {
                const size_t nb_row = nb_page / n;
                memset(&want[t * nb_row], 0, nb_row);
                kvq_far_put(format, D, &tiles[p * l.nb_frame / 2 + (size_t) t * stride], &want[t * nb_row]);
                kvq_far_get(format, D, &want[t * nb_row], row.data());
                for (int i = 0; i < D; i++) { x[(p * n + t) * D + i] = kvq_f16_to_f32(row[i]); }
                std::copy(row.begin(), row.end(), back.begin() + (long) t * stride);
            }
            d.get(got.data(), rows[p], nb_page);
            CHECK(got == want, "far rows of page %zu, format %d D %d", p, format, D);
            device_bytes tile(d, l.nb_frame);
            d.get_far(l, format, rows[p], (uint16_t *) tile.p);
            d.get(back_there.data(), tile.p, l.nb_frame);
            CHECK(back == back_there, "tile of far rows differs: page %zu, format %d D %d", p, format, D);
        }
    }
};

// What a token of a step picks, in order; unsure: rounding decides on the last one
struct token_picks {
    std::vector<int32_t> cells;
    bool unsure;
};

// What a step ahead keeps (engine/far_buffer.h), of all streams, and what it should.
struct kept_rows {
    const int H, top, room, np, P;
    const size_t nb_row;
    const kvq_far_buffer at;
    std::vector<int32_t> cells; // [stream][head][room]
    std::unique_ptr<device_bytes> buffer, cells_there;
    uint64_t n_come = 0, n_loose = 0; // rows that travel; n_loose: so many more or less are right

    kept_rows(kvq_cuda_device & d, const world & w, int n_stream, int top, int room, int format) :
        H(w.k.n_head),
        top(top),
        room(room),
        np(w.k.n_pages),
        P(w.k.page_cells),
        nb_row(kvq_far_row_bytes(format, w.k.codec.head_size)),
        at(H, room, np * P / 32, 2 * nb_row),
        cells((size_t) n_stream * H * room, -1) {
        const std::vector<uint8_t> zeros(n_stream * at.size, 0);
        buffer.reset(new device_bytes(d, zeros.size(), zeros.data()));
        cells_there.reset(new device_bytes(d, cells.size() * 4, cells.data()));
    }
    // Pages [p0, p1) of a stream are written again; again: their rows are put far once more, which is when those that
    // are kept come again.
    void renew(kvq_cuda_device & d, const world & w, const kvq_far & f, int stream, int p0, int p1, bool again) {
        if (again) { // kept rows that nobody may read
            std::vector<uint8_t> spoilt(at.size - at.rows, 0x5a);
            d.put((uint8_t *) f.buffer + at.rows, spoilt.data(), spoilt.size());
        }
        for (int p = p0; p < p1; p++) { d.renew_kept(f, w.k, p * P, (p + 1) * P, again); }
        for (int i = 0; i < H * room && !again; i++) {
            int32_t & cell = cells[(size_t) stream * H * room + i];
            if (cell >= p0 * P && cell < p1 * P) { cell = INT_MAX; }
        }
    }
    // The step that was, over cells below n_cells. picks[stream][head]: of tokens whose picks stay. Those of the last
    // one lie in front. counted: rows that travel are
    void step(const far_lane * lane, int n_cells, const std::vector<std::vector<token_picks>> & picks, bool counted) {
        const std::vector<int32_t> there = cells_there->get<int32_t>();
        const std::vector<uint8_t> memory = buffer->get<uint8_t>();
        for (size_t i = 0; i < picks.size(); i++) { // stream and head
            const int32_t * const got = &there[i * room];
            int32_t * const old = &cells[i * room];
            const int n_last = (int) picks[i].back().cells.size();
            bool sure = true;
            std::vector<int32_t> want;
            for (int j = 0; j < room && old[j] >= 0; j++) {
                if (old[j] < n_cells) { want.push_back(old[j]); }
            }
            for (size_t t = 0; t < picks[i].size(); t++) {
                std::vector<int32_t> now = picks[i][t].cells;
                if (t + 1 == picks[i].size()) {
                    now.assign(got, got + n_last);
                } else if (picks[i][t].unsure) {
                    sure = false;
                    n_loose += 2 * (uint64_t) top;
                }
                for (int32_t cell : now) {
                    n_come += counted && std::find(want.begin(), want.end(), cell) == want.end();
                }
                for (int32_t cell : want) {
                    if (std::find(now.begin(), now.end(), cell) == now.end()) { now.push_back(cell); }
                }
                want = now;
                want.resize(std::min(want.size(), (size_t) room));
            }
            for (int j = 0; j < n_last; j++) {
                CHECK(got[j] >= 0 && got[j] < n_cells && (!j || got[j] > got[j - 1]), "picks of head %zu", i);
            }
            want.resize((size_t) room, -1);
            CHECK(!sure || std::equal(want.begin(), want.end(), got), "cells kept of stream and head %zu differ", i);
            want.assign(got, got + room);
            std::copy(want.begin(), want.end(), old);
            const size_t h = i % H;
            const uint8_t * const b = &memory[i / H * at.size];
            std::vector<uint32_t> bits((size_t) np * P / 32, 0);
            std::vector<uint8_t> taken((size_t) room, want[0] < 0);
            bool behind = false; // the last one
            for (int j = 0; j < room; j++) {
                const int slot = ((const int32_t *) (b + at.slots))[h * room + j];
                if (want[0] < 0) { break; }
                CHECK(slot >= 0 && slot < room && !taken[slot], "slot %d twice", slot);
                taken[slot] = 1;
                CHECK(!behind || want[j] < 0, "a cell behind the last one of head %zu", i);
                behind = want[j] < 0;
                if (behind) { continue; }
                CHECK(want[j] < n_cells && std::count(want.begin(), want.end(), want[j]) == 1, "cell %d", want[j]);
                bits[(size_t) want[j] / 32] |= 1u << want[j] % 32;
                const size_t page = i / H * np + want[j] / P, row = h * P + want[j] % P;
                const uint8_t * mine = b + at.rows + (h * room + slot) * 2 * nb_row;
                for (int r = 0; r < 2; r++) {
                    const uint8_t * its = (const uint8_t *) lane[r].rows[page] + row * nb_row;
                    CHECK(!memcmp(mine + r * nb_row, its, nb_row), "row of cell %d differs", want[j]);
                }
            }
            CHECK(!memcmp(bits.data(), b + at.bits + h * 4 * bits.size(), 4 * bits.size()), "bits of head %zu", i);
        }
    }
};

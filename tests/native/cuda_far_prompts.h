// Rows of a prompt that come ahead of their layer (kvq_cuda_device::ask_ahead), against the rows as they are. Part of
// test_cuda.cpp, behind cuda_far.h.
#pragma once

#include "cuda_far.h"

// One layer of two lanes, whose tables the host has as well.
struct far_layer {
    kvq_cuda_device & d;
    world w;
    const int format;
    std::vector<uint8_t> has;
    far_lane lane[2];
    std::unique_ptr<device_bytes> table[2];
    std::vector<kvq_attn> a;
    std::vector<kvq_far> far;

    far_layer(kvq_cuda_device & d, const attention_case & c, int format) :
        d(d),
        w(d, c),
        format(format),
        has(some(w)),
        lane{ { d, w, false, format, has }, { d, w, true, format, has } },
        a((size_t) c.n_stream),
        far(a.size()) {
        for (int r = 0; r < 2; r++) {
            table[r].reset(new device_bytes(d, lane[r].rows.size() * sizeof(void *), lane[r].rows.data()));
            d.name_far_table((const void * const *) table[r]->p, lane[r].rows.data(), lane[r].rows.size());
        }
        for (int s = 0; s < c.n_stream; s++) {
            kvq_attn & x = a[(size_t) s];
            x = kvq_attn{};
            x.k = w.k.codec;
            x.v = w.v.codec;
            x.n_head_kv = c.n_kv_heads;
            x.pages = (const kvq_page *) w.pages_there->p + (size_t) s * w.k.n_pages;
            far[(size_t) s] = { KVQ_FETCH_ALL, 1, format, w.k.page_cells,
                (const void * const *) table[0]->p + (size_t) s * w.k.n_pages,
                (const void * const *) table[1]->p + (size_t) s * w.k.n_pages, nullptr, nullptr };
        }
    }
    ~far_layer() {
        for (int r = 0; r < 2; r++) {
            d.name_far_table((const void * const *) table[r]->p, nullptr, 0);
            d.free_far(lane[r].memory, 0);
        }
    }
    static std::vector<uint8_t> some(const world & w) {
        std::vector<uint8_t> has(w.pages.size());
        for (size_t p = 0; p < has.size(); p++) {
            has[p] = w.pages[p].k_params && w.pages[p].v_params && uniform(0, 9);
        }
        return has;
    }
    void publish(int r, size_t p) { d.put_address_later((const void **) table[r]->p + p, lane[r].rows[p]); }
    // Two pages change places; one page's rows go, or come back.
    void change() {
        const size_t p = (size_t) uniform(0, (int) has.size() - 1), q = (size_t) uniform(0, (int) has.size() - 1);
        const size_t n = lane[0].x.size() / has.size(), m = lane[1].x.size() / has.size();
        if (!has[p] || !has[q] || p == q) { return; }
        for (int r = 0; r < 2; r++) {
            const size_t per = r ? m : n;
            std::swap(lane[r].rows[p], lane[r].rows[q]);
            std::swap_ranges(lane[r].x.begin() + (long) (p * per), lane[r].x.begin() + (long) ((p + 1) * per),
                lane[r].x.begin() + (long) (q * per));
            publish(r, p);
            publish(r, q);
        }
        has[p] = 0;
        lane[uniform(0, 1)].rows[p] = nullptr; // of keys or of values alone: near rows then
        for (int r = 0; r < 2; r++) { publish(r, p); }
    }
    std::vector<uint16_t> rows(int n_kv, bool with_far) {
        const int P = w.k.page_cells;
        for (size_t s = 0; s < a.size(); s++) {
            a[s].n_kv = n_kv;
            a[s].n_pages = (n_kv + P - 1) / P;
            a[s].far = with_far ? &far[s] : nullptr;
        }
        void * there[2];
        CHECK(d.expand(a.data(), (int) a.size(), &there[0], &there[1]), "out of memory");
        const size_t width = (size_t) a[0].n_head_kv * a[0].k.head_size;
        std::vector<uint16_t> out(2 * a.size() * (size_t) n_kv * width);
        for (int r = 0; r < 2; r++) { d.get(out.data() + r * out.size() / 2, there[r], out.size()); }
        return out;
    }
    void check(int n_kv) {
        const int P = w.k.page_cells, H = a[0].n_head_kv, D = a[0].k.head_size, np = w.k.n_pages;
        const std::vector<uint16_t> got = rows(n_kv, true), near = rows(n_kv, false);
        for (size_t i = 0; i < got.size(); i++) {
            const size_t half = got.size() / 2, r = i / half, s = i % half / (half / a.size()),
                         cell = i % (half / a.size()) / ((size_t) H * D), h = i / (size_t) D % (size_t) H,
                         p = s * (size_t) np + cell / P;
            const uint16_t want =
                has[p] ? kvq_f32_to_f16(lane[r].x[((p * H + h) * P + cell % P) * D + i % (size_t) D]) : near[i];
            CHECK(got[i] == want, "%s of stream %zu, cell %zu, head %zu, channel %zu: %g, not %g (format %d, D %d)",
                r ? "V" : "K", s, cell, h, i % D, kvq_f16_to_f32(got[i]), kvq_f16_to_f32(want), format, D);
        }
    }
};

static void far_prompts(kvq_cuda_device & d) {
    int n = 0;
    for (const int format : { KVQ_FAR_F16, KVQ_FAR_Q8, KVQ_FAR_Q4 }) {
        for (const int D : { 128, 80, 64 }) {
            const attention_case c = { 2, 2, D == 64 ? 2 : 32, 0, D, D == 64 ? 1 : 2, 1, 1, 900, 1 + format % 2, 0, 0,
                false, false };
            far_layer one(d, c, format), two(d, c, format), three(d, c, format);
            const int64_t staged = d.n_staged, stagings = d.n_stagings;
            int n_kv = 300;
            for (int turn = 0; turn < 8; turn++, n_kv = std::min(n_kv + 90, 900)) {
                for (far_layer * x : { &one, &two, &three }) {
                    if (turn > 3) { (turn % 2 ? &one : x)->change(); }
                    x->check(n_kv);
                    n++;
                }
            }
            CHECK(d.n_staged > staged && d.n_stagings - stagings < d.n_staged - staged,
                "%d pages came ahead in %d copies (format %d, D %d)", (int) (d.n_staged - staged),
                (int) (d.n_stagings - stagings), format, D);
        }
    }
    CHECK(d.error().empty(), "%s", d.error().c_str());
    printf("rows that come ahead: %d layers of prompts\n", n);
}

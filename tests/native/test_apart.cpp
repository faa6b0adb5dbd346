// What engine/ asks of a device is all that the store and the policies take of it: random operations over one whose
// memory they cannot look into (apart.h), rows and attention bit for bit as on the CPU. Another device begins here.
// Usage: test_apart [SEED [STEPS]]
#include "apart.h"
#include "two_devices.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

// Three tokens read stream `stream` of both.
static void check_attention(apart_device & d, two_layers & w, int stream) {
    constexpr int N_Q = 3, GQA = 2;
    const kvq_lane_layout & l = w.host.lane[0]->layout();
    const int D = l.codec.head_size, H = GQA * l.n_head;
    std::vector<float> q((size_t) N_Q * H * D), dst[2] = { std::vector<float>(q.size(), 0.0f), dst[0] };
    std::vector<uint16_t> mask((size_t) N_Q * w.n_cells);
    for (auto & x : q) { x = normal(); }
    for (int i = 0; i < N_Q; i++) {
        for (int t = 0; t < w.n_cells; t++) { // of cells that were written; the first one is seen by all
            const kvq_page_state state = w.host.lane[0]->state(stream, t / l.page_cells);
            const bool seen =
                state == KVQ_PAGE_SEALED || w.host.lane[0]->is_valid(stream, t / l.page_cells, t % l.page_cells);
            mask[(size_t) i * w.n_cells + t] = seen && (t == 0 || uniform(0, 9)) ? 0 : 0xfc00;
        }
    }
    device_bytes tq(d, 4 * q.size(), q.data()), tm(d, 2 * mask.size(), mask.data()), to(d, 4 * q.size(), dst[1].data());
    for (const bool apart : { false, true }) {
        layer & x = *w.both[apart];
        kvq_attn a = {};
        a.k = l.codec;
        a.v = x.lane[1]->layout().codec;
        a.n_q = N_Q;
        a.n_head = H;
        a.n_head_kv = l.n_head;
        a.n_kv = w.n_cells;
        a.n_pages = l.n_pages;
        a.scale = 0.125f;
        a.pages = x.lane[0]->spans_on(stream, 0);
        a.q = apart ? (const float *) tq.p : q.data();
        a.mask = apart ? (const uint16_t *) tm.p : mask.data();
        a.mask_stride_token = w.n_cells;
        a.dst = apart ? (float *) to.p : dst[0].data();
        a.q_stride_token = a.dst_stride_token = H * D;
        a.q_stride_head = a.dst_stride_head = D;
        for (const auto & p : x.policies) { p->spans(a, stream); }
        x.cache.device.flush();
        x.cache.device.attend({ &a, 1, &l, &x.lane[1]->layout(), nullptr, 1 });
    }
    d.get(dst[1].data(), to.p, 4 * q.size());
    for (size_t i = 0; i < q.size(); i++) {
        CHECK(!memcmp(&dst[0][i], &dst[1][i], 4), "attention of stream %d: value %zu is %g, not %g", stream, i,
            dst[1][i], dst[0][i]);
    }
}

int main(int argc, char ** argv) {
    const unsigned seed = argc > 1 ? (unsigned) atoi(argv[1]) : 1;
    const int n_steps = argc > 2 ? atoi(argv[2]) : 120;
    const struct {
        const char *method, *opts;
    } cases[] = { { "kivi", "" }, { "kivi", "bits=4,scales=u8,sinks=4,window=64" }, { "kivi", "place=host" },
        { "higgs", "" }, { "minikv", "" }, { "minikv", "hh=0.1,rw=0.1,window=64" },
        { "zipcache", "interval=64,salient=0.5,keep=0.5" }, { "specache", "window=32" },
        { "specache", "window=32,top=16,far=q8,fetch=ahead,kept=32" } };
    for (const auto & c : cases) {
        rng.seed(seed);
        apart_device d;
        int n_attended = 0;
        const int n_rows = check_store(d, c.method, c.opts, n_steps, [&](two_layers & w, int stream) {
            if (uniform(0, 3)) { return; }
            check_attention(d, w, stream);
            n_attended++;
        });
        CHECK(d.n.encode && d.n.late && d.n.get && n_attended, "%s %s: nothing of it ran", c.method, c.opts);
        printf("%-8s %-36s seed %u: %d operations, %d rows and %d calls of attention as on the CPU\n"
               "         memory %d, to it %d, from it %d, within %d, later %d in %d; rows %d, sealed %d, opened %d,"
               " turned %d, chosen %d, packed %d, gathered %d, far %d\n",
            c.method, c.opts, seed, n_steps, n_rows, n_attended, d.n.alloc, d.n.put, d.n.get, d.n.copy, d.n.late,
            d.n.flush, d.n.write, d.n.encode, d.n.decode, d.n.turn, d.n.choose, d.n.pack, d.n.gather, d.n.far);
    }
    return 0;
}

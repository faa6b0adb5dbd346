// The method of docs/adding-a-method.md on CUDA's kernels, translated to the host: its policy says which cells are
// salient by a `put` of 4 n bytes, n = 2 as many as an address has. Sealed blocks have to be those of the CPU.
// Compiled by tests/test_cuda_on_host.py, which adds the document's files.
#include "cuda/device/device.h"
#include "native/device_bytes.h"
#include "native/layer.h"

#include <cmath>
#include <cstring>

constexpr int HEADS = 2, D = 64, W = HEADS * D, N_CELLS = 1024;

struct device_layer {
    cache_of_layers cache;
    composed_layer layer;
    device_layer(kvq_device & d, const char * opts) : cache(d) {
        layer.make(cache, plan_of("comb", opts, { 0, 1, { 0, HEADS, D, D }, nullptr }), HEADS, N_CELLS, 1);
    }
};

int main() {
    kvq_cuda_device d(0);
    int n_compared = 0;
    for (int n = 2; n <= 8; n++) {
        const std::string opts = "n=" + std::to_string(n) + ",lo=1";
        device_layer host(kvq_cpu_device(), opts.c_str()), there(d, opts.c_str());
        std::vector<float> rows((size_t) N_CELLS * W);
        std::vector<int64_t> cells(N_CELLS);
        for (size_t i = 0; i < rows.size(); i++) { rows[i] = std::sin(0.37f * (float) (i * i % 9973)); }
        for (size_t i = 0; i < cells.size(); i++) { cells[i] = (int64_t) i; }
        device_bytes up(d, rows.size() * 4, rows.data());
        for (int v = 0; v < 2; v++) {
            kvq_lane &a = *host.layer.lane[v], &b = *there.layer.lane[v];
            a.write(N_CELLS, cells.data(), rows.data(), W, 1);
            b.write(N_CELLS, cells.data(), (const float *) up.p, W, 1);
            a.commit(1);
            b.commit(1);
        }
        for (int v = 0; v < 2; v++) {
            kvq_lane &a = *host.layer.lane[v], &b = *there.layer.lane[v];
            const kvq_lane_layout & l = a.layout();
            for (int p = 0; p < l.n_pages; p++) {
                CHECK(a.state(0, p) == b.state(0, p), "n=%d page %d", n, p);
                if (a.state(0, p) != KVQ_PAGE_SEALED) { continue; }
                for (int h = 0; h < HEADS; h++) {
                    std::vector<uint8_t> codes(l.nb_codes), params(l.nb_params);
                    d.get(params.data(), b.params_at(0, p, h), params.size());
                    d.get(codes.data(), b.codes_at(0, p, h), codes.size());
                    CHECK(!memcmp(params.data(), a.params_at(0, p, h), params.size()), "n=%d %s: parameters of page %d",
                        n, v ? "V" : "K", p);
                    CHECK(!memcmp(codes.data(), a.codes_at(0, p, h), codes.size()), "n=%d %s: codes of page %d", n,
                        v ? "V" : "K", p);
                    n_compared++;
                }
            }
        }
    }
    CHECK(d.error().empty(), "%s", d.error().c_str());
    CHECK(n_compared > 100, "%d blocks", n_compared);
    printf("%d blocks: ok\n", n_compared);
    return 0;
}

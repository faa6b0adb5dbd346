// Memory of a second tier (policy/far_pool.h): there is a block for every page that may seal, none is lost when pages
// are written again, and what lacks is said.
#include "base/host_memory.h"
#include "base/settings.h"
#include "layer.h"
#include "policy/far_pool.h"

#include <unistd.h>

constexpr int N_LAYER = 4, N_HEAD = 2, N_CELLS = 512, N_STREAM = 2;

static std::string file_of_rows(void) { return "/tmp/kvq-far-" + std::to_string(getpid()); }

// Layers whose far rows share one pool.
struct far_layers {
    cache_of_layers c;
    std::vector<std::unique_ptr<composed_layer>> layers;

    far_layers(int head_k, int head_v, const std::string & opts) {
        std::vector<kvq_layer_plan> plans;
        const kvq_layer_shape shape = { 0, N_HEAD, head_k, head_v };
        for (int i = 0; i < N_LAYER; i++) {
            plans.push_back(plan_of("specache", opts.c_str(), { i, N_LAYER, shape, i ? &shape : nullptr }));
            for (int v = 0; v < 2; v++) {
                c.bytes_far += kvq_make_lane_layout(plans.back(), v, N_HEAD, N_CELLS, N_STREAM).bytes_far;
            }
        }
        for (int i = 0; i < N_LAYER; i++) {
            layers.emplace_back(new composed_layer);
            layers.back()->make(c, plans[(size_t) i], N_HEAD, N_CELLS, N_STREAM, i);
        }
    }

    // all cells, the streams in turns
    void fill() {
        constexpr int N = 16;
        for (int at = 0; at < N_CELLS; at += N) {
            for (int s = 0; s < N_STREAM; s++) {
                for (const auto & l : layers) {
                    for (const auto & lane : l->lane) { write(*lane, s, at, N); }
                }
            }
        }
    }
    static void write(kvq_lane & lane, int s, int at, int n) {
        const size_t width = (size_t) N_HEAD * (size_t) lane.layout().codec.head_size;
        std::normal_distribution<float> normal;
        std::vector<float> rows((size_t) n * width);
        for (float & x : rows) { x = normal(rng); }
        std::vector<int64_t> cells;
        for (int i = 0; i < n; i++) { cells.push_back((int64_t) s * N_CELLS + at + i); }
        lane.write(n, cells.data(), rows.data(), width, 1);
        lane.commit(1);
    }

    // Every page but the sinks is sealed, and nobody lacks memory.
    void check_sealed(const std::string & what) const {
        for (const auto & l : layers) {
            for (const auto & lane : l->lane) {
                const kvq_lane_layout & its = lane->layout();
                for (int s = 0; s < N_STREAM; s++) {
                    for (int p = its.n_sink_pages; p < its.n_pages; p++) {
                        CHECK(lane->state(s, p) == KVQ_PAGE_SEALED, "%s: %s, stream %d, page %d of %d", what.c_str(),
                            lane->is_value() ? "values" : "keys", s, p, its.n_pages);
                    }
                }
            }
            for (const auto & p : l->policies) {
                CHECK(p->trouble().empty(), "%s: %s", what.c_str(), p->trouble().c_str());
            }
        }
    }
};

// A file has room for all pages that may seal, whatever their sizes, and has it again when cells are written again.
static void files_hold_every_page(void) {
    const struct {
        int head_k, head_v, sinks;
    } shapes[] = { { 64, 64, 4 }, { 192, 128, 4 }, { 128, 192, 0 }, { 128, 64, 40 } };
    for (const auto & x : shapes) {
        const std::string opts = "near=higgs,window=0,sinks=" + std::to_string(x.sinks) + ",place=" + file_of_rows();
        far_layers layers(x.head_k, x.head_v, opts);
        for (int i = 0; i < 3; i++) {
            layers.fill();
            layers.check_sealed(opts + ", filled " + std::to_string(i + 1) + " times");
        }
    }
}

static bool has(const std::string & text, const char * part) { return text.find(part) != std::string::npos; }

static void a_full_file_says_so(void) {
    constexpr size_t NB = 4096;
    const std::string path = file_of_rows();
    kvq_far_pool pool(kvq_cpu_device(), path, 3 * NB);
    CHECK(pool.ok(), "%s", pool.error().c_str());
    const int lane = 0;
    for (int i = 0; i < 3; i++) { CHECK(pool.take(NB, &lane, 4) && pool.error().empty(), "block %d", i); }
    CHECK(!pool.take(NB, &lane, 4), "a block behind the file");
    CHECK(has(pool.error(), path.c_str()) && has(pool.error(), "far=q4"), "%s", pool.error().c_str());
    CHECK(!has(pool.error(), "host") && !has(pool.error(), "PATH"), "%s", pool.error().c_str());
}

// A lane that finds a block with another one lacks nothing.
static void blocks_of_other_lanes(void) {
    constexpr size_t NB = 64 << 10;
    constexpr int N = 16; // in one MiB
    setenv("KVQ_FAR_LIMIT", "1", 1);
    kvq_far_pool pool(kvq_cpu_device(), "host", 2 * N * NB);
    const int one = 0, two = 0;
    CHECK(pool.take(NB, &one, N), "%s", pool.error().c_str()); // and has all others to spare
    for (int i = 1; i < N; i++) {
        CHECK(pool.take(NB, &two, N) && pool.error().empty(), "block %d: %s", i, pool.error().c_str());
    }
    CHECK(!pool.take(NB, &two, N) && has(pool.error(), "place=PATH"), "%s", pool.error().c_str());
    unsetenv("KVQ_FAR_LIMIT");
}

static void the_host_keeps_some_memory(void) {
    const size_t nb = kvq_host_available();
    if (nb == SIZE_MAX) { return; }
    kvq_far_pool pool(kvq_cpu_device(), "host", nb);
    const int lane = 0;
    CHECK(!pool.take(nb, &lane, 1) && has(pool.error(), "the host has none left"), "%zu bytes", nb);
}

// The list of kept rows is counted: 4 bytes per row, KV head and stream.
static void kept_rows_are_counted(void) {
    size_t nb[2];
    for (int i = 0; i < 2; i++) {
        const char * opts = i ? "near=higgs,fetch=ahead,kept=1088" : "near=higgs,fetch=ahead,kept=64";
        const kvq_layer_plan plan = plan_of("specache", opts, { 0, N_LAYER, { 0, N_HEAD, 64, 64 }, nullptr });
        nb[i] = kvq_make_lane_layout(plan, false, N_HEAD, N_CELLS, N_STREAM).bytes_tables;
    }
    CHECK(nb[1] - nb[0] == 4 * 1024 * N_HEAD * N_STREAM, "%zu and %zu bytes", nb[0], nb[1]);
}

int main() {
    files_hold_every_page();
    a_full_file_says_so();
    blocks_of_other_lanes();
    the_host_keeps_some_memory();
    kept_rows_are_counted();
    printf("far: ok\n");
    return 0;
}

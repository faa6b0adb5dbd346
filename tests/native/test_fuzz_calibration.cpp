// The loader of calibrated data against random mutations of good files, as sidecar and as metadata: every input is
// refused with one line or loaded and packed; none crashes, none makes memory grow beyond a few times the file.
// Usage: test_fuzz_calibration [n] [seed]
#include "cache/calibration.h"
#include "gguf/fingerprint.h"

#include "ggml.h"
#include "gguf.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

static std::mt19937_64 rng;
static uint64_t below(uint64_t n) { return rng() % n; }

constexpr int WIDTH = 32, LAYERS = 3;

static std::vector<uint8_t> read_back(gguf_context * g) {
    std::vector<uint8_t> out(gguf_get_meta_size(g));
    gguf_get_meta_data(g, out.data());
    return out;
}

// layer 1 in f16, layer 2 in q4_0
static std::vector<uint8_t> make(bool sidecar) {
    gguf_context * g = gguf_init_empty();
    ggml_init_params ip = { 1 << 20, nullptr, false };
    ggml_context * ctx = ggml_init(ip);
    gguf_set_val_str(g, "general.architecture", "llama");
    if (sidecar) { gguf_set_val_str(g, "general.type", "kvq"); }
    gguf_set_val_u32(g, "kvq.version", KVQ_CALIBRATION_VERSION);
    gguf_set_val_str(g, "kvq.method", "aqua");
    gguf_set_val_str(g, "kvq.model.arch", "llama");
    gguf_set_val_str(g, "kvq.model.hash", "00");
    gguf_set_val_u32(g, "kvq.model.n_layer", LAYERS);
    gguf_set_val_str(g, "kvq.aqua.predictor", "full");
    gguf_set_val_str(g, "kvq.checksum", "00000000");
    gguf_set_val_u32(g, "llama.block_count", LAYERS);
    gguf_set_val_f32(g, "kvq.aqua.blk.1.k.rms", 1.0f);
    gguf_set_val_f32(g, "kvq.aqua.blk.1.v.rms", 1.0f);
    std::vector<uint8_t> data;
    for (int il = 0; il < LAYERS; il++) {
        if (il) { gguf_set_val_u32(g, ("kvq.aqua.blk." + std::to_string(il) + ".prev").c_str(), (uint32_t) il - 1); }
        for (int v = 0; v < 2; v++) {
            for (int m = 0; m < (!il ? 1 : v ? 3 : 2); m++) {
                static const char * const names[] = { "bias", "weight", "fold" };
                const std::string name = "kvq.aqua.blk." + std::to_string(il) + (v ? ".v." : ".k.") + names[m];
                const ggml_type type = !m ? GGML_TYPE_F32 : il == 1 ? GGML_TYPE_F16 : GGML_TYPE_Q4_0;
                ggml_tensor * t = m ? ggml_new_tensor_2d(ctx, type, v ? 2 * WIDTH : WIDTH, WIDTH)
                                    : ggml_new_tensor_1d(ctx, type, WIDTH);
                uint8_t * p = (uint8_t *) t->data;
                const size_t step = type == GGML_TYPE_F32 ? 4 : type == GGML_TYPE_F16 ? 2 : 18;
                for (size_t i = 0; i < ggml_nbytes(t); i++) { p[i] = (uint8_t) rng(); }
                for (size_t i = 0; i < ggml_nbytes(t); i += step) {
                    const float x = 0.25f;
                    const ggml_fp16_t h = ggml_fp32_to_fp16(x);
                    memcpy(p + i, type == GGML_TYPE_F32 ? (const void *) &x : &h, type == GGML_TYPE_F32 ? 4 : 2);
                }
                if (sidecar) {
                    ggml_set_name(t, name.c_str());
                    gguf_add_tensor(g, t);
                    data.resize((data.size() + 31) / 32 * 32);
                    data.insert(data.end(), p, p + ggml_nbytes(t));
                } else {
                    const uint32_t shape[2] = { (uint32_t) t->ne[m ? 1 : 0], (uint32_t) t->ne[0] };
                    gguf_set_arr_data(g, name.c_str(), GGUF_TYPE_UINT8, p, ggml_nbytes(t));
                    gguf_set_val_str(g, (name + ".type").c_str(),
                        type == GGML_TYPE_F32       ? "f32"
                            : type == GGML_TYPE_F16 ? "f16"
                                                    : "q4_0");
                    gguf_set_arr_data(g, (name + ".shape").c_str(), GGUF_TYPE_UINT32, shape, m ? 2 : 1);
                }
            }
        }
    }
    std::vector<uint8_t> out = read_back(g);
    data.resize((data.size() + 31) / 32 * 32);
    out.insert(out.end(), data.begin(), data.end());
    gguf_free(g);
    ggml_free(ctx);
    return out;
}

static const uint64_t odd_values[] = { 0, 1, 2, 4, 8, 9, 12, 18, 31, 32, 33, 63, 64, 127, 255, 0x7c00, 0x7e00, 0xfc00,
    0xffff, 1u << 20, (1u << 20) + 1, 0x7f800000, 0x7fc00000, 0x7fffffff, 0x80000000, 0xffffffff, 1ull << 32,
    1ull << 40, 1ull << 62, 1ull << 63, ~0ull };

static std::vector<uint8_t> mutate(const std::vector<uint8_t> & good) {
    std::vector<uint8_t> x = good;
    const size_t header = 2500; // most of what is parsed
    for (uint64_t n = 1 + below(4); n > 0 && !x.empty(); n--) {
        const size_t at = below(below(3) ? std::min(header, x.size()) : x.size());
        switch (below(7)) {
        case 0: x[at] ^= (uint8_t) (1u << below(8)); break;
        case 1: x[at] = (uint8_t) rng(); break;
        case 2:
        case 3: {
            const uint64_t v = odd_values[below(sizeof(odd_values) / sizeof(odd_values[0]))];
            memcpy(&x[at], &v, std::min<size_t>(1u << below(4), x.size() - at));
            break;
        }
        case 4: x.resize(below(4) ? x.size() - std::min<size_t>(x.size(), below(40)) : at); break;
        case 5: x.insert(x.begin() + (long) at, below(20), (uint8_t) rng()); break;
        default: { // a piece of the file somewhere else
            const size_t from = below(x.size()), len = std::min<size_t>({ below(64), x.size() - from, x.size() - at });
            memmove(&x[at], &x[from], len);
        }
        }
    }
    return x;
}

static long max_rss_kib(void) {
    rusage r;
    getrusage(RUSAGE_SELF, &r);
    return r.ru_maxrss;
}

int main(int argc, char ** argv) {
    const long n = argc > 1 ? atol(argv[1]) : 100000;
    rng.seed(argc > 2 ? (unsigned) atoi(argv[2]) : 1);
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    const int fd = memfd_create("calibration", 0);
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    kvq_model_info model;
    model.arch = "llama";
    model.hash = "00";
    model.n_layer = LAYERS;
    kvq_layer_plan plan;
    plan.add("chain", { { "values", 1 }, { "k_from_k", WIDTH }, { "v_from_k", WIDTH }, { "v_from_below", WIDTH } });
    kvq_layer_plan folds;
    folds.add("chain",
        { { "values", 1 }, { "fold", 1 }, { "k_from_k", WIDTH }, { "v_from_k", WIDTH }, { "v_from_below", WIDTH } });

    long n_loaded = 0, n_refused = 0, n_fit = 0;
    const auto run = [&](const std::vector<uint8_t> & bytes) {
        if (ftruncate(fd, 0) || pwrite(fd, bytes.data(), bytes.size(), 0) != (ssize_t) bytes.size()) { abort(); }
        kvq_calibration c;
        std::string err, note;
        // checksum, identity and sketch: refused, noted or taken
        kvq_check_calibrated(path, below(2) ? path : "", model, note, err);
        err.clear();
        if (kvq_calibration_load(path, model, c, err) != KVQ_OK) {
            n_refused++;
            if (err.find("calibrated data") == std::string::npos || err.size() > 4096) {
                printf("refused without saying what: '%.200s'\n", err.c_str());
                exit(1);
            }
            return false;
        }
        n_loaded++;
        n_fit += c.fits(1, 0, plan, WIDTH, WIDTH, false, err) && c.fits(2, 1, plan, WIDTH, WIDTH, false, err) &&
            c.fits(1, 0, folds, WIDTH, WIDTH, false, err) && c.fits(2, 1, folds, WIDTH, WIDTH, false, err);
        c.pack(below(2) ? 8 : 4, true, below(2));
        for (const auto & l : c.layers) {
            for (const float x : l.second.k_mean) {
                if (!std::isfinite(x)) {
                    printf("a value that is not finite came through\n");
                    exit(1);
                }
            }
        }
        return true;
    };
    const std::vector<uint8_t> good[2] = { make(true), make(false) };
    for (const auto & g : good) {
        if (!run(g)) {
            printf("a good file was refused\n");
            return 1;
        }
    }
    if (n_fit != 2) {
        printf("a good file does not fit\n");
        return 1;
    }
    const long before = max_rss_kib();
#if !defined(__SANITIZE_ADDRESS__)
    rlimit limit = { 4ull << 30, 4ull << 30 }; // a huge allocation fails, and what does not expect that dies
    setrlimit(RLIMIT_AS, &limit);
#endif
    for (long i = 0; i < n; i++) { run(mutate(good[i % 2])); }
    const long grown = max_rss_kib() - before;
    printf("%ld mutations of %zu and %zu bytes: %ld refused, %ld loaded, %ld of these fit; memory grew by %ld KiB\n", n,
        good[0].size(), good[1].size(), n_refused, n_loaded - 2, n_fit - 2, grown);
#if !defined(__SANITIZE_ADDRESS__)
    if (grown > 64 * 1024) {
        printf("memory grew\n");
        return 1;
    }
#endif
    return n_refused > n / 4 && n_loaded > n / 50 ? 0 : 1;
}

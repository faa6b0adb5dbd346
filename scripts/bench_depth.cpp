// Generation and prompt speed behind a filled cache, without saving states in between. A prompt of the first depth,
// 2048 tokens at most, and a token go before what is timed: kernels are loaded when they first run.
//   bench_depth MODEL DEVICE[,DEVICE...][:tensor] DEPTH[,DEPTH...] N_GEN [f16|q8_0|q4_0] [OPTION...]
// nkvo: llama.cpp's -nkvo, its cache in the host's memory, where the CPU computes attention. ngl=N: llama.cpp's -ngl,
// the last N layers (the output is one) on the device. ot=REGEX: llama.cpp's -ot REGEX=CPU. t=N: threads.
// prints a line for every depth: depth, prompt t/s overall, prompt t/s of the last 2048, generation t/s, its median and
// longest step in ms (pages seal in some), and in MiB what the first device's free memory fell by from behind the
// model's load to the end, and llama.cpp's KV and compute buffers there
#include "bench_devices.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static double mib_kv = 0, mib_compute = 0; // as llama.cpp logs them

static void on_log(ggml_log_level level, const char * text, void * device) {
    const char * at = nullptr;
    if ((at = strstr(text, " KV buffer size = "))) {
        mib_kv += atof(at + 18);
    } else if ((at = strstr(text, " compute buffer size = ")) &&
        (strstr(text, (const char *) device) || strstr(text, " KVQ "))) {
        mib_compute += atof(at + 23);
    }
    if (level >= GGML_LOG_LEVEL_ERROR) { fputs(text, stderr); }
}

static double mib_free(ggml_backend_dev_t device) {
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(device, &free, &total);
    return (double) free / (1 << 20);
}

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int main(int argc, char ** argv) {
    if (argc < 5) {
        fprintf(
            stderr, "usage: bench_depth MODEL DEVICE DEPTH N_GEN [f16|q8_0|q4_0] [nkvo] [ngl=N] [ot=REGEX] [t=N]\n");
        return 2;
    }
    std::vector<int> depths;
    for (const char * p = argv[3]; *p; p += strcspn(p, ","), p += *p == ',') { depths.push_back(atoi(p)); }
    const int depth = depths.back(), n_gen = std::max(1, atoi(argv[4]));
    llama_log_set(on_log, argv[2]);
    ggml_backend_load_all();
    std::vector<ggml_backend_dev_t> devices;
    llama_model_params mp = llama_model_default_params();
    if (!bench_devices(argv[2], devices, mp)) { return 1; }
    bool nkvo = false;
    int n_threads = 0, n_gpu_layers = -1;
    const char * regex = nullptr;
    for (int i = 6; i < argc; i++) {
        nkvo = nkvo || !strcmp(argv[i], "nkvo");
        if (!strncmp(argv[i], "ngl=", 4)) { n_gpu_layers = atoi(argv[i] + 4); }
        if (!strncmp(argv[i], "ot=", 3)) { regex = argv[i] + 3; }
        if (!strncmp(argv[i], "t=", 2)) { n_threads = atoi(argv[i] + 2); }
        if (strcmp(argv[i], "nkvo") && !strchr(argv[i], '=')) {
            fprintf(stderr, "bench_depth: no such option: %s\n", argv[i]);
            return 2;
        }
    }
    const llama_model_tensor_buft_override on_cpu[] = { { regex, ggml_backend_cpu_buffer_type() },
        { nullptr, nullptr } };
    if (regex) { mp.tensor_buft_overrides = on_cpu; }
    if (n_gpu_layers >= 0) { mp.n_gpu_layers = n_gpu_layers; }
    llama_model * model = llama_model_load_from_file(argv[1], mp);
    if (!model) { return 1; }
    const double before = mib_free(devices[0]);
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx = (uint32_t) (depth + (n_gen + 8) * (int) depths.size() + 256);
    cp.n_batch = 2048;
    cp.n_ubatch = 512;
    cp.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    const char * type = argc > 5 ? argv[5] : "f16";
    cp.type_k = cp.type_v = !strcmp(type, "q8_0") ? GGML_TYPE_Q8_0
        : !strcmp(type, "q4_0")                   ? GGML_TYPE_Q4_0
                                                  : GGML_TYPE_F16;
    cp.offload_kqv = !nkvo;
    if (n_threads) { cp.n_threads = cp.n_threads_batch = n_threads; }
    llama_context * ctx = llama_init_from_model(model, cp);
    if (!ctx) { return 1; }
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<llama_token> tokens((size_t) depth);
    for (auto & t : tokens) { t = rand() % n_vocab; }
    if (llama_decode(ctx, llama_batch_get_one(tokens.data(), std::min(depths[0], 2048))) ||
        llama_decode(ctx, llama_batch_get_one(tokens.data(), 1))) {
        return 1;
    }
    llama_memory_clear(llama_get_memory(ctx), true);
    int at = 0; // tokens in the cache; generation behind one depth counts toward the next
    for (const int to : depths) {
        const int first = at;
        const double t0 = now();
        double last = 0;
        for (; at < to; at += 2048) {
            const int n = to - at < 2048 ? to - at : 2048;
            const bool timed = to - at <= 2 * 2048; // several devices work on one after the other: nobody waits before
            if (timed) { llama_synchronize(ctx); }
            const double a = now();
            if (llama_decode(ctx, llama_batch_get_one(&tokens[(size_t) at], n))) { return 1; }
            if (!timed) { continue; }
            llama_synchronize(ctx);
            last = n > 1024 || first == 0 ? n / (now() - a) : last; // a short rest says little
        }
        at = to;
        const double t1 = now();
        double t2 = t1;
        std::vector<double> steps;
        for (int i = 0; i < n_gen + 8; i++) {
            if (i == 8) { t2 = now(); }
            llama_token t = rand() % n_vocab;
            const double a = now();
            if (llama_decode(ctx, llama_batch_get_one(&t, 1))) { return 1; }
            llama_synchronize(ctx);
            if (i >= 8) { steps.push_back(1e3 * (now() - a)); }
        }
        at += n_gen + 8;
        std::sort(steps.begin(), steps.end());
        printf("%d %.1f %.1f %.2f", to, (to - first) / (t1 - t0), last, n_gen / (now() - t2));
        printf(" %.3f %.3f", steps[steps.size() / 2], steps.back());
        printf(" %.1f %.1f %.1f\n", before - mib_free(devices[0]), mib_kv, mib_compute);
    }
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}

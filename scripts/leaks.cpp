// Does memory stay as it was while models come and go?
//   leaks MODEL DEVICE[,DEVICE...][:tensor] [TIMES] [DEPTH]
// loads the model, reads DEPTH tokens, generates 8, saves and restores the state and frees everything, TIMES times.
// Prints for each fifth time what is free on each device and what this process holds, in MiB; exit code 1 when a device
// has lost more than 16 MiB, or the process grown by more than 64, in the second half. (glibc keeps some threads'
// memory at first, with upstream's caches and with ours.)
#include "bench_devices.h"

#include <cstdlib>
#include <fstream>
#include <unistd.h>
#include <vector>

static double mib_of_process() {
    double all = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> all >> resident;
    return resident * (double) sysconf(_SC_PAGESIZE) / (1 << 20);
}

static bool once(const char * path, const llama_model_params & mp, int depth) {
    llama_model * model = llama_model_load_from_file(path, mp);
    if (!model) { return false; }
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx = (uint32_t) depth + 64;
    cp.n_batch = 2048;
    cp.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    llama_context * context = llama_init_from_model(model, cp);
    bool ok = context != nullptr;
    std::vector<llama_token> tokens((size_t) depth);
    for (auto & t : tokens) { t = rand() % llama_vocab_n_tokens(llama_model_get_vocab(model)); }
    for (int at = 0; ok && at < depth; at += 2048) {
        ok = !llama_decode(context, llama_batch_get_one(&tokens[(size_t) at], std::min(depth - at, 2048)));
    }
    for (int i = 0; ok && i < 8; i++) { ok = !llama_decode(context, llama_batch_get_one(tokens.data(), 1)); }
    std::vector<uint8_t> state(ok ? llama_state_get_size(context) : 0);
    const size_t n = ok ? llama_state_get_data(context, state.data(), state.size()) : 0;
    ok = ok && n && llama_state_set_data(context, state.data(), n) == n;
    llama_free(context);
    llama_model_free(model);
    return ok;
}

int main(int argc, char ** argv) {
    if (argc < 3) { return fprintf(stderr, "usage: leaks MODEL DEVICE[,DEVICE...] [TIMES] [DEPTH]\n"), 2; }
    const int times = argc > 3 ? atoi(argv[3]) : 50, depth = argc > 4 ? atoi(argv[4]) : 2048;
    if (times < 10) { return fprintf(stderr, "leaks: %d times are too few: 10 at least\n", times), 2; }
    llama_log_set(
        [](ggml_log_level level, const char * text, void *) {
            if (level >= GGML_LOG_LEVEL_ERROR) { fputs(text, stderr); }
        },
        nullptr);
    ggml_backend_load_all();
    std::vector<ggml_backend_dev_t> devices;
    llama_model_params mp = llama_model_default_params();
    if (!bench_devices(argv[2], devices, mp)) { return 2; }
    std::vector<double> first;
    bool grows = false;
    for (int i = 1; i <= times; i++) {
        if (!once(argv[1], mp, depth)) { return fprintf(stderr, "time %d failed\n", i), 2; }
        if (i % 5) { continue; }
        std::vector<double> now;
        for (ggml_backend_dev_t d : devices) {
            size_t free = 0, total = 0;
            if (d) { ggml_backend_dev_memory(d, &free, &total); }
            if (d) { now.push_back((double) free / (1 << 20)); }
        }
        now.push_back(-mib_of_process());
        printf("%d:", i);
        for (const double x : now) { printf(" %.1f", x < 0 ? -x : x); }
        printf("\n");
        fflush(stdout);
        first = i <= times / 2 ? now : first;
        for (size_t k = 0; k < first.size(); k++) {
            grows = grows || first[k] - now[k] > (k + 1 == now.size() ? 64 : 16);
        }
    }
    printf(grows ? "memory is lost\n" : "ok\n");
    return grows;
}

// Two contexts of one model in two threads, for the thread sanitizer: prompt, generation, a saved and a restored state,
// a cut and a cleared cache, and contexts that come and go while the other one decodes.
//
//   cmake -B build -DKVQ_BUILD_TESTS=ON -DKVQ_SANITIZE=thread -DCMAKE_C_FLAGS=-fsanitize=thread \
//         -DCMAKE_CXX_FLAGS=-fsanitize=thread -DGGML_OPENMP=OFF -DKVQ_LLAMA_BUILD=$PWD/llama \
//         -DKVQ_PROGRAMS=llama-server
//   cmake --build build --target ggml-kvq
//   c++ -fsanitize=thread -g scripts/two_contexts.cpp -I$LLAMA_CPP_DIR/include -I$LLAMA_CPP_DIR/ggml/include \
//         -Lbuild/lib -l:libllama.so.0 -l:libggml.so.0 -l:libggml-base.so.0 -Wl,-rpath,build/lib -o two_contexts
//   OMP_THREAD_LIMIT=1 GGML_BACKEND_PATH=$PWD/build/lib/libggml-kvq.so KVQ_METHOD=kivi ./two_contexts MODEL.gguf 4
//
// OMP_THREAD_LIMIT=1 and one thread a context: libgomp is not built for the sanitizer, which would take its barriers
// for races.

#include "ggml-backend.h"
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

static bool decode(llama_context * context, std::vector<llama_token> & tokens) {
    return llama_decode(context, llama_batch_get_one(tokens.data(), (int32_t) tokens.size())) == 0;
}

static std::mutex creating;
static bool alone = false; // contexts are created one at a time

// One context after the other: 5 batches of 64 tokens, 12 single ones, the state there and back.
static bool work(llama_model * model, int seed, int n_rounds) {
    for (int round = 0; round < n_rounds; round++) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = 512;
        params.n_batch = params.n_ubatch = 64;
        params.n_threads = params.n_threads_batch = 1; // two threads compute: the callers
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        if (alone) { creating.lock(); }
        llama_context * context = llama_init_from_model(model, params);
        if (alone) { creating.unlock(); }
        if (!context) { return false; }
        llama_memory_t memory = llama_get_memory(context);
        unsigned x = 1 + seed + 7 * round;
        std::vector<llama_token> tokens(64);
        bool ok = true;
        for (int i = 0; i < 5; i++) {
            for (llama_token & t : tokens) { t = 3 + (x = x * 1664525u + 1013904223u) % 4096; }
            ok = ok && decode(context, tokens);
        }
        std::vector<llama_token> one(1, 5);
        for (int i = 0; i < 12; i++) { ok = ok && decode(context, one); }
        std::vector<uint8_t> state(llama_state_get_size(context));
        const size_t n = llama_state_get_data(context, state.data(), state.size());
        llama_memory_clear(memory, true);
        ok = ok && llama_state_set_data(context, state.data(), n) == n;
        ok = ok && llama_memory_seq_rm(memory, 0, 250, -1);
        for (int i = 0; i < 4; i++) { ok = ok && decode(context, one); }
        llama_free(context);
        if (!ok) { return false; }
    }
    return true;
}

int main(int argc, char ** argv) {
    if (argc < 2) { return fprintf(stderr, "usage: two_contexts MODEL.gguf [ROUNDS [alone]]\n"), 2; }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    ggml_backend_load_all();
    ggml_backend_dev_t devices[] = { ggml_backend_dev_by_name("KVQ0"), nullptr };
    if (!devices[0]) { return fprintf(stderr, "no device KVQ0: set GGML_BACKEND_PATH\n"), 2; }
    llama_model_params params = llama_model_default_params();
    params.devices = devices;
    params.n_gpu_layers = 999;
    llama_model * model = llama_model_load_from_file(argv[1], params);
    if (!model) { return fprintf(stderr, "%s does not load\n", argv[1]), 2; }
    const int n_rounds = argc > 2 ? atoi(argv[2]) : 2;
    alone = argc > 3 && !strcmp(argv[3], "alone");
    bool ok[2] = {};
    std::thread other([&] { ok[1] = work(model, 1, n_rounds); });
    ok[0] = work(model, 0, n_rounds);
    other.join();
    llama_model_free(model);
    printf("%s\n", ok[0] && ok[1] ? "both threads did all" : "a call failed");
    return ok[0] && ok[1] ? 0 : 1;
}

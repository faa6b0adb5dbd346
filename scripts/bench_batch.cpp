// Speed of many sequences at once: each gets a prompt of its own (or a copy of the first one's), then all of them
// generate together.
//   bench_batch MODEL DEVICE[,DEVICE...][:tensor] N_GEN COUNTxLENGTH[,COUNTxLENGTH...] [type=q8_0] [shared] [unified]
//       [each=N] [ubatch=N] [/ COUNTxLENGTH...]
// shared: one prompt, copied to the other sequences of its length; unified: one cache for all; each: tokens of a
// sequence in a step, as drafts are verified (they stay); ubatch: llama.cpp's batches of a prompt; behind a slash: the
// next load of the same model. Prints a line for each load: sequences, tokens in the cache, prompt t/s, generated
// tokens and t/s of all together, ms of a step: least, median, most; MiB of the device that are taken.
#include "bench_devices.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void on_log(ggml_log_level level, const char * text, void *) {
    if (level >= GGML_LOG_LEVEL_ERROR) { fputs(text, stderr); }
}

static double mib_free(ggml_backend_dev_t device) {
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(device, &free, &total);
    return (double) free / (1 << 20);
}

static void add(llama_batch & b, llama_token token, int pos, int seq, bool logits) {
    b.token[b.n_tokens] = token;
    b.pos[b.n_tokens] = pos;
    b.n_seq_id[b.n_tokens] = 1;
    b.seq_id[b.n_tokens][0] = seq;
    b.logits[b.n_tokens++] = logits;
}

struct load {
    std::vector<int> lengths;
    bool shared = false, unified = false;
    int each = 1, n_ubatch = 512;
    ggml_type type = GGML_TYPE_F16;
};

// Arguments from i on, to the next slash or the end; false: said why not.
static bool read_load(int argc, char ** argv, int & i, load & l) {
    for (const char * p = i < argc ? argv[i] : ""; *p; p += strcspn(p, ","), p += *p == ',') {
        int count = 0, length = 0;
        if (sscanf(p, "%dx%d", &count, &length) != 2 || count < 1 || length < 1) {
            fprintf(stderr, "no sequences: %s; write them as 32x8192\n", p);
            return false;
        }
        l.lengths.insert(l.lengths.end(), (size_t) count, length);
    }
    for (i++; i < argc && strcmp(argv[i], "/"); i++) {
        const char * x = argv[i];
        if (!strcmp(x, "shared")) {
            l.shared = true;
        } else if (!strcmp(x, "unified")) {
            l.unified = true;
        } else if (sscanf(x, "each=%d", &l.each) == 1 && l.each >= 1) {
        } else if (sscanf(x, "ubatch=%d", &l.n_ubatch) == 1 && l.n_ubatch >= 1) {
        } else if (!strncmp(x, "type=", 5)) {
            l.type = !strcmp(x + 5, "q8_0") ? GGML_TYPE_Q8_0 : !strcmp(x + 5, "q4_0") ? GGML_TYPE_Q4_0 : GGML_TYPE_F16;
        } else {
            fprintf(stderr, "unknown argument %s\n", x);
            return false;
        }
    }
    i++;
    return !l.lengths.empty();
}

static bool run(llama_model * model, const load & l, int n_gen, ggml_backend_dev_t device, double before) {
    const std::vector<int> & lengths = l.lengths;
    const int each = l.each, n_seq = (int) lengths.size(), n_warm = 4, n_more = (n_gen + n_warm) * each;
    long n_cells = 0;
    for (int x : lengths) { n_cells += x + n_more; }
    if (!l.unified) {
        n_cells = (long) n_seq * ((*std::max_element(lengths.begin(), lengths.end()) + n_more + 255) / 256 * 256);
    }
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx = (uint32_t) n_cells;
    cp.n_batch = 2048;
    cp.n_ubatch = (uint32_t) l.n_ubatch;
    cp.n_seq_max = (uint32_t) n_seq;
    cp.kv_unified = l.unified;
    cp.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    cp.type_k = cp.type_v = l.type;
    llama_context * ctx = llama_init_from_model(model, cp);
    if (!ctx) { return false; }
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_batch b = llama_batch_init(std::max(2048, n_seq * each), 0, 1);
    long n_prompt = 0;
    const double t0 = now();
    for (int s = 0; s < n_seq; s++) {
        const int like = (int) (std::find(lengths.begin(), lengths.end(), lengths[(size_t) s]) - lengths.begin());
        if (l.shared && like < s) {
            llama_memory_seq_cp(llama_get_memory(ctx), like, s, -1, -1);
            continue;
        }
        for (int at = 0; at < lengths[(size_t) s]; at += b.n_tokens) {
            b.n_tokens = 0;
            const int n = std::min(2048, lengths[(size_t) s] - at);
            for (int i = 0; i < n; i++) { add(b, rand() % n_vocab, at + i, s, i == n - 1); }
            if (llama_decode(ctx, b)) { return false; }
            n_prompt += n;
        }
    }
    llama_synchronize(ctx);
    const double prompt = (double) n_prompt / (now() - t0);
    std::vector<double> steps;
    std::vector<int> at = lengths;
    double t1 = 0;
    for (int i = 0; i < n_gen + n_warm; i++) {
        const double t = now();
        if (i == n_warm) { t1 = t; }
        b.n_tokens = 0;
        for (int s = 0; s < n_seq; s++) {
            for (int j = 0; j < each; j++) { add(b, rand() % n_vocab, at[(size_t) s]++, s, true); }
        }
        if (llama_decode(ctx, b)) { return false; }
        llama_synchronize(ctx);
        if (i >= n_warm) { steps.push_back(1e3 * (now() - t)); }
    }
    const double seconds = now() - t1;
    std::sort(steps.begin(), steps.end());
    printf("%d %ld %.0f %ld %.1f %.3f %.3f %.3f %.0f\n", n_seq, (long) n_cells, prompt, (long) n_gen * n_seq * each,
        n_gen * n_seq * each / seconds, steps.front(), steps[steps.size() / 2], steps.back(),
        before - mib_free(device));
    fflush(stdout);
    llama_batch_free(b);
    llama_free(ctx);
    return true;
}

int main(int argc, char ** argv) {
    if (argc < 5) {
        fprintf(stderr,
            "usage: bench_batch MODEL DEVICE N_GEN COUNTxLENGTH[,...] [type=f16|q8_0|q4_0] [shared] [unified] "
            "[each=N] [ubatch=N] [/ COUNTxLENGTH...]\n");
        return 2;
    }
    const int n_gen = atoi(argv[3]);
    std::vector<load> loads;
    for (int i = 4; i < argc;) {
        loads.emplace_back();
        if (!read_load(argc, argv, i, loads.back())) { return 2; }
    }
    llama_log_set(on_log, nullptr);
    ggml_backend_load_all();
    std::vector<ggml_backend_dev_t> devices;
    llama_model_params mp = llama_model_default_params();
    if (!bench_devices(argv[2], devices, mp)) { return 1; }
    const double before = mib_free(devices[0]);
    llama_model * model = llama_model_load_from_file(argv[1], mp);
    if (!model) { return 1; }
    for (const load & l : loads) {
        if (!run(model, l, n_gen, devices[0], before)) { return 1; }
    }
    llama_model_free(model);
    return 0;
}

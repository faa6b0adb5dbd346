// One random tiny model, run with llama.cpp's own cache and then with ours: how far the logits are apart.
//   arch_matrix --list                                   every architecture that this libllama knows, one a line
//   arch_matrix --save META.gguf OUT.gguf                the model with its random weights as a file
//   arch_matrix META.gguf REFERENCE [DEVICE METHOD...]   META.gguf: metadata alone (tests/arch_models.py writes it)
// KVQ_LIB_DIR: where upstream's libraries lie. GGML_BACKEND_PATH: libggml-kvq.so.
// REFERENCE: the device of llama.cpp's own cache, CPU or CUDA0. DEVICE: ours, KVQ0. METHOD: NAME or NAME:KEY=VALUE,...
//
// Both runs have the same weights and flash attention. A prompt goes through in ubatches of 64, then 40 tokens alone.
// KVQ_MATRIX_IMAGE=1: tokens 100 to 195 are an image of 8 rows and 12 columns, random embeddings with four positions
// each, as llama.cpp's mtmd gives them to models with M-RoPE. KVQ_MATRIX_THREADS: default 1.
// KVQ_MATRIX_SAME=1: all tokens are the same one, and all parts of the image. Keys of the first layer are then the same
// at every position once their rotary embedding is undone; "@same TEXT IMAGE" tells how far they are apart. What
// happens is told line by line on stderr, so that a program that aborts has said where it was:
//   @reference ok N | @reference failed REASON           N: logits
//   @begin METHOD
//   @end METHOD nmse X | @end METHOD refused | @end METHOD failed REASON
// refused: llama.cpp made no context; the reason is in the lines before.
#include "ggml-backend.h"
#include "gguf.h"
#include "llama-arch.h"
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <string>
#include <vector>

static const int N_PROMPT = 360, N_STEPS = 40, N_UBATCH = 64;

// ---------------------------------------------------------------- weights

struct random_numbers {
    uint64_t state;
    double next() { // uniform within -1..1
        state += 0x9e3779b97f4a7c15u;
        uint64_t z = state;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        z ^= z >> 31;
        return (double) (z >> 11) / (double) (1ull << 52) - 1.0;
    }
};

static bool ends_with(const std::string & text, const char * end) {
    const size_t n = strlen(end);
    return text.size() >= n && text.compare(text.size() - n, n, end) == 0;
}

static bool has(const std::string & text, const char * part) { return text.find(part) != std::string::npos; }

// Signals keep their size from layer to layer: gains near one, matrices with columns of length one.
static void set_weights(ggml_tensor * t, void *) {
    const std::string name = t->name;
    uint64_t seed = 0xcbf29ce484222325u;
    for (const char c : name) { seed = (seed ^ (uint8_t) c) * 0x100000001b3u; }
    random_numbers random = { seed };
    double centre = 0.0, spread = std::sqrt(3.0 / (double) t->ne[0]);
    if (has(name, "norm") && ends_with(name, "weight")) {
        centre = 1.0, spread = 0.2;
    } else if (has(name, "rope_f")) { // factors of frequencies
        centre = 2.0, spread = 1.0;
    } else if (has(name, "ssm_a")) { // states decay
        centre = -1.0, spread = 0.5;
    } else if (ends_with(name, "_scale") || ends_with(name, ".scale")) {
        centre = 1.0, spread = 0.1;
    } else if (ends_with(name, "bias") || (t->ne[1] == 1 && t->ne[2] == 1)) {
        spread = 0.2;
    } else if (has(name, "token_embd")) {
        spread = 1.7;
    }
    const size_t n = (size_t) ggml_nelements(t);
    std::vector<float> x(n);
    for (float & v : x) { v = (float) (centre + spread * random.next()); }
    if (t->type == GGML_TYPE_F32) {
        ggml_backend_tensor_set(t, x.data(), 0, ggml_nbytes(t));
    } else {
        std::vector<ggml_fp16_t> h(n);
        ggml_fp32_to_fp16_row(x.data(), h.data(), (int64_t) n);
        ggml_backend_tensor_set(t, h.data(), 0, ggml_nbytes(t));
    }
}

// ---------------------------------------------------------------- one run

static llama_model * make_model(gguf_context * meta, const char * device, bool all_layers = false) {
    ggml_backend_dev_t devices[2] = { ggml_backend_dev_by_name(device), nullptr };
    if (!devices[0]) {
        fprintf(stderr, "no device %s\n", device);
        return nullptr;
    }
    if (ggml_backend_dev_type(devices[0]) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        devices[0] = nullptr; // llama.cpp's last resort, never in the list
    }
    llama_model_params p = llama_model_default_params();
    p.devices = devices;
    p.n_gpu_layers = 999;
    p.load_mtp = all_layers; // of multi-token prediction too
    p.progress_callback = [](float, void *) { return true; };
    return llama_model_init_from_user(meta, set_weights, nullptr, p);
}

static llama_context * make_context(llama_model * model, bool embeddings) {
    llama_context_params p = llama_context_default_params();
    const char * threads = getenv("KVQ_MATRIX_THREADS");
    p.n_ctx = 512;
    p.n_batch = 512;
    p.n_ubatch = N_UBATCH;
    p.n_threads = p.n_threads_batch = threads ? atoi(threads) : 1;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    p.embeddings = embeddings;
    return llama_init_from_model(model, p);
}

static const float RULED_OUT = 1e30f; // tokens that llama.cpp forbids, as chameleon's images

struct result {
    bool embeddings = false; // instead of logits
    std::vector<float> x;
    std::string failed;
    double power() const {
        double sum = 0.0;
        for (const float v : x) { sum += std::fabs(v) < RULED_OUT ? (double) v * v : 0.0; }
        return sum;
    }
};

static void take(llama_context * ctx, const llama_model * model, int n, result & r) {
    const int width = r.embeddings ? llama_model_n_embd_out(model) : llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int i = 0; i < n; i++) {
        const float * row = r.embeddings ? llama_get_embeddings_ith(ctx, i) : llama_get_logits_ith(ctx, i);
        if (!row) {
            r.failed = "nothing comes out for token " + std::to_string(i);
            return;
        }
        r.x.insert(r.x.end(), row, row + width);
    }
}

static const int IMAGE_AT = 100, IMAGE_ROWS = 8, IMAGE_COLUMNS = 12, IMAGE = IMAGE_ROWS * IMAGE_COLUMNS;

// tokens [first, first + n) with every token's logits; behind an image positions go on from its longer side
static bool step(llama_context * ctx, const std::vector<llama_token> & tokens, int first, int n, bool encode,
    bool behind_image, result & r) {
    llama_batch b = llama_batch_init(n, 0, 1);
    b.n_tokens = n;
    for (int i = 0; i < n; i++) {
        b.token[i] = tokens[(size_t) (first + i)];
        b.pos[i] = first + i - (behind_image ? IMAGE - std::max(IMAGE_ROWS, IMAGE_COLUMNS) : 0);
        b.n_seq_id[i] = 1;
        b.seq_id[i][0] = 0;
        b.logits[i] = 1;
    }
    const int status = encode ? llama_encode(ctx, b) : llama_decode(ctx, b);
    llama_batch_free(b);
    if (status) {
        r.failed = std::string(encode ? "llama_encode" : "llama_decode") + " of " + std::to_string(n) + " tokens at " +
            std::to_string(first) + " gives " + std::to_string(status);
    }
    return status == 0;
}

static bool image_step(llama_context * ctx, const llama_model * model, result & r) {
    random_numbers random = { 7 };
    std::vector<float> embd((size_t) IMAGE * llama_model_n_embd_inp(model));
    const size_t n_own = getenv("KVQ_MATRIX_SAME") ? embd.size() / IMAGE : embd.size();
    for (size_t i = 0; i < embd.size(); i++) { embd[i] = i < n_own ? (float) (1.7 * random.next()) : embd[i - n_own]; }
    std::vector<llama_pos> pos(4 * IMAGE, 0); // all times, all rows, all columns, and one more that is 0
    std::vector<int32_t> n_seq(IMAGE, 1);
    std::vector<int8_t> logits(IMAGE, 1);
    llama_seq_id zero = 0;
    std::vector<llama_seq_id *> seq(IMAGE + 1, &zero);
    seq[IMAGE] = nullptr;
    for (int i = 0; i < IMAGE; i++) {
        pos[(size_t) i] = IMAGE_AT;
        pos[(size_t) (IMAGE + i)] = IMAGE_AT + i / IMAGE_COLUMNS;
        pos[(size_t) (2 * IMAGE + i)] = IMAGE_AT + i % IMAGE_COLUMNS;
    }
    const int status =
        llama_decode(ctx, { IMAGE, nullptr, embd.data(), pos.data(), n_seq.data(), seq.data(), logits.data() });
    if (status) { r.failed = "llama_decode of an image gives " + std::to_string(status); }
    return status == 0;
}

static result run(llama_context * ctx, const llama_model * model, bool embeddings) {
    result r;
    r.embeddings = embeddings;
    random_numbers random = { 42 };
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<llama_token> tokens;
    for (int i = 0; i < N_PROMPT + N_STEPS; i++) {
        tokens.push_back((llama_token) ((random.next() + 1.0) / 2.0 * (n_vocab - 8)) + 4);
        tokens.back() = getenv("KVQ_MATRIX_SAME") ? 7 : tokens.back();
    }
    if (!llama_get_memory(ctx)) { // no cache at all: one ubatch
        if (step(ctx, tokens, 0, N_UBATCH, true, false, r)) { take(ctx, model, N_UBATCH, r); }
        return r;
    }
    if (llama_model_has_encoder(model) && !step(ctx, tokens, 0, N_UBATCH, true, false, r)) { return r; }
    if (!llama_model_has_decoder(model)) {
        take(ctx, model, N_UBATCH, r);
        return r;
    }
    const bool image = getenv("KVQ_MATRIX_IMAGE") != nullptr;
    int n = image ? IMAGE_AT : N_PROMPT;
    if (step(ctx, tokens, 0, n, false, false, r)) { take(ctx, model, n, r); }
    if (image && r.failed.empty() && image_step(ctx, model, r)) {
        take(ctx, model, IMAGE, r);
        n = N_PROMPT - IMAGE_AT - IMAGE;
        if (step(ctx, tokens, N_PROMPT - n, n, false, true, r)) { take(ctx, model, n, r); }
    }
    for (int i = 0; i < N_STEPS && r.failed.empty(); i++) {
        if (step(ctx, tokens, N_PROMPT + i, 1, false, image, r)) { take(ctx, model, 1, r); }
    }
    return r;
}

static std::string not_finite(const result & r) {
    for (size_t i = 0; i < r.x.size(); i++) {
        if (!std::isfinite(r.x[i])) { return "logit " + std::to_string(i) + " is not finite"; }
    }
    return "";
}

// How far keys of the first layer, without rotary embedding, are from those of the first cell of their kind.
static void tell_same(const char * backend) {
    using rows_fn = int (*)(int, int, int, int, int, int, float *);
    void * lib = dlopen(backend, RTLD_NOW | RTLD_NOLOAD);
    const rows_fn rows = lib ? (rows_fn) dlsym(lib, "kvq_cache_rows") : nullptr;
    std::vector<float> first(1 << 14, NAN), row(first.size(), NAN);
    int cache = 0;
    while (rows && cache < 4 && rows(cache, 0, 0, 0, 0, 1, first.data())) { cache++; } // the one with layer 0
    double apart[2] = { 0.0, 0.0 };
    const bool image = getenv("KVQ_MATRIX_IMAGE") != nullptr;
    for (int c = 1; rows && c < N_PROMPT + N_STEPS; c++) {
        const bool shown = image && c >= IMAGE_AT && c < IMAGE_AT + IMAGE;
        if (rows(cache, 0, 0, 0, shown ? IMAGE_AT : 0, 1, first.data()) || rows(cache, 0, 0, 0, c, 1, row.data())) {
            fprintf(stderr, "no keys of cell %d\n", c);
            return;
        }
        double off = 0.0, size = 0.0;
        for (size_t i = 0; i < row.size() && !std::isnan(row[i]); i++) {
            off += ((double) row[i] - first[i]) * ((double) row[i] - first[i]);
            size += (double) first[i] * first[i];
        }
        apart[shown] = std::max(apart[shown], size > 0.0 ? std::sqrt(off / size) : INFINITY);
    }
    fprintf(stderr, "@same %.2e %.2e\n", apart[0], apart[1]);
    dlclose(lib);
}

int main(int argc, char ** argv) {
    if (argc == 2 && !strcmp(argv[1], "--list")) {
        for (int a = 0; a < LLM_ARCH_UNKNOWN; a++) { printf("%s\n", llm_arch_name((llm_arch) a)); }
        return 0;
    }
    if (argc < 3) {
        fprintf(stderr,
            "usage: [KVQ_LIB_DIR=FOLDER] [GGML_BACKEND_PATH=FILE] arch_matrix --list | --save META.gguf OUT.gguf | "
            "META.gguf REFERENCE [DEVICE METHOD[:KEY=VALUE,...]...]\n");
        return 2;
    }
    llama_log_set(
        [](ggml_log_level level, const char * text, void *) {
            if (level >= GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_CONT) { fputs(text, stderr); }
        },
        nullptr);
    const char * backend = getenv("GGML_BACKEND_PATH");
    ggml_backend_load_all_from_path(getenv("KVQ_LIB_DIR")); // also the library that GGML_BACKEND_PATH names
    const bool save = argc == 4 && !strcmp(argv[1], "--save");
    gguf_context * meta = gguf_init_from_file(argv[save ? 2 : 1], { /*no_alloc =*/true, /*ctx =*/nullptr });
    if ((argc > 3 && !backend && !save) || !meta) {
        fprintf(stderr, "%s\n", !meta ? "cannot read the metadata" : "GGML_BACKEND_PATH has to name libggml-kvq.so");
        return 2;
    }
    if (save) {
        llama_model * model = make_model(meta, "CPU", true);
        if (model) { llama_model_save_to_file(model, argv[3]); }
        return model ? 0 : 1;
    }
    setenv("KVQ_MODEL", argv[1], 1);
    llama_model * upstream = make_model(meta, argv[2]);
    result reference;
    bool embeddings = false;
    for (int attempt = 0; upstream && attempt < 2 && !(reference.power() > 0.0); attempt++) {
        embeddings = attempt > 0; // a model without logits gives embeddings
        llama_context * ctx = make_context(upstream, embeddings);
        if (!ctx) {
            reference.failed = "no context";
            break;
        }
        reference = run(ctx, upstream, embeddings);
        llama_free(ctx);
    }
    const double power = reference.power();
    reference.failed = !upstream    ? "no model"
        : !reference.failed.empty() ? reference.failed
        : power > 0.0               ? not_finite(reference)
                                    : "zeros come out";
    if (!reference.failed.empty()) {
        fprintf(stderr, "@reference failed %s\n", reference.failed.c_str());
        return 1;
    }
    fprintf(stderr, "@reference ok %zu\n", reference.x.size());
    llama_model_free(upstream);
    llama_model * ours = nullptr;
    for (int i = 4; i < argc; i++) {
        const std::string what = argv[i];
        const size_t colon = std::min(what.find(':'), what.size());
        setenv("KVQ_METHOD", what.substr(0, colon).c_str(), 1);
        setenv("KVQ_OPTS", what.substr(std::min(colon + 1, what.size())).c_str(), 1);
        fprintf(stderr, "@begin %s\n", what.c_str());
        fflush(stderr);
        ours = ours ? ours : make_model(meta, argv[3]);
        llama_context * ctx = ours ? make_context(ours, embeddings) : nullptr;
        if (!ctx) {
            fprintf(stderr, "@end %s refused\n", what.c_str());
            continue;
        }
        result r = run(ctx, ours, embeddings);
        if (getenv("KVQ_MATRIX_SAME")) { tell_same(backend); }
        llama_free(ctx);
        r.failed = r.failed.empty() ? not_finite(r) : r.failed;
        if (r.failed.empty() && r.x.size() != reference.x.size()) {
            r.failed = std::to_string(r.x.size()) + " logits instead of " + std::to_string(reference.x.size());
        }
        if (!r.failed.empty()) {
            fprintf(stderr, "@end %s failed %s\n", what.c_str(), r.failed.c_str());
            continue;
        }
        double error = 0.0;
        for (size_t j = 0; j < r.x.size(); j++) {
            const double d = (double) r.x[j] - reference.x[j];
            error += r.x[j] != reference.x[j] ? d * d : 0.0;
        }
        fprintf(stderr, "@end %s nmse %.3e\n", what.c_str(), error / power);
    }
    llama_model_free(ours);
    return 0;
}

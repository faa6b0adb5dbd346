// Perplexity of a text and a short continuation, by any llama.cpp whose headers this was compiled with:
//   tree_perplexity MODEL TEXT N_CTX CHUNKS [DEVICE|- [off]]
// Prints "ggml VERSION ppl X", "text Y" and "again Z". Windows of N_CTX tokens as llama-perplexity's, the second half
// of each counts; batches of 128, so that earlier pages are read from codes. Y goes on behind half a window, and so
// does Z after that half was saved, cleared and restored. "off": without flash attention.
// scripts/check_llama_versions.py compiles and runs it.
#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

static int fail(const char * what) {
    fprintf(stderr, "tree_perplexity: %s\n", what);
    return 1;
}

static void quiet(ggml_log_level level, const char * text, void *) {
    if (level >= GGML_LOG_LEVEL_WARN) { fputs(text, stderr); }
}

// Decodes `tokens` at position `at`; logits of every token.
static bool decode(llama_context * ctx, const std::vector<llama_token> & tokens, int first, int n, int at) {
    llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;
    for (int i = 0; i < n; i++) {
        batch.token[i] = tokens[(size_t) (first + i)];
        batch.pos[i] = at + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    const bool ok = llama_decode(ctx, batch) == 0;
    llama_batch_free(batch);
    return ok;
}

static double nll(const float * logits, int n_vocab, llama_token next) {
    const float top = *std::max_element(logits, logits + n_vocab);
    double sum = 0;
    for (int i = 0; i < n_vocab; i++) { sum += exp((double) logits[i] - top); }
    return log(sum) - ((double) logits[next] - top);
}

static double perplexity(
    llama_context * ctx, const std::vector<llama_token> & tokens, int n_ctx, int n_chunks, int n_batch, int n_vocab) {
    double sum = 0;
    int counted = 0;
    for (int c = 0; c < n_chunks; c++) {
        llama_memory_clear(llama_get_memory(ctx), true);
        for (int at = 0; at < n_ctx; at += n_batch) {
            const int first = c * n_ctx + at;
            if (!decode(ctx, tokens, first, std::min(n_batch, n_ctx - at), at)) { return 0; }
            for (int i = 0; i < n_batch && at + i + 1 < n_ctx; i++) {
                if (at + i < n_ctx / 2) { continue; }
                sum += nll(llama_get_logits_ith(ctx, i), n_vocab, tokens[(size_t) (first + i + 1)]);
                counted++;
            }
        }
    }
    return exp(sum / counted);
}

static std::string text_of(const llama_vocab * vocab, llama_token token) {
    char piece[128];
    const int length = llama_token_to_piece(vocab, token, piece, sizeof(piece), 0, false);
    std::string text(piece, (size_t) std::max(length, 0));
    for (char & c : text) { c = (unsigned char) c < 0x20 ? ' ' : c; }
    return text;
}

// 16 of the likeliest tokens behind `token`, which stands at position `at`; "": decoding failed.
static std::string go_on(llama_context * ctx, const llama_vocab * vocab, llama_token token, int at, int n_vocab) {
    std::string said = text_of(vocab, token);
    for (int i = 0; i < 16; i++) {
        if (!decode(ctx, { token }, 0, 1, at + i)) { return ""; }
        const float * logits = llama_get_logits_ith(ctx, 0);
        token = (llama_token) (std::max_element(logits, logits + n_vocab) - logits);
        said += text_of(vocab, token);
    }
    return said;
}

// Behind the first n tokens; again = the same after the state was saved, the cache cleared and the state restored.
static bool texts(llama_context * ctx, const llama_vocab * vocab, const std::vector<llama_token> & tokens, int n,
    int n_batch, std::string & said, std::string & again) {
    const int n_vocab = llama_vocab_n_tokens(vocab);
    llama_memory_clear(llama_get_memory(ctx), true);
    for (int at = 0; at < n; at += n_batch) {
        if (!decode(ctx, tokens, at, n_batch, at)) { return false; }
    }
    const float * logits = llama_get_logits_ith(ctx, n_batch - 1);
    const llama_token first = (llama_token) (std::max_element(logits, logits + n_vocab) - logits);
    std::vector<uint8_t> state(llama_state_seq_get_size(ctx, 0));
    state.resize(llama_state_seq_get_data(ctx, state.data(), state.size(), 0));
    said = go_on(ctx, vocab, first, n, n_vocab);
    llama_memory_clear(llama_get_memory(ctx), true);
    if (state.empty() || llama_state_seq_set_data(ctx, state.data(), state.size(), 0) == 0) { return false; }
    again = go_on(ctx, vocab, first, n, n_vocab);
    return !said.empty() && !again.empty();
}

int main(int argc, char ** argv) {
    if (argc < 5) { return fail("MODEL TEXT N_CTX CHUNKS [DEVICE|- [off]]"); }
    const int n_ctx = atoi(argv[3]), n_chunks = atoi(argv[4]), n_batch = 128;
    const char * device = argc > 5 && strcmp(argv[5], "-") != 0 ? argv[5] : nullptr;
    const bool flash = argc < 7 || strcmp(argv[6], "off") != 0;
    llama_log_set(quiet, nullptr);
    ggml_backend_load_all();
    llama_backend_init();
    ggml_backend_dev_t devices[2] = { device ? ggml_backend_dev_by_name(device) : nullptr, nullptr };
    if (device && !devices[0]) { return fail("there is no such device"); }
    llama_model_params mp = llama_model_default_params();
    mp.devices = devices;
    mp.n_gpu_layers = device ? 999 : 0;
    llama_model * model = llama_model_load_from_file(argv[1], mp);
    if (!model) { return fail("the model does not load"); }
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx = (uint32_t) n_ctx;
    cp.n_batch = cp.n_ubatch = (uint32_t) n_batch;
    cp.n_threads = cp.n_threads_batch = 2;
    cp.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * ctx = llama_init_from_model(model, cp);
    if (!ctx) { return fail("no context"); }
    std::ifstream file(argv[2]);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const llama_vocab * vocab = llama_model_get_vocab(model);
    std::vector<llama_token> tokens(text.size() + 8);
    const int n =
        llama_tokenize(vocab, text.data(), (int32_t) text.size(), tokens.data(), (int32_t) tokens.size(), true, false);
    if (n < n_ctx * n_chunks) { return fail("the text is too short"); }
    const double ppl = perplexity(ctx, tokens, n_ctx, n_chunks, n_batch, llama_vocab_n_tokens(vocab));
    std::string said, again;
    if (ppl == 0 || !texts(ctx, vocab, tokens, n_ctx / 2, n_batch, said, again)) {
        return fail("decoding or restoring failed");
    }
    printf("ggml %s ppl %.6f\ntext %s\nagain %s\n", ggml_version(), ppl, said.c_str(), again.c_str());
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}

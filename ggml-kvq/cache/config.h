// What the user asked for: method, options, calibrated data, model. From kvq_configure (per thread) or the environment.
// Implemented in gguf/config.cpp, which reads GGUF files.
#pragma once

#include "methods/method.h"

#include <cstdint>
#include <string>
#include <vector>

struct kvq_config {
    const kvq_method * method = nullptr;
    kvq_options options;
    std::string options_text, config_path, model_path;
    std::string asked_text;  // options as the load line shows them
    std::string config_from; // kvq_decision::config_from
    bool lacks_means = false;
    bool is_instead = false; // a method was not named: this one fits itself to the declared type
};

// The model's shape as its GGUF metadata gives it. Empty arch: no file known.
struct kvq_model_info {
    std::string arch;
    std::string method;      // kvq.method, when the file carries one
    std::string hash;        // 64-bit FNV-1a of the architecture and every token, in hexadecimal
    bool calibrated = false; // the file holds kvq.version and calibrated data
    int n_layer = 0;
    int head_size_k = 0, head_size_v = 0;         // 0: unknown
    int head_size_k_swa = 0, head_size_v_swa = 0; // of sliding-window layers, when they differ
    // Multi-head latent attention: keys of `latent` channels and the rotary ones behind them, values are the latent
    // ones. 0: no latent attention
    int latent = 0, latent_swa = 0;
    int latent_of(int n_embd_k) const; // of a cache that keeps keys of this width, 0: no latent attention
    int n_head_kv = 0;                 // of the layer that has most, 0: unknown
    std::vector<int> n_heads_kv;       // per layer; empty: all have as many
    int heads_of(int il) const {
        return il >= 0 && (size_t) il < n_heads_kv.size() ? n_heads_kv[(size_t) il] : n_head_kv;
    }
    int indexer_key = 0;          // width of the keys of sparse attention's indexer, 0: no indexer
    int window = 0;               // cells that sliding-window layers see, 0: no layer has a window
    int n_layer_nextn = 0;        // last layers, for multi-token prediction
    std::vector<uint8_t> attends; // per layer: it has attention; empty: every layer has, as far as the file tells
    std::vector<uint8_t> slides;  // per layer: it has a sliding window; empty: the file does not say
    int key_of(int il) const {    // channels of a head's key; 0: layers differ, and the file does not say how
        const bool differ = head_size_k_swa && head_size_k_swa != head_size_k;
        if (!differ) { return head_size_k; }
        const bool known = il >= 0 && (size_t) il < slides.size();
        return !known ? 0 : slides[(size_t) il] ? head_size_k_swa : head_size_k;
    }

    int n_attention() const;     // layers with attention
    int number_of(int il) const; // of layer il among them
};

// Status and one line in err; out is complete on KVQ_OK. A missing method means f16, or, with `instead`, the method
// that fits itself to bits, with these options.
kvq_status kvq_config_current(
    kvq_config & out, kvq_model_info & model, std::string & err, const std::string & instead = "");

// The same for the caches of a draft model (speculative decoding): KVQ_METHOD_DRAFT, KVQ_OPTS_DRAFT, KVQ_MODEL_DRAFT.
// A method's calibrated data must be in the draft model itself.
kvq_status kvq_config_draft(kvq_config & out, kvq_model_info & model, std::string & err);
bool kvq_draft_asked(void); // KVQ_METHOD_DRAFT is set

// Options that a GGUF file sets for a method (kvq.<method>.<key> of the keys in its table) as "k=v,k=v", without
// those that `given` rules out: a key the user set, or one of a group that the user set another of (bits of keys and
// values; preset and splits). Refuses a key that is no option, and a value that no option takes: the method without
// it would be another one.
kvq_status kvq_stored_options(
    const std::string & path, const kvq_method & m, const std::string & given, std::string & out, std::string & err);

kvq_status kvq_read_model_info(const std::string & path, kvq_model_info & out, std::string & err);

// Shape of a cache layer from its row widths; the file's head sizes, else a guess that the first graph corrects.
kvq_layer_shape kvq_guess_shape(const kvq_model_info & m, int il, int n_embd_k, int n_embd_v);

// A message that names a launcher's flag, in the words of who is asking: a program of the user's own sets variables.
std::string kvq_words_for_caller(const std::string & text);

void kvq_set_error(const std::string & line); // kvq_last_error of this thread
int kvq_verbosity(void);

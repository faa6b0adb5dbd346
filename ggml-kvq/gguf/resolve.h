// Which method, which options and which calibrated data hold. The rule stands in docs/llama-cpp.md ("What holds") and
// is written here alone: kvq_resolve answers launchers and bindings, kvq_config_current the caches of any program.
#pragma once

#include "cache/config.h"

#include <string>

constexpr const char * KVQ_MEASURED = "measured"; // on the model's first use (measured.h)

struct kvq_decision {
    // *_from: "flag" (also an argument of a binding), "environment", "config" (the file of calibrated data names it),
    // "embedded" (the model's metadata), "sidecar" (beside the model), KVQ_MEASURED (in the cache folder), "default";
    // "": no door names one.
    std::string method, method_from; // method "": llama.cpp's own cache; "none": that, asked for by name
    std::string method_words;        // for messages: "--kv-method kivi", "KVQ_METHOD=kivi"
    std::string opts, opts_from;     // what was asked for; options that a file sets are not in it
    std::string config, config_from; // a file besides the model; "" with "embedded": the model itself holds the data
    bool lacks_means = false;        // it goes better with channel means, and the data have no means
    int wants = 0;                   // kvq_resolved.wants_means
    std::string note;                // what was given and is not used, or ""
};

std::string kvq_path_beside(const std::string & model); // MODEL.kvq.gguf of MODEL.gguf

// Status and one line in err. Reads headers alone: kvq_check_calibrated tells whether data are whole and of this model.
kvq_status kvq_decide(const kvq_request & request, kvq_model_info & model, kvq_decision & out, std::string & err);

// All options of the decided method: those that its file sets, then those asked for.
kvq_status kvq_all_options(const kvq_decision & d, const kvq_model_info & model, const std::string & model_path,
    std::string & out, std::string & err);

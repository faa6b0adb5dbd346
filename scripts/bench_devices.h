// Devices of a benchmark: NAME[,NAME...], a model's layers over them, or NAME,NAME...:tensor, parts of each layer.
#pragma once

#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

// false: there is no such device, and that is said. all: lives as long as the model is loaded; NULL at its end
inline bool bench_devices(std::string text, std::vector<ggml_backend_dev_t> & all, llama_model_params & params) {
    const size_t colon = text.find(':');
    const bool tensor = colon != std::string::npos && text.substr(colon) == ":tensor";
    text.resize(tensor ? colon : text.size());
    for (size_t at = 0; at <= text.size();) {
        const size_t end = std::min(text.find(',', at), text.size());
        all.push_back(ggml_backend_dev_by_name(text.substr(at, end - at).c_str()));
        if (!all.back()) {
            fprintf(stderr, "no device %s\n", text.substr(at, end - at).c_str());
            return false;
        }
        at = end + 1;
    }
    all.push_back(nullptr);
    params.devices = all.data();
    params.n_gpu_layers = 999;
    params.split_mode = tensor ? LLAMA_SPLIT_MODE_TENSOR : LLAMA_SPLIT_MODE_LAYER;
    return true;
}

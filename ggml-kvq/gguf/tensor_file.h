// Tensors of a GGUF model on disk, row by row: weights are looked at without being loaded.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

struct ggml_context;
struct ggml_tensor;
struct gguf_context;

class kvq_tensor_file {
public:
    explicit kvq_tensor_file(const std::string & path);
    ~kvq_tensor_file();
    kvq_tensor_file(const kvq_tensor_file &) = delete;
    kvq_tensor_file & operator=(const kvq_tensor_file &) = delete;

    bool ok() const { return f; }
    const gguf_context * header() const { return g; }
    const ggml_tensor * tensor(const std::string & name) const; // its shape and type; NULL: it is not in this file
    // Row r as f32. False: it cannot be read, or holds a value that is not finite.
    bool row(const ggml_tensor * t, int64_t r, std::vector<float> & out) const;

private:
    gguf_context * g = nullptr;
    ggml_context * shapes = nullptr;
    FILE * f = nullptr;
};

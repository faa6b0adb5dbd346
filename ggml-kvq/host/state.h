// Rows of cache tensors on their way out and in: what llama.cpp saves and restores, and a checksum of it
// (store/mark.h).
//
// Rows that carry one are refused unless they are the rows that were saved, by a model with the same weights. Rows
// without one, of other builds and older files, need only be finite. llama.cpp has no way to be told that setting a
// tensor failed. Restoring from a file, it reads every tensor into one staging buffer, and ends well when that
// throws; restoring from memory it sets tensors in a destructor, which must not throw. So the first throws, and the
// second leaves a cache that does not compute until it is cleared.
#pragma once

#include "store/state_blocks.h"
#include "store/mark.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

struct ggml_tensor;
struct kvq_arrivals;
struct kvq_kv_layer;

struct kvq_state_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// bytes [offset, offset + size) of a cache tensor in the nominal f16 layout
void kvq_read_rows(const ggml_tensor * tensor, void * data, size_t offset, size_t size);
// may_throw: the caller is llama.cpp in this process, not another machine's
void kvq_write_rows(const ggml_tensor * tensor, const void * data, size_t offset, size_t size, bool may_throw);
void kvq_fill_rows(const ggml_tensor * tensor, uint8_t value, size_t offset, size_t size);
std::string kvq_state_missing(const kvq_arrivals & in);               // of a tensor that is not whole
bool kvq_copy_rows(const ggml_tensor * src, const ggml_tensor * dst); // whole streams; false: as rows

#pragma once

#include "store/mark.h"
#include "store/state_blocks.h"

#include <cstdint>
#include <string>
#include <vector>

struct kvq_kv_layer;

// What has come in of the tensor that is being restored. llama.cpp sets its rows in their order, in as many calls as
// there are runs of free cells.
struct kvq_arrivals {
    const kvq_kv_layer * layer = nullptr;
    bool value = false;
    int stream = -1;
    kvq_mark_stream marks;          // of its rows so far; found: those whose rows have not all come
    std::vector<uint8_t> blob;      // blocks as they are (state=compact), until all of them have come
    std::vector<kvq_blob_run> runs; // where their rows go
    std::vector<kvq_blob_run> rows; // where those went that are rows
    std::vector<uint8_t> owner[2];  // the last compact keys and values: a lane may share their codes
    bool noted = false;
    const void * data = nullptr;                                                 // where the last call's rows were
    std::string damage;                                                          // why rows were refused
    void begin(const kvq_kv_layer * its_layer, bool its_value, int its_stream) { // of the next tensor
        marks = kvq_mark_stream();
        blob.clear();
        runs.clear();
        rows.clear();
        layer = its_layer;
        value = its_value;
        stream = its_stream;
    }
    void reset() { *this = kvq_arrivals(); }
};

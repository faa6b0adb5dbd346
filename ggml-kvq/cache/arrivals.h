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
    std::vector<uint64_t> hashes;     // of its rows so far
    std::vector<kvq_mark_found> open; // marks whose rows have not all come
    std::vector<uint8_t> blob;        // a compact tensor, until all of it has come
    std::vector<kvq_blob_run> runs;   // where its rows go
    std::vector<uint8_t> owner[2];    // the last compact keys and values: a lane may share their codes
    bool noted = false;
    const void * data = nullptr;                                                 // where the last call's rows were
    std::string damage;                                                          // why rows were refused
    void begin(const kvq_kv_layer * its_layer, bool its_value, int its_stream) { // of the next tensor
        hashes.clear();
        open.clear();
        blob.clear();
        runs.clear();
        layer = its_layer;
        value = its_value;
        stream = its_stream;
    }
    void reset() { *this = kvq_arrivals(); }
};

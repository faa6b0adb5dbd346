#pragma once

#include "store/mark.h"
#include "store/state_blocks.h"

#include <algorithm>
#include <cstdint>
#include <map>
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
    int n = 0;                      // rows so far
    // Compact parts of this tensor, and of the last keys and values that had some, by their first row: a lane may share
    // the codes of the one before it.
    std::map<int, std::vector<uint8_t>> parts, owner[2];
    bool noted = false;
    std::vector<uint16_t> copy;                                                  // rows that are changed in place
    const void * data = nullptr;                                                 // where the last call's rows were
    std::string damage;                                                          // why rows were refused
    void begin(const kvq_kv_layer * its_layer, bool its_value, int its_stream) { // of the next tensor
        const auto has_bytes = [](const auto & part) { return !part.second.empty(); };
        if (std::any_of(parts.begin(), parts.end(), has_bytes)) { owner[value].swap(parts); }
        for (auto & part : parts) { part.second.clear(); } // their memory serves the next tensor
        n = 0;
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

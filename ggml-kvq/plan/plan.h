// What a method makes of a layer, as plain data: how keys and values are coded, what stays f16, and the parts that
// act on them. Part NAME is policy/NAME.cpp (policy/policies.inc). To use a part, a plan needs only its name and the
// values that its file documents.
#pragma once

#include "base/constants.h"
#include "ggml-kvq.h"

#include <string>
#include <utility>
#include <vector>

// Values `sort` of part transform
enum {
    KVQ_SORT_BLOCKS = 1, // keys in halves: channels take the order and the gains of kvq_order
    KVQ_SORT_GAINS,      // keys in one block: channels stay where they are, with those gains
};

struct kvq_part {
    std::string name;
    std::vector<std::pair<std::string, double>> values;
    std::string text; // a value that is a text

    double get(const char * key, double otherwise = 0.0) const {
        for (const auto & v : values) {
            if (v.first == key) { return v.second; }
        }
        return otherwise;
    }
};

// Where sealed blocks lie. HOST: the device reads them in the host's memory. AUTO: there where it has no room for them.
enum class kvq_place { DEVICE, HOST, AUTO };

struct kvq_layer_plan {
    kvq_codec k = {}, v = {};
    int window = 128;                    // cells kept f16 behind the newest one
    kvq_place place = kvq_place::DEVICE; // of sealed blocks
    bool fills = false;                  // window=auto: room that blocks do not take yet holds more, `window` at least
    int sinks = 0;                       // first cells of a stream, f16 for good
    int flags = 0;                       // KVQ_ATTN_*
    std::vector<kvq_part> parts;         // in the order in which they act

    const kvq_part * part(const char * name) const {
        for (const kvq_part & p : parts) {
            if (p.name == name) { return &p; }
        }
        return nullptr;
    }
    void add(
        const char * name, std::vector<std::pair<std::string, double>> values = {}, const std::string & text = "") {
        parts.push_back({ name, std::move(values), text });
    }
};

// What a method may know when it plans a layer. A model's layers may lie in several caches (on several devices, or
// sliding-window layers apart from others), so methods count by number.
struct kvq_layer_context {
    int number;  // of this layer among the model's layers with attention, 0 = first
    int n_layer; // how many those are (scales presets)
    kvq_layer_shape shape;
    const kvq_layer_shape * prev; // previous layer of the same cache, NULL for the first
    int gap = 0;                  // layers with attention between prev and this one; they are in another cache
    // How far up a method's ladder of plans this cache is, for methods that have one (n_levels); -1: no cache, the
    // options alone are looked at.
    int level = 0;
};

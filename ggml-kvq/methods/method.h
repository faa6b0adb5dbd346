// A method is data: which block type each layer's keys and values take, what layers share, what stays f16.
// Adding one: methods/<name>.cpp with a kvq_method, one row in methods.inc, python/ggml_kvq/reference/<name>.py.
#pragma once

#include "ggml-kvq.h"
#include "options.h"

#include <string>

// How one role (K or V) of one layer is kept.
struct kvq_lane_plan {
    kvq_codec codec = {};
    bool shares_codes = false; // codes of the previous layer's lane; own parameters
    bool parted = false;       // would share, but the layer of those codes is in another cache: own codes
    bool chained = false;      // read through the layers before it (cache/chain.h)
    int inputs[2] = {};        // of its predictors: keys; values of the layer before. 0: not predicted
};

struct kvq_layer_plan {
    kvq_lane_plan k, v;
    int window = 128;             // cells kept f16 behind the newest one
    int sinks = 0;                // first cells of a stream, f16 for good
    int flags = 0;                // KVQ_ATTN_*
    bool pre_rope = false;        // sealed keys are kept before rotary embedding
    bool holds_positions = false; // this layer pays for the table of positions that all layers share
    // share of a prompt's cells that stay when they seal, which bounds the store; 0: cells are kept page by page
    float keep = 0.0f;
    float recent = 0.0f;      // of them, the newest ones, whatever their score
    float probe = 0.0f;       // share of query rows that score open cells; 0: no method asks
    bool normalise = true;    // scores are divided by the number of probe rows that could see the cell
    bool mean = false;        // a calibrated mean per channel is left out of sealed pages
    bool holds_chain = false; // this layer pays for the rows that all chained layers share
    int weight_bits = 8;      // of predictors: 8 or 4
};

// Turns the plan of a layer with head sizes (first block, second block) into one of latent attention: lane k keeps
// the first block, lane v the second, both as keys. values: channels of a value. False with one line in err when the
// method has no such layers.
bool kvq_plan_latent(kvq_layer_plan & plan, const struct kvq_method & method, const kvq_layer_shape & shape, int values,
    std::string & err);

// What a method may know when it plans a layer.
// A model's layers may lie in several caches (on several devices, or sliding-window layers apart from others), so
// methods count by number.
struct kvq_layer_context {
    int number;  // of this layer among the model's layers with attention, 0 = first
    int n_layer; // how many those are (scales presets)
    kvq_layer_shape shape;
    const kvq_layer_shape * prev; // previous layer of the same cache, NULL for the first
    int gap = 0;                  // layers with attention between prev and this one; they are in another cache
};

struct kvq_method {
    kvq_method_info info;
    // Fills out, or returns a status and one line in err.
    kvq_status (*plan)(const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err);
    bool latent = false; // holds latent attention (latent.cpp): its blocks of keys may be read as values
};

const kvq_method * kvq_method_find(const char * name); // NULL when unknown

// Parses "k=v,k=v" against the method's table: every key known, every value inside its range.
kvq_status kvq_options_parse(const kvq_method & m, const char * text, kvq_options & out, std::string & err);

// Options that every quantising method has, and their reading.
#define KVQ_OPTIONS_STATE                                                                                              \
    { "state", "rows|compact|packed", "rows",                                                                          \
        "saved states: f16 rows, which other builds read; blocks as they are; squeezed blocks", "ggml-kvq" }

#define KVQ_OPTIONS_AFFINE                                                                                             \
    { "group", "int", "32", "cells per key group and channels per value group: 16 32 64 128", "KIVI section 4.1" },    \
        { "group_v", "int", "0", "channels per value group; 0: as group, at most the head size", "KIVI section 4.1" }, \
        { "window", "int", "128", "newest cells kept in f16, 0..4096", "KIVI section 4.1 (residual length)" },         \
        { "sinks", "int", "0", "first cells of a stream kept in f16, 0..64", "AQUA-KV section 4" },                    \
        { "scales", "f16|u8", "f16", "format of scales and zeros; u8 halves them", "ggml-kvq" },                       \
        { "precision", "int8|f32", "int8", "arithmetic of attention over sealed pages", "ggml-kvq" },                  \
        KVQ_OPTIONS_STATE

#define KVQ_OPTIONS_LATTICE(sinks)                                                                                     \
    { "grid", "auto|d2|d4|d8", "auto", "channels per index; auto: 2; d4 for 1 and 2 bits, d8 for 1 bit",               \
        "HIGGS section 3" },                                                                                           \
        { "sinks", "int", sinks, "first cells of a stream kept in f16, 0..64", "AQUA-KV section 4" },                  \
        { "scales", "f16|u8", "u8", "format of the scale of a cell", "ggml-kvq" },                                     \
        { "precision", "int8|f32", "int8", "arithmetic of attention over sealed pages", "ggml-kvq" },                  \
        KVQ_OPTIONS_STATE

kvq_status kvq_plan_lattice(
    const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err);
kvq_status kvq_plan_affine(const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err);

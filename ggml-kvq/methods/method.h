// A method is a composition: the codecs of a layer's keys and values, and the policies that act on them (plan/plan.h).
// Adding one: methods/<name>.cpp with a kvq_method, one row in methods.inc, python/ggml_kvq/reference/<name>.py.
#pragma once

#include "base/options.h"
#include "ggml-kvq.h"
#include "plan/plan.h"

#include <string>

// Turns the plan of a layer with head sizes (first block, second block) into one of latent attention: lane k keeps
// the first block, lane v the second, both as keys. values: channels of a value. False with one line in err when the
// method has no such layers.
bool kvq_plan_latent(kvq_layer_plan & plan, const struct kvq_method & method, const kvq_layer_shape & shape, int values,
    std::string & err);

// What a method wants of calibrated data.
enum class kvq_data { NONE, TAKES, NEEDS }; // TAKES: goes without where there is none

struct kvq_method {
    kvq_method_info info;
    // Fills out, or returns a status and one line in err.
    kvq_status (*plan)(const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err);
    bool latent = false; // holds latent attention (latent.cpp): its blocks of keys may be read as values
    kvq_data (*data)(const kvq_options & o) = nullptr; // NULL: NONE
    // Options that are left to the data. predictor: what it was made for, NULL: there is none; weight_bits: of its
    // predictors
    void (*settle)(kvq_options & o, const char * predictor, int weight_bits) = nullptr;
    // A method that fits itself to an amount of memory has a ladder of plans, each with a little more code bits than
    // the one below; plan() reads context.level, 0..n_levels-1. cache/level.h finds the highest that fits. NULL: none.
    int (*n_levels)(const kvq_options & o, int n_layer) = nullptr;
    // What it may take at most: true bits, the number of cells at which they count (0: the cache's own), and whether a
    // cache that cannot do with them is refused or takes its least.
    struct limit {
        double bits;
        int n_cells;
        bool strict;
    };
    limit (*most)(const kvq_options & o) = nullptr;
    // Does an option that data set hold beside what the user asked for? NULL: yes.
    bool (*keeps)(const kvq_options & asked, const std::string & key) = nullptr;
};

const kvq_method * kvq_method_find(const char * name); // NULL when unknown

// Parses "k=v,k=v" against the method's table: every key known, every value inside its range.
kvq_status kvq_options_parse(const kvq_method & m, const char * text, kvq_options & out, std::string & err);

// Options that every quantising method has, and their reading.
#define KVQ_OPTION_PLACE                                                                                               \
    { "place", "device|host|auto", "device",                                                                           \
        "where sealed blocks lie; host: in the host's memory, where the device's kernels read them; auto: the layers " \
        "that the device has no room for",                                                                             \
        "ggml-kvq" }

#define KVQ_OPTIONS_STATE                                                                                              \
    { "state", "rows|compact|packed", "rows",                                                                          \
        "saved states: f16 rows, which other builds read; blocks as they are; squeezed blocks", "ggml-kvq" },          \
        KVQ_OPTION_PLACE

#define KVQ_OPTION_WINDOW(least, source)                                                                               \
    { "window", "int|auto", least,                                                                                     \
        "newest cells kept in f16, 0..4096; auto: as many as fit, no less than the default", source }

#define KVQ_OPTIONS_AFFINE                                                                                             \
    { "group", "int", "32", "cells per key group and channels per value group: 16 32 64 128", "KIVI section 4.1" },    \
        { "group_v", "int", "0", "channels per value group; 0: as group, at most the head size", "KIVI section 4.1" }, \
        KVQ_OPTION_WINDOW("128", "KIVI section 4.1 (residual length)"),                                                \
        { "sinks", "int", "0", "first cells of a stream kept in f16, 0..64", "AQUA-KV section 4" },                    \
        { "scales", "f16|u8", "f16", "format of scales and zeros; u8 halves them", "ggml-kvq" },                       \
        { "precision", "int8|f32", "int8", "arithmetic of attention over sealed pages", "ggml-kvq" },                  \
        KVQ_OPTIONS_STATE

#define KVQ_OPTIONS_LATTICE(sinks)                                                                                     \
    { "grid", "auto|d2|d4|d8", "auto", "channels per index; auto: 2; d4 for 1 and 2 bits, d8 for 1 bit",               \
        "HIGGS section 3" },                                                                                           \
        { "sinks", "int", sinks, "first cells of a stream kept in f16, 0..64", "AQUA-KV section 4" },                  \
        { "scales", "f16|u8|u4", "u8", "format of the scale of a cell", "ggml-kvq" },                                  \
        { "precision", "int8|f32", "int8", "arithmetic of attention over sealed pages", "ggml-kvq" },                  \
        KVQ_OPTIONS_STATE

// window and sinks of a plan, from the options of those names
kvq_status kvq_plan_open(const kvq_options & o, kvq_layer_plan & out, std::string & err);
// calibrated means taken off lattice blocks, predictors where the options have them
kvq_status kvq_plan_aqua(const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err);
// predictions from the layer before (options predictor and weights), behind a transform that is there already
kvq_status kvq_plan_predictor(
    const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err);
kvq_status kvq_plan_lattice(
    const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err);
// a second tier of rows (option far), of which `top` are fetched; fetch: kvq_fetch
kvq_status kvq_plan_fetch(
    const kvq_options & o, int fetch, const std::string & place, kvq_layer_plan & out, std::string & err);
// as affine, with bits of keys and of values, levels and eta
kvq_status kvq_plan_kivi(const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err);
kvq_status kvq_plan_affine(const kvq_options & o, const kvq_layer_context & c, kvq_layer_plan & out, std::string & err);

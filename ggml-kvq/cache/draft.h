// An unfinished cache: ggml names its tensors one by one and asks for their sizes, before any memory is allocated.
// (Not a draft of speculative decoding: `for_draft` below marks the cache of a draft model.)
#pragma once

#include "calibration.h"
#include "config.h"
#include "declared.h"
#include "policy/compose.h"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

struct kvq_lane_id {
    int il = -1;
    bool value = false;
    std::string tag;
};

// Parses "cache_<tag>k_l12"; il = -1 for any other name. Caches with a tag are those of indexers ("idx_").
kvq_lane_id kvq_parse_cache_name(const char * name);

struct kvq_draft_layer {
    int il = -1, number = 0, n_embd_k = 0, n_embd_v = 0, n_cells = 0, n_stream = 0;
    bool has_k = false, has_v = false; // keys alone: those of an indexer, or latent attention
    // channels of keys that are the values too: lane k holds them, lane v the others (ggml-kvq.h, KVQ_ATTN_LATENT)
    int latent = 0;
    kvq_layer_shape shape = {};
    kvq_place place = kvq_place::AUTO; // of sealed blocks, where their plan leaves it open; AUTO: not decided yet
    int level = -1;                    // of the method's ladder of plans (level.h); -1: not asked yet
    kvq_layer_plan plan;
    kvq_lane_layout k, v;
    kvq_declared declared[2]; // of keys, of values
};

// The cache that was asked for before this one. llama.cpp asks for layers that see the whole context first, and for
// those with a sliding window behind them.
struct kvq_cache_before {
    std::string model; // "": this is the first
    std::vector<int> layers;
    double channels = 0; // of keys and values of a cell, all layers
    int n_cells = 0;
    bool windowed = false; // its layers see a window only
};

class kvq_cache_draft {
public:
    // Later drafts know what this one was.
    kvq_cache_before as_before() const;
    kvq_cache_before before;

    // Bytes of the tensor's lane, or 0 with error() set. A layer that does not come after the last one starts a new
    // draft.
    size_t add(const char * name, int n_embd, int n_cells, int n_stream, const kvq_declared & declared);
    const std::string & error() const { return err; }
    // Asked once all tensors are there. What stays with llama.cpp, "2 indexer layers", when this is no cache that
    // attention reads; "" else.
    std::string declined() const;
    bool complete(); // false, with error(): a layer lacks keys or values, or something was refused before
    bool empty() const { return layers.empty(); }
    void reset();
    // A layer that a graph shows, with heads as they are there; latent: channels of keys that are the values too, 0:
    // no channels are shared; declared: of keys, of values. False with error() set.
    bool add_known(const kvq_layer_shape & shape, int latent, int n_cells, int n_stream, const kvq_declared * declared);

    void leave_coords();                // those of the data, unless the user asked for some
    bool beside_host = false;           // the device has memory of its own, and option place tells whose blocks take
    std::function<size_t()> free_there; // bytes of it that a cache may take, asked by place=auto alone; empty: enough
    bool for_draft = false;             // of a draft model: its own configuration
    std::string fitted_to;              // the declared type that chose the method, "": a method was named
    // of the layers for multi-token prediction, which draft for the model that they are part of
    bool predicts = false;
    kvq_config config;
    kvq_model_info model;
    std::shared_ptr<const kvq_calibration> calibration; // NULL: the method takes no calibrated data
    std::vector<kvq_draft_layer> layers;
    size_t bytes_asked = 0;    // what ggml was told, padded as ggml pads: identifies the allocation that follows
    size_t bytes_nominal = 0;  // as f16 tensors
    size_t bytes_upstream = 0; // in a buffer of llama.cpp's own
    std::map<std::string, size_t> asked; // answers by tensor
private:
    bool begin(int il, int n_cells, const kvq_declared & declared);
    kvq_place place_of(kvq_draft_layer & d);
    size_t room = SIZE_MAX; // what layers before the next one leave of free_there; SIZE_MAX: not asked yet
    size_t plan_lane(kvq_draft_layer & d, bool value, int n_embd);
    bool takes(const kvq_draft_layer & d, bool value, const kvq_declared & declared);
    bool fits(const kvq_draft_layer & d, bool value, const kvq_lane_layout & l);
    kvq_status level_of(const kvq_draft_layer & d, int & level);
    double more_bits(const kvq_draft_layer & d) const;
    std::string err;
    kvq_lane_id last; // the tensor asked for before this one
};

// Fewer heads than the model's layer has, as far as its file tells: others lie on other devices.
bool kvq_is_part(const kvq_model_info & model, const kvq_draft_layer & d);

// What a method may know of a layer; prev: the one before it in the same cache, or NULL.
kvq_layer_context kvq_context_of(const kvq_model_info & model, const kvq_draft_layer & d, const kvq_draft_layer * prev);

// One llama.cpp KV cache object as the backend sees it: the tensors cache_k_l<il>, cache_v_l<il> of one buffer, and
// behind them layers of lanes. Built in three steps that follow ggml's calls:
//   get_alloc_size per tensor -> kvq_cache_draft::add      alloc_buffer -> kvq_kv_cache(draft)      init_tensor -> find
#pragma once

#include "calibration.h"
#include "config.h"
#include "state.h"
#include "../cache/chain.h"

#include <algorithm>
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
    kvq_layer_plan plan;
    kvq_lane_layout k, v;
};

class kvq_cache_draft {
public:
    // Bytes of the tensor's lane, or 0 with error() set. A layer that does not come after the last one starts a new
    // draft.
    size_t add(const char * name, int n_embd, int n_cells, int n_stream, bool is_f16);
    const std::string & error() const { return err; }
    // Asked once all tensors are there. What stays with llama.cpp, "2 indexer layers", when this is no cache that
    // attention reads; "" else.
    std::string declined() const;
    bool complete(); // false, with error(): a layer lacks keys or values, or something was refused before
    bool empty() const { return layers.empty(); }
    void reset();
    // A layer that a graph shows, with heads as they are there; latent: channels of keys that are the values too, 0:
    // none are. False with error() set.
    bool add_known(const kvq_layer_shape & shape, int latent, int n_cells, int n_stream);

    bool for_draft = false; // of a draft model: its own configuration
    // of the layers for multi-token prediction, which draft for the model that they are part of
    bool predicts = false;
    kvq_config config;
    kvq_model_info model;
    std::shared_ptr<const kvq_calibration> calibration; // NULL: the method takes none
    std::vector<kvq_draft_layer> layers;
    size_t bytes_asked = 0;    // what ggml was told, padded as ggml pads: identifies the allocation that follows
    size_t bytes_nominal = 0;  // as f16 tensors
    size_t bytes_upstream = 0; // in a buffer of llama.cpp's own
    std::map<std::string, size_t> asked; // answers by tensor
private:
    bool begin(int il);
    size_t plan_lane(kvq_draft_layer & d, bool value, int n_embd);
    std::string err;
    kvq_lane_id last; // the tensor asked for before this one
};

struct kvq_kv_layer {
    int ordinal = 0;
    int n_shifts = 0; // context shifts seen; the first layer to see one moves the shared positions
    kvq_draft_layer d;
    kvq_span_table spans;
    kvq_saliency saliency; // not active unless the method asks
    kvq_slots slots;       // likewise
    std::unique_ptr<kvq_lane> k, v;
    const char * base[2] = { nullptr, nullptr }; // nominal addresses of keys and values, where views may lack a parent
};

class kvq_kv_cache {
public:
    explicit kvq_kv_cache(const kvq_cache_draft & draft, kvq_device & device = kvq_cpu_device()); // check ok()
    ~kvq_kv_cache();
    bool ok() const { return is_ok; }

    kvq_kv_layer * layer(int il);
    bool append(const kvq_draft_layer & d); // false: out of memory, or predicted layers hold tokens already
    // Head sizes as the graph has them; before anything was written the layer is rebuilt when the guess was wrong.
    bool set_shape(kvq_kv_layer & l, int n_head_kv, int head_size_k, int head_size_v, std::string & err);

    // The rotary embedding of a layer that keeps keys without it; n_dims 0: it has none.
    bool set_rope(kvq_kv_layer & l, const kvq_rope & rope, std::string & err);
    // Positions of the rows of this ubatch, read once: later nodes of the graph may reuse the tensor's memory.
    const int32_t * positions_of(const kvq_kv_layer & l, const int32_t * source, int64_t n);
    // where the device reads them
    const int32_t * sealed_positions(int stream) const {
        return (positions_there ? positions_there : positions.data()) + (size_t) stream * n_positions;
    }
    const int32_t * positions_when_sealed(int stream) const {
        return (positions_there ? positions_there + positions.size() : sealed.data()) + (size_t) stream * n_positions;
    }
    // Is every cell that is sealed where it was sealed? Asked of devices that are not the host.
    bool stayed(int stream) const;
    void note_shift(const kvq_kv_layer & l) { n_shifts = std::max(n_shifts, l.n_shifts); }
    void shift_positions(kvq_kv_layer & l, int stream, const int32_t * by); // by [n_cells]

    void commit(int n_threads);
    void clear();
    kvq_stats stats() const;
    std::string load_line() const;
    std::string closing_line() const; // when it is freed

    kvq_device & device;
    std::unique_ptr<kvq_chain> chain; // NULL: no layer is predicted from another
    kvq_config config;
    std::vector<std::unique_ptr<kvq_kv_layer>> layers;
    std::string device_name = "KVQ0";
    kvq_arrivals arrivals; // rows of a saved state that is being restored
    bool compact = false;  // saved states hold blocks as they are
    uint16_t model_mark(); // of the model, for marks; 0: not known (state.cpp)
    bool refused = false;  // a graph asked for something unsupported: computing fails instead of guessing

private:
    bool build(kvq_kv_layer & l);
    std::string part_of_model() const;
    std::string parted() const; // a note for layers that cannot share codes with the layer before
    void link();                // after every layer is built
    kvq_model_info model;
    std::shared_ptr<const kvq_calibration> calibration;
    std::vector<std::unique_ptr<kvq_rotor>> rotors; // one per distinct embedding
    std::vector<int32_t> positions;                 // of sealed cells, [n_stream][n_positions]
    std::vector<int32_t> sealed;                    // when they were sealed, likewise (cache/transform.h)
    std::vector<uint16_t> sealed_users;             // [n_stream][pages]
    std::vector<uint8_t> apart;                     // likewise
    int32_t * positions_there = nullptr;            // both on a device that is not the host, NULL else
    size_t n_positions = 0;
    int n_shifts = 0;
    struct {
        std::vector<int32_t> pos, placed; // placed: numbers of that rotor
        const void *source = nullptr, *rotor = nullptr;
        int ordinal = -1;
    } ubatch;
    kvq_scratch scratch;
    kvq_counters counters;
    int mark = -1; // not looked at yet
    bool is_ok = true;
};

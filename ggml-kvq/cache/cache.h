// One llama.cpp KV cache object as the backend sees it: the tensors cache_k_l<il>, cache_v_l<il> of one buffer, and
// behind them layers of lanes. Built in three steps that follow ggml's calls:
//   get_alloc_size per tensor -> kvq_cache_draft::add      alloc_buffer -> kvq_kv_cache(draft)      init_tensor -> find
#pragma once

#include "arrivals.h"
#include "draft.h"
#include "observed.h"
#include "policy/chain.h"
#include "policy/compose.h"
#include "policy/evict.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

// What of a cache tensor's rows a lane holds: channels [first, first + n). Most layers have two operands, keys and
// values, each a whole tensor; latent attention has two of one tensor, whose values are a view of them.
struct kvq_operand {
    bool of_values; // of the tensor cache_v, else of cache_k
    int first, n;   // channels
    kvq_lane * lane;
    kvq_transform * transform; // NULL: rows are sealed as they are
};

// A graph is not a ubatch: llama.cpp's scheduler computes each node as a graph of its own when a callback asks for it,
// and devices take turns within a layer. So a graph's nodes do not tell when a layer may seal.
//   A layer that was written does not seal before attention has read it: the rows of a ubatch are exact while they are
//   processed, and a graph cut at any node leaves the same bytes.
//   Rows that no attention reads (a draft model's, taken from another model) seal when the next rows come: a later step
//   that writes keys or values first seals the pages of both (is_overdue).
struct kvq_kv_layer {
    int ordinal = 0;
    int n_shifts = 0;                  // context shifts seen (policy/positions.h)
    bool unread[2] = { false, false }; // keys, values: written since attention read them
    kvq_draft_layer d;
    kvq_span_table spans;
    std::unique_ptr<kvq_lane> k, v;
    std::vector<std::unique_ptr<kvq_policy>> policies;
    std::vector<kvq_operand> operands; // by tensor, then by channel
    // those that a graph tells of rotary embeddings, and that a device's attention leaves scores with; NULL: no such
    // policy
    kvq_transform * transforms[2] = {};
    kvq_probe * probe = nullptr;
    kvq_query_sums queries;
    // channels of the blocks by which llama.cpp turns keys and values (host/turned.h), 0: it does not
    int turn[2] = { 0, 0 };
    // Of -sm tensor: rows are parts of a state's rows, and no part of a row can carry or check the checksum.
    bool some_heads = false;
    const char * base[2] = { nullptr, nullptr }; // nominal addresses of keys and values, where views may lack a parent

    void read() { unread[0] = unread[1] = false; } // attention has
    bool is_unread() const { return unread[0] || unread[1]; }
    bool is_overdue() const { return unread[0] && unread[1]; }
    void seal(int n_threads); // what is due of keys and values
};

class kvq_kv_cache {
public:
    kvq_kv_cache(const kvq_cache_draft & draft, kvq_device & device); // check ok()
    ~kvq_kv_cache();
    bool ok() const { return is_ok; }
    const std::string & lacks() const { return missing; } // what, when it is not ok; "": memory
    std::string trouble();                                // what the user should hear of now; "": no news

    kvq_kv_layer * layer(int il);
    bool append(const kvq_draft_layer & d); // false: out of memory, or predicted layers hold tokens already
    // Head sizes as the graph has them; before anything was written the layer is rebuilt when the guess was wrong.
    bool set_shape(kvq_kv_layer & l, int n_head_kv, int head_size_k, int head_size_v, std::string & err);

    // The rotary embedding of a layer that keeps keys without it; n_dims 0: no rotary embedding.
    bool set_rope(kvq_kv_layer & l, const kvq_rope & rope, std::string & err);
    // Positions of the rows of this ubatch, read once: later nodes of the graph may reuse the tensor's memory.
    const int32_t * positions_of(const kvq_kv_layer & l, const int32_t * source, int64_t n);
    kvq_positions * positions() const; // NULL: rows keep their rotary embedding
    kvq_chain * chain() const;         // NULL: no layer is predicted from another
    bool stayed(int stream) const { return !positions() || positions()->stayed(stream); }

    // While attention reads a layer: rows of predicted layers are brought to the layer below, and are of this one when
    // it is done. follow false: a step is recorded.
    class reading {
    public:
        reading(kvq_kv_cache & cache, const kvq_kv_layer & l, int stream0, const std::vector<kvq_attn> & streams,
            int n_threads, bool follow);
        const kvq_chain_pages * predicted() const { return lanes.empty() ? nullptr : lanes.data(); }
        void done() const; // attention has read all of it

    private:
        kvq_chain * const chain;
        const int ordinal, stream0, n_stream, n_pages;
        const bool follow;
        std::vector<kvq_chain_pages> lanes; // [stream][keys, values]
    };

    void commit(int threads); // layers that are unread wait
    // Of these layers alone, where a graph is a part of a model: looking at all of them takes longer than its work.
    void commit(int threads, const std::vector<kvq_kv_layer *> & some);
    bool waits_to_seal() const; // for the scores that attention leaves on the device
    static bool is_alive(const kvq_kv_cache * cache) { return number_of(cache) >= 0; }
    // The youngest on this device that has this layer, of so many cells and streams and at most so many channels of
    // keys or values; NULL: there is no such cache
    static kvq_kv_cache * youngest(const std::string & device_name, int il, bool value, const int64_t shape[3]);
    static int number_of(const kvq_kv_cache * cache); // as kvq_cache_stats counts; -1: it is gone
    void clear();
    kvq_stats stats() const;
    std::string load_line() const;
    std::string closing_line() const; // when it is freed

    kvq_device & device;
    kvq_config config;
    std::vector<std::unique_ptr<kvq_kv_layer>> layers;
    std::string device_name = "KVQ0";
    kvq_arrivals arrivals; // rows of a saved state that is being restored
    bool compact = false;  // saved states hold blocks as they are
    int n_threads = std::max(1, (int) std::thread::hardware_concurrency() / 2); // of the last graph
    uint16_t model_mark();     // of the model, for marks; 0: not known (state.cpp)
    bool lacks_memory = false; // to seal, and no step has failed by it yet
    bool refused = false;      // a graph asked for something unsupported: computing fails instead of guessing

private:
    bool build(kvq_kv_layer & l);
    std::string part_of_model() const;
    std::string words_of_policies(const kvq_stats & s) const;
    kvq_model_info model;
    std::shared_ptr<const kvq_calibration> calibration;
    std::map<std::string, std::shared_ptr<void>> shared; // what the policies of all layers have in common
    struct {
        std::vector<int32_t> pos, placed; // placed: numbers of that rotor
        const void *source = nullptr, *rotor = nullptr;
        int ordinal = -1;
    } ubatch;
    kvq_scratch scratch;
    kvq_counters counters;
    std::string missing, said;
    size_t bytes_far = 0; // of a second tier, all layers
    int mark = -1;        // not looked at yet
    bool is_ok = true;
};

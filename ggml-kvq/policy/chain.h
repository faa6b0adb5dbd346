// Linear predictors along the layers of a cache (AQUA-KV, arXiv 2501.19392, section 3.1). A sealed page holds what
// the prediction from the layer before leaves, un-rotated and less the channel means:
//
//   k'[l] = W_k k'[l-1] + decoded                     key   = R_pos (k' + mean_k)
//   v'[l] = W_v [k'[l]; v'[l-1]] + decoded            value = v' + mean_v
//
// so layer l can be read only after layer l-1. Of every cell one reconstructed row is kept in 8 bits
// (types/predictor.h), that of the layer read last; it is the input of the next layer, when writing and when reading:
// both see the same bits. Rows of a page become f16 tiles in stripes of pages, attended at once and merged; nothing
// holds a whole layer in f16. On a GPU (cuda/seal_chain.cu) the kept rows are there, and attention makes the rows of
// all pages of a layer at once. A page that is open one layer below is predicted from its open rows: that happens
// only while it is being rewritten.
//
//   part chain   k_from_k, v_from_k, v_from_v: inputs of the predictors, 0: not predicted; values: 1, values too;
//                weight_bits: 8 or 4; pays: 1 in the layer that pays for the rows that all layers share
//   data         kvq.aqua.blk.<il>.{k,v}.weight (cache/calibration.h)
#pragma once

#include "transform.h"

#include "types/predictor.h"

#include <memory>

struct kvq_chain_weights {
    kvq_predictor k, v_from_k, v_from_v; // bits 0: not predicted
};

class kvq_chain {
public:
    static constexpr int STRIPE = 32; // pages

    // width_v 0: values are not predicted; device: of the lanes
    kvq_chain(int n_stream, int n_pages, int page_cells, int width_k, int width_v, kvq_device & device);
    ~kvq_chain();
    kvq_chain(const kvq_chain &) = delete;
    kvq_chain & operator=(const kvq_chain &) = delete;
    bool ok() const { return is_ok; } // false: out of memory
    // Bytes of the kept rows and of a stripe's tiles; nb_frame: of one tile.
    static size_t bytes(int n_stream, int n_pages, int page_cells, int width, size_t nb_frame);

    // in order; lanes and what they leave out. The layer's predictors stay where they are.
    void add_layer(
        kvq_lane * k, kvq_lane * v, kvq_transform * turn_k, kvq_transform * turn_v, const kvq_chain_weights & w);
    bool chains(bool value) const { return !value || width[1]; }

    // Prediction for a page of layer l, f32 [page_cells][stride(value)]; zeros where nothing is predicted.
    void predict(int l, bool value, int s, int p, float * out);
    size_t stride(bool value) const { return row_stride[value]; }
    // The same for up to STRIPE pages, in memory of a device that is not the host; until the next call.
    const float * predict_there(int l, bool value, int s, const std::vector<int> & pages);

    // The page holds something else than before.
    void changed(int l, bool value, int s, int p);
    // May it be sealed now: what it is predicted from is sealed too, or empty.
    bool ready(int l, bool value, int s, int p) const;
    // Opens sealed pages that were predicted from this one, which is about to be sealed anew.
    void release(int l, bool value, int s, int p);

    // Attention of layer l, streams stream0..: like kvq_cpu_attend, over pages that are made readable stripe by stripe.
    void attend(int l, int stream0, const kvq_attn * attn, int n, int n_threads);

    // Where memory is not the host's, attention itself turns the first pages' rows of layer l-1 into those of layer
    // l; what it needs for that. layer_below: rows of l-1 are made where there are others; not while a step is
    // recorded, whose layers follow each other.
    kvq_chain_pages lane_there(int l, bool value, int s, int p0, int n) const;
    void layer_below(int l, int s, int n);
    void layer_read(int l, int s, int n);
    void forget(); // a recorded step has run: rows are of no known layer

private:
    struct layer {
        kvq_lane * lane[2];
        kvq_transform * turn[2];
        kvq_chain_weights w;
    };
    struct workspace {
        std::vector<float> rows[2], decoded, work;
    };
    struct kept {                // [stream][page][cell]
        std::vector<int8_t> row; // [stride8]
        std::vector<float> scale;
        std::vector<int16_t> level;   // [stream][page] layer that the rows are of, -1: none
        int8_t * row_there = nullptr; // both, where memory is not the host's
        float * scale_there = nullptr;
    };
    void reach_there(int l, bool value, int s, int p, int n);
    bool alike(int l, int s, int p, int q) const;                 // pages that need the same to reach layer l
    bool alone(int l, bool value, size_t at, int s, int p) const; // its rows need no other layer
    void reach(int l, bool value, int s, int p, workspace & w);
    void step(int l, bool value, int s, int p, workspace & w);
    void apply(int l, bool value, size_t at, float * out, workspace & w) const;
    workspace & space(size_t i);

    kvq_device & device;
    bool is_ok = true;
    float * predictions = nullptr; // of a stripe
    size_t nb_predictions = 0;
    int n_pages, page_cells, width[2];
    size_t row_stride[2], stride8[2];
    std::vector<layer> layers;
    kept rows[2];
    std::vector<std::unique_ptr<workspace>> spaces;
    std::vector<uint16_t> tiles[2];
};

// The chain as lanes of one layer see it: what is predicted from a page waits for it, and follows its changes.
class kvq_chained : public kvq_policy {
public:
    kvq_chained(kvq_chain & chain, int ordinal) : chain(chain), ordinal(ordinal) {}
    bool may_seal(const kvq_lane & x, int s, int p) const override;
    void before_seal(kvq_lane & x, int s, const std::vector<int> & due, int n_threads) override;
    void changed(kvq_lane & x, int s, int p) override;
    bool may_place(const kvq_lane & x, int s, int p) const override { return may_seal(x, s, p); }
    void placing(kvq_lane & x, int s, int p, const kvq_page_image & image) override;

private:
    kvq_chain & chain;
    const int ordinal;
};

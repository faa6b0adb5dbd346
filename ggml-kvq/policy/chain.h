// Linear predictors along the layers of a cache (AQUA-KV, arXiv 2501.19392, section 3.1). A sealed page holds what
// the prediction from the layer before leaves, un-rotated and less the channel means:
//
//   k'[l] = W_k k'[l-1] + decoded                     key   = R_pos (k' + mean_k)
//   v'[l] = W_v [k'[l]; v'[l-1]] + decoded            value = v' + mean_v               full
//   v'[l] = W_v [k'[l]; k'[l-1]] + decoded                                              fold
//
// so layer l can be read only after layer l-1. Of every cell reconstructed rows are kept in 8 bits
// (types/predictor.h): keys and, with `full`, values of the layer read last, or, with `fold`, keys of the last two
// layers, of an even one and an odd one. They are the inputs of the next layer, when writing and when reading:
// both see the same bits. With `fold` no predictor has values as input, so a query may apply W_v once, to sums of rows:
//   sum_t p_t v'_t = W_v [sum p k'[l]; sum p k'[l-1]] + sum p decoded
// The rows lie where the engine computes, which turns them into those of the next layer and,
// while it attends, into f16 tiles: the CPU in stripes of pages (cpu/chain.cpp), CUDA all pages of a layer at once
// (cuda/seal/seal_chain.cu). A page that is open one layer below is predicted from its open rows: that happens only
// while it is being rewritten.
//
//   part chain   k_from_k, v_from_k, v_from_below: inputs of the predictors, 0: not predicted; values: 1, values too;
//                fold: 1, from keys of both layers; weight_bits: 8 or 4; counts_shared: 1 in the layer whose bytes
//                count the rows that all layers share
//   data         kvq.aqua.blk.<il>.{k,v}.weight, kvq.aqua.blk.<il>.v.fold (cache/calibration.h)
#pragma once

#include "transform.h"

#include "types/predictor.h"

#include <vector>

struct kvq_chain_weights {
    kvq_predictor k, v_from_k, v_from_below; // bits 0: not predicted
};

class kvq_chain {
public:
    // width_v 0: values are not predicted; fold: they are from keys; device: of the lanes
    kvq_chain(int n_stream, int n_pages, int page_cells, int width_k, int width_v, bool fold, kvq_device & device);
    ~kvq_chain();
    kvq_chain(const kvq_chain &) = delete;
    kvq_chain & operator=(const kvq_chain &) = delete;
    bool ok() const { return is_ok; } // false: out of memory
    // Bytes of a lane: kept rows of this width, a stripe's tiles, and predictions of as many pages. nb_frame: of one
    // tile; predicted: channels of a cell's predictions that no other lane counts, for keys and values share that
    // memory.
    static size_t bytes(int n_stream, int n_pages, int page_cells, int width, size_t predicted, size_t nb_frame);

    // in order; lanes and what they leave out. The layer's predictors stay where they are.
    void add_layer(
        kvq_lane * k, kvq_lane * v, kvq_transform * turn_k, kvq_transform * turn_v, const kvq_chain_weights & w);
    bool chains(bool value) const { return !value || row_stride[1]; }

    // Predictions for up to KVQ_CHAIN_STRIPE pages of layer l, f32 [page][page_cells][stride(value)] in the device's
    // memory, until the next call; zeros where rows are not predicted.
    const float * predict(int l, bool value, int s, const std::vector<int> & pages);
    size_t stride(bool value) const { return row_stride[value]; }

    // The page's rows have changed.
    void changed(int l, bool value, int s, int p);
    // May it be sealed now: what it is predicted from is sealed too, or empty.
    bool ready(int l, bool value, int s, int p) const;
    // Opens sealed pages that were predicted from this one, which is about to be sealed anew.
    void release(int l, bool value, int s, int p);

    // Attention itself turns rows of layer l-1 into those of layer l (engine/engine.h). pages_of: n pages from p0 on,
    // as it asks for them. layer_below: of sealed pages among the first n, rows of l-1 are made where there are
    // others; not while a step is recorded, whose layers follow each other. layer_read: attention has read them.
    kvq_chain_pages pages_of(int l, bool value, int s, int p0, int n, int n_threads = 1) const;
    void layer_below(int l, int s, int n, int n_threads);
    void layer_read(int l, int s, int n);
    void forget(); // a recorded step has run: it is not known which layer the rows belong to

private:
    struct layer {
        kvq_lane * lane[2];
        kvq_transform * turn[2];
        kvq_chain_weights w;
    };
    struct kept_rows { // [stream][page][cell], in the device's memory
        kvq_rows8 x;
        std::vector<int16_t> layer_of; // [stream][page] layer that the rows belong to, -1: the page has no rows
    };
    size_t index_of(int s, int p) const { return (size_t) s * n_pages + p; }
    // of a lane of layer l, which feeds others
    kept_rows & kept(int l, bool value) { return rows[fold ? l & 1 : value]; }
    const kept_rows & kept(int l, bool value) const { return rows[fold ? l & 1 : value]; }
    bool feeds(bool value) const { return !value || (row_stride[1] && !fold); }
    bool is_predicted(int l, bool value, int s, int p) const; // a sealed page: its rows need those of the layer below
    // Kept rows of both pages are of the same layer, and both are predicted in the same layers up to l.
    bool have_same_past(int l, int s, int p, int q) const;
    // The kept rows of n neighbouring pages become those of layer l. Pages have the same past: only page p is looked
    // at.
    void bring_to(int l, bool value, int s, int p, int n, int n_threads);

    kvq_device & device;
    bool is_ok = true;
    float * predictions = nullptr; // of a stripe
    size_t nb_predictions = 0;
    const bool fold;
    int n_pages, page_cells;
    size_t row_stride[2]; // of predictions; values' 0: they are not predicted
    std::vector<layer> layers;
    kept_rows rows[2];
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

// What sealed pages of a lane leave out (AQUA-KV, arXiv 2501.19392, section 3): a mean per channel and, for keys, the
// rotary embedding, or what it became since.
//   row = R_pos (decoded + prediction + mean)       keys that are predicted
//   row = R_(pos - sealed) decoded + R_pos mean     other keys; what is sealed is  key - R_sealed mean
//
// With a basis (coords.h) each cell has a mean of its own: the layer's mean and what the cell's coordinates say.
//
// Keys of the second kind need no rotation while they are read: the query meets decoded keys as it is. Where keys have
// moved since, the query is turned back by that distance. Its products with the mean are cheap (engine/turns.h). With
// both kinds a context shift changes positions only.
//
// Open rows stay as they came and carry their positions (tags.h).
//
// Of sorted keys, channels take another order and gains as the last step (kvq_order).
//
//   part transform   unrotate: 1, keys lose their rotary embedding; mean: 1, pages lose a calibrated mean per channel;
//                    sort: KVQ_SORT_BLOCKS, KVQ_SORT_GAINS (plan/plan.h);
//                    counts_shared: 1 in the layer whose bytes count the table of positions
//   data             kvq.aqua.blk.<il>.{k,v}.bias (cache/calibration.h)
#pragma once

#include "positions.h"
#include "store/lane.h"
#include "types/basis.h"

#include <vector>

class kvq_chain;

class kvq_transform : public kvq_policy {
public:
    // of the keys, or the values, of a layer. mean: [n_head][head_size] or NULL; positions: NULL, rows keep their
    // rotary embedding
    explicit kvq_transform(bool value = false, const float * mean = nullptr, kvq_positions * positions = nullptr) :
        value(value), mean(mean), positions(positions) {}

    const bool value;
    const float * mean;
    kvq_positions * const positions;
    const kvq_basis * basis = nullptr; // NULL: cells have no coordinates
    const kvq_lane * keys = nullptr;   // whose pages hold them
    const kvq_order * order = nullptr; // of sorted keys (types/lattice.h), NULL: channels stay where they are
    kvq_rotor * rotor = nullptr; // of this layer's keys, once a graph has shown it; NULL: keys have no rotary embedding
    // what is predicted from the layer before (chain.h), NULL: rows are not predicted; ordinal: of this layer
    kvq_chain * chain = nullptr;
    int ordinal = 0;
    bool active() const { return mean || rotor || chain || order; }
    bool keeps_turn() const { return rotor && !chain; } // sealed keys have the rotary embedding of `sealed`

    // Open rows move, and those of sealed pages that are kept as they came: fn as in kvq_lane::edit, and the position
    // moves by by[cell]. Of other sealed pages the positions alone move (kvq_positions::shift).
    void shift_open(kvq_lane & x, int s, const int32_t * by, const kvq_edit_row & fn);
    kvq_row_transform transform_of(
        const kvq_lane & x, int s, int p) const; // of the device's memory, without predictions
    const int32_t * positions_at(int s, int p) const { return rotor ? positions->now_at(s, p) : nullptr; }

    // Events.
    void written(kvq_lane & x, int64_t n, const int64_t * idx, const int32_t * pos, uint16_t * const * to) override;
    bool tags_rows(const kvq_lane &) const override { return rotor; }
    void leave_out(kvq_lane & x, int s, const std::vector<int> & pages, std::vector<kvq_page_block> & blocks,
        int n_threads) override;
    void encoded(kvq_lane & x) override;
    void put_back(const kvq_lane & x, int s, int p, uint16_t * tile) const override;
    void state_changed(kvq_lane & x, int s, int p, kvq_page_state from, kvq_page_state to) override;
    void copied_page(kvq_lane & x, int from, int to, int p) override;
    bool blocks_travel(const kvq_lane &) const override { return !(rotor && rotor->first()); }
    void describe(const kvq_lane & x, int s, int p, kvq_page_image & image) const override;
    bool accepts(const kvq_lane & x, int s, int p, const kvq_page_image & image) const override;
    void placing(kvq_lane & x, int s, int p, const kvq_page_image & image) override;
    bool has_images(const kvq_lane &) const override { return active(); }
    bool images_together(const kvq_lane & x) const override;
    void images_come(const kvq_lane & x, const std::vector<const uint16_t *> & pages, int n_threads) const override;
    int n_position_lists(const kvq_lane &) const override { return rotor ? 1 + keeps_turn() : 0; }
    int32_t position_bound(const kvq_lane & x) const override;
    int image_low_bits(const kvq_lane &) const override { return rotor ? 1 : 0; }
    size_t image_bytes(const kvq_lane & x) const override;
    void write_image(const kvq_lane & x, int s, int p, const uint8_t * codes, const uint8_t * params,
        uint16_t * rows) const override;
    bool take_image(
        const kvq_lane & x, int s, int p, const uint16_t * rows, bool marked, kvq_page_image & out) const override;
    bool rows_of_block(const kvq_lane & x, const kvq_page_image & image, const uint8_t * codes, const uint8_t * params,
        uint16_t * rows) const override;
    void save(const kvq_lane & x, int s, int cell, int n, uint16_t * rows, int n_threads) const override;
    bool rewrites_rows(const kvq_lane &) const override { return rotor && rotor->first(); }
    void enter(const kvq_lane & x, uint16_t * rows, int n) const override;
    void entered(kvq_lane & x, int s, int cell, const uint16_t * rows, int n) override;
    void spans(kvq_attn & a, int s) override;

private:
    int32_t * sealed_at(int s, int p) const { return keeps_turn() ? positions->sealed_at(s, p) : nullptr; }
    bool is_held_elsewhere(const kvq_lane & x, int s, int p) const; // other layers hold the page sealed
    void note_sealed(kvq_lane & x, int s, int p);                   // positions of a page that is about to be sealed
    std::vector<float> predicted(const kvq_lane & x, int s, int p) const; // empty: rows are not predicted
    // What coordinates say, f32 [page_cells][width]; of a page, params: of its block. Empty: it has none.
    std::vector<float> said(const kvq_coord_pairs<const uint8_t> & pairs) const;
    std::vector<float> said(int s, int p, const uint8_t * params) const;
    const uint8_t * key_params(int s, int p, std::vector<uint8_t> & copy) const; // of the page of keys, on the host
    // of rows and predictions that the host holds; pos, was [page_cells]: positions, and those when sealed; NULL: rows
    // have no positions
    kvq_row_transform transform_here(
        const kvq_lane & x, const int32_t * pos, const int32_t * was, const std::vector<float> & pred) const;
    void image_page(const kvq_lane & x, const int32_t * pos, const int32_t * was, const uint8_t * codes,
        const uint8_t * params, const std::vector<float> & pred, struct kvq_row_turns & turns, uint16_t * rows) const;
    std::vector<uint8_t> beside(const kvq_lane & x, int s, int p) const; // coordinates of a page of values
    bool take_params(const kvq_lane & x, int h, int low, const uint16_t * rows, std::vector<uint16_t> & head,
        kvq_page_image & out) const;
    bool take_head(const kvq_lane & x, int h, int low, const uint16_t * rows, const std::vector<float> & pred,
        struct kvq_row_turns & turns, bool marked, std::vector<uint16_t> & head, kvq_page_image & out) const;

    // tiles that are encoded in place of the open ones, until encoded()
    std::vector<uint16_t *> reduced;
};

// Coordinates of cells in a calibrated basis (types/basis.h). Pages of keys hold them, and values are read from those
// of their cells: so keys are sealed first, and values open their page when its coordinates are about to change.
//   key = R_pos (mean + basis_k coordinates) + decoded        value = mean + basis_v coordinates + decoded
// kvq_transform takes off what they say. A saved block of values carries the coordinates of its page, since it may come
// to a place where the keys are sealed anew.
//
//   part coords   n: of a head, as kvq_codec::coords of keys
//   data          kvq.aqua.blk.<il>.k.{axes,read}, kvq.aqua.blk.<il>.v.axes (cache/calibration.h)
#pragma once

#include "store/lane.h"

class kvq_coords : public kvq_policy {
public:
    kvq_coords(kvq_lane & keys, kvq_lane & values) : keys(keys), values(values) {}
    void before_seal(kvq_lane & x, int s, const std::vector<int> & due, int n_threads) override;
    bool may_place(const kvq_lane & x, int s, int p) const override;
    void placing(kvq_lane & x, int s, int p, const kvq_page_image & image) override;
    void reopening(kvq_lane & x, int s, int p) override;
    void replacing(kvq_lane & x, int s, int p) override;
    void reencoding(kvq_lane & x, int s, int p) override;
    void emptied(kvq_lane & x, int s, int p) override;

private:
    bool ends(const kvq_lane & x, int s, int p) const { // this page of keys, and values rest on it
        return &x == &keys && values.state(s, p) == KVQ_PAGE_SEALED;
    }
    kvq_lane &keys, &values;
};

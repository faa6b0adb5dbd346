// Codes of one layer that serve the next (XQuant, section 3.3): the next lane stores parameters alone, fitted to codes
// that it adopts. So the codes are sealed first. The adopting lane opens its page when those codes are about to change.
//
//   part share_codes   k, v: 1 when this layer's keys, values adopt the codes of the layer before
//                      k_apart, v_apart: 1 when they would, but that layer lies in another cache
#pragma once

#include "store/lane.h"

class kvq_share_codes : public kvq_policy {
public:
    // owner: of the codes
    kvq_share_codes(kvq_lane & owner, kvq_lane & adopter) : owner(owner), adopter(adopter) {}
    void before_seal(kvq_lane & x, int s, const std::vector<int> & due, int n_threads) override;
    bool may_place(const kvq_lane & x, int s, int p) const override;
    void placing(kvq_lane & x, int s, int p, const kvq_page_image & image) override;
    void reopening(kvq_lane & x, int s, int p) override;
    void moved(kvq_lane & x, int s, int p) override;
    void emptied(kvq_lane & x, int s, int p) override;
    void reencoding(kvq_lane & x, int s, int p) override;
    void reencoded(kvq_lane & x, int s, int p) override;

private:
    kvq_lane &owner, &adopter;
    uint16_t * tile = nullptr; // rows of the adopter while its codes are edited
};

// Which cells of a mixed page are salient (ZipCache, arXiv 2405.14256, section 4.3): when the page seals, the n_hi
// cells of the highest score, earlier ones first when equal, empty cells last. Keys decide, values follow.
//
//   part choose   behind part probe, whose scores it takes
#pragma once

#include "probe.h"

class kvq_choose : public kvq_policy {
public:
    explicit kvq_choose(kvq_probe & scores) : scores(scores) {}
    void choose(kvq_lane & x, int s, const std::vector<int> & due) override;
    void reopening(kvq_lane & x, int s, int p) override;

private:
    kvq_probe & scores;
};

#include "kernels.h"

#include <cmath>

void kvq_turn_coefficients(const kvq_rotary & rot, const float * q, const float * mean, float * coef, float * step) {
    const kvq_turns & t = *(const kvq_turns *) rot.turns;
    const int n = t.n_pairs, next = rot.neox ? n : 1, by = rot.neox ? 1 : 2;
    float pairs[4][KVQ_MAX_HEAD / 2 + 16]; // of the query and of the mean, in the order of the tables
    for (int i = 0; i < n; i++) {
        const int x = t.pair[(size_t) i] * by, y = x + next;
        pairs[0][i] = q[x];
        pairs[1][i] = q[y];
        pairs[2][i] = mean[x];
        pairs[3][i] = mean[y];
    }
    for (int i = n; i < t.n_pad; i++) { pairs[0][i] = pairs[1][i] = pairs[2][i] = pairs[3][i] = 0.0f; }
    kvq_get_kernels().mean_coefficients(
        t.view(), std::hypot(rot.high[0], rot.high[n]), pairs[0], pairs[1], pairs[2], pairs[3], coef, step);
}

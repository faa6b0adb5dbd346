// What the mean of keys adds to the logits of 32 to 128 neighbouring positions (aqua, cpu/impl_mean.h): with q and
// mean as complex pairs,
//   q . R_p mean = sum over pairs of  a cos(p w) + b sin(p w)        a = qx mx + qy my,  b = qy mx - qx my,  w =
//       speed of the pair
// Around the centre P - 1/2 of the positions, o = p - (P - 1/2), this is sum A cos(o w) + B sin(o w), A and B being a
// and b turned once. The fast pairs are summed so, with tables of cos(o w) and sin(o w) for o = 1/2 .. 63 1/2 in 16
// bits: positions o and -o share their products. The waves of all slower pairs are within KVQ_TURN_ERROR sums of
// KVQ_TURN_BASIS even and as many odd functions of o:
//   cos(o w) ~ sum_k v_k(w) u_k(o)        u: Gram-Schmidt over the waves themselves, the one that is left worst next
// Sums of A v_k and B v_k over the pairs are made once for all positions, and are then so many more terms.
#pragma once

#include "ggml-kvq.h"

#include <cstddef>
#include <cstdint>
#include <vector>

// kvq_turns as kernels read it
struct kvq_mean_tables {
    int n_pad, n_fast, n_terms;
    const float *high, *low, *half, *fast;
    const int16_t *basis, *waves;
};

constexpr int KVQ_TURN_BASIS = 8;                  // functions of either kind
constexpr int KVQ_TURN_PAGES = 4;                  // of 32 cells
constexpr int KVQ_TURN_HALF = 16 * KVQ_TURN_PAGES; // offsets on either side
constexpr double KVQ_TURN_ERROR = 5e-4;
constexpr double KVQ_TURN_UNIT = 4096.0; // tables of 16 bits hold so many times their values

struct kvq_turns {
    int n_pairs = 0, n_pad = 0;   // n_pad: multiple of 16
    int n_fast = 0, n_terms = 0;  // even; n_terms: fast pairs and basis functions
    std::vector<int32_t> pair;    // [n_pairs] by falling speed: fast ones first
    std::vector<float> high, low; // cos, sin: [n_high][2][n_pad] of 64*i (magnitude included), [64][2][n_pad]
    std::vector<float> half;      // [2][n_pad], of 1/2
    std::vector<float> fast;      // [2][n_pad]: 1 for fast pairs; 1 for slow ones
    std::vector<int16_t> basis;   // [(n_pad - n_fast)/2][KVQ_TURN_BASIS][even, odd][2 pairs]: v, |v| <= 1
    std::vector<int16_t> waves;   // [KVQ_TURN_PAGES][n_terms/2][cos, sin][16 offsets][2 terms]

    explicit kvq_turns(const std::vector<double> & speed);
    void add_high(const std::vector<double> & angles, float magnitude); // of every pair
    void cut_high(int n) { high.resize((size_t) n * 2 * n_pad); }
    kvq_mean_tables view() const {
        return { n_pad, n_fast, n_terms, high.data(), low.data(), half.data(), fast.data(), basis.data(),
            waves.data() };
    }
};

// Coefficients of one query row: coef [2][n_pad] and their units, step [2] (impl_mean.h). q and mean: one head row.
void kvq_turn_coefficients(const kvq_rotary & rot, const float * q, const float * mean, float * coef, float * step);
// q = R_-by q, without magnitude; |by| has been reached
void kvq_turn_back(const kvq_rotary & rot, int32_t by, float * q);

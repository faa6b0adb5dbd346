// What the mean of keys adds to the logits of 32 to 128 neighbouring positions (aqua, cpu/impl_mean.h): with q and mean as complex pairs,
//   q . R_p mean = sum over pairs of  a cos(p w) + b sin(p w)        a = qx mx + qy my,  b = qy mx - qx my,  w = speed of the pair
// Around the centre P - 1/2 of the positions, o = p - (P - 1/2), this is sum A cos(o w) + B sin(o w), A and B being a and b turned once.
// The fast pairs are summed so, with tables of cos(o w) and sin(o w) for o = 1/2 .. 63 1/2 in 16 bits: positions o and -o share their
// products. Of the slow ones (64 w below 3/4) four powers of o are enough: their sums are made once for all positions, and are then
// five more terms, of the even powers in the place of cosines and of the odd ones in that of sines.
#pragma once

#include "ggml-kvq.h"

#include <vector>

constexpr int   KVQ_TURN_PAGES = 4;                       // of 32 cells
constexpr int   KVQ_TURN_HALF  = 16 * KVQ_TURN_PAGES;     // offsets on either side
constexpr float KVQ_TURN_SLOW  = 0.75f, KVQ_TURN_UNIT = 4096.0f;

struct kvq_turns {
    int n_pairs = 0, n_pad = 0, n_fast = 0; // n_fast <= n_pad, multiples of 16
    std::vector<int32_t> pair;              // [n_pairs] by falling speed: fast ones first
    std::vector<float>   high, low;         // cos, sin: [n_high][2][n_pad] of 64*i (magnitude included), [64][2][n_pad]
    std::vector<float>   half;              // [2][n_pad], of 1/2
    std::vector<float>   power;             // [4][n_pad - n_fast]: (64 w)^k / k!
    std::vector<int16_t> cos, sin;          // [KVQ_TURN_PAGES][n_fast/2 + 2][16][2], units of 1/KVQ_TURN_UNIT; last (1, u^2, u^4), (u, u^3), u = o/64

    explicit kvq_turns(const std::vector<double> & speed);
    void add_high(const std::vector<double> & speed, float magnitude, int i); // positions 64*i..
};

// Coefficients of one query row: coef [2][n_pad], in units of step, so that fast pairs sum up in 32 bits. q and mean: one head row.
void kvq_turn_coefficients(const kvq_rotary & rot, const float * q, const float * mean, float * coef, float & step);
// q = R_-by q, without magnitude; |by| has been reached
void kvq_turn_back(const kvq_rotary & rot, int32_t by, float * q);

// Rotary position embedding of one head row, with YaRN (arXiv 2309.00071, sections 3.2-3.4) and per-frequency factors:
//   theta_i = pos * base^(-2i/n) / factor_i,  interpolated by freq_scale below the ramp [beta_slow, beta_fast]
// Rotating by -pos undoes rotating by pos up to the magnitude, which is divided out.
#pragma once

#include "ggml-kvq.h"
#include "turns.h"

#include <cstdint>
#include <memory>
#include <vector>

struct kvq_rope {
    int   n_dims = 0, n_ctx_orig = 0;
    bool  neox = false; // pairs (i, i + n/2) instead of (2i, 2i+1)
    float freq_base = 10000.0f, freq_scale = 1.0f, ext_factor = 0.0f, attn_factor = 1.0f, beta_fast = 32.0f, beta_slow = 1.0f;
    std::vector<float> freq_factors; // n_dims/2 or empty
    bool operator==(const kvq_rope & o) const;
};

struct kvq_rope_table { // cos and sin of one position, magnitude folded in
    std::vector<float> cos, sin;
};

// inverse: rotate back
void kvq_rope_fill (const kvq_rope & r, int32_t pos, bool inverse, kvq_rope_table & t);
void kvq_rope_apply(const kvq_rope & r, const kvq_rope_table & t, float * row);

// The same rotation as tables that kernels read (kvq_rotary): angles are linear in the position, so cos and sin of 64*a + b are a
// complex product. Computed in f64; against kvq_rope_fill the angle differs by the f32 rounding of the latter.
class kvq_rotor {
public:
    explicit kvq_rotor(const kvq_rope & rope);
    void reach(int32_t pos);                                  // makes positions up to pos usable; before any parallel use
    void apply(int32_t pos, bool inverse, float * row) const; // pos < 0 counts as 0
    const kvq_rope   & rope() const { return r; }
    const kvq_rotary & view() const { return v; }
private:
    kvq_rope   r;
    kvq_rotary v = {};
    std::vector<double> speed; // radians a position
    std::vector<float>  high, low;
    float magnitude = 1.0f;
    std::unique_ptr<kvq_turns> turns;
};

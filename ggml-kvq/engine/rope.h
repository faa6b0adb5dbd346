// Rotary position embedding of one head row, with YaRN (arXiv 2309.00071, sections 3.2-3.4) and per-frequency factors:
//   theta_i = pos * base^(-2i/n) / factor_i,  interpolated by freq_scale below the ramp [beta_slow, beta_fast]
// Rotating by -pos undoes rotating by pos up to the magnitude, which is divided out.
//
// With sections (M-RoPE of Qwen2-VL, arXiv 2409.12191, section 2.1) a token has four positions: time, row, column and
// one more. Each pair of channels turns by one of them. llama.cpp gives text the positions (p, p, p, 0).
#pragma once

#include "ggml-kvq.h"
#include "turns.h"

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

struct kvq_rope {
    int n_dims = 0, n_ctx_orig = 0;
    bool neox = false; // pairs (i, i + n/2) instead of (2i, 2i+1)
    float freq_base = 10000.0f, freq_scale = 1.0f, ext_factor = 0.0f, attn_factor = 1.0f, beta_fast = 32.0f,
          beta_slow = 1.0f;
    std::vector<float> freq_factors; // n_dims/2 or empty
    int sections[4] = {};            // pairs that turn by each of four positions; all 0: a token has one position
    bool interleaved = false;        // the sections alternate: time, row, column, time, ...
    bool multi() const { return sections[0] || sections[1] || sections[2] || sections[3]; }
    int section(int pair) const; // 0..3
    bool operator==(const kvq_rope & o) const;
};

struct kvq_rope_table { // cos and sin of one position, magnitude folded in
    std::vector<float> cos, sin;
};

// inverse: rotate back
void kvq_rope_fill(const kvq_rope & r, int32_t pos, bool inverse, kvq_rope_table & t);
void kvq_rope_apply(const kvq_rope & r, const kvq_rope_table & t, float * row);

// row = R_pos row, or its inverse, by tables; pos < 0 counts as 0.
void kvq_rotary_apply(const kvq_rotary & rotary, int32_t pos, bool inverse, float * row);
// The same in two steps, for many rows at one position: turn [2][n_dims/2], cos and sin.
void kvq_rotary_turn(const kvq_rotary & rotary, int32_t pos, bool inverse, float * turn);
void kvq_rotary_turn_row(const kvq_rotary & rotary, const float * turn, float * row);

// The same rotation as tables that kernels read (kvq_rotary): angles are linear in the position, so cos and sin of
// 64*a + b are a complex product. Computed in f64; against kvq_rope_fill the angle differs by the f32 rounding of the
// latter.
//
// Four positions are one number here, so that kernels, tables of positions and tags need not know of sections. Numbers
// below first() are text: p is (p, p, p, 0). Behind them lie segments of 128 numbers, two rows of `high` each: number i
// of a segment stands for its own four positions with i added to the first three. A segment is made when a token needs
// it: an image of 30 by 40 needs up to 1200, of 1 KiB each with heads of 64.
class kvq_rotor {
public:
    using place_t = std::array<int32_t, 4>;
    static constexpr int MAX_SEGMENTS = 1 << 16;

    explicit kvq_rotor(const kvq_rope & rope, int n_text = 0); // n_text: with sections, positions of text
    void cover(int32_t pos);                                   // makes positions up to pos usable, before parallel use
    int32_t place(const place_t & at);                         // number of four positions; 0, no turn: no room left
    bool place_of(int32_t number, place_t & at) const;         // the reverse; false: text, or no such number
    int32_t first() const { return first_number; }
    void forget(); // segments, when no number of theirs is in use
    void apply(int32_t pos, bool inverse, float * row) const { kvq_rotary_apply(v, pos, inverse, row); }
    const kvq_rope & rope() const { return r; }
    const kvq_rotary & view() const { return v; }

private:
    kvq_rope r;
    kvq_rotary v = {};
    void add_high(const place_t & at);
    std::vector<double> speed; // radians a position
    std::vector<double> extra; // likewise of the fourth position, which stands still in text and in a segment
    int32_t first_number = 0;
    std::map<place_t, int32_t> segments; // by the positions of their number 0
    std::vector<place_t> starts;
    std::vector<float> high, low;
    float magnitude = 1.0f;
    std::unique_ptr<kvq_turns> turns;
};

// Rows of all heads of a cell in a calibrated basis (kvq_basis of ggml-kvq.h): keys before rotary embedding and values,
// less their means. Few coordinates hold most of what the heads of a cell have in common; blocks hold the rest.
//
//   z[j]  = sum_i row[i] in[i][j]                            sums in f32, in the order of i
//   scale = 0.3375 sqrt(sum_j z[j]^2 / n) as 3 bits of mantissa and 5 of exponent (kvq_coord_scale), one a cell
//   c[j]  = 8 + floor(z[j] / scale), within 0..15            0.3375: the best step of 16 for normal z
//   row[i] = (step[i] * f32(sum_j (2 c[j] - 15) out[j/4][i][j%4])) * scale       sums are whole numbers: no order
//
// What is sealed is the row less its decoded coordinates, so their error is no error of the cell. The principal axes
// of keys, weighted by what an error there costs a logit, are the best basis (calibrate/basis.py). GEAR
// (arXiv 2403.05527) adds a low-rank part to quantised rows; there it is fitted to the error of each prompt.
//
// In pairs, u8 [n_head * coords/2][n_cells]: the even one in the low half, the scale in place of the last pair. Head h
// of a page holds pairs h*coords/2 .. (h+1)*coords/2-1 of its cells, behind the scales of its block.
#pragma once

#include "ggml-kvq.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

constexpr int KVQ_COORD_TOP = 15;
constexpr float KVQ_COORD_STEP = 0.3375f;
constexpr int KVQ_MAX_COORDS = 1024; // of a cell: their sums are exact in f32

// (8 + e % 8) 2^(e/8 - 19)
static inline float kvq_coord_scale(uint8_t e) {
    const uint32_t bits = ((uint32_t) e << 20) + (111u << 23);
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// A basis and what it points at.
struct kvq_basis_data {
    std::vector<float> in, step;
    std::vector<int8_t> out;
    std::vector<int32_t> off;
    kvq_basis view = {};
    // axes [n][width]: what a coordinate of 1 adds to a row; in [n][width]: what it is read with
    void make(int n, int width, const float * axes, const float * in);
    // once they lie where they stay
    void look() { view = { view.n, view.width, in.data(), out.data(), step.data(), off.data() }; }
    static size_t nb(int n, int width) { return (size_t) width * (4 * (size_t) n + (size_t) (n + 3) / 4 * 4 + 8); }
};

// params: of the first head of a page, nb_params apart; rows f32 [n_cells][width].
void kvq_basis_encode(const kvq_basis & b, const kvq_codec & c, size_t nb_params, const float * rows, uint8_t * params);
void kvq_basis_decode(const kvq_basis & b, const kvq_codec & c, size_t nb_params, const uint8_t * params, float * rows);

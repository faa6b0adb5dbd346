// Rows of all heads of a cell in a calibrated basis (kvq_basis of ggml-kvq.h): keys before rotary embedding, less their
// means. Few coordinates hold most of what the heads of a cell have in common; blocks hold the rest.
//
//   z[j]  = sum_i row[i] in[i][j]                            sums in f32, in the order of i
//   scale = 0.3375 sqrt(sum_j z[j]^2 / n) as 3 bits of mantissa and 5 of exponent (kvq_coord_scale), one a cell
//   c[j]  = 8 + floor(z[j] / scale), within 0..15            0.3375: the best step of 16 for normal z
//   row[i] = (step[i] * f32(sum_j (2 c[j] - 15) out[j/4][i][j%4])) * scale       sums are whole numbers: no order
//
// What is sealed is the row less its decoded coordinates, so their error is no error of the cell. Values have a basis
// of their own for the coordinates of their cell's key. The principal axes of keys, weighted by what an error there
// costs a logit, are the best basis (calibrate/basis.py). GEAR (arXiv 2403.05527) adds a low-rank part to quantised
// rows; there it is fitted to the error of each prompt. MLA (arXiv 2405.04434) trains models whose keys and values
// follow from few numbers of a cell.
//
// In pairs, u8 [n_head * coords/2][n_cells]: the even one in the low half, the scale in place of the last pair. Head h
// of a page of keys holds pairs h*coords/2 .. (h+1)*coords/2-1 of its cells, behind the scales of its block.
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
    // axes [n][width]: what a coordinate of 1 adds to a row; read [n][width]: what it is read with, NULL: of values
    void make(int n, int width, const float * axes, const float * read);
    // once they lie where they stay
    void look() { view = { view.n, view.width, in.data(), out.data(), step.data(), off.data() }; }
    static size_t nb(int n, int width) { return (size_t) width * (4 * (size_t) n + (size_t) (n + 3) / 4 * 4 + 8); }
};

// Where the pairs of a page lie: `each` of a head, the heads `nb_head` bytes apart.
template <typename Byte> struct kvq_coord_pairs {
    Byte * first;
    size_t nb_head;
    int each, n_cells;
    Byte * of(int pair) const {
        return first + (size_t) (pair / each) * nb_head + (size_t) (pair % each) * (size_t) n_cells;
    }
};
// of the parameters of a page's first head, nb_params apart
kvq_coord_pairs<uint8_t> kvq_coords_in(const kvq_codec & c, size_t nb_params, uint8_t * params);
kvq_coord_pairs<const uint8_t> kvq_coords_in(const kvq_codec & c, size_t nb_params, const uint8_t * params);
// side by side, kvq_coords_nb bytes
kvq_coord_pairs<const uint8_t> kvq_coords_alone(const kvq_codec & c, const uint8_t * pairs);
size_t kvq_coords_nb(const kvq_codec & c, int n_head);

// rows f32 [n_cells][width]
void kvq_basis_encode(const kvq_basis & b, const kvq_coord_pairs<uint8_t> & to, const float * rows);
void kvq_basis_decode(const kvq_basis & b, const kvq_coord_pairs<const uint8_t> & from, float * rows);

// Lattice blocks (HIGGS, arXiv 2411.17525; AQUA-KV section 3): each head row is rotated by a Hadamard matrix, divided
// by its scale, and every d neighbouring coordinates become the index of the nearest of n fixed points.
//     x = H (s * point[index])        H = H^T = H^-1, block diagonal: blocks of the largest power of two that divides
//         the head size
// One block = one page of one KV head. codec.bits = log2(n)/d code bits a value, codec.group = d, so n = 2^(bits*d).
//
// Indices are laid out as affine codes are (affine.h), a vector of d channels taking the place of a channel:
//     K: lane = cell, dot = vector        V: lane = vector, dot = cell
//   part     a bit field of the index: 2 bits = {2}, 4 = {4}, 6 = {4 low, 2 high}, 8 = {8}
//   chunk    64 bytes: 16 lanes x 4 bytes x (8/w) planes; byte [lane%16][k], plane j = dot index chunk*(32/w) + 4*j + k
//   nb_codes = sum over parts of ceil(lanes/16) * ceil(dots*w/32) * 64
//
// Parameters, one scale a cell:
//   scale = f16:    f16 s[n_cells]                        nb_params = 2*n_cells
//   scale = 8-bit:  f16 top, u8 u[n_cells]                nb_params = 2 + n_cells       s = top * u*u / 65025
//   scale = 4-bit:  f16 top, u4 u[n_cells], low half first     nb_params = 2 + n_cells/2    s = top * u*u / 225
// 4 bits lose 0.1 to 0.7 % in squared error, and spare as much as an eighth of the codes' bytes (keys of 64 channels in
// halves, 2 bits).
//
// Coordinates (codec.coords, basis.h) lie behind the scales: u8 [coords/2][n_cells], the even one in the low half.
//
// Split keys (codec.split): the channels of the slow half of the rotary pairs are a block of their own, rotated and
// scaled by themselves; those of the fast half another one of codec.fast_bits, or zero with 0 bits. Pairs stay
// together, so that keys may be turned as a whole. Behind the window fast pairs add to a logit what averages out over
// the distance, once the mean is kept (policy/transform.h): bits are better spent on slow ones.
//   codes, params = those of the slow half, then those of the fast half
//
// The root mean square is the best scale on average; a given row is held better by another one. With 3 and 4 bits the
// encoder tries KVQ_LATTICE_FACTORS times it: 7 to 16 % less squared error with 64 channels, more of rows with heavy
// tails. With 1 and 2 bits it would be 0 to 3 %: they keep the root mean square.
#pragma once

#include "affine.h"
#include "types.h"

#include <cstdint>

constexpr int KVQ_LATTICE_MAX_POINTS = 256;

struct kvq_grid {
    int d, n, bits;       // bits a value
    int step;             // in units of 2^-12
    const int8_t * point; // [n][d], coordinates in steps
};

constexpr int KVQ_LATTICE_SMALL = 63; // largest coordinate of a grid in steps; 127 with d=2 n=256

const kvq_grid * kvq_grid_find(int d, int bits); // NULL: no such grid

// Scales that are tried, as factors of the root mean square; of equals the first is taken.
//     error(f) = f^2 * sum over vectors of round(min(1024 * |y - p|^2, 2^24 / vectors))      y = x / (f * rms)
// p is the point nearest to the centre of y's square in a table: 128 x 128 squares, 16 to 1, from -4 to 4; what lies
// outside counts to the square at the edge. Sums of whole numbers below 2^24 are exact, so they have no order.
constexpr int KVQ_LATTICE_N_FACTORS = 8, KVQ_LATTICE_SQUARES = 128;
constexpr float KVQ_LATTICE_FACTORS[] = { 1.0f, 0.94f, 1.07f, 0.86f, 1.15f, 0.78f, 1.25f, 0.7f };
constexpr float KVQ_LATTICE_PER_UNIT = 16.0f, KVQ_LATTICE_ERROR_UNIT = 1024.0f;

constexpr float kvq_lattice_error_cap(int n_vectors) { return (float) ((1 << 24) / n_vectors); }

// The points of the squares, [square of coordinate 0][square of coordinate 1]: coordinate 0 in units of 2^-12 in the
// lower half, coordinate 1 in the upper half. NULL: this grid keeps the root mean square. Lives as long as the program.
const int32_t * kvq_lattice_squares(const kvq_grid & g);

// The blocks of a codec, each one of half the channels with codec.split; how many there are.
struct kvq_lattice_half {
    kvq_codec codec;      // not split
    size_t codes, params; // where it begins in the codes and in the parameters of the whole
    bool fast;
};
int kvq_lattice_halves(const kvq_codec & c, kvq_lattice_half out[2]);
// Channel i of a half in the head.
static inline int kvq_lattice_channel(const kvq_codec & c, bool fast, int i) {
    const int half = c.head_size / 2, quarter = half / 2;
    return c.split == KVQ_SPLIT_NORM ? (fast ? 0 : half) + i : i / quarter * half + (fast ? 0 : quarter) + i % quarter;
}

const char * kvq_lattice_refuse(const kvq_codec & c);
size_t kvq_lattice_nb_codes(const kvq_codec & c);
size_t kvq_lattice_nb_params(const kvq_codec & c);
size_t kvq_lattice_coords_at(const kvq_codec & c); // where coordinates begin in the parameters (basis.h)
void kvq_lattice_encode(const kvq_codec & c, const uint16_t * rows, const uint8_t * valid, const void * shared,
    void * codes, void * params);
// The same by another encoder of blocks that are not split.
void kvq_lattice_encode_by(kvq_encode_function encode, const kvq_codec & c, const uint16_t * rows,
    const uint8_t * valid, const void * shared, void * codes, void * params);
void kvq_lattice_decode(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows);
bool kvq_lattice_match(const kvq_codec & c, const uint16_t * rows, kvq_low_bits low, const void * shared, void * codes,
    const void * params);

void kvq_lattice_assign(const kvq_codec & c, const uint16_t * rows, void * codes, const void * params);

void kvq_lattice_scales(const kvq_codec & c, const void * params, float * scale);     // [n_cells]
void kvq_lattice_put_scales(const kvq_codec & c, const float * scale, void * params); // likewise

// Geometry of a codec that is not split: parts of an index, lanes and dots as in affine.h.
kvq_affine_parts kvq_lattice_get_parts(const kvq_codec & c);
int kvq_lattice_n_tiles(const kvq_codec & c);

// x = H x, n channels; butterflies in order of growing distance, then one product with 1/sqrt(block).
int kvq_hadamard_block(int n);
void kvq_hadamard(int n, float * x);

// Affine blocks: x = zero + scale * code, 0-4 bits. One block = one page of one KV head.
//
// Codes are laid out for byte-dot instructions. Two dimensions: `lane` (a vector lane accumulates one of them) and
// `dot`
// (contracted, four bytes a lane):        K: lane = cell, dot = channel        V: lane = channel, dot = cell
//
//   part     a bit field of the code: 1 = {1}, 2 = {2}, 3 = {2 low, 1 high}, 4 = {4}; parts follow one another
//   tile     16 lanes; tiles of a part follow one another
//   chunk    64 bytes: 16 lanes x 4 bytes x (8/w) planes, w = width of the part; chunks of a tile follow along dot
//   byte     [lane%16][k], k = 0..3; plane j holds bits j*w .. j*w+w-1 = code of dot index chunk*(32/w) + 4*j + k
//
//   nb_codes = sum over parts of ceil(lanes/16) * ceil(dots*w/32) * 64
//
// Parameters, np = number of (scale, zero) pairs:  K: [n_cells/group][head_size]   V: [ceil(head_size/group)][n_cells]
//   scale = f16:   f16 scale[np], f16 zero[np]                                          nb_params = 4*np
//   scale = 8-bit: f16 s_low, s_step, z_low, z_step, u8 scale[np], u8 zero[np]          nb_params = 8 + 2*np
//                  value = low + step * u8; codes are chosen under the stored values, as encode_ref says
//   scale = 4-bit: f16 s_low, s_step, z_low, z_step, u8 pair[np] = scale | zero << 4            nb_params = 8 + np
//                  value = low + step * u4; likewise
//
// Stored parameters are the calibrated ones (XQuant section 3.2): zero = min + eta*range, scale = (1 -
// 2*eta)*range/(2^bits - 1).
#pragma once

#include "ggml-kvq.h"

#include <cstddef>
#include <cstdint>

constexpr int KVQ_TILE_LANES = 16;
constexpr int KVQ_CHUNK_BYTES = 64;
static_assert(KVQ_TILE_LANES * 4 == KVQ_CHUNK_BYTES, "a chunk is 16 lanes of 4 bytes");

struct kvq_affine_dims {
    int lanes, dots; // padded lanes are a multiple of 16
    int n_tiles;
    int np; // parameter pairs
};

kvq_affine_dims kvq_affine_get_dims(const kvq_codec & c);

// NULL when the block can be held, else why not (and the cure).
const char * kvq_affine_refuse(const kvq_codec & c);

size_t kvq_affine_nb_codes(const kvq_codec & c);
size_t kvq_affine_nb_params(const kvq_codec & c);

void kvq_affine_encode_ref(const kvq_codec & c, const uint16_t * rows, const uint8_t * valid, const void * shared,
    void * codes, void * params);
void kvq_affine_decode_ref(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows);

// Stores parameters in the block's format.
void kvq_affine_put_params(const kvq_codec & c, void * params, const float * scale, const float * zero);

// Width and byte offset of the parts of a code; n <= 2.
struct kvq_affine_parts {
    int n;
    int width[2], shift[2];
    size_t offset[2];
    int n_chunks[2]; // per tile
};
kvq_affine_parts kvq_affine_get_parts(const kvq_codec & c);

// Code of (lane, dot). The parts come from the caller: worked out anew for every value they cost more than the code
// itself, and GCC 12.2 then miscompiles the encode loop at -O1 and -O2 (all codes 0).
int kvq_affine_get_code(const kvq_affine_parts & p, const uint8_t * codes, int lane, int dot);
void kvq_affine_put_code(const kvq_affine_parts & p, uint8_t * codes, int lane, int dot, int code);

// The two parameter arrays as f32.
void kvq_affine_get_params(const kvq_codec & c, const void * params, float * scale, float * zero);

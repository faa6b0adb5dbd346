// Mixed blocks (ZipCache, arXiv 2405.14256): the salient cells of a page in `hi` bits, the rest in `bits`, each set
// an affine block.
//
//   codec     n_cells = page, n_hi salient cells (a multiple of 32; so is the rest), hi and bits = code bits of either
//   set       bit t of a block's first n_cells/8 parameter bytes: cell t is salient. It is an input of encode, which
//       keeps it.
//   part 0    salient cells in cell order, part 1 the others; a part with no cells has no bytes
//   keys      part = affine, one (scale, zero) per channel                                              (section 4.2,
//       channel-wise)
//   values    c_i = sqrt(max_t |x_ti|), 1 when 0; part = affine of f16(x_ti/c_i), one pair per cell
//       (channel-separable, eq. 6)
//             c_i is an f16 of 3 mantissa bits: byte = bits 7..14 of (f16 + 64), c_i = the f16 byte << 7
//
//   params    set [n_cells/8], values: u8 c[head_size], parameters of part 0, of part 1
//   codes     codes of part 0, of part 1
#pragma once

#include "types.h"

#include <cstddef>
#include <cstdint>

// Part i as an affine block; n_cells 0: the part has no cells.
kvq_codec kvq_mixed_part(const kvq_codec & c, int i);

// Where the parts lie.
struct kvq_mixed_map {
    size_t codes[2], params[2], channels; // channels: offset of c in params
    size_t nb_codes, nb_params;
};
kvq_mixed_map kvq_mixed_offsets(const kvq_codec & c);

static inline uint16_t kvq_mixed_channel(uint8_t byte) { return (uint16_t) (byte << 7); } // c as f16

// Cells of part i in order; params: of the block.
int kvq_mixed_cells(const kvq_codec & c, const void * params, int i, int32_t * cells);

const char * kvq_mixed_refuse(const kvq_codec & c);
size_t kvq_mixed_nb_codes(const kvq_codec & c);
size_t kvq_mixed_nb_params(const kvq_codec & c);
// A set of any other size than n_hi is replaced by the first n_hi cells.
void kvq_mixed_encode(const kvq_codec & c, const uint16_t * rows, const uint8_t * valid, const void * shared,
    void * codes, void * params);
// The same with another encoder of the parts.
void kvq_mixed_encode_by(kvq_encode_function encode, const kvq_codec & c, const uint16_t * rows, const uint8_t * valid,
    void * codes, void * params);
void kvq_mixed_decode(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows);
bool kvq_mixed_match(const kvq_codec & c, const uint16_t * rows, kvq_low_bits low, const void * shared, void * codes,
    const void * params);

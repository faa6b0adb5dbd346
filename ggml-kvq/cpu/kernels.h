// The kernels of one instruction set: one source (kernels_impl.h) over a thin vector layer (isa_*.h), compiled once
// per ISA and chosen at run time. Row order in the table of dispatch.cpp = preference.
//
// A block of rows = up to KVQ_MAX_ROWS query rows that read one KV head (query heads of the group times query tokens).
// Rows are padded: q and out have stride dp = head size rounded up to 16 (zeros behind), logits have stride n_slots
// of the page.
#pragma once

#include "ggml-kvq.h"
#include "base/constants.h"
#include "engine/turns.h"
#include "types/basis.h"
#include "types/predictor.h"

#include <cstddef>
#include <cstdint>

constexpr int KVQ_MAX_ROWS = 64;
constexpr int KVQ_WORK_ROWS = 8; // rows a kernel works on at once
constexpr int KVQ_MAX_RUN = 4;   // pages likewise
constexpr int KVQ_N_TYPES = 2;   // kvq_type below; lattice blocks have entries of their own

constexpr float KVQ_FINE = 254.0f; // steps of the low byte of a folded query in one of the high byte

// 2^x on [-1/2, 1/2]: 1 + x*(c1 + x*(c2 + ...)), relative error 8e-8
constexpr float KVQ_EXP2_1 = 0.69314694f, KVQ_EXP2_2 = 0.24022120f, KVQ_EXP2_3 = 0.055507131f,
                KVQ_EXP2_4 = 0.0096755419f, KVQ_EXP2_5 = 0.0013276472f;

// Blocks of one KV head in up to KVQ_MAX_RUN pages, which a kernel takes together so that one page's latencies hide
// behind the others.
struct kvq_run {
    int n_pages;
    const void *codes[KVQ_MAX_RUN], *params[KVQ_MAX_RUN];
};

// What is taken off 16 rows of a head, or put back. NULL: that step is left out.
//   into a block   row = R_before row;  row - R_of_mean (mean + pred);  R_behind row;  row[channel[i]] gain[i]
//                  where mean and pred are not turned: row - mean - pred
//   back           row[channel[i]] = row[i] gain[i];  R_before row;  row + R_of_mean (mean + pred);  R_behind row
struct kvq_row_turn {
    int head_size, n_dims;
    bool neox;
    const float *before, *of_mean, *behind; // tables of angles, as turn_table makes them
    const float *mean, *pred;               // [head_size]; [16][pred_stride]
    size_t pred_stride;
    const uint16_t * channel; // of this head; the gains are those of the way
    const float * gain;
};

// Geometry of a lane's blocks, worked out once per call (kvq_make_view). Codecs add their own fields at the end.
struct kvq_view {
    kvq_codec codec;
    int dp;                     // head size padded to 16
    size_t nb_codes, nb_params; // of one KV head; f16: bytes of the padded tile, 0
    // affine
    int np, n_groups; // parameter pairs; groups of lanes that share them
    int n_tiles;
    int n_parts, width[2], shift[2], n_chunks[2];
    size_t offset[2];
};

// What a block type offers to the attention loop. Rows are padded as above; logits and p: [page][row][n_cells]; work:
// kvq_work_bytes.
struct kvq_block_kernels {
    // logits[i][r][t] = q[r] . k[i][t]
    void (*score)(const kvq_view & v, int n_rows, const kvq_run & run, const float * q, float * logits, void * work);
    // out[r] += sum_i f[i][r] sum_t p[i][r][t] * v[i][t]      0 <= p <= 1; f: [page][KVQ_MAX_ROWS]
    void (*accum)(const kvq_view & v, int n_rows, const kvq_run & run, const float * p, const float * f, float * out,
        void * work);
    // decoded values as f32: K [dp][n_cells], V [n_cells][dp]
    void (*to_tile)(const kvq_view & v, const void * codes, const void * params, float * tile, void * work);
    int tile_rows; // from so many rows on, to_tile and the tile kernels are faster
};

// Points by their coordinates in steps, a byte each: a point lies in the slot of key * slot_mul >> the shift.
struct kvq_lattice_slot {
    uint64_t key; // of an empty slot, one that lies elsewhere
    uint8_t index;
};
constexpr int KVQ_LATTICE_SLOT_SHIFT = 50;
constexpr int KVQ_LATTICE_SIDE = 256; // coordinates -128 to 127
constexpr int KVQ_LATTICE_NEAR = 2;   // steps a side of the squares in kvq_lattice_view::near

// Geometry of a lattice block.
struct kvq_lattice_view {
    kvq_codec codec;
    int d, n, n_dots, dot_stride; // dot_stride: dots padded to 4
    int n_tiles, n_chunks[2];
    size_t offset[2], nb_codes, nb_params;
    int block;               // of the Hadamard rotation
    float norm;              // 1/sqrt(block)
    float step;              // point coordinate = step * (table - 128)
    bool wide;               // coordinates beyond KVQ_LATTICE_SMALL steps
    const uint8_t * table;   // [d][max(n, 16)] + 128, then the same without it, as int8
    const float * points;    // [d][n]
    const int32_t * squares; // kvq_lattice_squares
    // d = 2, n > 4, NULL else: what lies in a square of KVQ_LATTICE_NEAR steps a side at [x][y] is nearest to one of
    // three points, their indices in bytes, rising, the last one again where they are fewer; negative: or to another
    const int32_t * near;
    // Of saved states. d = 2: a square of one step a side at [x][y] (KVQ_LATTICE_SIDE) has the point that is nearest to
    // all of it, as index | x << 8 | y << 16 in bytes; -1: no point is (kvq_lattice_pairs)
    const int32_t * pairs;
    const struct kvq_lattice_slot * slots; // else
    uint64_t slot_mul;
    // of split keys: the codec of whole heads, which half this is, and where it begins in a block
    kvq_codec whole;
    bool fast;
    size_t codes_at, params_at;
};

// Keys of a layer: one block a head, or with split keys one or two of half the channels.
struct kvq_lattice_keys {
    int n;
    kvq_lattice_view half[2];
};

// A query row, rotated and folded to two bytes: coordinate j of vector i is step/view.step * (high +
// low/KVQ_LATTICE_FINE), high = q8[j*dot_stride + i], low = q8[(d + j)*dot_stride + i], |high|, |low| <=
// KVQ_LATTICE_TOP: 255 * 63 * 2 fits 16 bits.
constexpr float KVQ_LATTICE_TOP = 63.0f, KVQ_LATTICE_FINE = 126.0f;

struct kvq_lattice_query {
    const int8_t * q8;
    float step, sum[2]; // step includes the table's; sums of the high and of the low bytes
};

struct kvq_kernels {
    const char * name;
    bool (*available)(void);

    void (*f32_to_f16)(const float * x, uint16_t * y, int64_t n);
    void (*f16_to_f32)(const uint16_t * x, float * y, int64_t n);

    // By kvq_type. f16: tile [n_cells][dp]. Affine blocks are read in place.
    // K: w = q*scale is folded to two bytes, once per group of cells; amax = max |w|:
    //   logit = q.zero + amax/127 * sum code*(high + low/254)
    //   |error| <= amax/254/254 * sum code
    // V: w = p*scale becomes 8 bits without sign, per group of channels, under the group's largest scale (p <= 1). What
    // rounding takes from a weight is given back at the middle code; top = max scale:
    //   |error| <= top/510 * sum |code - middle|
    kvq_block_kernels block[KVQ_N_TYPES];
    // The same over lattice blocks. out is rotated and split by coordinate: [n_rows][d][n_tiles*16]. Points are bytes,
    // without rounding.
    // K: amax = max |rotated q|:
    //   |error| <= amax/(2*63*126) * sum |point coordinate| * cell's scale
    // V: w = p*scale becomes 8 bits without sign, under the page's largest scale top:
    //   |error| <= top/510 * sum |point coordinate|
    //   4-bit codes (d=2 n=256) have points of 8 bits, and weights of two bytes: top/(2*63*126) in place of top/510
    // add: added to the logits; may be NULL
    void (*score_lattice)(const kvq_lattice_view & a, int n_rows, const kvq_run & run, const kvq_lattice_query * q,
        const float * add, float * logits);
    void (*accum_lattice)(
        const kvq_lattice_view & a, int n_rows, const kvq_run & run, const float * p, const float * f, float * out);

    // q: row x [head size, padded to 16 with zeros] rotated, in two bytes: bytes [2][d][dot_stride]. x is overwritten.
    void (*fold_query)(const kvq_lattice_view & a, float * x, int8_t * bytes, kvq_lattice_query * q);
    // out [head size, padded to 16] += H rot, one row as accum_lattice leaves it
    void (*unrotate)(const kvq_lattice_view & a, const float * rot, float * out);

    // Keys that lack their mean and, by which `sealed` is NULL, all of their rotary embedding or that from position
    // sealed[t] to pos[t] (lattice_impl.h), in f32: q is neither rotated nor folded. mean [head size] and rot may be
    // NULL; sealed, pos [n_cells].
    // order: of KV head `head`, NULL: channels stay where they are
    void (*score_rope)(const kvq_lattice_keys & a, int n_rows, const uint8_t * codes, const void * params,
        const kvq_order * order, int head, const float * mean, const kvq_rotary * rot, const int32_t * sealed,
        const int32_t * pos, int dp, const float * q, float * logits);
    // apart: 0 when all cells moved as far as the first; gap: 0 when they were sealed at positions in a row; sign:
    // negative when some position is
    void (*page_positions)(
        int n, const int32_t * now, const int32_t * sealed, int32_t * apart, int32_t * gap, int32_t * sign);
    // What kvq_turn_coefficients makes of a row's pairs and of those of the mean [n_pad]
    void (*mean_coefficients)(const kvq_mean_tables & t, float magnitude, const float * qx, const float * qy,
        const float * mx, const float * my, float * coef, float * step);
    // logits = (q . R_p mean) of n_pages pages of n cells at the positions first..: [page][n_rows][n]. n: a multiple
    // of 32, n_pages*n up to 128; coef [n_rows][2][n_pad] and step [n_rows][2] as kvq_turn_coefficients makes them
    void (*score_mean)(const kvq_mean_tables & t, int first, int n_pages, int n, int n_rows, const float * coef,
        const float * step, float * logits);

    // score and accum of one page over what to_tile made
    void (*score_tile)(int n_rows, int dp, int n_cells, const float * tile, const float * q, float * logits);
    void (*accum_tile)(
        int n_rows, int dp, int n_cells, const float * tile, const float * p, const float * f, float * out);

    // Online softmax of a run's logits [page][row][n], in powers of two: m is in units of ln 2.
    //   x = (cap*tanh(scale*logits/cap) + slope*mask) / ln 2,  with cap 0: (scale*logits + slope*mask) / ln 2
    //   top[i] = max x[i] of page i             m = max(m_old, all top[i])         c = 2^(m_old - m)
    //   logits[i] = 2^(x[i] - top[i])           f[i] = 2^(top[i] - m)
    //   sums[i] = sum logits[i]                 l = l*c + sum_i f[i]*sums[i]
    // mask [page][KVQ_MAX_ROWS]: f16 of the n slots, NULL: no mask. f, sums: [page][KVQ_MAX_ROWS]. True when some c is
    // not 1. m, l, f and sums can be read (f written) up to 15 values behind the rows.
    bool (*softmax)(int n_rows, int n, int n_pages, float * logits, float scale, float cap, const float * slope,
        const uint16_t * const * mask, float * m, float * l, float * c, float * f, float * sums);
    // out *= c
    void (*scale)(int n, float * out, float c);

    // Second tier. m = the largest of m and top; w[i] = 2^(top[i] - m), and the sum of w[i] sum[i]; n: a multiple of 16
    float (*page_weights)(int n, const float * top, const float * sum, float * m, float * w);
    // score[t] (+)= sum_r w[r*w_stride] p[r][t], and the largest of them; n: a multiple of 16
    float (*rank_cells)(int n_rows, int n, const float * p, const float * w, int w_stride, bool add, float * score);

    // Predicted methods, types/predictor.h; x [n_rows][x_stride] padded with zeros to groups, out padded to 16, work
    // [n_rows][groups]
    void (*quantise_row)(int n, const float * x, int8_t * x8, float * s);
    void (*predict)(const kvq_predictor & p, int n_rows, const int8_t * x, size_t x_stride, const float * s, bool add,
        float * out, size_t out_stride, int32_t * work);
    // sums[r][c] += sum_t w[t][r] x[t][c], rows in 8 bits; w [n][16], width a multiple of 32
    void (*sum_rows8)(int n_rows, int n, int width, const int8_t * x, size_t x_stride, const float * w, float * sums,
        size_t sums_stride);
    // y[r][i] += step[i] * sum_j (code[i][j] - 64) z[r][j], of 16 outputs of a predictor in 8 bits; z as x above
    void (*apply_tile8)(
        const kvq_predictor & p, int tile, int n_rows, const float * z, size_t z_stride, float * y, size_t y_stride);
    // decoded rows of a lattice block, f32 [n_cells][stride], the values of its decode
    void (*lattice_rows)(
        const kvq_lattice_view & a, const uint8_t * codes, const void * params, float * out, size_t stride);
    // rows [n_cells][stride] += what lattice_rows gives of a head's blocks, in the order of its channels; values are
    // keys of one part. order: of KV head `head`, NULL: channels stay where they are
    void (*add_lattice_rows)(const kvq_lattice_keys & keys, const uint8_t * codes, const uint8_t * params,
        const kvq_order * order, int head, float * rows, size_t stride);
    // f16 rows R_pos (row + mean) of one head, n a multiple of 16; mean and rot may be NULL
    void (*rows_to_f16)(int n, int D, const float * rows, size_t stride, const float * mean, const kvq_rotary * rot,
        const int32_t * pos, uint16_t * tile, int tile_stride);

    // Rows of sealed pages (impl_rows.h). turn_table: angles at 16 positions, [n_dims][16], first the cosines of the
    // pairs, then their sines. turn_rows: 16 rows of a head in f16, in place, on their way into blocks or back.
    void (*turn_table)(const kvq_rotary & rot, const int32_t * pos, bool inverse, float * out);
    void (*turn_rows)(const kvq_row_turn & a, bool back, uint16_t * rows, int stride);

    // Coordinates of a page (types/basis.h), n of a cell.
    // Keys: 2 c as u8 [n/4 rounded up][n_cells][4], then f32 scales [n_cells]. Values: (2 c - 15) scale as f32
    // [n_cells][stride], stride a multiple of 16, zeros behind n.
    void (*key_coords)(const kvq_coord_pairs<const uint8_t> & from, int n, uint8_t * out);
    void (*value_coords)(const kvq_coord_pairs<const uint8_t> & from, int n, int stride, float * out);
    // What mean and coordinates say of keys of a head of D channels, as to_tile has them: [dp][n_cells]. turns: tables
    // of angles, one for 16 cells, NULL: keys are not turned
    void (*basis_keys)(const kvq_basis & b, int head, int D, int dp, int n_cells, const uint8_t * coords,
        const float * mean, const float * turns, int n_dims, bool neox, float * tile);
    // The same as logits of up to coord_rows rows, [row][n_cells], where that is faster than a tile; keys turn as a
    // whole
    int coord_rows;
    void (*coord_logits)(const kvq_basis & b, int head, int D, int dp, int n_cells, const uint8_t * coords,
        const float * mean, const float * turns, bool neox, int n_rows, const float * q, float * logits);
    // Rows [dp] of q for keys that are turned by so much less: turn [2][D/2], its cosines and sines
    void (*turn_back)(int n_rows, int D, int dp, bool neox, const float * turn, const float * q, float * out);
    // out[D] += what the coordinates z say of D channels of values, of the basis from `first` on
    void (*add_basis)(const kvq_basis & b, int first, int D, const float * z, float * out);

    // As kvq_affine_encode_ref, for head sizes that are a multiple of 16; work: kvq_encode_bytes
    void (*encode_affine)(const kvq_view & v, const uint16_t * rows, const uint8_t * valid, bool shared, void * codes,
        void * params, void * work);
    // As kvq_lattice_encode, likewise; work: kvq_lattice_encode_bytes
    void (*encode_lattice)(const kvq_lattice_view & a, const uint16_t * rows, const uint8_t * valid, bool shared,
        void * codes, void * params, void * work);

    // Of saved states, for the same head sizes and with the same work. decode: f16 rows [n_cells][head_size] of a
    // block that is not split. match: the codes of such rows under given parameters, as types.h says; keep: of each
    // cell, the bits of its channels that count. by: NULL, or a factor of each channel (types/mixed.h), one group then.
    void (*decode_affine)(
        const kvq_view & v, const void * codes, const void * params, const float * by, uint16_t * rows, void * work);
    bool (*match_affine)(const kvq_view & v, const uint16_t * rows, const uint16_t * const * keep, const float * by,
        void * codes, const void * params, void * work);
    void (*decode_lattice)(
        const kvq_lattice_view & a, const void * codes, const void * params, uint16_t * rows, void * work);
    // keep NULL: nearest codes of the rows, which need not be decoded ones
    bool (*match_lattice)(const kvq_lattice_view & a, const uint16_t * rows, const uint16_t * const * keep,
        void * codes, const void * params, void * work);
    // Hashes of n rows of `width` values, at any address (base/row_hash.h); false: some value is not finite
    bool (*hash_rows)(const void * rows, int n, int width, uint64_t * hashes);
};

extern const kvq_kernels kvq_kernels_portable;
#if defined(__x86_64__)
extern const kvq_kernels kvq_kernels_avx2;
extern const kvq_kernels kvq_kernels_avx512;
#if defined(KVQ_HAVE_AMX)
void kvq_amx_predict(const kvq_predictor & p, int n_rows, const int8_t * x, size_t x_stride, const float * s, bool add,
    float * out, size_t out_stride, int32_t * work); // as kvq_kernels::predict
bool kvq_amx_available();
#endif
#elif defined(__aarch64__)
extern const kvq_kernels kvq_kernels_neon;
#endif

const kvq_kernels & kvq_get_kernels(void);

kvq_view kvq_make_view(const kvq_codec & c);
// The same lane while its pages are open f16 tiles.
kvq_view kvq_make_open_view(const kvq_codec & c);
size_t kvq_work_bytes(const kvq_view & v);
size_t kvq_encode_bytes(const kvq_view & v);

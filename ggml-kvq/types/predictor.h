// Predictor matrices (AQUA-KV, arXiv 2501.19392, section 3.1): y = W x, in arithmetic that gives the same bits
// wherever it runs, so that what a cell was encoded against is what it is decoded against.
//
//   x8[j] = round(x[j] * (127/amax)), s = amax/127                     one scale a row; amax below 1e-30 counts as 0
//   bits 8:  y[i] = (step[i] * f32(sum_j (code[i][j] - 64) * x8[j])) * s
//   bits 4:  y[i] = (sum_g step[i][g] * sum_{j in g} (code[i][j] - 8) * x8[j]) * s      g: 32 inputs
//
// Sums over j are exact integers, sums over g run in f32 in order. The rounding of x and W costs explained variance,
// not parity. With 8 bits an output has one step, so that its sum is one product of integer matrices.
//   bits 8: code 1..127,  step = amax_i/63, f32                        8 bits a weight
//   bits 4: code 0..15,   step f16: ggml's q4_0                        4.5 bits a weight
//
// Layout: [tile of 16 outputs][group][chunk] of 64 bytes, then steps: f32 [output] or f16 [tile][group][16].
//   bits 8: byte [output][k] of chunk c = code of input 4c + k;  bits 4: low half input 8c + k, high half input 8c +
//   4 + k
#pragma once

#include <cstddef>
#include <cstdint>

constexpr int KVQ_PREDICT_GROUP = 32;
constexpr int KVQ_PREDICT_MOST = 1 << 16; // inputs, and outputs: sums stay within 32 bits

struct kvq_predictor {
    int n_in = 0, n_out = 0, bits = 0;
    const uint8_t * data = nullptr; // kvq_predictor_bytes

    int n_groups() const { return (n_in + KVQ_PREDICT_GROUP - 1) / KVQ_PREDICT_GROUP; }
    int n_tiles() const { return (n_out + 15) / 16; }
    int offset() const { return bits == 8 ? 64 : 8; }
    size_t nb_group() const { return bits == 8 ? 512 : 256; }
    const uint8_t * codes() const { return data; }
    size_t nb_codes() const { return (size_t) n_tiles() * n_groups() * nb_group(); }
    const float * steps8() const { return (const float *) (data + nb_codes()); }
    const uint16_t * steps4() const { return (const uint16_t *) (data + nb_codes()); }
};

size_t kvq_predictor_bytes(int n_in, int n_out, int bits); // 0: no such format

// w [n_out][n_in] f32, finite. bits 4: step = -(largest of the group)/8, as q4_0.
void kvq_predictor_pack(int n_in, int n_out, int bits, const float * w, uint8_t * data);
// One group of a predictor in 4 bits as it is: output i, inputs 32g.., f16 step, 32 codes.
void kvq_predictor_put4(int n_in, int n_out, int i, int g, uint16_t step, const uint8_t * code, uint8_t * data);

void kvq_quantise_row(int n, const float * x, int8_t * x8, float * s);
// y[i] (+)= ... as above; x8 padded with zeros to a multiple of 32
void kvq_predict_row(const kvq_predictor & p, const int8_t * x8, float s, bool add, float * y);

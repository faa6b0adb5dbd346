// Rows of keys between what is sealed and what attention reads (policy/transform.h), by one warp: lane i has channels
// i, i + 32, ...
#pragma once

#include "common.cuh"

struct kvq_device_rotary { // kvq_rotary in device memory; n 0: no embedding
    int n, neox;           // n: pairs
    const float *high, *low;
};

struct kvq_device_order { // kvq_order in device memory, with the gains of one way; channel NULL: channels stay
    const uint16_t * channel;
    const float * gain;
};

struct kvq_device_basis { // kvq_basis in device memory, as rows are read from it; n 0: cells have no coordinates
    int n, width;
    int each, n_cells;    // of a page of keys: pairs of a head, cells
    size_t nb_params, at; // of a head's block: bytes of parameters, and where among them the pairs begin
    const int8_t * out;
    const float * step;
};

struct kvq_turn {
    const float * mean; // [head][head size]; NULL: no mean
    kvq_device_rotary rotary;
    const int32_t *positions, *sealed; // of cells; sealed NULL: before rotary embedding
    kvq_device_order back;             // from a block's order to the head's; keys in one block: gains alone
    kvq_device_basis basis;            // of this lane; each page of keys holds the coordinates
    bool leaves_out() const { return mean || rotary.n || back.gain; }
};

constexpr int TURN_MAX = 512; // channels of a head

// nan stays
static __device__ __forceinline__ uint16_t turned_to_half(float x) {
    return f32_to_f16_bits(x < -65504.0f ? -65504.0f : x > 65504.0f ? 65504.0f : x);
}

// Cosine and sine of pair j at a position, or of its inverse: the operations of kvq_rotor::apply.
static __device__ __forceinline__ float2 turn_factors(const kvq_device_rotary & r, int32_t pos, bool inverse, int j) {
    const int at = max(pos, 0);
    const float *high = r.high + (size_t) (at / 64) * 2 * r.n, *low = r.low + (size_t) j * 2 * KVQ_ROTARY_LOW + at % 64;
    const float m = r.high[0], inv = inverse ? __fdiv_rn(1.0f, m * m) : 1.0f;
    return make_float2((high[j] * low[0] - high[r.n + j] * low[KVQ_ROTARY_LOW]) * inv,
        (high[r.n + j] * low[0] + high[j] * low[KVQ_ROTARY_LOW]) * (inverse ? -inv : inv));
}

// x = R_pos x, or its inverse, likewise. row: TURN_MAX floats of the warp
template <int N>
static __device__ __forceinline__ void turn_row(
    const kvq_device_rotary & r, int32_t pos, bool inverse, float * row, float (&x)[N]) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; i++) { row[32 * i + lane] = x[i]; }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int c = 32 * i + lane;
        if (c < 2 * r.n) {
            const bool first = r.neox ? c < r.n : !(c & 1);
            const int j = r.neox ? (first ? c : c - r.n) : c / 2, other = r.neox ? (first ? c + r.n : j) : c ^ 1;
            const float2 f = turn_factors(r, pos, inverse, j);
            const float y = row[other];
            x[i] = first ? x[i] * f.x - y * f.y : y * f.y + x[i] * f.x;
        }
    }
}

// A row of head h in the order of its block, and back; likewise
template <int N>
static __device__ __forceinline__ void sort_row(
    const kvq_device_order & o, int head_size, int h, bool back, float * row, float (&x)[N]) {
    const int lane = threadIdx.x % 32;
    const uint16_t * channel = o.channel + (size_t) h * head_size;
    const float * gain = o.gain + (size_t) h * head_size;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int c = 32 * i + lane;
        if (c < head_size) { row[back ? channel[c] : c] = back ? x[i] * gain[c] : x[i]; }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int c = 32 * i + lane;
        if (c < head_size) { x[i] = back ? row[c] : row[channel[c]] * gain[c]; }
    }
}

// This lane's means of head h. When the row stays where it was sealed, what is predicted joins them, and both are
// turned to pos.
template <int N>
static __device__ __forceinline__ void mean_row(
    const kvq_turn & a, int head_size, int h, bool stays, int32_t pos, float * row, float (&mu)[N], float (&pred)[N]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < N; i++) {
        mu[i] = a.mean && 32 * i + lane < head_size ? a.mean[(size_t) h * head_size + 32 * i + lane] : 0.0f;
        if (a.mean && stays) {
            mu[i] = mu[i] + pred[i];
            pred[i] = 0.0f;
        }
    }
    if (a.mean && stays) { turn_row<N>(a.rotary, pos, false, row, mu); }
}

// kvq_transform::restore of the row of a cell; pred: what is predicted of this head
template <int N>
static __device__ __forceinline__ void restore_row(
    const kvq_turn & a, int head_size, int h, int cell, float * row, float (&x)[N], float (&pred)[N]) {
    const bool turns = a.rotary.n != 0;
    const int32_t pos = turns ? a.positions[cell] : 0, was = turns && a.sealed ? a.sealed[cell] : 0;
    const bool stays = turns && a.sealed && was == pos;
    if (turns && a.sealed && !stays) { turn_row<N>(a.rotary, was, true, row, x); }
    float mu[N];
    mean_row<N>(a, head_size, h, stays, pos, row, mu, pred);
#pragma unroll
    for (int i = 0; i < N; i++) { x[i] = (x[i] + pred[i]) + mu[i]; }
    if (turns && !stays) { turn_row<N>(a.rotary, pos, false, row, x); }
}

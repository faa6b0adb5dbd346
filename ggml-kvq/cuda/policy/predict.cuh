// Predictors on the device (types/predictor.h): many rows at once, the bits of kvq_predict_row.
#pragma once

#include "cuda/common.cuh"
#include "types/predictor.h"

#include <vector>

constexpr int KVQ_PREDICT_TILE = 128; // rows and outputs of a block; two of them share a multiprocessor

struct kvq_predict_args {
    const uint8_t * weights; // 4 bits: as kvq_predictor_pack leaves them; 8 bits: as kvq_order_weights8 does
    int n_in, n_out, n_rows;
    // [n_rows][x_stride], padded with zeros to groups of 32; 16-byte aligned, as x_stride is
    const int8_t * x;
    const float * s; // [n_rows]
    size_t x_stride, out_stride;
    float * out; // [n_rows][out_stride]
    bool add;    // to what out holds
};

void kvq_launch_predict4(const kvq_predict_args & a, cudaStream_t stream);
void kvq_launch_predict8(const kvq_predict_args & a, int n_sm, cudaStream_t stream);
std::vector<uint8_t> kvq_order_weights8(const kvq_predictor & p); // codes less their offset; then the steps

// Predictors on the device (types/predictor.h): many rows at once, the bits of kvq_predict_row.
#pragma once

#include "common.cuh"

struct kvq_predict_args {
    const uint8_t * weights; // as kvq_predictor_pack leaves them
    int n_in, n_out, bits, n_rows;
    // [n_rows][x_stride], padded with zeros to groups of 32; 16-byte aligned, as x_stride is
    const int8_t * x;
    const float * s; // [n_rows]
    size_t x_stride, out_stride;
    float * out; // [n_rows][out_stride]
    bool add;    // to what out holds
};

void kvq_launch_predict(const kvq_predict_args & a, cudaStream_t stream);

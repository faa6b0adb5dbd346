// Predictors over plain rows: what calibration, graph nodes and tests use.
#pragma once

#include "ggml-kvq.h"
#include "types/predictor.h"

// out[t] = W rows[t] + add[t], strides in values; add NULL: nothing. Arithmetic of types/predictor.h.
void kvq_cpu_predict(const kvq_predictor & p, int64_t n, const float * rows, int64_t row_stride, const float * add,
    int64_t add_stride, float * out, int64_t out_stride, int n_threads);

// rows [n][n_head*head_size] become what an encoded page gives back; pages are filled one after the other
void kvq_cpu_round_trip(const kvq_codec & c, int n_head, int64_t n, float * rows, int n_threads);

// The CPU's engine over host memory, and its kernels for rows that the host holds. Every build has them; cpu/
// implements them.
#pragma once

#include "device.h"

kvq_device & kvq_cpu_device();

void kvq_cpu_f32_to_f16(const float * x, uint16_t * y, int64_t n);
void kvq_cpu_f16_to_f32(const uint16_t * x, float * y, int64_t n);

// As the type's encode: same bytes.
void kvq_cpu_encode(const kvq_codec & c, const uint16_t * rows, const uint8_t * valid, const void * shared,
    void * codes, void * params);

// n streams; workspace is kept per calling thread.
void kvq_cpu_attend(const kvq_attn * attn, int n, int n_threads);
// Over some of the pages: lse[i] [n_q][n_head] = log of the sum of exp(logits), by which parts are merged.
void kvq_cpu_attend_part(const kvq_attn * attn, int n, float * const * lse, int n_threads);

// As kvq_column_sums of ggml-kvq.h, unchecked.
void kvq_cpu_column_sums(
    const kvq_attn & attn, const int32_t * rows, int n_rows, float * sums, int32_t * seen, int n_threads);

// Predicted rows (policy/chain.h), types/predictor.h. out[i] (+)= W x[i] for n rows of 8 bits; work: n * groups.
void kvq_cpu_predict_rows(const kvq_predictor & w, int n, const int8_t * x, size_t x_stride, const float * scale,
    bool add, float * out, size_t out_stride, float * work);
// rows [page_cells][stride] += decoded rows of all heads of a lattice page; work: page_cells * padded head
void kvq_cpu_add_lattice(const kvq_lane_layout & l, const uint8_t * codes, const uint8_t * params, float * work,
    float * rows, size_t stride);
void kvq_cpu_quantise_rows(
    int n, int width, const float * rows, size_t stride, int8_t * out, size_t out_stride, float * scale);
// One head's rows, f32, un-rotated and less their means, as the f16 rows of a tile; mean, rotary: NULL where none
void kvq_cpu_rows_to_f16(int n, int head_size, const float * rows, size_t stride, const float * mean,
    const kvq_rotary * rotary, const int32_t * positions, uint16_t * out, int out_stride);

// Predictors over plain rows: what calibration, graph nodes and tests use.

// out[t] = W rows[t] + add[t], strides in values; add NULL: nothing. Arithmetic of types/predictor.h.
void kvq_cpu_predict(const kvq_predictor & p, int64_t n, const float * rows, int64_t row_stride, const float * add,
    int64_t add_stride, float * out, int64_t out_stride, int n_threads);

// rows [n][n_head*head_size] become what an encoded page gives back; pages are filled one after the other
void kvq_cpu_round_trip(const kvq_codec & c, int n_head, int64_t n, float * rows, int n_threads);

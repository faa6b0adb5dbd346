// CPU entry points. kernels.h has the per-ISA table behind them.
#pragma once

#include "ggml-kvq.h"

#include <cstddef>
#include <cstdint>

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

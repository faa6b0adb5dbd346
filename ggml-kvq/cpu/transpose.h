// A tile of f32 turned on its side.
#pragma once

#include <cstddef>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

// out[c][r] = in[r][c]; n_rows and n_cols are multiples of 4
static inline void transpose(
    int n_rows, int n_cols, const float * in, size_t in_stride, float * out, size_t out_stride) {
    for (int r = 0; r < n_rows; r += 4) {
        for (int c = 0; c < n_cols; c += 4) {
            const float * x = in + r * in_stride + c;
            float * y = out + c * out_stride + r;
#if defined(__SSE__)
            __m128 a = _mm_loadu_ps(x), b = _mm_loadu_ps(x + in_stride), d = _mm_loadu_ps(x + 2 * in_stride),
                   e = _mm_loadu_ps(x + 3 * in_stride);
            _MM_TRANSPOSE4_PS(a, b, d, e);
            _mm_storeu_ps(y, a);
            _mm_storeu_ps(y + out_stride, b);
            _mm_storeu_ps(y + 2 * out_stride, d);
            _mm_storeu_ps(y + 3 * out_stride, e);
#else
            for (int i = 0; i < 4; i++) {
                for (int j = 0; j < 4; j++) { y[j * out_stride + i] = x[i * in_stride + j]; }
            }
#endif
        }
    }
}

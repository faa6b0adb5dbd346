// The CPU's engine over host memory, and its kernels for rows that the host holds. Every build has them; cpu/
// implements them.
#pragma once

#include "device.h"
#include "types/types.h"

kvq_device & kvq_cpu_device();

void kvq_cpu_copy_all(const kvq_copy_job * jobs, size_t n, int n_threads); // both sides are the host's

void kvq_cpu_f32_to_f16(const float * x, uint16_t * y, int64_t n);
void kvq_cpu_f16_to_f32(const uint16_t * x, float * y, int64_t n);

// As the type's encode: same bytes.
void kvq_cpu_encode(const kvq_codec & c, const uint16_t * rows, const uint8_t * valid, const void * shared,
    void * codes, void * params);

// As the type's decode, match and assign, and images of them (types/types.h): same bytes, same answers. The last one
// hashes n rows of `width` values at any address (base/row_hash.h); false: some value is not finite.
void kvq_cpu_decode(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows);
bool kvq_cpu_match(const kvq_codec & c, const uint16_t * rows, kvq_low_bits low, const void * shared, void * codes,
    const void * params);
void kvq_cpu_assign(const kvq_codec & c, const uint16_t * rows, void * codes, const void * params);
void kvq_cpu_image_write(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows);
bool kvq_cpu_image_read(
    const kvq_codec & c, const uint16_t * rows, const void * shared, void * codes, void * params, bool marked = false);
bool kvq_cpu_hash_rows(const void * rows, int n, int width, uint64_t * hashes);

// n streams whose rows are stored or fetched; workspace is kept per calling thread.
void kvq_cpu_attend(const kvq_attn * attn, int n, int n_threads);

// As kvq_column_sums of ggml-kvq.h, unchecked.
void kvq_cpu_column_sums(
    const kvq_attn & attn, const int32_t * rows, int n_rows, float * sums, int32_t * seen, int n_threads);

// Rows of head h of a page, f16, `stride` apart, in place: less what sealed rows leave out (policy/transform.h), and
// back. Every pointer of x is the host's.
void kvq_cpu_take_out_rows(const kvq_lane_layout & l, int h, const kvq_row_transform & x, uint16_t * rows, int stride);
void kvq_cpu_put_back_rows(const kvq_lane_layout & l, int h, const kvq_row_transform & x, uint16_t * rows, int stride);

// The angles that rows of a page take on that way, for all heads; x.turns may point there.
struct kvq_row_turns {
    struct group { // of 16 cells: where their angles begin in `angles`; -1: that step has no angles
        int before = -1, of_mean = -1, behind = -1;
    };
    // By group: of cells that stay where they were sealed, and of others. A group may have both.
    std::vector<group> staying, moving;
    std::vector<uint8_t> stays; // of cells
    std::vector<float> angles;
    // What they were made for: the same rows once more, or on their way back, take them as they are.
    const kvq_rotary * rotary = nullptr;
    bool of_mean = false, back = false;
    std::vector<int32_t> now, was;
};
void kvq_cpu_turns(const kvq_lane_layout & l, const kvq_row_transform & x, bool back, kvq_row_turns & out);

// Predictors over plain rows: what calibration, graph nodes and tests use.

// out[t] = W rows[t] + add[t], strides in values; add NULL: it is not added. Arithmetic of types/predictor.h.
void kvq_cpu_predict(const kvq_predictor & p, int64_t n, const float * rows, int64_t row_stride, const float * add,
    int64_t add_stride, float * out, int64_t out_stride, int n_threads);

// rows [n][n_head*head_size] become what an encoded page gives back; pages are filled one after the other
void kvq_cpu_round_trip(const kvq_codec & c, int n_head, int64_t n, float * rows, int n_threads);

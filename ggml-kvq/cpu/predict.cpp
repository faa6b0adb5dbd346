#include "base/parallel.h"
#include "engine/host.h"
#include "kernels.h"
#include "types/types.h"

#include <algorithm>
#include <vector>

void kvq_cpu_predict(const kvq_predictor & p, int64_t n, const float * rows, int64_t row_stride, const float * add,
    int64_t add_stride, float * out, int64_t out_stride, int n_threads) {
    constexpr int64_t BLOCK = 32;
    const kvq_kernels & K = kvq_get_kernels();
    const size_t stride8 = (size_t) p.n_groups() * KVQ_PREDICT_GROUP, width = (size_t) p.n_tiles() * 16;
    const int64_t n_blocks = (n + BLOCK - 1) / BLOCK;
    kvq_parallel_for(n_blocks, n_threads, [&](int64_t b) {
        std::vector<int8_t> x8(BLOCK * stride8);
        std::vector<float> y(BLOCK * width);
        std::vector<int32_t> work((size_t) BLOCK * p.n_groups());
        float s[BLOCK];
        const int64_t first = b * BLOCK, count = std::min(BLOCK, n - first);
        for (int64_t t = 0; t < count; t++) {
            K.quantise_row(p.n_in, rows + (first + t) * row_stride, &x8[t * stride8], &s[t]);
            for (int i = 0; add && i < p.n_out; i++) { y[t * width + i] = add[(first + t) * add_stride + i]; }
        }
        K.predict(p, (int) count, x8.data(), stride8, s, add != nullptr, y.data(), width, work.data());
        for (int64_t t = 0; t < count; t++) { std::copy_n(&y[t * width], p.n_out, out + (first + t) * out_stride); }
    });
}

void kvq_cpu_round_trip(const kvq_codec & c, int n_head, int64_t n, float * rows, int n_threads) {
    const kvq_type_traits * type = kvq_traits(c.type);
    const int64_t n_pages = (n + c.n_cells - 1) / c.n_cells, width = (int64_t) n_head * c.head_size;
    kvq_parallel_for(n_pages * n_head, n_threads, [&](int64_t u) {
        const int64_t first = u / n_head * c.n_cells, count = std::min<int64_t>(c.n_cells, n - first);
        std::vector<uint16_t> page((size_t) c.n_cells * c.head_size);
        std::vector<uint8_t> codes(type->nb_codes(c)), params(type->nb_params(c));
        float * head = rows + first * width + u % n_head * c.head_size;
        for (int64_t t = 0; t < count; t++) {
            kvq_cpu_f32_to_f16(head + t * width, &page[(size_t) t * c.head_size], c.head_size);
        }
        kvq_cpu_encode(c, page.data(), nullptr, nullptr, codes.data(), params.data());
        type->decode(c, codes.data(), params.data(), page.data());
        for (int64_t t = 0; t < count; t++) {
            kvq_cpu_f16_to_f32(&page[(size_t) t * c.head_size], head + t * width, c.head_size);
        }
    });
}

// libggml-kvq-apart.so: the whole library with the test device of apart.h in the CPU's place. Caches lie in memory that
// the host cannot look into; a graph's own tensors are the host's, which this device reads as well.
#include "../apart.h"

#include "host/engines.h"

namespace {

class graph_device : public apart_device {
public:
    ~graph_device() {
        fprintf(stderr, "apart: %d of memory, %d to it, %d from it, %d later, %d sealed, %d attended, %d scored\n",
            n.alloc, n.put, n.get, n.late, n.encode, n.attend, n.score);
    }
    void write_rows(const kvq_lane_layout & l, int64_t count, uint16_t * const * to, const float * rows,
        size_t row_stride, const int32_t * pos, int n_threads) override {
        apart_device::write_rows(l, count, to, there(rows), row_stride, pos, n_threads);
    }
    void attend(const kvq_attention_call & a) override {
        std::vector<kvq_attn> all(a.streams, a.streams + a.n);
        for (kvq_attn & x : all) { x = of_graph(x); }
        apart_device::attend({ all.data(), a.n, a.k, a.v, a.predicted, a.n_threads });
    }
    bool column_sums(
        const kvq_attn & a, const int32_t * rows, int n_rows, float * sums, int32_t * seen, int n_threads) override {
        return apart_device::column_sums(of_graph(a), rows, n_rows, sums, seen, n_threads);
    }

private:
    static kvq_attn of_graph(kvq_attn x) {
        each_row_pointer(x, [](auto * p) { return there(p); });
        return x;
    }
};

[[maybe_unused]] const bool here = [] {
    kvq_other_engine = [] { return std::unique_ptr<kvq_device>(new graph_device); };
    return true;
}();

} // namespace

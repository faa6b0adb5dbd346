// The device of host memory.
#include "base/parallel.h"
#include "engine/host.h"
#include "engine/tags.h"
#include "rows.h"
#include "types/far_rows.h"
#include "types/types.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <vector>

namespace {

// f16 rows of one head without the tile's padding
void head_rows(const kvq_lane_layout & l, const uint16_t * tile, int h, std::vector<uint16_t> & rows) {
    const int D = l.codec.head_size, stride = l.head_stride();
    rows.resize((size_t) l.page_cells * D);
    for (int t = 0; t < l.page_cells; t++) {
        memcpy(&rows[(size_t) t * D], tile + ((size_t) h * l.page_cells + t) * stride, 2 * (size_t) D);
    }
}

class cpu_device :
    public kvq_device,
    public kvq_transform_engine,
    public kvq_chain_engine,
    public kvq_score_engine,
    public kvq_fetch_engine {
public:
    const char * name() const override { return kvq_kernel_name(); }
    bool is_host() const override { return true; }
    kvq_transform_engine * transforms() override { return this; }
    kvq_chain_engine * chains() override { return this; }
    kvq_score_engine * scores() override { return this; }
    kvq_fetch_engine * fetches() override { return this; }
    const char * slow_reading(int, const kvq_lane_layout &, const kvq_lane_layout &) const override { return nullptr; }
    size_t bytes_workspace(const kvq_lane_layout &, const kvq_lane_layout &) const override { return 0; }

    void reserve(size_t) override {} // every allocation is a mapping of its own
    void flush() override {}         // no work waits
    void copy_later(void * to, const void * from, size_t nb) override { memcpy(to, from, nb); }
    void put_address_later(void * to, const void * address) override { memcpy(to, &address, sizeof(address)); }
    void put_pages(kvq_page * to, const kvq_page * from, size_t n) override { memcpy(to, from, n * sizeof(kvq_page)); }

    void * alloc(size_t nb) override {
        void * p = mmap(nullptr, nb, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return p == MAP_FAILED ? nullptr : p;
    }
    void free(void * p, size_t nb) override { munmap(p, nb); }
    void zero(void * p, size_t nb) override { memset(p, 0, nb); }
    void copy(void * to, const void * from, size_t nb) override { memcpy(to, from, nb); }
    void get(void * host, const void * from, size_t nb) override { memcpy(host, from, nb); }
    void put(void * to, const void * host, size_t nb) override { memcpy(to, host, nb); }
    void put_all(const kvq_copy_job * jobs, size_t n, int n_threads) override { kvq_cpu_copy_all(jobs, n, n_threads); }

    void * alloc_far(size_t nb) override { return alloc(nb); }
    void free_far(void * p, size_t nb) override { free(p, nb); }
    void put_far(const kvq_lane_layout & l, int format, int n_pages, const uint16_t * const * tiles, void * const * far,
        int n_threads) override {
        const int D = l.codec.head_size, stride = l.head_stride(), n = n_pages * l.n_head;
        const size_t nb_row = kvq_far_row_bytes(format, D);
        kvq_parallel_for(n, n_threads, [&](int64_t i) {
            const size_t first = (size_t) (i % l.n_head) * l.page_cells;
            const uint16_t * tile = tiles[i / l.n_head] + first * stride;
            uint8_t * rows = (uint8_t *) far[i / l.n_head] + first * nb_row;
            for (int t = 0; t < l.page_cells; t++) { kvq_far_put(format, D, tile + t * stride, rows + t * nb_row); }
        });
    }
    const char * refuse_far(const kvq_codec &, const kvq_codec &, int, int) const override { return nullptr; }
    void get_far(const kvq_lane_layout & l, int format, const void * far, uint16_t * tile) override {
        const int D = l.codec.head_size, stride = l.head_stride();
        const size_t nb_row = kvq_far_row_bytes(format, D);
        for (int t = 0; t < l.n_head * l.page_cells; t++) {
            kvq_far_get(format, D, (const uint8_t *) far + t * nb_row, tile + (size_t) t * stride);
        }
    }

    void write_rows(const kvq_lane_layout & l, int64_t n, uint16_t * const * to, const float * rows, size_t row_stride,
        const int32_t * pos, int n_threads) override {
        const int D = l.codec.head_size;
        const size_t nb_head = (size_t) l.page_cells * l.head_stride();
        const auto write = [&](int64_t i) {
            const float * row = rows + i * row_stride;
            for (int h = 0; h < l.n_head; h++) { kvq_cpu_f32_to_f16(row + (size_t) h * D, to[i] + h * nb_head, D); }
            if (pos) { kvq_tag_put(l, to[i], nb_head, pos[i]); }
        };
        kvq_parallel_for(n, n_threads, write, 16);
    }

    bool enter_rows(
        const kvq_lane_layout & l, int64_t n, uint16_t * const * to, const uint16_t * rows, int n_threads) override {
        const size_t D = (size_t) l.codec.head_size, nb_head = (size_t) l.page_cells * (size_t) l.head_stride();
        const auto enter = [&](int64_t i) {
            const uint16_t * row = rows + (size_t) i * D * (size_t) l.n_head;
            for (size_t h = 0; h < (size_t) l.n_head; h++, row += D) { memcpy(to[i] + h * nb_head, row, 2 * D); }
        };
        kvq_parallel_for(n, n_threads, enter, 64);
        return true;
    }

    void attend(const kvq_attention_call & a) override {
        if (!a.predicted) { kvq_cpu_attend(a.streams, a.n, a.n_threads); }
        for (int i = 0; a.predicted && i < a.n; i++) {
            kvq_cpu_attend_predicted(a.streams[i], a.predicted + 2 * (size_t) i, a.n_threads);
        }
    }

    void take_coords(const kvq_lane_layout & l, int n, const uint16_t * const * tiles, const kvq_row_transform * x,
        int n_threads) override {
        kvq_cpu_take_coords(l, n, tiles, x, n_threads);
    }
    void take_out(const kvq_lane_layout & l, int n, const uint16_t * const * tiles, uint16_t * const * out,
        const kvq_row_transform * x, int n_threads) override {
        kvq_cpu_take_out(l, n, tiles, out, x, n_threads);
    }
    void put_back(const kvq_lane_layout & l, uint16_t * tile, const kvq_row_transform & x) override {
        kvq_cpu_put_back(l, tile, x);
    }
    void chain_predict(const kvq_chain_pages & c, float * out) override { kvq_cpu_chain_predict(c, out); }
    void chain_step(const kvq_chain_pages & c) override { kvq_cpu_chain_step(c); }
    bool column_sums(
        const kvq_attn & a, const int32_t * rows, int n_rows, float * sums, int32_t * seen, int n_threads) override {
        kvq_cpu_column_sums(a, rows, n_rows, sums, seen, n_threads);
        return true;
    }
    void choose(const kvq_lane_layout & l, bool normalise, const kvq_choice * pages, int n) override {
        kvq_cpu_choose(l, normalise, pages, n);
    }
    void pack(
        const kvq_lane_layout & l, bool normalise, const kvq_pack_page * pages, int n, kvq_packed & out) override {
        kvq_cpu_pack(l, normalise, pages, n, out);
    }
    void gather(const kvq_lane_layout & l, int n, uint16_t * const * tiles, const int32_t * const * maps,
        const uint16_t * const * frames, int first, int n_frames) override {
        kvq_cpu_gather(l, n, tiles, maps, frames, first, n_frames);
    }

    void encode(const kvq_lane_layout & l, const kvq_page_block * pages, int n_pages, int n_threads) override {
        const int n = n_pages * l.n_head;
        kvq_parallel_for(n, n_threads, [&](int64_t i) {
            static thread_local std::vector<uint16_t> rows;
            const kvq_page_block & b = pages[i / l.n_head];
            const size_t h = i % l.n_head, at = h * l.nb_codes;
            head_rows(l, b.tile, (int) h, rows);
            kvq_cpu_encode(l.codec, rows.data(), b.valid, b.shared ? (const uint8_t *) b.shared + at : nullptr,
                b.codes ? (uint8_t *) b.codes + at : nullptr, (uint8_t *) b.params + h * l.nb_params);
        });
    }

    void decode(const kvq_lane_layout & l, const kvq_page_block & b) override {
        const int D = l.codec.head_size, stride = l.head_stride();
        std::vector<uint16_t> rows((size_t) l.page_cells * D);
        for (int h = 0; h < l.n_head; h++) {
            kvq_cpu_decode(l.codec, (const uint8_t *) b.codes + h * l.nb_codes,
                (const uint8_t *) b.params + h * l.nb_params, rows.data());
            for (int t = 0; t < l.page_cells; t++) {
                uint16_t * row = b.tile + ((size_t) h * l.page_cells + t) * stride;
                memcpy(row, &rows[(size_t) t * D], 2 * (size_t) D);
                memset(row + D, 0, 2 * (size_t) (stride - D));
            }
        }
    }
};

} // namespace

void kvq_cpu_copy_all(const kvq_copy_job * jobs, size_t n, int n_threads) {
    constexpr size_t NB_PART = 1 << 17;
    std::vector<kvq_copy_job> parts; // of large ones
    for (size_t i = 0; i < n; i++) {
        for (size_t at = 0; jobs[i].nb > NB_PART && at < jobs[i].nb; at += NB_PART) {
            parts.push_back(
                { (char *) jobs[i].to + at, (const char *) jobs[i].from + at, std::min(NB_PART, jobs[i].nb - at) });
        }
    }
    const auto copy_part = [&](int64_t i) {
        const kvq_copy_job & x = parts[(size_t) i];
        memcpy(x.to, x.from, x.nb);
    };
    const auto copy = [&](int64_t i) {
        if (jobs[i].nb <= NB_PART) { memcpy(jobs[i].to, jobs[i].from, jobs[i].nb); }
    };
    kvq_parallel_for((int64_t) parts.size(), n_threads, copy_part);
    kvq_parallel_for((int64_t) n, n_threads, copy, 8);
}

kvq_device & kvq_cpu_device() {
    static cpu_device device;
    return device;
}

// The device's sealing. Pages of many layers are due in the same step, and each launch costs more than a page:
// sealing waits until something else is asked of the device (use) or flush, and so do, in this order, tiles that take
// the place of sealed ones and changes of page tables.
#include "device.h"

#include "cuda/seal/seal.cuh"
#include "cuda/policy/select.cuh"
#include "types/lattice.h"

#include <algorithm>
#include <cstring>

struct kvq_cuda_device::seal_batch {
    kvq_codec codec;
    int n_head;
    bool adopts;
    kvq_affine_geometry g;
    std::vector<kvq_seal_job> jobs;
};

static bool is_same(const kvq_codec & a, const kvq_codec & b) {
    return a.type == b.type && a.role == b.role && a.bits == b.bits && a.group == b.group && a.scale == b.scale &&
        a.levels == b.levels && a.eta == b.eta && a.n_cells == b.n_cells && a.head_size == b.head_size &&
        a.split == b.split && a.fast_bits == b.fast_bits && a.coords == b.coords && a.hi == b.hi && a.n_hi == b.n_hi;
}

void kvq_cuda_device::encode(const kvq_lane_layout & l, const kvq_page_block * pages, int n, int) {
    const bool mixed = l.codec.type == KVQ_TYPE_MIXED;
    for (int i = 0; i < n; i++) {
        const kvq_page_block & b = pages[i];
        const bool adopts = b.shared != nullptr;
        auto at = std::find_if(to_seal.begin(), to_seal.end(),
            [&](const auto & x) { return x->n_head == l.n_head && x->adopts == adopts && is_same(x->codec, l.codec); });
        if (at == to_seal.end()) {
            to_seal.emplace_back(
                new seal_batch{ l.codec, l.n_head, adopts, mixed ? kvq_affine_geometry() : geometry(l.codec), {} });
            at = to_seal.end() - 1;
        }
        to_read.insert(b.tile);
        if (mixed) { mend_set(l, (uint8_t *) b.params); }
        (*at)->jobs.push_back({ b.tile, (const uint8_t *) b.shared, (uint8_t *) b.codes, (uint8_t *) b.params, {} });
        uint8_t * valid = (*at)->jobs.back().valid;
        if (b.valid) {
            memcpy(valid, b.valid, l.page_cells / 8);
        } else {
            memset(valid, 0xff, sizeof(kvq_seal_job::valid));
        }
    }
}

static constexpr int TILE_COPIES = 120;
struct tile_copies {
    struct {
        void * to;
        const void * from;
        size_t nb;
    } job[TILE_COPIES];
};
static_assert(sizeof(tile_copies) < 4000, "kernel arguments are limited to 4 KiB");

static __global__ void copies_kernel(const __grid_constant__ tile_copies a) {
    early_wait();
    const auto & j = a.job[blockIdx.x];
    const size_t first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    if (((uintptr_t) j.to | (uintptr_t) j.from | j.nb) % sizeof(uint4)) { // parameters of few heads
        for (size_t i = first; i < j.nb; i += step) { ((uint8_t *) j.to)[i] = ((const uint8_t *) j.from)[i]; }
        return;
    }
    for (size_t i = first; i < j.nb / sizeof(uint4); i += step) { ((uint4 *) j.to)[i] = ((const uint4 *) j.from)[i]; }
}

void kvq_cuda_device::copy_later(void * to, const void * from, size_t nb) {
    to_copy.push_back({ to, from, nb });
    to_read.insert((const uint16_t *) from);
    to_write.insert((const uint16_t *) to);
}

// Changes of tables, pages or single words: as many as kernel arguments hold.
template <typename T> struct table_puts {
    static constexpr int MOST = 3984 / (sizeof(T *) + sizeof(T));
    T * to[MOST];
    T value[MOST];
};

template <typename T> static __global__ void puts_kernel(const __grid_constant__ table_puts<T> a, int n) {
    early_wait();
    if (threadIdx.x < n) { *a.to[threadIdx.x] = a.value[threadIdx.x]; }
}

template <typename T> static void launch_puts(std::vector<std::pair<T *, T>> & puts, cudaStream_t stream) {
    static_assert(sizeof(table_puts<T>) < 4000, "kernel arguments are limited to 4 KiB");
    static_assert(table_puts<T>::MOST <= 256, "a thread for each");
    for (size_t i = 0; i < puts.size();) { // no place twice in a launch: the later one holds
        table_puts<T> arg;
        int n = 0;
        const auto again = [&](T * p) { return std::find(arg.to, arg.to + n, p) != arg.to + n; };
        while (i < puts.size() && n < arg.MOST && !again(puts[i].first)) {
            arg.to[n] = puts[i].first;
            arg.value[n++] = puts[i++].second;
        }
        kvq_launch_early(puts_kernel<T>, 1, 256, 0, stream, arg, n);
    }
    puts.clear();
}

// A copy from the host costs more than two launches.
static constexpr size_t MOST_CHANGES = 128;

void kvq_cuda_device::put_pages(kvq_page * to, const kvq_page * from, size_t n) {
    if (n > MOST_CHANGES) { // a table, not a change
        put(to, from, n * sizeof(kvq_page));
        return;
    }
    for (size_t i = 0; i < n; i++) { to_put.emplace_back(to + i, from[i]); }
}

// Mixed pages of keys and of values in one launch: one alone leaves most of the device idle.
void kvq_cuda_device::flush_mixed(const seal_batch & first, const seal_batch * second) {
    std::vector<kvq_seal_job> jobs = first.jobs;
    if (second) { jobs.insert(jobs.end(), second->jobs.begin(), second->jobs.end()); }
    const kvq_mixed_geometry m[2] = { kvq_mixed_get_geometry(first.codec),
        kvq_mixed_get_geometry((second ? second : &first)->codec) };
    for (size_t i = 0; i < jobs.size(); i += KVQ_SEAL_JOBS) {
        const size_t part = std::min<size_t>(jobs.size() - i, KVQ_SEAL_JOBS),
                     of_first = std::min(std::max(first.jobs.size(), i) - i, part);
        kvq_seal_jobs arg;
        std::copy_n(jobs.begin() + (long) i, part, arg.job);
        kvq_launch_encode_mixed(
            m[0], m[1], (int) of_first, arg, (int) part, first.n_head, max_shared, (cudaStream_t) stream);
        n_seals++;
    }
}

void kvq_cuda_device::flush() {
    if (!waits()) { return; }
    std::vector<std::shared_ptr<seal_batch>> batches;
    batches.swap(to_seal);
    check(cudaSetDevice(ordinal), "cudaSetDevice");
    flush_far();
    flush_renewed();
    flush_coords();
    flush_turns();
    flush_choices();
    to_read.clear();
    to_write.clear();
    // codes exist before they are adopted
    std::stable_partition(batches.begin(), batches.end(), [](const auto & x) { return !x->adopts; });
    bool follows = false;
    for (size_t n = 0; n < batches.size(); n++) {
        const auto & b = batches[n];
        const bool plain = b->codec.type == KVQ_TYPE_AFFINE;
        follows = follows && plain && !b->adopts;
        if (b->codec.type == KVQ_TYPE_MIXED) {
            const seal_batch * next = n + 1 < batches.size() ? batches[n + 1].get() : nullptr;
            const bool both = next && next->codec.type == KVQ_TYPE_MIXED && next->n_head == b->n_head;
            flush_mixed(*b, both ? next : nullptr);
            n += both;
            continue;
        }
        for (size_t i = 0; i < b->jobs.size(); i += KVQ_SEAL_JOBS) {
            const int part = (int) std::min<size_t>(b->jobs.size() - i, KVQ_SEAL_JOBS);
            kvq_seal_jobs arg;
            std::copy_n(b->jobs.begin() + (long) i, part, arg.job);
            if (b->codec.type == KVQ_TYPE_LATTICE) {
                kvq_lattice_half halves[2];
                for (int k = 0, n_halves = kvq_lattice_halves(b->codec, halves); k < n_halves; k++) {
                    kvq_launch_encode_lattice(b->codec.split ? half_geometry(b->codec, k) : b->g,
                        squares(halves[k].codec), arg, part, b->n_head, (cudaStream_t) stream);
                }
            } else {
                kvq_launch_encode(b->g, arg, part, b->n_head, max_shared, follows, (cudaStream_t) stream);
                follows = plain && !b->adopts;
            }
            n_seals++;
        }
    }
    for (size_t i = 0; i < to_copy.size(); i += TILE_COPIES) {
        const int part = (int) std::min<size_t>(to_copy.size() - i, TILE_COPIES);
        tile_copies arg;
        for (int j = 0; j < part; j++) {
            const tile_copy & c = to_copy[i + (size_t) j];
            arg.job[j] = { c.to, c.from, c.nb };
        }
        kvq_launch_early(copies_kernel, dim3(part, 16), 256, 0, (cudaStream_t) stream, arg);
    }
    to_copy.clear();
    launch_puts(to_put, (cudaStream_t) stream);
    launch_puts(to_set, (cudaStream_t) stream);
    check(cudaGetLastError(), "sealing kernel");
}

void kvq_cuda_device::decode(const kvq_lane_layout & l, const kvq_page_block & b) {
    use();
    const kvq_affine_geometry g = geometry(l.codec);
    const auto launch = g.type == KVQ_TYPE_LATTICE ? kvq_launch_decode_lattice : kvq_launch_decode;
    if (g.type == KVQ_TYPE_MIXED) {
        kvq_launch_decode_mixed(kvq_mixed_get_geometry(l.codec), (const uint8_t *) b.codes, (const uint8_t *) b.params,
            b.tile, l.n_head, (cudaStream_t) stream);
    } else if (g.split) {
        if (!l.codec.fast_bits) { zero(b.tile, l.nb_frame); }
        kvq_lattice_half halves[2];
        for (int i = 0, n = kvq_lattice_halves(l.codec, halves); i < n; i++) {
            launch(half_geometry(l.codec, i), (const uint8_t *) b.codes, (const uint8_t *) b.params, b.tile, l.n_head,
                (cudaStream_t) stream);
        }
    } else {
        launch(g, (const uint8_t *) b.codes, (const uint8_t *) b.params, b.tile, l.n_head, (cudaStream_t) stream);
    }
    check(cudaGetLastError(), "decode kernel");
}

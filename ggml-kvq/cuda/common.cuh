// Shared by the kernels: f16 bit patterns, geometry of blocks as a kernel argument.
#pragma once

#include "base/constants.h"
#include "ggml-kvq.h"

#include <atomic>
#include <cstdint>
#include <cuda_fp16.h>

// types/affine.h and types/lattice.h, worked out on the host once per launch
struct kvq_affine_geometry {
    int type, role, bits, group, scale, levels, n_cells, head_size, stride; // stride: channels of a tile row
    float eta;
    int lanes, dots, n_tiles, np;
    int n_parts, width[2], shift[2], n_chunks[2], offset[2];
    int nb_codes, nb_params;
    // lattice: of the Hadamard rotation; points on the device, [2^(bits*group)][group]
    int block;
    float norm;
    int split; // keys in halves: see below
    const float * points;
};

// Split keys (types/lattice.h): the geometry of a codec as a whole has its own head size and bytes, else what its slow
// half has. That of a half (kvq_cuda_device::half_geometry) has half the channels, and where its bytes begin in those
// of the whole: of codes in `offset`, of parameters in `np`. split: kvq_split, of a fast half with this bit:
constexpr int KVQ_SPLIT_FAST = 4;
// Channel i of a half, of n channels, in the head.
static __device__ __forceinline__ int channel_of_half(int split, bool fast, int n, int i) {
    const int quarter = n / 2;
    return (split & 3) == KVQ_SPLIT_NORM ? (fast ? 0 : n) + i : i / quarter * n + (fast ? 0 : quarter) + i % quarter;
}
// The same of a half's geometry, or of a codec that is not one: kvq_lattice_channel.
static __device__ __forceinline__ int channel_in_head(const kvq_affine_geometry & g, int i) {
    return g.split ? channel_of_half(g.split, g.split & KVQ_SPLIT_FAST, g.head_size, i) : i;
}

// Where a lane's plain f16 rows [head][head_size] go: row of every cell before n_kv or, by_slot, row of every slot,
// page after page. value: the lane is the pages' second one. step: channels from one cell's row to the next, 0: those
// of its heads.
struct kvq_row_place {
    uint16_t * rows;
    int n_kv;
    bool by_slot, value;
    int step;
    // by page: rows of a second tier, which come from elsewhere where keys and values have them and are sealed; NULL:
    // there is no second tier
    const void *const *far_k, *const *far_v;
};
static __device__ __forceinline__ bool lies_far(const kvq_row_place & to, const kvq_page & page, int p) {
    return to.far_k && page.n_slots && page.k_params && page.v_params && to.far_k[p] && to.far_v[p];
}

kvq_affine_geometry kvq_affine_get_geometry(const kvq_codec & c);           // geometry.cu
kvq_affine_geometry kvq_split_get_geometry(const kvq_codec & c, bool fast); // of a half; n_parts 0: it has no block

static __device__ __forceinline__ float f16_bits_to_f32(uint16_t h) { return __half2float(__ushort_as_half(h)); }
static __device__ __forceinline__ uint16_t f32_to_f16_bits(float x) { return __half_as_ushort(__float2half_rn(x)); }
static __device__ __forceinline__ uint16_t f32_to_f16_finite(float x) {
    return f32_to_f16_bits(fminf(fmaxf(x, -65504.0f), 65504.0f));
}

// Positions that open rows of keys carry in the lowest bits of their first channels: kvq_tag_put's bits.
constexpr int KVQ_TAG_BITS = KVQ_TAG_CHANNELS;
static __device__ __forceinline__ uint64_t kvq_tag_bits(int32_t pos) {
    return (uint64_t) (((uint32_t) pos ^ 0x5bd1e995u) * 0x9e3779b1u) << 32 | (uint32_t) pos;
}
static __device__ __forceinline__ uint16_t kvq_tagged(uint16_t x, uint64_t tag, int channel) {
    return channel < KVQ_TAG_BITS ? (uint16_t) ((x & ~1) | (tag >> channel & 1)) : x;
}

// Programmatic dependent launch, as ggml-cuda's own kernels use it: a kernel that is launched with kvq_launch_early
// may start once every block of the kernel before it has come to early_start, and sees what that kernel (and all
// before it) wrote after early_wait, which every such kernel calls. sm_90; before that it simply follows.
static __device__ __forceinline__ void early_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
static __device__ __forceinline__ void early_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Of a kernel, how much dynamic shared memory it has been allowed to take, device by device; launches allow more as
// they need it.
struct kvq_shared_limit {
    static constexpr int MAX_DEVICES = 64;
    std::atomic<size_t> allowed[MAX_DEVICES] = {};
    template <typename K> void raise(K * kernel, size_t nb) {
        int device = 0;
        cudaGetDevice(&device);
        std::atomic<size_t> & a = allowed[device % MAX_DEVICES];
        if (nb > 48 << 10 && nb > a) {
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int) nb);
            a = nb;
        }
    }
};

// slopes of ALiBi: powers of 2^-(max_bias / n) for n = the largest power of two of n_head, then the odd powers of
// their roots
template <typename A> static void kvq_set_alibi(A & a, float max_bias, int n_head) {
    a.max_bias = max_bias;
    a.n_head_log2 = 1;
    while (2 * a.n_head_log2 <= n_head) { a.n_head_log2 *= 2; }
    a.m0 = -max_bias / (float) a.n_head_log2;
    a.m1 = -max_bias / 2.0f / (float) a.n_head_log2;
}

// What a device's kernels may take. KVQ_CUDA_AS=8.6 makes a bigger one take the limits of another compute capability,
// for tests. max_shared, max_shared_sm: bytes of shared memory of a block and of a multiprocessor
struct kvq_device_limits {
    int major, minor, max_shared, max_shared_sm;
};
kvq_device_limits kvq_limits_of(int device); // device_limits.cu

template <typename... P, typename... A>
static void kvq_launch(bool early, void (*kernel)(P...), dim3 grid, int n_threads, size_t nb_shared,
    cudaStream_t stream, const A &... args) {
    cudaLaunchAttribute may = {};
    may.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    may.val.programmaticStreamSerializationAllowed = 1;
    int device = 0;
    cudaGetDevice(&device);
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(n_threads);
    config.dynamicSmemBytes = nb_shared;
    config.stream = stream;
    config.attrs = &may;
    config.numAttrs = early && kvq_limits_of(device).major >= 9;
    cudaLaunchKernelEx(&config, kernel, args...);
}

// Kernels between recorded steps are launched this way too, even where they gain no time by themselves. After two
// launches without the attribute each kernel of a recording starts 0.33 us later, for good (H200, driver 580: 105 us a
// token; docs/decisions/early-launch.md).
template <typename... P, typename... A>
static void kvq_launch_early(
    void (*kernel)(P...), dim3 grid, int n_threads, size_t nb_shared, cudaStream_t stream, const A &... args) {
    kvq_launch(true, kernel, grid, n_threads, nb_shared, stream, args...);
}

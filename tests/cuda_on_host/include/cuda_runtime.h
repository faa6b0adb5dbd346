// CUDA kernels on the host, for tests on machines without a GPU: translate.py turns .cu files into C++ that includes
// this. A block runs as one fiber a thread; warp operations and barriers are the places where fibers take turns.
// Blocks follow one another, copies and launches are done at once: what is found here is wrong arithmetic, indexing
// and collectives, not races, ordering or speed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

// ---------------------------------------------------------------- language

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
// the first thread of a block to come here finds what is not a number
#define HOST_FRESH(name)                                                                                               \
    do {                                                                                                               \
        static uint64_t of_block;                                                                                      \
        if (of_block != host_cuda::n_blocks) {                                                                         \
            of_block = host_cuda::n_blocks;                                                                            \
            memset((void *) &name, 0xff, sizeof(name));                                                                \
        }                                                                                                              \
    } while (0)
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n)
#define __CUDA_ARCH__ 0

// as the C library's, which are calls
static inline float host_fmaxf(float x, float y) { return x > y || y != y ? x : y; }
static inline float host_fminf(float x, float y) { return x < y || y != y ? x : y; }
#define fmaxf host_fmaxf
#define fminf host_fminf

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint2 {
    unsigned x, y;
};
struct int2 {
    int x, y;
};
struct int4 {
    int x, y, z, w;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct ushort4 {
    unsigned short x, y, z, w;
};
struct char4 {
    signed char x, y, z, w;
};
struct uchar4 {
    unsigned char x, y, z, w;
};
static inline uint2 make_uint2(unsigned x, unsigned y) { return { x, y }; }
static inline int2 make_int2(int x, int y) { return { x, y }; }
static inline int4 make_int4(int x, int y, int z, int w) { return { x, y, z, w }; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return { x, y, z, w }; }
static inline float2 make_float2(float x, float y) { return { x, y }; }
static inline float4 make_float4(float x, float y, float z, float w) { return { x, y, z, w }; }
static inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) {
    return { x, y, z, w };
}
using std::max;
using std::min;

// ---------------------------------------------------------------- threads

extern dim3 threadIdx, blockIdx, gridDim, blockDim; // of the fiber that runs

namespace host_cuda {
extern uint8_t * shared;
extern uint64_t n_blocks; // begun so far
// Device memory: allocations lie one behind the other, as they may on a device, and no copy may cross their ends.
void * device_alloc(size_t nb);
void device_free(void * p);
bool may_copy(const void * p, size_t nb);
constexpr size_t SHARED_BYTES = 256 << 10;

void launch(dim3 grid, dim3 block, size_t nb_shared, const std::function<void()> & kernel);
void block_barrier();
void team_barrier(int id, int n_threads); // of some of the block's threads
int block_count(bool x);
// All lanes of this warp give a value and see everybody's; lanes that have returned give 0.
const uint64_t * exchange(uint64_t mine);
} // namespace host_cuda

static inline void __syncthreads() { host_cuda::block_barrier(); }
static inline int __syncthreads_or(int x) { return host_cuda::block_count(x != 0) > 0; }
static inline int __syncthreads_count(int x) { return host_cuda::block_count(x != 0); }
static inline void __syncwarp(unsigned = ~0u) { host_cuda::exchange(0); }
template <typename T> static inline T host_shuffle(T x, int lane) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles of 32 and 64 bits");
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof(T)); // the low bytes come first
    bits = host_cuda::exchange(bits)[lane & 31];
    memcpy(&x, &bits, sizeof(T));
    return x;
}
template <typename T> static inline T __shfl_xor_sync(unsigned, T x, int with) {
    return host_shuffle(x, (int) (threadIdx.x % 32) ^ with);
}
template <typename T> static inline T __shfl_sync(unsigned, T x, int lane) { return host_shuffle(x, lane); }
static inline int __any_sync(unsigned, int x) {
    const uint64_t * all = host_cuda::exchange(x != 0);
    int any = 0;
    for (int i = 0; i < 32; i++) { any |= (int) all[i]; }
    return any;
}
static inline uint32_t __ballot_sync(unsigned, int x) {
    const uint64_t * all = host_cuda::exchange(x != 0);
    uint32_t bits = 0;
    for (int i = 0; i < 32; i++) { bits |= (uint32_t) all[i] << i; }
    return bits;
}
static inline unsigned __reduce_max_sync(unsigned, unsigned x) {
    const uint64_t * all = host_cuda::exchange(x);
    unsigned most = 0;
    for (int i = 0; i < 32; i++) { most = (unsigned) all[i] > most ? (unsigned) all[i] : most; }
    return most;
}
static inline int __ffs(int x) { return __builtin_ffs(x); }

// ---------------------------------------------------------------- arithmetic

static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) { c += (int8_t) ((unsigned) a >> i) * (int8_t) ((unsigned) b >> i); }
    return c;
}
static inline unsigned __vsub4(unsigned a, unsigned b) {
    unsigned out = 0;
    for (int i = 0; i < 32; i += 8) { out |= (((a >> i) - (b >> i)) & 255u) << i; }
    return out;
}
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fdividef(float a, float b) { return a / b; }
#define __expf(x) expf(x)
#define __log2f(x) log2f(x)
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline float __int_as_float(int x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
static inline unsigned __float_as_uint(float x) {
    unsigned y;
    memcpy(&y, &x, 4);
    return y;
}
static inline int __float_as_int(float x) { return (int) __float_as_uint(x); }
static inline float __uint_as_float(unsigned x) { return __int_as_float((int) x); }
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
    return (unsigned) (((uint64_t) high << 32 | low) >> (n & 31));
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    const uint64_t x = (uint64_t) b << 32 | a;
    unsigned y = 0;
    for (int i = 0; i < 4; i++) { y |= (unsigned) (x >> (s >> 4 * i & 7) * 8 & 255) << 8 * i; }
    return y;
}
// the instruction: the upper bit of a nibble asks for the sign of its byte
static inline unsigned host_prmt(unsigned a, unsigned b, unsigned s) {
    const unsigned x = __byte_perm(a, b, s);
    unsigned y = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned byte = x >> 8 * i & 255;
        y |= (s >> 4 * i & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return y;
}
// threads take turns, so every operation is one piece
template <typename T> static inline T atomicAdd(T * p, T x) {
    const T before = *p;
    *p += x;
    return before;
}
template <typename T> static inline T atomicAnd(T * p, T x) {
    const T before = *p;
    *p &= x;
    return before;
}
template <typename T> static inline T atomicOr(T * p, T x) {
    const T before = *p;
    *p |= x;
    return before;
}
static inline void __threadfence() {}
template <typename T> static inline T __ldg(const T * p) { return *p; }
template <typename T> static inline T __ldca(const T * p) { return *p; }
template <typename T> static inline T __ldcg(const T * p) { return *p; }
template <typename T> static inline T __ldcv(const T * p) { return *p; }
static inline size_t __cvta_generic_to_shared(const void * p) {
    return (size_t) ((const uint8_t *) p - host_cuda::shared);
}

// ---------------------------------------------------------------- instructions that kernels write out

void host_mma_f16(float & d0, float & d1, float & d2, float & d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
    uint32_t b0, uint32_t b1);
void host_mma_s8(int & d0, int & d1, int & d2, int & d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
    uint32_t b0, uint32_t b1, int c0, int c1, int c2, int c3);
void host_mma_s8_u8(int & d0, int & d1, int & d2, int & d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
    uint32_t b0, uint32_t b1);
void host_ldmatrix(uint32_t & x0, uint32_t & x1, uint32_t & x2, uint32_t & x3, uint32_t at);
void host_ldmatrix_trans(uint32_t & x0, uint32_t & x1, uint32_t & x2, uint32_t & x3, uint32_t at);
uint32_t host_movmatrix(uint32_t x);
// a device stops where a copy of n bytes does not begin at a multiple of them
static inline void host_copy(uint32_t to, const void * from, int n) {
    if (to % (uint32_t) n || (uintptr_t) from % (uintptr_t) n) {
        fprintf(stderr, "a copy of %d bytes begins at %p and goes to %u\n", n, from, to);
        abort();
    }
    memcpy(host_cuda::shared + to, from, (size_t) n);
}

// ---------------------------------------------------------------- runtime

typedef int cudaError_t;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2 };
typedef struct host_stream * cudaStream_t;
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
constexpr size_t SHARED_BYTES_OF_BLOCK = 227 << 10; // as cards of compute capability 9.0
struct cudaDeviceProp {
    int multiProcessorCount, major, minor;
    size_t sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
};
enum { cudaDevAttrComputeCapabilityMajor };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };

static inline cudaError_t cudaGetDeviceCount(int * n) {
    *n = 1;
    return cudaSuccess;
}
static inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp * p, int) {
    *p = { 12, 8, 0, SHARED_BYTES_OF_BLOCK, SHARED_BYTES_OF_BLOCK + 1024 };
    return cudaSuccess;
}
static inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
static inline cudaError_t cudaGetDevice(int * d) {
    *d = 0;
    return cudaSuccess;
}
static inline cudaError_t cudaDeviceGetAttribute(int * x, int, int) {
    *x = 0;
    return cudaSuccess;
}
template <typename T> static inline cudaError_t cudaMalloc(T ** p, size_t nb) {
    *p = (T *) host_cuda::device_alloc(nb);
    return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
enum { cudaHostAllocMapped = 2, cudaHostAllocPortable = 1 };
static inline cudaError_t cudaHostAlloc(void ** p, size_t nb, unsigned) { return cudaMalloc(p, nb); }
enum { cudaHostRegisterMapped = 2, cudaHostRegisterPortable = 1 };
// Some systems pin no memory that they have not allocated: here every third block.
static inline cudaError_t cudaHostRegister(void *, size_t, unsigned) {
    static int n = 0;
    return ++n % 3 ? cudaSuccess : cudaErrorMemoryAllocation;
}
static inline cudaError_t cudaHostUnregister(void *) { return cudaSuccess; }
static inline cudaError_t cudaHostGetDevicePointer(void ** of_device, void * p, unsigned) {
    *of_device = p;
    return cudaSuccess;
}
static inline cudaError_t cudaFreeHost(void * p) {
    host_cuda::device_free(p);
    return cudaSuccess;
}
static inline cudaError_t cudaFree(void * p) {
    host_cuda::device_free(p);
    return cudaSuccess;
}
static inline cudaError_t cudaMemsetAsync(void * p, int x, size_t n, cudaStream_t) {
    memset(p, x, n);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t n, cudaMemcpyKind, cudaStream_t) {
    if (!host_cuda::may_copy(to, n) || !host_cuda::may_copy(from, n)) { return cudaErrorInvalidValue; }
    memmove(to, from, n);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpy2DAsync(void * to, size_t to_pitch, const void * from, size_t from_pitch,
    size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
    for (size_t i = 0; i < height; i++) {
        memmove((char *) to + i * to_pitch, (const char *) from + i * from_pitch, width);
    }
    return cudaSuccess;
}
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
typedef struct host_event * cudaEvent_t; // all work is done in the order in which it is asked for
enum { cudaEventDisableTiming, cudaStreamNonBlocking };
static inline cudaError_t cudaDeviceGetStreamPriorityRange(int * least, int * most) {
    *least = *most = 0;
    return cudaSuccess;
}
static inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t * s, int, int) {
    *s = (cudaStream_t) 1;
    return cudaSuccess;
}
static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t * s, int) {
    *s = (cudaStream_t) 1;
    return cudaSuccess;
}
static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t * e, int) {
    *e = (cudaEvent_t) 1;
    return cudaSuccess;
}
static inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
static inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
static inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
static inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
static inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
static inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus * s) {
    *s = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
static inline const char * cudaGetErrorString(cudaError_t e) {
    return e == cudaErrorInvalidValue ? "invalid argument" : "out of memory";
}
template <typename F> static inline cudaError_t cudaFuncSetAttribute(F, int, int) { return cudaSuccess; }
template <typename F> static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int * n, F, int, size_t) {
    *n = 1;
    return cudaSuccess;
}

enum { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
    int id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute * attrs;
    unsigned numAttrs;
};
template <typename... P, typename... A>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t * c, void (*kernel)(P...), const A &... args) {
    host_cuda::launch(c->gridDim, c->blockDim, c->dynamicSmemBytes, [&] { kernel(args...); });
    return cudaSuccess;
}

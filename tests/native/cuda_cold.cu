// For test_cuda's bench: a kernel of 12288 instructions, 192 KB, which leaves a multiprocessor's instruction caches
// to nobody else.
#include <cuda_runtime.h>

#define KVQ_FOUR(X) X X X X
#define KVQ_STEP                                                                                                       \
    "fma.rn.f32 %0, %0, %4, 0f3F800000; fma.rn.f32 %1, %1, %4, 0f3F800000;"                                            \
    "fma.rn.f32 %2, %2, %4, 0f3F800000; fma.rn.f32 %3, %3, %4, 0f3F800000;"

static __global__ void long_kernel(float * out, float y) {
    float a = (float) threadIdx.x, b = y, c = 2.0f * y, d = 3.0f * y;
#define KVQ_1024                                                                                                       \
    asm volatile(KVQ_FOUR(KVQ_FOUR(KVQ_FOUR(KVQ_FOUR(KVQ_STEP)))) : "+f"(a), "+f"(b), "+f"(c), "+f"(d) : "f"(y));
    KVQ_FOUR(KVQ_1024 KVQ_1024 KVQ_1024)
    if (a + b + c + d == 1.2345f) { *out = a; }
}

// on the stream that a device has before set_stream
void cool_code() {
    static float * out = nullptr;
    if (!out) { cudaMalloc(&out, sizeof(float)); }
    long_kernel<<<256, 32>>>(out, 0.5f);
}

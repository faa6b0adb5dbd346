// Single instructions that CUDA has no function for, or a slower one.
#pragma once

#include <cstdint>

// 2^x, 2 ulp, results below 2^-126 are 0
static __device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 16 bytes to shared memory, past the first level of the cache, some time later
static __device__ __forceinline__ void copy16(uint32_t to, const void * from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

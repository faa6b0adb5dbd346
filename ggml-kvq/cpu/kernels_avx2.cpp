#if defined(__x86_64__)
#define KVQ_NS kvq_isa_avx2
#include <cpuid.h>
#include "isa_avx2.h"
#include "kernels_impl.h"

static bool available(void) {
    // clang before 15 knows no "f16c" there
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
    return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

const kvq_kernels kvq_kernels_avx2 = KVQ_KERNELS("avx2", available);
#endif

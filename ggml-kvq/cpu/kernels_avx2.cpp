#if defined(__x86_64__)
#define KVQ_NS kvq_isa_avx2
#include "isa_avx2.h"
#include "kernels_impl.h"

static bool available(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

const kvq_kernels kvq_kernels_avx2 = KVQ_KERNELS("avx2", available);
#endif

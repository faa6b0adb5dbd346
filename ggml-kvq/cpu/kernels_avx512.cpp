#if defined(__x86_64__)
#define KVQ_NS kvq_isa_avx512
#include "isa_avx512.h"
#include "kernels_impl.h"

static bool available(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni");
}

const kvq_kernels kvq_kernels_avx512 = KVQ_KERNELS("avx512-vnni", available);
#endif

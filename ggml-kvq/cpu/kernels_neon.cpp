#if defined(__aarch64__)
#define KVQ_NS kvq_isa_neon
#include "isa_neon.h"
#include "kernels_impl.h"

#include <asm/hwcap.h>
#include <sys/auxv.h>

// what the build asks for of this file (cmake/kvq_library.cmake): dot products and arithmetic in f16, which ARMv8.0 lacks
static bool available(void) {
    constexpr unsigned long needed = HWCAP_ASIMDDP | HWCAP_ASIMDHP;
    return (getauxval(AT_HWCAP) & needed) == needed;
}

const kvq_kernels kvq_kernels_neon = KVQ_KERNELS("neon-dot", available);
#endif

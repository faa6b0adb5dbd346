#if defined(__aarch64__)
#define KVQ_NS kvq_isa_neon
#include "isa_neon.h"
#include "kernels_impl.h"

#include <asm/hwcap.h>
#include <sys/auxv.h>

// What this file is built with (cmake/kvq_library.cmake), and ARMv8.0 lacks: dot products, arithmetic in f16.
static bool available(void) {
    constexpr unsigned long needed = HWCAP_ASIMDDP | HWCAP_ASIMDHP;
    return (getauxval(AT_HWCAP) & needed) == needed;
}

const kvq_kernels kvq_kernels_neon = KVQ_KERNELS("neon-dot", available);
#endif

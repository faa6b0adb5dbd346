#if defined(__aarch64__)
#define KVQ_NS kvq_isa_neon
#include "isa_neon.h"
#include "kernels_impl.h"

static bool available(void) {
    return true; // the build asks for ARMv8.2 with dot product
}

const kvq_kernels kvq_kernels_neon = KVQ_KERNELS("neon-dot", available);
#endif

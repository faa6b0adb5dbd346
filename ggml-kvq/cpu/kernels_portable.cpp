#define KVQ_NS kvq_isa_portable
#include "isa_portable.h"
#include "kernels_impl.h"

static bool available(void) { return true; }

const kvq_kernels kvq_kernels_portable = KVQ_KERNELS("portable", available);

// HIGGS (Malinovskii et al. 2024, arXiv 2411.17525) on the KV cache, as AQUA-KV section 3 uses it: every head row is
// rotated by a Hadamard matrix, scaled by its own norm and kept as indices into a grid that is optimal for the normal
// distribution. No calibration, no groups of cells: cells are independent. The rotation is per head, so queries are
// rotated once and outputs rotated back once.
#include "method.h"

static const kvq_option_info options[] = {
    { "bits", "int", "2", "code bits of keys and values, 1..4", "AQUA-KV section 3.2" },
    { "k_bits", "int", "0", "code bits of keys; 0: as bits", "AQUA-KV section 3.2" },
    { "v_bits", "int", "0", "code bits of values; 0: as bits", "AQUA-KV section 3.2" },
    KVQ_OPTION_WINDOW("64", "AQUA-KV section 4"),
    KVQ_OPTIONS_LATTICE("0"),
};

extern const kvq_method kvq_method_higgs;
const kvq_method kvq_method_higgs = {
    { "higgs", "1-4 bit grid indices of Hadamard-rotated heads, one scale per cell",
        "HIGGS, arXiv 2411.17525; AQUA-KV, arXiv 2501.19392", sizeof(options) / sizeof(options[0]), options },
    kvq_plan_lattice,
    true,
};

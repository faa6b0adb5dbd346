// Choice of the instruction set, once per process. KVQ_ISA names one to force it (portable, avx2, avx512-vnni,
// avx512-amx, neon-dot, in capitals too); a name this CPU cannot run is reported and ignored.
#include "kernels.h"
#include "base/settings.h"

#include "engine/host.h"
#include "lattice.h"
#include "types/lattice.h"
#include "types/mixed.h"
#include "types/types.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <strings.h>
#include <vector>

// Best first. Made at the first use, not when the library is loaded: by then the CPU is known to have what is run.
static const std::vector<const kvq_kernels *> & table() {
#if defined(KVQ_HAVE_AMX)
    static const kvq_kernels amx = [] {
        kvq_kernels k = kvq_kernels_avx512;
        k.name = "avx512-amx";
        k.available = kvq_amx_available;
        k.predict = kvq_amx_predict;
        return k;
    }();
#endif
    static const std::vector<const kvq_kernels *> all = {
#if defined(KVQ_HAVE_AMX)
        &amx,
#endif
#if defined(__x86_64__)
        &kvq_kernels_avx512,
        &kvq_kernels_avx2,
#elif defined(__aarch64__)
        &kvq_kernels_neon,
#endif
        &kvq_kernels_portable,
    };
    return all;
}

static const kvq_kernels * named(const char * name) { // "": the best
    for (const kvq_kernels * k : table()) {
        if (k->available() && (!*name || !strcasecmp(name, k->name))) { return k; }
    }
    return nullptr;
}

static const kvq_kernels * choose(void) {
    static const kvq_kernels * const asked = named(kvq_setting_text(kvq_setting::ISA));
    static const kvq_kernels * const k = asked ? asked : named("");
    return k;
}

// Said where kernels are first used: a launcher asks for their name alone, and the program that it runs says it.
static void note_isa(void) {
    const char * want = kvq_setting_text(kvq_setting::ISA);
    if (!*want || named(want)) { return; }
    std::string names;
    for (const kvq_kernels * k : table()) {
        if (k->available()) { names += (names.empty() ? "" : ", ") + std::string(k->name); }
    }
    fprintf(stderr, "ggml-kvq: KVQ_ISA=%s is not available on this CPU and not used: write one of %s or unset it\n",
        want, names.c_str());
}

const kvq_kernels & kvq_get_kernels(void) {
    static const kvq_kernels * const k = (note_isa(), choose());
    return *k;
}

extern "C" const char * kvq_kernel_name(void) { return choose()->name; }

void kvq_cpu_f32_to_f16(const float * x, uint16_t * y, int64_t n) { kvq_get_kernels().f32_to_f16(x, y, n); }
void kvq_cpu_f16_to_f32(const uint16_t * x, float * y, int64_t n) { kvq_get_kernels().f16_to_f32(x, y, n); }

void kvq_cpu_encode(const kvq_codec & c, const uint16_t * rows, const uint8_t * valid, const void * shared,
    void * codes, void * params) {
    if (c.type == KVQ_TYPE_MIXED) {
        kvq_mixed_encode_by(kvq_cpu_encode, c, rows, valid, codes, params);
        return;
    }
    if (c.type == KVQ_TYPE_LATTICE && c.split) {
        kvq_lattice_encode_by(kvq_cpu_encode, c, rows, valid, shared, codes, params);
        return;
    }
    static thread_local std::vector<uint8_t> work;
    if (c.type == KVQ_TYPE_AFFINE && c.head_size % 16 == 0) {
        const kvq_view v = kvq_make_view(c);
        work.resize(std::max(work.size(), kvq_encode_bytes(v)));
        kvq_get_kernels().encode_affine(v, rows, valid, shared != nullptr, codes, params, work.data());
    } else if (c.type == KVQ_TYPE_LATTICE && c.head_size % 16 == 0) {
        const kvq_lattice_view a = kvq_lattice_make_view(c);
        work.resize(std::max(work.size(), kvq_lattice_encode_bytes(a)));
        kvq_get_kernels().encode_lattice(a, rows, valid, shared != nullptr, codes, params, work.data());
    } else {
        kvq_traits(c.type)->encode(c, rows, valid, shared, codes, params);
    }
}

// The C ABI over predictors (types/predictor.h).
#include "cache/config.h"

#include "engine/host.h"
#include "types/types.h"

#include <cstring>

static int fail(const std::string & line) {
    kvq_set_error(line);
    return KVQ_ERR_ARGUMENT;
}

extern "C" size_t kvq_weights_bytes(int n_in, int n_out, int bits) { return kvq_predictor_bytes(n_in, n_out, bits); }

static std::string refuse(int n_in, int n_out, int bits) {
    return kvq_predictor_bytes(n_in, n_out, bits)
        ? ""
        : "no predictor of " + std::to_string(n_out) + " x " + std::to_string(n_in) + " in " + std::to_string(bits) +
            " bits: 8 or 4, up to " + std::to_string(KVQ_PREDICT_MOST) + " inputs and outputs";
}

extern "C" int kvq_weights_pack(int n_in, int n_out, int bits, const float * w, void * out) {
    const std::string why = refuse(n_in, n_out, bits);
    if (!why.empty() || !w || !out) { return fail(why.empty() ? "w and out must not be NULL" : why); }
    kvq_predictor_pack(n_in, n_out, bits, w, (uint8_t *) out);
    return KVQ_OK;
}

extern "C" int kvq_predict(int n_in, int n_out, int bits, const void * weights, int64_t n, const float * rows,
    const float * add, float * out, int n_threads) {
    const std::string why = refuse(n_in, n_out, bits);
    if (!why.empty() || !weights || !rows || !out || n < 0) {
        return fail(why.empty() ? "weights, rows and out must not be NULL, and n not negative" : why);
    }
    kvq_predictor p;
    p.n_in = n_in;
    p.n_out = n_out;
    p.bits = bits;
    p.data = (const uint8_t *) weights;
    kvq_cpu_predict(p, n, rows, n_in, add, n_out, out, n_out, n_threads);
    return KVQ_OK;
}

extern "C" int kvq_round_trip(const kvq_codec * c, int n_head, int64_t n, float * rows, int n_threads) {
    if (!rows || n_head < 1 || n < 0) { return fail("rows must not be NULL, n_head positive and n not negative"); }
    if (kvq_codec_bytes(c, nullptr, nullptr) != KVQ_OK) { return KVQ_ERR_SHAPE; }
    kvq_cpu_round_trip(*c, n_head, n, rows, n_threads);
    return KVQ_OK;
}

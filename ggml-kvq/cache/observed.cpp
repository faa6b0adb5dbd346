#include "observed.h"

#include "engine/device.h"

#include <atomic>

static std::atomic<bool> observes{ false };

bool kvq_observes_queries() { return observes; }

extern "C" void kvq_observe_queries(int on) { observes = on != 0; }

void kvq_add_queries(kvq_query_sums & sums, const kvq_attn & a, int cell, kvq_device & device) {
    const size_t D = (size_t) a.k.head_size, gqa = (size_t) (a.n_head / a.n_head_kv);
    sums.square.resize((size_t) a.n_head_kv * D);
    std::vector<float> copy(device.is_host() ? 0 : D);
    const double unit = (double) a.scale * a.scale * (double) D; // a model may have scaled its queries before
    for (int t = 0; t < a.n_q; t++) {
        if (cell + t < KVQ_OBSERVED_FROM) { continue; }
        for (int h = 0; h < a.n_head; h++) {
            const float * q = a.q + t * a.q_stride_token + h * a.q_stride_head;
            if (!copy.empty()) {
                device.get(copy.data(), q, 4 * D);
                q = copy.data();
            }
            double * to = &sums.square[(size_t) h / gqa * D];
            for (size_t i = 0; i < D; i++) { to[i] += unit * (double) q[i] * (double) q[i]; }
        }
        sums.n += gqa;
    }
}

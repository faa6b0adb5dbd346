#include "rope.h"

#include <algorithm>
#include <cmath>

bool kvq_rope::operator==(const kvq_rope & o) const {
    return n_dims == o.n_dims && n_ctx_orig == o.n_ctx_orig && neox == o.neox && freq_base == o.freq_base && freq_scale == o.freq_scale &&
           ext_factor == o.ext_factor && attn_factor == o.attn_factor && beta_fast == o.beta_fast && beta_slow == o.beta_slow && freq_factors == o.freq_factors;
}

// dimension whose wavelength makes `beta` turns over the original context
static float ramp_edge(const kvq_rope & r, float beta) {
    return (float) r.n_dims * logf((float) r.n_ctx_orig / (beta * 2.0f * (float) M_PI)) / (2.0f * logf(r.freq_base));
}

void kvq_rope_fill(const kvq_rope & r, int32_t pos, bool inverse, kvq_rope_table & t) {
    const int n = r.n_dims / 2;
    t.cos.resize(n);
    t.sin.resize(n);
    const float low  = std::max(0.0f, floorf(ramp_edge(r, r.beta_fast)));
    const float high = std::min((float) r.n_dims - 1.0f, ceilf(ramp_edge(r, r.beta_slow)));
    float magnitude = r.attn_factor;
    if (r.ext_factor != 0.0f) {
        magnitude *= 1.0f + 0.1f * logf(1.0f / r.freq_scale);
    }
    if (inverse) {
        magnitude = 1.0f / magnitude;
    }
    const float step = powf(r.freq_base, -2.0f / (float) r.n_dims);
    float angle = (float) pos;
    for (int i = 0; i < n; i++, angle *= step) {
        const float extrapolated = angle / (r.freq_factors.empty() ? 1.0f : r.freq_factors[i]);
        float theta = r.freq_scale * extrapolated;
        if (r.ext_factor != 0.0f) {
            const float y   = ((float) i - low) / std::max(0.001f, high - low);
            const float mix = (1.0f - std::min(1.0f, std::max(0.0f, y))) * r.ext_factor;
            theta = theta * (1.0f - mix) + extrapolated * mix;
        }
        t.cos[i] = cosf(theta) * magnitude;
        t.sin[i] = sinf(theta) * magnitude * (inverse ? -1.0f : 1.0f);
    }
}

void kvq_rope_apply(const kvq_rope & r, const kvq_rope_table & t, float * row) {
    const int n = r.n_dims / 2;
    for (int i = 0; i < n; i++) {
        float & a = row[r.neox ? i : 2*i];
        float & b = row[r.neox ? i + n : 2*i + 1];
        const float x = a, y = b;
        a = x * t.cos[i] - y * t.sin[i];
        b = x * t.sin[i] + y * t.cos[i];
    }
}

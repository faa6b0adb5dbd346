#include "rope.h"

#include "base/constants.h"

#include <algorithm>
#include <cmath>

bool kvq_rope::operator==(const kvq_rope & o) const {
    return n_dims == o.n_dims && n_ctx_orig == o.n_ctx_orig && neox == o.neox && freq_base == o.freq_base &&
        freq_scale == o.freq_scale && ext_factor == o.ext_factor && attn_factor == o.attn_factor &&
        beta_fast == o.beta_fast && beta_slow == o.beta_slow && freq_factors == o.freq_factors &&
        std::equal(sections, sections + 4, o.sections) && interleaved == o.interleaved;
}

int kvq_rope::section(int pair) const {
    if (!multi()) { return 0; }
    const int i = pair % (sections[0] + sections[1] + sections[2] + sections[3]);
    if (interleaved) { return i < 3 * sections[i % 3] ? i % 3 : 3; }
    const int columns = sections[0] + sections[1];
    return i < sections[0] ? 0 : i < columns ? 1 : i < columns + sections[2] ? 2 : 3;
}

// dimension whose wavelength makes `beta` turns over the original context
static float ramp_edge(const kvq_rope & r, float beta) {
    return (float) r.n_dims * logf((float) r.n_ctx_orig / (beta * 2.0f * (float) M_PI)) / (2.0f * logf(r.freq_base));
}

static float magnitude_of(const kvq_rope & r) {
    return r.attn_factor * (r.ext_factor != 0.0f ? 1.0f + 0.1f * logf(1.0f / r.freq_scale) : 1.0f);
}

void kvq_rope_fill(const kvq_rope & r, int32_t pos, bool inverse, kvq_rope_table & t) {
    const int n = r.n_dims / 2;
    t.cos.resize(n);
    t.sin.resize(n);
    const float low = std::max(0.0f, floorf(ramp_edge(r, r.beta_fast)));
    const float high = std::min((float) r.n_dims - 1.0f, ceilf(ramp_edge(r, r.beta_slow)));
    float magnitude = magnitude_of(r);
    if (inverse) { magnitude = 1.0f / magnitude; }
    const float step = powf(r.freq_base, -2.0f / (float) r.n_dims);
    float angle = (float) pos;
    for (int i = 0; i < n; i++, angle *= step) {
        const float extrapolated = angle / (r.freq_factors.empty() ? 1.0f : r.freq_factors[i]);
        float theta = r.freq_scale * extrapolated;
        if (r.ext_factor != 0.0f) {
            const float y = ((float) i - low) / std::max(0.001f, high - low);
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
        float & a = row[r.neox ? i : 2 * i];
        float & b = row[r.neox ? i + n : 2 * i + 1];
        const float x = a, y = b;
        a = x * t.cos[i] - y * t.sin[i];
        b = x * t.sin[i] + y * t.cos[i];
    }
}

// ---------------------------------------------------------------- tables

kvq_rotor::kvq_rotor(const kvq_rope & rope, int n_text) : r(rope), magnitude(magnitude_of(rope)) {
    const int n = r.n_dims / 2;
    const double low_edge = std::max(0.0f, floorf(ramp_edge(r, r.beta_fast)));
    const double high_edge = std::min((float) r.n_dims - 1.0f, ceilf(ramp_edge(r, r.beta_slow)));
    for (int i = 0; i < n; i++) {
        const double extrapolated = pow((double) r.freq_base, -2.0 * i / r.n_dims) /
            (r.freq_factors.empty() ? 1.0 : (double) r.freq_factors[i]);
        const double ramp =
            1.0 - std::min(1.0, std::max(0.0, ((double) i - low_edge) / std::max(0.001, high_edge - low_edge)));
        const double mix = r.ext_factor != 0.0f ? ramp * (double) r.ext_factor : 0.0;
        const double angle = extrapolated * ((double) r.freq_scale * (1.0 - mix) + mix);
        const bool fourth = r.section(i) == 3;
        speed.push_back(fourth ? 0.0 : angle);
        extra.push_back(fourth ? angle : 0.0);
    }
    low.resize((size_t) n * 2 * KVQ_ROTARY_LOW);
    for (int i = 0; i < n; i++) {
        for (int p = 0; p < KVQ_ROTARY_LOW; p++) {
            low[((size_t) i * 2 + 0) * KVQ_ROTARY_LOW + p] = (float) cos(p * speed[i]);
            low[((size_t) i * 2 + 1) * KVQ_ROTARY_LOW + p] = (float) sin(p * speed[i]);
        }
    }
    v.n_dims = r.n_dims;
    v.neox = r.neox;
    v.low = low.data();
    turns.reset(new kvq_turns(speed));
    v.turns = turns.get();
    // kernels read 128 positions from a multiple of 64 on: 128 more rows keep segments apart from text
    cover(r.multi() ? (n_text + 127) / 128 * 128 + 127 : 0);
    first_number = r.multi() ? 64 * v.n_high : 0;
}

// positions at + 0..63 of the first three
void kvq_rotor::add_high(const place_t & at) {
    const int n = r.n_dims / 2;
    std::vector<double> angles;
    for (int i = 0; i < n; i++) {
        angles.push_back(at[(size_t) r.section(i)] * (speed[(size_t) i] + extra[(size_t) i]));
    }
    turns->add_high(angles, magnitude);
    for (int part = 0; part < 2; part++) {
        for (const double a : angles) { high.push_back(magnitude * (float) (part ? sin(a) : cos(a))); }
    }
    v.n_high++;
    v.high = high.data();
}

void kvq_rotor::cover(int32_t pos) {
    while (!first_number && v.n_high <= pos / 64) {
        const int32_t p = 64 * v.n_high;
        add_high({ p, p, p, 0 });
    }
}

int32_t kvq_rotor::place(const place_t & at) {
    const int n = r.n_dims / 2;
    const bool fourth = std::any_of(extra.begin(), extra.begin() + n, [](double x) { return x != 0.0; });
    const int32_t last = fourth ? at[3] : 0;
    if (at[0] >= 0 && at[0] <= first_number - 128 && at[0] == at[1] && at[0] == at[2] && !last) { return at[0]; }
    const int32_t by = at[0] & 63;
    const place_t start = { at[0] - by, at[1] - by, at[2] - by, last };
    auto known = segments.find(start);
    if (known == segments.end()) {
        if (starts.size() == (size_t) MAX_SEGMENTS) { return 0; }
        known = segments.emplace(start, (int32_t) starts.size()).first;
        starts.push_back(start);
        add_high(start);
        add_high({ start[0] + 64, start[1] + 64, start[2] + 64, last });
    }
    return first_number + 128 * known->second + by;
}

bool kvq_rotor::place_of(int32_t number, place_t & at) const {
    const int32_t i = number - first_number;
    if (!first_number || i < 0 || (size_t) (i / 128) >= starts.size()) { return false; }
    at = starts[(size_t) (i / 128)];
    for (int a = 0; a < 3; a++) { at[(size_t) a] += i % 128; }
    return true;
}

void kvq_rotor::forget() {
    const int n_text = first_number / 64;
    if (!starts.empty()) {
        high.resize((size_t) n_text * r.n_dims);
        turns->cut_high(n_text);
        v.high = high.data();
        v.n_high = n_text;
        segments.clear();
        starts.clear();
    }
}

void kvq_rotary_turn(const kvq_rotary & v, int32_t pos, bool inverse, float * turn) {
    const int n = v.n_dims / 2, at = std::max(pos, 0);
    const float * hi = v.high + (size_t) (at / 64) * 2 * n;
    const float magnitude = v.high[0]; // cos 0
    const float inv = inverse ? 1.0f / (magnitude * magnitude) : 1.0f;
    float *c = turn, *s = turn + n;
    for (int i = 0; i < n; i++) { // apart from the products: compilers then work on several pairs at once
        const float * lo = v.low + (size_t) i * 2 * KVQ_ROTARY_LOW + at % 64;
        c[i] = lo[0];
        s[i] = lo[KVQ_ROTARY_LOW];
    }
    for (int i = 0; i < n; i++) {
        const float lc = c[i], ls = s[i];
        c[i] = (hi[i] * lc - hi[n + i] * ls) * inv;
        s[i] = (hi[n + i] * lc + hi[i] * ls) * (inverse ? -inv : inv);
    }
}

void kvq_rotary_turn_row(const kvq_rotary & v, const float * turn, float * row) {
    const int n = v.n_dims / 2;
    const float *c = turn, *s = turn + n;
    if (v.neox) {
        for (int i = 0; i < n; i++) {
            const float x = row[i], y = row[i + n];
            row[i] = x * c[i] - y * s[i];
            row[i + n] = x * s[i] + y * c[i];
        }
    } else {
        for (int i = 0; i < n; i++) {
            const float x = row[2 * i], y = row[2 * i + 1];
            row[2 * i] = x * c[i] - y * s[i];
            row[2 * i + 1] = x * s[i] + y * c[i];
        }
    }
}

void kvq_rotary_apply(const kvq_rotary & v, int32_t pos, bool inverse, float * row) {
    float turn[KVQ_MAX_HEAD];
    kvq_rotary_turn(v, pos, inverse, turn);
    kvq_rotary_turn_row(v, turn, row);
}

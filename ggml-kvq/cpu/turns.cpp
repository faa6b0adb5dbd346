#include "turns.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

kvq_turns::kvq_turns(const std::vector<double> & speed) {
    n_pairs = (int) speed.size();
    n_pad   = (n_pairs + 15) / 16 * 16;
    for (int i = 0; i < n_pairs; i++) { pair.push_back(i); }
    std::stable_sort(pair.begin(), pair.end(), [&](int a, int b) { return std::fabs(speed[(size_t) a]) > std::fabs(speed[(size_t) b]); });
    const auto w = [&](int i) { return i < n_pairs ? speed[(size_t) pair[(size_t) i]] : 0.0; };
    int fast = 0;
    while (fast < n_pairs && std::fabs(w(fast)) * KVQ_TURN_HALF > (double) KVQ_TURN_SLOW) { fast++; }
    n_fast = (fast + 15) / 16 * 16;
    for (int p = 0; p < 64; p++) {
        for (int i = 0; i < n_pad; i++) { low.push_back((float) std::cos(p * w(i))); }
        for (int i = 0; i < n_pad; i++) { low.push_back((float) std::sin(p * w(i))); }
    }
    for (int i = 0; i < n_pad; i++) { half.push_back((float) std::cos(0.5 * w(i))); }
    for (int i = 0; i < n_pad; i++) { half.push_back((float) std::sin(0.5 * w(i))); }
    double factorial = 1.0;
    for (int k = 1; k <= 4; k++) {
        factorial *= k;
        for (int i = n_fast; i < n_pad; i++) { power.push_back((float) (std::pow(KVQ_TURN_HALF * w(i), k) / factorial)); }
    }
    for (int o = 0; o < KVQ_TURN_HALF; o += 16) {
        for (int i = 0; i < n_fast + 4; i += 2) {
            for (int t = 0; t < 32; t++) {
                const int    j = i + t % 2, power = 2 * (j - n_fast);
                const double at = o + t / 2 + 0.5, u = at / KVQ_TURN_HALF;
                cos.push_back((int16_t) std::lrint(KVQ_TURN_UNIT * (j < n_fast ? std::cos(at * w(j)) : power <= 4 ? std::pow(u, power) : 0.0)));
                sin.push_back((int16_t) std::lrint(KVQ_TURN_UNIT * (j < n_fast ? std::sin(at * w(j)) : power <= 2 ? std::pow(u, power + 1) : 0.0)));
            }
        }
    }
}

void kvq_turns::add_high(const std::vector<double> & speed, float magnitude, int i) {
    for (int part = 0; part < 2; part++) {
        for (int j = 0; j < n_pad; j++) {
            const double angle = j < n_pairs ? 64.0 * i * speed[(size_t) pair[(size_t) j]] : 0.0;
            high.push_back(magnitude * (float) (part ? std::sin(angle) : std::cos(angle)));
        }
    }
}

void kvq_turn_coefficients(const kvq_rotary & rot, const float * q, const float * mean, float * coef, float & step) {
    const kvq_turns & t = *(const kvq_turns *) rot.turns;
    const int n = t.n_pairs, next = rot.neox ? n : 1, by = rot.neox ? 1 : 2;
    const float magnitude = std::hypot(rot.high[0], rot.high[n]);
    float most = 0.0f, fast = 0.0f, slow = 0.0f;
    for (int i = 0; i < n; i++) {
        const int x = t.pair[(size_t) i] * by, y = x + next;
        const float a = q[x] * mean[x] + q[y] * mean[y], b = q[y] * mean[x] - q[x] * mean[y], c = t.half[(size_t) i], s = t.half[(size_t) (t.n_pad + i)];
        coef[i]           = a * c - b * s;
        coef[t.n_pad + i] = a * s + b * c;
        const float size = std::sqrt(a * a + b * b) * magnitude;
        most = std::max(most, size);
        (i < t.n_fast ? fast : slow) += size;
    }
    most = std::max(most, slow);
    const float inv = most > 1e-30f ? std::min(16383.0f / most, 5e5f / (fast + 2.0f * slow)) : 0.0f; // weights of 14 bits, sums below 2^31
    step = inv > 0.0f ? 1.0f / inv : 0.0f;
    for (int i = 0; i < t.n_pad; i++) {
        coef[i]           = i < n ? coef[i] * inv : 0.0f;
        coef[t.n_pad + i] = i < n ? coef[t.n_pad + i] * inv : 0.0f;
    }
}

void kvq_turn_back(const kvq_rotary & rot, int32_t by, float * q) {
    const int n = rot.n_dims / 2, at = std::abs(by);
    const float * hi = rot.high + (size_t) (at / 64) * 2 * n;
    const float inv = 1.0f / std::hypot(rot.high[0], rot.high[n]);
    for (int i = 0; i < n; i++) {
        const float * lo = rot.low + (size_t) i * 2 * KVQ_ROTARY_LOW + at % 64;
        const float c = (hi[i] * lo[0] - hi[n + i] * lo[KVQ_ROTARY_LOW]) * inv, s = (hi[n + i] * lo[0] + hi[i] * lo[KVQ_ROTARY_LOW]) * (by < 0 ? -inv : inv);
        float & a = q[rot.neox ? i : 2*i], & b = q[rot.neox ? i + n : 2*i + 1];
        const float x = a, y = b;
        a = x * c + y * s;
        b = y * c - x * s;
    }
}

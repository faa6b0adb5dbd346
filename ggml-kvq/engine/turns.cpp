#include "turns.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace {

struct fitted {
    // [KVQ_TURN_BASIS][KVQ_TURN_HALF], [KVQ_TURN_BASIS][n]; the largest |v| of each function is 1
    std::vector<double> u, v;
    double error = 0.0; // the most that a wave differs anywhere
};

// wave [n][KVQ_TURN_HALF]
fitted fit(size_t n, std::vector<double> wave) {
    constexpr size_t H = KVQ_TURN_HALF;
    const auto dot = [](const double * x, const double * y) {
        double s = 0.0;
        for (size_t o = 0; o < H; o++) { s += x[o] * y[o]; }
        return s;
    };
    fitted f;
    f.u.resize(KVQ_TURN_BASIS * H);
    f.v.resize(KVQ_TURN_BASIS * n);
    for (size_t k = 0; k < KVQ_TURN_BASIS; k++) {
        double *u = &f.u[k * H], *v = &f.v[k * n], most = 0.0, top = 0.0;
        size_t worst = 0;
        for (size_t i = 0; i < n; i++) {
            const double size = dot(&wave[i * H], &wave[i * H]);
            if (size > most) {
                most = size;
                worst = i;
            }
        }
        if (most < 1e-18) { break; }
        for (size_t o = 0; o < H; o++) { u[o] = wave[worst * H + o] / std::sqrt(most); }
        for (size_t i = 0; i < n; i++) {
            v[i] = dot(u, &wave[i * H]);
            top = std::max(top, std::fabs(v[i]));
            for (size_t o = 0; o < H; o++) { wave[i * H + o] -= v[i] * u[o]; }
        }
        for (size_t i = 0; i < n; i++) { v[i] /= top; }
        for (size_t o = 0; o < H; o++) { u[o] *= top; }
    }
    for (const double x : wave) { f.error = std::max(f.error, std::fabs(x)); }
    return f;
}

int16_t rounded(double x) { return (int16_t) std::lrint(x); }

} // namespace

kvq_turns::kvq_turns(const std::vector<double> & speed) {
    n_pairs = (int) speed.size();
    n_pad = (n_pairs + 15) / 16 * 16;
    for (int i = 0; i < n_pairs; i++) { pair.push_back(i); }
    std::stable_sort(pair.begin(), pair.end(),
        [&](int a, int b) { return std::fabs(speed[(size_t) a]) > std::fabs(speed[(size_t) b]); });
    const auto w = [&](int i) { return i < n_pairs ? speed[(size_t) pair[(size_t) i]] : 0.0; };
    for (int p = 0; p < 64; p++) {
        for (int i = 0; i < n_pad; i++) { low.push_back((float) std::cos(p * w(i))); }
        for (int i = 0; i < n_pad; i++) { low.push_back((float) std::sin(p * w(i))); }
    }
    for (int i = 0; i < n_pad; i++) { half.push_back((float) std::cos(0.5 * w(i))); }
    for (int i = 0; i < n_pad; i++) { half.push_back((float) std::sin(0.5 * w(i))); }

    const auto fit_from = [&](int fast, bool odd) {
        std::vector<double> wave;
        for (int i = fast; i < n_pairs; i++) {
            for (int o = 0; o < KVQ_TURN_HALF; o++) {
                wave.push_back(odd ? std::sin((o + 0.5) * w(i)) : std::cos((o + 0.5) * w(i)));
            }
        }
        return fit((size_t) std::max(n_pairs - fast, 0), std::move(wave));
    };
    // the fewest fast pairs: more of them leave a smaller error
    int least = 0, most = n_pad / 2 - KVQ_TURN_BASIS / 2;
    const auto fits = [&](int fast) {
        return fit_from(fast, false).error <= KVQ_TURN_ERROR && fit_from(fast, true).error <= KVQ_TURN_ERROR;
    };
    while (least < most) {
        const int middle = (least + most) / 2;
        (fits(2 * middle) ? most : least) = middle + (fits(2 * middle) ? 0 : 1);
    }
    n_fast = 2 * least;
    n_terms = n_fast + KVQ_TURN_BASIS;
    for (int i = 0; i < n_pad; i++) { fast.push_back(i < n_fast ? 1.0f : 0.0f); }
    for (int i = 0; i < n_pad; i++) { fast.push_back(i < n_fast ? 0.0f : 1.0f); }
    const fitted even = fit_from(n_fast, false), odd = fit_from(n_fast, true);
    const size_t n_slow = (size_t) std::max(n_pairs - n_fast, 0);
    for (int i = n_fast; i < n_pad; i += 2) {
        for (size_t k = 0; k < 2 * KVQ_TURN_BASIS; k++) {
            for (int j = i; j < i + 2; j++) {
                const std::vector<double> & v = k % 2 ? odd.v : even.v;
                basis.push_back(
                    j < n_pairs ? rounded(KVQ_TURN_UNIT * v[k / 2 * n_slow + (size_t) (j - n_fast)]) : (int16_t) 0);
            }
        }
    }
    for (int o = 0; o < KVQ_TURN_HALF; o += 16) {
        for (int i = 0; i < n_terms; i += 2) {
            for (int t = 0; t < 64; t++) {
                const bool sine = t >= 32;
                const int j = i + t % 2, at = o + t % 32 / 2;
                const double x = (at + 0.5) * w(j),
                             u = j < n_fast ? 0.0
                                            : (sine ? odd.u : even.u)[(size_t) ((j - n_fast) * KVQ_TURN_HALF + at)];
                waves.push_back(rounded(KVQ_TURN_UNIT * (j >= n_fast ? u : sine ? std::sin(x) : std::cos(x))));
            }
        }
    }
}

void kvq_turns::add_high(const std::vector<double> & angles, float magnitude) {
    for (int part = 0; part < 2; part++) {
        for (int j = 0; j < n_pad; j++) {
            const double angle = j < n_pairs ? angles[(size_t) pair[(size_t) j]] : 0.0;
            high.push_back(magnitude * (float) (part ? std::sin(angle) : std::cos(angle)));
        }
    }
}

void kvq_turn_back(const kvq_rotary & rot, int32_t by, float * q) {
    const int n = rot.n_dims / 2, at = std::abs(by);
    const float * hi = rot.high + (size_t) (at / 64) * 2 * n;
    const float inv = 1.0f / std::hypot(rot.high[0], rot.high[n]);
    for (int i = 0; i < n; i++) {
        const float * lo = rot.low + (size_t) i * 2 * KVQ_ROTARY_LOW + at % 64;
        const float c = (hi[i] * lo[0] - hi[n + i] * lo[KVQ_ROTARY_LOW]) * inv,
                    s = (hi[n + i] * lo[0] + hi[i] * lo[KVQ_ROTARY_LOW]) * (by < 0 ? -inv : inv);
        float &a = q[rot.neox ? i : 2 * i], &b = q[rot.neox ? i + n : 2 * i + 1];
        const float x = a, y = b;
        a = x * c + y * s;
        b = y * c - x * s;
    }
}

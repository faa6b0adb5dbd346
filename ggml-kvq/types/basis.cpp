#include "basis.h"

#include "lattice.h"

#include <algorithm>
#include <cmath>

void kvq_basis_data::make(int n, int width, const float * axes, const float * read) {
    view.n = n;
    view.width = width;
    in.resize((size_t) n * width);
    out.assign((size_t) (n + 3) / 4 * 4 * width, 0);
    off.assign((size_t) width, 0);
    step.assign((size_t) width, 0.0f);
    for (int i = 0; i < width; i++) {
        float top = 0.0f;
        for (int j = 0; j < n; j++) {
            if (read) { in[(size_t) i * n + j] = read[(size_t) j * width + i]; }
            top = std::max(top, fabsf(axes[(size_t) j * width + i]));
        }
        step[(size_t) i] = top / 2.0f / 127.0f; // 2 c - 15 moves by two
        for (int j = 0; j < n && top > 0.0f; j++) {
            const int8_t w = (int8_t) std::lrint(axes[(size_t) j * width + i] / 2.0f / step[(size_t) i]);
            out[((size_t) (j / 4) * width + i) * 4 + j % 4] = w;
            off[(size_t) i] += KVQ_COORD_TOP * w;
            if (!read) { in[(size_t) j * width + i] = step[(size_t) i] * (float) w; }
        }
    }
    look();
}

kvq_coord_pairs<uint8_t> kvq_coords_in(const kvq_codec & c, size_t nb_params, uint8_t * params) {
    return { params + kvq_lattice_coords_at(c), nb_params, c.coords / 2, c.n_cells };
}

kvq_coord_pairs<const uint8_t> kvq_coords_in(const kvq_codec & c, size_t nb_params, const uint8_t * params) {
    return { params + kvq_lattice_coords_at(c), nb_params, c.coords / 2, c.n_cells };
}

kvq_coord_pairs<const uint8_t> kvq_coords_alone(const kvq_codec & c, const uint8_t * pairs) {
    return { pairs, kvq_coords_nb(c, 1), c.coords / 2, c.n_cells };
}

size_t kvq_coords_nb(const kvq_codec & c, int n_head) {
    return (size_t) n_head * (size_t) (c.coords / 2) * (size_t) c.n_cells;
}

static uint8_t scale_of(const std::vector<float> & z) {
    float sum = 0.0f;
    for (const float x : z) { sum += x * x; }
    const float want = KVQ_COORD_STEP * sqrtf(sum / (float) z.size());
    if (!(want > 0.0f)) { return 0; }
    int x;
    const float m = frexpf(want, &x); // 1/2 <= m < 1
    return (uint8_t) std::clamp((x - 4 + 19) * 8 + (int) floorf(m * 16.0f - 8.0f + 0.5f), 0, 255);
}

void kvq_basis_encode(const kvq_basis & b, const kvq_coord_pairs<uint8_t> & to, const float * rows) {
    std::vector<float> z((size_t) b.n);
    for (int t = 0; t < to.n_cells; t++) {
        std::fill(z.begin(), z.end(), 0.0f);
        for (int i = 0; i < b.width; i++) {
            const float x = rows[(size_t) t * (size_t) b.width + (size_t) i],
                        *const a = b.in + (size_t) i * (size_t) b.n;
            for (int j = 0; j < b.n; j++) { z[(size_t) j] += x * a[j]; }
        }
        const uint8_t e = scale_of(z);
        const float scale = kvq_coord_scale(e);
        const auto code = [&](float x) { // in this order: what is no number is 0
            return (int) std::max(0.0f, std::min((float) KVQ_COORD_TOP, floorf(x / scale) + 8.0f));
        };
        for (int j = 0; j < b.n; j += 2) {
            to.of(j / 2)[t] = (uint8_t) (code(z[(size_t) j]) | code(z[(size_t) j + 1]) << 4);
        }
        to.of(b.n / 2)[t] = e;
    }
}

void kvq_basis_decode(const kvq_basis & b, const kvq_coord_pairs<const uint8_t> & from, float * rows) {
    const size_t width = (size_t) b.width;
    std::vector<int32_t> sums(width);
    for (int t = 0; t < from.n_cells; t++) {
        std::fill(sums.begin(), sums.end(), 0);
        for (int j = 0; j < b.n; j += 2) {
            const uint8_t pair = from.of(j / 2)[t];
            const int lo = 2 * (pair & 15) - 15, hi = 2 * (pair >> 4) - 15;
            const int8_t * out = b.out + (size_t) (j / 4) * width * 4 + j % 4;
            for (size_t i = 0; i < width; i++) { sums[i] += lo * out[4 * i] + hi * out[4 * i + 1]; }
        }
        const float scale = kvq_coord_scale(from.of(b.n / 2)[t]);
        for (size_t i = 0; i < width; i++) { rows[(size_t) t * width + i] = b.step[i] * (float) sums[i] * scale; }
    }
}

// ---------------------------------------------------------------- the C ABI

namespace {

struct owned_basis : kvq_basis {
    kvq_basis_data data;
};

bool fits(const kvq_codec * c, int n_head) {
    const size_t n = c && n_head > 0 ? (size_t) c->coords * (size_t) n_head : 0;
    return n >= 4 && n - 2 <= (size_t) KVQ_MAX_COORDS && !kvq_lattice_refuse(*c);
}

} // namespace

extern "C" {

int kvq_coords_encode(const kvq_codec * codec, int n_head_kv, const float * read, const float * rows, void * params) {
    if (!fits(codec, n_head_kv)) { return KVQ_ERR_SHAPE; }
    kvq_basis_data b;
    b.make(codec->coords * n_head_kv - 2, n_head_kv * codec->head_size, read, read);
    kvq_basis_encode(b.view, kvq_coords_in(*codec, kvq_lattice_nb_params(*codec), (uint8_t *) params), rows);
    return KVQ_OK;
}

int kvq_coords_decode(
    const kvq_codec * codec, int n_head_kv, int width, const float * axes, const void * params, float * rows) {
    if (!fits(codec, n_head_kv) || width < 1) { return KVQ_ERR_SHAPE; }
    kvq_basis_data b;
    b.make(codec->coords * n_head_kv - 2, width, axes, nullptr);
    kvq_basis_decode(b.view, kvq_coords_in(*codec, kvq_lattice_nb_params(*codec), (const uint8_t *) params), rows);
    return KVQ_OK;
}

const kvq_basis * kvq_basis_new(int n, int width, const float * axes, const float * read) {
    if (n < 2 || n % 2 || n > KVQ_MAX_COORDS || width < 1 || !axes) { return nullptr; }
    owned_basis * out = new owned_basis;
    out->data.make(n, width, axes, read);
    *(kvq_basis *) out = out->data.view;
    return out;
}

void kvq_basis_free(const kvq_basis * basis) { delete (const owned_basis *) basis; }

} // extern "C"

#include "types.h"

#include "affine.h"
#include "base/f16.h"
#include "lattice.h"
#include "mixed.h"

#include <algorithm>
#include <cstring>
#include <vector>

// ---------------------------------------------------------------- f16: rows [n_cells][head_size], no parameters

static const char * f16_refuse(const kvq_codec & c) {
    return c.head_size < 1 || c.n_cells < 1 ? "head size and cells must be positive" : nullptr;
}
static size_t f16_nb_codes(const kvq_codec & c) { return 2 * (size_t) c.n_cells * c.head_size; }
static size_t f16_nb_params(const kvq_codec &) { return 0; }

static void f16_encode(
    const kvq_codec & c, const uint16_t * rows, const uint8_t *, const void *, void * codes, void *) {
    memcpy(codes, rows, f16_nb_codes(c));
}
static void f16_decode(const kvq_codec & c, const void * codes, const void *, uint16_t * rows) {
    memcpy(rows, codes, f16_nb_codes(c));
}
static bool f16_match(
    const kvq_codec & c, const uint16_t * rows, kvq_low_bits, const void *, void * codes, const void *) {
    memcpy(codes, rows, f16_nb_codes(c));
    return true;
}

// ---------------------------------------------------------------- affine

static bool affine_match(const kvq_codec & c, const uint16_t * rows, kvq_low_bits low, const void * shared,
    void * codes, const void * params) {
    const kvq_affine_dims d = kvq_affine_get_dims(c);
    const kvq_affine_parts parts = kvq_affine_get_parts(c);
    std::vector<float> scale(d.np), zero(d.np);
    kvq_affine_get_params(c, params, scale.data(), zero.data());
    if (codes && !shared) { memset(codes, 0, kvq_affine_nb_codes(c)); }
    const int n = (1 << c.bits) - 1;
    const bool k = c.role == KVQ_ROLE_K;
    for (int t = 0; t < c.n_cells; t++) {
        for (int i = 0; i < c.head_size; i++) {
            const int p = k ? t / c.group * c.head_size + i : i / c.group * c.n_cells + t;
            const uint16_t v = rows[(size_t) t * c.head_size + i], mask = low.mask(c, (size_t) t * c.head_size + i);
            auto reproduces = [&](int q) {
                const float y = std::min(std::max(zero[p] + scale[p] * (float) q, -65504.0f), 65504.0f);
                return ((kvq_f32_to_f16(y) ^ v) & ~mask & 0xffff) == 0;
            };
            int q = 0;
            if (shared) {
                q = c.bits ? kvq_affine_get_code(parts, (const uint8_t *) shared, k ? t : i, k ? i : t) : 0;
                if (!reproduces(q)) { return false; }
            } else {
                while (q <= n && !reproduces(q)) { q++; }
                if (q > n) { return false; }
            }
            if (!shared && q) { kvq_affine_put_code(parts, (uint8_t *) codes, k ? t : i, k ? i : t, q); }
        }
    }
    return true;
}

static const kvq_type_traits traits[] = {
    { KVQ_TYPE_F16, "f16", f16_refuse, f16_nb_codes, f16_nb_params, f16_encode, f16_decode, f16_match, nullptr },
    { KVQ_TYPE_AFFINE, "affine", kvq_affine_refuse, kvq_affine_nb_codes, kvq_affine_nb_params, kvq_affine_encode_ref,
        kvq_affine_decode_ref, affine_match, nullptr },
    { KVQ_TYPE_LATTICE, "lattice", kvq_lattice_refuse, kvq_lattice_nb_codes, kvq_lattice_nb_params, kvq_lattice_encode,
        kvq_lattice_decode, kvq_lattice_match, kvq_lattice_assign },
    { KVQ_TYPE_MIXED, "mixed", kvq_mixed_refuse, kvq_mixed_nb_codes, kvq_mixed_nb_params, kvq_mixed_encode,
        kvq_mixed_decode, kvq_mixed_match, nullptr },
};

const kvq_type_traits * kvq_traits(int type) {
    for (const auto & t : traits) {
        if (t.type == type) { return &t; }
    }
    return nullptr;
}

// ---------------------------------------------------------------- image
// The parameter bytes, as one little-endian bit stream, fill the low k mantissa bits of the values in row order,
// k the least width that holds them: 1 bit for affine groups of 32 with f16 scales.

int kvq_image_width(size_t n_values, size_t nb) { return (int) ((8 * nb + n_values - 1) / n_values); }

namespace {

// W bits of each of 16 values, four values in a word at a time. W is at most 4.
constexpr size_t AT_ONCE = 16;
constexpr uint64_t ONES = 0x0001000100010001u; // one a value

// Products move the field of value i to bit 48 + W*i, where none meet, and 4*W bits to their values: 3 bits of each at
// most, else copies would meet.
template <int W> struct bit_fields {
    static constexpr uint64_t lanes = ((1u << W) - 1) * ONES;
    static constexpr size_t nb = 2 * W; // of 16 values
    static constexpr uint64_t products(int first, int step) {
        uint64_t m = 0;
        for (int i = 0; i < 4; i++) { m |= (uint64_t) 1 << (first + step * i); }
        return m;
    }
    static uint64_t pack(const uint16_t * rows, int low) {
        uint64_t bits = 0;
        for (int j = 0; j < 4; j++) {
            uint64_t x;
            memcpy(&x, rows + 4 * j, sizeof(x));
            bits |= ((x >> low & lanes) * products(48, W - 16) >> 48) << 4 * W * j;
        }
        return bits;
    }
    static void unpack(uint64_t bits, uint16_t * rows, int low) {
        for (int j = 0; j < 4; j++, bits >>= 4 * W) {
            const uint64_t four = bits & ((1u << 4 * W) - 1);
            uint64_t x, fields = four * products(0, 16 - W);
            for (int i = 0; W > 3 && i < 4; i++) {
                fields = i ? fields | (four << (16 - W) * i & (uint64_t) 0xffff << 16 * i) : four & 0xffff;
            }
            memcpy(&x, rows + 4 * j, sizeof(x));
            x = (x & ~(lanes << low)) | (fields & lanes) << low;
            memcpy(rows + 4 * j, &x, sizeof(x));
        }
    }
    // Whole groups of 16 values, the group in which the bytes end, and the values behind it, which are most of an
    // image's and have fields of 0.
    static void put(size_t n_values, uint16_t * rows, int low, size_t nb_all, const uint8_t * bytes) {
        const size_t whole = nb_all / nb, rest = nb_all % nb;
        for (size_t i = 0; i < whole; i++) {
            uint64_t bits = 0;
            memcpy(&bits, bytes + i * nb, nb);
            unpack(bits, rows + i * AT_ONCE, low);
        }
        if (rest) {
            uint64_t bits = 0;
            memcpy(&bits, bytes + whole * nb, rest);
            unpack(bits, rows + whole * AT_ONCE, low);
        }
        for (size_t i = (whole + !!rest) * AT_ONCE; i < n_values; i += 4) {
            uint64_t x;
            memcpy(&x, rows + i, sizeof(x));
            x &= ~(lanes << low);
            memcpy(rows + i, &x, sizeof(x));
        }
    }
    static bool take(size_t n_values, const uint16_t * rows, int low, size_t nb_all, uint8_t * bytes) {
        const size_t whole = nb_all / nb, rest = nb_all % nb;
        for (size_t i = 0; i < whole; i++) {
            const uint64_t bits = pack(rows + i * AT_ONCE, low);
            memcpy(bytes + i * nb, &bits, nb);
        }
        if (rest) {
            const uint64_t bits = pack(rows + whole * AT_ONCE, low);
            if (bits >> 8 * rest) { return false; }
            memcpy(bytes + whole * nb, &bits, rest);
        }
        uint64_t others = 0;
        for (size_t i = (whole + !!rest) * AT_ONCE; i < n_values; i += 4) {
            uint64_t x;
            memcpy(&x, rows + i, sizeof(x));
            others |= x;
        }
        return !(others >> low & lanes);
    }
};

} // namespace

void kvq_image_put(size_t n_values, uint16_t * rows, int low, size_t nb, const void * bytes) {
    const int w = kvq_image_width(n_values, nb);
    const uint8_t * p = (const uint8_t *) bytes;
    switch (n_values % AT_ONCE ? 0 : w) {
    case 1: bit_fields<1>::put(n_values, rows, low, nb, p); return;
    case 2: bit_fields<2>::put(n_values, rows, low, nb, p); return;
    case 3: bit_fields<3>::put(n_values, rows, low, nb, p); return;
    case 4: bit_fields<4>::put(n_values, rows, low, nb, p); return;
    default: break;
    }
    for (size_t i = 0; i < n_values; i++) {
        for (int j = 0; j < w; j++) {
            const size_t bit = i * w + j;
            const int v = bit < 8 * nb ? p[bit / 8] >> bit % 8 & 1 : 0;
            rows[i] = (uint16_t) ((rows[i] & ~(1 << (low + j))) | v << (low + j));
        }
    }
}

bool kvq_image_take(size_t n_values, const uint16_t * rows, int low, size_t nb, void * bytes) {
    const int w = kvq_image_width(n_values, nb);
    uint8_t * p = (uint8_t *) bytes;
    switch (n_values % AT_ONCE ? 0 : w) {
    case 1: return bit_fields<1>::take(n_values, rows, low, nb, p);
    case 2: return bit_fields<2>::take(n_values, rows, low, nb, p);
    case 3: return bit_fields<3>::take(n_values, rows, low, nb, p);
    case 4: return bit_fields<4>::take(n_values, rows, low, nb, p);
    default: break;
    }
    if (nb) { memset(bytes, 0, nb); }
    for (size_t i = 0; i < n_values; i++) {
        for (int j = 0; j < w; j++) {
            const size_t bit = i * w + j;
            const int v = rows[i] >> (low + j) & 1;
            if (bit < 8 * nb) {
                p[bit / 8] |= (uint8_t) (v << bit % 8);
            } else if (v) {
                return false;
            }
        }
    }
    return true;
}

void kvq_image_write(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows) {
    const kvq_type_traits * t = kvq_traits(c.type);
    t->decode(c, codes, params, rows);
    kvq_image_put((size_t) c.n_cells * c.head_size, rows, 0, t->nb_params(c), params);
}

bool kvq_image_read(
    const kvq_codec & c, const uint16_t * rows, const void * shared, void * codes, void * params, bool marked) {
    const kvq_type_traits * t = kvq_traits(c.type);
    const size_t nv = (size_t) c.n_cells * c.head_size, nb = t->nb_params(c);
    return kvq_image_take(nv, rows, 0, nb, params) &&
        t->match(c, rows, { kvq_image_width(nv, nb), marked }, shared, codes, params);
}

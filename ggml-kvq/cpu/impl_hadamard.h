// Rows on their way into and out of rotated lattice blocks: queries in two bytes, sums of values turned back.

namespace KVQ_NS {

template <int H> struct hadamard_signs {
    float of[16];
    constexpr hadamard_signs() : of() {
        for (int i = 0; i < 16; i++) { of[i] = i & H ? -1.0f : 1.0f; }
    }
};

// Stage H of a Hadamard transform inside 16 lanes: of two lanes H apart the lower becomes a + b, the upper a - b.
template <int H> static inline f32x16 hadamard_stage(f32x16 x) {
    static constexpr hadamard_signs<H> sign;
    return f32_add(f32_swap<H>(x), f32_mul(x, f32_load(sign.of)));
}

// As kvq_hadamard, to the bit. D: a multiple of 16, or zeros stand up to one
static void hadamard_row(int block, float norm, int D, float * x) {
    for (int i = 0; i < D; i += 16) {
        const f32x16 a = hadamard_stage<4>(hadamard_stage<2>(hadamard_stage<1>(f32_load(x + i))));
        f32_store(x + i, block >= 16 ? hadamard_stage<8>(a) : a);
    }
    for (int h = 16; h < block; h *= 2) {
        for (int i = 0; i < D; i += 2 * h) {
            for (int j = i; j < i + h; j += 16) {
                const f32x16 a = f32_load(x + j), b = f32_load(x + j + h);
                f32_store(x + j, f32_add(a, b));
                f32_store(x + j + h, f32_sub(a, b));
            }
        }
    }
    for (int i = 0; i < D; i += 16) { f32_store(x + i, f32_mul(f32_load(x + i), f32_set1(norm))); }
}

static void fold_query(const kvq_lattice_view & a, float * x, int8_t * bytes, kvq_lattice_query * q) {
    const int D = a.codec.head_size;
    hadamard_row(a.block, a.norm, D, x);
    f32x16 most = f32_set1(0.0f), sum[2] = { most, most };
    for (int i = 0; i < D; i += 16) { most = f32_absmax(most, f32_load(x + i)); }
    const float amax = f32_hmax(most);
    const f32x16 inv = f32_set1(amax > 0.0f ? KVQ_LATTICE_TOP / amax : 0.0f);
    for (int i = 0; i < D; i += 16) {
        const f32x16 y = f32_mul(f32_load(x + i), inv), high = f32_round(y);
        const f32x16 low = f32_round(f32_mul(f32_sub(y, high), f32_set1(KVQ_LATTICE_FINE)));
        sum[0] = f32_add(sum[0], high);
        sum[1] = f32_add(sum[1], low);
        int8_t both[2][16];
        i8_store(both[0], high);
        i8_store(both[1], low);
        for (int k = 0; k < imin(16, D - i); k++) {
            int8_t * to = bytes + (i + k) % a.d * a.dot_stride + (i + k) / a.d;
            to[0] = both[0][k];
            to[a.d * a.dot_stride] = both[1][k];
        }
    }
    *q = { bytes, amax / KVQ_LATTICE_TOP * a.step, { f32_sum(sum[0]), f32_sum(sum[1]) } };
}

static void unrotate(const kvq_lattice_view & a, const float * rot, float * out) {
    const int D = a.codec.head_size, stride = a.n_tiles * 16;
    float x[KVQ_MAX_HEAD];
    for (int i = D; i < pad_to(D, 16); i++) { x[i] = 0.0f; }
    for (int i = 0; i < D; i++) { x[i] = rot[i % a.d * stride + i / a.d]; }
    hadamard_row(a.block, a.norm, D, x);
    for (int i = 0; i < D; i += 16) { f32_store(out + i, f32_add(f32_load(out + i), f32_load(x + i))); }
}

} // namespace KVQ_NS

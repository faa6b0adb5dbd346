// Attention of few rows (query heads of a group times query tokens, at most 16) over long caches. A warp walks 32 cells at a time;
// codes go from global memory through registers into the right operand of m16n8k16, never through shared memory:
//
//   S = Q K^T   a thread (g = lane/4, c = lane%4) holds channels c*D/4.. of cells 4g..4g+3: 16 bytes a chunk of the code layout.
//               The order of channels within the product is free, so codes of bytes 0,2 and 1,3 of a word make the register pairs.
//               scale is folded into Q, q.zero is one more product:  q.(zero + scale*code) = q.zero + (q*scale).code
//   O = P V     the thread's 8 columns of S are cells 8c..8c+7, which is what it must supply of P and of V.
//               p.(zero + scale*code) likewise; the sums p.zero of all channel groups live in one accumulator.
#include "attend.cuh"

namespace {

__device__ __forceinline__ __half2 as_half2(uint32_t x) { return *(const __half2 *) &x; }
__device__ __forceinline__ uint32_t as_u32(const __half2 & x) { return *(const uint32_t *) &x; }
__device__ __forceinline__ uint32_t mul2(uint32_t a, uint32_t b) { return as_u32(__hmul2(as_half2(a), as_half2(b))); }
__device__ __forceinline__ uint32_t even(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); } // (a.x, b.x)
__device__ __forceinline__ uint32_t odd (uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }
__device__ __forceinline__ uint32_t word(const uint4 & x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
__device__ __forceinline__ uint4 load16(const void * p) { return __ldg((const uint4 *) p); }

// field of W bits of plane PLANE of bytes 0 and 2 of x, as two f16: 1024 + code*2^(W*PLANE) has the field in its mantissa
template <int W, int PLANE> __device__ __forceinline__ uint32_t field(uint32_t x) {
    constexpr uint32_t mask = (uint32_t) (((1 << W) - 1) << (W * PLANE)) * 0x00010001u;
    constexpr float    unit = 1.0f / (float) (1 << (W * PLANE));
    return as_u32(__hfma2(as_half2((x & mask) | 0x64006400u), __float2half2_rn(unit), __float2half2_rn(-1024.0f * unit)));
}

// codes of 4 dot indices (words of the parts, already shifted to plane PLANE): (0, 2) and (1, 3)
template <int BITS, int PLANE> __device__ __forceinline__ void fields(uint32_t x, uint32_t high, uint32_t & b0, uint32_t & b1) {
    constexpr int W = BITS == 3 ? 2 : BITS;
    b0 = field<W, PLANE % (8 / W)>(x);
    b1 = field<W, PLANE % (8 / W)>(x >> 8);
    if (BITS == 3) {
        const __half2 four = __float2half2_rn(4.0f);
        b0 = as_u32(__hfma2(as_half2(field<1, PLANE % 8>(high)),      four, as_half2(b0)));
        b1 = as_u32(__hfma2(as_half2(field<1, PLANE % 8>(high >> 8)), four, as_half2(b1)));
    }
}

// N (a multiple of 8) scales and zeros from `at` on, in pairs (0, 2) (1, 3) (4, 6) ...
template <int N> __device__ __forceinline__ void load_param(const kvq_affine_geometry & g, const uint8_t * params, int at, bool zero, uint32_t (&out)[N / 2]) {
    if (!g.scale) {
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            const uint4 x = load16(params + 2 * ((zero ? g.np : 0) + at + 8*i));
            out[4*i]     = even(x.x, x.y); out[4*i + 1] = odd(x.x, x.y);
            out[4*i + 2] = even(x.z, x.w); out[4*i + 3] = odd(x.z, x.w);
        }
    } else {
        const float2 head = __half22float2(as_half2(__ldg((const uint32_t *) params + zero)));
        const __half2 low = __float2half2_rn(head.x), step = __float2half2_rn(head.y);
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            const uint2 x = __ldg((const uint2 *) (params + 8 + (zero ? g.np : 0) + at + 8*i));
#pragma unroll
            for (int j = 0; j < 2; j++) {
                uint32_t y = j ? x.y : x.x;
                const __half2 a = __hsub2(as_half2((y & 0x00ff00ffu) | 0x64006400u), __float2half2_rn(1024.0f));
                y >>= 8;
                const __half2 b = __hsub2(as_half2((y & 0x00ff00ffu) | 0x64006400u), __float2half2_rn(1024.0f));
                out[4*i + 2*j]     = as_u32(__hfma2(a, step, low));
                out[4*i + 2*j + 1] = as_u32(__hfma2(b, step, low));
            }
        }
    }
}

template <int D> struct warp_state {
    static constexpr int U = D / 16; // units of 4 channels of a thread
    static constexpr int Q = D / 32; // groups of 32 channels
    uint32_t q[U][4];                // rows g, g+8 in channel pairs (0,2), then (1,3)
    float o[4 * Q][4], oz[4];        // o: channel 32*(i/4) + 4*column + i%4; oz: column = channel group
};

template <int D, int BITS, int S, bool HALF> __device__ __forceinline__
void score_step(const warp_state<D> & w, const uint32_t * scale, const uint4 * x, const uint4 * high, float (&s)[4][4]) {
    constexpr int W = BITS == 3 ? 2 : BITS, P = 8 / W;
    const uint32_t qs[4] = { mul2(w.q[S][0], scale[2*S]), HALF ? 0 : mul2(w.q[S][1], scale[2*S]), mul2(w.q[S][2], scale[2*S + 1]), HALF ? 0 : mul2(w.q[S][3], scale[2*S + 1]) };
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t b0, b1;
        fields<BITS, S>(word(x[S / P], j), BITS == 3 ? word(high[0], j) : 0, b0, b1);
        mma(s[j], qs, b0, b1);
    }
}

template <int D, int BITS, bool HALF> __device__ __forceinline__
void score(const kvq_affine_geometry & k, const warp_state<D> & w, const uint8_t * codes, const uint8_t * params, int t0, float (&s)[4][4]) {
    constexpr int U = D / 16, W = BITS == 3 ? 2 : BITS, P = 8 / W, N = U > P ? U / P : 1;
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    uint4 x[N], high[1] = {};
    const uint8_t * at = codes + ((t0 / 16 + g / 4) * k.n_chunks[0] + U * c / P) * 64 + g % 4 * 16;
#pragma unroll
    for (int i = 0; i < N; i++) { x[i] = load16(at + 64*i); }
    if (BITS == 3) {
        high[0] = load16(codes + k.offset[1] + ((t0 / 16 + g / 4) * k.n_chunks[1] + U * c / 8) * 64 + g % 4 * 16);
    }
    uint32_t scale[2*U], zero[2*U];
    load_param<4*U>(k, params, t0 / k.group * D + 4*U*c, false, scale);
    load_param<4*U>(k, params, t0 / k.group * D + 4*U*c, true,  zero);
    if (U < 8 && (BITS == 1 || BITS == 3)) { // two threads share a word of 8 planes
        uint4 & y = BITS == 1 ? x[0] : high[0];
        const int shift = U * c % 8;
        y.x >>= shift; y.y >>= shift; y.z >>= shift; y.w >>= shift;
    }
    float base[4] = {};
#pragma unroll
    for (int i = 0; i < U; i++) { mma(base, w.q[i], zero[2*i], zero[2*i + 1]); }
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) { s[j][e] = base[e]; }
    }
    score_step<D, BITS, 0, HALF>(w, scale, x, high, s);
    score_step<D, BITS, 1, HALF>(w, scale, x, high, s);
    score_step<D, BITS, 2, HALF>(w, scale, x, high, s);
    score_step<D, BITS, 3, HALF>(w, scale, x, high, s);
    if constexpr (U == 8) {
        score_step<D, BITS, 4, HALF>(w, scale, x, high, s);
        score_step<D, BITS, 5, HALF>(w, scale, x, high, s);
        score_step<D, BITS, 6, HALF>(w, scale, x, high, s);
        score_step<D, BITS, 7, HALF>(w, scale, x, high, s);
    }
}

template <int D> __device__ __forceinline__ void score_open(const kvq_affine_geometry & k, const warp_state<D> & w, const uint16_t * tile, int t0, float (&s)[4][4]) {
    constexpr int U = D / 16;
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint16_t * row = tile + (size_t) (t0 + 4*g + j) * k.stride + 4*U*c;
        uint4 x[U / 2];
#pragma unroll
        for (int i = 0; i < U / 2; i++) { x[i] = load16(row + 8*i); }
#pragma unroll
        for (int e = 0; e < 4; e++) { s[j][e] = 0.0f; }
#pragma unroll
        for (int i = 0; i < U; i++) {
            const uint32_t a = i % 2 ? x[i / 2].z : x[i / 2].x, b = i % 2 ? x[i / 2].w : x[i / 2].y;
            mma(s[j], w.q[i], even(a, b), odd(a, b));
        }
    }
}

template <int D, int BITS, bool HALF> __device__ __forceinline__
void accumulate(const kvq_affine_geometry & v, warp_state<D> & w, const uint8_t * codes, const uint8_t * params, int t0, const uint32_t (&p)[2][4]) {
    constexpr int W = BITS == 3 ? 2 : BITS, P = 8 / W;
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4, unit = t0 / 4 + 2*c;
    uint4 x[D / 32], high[D / 32];
#pragma unroll
    for (int q = 0; q < D / 32; q++) {
        x[q] = load16(codes + ((2*q + g / 4) * v.n_chunks[0] + unit / P) * 64 + g % 4 * 16);
        if (BITS == 3) {
            high[q] = load16(codes + v.offset[1] + ((2*q + g / 4) * v.n_chunks[1] + unit / 8) * 64 + g % 4 * 16);
        }
    }
    uint32_t z[4] = {};
    if (g * v.group < D) {
        load_param<8>(v, params, g * v.n_cells + t0 + 8*c, true, z);
    }
    mma(w.oz, p[0], z[0], z[1]);
    mma(w.oz, p[1], z[2], z[3]);
    const int shift = unit % P * W, shift1 = unit % 8;
#pragma unroll
    for (int q = 0; q < D / 32; q++) {
        uint32_t s[4];
        load_param<8>(v, params, 32*q / v.group * v.n_cells + t0 + 8*c, false, s);
        const uint32_t p0[4] = { mul2(p[0][0], s[0]), HALF ? 0 : mul2(p[0][1], s[0]), mul2(p[0][2], s[1]), HALF ? 0 : mul2(p[0][3], s[1]) };
        const uint32_t p1[4] = { mul2(p[1][0], s[2]), HALF ? 0 : mul2(p[1][1], s[2]), mul2(p[1][2], s[3]), HALF ? 0 : mul2(p[1][3], s[3]) };
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const uint32_t y = word(x[q], r) >> shift, h = BITS == 3 ? word(high[q], r) >> shift1 : 0;
            uint32_t b0, b1;
            fields<BITS, 0>(y, h, b0, b1);
            mma(w.o[4*q + r], p0, b0, b1);
            fields<BITS, 1>(y, h, b0, b1);
            mma(w.o[4*q + r], p1, b0, b1);
        }
    }
}

template <int D> __device__ __forceinline__ void accumulate_open(const kvq_affine_geometry & v, warp_state<D> & w, const uint16_t * tile, int t0, const uint32_t (&p)[2][4]) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int q = 0; q < D / 32; q++) {
            uint2 x[4];
#pragma unroll
            for (int t = 0; t < 4; t++) { x[t] = __ldg((const uint2 *) (tile + (size_t) (t0 + 8*c + 4*i + t) * v.stride + 32*q + 4*g)); }
            mma(w.o[4*q],     p[i], even(x[0].x, x[2].x), even(x[1].x, x[3].x));
            mma(w.o[4*q + 1], p[i], odd (x[0].x, x[2].x), odd (x[1].x, x[3].x));
            mma(w.o[4*q + 2], p[i], even(x[0].y, x[2].y), even(x[1].y, x[3].y));
            mma(w.o[4*q + 3], p[i], odd (x[0].y, x[2].y), odd (x[1].y, x[3].y));
        }
    }
}

template <int D, bool HALF> __global__ void __launch_bounds__(128, D == 128 ? 3 : 4) decode_kernel(const kvq_attend_args a) {
    constexpr int R = HALF ? 1 : 2; // rows of a thread
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, kvh = blockIdx.y, is = blockIdx.z;
    const int split = blockIdx.x * 4 + threadIdx.x / 32;
    if (split >= a.n_splits) {
        return;
    }
    const auto & st = a.stream[is];
    warp_state<D> w = {};
    const __half * mask[2] = { nullptr, nullptr };
    float slope[2], m[2] = { -INFINITY, -INFINITY }, l[2] = { 0.0f, 0.0f };
#pragma unroll
    for (int i = 0; i < R; i++) {
        const int r = min(g + 8*i, a.n_rows - 1), token = row_token(a, r), head = row_head(a, kvh, r);
        slope[i] = alibi_slope(a, head);
        mask [i] = st.mask ? st.mask + token * a.mask_stride_token + head * a.mask_stride_head : nullptr;
        const float * p = st.q + token * a.q_stride_token + head * a.q_stride_head + D / 4 * c;
#pragma unroll
        for (int u = 0; u < D / 16; u++) {
            const float4 x = *(const float4 *) (p + 4*u);
            w.q[u][i]     = pack_half2(x.x * a.scale, x.z * a.scale);
            w.q[u][2 + i] = pack_half2(x.y * a.scale, x.w * a.scale);
        }
    }
    const int per_page = a.page_cells / 32, n_units = a.n_pages * per_page;
    const int unit0 = (int) ((int64_t) n_units * split / a.n_splits), unit1 = (int) ((int64_t) n_units * (split + 1) / a.n_splits);
    for (int unit = unit0; unit < unit1; unit++) {
        const kvq_page & page = st.pages[unit / per_page];
        const int t0 = unit % per_page * 32, cell0 = page.cell + t0 + 8*c;
        const int32_t * map = page.map;
        if (!page.n_slots) {
            continue;
        }
        // mask of this thread's cells 8c..8c+7
        uint4 mk[2] = {};
        bool seen = false;
        if (!map && page.cell + t0 + 32 <= a.n_kv) {
#pragma unroll
            for (int i = 0; i < R; i++) {
                if (mask[i]) { mk[i] = load16(mask[i] + cell0); }
                seen |= mk[i].x != 0xfc00fc00u || mk[i].y != 0xfc00fc00u || mk[i].z != 0xfc00fc00u || mk[i].w != 0xfc00fc00u;
            }
        } else {
#pragma unroll
            for (int i = 0; i < R; i++) {
                uint32_t y[4];
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const int cell = map ? map[t0 + 8*c + j] : cell0 + j;
                    const uint32_t h = cell < 0 || cell >= a.n_kv ? 0xfc00 : mask[i] ? __half_as_ushort(mask[i][cell]) : 0;
                    y[j / 2] = j % 2 ? y[j / 2] | h << 16 : h;
                    seen |= h != 0xfc00;
                }
                mk[i] = make_uint4(y[0], y[1], y[2], y[3]);
            }
        }
        if (!__any_sync(~0u, seen)) {
            continue;
        }
        float s[4][4];
        const uint8_t * codes = (const uint8_t *) page.k_codes, * params = (const uint8_t *) page.k_params;
        if (!params) {
            score_open<D>(a.k, w, (const uint16_t *) codes + (size_t) kvh * a.k.n_cells * a.k.stride, t0, s);
        } else {
            codes  += (size_t) kvh * a.k.nb_codes;
            params += (size_t) kvh * a.k.nb_params;
            switch (a.k.bits) {
                case 1:  score<D, 1, HALF>(a.k, w, codes, params, t0, s); break;
                case 2:  score<D, 2, HALF>(a.k, w, codes, params, t0, s); break;
                case 3:  score<D, 3, HALF>(a.k, w, codes, params, t0, s); break;
                default: score<D, 4, HALF>(a.k, w, codes, params, t0, s); break;
            }
        }
        uint32_t p[2][4] = {};
#pragma unroll
        for (int i = 0; i < R; i++) { // cell 8c + 4e + j is s[j][2i + e]
            float top = -INFINITY;
#pragma unroll
            for (int e = 0; e < 2; e++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float2 mm = __half22float2(as_half2(word(mk[i], 2*e + j / 2)));
                    float & x = s[j][2*i + e];
                    if (a.softcap != 0.0f) {
                        x = a.softcap * tanhf(x / a.softcap);
                    }
                    x += slope[i] * (j % 2 ? mm.y : mm.x);
                    top = fmaxf(top, x);
                }
            }
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            if (top > m[i]) {
                const float f = __expf(m[i] - top); // 0 the first time
                m[i] = top;
                l[i] *= f;
#pragma unroll
                for (int n = 0; n < D / 8; n++) { w.o[n][2*i] *= f; w.o[n][2*i + 1] *= f; }
                w.oz[2*i] *= f; w.oz[2*i + 1] *= f;
            }
            const float base = m[i] == -INFINITY ? 0.0f : m[i];
#pragma unroll
            for (int e = 0; e < 2; e++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    s[j][2*i + e] = __expf(s[j][2*i + e] - base);
                    l[i] += s[j][2*i + e];
                }
                p[e][i]     = pack_half2(s[0][2*i + e], s[2][2*i + e]);
                p[e][2 + i] = pack_half2(s[1][2*i + e], s[3][2*i + e]);
            }
        }
        codes  = (const uint8_t *) page.v_codes;
        params = (const uint8_t *) page.v_params;
        if (!params) {
            accumulate_open<D>(a.v, w, (const uint16_t *) codes + (size_t) kvh * a.v.n_cells * a.v.stride, t0, p);
        } else {
            codes  += (size_t) kvh * a.v.nb_codes;
            params += (size_t) kvh * a.v.nb_params;
            switch (a.v.bits) {
                case 1:  accumulate<D, 1, HALF>(a.v, w, codes, params, t0, p); break;
                case 2:  accumulate<D, 2, HALF>(a.v, w, codes, params, t0, p); break;
                case 3:  accumulate<D, 3, HALF>(a.v, w, codes, params, t0, p); break;
                default: accumulate<D, 4, HALF>(a.v, w, codes, params, t0, p); break;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
        const int row = g + 8*i;
        l[i] += __shfl_xor_sync(~0u, l[i], 1);
        l[i] += __shfl_xor_sync(~0u, l[i], 2);
        float * out = a.partial + partial_at(a, is, kvh, min(row, a.n_rows - 1), split);
#pragma unroll
        for (int q = 0; q < D / 32; q++) {
            const int group = a.v.group > 0 ? 32*q / a.v.group : 0;
            const float z0 = __shfl_sync(~0u, w.oz[2*i], (lane & ~3) + group / 2), z1 = __shfl_sync(~0u, w.oz[2*i + 1], (lane & ~3) + group / 2);
            const float z = group % 2 ? z1 : z0;
#pragma unroll
            for (int e = 0; e < 2 && row < a.n_rows; e++) {
                const float (*o)[4] = &w.o[4*q];
                *(float4 *) (out + 32*q + 8*c + 4*e) = make_float4(o[0][2*i + e] + z, o[1][2*i + e] + z, o[2][2*i + e] + z, o[3][2*i + e] + z);
            }
        }
        if (c == 0 && row < a.n_rows) {
            out[D]     = m[i];
            out[D + 1] = l[i];
        }
    }
}

bool fits(const kvq_affine_geometry & g, bool value) {
    return g.np == 0 || (g.bits >= 1 && g.bits <= 4 && (!value || g.group % 32 == 0)); // np 0: f16
}

} // namespace

bool kvq_decode_fits(const kvq_attend_args & a, int n_streams) {
    bool aligned = a.mask_stride_token % 8 == 0 && a.mask_stride_head % 8 == 0 && a.q_stride_token % 4 == 0 && a.q_stride_head % 4 == 0;
    for (int i = 0; i < n_streams; i++) {
        aligned = aligned && (uintptr_t) a.stream[i].mask % 16 == 0 && (uintptr_t) a.stream[i].q % 16 == 0;
    }
    return aligned && a.n_rows <= 16 && a.k.head_size == a.v.head_size && (a.k.head_size == 64 || a.k.head_size == 128) && fits(a.k, false) && fits(a.v, true);
}

void kvq_launch_decode_attention(const kvq_attend_args & a, int n_streams, cudaStream_t stream) {
    const dim3 grid((a.n_splits + 3) / 4, a.n_head_kv, n_streams);
    if (a.k.head_size == 128) {
        if (a.n_rows <= 8) { decode_kernel<128, true><<<grid, 128, 0, stream>>>(a); } else { decode_kernel<128, false><<<grid, 128, 0, stream>>>(a); }
    } else {
        if (a.n_rows <= 8) { decode_kernel<64, true><<<grid, 128, 0, stream>>>(a); } else { decode_kernel<64, false><<<grid, 128, 0, stream>>>(a); }
    }
}

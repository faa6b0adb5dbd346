// Decode attention over mixed pages: what a warp brings into shared memory, and the products of values
// (attend_mixed.cuh).
#pragma once

#include "decode_products.cuh"

#include <type_traits>

namespace {

constexpr int MIXED_BOOST = 4; // weights of V planes: 2^(4 - W*plane)

template <int D, int B> constexpr int mixed_code_bytes() { return stage_map<D, B, B>::K_PARAMS; }

// A stage: codes, then as they lie in the page (32-bit words)
//   K      part's ranges and parameters, set           V      set, c, part's ranges, parameters of these cells
struct mixed_words {
    int k_params, set, channels, v_head, v_pairs;
};

template <int D> __host__ __device__ __forceinline__ mixed_words mixed_words_of(const kvq_attend_args & a) {
    const int v = a.vm.part[a.vm.part[0].n_cells == 0].scale;
    mixed_words w;
    w.k_params = a.km.part[a.km.part[0].n_cells == 0].scale ? 2 + D / 2 : D;
    w.set = a.page_cells / 32;
    w.channels = D / 4;
    w.v_head = v ? 2 : 0;
    w.v_pairs = (v == 0 ? 64 : v == 1 ? 32 : 16); // of 64 cells
    return w;
}

// pages of a step, of the next and of the one after it: three blocks are just as many as a multiprocessor of sm_90
// holds
constexpr int RING = 3;

// What a warp has besides its stages: parameters of keys in f16 (and ratios of c before that), (scale, zero) of
// values, slots, pages. Values' stay f32: with 4-bit parameters many cells have the same ones, and their errors
// would not average out.
template <int D> struct mixed_tables {
    uint8_t k_params[4 * D];
    float2 pairs[DECODE_CELLS];
    uint8_t slots[DECODE_CELLS];
    kvq_page ring[RING];
};

// of one KV head; t: first cell in part i
struct mixed_part {
    const uint8_t *k_codes, *v_codes, *k_block, *v_block;
    int i, t;
};

template <int D, int W, int J, typename X>
__device__ __forceinline__ void copy_mixed_keys(const X & of, uint32_t to, const uint8_t * from, int t, int n_chunks) {
    constexpr int N = D * W / 32 * 4; // pieces of a tile
    const int step = X::WIDE ? n_chunks * 4 : N, left = step - of.i * N;
    from += (t / 16 * step + of.i * N) * 16;
#pragma unroll
    for (int k = 0; k < (J * N + 31) / 32; k++) {
        const int at = threadIdx.x % 32 + 32 * k, tile = at / N;
        if ((J * N % 32 == 0 || at < J * N) && (!X::WIDE || at % N < left)) {
            copy16(to + (tile * N + (at % N ^ tile)) * 16, from + (X::WIDE ? tile * step + at % N : at) * 16);
        }
    }
}

template <int D, int W, int J, typename X>
__device__ __forceinline__ void copy_mixed_values(
    const X & of, uint32_t to, const uint8_t * from, int t, int n_chunks, int n_tiles) {
    constexpr int N = J * W / 2 * 4, PLACES = 2 * W * 4; // pieces of a tile, here and in the stage
    const int first = of.i * (D / 16);
    from += (first * n_chunks + t / 32 * W) * 64;
#pragma unroll
    for (int k = 0; k < (D / 16 * N + 31) / 32; k++) {
        const int at = threadIdx.x % 32 + 32 * k, tile = at / N, chunk = at % N / 4;
        if ((D / 16 * N % 32 == 0 || at < D / 16 * N) && (!X::WIDE || first + tile < n_tiles)) {
            copy16(to + tile * PLACES * 16 + chunk / 2 * 128 + ((chunk % 2 * 4 + at % 4) ^ 2 * (chunk / 2 % 4)) * 16,
                from + (tile * n_chunks + chunk) * 64 + at % 4 * 16);
        }
    }
}

template <int D, int B, int J, typename X>
__device__ __forceinline__ void copy_mixed(const kvq_attend_args & a, const X & of, uint32_t to, const mixed_part & p) {
    using map = stage_map<D, B, B>;
    const kvq_affine_geometry &k = a.km.part[p.i], &v = a.vm.part[p.i];
    copy_mixed_keys<D, map::WK, J>(of, to + map::K, p.k_codes, p.t, k.n_chunks[0]);
    copy_mixed_values<D, map::WV, J>(of, to + map::V, p.v_codes, p.t, v.n_chunks[0], v.n_tiles);
    if (cut<B>::high) {
        copy_mixed_keys<D, 1, J>(of, to + map::K_HIGH, p.k_codes + k.offset[1], p.t, k.n_chunks[1]);
        copy_mixed_values<D, 1, J>(of, to + map::V_HIGH, p.v_codes + v.offset[1], p.t, v.n_chunks[1], v.n_tiles);
    }
}

// where a slice's word i of keys' parameters or of c lies; NULL: beyond the head
template <int D, typename X>
__device__ __forceinline__ const uint8_t * wide_word(
    const kvq_attend_args & a, const X & of, const uint8_t * block, int i, int head, int per_word) {
    if (i < head) { return block + 4 * i; }
    // arrays of channels
    const int words = D / per_word, array = (i - head) / words, channel = (i - head) % words * per_word;
    return of.has(channel) ? block + 4 * head + (array * a.k.head_size + of.first() + channel) * (4 / per_word)
                           : nullptr;
}

// parameters of n cells of a part
template <int D, typename X>
__device__ __forceinline__ void copy_mixed_params(
    const kvq_attend_args & a, const X & of, uint32_t to, const mixed_part & p, int n) {
    const mixed_words w = mixed_words_of<D>(a);
    const kvq_affine_geometry & v = a.vm.part[p.i];
    const int per = v.scale ? n / 4 : n / 2, arrays = v.scale == 2 ? 1 : 2, set_k = w.k_params, v0 = set_k + w.set,
              head = v0 + w.set + w.channels, pairs = head + w.v_head, end = pairs + per * arrays;
    const uint8_t *vp = p.v_block + a.vm.params[p.i], *first = vp + 4 * w.v_head + p.t * (v.scale ? 1 : 2);
    const int next = v.n_cells * (v.scale ? 1 : 2); // from scales to zeros
#pragma unroll 2
    for (int i = threadIdx.x % 32; i < end; i += 32) {
        const uint8_t * from = i < set_k ? p.k_block + a.km.params[p.i] + 4 * i
            : i < v0                     ? p.k_block + 4 * (i - set_k)
            : i < head                   ? p.v_block + 4 * (i - v0)
            : i < pairs                  ? vp + 4 * (i - head)
                                         : first + (i - pairs) / per * next + (i - pairs) % per * 4;
        if constexpr (X::WIDE) {
            const bool bytes = a.km.part[p.i].scale;
            if (i < set_k) {
                from = wide_word<D>(a, of, p.k_block + a.km.params[p.i], i, bytes ? 2 : 0, bytes ? 4 : 2);
            } else if (i >= v0 && i < head) {
                from = wide_word<D>(a, of, p.v_block, i - v0, w.set, 4);
            }
            if (!from) { continue; }
        }
        copy4(to + 4 * i, from);
    }
}

// cells 2*lane, 2*lane + 1 of n: (scale, zero)
__device__ __forceinline__ void put_mixed_pairs(
    const uint8_t * head, const uint8_t * raw, int format, int n, float2 * to) {
    const int lane = threadIdx.x % 32;
    if (2 * lane >= n) { return; }
    float2 s, z;
    if (format == 0) {
        s = __half22float2(as_half2(*(const uint32_t *) (raw + 4 * lane)));
        z = __half22float2(as_half2(*(const uint32_t *) (raw + 2 * n + 4 * lane)));
    } else {
        const float2 rs = __half22float2(as_half2(*(const uint32_t *) head)),
                     rz = __half22float2(as_half2(*(const uint32_t *) (head + 4)));
        const uint32_t x = *(const uint16_t *) (raw + 2 * lane),
                       y = format == 1 ? *(const uint16_t *) (raw + n + 2 * lane) : x >> 4,
                       mask = format == 1 ? 255 : 15;
        s = make_float2(fmaf(rs.y, (float) (x & mask), rs.x), fmaf(rs.y, (float) (x >> 8 & mask), rs.x));
        z = make_float2(fmaf(rz.y, (float) (y & mask), rz.x), fmaf(rz.y, (float) (y >> 8 & mask), rz.x));
    }
    *(float4 *) (to + 2 * lane) = make_float4(s.x, z.x, s.y, z.y);
}

// Slots of cells [t, t + n) of a part, by their rank in the set. False: keys and values have different sets, or one
// of a wrong size.
__device__ __forceinline__ bool put_mixed_slots(const kvq_attend_args & a, const uint32_t * k_set,
    const uint32_t * v_set, int part, int t, int n, uint8_t * slots) {
    const int lane = threadIdx.x % 32;
    int before = 0;
    bool wrong = false;
#pragma unroll 1
    for (int w = 0; w < a.page_cells / 32; w++) {
        const uint32_t x = k_set[w], in = part ? ~x : x;
        wrong = wrong || x != v_set[w];
        const int rank = before + __popc(in & ((1u << lane) - 1)) - t;
        if (in >> lane & 1 && rank >= 0 && rank < n) { slots[rank] = (uint8_t) (32 * w + lane); }
        before += __popc(in);
    }
    return !wrong && before == a.km.part[part].n_cells;
}

// p: probabilities times scales and the weights of their planes, of step j, cells (0, 2) and (1, 3)
template <int D, int B, int J>
__device__ __forceinline__ void accumulate_mixed(
    const uint8_t * stage, const uint32_t (&p)[J][2], float (&o)[D / 16][4]) {
    using map = stage_map<D, B, B>;
    constexpr int W = cut<B>::W, P = cut<B>::P, N = J > P ? J / P : 1; // N: words of a channel that a thread needs
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, chunk = J * c / P, high = J * c / 8; // the first
    const uint8_t *words = stage + map::V + g / 4 * (2 * W * 64) + chunk / 2 * 128,
                  *words1 = stage + map::V_HIGH + g / 4 * 128;
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        uint4 x[N], h = {};
#pragma unroll
        for (int n = 0; n < N; n++) {
            x[n] = *(
                const uint4 *) (words + i * (4 * W * 64) + (((chunk + n) % 2 * 4 + g % 4) ^ 2 * (chunk / 2 % 4)) * 16);
        }
        if (cut<B>::high) { h = *(const uint4 *) (words1 + i * 256 + (high * 4 + g % 4) * 16); }
#pragma unroll
        for (int r = 0; r < 4; r += 2) { // channels 32i + 4g + r, + r + 1
            const uint32_t hx = rotate(word(h, r), J * c % 8), hy = rotate(word(h, r + 1), J * c % 8);
#pragma unroll
            for (int j = 0; j < J; j++) {
                uint32_t y0 = word(x[j / P % N], r), y1 = word(x[j / P % N], r + 1);
                if (J < P) { // threads share a word
                    y0 = rotate(y0, J * c % P * W);
                    y1 = rotate(y1, J * c % P * W);
                }
                const uint32_t f[4] = { fields<B>(y0, hx, j % P, false), fields<B>(y1, hy, j % P, false),
                    fields<B>(y0, hx, j % P, true), fields<B>(y1, hy, j % P, true) };
                mma(o[2 * i + r / 2], f, p[j][0], p[j][1]);
            }
        }
    }
}

// 32 cells of a mixed block from slot t0 on, as rows of D, by one warp
template <int D, typename X>
__device__ __noinline__ void decode_cells(
    const X of, const kvq_mixed_geometry & m, const uint8_t * codes, const uint8_t * params, int t0, uint16_t * to) {
    __syncwarp();
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int t = 0; t < 32; t++) {
        const int place = mixed_place(params, t0 + t);
        if (lane < D / 4 && of.has(4 * lane)) {
            *(uint2 *) (to + t * D + 4 * lane) =
                mixed_halves(mixed_values(m, codes, params, place, of.first() + 4 * lane));
        }
    }
    __syncwarp();
}

template <int N> using int_of = std::integral_constant<int, N>;

} // namespace

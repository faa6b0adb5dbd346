// Attention of few rows over long caches of mixed pages (types/mixed.h), in the manner of attend_decode.cuh: a warp
// walks over 64 cells at a time, of one part of a page, whose codes and parameters were asked for while it worked
// on those before. A last 32 cells of a part take half as many products. What differs from pages of one width:
//
//   - Cells of a part lie anywhere in the page. Sums do not mind the order; masks do: slots of the cells are found by
//   rank in the page's set.
//   - A thread's channels of S depend on the bits, so queries are read from shared memory instead of being held.
//   - A value is  c[channel] * (zero[cell] + scale[cell] * code),  c of the page. O is kept in units of one page's c
//   and brought to the next
//     one's by their ratios; zeros are summed apart, per row:  O = c * (sum of p*zero + sum of (p*scale) * code).
//     Scales go into probabilities in f32, before these become f16.
//
// A page that was partly restored may have one lane open, or two sets: it is decoded cell by cell into shared
// memory, then read as open pages are, 32 cells at a time.
#pragma once

#include "decode_merge.cuh"
#include "decode_products.cuh"

#include <algorithm>
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

// HI, LO: bits of the parts; 0: any, as the arguments say
template <int D, int HI, int LO, bool WIDE>
__global__ void __launch_bounds__(32 * most_warps<WIDE, false>(), WIDE ? 1 : 3)
    mixed_kernel(const __grid_constant__ kvq_attend_args a) {
    constexpr int S = D / 16;
    const slice_of<D, WIDE> of(a, threadIdx.x / 32);
    // of queries in shared memory: four channels as two pairs, one row after another
    const int Q_STEP = of.n * (D / 4) + 1;
    constexpr float FROM_K = (float) (1 << (24 - K_BOOST)), FROM_V = (float) (1 << (24 - MIXED_BOOST));
    early_start();
    extern __shared__ __align__(16) uint8_t memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4, is = blockIdx.z;
    const int kvh = blockIdx.y % a.n_head_kv, row0 = blockIdx.y / a.n_head_kv * DECODE_COLUMNS;
    const auto & st = a.stream[is];

    uint8_t * const stages = memory + warp * (2 * a.stage_bytes + (int) sizeof(mixed_tables<D>));
    mixed_tables<D> & own = *(mixed_tables<D> *) (stages + 2 * a.stage_bytes);
    uint8_t * const shared_sums = memory + of.warps * (2 * a.stage_bytes + (int) sizeof(mixed_tables<D>)); // of teams
    int sums_turn = 0;
    uint2 * const queries = (uint2 *) (shared_sums + (WIDE && of.n > 1 ? of.warps * TEAM_BYTES : 0));
    if (!of.has(D - 1)) { // parameters of channels beyond the head meet queries of 0: they must be numbers
        for (int i = lane; i < 2 * a.stage_bytes / 16; i += 32) { ((uint4 *) stages)[i] = make_uint4(0, 0, 0, 0); }
        __syncwarp();
    }
    const uint32_t stages_at = (uint32_t) __cvta_generic_to_shared(stages),
                   ring_at = (uint32_t) __cvta_generic_to_shared(own.ring);
    const mixed_words w = mixed_words_of<D>(a);
    const int n_units = a.n_pages * a.page_steps, split = blockIdx.x * of.teams + of.team,
              n_splits = a.n_splits * of.teams;
    const int unit0 = (int) ((int64_t) n_units * split / n_splits),
              unit1 = (int) ((int64_t) n_units * (split + 1) / n_splits);

    const auto copy_page = [&](int unit) {
        if (lane < 3) {
            copy16(ring_at + unit % RING * (int) sizeof(kvq_page) + lane * 16,
                (const char *) &st.pages[min(unit / a.page_steps, a.n_pages - 1)] + lane * 16);
        }
    };
    const auto state_of = [&](int unit) { // -1 nothing, +1 codes of K, +2 codes of V
        const kvq_page & p = own.ring[unit % RING];
        return !p.n_slots ? -1 : (p.k_params ? 1 : 0) + (p.v_params ? 2 : 0);
    };
    const auto part_of = [&](int unit) {
        const kvq_page & p = own.ring[unit % RING];
        const int k = unit % a.page_steps;
        mixed_part x;
        x.i = k >= a.hi_steps;
        x.t = 64 * (x.i ? k - a.hi_steps : k);
        x.k_block = (const uint8_t *) p.k_params + (size_t) kvh * a.km.nb_params;
        x.v_block = (const uint8_t *) p.v_params + (size_t) kvh * a.vm.nb_params;
        x.k_codes = (const uint8_t *) p.k_codes + (size_t) kvh * a.km.nb_codes + a.km.codes[x.i];
        x.v_codes = (const uint8_t *) p.v_codes + (size_t) kvh * a.vm.nb_codes + a.vm.codes[x.i];
        return x;
    };
    // f(bits, steps of 16 cells) with both as constants
    const auto with_width = [&](int part, bool whole, auto f) {
        const auto of = [&](auto bits) {
            if (whole) {
                f(bits, int_of<4>());
            } else {
                f(bits, int_of<2>());
            }
        };
        if constexpr (HI != 0) {
            if (part == 0) {
                of(int_of<HI>());
            } else {
                of(int_of<LO>());
            }
        } else {
            switch (a.km.part[part].bits) {
            case 1: of(int_of<1>()); break;
            case 2: of(int_of<2>()); break;
            case 3: of(int_of<3>()); break;
            default: of(int_of<4>()); break;
            }
        }
    };
    const auto ask = [&](int unit) {
        const mixed_part x = part_of(unit);
        const bool whole = a.km.part[x.i].n_cells - x.t >= 64;
        const uint32_t to = stages_at + unit % 2 * a.stage_bytes;
        with_width(x.i, whole,
            [&](auto bits, auto steps) { copy_mixed<D, decltype(bits)::value, decltype(steps)::value>(a, of, to, x); });
        copy_mixed_params<D>(a, of, to + a.stage_raw_k, x, whole ? 64 : 32);
    };
    if (unit0 < unit1) { copy_page(unit0); }

    const __half * mask[2];
    float slope[2];
#pragma unroll
    for (int e = 0; e < 2; e++) { // columns 2c + e
        const int row = min(row0 + 2 * c + e, a.n_rows - 1), token = row_token(a, row), head = row_head(a, kvh, row);
        slope[e] = alibi_slope(a, head) * LOG2E;
        mask[e] = st.mask ? st.mask + token * a.mask_stride_token + head * a.mask_stride_head : nullptr;
    }
    const bool one_mask = a.n_q == 1 && a.mask_stride_head == 0;

    // z: sums of p*zero
    float o[S][4] = {}, m[2] = { -INFINITY, -INFINITY }, l[2] = { 0.0f, 0.0f }, z[2] = { 0.0f, 0.0f };
    bool of_codes = false; // o in units of codes and c: the channels 4*lane.. of c in `channels`
    uint32_t channels = 0;
    int page_now = -1; // whose c that is

    const auto unit_of = [&](uint32_t four, int i) {
        return __half2float(__ushort_as_half((uint16_t) ((four >> 8 * i & 255) << 7))) * FROM_V;
    };
    // o to units of another page's c, or to plain
    const auto change_units = [&](bool codes, uint32_t four) {
        if (!of_codes && !codes) { return; }
        if (lane < D / 4) {
            float r[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                r[i] = __fdividef(of_codes ? unit_of(channels, i) : 1.0f, codes ? unit_of(four, i) : 1.0f);
            }
            ((float4 *) own.k_params)[lane] = make_float4(r[0], r[1], r[2], r[3]);
        }
        __syncwarp();
#pragma unroll
        for (int e = 0; e < 2; e++) {
#pragma unroll
            for (int d = 4; d <= 16; d *= 2) { z[e] += __shfl_xor_sync(~0u, z[e], d); }
            z[e] *= 1.0f / FROM_V;
        }
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            const float4 r = ((const float4 *) own.k_params)[8 * i + g];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                o[2 * i][e] = (o[2 * i][e] + z[e]) * r.x;
                o[2 * i][2 + e] = (o[2 * i][2 + e] + z[e]) * r.y;
                o[2 * i + 1][e] = (o[2 * i + 1][e] + z[e]) * r.z;
                o[2 * i + 1][2 + e] = (o[2 * i + 1][2 + e] + z[e]) * r.w;
            }
        }
        z[0] = z[1] = 0.0f;
        of_codes = codes;
        channels = four;
        __syncwarp();
    };
    // Attention over 16 * J cells whose slots are in own.slots. B 16: rows of keys, then values() and rows of values.
    const auto attend = [&](auto bits, auto steps, const kvq_page & page, const uint8_t * stage,
                            const uint8_t * k_params, const uint16_t * k_rows, int k_stride, auto values) {
        constexpr int B = decltype(bits)::value, J = decltype(steps)::value, W = cut<B>::W, P = cut<B>::P;
        const int cell0 = 4 * J * (g / 2) + g % 2 * 2; // of this thread, 4j + {0, 1} from there on
        uint32_t mk[2][J];
#pragma unroll
        for (int j = 0; j < J; j++) {
            mk[0][j] = mk[1][j] = 0;
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const int slot = own.slots[cell0 + 4 * j + b],
                          cell = page.map ? page.map[kvh * a.map_stride + slot] : page.cell + slot;
                const bool in = cell >= 0 && cell < a.n_kv;
                uint32_t h = !in ? 0xfc00 : mask[0] ? __half_as_ushort(mask[0][cell]) : 0;
                mk[0][j] |= h << 16 * b;
                if (!one_mask) { h = !in ? 0xfc00 : mask[1] ? __half_as_ushort(mask[1][cell]) : 0; }
                mk[1][j] |= h << 16 * b;
            }
        }
        uint32_t q[S][2]; // of column g
#pragma unroll
        for (int t = 0; t < S; t++) {
            const uint2 x = queries[g * Q_STEP + (of.first() + channel_of<D, B>(c, t)) / 4];
            q[t][0] = x.x;
            q[t][1] = x.y;
        }
        float s[J][4], base[4] = {};
        if constexpr (B == 16) {
            score_open<D, B, true, J>(of, q, k_rows + (size_t) cell0 * k_stride, k_stride, s);
        } else {
            score<D, B, B, J>(a, q, stage, k_params, s, base);
            scale_scores(FROM_K, base, s);
        }
        if constexpr (WIDE) { team_sum(of, shared_sums, sums_turn, s); }
        cap_scores(a, s);
        float top[2] = { -INFINITY, -INFINITY }, f[2];
        if (!mask_scores(mk, slope, s, top)) { return; }
        if (raise_maxima(top, m, o, f)) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                l[e] *= f[e];
                z[e] *= f[e];
            }
        }
        uint32_t p[J][2];
#pragma unroll
        for (int j = 0; j < J; j++) {
            float4 pair = make_float4(1.0f, 0.0f, 1.0f, 0.0f);
            if constexpr (B != 16) { pair = *(const float4 *) &own.pairs[cell0 + 4 * j]; }
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const float scale = (b ? pair.z : pair.x) * (B == 16 ? 1.0f : exp2_of(MIXED_BOOST - W * (j % P))),
                            zero = b ? pair.w : pair.y;
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float x = exp2_fast(s[j][2 * b + e] - (m[e] == -INFINITY ? 0.0f : m[e]));
                    l[e] += x;
                    z[e] = B == 16 ? z[e] : fmaf(x, zero, z[e]);
                    s[j][2 * b + e] = B == 16 ? x : x * scale;
                }
                p[j][b] = transpose(pack_half2(s[j][2 * b], s[j][2 * b + 1]));
            }
        }
        if constexpr (B == 16) {
            int stride;
            const uint16_t * rows = values(stride);
            accumulate_open<D, B, true, J>(of, rows + (size_t) (4 * J * c) * stride, stride, p, o);
        } else {
            accumulate_mixed<D, B, J>(stage, p, o);
        }
    };

    int state = -1, next = -1;
    for (int unit = unit0 - 1; unit < unit1; unit++) {
        copies_done();
        state = next;
        if (unit + 1 < unit1) { // what is sealed of it, ahead of its turn; and the page of the one after it
            next = state_of(unit + 1);
            if (next == 3) { ask(unit + 1); }
            copy_page(unit + 2);
        }
        // sealed pages are older than the kernel before this one and were asked for without waiting for it
        if (unit < unit0) {
            early_wait();
            const float f = a.scale * LOG2E;
            const int quads = of.n * (D / 4); // of a row
            for (int i = threadIdx.x; i < DECODE_COLUMNS * quads; i += 32 * of.warps) {
                const int row = min(row0 + i / quads, a.n_rows - 1), channel = i % quads * 4;
                const float * p =
                    st.q + row_token(a, row) * a.q_stride_token + row_head(a, kvh, row) * a.q_stride_head + channel;
                const float4 x =
                    !WIDE || channel < a.k.head_size ? *(const float4 *) p : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                queries[i / quads * Q_STEP + i % quads] =
                    make_uint2(pack_half2(x.x * f, x.z * f), pack_half2(x.y * f, x.w * f));
            }
            __syncthreads();
            continue;
        }
        if (state < 0) { continue; }
        uint8_t * const stage = stages + unit % 2 * a.stage_bytes;
        const kvq_page & page = own.ring[unit % RING];
        const mixed_part x = part_of(unit);
        if (state == 3) {
            const uint32_t *raw = (const uint32_t *) (stage + a.stage_raw_k), *k_set = raw + w.k_params,
                           *v_set = k_set + w.set, *v_head = v_set + w.set + w.channels;
            const kvq_affine_geometry &k = a.km.part[x.i], &v = a.vm.part[x.i];
            const bool whole = k.n_cells - x.t >= 64;
            if (put_mixed_slots(a, k_set, v_set, x.i, x.t, whole ? 64 : 32, own.slots)) {
                const int ip = unit / a.page_steps;
                if (ip != page_now || !of_codes) { change_units(true, lane < D / 4 ? v_set[w.set + lane] : 0); }
                page_now = ip;
                put_mixed_pairs((const uint8_t *) v_head, (const uint8_t *) (v_head + w.v_head), v.scale,
                    whole ? 64 : 32, own.pairs);
                const uint8_t * k_params = (const uint8_t *) raw;
                if (k.scale) {
                    if (lane < D / 4) { widen(k_params + 8, lane, k_params + (lane < D / 8 ? 0 : 4), own.k_params); }
                    k_params = own.k_params;
                }
                __syncwarp();
                with_width(x.i, whole,
                    [&](auto bits, auto steps) { attend(bits, steps, page, stage, k_params, nullptr, 0, 0); });
                continue;
            }
            __syncwarp();
        }
        change_units(false, 0);
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            const int t = 64 * (unit % a.page_steps) + 32 * half;
            if (t >= a.page_cells) { break; }
            __syncwarp();
            own.slots[lane] = (uint8_t) (t + lane);
            const uint16_t * rows =
                (const uint16_t *) page.k_codes + ((size_t) kvh * a.k.n_cells + t) * a.k.stride + of.first();
            int stride = a.k.stride;
            if (state & 1) {
                decode_cells<D>(of, a.km, (const uint8_t *) page.k_codes + (size_t) kvh * a.km.nb_codes, x.k_block, t,
                    (uint16_t *) stage);
                rows = (const uint16_t *) stage;
                stride = D;
            }
            __syncwarp();
            attend(int_of<16>(), int_of<2>(), page, stage, nullptr, rows, stride, [&](int & step) {
                step = a.v.stride;
                if (!(state & 2)) {
                    return (const uint16_t *) page.v_codes + ((size_t) kvh * a.v.n_cells + t) * a.v.stride + of.first();
                }
                decode_cells<D>(of, a.vm, (const uint8_t *) page.v_codes + (size_t) kvh * a.vm.nb_codes, x.v_block, t,
                    (uint16_t *) stage);
                step = D;
                return (const uint16_t *) stage;
            });
        }
    }
    // this thread's columns, over all cells of the warp
    copies_done(); // and every lane is done with the parameters, whose place the units take
    change_units(false, 0);
    __syncthreads();
    typedef decode_sums<D, most_warps<WIDE, false>()> sums_type;
    sums_type & sums = *(sums_type *) memory;
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int d = 4; d <= 16; d *= 2) { l[e] += __shfl_xor_sync(~0u, l[e], d); }
        if (g == 0) {
            sums.m[warp][2 * c + e] = m[e];
            sums.l[warp][2 * c + e] = l[e];
        }
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            *(float4 *) &sums.o[warp][2 * c + e][32 * i + 4 * g] =
                make_float4(o[2 * i][e], o[2 * i][2 + e], o[2 * i + 1][e], o[2 * i + 1][2 + e]);
        }
    }
    __syncthreads();
    merge_rows<D, false, false>(a, of, sums, is, kvh, row0, min(DECODE_COLUMNS, a.n_rows - row0), a.n_splits);
}

template <int D, int HI, int LO, bool WIDE>
void launch_mixed_kernel(kvq_attend_args a, int n_streams, cudaStream_t stream, int * occupancy) {
    const auto code_bytes = [](int bits) {
        switch (bits) {
        case 1: return mixed_code_bytes<D, 1>();
        case 2: return mixed_code_bytes<D, 2>();
        case 3: return mixed_code_bytes<D, 3>();
        default: return mixed_code_bytes<D, 4>();
        }
    };
    a.stage_raw_k = 0;
    for (const kvq_affine_geometry & g : a.km.part) {
        if (g.n_cells) { a.stage_raw_k = std::max(a.stage_raw_k, code_bytes(g.bits)); }
    }
    const mixed_words w = mixed_words_of<D>(a);
    // or 32 decoded cells
    a.stage_bytes = std::max(
        (a.stage_raw_k + 4 * (w.k_params + 2 * w.set + w.channels + w.v_head + w.v_pairs) + 15) & ~15, 32 * D * 2);
    const auto bytes = [&](int n_warps) {
        return std::max(n_warps *
                    (2 * (size_t) a.stage_bytes + sizeof(mixed_tables<D>) + (WIDE && a.slices_log2 ? TEAM_BYTES : 0)) +
                DECODE_COLUMNS * ((D / 4 << a.slices_log2) + 1) * sizeof(uint2),
            sizeof(decode_sums<D, most_warps<WIDE, false>()>));
    };
    static kvq_shared_limit limit;
    kvq_launch_decode_kernel(
        mixed_kernel<D, HI, LO, WIDE>, limit, a, most_warps<WIDE, false>(), WIDE, bytes, n_streams, stream, occupancy);
}

// 4 and 2 bits, which zipcache starts with, have a kernel of their own
template <int D, bool WIDE = false>
void launch_mixed(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    const auto is = [&](int i, int bits) { return !a.km.part[i].n_cells || a.km.part[i].bits == bits; };
    if (is(0, 4) && is(1, 2)) {
        launch_mixed_kernel<D, 4, 2, WIDE>(a, n_streams, stream, occupancy);
    } else {
        launch_mixed_kernel<D, 0, 0, WIDE>(a, n_streams, stream, occupancy);
    }
}

} // namespace

// Attention of few rows over long caches of mixed pages (types/mixed.h), in the manner of attend_decode.cuh: a warp
// walks over 64 cells at a time, of one part of a page, whose codes and parameters were asked for while it worked
// on those before. A last 32 cells of a part take half as many products. What differs from pages of one width:
//
//   - Cells of a part lie anywhere in the page. Sums do not mind the order; masks do: slots of the cells are found by
//   rank in the page's set.
//   - A thread's channels of S depend on the bits, so queries are read from shared memory instead of being held.
//   - A value is  c[channel] * (zero[cell] + scale[cell] * code),  c of the page. O is kept in units of one page's c,
//     and multiplied by the ratio of both when the next page begins. Zeros are summed apart, per row:
//       O = c * (sum of p*zero + sum of (p*scale) * code)
//     Scales go into probabilities in f32, before these become f16.
//
// A page that was partly restored may have one lane open, or two sets: it is decoded cell by cell into shared
// memory, then read as open pages are, 32 cells at a time.
//
// SHORT: all steps have 32 cells. That is less code, and a cold kernel pays for every instruction. Rows of this step
// come by a kernel of their own nevertheless: to bring them into their page here and read them again took longer.
#pragma once

#include "decode_merge.cuh"
#include "mixed_stage.cuh"

#include <algorithm>
#include <type_traits>

namespace {

// HI, LO: bits of the parts; 0: any, as the arguments say
template <int D, int HI, int LO, bool WIDE, bool SHORT>
__global__ void __launch_bounds__(32 * most_warps<WIDE, false>(), WIDE ? 1 : 3)
    mixed_kernel(const __grid_constant__ kvq_attend_args a) {
    constexpr int S = D / 16, UNIT = SHORT ? 32 : 64; // cells of a step
    const slice_of<D, WIDE> of(a, threadIdx.x / 32);
    // of queries in shared memory: four channels as two pairs, one row after another
    const int Q_STEP = of.n * (D / 4) + 1;
    constexpr float FROM_K = (float) (1 << (24 - K_BOOST)), FROM_V = (float) (1 << (24 - MIXED_BOOST));
    early_start();
    extern __shared__ __align__(16) uint8_t memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4, is = blockIdx.z;
    const block_share share = share_of<true>(a);
    if (!share.n_splits) { return; }
    const int kvh = share.kvh, row0 = share.rows * DECODE_COLUMNS;
    const auto & st = a.stream[is];

    uint8_t * const stages = memory + warp * (2 * a.stage_bytes + (int) sizeof(mixed_tables<D>));
    mixed_tables<D> & own = *(mixed_tables<D> *) (stages + 2 * a.stage_bytes);
    uint8_t * const shared_sums = memory + of.warps * (2 * a.stage_bytes + (int) sizeof(mixed_tables<D>)); // of teams
    int sums_turn = 0;
    uint2 * const queries = (uint2 *) (shared_sums + (WIDE && of.n > 1 ? of.warps * TEAM_BYTES : 0));
    clear_beyond<D>(of, stages, 2 * a.stage_bytes);
    const uint32_t stages_at = (uint32_t) __cvta_generic_to_shared(stages),
                   ring_at = (uint32_t) __cvta_generic_to_shared(own.ring);
    const mixed_words w = mixed_words_of<D>(a);
    const int n_units = share.n_pages * a.page_steps, split = share.split * of.teams + of.team,
              n_splits = share.n_splits * of.teams;
    const int unit0 = (int) ((int64_t) n_units * split / n_splits),
              unit1 = (int) ((int64_t) n_units * (split + 1) / n_splits);

    const auto copy_page = [&](int unit) {
        if (lane < 3) {
            copy16(ring_at + unit % RING * (int) sizeof(kvq_page) + lane * 16,
                (const char *) &st.pages[share.page(min(unit / a.page_steps, share.n_pages - 1))] + lane * 16);
        }
    };
    const auto state_of = [&](int unit) { // -1 no cells, +1 codes of K, +2 codes of V
        const kvq_page & p = own.ring[unit % RING];
        return !p.n_slots ? -1 : (p.k_params ? 1 : 0) + (p.v_params ? 2 : 0);
    };
    const auto part_of = [&](int unit) {
        const kvq_page & p = own.ring[unit % RING];
        const int k = unit % a.page_steps;
        mixed_part x;
        x.i = k >= a.hi_steps;
        x.t = UNIT * (x.i ? k - a.hi_steps : k);
        x.k_block = (const uint8_t *) p.k_params + (size_t) kvh * a.km.nb_params;
        x.v_block = (const uint8_t *) p.v_params + (size_t) kvh * a.vm.nb_params;
        x.k_codes = (const uint8_t *) p.k_codes + (size_t) kvh * a.km.nb_codes + a.km.codes[x.i];
        x.v_codes = (const uint8_t *) p.v_codes + (size_t) kvh * a.vm.nb_codes + a.vm.codes[x.i];
        return x;
    };
    // f(bits, steps of 16 cells) with both as constants
    const auto with_width = [&](int part, bool whole, auto f) {
        const auto of = [&](auto bits) {
            if constexpr (!SHORT) {
                if (whole) {
                    f(bits, int_of<4>());
                    return;
                }
            }
            f(bits, int_of<2>());
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
        const bool whole = !SHORT && a.km.part[x.i].n_cells - x.t >= 64;
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
            z[e] = column_sum(z[e]);
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
#pragma unroll 1
            for (int i = threadIdx.x; i < DECODE_COLUMNS * quads; i += 32 * of.warps) {
                const int row = min(row0 + i / quads, a.n_rows - 1), channel = i % quads * 4, token = row_token(a, row),
                          head = kvh * a.gqa + row - token * a.gqa;
                const float * p = st.q + token * a.q_stride_token + head * a.q_stride_head + channel;
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
            const bool whole = !SHORT && k.n_cells - x.t >= 64;
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
        for (int half = 0; half < UNIT / 32; half++) {
            const int t = UNIT * (unit % a.page_steps) + 32 * half;
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
        l[e] = column_sum(l[e]);
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
    merge_rows<D, false, false, false>(a, of, sums, is, share, row0, min(DECODE_COLUMNS, a.n_rows - row0));
}

template <int D, int HI, int LO, bool WIDE, bool SHORT>
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
    kvq_launch_decode_kernel(mixed_kernel<D, HI, LO, WIDE, SHORT>, limit, a, most_warps<WIDE, false>(), WIDE, bytes,
        n_streams, stream, occupancy);
}

// 4 and 2 bits, which zipcache starts with, have a kernel of their own
template <int D, bool WIDE, bool SHORT>
void launch_mixed(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    const auto is = [&](int i, int bits) { return !a.km.part[i].n_cells || a.km.part[i].bits == bits; };
    if (is(0, 4) && is(1, 2)) {
        launch_mixed_kernel<D, 4, 2, WIDE, SHORT>(a, n_streams, stream, occupancy);
    } else {
        launch_mixed_kernel<D, 0, 0, WIDE, SHORT>(a, n_streams, stream, occupancy);
    }
}

} // namespace

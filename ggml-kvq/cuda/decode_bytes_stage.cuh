// Decode attention in 8-bit products: how a warp brings 64 cells into shared memory. The stages are those of
// decode_stage.cuh and decode_bytes_lattice.cuh.
#pragma once

#include "decode_bytes_lattice.cuh"

namespace {

// Where a lane's pieces of a unit lie, in bytes: from the page's pointers on, and in the stage. Made once a block for
// each slice of a head, and kept in shared memory: a warp asks for a unit every thousand instructions. k_left, v_left:
// pieces of a tile of keys, and tiles of values, from this lane's first one to the end of the head. has: this lane has
// parameters of keys (1), of values (2).
struct byte_lane {
    int k_codes, k_to, v_codes, v_to, k_params, v_params, k_left, v_left, has;
};

// Pieces of a tile of keys as it lies in the page, where a slice has K of them.
template <int K, typename X> __device__ __forceinline__ int key_pieces(const kvq_attend_args & a) {
    return X::WIDE ? a.k.n_chunks[0] * 4 : K;
}

// Of N rows of codes of WK and WV bits (D channels, or D/2 vectors of 4): the pieces of copy_keys and copy_values.
template <int D, int N, int WK, int WV, bool POINTS, typename X>
__device__ __forceinline__ byte_lane lane_of(const kvq_attend_args & a, const X & of, int kvh) {
    constexpr int K = N * WK / 32 * 4, V = 4 * WV; // pieces of a tile of keys, of half a tile of values
    static_assert(!X::WIDE || K >= 16);
    const int lane = threadIdx.x % 32, r = lane % 16, half = lane / 16, tile = 2 * half + (K == 8 ? r / 8 : 0),
              chunk = half * WV + r % V / 4, step = key_pieces<K, X>(a), v_tile = of.i * (N / 16) + r / V;
    byte_lane x = {};
    x.k_codes = kvh * a.k.nb_codes + (POINTS ? 0 : half * 32 * step) + (of.i * K + r) * 16;
    x.k_to = half * (K * 32) + (r ^ tile) * 16;
    x.k_left = step - of.i * K - r;
    x.v_codes = kvh * a.v.nb_codes + (POINTS ? 0 : half * V * 16) + v_tile * a.v.n_chunks[0] * 64 + r % V * 16;
    x.v_to = r / V * (V * 32) + chunk / 2 * 128 + ((chunk % 2 * 4 + r % 4) ^ 2 * (chunk / 2 % 4)) * 16;
    x.v_left = a.v.n_tiles - v_tile;
    if constexpr (!POINTS) { // 8 channels of keys, 8 cells of values, in f16
        const int group = lane / 16 + (X::WIDE ? first_v_group<D>(a, of.i) : 0);
        x.k_params = kvh * a.k.nb_params + 2 * ((lane < D / 8 ? 0 : a.k.np - D) + of.first() + lane * 8);
        x.v_params = kvh * a.v.nb_params + 2 * ((lane / 8 % 2 ? a.v.np : 0) + group * a.v.n_cells + lane % 8 * 8);
        x.has = (lane < D / 4 && of.has(lane % (D / 8) * 8) ? 1 : 0) |
            (lane < 16 * D >> a.v_group_log2 && (!X::WIDE || group < a.v_groups) ? 2 : 0);
    }
    return x;
}

// cell: the first of 64, or of this lane's 32 (POINTS), in the page
template <int N, int W, typename X>
__device__ __forceinline__ void copy_key_codes(
    const kvq_attend_args & a, const X &, uint32_t to, const void * codes, const byte_lane & x, int cell) {
    constexpr int K = N * W / 32 * 4;
    const int step = key_pieces<K, X>(a);
    const uint8_t * from = (const uint8_t *) codes + (uint32_t) (x.k_codes + cell * step);
    to += x.k_to;
#pragma unroll
    for (int k = 0; k < K / 8; k++) {
        if (X::WIDE && k && 16 * k % K == 0) { from += (step - K) * 16; } // the next tile
        if (!X::WIDE || 16 * k % K < x.k_left) {
            copy16((K > 8 && 16 * k / K % 2 ? to ^ 16 : to) + k * 256, from + k * 256);
        }
    }
}
template <int N, int W, typename X>
__device__ __forceinline__ void copy_value_codes(
    const kvq_attend_args & a, const X &, uint32_t to, const void * codes, const byte_lane & x, int cell) {
    constexpr int V = 4 * W, TILES = 16 / V;
    const uint8_t * from = (const uint8_t *) codes + (uint32_t) (x.v_codes + cell / 32 * (V * 16));
    to += x.v_to;
#pragma unroll
    for (int k = 0; k < N / 16; k += TILES) {
        if (!X::WIDE || k < x.v_left) { copy16(to + k * (V * 32), from); }
        from += (uint32_t) (TILES * 64 * a.v.n_chunks[0]);
    }
}

// What copy_stage asks for, where there are one f16 scale and zero a channel of keys, and two of values a cell at most.
template <int D, int KB, int VB, typename X>
__device__ __forceinline__ void copy_unit(const kvq_attend_args & a, const X & of, uint32_t to, const kvq_page & page,
    const byte_lane & x, int kvh, int cell) {
    using map = stage_map<D, KB, VB>;
    const int lane = threadIdx.x % 32;
    copy_key_codes<D, map::WK>(a, of, to + map::K, page.k_codes, x, cell);
    copy_value_codes<D, map::WV>(a, of, to + map::V, page.v_codes, x, cell);
    const int t = cell + lane / 16 * 32;
    if constexpr (cut<KB>::high) {
        copy_keys<D, 1>(of, to + map::K_HIGH,
            (const uint8_t *) page.k_codes + (size_t) kvh * a.k.nb_codes + a.k.offset[1], t, a.k.n_chunks[1]);
    }
    if constexpr (cut<VB>::high) {
        copy_values<D, 1>(of, to + map::V_HIGH,
            (const uint8_t *) page.v_codes + (size_t) kvh * a.v.nb_codes + a.v.offset[1], t, a.v.n_chunks[1],
            a.v.n_tiles);
    }
    const uint32_t at = to + map::K_PARAMS + lane * 16;
    if (x.has & 1) {
        copy16(at,
            (const uint8_t *) page.k_params + (uint32_t) (x.k_params + (cell >> a.k_group_log2) * (2 * of.head(a))));
    }
    if (x.has & 2) { copy16(at + a.stage_raw_v, (const uint8_t *) page.v_params + (uint32_t) (x.v_params + 2 * cell)); }
}

// Asks for the scales of this lane's half of a lattice unit, as the block holds them: 64 bytes of the stage. head:
// where those of the KV head begin. 8-bit ones begin at multiples of two bytes, copies at multiples of four: the word
// of their top, then their own words.
__device__ __forceinline__ void copy_scales(
    const kvq_affine_geometry & g, uint32_t to, const void * params, int head, int cell) {
    const int r = threadIdx.x % 16, begin = head + 2 + cell;
    const uint8_t * const from = (const uint8_t *) params;
    to += threadIdx.x / 16 % 2 * 64 + 4 * r;
    if (!g.scale) {
        copy4(to, from + (uint32_t) (head + 2 * cell + 4 * r));
    } else if (4 * r < (begin & 3) + 36) {
        copy4(to, from + (uint32_t) (r ? (begin & ~3) + 4 * (r - 1) : head & ~3));
    }
}
// of cells 2r and 2r + 1 of the half
__device__ __forceinline__ float2 scales_of(const kvq_affine_geometry & g, const uint8_t * from, int head) {
    const int r = threadIdx.x % 16;
    from += threadIdx.x / 16 % 2 * 64;
    return two_scales(g,
        g.scale ? *(const uint16_t *) (from + 4 + (head + 2 & 3) + 2 * r) |
                (uint32_t) *(const uint16_t *) (from + (head & 3)) << 16
                : *(const uint32_t *) (from + 4 * r));
}

// Asks for a lattice unit. page, cell: of this lane's half. parts: 1 keys, 2 values
template <int D, typename X>
__device__ __forceinline__ void copy_points(const kvq_attend_args & a, const X & of, uint32_t to, const kvq_page & page,
    const byte_lane & x, int kvh, int cell, int parts) {
    using map = byte_lattice_map<D>;
    if (parts & 1) {
        copy_key_codes<D / 2, 4>(a, of, to + map::K, page.k_codes, x, cell);
        copy_scales(a.k, to + map::RAW, page.k_params, kvh * a.k.nb_params, cell);
    }
    if (parts & 2) {
        copy_value_codes<D / 2, 4>(a, of, to + map::V, page.v_codes, x, cell);
        copy_scales(a.v, to + map::RAW + 128, page.v_params, kvh * a.v.nb_params, cell);
    }
}
template <int D> __device__ __forceinline__ void put_point_scales(const kvq_attend_args & a, uint8_t * stage, int kvh) {
    using map = byte_lattice_map<D>;
    float2 * const to = (float2 *) (stage + map::SCALES) + threadIdx.x % 32;
    to[0] = scales_of(a.k, stage + map::RAW, kvh * a.k.nb_params);
    to[DECODE_CELLS / 2] = scales_of(a.v, stage + map::RAW + 128, kvh * a.v.nb_params);
    __syncwarp();
}

// Halves that nobody asked for ahead: beside one that is open, or with one operand open
template <int D, typename X>
__device__ __noinline__ void copy_points_late(const kvq_attend_args & a, const X of, uint8_t * stage,
    const kvq_page & page, const byte_lane & x, int kvh, int cell, int parts) {
    copy_points<D>(a, of, (uint32_t) __cvta_generic_to_shared(stage), page, x, kvh, cell, parts);
    copies_done();
    put_point_scales<D>(a, stage, kvh);
}

} // namespace

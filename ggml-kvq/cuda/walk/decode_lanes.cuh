// Decode attention: how a warp brings 64 cells into shared memory (decode_stage.cuh) where what its lanes have of them
// lies in a table.
#pragma once

#include "decode_stage.cuh"

namespace {

// Where a lane's pieces of a unit lie, in bytes: from the page's pointers on, and in the stage. Made once a block for
// each slice of a head, and kept in shared memory: a warp asks for a unit every thousand instructions. k_left, v_left:
// pieces of a tile of keys, and tiles of values, from this lane's first one to the end of the head. has: this lane has
// parameters of keys (1), of values (2; of groups of 32: 4 of the second step as well).
struct byte_lane {
    int k_codes, k_to, v_codes, v_to, k_params, v_params, k_left, v_left, has;
};
// and of groups of 32 (decode_fine.cuh)
struct fine_lane : byte_lane {
    int k_params_to, v_params_to;
};

// Pieces of a tile of keys as it lies in the page, where a slice has K of them.
template <int K, typename X> __device__ __forceinline__ int key_pieces(const kvq_attend_args & a) {
    return X::WIDE ? a.k.n_chunks[0] * 4 : K;
}

// Of N rows of codes of WK and WV bits (D channels, or D/2 vectors of 4; keys: NK of them): the pieces of copy_keys and
// copy_values.
template <int D, int N, int WK, int WV, bool POINTS, int NK = N, typename X>
__device__ __forceinline__ byte_lane lane_of(const kvq_attend_args & a, const X & of, int kvh) {
    constexpr int K = NK * WK / 32 * 4, V = 4 * WV; // pieces of a tile of keys, of half a tile of values
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

} // namespace

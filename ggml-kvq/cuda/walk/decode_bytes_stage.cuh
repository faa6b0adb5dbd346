// Decode attention in 8-bit products: how a warp brings 64 cells into shared memory. The stages are those of
// decode_stage.cuh, decode_bytes_lattice.cuh and decode_bytes_tables.cuh.
#pragma once

#include "decode_bytes_tables.cuh"
#include "decode_lanes.cuh"

namespace {

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
// where those of the KV head begin. Those of 8 and 4 bits begin at multiples of two bytes, copies at multiples of four:
// the word of their top, then their own words.
__device__ __forceinline__ void copy_scales(
    const kvq_affine_geometry & g, uint32_t to, const void * params, int head, int cell) {
    const bool nibbles = g.scale == 2;
    const int r = threadIdx.x % 16, begin = head + 2 + (nibbles ? cell / 2 : cell);
    const uint8_t * const from = (const uint8_t *) params;
    to += threadIdx.x / 16 % 2 * 64 + 4 * r;
    if (!g.scale) {
        copy4(to, from + (uint32_t) (head + 2 * cell + 4 * r));
    } else if (4 * r < (begin & 3) + (nibbles ? 20 : 36)) {
        copy4(to, from + (uint32_t) (r ? (begin & ~3) + 4 * (r - 1) : head & ~3));
    }
}
// of cells 2r and 2r + 1 of the half
__device__ __forceinline__ float2 scales_of(const kvq_affine_geometry & g, const uint8_t * from, int head) {
    const int r = threadIdx.x % 16;
    from += threadIdx.x / 16 % 2 * 64;
    if (!g.scale) { return two_scales(g, *(const uint32_t *) (from + 4 * r)); }
    const uint8_t * const own = from + 4 + (head + 2 & 3);
    const uint32_t top = *(const uint16_t *) (from + (head & 3));
    return two_scales(g, (g.scale == 2 ? own[r] : *(const uint16_t *) (own + 2 * r)) | top << 16);
}

// Of codes of whole channels, or of vectors of two.
template <int D, int KB, int VB, typename X>
__device__ __forceinline__ byte_lane unit_lane(const kvq_attend_args & a, const X & of, int kvh) {
    using codes = lattice_map<D, KB, VB>;
    if constexpr (KB > LATTICE) {
        return lane_of<D, D / 2, codes::WK, codes::WV, true, codes::K_VECS>(a, of, kvh);
    } else {
        return lane_of<D, D, cut<KB>::W, cut<VB>::W, false>(a, of, kvh);
    }
}

// What the table of lanes does not have of a unit's indices: second parts, the fast half, values of 8 bits.
template <int D, int KB, int VB, typename X>
__device__ __forceinline__ void copy_other_keys(
    const kvq_attend_args & a, const X & of, uint32_t to, const kvq_page & page, int kvh, int cell) {
    using map = byte_table_map<D, KB, VB>;
    const uint8_t * const codes = (const uint8_t *) page.k_codes + (size_t) kvh * a.k.nb_codes;
    if constexpr (cut<slow_of<KB>>::high) {
        copy_keys<map::K_VECS, map::HIGH>(of, to + map::K_HIGH, codes + a.k.offset[1], cell, a.k.n_chunks[1]);
    }
    if constexpr (fast_of<KB> != 0) {
        copy_keys<map::K_VECS, cut<fast_of<KB>>::W>(
            of, to + map::FAST, codes + a.k_fast.offset[0], cell, a.k_fast.n_chunks[0]);
        copy_scales(a.k, to + map::RAW + 256, page.k_params, kvh * a.k.nb_params + a.k_fast.np, cell);
    }
}
template <int D, int KB, int VB, typename X>
__device__ __forceinline__ void copy_other_values(
    const kvq_attend_args & a, const X & of, uint32_t to, const kvq_page & page, int kvh, int cell) {
    using map = byte_table_map<D, KB, VB>;
    const uint8_t * const codes = (const uint8_t *) page.v_codes + (size_t) kvh * a.v.nb_codes;
    if constexpr (map::WV == 8) { copy_values<D / 2, 8>(of, to + map::V, codes, cell, a.v.n_chunks[0], a.v.n_tiles); }
    if constexpr (cut<VB>::high) {
        copy_values<D / 2, map::HIGH>(of, to + map::V_HIGH, codes + a.v.offset[1], cell, a.v.n_chunks[1], a.v.n_tiles);
    }
}

// Asks for a lattice unit. page, cell: of this lane's half. parts: 1 keys, 2 values
template <int D, int KB, int VB, typename X>
__device__ __forceinline__ void copy_points(const kvq_attend_args & a, const X & of, uint32_t to, const kvq_page & page,
    const byte_lane & x, int kvh, int cell, int parts) {
    using map = points_map<D, KB, VB>;
    using codes = lattice_map<D, KB, VB>;
    if (parts & 1) {
        copy_key_codes<codes::K_VECS, codes::WK>(a, of, to + map::K, page.k_codes, x, cell);
        copy_scales(a.k, to + map::RAW, page.k_params, kvh * a.k.nb_params, cell);
        if constexpr (is_tabled<KB, VB>) { copy_other_keys<D, KB, VB>(a, of, to, page, kvh, cell); }
    }
    if (parts & 2) {
        if constexpr (codes::WV < 8) { copy_value_codes<D / 2, codes::WV>(a, of, to + map::V, page.v_codes, x, cell); }
        copy_scales(a.v, to + map::RAW + 128, page.v_params, kvh * a.v.nb_params, cell);
        if constexpr (is_tabled<KB, VB>) { copy_other_values<D, KB, VB>(a, of, to, page, kvh, cell); }
    }
}
// those of tables times the steps of their grids
template <int D, int KB, int VB>
__device__ __forceinline__ void put_point_scales(const kvq_attend_args & a, uint8_t * stage, int kvh) {
    using map = points_map<D, KB, VB>;
    constexpr bool TABLES = is_tabled<KB, VB>;
    float2 * const to = (float2 *) (stage + map::SCALES) + threadIdx.x % 32;
    const auto times = [](float2 x, float step) { return make_float2(x.x * step, x.y * step); };
    to[0] =
        times(scales_of(a.k, stage + map::RAW, kvh * a.k.nb_params), TABLES ? GRID_STEP<cut<slow_of<KB>>::B> : 1.0f);
    to[DECODE_CELLS / 2] = times(
        scales_of(a.v, stage + map::RAW + 128, kvh * a.v.nb_params), VB == LATTICE + 4 ? 1.0f : GRID_STEP<cut<VB>::B>);
    if constexpr (TABLES && fast_of<KB> != 0) {
        to[DECODE_CELLS] = times(
            scales_of(a.k, stage + map::RAW + 256, kvh * a.k.nb_params + a.k_fast.np), GRID_STEP<cut<fast_of<KB>>::B>);
    }
    __syncwarp();
}

// Halves that no warp asked for ahead of time: beside one that is open, or with one operand open
template <int D, int KB, int VB, typename X>
__device__ __noinline__ void copy_points_late(const kvq_attend_args & a, const X of, uint8_t * stage,
    const kvq_page & page, const byte_lane & x, int kvh, int cell, int parts) {
    copy_points<D, KB, VB>(a, of, (uint32_t) __cvta_generic_to_shared(stage), page, x, kvh, cell, parts);
    copies_done();
    put_point_scales<D, KB, VB>(a, stage, kvh);
}

} // namespace

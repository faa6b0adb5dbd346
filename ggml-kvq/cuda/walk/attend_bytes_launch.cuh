// Launches of bytes_kernel, one function a table of instances (attend_decode.cu).
#pragma once

#include "attend_bytes.cuh"

#include <algorithm>

namespace {

template <int D, int KB, int VB, bool MEANS, bool WIDE, bool AHEAD, int E = 1>
void launch_bytes_kernel(kvq_attend_args a, int n_streams, cudaStream_t stream, int * occupancy) {
    constexpr bool POINTS = KB > LATTICE;
    size_t shared = ((POINTS ? 32 : 16) * (size_t) D + 32 * sizeof(byte_lane)) << a.slices_log2; // queries
    if constexpr (POINTS) {
        a.stage_bytes = points_map<D, KB, VB>::BYTES + (MEANS ? 4 * DECODE_CELLS : 0);
        a.stage_wide = MEANS ? 4 * D : 0; // angles
        shared += nb_points<KB, VB>() + (E == 2 ? shared_bytes::ROWS << a.slices_log2 : 0);
        if constexpr (MEANS) {
            shared += 4 * DECODE_COLUMNS * (size_t) means_step<D>(a) + nb_waves<D, E>(a) + (WIDE ? 0 : 10 * D);
        }
        if constexpr (!WIDE) { shared += (size_t) bytes_of_rows<D>(a); }
    } else {
        lay_out_stage<D, KB, VB>(a);
    }
    typedef decode_sums<D, bytes_warps<WIDE>> sums_type;
    const size_t team = WIDE && a.slices_log2 ? bytes_slice<D, MEANS, WIDE>::TURNS * TEAM_TURN : 0;
    const auto bytes = [&](int n_warps) {
        return std::max(n_warps * ((size_t) bytes_warp<MEANS, WIDE>(a) + team) + shared,
            AHEAD ? (size_t) picked_bytes<sums_type>(a) : sizeof(sums_type));
    };
    static kvq_shared_limit limit;
    kvq_launch_decode_kernel(bytes_kernel<D, KB, VB, MEANS, WIDE, AHEAD, E>, limit, a, bytes_warps<WIDE>, WIDE, bytes,
        n_streams, stream, occupancy);
}

template <int D, bool WIDE, bool AHEAD, int E = 1>
void launch_bytes_lattice(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    if (a.waves) {
        launch_bytes_kernel<D, LATTICE + 4, LATTICE + 4, true, WIDE, AHEAD, E>(a, n_streams, stream, occupancy);
    } else {
        launch_bytes_kernel<D, LATTICE + 4, LATTICE + 4, false, WIDE, AHEAD, E>(a, n_streams, stream, occupancy);
    }
}

template <int D, bool WIDE>
void launch_bytes(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    if (a.k.type == KVQ_TYPE_LATTICE) {
        launch_bytes_lattice<D, WIDE, false>(a, n_streams, stream, occupancy);
        return;
    }
#define KVQ_CASE(K, V)                                                                                                 \
    case 8 * K + V: launch_bytes_kernel<D, K, V, false, WIDE, false>(a, n_streams, stream, occupancy); break;
    if constexpr (WIDE) {
        switch (8 * a.k.bits + a.v.bits) { KVQ_WIDE_BYTES_BITS(KVQ_CASE) }
    } else {
        switch (8 * a.k.bits + a.v.bits) { KVQ_BYTES_BITS(KVQ_CASE) }
    }
#undef KVQ_CASE
}

// split keys, and lattices of other bits than 2
template <int D, int E>
void launch_bytes_tables(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
#define KVQ_CASE(F, K, V)                                                                                              \
    case 64 * F + 8 * K + V:                                                                                           \
        launch_bytes_kernel<D, SPLIT + 32 * F + 2 * K, LATTICE + 2 * V, true, false, false, E>(                        \
            a, n_streams, stream, occupancy);                                                                          \
        break;
    if (a.k.split) {
        switch (64 * a.k_fast.bits + 8 * a.k.bits + a.v.bits) { KVQ_BYTES_SPLIT_BITS(KVQ_CASE) }
        return;
    }
#undef KVQ_CASE
#define KVQ_CASE(K, V)                                                                                                 \
    case 8 * K + V:                                                                                                    \
        if (a.waves) {                                                                                                 \
            launch_bytes_kernel<D, LATTICE + 2 * K, LATTICE + 2 * V, true, false, false, E>(                           \
                a, n_streams, stream, occupancy);                                                                      \
        } else {                                                                                                       \
            launch_bytes_kernel<D, LATTICE + 2 * K, LATTICE + 2 * V, false, false, false, E>(                          \
                a, n_streams, stream, occupancy);                                                                      \
        }                                                                                                              \
        break;
    switch (8 * a.k.bits + a.v.bits) { KVQ_BYTES_TABLE_BITS(KVQ_CASE) }
#undef KVQ_CASE
}

// more than 4 rows
template <int D, bool WIDE>
void launch_bytes_rows(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    if (a.k.type == KVQ_TYPE_LATTICE) {
        launch_bytes_lattice<D, WIDE, false, 2>(a, n_streams, stream, occupancy);
        return;
    }
#define KVQ_CASE(K, V)                                                                                                 \
    case 8 * K + V: launch_bytes_kernel<D, K, V, false, WIDE, false, 2>(a, n_streams, stream, occupancy); break;
    switch (8 * a.k.bits + a.v.bits) { KVQ_BYTES_ROWS_BITS(KVQ_CASE) }
#undef KVQ_CASE
}

// where cells were picked by the step before
template <int D, bool WIDE>
void launch_bytes_ahead(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    if (a.k.type == KVQ_TYPE_LATTICE) {
        launch_bytes_lattice<D, WIDE, true>(a, n_streams, stream, occupancy);
        return;
    }
#define KVQ_CASE(K, V)                                                                                                 \
    case 8 * K + V: launch_bytes_kernel<D, K, V, false, WIDE, true>(a, n_streams, stream, occupancy); break;
    switch (8 * a.k.bits + a.v.bits) { KVQ_AHEAD_BITS(KVQ_CASE) }
#undef KVQ_CASE
}

} // namespace

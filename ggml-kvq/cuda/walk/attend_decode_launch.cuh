// Launches of decode_kernel, one function a table of instances (attend_decode.cu).
#pragma once

#include "attend_decode.cuh"

#include <algorithm>

namespace {

// Launches, or with `occupancy` tells how many blocks a multiprocessor holds; 0: there is not room for one.
template <int D, int KB, int VB, bool MEANS = false, int FINE = 0, bool WIDE = false, int PART = WHOLE>
void launch_kernel(kvq_attend_args a, int n_streams, cudaStream_t stream, int * occupancy) {
    a.stage_bytes = a.stage_wide = 0;
    if constexpr (KB > LATTICE) {
        a.stage_bytes = lattice_map<D, KB, VB>::BYTES + (MEANS ? 4 * DECODE_CELLS : 0);
    } else if (KB != 16) {
        lay_out_stage<D, KB, VB>(a);
    }
    const size_t shared = nb_tables<KB, VB>() + (KB > LATTICE ? 2 : 1) * (16 * (size_t) D << a.slices_log2) +
        (copies_rows<KB, MEANS, WIDE> ? bytes_of_rows<D>(a) : 0) +
        (MEANS ? 4 * DECODE_COLUMNS * (size_t) means_step<D>(a) : 0) +
        (FINE == 3 ? 32 * sizeof(fine_lane) << a.slices_log2 : 0); // points, queries, rows, coefficients, lanes
    typedef decode_sums<D, decode_warps<D, KB, MEANS, FINE, WIDE>> sums_type;
    const auto bytes = [&](int n_warps) {
        return std::max(n_warps * ((size_t) warp_bytes(a) + (WIDE && a.slices_log2 ? TEAM_BYTES : 0)) + shared,
            PART == VALUES || PART == AHEAD ? (size_t) picked_bytes<sums_type>(a) : sizeof(sums_type));
    };
    static kvq_shared_limit limit;
    kvq_launch_decode_kernel(decode_kernel<D, KB, VB, MEANS, FINE, WIDE, PART>, limit, a,
        decode_warps<D, KB, MEANS, FINE, WIDE>, WIDE, bytes, n_streams, stream, occupancy);
}

template <int D, int KB>
void launch_lattice_values(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    switch (a.v.bits) {
    case 1: launch_kernel<D, KB, LATTICE + 2>(a, n_streams, stream, occupancy); break;
    case 2: launch_kernel<D, KB, LATTICE + 4>(a, n_streams, stream, occupancy); break;
    case 3: launch_kernel<D, KB, LATTICE + 6>(a, n_streams, stream, occupancy); break;
    default: launch_kernel<D, KB, LATTICE + 8>(a, n_streams, stream, occupancy); break;
    }
}

template <int D> void launch_lattice(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    switch (a.k.bits) {
    case 1: launch_lattice_values<D, LATTICE + 2>(a, n_streams, stream, occupancy); break;
    case 2: launch_lattice_values<D, LATTICE + 4>(a, n_streams, stream, occupancy); break;
    case 3: launch_lattice_values<D, LATTICE + 6>(a, n_streams, stream, occupancy); break;
    default: launch_lattice_values<D, LATTICE + 8>(a, n_streams, stream, occupancy); break;
    }
}

template <int D>
void launch_lattice_wide(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
#define KVQ_CASE(K, V)                                                                                                 \
    case 8 * K + V:                                                                                                    \
        launch_kernel<D, LATTICE + 2 * K, LATTICE + 2 * V, false, 0, true>(a, n_streams, stream, occupancy);           \
        break;
    switch (8 * a.k.bits + a.v.bits) { KVQ_WIDE_BITS(KVQ_CASE) }
#undef KVQ_CASE
}

template <int D, bool WIDE>
void launch_means(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
#define KVQ_CASE(K, V)                                                                                                 \
    case 8 * K + V:                                                                                                    \
        launch_kernel<D, LATTICE + 2 * K, LATTICE + 2 * V, true, 0, WIDE>(a, n_streams, stream, occupancy);            \
        break;
    switch (8 * a.k.bits + a.v.bits) { KVQ_MEANS_BITS(KVQ_CASE) }
#undef KVQ_CASE
}

template <int D, bool WIDE>
void launch_split(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
#define KVQ_CASE(F, K, V)                                                                                              \
    case 64 * F + 8 * K + V:                                                                                           \
        launch_kernel<D, SPLIT + 32 * F + 2 * K, LATTICE + 2 * V, true, 0, WIDE>(a, n_streams, stream, occupancy);     \
        break;
    switch (64 * a.k_fast.bits + 8 * a.k.bits + a.v.bits) { KVQ_SPLIT_BITS(KVQ_CASE) }
#undef KVQ_CASE
}

// logits alone; the second format has no meaning
template <int D, bool WIDE>
void launch_split_logits(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
#define KVQ_CASE(F, K)                                                                                                 \
    case 8 * F + K:                                                                                                    \
        launch_kernel<D, SPLIT + 32 * F + 2 * K, LATTICE + 2, true, 0, WIDE, LOGITS>(a, n_streams, stream, occupancy); \
        break;
    switch (8 * a.k_fast.bits + a.k.bits) { KVQ_SPLIT_KEY_BITS(KVQ_CASE) }
#undef KVQ_CASE
}

template <int D, int FINE, bool WIDE>
void launch_fine(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    switch (a.k.bits) {
    case 1: launch_kernel<D, 1, 1, false, FINE, WIDE>(a, n_streams, stream, occupancy); break;
    case 2: launch_kernel<D, 2, 2, false, FINE, WIDE>(a, n_streams, stream, occupancy); break;
    case 3: launch_kernel<D, 3, 3, false, FINE, WIDE>(a, n_streams, stream, occupancy); break;
    default: launch_kernel<D, 4, 4, false, FINE, WIDE>(a, n_streams, stream, occupancy); break;
    }
}

template <int D> void launch_fine_32(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
#define KVQ_CASE(K, V)                                                                                                 \
    case 8 * K + V: launch_kernel<D, K, V, false, 3, true>(a, n_streams, stream, occupancy); break;
    switch (8 * a.k.bits + a.v.bits) { KVQ_FINE_BITS(KVQ_CASE) }
#undef KVQ_CASE
}

// A part: of keys alone or of values alone, in their bits. X(bits)
#define KVQ_PART_BITS(X) X(1) X(2) X(3) X(4)
#define KVQ_CASE_OF_PART(B)                                                                                            \
    case B:                                                                                                            \
        if (a.k.type == KVQ_TYPE_AFFINE) {                                                                             \
            launch_kernel<D, B, B, false, 0, WIDE, PART>(a, n_streams, stream, occupancy);                             \
        } else if (a.waves) {                                                                                          \
            launch_kernel<D, LATTICE + 2 * B, LATTICE + 2 * B, true, 0, WIDE, PART>(a, n_streams, stream, occupancy);  \
        } else {                                                                                                       \
            launch_kernel<D, LATTICE + 2 * B, LATTICE + 2 * B, false, 0, WIDE, PART>(a, n_streams, stream, occupancy); \
        }                                                                                                              \
        break;
template <int D, bool WIDE, int PART>
void launch_part(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    if (a.k.type == KVQ_TYPE_F16) {
        launch_kernel<D, 16, 16, false, 0, WIDE, PART>(a, n_streams, stream, occupancy);
        return;
    }
    switch (PART == LOGITS ? a.k.bits : a.v.bits) { KVQ_PART_BITS(KVQ_CASE_OF_PART) }
}
#undef KVQ_CASE_OF_PART

// The whole, where cells were picked before.
template <int D, bool WIDE>
void launch_ahead(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
#define KVQ_CASE(K, V)                                                                                                 \
    case 8 * K + V:                                                                                                    \
        if (a.k.type == KVQ_TYPE_AFFINE) {                                                                             \
            launch_kernel<D, K, V, false, 0, WIDE, AHEAD>(a, n_streams, stream, occupancy);                            \
        } else if (a.waves) {                                                                                          \
            launch_kernel<D, LATTICE + 2 * K, LATTICE + 2 * V, true, 0, WIDE, AHEAD>(a, n_streams, stream, occupancy); \
        } else {                                                                                                       \
            launch_kernel<D, LATTICE + 2 * K, LATTICE + 2 * V, false, 0, WIDE, AHEAD>(                                 \
                a, n_streams, stream, occupancy);                                                                      \
        }                                                                                                              \
        break;
    switch (8 * a.k.bits + a.v.bits) { KVQ_AHEAD_BITS(KVQ_CASE) }
#undef KVQ_CASE
}

template <int D, int KB>
void launch_values(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    switch (a.v.bits) {
    case 1: launch_kernel<D, KB, 1>(a, n_streams, stream, occupancy); break;
    case 2: launch_kernel<D, KB, 2>(a, n_streams, stream, occupancy); break;
    case 3: launch_kernel<D, KB, 3>(a, n_streams, stream, occupancy); break;
    default: launch_kernel<D, KB, 4>(a, n_streams, stream, occupancy); break;
    }
}

template <int D> void launch_decode(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    if (a.k.np == 0) {
        launch_kernel<D, 16, 16>(a, n_streams, stream, occupancy);
        return;
    }
    switch (a.k.bits) {
    case 1: launch_values<D, 1>(a, n_streams, stream, occupancy); break;
    case 2: launch_values<D, 2>(a, n_streams, stream, occupancy); break;
    case 3: launch_values<D, 3>(a, n_streams, stream, occupancy); break;
    default: launch_values<D, 4>(a, n_streams, stream, occupancy); break;
    }
}

template <int D>
void launch_decode_wide(const kvq_attend_args & a, int n_streams, cudaStream_t stream, int * occupancy) {
    if (a.k.np == 0) {
        launch_kernel<D, 16, 16, false, 0, true>(a, n_streams, stream, occupancy);
        return;
    }
#define KVQ_CASE(K, V)                                                                                                 \
    case 8 * K + V: launch_kernel<D, K, V, false, 0, true>(a, n_streams, stream, occupancy); break;
    switch (8 * a.k.bits + a.v.bits) { KVQ_WIDE_BITS(KVQ_CASE) }
#undef KVQ_CASE
}

} // namespace

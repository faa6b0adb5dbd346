// Decode attention, the first part: how a warp brings 64 cells of one KV head into shared memory (attend_decode.cuh).
#pragma once

#include "attend.cuh"
#include "cuda/instructions.cuh"

namespace {

constexpr int DECODE_WARPS = 4, DECODE_CELLS = 64, DECODE_COLUMNS = 8;
constexpr int K_BOOST = 3; // weights of K planes: 2^(3 - W*plane)
constexpr float LOG2E = 1.44269504f;

__device__ __forceinline__ __half2 as_half2(uint32_t x) { return *(const __half2 *) &x; }
__device__ __forceinline__ uint32_t as_u32(const __half2 & x) { return *(const uint32_t *) &x; }
__device__ __forceinline__ uint32_t mul2(uint32_t a, uint32_t b) { return as_u32(__hmul2(as_half2(a), as_half2(b))); }
__device__ __forceinline__ uint32_t mul2(uint32_t a, float b) {
    return as_u32(__hmul2(as_half2(a), __float2half2_rn(b)));
}
__device__ __forceinline__ uint32_t even(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); } // (a.x, b.x)
__device__ __forceinline__ uint32_t odd(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }
__device__ __forceinline__ uint4 load16(const void * p) { return __ldg((const uint4 *) p); }
__device__ __forceinline__ uint2 load8(const void * p) { return __ldg((const uint2 *) p); }
__device__ __forceinline__ uint32_t rotate(uint32_t x, int right) { return __funnelshift_r(x, x, right); }
__device__ __forceinline__ constexpr float exp2_of(int n) {
    return n < 0 ? 1.0f / (float) (1 << -n) : (float) (1 << n);
}
// 2^n as two f16 numbers, -14 <= n <= 15
__device__ __forceinline__ constexpr uint32_t plane_weight(int n) { return (uint32_t) (15 + n) * 0x04000400u; }
__device__ __forceinline__ uint32_t transpose(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// BITS of a lattice page = LATTICE + bits of an index. BITS of split keys = SPLIT + 16 * bits of the fast half (0: it
// is left out) + bits of the slow half.
constexpr int LATTICE = 32, SPLIT = 64;
template <int BITS> constexpr bool is_split = BITS > SPLIT;
template <int BITS> constexpr int slow_of = is_split<BITS> ? LATTICE + BITS % 16 : BITS;
template <int BITS>
constexpr int fast_of = is_split<BITS> && BITS / 16 > SPLIT / 16 ? LATTICE + BITS / 16 - SPLIT / 16 : 0;

// How a lane of codes of BITS is cut: the first part's width, planes of a word, and the 1-bit part of 3 bits.
// Lattice: P = steps of 4 channels in a word; indices of 6 bits have a part of 2. Split keys: only the order of
// channels in which open keys and means are read, that of 8 bits.
template <int BITS> struct cut {
    static constexpr int B = is_split<BITS> ? 8 : BITS > LATTICE ? BITS - LATTICE : BITS;
    static constexpr int W = B == 3 ? 2 : B == 16 ? 4 : B == 6 ? 4 : B, P = (BITS > LATTICE ? 16 : 8) / W;
    static constexpr bool high = B == 3 || B == 6;
};

// fields of plane `pl` of bytes (0, 2) of x, or (1, 3), as two denormals; high: the word of third bits, its plane 0
// belongs to plane 0
template <int BITS> __device__ __forceinline__ uint32_t fields(uint32_t x, uint32_t high, int pl, bool second) {
    constexpr int W = cut<BITS>::W;
    const uint32_t mask = (uint32_t) (((1 << W) - 1) << (W * pl)) * 0x00010001u;
    uint32_t y = (second ? x >> 8 : x) & mask;
    if (BITS == 3) { y |= (second ? high >> (6 - pl) : high << (pl + 2)) & (0x00010001u << (2 * pl + 2)); }
    return y;
}

// 8 neighbouring scales or zeros of the stage, in pairs (0, 2) (1, 3) (4, 6) (5, 7)
__device__ __forceinline__ void read_params(const uint8_t * at, uint32_t (&out)[4]) {
    const uint4 x = *(const uint4 *) at;
    out[0] = even(x.x, x.y);
    out[1] = odd(x.x, x.y);
    out[2] = even(x.z, x.w);
    out[3] = odd(x.z, x.w);
}

// first of the 4 channels of S that thread c contracts in step s
template <int D, int KB> __device__ __forceinline__ int channel_of(int c, int s) {
    constexpr int P = cut<KB>::P, S = D / 16;
    return S < P ? 16 * c + 4 * s : (c + 4 * (s / P)) * 4 * P + s % P * 4; // a word a thread, or half a word
}

// ---------------------------------------------------------------- channels of a warp
// Kernels are made for heads of D channels. WIDE ones (D = 128) take all other heads: the warps of a team walk the same
// cells, each has a slice of D channels, and what they have of the scores is added up in shared memory (team_sum). A
// slice may reach beyond the head. Other heads lose no time by that: every loop here knows its bounds when compiled.
// TURNS: in which teams exchange what they have (team_exchange).
template <int D, bool WIDE_, int TURNS_ = 2> struct slice_of {
    static constexpr bool WIDE = false;
    static constexpr int TURNS = TURNS_;
    static constexpr int n = 1, i = 0, warps = DECODE_WARPS, teams = DECODE_WARPS;
    int team;
    __device__ __forceinline__ slice_of(const kvq_attend_args &, int warp) : team(warp) {}
    static __device__ __forceinline__ int first() { return 0; }                       // channel of the head
    static __device__ __forceinline__ int head(const kvq_attend_args &) { return D; } // channels of a head
    // this channel of the slice is one of the head's
    static __device__ __forceinline__ bool has(int) { return true; }
    // the last n channels of the head instead of others
    static __device__ __forceinline__ int near(int channel, int) { return channel; }
};
template <int D, int TURNS_> struct slice_of<D, true, TURNS_> {
    static constexpr bool WIDE = true;
    static constexpr int TURNS = TURNS_;
    // slices of a head, this one, warps and teams of the block, this one, channels of this slice
    int n, i, warps, teams, team, channels;
    __device__ __forceinline__ slice_of(const kvq_attend_args & a, int warp) {
        n = 1 << a.slices_log2;
        i = warp & (n - 1);
        warps = blockDim.x / 32;
        teams = warps >> a.slices_log2;
        team = warp >> a.slices_log2;
        channels = a.k.head_size - i * D;
    }
    __device__ __forceinline__ int first() const { return i * D; }
    __device__ __forceinline__ int head(const kvq_attend_args & a) const { return a.k.head_size; }
    __device__ __forceinline__ bool has(int channel) const { return channel < channels; }
    // where any number does, so that loads need no branch
    __device__ __forceinline__ int near(int channel, int n) const { return min(channel, channels - n); }
};

// Memory of a warp that a slice beyond the head does not fill: what is there meets queries of 0 and must be numbers.
template <int D, typename X> __device__ __forceinline__ void clear_beyond(const X & of, uint8_t * to, int n_bytes) {
    if (of.has(D - 1)) { return; }
    for (int i = threadIdx.x % 32; i < n_bytes / 16; i += 32) { ((uint4 *) to)[i] = make_uint4(0, 0, 0, 0); }
    __syncwarp();
}

// Warps of a block, at most. WIDE kernels have one block on a multiprocessor: what teams leave each other stays in
// its shared memory, and there are fewer blocks whose sums the last one adds up.
template <bool WIDE, bool MANY_REGISTERS> __host__ __device__ constexpr int most_warps() {
    return !WIDE ? DECODE_WARPS : MANY_REGISTERS ? 8 : 12;
}

// ---------------------------------------------------------------- queries
// Right operands of the scores, f16: of step t the 4 channels from channel_of(c, t) on, of column g. In registers,
// q[t], or in shared memory, where all teams find them: loops over steps then need not be unrolled. A kernel is cold
// each time a model comes to its next layer, and its instructions arrive at 6 bytes a nanosecond.
struct shared_query {
    const uint2 * at; // [step][lane]
};
__device__ __forceinline__ uint2 query_of(const shared_query & q, int t) { return q.at[32 * t]; }
template <int S> __device__ __forceinline__ uint2 query_of(const uint32_t (&q)[S][2], int t) {
    return make_uint2(q[t][0], q[t][1]);
}
template <typename Q> constexpr int steps_at_once = 64; // all
template <> inline constexpr int steps_at_once<shared_query> = 1;

// Waits for the other warps of the team, whose memory before it is then seen.
//
// racecheck reports false hazards in kernels that ran this barrier in a block of two teams or more; with one team a
// block the same code has none. Why they are false:
//   - Barriers are 1 + team, at most 6 teams of two warps or more; barrier 0 is __syncthreads alone. All warps of a
//     team walk the same cells and take the same branches (scores are the same bits in each, team_sum), so that each
//     comes to its barrier equally often.
//   - Every reported pair is a write and a read on two sides of a __syncthreads that no thread can go round: sums of a
//     block's warps (decode_sums, short_sums), written behind one and read behind the next. Between them there is no
//     branch but on what the whole block shares (template parameters, blockIdx, arguments).
//   - In machine code as well: of decode_kernel<128, 36, 36, 0, 0, 1, 2> the writes are STS at 0x5ce0, 0x5d60, 0x5ed0
//     and 0x5ee0, the reads LDS at 0x6540 and 0x6550; BAR.SYNC 0 at 0x6040 has no predicate, and no branch leads past
//     it. The barrier of a team is elsewhere (rotate_columns).
__device__ __forceinline__ void team_barrier(int team, int n_warps) {
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(32 * n_warps) : "memory");
}

// of shared memory, a warp: sums of 64 cells and 8 columns, of a turn; all warps' first turn comes first
constexpr int TEAM_TURN = DECODE_CELLS * DECODE_COLUMNS * 4, TEAM_BYTES = 2 * TEAM_TURN;

// The values of the team's other warps at this thread's place: f(k, values of slice i ^ k), k = 1 .. n - 1. Of two
// turns, which change each time, one barrier is enough: who writes a turn again has passed the barrier of the other
// one, behind everybody's reading. With one turn, which takes half the memory, there is a barrier before writing too.
template <typename X, typename F>
__device__ __forceinline__ void team_exchange(const X & x, uint8_t * all, int & turn, const float (&mine)[16], F && f) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    all += turn * x.warps * TEAM_TURN;
    float4 * const to = (float4 *) (all + warp * TEAM_TURN) + lane;
    if (X::TURNS == 1) { team_barrier(x.team, x.n); }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        to[32 * j] = make_float4(mine[4 * j], mine[4 * j + 1], mine[4 * j + 2], mine[4 * j + 3]);
    }
    team_barrier(x.team, x.n);
#pragma unroll 1
    for (int k = 1; k < x.n; k++) {
        const float4 * from = (const float4 *) (all + (warp ^ k) * TEAM_TURN) + lane;
        float y[16];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float4 v = from[32 * j];
            y[4 * j] = v.x;
            y[4 * j + 1] = v.y;
            y[4 * j + 2] = v.z;
            y[4 * j + 3] = v.w;
        }
        f(k, y);
    }
    if (X::TURNS > 1) { turn ^= 1; }
}

// Scores of all slices, the same bits in each: a + b and (a + b) + (c + d), whichever slice is first.
template <typename X, int J>
__device__ __forceinline__ void team_sum(const X & x, uint8_t * all, int & turn, float (&s)[J][4]) {
    if (x.n == 1) { return; }
    float mine[16], pair[16];
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            mine[4 * j + e] = j < J ? s[j < J ? j : 0][e] : 0.0f;
            pair[4 * j + e] = 0.0f;
        }
    }
    team_exchange(x, all, turn, mine, [&](int k, const float (&y)[16]) {
#pragma unroll
        for (int j = 0; j < 16; j++) { (k == 1 ? mine[j] : pair[j]) += y[j]; }
    });
#pragma unroll
    for (int j = 0; j < J; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) { s[j][e] = mine[4 * j + e] + pair[4 * j + e]; }
    }
}

// ---------------------------------------------------------------- the stage: 64 cells of one KV head
//   codes of K    [tile of 16 cells: 4][chunk][16 bytes: 4]      a piece of 16 bytes is xored with its tile
//   codes of V    [tile of 16 channels][chunk][16 bytes: 4]      and here with its pair of chunks, so that reads find
//       all banks
//   (each followed by the part of third bits, if any)
//   K parameters  f16 [part][scale, zero][D]
//   V parameters  f16 [group][scale, zero][64]
// 8-bit parameters arrive in their place in the same order, one byte each, followed by 8 bytes of ranges a part (K)
// or half (V), and are turned into f16 once they are here, in memory of the warp's own that all of its stages
// share.
template <int D, int KB, int VB> struct stage_map {
    static constexpr int WK = cut<KB>::W, WV = cut<VB>::W;
    static constexpr int K = 0, K_HIGH = K + 4 * (D * WK / 32) * 64,
                         V = K_HIGH + (cut<KB>::high ? 4 * (D / 32) * 64 : 0);
    static constexpr int V_HIGH = V + D / 16 * 2 * WV * 64, K_PARAMS = V_HIGH + (cut<VB>::high ? D / 16 * 2 * 64 : 0);
};

template <int D, int KB, int VB> void lay_out_stage(kvq_attend_args & a) {
    const int keys = 4 * D << a.k_parts_log2, values = D * 256 >> a.v_group_log2;
    const bool bytes = a.k.scale || a.v.scale;
    a.stage_v_params = keys;
    a.stage_raw_v = bytes ? (keys / 2 + (8 << a.k_parts_log2) + 15) & ~15 : keys;
    a.stage_bytes = stage_map<D, KB, VB>::K_PARAMS + a.stage_raw_v + (bytes ? values / 2 + 16 : values);
    a.stage_wide = bytes ? keys + values : 0;
}

__device__ __forceinline__ void copy8(uint32_t to, const void * from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(uint32_t to, const void * from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// 32 f16 rows from row `first` on
__device__ __forceinline__ void prefetch_rows(const void * rows, size_t first, int stride) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"((const uint16_t *) rows + first * stride), "r"(64 * stride)
        : "memory");
#endif
}
// the first part of what was asked for is closed by copies_part; first_copies_done waits for all but the part
// closed last
__device__ __forceinline__ void copies_part() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void first_copies_done() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncwarp();
}
__device__ __forceinline__ void copies_done() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
}

// Half a warp asks for what half a unit holds: lane r of 16 for pieces r + 16k of 16 bytes of every kind. codes, t:
// of this lane's half, of cell t on in the page. D: of a slice, here and below; n_chunks: of a tile as it lies in the
// page.
template <int D, int W, typename X>
__device__ __forceinline__ void copy_keys(const X & of, uint32_t to, const uint8_t * codes, int t, int n_chunks) {
    constexpr int N = D * W / 32 * 4; // pieces of a tile
    const int r = threadIdx.x % 16, half = threadIdx.x / 16 % 2, step = X::WIDE ? n_chunks * 4 : N,
              left = step - of.i * N, piece = N < 16 ? r % N : r; // both tiles of the half at once when N < 16
    codes += ((t / 16 + (N < 16 ? r / N : 0)) * step + of.i * N + piece) * 16;
    to += half * (N * 32);
    if constexpr (N == 4) { // eight lanes
        if (r < 8 && (!X::WIDE || piece < left)) { copy16(to + (r ^ (2 * half + r / 4)) * 16, codes); }
    }
#pragma unroll
    for (int k = 0; k < N / 8; k++) {
        const int tile = 2 * half + (N == 8 ? r / 8 : 16 * k / N), skipped = X::WIDE ? 16 * k / N * (step - N) * 16 : 0;
        if (!X::WIDE || 16 * k % N + piece < left) {
            copy16(to + (r ^ tile) * 16 + k * 256, codes + k * 256 + skipped);
        }
    }
}

template <int D, int W, typename X>
__device__ __forceinline__ void copy_values(
    const X & of, uint32_t to, const uint8_t * codes, int t, int n_chunks, int n_tiles) {
    constexpr int N = 4 * W, TILES = N < 16 ? 16 / N : 1;            // pieces of half a tile; tiles of 16 pieces
    const int r = threadIdx.x % 16, first = of.i * (D / 16) + r / N; // first: tile
    const int chunk = threadIdx.x / 16 % 2 * W + r % N / 4;
    codes += first * n_chunks * 64 + t / 32 * (N * 16) + r % N * 16;
    to += r / N * (N * 32);
    const auto place = [&](int chunk) {
        return chunk / 2 * 128 + ((chunk % 2 * 4 + r % 4) ^ 2 * (chunk / 2 % 4)) * 16;
    };
    const uint32_t to0 = to + place(chunk), to1 = N == 32 ? to + place(chunk + 4) : 0; // 16 further on
#pragma unroll
    for (int k = 0; k < D / 16; k += TILES, codes += TILES * 64 * n_chunks) {
        if (!X::WIDE || first + k < n_tiles) {
            copy16(to0 + k * (N * 32), codes);
            if (N == 32) { copy16(to1 + k * (N * 32), codes + 256); }
        }
    }
}

// 4 channels of a row of queries, which begins with the head; 0 beyond it
template <typename X> __device__ __forceinline__ float4 load_four(const X & of, const float * row, int channel) {
    float4 x = *(const float4 *) (row + of.first() + of.near(channel, 4));
    if (X::WIDE && !of.has(channel)) { x = make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
    return x;
}

// of a slice; a group may reach over some slices (v_slices_log2)
template <int D> __device__ __forceinline__ int first_v_group(const kvq_attend_args & a, int slice) {
    return slice * (D >> a.v_group_log2) >> a.v_slices_log2;
}

// Asks for what a unit holds. page, t: of this lane's half, and its first cell there.
template <int D, int KB, int VB, typename X>
__device__ __forceinline__ void copy_stage(const kvq_attend_args & a, const X & of, uint32_t to, const kvq_page & page,
    int kvh, int t, bool keys, bool values) {
    using map = stage_map<D, KB, VB>;
    const int r = threadIdx.x % 16, half = threadIdx.x / 16 % 2;
    if (keys) {
        const uint8_t *codes = (const uint8_t *) page.k_codes + (size_t) kvh * a.k.nb_codes,
                      *params = (const uint8_t *) page.k_params + (size_t) kvh * a.k.nb_params;
        copy_keys<D, map::WK>(of, to + map::K, codes, t, a.k.n_chunks[0]);
        if constexpr (cut<KB>::high) {
            copy_keys<D, 1>(of, to + map::K_HIGH, codes + a.k.offset[1], t, a.k.n_chunks[1]);
        }
        const uint32_t at = to + map::K_PARAMS;
        const int n = D / 8 << a.k_parts_log2;
#pragma unroll 1
        for (int k = r; k < n; k += 16) { // 8 channels of scales or zeros of a part; one part: half of it
            const int i = half * n + k, part = i / (D / 4), rest = i % (D / 4);
            const int cell = t + (a.k_parts_log2 == 2 ? part % 2 * 16 : 0);
            const int index =
                (rest < D / 8 ? 0 : a.k.np - D) + of.first() + (cell >> a.k_group_log2) * of.head(a) + rest * 8;
            if (X::WIDE && !of.has(rest % (D / 8) * 8)) { continue; }
            if (!a.k.scale) {
                copy16(at + i * 16, params + 2 * index);
            } else {
                copy8(at + i * 8, params + 8 + index);
                if (rest == 0) { copy8(at + (2 * D << a.k_parts_log2) + part * 8, params); }
            }
        }
    }
    if (values) {
        const uint8_t *codes = (const uint8_t *) page.v_codes + (size_t) kvh * a.v.nb_codes,
                      *params = (const uint8_t *) page.v_params + (size_t) kvh * a.v.nb_params;
        copy_values<D, map::WV>(of, to + map::V, codes, t, a.v.n_chunks[0], a.v.n_tiles);
        if constexpr (cut<VB>::high) {
            copy_values<D, 1>(of, to + map::V_HIGH, codes + a.v.offset[1], t, a.v.n_chunks[1], a.v.n_tiles);
        }
        const uint32_t at = to + map::K_PARAMS + a.stage_raw_v;
        const int n = 8 * D >> a.v_group_log2;
#pragma unroll 1
        for (int k = r; k < n; k += 16) { // 8 cells of scales or zeros of a group
            const int i = k / 4 * 8 + half * 4 + k % 4, group = k / 8 + (X::WIDE ? first_v_group<D>(a, of.i) : 0),
                      index = (k / 4 % 2 ? a.v.np : 0) + group * a.v.n_cells + t + k % 4 * 8;
            if (X::WIDE && group >= a.v_groups) { continue; }
            if (!a.v.scale) {
                copy16(at + i * 16, params + 2 * index);
            } else {
                copy8(at + i * 8, params + 8 + index);
                if (k == 0) { copy8(at + n * 16 + half * 8, params); }
            }
        }
    }
}

template <int D, int KB, int VB, typename X>
__device__ __noinline__ void copy_stage_late(
    const kvq_attend_args & a, const X of, uint32_t to, const kvq_page & page, int kvh, int t, bool keys, bool values) {
    copy_stage<D, KB, VB>(a, of, to, page, kvh, t, keys, values);
}

// 8-bit parameters that have arrived
__device__ __forceinline__ void widen(const uint8_t * raw, int i, const uint8_t * ranges, uint8_t * out) {
    const __half2 range = as_half2(*(const uint32_t *) ranges), low = __half2half2(range.x),
                  step = __half2half2(range.y), magic = __float2half2_rn(1024.0f);
    const uint2 x = *(const uint2 *) (raw + 8 * i);
    uint32_t y[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        y[j] = __byte_perm(j < 2 ? x.x : x.y, 0x64646464u, j % 2 ? 0x4342 : 0x4140);
        y[j] = as_u32(__hfma2(__hsub2(as_half2(y[j]), magic), step, low));
    }
    *(uint4 *) (out + 16 * i) = make_uint4(y[0], y[1], y[2], y[3]);
}

// to: of all parameters in f16
template <int D, int KB, int VB>
__device__ __forceinline__ void widen_stage(
    const kvq_attend_args & a, const uint8_t * stage, uint8_t * to, bool keys = true, bool values = true) {
    const uint8_t *k = stage + stage_map<D, KB, VB>::K_PARAMS, *v = k + a.stage_raw_v;
    const int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int i = lane; keys && i < (D / 4 << a.k_parts_log2); i += 32) {
        const int part = i / (D / 4), zero = i % (D / 4) / (D / 8);
        widen(k, i, k + (2 * D << a.k_parts_log2) + part * 8 + zero * 4, to);
    }
    const int n = 16 * D >> a.v_group_log2;
#pragma unroll 4
    for (int i = lane; values && i < n; i += 32) {
        widen(v, i, v + n * 8 + i / 4 % 2 * 8 + i / 8 % 2 * 4, to + a.stage_v_params);
    }
    __syncwarp();
}

} // namespace

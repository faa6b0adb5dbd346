// Decode attention, cells that were picked: their exact rows lie in the second tier, most often in the host's memory. A
// block of these takes some of the picks of its query rows, keys and values at once, and leaves the same sums as blocks
// of near cells, which work meanwhile. Loops stay loops here: code is cold each time.
#pragma once

#include "decode_merge.cuh"
#include "cuda/far_unit.cuh"

namespace {

constexpr int PICK_SLOTS = 16; // picks that a block has in shared memory

__host__ __device__ __forceinline__ int picked_channels(const kvq_attend_args & a) {
    return (a.v.head_size + 7) / 8 * 8;
}
// behind decode_sums: queries, logits, cells, far rows of keys and values, values as f16; with what lies before them
template <typename S> __host__ __device__ __forceinline__ int picked_at() { return (sizeof(S) + 15) / 16 * 16; }
template <typename S> __host__ __device__ __forceinline__ int picked_bytes(const kvq_attend_args & a) {
    return picked_at<S>() + DECODE_COLUMNS * (picked_channels(a) + PICK_SLOTS) * 4 +
        PICK_SLOTS * (4 + a.far_row_k + a.far_row_v + 2 * picked_channels(a));
}

// Of the columns of a block whose rows begin at row0. WARPS: as the struct has; memory: behind picked_at. With
// here_rows every token reads the cells that are kept, from the device's own copy of their rows (far_buffer.h).
template <int D, int WARPS, typename X>
__device__ __noinline__ void sum_picked(const kvq_attend_args & a, const X of, decode_sums<D, WARPS> & s,
    uint8_t * memory, int is, int kvh, int row0, int n_rows) {
    const auto & st = a.stream[is];
    const int n_threads = of.warps * 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32, size = of.head(a),
              units = (size + 7) / 8;
    float *const queries = (float *) memory, *const logits = queries + DECODE_COLUMNS * 8 * units; // [column][slot]
    int32_t * const cells = (int32_t *) (logits + DECODE_COLUMNS * PICK_SLOTS);                    // [slot]
    uint8_t * const rows = (uint8_t *) (cells + PICK_SLOTS);                                       // [slot][key, value]
    uint16_t * const values = (uint16_t *) (rows + PICK_SLOTS * (a.far_row_k + a.far_row_v));
    const bool kept = a.here_rows > 0;
    const int first = row_token(a, row0), n_tokens = row_token(a, row0 + n_rows - 1) - first + 1,
              n_picks = kept ? a.top : n_tokens * a.top, nb_row = a.far_row_k + a.far_row_v;
    const int piece = a.far_row_k % 16 == 0 ? 16 : 8; // bytes of a copy
    // A lane knows where a slot's rows lie, all of a warp's are on their way at once.
    const auto ask = [&](int at) {
        const int i = at + lane;
        int cell = -1;
        const uint8_t *k = nullptr, *v = nullptr;
        if (lane < PICK_SLOTS && i < n_picks) {
            const size_t token = kept ? 0 : first + i / a.top;
            cell = __ldcg(st.picks + (token * a.n_head_kv + kvh) * a.top + i % a.top);
        }
        if (kept && cell >= min(a.n_kv, a.n_pages * a.page_cells)) { cell = -1; } // the cache has become shorter
        if (kept && cell >= 0) {
            const int slot = __ldcg((const int32_t *) st.here + kvh * a.top + i);
            k = st.here + a.here_rows + ((size_t) kvh * a.top + slot) * nb_row;
            v = k + a.far_row_k;
        } else if (cell >= 0) {
            const int p = cell / a.page_cells;
            const size_t row = (size_t) kvh * a.page_cells + cell % a.page_cells;
            k = (const uint8_t *) st.k_rows[p] + row * a.far_row_k;
            v = (const uint8_t *) st.v_rows[p] + row * a.far_row_v;
        }
        if (warp == 0 && lane < PICK_SLOTS) { cells[lane] = cell; }
#pragma unroll 1
        for (int slot = warp; slot < PICK_SLOTS; slot += of.warps) {
            const uint8_t *const key = (const uint8_t *) __shfl_sync(~0u, (unsigned long long) k, slot),
                                 *const value = (const uint8_t *) __shfl_sync(~0u, (unsigned long long) v, slot);
            if (!key) { continue; }
            const uint32_t to = (uint32_t) __cvta_generic_to_shared(rows + (size_t) slot * nb_row);
#pragma unroll 1
            for (int j = lane * piece; j < nb_row; j += 32 * piece) {
                const uint8_t * from = j < a.far_row_k ? key + j : value + (j - a.far_row_k);
                if (piece == 16) {
                    copy16(to + j, from);
                } else {
                    copy8(to + j, from);
                }
            }
        }
    };
    int at = (int) blockIdx.x * PICK_SLOTS;
    ask(at);
#pragma unroll 1
    for (int i = threadIdx.x; i < (int) (sizeof(s.o) / sizeof(float)); i += n_threads) { (&s.o[0][0][0])[i] = 0.0f; }
#pragma unroll 1
    for (int i = threadIdx.x; i < WARPS * DECODE_COLUMNS; i += n_threads) {
        (&s.m[0][0])[i] = -INFINITY;
        (&s.l[0][0])[i] = (&s.l_sealed[0][0])[i] = 0.0f;
        s.as_is[i % WARPS] = true;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < DECODE_COLUMNS * 8 * units; i += n_threads) {
        const int row = row0 + min(i / (8 * units), n_rows - 1), channel = i % (8 * units);
        queries[i] = channel < size
            ? __ldg(st.q + row_token(a, row) * a.q_stride_token + row_head(a, kvh, row) * a.q_stride_head + channel)
            : 0.0f;
    }
#pragma unroll 1
    for (; at < n_picks; at += a.n_picking * PICK_SLOTS) {
        if (at != (int) blockIdx.x * PICK_SLOTS) { ask(at); }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < n_rows * 32; i += n_threads) { // two threads: a slot and column
            const int slot = lane % PICK_SLOTS, c = i / 32, cell = cells[slot], row = row0 + c,
                      head = row_head(a, kvh, row);
            const bool is_here = cell >= 0 && (kept || first + (at + slot) / a.top == row_token(a, row));
            float sum = 0.0f, bias = 0.0f;
            if (is_here) {
                if (st.mask) {
                    bias = alibi_slope(a, head) *
                        __half2float(
                            st.mask[row_token(a, row) * a.mask_stride_token + head * a.mask_stride_head + cell]);
                }
                const uint8_t * const key = rows + (size_t) slot * nb_row;
                const float * const q = queries + c * 8 * units;
#pragma unroll 1
                for (int j = lane / PICK_SLOTS; j < units; j += 2) { // from another unit on in each slot: other banks
                    const int u = j + slot < units ? j + slot : (j + slot) % units;
                    uint16_t y[8];
                    unit_values(a.far_format, load_unit(a.far_format, size, key, u), y);
#pragma unroll
                    for (int e = 0; e < 8; e++) { sum = fmaf(q[8 * u + e], f16_bits_to_f32(y[e]), sum); }
                }
            }
            float logit = a.scale * (sum + __shfl_xor_sync(~0u, sum, PICK_SLOTS));
            if (a.softcap != 0.0f) { logit = a.softcap * tanhf(logit / a.softcap); }
            if (lane < PICK_SLOTS) { logits[c * PICK_SLOTS + slot] = is_here ? (logit + bias) * LOG2E : -INFINITY; }
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < PICK_SLOTS * units; i += n_threads) { // zeros where nothing was picked
            const int slot = i / units, u = i % units;
            uint16_t y[8] = {};
            if (cells[slot] >= 0) {
                unit_values(
                    a.far_format, load_unit(a.far_format, size, rows + (size_t) slot * nb_row + a.far_row_k, u), y);
            }
            *(uint4 *) (values + 8 * i) = as_uint4(y);
        }
        __syncthreads();
        const int channel = of.i * D + lane % (D / 4) * 4;
#pragma unroll 1
        for (int c = of.team; c < n_rows; c += of.teams) { // a team: whole columns
            const float x = lane < PICK_SLOTS ? logits[c * PICK_SLOTS + lane] : -INFINITY, before = s.m[warp][c];
            float top = fmaxf(x, before);
            for (int d = 16; d; d /= 2) { top = fmaxf(top, __shfl_xor_sync(~0u, top, d)); }
            if (top == -INFINITY) { continue; }
            const float p = exp2f(x - top), old = exp2f(before - top);
            float l = p;
            for (int d = 16; d; d /= 2) { l += __shfl_xor_sync(~0u, l, d); }
            float4 o = *(const float4 *) &s.o[warp][c][lane % (D / 4) * 4];
            o = make_float4(o.x * old, o.y * old, o.z * old, o.w * old);
#pragma unroll 4
            for (int slot = 0; slot < PICK_SLOTS; slot++) {
                const float f = __shfl_sync(~0u, p, slot);
                uint2 y = make_uint2(0, 0);
                if (channel < size) { y = *(const uint2 *) (values + (size_t) slot * units * 8 + channel); }
                add(o, f,
                    make_float4(f16_bits_to_f32((uint16_t) y.x), f16_bits_to_f32((uint16_t) (y.x >> 16)),
                        f16_bits_to_f32((uint16_t) y.y), f16_bits_to_f32((uint16_t) (y.y >> 16))));
            }
            __syncwarp();
            if (lane < D / 4) { *(float4 *) &s.o[warp][c][4 * lane] = o; }
            if (lane == 0) {
                s.l[warp][c] = s.l[warp][c] * old + l;
                s.m[warp][c] = top;
            }
            __syncwarp();
        }
        __syncthreads();
    }
    __syncthreads();
}

} // namespace

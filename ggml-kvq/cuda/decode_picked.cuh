// Decode attention, cells that were picked: their exact rows lie in the second tier, most often in the host's memory. A
// block of these takes some of the picks of its query rows, keys and values at once, and leaves the same sums as blocks
// of near cells, which work meanwhile.
#pragma once

#include "decode_merge.cuh"
#include "far_unit.cuh"

namespace {

constexpr int PICK_SLOTS = 16; // picks that a block has in shared memory

// behind decode_sums: logits, then values as f16; with what lies before them
template <typename S> __host__ __device__ __forceinline__ int picked_at() { return (sizeof(S) + 15) / 16 * 16; }
template <typename S> __host__ __device__ __forceinline__ int picked_bytes(const kvq_attend_args & a) {
    return picked_at<S>() + PICK_SLOTS * (DECODE_COLUMNS * 4 + (a.v.head_size + 7) / 8 * 16);
}

// Of the columns of a block whose rows begin at row0. WARPS: as the struct has; memory: behind picked_at.
template <int D, int WARPS, typename X>
__device__ void sum_picked(const kvq_attend_args & a, const X & of, decode_sums<D, WARPS> & s, uint8_t * memory, int is,
    int kvh, int row0, int n_rows) {
    // units of 8 channels of a lane, of keys and values; rows of a warp that are on their way at once
    constexpr int UNITS = X::WIDE ? 4 : 1, AT_ONCE = X::WIDE ? 1 : PICK_SLOTS / WARPS;
    const auto & st = a.stream[is];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, size = of.head(a), units = (size + 7) / 8;
    float * const logits = (float *) memory; // [slot][column]
    uint16_t * const values = (uint16_t *) (logits + PICK_SLOTS * DECODE_COLUMNS);
    const int first = row_token(a, row0), n_tokens = row_token(a, row0 + n_rows - 1) - first + 1,
              n_picks = n_tokens * a.top;
    float o[DECODE_COLUMNS][4] = {}, m[DECODE_COLUMNS], l[DECODE_COLUMNS] = {};
#pragma unroll
    for (int c = 0; c < DECODE_COLUMNS; c++) { m[c] = -INFINITY; }
    const int channel = of.i * D + lane % (D / 4) * 4;
    for (int at = (int) blockIdx.x * PICK_SLOTS; at < n_picks; at += a.n_picking * PICK_SLOTS) {
        for (int s0 = warp; s0 < PICK_SLOTS; s0 += of.warps * AT_ONCE) {
            far_unit x[AT_ONCE][UNITS];
            int cell[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int i = at + s0 + j * of.warps, token = first + i / a.top;
                cell[j] = i < n_picks && s0 + j * of.warps < PICK_SLOTS
                    ? __ldg(st.picks + ((size_t) token * a.n_head_kv + kvh) * a.top + i % a.top)
                    : -1;
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) { // all are on their way at once: keys, then values
                if (cell[j] < 0) { continue; }
                const int p = cell[j] / a.page_cells;
                const size_t row = (size_t) kvh * a.page_cells + cell[j] % a.page_cells;
                const uint8_t *k = (const uint8_t *) st.k_rows[p] + row * a.far_row_k,
                              *v = (const uint8_t *) st.v_rows[p] + row * a.far_row_v;
#pragma unroll
                for (int i = 0; i < UNITS; i++) {
                    const int u = lane + 32 * i;
                    if (u < 2 * units) {
                        x[j][i] = load_unit(a.far_format, size, u < units ? k : v, u < units ? u : u - units);
                    }
                }
            }
            float keys[AT_ONCE][UNITS][8];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int slot = s0 + j * of.warps;
#pragma unroll
                for (int i = 0; i < UNITS; i++) {
                    const int u = lane + 32 * i;
                    uint16_t y[8] = {};
                    if (cell[j] >= 0 && u < 2 * units) { unit_values(a.far_format, x[j][i], y); }
                    if (u >= units && u < 2 * units && slot < PICK_SLOTS) { // zeros where nothing was picked
                        *(uint4 *) (values + ((size_t) slot * units + u - units) * 8) = as_uint4(y);
                    }
#pragma unroll
                    for (int e = 0; e < 8; e++) { keys[j][i][e] = u < units ? f16_bits_to_f32(y[e]) : 0.0f; }
                }
            }
            for (int c = 0; c < DECODE_COLUMNS; c++) {
                const int row = row0 + min(c, n_rows - 1), token = row_token(a, row), head = row_head(a, kvh, row);
                const float * q = st.q + token * a.q_stride_token + head * a.q_stride_head;
                float sum[AT_ONCE] = {};
#pragma unroll
                for (int i = 0; i < UNITS; i++) {
                    const int u = lane + 32 * i;
#pragma unroll
                    for (int e = 0; e < 8; e += 4) {
                        if (u >= units || 8 * u + e >= size) { continue; }
                        const float4 y = __ldg((const float4 *) (q + 8 * u + e));
#pragma unroll
                        for (int j = 0; j < AT_ONCE; j++) {
                            sum[j] += y.x * keys[j][i][e] + y.y * keys[j][i][e + 1] + y.z * keys[j][i][e + 2] +
                                y.w * keys[j][i][e + 3];
                        }
                    }
                }
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) {
                    const int slot = s0 + j * of.warps;
                    for (int d = 16; d; d /= 2) { sum[j] += __shfl_xor_sync(~0u, sum[j], d); }
                    if (lane || slot >= PICK_SLOTS) { continue; }
                    float logit = -INFINITY;
                    if (cell[j] >= 0 && c < n_rows && first + (at + slot) / a.top == token) {
                        logit = a.scale * sum[j];
                        if (a.softcap != 0.0f) { logit = a.softcap * tanhf(logit / a.softcap); }
                        if (st.mask) {
                            logit += alibi_slope(a, head) *
                                __half2float(
                                    st.mask[token * a.mask_stride_token + head * a.mask_stride_head + cell[j]]);
                        }
                    }
                    logits[slot * DECODE_COLUMNS + c] = logit * LOG2E;
                }
            }
        }
        __syncthreads();
        float p[DECODE_COLUMNS]; // of slot `lane`
#pragma unroll
        for (int c = 0; c < DECODE_COLUMNS; c++) {
            const float x = lane < PICK_SLOTS ? logits[lane * DECODE_COLUMNS + c] : -INFINITY;
            float top = x;
            for (int d = 16; d; d /= 2) { top = fmaxf(top, __shfl_xor_sync(~0u, top, d)); }
            top = fmaxf(top, m[c]);
            const float old = m[c] == -INFINITY ? 0.0f : exp2f(m[c] - top);
            p[c] = x == -INFINITY ? 0.0f : exp2f(x - top);
            m[c] = top;
            l[c] = l[c] * old + (lane % of.teams == of.team ? p[c] : 0.0f);
#pragma unroll
            for (int i = 0; i < 4; i++) { o[c][i] *= old; }
        }
        for (int slot = of.team; slot < PICK_SLOTS; slot += of.teams) {
            float v[4] = {};
            if (channel < size) {
                const uint2 y = *(const uint2 *) (values + (size_t) slot * units * 8 + channel);
                v[0] = f16_bits_to_f32((uint16_t) y.x);
                v[1] = f16_bits_to_f32((uint16_t) (y.x >> 16));
                v[2] = f16_bits_to_f32((uint16_t) y.y);
                v[3] = f16_bits_to_f32((uint16_t) (y.y >> 16));
            }
#pragma unroll
            for (int c = 0; c < DECODE_COLUMNS; c++) {
                const float x = __shfl_sync(~0u, p[c], slot);
#pragma unroll
                for (int i = 0; i < 4; i++) { o[c][i] = fmaf(x, v[i], o[c][i]); }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int c = 0; c < DECODE_COLUMNS; c++) {
        for (int d = 16; d; d /= 2) { l[c] += __shfl_xor_sync(~0u, l[c], d); }
        if (lane < D / 4) { *(float4 *) &s.o[warp][c][4 * lane] = make_float4(o[c][0], o[c][1], o[c][2], o[c][3]); }
        if (lane == 0) {
            s.m[warp][c] = l[c] > 0.0f ? m[c] : -INFINITY;
            s.l[warp][c] = l[c];
            s.l_sealed[warp][c] = 0.0f;
        }
    }
    if (lane == 0) { s.as_is[warp] = true; }
    __syncthreads();
}

} // namespace

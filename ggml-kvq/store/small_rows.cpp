#include "small_rows.h"
#include "state_blocks.h"

#include "base/f16.h"
#include "types/lattice.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

constexpr int GROUP = 64;

int group_at(int width, int at) { return std::min(GROUP, width - at); }

uint16_t to_f16(float x) { return kvq_f32_to_f16(std::min(std::max(x, -65504.0f), 65504.0f)); }

} // namespace

size_t kvq_small_nb(int width, int bits) {
    size_t nb = 0;
    for (int at = 0; at < width; at += GROUP) { nb += 2 + (size_t) (group_at(width, at) * bits + 7) / 8; }
    return nb;
}

void kvq_small_put(const uint16_t * row, int width, int bits, uint8_t * out) {
    const int half = 1 << (bits - 1);
    float x[GROUP];
    for (int at = 0; at < width; at += GROUP) {
        const int n = group_at(width, at);
        float most = 0.0f;
        for (int i = 0; i < n; i++) { x[i] = kvq_f16_to_f32(row[at + i]); }
        kvq_hadamard(n, x);
        for (int i = 0; i < n; i++) { most = std::max(most, std::fabs(x[i])); }
        const uint16_t h = to_f16(most / ((float) half - 0.5f));
        const float scale = kvq_f16_to_f32(h), to_codes = scale > 0.0f ? 1.0f / scale : 0.0f;
        memcpy(out, &h, 2);
        out += 2;
        uint32_t waiting = 0;
        int n_waiting = 0;
        for (int i = 0; i < n; i++) {
            const float c = std::floor(x[i] * to_codes) + (float) half, top = (float) (2 * half - 1);
            waiting |= (uint32_t) (c > 0.0f ? (c < top ? c : top) : 0.0f) << n_waiting;
            for (n_waiting += bits; n_waiting >= 8; n_waiting -= 8, waiting >>= 8) { *out++ = (uint8_t) waiting; }
        }
        if (n_waiting) { *out++ = (uint8_t) waiting; }
    }
}

void kvq_small_get(const uint8_t * in, int width, int bits, uint16_t * row) {
    const int half = 1 << (bits - 1);
    float x[GROUP];
    for (int at = 0; at < width; at += GROUP) {
        const int n = group_at(width, at);
        uint16_t h;
        memcpy(&h, in, 2);
        in += 2;
        const float scale = kvq_f16_to_f32(h);
        uint32_t waiting = 0;
        int n_waiting = 0;
        for (int i = 0; i < n; i++) {
            for (; n_waiting < bits; n_waiting += 8) { waiting |= (uint32_t) *in++ << n_waiting; }
            x[i] = scale * ((float) (waiting & (uint32_t) (2 * half - 1)) + 0.5f - (float) half);
            waiting >>= bits;
            n_waiting -= bits;
        }
        kvq_hadamard(n, x);
        for (int i = 0; i < n; i++) { row[at + i] = to_f16(x[i]); }
    }
}

static size_t nb_before(bool has_position) { return 2 + (has_position ? 4 : 0); }

int kvq_lone_bits(int width, size_t nb, bool has_position) {
    int bits = KVQ_SMALL_MOST;
    while (bits >= KVQ_SMALL_LEAST && nb_before(has_position) + kvq_small_nb(width, bits) > nb) { bits--; }
    return bits < KVQ_SMALL_LEAST ? 0 : bits;
}

static uint16_t lone_sum(const uint8_t * row, size_t nb, uint32_t seed) {
    const uint32_t sum = kvq_crc32(seed ^ 0x6b76726fu, row + 2, nb - 2);
    return (uint16_t) (sum ^ sum >> 16);
}

void kvq_lone_put(const uint16_t * row, int width, size_t nb, const int32_t * pos, uint32_t seed, uint8_t * out) {
    memset(out, 0, nb);
    if (pos) { memcpy(out + 2, pos, 4); }
    kvq_small_put(row, width, kvq_lone_bits(width, nb, pos), out + nb_before(pos));
    const uint16_t sum = lone_sum(out, nb, seed);
    memcpy(out, &sum, 2);
}

bool kvq_lone_get(const uint8_t * in, int width, size_t nb, int32_t * pos, uint32_t seed, uint16_t * row) {
    uint16_t sum;
    memcpy(&sum, in, 2);
    if (sum != lone_sum(in, nb, seed)) { return false; }
    if (pos) { memcpy(pos, in + 2, 4); }
    kvq_small_get(in + nb_before(pos), width, kvq_lone_bits(width, nb, pos), row);
    return true;
}

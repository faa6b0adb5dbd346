#include "tags.h"

static uint32_t check_of(uint32_t pos) { return (pos ^ 0x5bd1e995u) * 0x9e3779b1u; }

static size_t channel_at(const kvq_lane_layout & l, int c, size_t head_stride) {
    return (size_t) (c / l.codec.head_size) * head_stride + (size_t) (c % l.codec.head_size);
}

static uint64_t tag_bits(const kvq_lane_layout & l, const uint16_t * row, size_t head_stride) {
    uint64_t bits = 0;
    for (int c = 0; c < KVQ_TAG_CHANNELS; c++) { bits |= (uint64_t) (row[channel_at(l, c, head_stride)] & 1) << c; }
    return bits;
}

static void put_bits(const kvq_lane_layout & l, uint16_t * row, size_t head_stride, uint64_t bits) {
    for (int c = 0; c < KVQ_TAG_CHANNELS; c++) {
        uint16_t & x = row[channel_at(l, c, head_stride)];
        x = (uint16_t) ((x & ~1) | (bits >> c & 1));
    }
}

int32_t kvq_tag_get(const kvq_lane_layout & l, const uint16_t * row, size_t head_stride) {
    const uint64_t bits = tag_bits(l, row, head_stride);
    const uint32_t pos = (uint32_t) bits;
    return (uint32_t) (bits >> 32) == check_of(pos) && pos < 1u << 26 ? (int32_t) pos : -1;
}

void kvq_tag_put(const kvq_lane_layout & l, uint16_t * row, size_t head_stride, int32_t pos) {
    put_bits(l, row, head_stride, (uint64_t) check_of((uint32_t) pos) << 32 | (uint32_t) pos);
}

// time in bits 0..20, row and column less time in 10 bits each, bit 41 set; above them the check
constexpr int TIME_BITS = 21, SIDE_BITS = 10, PLACE_BITS = TIME_BITS + 2 * SIDE_BITS + 1;

static uint64_t place_check(uint64_t code) { return code * 0x9e3779b97f4a7c15u >> PLACE_BITS << PLACE_BITS; }

static uint64_t place_bits(const kvq_rotor::place_t & at) {
    const int32_t half = 1 << (SIDE_BITS - 1), down = at[1] - at[0] + half, right = at[2] - at[0] + half;
    if (at[0] < 0 || at[0] >> TIME_BITS || down < 0 || down >> SIDE_BITS || right < 0 || right >> SIDE_BITS || at[3]) {
        return 0; // no bits of any place
    }
    const uint64_t sides = (uint64_t) right << SIDE_BITS | (uint64_t) down;
    const uint64_t code = (uint64_t) 1 << (PLACE_BITS - 1) | sides << TIME_BITS | (uint64_t) at[0];
    return code | place_check(code);
}

static bool place_from(uint64_t bits, kvq_rotor::place_t & at) {
    const uint64_t code = bits & (((uint64_t) 1 << PLACE_BITS) - 1);
    if (!(code >> (PLACE_BITS - 1)) || bits - code != place_check(code)) { return false; }
    const int32_t half = 1 << (SIDE_BITS - 1), side = (1 << SIDE_BITS) - 1,
                  t = (int32_t) (code & ((1 << TIME_BITS) - 1));
    const int32_t sides = (int32_t) (code >> TIME_BITS & ((1 << 2 * SIDE_BITS) - 1));
    at = { t, t + (sides & side) - half, t + (sides >> SIDE_BITS) - half, 0 };
    return true;
}

void kvq_tags_leave(const kvq_lane_layout & l, const kvq_rotor & rotor, uint16_t * rows, int n) {
    const size_t D = (size_t) l.codec.head_size;
    kvq_rotor::place_t at;
    for (int t = 0; t < n && rotor.first(); t++, rows += D * l.n_head) {
        if (!rotor.place_of(kvq_tag_get(l, rows, D), at)) { continue; }
        if (const uint64_t bits = place_bits(at)) {
            put_bits(l, rows, D, bits);
        } else {
            kvq_tag_put(l, rows, D, 0);
        }
    }
}

void kvq_tags_enter(const kvq_lane_layout & l, kvq_rotor & rotor, uint16_t * rows, int n) {
    const size_t D = (size_t) l.codec.head_size;
    kvq_rotor::place_t at;
    for (int t = 0; t < n && rotor.first(); t++, rows += D * l.n_head) {
        const int32_t text = kvq_tag_get(l, rows, D);
        if (text >= 0 ? text > rotor.first() - 128 : place_from(tag_bits(l, rows, D), at)) {
            kvq_tag_put(l, rows, D, rotor.place(text < 0 ? at : kvq_rotor::place_t{ text, text, text, 0 }));
        }
    }
}

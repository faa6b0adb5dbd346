#include "tags.h"

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
            kvq_tag_put_bits(l, rows, D, bits);
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
        if (text >= 0 ? text > rotor.first() - 128 : place_from(kvq_tag_bits(l, rows, D), at)) {
            kvq_tag_put(l, rows, D, rotor.place(text < 0 ? at : kvq_rotor::place_t{ text, text, text, 0 }));
        }
    }
}

#include "tags.h"

#include "base/constants.h"
#include "types/types.h"

static uint32_t check_of(uint32_t pos) { return (pos ^ 0x5bd1e995u) * 0x9e3779b1u; }

static size_t channel_at(const kvq_lane_layout & l, int c, size_t head_stride) {
    return (size_t) (c / l.codec.head_size) * head_stride + (size_t) (c % l.codec.head_size);
}

// The first channels lie side by side: they are a bit stream as images have it.
static bool is_one_run(const kvq_lane_layout & l, size_t head_stride) {
    return l.codec.head_size >= KVQ_TAG_CHANNELS || head_stride == (size_t) l.codec.head_size;
}

uint64_t kvq_tag_bits(const kvq_lane_layout & l, const uint16_t * row, size_t head_stride) {
    uint64_t bits = 0;
    if (is_one_run(l, head_stride)) {
        kvq_image_take(KVQ_TAG_CHANNELS, row, 0, sizeof(bits), &bits);
        return bits;
    }
    for (int c = 0; c < KVQ_TAG_CHANNELS; c++) { bits |= (uint64_t) (row[channel_at(l, c, head_stride)] & 1) << c; }
    return bits;
}

void kvq_tag_put_bits(const kvq_lane_layout & l, uint16_t * row, size_t head_stride, uint64_t bits) {
    if (is_one_run(l, head_stride)) {
        kvq_image_put(KVQ_TAG_CHANNELS, row, 0, sizeof(bits), &bits);
        return;
    }
    for (int c = 0; c < KVQ_TAG_CHANNELS; c++) {
        uint16_t & x = row[channel_at(l, c, head_stride)];
        x = (uint16_t) ((x & ~1) | (bits >> c & 1));
    }
}

int32_t kvq_tag_get(const kvq_lane_layout & l, const uint16_t * row, size_t head_stride) {
    const uint64_t bits = kvq_tag_bits(l, row, head_stride);
    const uint32_t pos = (uint32_t) bits;
    return (uint32_t) (bits >> 32) == check_of(pos) && pos < 1u << 26 ? (int32_t) pos : -1;
}

void kvq_tag_put(const kvq_lane_layout & l, uint16_t * row, size_t head_stride, int32_t pos) {
    kvq_tag_put_bits(l, row, head_stride, (uint64_t) check_of((uint32_t) pos) << 32 | (uint32_t) pos);
}

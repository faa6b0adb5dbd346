// The table of block types, shaped like ggml's own traits: bytes, encode, decode, image.
#pragma once

#include "ggml-kvq.h"

#include <cstddef>
#include <cstdint>

// A mark (store/mark.h) of a saved state takes so many values, in rows at the beginning of a page and in as many at
// its end.
constexpr int KVQ_MARK_BITS = 192;
static inline int kvq_mark_rows(int head_size) { return (KVQ_MARK_BITS + head_size - 1) / head_size; }
static inline bool kvq_mark_covers(const kvq_codec & c, size_t i) { // value i of a head of the page
    const size_t last = (size_t) (c.n_cells - kvq_mark_rows(c.head_size)) * (size_t) c.head_size;
    return i < (size_t) KVQ_MARK_BITS || (i >= last && i < last + (size_t) KVQ_MARK_BITS);
}

// Low mantissa bits of a value that may be overwritten without changing its code: `n` in general, one more where a
// mark may be.
struct kvq_low_bits {
    int n = 0;
    bool marked = false;
    uint16_t mask(const kvq_codec & c, size_t i) const {
        return (uint16_t) ((1 << (n + (marked && kvq_mark_covers(c, i)))) - 1);
    }
};

typedef void (*kvq_encode_function)(const kvq_codec & c, const uint16_t * rows, const uint8_t * valid,
    const void * shared, void * codes, void * params);

struct kvq_type_traits {
    kvq_type type;
    const char * name;
    const char * (*refuse)(const kvq_codec & c); // NULL: can be held
    size_t (*nb_codes)(const kvq_codec & c);
    size_t (*nb_params)(const kvq_codec & c);
    kvq_encode_function encode;
    void (*decode)(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows);
    // nearest code of every value under given parameters; false when a value is not reproduced up to `low` low bits
    bool (*match)(const kvq_codec & c, const uint16_t * rows, kvq_low_bits low, const void * shared, void * codes,
        const void * params);
    // nearest codes alone; NULL: the type has no use for it
    void (*assign)(const kvq_codec & c, const uint16_t * rows, void * codes, const void * params);
};

const kvq_type_traits * kvq_traits(int type); // NULL when unknown

// Saved-state image (see kvq_image in ggml-kvq.h).
void kvq_image_write(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows);
// Its bit stream, `low` bits above the last: puts nb bytes into the rows, or takes them; false when bits behind them
// are set.
int kvq_image_width(size_t n_values, size_t nb);
void kvq_image_put(size_t n_values, uint16_t * rows, int low, size_t nb, const void * bytes);
bool kvq_image_take(size_t n_values, const uint16_t * rows, int low, size_t nb, void * bytes);
bool kvq_image_read(
    const kvq_codec & c, const uint16_t * rows, const void * shared, void * codes, void * params, bool marked = false);

// The table of block types, shaped like ggml's own traits: bytes, encode, decode, image.
#pragma once

#include "ggml-kvq.h"

#include <cstddef>
#include <cstdint>

struct kvq_type_traits {
    kvq_type     type;
    const char * name;
    const char * (*refuse)   (const kvq_codec & c); // NULL: can be held
    size_t       (*nb_codes) (const kvq_codec & c);
    size_t       (*nb_params)(const kvq_codec & c);
    void         (*encode)   (const kvq_codec & c, const uint16_t * rows, const uint8_t * valid, const void * shared, void * codes, void * params);
    void         (*decode)   (const kvq_codec & c, const void * codes, const void * params, uint16_t * rows);
    // nearest code of every value under given parameters; false when a value is not reproduced up to `mask` low bits
    bool         (*match)    (const kvq_codec & c, const uint16_t * rows, uint16_t mask, const void * shared, void * codes, const void * params);
    // nearest codes alone; NULL: the type has no use for it
    void         (*assign)   (const kvq_codec & c, const uint16_t * rows, void * codes, const void * params);
};

const kvq_type_traits * kvq_traits(int type); // NULL when unknown

// Saved-state image (see kvq_image in ggml-kvq.h).
void kvq_image_write(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows);
// Its bit stream, `low` bits above the last: puts nb bytes into the rows, or takes them; false when bits behind them are set.
int  kvq_image_width(size_t n_values, size_t nb);
void kvq_image_put  (size_t n_values, uint16_t * rows, int low, size_t nb, const void * bytes);
bool kvq_image_take (size_t n_values, const uint16_t * rows, int low, size_t nb, void * bytes);
bool kvq_image_read (const kvq_codec & c, const uint16_t * rows, const void * shared, void * codes, void * params);

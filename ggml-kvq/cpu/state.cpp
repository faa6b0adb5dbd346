// Blocks as f16 rows and back, for saved states: the values and the decisions of types/, by the kernels where they
// have some. tests/native/test_images.cpp compares.
#include "base/f16.h"
#include "engine/host.h"
#include "kernels.h"
#include "lattice.h"
#include "types/affine.h"
#include "types/lattice.h"
#include "types/mixed.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace {

struct room { // of a thread
    kvq_codec codec = {};
    kvq_view affine;
    kvq_lattice_view lattice;
    std::vector<uint8_t> work;

    static room & of(const kvq_codec & c) {
        static thread_local room r[2]; // the parts of a block
        static thread_local int last = 0;
        for (const int i : { last, 1 - last }) {
            if (!memcmp(&r[i].codec, &c, sizeof(c))) { return r[last = i]; }
        }
        last = 1 - last;
        r[last].make(c);
        return r[last];
    }

    // The view for match_lattice. Its table takes a tenth of a second to make, and decoding does without it.
    const kvq_lattice_view & for_match() {
        if (lattice.d == 2 && !lattice.pairs) { lattice.pairs = kvq_lattice_pairs(codec); }
        return lattice;
    }

private:
    void make(const kvq_codec & c) {
        memcpy(&codec, &c, sizeof(c));
        size_t nb;
        if (c.type == KVQ_TYPE_LATTICE) {
            lattice = kvq_lattice_make_view(c);
            nb = kvq_lattice_encode_bytes(lattice);
        } else {
            affine = kvq_make_view(c);
            nb = kvq_encode_bytes(affine);
        }
        work.resize(std::max(work.size(), nb));
    }
};

// Which bits of a page's values count: those of the mark's rows apart from all others.
struct kept_bits {
    std::vector<uint16_t> bits; // [mark rows + 1][head size]
    std::vector<const uint16_t *> of;
    int n = -1, cells = 0, width = 0;
    bool marked = false;

    // [n_cells]; valid until the next call of this thread
    static kept_bits & for_page(const kvq_codec & c, kvq_low_bits low) {
        static thread_local kept_bits k;
        if (k.n != low.n || k.cells != c.n_cells || k.width != c.head_size || k.marked != low.marked) {
            k.make(c, low);
        }
        return k;
    }

private:
    void make(const kvq_codec & c, kvq_low_bits low) {
        const size_t D = (size_t) c.head_size;
        const int rows = low.marked ? kvq_mark_rows(c.head_size) : 0;
        n = low.n;
        cells = c.n_cells;
        width = c.head_size;
        marked = low.marked;
        bits.resize((size_t) (rows + 1) * D);
        const uint16_t all = (uint16_t) ~((1 << low.n) - 1);
        std::fill(bits.begin(), bits.end(), all);
        for (size_t i = 0; i < (size_t) rows * D; i++) { bits[i] = (uint16_t) ~low.mask(c, i); }
        of.assign((size_t) cells, &bits[(size_t) rows * D]);
        for (int i = 0; i < rows; i++) { of[(size_t) i] = of[(size_t) (cells - rows + i)] = &bits[(size_t) i * D]; }
    }
};

bool has_kernel(const kvq_codec & c) {
    const int width = c.split ? c.head_size / 2 : c.head_size; // of a block
    return width % 16 == 0 && c.head_size <= KVQ_MAX_HEAD && c.type != KVQ_TYPE_F16;
}

// Only foreign bytes hold others, and their products are not those of the kernels.
bool are_finite(const uint16_t * x, size_t n) {
    uint16_t worst = 0;
    for (size_t i = 0; i < n; i++) { worst = std::max<uint16_t>(worst, x[i] & 0x7fff); }
    return worst < 0x7c00;
}
bool params_are_finite(const kvq_codec & c, const void * params) {
    return are_finite((const uint16_t *) params, c.scale ? 4 : 2 * (size_t) kvq_affine_get_dims(c).np);
}

const kvq_type_traits & reference(const kvq_codec & c) { return *kvq_traits(c.type); }

bool same_bits(const kvq_codec & c, const uint16_t * a, const uint16_t * b, const kept_bits & keep) {
    const size_t D = (size_t) c.head_size;
    uint16_t wrong = 0;
    for (size_t t = 0; t < (size_t) c.n_cells; t++) {
        const uint16_t * k = keep.of[t];
        for (size_t d = 0; d < D; d++) { wrong = (uint16_t) (wrong | ((a[t * D + d] ^ b[t * D + d]) & k[d])); }
    }
    return !wrong;
}

// ---------------------------------------------------------------- halves

void decode_half(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows) {
    room & r = room::of(c);
    kvq_get_kernels().decode_lattice(r.lattice, codes, params, rows, r.work.data());
}

// copy(channel of the half, channel of the head, how many): channels that follow each other in both
template <typename F> void each_run(const kvq_codec & c, const kvq_lattice_half & h, const F & copy) {
    const int D = h.codec.head_size;
    for (int i = 0, n; i < D; i += n) {
        const int first = kvq_lattice_channel(c, h.fast, i);
        for (n = 1; i + n < D && kvq_lattice_channel(c, h.fast, i + n) == first + n;) { n++; }
        copy(i, first, n);
    }
}

// Channels of all cells, 16 bytes at a time, without a call for each row.
void copy_channels(uint16_t * to, int to_stride, const uint16_t * from, int from_stride, int width, int n_cells) {
    for (int t = 0; t < n_cells; t++, to += to_stride, from += from_stride) {
        int d = 0;
        for (; d + 8 <= width; d += 8) { memcpy(to + d, from + d, 16); }
        for (; d < width; d++) { to[d] = from[d]; }
    }
}

// Rows of a half in those of whole heads.
void decode_lattice(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows) {
    static thread_local std::vector<uint16_t> own;
    if (!c.split) {
        decode_half(c, codes, params, rows);
        return;
    }
    kvq_lattice_half halves[2];
    const int n = kvq_lattice_halves(c, halves), D = halves[0].codec.head_size;
    own.resize((size_t) c.n_cells * D);
    if (n < 2) { memset(rows, 0, 2 * (size_t) c.n_cells * c.head_size); }
    for (int k = 0; k < n; k++) {
        const kvq_lattice_half & h = halves[k];
        decode_half(h.codec, (const uint8_t *) codes + h.codes, (const uint8_t *) params + h.params, own.data());
        each_run(c, h, [&](int i, int channel, int width) {
            copy_channels(rows + channel, c.head_size, &own[(size_t) i], D, width, c.n_cells);
        });
    }
}

void assign_lattice(const kvq_codec & c, const uint16_t * rows, void * codes, const void * params) {
    static thread_local std::vector<uint16_t> own;
    kvq_lattice_half halves[2];
    for (int k = 0, n = kvq_lattice_halves(c, halves); k < n; k++) {
        const kvq_lattice_half & h = halves[k];
        const int D = h.codec.head_size;
        const uint16_t * from = rows;
        if (c.split) {
            own.resize((size_t) c.n_cells * D);
            each_run(c, h, [&](int i, int channel, int width) {
                copy_channels(&own[(size_t) i], D, rows + channel, c.head_size, width, c.n_cells);
            });
            from = own.data();
        }
        room & r = room::of(h.codec);
        kvq_get_kernels().match_lattice(r.for_match(), from, nullptr, (uint8_t *) codes + h.codes,
            (const uint8_t *) params + h.params, r.work.data());
    }
}

// Halves hold channels that lie apart: they are decoded and compared as one head.
bool match_halves(
    const kvq_codec & c, const uint16_t * rows, const kept_bits & keep, void * codes, const void * params) {
    static thread_local std::vector<uint16_t> own;
    const size_t D = (size_t) c.head_size;
    own.resize((size_t) c.n_cells * D);
    for (size_t t = 0; t < (size_t) c.n_cells; t++) {
        for (size_t d = 0; d < D; d++) { own[t * D + d] = rows[t * D + d] & keep.of[t][d]; }
    }
    assign_lattice(c, own.data(), codes, params);
    decode_lattice(c, codes, params, own.data());
    return same_bits(c, own.data(), rows, keep);
}

// ---------------------------------------------------------------- mixed

struct channel_factors {
    float x[KVQ_MAX_HEAD];
    const float * by = nullptr; // NULL: keys have no such factors
    bool finite = true;
    channel_factors(const kvq_codec & c, const uint8_t * params, const kvq_mixed_map & m) {
        if (c.role != KVQ_ROLE_V) { return; }
        by = x;
        for (int d = 0; d < c.head_size; d++) {
            const uint16_t h = kvq_mixed_channel(params[m.channels + (size_t) d]);
            finite = finite && (h & 0x7c00) != 0x7c00;
            x[d] = kvq_f16_to_f32(h);
        }
    }
};

bool parts_are_plain(const kvq_codec & c, const uint8_t * params, const kvq_mixed_map & m, const channel_factors & f) {
    bool plain = f.finite;
    for (int i = 0; i < 2; i++) {
        const kvq_codec p = kvq_mixed_part(c, i);
        plain = plain && (!p.n_cells || params_are_finite(p, params + m.params[i]));
    }
    return plain;
}

void decode_mixed(const kvq_codec & c, const uint8_t * codes, const uint8_t * params, uint16_t * rows) {
    static thread_local std::vector<uint16_t> part;
    const size_t D = (size_t) c.head_size;
    const kvq_mixed_map m = kvq_mixed_offsets(c);
    const channel_factors f(c, params, m);
    if (!parts_are_plain(c, params, m, f)) {
        reference(c).decode(c, codes, params, rows);
        return;
    }
    int32_t cells[KVQ_MAX_CELLS];
    memset(rows, 0, 2 * (size_t) c.n_cells * D);
    for (int i = 0; i < 2; i++) {
        const kvq_codec p = kvq_mixed_part(c, i);
        const int n = std::min(kvq_mixed_cells(c, params, i, cells), (int) p.n_cells);
        if (!p.n_cells) { continue; }
        part.resize((size_t) p.n_cells * D);
        room & r = room::of(p);
        kvq_get_kernels().decode_affine(
            r.affine, codes + m.codes[i], params + m.params[i], f.by, part.data(), r.work.data());
        for (int j = 0; j < n; j++) { memcpy(rows + (size_t) cells[j] * D, &part[(size_t) j * D], 2 * D); }
    }
}

bool match_mixed(const kvq_codec & c, const uint16_t * rows, kvq_low_bits low, const kept_bits & keep, uint8_t * codes,
    const uint8_t * params) {
    static thread_local std::vector<uint16_t> part;
    const size_t D = (size_t) c.head_size;
    const kvq_mixed_map m = kvq_mixed_offsets(c);
    const channel_factors f(c, params, m);
    if (!parts_are_plain(c, params, m, f)) { return reference(c).match(c, rows, low, nullptr, codes, params); }
    int32_t cells[KVQ_MAX_CELLS];
    const uint16_t * of[KVQ_MAX_CELLS];
    for (int i = 0; i < 2; i++) {
        const kvq_codec p = kvq_mixed_part(c, i);
        if (kvq_mixed_cells(c, params, i, cells) != p.n_cells) { return false; }
        if (!p.n_cells) { continue; }
        part.resize((size_t) p.n_cells * D);
        for (int j = 0; j < p.n_cells; j++) {
            memcpy(&part[(size_t) j * D], rows + (size_t) cells[j] * D, 2 * D);
            of[j] = keep.of[(size_t) cells[j]];
        }
        room & r = room::of(p);
        if (!kvq_get_kernels().match_affine(
                r.affine, part.data(), of, f.by, codes + m.codes[i], params + m.params[i], r.work.data())) {
            return false;
        }
    }
    return true;
}

} // namespace

// ---------------------------------------------------------------- the type's functions

void kvq_cpu_decode(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows) {
    if (!has_kernel(c) || (c.type == KVQ_TYPE_AFFINE && !params_are_finite(c, params))) {
        reference(c).decode(c, codes, params, rows);
    } else if (c.type == KVQ_TYPE_MIXED) {
        decode_mixed(c, (const uint8_t *) codes, (const uint8_t *) params, rows);
    } else if (c.type == KVQ_TYPE_LATTICE) {
        decode_lattice(c, codes, params, rows);
    } else {
        room & r = room::of(c);
        kvq_get_kernels().decode_affine(r.affine, codes, params, nullptr, rows, r.work.data());
    }
}

void kvq_cpu_assign(const kvq_codec & c, const uint16_t * rows, void * codes, const void * params) {
    if (has_kernel(c) && c.type == KVQ_TYPE_LATTICE) {
        assign_lattice(c, rows, codes, params);
    } else {
        reference(c).assign(c, rows, codes, params);
    }
}

bool kvq_cpu_match(const kvq_codec & c, const uint16_t * rows, kvq_low_bits low, const void * shared, void * codes,
    const void * params) {
    const kept_bits & keep = kept_bits::for_page(c, low);
    if (!has_kernel(c) || (!shared && !codes)) { return reference(c).match(c, rows, low, shared, codes, params); }
    if (shared) {
        static thread_local std::vector<uint16_t> own;
        own.resize((size_t) c.n_cells * (size_t) c.head_size);
        kvq_cpu_decode(c, shared, params, own.data());
        return same_bits(c, own.data(), rows, keep);
    }
    if (c.type == KVQ_TYPE_MIXED) {
        return match_mixed(c, rows, low, keep, (uint8_t *) codes, (const uint8_t *) params);
    }
    if (c.type == KVQ_TYPE_LATTICE) {
        if (c.split) { return match_halves(c, rows, keep, codes, params); }
        room & r = room::of(c);
        return kvq_get_kernels().match_lattice(r.for_match(), rows, keep.of.data(), codes, params, r.work.data());
    }
    if (!params_are_finite(c, params)) { return reference(c).match(c, rows, low, shared, codes, params); }
    room & r = room::of(c);
    return kvq_get_kernels().match_affine(r.affine, rows, keep.of.data(), nullptr, codes, params, r.work.data());
}

// ---------------------------------------------------------------- images

void kvq_cpu_image_write(const kvq_codec & c, const void * codes, const void * params, uint16_t * rows) {
    kvq_cpu_decode(c, codes, params, rows);
    kvq_image_put((size_t) c.n_cells * c.head_size, rows, 0, reference(c).nb_params(c), params);
}

bool kvq_cpu_image_read(
    const kvq_codec & c, const uint16_t * rows, const void * shared, void * codes, void * params, bool marked) {
    const size_t n = (size_t) c.n_cells * c.head_size, nb = reference(c).nb_params(c);
    return kvq_image_take(n, rows, 0, nb, params) &&
        kvq_cpu_match(c, rows, { kvq_image_width(n, nb), marked }, shared, codes, params);
}

bool kvq_cpu_hash_rows(const void * rows, int n, int width, uint64_t * hashes) {
    return kvq_get_kernels().hash_rows(rows, n, width, hashes);
}

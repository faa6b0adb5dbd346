#include "mark.h"

#include <cstring>

namespace {

constexpr uint32_t MAGIC = 0x8d4b96e5;
constexpr int NB = KVQ_MARK_BITS / 8;

uint64_t mix(uint64_t h) {
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93u;
    h ^= h >> 32;
    return h;
}

uint64_t hash_bytes(const void * data, size_t nb, uint64_t h) {
    const uint8_t * p = (const uint8_t *) data;
    for (size_t i = 0; i < nb; i += 8) {
        uint64_t x = 0;
        memcpy(&x, p + i, nb - i < 8 ? nb - i : 8);
        h = mix(h ^ x) + 0x9e3779b97f4a7c15u;
    }
    return h;
}

void to_bytes(const kvq_mark & m, uint8_t * b) {
    memcpy(b, &MAGIC, 4);
    memcpy(b + 4, &m.sum, 4);
    memcpy(b + 8, &m.tag, 4);
    memcpy(b + 12, &m.model, 2);
    memcpy(b + 14, &m.page_cells, 2);
    for (int i = 0; i < 3; i++) {
        b[16 + i] = (uint8_t) (m.n >> 8 * i);
        b[19 + i] = (uint8_t) (m.row >> 8 * i);
    }
    const uint16_t check = (uint16_t) hash_bytes(b, 22, 1);
    memcpy(b + 22, &check, 2);
}

bool from_bytes(const uint8_t * b, kvq_mark & m) {
    const uint16_t check = (uint16_t) hash_bytes(b, 22, 1);
    if (memcmp(b, &MAGIC, 4) || memcmp(b + 22, &check, 2)) { return false; }
    memcpy(&m.sum, b + 4, 4);
    memcpy(&m.tag, b + 8, 4);
    memcpy(&m.model, b + 12, 2);
    memcpy(&m.page_cells, b + 14, 2);
    m.n = b[16] | b[17] << 8 | b[18] << 16;
    m.row = b[19] | b[20] << 8 | b[21] << 16;
    return true;
}

uint16_t & value(const kvq_mark_rows_view & v, const int * at, int i) {
    return v.row(at[i / v.head_size])[i % v.head_size];
}

// Planes in which the magic may begin here, a bit each.
unsigned planes(const kvq_mark_rows_view & v, const int * at) {
    unsigned m = (1u << KVQ_MARK_PLANES) - 1;
    for (int i = 0; m && i < 32; i++) {
        const unsigned x = value(v, at, i);
        m &= MAGIC >> i & 1 ? x : ~x;
    }
    return m;
}

} // namespace

void kvq_mark_put(const kvq_mark_rows_view & v, const int * at, int plane, const kvq_mark & m) {
    uint8_t b[NB];
    to_bytes(m, b);
    for (int i = 0; i < KVQ_MARK_BITS; i++) {
        uint16_t & x = value(v, at, i);
        x = (uint16_t) ((x & ~(1 << plane)) | (b[i / 8] >> i % 8 & 1) << plane);
    }
}

void kvq_mark_clear(const kvq_mark_rows_view & v, const int * at, int plane) {
    for (int i = 0; i < KVQ_MARK_BITS; i++) { value(v, at, i) &= (uint16_t) ~(1 << plane); }
}

bool kvq_mark_get(const kvq_mark_rows_view & v, const int * at, int plane, kvq_mark & m) {
    uint8_t b[NB] = {};
    for (int i = 0; i < KVQ_MARK_BITS; i++) { b[i / 8] |= (uint8_t) ((value(v, at, i) >> plane & 1) << i % 8); }
    return from_bytes(b, m);
}

std::vector<int> kvq_mark_evicted(const kvq_mark_rows_view & v) {
    std::vector<int> out;
    for (int r = 0; r < v.n; r++) {
        bool all = true;
        for (int d = 0; all && d < v.head_size; d++) { all = (v.row(r)[d] | 1) == 0x8001; }
        if (all) { out.push_back(r); }
    }
    return out;
}

std::vector<kvq_mark_found> kvq_mark_find(const kvq_mark_rows_view & v, std::vector<uint16_t> & cleared) {
    std::vector<kvq_mark_found> out;
    const int k = kvq_mark_rows(v.head_size);
    std::vector<int> at((size_t) k);
    kvq_mark m;
    const auto view = [&] { // the copy, made when there is something to clear
        if (cleared.empty()) { cleared.assign(v.rows, v.rows + (size_t) v.n * (size_t) v.width); }
        return kvq_mark_rows_view{ cleared.data(), v.n, v.width, v.head_size };
    };
    for (int r = 0; r + k <= v.n; r++) {
        for (int i = 0; i < k; i++) { at[(size_t) i] = r + i; }
        unsigned which = planes(v, at.data());
        for (int p = 0; which; p++, which >>= 1) {
            if (!(which & 1) || !kvq_mark_get(v, at.data(), p, m) || !m.page_cells) { continue; }
            out.push_back({ m, r });
            kvq_mark_clear(view(), at.data(), p);
        }
    }
    const std::vector<int> evicted = kvq_mark_evicted(v);
    for (size_t j = 0; j + (size_t) k <= evicted.size(); j++) {
        if (planes(v, &evicted[j]) & 1 && kvq_mark_get(v, &evicted[j], 0, m) && !m.page_cells) {
            out.push_back({ m, evicted[j] });
            kvq_mark_clear(view(), &evicted[j], 0);
        }
    }
    return out;
}

uint64_t kvq_mark_hash(const uint16_t * row, int width) { return hash_bytes(row, 2 * (size_t) width, 0x51ab); }

uint32_t kvq_mark_sum(const uint64_t * hashes, int n, int il, bool value) {
    uint64_t h = mix((uint64_t) il * 2 + value + 1);
    for (int i = 0; i < n; i++) { h = mix(h ^ hashes[i]) + 0x9e3779b97f4a7c15u; }
    return (uint32_t) (h ^ h >> 32);
}

#include "mark.h"

#include "base/row_hash.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace {

constexpr uint32_t MAGIC = 0x8d4b96e5;
constexpr int NB = KVQ_MARK_BITS / 8;

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
    const uint16_t check = (uint16_t) kvq_hash_bytes(b, 22, 1);
    memcpy(b + 22, &check, 2);
}

bool from_bytes(const uint8_t * b, kvq_mark & m) {
    const uint16_t check = (uint16_t) kvq_hash_bytes(b, 22, 1);
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

// Marks in the rows `rows` of v and in those kept before them; their bits are cleared, and what they had added to
// hashes of rows that came earlier.
void kvq_mark_stream::search(
    tail & before, const std::vector<int> & rows, const kvq_mark_rows_view & v, bool in_evicted) {
    const size_t W = (size_t) v.width, k = (size_t) kvq_mark_rows(v.head_size), n_before = before.at.size();
    const int first = (int) hashes.size();
    // Those before and the next ones side by side, then v itself: each window of k rows is in one of them.
    const size_t n_next = std::min(rows.size(), k - 1);
    for (size_t i = 0; i < n_next; i++) {
        before.rows.insert(before.rows.end(), v.row(rows[i]), v.row(rows[i]) + W);
        before.at.push_back(first + rows[i]);
    }
    std::vector<int> seam(before.at.size());
    std::iota(seam.begin(), seam.end(), 0);
    const kvq_mark_rows_view joined = { before.rows.data(), (int) seam.size(), v.width, v.head_size };
    const auto look = [&](const kvq_mark_rows_view & in, const std::vector<int> & at, size_t end, auto index) {
        kvq_mark m;
        for (size_t j = 0; j < end && j + k <= at.size(); j++) {
            unsigned which = planes(in, &at[j]) & (in_evicted ? 1u : ~0u);
            for (int p = 0; which; p++, which >>= 1) {
                if (!(which & 1) || !kvq_mark_get(in, &at[j], p, m) || !m.page_cells != in_evicted) { continue; }
                found.push_back({ m, index(at[j]) });
                kvq_mark_clear(in, &at[j], p);
            }
        }
    };
    const size_t n_found = found.size();
    look(joined, seam, n_before, [&](int i) { return before.at[(size_t) i]; });
    if (found.size() > n_found) {
        for (size_t i = 0; i < seam.size(); i++) {
            if (i < n_before) {
                hashes[(size_t) before.at[i]] = kvq_mark_hash(joined.row((int) i), v.width);
                changed.push_back({ before.at[i], { joined.row((int) i), joined.row((int) i) + W } });
            } else {
                std::copy_n(joined.row((int) i), W, v.row(rows[i - n_before]));
            }
        }
    }
    look(v, rows, rows.size(), [&](int i) { return first + i; });
    // what stays for the next call
    before.rows.erase(before.rows.begin() + (ptrdiff_t) (n_before * W), before.rows.end());
    before.at.resize(n_before);
    for (size_t i = rows.size() - n_next; i < rows.size(); i++) {
        before.rows.insert(before.rows.end(), v.row(rows[i]), v.row(rows[i]) + W);
        before.at.push_back(first + rows[i]);
    }
    const size_t too_many = before.at.size() - std::min(before.at.size(), k - 1);
    before.rows.erase(before.rows.begin(), before.rows.begin() + (ptrdiff_t) (too_many * W));
    before.at.erase(before.at.begin(), before.at.begin() + (ptrdiff_t) too_many);
}

void kvq_mark_stream::add(const kvq_mark_rows_view & v) {
    changed.clear();
    std::vector<int> all((size_t) v.n);
    std::iota(all.begin(), all.end(), 0);
    search(last, all, v, false);
    search(evicted, kvq_mark_evicted(v), v, true);
    for (int i = 0; i < v.n; i++) { hashes.push_back(kvq_mark_hash(v.row(i), v.width)); }
}

uint64_t kvq_mark_hash(const uint16_t * row, int width) {
    return kvq_hash_bytes(row, 2 * (size_t) width, KVQ_HASH_ROW);
}

uint32_t kvq_mark_sum(const uint64_t * hashes, int n, int il, bool value) {
    uint64_t h = kvq_hash_mix((uint64_t) il * 2 + value + 1);
    for (int i = 0; i < n; i++) { h = kvq_hash_mix(h ^ hashes[i]) + KVQ_HASH_ADD; }
    return (uint32_t) (h ^ h >> 32);
}

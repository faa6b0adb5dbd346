#include "mark.h"

#include "base/parallel.h"
#include "base/row_hash.h"
#include "engine/host.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <iterator>
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

uint16_t value(const kvq_mark_rows_view & v, const int * at, int i) {
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

// The same where one row holds all of it.
unsigned planes_in(const uint16_t * row) {
    static const std::array<uint64_t, 8> zeros = [] { // values whose bit is 0
        std::array<uint64_t, 8> z = {};
        for (int i = 0; i < 32; i++) { z[(size_t) i / 4] |= MAGIC >> i & 1 ? 0 : (uint64_t) 0xffff << 16 * (i % 4); }
        return z;
    }();
    uint64_t m = ~(uint64_t) 0;
    for (size_t i = 0; i < zeros.size(); i++) {
        uint64_t x;
        memcpy(&x, row + 4 * i, sizeof(x));
        m &= x ^ zeros[i];
    }
    m &= m >> 32;
    return (unsigned) (m & m >> 16) & ((1u << KVQ_MARK_PLANES) - 1);
}

} // namespace

uint16_t * kvq_mark_rows_view::edit(int i) {
    std::vector<uint16_t> & to = edited[i];
    const uint16_t * const from = rows + (size_t) i * (size_t) width;
    if (own) { return const_cast<uint16_t *>(from); }
    if (to.empty()) { to.assign(from, from + width); }
    return to.data();
}

bool kvq_mark_rows_view::has_copies(int first, int n_rows) const {
    const auto x = edited.lower_bound(first);
    return !own && x != edited.end() && x->first < first + n_rows;
}

void kvq_mark_rows_view::put_edited(int first, int n_rows, uint16_t * to) const {
    for (auto x = edited.lower_bound(first); x != edited.end() && x->first < first + n_rows; ++x) {
        std::copy(x->second.begin(), x->second.end(), to + (size_t) (x->first - first) * (size_t) width);
    }
}

void kvq_mark_put(kvq_mark_rows_view & v, const int * at, int plane, const kvq_mark & m) {
    uint8_t b[NB];
    to_bytes(m, b);
    for (int i = 0; i < KVQ_MARK_BITS; i++) {
        uint16_t & x = v.edit(at[i / v.head_size])[i % v.head_size];
        x = (uint16_t) ((x & ~(1 << plane)) | (b[i / 8] >> i % 8 & 1) << plane);
    }
}

void kvq_mark_clear(kvq_mark_rows_view & v, const int * at, int plane) {
    for (int i = 0; i < KVQ_MARK_BITS; i++) {
        v.edit(at[i / v.head_size])[i % v.head_size] &= (uint16_t) ~(1 << plane);
    }
}

bool kvq_mark_get(const kvq_mark_rows_view & v, const int * at, int plane, kvq_mark & m) {
    uint8_t b[NB] = {};
    for (int i = 0; i < KVQ_MARK_BITS; i++) { b[i / 8] |= (uint8_t) ((value(v, at, i) >> plane & 1) << i % 8); }
    return from_bytes(b, m);
}

// Hashes of rows, and look(row) of each while it is in the cache; false: some value is not finite
template <typename F>
static bool hash_and(const uint16_t * rows, int n, int width, int n_threads, uint64_t * out, const F & look) {
    constexpr int PART = 64;
    std::atomic<bool> finite{ true };
    kvq_parallel_for((n + PART - 1) / PART, n_threads, [&](int64_t part) {
        const int i = (int) part * PART, end = std::min(i + PART, n);
        if (!kvq_cpu_hash_rows(rows + (size_t) i * (size_t) width, end - i, width, out + i)) { finite = false; }
        for (int r = i; r < end; r++) { look(r); }
    });
    return finite;
}

static bool is_evicted(const uint16_t * row, int head_size) {
    int d = 0;
    while (d < head_size && (row[d] | 1) == 0x8001) { d++; }
    return d == head_size;
}

std::vector<int> kvq_mark_evicted(const kvq_mark_rows_view & v, int n_threads) {
    std::vector<uint8_t> is((size_t) v.n);
    const auto look = [&](int64_t r) {
        is[(size_t) r] = is_evicted(v.rows + (size_t) r * (size_t) v.width, v.head_size);
    };
    kvq_parallel_for(v.n, n_threads, look, 256);
    for (const auto & x : v.edited) { is[(size_t) x.first] = is_evicted(v.row(x.first), v.head_size); }
    std::vector<int> out;
    for (int r = 0; r < v.n; r++) {
        if (is[(size_t) r]) { out.push_back(r); }
    }
    return out;
}

// Marks in the rows `rows` of v and in those kept before them; their bits are cleared, and what they had added to
// hashes of rows that came earlier.
// begins: of every row of v, may a mark begin there?
void kvq_mark_stream::search(tail & before, const std::vector<int> & rows, const std::vector<uint8_t> & begins,
    kvq_mark_rows_view & v, bool in_evicted) {
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
    kvq_mark_rows_view joined = { before.rows.data(), (int) seam.size(), v.width, v.head_size };
    const auto look = [&](kvq_mark_rows_view & in, const std::vector<int> & at, size_t end, auto index) {
        kvq_mark m;
        for (size_t j = 0; j < end && j + k <= at.size(); j++) {
            if (&in == &v && !begins[(size_t) at[j]]) { continue; }
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
                std::copy_n(joined.row((int) i), W, v.edit(rows[i - n_before]));
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

bool kvq_mark_stream::add(kvq_mark_rows_view & v, int n_threads) {
    std::vector<uint64_t> now((size_t) v.n);
    std::vector<uint8_t> begins((size_t) v.n), is((size_t) v.n);
    const auto look = [&](int64_t r) { // bits that are cleared later begin no mark: its first one is set
        const uint16_t * const row = v.rows + (size_t) r * (size_t) v.width;
        begins[(size_t) r] = v.head_size < 32 || planes_in(row);
        is[(size_t) r] = is_evicted(row, v.head_size);
    };
    if (!hash_and(v.rows, v.n, v.width, n_threads, now.data(), look)) { return false; }
    changed.clear();
    std::vector<int> all((size_t) v.n);
    std::iota(all.begin(), all.end(), 0);
    search(last, all, begins, v, false);
    for (const auto & x : v.edited) { is[(size_t) x.first] = is_evicted(v.row(x.first), v.head_size); }
    evicted_now.clear();
    std::copy_if(all.begin(), all.end(), std::back_inserter(evicted_now), [&](int r) { return is[(size_t) r]; });
    search(evicted, evicted_now, begins, v, true);
    for (const auto & x : v.edited) { now[(size_t) x.first] = kvq_mark_hash(v.row(x.first), v.width); }
    hashes.insert(hashes.end(), now.begin(), now.end());
    return true;
}

bool kvq_mark_hashes(const uint16_t * rows, int n, int width, int n_threads, uint64_t * out) {
    return hash_and(rows, n, width, n_threads, out, [](int64_t) {});
}

uint64_t kvq_mark_hash(const uint16_t * row, int width) {
    return kvq_hash_bytes(row, 2 * (size_t) width, KVQ_HASH_ROW);
}

uint32_t kvq_mark_sum(const uint64_t * hashes, int n, int il, bool value) {
    uint64_t h = kvq_hash_mix((uint64_t) il * 2 + value + 1);
    for (int i = 0; i < n; i++) { h = kvq_hash_mix(h ^ hashes[i]) + KVQ_HASH_ADD; }
    return (uint32_t) (h ^ h >> 32);
}

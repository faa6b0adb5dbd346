// A mark: the checksum of rows in a saved state. llama.cpp's file has f16 rows and no room for more bytes. So the
// checksum lies in bits of values that can be restored without those bits:
//   sealed pages     the mantissa bit above those of the page's image (types.h), in head 0 of the first and of the last
//                    rows of one page. The block that the image gives back knows that bit.
//   evicted rows     all values are -0; the last mantissa bit is used
// Other rows (a cache with open rows only, the f16 method) carry no mark, because no bit of them may change.
//
// A mark has 192 bits and is written twice: when one copy is damaged, the other one still tells that.
//   u32 magic
//   u32 sum of the rows
//   u32 tag of the program that saves
//   u16 model, 0: unknown
//   u16 cells of the page, 0: evicted rows
//   u24 number of rows in the sum
//   u24 this copy's first row among them
//   u16 check
#pragma once

#include "types/types.h"

#include <map>
#include <vector>

constexpr int KVQ_MARK_PLANES = 10; // mantissa bits of f16

struct kvq_mark {
    uint32_t sum = 0, tag = 0;
    uint16_t model = 0, page_cells = 0;
    int32_t n = 0, row = 0;
};

// A row's values [width], of which the first `head_size` are head 0's. A row that is edited is changed in place, or
// copied when `own` is false: the rows belong to the caller then.
struct kvq_mark_rows_view {
    const uint16_t * rows;
    int n, width, head_size;
    bool own = true;
    std::map<int, std::vector<uint16_t>> edited = {}; // rows that were changed; empty ones: in place
    const uint16_t * row(int i) const {
        const auto at = edited.empty() ? edited.end() : edited.find(i);
        return at == edited.end() || at->second.empty() ? rows + (size_t) i * (size_t) width : at->second.data();
    }
    uint16_t * edit(int i);
    bool has_copies(int first, int n_rows) const;
    void put_edited(int first, int n_rows, uint16_t * to) const; // those among rows [first, first + n_rows) of `to`
};

// Bits in plane `plane` of the rows at[0..kvq_mark_rows): written, cleared, read.
void kvq_mark_put(kvq_mark_rows_view & v, const int * at, int plane, const kvq_mark & m);
void kvq_mark_clear(kvq_mark_rows_view & v, const int * at, int plane);
bool kvq_mark_get(const kvq_mark_rows_view & v, const int * at, int plane, kvq_mark & m); // false: there is no mark

// Rows that are evicted, or were before they took a mark.
std::vector<int> kvq_mark_evicted(const kvq_mark_rows_view & v, int n_threads = 1);

struct kvq_mark_found {
    kvq_mark mark;
    int at;
}; // its first row

// Rows of a tensor as they come, in calls of any number of rows: a mark may begin in one call and end in another.
class kvq_mark_stream {
public:
    std::vector<uint64_t> hashes;      // of the rows so far, without the bits of marks
    std::vector<kvq_mark_found> found; // marks among them; the caller removes a mark that it has used
    std::vector<int> evicted_now;      // rows of the last call, as kvq_mark_evicted has them
    // Takes the bits of marks out of the rows: a row that stays as it came would carry them into the next state.
    // False: some value is not finite, and the rows were not added.
    bool add(kvq_mark_rows_view & v, int n_threads = 1);
    // Rows of earlier calls that have lost such bits in this one.
    struct changed_row {
        int at;
        std::vector<uint16_t> row;
    };
    std::vector<changed_row> changed;

private:
    struct tail { // the last rows that a mark may have begun in, and which they are
        std::vector<uint16_t> rows;
        std::vector<int> at;
    };
    tail last, evicted;
    void search(tail & before, const std::vector<int> & rows, const std::vector<uint8_t> & begins,
        kvq_mark_rows_view & v, bool in_evicted);
};

// Hash of one row; the sum of rows in their order, which is seeded by the layer and by what they are.
uint64_t kvq_mark_hash(const uint16_t * row, int width);
bool kvq_mark_hashes(const uint16_t * rows, int n, int width, int n_threads, uint64_t * out); // false: as add
uint32_t kvq_mark_sum(const uint64_t * hashes, int n, int il, bool value);

// The bytes of a cache tensor in a saved state with state=compact: blocks are saved as they are. llama.cpp fixes the
// number of bytes of a tensor. So the blocks come first, and zeros fill the rest. ggml_kvq's own state files leave the
// zeros out (python/ggml_kvq/core/states.py).
//
//   head, KVQ_BLOB_HEAD bytes:
//     u64 magic   u64 bytes   u32 CRC-32 of all bytes after the head
//     u32 tag   u16 model   u8 values   u8 lanes   i32 layer   i32 rows
//     u32 CRC-32 of magic, bytes, and the fields from tag to rows; 0: not known
//   then for each lane:
//     kvq_codec   i32 heads   i32 flags   i32 first cell within its page   i32 pages
//     flags: 1 codes are another lane's, 2 positions, 4 positions when sealed, 8 means or predictions are left out,
//     16 bytes of another lane's page that the block is read with
//   then for each page of the lane, whole or in part:
//     u32 1: codes, params, positions, positions when sealed, u32 number of those bytes, they
//     u32 0: f16 rows
//     u32 2 | bits << 8: rows of so many bits (small_rows.h), then their positions where flag 2 is set
// A page that is complete and sealed is saved as a block, any other page as rows.
#pragma once

#include "lane.h"

#include <cstdint>
#include <string>
#include <vector>

constexpr size_t KVQ_BLOB_HEAD = 40;

struct kvq_blob_head {
    uint64_t nb;
    uint32_t sum, tag;
    uint16_t model;
    uint8_t value, n_lanes;
    int32_t il, n;
};

// Rows [cell, cell + n) of a stream, how many bytes they took; 0: they would be more than `nb_rows`, or other
// caches cannot read blocks of these lanes. Rows that are in no block keep as many bits as there is room for, at least
// `least_bits` (16: f16).
size_t kvq_blob_write(const kvq_lane * const * lanes, int stream, int cell, int n, uint8_t * to, size_t nb_rows,
    kvq_blob_head head, int least_bits = 16, int n_threads = 1);

bool kvq_blob_begins(const void * data);        // of 8 bytes at least
bool kvq_blob_head_is_whole(const void * data); // of KVQ_BLOB_HEAD bytes
// false: not whole, or not as it was written
bool kvq_blob_read_head(const void * data, size_t nb, kvq_blob_head & head, int n_threads = 1);

struct kvq_blob_run {
    int stream, cell, n;
}; // where rows go, in their order

struct kvq_blob_bytes {
    const uint8_t * data;
    size_t nb;
};

// The rows of a blob whose head was read go into the lanes. owner: the blob of the lane whose codes are adopted,
// empty: no codes are adopted. Returns why the rows cannot go in, "" when they did; note: what to say besides, or "".
std::string kvq_blob_restore(const kvq_blob_bytes & blob, const kvq_blob_bytes & owner, kvq_lane * const * lanes,
    const std::vector<kvq_blob_run> & runs, int n_threads, std::string & note);

uint32_t kvq_crc32(uint32_t crc, const void * data, size_t nb);        // zlib's
uint32_t kvq_crc32_parts(const void * data, size_t nb, int n_threads); // of all bytes, in several threads

// Memory that a cache lies in. Calls on one space run in the order in which they are made. Those that say so may wait
// with others of their kind: until flush(), or until the next call of another kind, before which they go. get returns
// when the bytes are there, put when the host's bytes are no longer needed.
#pragma once

#include "ggml-kvq.h"

#include <cstddef>
#include <cstdint>

struct kvq_copy_job {
    void * to;
    const void * from;
    size_t nb;
};

class kvq_space {
public:
    virtual ~kvq_space() {}
    virtual bool is_host() const = 0; // its pointers may be followed
    // The next allocations take this much together, KVQ_ALIGN_SLAB each: one piece instead of many.
    virtual void reserve(size_t nb) = 0;
    virtual void * alloc(size_t nb) = 0; // zeros; NULL: out of memory
    // Zeros in the host's memory, which the device's engine reads and writes at this address; NULL: out of memory.
    virtual void * alloc_host(size_t nb) { return alloc(nb); }
    // Bytes a second that the engine reads there; 0: as fast as its own memory.
    virtual double host_speed() { return 0.0; }
    // Bytes from p to the end of what it was allocated with. A copy goes no further, although the next allocation may
    // begin there; 0: not known. The host's memory has no such ends.
    virtual size_t left(const void *) const { return SIZE_MAX; }
    virtual void free(void * p, size_t nb) = 0;
    virtual void zero(void * p, size_t nb) = 0;
    virtual void copy(void * to, const void * from, size_t nb) = 0;
    // as copy, but it may wait with other work until flush()
    virtual void copy_later(void * to, const void * from, size_t nb) = 0;
    virtual void get(void * host, const void * from, size_t nb) = 0;
    virtual void put(void * to, const void * host, size_t nb) = 0;
    // All of them, from host memory; neighbours stand one behind the other.
    virtual void put_all(const kvq_copy_job * jobs, size_t n, int n_threads) {
        (void) n_threads;
        for (size_t i = 0; i < n; i++) { put(jobs[i].to, jobs[i].from, jobs[i].nb); }
    }
    // All of them, into host memory; neighbours come in one piece where they go to neighbours.
    void get_all(const kvq_copy_job * jobs, size_t n) {
        for (size_t i = 0, j; i < n; i = j) {
            kvq_copy_job all = jobs[i];
            const size_t most = left(all.from);
            const auto joins = [&](const kvq_copy_job & x) {
                return x.from == (const char *) all.from + all.nb && x.to == (char *) all.to + all.nb &&
                    all.nb + x.nb <= most;
            };
            for (j = i + 1; j < n && joins(jobs[j]); j++) { all.nb += jobs[j].nb; }
            if (all.nb) { get(all.to, all.from, all.nb); }
        }
    }
    // One address into a table of them. It may wait for flush(), because many come together.
    virtual void put_address_later(void * to, const void * address) = 0;
    // Entries of a page table. They may wait for flush().
    virtual void put_pages(kvq_page * to, const kvq_page * from, size_t n) = 0;
    virtual void flush() = 0; // what still waits to be done together starts now
};

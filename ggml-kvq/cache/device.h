// Where a lane's bytes live and who computes on them. The store keeps states and clocks, hands these pointers on, and follows
// them only when is_host(). Calls of one device run in the order in which they are made; get and put return when they are done.
#pragma once

#include "layout.h"

struct kvq_page_block { // one page of all heads: f16 tile <-> block
    uint16_t      * tile;   // [head][cell][stride]
    const uint8_t * valid;  // host memory; NULL: every cell holds data
    const void    * shared; // codes to adopt, NULL: own codes
    void          * codes;
    void          * params;
};

constexpr size_t KVQ_ALIGN_SLAB = 256;

class kvq_device {
public:
    virtual ~kvq_device() {}
    virtual const char * name() const = 0; // of its kernels, for the load line
    virtual bool   is_host() const = 0;
    virtual void   reserve(size_t nb) { (void) nb; } // allocations that follow, together, KVQ_ALIGN_SLAB each: one piece instead of many
    virtual void * alloc(size_t nb) = 0; // zeros; NULL: out of memory
    virtual void   free (void * p, size_t nb) = 0;
    virtual void   zero (void * p, size_t nb) = 0;
    virtual void   copy (void * to, const void * from, size_t nb) = 0;
    virtual void   get  (void * host, const void * from, size_t nb) = 0;
    virtual void   put  (void * to, const void * host, size_t nb) = 0;

    // f32 row i, n_head*head_size values, goes to tile row to[i] of head 0 and to the same row of the other heads
    virtual void write_rows(const kvq_lane_layout & l, int64_t n, uint16_t * const * to, const float * rows, size_t row_stride, int n_threads) = 0;
    virtual void encode(const kvq_lane_layout & l, const kvq_page_block * pages, int n, int n_threads) = 0;
    virtual void decode(const kvq_lane_layout & l, const kvq_page_block & page) = 0;

    // What computing on a layer of these lanes takes beside them, at most; 0 where it takes none of the device's memory
    virtual size_t bytes_workspace(const kvq_lane_layout & k, const kvq_lane_layout & v) const { (void) k; (void) v; return 0; }
};

kvq_device & kvq_cpu_device(); // cpu/host_device.cpp

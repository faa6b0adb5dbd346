// Memory of the host that kernels read and write at its own address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

class kvq_pinned_memory {
public:
    kvq_pinned_memory() {}
    ~kvq_pinned_memory();
    kvq_pinned_memory(const kvq_pinned_memory &) = delete;
    kvq_pinned_memory & operator=(const kvq_pinned_memory &) = delete;
    // Zeros; NULL: out of memory. In pages of 2 MiB, where the system has them, that several threads have touched
    // before they are pinned: 64 MiB take 6 to 14 ms so, and 30 of cudaHostAlloc, in which no kernel can be launched.
    void * alloc(size_t nb);
    bool free(void * p); // false: not from here
    bool holds(const void * p) const { return left(p) > 0; }
    size_t left(const void * p) const; // bytes from p to the end of its block; 0: it lies in no block
    bool empty() const { return blocks.empty(); }

private:
    struct block {
        size_t nb;
        bool mapped; // by us, else cudaHostAlloc's
    };
    void release(void * p, const block & b);
    std::map<const uint8_t *, block> blocks;
};

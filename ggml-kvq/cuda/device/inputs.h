// What a program puts into a device's memory between two steps: token, position, mask. Each piece alone would be a
// copy that the host waits for: 10 us each, five or six times a token. They are held in host memory that the device
// reads, and one kernel brings all of them when the step begins.
#pragma once

#include "pinned.h"

#include <vector>

class kvq_cuda_inputs {
public:
    explicit kvq_cuda_inputs(int ordinal) : ordinal(ordinal) {}
    ~kvq_cuda_inputs();
    kvq_cuda_inputs(const kvq_cuda_inputs &) = delete;
    kvq_cuda_inputs & operator=(const kvq_cuda_inputs &) = delete;
    // Takes nb bytes for `to`, which is device memory. false: they are too many, or overlap what is held.
    bool hold(void * to, const void * data, size_t nb);
    bool overlaps(const void * to, size_t nb) const;
    // Brings what is held, in the order of the stream. false: the device cannot, and all is still held.
    bool send(void * stream);
    struct piece {
        void * to;
        uint32_t at, nb; // in the host's memory
    };
    const std::vector<piece> & pieces() const { return held; }
    const uint8_t * data_of(const piece & p) const { return memory + p.at; }
    void drop() { held.clear(); }

private:
    bool ready(); // there is memory, and no kernel reads it any more
    int ordinal;
    kvq_pinned_memory pinned;
    uint8_t * memory = nullptr;
    bool failed = false, reading = false; // reading: by a kernel on its way
    void * read = nullptr;                // cudaEvent_t: it has
    std::vector<piece> held;
};

// to the host, behind what the stream has to do; false: the caller has to wait and copy
bool kvq_cuda_get_async(int ordinal, void * host, const void * from, size_t nb, void * stream);
// from the host, likewise
bool kvq_cuda_set_async(int ordinal, void * to, const void * host, size_t nb, void * stream);

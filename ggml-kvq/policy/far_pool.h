// Memory of a second tier (fetch.h): blocks of one size for the far rows of a page, cut from slabs that are taken as
// the context grows.
//   host     memory of the host that the engine's attention reads
//   device   the engine's own
//   PATH     a file, mapped into memory. All of it is asked of the disk before the first token, and the file has no
//            name from then on, so no file is left however the program ends
#pragma once

#include "engine/device.h"

#include <chrono>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

class kvq_far_pool {
public:
    // nb_most: bytes at most, of all blocks. Check ok().
    kvq_far_pool(kvq_device & device, const std::string & place, size_t nb_most);
    ~kvq_far_pool();
    kvq_far_pool(const kvq_far_pool &) = delete;
    kvq_far_pool & operator=(const kvq_far_pool &) = delete;

    bool ok() const { return why.empty(); }
    const std::string & error() const { return why; } // what is missing and what to do; "": no error
    // A block for a lane, which has n_most at once at most. NULL: no lane has one to spare, error() says why.
    void * take(size_t nb, const void * lane, size_t n_most);
    void give(void * p, size_t nb, const void * lane); // back to the lane, for its next one
    void leave(size_t nb, const void * lane);          // the lane goes, and has given all of them

private:
    bool grow(size_t nb);
    void * more(size_t size); // NULL: out of memory, or too little would be left
    bool open_file();
    std::string lacks(size_t nb) const;
    kvq_device & device;
    const std::string place;
    const size_t nb_most;
    std::map<size_t, std::set<void *>> idle; // by size: what lanes that went have left
    struct share {                           // of a lane
        std::set<void *> spare;
        size_t n_held = 0; // blocks that it has or has spare
        uint8_t * last = nullptr;
    };
    std::map<std::pair<size_t, const void *>, share> shares;
    bool refill(size_t nb, size_t n_most, share & its);
    struct slab {
        uint8_t * memory;
        size_t nb;
    };
    std::vector<slab> slabs;
    size_t used = 0; // of the last slab
    size_t total = 0;
    int file = -1;
    std::chrono::steady_clock::time_point ask_again; // for memory, after memory ran out
    std::string why;
};

// Many small pieces of host memory on their way to the device: gathered in pinned memory, half of which is filled while
// the other half is copied. From pageable memory the driver copies a piece at a time and waits for each.
#pragma once

#include "engine/space.h"

class kvq_staging {
public:
    kvq_staging() {}
    ~kvq_staging();
    kvq_staging(const kvq_staging &) = delete;
    kvq_staging & operator=(const kvq_staging &) = delete;
    // to: where the jobs go. false: there is no memory for it, or a copy failed; jobs may have been done in part
    bool put(const kvq_space & to, const kvq_copy_job * jobs, size_t n, int n_threads, void * stream);

private:
    bool make();
    char * half[2] = {};
    void * left[2] = {}; // events: the half is free again
};

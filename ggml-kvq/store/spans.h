// What attention reads: the spans of one layer, and the memory that its pages lie in while they are open.
#pragma once

#include "engine/device.h"

#include <map>
#include <utility>
#include <vector>

// f16 tiles handed out by size, kept for reuse.
class kvq_scratch {
public:
    explicit kvq_scratch(kvq_space & space) : space(space) {}
    ~kvq_scratch();
    kvq_scratch(const kvq_scratch &) = delete;
    kvq_scratch & operator=(const kvq_scratch &) = delete;
    uint16_t * take(size_t nb); // throws std::bad_alloc
    void give(uint16_t * p, size_t nb);
    void expect(size_t nb, size_t n); // so many will be taken: throws now if there is no memory
    // A device may still write to this tile, together with tiles of other layers. So it is taken again only when enough
    // other tiles rest too.
    void rest(uint16_t * p, size_t nb);
    size_t bytes() const { return total; }

private:
    kvq_space & space;
    std::vector<std::pair<void *, size_t>> blocks;
    std::map<size_t, std::vector<uint16_t *>> idle, resting;
    std::map<size_t, size_t> made; // tiles by size
    size_t total = 0;
};

// Spans of one layer, kept up to date by its two lanes: [stream][page].
struct kvq_span_table {
    int n_pages = 0;
    std::vector<kvq_page> spans;
    std::vector<uint8_t> k_state, v_state;
    bool packed = false; // the device's copy of a stream has only spans that hold something, in front
    int n_recorded = 0;  // spans that a recorded step reads of a packed copy

    kvq_span_table() {}
    ~kvq_span_table();
    kvq_span_table(const kvq_span_table &) = delete;
    kvq_span_table & operator=(const kvq_span_table &) = delete;
    void init(int n_stream, int n_pages, int page_cells);
    void changed(size_t at);
    int n_used() const;                       // of a packed copy, the stream that has most
    const kvq_page * on(kvq_device & device); // the spans where the device reads them
private:
    kvq_device * device = nullptr;
    kvq_page * copy = nullptr;
    size_t n_copy = 0;
    std::vector<int> n_packed; // by stream
    // Spans that differ from the device's copy, each by itself: pages that all sequences open in one step lie far
    // apart, and a copy of all between them would wait for the device. More than so many: all. A host has no copy.
    static constexpr size_t MOST_LISTED = 1024;
    std::vector<size_t> listed;
    bool all_changed = true;
    void send();
    void send_packed();
};

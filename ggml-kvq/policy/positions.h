// Positions of cells whose sealed keys lack their rotary embedding, and the embeddings: one table for all layers of a
// cache, because a cell has one position. Where a device computes, it has a copy.
#pragma once

#include "engine/device.h"
#include "engine/rope.h"

#include <memory>
#include <vector>

struct kvq_positions {
    kvq_positions(int n_stream, int n_pages, int page_cells, kvq_device & device);
    ~kvq_positions();
    kvq_positions(const kvq_positions &) = delete;
    kvq_positions & operator=(const kvq_positions &) = delete;
    bool is_elsewhere() const { return there; }           // not in host memory
    bool ok() const { return device.is_host() || there; } // false: out of memory

    int32_t * now_at(int s, int p) { return &now[cell(s, p)]; }
    int32_t * sealed_at(int s, int p) { return &sealed[cell(s, p)]; }
    uint16_t & users_of(int s, int p) { return users[(size_t) s * n_pages + p]; }
    // of stream s, where the device reads them
    const int32_t * now_there(int s) const { return (there ? there : now.data()) + cell(s, 0); }
    const int32_t * sealed_there(int s) const { return (there ? there + now.size() : sealed.data()) + cell(s, 0); }
    void put(int s, int p, bool with_sealed); // a page, to the device
    // Is every cell that is sealed where it was sealed? Asked of devices that are not the host.
    bool stayed(int s) const;
    // by [n_cells]; the first layer to see a context shift moves them for all: n_seen counts those that this one saw
    void shift(int s, const int32_t * by, int n_cells, int n_seen);

    // The embedding of these parameters; n_text: positions of text that it may be asked for.
    kvq_rotor * rotor(const kvq_rope & rope, int n_text);
    void forget(); // numbers of embeddings, when no cell is in use

    std::vector<int32_t> now;    // [n_stream][n_pages*page_cells]
    std::vector<int32_t> sealed; // when they were sealed, likewise
    std::vector<uint16_t> users; // layers that hold the page sealed: while there are any, `sealed` stays
    int n_shifts = 0;            // context shifts done

private:
    size_t cell(int s, int p) const { return ((size_t) s * n_pages + p) * page_cells; }
    void note_moved(int s, int p);
    void send(int32_t * to, const std::vector<int32_t> & from, std::vector<int32_t> & sent, size_t at); // a page's
    int n_pages, page_cells;
    kvq_device & device;
    int32_t * there = nullptr;                      // both, NULL on the host
    std::vector<int32_t> device_now, device_sealed; // what is there
    std::vector<uint8_t> has_moved; // pages of a device whose positions differ from `sealed`; not known of open pages
    std::vector<std::unique_ptr<kvq_rotor>> rotors; // one per distinct embedding
};

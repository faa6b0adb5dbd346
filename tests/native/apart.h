// A device that the store cannot look into: its memory is the host's, but its addresses are not. Whoever follows one by
// himself ends with a fault. It computes as the CPU does, records nothing, takes no rows of the host, and what may wait
// waits until the next call that may not. Rows that are predicted are not its matter.
#pragma once

#include "check.h"

#include "engine/host.h"

#include <functional>
#include <map>
#include <vector>

class apart_device : public kvq_device, public kvq_transform_engine, public kvq_score_engine, public kvq_fetch_engine {
public:
    struct {
        int alloc, get, put, copy, late, flush, write, encode, decode, attend, turn, score, choose, pack, gather, far;
    } n = {};

    ~apart_device() {
        for (void * p : packed) {
            if (p) { free(p, blocks[here(p)]); }
        }
        CHECK(blocks.empty(), "%zu blocks of memory are left", blocks.size());
    }

    // --- memory

    bool is_host() const override { return false; }
    void reserve(size_t) override {}
    void * alloc(size_t nb) override {
        call(n.alloc);
        void * const p = cpu.alloc(nb);
        if (p) { blocks[p] = nb; }
        return p ? there(p) : nullptr;
    }
    void * alloc_host(size_t nb) override { return alloc_far(nb); }
    void free(void * p, size_t nb) override {
        flush();
        void * const at = blocks.count(p) ? p : here(p);
        CHECK(blocks.count(at), "memory that is not the device's is freed");
        blocks.erase(at);
        cpu.free(at, nb);
    }
    void zero(void * p, size_t nb) override {
        flush();
        cpu.zero(inside(p, nb), nb);
    }
    void copy(void * to, const void * from, size_t nb) override {
        call(n.copy);
        cpu.copy(inside(to, nb), inside(from, nb), nb);
    }
    void get(void * host, const void * from, size_t nb) override {
        call(n.get);
        cpu.get(host, inside(from, nb), nb);
    }
    void put(void * to, const void * host, size_t nb) override {
        call(n.put);
        cpu.put(inside(to, nb), host, nb);
    }
    void copy_later(void * to, const void * from, size_t nb) override {
        late([=, this] { cpu.copy(inside(to, nb), inside(from, nb), nb); });
    }
    void put_address_later(void * to, const void * address) override {
        late([=, this] { cpu.put(inside(to, sizeof(address)), &address, sizeof(address)); });
    }
    void put_pages(kvq_page * to, const kvq_page * from, size_t count) override {
        const std::vector<kvq_page> pages(from, from + count);
        late([=, this] { cpu.put(inside(to, count * sizeof(kvq_page)), pages.data(), count * sizeof(kvq_page)); });
    }
    void flush() override {
        n.flush += !waiting.empty();
        const std::vector<std::function<void()>> now = std::move(waiting);
        waiting.clear();
        for (const auto & f : now) { f(); }
    }

    // --- what every engine does

    const char * name() const override { return "apart"; }
    void write_rows(const kvq_lane_layout & l, int64_t count, uint16_t * const * to, const float * rows,
        size_t row_stride, const int32_t * pos, int n_threads) override {
        call(n.write);
        cpu.write_rows(l, count, all_here(to, (size_t) count).data(), here(rows), row_stride, pos, n_threads);
    }
    void encode(const kvq_lane_layout & l, const kvq_page_block * pages, int count, int n_threads) override {
        call(n.encode);
        std::vector<kvq_page_block> own(pages, pages + count);
        for (kvq_page_block & x : own) { x = block(x); }
        cpu.encode(l, own.data(), count, n_threads);
    }
    void decode(const kvq_lane_layout & l, const kvq_page_block & page) override {
        call(n.decode);
        cpu.decode(l, block(page));
    }
    void attend(const kvq_attention_call & a) override {
        call(n.attend);
        CHECK(!a.predicted, "a predicted layer is not refused");
        const size_t count = (size_t) a.n;
        std::vector<kvq_attn> own(a.streams, a.streams + count);
        std::vector<std::vector<kvq_page>> pages(count);
        std::vector<kvq_far> far(count);
        for (size_t i = 0; i < count; i++) {
            kvq_attn & x = own[i];
            pages[i] = all_here(here(x.pages), x.n_pages);
            x = rows_here(x);
            x.pages = pages[i].data();
            if (x.far) {
                far[i] = *x.far;
                far[i].k_rows = here(far[i].k_rows);
                far[i].v_rows = here(far[i].v_rows);
                far[i].kept = here(far[i].kept);
                far[i].counts = here(far[i].counts);
                x.far = &far[i];
            }
        }
        cpu.attend({ own.data(), a.n, a.k, a.v, nullptr, a.n_threads });
    }
    const char * slow_reading(int, const kvq_lane_layout &, const kvq_lane_layout &) const override { return nullptr; }
    size_t bytes_workspace(const kvq_lane_layout &, const kvq_lane_layout &) const override { return 0; }

    kvq_transform_engine * transforms() override { return this; }
    kvq_chain_engine * chains() override { return nullptr; }
    kvq_score_engine * scores() override { return this; }
    kvq_fetch_engine * fetches() override { return this; }

    // --- what policies ask for

    void take_out(const kvq_lane_layout & l, int count, const uint16_t * const * tiles, uint16_t * const * out,
        const kvq_row_transform * x, int n_threads) override {
        call(n.turn);
        const std::vector<kvq_row_transform> own = all_here(x, (size_t) count);
        cpu.transforms()->take_out(l, count, all_here(tiles, (size_t) count).data(),
            all_here(out, (size_t) count).data(), own.data(), n_threads);
    }
    void take_coords(const kvq_lane_layout & l, int count, const uint16_t * const * tiles, const kvq_row_transform * x,
        int n_threads) override {
        flush();
        const std::vector<kvq_row_transform> own = all_here(x, (size_t) count);
        cpu.transforms()->take_coords(l, count, all_here(tiles, (size_t) count).data(), own.data(), n_threads);
    }
    void put_back(const kvq_lane_layout & l, uint16_t * tile, const kvq_row_transform & x) override {
        flush();
        cpu.transforms()->put_back(l, here(tile), all_here(&x, 1)[0]);
    }
    bool column_sums(
        const kvq_attn & a, const int32_t * rows, int n_rows, float * sums, int32_t * seen, int n_threads) override {
        call(n.score);
        const std::vector<kvq_page> pages = all_here(a.pages, a.n_pages);
        kvq_attn x = rows_here(a);
        x.pages = pages.data();
        return cpu.scores()->column_sums(x, rows, n_rows, sums, seen, n_threads);
    }
    void choose(const kvq_lane_layout & l, bool normalise, const kvq_choice * pages, int count) override {
        call(n.choose);
        std::vector<kvq_choice> own(pages, pages + count);
        for (kvq_choice & x : own) {
            x.sums = here(x.sums);
            x.params = here(x.params);
        }
        cpu.scores()->choose(l, normalise, own.data(), count);
    }
    void pack(
        const kvq_lane_layout & l, bool normalise, const kvq_pack_page * pages, int count, kvq_packed & out) override {
        call(n.pack);
        std::vector<kvq_pack_page> own(pages, pages + count);
        for (kvq_pack_page & x : own) { x.sums = here(x.sums); }
        cpu.scores()->pack(l, normalise, own.data(), count, out);
        const size_t n_slots = (size_t) count * (size_t) (l.n_head * l.page_cells);
        out.maps_there = keep(out.maps_there, n_slots, packed[0]);
        out.scores_there = keep(out.scores_there, n_slots, packed[1]);
    }
    void gather(const kvq_lane_layout & l, int count, uint16_t * const * tiles, const int32_t * const * maps,
        const uint16_t * const * frames, int first, int n_frames) override {
        call(n.gather);
        cpu.scores()->gather(l, count, all_here(tiles, (size_t) count).data(), all_here(maps, (size_t) count).data(),
            all_here(frames, (size_t) n_frames).data(), first, n_frames);
    }

    // far rows lie where the host reads them too
    void * alloc_far(size_t nb) override {
        void * const p = cpu.alloc(nb);
        if (p) { blocks[p] = nb; }
        return p;
    }
    void free_far(void * p, size_t nb) override { free(p, nb); }
    void put_far(const kvq_lane_layout & l, int format, int count, const uint16_t * const * tiles, void * const * rows,
        int n_threads) override {
        call(n.far);
        cpu.fetches()->put_far(l, format, count, all_here(tiles, (size_t) count).data(), rows, n_threads);
    }
    void get_far(const kvq_lane_layout & l, int format, const void * rows, uint16_t * tile) override {
        flush();
        cpu.fetches()->get_far(l, format, rows, here(tile));
    }
    const char * refuse_far(const kvq_codec &, const kvq_codec &, int, int) const override { return nullptr; }

protected:
    static constexpr uintptr_t APART = (uintptr_t) 1 << 53; // no address of a process is that high

    template <typename T> static T * there(T * p) { return p ? (T *) ((uintptr_t) p + APART) : nullptr; }
    // of a call of attention, but for its pages and positions
    template <typename F> static void each_row_pointer(kvq_attn & x, const F & f) {
        x.q = f(x.q);
        x.mask = f(x.mask);
        x.sinks = f(x.sinks);
        x.dst = f(x.dst);
        x.lse = f(x.lse);
    }

private:
    kvq_device & cpu = kvq_cpu_device();
    std::map<const void *, size_t> blocks;
    std::vector<std::function<void()>> waiting;
    void * packed[2] = {}; // maps and scores of the last call of pack

    template <typename T> static T * here(T * p) {
        CHECK(!p || (uintptr_t) p >= APART, "an address of the host is given to the device");
        return p ? (T *) ((uintptr_t) p - APART) : nullptr;
    }
    // codes and parameters of a page may lie on the host (place=host)
    template <typename T> static T * either(T * p) { return (uintptr_t) p >= APART ? here(p) : p; }
    // n values of the host in the device's memory, in place of what `to` held
    template <typename T> const T * keep(const T * from, size_t n_values, void *& to) {
        if (to) { free(to, blocks[here(to)]); }
        to = alloc(n_values * sizeof(T));
        put(to, from, n_values * sizeof(T));
        return (const T *) to;
    }
    // nb bytes of one allocation
    template <typename T> T * inside(T * p, size_t nb) {
        T * const at = either(p);
        auto block = blocks.upper_bound((const void *) at);
        CHECK(block != blocks.begin(), "memory that is not the device's is asked for");
        --block;
        CHECK(
            (uintptr_t) at + nb <= (uintptr_t) block->first + block->second, "%zu bytes reach behind their block", nb);
        return at;
    }
    template <typename T> static std::vector<T *> all_here(T * const * p, size_t count) {
        std::vector<T *> out(p, p + count);
        for (T *& x : out) { x = here(x); }
        return out;
    }
    static std::vector<kvq_page> all_here(const kvq_page * from, int count) {
        std::vector<kvq_page> pages(from, from + count);
        for (kvq_page & p : pages) {
            for (const void ** at : { &p.k_codes, &p.k_params, &p.v_codes, &p.v_params }) { *at = either(*at); }
            p.map = here(p.map);
        }
        return pages;
    }
    static kvq_attn rows_here(kvq_attn x) {
        each_row_pointer(x, [](auto * p) { return here(p); });
        x.positions = here(x.positions);
        x.sealed = here(x.sealed);
        return x;
    }
    static std::vector<kvq_row_transform> all_here(const kvq_row_transform * x, size_t count) {
        std::vector<kvq_row_transform> out(x, x + count);
        for (kvq_row_transform & y : out) {
            y.positions = here(y.positions);
            y.sealed = here(y.sealed);
            y.pred = here(y.pred);
            y.coords = here(y.coords);
        }
        return out;
    }
    static kvq_page_block block(kvq_page_block x) {
        x.tile = here(x.tile);
        x.shared = either(x.shared);
        x.codes = either(x.codes);
        x.params = either(x.params);
        return x;
    }
    void call(int & n_calls) { // what waits goes first
        flush();
        n_calls++;
    }
    template <typename F> void late(const F & f) {
        n.late++;
        waiting.push_back(f);
    }
};

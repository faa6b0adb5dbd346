// A second tier (SpeCache, ICML 2025, section 3): while near blocks of sealed cells lie where attention computes, the
// rows as they came lie far, in another memory, and attention fetches the few that matter (kvq_far of ggml-kvq.h).
// Sealing sends the rows of both lanes far before anything is taken out of them. What is decoded elsewhere comes from
// there, so pages that are written again, context shifts and saved states stay exact. One step ahead, the first call
// behind a prompt or a saved state picks and reads in the same step, so that it need not do without far rows, and so
// that what it reads does not depend on what was in the cache before.
//
//   part fetch   top: cells per KV head and query token; format: kvq_far_format; fetch: kvq_fetch; kept: rows per KV
//                head that stay, fetch ahead; exact: 1, calls of KVQ_PROMPT_ROWS tokens and more read every far row;
//                text: where rows lie (far_pool.h)
#pragma once

#include "far_pool.h"
#include "plan/plan.h"
#include "store/lane.h"

#include <memory>
#include <string>
#include <vector>

class kvq_fetcher : public kvq_policy {
public:
    kvq_fetcher(const kvq_part & part, const kvq_lane_layout & keys, const kvq_lane_layout & values,
        kvq_device & device, std::shared_ptr<kvq_far_pool> pool);
    ~kvq_fetcher() override;
    bool ok() const { return memory != nullptr; } // false: out of memory

    bool may_seal(const kvq_lane & x, int s, int p) const override;
    void keep(kvq_lane & x, int s, const std::vector<int> & pages, const std::vector<kvq_page_block> & blocks,
        int n_threads) override;
    bool recall(const kvq_lane & x, int s, int p, uint16_t * tile) const override;
    void state_changed(kvq_lane & x, int s, int p, kvq_page_state from, kvq_page_state to) override;
    bool may_copy(kvq_lane & x, int to, int p) override { return take(x, to, p); }
    void copied_page(kvq_lane & x, int from, int to, int p) override;
    void copied(kvq_lane & x, int from, int to) override;
    void cleared(kvq_lane & x) override;
    bool may_place(const kvq_lane &, int, int) const override { return false; } // blocks alone lack the rows
    bool blocks_travel(const kvq_lane &) const override { return false; }
    bool has_images(const kvq_lane &) const override { return true; }
    bool images_together(const kvq_lane &) const override { return rows_are_here; }
    int image_low_bits(const kvq_lane &) const override; // rows leave as they came: no bit is free for a mark
    void write_image(const kvq_lane & x, int s, int p, const uint8_t * codes, const uint8_t * params,
        uint16_t * rows) const override;
    void spans(kvq_attn & a, int s) override;
    bool stands_alone(int s) const override { return anew[(size_t) s]; }
    void entered(kvq_lane &, int s, int, const uint16_t *, int) override { begin_anew(s); }
    void tell(kvq_stats & stats) const override;
    std::string trouble() override;

private:
    struct lane_rows {
        kvq_lane_layout l;
        size_t nb_page = 0;
        std::vector<void *> rows;    // [stream][page], NULL: the page has no far rows
        std::vector<uint8_t> is_put; // the same: rows have been put there
        void ** there = nullptr;     // the engine's copy
    };
    lane_rows & of(const kvq_lane & x) const { return lanes[x.is_value()]; }
    uint8_t & is_put(const kvq_lane & x, int s, int p) const { return of(x).is_put[(size_t) s * of(x).l.n_pages + p]; }
    void *& at(const kvq_lane & x, int s, int p) const { return of(x).rows[(size_t) s * of(x).l.n_pages + p]; }
    using kvq_policy::take;                                                       // the event of that name
    bool take(const kvq_lane & x, int s, int p) const;                            // memory for the rows of a page
    size_t n_kept() const { return (size_t) lanes[0].l.n_head * (size_t) keeps; } // of a stream
    void name_kept(kvq_far & f, int s) const;
    void renew(int s, int first, int last, bool again) const; // kept rows of cells that are written again
    bool picks_ahead() const { return fetch == KVQ_FETCH_AHEAD && top > 0; }
    void begin_anew(int s) { anew[(size_t) s] = picks_ahead(); }
    void release(const kvq_lane & x, int s, int p);
    void publish(const kvq_lane & x, int s, int p);

    const int top, format, fetch, keeps;
    const bool exact, rows_are_here; // in memory of the host
    kvq_device & device;
    std::shared_ptr<kvq_far_pool> pool;
    mutable lane_rows lanes[2];
    uint8_t * memory = nullptr; // tables of both lanes, kept cells, counts
    size_t nb_memory = 0;
    int32_t * kept = nullptr;   // [stream][head][keeps]
    uint8_t * buffer = nullptr; // [stream] of far_buffer.h; NULL: attention reads rows where they lie
    size_t nb_buffer = 0;       // of a stream
    uint64_t * counts = nullptr;
    std::vector<kvq_far> far;  // of a call, by stream
    std::vector<uint8_t> anew; // by stream, one step ahead: 1, no step has picked cells for the next call
};

// What a layer does beyond keeping pages. A policy hears what happens to the pages of its lanes, and may say what they
// hold. By default an event does nothing, and a question gives the neutral answer. Policies of a lane are called in the
// order in which they were added. x.is_value() tells whether a lane holds keys or values.
//
//   event            when                                                          pages are
//   wrote            rows went to cells of a page                                  open
//   written          behind all rows of a call, with their addresses               open
//   may_seal         asked of a page that is due                                   open
//   before_seal      pages will seal: a policy seals others that they need         open
//   take             instead of sealing: the policy keeps the rows elsewhere       open, then empty
//   choose           before encoding: which cells are salient                      open
//   keep             the f16 tiles before anything is taken out                    open, or sealed and edited
//   recall           in place of decoding: the policy has the rows as they came    sealed
//   leave_out        tiles that are encoded in place of the open ones              open; encoded: give them back
//   put_back         what was left out of a block returns to its tile              sealed
//   sealed           blocks are there                                              sealed
//   reopening        a block is about to be given up                               sealed
//   replacing        likewise, and all of its cells are overwritten                sealed
//   placing          a saved block is about to take the page                       any
//   reencoding       rows of a block are edited; reencoded: they were              sealed
//   state_changed    the page is about to have another state                       any
//   changed          it has it, or its cells are about to be written               any
//   moved            the block of a page lies elsewhere, its bytes are the same       sealed
//   emptied          its cells are empty now                                        empty
//   may_copy         a stream: is there room for what the policy keeps of the page  sealed
//   copied, cleared  a whole stream; the lane
//   edit             rows are edited that lie outside of pages
//   save, load       rows go to and come from a saved state
//   spans            attention is about to read a stream: what it needs besides
//   observed         attention has read it; asked for with wants_scores
#pragma once

#include "engine/engine.h"
#include "page.h"

#include <functional>
#include <string>
#include <vector>

class kvq_lane;

using kvq_any_cell = std::function<bool(int cell)>;
using kvq_edit_row = std::function<void(int cell, int head, uint16_t * row)>;

class kvq_policy {
public:
    virtual ~kvq_policy() {}

    // slots: a bit each; n_rows: of the whole call that go to stream s
    virtual void wrote(kvq_lane &, int /*s*/, int /*p*/, const uint8_t * /*slots*/, int64_t /*n_rows*/) {}
    // row i went to tile row to[i] of cell idx[i]; pos: positions, NULL: not known
    virtual void written(
        kvq_lane &, int64_t /*n*/, const int64_t * /*idx*/, const int32_t * /*pos*/, uint16_t * const * /*to*/) {}
    // Do rows carry their positions? The engine then writes them where it alone can.
    virtual bool tags_rows(const kvq_lane &) const { return false; }

    virtual bool may_seal(const kvq_lane &, int /*s*/, int /*p*/) const { return true; }
    virtual void before_seal(kvq_lane &, int /*s*/, const std::vector<int> & /*due*/, int /*n_threads*/) {}
    virtual bool take(kvq_lane &, int /*s*/, const std::vector<int> & /*due*/, int /*n_threads*/) { return false; }
    virtual void choose(kvq_lane &, int /*s*/, const std::vector<int> & /*due*/) {}
    virtual void keep(kvq_lane &, int /*s*/, const std::vector<int> & /*pages*/,
        const std::vector<kvq_page_block> & /*blocks*/, int /*n_threads*/) {}
    virtual bool recall(const kvq_lane &, int /*s*/, int /*p*/, uint16_t * /*tile*/) const { return false; }
    virtual void leave_out(kvq_lane &, int /*s*/, const std::vector<int> & /*pages*/,
        std::vector<kvq_page_block> & /*blocks*/, int /*n_threads*/) {}
    virtual void encoded(kvq_lane &) {}
    virtual void put_back(const kvq_lane &, int /*s*/, int /*p*/, uint16_t * /*tile*/) const {}
    virtual void sealed(kvq_lane &, int /*s*/, const std::vector<int> & /*due*/) {}

    virtual void reopening(kvq_lane &, int /*s*/, int /*p*/) {}
    virtual void replacing(kvq_lane & x, int s, int p) { reopening(x, s, p); }
    virtual void reencoding(kvq_lane &, int /*s*/, int /*p*/) {}
    virtual void reencoded(kvq_lane &, int /*s*/, int /*p*/) {}
    virtual void changed(kvq_lane &, int /*s*/, int /*p*/) {}
    virtual void state_changed(kvq_lane &, int /*s*/, int /*p*/, kvq_page_state, kvq_page_state) {}
    virtual void moved(kvq_lane &, int /*s*/, int /*p*/) {}
    virtual void emptied(kvq_lane &, int /*s*/, int /*p*/) {}
    // false: some cells of this open page also lie elsewhere
    virtual bool is_plain(int /*s*/, int /*p*/) const { return true; }

    // Reserves room for the copy of a sealed page. false: there is no room, and the copy becomes an open page.
    virtual bool may_copy(kvq_lane &, int /*to*/, int /*p*/) { return true; }
    // Called for every page, whatever its state. Its state and bytes are copied after it.
    virtual void copied_page(kvq_lane &, int /*from*/, int /*to*/, int /*p*/) {}
    virtual void copied(kvq_lane &, int /*from*/, int /*to*/) {}
    virtual void cleared(kvq_lane &) {}
    virtual void edit(kvq_lane &, int /*s*/, const kvq_any_cell &, const kvq_edit_row &) {}

    // --- saved states

    // do blocks mean the same in another cache?
    virtual bool blocks_travel(const kvq_lane &) const { return true; }
    // of a block by itself: what goes with it; may it take page p?
    virtual void describe(const kvq_lane &, int /*s*/, int /*p*/, kvq_page_image &) const {}
    virtual bool may_place(const kvq_lane &, int /*s*/, int /*p*/) const { return true; }
    virtual bool accepts(const kvq_lane &, int /*s*/, int /*p*/, const kvq_page_image &) const { return true; }
    virtual void placing(kvq_lane &, int /*s*/, int /*p*/, const kvq_page_image &) {}
    // A page image carries low bits and bytes. A policy that leaves something out of its pages makes their images
    // (has_images), both ways; types.h makes the others.
    virtual bool has_images(const kvq_lane &) const { return false; }
    virtual int n_position_lists(const kvq_lane &) const { return 0; } // 1: positions; 2: and those when sealed
    virtual int image_low_bits(const kvq_lane &) const { return 0; }
    virtual size_t image_bytes(const kvq_lane &) const { return 0; }
    // may images of several pages be made and taken at once, by as many threads? images_come: before they are taken
    virtual bool images_together(const kvq_lane &) const { return false; }
    virtual void images_come(
        const kvq_lane &, const std::vector<const uint16_t *> & /*pages*/, int /*n_threads*/) const {}
    virtual void write_image(const kvq_lane &, int /*s*/, int /*p*/, const uint8_t * /*codes*/,
        const uint8_t * /*params*/, uint16_t * /*rows*/) const {}
    virtual bool take_image(const kvq_lane &, int /*s*/, int /*p*/, const uint16_t * /*rows*/, bool /*marked*/,
        kvq_page_image & /*out*/) const {
        return false;
    }
    // a block by itself, with its positions, becomes the rows of its image; false: they rest on other rows
    virtual bool rows_of_block(const kvq_lane &, const kvq_page_image & /*image*/, const uint8_t * /*codes*/,
        const uint8_t * /*params*/, uint16_t * /*rows*/) const {
        return false;
    }
    // positions that saved rows and blocks carry lie below it; 0: they carry no positions
    virtual int32_t position_bound(const kvq_lane &) const { return 0; }
    // save: rows [n][n_head*head_size] leave the cache. enter: rows come in and are changed in place, where
    // rewrites_rows says so. entered: rows have gone into open pages from `cell` on.
    virtual void save(
        const kvq_lane &, int /*s*/, int /*cell*/, int /*n*/, uint16_t * /*rows*/, int /*n_threads*/) const {}
    virtual bool rewrites_rows(const kvq_lane &) const { return false; }
    virtual void enter(const kvq_lane &, uint16_t * /*rows*/, int /*n*/) const {}
    virtual void entered(kvq_lane &, int /*s*/, int /*cell*/, const uint16_t * /*rows*/, int /*n*/) {}
    // true: all of it was done here; a policy may commit the lane meanwhile
    virtual bool load(kvq_lane &, int /*s*/, int /*cell*/, int /*n*/, const uint16_t * /*rows*/, int /*n_threads*/) {
        return false;
    }

    virtual void tell(kvq_stats &) const {}      // what it counted
    virtual std::string trouble() { return ""; } // what the user should hear of, once

    // --- attention over stream s, of both lanes

    virtual void reading(int /*s*/, int /*n_kv*/) {} // cells from n_kv on are free
    // May set means and positions. n_pages is a wish: the host sets it again when spans are packed. The host sets pages
    // and lse afterwards.
    virtual void spans(kvq_attn &, int /*s*/) {}
    // true: the next call over stream s must not be replayed from a recording
    virtual bool stands_alone(int /*s*/) const { return false; }
    virtual bool wants_scores(int /*n_rows*/) const { return false; }
    // On the CPU, where a policy wants scores: attention has filled attn.lse. at: cell of the first query token. On
    // CUDA the engine observes for policy/probe.h, and this is not called.
    virtual void observed(const kvq_attn &, int /*s*/, uint64_t /*at*/, int /*n_threads*/) {}
};

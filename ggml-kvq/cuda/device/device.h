// The store's device over CUDA memory, and attention on it. One object per KV cache; all its work is ordered on one
// stream. No CUDA header here: host/ includes this file.
#pragma once

#include "engine/device.h"
#include "pinned.h"
#include "staging.h"
#include "types/predictor.h"

#include <array>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

struct kvq_affine_geometry;
struct kvq_choose_job;
struct kvq_attend_args;
struct kvq_turn;
struct kvq_device_order;
struct kvq_device_rotary;
struct kvq_row_place;
struct kvq_far_args;
struct kvq_far_kept;
struct kvq_far_renew;
struct kvq_turn_args;
struct kvq_device_basis;

constexpr int MOST_SPLITS = 256; // of the part of an attention that makes logits

class kvq_cuda_device :
    public kvq_device,
    public kvq_transform_engine,
    public kvq_chain_engine,
    public kvq_score_engine,
    public kvq_fetch_engine {
public:
    explicit kvq_cuda_device(int ordinal);
    ~kvq_cuda_device() override;

    void set_stream(void * stream); // a cudaStream_t; waits for the work on the stream in use until now
    void synchronize();
    static void forget_stream(void * stream); // before it is destroyed: no device uses it any more
    // First failure since creation, "" when there was no failure. Calls after a failure have no useful result.
    const std::string & error() const { return err; }

    // Compute capability of a device that our kernels are not made for, which is below 8.0; "" of others
    static bool has_card(); // this process, for the driver
    static std::string too_old(int ordinal);
    // NULL: there are kernels for this layer, else why not (and the cure)
    // maps: pages hold other cells for each head
    static const char * refuse(int flags, const kvq_codec & k, const kvq_codec & v, bool maps);

    // As kvq_attend, with every pointer, the pages too, in device memory. k, v: the lanes attended; their rows that
    // are held back then go into their pages on the way, if this is a short cache and the rows lie before its end.
    // chain: keys and values of a predicted layer, of every stream a pair; their 8-bit rows, of the layer below
    // before, are of this one behind it. l NULL: this lane is read without the layer below.
    void attend(const kvq_attn * attn, int n, const kvq_lane_layout * k = nullptr, const kvq_lane_layout * v = nullptr,
        const kvq_chain_pages * chain = nullptr);
    void attend(const kvq_attention_call & a) override { attend(a.streams, a.n, a.k, a.v, a.predicted); }
    bool allow_short; // true, unless KVQ_CUDA_SHORT=0 is set: to compare both ways
    bool allow_means; // true, unless KVQ_CUDA_MEANS=0 is set: likewise
    // tests: blocks of decode attention have one team of warps, whose barrier is then the block's
    bool one_team = false;
    // launches for short caches so far; for few rows, short caches among them; for many
    int64_t n_short = 0, n_decode = 0, n_prompt = 0;
    int64_t n_means = 0;  // and over sealed pages that lack their means
    int64_t n_fine = 0;   // and over groups of 16 in both (decode_fine.cuh)
    int64_t n_opens = 0;  // and with parts of open cells (decode_open.cuh)
    int64_t n_listed = 0; // and over pages that their rows see (seen.cuh)
    // KVQ_CUDA_LISTS: 0 never, 1 where there are more rows than a decode kernel takes otherwise, 2 for few rows too
    int allow_lists;
    // Does attend() walk the pages that these rows see, however many tokens there are? Of f: shapes, and whether there
    // is a mask.
    bool lists(const kvq_attn & f, int n) const;
    // Before each evaluation of a graph: layers of one share what they know of its masks. Without this call each layer
    // reads its masks itself.
    void begin_evaluation() { n_evaluations++; }

    // Keys and values of n streams as f16 rows [stream][n_kv][n_head_kv][head size], one layer at a time: a workspace
    // of this device, overwritten by the next call. False: out of memory.
    bool expand(const kvq_attn * attn, int n, void ** k, void ** v, const kvq_chain_pages * chain = nullptr);

    // The same of latent attention (KVQ_ATTN_LATENT): both blocks side by side, [stream][n_kv][channels of both].
    bool expand_latent(const kvq_attn * attn, int n, void ** rows);

    // Column sums of a call that was attended: what the table asks for (policy/probe.h). keys: of expand(), where
    // another kernel attended; NULL: attend() left a.lse. max_rows: probe rows at most; max_pages: of the table.
    void observe(const kvq_attn & a, const kvq_probe_table * table, int max_rows, int max_pages, const void * keys);
    bool may_observe; // true, unless KVQ_CUDA_OBSERVE=0 is set: to measure what it costs
    // Log-sum-exp of n rows, a workspace as expand's; NULL: out of memory.
    float * lse_of(size_t n);

    // out[i] (+)= W x[i] for n rows (types/predictor.h), pointers in device memory; w.data: host memory that stays;
    // x_stride is a multiple of 32.
    void predict(const kvq_predictor & w, int n, const int8_t * x, size_t x_stride, const float * s, bool add,
        float * out, size_t out_stride);

    // A step that is recorded into a CUDA graph and replayed: write_rows then takes its addresses from a table in
    // device memory, and replaying only refills the table. Between begin_step and end_step nothing but write_rows and
    // attend may be called.
    enum step { EAGER, RECORD, REPLAY };
    bool begin_step(step s, size_t n_rows);         // n_rows: of all write_rows; false: too many for the table
    void flush_rows();                              // RECORD: what write_rows still holds back is launched
    void end_step();                                // the table goes to the device; before the recording is launched
    uint64_t generation() const { return n_moved; } // changes when memory that a recording points at was given back

    const char * name() const override { return kernels.c_str(); }
    bool is_host() const override { return false; }
    void reserve(size_t nb) override;
    void * alloc(size_t nb) override;
    size_t left(const void * p) const override;
    void free(void * p, size_t nb) override;
    void zero(void * p, size_t nb) override;
    void copy(void * to, const void * from, size_t nb) override;
    void get(void * host, const void * from, size_t nb) override;
    void put(void * to, const void * host, size_t nb) override;
    void put_all(const kvq_copy_job * jobs, size_t n, int n_threads) override;
    void put_address_later(void * to, const void * address) override;
    void put_pages(kvq_page * to, const kvq_page * from, size_t n) override;
    void copy_later(void * to, const void * from, size_t nb) override;
    void flush() override;
    int64_t n_seals = 0, n_copied = 0; // launches that sealed pages so far, calls of copy()
    void write_rows(const kvq_lane_layout & l, int64_t n, uint16_t * const * to, const float * rows, size_t row_stride,
        const int32_t * pos, int n_threads) override;
    bool enter_rows(
        const kvq_lane_layout & l, int64_t n, uint16_t * const * to, const uint16_t * rows, int n_threads) override;
    void encode(const kvq_lane_layout & l, const kvq_page_block * pages, int n, int n_threads) override;
    void decode(const kvq_lane_layout & l, const kvq_page_block & page) override;
    kvq_transform_engine * transforms() override { return this; }
    kvq_chain_engine * chains() override { return this; }
    kvq_score_engine * scores() override { return this; }
    bool column_sums(const kvq_attn &, const int32_t *, int, float *, int32_t *, int) override { return false; }
    kvq_fetch_engine * fetches() override { return this; }
    size_t bytes_workspace(const kvq_lane_layout & k, const kvq_lane_layout & v) const override;
    // What the decode kernel of these pages takes on this device: its name's part, warps and shared memory of a
    // block, for tests; warps 0: no kernel
    struct decode_room {
        const char * kernel;
        int n_warps, nb_shared;
    };
    // maps: pages of cells that were kept
    decode_room room_of(const kvq_codec & k, const kvq_codec & v, bool maps = false) const;
    const char * slow_reading(int flags, const kvq_lane_layout & k, const kvq_lane_layout & v) const override;
    void take_out(const kvq_lane_layout & l, int n, const uint16_t * const * tiles, uint16_t * const * out,
        const kvq_row_transform * x, int n_threads) override;
    void take_coords(const kvq_lane_layout & l, int n, const uint16_t * const * tiles, const kvq_row_transform * x,
        int n_threads) override;
    void put_back(const kvq_lane_layout & l, uint16_t * tile, const kvq_row_transform & x) override;
    void chain_predict(const kvq_chain_pages & c, float * out) override;
    void chain_step(const kvq_chain_pages & c) override;
    void pack(const kvq_lane_layout & l, bool normalise, const kvq_pack_page * pages, int n, kvq_packed & out) override;
    void gather(const kvq_lane_layout & l, int n, uint16_t * const * tiles, const int32_t * const * maps,
        const uint16_t * const * frames, int first, int n_frames) override;
    void choose(const kvq_lane_layout & l, bool normalise, const kvq_choice * pages, int n) override;
    // pinned, and mapped at the same address
    void * alloc_host(size_t nb) override;
    double host_speed() override;
    void * alloc_far(size_t nb) override;
    void free_far(void * p, size_t nb) override;
    void put_far(const kvq_lane_layout & l, int format, int n, const uint16_t * const * tiles, void * const * rows,
        int n_threads) override;
    void get_far(const kvq_lane_layout & l, int format, const void * rows, uint16_t * tile) override;
    void renew_kept(const kvq_far & f, const kvq_lane_layout & k, int first, int last, bool again) override;
    void join_picks(); // RECORD: the stream waits for picks that are made beside it
    void name_far_table(const void * const * there, const void * const * here, size_t n) override;
    const char * refuse_far(const kvq_codec & k, const kvq_codec & v, int format, int top) const override;
    int64_t n_folded = 0; // calls of attention that folded values
    // calls of attention that fetched; pages whose rows came ahead, and copies that brought them
    int64_t n_far = 0, n_staged = 0, n_stagings = 0;
    int64_t n_ahead = 0; // and those that read what had come before

private:
    static std::string refuse_settings(); // KVQ_CUDA_AS; "": all are right
    bool use();                           // before anything is done: what waits goes first
    // a stream for what the host waits for; the event behind observe()
    void *side = nullptr, *observed = nullptr;
    uint64_t n_calls = 0, n_calls_observed = 0; // of use(); equal: no work has been asked for since observe()
    bool begin_side();                          // the side stream waits for no more than it has to
    bool check(int status, const char * what);
    kvq_affine_geometry geometry(const kvq_codec & c); // with the grid's points
    kvq_affine_geometry half_geometry(
        const kvq_codec & c, bool fast);                // of split keys; n_parts 0: there is no such block
    const int32_t * squares(const kvq_codec & c) const; // kvq_lattice_squares on the device; after geometry()
    // bytes of a block, of a multiprocessor
    int ordinal, n_sm = 1, max_shared = 48 << 10, max_shared_sm = 48 << 10;
    void * stream = nullptr;
    template <typename T> bool grow(T *& p, size_t & n, size_t need, const char * what);
    uint8_t * slab = nullptr; // CUDA rounds every allocation up to 2 MiB: a cache's lanes lie in one
    size_t nb_slab = 0, slab_used = 0, n_in_slab = 0;
    std::map<const uint8_t *, size_t> blocks; // of alloc(), beside the slab
    float * partial = nullptr;
    uint32_t * tickets = nullptr;
    size_t n_partial = 0, n_tickets = 0;
    struct seen_table {
        uint32_t * work = nullptr;
        size_t n_words = 0;
        uint64_t evaluation = 0;
        std::array<int64_t, 12> key = {};
    };
    std::array<seen_table, 4> seen; // layers of different pages have one each
    uint64_t n_evaluations = 0;
    float *lse = nullptr, *parts = nullptr; // parts: of log-sum-exp
    size_t n_lse = 0, n_parts = 0;
    uint32_t *addresses = nullptr, *packing = nullptr; // of gather; of pack
    size_t n_addresses = 0, n_packing = 0;
    float * points = nullptr; // of all grids; then the squares of those that have some
    void * expanded = nullptr;
    size_t nb_expanded = 0;
    struct row_job;
    struct rotary_copy {
        const kvq_rotary * host;
        float *high, *low;
        int n_high, capacity;
    };
    const void * constant(const void * host, size_t nb);          // a copy here of bytes that stay
    void * keep(const void * name, const void * host, size_t nb); // a copy of `host` that constant(name) finds
    const uint8_t * weights_of(const kvq_predictor & w);          // a copy as kernels want it; NULL: no memory
    const float * mean_of(const float * host, size_t n);
    kvq_device_order order_of(const kvq_order * host, size_t n, bool back);
    kvq_device_basis basis_of(const kvq_basis * host, const kvq_codec & keys);
    struct wave_table {
        const kvq_rotary * host;
        int head_size;
        uint16_t * rows;
    };
    const uint16_t * waves_of(const kvq_rotary * host, int head_size); // cos and sin of 0 .. 127 (decode_means.cuh)
    // decode attention reads sealed pages that leave something out, as they are
    bool reads_sealed(const kvq_attn * attn, int n, kvq_attend_args & a);
    kvq_device_rotary rotary(const kvq_rotary * host);
    kvq_turn turn(const kvq_attn & a, bool value);
    void refresh(); // tables of rotary embedding that have grown
    bool room_for_rows(size_t nb);
    bool more_memory(void *& memory, size_t & nb_memory, size_t nb); // what it held is lost
    mutable size_t nb_promised = 0;                                  // of workspace, in the load line
    void expand_lane(const kvq_codec & c, const kvq_page * pages, int n_pages, int n_head, const kvq_row_place & to,
        const kvq_turn & turn);
    // how decode kernels share the work, with memory for what blocks leave each other; false: out of memory
    bool split(kvq_attend_args & a, int n_streams, int n_warps, bool few);
    bool may_list(const kvq_attn & f, int n) const;
    bool list_pages(kvq_attend_args & a); // instead of split(); false: out of memory
    // with a second tier (kvq_far); false: an error is noted
    bool attend_far(const kvq_attend_args & all, const kvq_attn * attn, int n_streams, const kvq_lane_layout * k);
    // values that follow from keys alone (device_fold.cu)
    bool may_fold(const kvq_attend_args & a, const kvq_attn * attn, const kvq_chain_pages * chain);
    bool may_read_coords(const kvq_attend_args & a, const kvq_attn * attn, int n_streams);
    bool add_coord_logits(
        const kvq_attend_args & a, const kvq_attn * attn, int n_streams, struct kvq_coord_read_args & r);
    const uint8_t * basis_weights(const kvq_basis & b, int head_size, bool apart);
    // chain NULL: cells with coordinates
    bool describe_fold(const kvq_attend_args & a, const kvq_attn * attn, int n_streams, const kvq_chain_pages * chain,
        struct kvq_fold_args & f);
    bool attend_fold(const kvq_attend_args & all, const kvq_attn * attn, int n_streams, const kvq_chain_pages * chain);
    bool unfold_keys(const kvq_attn * attn, int n, const kvq_chain_pages * chain);
    struct far_call {
        kvq_attn attn;
        kvq_far far;
        size_t at[2], nb_page[2]; // of keys, of values: where rows are in `stage`, and from one page to the next
        int n_staged;             // pages whose rows are there, from the first one on
    };
    void overlay_far(const kvq_attn & a, const kvq_row_place & to, const far_call * came);
    // rows of call i of n in the workspace of plain rows
    kvq_row_place place_of(const kvq_attn * attn, int n, int i, bool value, void * memory) const;
    bool take_ahead(const kvq_attn * attn, int n);
    void ask_ahead(const kvq_attn * attn, int n);
    bool make_far_stream();
    struct far_sizes { // of a call: query tokens at a time, and what a stream's kernels leave each other
        int n_q;
        size_t logits, keys, tops, list, all; // bytes
    };
    far_sizes sizes_of_far(const kvq_attend_args & all, const kvq_attn & f, const kvq_lane_layout * k) const;
    bool far_tokens(const kvq_attend_args & all, const kvq_attn * attn, int n_streams, const far_sizes & size, int t0,
        kvq_attend_args & a, kvq_far_args & r);
    // of picks one step ahead (device_ahead.cu)
    bool reads_kept(const kvq_attend_args & all, const kvq_attn * attn) const;
    bool attend_kept(const kvq_attend_args & all, const kvq_attn * attn, int n_streams, const far_sizes & size);
    void * begin_picks();
    void end_picks();
    bool take_place(size_t nb, bool beside);
    // Logits of some layers lie side by side: places in turn. Picks of half of them may be under way while attention
    // writes the others.
    static constexpr size_t NB_PLACES = 64u << 20;
    static constexpr int MOST_PLACES = 8;
    size_t nb_place = 0;
    int n_places = 1, place = 0;
    int half_of_places() const { return std::max(1, n_places / 2); }
    static kvq_far_kept kept_of(const kvq_far_args & r, const kvq_attn * attn, int n_streams);
    static bool reads_picks(const kvq_far_args & r, const kvq_far_kept & kept);
    static void read_kept(const kvq_far_kept & kept, kvq_attend_args & a, int n_streams);
    void flush_renewed();
    std::map<void *, std::shared_ptr<kvq_far_renew>> to_renew;                // by buffer
    void *picks_asked = nullptr, *picks_there = nullptr, *half_there[2] = {}; // events
    bool picks_pending = false, half_pending[2] = {};
    void stage_pages(const void * const * rows, int n_pages, size_t nb_page, uint8_t * to);
    struct table_here {
        const void * const * rows;
        size_t n;
    };
    std::map<const void * const *, table_here> far_tables; // by table there
    table_here here(const void * const * table) const;     // from this entry on; n 0: no table is known by this name
    std::vector<far_call> coming;                          // asked for ahead
    std::map<const void *, std::vector<far_call>> next_far;
    const void * last_far = nullptr;
    void *far_stream = nullptr, *far_ready = nullptr, *far_left = nullptr, *stage = nullptr;
    size_t nb_stage = 0;
    // false: not possible, and no kernel was launched
    bool attend_rows(
        const kvq_attend_args & a, const kvq_codec & k, const kvq_codec & v, const kvq_attn * attn, int n_streams);
    // sealed pages as open ones, into a workspace of one layer
    bool unfold(const kvq_attn * attn, int n, const kvq_chain_pages * chain);
    int stripe_cells(int width) const;
    // whole: the table's pages keep the other lane
    void run_chain(const kvq_chain_pages & c, kvq_page * table, uint16_t * tiles, bool whole = false);
    std::map<const void *, void *> constants;
    std::vector<rotary_copy> rotaries;
    std::vector<wave_table> waves;
    uint8_t *unfolded = nullptr, *predicted = nullptr;
    size_t nb_unfolded = 0, unfolded_table = 0, nb_predicted = 0; // unfolded_table: bytes of a stream's table
    int32_t * row_positions = nullptr;                            // beside row_table
    std::vector<int32_t> rows_at;
    step now = EAGER;
    std::vector<uint16_t *> rows_to; // the table as this step fills it
    uint16_t ** row_table = nullptr;
    std::vector<row_job> held;
    struct choice_batch; // salient cells of a lane's pages
    std::vector<std::shared_ptr<choice_batch>> to_choose;
    void choose_later(const kvq_lane_layout & l, bool normalise, const kvq_choose_job & job);
    void mend_set(const kvq_lane_layout & l, uint8_t * params);
    void flush_choices();
    struct seal_batch; // pages of one geometry
    // lanes of many layers seal in the same step: they wait for each other
    std::vector<std::shared_ptr<seal_batch>> to_seal;
    void flush_mixed(const seal_batch & first, const seal_batch * second);
    struct tile_copy {
        void * to;
        const void * from;
        size_t nb;
    };
    std::vector<tile_copy> to_copy;
    std::vector<std::pair<kvq_page *, kvq_page>> to_put;
    std::vector<std::pair<uint64_t *, uint64_t>> to_set; // one word each: addresses
    struct far_batch;                                    // pages of one shape
    void flush_far();
    std::vector<std::shared_ptr<far_batch>> to_far;
    struct turn_batch; // pages whose rows change in one way (take_out)
    kvq_turn_args turn_shape(const kvq_lane_layout & l, const kvq_row_transform & x);
    void flush_turns();
    std::vector<std::shared_ptr<turn_batch>> to_turn;
    struct coord_batch; // pages of one layer whose coordinates are taken
    void flush_coords();
    std::vector<std::shared_ptr<coord_batch>> to_take;
    std::set<const uint8_t *> to_say;             // coordinates that what waits reads
    std::set<const uint16_t *> to_read, to_write; // tiles of what waits
    uint8_t *far_sums = nullptr, *logits_memory = nullptr;
    size_t n_far_sums = 0, nb_logits_memory = 0;
    kvq_pinned_memory pinned;       // alloc_host, alloc_far
    kvq_staging staging;            // put_all
    std::vector<uint16_t> entering; // tiles of enter_rows
    bool waits() const {
        return !to_renew.empty() || !to_choose.empty() || !to_seal.empty() || !to_far.empty() || !to_turn.empty() ||
            !to_take.empty() || !to_copy.empty() || !to_put.empty() || !to_set.empty();
    }
    uint64_t n_moved = 0;
    std::map<const size_t *, size_t> wanted; // sizes that a recording missed
    std::string err, kernels;
};

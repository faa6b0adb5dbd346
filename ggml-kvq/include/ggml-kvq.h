// ggml-kvq: a KV cache in 1-4 calibrated bits. C ABI of libggml-kvq.so.
//
// Three doors, one set of kernels:
//   * llama.cpp programs load the library as a ggml backend (GGML_BACKEND_PATH, -dev KVQ0) and never see this header;
//   * Python and tests bind the functions below through ctypes: encode, decode, attend on raw rows;
//   * ggml programs build graph nodes with the functions of ggml-kvq-graph.h.
//
// Conventions: f16 values are uint16_t IEEE half bits; n_ counts, nb_ bytes; strides are in elements.
// Every function that can fail returns a kvq_status; kvq_last_error() then holds one line that names the value and
// the cure.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef KVQ_API
#define KVQ_API __attribute__((visibility("default")))
#endif

#define KVQ_ABI_VERSION 1

typedef enum kvq_status {
    KVQ_OK = 0,
    KVQ_ERR_METHOD = 1, // no such method
    KVQ_ERR_OPTION = 2, // no such option, or a value outside its range
    KVQ_ERR_SHAPE = 3,  // a head size, head count or layer layout the method cannot hold
    KVQ_ERR_MODEL = 4,  // the model cannot be identified or does not fit the configuration
    KVQ_ERR_CONFIG = 5, // calibrated data missing, corrupt or of another model
    KVQ_ERR_MEMORY = 6,
    KVQ_ERR_ARGUMENT = 7, // a caller's mistake: null pointer, negative count
} kvq_status;

KVQ_API int kvq_abi_version(void);
KVQ_API const char * kvq_version(void);
KVQ_API const char * kvq_last_error(void); // thread-local, "" when nothing failed
KVQ_API const char * kvq_last_note(void);  // likewise, of data or variables taken with a reservation
KVQ_API const char * kvq_kernel_name(
    void); // "avx512-amx", "avx512-vnni", "avx2", "portable"; KVQ_ISA forces a lower one

// ---------------------------------------------------------------- methods

typedef struct kvq_option_info {
    const char * key;
    const char * type; // "int", "int|auto", "float", "bool" or "a|b|c"; PATH among them: any text with a slash in it
    const char * default_value;
    const char * help;
    const char * source; // paper and section
} kvq_option_info;

typedef struct kvq_method_info {
    const char * name;
    const char * summary;
    const char * paper;
    int32_t n_options;
    const kvq_option_info * options;
} kvq_method_info;

KVQ_API int kvq_method_count(void);
KVQ_API const kvq_method_info * kvq_method_at(int i); // NULL when out of range

// Checks a method name and its "key=value,key=value" options without a model.
KVQ_API int kvq_check(const char * method, const char * opts);

// Configuration of the KV caches this thread creates next. method NULL: back to the environment
// (KVQ_METHOD, KVQ_OPTS, KVQ_CONFIG, KVQ_MODEL). opts, config and model may be NULL.
KVQ_API int kvq_configure(const char * method, const char * opts, const char * config, const char * model);

// Which method, options and calibrated data hold, and why: the rule of docs/llama-cpp.md ("What holds"), which caches
// follow that are made after kvq_configure or by the environment. Texts are "" or NULL where nothing was given, but a
// method that is "" was given and is refused.
typedef enum kvq_asker { // whose words messages use
    KVQ_ASKS_BY_VARIABLES = 0,
    KVQ_ASKS_BY_FLAGS = 1,     // "--kv-method kivi", of a launcher
    KVQ_ASKS_BY_ARGUMENTS = 2, // "kv_method=kivi", of a binding
} kvq_asker;

typedef struct kvq_request {
    int32_t asker;
    const char * method; // flag or argument; "none": llama.cpp's own cache
    const char * opts;
    const char * config;     // "none": not the file beside the model
    const char * env_method; // KVQ_METHOD, KVQ_OPTS, KVQ_CONFIG of whoever asks: the environment is not read
    const char * env_opts;
    const char * env_config;
    const char * number; // "--kv-bits 2.5": for messages; the method that fits itself to a number is meant
    const char * model;  // GGUF file; its header is read
} kvq_request;

// Texts live until this thread asks again. *_from is one word: flag (or argument), environment, config (the file of
// calibrated data names the method), embedded (the model's metadata), sidecar (beside the model), default; "": none.
typedef struct kvq_resolved {
    const char * method; // "": nobody names one, "none": asked for by name: llama.cpp's own cache in both
    const char * method_from;
    const char * method_words; // for messages: "--kv-method kivi", "method kivi of the model's metadata (m.gguf)"
    const char * opts;         // as asked for: the variable's, then the flags' or arguments', of which the later win
    const char * options;      // all of them: those that the file of data sets come first
    const char * options_from; // of the strongest that gave any
    const char * config;       // file of calibrated data, the model itself when they are embedded
    const char * config_from;
    const char * note; // what was given and is not used, or ""
    // The user has given no data, and it 1: goes better with channel means, 2: is to have predictors, 3: coordinates.
    // Beside 3 `config` may be means that serve until then.
    int32_t wants_means;
} kvq_resolved;

KVQ_API int kvq_resolve(const kvq_request * request, kvq_resolved * answer);

// What a model's weights are, whatever their quantisation (gguf/fingerprint.h): calibrated data holds it. Returns the
// number of values, 0: not readable; at most n are written to out.
KVQ_API size_t kvq_model_sketch(const char * path, float * out, size_t n);

// path: where data lie that were measured on the model's first use, in the folder of such data (gguf/measured.h);
// valid until the thread's next call, "" when the model cannot be read. what: 0: the file of means; 1: that of means
// and predictors; 2: that of means and coordinates. KVQ_OK: they are there, whole, of this model.
KVQ_API int kvq_measured(const char * model, int what, const char ** path);

// ---------------------------------------------------------------- block formats

typedef enum kvq_type {
    KVQ_TYPE_F16 = 0,     // rows as they came
    KVQ_TYPE_AFFINE = 1,  // x = zero + scale * code
    KVQ_TYPE_LATTICE = 2, // x = H (scale * point[index]), H a Hadamard rotation of the head
    KVQ_TYPE_MIXED = 3,   // affine in two widths: the salient cells of a page in more bits
} kvq_type;

typedef enum kvq_role {
    KVQ_ROLE_K = 0, // affine: one (scale, zero) per channel and `group` cells
    KVQ_ROLE_V = 1, // affine: one (scale, zero) per cell and `group` channels
} kvq_role;

// Keys in two halves: the channels of the rotary pairs that turn fast, and those of the slow ones.
typedef enum kvq_split {
    KVQ_SPLIT_NONE = 0,
    KVQ_SPLIT_NORM = 1, // pairs (2i, 2i + 1): the fast half is channels 0 .. D/2 - 1
    KVQ_SPLIT_NEOX = 2, // pairs (i, i + D/2): the fast half is channels 0 .. D/4 - 1 and D/2 .. 3D/4 - 1
} kvq_split;

// The block format of one page of one KV head. Byte maps: types/affine.h, types/lattice.h, types/mixed.h.
typedef struct kvq_codec {
    int32_t type;  // kvq_type
    int32_t role;  // kvq_role
    int32_t bits;  // 1..4; 0 stores no codes (every value at the middle of its group)
    int32_t group; // affine: K cells, V channels per group; lattice: channels per index
    // 0: f16 scales and zeros; 1: 8-bit, 2: 4-bit ones under an f16 range per block (2: affine and mixed only)
    int32_t scale;
    int32_t levels;    // 0: codes round to end points; 1: 2^bits equal bins, mid-points
    float eta;         // end points pulled inward by eta of the range (XQuant section 3.2)
    int32_t n_cells;   // cells of a page
    int32_t head_size; // channels of a head
    int32_t hi, n_hi;  // mixed: bits of the salient cells, and how many of a page are
    int32_t split;     // lattice keys: kvq_split
    int32_t fast_bits; // split: bits of the fast half, 0: its channels are zero; `bits` are those of the slow half
    int32_t coords;    // lattice keys: a head's share of a cell's coordinates and their scale (kvq_basis), even, 0..64
    int32_t reserved[2];
} kvq_codec;

typedef struct kvq_type_info {
    const char * name; // "f16", "affine2", ...
    int32_t type, bits;
    int32_t block_cells;   // smallest page
    double bits_per_value; // head size 128, group 32
} kvq_type_info;

KVQ_API int kvq_type_count(void);
KVQ_API const kvq_type_info * kvq_type_at(int i);

// Bytes of one block: codes and parameters. KVQ_ERR_SHAPE when the format cannot hold these numbers.
KVQ_API int kvq_codec_bytes(const kvq_codec * codec, size_t * nb_codes, size_t * nb_params);

// rows: f16 [n_cells][head_size]. valid: bit i set = cell i holds data (NULL: all do); other cells do not
// influence the parameters. shared: codes of another layer to adopt instead of writing own ones (then `codes` may be
// NULL).
KVQ_API int kvq_encode(const kvq_codec * codec, const uint16_t * rows, const uint8_t * valid, const void * shared,
    void * codes, void * params);
KVQ_API int kvq_decode(const kvq_codec * codec, const void * codes, const void * params, uint16_t * rows);

// The f16 image of a block that a saved state carries: decoded values whose lowest mantissa bits hold the parameters,
// so that kvq_image_match restores the identical block. Returns 1 on a match, 0 for rows that are no such image.
KVQ_API int kvq_image(const kvq_codec * codec, const void * codes, const void * params, uint16_t * rows);
KVQ_API int kvq_image_match(
    const kvq_codec * codec, const uint16_t * rows, const void * shared, void * codes, void * params);

// Saved states carry checksums (store/mark.h), and with them a number of whoever saves, 0: none. Of this thread, until
// it begins again: the number that saved states carry, and the one that a restored state carried. kvq_last_error() is
// "" after kvq_state_begin.
KVQ_API void kvq_state_begin(uint32_t tag);
KVQ_API uint32_t kvq_state_tag(void);

// rows f32 [n][n_head*head_size] become what encoded pages of n_cells rows give back.
KVQ_API int kvq_round_trip(const kvq_codec * codec, int n_head, int64_t n, float * rows, int n_threads);

// Predictors (AQUA-KV section 3.1): out[t] = W rows[t] + add[t], rows rounded to 8 bits, W held in 8 or 4 bits
// (types/predictor.h); the same bits on every machine. w f32 [n_out][n_in]; rows, add (NULL: none) and out are
// contiguous.
KVQ_API size_t kvq_weights_bytes(int n_in, int n_out, int bits); // 0: no such format
KVQ_API int kvq_weights_pack(int n_in, int n_out, int bits, const float * w, void * weights);
KVQ_API int kvq_predict(int n_in, int n_out, int bits, const void * weights, int64_t n, const float * rows,
    const float * add, float * out, int n_threads);

// ---------------------------------------------------------------- attention

// A run of slots: one page of all KV heads. Sealed: head h starts at codes + h*nb_codes and params + h*nb_params.
// Open: f16 tile [n_head_kv][n_slots][head size padded to 16].
typedef struct kvq_page {
    const void * k_codes;
    const void * k_params; // NULL: K is open
    const void * v_codes;
    const void * v_params; // NULL: V is open
    // cell of slot 0 when map is NULL; with a map -n when no slot of any head is empty and all cells are below n
    int32_t cell;
    int32_t n_slots;     // 0: nothing was ever written, skipped
    const int32_t * map; // slot -> cell, -1 for a slot that holds nothing; NULL: cell + slot
} kvq_page;

// cos and sin of rotary embedding for keys kept before it, n = n_dims/2 frequencies. Magnitudes are folded into `high`.
#define KVQ_ROTARY_LOW 80
typedef struct kvq_rotary {
    int32_t n_dims, neox; // neox: pairs (i, i + n), else (2i, 2i + 1); channels from n_dims on stay
    int32_t n_high;
    const float * high; // [n_high][cos, sin][n] of positions 64*i
    const float * low;  // [n][cos, sin][KVQ_ROTARY_LOW] of positions 0..79
    const void * turns; // what else the library derives from the frequencies; NULL: attention takes a slower way
} kvq_rotary;

// The tables of an ordinary embedding, angle = pos * freq_base^(-2i/n_dims), for positions below n_positions; NULL:
// bad numbers.
KVQ_API const kvq_rotary * kvq_rotary_new(int n_dims, int neox, float freq_base, int n_positions);
KVQ_API void kvq_rotary_free(const kvq_rotary * rotary);

// Sorted keys: before encoding, the channels of a key take another order and each a gain of its own, so that channels
// of equal weight lie in one block (types/lattice.h). Of channel i of a block of head h, j = h*head_size + i:
//   encoded[i] = key[channel[j]] * gain[j]        key[channel[j]] = decoded[i] * back[j]
// Two channels that rotary embedding turns together share a gain and stay neighbours, so sorting and turning commute.
// In keys of one block channels stay where they are, channel[j] = i, and each has its gain.
typedef struct kvq_order {
    const uint16_t * channel; // [n_head_kv][head_size], of each head a permutation of 0..head_size-1
    const float *gain, *back; // likewise; finite, > 0
} kvq_order;

// A basis of rows: what the rows of all heads of a cell have in common, in few numbers of 4 bits (types/basis.h).
//   row[i] = scale * step[i] * sum_j (2 c[j] - 15) out[j/4][i][j%4] + what the blocks hold        c[j] = 0..15
// Keys have coordinates. Values are read from those of the key of the same cell.
typedef struct kvq_basis {
    int32_t n, width; // coordinates of a cell, n_head_kv * codec.coords - 2, and channels of all heads
    // keys: [width][n], c[j] = 8 + floor(sum_i row[i] in[i][j] / scale), within 0..15; values: [n][width], step * out
    const float * in;
    const int8_t * out;  // [n/4 rounded up][width][4], zeros behind n
    const float * step;  // [width]
    const int32_t * off; // [width]: 15 times the sum over j of out
} kvq_basis;

// Coordinates of a page: keys f32 [n_cells][n_head_kv * head_size], before rotary embedding and less their means, into
// the parameters of n_head_kv blocks (each kvq_codec_bytes of parameters, one behind the other), and the rows of
// `width` channels that they say, of keys or of values. codec: of keys; read, axes: f32 [n][width], what a coordinate
// is read with and what a coordinate of 1 adds to a row. KVQ_ERR_SHAPE where the numbers do not fit each other.
KVQ_API int kvq_coords_encode(
    const kvq_codec * codec, int n_head_kv, const float * read, const float * rows, void * params);
KVQ_API int kvq_coords_decode(
    const kvq_codec * codec, int n_head_kv, int width, const float * axes, const void * params, float * rows);
// A basis for kvq_attn, of the same axes; read: NULL of values. NULL: bad numbers. kvq_basis_free frees it.
KVQ_API const kvq_basis * kvq_basis_new(int n, int width, const float * axes, const float * read);
KVQ_API void kvq_basis_free(const kvq_basis * basis);

enum {
    KVQ_ATTN_F32 = 1, // keep f32 arithmetic on sealed pages instead of int8 folding
    // a promise: positions of sealed cells are those of `sealed`. Devices then read keys without turning them
    KVQ_ATTN_STAYED = 2,
    // Latent attention: one KV head whose keys are two blocks, of codec `k` and then of codec `v`, both in the layout
    // of keys. Queries have the channels of both. Values are the first block, or both: then the first one's head size
    // is a multiple of 16.
    KVQ_ATTN_LATENT = 4,
    KVQ_ATTN_LATENT_ALL = 8,
};

// How far rows are kept: as they came (the row of an open tile), or in blocks of 32 channels, x = scale * code with
// an f16 scale (types/far_rows.h).
typedef enum kvq_far_format {
    KVQ_FAR_F16 = 0,
    KVQ_FAR_Q8 = 1,
    KVQ_FAR_Q4 = 2,
} kvq_far_format;

typedef enum kvq_fetch {
    KVQ_FETCH_OFF = 0,
    KVQ_FETCH_NOW = 1,   // every query token picks for itself
    KVQ_FETCH_AHEAD = 2, // what the last token of a step picks is read by the steps that follow (kvq_far::kept)
    KVQ_FETCH_ALL = 3,   // every sealed cell is read from its far row
} kvq_fetch;

// The second tier of a stream (SpeCache, ICML 2025, section 3): near blocks of every sealed cell are what `pages` says,
// far rows are the same cells as they came. Per query token and KV head:
//   p(g, t)  = probability of cell t for query head g, keys of sealed cells as near blocks have them
//   score(t) = sum over the query heads of the KV head of p(g, t)
//   picks    = the `top` cells of highest score > 0 whose keys and values are sealed and have far rows; earlier cells
//              first when equal
//   dst      = softmax over all cells, picked cells with keys and values of their far rows
typedef struct kvq_far {
    int32_t fetch;   // kvq_fetch
    int32_t top;     // cells per query token and KV head
    int32_t format;  // kvq_far_format
    int32_t n_cells; // of a page
    // by page of the stream: rows of all KV heads, [head][cell][kvq_far_row_bytes]; NULL: the page has none
    const void * const * k_rows;
    const void * const * v_rows;
    // AHEAD, in and out: [n_head_kv][n_kept] cells, -1 behind the last. This call reads these far rows in place of its
    // own picks; NOW with n_kept: its own, as if no cell had been kept. Then one token after the other, the last
    // n_kept / top of them, puts its picks in front, in ascending order; behind them stay those that were here before,
    // as many as there is room for: rows that were not picked for the longest time go first.
    int32_t * kept;
    // added to: rows fetched (of one KV head and cell, keys and values count once; AHEAD: those that were not kept);
    // rows wanted by the first token of a step, and how many of those were kept (AHEAD); steps
    uint64_t * counts; // [4]
    void * buffer;     // AHEAD, engines with memory of their own: where kept rows lie (engine/far_buffer.h)
    int32_t n_slots;   // of the stream
    int32_t n_kept;    // rows per KV head, `top` or more; NOW: 0, none are kept
} kvq_far;

// One stream: dst[iq][ih][:] = softmax(scale*q.k + mask) v
typedef struct kvq_attn {
    kvq_codec k, v;
    int32_t n_q, n_head, n_head_kv, n_pages;
    int32_t n_kv; // cells at or beyond n_kv are masked
    int32_t flags;
    float scale, max_bias, softcap;
    const float * q;
    int64_t q_stride_token, q_stride_head;
    const uint16_t * mask;
    int64_t mask_stride_token, mask_stride_head; // f16, added to the logits; NULL: none
    const float * sinks;                         // [n_head], NULL: none
    float * dst;
    int64_t dst_stride_token, dst_stride_head;
    const kvq_page * pages;
    // Lattice pages only, each may be NULL: what was taken from keys and values before encoding, f32 [n_head_kv][head
    // size], and the rotary embedding of keys with the position of every cell. Keys lack it altogether, or have that
    // of the positions `sealed` (below), their means included: key = R_pos (decoded + mean)  or  R_(pos - sealed)
    // decoded + R_pos mean.
    const float *k_mean, *v_mean;
    const kvq_rotary * rotary;
    const int32_t * positions;
    float * lse; // out, [n_q][n_head]: log of the sum of a row's exponentials, sinks included; NULL: not wanted
    const int32_t * sealed; // position of every cell when it was encoded; NULL: before rotary embedding
    int64_t map_stride;     // of the maps of pages, from one KV head to the next; 0: one map for all heads
    const kvq_far * far;    // NULL: one tier. Pages have no maps then, and n_cells slots
    // Sorted lattice keys: key = R_(pos - sealed) unsorted(decoded) + R_pos mean; NULL: no order and no gains
    const kvq_order * k_order;
    // Lattice pages of whole layers: sealed rows also lack what the coordinates of keys say, keys before rotary
    // embedding as their mean. NULL: k.coords is 0
    const kvq_basis *k_basis, *v_basis;
} kvq_attn;

// Bytes of a far row of head_size channels; 0: no such format.
KVQ_API size_t kvq_far_row_bytes(int format, int head_size);
// n rows, f16 [n][head_size], as far rows, and back.
KVQ_API int kvq_far_encode(int format, int head_size, int64_t n, const uint16_t * rows, void * out);
KVQ_API int kvq_far_decode(int format, int head_size, int64_t n, const void * far, uint16_t * rows);

// n independent streams at once, shared among n_threads threads.
KVQ_API int kvq_attend(const kvq_attn * attn, int n, int n_threads);

// Column sums of attention probabilities, after kvq_attend wrote attn->lse (ZipCache section 4.3, MiniKV section
// 3.1.2):
//   sums[h][slot] += sum over the query heads of KV head h and the `rows` (query tokens, NULL: all) of exp(logit - lse)
//   seen[h][slot] += rows that see the slot, unless NULL
// Slots of attn->pages, which may be any of the pages that were attended, follow one another. Memory does not grow
// with n_q.
KVQ_API int kvq_column_sums(
    const kvq_attn * attn, const int32_t * rows, int n_rows, float * sums, int32_t * seen, int n_threads);

// The rows (query tokens) of a call of n that zipcache takes as probes, ascending; at: cell of the first one; share:
// of all rows; layer: ordinal of the layer, the seed. Returns how many; rows holds n.
KVQ_API int kvq_probe_rows(int n, uint64_t at, float share, int page_cells, uint32_t layer, int32_t * rows);

// ---------------------------------------------------------------- accounting

typedef struct kvq_layer_shape {
    int32_t il, n_head_kv, head_size_k, head_size_v;
} kvq_layer_shape;

typedef struct kvq_stats {
    char method[32];
    char options[128];
    char kernel[32];
    int32_t n_layer, n_cells, n_stream, page_cells;
    uint64_t bytes_f16; // the same cache as upstream's f16
    uint64_t bytes_codes, bytes_params, bytes_window, bytes_tables, bytes_calibration, bytes_chain;
    uint64_t bytes_total;                    // sum of the six: what is allocated
    uint64_t bytes_scratch;                  // shared f16 pages of the current ubatch, grown on demand
    double bits_k, bits_v, bits;             // true bits: allocated bytes * 8 / values of the f16 cache
    double bits_headline;                    // code bits only, as papers count
    uint64_t n_sealed, n_reopened, n_forced; // pages, since creation; restored ones that came sealed, too
    uint64_t predict_macs; // multiply-adds of predictors for one cached cell, each time it is read; all layers
    // of a second tier: bytes of all its rows; in bytes_total where they lie in the memory that attention computes in
    uint64_t bytes_far;
    uint64_t n_fetched, n_wanted, n_hits, n_steps; // as kvq_far's counts, all layers and streams
    // As what llama.cpp declares keys and values (-ctk, -ctv). Of a plan: the smallest type that holds all layers.
    char type_k[8], type_v[8];
} kvq_stats;

// Memory of a cache that does not exist yet. layers: those with attention, in order; n_layer_model: how many the model
// has. When these are fewer, they are those of one cache of several (sliding windows), and il counts layers with
// attention from 0.
KVQ_API int kvq_plan(const char * method, const char * opts, const kvq_layer_shape * layers, int n_layers,
    int n_layer_model, int n_cells, int n_stream, kvq_stats * out);

// The same of layers with a sliding window, beside a cache of layers that see the whole context: channels_whole of keys
// and values a cell, in cells_whole cells. Methods that fit themselves to a number of bits give such layers more where
// that costs the model little.
KVQ_API int kvq_plan_window(const char * method, const char * opts, const kvq_layer_shape * layers, int n_layers,
    int n_layer_model, int n_cells, int n_stream, int channels_whole, int cells_whole, kvq_stats * out);

// Live caches of this process, in creation order. What is told of one on a GPU is whole once llama_synchronize has
// returned: methods that evict may seal a prompt's last layer then.
KVQ_API int kvq_cache_count(void);
KVQ_API int kvq_cache_stats(int i, kvq_stats * out);
// Of the layers of a live cache that fetch far rows: their numbers il [n] and counts [n][4] as kvq_far has them, all
// streams. Returns how many layers there are, whatever n is; -1: no such cache.
KVQ_API int kvq_cache_fetched(int i, int n, int32_t * il, uint64_t * counts);
// Rows of a live cache between two decodes, f32 [n][width], width = KV heads * head size. Keys of methods that keep
// them before rotary embedding come without it; with a window that holds them all, exactly as the model made them
// (f16).
KVQ_API int kvq_cache_rows(int i, int il, int value, int stream, int cell, int n, float * out);
// How the keys of a layer can be split, as graphs have shown so far: kvq_split. NONE without rotary embedding, or with
// one of part of a head or of several positions. -1: no such layer.
KVQ_API int kvq_cache_split(int i, int il);
// Mean square of the queries that a layer's attention met, f64 [n_head_kv][head size], over tokens behind the first 4
// cells and the query heads of a KV head, while kvq_observe_queries(1) holds for the process: calibration alone asks,
// and steps on a GPU are slow then. out holds n values, as many are written; returns how many there are, 0: none were
// met; -1: no such layer.
KVQ_API void kvq_observe_queries(int on);
KVQ_API int64_t kvq_cache_queries(int i, int il, int n, double * out);
KVQ_API const char * kvq_cache_line(int i); // the load line of a live cache; valid until the thread's next call

// ---------------------------------------------------------------- the laboratory

// Method lab simulates a cache: it calls a program back for every run of pages that seals, and keeps in f16 what the
// program makes of them (docs/laboratory.md). Calls come from the thread that computes, on the CPU only.
typedef struct kvq_lab_page {
    void * handle;               // of this call, for kvq_lab_rows and kvq_lab_turn
    int32_t il, ordinal, stream; // number of the layer among the model's with attention, and in its cache
    int32_t n_pages, page_cells; // all of them seal together
    int32_t n_head, head_size_k, head_size_v;
    int32_t n_dims, neox;           // channels of a key that are turned, 0: none; pairs as in kvq_rotary
    int32_t before_il, before_head; // of the layer before in the cache; -1 and 0: there is none
    int32_t before_k, before_v;     // its head sizes
    const int32_t * pages;          // [n_pages], numbers in the stream
    const int32_t * positions;      // [n_pages][page_cells], -1: the cell holds nothing
    // f32 [n_pages][page_cells][n_head][head size]: as the model wrote them, keys turned; cells that hold nothing are 0
    const float *keys, *values;
    float *new_keys, *new_values; // likewise, filled by the program: what the cache holds from now on
} kvq_lab_page;

// Cells of a stream when attention has read a layer, and once more (without probabilities) when pages sealed after it.
typedef struct kvq_lab_cells {
    void * handle;
    int32_t il, ordinal, stream;
    int32_t n_cells, n_head, page_cells;
    const int32_t * positions;   // [n_cells], -1: the cell holds nothing
    const uint8_t * sealed;      // [n_cells], 1: its page is sealed, so that it may go
    const float * probabilities; // [n_head][n_cells]: mean over the observed query tokens and the query heads
    uint8_t * held;              // [n_head][n_cells], in: 0: was evicted before; out: 0: evicted from now on
    int32_t n_queries;           // query tokens that probabilities are the mean of
} kvq_lab_cells;

typedef struct kvq_lab {
    void * user;
    // 0: done. Else this page and all that follow stay as they came, and no further call is made.
    int (*seal)(void * user, const kvq_lab_page * page);
    int (*judge)(void * user, const kvq_lab_cells * cells); // likewise; NULL: nothing is evicted
    int32_t n_observed;                                     // newest query tokens of a step that probabilities are of
    int32_t queries;                                        // 1: kvq_lab_rows tells of queries
} kvq_lab;

typedef enum kvq_lab_what {
    KVQ_LAB_BEFORE_K =
        0, // f32 [n_pages][page_cells][before_head][before_k]: what the layer before holds of these cells
    KVQ_LAB_BEFORE_V = 1,
    KVQ_LAB_QUERIES = 2, // f32 [n_head][head_size_k]: mean square of the layer's queries so far, by KV head and channel
} kvq_lab_what;

// The program of caches with method lab that this thread creates next; NULL: none, whose rows stay as they came.
KVQ_API int kvq_lab_set(const kvq_lab * lab);
// While a call of kvq_lab::seal lasts. kvq_lab_turn: keys f32 [n_pages][page_cells][n_head][head_size_k], of the layer
// before (before 1) or of this one, are turned by the positions of their cells, or turned back (back 1), in place.
KVQ_API int kvq_lab_rows(void * handle, int what, float * out);
KVQ_API int kvq_lab_turn(void * handle, int before, int back, float * keys);

// 0: print nothing; 1 (default): errors and the load line on stderr. KVQ_QUIET=1 in the environment starts at 0.
KVQ_API void kvq_set_verbosity(int level);

// Sizes and field offsets as this library was compiled, e.g. ("llama_context_params", "n_ctx"); (size_t) -1 when
// unknown.
KVQ_API size_t kvq_sizeof(const char * type);
KVQ_API size_t kvq_offsetof(const char * type, const char * field);

#ifdef __cplusplus
}
#endif

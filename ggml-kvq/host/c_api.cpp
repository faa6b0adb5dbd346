// The C ABI over the house: methods, block formats, planning, attention. Caches are in cache/cache.cpp.
#include "cache/config.h"

#include "cache/accounting.h"
#include "cache/declared.h"
#include "cache/level.h"
#include "policy/compose.h"
#include "policy/probe.h"
#include "engine/host.h"
#include "engine/rope.h"
#include "types/types.h"

#include <algorithm>
#include <cstring>
#include <mutex>

static int fail(kvq_status status, const std::string & line) {
    kvq_set_error(line);
    return status;
}

static std::mutex rotor_mutex;
static std::vector<std::unique_ptr<kvq_rotor>> rotors; // of kvq_rotary_new

extern "C" int kvq_abi_version(void) { return KVQ_ABI_VERSION; }
extern "C" const char * kvq_version(void) { return KVQ_VERSION; }

static const kvq_type_info type_infos[] = {
    { "f16", KVQ_TYPE_F16, 16, 1, 16.0 },
    { "affine1", KVQ_TYPE_AFFINE, 1, 32, 2.0 },
    { "affine2", KVQ_TYPE_AFFINE, 2, 32, 3.0 },
    { "affine3", KVQ_TYPE_AFFINE, 3, 32, 4.0 },
    { "affine4", KVQ_TYPE_AFFINE, 4, 32, 5.0 },
    { "lattice1", KVQ_TYPE_LATTICE, 1, 32, 1.125 },
    { "lattice2", KVQ_TYPE_LATTICE, 2, 32, 2.125 },
    { "lattice3", KVQ_TYPE_LATTICE, 3, 32, 3.125 },
    { "lattice4", KVQ_TYPE_LATTICE, 4, 32, 4.125 },
};

extern "C" int kvq_type_count(void) { return sizeof(type_infos) / sizeof(type_infos[0]); }
extern "C" const kvq_type_info * kvq_type_at(int i) {
    return i >= 0 && i < kvq_type_count() ? &type_infos[i] : nullptr;
}

static const kvq_type_traits * check_codec(const kvq_codec * c, int & status) {
    const kvq_type_traits * t = c ? kvq_traits(c->type) : nullptr;
    const char * why = !c                                           ? "the codec is NULL"
        : !t                                                        ? "no such block type"
        : c->type != KVQ_TYPE_LATTICE && (c->split || c->fast_bits) ? "only lattice keys are split: zero the fields"
                                                                    : t->refuse(*c);
    status = why ? fail(c && t ? KVQ_ERR_SHAPE : KVQ_ERR_ARGUMENT, why) : KVQ_OK;
    return why ? nullptr : t;
}

extern "C" int kvq_codec_bytes(const kvq_codec * c, size_t * nb_codes, size_t * nb_params) {
    int status;
    const kvq_type_traits * t = check_codec(c, status);
    if (t) {
        if (nb_codes) { *nb_codes = t->nb_codes(*c); }
        if (nb_params) { *nb_params = t->nb_params(*c); }
    }
    return status;
}

extern "C" int kvq_encode(const kvq_codec * c, const uint16_t * rows, const uint8_t * valid, const void * shared,
    void * codes, void * params) {
    int status;
    const kvq_type_traits * t = check_codec(c, status);
    if (!t) { return status; }
    if (!rows || (!codes && !shared && t->nb_codes(*c)) || (!params && t->nb_params(*c))) {
        return fail(KVQ_ERR_ARGUMENT, "rows, codes and params must not be NULL");
    }
    kvq_cpu_encode(*c, rows, valid, shared, codes, params);
    return KVQ_OK;
}

extern "C" int kvq_decode(const kvq_codec * c, const void * codes, const void * params, uint16_t * rows) {
    int status;
    const kvq_type_traits * t = check_codec(c, status);
    if (t) { t->decode(*c, codes, params, rows); }
    return status;
}

extern "C" int kvq_image(const kvq_codec * c, const void * codes, const void * params, uint16_t * rows) {
    int status;
    if (check_codec(c, status)) { kvq_image_write(*c, codes, params, rows); }
    return status;
}

extern "C" int kvq_image_match(
    const kvq_codec * c, const uint16_t * rows, const void * shared, void * codes, void * params) {
    int status;
    return check_codec(c, status) && kvq_image_read(*c, rows, shared, codes, params) ? 1 : 0;
}

// NULL when the second tier can be read, else why not
static const char * far_refuse(const kvq_attn & a) {
    const kvq_far & f = *a.far;
    if (f.fetch < KVQ_FETCH_NOW || f.fetch > KVQ_FETCH_ALL || f.top < 0 || !kvq_far_row_bytes(f.format, 1)) {
        return "a second tier has fetch 1..3, top from 0 and a format of 0..2";
    }
    const bool keeps = f.fetch == KVQ_FETCH_AHEAD || (f.fetch == KVQ_FETCH_NOW && f.n_kept);
    if (!f.k_rows || !f.v_rows || (keeps && f.top && (!f.kept || f.n_kept < f.top))) {
        return "a second tier needs k_rows and v_rows, and with fetch ahead kept, n_kept of them, not less than top";
    }
    if (f.n_cells != a.k.n_cells || f.n_cells != a.v.n_cells || a.map_stride ||
        a.flags & (KVQ_ATTN_LATENT | KVQ_ATTN_LATENT_ALL)) {
        return "a second tier has pages of the cells that both codecs have, without maps, and no latent attention";
    }
    return nullptr;
}

// NULL when the stream can be attended, else why not
static const char * attend_refuse(const kvq_attn & a) {
    if (!a.q || !a.dst) { return "q and dst must not be NULL"; }
    if (a.n_q < 1 || a.n_head_kv < 1 || a.n_head < 1 || a.n_head % a.n_head_kv) {
        return "n_head must be a positive multiple of n_head_kv, and n_q positive";
    }
    if (a.n_pages < 0 || (a.n_pages && !a.pages)) { return "n_pages must match pages"; }
    if (a.flags & (KVQ_ATTN_LATENT | KVQ_ATTN_LATENT_ALL)) {
        if (a.n_head_kv != 1 || a.k.type == KVQ_TYPE_MIXED || a.v.type != a.k.type || a.v.n_cells != a.k.n_cells) {
            return "latent attention has one KV head and two blocks of one format, which is not mixed";
        }
        if ((a.k.role != KVQ_ROLE_K || a.v.role != KVQ_ROLE_K) || a.k_mean || a.v_mean || a.rotary || a.lse) {
            return "latent attention keeps both blocks as keys, with their means and rotary embedding, and gives no "
                   "log-sum-exp";
        }
        if (a.k.split || a.v.split) { return "latent attention keeps each block whole"; }
        if (a.flags & KVQ_ATTN_LATENT_ALL && a.k.head_size % 16) {
            return "values of both blocks need a first block of a multiple of 16 channels";
        }
    }
    for (int i = 0; i < a.n_pages; i++) {
        const kvq_page & p = a.pages[i];
        if (p.n_slots < 0 || p.n_slots > KVQ_MAX_CELLS) { return "a page holds 0..256 slots"; }
        if ((p.k_params && p.n_slots && p.n_slots != a.k.n_cells) ||
            (p.v_params && p.n_slots && p.n_slots != a.v.n_cells)) {
            return "a sealed page has as many slots as its codec has cells";
        }
        if (p.n_slots && ((!p.k_codes && a.k.bits) || (!p.v_codes && a.v.bits))) {
            return "a page with slots needs codes";
        }
        if (a.far && p.n_slots && (p.map || p.n_slots != a.far->n_cells || p.cell < 0 || p.cell % a.far->n_cells)) {
            return "with a second tier a page has all its cells as slots, in order";
        }
    }
    return a.far ? far_refuse(a) : nullptr;
}

static int check_attn(const kvq_attn & a) {
    if (const char * why = attend_refuse(a)) { return fail(KVQ_ERR_ARGUMENT, why); }
    for (const kvq_codec * c : { &a.k, &a.v }) {
        int status;
        if (!check_codec(c, status)) { return status; }
        if (c->n_cells > KVQ_MAX_CELLS || c->head_size > KVQ_MAX_HEAD) {
            return fail(KVQ_ERR_SHAPE, "attention takes pages up to 256 cells and heads up to 1024 channels");
        }
    }
    return KVQ_OK;
}

extern "C" int kvq_attend(const kvq_attn * attn, int n, int n_threads) {
    if (!attn || n < 0) { return fail(KVQ_ERR_ARGUMENT, "attn must not be NULL and n not negative"); }
    for (int i = 0; i < n; i++) {
        const int status = check_attn(attn[i]);
        if (status != KVQ_OK) { return status; }
    }
    kvq_cpu_attend(attn, n, n_threads);
    return KVQ_OK;
}

extern "C" int kvq_column_sums(
    const kvq_attn * attn, const int32_t * rows, int n_rows, float * sums, int32_t * seen, int n_threads) {
    if (!attn || !attn->lse || !sums || n_rows < 0) {
        return fail(KVQ_ERR_ARGUMENT, "attn, its lse and sums must not be NULL and n_rows not negative");
    }
    const int status = check_attn(*attn);
    if (status != KVQ_OK) { return status; }
    for (int i = 0; rows && i < n_rows; i++) {
        if (rows[i] < 0 || rows[i] >= attn->n_q) {
            return fail(KVQ_ERR_ARGUMENT,
                "row " + std::to_string(rows[i]) + " is not within the " + std::to_string(attn->n_q) + " query tokens");
        }
    }
    kvq_cpu_column_sums(*attn, rows, rows ? n_rows : attn->n_q, sums, seen, n_threads);
    return KVQ_OK;
}

extern "C" int kvq_probe_rows(int n, uint64_t at, float share, int page_cells, uint32_t layer, int32_t * rows) {
    const std::vector<int32_t> out =
        n > 0 && page_cells > 0 ? kvq_probe_rows(n, at, share, page_cells, layer) : std::vector<int32_t>();
    std::copy(out.begin(), out.end(), rows);
    return (int) out.size();
}

extern "C" const kvq_rotary * kvq_rotary_new(int n_dims, int neox, float freq_base, int n_positions) {
    if (n_dims < 2 || n_dims % 2 || n_dims > KVQ_MAX_HEAD || !(freq_base > 1.0f) || n_positions < 1 ||
        n_positions > 1 << 26) {
        kvq_set_error("no such rotary embedding: n_dims even and up to 1024, freq_base above 1, n_positions from 1");
        return nullptr;
    }
    kvq_rope r;
    r.n_dims = n_dims;
    r.neox = neox != 0;
    r.freq_base = freq_base;
    std::lock_guard<std::mutex> lock(rotor_mutex);
    rotors.emplace_back(new kvq_rotor(r));
    rotors.back()->cover(n_positions - 1);
    return &rotors.back()->view();
}

extern "C" void kvq_rotary_free(const kvq_rotary * rotary) {
    std::lock_guard<std::mutex> lock(rotor_mutex);
    rotors.erase(std::remove_if(rotors.begin(), rotors.end(), [&](const auto & r) { return &r->view() == rotary; }),
        rotors.end());
}

extern "C" int kvq_plan(const char * method, const char * opts, const kvq_layer_shape * layers, int n_layers,
    int n_layer_model, int n_cells, int n_stream, kvq_stats * out) {
    return kvq_plan_window(method, opts, layers, n_layers, n_layer_model, n_cells, n_stream, 0, 0, out);
}

extern "C" int kvq_plan_window(const char * method, const char * opts, const kvq_layer_shape * layers, int n_layers,
    int n_layer_model, int n_cells, int n_stream, int channels_whole, int cells_whole, kvq_stats * out) {
    int status = kvq_check(method, opts);
    if (status != KVQ_OK) { return status; }
    if (!layers || n_layers < 1 || n_cells < 1 || n_stream < 1 || !out) {
        return fail(KVQ_ERR_ARGUMENT, "layers, n_cells and n_stream must be positive");
    }
    const kvq_method * m = kvq_method_find(method);
    kvq_options o;
    std::string err;
    kvq_options_parse(*m, opts, o, err);
    kvq_accounting sum;
    kvq_stats & s = sum.s;
    strncpy(s.method, method, sizeof(s.method) - 1);
    strncpy(s.options, opts ? opts : "", sizeof(s.options) - 1);
    strncpy(s.kernel, kvq_kernel_name(), sizeof(s.kernel) - 1);
    s.n_layer = n_layers;
    s.n_cells = n_cells;
    s.n_stream = n_stream;
    // Of one cache of several the level is found as its draft finds it: all layers of the model are taken to be alike.
    const bool part = n_layers < n_layer_model;
    int level = 0;
    const std::vector<kvq_layer_shape> shapes = part ? std::vector<kvq_layer_shape>((size_t) n_layer_model, layers[0])
                                                     : std::vector<kvq_layer_shape>(layers, layers + n_layers);
    double channels = 0;
    for (int i = 0; i < n_layers; i++) {
        channels += (double) layers[i].n_head_kv * (layers[i].head_size_k + layers[i].head_size_v);
    }
    const double more = kvq_more_bits(*m, o, channels, n_cells, channels_whole, cells_whole);
    const kvq_levels levels = { *m, o, shapes, n_layer_model, n_cells, n_stream, more };
    status = levels.find(level, err);
    if (status != KVQ_OK) { return fail((kvq_status) status, err); }
    std::string smallest[2];
    for (int i = 0, last = -1; i < n_layers; i++) {
        const int number = part ? layers[i].il : i;
        if (part && (number <= last || number >= n_layer_model)) {
            return fail(KVQ_ERR_ARGUMENT,
                "layer " + std::to_string(number) + " of a part: il counts layers with attention, in order, below " +
                    std::to_string(n_layer_model));
        }
        const kvq_layer_context c = { number, n_layer_model, layers[i], i ? &layers[i - 1] : nullptr,
            i ? number - last - 1 : 0, level };
        last = number;
        kvq_layer_plan plan;
        const kvq_status st = m->plan(o, c, plan, err);
        if (st != KVQ_OK) { return fail(st, err); }
        for (int v = 0; v < 2; v++) {
            sum.add(kvq_make_lane_layout(plan, v, layers[i].n_head_kv, n_cells, n_stream), v, false);
            smallest[v] = kvq_smallest_declared(smallest[v], plan, v, layers[i].n_head_kv);
        }
    }
    sum.finish();
    snprintf(s.type_k, sizeof(s.type_k), "%s", smallest[0].c_str());
    snprintf(s.type_v, sizeof(s.type_v), "%s", smallest[1].c_str());
    *out = s;
    return KVQ_OK;
}

// Which layers our kernels take, and how: asked when a model loads.
#include "cuda/device/device.h"

#include "cuda/far/far.cuh"
#include "cuda/policy/coords.cuh"
#include "types/far_rows.h"

#include <algorithm>

// A call of one row, to ask which kernels take it: limits are those of the device in use.
static kvq_attend_args decode_args(const kvq_codec & k, const kvq_codec & v, bool maps) {
    kvq_attend_args a = {};
    a.k = kvq_affine_get_geometry(k);
    a.v = kvq_affine_get_geometry(v);
    if (k.split) { a.k_fast = kvq_split_get_geometry(k, true); }
    if (k.type == KVQ_TYPE_MIXED) {
        a.km = kvq_mixed_get_geometry(k);
        a.vm = kvq_mixed_get_geometry(v);
    }
    a.n_q = a.n_head = a.n_head_kv = a.gqa = a.n_rows = a.n_pages = 1;
    a.page_cells = k.n_cells;
    a.map_stride = maps ? k.n_cells : 0; // masks of pages with maps wait in shared memory
    int device = 0;
    cudaGetDevice(&device);
    a.max_shared = kvq_limits_of(device).max_shared;
    a.max_shared_sm = kvq_limits_of(device).max_shared_sm;
    return a;
}

const char * kvq_cuda_device::refuse(int flags, const kvq_codec & k, const kvq_codec & v, bool maps) {
    const int head_size_k = k.head_size, head_size_v = v.head_size;
    static const std::string wrong = refuse_settings();
    if (!wrong.empty()) { return wrong.c_str(); }
    for (const kvq_codec * c : { &k, &v }) {
        if (c->type != KVQ_TYPE_F16 && c->type != KVQ_TYPE_AFFINE && c->type != KVQ_TYPE_LATTICE &&
            c->type != KVQ_TYPE_MIXED) {
            return "this method has no CUDA kernels yet: use kivi, xquant, higgs, aqua, zipcache, minikv or f16, or "
                   "run on the CPU with -ngl 0";
        }
    }
    if (flags & (KVQ_ATTN_LATENT | KVQ_ATTN_LATENT_ALL)) { // the inner backend attends
        return nullptr;
    }
    if (!kvq_tiles_head_size(head_size_k, head_size_v)) {
        return "there are CUDA kernels for head sizes up to 512 only: run on the CPU with -ngl 0";
    }
    // beyond 256 there are no tiles: few rows need a decode kernel, of whatever the pages hold or of their rows
    if (std::max(head_size_k, head_size_v) > 256) {
        if (head_size_k != head_size_v || head_size_k % 16 || head_size_k <= 384) {
            return "there are CUDA kernels for heads above 256 channels only where keys and values have the same, a "
                   "multiple of 16 from 400 to 512: run on the CPU with -ngl 0";
        }
        kvq_attend_args a = decode_args(k, v, maps);
        if (!kvq_decode_fits(a, 0) && a.nb_shared > a.max_shared) {
            static thread_local std::string why;
            why = "attention over heads of " + std::to_string(head_size_k) + " needs " +
                std::to_string(a.nb_shared >> 10) +
                " KB of shared memory a block with these bits and groups, and this card has " +
                std::to_string(a.max_shared >> 10) +
                " KB: take fewer bits or larger groups (kivi with group=128), or run on the CPU with -ngl 0";
            return why.c_str();
        }
        if (!kvq_decode_fits(a, 0)) {
            return "there are CUDA kernels for heads above 256 channels only with bits 1/1, 2/1, 2/2, 3/2, 3/3, 4/2 or "
                   "4/4 of keys and values, groups of 16, 32, 64, 128 or the head, and grids of "
                   "d2: change the method's options, or run on the CPU with -ngl 0";
        }
    }
    return nullptr;
}

kvq_cuda_device::decode_room kvq_cuda_device::room_of(const kvq_codec & k, const kvq_codec & v, bool maps) const {
    cudaSetDevice(ordinal);
    kvq_attend_args a = decode_args(k, v, maps);
    const bool fits = kvq_decode_fits(a, 0);
    return { a.wide ? "slices of 128" : a.k.head_size == 64 ? "64" : "128", fits ? a.n_warps : 0, a.nb_shared };
}

bool kvq_cuda_device::lists(const kvq_attn & f, int n) const {
    if (!may_list(f, n)) { return false; }
    cudaSetDevice(ordinal);
    kvq_attend_args a = decode_args(f.k, f.v, f.map_stride != 0);
    a.n_q = f.n_q;
    a.gqa = f.n_head / f.n_head_kv;
    a.n_rows = a.n_q * a.gqa;
    a.listed = true;
    a.list_few = allow_lists > 1;
    return kvq_decode_fits(a, 0) && a.listed;
}

static const char OF_COORDS[] = "several kernels for coordinates, at half of f16's speed (less with more than 8 query "
                                "heads a KV head, and where not all channels turn)";
// 313 us instead of 46
static const char FOR_EACH_TOKEN[] = "f16 rows made for each token, about 7 times slower";

static bool reads_coords(kvq_attend_args a, const kvq_lane_layout & k) {
    a.part = 1;
    return kvq_reads_coords(k.codec, k.n_head) && kvq_decode_means(a) && kvq_decode_fits(a, 0);
}

const char * kvq_cuda_device::slow_reading(int flags, const kvq_lane_layout & k, const kvq_lane_layout & v) const {
    if (flags & (KVQ_ATTN_LATENT | KVQ_ATTN_LATENT_ALL)) { return nullptr; }
    cudaSetDevice(ordinal);
    kvq_attend_args a = decode_args(k.codec, v.codec, k.evicts);
    if (k.codec.coords) { return reads_coords(a, k) ? OF_COORDS : FOR_EACH_TOKEN; }
    if (!kvq_decode_fits(a, 0)) {
        if (a.k.split) { return FOR_EACH_TOKEN; }
        // one H200, heads of 256 at 32k cells: 400 and 2000 us a layer instead of 25 and 35
        return a.k.type == KVQ_TYPE_LATTICE ? "tiles, about 60 times slower" : "tiles, about 15 times slower";
    }
    if (a.k.split && !k.centred) { return FOR_EACH_TOKEN; }
    a.waves = (const uint16_t *) &a; // any: is there a kernel for pages without their means?
    if (k.centred && !k.chained && (!kvq_decode_means(a) || !kvq_decode_fits(a, 0))) { return FOR_EACH_TOKEN; }
    return nullptr;
}

const char * kvq_cuda_device::refuse_far(const kvq_codec & k, const kvq_codec & v, int format, int top) const {
    if (top > FAR_MOST) { return "top=4096 is the most that CUDA fetches"; }
    if (k.type != v.type || (k.type != KVQ_TYPE_AFFINE && k.type != KVQ_TYPE_LATTICE && k.type != KVQ_TYPE_F16)) {
        return "CUDA fetches far rows for near=kivi and near=higgs";
    }
    if (k.head_size != v.head_size || k.head_size % 16 || k.head_size > 512 ||
        (k.head_size > 256 && k.head_size <= 384)) {
        return "CUDA fetches far rows for heads of 16 to 512 channels, in steps of 16, but for 272 to 384";
    }
    if (k.type == KVQ_TYPE_LATTICE && (k.group != 2 || v.group != 2)) {
        return "CUDA fetches far rows for grids of d=2";
    }
    if (k.type == KVQ_TYPE_AFFINE && (!k.bits || !v.bits || k.scale != v.scale || k.group % 16 || v.group % 16)) {
        return "CUDA fetches far rows for groups that are multiples of 16 and scales of one kind";
    }
    cudaSetDevice(ordinal);
    for (int part : { 1, 2 }) {
        kvq_attend_args a = decode_args(k, v, false);
        a.part = part;
        a.far_row_k = (int) kvq_far_row_bytes(format, k.head_size); // a block that picks holds some rows
        a.far_row_v = (int) kvq_far_row_bytes(format, v.head_size);
        if (k.split && part == 1 && !kvq_decode_split_keys(a)) {
            return "CUDA fetches far rows for split keys with bits 0/1, 0/2, 0/4, 1/2, 1/3, 1/4, 2/4 and 4/4 of the "
                   "fast and the slow half";
        }
        if (!kvq_decode_fits(a, 0)) {
            return "attention that fetches needs more shared memory a block than this card has: take far=q8 or far=q4, "
                   "larger groups or fewer bits";
        }
    }
    return nullptr;
}

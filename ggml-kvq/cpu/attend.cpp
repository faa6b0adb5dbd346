// The attention loop, written once over pages: score, adjust, online softmax, accumulate.
//
//   tasks = streams x KV heads x row blocks x splits.  Rows of a block read one KV head: gqa query heads of consecutive tokens.
//   A split is a contiguous range of pages; partial results (m, l, o) are merged afterwards (log-sum-exp).
#include "cpu.h"
#include "kernels.h"
#include "lattice.h"
#include "../types/f16.h"
#include "../types/types.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace {

constexpr uint16_t F16_NEG_INF = 0xfc00;

struct stream_plan {
    const kvq_attn * p;
    kvq_view k, v, k_open, v_open;
    kvq_lattice_view lk, lv;
    bool rope, folded_k, rotated_v; // lattice: keys lack their rotary embedding or mean; int8 keys; values leave a rotated sum
    int gqa, n_rows, n_blocks, n_splits, n_active; // rows of a KV head; pages that hold anything
    int dpk, dpv;
    size_t partial; // offset of this stream's partials
    float m0, m1;   // ALiBi bases
    int   n_head_log2;
};

// One thread's working set, grown to the largest task and kept.
struct workspace {
    float * q, * out, * logits, * tile;
    uint16_t * mask, * rows;
    void  * work;
    kvq_lattice_queries folded;
    std::vector<float>  rot;

    // rows x (queries, outputs, logits, mask of a page), and a decoded page
    void fit(int n_rows, int dp, int n_cells, size_t nb_work) {
        const size_t r = (size_t) n_rows, d = (size_t) dp, n = (size_t) n_cells;
        size_t at = 0;
        const auto take = [&](size_t nb) { const size_t here = at; at += (nb + 63) / 64 * 64; return here; };
        const size_t o[7] = { take(4*r*d), take(4*r*d), take(4*r*n), take(4*n*d), take(2*r*n), take(2*n*d), take(nb_work) };
        if (at > size) {
            memory.reset((uint8_t *) aligned_alloc(64, at));
            if (!memory) {
                size = 0;
                throw std::bad_alloc();
            }
            size = at;
        }
        uint8_t * m = memory.get();
        q = (float *) (m + o[0]); out = (float *) (m + o[1]); logits = (float *) (m + o[2]); tile = (float *) (m + o[3]);
        mask = (uint16_t *) (m + o[4]); rows = (uint16_t *) (m + o[5]); work = m + o[6];
    }
private:
    struct release { void operator()(void * p) const { free(p); } };
    std::unique_ptr<uint8_t, release> memory;
    size_t size = 0;
};

float alibi_slope(const stream_plan & s, int h) {
    if (s.p->max_bias <= 0.0f) {
        return 1.0f;
    }
    return h < s.n_head_log2 ? powf(s.m0, (float) (h + 1)) : powf(s.m1, (float) (2*(h - s.n_head_log2) + 1));
}

// One KV head of a page, and how it is read.
struct block {
    const kvq_view * view;
    const kvq_block_kernels * kernels;
    const void * codes, * params;
    bool tile; // through an f32 tile
};

block find_block(const kvq_kernels & K, const kvq_view & sealed, const kvq_view & open, const void * codes, const void * params, int kvh, int n_rows, bool f32, workspace & w) {
    if (!params) {
        const kvq_block_kernels & k = K.block[KVQ_TYPE_F16];
        return { &open, &k, (const uint8_t *) codes + kvh * open.nb_codes, nullptr, n_rows >= k.tile_rows };
    }
    const uint8_t * c = (const uint8_t *) codes + kvh * sealed.nb_codes, * p = (const uint8_t *) params + kvh * sealed.nb_params;
    if (sealed.codec.type < KVQ_N_TYPES) {
        const kvq_block_kernels & k = K.block[sealed.codec.type];
        return { &sealed, &k, c, p, f32 || n_rows >= k.tile_rows };
    }
    // the type's own decode, then as an open page; w.tile is not in use yet
    uint16_t * rows = (uint16_t *) w.tile;
    kvq_traits(sealed.codec.type)->decode(sealed.codec, c, p, rows);
    for (int t = 0; t < sealed.codec.n_cells; t++) {
        memcpy(w.rows + (size_t) t * sealed.dp, rows + (size_t) t * sealed.codec.head_size, 2 * (size_t) sealed.codec.head_size);
        memset(w.rows + (size_t) t * sealed.dp + sealed.codec.head_size, 0, 2 * (size_t) (sealed.dp - sealed.codec.head_size));
    }
    return { &open, &K.block[KVQ_TYPE_F16], w.rows, nullptr, n_rows >= K.block[KVQ_TYPE_F16].tile_rows };
}

void score(const kvq_kernels & K, const block & b, int n_rows, const float * q, float * logits, workspace & w) {
    if (b.tile) {
        b.kernels->to_tile(*b.view, b.codes, b.params, w.tile, w.work);
        K.score_tile(n_rows, b.view->dp, b.view->codec.n_cells, w.tile, q, logits);
    } else {
        b.kernels->score(*b.view, n_rows, b.codes, b.params, q, logits, w.work);
    }
}

void accumulate(const kvq_kernels & K, const block & b, int n_rows, const float * p, float * out, workspace & w) {
    if (b.tile) {
        b.kernels->to_tile(*b.view, b.codes, b.params, w.tile, w.work);
        K.accum_tile(n_rows, b.view->dp, b.view->codec.n_cells, w.tile, p, out);
    } else {
        b.kernels->accum(*b.view, n_rows, b.codes, b.params, p, out, w.work);
    }
}

// The blocks of a KV head lie n_head blocks apart: beyond what the hardware foresees.
void prefetch(const void * codes, const void * params, int kvh, const kvq_view & sealed, const kvq_view & open) {
    const kvq_view & v = params ? sealed : open;
    const char * c = (const char *) codes + kvh * v.nb_codes, * p = (const char *) params + kvh * v.nb_params;
    for (size_t i = 0; c && i < std::min<size_t>(v.nb_codes, 4096); i += 64) { __builtin_prefetch(c + i); }
    for (size_t i = 0; params && i < v.nb_params; i += 64)                   { __builtin_prefetch(p + i); }
}

// Mask of the page's slots for one query token: false when every slot is masked out. *use is NULL when none is.
bool page_mask(const kvq_attn & p, const kvq_page & page, const uint16_t * row, uint16_t * out, const uint16_t ** use) {
    const int n = page.n_slots;
    if (!page.map && page.cell + n <= p.n_kv) {
        *use = nullptr;
        if (!row) {
            return true;
        }
        constexpr uint64_t hidden = F16_NEG_INF * 0x0001000100010001ull;
        uint64_t any = 0, seen = 0;
        for (int i = 0; i < n; i += 4) {
            uint64_t x;
            memcpy(&x, row + page.cell + i, 8);
            any  |= x;
            seen |= x ^ hidden;
        }
        *use = any ? row + page.cell : nullptr;
        return seen;
    }
    bool any = false;
    for (int i = 0; i < n; i++) {
        const int cell = page.map ? page.map[i] : page.cell + i;
        out[i] = cell < 0 || cell >= p.n_kv ? F16_NEG_INF : row ? row[cell] : 0;
        any |= out[i] != F16_NEG_INF;
    }
    *use = out;
    return any;
}

void score_lattice(const kvq_kernels & K, const stream_plan & s, workspace & w, const kvq_page & page, int kvh, int first, int n_rows) {
    const kvq_attn & p = *s.p;
    const uint8_t * codes = (const uint8_t *) page.k_codes + kvh * s.k.nb_codes, * params = (const uint8_t *) page.k_params + kvh * s.k.nb_params;
    if (s.rope) {
        K.score_rope(s.lk, n_rows, codes, params, p.k_mean ? p.k_mean + (size_t) kvh * p.k.head_size : nullptr, p.rotary,
                     p.positions ? p.positions + page.cell : nullptr, s.dpk, w.q + (size_t) first * s.dpk, w.logits);
    } else {
        K.score_lattice(s.lk, n_rows, codes, params, w.folded.rows.data() + first, w.logits);
    }
}

void run_block(const kvq_kernels & K, const stream_plan & s, workspace & w, int kvh, int r0, int n_rows, int page0, int page1, float * m, float * l) {
    const kvq_attn & p = *s.p;
    // q is gathered because query heads and tokens have free strides
    float slope[KVQ_MAX_ROWS], correction[KVQ_MAX_ROWS], sums[KVQ_MAX_ROWS];
    const uint16_t * rows_mask[KVQ_MAX_ROWS];
    const size_t dk = (size_t) p.k.head_size;
    for (int r = 0; r < n_rows; r++) {
        const int iq = (r0 + r) / s.gqa, h = kvh * s.gqa + (r0 + r) % s.gqa;
        float * q = w.q + (size_t) r * s.dpk;
        memcpy(q, p.q + iq * p.q_stride_token + h * p.q_stride_head, 4 * dk);
        memset(q + dk, 0, 4 * (s.dpk - dk));
        rows_mask[r] = p.mask ? p.mask + iq * p.mask_stride_token + h * p.mask_stride_head : nullptr;
        slope[r] = alibi_slope(s, h);
        m[r] = -INFINITY;
        l[r] = 0.0f;
    }
    memset(w.out, 0, 4 * (size_t) n_rows * s.dpv);
    const bool f32 = p.flags & KVQ_ATTN_F32;
    const size_t rot_stride = s.rotated_v ? (size_t) s.lv.d * s.lv.n_tiles * 16 : 0;
    if (s.folded_k) {
        w.folded.fold(s.lk, n_rows, s.dpk, w.q);
    }
    w.rot.assign(rot_stride * n_rows, 0.0f);
    float weight[KVQ_MAX_ROWS] = {}; // of sealed values, whose mean is added at the end
    for (int ip = page0; ip < page1; ip++) {
        const kvq_page & page = p.pages[ip];
        const int n = page.n_slots;
        if (!n) {
            continue;
        }
        // rows that see anything of the page: all others, before and behind, are left out
        const uint16_t * use[KVQ_MAX_ROWS];
        int first = n_rows, end = 0;
        bool alive = false;
        for (int r = 0; r < n_rows; r++) {
            if (r && rows_mask[r] == rows_mask[r - 1]) {
                use[r] = use[r - 1];
            } else {
                alive = page_mask(p, page, rows_mask[r], w.mask + (size_t) r * n, &use[r]);
            }
            if (alive) {
                first = std::min(first, r);
                end   = r + 1;
            }
        }
        if (!end) {
            continue;
        }
        if (ip + 1 < page1) {
            const kvq_page & next = p.pages[ip + 1];
            prefetch(next.k_codes, next.k_params, kvh, s.k, s.k_open);
            prefetch(next.v_codes, next.v_params, kvh, s.v, s.v_open);
        }
        const int rows = end - first;
        float * out = w.out + (size_t) first * s.dpv;
        if (page.k_params && (s.rope || s.folded_k)) {
            score_lattice(K, s, w, page, kvh, first, rows);
        } else {
            const block k = find_block(K, s.k, s.k_open, page.k_codes, page.k_params, kvh, rows, f32, w);
            score(K, k, rows, w.q + (size_t) first * s.dpk, w.logits, w);
        }
        K.softmax(rows, n, w.logits, p.scale, p.softcap, slope + first, use + first, m + first, l + first, correction, sums);
        for (int r = 0; r < rows; r++) {
            weight[first + r] = weight[first + r] * correction[r] + (page.v_params ? sums[r] : 0.0f);
            if (correction[r] != 1.0f) {
                K.scale(s.dpv, out + (size_t) r * s.dpv, correction[r]);
                K.scale((int) rot_stride, w.rot.data() + (first + r) * rot_stride, correction[r]);
            }
        }
        if (page.v_params && s.rotated_v) {
            K.accum_lattice(s.lv, rows, (const uint8_t *) page.v_codes + kvh * s.v.nb_codes, (const uint8_t *) page.v_params + kvh * s.v.nb_params,
                            w.logits, w.rot.data() + first * rot_stride);
            continue;
        }
        const block v = find_block(K, s.v, s.v_open, page.v_codes, page.v_params, kvh, rows, f32, w);
        accumulate(K, v, rows, w.logits, out, w);
    }
    for (int r = 0; r < n_rows; r++) {
        float * out = w.out + (size_t) r * s.dpv;
        if (s.rotated_v) {
            kvq_lattice_unrotate(s.lv, w.rot.data() + r * rot_stride, out);
        }
        for (int d = 0; p.v_mean && d < p.v.head_size; d++) {
            out[d] += weight[r] * p.v_mean[(size_t) kvh * p.v.head_size + d];
        }
    }
}

void store_row(const stream_plan & s, int kvh, int row, float m, float l, const float * out) {
    const kvq_attn & p = *s.p;
    const int iq = row / s.gqa, h = kvh * s.gqa + row % s.gqa;
    float * dst = p.dst + iq * p.dst_stride_token + h * p.dst_stride_head;
    float c = 1.0f;
    if (p.sinks) { // one more logit without a value
        const float top = std::max(m, p.sinks[h]);
        c = m == -INFINITY ? 0.0f : expf(m - top);
        l = l * c + expf(p.sinks[h] - top);
    }
    const float inv = l > 0.0f ? c / l : 0.0f;
    for (int d = 0; d < p.v.head_size; d++) {
        dst[d] = out[d] * inv;
    }
}

} // namespace

void kvq_cpu_attend(const kvq_attn * attn, int n, int n_threads) {
    const kvq_kernels & K = kvq_get_kernels();
    n_threads = std::max(n_threads, 1);

    static thread_local std::vector<stream_plan> plans;
    plans.resize((size_t) n);
    stream_plan * const plan = plans.data();
    int    n_base = 0, n_max_rows = 0, max_dp = 0, max_cells = 0;
    size_t nb_work = 0;
    for (int i = 0; i < n; i++) {
        stream_plan & s = plan[i];
        s.p = &attn[i];
        s.gqa      = attn[i].n_head / attn[i].n_head_kv;
        s.n_rows   = s.gqa * attn[i].n_q;
        s.n_blocks = (s.n_rows + KVQ_MAX_ROWS - 1) / KVQ_MAX_ROWS;
        s.k = kvq_make_view(attn[i].k);
        s.v = kvq_make_view(attn[i].v);
        s.dpk = s.k.dp;
        s.dpv = s.v.dp;
        n_max_rows = std::max(n_max_rows, s.n_rows);
        max_dp     = std::max({ max_dp, s.dpk, s.dpv });
        max_cells  = std::max({ max_cells, attn[i].k.n_cells, attn[i].v.n_cells });
        nb_work    = std::max({ nb_work, kvq_work_bytes(s.k), kvq_work_bytes(s.v) });
        s.k_open = kvq_make_open_view(attn[i].k);
        s.v_open = kvq_make_open_view(attn[i].v);
        const bool lattice_k = attn[i].k.type == KVQ_TYPE_LATTICE, lattice_v = attn[i].v.type == KVQ_TYPE_LATTICE;
        const bool f32 = attn[i].flags & KVQ_ATTN_F32;
        if (lattice_k) { s.lk = kvq_lattice_make_view(attn[i].k); }
        if (lattice_v) { s.lv = kvq_lattice_make_view(attn[i].v); }
        s.rope      = lattice_k && (attn[i].rotary || attn[i].k_mean);
        s.folded_k  = lattice_k && !s.rope && !f32;
        s.rotated_v = lattice_v && !f32;
        s.n_head_log2 = 1;
        while (2 * s.n_head_log2 <= attn[i].n_head) { s.n_head_log2 *= 2; }
        s.m0 = powf(2.0f, -attn[i].max_bias        / (float) s.n_head_log2);
        s.m1 = powf(2.0f, -attn[i].max_bias / 2.0f / (float) s.n_head_log2);
        s.n_active = 0;
        for (int j = 0; j < attn[i].n_pages; j++) { s.n_active += attn[i].pages[j].n_slots > 0; }
        n_base += s.n_blocks * attn[i].n_head_kv;
    }
    // enough tasks that the last one to finish does not matter much
    const int want = n_threads > 1 ? (4*n_threads + n_base - 1) / std::max(n_base, 1) : 1;
    size_t n_partial = 0;
    std::vector<int> first(n + 1, 0);
    for (int i = 0; i < n; i++) {
        stream_plan & s = plan[i];
        s.n_splits = std::min(std::max(want, 1), std::max(s.n_active / 16, 1));
        s.partial  = n_partial;
        if (s.n_splits > 1) {
            n_partial += (size_t) s.p->n_head_kv * s.n_splits * s.n_rows * (s.dpv + 2);
        }
        first[i + 1] = first[i] + s.p->n_head_kv * s.n_blocks * s.n_splits;
    }
    const int    max_rows = std::min(KVQ_MAX_ROWS, n_max_rows);
    static thread_local std::vector<float> partial_buffer;
    partial_buffer.resize(std::max(partial_buffer.size(), n_partial));
    float * const partial = partial_buffer.data();

    const int n_tasks = first[n];
#pragma omp parallel for schedule(dynamic) num_threads(n_threads) if (n_tasks > 1 && n_threads > 1)
    for (int task = 0; task < n_tasks; task++) {
        static thread_local workspace w;
        w.fit(max_rows, max_dp, max_cells, nb_work);
        int i = 0;
        while (task >= first[i + 1]) { i++; }
        const stream_plan & s = plan[i];
        const int t     = task - first[i];
        const int split = t % s.n_splits, block = t / s.n_splits % s.n_blocks, kvh = t / s.n_splits / s.n_blocks;
        const int r0    = block * KVQ_MAX_ROWS, rows = std::min(KVQ_MAX_ROWS, s.n_rows - r0);
        const int p0    = (int) ((int64_t) s.p->n_pages * split / s.n_splits), p1 = (int) ((int64_t) s.p->n_pages * (split + 1) / s.n_splits);
        float m[KVQ_MAX_ROWS], l[KVQ_MAX_ROWS];
        run_block(K, s, w, kvh, r0, rows, p0, p1, m, l);
        for (int r = 0; r < rows; r++) {
            const float * out = w.out + (size_t) r * s.dpv;
            if (s.n_splits == 1) {
                store_row(s, kvh, r0 + r, m[r], l[r], out);
            } else {
                float * to = partial + s.partial + (((size_t) kvh * s.n_splits + split) * s.n_rows + r0 + r) * (s.dpv + 2);
                to[0] = m[r];
                to[1] = l[r];
                memcpy(to + 2, out, 4 * (size_t) s.dpv);
            }
        }
    }
    for (int i = 0; i < n; i++) {
        const stream_plan & s = plan[i];
        if (s.n_splits == 1) {
            continue;
        }
        const size_t stride = (size_t) s.dpv + 2;
        for (int kvh = 0; kvh < s.p->n_head_kv; kvh++) {
            for (int row = 0; row < s.n_rows; row++) {
                float * a = partial + s.partial + ((size_t) kvh * s.n_splits * s.n_rows + row) * stride;
                for (int j = 1; j < s.n_splits; j++) {
                    const float * b = a + (size_t) j * s.n_rows * stride;
                    const float top = std::max(a[0], b[0]);
                    if (b[0] == -INFINITY) {
                        continue;
                    }
                    const float ca = a[0] == -INFINITY ? 0.0f : expf(a[0] - top), cb = expf(b[0] - top);
                    a[0] = top;
                    a[1] = a[1] * ca + b[1] * cb;
                    for (int d = 2; d < s.dpv + 2; d++) {
                        a[d] = a[d] * ca + b[d] * cb;
                    }
                }
                store_row(s, kvh, row, a[0], a[1], a + 2);
            }
        }
    }
}

// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1, with the
// up-projections absorbed into the queries and the output): one KV head, a key is two blocks [a ; b], and the value
// is `a` (or all of it, KVQ_ATTN_LATENT_ALL).
//   logit = q_a . a + q_b . b      out = sum p a
// Many query heads read that one head, so each page is decoded once for a block of rows and read twice: as keys
// [channel][cell] and as values [cell][channel].

#include "attend_parts.h"
#include "transpose.h"

#include <cstring>

namespace kvq_attention {

void plan_latent(stream_plan & s) {
    const bool all = s.p->flags & KVQ_ATTN_LATENT_ALL;
    s.dpk = s.k.dp + s.v.dp;
    s.dpv = all ? s.dpk : s.k.dp;
    s.n_out = all ? s.k.dp + s.p->v.head_size : s.p->k.head_size;
    if (s.p->k.type == KVQ_TYPE_LATTICE) {
        s.lk = kvq_lattice_make_keys(s.p->k);
        s.lv = kvq_lattice_make_view(s.p->v);
    }
}

// One block of a page: keys to tile [dp][n], and, when `rows` is there, values to rows [n][stride].
static void decode_latent(const kvq_kernels & K, const kvq_view & sealed, const kvq_view & open,
    const kvq_lattice_view & lattice, const void * codes, const void * params, int n, float * tile, float * rows,
    size_t stride, float * temp, void * work) {
    const int dp = sealed.dp;
    const kvq_view & v = params ? sealed : open;
    if (v.codec.type != KVQ_TYPE_LATTICE) {
        K.block[v.codec.type].to_tile(v, codes, params, tile, work);
        if (rows) { transpose(dp, n, tile, (size_t) n, rows, stride); }
        return;
    }
    float * to = rows ? rows : temp;
    stride = rows ? stride : (size_t) dp;
    for (int t = 0, d = v.codec.head_size; d < dp && t < n; t++) {
        memset(to + t * stride + d, 0, 4 * (size_t) (dp - d));
    }
    K.lattice_rows(lattice, (const uint8_t *) codes, params, to, stride);
    transpose(n, dp, to, stride, tile, (size_t) n);
}

void run_latent(const kvq_kernels & K, const stream_plan & s, workspace & w, head_rows & h, const page_run & r) {
    const kvq_attn & p = *s.p;
    const int rows = r.n_rows;
    const bool all = p.flags & KVQ_ATTN_LATENT_ALL;
    float *const q = h.q + (size_t) r.first * s.dpk, *const out = h.out + (size_t) r.first * s.dpv;
    float c[KVQ_MAX_ROWS], f[KVQ_MAX_RUN * KVQ_MAX_ROWS + 16], sums[KVQ_MAX_RUN * KVQ_MAX_ROWS + 16];
    for (int i = 0; i < r.n_pages; i++) {
        const kvq_page & page = *r.page[i];
        const int n = page.n_slots;
        float *const tile = w.tile, *const values = tile + (size_t) n * s.dpk,
                     *const temp = values + (size_t) n * s.dpv;
        decode_latent(
            K, s.k, s.k_open, s.lk.half[0], page.k_codes, page.k_params, n, tile, values, (size_t) s.dpv, temp, w.work);
        decode_latent(K, s.v, s.v_open, s.lv, page.v_codes, page.v_params, n, tile + (size_t) n * s.k.dp,
            all ? values + s.k.dp : nullptr, (size_t) s.dpv, temp, w.work);
        K.score_tile(rows, s.dpk, n, tile, q, w.logits);
        if (K.softmax(rows, n, 1, w.logits, p.scale, p.softcap, h.slope + r.first, r.mask + i * KVQ_MAX_ROWS,
                h.m + r.first, h.l + r.first, c, f, sums)) {
            for (int j = 0; j < rows; j++) {
                if (c[j] != 1.0f) { K.scale(s.dpv, out + (size_t) j * s.dpv, c[j]); }
            }
        }
        K.accum_tile(rows, s.dpv, n, values, w.logits, f, out);
    }
}

} // namespace kvq_attention

// Mixed pages (types/mixed.h): each part is a page of its own, whose slots are the part's cells.
//   out += c * sum over both parts of p * (v/c)

#include "attend_parts.h"

#include <cstring>

namespace kvq_attention {

void plan_mixed(stream_plan & s) {
    for (int i = 0; i < 2; i++) {
        const kvq_codec k = kvq_mixed_part(s.p->k, i), v = kvq_mixed_part(s.p->v, i);
        s.kp[i] = k.n_cells ? kvq_make_view(k) : kvq_view{};
        s.vp[i] = v.n_cells ? kvq_make_view(v) : kvq_view{};
    }
    s.km = kvq_mixed_offsets(s.p->k);
    s.vm = kvq_mixed_offsets(s.p->v);
}

// Both lanes sealed with one set. A page that was partly restored may hold two, or one lane open: it is read cell by
// cell.
bool one_set(const stream_plan & s, const kvq_page & page, int kvh) {
    return page.k_params && page.v_params &&
        !memcmp((const uint8_t *) page.k_params + kvh * s.k.nb_params,
            (const uint8_t *) page.v_params + kvh * s.v.nb_params, (size_t) s.k.codec.n_cells / 8);
}

static void run_mixed_page(const kvq_kernels & K, const stream_plan & s, workspace & w, head_rows & h,
    const kvq_page & page, const uint16_t * const * mask, int first, int rows) {
    const kvq_attn & p = *s.p;
    const uint8_t *kc = (const uint8_t *) page.k_codes + h.kvh * s.k.nb_codes,
                  *kq = (const uint8_t *) page.k_params + h.kvh * s.k.nb_params;
    const uint8_t *vc = (const uint8_t *) page.v_codes + h.kvh * s.v.nb_codes,
                  *vq = (const uint8_t *) page.v_params + h.kvh * s.v.nb_params;
    int32_t slots[KVQ_MAX_CELLS];
    const uint16_t * use[KVQ_MAX_ROWS];
    float c[KVQ_MAX_ROWS], f[KVQ_MAX_RUN * KVQ_MAX_ROWS + 16], sums[KVQ_MAX_RUN * KVQ_MAX_ROWS + 16];
    float * const out = h.out + (size_t) first * s.dpv;
    memset(w.part, 0, 4 * (size_t) rows * s.dpv);
    for (int i = 0; i < 2; i++) {
        const int n = s.kp[i].codec.n_cells;
        if (!n) { continue; }
        kvq_mixed_cells(p.k, kq, i, slots);
        for (int r = 0; r < rows; r++) {
            if (!mask[r] || (r && mask[r] == mask[r - 1])) {
                use[r] = mask[r] ? use[r - 1] : nullptr;
                continue;
            }
            uint16_t * to = w.part_mask + (size_t) r * n;
            for (int j = 0; j < n; j++) { to[j] = mask[r][slots[j]]; }
            use[r] = to;
        }
        const kvq_run k = { 1, { kc + s.km.codes[i] }, { kq + s.km.params[i] } },
                      v = { 1, { vc + s.vm.codes[i] }, { vq + s.vm.params[i] } };
        K.block[KVQ_TYPE_AFFINE].score(s.kp[i], rows, k, h.q + (size_t) first * s.dpk, w.logits, w.work);
        if (K.softmax(
                rows, n, 1, w.logits, p.scale, p.softcap, h.slope + first, use, h.m + first, h.l + first, c, f, sums)) {
            for (int r = 0; r < rows; r++) {
                if (c[r] != 1.0f) {
                    K.scale(s.dpv, out + (size_t) r * s.dpv, c[r]);
                    K.scale(s.dpv, w.part + (size_t) r * s.dpv, c[r]);
                }
            }
        }
        K.block[KVQ_TYPE_AFFINE].accum(s.vp[i], rows, v, w.logits, f, w.part, w.work);
    }
    uint16_t c16[KVQ_MAX_HEAD];
    float by[KVQ_MAX_HEAD];
    for (int d = 0; d < p.v.head_size; d++) { c16[d] = kvq_mixed_channel(vq[s.vm.channels + (size_t) d]); }
    K.f16_to_f32(c16, by, p.v.head_size);
    for (int r = 0; r < rows; r++) {
        for (int d = 0; d < p.v.head_size; d++) {
            out[(size_t) r * s.dpv + d] += by[d] * w.part[(size_t) r * s.dpv + d];
        }
    }
}

void run_mixed(const kvq_kernels & K, const stream_plan & s, workspace & w, head_rows & h, const page_run & r,
    const ahead & next) {
    for (int i = 0; i < r.n_pages; i++) {
        const uint16_t * const * mask = r.mask + i * KVQ_MAX_ROWS;
        if (one_set(s, *r.page[i], h.kvh)) {
            run_mixed_page(K, s, w, h, *r.page[i], mask, r.first, r.n_rows);
            continue;
        }
        page_run one;
        one.n_pages = 1;
        one.first = r.first;
        one.n_rows = r.n_rows;
        one.page[0] = r.page[i];
        std::copy(mask, mask + r.n_rows, one.mask);
        run_head(K, s, w, h, one, next);
    }
}

} // namespace kvq_attention

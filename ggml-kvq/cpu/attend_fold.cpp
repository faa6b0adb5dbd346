// Values that follow from keys alone (policy/chain.h, fold): sums of rows in 8 bits beside those of decoded values, to
// which W_v is applied once a query.
#include "attend_parts.h"

namespace kvq_attention {

bool may_fold(const kvq_attn & attn, const kvq_chain_pages & values) {
    const int n_rows = attn.n_head / attn.n_head_kv * attn.n_q;
    bool fits = values.l && !values.out.row && n_rows <= FEW_ROWS && attn.v.head_size % 16 == 0 &&
        !(attn.flags & KVQ_ATTN_F32) && attn.v_mean;
    for (const kvq_predictor & w : values.from) { fits = fits && w.bits == 8; }
    return fits;
}

void fold_part(const kvq_kernels & K, const stream_plan & s, head_rows & h, const page_run & r, const float * prob,
    const float * f) {
    const int n = r.page[0]->n_slots;
    float w[KVQ_MAX_CELLS * FEW_ROWS];
    for (int i = 0; i < r.n_pages; i++) {
        const kvq_page & page = *r.page[i];
        if (!page.v_params) { continue; } // open values are whole
        float * sums = h.fold + (size_t) r.first * s.n_fold;
        for (const kvq_rows8 & all : s.fold->in) {
            const kvq_rows8 x = all.from((size_t) page.cell);
            for (int t = 0; t < n; t++) {
                for (int j = 0; j < r.n_rows; j++) {
                    w[FEW_ROWS * t + j] =
                        prob[((size_t) i * r.n_rows + j) * n + t] * f[i * KVQ_MAX_ROWS + j] * x.scale[t];
                }
            }
            K.sum_rows8(r.n_rows, n, (int) x.stride, x.row, x.stride, w, sums, (size_t) s.n_fold);
            sums += x.stride;
        }
    }
}

void apply_fold(const kvq_kernels & K, const stream_plan & s, int kvh, float * rows, size_t stride) {
    const float * z = rows + 2 + s.dpv;
    for (int j = 0; j < 2; z += s.fold->in[j++].stride) {
        const int tiles = s.n_out / 16;
        for (int i = 0; i < tiles; i++) {
            K.apply_tile8(s.fold->from[j], kvh * tiles + i, s.n_rows, z, stride, rows + 2 + 16 * i, stride);
        }
    }
}

} // namespace kvq_attention

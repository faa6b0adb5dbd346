// Column sums of probabilities (kvq_column_sums): logits again, page by page, against the known
// log-sum-exp. One task = some pages of one KV head, so that every sum has one owner and one order of additions. The
// softmax kernel leaves 2^(x - top) and, since m = lse is no less than top, f = 2^(top - lse).

#include "attend_mask.h"
#include "attend_parts.h"

#include "base/parallel.h"

using namespace kvq_attention;

void kvq_cpu_column_sums(
    const kvq_attn & attn, const int32_t * tokens, int n_tokens, float * sums, int32_t * seen, int n_threads) {
    const kvq_kernels & K = kvq_get_kernels();
    stream_plan s;
    const int cells = make_plan(s, attn), total = n_tokens * s.gqa;
    std::vector<size_t> first((size_t) attn.n_pages + 1, 0);
    for (int i = 0; i < attn.n_pages; i++) {
        first[(size_t) i + 1] = first[(size_t) i] + (size_t) attn.pages[i].n_slots;
    }
    const size_t n_slots = first[(size_t) attn.n_pages], rows = (size_t) std::min(total, KVQ_MAX_ROWS);
    workspace::sizes size;
    size.heads = 1;
    size.floats = rows * (size_t) (s.dpk + s.dpv + s.rot + s.v_stride + 3) +
        (s.has_means() ? KVQ_MAX_RUN * rows * (size_t) cells : 0) + 16 * 16;
    size.slots = rows * (size_t) cells;
    size.tile = (size_t) cells * std::max(s.dpk, s.dpv);
    size.work = kvq_work_bytes(s.k);
    size.coords = s.coord_floats();
    const int n_split = std::max(1, std::min(attn.n_pages, (4 * n_threads + attn.n_head_kv - 1) / attn.n_head_kv)),
              n_tasks = attn.n_head_kv * n_split;
    kvq_parallel_for(n_tasks, n_threads, [&](int64_t i) {
        const int task = (int) i;
        static thread_local workspace w;
        w.fit(size);
        head_rows & h = w.heads[0];
        const int kvh = task / n_split, p0 = attn.n_pages * (task % n_split) / n_split,
                  p1 = attn.n_pages * (task % n_split + 1) / n_split;
        for (int r0 = 0; r0 < total; r0 += KVQ_MAX_ROWS) {
            const int n = std::min(KVQ_MAX_ROWS, total - r0);
            size_t at = 0;
            start_head(s, w, h, kvh, r0, n, at, tokens);
            const auto token = [&](int r) { return tokens ? tokens[(r0 + r) / s.gqa] : (r0 + r) / s.gqa; };
            for (int ip = p0; ip < p1; ip++) {
                const kvq_page & page = attn.pages[ip];
                const uint16_t * use[KVQ_MAX_ROWS];
                page_run run;
                int a = n, end = 0; // rows that see something of the page
                for (int r = 0, alive = 0; page.n_slots && r < n; r++) {
                    const int head = kvh * s.gqa + (r0 + r) % s.gqa;
                    if (r && (!attn.mask || (!attn.mask_stride_head && (r0 + r) % s.gqa))) {
                        use[r] = use[r - 1];
                    } else {
                        const uint16_t * row = attn.mask
                            ? attn.mask + token(r) * attn.mask_stride_token + head * attn.mask_stride_head
                            : nullptr;
                        alive = page_mask(attn, page, kvh, row, 0, w.mask + (size_t) r * page.n_slots, &use[r]);
                    }
                    a = alive ? std::min(a, r) : a;
                    end = alive ? r + 1 : end;
                }
                if (!end) { continue; }
                run.n_pages = 1;
                run.first = a;
                run.n_rows = end - a;
                run.page[0] = &page;
                std::copy(use + a, use + end, run.mask);
                if (s.has_coords()) { take_coords(K, s, w, run); }
                if (s.has_means()) { mean_part(K, s, w, h, run, h.means); }
                score_part(K, s, w, h, run, 0, h.q + (size_t) a * s.dpk, s.has_means() ? h.means : nullptr, w.logits);
                // the softmax reads whole registers
                float m[KVQ_MAX_ROWS + 16] = {}, l[KVQ_MAX_ROWS + 16] = {}, c[KVQ_MAX_ROWS];
                float f[KVQ_MAX_RUN * KVQ_MAX_ROWS + 16], total_of[KVQ_MAX_RUN * KVQ_MAX_ROWS + 16];
                for (int r = 0; r < run.n_rows; r++) {
                    m[r] = attn.lse[(size_t) token(a + r) * attn.n_head + kvh * s.gqa + (r0 + a + r) % s.gqa] * LOG2_E;
                }
                K.softmax(run.n_rows, page.n_slots, 1, w.logits, attn.scale, attn.softcap, h.slope + a, run.mask, m, l,
                    c, f, total_of);
                float * out = sums + (size_t) kvh * n_slots + first[(size_t) ip];
                int32_t * count = seen ? seen + (size_t) kvh * n_slots + first[(size_t) ip] : nullptr;
                for (int r = 0; r < run.n_rows; r++) {
                    const float * x = w.logits + (size_t) r * page.n_slots;
                    for (int t = 0; t < page.n_slots; t++) { out[t] += f[r] * x[t]; }
                    for (int t = 0; count && (r0 + a + r) % s.gqa == 0 && t < page.n_slots; t++) {
                        count[t] += !run.mask[r] || run.mask[r][t] != KVQ_F16_NEG_INF;
                    }
                }
            }
        }
    });
}

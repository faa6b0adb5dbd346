// The attention loop, written once over pages: score, online softmax, accumulate.
//
//   tasks = streams x groups of KV heads x row blocks x splits.  Rows of a block read one KV head: gqa query heads of
//   consecutive tokens. A split is a contiguous range of pages; partial results (m, l, o) are joined afterwards
//   (log-sum-exp), as are those of batches, when pages come from a page_source. With few rows a task
//   runs over pages and visits all its heads in each: bytes are read in the order in which they lie. Pages go to the
//   kernels in runs of up to KVQ_MAX_RUN. Logits and maxima are in units of ln 2.
#include "attend_mask.h"
#include "attend_parts.h"

#include "base/parallel.h"

#include <cmath>
#include <cstring>

using namespace kvq_attention;

namespace kvq_attention {

void run_task(const kvq_kernels & K, const stream_plan & s, workspace & w, int kvh0, int n_heads, int r0, int n_rows,
    int page0, int page1, const head_step & step) {
    const kvq_attn & p = *s.p;
    size_t at = 0;
    for (int h = 0; h < n_heads; h++) { start_head(s, w, w.heads[(size_t) h], kvh0 + h, r0, n_rows, at); }
    const int max_run = n_rows <= FEW_ROWS ? KVQ_MAX_RUN : 1;
    int clear[KVQ_MAX_ROWS] = {};
    for (int r = 0; s.maps && r < n_rows; r++) {
        const int iq = (r0 + r) / s.gqa, head = kvh0 * s.gqa + (r0 + r) % s.gqa;
        const bool again = r && (!p.mask || (!p.mask_stride_head && (r0 + r) % s.gqa));
        clear[r] = again ? clear[r - 1]
            : p.mask     ? clear_cells(p.mask + iq * p.mask_stride_token + head * p.mask_stride_head, p.n_kv)
                         : p.n_kv;
    }
    page_run run;
    int slot = 0; // of w.mask
    const auto flush = [&](int next) {
        if (run.n_pages && s.has_coords()) { take_coords(K, s, w, run); }
        for (int h = 0; run.n_pages && s.has_means() && h < n_heads; h++) {
            mean_part(K, s, w, w.heads[(size_t) h], run, w.heads[(size_t) h].means);
        }
        for (int h = 0; run.n_pages && h < n_heads; h++) {
            const bool here = h + 1 < n_heads;
            ahead a;
            a.kvh = kvh0 + (here ? h + 1 : 0);
            a.of_all = !here;
            for (int i = 0; i < run.n_pages && (here || next + i < page1); i++) {
                a.page[a.n_pages++] = here ? run.page[i] : &p.pages[next + i];
            }
            step(w, w.heads[(size_t) h], run, a);
        }
        run.n_pages = 0;
    };
    for (int ip = page0; ip < page1; ip++) {
        const kvq_page & page = p.pages[ip];
        const int n = page.n_slots;
        if (!n) { continue; }
        // rows that see anything of the page: all others, before and behind, are left out
        const uint16_t * use[KVQ_MAX_ROWS];
        int first = n_rows, end = 0;
        for (int r = 0, alive = 0; r < n_rows; r++) {
            const int iq = (r0 + r) / s.gqa, head = kvh0 * s.gqa + (r0 + r) % s.gqa;
            if (r && (!p.mask || (!p.mask_stride_head && (r0 + r) % s.gqa))) {
                use[r] = use[r - 1];
            } else {
                const uint16_t * row = p.mask ? p.mask + iq * p.mask_stride_token + head * p.mask_stride_head : nullptr;
                alive = page_mask(p, page, kvh0, row, clear[r], w.mask + ((size_t) slot * n_rows + r) * n, &use[r]);
            }
            if (alive) {
                first = std::min(first, r);
                end = r + 1;
            }
        }
        if (!end) { continue; }
        if (run.n_pages && (run.first != first || run.n_rows != end - first)) { flush(ip); }
        run.first = first;
        run.n_rows = end - first;
        std::copy(use + first, use + end, run.mask + run.n_pages * KVQ_MAX_ROWS);
        run.page[run.n_pages++] = &page;
        slot = (slot + 1) % max_run;
        if (run.n_pages == max_run) { flush(ip + 1); }
    }
    flush(page1);
}

void store_row(const stream_plan & s, int kvh, int row, float m, float l, const float * out) {
    const kvq_attn & p = *s.p;
    const int iq = row / s.gqa, h = kvh * s.gqa + row % s.gqa;
    float * dst = p.dst + iq * p.dst_stride_token + h * p.dst_stride_head;
    float c = 1.0f;
    if (p.sinks) { // one more logit without a value
        const float sink = p.sinks[h] * LOG2_E, top = std::max(m, sink);
        c = m == -INFINITY ? 0.0f : exp2f(m - top);
        l = l * c + exp2f(sink - top);
    }
    if (s.lse) { // no cell is seen: -inf
        s.lse[(size_t) iq * p.n_head + h] = std::max(m, p.sinks ? p.sinks[h] * LOG2_E : m) / LOG2_E + logf(l);
    }
    const float inv = l > 0.0f ? c / l : 0.0f;
    for (int d = 0; d < s.n_out; d++) { dst[d] = out[d] * inv; }
}

bool has_few_rows(const stream_plan & s) {
    return s.n_rows <= FEW_ROWS && !s.p->mask_stride_head && (!s.maps || masks_are_shared(*s.p));
}

void cut_tasks(stream_plan & s, bool few, int want) {
    const int heads = s.p->n_head_kv, most = std::max(s.n_active / 8, 1), n_base = heads * s.n_blocks;
    s.n_splits = std::min(most, few ? want : (want + n_base - 1) / n_base);
    s.n_groups = few ? std::min(heads, (want + s.n_splits - 1) / s.n_splits) : heads;
    cut_pages(s);
}

workspace::sizes sizes_of(const stream_plan & s, int n_rows, int n_heads, int cells) {
    const size_t rows = (size_t) n_rows, runs = n_rows <= FEW_ROWS ? KVQ_MAX_RUN : 1;
    const auto pad = [](size_t x) { return (x + 15) / 16 * 16; };
    workspace::sizes z;
    z.heads = (size_t) n_heads;
    z.floats = z.heads *
        (pad(rows * s.dpk) + pad(rows * s.dpv) + pad(rows * s.rot) + pad(rows * s.n_fold) +
            pad(rows * (size_t) s.v_stride) + 3 * pad(rows) + 32 +
            (s.has_means() ? pad(runs * rows * s.p->k.n_cells) : 0));
    z.slots = runs * rows * cells;
    z.tile = (size_t) cells * (s.latent ? s.dpk + s.dpv + std::max(s.k.dp, s.v.dp) : std::max(s.dpk, s.dpv));
    z.work = std::max(kvq_work_bytes(s.k), kvq_work_bytes(s.v));
    z.coords = KVQ_MAX_RUN * s.coord_floats(); // the last block of many rows may have few
    z.part = s.mixed ? rows * s.dpv : 0;
    z.part_mask = s.mixed ? rows * cells : 0;
    return z;
}

void join(int n, float * to, const float * part) {
    if (part[0] == -INFINITY) { return; }
    const float top = std::max(to[0], part[0]);
    const float ca = to[0] == -INFINITY ? 0.0f : exp2f(to[0] - top), cb = exp2f(part[0] - top);
    to[0] = top;
    to[1] = to[1] * ca + part[1] * cb;
    for (int d = 2; d < n + 2; d++) { to[d] = to[d] * ca + part[d] * cb; }
}

// A stream of a call: its plan, and where in the partial results its own begin.
static void plan_stream(stream_plan & s, const kvq_attn & attn, int want, workspace::sizes & size, size_t & n_partial,
    bool in_batches, const kvq_chain_pages * fold = nullptr) {
    const int cells = make_plan(s, attn);
    if (fold) {
        s.fold = fold;
        s.n_fold = (int) (fold->in[0].stride + fold->in[1].stride);
    }
    s.lse = attn.lse;
    const bool few = has_few_rows(s);
    s.few = few && s.folded_k;
    if (s.few) { s.prepared.resize((size_t) attn.n_head_kv); }
    cut_tasks(s, few, want);
    s.leaves_partial = in_batches || s.n_splits > 1 || fold;
    s.partial = n_partial;
    if (s.leaves_partial) { n_partial += (size_t) attn.n_head_kv * s.n_splits * s.n_rows * (s.n_sums() + 2); }
    size.cover(sizes_of(s, s.block_rows(), (attn.n_head_kv + s.n_groups - 1) / s.n_groups, cells));
}

// All tasks of n planned streams. Rows of a stream that leaves partial results go to `partial`, others to its output.
static void run_plans(stream_plan * plan, int n, const workspace::sizes & size, float * const partial, int n_threads) {
    const kvq_kernels & K = kvq_get_kernels();
    static thread_local std::vector<int> first;
    first.assign((size_t) n + 1, 0);
    int n_heads = 0, n_prepared = 0; // n_prepared: streams
    for (int i = 0; i < n; i++) {
        first[i + 1] = first[i] + plan[i].n_tasks();
        n_prepared = plan[i].few ? i + 1 : n_prepared;
    }
    for (int i = 0; i < n_prepared; i++) { n_heads = std::max(n_heads, plan[i].p->n_head_kv); }
    const int * const first_task = first.data();
    const int n_tasks = first[n];
    kvq_parallel_for(n_prepared * n_heads, n_threads, [&](int64_t j) {
        static thread_local std::vector<float> q;
        stream_plan & s = plan[j / n_heads];
        const int kvh = (int) (j % n_heads);
        if (s.few && kvh < s.p->n_head_kv) {
            q.resize((size_t) s.n_rows * s.dpk);
            gather(s, kvh, 0, s.n_rows, nullptr, q.data());
            s.prepared[(size_t) kvh].make(s, kvh, s.n_rows, q.data());
        }
    });
    kvq_parallel_for(n_tasks, n_threads, [&](int64_t i_task) {
        const int task = (int) i_task;
        static thread_local workspace w;
        w.fit(size);
        int i = 0;
        while (task >= first_task[i + 1]) { i++; }
        const stream_plan & s = plan[i];
        const int t = task - first_task[i];
        const int split = t % s.n_splits, block = t / s.n_splits % s.n_blocks, group = t / s.n_splits / s.n_blocks;
        const int h0 = s.p->n_head_kv * group / s.n_groups, h1 = s.p->n_head_kv * (group + 1) / s.n_groups;
        const int r0 = block * KVQ_MAX_ROWS, rows = std::min(KVQ_MAX_ROWS, s.n_rows - r0);
        const int p0 = s.cuts[(size_t) split], p1 = s.cuts[(size_t) split + 1];
        run_task(K, s, w, h0, h1 - h0, r0, rows, p0, p1,
            [&](workspace & at, head_rows & h, const page_run & r, const ahead & next) {
                run_head(K, s, at, h, r, next);
            });
        for (int kvh = h0; kvh < h1; kvh++) {
            head_rows & h = w.heads[(size_t) (kvh - h0)];
            end_head(s, h, rows);
            for (int r = 0; r < rows; r++) {
                const float * out = h.out + (size_t) r * s.dpv;
                if (!s.leaves_partial) {
                    store_row(s, kvh, r0 + r, h.m[r], h.l[r], out);
                    continue;
                }
                float * to = partial + s.part_of(kvh, split, r0 + r);
                to[0] = h.m[r];
                to[1] = h.l[r];
                memcpy(to + 2, out, 4 * (size_t) s.dpv);
                memcpy(to + 2 + s.dpv, h.fold + (size_t) r * s.n_fold, 4 * (size_t) s.n_fold);
            }
        }
    });
}

// All splits of a row become the first one.
static float * join_splits(const stream_plan & s, float * partial, int kvh, int row) {
    float * a = partial + s.part_of(kvh, 0, row);
    for (int j = 1; j < s.n_splits; j++) { join(s.n_sums(), a, partial + s.part_of(kvh, j, row)); }
    return a;
}

// enough tasks that the last one to finish does not matter much
static int wished_tasks(int n, int n_threads) { return n_threads > 1 ? (4 * n_threads + n - 1) / n : 1; }

static void attend_stored(const kvq_attn * attn, int n, int n_threads) {
    static thread_local std::vector<stream_plan> plan;
    static thread_local std::vector<float> partial;
    plan.resize((size_t) n);
    workspace::sizes size;
    size_t n_partial = 0;
    for (int i = 0; i < n; i++) {
        plan_stream(plan[(size_t) i], attn[i], wished_tasks(n, n_threads), size, n_partial, false);
    }
    partial.resize(std::max(partial.size(), n_partial));
    run_plans(plan.data(), n, size, partial.data(), n_threads);
    for (const stream_plan & s : plan) {
        for (int i = 0; s.leaves_partial && i < s.p->n_head_kv * s.n_rows; i++) {
            const float * x = join_splits(s, partial.data(), i / s.n_rows, i % s.n_rows);
            store_row(s, i / s.n_rows, i % s.n_rows, x[0], x[1], x + 2);
        }
    }
}

void attend_from(page_source & source, const kvq_attn & attn, int n_threads, const kvq_chain_pages * fold) {
    static thread_local stream_plan s;                    // made anew for each batch
    static thread_local std::vector<float> partial, sums; // sums: of the batches before, as partial
    static thread_local std::vector<kvq_page> pages;
    n_threads = std::max(n_threads, 1);
    bool first = true, more = true;
    kvq_attn a = attn; // the plan points at it
    while (more) {
        pages.clear();
        more = source.next(pages);
        a.pages = pages.data();
        a.n_pages = (int32_t) pages.size();
        if (first && !more && !fold) { // everything fits into one batch
            attend_stored(&a, 1, n_threads);
            return;
        }
        workspace::sizes size;
        size_t n_partial = 0;
        plan_stream(s, a, wished_tasks(1, n_threads), size, n_partial, true, fold);
        partial.resize(std::max(partial.size(), n_partial));
        run_plans(&s, 1, size, partial.data(), n_threads);
        const size_t stride = (size_t) s.n_sums() + 2;
        if (first) { sums.resize((size_t) a.n_head_kv * s.n_rows * stride); }
        for (int i = 0; i < a.n_head_kv * s.n_rows; i++) {
            const float * x = join_splits(s, partial.data(), i / s.n_rows, i % s.n_rows);
            float * to = &sums[i * stride];
            if (first) {
                std::copy_n(x, stride, to);
            } else {
                join(s.n_sums(), to, x);
            }
        }
        first = false;
    }
    const stream_plan & of = s; // other threads have plans of their own
    float * const all = sums.data();
    const size_t stride = (size_t) of.n_sums() + 2;
    kvq_parallel_for(attn.n_head_kv, fold ? n_threads : 1, [&](int64_t i) {
        const int kvh = (int) i;
        float * const rows = all + (size_t) kvh * of.n_rows * stride;
        if (fold) { apply_fold(kvq_get_kernels(), of, kvh, rows, stride); }
        for (int r = 0; r < of.n_rows; r++) {
            const float * x = rows + r * stride;
            store_row(of, kvh, r, x[0], x[1], x + 2);
        }
    });
}

} // namespace kvq_attention

void kvq_cpu_attend(const kvq_attn * attn, int n, int n_threads) {
    n_threads = std::max(n_threads, 1);
    for (int i = 0; i < n;) {
        int end = i; // streams with one tier go together
        while (end < n && !attn[end].far) { end++; }
        if (end > i) { attend_stored(attn + i, end - i, n_threads); }
        if (end < n) { attend_far(attn[end], n_threads); }
        i = end + 1;
    }
}

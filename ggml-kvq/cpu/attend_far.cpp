// Attention over two tiers (kvq_far). A chunk of tokens goes through four steps:
//   1 keys     probabilities of all cells, near keys and open tiles, are left behind page by page
//   2 pick     each token and KV head picks cells by them and takes them out of the near part
//   3 values   near values and open tiles by what is left
//   4 fetch    the picked cells: logits with far keys, sums with far values
// and both parts are joined by log-sum-exp. Codes of keys and of values are read once.
#include "attend_parts.h"

#include "base/parallel.h"
#include "types/far_rows.h"

#include <cmath>
#include <cstring>

namespace kvq_attention {

namespace {

constexpr int TILE = 32; // picked cells that kernels take together

// What step 1 leaves of tokens [token0, token0 + n_tokens).
struct scores {
    const stream_plan & s;
    int token0, n_tokens, n_rows, n_blocks, block_rows, n; // rows of a KV head; cells of a page
    std::vector<float> & prob;                             // [kvh][block][page][row][n]: 2^(x - top)
    std::vector<float> top, sum;                           // [kvh][row][page]: maximum of x, sum of prob
    int n_padded;                                          // pages, a multiple of 16
    std::vector<int> pages; // by cell / n: index among the stream's pages, -1: no page there

    scores(const stream_plan & s, int token0, int n_tokens, std::vector<float> & prob) :
        s(s),
        token0(token0),
        n_tokens(n_tokens),
        n_rows(n_tokens * s.gqa),
        n_blocks(s.n_blocks),
        block_rows(std::min(n_rows, KVQ_MAX_ROWS)),
        n(s.p->k.n_cells),
        prob(prob) {
        prob.resize(std::max(prob.size(), (size_t) s.p->n_head_kv * n_blocks * s.p->n_pages * block_rows * n));
        n_padded = (int) kvq_pad((size_t) s.p->n_pages, 16);
        top.assign((size_t) s.p->n_head_kv * n_rows * n_padded, -INFINITY);
        sum.assign(top.size(), 0.0f);
        for (int i = 0; i < s.p->n_pages; i++) {
            const size_t at = (size_t) (s.p->pages[i].cell / n);
            if (at >= pages.size()) { pages.resize(at + 1, -1); }
            if (s.p->pages[i].n_slots) { pages[at] = i; }
        }
    }
    int page_of(int cell) const { return (size_t) (cell / n) < pages.size() ? pages[(size_t) (cell / n)] : -1; }
    // of row `row` of a KV head in page `page`
    size_t at(int kvh, int page, int row) const { return ((size_t) kvh * n_rows + row) * n_padded + page; }
    float * cells(int kvh, int page, int row) const {
        const size_t block = (size_t) kvh * n_blocks + row / KVQ_MAX_ROWS;
        return prob.data() + ((block * s.p->n_pages + page) * block_rows + row % KVQ_MAX_ROWS) * n;
    }
    // Do the probabilities of a run lie as kernels have them?
    bool is_whole(const page_run & r) const {
        return r.n_rows == block_rows && r.page[r.n_pages - 1] - r.page[0] == r.n_pages - 1;
    }
};

// Pages that have both tiers.
const void * far_row(const stream_plan & s, int page, bool value, int kvh, int slot, size_t nb_row) {
    const kvq_far & far = *s.p->far;
    const void * rows = (value ? far.v_rows : far.k_rows)[s.p->pages[page].cell / far.n_cells];
    return (const uint8_t *) rows + ((size_t) kvh * far.n_cells + slot) * nb_row;
}
bool has_far(const stream_plan & s, int page) {
    const kvq_page & x = s.p->pages[page];
    const kvq_far & far = *s.p->far;
    return x.n_slots && x.k_params && x.v_params && far.k_rows[x.cell / far.n_cells] &&
        far.v_rows[x.cell / far.n_cells];
}

struct candidate {
    float score;
    int32_t cell;
    // the worst is on top of a heap: the lower score, of equal ones the later cell
    bool operator<(const candidate & o) const { return score != o.score ? score > o.score : cell < o.cell; }
};

// Step 2. token: of the chunk. picks: ascending cells.
void pick(const kvq_kernels & K, const scores & x, int kvh, int token, std::vector<int32_t> & picks) {
    const stream_plan & s = x.s;
    const kvq_attn & p = *s.p;
    static thread_local std::vector<float> weight; // [query head][page]: probability of prob = 1
    static thread_local std::vector<candidate> heap;
    const int n_pages = p.n_pages, G = s.gqa, stride = x.n_padded;
    weight.assign((size_t) G * stride, 0.0f);
    for (int g = 0; g < G; g++) {
        const float * tops = &x.top[x.at(kvh, 0, token * G + g)];
        const float sink = p.sinks ? p.sinks[kvh * G + g] * LOG2_E : -INFINITY;
        float m = sink;
        float * w = &weight[(size_t) g * stride];
        const float l = K.page_weights(stride, tops, &x.sum[x.at(kvh, 0, token * G + g)], &m, w);
        if (m == -INFINITY) { // no cell is seen
            std::fill_n(w, stride, 0.0f);
            continue;
        }
        K.scale(stride, w, 1.0f / (l + exp2f(sink - m)));
    }
    static thread_local std::vector<float> bound; // [page]: no cell has a higher score
    bound.resize((size_t) stride);
    const float one = 1.0f;
    K.rank_cells(G, stride, weight.data(), &one, 0, false, bound.data());
    heap.clear();
    const size_t top = (size_t) std::max(p.far->top, 0);
    float score[KVQ_MAX_CELLS];
    for (int i = 0; top && i < n_pages; i++) {
        const float least = heap.size() < top ? 0.0f : heap.front().score;
        if (!(bound[(size_t) i] > least) || !has_far(s, i)) { continue; }
        float most = 0.0f;
        for (int g = 0, n; g < G; g += n) { // rows of a block
            const int row = token * G + g;
            n = std::min(G - g, KVQ_MAX_ROWS - row % KVQ_MAX_ROWS);
            most = K.rank_cells(n, x.n, x.cells(kvh, i, row), &weight[(size_t) g * stride + i], stride, g > 0, score);
        }
        if (!(most > least)) { continue; }
        for (int t = 0; t < x.n; t++) {
            if (!(score[t] > 0.0f) || (heap.size() == top && !(score[t] > heap.front().score))) { continue; }
            if (heap.size() == top) {
                std::pop_heap(heap.begin(), heap.end());
                heap.pop_back();
            }
            heap.push_back({ score[t], p.pages[i].cell + t });
            std::push_heap(heap.begin(), heap.end());
        }
    }
    picks.clear();
    for (const candidate & c : heap) { picks.push_back(c.cell); }
    std::sort(picks.begin(), picks.end());
}

// Picked cells leave the near part. Those of a page are neighbours in `picks`.
void take_out(scores & x, int kvh, int token, const std::vector<int32_t> & picks) {
    for (size_t i = 0; i < picks.size();) {
        const int page = x.page_of(picks[i]);
        size_t end = i;
        while (end < picks.size() && x.page_of(picks[end]) == page) { end++; }
        for (int row = token * x.s.gqa; row < (token + 1) * x.s.gqa; row++) {
            const size_t at = x.at(kvh, page, row);
            if (x.top[at] == -INFINITY) { continue; }
            float * p = x.cells(kvh, page, row);
            for (size_t j = i; j < end; j++) { p[picks[j] % x.n] = 0.0f; }
            float most = 0.0f, sum = 0.0f;
            for (int t = 0; t < x.n; t++) { most = std::max(most, p[t]); }
            if (most == 0.0f) {
                x.top[at] = -INFINITY;
                x.sum[at] = 0.0f;
                continue;
            }
            for (int t = 0; t < x.n; t++) { // kernels round probabilities under the largest one
                p[t] /= most;
                sum += p[t];
            }
            x.top[at] += log2f(most);
            x.sum[at] = sum;
        }
        i = end;
    }
}

// Step 4: rows of one token over picked cells. out [gqa][dpv], m, l: as a task of attention leaves them.
void attend_picked(const kvq_kernels & K, const scores & x, workspace & w, int kvh, int token,
    const std::vector<int32_t> & picks, float * m, float * l, float * out) {
    const stream_plan & s = x.s;
    const kvq_attn & p = *s.p;
    const size_t nb_k = kvq_far_row_bytes(p.far->format, p.k.head_size),
                 nb_v = kvq_far_row_bytes(p.far->format, p.v.head_size);
    kvq_codec ck = p.k, cv = p.v;
    ck.n_cells = cv.n_cells = TILE;
    const kvq_view vk = kvq_make_open_view(ck), vv = kvq_make_open_view(cv);
    static thread_local std::vector<uint16_t> tiles, bias;
    const size_t n_tiles = (picks.size() + TILE - 1) / TILE, k_tile = (size_t) TILE * s.dpk,
                 v_tile = (size_t) TILE * s.dpv;
    tiles.assign(n_tiles * (k_tile + v_tile), 0);
    for (size_t i = 0; i < picks.size(); i++) {
        const int page = x.page_of(picks[i]), slot = picks[i] % x.n;
        kvq_far_get(p.far->format, p.k.head_size, far_row(s, page, false, kvh, slot, nb_k), &tiles[i * s.dpk]);
        kvq_far_get(p.far->format, p.v.head_size, far_row(s, page, true, kvh, slot, nb_v),
            &tiles[n_tiles * k_tile + i * s.dpv]);
    }
    for (int g0 = 0; g0 < s.gqa; g0 += KVQ_MAX_ROWS) {
        const int rows = std::min(s.gqa - g0, KVQ_MAX_ROWS), iq = x.token0 + token;
        size_t at = 0;
        head_rows & h = w.heads[0];
        start_head(s, w, h, kvh, iq * s.gqa + g0, rows, at, nullptr, false);
        const size_t n_slots = n_tiles * TILE;
        bias.assign((p.mask_stride_head ? (size_t) rows : 1) * n_slots, 0xfc00);
        for (int r = 0; r < (p.mask_stride_head ? rows : 1); r++) {
            const uint16_t * mask =
                !p.mask ? nullptr : p.mask + iq * p.mask_stride_token + (kvh * s.gqa + g0 + r) * p.mask_stride_head;
            for (size_t i = 0; i < picks.size(); i++) { bias[r * n_slots + i] = mask ? mask[picks[i]] : 0; }
        }
        for (size_t first = 0; first < n_tiles; first += KVQ_MAX_RUN) {
            kvq_run k, v;
            k.n_pages = v.n_pages = (int) std::min<size_t>(n_tiles - first, KVQ_MAX_RUN);
            const uint16_t * use[KVQ_MAX_RUN * KVQ_MAX_ROWS];
            for (int i = 0; i < k.n_pages; i++) {
                k.codes[i] = &tiles[(first + i) * k_tile];
                v.codes[i] = &tiles[n_tiles * k_tile + (first + i) * v_tile];
                k.params[i] = v.params[i] = nullptr;
                for (int r = 0; r < rows; r++) {
                    use[i * KVQ_MAX_ROWS + r] = &bias[(p.mask_stride_head ? r : 0) * n_slots + (first + i) * TILE];
                }
            }
            float c[KVQ_MAX_ROWS], f[KVQ_MAX_RUN * KVQ_MAX_ROWS + 16], sums[KVQ_MAX_RUN * KVQ_MAX_ROWS + 16];
            K.block[KVQ_TYPE_F16].score(vk, rows, k, h.q, w.logits, w.work);
            if (K.softmax(rows, TILE, k.n_pages, w.logits, p.scale, p.softcap, h.slope, use, h.m, h.l, c, f, sums)) {
                for (int r = 0; r < rows; r++) { K.scale(s.dpv, h.out + (size_t) r * s.dpv, c[r]); }
            }
            K.block[KVQ_TYPE_F16].accum(vv, rows, v, w.logits, f, h.out, w.work);
        }
        std::copy_n(h.m, rows, m + g0);
        std::copy_n(h.l, rows, l + g0);
        std::copy_n(h.out, (size_t) rows * s.dpv, out + (size_t) g0 * s.dpv);
    }
}

// Every sealed cell from its far row. Rows as they came are open tiles as they lie; others become tiles, some pages at
// a time.
class far_source : public page_source {
public:
    far_source(const kvq_attn & attn, int n_threads) : attn(attn), n_threads(n_threads) {}
    bool next(std::vector<kvq_page> & pages) override {
        const kvq_far & far = *attn.far;
        const size_t most = far.format == KVQ_FAR_F16 ? SIZE_MAX : 64;
        for (size_t n = 0; at < attn.n_pages && n < most; at++) {
            kvq_page page = attn.pages[at];
            const int i = page.cell / far.n_cells;
            if (page.n_slots && page.k_params && page.v_params && far.k_rows[i] && far.v_rows[i]) {
                page.k_codes = far.k_rows[i];
                page.v_codes = far.v_rows[i];
                if (far.format != KVQ_FAR_F16) { unpack(page, n, most); }
                page.k_params = page.v_params = nullptr;
                n++;
            }
            pages.push_back(page);
        }
        return at < attn.n_pages;
    }

private:
    // the n-th page of a batch
    void unpack(kvq_page & page, size_t n, size_t most) {
        const int format = attn.far->format, K = attn.k.head_size, V = attn.v.head_size;
        const size_t k_row = kvq_pad((size_t) K, 16), v_row = kvq_pad((size_t) V, 16);
        const size_t rows = (size_t) attn.n_head_kv * attn.far->n_cells;
        static thread_local std::vector<uint16_t> tiles;
        tiles.resize(std::max(tiles.size(), most * rows * (k_row + v_row)));
        uint16_t *const to_k = &tiles[n * rows * (k_row + v_row)], *const to_v = to_k + rows * k_row;
        const uint8_t *k = (const uint8_t *) page.k_codes, *v = (const uint8_t *) page.v_codes;
        const auto get = [&](int64_t i) {
            const size_t r = (size_t) i;
            kvq_far_get(format, K, k + r * kvq_far_row_bytes(format, K), to_k + r * k_row);
            kvq_far_get(format, V, v + r * kvq_far_row_bytes(format, V), to_v + r * v_row);
        };
        kvq_parallel_for((int64_t) rows, n_threads, get, 16);
        page.k_codes = to_k;
        page.v_codes = to_v;
    }

    const kvq_attn & attn;
    const int n_threads;
    int at = 0; // the next page
};

// A chunk of tokens, all four steps.
struct two_tiers {
    const kvq_kernels & K;
    stream_plan & s;
    scores x;
    int n_threads;
    std::vector<std::vector<int32_t>> & staying; // [kvh][token], of a call's tokens those whose picks stay
    workspace::sizes size;
    std::vector<std::vector<int32_t>> picks; // [kvh][token]
    std::vector<float> near_m;               // [kvh][row]: maximum after picked cells are taken out
    std::vector<float> near_weight;          // [kvh][row][page]: 2^(top - near_m)
    std::vector<float> partial;              // [kvh][split][row]: m, l, out

    // tasks over heads, row blocks and page ranges
    void each_task(const head_step & step, bool keeps) {
        const int n_tasks = s.n_tasks();
        const size_t stride = (size_t) s.dpv + 2;
        kvq_parallel_for(n_tasks, n_threads, [&](int64_t task) {
            const int t = (int) task;
            static thread_local workspace w;
            w.fit(size);
            const int split = t % s.n_splits, block = t / s.n_splits % s.n_blocks, group = t / s.n_splits / s.n_blocks;
            const int h0 = s.p->n_head_kv * group / s.n_groups, h1 = s.p->n_head_kv * (group + 1) / s.n_groups;
            const int r0 = block * KVQ_MAX_ROWS, rows = std::min(KVQ_MAX_ROWS, x.n_rows - r0);
            run_task(K, s, w, h0, h1 - h0, x.token0 * s.gqa + r0, rows, s.cuts[(size_t) split],
                s.cuts[(size_t) split + 1], [&](workspace & at, head_rows & h, const page_run & r, const ahead & next) {
                    page_run here = r; // rows of the chunk
                    here.first += r0;
                    step(at, h, here, next);
                });
            for (int kvh = h0; keeps && kvh < h1; kvh++) {
                head_rows & h = w.heads[(size_t) (kvh - h0)];
                end_head(s, h, rows);
                for (int r = 0; r < rows; r++) {
                    float * to = &partial[(((size_t) kvh * s.n_splits + split) * x.n_rows + r0 + r) * stride];
                    to[0] = h.l[r] > 0.0f ? near_m[(size_t) kvh * x.n_rows + r0 + r] : -INFINITY;
                    to[1] = h.l[r];
                    memcpy(to + 2, h.out + (size_t) r * s.dpv, 4 * (size_t) s.dpv);
                }
            }
        });
    }

    // step 1; r.first: row of the chunk
    void keys(workspace & w, head_rows & h, const page_run & r, const ahead & next) {
        const kvq_attn & p = *s.p;
        const int first = r.first % KVQ_MAX_ROWS;
        const size_t per_page = (size_t) r.n_rows * x.n;
        page_run in_block = r;
        in_block.first = first;
        next.keys(s, 0, KVQ_MAX_RUN);
        float * const first_cell = x.cells(h.kvh, (int) (r.page[0] - p.pages), r.first);
        float * const to = x.is_whole(r) ? first_cell : w.logits;
        for (int i = 0; i < r.n_pages;) {
            i += score_part(K, s, w, h, in_block, i, h.q + (size_t) first * s.dpk, s.has_means() ? h.means : nullptr,
                to + i * per_page);
        }
        float c[KVQ_MAX_ROWS], f[KVQ_MAX_RUN * KVQ_MAX_ROWS + 16], sums[KVQ_MAX_RUN * KVQ_MAX_ROWS + 16];
        K.softmax(r.n_rows, x.n, r.n_pages, to, p.scale, p.softcap, h.slope + first, r.mask, h.m + first, h.l + first,
            c, f, sums);
        for (int i = 0; i < r.n_pages; i++) {
            const int page = (int) (r.page[i] - p.pages);
            if (to == w.logits) { memcpy(x.cells(h.kvh, page, r.first), to + i * per_page, 4 * per_page); }
            for (int j = 0; j < r.n_rows; j++) {
                const float by = f[i * KVQ_MAX_ROWS + j];
                const size_t at = x.at(h.kvh, page, r.first + j);
                x.top[at] = by > 0.0f ? h.m[first + j] + log2f(by) : -INFINITY;
                x.sum[at] = by > 0.0f ? sums[i * KVQ_MAX_ROWS + j] : 0.0f;
            }
        }
    }

    // step 3
    void values(workspace & w, head_rows & h, const page_run & r, const ahead & next) {
        const int first = r.first % KVQ_MAX_ROWS;
        const size_t per_page = (size_t) r.n_rows * x.n;
        float f[KVQ_MAX_RUN * KVQ_MAX_ROWS + 16] = {};
        const bool whole = x.is_whole(r);
        for (int i = 0; i < r.n_pages; i++) {
            const int page = (int) (r.page[i] - s.p->pages);
            if (!whole) { memcpy(w.logits + i * per_page, x.cells(h.kvh, page, r.first), 4 * per_page); }
            for (int j = 0; j < r.n_rows; j++) {
                const size_t at = x.at(h.kvh, page, r.first + j);
                const float by = near_weight[at];
                f[i * KVQ_MAX_ROWS + j] = by;
                h.l[first + j] += by * x.sum[at];
                h.open[first + j] += r.page[i]->v_params ? 0.0f : by * x.sum[at];
            }
        }
        page_run in_block = r;
        in_block.first = first;
        next.values(s);
        value_part(K, s, w, h, in_block, whole ? x.cells(h.kvh, (int) (r.page[0] - s.p->pages), r.first) : w.logits, f);
    }

    // cells at n_kv and behind are free, and no mask covers them: those picked by the step before may be gone
    bool is_candidate(int cell) const {
        const int page = cell >= 0 && cell < s.p->n_kv ? x.page_of(cell) : -1;
        return page >= 0 && has_far(s, page);
    }

    // far rows that are there, in the order of kept cells; none where tokens read their own picks
    std::vector<int32_t> kept_of(int kvh) const {
        const kvq_far & far = *s.p->far;
        const int32_t * const cells = far.kept + (size_t) kvh * (size_t) far.n_kept;
        std::vector<int32_t> out;
        for (int i = 0; far.fetch == KVQ_FETCH_AHEAD && i < far.n_kept && cells[i] >= 0; i++) {
            if (is_candidate(cells[i])) { out.push_back(cells[i]); }
        }
        return out;
    }

    // Behind the last token: what tokens have picked goes in front, one after the other.
    void keep() {
        const kvq_far & far = *s.p->far;
        const size_t n_kept = (size_t) far.n_kept, n_tokens = staying.size() / (size_t) s.p->n_head_kv;
        for (int kvh = 0; kvh < s.p->n_head_kv; kvh++) {
            std::vector<int32_t> cells = kept_of(kvh);
            for (size_t t = 0; t < n_tokens; t++) {
                const std::vector<int32_t> & now = staying[(size_t) kvh * n_tokens + t];
                std::vector<int32_t> next = now;
                for (int32_t cell : cells) {
                    if (!std::binary_search(now.begin(), now.end(), cell)) { next.push_back(cell); }
                }
                if (far.counts && far.fetch == KVQ_FETCH_AHEAD) { far.counts[0] += next.size() - cells.size(); }
                next.resize(std::min(next.size(), n_kept));
                cells = std::move(next);
            }
            cells.resize(n_kept, -1);
            std::copy(cells.begin(), cells.end(), far.kept + (size_t) kvh * n_kept);
        }
    }

    // step 2 of all heads and tokens
    void choose() {
        const kvq_far & far = *s.p->far;
        const int heads = s.p->n_head_kv, n = heads * x.n_tokens, n_q = s.p->n_q;
        const bool is_ahead = far.fetch == KVQ_FETCH_AHEAD;
        const int from = far.n_kept > 0 ? kvq_far_first_kept(n_q, far.n_kept, far.top) : n_q;
        staying.resize((size_t) heads * (size_t) (n_q - from));
        std::vector<uint64_t> fetched((size_t) n, 0), wanted((size_t) n, 0), hits((size_t) n, 0);
        near_m.assign((size_t) heads * x.n_rows, -INFINITY);
        near_weight.resize(x.top.size());
        picks.resize((size_t) n);
        kvq_parallel_for(n, n_threads, [&](int64_t i) {
            const int kvh = (int) i / x.n_tokens, token = (int) i % x.n_tokens;
            std::vector<int32_t> & mine = picks[(size_t) i];
            std::vector<int32_t> now;
            const int iq = x.token0 + token;
            if (!is_ahead || iq == 0 || iq >= from) { pick(K, x, kvh, token, now); }
            wanted[(size_t) i] = iq == 0 ? now.size() : 0;
            if (is_ahead) {
                mine = kept_of(kvh);
                std::sort(mine.begin(), mine.end());
                for (size_t j = 0; iq == 0 && j < now.size(); j++) {
                    hits[(size_t) i] += std::binary_search(mine.begin(), mine.end(), now[j]);
                }
            } else {
                fetched[(size_t) i] = now.size();
                mine = now;
            }
            if (iq >= from) { staying[(size_t) kvh * (size_t) (n_q - from) + (size_t) (iq - from)] = std::move(now); }
            take_out(x, kvh, token, mine);
            for (int row = token * s.gqa; row < (token + 1) * s.gqa; row++) {
                const size_t at = x.at(kvh, 0, row);
                K.page_weights(
                    x.n_padded, &x.top[at], &x.sum[at], &near_m[(size_t) kvh * x.n_rows + row], &near_weight[at]);
            }
        });
        if (from < n_q && x.token0 + x.n_tokens == n_q) { keep(); }
        for (int i = 0; far.counts && i < n; i++) {
            far.counts[0] += fetched[(size_t) i];
            far.counts[1] += wanted[(size_t) i];
            far.counts[2] += hits[(size_t) i];
        }
    }

    // step 4 and the end
    void finish() {
        const int n = s.p->n_head_kv * x.n_tokens;
        const size_t stride = (size_t) s.dpv + 2;
        kvq_parallel_for(n, n_threads, [&](int64_t i) {
            static thread_local workspace w;
            static thread_local std::vector<float> m, l, out, whole;
            w.fit(size);
            const int kvh = (int) i / x.n_tokens, token = (int) i % x.n_tokens;
            m.assign((size_t) s.gqa, -INFINITY);
            l.assign((size_t) s.gqa, 0.0f);
            out.assign((size_t) s.gqa * s.dpv, 0.0f);
            whole.resize(stride);
            if (!picks[(size_t) i].empty()) {
                attend_picked(K, x, w, kvh, token, picks[(size_t) i], m.data(), l.data(), out.data());
            }
            for (int g = 0; g < s.gqa; g++) {
                const int row = token * s.gqa + g;
                whole[0] = m[(size_t) g];
                whole[1] = l[(size_t) g];
                std::copy_n(&out[(size_t) g * s.dpv], s.dpv, &whole[2]);
                for (int j = 0; j < s.n_splits; j++) {
                    join(s.dpv, whole.data(), &partial[(((size_t) kvh * s.n_splits + j) * x.n_rows + row) * stride]);
                }
                store_row(s, kvh, x.token0 * s.gqa + row, whole[0], whole[1], &whole[2]);
            }
        });
    }

    void run() {
        using namespace std::placeholders;
        each_task(std::bind(&two_tiers::keys, this, _1, _2, _3, _4), false);
        choose();
        partial.resize((size_t) s.p->n_head_kv * s.n_splits * x.n_rows * (s.dpv + 2));
        each_task(std::bind(&two_tiers::values, this, _1, _2, _3, _4), true);
        finish();
    }
};

} // namespace

void attend_far(const kvq_attn & attn, int n_threads) {
    if (attn.far->fetch == KVQ_FETCH_ALL) {
        far_source source(attn, n_threads);
        attend_from(source, attn, n_threads);
        return;
    }
    const kvq_kernels & K = kvq_get_kernels();
    static thread_local stream_plan s;
    static thread_local std::vector<float> prob;
    const int cells = make_plan(s, attn);
    s.lse = attn.lse;
    const bool few = has_few_rows(s);
    const int at_once = few ? attn.n_q : std::max(KVQ_MAX_ROWS / s.gqa, 1);
    s.few = few && s.folded_k;
    if (s.few) {
        std::vector<float> q((size_t) s.n_rows * s.dpk);
        s.prepared.resize((size_t) attn.n_head_kv);
        for (int kvh = 0; kvh < attn.n_head_kv; kvh++) {
            gather(s, kvh, 0, s.n_rows, nullptr, q.data());
            s.prepared[(size_t) kvh].make(s, kvh, s.n_rows, q.data());
        }
    }
    std::vector<std::vector<int32_t>> staying;
    for (int token0 = 0; token0 < attn.n_q; token0 += at_once) {
        const int n_tokens = std::min(at_once, attn.n_q - token0), rows = n_tokens * s.gqa;
        s.n_blocks = (rows + KVQ_MAX_ROWS - 1) / KVQ_MAX_ROWS;
        cut_tasks(s, few, n_threads > 1 ? 4 * n_threads : 1);
        two_tiers t = { K, s, scores(s, token0, n_tokens, prob), n_threads, staying, {}, {}, {}, {}, {} };
        t.size = sizes_of(
            s, std::min(rows, KVQ_MAX_ROWS), (attn.n_head_kv + s.n_groups - 1) / s.n_groups, std::max(cells, TILE));
        t.size.cover(sizes_of(s, std::min(s.gqa, KVQ_MAX_ROWS), 1, KVQ_MAX_RUN * TILE));
        t.run();
    }
    if (attn.far->counts) { attn.far->counts[3]++; }
}

} // namespace kvq_attention

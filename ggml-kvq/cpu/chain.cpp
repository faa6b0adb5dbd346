// Predicted layers (policy/chain.h): rows of a layer from those of the layer below, page by page, and attention over
// them in stripes of pages. Kept rows are in 8 bits (types/predictor.h); no kernel here fuses a multiplication and an
// addition, so that every engine makes the same bits.
#include "attend_parts.h"
#include "lattice.h"
#include "rows.h"

#include "base/parallel.h"
#include "engine/tags.h"
#include "types/lattice.h"

#include <algorithm>
#include <vector>

namespace {

struct page_work {
    std::vector<float> rows;
    std::vector<int32_t> sums;
    std::vector<uint16_t> tile;
    std::vector<int32_t> positions;
};

// One for each thread, grown before the threads start, because an allocation must not throw inside a thread.
page_work * works_for(const kvq_chain_pages & k, const kvq_chain_pages * v, int n_threads) {
    static thread_local std::vector<page_work> works;
    works.resize(std::max(works.size(), (size_t) n_threads));
    for (page_work & w : works) {
        for (const kvq_chain_pages * c : { &k, v }) {
            if (!c || !c->l) { continue; }
            const size_t n = (size_t) c->l->page_cells,
                         groups = (size_t) std::max(c->from[0].n_groups(), c->from[1].n_groups());
            w.rows.resize(std::max(w.rows.size(), n * c->stride));
            w.sums.resize(std::max(w.sums.size(), n * std::max<size_t>(groups, 1)));
            w.tile.resize(std::max(w.tile.size(), c->l->nb_frame / 2));
            w.positions.resize(std::max(w.positions.size(), n));
        }
    }
    return works.data();
}

const void * params_of(const kvq_chain_pages & c, int i) { return c.value ? c.pages[i].v_params : c.pages[i].k_params; }
const void * codes_of(const kvq_chain_pages & c, int i) { return c.value ? c.pages[i].v_codes : c.pages[i].k_codes; }

// W x of page i, f32 [cell][stride]; zeros where rows are not predicted
void predict_page(const kvq_chain_pages & c, int i, float * out, std::vector<int32_t> & sums) {
    const int n = c.l->page_cells;
    if (!c.from[0].bits) { std::fill_n(out, n * c.stride, 0.0f); }
    for (int j = 0; j < 2 && c.from[j].bits; j++) {
        const kvq_rows8 x = c.in[j].from((size_t) i * n);
        kvq_get_kernels().predict(c.from[j], n, x.row, x.stride, x.scale, j > 0, out, c.stride, sums.data());
    }
}

// rows += decoded rows of all heads of a sealed page
void add_decoded(const kvq_chain_pages & c, int i, float * rows) {
    const kvq_lane_layout & l = *c.l;
    const kvq_lattice_keys parts = kvq_lattice_make_keys(l.codec);
    const uint8_t *codes = (const uint8_t *) codes_of(c, i), *params = (const uint8_t *) params_of(c, i);
    for (int h = 0; h < l.n_head; h++) {
        kvq_get_kernels().add_lattice_rows(parts, codes + h * l.nb_codes, params + h * l.nb_params, c.turn.order, h,
            rows + (size_t) h * (size_t) l.codec.head_size, c.stride);
    }
}

// Rows of an open page without mean and rotary embedding, as f16 holds them. They carry their positions.
void open_rows(const kvq_chain_pages & c, const uint16_t * from, float * out, page_work & w) {
    const kvq_lane_layout & l = *c.l;
    const int D = l.codec.head_size, stride = l.head_stride();
    const size_t head = (size_t) l.page_cells * stride;
    for (int t = 0; c.turn.rotary && t < l.page_cells; t++) {
        w.positions[(size_t) t] = kvq_tag_get(l, from + (size_t) t * stride, head);
    }
    const kvq_row_transform turn = { c.turn.mean, c.turn.rotary, w.positions.data(), nullptr, nullptr, 0 };
    std::copy_n(from, head * l.n_head, w.tile.data());
    for (int h = 0; h < l.n_head; h++) {
        kvq_cpu_take_out_rows(l, h, turn, &w.tile[h * head], stride);
        for (int t = 0; t < l.page_cells; t++) {
            kvq_cpu_f16_to_f32(&w.tile[h * head + (size_t) t * stride], out + t * c.stride + (size_t) h * D, D);
        }
    }
}

// The kept rows of page i become those of this layer; its rows in f32 stay in w.rows.
void step_page(const kvq_chain_pages & c, int i, page_work & w) {
    const kvq_kernels & K = kvq_get_kernels();
    const kvq_lane_layout & l = *c.l;
    float * out = w.rows.data();
    if (params_of(c, i)) {
        predict_page(c, i, out, w.sums);
        add_decoded(c, i, out);
    } else if (c.pages[i].n_slots && codes_of(c, i)) {
        open_rows(c, (const uint16_t *) codes_of(c, i), out, w);
    } else {
        std::fill_n(out, l.page_cells * c.stride, 0.0f);
    }
    for (int t = 0; c.out.row && t < l.page_cells; t++) {
        const kvq_rows8 to = c.out.from((size_t) i * l.page_cells + t);
        K.quantise_row(l.n_head * l.codec.head_size, out + t * c.stride, to.row, to.scale);
    }
}

// Predicted pages become readable in stripes.
class predicted_source : public kvq_attention::page_source {
public:
    // folds: values stay as they are stored
    predicted_source(const kvq_attn & attn, const kvq_chain_pages * lanes, int n_threads, bool folds) :
        attn(attn), lanes(lanes), n_threads(n_threads), n_lanes(folds ? 1 : 2) {
        const size_t n = (size_t) std::min(KVQ_CHAIN_STRIPE, attn.n_pages);
        for (int v = 0; v < n_lanes; v++) {
            static thread_local std::vector<uint16_t> kept[2];
            kept[v].resize(std::max(kept[v].size(), lanes[v].l ? n * lanes[v].l->nb_frame / 2 : 0));
            tiles[v] = kept[v].data();
        }
    }

    bool next(std::vector<kvq_page> & pages) override {
        const int first = at;
        std::vector<int> sealed;
        for (; at < attn.n_pages; at++) {
            const bool is_sealed = (lanes[0].l && params_of(lanes[0], at)) || (lanes[1].l && params_of(lanes[1], at));
            if (is_sealed && sealed.size() == (size_t) KVQ_CHAIN_STRIPE) { break; }
            pages.push_back(attn.pages[at]);
            if (is_sealed) { sealed.push_back(at); }
        }
        const int n = (int) sealed.size();
        page_work * const works = works_for(lanes[0], &lanes[1], n_threads);
        kvq_parallel_for(n, n_threads, [&](int64_t j, int thread) {
            const int p = sealed[(size_t) j];
            read_page(p, (int) j, pages[(size_t) (p - first)], works[thread]);
        });
        return at < attn.n_pages;
    }

private:
    // its keys, then its values, which may be predicted from them, into tile j
    void read_page(int p, int j, kvq_page & page, page_work & w) {
        for (int v = 0; v < n_lanes; v++) {
            const kvq_chain_pages & c = lanes[v];
            // values want the rows of their keys, sealed or not
            if (!c.l || (!params_of(c, p) && (v || !lanes[1].l))) { continue; }
            step_page(c, p, w);
            if (!params_of(c, p)) { continue; }
            const kvq_lane_layout & l = *c.l;
            const int D = l.codec.head_size;
            uint16_t * tile = tiles[v] + (size_t) j * l.nb_frame / 2;
            for (int h = 0; h < l.n_head; h++) {
                kvq_get_kernels().rows_to_f16(l.page_cells, D, w.rows.data() + (size_t) h * D, c.stride,
                    c.turn.mean ? c.turn.mean + (size_t) h * D : nullptr, c.turn.rotary,
                    c.turn.positions ? c.turn.positions + page.cell : nullptr, tile + h * l.nb_tile_head / 2,
                    l.head_stride());
            }
            (v ? page.v_codes : page.k_codes) = tile;
            (v ? page.v_params : page.k_params) = nullptr;
        }
    }

    const kvq_attn & attn;
    const kvq_chain_pages * const lanes;
    const int n_threads, n_lanes;
    int at = 0;          // the next page
    uint16_t * tiles[2]; // of a batch
};

} // namespace

void kvq_cpu_chain_predict(const kvq_chain_pages & c, float * out) {
    page_work & w = *works_for(c, nullptr, 1);
    for (int i = 0; i < c.n; i++) { predict_page(c, i, out + (size_t) i * c.l->page_cells * c.stride, w.sums); }
}

void kvq_cpu_chain_step(const kvq_chain_pages & c) {
    const int n_threads = std::max(c.n_threads, 1);
    page_work * const works = works_for(c, nullptr, n_threads);
    kvq_parallel_for(c.n, n_threads, [&](int64_t i, int thread) { step_page(c, (int) i, works[thread]); });
}

void kvq_cpu_attend_predicted(const kvq_attn & attn, const kvq_chain_pages * lanes, int n_threads) {
    kvq_attn a = attn;
    a.rotary = nullptr; // tiles hold whole rows
    a.k_mean = lanes[0].l ? nullptr : a.k_mean;
    a.k_order = lanes[0].l ? nullptr : a.k_order;
    const bool folds = kvq_attention::may_fold(attn, lanes[1]);
    a.v_mean = lanes[1].l && !folds ? nullptr : a.v_mean;
    predicted_source source(a, lanes, std::max(n_threads, 1), folds);
    kvq_attention::attend_from(source, a, n_threads, folds ? &lanes[1] : nullptr);
}

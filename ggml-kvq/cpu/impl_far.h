// What picking cells of a second tier reads (attend_far.cpp): a weight a page, and the scores of a page's cells.
namespace KVQ_NS {

static float page_weights(int n, const float * top, const float * sum, float * m, float * w) {
    f32x16 total = f32_set1(0.0f), most = f32_set1(*m);
    for (int i = 0; i < n; i += 16) { most = f32_max(most, f32_load(top + i)); }
    *m = f32_hmax(most);
    const f32x16 base = f32_set1(*m > LEAST ? *m : LEAST);
    for (int i = 0; i < n; i += 16) {
        const f32x16 y = f32_exp2(f32_sub(f32_load(top + i), base));
        f32_store(w + i, y);
        total = f32_fma(y, f32_load(sum + i), total);
    }
    return f32_sum(total);
}

static float rank_cells(int n_rows, int n, const float * p, const float * w, int w_stride, bool add, float * score) {
    f32x16 most = f32_set1(0.0f);
    for (int t = 0; t < n; t += 16) {
        f32x16 x = add ? f32_load(score + t) : f32_set1(0.0f);
        for (int r = 0; r < n_rows; r++) {
            x = f32_fma(f32_load(p + (size_t) r * n + t), f32_set1(w[(size_t) r * w_stride]), x);
        }
        f32_store(score + t, x);
        most = f32_max(most, x);
    }
    return f32_hmax(most);
}

} // namespace

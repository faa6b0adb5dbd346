// Rows of a head on their way into blocks and back (policy/transform.h has the formula), 16 cells at a time, by
// channel. Each product and sum is rounded by itself, in the formula's order: all devices seal the same blocks.
namespace KVQ_NS {

// out [n_dims][16]: cosines of the pairs, then sines, at 16 positions; those of kvq_rotary_turn
static void turn_table(const kvq_rotary & rot, const int32_t * pos, bool inverse, float * out) {
    const int n = rot.n_dims / 2, first = pos[0] < 0 ? 0 : pos[0];
    const float magnitude = rot.high[0], inv = inverse ? 1.0f / (magnitude * magnitude) : 1.0f;
    int run = 0; // positions one behind the other share the coarse part
    while (run < 16 && pos[run] == first + run && first % 64 <= 48) { run++; }
    const f32x16 cosine = f32_set1(inv), sine = f32_set1(inverse ? -inv : inv);
    for (int i = 0; i < n; i++) {
        const float * low = rot.low + (size_t) i * 2 * KVQ_ROTARY_LOW;
        float part[4][16]; // coarse cosine and sine, fine ones
        for (int t = 0; run < 16 && t < 16; t++) {
            const int at = pos[t] < 0 ? 0 : pos[t];
            const float * high = rot.high + (size_t) (at / 64) * 2 * n;
            part[0][t] = high[i];
            part[1][t] = high[n + i];
            part[2][t] = low[at % 64];
            part[3][t] = low[KVQ_ROTARY_LOW + at % 64];
        }
        const float * high = rot.high + (size_t) (first / 64) * 2 * n;
        const bool all = run == 16;
        const f32x16 hc = all ? f32_set1(high[i]) : f32_load(part[0]),
                     hs = all ? f32_set1(high[n + i]) : f32_load(part[1]),
                     lc = f32_load(all ? low + first % 64 : part[2]),
                     ls = f32_load(all ? low + KVQ_ROTARY_LOW + first % 64 : part[3]);
        f32_store(out + (size_t) i * 16, f32_mul(f32_sub(f32_mul(hc, lc), f32_mul(hs, ls)), cosine));
        f32_store(out + (size_t) (n + i) * 16, f32_mul(f32_add(f32_mul(hs, lc), f32_mul(hc, ls)), sine));
    }
}

// x [D][16 cells] = R x
static void turn_columns(int n_dims, bool neox, const float * table, float * x, size_t stride = 16) {
    const int n = n_dims / 2;
    for (int i = 0; i < n; i++) {
        float *a = x + (size_t) (neox ? i : 2 * i) * stride, *b = x + (size_t) (neox ? i + n : 2 * i + 1) * stride;
        const f32x16 u = f32_load(a), v = f32_load(b), c = f32_load(table + (size_t) i * 16),
                     s = f32_load(table + (size_t) (n + i) * 16);
        f32_store(a, f32_sub(f32_mul(u, c), f32_mul(v, s)));
        f32_store(b, f32_add(f32_mul(u, s), f32_mul(v, c)));
    }
}

// 16 channels of 16 rows, by channel; n: how many there are, others are 0
static inline void load_columns(const float * rows, size_t stride, int n, f32x16 (&block)[16]) {
    for (int t = 0; t < 16; t++) {
        float part[16] = {};
        for (int c = 0; n < 16 && c < n; c++) { part[c] = rows[(size_t) t * stride + c]; }
        block[t] = f32_load(n < 16 ? part : rows + (size_t) t * stride);
    }
    f32_transpose(block);
}

static inline f32x16 within_f16(f32x16 x) { // in this order: what is no number stays so
    return f32_max(f32_set1(-65504.0f), f32_min(f32_set1(65504.0f), x));
}

// Nothing turns and channels stay: row by row
static void shift_rows(const kvq_row_turn & a, bool back, uint16_t * rows, int stride) {
    const f32x16 zero = f32_set1(0.0f);
    for (int t = 0; t < 16; t++) {
        const float * pred = a.pred ? a.pred + (size_t) t * a.pred_stride : nullptr;
        for (int c = 0; c < a.head_size; c += 16) {
            uint16_t * at = rows + (size_t) t * stride + c;
            const f32x16 row = f32_load_f16(at), mu = a.mean ? f32_load(a.mean + c) : zero,
                         p = pred ? f32_load(pred + c) : zero;
            f32_store_f16(at, within_f16(back ? f32_add(f32_add(row, p), mu) : f32_sub(f32_sub(row, mu), p)));
        }
    }
}

static void turn_rows(const kvq_row_turn & a, bool back, uint16_t * rows, int stride) {
    const int D = a.head_size;
    if (D % 16 == 0 && !a.channel && !a.before && !a.behind && !(a.mean && a.of_mean)) {
        shift_rows(a, back, rows, stride);
        return;
    }
    float first[KVQ_MAX_HEAD * 16], second[KVQ_MAX_HEAD * 16], mean[KVQ_MAX_HEAD * 16], *x = first;
    for (int c0 = 0; c0 < D; c0 += 16) {
        f32x16 block[16];
        for (int t = 0; t < 16; t++) {
            uint16_t part[16] = {};
            const uint16_t * row = rows + (size_t) t * stride + c0;
            for (int c = 0; c0 + 16 > D && c0 + c < D; c++) { part[c] = row[c]; }
            block[t] = f32_load_f16(c0 + 16 > D ? part : row);
        }
        f32_transpose(block);
        for (int c = 0; c < 16 && c0 + c < D; c++) { f32_store(x + (size_t) (c0 + c) * 16, block[c]); }
    }
    if (back && a.channel) {
        for (int i = 0; i < D; i++) {
            f32_store(second + (size_t) a.channel[i] * 16, f32_mul(f32_load(x + (size_t) i * 16), f32_set1(a.gain[i])));
        }
        x = second;
    }
    if (a.before) { turn_columns(a.n_dims, a.neox, a.before, x); }
    for (int c = 0; c < D; c++) { f32_store(mean + (size_t) c * 16, f32_set1(a.mean ? a.mean[c] : 0.0f)); }
    const bool together = a.pred && a.mean && a.of_mean; // a prediction is turned as the mean is
    for (int c0 = 0; together && c0 < D; c0 += 16) {
        f32x16 pred[16];
        const int n = imin(16, D - c0);
        load_columns(a.pred + c0, a.pred_stride, n, pred);
        for (int c = 0; c < n; c++) {
            float * at = mean + (size_t) (c0 + c) * 16;
            f32_store(at, f32_add(f32_load(at), pred[c]));
        }
    }
    if (a.mean && a.of_mean) { turn_columns(a.n_dims, a.neox, a.of_mean, mean); }
    for (int c0 = 0; c0 < D; c0 += 16) {
        f32x16 pred[16];
        const int n = imin(16, D - c0);
        if (a.pred && !together) {
            load_columns(a.pred + c0, a.pred_stride, n, pred);
        } else {
            for (int c = 0; c < 16; c++) { pred[c] = f32_set1(0.0f); }
        }
        for (int c = 0; c < n; c++) {
            float * at = x + (size_t) (c0 + c) * 16;
            const f32x16 row = f32_load(at), mu = f32_load(mean + (size_t) (c0 + c) * 16);
            f32_store(at, back ? f32_add(f32_add(row, pred[c]), mu) : f32_sub(f32_sub(row, mu), pred[c]));
        }
    }
    if (a.behind) { turn_columns(a.n_dims, a.neox, a.behind, x); }
    const bool sorts = !back && a.channel;
    for (int c0 = 0; c0 < D; c0 += 16) {
        f32x16 block[16];
        const int n = imin(16, D - c0);
        for (int c = 0; c < 16; c++) {
            const size_t from = sorts && c < n ? a.channel[c0 + c] : (size_t) (c0 + c);
            f32x16 y = c < n ? f32_load(x + from * 16) : f32_set1(0.0f);
            if (sorts && c < n) { y = f32_mul(y, f32_set1(a.gain[c0 + c])); }
            block[c] = within_f16(y);
        }
        f32_transpose(block);
        for (int t = 0; t < 16; t++) {
            uint16_t part[16], *to = rows + (size_t) t * stride + c0;
            f32_store_f16(n < 16 ? part : to, block[t]);
            for (int c = 0; n < 16 && c < n; c++) { to[c] = part[c]; }
        }
    }
}

} // namespace

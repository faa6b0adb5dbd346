#include "turned.h"

#include "backend.h"

#include "base/parallel.h"
#include "types/lattice.h"

#include <algorithm>
#include <cstring>

// MUL_MAT with the input attn_inp_k_rot or attn_inp_v_rot, or with a device's copy of it.
static bool is_turn(const ggml_tensor * x) {
    const ggml_tensor * m = x->op == GGML_OP_MUL_MAT ? x->src[0] : nullptr;
    return m && m->type == GGML_TYPE_F32 && m->ne[0] == m->ne[1] && m->ne[2] == 1 && m->ne[3] == 1 &&
        (m->ne[0] & (m->ne[0] - 1)) == 0 && (strstr(m->name, "attn_inp_k_rot") || strstr(m->name, "attn_inp_v_rot"));
}

static const ggml_tensor * behind_views(const ggml_tensor * x) {
    while (x && (kvq_is_view_op(x->op) || x->op == GGML_OP_CONT) && x->src[0]) { x = x->src[0]; }
    return x;
}

int kvq_turn_of(const ggml_tensor * x) {
    x = behind_views(x);
    return x && is_turn(x) ? (int) x->src[0]->ne[0] : 0;
}

const ggml_tensor * kvq_before_turn(const ggml_tensor * x) {
    x = behind_views(x);
    return x && is_turn(x) ? behind_views(x->src[1]) : x;
}

void kvq_turn_rows(float * x, int64_t n_rows, int64_t stride, int width, int block, int n_threads) {
    const auto turn = [&](int64_t i) {
        for (int at = 0; at + block <= width; at += block) { kvq_hadamard(block, x + i * stride + at); }
    };
    kvq_parallel_for(n_rows, n_threads, turn, std::max<int64_t>(1, (1 << 14) / width));
}

const float * kvq_turned(
    const float * x, int64_t n_rows, int64_t stride, int width, int block, int n_threads, std::vector<float> & to) {
    to.resize((size_t) (n_rows * width));
    for (int64_t i = 0; i < n_rows; i++) { memcpy(&to[(size_t) (i * width)], x + i * stride, 4 * (size_t) width); }
    kvq_turn_rows(to.data(), n_rows, width, width, block, n_threads);
    return to.data();
}

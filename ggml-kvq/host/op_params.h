// The parameters of ggml's operations: int32 words behind a node, without names. Nobody else reads them (tests/
// test_house.py). self_check.cpp builds nodes by the constructors of the process' ggml and reads them back through
// these functions, so that a word that has moved is a refusal and never a wrong text.
#pragma once

#include "layout.h"

#include "engine/rope.h"

#include "ggml.h"

#include <cstring>

// ggml_flash_attn_ext: words 0 to 2
struct kvq_attention_params {
    float scale, max_bias, softcap;
};
static inline kvq_attention_params kvq_attention_of(const ggml_tensor * node) {
    kvq_attention_params p;
    static_assert(sizeof(p) == 12, "three floats");
    memcpy(&p, node->op_params, sizeof(p));
    return p;
}

// ggml_rope_ext, ggml_rope_multi: 1 channels, 2 mode, 4 length of the trained context, 5 to 10 floats, 11 to 14
// sections, 15 the first channel that turns (none in older versions, and 0 there)
static inline int kvq_rope_mode(const ggml_tensor * node) { return node->op_params[2]; }
static inline int kvq_rope_first(const ggml_tensor * node) { return node->op_params[15]; }

// all but the frequency factors, which are an operand
static inline kvq_rope kvq_rope_of(const ggml_tensor * node) {
    const int32_t * p = node->op_params;
    kvq_rope r;
    r.n_dims = p[1];
    r.neox = p[2] != GGML_ROPE_TYPE_NORMAL;
    if (p[2] == GGML_ROPE_TYPE_MROPE || p[2] == GGML_ROPE_TYPE_IMROPE) {
        memcpy(r.sections, p + 11, sizeof(r.sections));
        r.interleaved = p[2] == GGML_ROPE_TYPE_IMROPE;
    }
    r.n_ctx_orig = p[4];
    memcpy(&r.freq_base, p + 5, 4);
    memcpy(&r.freq_scale, p + 6, 4);
    memcpy(&r.ext_factor, p + 7, 4);
    memcpy(&r.attn_factor, p + 8, 4);
    memcpy(&r.beta_fast, p + 9, 4);
    memcpy(&r.beta_slow, p + 10, 4);
    return r;
}

// ggml_custom_4d: the callback, a number of tasks, the callback's pointer
struct kvq_custom_params {
    ggml_custom_op_t fun;
    int n_tasks;
    void * userdata;
};
static_assert(sizeof(kvq_custom_params) <= GGML_MAX_OP_PARAMS, "custom parameters fit");
static inline bool kvq_is_custom(const ggml_tensor * node) { return (int) node->op == kvq_layout_here.op_custom; }
static inline kvq_custom_params kvq_custom_of(const ggml_tensor * node) {
    kvq_custom_params p;
    memcpy(&p, node->op_params, sizeof(p));
    return p;
}

// ggml-kvq in any ggml graph: encode, attention and prediction as GGML_OP_CUSTOM nodes. The CPU backend runs them
// through their callback, the device KVQ0 recognises them; both run the kernels behind ggml-kvq.h. Link libggml-kvq
// and libggml-base.
//
// Blocks live in an I8 tensor, one record a page (codes and params of kvq_codec_bytes):
//
//   ne = [nb_page, n_pages, n_stream, 1],  nb_page = n_head_kv * (nb_codes + nb_params)
//   record = codes[n_head_kv][nb_codes], params[n_head_kv][nb_params];  adopted codes: params only
//
// Page p holds cells p*n_cells .. p*n_cells + n_cells-1 of its stream. Functions return NULL for operands that do not
// fit, with one line in kvq_last_error().
#pragma once

#include "ggml.h"
#include "ggml-kvq.h"

#ifdef __cplusplus
extern "C" {
#endif

// Bytes of a page record: ne[0] of a block tensor. 0 when the codec is refused.
KVQ_API size_t ggml_kvq_nb_page(const kvq_codec * codec, int n_head_kv, bool adopts_codes);

// rows: f32 or f16 [head_size, n_head_kv, n_cells_total, n_stream], n_cells_total a multiple of the codec's n_cells,
// nb[0] = element size, other strides free.
// shared: block tensor whose codes are adopted (XQuant section 3.3), or NULL. It must hold codes of the same codec
// shape.
// -> block tensor
KVQ_API struct ggml_tensor * ggml_kvq_encode(
    struct ggml_context * ctx, const kvq_codec * codec, struct ggml_tensor * rows, struct ggml_tensor * shared);

typedef struct ggml_kvq_attn_params {
    kvq_codec k, v;
    int32_t n_head_kv;
    int32_t flags; // KVQ_ATTN_*
    float scale, max_bias, softcap;
} ggml_kvq_attn_params;

// As ggml_flash_attn_ext, over blocks.
//   q        f32 [head_size_k, n_q, n_head, n_stream]
//   k, v     block tensors of n_stream streams and equal page size
//   mask     f16 [n_kv, n_q, 1 or n_head, 1 or n_stream], n_kv up to the cells of k, or NULL
//   sinks    f32 [n_head] or NULL
//   k_codes  block tensor whose codes k adopts (v_codes: v), or NULL
//   -> f32 [head_size_v, n_head, n_q, n_stream]
KVQ_API struct ggml_tensor * ggml_kvq_attn(struct ggml_context * ctx, const ggml_kvq_attn_params * params,
    struct ggml_tensor * q, struct ggml_tensor * k, struct ggml_tensor * v, struct ggml_tensor * mask,
    struct ggml_tensor * sinks, struct ggml_tensor * k_codes, struct ggml_tensor * v_codes);

// Predictor matrix over rows (AQUA-KV section 3.1): W rows + add, in the arithmetic of kvq_predict.
//   weights  I8 [kvq_weights_bytes(n_in, n_out, bits)], filled by kvq_weights_pack; bits 8 or 4
//   rows     f32 [n_in, n, ...], contiguous channels
//   add      f32 [n_out, n, ...] of the shape of the result, contiguous channels, or NULL
//   -> f32 [n_out, n, ...]
KVQ_API struct ggml_tensor * ggml_kvq_predict(struct ggml_context * ctx, struct ggml_tensor * weights, int n_out,
    int bits, struct ggml_tensor * rows, struct ggml_tensor * add);

#ifdef __cplusplus
}
#endif

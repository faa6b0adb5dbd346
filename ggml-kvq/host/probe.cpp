// Sizes and field offsets as compiled: ctypes declarations of other languages are checked against these, never guessed.
// A field that this llama.cpp lacks has the offset (size_t) -1.
// The tables name the structures of llama.h and ggml-kvq.h that cross the language border by value or by pointer.
#include "ggml-kvq.h"

#include "llama.h"
#include "seam.h"

#include <cstddef>
#include <cstring>

namespace {

struct kvq_field {
    const char * name;
    size_t offset;
};

struct kvq_struct {
    const char * name;
    size_t size;
    const kvq_field * fields;
    size_t n_fields;
};

#define F(type, field) { #field, offsetof(type, field) }
#define M(type, field) { #field, KVQ_OFFSET(type, field) } // in some of the supported versions of llama.cpp
#define S(type) { #type, sizeof(type), type##_fields, sizeof(type##_fields) / sizeof(kvq_field) }

const kvq_field llama_model_params_fields[] = {
    M(llama_model_params, devices),
    M(llama_model_params, tensor_buft_overrides),
    M(llama_model_params, n_gpu_layers),
    M(llama_model_params, split_mode),
    M(llama_model_params, load_mode),
    M(llama_model_params, lazy_mode),
    M(llama_model_params, main_gpu),
    M(llama_model_params, tensor_split),
    M(llama_model_params, progress_callback),
    M(llama_model_params, progress_callback_user_data),
    M(llama_model_params, kv_overrides),
    M(llama_model_params, vocab_only),
    M(llama_model_params, use_mmap),
    M(llama_model_params, use_direct_io),
    M(llama_model_params, use_mlock),
    M(llama_model_params, check_tensors),
    M(llama_model_params, use_extra_bufts),
    M(llama_model_params, no_host),
    M(llama_model_params, no_alloc),
    M(llama_model_params, load_mtp),
};

const kvq_field llama_context_params_fields[] = {
    M(llama_context_params, n_ctx),
    M(llama_context_params, n_batch),
    M(llama_context_params, n_ubatch),
    M(llama_context_params, n_seq_max),
    M(llama_context_params, n_rs_seq),
    M(llama_context_params, n_outputs_max),
    M(llama_context_params, n_outputs_max_per_seq),
    M(llama_context_params, n_threads),
    M(llama_context_params, n_threads_batch),
    M(llama_context_params, ctx_type),
    M(llama_context_params, rope_scaling_type),
    M(llama_context_params, pooling_type),
    M(llama_context_params, attention_type),
    M(llama_context_params, flash_attn_type),
    M(llama_context_params, rope_freq_base),
    M(llama_context_params, rope_freq_scale),
    M(llama_context_params, yarn_ext_factor),
    M(llama_context_params, yarn_attn_factor),
    M(llama_context_params, yarn_beta_fast),
    M(llama_context_params, yarn_beta_slow),
    M(llama_context_params, yarn_orig_ctx),
    M(llama_context_params, defrag_thold),
    M(llama_context_params, cb_eval),
    M(llama_context_params, cb_eval_user_data),
    M(llama_context_params, type_k),
    M(llama_context_params, type_v),
    M(llama_context_params, abort_callback),
    M(llama_context_params, abort_callback_data),
    M(llama_context_params, embeddings),
    M(llama_context_params, offload_kqv),
    M(llama_context_params, no_perf),
    M(llama_context_params, op_offload),
    M(llama_context_params, swa_full),
    M(llama_context_params, kv_unified),
    M(llama_context_params, samplers),
    M(llama_context_params, n_samplers),
    M(llama_context_params, ctx_other),
};

const kvq_field llama_batch_fields[] = {
    F(llama_batch, n_tokens),
    F(llama_batch, token),
    F(llama_batch, embd),
    F(llama_batch, pos),
    F(llama_batch, n_seq_id),
    F(llama_batch, seq_id),
    F(llama_batch, logits),
};

const kvq_field llama_sampler_chain_params_fields[] = { F(llama_sampler_chain_params, no_perf) };

const kvq_field llama_chat_message_fields[] = { F(llama_chat_message, role), F(llama_chat_message, content) };

const kvq_field kvq_option_info_fields[] = {
    F(kvq_option_info, key),
    F(kvq_option_info, type),
    F(kvq_option_info, default_value),
    F(kvq_option_info, help),
    F(kvq_option_info, source),
};

const kvq_field kvq_method_info_fields[] = {
    F(kvq_method_info, name),
    F(kvq_method_info, summary),
    F(kvq_method_info, paper),
    F(kvq_method_info, n_options),
    F(kvq_method_info, options),
};

const kvq_field kvq_codec_fields[] = {
    F(kvq_codec, type),
    F(kvq_codec, role),
    F(kvq_codec, bits),
    F(kvq_codec, group),
    F(kvq_codec, scale),
    F(kvq_codec, levels),
    F(kvq_codec, eta),
    F(kvq_codec, n_cells),
    F(kvq_codec, head_size),
    F(kvq_codec, hi),
    F(kvq_codec, n_hi),
    F(kvq_codec, split),
    F(kvq_codec, fast_bits),
    F(kvq_codec, coords),
    F(kvq_codec, reserved),
};

const kvq_field kvq_type_info_fields[] = {
    F(kvq_type_info, name),
    F(kvq_type_info, type),
    F(kvq_type_info, bits),
    F(kvq_type_info, block_cells),
    F(kvq_type_info, bits_per_value),
};

const kvq_field kvq_page_fields[] = {
    F(kvq_page, k_codes),
    F(kvq_page, k_params),
    F(kvq_page, v_codes),
    F(kvq_page, v_params),
    F(kvq_page, cell),
    F(kvq_page, n_slots),
    F(kvq_page, map),
};

const kvq_field kvq_rotary_fields[] = {
    F(kvq_rotary, n_dims),
    F(kvq_rotary, neox),
    F(kvq_rotary, n_high),
    F(kvq_rotary, high),
    F(kvq_rotary, low),
    F(kvq_rotary, turns),
};

const kvq_field kvq_far_fields[] = {
    F(kvq_far, fetch),
    F(kvq_far, top),
    F(kvq_far, format),
    F(kvq_far, n_cells),
    F(kvq_far, k_rows),
    F(kvq_far, v_rows),
    F(kvq_far, kept),
    F(kvq_far, counts),
    F(kvq_far, buffer),
    F(kvq_far, n_slots),
    F(kvq_far, n_kept),
};
const kvq_field kvq_attn_fields[] = {
    F(kvq_attn, k),
    F(kvq_attn, v),
    F(kvq_attn, n_q),
    F(kvq_attn, n_head),
    F(kvq_attn, n_head_kv),
    F(kvq_attn, n_pages),
    F(kvq_attn, n_kv),
    F(kvq_attn, flags),
    F(kvq_attn, scale),
    F(kvq_attn, max_bias),
    F(kvq_attn, softcap),
    F(kvq_attn, q),
    F(kvq_attn, q_stride_token),
    F(kvq_attn, q_stride_head),
    F(kvq_attn, mask),
    F(kvq_attn, mask_stride_token),
    F(kvq_attn, mask_stride_head),
    F(kvq_attn, sinks),
    F(kvq_attn, dst),
    F(kvq_attn, dst_stride_token),
    F(kvq_attn, dst_stride_head),
    F(kvq_attn, pages),
    F(kvq_attn, k_mean),
    F(kvq_attn, v_mean),
    F(kvq_attn, rotary),
    F(kvq_attn, positions),
    F(kvq_attn, lse),
    F(kvq_attn, sealed),
    F(kvq_attn, map_stride),
    F(kvq_attn, far),
    F(kvq_attn, k_order),
    F(kvq_attn, k_basis),
    F(kvq_attn, v_basis),
};

const kvq_field kvq_order_fields[] = {
    F(kvq_order, channel),
    F(kvq_order, gain),
    F(kvq_order, back),
};

const kvq_field kvq_layer_shape_fields[] = {
    F(kvq_layer_shape, il),
    F(kvq_layer_shape, n_head_kv),
    F(kvq_layer_shape, head_size_k),
    F(kvq_layer_shape, head_size_v),
};

const kvq_field kvq_stats_fields[] = {
    F(kvq_stats, method),
    F(kvq_stats, options),
    F(kvq_stats, kernel),
    F(kvq_stats, n_layer),
    F(kvq_stats, n_cells),
    F(kvq_stats, n_stream),
    F(kvq_stats, page_cells),
    F(kvq_stats, bytes_f16),
    F(kvq_stats, bytes_codes),
    F(kvq_stats, bytes_params),
    F(kvq_stats, bytes_window),
    F(kvq_stats, bytes_tables),
    F(kvq_stats, bytes_calibration),
    F(kvq_stats, bytes_chain),
    F(kvq_stats, bytes_total),
    F(kvq_stats, bytes_scratch),
    F(kvq_stats, bits_k),
    F(kvq_stats, bits_v),
    F(kvq_stats, bits),
    F(kvq_stats, bits_headline),
    F(kvq_stats, n_sealed),
    F(kvq_stats, n_reopened),
    F(kvq_stats, n_forced),
    F(kvq_stats, predict_macs),
    F(kvq_stats, bytes_far),
    F(kvq_stats, type_k),
    F(kvq_stats, type_v),
    F(kvq_stats, n_fetched),
    F(kvq_stats, n_wanted),
    F(kvq_stats, n_hits),
    F(kvq_stats, n_steps),
};

const kvq_field kvq_request_fields[] = {
    F(kvq_request, asker),
    F(kvq_request, method),
    F(kvq_request, opts),
    F(kvq_request, config),
    F(kvq_request, env_method),
    F(kvq_request, env_opts),
    F(kvq_request, env_config),
    F(kvq_request, number),
    F(kvq_request, model),
};

const kvq_field kvq_resolved_fields[] = {
    F(kvq_resolved, method),
    F(kvq_resolved, method_from),
    F(kvq_resolved, method_words),
    F(kvq_resolved, opts),
    F(kvq_resolved, options),
    F(kvq_resolved, options_from),
    F(kvq_resolved, config),
    F(kvq_resolved, config_from),
    F(kvq_resolved, note),
    F(kvq_resolved, wants_means),
};

const kvq_field kvq_lab_page_fields[] = {
    F(kvq_lab_page, handle),
    F(kvq_lab_page, il),
    F(kvq_lab_page, ordinal),
    F(kvq_lab_page, stream),
    F(kvq_lab_page, n_pages),
    F(kvq_lab_page, page_cells),
    F(kvq_lab_page, n_head),
    F(kvq_lab_page, head_size_k),
    F(kvq_lab_page, head_size_v),
    F(kvq_lab_page, n_dims),
    F(kvq_lab_page, neox),
    F(kvq_lab_page, before_il),
    F(kvq_lab_page, before_head),
    F(kvq_lab_page, before_k),
    F(kvq_lab_page, before_v),
    F(kvq_lab_page, pages),
    F(kvq_lab_page, positions),
    F(kvq_lab_page, keys),
    F(kvq_lab_page, values),
    F(kvq_lab_page, new_keys),
    F(kvq_lab_page, new_values),
};

const kvq_field kvq_lab_cells_fields[] = {
    F(kvq_lab_cells, handle),
    F(kvq_lab_cells, il),
    F(kvq_lab_cells, ordinal),
    F(kvq_lab_cells, stream),
    F(kvq_lab_cells, n_cells),
    F(kvq_lab_cells, n_head),
    F(kvq_lab_cells, page_cells),
    F(kvq_lab_cells, positions),
    F(kvq_lab_cells, sealed),
    F(kvq_lab_cells, probabilities),
    F(kvq_lab_cells, held),
    F(kvq_lab_cells, n_queries),
};

const kvq_field kvq_lab_fields[] = {
    F(kvq_lab, user),
    F(kvq_lab, seal),
    F(kvq_lab, judge),
    F(kvq_lab, n_observed),
    F(kvq_lab, queries),
};

const kvq_struct structs[] = {
    S(llama_model_params),
    S(llama_context_params),
    S(llama_batch),
    S(llama_sampler_chain_params),
    S(llama_chat_message),
    S(kvq_option_info),
    S(kvq_method_info),
    S(kvq_codec),
    S(kvq_type_info),
    S(kvq_page),
    S(kvq_rotary),
    S(kvq_order),
    S(kvq_far),
    S(kvq_attn),
    S(kvq_layer_shape),
    S(kvq_stats),
    S(kvq_request),
    S(kvq_resolved),
    S(kvq_lab_page),
    S(kvq_lab_cells),
    S(kvq_lab),
};

#undef F
#undef M
#undef S

const kvq_struct * find(const char * type) {
    for (const kvq_struct & s : structs) {
        if (type && std::strcmp(s.name, type) == 0) { return &s; }
    }
    return nullptr;
}

} // namespace

extern "C" KVQ_API size_t kvq_sizeof(const char * type) {
    const kvq_struct * s = find(type);
    return s ? s->size : (size_t) -1;
}

extern "C" KVQ_API size_t kvq_offsetof(const char * type, const char * field) {
    const kvq_struct * s = find(type);
    for (size_t i = 0; s && field && i < s->n_fields; i++) {
        if (std::strcmp(s->fields[i].name, field) == 0) { return s->fields[i].offset; }
    }
    return (size_t) -1;
}

"""C declarations of the parts of libllama and libggml that ggml_kvq calls.

Each structure mirrors include/llama.h of the pinned llama.cpp field by field; each row of FUNCTIONS is one prototype.
Over another llama.cpp the structures in OTHER_FIELDS are built anew from the fields it has (loader.fit_struct).
loader.py proves sizes and offsets against the compiled library before any structure is passed by value.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

#: The ggml version of the pinned llama.cpp, which the declarations below mirror.
GGML_VERSION = "0.25.3"

Token = c_int32
LogCallback = CFUNCTYPE(None, c_int, c_char_p, c_void_p)

FLASH_ATTN_ENABLED = 1
DEFAULT_SEED = 0xFFFFFFFF
DEVICE_TYPE_CPU, DEVICE_TYPE_GPU, DEVICE_TYPE_IGPU, DEVICE_TYPE_ACCEL = 0, 1, 2, 3

#: Cache types of upstream, by the names llama.cpp prints (enum ggml_type).
GGML_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
    "q1_0": 41,
    "q2_0": 42,
}
DECLARED = ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")  # types that a cache of ours can be declared in


class llama_model_tensor_buft_override(Structure):
    _fields_ = [("pattern", c_char_p), ("buft", c_void_p)]


class llama_model_params(Structure):
    _fields_ = [
        ("devices", POINTER(c_void_p)),
        ("tensor_buft_overrides", POINTER(llama_model_tensor_buft_override)),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", POINTER(c_float)),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    ]


class llama_context_params(Structure):
    _fields_ = [
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int),
        ("rope_scaling_type", c_int),
        ("pooling_type", c_int),
        ("attention_type", c_int),
        ("flash_attn_type", c_int),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int),
        ("type_v", c_int),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    ]


class llama_batch(Structure):
    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


class llama_sampler_chain_params(Structure):
    _fields_ = [("no_perf", c_bool)]


class llama_chat_message(Structure):
    _fields_ = [("role", c_char_p), ("content", c_char_p)]


#: Structures passed by value or read in place: these are proven at load time.
STRUCTS: dict[str, type[Structure]] = {
    s.__name__: s
    for s in (
        llama_model_params,
        llama_context_params,
        llama_batch,
        llama_sampler_chain_params,
        llama_chat_message,
    )
}

#: Structures whose fields differ between the supported versions, and fields that the pinned one lacks.
OTHER_FIELDS: dict[str, list[tuple[str, Any]]] = {
    "llama_model_params": [("use_mmap", c_bool), ("use_direct_io", c_bool), ("use_mlock", c_bool)],
    "llama_context_params": [],
}

#: Functions that only a diagnosis calls and older versions lack.
OPTIONAL = {"llama_version"}

# (library, name, restype, argtypes); opaque handles are void pointers.
_P = c_void_p
FUNCTIONS: list[tuple[str, str, Any, list[Any]]] = [
    # ggml-base
    ("base", "ggml_version", c_char_p, []),
    ("base", "ggml_commit", c_char_p, []),
    ("base", "ggml_type_name", c_char_p, [c_int]),
    ("base", "ggml_type_size", c_size_t, [c_int]),
    ("base", "ggml_blck_size", ctypes.c_int64, [c_int]),
    ("base", "ggml_backend_dev_name", c_char_p, [_P]),
    ("base", "ggml_backend_cpu_buffer_type", _P, []),
    ("base", "ggml_backend_dev_description", c_char_p, [_P]),
    ("base", "ggml_backend_dev_type", c_int, [_P]),
    # ggml (registry)
    ("ggml", "ggml_backend_dev_count", c_size_t, []),
    ("ggml", "ggml_backend_dev_get", _P, [c_size_t]),
    ("ggml", "ggml_backend_dev_by_name", _P, [c_char_p]),
    ("ggml", "ggml_backend_load", _P, [c_char_p]),
    ("ggml", "ggml_backend_load_all_from_path", None, [c_char_p]),
    # llama: life cycle
    ("llama", "llama_version", c_char_p, []),
    ("llama", "llama_backend_init", None, []),
    ("llama", "llama_log_set", None, [LogCallback, _P]),
    ("llama", "llama_model_default_params", llama_model_params, []),
    ("llama", "llama_context_default_params", llama_context_params, []),
    ("llama", "llama_model_load_from_file", _P, [c_char_p, llama_model_params]),
    ("llama", "llama_model_free", None, [_P]),
    ("llama", "llama_init_from_model", _P, [_P, llama_context_params]),
    ("llama", "llama_free", None, [_P]),
    # llama: facts
    ("llama", "llama_n_ctx", c_uint32, [_P]),
    ("llama", "llama_n_ctx_seq", c_uint32, [_P]),
    ("llama", "llama_n_batch", c_uint32, [_P]),
    ("llama", "llama_n_ubatch", c_uint32, [_P]),
    ("llama", "llama_model_n_ctx_train", c_int32, [_P]),
    ("llama", "llama_model_n_embd", c_int32, [_P]),
    ("llama", "llama_model_n_layer", c_int32, [_P]),
    ("llama", "llama_model_n_head", c_int32, [_P]),
    ("llama", "llama_model_n_head_kv", c_int32, [_P]),
    ("llama", "llama_model_n_params", c_uint64, [_P]),
    ("llama", "llama_model_size", c_uint64, [_P]),
    ("llama", "llama_model_desc", c_int32, [_P, c_char_p, c_size_t]),
    ("llama", "llama_model_meta_val_str", c_int32, [_P, c_char_p, c_char_p, c_size_t]),
    ("llama", "llama_model_chat_template", c_char_p, [_P, c_char_p]),
    ("llama", "llama_model_get_vocab", _P, [_P]),
    # llama: vocabulary
    ("llama", "llama_vocab_n_tokens", c_int32, [_P]),
    ("llama", "llama_vocab_type", c_int32, [_P]),
    ("llama", "llama_vocab_bos", c_int32, [_P]),
    ("llama", "llama_vocab_eos", c_int32, [_P]),
    ("llama", "llama_vocab_is_eog", c_bool, [_P, c_int32]),
    ("llama", "llama_vocab_get_add_bos", c_bool, [_P]),
    ("llama", "llama_tokenize", c_int32, [_P, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
    ("llama", "llama_token_to_piece", c_int32, [_P, c_int32, c_char_p, c_int32, c_int32, c_bool]),
    ("llama", "llama_detokenize", c_int32, [_P, POINTER(c_int32), c_int32, c_char_p, c_int32, c_bool, c_bool]),
    (
        "llama",
        "llama_chat_apply_template",
        c_int32,
        [c_char_p, POINTER(llama_chat_message), c_size_t, c_bool, c_char_p, c_int32],
    ),
    # llama: decode
    ("llama", "llama_decode", c_int32, [_P, llama_batch]),
    ("llama", "llama_synchronize", None, [_P]),
    ("llama", "llama_set_n_threads", None, [_P, c_int32, c_int32]),
    ("llama", "llama_set_abort_callback", None, [_P, _P, _P]),
    ("llama", "llama_get_logits", POINTER(c_float), [_P]),
    ("llama", "llama_get_logits_ith", POINTER(c_float), [_P, c_int32]),
    ("llama", "llama_set_embeddings", None, [_P, c_bool]),
    ("llama", "llama_get_embeddings_ith", POINTER(c_float), [_P, c_int32]),
    # llama: memory and state
    ("llama", "llama_get_memory", _P, [_P]),
    ("llama", "llama_memory_clear", None, [_P, c_bool]),
    ("llama", "llama_memory_seq_rm", c_bool, [_P, c_int32, c_int32, c_int32]),
    ("llama", "llama_memory_seq_pos_max", c_int32, [_P, c_int32]),
    ("llama", "llama_state_get_size", c_size_t, [_P]),
    ("llama", "llama_state_get_data", c_size_t, [_P, POINTER(c_uint8), c_size_t]),
    ("llama", "llama_state_set_data", c_size_t, [_P, POINTER(c_uint8), c_size_t]),
    ("llama", "llama_state_save_file", c_bool, [_P, c_char_p, POINTER(c_int32), c_size_t]),
    ("llama", "llama_state_load_file", c_bool, [_P, c_char_p, POINTER(c_int32), c_size_t, POINTER(c_size_t)]),
    ("llama", "llama_state_seq_get_size", c_size_t, [_P, c_int32]),
    ("llama", "llama_state_seq_get_data", c_size_t, [_P, POINTER(c_uint8), c_size_t, c_int32]),
    ("llama", "llama_state_seq_set_data", c_size_t, [_P, POINTER(c_uint8), c_size_t, c_int32]),
    # llama: sampling
    ("llama", "llama_sampler_chain_default_params", llama_sampler_chain_params, []),
    ("llama", "llama_sampler_chain_init", _P, [llama_sampler_chain_params]),
    ("llama", "llama_sampler_chain_add", None, [_P, _P]),
    ("llama", "llama_sampler_init_greedy", _P, []),
    ("llama", "llama_sampler_init_dist", _P, [c_uint32]),
    ("llama", "llama_sampler_init_top_k", _P, [c_int32]),
    ("llama", "llama_sampler_init_top_p", _P, [c_float, c_size_t]),
    ("llama", "llama_sampler_init_min_p", _P, [c_float, c_size_t]),
    ("llama", "llama_sampler_init_temp", _P, [c_float]),
    ("llama", "llama_sampler_init_penalties", _P, [c_int32, c_int32, c_float, c_float, c_float]),
    ("llama", "llama_sampler_accept", None, [_P, c_int32]),
    ("llama", "llama_sampler_sample", c_int32, [_P, _P, c_int32]),
    ("llama", "llama_sampler_free", None, [_P]),
]

#: Values of the default-parameter functions that must survive the round trip through our structures. A wrong size or
#: offset moves at least one of them; used beside the native probe, and alone when only upstream's libraries are there.
#: Fields that this llama.cpp lacks are left out.
DEFAULTS: dict[str, dict[str, object]] = {
    "llama_model_default_params": {
        "n_gpu_layers": -1,
        "split_mode": 1,
        "load_mode": -1,
        "lazy_mode": 1,
        "main_gpu": 0,
        "tensor_split": None,
        "progress_callback": None,
        "kv_overrides": None,
        "vocab_only": False,
        "use_extra_bufts": True,
        "no_alloc": False,
        "load_mtp": False,
        "use_mmap": True,
        "use_direct_io": False,
        "use_mlock": False,
    },
    "llama_context_default_params": {
        "n_ctx": 512,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_seq_max": 1,
        "flash_attn_type": -1,
        "yarn_ext_factor": -1.0,
        "yarn_beta_slow": -1.0,
        "yarn_orig_ctx": 0,
        "type_k": 1,
        "type_v": 1,
        "abort_callback": None,
        "embeddings": False,
        "offload_kqv": True,
        "op_offload": True,
        "swa_full": True,
        "kv_unified": False,
        "n_samplers": 0,
        "ctx_other": None,
    },
}

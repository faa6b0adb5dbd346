"""Metadata of a tiny model of every architecture that llama.cpp knows; tests/archs/arch_matrix.cpp makes the weights.

The base is a transformer of 2 layers, 4 query heads over 2 KV heads of 64 channels. CHANGES holds what an architecture
needs beside or instead of that; a value of None removes the key. Keys without "general." or "tokenizer." in front stand
behind the architecture's name.
"""

from __future__ import annotations

import struct
from typing import Any

N_VOCAB, N_LAYER, N_EMBD, N_HEAD, N_HEAD_KV, HEAD = 128, 2, 256, 4, 2, 64

BASE: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "context_length": 512,
    "embedding_length": N_EMBD,
    "block_count": N_LAYER,
    "feed_forward_length": 384,
    "attention.head_count": N_HEAD,
    "attention.head_count_kv": N_HEAD_KV,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": 192,  # more than a method keeps open, so that codes are read
    "attention.sliding_window_pattern": 2,
    "attention.clamp_kqv": 8.0,
    "rope.dimension_sections": [8, 12, 12, 0],
    "logit_scale": 1.0,
    "leading_dense_block_count": 1,
    "expert_shared_feed_forward_length": 64,
    "expert_feed_forward_length": 64,
    "interleave_moe_layer_step": 2,
    "expert_weights_scale": 1.0,
    "expert_gating_func": 2,
    "expert_group_scale": 1.0,
    "experts_per_group": 1,
    "use_parallel_residual": False,
    "attention.relative_buckets_count": 8,
    "attention.group_norm_epsilon": 1e-5,
    "attention.group_norm_groups": 8,
}

# every expert is used: which of several is nearest would hang on the last bit of a logit
EXPERTS: dict[str, Any] = {"expert_count": 2, "expert_used_count": 2, "expert_shared_count": 1}

# latent attention: rows of 512 latent and 64 rotary channels, one KV head
LATENT: dict[str, Any] = {
    "attention.head_count_kv": 1,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "rope.dimension_count": 64,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "attention.q_lora_rank": 64,
    "attention.kv_lora_rank": 512,
}

# state space and linear attention
RECURRENT: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 2 * N_EMBD,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 16,
    "ssm.group_count": 2,
}

# lightning indexer of sparse attention; top_k covers the context: everything is selected
INDEXER: dict[str, Any] = {
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 4096,
}


def every_other(a: int, b: int, n: int = N_LAYER) -> list[int]:
    """[a, b, a, ...] of n layers."""
    return [(a, b)[i % 2] for i in range(n)]


CHANGES: dict[str, dict[str, Any]] = {}


def change(names: str, *parts: dict[str, Any], **more: Any) -> None:
    """Adds `parts` to every architecture in `names`; in keyword names "__" stands for a dot."""
    for name in names.split():
        into = CHANGES.setdefault(name, {})
        for part in (*parts, {key.replace("__", "."): value for key, value in more.items()}):
            into.update(part)


change(
    "llama4 grok qwen2moe qwen3moe qwen3next qwen3vlmoe qwen35moe qwen4exp phimoe cohere2moe dbrx olmoe arctic "
    "deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4 glm4moe glm-dsa exaone-moe bailingmoe bailingmoe2 "
    "bailingmoe3 dots1 dots3note afmoe laguna ernie4_5-moe hunyuan-moe hy_v3 hy_v4 gpt-oss lfm2moe smallthinker "
    "llada-moe grovemoe minimax-01 minimax-m2 minimax-m3 rnd1 mimo2 step35 kimi-linear kimi-k3 glm5-next mistral4 "
    "mellum maple jamba nemotron_h_moe granitemoe nomic-bert-moe",
    EXPERTS,
)
change("deepseek2 deepseek32 glm-dsa dots3note kimi-linear bailingmoe3 kimi-k3 glm5-next hy_v4 mistral4", LATENT)
change(
    "plm minicpm3",
    LATENT,
    attention__head_count_kv=N_HEAD,
    attention__key_length=96,
    attention__value_length=64,
    rope__dimension_count=32,
    attention__key_length_mla=None,
    attention__value_length_mla=None,
)
change(
    "qwen3next qwen35 qwen35moe qwen4exp plamo2 mamba mamba2 jamba falcon-h1 nemotron_h nemotron_h_moe granitehybrid",
    RECURRENT,
)
change(
    "qwen3next qwen35 qwen35moe qwen4exp",
    full_attention_interval=2,
    ssm__state_size=64,
    ssm__inner_size=256,
    ssm__time_step_rank=4,
)
change("lfm2 lfm2moe", shortconv__l_cache=3)
change(
    "plamo2 jamba granitehybrid lfm2 lfm2moe",
    attention__head_count=[N_HEAD, N_HEAD],
    attention__head_count_kv=[0, N_HEAD_KV],
)
change("bert nomic-bert nomic-bert-moe jina-bert-v2 jina-bert-v3", tokenizer__ggml__token_type_count=2)
change(
    "cohere2moe maple mimo2 step35 spark2_5 granite_swa dots3note muse-glimmer",
    attention__sliding_window_pattern=[0, 1],
)
change("rwkv6 rwkv6qwen2 rwkv7 arwkv7", wkv__head_size=HEAD, time_mix_extra_dim=32, time_decay_extra_dim=32)
change(
    "apertus",
    {f"xielu.{key}": value for key, value in {"alpha_n": 1.0, "alpha_p": 1.0, "beta": 1.0, "eps": 1e-7}.items()},
)
change("hrm_text", hrm__layers_per_stack=1, hrm__h_cycles=2, hrm__l_cycles=2, block_count=6)
change("deepseek32 glm-dsa dots3note hy_v4 minimax-m3 glm5-next qwen4exp", INDEXER)
change("jina-bert-v2 olmoe dots1 t5 t5encoder deepseek2-ocr chameleon", attention__head_count_kv=N_HEAD)
change("plamo2", ssm__group_count=0)
change(
    "kimi-linear bailingmoe3 kimi-k3 glm5-next",
    ssm__conv_kernel=4,
    kda__head_dim=HEAD,
    kda__safe_gate=True,
    kda__gate_lower_bound=-5.0,
)
change(
    "kimi-linear kimi-k3 bailingmoe3 glm5-next", attention__head_count=[N_HEAD, N_HEAD], attention__head_count_kv=[0, 1]
)
change("rwkv7 arwkv7", **{f"attention.{key}_lora_rank": 32 for key in ("decay", "iclr", "value_residual_mix", "gate")})
change(
    "qwen4exp hy_v4 deepseek4 glm5-next",
    hyper_connection__count=4,
    hyper_connection__sinkhorn_iterations=2,
    hyper_connection__epsilon=1e-6,
)
change("qwen4exp glm5-next", hyper_connection__low_rank=8, attention__compress_ratios=[4, 4])
change(
    "hy_v4",
    hyper_connection__magnitude=2.0,
    swiglu_clamp_exp=10.0,
    expert_weights_norm=True,
    attention__indexer__types=[1, 0],
)
change("dots3note", attention__indexer__types=[1, 0], rope__freq_base_swa=10000.0, attention__kv_lora_rank_swa=512)
change(
    "dots3note",
    {
        f"attention.{key}_swa": LATENT[f"attention.{key}"]
        for key in ("key_length", "value_length", "key_length_mla", "value_length_mla")
    },
)
change(
    "qwen3vl qwen3vlmoe qwen35 qwen35moe qwen3tts", rope__dimension_sections=[12, 10, 10, 0]
)  # interleaved: two of 32 pairs are left over
change("maple", swiglu_clamp_exp=7.0)
change(
    "minimax-m3",
    attention__indexer__block_size=4,
    attention__indexer__local_blocks=1,
    attention__indexer__head_count=N_HEAD_KV,
    rope__dimension_count=32,
)
change("minimax-01", residual_scale=3.5)
change(
    "gemma4 gemma4-assistant",
    attention__sliding_window_pattern=[1, 0],
    embedding_length_per_layer_input=32,
    attention__shared_kv_layers=0,
    attention__key_length_swa=HEAD,
    attention__value_length_swa=HEAD,
    rope__freq_base_swa=10000.0,
)
change("llama4", block_count=4)
change(
    "nemotron_h nemotron_h_moe",
    block_count=3,
    feed_forward_length=[0, 0, 384],
    attention__head_count=[N_HEAD] * 3,
    attention__head_count_kv=[N_HEAD_KV, 0, N_HEAD_KV],
)
change("rwkv6", attention__head_count_kv=N_HEAD)
change("rwkv6qwen2 arwkv7", token_shift_count=1)
change(
    "graniteswitch",
    adapters__count=1,
    adapters__lora_rank=8,
    adapters__token_ids_activate=[5],
    adapters__token_ids_substitute=[6],
)
change("plm", rope__dimension_count=32)
change(
    "kimi-k3",
    attn_res__block_size=12,
    activation__situ_beta=4.0,
    activation__situ_linear_beta=25.0,
    expert_latent_length=64,
)
change(
    "glm5-next",
    attention__indexer__kpool=4,
    attention__indexer__kpool_select_tail=True,
    attention__head_count=N_HEAD,
    rope__dimension_count=0,
    attention__key_length=512,
)
change(
    "deepseek4",
    INDEXER,
    block_count=4,
    attention__head_count_kv=1,
    attention__q_lora_rank=64,
    rope__dimension_count=32,
    expert_gating_func=4,
    expert_weights_norm=True,
    swiglu_clamp_exp=10.0,
)
change(
    "deepseek4",
    attention__output_group_count=4,
    attention__output_lora_rank=32,
    attention__compress_ratios=[0, 0, 4, 128],
    attention__compress_rope_freq_base=160000.0,
    hash_layer_count=0,
)
change("qwen3tts", vocab_size=3072)
change("chameleon", vocab_size=10240)
change("minimax-01", full_attention_interval=2)
change("gemma4-assistant", embedding_length_out=128)


class Long(int):
    """An integer written as u64."""


class Signed(int):
    """An integer written as i32."""


def _text(s: str) -> bytes:
    return struct.pack("<Q", len(s.encode())) + s.encode()


def _value(v: Any) -> tuple[int, bytes]:
    """GGUF type and bytes."""
    if isinstance(v, bool):
        return 7, struct.pack("<?", v)
    if isinstance(v, Long):
        return 10, struct.pack("<Q", v)
    if isinstance(v, Signed):
        return 5, struct.pack("<i", v)
    if isinstance(v, int):
        return 4, struct.pack("<I", v)
    if isinstance(v, float):
        return 6, struct.pack("<f", v)
    if isinstance(v, str):
        return 8, _text(v)
    return 9, struct.pack("<IQ", _value(v[0])[0], len(v)) + b"".join(_value(x)[1] for x in v)


def metadata(arch: str, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keys and values of one architecture, `extra` on top."""
    fields = {**BASE, **CHANGES.get(arch, {}), **(extra or {})}
    out: dict[str, Any] = {"general.architecture": arch}
    if "tokenizer.ggml.model" not in fields:
        out["tokenizer.ggml.model"] = "none"
    for key, value in fields.items():
        if value is not None:
            out[key if key.startswith(("general.", "tokenizer.", "xielu.")) else f"{arch}.{key}"] = value
    return out


def gguf(fields: dict[str, Any]) -> bytes:
    """A GGUF file of metadata alone."""
    out = b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields))
    for key, value in fields.items():
        kind, data = _value(value)
        out += _text(key) + struct.pack("<I", kind) + data
    return out

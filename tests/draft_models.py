"""Random models whose drafts read the model's own memory: one with a layer for multi-token prediction, one with an
assistant.

llama.cpp's model saver leaves out some keys, so that the metadata of tests/arch_models.py goes in front of its tensors.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from typing import Any

import arch_models
import gguf
import numpy as np
from arch_matrix import Setup
from arch_models import Signed

VOCABULARY = 8192  # of the demo model


def tokenizer(model: Path) -> dict[str, Any]:
    """Keys tokenizer.* of a GGUF."""
    fields = {k: f.contents() for k, f in gguf.GGUFReader(model).fields.items() if k.startswith("tokenizer.")}
    fields["tokenizer.ggml.token_type"] = [Signed(x) for x in fields["tokenizer.ggml.token_type"]]
    return fields


def random_model(setup: Setup, demo: Path, out: Path, arch: str, **changes: Any) -> Path:
    """A tiny model of `arch` with the demo model's tokenizer, as a file that every program loads."""
    more = {**tokenizer(demo), "vocab_size": VOCABULARY, "context_length": 4096}
    meta = arch_models.gguf(arch_models.metadata(arch, {**more, **changes}))
    keys, saved = out.with_suffix(".keys.gguf"), out.with_suffix(".saved.gguf")
    keys.write_bytes(meta)
    subprocess.run([str(setup.program), "--save", str(keys), str(saved)], check=True, env=setup.env(), timeout=60)
    tensors = gguf.GGUFReader(saved).tensors
    head, data = bytearray(meta), bytearray()
    struct.pack_into("<Q", head, 8, len(tensors))
    for t in tensors:
        name, shape = t.name.encode(), [int(n) for n in t.shape]
        head += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", int(t.tensor_type), len(data))
        data += t.data.tobytes()
        data += bytes(-len(data) % 32)
    out.write_bytes(bytes(head) + bytes(-len(head) % 32) + bytes(data))
    for path in (keys, saved):
        path.unlink()
    return out


def assistant(demo: Path, out: Path, n_embd_target: int) -> Path:
    """gemma4-assistant: two layers of queries over the keys and values of the model's last two layers."""
    arch, n_embd, n_ff, n_layer, head, n_head = "gemma4-assistant", 128, 256, 2, 64, 4
    writer = gguf.GGUFWriter(str(out), arch)
    numbers = {
        "context_length": 4096,
        "embedding_length": n_embd,
        "embedding_length_out": n_embd_target,
        "block_count": n_layer,
        "nextn_predict_layers": n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": 2,
        "attention.sliding_window": 192,
        **{f"attention.{what}_length{swa}": head for what in ("key", "value") for swa in ("", "_swa")},
        "rope.dimension_count": head,
        "rope.dimension_count_swa": head,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"{arch}.{key}", value)
    for key, real in {
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e4,
        "rope.freq_base_swa": 1e4,
    }.items():
        writer.add_float32(f"{arch}.{key}", real)
    writer.add_array(f"{arch}.attention.sliding_window_pattern", [True, False])
    for key, value in tokenizer(demo).items():
        if isinstance(value, list):
            writer.add_array(key, [int(x) if isinstance(x, Signed) else x for x in value])
        else:
            adders: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
            add = adders[type(value)]
            add(key, value)
    random = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, n_embd),
        "output_norm.weight": (n_embd,),
        "nextn.pre_projection.weight": (n_embd, 2 * n_embd_target),
        "nextn.post_projection.weight": (n_embd_target, n_embd),
        "rope_freqs.weight": (head // 2,),
    }
    for i in range(n_layer):
        layer: dict[str, tuple[int, ...]] = {
            **{
                f"{name}.weight": (n_embd,)
                for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
            },
            "attn_q_norm.weight": (head,),
            "layer_output_scale.weight": (1,),
            "attn_q.weight": (n_head * head, n_embd),
            "attn_output.weight": (n_embd, n_head * head),
            "ffn_gate.weight": (n_ff, n_embd),
            "ffn_up.weight": (n_ff, n_embd),
            "ffn_down.weight": (n_embd, n_ff),
        }
        shapes.update({f"blk.{i}.{name}": shape for name, shape in layer.items()})
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else random.standard_normal(shape) / np.sqrt(shape[-1])
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out

"""Rows from a Hugging Face model for predictors.fit: what enters rotary embedding, and values, as the model's own
layers compute them.

Channels of keys go into GGUF's order, so that predictors fit what llama.cpp caches: models of the llama family are
stored there with each head's rotary halves interleaved (channel 2i and 2i+1 rotate together), others keep the halves
apart.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .. import gguf_header
from ..errors import DownloadError, KvqError
from . import capture
from .predictors import Shape

#: general.architecture values whose keys llama.cpp's converter permutes.
INTERLEAVED = ("llama", "mistral", "llama4", "deci", "granite", "minicpm", "internlm2")
NAMES = ("k_proj", "v_proj")


def gguf_order(heads: int, size: int, n_rot: int) -> np.ndarray:
    """order[i] = channel of the Hugging Face layout that GGUF's channel i holds, [heads*size]; n_rot: rotated
    channels of a head.
    """
    half = n_rot // 2
    head = np.concatenate([np.stack([np.arange(half), np.arange(half) + half], 1).reshape(-1), np.arange(n_rot, size)])
    return (np.arange(heads)[:, None] * size + head).reshape(-1)


def find(spec: str) -> str:
    """A local folder as it is, an id on the hub as the folder of its downloaded files. Raises DownloadError."""
    if Path(spec).expanduser().is_dir():
        return str(Path(spec).expanduser())
    try:
        from huggingface_hub import snapshot_download
    except ImportError as e:
        raise DownloadError(
            f"{spec} is no folder, and the hub needs huggingface_hub; pip install huggingface_hub"
        ) from e
    try:
        return snapshot_download(spec, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"])
    except Exception as e:  # the hub's errors are many; its first line says which
        first = (str(e).splitlines() or ["no message"])[0]
        raise DownloadError(
            f"{spec} is neither a folder nor a model the hub gives: {first}; check the name, the login and the network"
        ) from e


class HfSource:
    """model: folder or hub id; gguf: the same model as GGUF, which names shapes and the layout of keys; text is cut
    into tokens by the model's own tokenizer. Raises KvqError when the two do not have the same layers.
    """

    def __init__(
        self, model: str, gguf: str | os.PathLike[str], text: str, length: int, n_threads: int | None = None
    ) -> None:
        try:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found,unused-ignore]
        except ImportError as e:
            raise KvqError("--hf needs torch and transformers; pip install 'ggml-kvq[hf]'") from e
        self._torch = torch
        if n_threads:
            torch.set_num_threads(n_threads)
        folder = find(model)
        header = gguf_header.read(gguf, tensors=True)
        self.shapes: list[Shape] = gguf_header.attention_layers(header)
        arch = header.fields["general.architecture"]
        self._n_rot = int(header.fields.get(f"{arch}.rope.dimension_count", self.shapes[0][2]))
        self._interleaved = arch in INTERLEAVED
        self.key = ["hf", model, *capture.stamp(gguf), hashlib.sha256(text.encode()).hexdigest()]
        self._text = text
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = loaded.eval()
        self._rows: dict[str, Any] = {}
        self._hooks = self._attach()

    def _attach(self) -> list[Any]:
        """Hooks on what enters rotary embedding: a norm behind the projection where there is one (Qwen3, Gemma 3),
        else the projection.
        """
        found: dict[int, dict[str, Any]] = {}
        for name, module in self._model.named_modules():
            parts = name.split(".")
            if parts[-1] not in (*NAMES, "k_norm") or "layers" not in parts:
                continue
            found.setdefault(int(parts[parts.index("layers") + 1]), {})[parts[-1]] = module
        missing = [il for il, *_ in self.shapes if not all(n in found.get(il, {}) for n in NAMES)]
        if missing:
            raise KvqError(
                f"layer {missing[0]} of the Hugging Face model has no k_proj and v_proj; calibrate from the GGUF itself"
                " (without --hf)"
            )

        def keep(key: str) -> Callable[..., None]:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                self._rows[key] = output.detach()

            return hook

        hooks = []
        for il, *_ in self.shapes:
            key = found[il].get("k_norm", found[il]["k_proj"])
            hooks += [
                key.register_forward_hook(keep(f"k{il}")),
                found[il]["v_proj"].register_forward_hook(keep(f"v{il}")),
            ]
        return hooks

    def groups(self) -> list[list[int]]:
        """Layers by the cache that llama.cpp gives them: those with a sliding window have one of their own."""
        kinds = getattr(self._model.config, "layer_types", None) or ["all"] * (max(s[0] for s in self.shapes) + 1)
        return [
            [il for il, *_ in self.shapes if kinds[il] == kind]
            for kind in dict.fromkeys(kinds[il] for il, *_ in self.shapes)
        ]

    def tokens(self, n: int, length: int, seed: int) -> list[np.ndarray]:
        ids = np.asarray(self._tokenizer(self._text, add_special_tokens=True)["input_ids"], np.int64)
        whole = len(ids) // length
        if whole < n:
            raise KvqError(
                f"the text has {len(ids)} tokens, {n} sequences of {length} need {n * length}; give more text or lower"
                " --sequences"
            )
        pick = np.random.default_rng(seed).permutation(whole)[:n]
        return [ids[i * length : (i + 1) * length] for i in pick]

    def rows(self, tokens: np.ndarray, sinks: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        torch = self._torch
        with torch.no_grad():
            self._model(torch.from_numpy(np.ascontiguousarray(tokens))[None], use_cache=False)
        for il, heads, size_k, size_v in self.shapes:
            k, v = (self._rows.pop(f"{x}{il}").reshape(len(tokens), -1).numpy() for x in "kv")
            if k.shape[1] != heads * size_k or v.shape[1] != heads * size_v:
                raise KvqError(
                    f"layer {il} of the Hugging Face model has K and V rows of {k.shape[1]} and {v.shape[1]}, the GGUF"
                    f" {heads * size_k} and {heads * size_v}"
                )
            if self._interleaved:
                k = k[:, gguf_order(heads, size_k, min(self._n_rot, size_k))]
            yield il, np.array(k[sinks:], np.float32), np.array(v[sinks:], np.float32)

    def queries(self, il: int, width: int) -> np.ndarray:
        """Not captured here: zeros."""
        return np.zeros(width)

    def pairs(self) -> str:
        return "none"

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._model = None

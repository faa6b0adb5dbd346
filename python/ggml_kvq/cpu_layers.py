"""Weights of a layer on the CPU, its cache on KVQ0.

llama.cpp gives a layer's cache to the device of the layer: with -ngl N the other layers have an f16 cache in the CPU's
memory, and its attention reads it. Here all layers are given to KVQ0, and the matrices of the first ones to the CPU by
name (-ot), so that the cache of every layer is ours and the GPU reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXACT = "f16"  # a method that saves nothing: llama.cpp's own placing stays


def weights_of(n: int) -> str:
    """Regular expression of the matrices of the first n layers. What is small is not among them (norms, attention
    sinks, convolutions, scales): each on the CPU would cut the graph once more.
    """
    layers = "|".join(str(i) for i in range(n))
    return rf"blk\.({layers})\.(?!.*(norm|sinks|conv|scale)).*\.weight"


def on_cpu(n_gpu_layers: int, n_layer: int) -> int:
    """Layers that -ngl leaves to the CPU: the first ones, because the output counts as a layer too."""
    return max(0, n_layer + 1 - n_gpu_layers) if n_gpu_layers >= 0 else 0


def n_layer(fields: Mapping[str, Any]) -> int:
    """Layers of a model by its metadata, 0 where they do not say."""
    n = fields.get(f"{fields.get('general.architecture')}.block_count")
    return n if isinstance(n, int) else 0

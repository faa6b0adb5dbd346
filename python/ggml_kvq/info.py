"""What a GGUF file holds, and what its KV cache would take under each method."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import budget, gguf_header, memory, methods, resolver
from .core import kvstats, llama, native
from .errors import MethodError


@dataclass(frozen=True)
class Plan:
    """Memory of one method at n_ctx tokens: true bits per K and V value, bytes, bytes of the f16 cache; or why it
    is refused.
    """

    method: str
    bits: float = 0.0
    bits_k: float = 0.0
    bits_v: float = 0.0
    bytes_total: int = 0
    bytes_f16: int = 0
    refused: str = ""
    bytes_far: int = 0  # of a second tier in another memory: not in bytes_total
    measures: bool = False  # the model's first use measures it, and may divide keys in halves then


def plans(header: gguf_header.Header, n_ctx: int, specs: Sequence[Any] = ()) -> list[Plan]:
    """kvq_plan of every cache of `specs` (CacheSpec), else of every method with default options, for one stream of
    n_ctx tokens, in as many cells as llama.cpp makes for them.

    Upstream's own cache types follow from their bits.
    """
    n_ctx = memory.cells(n_ctx)
    facts = memory.facts(header)
    if facts is None:
        gguf_header.attention_layers(header)  # says why
        return []
    out = []
    wanted = [(s.label, s.method, s.options, s.config, s.type_k, s.type_v) for s in specs] or [
        (row["name"], row["name"], "", None, "", "") for row in methods.table()
    ]
    for label, method, options, config, type_k, type_v in wanted:
        if method is None:
            out.append(_upstream(label, [*facts.full, *facts.windowed], n_ctx, type_k, type_v))
        else:
            holds, first = resolver.planned(methods.library, method, options, config, header)
            plan = planned(label, method, holds, facts, n_ctx)
            out.append(replace(plan, measures=first and method == budget.METHOD))
    return out


def planned(label: str, method: str, options: str, facts: memory.Model, n_cells: int) -> Plan:
    """A method's caches for these layers. Layers with a window are counted whole, as Model and --swa-full keep them."""
    size: dict[str, Any] = {"n_layer_model": facts.n_layer}
    try:
        parts = [
            native.plan(methods.library(), method, options, shapes, n_cells, **size)
            for shapes in (facts.full, facts.windowed)
            if shapes
        ]
    except MethodError as e:
        return Plan(label, refused=str(e))
    return _planned(label, kvstats.total(parts))


def _planned(label: str, got: dict[str, Any]) -> Plan:
    sizes = got["bits"], got["bits_k"], got["bits_v"], got["bytes_total"], got["bytes_f16"]
    return Plan(label, *sizes, bytes_far=kvstats.bytes_besides(got))


def _upstream(label: str, shapes: Sequence[tuple[int, int, int, int]], n_ctx: int, type_k: str, type_v: str) -> Plan:
    """llama.cpp's own cache of these types."""
    k, v = (gguf_header.type_bits(llama.GGML_TYPES[kind]) for kind in (type_k, type_v))
    n_k, n_v = (sum(s[1] * s[i] for s in shapes) * n_ctx for i in (2, 3))
    return Plan(label, (k * n_k + v * n_v) / (n_k + n_v), k, v, int((k * n_k + v * n_v) / 8), 2 * (n_k + n_v))


def stored_options(header: gguf_header.Header) -> tuple[str, str]:
    """(method, its options as "key=value,...") that a file's kvq.* metadata choose; ("", "") when it names no
    method.
    """
    kvq = header.kvq()
    method = str(kvq.get("kvq.method", ""))
    known = next(([o["key"] for o in row["options"]] for row in methods.table() if row["name"] == method), None)
    if known is None:
        return "", ""
    values = {key: kvq[f"kvq.{method}.{key}"] for key in known if f"kvq.{method}.{key}" in kvq}
    return method, ",".join(
        f"{key}={value:.9g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
    )


def stored_plan(header: gguf_header.Header, facts: memory.Model, n_ctx: int) -> Plan | None:
    """What the method and options that the file itself chooses take on these layers; None when it chooses none."""
    method, options = stored_options(header)
    return planned(f"{method} [{options}]", method, options, facts, memory.cells(n_ctx)) if method else None


def summary(header: gguf_header.Header) -> dict[str, Any]:
    """Name, architecture, layers, heads, head sizes and KV widths; keys whose data the file lacks are absent."""
    fields = header.fields
    arch = fields.get("general.architecture", "")
    out: dict[str, Any] = {"file": header.path, "size": os.path.getsize(header.path), "tensors": header.n_tensors}
    for key in ("general.type", "general.name", "general.architecture"):
        if key in fields:
            out[key.removeprefix("general.")] = fields[key]
    for key, name in (("block_count", "layers"), ("attention.head_count", "heads"), ("context_length", "context")):
        if f"{arch}.{key}" in fields:
            out[name] = fields[f"{arch}.{key}"]
    try:
        layers = gguf_header.attention_layers(header)
    except gguf_header.GgufError:
        return out
    out["attention_layers"] = len(layers)
    for name, values in (
        ("kv_heads", [heads for _, heads, _, _ in layers]),
        ("head_size_k", [k for _, _, k, _ in layers]),
        ("head_size_v", [v for _, _, _, v in layers]),
        ("k_width", [heads * k for _, heads, k, _ in layers]),
        ("v_width", [heads * v for _, heads, _, v in layers]),
    ):
        out[name] = sorted(set(values))
    return out

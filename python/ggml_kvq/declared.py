"""The type that llama.cpp declares for a cache (-ctk, -ctv): states have rows of its size (docs/states.md)."""

from __future__ import annotations

from . import gguf_header, memory, methods, resolver
from .core import llama, native
from .errors import MethodError

F16 = ("f16", "f16")
AUTO = "auto"
OPTION = "declare"


def take(opts: list[str]) -> tuple[str, list[str]]:
    """(value of the last `declare=`, "" where there is none; the other options). MethodError for an unknown type."""
    ours = [opt for opt in opts if opt.partition("=")[0].strip() == OPTION]
    value = ours[-1].partition("=")[2].strip() if ours else ""
    if ours and value not in (AUTO, *llama.DECLARED):
        raise MethodError(f"declare={value} is no type; choose from {AUTO}, {', '.join(llama.DECLARED)}")
    return value, [opt for opt in opts if opt not in ours]


def smallest(header: gguf_header.Header, method: str, options: str, config: str | None) -> tuple[str, str]:
    """Types of keys and of values that hold what the method takes in a long context, in every layer. F16 where its
    states need rows of f16, for models whose states may need four positions a cell, and for those that have layers
    for multi-token prediction, whose cache is llama.cpp's own.
    """
    facts, arch = memory.facts(header), header.fields.get("general.architecture", "")
    others = any(f"{arch}.{key}" in header.fields for key in ("rope.dimension_sections", "nextn_predict_layers"))
    if facts is None or facts.latent or others:
        return F16
    holds, _ = resolver.planned(methods.library, method, options, config, header)
    types = []
    for shapes in (facts.full, facts.windowed):
        if shapes:
            try:
                got = native.plan(methods.library(), method, holds, shapes, memory.STEP, n_layer_model=facts.n_layer)
            except MethodError:  # what cannot be planned is refused by the library, with its reason
                return F16
            types.append((got["type_k"], got["type_v"]))
    return _larger([k for k, _ in types]), _larger([v for _, v in types])


def _larger(types: list[str]) -> str:
    return max(types, key=lambda name: gguf_header.type_bits(llama.GGML_TYPES[name]))

"""llama.cpp with a KV cache of 1-4 calibrated bits: a ggml backend, its launchers and its Python face.

Importing this package imports nothing heavy; Model and the rest load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .errors import KvqError, LibraryError, MethodError, ModelError
    from .model import Model

_HOME = {
    "Model": "model",
    "KvqError": "errors",
    "LibraryError": "errors",
    "ModelError": "errors",
    "MethodError": "errors",
}

__all__ = ["KvqError", "LibraryError", "MethodError", "Model", "ModelError", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

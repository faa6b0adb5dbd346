"""llama.cpp with a KV cache of 1-4 calibrated bits: a ggml backend, its launchers and its Python face.

Importing this package imports nothing heavy; Model and the rest load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .errors import (
        BusyError,
        ContextOverflowError,
        DecodeError,
        DownloadError,
        KvqError,
        LibraryError,
        MethodError,
        ModelError,
        StateError,
    )
    from .model import Model
    from .sampling import Sampling

_ERRORS = (
    "BusyError",
    "ContextOverflowError",
    "DecodeError",
    "DownloadError",
    "KvqError",
    "LibraryError",
    "MethodError",
    "ModelError",
    "StateError",
)
_HOME = {"Model": "model", "Sampling": "sampling", **dict.fromkeys(_ERRORS, "errors")}

__all__ = [
    "BusyError",
    "ContextOverflowError",
    "DecodeError",
    "DownloadError",
    "KvqError",
    "LibraryError",
    "MethodError",
    "Model",
    "ModelError",
    "Sampling",
    "StateError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

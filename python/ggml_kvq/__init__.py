"""llama.cpp with a KV cache of 1-4 calibrated bits: a ggml backend, its launchers and its Python face.

Importing this package imports nothing heavy; Model and the rest load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .attaching import attach
    from .core.model import Model
    from .core.sampling import Sampling
    from .errors import (
        ArgumentTypeError,
        BudgetError,
        BusyError,
        ContextOverflowError,
        DecodeError,
        DownloadError,
        KvqError,
        LabError,
        LibraryError,
        MethodError,
        ModelError,
        StateError,
        TextError,
    )
    from .gguf_header import GgufError

_ERRORS = (
    "ArgumentTypeError",
    "BudgetError",
    "BusyError",
    "ContextOverflowError",
    "DecodeError",
    "DownloadError",
    "KvqError",
    "LabError",
    "LibraryError",
    "MethodError",
    "ModelError",
    "StateError",
    "TextError",
)
_HOME = {
    "GgufError": "gguf_header",
    "attach": "attaching",
    "Model": "core.model",
    "Sampling": "core.sampling",
    **dict.fromkeys(_ERRORS, "errors"),
}

__all__ = [
    "ArgumentTypeError",
    "BudgetError",
    "BusyError",
    "ContextOverflowError",
    "DecodeError",
    "DownloadError",
    "GgufError",
    "KvqError",
    "LabError",
    "LibraryError",
    "MethodError",
    "Model",
    "ModelError",
    "Sampling",
    "StateError",
    "TextError",
    "__version__",
    "attach",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

"""The method table of libggml-kvq, and the check of a choice, without loading llama.cpp.

The launchers need this within milliseconds: nothing is imported but ctypes, no ggml backend is initialised.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from . import _paths
from .core import native
from .errors import LibraryError, MethodError


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """libggml-kvq with its functions declared. LibraryError when it is missing, broken or of another version."""
    path = _paths.backend()
    try:
        _paths.open_upstream(_paths.lib_dir())  # the copies that the programs use
        lib = ctypes.CDLL(str(path))
    except OSError as e:
        usual = "reinstall ggml-kvq (pip install .) on this machine"
        raise LibraryError(f"{path} does not load ({e}); {_paths.cure(str(e), usual)}") from e
    try:
        native.bind(lib)
    except AttributeError as e:
        raise LibraryError(f"{path} is of another ggml-kvq version ({e}); reinstall ggml-kvq") from None
    if lib.kvq_abi_version() != native.ABI_VERSION:
        raise LibraryError(
            f"{path} speaks C ABI {lib.kvq_abi_version()}, this package {native.ABI_VERSION}; reinstall ggml-kvq"
        )
    return lib


def table() -> list[dict[str, Any]]:
    """One dict per method, in registry order: name, summary, paper, options (key, type, default_value, help,
    source).
    """
    return native.methods(library())


def find(name: str) -> dict[str, Any]:
    """The row of one method. MethodError, with the library's own words, when there is none."""
    for row in table():
        if row["name"] == name:
            return row
    check(name, "")
    raise MethodError(f"no method '{name}'; `ggml-kvq methods` lists them")


def check(method: str, opts: str) -> None:
    """Raise MethodError, one line naming value and cure, unless the library takes this method and these options."""
    lib = library()
    native.check(lib, lib.kvq_check(method.encode(), opts.encode()))

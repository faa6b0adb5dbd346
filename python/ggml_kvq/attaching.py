"""ggml-kvq in a binding of others: llama-cpp-python, xllamacpp, any module that holds llama.cpp.

    import ggml_kvq
    ggml_kvq.attach(method="kivi", options={"bits": 4})      # llama_cpp
    ggml_kvq.attach(xllamacpp, method="auto")

The module's own ggml loads libggml-kvq.so; caches that are made from then on are KVQ0's. A second call changes the
method of those that follow. The library serves one ggml of a process: for another one a copy of its file is loaded.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from . import _paths
from .core import loader, native
from .errors import LibraryError

_lock = threading.Lock()
_attached: dict[str, ctypes.CDLL] = {}  # file that holds ggml_backend_load -> the library that serves it


def _folder_of(module: ModuleType) -> Path:
    if not module.__file__:
        raise LibraryError(f"{module.__name__} has no file; give the module that holds llama.cpp, or a path")
    return Path(module.__file__).resolve().parent


def ggml_of(module: ModuleType | str | os.PathLike[str] | None) -> tuple[Path, ctypes.CDLL]:
    """The shared object of a module (None: llama_cpp) that has ggml_backend_load. LibraryError when none shows it."""
    if module is None:
        try:
            module = import_module("llama_cpp")
        except ImportError as e:
            raise LibraryError(f"attach() without a module means llama_cpp, which cannot be imported: {e}") from e
    if isinstance(module, ModuleType):
        folder = _folder_of(module)
        files = sorted({p.resolve() for p in folder.rglob("*.so*") if p.is_file()}, key=lambda p: "ggml" not in p.name)
        name = module.__name__
    else:
        files, name = [Path(module).resolve()], str(module)
    loaded = set()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as f:
        loaded = {os.path.realpath(line.split(None, 5)[5].strip()) for line in f if "/" in line}
    for file in files:
        if str(file) not in loaded:
            continue  # of another kind of CPU, or not in use
        library = ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        if hasattr(library, "ggml_backend_load"):
            return file, library
    raise LibraryError(
        f"{name} shows no ggml_backend_load: its ggml is linked into it and hidden, so no backend can be loaded; take "
        "a build with shared libraries, such as llama-cpp-python's"
    )


def _library_for(file: Path, library: ctypes.CDLL) -> ctypes.CDLL:
    """libggml-kvq, loaded by the ggml of `file`; a copy of it where the file serves another ggml already."""
    path = _paths.backend()
    taken = bool(_attached) or loader._loaded is not None
    with tempfile.TemporaryDirectory(prefix="ggml-kvq-") as scratch:
        if taken:
            path = Path(shutil.copy(path, Path(scratch) / path.name))  # mapped: the name may go
        _paths.check_whole(path)
        load = library.ggml_backend_load
        load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        kvq = ctypes.CDLL(str(path.resolve()))
        native.bind(kvq)
        if not load(os.fsencode(path.resolve())):
            said = native.last_error(kvq) or "it says no more"
            raise LibraryError(f"{file} refused {path.name}: {said}")
    return kvq


def attach(
    module: ModuleType | str | os.PathLike[str] | None = None,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
    model: str | os.PathLike[str] | None = None,
) -> ctypes.CDLL:
    """Let the llama.cpp inside `module` (default: llama_cpp) keep its KV caches in this library.

    method and options hold for caches made afterwards, in this process (KVQ_METHOD, KVQ_OPTS). model: its file, where
    it is not mapped (KVQ_MODEL). Returns the native library; its kvq_last_error tells what a cache was refused for.
    """
    with _lock:
        file, library = ggml_of(module)
        kvq = _attached.get(str(file))
        if kvq is None:
            kvq = _library_for(file, library)
            _attached[str(file)] = kvq
        if method is not None:
            opts = native.option_string(dict(options or {}))
            native.check(kvq, kvq.kvq_check(method.encode(), opts.encode()))
            os.environ["KVQ_METHOD"], os.environ["KVQ_OPTS"] = method, opts
        if model is not None:
            os.environ["KVQ_MODEL"] = os.fspath(model)
        return kvq

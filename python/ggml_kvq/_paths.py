"""Where the native parts lie: programs, upstream's libraries and libggml-kvq.so, all in one folder.

KVQ_LIB_DIR (a folder of llama.cpp programs and libraries) and KVQ_BACKEND (a libggml-kvq.so) override the package's
own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct
from pathlib import Path

from .errors import LibraryError

BACKEND_FILE = "libggml-kvq.so"


def package_dir() -> Path:
    """The lib folder that the wheel installed; with an editable install it lies in site-packages, not beside this
    file.
    """
    import ggml_kvq

    folders = [Path(entry) / "lib" for entry in ggml_kvq.__path__]
    return next((f for f in folders if f.is_dir()), folders[0])


def lib_dir() -> Path:
    """$KVQ_LIB_DIR, else the package's own folder; not checked for content."""
    env = os.environ.get("KVQ_LIB_DIR")
    return Path(env).expanduser().absolute() if env else package_dir()


def program(name: str) -> Path:
    """Path of an upstream program. LibraryError when it is not there."""
    path = lib_dir() / name
    if not path.is_file():
        raise LibraryError(
            f"{path} does not exist; reinstall ggml-kvq (pip install .) or set KVQ_LIB_DIR to the bin folder of a"
            " llama.cpp build"
        )
    return path


def backend() -> Path:
    """Path of libggml-kvq.so: $KVQ_BACKEND, else in $KVQ_LIB_DIR, else the package's. LibraryError when there is
    none.
    """
    env = os.environ.get("KVQ_BACKEND")
    if env:
        path = Path(env).expanduser().absolute()
        if not path.is_file():
            raise LibraryError(f"KVQ_BACKEND={env} is not a file; point it at {BACKEND_FILE} or unset it")
        return path
    for path in (lib_dir() / BACKEND_FILE, package_dir() / BACKEND_FILE):
        if path.is_file():
            return path
    raise LibraryError(
        f"{lib_dir() / BACKEND_FILE} does not exist; reinstall ggml-kvq (pip install .) or set KVQ_BACKEND to its path"
    )


def open_upstream(folder: Path) -> None:
    """Loads libggml-base, with which libggml-kvq.so reads GGUF files where no ggml has loaded it; OSError of the
    dynamic linker.
    """
    ctypes.CDLL(str(shared_library(folder, "ggml-base")))


def check_whole(path: Path) -> None:
    """LibraryError for an ELF file that was cut off: the dynamic linker maps it, and the process ends by SIGBUS."""
    try:
        with open(path, "rb") as f:
            head = f.read(64)
            if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
                return  # the linker says what it is
            (at,), (size, n) = struct.unpack_from("<Q", head, 32), struct.unpack_from("<HH", head, 54)
            f.seek(at)
            table = f.read(size * n)
            held = os.fstat(f.fileno()).st_size
    except OSError:
        return
    parts = [struct.unpack_from("<IIQQQQ", table, i) for i in range(0, len(table) - 40, size)] if size >= 56 else []
    need = max((part[2] + part[5] for part in parts if part[0] == 1), default=0)
    if len(table) < size * n or need > held:
        raise LibraryError(f"{path} is cut off after {held} bytes; reinstall ggml-kvq (pip install .) or copy it again")


def cure(problem: str, usual: str) -> str:
    """What to do about a library for which the dynamic linker said `problem`; usual: where it is not CUDA's half that
    is missing.
    """
    missing = re.search(r"lib(cudart|cuda)\.so\.\d+: cannot open", problem)
    if not missing:
        return usual
    if missing[1] == "cuda":
        return "there is no NVIDIA driver here; without a GPU take the library without CUDA (unset KVQ_BACKEND)"
    return (
        "it has CUDA kernels and needs the CUDA runtime: pip install 'nvidia-cuda-runtime>=13,<14', or name its folder"
        " in LD_LIBRARY_PATH; without a GPU take the library without CUDA (unset KVQ_BACKEND)"
    )


def shared_library(folder: Path, stem: str) -> Path:
    """lib<stem>.so or, as wheels have no links, lib<stem>.so.<N> in `folder`. LibraryError when neither is there."""
    plain = folder / f"lib{stem}.so"
    if plain.exists():
        return plain
    versioned = sorted(p for p in folder.glob(f"lib{stem}.so.*") if p.suffix[1:].isdigit())
    if versioned:
        return versioned[0]
    raise LibraryError(
        f"{folder} holds no lib{stem}.so; reinstall ggml-kvq (pip install .) or set KVQ_LIB_DIR to the bin folder of a"
        " llama.cpp build"
    )


def cache_dir() -> Path:
    """What is kept between runs: $KVQ_CACHE_DIR, else $XDG_CACHE_HOME/ggml-kvq, else ~/.cache/ggml-kvq."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.environ.get("KVQ_CACHE_DIR") or os.path.join(base, "ggml-kvq"))


def page_dir() -> Path | None:
    """Folder of the page that llama-server serves; None when the program has upstream's page built in."""
    try:
        with (
            open(shared_library(lib_dir(), "llama-server-impl"), "rb") as f,
            mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            if data.find(b"gzip is not supported by this browser") >= 0:
                return None
    except (LibraryError, OSError, ValueError):
        return None  # another build of llama.cpp: as it is
    folder = Path(__file__).resolve().parent / "launch" / "page"
    return folder if (folder / "index.html").is_file() else None

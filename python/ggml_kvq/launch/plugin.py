"""libggml-kvq.so beside the libraries of another llama.cpp.

A llama.cpp whose backends are modules (GGML_BACKEND_DL: official archives, Ollama, node-llama-cpp) loads, from the
folder of its libraries, the best file of each name that it knows: libggml-cpu-*.so, libggml-cuda.so, ... One of these
names is that of a rare kind of GPU, and a file of that name that is ours is loaded as any other.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from .. import _paths, default_means, hub
from ..errors import KvqError, LibraryError
from ..progress import Line
from ..resolver import FirstUse

NAME = "libggml-musa-kvq.so"
NEEDS = "start the program with -dev KVQ0 -fa on: without them its cache stays f16, and nothing says so"
_LOOK = """
import ctypes, json, sys
base, ggml = ctypes.CDLL(sys.argv[2]), ctypes.CDLL(sys.argv[3])
base.ggml_version.restype = base.ggml_backend_dev_name.restype = ctypes.c_char_p
ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
ggml.ggml_backend_dev_get.restype, ggml.ggml_backend_dev_get.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
base.ggml_backend_dev_name.argtypes = [ctypes.c_void_p]
linked = ggml.ggml_backend_dev_count()
if len(sys.argv) > 4:
    ggml.ggml_backend_load(sys.argv[4].encode())
else:
    ggml.ggml_backend_load_all_from_path(sys.argv[1].encode())
every = [ggml.ggml_backend_dev_get(i) for i in range(ggml.ggml_backend_dev_count())]
devices = [base.ggml_backend_dev_name(d).decode() for d in every]
print(json.dumps([base.ggml_version().decode(), linked, devices]))
"""


def environment(method: str) -> list[str]:
    """Lines for a shell."""
    return [
        f"export GGML_BACKEND_PATH={shlex.quote(str(_paths.backend().resolve()))}",
        f"export KVQ_METHOD={shlex.quote(method)}",
    ]


def measure(model: str, n_threads: int | None = None, kind: FirstUse | None = None) -> str:
    """What the library looks for when no launcher is there, in the cache folder: its path. Seconds for a small model
    that was never measured, minutes with predictors. kind: None, what method auto goes best with. KvqError.
    """
    file = hub.resolve(model)
    if not file.is_file():
        raise KvqError(f"{file} is not a file; give a GGUF model")
    line = Line()
    path, why = default_means.ensure(
        file,
        lambda text: print(f"ggml-kvq: {text}", file=sys.stderr),
        n_threads,
        line,
        kind=default_means.usual() if kind is None else kind,
        insist=kind is not None,
    )
    if path is None:
        raise KvqError(f"{file.name} was not measured: {why}")
    return path


def library(folder: Path, stem: str) -> Path:
    """lib<stem>.so in its folder, with whatever stands behind or before the ending."""
    found = sorted(p for p in folder.glob(f"lib{stem}.*") if ".so" in p.name)
    if not found:
        raise LibraryError(f"{folder} holds no lib{stem}.so; give the folder with the libraries of a llama.cpp")
    return found[0]


def look(folder: Path, backend: Path | None = None) -> tuple[str, bool, list[str], list[str]]:
    """(ggml version, its backends are modules, devices, lines of ours) of the llama.cpp in `folder`, in a process
    of its own. backend: the file that it loads, None: those that it finds there.
    """
    files = [str(folder), str(library(folder, "ggml-base")), str(library(folder, "ggml"))]
    files += [str(backend)] if backend else []
    env = {k: v for k, v in os.environ.items() if k != "GGML_BACKEND_PATH"}
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, *files], capture_output=True, text=True, check=False, env=env, timeout=60
    )
    if done.returncode:
        raise LibraryError(f"the llama.cpp in {folder} does not load: {(done.stderr.splitlines() or ['no word'])[-1]}")
    version, linked, devices = json.loads(done.stdout.splitlines()[-1])
    return version, not linked, devices, [x for x in done.stderr.splitlines() if x.startswith("ggml-kvq: ")]


def install(where: str) -> list[str]:
    """Put the library there; what was found and what to do next, as lines. LibraryError when it is not taken."""
    folder = Path(where).expanduser().resolve()
    version, modules, _, _ = look(folder)
    if not modules:
        raise LibraryError(
            f"the llama.cpp in {folder} (ggml {version}) has its backends linked in and loads none from its folder; "
            "set GGML_BACKEND_PATH instead (ggml-kvq plugin --print-env)"
        )
    target = folder / NAME
    shutil.copy(_paths.backend(), target)
    _, _, devices, said = look(folder)
    if "KVQ0" not in devices:
        target.unlink()
        raise LibraryError((said or [f"ggml {version} did not load {NAME}"])[-1].removeprefix("ggml-kvq: error: "))
    return [
        f"{target}: ggml {version}, devices {', '.join(devices)}",
        "now: KVQ_METHOD=kivi in the program's environment; flash attention on, its layers on a GPU device",
        f"undo: ggml-kvq plugin --remove {shlex.quote(str(folder))}",
    ]


def remove(where: str) -> Path:
    """Delete what install() put there, and nothing else."""
    target = Path(where).expanduser().resolve() / NAME
    if not target.is_file():
        raise LibraryError(f"{target} does not exist: nothing was installed there")
    target.unlink()
    return target

"""Finding, loading and proving the native libraries.

Importing this module loads nothing and never fails; libraries() loads on first use and raises LibraryError with a
diagnosis. KVQ_LIB_DIR (a folder with libllama, libggml, libggml-base and the CPU backend) and KVQ_BACKEND
(a libggml-kvq.so) override the libraries that the package ships. Backends that are modules (a build with
GGML_BACKEND_DL) are loaded from there too.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import sys
import threading
from collections.abc import Mapping
from ctypes import CDLL, Structure
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import _paths
from .._paths import BACKEND_FILE
from ..errors import LibraryError
from . import llama, native

_STEMS = {"base": "ggml-base", "cpu": "ggml-cpu", "ggml": "ggml", "llama": "llama"}
_UNKNOWN = ctypes.c_size_t(-1).value


@dataclass
class Libraries:
    """The loaded libraries: base, ggml, llama (upstream) and kvq (ours; None when it is not there)."""

    lib_dir: Path
    base: CDLL
    ggml: CDLL
    llama: CDLL
    kvq: CDLL | None
    backend_path: Path | None
    kvq_problem: str
    _callback: Any = field(default=None, repr=False)

    def need_kvq(self) -> CDLL:
        """libggml-kvq, or LibraryError saying why it is not loaded."""
        if self.kvq is None:
            raise LibraryError(self.kvq_problem)
        return self.kvq

    def llama_version(self) -> str:
        """What libllama calls itself; older ones have no name for it."""
        return self.llama.llama_version().decode() if hasattr(self.llama, "llama_version") else "(no version)"

    def devices(self) -> list[tuple[str, int, int]]:
        """(name, type, handle) of every ggml device, in registry order."""
        out = []
        for i in range(self.ggml.ggml_backend_dev_count()):
            dev = self.ggml.ggml_backend_dev_get(i)
            out.append((self.base.ggml_backend_dev_name(dev).decode(), self.base.ggml_backend_dev_type(dev), dev))
        return out

    def describe(self, name: str, device: int) -> str:
        """A device of devices() in words: its name and what stands behind it."""
        return f"{name}: {self.base.ggml_backend_dev_description(device).decode('utf-8', 'replace')}"


def find_backend() -> tuple[Path | None, str]:
    """(path of libggml-kvq.so, "") or (None, reason). A bad $KVQ_BACKEND raises: it is an order, not a hint."""
    try:
        return _paths.backend(), ""
    except LibraryError as e:
        if os.environ.get("KVQ_BACKEND"):
            raise
        return None, str(e)


# ------------------------------------------------------------------ log

_LEVEL_DEBUG, _LEVEL_ERROR, _LEVEL_CONTINUED = 1, 4, 5  # enum ggml_log_level


class LogLines(list[str]):
    """Log lines of one call; `errors` holds those of level error."""

    errors: list[str]


class _Log:
    """Collects llama.cpp's log lines per thread; prints them only while a verbose load runs."""

    def __init__(self) -> None:
        self._local = threading.local()

    def begin(self, verbose: bool = False) -> None:
        self._local.parts, self._local.verbose = [], verbose

    def end(self) -> LogLines:
        parts: list[tuple[int, str]] = getattr(self._local, "parts", None) or []
        self._local.parts, self._local.verbose = None, False
        lines = LogLines(line for line in "".join(text for _, text in parts).splitlines() if line.strip())
        lines.errors = [text.strip() for level, text in parts if level == _LEVEL_ERROR and text.strip()]
        return lines

    def write(self, level: int, text: bytes | None, _user: object) -> None:
        parts = getattr(self._local, "parts", None)
        if parts is None or text is None:
            return
        if level == _LEVEL_CONTINUED and parts:
            level = parts[-1][0]
        parts.append((level, text.decode("utf-8", "replace")))
        if self._local.verbose and level != _LEVEL_DEBUG:  # a thousand lines of graph inputs
            sys.stderr.write(parts[-1][1])


log = _Log()


def last_problem(lines: LogLines) -> str:
    """The first error a failed call logged, else its last line, without the function name in front."""
    chosen = lines.errors[0] if lines.errors else (lines[-1].strip() if lines else "no message")
    return re.sub(r"^\w+: ", "", chosen.splitlines()[0])


# ------------------------------------------------------------------ proof


def fit_struct(kvq: CDLL, name: str) -> type[Structure]:
    """llama.STRUCTS[name], or a structure of those known fields that libggml-kvq's llama.cpp has, in its order.

    LibraryError when it has a field which is not known here: the sizes differ then.
    """
    pinned = llama.STRUCTS[name]
    known: list[tuple[str, Any]] = [*((f[0], f[1]) for f in pinned._fields_), *llama.OTHER_FIELDS[name]]
    offsets = {field: kvq.kvq_offsetof(name.encode(), field.encode()) for field, _ in known}
    there = sorted((entry for entry in known if offsets[entry[0]] != _UNKNOWN), key=lambda entry: offsets[entry[0]])
    if there == [(f[0], f[1]) for f in pinned._fields_]:
        return pinned
    fitted = type(name, (Structure,), {"_fields_": there})
    size = kvq.kvq_sizeof(name.encode())
    if ctypes.sizeof(fitted) != size:
        raise LibraryError(
            f"struct {name} of this llama.cpp has {size} bytes, the fields known here {ctypes.sizeof(fitted)}: "
            "the version is not supported; README.md names those that are"
        )
    return fitted


def prove_structs(kvq: CDLL, fitted: Mapping[str, type[Structure]] | None = None) -> None:
    """Compare size and every field offset of our structures with the compiled ones.

    LibraryError names the first difference. fitted: those of llama.STRUCTS that are replaced (fit_struct).
    """
    for name, struct in {**llama.STRUCTS, **native.STRUCTS, **(fitted or {})}.items():
        size = kvq.kvq_sizeof(name.encode())
        if size != ctypes.sizeof(struct):
            got = "unknown to the probe" if size == _UNKNOWN else f"{size} bytes"
            raise LibraryError(
                f"struct {name} is {got} in {BACKEND_FILE} and {ctypes.sizeof(struct)} bytes here; "
                "install library and Python package of the same ggml-kvq version"
            )
        for entry in struct._fields_:
            here, there = getattr(struct, entry[0]).offset, kvq.kvq_offsetof(name.encode(), entry[0].encode())
            if here != there:
                raise LibraryError(
                    f"field {name}.{entry[0]} sits at {there} in {BACKEND_FILE} and at {here} here; "
                    "install library and Python package of the same ggml-kvq version"
                )


def prove_defaults(lib: CDLL) -> None:
    """Check that upstream's default parameters read back through our structures; LibraryError names the first that
    does not.
    """
    for function, expected in llama.DEFAULTS.items():
        params = getattr(lib, function)()
        for key, want in expected.items():
            if not hasattr(params, key):
                continue  # this llama.cpp has no such field: prove_structs has seen all that it has
            got = getattr(params, key)
            got = bool(got) and got if isinstance(got, ctypes._Pointer) else got
            if (got or None) != (want or None):
                raise LibraryError(
                    f"{function}().{key} reads {got!r} instead of {want!r}: libllama.so is of another version; "
                    f"use libraries built from the llama.cpp pinned by this package (ggml {llama.GGML_VERSION})"
                )


class _Symbol(ctypes.Structure):  # Dl_info
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def prove_one_runtime(lib: CDLL, path: Path) -> None:
    """LibraryError when the streams that `lib` prints through are a copy inside one of these libraries, shown to the
    others.

    Programs put all libraries into one scope and use one copy; opened from Python, copies mix and the first number
    printed crashes.
    """
    try:
        function = lib["_ZNSo9_M_insertIlEERSoT_"]  # std::ostream << long
        dladdr = ctypes.CDLL(None).dladdr
    except AttributeError:
        return  # no copy is shown, or not this C++ library
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Symbol)]
    found = _Symbol()
    if dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(found)) and found.file:
        name = Path(os.fsdecode(found.file)).name
        if not re.match(r"lib(std)?c\+\+", name):
            raise LibraryError(
                f"{path} was linked with a static libstdc++, which {name} shows to the other libraries: Python would"
                " crash in it; rebuild with a shared libstdc++ or with -Wl,--exclude-libs,libstdc++.a (this package's"
                " own build does)"
            )


def _mapped_copies(stem: str) -> set[str]:
    """Distinct files named `stem`* mapped into this process (Linux; empty elsewhere)."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as f:
            paths = {line.split(None, 5)[5].strip() for line in f if f"/{stem}" in line}
    except OSError:
        return set()
    return {os.path.realpath(p) for p in paths}


# ------------------------------------------------------------------ loading


def _load_modules(libs: dict[str, CDLL], folder: Path) -> None:
    """Load backends that are modules from `folder`: llama.cpp looks beside the running program, which is Python.

    LibraryError when there is no CPU backend among them.
    $GGML_BACKEND_PATH is hidden meanwhile: it may name libggml-kvq.so, which is loaded by its path later.
    """
    hidden = os.environ.pop("GGML_BACKEND_PATH", None)
    try:
        libs["ggml"].ggml_backend_load_all_from_path(os.fsencode(folder))
    finally:
        if hidden is not None:
            os.environ["GGML_BACKEND_PATH"] = hidden
    if not libs["ggml"].ggml_backend_dev_count():
        raise LibraryError(
            f"{folder} holds no CPU backend that this machine can run; "
            "reinstall ggml-kvq (pip install .) or set KVQ_LIB_DIR to a llama.cpp build"
        )


def build_info(folder: Path) -> dict[str, str]:
    """What the build wrote about itself: compiler, cpu, amx, self-check. Empty when another project built it."""
    try:
        lines = (folder / "build-info.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon}


def _last_error(kvq: CDLL) -> str:
    """What the library said last; it may be of a version that has no such function."""
    try:
        function = kvq.kvq_last_error
    except AttributeError:
        return ""
    function.restype = ctypes.c_char_p
    return (function() or b"").decode("utf-8", "replace")


_lock = threading.Lock()
_loaded: Libraries | None = None


def _open(path: Path) -> CDLL:
    _paths.check_whole(path)
    try:
        return CDLL(str(path))
    except OSError as e:
        raise LibraryError(f"{path} does not load: {e}; rebuild or reinstall it for this machine") from e


def _bind(libs: Mapping[str, CDLL], files: Mapping[str, Path], structs: Mapping[str, type[Structure]]) -> None:
    """Give every function of llama.FUNCTIONS its prototype, with `structs` in place of those of llama.STRUCTS."""
    swap = {llama.STRUCTS[name]: struct for name, struct in structs.items()}
    for key, name, restype, argtypes in llama.FUNCTIONS:
        try:
            fn = getattr(libs[key], name)
        except AttributeError:
            if name in llama.OPTIONAL:
                continue
            raise LibraryError(
                f"{files[key]} lacks the function {name}: this llama.cpp is too old or too new; "
                "README.md names those that are supported"
            ) from None
        fn.restype, fn.argtypes = swap.get(restype, restype), [swap.get(a, a) for a in argtypes]


def _load() -> Libraries:
    if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise LibraryError("ggml-kvq needs a 64-bit little-endian machine; use upstream's cache types here")
    folder = _paths.lib_dir()
    files: dict[str, Path] = {}
    for key, stem in _STEMS.items():
        try:
            files[key] = _paths.shared_library(folder, stem)
        except LibraryError:
            if key != "cpu":  # that may be a module: _load_modules
                raise
    libs = {key: _open(path) for key, path in files.items()}
    _bind(libs, files, {})
    version = libs["base"].ggml_version().decode()
    copies = _mapped_copies("libggml-base.so")
    if len(copies) > 1:
        raise LibraryError(
            f"two copies of libggml-base are loaded: {', '.join(sorted(copies))}; "
            "use Model in a process of its own, or ggml_kvq.attach() for llama_cpp's own Llama"
        )
    prove_one_runtime(libs["llama"], files["llama"])

    callback = llama.LogCallback(log.write)
    libs["llama"].llama_log_set(callback, None)
    if not libs["ggml"].ggml_backend_dev_count():
        _load_modules(libs, folder)
    libs["llama"].llama_backend_init()

    kvq: CDLL | None = None
    path, problem = find_backend()
    if path is not None:
        kvq = _open(path.resolve())  # it stays when it refuses, and says why
        log.begin()
        registry = libs["ggml"].ggml_backend_load(str(path.resolve()).encode())
        lines = log.end()
        if not registry:
            said = _last_error(kvq) or last_problem(lines)
            cure = _paths.cure(said, f"rebuild it against the llama.cpp in {folder}")
            raise LibraryError(f"{path} was refused by ggml {version}: {said}; {cure}")
        try:
            native.bind(kvq)
        except AttributeError as e:
            raise LibraryError(f"{path} is of another ggml-kvq version: {e}; reinstall the package") from None
        if kvq.kvq_abi_version() != native.ABI_VERSION:
            raise LibraryError(
                f"{path} speaks C ABI {kvq.kvq_abi_version()}, this package {native.ABI_VERSION}; reinstall the package"
            )
        fitted = {name: fit_struct(kvq, name) for name in llama.OTHER_FIELDS}
        prove_structs(kvq, fitted)
        _bind(libs, files, fitted)
        kvq.kvq_set_verbosity(0)  # errors reach Python through kvq_last_error, the load line through kvq_cache_line
    elif version != llama.GGML_VERSION:
        raise LibraryError(
            f"{folder} holds ggml {version}, this package was written for {llama.GGML_VERSION}, and {problem}: "
            f"point KVQ_BACKEND at a {BACKEND_FILE} that was built for this llama.cpp (cmake -DLLAMA_CPP_DIR=...)"
        )
    prove_defaults(libs["llama"])
    return Libraries(folder, libs["base"], libs["ggml"], libs["llama"], kvq, path, problem, callback)


def libraries() -> Libraries:
    """Load once and return the libraries. LibraryError (an ImportError) tells what is wrong and what to do."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load()
            atexit.register(_silence, _loaded)
        return _loaded


def _silence(libs: Libraries) -> None:
    """At exit: close what is still open, then let the log callback go quiet before the interpreter is gone."""
    module = sys.modules.get(f"{__package__}.model")
    if module is not None:
        module.close_all()
    log.begin()


def diagnose() -> list[str]:
    """Lines for `python -m ggml_kvq`: versions, library paths, devices, kernel; problems are reported, not raised."""
    lines = [
        f"python       {sys.version.split()[0]} ({sys.executable})",
        f"KVQ_LIB_DIR  {os.environ.get('KVQ_LIB_DIR', '(not set)')}",
        f"KVQ_BACKEND  {os.environ.get('KVQ_BACKEND', '(not set)')}",
    ]
    try:
        libs = libraries()
    except LibraryError as e:
        return [*lines, f"libraries    NOT USABLE: {e}"]
    lines += [
        f"libraries    {libs.lib_dir}",
        f"llama.cpp    {libs.llama_version()}, ggml {libs.base.ggml_version().decode()}",
        *(f"{key:<12} {value}" for key, value in build_info(libs.lib_dir).items() if key != "cpu"),
        (
            f"cpu backend  {', '.join(sorted(Path(p).name for p in _mapped_copies('libggml-cpu'))) or 'unknown'}"
            f", built for {build_info(libs.lib_dir).get('cpu', 'unknown')}"
        ),
    ]
    if libs.kvq is None:
        lines.append(f"backend      NOT LOADED: {libs.kvq_problem}")
    else:
        lines += [
            f"backend      {libs.backend_path} (version {libs.kvq.kvq_version().decode()})",
            f"kernel       {libs.kvq.kvq_kernel_name().decode()}",
            f"methods      {' '.join(m['name'] for m in native.methods(libs.kvq))}",
            f"structs      {len(llama.STRUCTS) + len(native.STRUCTS)} proven by kvq_sizeof and kvq_offsetof",
        ]
    lines.append("devices      " + ", ".join(name for name, _, _ in libs.devices()))
    return lines

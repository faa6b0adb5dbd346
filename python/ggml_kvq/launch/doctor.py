"""Checks of an installation, each with what was found and the cure. Nothing raises: a check that fails is a finding."""

from __future__ import annotations

import difflib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import __version__, _paths, default_means, files, memory
from ..errors import KvqError, LibraryError

GOOD, NOTE, BAD = 0, 1, 2
PROGRAMS = ("llama-cli", "llama-completion", "llama-server", "llama-bench", "llama-perplexity")
OPTIONAL = {
    "gguf": ("calibrate, tune, embed, method auto", "pip install 'gguf>=0.18'"),
    "huggingface_hub": ("hf: paths, -hf", "pip install 'ggml-kvq[hub]'"),
    "matplotlib": ("plot", "pip install 'ggml-kvq[plot]'"),
    "jinja2": ("chat templates that llama.cpp does not know", "pip install 'ggml-kvq[chat]'"),
    "tqdm": ("progress bars; lines without it", "pip install tqdm"),
}
VARIABLES = (  # that users set; docs/llama-cpp.md tells what each does
    "KVQ_METHOD",
    "KVQ_OPTS",
    "KVQ_CONFIG",
    "KVQ_MODEL",
    "KVQ_METHOD_DRAFT",
    "KVQ_OPTS_DRAFT",
    "KVQ_MODEL_DRAFT",
    "KVQ_STATS_FILE",
    "KVQ_PAGE_STATS_FILE",
    "KVQ_LAUNCHER",
    "KVQ_ASKED",
    "KVQ_INNER_BACKEND",
    "KVQ_FAR_LIMIT",
    "KVQ_ISA",
    "KVQ_QUIET",
    "KVQ_LIB_DIR",
    "KVQ_BACKEND",
    "KVQ_CACHE_DIR",
    "GGML_BACKEND_PATH",
)
NUMBERS = (
    "KVQ_HOST_DEVICES",
    "KVQ_FAR_LIMIT",
    "KVQ_QUIET",
    *(f"KVQ_CUDA_{name}" for name in ("GRAPHS", "SHORT", "BYTES", "LISTS", "MEANS", "OBSERVE")),
)
READ = {*VARIABLES, *NUMBERS, "KVQ_CUDA_AS"}


@dataclass(frozen=True)
class Check:
    """One finding: GOOD, NOTE or BAD; what was looked at, what was found, what to do."""

    level: int
    what: str
    found: str
    cure: str = ""


def _library() -> Iterator[Check]:
    from ..core import loader, native

    try:
        libs = loader.libraries()
        kvq = libs.need_kvq()
    except LibraryError as e:
        found, _, cure = str(e).partition("; ")
        yield Check(BAD, "libraries", found, cure or "reinstall ggml-kvq (pip install .)")
        return
    yield Check(
        GOOD, "libraries", f"{libs.lib_dir}, llama.cpp {libs.llama_version()}, ggml {libs.base.ggml_version().decode()}"
    )
    yield Check(
        GOOD,
        "libggml-kvq",
        f"{libs.backend_path}, version {kvq.kvq_version().decode()}, kernels {kvq.kvq_kernel_name().decode()}",
    )
    if kvq.kvq_version().decode() != __version__:
        yield Check(
            NOTE,
            "versions",
            f"library {kvq.kvq_version().decode()}, Python package {__version__}",
            "reinstall ggml-kvq",
        )
    names = [name for name, _, _ in libs.devices()]
    ours = [name for name in names if name.startswith("KVQ")]
    yield Check(
        GOOD if ours else BAD,
        "devices",
        ", ".join(names),
        "" if ours else "reinstall ggml-kvq: the library offers no device",
    )
    yield Check(GOOD, "methods", " ".join(m["name"] for m in native.methods(kvq)))
    info = loader.build_info(libs.lib_dir)
    check = info.get("self-check", "")
    if "off" in check.lower() or "skip" in check.lower():
        yield Check(NOTE, "self-check", check, "build without -DKVQ_SELF_CHECK=OFF to have the CPU backend tried")


def _programs() -> Iterator[Check]:
    for name in PROGRAMS:
        try:
            _paths.program(name)
        except LibraryError as e:
            yield Check(BAD, name, str(e))
            continue
        there, beside = shutil.which(name), Path(sys.executable).parent / name
        if there is None:
            yield Check(NOTE, name, "not on PATH", f"activate the environment, or run {beside}")
        elif beside.is_file() and os.path.realpath(there) != os.path.realpath(beside):
            yield Check(
                NOTE, name, f"PATH finds {there}, which knows no --kv-method", f"put {beside.parent} in front of PATH"
            )
        else:
            yield Check(GOOD, name, there)


def _values(given: dict[str, str]) -> Iterator[Check]:
    """Variables whose value is none; what the library would say when a cache is made."""
    from .. import methods
    from ..core import loader
    from . import launcher

    for name in NUMBERS:
        value = os.environ.get(name, "0")
        if value and not (value.isascii() and value.isdigit() and len(value) < 10):
            yield Check(NOTE, name, f"{value} is not used", "write a whole number or unset it")
    for name in ("KVQ_MODEL", "KVQ_MODEL_DRAFT"):
        if name in given and not Path(given[name]).is_file():
            yield Check(BAD, name, f"{given[name]} is not a file", "give a GGUF model or unset it")
    if draft := given.get("KVQ_METHOD_DRAFT"):
        try:
            methods.check(draft, given.get("KVQ_OPTS_DRAFT", ""))
        except KvqError as e:
            yield Check(BAD, "KVQ_METHOD_DRAFT", str(e))
    if isa := given.get("KVQ_ISA"):
        kernel = loader.libraries().need_kvq().kvq_kernel_name().decode()
        if isa.lower() != kernel:
            yield Check(NOTE, "KVQ_ISA", f"{isa} is not available on this CPU and not used", f"unset it for {kernel}")
    if path := given.get("KVQ_STATS_FILE"):
        try:
            launcher.stats_file(path, "KVQ_STATS_FILE")
        except KvqError as e:
            yield Check(BAD, "KVQ_STATS_FILE", str(e))


def _environment() -> Iterator[Check]:
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    if given:
        yield Check(GOOD, "variables", ", ".join(f"{k}={v}" for k, v in given.items()))
    for name in sorted(n for n in os.environ if n.startswith("KVQ_") and n not in READ):
        near = difflib.get_close_matches(name, sorted(READ), 1)
        yield Check(NOTE, name, "nothing reads this variable", f"write {near[0]}" if near else "unset it")
    yield from _values(given)
    if "KVQ_OPTS" in given and "KVQ_METHOD" not in given:
        yield Check(NOTE, "KVQ_OPTS", f"{given['KVQ_OPTS']} without KVQ_METHOD", "set both, or add --kv-method NAME")
    other = given.get("GGML_BACKEND_PATH")
    if other and not Path(other).is_file():
        yield Check(BAD, "GGML_BACKEND_PATH", f"{other} is not a file", "point it at libggml-kvq.so or unset it")
    if "KVQ_METHOD" in given or "KVQ_CONFIG" in given:
        from .. import methods, resolver

        try:  # as a launcher that is given a model and no flags
            resolver.resolve(methods.library, resolver.Request(resolver.BY_FLAGS, env=given), None)
        except KvqError as e:
            yield Check(BAD, "KVQ_METHOD" if "KVQ_METHOD" in given else "KVQ_CONFIG", str(e))
        if other:
            yield Check(
                NOTE,
                "programs of your own",
                "llama.cpp opens GGML_BACKEND_PATH by itself only when it was built with GGML_BACKEND_DL",
                "add -dev KVQ0 -fa on, which loads it in any build; a load line `ggml-kvq: ...` tells that it is"
                " in use",
            )
    if importlib.util.find_spec("llama_cpp"):
        yield Check(
            NOTE,
            "llama_cpp",
            "installed too",
            "ggml_kvq.attach() keeps its caches here; ggml_kvq.Model wants another process",
        )


def _machine() -> Iterator[Check]:
    free = memory.available()
    yield Check(
        GOOD if free > 1 << 30 else NOTE,
        "memory",
        f"{free // memory.MIB} MiB free for a process",
        "" if free > 1 << 30 else "lower -c",
    )
    for name, (what, cure) in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            yield Check(NOTE, name, f"not installed; needed for: {what}", cure)
    means = default_means.folder()
    try:
        files.probe(means / "doctor")
        yield Check(GOOD, "cache folder", str(means.parent))
    except KvqError as e:
        cure = "set KVQ_CACHE_DIR to a folder that is yours: auto and specache keep means of your models there"
        yield Check(NOTE, "cache folder", str(e), cure)
    page = _paths.page_dir()
    yield Check(GOOD, "llama-server's page", str(page) if page else "llama.cpp's own")


def _model(path: str) -> Iterator[Check]:
    from .. import gguf_header, hub
    from ..core.model import Model

    try:
        file = hub.resolve(path)
        if not file.is_file():
            raise KvqError(f"{file} is not a file; give a GGUF model")
        header = gguf_header.read(file, tensors=True)
        header.check_whole()
        if (arch := header.fields.get("general.architecture")) in gguf_header.WITHOUT_CACHE:
            yield Check(NOTE, "model", f"{file.name} ({arch}) keeps no KV cache", "run it with --kv-method none")
            return
        texts = {}
        for method in (None, "f16", "kivi"):
            with Model(file, method or "upstream", n_ctx=512, n_ubatch=64) as m:
                texts[method] = "".join(m.generate("The file is read by the program", max_tokens=16, temperature=0))
                line = m.load_line
        yield Check(GOOD, "model", line)
        same = texts[None] == texts["f16"]
        yield Check(
            GOOD if same else NOTE,
            "method f16",
            "writes what llama.cpp writes" if same else "parts from llama.cpp's text within 16 tokens",
            "" if same else "rounding can do that; compare with ggml-kvq eval --cache method:f16",
        )
    except (KvqError, OSError) as e:
        yield Check(BAD, "model", str(e))


def checks(model: str | None = None) -> Iterator[Check]:
    """All findings, one after the other."""
    yield Check(GOOD, "ggml-kvq", f"{__version__}, Python {sys.version.split()[0]}")
    for part in (_library, _programs, _environment, _machine):
        try:
            yield from part()
        except (KvqError, OSError) as e:
            yield Check(BAD, part.__name__.strip("_"), str(e))
    if model:
        yield from _model(model)


def of_program(where: str, model: str | None) -> Iterator[Check]:
    """Findings about a program with a llama.cpp of its own (hosts.py)."""
    from . import hosts

    for x in hosts.checked(where, model):
        yield Check(GOOD if x.good else BAD, x.what, x.found, x.cure)

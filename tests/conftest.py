"""Fixtures of all tests. Tests run against the installed package: programs, libraries and libggml-kvq of the same
build.
"""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import object_cache
import pytest

ROOT = Path(__file__).resolve().parent.parent
_U32, _STRING, _ARRAY = 4, 8, 9
# Files that take minutes, the longest first: the last file to start is a short one, so that no worker waits long.
LONG = (
    "native",
    "cuda_on_host",
    "cuda_compile",
    "builds",
    "versions",
    "emulated",
    "archs",
    "attention",
    "llama_features",
    "eval",
)


def pytest_configure() -> None:
    # A shell that runs us in the background ignores Ctrl-C for us and for what we start: tests of Ctrl-C need it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Two workers share the cores: a thread that waits for another sleeps.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name in [n for n in os.environ if n.startswith(("KVQ_", "LLAMA_ARG_")) or n == "GGML_BACKEND_PATH"]:
        if name not in ("KVQ_LIB_DIR", "KVQ_BACKEND", "KVQ_ISA"):  # where the libraries are, not what they shall do
            del os.environ[name]


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        object_cache.evict()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Seconds of the slowest files: what LONG must name, and where a run's time goes."""
    files: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                name = Path(report.nodeid.partition("::")[0]).stem.removeprefix("test_")
                files[name] = files.get(name, 0.0) + report.duration
    slow = sorted(((s, name) for name, s in files.items() if s >= 10), reverse=True)[:16]
    if slow:
        terminalreporter.write_line("seconds by file: " + ", ".join(f"{name} {s:.0f}" for s, name in slow))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return ROOT / "models" / "kvq-demo-q8_0.gguf"


def gguf_bytes(fields: dict[str, Any], *, version: int = 3, n_tensors: int = 0) -> bytes:
    """A GGUF of metadata alone: int -> u32, str -> string, list of either -> array."""

    def text(s: str) -> bytes:
        return struct.pack("<Q", len(s.encode())) + s.encode()

    def value(v: Any) -> tuple[int, bytes]:
        if isinstance(v, str):
            return _STRING, text(v)
        if isinstance(v, list):
            inner = value(v[0])[0]
            return _ARRAY, struct.pack("<IQ", inner, len(v)) + b"".join(value(x)[1] for x in v)
        return _U32, struct.pack("<I", v)

    out = b"GGUF" + struct.pack("<IQQ", version, n_tensors, len(fields))
    for key, v in fields.items():
        kind, data = value(v)
        out += text(key) + struct.pack("<I", kind) + data
    return out


LLAMA_FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.context_length": 2048,
    "llama.embedding_length": 256,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
}


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """write_gguf(name, fields) -> path of a metadata-only GGUF under tmp_path."""

    def write(name: str, fields: dict[str, Any], **options: Any) -> Path:
        path = tmp_path / name
        path.write_bytes(gguf_bytes(fields, **options))
        return path

    return write


def is_one_text(*texts: str) -> bool:
    """Are the outputs of llama-completion the same? On a busy machine it may end before its last tokens are printed,
    with llama.cpp's own cache as well: 17 of 60 runs of four at once on two cores.
    """
    short, long = min(texts, key=len), max(texts, key=len)
    return len(long) - len(short) <= 24 and all(t.startswith(short) for t in texts)


def run_until_said(words: str, argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program of llama.cpp until its output has `words`, or it fails: its log thread drops the last lines when
    the process ends on a busy machine.
    """
    for _ in range(6):
        done = subprocess.run(argv, capture_output=True, text=True, **options)
        if done.returncode or re.search(words, done.stdout + done.stderr):
            break
    return done


def run_python(
    module_call: str, *args: str, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `module_call` (Python source) in a fresh interpreter, sys.argv[1:] = args, env on top of this environment."""
    return subprocess.run(
        [sys.executable, "-c", module_call, *args],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )

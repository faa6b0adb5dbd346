"""Flags of llama.cpp's programs that have nothing to do with the cache: with a method the outcome is upstream's."""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
from conftest import ROOT

CODE = "import sys; from ggml_kvq.launch import launcher; sys.exit(launcher.llama_completion())"
PROMPT = (Path(__file__).parent / "data" / "walk.txt").read_text()[:600]
METHODS = {
    "upstream": "",
    "f16": "--kv-method f16",
    "kivi": "--kv-method kivi --kv-opt bits=4",
    "auto": "--kv-bits 4.25",
}


@lru_cache
def run(method: str, flags: str) -> tuple[int, str, str]:
    """Exit code, text behind the prompt, first line of an error."""
    argv = ["-m", str(ROOT / "models/kvq-demo-q8_0.gguf"), "-p", PROMPT, "--temp", "0", "-no-cnv", "--ignore-eos"]
    call = [sys.executable, "-c", CODE, *argv, *METHODS[method].split(), *flags.split()]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=False)
    error = next((line for line in done.stderr.splitlines() if "error" in line), "")
    return done.returncode, done.stdout.partition(PROMPT[-40:])[2].strip(), error


def begins_alike(method: str, text: str, upstream: str) -> bool:
    """As upstream's, or, with auto, whose bits are fewer, as its own without any flag."""
    like = run("auto", "-n 16 -c 512")[1] if method == "auto" and upstream else upstream
    return text[:30] == like[:30]


@pytest.mark.parametrize(
    "flags",
    [
        "-t 1",
        "-C 0x1 -t 1",
        "-Cr 0-0 --cpu-strict 1 -t 1",
        "-Cb 0x1 -tb 1",
        "-C zz",
        "--numa distribute",
        "--numa isolate",
        "--numa numactl",
        "--numa nowhere",
        "--poll 0 --prio 1",
        "-lm none",
        "-lm mlock",
        "-lm nothing",
    ],
)
def test_threads_and_memory(flags: str) -> None:
    code, want, error = run("upstream", f"-n 16 -c 512 {flags}")
    assert (code == 0) == (len(want) >= 40)
    for method in ("f16", "kivi", "auto"):
        got = run(method, f"-n 16 -c 512 {flags}")
        assert (got[0], got[2]) == (code, error), method
        assert begins_alike(method, got[1], want), method  # upstream may lose the last token


@pytest.mark.parametrize("keep", ["--keep 0", "--keep 64", "--keep -1", "--keep 5000"])
def test_a_shift_that_keeps(keep: str) -> None:
    """More tokens than the context holds. Texts part where rounding turns a near tie, so their beginnings are held."""
    flags = f"-t 1 -c 384 -n 500 --context-shift {keep}"
    code, want, _ = run("upstream", flags)
    assert code == 0 and len(want) > 600
    for method in ("f16", "kivi", "auto"):
        code, text, _ = run(method, flags)
        assert code == 0 and len(text) > 600 and begins_alike(method, text, want), method


def test_without_a_shift_the_text_ends_with_the_context() -> None:
    flags = "-t 1 -c 384 -n 500 --keep 64 --no-context-shift"
    code, want, error = run("upstream", flags)
    for method in ("f16", "kivi", "auto"):
        got = run(method, flags)
        assert (got[0], got[2]) == (code, error) == (0, ""), method
        assert 300 < len(got[1]) < 1200 and begins_alike(method, got[1], want), method  # 500 tokens have more

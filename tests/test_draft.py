"""Speculative decoding: a draft's own cache is llama.cpp's f16 unless a method is asked for, and what it proposes is accepted as often."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LLAMA_FIELDS
from ggml_kvq import _paths, launcher
from ggml_kvq.errors import KvqError

TEXT = (Path(__file__).parent / "data" / "walk.txt").read_text()
LAUNCH = "import sys; from ggml_kvq import launcher; sys.exit(launcher.run('llama-server', sys.argv[1:]))"
CUDA = bool(list(_paths.lib_dir().glob("libggml-cuda.so*")))


def device_of(args: list[str]) -> str | None:
    return args[args.index("-devd") + 1] if "-devd" in args else None


def test_a_draft_stays_with_llama_cpp_unless_asked(demo_model: Path, write_gguf: Callable[..., Path]) -> None:
    argv = ["-m", str(demo_model), "-md", str(demo_model), "--kv-method", "kivi"]
    plain = launcher.command("llama-server", argv, {})
    assert device_of(plain.args) == ("CUDA0" if CUDA else "none") and "KVQ_METHOD_DRAFT" not in plain.env
    asked = launcher.command("llama-server", [*argv, "--kv-method-draft", "higgs", "--kv-opt-draft", "bits=4"], {})
    assert device_of(asked.args) == "KVQD0"
    assert (asked.env["KVQ_METHOD_DRAFT"], asked.env["KVQ_OPTS_DRAFT"], asked.env["KVQ_MODEL_DRAFT"]) == ("higgs", "bits=4", str(demo_model))
    chosen = launcher.command("llama-server", [*argv, "-devd", "KVQ0"], {})
    assert chosen.args.count("-devd") == 1
    shares = write_gguf("draft.gguf", {**LLAMA_FIELDS, "general.architecture": "gemma4-assistant"})
    assert device_of(launcher.command("llama-server", [*argv[:3], str(shares), *argv[4:]], {}).args) is None
    predicts = launcher.command("llama-server", ["-m", str(demo_model), "--spec-type", "draft-mtp", "--kv-method", "kivi", "--kv-method-draft", "f16"], {})
    assert device_of(predicts.args) is None and predicts.env["KVQ_METHOD_DRAFT"] == "f16"


@pytest.mark.parametrize(
    ("argv", "needle"),
    [
        (["--kv-method", "kivi", "--kv-method-draft", "kivi"], "needs a draft"),
        (["--kv-method", "kivi", "-md", "x.gguf", "--kv-method-draft", "kivy"], "kivy"),
        (["--kv-method", "kivi", "-md", "x.gguf", "--kv-opt-draft", "bits=4"], "--kv-method-draft NAME"),
        (["--kv-method-draft", "kivi", "-md", "x.gguf"], "--kv-method NAME"),
        (["--kv-method", "kivi", "--kv-method-draft"], "write --kv-method-draft NAME"),
    ],
)
def test_draft_flags_that_do_nothing_are_refused(argv: list[str], needle: str) -> None:
    with pytest.raises(KvqError, match=re.escape(needle)):
        launcher.command("llama-server", argv, {})


def ask(port: int, prompt: str, n: int) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": n, "temperature": 0, "cache_prompt": False}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=200) as reply:
        return dict(json.load(reply))


def drafted(model: Path, log: Path, *flags: str) -> tuple[int, int, str]:
    """(tokens accepted, tokens drafted, what the server printed), two prompts of the model with itself as its draft."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    args = ["-m", str(model), "-md", str(model), "--spec-type", "draft-simple", "--spec-draft-n-max", "7", "--port", str(port)]
    with open(log, "w") as out:
        server = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *args, "-c", "1024", "-np", "1", "-t", "2", *flags], stdout=out, stderr=out, env=dict(os.environ)
        )
    try:
        for _ in range(300):
            assert server.poll() is None, log.read_text()[-2000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        timings = [ask(port, TEXT[at : at + 1200], 80)["timings"] for at in (0, 4000)]
    finally:
        server.terminate()
        server.wait(30)
    return sum(t.get("draft_n_accepted", 0) for t in timings), sum(t.get("draft_n", 0) for t in timings), log.read_text()


def test_drafts_are_accepted_as_often_as_with_f16(demo_model: Path, tmp_path: Path) -> None:
    """A compressed target verifies steps of up to 8 tokens; its f16 draft keeps the acceptance, a compressed draft is a cache of its own."""
    lines = {}
    rate = {}
    for name, flags in {
        "f16": ["--kv-method", "f16"],
        "kivi-4": ["--kv-method", "kivi", "--kv-opt", "bits=4"],
        "both": ["--kv-method", "kivi", "--kv-opt", "bits=4", "--kv-method-draft", "kivi", "--kv-opt-draft", "bits=2"],
    }.items():
        accepted, proposed, printed = drafted(demo_model, tmp_path / f"{name}.log", *flags)
        assert proposed > 60, printed[-3000:]
        rate[name] = accepted / proposed
        lines[name] = [line for line in printed.splitlines() if "MiB KV cache instead of" in line]
        print(f"{name}: {accepted} of {proposed} accepted")
    assert rate["kivi-4"] > rate["f16"] - 0.03, rate
    assert len(lines["f16"]) == len(lines["kivi-4"]) == 1 and len(lines["both"]) == 2, lines
    assert "device KVQ0" in lines["kivi-4"][0] and any("device KVQD0" in x and "bits=2" in x for x in lines["both"])

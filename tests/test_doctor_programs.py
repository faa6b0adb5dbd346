"""`ggml-kvq doctor --program`: programs that take our library, and those that do not, each with what to do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ggml_kvq import _paths
from ggml_kvq.launch import hosts
from test_hosts import fetched


def look(where: str | Path, model: Path | None = None) -> list[hosts.Finding]:
    return list(hosts.checked(str(where), str(model) if model else None))


@pytest.mark.parametrize("name", ["llama-server", "llama-completion", "llama-bench"])
def test_a_program_makes_one_token_in_our_cache(name: str, demo_model: Path) -> None:
    found = look(_paths.lib_dir() / name, demo_model)
    assert [x.what for x in found] == ["program", "devices", "one token"] and all(x.good for x in found), found
    assert "ggml-kvq: kivi" in found[-1].found and "version: " in found[0].found


def test_a_folder_of_libraries_tells_its_version_and_devices() -> None:
    (found,) = look(_paths.lib_dir())
    assert found.good and "devices CPU, KVQ0" in found.found


def test_node_llama_cpp_is_asked(demo_model: Path) -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    npm = ("npm", "install", "--ignore-scripts", "--no-fund", "--no-audit", "--prefix", ".")
    found = look(fetched("node-llama-cpp-3.21.1", *npm, "node-llama-cpp@3.21.1"), demo_model)
    assert [x.good for x in found] == [True, True] and "3.21.1" in found[0].found, found


def test_what_is_no_llama_cpp_is_said(demo_model: Path, tmp_path: Path) -> None:
    not_there, folder = look("no-such-program"), look(tmp_path)
    assert "does not exist" in not_there[0].found and "libggml-base.so" in not_there[0].cure
    assert "holds no libggml-base.so" in folder[0].found
    stranger = look(shutil.which("ls") or "/bin/ls")
    assert [x.good for x in stranger] == [True, False] and stranger[-1].cure == "give a program of llama.cpp"
    assert "is not a file" in look(_paths.lib_dir() / "llama-bench", tmp_path / "no.gguf")[0].found
    python = look(sys.executable)
    assert not python[0].good and "pip install llama-cpp-python" in python[0].cure


def test_a_model_that_is_damaged_is_told_by_the_program(demo_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(demo_model.read_bytes()[:100_000])
    found = look(_paths.lib_dir() / "llama-completion", broken)
    assert not found[-1].good and "it ended with status" in found[-1].found


def test_the_command_ends_with_1_where_something_is_broken(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "ggml_kvq.cli", "doctor", "--program"]
    done = subprocess.run([*argv, tmp_path], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "something is broken" in done.stdout

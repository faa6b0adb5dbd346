"""Every environment variable that the library reads stands in base/settings.inc and in docs/llama-cpp.md, and a value
that is none is told in one line.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, run_python
from ggml_kvq import KvqError, _paths
from ggml_kvq.launch import doctor, launcher

SOURCES = ROOT / "ggml-kvq"
ROWS = re.findall(
    r'^KVQ_SETTING\((\w+), "(\w+)", (TEXT|NUMBER|FILE), "([^"]+)"\)',
    (SOURCES / "base/settings.inc").read_text(),
    re.MULTILINE,
)
CLI = "import sys; from ggml_kvq.cli import main; sys.exit(main())"
COMPLETION = "import sys; from ggml_kvq.launch import launcher; sys.exit(launcher.llama_completion())"
OPENED = "import sys; from ggml_kvq import Model; Model(sys.argv[1], 'kivi', n_ctx=256, n_threads=1).close()"


def test_each_is_documented_and_used() -> None:
    text = (ROOT / "docs" / "llama-cpp.md").read_text()
    code = "".join(p.read_text() for p in SOURCES.rglob("*") if p.suffix in (".cpp", ".h", ".cu", ".cuh"))
    assert len(ROWS) == (SOURCES / "base/settings.inc").read_text().count("\nKVQ_SETTING(") > 10
    for row, name, _, what in ROWS:
        assert f"`{name}`" in text, f"docs/llama-cpp.md does not tell {name}: {what}"
        assert f"kvq_setting::{row}" in code, f"nobody reads {name}"


def test_nobody_else_reads_the_environment() -> None:
    files = [p for p in SOURCES.rglob("*") if p.suffix in (".cpp", ".h", ".cu", ".cuh") and "getenv" in p.read_text()]
    assert [p.name for p in files] == ["settings.h"]


def test_doctor_knows_them() -> None:
    assert {name for _, name, _, _ in ROWS if name.startswith("KVQ_")} <= doctor.READ
    assert {name for _, name, kind, _ in ROWS if kind == "NUMBER"} == set(doctor.NUMBERS)


def program(model: Path, **env: str) -> str:
    """What llama-completion says, started by itself."""
    argv = [str(_paths.program("llama-completion")), "-m", str(model), "-p", "a", "-n", "1", "-c", "256", "-no-cnv"]
    more = {"GGML_BACKEND_PATH": str(_paths.backend()), "KVQ_METHOD": "kivi", **env}
    done = subprocess.run(
        [*argv, "-dev", "KVQ0", "-fa", "on"], env={**os.environ, **more}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


@pytest.mark.parametrize("name", [name for _, name, kind, _ in ROWS if kind == "NUMBER"])
def test_a_number_that_is_none_is_told_once(name: str, demo_model: Path) -> None:
    """It was read as 0: KVQ_CUDA_GRAPHS=on turned recorded steps off, KVQ_FAR_LIMIT=abc left far rows no memory."""
    for value in ("on", "-1", "1 MiB", "99999999999"):
        said = run_python(OPENED, str(demo_model), env={name: value}).stderr
        assert said.count(f"{name}={value} is not used: write a whole number (") == 1, said
        assert "or unset it" in said
    for value in ("", "1"):
        assert name not in run_python(OPENED, str(demo_model), env={name: value}).stderr


def test_a_program_says_each_once(demo_model: Path) -> None:
    said = program(demo_model, KVQ_FAR_LIMIT="abc", KVQ_STATS_FILE=" ", KVQ_ISA="none-such", KVQ_QUIET="yes")
    lines = [line for line in said.splitlines() if line.startswith("ggml-kvq: KVQ_")]
    assert len(lines) == 4 and len({line.split("=")[0].split(" is ")[0] for line in lines}) == 4, lines
    assert any(line.startswith("ggml-kvq: KVQ_STATS_FILE is blank and not used: name a file") for line in lines)


def test_a_kernel_is_named_in_any_case_and_told_once_by_a_launcher(demo_model: Path) -> None:
    """KVQ_ISA=AVX2 was not available, and both the launcher and its program said so."""
    argv = ["-m", str(demo_model), "--kv-method", "kivi", "-p", "a", "-n", "1", "-c", "256", "-no-cnv"]
    said = run_python(COMPLETION, *argv, env={"KVQ_ISA": "Portable"}).stderr
    assert "kernels portable" in said and "KVQ_ISA" not in said
    said = run_python(COMPLETION, *argv, env={"KVQ_ISA": "none-such"}).stderr
    (line,) = [line for line in said.splitlines() if "KVQ_ISA" in line]
    assert "KVQ_ISA=none-such is not available on this CPU and not used: write one of" in line and "portable" in line


def test_a_blank_name_is_no_file(demo_model: Path) -> None:
    """A file named " " was written into the working folder."""
    argv = ["-m", str(demo_model), "--kv-method", "kivi"]
    for more, env, words in (
        ([], {"KVQ_STATS_FILE": " "}, "KVQ_STATS_FILE is blank; give a file"),
        (["--kv-stats-file", "\t"], {}, "--kv-stats-file has an empty value"),
    ):
        with pytest.raises(KvqError, match=words):
            launcher.command("llama-completion", [*argv, *more], env)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("KVQ_CONFIG", "/no/such.gguf", "BAD   KVQ_CONFIG: KVQ_CONFIG=/no/such.gguf is not a file; give a GGUF"),
        ("KVQ_CONFIG", str(ROOT), f"BAD   KVQ_CONFIG: KVQ_CONFIG={ROOT} is not a file; give a GGUF"),
        ("KVQ_MODEL", "/no/such.gguf", "BAD   KVQ_MODEL: /no/such.gguf is not a file"),
        ("KVQ_METHOD_DRAFT", "kiwi", "BAD   KVQ_METHOD_DRAFT: unknown method 'kiwi'"),
        ("KVQ_STATS_FILE", " ", "BAD   KVQ_STATS_FILE: KVQ_STATS_FILE is blank; give a file"),
        ("KVQ_QUIET", "yes", "note  KVQ_QUIET: yes is not used"),
        ("KVQ_CUDA_GRAPHS", "on", "note  KVQ_CUDA_GRAPHS: on is not used"),
        ("KVQ_CUDA_GRAPH", "0", "note  KVQ_CUDA_GRAPH: nothing reads this variable"),
        ("KVQ_ISA", "none-such", "note  KVQ_ISA: none-such is not available on this CPU and not used"),
    ],
)
def test_doctor_sees_what_a_variable_holds(name: str, value: str, words: str) -> None:
    """KVQ_CONFIG of a file that is not there was well."""
    done = run_python(CLI, "doctor", env={name: value})
    assert words in done.stdout and (done.returncode == 1 or words.startswith("note"))

"""Types (mypy, strict), style (ruff, clang-format) and size of the sources (pyproject.toml, .clang-format)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MADE = ("lattice_grids.h", "lattice_grids.py")  # written by scripts/make_grids.py
COLUMNS, LINES, FUNCTION = 120, 600, 120


def sources(*suffixes: str) -> list[Path]:
    folders = ("ggml-kvq", "python", "convert", "tests", "examples", "scripts", "cmake")
    found = [p for f in folders for s in suffixes for p in sorted((ROOT / f).rglob("*" + s)) if p.name not in MADE]
    assert found, suffixes
    return found


TOOLS = {"ruff": ["ruff", "check", "--no-cache", "."], "mypy": ["mypy", "--no-incremental"]}
TOOLS["ruff format"] = ["ruff", "format", "--no-cache", "--check", "."]


@pytest.mark.parametrize("tool", TOOLS)
def test_clean(tool: str) -> None:
    r = subprocess.run([sys.executable, "-m", *TOOLS[tool]], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-2000:]


def test_clang_format() -> None:
    files = [str(p) for p in sources(".h", ".cpp", ".cu", ".cuh")]
    tool = str(Path(sys.executable).parent / "clang-format")
    r = subprocess.run([tool, "--dry-run", "-Werror", *files], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert r.returncode == 0, f"run clang-format -i on these files\n{r.stderr[:3000]}"


def test_lines_and_files_are_short() -> None:
    wide, long = [], []
    for p in sources(".h", ".cpp", ".cu", ".cuh", ".py"):
        lines = p.read_text().splitlines()
        wide += [f"{p.relative_to(ROOT)}:{i}" for i, line in enumerate(lines, 1) if len(line) > COLUMNS]
        long += [f"{p.relative_to(ROOT)}: {len(lines)} lines"] * (len(lines) > LINES)
    assert not wide, f"lines over {COLUMNS} columns: {wide}"
    assert not long, f"files over {LINES} lines: {long}"


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of every function. C++: what has a "(" in its head, and begins and ends in column 0."""
    text = path.read_text()
    if path.suffix == ".py":
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        yield from ((n.name, (n.end_lineno or 0) - n.lineno + 1) for n in nodes)
        return
    for m in re.finditer(
        r"^(?!struct|class|namespace|enum|union|#|//)\S[^;{}]*\([^{};]*\{\n(?:.*\n)*?\}$", text, re.MULTILINE
    ):
        yield m.group().split("(")[0].split()[-1], m.group().count("\n") + 1


def test_functions_are_short() -> None:
    kernels = [p for p in sources(".cpp", ".h") if p.parent.name == "cpu" or "native" in p.parts]
    files = [p for p in sources(".py", ".cpp", ".h") if p not in kernels]
    found = [(n, f"{p.relative_to(ROOT)}: {name}, {n} lines") for p in files for name, n in functions(p)]
    assert len(found) > 1000
    assert not [text for n, text in found if n > FUNCTION]

"""Types (mypy, strict), style (ruff, clang-format) and size of the sources (pyproject.toml, .clang-format)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MADE = ("lattice_grids.h", "lattice_grids.py")  # written by scripts/make_grids.py
COLUMNS, LINES = 120, 600


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

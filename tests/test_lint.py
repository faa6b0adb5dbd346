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


def test_prose_is_wrapped() -> None:
    """Of pages: all but tables, code and README.md, whose lines are counted instead (tests/test_readme.py)."""
    wide = []
    for p in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("ggml-kvq/**/*.md"),
    ]:
        code = False
        for i, line in enumerate(p.read_text().splitlines(), 1):
            code ^= line.lstrip().startswith("```")
            prose = not code and not line.startswith(("|", "    ")) and p != ROOT / "README.md"
            if prose and len(line) > COLUMNS and " " in line.strip()[:COLUMNS]:
                wide.append(f"{p.relative_to(ROOT)}:{i}")
    assert not wide, f"lines over {COLUMNS} columns: {wide}"


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of every function. C++: what has a "(" in its head, and begins and ends in column 0."""
    text = path.read_text()
    if path.suffix == ".py":
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        yield from ((n.name, (n.end_lineno or 0) - n.lineno + 1) for n in nodes)
        return
    for m in re.finditer(
        r"^(?!struct|class|namespace|enum|union|public:|private:|protected:|#|//)\S[^;{}]*\([^{};]*\{\n(?:.*\n)*?\}$",
        text,
        re.MULTILINE,
    ):
        head = re.sub(r"//.*", "", m.group().split("{")[0])
        names = [n for n in re.findall(r"([\w:~]+)\(", head) if n != "__launch_bounds__"]
        kernels = [n for n in names if n.endswith("_kernel")]
        yield (kernels or names or ["?"])[0], m.group().count("\n") + 1


#: Functions that may be longer than FUNCTION: how long at most, and why. A kernel holds its state in registers, so a
#: part of it cannot become a function without passing all of that; a native test walks one list of cases.
LONG = {
    "ggml-kvq/cuda/walk/attend_bytes.cuh": {"bytes_kernel": 520},
    "ggml-kvq/cuda/walk/attend_decode.cuh": {"decode_kernel": 560},
    "ggml-kvq/cuda/walk/attend_mixed.cuh": {"mixed_kernel": 320},
    "ggml-kvq/cuda/prompt/attend_rows.cu": {"rows_kernel": 240},
    "ggml-kvq/cuda/walk/attend_short.cuh": {"short_kernel": 340},
    "ggml-kvq/cuda/prompt/attend_tiles.cuh": {"tiles_kernel": 180},
    "ggml-kvq/cuda/walk/decode_picked.cuh": {"sum_picked": 150},
    "ggml-kvq/cuda/device/device.cu": {"kvq_cuda_device::attend": 130},  # one chain of choices, in their order
    "ggml-kvq/cuda/far/far_pick.cu": {"pick_kernel": 220},
    "ggml-kvq/cuda/policy/fold.cu": {"sum_kernel": 170},
    "tests/native/cuda_attention.h": {"check_attention": 210, "attention_matrix": 130},
    "tests/native/cuda_bytes.h": {"bytes_attention": 150},
    "tests/native/cuda_far.h": {"check_far": 250},
    "tests/native/cuda_policies_attention.h": {"check_attention": 260},
    "tests/native/test_cuda.cpp": {"check_store": 130, "main": 140},
    "tests/native/test_cuda_policies.cpp": {"main": 170},
    "tests/native/test_graph_door.cpp": {"run": 190},
    "tests/native/test_mrope.cpp": {"cache": 130},
}


def test_functions_are_short() -> None:
    """Of all sources, with the exceptions that LONG states. An exception that is not needed any more is taken out."""
    found = {
        (str(p.relative_to(ROOT)), name): n
        for p in sources(".py", ".cpp", ".h", ".cu", ".cuh")
        for name, n in sorted(functions(p), key=lambda f: f[1])
    }
    assert len(found) > 3000
    may = {(file, name): n for file, names in LONG.items() for name, n in names.items()}
    wrong = [f"{file}: {name}, {n} lines" for (file, name), n in found.items() if n > may.get((file, name), FUNCTION)]
    assert not wrong, "\n".join(wrong)
    stale = [key for key in may if found.get(key, 0) <= FUNCTION]
    assert not stale, f"no longer exceptions: {stale}"

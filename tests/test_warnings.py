"""GCC and clang find nothing to warn of in our C++ sources, with -Wall -Wextra -Werror (cmake: KVQ_WERROR)."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "ggml-kvq"
#: gguf/ and host/ are compiled with ggml's headers by the build (test_native.py, KVQ_WERROR); cuda/ by nvcc.
FOLDERS = ("cache", "cpu", "engine", "methods", "policy", "store", "types")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, *(f"-mavx512{x}" for x in ("f", "bw", "dq", "vl", "vnni"))]
ISA = {
    "kernels_avx2": AVX2,
    "kernels_avx512": AVX512,
    "kernels_amx": [*AVX512, "-mamx-tile", "-mamx-int8", "-DKVQ_HAVE_AMX=1"],
}
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{SOURCES}", f"-I{SOURCES / 'include'}"]


def sources() -> list[Path]:
    found = [p for folder in FOLDERS for p in sorted((SOURCES / folder).glob("*.cpp"))]
    other = "neon" if platform.machine() == "x86_64" else "(avx|amx)"
    found = [p for p in found if not re.search(rf"_{other}\d*$", p.stem)]
    assert len(found) > 60
    return found


def warned(compiler: str, path: Path, *more: str) -> str:
    argv = [compiler, *FLAGS, *ISA.get(path.stem, []), *more, str(path)]
    return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=300).stderr


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_no_warning(compiler: str, tmp_path: Path) -> None:
    found = shutil.which(compiler)
    if found is None:
        pytest.skip(f"there is no {compiler} here")
    more = ["-fopenmp"]
    if compiler == "clang++":  # Debian's clang comes without omp.h
        (tmp_path / "omp.h").write_text(
            'extern "C" int omp_get_thread_num(void);\nextern "C" int omp_get_max_threads(void);'
        )
        more.append(f"-isystem{tmp_path}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = list(pool.map(lambda path: warned(found, path, *more), sources()))
    assert not any(said), "".join(said)[:5000]


def test_a_warning_is_seen(tmp_path: Path) -> None:
    bad = tmp_path / "bad.cpp"
    bad.write_text("int f(int unused) { return 0; }\n")
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no compiler")
    assert "unused" in warned(compiler, bad)

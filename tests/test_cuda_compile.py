"""Every CUDA source compiles, on machines without a GPU too. nvcc is not needed to use the CPU build: without it this is skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "ggml-kvq"
NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc")
SOURCES = sorted((ROOT / "cuda").glob("*.cu"))


def test_there_are_kernels() -> None:
    assert {"seal.cu", "seal_lattice.cu", "attend_decode_128.cu", "device.cu"} <= {p.name for p in SOURCES}


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_compiles(source: Path, tmp_path: Path) -> None:
    """One architecture, the oldest that the build targets; ptxas reads the inline assembly."""
    out = tmp_path / "out.o"
    command = [str(NVCC), "-std=c++17", "-arch=sm_80", "-Xptxas", "-O1", f"-I{ROOT / 'include'}", "-c", str(source), "-o", str(out)]
    if source.name.startswith("seal"):
        command.insert(1, "-fmad=false")
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "warning" not in run.stderr, run.stderr[-2000:]
    assert out.stat().st_size > 0

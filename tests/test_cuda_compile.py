"""Every CUDA source compiles, on machines without a GPU too. nvcc is not needed to use the CPU build: without it this is skipped."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "ggml-kvq"
NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc")
SOURCES = sorted((ROOT / "cuda").glob("*.cu"))


def test_there_are_kernels() -> None:
    assert {"seal.cu", "seal_lattice.cu", "attend_decode_128.cu", "device.cu"} <= {p.name for p in SOURCES}


OTHERS = {  # one file each for what else the build targets; all of them with KVQ_CUDA_ARCHS="86 89 90 100 120"
    "86": "attend_short_lattice_wide.cu",
    "89": "attend_mixed_128.cu",
    "90": "attend_short_64.cu",
    "100": "seal_mixed.cu",
    "120": "attend_short_wide.cu",
}
ALL = os.environ.get("KVQ_CUDA_ARCHS", "").split()
CASES = [("80", source) for source in SOURCES] + [(arch, source) for arch in OTHERS for source in SOURCES if arch in ALL or source.name == OTHERS[arch]]


def architectures() -> set[str]:
    """What this nvcc compiles for."""
    run = subprocess.run([str(NVCC), "--list-gpu-arch"], capture_output=True, text=True, check=True)
    return set(re.findall(r"compute_(\d+)", run.stdout))


def resources(text: str) -> list[tuple[str, int, int, int]]:
    """Of ptxas -v: kernel, registers, bytes of static shared memory, bytes of spills."""
    found = []
    for part in text.split("Compiling entry function ")[1:]:
        used = re.search(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", part)
        spilled = re.search(r"(\d+) bytes spill stores", part)
        assert used and spilled, part[:500]
        found.append((part.split("'")[1], int(used[1]), int(used[2] or 0), int(spilled[1])))
    return found


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize(("arch", "source"), CASES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_compiles(arch: str, source: Path, tmp_path: Path) -> None:
    """ptxas reads the inline assembly. Registers and static shared memory fit every card of the architecture: at most 255 registers, 48 KB
    a block before a kernel asks for more. What is asked for is held to each card's limit where it is launched (test_cuda_on_host.py)."""
    if arch not in architectures():
        pytest.skip(f"this nvcc does not know sm_{arch}")
    out = tmp_path / "out.o"
    command = [str(NVCC), "-std=c++17", f"-arch=sm_{arch}", "-Xptxas", "-O1,-v", f"-I{ROOT / 'include'}", "-c", str(source), "-o", str(out)]
    if source.name.startswith("seal"):
        command.insert(1, "-fmad=false")
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "warning" not in run.stderr, run.stderr[-2000:]
    assert out.stat().st_size > 0
    kernels = resources(run.stderr)
    assert kernels or "__global__" not in source.read_text(), "ptxas names no kernel"
    for name, registers, shared, spilled in kernels:
        print(f"sm_{arch:<4} {registers:>4} registers {shared:>6} bytes static shared {spilled:>4} spilled  {name}")
        assert registers <= 255, name
        assert shared <= 48 << 10, name
        # blocks of up to 12 warps are launched (decode_stage.cuh); what has more registers says so with its launch bounds
        assert spilled <= 512, f"{name} spills {spilled} bytes"

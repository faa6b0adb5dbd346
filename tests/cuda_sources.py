"""The CUDA sources that a build compiles: those of ggml-kvq/cuda, and those that CMake writes of walk/instances.inc."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def write(tree: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Has the instances of a tree written into the folder `out`; no build is configured for it."""
    tool = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    assert tool, "cmake is not installed: pip install cmake"
    command = [tool, f"-DOUT={out}", "-P", str(tree / "cmake" / "cuda_instances.cmake")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def instances(out: Path) -> list[Path]:
    """Those of this tree, written into the folder `out`."""
    done = write(ROOT, out)
    assert done.returncode == 0, done.stderr
    return sorted(out.glob("*.cu"))

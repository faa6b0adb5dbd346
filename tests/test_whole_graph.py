"""On the CPU all of a graph is ours to compute (host/whole_graph.cpp): one split, one team of threads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.mark.parametrize("method", ["kivi", "minikv", "specache"])
def test_a_token_is_one_split(demo_model: Path, method: str) -> None:
    """It was a split before each attention and one behind it: 25 for 12 layers."""
    launcher = Path(sys.executable).parent / "llama-completion"
    argv = [str(launcher), "-m", str(demo_model), "--kv-method", method]
    argv += ["-p", "The file", "-n", "4", "-no-cnv", "-v", "-c", "512"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    splits = re.findall(r"\bsplits = (\d+)", done.stderr + done.stdout)
    assert splits and set(splits) == {"1"}, splits

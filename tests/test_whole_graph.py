"""On the CPU all of a graph is ours to compute (host/whole_graph.cpp): one split, one team of threads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from ggml_kvq import _paths


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


def test_a_model_with_no_layer_on_it_is_not_cut(demo_model: Path) -> None:
    """Norms stay with their layer's device: when ours took the other nodes, a graph of 12 layers had 25 splits."""
    env = dict(os.environ, GGML_BACKEND_PATH=str(_paths.backend()), LD_LIBRARY_PATH=str(_paths.lib_dir()))
    argv = [
        str(_paths.program("llama-bench")),
        "-m",
        str(demo_model),
        *["-p", "0", "-n", "2", "-r", "1", "-t", "2", "-ngl"],
    ]
    for layers, where in ("0", "CPU"), ("99", "KVQ0"):
        done = subprocess.run([*argv, layers, "-v"], capture_output=True, text=True, check=False, timeout=120, env=env)
        text = done.stderr + done.stdout
        assert done.returncode == 0, text[-2000:]
        assert f"assigned to device {where}" in text, layers
        assert set(re.findall(r"\bsplits = (\d+)", text)) == {"1"}, layers

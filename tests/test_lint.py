"""Types (mypy, strict) and style (ruff) of the Python sources, as configured in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("tool", [["ruff", "check", "--no-cache", "."], ["mypy", "--no-incremental"]], ids=lambda t: t[0])
def test_clean(tool: list[str]) -> None:
    r = subprocess.run([sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-2000:]

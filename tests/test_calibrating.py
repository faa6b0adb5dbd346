"""Calibration that met what it should not: a folder with other files, a model that changed, a second run, models of
unusual shapes. Each of these lost files or work, gave figures of nothing, or ended in a trace.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ggml_kvq import cli

TEXT = "The register file holds sixteen words. Each word is read by the decoder before the next cycle begins. " * 60
SMALL = ["--sequences", "2", "--length", "64", "-t", "1"]


@pytest.fixture
def folder(demo_model: Path, tmp_path: Path) -> Path:
    """A model and a text."""
    shutil.copy(demo_model, tmp_path / "m.gguf")
    (tmp_path / "t.txt").write_text(TEXT)
    return tmp_path


def calibrate(folder: Path, *more: str, command: str = "calibrate") -> int:
    files = ["-m", str(folder / "m.gguf"), "-f", str(folder / "t.txt"), "-o", str(folder / "out.gguf")]
    return cli.main([command, *files, *SMALL, *more])


def test_other_files_in_the_work_folder_stay(folder: Path) -> None:
    """--work DIR was emptied before the run and removed behind it."""
    work = folder / "work"
    (work / "sub").mkdir(parents=True)
    (work / "sub" / "mine.txt").write_text("x")
    partial = folder / "out.gguf.partial"  # where rows lie without --work
    partial.mkdir()
    (partial / "mine.txt").write_text("x")
    assert calibrate(folder, "--predictor", "k", "--work", str(work)) == 0
    assert calibrate(folder, "--predictor", "k") == 0
    assert [p.name for p in work.rglob("*")] == ["sub", "mine.txt"]
    assert [p.name for p in partial.iterdir()] == ["mine.txt"]

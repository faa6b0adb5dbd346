"""Calibration that met what it should not: a folder with other files, a model that changed, a second run, models of
unusual shapes. Each of these lost files or work, gave figures of nothing, or ended in a trace.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import LLAMA_FIELDS
from ggml_kvq import cli, gguf_header, info, memory, plotting
from ggml_kvq.calibrate import capture, files
from ggml_kvq.evaluate import specs

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


def hybrid(path: Path) -> Path:
    """Eight layers of which every fourth has attention, as Qwen3.5 writes it: one number of heads for all."""
    writer = gguf.GGUFWriter(str(path), "qwen35")
    for key, value in LLAMA_FIELDS.items():
        if key.startswith("llama."):
            writer.add_uint32(key.replace("llama", "qwen35"), 8 if key.endswith("block_count") else value)
    for il in range(8):
        names = ("attn_k", "attn_v") if il % 4 == 3 else ("attn_qkv", "ssm_out")
        for name in names:
            writer.add_tensor(f"blk.{il}.{name}.weight", np.ones((128, 256), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_layers_without_attention_are_not_calibrated(tmp_path: Path) -> None:
    """All layers were asked for rows ("layer 0 has no cache to read"), and a preset was scaled to eight layers, which
    the model with two refuses (kq=6).
    """
    model = hybrid(tmp_path / "m.gguf")
    assert capture.layers(model) == [(3, 2, 64, 64), (7, 2, 64, 64)]
    out = tmp_path / "x.gguf"
    assert cli.main(["calibrate", "--method", "xquant", "-m", str(model), "-o", str(out)]) == 0
    assert max(value for key, value in files.read_sidecar(out)[0].items() if key[-2:] in ("kq", "vq", "km", "vm")) == 2
    f16 = plotting.memory_rows(model, [specs.parse("upstream:f16")], [1024])[0]
    assert f16["bytes_total"] == 2 * 1024 * 2 * 2 * 64 * 2


def test_presets_are_planned_for_the_layers_with_attention(tmp_path: Path) -> None:
    """xquant's preset of a hybrid model was planned for all layers: 7.10 bits where the cache that is made has 6.60."""
    model = hybrid(tmp_path / "m.gguf")
    header = gguf_header.read(model, tensors=True)
    two_of_two = [p.bits for p in info.plans(header, 512, [specs.parse("xquant:kq=0,vq=2,km=2,vm=2")])]
    assert [p.bits for p in info.plans(header, 512, [specs.parse("xquant")])] == two_of_two
    assert plotting.memory_rows(model, [specs.parse("xquant")], [512])[0]["bits"] == two_of_two[0]
    facts = memory.model(model)
    assert facts and facts.n_layer == 2

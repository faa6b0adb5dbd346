"""scripts/real_models.py, with the demo model in the place of a pretrained one."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT
from ggml_kvq import Model, default_means, named
from ggml_kvq.evaluate import results, specs

sys.path.insert(0, str(ROOT / "scripts"))
import real_models

TEXT = ROOT / "docs" / "limits.md"


@pytest.fixture
def folder(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """models/any.gguf is what `smollm2` names here; its windows are short."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "any.gguf").symlink_to(demo_model)
    known = replace(
        named.find("smollm2"), file="own.gguf", size=demo_model.stat().st_size, sha256=named.sha256(demo_model)
    )
    monkeypatch.setattr(named, "MODELS", (known,))
    monkeypatch.setattr(real_models, "TEXTS", {"smollm2": real_models.Text(256, 16, 1)})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    argv = ("real_models.py", "smollm2", "--model-dir", "models", "--out-dir", "rows", *argv)
    monkeypatch.setattr(sys, "argv", list(argv))
    return real_models.main()


def test_rows_are_evals_and_are_not_measured_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only = [x for name in ("f16", "auto-2.25", "auto-2.25-alone", "specache-2") for x in ("--only", name)]
    assert run(monkeypatch, "--text", str(TEXT), *only) == 0
    rows = {r["key"]["cache"]: r for r in results.read("rows/real-smollm2.jsonl")}
    assert list(rows) == ["f16", "auto-2.25", "auto-2.25-alone", "specache-2"]
    for row in rows.values():
        key = row["key"]
        assert (key["model"], key["n_ctx"], key["n_ubatch"], key["swa_full"]) == ("own.gguf", 256, 16, False)
        assert row["n_ctx_long"] == 131072 and row["command"].startswith("real_models.py smollm2 ")
    assert rows["f16"]["bits_long"] == 16
    assert 2.0 < rows["auto-2.25"]["bits_long"] <= 2.25 < rows["auto-2.25"]["bits"]
    assert 2.0 < rows["specache-2"]["bits_long"] < 2.4 and 15 < rows["specache-2"]["bits_far_long"] <= 16
    assert rows["auto-2.25"]["kld_mean"] < rows["auto-2.25-alone"]["kld_mean"], "measured means were not left out"
    capsys.readouterr()
    assert run(monkeypatch, "--text", str(TEXT), *only) == 0
    assert "reused 4 rows" in capsys.readouterr().err
    assert len(results.read("rows/real-smollm2.jsonl")) == 4
    assert not list(folder.glob("rows/*.base"))


def test_tasks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_models, "LENGTHS", (300,))
    monkeypatch.setattr(real_models, "SAMPLES", 2)
    monkeypatch.setattr(Model, "chat_prompt", lambda self, messages: messages[0]["content"] + "\n")
    assert run(monkeypatch, "--tasks", "--only", "f16", "--only", "kivi-4") == 0
    keys = [r["key"] for r in results.read("rows/real-smollm2.jsonl")]
    assert {(k["cache"], k["task"]) for k in keys} == {(c, t) for c in ("f16", "kivi-4") for t in real_models.TASKS}
    assert all(k["chat"] is True and k["swa_full"] is False for k in keys)


def test_refusals(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--text", str(TEXT), "--only", "nosuch") == 2
    assert "--only nosuch is no row of the table; choose from f16, floor" in capsys.readouterr().err
    monkeypatch.setattr(named, "MODELS", (replace(named.MODELS[0], sha256="0" * 64),))
    assert run(monkeypatch, "--text", str(TEXT)) == 2
    err = capsys.readouterr().err
    assert "no .gguf file in models is own.gguf" in err and err.count("\n") == 1


@pytest.mark.parametrize("cache", real_models.CACHES)
def test_every_row_is_a_cache(cache: str) -> None:
    spec = specs.parse(cache)
    spec.check()
    assert spec.label == real_models.label(cache)


def test_data_measured_at_first_use_and_none(demo_model: Path) -> None:
    """aqua asks for data; those of the package's text will do. `@none` is a program without the launcher."""
    measured = specs.parse("aqua:predictor=bias@measured")
    assert measured.means(demo_model) == str(default_means.path_of(demo_model))
    with measured.open(demo_model, n_ctx=512, n_threads=1) as m:
        assert "channel means" in m.load_line
    with specs.parse("auto:bits=2.25@none").open(demo_model, n_ctx=512, n_threads=1) as m:
        assert "channel means are taken off" not in m.load_line
    with specs.parse("auto:bits=2.25").open(demo_model, n_ctx=512, n_threads=1) as m:
        assert "channel means are taken off" in m.load_line

"""Model cards: only figures that were measured of this model and these data, with what repeats them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ggml_kvq import cli
from ggml_kvq.calibrate import files, means
from ggml_kvq.evaluate import results

DEMO = Path(__file__).resolve().parent.parent / "models" / "kvq-demo-q8_0.gguf"
TEXT = "The register file holds sixteen words. Each word is read by the decoder before the next cycle begins. " * 60


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cards") / "demo.kvq.gguf"
    fitted = means.fit(DEMO, TEXT, n_sequences=2, length=256, n_threads=2)
    files.write_sidecar(out, files.fields(DEMO, fitted, 4), files.arrays(fitted))
    return out


@pytest.fixture(scope="module")
def rows(sidecar: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ggml-kvq eval really writes."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "text.txt").write_text(TEXT)
    argv = ["eval", "-m", str(DEMO), "-f", str(folder / "text.txt"), "-c", "256", "-ub", "32", "--chunks", "2"]
    argv += ["--cache", f"aqua@{sidecar}", "--cache", "upstream:q8_0", "--cache", "kivi", "-o", str(folder / "r.jsonl")]
    assert cli.main([*argv, "--quiet"]) == 0
    return folder / "r.jsonl"


def test_a_card_says_what_was_measured(sidecar: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "demo-aqua.gguf"
    assert cli.main(["embed", str(DEMO), str(sidecar), str(out), "--card", str(rows)]) == 0
    text = (tmp_path / "demo-aqua.card.md").read_text()
    assert out.exists() and sorted(p.name for p in tmp_path.iterdir()) == ["demo-aqua.card.md", "demo-aqua.gguf"]
    [aqua] = [r for r in results.read(rows) if r.get("method") == "aqua"]
    for needed in (
        "| method | `aqua`, predictor bias |",
        f"hash {aqua['key']['text_hash']}",
        f"{aqua['bits']:.2f}",
        f"{aqua['kld_mean']:.4f}",
        f"{aqua['ppl']:.4g}",
        results.fingerprint(DEMO),
        results.fingerprint(sidecar),
        f"    {aqua['command']}",
        "llama-cli -m demo-aqua.gguf",
        "| q8_0 ",
    ):
        assert needed in text, needed
    assert "kivi" not in text.split("## Use")[0]  # measured, but no part of this file
    assert "{" not in text


def test_figures_of_other_data_or_models_are_no_figures(
    sidecar: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.gguf"
    for change in ({"model_hash": "0" * 16}, {"config": "f" * 16}, {"kind": "drift"}):
        other = tmp_path / "other.jsonl"
        changed = [r | {"key": r["key"] | change} for r in results.read(rows)]
        other.write_text("".join(json.dumps(r) + "\n" for r in changed))
        assert cli.main(["embed", str(DEMO), str(sidecar), str(out), "--card", str(other)]) == 2
        said = capsys.readouterr().err
        assert "no row of a text with aqua" in said and "ggml-kvq eval -m" in said and said.count("\n") == 1
        assert not out.exists() and not (tmp_path / "out.card.md").exists()


def test_rows_of_two_texts_are_not_mixed(
    sidecar: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = tmp_path / "two.jsonl"
    again = [r | {"key": r["key"] | {"text": "other.txt", "text_hash": "1" * 16}} for r in results.read(rows)]
    two.write_text(rows.read_text() + "".join(json.dumps(r) + "\n" for r in again))
    assert cli.main(["embed", str(DEMO), str(sidecar), str(tmp_path / "o.gguf"), "--card", str(two)]) == 2
    assert "several texts or windows (other.txt at 256, text.txt at 256)" in capsys.readouterr().err

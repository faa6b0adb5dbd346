"""Tables of README.md and docs/: those of the committed rows, and what scripts/real_tables.py makes of new ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from ggml_kvq.evaluate import results

sys.path.insert(0, str(ROOT / "scripts"))
import real_models
import real_tables
import update_results


def test_committed_tables_are_those_of_the_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["update_results.py", "--check"])
    assert update_results.main() == 0, capsys.readouterr().err


def row(name: str, cache: str, kld: float, bits: float, **key: Any) -> results.Row:
    text = real_models.TEXTS[name]
    sizes = {"n_ctx": text.n_ctx, "n_ubatch": text.n_ubatch, "chunks": text.chunks, "text": "t.txt", "model": "m.gguf"}
    figures = {"kld_mean": kld, "kld_p99": 10 * kld, "ppl": 7.0 + kld, "same_top": 0.9, "bits": bits + 0.8}
    return {
        "key": {"kind": "text", "cache": cache, **sizes, **key},
        "method": cache.split("-")[0],
        "bits_long": bits,
        "bits_no_window": bits,
        "n_ctx_long": 131072,
        "machine": "a machine",
        "devices": ["KVQ0: ggml-kvq KV cache, some device"],
        **figures,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows of all caches of each model. The second is refused by a cache; the third is long, with a bad q4_0."""
    for i, name in enumerate(real_models.TEXTS):
        rows = [
            row(name, real_models.label(c), 0.01 * (n + 1) * (i + 1), 16 - 0.5 * n - 0.02 * i)
            for n, c in enumerate(real_models.CACHES)
        ]
        if i == 1:
            rows[4] = {"key": rows[4]["key"], "refused": "for a reason"}
        if i == 2:
            next(r for r in rows if r["key"]["cache"] == "q4_0")["ppl"] = 6320.4
            rows += [row(name, "q4_0", 2.5, 4.5, n_ctx=n, n_ubatch=512, chunks=1) for n in (16384, 32768)]
        rows[-1]["bits_far_long"] = 15.97
        rows.append(row(name, "q4_0", 99.0, 4.5, chunks=1))  # another measurement
        (tmp_path / f"real-{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return tmp_path


def test_the_table_of_all_models(folder: Path) -> None:
    models = real_tables.read(folder)
    assert real_tables.complete(models)
    text = real_tables.readme(models)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    assert lines[0] == ["cache", "bits", *real_tables.SHORT.values()]
    by = {cells[0]: cells for cells in lines[2:]}
    assert len(by) == len(real_tables.README_CACHES) and "99" not in text
    assert by["q8_0"] == ["q8_0", "14.94 - 15.00", "0.0300", "0.0600", "0.0900", "0.1200"]
    assert by["q4_0 with our f16 window, simulated"][3] == "refused"
    bits = [float(cells[1].split(" - ")[-1].split(" + ")[0]) for cells in lines[2:]]
    assert bits == sorted(bits, reverse=True)
    assert by["`specache`"][1].endswith("+ 16 far")
    text = " ".join(text.split("\n\n")[-1].split())
    assert text.startswith("Beside llama.cpp's q4_0 of 4.5 bits: `auto` 2.75 and `auto` 2.25 lose more on SmolLM2")
    assert text.endswith(" q4_0 breaks Qwen2.5 Coder 0.5B: perplexity 6320, with f16 7.03, with `auto` 2.25 7.54.")


def test_a_table_lacks_nothing(folder: Path) -> None:
    """README.md keeps its table until every model has every row."""
    path = folder / "real-gemma3.jsonl"
    path.write_text("".join(line for line in path.open() if '"auto-2.25"' not in line))
    assert not real_tables.complete(real_tables.read(folder))
    path.unlink()
    assert list(real_tables.read(folder)) == ["smollm2", "qwen2.5-coder", "qwen2.5-coder-1.5b"]
    assert not real_tables.complete(real_tables.read(folder))


def test_the_page_and_a_frontier_for_each_model(folder: Path, tmp_path: Path) -> None:
    models = real_tables.read(folder)
    page = "\n\n".join(real_tables.page(models, update_results.retrieval_tables))
    for words in ("16384 tokens", "img/frontier-gemma3.png", "q4_0-sim: for a reason", "some device", "4096 (Gemma 3"):
        assert words in page, words
    assert page.index("## Pretrained models") == 0 and real_tables.page({}, update_results.retrieval_tables) == []
    for name, rows in models.items():
        real_tables.draw(name, rows, tmp_path)
        assert (tmp_path / f"frontier-{name}.png").stat().st_size > 10000
        assert "131072 tokens" in (tmp_path / f"frontier-{name}.svg").read_text()

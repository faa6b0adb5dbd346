"""`ggml-kvq plan`: the contexts that it names fit, longer ones do not; the table in docs/fits.md is what it prints."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LLAMA_FIELDS, ROOT
from ggml_kvq import Model, cli, memory
from ggml_kvq.evaluate import specs
from ggml_kvq.launch import fits

GIB = 1 << 30
SPECS = [specs.parse(text) for text in fits.CACHES]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_table_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--markdown")
    assert code == 0 and len(out.splitlines()) == 2 + len(fits.KNOWN) * len(fits.MEMORIES)
    for page in (ROOT / "docs" / "fits.md", ROOT / "README.md"):
        found = re.search(r"<!-- fits -->\n(.*?)<!-- /fits -->", page.read_text(), re.DOTALL)
        assert found and found[1] == out, "run: python scripts/update_results.py"
    cells = [cell.strip() for cell in next(x for x in out.splitlines() if "Llama 3.1 8B Q4_K_M, 8G" in x).split("|")]
    words = f"Llama 3.1 8B in 8 GB: {cells[2]} tokens with f16, {cells[4]} with q4_0, {cells[6]} with `--kv-bits 2.75`"
    assert words in (ROOT / "docs" / "index.md").read_text()


def test_the_table_of_large_models(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--large", "--markdown")
    assert code == 0 and len(out.splitlines()) == 2 + len(fits.LARGE) * len(fits.MEMORIES_OF_LARGE)
    found = re.search(
        r"<!-- large fits -->\n(.*?)<!-- /large fits -->", (ROOT / "docs" / "fits.md").read_text(), re.DOTALL
    )
    assert found and found[1] == out, "run: python scripts/update_results.py"


@pytest.mark.parametrize("known", fits.LARGE, ids=lambda k: k.name)
def test_cards_share_the_layers(known: fits.Known) -> None:
    """By hand: of n layers and the output a card of two holds half, rounded up: the cache of that many layers."""
    layers, spec, gib = known.facts.n_layer, SPECS[0], 24
    n = layers + 1
    most = {33: 17, 65: 33, 81: 41}[n]
    got = fits.longest(known, spec, gib * GIB, n_cards=2)
    plan, room = fits.planner(spec, known.facts.n_layer), (gib - 1) * GIB
    assert 0 < got <= known.facts.n_ctx_train
    for n_ctx, holds in ((got, True), (got + memory.STEP, got == known.facts.n_ctx_train)):
        need = memory.need(known.facts, plan, n_ctx)
        assert (need.weights * most / n + need.cache * most / layers + need.mask <= room) == holds
    assert fits.longest(known, spec, gib * GIB) < got or got == known.facts.n_ctx_train


def test_a_number_of_cards_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert [fits.memory_of(x).n_cards for x in ("12G", "2x12G", "4 x 8 GiB")] == [1, 2, 4]
    code, _, err = run(capsys, "--memory", "0x12G")
    assert code == 2 and "--memory 0x12G is no size" in err


def test_the_shapes_in_the_docs() -> None:
    text = (ROOT / "docs" / "fits.md").read_text()
    for known in (*fits.KNOWN, *fits.LARGE):
        facts = known.facts
        _, heads, size, _ = (facts.full or facts.windowed)[0]
        row = re.search(rf"^\| {re.escape(known.name.removesuffix(' Q4_K_M'))} \|(.*)\|$", text, re.MULTILINE)
        assert row
        cells = [cell.strip() for cell in row[1].split("|")]
        assert cells[0].split(",")[0] == str(facts.n_layer) and cells[1:3] == [str(heads), str(size)]
        assert cells[3].split()[0] == str(facts.n_ctx_train) and cells[4] == f"{facts.weights / 1e9:.2f} GB"
        assert len(facts.full) + len(facts.windowed) == facts.n_layer
        if facts.windowed:
            assert cells[0].endswith(f"of which {len(facts.windowed)} see {facts.window} tokens")


def test_f16_by_hand() -> None:
    """Llama 3.1 8B: 128 KiB a token, and a mask of 1 KiB a cell."""
    known = fits.KNOWN[0]
    room = 8 * GIB - fits.RESERVE - known.facts.weights
    assert fits.longest(known, SPECS[0], 8 * GIB) == room // (129 * 1024) // 256 * 256


@pytest.mark.parametrize("known", fits.KNOWN, ids=lambda k: k.name)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.label)
def test_no_longer_context_fits(known: fits.Known, spec: specs.CacheSpec) -> None:
    plan, most = fits.planner(spec, known.facts.n_layer), known.facts.n_ctx_train
    before = 0
    for n_gib in (6, 8, 12, 24):
        got = fits.longest(known, spec, n_gib * GIB)
        assert before <= got <= most
        if got:
            assert memory.need(known.facts, plan, got).total + fits.RESERVE <= n_gib * GIB
        if got < most:
            assert memory.need(known.facts, plan, got + memory.STEP).total + fits.RESERVE > n_gib * GIB
        before = got
    assert before == most


def test_fewer_bits_hold_more() -> None:
    by = {s.label: fits.longest(fits.KNOWN[0], s, 8 * GIB) for s in SPECS}
    assert by["f16"] < by["q8_0"] < by["q4_0"] < by["auto-4.25"] < by["auto-2.75"] <= by["auto-2.25"]


@pytest.mark.parametrize("spec", ["f16", "upstream:q8_0", "kivi:bits=4", "auto:bits=2.75,means=on,pairs=norm"])
def test_the_plan_is_what_is_allocated(demo_model: Path, spec: str, tmp_path: Path) -> None:
    """Bytes of the cache that fits, against those of an open context of so many tokens."""
    cache, known = specs.parse(spec), fits.of_file(demo_model)
    plan = fits.planner(cache, known.facts.n_layer)
    n_ctx = fits.longest(known, cache, memory.need(known.facts, plan, 2048).total, reserve=0)
    assert n_ctx == 2048
    means: dict[str, Any] = {"kv_config": str(_means(demo_model, tmp_path))} if "means" in spec else {}
    opened = (
        Model(demo_model, "upstream", type_k=cache.type_k, type_v=cache.type_v, n_ctx=n_ctx)
        if cache.method is None
        else Model(demo_model, cache.method, cache.options, n_ctx=n_ctx, **means)
    )
    with opened:
        got, need = opened.kv_stats()["bytes_total"], memory.need(known.facts, plan, n_ctx).cache
        # the statistics of llama.cpp's own caches come from its log, which has hundredths of a MiB
        assert got == need if cache.method else abs(got - need) <= 0.01 * memory.MIB


def _means(model: Path, folder: Path) -> Path:
    from ggml_kvq.calibrate import files, means

    fitted = means.fit(model, (ROOT / "docs" / "limits.md").read_text(), n_sequences=1, length=256, sinks=4)
    path = folder / "means.kvq.gguf"
    files.write_sidecar(path, files.fields(model, fitted, 4), files.arrays(fitted))
    return path


def test_a_model_of_ones_own(capsys: pytest.CaptureFixture[str], demo_model: Path) -> None:
    argv = ["-m", str(demo_model), "--memory", "100M", "--memory", "21M", "--reserve", "0", "--cache", "f16"]
    code, out, _ = run(capsys, *argv, "--cache", "kivi:bits=2,group=128")
    first, second = [line.split() for line in out.splitlines()[2:4]]
    assert code == 0 and first[1:] == ["100M", "all", "4k", "all", "4k"]
    assert second[1] == "21M" and second[2] != "all" and second[3:] == ["all", "4k"]
    assert "allowance, not a measurement" in out
    assert run(capsys, "-m", str(demo_model), "--memory", "1M")[1].splitlines()[2].split()[2:] == ["-"] * 6


def test_weights_that_no_card_holds_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    """All cards together would hold them; the one with most layers and its --reserve does not."""
    code, out, _ = run(capsys, "--large", "--memory", "2x5G", "--cache", "f16")
    assert code == 0 and "Llama 3.1 8B Q8_0 does not fit into 2x5G" in out
    assert "8B Q8_0 does not fit" not in run(capsys, "--large", "--memory", "2x12G", "--cache", "f16")[1]


def test_a_split_model_counts_all_parts(write_gguf: Callable[..., Path]) -> None:
    parts = [write_gguf(f"m-0000{i}-of-00002.gguf", {**LLAMA_FIELDS, "split.count": 2}) for i in (1, 2)]
    parts[1].write_bytes(bytes(1000))
    assert fits.of_file(parts[0]).facts.weights == parts[0].stat().st_size + 1000


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--memory", "lots"], "--memory lots is no size"),
        (["--reserve", "-1"], "--reserve -1 is no size"),
        (["--cache", "nosuch"], "nosuch"),
        (["--cache", "simulated:q4_0"], "is simulated and has no layout"),
        (["-m", "nosuch.gguf"], "nosuch.gguf"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == "" and words in err and err.count("\n") == 1

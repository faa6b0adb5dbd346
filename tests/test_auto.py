"""Method auto: the ladder, the bits it keeps to, --kv-bits and --kv-budget, means without calibration, tuning."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggml_kvq import Model, budget, cli, default_means, errors, gguf_header, info, memory
from ggml_kvq.calibrate import ladder, tune
from ggml_kvq.core import loader, native
from ggml_kvq.errors import KvqError, MethodError
from ggml_kvq.launch import launcher
from ggml_kvq.reference import METHODS, LayerShape
from ggml_kvq.reference.auto import RUNGS, WHOLE, code_bits, order_of, spread
from ggml_kvq.resolver import FirstUse

LAYERS = [(il, 4, 64, 64) for il in range(12)]
TOP = len(WHOLE) - 1  # of keys that are one block
TEXT = (Path(__file__).resolve().parents[1] / "README.md").read_text()


@pytest.fixture(scope="module")
def lib() -> Any:
    return loader.libraries().need_kvq()


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def planned(lib: CDLL, opts: str, n_cells: int = 32768, layers: Any = LAYERS, n_stream: int = 1) -> Any:
    return native.plan(lib, "auto", opts, layers, n_cells, n_layer_model=len(layers), n_stream=n_stream)


# ------------------------------------------------------------------ the ladder


def test_layers_rise_spread_out() -> None:
    assert spread(1) == [0] and spread(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    for n in (2, 3, 12, 27, 80):
        assert sorted(spread(n)) == list(range(n))


@pytest.mark.parametrize("pairs", ["none", "norm", "neox"])
def test_every_level_takes_more_than_the_one_below_and_is_the_references(lib: CDLL, pairs: Any) -> None:
    rungs = WHOLE if pairs == "none" else RUNGS
    top = len(rungs) - 1
    order = ".".join(map(str, np.random.default_rng(3).permutation(np.repeat(np.arange(12), top))))
    shapes = [LayerShape(*s) for s in LAYERS]
    for text in ("none", order):
        last = 0.0
        for level in range(top * 12 + 2):
            got = planned(lib, f"level={level},order={text},pairs={pairs}")
            plans = METHODS["auto"](level=level, order=text, pairs=pairs).plans(shapes)
            codecs = [(p.k.codec, p.v.codec) for p in plans]
            assert {c.scale for pair in codecs for c in pair} == {1 if level > top * 12 else 2}
            keys = [(k.bits + k.fast_bits) / 2 if k.split else k.bits for k, _ in codecs]
            bits = (sum(keys) + sum(v.bits for _, v in codecs)) / 24
            assert got["bits_headline"] == pytest.approx(bits) and got["bits"] > last
            last = got["bits"]
        assert {k.split for k, _ in codecs} == {0}  # the last rung is whole
    assert [code_bits(r) for r in rungs] == sorted({code_bits(r) for r in rungs})


def test_keys_are_split_where_means_are_taken_off(lib: CDLL) -> None:
    """Without means the fast half would be missed; an order of the other ladder is then nobody's."""
    order = ".".join(map(str, [*range(12)] * (len(RUNGS) - 1)))
    level = 30
    for means, split in (("on", 2), ("off", 0)):
        plans = METHODS["auto"](level=level, order=order, pairs="neox", means=means).plans(
            [LayerShape(*s) for s in LAYERS]
        )
        assert {p.k.codec.split for p in plans} == {split}
        got = planned(lib, f"level={level},order={order},pairs=neox,means={means}")["bits_headline"]
        want = sum((p.k.codec.bits + p.k.codec.fast_bits) / (1 + bool(split)) + p.v.codec.bits for p in plans) / 24
        assert got == pytest.approx(want)
    odd = [(0, 2, 72, 72)]  # such heads have no halves
    assert planned(lib, "level=0,pairs=norm", layers=odd)["bits_headline"] == 1.0
    assert planned(lib, "level=4,pairs=norm", layers=odd)["bits_headline"] == 3.0


@pytest.mark.parametrize(
    "layers",
    [LAYERS, [(il, 8, 128, 128) for il in range(32)], [(0, 2, 256, 256)], [(il, 1, 80, 96) for il in range(7)]],
)
@pytest.mark.parametrize("n_stream", [1, 3])
def test_bits_are_kept_and_used(lib: CDLL, layers: Any, n_stream: int) -> None:
    """Never above what was asked for at the context that is named, and one level more would be."""
    top = TOP * len(layers) + 1
    for n_cells in (1024, 32768, 131072):
        sizes = [planned(lib, f"level={level}", n_cells, layers, n_stream)["bits"] for level in range(top + 1)]
        for bits in (1.25, 1.5, 2.0, 2.25, 2.5, 3.1, 4.25, 16.0):
            if bits < sizes[0]:
                with pytest.raises(MethodError, match=f"{bits:.2f} bits are not possible: .* of {n_cells} tokens"):
                    planned(lib, f"bits={bits},at={n_cells}", n_cells, layers, n_stream)
                continue
            got = planned(lib, f"bits={bits},at={n_cells}", n_cells, layers, n_stream)["bits"]
            assert got == max(b for b in sizes if b <= bits)


def test_the_smallest_that_works_works(lib: CDLL) -> None:
    with pytest.raises(MethodError) as e:
        planned(lib, "bits=1", 4096)
    least = str(e.value).split("possible: ")[1].split()[0]
    assert planned(lib, f"bits={least}", 131072)["bits"] <= float(least)
    with pytest.raises(MethodError, match="4.25 bits are not possible"):
        planned(lib, "bits=4.25,at=256", 256)


@pytest.mark.parametrize("bits", [1.25, 2.25, 3.0, 4.25])
def test_a_short_context_has_the_codes_of_a_long_one(lib: CDLL, bits: float) -> None:
    """4.25 bits of 512 tokens were 1 bit of values: the f16 window took the others. Words of nonsense followed."""
    long = planned(lib, f"bits={bits}", 131072)
    assert long["bits"] <= bits
    for n_cells in (256, 512, 2048, 32768):
        short = planned(lib, f"bits={bits}", n_cells)
        assert short["bits_headline"] == long["bits_headline"] and short["bits"] > long["bits"]


def test_a_cache_of_a_window_has_the_codes_of_the_whole(lib: CDLL) -> None:
    """Gemma's short cache took 2.63 bits and its long one 1.93 where 1 was asked for: each found its own level."""
    full, windowed = LAYERS[8:], LAYERS[:8]
    for bits in (1.3, 2.25, 4.25):
        whole = native.plan(lib, "auto", f"bits={bits}", LAYERS, 2048)
        parts = [
            native.plan(lib, "auto", f"bits={bits}", layers, 2048, n_layer_model=12) for layers in (full, windowed)
        ]
        assert sum(p["bytes_codes"] for p in parts) == whole["bytes_codes"]
    for layers, n_cells in ((full, 2048), (windowed, 768), (LAYERS, 131072)):
        with pytest.raises(MethodError, match="1.00 bits are not possible: 1.14 are the least"):
            native.plan(lib, "auto", "bits=1", layers, n_cells, n_layer_model=12)


def test_an_order_of_another_model_is_refused(lib: CDLL) -> None:
    order = ".".join(map(str, [*range(8)] * TOP))
    with pytest.raises(MethodError, match="each of 12 layers 5 times"):
        planned(lib, f"bits=3,order={order}")
    with pytest.raises(ValueError, match="each of 12 layers"):
        order_of(order, 12)


# ------------------------------------------------------------------ one number


@pytest.mark.parametrize(
    ("text", "want"), [("2G", 2 << 30), ("1.5GiB", 3 << 29), ("800m", 800 << 20), ("123456", 123456), ("3 kB", 3072)]
)
def test_sizes(text: str, want: int) -> None:
    assert budget.size(text, "--kv-budget") == want


@pytest.mark.parametrize("text", ["", "2X", "-1G", "0", "G", "1e9", "2G2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(errors.BudgetError, match="--kv-budget .* is no size"):
        budget.size(text, "--kv-budget")


@pytest.mark.parametrize("text", ["0.4", "17", "two", "nan", ""])
def test_what_is_no_number_of_bits_is_refused(text: str) -> None:
    with pytest.raises(errors.BudgetError, match="--kv-bits"):
        budget.bits(text, "--kv-bits")


def facts(windowed: int = 0, n_ctx: int = 131072) -> memory.Model:
    return memory.Model(0, LAYERS[windowed:], LAYERS[:windowed], 1024 if windowed else 0, 12, False, n_ctx)


def held(m: memory.Model, fit: budget.Fit, n_ctx: int, n_stream: int = 1) -> int:
    plan = memory.planner("auto", f"{fit.option},means=on", m.n_layer)
    return memory.need(m, plan, n_ctx, n_stream=n_stream).cache


@pytest.mark.parametrize("windowed", [0, 8])
@pytest.mark.parametrize("n_stream", [1, 4])
@pytest.mark.parametrize("mib", [40, 64, 100])
def test_a_budget_is_kept_and_used(windowed: int, n_stream: int, mib: int) -> None:
    m = facts(windowed)
    fit = budget.fit(m, mib << 20, budget.Context(32768, n_stream))
    assert (fit.n_ctx == 0 and 0.9 * (mib << 20) < held(m, fit, 32768, n_stream) <= mib << 20) or fit.bits > 4.2


def test_a_budget_without_a_context_takes_the_models_or_the_longest() -> None:
    m = facts(n_ctx=32768)
    roomy = budget.fit(m, 100 << 20, budget.Context(0))
    assert roomy.n_ctx == 32768 and roomy.bits > 3 and held(m, roomy, 32768) <= 100 << 20
    tight = budget.fit(m, 30 << 20, budget.Context(0))
    assert 8192 < tight.n_ctx < 32768 and 2.45 < tight.bits < 2.6
    longest = int(tight.note.split("; up to -c ")[1].split()[0])
    assert tight.n_ctx < longest < 32768 and "tokens at codes of 2.5 bits (2." in tight.note
    assert budget.fit(m, 30 << 20, budget.Context(longest)).bits > 1.25
    assert held(m, tight, tight.n_ctx) <= 30 << 20 < held(m, tight, tight.n_ctx + 256)


def test_a_budget_that_is_too_small_names_what_works() -> None:
    m = facts()
    with pytest.raises(errors.BudgetError) as e:
        budget.fit(m, 10 << 20, budget.Context(32768))
    words = str(e.value)
    need, longest = (int(words.split(mark)[1].split()[0]) for mark in ("at least ", "-c "))
    assert budget.fit(m, need << 20, budget.Context(32768)).bits > 1.25
    assert budget.fit(m, 10 << 20, budget.Context(longest)).bits > 1.25
    with pytest.raises(errors.BudgetError):
        budget.fit(m, 10 << 20, budget.Context(longest + 256))


# ------------------------------------------------------------------ programs


def refusal(*argv: str) -> str:
    with pytest.raises(KvqError) as e:
        launcher.command("llama-cli", argv, {})
    assert "\n" not in str(e.value)
    return str(e.value)


def test_launcher_takes_one_number(demo_model: Path) -> None:
    m = ("-m", str(demo_model))
    got = launcher.command("llama-cli", [*m, "--kv-bits", "2.5", "-c", "8192"], {})
    assert got.env["KVQ_METHOD"] == "auto" and got.env["KVQ_OPTS"] == "bits=2.5"
    sidecar = got.env["KVQ_CONFIG"]
    assert sidecar and Path(sidecar).parent == default_means.folder()
    got = launcher.command("llama-server", [*m, "--kv-budget", "24M", "-c", "32k", "-np", "2"], {})
    level = int(str(got.env["KVQ_OPTS"]).removeprefix("level="))
    assert level > 0 and "-c" in got.args and got.args.count("-c") == 1
    assert got.env["KVQ_ASKED"] == "--kv-budget 24M"
    got = launcher.command("llama-cli", [*m, "--kv-budget", "3M"], {})
    assert 0 < int(got.args[got.args.index("-c") + 1]) < 4096
    wants = "--kv-bits 1: 1.00 bits are not possible: 1."
    assert wants in refusal(*m, "--kv-bits", "1", "-c", "512")
    with pytest.raises(errors.BudgetError, match="kv_bits=1: 1.00 bits are not possible: 1"):
        Model(demo_model, kv_bits=1, n_ctx=512)
    assert "drop one of them" in refusal(*m, "--kv-bits", "2", "--kv-method", "kivi")
    assert "1 KiB hold no context of 4096 tokens" in refusal(*m, "--kv-budget", "1K", "-c", "4096")
    assert "--kv-bits 17" in refusal(*m, "--kv-bits", "17")


def test_a_text_does_not_depend_on_how_the_number_was_given(demo_model: Path) -> None:
    texts = []
    for kwargs in ({"kv_bits": 2.5}, {"kv_method": "auto", "kv_opts": {"bits": 2.5}}):
        with Model(demo_model, n_ctx=2048, **kwargs) as model:
            assert "auto [bits=2.5]" in model.load_line and "channel means are taken off" in model.load_line
            assert re.search(r"; 2\.5 bits count at 131072 tokens: these 2048 take [34]\.\d\d with", model.load_line)
            assert "data measured on the model's first use" in model.load_line
            texts.append("".join(model.generate(TEXT[:3000], max_tokens=24, temperature=0)))
    assert texts[0] == texts[1]
    with Model(demo_model, n_ctx=4096, kv_budget="4M") as model:
        assert 0.85 * (4 << 20) < model.kv_stats()["bytes_total"] <= 4 << 20
        assert "auto [kv_budget=4M]" in model.load_line
    with pytest.raises(MethodError, match="drop one"):
        Model(demo_model, kv_method="kivi", kv_bits=2)
    with pytest.raises(KvqError, match="kv_bits"):
        Model(demo_model, kv_bits="few")  # type: ignore[arg-type]


# ------------------------------------------------------------------ means without calibration


def test_means_are_measured_once_and_used(demo_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    there = default_means.path_of(demo_model, FirstUse.COORDINATES)
    for kind in FirstUse:
        default_means.path_of(demo_model, kind).unlink(missing_ok=True)
    with Model(demo_model, kv_method="auto", n_ctx=1024) as model:
        with_means = model.kv_stats()["bytes_calibration"]
    assert there.is_file() and "measuring its keys and values" in capfd.readouterr().err
    stamp = there.stat().st_mtime_ns
    with Model(demo_model, kv_method="auto", n_ctx=1024):
        assert there.stat().st_mtime_ns == stamp and "measuring" not in capfd.readouterr().err
    with Model(demo_model, kv_method="auto", kv_opts="means=off", n_ctx=1024) as model:
        assert model.kv_stats()["bytes_calibration"] == 0 < with_means


def test_a_cache_folder_that_cannot_be_written_costs_the_means_alone(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path / "file"))
    with Model(demo_model, kv_method="auto", n_ctx=1024) as model:
        assert model.kv_stats()["bytes_calibration"] == 0
    assert "no means are taken off keys and values" in capfd.readouterr().err


def test_damaged_means_are_refused_not_used(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, _ = default_means.ensure(demo_model, print)
    data = bytearray(Path(str(there)).read_bytes())
    data[-100] ^= 0x40
    bad = tmp_path / "bad.kvq.gguf"
    bad.write_bytes(data)
    with pytest.raises(MethodError, match="checksum|damaged"):
        Model(demo_model, kv_method="auto", kv_config=bad, n_ctx=1024)


def test_data_of_one_method_serve_the_others(write_gguf: Callable[..., Path]) -> None:
    held = {"general.type": "kvq", "kvq.version": 1}
    for method, others in (("aqua", ["auto", "specache"]), ("auto", ["specache", "aqua"]), ("kivi", ["kivi"])):
        file = str(write_gguf(f"{method}.gguf", {**held, "kvq.method": method}))
        for other in others:
            got = launcher.command("llama-cli", ["--kv-method", other, "--kv-config", file], {})
            assert got.env["KVQ_CONFIG"] == file
    assert "holds data for method kivi, not auto" in refusal("--kv-method", "auto", "--kv-config", file)
    nobody = str(write_gguf("nobody.gguf", held))
    assert "holds no kvq.* metadata" in refusal("--kv-method", "auto", "--kv-config", nobody)


# ------------------------------------------------------------------ tuning


def test_interpolation_falls_and_ends_at_zero() -> None:
    bits = ladder.of("none").bits[""]
    d = tune.interpolate({0: 0.08, 2: 0.01, 4: 0.001}, bits)
    assert d[0] == pytest.approx(0.08) and d[2] == pytest.approx(0.01) and d[4] == pytest.approx(0.001) and d[5] == 0
    assert all(a >= b for a, b in itertools.pairwise(d)) and 0.01 < d[1] < 0.08
    assert tune.interpolate({0: 0.0, 2: -0.001, 4: 0.002}, bits)[5] == 0  # noise
    assert len(tune.interpolate({0: 0.08, 2: 0.01, 4: 0.001}, ladder.of("norm").bits[""])) == len(RUNGS)


def test_the_climb_takes_the_steepest_step_first() -> None:
    """Three layers: one that needs bits, one that needs none, one whose gain lies two rungs ahead."""
    falls = ([8.0, 4.0, 1.0, 0.5, 0.2, 0.0], [1e-3, 8e-4, 6e-4, 4e-4, 2e-4, 0.0], [6.0, 6.0, 0.1, 0.1, 0.1, 0.0])
    order = [il for il, _ in ladder.climb({(il, ""): d for il, d in enumerate(falls)}, ladder.of("none"))]
    assert sorted(order) == sorted([0, 1, 2] * TOP)
    assert order[:2] == [0, 0] or order[0] == 0
    assert {order[i] for i in range(4)} == {0, 2} and order.count(1) == TOP and order.index(1) > 6


def test_keys_and_values_climb_apart() -> None:
    rungs = ladder.of("sorted")
    damage = {(0, "k"): [1.0, 0.9, 0.8, 0.7, 0.0], (0, "v"): [9.0, 1.0, 0.1, 0.0], (1, "k"): [5.0, 0.5, 0.1, 0.05, 0.0]}
    damage[1, "v"] = [0.1, 0.05, 0.01, 0.0]
    order = ladder.climb(damage, rungs)
    assert rungs.text(order).startswith("1k.0v.") and order.count((0, "k")) == 4 and order.count((1, "v")) == 3
    low = rungs.standing(2, {(0, "v"): 1})
    assert low["level"] == 4 + 4 + 3 + 1 and str(low["order"]).endswith(".0v.0v") and low["pairs"] == "sorted"


def test_tune_writes_a_frontier_that_falls(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """End to end on the demo model, with few measurements: stopped and gone on with, found, used and shown."""
    monkeypatch.setattr(tune, "MEASURED", {"": (2,), "k": (1,), "v": (1,)})
    monkeypatch.setattr(tune, "SHOWN", (1.5, 3.0))
    text, out = tmp_path / "text.txt", tmp_path / "tuned.kvq.gguf"
    text.write_text(Path(__file__).read_text())
    argv = ["tune", "-m", str(demo_model), "-f", str(text), "-o", str(out), "--sequences", "1", "--length", "512"]
    calls = []
    measure = tune._Bench.divergence

    def stop_at_the_fourth(self: Any, opts: Any) -> Any:
        calls.append(opts)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(self, opts)

    monkeypatch.setattr(tune._Bench, "divergence", stop_at_the_fourth)
    assert cli.main(argv) == 130 and not out.exists()
    monkeypatch.setattr(tune._Bench, "divergence", measure)
    capsys.readouterr()
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert "(3 done before)" in said and "next: llama-cli" in said
    assert not out.with_name(out.name + ".partial").exists()
    fields = gguf_header.read(out, max_array=1 << 20).kvq()
    (few, damaged), (more, whole) = tune.frontier_of(fields)
    assert few < 1.5 < more <= 3.0 and damaged > 3 * whole > 0
    order = [int(x) for x in str(fields["kvq.auto.order"]).split(".")]
    assert fields["kvq.auto.pairs"] == "norm"
    rises = len(RUNGS) - 1
    assert sorted(order) == sorted([*range(12)] * rises) and order != spread(12) * rises
    with Model(demo_model, kv_bits=3.0, kv_config=out, n_ctx=2048) as model:
        assert model.kv_stats()["bits"] > 3.0 and f"calibrated data in {out}" in model.load_line
    assert cli.main(["info", str(out), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["frontier"]) == 2


def test_a_damaged_frontier_is_named() -> None:
    with pytest.raises(KvqError, match="frontier"):
        tune.frontier_of({"kvq.auto.frontier": "2.5:0.1 3"})
    assert tune.frontier_of({}) == []


def test_info_plans_auto_as_it_will_be(demo_model: Path) -> None:
    header = gguf_header.read(demo_model, tensors=True)
    plan = next(p for p in info.plans(header, 4096) if p.method == "auto")
    long = next(p for p in info.plans(header, 131072) if p.method == "auto")
    assert 2.3 < long.bits <= 2.5 < plan.bits

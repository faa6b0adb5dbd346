"""Predictors that a model's first use fits (auto with predictors=on): found again by launcher, Python, the library
alone; what does not pay is left out; a run that ends in between leaves nothing.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggml_kvq import Model, default_means
from ggml_kvq.calibrate import capture, files, ladder, predictors, weights
from ggml_kvq.core import loader, native
from ggml_kvq.errors import KvqError, MethodError
from ggml_kvq.evaluate import specs
from ggml_kvq.launch import launcher
from ggml_kvq.reference import METHODS, LayerShape, auto
from ggml_kvq.resolver import BY_ARGUMENTS, FirstUse, Request
from test_aqua import TEXT
from test_first_use import MEASURED, alone, load_lines
from test_predictor import Made, exact, kld, lib
from test_resolve import ask
from test_sliding_windows import PATTERNS, gemma3

__all__ = ["exact", "lib"]  # fixtures


@pytest.fixture(scope="module")
def cache(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder where predictors of the demo model were fitted."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("KVQ_CACHE_DIR")
    os.environ["KVQ_CACHE_DIR"] = str(folder)
    there, why = default_means.ensure(demo_model, print, 2, kind=FirstUse.PREDICTORS)
    assert there, why
    yield folder
    os.environ.pop("KVQ_CACHE_DIR")
    if before is not None:
        os.environ["KVQ_CACHE_DIR"] = before


def own(model: Path) -> Path:
    """The file of this model's predictors."""
    return default_means._look_up(model, FirstUse.PREDICTORS)[0]


# ------------------------------------------------------------------ the option


def test_on_is_the_predictor_of_the_data(lib: CDLL) -> None:
    shapes = [(il, 2, 64, 64) for il in range(12)]
    plans = [
        native.plan(lib, "auto", f"level=40,pairs=sorted,means=on{more}", shapes, 4096, n_layer_model=12)
        for more in (",predictors=on", ",predictor=auto", ",predictor=full", "", ",predictors=off")
    ]
    assert plans[0]["bytes_total"] == plans[1]["bytes_total"] == plans[2]["bytes_total"]
    assert plans[3]["bytes_total"] == plans[4]["bytes_total"] < plans[0]["bytes_total"]


@pytest.mark.parametrize(
    ("opts", "why"),
    [
        ("predictors=on,predictor=none", "predictors=on cannot go with predictor=none"),
        ("predictors=on,far=f16", "predictors=on cannot go with far=f16"),
        ("predictors=on,window=auto", "predictors=on cannot go with window=auto"),
        ("predictors=yes", "predictors=yes is not of type off|on"),
    ],
)
def test_what_does_not_go_with_it_is_refused(opts: str, why: str) -> None:
    with pytest.raises(MethodError, match=why.replace("|", r"\|")):
        ask(Request(BY_ARGUMENTS, "auto", opts))


def test_layers_of_unequal_width_are_refused_by_a_cure_of_auto(lib: CDLL) -> None:
    shapes = [(0, 2, 64, 64), (1, 4, 64, 64)]
    with pytest.raises(MethodError, match="layer 1 has another KV width .* use predictors=off"):
        native.plan(lib, "auto", "bits=4,means=on,predictors=on", shapes, 4096, n_layer_model=2)


@pytest.mark.parametrize(
    ("method", "opts", "wants"),
    [
        ("auto", "predictors=on", True),
        ("auto", "bits=2.4,predictor=auto", True),
        ("auto", "predictor=full", True),
        ("auto", "predictor=k", True),
        ("auto", "predictor=fold", False),  # which is not fitted
        ("auto", "means=on", False),
        ("auto", "predictors=off,coordinates=off", False),
        ("aqua", "predictor=full", False),  # a paper's own setting is of a text that its user chose
    ],
)
def test_who_has_predictors_fitted(method: str, opts: str, wants: bool) -> None:
    assert ask(Request(BY_ARGUMENTS, method, opts)).first_use is (FirstUse.PREDICTORS if wants else FirstUse.MEANS)


# ------------------------------------------------------------------ found again


def test_python_finds_them_and_loses_less(cache: Path, demo_model: Path, exact: Any) -> None:
    loss: dict[str, float] = {}
    for on in ("off", "on"):
        size: dict[str, Any] = {"n_ctx": 768, "n_ubatch": 64, "n_threads": 2}
        with Model(demo_model, kv_bits=3, kv_opts=f"window=32,predictors={on},coordinates=off", **size) as m:
            loss[on], line = kld(m, *exact), m.load_line
        assert MEASURED in line and ("predictor full" in line) == (on == "on"), line
    assert loss["on"] < 0.8 * loss["off"], loss
    assert sorted(p.name for p in (cache / "means").iterdir()) == sorted(
        p.name for p in (own(demo_model), default_means.path_of(demo_model))
    )


def test_it_is_fitted_once(cache: Path, demo_model: Path) -> None:
    said: list[str] = []
    there, why = default_means.ensure(demo_model, said.append, kind=FirstUse.PREDICTORS)
    assert there == str(own(demo_model)) and there.endswith(FirstUse.PREDICTORS.ending) and not why and not said
    meta, data = files.read_sidecar(there)
    assert meta["kvq.aqua.predictor"] == "full" and "first use" in meta["kvq.aqua.text"]
    assert meta["kvq.aqua.tokens"] == 8 * (default_means.LENGTH - default_means.SINKS)
    assert meta["kvq.auto.pairs"] == "sorted" and meta["kvq.auto.order"]
    assert {"kvq.aqua.blk.3.k.left.order", "kvq.aqua.blk.3.k.weight", "kvq.aqua.blk.3.v.weight"} <= set(data)


def test_the_library_alone_finds_them(cache: Path, demo_model: Path) -> None:
    argv = ["-m", str(demo_model), "-p", "a", "-n", "1", "-c", "256", "-no-cnv"]
    (line,) = load_lines(alone("llama-completion", *argv, KVQ_OPTS="bits=3.5,predictors=on"))
    assert MEASURED in line and "predictor full" in line
    with pytest.raises(AssertionError, match="ggml-kvq plugin -m MODEL --predictors fits them once"):
        alone("llama-completion", *argv, KVQ_OPTS="bits=3.5,predictors=on", KVQ_CACHE_DIR="/no/such")


def test_launchers_and_eval_find_them(cache: Path, demo_model: Path) -> None:
    argv = ["-m", str(demo_model), "--kv-bits", "3.5", "--kv-opt", "predictors=on"]
    got = launcher.command("llama-cli", argv, {})
    assert got.env["KVQ_CONFIG"] == str(own(demo_model)) and "predictors=on" in str(got.env["KVQ_OPTS"])
    for text in ("auto:bits=3.5,predictors=on", "auto:bits=3.5,predictor=full@measured"):
        assert specs.parse(text).means(demo_model) == str(own(demo_model))


def test_data_of_the_user_go_first(cache: Path, demo_model: Path, tmp_path: Path) -> None:
    """Those beside the model, also where they hold no predictors: then they are named."""
    model = tmp_path / "m.gguf"
    model.symlink_to(demo_model)
    beside = tmp_path / "m.kvq.gguf"
    meta, data = files.read_sidecar(own(demo_model))
    files.write_sidecar(beside, meta, data)
    with Model(model, kv_bits=3.5, kv_opts="predictors=on", n_ctx=256, n_threads=1) as m:
        assert str(beside) in m.load_line and MEASURED not in m.load_line
    files.write_sidecar(beside, meta, {name: x for name, x in data.items() if not name.endswith("weight")})
    with pytest.raises(KvqError, match=r"m\.kvq\.gguf.*weight is missing.*--predictor full"):
        Model(model, kv_bits=3.5, kv_opts="predictors=on", n_ctx=256, n_threads=1)


def test_without_a_file_they_are_refused_and_the_cure_is_named(demo_model: Path) -> None:
    with pytest.raises(KvqError, match=r"needs calibrated data .*plugin -m MODEL --predictors.*'predictors': 'off'"):
        Model(demo_model, kv_bits=3.5, kv_opts="predictors=on", kv_config="none", n_ctx=256, n_threads=1)


def test_what_cannot_be_fitted_is_said(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path / "cache"))

    real = capture.layers
    monkeypatch.setattr(capture, "layers", lambda path: [(il, 2 + (il == 2), k, v) for il, _, k, v in real(path)])
    with pytest.raises(MethodError, match=r"predictors=on.*layers 1 and 2.*; leave predictors=on out$"):
        Model(demo_model, kv_bits=3.5, kv_opts="predictors=on", n_ctx=256, n_threads=1)
    with pytest.raises(KvqError, match=r"predictors=on.*layers 1 and 2"):
        launcher.command("llama-cli", ["-m", str(demo_model), "--kv-bits", "3.5", "--kv-opt", "predictors=on"], {})
    assert [p.name for p in (tmp_path / "cache").rglob("*")] == ["means"]


def test_a_gpu_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(loader.libraries()), "describe", lambda *_: "KVQ0: ggml-kvq KV cache over NVIDIA H100")
    with pytest.raises(KvqError, match="over NVIDIA H100 has no kernels for them; leave predictors=on out"):
        default_means._refuse_gpu(FirstUse.PREDICTORS)


# ------------------------------------------------------------------ damage, the end in between


def test_a_damaged_file_is_fitted_again(cache: Path, demo_model: Path) -> None:
    there = own(demo_model)
    whole = there.read_bytes()
    there.write_bytes(whole[:-100] + bytes([whole[-100] ^ 0x40]) + whole[-99:])
    said: list[str] = []
    again, why = default_means.ensure(demo_model, said.append, 2, kind=FirstUse.PREDICTORS)
    assert again == str(there) and not why and "it is measured again" in said[0]
    assert there.read_bytes() == whole


FIRST = (
    "import sys; from ggml_kvq import default_means as d\n"
    "print(d.ensure(sys.argv[1], print, 1, kind=d.FirstUse.PREDICTORS))"
)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("where", ["captured", "layer.*.npz"])
def test_an_end_in_between_leaves_nothing(demo_model: Path, tmp_path: Path, kind: signal.Signals, where: str) -> None:
    env = {**os.environ, "KVQ_CACHE_DIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", FIRST, str(demo_model)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    for _ in range(6000):
        if list(tmp_path.glob(f"means/rows-*/{where}")) or process.poll() is not None:
            break
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()
    process.send_signal(kind)
    process.communicate(timeout=60)
    assert process.returncode in (-kind, 1) and not list((tmp_path / "means").iterdir())


# ------------------------------------------------------------------ the fit


class Noise(Made):
    """Layer 2 says nothing of layer 3's keys, and values of layer 1 follow from nothing."""

    def rows(self, tokens: Any, sinks: Any) -> Any:
        rng = np.random.default_rng(int(tokens[0]) + 5)
        for il, k, v in super().rows(tokens, sinks):
            noise = rng.normal(size=k.shape).astype(np.float32)
            yield il, noise if il == 3 else k, noise if il == 1 else v


def test_a_predictor_that_does_not_pay_is_none(tmp_path: Path) -> None:
    """Of 300 tokens and 128 inputs a regression of noise explains a third of what it was fitted on."""
    how: dict[str, Any] = {"n_sequences": 4, "length": 104, "bits": predictors.Bits(4, 4)}
    fit = predictors.fit(Noise(), folder=tmp_path / "few", few=True, **how)
    got = {(il, lane): fit.layers[il].weight[lane] for il in (1, 2, 3) for lane in (0, 1)}
    zero = {at for at, w in got.items() if w is not None and not w.any()}
    assert zero == {(3, 0), (1, 1)} and all(w is not None and w.shape[0] == 64 for w in got.values())
    assert all((fit.layers[il].explained[lane] == 0) == ((il, lane) in zero) for il, lane in got)
    assert fit.layers[2].explained[0] > 0.9 and fit.layers[1].explained[0] > 0.9
    plain = predictors.fit(Noise(), folder=tmp_path / "plain", **how)
    noisy = plain.layers[3].weight[0]
    assert noisy is not None and noisy.any()


def test_few_tokens_are_damped_and_all_of_them_count(tmp_path: Path) -> None:
    """Nearer to the truth than a plain regression of as many tokens, fitted on the held-out sequence as well."""
    error: dict[bool, float] = {}
    for few in (False, True):
        made = Made(noise=0.7)
        how: dict[str, Any] = {"n_sequences": 4, "length": 60, "bits": predictors.Bits(4, 4)}
        fit = predictors.fit(made, folder=tmp_path / str(few), few=few, **how)
        error[few] = 0.0
        for il in (1, 2, 3):
            w = fit.layers[il].weight[1]
            assert w is not None
            error[few] += float(np.square(weights.to_f32(w, "f16") - made.wv[il]).mean())
    assert error[True] < 0.9 * error[False], error


def test_the_order_of_layers_is_that_of_what_is_left() -> None:
    """Of equal keys and values, the layer of which more is left rises first; the plain order does not know it."""
    layers = {
        il: predictors.Layer((np.zeros(1), np.zeros(1)), errors=[1.0, 0.5, 0.3, 0.2, 0.1], explained=[0.0, part])
        for il, part in enumerate((0.0, 0.9, 0.2, 0.5))
    }
    fit = predictors.Fit(layers, pairs="sorted", groups=[[0, 1, 2, 3]], few=True)
    once = [x for x in fit.climb().split(".") if x.endswith("v")]
    first = list(dict.fromkeys(once))
    assert first == ["0v", "2v", "3v", "1v"]
    fit.groups, fit.alone = [[0, 2, 3], [1]], [1]
    assert fit.climb().split(".").index("1k") < fit.climb().split(".").index("0v")  # 6 bits ahead
    fit.groups, fit.alone = [[0, 1, 2, 3]], []
    damage = ladder.estimated({0: [1.0], 1: [1.0]}, {1: 0.5})
    assert damage[0, "v"][1] / damage[1, "v"][1] == 2 * ladder.VALUES / ladder.VALUES_LEFT  # layer 0 stands alone
    fit.few = False
    assert list(dict.fromkeys(x for x in fit.climb().split(".") if x.endswith("v"))) == [
        f"{il}v" for il in auto.spread(4)
    ]


@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_a_layer_is_predicted_from_the_one_before_in_its_cache(
    lib: CDLL, demo_model: Path, tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with a window forget cells that the others keep. Those others are too few to pay for rows that they share:
    of 3 layers of Gemma 3 270M, 2.4 bits took 5.3.
    """
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(default_means, "LENGTH", 256)
    model = gemma3(demo_model, tmp_path / "m.gguf", PATTERNS[pattern])
    opts: dict[str, Any] = {"n_ctx": 1024, "n_ubatch": 64, "n_threads": 2, "swa_full": False}
    with Model(model, kv_bits=6, kv_opts="predictors=on", **opts) as m:
        assert m.load_line.count("predictor full") == 1 and MEASURED in m.load_line
        list(m.feed(m.tokenize(TEXT)[:900]))
        assert all(c["n_sealed"] for c in m.kv_stats()["caches"])
    with capture.open_model(model, 64, 1) as m:
        groups = capture.groups(m, capture.layers(model))
    meta, data = files.read_sidecar(own(model))
    few, many = sorted(groups, key=len)
    before = {b: a for a, b in itertools.pairwise(many)}
    assert len(groups) == 2 and all(meta.get(f"kvq.aqua.blk.{b}.prev") == a for b, a in before.items())
    assert (
        sum(name.endswith(".prev") for name in meta) == sum(name.endswith("k.weight") for name in data) == len(before)
    )
    assert meta["kvq.auto.alone"] == ".".join(map(str, few))
    assert all(f"kvq.aqua.blk.{il}.k.order" in data for il in few)
    data_set = {"means": "on", "pairs": "sorted", "predictors": "on", "alone": meta["kvq.auto.alone"]}
    text = ",".join(f"{key}={value}" for key, value in data_set.items())
    shapes = capture.layers(model)
    got = native.plan(lib, "auto", f"bits=6,{text}", [shapes[il] for il in few], 131072, n_layer_model=7)
    assert got["bits"] <= 6
    plans = METHODS["auto"](**data_set).plans([LayerShape(*s) for s in shapes])
    assert [il for il, p in enumerate(plans) if not p.chain] == few and plans[few[0]].sort

    source = capture.GgufSource(model, TEXT, 64, 1)  # as `ggml-kvq calibrate --predictor full`
    fit = predictors.fit(source, predictor="full", n_sequences=4, length=64, n_threads=1, folder=tmp_path / "fit")
    by_hand = tmp_path / "by-hand.gguf"
    fields = files.predictor_fields(model, fit, predictors.Bits(), 4)
    files.write_sidecar(by_hand, fields, files.predictor_arrays(fit))
    assert fields["kvq.auto.alone"] == meta["kvq.auto.alone"]
    assert sum(name.endswith("k.weight") for name in files.read_sidecar(by_hand)[1]) == len(groups[0] + groups[1]) - 2
    with Model(model, kv_config=by_hand, kv_bits=6, kv_opts="predictor=auto", **opts) as m:
        assert m.load_line.count("predictor full") == 1
    with Model(model, "aqua", "bits=4", by_hand, **opts) as m:  # predicts wherever the data do
        assert m.load_line.count("the rows of one layer") == 1 + (len(few) > 1)


# ------------------------------------------------------------------ the text


def test_the_texts_are_long_enough_and_varied() -> None:
    text = default_means.MORE.read_text(encoding="utf-8")
    assert default_means.TEXT.read_text(encoding="utf-8")[:200] not in text
    lines = [line for line in text.splitlines() if len(line) > 60]
    assert len(lines) == len(set(lines)), "a line that occurs twice counts twice"
    assert 30_000 < len(text) < 60_000 and max(map(ord, text)) > 0x4E00

"""Method auto behind predictors: what they leave of keys is sorted by its energy."""

from __future__ import annotations

from ctypes import CDLL
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggml_kvq import Model
from ggml_kvq.calibrate import predictors
from ggml_kvq.calibrate.order import sorted_keys
from ggml_kvq.core import native
from ggml_kvq.errors import KvqError, MethodError
from ggml_kvq.reference import METHODS, LayerShape, lattice
from test_aqua import MODEL
from test_predictor import exact, kld, lib, sidecar

__all__ = ["exact", "lib", "sidecar"]  # fixtures


def opened_auto(config: Path | str | None, opts: str, **kw: Any) -> Model:
    where = {"n_ctx": 768, "n_ubatch": 64, "n_threads": 2, **kw}
    return Model(MODEL, kv_method="auto", kv_opts=f"at=131072,window=32,{opts}", kv_config=config, **where)


def test_behind_predictors_auto_loses_a_third(sidecar: Path, exact: Any) -> None:
    """Residuals of keys sorted, at equal levels of the ladder; predictor=auto is what the file was made for."""
    loss: dict[str, float] = {}
    lines: dict[str, str] = {}
    for name in ("none", "k", "auto"):
        with opened_auto(sidecar, f"level=30,pairs=sorted,predictor={name}") as m:
            loss[name], lines[name] = kld(m, *exact), m.load_line
    assert "1|3-bit" in lines["auto"] and "1 layer 4-bit" in lines["auto"] and "predictor full" in lines["auto"]
    assert loss["k"] < 0.75 * loss["none"] and loss["auto"] < 0.7 * loss["k"], loss


@pytest.mark.parametrize("name", ["k", "full", "fold"])
@pytest.mark.parametrize("how", ["level=12", "bits=3,state=compact"])
def test_a_state_of_sorted_residuals_comes_back_bit_for_bit(
    sidecar: Path, tmp_path: Path, name: str, how: str, exact: Any
) -> None:
    """As f16 rows, where these are finer than the codes: residuals of 3 and 4 bits beside large keys are encoded once
    more. Blocks always are what they were."""
    rows = []
    for load in (False, True):
        with opened_auto(sidecar, f"{how},pairs=sorted,predictor={name}") as m:
            if load:
                m.load_state(tmp_path / "s")
            else:
                list(m.feed(exact[0][:300]))
                m.save_state(tmp_path / "s")
            rows.append([x.copy() for x in m.feed(exact[0][300:330], outputs=np.ones(30, bool), n_ubatch=1)])
    assert np.array_equal(np.array(rows[0]), np.array(rows[1]))


def test_sorted_residuals_are_planned_as_the_reference_says(lib: CDLL) -> None:
    shapes = [(il, 2, 64, 64) for il in range(12)]
    for level, pairs in ((0, "sorted"), (40, "norm"), (84, "sorted"), (20, "none")):
        opts = {"level": level, "pairs": pairs, "predictor": "full", "means": "on"}
        plans = METHODS["auto"](**opts).plans([LayerShape(*s) for s in shapes])
        assert all(p.chain == "kv" and p.mean for p in plans) and not plans[0].sort
        keys = [(k.bits + k.fast_bits) / 2 if k.split else k.bits for k in (p.k.codec for p in plans)]
        text = ",".join(f"{key}={value}" for key, value in opts.items())
        got = native.plan(lib, "auto", text, shapes, 4096, n_layer_model=12)
        assert got["bits_headline"] == pytest.approx((sum(keys) + sum(p.v.codec.bits for p in plans)) / 24)


def test_what_the_cache_gives_back_of_sorted_residuals(tmp_path: Path) -> None:
    """The fit sees the rows that the reference makes of them."""
    rng = np.random.default_rng(3)
    store, bar = predictors.Store(tmp_path), predictors.Progress(False)
    work = predictors._Work(store, 64, 64, 1, predictors.Bits(), "f16", 1, bar, 1)
    codec = predictors.Bits().halves(64)
    assert codec is not None
    order = sorted_keys(np.exp(rng.normal(size=(2, 64))), np.exp(rng.normal(size=(2, 64))), "norm")
    y, pred = rng.normal(size=(2, 64, 128)).astype(np.float32)
    got = work.rebuilt(codec, y, pred, order)
    for h in range(2):
        left = (y - pred)[:, 64 * h : 64 * h + 64]
        for at in (slice(32), slice(32, 64)):
            rows = lattice.sort_rows(left[at], order[0][h], order[1][h]).astype(np.float16)
            back = lattice.decode(codec, *lattice.encode(codec, rows)).astype(np.float32)
            want = lattice.unsort_rows(back, order[0][h], order[1][h]) + pred[at, 64 * h : 64 * h + 64]
            assert np.allclose(got[at, 64 * h : 64 * h + 64], want, atol=1e-3)


@pytest.mark.parametrize(
    ("opts", "why"),
    [
        ("predictor=full,far=f16", "predictor=full cannot go with far=f16"),
        ("predictor=full,means=off", "predictor=full cannot go with means=off"),
        ("predictor=k,window=auto", "predictor=k cannot go with window=auto"),
        ("predictor=some", "predictor"),
    ],
)
def test_what_does_not_go_with_predictors_is_refused(lib: CDLL, opts: str, why: str) -> None:
    with pytest.raises(MethodError, match=why):
        native.plan(lib, "auto", opts + ",means=on" * ("means" not in opts), [(0, 2, 64, 64)], 4096, n_layer_model=12)


def test_predictors_that_the_data_lack_are_named() -> None:
    with pytest.raises(KvqError, match="needs calibrated data"), opened_auto("none", "bits=3,predictor=auto"):
        pass

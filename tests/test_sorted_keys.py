"""Sorted keys: channels of a block in the order of what an error in them costs, with gains."""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggml_kvq import Model, default_means
from ggml_kvq.calibrate import files, halves, ladder, means
from ggml_kvq.calibrate.order import logit_errors, pair_channels, sorted_keys
from ggml_kvq.core import kernels, loader, native
from ggml_kvq.errors import KvqError, MethodError
from ggml_kvq.reference import METHODS, LayerShape, attention, lattice
from ggml_kvq.reference.auto import SORTED_KEYS, SORTED_VALUES
from ggml_kvq.reference.codec import LATTICE, SPLIT_NORM, Codec, K, V
from test_aqua import rotate

LAYERS = [(il, 2, 64, 64) for il in range(12)]
MEANS = default_means.TEXT.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def lib() -> Any:
    return loader.libraries().need_kvq()


# ------------------------------------------------------------------ which order


@pytest.mark.parametrize("kind", ["norm", "neox"])
def test_pairs_stay_together_and_strong_ones_come_last(kind: str) -> None:
    rng = np.random.default_rng(1)
    keys, queries = np.exp(rng.normal(size=(2, 3, 64)) * 2)
    channel, gain = sorted_keys(keys, queries, kind)
    pairs = pair_channels(64, kind)
    for h in range(3):
        assert sorted(channel[h]) == list(range(64))
        assert {tuple(x) for x in channel[h].reshape(-1, 2).astype(int)} == {tuple(x) for x in pairs}
        assert (gain[h, ::2] == gain[h, 1::2]).all() and (gain[h] > 0).all()
        cost = [keys[h][list(p)].sum() * queries[h][list(p)].sum() for p in channel[h].reshape(-1, 2).astype(int)]
        assert cost == sorted(cost)


def test_the_gains_are_those_of_least_error() -> None:
    """The error of a logit, sum q/g^2 times mean of e g^2, is no less with any other gains."""
    rng = np.random.default_rng(2)
    keys, queries = np.exp(rng.normal(size=(2, 1, 32)))
    channel, gain = sorted_keys(keys, queries, "norm")
    at = channel[0].astype(int)
    e, q = (x[0][at].reshape(-1, 2).sum(1) for x in (keys, queries))

    def error(g: np.ndarray) -> float:
        return float((q / g**2).sum() * (e * g**2).mean())

    best = gain[0, ::2].astype(np.float64)
    assert error(best) < error(np.ones(16)) and error(best) < error(e**-0.5)
    for _ in range(50):
        assert error(best) <= error(best * np.exp(0.1 * rng.normal(size=16))) * (1 + 1e-6)


def test_channels_without_energy_have_finite_gains() -> None:
    keys = np.zeros((1, 16))
    keys[0, 3] = 1.0
    channel, gain = sorted_keys(keys, np.zeros((1, 16)), "neox")
    assert sorted(channel[0]) == list(range(16)) and np.isfinite(gain).all() and (gain > 0).all()


@pytest.mark.parametrize(("rung", "whole"), [*((rung, rung == (4, 4)) for rung in SORTED_KEYS), ((4, 4), False)])
def test_the_error_of_a_logit_is_known_before_it_is_tried(rung: tuple[int, int], whole: bool) -> None:
    """Random keys and queries of given energies, sealed by the definition: their logits err as logit_errors says."""
    rng = np.random.default_rng(3)
    keys, queries = np.exp(rng.normal(size=(2, 2, 64)) * 1.5)
    channel, gain = sorted_keys(keys, queries, "norm")
    weak, strong = rung
    c = Codec(LATTICE, K, strong, 2, 2, 0, 0.0, 256, 64)
    if not whole:
        c = c.with_(split=SPLIT_NORM, fast_bits=weak)
    found = 0.0
    for h in range(2):
        k = (rng.normal(size=(256, 64)) * np.sqrt(keys[h])).astype(np.float32)
        q = rng.normal(size=(500, 64)) * np.sqrt(queries[h])
        block = lattice.encode(c, lattice.sort_rows(k, channel[h], gain[h]).astype(np.float16))
        back = lattice.unsort_rows(lattice.decode(c, *block), channel[h], gain[h])
        found += np.square(q @ (back - k).T / 8).mean() / 2
    said = logit_errors(keys, queries, "norm", [rung], one_block=whole)[0]
    assert said == pytest.approx(found, rel=0.15)


def test_keys_that_err_most_rise_first() -> None:
    """Layers alike but for queries that are 3 times as large in one: its keys climb before all others'."""
    rng = np.random.default_rng(4)
    keys, queries = np.exp(rng.normal(size=(2, 1, 64)))
    errors = {il: logit_errors(keys, queries * (9 if il == 2 else 1), "norm", SORTED_KEYS) for il in range(4)}
    rungs = ladder.of("sorted")
    order = ladder.climb(ladder.estimated(errors), rungs)
    at_half = order[: len(order) // 2]
    assert order == ladder.climb_evenly(ladder.estimated(errors), rungs, [range(4)])
    assert len(order) == 4 * 7 and at_half.count((2, "k")) > max(at_half.count((il, "k")) for il in (0, 1, 3))
    for il in range(4):  # the last rung of keys is there where values have reached theirs
        last_k = max(i for i, r in enumerate(order) if r == (il, "k"))
        assert last_k > max(i for i, r in enumerate(order) if r == (il, "v"))


def test_each_cache_keeps_to_the_number_that_was_asked_for() -> None:
    """Layers of a cache with windows err ten times as much: both caches have about as many bits at each level."""
    rng = np.random.default_rng(5)
    keys, queries = np.exp(rng.normal(size=(2, 1, 64)))
    groups = [[2, 5], [0, 1, 3, 4]]
    errors = {il: logit_errors(keys, queries * (1 if il in groups[0] else 100), "norm", SORTED_KEYS) for il in range(6)}
    rungs = ladder.of("sorted")
    order = ladder.climb_evenly(ladder.estimated(errors), rungs, groups)
    assert sorted(order) == sorted(ladder.climb(ladder.estimated(errors), rungs))
    for level in range(len(order)):
        bits = [
            np.mean([rungs.bits[side][order[:level].count((il, side))] for il in group for side in "kv"])
            for group in groups
        ]
        assert abs(bits[0] - bits[1]) <= 0.5, (level, bits)


# ------------------------------------------------------------------ the ladder


def test_levels_are_the_references(lib: CDLL) -> None:
    rng = np.random.default_rng(3)
    sides = [f"{il}{side}" for il in range(12) for side in "k" * 4 + "v" * 3]
    shapes = [LayerShape(*s) for s in LAYERS]
    for order in ("none", ".".join(rng.permutation(sides))):
        last = 0.0
        for level in range(len(sides) + 2):
            got = native.plan(lib, "auto", f"level={level},order={order},pairs=sorted", LAYERS, 4096, n_layer_model=12)
            plans = METHODS["auto"](level=level, order=order, pairs="sorted").plans(shapes)
            keys = [(k.bits + k.fast_bits) / 2 if k.split else k.bits for k in (p.k.codec for p in plans)]
            bits = (sum(keys) + sum(p.v.codec.bits for p in plans)) / 24
            assert got["bits_headline"] == pytest.approx(bits) and got["bits"] >= last
            last = got["bits"]
    assert {(p.k.codec.scale, p.v.codec.scale) for p in plans} == {(1, 1)}
    rungs = {(p.k.codec.fast_bits, p.k.codec.bits) if p.k.codec.split else (4, 4) for p in plans}
    assert rungs == {SORTED_KEYS[-1]} and {p.v.codec.bits for p in plans} == {SORTED_VALUES[-1]}
    for wrong in ("0k.0v", "0.1.2", ".".join(sides[1:]), "0x"):
        with pytest.raises(MethodError, match="layers 4k and 3v times"):
            native.plan(lib, "auto", f"level=3,order={wrong},pairs=sorted", LAYERS, 4096, n_layer_model=12)


# ------------------------------------------------------------------ reading them


@pytest.mark.parametrize(("weak", "strong"), [*SORTED_KEYS, (0, 4), (3, 2)])
@pytest.mark.parametrize(("head", "neox"), [(64, 0), (128, 1), (96, 1)])
@pytest.mark.parametrize("moved", [False, True])
def test_attention_over_sorted_keys(lib: CDLL, weak: Any, strong: Any, head: int, neox: Any, moved: Any) -> None:
    """Equals f64 attention over R_(pos - sealed) unsorted + R_pos mean; f32 and folded queries, one token and many."""
    rng = np.random.default_rng(head + strong)
    heads, gqa, n = 2, 3, 96
    sealed = np.arange(700, 700 + n, dtype=np.int32)
    pos = sealed - 512 * moved
    rot = lib.kvq_rotary_new(head, neox, 1e4, 3100)
    speed = 1e4 ** (-2.0 * np.arange(head // 2) / head)
    average = [rng.normal(size=(heads, head)).astype(np.float32) for _ in range(2)]
    energy = np.exp(rng.normal(size=(2, heads, head)))
    channel, gain = sorted_keys(energy[0], energy[1], "neox" if neox else "norm")
    keys = Codec(LATTICE, K, strong, 2, 1, 0, 0.0, 32, head)
    if weak != strong:
        keys = keys.with_(split=SPLIT_NORM, fast_bits=weak)
    else:  # one block: channels stay where they are, with their gains
        by_channel = np.argsort(channel, axis=1)
        channel, gain = (np.take_along_axis(x, by_channel, axis=1) for x in (channel, gain))
        assert (channel == np.arange(head)).all()
    values = Codec(LATTICE, V, 3, 2, 1, 0, 0.0, 32, head)
    exact: list[Any] = [np.zeros((heads, n, head)) for _ in range(2)]
    pages: list[kernels.Page] = []
    for p in range(3):
        lanes: list[Any] = []
        at = slice(32 * p, 32 * p + 32)
        for role, c in enumerate((keys, values)):
            blocks = [kernels.encode(lib, c, rng.normal(size=(32, head)).astype(np.float16)) for _ in range(heads)]
            rows = np.stack([lattice.exact(c, *b) for b in blocks])
            mean = average[role][:, None].astype(np.float64) * np.ones((32, 1))
            if role == K:
                rows = np.stack([lattice.unsort_rows(r, channel[h], gain[h]) for h, r in enumerate(rows)])
                back = np.stack([lattice.sort_rows(r, channel[h], gain[h]) for h, r in enumerate(rows)])
                assert np.abs(back - np.stack([lattice.exact(c, *b) for b in blocks])).max() < 1e-4
                rows, mean = rotate(rows, pos[at] - sealed[at], speed, neox), rotate(mean, pos[at], speed, neox)
            exact[role][:, at] = rows + mean
            lanes.append(tuple(np.stack(x) for x in zip(*blocks)))
        pages.append(kernels.Page(lanes[0], lanes[1], 32, 32 * p))
    for n_q in (1, 17):
        q = (0.3 * rng.normal(size=(n_q, heads * gqa, head))).astype(np.float32)
        want = attention.attend(q, exact[0], exact[1], np.zeros((n_q, 1, n)), head**-0.5)
        for flags in (0, kernels.F32):
            dst = np.zeros_like(q)
            stream = kernels.Stream(keys, values, heads, n, pages, q, dst, head**-0.5, flags=flags)
            given = {"means": average, "rotary": rot.contents, "positions": pos, "sealed": sealed}
            kernels.attend(lib, [stream], 2, **given, order=(channel, gain))
            assert np.sqrt(((dst - want) ** 2).mean() / (want**2).mean()) < 3e-3, (n_q, flags)
            kernels.attend(lib, [stream], 2, **given)
            assert np.abs(dst - want).max() > 0.02  # the test sees what it tests
    lib.kvq_rotary_free(rot)


# ------------------------------------------------------------------ of a model


@pytest.fixture(scope="module")
def fitted(demo_model: Path) -> means.Means:
    return means.fit(demo_model, MEANS, n_sequences=1, length=512, shorten=True)


def test_sorted_keys_come_with_an_order_of_layers(demo_model: Path, fitted: means.Means, tmp_path: Path) -> None:
    """The data hold it, the library takes it, and keys of other pairs do without."""
    assert fitted.climb.count("k") == 12 * 4 and fitted.climb.count("v") == 12 * 3
    sorted_ones = replace(fitted, pairs="sorted")
    path = tmp_path / "sorted.kvq.gguf"
    files.write_sidecar(path, files.fields(demo_model, sorted_ones, 4), files.arrays(sorted_ones))
    lines = {}
    for opts in ("bits=2", "bits=2,order=none", "bits=2,pairs=none"):
        with Model(demo_model, kv_method="auto", kv_opts=opts, kv_config=path, n_ctx=512) as model:
            lines[opts] = model.load_line
    assert "halves" in lines["bits=2"] and "halves" not in lines["bits=2,pairs=none"]
    assert lines["bits=2"].split(", V")[0] != lines["bits=2,order=none"].split(", V")[0].replace(",order=none", "")
    assert "kvq.auto.order" not in files.fields(demo_model, fitted, 4)


def test_sorted_keys_lose_less_than_whole_ones(demo_model: Path, fitted: means.Means) -> None:
    """At equal code bits, even on the demo model, where halves by speed are better still."""
    assert fitted.pairs == "norm" and len(fitted.order) == 12
    lost = halves.losses(demo_model, fitted, MEANS)
    assert 0 < lost["sorted"] < 0.9 * lost["none"]


def with_order(
    demo_model: Path, fitted: means.Means, out: Path, il: int, channel: np.ndarray, gain: np.ndarray
) -> Path:
    changed = means.Means(fitted.mean, fitted.removed, fitted.rms, "sorted", {**fitted.order, il: (channel, gain)})
    files.write_sidecar(out, files.fields(demo_model, changed, 4), files.arrays(changed))
    return out


def test_an_order_that_is_none_is_refused(demo_model: Path, fitted: means.Means, tmp_path: Path) -> None:
    """One line that names the field: twice the same channel, no channel, a gain of nothing, pairs torn apart."""
    channel, gain = fitted.order[5]
    twice, beyond, torn, nothing = channel.copy(), channel.copy(), channel.copy(), gain.copy()
    twice[3], beyond[3], nothing[7] = twice[2], 1.5, 0.0
    torn[[1, 2]] = torn[[2, 1]]
    for bad, message in (
        ((twice, gain), "blk.5.k.order does not name each channel of a head of 64 once"),
        ((beyond, gain), "blk.5.k.order holds 1.5, which"),
        ((channel, nothing), "blk.5.k.gain holds 0"),
        ((channel[:-2], gain), "blk.5.k.order has 126 values"),
    ):
        path = with_order(demo_model, fitted, tmp_path / "bad.kvq.gguf", 5, *bad)
        with pytest.raises(KvqError, match=message):
            Model(demo_model, kv_method="auto", kv_config=path, n_ctx=512)
    path = with_order(demo_model, fitted, tmp_path / "torn.kvq.gguf", 5, torn, gain)
    with pytest.raises(KvqError, match=r"layer 5: .*pairs that its rotary embedding does not have"):
        Model(demo_model, kv_method="auto", kv_config=path, n_ctx=512)


def test_states_and_shifts_of_sorted_keys(demo_model: Path, fitted: means.Means, tmp_path: Path) -> None:
    """A state comes back as the same blocks, in rows and compact; a context shift leaves the text readable."""
    config = with_order(demo_model, fitted, tmp_path / "good.kvq.gguf", 5, *fitted.order[5])
    for state in ("rows", "compact"):
        opts = f"bits=3,at=131072,state={state}"
        with Model(demo_model, kv_method="auto", kv_opts=opts, kv_config=config, n_ctx=1024) as model:
            ids = model.tokenize(MEANS)[:600]
            before = model.logits(ids)[-1]
            model.save_state(tmp_path / "state")
            want = "".join(model.generate("so", max_tokens=12, temperature=0, reset=False))
            model.reset()
            model.load_state(tmp_path / "state")
            assert "".join(model.generate("so", max_tokens=12, temperature=0, reset=False)) == want
            assert np.isfinite(before).all()

"""Coordinates of cells in a calibrated basis (types/basis.h): bytes, attention, and a model that has them."""

from __future__ import annotations

from ctypes import CDLL, POINTER, c_float
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggml_kvq import Model, cli, default_means, sidecars
from ggml_kvq.calibrate import basis as bases
from ggml_kvq.calibrate import files, halves, means
from ggml_kvq.core import kernels, loader, native
from ggml_kvq.errors import KvqError
from ggml_kvq.evaluate import specs
from ggml_kvq.launch import launcher
from ggml_kvq.reference import attention, basis, lattice
from ggml_kvq.reference.codec import LATTICE, Codec, K, V
from ggml_kvq.resolver import FirstUse
from test_aqua import rotate
from test_declared import check_cells_that_lie_apart
from test_first_use import alone, load_lines
from test_llama_features import random_walk

MEANS = default_means.TEXT.read_text(encoding="utf-8")
COORDS = 12
F32 = POINTER(c_float)


@pytest.fixture(scope="module")
def lib() -> Any:
    return loader.libraries().need_kvq()


def at(x: np.ndarray) -> Any:
    return x.ctypes.data_as(F32)


def some_bases(rng: np.random.Generator, width: int, n: int, of_values: int) -> bases.Bases:
    mixed = rng.normal(size=(width, width)) * np.exp(-np.arange(width) / 8)
    covariance, to_values = mixed @ mixed.T / width, rng.normal(size=(width, of_values)) / width**0.5
    energy = np.einsum("ij,ik,kj->j", to_values, covariance, to_values) + 1.0
    return bases.fit(covariance, np.exp(rng.normal(size=width)), n, covariance @ to_values, energy)


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize(("heads", "head", "coords"), [(3, 64, 6), (2, 64, 8), (1, 256, 16), (8, 128, 8), (2, 80, 2)])
def test_the_library_writes_what_the_definition_says(lib: CDLL, heads: int, head: int, coords: int) -> None:
    """Every byte of coordinates and scales, in the bytes behind each head's scales, and the rows that they say."""
    rng = np.random.default_rng(heads * head + coords)
    c = Codec(LATTICE, K, 2, 2, 2, 0, 0.0, 32, head, coords=coords)
    width, n, of_values = heads * head, heads * coords - 2, heads * head + 16
    b = some_bases(rng, width, n, of_values)
    rows = (rng.normal(size=(32, n)) @ b.keys.axes + 0.1 * rng.normal(size=(32, width))).astype(np.float32)
    rows[5], rows[7] = 0, rows[7] * 1e4
    _, nb = lattice.nbytes(c)
    params = np.full((heads, nb), 0xA5, np.uint8)
    native.check(lib, lib.kvq_coords_encode(kernels.c_codec(c), heads, at(b.read), at(rows), params.ctypes))
    codes, scale = basis.encode(rows, b.read)
    kept = nb - coords // 2 * 32
    assert (params[:, :kept] == 0xA5).all()
    assert [x.tobytes() for x in params[:, kept:]] == basis.pack(codes, scale, heads)
    for side in (b.keys, b.values):
        out = np.empty((32, side.axes.shape[1]), np.float32)
        args = kernels.c_codec(c), heads, out.shape[1], at(side.axes), params.ctypes, at(out)
        native.check(lib, lib.kvq_coords_decode(*args))
        assert (out == basis.decode(codes, scale, side.axes)).all()


def test_numbers_that_do_not_fit_are_refused(lib: CDLL) -> None:
    odd = Codec(LATTICE, K, 2, 2, 2, 0, 0.0, 32, 64, coords=3)
    none = np.zeros(64 * 64, np.float32)
    for c, heads in ((odd, 2), (odd.with_(coords=2), 1), (odd.with_(coords=66), 1), (odd.with_(coords=0), 2)):
        assert lib.kvq_coords_encode(kernels.c_codec(c), heads, at(none), at(none), none.ctypes) != 0, c
    assert lib.kvq_coords_decode(kernels.c_codec(odd.with_(coords=4)), 2, 0, at(none), none.ctypes, at(none)) != 0
    assert not lib.kvq_basis_new(3, 64, at(none), at(none)) and not lib.kvq_basis_new(0, 64, at(none), at(none))


def test_coordinates_leave_the_energy_that_the_fit_foretells() -> None:
    rng = np.random.default_rng(3)
    width, n = 96, 14
    mixed = rng.normal(size=(width, width)) * np.exp(-np.arange(width) / 8)
    keys = (rng.normal(size=(4096, width)) @ mixed.T).astype(np.float32)
    values = (keys @ rng.normal(size=(width, 48)) + 20 * rng.normal(size=(4096, 48))).astype(np.float32)
    b = bases.fit(keys.T @ keys / 4096, np.ones(width), n, keys.T @ values / 4096, np.square(values).mean(0))
    codes = basis.encode(keys, b.read)
    for rows, side, most in ((keys, b.keys, 0.1), (values, b.values, 0.6)):
        left = np.square(rows - basis.decode(*codes, side.axes)).mean(0).sum()
        assert left < most * np.square(rows).mean(0).sum() and abs(left / side.left.sum() - 1) < 0.15
    turn = bases.rotation(n)
    assert np.allclose(turn @ turn.T, np.eye(n))


# ------------------------------------------------------------------ attention


@pytest.mark.parametrize(("heads", "head", "neox", "coords"), [(3, 64, 0, 6), (2, 128, 1, 8), (1, 96, 1, 24)])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("values", [True, False])
def test_attention_over_coordinates(
    lib: CDLL, heads: int, head: int, neox: Any, coords: int, moved: bool, values: bool
) -> None:
    """Equals f64 attention over R_(pos - sealed) decoded + R_pos (mean + coordinates); one token, two and many. values:
    are they read from coordinates? Five pages: more than one run of them.
    """
    rng = np.random.default_rng(head)
    gqa, n, width = {64: 3, 128: 4, 96: 1}[head], 160, heads * head
    sealed = np.arange(700, 700 + n, dtype=np.int32)
    pos = sealed - 512 * moved
    if moved:
        pos[40] += 1  # cells of a page that are apart
    rot = lib.kvq_rotary_new(head, neox, 1e4, 3100)
    speed = 1e4 ** (-2.0 * np.arange(head // 2) / head)
    average = [rng.normal(size=(heads, head)).astype(np.float32) for _ in range(2)]
    codecs = [Codec(LATTICE, role, 2 + role, 2, 2, 0, 0.0, 32, head) for role in (K, V)]
    codecs[K] = codecs[K].with_(coords=coords)
    b = some_bases(rng, width, heads * coords - 2, width)
    there: list[Any] = [
        lib.kvq_basis_new(len(b.read), width, at(b.keys.axes), at(b.read)),
        lib.kvq_basis_new(len(b.read), width, at(b.values.axes), None) if values else None,
    ]
    exact: list[Any] = [np.zeros((heads, n, head)) for _ in range(2)]
    pages: list[kernels.Page] = []
    for p in range(n // 32):
        cells = slice(32 * p, 32 * p + 32)
        z = (4 * rng.normal(size=(32, len(b.read))) @ b.keys.axes).astype(np.float32)
        codes = basis.encode(z, b.read)
        lanes: list[Any] = []
        for role, c in enumerate(codecs):
            plain = c.with_(coords=0)
            blocks = [kernels.encode(lib, plain, rng.normal(size=(32, head)).astype(np.float16)) for _ in range(heads)]
            rows = np.stack([lattice.exact(plain, *x) for x in blocks])
            said = average[role][:, None].astype(np.float64) * np.ones((32, 1))
            if role == K or values:
                axes = (b.values if role == V else b.keys).axes
                said = said + basis.decode(*codes, axes).reshape(32, heads, head).swapaxes(0, 1)
            params = np.stack([x[1] for x in blocks])
            if role == K:
                whole = np.zeros((heads, lattice.nbytes(c)[1]), np.uint8)
                whole[:, : params.shape[1]] = params
                lib.kvq_coords_encode(kernels.c_codec(c), heads, at(b.read), at(z), whole.ctypes)
                params = whole
                rows, said = (
                    rotate(rows, pos[cells] - sealed[cells], speed, neox),
                    rotate(said, pos[cells], speed, neox),
                )
            exact[role][:, cells] = rows + said
            lanes.append((np.stack([x[0] for x in blocks]), params))
        pages.append(kernels.Page(lanes[0], lanes[1], 32, 32 * p))
    for n_q in (1, 2, 17):
        q = (0.3 * rng.normal(size=(n_q, heads * gqa, head))).astype(np.float32)
        want = attention.attend(q, exact[0], exact[1], np.zeros((n_q, 1, n)), head**-0.5)
        for flags in (0, kernels.F32):
            dst = np.zeros_like(q)
            stream = kernels.Stream(codecs[0], codecs[1], heads, n, pages, q, dst, head**-0.5, flags=flags)
            given = {"means": average, "rotary": rot.contents, "positions": pos, "sealed": sealed}
            kernels.attend(lib, [stream], 2, **given, bases=(there[0], there[1]))
            assert np.sqrt(((dst - want) ** 2).mean() / (want**2).mean()) < 3e-3, (n_q, flags)
            kernels.attend(lib, [stream], 2, **given)
            assert np.abs(dst - want).max() > 0.02  # the test sees what it tests
    for x in there:
        lib.kvq_basis_free(x)
    lib.kvq_rotary_free(rot)


# ------------------------------------------------------------------ of a model


@pytest.fixture(scope="module")
def fitted(demo_model: Path) -> means.Means:
    out = means.fit(demo_model, MEANS, n_sequences=1, length=1024, shorten=True, coords=COORDS)
    return replace(out, pairs="sorted")


@pytest.fixture(scope="module")
def sidecar(demo_model: Path, fitted: means.Means, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("coords") / "coords.kvq.gguf"
    files.write_sidecar(out, files.fields(demo_model, fitted, 4), files.arrays(fitted))
    return out


def logits(model: Model, ids: np.ndarray) -> np.ndarray:
    model.reset()
    wanted = np.arange(len(ids)) >= len(ids) // 2
    return np.concatenate([rows.copy() for rows in model.feed(ids, outputs=wanted)])


def test_coordinates_lose_less(demo_model: Path, sidecar: Path, fitted: means.Means, tmp_path: Path) -> None:
    """At the same bits of a long context, and the load line says that they are there."""
    plain, other = tmp_path / "plain.kvq.gguf", means.without_coordinates(fitted)
    files.write_sidecar(plain, files.fields(demo_model, other, 4), files.arrays(other))
    size: dict[str, Any] = {"n_ctx": 1024, "n_batch": 64, "n_ubatch": 64}
    with Model(demo_model, "f16", **size) as model:
        ids = np.asarray(model.tokenize(MEANS * 2)[300:1300], np.int32)
        exact = logits(model, ids)
    lost = []
    for data in (sidecar, plain):
        with Model(demo_model, "auto", "bits=2.25", kv_config=data, **size) as model:
            lost.append(halves.divergence(exact, logits(model, ids)))
            assert ("12 coordinates a head" in model.load_line) == (data == sidecar)
    assert lost[0] < 0.8 * lost[1], lost


@pytest.mark.parametrize("state", ["rows", "compact"])
def test_a_state_comes_back_as_it_was(demo_model: Path, sidecar: Path, tmp_path: Path, state: str) -> None:
    """Pages come back as they were sealed, and what follows is the same."""
    size: dict[str, Any] = {"n_ctx": 1024, "kv_config": sidecar}
    with Model(demo_model, "auto", f"bits=2.5,state={state}", **size) as model:
        ids = np.asarray(model.tokenize(MEANS)[:700], np.int32)
        logits(model, ids)
        model.save_state(tmp_path / "s")
        want = np.concatenate([x.copy() for x in model.feed(ids[:3])])
        assert model.load_state(tmp_path / "s")
        again = np.concatenate([x.copy() for x in model.feed(ids[:3])])
        assert (want == again).all()
    with Model(demo_model, "auto", f"bits=2.5,state={state}", **size) as model:
        assert model.load_state(tmp_path / "s")
        assert model.kv_stats()["n_sealed"] > 0
        assert (want == np.concatenate([x.copy() for x in model.feed(ids[:3])])).all()


@pytest.fixture(scope="module")
def beside(demo_model: Path, sidecar: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model with the data in their default place, where every program finds them."""
    out = tmp_path_factory.mktemp("beside") / "demo.gguf"
    out.write_bytes(demo_model.read_bytes())
    Path(sidecars.default_path(out)).write_bytes(sidecar.read_bytes())
    return out


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize(("level", "declared"), [(-1, "f16"), (-1, "q8_0"), (30, "q4_1")])
def test_random_walk_follows_upstream(beside: Path, unified: bool, level: int, declared: str) -> None:
    """Cuts, copies, shifts, saves and restores: pages of values follow the keys that they are read with."""
    opts = f"level={level}" if level >= 0 else "bits=4"
    kld = random_walk(beside, "auto", opts, unified, 120, 11, declared=declared)
    print(f"{opts} {declared}: KLD mean {np.mean(kld):.5f} max {np.max(kld):.5f}")
    assert len(kld) > 40 and np.mean(kld) < (0.05 if level < 0 else 0.2) and np.max(kld) < 3


@pytest.mark.parametrize("declared", ["f16", "q4_1"])
def test_a_saved_sequence_comes_back_into_cells_that_lie_apart(beside: Path, declared: str) -> None:
    """Blocks of values carry their coordinates: keys are sealed anew there."""
    check_cells_that_lie_apart(beside, "auto", "bits=4", declared, 0.1)


def test_data_that_do_not_fit_are_refused(demo_model: Path, fitted: means.Means, tmp_path: Path) -> None:
    b = fitted.bases[3]
    path = tmp_path / "bad.kvq.gguf"
    short = replace(b, read=b.read[:-2], keys=replace(b.keys, axes=b.keys.axes[:-2]))
    for bad, message in (
        (short, r"blk.3.k.axes has 20 coordinates, option coords=12 asks for 22"),
        (replace(b, read=b.read[:-2]), r"blk.3.k.read is 20 x 128, not"),
        (replace(b, keys=replace(b.keys, axes=b.keys.axes * np.float32(np.nan))), r"blk.3.k.axes holds a value that"),
        (replace(b, values=replace(b.values, axes=b.values.axes[:-2])), r"blk.3.v.axes has 20 coordinates"),
    ):
        changed = replace(fitted, bases={**fitted.bases, 3: bad})
        files.write_sidecar(path, files.fields(demo_model, changed, 4), files.arrays(changed))
        with pytest.raises(KvqError, match=message):
            Model(demo_model, kv_method="auto", kv_config=path, n_ctx=512)


@pytest.mark.parametrize(
    ("opts", "message"),
    [
        ("coords=7", "even"),
        ("coords=66", "0..64"),
        ("coords=12,far=f16", "cannot go with far=f16"),
        ("coords=12,window=auto", "cannot go with window=auto"),
        ("coordinates=on,coords=0", "coordinates=on cannot go with coords=0"),
        ("coordinates=on,predictors=on", "coordinates=on cannot go with predictors=on"),
        ("coordinates=on,means=off", "coordinates=on cannot go with means=off"),
        ("coords=12,predictors=on", "cannot go with predictor"),
    ],
)
def test_options_that_cannot_be(demo_model: Path, sidecar: Path, opts: str, message: str) -> None:
    with pytest.raises(KvqError, match=message):
        Model(demo_model, kv_method="auto", kv_opts=opts, kv_config=sidecar, n_ctx=512)


def test_coordinates_of_the_data_give_way(demo_model: Path, sidecar: Path) -> None:
    """Options that they cannot go with, as for data without; named without data they are refused."""
    order = ".".join(["0k.1k.2k.3k.4k.5k.6k.7k.8k.9k.10k.11k"] * 4 + ["0v.1v.2v.3v.4v.5v.6v.7v.8v.9v.10v.11v"] * 3)
    for opts in (
        "bits=3,window=auto",
        "bits=3,means=off",
        "bits=3,far=f16",
        "bits=3,pairs=none",
        f"bits=3,order={order}",
    ):
        with Model(demo_model, kv_method="auto", kv_opts=opts, kv_config=sidecar, n_ctx=512) as model:
            assert "coordinates" not in model.load_line, opts
    with pytest.raises(KvqError, match="coords=12 needs calibrated data"):
        Model(demo_model, kv_method="auto", kv_opts="coords=12", kv_config="none", n_ctx=512)


def test_heads_without_halves_have_a_lowest_rung(lib: CDLL) -> None:
    """Head sizes that are no multiple of 16: keys are one block, of 1 bit at least."""
    shapes = [(il, 4, 72, 72) for il in range(4)]
    opts = "bits=4,pairs=sorted,means=on,coords=8"
    assert native.plan(lib, "auto", opts, shapes, 4096, n_layer_model=4)["bytes_total"] > 0


def test_layers_that_stand_alone_have_none(lib: CDLL) -> None:
    """Those of a sliding window, which the data name."""
    shapes = [(il, 3, 64, 64) for il in range(4)]
    size = {}
    for alone_are in ("none", "0", "0.2", "0.1.2.3"):
        opts = f"level=3,pairs=sorted,means=on,coords=8,alone={alone_are}"
        size[alone_are] = native.plan(lib, "auto", opts, shapes, 4096, n_layer_model=4)["bytes_params"]
    steps = np.diff(list(size.values()))
    assert steps[0] < 0 and steps[1] == steps[0] and steps[2] == 2 * steps[0], size


def test_coordinates_that_do_not_pay_are_left_out(demo_model: Path, fitted: means.Means, tmp_path: Path) -> None:
    """What loses more at the same bits goes, and whoever asks for coordinates is told."""
    text = default_means.MORE.read_text(encoding="utf-8")
    assert halves.with_coordinates(demo_model, fitted, text, 2) is fitted
    rng = np.random.default_rng(0)
    wrong = {il: replace(x, read=rng.normal(size=x.read.shape).astype(np.float32)) for il, x in fitted.bases.items()}
    left = halves.with_coordinates(demo_model, replace(fitted, bases=wrong), text, 2)
    assert left.coords == 0 and not left.bases and left.climb == fitted.climb_without
    there = tmp_path / "left.kvq.gguf"
    files.write_sidecar(there, files.fields(demo_model, left, 4), files.arrays(left))
    size: dict[str, Any] = {"n_ctx": 512, "n_threads": 2}
    with Model(demo_model, kv_bits=2.5, kv_opts="coordinates=on", kv_config=there, **size) as model:
        assert "coordinates lose more than they bring with this model: it has none" in model.load_line
    assert halves.with_coordinates(demo_model, fitted, "few words", 2) is fitted


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and less text to measure."""
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(default_means, "SEQUENCES", 1)
    return tmp_path / "cache"


def test_a_models_first_use_fits_them(
    demo_model: Path, cache: Path, fitted: means.Means, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, for Python, launchers, eval and the library alone; as many as hold enough."""
    size: dict[str, Any] = {"n_ctx": 512, "n_threads": 2}
    for _ in range(2):
        with Model(demo_model, kv_bits=2.5, kv_opts="coordinates=on", **size) as model:
            assert "coordinates a head" in model.load_line and "first use" in model.load_line
    assert capsys.readouterr().err.count("what the heads of a layer have in common, once") == 1
    (there,) = (cache / "means").iterdir()
    assert there.name.endswith(FirstUse.COORDINATES.ending)
    n = int(files.read_sidecar(there)[0]["kvq.auto.coords"])
    assert 8 <= n <= 24
    got = launcher.command("llama-cli", ["-m", str(demo_model), "--kv-bits", "2.5", "--kv-opt", "coordinates=on"], {})
    assert got.env["KVQ_CONFIG"] == str(there)
    assert specs.parse("auto:bits=2.5,coordinates=on").means(demo_model) == str(there)
    argv = ["-m", str(demo_model), "-p", "a", "-n", "1", "-c", "256", "-no-cnv"]
    (line,) = load_lines(alone("llama-completion", *argv, KVQ_OPTS="bits=3.5,coordinates=on", KVQ_CACHE_DIR=str(cache)))
    assert f"{n} coordinates a head" in line
    with pytest.raises(AssertionError, match="plugin -m MODEL --coordinates fits them once.*coordinates=off"):
        alone("llama-completion", *argv, KVQ_OPTS="bits=3.5,coordinates=on", KVQ_CACHE_DIR="/no/such")
    plain = tmp_path / "plain.kvq.gguf"  # the user's own data go first
    without = replace(fitted, coords=None, bases={}, left={}, climb="none")
    files.write_sidecar(plain, files.fields(demo_model, without, 4), files.arrays(without))
    with pytest.raises(KvqError, match="hold no coordinates: make them with ggml-kvq calibrate --coords auto"):
        Model(demo_model, kv_bits=2.5, kv_opts="coordinates=on", kv_config=plain, **size)


def test_calibrate_makes_them(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "t.txt", tmp_path / "c.kvq.gguf"
    text.write_text(MEANS)
    command = ["calibrate", "-m", str(demo_model), "-f", str(text), "-o", str(out), "--sequences", "1", "--length"]
    assert cli.main([*command, "512", "--coords", "8"]) == 0
    meta, data = files.read_sidecar(out)
    assert meta["kvq.auto.coords"] == 8
    assert data["kvq.aqua.blk.0.k.read"].shape == data["kvq.aqua.blk.11.v.axes"].shape == (14, 128)
    with pytest.raises(SystemExit):
        cli.main([*command, "512", "--coords", "9"])
    assert "9 is not an even number up to 64, or auto" in capsys.readouterr().err
    assert cli.main([*command, "512", "--coords", "auto"]) == 0
    n = int(files.read_sidecar(out)[0]["kvq.auto.coords"])
    assert f"{n} coordinates a head" in capsys.readouterr().out and 8 <= n <= 24


def test_as_many_coordinates_as_hold_nine_tenths() -> None:
    size = np.r_[np.full(22, 90 / 22), np.full(42, 10 / 42)]  # 22 channels hold it: 12 a head of two
    layer = (np.diag(size), np.ones(64), 2)
    assert bases.enough([layer]) == 12
    flat = (np.eye(64), np.ones(64), 2)
    assert bases.enough([flat]) == 30 and bases.enough([(np.eye(512), np.ones(512), 1)]) == bases.MOST

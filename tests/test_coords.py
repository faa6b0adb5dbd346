"""Coordinates of cells in a calibrated basis (types/basis.h): bytes, attention, and a model that has them."""

from __future__ import annotations

from ctypes import CDLL, POINTER, c_float
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggml_kvq import Model, cli, default_means
from ggml_kvq.calibrate import basis as bases
from ggml_kvq.calibrate import files, halves, means
from ggml_kvq.core import kernels, loader, native
from ggml_kvq.errors import KvqError
from ggml_kvq.reference import attention, basis, lattice
from ggml_kvq.reference.codec import LATTICE, Codec, K, V
from test_aqua import rotate

MEANS = default_means.TEXT.read_text(encoding="utf-8")
COORDS = (12, 6)
F32 = POINTER(c_float)


@pytest.fixture(scope="module")
def lib() -> Any:
    return loader.libraries().need_kvq()


def at(x: np.ndarray) -> Any:
    return x.ctypes.data_as(F32)


def some_basis(rng: np.random.Generator, width: int, n: int) -> bases.Basis:
    mixed = rng.normal(size=(width, width)) * np.exp(-np.arange(width) / 8)
    return bases.fit(mixed @ mixed.T / width, np.exp(rng.normal(size=width)), n)


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize(("heads", "head", "coords"), [(3, 64, 6), (2, 64, 8), (1, 256, 16), (8, 128, 8), (2, 80, 2)])
@pytest.mark.parametrize("role", [K, V])
def test_the_library_writes_what_the_definition_says(lib: CDLL, heads: int, head: int, coords: int, role: int) -> None:
    """Every byte of coordinates and scales, in the bytes behind each head's scales, and the rows that they say."""
    rng = np.random.default_rng(heads * head + coords)
    c = Codec(LATTICE, role, 2, 2, 2, 0, 0.0, 32, head, coords=coords)
    width, n = heads * head, heads * coords - 2
    b = some_basis(rng, width, n)
    rows = (rng.normal(size=(32, n)) @ b.axes + 0.1 * rng.normal(size=(32, width))).astype(np.float32)
    rows[5], rows[7] = 0, rows[7] * 1e4
    _, nb = lattice.nbytes(c)
    params = np.full((heads, nb), 0xA5, np.uint8)
    native.check(lib, lib.kvq_coords_encode(kernels.c_codec(c), heads, at(b.axes), at(b.read), at(rows), params.ctypes))
    codes, scale = basis.encode(rows, b.read)
    kept = nb - coords // 2 * 32
    assert (params[:, :kept] == 0xA5).all()
    assert [x.tobytes() for x in params[:, kept:]] == basis.pack(codes, scale, heads)
    out = np.empty_like(rows)
    native.check(lib, lib.kvq_coords_decode(kernels.c_codec(c), heads, at(b.axes), at(b.read), params.ctypes, at(out)))
    assert (out == basis.decode(codes, scale, b.axes)).all()


def test_numbers_that_do_not_fit_are_refused(lib: CDLL) -> None:
    odd = Codec(LATTICE, K, 2, 2, 2, 0, 0.0, 32, 64, coords=3)
    none = np.zeros(64 * 64, np.float32)
    for c, heads in ((odd, 2), (odd.with_(coords=2), 1), (odd.with_(coords=66), 1), (odd.with_(coords=0), 2)):
        status = lib.kvq_coords_encode(kernels.c_codec(c), heads, at(none), at(none), at(none), none.ctypes)
        assert status != 0, c
    assert not lib.kvq_basis_new(3, 64, at(none), at(none)) and not lib.kvq_basis_new(0, 64, at(none), at(none))


def test_coordinates_leave_the_energy_that_the_fit_foretells() -> None:
    rng = np.random.default_rng(3)
    width, n = 96, 14
    mixed = rng.normal(size=(width, width)) * np.exp(-np.arange(width) / 8)
    b = bases.fit(mixed @ mixed.T, np.ones(width), n)
    rows = (rng.normal(size=(4096, width)) @ mixed.T).astype(np.float32)
    left = rows - basis.decode(*basis.encode(rows, b.read), b.axes)
    measured, all_of_it = np.square(left).mean(0).sum(), np.square(rows).mean(0).sum()
    assert measured < 0.1 * all_of_it and abs(measured / b.left.sum() - 1) < 0.15
    turn = bases.rotation(n)
    assert np.allclose(turn @ turn.T, np.eye(n))


# ------------------------------------------------------------------ attention


@pytest.mark.parametrize(
    ("heads", "head", "neox", "coords"), [(3, 64, 0, (6, 4)), (2, 128, 1, (8, 0)), (1, 96, 1, (0, 4))]
)
@pytest.mark.parametrize("moved", [False, True])
def test_attention_over_coordinates(lib: CDLL, heads: int, head: int, neox: Any, coords: Any, moved: bool) -> None:
    """Equals f64 attention over R_(pos - sealed) decoded + R_pos (mean + coordinates); one token and many."""
    rng = np.random.default_rng(head)
    gqa, n = 3, 96
    sealed = np.arange(700, 700 + n, dtype=np.int32)
    pos = sealed - 512 * moved
    if moved:
        pos[40] += 1  # cells of a page that are apart
    rot = lib.kvq_rotary_new(head, neox, 1e4, 3100)
    speed = 1e4 ** (-2.0 * np.arange(head // 2) / head)
    average = [rng.normal(size=(heads, head)).astype(np.float32) for _ in range(2)]
    codecs = [Codec(LATTICE, role, 2 + role, 2, 2, 0, 0.0, 32, head, coords=coords[role]) for role in (K, V)]
    found = [some_basis(rng, heads * head, heads * x - 2) if x else None for x in coords]
    there: list[Any] = [b and lib.kvq_basis_new(len(b.axes), heads * head, at(b.axes), at(b.read)) for b in found]
    exact: list[Any] = [np.zeros((heads, n, head)) for _ in range(2)]
    pages: list[kernels.Page] = []
    for p in range(3):
        lanes: list[Any] = []
        cells = slice(32 * p, 32 * p + 32)
        for role, (c, b) in enumerate(zip(codecs, found)):
            plain = c.with_(coords=0)
            blocks = [kernels.encode(lib, plain, rng.normal(size=(32, head)).astype(np.float16)) for _ in range(heads)]
            rows = np.stack([lattice.exact(plain, *x) for x in blocks])
            said = average[role][:, None].astype(np.float64) * np.ones((32, 1))
            params = np.stack([x[1] for x in blocks])
            if b is not None:
                whole = np.zeros((heads, lattice.nbytes(c)[1]), np.uint8)
                whole[:, : params.shape[1]] = params
                z = (4 * rng.normal(size=(32, len(b.axes))) @ b.axes).astype(np.float32)
                lib.kvq_coords_encode(kernels.c_codec(c), heads, at(b.axes), at(b.read), at(z), whole.ctypes)
                said = said + basis.decode(*basis.encode(z, b.read), b.axes).reshape(32, heads, head).swapaxes(0, 1)
                params = whole
            if role == K:
                rows, said = (
                    rotate(rows, pos[cells] - sealed[cells], speed, neox),
                    rotate(said, pos[cells], speed, neox),
                )
            exact[role][:, cells] = rows + said
            lanes.append((np.stack([x[0] for x in blocks]), params))
        pages.append(kernels.Page(lanes[0], lanes[1], 32, 32 * p))
    for n_q in (1, 17):
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


def test_coordinates_halve_the_loss(demo_model: Path, sidecar: Path) -> None:
    """At the same bits of a long context, and the load line says that they are there."""
    size: dict[str, Any] = {"n_ctx": 1024, "n_batch": 64, "n_ubatch": 64}
    with Model(demo_model, "f16", **size) as model:
        ids = np.asarray(model.tokenize(MEANS * 2)[300:1300], np.int32)
        exact = logits(model, ids)
    lost = []
    for opts in ("bits=2.5", "bits=2.5,k_coords=0,v_coords=0"):
        with Model(demo_model, "auto", opts, kv_config=sidecar, **size) as model:
            lost.append(halves.divergence(exact, logits(model, ids)))
            assert ("coordinates" in model.load_line) == (opts == "bits=2.5")
    assert lost[0] < 0.75 * lost[1], lost


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


def test_data_that_do_not_fit_are_refused(demo_model: Path, fitted: means.Means, tmp_path: Path) -> None:
    k, v = fitted.basis[3]
    assert k is not None and v is not None
    path = tmp_path / "bad.kvq.gguf"
    for bad, message in (
        (
            replace(k, axes=k.axes[:-2], read=k.read[:-2]),
            r"blk.3.k.axes has 20 coordinates, option k_coords=12 asks for 22",
        ),
        (replace(k, read=k.read[:-2]), r"blk.3.k.read is 20 x 128, not"),
        (replace(k, axes=k.axes * np.float32(np.nan)), r"blk.3.k.axes holds a value that is not finite"),
    ):
        changed = replace(fitted, basis={**fitted.basis, 3: (bad, v)})
        files.write_sidecar(path, files.fields(demo_model, changed, 4), files.arrays(changed))
        with pytest.raises(KvqError, match=message):
            Model(demo_model, kv_method="auto", kv_config=path, n_ctx=512)


@pytest.mark.parametrize(
    ("opts", "message"),
    [
        ("k_coords=7", "even"),
        ("k_coords=66", "0..64"),
        ("k_coords=2,v_coords=0,far=f16", "cannot go with far=f16"),
        ("predictors=on", "cannot go with predictor"),
    ],
)
def test_options_that_cannot_be(demo_model: Path, sidecar: Path, opts: str, message: str) -> None:
    with pytest.raises(KvqError, match=message):
        Model(demo_model, kv_method="auto", kv_opts=opts, kv_config=sidecar, n_ctx=512)


def test_calibrate_makes_them(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "t.txt", tmp_path / "c.kvq.gguf"
    text.write_text(MEANS)
    command = ["calibrate", "-m", str(demo_model), "-f", str(text), "-o", str(out), "--sequences", "1", "--length"]
    assert cli.main([*command, "512", "--coords", "8,4"]) == 0
    meta, data = files.read_sidecar(out)
    assert (meta["kvq.auto.k_coords"], meta["kvq.auto.v_coords"]) == (8, 4)
    assert data["kvq.aqua.blk.0.k.axes"].shape == (14, 128) and data["kvq.aqua.blk.11.v.read"].shape == (6, 128)
    with pytest.raises(SystemExit):
        cli.main([*command, "512", "--coords", "8,5"])
    assert "8,5 is not two even numbers" in capsys.readouterr().err

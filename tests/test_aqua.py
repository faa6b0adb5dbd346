"""AQUA (AQUA-KV, arXiv 2501.19392, section 3): rotary tables, means folded into attention, calibration files, whole
models with state files and shifts.
"""

from __future__ import annotations

import ctypes
from ctypes import CDLL
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggml_kvq import Model
from ggml_kvq.core import kernels, loader, native
from ggml_kvq.errors import KvqError, MethodError
from ggml_kvq.reference import LATTICE, Codec, K, V, attention, lattice

MODEL = Path(__file__).resolve().parents[1] / "models/kvq-demo-q8_0.gguf"
TEXT = (Path(__file__).parent / "data" / "manual.md").read_text()  # fixed: limits depend on it


@pytest.fixture(scope="module")
def lib() -> Any:
    return loader.libraries().need_kvq()


def rotary(n_dims: int, neox: Any, top: Any, base: float = 10000.0) -> Any:
    """(kvq_rotary, what it points to, angle per position f64 [n])."""
    speed = base ** (-2.0 * np.arange(n_dims // 2) / n_dims)

    def table(pos: Any) -> Any:
        return np.stack([np.cos(np.outer(pos, speed)), np.sin(np.outer(pos, speed))])  # [2, pos, n]

    high = np.ascontiguousarray(table(64 * np.arange(top // 64 + 1)).transpose(1, 0, 2), np.float32)
    low = np.ascontiguousarray(table(np.arange(80)).transpose(2, 0, 1), np.float32)
    at = [x.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for x in (high, low)]
    return native.kvq_rotary(n_dims, neox, len(high), *at), (high, low), speed


def rotate(x: Any, pos: Any, speed: Any, neox: Any) -> Any:
    """f64 rotary embedding of rows [..., t, d] at pos [t]."""
    y, n = np.array(x, np.float64), len(speed)
    c, s = np.cos(np.outer(pos, speed)), np.sin(np.outer(pos, speed))
    a, b = (
        (y[..., :n].copy(), y[..., n : 2 * n].copy())
        if neox
        else (y[..., 0 : 2 * n : 2].copy(), y[..., 1 : 2 * n : 2].copy())
    )
    u, v = a * c - b * s, a * s + b * c
    if neox:
        y[..., :n], y[..., n : 2 * n] = u, v
    else:
        y[..., 0 : 2 * n : 2], y[..., 1 : 2 * n : 2] = u, v
    return y


@pytest.mark.parametrize(
    ("head", "n_dims", "neox"), [(64, 64, 0), (64, 64, 1), (128, 128, 1), (96, 48, 1), (80, 32, 0)]
)
@pytest.mark.parametrize("order", ["run", "shuffled"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_means_and_rotary_embedding_are_put_back_while_reading(
    lib: CDLL, head: int, n_dims: int, neox: Any, order: Any, bits: int
) -> None:
    """Equals f64 attention over R_pos(decoded + mean) and decoded + mean; keys in f32 over 7-bit points, values
    folded to int8.
    """
    rng = np.random.default_rng(bits)
    heads, gqa, n = 2, 2, 96
    pos = np.arange(1000, 1000 + n, dtype=np.int32) if order == "run" else rng.permutation(3000)[:n].astype(np.int32)
    rot, _keep, speed = rotary(n_dims, neox, 3100)
    means = [rng.normal(size=(heads, head)).astype(np.float32) for _ in range(2)]
    codecs: list[Any] = [Codec(LATTICE, role, bits, 2, 1, 0, 0.0, 32, head) for role in (K, V)]
    exact: list[Any] = [np.zeros((heads, n, head)) for _ in range(2)]
    pages: list[kernels.Page] = []
    for p in range(3):
        lanes: list[Any] = []
        at = slice(32 * p, 32 * p + 32)
        for role, c in enumerate(codecs):
            blocks = [kernels.encode(lib, c, rng.normal(size=(32, head)).astype(np.float16)) for _ in range(heads)]
            rows = np.stack([lattice.exact(c, *b) for b in blocks]) + means[role][:, None]
            exact[role][:, at] = rows if role == V else rotate(rows, pos[at], speed, neox)
            lanes.append(tuple(np.stack(x) for x in zip(*blocks)))
        pages.append(kernels.Page(lanes[0], lanes[1], 32, 32 * p))
    q = (0.5 * rng.normal(size=(3, heads * gqa, head))).astype(np.float32)
    dst = np.zeros_like(q)
    stream = kernels.Stream(codecs[0], codecs[1], heads, n, pages, q, dst, head**-0.5)
    kernels.attend(lib, [stream], means=means, rotary=rot, positions=pos)
    want = attention.attend(q, exact[0], exact[1], np.zeros((3, 1, n)), head**-0.5)
    assert np.sqrt(((dst - want) ** 2).mean() / (want**2).mean()) < 0.01
    without = np.zeros_like(q)
    stream.dst = without
    kernels.attend(lib, [stream])
    assert np.abs(without - want).max() > 0.3  # the test sees what it tests


@pytest.mark.parametrize(
    ("head", "n_dims", "neox", "base"),
    [(64, 64, 0, 1e4), (128, 128, 1, 1e4), (128, 128, 0, 1e6), (96, 48, 1, 1e4), (256, 256, 1, 1e4)],
)
@pytest.mark.parametrize("moved", ["nothing", "all", "some", "cells", "shuffled", "no mean"])
@pytest.mark.parametrize("n_q", [1, 2, 12])
def test_keys_turned_before_encoding_take_their_mean_from_the_query(
    lib: CDLL, head: int, n_dims: int, neox: Any, base: Any, moved: Any, n_q: int
) -> None:
    """Equals f64 attention over R_(pos - sealed) decoded + R_pos mean: positions in a row, shifted since, and in no
    order at all.
    """
    rng = np.random.default_rng(n_q)
    heads, gqa, pages_n = 2, 4, 7
    n = 32 * pages_n
    sealed = np.arange(900, 900 + n, dtype=np.int32)
    sealed[96:] += 5  # a gap between pages
    pos = sealed.copy()
    if moved == "all":
        pos -= 512
    if moved == "some":
        pos[64:160] += 1000
    if moved == "cells":
        pos[70:100] -= 9
    if moved == "shuffled":
        sealed = pos = rng.permutation(3000)[:n].astype(np.int32)
    rot = lib.kvq_rotary_new(n_dims, neox, base, 3100)
    speed = base ** (-2.0 * np.arange(n_dims // 2) / n_dims)
    means = [2 * rng.normal(size=(heads, head)).astype(np.float32) for _ in range(2)]
    codecs: list[Any] = [Codec(LATTICE, role, 4, 2, 1, 0, 0.0, 32, head) for role in (K, V)]
    exact: list[Any] = [np.zeros((heads, n, head)) for _ in range(2)]
    pages: list[kernels.Page] = []
    for p in range(pages_n):
        lanes: list[Any] = []
        at = slice(32 * p, 32 * p + 32)
        for role, c in enumerate(codecs):
            blocks = [kernels.encode(lib, c, rng.normal(size=(32, head)).astype(np.float16)) for _ in range(heads)]
            rows = np.stack([lattice.exact(c, *b) for b in blocks])
            mean = means[role][:, None].astype(np.float64) * np.ones((32, 1))
            mean = 0 * mean if moved == "no mean" and role == K else mean
            exact[role][:, at] = (
                rows + mean
                if role == V
                else rotate(rows, pos[at] - sealed[at], speed, neox) + rotate(mean, pos[at], speed, neox)
            )
            lanes.append(tuple(np.stack(x) for x in zip(*blocks)))
        pages.append(kernels.Page(lanes[0], lanes[1], 32, 32 * p))
    q = (0.3 * rng.normal(size=(n_q, heads * gqa, head))).astype(np.float32)
    dst = np.zeros_like(q)
    stream = kernels.Stream(codecs[0], codecs[1], heads, n, pages, q, dst, head**-0.5)
    given = (np.zeros_like(means[0]), means[1]) if moved == "no mean" else means
    for flags in (0, kernels.F32):
        stream.flags = flags
        kernels.attend(lib, [stream], 2, means=given, rotary=rot.contents, positions=pos, sealed=sealed)
        want = attention.attend(q, exact[0], exact[1], np.zeros((n_q, 1, n)), head**-0.5)
        assert np.sqrt(((dst - want) ** 2).mean() / (want**2).mean()) < 1.5e-3, flags
    lib.kvq_rotary_free(rot)


# ------------------------------------------------------------------ calibration and files


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from ggml_kvq.calibrate import files, means

    out = tmp_path_factory.mktemp("aqua") / "demo.kvq.gguf"
    fitted = means.fit(MODEL, TEXT, n_sequences=2, length=256, n_threads=1)
    files.write_sidecar(out, files.fields(MODEL, fitted, 4), files.arrays(fitted))
    return out


def test_keys_are_captured_before_rotary_embedding() -> None:
    """The same token gives the same first-layer key at every position; after rotary embedding it would not."""
    from ggml_kvq.calibrate import capture

    shapes = capture.layers(MODEL)
    il, heads, size, _ = shapes[0]
    with capture.open_model(MODEL, 256, 1) as m:
        token = m.tokenize("the")[0]
        capture.run(m, np.full(128, token, np.int32))
        k = capture.rows(m, il, False, 0, 128, heads * size)
    assert np.abs(k - k[0]).max() < 5e-3 * np.abs(k).max() and np.abs(k).max() > 0.1


def test_an_interrupted_calibration_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from ggml_kvq.calibrate import capture, means

    whole = means.fit(MODEL, TEXT, n_sequences=3, length=64, n_threads=1)
    store, real, seen = tmp_path / "c.npz", capture.each, []

    def dies(*args: Any) -> Any:
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(capture, "each", dies)
    with pytest.raises(KeyboardInterrupt):
        means.fit(MODEL, TEXT, n_sequences=3, length=64, n_threads=1, checkpoint=store)
    again = means.fit(MODEL, TEXT, n_sequences=3, length=64, n_threads=1, checkpoint=store)
    assert len(seen) == 4
    for il, pair in whole.mean.items():
        assert all(np.array_equal(a, b) for a, b in zip(pair, again.mean[il]))


def opened(config: Any = None, opts: str = "", **kw: Any) -> Any:
    return Model(MODEL, kv_method="aqua", kv_opts=opts, kv_config=config, n_ctx=512, n_ubatch=64, n_threads=1, **kw)


def test_without_data_it_says_what_to_do() -> None:
    with pytest.raises(KvqError, match=r"kv_config=.*ggml-kvq calibrate.*kv_opts=.*none"):
        opened()


def test_means_help_and_a_model_with_data_inside_needs_no_options(sidecar: Any, tmp_path: Path) -> None:
    from ggml_kvq.calibrate import files

    own = tmp_path / "demo-aqua.gguf"
    files.embed(MODEL, sidecar, own)
    with Model(MODEL, kv_method="f16", n_ctx=512, n_threads=1) as m:
        ids = m.tokenize(TEXT)[:400]
        want = m.logits(ids).astype(np.float64)
    with Model(own, kv_method="upstream", n_ctx=512, n_threads=1) as m:  # llama.cpp itself does not mind the metadata
        assert m.logits(ids[:8]).shape[0] == 8
    error = {}
    for name, model in (("none", opened(opts="predictor=none,window=0")), ("bias", opened(sidecar, "window=0"))):
        with model as m:
            error[name] = np.abs(m.logits(ids, n_ubatch=64) - want).mean()
    assert error["bias"] < 0.9 * error["none"]
    with Model(own, n_ctx=512, n_ubatch=64, n_threads=1) as a, opened(sidecar) as b:
        assert a.kv_method == "aqua" and np.array_equal(a.logits(ids), b.logits(ids))


def change(path: Any, out: Any, edit: Any) -> Any:
    from ggml_kvq.calibrate import files

    meta, data = files.read_sidecar(path)
    edit(meta, data)
    files.write_sidecar(out, meta, data)
    return out


BAD = {
    "kvq.version": lambda m, d: m.update({"kvq.version": 9}),
    "kvq.model.arch": lambda m, d: m.update({"kvq.model.arch": "qwen2"}),
    "kvq.model.n_layer": lambda m, d: m.update({"kvq.model.n_layer": 5}),
    "kvq.model.hash": lambda m, d: m.update({"kvq.model.hash": "0" * 16}),
    "kvq.aqua.blk.3.k.bias": lambda m, d: d["kvq.aqua.blk.3.k.bias"].__setitem__(7, np.nan),
    "kvq.aqua.blk.2.v.bias": lambda m, d: d.pop("kvq.aqua.blk.2.v.bias"),
    "kvq.aqua.blk.1.k": lambda m, d: d.update({"kvq.aqua.blk.1.k.bias": np.zeros(12, np.float32)}),
    "kvq.aqua.blk.4.v.bias": lambda m, d: d.update({"kvq.aqua.blk.4.v.bias": np.zeros((2, 64), np.float32)}),
}


@pytest.mark.parametrize("field", BAD)
def test_bad_files_are_refused_with_the_field_named(sidecar: Any, tmp_path: Path, field: Any) -> None:
    with pytest.raises(KvqError, match=field.replace(".", r"\.")):
        opened(change(sidecar, tmp_path / "bad.gguf", BAD[field]))


def test_cut_and_foreign_files_are_refused(sidecar: Any, tmp_path: Path, write_gguf: Any) -> None:
    raw = sidecar.read_bytes()
    for i, n in enumerate((0, 3, 40, len(raw) // 2, len(raw) - 1)):
        cut = tmp_path / f"{i}.gguf"
        cut.write_bytes(raw[:n])
        with pytest.raises(KvqError, match="calibrated data"):
            opened(cut)
    with pytest.raises(KvqError, match=r"kvq\.\* metadata"):
        opened(MODEL)
    with pytest.raises(KvqError, match=r"kvq\.version"):
        opened(write_gguf("no-version.gguf", {"general.type": "kvq", "kvq.method": "aqua"}))


# ------------------------------------------------------------------ the cache


def test_a_saved_state_comes_back_bit_for_bit(sidecar: Any, tmp_path: Path) -> None:
    """Sealed pages return as the same blocks: the logits after loading equal those without."""
    with opened(sidecar, "window=32") as m:
        ids = m.tokenize(TEXT)[:330]
        for _ in m.feed(ids[:300]):
            pass
        m.save_state(tmp_path / "s")
        want = [x.copy() for x in m.feed(ids[300:], outputs=np.ones(30, bool), n_ubatch=1)]
        sealed = m.kv_stats()["n_sealed"]
    assert sealed > 100
    with opened(sidecar, "window=32") as m:
        m.load_state(tmp_path / "s")
        got = [x.copy() for x in m.feed(ids[300:], outputs=np.ones(30, bool), n_ubatch=1)]
    assert np.array_equal(np.array(got), np.array(want))


def test_refused_options(lib: CDLL) -> None:
    for opts in ("first_bits=5", "bits=0", "predictor=most", "grid=d8,bits=2"):
        with pytest.raises(MethodError, match=opts.split(",")[0].split("=")[0]):
            native.check(lib, lib.kvq_check(b"aqua", opts.encode()))

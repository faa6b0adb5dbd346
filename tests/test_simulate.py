"""The simulation of upstream's cache types with an exact window: rows against their definition, and what stays."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from ggml_kvq import cli, errors
from ggml_kvq.evaluate import simulate, specs
from test_sliding_windows import gemma3

IDS = [1 + 7 * i % 500 for i in range(150)]


Part = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], bool]


def parts_of(model: simulate.Simulated) -> list[Part]:
    """Every tensor of the caches: float32 [cells, channels], positions of the cells, and whether it holds values."""
    import ctypes

    lib, ctx = model._libs.llama, model._open()
    size = lib.llama_state_seq_get_size(ctx, 0)
    raw = (ctypes.c_uint8 * size)()
    assert lib.llama_state_seq_get_data(ctx, raw, size, 0) == size
    data = np.frombuffer(raw, np.uint8).copy()
    return [
        (
            data[p.at : p.at + 2 * p.width * len(p.positions)].view(np.float16).reshape(-1, p.width).astype(np.float32),
            p.positions,
            p.value,
        )
        for p in simulate._tensors(data, len(model.tokens))
    ]


def rows_of(model: simulate.Simulated) -> list[tuple[npt.NDArray[np.float32], bool]]:
    """Rows and roles of one cache of all tokens, in their order."""
    parts = parts_of(model)
    assert all(np.array_equal(positions, np.arange(len(model.tokens))) for _, positions, _ in parts)
    return [(rows, value) for rows, _, value in parts]


def fed(spec: str, path: Path, n_ubatch: int = 150) -> simulate.Simulated:
    model = specs.parse(spec).open(path, n_ctx=512, n_batch=n_ubatch, n_ubatch=n_ubatch, n_threads=2)
    assert isinstance(model, simulate.Simulated)
    for _ in model.feed(IDS):
        pass
    return model


def test_rotation() -> None:
    """Orthonormal, its own inverse, and upstream's sizes."""
    h = simulate.hadamard(64)
    assert np.allclose(h @ h, np.eye(64), atol=1e-5)
    assert np.isclose(abs(h), 0.125).all()
    sizes = [(simulate.rotation_size(d, False), simulate.rotation_size(d, True)) for d in (64, 80, 96, 128, 192, 256)]
    assert sizes == [(64, 64), (0, 0), (0, 0), (128, 64), (64, 64), (256, 64)]


@pytest.mark.parametrize("kind", simulate.TYPES)
def test_rounding_is_that_of_the_type(kind: str) -> None:
    """Blocks of the rotated row, taken back: what one block of the type may lose bounds the error."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((7, 2 * 128)).astype(np.float32)
    h = simulate.hadamard(128)
    got = simulate.rounded(rows, kind, 128, value=False)
    turned, back = rows.reshape(-1, 128) @ h, got.reshape(-1, 128) @ h
    top = abs(turned.reshape(-1, 32)).max(1, keepdims=True)
    step = {"q8_0": 1 / 127, "q5_0": 1 / 16, "q5_1": 2 / 31, "q4_0": 1 / 8, "q4_1": 2 / 15}[kind]
    off = abs(turned - back).reshape(-1, 32)
    # the block's end of the other sign has one code less in q4_0 and q5_0
    assert (off <= top * step * (1.01 if kind in ("q4_0", "q5_0") else 0.6)).all()  # scales are f16
    assert off.mean() > 0.05 * step


def test_cells_behind_the_window_are_rounded_and_no_others(demo_model: Path) -> None:
    """window=40, sinks=4, 150 cells in one batch: cells 4 .. 95 are rounded, pages of 32; then nothing twice."""
    with (
        fed("simulated:q4_0,window=512", demo_model) as exact,
        fed("simulated:q4_0,window=40,sinks=4", demo_model) as m,
    ):
        assert m._head_size == [64, 64] or m._head_size[0] % 32 == 0
        for (want, value), (got, _) in zip(rows_of(exact), rows_of(m), strict=True):
            rounded = simulate.rounded(want[4:96], "q4_0", m._head_size[value], value)
            assert np.array_equal(got[4:96], rounded.astype(np.float16).astype(np.float32))
            assert not np.array_equal(got[4:96], want[4:96])
            assert np.array_equal(got[:4], want[:4])
            assert np.array_equal(got[96:], want[96:])
        before = rows_of(m)
        list(m.feed([5]))
        for (x, _), (y, _) in zip(before, rows_of(m), strict=True):
            assert np.array_equal(x, y[:150])
        m.reset()
        list(m.feed(IDS[:20]))
        assert m._n_done == 0


@pytest.mark.parametrize("swa_full", [False, True])
def test_layers_with_a_sliding_window(swa_full: bool, demo_model: Path, tmp_path: Path) -> None:
    """They have a cache of their own. Of the cells that their window still sees, those behind ours are rounded."""
    path, n = gemma3(demo_model, tmp_path / "m.gguf", 3), 450
    ids = [1 + 7 * i % 500 for i in range(n)]
    seen = []
    for spec in ("simulated:q4_0,window=1024", "simulated:q4_0,window=40,sinks=4"):
        with specs.parse(spec).open(path, n_ctx=1024, n_batch=n, n_ubatch=n, n_threads=2, swa_full=swa_full) as m:
            assert isinstance(m, simulate.Simulated)
            list(m.feed(ids))
            seen.append(parts_of(m))
            assert all(np.isfinite(logits).all() for logits in m.feed([5]))
    assert {len(positions) for _, positions, _ in seen[0]} == {n, 192}  # a state holds what the window sees
    for (exact, positions, value), (got, same, _) in zip(*seen, strict=True):
        assert np.array_equal(positions, same)
        old = (positions >= 4) & (positions < (n - 40) // 32 * 32)
        rounded = simulate.rounded(exact[old], "q4_0", 32, value)
        assert np.array_equal(got[old], rounded.astype(np.float16).astype(np.float32))
        assert np.array_equal(got[~old], exact[~old])


def test_a_window_as_long_as_the_context_changes_nothing(demo_model: Path) -> None:
    """The logits of f16, and bits that say what the type and its window take."""
    with (
        fed("simulated:q8_0,window=512", demo_model, 50) as m,
        specs.parse("f16").open(demo_model, n_ctx=512, n_batch=50, n_ubatch=50, n_threads=2) as exact,
    ):
        for _ in exact.feed(IDS):
            pass
        assert np.array_equal(next(iter(m.feed([9]))), next(iter(exact.feed([9]))))
        assert m.kv_stats()["bits"] == 8.5 + 16
    with fed("simulated:q4_0,window=124,sinks=4", demo_model) as m:
        stats = m.kv_stats()
        assert (stats["bits"], stats["bits_no_window"]) == (4.5 + 4, 4.5)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("simulated:q2_k", "'q2_k' cannot be simulated; choose one of q4_0"),
        ("simulated:q4_0,window=-1", "'window=-1' is no option; write window=CELLS"),
        ("simulated:q4_0,rows=3", "'rows=3' is no option"),
    ],
)
def test_refusals(spec: str, words: str) -> None:
    """One line that names the value."""
    with pytest.raises(errors.MethodError, match=words):
        specs.parse(spec)


def test_other_caches_are_refused() -> None:
    """A state that is not of plain caches with a row a cell."""
    for data in (np.zeros(0, np.uint8), np.zeros(400, np.uint8), np.full(400, 255, np.uint8)):
        with pytest.raises(errors.KvqError, match="plain KV caches only"):
            simulate._tensors(data, 10)
    assert int(gguf.GGMLQuantizationType.F16) == 1


@pytest.mark.parametrize(
    ("argv", "lacks"),
    [
        (["bench", "-d", "16", "-n", "1", "-r", "1", "--rounds", "1", "-m"], "speed"),
        (["plot", "memory", "-o", "/nowhere/figure", "-m"], "layout"),
        (["info"], "layout"),
    ],
)
def test_only_eval_takes_them(
    argv: list[str], lacks: str, demo_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bench timed upstream's f16 once more, info planned its 16 bits: figures of no such cache."""
    assert cli.main([*argv, str(demo_model), "--cache", "simulated:q4_0,window=128"]) == 2
    expected = f"cache 'simulated:q4_0,window=128' is simulated and has no {lacks}; measure it with ggml-kvq eval"
    assert capsys.readouterr() == ("", f"ggml-kvq {argv[0]}: error: {expected}\n")
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main([argv[0], "--help"])
    assert "as for ggml-kvq eval" in (text := capsys.readouterr().out) and "but not simulated:" in text
